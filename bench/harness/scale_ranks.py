"""Times attention to one sequence that is divided over the processes that `torchrun` started, for
`bench.scale`."""

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nsa_torch
from nsa_torch import context, context_ranks

from . import scale_rows, timing
from .records import Values
from .scale_problem import RESULTS, Problem, judged


@contextlib.contextmanager
def devices(size: int) -> Iterator[DeviceMesh]:
    """Return a context with the mesh of all `size` ranks."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh("cuda" if cuda else "cpu", (size,), mesh_dim_names=("context",))
    try:
        yield mesh
    finally:
        dist.destroy_process_group()


def row(problem: Problem, mesh: DeviceMesh, samples: int) -> Values:
    """Measure a row. All ranks have the same sizes, so that memory runs out on all ranks or on
    none."""
    return Measured(problem, mesh, samples).row()


class Measured:
    """The part of a problem that this rank computes."""

    def __init__(self, problem: Problem, mesh: DeviceMesh, samples: int):
        self.problem, self.mesh, self.samples = problem, mesh, samples
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.device, self.cuda = mesh.device_type, mesh.device_type == "cuda"
        self.layout: Values = {"context_layout": problem.layout}
        self.place: Values = {}
        if self.size > 1:
            self.place = {"context_mesh": mesh, **self.layout}
        self.packed: Values = {"config": problem.config}
        if problem.documents:
            borders = torch.tensor([0, *itertools.accumulate(problem.documents)])
            sizes = {"config": problem.config, "device": mesh.device_type}
            self.packed["varlen"] = nsa_torch.varlen_metadata(borders, **sizes)

    def drawn(self, tokens: int, seed: int, device: str) -> list[torch.Tensor]:
        """Draw query, key, value and gates for `tokens` tokens."""
        draw = torch.Generator(device).manual_seed(seed)
        how: Values = {"generator": draw, "device": device}
        how["dtype"] = getattr(torch, self.problem.dtype)
        drawn = (torch.randn(1, tokens, *shape, **how) for shape in self.problem.shapes)
        return [self.leaf(x.to(self.device)) for x in drawn]

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_(self.problem.gradient)

    def tensors(self) -> list[torch.Tensor]:
        """Return the rank's own tokens. Each rank draws its random tokens, since a long sequence
        fits on no single device.
        """
        return self.drawn(self.problem.S // self.size, self.rank, self.device)

    def cut(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return context.shard_sequence(x, self.mesh, dim=dim, **self.layout)

    def call(self, tensors, place) -> list[torch.Tensor]:
        """Return the output. With `fwdbwd` also return the gradients, with the output as
        cotangent."""
        options = self.packed | place | {"recompute": self.problem.recompute}
        if not self.problem.gradient:
            with torch.no_grad():
                return [nsa_torch.attention(*tensors, **options)]
        out = nsa_torch.attention(*tensors, **options)
        return [out, *torch.autograd.grad(out, tensors, out.detach())]

    def row(self) -> Values:
        tensors = self.tensors()
        call = functools.partial(self.call, tensors, self.place)
        call()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        ms, _ = self.timed(call)
        found: Values = {"status": "ok"} | timing.spread(ms)
        found["memory_mib"] = None
        if self.cuda:
            peak = torch.cuda.max_memory_allocated() / 2**20
            found["memory_mib"] = max(self.everyone(peak))
        found |= {"compute_ms": found["ms"], "transport_ms": None, "imbalance": 1.0}
        if self.size > 1:
            with _without_transport():
                slowest, own = self.timed(call)
            found["compute_ms"] = statistics.median(slowest)
            each = self.everyone(statistics.median(own))
            found["imbalance"] = max(each) / statistics.mean(each)
            found["transport_ms"] = statistics.median(self.timed(self.transport(tensors))[0])
        del tensors, call
        return found | (self.rows() if self.problem.by_rows else self.parity())

    def transport(self, tensors) -> Callable[[], None]:
        """Return a function that makes all transfers of a call, without its computation."""
        _, key, value, _ = tensors
        ranks = context_ranks.Ranks(self.mesh, key.device)
        payload = torch.cat([key, value], dim=-1).detach()[0].transpose(0, 1).contiguous()
        times = 2 if self.problem.gradient else 1
        gradients = payload.new_zeros(self.size, *payload.shape[1:], dtype=torch.float32)

        def run():
            for head in itertools.chain(*[payload] * times):
                ranks.gather(head, "keys and values")()
            for _ in payload if self.problem.gradient else ():
                ranks.scatter_sum(gradients, "gradients")()

        return run

    def parity(self) -> Values:
        """Judge the results of all ranks. The selected blocks are given, since the choice of
        another block is not an arithmetic error."""
        problem = self.problem
        if self.size == 1 or problem.S > problem.checked:
            return {"errors": None}
        whole = self.drawn(problem.S, 0, "cpu")  # this is the same on every rank
        key = nsa_torch.compress(whole[1].detach(), **self.packed)
        given = {
            "block_indices": nsa_torch.select_blocks(whole[0].detach(), key, **self.packed)
        }
        wide = [self.leaf(x.float()) for x in whole]
        oracle = self.call(wide, given | {"implementation": "sdpa"})
        expected = [*map(self.cut, oracle)]
        del oracle, wide
        alone = self.errors(map(self.cut, self.call(whole, given)), expected)
        place = self.place | {"block_indices": self.cut(given["block_indices"])}
        own = [self.leaf(self.cut(x)) for x in whole]
        return judged(problem, self.errors(self.call(own, place), expected), alone)

    def rows(self) -> Values:
        """Judge a few rows of the output of all ranks, and the gradients that follow from these
        rows (`scale_rows`)."""
        problem, device = self.problem, self.device
        rows = scale_rows.rows_of(problem)
        _, position = scale_rows.places(problem)
        listed = lambda token: scale_rows.selection(
            position[token].to(device), problem.Hkv, problem.config
        )
        token = self.cut(torch.arange(problem.S, device=device), 0)
        # These are the judged rows of this rank, and their indices.
        own, at = (torch.tensor(rows, device=device)[:, None] == token).nonzero(as_tuple=True)
        tensors = self.tensors()
        query, key, value, gates = tensors
        draw = torch.Generator("cpu").manual_seed(0)
        weights = torch.randn(len(rows), problem.H, problem.Dv, generator=draw)
        weights = weights.to(query)
        do = query.new_zeros(*query.shape[:3], problem.Dv)
        do[0, at] = weights[own]
        options = self.packed | self.place | {"recompute": problem.recompute}
        options["block_indices"] = listed(token.cpu())[None]
        out = nsa_torch.attention(*tensors, **options)
        found, stray = [out.detach()[0, at]], False
        if problem.gradient:
            of_query, of_key, of_value, of_gates = torch.autograd.grad(out, tensors, do)
            found += [of_query[0, at], of_key, of_value, of_gates[0, at]]
            for x in (of_query, of_gates):
                x[0, at] = 0
                stray |= bool(x.any())
        del out, do

        def of_all_ranks(x):
            """Return the rows of `x` from all ranks, in float32."""
            whole = torch.zeros(len(rows), *x.shape[2:], device=device)
            whole[own] = x.detach()[0, at].float()
            dist.all_reduce(whole)
            return self.leaf(whole)

        joined = (context.unshard_sequence(x, self.mesh, **self.layout) for x in (key, value))
        wide = [of_all_ranks(query), *(self.leaf(x[0].float()) for x in joined)]
        wide.append(of_all_ranks(gates))
        arrays = wide[0], wide[3], listed(rows), wide[1], wide[2]
        wanted = scale_rows.oracle(problem, rows, *arrays)
        expected = [wanted.detach()[own]]
        if problem.gradient:
            grads = torch.autograd.grad(wanted, wide, weights.float())
            expected += [grads[0][own], *(self.cut(x[None]) for x in grads[1:3]), grads[3][own]]
        return judged(problem, self.errors(found, expected), stray=any(self.everyone(stray)))

    def errors(self, results, expected) -> dict[str, float]:
        """Return the root mean square of the errors divided by the root mean square of the expected
        values, over all ranks.
        """
        pairs = [
            ((x.float() - y).square().sum().item(), y.square().sum().item())
            for x, y in zip(results, expected, strict=True)
        ]
        sums = torch.tensor(self.everyone(pairs), dtype=torch.float64).sum(0).tolist()
        return {n: (e / y) ** 0.5 for n, (e, y) in zip(RESULTS, sums, strict=False)}

    def timed(self, call: Callable[[], Any]) -> tuple[list[float], list[float]]:
        """Return the times of all samples in milliseconds, for the slowest rank and for this
        rank. All ranks start a sample together.
        """

        wait = torch.cuda.synchronize if self.cuda else lambda: None
        own = []
        call()
        for _ in range(self.samples):
            wait()
            dist.barrier()
            own += timing.in_a_row(call, samples=1, wait=lambda _: wait(), done=True)
        return [max(each) for each in zip(*self.everyone(own), strict=True)], own

    def everyone(self, x: Any) -> list[Any]:
        """Gather `x` from all ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x)
        return found


@contextlib.contextmanager
def _without_transport() -> Iterator[None]:
    """Return a context in which copies of this rank's data replace the data of other ranks. In this
    context, a call does all its computation without transport. The results of a call without
    transport are meaningless.
    """
    kind = context_ranks.Ranks
    before = kind.gather, kind.scatter_sum

    def gather(self, x, what):
        found = x.expand(self.size, *x.shape).contiguous()
        return lambda: found

    def scatter_sum(self, x, what):
        found = x[self.rank].clone()
        return lambda: found

    kind.gather, kind.scatter_sum = gather, scatter_sum
    try:
        yield
    finally:
        kind.gather, kind.scatter_sum = before

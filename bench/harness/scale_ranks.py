"""One sequence over the processes that `torchrun` started, timed: what `bench.scale` measures in
torch. Rank 0 prints a line of JSON a measurement.
"""

import contextlib
import functools
import itertools
import json
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nsa_torch
from nsa_torch import context, context_ranks

from . import scale_rows
from .scale_problem import RESULTS, Problem, judged, spread


def run(problems: list[Problem], size: int, samples: int) -> None:
    """Measures every problem on all ranks."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh("cuda" if cuda else "cpu", (size,), mesh_dim_names=("context",))
    try:
        for problem in problems:
            try:
                found = Measured(problem, mesh, samples).row()
            except torch.cuda.OutOfMemoryError as error:  # the same on every rank
                found = {"status": "unsupported", "reason": str(error).split(".")[0]}
            if rank == 0:
                print(json.dumps(problem.about | {"devices": size} | found), flush=True)
    finally:
        dist.destroy_process_group()


class Measured:
    """A problem on this rank."""

    def __init__(self, problem: Problem, mesh: DeviceMesh, samples: int):
        self.problem, self.mesh, self.samples = problem, mesh, samples
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.cuda = mesh.device_type == "cuda"
        self.place: dict[str, Any] = {}
        if self.size > 1:
            self.place = {"context_mesh": mesh, "context_layout": problem.layout}
        self.packed: dict[str, Any] = {"config": problem.config}
        if problem.documents:
            borders = torch.tensor([0, *itertools.accumulate(problem.documents)])
            sizes = {"config": problem.config, "device": mesh.device_type}
            self.packed["varlen"] = nsa_torch.varlen_metadata(borders, **sizes)

    def tensors(self) -> list[torch.Tensor]:
        """The rank's own tokens. Each rank draws its random tokens, since a long sequence
        fits on no device."""
        tokens = self.problem.S // self.size
        draw = torch.Generator(self.mesh.device_type).manual_seed(self.rank)
        return [
            torch.randn(
                1,
                tokens,
                *shape,
                generator=draw,
                device=self.mesh.device_type,
                dtype=getattr(torch, self.problem.dtype),
            ).requires_grad_(self.problem.gradient)
            for shape in self.problem.shapes
        ]

    def whole(self) -> list[torch.Tensor]:
        """All tokens, the same on every rank."""
        draw = torch.Generator("cpu").manual_seed(0)
        dtype = getattr(torch, self.problem.dtype)
        shapes = ((1, self.problem.S, *shape) for shape in self.problem.shapes)
        drawn = (torch.randn(*shape, generator=draw).to(dtype) for shape in shapes)
        return [x.to(self.mesh.device_type) for x in drawn]

    def call(self, tensors, place) -> list[torch.Tensor]:
        """The output, and with `fwdbwd` the gradients, with the output as cotangent."""
        options = self.packed | place | {"recompute": self.problem.recompute}
        if not self.problem.gradient:
            with torch.no_grad():
                return [nsa_torch.attention(*tensors, **options)]
        out = nsa_torch.attention(*tensors, **options)
        return [out, *torch.autograd.grad(out, tensors, out.detach())]

    def row(self) -> dict[str, Any]:
        tensors = self.tensors()
        call = functools.partial(self.call, tensors, self.place)
        call()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        ms, _ = self.timed(call)
        found: dict[str, Any] = {"status": "ok"} | spread(ms)
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
        """Moves what a call moves of keys and values, and computes nothing."""
        _, key, value, _ = tensors
        ranks = context_ranks.Ranks(self.mesh, key.device)
        payload = torch.cat([key, value], dim=-1).detach()[0].transpose(0, 1).contiguous()
        gradients = None
        if self.problem.gradient:
            gradients = payload.new_zeros(self.size, *payload.shape[1:], dtype=torch.float32)

        def run():
            for _ in range(2 if self.problem.gradient else 1):
                for head in payload:
                    ranks.gather(head, "keys and values")()
            if gradients is not None:
                for _ in payload:
                    ranks.scatter_sum(gradients, "gradients")()

        return run

    def parity(self) -> dict[str, Any]:
        """`judged` of all ranks' results, on a selection that is given: a block more or less is no
        error of arithmetic."""
        problem = self.problem
        if self.size == 1 or not problem.judged:
            return {"errors": None}
        whole = self.whole()
        compressed = nsa_torch.compress(whole[1], **self.packed)
        indices = nsa_torch.select_blocks(whole[0], compressed, **self.packed)
        wanting = lambda xs: [x.detach().requires_grad_(problem.gradient) for x in xs]
        given = {"block_indices": indices}
        oracle = self.call(
            wanting(x.float() for x in whole), given | {"implementation": "sdpa"}
        )
        cut = lambda x: context.shard_sequence(x, self.mesh, context_layout=problem.layout)
        expected = [cut(x) for x in oracle]
        del oracle
        alone = self.errors(map(cut, self.call(wanting(whole), given)), expected)
        place = self.place | {"block_indices": cut(indices)}
        found = self.errors(self.call(wanting(map(cut, whole)), place), expected)
        return judged(problem, found, alone)

    def rows(self) -> dict[str, Any]:
        """A few rows of all ranks, and every gradient that follows from them (`scale_rows`)."""
        problem, device = self.problem, self.mesh.device_type
        rows = scale_rows.rows_of(problem)
        layout = {"context_layout": problem.layout}
        cut = lambda x, dim: context.shard_sequence(x, self.mesh, dim=dim, **layout)
        token = cut(torch.arange(problem.S, device=device), 0)
        _, position = scale_rows.places(problem)
        indices = scale_rows.selection(position.to(device)[token], problem.Hkv, problem.config)
        tensors = self.tensors()
        query, _, values, gates = tensors
        at_row = {row: at for at, row in enumerate(token.tolist()) if row in set(rows)}
        mine = [row for row in rows if row in at_row]
        at = [at_row[row] for row in mine]
        draw = torch.Generator(device).manual_seed(self.rank)
        weights = query.new_zeros(*query.shape[:3], values.shape[-1])
        for each in at:
            weights[0, each] = torch.randn(weights.shape[2:], generator=draw, device=device)
        options = self.packed | self.place
        options |= {"block_indices": indices[None], "recompute": problem.recompute}
        out = nsa_torch.attention(*tensors, **options)
        found, stray = [out.detach()[0, at]], False
        if problem.gradient:
            of_query, of_key, of_value, of_gates = torch.autograd.grad(out, tensors, weights)
            found += [of_query[0, at], of_key, of_value, of_gates[0, at]]
            for x in (of_query, of_gates):
                x[0, at] = 0
                stray |= bool(x.any())
        del out
        inputs = [x.detach()[0, at].cpu() for x in (query, gates, weights)]
        inputs.append(indices[at].cpu())
        each = itertools.chain(*(zip(*x, strict=True) for x in self.everyone([mine, *inputs])))
        wanting = lambda x: x.to(device).float().requires_grad_(problem.gradient)
        rows_of_all = [
            (wanting(q), wanting(g), w.to(device).float(), blocks.to(device))
            for _, q, g, w, blocks in sorted(each, key=operator.itemgetter(0))
        ]
        key, value = (
            wanting(context.unshard_sequence(x.detach(), self.mesh, **layout)[0])
            for x in tensors[1:3]
        )
        row_inputs = [(q, g, blocks) for q, g, _, blocks in rows_of_all]
        wanted = scale_rows.oracle(problem, rows, key, value, row_inputs)
        own = [i for i, row in enumerate(rows) if row in at_row]
        of_own = lambda xs: torch.stack([*xs])[own].detach()
        expected = [of_own(wanted)]
        if problem.gradient:
            queries, gates_, weights_, _ = zip(*rows_of_all, strict=True)
            grads = torch.autograd.grad(wanted, [key, value, *queries, *gates_], weights_)
            of_pair = [cut(x[None], 1) for x in grads[:2]]
            half = 2 + len(rows)
            expected += [of_own(grads[2:half]), *of_pair, of_own(grads[half:])]
        stray = any(self.everyone(stray))
        return judged(problem, self.errors(found, expected), stray=stray)

    def errors(self, results, expected) -> dict[str, float]:
        """Errors relative to the root mean square of the expected values, over all ranks."""
        pairs = [
            ((x.float() - y).square().sum().item(), y.square().sum().item())
            for x, y in zip(results, expected, strict=True)
        ]
        sums = [
            list(map(sum, zip(*each, strict=True)))
            for each in zip(*self.everyone(pairs), strict=True)
        ]
        return {n: (e / y) ** 0.5 for n, (e, y) in zip(RESULTS, sums, strict=False)}

    def timed(self, call: Callable[[], Any]) -> tuple[list[float], list[float]]:
        """Milliseconds: of the slowest rank, and of this one; ranks start together."""
        slowest, own = [], []
        call()
        for _ in range(self.samples):
            if self.cuda:
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            own.append((time.perf_counter() - start) * 1e3)
        slowest = [max(each) for each in zip(*self.everyone(own), strict=True)]
        return slowest, own

    def everyone(self, x: Any) -> list[Any]:
        """`x` of all ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x)
        return found


@contextlib.contextmanager
def _without_transport() -> Iterator[None]:
    """Within: data of other ranks are replaced with this rank's own, so that a call does all its
    work and waits for no other rank. Its results are nonsense."""
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

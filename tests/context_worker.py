"""What the ranks of `test_context` do; four processes are started once for all cases."""

import dataclasses
import functools
import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nsa_torch
from bench.harness.scale_problem import Problem
from bench.harness.scale_ranks import Measured
from nsa_core import context_layout as layouts
from nsa_torch import (
    Branches,
    NSAConfig,
    PoolParams,
    RopeMLPParams,
    call,
    context,
    context_ranks,
)
from tests.spawned import raised
from tests.tables import table

RANKS, TIMEOUT_S = 4, 20
CONFIG = NSAConfig(8, 4, 8, num_selected=4, window=12)


@dataclasses.dataclass(frozen=True)
class Case:
    length: int
    batch: int = 1
    layout: str = "zigzag"
    lengths: tuple[int, ...] | None = None  # of packed sequences
    separate: bool = False  # keys and values of each branch
    learned: bool = False  # parameters of phi
    rope: bool = False  # of keys: an MLP, the compressed ones rotated
    recompute: bool = False
    given: bool = False  # block indices
    implementation: str | None = None
    apart: bool = False  # each key/value head is gathered by itself
    autocast: bool = False  # of the ranks alone: it changes nothing
    heads: int = 1  # groups of ranks that have other heads
    checkpoint: bool = False
    nan: bool = False  # in the values of the last token


TABLE = table("context")
CASES = {
    name: Case(**{x: tuple(y) if x == "lengths" else y for x, y in row.items()})
    for name, row in TABLE["cases"].items()
}
PLAIN = Case(48)
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
NAMES = ("query", "key", "value", "gates", "key_weight", "value_weight")


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Whole inputs by name, the same in every process."""
    rng = np.random.default_rng(case.length)
    normal = lambda *shape: torch.tensor(rng.normal(size=shape), dtype=torch.float32)
    rows, copies = (case.batch, case.length), 3 if case.separate else 1
    found = {
        "query": normal(*rows, HEADS, WIDTH),
        "key": normal(copies, *rows, KV_HEADS, WIDTH),
        "value": normal(copies, *rows, KV_HEADS, VALUE_WIDTH),
        "gates": normal(*rows, HEADS, 3),
        "key_weight": normal(CONFIG.compress_block, WIDTH),
        "value_weight": normal(CONFIG.compress_block, VALUE_WIDTH),
        "do": normal(*rows, HEADS, VALUE_WIDTH),
    }
    if case.nan:
        found["value"][:, :, -1] = torch.nan
    return found


def phi(case: Case, key_weight, value_weight, as_array=torch.tensor) -> tuple:
    """Parameters of the compression of keys and of values, in either framework."""
    if not case.learned:
        return None, None
    if not case.rope:
        return PoolParams(key_weight), PoolParams(value_weight)
    rng = np.random.default_rng(3)
    normal = lambda *shape: as_array(rng.normal(size=shape).astype(np.float32) / 8)
    shapes = (CONFIG.compress_block * WIDTH, 5), (5,), (5, WIDTH), (WIDTH,)
    rates = as_array((10.0 ** -np.arange(WIDTH // 2)).astype(np.float32))
    params = RopeMLPParams(key_weight, *(normal(*x) for x in shapes), rates)
    return params, PoolParams(value_weight)


def run(case: Case, x: dict, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Output, indices and gradients of the tensors `x`, on one device or on this rank."""
    place = {} if mesh is None else {"context_mesh": mesh, "context_layout": case.layout}
    borders = None if case.lengths is None else torch.tensor(np.cumsum([0, *case.lengths]))
    packed = {"config": CONFIG, "cu_seqlens": borders}
    x = {name: t.clone().requires_grad_(name != "do") for name, t in x.items()}
    key, value = (
        Branches(*x[name]) if case.separate else x[name][0] for name in ("key", "value")
    )
    api = nsa_torch if mesh is None else context
    parts = (Branches.each(key), Branches.each(value))
    params = phi(case, x["key_weight"], x["value_weight"])
    compressed = tuple(
        api.compress(t.compressed, p, **packed, **place)
        for t, p in zip(parts, params, strict=True)
    )
    chosen = {"implementation": case.implementation, **packed, **place}
    indices = api.select_blocks(x["query"].detach(), compressed[0].detach(), **chosen)
    if mesh is not None and case.lengths is not None:
        # Metadata of the whole row, too.
        total = mesh.size() * x["query"].shape[1]
        sizes = {"total": total, "config": CONFIG}
        chosen["varlen"] = nsa_torch.varlen_metadata(chosen.pop("cu_seqlens"), **sizes)
    attend = lambda query, gates: nsa_torch.attention(
        query,
        key,
        value,
        gates,
        compressed=compressed if case.learned else None,
        block_indices=indices if case.given else None,
        recompute=case.recompute,
        **chosen,
    )
    if case.checkpoint and mesh is not None:
        checkpoint = torch.utils.checkpoint.checkpoint
        attend = functools.partial(checkpoint, attend, use_reentrant=False)
    out = attend(x["query"], x["gates"])
    out.backward(x["do"])
    found = {"out": out.detach(), "indices": indices, "k_cmp": compressed[0].detach()}
    return found | {f"d {name}": x[name].grad for name in NAMES if x[name].grad is not None}


def axes_of(name: str) -> tuple[int, int] | None:
    """Of tokens and of heads; None: a parameter."""
    name = name.removeprefix("d ")
    return None if name.endswith("_weight") else (2, 3) if name in ("key", "value") else (1, 2)


def mine(case: Case, mesh: DeviceMesh, heads: DeviceMesh | None = None) -> dict:
    """This rank's part of the tensors; heads lie as tokens in the contiguous layout."""
    found = {}
    for name, t in tensors(case).items():
        if (axes := axes_of(name)) is not None:
            t = context.shard_sequence(t, mesh, dim=axes[0], context_layout=case.layout)
            if heads is not None:
                t = context.shard_sequence(t, heads, dim=axes[1], context_layout="contiguous")
        found[name] = t
    return found


def units(case: Case):
    """Within: bytes of heads that are gathered together are as the case has them."""
    size = 1 if case.apart else layouts.UNIT_BYTES
    return mock.patch.object(layouts, "UNIT_BYTES", size)


def several(case: Case, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """`run` on shards, the results put together again."""
    heads = None
    if case.heads > 1:
        sizes = RANKS // case.heads, case.heads
        both = init_device_mesh("cpu", sizes, mesh_dim_names=("context", "heads"))
        mesh, heads = both["context"], both["heads"]
    with (
        units(case),
        torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
    ):
        found = run(case, mine(case, mesh, heads), mesh)
    put = context.unshard_sequence
    for name, t in found.items():
        if (axes := axes_of(name)) is None:
            dist.all_reduce(t, group=mesh.get_group())
            continue
        if name != "k_cmp":
            sizes = {"length": case.length, "context_layout": case.layout}
            t = put(t, mesh, dim=axes[0], **sizes)
        if heads is not None:
            t = put(t, heads, dim=axes[1], context_layout="contiguous")
        found[name] = t
    return found


def plain(mesh, x: dict, config=CONFIG, **options):
    arguments = (x["query"], x["key"][0], x["value"][0], x["gates"])
    return nsa_torch.attention(*arguments, config=config, context_mesh=mesh, **options)


def cut(x: dict, count: int) -> dict:
    """The first tokens."""
    return {
        n: t if axes_of(n) is None else t.narrow(axes_of(n)[0], 0, count) for n, t in x.items()
    }


def bad_input(mesh: DeviceMesh) -> dict[str, str]:
    """What is raised on this rank; in some calls rank 2 has other arguments than the others."""
    odd = mesh.get_local_rank() == 2
    x = mine(PLAIN, mesh)
    each = lambda function: {name: function(t) for name, t in x.items()}
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    borders, other = (torch.tensor([0, at, 48]) for at in (20, 30))
    metadata = nsa_torch.varlen_metadata
    varlen = metadata(torch.tensor([0, 48]), total=48, config=CONFIG)
    means = lambda key: context.compress(key, config=CONFIG, context_mesh=mesh)

    def wants(name):
        return {n: t.detach().requires_grad_(n == name) for n, t in x.items()}

    def out_of_date(recompute):
        """A backward pass after the borders were written to."""
        meta = metadata(borders, config=CONFIG)
        out = plain(mesh, wants("key"), varlen=meta, recompute=recompute)
        meta.update(other)
        out.sum().backward()

    def twice_differentiated(made, x):
        torch.autograd.grad(made(x).sum(), x, create_graph=True)

    query, key = wants("query")["query"], wants("key")["key"]
    others = {
        "length": cut(x, 4),
        "dtype": each(torch.Tensor.half),
        "invalid": x | {"value": x["value"][:, :, 1:]},
        "axes of query": x | {"query": x["query"][0]},
        "kind": x | {"query": x["query"].numpy()},
    }
    calls = {
        name: functools.partial(plain, mesh, other if odd else x)
        for name, other in others.items()
    }
    calls |= {
        "metadata": lambda: plain(mesh, x, varlen="none" if odd else varlen),
        "gradient": lambda: plain(mesh, wants("key" if odd else "query")),
        "gradient of means": lambda: means(wants("key" if odd else "")["key"][0]),
        "sequences": lambda: plain(mesh, x, cu_seqlens=borders[: 2 if odd else 3]),
        "odd": lambda: plain(mesh, cut(x, 3)),
        "layout": lambda: plain(mesh, x, context_layout="striped"),
        "device": lambda: plain(mesh, each(lambda t: t.to("meta"))),
        "axes": lambda: plain(square, x),
        "mesh": lambda: plain(mesh.get_group(), x),
        "8 bits": lambda: plain(mesh, x, NSAConfig(compute_dtype="float8_e4m3")),
        "second derivative": lambda: twice_differentiated(
            lambda t: plain(mesh, x | {"query": t}), query
        ),
        "second derivative of means": lambda: twice_differentiated(lambda t: means(t[0]), key),
        "borders written to": lambda: out_of_date(False),
        "borders written to, recompute": lambda: out_of_date(True),
        "after": lambda: plain(mesh, x),
    }
    return {name: raised(call) for name, call in calls.items()}


def twice(mesh: DeviceMesh) -> bool:
    """Whether a graph that is retained gives the same gradients again, and those of one pass."""
    found = []
    for passes in (2, 1):
        x = mine(PLAIN, mesh)
        wanted = [x[name].requires_grad_() for name in ("query", "key", "gates")]
        out = plain(mesh, x)
        for i in range(passes):
            keep = i + 1 < passes
            found.append(torch.autograd.grad(out, wanted, x["do"], retain_graph=keep))
    return all(torch.equal(a, b) for one in found for a, b in zip(found[0], one, strict=True))


def known_calls(group) -> dict[str, object]:
    """Calls of signatures that all ranks have seen, that some have, and where one rank says
    something else: as on a GPU, where a rank decides nothing anew.
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    x, odd = mine(Case(96), mesh), mesh.get_local_rank() == 2
    apart = x | {"query": x["query"].transpose(1, 2).contiguous().transpose(1, 2)}
    with (
        mock.patch.object(call, "DEVICE_TYPES", ("cpu",)),
        mock.patch.object(context_ranks, "agree", wraps=context_ranks.agree) as agree,
    ):
        first, again = plain(mesh, x), plain(mesh, x)
        plain(mesh, x, scale=0.5), plain(mesh, cut(x, 12))
        seen = agree.call_count
        # One rank's tensors lie otherwise: it asks anew, the others tell it.
        mixed = plain(mesh, apart if odd else x)
        more = agree.call_count - seen
        # All ranks know both calls, and one makes the other one.
        scale = raised(lambda: plain(mesh, x, **({"scale": 0.5} if odd else {})))
        after = plain(mesh, x)
        # One rank makes a call that it has never made.
        new = raised(lambda: plain(mesh, x, **({"recompute": True} if odd else {})))
    equal = [torch.equal(found, first) for found in (again, mixed, after)]
    return {"seen": seen, "asked": more, "equal": equal, "scale": scale, "new": new}


def through_layer(mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients of a module on a packed row; the ranks' sums."""
    torch.manual_seed(0)
    module = nsa_torch.NSAAttention(
        16, HEADS, KV_HEADS, 8, 6, l=8, d=4, l_sel=8, n_sel=4, w=12, phi="mlp_rope",
        phi_hidden=8, gate="head", key_taps=3, context_mesh=mesh,
    )  # fmt: skip
    x, do = torch.randn(2, 1, 48, 16)
    if mesh is not None:
        x, do = (context.shard_sequence(t, mesh) for t in (x, do))
    x.requires_grad_()
    out, _ = module(x, cu_seqlens=torch.tensor([0, 29, 48]))
    out.backward(do)
    found = {"out": out.detach(), "d x": x.grad}
    if mesh is not None:
        found = {name: context.unshard_sequence(t, mesh) for name, t in found.items()}
    for name, parameter in module.named_parameters():
        if mesh is not None:
            dist.all_reduce(parameter.grad)
        found[f"d {name}"] = parameter.grad
    return found


def own_share(self, x, what):
    """In place of a sum over the ranks, a rank's own part of it."""
    return lambda: x[self.rank].clone()


def scaling(mesh: DeviceMesh) -> dict[str, dict]:
    """Rows of `bench.scale`, and one where ranks do not add their gradients up."""
    rows = {}
    for mode in ("forward", "fwdbwd"):
        sizes = {"S": 96, "H": HEADS, "Hkv": KV_HEADS, "D": WIDTH, "Dv": VALUE_WIDTH}
        about = {"framework": "torch", "mode": mode, "layout": "zigzag", "dtype": "float32"}
        problem = Problem(**about, **sizes, checked=96, config=CONFIG)
        rows[mode] = Measured(problem, mesh, 2).row()
    with mock.patch.object(context_ranks.Ranks, "scatter_sum", own_share):
        rows["mutant"] = Measured(problem, mesh, 1).parity()
    return rows


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, timeout = dist.FileStore(str(folder / "store"), RANKS), timedelta(seconds=TIMEOUT_S)
    group = {"store": store, "rank": rank, "world_size": RANKS, "timeout": timeout}
    dist.init_process_group("gloo", **group)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("context",))
    results = {name: several(case, mesh) for name, case in CASES.items()}
    for make in (through_layer, scaling, twice, bad_input):
        results[make.__name__] = make(mesh)
    results["known calls"] = known_calls(dist.new_group())  # whose ranks fall out of step
    if rank < 3:
        start = time.monotonic()
        x = mine(PLAIN, mesh)
        results["gone"] = raised(lambda: plain(mesh, x)), time.monotonic() - start
    torch.save(results, folder / f"results.{rank}.pt")
    os._exit(9 if rank == 3 else 0)


def main_on_gpus(rank: int, folder: Path) -> None:
    """Two ranks on kernels: results of three calls, and those of one GPU. Then one rank makes
    another call, of which both know the kind, and the process ends: by itself, or aborted.
    """
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    shapes = (16, 128), (1, 128), (1, 128), (16, 3)
    whole = [torch.randn(1, 4096, *shape).cuda().bfloat16() for shape in shapes]
    # A block more or less is no error of arithmetic.
    config = NSAConfig()
    compressed = nsa_torch.compress(whole[1], config=config)
    indices = nsa_torch.select_blocks(whole[0], compressed, config=config)
    own = [context.shard_sequence(x, mesh) for x in (*whole, indices)]

    def call(*x, **options):
        *x, blocks = [t.detach().requires_grad_(t.is_floating_point()) for t in x]
        out = nsa_torch.attention(*x, block_indices=blocks, implementation="mosaic", **options)
        return [out.detach(), *torch.autograd.grad(out, x, out.detach())]

    put = lambda found: [context.unshard_sequence(x, mesh).cpu() for x in found]
    found = {"alone": [x.cpu() for x in call(*whole, indices)]}
    found["ranks"] = [put(call(*own, context_mesh=mesh)) for _ in range(3)]
    torch.save(found, folder / f"results.{rank}.pt")
    call(*own, context_mesh=mesh, recompute=True)
    torch.cuda.synchronize()
    options = {"recompute": bool(rank), "context_mesh": mesh}
    # NCCL's watchdog may end the process before the host learns what the device found.
    error = raised(lambda: (call(*own, **options), torch.cuda.synchronize()))
    os._exit(0 if "device-side assert" in error else 1)

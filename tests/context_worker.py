"""What the ranks of `test_context` do; four processes are started once for all cases."""

import contextlib
import dataclasses
import os
import time
from datetime import timedelta
from pathlib import Path

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
    context_compress,
    context_ranks,
)

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
    config: NSAConfig = CONFIG
    apart: bool = False  # each key/value head is gathered by itself
    autocast: bool = False  # of the ranks alone: it changes nothing


CASES = {
    "zigzag": Case(96, batch=2, separate=True, given=True, apart=True, learned=True, rope=True),
    "contiguous": Case(96, batch=2, layout="contiguous"),
    "recompute": Case(96, recompute=True, separate=True),
    "autocast": Case(96, learned=True, rope=True, given=True, autocast=True),
    "learned": Case(96, learned=True, separate=True, apart=True),
    "odd-length": Case(91, learned=True, rope=True),  # chunks of 12, padding of 5
    "odd-chunks": Case(103, learned=True, rope=True, apart=True),  # chunks of 13, and d = 4
    "short-chunks": Case(40, learned=True),  # of 5, where the halo is 7
    "packed": Case(96, lengths=(20, 1, 43, 8, 14), separate=True, learned=True, rope=True),
    "packed-odd": Case(101, layout="contiguous", lengths=(0, 61, 3, 30), learned=True),
    "packed-short": Case(40, lengths=(25, 1, 14)),  # chunks of 5
    "reference": Case(52, lengths=(31, 17), implementation="reference"),
    "tiny": Case(6),
}
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
NAMES = ("query", "key", "value", "gates", "key_weight", "value_weight")


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Whole inputs by name, the same in every process."""
    rng = np.random.default_rng(case.length)
    normal = lambda *shape: torch.tensor(rng.normal(size=shape), dtype=torch.float32)
    rows, copies = (case.batch, case.length), 3 if case.separate else 1
    return {
        "query": normal(*rows, HEADS, WIDTH),
        "key": normal(copies, *rows, KV_HEADS, WIDTH),
        "value": normal(copies, *rows, KV_HEADS, VALUE_WIDTH),
        "gates": normal(*rows, HEADS, 3),
        "key_weight": normal(case.config.compress_block, WIDTH),
        "value_weight": normal(case.config.compress_block, VALUE_WIDTH),
        "do": normal(*rows, HEADS, VALUE_WIDTH),
    }


def phi(case: Case, key_weight, value_weight, as_array=torch.tensor) -> tuple:
    """Parameters of the compression of keys and of values, in either framework."""
    if not case.learned:
        return None, None
    if not case.rope:
        return PoolParams(key_weight), PoolParams(value_weight)
    rng = np.random.default_rng(3)
    normal = lambda *shape: as_array(rng.normal(size=shape).astype(np.float32) / 8)
    shapes = (case.config.compress_block * WIDTH, 5), (5,), (5, WIDTH), (WIDTH,)
    rates = as_array((10.0 ** -np.arange(WIDTH // 2)).astype(np.float32))
    return RopeMLPParams(key_weight, *(normal(*x) for x in shapes), rates), PoolParams(
        value_weight
    )


def cu_seqlens(case: Case) -> torch.Tensor | None:
    if case.lengths is None:
        return None
    return torch.tensor(np.cumsum([0, *case.lengths]))


def run(case: Case, x: dict, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Output, indices and gradients of the tensors `x`, on one device or on this rank."""
    place = {} if mesh is None else {"context_mesh": mesh, "context_layout": case.layout}
    packed = {"config": case.config, "cu_seqlens": cu_seqlens(case)}
    x = {name: t.clone().requires_grad_(name != "do") for name, t in x.items()}
    key, value = (
        Branches(*x[name]) if case.separate else x[name][0] for name in ("key", "value")
    )
    params = phi(case, x["key_weight"], x["value_weight"])
    parts = zip((Branches.each(key), Branches.each(value)), params, strict=True)
    compress = nsa_torch.compress if mesh is None else context.compress
    compressed = tuple(compress(t.compressed, p, **packed, **place) for t, p in parts)
    select = nsa_torch.select_blocks if mesh is None else context.select_blocks
    chosen = {"implementation": case.implementation, **packed, **place}
    indices = select(x["query"].detach(), compressed[0].detach(), **chosen)
    if mesh is not None and case.lengths is not None:
        # Metadata of the whole row, too.
        total, borders = mesh.size() * x["query"].shape[1], chosen.pop("cu_seqlens")
        sizes = {"total": total, "config": case.config}
        chosen["varlen"] = nsa_torch.varlen_metadata(borders, **sizes)
    out = nsa_torch.attention(
        x["query"],
        key,
        value,
        x["gates"],
        compressed=compressed if case.learned else None,
        block_indices=indices if case.given else None,
        recompute=case.recompute,
        **chosen,
    )
    out.backward(x["do"])
    found = {"out": out.detach(), "indices": indices, "k_cmp": compressed[0].detach()}
    return found | {f"d {name}": x[name].grad for name in NAMES if x[name].grad is not None}


def token_axis(name: str) -> int | None:
    name = name.removeprefix("d ")
    return None if name.endswith("_weight") else 2 if name in ("key", "value") else 1


def several(case: Case, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """`run` on shards, the results put together again."""
    shard = {"context_layout": case.layout}
    with (
        changed(layouts, "UNIT_BYTES", 1 if case.apart else layouts.UNIT_BYTES),
        torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
    ):
        found = run(case, mine(case, mesh), mesh)
    whole = {}
    for name, t in found.items():
        dim = token_axis(name)
        if name == "k_cmp":
            whole[name] = t
        elif dim is None:
            dist.all_reduce(t, group=mesh.get_group())
            whole[name] = t
        else:
            whole[name] = context.unshard_sequence(
                t, mesh, dim=dim, length=case.length, **shard
            )
    return whole


@contextlib.contextmanager
def changed(where, name: str, value):
    kept = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, kept)


def no_halo(ranks, shards, x, halo):
    """Zeros in its place; the collective is the same."""
    return torch.zeros_like(_halo(ranks, shards, x, halo))


def own_share(self, x, what):
    """A rank's own part of the sum."""
    return lambda: x[self.rank].clone()


_halo = context_compress._halo
MUTANTS = {  # what it changes, and the case that it is run on
    "order": (layouts, "chunk_places", lambda size, layout: list(range(2 * size))),
    "halo": (context_compress, "_halo", no_halo),
    "reduce-scatter": (context_ranks.Ranks, "scatter_sum", own_share),
}
MUTATED = Case(48, learned=True)


def raised(call) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:  # NotImplementedError among them
        return f"{type(error).__name__}: {error}"
    return ""


def plain(mesh, x: dict, **options):
    arguments = (x["query"], x["key"][0], x["value"][0], x["gates"])
    return nsa_torch.attention(*arguments, config=CONFIG, context_mesh=mesh, **options)


def mine(case: Case, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    found = {}
    for name, t in tensors(case).items():
        dim = token_axis(name)
        if dim is not None:
            t = context.shard_sequence(t, mesh, dim=dim, context_layout=case.layout)
        found[name] = t
    return found


def bad_input(mesh: DeviceMesh) -> dict[str, str]:
    """What is raised on this rank."""
    odd = mesh.get_local_rank() == 2
    x = mine(Case(48), mesh)
    cut = {name: t[:, :, :4] if name in ("key", "value") else t[:, :4] for name, t in x.items()}
    half = {name: t.half() for name, t in x.items()}
    unequal = dict(x, value=x["value"][:, :, 1:])
    single = {
        name: t[:, :, :3] if name in ("key", "value") else t[:, :3] for name, t in x.items()
    }
    meta = {name: t.to("meta") for name, t in x.items()}
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    packed = torch.tensor([0, 20, 48])[: 2 if odd else 3]
    varlen = nsa_torch.varlen_metadata(torch.tensor([0, 48]), total=48, config=CONFIG)

    def one_wants(name):
        return {n: t.detach().requires_grad_(n == name) for n, t in x.items()}

    calls = {
        "length": lambda: plain(mesh, cut if odd else x),
        "dtype": lambda: plain(mesh, half if odd else x),
        "invalid": lambda: plain(mesh, unequal if odd else x),
        "axes of query": lambda: plain(mesh, dict(x, query=x["query"][0]) if odd else x),
        "kind": lambda: plain(mesh, dict(x, query=x["query"].numpy()) if odd else x),
        "metadata": lambda: plain(mesh, x, varlen="none" if odd else varlen),
        "gradient": lambda: plain(mesh, one_wants("key" if odd else "query")),
        "gradient of means": lambda: context.compress(
            one_wants("key" if odd else "")["key"][0], config=CONFIG, context_mesh=mesh
        ),
        "sequences": lambda: plain(mesh, x, cu_seqlens=packed),
        "odd": lambda: plain(mesh, single),
        "layout": lambda: plain(mesh, x, context_layout="striped"),
        "device": lambda: plain(mesh, meta),
        "axes": lambda: plain(square, x),
        "mesh": lambda: plain(mesh.get_group(), x),
        "after": lambda: plain(mesh, x),
    }
    return {name: raised(call) for name, call in calls.items()}


def with_nan(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Output and gradient of the queries where the values of the last token are NaN."""
    case, whole = Case(96), tensors(Case(96))
    whole["value"][0, :, -1] = float("nan")
    x = {
        name: context.shard_sequence(t, mesh, dim=token_axis(name))
        for name, t in whole.items()
        if token_axis(name) is not None
    }
    x["query"].requires_grad_()
    out = plain(mesh, x)
    out.backward(context.shard_sequence(whole["do"], mesh))
    put = lambda t: context.unshard_sequence(t, mesh, length=case.length)
    return {"out": put(out), "d query": put(x["query"].grad)}


def second_derivatives(mesh: DeviceMesh) -> list[str]:
    """What is raised of attention and of compressed tokens."""
    x = mine(Case(48), mesh)
    x["query"].requires_grad_()
    key = x["key"][0].requires_grad_()
    made = (
        lambda: (plain(mesh, x), x["query"]),
        lambda: (context.compress(key, config=CONFIG, context_mesh=mesh), key),
    )
    return [
        raised(lambda of=of: torch.autograd.grad(of()[0].sum(), of()[1], create_graph=True))
        for of in made
    ]


def twice(mesh: DeviceMesh) -> bool:
    """Whether a graph that is retained gives the same gradients again, and those of one pass."""
    found = []
    for retain in (True, False):
        x = mine(Case(48), mesh)
        wanted = [x[name].requires_grad_() for name in ("query", "key", "gates")]
        out = plain(mesh, x)
        for keep in (True, False) if retain else (False,):
            found.append(torch.autograd.grad(out, wanted, x["do"], retain_graph=keep))
    return all(
        torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True)
    )


def out_of_date(mesh: DeviceMesh) -> list[str]:
    """Backward passes after the borders were written to."""
    found = []
    for recompute in (False, True):
        borders, other = (torch.tensor([0, at, 96]) for at in (20, 40))
        x = {name: t.requires_grad_() for name, t in mine(Case(96), mesh).items()}
        meta = nsa_torch.varlen_metadata(borders, config=CONFIG)
        out = plain(mesh, x, varlen=meta, recompute=recompute)
        meta.update(other)
        found.append(raised(lambda out=out: out.sum().backward()))
    return found


def by_kv_head() -> dict[str, torch.Tensor]:
    """Two ranks a sequence, two a key/value head, through a checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    case, head = Case(48), mesh["heads"].get_local_rank()
    x, group = mine(case, mesh["context"]), HEADS // KV_HEADS
    for name, width in (
        ("query", group),
        ("gates", group),
        ("do", group),
        ("key", 1),
        ("value", 1),
    ):
        axis = 3 if name in ("key", "value") else 2
        x[name] = x[name].narrow(axis, head * width, width).clone().requires_grad_(name != "do")
    out = torch.utils.checkpoint.checkpoint(
        lambda *t: plain(mesh["context"], dict(zip(NAMES, t, strict=False))),
        *(x[name] for name in NAMES[:4]),
        use_reentrant=False,
    )
    out.backward(x["do"])
    put = lambda t, dim: context.unshard_sequence(t, mesh["context"], dim=dim, length=48)
    return {"out": put(out, 1)} | {
        f"d {name}": put(x[name].grad, token_axis(name)) for name in NAMES[:4]
    }


def known_calls(group) -> dict[str, object]:
    """Calls of signatures that all ranks have seen, that some have, and where one rank says
    something else: as on a GPU, where a rank decides nothing anew.
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    x, odd = mine(Case(96), mesh), mesh.get_local_rank() == 2
    apart = dict(x, query=x["query"].transpose(1, 2).contiguous().transpose(1, 2))
    short = {
        name: t[:, :, :12] if name in ("key", "value") else t[:, :12] for name, t in x.items()
    }
    with (
        changed(call, "DEVICE_TYPES", ("cpu",)),
        changed(context_ranks, "agree", counted := Counted(context_ranks.agree)),
    ):
        first, again = plain(mesh, x), plain(mesh, x)
        plain(mesh, x, scale=0.5), plain(mesh, short)
        seen = counted.calls
        # One rank's tensors lie otherwise: it asks anew, the others tell it.
        mixed = plain(mesh, apart if odd else x)
        asked = counted.calls - seen
        # All ranks know both calls, and one makes the other one.
        scale = raised(lambda: plain(mesh, x, **({"scale": 0.5} if odd else {})))
        after = plain(mesh, x)
        # One rank makes a call that it has never made.
        new = raised(lambda: plain(mesh, x, **({"recompute": True} if odd else {})))
    return {
        "seen": seen,
        "asked": asked,
        "equal": [torch.equal(found, first) for found in (again, mixed, after)],
        "scale": scale,
        "new": new,
    }


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def searches(mesh: DeviceMesh) -> dict[str, int]:
    """How often something is searched in the borders in a pass forward and backward, the second
    one of a rank, with metadata and with borders alone.
    """
    x, borders = mine(Case(48), mesh), torch.tensor([0, 29, 48])
    given = {
        "varlen": nsa_torch.varlen_metadata(borders, total=48, config=CONFIG),
        "cu_seqlens": borders,
    }
    found = {}
    for name, packed in given.items():
        for _ in range(2):
            x["query"].requires_grad_()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as seen:
                plain(mesh, x, **{name: packed}).backward(x["do"])
        found[name] = sum(event.name == "aten::searchsorted" for event in seen.events())
    return found


def layer(mesh: DeviceMesh | None = None) -> nsa_torch.NSAAttention:
    torch.manual_seed(0)
    return nsa_torch.NSAAttention(
        16, HEADS, KV_HEADS, 8, 6, l=8, d=4, l_sel=8, n_sel=4, w=12, phi="mlp_rope",
        phi_hidden=8, gate="head", context_mesh=mesh,
    )  # fmt: skip


def through_layer(mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients of a module on a packed row; the ranks' sums."""
    rng = np.random.default_rng(0)
    x, do = (torch.tensor(rng.normal(size=(1, 48, 16)), dtype=torch.float32) for _ in range(2))
    module = layer(mesh)
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


def scaling(mesh: DeviceMesh) -> dict[str, dict]:
    """Rows of `bench.scale`, and one where ranks do not add their gradients up."""
    rows = {}
    for mode in ("forward", "fwdbwd"):
        sizes = {"S": 96, "H": HEADS, "Hkv": KV_HEADS, "D": WIDTH, "Dv": VALUE_WIDTH}
        about = {"framework": "torch", "mode": mode, "layout": "zigzag", "dtype": "float32"}
        problem = Problem(**about, **sizes, checked=96, config=CONFIG)
        rows[mode] = Measured(problem, mesh, 2).row()
    with changed(*MUTANTS["reduce-scatter"]):
        rows["mutant"] = Measured(problem, mesh, 1).parity()
    return rows


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("context",))
    results = {name: several(case, mesh) for name, case in CASES.items()}
    for name, change in MUTANTS.items():
        with changed(*change):
            results[f"mutant {name}"] = several(MUTATED, mesh)
    results["layer"] = through_layer(mesh)
    results["searches"] = searches(mesh)
    results["heads"] = by_kv_head()
    results["scale"] = scaling(mesh)
    results["nan"] = with_nan(mesh)
    results["second derivatives"] = second_derivatives(mesh)
    results["twice"] = twice(mesh)
    results["out of date"] = out_of_date(mesh)
    results["errors"] = bad_input(mesh)
    results["known calls"] = known_calls(dist.new_group())  # whose ranks fall out of step
    if rank == 3:
        torch.save(results, folder / f"results.{rank}.pt")
        os._exit(9)
    start = time.monotonic()
    x = mine(Case(48), mesh)
    results["gone"] = raised(lambda: plain(mesh, x)), time.monotonic() - start
    torch.save(results, folder / f"results.{rank}.pt")
    os._exit(0)


def main_on_gpus(rank: int, folder: Path) -> None:
    """Two ranks on kernels: results of three calls, and those of one GPU. Then one rank makes
    another call, of which both know the kind, and the process ends: by itself, or aborted.
    """
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    rng = np.random.default_rng(0)
    shapes = (16, 128), (1, 128), (1, 128), (16, 3)
    drawn = (rng.normal(size=(1, 4096, *shape)).astype(np.float32) for shape in shapes)
    whole = [torch.from_numpy(x).cuda().bfloat16() for x in drawn]
    # A block more or less is no error of arithmetic.
    config = NSAConfig()
    compressed = nsa_torch.compress(whole[1], config=config)
    indices = nsa_torch.select_blocks(whole[0], compressed, config=config)
    shard = lambda x: context.shard_sequence(x, mesh)
    put = lambda x: context.unshard_sequence(x, mesh)

    def call(x, indices, **options):
        x = [t.detach().requires_grad_() for t in x]
        out = nsa_torch.attention(*x, block_indices=indices, implementation="mosaic", **options)
        return [out.detach(), *torch.autograd.grad(out, x, out.detach())]

    own = [shard(x) for x in whole], shard(indices)
    found = {"alone": [x.cpu() for x in call(whole, indices)]}
    found["ranks"] = [[put(x).cpu() for x in call(*own, context_mesh=mesh)] for _ in range(3)]
    torch.save(found, folder / f"results.{rank}.pt")
    call(*own, context_mesh=mesh, recompute=True)
    torch.cuda.synchronize()
    options = {"recompute": bool(rank), "context_mesh": mesh}
    # NCCL's watchdog may end the process before the host learns what the device found.
    error = raised(lambda: (call(*own, **options), torch.cuda.synchronize()))
    os._exit(0 if "device-side assert" in error else 1)

"""What the ranks of `test_context` do; four processes are started once for all cases."""

import dataclasses
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nsa_torch
from nsa_jax import context_layout as layouts
from nsa_torch import Branches, NSAConfig, PoolParams, context, context_ranks

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
    recompute: bool = False
    given: bool = False  # block indices
    implementation: str | None = None
    config: NSAConfig = CONFIG


CASES = {
    "zigzag": Case(96, batch=2, separate=True, given=True),
    "contiguous": Case(96, layout="contiguous"),
    "recompute": Case(96, recompute=True, separate=True),
    "learned": Case(96, learned=True, separate=True),
    "odd-length": Case(91, learned=True),  # chunks of 12, padding of 5
    "odd-chunks": Case(103, learned=True),  # chunks of 13, and d = 4
    "short-chunks": Case(40, learned=True),  # of 5, where the halo is 7
    "packed": Case(96, lengths=(20, 1, 43, 8, 14), separate=True, learned=True),
    "packed-odd": Case(101, layout="contiguous", lengths=(0, 61, 3, 30), learned=True),
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
    params = [PoolParams(x[f"{name}_weight"]) if case.learned else None for name in NAMES[1:3]]
    parts = zip((Branches.each(key), Branches.each(value)), params, strict=True)
    compress = nsa_torch.compress if mesh is None else context.compress
    compressed = tuple(compress(t.compressed, p, **packed, **place) for t, p in parts)
    select = nsa_torch.select_blocks if mesh is None else context.select_blocks
    chosen = {"implementation": case.implementation, **packed, **place}
    indices = select(x["query"].detach(), compressed[0].detach(), **chosen)
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
    mine = {
        name: t if (dim := token_axis(name)) is None
        else context.shard_sequence(t, mesh, dim=dim, **shard)
        for name, t in tensors(case).items()
    }
    found = run(case, mine, mesh)
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


def raised(call, kinds=(ValueError, RuntimeError)) -> str:
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
    results = {}
    for name, case in CASES.items():
        print(rank, name, flush=True)
        results[name] = several(case, mesh)
    torch.save(results, folder / f"results.{rank}.pt")

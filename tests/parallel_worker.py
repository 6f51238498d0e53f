"""What the processes of `test_train_parallel` do; its names are those of what they leave.

Four processes are started once. In each phase some of them are the ranks of a group.
"""

import contextlib
import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from bench.lm import checkpoint, curves, log, loop, spec, variants
from bench.lm.data import Batch, Batches
from bench.lm.parallel import Parallel
from bench.lm.ranks import Ranks, TorchRanks, debug_level
from bench.lm.watch import Settings, watchdog
from nsa_core.layer import LayerSpec
from nsa_torch import Branches
from tests.spawned import raised
from tests.tables import table

PROCESSES, TIMEOUT_S = 4, 20
SIZES = table("training")["layers"]
LAYER = LayerSpec(**SIZES["several"])
TRAINING = spec.Training(steps=6, batch=8, seq_len=40, lr=1e-2, warmup=2)
CORPUS = 2**14
STOPPED = 3  # steps of the run that goes on with other ranks


def task(
    attention: spec.Attention = "nsa",
    dtype: str = "float32",
    layer: LayerSpec = LAYER,
    **changed,
) -> spec.Task:
    model = spec.ModelSpec(layer, attention, layers=2, hidden=24)
    return spec.Task("micro", model, dataclasses.replace(TRAINING, **changed), dtype)


def altered(todo: spec.Task, layer: dict[str, Any], **model) -> spec.Task:
    """The task with another layer and model."""
    model["layer"] = dataclasses.replace(todo.model.layer, **layer)
    return dataclasses.replace(todo, model=dataclasses.replace(todo.model, **model))


class Documents(Batches):
    """Rows of several documents each, some with padding at the end."""

    def train(self, step: int, rows: slice = slice(None)) -> Batch:
        tokens = super().train(step).tokens
        ids = np.sort(np.random.default_rng(step).integers(0, 4, tokens.shape), axis=1)
        ids = np.where((ids == 3) & (np.arange(len(ids)) % 3 == 0)[:, None], -1, ids)
        return Batch(tokens[rows], ids.astype(np.int32)[rows])


def run_of(
    folder: Path,
    todo: spec.Task,
    parallel: Parallel = Parallel(),
    kind=Batches,
    framework: str = "torch",
    graph: bool = False,
    **options,
):
    if todo.model.attention == "nsa":
        names = Branches(None, None, None)
        variant = variants.nsa(framework, names, "error", todo, kind is Documents)
    else:
        variant = variants.dense(framework, "auto", todo.dtype)
    variant = dataclasses.replace(variant, parallel=parallel, graph=graph)
    batches = kind(todo.training.batch, todo.training.seq_len, 0, CORPUS)
    options = {"watched": Settings(every=4), **options}
    return loop.Run(variant, todo, batches, folder / "train.jsonl", folder / "kept", **options)


def trained(folder: Path, todo: spec.Task, *spread, stop=None, **options):
    """A run from its last checkpoint on, its summary and the losses of its steps."""
    run = run_of(folder, todo, *spread, **options)
    summary = loop.run(run, stop or StopAt(0, False))
    return run, summary, curves.losses(log.read(run.path)).get(run.name, np.zeros(0))


def learner_of(folder: Path, todo: spec.Task, *spread, ranks: Ranks = Ranks(), **options):
    """A learner, and the run that would have it."""
    run = run_of(folder, todo, *spread, ranks=ranks, **options)
    scratch = folder / f"scratch{ranks.rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    return variants.learner(run.variant, todo, scratch, ranks), run


def apart(one, other) -> float:
    assert len(one) == len(other)
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))


def rows_of(learner, run, step: int):
    """The rank's rows of a step."""
    return learner.share.of(functools.partial(run.batches.train, step))


def stepped(learner, run, steps) -> list[float]:
    """The losses of these steps."""
    return [learner.step(run.batches.train(step), step)[0] for step in steps]


class StopAt(loop.Stop):
    """Asked to stop after some steps, on one rank only."""

    def __init__(self, steps: int, here: bool):
        self.left, self.here = steps, here

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.here and self.left < 0


@contextlib.contextmanager
def started(folder: Path, name: str, rank: int, size: int, level: str = "OFF"):
    """The ranks of a phase; None on processes that are none of them."""
    if rank >= size:
        yield None
        return
    store = dist.FileStore(str(folder / f"{name}.store"), size)
    with debug_level(level):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield TorchRanks(TIMEOUT_S)
    dist.destroy_process_group()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)

    def ran(name: str, ranks, spread: Parallel, todo: spec.Task = task(), **options):
        trained(folder / name, todo, spread, ranks=ranks, **options)

    with started(folder, "ddp4", rank, 4) as ranks:
        ran("ddp4", ranks, Parallel("ddp", 4))
    with started(folder, "moved", rank, 4) as ranks:
        stop = StopAt(STOPPED, rank == 2)
        ran("moved", ranks, Parallel("fsdp", 4), stop=stop, kind=Documents)
    if rank == 3:  # alone, and none waits for it
        with watchdog(folder / "stacks.txt", 0.2):
            time.sleep(TIMEOUT_S)
    with started(folder, "compared", rank, 2, "DETAIL") as ranks:
        if ranks is not None:
            micro = Parallel("ddp", 2, accumulate=2, safe=True)
            ran("safe", ranks, micro, kind=Documents)
            shards = Parallel("fsdp", 2, safe=True)
            ran("safe fsdp", ranks, shards, task("dense"), kind=Documents)
            for kind in ("ddp", "fsdp"):
                other_collective(folder, ranks, kind)
    with started(folder, "two", rank, 2) as ranks:
        if ranks is None:
            return
        shards, micro = Parallel("fsdp", 2), Parallel("ddp", 2, accumulate=2)
        ran("moved", ranks, shards, kind=Documents)
        ran("packed", ranks, micro, kind=Documents)
        ran("graph", ranks, micro, kind=Documents, graph=True)
        ran("bf16", ranks, Parallel("fsdp", 2, accumulate=2), task(dtype="bfloat16"))
        ran("dense", ranks, shards, task("dense"), kind=Documents)
        faults(folder, ranks)


def other_collective(folder: Path, ranks, kind: str) -> None:
    """Rank 0 begins a step, where its gradients are added up; rank 1 adds up something else."""
    spread = Parallel(kind, 2, safe=True)
    learner, run = learner_of(folder, task("dense"), spread, ranks=ranks)
    batch = rows_of(learner, run, 0)
    step = lambda: learner.step(batch, 0)
    error = raised((lambda: dist.all_reduce(torch.ones(3))) if ranks.rank else step)
    told(folder, f"compared {kind}", ranks, error)


def faults(folder: Path, ranks) -> None:
    """What is raised on each rank."""
    for kind in ("ddp", "graph", "fsdp"):
        learner, batch = broken(folder, ranks, kind)
    learner.step(batch, 2)
    if ranks.rank == 1:
        os._exit(9)
    start, spread = time.monotonic(), Parallel("fsdp", 2)
    error = raised(lambda: trained(folder / "gone", task("dense"), spread, ranks=ranks))
    told(folder, "gone", ranks, [error, time.monotonic() - start])
    os._exit(0)


def broken(folder: Path, ranks, kind: str):
    """A learner after faults of rank 1, and its batch."""
    graph = kind == "graph"
    spread = Parallel("ddp" if graph else kind, 2, safe=kind == "ddp")
    learner, run = learner_of(folder, task("dense"), spread, graph=graph, ranks=ranks)
    network = learner.model if graph else learner.master
    batch = rows_of(learner, run, 0)
    learner.step(batch, 0)
    step = lambda: learner.step(batch, 7)
    if not graph:
        kept = checkpoint.save(folder / f"full {kind}", learner, 1, {}, ranks)
        with mock.patch.object(checkpoint.weights, "save", full_disk):
            error = raised(lambda: checkpoint.save(kept.parent, learner, 2, {}, ranks))
        names = [x.name for x in kept.parent.iterdir()]
        told(folder, f"full disk {kind}", ranks, [error, names])
    bad = (lambda out: out * np.nan) if ranks.rank else (lambda out: out)
    hook = network.head.register_forward_hook(lambda *x: bad(x[-1]))
    told(folder, f"loss {kind}", ranks, raised(step))
    hook.remove()
    hook = network.blocks[1].mlp.down.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(map(bad, inputs))
    )
    told(folder, f"gradient {kind}", ranks, raised(step))
    hook.remove()
    told(folder, f"after {kind}", ranks, raised(lambda: learner.step(batch, 1)))
    return learner, batch


def full_disk(path: Path, module) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def told(folder: Path, name: str, ranks, value) -> None:
    (folder / f"{name}.{ranks.rank}.json").write_text(json.dumps(value))

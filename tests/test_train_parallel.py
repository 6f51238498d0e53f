"""Several processes and devices: the losses of one, checkpoints for any number, and faults."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.lm import checkpoint, curves, health, log, loop, shards, watch
from bench.lm.parallel import Parallel
from bench.lm.ranks import Ranks
from bench.lm.watchdog import HUNG
from tests import parallel_worker as worker
from tests.parallel_worker import Documents, StopAt, run_of, task

# Of losses over the steps of `worker.TRAINING`, relative.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def losses(folder: Path) -> np.ndarray:
    return next(iter(curves.losses(log.read(folder / "train.jsonl")).values()))


def apart(one, other) -> float:
    assert len(one) == len(other)
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Summary and losses of a run in one process, by folder name of the parallel one."""
    runs = {
        "ddp4": (task(), {}),
        "packed": (task(), {"kind": Documents}),
        "bf16": (task(dtype="bfloat16"), {}),
        "dense": (task("dense"), {"kind": Documents}),
    }
    found = {}
    for name, (todo, options) in runs.items():
        folder = tmp_path_factory.mktemp(name)
        run = run_of(folder, Ranks(), Parallel(), todo, **options)
        found[name] = loop.run(run, StopAt(0, False)), losses(folder)
    return found | {"moved": found["ddp4"]}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The folder of what the processes left, and how each ended."""
    folder = tmp_path_factory.mktemp("parallel")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel_worker"])
    started = [
        context.Process(target=worker.main, args=(rank, folder))
        for rank in range(worker.PROCESSES)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(180)
        if process.is_alive():
            process.kill()
    return folder, [process.exitcode for process in started]


def told(several, name: str) -> list:
    folder, _ = several
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["ddp4", "moved", "packed", "bf16", "dense"])
def test_losses_are_those_of_one_process(several, one, name):
    folder, _ = several
    (summary, expected), found = one[name], losses(folder / name)
    tolerance = TOLERANCE["bfloat16" if name == "bf16" else "float32"]
    assert len(found) == worker.TRAINING.steps and apart(found, expected) < tolerance
    lines = log.read(folder / name / "train.jsonl")
    ended = curves.last(lines, log.Summary)
    assert apart([x.held_out_loss for x in ended.values()], [summary.held_out_loss]) < tolerance


def test_a_rank_with_the_rows_of_another_is_found(several, tmp_path):
    run = run_of(tmp_path, Ranks(), Parallel(), task("dense"))
    loop.run(run, StopAt(4, True))
    wrong = told(several, "same_rows")[0]
    assert apart(wrong, losses(tmp_path)) > 100 * TOLERANCE["float32"]

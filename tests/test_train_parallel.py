"""Several processes and devices: the losses of one, checkpoints for any number, and faults."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.harness.process import ROOT
from bench.lm import (
    checkpoint,
    curves,
    health,
    log,
    measures,
    torch_learner,
    variants,
    watch,
)
from bench.lm.parallel import Parallel
from tests import parallel_worker as worker
from tests import spawned
from tests.measured import of_kind
from tests.parallel_worker import (
    Documents,
    altered,
    apart,
    learner_of,
    run_of,
    stepped,
    task,
    trained,
)
from tests.test_layers import in_torch

# Of losses over the steps of `worker.TRAINING`, relative.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
HEADS = Parallel("fsdp", 4, tensor=2)  # of JAX


def losses(folder: Path) -> np.ndarray:
    return next(iter(curves.losses(log.read(folder / "train.jsonl")).values()))


def norms(folder: Path) -> list[float]:
    """Of each step's gradient; the steps of the folder's last run."""
    return [line.grad_norm for line in of_kind(log.Step, folder / "train.jsonl")]


ALONE = {  # the runs of one process, by the folder of the one of several
    "ddp4": (task(), {}),
    "packed": (task(), {"kind": Documents}),
    "bf16": (task(dtype="bfloat16"), {}),
    "dense": (task("dense"), {"kind": Documents}),
    "dense-bf16": (task("dense", "bfloat16"), {}),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Summary, losses and norms of these runs."""
    found = {}
    for name, (todo, options) in ALONE.items():
        folder = tmp_path_factory.mktemp(name)
        _, *ended = trained(folder, todo, **options)
        found[name] = *ended, norms(folder)
    packed, dense = found["packed"], found["dense"]
    return found | {"moved": packed, "graph": packed, "safe": packed, "safe fsdp": dense}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The folder of what the processes left, and how each ended."""
    folder = tmp_path_factory.mktemp("parallel")
    return folder, spawned.run(worker.main, worker.PROCESSES, folder)


@pytest.fixture(scope="module")
def folder(several):
    return several[0]


def told(folder, name: str) -> list:
    """What the two ranks of the last phase have told."""
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]


RUNS = ["ddp4", "moved", "packed", "graph", "bf16", "dense", "safe", "safe fsdp"]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_one_process(folder, one, name):
    (summary, expected, sizes), found = one[name], losses(folder / name)
    tolerance = TOLERANCE["bfloat16" if name == "bf16" else "float32"]
    assert len(found) == worker.TRAINING.steps and apart(found, expected) < tolerance
    assert apart(norms(folder / name), sizes) < 10 * tolerance
    ended = curves.last(log.read(folder / name / "train.jsonl"), log.Summary)
    assert apart([x.held_out_loss for x in ended.values()], [summary.held_out_loss]) < tolerance


def sharded_graphs(rank: int, folder: Path) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    torch_learner.timing.cuda_graph = rerun
    with worker.started(folder, "group", rank, 2) as ranks:
        spread = Parallel("fsdp", 2, accumulate=2)
        options = dict(kind=Documents, graph=True, ranks=ranks)
        found = []
        for graph in (False, True):
            learner, run = learner_of(folder, task(), spread, **options)
            learner.graph, numbers = True, []
            if not graph:
                learner._replay = learner._gradients
            for step in range(3):
                batch = worker.rows_of(learner, run, step)
                learner._backward(learner._rows(batch))  # what is there is not added to
                numbers.append([*learner.step(batch, step), measures.loss(learner, batch)])
            # The embedding too, which a forward pass leaves gathered.
            assert all(isinstance(x, DTensor) for x in learner.master.parameters())
            found.append(numbers)
        worker.told(folder, "captured", ranks, found)


def test_graphs_of_shards(one, tmp_path):
    """Losses are those of one process. A graph, whose results stand at one place, has the losses
    of its list of operations, and with it what is evaluated between steps."""
    assert spawned.run(sharded_graphs, 2, tmp_path) == [0, 0]
    _, expected, sizes = one["packed"]
    for listed, captured in told(tmp_path, "captured"):
        np.testing.assert_array_equal(listed, captured)
        assert apart([loss for loss, *_ in listed], expected[:3]) < TOLERANCE["float32"]
        assert apart([size for _, size, _ in listed], sizes[:3]) < 10 * TOLERANCE["float32"]


def test_one_rank_asked_to_stop_and_all_saved(folder):
    path = folder / "moved" / "train.jsonl"
    stopped, _ = of_kind(log.Summary, path)
    assert (stopped.status, stopped.steps) == ("stopped", worker.STOPPED)
    assert f"SIGTERM after {worker.STOPPED} steps, saved to" in stopped.reason
    headers = of_kind(log.Header, path)
    assert [h.first_step for h in headers] == [0, worker.STOPPED]
    assert [h.parallel["devices"] for h in headers if h.parallel] == [4, 2]
    kept = [path.name for path in checkpoint.found(folder / "moved" / "kept")]
    assert kept == ["step-000006", "step-000003"]


def test_every_rank_has_a_heartbeat(folder):
    beats = watch.heartbeats(folder / "moved")
    assert list(beats) == [f"heartbeat_rank{rank}.jsonl" for rank in range(4)]
    for rank, lines in enumerate(beats.values()):
        assert {line["rank"] for line in lines} == {rank}
        assert all(line["host_mem"] > 0 for line in lines)
        assert [lines[0]["msg"], lines[-1]["msg"]] == ["boot", "end"]
    steps = [line["step"] for line in beats["heartbeat_rank1.jsonl"]]
    assert worker.STOPPED in steps  # the fourth


def test_gates_are_the_mean_over_ranks(folder, one, tmp_path):
    """After four steps in which all had the same weights, of the first row of each."""
    (found,) = of_kind(log.Watch, folder / "ddp4" / "train.jsonl")
    learner, run = learner_of(tmp_path, task())
    stepped(learner, run, range(4))
    rows = [run.batches.train(3, slice(2 * rank, 2 * rank + 1)) for rank in range(4)]
    each = [health.layers(learner, batch) for batch in rows]
    for layer, *ranks in zip(found.layers, *each, strict=True):
        expected = {name: np.mean([rank[name] for rank in ranks]) for name in layer}
        assert layer == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["ddp", "graph", "fsdp"])
def test_a_nan_on_one_rank_stops_all(folder, kind):
    """It has a name, and a rank where the sum over ranks can be left out."""
    sharded, on = kind == "fsdp", ", on rank 1"
    first = "loss" if sharded else "loss, gradient of embedding"
    for text in told(folder, f"loss {kind}"):
        assert text.startswith("DivergedError: step 7: loss=nan and grad_norm=nan")
        assert text.endswith(f"must be finite; first: {first}{on}")
    for text in told(folder, f"gradient {kind}"):
        rank = "" if sharded else on
        assert "loss=nan" not in text and text.endswith(f"first: gradient of embedding{rank}")
    assert told(folder, f"after {kind}") == ["", ""]


by_kind = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@by_kind
def test_safe_ranks_in_different_collectives_are_told(folder, kind):
    """Without it they wait for each other, or add up what does not belong together."""
    for text in told(folder, f"compared {kind}"):
        assert text.startswith("RuntimeError: Detected mismatch between collectives on ranks")


@by_kind
def test_a_full_disk_leaves_the_last_checkpoint(folder, kind):
    for rank, (text, kept) in enumerate(told(folder, f"full disk {kind}")):
        assert text == "OSError: rank 0: [Errno 28] No space left on device"
        assert rank or kept == ["step-000001"]


def test_a_rank_that_dies_ends_the_others(several):
    folder, ends = several
    text, seconds = json.loads((folder / "gone.0.json").read_text())
    assert text.startswith("LostError: rank 0 of 2 lost another rank, or waited for another")
    assert seconds < worker.TIMEOUT_S and ends[:2] == [0, 9]


def test_a_hung_rank_leaves_its_stacks(several):
    folder, ends = several
    assert ends[3] == watch.HUNG
    stacks = (folder / "stacks.txt").read_text()
    assert "Thread" in stacks and "parallel_worker.py" in stacks and "in main" in stacks


jax_learner = functools.partial(learner_of, framework="jax")


def test_shards_of_torch_go_on_over_heads_in_jax(folder, one, tmp_path):
    """NSA on a mesh of rows, shards and heads, with documents."""
    todo = task()
    learner, run = jax_learner(tmp_path, todo, HEADS, kind=Documents)
    before = folder / "moved" / "kept" / "step-000003"
    learner.load(before, worker.STOPPED)
    found = stepped(learner, run, range(worker.STOPPED, todo.training.steps))
    assert apart(found, one["moved"][1][worker.STOPPED :]) < TOLERANCE["float32"]
    kernel = learner.params["blocks"][1]["attention"]["W_Q"]["kernel"].get_value()
    assert kernel.addressable_shards[0].data.shape == (8, 16)  # of 16 and 32
    layers = health.layers(learner, run.batches.train(0))
    assert len(layers) == 2 and all(0 < layer["entropy"] < 1.1 for layer in layers)
    kept = checkpoint.save(tmp_path / "kept", learner, todo.training.steps, run.settings())
    ours, theirs = (
        safetensors.torch.load_file(at / "weights.safetensors")
        for at in (kept, folder / "moved" / "kept" / "step-000006")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() < 1e-4, name


def test_biases_are_not_divided_over_heads(tmp_path):
    with pytest.raises(ValueError, match="bias must be False if tensor=2, got True"):
        jax_learner(tmp_path, altered(task(), {"bias": True}), HEADS)


@pytest.mark.parametrize(
    "layout, layer",
    [
        (HEADS, {"gate": "head", "gate_bias": (0, 1, 3)}),
        (Parallel("ddp", 2, accumulate=2), {}),
    ],
    ids=str,
)
def test_layouts_of_jax_have_the_numbers_of_torch_in_one_process(tmp_path, layout, layer):
    """Sums of losses by category of rows of documents, steps without documents, gates."""
    todo = altered(task(), layer)
    learner, run = jax_learner(tmp_path, todo, layout, kind=Documents)
    twin, _ = learner_of(tmp_path, todo)
    if layer:  # each device has the rows and biases of its own heads
        bias = learner.params["blocks"][1]["attention"]["gate"]["bias"].get_value()
        own = np.tile(layer["gate_bias"], todo.model.layer.n_heads // 2)
        assert all(np.array_equal(x.data, own) for x in bias.addressable_shards)
    batches = [run.batches.train(step) for step in range(4)]
    shape = batches[0].tokens[:, 1:].shape
    which = np.random.default_rng(0).integers(0, 4, shape, np.int32)

    def numbers(x):
        sums = [*x.loss_sums(batches[0], which, 3), measures.loss(x, batches[0])]
        alone = (each._replace(segment_ids=None) for each in batches)
        return sums, [x.step(each, step) for step, each in enumerate(alone)]

    (sums, steps), (their_sums, their_steps) = map(numbers, (learner, twin))
    assert len(sums) == 4 and apart(sums, their_sums) < TOLERANCE["float32"]
    assert apart(steps, their_steps) < 10 * TOLERANCE["float32"]
    for got, want in zip(*(health.layers(x, batches[0]) for x in (learner, twin)), strict=True):
        assert got == pytest.approx(want, rel=1e-3)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_gates_of_each_query_head_in_shards(mesh):
    """From `meta`, as FSDP starts a layer; the output is that of the same weights, whole."""
    layer = in_torch(gate="head", gate_bias=(0, 1, 3), device="meta")
    fully_shard(layer, mesh=mesh)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert isinstance(layer.gate.bias, DTensor)
    assert layer.gate.bias.full_tensor().tolist() == [0, 1, 3] * 6
    state = {name: x.full_tensor() for name, x in layer.named_parameters()}
    x = torch.randn(1, 40, 24)
    sharded, _ = layer(x)
    whole = in_torch(gate="head", phi="avg")
    whole.load_state_dict(state, strict=False)
    torch.testing.assert_close(whole(x)[0], sharded)


@pytest.mark.parametrize(
    "name, layout",
    [("dense-bf16", Parallel("ddp", 4)), ("dense", Parallel("ddp", 2, accumulate=2))],
)
def test_losses_of_jax_on_several_devices_are_those_of_one_process(one, tmp_path, name, layout):
    todo, options = ALONE[name]
    todo = altered(todo, {"gate_hidden": 3})  # gates that only NSA has
    learner, run = jax_learner(tmp_path, todo, layout, **options)
    pairs = itertools.pairwise(run.batches.train(i) for i in range(todo.training.steps + 1))
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention is not strict
        found = [learner.step(each, i, after)[0] for i, (each, after) in enumerate(pairs)]
    assert apart(found, one[name][1]) < TOLERANCE[todo.dtype]


def rerun(call):
    """In place of a graph: `call` runs again and writes its results where they were."""
    local = lambda x: x.to_local() if isinstance(x, DTensor) else x
    numbers = lambda found: [local(x) for x in (found[0], *found[1])]
    found = call()
    return lambda: torch._foreach_copy_(numbers(found), numbers(call())), found


def test_a_captured_step_reads_new_rows(tmp_path, monkeypatch):
    """Of one document per row, which have no packing."""
    monkeypatch.setattr(torch_learner.timing, "cuda_graph", rerun)
    found = []
    for graph in (False, True):
        learner, run = learner_of(tmp_path, task())
        learner.graph = graph
        found.append(stepped(learner, run, range(3)))
    np.testing.assert_array_equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_graph_of_micro_batches_of_documents(tmp_path, attention):
    """Bitwise: the same kernels on the same rows, captured or not. Of sizes that Mosaic's kernels
    take: gradients of torch's own paths come by atomics, in no fixed order.
    """
    todo, found = altered(task(attention, "bfloat16", seq_len=200), worker.SIZES["kernels"]), []
    for graph in (False, True):
        spread = Parallel(accumulate=2)
        learner, run = learner_of(tmp_path, todo, spread, kind=Documents, graph=graph)
        assert run.variant.label in ("mosaic", "flash")
        found.append(stepped(learner, run, range(4)))
    np.testing.assert_array_equal(*found)


@pytest.mark.gpu
def test_varlen_is_dense_attention_with_a_mask(tmp_path):
    todo, found = task("dense", "bfloat16"), []
    for backend in ("math", "flash"):
        run = run_of(tmp_path, todo, kind=Documents)
        variant = dataclasses.replace(run.variant, implementation=backend)
        learner = variants.learner(variant, todo, tmp_path)
        found.append(stepped(learner, run, range(4)))
    assert apart(*found) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("how", ["--nograph", "--nograph --ddp_safe", "--graph"])
@by_kind
def test_two_gpus_by_torchrun(tmp_path, kind, how):
    given = "--framework=torch --seq_len=64 --batch=4 --steps=6 --corpus_bytes=65536"
    given += " --dtype=f32 --margin=9"
    launcher, found = "-m torch.distributed.run --standalone --nproc-per-node=2", []
    for words in (
        f"-m bench.train {given}",
        f"{launcher} -m bench.train {given} --parallel={kind} {how}",
    ):
        out = tmp_path / str(len(found))
        command = [sys.executable, *words.split(), f"--out={out}"]
        subprocess.run(command, cwd=ROOT, check=True)
        found.append(curves.losses(log.read(out / "train.jsonl")))
    one, two = found
    assert one.keys() == two.keys() and len(one) == 2
    for run in one:
        assert apart(two[run], one[run]) < TOLERANCE["float32"]

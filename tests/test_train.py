"""Training: two frameworks, one curve; checkpoints, their resumption, and what ends a run."""

import dataclasses
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch

from bench import train
from bench.harness.process import ROOT
from bench.lm import (
    checkpoint,
    curves,
    log,
    loop,
    measures,
    share,
    spec,
    torch_learner,
    torch_lm,
    variants,
    watch,
)
from bench.lm.data import Batch, Batches
from bench.lm.ranks import Ranks
from nsa_core.layer import LayerSpec
from nsa_interop import weights
from tests import commands, pretend
from tests import parallel_worker as worker
from tests.measured import logged, of_kind
from tests.parallel_worker import StopAt, apart, learner_of, trained
from tests.refusals import refused
from tests.tables import table

# Of losses in float32, over the steps of `TRAINING`; mutants of the optimizer exceed it.
TOLERANCE = 3e-6
TABLE = table("training")
SIZES = TABLE["layers"]["one"]
task = functools.partial(
    worker.task, layer=LayerSpec(**SIZES, key_taps=3), steps=12, batch=2, seq_len=72
)
TRAINING = task().training
CORPUS = 2**16
ATTENTIONS: tuple[spec.Attention, ...] = ("nsa", "dense")
FRAMEWORKS = ("jax", "torch")
by_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of an uninterrupted run of each framework and attention."""
    found = {}
    for framework, attention in itertools.product(FRAMEWORKS, ATTENTIONS):
        folder = tmp_path_factory.mktemp(f"{framework}-{attention}")
        _, *ended = trained(folder, task(attention), framework=framework)
        found[framework, attention] = ended
    return found


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_train_smoke_falls_alike_in_jax_and_torch(whole, attention):
    (ours, jax), (theirs, torch) = (whole[framework, attention] for framework in FRAMEWORKS)
    assert len(jax) == TRAINING.steps and apart(jax, torch) < TOLERANCE
    assert apart([ours.held_out_loss], [theirs.held_out_loss]) < TOLERANCE
    assert ours.status == theirs.status == "ok" and jax[0] == pytest.approx(
        np.log(256), abs=0.4
    )
    assert jax[-3:].mean() < jax[0] - 1 and ours.held_out_loss < jax[0] - 1


@by_framework
def test_a_resumed_run_gives_the_same_losses(whole, tmp_path, framework):
    todo = task("nsa")
    options = {"framework": framework}
    run, summary, before = trained(
        tmp_path, todo, stop=StopAt(5, True), save_every=2, **options
    )
    assert summary.status == "stopped" and "SIGTERM after 5 steps" in summary.reason
    kept = [path.name for path in checkpoint.found(run.folder)]
    assert len(before) == 5 and kept == ["step-000005", "step-000004"]
    _, summary, losses = trained(tmp_path, todo, **options)
    assert summary == whole[framework, "nsa"][0]
    np.testing.assert_array_equal(losses, whole[framework, "nsa"][1])
    assert [header.first_step for header in of_kind(log.Header, run.path)] == [0, 5]


def test_a_run_goes_on_in_the_other_framework(whole, tmp_path):
    todo = task("dense")
    trained(tmp_path, todo, stop=StopAt(5, True))
    *_, losses = trained(tmp_path, todo, framework="jax")
    assert len(losses) == TRAINING.steps - 5
    assert apart(losses, whole["torch", "dense"][1][5:]) < TOLERANCE


@by_framework
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, framework):
    todo = task("dense", lr=1e30, warmup=0)
    _, summary, losses = trained(tmp_path, todo, framework=framework, save_every=1)
    done = len(losses)
    assert summary.status == "diverged" and summary.steps == done < TRAINING.steps
    assert f"step {done}: loss=" in summary.reason and "must be finite" in summary.reason
    kept = tmp_path / "kept" / f"step-{done:06d}"
    assert checkpoint.found(kept.parent)[0] == kept and str(kept) in summary.reason
    for path in kept.glob("*.safetensors"):
        assert all(x.isfinite().all() for x in safetensors.torch.load_file(path).values())


# A weight that is no number is named.
CULPRIT = "step 7: loss=*must be finite; first: loss, gradient of embedding, weight norm.scale"


@by_framework
def test_a_diverged_step_changes_nothing(tmp_path, framework):
    learner, run = learner_of(tmp_path, task("dense"), framework=framework)

    def contents():
        found = []
        for _, module in learner.whole():
            weights.save(tmp_path / "now", module)
            found.append((tmp_path / "now").read_bytes())
        return found

    batch = run.batches.train(0)
    learner.step(batch, 0)
    kept = checkpoint.save(run.folder, learner, 1, {})
    path = kept / "weights.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["norm.scale"][0] = float("inf")  # which makes the loss a NaN
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(tensors, path, metadata)
    learner.load(kept, 1)
    before = contents()
    with refused(CULPRIT, spec.DivergedError):
        learner.step(batch, 7, run.batches.train(8))
    assert contents() == before
    with refused("weights of norm.scale must be finite"):
        checkpoint.save(run.folder, learner, 2, {})
    assert checkpoint.latest(run.folder) == kept
    assert [path.name for path in run.folder.iterdir()] == [kept.name]


@by_framework
def test_a_following_batch_changes_no_number(tmp_path, framework):
    """The following batch that is given: none, the right one, or another one."""
    found = []
    for ahead in (None, 1, 2):
        learner, run = learner_of(tmp_path, task("dense"), framework=framework)
        batches = [run.batches.train(i) for i in range(5)]
        told = [None] * 3 if ahead is None else batches[ahead : ahead + 3]
        numbers = [learner.step(batches[i], i, told[i]) for i in range(3)]
        found.append([*numbers, measures.loss(learner, batches[4])])
    assert found[0] == found[1] == found[2]


@by_framework
def test_a_program_serves_any_number_of_documents_that_there_is_room_for(
    tmp_path, monkeypatch, framework
):
    """Of any process; one program is kept."""
    made, others = [], [1]

    def captured(call):
        made.append(call)
        return lambda: None, call()

    monkeypatch.setattr(torch_learner.timing, "cuda_graph", captured)
    learner, run = learner_of(tmp_path, task("nsa"), framework=framework)
    learner.graph = True
    tokens = run.batches.train(0).tokens
    monkeypatch.setattr(learner.ranks, "gather", lambda value: [value, [0, others[0]]])
    for n, others[0], room, count in TABLE["rooms"][framework]:
        ids = np.sort(np.arange(tokens.size).reshape(tokens.shape) % n, axis=1)
        batch = Batch(tokens, ids.astype(np.int32))
        if framework == "torch":
            learner.step(batch, 0)
            found = learner.room, len(learner.captured)
        else:
            before, learner.compiled = learner.program, "a program"
            learner._rows(batch)
            made += [learner.program] * (learner.program != before)
            found = learner.program.max_segments, 1
            assert (learner.compiled is None) == (learner.program != before)
        assert (*found, len(made)) == (room, 1, count)


def test_the_time_of_a_step_holds_what_comes_before_it(tmp_path):
    """Drawing of batches, but no checkpoint; before a checkpoint no following batch is given."""
    idle = mock.Mock(share=share.Share(2), ranks=Ranks())
    idle.step.return_value = 1.0, 1.0
    model = torch_lm.LM(task("dense").model)
    idle.whole.side_effect = lambda: time.sleep(0.5) or [("weights", model)]
    idle.loss_sums.side_effect = lambda batch, categories, count: np.ones(count)

    class Slow(Batches):
        def train(self, step, rows=slice(None)):
            time.sleep(0.1)
            return super().train(step, rows)

    run = worker.run_of(tmp_path, task("dense", steps=5), kind=Slow, save_every=3)
    times_ms: list[float] = []
    with watch.Watch(tmp_path, "idle", run.ranks, watch.Settings()) as watched:
        loop.steps(run, idle, 0, loop.Stop(), times_ms, watched)
    told = [call.args[2] is not None for call in idle.step.call_args_list]
    assert told == [True, True, False, True, False]
    # Two batches, one, none, two, none; the third step is followed by a checkpoint.
    for time_ms, drawn in zip(times_ms, (2, 1, 0, 2, 0), strict=True):
        assert 100 * drawn <= time_ms < 100 * drawn + 100


def test_weights_start_alike_under_both_attentions(tmp_path):
    found = []
    for attention in ATTENTIONS:
        path = tmp_path / attention
        torch_lm.initialize(path, task(attention).model, 0)
        found.append(safetensors.torch.load_file(path))
    # NSA convolves the keys of three branches.
    shared = {x for x in found[0].keys() & found[1].keys() if ".key_conv." not in x}
    assert {"embedding", "head.weight", "blocks.1.attention.W_Q.weight"} <= shared
    assert all(torch.equal(found[0][name], found[1][name]) for name in shared)
    for name, deviation in (("up", (3 * 16) ** -0.5), ("down", (3 * 24) ** -0.5 / 2)):
        matrix = found[0][f"blocks.0.mlp.{name}.weight"]
        assert matrix.std().item() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("attention, gate, millions", TABLE["parameters"])
def test_products_and_parameters(attention, gate, millions):
    for name, kv in itertools.product(spec.MODELS, ("shared", "separate")):
        model = spec.model(name, attention, gate=gate)
        model = dataclasses.replace(model, layer=dataclasses.replace(model.layer, kv=kv))
        with torch.device("meta"):
            module = torch_lm.LM(model)
        linear = {
            key: x.numel() for key, x in module.named_parameters() if key.endswith("weight")
        }
        # The gate runs once a key/value group.
        gates = sum(size for key, size in linear.items() if ".gate.fc" in key)
        extra = gates * (model.layer.n_kv_groups - 1)
        assert model.products() == sum(linear.values()) + extra
    assert round(sum(x.numel() for x in module.parameters()) / 1e6) == millions


def test_flops_and_mfu():
    todo = task("dense")
    pairs = TRAINING.batch * TRAINING.seq_len * (TRAINING.seq_len + 1) // 2
    attention = 2 * pairs * 2 * 2 * (8 + 8)  # layers, pairs, heads, FLOPs
    assert todo.flops() == 3 * (2 * todo.tokens() * todo.model.products() + attention)
    time_ms = todo.flops() / 495e12 * 1e3
    assert todo.mfu(2 * time_ms, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert todo.mfu(time_ms, "cpu") is None


def test_the_rate_rises_then_falls():
    at = spec.Training(steps=10, batch=1, seq_len=1, lr=1.0, warmup=4)
    assert [at.rate(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert at.rate(10) == pytest.approx(0.1) and at.rate(7) == pytest.approx(0.55)


def lines(framework: str, attention: str, losses, held_out=1.0) -> list[log.Line]:
    name = {"framework": framework, "attention": attention}
    steps = [logged(log.Step, **name, step=i, loss=x) for i, x in enumerate(losses)]
    return [*steps, logged(log.Summary, **name, steps=len(losses), held_out_loss=held_out)]


def test_verdicts():
    curve = np.linspace(5, 3, 40)
    odd = curve * 1.005
    odd[20] *= 1.01
    found = [
        *lines("torch", "dense", curve),
        *lines("jax", "dense", curve * (1 + 1e-4)),
        *lines("torch", "nsa", curve * 1.005, held_out=1.02),
        *lines("jax", "nsa", odd),
    ]
    verdicts = curves.verdicts(found, tolerance=1e-3, margin=0.01)
    assert [verdict.ok for verdict in verdicts] == [
        *(False, True, True, True),  # NSA, dense: every step, the end
        *(True, True, True, False),  # JAX, torch: training, held-out
    ]
    assert "step 20 of 40" in str(verdicts[0]) and "NO" in str(verdicts[0])
    again = lines("jax", "nsa", [6.0])[:1]  # a later line of a step counts
    assert curves.losses([*found, *again])["jax-nsa"][0] == 6.0


@pytest.mark.parametrize("old, new, message", TABLE["lines"])
def test_a_damaged_line_is_named(tmp_path, old, new, message):
    path = tmp_path / "train.jsonl"
    log.append(path, lines("jax", "nsa", [1.0])[:1])
    good = path.read_text()
    path.write_text(good + good.replace(old, new))
    with refused(f"train.jsonl:2: *{message}"):
        log.read(path)


DENSE = "--framework=torch --attention=dense --seq_len=64 --batch=1"
SMALL = (
    f"--seq_len=64 --batch=1 --steps=3 --corpus_bytes={CORPUS}"
    " --set=model.layers=1 --set=model.dim=32"
)


@pytest.fixture
def command(tmp_path, capsys):
    """`main` as the command calls it: exit status, output, lines."""

    def call(*arguments, folder="out"):
        out = tmp_path / folder
        status = commands.called(train, f"--out={out}", *arguments)
        path = out / "train.jsonl"
        return status, capsys.readouterr(), log.read(path) if path.exists() else []

    return call


def test_the_command_trains_all_and_draws(command, tmp_path):
    status, output, found = command(SMALL, "--margin=1 --warmup=0")
    assert status == 0 and "JAX and torch agree at every step, nsa: yes" in output.out
    kinds = [line.kind for line in found]
    assert [kinds.count(kind) for kind in log.KINDS] == [4, 4, 12, 4, 4, 0]
    assert {line.run for line in found} == {"jax-nsa", "jax-dense", "torch-nsa", "torch-dense"}
    assert all((tmp_path / "out" / name).stat().st_size for name in ("train.png", "train.md"))
    # All four are done: nothing is left to resume, and a verdict is an exit status.
    status, _, again = command(SMALL, "--margin=1 --warmup=0 --resume --tolerance=0")
    assert status == train.WRONG and again == found
    for words, folder, message in TABLE["begun"]:
        changed = words.format(out=tmp_path / "out").split()
        with refused(message):
            command(SMALL, "--warmup=0", *changed, folder=folder)


@pytest.mark.parametrize("size, steps, seen", TABLE["seen"])
def test_a_text_that_is_seen_more_than_once_is_told(command, size, steps, seen):
    """Of a text of which a sixteenth is held out; with evaluations on the way."""
    given = f"--steps={steps} --evaluate_every=2 --pack=once --corpus_bytes={size}"
    _, output, found = command(DENSE, given)
    assert found[0].epochs == pytest.approx(seen)
    assert (f"warning: the text is seen {seen:.1f} times" in output.err) == (seen > 1)
    evaluations = [line.steps for line in found if isinstance(line, log.Evaluation)]
    assert evaluations == sorted({*range(2, steps + 1, 2), steps})


@pytest.mark.parametrize("words", TABLE["speeds"])
def test_the_command_measures_speed(command, words, monkeypatch):
    packed = pretend.calls_of(monkeypatch, variants, "nsa", lambda *at: at[-1])
    given = f"--throughput --tokens=64 --row_seconds=0 --corpus_bytes={CORPUS}"
    status, output, found = command(given, "--framework=torch", words)
    rows = [
        f"{x.model} {x.attention} {x.implementation} {x.seq_len} {x.batch} {x.status}"
        for x in found
    ]
    assert [status, rows] == TABLE["speeds"][words] and set(packed) == {"documents" in words}
    for row in found:
        measured = row.status == "ok"
        assert bool(row.time_ms and row.tokens_per_s and row.samples) == measured
        assert measured or row.reason
        assert f"| {row.model} |" in output.out and (
            measured or "| unsupported |" in output.out
        )


@pytest.mark.parametrize(
    "error, status",
    [
        (torch.OutOfMemoryError("no room"), "oom"),
        (NotImplementedError("not here"), "unsupported"),
    ],
)
def test_a_lack_of_memory_is_a_status(command, monkeypatch, error, status):
    monkeypatch.setattr(torch_learner.Learner, "step", mock.Mock(side_effect=error))
    given = "--throughput --lengths=32 --framework=torch --attention=nsa"
    *_, (line,) = command(SMALL, given)
    assert (line.status, line.reason) == (status, f"{type(error).__name__}: {error}")
    assert line.time_ms is None


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_a_run_at_once(capsys):
    with loop.Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked and stop.by == "SIGINT"
        assert "Ctrl-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda x: x.name)
def test_a_signal_saves_and_resume_goes_on(command, tmp_path, number):
    given = f"{DENSE} --steps=200 --corpus_bytes={CORPUS}"
    path = tmp_path / "out" / "train.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.train", f"--out={tmp_path / 'out'}", *given.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == train.STOPPED and "Traceback" not in errors, errors
    done = len(of_kind(log.Step, path))
    assert f"torch-dense stopped: {number.name} after {done} steps, saved to" in errors
    assert f"the same command with --resume --out={tmp_path / 'out'} goes on" in errors
    kept = tmp_path / "out" / "checkpoints" / "torch-dense"
    assert [x.name for x in kept.iterdir()] == [f"step-{done:06d}"] and done < 200
    status, _, found = command(given, "--resume")
    assert status == 0 and len(curves.losses(found)["torch-dense"]) == 200

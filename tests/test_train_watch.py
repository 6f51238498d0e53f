"""What is watched of a run, what a damaged checkpoint does, and bad input of spread runs."""

import dataclasses
import io
import itertools
import json
import os
import sys
from unittest import mock

import jax
import numpy as np
import pytest
import scipy.stats
import torch
from absl import app, flags

from bench import report, scale, train
from bench.harness import cli, launchers
from bench.lm import (
    checkpoint,
    health,
    jax_parallel,
    log,
    side_by_side,
    spread,
    watch,
    watched,
)
from bench.lm.data import Batch
from bench.lm.parallel import Parallel
from bench.lm.share import check_vocabulary
from bench.lm.watch import Settings
from bench.reports import sources
from nsa_core.types import Branches
from tests import commands
from tests.measured import logged, of_kind
from tests.parallel_worker import StopAt, learner_of, task, trained
from tests.test_train import TABLE, command  # noqa: F401, a fixture

DENSE = task("dense", steps=6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), DENSE)


def test_health_is_what_loops_say():
    rng = np.random.default_rng(0)
    gates = rng.uniform(0.01, 1, (7, 2, 3))  # of 7 tokens and 2 heads
    gates[:, 1] = [1e-4, 0.9, 1e-4]  # attends by one branch
    indices = np.array([sorted(rng.choice(6, 3, replace=False)) for _ in range(14)])
    indices = indices.reshape(7, 2, 3)
    indices[0, :, 1:] = -1
    entropies = scipy.stats.entropy(gates, axis=-1).mean(axis=0)
    tokens = (zip(*each, strict=True) for each in itertools.pairwise(indices))
    heads = [({*before}, {*now}) for each in tokens for before, now in each]
    expected = dict(zip(Branches._fields, gates.mean(axis=(0, 1)), strict=True)) | {
        "entropy": entropies.mean(),
        "entropy_min": entropies[1],
        "largest": (gates.max(axis=-1) / gates.sum(axis=-1)).mean(),
        "collapsed": 0.5,
        "overlap": np.mean([len(before & now) / len(now) for before, now in heads]),
    }
    assert entropies[1] < 0.1 and health.layer(gates, indices) == pytest.approx(expected)


def test_what_a_run_leaves(tmp_path):
    todo = task(steps=4)
    settings = Settings(every=2, tensorboard=True)
    run, _, losses = trained(tmp_path, todo, watched=settings)
    found = of_kind(log.Watch, run.path)
    assert [line.step for line in found] == [1, 3] and found[1].loss == losses[3]
    assert [len(line.layers) for line in found] == [2, 2] and found[0].mfu is None
    assert all(0 < layer["overlap"] <= 1 for line in found for layer in line.layers)
    rows = commands.rows(tmp_path / "torch-nsa.csv")
    assert [float(row["loss"]) for row in rows] == [line.loss for line in found]
    assert float(rows[1]["gates/entropy/layer1"]) == found[1].layers[1]["entropy"]
    assert rows[0]["mfu"] == "" and float(rows[0]["tokens_per_s"]) > 0
    events = b"".join(path.read_bytes() for path in (tmp_path / "tb").rglob("events*"))
    for name in (b"loss", b"grad_norm", b"gates/collapsed/layer1", b"gates/overlap/layer0"):
        assert name in events
    beats = watch.heartbeats(tmp_path)["heartbeat_rank0.jsonl"]
    given = sorted(tmp_path.glob("*.jsonl"))  # as a shell names all files of a folder
    assert len(given) == 2 and sources.read(given).files == [str(tmp_path / "train.jsonl")]
    assert [beat["msg"] for beat in beats] == ["boot", "step_end", "step_end", "end"]
    assert [beat["step"] for beat in beats[1:3]] == [1, 3]
    text = report.html(sources.read([run.path]), [])
    assert "No head&#39;s gates have collapsed, torch-nsa: yes (0, bound 0" in text
    assert "No gap in heartbeat_rank0.jsonl: yes" in text and "<td>0</td>" in text


def rates(values) -> list[log.Step]:
    return [logged(log.Step, step=i, tokens_per_s=x) for i, x in enumerate(values)]


@pytest.mark.parametrize("row", TABLE["watched"], ids=lambda row: str(row["ok"]))
def test_verdicts_of_what_was_watched(row, tmp_path):
    about = {"run": "torch-nsa", "step": 3}
    beats = [json.dumps(about | {"ts": ts, "msg": msg}) for ts, msg in row["beats"]]
    (tmp_path / "heartbeat_rank1.jsonl").write_text("\n".join(beats) + '\n{"ts": 99')
    lines = rates(np.repeat(*zip(*row["rates"], strict=True)).tolist())
    for i, collapsed in enumerate(row["collapsed"]):
        layers = [TABLE["watched layer"] | {"collapsed": x} for x in (0.0, collapsed)]
        lines.append(logged(log.Watch, step=i, layers=layers))
    found = watched.verdicts(tmp_path / "train.jsonl", lines)
    for verdict, words in zip(found, row["says"], strict=True):
        assert verdict.ok == row["ok"] and words in str(verdict)


def header(parallel=None, **training) -> log.Header:
    return logged(log.Header, training=training, parallel=parallel)


def test_losses_on_other_devices_are_compared():
    spread = dataclasses.asdict(Parallel("fsdp", 4, accumulate=2))
    steps = rates([1.0] * 30)

    def beside(change, **values):
        other = [dataclasses.replace(x, loss=1.0 + change * (x.step == 7)) for x in steps]
        files = [("a/1", [header(), *steps]), ("b/2", [header(spread, **values), *other])]
        return watched.parity(files)

    for change, fate in ((5e-6, True), (2e-5, False)):
        (verdict,) = beside(change)
        assert verdict.ok == fate and "step 7 of 20, b" in str(verdict)
        assert "fsdp on 4 devices, 2 micro-batches" in str(verdict)
    assert beside(0.0, lr=2.0) == []  # another task


def test_runs_side_by_side_are_a_figure(tmp_path):
    spread = dataclasses.asdict(Parallel("ddp", 2)) | {"graph": True}
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl", "both.jsonl")]
    for path, parallel in zip(files, (None, spread, None), strict=True):
        log.append(path, [header(parallel, batch=4, seq_len=64), *rates([1.0] * 30)])
    log.append(files[2], [dataclasses.replace(header(), attention="dense")])
    figure = tmp_path / "losses.svg"
    run = lambda *paths: side_by_side.main(["side_by_side", *map(str, paths)])
    assert run(figure, *files[:2]) == 0
    text = figure.read_text()
    assert "torch-nsa, 1: 1.0000" in text and "torch-nsa, 2 ddp, graph: 1.0000" in text
    other = tmp_path / "other.jsonl"
    log.append(other, [header(spread, lr=2.0), *rates([1.0] * 30)])
    for given, message in (
        (files, r"both.jsonl must contain one run, got \['torch-dense'"),
        ([files[0], other], "other.jsonl must have the same model, .* as .*one.jsonl"),
        (files[:1], "at least two record files"),
    ):
        with pytest.raises((ValueError, app.UsageError), match=message):
            run(figure, *given)


@pytest.mark.parametrize("two, fates", TABLE["scaling"])
def test_scaling_is_a_verdict(two, fates):
    """Beside one device with 8 rows and 1000 tokens per second."""
    one = dict(devices=1, batch=8, tokens_per_s=1000.0)
    lines = [logged(log.Speed, **x) for x in (one, two)]
    found = watched.parity([("a", lines)])
    assert [verdict.ok for verdict in found] == fates
    assert all("2 devices keep their tokens/s" in str(verdict) for verdict in found)


@pytest.mark.parametrize("damage", ["bits", "short", "gone", "progress"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(whole, tmp_path, capfd, damage):
    run, *_ = trained(tmp_path, DENSE, stop=StopAt(5, True), save_every=2)
    newest = run.folder / "step-000005"
    path = newest / ("progress.json" if damage == "progress" else "mean.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data[:-9] if damage in ("short", "progress") else data)
    if damage == "gone":
        path.unlink()
    _, summary, losses = trained(tmp_path, DENSE)
    told = capfd.readouterr().err
    assert f"warning: {newest}: {path.name} is " in told
    assert f"continuing from {run.folder / 'step-000004'}" in told
    assert summary == whole[1]
    np.testing.assert_array_equal(losses, whole[2])
    for kept in run.folder.iterdir():
        (kept / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete: .*weights"):
        trained(tmp_path, DENSE)  # nothing starts anew


def test_a_full_disk_on_the_way_ends_no_run(whole, tmp_path, monkeypatch, capfd):
    ends = mock.DEFAULT, OSError(28, "No space left on device"), mock.DEFAULT
    publish = mock.Mock(wraps=checkpoint._publish, side_effect=ends)
    monkeypatch.setattr(checkpoint, "_publish", publish)
    # As of a process that was killed while it wrote a checkpoint.
    (tmp_path / "kept" / ".step-000004.1f" / "half").mkdir(parents=True)
    run, summary, _ = trained(tmp_path, DENSE, save_every=2)
    assert summary == whole[1]
    stays = f"{run.folder / 'step-000002'} remains: [Errno 28] No space left"
    assert (
        f"warning: the checkpoint after 4 steps was not written, and {stays}"
        in capfd.readouterr().err
    )
    kept = [path.name for path in checkpoint.found(run.folder)]
    assert kept == ["step-000006", "step-000002"]
    assert len(list(run.folder.iterdir())) == 2  # nothing half written


def test_a_token_that_the_model_does_not_know():
    batch = Batch(np.array([[3, 255]]))
    check_vocabulary(batch, 256)
    with pytest.raises(ValueError, match=r"vocabulary must exceed every token .* got vocab"):
        check_vocabulary(batch, 255)


@pytest.mark.parametrize(
    "tensor, text",
    [(1, "devices must be 1, the number of processes"), (2, "tensor must be 1")],
)
def test_bad_layouts_of_torch(tmp_path, tensor, text):
    with pytest.raises((ValueError, NotImplementedError), match=text):
        learner_of(tmp_path, DENSE, Parallel("ddp", 2, tensor))


def test_processes_of_jax_without_a_device_in_the_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="devices must be 8, the number of devices of all 2 processes, got 4"
    ):
        jax_parallel.Layout.of(Parallel("ddp", 4), DENSE.model)


@pytest.mark.parametrize("words, graph", TABLE["graphs"].items())
def test_what_is_a_graph(words, graph):
    commands.parsed(train.FLAGS, "train", "--framework=torch", *words.split())
    assert train._variant("torch", DENSE, "math").graph == graph


# Variables of a process that torchrun started by itself.
ONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
ONE |= {"TORCHELASTIC_RUN_ID": "one"}


@mock.patch.dict(os.environ, ONE)
def test_safe_ranks_compare_collectives():
    own = cli.define(flags.FlagValues(), **spread.DEFINED)
    own(["train", "--parallel=ddp", "--ddp_safe"])
    ranks = spread.ranks(own, "torch")
    group = torch.distributed.group.WORLD
    try:
        assert "Wrapper" in type(group._get_backend(torch.device("cpu"))).__name__
    finally:
        ranks.close()


LAUNCHED = TABLE["launched"]


@pytest.mark.parametrize("launcher", LAUNCHED)
@pytest.mark.parametrize("arguments", TABLE["used"])
def test_several_processes_that_do_not_know_each_other(
    command,  # noqa: F811
    tmp_path,
    launcher,
    arguments,
):
    """Each would train a copy, all into one --out."""
    told = f"^{launcher} started 2 processes .*{TABLE['used'][arguments]}"
    with mock.patch.dict(os.environ, LAUNCHED[launcher]), pytest.raises(ValueError, match=told):
        command("--steps=1 --corpus_bytes=65536", *arguments.split())
    assert not list(tmp_path.rglob("train.jsonl"))


@pytest.mark.parametrize("alone", TABLE["alone"])
def test_a_process_by_itself(alone):
    with mock.patch.dict(os.environ, alone):
        launchers.check_one()


@mock.patch.dict(os.environ, LAUNCHED["torchrun"])
def test_other_commands_are_one_process(capsys):
    ran = []
    assert commands.start(ran.append) == 2 and not ran
    assert "torchrun started 2 processes (WORLD_SIZE=2)" in capsys.readouterr().err
    scale.FLAGS(["scale"])
    with pytest.raises(ValueError, match="torchrun started 2 processes"):
        scale.main(["scale"])
    scale.FLAGS.unparse_flags()


def test_a_lost_rank_is_an_exit_status(command, monkeypatch, capsys):  # noqa: F811
    lost = mock.Mock(side_effect=train.LostError("rank 0 of 2 lost another rank"))
    monkeypatch.setattr(train.loop, "run", lost)
    status, output, _ = command("--framework=torch --steps=1 --corpus_bytes=65536")
    assert status == train.LOST and "error: rank 0 of 2 lost another rank" in output.err


def test_progress_on_a_terminal_and_elsewhere(monkeypatch, capsys):
    with watch.progress("torch-nsa", 0, 20) as shown:
        for done in range(1, 21):
            shown(done, 2.5, 12.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and "step 2 of 20: loss 2.5000, 12 ms, 0:00:0" in lines[0]
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with watch.progress("torch-nsa", 5, 20) as shown:
        shown(6, 2.5, 12.0)
    assert "6/20" in terminal.getvalue() and "loss 2.5000" in terminal.getvalue()
    with watch.progress("torch-nsa", 0, 2, silent=True) as shown:
        shown(1, 2.5, 12.0)
    assert capsys.readouterr().err == ""

"""`bench.lm.experiments`: runs of a small experiment, what they leave, and going on with them."""

import dataclasses
import itertools
import json
import os
import queue

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.lm import (
    checkpoint,
    corpus,
    experiments,
    log,
    measures,
    parallel,
    quality,
    selection,
    spec,
)
from nsa_torch import NSAAttention
from tests import commands, pretend
from tests.oracles import nsa
from tests.parallel_worker import altered, learner_of, stepped
from tests.refusals import refused
from tests.test_train import SIZES, TABLE, task

SEVERAL = TABLE["layers"]["several"]
TINY = experiments.Setting("tiny", batch=1, length=300, steps=3, lr=1e-2)
SMALL = experiments.Experiment("?", "tiny", ("dense", "sigmoid"), (0, 1))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command on a small corpus; status and names of runs, in their order."""
    monkeypatch.setitem(experiments.SETTINGS, "tiny", TINY)
    monkeypatch.setitem(experiments.EXPERIMENTS, "small", SMALL)
    model = {"layer": spec.LayerSpec(**SIZES), "layers": 1, "hidden": 8}
    monkeypatch.setitem(spec.MODELS, "tiny", model)
    tokens = np.random.default_rng(0).integers(0, 260, 6000).astype(np.uint16)
    tokens[0] = 0
    about = {
        "schema": corpus.SCHEMA,
        "vocabulary": 260,
        "tokens": [4500, 1500],
        "sha256": {
            "tokens.xz": corpus.sha256(tokens.tobytes()),
            "tokenizer.json": corpus.sha256(b"{}"),
        },
    }
    corpus.write(tmp_path / "corpus", about, b"{}", tokens)

    def run(*words):
        places = f"--corpus={tmp_path / 'corpus'}", f"--out={tmp_path / 'runs'}"
        return commands.called(experiments, *places, *words, "small")

    return run


def test_runs_of_a_seed_are_pairs_and_those_that_are_there_stay(command, tmp_path, capsys):
    assert command("--seeds=1", "--runs=dense") == 0
    first = (tmp_path / "runs/tiny/dense-1.jsonl").read_bytes()
    assert command("--seeds=1,2", "--commit=c0ffee") == 0
    said = capsys.readouterr().out.split("\n")
    assert [x.split(":")[0] for x in said if x.startswith("tiny")] == [
        "tiny/dense-1", "tiny/sigmoid-1", "tiny/dense-2", "tiny/sigmoid-2",
    ]  # fmt: skip
    paths = sorted((tmp_path / "runs/tiny").iterdir())
    assert len(paths) == 4 and paths[0].read_bytes() == first
    found = {x.stem: log.read(x) for x in paths}
    for name, lines in found.items():
        kinds = [x.kind for x in lines]
        assert kinds.count("step") == 1 and kinds.count("evaluation") == 3, name
        (end,) = (x for x in lines if isinstance(x, log.Summary))
        assert end.status == "ok" and end.recall_gain is not None
        assert bool(end.hits) == name.startswith("sigmoid")
        assert lines[0].epochs == pytest.approx(3 * 300 / 4500)
    (group,) = quality.groups(found)
    assert [kind.label for kind in group.kinds] == ["dense", "nsa gate=sigmoid n_sel=4"]
    assert command("--seeds=1,2") == 0 and "all runs are in" in capsys.readouterr().out


def test_a_run_that_may_not_end_in_time_is_left_out(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "_longest", 1000.0)
    assert command("--limit=500") == 3
    assert capsys.readouterr().out.count("left out") == 4 and not (tmp_path / "runs").exists()


def test_a_run_that_breaks_leaves_nothing_and_others_go_on(command, tmp_path, capsys):
    """Rows of 5000 tokens, where the corpus has 1500 held out."""
    assert command("--seeds=0", "--seq_len=5000") == 1
    said = capsys.readouterr().out
    assert said.count("ValueError: tokens of dataset") == 2
    assert not list((tmp_path / "runs").rglob("*.jsonl"))


def test_runs_at_a_time_take_the_gpus_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert experiments.gpus() == ["3", "1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    pretend.gpu(monkeypatch, count=2)
    places = queue.SimpleQueue()
    for place in experiments.gpus():
        places.put(place)
    for place in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        experiments.take_gpu(places)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == place
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    pretend.gpu(monkeypatch, None)
    assert experiments.gpus() == [""]


def test_two_runs_at_a_time(command, tmp_path, monkeypatch, capsys):
    """In processes of their own, which parse no flags and have the models of the file."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command("--seeds=1", "--jobs=2") == 0, capsys.readouterr().out
    found = [x.name for x in (tmp_path / "runs/tiny").iterdir()]
    assert sorted(found) == ["dense-1.jsonl", "sigmoid-1.jsonl"]


def job(setting, variant, seed=0):
    path = experiments.Path("x")
    return experiments.Job(
        experiments.SETTINGS[setting], variant, seed, "", path, None, True, 0.0
    )


def test_experiments_can_be_run():
    """Every run has a model, and sees each row once, a long one twice."""
    large = 265 / 42  # a corpus of 265 million tokens
    times = {"52m_8k_long": 2, "52m_8k_changes": 2}
    times |= dict.fromkeys(("52m_2k_once", "52m_8k_once", "52m_8k_tasks", "125m_8k"), large)
    for name, at in experiments.EXPERIMENTS.items():
        assert at.runs[0] == "dense" and set(at.runs) <= experiments.VARIANTS.keys(), name
        setting = experiments.SETTINGS[at.setting]
        runs = [x for x in at.runs if experiments.VARIANTS[x].commit is None]
        for variant, seed in itertools.product(runs, at.seeds):
            todo = experiments.task(job(at.setting, variant, seed), 8192, "bfloat16")
            json.dumps(todo.settings())
            # The tokens of the corpus, which long runs see twice.
            seen = setting.steps * todo.tokens() / 41_754_102
            assert setting.text or seen < times.get(at.setting, 1)
    wide, nsa = (
        experiments.task(job("52m_2k", variant), 8192, "float32").model.products()
        for variant in ("dense_wide", "head")
    )
    assert wide == pytest.approx(nsa, rel=1e-3)


@pytest.mark.parametrize("changes", TABLE["variants"], ids=str)
def test_variants_of_the_model(changes, tmp_path):
    """Products are what is counted, a step moves all weights, and what they cannot is refused."""
    changes = {"layer": {}} | changes
    todo = altered(task("nsa"), **changes)
    model = todo.model
    learner, run = learner_of(tmp_path, todo)
    matrices = [x for x in learner.master.parameters() if x.ndim > 1]
    assert model.products() == sum(x.numel() for x in matrices) - model.vocabulary * 16
    before = [x.detach().clone() for x in learner.master.parameters()]
    (first,) = stepped(learner, run, [0])
    pairs = zip(before, learner.master.parameters(), strict=True)
    assert all((x != y).any() for x, y in pairs)
    assert stepped(learner, run, (1, 2, 3))[-1] < first
    assert len(learner.observe(run.batches.train(0))) == 2 - model.dense_layers()
    path = checkpoint.save(tmp_path / "kept", learner, 4, run.settings())
    again, _ = learner_of(tmp_path, todo)
    assert checkpoint.load_last(path.parent, again, run.settings()) == 4
    batch = run.batches.train(5)
    assert measures.loss(learner, batch) == measures.loss(again, batch)
    with refused("must be 0 for the JAX model", NotImplementedError):
        learner_of(tmp_path, todo, framework="jax")
    if "selection_loss" in changes:
        with refused("selection_loss must be 0 on several devices", NotImplementedError):
            learner_of(tmp_path, todo, parallel.Parallel("ddp", 2))
        packed = batch._replace(segment_ids=np.zeros(batch.tokens.shape, np.int32))
        with refused("selection_loss must be 0 for packed", NotImplementedError):
            measures.loss(learner, packed)


@pytest.mark.parametrize("attention, change, message", TABLE["models"])
def test_variants_of_a_model_that_are_refused(attention, change, message):
    with refused(message):
        dataclasses.replace(task(attention).model, **change)


ROWS = nsa.Rows(100, 100, (100,))


def attended(query, key):
    """How much is attended to each block of 8 tokens, by the heads of a group together
    `[B, T, groups, blocks]`.
    """
    causal = torch.ones(100, 100, dtype=torch.bool).tril()[None, None]
    *_, probability = nsa.attend(query, key, key, causal, None)
    by_block = F.pad(probability.sum(2), (0, 4)).unflatten(-1, (-1, 8))
    return by_block.sum(-1).transpose(1, 2)


def test_the_selection_s_loss():
    torch.manual_seed(0)
    x = torch.randn(2, 100, 16) + 3 * torch.randn(2, 25, 16).repeat_interleave(4, dim=1)
    attention = NSAAttention(**SEVERAL, gate="head", phi="avg")
    query, key, _, _ = attention.project(x, torch.arange(100).expand(2, 100))
    config = attention.spec.config
    compressed = nsa.compress(key.compressed, config, ROWS)
    mask = nsa.compressed_mask(config, ROWS)
    *_, coarse = nsa.attend(query, compressed, compressed, mask, None)
    masses, scores = attended(query, key.selected), nsa.scores(coarse, config, ROWS)
    total = mass = 0.0
    # Queries before 24 have no other blocks than the first and the last two.
    for t in range(24, 100, selection.EVERY):
        p, s = (x[:, t, :, 1 : t // 8 - 1] for x in (masses, scores))
        p_share, s_share = (F.normalize(x, 1, -1) for x in (p, s))
        total += (p * (p_share / s_share).log()).sum().item()
        mass += p.sum().item()
    found = selection.loss(attention, x)
    assert found.item() == pytest.approx(total / mass, rel=1e-5)
    # It trains the compressed keys alone; a step along their gradient changes it by its square.
    found.backward()
    given = attention.named_parameters()
    ((name, weight),) = ((name, x) for name, x in given if x.grad is not None and x.grad.any())
    after = []
    for step in (-0.01, 0.02):
        weight.data += step * weight.grad
        after.append(selection.loss(attention, x).item())
    assert name == "W_K_cmp.weight"
    assert np.diff(after) / 0.02 == pytest.approx(weight.grad.square().sum().item(), rel=0.01)


@pytest.mark.gpu
def test_runs_on_a_gpu(command, tmp_path):
    """By 16-bit tokens, in bfloat16, steps as CUDA graphs."""
    assert command("--seeds=1") == 0
    (group,) = quality.groups({x.stem: log.read(x) for x in (tmp_path / "runs/tiny").iterdir()})
    assert [kind.label for kind in group.kinds] == ["dense", "nsa gate=sigmoid n_sel=4"]
    assert {x.header.dtype for kind in group.kinds for x in kind.runs.values()} == {"bfloat16"}

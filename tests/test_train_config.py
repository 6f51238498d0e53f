"""Runs from YAML: every file, the strict loader, the seed system's names, who wins."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest
import torch
from absl import flags
from absl.testing import flagsaver

from bench import train
from bench.lm import config_file, spec
from bench.lm.parallel import Parallel
from nsa_core import config_files
from tests import refusals
from tests.commands import parsed
from tests.test_train import TABLE, command  # noqa: F401, a fixture

FILES = sorted(path.stem for path in config_file.FOLDER.glob("*.yaml"))


def test_the_files_there_are():
    runbook = {f"runbook_{name}" for name in ("s512", "s1024", "s2048", "prod_2048")}
    assert set(FILES) == {"tiny", "125m", "125m_2gpu"} | runbook


@pytest.fixture
def own():
    """Parses the flags of bench.train; those of kernels are then as they were."""
    with flagsaver.flagsaver():
        yield functools.partial(parsed, train.FLAGS, "train")


def read(*how):
    """A config, of which the flags are set."""
    found, values, told = config_file.read(*how)
    config_file.apply(values, (train.FLAGS, flags.FLAGS))
    return found, values, told


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_understood(name, own):
    own()
    found, values, told = read(name)
    task, *_ = train._tasks(found)
    layer = task.model.layer
    assert not told and found.fitted(task, 256).model.vocabulary == 256
    if name != "tiny":  # the seed system's shape
        sizes = layer.dim, layer.n_heads, layer.n_kv_groups, layer.d_k, layer.d_v
        assert (*sizes, task.model.layers) == (768, 12, 2, 64, 64, 12)
    if name.startswith("runbook_s"):
        assert task.training.seq_len == int(name.removeprefix("runbook_s"))
        assert (values["runtime.kernels"], values["runtime.ranges"]) == ("fa2", "adaptive")


def test_the_first_file_lists_every_key():
    listed = config_file._flat(config_files.load(config_file.path_of("tiny")))
    assert sorted(listed) == list(config_file.KEYS)


def test_every_flag_of_the_table_is_one():
    assert set(config_file.FLAGS.values()) <= {*train.FLAGS, *flags.FLAGS}
    assert set(config_file.SEED_KEYS.values()) <= set(config_file.KEYS)
    assert not set(config_file.OWN) & config_file.FLAGS.keys()


@pytest.mark.parametrize("row, sentence, error", refusals.rows("training"))
def test_faults_name_file_and_key(row, sentence, error, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(row["text"])
    with pytest.raises(error, match=f"run.yaml.*{refusals.words(sentence)}"):
        config_file.read(str(path))


NOT_FINITE = itertools.product(("lr", "clip", "eps", "weight_decay"), (np.inf, np.nan, -1.0))


@pytest.mark.parametrize(
    "name, value", [*NOT_FINITE, ("lr", 10**38), ("beta2", 1.0), ("steps", 0)]
)
def test_training_is_of_finite_numbers(name, value):
    """They are lines of JSON too."""
    with pytest.raises(
        ValueError,
        match=rf"{name} must be (>=? [01]|<= 1e30|in \[0, 1\)), got {value}",
    ):
        spec.Training(**dict(steps=1, batch=1, seq_len=1, warmup=0) | {name: value})


@pytest.mark.parametrize("name", ["runbook_s512", "configs/runbook_s512.yaml"])
def test_a_run_by_its_name_and_by_the_seeds_path(name, tmp_path, monkeypatch):
    """A file that is there is that file."""
    assert config_file.path_of(name) == config_file.FOLDER / "runbook_s512.yaml"
    monkeypatch.chdir(tmp_path)
    assert config_file.path_of(name) == config_file.FOLDER / "runbook_s512.yaml"
    own = tmp_path / "configs" / "runbook_s512.yaml"
    own.parent.mkdir()
    own.touch()
    assert config_file.path_of(str(own)) == own
    with pytest.raises(FileNotFoundError):
        config_file.path_of("other/runbook_s512.yaml")


def test_the_seed_systems_names():
    seed = TABLE["seed"]
    found, values, told = config_file.read(None, seed["changes"])
    assert values == seed["values"]
    assert (found.nsa["select_block"], found.nsa["window"]) == (128, 9)
    assert [line.split()[1].split("=")[0] for line in told] == seed["ignored"]


def test_who_wins(own):
    own("--lr=0.5", "--steps=7")
    read("tiny", ["train.steps=8", "train.batch=9"])
    assert (train.FLAGS.lr, train.FLAGS.steps, train.FLAGS.batch) == (0.5, 7, 9)
    assert train.FLAGS.seq_len == 512 and train.FLAGS.dataset == "text"


@pytest.mark.parametrize("given, changes, expected", TABLE["batches"])
def test_one_of_two_words_for_the_batch_wins(own, given, changes, expected):
    own(*given)
    read("tiny", changes)
    assert [train.FLAGS.batch, train.FLAGS.batch_size] == expected


SMALL = ("--framework=torch", "--attention=dense", "--batch=1", "--steps=2", "--seq_len=64")


def test_a_run_from_a_file(command, tmp_path):  # noqa: F811
    """A changed model on documents of a file, and what may not change before it goes on."""
    texts = tmp_path / "texts.jsonl"
    lines = [json.dumps({"body": f"{i} of the documents " * 9}) + "\n" for i in range(40)]
    texts.write_text("".join(lines))
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{name: tiny, dim: 32, layers: 1, vocabulary: 300}}\n"
        f"train: {{weight_decay: 0.5, lr: 1e-3}}\n"
        f"data: {{dataset: {texts}, text_column: body, pack: none, cache: {tmp_path}/cache}}\n"
    )
    given = (*SMALL, f"--config={run}")
    status, _, found = command(*given)
    header = found[0]
    assert status == 0 and (header.model["dim"], header.model["hidden"]) == (32, 96)
    assert (header.model["vocabulary"], header.training["weight_decay"]) == (300, 0.5)
    assert header.training["lr"] == 1e-3 and len(header.input_sha256) == 64
    assert found[-1].kind == "speed" and found[-1].model == "tiny-changed"
    texts.write_text("".join(lines[:-1]))
    (tmp_path / "out" / "train.jsonl").unlink()  # as if the run were not done
    for changes, message in (
        ((), "input_sha256 must be .* as in the checkpoint"),
        (("--set=model.dim=64",), "dim must be 32 as in the checkpoint, got 64"),
    ):
        with pytest.raises(ValueError, match=message):
            command(*given, "--resume", *changes)


SEED_RUN = ("--set=train.batch_size=1", "--set=train.accumulate_grad_batches=4")


@pytest.mark.parametrize(
    "arguments, layout",
    [
        ("--framework=torch", Parallel(accumulate=4)),
        ("--framework=jax --parallel=fsdp --devices=4 --tensor=2", Parallel("fsdp", 4, 2, 4)),
    ],
)
def test_the_seeds_batch_size_is_a_devices_micro_batch(command, arguments, layout):  # noqa: F811
    """1 x 4 of accumulation are 4 rows per step, of each device."""
    small = "--attention=dense --steps=1 --seq_len=32 --corpus_bytes=65536"
    small += " --set=model.dim=32 --set=model.layers=1"
    status, output, found = command(*small.split(), *SEED_RUN, *arguments.split())
    header = found[0]
    graph = "torch" in arguments and torch.cuda.is_available()
    assert status == 0 and header.parallel == dataclasses.asdict(layout) | {"graph": graph}
    batch = header.training["batch"]
    assert batch == 4 * layout.replicas
    rows = f"{batch=} rows per step"
    assert f"batch_size=1 x accumulate=4 x {layout.replicas} replica(s): {rows}" in output.out

"""The seed system's scripts and test names lead to what is here."""

import functools
import importlib.util
import itertools
import re
import shlex

import pytest

from bench import doc_tables, train
from bench.harness import seed_env, seed_names
from bench.harness.process import ROOT
from bench.judge import parity
from bench.lm import config_file
from tests import parse_commands

# What the seed system's five documents run.
SCRIPTS = """bench_fa2 bench_sel_triton bench_decode summarize_decode_csv bench_masked
threshold_optimizer sel_threshold_from_csv run_automated_bench prime_gpu_bench modal_gpu_bench
runner_oneshot train_showcase check_availability"""


def test_every_script_of_the_documents_is_in_the_table():
    names = {re.split(r"[/.]", script.seed)[1] for script in seed_names.SCRIPTS}
    assert set(SCRIPTS.split()) <= names
    assert len(names) == len(seed_names.SCRIPTS)


@pytest.mark.parametrize("script", seed_names.SCRIPTS, ids=lambda script: script.seed)
def test_what_stands_in_its_place_is_there(script):
    program, *words = script.here.split()
    if program == "-":
        assert script.note
    elif words[0] == "-m":
        assert program == "python" and importlib.util.find_spec(words[1]), words
    else:
        assert all((ROOT / word).is_file() for word in words if "/" in word)


@pytest.mark.parametrize("keyword", seed_names.TESTS)
def test_every_keyword_selects_a_test(keyword):
    path = ROOT / seed_names.TESTS[keyword]
    found = re.findall(r"def (test_\w+)", path.read_text())
    assert any(keyword in f"{path.name} {name}" for name in found), found


BENCH = [
    x for x in seed_names.COMMANDS if " -m bench." in x.here or x.here.startswith("torchrun")
]


def before(seed):
    """The variables before a command."""
    words = itertools.takewhile(lambda word: "=" in word, shlex.split(seed))
    return dict(word.split("=", 1) for word in words)


@functools.cache
def parsed():
    """Of each of `BENCH` its line, and its command alone after the seed's variables."""
    lines = []
    for command in BENCH:
        (given,) = parse_commands.lines(f"`{command.here}`")
        lines += [given, given._replace(variables=before(command.seed), words=[])]
    found = parse_commands.parsed(lines)
    return dict(zip(BENCH, itertools.batched(found, 2), strict=True))


@pytest.mark.parametrize("command", BENCH, ids=lambda command: command.seed)
def test_a_command_of_the_documents(command):
    """The line that is given parses, and the variables before the seed's are those flags."""
    given, bare = parsed()[command]
    assert given.ok and bare.ok, given.said + bare.said
    environ = before(command.seed)
    assert all(f"warning: {name}=" in bare.said for name in environ)
    meant = [x for name in environ for x in seed_env.TABLE[name].flags]
    if "CONFIG" in environ:
        assert config_file.path_of(bare.values["config"]) == config_file.path_of(
            given.values["config"]
        )
        meant.remove("config")
    assert {x: bare.values[x] for x in meant} == {x: given.values[x] for x in meant}


TESTED = [x for x in seed_names.COMMANDS if " -m pytest " in x.here]


@pytest.mark.parametrize("command", TESTED, ids=lambda command: command.seed)
def test_tests_of_the_documents(command):
    words = shlex.split(command.here)
    keywords = words[words.index("-k") + 1].split(" or ")
    assert set(keywords) <= set(seed_names.TESTS)
    assert set(before(command.seed)) <= set(seed_env.TABLE)


def test_every_command_is_tried():
    others = [x.here for x in seed_names.COMMANDS if x not in BENCH + TESTED]
    assert [" ".join(x.split()[:2]) for x in others] == ["make setup", "python cloud/launch.py"]
    for _, here, note in seed_names.TRAIN_FLAGS:
        flag = here.split()[0].removeprefix("--")
        assert flag in train.FLAGS or (flag == "-" and note), here


@pytest.mark.parametrize(
    "flag, variable, key",
    [
        ("--batch-size N", "NSA_BATCH_SIZE", "train.batch_size"),
        ("--accum-batches N", "NSA_ACCUM", "train.accumulate_grad_batches"),
        ("--seq-len N", "NSA_SEQ_LEN", "train.seq_len"),
    ],
)
def test_a_flag_its_variable_and_its_key_are_one(flag, variable, key):
    (here,) = (
        x.here.split()[0].removeprefix("--") for x in seed_names.TRAIN_FLAGS if x.seed == flag
    )
    assert list(seed_env.TABLE[variable].flags) == [here]
    assert config_file.FLAGS[config_file.SEED_KEYS.get(key, key)] == here


def test_tolerances_of_the_documents():
    """As docs/seed.md says."""
    assert parity.FLOAT32_MAX == 5e-5 and parity.LOW_PRECISION_SELECTION_MEAN == 1e-3
    text = (ROOT / "docs" / "seed.md").read_text()
    assert "| FP32 <= 5e-5 |" in text and "| MAE <= 1e-3 |" in text


def test_the_table_is_markdown():
    lines = doc_tables.TABLES["seed_names"]().splitlines()
    assert (
        "| `bench/bench_fa2.py` | `python -m bench.fa2` | `--csv`: the sweep's columns |"
        in lines
    )
    assert {line.count("|") for line in lines if line} == {3, 4}

"""The seed system's scripts and test names lead to what is here."""

import collections
import importlib
import importlib.util
import itertools
import re
import shlex
from typing import cast

import pytest
from absl import flags
from absl.testing import flagsaver

from bench import train
from bench.harness import seed_env, seed_names
from bench.harness.process import ROOT
from bench.judge import parity
from bench.lm import config_file

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
    if program == "python" and words[0].endswith(".py"):
        assert all((ROOT / word).is_file() for word in words)
    elif program == "python":
        assert words[0] == "-m" and importlib.util.find_spec(words[1]), words
        module = (ROOT / f"{words[1].replace('.', '/')}.py").read_text()
        shared = "".join((ROOT / path).read_text() for path in ("nsa_core/flags.py",))
        for flag in (word[2:] for word in words if word.startswith("--")):
            known = flag in module or flag.removesuffix("_kernel") in shared
            assert known or flag == "selected_kernel", flag
    elif program in ("sky", "modal"):
        assert all((ROOT / word).is_file() for word in words if "/" in word)
    else:
        assert program == "-" and script.note


@pytest.mark.parametrize("keyword", seed_names.TESTS)
def test_every_keyword_selects_a_test(keyword):
    path = ROOT / seed_names.TESTS[keyword]
    found = re.findall(r"def (test_\w+)", path.read_text())
    assert any(keyword in f"{path.name} {name}" for name in found), found


def flags_of(words):
    """The flags of the command of `bench` in these words of a shell, by name, parsed."""
    name, *arguments = words[words.index("-m") + 1 :]
    module = importlib.import_module(name)
    own = getattr(module, "FLAGS", None)
    rest = [name, *arguments]
    if isinstance(own, flags.FlagValues):
        for flag in own:
            own[flag].unparse()
        rest = own(rest, known_only=True)
    else:
        own = {}
    rest = flags.FLAGS(rest)[1:]
    assert not any(word.startswith("-") for word in rest), "no flag is left"
    return collections.ChainMap(*({x: each[x] for x in each} for each in (own, flags.FLAGS)))


BENCH = [
    x for x in seed_names.COMMANDS if " -m bench." in x.here or x.here.startswith("torchrun")
]


@pytest.mark.parametrize("command", BENCH, ids=lambda command: command.seed)
def test_a_command_of_the_documents(command):
    """The line that is given parses, and the variables before the seed's are those flags."""
    words = shlex.split(command.here)
    with flagsaver.flagsaver():
        given = {name: flag.value for name, flag in flags_of(words).items()}
        bare = flags_of(words[: words.index("-m") + 2])
        before = itertools.takewhile(lambda word: "=" in word, shlex.split(command.seed))
        environ = dict(word.split("=", 1) for word in before)
        if (config := environ.pop("CONFIG", None)) is not None:
            assert config == f"configs/{given['config']}.yaml"
            assert config_file.path_of(given["config"]).is_file()
        name = words[words.index("-m") + 1].removeprefix("bench.")
        told = list(seed_env.apply(cast(flags.FlagValues, bare), name, environ))
        assert len(told) == len(environ)
        meant = [x for name in environ for x in seed_env.TABLE[name].flags]
        assert {x: bare[x].value for x in meant} == {x: given[x] for x in meant}


TESTED = [x for x in seed_names.COMMANDS if " -m pytest " in x.here]


@pytest.mark.parametrize("command", TESTED, ids=lambda command: command.seed)
def test_tests_of_the_documents(command):
    words = shlex.split(command.here)
    keywords = words[words.index("-k") + 1].split(" or ")
    assert set(keywords) <= set(seed_names.TESTS)
    for name in itertools.takewhile(lambda word: "=" in word, shlex.split(command.seed)):
        assert name.partition("=")[0] in seed_env.TABLE


def test_every_command_is_tried():
    others = [x.here for x in seed_names.COMMANDS if x not in BENCH + TESTED]
    assert [x.split()[:2] for x in others] == [
        ["make", "setup"],
        ["python", "cloud/launch.py"],
    ]
    known = {flag for flag in train.FLAGS}
    for here, note in seed_names.TRAIN_FLAGS.values():
        flag = here.split()[0].removeprefix("--")
        assert flag in known or (flag == "-" and note), here


@pytest.mark.parametrize(
    ("flag", "variable", "key"),
    [
        ("--batch-size N", "NSA_BATCH_SIZE", "train.batch_size"),
        ("--accum-batches N", "NSA_ACCUM", "train.accumulate_grad_batches"),
        ("--seq-len N", "NSA_SEQ_LEN", "train.seq_len"),
    ],
)
def test_a_flag_its_variable_and_its_key_are_one(flag, variable, key):
    here = seed_names.TRAIN_FLAGS[flag][0].split()[0].removeprefix("--")
    assert list(seed_env.TABLE[variable].flags) == [here]
    assert config_file.FLAGS[config_file.SEED_KEYS.get(key, key)] == here


def test_tolerances_of_the_documents():
    """As docs/seed.md says."""
    assert parity.FLOAT32_MAX == 5e-5 and parity.LOW_PRECISION_SELECTION_MEAN == 1e-3
    text = (ROOT / "docs" / "seed.md").read_text()
    assert "| FP32 <= 5e-5 |" in text and "| MAE <= 1e-3 |" in text


def test_the_table_is_markdown():
    lines = seed_names.markdown().splitlines()
    assert (
        "| `bench/bench_fa2.py` | `python -m bench.fa2` | `--csv`: the sweep's columns |"
        in lines
    )
    assert {line.count("|") for line in lines if line} == {3, 4}

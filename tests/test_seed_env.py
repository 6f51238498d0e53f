"""The seed system's environment variables: one table, one line each, the command line wins."""

import inspect

import pytest
from absl import flags

import nsa_torch
from bench import compare, doc_tables, fa2, train
from bench.harness import cli, seed_env
from nsa_core import flags as kernel_flags
from tests import commands
from tests.tables import table

KERNELS = "kernels", "compressed_kernel", "selected_kernel", "sliding_kernel"
LENGTHS = "fa2_min_len_win", "fa2_min_len_cmp", "sel_triton_min_L"


def parsed(*words, **more):
    """Flags of a command that measures, parsed from words."""
    own = cli.define(
        **dict.fromkeys(KERNELS, ("auto", "")),
        **dict.fromkeys(LENGTHS, (str, "")),
        log=([], ""),
        log_limit=(100, ""),
        seq_len=(int, ""),
        config=(str, ""),
        path=("auto", "", ("auto", "varlen", "dense")),
        **more,
    )
    own(["compare", *words])
    return own


def apply(environ, own, command="compare"):
    return list(seed_env.apply(own, command, environ))


def of_training():
    return parsed(
        ranges=("none", "", ("none", "v1", "v2")), timeout_s=(60.0, ""), csv=(True, "")
    )


def without_kernels():
    """A command whose sizes are flags."""
    own = cli.define(iters=(int, ""))
    own(["prefill"])
    return own


def without_flags():
    own = flags.FlagValues()
    own(["summarize"])
    return own


TABLE = table("seed_env")
MAKE = {"compare": parsed, "fa2": parsed, "train": of_training, "summarize": without_flags}


@pytest.mark.parametrize("row", TABLE["told"], ids=str)
def test_what_is_told_and_set(row):
    command, words = row.get("command", "compare"), row.get("words", [])
    own, before = (MAKE.get(command, without_kernels)(*words) for _ in range(2))
    lines = apply(row["set"], own, command)
    assert len(lines) == len(row["set"].keys() - {"HOME", "DDP"})
    assert any(row["told"] in line for line in lines), lines
    defaults = {name: before[name].value for name in before}
    assert {name: own[name].value for name in own} == defaults | row.get("flags", {})


@pytest.mark.parametrize("row", TABLE["wrong"], ids=str)
def test_what_would_be_lost_is_an_error(row):
    command = row.get("command", "compare")
    with pytest.raises(ValueError, match=row["says"]):
        apply(row["set"], MAKE.get(command, without_kernels)(), command)


@pytest.mark.parametrize("arguments, expected", TABLE["batches"])
def test_its_batch_is_a_devices_micro_batch(arguments, expected):
    commands.parsed(train.FLAGS, "train", *arguments)
    lines = apply({"NSA_BATCH_SIZE": "1", "NSA_ACCUM": "4"}, train.FLAGS, "train")
    assert "use --accumulate 4 (--accumulate is set)" in lines[0]
    assert [train.FLAGS.batch, train.FLAGS.batch_size] == expected
    name = "".join(arguments).partition("=")[0]
    assert (f"{name} of the command line wins" if name else "set") in lines[1]


def test_what_is_said_of_gates_is_so():
    """No argument of the module stops the gradient of the gates."""
    assert "nothing cuts" in seed_env.TABLE["NSA_STOPGRAD_GATES"].reason
    arguments = inspect.signature(nsa_torch.NSAAttention).parameters
    assert "rope_scale" in arguments and not any("stop" in name for name in arguments)


def test_every_entry_says_something():
    for name, meaning in seed_env.TABLE.items():
        assert bool(meaning.flags) != bool(meaning.reason), name
    environ = {
        name.replace("*", "X"): "1" if meaning.only is None else meaning.only
        for name, meaning in seed_env.TABLE.items()
    }
    assert len(apply(environ, parsed())) == len(seed_env.TABLE)
    text = doc_tables.TABLES["seed_variables"]()
    assert all(f"`{name}" in text for name in seed_env.TABLE)


def test_flags_of_the_table_are_those_of_the_commands():
    """Every flag that the table sets is one of a command, which takes the value."""
    assert cli.LOG.name == "log" and kernel_flags.NAMES
    of_command = {"train": train.FLAGS, "fa2": fa2.FLAGS, "": compare.FLAGS}
    for meaning in seed_env.TABLE.values():
        for flag, value in meaning.flags.items():
            known = of_command[meaning.command]
            known = known if flag in known else flags.FLAGS
            known[flag].parser.parse(meaning.convert(value or "1"))

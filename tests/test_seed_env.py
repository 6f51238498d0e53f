"""The seed system's environment variables: one table, one line each, the command line wins."""

import os
import subprocess
import sys

import pytest
from absl import flags

import bench.harness.cli
from bench.harness import seed_env
from bench.harness.process import ROOT


@pytest.fixture
def values():
    """Flags of a command, parsed from its arguments."""

    def parse(*arguments):
        own = flags.FlagValues()
        for name in ("kernels", "compressed_kernel", "selected_kernel", "sliding_kernel"):
            flags.DEFINE_string(name, "auto", "", flag_values=own)
        flags.DEFINE_list("log", [], "", flag_values=own)
        flags.DEFINE_integer("log_limit", 100, "", lower_bound=1, flag_values=own)
        flags.DEFINE_integer("seq_len", None, "", flag_values=own)
        flags.DEFINE_string("config", None, "", flag_values=own)
        flags.DEFINE_enum("path", "auto", ["auto", "varlen", "dense"], "", flag_values=own)
        for name in ("fa2_min_len_win", "fa2_min_len_cmp", "sel_triton_min_L"):
            flags.DEFINE_string(name, None, "", flag_values=own)
        own(["compare", *arguments])
        return own

    return parse


def apply(environ, own, command="compare"):
    return list(seed_env.apply(own, command, environ))


@pytest.mark.parametrize("word", ["1", "true", "YES", " on "])
def test_an_exact_meaning_sets_the_flags(word, values):
    own = values()
    (line,) = apply({"NSA_USE_FA2": word, "HOME": "/"}, own)
    assert line == (
        f"NSA_USE_FA2={word}: use --compressed_kernel fa2 --sliding_kernel fa2 "
        "(--compressed_kernel set; --sliding_kernel set)"
    )
    names = own.compressed_kernel, own.selected_kernel, own.sliding_kernel
    assert names == ("fa2", "auto", "fa2")
    assert own["sliding_kernel"].present


@pytest.mark.parametrize("word", ["", "0", "False", "no", "off"])
def test_what_is_off_sets_nothing(word, values):
    own = values()
    assert apply({"NSA_USE_FA2": word}, own) == [f"NSA_USE_FA2={word}: off, as without it"]
    assert own.sliding_kernel == "auto"


def test_neither_true_nor_false_is_an_error(values):
    with pytest.raises(ValueError, match=r"NSA_USE_FA2: expected one of .* got '2'"):
        apply({"NSA_USE_FA2": "2"}, values())


def test_the_command_line_wins(values):
    own = values("--sliding_kernel=sdpa")
    (line,) = apply({"NSA_USE_FA2_WIN": "1"}, own)
    assert "--sliding_kernel of the command line wins" in line
    assert own.sliding_kernel == "sdpa"
    # Even where it says what is the default.
    own = values("--sliding_kernel=auto")
    apply({"NSA_USE_FA2": "1"}, own)
    assert (own.compressed_kernel, own.sliding_kernel) == ("fa2", "auto")


def test_events_of_the_log_add_up(values):
    own = values()
    environ = {"NSA_DEBUG_TIMING": "1", "NSA_DEBUG_LOG": "1", "NSA_DEBUG_SHAPES": "0"}
    assert len(apply(environ | {"NSA_LOG_LIMIT": "7"}, own)) == 4
    assert own.log == ["routing", "timing"] and own.log_limit == 7
    with pytest.raises(ValueError, match="NSA_LOG_LIMIT"):
        apply({"NSA_LOG_LIMIT": "0"}, values())


def test_dead_names_are_told_and_unknown_ones_are_errors(values):
    lines = apply({"NSA_SEL_RANGES_V2_MIN_S": "1024", "DDP": "1"}, values())
    assert [line.partition(":")[0] for line in lines] == ["NSA_SEL_RANGES_V2_MIN_S=1024"]
    assert "dead in the seed system already" in lines[0] and "--ranges adaptive" in lines[0]
    with pytest.raises(ValueError, match=r"NSA_USE_FA3=1 is unknown, .* known is NSA_USE_FA2"):
        apply({"NSA_USE_FA3": "1"}, values())


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("NSA_USE_SEL_PACK", "true", "0"),
        ("NSA_FORCE_SEL_MASK", "no", "1"),
        ("NSA_ROPE_SCALE", "1", "2.0"),
        ("NSA_FORCE_BRANCH", "", "cmp"),
        ("NSA_SEL_TRITON_FORCE_PATH", "Auto", "dense"),
        ("NSA_SEL_CUDA", "0", "1"),
    ],
)
def test_what_is_not_here_is_an_error_unless_it_is_the_default(name, default, other, values):
    (line,) = apply({name: default}, values())
    assert line.startswith(f"{name}={default}: ignored: ")
    with pytest.raises(ValueError, match=f"{name}={other}: unset it: .*{line[-20:]}"):
        apply({name: other}, values())


def test_a_choice_that_the_command_would_lose_is_an_error():
    own = flags.FlagValues()
    flags.DEFINE_integer("iters", None, "", flag_values=own)
    own(["prefill"])
    for name in ("NSA_USE_TRITON_SEL", "NSA_FA2_FORCE_DENSE", "NSA_SEL_TRITON_MIN_L"):
        with pytest.raises(ValueError, match=f"{name}=1 is .*nothing in bench.prefill"):
            apply({name: "1"}, own, "prefill")
    assert apply({"NSA_USE_TRITON_SEL": "0"}, own) == [
        "NSA_USE_TRITON_SEL=0: off, as without it"
    ]
    # What any call is, and what only training knew in the seed system too.
    lines = apply({"NSA_FA2_FORCE_VARLEN": "1", "NSA_SEQ_LEN": "8"}, own, "prefill")
    assert all("ignored here" in line for line in lines)
    table = flags.FlagValues()
    table(["summarize"])
    (line,) = apply({"NSA_USE_TRITON_SEL": "1"}, table, "summarize")
    assert "no --selected_kernel in this command, ignored" in line


def test_values_are_converted(values):
    own = flags.FlagValues()
    flags.DEFINE_enum("ranges", "none", ["none", "v1", "v2"], "", flag_values=own)
    flags.DEFINE_float("timeout_s", 60.0, "", flag_values=own)
    flags.DEFINE_bool("csv", True, "", flag_values=own)
    for value, expected in (("0", "v1"), ("1", "v2")):
        own(["train"])
        apply({"NSA_SEL_RANGES_V2": value, "NSA_PG_TIMEOUT_MIN": "15"}, own, "train")
        assert (own.ranges, own.timeout_s) == (expected, 900.0)
        own.unparse_flags()
        own["ranges"].unparse()
    own(["train"])
    apply({"NSA_DISABLE_CSV_LOGS": "1"}, own, "train")
    assert own.csv is False
    for name, value in (("NSA_SEL_RANGES_V2", "adaptive"), ("NSA_PG_TIMEOUT_MIN", "soon")):
        with pytest.raises(ValueError, match=f"{name}: expected .* got '{value}'"):
            apply({name: value}, own, "train")


def test_what_another_command_means_by_it(values):
    own = values()
    (line,) = apply({"NSA_SEQ_LEN": "64"}, own)
    assert "of bench.train; ignored here" in line and own.seq_len is None
    apply({"NSA_SEQ_LEN": "64"}, own, "train")
    assert own.seq_len == 64
    (line,) = apply({"NSA_LR": "1"}, own, "train")
    assert "no --lr in this command" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], (None, 1)), (["--batch=8"], (8, None)), (["--batch_size=2"], (None, 2))],
)
def test_its_batch_is_a_devices_micro_batch(arguments, expected):
    from bench import train

    train.FLAGS.unparse_flags()
    train.FLAGS(["train", *arguments])
    try:
        lines = apply({"NSA_BATCH_SIZE": "1", "NSA_ACCUM": "4"}, train.FLAGS, "train")
        assert "use --accumulate 4 (--accumulate set)" in lines[0]
        assert (train.FLAGS.batch, train.FLAGS.batch_size) == expected
        won = (
            f"{arguments[0].partition('=')[0]} of the command line wins" if arguments else "set"
        )
        assert won in lines[1]
    finally:
        for name in train.FLAGS:
            train.FLAGS[name].unparse()


def test_the_path_of_fa2_is_a_flag_of_its_bench(values):
    own = values()
    (line,) = apply({"NSA_FA2_FORCE_DENSE": "1"}, own)
    assert "use --path dense of bench.fa2; ignored here" in line and own.path == "auto"
    apply({"NSA_FA2_FORCE_DENSE": "1"}, own, "fa2")
    assert own.path == "dense"
    apply({"NSA_FA2_FORCE_VARLEN": "1"}, own := values(), "fa2")
    assert own.path == "varlen"


@pytest.mark.parametrize(
    ("text", "expected"), [("512", "512"), ("0", "never"), ("-1", "never")]
)
def test_thresholds_are_flags(text, expected, values):
    names = {
        "NSA_FA2_MIN_LEN_WIN": "fa2_min_len_win",
        "NSA_FA2_MIN_LEN_CMP": "fa2_min_len_cmp",
        "NSA_SEL_TRITON_MIN_L": "sel_triton_min_L",
    }
    own = values()
    lines = apply(dict.fromkeys(names, text), own)
    assert {own[flag].value for flag in names.values()} == {expected}
    assert f"NSA_FA2_MIN_LEN_CMP={text}: use --fa2_min_len_cmp {expected}" in lines[0]
    with pytest.raises(ValueError, match="NSA_FA2_MIN_LEN_WIN: expected a length, got 'soon'"):
        apply({"NSA_FA2_MIN_LEN_WIN": "soon"}, values())


def test_config_is_read_or_refused(values):
    own = values()
    (line,) = apply({"CONFIG": "configs/paper.yaml"}, own)
    assert own.config == "configs/paper.yaml" and "--config set" in line
    own = flags.FlagValues()
    flags.DEFINE_integer("iters", None, "", flag_values=own)
    own(["x"])
    with pytest.raises(ValueError, match=r"CONFIG=x.yaml is not read by bench.decode"):
        apply({"CONFIG": "x.yaml"}, own, "decode")


def test_training_reads_config():
    """The seed system's only way to a training config, with its names for the keys."""
    from bench import train
    from bench.lm import config_file

    train.FLAGS.unparse_flags()
    train.FLAGS(["train", "--seq_len=64"])
    try:
        (line,) = apply({"CONFIG": "configs/train/tiny.yaml"}, train.FLAGS, "train")
        assert "--config set" in line and train.FLAGS.config == "configs/train/tiny.yaml"
        _, values, _ = config_file.read("tiny", ["train.batch_size=3"])
        config_file.apply(values, (train.FLAGS, flags.FLAGS))
        assert (train.FLAGS.batch_size, train.FLAGS.seq_len, train.FLAGS.lr) == (3, 64, 3e-3)
    finally:
        for name in train.FLAGS:
            train.FLAGS[name].unparse()
        for name in config_file.FLAGS.values():
            if name in flags.FLAGS:
                flags.FLAGS[name].unparse()


def test_what_is_said_of_gates_is_so():
    """No argument of the module stops the gradient of the gates."""
    import inspect

    import nsa_torch

    assert "nothing cuts" in seed_env.TABLE["NSA_STOPGRAD_GATES"].reason
    arguments = inspect.signature(nsa_torch.NSAAttention).parameters
    assert "rope_scale" in arguments and not any("stop" in name for name in arguments)


def test_every_entry_says_something(values):
    for name, meaning in seed_env.TABLE.items():
        assert bool(meaning.flags) != bool(meaning.reason), name
    environ = {
        name.replace("*", "X"): "1" if meaning.only is None else meaning.only
        for name, meaning in seed_env.TABLE.items()
    }
    assert len(apply(environ, values())) == len(seed_env.TABLE)
    text = seed_env.markdown()
    assert all(f"`{name}" in text for name in seed_env.TABLE)


def test_flags_of_the_table_are_those_of_the_commands():
    """Every flag that the table sets is one of a command, which takes the value."""
    from bench import compare, fa2, train
    from nsa_core import flags as kernel_flags

    assert compare.CONFIG.name == "config"

    assert bench.harness.cli.LOG.name == "log" and kernel_flags.NAMES
    for meaning in seed_env.TABLE.values():
        known = {"train": train.FLAGS, "fa2": fa2.FLAGS}.get(meaning.command, flags.FLAGS)
        for flag, value in meaning.flags.items():
            known[flag].parser.parse(meaning.convert(value or "1"))


def test_a_command_warns_and_obeys():
    """The kernels that the variable names are planned, but for the one that a flag names."""
    environ = {"NSA_FORCE_PARITY": "1", "NSA_TEST_FA2": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "bench.compare", "--preset=tiny", "--explain"]
    done = subprocess.run(
        [*command, "--framework=torch", "--sliding_kernel=sdpa"],
        env=os.environ | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning: NSA_FORCE_PARITY=1: use --kernels reference (--kernels set)" in done.stderr
    assert "warning: NSA_TEST_FA2=1: ignored: tests are chosen by" in done.stderr
    assert "torch compressed reference: runs" in done.stdout
    assert "torch sliding    sdpa: runs" in done.stdout

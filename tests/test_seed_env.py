"""The seed system's environment variables: one table, one line each, the command line wins."""

import os
import subprocess
import sys

import pytest
from absl import flags

from bench import doc_tables
from bench.harness import cli, seed_env
from bench.harness.process import ROOT

KERNELS = "kernels", "compressed_kernel", "selected_kernel", "sliding_kernel"
LENGTHS = "fa2_min_len_win", "fa2_min_len_cmp", "sel_triton_min_L"
WINS = "of the command line wins"


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


FA2 = "use --compressed_kernel fa2 --sliding_kernel fa2"
# Variables, words of the command, its name; what is told, and the flags that are then set.
TOLD = [
    *(
        ({"NSA_USE_FA2": word, "HOME": "/"}, (), "compare",
         f"NSA_USE_FA2={word}: {FA2} (--compressed_kernel set; --sliding_kernel set)",
         {"compressed_kernel": "fa2", "sliding_kernel": "fa2"})
        for word in ("1", "true", "YES", " on ")
    ),
    *(
        ({"NSA_USE_FA2": word}, (), "compare", f"NSA_USE_FA2={word}: off, as without it", {})
        for word in ("", "0", "False", "no", "off")
    ),
    ({"NSA_USE_FA2_WIN": "1"}, ("--sliding_kernel=sdpa",), "compare", f"--sliding_kernel {WINS}",
     {"sliding_kernel": "sdpa"}),
    # Even where it is the default.
    ({"NSA_USE_FA2": "1"}, ("--sliding_kernel=auto",), "compare", f"--sliding_kernel {WINS}",
     {"compressed_kernel": "fa2"}),
    ({"NSA_DEBUG_TIMING": "1", "NSA_DEBUG_LOG": "1", "NSA_DEBUG_SHAPES": "0", "NSA_LOG_LIMIT": "7"},
     (), "compare", "--log set", {"log": ["routing", "timing"], "log_limit": 7}),
    ({"NSA_SEL_RANGES_V2_MIN_S": "1024", "DDP": "1"}, (), "compare",
     "NSA_SEL_RANGES_V2_MIN_S=1024: ignored: dead in the seed system already", {}),
    *(({"NSA_SEL_RANGES_V2": value}, (), "train", "--ranges set", {"ranges": way})
      for value, way in (("0", "v1"), ("1", "v2"))),
    ({"NSA_PG_TIMEOUT_MIN": "15"}, (), "train", "--timeout_s set", {"timeout_s": 900.0}),
    ({"NSA_DISABLE_CSV_LOGS": "1"}, (), "train", "--csv set", {"csv": False}),
    ({"NSA_SEQ_LEN": "64"}, (), "compare", "of bench.train; ignored here", {}),
    ({"NSA_SEQ_LEN": "64"}, (), "train", "--seq_len set", {"seq_len": 64}),
    ({"NSA_LR": "1"}, (), "train", "no --lr in this command", {}),
    ({"NSA_FA2_FORCE_DENSE": "1"}, (), "compare",
     "use --path dense of bench.fa2; ignored here", {}),
    ({"NSA_FA2_FORCE_DENSE": "1"}, (), "fa2", "--path set", {"path": "dense"}),
    ({"NSA_FA2_FORCE_VARLEN": "1"}, (), "fa2", "--path set", {"path": "varlen"}),
    *(({"NSA_FA2_MIN_LEN_WIN": text, "NSA_FA2_MIN_LEN_CMP": text, "NSA_SEL_TRITON_MIN_L": text},
       (), "compare", f"NSA_FA2_MIN_LEN_CMP={text}: use --fa2_min_len_cmp {found}",
       dict.fromkeys(LENGTHS, found))
      for text, found in (("512", "512"), ("0", "never"), ("-1", "never"))),
    ({"CONFIG": "configs/paper.yaml"}, (), "compare", "--config set",
     {"config": "configs/paper.yaml"}),
    *(({name: value}, (), "compare", f"{name}={value}: ignored: ", {})
      for name, value in (("NSA_USE_SEL_PACK", "true"), ("NSA_FORCE_SEL_MASK", "no"),
                          ("NSA_ROPE_SCALE", "1"), ("NSA_FORCE_BRANCH", ""),
                          ("NSA_SEL_TRITON_FORCE_PATH", "Auto"), ("NSA_SEL_CUDA", "0"))),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "words", "command", "said", "found"), TOLD)
def test_what_is_told_and_set(environ, words, command, said, found):
    own, before = (of_training() if command == "train" else parsed(*words) for _ in range(2))
    lines = apply(environ, own, command)
    assert len(lines) == len(environ.keys() - {"HOME", "DDP"})
    assert any(said in line for line in lines), lines
    defaults = {name: before[name].value for name in before}
    assert {name: own[name].value for name in own} == defaults | found


# Variables, the flags of a command, its name; what is wrong.
WRONG = [
    ({"NSA_USE_FA2": "2"}, parsed, "compare", r"NSA_USE_FA2: expected one of .* got '2'"),
    ({"NSA_LOG_LIMIT": "0"}, parsed, "compare", "NSA_LOG_LIMIT"),
    ({"NSA_USE_FA3": "1"}, parsed, "compare", "NSA_USE_FA3=1 is unknown, .* is NSA_USE_FA2"),
    ({"NSA_FA2_MIN_LEN_WIN": "soon"}, parsed, "compare", "_WIN: expected a length, got 'soon'"),
    ({"NSA_SEL_RANGES_V2": "adaptive"}, of_training, "train", "expected .* got 'adaptive'"),
    ({"NSA_PG_TIMEOUT_MIN": "soon"}, of_training, "train", "expected .* got 'soon'"),
    ({"CONFIG": "x.yaml"}, without_kernels, "decode", "x.yaml is not read by bench.decode"),
    *(
        ({name: "1"}, without_kernels, "prefill", f"{name}=1 .*no meaning for bench.prefill")
        for name in ("NSA_USE_TRITON_SEL", "NSA_FA2_FORCE_DENSE", "NSA_SEL_TRITON_MIN_L")
    ),
    *(
        ({name: value}, parsed, "compare", f"{name}={value}: unset it: ")
        for name, value in (("NSA_USE_SEL_PACK", "0"), ("NSA_FORCE_SEL_MASK", "1"),
                            ("NSA_ROPE_SCALE", "2.0"), ("NSA_FORCE_BRANCH", "cmp"),
                            ("NSA_SEL_TRITON_FORCE_PATH", "dense"), ("NSA_SEL_CUDA", "1"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "make", "command", "said"), WRONG)
def test_what_would_be_lost_is_an_error(environ, make, command, said):
    with pytest.raises(ValueError, match=said):
        apply(environ, make(), command)


def test_what_a_command_does_not_need_is_ignored():
    own = without_kernels()
    off = apply({"NSA_USE_TRITON_SEL": "0"}, own, "prefill")
    assert off == ["NSA_USE_TRITON_SEL=0: off, as without it"]
    # What any call is, and what only training knew in the seed system too.
    lines = apply({"NSA_FA2_FORCE_VARLEN": "1", "NSA_SEQ_LEN": "8"}, own, "prefill")
    assert all("ignored here" in line for line in lines)
    (line,) = apply({"NSA_USE_TRITON_SEL": "1"}, without_flags(), "summarize")
    assert "no --selected_kernel in this command, ignored" in line


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
    from bench import compare, fa2, train
    from nsa_core import flags as kernel_flags

    assert cli.LOG.name == "log" and kernel_flags.NAMES
    of_command = {"train": train.FLAGS, "fa2": fa2.FLAGS, "": compare.FLAGS}
    for meaning in seed_env.TABLE.values():
        for flag, value in meaning.flags.items():
            known = of_command[meaning.command]
            known = known if flag in known else flags.FLAGS
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

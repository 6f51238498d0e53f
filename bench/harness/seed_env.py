"""The seed system's environment variables: what each comes to here, in one table.

Nothing here is configured by the environment. A variable of the seed system that is still set
gives one line: which flag says it now, or why nothing does. Where the flag means exactly the
same it is set, unless the command line sets it: that wins. `CONFIG` is read where a command has
`--config`, and refused where it would be ignored.
"""

import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Iterator, Mapping

from absl import flags

from nsa_jax import policy

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a variable is here. With `flags` it is one of them: each is set to its value, where
    that is a text when the variable is true, and to the variable's own value where it is None.
    """

    flags: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why there is no flag
    command: str = ""  # the only command in which it means this
    length: bool = False  # its value is a threshold: 0 and less switched the kernel off
    instead: str = ""  # a flag that says the same in other words, and wins too


def _flag(command: str = "", **values: str | None) -> Meaning:
    return Meaning(values, command=command)


_DEAD = "dead in the seed system already: nothing reads it"
_NO_COUNTERPART: dict[str, str] = {
    _DEAD: "NSA_SEL_RANGES_V2_MIN_S",
    "blocks are read, not ranges; bench.train --ranges hands fa2 the ranges of v1 or v2": (
        "NSA_SEL_RANGES_V2"
    ),
    "prefill is always one batched call, chunks of any size are nsa_jax.cached_attention": (
        "NSA_PREFILL_BATCHED NSA_PREFILL_TILE"
    ),
    "name implementations instead, --kernels or --<branch>_kernel": (
        "NSA_USE_WIN_MASK NSA_USE_CMP_MASK NSA_USE_SEL_PACK NSA_USE_SEL_MASK"
        " NSA_FORCE_SEL_MASK NSA_USE_SEL_VARLEN NSA_SEL_VARLEN_V2 NSA_SEL_VARLEN_MIN_L"
        " NSA_SEL_VARLEN_FORCE_PARITY NSA_FA2_FORCE NSA_ALLOW_SLIDING_FA2 NSA_SDPA_NO_FLASH"
        " NSA_SDPA_FLASH_ONLY"
    ),
    "no dtype is cast and no limit lifted: a refusal is shown by --explain": (
        "NSA_FA2_ALLOW_FP32 NSA_FA2_ALLOW_D_GT_128 NSA_FA2_ALLOW_LARGE_BATCH"
        " NSA_FA2_PREF_FP16 NSA_SEL_TRITON_REQUIRE_ALIGN"
    ),
    "tiles are measured, python -m bench.tune_tiles": (
        "NSA_SEL_TRITON_GROUP NSA_SEL_TRITON_FORCE_PATH NSA_SEL_TRITON_BLOCK_L"
        " NSA_SEL_TRITON_BLOCK_D NSA_SEL_TRITON_BLOCK_DV NSA_SEL_TRITON_BLOCK_H"
        " NSA_SEL_TRITON_PACK_CACHE_MAX_ENTRIES NSA_SEL_TRITON_PACK_CACHE_MAX_MB"
    ),
    "every implementation has gradients": "NSA_SEL_TRITON_ALLOW_GRAD NSA_TRAIN_SAFE_PACK",
    "there is no CUDA extension to build": "NSA_SEL_CUDA NSA_SEL_CUDA_BUILD NSA_DEBUG_BUILD",
    "one branch is timed by itself, bench.compare --branch": (
        "NSA_FORCE_BRANCH NSA_FORCE_UNIFORM_GATE"
    ),
    "an argument of the module, rope_scale": "NSA_ROPE_SCALE",
    "nothing cuts the gates' gradient; to do it, pass gates through stop_gradient (JAX) or "
    "detach (torch) to attention(query, key, value, gates)": "NSA_STOPGRAD_GATES",
    "nothing of it is cached or compiled apart": "NSA_ENV_STATIC NSA_GATE_COMPILE",
    "scores are float32 always": "NSA_P_CMP_MIXED",
    "python -m bench.compare --explain says which kernel runs": "NSA_FA2_AUDIT NSA_SDPA_AUDIT",
    "checked by the tests, python -m pytest": (
        "NSA_STRICT_ASSERTS NSA_VERIFY_EQ9_MAPPING NSA_VALIDATE_SELECTION_DETERMINISM"
    ),
    "use the profiler's own ranges": "NSA_NVTX",
    "tests are chosen by -m gpu and -k, none is behind a variable": (
        "NSA_TEST_FA2 NSA_TEST_TRAIN NSA_TEST_TRITON_SEL NSA_TEST_MASKED NSA_TEST_SEL_PACK"
        " NSA_TEST_SEL_MASK NSA_TEST_SEED NSA_INTEGRATION_TESTS NSA_REQUIRE_VARLEN_SEMANTIC"
    ),
    "not part of bench.train": (
        "NSA_NO_GC NSA_GC_RANGE NSA_GC_REENTRANT NSA_DETECT_ANOMALY NSA_OPT_FUSED"
        " NSA_LOG_GRAD_NORM NSA_MEM_DUMP_EVERY NSA_DISABLE_AUX_STATS"
        " NSA_DISABLE_CSV_LOGS NSA_TB_DISABLE NSA_TRACE_GRADS NSA_TRACE_MODULE_BWD"
        " NSA_TRACE_DDP_BUCKETS NSA_FWE_REPORT_DOCS NSA_FWE_DOC_BATCH NSA_FWE_PREFETCH"
        " NSA_FWE_Q NSA_FWE_WARMUP_BATCHES NSA_FWE_WARMUP_TIMEOUT"
        " NSA_DDP_COMPRESS NSA_DDP_BUCKET_MB NSA_DDP_STATIC_GRAPH NSA_DDP_FIND_UNUSED"
        " NSA_DDP_BROADCAST_BUFFERS NSA_DDP_GRAD_AS_BUCKET_VIEW NSA_DDP_DISABLE_GC"
        " NSA_DDP_SAFE_GC_LAYERS NSA_PG_TIMEOUT_MIN NSA_ALLOW_SINGLE_RANK"
        " NSA_WATCH_INTERVAL_S NSA_WATCH_HALT"
        " NSA_WATCH_FLATLINE_N NSA_WATCH_GATE_COLLAPSE_N NSA_WATCH_GATE_ENTROPY_MIN"
        " NSA_WATCH_GATE_MAX_THRESHOLD NSA_FSDP_* NSA_SCALER_*"
    ),
}

TABLE: dict[str, Meaning] = {
    "NSA_USE_FA2": _flag(compressed_kernel="fa2", sliding_kernel="fa2"),
    "NSA_USE_FA2_CMP": _flag(compressed_kernel="fa2"),
    "NSA_USE_FA2_WIN": _flag(sliding_kernel="fa2"),
    "NSA_USE_TRITON_SEL": _flag(selected_kernel="triton"),
    "NSA_TRITON_SEL_FORCE": _flag(selected_kernel="triton"),
    "NSA_FA2_FORCE_DENSE": _flag("fa2", path="dense"),
    "NSA_WIN_FORCE_DENSE": _flag("fa2", path="dense"),
    "NSA_FA2_FORCE_VARLEN": _flag("fa2", path="varlen"),
    "NSA_FA2_MIN_LEN_WIN": Meaning({"fa2_min_len_win": None}, length=True),
    "NSA_FA2_MIN_LEN_CMP": Meaning({"fa2_min_len_cmp": None}, length=True),
    "NSA_SEL_TRITON_MIN_L": Meaning({"sel_triton_min_L": None}, length=True),
    "CONFIG": _flag(config=None),
    "NSA_FORCE_PARITY": _flag(kernels="reference"),
    "NSA_DEBUG_LOG": _flag(log="routing"),
    "NSA_DEBUG_SHAPES": _flag(log="shapes"),
    "NSA_DEBUG_TIMING": _flag(log="timing"),
    "NSA_DEBUG_COMPARE": _flag(log="compare"),
    "NSA_LOG_LIMIT": _flag(log_limit=None),
    "NSA_SEQ_LEN": _flag("train", seq_len=None),
    "NSA_BATCH_SIZE": Meaning({"batch_size": None}, command="train", instead="batch"),
    "NSA_LR": _flag("train", lr=None),
    "NSA_ACCUM": _flag("train", accumulate=None),
    "NSA_DDP_SAFE_MODE": _flag("train", ddp_safe="true"),
    "DDP_SAFE": _flag("train", ddp_safe="true"),
    "NSA_HEARTBEAT_EVERY": _flag("train", watch_every=None),
    "NSA_WATCH_HEARTBEAT_STALL_S": _flag("train", hang_s=None),
    **{
        name: Meaning(reason=reason)
        for reason, names in _NO_COUNTERPART.items()
        for name in names.split()
    },
}


def truthy(text: str) -> bool:
    """Whether a variable is on, in any case of letters.

    Raises:
      ValueError: neither a word for true nor one for false.
    """
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ValueError(f"expected one of {TRUE} or {FALSE}, got {text!r}")
    return word in TRUE


def apply(
    values: flags.FlagValues, command: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Sets what the variables say among the parsed flags `values` of `bench.<command>`.

    Args:
      environ: the variables; None: this process's.

    Yields:
      one line a variable.

    Raises:
      ValueError: a switch is neither true nor false, a flag cannot have the value, or CONFIG
        names a file that the command would not read.
    """
    environ = os.environ if environ is None else environ
    present = {name for name in values if values[name].present}
    for name in sorted(environ):
        if name in TABLE or name.startswith("NSA_"):
            told = _one(name, environ[name], values, command, present)
            yield f"{name}={environ[name]}: {told}"


def _one(name, text, values, command, present) -> str:
    known = next((key for key in TABLE if fnmatch.fnmatchcase(name, key)), None)
    if known is None:
        nearest = difflib.get_close_matches(name, TABLE, n=1, cutoff=0)[0]
        return f"unknown, ignored; the nearest known name is {nearest}"
    meaning = TABLE[known]
    if name == "CONFIG" and "config" not in values and _measures(values):
        raise ValueError(
            f"CONFIG={text} is not read by bench.{command}, whose sizes are flags: unset it, "
            "or run a command with --config (compare, indices, train)"
        )
    if not meaning.flags:
        return f"ignored: {meaning.reason}"
    if None not in meaning.flags.values():
        try:
            if not truthy(text):
                return "off, as without it"
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if meaning.length:
        text = _length(name, text)
    wanted = {flag: text if x is None else x for flag, x in meaning.flags.items()}
    use = "use " + " ".join(f"--{flag} {x}" for flag, x in wanted.items())
    if meaning.command and meaning.command != command:
        return f"{use} of bench.{meaning.command}; ignored here"
    notes = []
    for flag, x in wanted.items():
        if flag not in values:
            notes.append(f"no --{flag} in this command, ignored")
        elif given := present & {flag, meaning.instead}:
            notes.append(f"--{given.pop()} of the command line wins")
        else:
            notes.append(f"--{flag} set")
            _set(values[flag], x, name)
    return f"{use} ({'; '.join(dict.fromkeys(notes))})"


def _measures(values) -> bool:
    """Whether the command has a problem whose sizes a config file could say."""
    return "iters" in values


def _length(name: str, text: str) -> str:
    try:
        return text if int(text) > 0 else policy.NEVER
    except ValueError:
        if text == policy.NEVER:
            return text
        raise ValueError(f"{name}: expected a length, got {text!r}") from None


def _set(flag, text: str, name: str) -> None:
    """As the command line would; a list grows by it."""
    if isinstance(flag.value, list) and flag.value:
        text = ",".join([*flag.value, text])
    try:
        flag.parse(text)
    except flags.IllegalFlagValueError as error:
        raise ValueError(f"{name}: {error}") from None
    flag.using_default_value = False

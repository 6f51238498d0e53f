"""The seed system's environment variables: what each comes to here, in one table.

Nothing here is configured by the environment. A variable of the seed system that is still set
gives one line on stderr: which flag says it now, or why nothing does. Where the flag means the
same it is set, unless the command line sets it: that wins. What would be lost is an error: a
name that is not in the table, a value that asks for what is not here, a kernel that the command
does not take, `CONFIG` where no file is read. `markdown()` is the table that documents show.
"""

import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping

from absl import flags

from nsa_core import policy

from .markdown import table

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a variable is here. With `flags` it is one of them: each is set to its value, where
    that is a text when the variable is true, and to the variable's own value where it is None.
    """

    flags: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why there is no flag
    command: str = ""  # the only command in which it means this
    instead: str = ""  # a flag that says the same in other words, and wins too
    convert: Callable[[str], str] = str  # of its own value
    # Without flags. None: meaningless, any value is ignored; else the seed system's default,
    # the only value that is not an error.
    only: str | None = None
    required: bool = False  # not to be ignored by another command that measures


def _flag(command: str = "", **values: str | None) -> Meaning:
    return Meaning(values, command=command)


def truthy(text: str) -> bool:
    """Whether a variable is on, in any case of letters.

    Raises:
      ValueError: neither a word for true nor one for false.
    """
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ValueError(f"expected one of {TRUE} or {FALSE}, got {text!r}")
    return word in TRUE


def _length(text: str) -> str:
    """A threshold: 0 and less switched the kernel off."""
    try:
        return text if int(text) > 0 else policy.NEVER
    except ValueError:
        if text == policy.NEVER:
            return text
        raise ValueError(f"expected a length, got {text!r}") from None


def _seconds(text: str) -> str:
    try:
        return str(float(text) * 60)
    except ValueError:
        raise ValueError(f"expected minutes, got {text!r}") from None


# By reason. Results and what is measured are the same without them.
_MEANINGLESS: dict[str, str] = {
    "dead in the seed system already: nothing reads it. Its runbook means v1 below 1024 tokens, "
    "v2 from there on: bench.train --ranges adaptive": "NSA_SEL_RANGES_V2_MIN_S",
    "prefill is always one batched call, chunks of any size are nsa_jax.cached_attention": (
        "NSA_PREFILL_BATCHED NSA_PREFILL_TILE"
    ),
    "a kernel that is named runs, whatever a device's file says; no dtype is cast and no limit "
    "lifted, a refusal is shown by --explain": (
        "NSA_FA2_FORCE NSA_ALLOW_SLIDING_FA2 NSA_FA2_PREF_FP16 NSA_SEL_TRITON_REQUIRE_ALIGN"
    ),
    "tiles follow from sizes and the GPU": (
        "NSA_SEL_TRITON_GROUP NSA_SEL_TRITON_BLOCK_L NSA_SEL_TRITON_BLOCK_D"
        " NSA_SEL_TRITON_BLOCK_DV NSA_SEL_TRITON_BLOCK_H NSA_SEL_TRITON_PACK_CACHE_MAX_ENTRIES"
        " NSA_SEL_TRITON_PACK_CACHE_MAX_MB"
    ),
    "every implementation has gradients": "NSA_SEL_TRITON_ALLOW_GRAD NSA_TRAIN_SAFE_PACK",
    "nothing of it is cached, compiled or built apart": (
        "NSA_ENV_STATIC NSA_GATE_COMPILE NSA_DEBUG_BUILD"
    ),
    "python -m bench.compare --explain says which kernel runs": "NSA_FA2_AUDIT NSA_SDPA_AUDIT",
    "checked by the tests, python -m pytest": (
        "NSA_STRICT_ASSERTS NSA_VERIFY_EQ9_MAPPING NSA_VALIDATE_SELECTION_DETERMINISM"
    ),
    "use the profiler's own ranges": "NSA_NVTX",
    "tests are chosen by -m gpu and -k, none is behind a variable": (
        "NSA_TEST_FA2 NSA_TEST_TRAIN NSA_TEST_TRITON_SEL NSA_TEST_MASKED NSA_TEST_SEL_PACK"
        " NSA_TEST_SEL_MASK NSA_TEST_SEED NSA_INTEGRATION_TESTS NSA_REQUIRE_VARLEN_SEMANTIC"
    ),
    "bench.train has no gradient checkpointing, no loss scaling and no loader of its own, and "
    "watches by --watch_every and --hang_s": (
        "NSA_NO_GC NSA_GC_RANGE NSA_GC_REENTRANT NSA_DETECT_ANOMALY NSA_OPT_FUSED NSA_SCALER_*"
        " NSA_LOG_GRAD_NORM NSA_MEM_DUMP_EVERY NSA_DISABLE_AUX_STATS NSA_TB_DISABLE"
        " NSA_TRACE_GRADS NSA_TRACE_MODULE_BWD NSA_TRACE_DDP_BUCKETS NSA_FWE_REPORT_DOCS"
        " NSA_FWE_DOC_BATCH NSA_FWE_PREFETCH NSA_FWE_Q NSA_FWE_WARMUP_BATCHES"
        " NSA_FWE_WARMUP_TIMEOUT NSA_WATCH_INTERVAL_S NSA_WATCH_HALT NSA_WATCH_FLATLINE_N"
        " NSA_WATCH_GATE_COLLAPSE_N NSA_WATCH_GATE_ENTROPY_MIN NSA_WATCH_GATE_MAX_THRESHOLD"
    ),
    "gradients are added up as they are, by --parallel ddp or fsdp of bench.train": (
        "NSA_DDP_COMPRESS NSA_DDP_BUCKET_MB NSA_DDP_STATIC_GRAPH NSA_DDP_FIND_UNUSED"
        " NSA_DDP_BROADCAST_BUFFERS NSA_DDP_GRAD_AS_BUCKET_VIEW NSA_DDP_DISABLE_GC"
        " NSA_DDP_SAFE_GC_LAYERS NSA_ALLOW_SINGLE_RANK NSA_FSDP_*"
    ),
}
# By reason, with the seed system's default. Any other value asks for what is not here.
_REFUSED: dict[str, str] = {
    "its paths are not here: name implementations, --kernels or --<branch>_kernel": (
        "NSA_USE_WIN_MASK=1 NSA_USE_CMP_MASK=1 NSA_USE_SEL_PACK=1 NSA_USE_SEL_MASK=0"
        " NSA_FORCE_SEL_MASK=0 NSA_USE_SEL_VARLEN=0 NSA_SEL_VARLEN_V2=1 NSA_SEL_VARLEN_MIN_L=0"
        " NSA_SEL_VARLEN_FORCE_PARITY=0 NSA_SDPA_NO_FLASH=0 NSA_SDPA_FLASH_ONLY=0"
        " NSA_SEL_TRITON_FORCE_PATH=auto"
    ),
    "no limit is lifted: a refusal is shown by --explain": (
        "NSA_FA2_ALLOW_FP32=0 NSA_FA2_ALLOW_D_GT_128=0 NSA_FA2_ALLOW_LARGE_BATCH=0"
    ),
    "there is no CUDA extension: --selected_kernel mosaic or triton": (
        "NSA_SEL_CUDA=0 NSA_SEL_CUDA_BUILD=0"
    ),
    "one branch is timed by itself, bench.compare --branch": (
        "NSA_FORCE_BRANCH= NSA_FORCE_UNIFORM_GATE=0"
    ),
    "an argument of the module, rope_scale": "NSA_ROPE_SCALE=1.0",
    "nothing cuts the gates' gradient; to do it, pass gates through stop_gradient (JAX) or "
    "detach (torch) to attention(query, key, value, gates)": "NSA_STOPGRAD_GATES=0",
    "scores are float32 always": "NSA_P_CMP_MIXED=0",
}

TABLE: dict[str, Meaning] = {
    "NSA_USE_FA2": _flag(compressed_kernel="fa2", sliding_kernel="fa2"),
    "NSA_USE_FA2_CMP": _flag(compressed_kernel="fa2"),
    "NSA_USE_FA2_WIN": _flag(sliding_kernel="fa2"),
    "NSA_USE_TRITON_SEL": _flag(selected_kernel="triton"),
    "NSA_TRITON_SEL_FORCE": _flag(selected_kernel="triton"),
    "NSA_FA2_FORCE_DENSE": Meaning({"path": "dense"}, command="fa2", required=True),
    "NSA_WIN_FORCE_DENSE": Meaning({"path": "dense"}, command="fa2", required=True),
    "NSA_FA2_FORCE_VARLEN": _flag("fa2", path="varlen"),
    "NSA_FA2_MIN_LEN_WIN": Meaning({"fa2_min_len_win": None}, convert=_length),
    "NSA_FA2_MIN_LEN_CMP": Meaning({"fa2_min_len_cmp": None}, convert=_length),
    "NSA_SEL_TRITON_MIN_L": Meaning({"sel_triton_min_L": None}, convert=_length),
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
    "NSA_PG_TIMEOUT_MIN": Meaning({"timeout_s": None}, command="train", convert=_seconds),
    "NSA_DISABLE_CSV_LOGS": _flag("train", csv="false"),
    "NSA_SEL_RANGES_V2": Meaning(
        {"ranges": None}, command="train", convert=lambda x: "v2" if truthy(x) else "v1"
    ),
    **{
        name: Meaning(reason=reason)
        for reason, names in _MEANINGLESS.items()
        for name in names.split()
    },
    **{
        name: Meaning(reason=reason, only=default)
        for reason, names in _REFUSED.items()
        for name, _, default in (each.partition("=") for each in names.split())
    },
}


def apply(
    values: flags.FlagValues, command: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Sets what the variables say among the parsed flags `values` of `bench.<command>`.

    Args:
      environ: the variables; None: this process's.

    Yields:
      one line a variable.

    Raises:
      ValueError: a variable that would be lost (see above), a switch that is neither true nor
        false, or a value that a flag cannot have.
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
        raise ValueError(f"{name}={text} is unknown, unset it; the nearest known is {nearest}")
    meaning = TABLE[known]
    if name == "CONFIG" and "config" not in values and _measures(values):
        raise ValueError(
            f"CONFIG={text} is not read by bench.{command}, whose sizes are flags: unset it, "
            "or run a command with --config (compare, indices, train)"
        )
    if not meaning.flags:
        if meaning.only is not None and not _same(text, meaning.only):
            raise ValueError(f"{name}={text}: unset it: {meaning.reason}")
        return f"ignored: {meaning.reason}"
    try:
        if None not in meaning.flags.values() and not truthy(text):
            return "off, as without it"
        text = meaning.convert(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    wanted = {flag: text if x is None else x for flag, x in meaning.flags.items()}
    use = "use " + " ".join(_word(flag, x) for flag, x in wanted.items())
    if meaning.command and meaning.command != command:
        if meaning.required and _measures(values):
            raise ValueError(
                f"{name}={text} is --{' --'.join(wanted)} of bench.{meaning.command}, and "
                f"nothing in bench.{command}: unset it"
            )
        return f"{use} of bench.{meaning.command}; ignored here"
    lacking = [flag for flag in wanted if flag not in values]
    if lacking and not meaning.command and _measures(values):
        raise ValueError(
            f"{name}={text} is nothing in bench.{command}, which has no --{' --'.join(lacking)}: "
            "unset it"
        )
    notes = []
    for flag, x in wanted.items():
        if flag in lacking:
            notes.append(f"no --{flag} in this command, ignored")
        elif given := present & {flag, meaning.instead}:
            notes.append(f"--{given.pop()} of the command line wins")
        else:
            notes.append(f"--{flag} set")
            _set(values[flag], x, name)
    return f"{use} ({'; '.join(dict.fromkeys(notes))})"


def _word(flag: str, value: str) -> str:
    """A flag as a command line says it."""
    return {"true": f"--{flag}", "false": f"--no{flag}"}.get(value, f"--{flag} {value}")


def _same(text: str, default: str) -> bool:
    """Whether a value is the default, in other words too."""
    given, known = text.strip().lower(), default.lower()
    if given == known or not given:
        return True
    words = TRUE + FALSE
    if given in words and known in words:
        return (given in TRUE) == (known in TRUE)
    try:
        return float(given) == float(known)
    except ValueError:
        return False


def _measures(values) -> bool:
    """Whether the command times attention."""
    return "iters" in values or "row_seconds" in values


def _set(flag, text: str, name: str) -> None:
    """As the command line would; a list grows by it."""
    if isinstance(flag.value, list) and flag.value:
        text = ",".join([*flag.value, text])
    try:
        flag.parse(text)
    except flags.IllegalFlagValueError as error:
        raise ValueError(f"{name}: {error}") from None
    flag.using_default_value = False


def markdown() -> str:
    """Every variable, and what it is here."""
    rows = []
    for name, meaning in TABLE.items():
        if meaning.flags:
            said = " ".join(
                f"--{flag} {x or '<its value>'}" for flag, x in meaning.flags.items()
            )
            where = f"`bench.{meaning.command}`" if meaning.command else ""
            lost = "; another command that measures: an error" if meaning.required else ""
            rows.append((f"`{name}`", f"`{said}`", where + lost))
    for found, what in ((_MEANINGLESS, "meaningless"), (_REFUSED, "another value is an error")):
        for reason, names in found.items():
            rows.append((", ".join(f"`{name}`" for name in names.split()), what, reason))
    return table(("variable", "here", ""), rows)

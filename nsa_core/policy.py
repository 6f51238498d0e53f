"""Thresholds and policy that exclude implementations from the automatic choice on a device.

`configs/devices/<device>.yaml` contains the kernels that are not allowed on the device, and the
thresholds (`Thresholds`) from which a kernel is faster. `python -m nsa_bench.tune_thresholds`
derives the thresholds from records. The file of a device is read once per process, and a file that
cannot be parsed raises an error. Without a file, only kernels that require measurements
(`MEASURED_ONLY`) are excluded. If a GPU has no other kernel, a kernel of `MEASURED_ONLY` is chosen
with a `note`. Thresholds and policy do not affect an implementation that the caller names.

The thresholds of FA-2 are lengths from which FA-2 is faster than one call of SDPA with a dense
mask. In this library, the alternative to FA-2 is the portable path (`sdpa`, or `xla` in JAX). The
automatic choice uses the length from which FA-2 is faster than the portable path (`Device.limit`).
The file of the device contains the length compared with SDPA and the length compared with the
portable path.

    runtime: {fa2_min_len_win: 512, fa2_min_len_cmp: never, sel_min_len: 256}
    faster_than_dense: {torch 64/4 heads of 128: {forward: 16384, fwdbwd: 8192}}
    policy: [{kernel: triton, steps: [selected], allowed: false, reason: .., since: 2025-08-20}]
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

from annotated_types import Ge, MinLen

from nsa_core import config_files

SCHEMA = 1
FOLDER = config_files.FOLDER / "devices"
NEVER = "never"
DECODE = "decode"  # attention over a paged cache

type Ours = Literal["mosaic", "triton", "fa2"]  # the portable paths are always allowed
type Step = Literal["compressed", "scores", "selected", "sliding"]
type Pass = Literal["forward", "fwdbwd"]
type Length = Annotated[int, Ge(0)] | Literal["never"]
type Text = Annotated[str, MinLen(1)]
KERNELS, STEPS = (get_args(x.__value__) for x in (Ours, Step))
# The automatic choice uses these kernels only if the file of the device has a threshold that
# was measured for them by a commit of this library. On the listed compute capabilities, for
# which there is no other kernel, these kernels are the default. A rule in the file of the device
# takes precedence. Attention over a paged cache needs no threshold, since the alternative to
# kernels gathers all pages.
MEASURED_ONLY = {"triton": ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))}
# The step and the kernels to which each threshold applies.
DECIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fa2_min_len_win": ("sliding", ("fa2",)),
    "fa2_min_len_cmp": ("compressed", ("fa2",)),
    "sel_min_len": ("selected", ("mosaic", "fa2")),
    "sel_triton_min_L": ("selected", ("triton",)),
}

PASSES: dict[Pass, str] = {"forward": "forward", "fwdbwd": "with backward"}


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The lengths from which kernels are chosen. A field that is None means that there is no
    threshold, and "never" excludes the kernel.

    Thresholds of `fa2` for the sliding (`win`) and the compressed (`cmp`) branch are numbers of
    tokens per sequence. Thresholds of the selected branch are numbers of keys per query,
    `num_selected * select_block`.
    """

    fa2_min_len_win: Length | None = None
    fa2_min_len_cmp: Length | None = None
    sel_min_len: Length | None = None
    sel_triton_min_L: Length | None = None

    def given(self) -> dict[str, Length]:
        """Return the thresholds that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Rule:
    """States whether the automatic choice may choose a kernel for some steps, with the reason and
    the date of this decision.

    A `provisional` rule applies until records of the device show that the kernel is faster. When
    records show that the kernel is faster, `nsa_bench.tune_thresholds` removes the `provisional`
    rule.
    """

    kernel: Ours
    steps: Annotated[tuple[Step, ...], MinLen(1)]
    allowed: bool
    reason: Text
    since: Text
    provisional: bool = False


class Evidence(TypedDict, total=False):
    """The measurements behind a threshold. The file may contain further keys, which the library
    does not read.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012
    kernel: Ours
    value: Length
    over_portable_path: Length
    commits: list[str]


@dataclasses.dataclass(frozen=True)
class Device:
    """The contents of the file of one device.

    Attributes:
      faster_than_dense: The length from which NSA was measured to be faster than the fastest
        dense attention, by heads (`heads_of`) and by pass. A pass is `forward` or `fwdbwd`
        (forward and backward).
    """

    device: str
    path: Path
    runtime: Thresholds = Thresholds()
    policy: tuple[Rule, ...] = ()
    evidence: dict[str, Evidence] = dataclasses.field(default_factory=dict, hash=False)
    faster_than_dense: dict[str, dict[Pass, Length]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    schema: Literal[1] = SCHEMA

    @functools.cached_property
    def source(self) -> str:
        """The name of the file, which reasons for refusals mention."""
        inside = self.path.is_relative_to(config_files.FOLDER.parent)
        return str(self.path.relative_to(config_files.FOLDER.parent) if inside else self.path)

    def kept_back(self, threshold: str) -> tuple[str, ...]:
        """Return the kernels to which a threshold applies: the kernel that was measured, and all
        kernels after it in the order of choice.
        """
        kernels = DECIDES[threshold][1]
        measured = self.evidence.get(threshold, {}).get("kernel")
        return kernels[kernels.index(measured) :] if measured in kernels else kernels

    def limit(self, threshold: str) -> Length | None:
        """Return the length that the automatic choice uses. Usually the returned length is the
        threshold. If the threshold was measured against code that the library does not run,
        return the length that was measured against the portable path instead.
        """
        value, about = getattr(self.runtime, threshold), self.evidence.get(threshold, {})
        measured = about.get("value") == value  # otherwise a person has set the threshold
        return about.get("over_portable_path", value) if measured else value


@dataclasses.dataclass(frozen=True, eq=False)
class InForce:
    """The active thresholds and their source.

    The identity of an `InForce` object is part of the key under which the choice for a call is
    cached.
    """

    thresholds: Thresholds = Thresholds()
    source: str = ""


_NOTHING = InForce()
_overridden: contextvars.ContextVar[InForce]
_overridden = contextvars.ContextVar("overridden", default=_NOTHING)


@contextlib.contextmanager
def overridden(thresholds: Thresholds, source: str) -> Iterator[None]:
    """Replace the thresholds of the device with the values in `thresholds` that are not None.

    Reasons for refusals name `source`. A call that was traced before keeps its choice.
    """
    token = _overridden.set(InForce(thresholds, source))
    try:
        yield
    finally:
        _overridden.reset(token)


in_force = _overridden.get  # the thresholds of `overridden`, and their source


def barred(device: Device, kernel: str, step: str) -> Rule | None:
    """Return the rule of the device that excludes the kernel for this step, or None."""
    for rule in device.policy:
        if rule.kernel == kernel and step in rule.steps and not rule.allowed:
            return rule
    return None


def why_not(implementation: str, problem: Any) -> str | None:
    """Return the reason why the automatic choice should skip an implementation that supports
    `problem`, or None.
    """
    device, step = of(problem.device), problem.step
    if device and (rule := barred(device, implementation, step)):
        return (
            f"not allowed on {device.device} since {rule.since}: {rule.reason} "
            f"({device.source})"
        )
    asks = implementation in MEASURED_ONLY and step != DECODE
    if asks and not (_default(implementation, problem) or _known(implementation, problem)):
        return (
            "not measured on this device; name the implementation, or run "
            "nsa_bench.tune_thresholds to find its threshold"
        )
    in_use = in_force()
    for name, (decided, kernels) in DECIDES.items():
        if decided != step:
            continue
        value, source = getattr(in_use.thresholds, name), in_use.source
        if value is None and device:
            value, source, kernels = device.limit(name), device.source, device.kept_back(name)
            if value != getattr(device.runtime, name):
                source += ": over the portable path"
        if implementation in kernels and (reason := _below(name, value, problem)):
            return f"{reason} ({source})"
    return None


def note(implementation: str, problem: Any) -> str | None:
    """Return a note if the automatic choice of `implementation` is not based on measurements,
    otherwise None."""
    if not _default(implementation, problem) or _known(implementation, problem):
        return None
    version = ".".join(map(str, problem.capability))
    return f"by default on compute capability {version}, not measured on this device"


def heads_of(
    framework: str, heads: int, kv_heads: int, key_width: int, value_width: int
) -> str:
    """Return, as text, the properties that determine the length from which NSA is faster than dense
    attention.
    """
    width = f"{key_width}" if key_width == value_width else f"{key_width}/{value_width}"
    return f"{framework} {heads}/{kv_heads} heads of {width}"


def dense_note(problem: Any) -> str | None:
    """Return a text with the length from which NSA is faster than dense attention on this
    device, or None.
    """
    device = of(problem.device)
    about = problem.framework, problem.H, problem.Hkv, problem.D, problem.Dv
    if device is None or not (found := device.faster_than_dense.get(heads_of(*about))):
        return None
    parts = [
        f"{'at no measured length' if length == NEVER else f'from {length} tokens'} {words}"
        for name, words in PASSES.items()
        if (length := found.get(name)) is not None
    ]
    return f"faster than dense attention {', '.join(parts)} ({device.source})"


def _default(implementation: str, problem: Any) -> bool:
    """Return whether the kernel may be chosen without measurements, with a note."""
    return problem.capability in MEASURED_ONLY.get(implementation, ())


def _known(implementation: str, problem: Any) -> bool:
    """Return whether there is a threshold for this kernel in this step, from the caller or from
    records.
    """
    device, given = of(problem.device), in_force().thresholds.given()
    for name, (step, kernels) in DECIDES.items():
        about = device.evidence.get(name, {}) if device and step == problem.step else {}
        measured = about.get("kernel") == implementation and about.get("commits")
        named = name in given and (step, kernels) == (problem.step, (implementation,))
        if measured or named:
            return True
    return False


def _below(name: str, value: Length | None, problem: Any) -> str | None:
    if value is None:
        return None
    if value == NEVER:
        return f"{name} is {NEVER}, so no length is long enough"
    if DECIDES[name][0] == "selected":
        length = problem.config.num_selected * problem.config.select_block
        what = f"{length} selected keys are"
    else:
        # For a single branch S counts compressed tokens, of which there are fewer than queries.
        length = max(problem.T, problem.S)
        what = f"a length of {length} is"
        if not length:  # under torch.compile a length may be symbolic
            return None
    return f"{what} below {name}={value}" if length < value else None


@functools.cache
def of(device: str | None) -> Device | None:
    """Return the contents of the file for the device with the given driver name, or None if there
    is no file.
    """
    path = FOLDER / f"{config_files.slug(device or '')}.yaml"
    return read(path) if path.is_file() else None


def read(path: Path) -> Device:
    """Read the file of a device.

    Raises:
      ValueError: The file is damaged, or describes another device than the one in its name. The
        error message names the file and the key.
    """
    data = config_files.load(path)
    found = config_files.build(Device, data | {"path": str(path)}, f"{path}: device")
    if config_files.slug(found.device) != path.stem:
        raise ValueError(
            f"{path} must name the same device as its file name, got {found.device!r}"
        )
    return found

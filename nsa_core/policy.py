"""What automatic choice leaves out on a device although it could run: thresholds and policy.

`configs/devices/<device>.yaml` holds the thresholds (`Thresholds`) from which a kernel pays, which
`python -m nsa_bench.tune_thresholds` derives from records, and the kernels that are not allowed
there at all. It is read once a process; a file that cannot be understood is an error, a missing
one leaves out only kernels that must have been measured (`MEASURED_ONLY`): not on GPUs that no
other kernel is for, where they are chosen with a `note`. An implementation
that is named is not affected.

The thresholds of FA-2 answer one question: from which length does it beat one SDPA under the
whole mask? This library has its portable path in FA-2's place, so automatic
choice keeps to the length from which FA-2 beats that one (`Device.limit`), which stands beside.

    runtime: {fa2_min_len_win: 512, fa2_min_len_cmp: never, sel_min_len: 256}
    faster_than_dense: {torch 64/4 heads of 128: {forward: 16384, fwdbwd: 8192}}
    policy: [{kernel: triton, steps: [selected], allowed: false, reason: .., since: 2025-08-20}]
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nsa_core import config_files

SCHEMA = 1
FOLDER = config_files.FOLDER / "devices"
NEVER = "never"
KERNELS = ("mosaic", "triton", "fa2")  # the portable paths are always allowed
DECODE = "decode"  # a step over a paged cache
STEPS = ("compressed", "scores", "selected", "sliding")
# Automatic choice takes these only where the device's file has a threshold of the step that was
# measured for them, by a commit of this library, or by default on these compute capabilities,
# which no other kernel of ours is for. A rule of the device's file goes before. A step over a
# paged cache asks for no threshold: what stands behind gathers all pages.
MEASURED_ONLY = {"triton": ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))}
# Which kernels of which step a threshold keeps back.
DECIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fa2_min_len_win": ("sliding", ("fa2",)),
    "fa2_min_len_cmp": ("compressed", ("fa2",)),
    "sel_min_len": ("selected", ("mosaic", "fa2")),
    "sel_triton_min_L": ("selected", ("triton",)),
}

PASSES = {"forward": "forward", "fwdbwd": "with backward"}

type Length = int | Literal["never"]


def parse(value: Any) -> Length:
    """A threshold: `never`, or a length from 0.

    Raises:
      ValueError: it is neither.
    """
    if value == NEVER:
        return NEVER
    whole = isinstance(value, str) and value.isascii() and value.isdigit()
    if whole or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return int(value)
    raise ValueError(f"a threshold must be {NEVER} or an integer from 0, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """From where on a kernel is chosen; None: no threshold, "never": nowhere.

    Of `fa2` in tokens of the sequence, for the sliding (`win`) and the compressed (`cmp`)
    branch; of the selected branch in keys a query selects, `num_selected * select_block`.
    """

    fa2_min_len_win: int | Literal["never"] | None = None
    fa2_min_len_cmp: int | Literal["never"] | None = None
    sel_min_len: int | Literal["never"] | None = None
    sel_triton_min_L: int | Literal["never"] | None = None

    def __post_init__(self):
        for name, value in self.given().items():
            try:
                parse(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    def given(self) -> dict[str, Length]:
        """Those that are not None."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Rule:
    """Whether a kernel may be chosen for these steps, by whose decision and since when.

    A `provisional` rule stands until records of the device show that the kernel pays:
    `nsa_bench.tune_thresholds` then lifts it.
    """

    kernel: str
    steps: tuple[str, ...]
    allowed: bool
    reason: str
    since: str
    provisional: bool = False


@dataclasses.dataclass(frozen=True)
class Device:
    """The file of one device.

    Attributes:
      faster_than_dense: by heads (`heads_of`) and pass, `forward` or `fwdbwd` (with backward), the
        length from which NSA was measured to be faster than the fastest dense attention.
    """

    name: str
    path: Path
    thresholds: Thresholds = Thresholds()
    policy: tuple[Rule, ...] = ()
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    faster_than_dense: Mapping[str, Mapping[str, Length]] = dataclasses.field(
        default_factory=dict, hash=False
    )

    @functools.cached_property
    def source(self) -> str:
        """The file's name, for a reason."""
        inside = self.path.is_relative_to(config_files.FOLDER.parent)
        return str(self.path.relative_to(config_files.FOLDER.parent) if inside else self.path)

    def kept_back(self, threshold: str) -> tuple[str, ...]:
        """The kernels that a threshold is about: the measured one and those tried after it."""
        kernels, measured = DECIDES[threshold][1], self.measured(threshold)
        return kernels[kernels.index(measured) :] if measured in kernels else kernels

    def limit(self, threshold: str) -> Length | None:
        """The length that automatic choice keeps to: the threshold, or, where that was measured
        over what this library does not run, the one measured over the portable path."""
        value, about = getattr(self.thresholds, threshold), self._evidence(threshold)
        if value is None or about.get("value") != value:  # or a person's
            return value
        return parse(about.get("over_portable_path", value))

    def measured(self, threshold: str) -> str | None:
        """The kernel that a threshold was measured for, where the file says so."""
        return self._evidence(threshold).get("kernel")

    def has_measured(self, kernel: str, step: str) -> bool:
        """Whether a threshold of the step comes from records of this kernel of ours."""
        names = (name for name, (decided, _) in DECIDES.items() if decided == step)
        found = map(self._evidence, names)
        return any(x.get("kernel") == kernel and x.get("commits") for x in found)

    def _evidence(self, threshold: str) -> Mapping[str, Any]:
        evidence = self.evidence.get(threshold)
        return evidence if isinstance(evidence, Mapping) else {}


@dataclasses.dataclass(frozen=True, eq=False)
class InForce:
    """Thresholds, and who gave them; its identity is part of what calls are known by."""

    thresholds: Thresholds = Thresholds()
    source: str = ""


_NOTHING = InForce()
_overridden: contextvars.ContextVar[InForce]
_overridden = contextvars.ContextVar("overridden", default=_NOTHING)


@contextlib.contextmanager
def overridden(thresholds: Thresholds, source: str) -> Iterator[None]:
    """Within: these thresholds stand in place of the device's, where they are not None.

    `source` says in a reason who gave them. What was traced before keeps its choice.
    """
    token = _overridden.set(InForce(thresholds, source))
    try:
        yield
    finally:
        _overridden.reset(token)


in_force = _overridden.get  # those of `overridden`, and who gave them


def barred(device: Device | None, kernel: str, step: str) -> Rule | None:
    """The rule of the device that forbids the kernel for this step."""
    rules = device.policy if device else ()
    named = (rule for rule in rules if rule.kernel == kernel and step in rule.steps)
    return next((rule for rule in named if not rule.allowed), None)


def why_not(implementation: str, problem: Any) -> str | None:
    """Why automatic choice should not take what could run `problem`, or None."""
    device = of(problem.device) if problem.device else None
    if device and (rule := barred(device, implementation, problem.step)):
        return (
            f"not allowed on {device.name} since {rule.since}: {rule.reason} ({device.source})"
        )
    in_use = in_force()
    given, giver = in_use.thresholds, in_use.source
    asks = implementation in MEASURED_ONLY and problem.step != DECODE
    if asks and not _is_given(given, implementation, problem.step):
        if not (
            _measured(device, implementation, problem) or _default(implementation, problem)
        ):
            return (
                "not measured on this device: name it, or let nsa_bench.tune_thresholds find its "
                "threshold"
            )
    for name, (step, kernels) in DECIDES.items():
        if step != problem.step:
            continue
        value, source = getattr(given, name), giver
        if value is None and device:
            value, source = device.limit(name), device.source
            if value != getattr(device.thresholds, name):
                source += ": over the portable path"
            kernels = device.kept_back(name)
        if implementation in kernels and (reason := _below(name, value, problem)):
            return f"{reason} ({source})"
    return None


def note(implementation: str, problem: Any) -> str | None:
    """What should stand beside the automatic choice of what could not be measured, or None."""
    if not _default(implementation, problem):
        return None
    device = of(problem.device) if problem.device else None
    given = in_force().thresholds
    if _measured(device, implementation, problem) or _is_given(
        given, implementation, problem.step
    ):
        return None
    version = ".".join(map(str, problem.capability))
    return f"by default on compute capability {version}, not measured on this device"


def heads_of(
    framework: str, heads: int, kv_heads: int, key_width: int, value_width: int
) -> str:
    """What the length from which NSA is faster than dense attention depends on, in words."""
    width = f"{key_width}" if key_width == value_width else f"{key_width}/{value_width}"
    return f"{framework} {heads}/{kv_heads} heads of {width}"


def dense_note(problem: Any) -> str | None:
    """From which length NSA is faster than dense attention here; None: not known."""
    device = of(problem.device) if problem.device else None
    about = problem.framework, problem.H, problem.Hkv, problem.D, problem.Dv
    if device is None or not (found := device.faster_than_dense.get(heads_of(*about))):
        return None
    parts = [
        f"{'at no measured length' if length == NEVER else f'from {length} tokens'} {words}"
        for name, words in PASSES.items()
        if (length := found.get(name)) is not None
    ]
    return f"faster than dense attention {', '.join(parts)} ({device.source})"


def _measured(device: Device | None, implementation: str, problem: Any) -> bool:
    return device is not None and device.has_measured(implementation, problem.step)


def _default(implementation: str, problem: Any) -> bool:
    """Whether it is taken where nothing was measured, with a note."""
    return problem.capability in MEASURED_ONLY.get(implementation, ())


def _is_given(thresholds: Thresholds, implementation: str, step: str) -> bool:
    """Whether a threshold of the kernel for this step is among these."""
    return any(DECIDES[name] == (step, (implementation,)) for name in thresholds.given())


def _below(name: str, value: Length | None, problem: Any) -> str | None:
    if value is None:
        return None
    if value == NEVER:
        return f"{name} is {NEVER}: no length at which it pays"
    if DECIDES[name][0] == "selected":
        length = problem.config.num_selected * problem.config.select_block
        what = f"{length} selected keys are"
    else:
        # Asked for one branch alone, S counts compressed tokens: fewer than the queries then.
        length = max(problem.T, problem.S)
        what = f"a length of {length} is"
        if not length:  # under torch.compile, where a length may have no number
            return None
    return f"{what} below {name}={value}" if length < value else None


@functools.cache
def of(device: str) -> Device | None:
    """What the file of the device that the driver calls so says; None without a file."""
    path = FOLDER / f"{config_files.slug(device)}.yaml"
    return read(path) if path.is_file() else None


def read(path: Path) -> Device:
    """The file of a device.

    Raises:
      ValueError: it is damaged, or of another device than its name says; the message names
        the file and the key.
    """
    data = config_files.load(path)
    known = ("schema", "device", "runtime", "evidence", "policy", "faster_than_dense")
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; known: {sorted(known)}")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, got {data.get('schema')!r}")
    name = data.get("device")
    if not isinstance(name, str) or config_files.slug(name) != path.stem:
        raise ValueError(f"{path} must be of the device in its name, got {name!r}")
    kinds = {"runtime": dict, "evidence": dict, "policy": list, "faster_than_dense": dict}
    sections = {key: data.get(key, kind()) for key, kind in kinds.items()}
    for key, kind in kinds.items():
        if not isinstance(sections[key], kind):
            raise ValueError(f"{path}: {key} must be a {kind.__name__}, got {data[key]!r}")
    try:
        thresholds = config_files.build(Thresholds, sections["runtime"], "runtime")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rules = tuple(
        _rule(rule, f"{path}: policy[{i}]") for i, rule in enumerate(sections["policy"])
    )
    for heads, lengths in sections["faster_than_dense"].items():
        where = f"{path}: faster_than_dense: {heads}"
        if not isinstance(lengths, dict) or not {*lengths} <= {*PASSES}:
            raise ValueError(f"{where} must have the keys {(*PASSES,)}, got {lengths!r}")
        for pass_, length in lengths.items():
            try:
                parse(length)
            except ValueError as error:
                raise ValueError(f"{where}: {pass_}: {error}") from None
    about = sections["evidence"], sections["faster_than_dense"]
    return Device(name, path, thresholds, rules, *about)


def _rule(data: Any, where: str) -> Rule:
    *names, optional = (field.name for field in dataclasses.fields(Rule))
    if not isinstance(data, dict) or sorted({*data} - {optional}) != sorted(names):
        raise ValueError(f"{where} must have the keys {names}, got {data!r}")
    if data["kernel"] not in KERNELS:
        raise ValueError(f"{where}: kernel must be one of {KERNELS}, got {data['kernel']!r}")
    steps = data["steps"]
    if not isinstance(steps, list) or not steps or not set(steps) <= set(STEPS):
        raise ValueError(f"{where}: steps must be a list of {STEPS}, got {steps!r}")
    allowed, provisional = data["allowed"], data.get(optional, False)
    for name, value in (("allowed", allowed), (optional, provisional)):
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} must be a bool, got {value!r}")
    texts = {name: str(data[name] or "").strip() for name in ("reason", "since")}
    for name, text in texts.items():
        if not text:
            raise ValueError(f"{where}: {name} must not be empty")
    return Rule(data["kernel"], tuple(steps), allowed, provisional=provisional, **texts)

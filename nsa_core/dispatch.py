"""Chooses an implementation from an ordered registry, and records why each earlier candidate was
refused.

An implementation named by the caller never falls back, unless the caller sets
`on_unsupported="fallback"` (flag `--on_unsupported`). A fallback causes a warning. The automatic
choice is the first implementation in the order of the registry that can run the problem. The
thresholds and the policy of the device must also allow the implementation (`policy.py`).

The step `attention` computes all other steps in one call. An implementation of `attention` runs
only if the same implementation was chosen for each of the other steps.
"""

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from nsa_core import policy
from nsa_core.config import NSAConfig
from nsa_core.policy import STEPS
from nsa_core.types import Branches

log = logging.getLogger(__name__)

type OnUnsupported = Literal["error", "fallback"]

WHOLE = "attention"  # the name of the step that consists of all steps
ROUNDED = "selected", "sliding", WHOLE  # the steps to which `compute_dtype` applies
FUNCTIONS = {  # names of the steps in reasons
    "compressed": "compressed_attention",
    "scores": "select_blocks",
    "selected": "selected_attention",
    "sliding": "sliding_attention",
    WHOLE: "attention",
}


class Problem(NamedTuple):
    """The properties of a call that decide whether an implementation can run. `types.py` explains
    the letters B, T, S, H, Hkv, D and Dv. Under torch.compile, B is 1, and T and S are 0. If only
    the step `compressed` or only the step `scores` is requested, `S` is the number of compressed
    tokens.
    """

    framework: str
    step: str
    platform: str
    dtype: str
    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    packed: bool
    config: NSAConfig
    capability: tuple[int, int] | None = None  # of the GPU, e.g. (9, 0)
    strided: str | None = None  # why kernels do not support the memory layout of a tensor
    device: str | None = None  # the driver's name of the GPU
    requires_grad: bool = False  # whether a backward pass may follow
    cached: bool = False  # whether the keys are a cache, whose lengths are on the device
    is_fp8: bool = False  # whether the tokens of the cache are rounded to 8 bits


def layer_note(
    heads: int, kv_heads: int, key_width: int, value_width: int, dtype: str, config: NSAConfig
) -> dict[str, Any]:
    """Return the properties on which kernels depend, except lengths, as a note for
    `kernels_pallas.runtime.store`.
    """
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "key_width": key_width,
        "value_width": value_width,
        "dtype": dtype,
        "config": config.as_dict(),
    }


INVARIANT = "invariant"  # an implementation that is used only if all branches name it


def one_name(implementation):
    """Return "invariant" if all branches name it, and otherwise `implementation`.

    Raises:
      NotImplementedError: Some branches name "invariant", and others do not.
    """
    if not isinstance(implementation, Branches) or INVARIANT not in implementation:
        return implementation
    if {*implementation} != {INVARIANT}:
        raise NotImplementedError(
            f"{INVARIANT}: all branches must have this implementation, got {(*implementation,)}"
        )
    return INVARIANT


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of one step.

    Attributes:
      target: `module:function`. The module of `target` is imported at the first call. `target` is
        empty if the registry only chooses, and the caller of the registry runs the implementation.
      why_not: Function that returns the reason why the implementation cannot run a problem, or
        None.
    """

    name: str
    target: str = ""
    why_not: Callable[[Problem], str | None] = lambda problem: None

    def refusal(self, problem: Problem) -> str | None:
        """Return the reason why the implementation cannot run a problem, or None."""
        dtype = problem.config.compute_dtype
        if dtype is not None and problem.step in ROUNDED and self.name != "mosaic":
            return f"computes in the dtype of the query, got compute_dtype={dtype!r}"
        return self.why_not(problem)

    def load(self) -> Callable:
        module, function = self.target.split(":")
        # torch.compile can trace a look-up, but not an import by name.
        return getattr(sys.modules.get(module) or importlib.import_module(module), function)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one step, with the reasons why earlier candidates were refused.
    `note` is the compute dtype, or a text that states which measurements the automatic choice
    lacks (`policy.note`).
    """

    step: str
    implementation: str
    refused: Mapping[str, str]
    load: Callable[[], Callable] = dataclasses.field(repr=False, compare=False)
    note: str | None = None

    def __str__(self) -> str:
        notes = [self.note] if self.note else []
        notes += [f"not {name}: {reason}" for name, reason in self.refused.items()]
        why = "; ".join(notes)
        return f"{self.step}: {self.implementation}" + (f" ({why})" if why else "")


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choice for each step of a call. The printed object has one line per step.

    Attributes:
      attention: The implementation that runs all steps at once. `attention=None` means that the
        steps run one by one.
      whole_refused: For each implementation of `attention`, the reason why it was refused.
      beside_dense: A note with the length from which `attention` is faster than dense attention
        on this device. The note is None if no length is known, or if no implementation runs all
        steps at once.
    """

    compressed: Choice
    scores: Choice
    selected: Choice
    sliding: Choice
    attention: Choice | None = None
    whole_refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beside_dense: str | None = None

    def __iter__(self) -> Iterator[Choice]:
        """Return the choice of each step, in the order of `STEPS`."""
        return (getattr(self, step) for step in STEPS)

    def __str__(self) -> str:
        whole = self.attention
        if whole is None:
            refused = self.whole_refused.items()
            why = "".join(f"; not {name}: {why}" for name, why in refused)
            whole = f"{WHOLE}: step by step" + (f" ({why[2:]})" if why else "")
        beside = [f"{WHOLE}: {self.beside_dense}"] if self.beside_dense else []
        return "\n".join(map(str, (*self, whole, *beside)))


class Registry:
    """The implementations of each step, in the order of the automatic choice. The step
    `attention` may have no implementation.
    """

    def __init__(self, framework: str, table: Mapping[str, tuple[Implementation, ...]]):
        self.framework = framework
        self.table = dict(table)

    def names(self, step: str | None = None) -> tuple[str, ...]:
        """Return the names of the implementations of `step` in order.

        If `step` is None, return the names for all steps.
        """
        rows = [self.table[step]] if step else self.table.values()
        return tuple(dict.fromkeys([entry.name for row in rows for entry in row]))

    def entry(self, step: str, name: str | None) -> Implementation | None:
        """Return the implementation of `step` with this `name`, or None.

        Raises:
          ValueError: No implementation is called `name`.
        """
        if name is not None and name not in self.names():
            known = self.names()
            raise ValueError(f"implementation must be one of {known} or None, got {name!r}")
        return next((x for x in self.table.get(step, ()) if x.name == name), None)

    def choose(
        self,
        problem: Problem,
        name: str | None = None,
        on_unsupported: OnUnsupported = "error",
    ) -> Choice:
        """Return the implementation called `name`.

        If `name` is None, return the first implementation that can run `problem` and that the
        policy of the device allows (`policy.why_not`). If `compute_dtype` applies to the step, the
        policy does not apply.

        Raises:
          ValueError: No implementation is called `name`.
          NotImplementedError: The named implementation cannot run the problem and
            `on_unsupported` is "error", or all implementations are refused.
        """
        step, dtype, note = problem.step, problem.config.compute_dtype, None
        if dtype is not None and step in ROUNDED:
            note = f"in {dtype}"
        named, refused = self.entry(step, name), dict[str, str]()
        if name is not None:
            reason = f"{self.framework} has no {name} implementation of this step"
            reason = named.refusal(problem) if named else reason
            if named and reason is None:
                return Choice(step, name, {}, named.load, note)
            if on_unsupported == "error":
                raise NotImplementedError(f"{step}: {name}: {reason}")
            log.warning(
                "%s: %s cannot run, so another implementation is chosen: %s", step, name, reason
            )
            refused[name] = str(reason)
        for entry in self.table[step]:
            if entry.name in refused:
                continue
            reason = entry.refusal(problem)
            if (
                note is None
            ):  # a caller that sets `compute_dtype` has decided that it is worthwhile
                reason = reason or policy.why_not(entry.name, problem)
            if reason is None:
                note = note or policy.note(entry.name, problem)
                choice = Choice(step, entry.name, refused, entry.load, note)
                if log.isEnabledFor(logging.INFO):
                    _log_once(str(choice))
                return choice
            refused[entry.name] = reason
        reasons = "; ".join(f"{key}: {reason}" for key, reason in refused.items())
        raise NotImplementedError(f"no implementation of {step} can run this call: {reasons}")

    def choices(
        self,
        problem: Problem,
        implementation: str | Branches[str | None] | None = None,
        on_unsupported: OnUnsupported = "error",
        step: str | None = None,
    ) -> Choices:
        """Return the choice for every step.

        If `step` is given, `implementation` is a name that applies only to that step. With `step`,
        the implementations of all other steps are chosen automatically.

        A `Branches` of names has no entry for the step `scores`. Scores run on the implementation
        of the selected branch if it supports scores. If the implementation of the selected branch
        does not support scores, scores run on the first implementation that supports scores. A
        single name for all branches also applies to the step `scores`, if the named implementation
        has this step.
        """
        if step is not None and step not in ROUNDED:
            problem = problem._replace(config=problem.config.of_sizes)
        at = {x: problem._replace(step=x) for x in STEPS}
        at["scores"] = at["scores"]._replace(
            requires_grad=False
        )  # block selection has no gradient
        if step is not None:
            names = dict.fromkeys(STEPS) | {step: implementation}
        else:
            implementation = one_name(implementation)
            names = Branches.each(implementation)._asdict()
            for name in names.values():
                self.entry("scores", name)  # this checks the name
            own = self.entry("scores", names["selected"])
            strict = isinstance(implementation, str)
            able = own and (strict or own.refusal(at["scores"]) is None)
            names["scores"] = names["selected"] if able else None
        choices = [self.choose(at[x], names[x], on_unsupported) for x in STEPS]
        refused, whole = dict[str, str](), None
        for entry in self.table.get(WHOLE, ()):
            if entry.name == INVARIANT != choices[0].implementation:
                continue
            other = next((x for x in choices if x.implementation != entry.name), None)
            if other is not None:
                reason = f"{other.step} runs on {other.implementation}"
            else:
                reason = entry.refusal(problem._replace(step=WHOLE))
            if reason is None:
                whole = Choice(WHOLE, entry.name, {}, entry.load)
                break
            refused[entry.name] = reason
        beside = policy.dense_note(problem) if whole else None
        return Choices(*choices, attention=whole, whole_refused=refused, beside_dense=beside)


@functools.cache
def _log_once(line: str) -> None:
    log.info("%s", line)

"""Which implementation runs: an ordered registry that can say why it refused each one.

An implementation named by the caller never falls back. Automatic choice walks the order and
takes the first that does not refuse, and that the device's thresholds and policy do not keep
back (`policy.py`); the refusals travel with the choice.
"""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax

import kernels_pallas
from kernels_pallas import tiles
from nsa_jax import policy
from nsa_jax.config import NSAConfig
from nsa_jax.types import Branches

log = logging.getLogger(__name__)

type OnUnsupported = Literal["error", "fallback"]

STEPS = ("compressed", "scores", "selected", "sliding")


class Problem(NamedTuple):
    """What an implementation must know to say whether it can run (shapes: `types.py`)."""

    framework: str
    branch: str
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
    strided: str | None = None  # which tensor should lie in memory in another way, and how
    device: str | None = None  # the GPU, as its driver calls it


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute one step; `target` is `module:function`, imported when it is called."""

    name: str
    target: str
    why_not: Callable[[Problem], str | None] = lambda problem: None

    def load(self) -> Callable:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What will run for one step, and why each implementation before it will not."""

    branch: str
    implementation: str
    refused: Mapping[str, str]
    load: Callable[[], Callable] = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.refused.items())
        return f"{self.branch}: {self.implementation}" + (f" ({why})" if why else "")


class Plan(NamedTuple):
    """The choice of every step of one call; prints as one line a step."""

    compressed: Choice
    scores: Choice
    selected: Choice
    sliding: Choice

    def __str__(self) -> str:
        return "\n".join(map(str, self))


class Registry:
    """Implementations of each step in the order in which automatic choice tries them."""

    def __init__(self, framework: str, table: Mapping[str, tuple[Implementation, ...]]):
        self.framework = framework
        self.table = dict(table)

    def names(self, branch: str | None = None) -> tuple[str, ...]:
        """Known implementations of `branch` (of any), in order."""
        rows = [self.table[branch]] if branch else self.table.values()
        return tuple(dict.fromkeys(entry.name for row in rows for entry in row))

    def choose(
        self,
        problem: Problem,
        name: str | None = None,
        on_unsupported: OnUnsupported = "error",
    ) -> Choice:
        """The implementation called `name`, or for None the first that can run `problem`.

        Raises:
          ValueError: no implementation has this name.
          NotImplementedError: the named one refuses, and `on_unsupported` is "error".
          ExceptionGroup: automatic choice was refused by all.
        """
        entries = {entry.name: entry for entry in self.table[problem.branch]}
        refused: dict[str, str] = {}
        if name is not None and name != "auto":
            if name not in self.names():
                raise ValueError(
                    f"implementation must be one of {self.names()} or None, got {name!r}"
                )
            if name in entries:
                reason = entries[name].why_not(problem)
            else:
                reason = f"no {name} implementation of {problem.branch} here"
            if reason is None:
                return Choice(problem.branch, name, {}, entries[name].load)
            if on_unsupported == "error":
                raise NotImplementedError(f"{problem.branch}: {name}: {reason}")
            log.warning("%s: %s refused, choosing another: %s", problem.branch, name, reason)
            refused[name] = reason
        for entry in entries.values():
            if entry.name in refused:
                continue
            reason = entry.why_not(problem) or policy.why_not(entry.name, problem)
            if reason is None:
                choice = Choice(problem.branch, entry.name, refused, entry.load)
                if log.isEnabledFor(logging.INFO):
                    _log_once(str(choice))
                return choice
            refused[entry.name] = reason
        raise ExceptionGroup(
            f"no implementation of {problem.branch} can run this problem",
            [NotImplementedError(f"{key}: {reason}") for key, reason in refused.items()],
        )

    def plan(
        self,
        problem: Problem,
        implementation: str | Branches[str | None] | None = None,
        on_unsupported: OnUnsupported = "error",
        step: str | None = None,
    ) -> Plan:
        """The choice of every step; `step`: the one that is named, the others are not.

        Scores belong to no branch that can be named: they run with the implementation of the
        selected branch where that can, otherwise with the first that can. One name for all
        branches is meant for them too, where it has scores at all.
        """
        at = {step: problem._replace(branch=step) for step in STEPS}
        if step is not None:
            names = dict.fromkeys(STEPS) | {step: implementation}
            return Plan(*(self.choose(at[x], names[x], on_unsupported) for x in STEPS))
        names = Branches.each(implementation)._asdict()
        scoring = {entry.name: entry for entry in self.table["scores"]}
        own = scoring.get(names["selected"])
        strict = isinstance(implementation, str) and own is not None
        able = own is not None and own.why_not(at["scores"]) is None
        names["scores"] = names["selected"] if strict or able else None
        return Plan(*(self.choose(at[step], names[step], on_unsupported) for step in STEPS))


@functools.cache
def _log_once(line: str) -> None:
    log.info("%s", line)


def kernel(name: str, target: str) -> Implementation:
    """The entry of a step on kernels of `kernels_pallas`, which say what they cannot do."""
    return Implementation(name, target, functools.partial(kernels_pallas.why_not, name))


def _table(step: str, function: str) -> tuple[Implementation, ...]:
    name = function.split(":")[1]
    return (
        kernel("mosaic", f"nsa_jax.mosaic:{name}"),  # built for Hopper
        kernel("triton", f"nsa_jax.triton:{name}"),  # none yet: it refuses
        Implementation("xla", f"nsa_jax.{function}"),  # any device, memory bounded
        Implementation("reference", f"nsa_jax.reference:{name}"),
    )


REGISTRY = Registry(
    "jax",
    {
        "compressed": _table("compressed", "branches:compressed_attention"),
        "scores": _table("scores", "select:select_blocks"),
        "selected": _table("selected", "branches:selected_attention"),
        "sliding": _table("sliding", "branches:sliding_attention"),
    },
)


def capability() -> tuple[int, int] | None:
    """The compute capability of JAX's first device, or None where that is no NVIDIA GPU."""
    version = str(getattr(jax.devices()[0], "compute_capability", ""))
    major, _, minor = version.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def problem_of(
    query, kv_heads: int, num_keys: int, value_width: int, config: NSAConfig, packed: bool
) -> Problem:
    """The problem that `query` [B, T, H, D] poses on the default JAX backend."""
    batch, length, heads, width = query.shape
    return Problem(
        framework="jax",
        branch="",
        platform=jax.default_backend(),
        capability=capability(),
        dtype=str(query.dtype),
        B=batch,
        T=length,
        S=num_keys,
        H=heads,
        Hkv=kv_heads,
        D=width,
        Dv=value_width,
        packed=packed,
        config=config,
        device=tiles.jax_device(),
    )

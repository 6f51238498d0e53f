"""What runs a paged call, in either framework: kernels on pages, or `attention` on gathered rows.

`gathered` runs on any implementation of `attention`, whose names are taken here too.
"""

import functools
from collections.abc import Callable

import kernels_pallas
from nsa_jax.dispatch import Choice, Implementation, Problem, Registry

DECODE = "decode"  # the step
GATHERED = "gathered"


def registry(
    framework: str,
    triton: str,
    gathered: str,
    why_not: Callable[[Problem], str | None] = functools.partial(
        kernels_pallas.why_not, "triton"
    ),
) -> Registry:
    """The table of a framework, from the targets of its implementations."""
    kernels = Implementation("triton", triton, why_not)
    return Registry(framework, {DECODE: (kernels, Implementation(GATHERED, gathered))})


def choose(
    own: Registry, attention: Registry, problem: Problem, name: str | None
) -> tuple[Choice, str | None]:
    """What runs a paged call, and the implementation of `attention` that is named where it
    gathers.

    Raises:
      ValueError: no implementation has this name.
      NotImplementedError: the named one cannot run the problem.
    """
    asked = name
    if name is not None and name not in own.names():
        if name not in attention.names():
            known = tuple(dict.fromkeys((*own.names(), *attention.names())))
            raise ValueError(f"implementation must be one of {known} or None, got {name!r}")
        asked = GATHERED
    choice = own.choose(problem._replace(branch=DECODE), asked)
    return choice, None if name == GATHERED else name

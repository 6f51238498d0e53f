"""What runs a paged call, in either framework: kernels on pages, or `attention` on gathered rows.

`gathered` runs on any implementation of `attention`, whose names are taken here too.
"""

import functools
from collections.abc import Callable

import kernels_pallas
from nsa_jax import mosaic_decode
from nsa_jax.dispatch import Choice, Implementation, Problem, Registry

DECODE = "decode"  # the step
GATHERED = "gathered"


def registry(
    framework: str,
    module: str,
    why_not: Callable[[str, Problem], str | None],
) -> Registry:
    """The table of a framework.

    Args:
      module: which has a function for each implementation.
      why_not: of kernels by name, what the framework's arrays add.
    """
    triton, mosaic = (
        Implementation(name, f"{module}:on_{name}", functools.partial(why_not, name))
        for name in ("triton", "mosaic")
    )
    gathered = Implementation(GATHERED, f"{module}:{GATHERED}")
    # Mosaic's kernel has not run on a GPU: behind what always can, so that it must be named.
    return Registry(framework, {DECODE: (triton, gathered, mosaic)})


def why_not(name: str, problem: Problem) -> str | None:
    """Why kernels on pages cannot run a paged call, or None."""
    if name == "mosaic":
        return mosaic_decode.why_not(problem)
    return kernels_pallas.why_not(name, problem)


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

"""Fast kernels. A kernel is a function of arrays and static integers.

`mosaic` has kernels in Pallas Mosaic GPU (Hopper), and `triton` has kernels in official Triton.
Callers first call `why_not`, then describe a `Kernel` and run it.
"""

from typing import Any

from kernels_pallas.mosaic import capability as mosaic_capability
from kernels_pallas.triton import capability as triton_capability

CAPABILITIES = {"mosaic": mosaic_capability, "triton": triton_capability}


def why_not(implementation: str, problem: Any) -> str | None:
    """Return the reason why no kernel of `implementation` can run `problem`, or None.

    `problem` has the framework, the branch and the shapes.
    """
    return CAPABILITIES[implementation].why_not(problem)

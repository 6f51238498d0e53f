"""Fast kernels: arrays and static integers in, arrays out.

`mosaic` kernels are Pallas Mosaic GPU (Hopper), `triton` kernels official Triton. This floor
knows nothing of the ones above it: they ask `why_not`, then build a `Kernel` and call it.
"""

from collections.abc import Callable
from typing import Any

from kernels_pallas.mosaic import limits as mosaic

# (implementation, step) -> a function of the problem: a reason, or None.
KERNELS: dict[tuple[str, str], Callable[[Any], str | None]] = {
    ("mosaic", step): mosaic.why_not for step in ("compressed", "scores", "selected", "sliding")
}


def why_not(implementation: str, problem: Any) -> str | None:
    """Why no such kernel can run `problem` (framework, branch, shapes), or None."""
    supports = KERNELS.get((implementation, problem.branch))
    if supports is None:
        return f"kernels_pallas has no {implementation} kernel for the {problem.branch} step"
    return supports(problem)

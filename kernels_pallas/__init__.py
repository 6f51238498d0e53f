"""Fast kernels, which are functions of arrays and static integers.

`mosaic` kernels are Pallas Mosaic GPU (Hopper), `triton` kernels official Triton. This package
does not import the packages above it. They call `why_not`, then build a `Kernel` and call it.
"""

from collections.abc import Callable
from typing import Any

from kernels_pallas.mosaic import capability as mosaic
from kernels_pallas.triton import capability as triton

# (implementation, step) -> a function of the problem: a reason, or None.
KERNELS: dict[tuple[str, str], Callable[[Any], str | None]] = {
    (name, step): module.why_not
    for name, module in (("mosaic", mosaic), ("triton", triton))
    # The last: all steps at once.
    for step in ("compressed", "scores", "selected", "sliding", "attention")
}
KERNELS["triton", "decode"] = triton.decode_why_not


def why_not(implementation: str, problem: Any) -> str | None:
    """The reason why no such kernel can run `problem` (framework, branch, shapes), or None."""
    supports = KERNELS.get((implementation, problem.step))
    if supports is None:
        return f"kernels_pallas has no {implementation} kernel for the {problem.step} step"
    return supports(problem)

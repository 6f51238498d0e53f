"""Fast kernels: arrays and static integers in, arrays out.

`mosaic` kernels are Pallas Mosaic GPU (Hopper), `triton` kernels official Triton. This floor
knows nothing of the ones above it: they ask `why_not`, then import
`kernels_pallas.<implementation>` and call the function named after the step.
"""

from collections.abc import Callable
from typing import Any

# (implementation, framework, branch) -> a function of the problem: a reason, or None.
KERNELS: dict[tuple[str, str, str], Callable[[Any], str | None]] = {}


def why_not(implementation: str, problem: Any) -> str | None:
    """Why no such kernel can run `problem` (framework, branch, shapes), or None."""
    supports = KERNELS.get((implementation, problem.framework, problem.branch))
    if supports is None:
        return (
            f"kernels_pallas has no {implementation} kernel "
            f"for the {problem.branch} step in {problem.framework}"
        )
    return supports(problem)

"""Describes the kernels of the gated sum of the branches' outputs, and of the row sums that the
backward pass of the gated sum needs.

gated_sum   O = sum_c g_c O_c
deltas      delta_c = rowsum(dO * O_c) = dg_c, the gradient of gate c
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, Spec, described, float32
from kernels_pallas.specs.tile import ROWS, cdiv


@dataclasses.dataclass(frozen=True)
class Combine(Spec):
    """Static sizes. There are `branches` outputs with `rows` rows, one row per token and query
    head.
    """

    rows: int
    width: int
    branches: int
    dtype: str

    @property
    def nominal(self) -> dict[str, Any]:
        return {"rows": NOMINAL_LENGTH}

    @property
    def launch(self) -> dict[str, Any]:
        """Return the sizes and the grid of a launch. Each CTA processes a tile of 64 rows."""
        return {"sizes": {"rows": self.rows}, "grid": (cdiv(self.rows, ROWS),)}

    @cached_property
    def out(self) -> Array:
        """The shape and dtype of O, of dO, and of the output O_c of a branch."""
        return Array((self.rows, self.width), self.dtype)

    @cached_property
    def per_row(self) -> Array:
        """The shape and dtype of a gate g_c and of delta_c.

        The first and the last axis have size 1, since `row_io.TileRows` reads arrays with three
        axes.
        """
        return float32(1, self.rows, 1)


@described
def gated_sum(spec: Combine) -> Kernel:
    """Describe the kernel that computes O = sum_c g_c O_c.

    Inputs: `branches` gates, float32 `[1, rows, 1]`, then `branches` outputs `[rows, width]`.
    Output: the gated sum `[rows, width]`.
    """
    inputs = {f"gate_{c}": spec.per_row for c in range(spec.branches)}
    inputs |= {f"out_{c}": spec.out for c in range(spec.branches)}
    return Kernel.named(spec, inputs, {"total": spec.out}, **spec.launch)


@described
def deltas(spec: Combine) -> Kernel:
    """Describe the kernel that computes delta_c = rowsum(dO * O_c).

    Inputs: dO, then `branches` outputs, all `[rows, width]`. Outputs: `branches` arrays, float32
    `[1, rows, 1]`.
    """
    inputs = {"do": spec.out} | {f"out_{c}": spec.out for c in range(spec.branches)}
    outputs = {f"delta_{c}": spec.per_row for c in range(spec.branches)}
    return Kernel.named(spec, inputs, outputs, **spec.launch)

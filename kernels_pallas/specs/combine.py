"""The gated sum of the branches' outputs and its row sums for the backward pass.

gated_sum   O = sum_c g_c O_c
deltas      delta_c = rowsum(dO * O_c) = dg_c, the gradient of gate c
"""

import dataclasses
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs.tile import ROWS, cdiv


@dataclasses.dataclass(frozen=True)
class Combine:
    """Static sizes: `branches` outputs of `rows` rows (one a token and query head)."""

    rows: int
    width: int
    branches: int
    dtype: str
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with a nominal number of rows."""
        return dataclasses.replace(self, any_length=True, rows=NOMINAL_LENGTH)

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows, one a CTA."""
        return cdiv(self.rows, ROWS)

    @property
    def out(self) -> Array:
        """O, dO or the output O_c of a branch."""
        return Array((self.rows, self.width), self.dtype)

    @property
    def per_row(self) -> Array:
        """A gate g_c or a delta_c; the leading and last axis are those of `row_io.TileRows`."""
        return Array((1, self.rows, 1), "float32")


@described
def gated_sum(spec: Combine) -> Kernel:
    """O = sum_c g_c O_c.

    Inputs: `branches` gates, float32 `[1, rows, 1]`, then as many outputs `[rows, width]`.
    Output: their gated sum `[rows, width]`.
    """
    inputs = {f"gate_{c}": spec.per_row for c in range(spec.branches)}
    inputs |= {f"out_{c}": spec.out for c in range(spec.branches)}
    return _kernel("gated_sum", spec, inputs, {"total": spec.out})


@described
def deltas(spec: Combine) -> Kernel:
    """delta_c = rowsum(dO * O_c).

    Inputs: dO, then `branches` outputs, all `[rows, width]`. Outputs: `branches` times float32
    `[1, rows, 1]`.
    """
    inputs = {"do": spec.out} | {f"out_{c}": spec.out for c in range(spec.branches)}
    outputs = {f"delta_{c}": spec.per_row for c in range(spec.branches)}
    return _kernel("deltas", spec, inputs, outputs)


def _kernel(name: str, spec: Combine, inputs, outputs) -> Kernel:
    return Kernel.named(
        name,
        spec,
        f"kernels_pallas.mosaic.combine:{name}",
        inputs,
        outputs,
        sizes={"rows": spec.rows},
        grid=(spec.tiles,),
        source=f"kernels_pallas.specs.combine:{name}",
    )

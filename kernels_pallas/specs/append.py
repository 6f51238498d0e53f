"""New tokens to the pages of a cache, and the compressed tokens that they finish, in one launch.

Where things lie is said in `specs.decode`. A token is read from the call, or from its page where it
was appended before; what is written is read by nobody in the same launch.
"""

import dataclasses
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs import tile
from kernels_pallas.specs.compress import TokenWords

DTYPES = "bfloat16", "float16"
BRANCHES = "selected", "sliding", "raw"


@dataclasses.dataclass(frozen=True)
class Append(TokenWords):
    """Static sizes.

    Attributes:
      N: new tokens of all rows.
      B: rows.
      pages: that there are.
      table_pages: of a row's table.
      compress_block, stride: `l` and `d` of the windows, tokens.
      block: tokens of a page.
      ragged: whether rows have different numbers of new tokens.
      separate: whether each branch has keys and values of its own.
      means: whether compressed tokens are means, which are made here.
    """

    N: int
    B: int
    pages: int
    table_pages: int
    Hkv: int
    D: int
    Dv: int
    compress_block: int
    stride: int
    block: int
    dtype: str
    ragged: bool
    separate: bool
    means: bool
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with a nominal batch, pool and table."""
        lengths = dict.fromkeys(("N", "B", "pages", "table_pages"), NOMINAL_LENGTH)
        return dataclasses.replace(self, any_length=True, **lengths)

    @property
    def per_page(self) -> int:
        """Compressed slots of a page."""
        return self.block // self.stride

    @property
    def branches(self) -> tuple[str, ...]:
        """Whose raw tokens are kept."""
        return BRANCHES if self.separate else BRANCHES[:1]

    def pairs(self, what: str, *shape: int) -> dict[str, Array]:
        """Keys and values of each branch, by the names `what` is formatted to."""
        widths = {"key": self.D, "value": self.Dv}
        return {
            what.format(branch=branch, kind=kind): Array((*shape, self.Hkv, width), self.dtype)
            for branch in self.branches
            for kind, width in widths.items()
        }


@described
def append(spec: Append) -> Kernel:
    """Inputs: new keys and values `[N, Hkv, .]` of each branch, `page_table` int32 `[B, M]`,
    `lengths` int32 `[B]`, `starts` int32 `[B + 1]` of `ragged` rows, and the pages of the raw keys
    and values of `means`, which are read where this call does not write.

    Outputs: the pages `[P, block, Hkv, .]` of each branch, then of `means` the compressed ones
    `[P, block / stride, Hkv, .]`; what no token goes to stays as it is.
    """
    pages = spec.pages, spec.block
    inputs = spec.pairs("{branch}_{kind}", spec.N)
    inputs |= {"page_table": Array((spec.B, spec.table_pages), "int32")}
    inputs |= {"lengths": Array((spec.B,), "int32")}
    outputs = spec.pairs("{branch}_{kind}_pages", *pages)
    if spec.ragged:
        inputs |= {"starts": Array((spec.B + 1,), "int32")}
    if spec.means:
        for kind, width in (("key", spec.D), ("value", spec.Dv)):
            rest = spec.Hkv, width
            inputs |= {f"old_{kind}": Array((*pages, *rest), spec.dtype)}
            shape = spec.pages, spec.per_page, *rest
            outputs |= {f"compressed_{kind}": Array(shape, spec.dtype)}
    return Kernel.named(
        "append",
        spec,
        "kernels_pallas.mosaic.append:append",
        inputs,
        outputs,
        sizes={"N": spec.N, "B": spec.B, "M": spec.table_pages, "P": spec.pages},
        grid=tile.warp_grid(1, spec.N * sum(spec.columns)),
        source="kernels_pallas.specs.append:append",
    )


def why_not(spec: Append) -> str | None:
    """Why there is no such kernel, or None."""
    if spec.dtype not in DTYPES:
        return f"needs pages of {' or '.join(DTYPES)}, got {spec.dtype}"
    if odd := [words for words in (spec.Hkv * spec.D, spec.Hkv * spec.Dv) if words % 2]:
        return f"needs an even number of elements a token, got {odd[0]}"
    return None

"""Describes the kernel that writes new tokens, and the compressed tokens that the new tokens
complete, to the pages of a cache.

`specs.decode` describes the layout of pages. To compute a compressed token, the kernel reads new
tokens from the call and older tokens from their pages. A launch does not read any memory that it
writes.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, Spec, described, int32
from kernels_pallas.specs import tile
from kernels_pallas.specs.compress import TokenWords

DTYPES = "bfloat16", "float16"
BRANCHES = "selected", "sliding", "raw"


@dataclasses.dataclass(frozen=True)
class Append(TokenWords, Spec):
    """Static sizes.

    Attributes:
      N: Number of new tokens of all rows.
      B: Number of rows.
      pages: Number of pages in the pool.
      table_pages: Number of columns of the page table.
      Hkv: Number of key/value heads.
      D: Width of keys, in elements.
      Dv: Width of values, in elements.
      compress_block: `l`, the number of tokens per window.
      stride: `d`, the number of tokens between the starts of two windows.
      block: Tokens per page.
      dtype: One of `DTYPES`.
      ragged: Whether rows have different numbers of new tokens.
      separate: Whether each branch has its own keys and values.
      means: Whether compressed tokens are means, which this kernel computes.
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

    @property
    def nominal(self) -> dict[str, Any]:
        return dict.fromkeys(("N", "B", "pages", "table_pages"), NOMINAL_LENGTH)

    @cached_property
    def per_page(self) -> int:
        """Number of compressed tokens per page."""
        return self.block // self.stride

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """The branches whose raw tokens are stored."""
        return BRANCHES if self.separate else BRANCHES[:1]

    def pairs(self, name: str, *shape: int) -> dict[str, Array]:
        """Describe the keys and values of each branch, by name. `name` is a format string with
        the fields `branch` and `kind`.
        """
        return {
            name.format(branch=branch, kind=kind): Array((*shape, self.Hkv, width), self.dtype)
            for branch in self.branches
            for kind, width in (("key", self.D), ("value", self.Dv))
        }


@described
def append(spec: Append) -> Kernel:
    """Inputs: new keys and values `[N, Hkv, .]` of each branch, `page_table` int32 `[B, M]`,
    `lengths` int32 `[B]`, and `starts` int32 `[B + 1]` if `ragged` is true. If `means` is true,
    the pages of the raw keys and values follow. From the pages of raw tokens, the kernel reads only
    positions that the call does not write.

    Outputs: the pages `[P, block, Hkv, .]` of each branch. If `means` is true, the compressed pages
    `[P, block / stride, Hkv, .]` follow. Slots that receive no token are unchanged.
    """
    pages = spec.pages, spec.block
    inputs = spec.pairs("{branch}_{kind}", spec.N)
    inputs |= {"page_table": int32(spec.B, spec.table_pages), "lengths": int32(spec.B)}
    outputs = spec.pairs("{branch}_{kind}_pages", *pages)
    if spec.ragged:
        inputs |= {"starts": int32(spec.B + 1)}
    if spec.means:
        for kind, width in (("key", spec.D), ("value", spec.Dv)):
            rest = spec.Hkv, width
            inputs |= {f"old_{kind}": Array((*pages, *rest), spec.dtype)}
            shape = spec.pages, spec.per_page, *rest
            outputs |= {f"compressed_{kind}": Array(shape, spec.dtype)}
    return Kernel.named(
        spec,
        inputs,
        outputs,
        sizes={"N": spec.N, "B": spec.B, "M": spec.table_pages, "P": spec.pages},
        grid=tile.warp_grid(1, spec.N * sum(spec.columns)),
    )


def why_not(spec: Append) -> str | None:
    """Return the reason why no kernel supports the sizes, or None."""
    if spec.dtype not in DTYPES:
        return f"needs pages of {' or '.join(DTYPES)}, got {spec.dtype}"
    if odd := [words for words in (spec.Hkv * spec.D, spec.Hkv * spec.Dv) if words % 2]:
        return f"needs an even number of elements per token, got {odd[0]}"
    return None

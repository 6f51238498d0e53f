"""Describes attention of every query to its selected blocks.

A tile of queries loops over the tile's block list.

A tile is gathered if the block list of the previous tile is longer than `gather_limit`. For a
gathered tile, the kernels of this module loop only over the near blocks, which the tile's tokens
share. The kernels of `specs/gathered.py` add the far blocks. If b is the block of the tile's first
token, near blocks are block 0 and the blocks from b - 1 on. All other blocks are far.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described, int32
from kernels_pallas.specs import attention
from kernels_pallas.specs.attention import AttentionSizes
from kernels_pallas.specs.tile import (
    LANES,
    ROWS,
    SMEM_BUDGET,
    SMEM_HALF,
    Tile,
    cdiv,
    parts_of_block,
    slab_width,
)

# number of registers per thread for matrices; other registers have addresses and statistics
FORWARD_REGISTERS = 192
LIST_CHUNK = 64  # number of entries of a block list that are copied at a time
MAX_LIST_BYTES = 48 * 1024  # a list of 64 tokens x 64 blocks, 3 int32 per entry


class BlockCounts(NamedTuple):
    """One row of `block_counts`, which has counts and positions in a tile's block list."""

    full_blocks: Any  # number of blocks at the begin of the list that need no mask by key
    blocks: Any  # number of blocks in the whole list
    # The begin and the end of the far blocks in the list. Then the first slot of the selection
    # in which some token has a far block, and the last such slot + 1. These four numbers are
    # read only if tiles may be gathered, and are undefined in packed rows.
    far_begin: Any
    far_end: Any
    far_slot: Any  # counts slots of whole blocks, not of their parts
    far_slot_end: Any


COUNTS = len(BlockCounts._fields)


def first_near(position: Any, block: int, larger: Callable[[Any, Any], Any]) -> Any:
    """Return the index of the first near block of a tile after block 0.

    The tile's first token is at `position`. The first near block is the block before the block of
    the tile's first token. `larger` returns the maximum of two numbers.
    """
    return larger(larger(position, 0) // block - 1, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockListSizes(AttentionSizes):
    """The sizes of the problem. Query rows are divided into tiles, and each tile has a block
    list.
    """

    n: int  # number of selected blocks per token
    parts: int = 1  # number of parts per block; all parts of a block are gathered, or none

    @cached_property
    def tile(self) -> Tile:
        raise NotImplementedError

    @cached_property
    def tiles(self) -> int:
        return cdiv(self.T, self.tile.tokens)

    @cached_property
    def entries(self) -> int:
        """The capacity of a tile's block list, a multiple of `LIST_CHUNK`."""
        return cdiv(self.tile.tokens * self.n, LIST_CHUNK) * LIST_CHUNK

    @cached_property
    def words(self) -> int:
        """The number of int32 words that have a bit for each token of a tile."""
        return cdiv(self.tile.tokens, LANES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedAttention(BlockListSizes):
    """Sizes of the problem, of its block lists and of a CTA, and the fused operations."""

    block: int  # number of keys per selection block
    # Number of pages per row. A page is a block, and may be anywhere in the `S` keys. 0 means
    # that keys are contiguous.
    pages: int = 0
    gated: bool = False  # forward multiplies the output by a gate
    added: bool = False  # whether the result is added to an array
    summed: bool = False  # whether forward also computes the gated sum of all branches
    stats_tile: tuple[int, int] = (0, 0)  # tokens and rows of a query tile of `dkv`
    gather_limit: int = (
        0  # a tile is gathered if the previous block list is longer than this; 0 means never
    )
    key_stages: int = 1  # stages of attention (`forward_stages`, `dq_stages`), not of the lists
    value_stages: int = 1

    @property
    def nominal(self) -> dict[str, Any]:
        return super().nominal | {"pages": self.pages and NOMINAL_LENGTH // self.block}

    @cached_property
    def tile(self) -> Tile:
        return Tile(self.group, slab_width(self.D, self.Dv, self.block))

    @cached_property
    def overlap_pv(self) -> bool:
        """Whether forward computes P V of a block during the work on the next block."""
        return overlap_pv(self.D, self.Dv, self.block)

    @property
    def sizes(self) -> dict[str, int]:
        found = {"T": self.T, "tiles": self.tiles}
        return found | ({"pages": self.pages} if self.pages else {})

    def keys(self, width: int) -> Array:
        return Array((1 if self.pages else self.B, self.S, self.Hkv, width), self.dtype)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        return self.B * self.Hkv, self.tiles

    @property
    def _inputs(self) -> dict[str, Array]:
        lists, pages = (self.B, self.Hkv, self.tiles), {}
        if self.pages:
            last = self.B, self.block, self.Hkv
            pages = {
                "page_table": int32(self.B * self.pages),
                "lengths": int32(self.B),
                "last_key": Array((*last, self.D), self.dtype),
                "last_value": Array((*last, self.Dv), self.dtype),
            }
        return {
            **self.operands,
            **pages,
            "block_starts": int32(*lists, self.entries),
            "block_members": int32(*lists, self.words, self.entries),
            "block_counts": int32(self.B * self.Hkv * self.tiles, COUNTS),
            "key_end": int32(self.B * self.tiles, ROWS),
        }


def of_blocks(sizes: dict[str, Any], n: int, block: int, **fields: Any) -> SelectedAttention:
    """Return the spec for `n` selection blocks per token.

    The spec counts parts of blocks, since the kernels may split a block. `sizes` has the fields of
    `AttentionSizes`.
    """
    parts = parts_of_block(block, n)
    return SelectedAttention(**sizes, n=n * parts, block=block // parts, parts=parts, **fields)


def overlap_pv(key_width: int, value_width: int, block: int) -> bool:
    """Return whether forward of the selected branch computes P V of a block during the work on the
    next block. With overlap, a thread holds Dv / 2 numbers of the output, block / 2 numbers of S,
    and block / 4 registers of P for each of two blocks. With overlap, a CTA needs one more stage
    for V and one less stage for K.
    """
    return value_width // 2 + block <= FORWARD_REGISTERS and value_width <= key_width


FP8_STAGES = {"key_stages": 2, "value_stages": 2}  # stages of `forward` in e4m3


def forward_stages(key_width: int, value_width: int, block: int) -> dict[str, int]:
    """Return the numbers of stages of keys and of values for `forward`.

    With the returned numbers, three CTAs fit on an SM at D = Dv = 128. A loop that overlaps P V
    releases the stages of K early and the stages of V late.
    """
    if overlap_pv(key_width, value_width, block):
        return {"key_stages": 1, "value_stages": 2}
    return {"key_stages": 2, "value_stages": 1}


def dq_stages(key_width: int, value_width: int, block: int) -> dict[str, int]:
    """Return the numbers of stages of keys and of values for `dq`.

    With (2, 2) stages, two CTAs must fit on an SM. If two CTAs do not fit, there are (2, 1) or (1,
    1) stages. The check for two CTAs ignores the block list, and the check for one CTA includes the
    longest block list. A long list (small G, large n) may leave room for only one CTA.
    """
    row_bytes, stage_bytes = ((key_width + value_width) * 2 * n for n in (ROWS, block))
    if row_bytes + 2 * stage_bytes <= SMEM_HALF:
        return {"key_stages": 2, "value_stages": 2}
    stages = 2 if row_bytes + 2 * stage_bytes <= SMEM_BUDGET - MAX_LIST_BYTES else 1
    return {"key_stages": stages, "value_stages": 1}


@described
def forward(spec: SelectedAttention) -> Kernel:
    """Describe the kernel that computes O = added + gate * softmax(scale Q K^T) V over the selected
    blocks of each token.

    If `gated` is false, the gate is 1. If `added` is false, nothing is added.

    Inputs:
      query: `[B, T, H, D]`.
      key: `[B, S, Hkv, D]`.
      value: `[B, S, Hkv, Dv]`. If keys are in pages, key and value are `[1, S, Hkv, .]`, and these
        inputs follow:
        page_table: int32 `[B * pages]`, the pages of each row.
        lengths: int32 `[B]`, the number of keys of each row.
        last_key: `[B, block, Hkv, D]`, the last page of each row, which has finite numbers after
          the keys of the row.
        last_value: `[B, block, Hkv, Dv]`, the last page of each row, like `last_key`.
      block_starts: int32 `[B, Hkv, tiles, entries]`, the block list of each tile, by first key.
      block_members: int32 `[B, Hkv, tiles, words, entries]`; bit `i % 32` of word `i // 32` is
        set if the tile's token `i` selected the block.
      block_counts: int32 `[B * Hkv * tiles, 6]`, `BlockCounts`. A block needs no mask by key if
        every token that selected the block attends to all keys of the block.
      key_end: int32 `[B * tiles, 64]`, the last key to which each row may attend, + 1.
      gate: float32 `[B, T, H]`, if `gated` is true.
      added: `[B, T, H, Dv]`, if `added` is true.
      key_mean: float32 `[B, Hkv, D]`, for keys in e4m3 (`specs/fp8.py`) if `added` is false.
      gate_0: If `summed` is true, float32 `[B, T, H]`, the gate of the compressed branch.
      gate_1: If `summed` is true, float32 `[B, T, H]`, the gate of the selected branch.
      gate_2: If `summed` is true, float32 `[B, T, H]`, the gate of the sliding branch.
      out_0: If `summed` is true, `[B, T, H, Dv]`, the output of the compressed branch.
      out_2: If `summed` is true, `[B, T, H, Dv]`, the output of the sliding branch.

    Outputs:
      out: `[B, T, H, Dv]`, which includes the array `added`. Rows without keys add 0.
      lse: float32 `[B, T, H]`, the natural log-sum-exp without the gate, -inf for rows without
      keys. In gathered tiles, out and lse cover only the near blocks.
      total: If `summed` is true, `[B, T, H, Dv]`, the `combine.gated_sum` of the three outputs.
    """
    if not spec.summed:
        return attention.forward("selected", spec, spec._inputs)
    out = spec.rows(spec.Dv)
    inputs = {f"gate_{c}": spec.by_head() for c in range(3)} | {"out_0": out, "out_2": out}
    return attention.forward("selected", spec, spec._inputs | inputs, total=out)


@described
def dq(spec: SelectedAttention) -> Kernel:
    """Describe the kernel that computes dQ = added + scale dS K, the gradient of the query of
    `forward`.

    dS = gP * (dP - delta) with dP = dO V^T and gP = +-exp2(scale * log2(e) * Q K^T - shift). The
    shift includes the gate. The arrays shift and delta are in `row_stats`
    (`specs/bwd_preprocess.py`).

    The first inputs are the first seven inputs of the kernel `forward`. The further inputs are:
      do: `[B, T, H, Dv]`, the gradient of the output.
      row_stats: float32 `[B, Hkv, dkv's query tiles, rows, 4]`, the output of `bwd_preprocess`
        for `dkv`. The query tiles of `dkv` (`stats_tile`) may differ from the tiles of this
        kernel.
      added: `[B, T, H, D]`, if `added` is true.

    Output:
      dq: `[B, T, H, D]`, which includes the array `added`. Rows without keys add 0. Gathered tiles
        add only the gradients of their near blocks.
    """
    return attention.dq("selected", spec, spec._inputs)

"""Describes attention of every query to one interval of keys, for the compressed and the sliding
branch.

Token `t` attends to the keys `first_key[t] <= i < key_end[t]`. `first_key` and `key_end` never
decrease along `t`.
Bodies: `mosaic/interval.py`.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described, int32
from kernels_pallas.specs import attention
from kernels_pallas.specs.attention import AttentionSizes
from kernels_pallas.specs.fp8 import GROUP
from kernels_pallas.specs.tile import (
    ROWS,
    SMEM_BYTES,
    SMS,
    Tile,
    cdiv,
    row_stats,
    slab_width,
)

# Numbers of keys per block that the forward pass may use, if no width is above 128. A product
# sums over 16 keys at a time.
BLOCKS = 96, 112, 128
FP8_BLOCKS = 64, 96, 128  # for keys in e4m3, where a product sums over 32 keys at a time
SECOND = "second_"  # prefix of the array names of the second interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntervalAttention(AttentionSizes):
    """Sizes of the problem and of a CTA, and the fused operations."""

    gated: bool = False  # forward multiplies the output by a gate
    added: bool = False  # whether the result is added to an array
    # whether later tokens attend to more keys; their work items then start first
    longest_first: bool = False
    block: int = 128  # keys of a block
    stages: int = 2  # blocks in the ring buffer
    second_keys: int | None = None  # number of keys of the second interval, only for dq
    # dq of two intervals computes only these rows of [B, Hkv], on `sms` SMs. With `before`, dq
    # is written to an existing array, whose other rows are unchanged.
    first_row: int = 0
    end_row: int | None = None
    sms: int = SMS
    before: bool = False

    @property
    def nominal(self) -> dict[str, Any]:
        second = None if self.second_keys is None else NOMINAL_LENGTH
        return super().nominal | {
            "second_keys": second,
            "first_row": 0,
            "end_row": None,
            "sms": SMS,
        }

    @cached_property
    def tile(self) -> Tile:
        return Tile(self.group, slab_width(self.D, self.Dv))

    @cached_property
    def stats_tile(self) -> tuple[int, int]:
        """The numbers of tokens and of rows per tile of the statistics that dq reads."""
        return self.tile.tokens, ROWS

    @cached_property
    def consumers(self) -> int:
        """The number of consumer warpgroups of a CTA. Each consumer has one tile of queries,
        and all consumers read the same keys.
        """
        return consumers(self.D, self.Dv)

    @cached_property
    def registers(self) -> tuple[int, int]:
        """The numbers of registers per thread in a consumer warpgroup and in the producer
        warpgroup.
        """
        if self.consumers == 3:
            return 160, 32
        return (240, 24) if self.D + self.Dv > 256 else (232, 40)

    @cached_property
    def tiles(self) -> int:
        """The number of tiles along the tokens, a multiple of `consumers`."""
        return cdiv(self.T, self.tile.tokens * self.consumers) * self.consumers

    @cached_property
    def rows_of_keys(self) -> int:
        """The number of rows of `[B, Hkv]` that are computed."""
        end = self.B * self.Hkv if self.end_row is None else self.end_row
        return end - self.first_row

    @cached_property
    def work_items(self) -> int:
        """The number of work items. A work item consists of `consumers` adjacent tiles."""
        return self.rows_of_keys * self.tiles // self.consumers

    @property
    def sizes(self) -> dict[str, int]:
        first = {} if self.second_keys is None else {"first_row": self.first_row}
        return {
            "T": self.T,
            "tiles": self.tiles,
            "heads": self.rows_of_keys,
            "work_items": self.work_items,
            "ctas": self.grid[0],
            **first,
        }

    @cached_property
    def grid(self) -> tuple[int, ...]:
        return (min(self.work_items, self.sms),)

    @cached_property
    def intervals(self) -> tuple[str, ...]:
        """The prefix of the array names of each interval."""
        return ("",) if self.second_keys is None else ("", SECOND)

    def has_room(self, *widths: int) -> bool:
        """Return whether tiles of rows of the given widths fit next to the ring buffer in shared
        memory.
        """
        ring = self.stages * self.block * (self.D + self.Dv) * (1 if self.fp8 else 2)
        rows = 2 * self.consumers * ROWS * sum(widths)
        return ring + rows <= SMEM_BYTES - 1024

    @cached_property
    def has_room_for_dq(self) -> bool:
        """Whether shared memory has room for a tile of the result of `dq` in addition to the
        tiles that `dq` reads.
        """
        return self.has_room(self.D, self.Dv, self.D)

    @property
    def _bounds(self) -> dict[str, Array]:
        return dict.fromkeys(("first_key", "key_end"), int32(self.B * self.tiles, ROWS))

    @property
    def _inputs(self) -> dict[str, Array]:
        return {**self.operands, **self._bounds}

    @property
    def _second_inputs(self) -> dict[str, Array]:
        if self.second_keys is None:
            return {}
        second = dataclasses.replace(self, S=self.second_keys, second_keys=None)
        arrays = {"key": second.keys(self.D), "value": second.keys(self.Dv), **self._bounds}
        arrays["row_stats"] = row_stats(self, *self.stats_tile)
        return {SECOND + name: x for name, x in arrays.items()}


def consumers(key_width: int, value_width: int) -> int:
    """Return the number of consumers (`IntervalAttention.consumers`). If heads are narrow and need
    few registers, there are three consumers, so that more warps hide the latency of a block's
    steps.
    """
    return 3 if max(key_width, value_width) <= 64 else 2


def forward_blocks(
    group: int, key_width: int, value_width: int, window: int | None, fp8: bool = False
) -> dict[str, int]:
    """Return the number of keys per block and of stages of the ring buffer.

    Args:
      group: Query heads per key/value head.
      key_width: D, the width of keys.
      value_width: Dv, the width of values.
      window: Maximum number of keys per query. `window=None` means no maximum, so that a query has
        many blocks.
      fp8: Whether keys and values are in e4m3.
    """
    if max(key_width, value_width) > 192:
        return {"block": 64, "stages": 2}
    sharing = consumers(key_width, value_width)
    if window is None:  # larger blocks are slower with three warpgroups
        return {"block": max(BLOCKS) if sharing == 2 else min(BLOCKS), "stages": 2}
    if max(key_width, value_width) > 128:  # larger blocks spill registers if an array is added
        return {"block": 64, "stages": 3}
    tokens = Tile(group, slab_width(key_width, value_width)).tokens
    keys = window + tokens * sharing - 1
    # Of the possible sizes, those whose blocks together have the fewest keys, and among these
    # the largest size.
    if fp8:
        keys += GROUP - 1
        blocks = min(FP8_BLOCKS, key=lambda size: (cdiv(keys, size) * size, -size))
        return {"block": blocks, "stages": 2}
    # Of the possible sizes, those with the fewest blocks per work item, and among these the
    # smallest size.
    return {"block": min(BLOCKS, key=lambda size: (cdiv(keys, size), size)), "stages": 2}


def dq_blocks(key_width: int, value_width: int) -> dict[str, int]:
    """Return the number of keys per block and of stages of the ring buffer for `dq`."""
    width = key_width + value_width
    return {"block": 64, "stages": 3 if width <= 256 else 2 if width <= 384 else 1}


@described
def forward(spec: IntervalAttention) -> Kernel:
    """Describe the kernel that computes O = added + gate * softmax(scale Q K^T) V over the keys
    to which each query attends.

    If `gated` is false, the gate is 1. If `added` is false, nothing is added.

    Inputs:
      query: `[B, T, H, D]`.
      key: `[B, S, Hkv, D]`.
      value: `[B, S, Hkv, Dv]`.
      first_key: int32 `[B * tiles, 64]`, the first key of each row of a tile.
      key_end: int32 `[B * tiles, 64]`, the end of the keys of each row of a tile.
      gate: float32 `[B, T, H]`, if `gated` is true.
      added: `[B, T, H, Dv]`, if `added` is true.
      key_mean: float32 `[B, Hkv, D]`, for keys in e4m3 (`specs/fp8.py`) if `added` is false.

    Outputs:
      out: `[B, T, H, Dv]`, which includes the array `added`. Rows without keys add 0.
      lse: float32 `[B, T, H]`, the natural log-sum-exp without the gate, -inf if a row has no
        keys.
    """
    return attention.forward("interval", spec, spec._inputs)


@described
def dq(spec: IntervalAttention) -> Kernel:
    """Describe the kernel that computes dQ = added + scale dS K with dS = gP * (dP - delta), the
    gradient of the query of `forward`.

    With `second_keys` the gradient of a second interval is added. The second interval has its
    own keys, values, bounds and statistics. The sum over each interval is rounded, as if a
    separate kernel computed each sum. With `first_row` and `end_row`, only the rows `first_row
    .. end_row - 1` of an existing array are written.

    The first inputs are the first five inputs of the kernel `forward`. With `second_keys`, the
    keys, values, bounds and `row_stats` of the second interval come next. The further inputs are:
      do: `[B, T, H, Dv]`, the gradient of the output.
      row_stats: float32, the output of `bwd_preprocess` in tiles of `spec.tile.tokens` tokens, 64
        rows.
      added: `[B, T, H, D]`, if `added` is true. If `before` is true, the last input is the array
        `before`, to which dq is written, instead of `added`.

    Output:
      dq: `[B, T, H, D]`, which includes the array `added`.
    """
    inputs = spec._inputs | spec._second_inputs
    return attention.dq("interval", spec, inputs, spec.before)

"""Blocks of keys and of values in shared memory, each kind in a ring buffer of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.mosaic.operands import Buffers
from kernels_pallas.specs.fp8 import GROUP
from kernels_pallas.specs.tile import Tile, slab_width


@dataclasses.dataclass(frozen=True)
class Ring:
    """Blocks of `rows` rows and `width` columns.

    Attributes:
      buffers: make and multiply them.
      by_column: whether a row is a column of values, and a column a pair of keys.
    """

    buffers: Buffers
    rows: int
    width: int
    by_column: bool = False

    def scratch(self, stages: int):
        """Of the ring."""
        return self.buffers.ring(stages, self.rows, self.width)

    @property
    def copies(self) -> int:
        """Of a block."""
        return self.width // self.buffers.slab

    @property
    def bytes(self) -> int:
        """Of a block."""
        return self.rows * self.width * self.buffers.dtype.itemsize

    def load(self, array, b, kv_head, first, ref, stage, barrier) -> None:
        """Starts copies of the block of `array` whose first key is `first`, by columns a multiple
        of `GROUP`.
        """

        def by_token(columns):
            return array.at[b, pl.ds(first, self.rows), kv_head, columns]

        def by_column(columns):
            pair = lax.div(first, jnp.int32(2)) + columns.start
            if not self.buffers.interpret:
                pair = pl.multiple_of(pair, GROUP // 2)
            return array.at[b, kv_head, pl.ds(0, self.rows), pl.ds(pair, columns.size)]

        source: Callable[[Any], Any] = by_column if self.by_column else by_token
        self.buffers.load_keys(source, ref, stage, barrier)


def rings(spec: Any) -> tuple[Ring, Ring]:
    """Of the keys and the values that a kernel reads; `spec`: an `AttentionSizes` with `tile` and
    `block`.
    """
    interpret = bool(spec.interpret)
    if not spec.fp8:
        buffers = Buffers(jnp.dtype(spec.dtype), spec.tile, interpret)
        return Ring(buffers, spec.block, spec.D), Ring(buffers, spec.block, spec.Dv)
    keys, values = (
        Buffers(jnp.dtype(jnp.int16), Tile(spec.tile.group, slab_width(pairs)), interpret)
        for pairs in (spec.D // 2, spec.block // 2)
    )
    return (
        Ring(keys, spec.block, spec.D // 2),
        Ring(values, spec.Dv, spec.block // 2, by_column=True),
    )

"""Matrix operands in shared memory: one buffer, seen as the copy engine and as wgmma see it.

A tile has up to 64 rows: `64 // G` tokens times the `G` query heads of one key/value head, row
`token * G + head`, so no row is wasted on padding heads. Columns stand in slabs of 64 (of 32
where a width is no multiple of 64), each slab one swizzled TMA box. A box `[tokens, G, width]`
lies in memory exactly as the `[64, width]` operand that wgmma reads: a `RefUnion` gives both
views. Boxes may start at any token or key, and what lies outside the array reads as zero and
is not written, so no array is ever padded.

Interpret mode has no such aliases: there each operand is only its box, and products are plain
`jnp.dot` in float32.
"""

import dataclasses
import functools
import math

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

LOG2E = math.log2(math.e)
ROWS = 64  # the M of every wgmma
MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
SMEM_BYTES = 227 * 1024
REGISTERS = 65536

PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)

MASKED = -1e30  # logit of a key that a row must not see
EMPTY = -1e20  # no row that sees a key has a maximum below this


@dataclasses.dataclass(frozen=True)
class Tile:
    """How queries are cut: `tokens` tokens x `group` heads in `rows` rows, slabs of `slab`."""

    group: int
    slab: int
    rows: int = ROWS

    @property
    def tokens(self) -> int:
        tokens = self.rows // self.group
        # A copy moves a multiple of 128 bytes.
        return tokens - (tokens * self.group * self.slab * 2 % 128 != 0)

    @property
    def used(self) -> int:
        """Rows that stand for a query head."""
        return self.tokens * self.group


def slab_width(*widths: int) -> int:
    """Columns of a slab: all `widths`, which are multiples of 16, are multiples of it."""
    return next(slab for slab in (64, 32, 16) if not any(width % slab for width in widths))


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Makes shared-memory operands and multiplies them; `interpret` as in `plgpu.kernel`."""

    dtype: jnp.dtype
    tile: Tile
    interpret: bool = False

    @property
    def slab(self) -> int:
        return self.tile.slab

    @property
    def _matrix_transforms(self):
        swizzle = plgpu.SwizzleTransform(2 * self.slab)
        return plgpu.TilingTransform((8, self.slab)), swizzle

    def _two_views(self, shape: tuple[int, ...]):
        tiling, swizzle = self._matrix_transforms
        return plgpu.RefUnion(
            plgpu.SMEM(shape, self.dtype, transforms=(tiling, swizzle)),
            plgpu.SMEM(shape, self.dtype, transforms=(swizzle,)),
        )

    def rows(self, copies: int, width: int):
        """Scratch of `copies` tiles of query rows, `[64, width]` each."""
        slabs = width // self.slab
        if self.interpret:
            shape = (copies, slabs, self.tile.tokens, self.tile.group, self.slab)
            return plgpu.SMEM(shape, self.dtype)
        return self._two_views((copies, slabs, self.tile.rows, self.slab))

    def ring(self, stages: int, keys: int, width: int):
        """Scratch of `stages` blocks of `keys` keys, `[keys, width]` each."""
        shape = (stages, width // self.slab, keys, self.slab)
        return plgpu.SMEM(shape, self.dtype) if self.interpret else self._two_views(shape)

    def _slabs(self, ref) -> int:
        return (ref if self.interpret else ref[0]).shape[1]

    def _row_box(self, ref, copy, i):
        if self.interpret:
            return ref.at[copy, i]
        box = ref[1].at[copy, i, pl.ds(0, self.tile.used)]
        return box.reshape(self.tile.tokens, self.tile.group, self.slab)

    def load_rows(self, source, ref, copy, width, barrier):
        """Starts copies of `source(columns)`, a `[tokens, G, slab]` slice, one a slab."""
        for i in range(width // self.slab):
            columns = pl.ds(i * self.slab, self.slab)
            plgpu.copy_gmem_to_smem(source(columns), self._row_box(ref, copy, i), barrier)

    def store_rows(self, ref, copy, width, target):
        """Starts copies to `target(columns)`, one a slab."""
        for i in range(width // self.slab):
            columns = pl.ds(i * self.slab, self.slab)
            plgpu.copy_smem_to_gmem(self._row_box(ref, copy, i), target(columns))

    def load_keys(self, source, ring, slot, barrier):
        """Starts copies of `source(columns)`, a `[keys, slab]` slice, one a slab."""
        box = ring if self.interpret else ring[1]
        for i in range(self._slabs(ring)):
            columns = pl.ds(i * self.slab, self.slab)
            plgpu.copy_gmem_to_smem(source(columns), box.at[slot, i], barrier)

    def read_rows(self, ref, copy, width) -> list:
        """Query rows in registers, `[64, slab]` each."""
        slabs = range(width // self.slab)
        if not self.interpret:
            return [plgpu.load(ref[0].at[copy, i], layout=MATRIX) for i in slabs]
        padding = ((0, self.tile.rows - self.tile.used), (0, 0))
        boxes = [ref[copy, i].reshape(self.tile.used, self.slab) for i in slabs]
        return [jnp.pad(box, padding) for box in boxes]

    def write_rows(self, ref, copy, value, added=None):
        """Puts float32 registers `[64, width]`, plus slabs if given, where copies read them."""
        for i in range(value.shape[1] // self.slab):
            part = value[:, i * self.slab : (i + 1) * self.slab]
            if added is not None:
                part += added[i].astype(jnp.float32)
            part = part.astype(self.dtype)
            if self.interpret:
                box = part[: self.tile.used]
                ref[copy, i] = box.reshape(self.tile.tokens, self.tile.group, self.slab)
            else:
                ref[0].at[copy, i][...] = part

    def _keys(self, ring, slot):
        block = jnp.swapaxes(ring[slot].astype(jnp.float32), 0, 1)
        return block.reshape(block.shape[0], -1)

    def key_query(self, ring, slot, query, meanwhile):
        """`[64, rows]` logits of a slot of 64 keys, transposed, and what `meanwhile` returns,
        which runs beside the product; `query`: `(ref, copy)`.
        """
        slabs = self._slabs(ring)
        ref, copy = query
        if self.interpret:
            rows = jnp.concatenate(self.read_rows(ref, copy, slabs * self.slab), axis=1)
            logits = jnp.dot(self._keys(ring, slot), rows.astype(jnp.float32).T)
            plgpu.commit_smem()
            return logits, meanwhile()

        def product(acc):
            for i in range(slabs):
                rows = ref[0].at[copy, i].transpose((1, 0))
                plgpu.wgmma(acc, ring[0].at[slot, i], rows)
            found = meanwhile()
            return acc[...], found

        return pl.run_scoped(product, plgpu.ACC((ROWS, ref[0].shape[2]), jnp.float32))

    def query_key(self, query, ring, slot):
        """`[64, keys]` logits; `query`: `(ref, copy)`."""
        slabs = self._slabs(ring)
        ref, copy = query
        if self.interpret:
            rows = jnp.concatenate(self.read_rows(ref, copy, slabs * self.slab), axis=1)
            logits = jnp.dot(rows.astype(jnp.float32), self._keys(ring, slot).T)
            plgpu.commit_smem()  # else the race detector takes these reads for later ones
            return logits

        def product(acc):
            for i in range(slabs):
                keys = ring[0].at[slot, i].transpose((1, 0))
                plgpu.wgmma(acc, ref[0].at[copy, i], keys)
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, ring[0].shape[2]), jnp.float32))

    def add_weighted(self, acc, probs, ring, slot):
        """`acc + probs @ values` of a slot."""
        if self.interpret:
            acc = acc + jnp.dot(probs.astype(jnp.float32), self._keys(ring, slot))
            plgpu.commit_smem()
            return acc

        @plgpu.inline_mgpu(
            arg_types=(MATRIX, MATRIX, plgpu.RefType(self._matrix_transforms)),
            return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=MATRIX),
        )
        def product(_, total, probs, values):
            # `plgpu.wgmma` would take the slabs one by one, as narrow products. Tiles may lie
            # anywhere: [slabs, keys / 8, 1, 8, slab] becomes [keys / 8, slabs, 8, slab].
            values = mgpu.memref_slice(values, (slice(None), slice(None), 0))
            values = mgpu.memref_transpose(values, (1, 0, 2, 3))
            total = mgpu.WGMMAAccumulator.from_registers(total)
            total = mgpu.wgmma(total, probs, values, swizzle=2 * self.slab)
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(0)
            return mgpu.optimization_barrier(total.value)

        return product(acc, probs, ring[0].at[slot])


def across(row, shape):
    """A value per row, repeated along the columns."""
    return lax.broadcast_in_dim(row, shape, [0])


def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@functools.cache
def check_registers(*warpgroups: int) -> None:
    """Raises unless warpgroups may hold these registers a thread.

    `setmaxnreg` waits for registers that never come when the pool is too small: the GPU hangs
    instead of failing. The pool is what the launch allocated, `warpgroups` times the largest
    multiple of 8 that fits.
    """
    threads = 128 * len(warpgroups)
    pool = min(REGISTERS // threads // 8 * 8, 255 // 8 * 8) * len(warpgroups)
    if sum(warpgroups) > pool or any(
        count % 8 or not 24 <= count <= 240 for count in warpgroups
    ):
        raise ValueError(f"{warpgroups=} registers a thread do not fit a pool of {pool}")

"""Manages matrix operands in shared memory.

An operand has one view for TMA copies and another view of the same memory for wgmma.

A tile of query rows has up to 64 rows, for `64 // G` tokens and the `G` query heads of one
key/value head. Row `token * G + head` is one head of a token, so padding heads have no rows.
Columns are stored in slabs of 64, or of 32 or 16 if a width is not a multiple of 64. Each slab is
one swizzled TMA box. A box `[tokens, G, width]` has the same memory layout as the `[64, width]`
operand that wgmma reads. Mosaic's `RefUnion` gives the memory of an operand two views. Boxes may
start at any token or key. TMA reads elements outside the array as zero and never writes them, so
arrays need no padding.

In interpret mode, operands have only the view for copies, and products are plain `jnp.dot` in
float32.
"""

import functools
from typing import Any, NamedTuple, Self

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from kernels_pallas.mosaic import fp8, warp, wgmma
from kernels_pallas.specs.tile import (  # noqa: F401
    LOG2E,
    ROW_STATS,
    ROW_STATS_MIN_ROWS,
    ROWS,
    SMEM_BYTES,
    Tile,
    slab_width,
)

MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
REGISTERS = 65536

PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)


def matrix_type(shape, dtype=jnp.float32):
    """Return the type of an array in registers that has the layout of a product's result."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=MATRIX)


def load(ref, layout):
    """Load an array from memory into registers, element by element."""
    return plgpu.load(ref, layout=layout, optimized=False)


def barriers(arrivals: int, count: int = 1):
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def drain(interpret, stages: int, phases, *waits) -> None:
    """Wait for the last phases of the barriers of ring buffers, since the interpreter requires
    a wait for every completed phase. Each function in `waits` waits for a phase.
    """
    if interpret:

        def wait(i, _):
            for each in waits:
                each(i)

        lax.fori_loop(jnp.maximum(phases - stages, 0), phases, wait, None)


class Buffers(NamedTuple):
    """Allocates operands in shared memory, and starts products of operands.

    `interpret` is the argument of `plgpu.kernel`.
    """

    dtype: jnp.dtype
    tile: Tile
    interpret: Any = False

    @classmethod
    def of(cls, spec: Any, tile: Tile, dtype: str | None = None) -> Self:
        """Return the buffers of a kernel, given its spec."""
        return cls(jnp.dtype(dtype or spec.dtype), tile, spec.interpret)

    @property
    def slab(self) -> int:
        return self.tile.slab

    @property
    def is_fp8(self) -> bool:
        """Whether a column is a pair of numbers in e4m3 (`fp8.py`)."""
        return self.dtype == jnp.int16

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

    def rows(self, copies: int, width: int, tiles: int = 1):
        """Return the scratch type of `copies` operands of query rows. An operand has `tiles`
        consecutive tiles, and padding rows up to a multiple of 64.
        """
        slabs = width // self.slab
        if self.interpret:
            shape = (copies, slabs, tiles, self.tile.tokens, self.tile.group, self.slab)
            return plgpu.SMEM(shape, self.dtype)
        rows = -(-tiles * self.tile.rows // ROWS) * ROWS
        return self._two_views((copies, slabs, rows, self.slab))

    def ring(self, stages: int, keys: int, width: int):
        """Return the scratch type of `stages` blocks of `keys` keys, `[keys, width]` each."""
        shape = (stages, width // self.slab, keys, self.slab)
        return plgpu.SMEM(shape, self.dtype) if self.interpret else self._two_views(shape)

    def _slabs(self, ref) -> int:
        return (ref if self.interpret else ref[0]).shape[1]

    def _row_boxes(self, ref, copy, width, tile):
        """Return the columns and the box of each slab of query rows."""
        for i in range(width // self.slab):
            if self.interpret:
                box = ref.at[copy, i, tile]
            else:
                box = ref[1].at[copy, i, pl.ds(tile * self.tile.rows, self.tile.used)]
                box = box.reshape(self.tile.tokens, self.tile.group, self.slab)
            yield pl.ds(i * self.slab, self.slab), box

    def load_rows(self, source, ref, copy, width, barrier, tile=0):
        """Start copies of `source(columns)`, a `[tokens, G, slab]` slice, one per slab."""
        for columns, box in self._row_boxes(ref, copy, width, tile):
            plgpu.copy_gmem_to_smem(source(columns), box, barrier)

    def store_rows(self, ref, copy, width, target, tile=0):
        """Start copies to `target(columns)`, one per slab."""
        for columns, box in self._row_boxes(ref, copy, width, tile):
            plgpu.copy_smem_to_gmem(box, target(columns))

    def clear_rows(self, ref, tiles: int):
        """If some rows are padding, set all rows to zero, since copies never write padding
        rows.
        """
        if self.interpret or tiles * self.tile.used == ref[0].shape[2]:
            return
        copies, slabs, rows, slab = ref[0].shape
        zeros = full((rows, slab), 0.0, MATRIX).astype(self.dtype)
        for copy in range(copies):
            for i in range(slabs):
                ref[0].at[copy, i][...] = zeros

    def _key_boxes(self, ring, stage):
        """Return the columns and the box of each slab of a stage."""
        box = ring if self.interpret else ring[1]
        for i in range(self._slabs(ring)):
            yield pl.ds(i * self.slab, self.slab), box.at[stage, i]

    def load_keys(self, source, ring, stage, barrier):
        """Start copies of `source(columns)`, a `[keys, slab]` slice, one per slab."""
        for columns, box in self._key_boxes(ring, stage):
            plgpu.copy_gmem_to_smem(source(columns), box, barrier)

    def store_keys(self, ring, stage, target):
        """Start copies to `target(columns)`, a `[keys, slab]` slice, one per slab."""
        for columns, box in self._key_boxes(ring, stage):
            plgpu.copy_smem_to_gmem(box, target(columns))

    def write_keys(self, ring, stage, value):
        """Write float32 registers `[keys, width]` to shared memory.

        `store_keys` copies the keys from shared memory.
        """
        ref = ring if self.interpret else ring[0]
        for i in range(self._slabs(ring)):
            part = value[:, i * self.slab : (i + 1) * self.slab]
            ref.at[stage, i][...] = part.astype(self.dtype)

    def read_keys(self, ring, stage, i):
        """Load slab `i` of a stage into registers, as float32."""
        ref = ring.at[stage, i] if self.interpret else ring[0].at[stage, i]
        return plgpu.load(ref, layout=MATRIX).astype(jnp.float32)

    def read_rows(self, ref, copy, width) -> list:
        """Load query rows into registers, one `[64, slab]` per slab."""
        return [self.read_slab(ref, copy, i) for i in range(width // self.slab)]

    def read_slab(self, ref, copy, i):
        """Load slab `i` of query rows into registers, `[64, slab]`."""
        if not self.interpret:
            return plgpu.load(ref[0].at[copy, i], layout=MATRIX)
        padding = ((0, 0), (0, self.tile.rows - self.tile.used), (0, 0))
        box = ref[copy, i].reshape(-1, self.tile.used, self.slab)
        box = jnp.pad(box, padding).reshape(-1, self.slab)
        return jnp.pad(box, ((0, -box.shape[0] % ROWS), (0, 0)))

    def write_rows(self, ref, copy, value, added=None):
        """Add optional slabs to float32 registers `[64, width]`, and write the sum to shared
        memory.
        """
        for i in range(value.shape[1] // self.slab):
            part = value[:, i * self.slab : (i + 1) * self.slab]
            if added is not None:
                part += added[i].astype(jnp.float32)
            self.write_slab(ref, copy, i, part)

    def write_slab(self, ref, copy, i, part):
        """Write float32 registers `[64, slab]` to slab `i` in shared memory."""
        part = part.astype(self.dtype)
        if not self.interpret:
            ref[0].at[copy, i][...] = part
            return
        tile = self.tile
        for t in range(ref.shape[2]):
            box = part[t * tile.rows : t * tile.rows + tile.used]
            ref[copy, i, t] = box.reshape(tile.tokens, tile.group, self.slab)

    def _matrix(self, ref, copy):
        """Return an operand as one float32 array (interpret mode)."""
        if len(ref.shape) > 4:
            parts = self.read_rows(ref, copy, self._slabs(ref) * self.slab)
        else:
            parts = [ref[copy, i] for i in range(self._slabs(ref))]
        matrix = jnp.concatenate(parts, axis=1)
        return fp8.numbers(matrix) if self.is_fp8 else matrix.astype(jnp.float32)

    @property
    def _matrix_ref(self):
        return plgpu.RefType(self._matrix_transforms)

    def in_registers(self, ref, copy):
        """Return an operand `[64, width]` in registers, for products that read it as the left
        operand.
        """
        if self.interpret:
            return self._matrix(ref, copy)
        slabs = range(self._slabs(ref))
        parts = [plgpu.load(ref[0].at[copy, i], layout=MATRIX) for i in slabs]
        return side_by_side(parts, interpret=False)

    def start_product(self, left, right, some=None):
        """Start `left @ right.T` of operands `(ref, copy)`.

        The left operand may be in registers. The product sums over the columns of the narrower
        operand. The result is pending until the method `finish` returns the result. No iteration of
        a loop may begin while a result is pending (`wgmma.py`).

        `some` selects the rows of the right operand that are used, by the first row and the number
        of rows. If `some` is None, all rows are used.
        """
        registers = not isinstance(left, tuple)
        if self.interpret:
            left = left if registers else self._matrix(*left)
            left = fp8.numbers(left) if registers and self.is_fp8 else left
            right = self._rows(right, some)
            width = min(left.shape[1], right.shape[1])
            result = jnp.dot(left[:, :width], right[:, :width].T)
            plgpu.commit_smem()  # otherwise the race detector attributes the reads to later code
            return result
        right, copy = right
        shape = ROWS, right[0].shape[2] if some is None else some[1]

        @plgpu.inline_mgpu(
            arg_types=(MATRIX if registers else self._matrix_ref, self._matrix_ref),
            return_type=matrix_type(shape),
        )
        def start(_, left, right):
            wgmma.fence()
            left = wgmma.registers(left) if registers else wgmma.Operand(left)
            return wgmma.array(wgmma.product(left, wgmma.Operand(right, some=some)))

        return start(left if registers else left[0][0].at[left[1]], right[0].at[copy])

    def _rows(self, operand, some):
        """Return the rows of an operand `(ref, copy)` that are used (interpret mode)."""
        matrix = self._matrix(*operand)
        return matrix if some is None else matrix[some[0] : sum(some)]

    def start_sum(self, total, left, right, some=None):
        """Start `total + left @ right` of registers and an operand `(ref, copy)`. For operands
        in e4m3 the sum is `total + left @ right.T`. As in `start_product`, the result is pending
        until the method `finish` returns the result.
        """
        if self.interpret:
            if self.is_fp8:
                result = total + jnp.dot(fp8.numbers(left), self._matrix(*right).T)
            else:
                result = total + jnp.dot(left.astype(jnp.float32), self._rows(right, some))
            plgpu.commit_smem()
            return result
        right, copy = right

        @plgpu.inline_mgpu(
            arg_types=(MATRIX, MATRIX, self._matrix_ref),
            return_type=matrix_type(total.shape),
        )
        def start(_, total, left, right):
            total, left = wgmma.fence(wgmma.registers(total), wgmma.registers(left))
            right = wgmma.Operand(right, transposed=not self.is_fp8, some=some)
            return wgmma.array(wgmma.added(total, left, right))

        return start(total, left, right[0].at[copy])

    def finish(self, *sums, running: int = 0) -> list:
        """Wait for pending products and return their results in registers. The `running` newest
        products may remain pending.
        """
        if self.interpret:
            return list(sums)
        shapes = [matrix_type(x.shape) for x in sums]

        def wait(*sums):
            done = wgmma.wait(running, *map(wgmma.registers, sums))
            return [wgmma.array(values) for values in done]

        return warp.each(wait, [], [], sums, MATRIX, result=shapes)

    def products(self, *pairs, meanwhile=lambda: None) -> Any:
        """Return `left @ right.T` of each pair of operands `(ref, copy)`, and then the result of
        `meanwhile`. The products and `meanwhile` run in parallel. Each product sums over the
        columns of the narrower operand. If operands are at constant addresses, the products of
        Mosaic (`plgpu.wgmma`) are faster, since the compiler keeps the descriptors. With
        `start_product`, kernels with operands at constant addresses are up to 11 % slower
        (docs/kernels/gathered.md).
        """
        if self.interpret:
            return *(self.start_product(*pair) for pair in pairs), meanwhile()

        def run(*accumulators):
            for acc, ((left, i), (right, j)) in zip(accumulators, pairs, strict=True):
                for slab in range(min(self._slabs(left), self._slabs(right))):
                    operand = right[0].at[j, slab].transpose((1, 0))
                    plgpu.wgmma(acc, left[0].at[i, slab], operand)
            result = meanwhile()
            return *(acc[...] for acc in accumulators), result

        shapes = [(left[0].shape[2], right[0].shape[2]) for (left, _), (right, _) in pairs]
        return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def add_product(self, total, left, right):
        """Compute `total + left @ right` from registers and an operand `(ref, copy)`, without
        overlap.
        """
        if self.interpret:
            return self.start_sum(total, left, right)
        right, copy = right

        @plgpu.inline_mgpu(
            arg_types=(MATRIX, MATRIX, self._matrix_ref),
            return_type=matrix_type(total.shape, total.dtype),
        )
        def product(_, total, left, right):
            # `plgpu.wgmma` would multiply the slabs one by one, as narrow products.
            # `mgpu.wgmma` accepts tiles with any strides, so all slabs become one operand:
            # [slabs, keys / 8, 1, 8, slab] becomes [keys / 8, slabs, 8, slab].
            right = mgpu.memref_slice(right, (slice(None), slice(None), 0))
            right = mgpu.memref_transpose(right, (1, 0, 2, 3))
            total = mgpu.WGMMAAccumulator.from_registers(total)
            total = mgpu.wgmma(total, left, right, swizzle=2 * self.slab)
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(0)
            return mgpu.optimization_barrier(total.value)

        return product(total, left, right[0].at[copy])


def column_stats(ref, start: int, interpret, group: int = 0):
    """Return shift, delta, first_key and key_end of eight columns, `[8]` each. The columns are
    query rows of a transposed product.

    Args:
      ref: float32 `[columns, 4]` in shared memory.
      start: First of the eight columns.
      interpret: Whether kernels are interpreted.
      group: If not 0, `ref` is `[tokens * ROW_STATS_MIN_ROWS, 4]`, and the first `group` rows
        of each token are used. Queries in columns after the last token attend to no keys.
    """
    columns = 8
    if interpret:
        stats = ref[...]
        if group:
            stats = stats.reshape(-1, ROW_STATS_MIN_ROWS, ROW_STATS)[:, :group]
            stats = stats.reshape(-1, ROW_STATS)
            nothing = jnp.where(jnp.arange(ROW_STATS) == 0, jnp.inf, 0.0)
            nothing = jnp.broadcast_to(nothing, (columns, ROW_STATS)).astype(stats.dtype)
            stats = jnp.concatenate([stats, nothing])
        return [stats[start : start + columns, i] for i in range(ROW_STATS)]
    column = plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=PER_COLUMN)
    used = ref.shape[0] // ROW_STATS_MIN_ROWS * group if group else ref.shape[0]

    def load(ref):
        layout, shape = PER_COLUMN.to_mgpu(), (columns,)
        row_type, pair_type = (
            ir.VectorType.get((n,), ir.F32Type.get()) for n in (ROW_STATS, 2)
        )
        nothing = ir.DenseElementsAttr.get(
            np.array([np.inf, 0, 0, 0], np.float32), type=row_type
        )
        nothing = arith.constant(row_type, nothing)
        registers = [np.empty(layout.registers_shape(shape), object) for _ in range(ROW_STATS)]
        indices = list(np.ndindex(registers[0].shape))
        for index, (first,) in zip(indices, layout.thread_idxs(shape), strict=True):
            # A register holds two neighbouring columns. One load has all statistics of one
            # column.
            rows = []
            for i in range(2):
                at = column = arith.addi(first, _index(start + i))
                if start + columns > used:
                    at = arith.minui(at, _index(used - 1))
                if group:
                    token = arith.divui(at, _index(group))
                    unused = arith.muli(token, _index(ROW_STATS_MIN_ROWS - group))
                    at = arith.addi(at, unused)
                pointer = mgpu_utils.memref_ptr(mgpu.memref_slice(ref, at))
                row = llvm.load(row_type, pointer)
                if start + columns > used:
                    exists = arith.cmpi(arith.CmpIPredicate.ult, column, _index(used))
                    row = arith.select(exists, row, nothing)
                rows.append(row)
            for k in range(ROW_STATS):
                pair = llvm.mlir_undef(pair_type)
                for i, row in enumerate(rows):
                    value = llvm.extractelement(row, wgmma.number(k))
                    pair = llvm.insertelement(pair, value, wgmma.number(i))
                registers[k][index] = pair
        return [wgmma.fragments(x, layout) for x in registers]

    return warp.each(load, [ref], [], result=[column] * ROW_STATS)


def by_column(ref, shape, interpret):
    """Broadcast float32 `[columns]` in global memory to `[64, columns]`."""
    if interpret:
        return lax.broadcast_in_dim(ref[...], shape, [1])
    column = plgpu.ShapeDtypeStruct(shape[1:], jnp.float32, layout=PER_COLUMN)

    def load(ref):
        layout = PER_COLUMN.to_mgpu()
        registers = np.empty(layout.registers_shape(shape[1:]), object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        indices = list(np.ndindex(registers.shape))
        first = None
        for i, (index, (column,)) in enumerate(
            zip(indices, layout.thread_idxs(shape[1:]), strict=True)
        ):
            if first is None:  # further registers are at multiples of eight columns
                first = mgpu_utils.memref_ptr(mgpu.memref_slice(ref, column))
            i8 = ir.IntegerType.get_signless(8)
            pointer = llvm.getelementptr(first.type, first, [], [32 * i], i8, 0)
            registers[index] = llvm.load(pair, pointer)
        return wgmma.fragments(registers, layout)

    return lax.broadcast_in_dim(warp.each(load, [ref], [], result=column), shape, [1])


def side_by_side(parts, interpret):
    """Join matrices `[64, columns]` side by side."""
    if interpret:
        return jnp.concatenate(parts, axis=1)
    shape = parts[0].shape[0], sum(part.shape[1] for part in parts)
    result = matrix_type(shape, parts[0].dtype)

    def join(*parts):
        layout = MATRIX.to_mgpu()
        registers = np.concatenate([part.registers for part in parts], axis=1)
        assert registers.shape == layout.registers_shape(shape)
        return wgmma.fragments(registers, layout, parts[0].is_signed)

    return warp.each(join, [], [], parts, MATRIX, result=result)


def with_sign_bit(x, shift, interpret):
    """Return non-negative `x` with the last bit of `shift` as its sign bit. `x` and `shift` are
    float32 arrays of the same shape.
    """
    if interpret:
        bits, sign = (lax.bitcast_convert_type(y, jnp.uint32) for y in (x, shift))
        return lax.bitcast_convert_type(bits | sign << 31, jnp.float32)

    def join(x, shift):
        registers = np.empty_like(x.registers)
        for i in np.ndindex(registers.shape):
            vector = x.registers[i].type
            kind = ir.VectorType.get(ir.VectorType(vector).shape, wgmma.i32())
            bits, sign = (arith.bitcast(kind, y.registers[i]) for y in (x, shift))
            place = ir.IntegerAttr.get(wgmma.i32(), 31)
            places = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, place))
            registers[i] = arith.bitcast(vector, arith.ori(bits, arith.shli(sign, places)))
        return wgmma.fragments(registers, x.layout)

    return warp.each(join, [], [], [x, shift], MATRIX, result=matrix_type(x.shape))


def _index(number: int):
    return arith.constant(ir.IndexType.get(), number)


def by_warps(count: int, function, varies: bool) -> None:
    """Call `function(i)` for each `i` below `count`. The four warps share the calls. If `varies` is
    true, every warp makes all calls, since `shard_map` does not allow values that vary along its
    mesh in `warp_map`.
    """
    if varies:
        for i in range(count):
            function(jnp.int32(i))
        return

    @plgpu.warp_map
    def _(warp):
        for i in range(0, count, 4):
            if i + 4 <= count:
                function(i + warp)
            else:
                pl.when(i + warp < count)(functools.partial(function, i + warp))


def div(x, n):
    """Compute `x // n` for a non-negative int32."""
    return lax.div(x, jnp.int32(n))


def rem(x, n):
    """Compute `x % n` for a non-negative int32."""
    return lax.rem(x, jnp.int32(n))


def div_rem(x, n) -> tuple:
    """Compute `divmod(x, n)` for a non-negative int32."""
    return div(x, n), rem(x, n)


def row_index():
    """Return the index of each row."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (ROWS,), 0), PER_ROW)


def across(row, shape):
    """Broadcast one value per row to all columns of `shape`."""
    return lax.broadcast_in_dim(row, shape, [0])


def zeros(width: int):
    """Return an accumulator `[64, width]`."""
    return full((ROWS, width), 0.0, MATRIX)


def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@functools.cache
def check_registers(*warpgroups: int) -> None:
    """Raise ValueError unless the warpgroups of a CTA may have the given numbers of registers per
    thread.

    Warpgroups take registers from the pool that the launch allocated. If the pool is too small,
    `setmaxnreg` waits forever and the GPU hangs. The pool has the same number of registers per
    thread for every warpgroup: the largest multiple of 8 that fits, at most 248.
    """
    threads = 128 * len(warpgroups)
    pool = min(REGISTERS // threads // 8 * 8, 255 // 8 * 8) * len(warpgroups)
    if sum(warpgroups) > pool or any(
        count % 8 or not 24 <= count <= 240 for count in warpgroups
    ):
        raise ValueError(
            f"warpgroups with {warpgroups} registers per thread must fit the pool of {pool}"
        )

"""Scores and the best blocks, query rows x keys: groups of up to 16 heads.

A warpgroup has 64 rows, `64 // heads` tokens, and its queries in registers as the left operand,
so that a product reads keys only: half the shared-memory traffic of both from there. With 16
heads a warp has one token, with fewer 2 or 4: the head sum is an exchange of its lanes, once a
step of `ratio` products, and all that follows is the warp's own (`warp_topk.py`). The warpgroups
share the ring of keys, which they fill in turn. Four of them run on a multiprocessor, at 128
registers a thread, so that others multiply while one makes probabilities.
"""

import functools

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import _wgmma as instructions
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_ROW, ROWS, across
from kernels_pallas.mosaic.scores import Cut, Scores, norms, shapes
from kernels_pallas.mosaic.warp import Word
from kernels_pallas.mosaic.warp_topk import MOST, ScoreLines, entries_in, winners_kept

KEYS = ROWS  # of a product
SMEM_BYTES = 228 * 1024  # of a multiprocessor; the system takes 1 KB a block of threads
# A product's registers after rows 8 apart have been added: 8 rows a warp.
FOLDED = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def cut(spec: Scores) -> Cut:
    """As few chunks as fit in shared memory, then as many stages."""
    heads = max(4, 1 << (spec.group - 1).bit_length())
    # 128 registers a thread are for four warpgroups. Where the compiler needs no limit to stay
    # there, they are two blocks of threads; where it would spill, three have more.
    narrow = spec.D <= 128 and heads == 16 and spec.candidates <= MOST
    large = spec.D > 192 or spec.cover > 2
    blocks, warpgroups = (1, 3) if large else (2, 2) if narrow else (1, 4)
    lines = warpgroups * ROWS // heads
    room = SMEM_BYTES // blocks - 2 * 1024  # the system's, and barriers
    kept = winners_kept(spec.free)
    every = -(-spec.candidates // KEYS) * KEYS

    def chunk(stages):
        words = (room - stages * KEYS * spec.D * 2) // (4 * lines) - kept
        most = min(entries_in(words), MOST)
        if every <= min(most, spec.held):
            return every
        return max(min(most - kept, spec.held) // KEYS * KEYS, KEYS)

    def cost(stages):
        return -(-spec.candidates // chunk(stages)), -stages

    stages = min(range(2, max(spec.stages, 2) + 1), key=cost)
    return Cut(heads, warpgroups * ROWS, lines, chunk(stages), stages)


def best_blocks(spec: Scores) -> Kernel:
    """`scores.best_blocks`, for groups of up to `scores.HEADS`, compiled."""
    tile, r, heads = spec.tile, spec.ratio, spec.cut.heads
    chunk, stages = spec.cut.chunk, spec.cut.stages
    buffers = operands.Buffers(jnp.dtype(spec.dtype), tile)
    lines = ScoreLines(spec)
    warpgroups, tokens = tile.rows // ROWS, ROWS // heads
    supers = chunk // KEYS
    wide = KEYS * r
    c = spec.scale * LOG2E
    whole = r - spec.cover + 1  # phases that the block shares with no other
    sums_shape, sums_layout = (
        ((ROWS // 2, KEYS), FOLDED) if heads == 16 else ((ROWS, KEYS), MATRIX)
    )

    def body(query, key, lse, first, last, own, base, span, out, *scratch):
        key_s, scores_s, winners_s, key_in, key_free = scratch
        wg = lax.axis_index("wg")
        b = lax.div(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        g = lax.rem(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        mine = spec.tiles - 1 - lax.axis_index("tile")  # later tokens have more to do
        begin = base[b, mine, 0]
        end = last[b, mine, tile.rows - 1]
        steps = lax.div(jnp.maximum(end - begin * r, 0) + wide - 1, jnp.int32(wide))
        products = steps * r

        def load(q):
            slot = lax.rem(q, jnp.int32(stages))
            blocks = pl.ds(begin + lax.div(q, jnp.int32(r)) * KEYS, KEYS)
            phase = lax.rem(q, jnp.int32(r))
            buffers.load_keys(
                lambda columns: key.at[b, blocks, phase, g, columns],
                key_s,
                slot,
                key_in.at[slot],
            )

        for q in range(stages):

            @pl.when((jnp.int32(q) < products) & (wg == q % warpgroups))
            def _(q=q):
                load(jnp.int32(q))

        row0 = wg * ROWS
        here = pl.ds(row0, ROWS)

        def rows_of(ref):
            return plgpu.load(ref.at[b, mine, here], layout=PER_ROW, optimized=False)

        first_token = mine * tile.tokens + wg * tokens
        queries = _queries(spec, query, b, g, first_token)
        last_row = rows_of(last)
        first_row = rows_of(first) if spec.packed else None
        first1, last0 = first[b, mine, row0 + ROWS - 1], last[b, mine, row0]
        norm = norms(spec, tokens, lse, b, first_token, g)

        def refill(q):
            """Loads what follows product `q` in its slot, once all are done with it."""
            slot = lax.rem(jnp.maximum(q, 0), jnp.int32(stages))
            turn = lax.rem(slot, jnp.int32(warpgroups)) == wg

            @pl.when((q >= 0) & (q + stages < products) & turn)
            def _():
                plgpu.barrier_wait(key_free.at[slot])
                load(q + stages)

        # With a slot to spare, a warpgroup that refills need not wait for the others.
        lag = 1 if stages >= 3 else 0

        def probabilities(under_mask, i, phase):
            """Of 64 keys of one phase, `[64, 64]`, or folded to `sums_shape`."""
            q = i * r + phase
            slot = lax.rem(q, jnp.int32(stages))
            plgpu.barrier_wait(key_in.at[slot])
            logits = _product(queries, key_s[0].at[slot], tile.slab)
            plgpu.barrier_arrive(key_free.at[slot])
            probs = jnp.exp2(logits * c - across(norm, (ROWS, KEYS)))
            if under_mask:  # a row sees blocks [low, high) of this phase
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=MATRIX)
                edge = begin + i * KEYS
                high = lax.div(last_row + (r - 1 - phase), jnp.int32(r)) - edge
                seen = column < across(high, (ROWS, KEYS))
                if first_row is not None:
                    low = lax.div(first_row + (r - 1 - phase), jnp.int32(r)) - edge
                    seen &= column >= across(low, (ROWS, KEYS))
                probs = jnp.where(seen, probs, 0.0)
            return _fold(probs) if heads == 16 else probs

        def step(under_mask, chunk0, i, nothing):
            """Scores of 64 blocks: their `r` phases."""

            def own_phase(phase, sums):
                sums = sums + probabilities(under_mask, i, phase)
                refill(i * r + phase - lag)
                return sums

            def shared_phase(phase, carry):
                """`r - phase` parts of `cover` are the block's, the rest the next one's."""
                sums, following = carry
                found = probabilities(under_mask, i, phase)
                mine = jnp.asarray(r - phase, jnp.float32)
                sums = sums + found * mine
                more = found * (float(spec.cover) - mine)
                refill(i * r + phase - lag)
                return sums, more if following is None else following + more

            zeros = operands.full(sums_shape, 0.0, sums_layout)
            sums = lax.fori_loop(0, whole, own_phase, zeros) * float(spec.cover)
            following = zeros
            if whole < r:
                # Unrolled, more than one of them would take too many registers.
                carry = shared_phase(whole, (sums, None))
                sums, following = lax.fori_loop(whole + 1, r, shared_phase, carry)
            place = i * KEYS - chunk0
            _each_warp(lines.add, [scores_s], [wg, place], [sums, following])
            return nothing

        def take(k, carry):
            chunk0 = k * chunk
            _each_warp(lines.open, [scores_s], [wg, k])
            start = jnp.minimum(k * supers, steps)
            stop = jnp.minimum(start + supers, steps)
            edge = (begin + start * KEYS) * r
            left = lax.div(jnp.maximum(first1 - edge, 0) + wide - 1, jnp.int32(wide))
            left = jnp.minimum(start + left, stop) if spec.packed else start
            right = lax.div(jnp.maximum(last0 - begin * r, 0), jnp.int32(wide))
            right = jnp.clip(right, left, stop)
            masked, plain = (functools.partial(step, mask, chunk0) for mask in (True, False))
            if spec.packed:
                carry = lax.fori_loop(start, left, masked, carry)
            carry = lax.fori_loop(left, right, plain, carry)
            carry = lax.fori_loop(right, stop, masked, carry)
            if spec.free > 0:
                refs = [scores_s, winners_s, own.at[b, mine], base.at[b, mine]]
                _each_warp(lines.extract, refs, [wg, k, begin])
            return carry

        if lines.several:
            chunks = jnp.maximum(lax.div(span[b, mine] + chunk - 1, jnp.int32(chunk)), 1)
            lax.fori_loop(0, chunks, take, jnp.int32(0))
        else:
            take(jnp.int32(0), jnp.int32(0))
        _each_warp(lines.write, [winners_s, own.at[b, mine], out.at[b, g, mine]], [wg])

    inputs, output = shapes(spec)
    call = plgpu.kernel(
        body,
        out_type=[output],
        grid=(spec.B * spec.Hkv, spec.tiles),
        grid_names=("bg", "tile"),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[
            buffers.ring(stages, KEYS, spec.D),
            plgpu.SMEM((spec.lines, lines.words), jnp.float32),
            plgpu.SMEM((spec.lines, lines.kept), jnp.int32),
            plgpu.Barrier(num_arrivals=spec.D // tile.slab, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        ],
        compiler_params=operands.PARAMS,
    )
    return Kernel("best_blocks", spec, call, inputs, (output,))


def _queries(spec: Scores, query, b, g, token):
    """The rows of a warpgroup, whose first token is `token`, in registers: `[64, D]`.

    Rows of no head, and tokens past the end, repeat others: their `lse` is +inf.
    """
    dtype = jnp.dtype(spec.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[warp.SCALAR] * 3),
        return_type=plgpu.ShapeDtypeStruct((ROWS, spec.D), dtype, layout=MATRIX),
    )
    def read(_, query, *places):
        b, g, token = map(warp.scalar, places)
        lane, heads = warp.lane(), spec.cut.heads
        words = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        registers = np.empty((spec.D // 8, 2), dtype=object)
        for half in range(2):
            row = warp.warp() * 16 + (lane >> 2) + 8 * half
            at = warp.smaller(token + row // heads, spec.T - 1)
            head = warp.smaller(g * spec.group + row % heads, spec.H - 1)
            address = warp.element(
                query,
                (b, spec.T * spec.H * spec.D * 2),
                (at, spec.H * spec.D * 2),
                (head, spec.D * 2),
                (lane & 3, 4),
            )
            for j in range(spec.D // 8):
                two = vector.broadcast(words, warp.fetch(address, 16 * j).value)
                registers[j, half] = vector.bitcast(pair, two)
        shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, spec.D))
        return mgpu.optimization_barrier(_matrix(registers.reshape(shape), MATRIX))

    return read(query, b, g, token)


def _product(queries, keys, slab: int):
    """`queries @ keys.T`, float32 `[64, 64]`; `keys` `[slabs, 64, slab]` in shared memory.

    As `mgpu.wgmma`, but its fence of the left operand makes ptxas copy all of that for each
    product; here it never changes.
    """
    transforms = plgpu.TilingTransform((8, slab)), plgpu.SwizzleTransform(2 * slab)

    @plgpu.inline_mgpu(
        arg_types=(MATRIX, plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, KEYS), jnp.float32, layout=MATRIX),
    )
    def multiply(_, queries, keys):
        # [slabs, keys / 8, 1, 8, slab] becomes [slabs, keys / 8, slab, 8], as wgmma counts.
        keys = mgpu.memref_slice(keys, (slice(None), slice(None), 0))
        keys = mgpu.memref_transpose(keys, (0, 1, 3, 2))
        (start, (_, stride)), (_, slab_stride), fastest = mma_utils.create_descriptor(
            keys,
            swizzle=2 * slab,
            large_tile=(slab, slab),
            group_size=(slab, KEYS),
            logical_k_major=True,
        )
        zero = mgpu.WGMMAAccumulator.zero(ROWS, KEYS)._value
        registers, dtype = zero.registers.copy(), queries.mlir_dtype
        for i in range(queries.shape[1] // slab):
            offset = mma_utils.encode_addr(i * slab_stride)
            registers = instructions.wgmma_m64(
                registers,
                queries[:, i * slab : (i + 1) * slab],
                instructions._llvm_add(start, utils.c(offset, ir.IntegerType.get_signless(64))),
                None,
                fastest != mma_utils.Dim.K,
                None,
                stride[0],
                KEYS,
                2 * slab,
                dtype,
                dtype,
            )
        product = mgpu.FragmentedArray(
            _registers=registers, _layout=zero.layout, _is_signed=None
        ).to_layout(MATRIX.to_mgpu())
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(product)

    return multiply(queries, keys)


def _fold(probs):
    """Adds rows 8 apart, which one lane has: `[64, 64]` to `[32, 64]`."""
    result = plgpu.ShapeDtypeStruct((ROWS // 2, KEYS), jnp.float32, layout=FOLDED)

    @plgpu.inline_mgpu(arg_types=(MATRIX,), return_type=result)
    def add(_, probs):
        pairs = probs.registers.reshape(KEYS // 8, 2)
        registers = np.empty(FOLDED.to_mgpu().registers_shape((ROWS // 2, KEYS)), dtype=object)
        for place, (low, high) in zip(np.ndindex(registers.shape), pairs, strict=True):
            registers[place] = arith.addf(low, high)
        return _matrix(registers, FOLDED)

    return add(probs)


def _each_warp(function, refs, numbers, sums=()):
    """Calls `function` of `Lines` with these arguments, as words."""
    layout = FOLDED if sums and sums[0].shape[0] < ROWS else MATRIX
    rest = len(refs) + len(numbers)

    def call(*arguments):
        function(*arguments[:rest], *map(_floats, arguments[rest:]))

    warp.each(call, refs, numbers, sums, layout)


def _matrix(registers, layout):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)


def _floats(matrix):
    """By row of a lane, its pairs of neighbours (`Lines.add`)."""
    pairs = matrix.registers.reshape(KEYS // 8, -1)

    def pair(register):
        return [
            Word(
                vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([i]),
                )
            )
            for i in range(2)
        ]

    return [[pair(register) for register in column] for column in pairs.T]

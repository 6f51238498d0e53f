"""Computes the scores of blocks and selects the best blocks.

The kernel for groups of up to 16 heads computes S = Q K^T. The kernel for larger groups computes
S^T = K Q^T.

Algorithm for up to 16 heads per group: P = exp2(scale * log2(e) * Q K^T - lse_log2) with the lse of
the compressed branch. P is summed over phases (`specs/scores.py`) and over the heads of a group.
The sums are added to the score row of each token in shared memory. From the sums, a warp selects
the n best blocks of each score row (`warp_topk.py`).

Loop order: query-stationary. A CTA of 2 to 4 warpgroups has a tile of query rows. The CTA loops
over chunks of blocks, and in each chunk over steps of 64 blocks. A step has one product for each of
the `ratio` phases of its blocks. Each chunk ends with the top-k of its scores. In unpacked rows
with a single chunk, a tile whose tokens select all their candidate blocks needs no product.
Tile: 64 query rows per warpgroup, from `64 // heads` tokens. The query rows are the left operand
and stay in registers, so a product reads only keys from shared memory. If both operands were in
shared memory, the traffic from shared memory would double. With 16 heads each warp has one token.
With fewer heads each warp has 2 to 8 tokens. Once per step, lanes exchange values to sum over
heads. The warpgroups share the ring buffer of keys and refill it in turn.

An SM runs four warpgroups at 128 registers per thread, or three if four would spill registers. Some
warpgroups multiply while another warpgroup computes probabilities. The kernel for up to 16 heads is
bound by issue slots. Floors on an H100 at B=1 H=64 Hkv=4 D=128 T=65536: 2.2 TFLOP = 2.2 ms; 8.8 G
exponentials at 16 per clock and SM = 2.4 ms; the query, read once, 1.1 GB = 0.33 ms.

With more than 16 heads per group, the operands A and B of the product are swapped. Algorithm: P^T =
exp2(scale * log2(e) * K Q^T - lse_log2). The sum over the heads of a group runs along a row of
registers. During a product, the warpgroup computes the probabilities of the previous product. The
score rows of a tile stay in shared memory. From the score rows, one warp per token selects the best
blocks that are not forced.

Loop order: query-stationary. A CTA of one warpgroup has a tile of query rows. The loops are
those of the kernel for up to 16 heads.
Tile: up to 128 query rows of 8 tokens, and 64 keys per product. The ring buffer has 2 stages, since
with more stages an SM would hold only one CTA. The kernel for more heads is bound by the
instructions around the products. The floors are the same as for up to 16 heads.
"""

import dataclasses
import functools

import jax
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
from kernels_pallas.mosaic import interpreter, operands, warp, wgmma
from kernels_pallas.mosaic.operands import (
    LOG2E,
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    across,
    div,
    div_rem,
    rem,
)
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.mosaic.warp import Word
from kernels_pallas.mosaic.warp_topk import NO_BLOCK, WarpTopK
from kernels_pallas.specs.scores import KEYS, KQ_WARPS, Scores


def tile_of_cta(spec: Scores, refs) -> tuple:
    """Return the batch row and the key/value head of a CTA, and the index of its tile among the
    tiles of all batch rows. Also return the first token and the end of the tile's tokens, and the
    first block of the sequence that contains the first token. Without `query_tiles`, the end is T.
    """
    b, g = div_rem(refs.cta.bg, spec.Hkv)
    tiles = refs.sizes.tiles
    index = tiles - 1 - refs.cta.tile  # later tokens have more work
    mine = b * tiles + index
    if spec.query_tiles:
        tokens = refs.first_token[mine] + 0, refs.end_token[mine] + 0
    else:
        tokens = index * spec.tile.tokens, refs.sizes.T
    return b, g, mine, *tokens, refs.base_block[mine, 0]


def lse_log2_of_rows(spec: Scores, tokens: int, lse, b, first_token, g, length):
    """Return lse * log2(e) for the rows of `tokens` tokens from `first_token` on. `length` is
    T. The result is +inf for padding heads and for rows without keys, which makes every
    probability zero. Tokens from T on have the value of the last token.
    """
    rows_of = TileRows(tokens, spec.group, spec.tiling.heads, spec.interpret)
    found = rows_of.values(lse, b, first_token, g * spec.group, length, jnp.inf)
    return jnp.where(found == -jnp.inf, jnp.inf, found * LOG2E)


def load_keys(spec: Scores, buffers: operands.Buffers, refs, place, base, q) -> None:
    """Start copies of the keys of product `q`. The keys of a product are one phase of 64
    blocks. `base` is the first block of product 0. `place` has the batch row and the key/value
    head.
    """
    stage = rem(q, spec.tiling.stages)
    blocks, phase = pl.ds(base + div(q, spec.ratio) * KEYS, KEYS), rem(q, spec.ratio)
    source = lambda columns: refs.key.at[place[0], blocks, phase, place[1], columns]
    buffers.load_keys(source, refs.key_s, stage, refs.key_full.at[stage])


def over_chunk(spec: Scores, step, carry, k, steps, base, key_begin, key_end):
    """Compute `carry = step(under_mask, i, carry)` for each step `i` of chunk `k`.

    A step has 64 blocks and `ratio` products, one per phase. Only the steps at both ends of the
    visible keys of a tile need a mask.

    Args:
      spec: The sizes of the problem.
      step: The function.
      carry: The initial `carry`.
      k: Index of the chunk.
      steps: Number of steps of the tile, in all chunks.
      base: First block of the first step.
      key_begin: The begin of the keys to which the tile's last row attends.
      key_end: The end of the keys to which the tile's first row attends.
    """
    chunk = spec.tiling.chunk
    step_keys = jnp.int32(KEYS * spec.ratio)
    start = jnp.minimum(k * (chunk // KEYS), steps)
    stop = jnp.minimum(start + chunk // KEYS, steps)
    edge = (base + start * KEYS) * spec.ratio
    left = lax.div(jnp.maximum(key_begin - edge, 0) + (KEYS * spec.ratio) - 1, step_keys)
    left = jnp.minimum(start + left, stop) if spec.packed else start
    right = lax.div(jnp.maximum(key_end - base * spec.ratio, 0), step_keys)
    right = jnp.clip(right, left, stop)
    masked, unmasked = (functools.partial(step, mask) for mask in (True, False))
    if spec.packed:
        carry = lax.fori_loop(start, left, masked, carry)
    carry = lax.fori_loop(left, right, unmasked, carry)
    return lax.fori_loop(right, stop, masked, carry)


# The layout of a product's registers after rows at distance 8 have been added. A warp has 8
# rows.
FOLDED = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def best_blocks_qk(kernel: Kernel):
    """The body of the kernel `specs.scores.best_blocks` for groups of up to 16 heads."""
    spec: Scores = kernel.spec
    interpret = spec.interpret
    tile, r, heads = spec.tile, spec.ratio, spec.tiling.heads
    chunk, stages = spec.tiling.chunk, spec.tiling.stages
    buffers = operands.Buffers.of(spec, tile)
    topk = WarpTopK(spec)
    warpgroups, tokens = tile.rows // ROWS, ROWS // heads
    step_keys = KEYS * r
    scale_log2 = spec.scale * LOG2E
    unshared = r - spec.cover + 1  # phases whose compressed tokens belong to one block only
    run = functools.partial(_each_warp, topk)
    sums_shape, sums_layout = (
        ((ROWS // 2, KEYS), FOLDED) if heads == 16 else ((ROWS, KEYS), MATRIX)
    )

    def body(refs):
        wg = lax.axis_index("wg")
        b, g, mine, first_of_tile, last_of_tile, base = tile_of_cta(spec, refs)
        end = refs.key_end[mine, tile.rows - 1]
        steps = div(jnp.maximum(end - base * r, 0) + step_keys - 1, step_keys)
        if not topk.several_chunks and not spec.packed:
            last_token = jnp.minimum(tile.tokens, last_of_tile - first_of_tile) - 1
            if spec.query_tiles:
                last_token = jnp.maximum(last_token, 0)
            # No token has more than `spec.free` blocks to choose from (`WarpTopK.extract`).
            all_win = refs.own_block[mine, last_token] < spec.n
            steps = jnp.where(all_win, 0, steps)
        products = steps * r

        def load(q):
            """Start the copies of the keys of product `q`."""
            load_keys(spec, buffers, refs, (b, g), base, q)

        for q in range(stages):

            @pl.when((jnp.int32(q) < products) & (wg == q % warpgroups))
            def _(q=q):
                load(jnp.int32(q))

        row0 = wg * ROWS
        here = pl.ds(row0, ROWS)

        def rows_of(ref):
            return operands.load(ref.at[mine, here], PER_ROW)

        first_token = first_of_tile + wg * tokens
        queries = _queries(spec, refs.query, b, g, first_token, refs.sizes.T)  # [64, D]
        key_end = rows_of(refs.key_end)  # [64]
        key_begin = rows_of(refs.key_begin) if spec.packed else None
        last_begin, first_end = refs.key_begin[mine, row0 + ROWS - 1], refs.key_end[mine, row0]
        places = b, first_token, g, refs.sizes.T
        lse_log2 = lse_log2_of_rows(spec, tokens, refs.lse, *places)  # [64]

        def refill(q):
            """Load the next keys into the stage of product `q`, once all warpgroups have read
            the stage.
            """
            stage = rem(jnp.maximum(q, 0), stages)
            turn = rem(stage, warpgroups) == wg

            @pl.when((q >= 0) & (q + stages < products) & turn)
            def _():
                plgpu.barrier_wait(refs.key_free.at[stage])
                load(q + stages)

        # With a spare stage, a warpgroup that refills does not wait for the others.
        lag = 1 if stages >= 3 else 0

        def probabilities(under_mask, i, phase):
            """Return the probabilities of 64 keys of one phase, `[64, 64]`. With 16 heads,
            return the result of `_fold`, which has the shape `sums_shape`.
            """
            q = i * r + phase
            stage = rem(q, stages)
            plgpu.barrier_wait(refs.key_full.at[stage])
            s = _product(buffers, queries, refs.key_s, stage)  # S = Q K^T
            plgpu.barrier_arrive(refs.key_free.at[stage])
            p = jnp.exp2(s * scale_log2 - across(lse_log2, (ROWS, KEYS)))
            if under_mask:  # a row sees blocks [low, high) of this phase
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=MATRIX)
                edge = base + i * KEYS
                high = div(key_end + (r - 1 - phase), r) - edge
                seen = column < across(high, (ROWS, KEYS))
                if key_begin is not None:
                    low = div(key_begin + (r - 1 - phase), r) - edge
                    seen &= column >= across(low, (ROWS, KEYS))
                p = jnp.where(seen, p, 0.0)
            return _fold(p, interpret) if heads == 16 else p

        def step(chunk_begin, under_mask, i, nothing):
            """Compute the scores of 64 blocks from their `r` phases."""

            def unshared_phase(phase, own):
                own = own + probabilities(under_mask, i, phase)
                refill(i * r + phase - lag)
                return own

            def shared_phase(phase, carry):
                """Add the probabilities of a phase whose keys belong to two blocks. The
                probabilities count `r - phase` times for the block itself, and `cover - (r -
                phase)` times for the next block.
                """
                own, following = carry
                p = probabilities(under_mask, i, phase)
                times = jnp.asarray(r - phase, jnp.float32)
                own = own + p * times
                more = p * (float(spec.cover) - times)
                refill(i * r + phase - lag)
                return own, more if following is None else following + more

            zeros = operands.full(sums_shape, 0.0, sums_layout)
            own = lax.fori_loop(0, unshared, unshared_phase, zeros) * float(spec.cover)
            following = zeros
            if unshared < r:
                # Only the first shared phase is unrolled. Unrolling more would need too many
                # registers.
                carry = shared_phase(unshared, (own, None))
                own, following = lax.fori_loop(unshared + 1, r, shared_phase, carry)
            place = i * KEYS - chunk_begin
            run("add", [refs.scores_s], [], [wg, place], [own, following])
            return nothing

        own_block = refs.own_block.at[mine]

        def take(k, carry):
            """Compute the scores of chunk `k`.

            From the scores and the winners of earlier chunks, select the best blocks.
            """
            step_of_chunk = functools.partial(step, k * chunk)
            run("begin_chunk", [refs.scores_s], [], [wg, k])
            carry = over_chunk(
                spec, step_of_chunk, carry, k, steps, base, last_begin, first_end
            )
            if spec.free > 0:
                base_block = refs.base_block.at[mine]
                rows = [refs.scores_s, refs.winners_s]
                run("extract", rows, [own_block, base_block], [wg, k, base])
            return carry

        if topk.several_chunks:
            chunks = div(refs.span[mine] + chunk - 1, chunk)
            lax.fori_loop(0, jnp.maximum(chunks, 1), take, jnp.int32(0))
        else:
            take(jnp.int32(0), jnp.int32(0))
        if interpret:
            _write_interpreted(spec, run, refs, own_block, wg, b, first_token, g, last_of_tile)
            key_free = refs.key_free

            def wait(q):
                stage = rem(q, stages)
                turn = rem(stage, warpgroups) == wg
                pl.when(turn)(lambda: plgpu.barrier_wait(key_free.at[stage]))

            operands.drain(interpret, stages, products, wait)
            return
        run(
            "write",
            [refs.winners_s],
            [own_block, refs.selection],
            [wg, b, first_of_tile, g, refs.sizes.T, last_of_tile],
        )

    score_rows = spec.tiling.score_rows
    return build_kernel(
        kernel,
        body,
        scratch={
            "key_s": buffers.ring(stages, KEYS, spec.D),
            "scores_s": plgpu.SMEM((score_rows, topk.words), jnp.float32),
            "winners_s": plgpu.SMEM((score_rows, topk.winner_slots), jnp.int32),
            "key_full": operands.barriers(spec.D // tile.slab, stages),
            "key_free": operands.barriers(warpgroups, stages),
        },
        grid_names=("bg", "tile"),
        num_threads=warpgroups,
        thread_name="wg",
    )


def _queries(spec: Scores, query, b, g, token, length):
    """Load the query rows of a warpgroup into registers, `[64, D]`.

    `token` is the first token of the warpgroup. The rows of padding heads repeat other heads, which
    has no effect, since the `lse` of padding heads is +inf. Tokens from T on repeat the last token,
    and their selection is not written.
    """
    dtype = jnp.dtype(spec.dtype)
    if spec.interpret:
        missing = (0, spec.tiling.heads - spec.group), (0, 0)
        rows = [
            query[b, jnp.minimum(token + i, length - 1), pl.ds(g * spec.group, spec.group)]
            for i in range(ROWS // spec.tiling.heads)
        ]
        return jnp.concatenate([jnp.pad(x, missing, mode="edge") for x in rows])

    def read(query, b, g, token, length):
        lane, heads = warp.lane(), spec.tiling.heads
        words = ir.VectorType.get((1,), wgmma.i32())
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        registers = np.empty((spec.D // 8, 2), dtype=object)
        for half in range(2):
            row = warp.warp() * 16 + (lane >> 2) + 8 * half
            at = warp.smaller(token + row // heads, length - 1)
            head = warp.smaller(g * spec.group + row % heads, spec.H - 1)
            address = warp.element(
                query,
                (b * length + at, spec.H * spec.D * 2),
                (head, spec.D * 2),
                (lane & 3, 4),
            )
            for j in range(spec.D // 8):
                two = vector.broadcast(words, warp.fetch(address, 16 * j).value)
                registers[j, half] = vector.bitcast(pair, two)
        shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, spec.D))
        return mgpu.optimization_barrier(
            wgmma.fragments(registers.reshape(shape), MATRIX.to_mgpu())
        )

    result = operands.matrix_type((ROWS, spec.D), dtype)
    return warp.each(read, [query], [b, g, token, length], result=result)


def _product(buffers: operands.Buffers, queries, ring, stage):
    """Return `queries @ keys.T`, float32 `[64, 64]`, for the keys in a stage of `ring`.

    `mgpu.wgmma` would fence its left operand, and ptxas would then copy the whole operand for each
    product. Since the queries never change, this function needs no fence.
    """
    if buffers.interpret:
        return buffers.start_product(queries.astype(jnp.float32), (ring, stage))
    slab, keys = buffers.slab, ring[0].at[stage]  # [slabs, 64, slab]
    transforms = plgpu.TilingTransform((8, slab)), plgpu.SwizzleTransform(2 * slab)

    @plgpu.inline_mgpu(
        arg_types=(MATRIX, plgpu.RefType(transforms)),
        return_type=operands.matrix_type((ROWS, KEYS)),
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
        product = wgmma.fragments(registers, zero.layout).to_layout(MATRIX.to_mgpu())
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(product)

    return multiply(queries, keys)


def _fold(probs, interpret):
    """Add pairs of rows at a distance of 8, which are in the same lane.

    The result for `probs` `[64, 64]` is `[32, 64]`.
    """
    if interpret:
        return probs.reshape(4, 2, 8, KEYS).sum(1).reshape(ROWS // 2, KEYS)
    result = plgpu.ShapeDtypeStruct((ROWS // 2, KEYS), jnp.float32, layout=FOLDED)

    def add(probs):
        pairs = probs.registers.reshape(KEYS // 8, 2)
        registers = np.empty(FOLDED.to_mgpu().registers_shape((ROWS // 2, KEYS)), dtype=object)
        for place, (low, high) in zip(np.ndindex(registers.shape), pairs, strict=True):
            registers[place] = arith.addf(low, high)
        return wgmma.fragments(registers, FOLDED.to_mgpu())

    return warp.each(add, [], [], [probs], MATRIX, result=result)


def _each_warp(topk: WarpTopK, name: str, rows, arrays, numbers, sums=()):
    """Call the function `name` of `topk` in every warp. `numbers` are passed as words.

    Args:
      rows: Arrays in shared memory with one row per token.
      arrays: Arrays in global memory.
      sums: Float32 matrices in the registers of the warpgroup.
    """
    if topk.spec.interpret:
        return _each_interpreted_warp(topk, name, rows, arrays, numbers, sums)
    layout = FOLDED if sums and sums[0].shape[0] < ROWS else MATRIX
    refs = [*rows, *arrays]
    rest = len(refs) + len(numbers)

    def call(*arguments):
        getattr(topk, name)(*arguments[:rest], *map(_floats, arguments[rest:]))

    warp.each(call, refs, numbers, sums, layout)


def _each_interpreted_warp(topk: WarpTopK, name: str, rows, arrays, numbers, sums=()):
    """Run `_each_warp` in the interpreter.

    The race detector of the interpreter records only the warpgroup's own `rows` as read and
    written. If an element of `arrays` is a shape instead of a ref, the array is only written, and
    is returned.
    """
    wg, count = numbers[0], ROWS // topk.heads
    own = pl.ds(wg * count, count)
    outputs = [x for x in arrays if isinstance(x, jax.ShapeDtypeStruct)]

    def run(rows, arrays, numbers, sums):
        wg, of_outputs = int(numbers[0]), iter(outputs)
        first = slice(wg * count, (wg + 1) * count)
        shared = []
        for x in rows:
            whole = np.zeros((topk.spec.tiling.score_rows, x.shape[1]), x.dtype)
            whole[first] = x
            shared.append(whole)
        given = [np.asarray(x) for x in arrays]
        written = [np.full(x.shape, -1, x.dtype) for x in of_outputs]
        matrices = [_pairs(np.asarray(x)) for x in sums]

        def program(instructions, *arguments):
            getattr(topk._replace(warp=instructions), name)(*arguments, *matrices)

        numbers = [np.int32(x) for x in numbers]
        left = interpreter.machine().warpgroup(program, shared, [*given, *written, *numbers])
        return [x[first] for x in left], written

    values = [x[own] for x in rows]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
    given = [x[...] for x in arrays if not isinstance(x, jax.ShapeDtypeStruct)]
    left, written = jax.pure_callback(run, (shapes, outputs), values, given, numbers, sums)
    for ref, value in zip(rows, left, strict=True):
        ref[own] = value
    return written


def _write_interpreted(spec: Scores, run, refs, own_block, wg, b, first_token, g, end):
    """Run `WarpTopK.write` in the interpreter, for one token of a warpgroup after the other."""
    count, tokens = ROWS // spec.tiling.heads, spec.tile.tokens
    # `write` writes the blocks of the tile's tokens to an array of one tile, at row 0 and head
    # 0.
    of_tile = jax.ShapeDtypeStruct((1, tokens, spec.Hkv, spec.n), jnp.int32)
    zero = jnp.int32(0)
    numbers = [wg, zero, zero, zero, jnp.int32(tokens), jnp.int32(tokens)]
    (found,) = run("write", [refs.winners_s], [own_block, of_tile], numbers)
    for i in range(count):

        @pl.when(first_token + i < end)
        def _(i=i):
            mine = lax.dynamic_index_in_dim(found[0, :, 0], wg * count + i, keepdims=False)
            refs.selection[b, first_token + i, g] = mine


def _pairs(matrix: np.ndarray) -> list:
    """Return the same pairs as `_floats` for a NumPy array `[64, 64]` or `[32, 64]`. Each number of
    a pair is an array `[4, 32]`, with an element for each of 4 warps and 32 lanes.
    """
    lane = np.arange(32)
    of_warp = matrix.reshape(4, -1, KEYS)
    return [
        [
            [of_warp[:, lane // 4 + 8 * half, 8 * j + 2 * (lane % 4) + e] for e in range(2)]
            for j in range(KEYS // 8)
        ]
        for half in range(of_warp.shape[1] // 8)
    ]


def _floats(matrix):
    """Return, for each row of a lane, the list of its pairs of neighbouring numbers, as
    `WarpTopK.add` reads them.
    """
    pairs = matrix.registers.reshape(KEYS // 8, -1)

    def pair(register):
        return [Word(vector.extract(register, [], [i])) for i in range(2)]

    return [[pair(register) for register in column] for column in pairs.T]


# Each warp has one row of 128 * k columns, and each lane has groups of four neighbouring
# columns.
ROW_PER_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((KQ_WARPS, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def best_blocks_kq(kernel: Kernel):
    """The body of the kernel `specs.scores.best_blocks` for groups of more than 16 heads."""
    spec: Scores = kernel.spec
    tile, r, free = spec.tile, spec.ratio, spec.free
    buffers = operands.Buffers.of(spec, tile)
    heads, rows, score_rows, chunk, stages = dataclasses.astuple(spec.tiling)
    scale_log2 = spec.scale * LOG2E
    several_chunks = spec.chunks > 1 and free > 0
    winners = -(-spec.chunks * free // 128) * 128 if several_chunks else 1
    step_keys = KEYS * r
    # Groups of four score rows, one per warp.
    fours = [pl.ds(first, KQ_WARPS) for first in range(0, score_rows, KQ_WARPS)]

    def body(refs):
        b, g, mine, first_of_tile, last_of_tile, base = tile_of_cta(spec, refs)
        tokens = pl.ds(first_of_tile, tile.tokens)
        group = pl.ds(g * spec.group, heads)
        buffers.load_rows(
            lambda columns: refs.query.at[b, tokens, group, columns],
            refs.query_s,
            0,
            spec.D,
            refs.query_full,
        )
        last_begin = refs.key_begin[mine, rows - 1]
        first_end = refs.key_end[mine, 0]
        last_end = refs.key_end[mine, rows - 1]
        keys = jnp.maximum(last_end - base * r, 0)
        steps = div(keys + step_keys - 1, step_keys)
        products = jnp.maximum(steps * r, 1)  # the first product is always computed

        def load(q):
            """Start the copies of the keys of product `q`, which are one phase of 64 blocks."""

            @pl.when(q < products)
            def _():
                load_keys(spec, buffers, refs, (b, g), base, q)

        def multiply(q, meanwhile):
            """Return the logits K Q^T `[64, rows]` of product `q`, and the result of
            `meanwhile`. The function `meanwhile` runs during the product.
            """
            stage = rem(q, stages)

            @pl.when(q < products)
            def _():
                plgpu.barrier_wait(refs.key_full.at[stage])

            logits, found = buffers.products(
                ((refs.key_s, stage), (refs.query_s, 0)), meanwhile=meanwhile
            )
            plgpu.commit_smem()
            load(q + stages)
            return logits, found

        for q in range(stages):
            load(jnp.int32(q))

        def columns(ref):
            return operands.load(ref, PER_COLUMN)

        def down(row):
            return lax.broadcast_in_dim(row, (ROWS, rows), [1])

        for row in range(0, rows, ROWS):
            count = min(ROWS, tile.used - row) // heads
            first_token = first_of_tile + row // heads
            refs.lse_log2_s.at[pl.ds(row, ROWS)][...] = lse_log2_of_rows(
                spec, count, refs.lse, b, first_token, g, refs.sizes.T
            )
        plgpu.commit_smem()

        def fold(p):
            """Return, for each token, the sum `[64, 8]` over its groups of 8 columns.

            The function `store` adds up the 8 columns.
            """
            sums = []
            for token in range(0, rows, heads):
                folded = p[:, token : token + 8]
                for column in range(token + 8, token + heads, 8):
                    folded += p[:, column : column + 8]
                sums.append(folded)
            return sums

        def store(scores_s, place, sums, add=False):
            """Add up the 8 columns of each token's array in `sums`, and write the 64 totals to
            the token's score row. If `add` is true, the totals are added to the contents of the
            score row.
            """
            for t, folded in enumerate(sums):
                blocks = scores_s.at[t, pl.ds(place, ROWS)]
                score = folded.sum(axis=1)  # [64]
                if add:
                    score += operands.load(blocks, operands.PER_ROW)
                blocks[...] = score

        def step(chunk_begin, under_mask, i, logits):
            """Store the scores of 64 blocks, given the logits of their first phase. Return the
            logits of the first phase of the next step.
            """
            place = i * ROWS - chunk_begin

            def one_phase(phase, carry):
                """For one phase, add times * P to own and (cover - times) * P to next, during the
                product of the next phase.
                """
                logits, *own = carry
                times = jnp.minimum(spec.cover, r - phase)

                def add_phase():
                    # lse_log2 stays in shared memory, since registers are scarce.
                    p = jnp.exp2(logits * scale_log2 - down(columns(refs.lse_log2_s)))
                    folded = fold(p)
                    # All heads of a token attend to the same keys.
                    if under_mask:
                        shape = (ROWS, 8)
                        block = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
                        token = (block + (base + i * ROWS)) * r + phase
                        for t, p_of_token in enumerate(folded):
                            seen = token >= refs.key_begin[mine, t * heads]
                            seen &= token < refs.key_end[mine, t * heads]
                            folded[t] = jnp.where(seen, p_of_token, 0.0)

                    @pl.when(times < spec.cover)
                    def _():
                        over = (spec.cover - times).astype(jnp.float32)
                        several_phases = spec.cover > 2
                        if several_phases:
                            plgpu.commit_smem()
                        store(
                            refs.next_s, place + 1, [x * over for x in folded], several_phases
                        )

                    factor = times.astype(jnp.float32)
                    return [x + y * factor for x, y in zip(own, folded, strict=True)]

                logits, own = multiply(i * r + phase + 1, add_phase)
                return logits, *own

            zeros = operands.zeros(8)
            state = (logits, *[zeros] * tile.tokens)
            logits, *own = lax.fori_loop(0, r, one_phase, state)
            store(refs.own_s, place, own)
            return logits

        def values_of_rows(ref):
            return operands.load(ref, ROW_PER_WARP.reduce(1))

        def scores_of_rows(ref):
            return operands.load(ref, ROW_PER_WARP)

        def along(row, shape):
            return plgpu.layout_cast(lax.broadcast_in_dim(row, shape, [0]), ROW_PER_WARP)

        def extract(scores, indices, keep):
            """Call `keep(four, i, value, index)` with the `i`-th best entry of each score row.
            If scores are equal, the lower index comes first. All rows are processed together to
            hide the latency of reductions.
            """

            def one(i, scores):
                left = []
                for four, score, index in zip(fours, scores, indices, strict=True):
                    top = score.max(axis=1)
                    hit = score == along(top, score.shape)
                    at = -jnp.where(hit, -index, -NO_BLOCK).max(axis=1)
                    keep(four, i, top, jnp.where(top < 0, NO_BLOCK, at))
                    left.append(jnp.where(index == along(at, score.shape), -1.0, score))
                return tuple(left)

            lax.fori_loop(0, free, one, tuple(scores))

        def choose(four, i, value, index):
            refs.chosen_s.at[i, four][...] = index

        zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), operands.PER_ROW)
        plgpu.barrier_wait(refs.query_full)
        ahead, _ = multiply(jnp.int32(0), lambda: None)

        def take(k, ahead):
            """Select the best blocks of chunk `k`. `ahead` has the logits of the first product
            of the chunk.
            """
            chunk_begin = k * chunk
            for t in range(score_rows):
                over = refs.next_s.at[t, pl.ds(chunk, ROWS)]
                carried = operands.load(over, operands.PER_ROW)
                carried = jnp.where(k > 0, carried, zero)
                plgpu.commit_smem()
                for j in range(chunk // KEYS):
                    refs.own_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero
                    refs.next_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero if j else carried
                over[...] = zero
            plgpu.commit_smem()
            step_of_chunk = functools.partial(step, chunk_begin)
            ahead = over_chunk(
                spec, step_of_chunk, ahead, k, steps, base, last_begin, first_end
            )
            plgpu.commit_smem()
            best_of_chunk(k)
            return ahead

        def best_of_chunk(k):
            scores, indices = [], []
            for four in fours:
                score = scores_of_rows(refs.own_s.at[four, pl.ds(0, chunk)])
                score += scores_of_rows(refs.next_s.at[four, pl.ds(0, chunk)])
                shape = score.shape  # [4, chunk]
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROW_PER_WARP)
                base_of_row = values_of_rows(refs.base_block.at[mine, four])
                index = index - along(base_of_row - base - k * chunk, shape)
                own_block = along(values_of_rows(refs.own_block.at[mine, four]), shape)
                final = own_block - spec.num_local  # the blocks after `final` are forced
                free_to_choose = (index >= spec.num_initial) & (index <= final)
                scores.append(jnp.where(free_to_choose, score, -1.0))
                indices.append(index)

            def keep(four, i, value, index):
                refs.value_s.at[four, k * free + i][...] = value
                refs.index_s.at[four, k * free + i][...] = index

            extract(scores, indices, keep if several_chunks else choose)

        def best_of_all():
            scores, indices = (
                [scores_of_rows(ref.at[four]) for four in fours]
                for ref in (refs.value_s, refs.index_s)
            )
            extract(scores, indices, choose)

        def finish(four):
            """Add the forced blocks to the chosen blocks of four score rows, sort the blocks of
            each row, and write the sorted blocks.
            """
            own_block = values_of_rows(refs.own_block.at[mine, four])
            chosen = [values_of_rows(refs.chosen_s.at[i, four]) for i in range(free)]
            for block in range(spec.num_initial):
                chosen.append(jnp.where(own_block >= block, own_block * 0 + block, NO_BLOCK))
            for back in range(spec.num_local):
                block = own_block - back
                chosen.append(jnp.where(block >= spec.num_initial, block, NO_BLOCK))
            for low, high in _batcher(len(chosen)):
                x, y = chosen[low], chosen[high]
                chosen[low], chosen[high] = jnp.minimum(x, y), jnp.maximum(x, y)
            chosen = [jnp.where(index == NO_BLOCK, -1, index) for index in chosen]
            places = first_of_tile + four.start, g, refs.sizes.T, last_of_tile
            _write_fours(spec, chosen, refs.selection, four.start, b, *places)

        if several_chunks:
            refs.value_s[...] = jnp.full((score_rows, winners), -1.0, jnp.float32)
            plgpu.commit_smem()
            chunks = div(refs.span[mine] + chunk - 1, chunk)
            lax.fori_loop(0, chunks, take, ahead)
            plgpu.commit_smem()
            best_of_all()
        else:
            take(jnp.int32(0), ahead)
        plgpu.commit_smem()
        for four in fours:
            finish(four)

    slabs = spec.D // tile.slab
    return build_kernel(
        kernel,
        body,
        scratch={
            "query_s": buffers.rows(1, spec.D),
            "lse_log2_s": plgpu.SMEM((rows,), jnp.float32),
            "key_s": buffers.ring(stages, KEYS, spec.D),
            "own_s": plgpu.SMEM((score_rows, chunk), jnp.float32),
            "next_s": plgpu.SMEM((score_rows, chunk + KEYS), jnp.float32),
            "chosen_s": plgpu.SMEM((max(free, 1), score_rows), jnp.int32),
            "value_s": plgpu.SMEM((score_rows, winners), jnp.float32),
            "index_s": plgpu.SMEM((score_rows, winners), jnp.int32),
            "query_full": operands.barriers(slabs),
            "key_full": operands.barriers(slabs, stages),
        },
        grid_names=("bg", "tile"),
    )


def _write_fours(spec: Scores, chosen, selection, first: int, b, token, g, length, end):
    """Write the blocks of four tokens to `selection` `[B, T, Hkv, n]`.

    Each warp writes one token. `chosen` has `n` arrays `[4]`, with one block per token. `token` is
    the index in the row of the tile's token `first`. `length` is T, and `end` is the end of the
    tile's tokens.
    """
    tokens = min(KQ_WARPS, spec.tile.tokens - first)
    if spec.interpret:
        for i in range(tokens):

            @pl.when(token + i < end)
            def _(i=i):
                selection.at[b, token + i, g][...] = jnp.stack([x[i] for x in chosen])

        return

    def put(selection, b, token, g, length, end, *chosen):
        number, n = warp.warp(), spec.n
        token = token + number
        only = warp.same(warp.lane(), 0) & (number < tokens) & (token < end)
        address = (b * length + token, 4 * n * spec.Hkv), (g, 4 * n)
        for i, x in enumerate(chosen):
            block = Word(vector.extract(x.registers.flat[0], [], [0]))
            warp.put(warp.element(selection, *address, (i, 4)), block, only)

    warp.each(put, [selection], [b, token, g, length, end], chosen, ROW_PER_WARP.reduce(1))


def _batcher(n: int):
    """Return the comparisons of Batcher's odd-even merge sort for `n` elements, in order."""
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(j, min(j + k, n - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        yield i, i + k
            k //= 2
        p *= 2

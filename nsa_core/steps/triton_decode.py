"""Runs a decode step on the Triton kernels `partials` and `finish`, for either framework."""

from kernels_pallas.kernel import Array, float32, int32
from kernels_pallas.triton.descriptions import Problem
from kernels_pallas.triton.kernel import TritonKernel, cdiv
from kernels_pallas.triton.tiling import power, precision
from nsa_core.array_ops import ArrayOps
from nsa_core.paged_layout import PagedArrays
from nsa_core.validate import dtype_name

SPLIT = 256  # number of keys per split; the splits determine the order of sums
PARTS = 4  # number of programs that share the selected blocks of a query
CANDIDATES = 4096  # maximum number of compressed tokens that are scored at a time
ROWS = 32  # maximum number of rows in a tile of queries; more rows spill registers


def attention(
    ops: ArrayOps,
    query,
    gates,
    cache: PagedArrays,
    page_table,
    lengths,
    scale: float | None,
):
    """Return `(out, indices)`, which are `[N, H, Dv]` and int32 `[N, Hkv, n]`.

    Each of the B rows has `N / B` queries.

    The arguments are the same as in `nsa_torch.paged_attention`.
    """
    config, (batch, pages) = cache.config, page_table.shape
    tokens, heads, width = query.shape
    n, page, stride = config.num_selected, config.select_block, config.compress_stride
    p = Problem(
        *(batch, tokens // batch, pages * page, heads, cache.kv_heads),
        *(width, cache.selected_value.shape[3], dtype_name(query)),
        float(width**-0.5 if scale is None else scale),
        ops.capability(query),
    )
    at = page_table, lengths
    keys, values = cache.sources("key"), cache.sources("value")

    def scales(*names):
        found = [getattr(cache, f"{name}_scale", None) for name in names]
        return [
            lengths if x is None else x for x in found
        ]  # kernels do not read missing scales

    candidates = max(
        config.num_compressed(p.S), 1
    )  # maximum number of compressed tokens per row
    splits = cdiv(candidates, SPLIT)
    windows = cdiv(min(config.window + p.T - 1, p.S), SPLIT) if config.window else 0
    scalars = pages, cache.num_pages, splits, windows, candidates, p.log2_scale

    def described(function, programs, outputs, tiling, wide=False, **constants):
        # Products in float32, and products of 8-bit operands, keep their operands in registers.
        wide |= p.dtype == "float32" or cache.is_fp8
        return TritonKernel.of(
            f"decode:{function}",
            p.pairs * programs,
            scalars,
            outputs,
            (8 if wide else tiling.warps, tiling.stages),
            HEADS=p.Hkv,
            GROUP=p.group,
            QUERIES=p.T,
            WIDTH=p.D,
            VALUE_WIDTH=p.Dv,
            COMPRESS_BLOCK=config.compress_block,
            COMPRESS_STRIDE=stride,
            PAGE=page,
            WINDOW=config.window,
            SPLIT=SPLIT,
            PRECISION=precision(p.dtype),
            FP8=cache.is_fp8,
            KEYS=tiling.keys,
            **constants,
        )

    rows, count = p.T * p.group, splits + windows  # query rows of a key/value head
    tiling = p.tiling("forward", min(power(rows), ROWS), 64)
    tiles, of_splits = cdiv(rows, tiling.rows), (p.pairs, rows, count)
    outputs = [
        float32(p.pairs, rows, candidates),
        *[float32(*of_splits)] * 2,
        float32(*of_splits, p.Dv),
        int32(p.pairs, p.T),
    ]
    sizes = {"ROWS": tiling.rows, "ROW_TILES": tiles}
    partials = described("partials", tiles * count, outputs, tiling, **sizes)
    compressed = cache.compressed_key, cache.compressed_value
    split = scales(values.compressed, keys.sliding, values.sliding)
    found = ops.run(partials, query, *compressed, *cache.sliding, *split, *at)

    parts, group_rows = min(PARTS, n), power(p.group)
    ratio_columns = power(page // stride, 1)
    blocks = power(min(pages, CANDIDATES // ratio_columns), 2)
    # The shape of the statistics that the programs of the kernel `finish` pass to each other.
    handed = p.pairs * p.T * parts, group_rows
    outputs = [
        Array((tokens, heads, p.Dv), p.dtype),
        int32(tokens, p.Hkv, n),
        *[float32(*handed)] * 2,
        *[float32(*handed, p.Dv)] * 2,
    ]
    finish = described(
        "finish",
        p.T * parts,
        outputs,
        p.tiling("forward", group_rows, min(power(page), 64)),
        wide=blocks * ratio_columns >= 2048,
        N=n,
        NUM_INITIAL=config.num_initial,
        NUM_LOCAL=config.num_local,
        BEST=power(n, 2),
        BLOCKS=blocks,
        RATIO_COLUMNS=ratio_columns,
        HEADS_A_STEP=min(4, power(p.group, 1)),
        PARTS=parts,
        GROUP_ROWS=group_rows,
    )
    selected = cache.selected_key, cache.selected_value
    chosen = scales(keys.selected, values.selected)
    out, indices, *_ = ops.run(finish, query, *selected, *chosen, *at, gates, *found)
    return out, indices

"""A decode step on Triton kernels, for either framework: `partials`, then `finish`."""

from kernels_pallas.triton.decode_descriptions import Decode
from kernels_pallas.triton.descriptions import Problem
from nsa_core.array_ops import ArrayOps
from nsa_core.paged_layout import PagedArrays
from nsa_core.validate import dtype_name


def attention(
    ops: ArrayOps,
    query,
    gates,
    cache: PagedArrays,
    page_table,
    lengths,
    scale: float | None,
):
    """`(out, indices)`: `[N, H, Dv]` and int32 `[N, Hkv, n]` of `N / B` queries a row.

    Args as of `nsa_torch.paged_attention`.
    """
    config, (batch, pages) = cache.config, page_table.shape
    tokens, heads, width = query.shape
    problem = Problem(
        B=batch,
        T=tokens // batch,
        S=pages * config.select_block,
        H=heads,
        Hkv=cache.kv_heads,
        D=width,
        Dv=cache.selected_value.shape[3],
        dtype=dtype_name(query),
        scale=float(width**-0.5 if scale is None else scale),
        capability=ops.capability(query),
    )
    decode, pool = Decode(problem, config, cache.is_fp8), cache.num_pages
    at = page_table, lengths
    keys, values = cache.sources("key"), cache.sources("value")

    def scales(*names):
        found = [getattr(cache, f"{name}_scale", None) for name in names]
        return [lengths if x is None else x for x in found]  # which nobody reads

    compressed = cache.compressed_key, cache.compressed_value
    split = scales(values.compressed, keys.sliding, values.sliding)
    partials = decode.partials(pool)
    found = ops.run(partials, query, *compressed, *cache.sliding, *split, *at)
    selected = cache.selected_key, cache.selected_value
    chosen = scales(keys.selected, values.selected)
    finish = decode.finish(pool)
    out, indices, *_ = ops.run(finish, query, *selected, *chosen, *at, gates, *found)
    return out, indices

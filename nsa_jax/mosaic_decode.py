"""A decode step on the Mosaic kernel, for either framework: one launch.

It has not run on a GPU yet, so no plan takes it.
"""

from kernels_pallas.mosaic.capability import interpret
from kernels_pallas.specs.decode import Decode, decode, with_variant
from nsa_jax.array_ops import ArrayOps
from nsa_jax.paged_layout import PagedArrays
from nsa_jax.types import Branches
from nsa_jax.validate import dtype_name


def attention(
    ops: ArrayOps,
    query,
    gates: Branches,
    cache: PagedArrays,
    page_table,
    lengths,
    scale: float | None,
):
    """`(out, indices)`: `[N, H, Dv]` and int32 `[N, Hkv, n]` of `N / B` queries a row.

    Args as of `nsa_torch.paged_attention`.

    Raises:
      NotImplementedError: there is no such kernel (`specs.decode.why_not`).
    """
    config, (rows, pages) = cache.config, page_table.shape
    tokens, heads, width = query.shape
    spec = Decode(
        B=rows,
        q_len=tokens // rows,
        H=heads,
        Hkv=cache.kv_heads,
        D=width,
        Dv=cache.selected_value.shape[3],
        compress_block=config.compress_block,
        stride=config.compress_stride,
        block=config.select_block,
        n=config.num_selected,
        num_initial=config.num_initial,
        num_local=config.num_local,
        window=config.window,
        pages=cache.num_pages,
        table_pages=pages,
        dtype=dtype_name(query),
        scale=float(width**-0.5 if scale is None else scale),
        separate_gates=True,
        interpret=interpret.get(),
    )
    compressed = cache.compressed_key, cache.compressed_value
    selected = cache.selected_key, cache.selected_value
    return ops.run(
        decode(with_variant(spec)),
        query,
        *map(ops.to_float32, gates),
        *(page_table, lengths),
        *compressed,
        *selected,
        *cache.sliding,
    )

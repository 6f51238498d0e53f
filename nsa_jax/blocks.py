"""Attention to blocks of keys that the caller chose. Keys and values are in arrays
(`block_attention`) or in pages (`paged_block_attention`)."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from nsa_core import block_lists, validate
from nsa_core.array_ops import masked
from nsa_core.steps import triton_paged_blocks
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_jax import checks, geometry
from nsa_jax.api import Name, OutLse, choices_of, function_of
from nsa_jax.chunks import over_queries
from nsa_jax.eager import any_rank, compiled, custom_vjp, foldable, refuse_derivatives
from nsa_jax.indexers import capability, runs_on
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.numerics import logits_of, softmax, weighted

type Lengths = int | Int[Array, ""] | Int[Array, " B"] | None


@any_rank
def block_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    block_indices: Int[Array, "B T G n"],
    *,
    block_size: int,
    scale: float | None = None,
    include: Literal["selected", "tail"] = "selected",
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Lengths = None,
    segment_ids: Int[Array, "B S"] | None = None,
    return_residual: bool = False,
    implementation: Name | None = None,
) -> Float[Array, "B T H Dv"] | OutLse:
    """Compute causal attention of each query to the key blocks in its list. One softmax covers
    the keys of all blocks in the list.

    Block `j` contains the tokens `range(j * block_size, (j + 1) * block_size)` of the query's
    sequence. A query attends to the tokens of its listed blocks at or before its own position. The
    queries are the last `T` of the `S` tokens. Query, key and value receive gradients through the
    output and through the log-sum-exp. On `mosaic` and `triton` the gradients are deterministic,
    since sums have a fixed order. Arguments that also exist in `jax.nn.dot_product_attention` have
    the same names.

    Args:
      query: `[B, T, H, D]`, floating point.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`.
      block_indices: int32 `[B, T, G, n]`. `G` is the number of lists per token and divides `H`.
        List `g` serves the query heads `range(g * H / G, (g + 1) * H / G)`. `G` is a divisor of
        `Hkv`, often 1, or a multiple of `Hkv`. If `G` is a multiple of `Hkv`, keys and values are
        repeated. The entries of a list may have any order, and negative entries are empty. Blocks
        after the query's own block, or beyond the last key, are masked. A list must not contain a
        block twice, since the keys of this block would count twice.
      block_size: tokens per block, any positive number. For lists of up to 64 blocks, `mosaic`
        supports multiples of 16 up to 128, and `triton` supports any size up to 128. `mosaic` and
        `triton` also support larger multiples of 64. `mosaic` and `triton` split blocks of more
        than 128 tokens into parts of 128 tokens, or of 64 tokens if 128 is no divisor. A list may
        have up to 64 parts. Longer lists run on `triton` for any block size, unless rows are packed
        or `query_seq_lengths` is given.
      scale: factor of the logits; None means `D**-0.5`.
      include: `include="selected"` means that a query attends only to the blocks in its list.
        `include="tail"` means that a query also attends to its own block, unless the query is the
        last token of that block. The lists must not contain a block that `include="tail"` adds.
      query_seq_lengths: int32 `[B]`, number of valid queries, which are the first queries of a row.
        `query_seq_lengths=None` means `T`.
      key_value_seq_lengths: number of valid keys, an int or int32 `[]` or `[B]`.
        `key_value_seq_lengths=None` means `S`. The last valid query has the position of the last
        valid key.
      segment_ids: int `[B, S]`, the ids of packed rows (see `nsa_jax.attention`). In packed rows,
        block indices count from the start of each sequence.
      return_residual: whether to return the log-sum-exp too.
      implementation: as in `selected_attention`.

    Returns:
      The output `[B, T, H, Dv]` in the dtype of `query`. The output is 0 for a query that attends
      to no key. With `return_residual` the function also returns the natural log-sum-exp `[B, T,
      H]` in float32. The log-sum-exp is -inf for a query that attends to no key. To add an
      attention sink with logit `s`, compute
      `out * sigmoid(lse - s)`.

    Raises:
      ValueError: Shapes or dtypes do not fit, or a list contains a block twice. Outside traced
        code, repeated blocks are detected on a CPU, and on other devices while `nsa_core.debug` is
        on.
      NotImplementedError: The named implementation cannot run this call.
    """
    arrays = query, key, value, block_indices
    block_lists.check(*arrays, block_size, include, scale)
    block_size = block_lists.within(block_size, key.shape[1])
    validate.segments(segment_ids, *key.shape[:2])
    (batch, length), keys, kv_heads = query.shape[:2], *key.shape[1:3]
    kv_len, there = key_value_seq_lengths, None
    least, name = None if query_seq_lengths is None else 0, "key_value_seq_lengths"
    validate.length(kv_len, query, segment_ids, keys, name, least)
    checks.within(name, kv_len, 0, keys)
    if query_seq_lengths is not None:
        if segment_ids is not None:
            raise ValueError(
                "query_seq_lengths must be None if segment_ids are given, got both"
            )
        validate.array("query_seq_lengths", query_seq_lengths, (batch,), ("int32", "int64"))
        checks.within("query_seq_lengths", query_seq_lengths, 0, length)
        kv_len = keys if kv_len is None else kv_len
        key, value = (geometry.without_padding(x, kv_len, None) for x in (key, value))
        query_seq_lengths = jnp.asarray(query_seq_lengths, jnp.int32)
        there = jnp.arange(length, dtype=jnp.int32) < query_seq_lengths[:, None]
        (query,) = masked(jnp, there, query)
        block_indices = jnp.where(there[..., None, None], block_indices, -1)
        # Padding after the queries has an empty list.
        kv_len = jnp.asarray(kv_len, jnp.int32) + length - query_seq_lengths
    entries = block_indices.shape[-1]
    long = entries > block_lists.MAX_ENTRIES and implementation in (None, "triton")
    if long and segment_ids is None and query_seq_lengths is None:
        how = block_size, include, scale
        of = capability(), *arrays, block_size, include
        if runs_on(None, query, triton_paged_blocks.why_not(*of, whole=True)) == "triton":
            checks.distinct(block_indices)
            lengths = jnp.asarray(keys if kv_len is None else kv_len, jnp.int32)
            lengths = jnp.broadcast_to(lengths, (batch,))
            found = compiled(_gathered)(how, *arrays, lengths)
            return found if return_residual else found[0]
    if include == "tail":
        config = block_lists.config_of(block_size, entries)
        at = {"kv_len": keys if kv_len is None else kv_len, "segment_ids": segment_ids}
        position = geometry.query_layout(batch, length, **at, config=config).position
        if there is not None:
            position = jnp.where(there, position, -1)
        block_indices = block_lists.with_tail(jnp, block_indices, position, block_size)
        entries += 1
    checks.distinct(block_indices)
    parts, config = block_lists.split(block_size, entries)
    sizes = {"parts": parts, "keys": keys, "block_size": block_size, "kv_heads": kv_heads}
    found = compiled(_for_kernels)(block_indices, **sizes)
    repeats = found.shape[2] // kv_heads
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    about = query, key, value.shape[-1], config, segment_ids, implementation, "selected"
    where = {"config": config, "kv_len": kv_len, "segment_ids": segment_ids, "scale": scale}
    out, lse = function_of(choices_of(*about).selected)(query, key, value, found, **where)
    return (out, lse) if return_residual else out


@functools.partial(custom_vjp, static=1)
def _gathered(how, query, key, value, lists, lengths):
    """Compute `(out, lse)` with the kernels that gather single keys. The gradients of the
    gathering kernels are computed in chunks of queries.
    """

    def run(*arrays):
        return tuple(triton_paged_blocks.attention_of_rows(OPS, *arrays, *how))

    return foldable(run)(query, key, value, lists, lengths)


def _gathered_forward(how, *arrays):
    return _gathered(how, *arrays), arrays


def _gathered_backward(how, arrays, grads):
    query, key, value, lists, lengths = arrays
    block_size, include, scale = how
    options: dict[str, Any] = {"block_size": block_size, "include": include, "scale": scale}
    options |= {"key_value_seq_lengths": lengths, "implementation": "xla"}
    plain = lambda q, k, v: block_attention(q, k, v, lists, **options, return_residual=True)
    _, pull = jax.vjp(plain, query, key, value)
    return *pull(grads), None, None


_gathered.defvjp(_gathered_forward, _gathered_backward)


_for_kernels = functools.partial(block_lists.for_kernels, OPS)


@any_rank
def paged_block_attention(
    query: Float[Array, "N H D"],
    key_pages: Float[Array, "P page Hkv D"],
    value_pages: Float[Array, "P page Hkv Dv"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    block_indices: Int[Array, "N G n"],
    *,
    block_size: int,
    scale: float | None = None,
    include: Literal["selected", "tail"] = "selected",
    cu_seqlens_q: Int[Array, " B1"] | None = None,
    return_residual: bool = False,
    implementation: Literal["triton", "xla"] | None = None,
) -> Float[Array, "N H Dv"] | tuple[Float[Array, "N H Dv"], Float[Array, "N H"]]:
    """Compute `block_attention` of each row's last tokens to the row's keys and values in
    pages. The result is `[N, H, Dv]`. The kernels read only the listed blocks.

    Args:
      query: `[N, H, D]`, the queries of all rows, one row after the other.
      key_pages, value_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`; a page may have any number
        of tokens.
      page_table: int32 `[B, M]`, the pages of each row in the order of its tokens.
      lengths: int32 `[B]`, tokens per row including the tokens of the queries. A row of length 0 is
        unused.
      block_indices: int32 `[N, G, n]`, as in `block_attention`.
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first query, then the end of the last
        row, at most `N`. `cu_seqlens_q=None` means that all rows have the same number of queries.
      block_size, scale, include, return_residual: as in `block_attention`; a block may have any
        number of tokens.
      implementation: `triton` (GPUs since Ampere), `xla` (gathers and a softmax), or None for the
        first of them that can run.

    Raises:
      ValueError: Shapes or dtypes do not fit. If the host reads the indices, `ValueError` is also
        raised for a block that a list contains twice, and for the index of a missing page.
      NotImplementedError: A gradient is required, or the named implementation cannot run this call.
    """
    arrays = query, key_pages, value_pages, block_indices
    if cu_seqlens_q is not None:
        # arrays of NumPy do not support a traced index
        cu_seqlens_q = jnp.asarray(cu_seqlens_q)
    paged = Paged(page_table, lengths, cu_seqlens_q)
    how = block_size, include, scale
    block_size = block_lists.check_paged(OPS, checks.read, *arrays, paged, *how)
    of = capability(), *arrays, block_size, include
    name = runs_on(implementation, query, triton_paged_blocks.why_not(*of))
    no_gradient = (
        "paged_block_attention has no gradient; pass jax.lax.stop_gradient of the arrays"
    )
    query, *pages = refuse_derivatives(no_gradient, arrays[:3])
    options = {"name": name, "block_size": block_size, "include": include, "scale": scale}
    found = compiled(_paged)(query, tuple(pages), block_indices, paged, **options)
    return found if return_residual else found[0]


def _paged(query, pages, lists, paged: Paged, *, name: str, block_size, include, scale):
    how = block_size, include, scale

    def attend(query, keys, values, seen, scale):
        probs, lse = softmax(logits_of("tlgd,tlsd->tlgs", query, keys, scale), seen)
        return weighted("tlgs,tlsd->tlgd", probs, values).astype(query.dtype), lse

    def on_triton(query, pages, lists, paged):
        key, value = pages
        arrays = query, key, value, lists
        return tuple(triton_paged_blocks.attention(OPS, *arrays, paged, *how))

    if name == "triton":
        return sequential_vmap(on_triton)(query, pages, lists, paged)
    keys, values = pages
    arrays = query, keys, values, lists
    return block_lists.attention_to_pages(OPS, over_queries, attend, *arrays, paged, *how)

"""Indexers, which choose the blocks of a query (`index_blocks`), and their loss."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from kernels_pallas.triton.capability import AMPERE, copies_why_not
from nsa_core import index as indexing
from nsa_core import paged_layout, validate, validate_paged
from nsa_core.index import Index
from nsa_core.steps import triton_index, triton_paged_blocks
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_jax import checks, geometry, jax_problem
from nsa_jax.batching import foldable
from nsa_jax.chunks import over_queries
from nsa_jax.eager import any_rank, compiled
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.numerics import precision_of, wide
from nsa_jax.select import choose

PLAIN = "xla"


@any_rank
def index_blocks(
    index_query: Float[Array, "B T Hi Di"],
    index_key: Float[Array, "B S1 Di"],
    *,
    pool: int = 128,
    num_selected: int = 16,
    num_initial: int = 0,
    num_local: int = 1,
    activation: str | None = None,
    reduce: str | None = None,
    entry: int = 1,
    kv_len: int | Int[Array, ""] | Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    implementation: Literal["triton", "xla"] | None = None,
) -> Int[Array, "B T G n"]:
    """The key blocks with the highest scores of an indexer, without gradient.

        s[t, h, r] = activation(index_query[t, h] . index_key[r])      of the keys that t sees
        z[t, h, j] = max of s over the `pool` keys of block j           (reduce: of sum_h s)

    in float32. The lists contain the first `num_initial` blocks, the last `num_local` up to the
    query's own, and those of the highest z. If scores are equal, the lower block is chosen. No
    array of queries times keys is allocated: the plain implementation processes chunks of queries.

    Args:
      index_query: `[B, T, Hi, Di]`, float; the queries are the last `T` tokens.
      index_key: `[B, S', Di]`, one key head; key `r` represents the tokens `entry * r ..
        entry * r + entry - 1`, and is visible from the last of them on.
      pool: keys per block, which has `pool * entry` tokens.
      num_selected: `n`, the maximum of blocks per query, including the forced ones.
      num_initial, num_local: forced blocks, as in `NSAConfig`.
      activation: `relu` or None.
      reduce: `sum` makes one list for all heads; None makes one list per head.
      kv_len: number of tokens, an int or int32 `[]` or `[B]`. None means `S'`, or `T` if `entry` is
        above 1.
      segment_ids: int `[B, S']` of packed rows, `entry` 1; blocks are local to the sequence.
      implementation: `triton`, `xla`, or None for the first that can run. `triton` needs a GPU
        since Ampere, a `pool` of a power of two up to 256, and no packed rows. It writes no scores
        if up to 64 blocks of 16 keys or more are chosen per head. Otherwise it writes up to 256 MB
        of scores at a time, for up to 32768 blocks per row.

    Returns:
      int32 `[B, T, Hi or 1, n]`, ascending, -1 in empty slots at the end: `block_indices` of
      `block_attention` with `block_size = pool * entry`.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    forced = num_initial, num_local
    index = Index(pool, num_selected, *forced, activation, reduce, entry)
    index = indexing.check(index_query, index_key, index, segment_ids is not None)
    batch, length = index_query.shape[:2]
    validate.length(kv_len, index_query, segment_ids)
    checks.within("kv_len", kv_len, 0, (index_key.shape[1] + 1) * entry - 1)
    validate.segments(segment_ids, batch, index_key.shape[1])
    if segment_ids is None:
        tokens = indexing.key_length(kv_len, length, index_key.shape[1], entry)
    else:
        tokens = length
    index_query, index_key = lax.stop_gradient((index_query, index_key))
    name = runs_on(
        *(implementation, index_query, segment_ids is not None and "takes no packed rows"),
        triton_index.why_not(index_query, index_key, index),
    )
    run = compiled(_on_triton if name == "triton" else _in_chunks)
    at = {"kv_len": tokens, "segment_ids": segment_ids}
    return run(index_query, index_key, index=index, **at)


@any_rank
def paged_index_blocks(
    index_query: Float[Array, "N Hi Di"],
    index_key_pages: Float[Array, "P page Di"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    *,
    pool: int = 128,
    num_selected: int = 16,
    num_initial: int = 0,
    num_local: int = 1,
    activation: str | None = None,
    reduce: str | None = None,
    entry: int = 1,
    cu_seqlens_q: Int[Array, " B1"] | None = None,
    implementation: Literal["triton", "xla"] | None = None,
) -> Int[Array, "N G n"]:
    """`index_blocks` of each row's last tokens with keys in pages: the lists of
    `paged_block_attention`.

    Args:
      index_query: `[N, Hi, Di]`, the rows' tokens one after the other.
      index_key_pages: `[P, page, Di]`, one key head; a page has `page * entry` tokens.
      page_table: int32 `[B, M]`, the pages of each row in the order of its tokens.
      lengths: int32 `[B]`, tokens per row including the queries' own; 0 means no row.
      pool, num_selected, num_initial, num_local, activation, reduce, entry: see `index_blocks`.
      cu_seqlens_q: int32 `[B + 1]`, where each row's queries begin. None means that all rows have
        the same number.
      implementation: `triton` (GPUs since Ampere, `pool` a power of two up to 256, tables of up to
        32768 blocks), `xla` (copies the keys of all rows), or None for the first that can run.

    Returns:
      int32 `[N, Hi or 1, n]`, ascending, -1 in empty slots at the end.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    chosen = num_selected, num_initial, num_local
    index = Index(pool, *chosen, activation, reduce, entry)
    arrays = index_query, index_key_pages, page_table, lengths
    index = indexing.check_paged(*arrays, cu_seqlens_q, index)
    pages, keys = index_key_pages.shape[:2]
    at = page_table, lengths, cu_seqlens_q, index_query.shape[0]
    validate_paged.numbers(checks.read, *at, pages, keys * entry)
    query, pages = lax.stop_gradient(arrays[:2])
    paged = Paged(page_table, lengths, cu_seqlens_q)

    reason = triton_paged_blocks.index_why_not(query, pages, page_table, index)
    name = runs_on(implementation, query, reason)
    run = compiled(_paged_on_triton if name == "triton" else _of_copies)
    return run(query, pages, paged, index=index)


def runs_on(asked: str | None, query: Array, *reasons: str | bool | None) -> str:
    """`triton` or `xla`, as `nsa_core.index.implementation`."""
    found = jax_problem.capability()
    if found is None:
        reason = f"needs an NVIDIA GPU, got {jax.default_backend()}"
    else:
        reason = copies_why_not(found, query.dtype, "jax")
    return indexing.implementation(asked, PLAIN, *reasons, reason)


def capability() -> tuple[int, int]:
    """The compute capability of JAX's device, or that of any GPU if it has none."""
    return jax_problem.capability() or AMPERE


def _paged_on_triton(query, pages, paged: Paged, *, index: Index):
    from nsa_jax.triton_ops import TRITON_OPS

    @sequential_vmap
    def run(query, pages, paged):
        return triton_paged_blocks.blocks(TRITON_OPS, query, pages, paged, index)

    return run(query, pages, paged)


def _of_copies(query, pages, paged: Paged, *, index: Index):
    """The lists from contiguous copies of the keys of all rows."""
    page_table, lengths, cu_seqlens_q = paged
    count, (batch, columns) = query.shape[0], page_table.shape
    lengths = jnp.minimum(lengths, columns * pages.shape[1] * index.entry)
    tokens = paged_layout.tokens_of(OPS, lengths, cu_seqlens_q, count)
    key = pages[jnp.clip(page_table, 0, pages.shape[0] - 1)]
    key = key.reshape(batch, -1, pages.shape[2])
    longest = count // batch if cu_seqlens_q is None else count
    rows = paged_layout.pad_queries(OPS, tokens, lengths, cu_seqlens_q, longest)
    position = jnp.where(rows.there, tokens.position[rows.token], -1)
    found = _at(query[rows.token], key, position, None, index)
    flat = jnp.clip(rows.flat, 0, batch * longest - 1)
    return found.reshape(batch * longest, *found.shape[2:])[flat]


def _on_triton(query, key, *, index: Index, **at):
    from nsa_jax.triton_ops import TRITON_OPS

    where = geometry.query_layout(*query.shape[:2], **at, config=index.config)
    tokens = at["kv_len"]
    offset = tokens - query.shape[1] if isinstance(tokens, int) else None

    def blocks(query, key, position):
        return triton_index.blocks(TRITON_OPS, query, key, position, index, offset)

    return foldable(blocks)(query, key, jnp.asarray(where.position, jnp.int32))


def _in_chunks(query, key, *, index: Index, **at):
    where = geometry.query_layout(*query.shape[:2], **at, config=index.config)
    start = where.key_start if at["segment_ids"] is not None else None
    return _at(query, key, where.position, start, index)


def _at(query, key, position, key_start, index: Index):
    """The blocks of queries at positions `[B, T]`; `key_start` is None unless rows are packed."""
    batch, _, heads, _ = query.shape
    rows, config, packed = key.shape[1], index.config, key_start is not None
    # A block of the query's own may have no key yet.
    blocks = index.num_blocks(rows) + (index.entry > 1)

    def chosen(query, position, start, key):
        dtype = wide(query.dtype)
        scores = jnp.einsum(
            "bqhd,bsd->bqhs",
            query,
            key,
            precision=precision_of(query.dtype),
            preferred_element_type=dtype,
        )
        if index.activation == "relu":
            scores = jnp.maximum(scores, 0)
        if index.reduce == "sum":
            scores = scores.sum(axis=2, keepdims=True)
        row = jnp.arange(rows, dtype=jnp.int32)
        if packed:  # blocks begin with the sequence
            local = jnp.minimum(row + start[..., None], rows - 1)[:, :, None]
            scores = jnp.take_along_axis(scores, local, axis=-1)
        seen = (row + 1) * index.entry <= position[..., None] + 1
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        spare = ((0, 0),) * 3 + ((0, blocks * index.pool - rows),)
        scores = jnp.pad(scores, spare, constant_values=-jnp.inf)
        scores = scores.reshape(*scores.shape[:3], blocks, index.pool).max(axis=-1)
        own = jnp.broadcast_to((position // config.select_block)[..., None], scores.shape[:3])
        return choose(scores, own, config)

    arrays = query, position, key_start if packed else position
    return over_queries(chosen, arrays, (key,), batch * heads * max(rows, 1) * 8)

"""Functions for indexers. An indexer is a small scorer that selects key blocks for each query.
`indexer_kl` is the loss that trains an indexer.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from kernels_pallas.triton.capability import AMPERE, copies_why_not
from nsa_core import block_lists, validate
from nsa_core import index as indexing
from nsa_core.array_ops import zero_padding
from nsa_core.index import Index, Teacher
from nsa_core.steps import triton_index, triton_paged_blocks
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_jax import checks, geometry, jax_problem
from nsa_jax.chunks import over_queries
from nsa_jax.eager import any_rank, compiled, custom_vjp, foldable
from nsa_jax.jax_ops import JAX_OPS as OPS

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
    """Select the key blocks with the highest scores of an indexer, without gradient.

        s[t, h, r] = activation(index_query[t, h] . index_key[r])      of the keys that t sees
        z[t, h, j] = max of s over the `pool` keys of block j           (reduce: of sum_h s)

    The scores are computed in float32. A list contains the first `num_initial` blocks, the last
    `num_local` blocks up to the query's own block, and the blocks with the highest z. If scores are
    equal, the block with the lower index is chosen. No array of size queries times keys is
    allocated. The implementation `xla` processes chunks of queries.

    Args:
      index_query: `[B, T, Hi, Di]`, floating point; the queries are the last `T` tokens.
      index_key: `[B, S', Di]`, one key head. Key `r` represents the tokens
        `range(entry * r, entry * (r + 1))`. Only queries at or after the last token of key `r` use
        this key.
      pool: number of index keys per block. A block has `pool * entry` tokens.
      num_selected: `n`, the maximum number of blocks per query, including those that
        `num_initial` and `num_local` force.
      num_initial, num_local: numbers of blocks that every list contains, as in `NSAConfig`.
      activation: `relu` or None.
      reduce: `sum` adds the scores of all index heads and makes one list. `reduce=None` makes one
        list per index head.
      entry: number of tokens that one index key represents.
      kv_len: number of tokens, an int or int32 `[]` or `[B]`. `kv_len=None` means `S'`, or `T` if
        `entry` is above 1.
      segment_ids: int `[B, S']`, the ids of packed rows, which require `entry=1` and `S' = T`. In
        packed rows, block indices count from the start of each sequence.
      implementation: `triton`, `xla`, or None for the first that can run. `triton` needs an Ampere
        GPU or newer, at most 64 index heads of at most 256 columns, a `pool` that is a power of two
        up to 256, and rows that are not packed. `triton` writes no scores to memory if `activation`
        and `reduce` are None, `num_selected <= 64` and `pool >= 16`. If `triton` writes scores, it
        supports up to 32768 blocks per row, and writes up to 256 MiB of scores at a time.

    Returns:
      The selected blocks, int32 `[B, T, Hi or 1, n]`, ascending, with -1 in empty slots at the
      end. Pass the result as `block_indices` to `block_attention`, with `block_size = pool *
      entry`.

    Raises:
      ValueError: Shapes, dtypes or sizes do not fit.
      NotImplementedError: The named implementation cannot run this call.
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
        *(
            implementation,
            index_query,
            segment_ids is not None and "does not support packed rows",
        ),
        triton_index.why_not(index_query, index_key, index),
    )
    at = {"kv_len": tokens, "segment_ids": segment_ids}
    return compiled(_blocks)(index_query, index_key, name=name, index=index, **at)


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
    """Select blocks for the last tokens of each row, with index keys in pages. Pass the result
    as `block_indices` to `paged_block_attention`.

    Args:
      index_query: `[N, Hi, Di]`, the queries of all rows, one row after the other.
      index_key_pages: `[P, page, Di]`, one key head; a page has `page * entry` tokens.
      page_table: int32 `[B, M]`, the pages of each row in the order of its tokens.
      lengths: int32 `[B]`, tokens per row including the tokens of the queries. A row of length 0 is
        unused.
      pool, num_selected, num_initial, num_local, activation, reduce, entry: see `index_blocks`.
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first query, then the end of the last
        row, at most `N`. `cu_seqlens_q=None` means that all rows have the same number of queries.
      implementation: `triton`, `xla`, or None for the first that can run. `triton` needs an
        Ampere GPU or newer, at most 64 index heads of at most 256 columns, a `pool` that is a
        power of two up to 256, and page tables of at most 32768 blocks. `xla` copies the keys of
        all rows.

    Returns:
      The selected blocks, int32 `[N, Hi or 1, n]`, ascending, -1 in empty slots at the end.

    Raises:
      ValueError: Shapes, dtypes or sizes do not fit.
      NotImplementedError: The named implementation cannot run this call.
    """
    paged = Paged(page_table, lengths, cu_seqlens_q)
    chosen = num_selected, num_initial, num_local
    index = Index(pool, *chosen, activation, reduce, entry)
    index = indexing.check_paged(checks.read, index_query, index_key_pages, paged, index)
    query, pages = lax.stop_gradient((index_query, index_key_pages))
    reason = triton_paged_blocks.index_why_not(query, pages, page_table, index)
    name = runs_on(implementation, query, reason)
    run = compiled(_paged_on_triton if name == "triton" else _of_copies)
    return run(query, pages, paged, index=index)


def runs_on(asked: str | None, query: Array, *reasons: str | bool | None) -> str:
    """Return the implementation that `nsa_core.index.implementation` chooses, `triton` or
    `xla`."""
    found = jax_problem.capability()
    if found is None:
        reason = f"needs an NVIDIA GPU, got {jax.default_backend()}"
    else:
        reason = copies_why_not(found, query.dtype, "jax")
    return indexing.implementation(asked, PLAIN, *reasons, reason)


def capability() -> tuple[int, int]:
    """Return the compute capability of JAX's device, or `AMPERE` if that device has none."""
    return jax_problem.capability() or AMPERE


def _paged_on_triton(query, pages, paged, *, index: Index):
    blocks = functools.partial(triton_paged_blocks.blocks, OPS, index=index)
    return sequential_vmap(blocks)(query, pages, paged)


_of_copies = functools.partial(indexing.blocks_of_pages, OPS, over_queries)


def _blocks(query, key, *, name: str, index: Index, **at):
    where = geometry.query_layout(*query.shape[:2], **at, config=index.config)
    if name == PLAIN:
        start = where.key_start if at["segment_ids"] is not None else None
        return indexing.blocks_at(OPS, over_queries, query, key, where.position, start, index)
    tokens = at["kv_len"]
    offset = tokens - query.shape[1] if isinstance(tokens, int) else None

    def blocks(query, key, position):
        return triton_index.blocks(OPS, query, key, position, index, offset)

    return foldable(blocks)(query, key, jnp.asarray(where.position, jnp.int32))


@any_rank
def indexer_kl(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    lse: Float[Array, "B T H"],
    index_query: Float[Array, "B T Hi Di"],
    index_key: Float[Array, "B S Di"],
    block_indices: Int[Array, "B T G n"] | None = None,
    *,
    block_size: int | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    kv_len: int | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    implementation: Literal["triton", "xla"] | None = None,
) -> Float[Array, "B T Hi"]:
    """Compute the loss KL(attention || indexer) for each query and index head. The loss is a sum
    over the keys `j` that the query attends to:

        t_j = mean over the heads of exp(scale q . k_j - lse)          (no gradient)
        p   = softmax of index_scale index_query . index_key_j
        L   = sum_j t_j (log t_j - log p_j)

    With `block_indices` the sum is over the keys of the listed blocks, as in the sparse stage of
    training. Without `block_indices` the sum is over all keys up to the query, as in dense
    warm-up. Only `index_query` and `index_key` receive gradients. The loss reads no values and
    needs no gradient of the attention's output, so the attention may be frozen. Neither the forward
    nor the backward pass allocates an array of size queries times keys.

    Sources: the indexer loss comes from DeepSeek-V3.2. The mean over the heads of a group comes
      from MiniMax-M3.

    Args:
      query, key: inputs of the attention, `[B, T, H, D]`, `[B, S, Hkv, D]`; the queries are the
        last `T` tokens.
      lse: `[B, T, H]`, the natural log-sum-exp of the attention over the same keys, as
        `block_attention` and `sliding_attention` return it. A value of -inf means that the query
        has no keys, and that its loss is 0.
      index_query, index_key: `[B, T, Hi, Di]`, `[B, S, Di]`. Index head `h` learns from the query
        heads `range(h * H / Hi, (h + 1) * H / Hi)`.
      block_indices: int32 `[B, T, Hi or 1, n]`, as in `block_attention`; None means all keys.
      block_size: tokens per block, if `block_indices` are given.
      scale: factor of the attention's logits; None means `D**-0.5`.
      index_scale: factor of the indexer's logits; None means `Di**-0.5`.
      kv_len: number of keys; None means `S`.
      segment_ids: int `[B, S]`, the ids of packed rows.
      implementation: `triton`, `xla` (a chunk of queries at a time, in both passes), or None for
        the first that can run. `triton` needs an Ampere GPU or newer, `block_indices` with blocks
        of 16, 32, 64 or 128 tokens, rows that are not packed, and a multiple of `Hkv` index heads.
        An index head may serve up to 64 query heads. Attention and indexer must have the same dtype
        and widths of at most 128. In float32 a block may have at most 4096 elements. `triton`
        stores one number per query, index head and listed key. The stored number has 32 bits if
        inputs are float32, and 16 bits for other dtypes.

    Returns:
      The loss, float32 `[B, T, Hi]`. The loss is 0 for padding. The loss is not negative if `lse`
      comes from attention over the same keys. For a scalar loss, compute the mean over the tokens
      that should count.

    Raises:
      ValueError: Shapes or dtypes do not fit.
      NotImplementedError: The named implementation cannot run this call.
    """
    given = query, key, lse, index_query, index_key, block_indices
    teacher = indexing.check_loss(*given, block_size, scale, index_scale)
    validate.segments(segment_ids, *key.shape[:2])
    validate.length(kv_len, query, segment_ids, key.shape[1])
    checks.within("kv_len", kv_len, 0, key.shape[1])
    if block_indices is not None:
        checks.distinct(block_indices)
    name = runs_on(
        *(implementation, query, segment_ids is not None and "does not support packed rows"),
        triton_index.loss_why_not(query, key, index_query, block_indices, teacher.block),
    )
    at = {"kv_len": kv_len, "segment_ids": segment_ids}
    return compiled(_loss)(*given, name=name, teacher=teacher, **at)


def _loss(
    query,
    key,
    lse,
    index_query,
    index_key,
    block_indices,
    *,
    name: str,
    teacher: Teacher,
    kv_len,
    segment_ids,
):
    at = {"kv_len": key.shape[1] if kv_len is None else kv_len, "segment_ids": segment_ids}
    where = geometry.layout_of(query, 0, block_lists.config_of(teacher.block, 1), **at)
    # Index queries and index keys have zeros in place of padding. Without the zeros, a NaN in
    # padding would spread, since the gradient of index queries is a product with index keys, and
    # vice versa.
    indexer = *zero_padding(jnp, where, index_query), geometry.without_padding(index_key, **at)
    frozen = lax.stop_gradient((query, key, lse))
    if name == PLAIN:
        found = indexing.loss_of(OPS, teacher, *frozen, block_indices, where, *indexer)
        return over_queries(*found[1:])
    lists = triton_index.lists_for(OPS, block_indices, index_query, key.shape[1], teacher.block)
    position = jnp.asarray(where.position, jnp.int32)
    lse = jnp.asarray(frozen[2], jnp.float32)
    return _kernel_loss(teacher, lists, position, *frozen[:2], lse, *indexer)


@functools.partial(custom_vjp, static=1)
def _kernel_loss(teacher, lists, position, *arrays):
    return _kernel_loss_forward(teacher, lists, position, *arrays)[0]


def _kernel_loss_forward(teacher, lists, position, *arrays):
    def run(lists, position, *arrays):
        return triton_index.loss(OPS, arrays, lists, position, teacher)

    loss, kept = foldable(run)(lists, position, *arrays)
    return loss, (*arrays[3:], lists, position, kept)


def _kernel_loss_backward(teacher, residuals, grad):
    def run(*arrays):
        return triton_index.gradients(OPS, teacher, *arrays)

    return *[None] * 5, *foldable(run)(*residuals, grad)


_kernel_loss.defvjp(_kernel_loss_forward, _kernel_loss_backward)

"""Indexers: which blocks a query attends to (`index_blocks`), and what trains them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.triton import capability, index_descriptions
from nsa_core import index as indexing
from nsa_core import validate
from nsa_core.index import Index
from nsa_jax import geometry, jax_problem
from nsa_jax.chunks import over_queries
from nsa_jax.eager import any_rank, compiled
from nsa_jax.numerics import precision_of, wide
from nsa_jax.select import choose

IMPLEMENTATIONS = "triton", "xla"


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
    implementation: str | None = None,
) -> Int[Array, "B T G n"]:
    """The key blocks with the highest scores of an indexer, without gradient.

        s[t, h, r] = activation(index_query[t, h] . index_key[r])      of the keys that t sees
        z[t, h, j] = max of s over the `pool` keys of block j           (reduce: of sum_h s)

    in float32. Chosen are the first `num_initial` blocks, the last `num_local` up to the query's
    own, and those of the highest z; of equal scores the lower block. Never is there an array of
    queries times keys: the plain implementation takes a chunk of queries at a time.

    Args:
      index_query: `[B, T, Hi, Di]`, float; the queries are the last `T` tokens.
      index_key: `[B, S', Di]`, one key head; key `r` stands for the tokens `entry * r ..
        entry * r + entry - 1`, and is seen from the last of them on.
      pool: keys of a block, which has `pool * entry` tokens.
      num_selected: `n`, blocks of a query at most, the forced ones included.
      num_initial, num_local: forced blocks, as of `NSAConfig`.
      activation: `relu` or None.
      reduce: `sum`: one list for all heads; None: a list a head.
      kv_len: number of tokens, an int or int32 `[]` or `[B]`; None: `S'`, with an `entry` above
        1: `T`.
      segment_ids: int `[B, S']` of packed rows, `entry` 1; blocks are local to the sequence.
      implementation: `triton` (a kernel from which no score gets out: GPUs from Ampere on; `pool`
        of 16 to 256, up to 64 blocks, scores of each head, no packed rows), `xla`, or None:
        the first that can.

    Returns:
      int32 `[B, T, Hi or 1, n]`, ascending, -1 in empty slots at the end: `block_indices` of
      `block_attention` with `block_size = pool * entry`.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    forced = num_initial, num_local
    index = Index(pool, num_selected, *forced, activation, reduce, entry)
    indexing.check(index_query, index_key, index, segment_ids is not None)
    batch, length = index_query.shape[:2]
    validate.length(kv_len, index_query, segment_ids)
    validate.segments(segment_ids, batch, index_key.shape[1])
    if segment_ids is None:
        tokens = indexing.key_length(kv_len, length, index_key.shape[1], entry)
    else:
        tokens = length
    index_query, index_key = lax.stop_gradient((index_query, index_key))
    name = _implementation(implementation, index, index_query, index_key, segment_ids)
    run = compiled(_on_triton if name == "triton" else _in_chunks)
    at = {"kv_len": tokens, "segment_ids": segment_ids}
    return run(index_query, index_key, index=index, **at)


def _implementation(asked: str | None, index: Index, query, key, segment_ids) -> str:
    """The name of what runs.

    Raises:
      ValueError: there is none of the name that was asked for.
      NotImplementedError: the one that was asked for cannot.
    """
    if asked not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {asked!r}")
    if asked == "xla":
        return "xla"
    reason = index.kernel_why_not() or index_descriptions.why_not(index.sizes(query, key))
    if segment_ids is not None:
        reason = "takes no packed rows"
    reason = reason or _device_why_not(query)
    if asked == "triton" and reason is not None:
        raise NotImplementedError(f"implementation 'triton' {reason}")
    return "xla" if reason is not None else "triton"


def _device_why_not(query) -> str | None:
    found = jax_problem.capability()
    if found is None:
        return f"needs an NVIDIA GPU, got {jax.default_backend()}"
    return capability.copies_why_not(found, query.dtype, "jax")


def _on_triton(query, key, *, index: Index, **at):
    from nsa_jax.triton_ops import TRITON_OPS

    where = geometry.query_layout(*query.shape[:2], **at, config=index.config)
    kernel = index_descriptions.index_blocks(
        index.sizes(query, key), TRITON_OPS.capability(query)
    )
    position = jnp.asarray(where.position, jnp.int32)
    return TRITON_OPS.run(kernel, query, key, position)[0]


def _in_chunks(query, key, *, index: Index, **at):
    batch, length, heads, _ = query.shape
    rows, config = key.shape[1], index.config
    where = geometry.query_layout(batch, length, **at, config=config)
    packed = at["segment_ids"] is not None
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

    arrays = query, where.position, where.key_start
    return over_queries(chosen, arrays, (key,), batch * heads * max(rows, 1) * 8)

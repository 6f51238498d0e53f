"""Computes the position of each query in its sequence, in the key array and in the compressed
array. The metadata of packed rows is computed once for all layers:

    meta = nsa_jax.varlen_metadata(segment_ids, config=config)
    for layer in layers:  # or jax.lax.scan, jax.checkpoint
        y = nsa_jax.attention(query, key, value, gates, config=config, varlen=meta)

The result of `varlen_metadata` is a pytree of arrays `[B, ..]`. Make the metadata outside of a scan
over layers and of `jax.checkpoint`, so that a training step computes the metadata only once, and
not again in backward passes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from nsa_core.array_ops import masked
from nsa_core.config import NSAConfig
from nsa_core.varlen import Varlen


@dataclasses.dataclass(frozen=True)
class QueryLayout:
    """The positions of the queries. Arrays have one entry per query. For a query, the key with
    index `k` in the key array has position `k - key_start` in the query's sequence.
    """

    # position in its own sequence; a negative number marks padding, which attends to no key
    position: Int[Array, "B T"]
    key_start: Int[Array, "B T"]  # index in the key array of the sequence's first token
    compressed_start: Int[Array, "B T"]  # index of the sequence's first compressed token
    first_key: Int[Array, " B"]  # key index of query 0
    packed: bool  # whether sequences may begin at any key
    padded: bool  # whether some queries may be padding
    varlen: Varlen | None = None
    # number of keys of every row, if rows are not packed and the number is known while tracing
    num_keys: int | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_ids", "position", "key_start", "compressed_start", "window_starts"],
    meta_fields=["config", "max_segments", "max_seqlen"],
)
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """`segment_ids` and the arrays that are derived from them. `nsa_jax.varlen_metadata` makes a
    `PackedRows` once. Functions of this module accept either the array `segment_ids` or a
    `PackedRows`. The arrays are int `[B, S]`, and a transform of JAX may replace them.
    """

    segment_ids: Any
    position: Any
    key_start: Any
    compressed_start: Any
    window_starts: Any  # [B, C]
    config: NSAConfig
    max_segments: int | None  # maximum number of runs of equal ids per row
    max_seqlen: int | None  # maximum number of tokens per sequence

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape `(B, S)` of the rows."""
        return self.segment_ids.shape


Segments = Int[Array, "B S"] | PackedRows


def ids_of(segment_ids: Any) -> Any:
    """Return the array of segment ids. The argument is the array itself or a `PackedRows`."""
    return segment_ids.segment_ids if isinstance(segment_ids, PackedRows) else segment_ids


def query_layout(
    batch: int,
    num_queries: int,
    *,
    kv_len: "int | Int[Array, ''] | Int[Array, ' B']",
    segment_ids: Segments | None,
    config: NSAConfig,
) -> QueryLayout:
    """Make the layout of queries that are the last `num_queries` of `kv_len` tokens. In packed
    rows, the length of the rows replaces an int `kv_len`.
    """
    if segment_ids is not None and isinstance(kv_len, int):
        kv_len = segment_ids.shape[1]
    first = jnp.broadcast_to(jnp.asarray(kv_len, jnp.int32) - num_queries, (batch,))
    index = first[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
    if segment_ids is None:
        start = jnp.zeros_like(index)
        padded = not isinstance(kv_len, int) or kv_len < num_queries
        known = kv_len if isinstance(kv_len, int) else None
        own = {"packed": False, "padded": padded, "num_keys": known}
        return QueryLayout(index, start, start, first, **own)
    rows = packed_rows(segment_ids, config)
    if isinstance(kv_len, int):
        tail = lambda x, first: x[:, kv_len - num_queries :]
    else:
        tail = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, num_queries))
    arrays = rows.position, rows.key_start, rows.compressed_start
    arrays = *(tail(x, first) for x in arrays), first
    return QueryLayout(*arrays, packed=True, padded=True)


def layout_of(query, keys: int, config: NSAConfig, kv_len, segment_ids) -> QueryLayout:
    """Make the layout of `query` `[B, T, H, D]`. `kv_len` defaults to `keys`."""
    at = {"kv_len": keys if kv_len is None else kv_len, "segment_ids": segment_ids}
    return query_layout(*query.shape[:2], **at, config=config)


def packed_rows(segment_ids: Segments, config: NSAConfig, **limits: int | None) -> PackedRows:
    """Make the metadata of packed rows from their segment ids. XLA drops arrays that a program
    does not use.
    """
    if isinstance(segment_ids, PackedRows):
        return segment_ids
    length, count = segment_ids.shape[1], config.num_compressed(segment_ids.shape[1])
    index = jnp.arange(length, dtype=jnp.int32)
    border = segment_ids[:, 1:] != segment_ids[:, :-1]
    border = jnp.pad(border, ((0, 0), (1, 0)), constant_values=True)
    begin = lax.cummax(jnp.where(border, index, 0), axis=1)
    position = jnp.where(segment_ids < 0, -1, index - begin)
    # The last token of a window is in the same sequence as the first one if and only if its
    # position is l - 1 higher.
    reach = config.compress_block - 1
    last = jnp.pad(position, ((0, 0), (0, reach)), constant_values=-1)[:, reach:]
    window = (position % config.compress_stride == 0) & (last == position + reach)
    window = (window & (position >= 0)).astype(jnp.int32)
    before = jnp.cumsum(window, axis=1, dtype=jnp.int32) - window
    start = index - jnp.maximum(position, 0)
    compressed_start = jax.vmap(lambda row, at: row[at])(before, start)
    # This is not a scatter, which would be a separate kernel. The empty constants of a scatter
    # also crashed Shardy in `shard_map`.
    first = jnp.sort(jnp.where(window == 1, index, length), axis=1)[:, :count]
    window_starts = jnp.where(first < length, first, -1)
    limits = {"max_segments": None, "max_seqlen": None} | limits
    places = position, start, compressed_start, window_starts
    return PackedRows(segment_ids, *places, config, **limits)


def without_padding(x, kv_len, segment_ids):
    """Return `x` [B, S, ...] with zeros for tokens to which no query may attend, so that a NaN
    cannot spread.
    """
    length = x.shape[1]
    if segment_ids is not None:
        valid = ids_of(segment_ids) >= 0
    elif kv_len is None or (isinstance(kv_len, int) and kv_len == length):
        return x
    else:
        end = jnp.asarray(kv_len, jnp.int32).reshape(-1, 1)
        valid = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) < end, x.shape[:2])
    return masked(jnp, valid, x)[0]


def rows_of(
    segment_ids: Any, varlen: Any, config: NSAConfig, batch: int, length: int | None = None
) -> Any:
    """Return the argument `segment_ids` of the steps: either `segment_ids`, or `varlen`, which is
    a `PackedRows`.

    Args:
      batch, length: Sizes of the rows. `length=None` means any length.

    Raises:
      ValueError: `segment_ids` and `varlen` are both given, or `varlen` belongs to other rows or
        another config.
    """
    if varlen is None:
        return segment_ids
    if segment_ids is not None:
        raise ValueError("segment_ids must be None if varlen is given, got both")
    if not isinstance(varlen, PackedRows):
        raise ValueError(
            f"varlen must be a result of nsa_jax.varlen_metadata, got {type(varlen).__name__}"
        )
    if config.of_sizes != varlen.config.of_sizes:
        raise ValueError(
            f"varlen must be made with {config}, got varlen made with {varlen.config}"
        )
    wanted = batch, varlen.shape[1] if length is None else length
    if varlen.shape != wanted:
        raise ValueError(f"varlen must have rows of shape {wanted}, got {varlen.shape}")
    return varlen

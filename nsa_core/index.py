"""Selects the blocks of an indexer and computes its loss, with checks and array operations for
both frameworks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nsa_core import block_lists, paged_layout, selection, validate
from nsa_core.array_ops import ArrayOps
from nsa_core.config import MAX_SIZE, NSAConfig

ACTIVATIONS, REDUCTIONS = (None, "relu"), (None, "sum")
MAX_POOL = 256  # maximum number of keys per block that kernels support


class Index(NamedTuple):
    """The rule that maps scores of keys to blocks. The fields are arguments of `index_blocks`."""

    pool: int
    num_selected: int
    num_initial: int
    num_local: int
    activation: str | None
    reduce: str | None
    entry: int

    @property
    def config(self) -> NSAConfig:
        """The `NSAConfig` of the top-n selection, with sizes in tokens."""
        block = self.pool * self.entry
        forced = self.num_initial, self.num_local
        return NSAConfig(block, block, block, self.num_selected, *forced, 0)

    def num_blocks(self, rows: int) -> int:
        """Return the number of blocks that `rows` index keys form."""
        return -(-rows // self.pool)

    def lists(self, heads: int) -> int:
        """Return the number of lists per query."""
        return heads if self.reduce is None else 1


def _checked(index: Index, keys: int) -> Index:
    """Check the fields of `index`. Return `index` with a pool that `block_lists.within` limits by
    the number of keys, so that sizes fit in 32 bits.
    """
    validate.sizes(pool=index.pool, entry=index.entry)
    # A pool up to `MAX_POOL`, which kernels support, does not depend on the number of keys.
    pool = block_lists.within(index.pool, max(keys, MAX_POOL - 1))
    most = MAX_SIZE // max(pool, keys + 1)
    if index.entry > most:
        raise ValueError(f"entry must be at most {most} for {keys} keys, got {index.entry}")
    index = index._replace(pool=pool)
    _ = index.config  # this checks the other fields
    for name, allowed in (("activation", ACTIVATIONS), ("reduce", REDUCTIONS)):
        validate.one_of(name, getattr(index, name), allowed)
    return index


def check_paged(read: Callable[[Any], Any], query, pages, paged, index: Index) -> Index:
    """Check the shapes and dtypes of the arguments of `paged_index_blocks`, and the values that the
    function `read` returns. Return the `Index` to use.

    Raises:
      ValueError: An argument is invalid for every implementation.
    """
    validate.queries(query, "index_query", 3)
    validate.array("index_key_pages", pages, (None, None, query.shape[2]), index_query=query)
    pool, keys = pages.shape[:2]
    validate.sizes(num_pages=pool, keys_a_page=keys, entry=index.entry)
    count = query.shape[0]
    paged_layout.check_tables(read, "index_query", count, paged, pool, keys * index.entry)
    return _checked(index, paged[0].shape[1] * keys)


def check(query, key, index: Index, packed: bool) -> Index:
    """Check the shapes and dtypes of the arguments of `index_blocks`. Return the `Index` to use.

    Raises:
      ValueError: An argument is invalid for every implementation.
    """
    validate.queries(query, "index_query")
    batch, length, _, width = query.shape
    validate.array("index_key", key, (batch, None, width), index_query=query)
    if packed and index.entry != 1:
        raise ValueError(f"entry must be 1 in packed rows, got {index.entry}")
    if packed and key.shape[1] != length:
        raise ValueError(
            "index_key must be as long as index_query in packed rows, "
            f"got {key.shape[1]} and {length}"
        )
    return _checked(index, key.shape[1])


def implementation(asked: str | None, plain: str, *reasons: str | bool | None) -> str:
    """Choose between `triton` and `plain`, the name of the framework's implementation without
    kernels. Return the chosen name.

    Args:
      asked: One of the two names. `asked=None` means `triton` if its kernels support the call.
      reasons: Reasons why the kernels do not support the call. If `reasons` is empty, the kernels
        support the call.

    Raises:
      ValueError: No implementation has the name `asked`.
      NotImplementedError: The implementation `asked` does not support the call.
    """
    known = "triton", plain
    if asked is not None:
        validate.one_of("implementation", asked, known)
    reason = next((x for x in reasons if x), None)
    if asked == "triton" and reason:
        raise NotImplementedError(f"implementation 'triton' {reason}")
    return plain if reason or asked == plain else "triton"


def key_length(kv_len: Any, length: int, rows: int, entry: int) -> Any:
    """Return `kv_len` in tokens.

    If `kv_len` is None, return the number `rows` of keys for `entry` = 1, and the number `length`
    of queries for a larger `entry`.

    Raises:
      ValueError: There are fewer tokens than queries, or more complete entries than keys.
    """
    if kv_len is None:
        kv_len = rows if entry == 1 else length
    if isinstance(kv_len, int) and (kv_len < length or kv_len // entry > rows):
        raise ValueError(
            f"kv_len must be between T={length} and the number of tokens of {rows} keys with "
            f"entry={entry}, got {kv_len}"
        )
    return kv_len


def blocks_at(
    ops: ArrayOps,
    over_queries: Callable[..., Any],
    query,
    key,
    position,
    key_start,
    index: Index,
):
    """Return the block lists of the queries, as int32 `[B, T, lists, n]`.

    Args:
      over_queries: the function of the framework's module `chunks`. `over_queries` may omit keys
        to which no query attends.
      position: `[B, T]`; a negative position means padding.
      key_start: `[B, T]` of packed rows; otherwise None.
    """
    batch, _, heads, _ = query.shape
    xp, packed = ops.xp, key_start is not None

    def chosen(query, position, start, key):
        rows = key.shape[1]
        scores = ops.product("bqhd,bsd->bqhs", query, key)
        if index.activation == "relu":
            scores = scores.clip(0, None)
        if index.reduce == "sum":
            scores = scores.sum(2)[:, :, None]
        row = ops.arange(position, rows)[0]
        if packed:  # block 0 begins where the sequence begins
            local = (row + start[..., None]).clip(None, rows - 1)
            scores = ops.take_along(scores, local[:, :, None])
        seen = (row + 1) * index.entry <= position[..., None] + 1
        scores = xp.where(seen[:, :, None], scores, -xp.inf)
        # The query's own block may not have a key yet.
        blocks = index.num_blocks(rows) + (index.entry > 1)
        scores = ops.pad_end(scores, 3, blocks * index.pool - rows, -xp.inf)
        scores = xp.amax(scores.reshape(*scores.shape[:3], blocks, index.pool), -1)
        own = (position // index.config.select_block)[..., None]
        return selection.choose(ops, scores, own, index.config)

    arrays = query, position, key_start if packed else position
    return over_queries(chosen, arrays, (key,), batch * heads * max(key.shape[1], 1) * 8)


def blocks_of_pages(
    ops: ArrayOps, over_queries: Callable[..., Any], query, pages, paged, index: Index
):
    """Compute the result of `paged_index_blocks` from the keys of all rows, gathered from pages."""
    (page_table, lengths, starts), count = paged, query.shape[0]
    batch, columns = page_table.shape
    lengths = lengths.clip(None, columns * pages.shape[1] * index.entry)
    tokens = paged_layout.tokens_of(ops, lengths, starts, count)
    key = pages[page_table.clip(0, pages.shape[0] - 1)].reshape(batch, -1, pages.shape[2])
    longest = count // batch if starts is None else count
    rows = paged_layout.pad_queries(ops, tokens, lengths, starts, longest)
    position = ops.xp.where(rows.there, tokens.position[rows.token], -1)
    found = blocks_at(ops, over_queries, query[rows.token], key, position, None, index)
    return found.reshape(batch * longest, *found.shape[2:])[rows.flat]


class Teacher(NamedTuple):
    """The attention heads from which index heads learn. The attention heads attend to all keys or
    to listed blocks. There are `pairs = max(Hi, Hkv)` pairs, each of one key/value head and one
    index head. Pair `p` has the `heads` query heads that start at `p * heads`, and the key/value
    head `p * Hkv // pairs`.
    """

    index_heads: int
    kv_heads: int
    pairs: int
    heads: int
    block: int
    scale: float
    index_scale: float


class Loss(NamedTuple):
    """The loss in chunks of queries.

    A framework's function `over_queries` accepts the fields from `chunk` on as arguments, and
    returns the loss `[B, T, Hi]`.

    Attributes:
      parts: Function with the same arguments as `chunk` that returns t and log p `[B, Q, Hi,
        K]`, the mask of the keys, and the indices of the keys. The indices are None if all keys
        are used.
    """

    parts: Callable[..., Any]
    chunk: Callable[..., Any]
    chunked: Sequence[Any]
    shared: Sequence[Any]
    row_bytes: int


def loss_of(
    ops: ArrayOps,
    teacher: Teacher,
    query,
    key,
    lse,
    block_indices,
    where,
    index_query,
    index_key,
) -> Loss:
    """Describe the loss as a `Loss`, which a framework then computes. `where` is a `QueryLayout`,
    and the other arguments are those of `indexer_kl`.
    """
    xp, pairs, listed = ops.xp, teacher.pairs, block_indices is not None
    (batch, _, heads, width), keys = query.shape, key.shape[1]

    def parts(index_query, query, lse, position, start, *rest):
        *lists, index_key, key = rest
        named = lists[0] if listed else None
        seen, row = seen_keys(ops, named, position, start, teacher.block, keys)
        scores = ops.product("bqhd,bkd->bqhk", index_query, index_key) * teacher.index_scale
        query = query.reshape(*query.shape[:2], pairs, teacher.heads, width)
        pair = ops.arange(position, pairs)[0]
        head = pair * teacher.kv_heads // pairs
        if row is None:
            logits = ops.product("bqphd,bkpd->bqphk", query, key[:, :, head])
        else:
            row = xp.where(seen, row, 0)
            # A key is listed only once per query, so that the gradient is not a sum.
            scores = ops.take_along(scores, row)
            each = ops.arange(row, batch).reshape(-1, 1, 1, 1)
            at = each, row[:, :, pair * row.shape[2] // pairs], head[:, None]
            near = key[at]  # [B, Q, pairs, K, D]
            logits = ops.product("bqphd,bqpkd->bqphk", query, near)
        lse = ops.cast(lse, logits.dtype)
        lse = xp.where(lse == -math.inf, math.inf, lse).reshape(*logits.shape[:4], 1)
        probs, each = xp.exp(logits * teacher.scale - lse).sum(3), pairs // teacher.index_heads
        probs = probs.reshape(*probs.shape[:2], teacher.index_heads, each, -1).sum(3)
        t = ops.stop_gradient(xp.where(seen, probs / (each * teacher.heads), 0))
        logp = ops.nn.log_softmax(xp.where(seen, scores, -xp.inf), -1)
        return t, xp.where(seen, logp, 0), seen, row

    def chunk(*arrays):
        t, logp, _, _ = parts(*arrays)
        entropy = xp.where(t > 0, t * xp.log(xp.where(t > 0, t, 1)), 0)
        return (entropy - t * logp).sum(-1)

    chunked, costs = [index_query, query, lse, where.position, where.key_start], keys * heads
    if listed:
        chunked.append(block_indices)
        costs = block_indices.shape[-1] * teacher.block * pairs * (width + teacher.heads)
        costs += keys * teacher.index_heads
    return Loss(parts, chunk, chunked, (index_key, key), batch * costs * 4)


def seen_keys(ops: ArrayOps, lists, position, start, block: int, keys: int):
    """Return the mask of the keys of each query, `[B, Q, Hi or 1, K]`, and the indices of the
    keys. The indices are None if all keys are used. The indices of masked keys may be outside the
    array.

    Args:
      lists: `[B, Q, Hi or 1, n]`, or None.
      position, start: `[B, Q]`.
    """
    position, start = position[..., None, None], start[..., None, None]
    if lists is None:
        local = ops.arange(position, keys)[0] - start
        return (local >= 0) & (local <= position), None
    # In 32 bits an index beyond the keys could wrap around to a valid one.
    lists = ops.xp.where(lists < -(-keys // block), lists, -1)[..., None]
    token = lists * block + ops.arange(lists, block)[0]
    seen, rows = (lists >= 0) & (token <= position[..., None]), token + start[..., None]
    return tuple(x.reshape(*x.shape[:3], -1) for x in (seen, rows))


def check_loss(
    query, key, lse, index_query, index_key, block_indices, block_size, scale, index_scale
) -> Teacher:
    """Check the shapes and dtypes of the arguments of `indexer_kl`.

    Raises:
      ValueError: An argument is invalid for every implementation.
    """
    validate.queries(query)
    batch, length, heads, width = query.shape
    validate.array("key", key, (batch, None, None, width))
    validate.heads(query, key)
    keys, kv_heads = key.shape[1:3]
    if length > keys:
        raise ValueError(f"query must not be longer than key, got T={length} and S={keys}")
    validate.array("lse", lse, (batch, length, heads), ("float32", "float64"))
    validate.array("index_query", index_query, (batch, length, None, None))
    index_heads, index_width = index_query.shape[2:]
    axes = batch, keys, index_width
    validate.array("index_key", index_key, axes, index_query=index_query)
    fits = index_heads > 0 and heads % index_heads == 0
    if not fits or (kv_heads % index_heads and index_heads % kv_heads):
        raise ValueError(
            f"index_query must have a number of heads that divides H={heads} and is a divisor or a "
            f"multiple of Hkv={kv_heads}, got Hi={index_heads}"
        )
    if block_indices is not None:
        validate.sizes(block_size=block_size)
        name, tokens = "block_indices", (batch, length)
        block_lists.lists(name, block_indices, tokens, heads, kv_heads)
        if block_indices.shape[2] not in (1, index_heads):
            raise ValueError(
                f"block_indices must have 1 list for all heads or {index_heads} lists, one per "
                f"index head, got {block_indices.shape[2]}"
            )
    elif block_size is not None:
        raise ValueError(f"block_size must be None if block_indices are None, got {block_size}")
    validate.scaling(scale)
    validate.scaling(index_scale, "index_scale")
    pairs = math.lcm(index_heads, kv_heads)
    return Teacher(
        *(index_heads, kv_heads, pairs, heads // pairs),
        block=block_lists.within(block_size or 1, key.shape[1]),
        scale=width**-0.5 if scale is None else scale,
        index_scale=index_query.shape[3] ** -0.5 if index_scale is None else index_scale,
    )

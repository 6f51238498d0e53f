"""The reference implementation, which computes every branch densely with boolean masks from token
indices.

The reference computes in float32 (in float64 for float64 inputs), or in `compute_dtype` if one is
given. Tests compare the error of a kernel with the error of the reference in low precision. If
`compute_dtype` of a config is float8_e4m3, the reference in low precision rounds the same values
as the kernels do. The module shares only the array operations of each framework (`ArrayOps`) with
other implementations. The reference needs memory for an array `[T, S]` per head, and the automatic
choice never uses it.

Source: arXiv 2502.11089 v2, Eqs. 5-12. Arrays may come from either framework.
`nsa_jax.reference` and `nsa_torch.reference` wrap the functions of this module with the arguments
of the public functions.
"""

from typing import Any, NamedTuple

from nsa_core.array_ops import ArrayOps


class Rows(NamedTuple):
    """The tokens of a call, with operations on arrays of tokens."""

    ops: ArrayOps
    sequence: Any  # sequence of each key, [B, S]; -1 means none
    position: Any  # position of each key in its sequence, [B, S]
    # index in the key array of each query's own token, [B, T]; negative if there is none
    query: Any

    def at(self, x, index):
        """Return `x[b, index[b]]` for each row b."""
        return x[self.ops.arange(x, x.shape[0]).reshape(-1, 1), index]

    def own(self, x, nothing: int):
        """Return the entry of `x` at each query's own token, `[B, T, 1]`. For a query without a
        token the entry is `nothing`.
        """
        index = self.query.clip(0, None)
        there = (self.query >= 0) & (self.at(self.sequence, index) >= 0)
        return self.ops.xp.where(there, self.at(x, index), nothing)[..., None]

    def before(self):
        """Return whether each key belongs to the query's sequence and is not after the query,
        `[B, T, S]`.
        """
        own = self.own(self.sequence, -1)
        past = self.ops.arange(self.query, self.sequence.shape[1]) <= self.query[..., None]
        return (self.sequence[:, None] == own) & (own >= 0) & past

    def windows(self, config, count: int):
        """Return the index in the key array of the first token of each compressed token's window,
        `[B, count]`, or -1 for an unused slot.
        """
        xp, (batch, keys) = self.ops.xp, self.sequence.shape
        first = self.ops.arange(self.query, max(keys - config.compress_block + 1, 0))[0]
        last = first + config.compress_block - 1
        whole = (self.sequence[:, first] >= 0) & (self.position[:, first] >= 0)
        whole = whole & (self.sequence[:, first] == self.sequence[:, last])
        whole = whole & (self.position[:, first] % config.compress_stride == 0)
        unused = xp.full_like(self.ops.arange(first, count), keys)
        unused = xp.broadcast_to(unused, (batch, count))
        starts = xp.concatenate([xp.where(whole, first, keys), unused], axis=1)
        starts = self.ops.sort(starts)[0][:, :count]
        return xp.where(starts < keys, starts, -1)


def wide(xp: Any, dtype: Any) -> Any:
    """Return the dtype of softmax and accumulation."""
    return xp.float64 if dtype == xp.float64 else xp.float32


def _e4m3(xp, x):
    """Return `x` rounded to e4m3 and clipped to the range of e4m3. The rounding uses arithmetic,
    since XLA would remove a conversion to 8 bits and back.
    """
    x = x.clip(-448, 448)
    _, exponent = xp.frexp(x)  # the mantissa is at least 1/2 and keeps 4 bits
    unit = xp.exp2(xp.asarray(exponent.clip(-5, None) - 4, dtype=x.dtype))
    return xp.round(x / unit) * unit


def _rounded(xp, query, key, value, read):
    """Round `query` [B, T, Hkv, G, D], `key` and `value` [B, S, Hkv, .] as the e4m3 kernels do.

    The mean over the keys for which the mask `read` [B, S, Hkv or 1, 1] is true is subtracted from
    all keys. The mean is also returned.
    """

    def by_column(x):
        size = xp.amax(xp.abs(x), axis=1, keepdims=True).clip(2.0**-100, None)
        unit = xp.exp2(xp.floor(xp.log2(size)) - 7)
        return _e4m3(xp, x / unit), unit

    count = read.sum(axis=1, keepdims=True).clip(1, None)
    mean = key.sum(axis=1, keepdims=True) / xp.asarray(count, dtype=key.dtype)
    key, unit = by_column(xp.where(read, key - mean, 0))
    query = query * unit[:, :, :, None]
    of_row = xp.amax(xp.abs(query), axis=-1, keepdims=True).clip(2.0**-100, None) / 448
    value, of_values = by_column(value)
    return _e4m3(xp, query / of_row) * of_row, key, value * of_values, mean[:, 0]


def _attend(rows: Rows, query, key, value, mask, scale, dtype=None, in_float8=False):
    """Compute softmax attention with `mask` [B, Hkv or 1, T, S]. Return the output, the
    log-sum-exp, the probabilities and their logarithms.
    """
    xp, cast, nn = rows.ops.xp, rows.ops.cast, rows.ops.nn
    out_dtype = dtype or query.dtype
    in_float8 = in_float8 and dtype is not None
    if dtype is None or in_float8:
        dtype = wide(xp, query.dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    batch, length, heads, width = query.shape
    groups = key.shape[2]
    query, key, value = (cast(x, dtype) for x in (query, key, value))
    query = query.reshape(batch, length, groups, heads // groups, width)
    # Keys that are not read and queries without keys must have no effect, even if they are NaN.
    read = xp.swapaxes(mask.any(axis=2), 1, 2)[..., None]  # [B, S, Hkv or 1, 1]
    some = mask.any(axis=3)  # [B, Hkv or 1, T]
    of_query, some = xp.swapaxes(some, 1, 2)[..., None, None], some[:, :, None, :, None]
    query = xp.where(of_query, query, 0)
    key, value = (xp.where(read, x, 0) for x in (key, value))
    lost = 0.0  # the same number is subtracted from all logits of a query
    if in_float8:
        exact = query
        query, key, value, mean = _rounded(xp, query, key, value, read)
        lost = xp.einsum("btkgd,bkd->bkgt", exact, mean) * scale
    logits = xp.einsum("btkgd,bskd->bkgts", query, key) * scale
    mask = mask[:, :, None]
    # Rows without keys keep finite logits, so that no NaN occurs.
    logits = xp.where(some, xp.where(mask, logits, -xp.inf), 0)
    lse = nn.logsumexp(logits, axis=-1)
    log_probs = xp.where(mask, logits - lse[..., None], -xp.inf)
    probs = xp.where(mask, nn.softmax(logits, axis=-1), 0)
    if in_float8:
        top = xp.amax(logits, axis=-1, keepdims=True)
        weights = xp.where(mask, _e4m3(xp, xp.exp(logits - top) * 256) / 256, 0)
        probs = weights * xp.exp(top - lse[..., None])
    out = xp.where(of_query, xp.einsum("bkgts,bskd->btkgd", probs, value), 0)
    lse = xp.where(some[..., 0], lse, -xp.inf) + lost
    out = cast(out.reshape(batch, length, heads, -1), out_dtype)
    lse = xp.swapaxes(lse.reshape(batch, heads, length), 1, 2)
    return out, cast(lse, wide(xp, dtype)), probs, log_probs


def _compressed(rows: Rows, query, key, value, config, scale, dtype=None):
    """Compute attention over the compressed tokens. Also return the number of compressed tokens
    before each query's sequence, `[B, T, 1]`.
    """
    starts = rows.windows(config, key.shape[1])
    owner = rows.at(rows.sequence, starts.clip(0, None))[:, None]
    own, starts = rows.own(rows.sequence, -1), starts[:, None]
    mask = (starts >= 0) & (own >= 0) & (owner == own)
    mask = mask & (starts + config.compress_block - 1 <= rows.query[..., None])
    before = ((starts >= 0) & (owner < own)).sum(axis=-1, keepdims=True)
    found = _attend(rows, query, key, value, mask[:, None], scale, dtype)
    return *found, rows.ops.to_int32(before)


def compressed_attention(
    rows: Rows, query, key, value, *, config, scale=None, compute_dtype=None
):
    return _compressed(rows, query, key, value, config, scale, compute_dtype)[:2]


def _scores(rows: Rows, query, key, config, scale):
    """Return the scores `[B, Hkv, T, N]` (Eqs. 8-10), and their logarithms."""
    xp, arange = rows.ops.xp, rows.ops.arange
    *_, probs, logs, before = _compressed(rows, query, key, key[..., :0], config, scale)
    probs, logs = probs.sum(axis=2), rows.ops.nn.logsumexp(logs, axis=2)  # [B, Hkv, T, C]
    # Eq. 9: compressed tokens at the ends of a block share fewer stride blocks with the block.
    ratio = config.select_block // config.compress_stride
    cover = config.compress_block // config.compress_stride
    tokens = arange(query, ratio + cover - 1)[0]
    weights = xp.minimum(tokens + 1, ratio + cover - 1 - tokens).clip(None, cover)
    block = arange(query, config.num_blocks(rows.sequence.shape[1]))[0]
    # [N, tokens], indices in the sequence
    number = block[:, None] * ratio + tokens - (cover - 1)
    slot, count = before[..., None] + number, key.shape[1]  # [B, T, N, tokens]
    slot = xp.where((number >= 0) & (slot < count), slot, count)[:, None]
    sizes = probs.shape[:3]
    at = [
        arange(query, size).reshape([-1 if i == axis else 1 for i in range(5)])
        for axis, size in enumerate(sizes)
    ]
    # The extra column is read for missing tokens.
    probs, logs = rows.ops.pad_end(probs, 3, 1, 0), rows.ops.pad_end(logs, 3, 1, -xp.inf)
    weights = rows.ops.cast(weights, probs.dtype)
    scores = (probs[*at, slot] * weights).sum(axis=-1)
    return scores, rows.ops.nn.logsumexp(logs[*at, slot] + xp.log(weights), axis=-1)


def block_scores(rows: Rows, query, key, *, config, scale=None):
    """Return the score of every selection block, `[B, T, Hkv, N]` (Eqs. 8-10)."""
    return rows.ops.xp.swapaxes(_scores(rows, query, key, config, scale)[0], 1, 2)


def select_blocks(rows: Rows, query, key, *, config, scale=None):
    xp, (scores, logs) = rows.ops.xp, _scores(rows, query, key, config, scale)
    # Scores whose terms underflow in this dtype are ordered by their logarithms. The logarithms
    # are shifted below all scores.
    limits = xp.finfo(scores.dtype)
    least = float(limits.tiny) * 2**36
    scores = xp.where(scores < least, logs.clip(float(limits.min), None), scores)
    own = rows.own(rows.position // config.select_block, -1)[:, None]  # [B, 1, T, 1]
    count, n = scores.shape[-1], config.num_selected
    block = rows.ops.arange(query, count)[0]
    forced = (block < config.num_initial) | (block > own - config.num_local)
    ranked = xp.where(block <= own, xp.where(forced, xp.inf, scores), -xp.inf)
    # There must be at least as many blocks as are selected.
    ranked = rows.ops.pad_end(ranked, 3, n, -xp.inf)
    order = rows.ops.to_int32(xp.argsort(-ranked, axis=-1, stable=True)[..., :n])
    chosen = xp.where(order <= own, order, count)
    chosen = rows.ops.sort(chosen.reshape(-1, n))[0].reshape(chosen.shape)
    return rows.ops.to_int32(xp.swapaxes(xp.where(chosen == count, -1, chosen), 1, 2))


def selected_attention(
    rows: Rows, query, key, value, block_indices, *, config, scale=None, compute_dtype=None
):
    block = (rows.position // config.select_block)[:, None, None]  # [B, 1, 1, S]
    chosen = block_indices[..., :1] == block
    for slot in range(1, block_indices.shape[-1]):
        chosen = chosen | (block_indices[..., slot : slot + 1] == block)
    mask = rows.ops.xp.swapaxes(chosen, 1, 2) & rows.before()[:, None]
    in_float8 = config.compute_dtype is not None
    return _attend(rows, query, key, value, mask, scale, compute_dtype, in_float8)[:2]


def sliding_attention(rows: Rows, query, key, value, *, config, scale=None, compute_dtype=None):
    keys = rows.ops.arange(query, key.shape[1])
    mask = rows.before() & (keys > rows.query[..., None] - config.window)
    in_float8 = config.compute_dtype is not None
    return _attend(rows, query, key, value, mask[:, None], scale, compute_dtype, in_float8)[:2]


# The functions that frameworks call, and the functions among them whose keys are tokens.
FUNCTIONS = (
    compressed_attention,
    block_scores,
    select_blocks,
    selected_attention,
    sliding_attention,
)
OF_TOKENS = selected_attention, sliding_attention

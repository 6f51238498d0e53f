"""The oracle: every branch dense, with explicit boolean masks built from token indices.

It computes in float32 (float64 for float64 input), or in `compute_dtype` when one is given:
the same code in the low precision is the yardstick of the tolerance rule. Of a config whose
`compute_dtype` is float8_e4m3, the yardstick rounds what its kernels round. It shares no code
with the fast paths, needs memory for `[T, S]` per head, and is never chosen for its speed.

Source: arXiv 2502.11089 v2, Eqs. 5-12. Arguments and shapes as in `nsa_jax.api`.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from nsa_core.compress_params import CompressParams, MLPParams, PoolParams, RopeMLPParams
from nsa_core.config import NSAConfig

EXACT = lax.Precision.HIGHEST


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _iota(*bounds):
    return jnp.arange(*bounds, dtype=jnp.int32)


def _tokens(batch, num_keys, num_queries, kv_len, segment_ids):
    """Each key's sequence [B, S] (-1: none) and position in it, each query's index [B, T]."""
    index = _iota(num_keys)
    lengths = jnp.broadcast_to(jnp.asarray(kv_len, jnp.int32), (batch,))
    sequence = jnp.where(index < lengths[:, None], 0, -1)
    if segment_ids is not None:
        segment_ids = getattr(segment_ids, "segment_ids", segment_ids)  # of metadata
        new = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        sequence = jnp.where(segment_ids < 0, -1, jnp.cumsum(new, axis=1, dtype=jnp.int32))
    border = jnp.pad(sequence[:, 1:] != sequence[:, :-1], ((0, 0), (1, 0)))
    position = index - lax.cummax(jnp.where(border, index, 0), axis=1)
    query_index = _iota(num_queries) + lengths[:, None] - num_queries
    return sequence, position, query_index


def _window_starts(sequence, position, config):
    """Key index of the first token of each compressed token, `[B, C]`; -1: unused slot."""
    num_keys, length = sequence.shape[1], config.compress_block
    count = config.num_compressed(num_keys)
    first = _iota(num_keys - length + 1) if count else _iota(0)
    complete = (
        (sequence[:, first] >= 0)
        & (sequence[:, first] == sequence[:, first + length - 1])
        & (position[:, first] % config.compress_stride == 0)
    )
    starts = jax.vmap(lambda row: jnp.nonzero(row, size=count, fill_value=-1)[0])(complete)
    return starts.astype(jnp.int32)


def _e4m3(x):
    """`x` rounded to 8 bits, beyond the range to its end."""
    # Behind a barrier: XLA would take the two conversions for none.
    narrow = lax.optimization_barrier(jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn))
    return narrow.astype(x.dtype)


def _rounded(query, key, value, read):
    """`query` [B, T, Hkv, G, D], `key` and `value` [B, S, Hkv, .] as products in e4m3 see them, of
    which the keys that are `read` [B, S, Hkv or 1, 1] are less by their mean, and that.
    """

    def by_column(x):
        size = jnp.maximum(jnp.abs(x).max(axis=1, keepdims=True), 2.0**-100)
        unit = jnp.exp2(jnp.floor(jnp.log2(size)) - 7)
        return _e4m3(x / unit), unit

    count = jnp.maximum(read.sum(axis=1, keepdims=True), 1).astype(key.dtype)
    mean = key.sum(axis=1, keepdims=True) / count
    key, unit = by_column(jnp.where(read, key - mean, 0))
    query = query * unit[:, :, :, None]
    of_row = jnp.maximum(jnp.abs(query).max(axis=-1, keepdims=True), 2.0**-100) / 448
    value, of_values = by_column(value)
    return _e4m3(query / of_row) * of_row, key, value * of_values, mean[:, 0]


def _attend(query, key, value, mask, scale, dtype, in_float8=False):
    """Softmax attention under `mask` [B, Hkv or 1, T, S]: out, lse, probabilities, their
    logarithms.
    """
    out_dtype = dtype or query.dtype
    in_float8 = in_float8 and dtype is not None
    dtype = _wide(query.dtype) if dtype is None or in_float8 else dtype
    scale = jnp.asarray(query.shape[-1] ** -0.5 if scale is None else scale, dtype)
    query = rearrange(query, "b t (k g) d -> b t k g d", k=key.shape[2])
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    mask = mask[:, :, None]
    # Keys that are not read and queries that see nothing must not count, be they NaN.
    read = rearrange(mask.any(axis=3), "b k 1 s -> b s k 1")  # k: Hkv or 1
    some = rearrange(mask.any(axis=4), "b k 1 t -> b t k 1 1")
    query = jnp.where(some, query, 0)
    key, value = (jnp.where(read, x, 0) for x in (key, value))
    lost = jnp.zeros((), dtype)  # from all logits of a query
    if in_float8:
        exact = query
        query, key, value, mean = _rounded(query, key, value, read)
        lost = jnp.einsum("btkgd,bkd->bkgt", exact, mean, precision=EXACT) * scale
    logits = jnp.einsum("btkgd,bskd->bkgts", query, key, precision=EXACT) * scale
    logits = jnp.where(mask, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.where(mask, jnp.exp(logits - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    weights = _e4m3(weights * 256) / 256 if in_float8 else weights
    probs = jnp.where(mask, weights / total, 0)
    out = jnp.einsum("bkgts,bskd->btkgd", probs, value, precision=EXACT)
    out = jnp.where(some, out, 0)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)[..., 0] + lost
    out = rearrange(out, "b t k g d -> b t (k g) d").astype(out_dtype)
    lse = rearrange(lse, "b k g t -> b t (k g)").astype(_wide(dtype))
    log_probs = jnp.where(mask, logits - top - jnp.log(total), -jnp.inf)
    return out, lse, probs, log_probs


def compress(x, params: CompressParams = None, *, config: NSAConfig, segment_ids=None):
    """`phi` over every window of `l` tokens, one each `d` tokens (Eq. 7)."""
    sequence, position, _ = _tokens(x.shape[0], x.shape[1], 0, x.shape[1], segment_ids)
    starts = _window_starts(sequence, position, config)
    taps = jnp.clip(starts, 0)[..., None] + _iota(config.compress_block)
    windows = jax.vmap(lambda row, index: row[index])(x, taps)  # [B, C, l, Hkv, D]
    windows = windows.astype(_wide(x.dtype))
    if params is None:
        out = windows.mean(axis=2)
    elif isinstance(params, PoolParams):
        weight = params.weight.astype(windows.dtype)
        out = jnp.einsum("bclkd,ld->bckd", windows, weight, precision=EXACT)
    elif isinstance(params, MLPParams | RopeMLPParams):
        embedding, w1, b1, w2, b2 = (p.astype(windows.dtype) for p in params[:5])
        flat = rearrange(windows + embedding[:, None], "b c l k d -> b c k (l d)")
        hidden = jax.nn.gelu(jnp.matmul(flat, w1, precision=EXACT) + b1, approximate=True)
        out = jnp.matmul(hidden, w2, precision=EXACT) + b2
    if isinstance(params, RopeMLPParams):
        first = jax.vmap(lambda row, index: row[index])(position, jnp.clip(starts, 0))
        middle = first.astype(windows.dtype) + (config.compress_block - 1) / 2
        angle = middle[..., None, None] * params.rates.astype(windows.dtype)
        turn = jax.lax.complex(jnp.cos(angle), jnp.sin(angle))
        spun = jax.lax.complex(out[..., 0::2], out[..., 1::2]) * turn
        out = jnp.stack([spun.real, spun.imag], axis=-1).reshape(out.shape)
    return jnp.where(starts[:, :, None, None] >= 0, out, 0).astype(x.dtype)


def _compressed(query, key, value, config, kv_len, segment_ids, scale, dtype):
    """`_attend` over the compressed tokens, scores `[B, T, Hkv, N]` (Eqs. 8-10), their logs."""
    batch, num_queries = query.shape[:2]
    num_keys = num_queries if kv_len is None else kv_len
    if segment_ids is not None:
        num_keys = segment_ids.shape[1]
    elif not isinstance(num_keys, int):
        num_keys = key.shape[1] * config.compress_stride + config.compress_block - 1
    kv_len = num_keys if kv_len is None else kv_len
    sequence, position, query_index = _tokens(batch, num_keys, num_queries, kv_len, segment_ids)
    starts = _window_starts(sequence, position, config)[:, : key.shape[1]]
    unused = key.shape[1] - starts.shape[1]
    starts = jnp.pad(starts, ((0, 0), (0, unused)), constant_values=-1)
    at = jax.vmap(lambda row, index: row[index])
    own = at(sequence, query_index)[:, :, None]
    mask = (starts >= 0) & (at(sequence, starts) >= 0)
    mask = mask[:, None] & (at(sequence, starts)[:, None] == own)
    mask &= starts[:, None] + config.compress_block - 1 <= query_index[:, :, None]
    out, lse, probs, log_probs = _attend(query, key, value, mask[:, None], scale, dtype)
    first, num_blocks = at(position, starts), config.num_blocks(num_keys)
    tokens = first[..., None] + _iota(config.compress_block)
    blocks = jax.nn.one_hot(tokens // config.select_block, num_blocks, dtype=probs.dtype)
    overlap = blocks.sum(axis=2) / config.compress_stride
    scores = jnp.einsum("bkgtc,bcj->btkj", probs, overlap, precision=EXACT)
    # Logarithms by the stride at which a token of the query's sequence begins, then Eq. 9.
    ratio = config.select_block // config.compress_stride
    more = config.compress_block // config.compress_stride - 1
    weights = jnp.convolve(jnp.ones(more + 1), jnp.ones(ratio))
    place = more + first // config.compress_stride
    group = rearrange(jax.nn.logsumexp(log_probs, axis=2), "b k t c -> b c t k")
    begins = jnp.full(
        (batch, more + num_blocks * ratio, *group.shape[2:]), -jnp.inf, group.dtype
    )
    begins = jax.vmap(lambda x, i, new: x.at[i].max(new))(begins, place, group)
    begins = begins[:, _iota(num_blocks)[:, None] * ratio + _iota(ratio + more)]
    begins += jnp.log(weights.astype(group.dtype))[:, None, None]
    logs = jax.nn.logsumexp(begins, axis=2)
    return out, lse, scores, rearrange(logs, "b j t k -> b t k j")


def compressed_attention(
    query,
    compressed_key,
    compressed_value,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
    compute_dtype=None,
):
    out, lse, *_ = _compressed(
        query,
        compressed_key,
        compressed_value,
        config,
        kv_len,
        segment_ids,
        scale,
        compute_dtype,
    )
    return out, lse


def block_scores(query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None):
    """Importance of every selection block, `[B, T, Hkv, N]` (Eqs. 8-10)."""
    value = compressed_key[..., :0]
    return _compressed(query, compressed_key, value, config, kv_len, segment_ids, scale, None)[
        2
    ]


def select_blocks(query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None):
    query, compressed_key = lax.stop_gradient((query, compressed_key))
    place = config, kv_len, segment_ids, scale, None
    *_, scores, logs = _compressed(query, compressed_key, compressed_key[..., :0], *place)
    # Logarithms, less than all scores, order those of which terms are too small for the dtype.
    limits = jnp.finfo(scores.dtype)
    scores = jnp.where(scores < limits.tiny * 2**36, jnp.maximum(logs, limits.min), scores)
    batch, num_queries, _, num_blocks = scores.shape
    num_keys = num_blocks * config.select_block
    if segment_ids is not None:
        num_keys = segment_ids.shape[1]
        kv_len = num_keys if kv_len is None else kv_len
    kv_len = num_queries if kv_len is None else kv_len
    sequence, position, index = _tokens(batch, num_keys, num_queries, kv_len, segment_ids)
    at = jax.vmap(lambda row, where: row[where])
    own = jnp.where(at(sequence, index) >= 0, at(position, index) // config.select_block, -1)
    own = own[:, :, None, None]
    block = _iota(num_blocks)
    forced = (block < config.num_initial) | (block > own - config.num_local)
    ranked = jnp.where(forced, jnp.inf, scores)
    ranked = jnp.where(block <= own, ranked, -jnp.inf)
    order = jnp.argsort(-ranked, axis=-1, stable=True)[..., : config.num_selected]
    order = order.astype(jnp.int32)
    chosen = jnp.where(order <= own, order, num_blocks)
    chosen = jnp.sort(chosen, axis=-1)
    missing = config.num_selected - chosen.shape[-1]
    chosen = jnp.pad(
        chosen, ((0, 0),) * 3 + ((0, max(missing, 0)),), constant_values=num_blocks
    )
    return jnp.where(chosen == num_blocks, -1, chosen).astype(jnp.int32)


def selected_attention(
    query,
    key,
    value,
    block_indices,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
    compute_dtype=None,
):
    batch, num_keys = key.shape[:2]
    kv_len = num_keys if kv_len is None else kv_len
    sequence, position, index = _tokens(batch, num_keys, query.shape[1], kv_len, segment_ids)
    own = jax.vmap(lambda row, where: row[where])(sequence, index)[:, :, None]
    block = (position // config.select_block)[:, None, None]  # [B, 1, 1, S]
    chosen = jnp.zeros((*block_indices.shape[:3], num_keys), bool)
    for slot in range(block_indices.shape[-1]):
        chosen |= block_indices[..., slot, None] == block
    mask = (sequence[:, None] == own) & (own >= 0)
    mask &= _iota(num_keys) <= index[:, :, None]
    mask = rearrange(chosen, "b t k s -> b k t s") & mask[:, None]
    in_float8 = config.compute_dtype is not None
    return _attend(query, key, value, mask, scale, compute_dtype, in_float8)[:2]


def sliding_attention(
    query,
    key,
    value,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
    compute_dtype=None,
):
    batch, num_keys = key.shape[:2]
    kv_len = num_keys if kv_len is None else kv_len
    sequence, _, index = _tokens(batch, num_keys, query.shape[1], kv_len, segment_ids)
    own = jax.vmap(lambda row, where: row[where])(sequence, index)[:, :, None]
    distance = index[:, :, None] - _iota(num_keys)
    mask = (sequence[:, None] == own) & (own >= 0)
    mask &= (distance >= 0) & (distance < config.window)
    in_float8 = config.compute_dtype is not None
    return _attend(query, key, value, mask[:, None], scale, compute_dtype, in_float8)[:2]


def combine(outputs, gates):
    """`sum_c gate[c] * out[c]` (Eq. 5) of two `Branches`; gates `[B, T, H]`."""
    dtype = _wide(outputs.compressed.dtype)
    weighted = [
        out.astype(dtype) * gate.astype(dtype)[..., None]
        for out, gate in zip(outputs, gates, strict=True)
    ]
    total = weighted[0] + weighted[1] + weighted[2]
    return total.astype(outputs.compressed.dtype)

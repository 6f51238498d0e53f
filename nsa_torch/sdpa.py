"""Computes the three branches with torch's scaled_dot_product_attention, on any device and in
any dtype.

Queries are processed in chunks. A chunk attends to a prefix of the compressed tokens, to a band
of the sliding keys, or to the gathered blocks of its selection. A boolean mask is computed from
positions. SDPA does not return the log-sum-exp. If `with_lse` is true, a second product `q . k`
computes the log-sum-exp. On a CPU the plain formula replaces SDPA for every dtype
except bfloat16. The plain formula needs no second product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_torch.chunks import Chunk, Rows, Span, Work, chunked, wide
from nsa_torch.geometry import geometry_of

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# maximum number of queries per chunk of the sliding branch, if the window is shorter than this
# number
SHORT_CHUNK = {"cpu": 64, "cuda": 1024}


@chunked("sdpa/compressed", 3)
def compressed_attention(
    query, compressed_key, compressed_value, *, config, kv_len, cu_seqlens, scale, with_lse
):
    """Compute attention over compressed tokens. A query at position `p` attends to compressed
    token `i` if and only if `p >= i*d + l - 1`.
    """
    batch, _, heads, _ = query.shape
    count = compressed_key.shape[1]
    if count == 0:
        return None
    where = geometry_of(query, config, kv_len, cu_seqlens)

    def plan(queries):
        end = count
        # packed sequences have no more compressed tokens than a single sequence
        if where.offset is not None:
            seen_at_most = config.num_compressed(queries.stop + where.offset)
            end = max(1, min(count, seen_at_most))
        seen = where.sees_compressed(queries, end, config)
        return Chunk(Span(0, end), _dense(seen, scale, with_lse))

    return Work(plan, batch * heads * count * 4)


@chunked("sdpa/sliding", 3)
def sliding_attention(query, key, value, *, config, kv_len, cu_seqlens, scale, with_lse):
    """Compute attention of each query to the last `window` keys up to its own key."""
    batch, _, heads, _ = query.shape
    num_keys, window = key.shape[1], config.window
    if window == 0:
        return None
    where = geometry_of(query, config, kv_len, cu_seqlens)
    index, start = where.key_index[..., None], where.key_start[..., None]
    rows = torch.arange(batch, device=query.device)[:, None] * num_keys

    def plan(queries):
        size = queries.stop - queries.start + window - 1
        if where.offset is not None:
            end = where.offset + queries.stop
            source = Span(max(end - size, 0), end)
            token = torch.arange(*source, device=query.device)
        else:  # only the device knows where the band starts
            band = torch.arange(min(size, num_keys), device=query.device)
            first = index[:, queries][:, :1, 0] - (window - 1)
            token = band + first.clamp(min=0, max=num_keys - band.numel())
            source = Rows(rows + token, axes=2)
            token = token[:, None]
        query_index = index[:, queries]
        seen = (token <= query_index) & (token > query_index - window)
        return Chunk(source, _dense(seen & (token >= start[:, queries]), scale, with_lse))

    # With a chunk as long as the window, only half of the band is masked. A GPU would finish a
    # shorter chunk long before the host has launched the next one.
    most = max(window, SHORT_CHUNK.get(query.device.type, SHORT_CHUNK["cuda"]))
    row_bytes = batch * heads * min(num_keys, most + window) * 4
    return Work(plan, row_bytes, most)


@chunked("sdpa/selected", 4)
def selected_attention(
    query, key, value, block_indices, *, config, kv_len, cu_seqlens, scale, with_lse
):
    """Compute attention of each query to the keys of its selected blocks, up to its own position.
    One softmax covers all these keys.
    """
    batch, _, heads, width = query.shape
    num_keys, kv_heads = key.shape[1:3]
    where = geometry_of(query, config, kv_len, cu_seqlens)
    group = heads // kv_heads

    def plan(queries):
        rows, seen = block_rows(where, block_indices, queries, num_keys, config)

        def attend(query, keys, values):
            out, lse = attend_rows(
                rearrange(query, "b q (k g) d -> (b q) k g d", k=kv_heads),
                rearrange(keys, "b q k s d -> (b q) k s d"),
                rearrange(values, "b q k s d -> (b q) k s d"),
                rearrange(seen, "b q k s -> (b q) k 1 s"),
                scale,
                with_lse,
            )
            if lse is not None:
                lse = rearrange(lse, "(b q) k g -> b q (k g)", b=batch)
            return rearrange(out, "(b q) k g d -> b q (k g) d", b=batch), lse

        return Chunk(Rows(rows, axes=3), attend)

    slots = batch * kv_heads * block_indices.shape[-1] * config.select_block
    row_bytes = slots * ((width + value.shape[-1]) * key.itemsize + 4 * group)
    # The batch of one call is a CUDA grid dimension, which has 16 bits.
    return Work(plan, row_bytes, most=max(1, 65535 // batch))


def block_rows(where, block_indices, queries, num_keys, config):
    """Return two arrays about the keys in the selected blocks of a chunk of queries. The first
    array has the index of each key in `[B*S*Hkv]`. The second array states whether the query
    attends to the key. Both arrays are `[B, Q, Hkv, n*l']`.
    """
    blocks = block_indices[:, queries].to(torch.int64)
    batch, _, kv_heads, _ = blocks.shape
    inside = torch.arange(config.select_block, device=blocks.device)
    token = blocks[..., None] * config.select_block + inside  # positions in the sequence
    seen = (blocks[..., None] >= 0) & (token <= where.position[:, queries, None, None, None])
    # Zero times NaN is NaN. A masked slot therefore has the index of the query's own token, and a
    # padding query has no index of a row.
    own = where.key_index[:, queries, None, None, None]
    index = torch.where(seen, token + where.key_start[:, queries, None, None, None], own)
    batch_start = torch.arange(batch, device=blocks.device) * num_keys
    head = torch.arange(kv_heads, device=blocks.device)[:, None, None]
    rows = (index + batch_start[:, None, None, None, None]) * kv_heads + head
    if where.padded:
        rows = torch.where(own < 0, batch * num_keys * kv_heads, rows)
    merged = "b q k n l -> b q k (n l)"
    return rearrange(rows, merged), rearrange(seen, merged)


def _dense(seen, scale, with_lse):
    """Compute attention over keys `[B, K, Hkv, D]` that all queries share. `seen` [B, Q, K] is
    the mask.
    """

    def attend(query, key, value):
        length = query.shape[1]
        # A key to which no query attends may be padding, and 0 * NaN is NaN.
        unseen = ~seen.any(dim=1)[..., None, None]
        key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
        # The heads of a group are rows of one matrix. K and V are therefore not repeated.
        group = query.shape[2] // key.shape[2]
        out, lse = attend_rows(
            rearrange(query, "b q (k g) d -> b k (g q) d", g=group),
            rearrange(key, "b s k d -> b k s d"),
            rearrange(value, "b s k d -> b k s d"),
            repeat(seen, "b q s -> b 1 (g q) s", g=group),
            scale,
            with_lse,
        )
        if lse is not None:
            lse = rearrange(lse, "b k (g q) -> b q (k g)", q=length)
        return rearrange(out, "b k (g q) d -> b q (k g) d", q=length), lse

    return attend


def attend_rows(query, key, value, seen, scale, with_lse) -> tuple[Any, Any]:
    """Compute attention of queries `[N, Hkv, R, D]` to keys `[N, Hkv, K, D]`. The mask `seen`
    is broadcast to `[N, Hkv, R, K]`.
    """
    given, dtype, empty = query.dtype, wide(query.dtype), ~seen.any(dim=-1, keepdim=True)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, logits = query.masked_fill(empty, 0), None
    if query.device.type == "cpu" and given is not torch.bfloat16:
        # SDPA adds -inf to masked logits, which turns a masked NaN or infinity into NaN. On a CPU,
        # the flash kernel of SDPA uses a 20-bit exponential, which doubles the error of float32
        # gradients. The flash kernel also stores the gradients of float16 probabilities in float16,
        # in which these gradients overflow under a loss scale. Chunks are so small that the plain
        # formula needs little memory.
        logits = _logits(query.to(dtype), key.to(dtype), seen, empty, scale)
        out = (logits.softmax(dim=-1).masked_fill(~seen, 0) @ value.to(dtype)).to(given)
    else:
        # SDPA returns NaN for a row without keys. Such a row therefore attends to all keys here,
        # and its result is replaced afterwards.
        mask = (seen | empty).expand(*query.shape[:1], -1, query.shape[2], -1)
        with sdpa_kernel(BACKENDS):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    out = out.masked_fill(empty, 0)
    if not with_lse:
        return out, None
    if logits is None:
        logits = _logits(query.to(dtype), key.to(dtype), seen, empty, scale)
    return out, logits.logsumexp(dim=-1).masked_fill(empty[..., 0], float("-inf"))


def _logits(query, key, seen, empty, scale):
    """Compute logits, which are -inf where the mask `seen` is False. The logits of `empty` rows are
    finite, since the gradient that torch computes for a log-sum-exp of -inf is NaN.
    """
    logits = (query * scale) @ key.transpose(-1, -2)
    unseen = torch.where(empty, 0.0, float("-inf")).to(logits.dtype)
    return torch.where(seen, logits, unseen)

"""The oracle on torch tensors: every branch dense, explicit masks, plain autograd.

It computes in float32 (float64 for float64 input), needs memory for `[T, S]` per head, shares
no code with the fast paths, and is never chosen for its speed. With a `compute_dtype` it
computes in that: the yardstick of the tolerance rule. Source: arXiv 2502.11089 v2, Eqs. 5-12.
Arguments and shapes as in `nsa_torch.functional`.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, reduce


def _tokens(batch, num_keys, num_queries, kv_len, cu_seqlens, device):
    """Each key's sequence [B, S] (-1: none) and position in it, each query's index [B, T]."""
    index = torch.arange(num_keys, device=device).expand(batch, num_keys)
    if isinstance(kv_len, torch.Tensor):
        lengths = kv_len.to(device, torch.int64).expand(batch)
    else:
        lengths = torch.full((batch,), kv_len, dtype=torch.int64, device=device)
    if cu_seqlens is None:
        sequence = torch.where(index < lengths[:, None], 0, -1)
        position = index
    else:
        bounds = cu_seqlens.to(device, torch.int64)
        begun = (bounds[:-1, None] <= index[0]).sum(dim=0) - 1
        sequence = torch.where(index[0] < bounds[-1], begun, -1)[None]
        position = index - bounds[:-1][begun]
    query_index = torch.arange(num_queries, device=device) + lengths[:, None] - num_queries
    return sequence, position, query_index


def _windows(sequence, position, config):
    """Key index of the first token of each compressed token: `[C]`, -1 for unused slots."""
    num_keys, length = sequence.numel(), config.compress_block
    count = config.num_compressed(num_keys)
    if not count:
        return torch.full((0,), -1, device=sequence.device)
    first = torch.arange(num_keys - length + 1, device=sequence.device)
    whole = (sequence[first] >= 0) & (sequence[first] == sequence[first + length - 1])
    whole &= position[first] % config.compress_stride == 0
    starts = torch.where(whole, first, num_keys).sort().values[:count]
    return torch.where(starts < num_keys, starts, -1)


def _num_keys(compressed_key, kv_len, config) -> int:
    if isinstance(kv_len, torch.Tensor):
        return compressed_key.shape[1] * config.compress_stride + config.compress_block - 1
    return kv_len


def _attend(query, key, value, mask, scale, compute_dtype=None):
    """Softmax attention under `mask` [B, Hkv or 1, T, S]: out, lse, probabilities, logits."""
    wide = torch.promote_types(query.dtype, torch.float32)
    dtype = compute_dtype or wide
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = rearrange(query.to(dtype), "b t (k g) d -> b t k g d", k=key.shape[2])
    mask = mask[:, :, None]
    # Unread keys must not count, be they NaN.
    read = rearrange(mask.any(dim=3), "b k 1 s -> b s k 1")  # k: Hkv or 1
    key, value = (torch.where(read, x.to(dtype), 0) for x in (key, value))
    some = mask.any(dim=-1, keepdim=True)  # [B, Hkv or 1, 1, T, 1]
    grouped = torch.where(rearrange(some, "b k g t 1 -> b t k g 1"), grouped, 0)
    logits = torch.einsum("btkgd,bskd->bkgts", grouped, key) * scale
    # Rows without keys keep finite logits, so that no NaN is ever made.
    logits = torch.where(mask, logits, float("-inf")).masked_fill(~some, 0)
    lse = logits.logsumexp(dim=-1).masked_fill(~some[..., 0], float("-inf"))
    probs = logits.softmax(dim=-1).masked_fill(~mask, 0)
    out = torch.einsum("bkgts,bskd->btkgd", probs, value)
    out = torch.where(rearrange(some, "b k g t 1 -> b t k g 1"), out, 0)
    out = rearrange(out, "b t k g d -> b t (k g) d").to(query.dtype)
    return out, rearrange(lse, "b k g t -> b t (k g)").to(wide), probs, logits


def _compressed(query, key, value, config, kv_len, cu_seqlens, scale, compute_dtype=None):
    """`_attend` over the compressed tokens, and the stride of its sequence, `[C]`, at which each of
    them begins.
    """
    batch, num_queries = query.shape[:2]
    num_keys = _num_keys(key, kv_len, config)
    tokens = _tokens(batch, num_keys, num_queries, kv_len, cu_seqlens, query.device)
    sequence, position, query_index = tokens
    if cu_seqlens is None:
        own = torch.zeros_like(query_index)
        starts = torch.arange(key.shape[1], device=query.device) * config.compress_stride
        owner = torch.zeros_like(starts)
        local = starts
    else:
        own = sequence.gather(1, query_index)
        starts = _windows(sequence[0], position[0], config)
        owner = torch.where(starts >= 0, sequence[0, starts], -2)
        local = position[0, starts]
    mask = own[:, :, None] == owner
    mask = mask & (starts + config.compress_block - 1 <= query_index[:, :, None])
    found = _attend(query, key, value, mask[:, None], scale, compute_dtype)
    return *found, local // config.compress_stride


def compressed_attention(
    query,
    compressed_key,
    compressed_value,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
    compute_dtype=None,
):
    pair = compressed_key, compressed_value
    place = config, kv_len, cu_seqlens
    return _compressed(query, *pair, *place, scale, compute_dtype)[:2]


@torch.no_grad()
def _scores(query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None):
    """Scores `[B, T, Hkv, N]` (Eqs. 8-10), and their logarithms."""
    value, place = compressed_key[..., :0], (config, kv_len, cu_seqlens, scale)
    *_, probs, logits, begins = _compressed(query, compressed_key, value, *place)
    ratio = config.select_block // config.compress_stride
    cover = config.compress_block // config.compress_stride
    num_blocks = config.num_blocks(_num_keys(compressed_key, kv_len, config))
    group = rearrange(logits.log_softmax(dim=-1).logsumexp(dim=2), "b k t c -> b t k c")
    # By the stride at which a token of the query's sequence begins; the spare one takes the rest.
    size = num_blocks * ratio
    logs = group.new_full((*group.shape[:3], size + 1), float("-inf"))
    logs.scatter_reduce_(-1, begins.clamp(max=size).expand_as(group), group, "amax")
    logs = F.pad(logs[..., :size], (cover - 1, 0), value=float("-inf"))
    # Eq. 9: of the tokens that overlap a block, those at its ends share less strides with it.
    tokens = torch.arange(1, ratio + cover, device=query.device)
    weights = torch.minimum(tokens, ratio + cover - tokens).clamp(max=cover)
    logs = (logs.unfold(-1, ratio + cover - 1, ratio) + weights.to(group).log()).logsumexp(
        dim=-1
    )
    # One stride block of every window at a time.
    group = reduce(probs, "b k g t c -> b t k c", "sum")
    scores = group.new_zeros(*group.shape[:3], num_blocks + 1)
    for part in range(cover):
        scores.index_add_(-1, ((begins + part) // ratio).clamp(max=num_blocks), group)
    return scores[..., :-1], logs


def block_scores(query, compressed_key, **options):
    """Importance of every selection block, `[B, T, Hkv, N]` (Eqs. 8-10)."""
    return _scores(query, compressed_key, **options)[0]


@torch.no_grad()
def select_blocks(query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None):
    scores, logs = _scores(
        query,
        compressed_key,
        config=config,
        kv_len=kv_len,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
    # Logarithms, less than all scores, order those of which terms are too small for the dtype.
    limits = torch.finfo(scores.dtype)
    scores = torch.where(scores < limits.tiny * 2**36, logs.clamp(min=limits.min), scores)
    batch, num_queries, _, num_blocks = scores.shape
    num_keys = kv_len if cu_seqlens is not None else 0
    sequence, position, index = _tokens(
        batch, num_keys, num_queries, kv_len, cu_seqlens, query.device
    )
    if cu_seqlens is not None:
        index = torch.where(sequence >= 0, position, -1).gather(1, index)
    own = index.div(config.select_block, rounding_mode="floor")[:, :, None, None]
    block = torch.arange(num_blocks, device=query.device)
    forced = (block < config.num_initial) | (block > own - config.num_local)
    ranked = torch.where(forced, float("inf"), scores)
    ranked = torch.where(block <= own, ranked, float("-inf"))
    # As many blocks as are selected, at least.
    ranked = F.pad(ranked, (0, config.num_selected), value=float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    order = order[..., : config.num_selected]
    chosen = torch.where(order <= own, order, num_blocks).sort(dim=-1).values
    return torch.where(chosen == num_blocks, -1, chosen).to(torch.int32)


def selected_attention(
    query,
    key,
    value,
    block_indices,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
    compute_dtype=None,
):
    batch, num_keys = key.shape[:2]
    sequence, position, index = _tokens(
        batch, num_keys, query.shape[1], kv_len, cu_seqlens, query.device
    )
    own = sequence.gather(1, index.clamp(min=0))[:, :, None]
    block = (position // config.select_block)[:, None, None]  # [B, 1, 1, S]
    chosen = torch.zeros(1, dtype=torch.bool, device=query.device)
    for slot in block_indices.unbind(dim=-1):
        chosen = chosen | (slot[..., None] == block)
    mask = (sequence[:, None] == own) & (own >= 0)
    mask &= torch.arange(num_keys, device=query.device) <= index[:, :, None]
    mask = rearrange(chosen, "b t k s -> b k t s") & mask[:, None]
    return _attend(query, key, value, mask, scale, compute_dtype)[:2]


def sliding_attention(
    query,
    key,
    value,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
    compute_dtype=None,
):
    batch, num_keys = key.shape[:2]
    sequence, _, index = _tokens(
        batch, num_keys, query.shape[1], kv_len, cu_seqlens, query.device
    )
    own = sequence.gather(1, index.clamp(min=0))[:, :, None]
    distance = index[:, :, None] - torch.arange(num_keys, device=query.device)
    mask = (sequence[:, None] == own) & (own >= 0)
    mask &= (distance >= 0) & (distance < config.window)
    return _attend(query, key, value, mask[:, None], scale, compute_dtype)[:2]

"""Computes the attention of released models that select key blocks. The computation runs on
`nsa_torch.block_attention`.

`MiniMaxM3VLAttention` (transformers 5.17) passes `block_indices` [B, heads of its indexer, Sq, n]
to an attention function. The indices are int64, with -1 in empty slots. Block `j` has the slots
`range(j * block, (j + 1) * block)` of the key axis, padding included. The implementations `eager`
and `sdpa` of transformers convert the indices to a dense mask, `[B, H, Sq, Sk]`. The function
`block_attention` of this module passes the indices to `nsa_torch.block_attention`. Neither the
forward nor the backward pass allocates an array of size `Sq * Sk`. The query in slot `q` attends to
the keys in slots `k <= q` whose block is selected and which are not padding.

Padding tokens on the left have no key to attend to. The output of padding on the left is the mean
of all values, the same as with the dense mask of `sdpa`. The output of padding matters because
the model's indexer scores padding too. Gradients of the output of padding reach only the values.

Importing `nsa_torch.huggingface` registers the function as `attn_implementation="nsa_blocks"`. A
mask function is also registered as `nsa_blocks`. Without this mask function, transformers would
drop the padding and pass None. With `attn_implementation="nsa_blocks"` the model's indexer runs on
`nsa_torch.index_blocks`. The original indexer would compute scores `[B, index heads, Sq, Sk]` in
float32.
"""

import functools
import sys
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

import nsa_torch
from nsa_core.index import Index
from nsa_torch.huggingface.rows import BORDERS, INDEX
from nsa_torch.indexers import blocks_at
from nsa_torch.shared import is_capturing

NAME = "nsa_blocks"
NAMES: set[str] = set()  # all names that were registered
TAKEN: set[type] = set()  # classes whose `forward` was replaced
MODEL = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
# Padding is masked by `LANES` additional columns of each head. These columns are 1 in queries,
# `HIDDEN` in keys that are padding, and 0 in other keys. There are 16 of them, since kernels
# require widths that are multiples of 16. The logit of padding is about 16 * HIDDEN * scaling,
# for which exp() is 0 in every dtype.
LANES, HIDDEN = 16, -30000.0
# Arguments that the attention of other models receives and that this function would ignore:
# sinks, windows, biases, boundaries of packed rows, and `indices`, the single tokens that
# models such as DeepSeek-V3.2 select.
FOREIGN = ("s_aux", "sliding_window", "softcap", "position_bias", "indices", *BORDERS, INDEX)


def register_block_attention(name: str = NAME, *, implementation: str | None = None) -> None:
    """Register `block_attention` and `key_states` with transformers.

    Args:
      name: The value of `attn_implementation` that selects this attention.
      implementation: The same as in `nsa_torch.block_attention`. A named implementation never
        falls back to another one. `implementation=None` means that the implementation is chosen
        automatically.
    """
    attend = functools.partial(block_attention, implementation=implementation)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, key_states)
    NAMES.add(name)


def key_states(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Compute the mask for `block_attention`. The mask has one value per key slot, instead of one
    per pair of query and key.

    Args:
      q_offset: The slot of the first query. With a static cache `q_offset` is a tensor.
      attention_mask: `[B, slots]`, True for tokens and False for padding. The mask may have fewer
        than `kv_length` slots.
      config: The config of the text model, whose `index_block_size` is read.

    Returns:
      None if there is no padding and the last key belongs to the last query's token. In all other
      cases the mask is int8 `[B, 1, 1 or 2, Sk]`. The first row of the mask is 1 in all slots up to
      the slot of the last query. The second row exists only with padding, and is 1 for tokens and 0
      for padding.

    Raises:
      NotImplementedError: The rows are packed, the caller passes a mask function, the cache has a
        sliding window, or a row has padding between its tokens. The error is also raised if a row
        has `index_block_size` or more padding slots on the left. The model's indexer counts
        positions from the first token, but blocks from slot 0. In a row with `index_block_size`
        padding slots on the left, the first token would have no key. For a query without keys, the
        implementations of transformers average all values, including values of later tokens.
    """
    take_over()  # a model computes its mask before its layers run
    if mask_function is not causal_mask_function:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} supports only the causal mask, got packed rows "
            "(position_ids that restart) or a mask function"
        )
    if kv_offset:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} supports only caches that retain every key, "
            f"got a cache that starts at slot {kv_offset}"
        )
    real = None if attention_mask is None else attention_mask.to(device, torch.bool)
    if real is not None:
        real = F.pad(real[:, :kv_length], (0, max(kv_length - real.shape[1], 0)))
    end = q_offset + q_length
    filled = torch.arange(kv_length, device=device) < end
    if real is not None and not _is_padded(real, filled, config):
        real = None
    if real is None:
        if isinstance(end, int) and end == kv_length:
            return None
        return filled.to(torch.int8).expand(batch_size, 1, 1, kv_length)
    return torch.stack([filled.expand_as(real), real], dim=1).to(torch.int8)[:, None]


def _is_padded(real: Tensor, filled: Tensor, config: Any) -> bool:
    """Return whether any row of `real` [B, Sk] has padding. For this check the host waits for the
    device once per forward pass. Under torch.compile and in a CUDA graph, padding is not checked,
    since the check would make the host wait for the device.
    """
    if torch.compiler.is_compiling() or is_capturing(real.device):
        return True
    starts = (real[:, 1:] & ~real[:, :-1]).sum(dim=1) + real[:, 0]
    left = torch.where(real.any(dim=1), real.int().argmax(dim=1), 0)
    facts = torch.stack([(filled & ~real).sum(), starts.max(), left.max()])
    padded, most_starts, most_left = facts.tolist()
    if most_starts > 1:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} supports no padding between the tokens of a row, got "
            f"an attention_mask with {most_starts} separate runs of tokens in one row"
        )
    block = getattr(config, "index_block_size", None)
    if block is not None and most_left >= block:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} supports fewer than index_block_size={block} "
            f"columns of padding on the left, got {most_left}; pad on the right, since "
            "the first token of such a row has no key"
        )
    return bool(padded)


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    block_indices: Tensor | None = None,
    implementation: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run `nsa_torch.block_attention` through the interface of an attention function of
    transformers. Return the output `[B, Sq, H, Dv]`, and None in place of the attention
    weights. Layers without selected blocks, such as dense layers and the vision tower, run on
    `sdpa` of transformers.

    Args:
      module: The attention module. The function reads its `indexer.block_size` and
        `indexer.topk_blocks`.
      query, key, value: `[B, H, Sq, D]`, `[B, Hkv, Sk, D]`, `[B, Hkv, Sk, Dv]`; the queries are
        the last `Sq` filled slots.
      attention_mask: The result of `key_states`.
      dropout: Must be 0 if `block_indices` are given.
      scaling: Factor of the logits. `scaling=None` means `D**-0.5`.
      block_indices: `[B, heads, Sq, n]`, of any integer dtype and in any order, negative in
        empty slots. `heads` divides Hkv. Blocks after the query are ignored. A list must not
        contain a block twice.
      implementation: The same as in `nsa_torch.block_attention`.
    Raises:
      ValueError: Shapes contradict each other, or the mask was not computed by `key_states`.
      NotImplementedError: The call has dropout with selected blocks, sinks, a sliding window,
        softcapping, a position bias, indices of single tokens, or packed rows.
    """
    for name in FOREIGN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} must be None with attn_implementation={NAME!r}, got {kwargs[name]!r}"
            )
    if block_indices is None:
        return _dense(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    if dropout:
        raise NotImplementedError(
            f"dropout must be 0 with attn_implementation={NAME!r}, got {dropout}"
        )
    (batch, heads, length, width), (kv_heads, num_keys) = query.shape, key.shape[1:3]
    mask, filled, real = attention_mask, None, None
    if mask is not None:
        if not _is_key_states(mask) or mask.shape[-1] != num_keys:
            raise ValueError(
                f"attention_mask of the model must be [B, slots] of 0 and 1 with "
                f"attn_implementation={NAME!r}, but a layer got {mask.dtype} {tuple(mask.shape)}"
            )
        filled, *padded = mask[:, 0].unbind(1)
        real = padded[0] != 0 if padded else None
    # scaled_dot_product_attention casts its inputs in the same way
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    indexer = cast(Any, module.indexer)
    # Lists of equal length make one kernel serve all lengths.
    spare = max(indexer.topk_blocks - block_indices.shape[-1], 0)
    lists = F.pad(block_indices, (0, spare), value=-1).to(torch.int32)
    # with a cache, each head of [B, Hkv, Sk, D] becomes a row, and is then read without a copy
    if length < num_keys:
        lists = lists.repeat_interleave(kv_heads // lists.shape[1], dim=1)
        query = query.unflatten(1, (kv_heads, -1)).flatten(0, 1)
        key, value, lists = (x.flatten(0, 1).unsqueeze(1) for x in (key, value, lists))
        filled, real = (
            None if x is None else x.repeat_interleave(kv_heads, dim=0) for x in (filled, real)
        )
    query, key, value, lists = (x.transpose(1, 2) for x in (query, key, value, lists))
    # queries and keys become `[.., D + LANES]`, so that keys of padding have weight 0
    if real is not None:
        lanes = (~real)[..., None, None].to(key.dtype) * HIDDEN
        key = torch.cat([key, lanes.expand(-1, -1, key.shape[2], LANES)], dim=-1)
        query = F.pad(query, (0, LANES), value=1.0)
    kv_len = num_keys if filled is None else filled.sum(dim=1)
    found = nsa_torch.block_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        lists,
        block_size=indexer.block_size,
        kv_len=kv_len,
        scale=width**-0.5 if scaling is None else scaling,
        implementation=implementation,
    )
    out = cast(Tensor, found)
    if real is not None:
        end = kv_len[:, None] if isinstance(kv_len, Tensor) else kv_len
        slots = torch.arange(length, device=out.device)[None] + (end - length)
        behind = real.cumsum(dim=1).gather(1, slots) > 0
        mean = value.mean(dim=1, keepdim=True).repeat_interleave(
            out.shape[2] // value.shape[2], dim=2
        )
        out = torch.where(behind[..., None, None], out, mean)
    if out.shape[0] > batch:
        out = out.unflatten(0, (batch, kv_heads)).transpose(1, 2)
    return out.reshape(batch, length, heads, -1), None


def _dense(module, query, key, value, mask, dropout, scaling, rest):
    """Run transformers' `sdpa` with the mask that transformers would have passed.

    A mask is needed if there are fewer queries than keys, since `sdpa` aligns its own causal mask
    with the first key.
    """
    length, num_keys = query.shape[2], key.shape[2]
    index = functools.partial(torch.arange, device=query.device)
    causal = rest.get("is_causal", getattr(module, "is_causal", True))
    end, real = num_keys, None
    if _is_key_states(mask):
        end, real = mask[:, :, :1].sum(dim=-1, keepdim=True), mask[:, :, -1:] != 0
    if real is not None or (mask is None and causal and 1 < length < num_keys):
        at_or_before = index(num_keys) <= end - length + index(length)[:, None]
        mask = at_or_before[None, None] if real is None else real & at_or_before
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **rest
    )


def _is_key_states(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int8 and mask.ndim == 4


def take_over() -> None:
    """Make the indexer of MiniMax-M3 run `nsa_torch.index_blocks`, if the code of that model has
    been imported. If `attn_implementation` is not one of `NAMES`, the original indexer still
    runs.
    """
    module: Any = sys.modules.get(MODEL)
    if module is None or module.MiniMaxM3VLIndexer in TAKEN:
        return
    TAKEN.add(module.MiniMaxM3VLIndexer)
    theirs = module.MiniMaxM3VLIndexer.forward

    @functools.wraps(theirs)
    def forward(self, *given: Any, **named: Any) -> Tensor:
        if self.config._attn_implementation not in NAMES:
            return theirs(self, *given, **named)
        return chosen_blocks(self, module.apply_rotary_pos_emb, *given, **named)

    module.MiniMaxM3VLIndexer.forward = forward


def chosen_blocks(
    indexer: Any,
    rotate: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> Tensor:
    """Return the blocks that the indexer selects, int32 `[B, index heads, Sq, n]`, ascending.
    Empty slots at the end contain the index -1.

    Args:
      indexer: a `MiniMaxM3VLIndexer`.
      rotate: the function `apply_rotary_pos_emb` of the model.
      hidden_states: `[B, Sq, E]`.
      position_embeddings: cosines and sines `[B, Sq, .]`.
      cache: The cache with the indexer's keys of each layer, or None.
      position_ids: `[B, Sq]`. A query attends to key slots up to its own position.
    """
    query, key = (
        norm(projection(hidden_states).unflatten(-1, (-1, indexer.head_dim)))
        for norm, projection in (
            (indexer.q_norm, indexer.q_proj),
            (indexer.k_norm, indexer.k_proj),
        )
    )
    cos, sin = (x[..., : indexer.head_dim] for x in position_embeddings)
    query, key = rotate(query, key, cos, sin, unsqueeze_dim=2)
    key = key.squeeze(2)
    if cache is not None:
        layer = cache.layers[indexer.layer_idx]
        key = layer.update_index(key[:, None])[:, 0]
    chosen = indexer.topk_blocks, 0, indexer.local_blocks
    index = Index(indexer.block_size, *chosen, None, None, 1)
    return blocks_at(query, key, position_ids, index).transpose(1, 2)

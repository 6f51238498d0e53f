"""Selects the blocks that a query reads. The probabilities of the compressed branch give a score
per block, and the `n` blocks with the highest scores are selected.

Source: arXiv 2502.11089 v2, Eqs. 8-12. All arrays are float32 (float64 for float64 input) and
have no gradient. On a CPU, scores that are too small for the dtype are compared by their
logarithms. The logarithms are computed only if they decide the selection.
"""

import functools
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from nsa_core import selection
from nsa_core.config import NSAConfig
from nsa_torch import operators
from nsa_torch.chunks import chunks, wide
from nsa_torch.geometry import geometry_of
from nsa_torch.plain import as_given
from nsa_torch.torch_ops import TORCH_OPS


def _select_blocks(query, compressed_key, assume_finite, *layout_args) -> list[Tensor]:
    layout = operators.unpack_layout(*layout_args)

    def rule(scores, own, log_scores):
        return select_from_scores(scores, own, layout["config"], log_scores)

    return [blocks_by(rule, query, compressed_key, **layout)]


@torch.no_grad()
def blocks_by(
    rule: Callable[[Tensor, Tensor, Callable[[], Tensor]], Tensor],
    query: Tensor,
    compressed_key: Tensor,
    *,
    config: NSAConfig,
    kv_len,
    cu_seqlens=None,
    scale=None,
) -> Tensor:
    """Select blocks, int32 `[B, T, Hkv, n]`, with a function `rule`. The arguments of `rule`
    are the scores `[B, Q, Hkv, N]`, the query's own blocks `[B, Q, 1]`, and a function that
    returns the logarithms of the scores.
    """
    where = geometry_of(query, config, kv_len, cu_seqlens)
    (batch, length, heads, _), (count, kv_heads) = query.shape, compressed_key.shape[1:3]
    longest = kv_len
    if where.offset is None:
        longest = count * config.compress_stride + config.compress_block - 1
    num_blocks = config.num_blocks(longest)
    shape = batch, length, kv_heads, config.num_selected
    indices = query.new_empty(shape, dtype=torch.int32)
    for part in chunks(length, batch * heads * max(count, 1) * 4):
        arguments = query, compressed_key, where, part, num_blocks, config, scale
        own = where.position[:, part, None].div(config.select_block, rounding_mode="floor")
        with as_given(query):
            log_scores = functools.partial(_scores, *arguments, log=True)
            indices[:, part] = rule(_scores(*arguments), own, log_scores)
    return indices


operators.define("select_blocks/sdpa", _select_blocks, operators.index_shapes, composed=True)
# Returns int32 `[B, T, Hkv, n]`. Scores exist only for one chunk of queries at a time.
select_blocks = operators.step_of_kind("select_blocks/sdpa")


select_from_scores = functools.partial(selection.choose, TORCH_OPS)
map_to_blocks = functools.partial(selection.map_to_blocks, TORCH_OPS)


def _scores(query, compressed_key, where, part, num_blocks, config, scale, log=False):
    """Return the scores `[B, Q, Hkv, N]` of one chunk of queries, or their logarithms. Block
    indices count from the start of the query's sequence.
    """
    kv_heads, count = compressed_key.shape[2], compressed_key.shape[1]
    dtype = wide(query.dtype)
    if where.offset is not None:
        count = min(count, config.num_compressed(part.stop + where.offset))
    query = query[:, part].to(dtype)
    length = query.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = rearrange(query, "b q (k g) d -> b k (g q) d", k=kv_heads)
    key = rearrange(compressed_key[:, :count].to(dtype), "b c k d -> b k d c")
    logits = rearrange((query @ key).mul_(scale), "b k (g q) c -> b k g q c", q=length)
    seen = where.sees_compressed(part, count, config)[:, None]
    logits.masked_fill_(~seen[:, :, None], float("-inf"))
    if log:
        logits = logits.log_softmax(dim=-1)
    probs = logits.logsumexp(dim=2) if log else logits.softmax(dim=-1).sum(dim=2)
    # Softmax returns NaN for a row without keys, and the product with a masked key may be NaN.
    nothing = -torch.inf if log else 0
    probs = probs.masked_fill_(~seen, nothing)  # [B, Hkv, Q, C]
    start = None if where.cu_seqlens is None else where.compressed_start[:, None, part]
    return rearrange(map_to_blocks(probs, num_blocks, config, log, start), "b k q n -> b q k n")

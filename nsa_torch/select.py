"""The selection of the blocks that a query reads: scores from compressed probabilities, then top-n.

Source: arXiv 2502.11089 v2, Eqs. 8-12. Everything here is float32 and carries no gradient. Scores
too small for float32 are compared by their logarithms, which are made only if they decide.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from nsa_core import selection
from nsa_core.config import NSAConfig
from nsa_torch import operators
from nsa_torch.chunks import chunks, wide
from nsa_torch.geometry import Geometry, geometry_of
from nsa_torch.plain import as_given, plain
from nsa_torch.torch_ops import TORCH_OPS

# Times the least normal number: from here on a score is exact, though terms below that are lost.
LEAST_EXACT = 2.0**36


def _select_blocks(query, compressed_key, assume_finite, *place) -> list[Tensor]:
    place = operators.lengths(*place)

    def rule(scores, own, log_scores):
        return select_from_scores(scores, own, place["config"], log_scores)

    return [blocks_by(rule, query, compressed_key, **place)]


@torch.no_grad()
def blocks_by(
    rule: Callable[[Tensor, Tensor, Callable[[], Tensor] | None], Tensor],
    query: Tensor,
    compressed_key: Tensor,
    *,
    config: NSAConfig,
    kv_len,
    cu_seqlens=None,
    scale=None,
) -> Tensor:
    """int32 `[B, T, Hkv, n]` from a rule over scores `[B, Q, Hkv, N]`, own blocks `[B, Q, 1]` and,
    on a CPU, a function that returns the scores' logarithms.
    """
    where, num_blocks = _where(query, compressed_key, config, kv_len, cu_seqlens)
    shape = *query.shape[:2], compressed_key.shape[2], config.num_selected
    indices = query.new_empty(shape, dtype=torch.int32)
    for part in _parts(query, compressed_key):
        arguments = query, compressed_key, where, part, num_blocks, config, scale
        own = where.position[:, part, None].div(config.select_block, rounding_mode="floor")
        with as_given(query):
            # No GPU is waited for to know whether logarithms decide: scores of 0 are equal there.
            log_scores = functools.partial(_scores, *arguments, log=True)
            log_scores = log_scores if query.device.type == "cpu" else None
            indices[:, part] = rule(_scores(*arguments), own, log_scores)
    return indices


operators.define("select_blocks/sdpa", _select_blocks, operators.index_shapes, composed=True)
# int32 `[B, T, Hkv, n]`; scores never exist for all queries.
select_blocks = operators.one_step("select_blocks/sdpa")


@torch.no_grad()
def block_scores(
    query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None
) -> Tensor:
    """Importance of every selection block (Eqs. 8-10), float32 `[B, T, Hkv, N]`."""
    where, num_blocks = _where(query, compressed_key, config, kv_len, cu_seqlens)
    shape = (*query.shape[:2], compressed_key.shape[2], num_blocks)
    scores = query.new_empty(shape, dtype=wide(query.dtype))
    for part in _parts(query, compressed_key):
        scores[:, part] = _scores(query, compressed_key, where, part, num_blocks, config, scale)
    return scores


def select_from_scores(
    scores: Tensor,
    own: Tensor,
    config: NSAConfig,
    log_scores: Callable[[], Tensor] | None = None,
) -> Tensor:
    """`nsa_core.selection.choose`.

    Args:
      log_scores: Function that returns the logarithms of the scores, which order inexact scores. It
        is called only if an inexact score would be chosen and not all candidates are.
    """
    n = config.num_selected

    def ranked_again(ranked, candidate):
        if log_scores is None:
            return ranked
        limits = torch.finfo(ranked.dtype)
        least = LEAST_EXACT * limits.tiny
        decides = ((ranked >= least).sum(dim=-1) < n) & (own >= n)
        if plain([decides]) and not decides.any():  # what is traced has no numbers
            return ranked
        # Logarithms are below all scores. Those of 0 are above the value of a block that is no
        # candidate.
        log = log_scores().clamp_(min=limits.min)
        return torch.where((ranked < least) & candidate, log, ranked)

    return selection.choose(TORCH_OPS, _top, scores, own, config, ranked_again)


def _top(x: Tensor, count: int) -> Tensor:
    return x.topk(count, dim=-1).values


def map_to_blocks(
    probs: Tensor, num_blocks: int, config: NSAConfig, log: bool = False
) -> Tensor:
    """Eq. 9: `score[j] = sum_i w(i, j) * probs[..., i]`, `w` counting shared stride blocks.

    Compressed token `i` covers the stride blocks `i .. i + l/d - 1` and selection block `j`
    the stride blocks `j*r .. j*r + r - 1`, `r = l'/d`: sum by stride block, then by block.
    `log`: logarithms are given and returned.
    """
    ratio = config.select_block // config.compress_stride
    size, count = num_blocks * ratio, probs.shape[-1]
    by_stride = probs.new_full((*probs.shape[:-1], size), -torch.inf if log else 0)
    for shift in range(config.compress_block // config.compress_stride):
        end = min(size, shift + count)
        some, more = by_stride[..., shift:end], probs[..., : max(end - shift, 0)]
        some.copy_(torch.logaddexp(some, more)) if log else some.add_(more)
    return reduce(by_stride, "... (n r) -> ... n", torch.logsumexp if log else "sum", r=ratio)


def _where(query, compressed_key, config, kv_len, cu_seqlens) -> tuple[Geometry, int]:
    where = geometry_of(query, config, kv_len, cu_seqlens)
    longest = kv_len
    if where.offset is None:
        stride, block = config.compress_stride, config.compress_block
        longest = compressed_key.shape[1] * stride + block - 1
    return where, config.num_blocks(longest)


def _parts(query, compressed_key):
    batch, length, heads, _ = query.shape
    return chunks(length, batch * heads * max(compressed_key.shape[1], 1) * 4)


def _scores(query, compressed_key, where, part, num_blocks, config, scale, log=False):
    """`[B, Q, Hkv, N]` of one chunk, or their logarithms; blocks are local to the sequence."""
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
    # Softmax makes NaN of a row without keys, and a hidden key may be NaN itself.
    nothing = -torch.inf if log else 0
    probs = probs.masked_fill_(~seen, nothing)  # [B, Hkv, Q, C]
    if where.cu_seqlens is not None and count:
        slot = torch.arange(count, device=query.device)
        slot = (where.compressed_start[:, None, part, None] + slot).clamp(max=count)
        probs = F.pad(probs, (0, 1), value=nothing).gather(-1, slot.expand_as(probs))
    return rearrange(map_to_blocks(probs, num_blocks, config, log), "b k q n -> b q k n")

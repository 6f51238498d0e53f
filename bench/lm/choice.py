"""Other rules for the selection of key blocks, for experiments in torch.

With queries q of the heads h of a group, keys k, and blocks j of `l_sel` keys that the query sees:

    mass      s[j] = sum_h sum_(r in j) softmax_r(q_h . k_r): the weights of attention to all keys
    bound     s[j] = sum_h softmax_j(max of q_h . x over the box of the block's keys)
              (Quest, arXiv 2406.10774)
    middle    NSA's rule; compressed keys are means of keys before the rotation, which are then
              rotated to the middle of their window
    heads     NSA's rule for each query head: lists per query head, of one head's scores
    mass_heads   `mass` for each query head

Scores have no gradient, as NSA's have none.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from nsa_core.layer import LayerSpec
from nsa_torch import functional, heads
from nsa_torch.module import NSAAttention
from nsa_torch.select import select_from_scores

CHUNK = 1024  # queries whose logits with all keys exist at a time


class Chosen(NSAAttention):
    """NSA with blocks that `rule` selects, for training on rows of one sequence."""

    def __init__(self, *args, rule: str, **options):
        super().__init__(*args, **options)
        self.rule = rule

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        position = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        query, key, value, gates = self.project(x, position)
        indices = blocks(self, query, key.compressed, key.selected)
        if indices.shape[2] == query.shape[2]:  # lists per query head: each has keys of its own
            group = query.shape[2] // key.selected.shape[2]
            key, value = (
                type(each)(*(x.repeat_interleave(group, dim=2) for x in each))
                for each in (key, value)
            )
        out = functional.attention(
            *(query, key, value, gates),
            config=self.spec.config,
            block_indices=indices,
            implementation=self.implementation,
        )
        return self.out(out.flatten(2)), None


@torch.no_grad()
def blocks(
    attention: NSAAttention, query: Tensor, compressed: Tensor, selected: Tensor
) -> Tensor:
    """Return the blocks that queries `[B, T, H, D]` select, int32 `[B, T, lists, n]`, by the
    layer's rule; `compressed`, `selected`: keys `[B, T, Hkv, D]` of these branches.
    """
    spec, rule = attention.spec, getattr(attention, "rule", "")
    config, length = spec.config, query.shape[1]
    if rule in ("", "middle", "heads"):
        if rule == "middle":
            found = _rotated_to_the_middle(compressed, spec)
        else:
            params = attention.compress_params()[0]
            found = functional.compress(compressed, params, config=config)
        if rule == "heads":
            found = found.repeat_interleave(query.shape[2] // found.shape[2], dim=2)
        return functional.select_blocks(query, found, config=config)
    lists = []
    for start in range(0, length, CHUNK):
        at = torch.arange(start, min(start + CHUNK, length), device=query.device)
        part = query[:, start : start + CHUNK] * query.shape[-1] ** -0.5
        part = rearrange(part, "b t (g h) d -> b g h t d", g=selected.shape[2])
        own = at // config.select_block
        score = _mass if rule.startswith("mass") else _bound
        scores = score(part, selected[:, : start + CHUNK], at, spec)
        if rule != "mass_heads":  # a list per key/value head
            scores = scores.sum(dim=2, keepdim=True)
        scores = rearrange(scores, "b g h t n -> b t (g h) n")
        lists.append(select_from_scores(scores, own[None, :, None], config))
    return torch.cat(lists, dim=1)


def _mass(query: Tensor, key: Tensor, at: Tensor, spec: LayerSpec) -> Tensor:
    """Return the probabilities of all keys `[B, S, Hkv, D]`, summed by block:
    `[B, Hkv, G, t, N]`.
    """
    length = key.shape[1]
    start = length - len(at)  # keys before the first query are seen by all
    logits = torch.einsum("bghtd,bsgd->bghts", query, key)
    later = torch.arange(start, length, device=key.device) > at[:, None]
    logits[..., start:].masked_fill_(later, float("-inf"))
    p = logits.softmax(-1)
    if rest := -length % spec.l_sel:
        p = F.pad(p, (0, rest))
    return p.unflatten(-1, (-1, spec.l_sel)).sum(-1, dtype=torch.float32)


def _bound(query: Tensor, key: Tensor, at: Tensor, spec: LayerSpec) -> Tensor:
    """Compute softmax over the blocks of the highest score that a key in the block's box can
    have.
    """
    rest = -key.shape[1] % spec.l_sel
    padded = torch.cat([key, key[:, -1:].expand(-1, rest, -1, -1)], dim=1)
    of_block = padded.unflatten(1, (-1, spec.l_sel))
    low, high = of_block.amin(2), of_block.amax(2)  # [B, N, Hkv, D]
    most = torch.einsum("bghtd,bngd->bghtn", query.relu(), high)
    most = most - torch.einsum("bghtd,bngd->bghtn", (-query).relu(), low)
    block = torch.arange(low.shape[1], device=key.device)
    later = block > (at // spec.l_sel)[:, None]
    return most.float().masked_fill(later, float("-inf")).softmax(-1)


def _rotated_to_the_middle(key: Tensor, spec: LayerSpec) -> Tensor:
    """Compress rotated keys, `[B, C, Hkv, D]`, and rotate the result to the middle of each
    window.
    """
    rates = heads.rates(spec.d_k, spec.rope_base, spec.rope_scaling, key.device)
    rates = rates / spec.rope_scale

    def turned(x: Tensor, position: Tensor) -> Tensor:
        angle = (position[:, None] * rates)[:, None]
        return heads._rotated(x, angle.cos(), angle.sin())

    raw = turned(key, -torch.arange(key.shape[1], device=key.device))
    means = functional.compress(raw, config=spec.config)
    first = torch.arange(means.shape[1], device=key.device) * spec.d
    return turned(means, first + (spec.l - 1) / 2).to(key.dtype)

"""Judges attention to a long sequence by a few rows of the output, one row per token, for
`bench.scale --check rows`.

The gradient of the output is zero except in the judged rows. All gradients, including the gradients
of the keys and values of other rows, follow only from the judged rows. A float32 oracle computes
the gradients row by row. The selected blocks are given, since the choice of another block is not an
arithmetic error.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_core.config import NSAConfig

from .scale_problem import Problem

ROWS = 16


def rows_of(problem: Problem) -> list[int]:
    """Return the indices of the judged tokens: the first, the last, and random tokens between
    them.
    """
    draw = torch.Generator().manual_seed(0)
    found = (1 + torch.randperm(problem.S - 2, generator=draw)[: ROWS - 2]).tolist()
    return sorted({0, problem.S - 1, *found})


def places(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return two arrays `[S]`. For each token, the first array has the first token of its document,
    and the second array has the position of the token in the document.
    """
    lengths = torch.tensor(problem.documents or (problem.S,))
    start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return start, torch.arange(problem.S) - start


def selection(position: Tensor, kv_heads: int, config: NSAConfig) -> Tensor:
    """Return a selection, int32 `[T, Hkv, n]`. A query selects its own block, and other blocks at
    equal distances from each other. The positions of the other blocks differ between heads. A query
    with fewer than n blocks selects all blocks, with -1 in empty slots.

    Args:
      position: `[T]`, the position of each query in its document.
      kv_heads: Number of key/value heads.
      config: Block size and number of selected blocks.
    """
    count = config.num_selected
    own = (position // config.select_block)[:, None, None]
    number = torch.arange(count, device=position.device)
    head = torch.arange(kv_heads, device=position.device)[:, None]
    step = (own + 1) // count
    spread = torch.where(number < count - 1, number * step + head % step.clamp(min=1), own)
    few = torch.where(number <= own, number, -1)
    return torch.where(own < count, few, spread).to(torch.int32)


def oracle(problem: Problem, rows: Sequence[int], *arrays: Tensor) -> Tensor:
    """Return the outputs of the tokens `rows`, `[R, H, Dv]`, in the dtype of the inputs (Eqs.
    5-12).

    The oracle shares no code with the library that it judges.

    Args:
      problem: The problem.
      rows: Indices of the tokens in the sequence.
      arrays: Query `[R, H, D]`, gates `[R, H, 3]` and block indices `[R, Hkv, n]` of the rows, then
        key `[S, Hkv, D]` and value `[S, Hkv, Dv]` of all tokens.
    """
    *of_rows, key, value = arrays
    config, found = problem.config, []
    start, position = (x.tolist() for x in places(problem))
    ends = dict(
        itertools.pairwise([0, *itertools.accumulate(problem.documents or [problem.S])])
    )
    means: dict[int, list[Tensor]] = {}
    for row, query, gates, blocks in zip(rows, *of_rows, strict=True):
        first, at = start[row], position[row]
        if first not in means:
            means[first] = [_means(x[first : ends[first]], config) for x in (key, value)]
        # Queries attend to compressed token i from position i d + l - 1 on.
        count = max(0, (at + 1 - config.compress_block) // config.compress_stride + 1)
        compressed = _attended(query, *(x[:count] for x in means[first]))
        chosen = blocks.long()[..., None] * config.select_block
        chosen = chosen + torch.arange(config.select_block, device=key.device)
        seen = ((blocks >= 0)[..., None] & (chosen <= at)).flatten(1)  # [Hkv, n l']
        token = (first + chosen.clamp(0, at)).flatten(1)
        head = torch.arange(key.shape[1], device=key.device)[:, None]
        keys, values = (x[token, head].transpose(0, 1) for x in (key, value))
        selected = _attended(query, keys, values, seen)
        last = slice(max(first, row + 1 - config.window), row + 1)
        sliding = _attended(query, key[last], value[last])
        branches = torch.stack([compressed, selected, sliding], -1)
        found.append((branches * gates[:, None]).sum(-1))
    return torch.stack(found)


def _means(x: Tensor, config: NSAConfig) -> Tensor:
    """Return the compressed tokens `[C, Hkv, .]` of `x` `[S, Hkv, .]`. The compressed tokens are
    means of windows."""
    if x.shape[0] < config.compress_block:
        return x[:0]
    return x.unfold(0, config.compress_block, config.compress_stride).mean(-1)


def _attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return softmax attention `[H, Dv]` of one query `[H, D]` to keys `[n, Hkv, D]`.

    Args:
      seen: bool `[Hkv, n]`, the keys to which the query attends. `seen=None` means all keys.
    """
    if not key.shape[0]:
        return query.new_zeros(query.shape[0], value.shape[-1])
    grouped = query.unflatten(0, (key.shape[1], -1))
    logits = torch.einsum("hgd,nhd->hgn", grouped, key) * query.shape[-1] ** -0.5
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("hgn,nhd->hgd", logits.softmax(-1), value).flatten(0, 1)

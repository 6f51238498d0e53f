"""A long sequence judged by a few of its rows: `bench.scale --check rows`.

The gradient of the output is zero but in the rows that are judged. Each gradient, of all keys and
values too, then follows only from these rows, and a float32 oracle of one row after the other
computes it. The selection is given: a block more or less is no error of arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import nsa_torch
from nsa_core.config import NSAConfig

from .scale_problem import Problem

ROWS = 16


def rows_of(problem: Problem) -> list[int]:
    """Return the tokens that are judged: the first, the last, and others drawn between them."""
    draw = torch.Generator().manual_seed(0)
    found = (1 + torch.randperm(problem.S - 2, generator=draw)[: ROWS - 2]).tolist()
    return sorted({0, problem.S - 1, *found})


def places(problem: Problem) -> tuple[Tensor, Tensor]:
    """For each token, `[S]`: the first token of its document, and the position in the
    document.
    """
    lengths = torch.tensor(problem.documents or (problem.S,))
    start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return start, torch.arange(problem.S) - start


def selection(position: Tensor, kv_heads: int, config: NSAConfig) -> Tensor:
    """Return int32 `[T, Hkv, n]`: the own block, and others at equal distances, which differ by
    head.

    Args:
      position: `[T]`, of each query in its document.
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
    """Return the outputs of rows, `[R, H, Dv]`, in the dtype of the inputs: each is the last token
    of a sequence that ends there.

    Args:
      rows: numbers of tokens.
      arrays: query `[R, H, D]`, gates `[R, H, 3]` and block indices `[R, Hkv, n]` of the rows, key
        and value `[S, Hkv, D]`, `[S, Hkv, Dv]` of all tokens.
    """
    query, gates, indices, *pair = arrays
    start, found = places(problem)[0].tolist(), []
    for row, token in enumerate(rows):
        own = [x[None, row : row + 1] for x in (query, gates, indices)]
        key, value = (x[None, start[token] : token + 1] for x in pair)
        how: dict[str, Any] = {
            "config": problem.config,
            "block_indices": own[2],
            "implementation": "sdpa",
        }
        found.append(nsa_torch.attention(own[0], key, value, own[1], **how)[0])
    return torch.cat(found)

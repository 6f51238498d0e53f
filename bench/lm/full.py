"""Attention to all keys in the training of models with NSA.

In a full layer, the selected branch attends to all keys:

    full   = g_cmp * compressed(q) + g_sel * attention(q, all keys)        + g_win * sliding(q)
    sparse = g_cmp * compressed(q) + g_sel * attention(q, selected blocks) + g_win * sliding(q)

`ModelSpec` has two options with full layers:

- `full_share`: all layers are full in the first steps of the training.
- `alignment`: all layers are full in a random half of the steps. Each layer computes both outputs,
  and a loss draws each output towards the other (SSA, arXiv 2511.20102), averaged over layers:

      smooth_l1(full, stop_gradient(sparse)) + smooth_l1(sparse, stop_gradient(full))

Only steps of training have full layers. With a third option, `teacher`, a layer selects the blocks
to which the same layer of a dense model attends most, in training and in evaluations. With
`own_share`, the model chooses its own blocks in the last steps of the training and in evaluations.
With `exact`, a layer selects the blocks to which it would itself attend most.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_torch import functional
from nsa_torch.module import NSAAttention


def attend(
    attention: NSAAttention,
    x: Tensor,
    is_full: bool,
    aligned: bool = False,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the heads of a layer, `[B, T, H, Dv]`, and the loss of the alignment,
    float32 `[]`.

    Args:
      attention: The layer, whose compressed tokens are means.
      x: The input of the layer, `[B, T, dim]`. Each row must be one sequence.
      is_full: Whether the output is that of a full layer.
      aligned: Whether to compute the loss. Without `aligned`, the loss is None.
      block_indices: The blocks of a layer that is not full, as in `nsa_torch.attention`.
    """
    query, key, value, gates = attention.project(
        x, torch.arange(x.shape[1], device=x.device)[None]
    )

    def nsa(gates: Tensor | Branches[Tensor]) -> Tensor:
        return functional.attention(
            *(query, key, value, gates),
            config=attention.config,
            block_indices=block_indices,
            implementation=attention.implementation,
        )

    if not (is_full or aligned):
        return nsa(gates), None
    q, k, v = (each.transpose(1, 2) for each in (query, key.selected, value.selected))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    compressed, selected, sliding = gates.unbind(-1)
    other_branches = nsa(Branches(compressed, torch.zeros_like(selected), sliding))
    full = other_branches + selected[..., None] * dense.transpose(1, 2)
    if not aligned:
        return full, None
    sparse = nsa(gates)
    a, b = full.float(), sparse.float()
    loss = F.smooth_l1_loss(a, b.detach()) + F.smooth_l1_loss(b, a.detach())
    return full if is_full else sparse, loss


@torch.no_grad()
def best_blocks(attention: Any, x: Tensor, config: NSAConfig) -> Tensor:
    """Return the blocks to which a layer attends most if it attends to all keys, int32
    `[B, T, Hkv, n]` with -1 in empty slots. The attention to a block is summed over the keys of
    the block and over the query heads of a group. Blocks that `config` always selects are among
    the blocks.

    Args:
      attention: The layer, an `NSAAttention` with the keys of its selected branch, or a
        `torch_lm.DenseAttention`.
      x: The input of the layer `[B, T, dim]`. Each row must be one sequence.
      config: Block size and number of selected blocks.
    """
    where = torch.arange(x.shape[1], device=x.device)
    query, key, _, _ = attention.project(x, where.expand(x.shape[:2]))
    key = key.selected if isinstance(key, Branches) else key
    # A compressed token of one key is the key itself, so that the scores are sums of attention.
    every = dataclasses.replace(config, compress_block=1, compress_stride=1)
    return functional.select_blocks(query, key, config=every)

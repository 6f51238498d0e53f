"""MiniMax-M3's indexer on `index_blocks`, under the names of `block_selection`.

transformers' `MiniMaxM3VLIndexer` makes scores `[B, index heads, Sq, Sk]` in float32. `take_over`
puts a method in place of its `forward` that makes none where the model's attention is one of ours,
and calls the one that was there under every other name: `set_attn_implementation` switches both.
"""

import functools
import sys
from typing import Any

from torch import Tensor

from nsa_core.index import Index
from nsa_torch.indexer import blocks_at

_TAKEN: set[type] = set()
MODULE = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"


def take_over(names: set[str]) -> None:
    """Of models whose `attn_implementation` is one of `names`, if their code has been imported."""
    module: Any = sys.modules.get(MODULE)
    if module is None:
        return
    indexer = module.MiniMaxM3VLIndexer
    if indexer in _TAKEN:
        return
    theirs = indexer.forward

    @functools.wraps(theirs)
    def forward(self, *given: Any, **named: Any) -> Tensor:
        if self.config._attn_implementation not in names:
            return theirs(self, *given, **named)
        return chosen_blocks(self, module.apply_rotary_pos_emb, *given, **named)

    indexer.forward = forward
    _TAKEN.add(indexer)


def chosen_blocks(
    indexer: Any,
    rotate: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> Tensor:
    """int32 `[B, index heads, Sq, n]`: ascending, -1 in empty slots at the end.

    Args:
      indexer: a `MiniMaxM3VLIndexer`; rotate: its `apply_rotary_pos_emb`.
      hidden_states: `[B, Sq, E]`; position_embeddings: cos and sin `[B, Sq, .]`.
      cache: None, or what keeps the indexer's keys of each layer.
      position_ids: `[B, Sq]`; a query sees the key slots up to its own number.
    """
    query, key = index_vectors(indexer, rotate, hidden_states, position_embeddings)
    if cache is not None:
        layer = cache.layers[indexer.layer_idx]
        key = layer.update_index(key[:, None])[:, 0]
    chosen = indexer.topk_blocks, 0, indexer.local_blocks
    index = Index(indexer.block_size, *chosen, None, None, 1)
    return blocks_at(query, key, position_ids, index).transpose(1, 2)


def index_vectors(
    indexer: Any, rotate: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The indexer's queries `[B, Sq, heads, D]` and keys `[B, Sq, D]`, normed and rotated."""
    width = indexer.head_dim
    query, key = (
        norm(projection(hidden_states).unflatten(-1, (-1, width)))
        for norm, projection in (
            (indexer.q_norm, indexer.q_proj),
            (indexer.k_norm, indexer.k_proj),
        )
    )
    cos, sin = (x[..., :width] for x in position_embeddings)
    query, key = rotate(query, key, cos, sin, unsqueeze_dim=2)
    return query, key.squeeze(2)

"""Llama with NSA as github.com/zhenyi4/ssa trains it (model type `llama-nsa`), for example
zen-E/NSA-1B.

A layer is a layer of Llama with an additional projection, which computes the gates as `sigmoid(x
g_proj^T)`. The rows of `g_proj` are ordered by head, then by branch (compressed, selected,
sliding). All branches read the same rotated keys and the same values. Compressed keys and values
are means of `block_size` tokens. A query's own block is always selected, and no other block is
forced. One call of `nsa_torch.attention` computes all branches, and also selects the blocks if
`selection="exact"`. There are two kinds of selection:

- selection="exact" selects the `block_counts` best blocks (arXiv 2502.11089, Eq. 11).
- selection="trained" selects blocks as fla-org's kernel does, which processes chunks of 16 blocks
  with 16 slots. After each chunk, the slots contain the best half of their old blocks and the best
  half of the chunk. Half of the selected blocks are the best blocks before the last chunk. Up to
  half of the selected blocks are blocks of the last chunk, regardless of their scores.

zen-E/NSA-1B was trained with selection="trained" if its authors used the file that the README of
the checkpoint asks users to install.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import nsa_torch
from nsa_core import validate
from nsa_core.config import NSAConfig
from nsa_torch.huggingface.cache import CACHE
from nsa_torch.huggingface.configuration import SavedConfig
from nsa_torch.huggingface.rows import BORDERS, INDEX, LOSS, check_keywords, rows
from nsa_torch.select import blocks_by

SELECTIONS = "trained", "exact"
THEIRS = *inspect.signature(LlamaForCausalLM.forward).parameters, "return_dict", *LOSS


class LlamaNSAConfig(SavedConfig, LlamaConfig):
    """The configuration of Llama, extended by the sizes of NSA.

    Attributes:
      block_size: The number of tokens per compressed token and per selection block.
      block_counts: The number of blocks per query.
      window_size: The number of keys of the sliding branch, including the query's own.
      selection: One of `SELECTIONS`.
    Raises:
      ValueError: A size is invalid for NSA, the selection is unknown, the selection is
        "trained" but `block_counts` is not `block_size`, or attention has dropout.
    """

    model_type = "llama-nsa"
    classes = {  # noqa: RUF012
        "AutoConfig": "LlamaNSAConfig",
        "AutoModelForCausalLM": "LlamaNSAForCausalLM",
    }

    block_size: int = 16
    block_counts: int = 16
    window_size: int = 128
    selection: str = "trained"

    def __post_init__(self, **given: Any) -> None:
        super().__post_init__(**given)
        _ = self.sizes
        validate.one_of("selection", self.selection, SELECTIONS)
        if self.selection == "trained" and self.block_size != self.block_counts:
            raise ValueError(
                "selection='trained' requires block_counts == block_size, as fla-org's kernel "
                f"does, got block_counts={self.block_counts}, block_size={self.block_size}"
            )
        if self.attention_dropout:
            raise ValueError(f"attention_dropout must be 0, got {self.attention_dropout}")

    @property
    def sizes(self) -> NSAConfig:
        """The sizes of NSA as an `NSAConfig`."""
        block = self.block_size
        return NSAConfig(block, block, block, self.block_counts, 0, 1, self.window_size)


class LlamaNSAAttention(LlamaAttention):
    """The attention of a layer. This class replaces the attention of Llama, and has weights of the
    same names.
    """

    config: LlamaNSAConfig

    def __init__(self, config: LlamaNSAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, config.num_attention_heads * 3, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **rest: Any
    ) -> tuple[Tensor, None]:
        """Return the output `[B, T, E]`, and None in place of attention weights. `rest` has the
        cache and the other keyword arguments of Llama's layers.
        """
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        gates = self.g_proj(hidden_states).unflatten(-1, (-1, 3)).sigmoid()
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings, unsqueeze_dim=2)
        cache, borders = rest.get(CACHE), rest.get(BORDERS[0])
        if cache is not None:
            pair = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
            key, value = (x.transpose(1, 2).contiguous() for x in pair)
            if cache.get_seq_length(self.layer_idx) != key.shape[1]:
                raise NotImplementedError(
                    f"{CACHE} must return exactly one key per token (a dynamic cache does this), "
                    f"got {type(cache).__name__}, which returned {key.shape[1]} keys for "
                    f"{cache.get_seq_length(self.layer_idx)} tokens"
                )
        config, chosen = self.config.sizes, None
        if self.config.selection == "trained":
            chosen = trained_blocks(query, key, config, borders)
        out = nsa_torch.attention(
            query, key, value, gates, config=config, block_indices=chosen, cu_seqlens=borders
        )
        return self.o_proj(out.flatten(-2)), None


def trained_blocks(
    query: Tensor, key: Tensor, config: NSAConfig, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Select blocks as the module describes for `selection="trained"`. The result is int32 `[B,
    T, Hkv, n]`.
    """
    group = query.shape[2] // key.shape[2]
    packed: dict[str, Any] = {"config": config, "cu_seqlens": cu_seqlens}
    with torch.no_grad():
        compressed = nsa_torch.compress(key, **packed)

        def rule(scores: Tensor, own: Tensor, _) -> Tensor:
            block = torch.arange(scores.shape[-1], device=scores.device)
            own = own[..., None]
            # The scores of a group's heads add up to at most `group`, so that the query's own
            # block has the best score.
            ranked = scores.masked_fill(block == own, group).masked_fill(block > own, -1.0)
            return best_by_halves(ranked, config.num_selected)

        return blocks_by(rule, query, compressed, kv_len=key.shape[1], **packed)


def best_by_halves(scores: Tensor, places: int) -> Tensor:
    """Select at most `places` blocks as the module describes for `selection="trained"`, with
    `places` slots. `scores` are `[..., N]`, and are negative for blocks that cannot be selected.
    The result is int32 `[..., places]`, ascending, with -1 in empty slots at the end. Chunks of
    `places` blocks are processed one after the other, up to the last chunk with a block that can
    be selected.
    """
    blocks, half = scores.shape[-1], places // 2
    scores = F.pad(scores, (0, -blocks % places), value=-1.0)
    held, worth = None, scores[..., :0]
    for first in range(0, scores.shape[-1], places):
        part, order = scores[..., first : first + places].sort(
            dim=-1, descending=True, stable=True
        )
        if held is None:
            held, worth = order, part
            continue
        reached = part[..., :1] >= 0
        both = torch.cat([worth[..., :half], part[..., :half]], -1)
        both, place = both.sort(dim=-1, descending=True, stable=True)
        named = torch.cat([held[..., :half], order[..., :half] + first], -1).gather(-1, place)
        held, worth = torch.where(reached, named, held), torch.where(reached, both, worth)
    assert held is not None
    found = held.masked_fill(worth < 0, blocks).sort(-1).values
    return found.masked_fill(found == blocks, -1).to(torch.int32)


class LlamaNSAForCausalLM(LlamaForCausalLM):
    """A Llama with NSA. Load the model with `from_pretrained(path, selection="exact")` or
    `"trained"`.

    The arguments `cu_seq_lens_q`, `cu_seq_lens_k`, `cu_seqlens` or `seq_idx` describe a packed
    row. A single row whose `position_ids` restart from 0 is also a packed row.

    Raises:
      NotImplementedError: The batch has padding, the cache is not a dynamic cache of
        transformers, or a keyword has a value that no NSA model supports, such as
        `output_attentions=True`.
      TypeError: A keyword is unknown.
      ValueError: A packed row is combined with a cache, or its boundaries or positions are
        invalid.
    """

    config_class = LlamaNSAConfig

    def __init__(self, config: LlamaNSAConfig):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = LlamaNSAAttention(config, i)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **rest: Any
    ) -> Any:
        """Run the model as Llama's `forward` does."""
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise NotImplementedError(
                "attention_mask must be None or all ones, since LlamaNSAForCausalLM does not "
                "support padding"
            )
        check_keywords(rest, *THEIRS)
        given = rest.get("inputs_embeds") if input_ids is None else input_ids
        borders = None if given is None else _borders(given, self.config.sizes, rest)
        if borders is not None:
            rest |= {BORDERS[0]: borders, "use_cache": False}
        return super().forward(input_ids, **rest)


def _borders(x: Tensor, config: NSAConfig, call: dict[str, Any]) -> Tensor | None:
    """Return the boundaries of a packed row `x` [1, T, ...], or None if the row is not packed."""
    position, cache = call.get("position_ids"), call.get(CACHE)
    if all(call.get(name) is None for name in (*BORDERS, INDEX)):
        if position is None or position.shape[-1] == 1 or bool((position.diff() == 1).all()):
            return None
        if cache is not None:
            raise ValueError(f"position_ids must be consecutive if {CACHE} is given")
    batch, length = x.shape[:2]
    return rows(batch, length, None, position, call, cache, config).cu_seqlens


transformers.AutoConfig.register(LlamaNSAConfig.model_type, LlamaNSAConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(LlamaNSAConfig, LlamaNSAForCausalLM, exist_ok=True)

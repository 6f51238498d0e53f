"""`NSAPagedModelCache`: what `generate` keeps, on pages; a step's shapes do not follow lengths.

All layers share one page table and one tensor of lengths, on the device, which a call reads
once and writes once. A step therefore waits for nothing and allocates no memory that outlives
it: `StepGraph` captures the model's step once and replays it while rows grow.

    NSAModel.forward -> begin: lengths and places of the new tokens
        each layer: project -> append -> paged_attention -> out
    -> end: the lengths
"""

from typing import Any

import torch
from torch import Tensor

from nsa_core import validate
from nsa_torch.huggingface.cache import NSAModelCache, taken_back
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.paged_layer import PagedLayer, PagedRows, StaticDenseLayer
from nsa_torch.paged import FP8


class NSAPagedModelCache(NSAModelCache):
    """The past of a batch, for `NSAForCausalLM`: `generate(.., cache=this)`.

    Args:
      config: of the model.
      batch_size: rows; with beams or several returned sequences, those of all of them.
      capacity: columns there is room for, padding included; one more is a `ValueError`.
      dtype: `torch.float8_e4m3fn`: layers with NSA keep their tokens in fp8, as a `PagedCache`;
        None: in the model's dtype.

    Every row has pages of its own. Beams copy the pages in use; `crop` and `reset` shorten
    lengths. Layers with dense attention keep their keys and values side by side.

    Raises:
      ValueError: a size that is not a positive int, another dtype.
    """

    def __init__(
        self,
        config: NSAModelConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype | None = None,
    ):
        validate.sizes(batch_size=batch_size, capacity=capacity)
        if dtype not in (None, FP8):
            raise ValueError(f"dtype must be None, the model's, or {FP8}, got {dtype}")
        self.fp8 = dtype is FP8
        self.rows = PagedRows(batch_size, capacity, config.select_block)
        super().__init__(config, capacity)

    def make_layer(self, kind: str, config: NSAModelConfig, capacity: int | None) -> Any:
        if kind == "dense":
            return StaticDenseLayer(self.rows)
        return PagedLayer(self.rows, self.fp8)

    @property
    def lengths(self) -> Tensor | None:
        """int32 `[B]`: real tokens of each row; None before the first call. Always one tensor."""
        return self.rows.lengths

    @property
    def batch_size(self) -> int:
        return self.rows.batch

    def begin(self, x: Tensor, count: Tensor | None) -> None:
        self.rows.begin(x, count)

    def end(self, count: Tensor | None) -> None:
        self.rows.end()
        super().end(count)

    def dense_inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B, T] and mask [B, 1, T, tokens read] of the call, for dense layers."""
        call, name = self.rows.call, self.config._attn_implementation or "sdpa"
        assert call is not None
        if name not in ("sdpa", "eager"):
            raise NotImplementedError(
                f"attn_implementation of dense layers must be 'sdpa' or 'eager' with an "
                f"NSAPagedModelCache, got {name!r}"
            )
        key = torch.arange(call.reach, device=call.position.device)
        mask = (key <= call.position[..., None])[:, None]
        if name == "eager":
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = zeros.masked_fill(~mask, torch.finfo(dtype).min)
        return call.position, mask

    def reset(self) -> None:
        """Forgets the tokens; the tensors stay where they are."""
        super().reset()
        self.rows.columns = 0
        if self.rows.lengths is not None:
            self.rows.lengths.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` columns, in which no row has padding."""
        count = taken_back(tokens_to_remove, self.rows.columns)
        self.rows.columns -= count
        if self.rows.lengths is not None:
            self.rows.lengths -= count
        for layer in self.layers:
            layer.take_back(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` is: its pages in use are copied."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        if self.rows.lengths is not None:
            self.rows.lengths.copy_(self.rows.lengths[beam_idx.to(self.rows.lengths.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.rows.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

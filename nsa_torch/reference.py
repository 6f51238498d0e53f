"""The implementation `reference` in torch, which is `nsa_core.reference` on torch tensors.
Arguments and shapes are the same as in `nsa_torch.functional`.
"""

import torch

from nsa_core import reference
from nsa_core.reference import Rows
from nsa_torch.torch_ops import TORCH_OPS


def _rows(batch, num_keys, num_queries, kv_len, cu_seqlens, device) -> Rows:
    index = torch.arange(num_keys, device=device).expand(batch, num_keys)
    # Not `as_tensor`, which would turn a symbolic length of `torch.compile` into a constant.
    lengths = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    lengths += torch.atleast_1d(kv_len)[:, None] if isinstance(kv_len, torch.Tensor) else kv_len
    sequence, position = torch.where(index < lengths, 0, -1), index
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device, torch.int64)
        begun = (bounds[:-1, None] <= index[0]).sum(dim=0) - 1
        sequence = torch.where(index[0] < bounds[-1], begun, -1)[None]
        position = (index[0] - bounds[:-1][begun])[None]
    query = torch.arange(num_queries, device=device) + lengths - num_queries
    return Rows(TORCH_OPS, sequence, position, query)


def _target(function):
    """Return a `function` of `nsa_core.reference` as a target of `dispatch`."""
    of_tokens = function in reference.OF_TOKENS

    def run(
        query, key, *rest, config, kv_len, cu_seqlens=None, scale=None, with_lse=True, **how
    ):
        batch, length = query.shape[:2]
        keys = key.shape[1] if of_tokens else kv_len
        if isinstance(keys, torch.Tensor):
            keys = key.shape[1] * config.compress_stride + config.compress_block - 1
        rows = _rows(batch, keys, length, kv_len, cu_seqlens, query.device)
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and function is not reference.select_blocks
        ):
            return function(rows, query, key, *rest, config=config, scale=scale, **how)

    run.__name__ = function.__name__
    return run


compressed_attention, block_scores, select_blocks, selected_attention, sliding_attention = map(
    _target, reference.FUNCTIONS
)

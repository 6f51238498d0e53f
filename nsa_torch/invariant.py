"""The implementation `invariant`: Mosaic kernels that give a token the same bits in the forward
pass of training, in a chunk of a prompt and in a decode step.

In the kernels, a work item has the queries of a few consecutive tokens, and the order of its sums
depends on the first of these tokens. A call with fewer queries than keys therefore begins at a
multiple of `work_item_tokens` tokens (`mosaic_forward`). Calls on a cache add unused queries before
and after the queries of a row, so that the work items of all calls have the same tokens.

Training saves the output of each branch for the backward pass, and adds the branches up in another
kernel than a forward pass without gradients. `invariant` always runs the forward kernels of
training. No tile is gathered, since the order of sums would then depend on other queries.
"""

from typing import Any

import torch
from torch import Tensor

from nsa_torch import mosaic, operators

PATH = mosaic.path("invariant", may_gather=False)
compressed_attention = PATH.compressed_attention
selected_attention = PATH.selected_attention
sliding_attention = PATH.sliding_attention
select_blocks = PATH.select_blocks


def attention(*tensors: Any, recompute: bool = False, **options: Any) -> Tensor:
    """Run all steps, with the arguments of `operators.all_steps`."""
    if recompute:
        raise NotImplementedError(
            "invariant: recompute must be False, since other kernels compute the branches again"
        )
    query, key = tensors[:2]
    if torch.compiler.is_compiling() and query.shape[1] != key.selected.shape[1]:
        raise NotImplementedError("invariant: torch.compile needs a query per key")
    saving = lambda mode, _: PATH.kind(mode, operators.SAVING)
    return operators.all_steps(saving, *tensors, **options)

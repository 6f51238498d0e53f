"""Frees the tensors that an operator saved for its gradient after their last read.

torch frees them after the operator's backward pass. The outputs of the three branches, half of the
memory of a call, are read only by one of its first launches (`deltas`), so dq can reuse their
memory.

This happens only in the last pass through a graph (no `retain_graph`), and if no hook has seen the
saved tensors: a hook may keep one, or move it back from another stream. Code that reads the node
(`out.grad_fn.saved_tensors`) finds tensors without memory after the pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# torch has no public names for these.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def is_last_pass() -> bool:
    """In a backward pass: whether no other can follow through the same graph."""
    return not _keeps_graph()


def has_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks`, checkpointing among them, are set."""
    return _hooks(True) is not None


def release(tensors: Sequence[Tensor]) -> None:
    """Gives the memory of tensors back that are read no more; they are empty afterwards. Work
    that is queued on the current stream may still read them.
    """
    for x in tensors:
        if x.untyped_storage().nbytes() == x.nbytes:  # it has its memory for itself
            x.untyped_storage().resize_(0)

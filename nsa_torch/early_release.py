"""Memory of what an operator kept for its gradient, given back as soon as it was read.

torch gives it back after the operator's backward pass. The outputs of the three branches, half of
what a call holds, are read by one of its first launches alone (`deltas`), so dq can reuse their
memory.

Only in a pass that is the last one through its graph (no `retain_graph`), and where no hook had a
look at what was saved: a hook may keep it, or bring it back from another stream. Whoever asks the
node itself (`out.grad_fn.saved_tensors`) finds tensors without memory after the pass.
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

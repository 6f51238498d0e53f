"""Memory of what an operator kept for its gradient, given back as soon as it was read.

torch gives it back after the operator's backward pass. The outputs of the three branches, half of
what a call holds, are read by its first launch alone (`delta`), so dq can lie where they lay.

Only of a pass that is the last one through its graph (no `retain_graph`), of tensors that
nothing else can have: `operators.differentiate` says so with `allowed`.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nsa_torch.program_steps import SMALL_BYTES

_local = threading.local()
# Of the pass that runs on this thread. torch has no public name for it.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def is_last_pass() -> bool:
    """In a backward pass: whether no other can follow through the same graph."""
    return not _keeps_graph()


@contextlib.contextmanager
def allowed(yes: bool) -> Iterator[None]:
    """Within, if `yes`, `release` gives memory back."""
    before = getattr(_local, "allowed", False)
    _local.allowed = yes
    try:
        yield
    finally:
        _local.allowed = before


def worth_it(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that are large and have their memory for themselves."""
    large = [x for x in tensors if x.nbytes > SMALL_BYTES]
    return [x for x in large if x.untyped_storage().nbytes() == x.nbytes]


def release(tensors: Sequence[Tensor]) -> None:
    """Gives the memory of tensors back that are read no more; they are empty afterwards. Work
    that is queued on the current stream may still read them.
    """
    if getattr(_local, "allowed", False):
        for x in worth_it(tensors):
            x.untyped_storage().resize_(0)

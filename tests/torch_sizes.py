"""How large the arrays of torch's operators are, for tests of what must never be in memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """The most elements that an operator has returned, the most bytes behind a result, and the
    names of operators.
    """

    most = bytes = 0
    names: tuple[str, ...] = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names += (str(function),)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out

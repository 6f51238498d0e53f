"""How large the arrays of torch's operators are, for tests of what must never be in memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """The most elements that an operator has returned."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.most = max(self.most, *found, 0)
        return out

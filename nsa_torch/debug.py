"""The part of `nsa_core.debug` that reads torch tensors. `nsa_core.debug` itself reports events
of both frameworks, torch and JAX.
"""

import torch
from torch.utils import _pytree

from nsa_core.debug import Backend


def _wait(given):
    devices = {x.device for x in _pytree.tree_leaves(given) if isinstance(x, torch.Tensor)}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _numpy(x):
    x = x.detach().cpu()
    return (x.to(torch.float64) if x.is_floating_point() else x).numpy()


TORCH = Backend("nsa_torch", torch.compiler.is_compiling, lambda given: False, _wait, _numpy)

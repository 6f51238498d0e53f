"""What a public call decides, once for all calls of its signature: checks, choice, plans.

All of it follows from the signature: of its tensors what kernels and the choice between them ask,
which of them want a gradient, its other arguments, and what is in force about choices. A call that
anything else has a say in, a mode or a transform, has no signature and decides anew.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.mosaic import capability
from nsa_core import debug, policy
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_interop import launch
from nsa_torch import batch_tables
from nsa_torch.plain import TENSORS, plain
from nsa_torch.plans import Cache, is_unplanned

KERNELS = ("mosaic", "triton")  # implementations whose steps are planned
DEVICE_TYPES = ("cuda",)  # whose calls have signatures
NAMES = frozenset({type(None), str})
NUMBERS = frozenset({type(None), int, float})


# By signature, what runs such calls.
CALLS: Cache[Callable[..., Tensor]] = Cache()


def signature_of(
    given: Iterable[Any],
    implementation: Any,
    borders: Tensor | None,
    config: Any,
    scale: Any,
    recompute: Any,
) -> Hashable | None:
    """The signature of a call, or None.

    Args:
      given: its tensors, None or several together in place of one.
      borders: of a packed row, among them.
    """
    if type(config) is not NSAConfig or type(recompute) is not bool:
        return None
    names = implementation if type(implementation) is Branches else (implementation,)
    if type(scale) not in NUMBERS or not NAMES.issuperset(map(type, names)) or debug.on:
        return None
    if is_unplanned() or not plain(()):
        return None
    recorded, device = torch.is_grad_enabled(), None
    key: list[Any] = [config, scale, recompute, implementation, policy.in_force()]
    key += (capability.interpret.get() is not False, *batch_tables.sizes_of(borders))
    for x in given:
        kind = type(x)
        if kind in TENSORS:
            each = (x,)
        elif kind is tuple or kind is Branches:
            if not TENSORS.issuperset(map(type, x)):
                return None
            each = x
            # Where all branches have the same tokens, an operator takes them once.
            branches = kind is Branches
            key += (branches, len(x), branches and x[0] is x[1] is x[2])
        elif x is None:
            key.append(None)
            continue
        else:
            return None
        for x in each:
            if x.layout is not torch.strided or x.is_neg():
                return None
            if device is None and (device := x.device).type not in DEVICE_TYPES:
                return None
            start = x.data_ptr() % launch.ALIGNMENT
            wanted = recorded and x.requires_grad
            key += (x.shape, x.dtype, x.get_device(), x.is_contiguous(), start, wanted)
    return tuple(key) if device is not None else None

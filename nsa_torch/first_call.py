"""The first call of a layer on Mosaic kernels compiles and loads what it needs, in parallel."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import capability
from nsa_core.plan.buffers import Plan
from nsa_interop import launch
from nsa_torch.plans import Planned, array_of

_prepared: set[Hashable] = set()  # layers on a GPU


def before(
    planned: Planned, plan: Plan, arguments: Sequence[Any], device: torch.device
) -> None:
    """Compiles and loads what a layer needs, at its first call. Other lengths may need others of
    its kernels: each is loaded when its plan is bound; where one was never built, all are that the
    call needs. Arguments as of `Planned.before`.
    """
    if device.type != "cuda" or capability.interpret.get():
        return
    # Lengths are axes of tensors, and the first number of `operators.LAYOUT_ARGS`.
    sizes = [(x.shape[2:], x.dtype) if isinstance(x, Tensor) else None for x in arguments]
    *_, config, scale = arguments
    layer = planned, device, tuple(sizes), tuple(config), scale
    described = [array_of(x) if isinstance(x, Tensor) else x for x in arguments]
    kernels = lambda: kernels_in(planned.plans(described, device, plan))  # holds no tensor
    if layer in _prepared:
        launch.prefetch(kernels)
    elif not torch.cuda.is_current_stream_capturing():
        launch.prepare(kernels(), device)
        _prepared.add(layer)


def kernels_in(plans: Iterable[Plan]) -> list[Kernel]:
    """Each once."""
    return list(dict.fromkeys(kernel for plan in plans for kernel in plan.kernels))

"""Runs the functions of operators from plans: finds the plan of a call, or makes it.

A plan depends only on the key of a call: shapes and dtypes by role, all other arguments, and the
device. It does not depend on strides, addresses, or equal arguments.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from nsa_core.array_ops import ArrayOps
from nsa_core.plan.buffers import Plan, View
from nsa_core.plan.planner import PlanOps
from nsa_interop import launch
from nsa_torch.execute import BoundPlan, Bundle
from nsa_torch.torch_ops import INTERPRETED, capability_of

KEPT = 1024  # programs at most
# Programs by the key of a call: the only cache between a public call and its launches. Most calls
# only look up a program.
PROGRAMS: dict[Hashable, Any] = {}
_lock = threading.Lock()
_prepared: set[Hashable] = set()  # layers on a GPU whose kernels were made ready

instead: ArrayOps | None = None  # if set, steps run on it directly, without plans


def keep[Value](key: Hashable, value: Value) -> Value:
    """Puts it into `PROGRAMS`, from which the oldest ones are dropped."""
    with _lock:
        PROGRAMS[key] = value
        while len(PROGRAMS) > KEPT:
            PROGRAMS.pop(next(iter(PROGRAMS)))
    return value


def forget() -> None:
    """Forget all plans and calls after the state that they depend on changed (tests, tuners)."""
    PROGRAMS.clear()


@contextlib.contextmanager
def unplanned(ops: ArrayOps) -> Iterator[None]:
    """Disable plans in this process. Steps then run directly on `ops`."""
    global instead
    before, instead = instead, ops
    try:
        yield
    finally:
        instead = before


class Planned(NamedTuple):
    """A function that is traced once for all calls of one signature.

    Attributes:
      function: Returns arrays from an `ArrayOps` and an operator's arguments, which include
        tensors.
      backward: Computes its gradient from the gradient of the first result, the other results, and
        the arguments.
    """

    function: Callable[..., Iterable[Any]]
    backward: "Planned | None" = None

    def __call__(self, *arguments: Any) -> list[Tensor]:
        if instead is not None:
            return list(self.function(instead, *arguments))
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        key: tuple = self.function, tensors[0].device, capability.interpret.get() is not False
        for x in arguments:
            if isinstance(x, Tensor):
                x = x.shape, x.dtype, x.get_device()
            key += (tuple(x) if isinstance(x, list) else x,)
        bound = PROGRAMS.get(key) or keep(key, self.bind(arguments, tensors))
        return bound(tensors)

    def bind(
        self,
        arguments: Sequence[Any],
        tensors: Sequence[Tensor],
        bundle: Bundle | None = None,
        bundles: bool = False,
    ) -> BoundPlan:
        """A plan of a call, on its device.

        Args:
          arguments: `Array`s in place of those in a bundle.
          tensors: among the arguments.
          bundle, bundles: as in `BoundPlan`.
        """
        device = tensors[0].device
        if elsewhere := {x.device for x in tensors} - {device}:
            raise ValueError(f"all tensors must be on {device}, got one on {elsewhere.pop()}")
        plan = self.plan(arguments, device)
        if device.type == "cuda" and plan.kernels and not capability.interpret.get():
            self.prepare(plan, arguments, device)
        return BoundPlan(plan, device, bundle, bundles)

    def prepare(self, plan: Plan, arguments: Sequence[Any], device: torch.device) -> None:
        """Compile and load the kernels of a layer, in parallel, at its first call. Other lengths
        may need other kernels of it. Each is loaded when its plan is bound. If one was never built,
        all kernels of the call are built.
        """
        described = [array_of(x) if isinstance(x, Tensor) else x for x in arguments]
        # Lengths are axes of tensors, and among the first numbers of `operators.LAYOUT_ARGS`.
        sizes = [(x.shape[2:], x.dtype) if isinstance(x, Array) else None for x in described]
        layer = self.function, device, *sizes, str(described[-2:])
        made = lambda: self.plans(described, device, plan)  # holds no tensor
        kernels = lambda: [*dict.fromkeys(x for each in made() for x in each.kernels)]
        if layer in _prepared:
            launch.prefetch(kernels)
        elif not torch.cuda.is_current_stream_capturing():
            launch.prepare(kernels(), device)
            _prepared.add(layer)

    def plan(self, arguments: Sequence[Any], device: torch.device | None) -> Plan:
        """The plan of a call.

        Args:
          arguments: Tensors or arrays.
          device: None means no GPU, for which no tiles were measured.
        """
        ops = PlanOps(
            capability_of(device.index) if device and device.type == "cuda" else INTERPRETED
        )
        views = [
            ops.argument(*array_of(x)) if isinstance(x, Tensor | View | Array) else x
            for x in arguments
        ]
        with torch.inference_mode(False), torch.no_grad():
            return ops.plan(self.function(ops, *views))

    def plans(
        self, arguments: Sequence[Any], device: torch.device | None, plan: Plan | None = None
    ) -> list[Plan]:
        """The plan of a call and that of its gradient, with the arguments of `plan`. Pass `plan` if
        it exists.
        """
        plan = plan or self.plan(arguments, device)
        if self.backward is None:
            return [plan]
        return [plan, self.backward.plan([*plan.results, *arguments], device)]


def array_of(x: Any) -> Array:
    """Shape and dtype of a tensor or of an `Array`."""
    return Array(tuple(x.shape), str(x.dtype).removeprefix("torch."))

"""Functions of operators, run from plans: which plan a call has, and how it is made.

A plan follows from the key of a call: shapes and dtypes by role, all other arguments, and the
device. Strides, addresses and which arguments are one tensor are not in it.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from nsa_core.array_ops import ArrayOps
from nsa_core.plan.buffers import Plan, View
from nsa_core.plan.planner import PlanOps
from nsa_torch.execute import BoundPlan, Bundle
from nsa_torch.torch_ops import INTERPRETED, capability_of

KEPT = 256  # plans of a function at most

instead: ArrayOps | None = None  # of plans: on what steps run as they are asked for


@contextlib.contextmanager
def unplanned(ops: ArrayOps) -> Iterator[None]:
    """Within: no call of this process has a plan; steps run on `ops` as they are asked for."""
    global instead
    before, instead = instead, ops
    try:
        yield
    finally:
        instead = before


_caches: "list[Cache]" = []


def forget() -> None:
    """Forgets all plans and calls: what they follow from has changed (tests, tuners)."""
    for each in _caches:
        each.clear()


def nothing_before(planned, plan, arguments, device) -> None:
    """Before a plan is bound there is nothing to do."""


class Planned:
    """A function that is traced once for all calls of one signature.

    Args:
      function: of an `ArrayOps` and of an operator's arguments, tensors among them; returns arrays.
      backward: of its gradient: takes a gradient like the first result, the other results, and the
        arguments.
      before: called with this object, a plan of it, the arguments and the device before the plan
        is bound to it.
    """

    def __init__(
        self,
        function: Callable[..., Iterable[Any]],
        backward: "Planned | None" = None,
        before: Callable[..., None] = nothing_before,
    ):
        self.function, self.backward, self.before = function, backward, before
        self.__name__ = getattr(function, "__name__", "planned")
        self._known: Cache[BoundPlan] = Cache()

    def __call__(self, *arguments: Any) -> list[Tensor]:
        if instead is not None:
            return list(self.function(instead, *arguments))
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        key = tensors[0].device, capability.interpret.get() is not False
        key += tuple(map(_part_of_key, arguments))
        bound = self._known.get(key) or self._known.keep(key, self.bind(arguments, tensors))
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
          bundle, bundles: as of `BoundPlan`.
        """
        device = tensors[0].device
        if elsewhere := {x.device for x in tensors} - {device}:
            raise ValueError(f"all tensors must be on {device}, got one on {elsewhere.pop()}")
        plan = self.plan(arguments, device)
        self.before(self, plan, arguments, device)
        return BoundPlan(plan, device, bundle, bundles)

    def plan(self, arguments: Sequence[Any], device: torch.device | None) -> Plan:
        """The plan of a call.

        Args:
          arguments: tensors, or `Array`s in their place.
          device: None: of no GPU, whose tiles were never measured.
        """
        ops = plan_ops(device)
        with torch.inference_mode(False), torch.no_grad():
            return ops.plan(self.function(ops, *_views(ops, arguments)))

    def plans(
        self, arguments: Sequence[Any], device: torch.device | None, plan: Plan | None = None
    ) -> list[Plan]:
        """The plan of a call and that of its gradient; arguments as of `plan`, which may have been
        made already.
        """
        plan = plan or self.plan(arguments, device)
        if self.backward is None:
            return [plan]
        results = (Array(x.shape, x.dtype) for x in plan.results)
        return [plan, self.backward.plan([*results, *arguments], device)]


def plan_ops(device: torch.device | None) -> PlanOps:
    """What traces steps for a device."""
    if device is None or device.type != "cuda":
        return PlanOps(INTERPRETED)
    return PlanOps(capability_of(device.index))


def _views(ops: PlanOps, arguments: Sequence[Any]) -> list[Any]:
    found = []
    for x in arguments:
        if isinstance(x, Tensor | View | Array):
            x = ops.argument(*array_of(x))
        found.append(x)
    return found


def array_of(x: Any) -> Array:
    """Shape and dtype of a tensor, or of what stands for one."""
    return Array(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _part_of_key(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.get_device()
    return tuple(x) if isinstance(x, list) else x


class Cache[Value]:
    """Values by key, the oldest ones dropped first. To look one up is all that most calls do."""

    def __init__(self):
        self._values: dict[Hashable, Value] = {}
        self._lock = threading.Lock()
        self.get = self._values.get
        self.clear = self._values.clear
        _caches.append(self)

    def keep(self, key: Hashable, value: Value) -> Value:
        with self._lock:
            self._values[key] = value
            while len(self._values) > KEPT:
                self._values.pop(next(iter(self._values)))
        return value

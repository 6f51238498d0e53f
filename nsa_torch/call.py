"""Runs attention calls from stored programs. The checks, the choice of an implementation and the
planning of a call run only once for all calls with the same signature.

`signature_of` returns the `Signature` of a call, which records all properties on which the checks,
the choice of an implementation and the plans depend. `plans.KNOWN` has one `PlannedProgram` per
signature, which runs the bound plans of the forward and the backward pass. A call under a dispatch
mode, a tracer or a transform of torch has no signature. The dispatcher of torch passes such a call
to an operator (`operators.py`).
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.mosaic import capability
from nsa_core import debug, policy
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_interop import launch
from nsa_torch import batch_tables, operators, plans
from nsa_torch.operators import arranged, kept_of
from nsa_torch.plain import TENSORS, has_hooks, undisturbed

KERNELS = ("mosaic", "triton")  # implementations whose calls can have programs
DEVICE_TYPES = ("cuda",)  # device types whose calls have signatures
ONE = 9  # an entry of `Signature.form`: all fields of `Branches` are one tensor
NAMES = frozenset({type(None), str})
NUMBERS = frozenset({type(None), int, float})


class Signature(NamedTuple):
    """The properties of a call that determine its checks, its implementation and its plans. The
    values and addresses of tensors are not part of a signature.

    Attributes:
      numbers: The fields of the `NSAConfig`, as numbers.
      policy, interpreted: global state on which the choice of an implementation depends.
      sizes: `max_seqlen`, `padded` and `gap` of a packed row.
      checked: whether the caller has checked the arguments.
      gradient: whether any tensor requires a gradient while gradients are on.
      hooked: Whether hooks for saved tensors are set. With hooks, each tensor is saved
        separately, and no saved tensor is freed early.
      form: A number per argument. The number is 0 for None, 1 for a tensor, 3 for `Branches` and -n
        for a tuple of n tensors. `ONE` means `Branches` whose fields are the same tensor.
      tensors: For each tensor, its shape, dtype and device, and whether the tensor is contiguous.
        The entry also has the address of the tensor modulo the alignment in bytes that kernels
        need.
    """

    numbers: tuple
    scale: float | None
    recompute: bool
    implementation: str | Branches | None
    policy: Any
    interpreted: bool
    sizes: tuple[int | None, bool, int]
    checked: bool
    gradient: bool
    hooked: bool
    form: tuple[int, ...]
    tensors: tuple


def signature_of(
    given: Sequence[Any],
    implementation: Any,
    config: Any,
    scale: Any,
    recompute: Any,
    checked: bool = False,
) -> tuple[Signature | None, list[Tensor]]:
    """Return the signature of a call and the list of its tensors. The signature is None if calls
    of this kind cannot have a stored program.

    Args:
      given: The tensors of the call. Each entry may be None or a tuple. The last entry has the
        boundaries of a packed row.
      checked: as in `functional.decided`.
    """
    names = implementation if type(implementation) is Branches else (implementation,)
    if (
        type(config) is not NSAConfig
        or type(recompute) is not bool
        or type(scale) not in NUMBERS
        or not NAMES.issuperset(map(type, names))
        or debug.on
        or plans.instead is not None
        or not undisturbed()
    ):
        return None, []
    flat: list[Any] = []
    form: list[int] = []
    for x in given:
        kind = type(x)
        if kind in TENSORS:
            flat.append(x)
            form.append(1)
        elif x is None:
            form.append(0)
        elif kind is Branches and x[0] is x[1] is x[2]:  # an operator receives this tensor once
            flat.append(x[0])
            form.append(ONE)
        elif kind is Branches or kind is tuple:
            flat += x
            form.append(3 if kind is Branches else -len(x))
        else:
            return None, []
    parts: list[Any] = []
    gradient = False
    for x in flat:
        if type(x) not in TENSORS or x.layout is not torch.strided or x.is_neg():
            return None, []
        start = x.data_ptr() % launch.ALIGNMENT
        parts += (x.shape, x.dtype, x.get_device(), x.is_contiguous(), start)
        gradient = gradient or x.requires_grad
    if not flat or flat[0].device.type not in DEVICE_TYPES:
        return None, []
    gradient = gradient and torch.is_grad_enabled()
    hooked = gradient and has_hooks()
    borders = given[-1]
    tables = None if borders is None else getattr(borders, batch_tables.ATTRIBUTE, None)
    sizes = batch_tables.UNKNOWN if tables is None else tables.sizes
    # The constructor of a named tuple is a slower Python function.
    signature: Any = tuple.__new__(  # type: ignore[bad-specialization]
        Signature,
        (
            *(config.numbers, scale, recompute, implementation),
            *(policy.in_force(), capability.interpret.get() is not False, sizes),
            *(checked, gradient, hooked, tuple(form), tuple(parts)),
        ),
    )
    return signature, flat


class PlannedProgram(operators.Program):
    """Runs all calls with one signature. Every step of these calls is a kernel.

    Args:
      path: a `kernel_path.KernelPath`.
      config: the configuration of the calls.
      tensors: the tensors of the first call with this signature. The `PlannedProgram` does not
        store these tensors.

    Attributes:
      order: The function that picks the operator's arguments from the tensors of the call, in the
        operator's order.
      run: The bound plan of the forward pass. The plan returns the output, and then the residuals
        (tensors that are saved for the backward pass).
    """

    def __init__(self, path, signature: Signature, config: NSAConfig, tensors: list[Tensor]):
        numbers = iter(range(len(tensors)))
        query, key, value, gates, compressed, indices, borders = (
            tuple(itertools.islice(numbers, 1 if n == ONE else abs(n))) for n in signature.form
        )
        gates *= 3 if signature.form[3] == ONE else 1  # one tensor is `[B, T, H, 3]`
        keys, values = (Branches(*(x * 3 if len(x) == 1 else x)) for x in (key, value))
        mode, order = arranged(query[0], keys, values, gates, compressed or None)
        self.order = operator.itemgetter(*order, *indices, *borders)
        given = self.order(tensors)
        row = tensors[borders[0]] if borders else None
        length = tensors[key[-1]].shape[1]
        layout_args = operators.pack_layout(config, length, row, signature.scale)
        chosen = given[mode.count] if indices else None
        arguments = [*given[: mode.count], chosen, operators.MAY_BE_NAN, *layout_args]
        keep = kept_of(signature.gradient, signature.recompute)
        super().__init__(operators.kind_of(path.kind(mode, keep)), arguments)
        self._planned, self._gradient = path.planned(mode, keep), None
        bundles = signature.gradient and self.alone
        self.run = self._planned.bind(arguments, given, bundles=bundles)

    def __call__(self, tensors: list[Tensor]) -> Tensor:
        given = self.order(tensors)
        if self.kind.backward is not None:
            return operators.Eager.apply(self, *given)[0]
        return self.run(given)[0]

    def gradients(self, grads, kept, tensors, direct, gives_back) -> Sequence[Tensor]:
        bundle, results = self.run.bundled, self.run.plan.results[1:]
        if plans.instead is not None or not direct:
            kept = bundle.apart(kept, results) if bundle else kept
            return super().gradients(grads, kept, tensors, direct, gives_back)
        if self._gradient is None:
            arguments = grads[0], *results, *self.arguments(tensors)
            self._gradient = self._planned.backward.bind(arguments, grads, bundle)
        own, last = (kept[:-1], kept[-1]) if bundle else (kept, None)
        return self._gradient((*grads, *own, *tensors), last, gives_back)

"""What a call of attention decides, once for all calls that are alike: checks, choice, plans.

    Call       the record: everything that any of this follows from. It is the key
    Program    what runs calls with one record: a bound plan forward, and one of the gradient
    PROGRAMS   programs by record: the only cache between a public call and its launches

A call in which a mode, a tracer or a transform has a say has no record. torch's dispatcher takes
it to an operator (`operators.py`).
"""

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
from nsa_torch import batch_tables, early_release, operators, plans
from nsa_torch.compress import compress
from nsa_torch.input_modes import mode_of
from nsa_torch.plain import TENSORS, undisturbed

KERNELS = ("mosaic", "triton")  # implementations whose calls have programs
DEVICE_TYPES = ("cuda",)  # whose calls have records
ONE = 9  # in a form: `Branches` of one tensor
NAMES = frozenset({type(None), str})
NUMBERS = frozenset({type(None), int, float})


class Call(NamedTuple):
    """All that a call's checks, choice and plans follow from; no number in a tensor, no address.

    Attributes:
      numbers: of the `NSAConfig`.
      policy, interpreted: what is in force about choices.
      sizes: `max_seqlen`, `padded`, `gap` of a packed row.
      checked: by the caller.
      gradient: whether one is wanted, of whichever tensor.
      hooked: hooks see what is saved: each thing by itself, and none is given back early.
      form: of each argument, how many tensors it is: 0, 1, 3 of `Branches` or `ONE`, -n of a tuple.
      tensors: of each, shape, dtype, device, whether it is contiguous, and bytes from where kernels
        could read it.
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


def describe(
    given: Sequence[Any],
    implementation: Any,
    config: Any,
    scale: Any,
    recompute: Any,
    checked: bool = False,
) -> tuple[Call | None, list[Tensor]]:
    """The record of a call, and its tensors one by one; None where it has none.

    Args:
      given: its tensors, None or several together in place of one; the borders of a packed row
        last.
      checked: as of `functional.decided`, which refuses fewer of these.
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
        elif kind is Branches and x[0] is x[1] is x[2]:  # an operator takes it once
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
    hooked = gradient and early_release.has_hooks()
    borders = given[-1]
    tables = None if borders is None else getattr(borders, batch_tables.ATTRIBUTE, None)
    sizes = batch_tables.UNKNOWN if tables is None else tables.sizes
    # A named tuple's own constructor is a function of Python.
    call: Any = tuple.__new__(  # type: ignore[bad-specialization]
        Call,
        (
            *(config.numbers, scale, recompute, implementation),
            *(policy.in_force(), capability.interpret.get() is not False, sizes),
            *(checked, gradient, hooked, tuple(form), tuple(parts)),
        ),
    )
    return call, flat


class Program:
    """Runs calls of all steps on kernels that have one record.

    Args:
      path: a `kernel_path.KernelPath`.
      config: of the record's numbers.
      tensors: of the first such call; none is kept.

    Attributes:
      order: of the operator's tensors among the call's, and behind them those that `more` makes.
      run: the plan forward: the output, what is kept for a gradient behind it.
      alone, returned: that is its node's alone; results that a caller wants.
      kind: of operator that the same call is (`operators.Call`).
    """

    __slots__ = (
        *(
            "_after",
            "_before",
            "_function",
            "_gradient",
            "_phi",
            "_places",
            "_unbound",
            "alone",
        ),
        *("keeps", "kind", "order", "returned", "run"),
    )

    def __init__(self, path, call: Call, config: NSAConfig, tensors: list[Tensor]):
        ends, places = 0, []
        for n in (1 if n == ONE else abs(n) for n in call.form):
            places.append(tuple(range(ends, ends + n)))
            ends += n
        query, key, value, gates, compressed, indices, borders = places
        stacked = call.form[3] == 1  # `[B, T, H, 3]`
        gates *= 3 if call.form[3] == ONE else 1
        self.keeps = call.gradient
        keep = path.keep(call.gradient, call.recompute)
        self._phi = self._unbound = None
        if not compressed and not path.steps.compression and self.keeps:
            self._phi = (key[0], value[0]), borders, config
            compressed, ends = (ends, ends + 1), ends + 2
        one_pair = len(key) == len(value) == 1
        mode = mode_of(one_pair, bool(compressed), joined=stacked and path.joins)
        if stacked and not path.joins:
            self._unbound, gates, ends = gates[0], range(ends, ends + 3), ends + 3
        keys, values = (
            Branches.each(x[0]) if len(x) == 1 else Branches(*x) for x in (key, value)
        )
        tokens = mode.tokens(keys, values, compressed or None)
        order = [*query, *tokens, *gates, *indices, *borders]
        self.order = operator.itemgetter(*order)
        # The operator's arguments: tensors by place, None, and numbers.
        n = mode.count
        found: list[int | None] = [*range(n), n if indices else None]
        self._places = found, (n + len(indices) if borders else None)
        length = tensors[key[-1]].shape[1]
        place = operators.arguments(
            config, length, tensors[borders[0]] if borders else None, call.scale
        )
        self._before, self._after = (False, *place[:2]), place[3:]
        self.kind = path.kind(mode, keep)
        self.alone, self.returned = not call.hooked, 1
        self._function, self._gradient = path.function(mode, keep), None
        given = self.order(self.more(tensors))
        self.run = self._function.bind(
            self.arguments(given), given, bundles=self.keeps and self.alone
        )

    def arguments(self, tensors) -> list[Any]:
        """Those of the operator, from its tensors."""
        places, borders = self._places
        own = [None if i is None else tensors[i] for i in places]
        row = None if borders is None else tensors[borders]
        return [*own, *self._before, row, *self._after]

    def more(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of a call, and what is made of them where kernels do not."""
        if self._phi is not None:
            pair, borders, config = self._phi
            row = tensors[borders[0]] if borders else None
            means = [compress(tensors[i], config=config, cu_seqlens=row) for i in pair]
            tensors = [*tensors, *means]
        if self._unbound is not None:
            tensors = [*tensors, *tensors[self._unbound].unbind(-1)]
        return tensors

    def __call__(self, tensors: list[Tensor]) -> Tensor:
        if self._phi is not None or self._unbound is not None:
            tensors = self.more(tensors)
        given = self.order(tensors)
        if self.keeps:
            return operators.Eager.apply(self, *given)[0]
        return self.run(given)[0]

    def gradients(self, grads, kept, tensors, direct: bool) -> Sequence[Tensor]:
        """From the output's, what was kept, and the tensors of the call; `direct`: nothing else has
        a say in the pass.
        """
        (grad,), bundle = grads, self.run.bundled
        if plans.instead is not None or not direct:
            arguments = self.apart(kept), self.arguments(tensors)
            return operators.call_backward(self.kind, grad, *arguments)
        if self._gradient is None:
            offsets = bundle.offsets if bundle else [None] * len(kept)
            pairs = zip(self.apart(kept), offsets, strict=True)
            each = [x if offset is None else plans.array_of(x) for x, offset in pairs]
            arguments = grad, *each, *self.arguments(tensors)
            self._gradient = self._function.backward.bind(arguments, [grad], bundle)
        own, last = (kept[:-1], kept[-1]) if bundle else (kept, None)
        return self._gradient((grad, *own, *tensors), last)

    def apart(self, kept):
        """Each thing that is kept as an operator returns it."""
        bundle = self.run.bundled
        return bundle.apart(kept, self.run.plan.results[1:]) if bundle else kept

    def outputs(self, tensors) -> list[Tensor]:
        """Like the results, unwritten."""
        return [*operators.call_of(self.kind).shapes(*self.arguments(tensors))]


PROGRAMS: plans.Cache[Program] = plans.Cache()

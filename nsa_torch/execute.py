"""Runs a plan (`nsa_core.plan`) on torch tensors, on the current stream, and launches beside others
on one that forks from it and joins it again; the host never waits.

A plan is bound to a device once: what no address changes is worked out then. A launch reads and
writes addresses, so only what torch reads too is a tensor.
"""

import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.kernel import Array, Kernel
from nsa_core.plan.buffers import (
    Buffer,
    Derived,
    Join,
    Launch,
    Place,
    Plan,
    Release,
    View,
    by_address,
)
from nsa_interop import launch
from nsa_torch import batch_tables, early_release, triton_ops
from nsa_torch.shared import SHARED, Kept, is_capturing
from nsa_torch.torch_ops import TORCH_OPS

# Of what may be allocated early or dropped late, so that launches are one row.
LATE_BYTES = 4 * 2**20
BUNDLED_BYTES = LATE_BYTES  # of a tensor in a bundle, whose memory none gets before the others'
ROW = 3  # launches that become one step; of fewer a graph would save the host little
NOTHING = Kept()


class Bundle(NamedTuple):
    """Small tensors that are kept for a gradient, in one allocation: a tensor costs the host as
    much as half a launch, each time that it is made, kept and read.

    Attributes:
      offsets: bytes, of each tensor that is kept; None: it has memory of its own.
      bytes: of all.
    """

    offsets: tuple[int | None, ...]
    bytes: int

    @classmethod
    def of(cls, plan: Plan) -> "Bundle | None":
        """Of the results of a plan behind the first: those that torch does not touch."""
        by_torch = plan.touched_by_torch
        offsets, end = list[int | None](), 0
        for n in (x.buffer for x in plan.results[1:]):
            buffer = plan.buffers[n]
            if n in by_torch or buffer.bytes > BUNDLED_BYTES:
                offsets.append(None)
            else:
                offsets.append(end)
                end += -(-buffer.bytes // launch.ALIGNMENT) * launch.ALIGNMENT
        return cls(tuple(offsets), end) if end else None

    def apart(self, kept: Sequence[Tensor], wanted: Sequence[Array]) -> list[Tensor]:
        """What is kept as tensors like those `wanted`, from those with memory of their own, the
        bundle behind them.
        """
        *own, bundle = kept
        rest = iter(own)
        pairs = zip(self.offsets, wanted, strict=True)
        return [next(rest) if o is None else _in(bundle, o, x) for o, x in pairs]


def _in(bundle: Tensor, offset: int, x: Array | Buffer) -> Tensor:
    dtype = _dtype(x.dtype)
    count = math.prod(x.shape) * dtype.itemsize
    return bundle[offset : offset + count].view(dtype).view(x.shape)


class BoundPlan:
    """A plan on a device; any thread may call it.

    A call has two lists: `tensors`, by the number of a buffer, and `addresses`, where the parts of
    buffers that kernels read or write have slots of their own, behind those of all buffers.

    Args:
      bundle: in which some arguments behind the first lie.
      bundles: whether small results behind the first lie in a bundle, which then is the last
        result.

    Attributes:
      given: arguments that are not in a bundle.
      in_bundle: slots of what lies there, and where in it; `bundle_bytes`: of one that is made;
        `bundle_views`: arguments there that torch reads, and where.
      read_arguments: those that kernels read, by number and parts: they lie as kernels want them,
        or are copied.
      in_workspace: slots of what lies there, and where in it.
      constants: numbers of what no call makes; `constant_parts`: their parts.
      read_by_torch: the constants that a step of torch reads, by place and number.
      known: constants, a list of addresses in which theirs are, and a stream that need not wait
        for them.
      tables: what makes those of a batch; `placed`: by result of it, slots and offsets of them.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        bundle: Bundle | None = None,
        bundles: bool = False,
    ):
        self.plan, self.device, self.key = plan, device, object()
        self.on_gpu = device.type == "cuda"
        self.bundled = Bundle.of(plan) if bundles else None
        self.bundle_bytes = self.bundled.bytes if self.bundled else 0
        lying = _places(bundle, range(1, plan.arguments))
        given = [n for n in range(plan.arguments) if n not in lying]
        lying |= _places(self.bundled, [x.buffer for x in plan.results[1:]])
        buffers = plan.buffers
        slots = _Slots(len(buffers))
        read = [x for step in plan.steps for x in step.reads]
        self.constants = sorted(
            {x.buffer for x in read if buffers[x.buffer].place is Place.CONSTANT}
        )
        launches = [step for step in plan.steps if isinstance(step, Launch)]
        read_by_kernels = {x.buffer for step in launches for x in step.reads}
        # Gives every part its slot: before any `parts_of`.
        self.steps = _bound(plan, device, slots, read_by_kernels, lying)
        self.in_workspace = [
            (slot, buffers[n].offset + offset)
            for n, buffer in enumerate(buffers)
            if buffer.place is Place.WORKSPACE
            for slot, offset in [(n, 0), *slots.parts_of(n)]
        ]
        self.in_bundle = [
            (slot, start + offset)
            for n, start in lying.items()
            for slot, offset in [(n, 0), *slots.parts_of(n)]
        ]
        self.given = None if len(given) == plan.arguments else given
        self.read_arguments = [(n, slots.parts_of(n)) for n in given if n in read_by_kernels]
        self.constant_parts = [slots.parts_of(n) for n in self.constants]
        by_torch = plan.touched_by_torch
        self.bundle_views = [
            (n, offset, buffers[n]) for n, offset in lying.items() if n in by_torch
        ]
        self.read_by_torch = [(i, n) for i, n in enumerate(self.constants) if n in by_torch]
        self.tables, batch = batch_tables.of_plan(plan, device)
        self.tables_read_by_torch = [
            (n, self.tables.tensor(number)) for n, number in batch.items() if n in by_torch
        ]
        self.placed: dict[int, list[tuple[int, int]]] = {}
        for n, number in batch.items():
            i, start = self.tables.place(number)
            pairs = [(slot, start + offset) for slot, offset in ((n, 0), *slots.parts_of(n))]
            self.placed.setdefault(i, []).extend(pairs)
        self.joins = sum(isinstance(step, Join) for step in plan.steps)
        self.blank = [None] * (len(buffers) - plan.arguments + self.joins)
        self.known: tuple[Any, list[int], int] = lambda: None, [0] * slots.count, -1
        self.results = [x.buffer for x in plan.results if x.buffer not in lying]

    def __call__(self, given: Sequence[Tensor], bundle: Tensor | None = None) -> list[Tensor]:
        """The results for the arguments of a call, which may lie anyhow and be one tensor.

        Args:
          bundle: of the arguments that are not among those given.
        """
        tensors: list[Any] = [*given, *self.blank]
        if self.given is not None:
            tensors = [None] * (len(self.plan.buffers) + self.joins)
            for number, x in zip(self.given, given, strict=True):
                tensors[number] = x
        shared = self.plan.shared
        borders = None if shared is None else tensors[shared]  # a copy has no tables
        stream = launch.current_stream(self.device) if self.on_gpu else 0
        same, addresses, ready_on = self.known
        constants = same()
        if constants is None or stream != ready_on or is_capturing(self.device):
            constants, addresses = self._constants(stream)
        addresses = addresses.copy()
        for i, number in self.read_by_torch:
            tensors[number] = constants[i]
        for number, parts in self.read_arguments:
            x = tensors[number]
            address = x.data_ptr()
            if address % launch.ALIGNMENT or not x.is_contiguous():
                x = tensors[number] = x.clone(memory_format=torch.contiguous_format)
                address = x.data_ptr()
            addresses[number] = address
            for slot, offset in parts:
                addresses[slot] = address + offset
        if borders is not None:
            found = batch_tables.of(borders, self.tables)
            for i, places in self.placed.items():
                start = found[i].data_ptr()
                for slot, offset in places:
                    addresses[slot] = start + offset
            for n, i in self.tables_read_by_torch:
                tensors[n] = found[i]
        workspace = None  # until the last launch is queued
        if self.plan.workspace_bytes:
            size = self.plan.workspace_bytes
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            start = workspace.data_ptr()
            for slot, offset in self.in_workspace:
                addresses[slot] = start + offset
        if self.bundle_bytes:
            bundle = torch.empty(self.bundle_bytes, dtype=torch.uint8, device=self.device)
        if bundle is not None:
            start = bundle.data_ptr()
            for slot, offset in self.in_bundle:
                addresses[slot] = start + offset
            for number, offset, like in self.bundle_views:
                tensors[number] = _in(bundle, offset, like)
        x = None  # no name stays with what a step drops
        try:
            for step in self.steps:
                step(tensors, addresses, stream)
        except BaseException:
            # What runs beside still writes to memory that goes now.
            for event in filter(None, tensors[len(tensors) - self.joins :]):
                torch.cuda.current_stream(self.device).wait_event(event)
            raise
        found = [tensors[number] for number in self.results]
        if self.bundle_bytes:
            found.append(bundle)
        return found

    def _constants(self, stream: int) -> tuple[Kept, list[int]]:
        """The constants, and addresses of which theirs are there."""
        kept = SHARED.get(self.key, self.device, self._made) if self.constants else NOTHING
        same, addresses, _ = self.known
        if same() is not kept:
            addresses = [0] * len(addresses)
            for number, parts, x in zip(self.constants, self.constant_parts, kept, strict=True):
                _put(x, number, parts, addresses)
            self.known = weakref.ref(kept), addresses, stream  # at once: threads share it
        return kept, addresses

    def _made(self) -> list[Tensor]:
        """The constants. Another plan on this device may have made them, or what they read."""
        known: dict[int, tuple[Any, Tensor]] = {}  # by buffer; the first: what it follows from
        for step in self.plan.constants:
            reads = [known[x.buffer] for x in step.reads]
            shapes = tuple(x.shape for x in step.reads)
            key = self.device, step.function, step.static, tuple(k for k, _ in reads), shapes

            def make(step=step, reads=reads):
                arrays = [
                    y.reshape(x.shape) for x, (_, y) in zip(step.reads, reads, strict=True)
                ]
                # A step that reads arrays makes its results on their device. torch's device mode
                # takes the host as long as an operator.
                with contextlib.nullcontext() if arrays else self.device:
                    return step.function(TORCH_OPS, *arrays, **dict(step.static))

            for i, (x, y) in enumerate(
                zip(step.writes, SHARED.get(key, self.device, make), strict=True)
            ):
                known[x.buffer] = (key, i), y
        return [known[n][1] for n in self.constants]


def _places(bundle: Bundle | None, numbers: Sequence[int]) -> dict[int, int]:
    """By number, where in a bundle those of what is kept are."""
    pairs = zip(numbers, bundle.offsets if bundle else (), strict=False)
    return {n: offset for n, offset in pairs if offset is not None}


def _put(x: Tensor, number: int, parts, addresses: list[int]) -> None:
    """Notes where a buffer and its parts are."""
    address = addresses[number] = x.data_ptr()
    for slot, offset in parts:
        addresses[slot] = address + offset


class _Slots:
    """Places in the list of addresses: one of each buffer, and one of each part of it."""

    def __init__(self, buffers: int):
        self.count = buffers
        self._parts: dict[tuple[int, int], int] = {}

    def at(self, x: View) -> int:
        if not x.offset:
            return x.buffer
        if (x.buffer, x.offset) not in self._parts:
            self._parts[x.buffer, x.offset] = self.count
            self.count += 1
        return self._parts[x.buffer, x.offset]

    def parts_of(self, number: int) -> tuple[tuple[int, int], ...]:
        """Slots and offsets of the parts of a buffer."""
        return tuple((slot, o) for (n, o), slot in self._parts.items() if n == number)


type _Bound = Callable[[list[Any], list[int], int], None]


def _bound(
    plan: Plan,
    device: torch.device,
    slots: _Slots,
    read_by_kernels: set[int],
    lying: Mapping[int, int],
) -> list[_Bound]:
    """The steps; launches that follow each other are one. `lying`: what is in a bundle."""
    for step in plan.steps:
        for x in (*step.reads, *step.writes):
            slots.at(x)
    found: list[_Bound] = []
    row: list[_Launches] = []
    numbers_beside = [x.beside for x in plan.steps if isinstance(x, Join)]
    events = {n: i for i, n in enumerate(numbers_beside, len(plan.buffers))}
    for step, begins, ends in zip(plan.steps, plan.begins, plan.ends, strict=True):
        if by_address(step):
            numbers = [slots.at(x) for x in (*step.reads, *step.writes)]
            allocated = [
                (n, plan.buffers[n].shape, _dtype(plan.buffers[n].dtype), slots.parts_of(n))
                for n in begins
                if n not in lying
            ]
            launches = _Launches.of(step.kernel, numbers, allocated, ends, device)
            if step.beside is not None:
                found += [*_in_a_row(row), _Beside(launches, events[step.beside])]
                row = []
                continue
            row.append(launches)
            ended = [plan.buffers[n] for n in ends]
            if all(x.place is Place.ARGUMENT or x.bytes <= LATE_BYTES for x in ended):
                continue
        found += _in_a_row(row)
        row = []
        if isinstance(step, Launch) and not isinstance(step.kernel, Kernel):
            found.append(_TritonLaunch(step, slots, ends, plan))
        elif isinstance(step, Derived):
            found.append(_DerivedStep(step, slots, ends, plan, read_by_kernels))
        elif isinstance(step, Release):
            found.append(_Released(step.arguments))
        elif isinstance(step, Join):
            found.append(_Joined(device, events[step.beside], ends))
    return [*found, *_in_a_row(row)]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


class _Launches:
    """Launches of one or more kernels, one after the other, on a device.

    Args:
      kernels: for `_in_a_row`, with `arguments`: the slots of inputs and outputs of each.
      start: queues all; takes the addresses in `slots`.
      allocated: what they make that has memory of its own.
      drops: what no later step has to do with.
    """

    __slots__ = ("addresses", "allocated", "arguments", "device", "drops", "kernels", "start")

    def __init__(self, kernels, arguments, start, slots, allocated, drops, device):
        self.kernels, self.arguments, self.start = kernels, arguments, start
        self.addresses = operator.itemgetter(*slots)
        self.allocated, self.drops, self.device = allocated, drops, device

    @classmethod
    def of(cls, kernel, slots, allocated, drops, device) -> "_Launches":
        """One launch."""
        start = launch.launcher(kernel, device)
        return cls([kernel], [slots], start, slots, allocated, drops, device)

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        for number, shape, dtype, parts in self.allocated:
            x = tensors[number] = torch.empty(shape, dtype=dtype, device=self.device)
            address = addresses[number] = x.data_ptr()
            for slot, offset in parts:
                addresses[slot] = address + offset
        self.start(stream, self.addresses(addresses))
        for number in self.drops:
            tensors[number] = None


@functools.cache
def _beside(device: torch.device, stream: int) -> torch.cuda.Stream:
    """The stream beside a stream of a device: its kernels are given SMs first."""
    return torch.cuda.Stream(device, priority=-1)


class _Beside(NamedTuple):
    """A launch that begins when what was queued has ended, beside what is queued from here on;
    `event`: where the event of its end is kept.
    """

    launch: _Launches
    event: int

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        device = self.launch.device
        if device.type != "cuda":  # tests
            return self.launch(tensors, addresses, stream)
        other = _beside(device, stream)
        other.wait_stream(torch.cuda.current_stream(device))
        self.launch(tensors, addresses, other.cuda_stream)
        tensors[self.event] = other.record_event()
        return None


class _Joined(NamedTuple):
    """What comes after it begins when the launch has ended whose `event` that is."""

    device: torch.device
    event: int
    drops: Sequence[int]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        if tensors[self.event] is not None:
            torch.cuda.current_stream(self.device).wait_event(tensors[self.event])
        for number in (self.event, *self.drops):
            tensors[number] = None


def _in_a_row(launches: list[_Launches]) -> Sequence[_Launches]:
    """The same, as one where that can be, which drops at its end what they drop."""
    if len(launches) < ROW:
        return launches
    device = launches[0].device
    kernels, arguments, allocated, drops = (
        [x for each in launches for x in getattr(each, name)]
        for name in ("kernels", "arguments", "allocated", "drops")
    )
    place = {x: i for i, x in enumerate(dict.fromkeys(itertools.chain(*arguments)))}
    inner = [[place[x] for x in each] for each in arguments]
    start = launch.sequence(kernels, inner, device)
    return [_Launches(kernels, arguments, start, [*place], allocated, drops, device)]


class _Reader:
    """The tensor of a view."""

    __slots__ = ("count", "number", "shape", "start")

    def __init__(self, x: View, plan: Plan):
        buffer = plan.buffers[x.buffer]
        self.number, self.shape = x.buffer, x.shape
        size = _dtype(x.dtype).itemsize
        self.start, self.count = x.offset // size, x.bytes // size
        whole = x.shape == buffer.shape
        if whole:
            self.shape = None
        elif x.bytes == buffer.bytes:
            self.count = None

    def __call__(self, tensors: list[Any]) -> Tensor:
        x = tensors[self.number]
        if self.shape is None:
            return x
        if self.count is not None:
            x = x.view(-1)[self.start : self.start + self.count]
        return x.reshape(self.shape)


class _TensorStep:
    """A step that takes tensors: what both kinds of them share."""

    __slots__ = ("drops", "plain", "readers", "results")

    def __init__(self, step, slots: _Slots, ends, plan: Plan):
        readers = [_Reader(x, plan) for x in step.reads]
        # As a rule every one is a whole buffer.
        self.plain = (
            [r.number for r in readers] if all(r.shape is None for r in readers) else None
        )
        self.readers, self.drops = readers, ends
        self.results = [(x.buffer, slots.parts_of(x.buffer)) for x in step.writes]

    def read(self, tensors: list[Any]) -> list[Tensor]:
        if self.plain is not None:
            return [tensors[number] for number in self.plain]
        return [reader(tensors) for reader in self.readers]

    def keep(self, found, tensors: list[Any], addresses: list[int]) -> None:
        for (number, parts), x in zip(self.results, found, strict=True):
            tensors[number] = x
            _put(x, number, parts, addresses)
        for number in self.drops:
            tensors[number] = None


class _TritonLaunch(_TensorStep):
    """One launch of a kernel of Triton, by Triton's launcher."""

    __slots__ = ("kernel",)

    def __init__(self, step, slots, ends, plan):
        super().__init__(step, slots, ends, plan)
        self.kernel: Any = step.kernel

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        found = triton_ops.launch(self.kernel, *self.read(tensors))
        self.keep(found, tensors, addresses)


class _DerivedStep(_TensorStep):
    """A derived step."""

    __slots__ = ("feeds_kernels", "function", "in_place", "static")

    def __init__(self, step: Derived, slots, ends, plan, read_by_kernels):
        super().__init__(step, slots, ends, plan)
        self.function, self.static = step.function, dict(step.static)
        self.in_place = step.in_place
        self.feeds_kernels = not self.in_place and any(
            x.buffer in read_by_kernels for x in step.writes
        )

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        if self.plain is not None:
            reads = [tensors[number] for number in self.plain]
        else:
            reads = [reader(tensors) for reader in self.readers]
        found = self.function(TORCH_OPS, *reads, **self.static)
        if self.in_place:
            found = [tensors[number] for number, _ in self.results]
        for (number, parts), x in zip(self.results, found, strict=True):
            address = x.data_ptr()
            # What kernels read must lie as they want it.
            if self.feeds_kernels and (address % launch.ALIGNMENT or not x.is_contiguous()):
                x = x.clone(memory_format=torch.contiguous_format)
                address = x.data_ptr()
            tensors[number], addresses[number] = x, address
            for slot, offset in parts:
                addresses[slot] = address + offset
        for number in self.drops:
            tensors[number] = None


class _Released(NamedTuple):
    """Gives back memory of arguments, where that is allowed."""

    arguments: Sequence[int]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        early_release.release([tensors[number] for number in self.arguments])

"""Runs the functions of operators from plans. A plan lists the kernels of a call and their
buffers (`nsa_core.plan`). The plan of a call is looked up, and made if it does not exist yet.

A plan depends only on the key of a call. The key consists of the shape and dtype of each tensor,
all other arguments, and the device. Strides and addresses are not part of the key. The key does not
record whether two arguments are the same tensor.

A plan runs on torch tensors on the current stream. Some launches run on a side stream, which forks
from the current stream and joins it again. The host never waits for the device. A plan is bound to
a device once. Binding computes everything that does not depend on addresses. Since launches need
only addresses, a buffer becomes a tensor only if torch also reads the buffer.
"""

import contextlib
import functools
import itertools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from nsa_core.array_ops import ArrayOps
from nsa_core.plan.buffers import (
    Buffer,
    Join,
    Launch,
    Memory,
    Plan,
    View,
    by_address,
    touched_by_torch,
)
from nsa_core.plan.planner import PlanOps
from nsa_interop import launch
from nsa_torch import batch_tables, torch_ops
from nsa_torch.plain import release
from nsa_torch.shared import SHARED, Kept, is_capturing
from nsa_torch.torch_ops import INTERPRETED, TORCH_OPS, capability_of

# Buffers up to this size may be allocated early or freed late, so that launches are consecutive.
LATE_BYTES = 4 * 2**20
BUNDLED_BYTES = LATE_BYTES  # maximum size of a tensor in a bundle. A bundle is freed as a whole
# Minimum number of consecutive launches that become one step. A step can run as a CUDA graph, which
# saves the host little time if there are fewer launches.
ROW = 3
NOTHING = Kept()


class Bundle(NamedTuple):
    """Small tensors in one allocation, which are saved for the backward pass. Making, saving or
    reading a separate tensor would cost the host half the time of a launch.

    Attributes:
      offsets: the offset in bytes of each saved tensor, or None if the tensor has its own memory.
      bytes: the total size of the allocation.
    """

    offsets: tuple[int | None, ...]
    bytes: int

    @classmethod
    def of(cls, plan: Plan) -> "Bundle | None":
        """Make a bundle for the small results of a plan, except the first result and results that
        torch reads.
        """
        by_torch = touched_by_torch(plan.steps)
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
        """Return all saved tensors, with the shapes of `wanted`. `kept` has the saved tensors
        with their own memory, and the tensor of the bundle.
        """
        *own, bundle = kept
        rest = iter(own)
        pairs = zip(self.offsets, wanted, strict=True)
        return [next(rest) if o is None else _in(bundle, o, x) for o, x in pairs]


def _in(bundle: Tensor, offset: int, x: Array | Buffer) -> Tensor:
    dtype = _dtype(x.dtype)
    count = math.prod(x.shape) * dtype.itemsize
    return bundle[offset : offset + count].view(dtype).view(x.shape)


type Addresses = list[
    tuple[int, int]
]  # slots of the list of addresses, each with an address or an offset
# a function of tensors, addresses and the stream
type Step = Callable[[list[Any], list[int], int], None]


class BoundPlan:
    """A plan that is bound to a device. Any thread may call a `BoundPlan`.

    Each call fills two lists. `tensors` has an entry per buffer, followed by events and
    `gives_back`. `addresses` has an entry per slot. Every part of a buffer that kernels read or
    write has a slot.

    Args:
      bundle: the `Bundle` that contains some arguments after the first, or None.
      bundles: whether small results after the first are put into a bundle, which is then the
        last result.

    Attributes:
      given: indices of the arguments that are not in the bundle; None means all arguments.
      slots: for each buffer that has its own memory, the slots of its parts and their offsets. The
        last entries belong to the workspace, the bundle and the results of `tables`. The workspace,
        the bundle and the results of `tables` contain all other buffers.
      read_arguments: arguments that kernels read. Arguments that kernels cannot read are copied.
      bundle_views: arguments in the bundle that torch reads, and their offsets.
      constants: indices of buffers that do not depend on the call.
      read_by_torch: constants that a step of torch reads, each as its position in the list and
        the index of its buffer.
      known: Three entries: a weak reference to the constants, a list of addresses with the
        constants' addresses, and a stream that does not have to wait for the constants.
      tables: the function that computes the tables of a batch.
      tables_read_by_torch: indices of the tables that torch reads, and indices of the results of
        `tables` that contain these tables.
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
        buffers, results = plan.buffers, [x.buffer for x in plan.results]
        lying = {}  # offsets in a bundle
        for each, numbers in ((bundle, range(1, plan.arguments)), (self.bundled, results[1:])):
            pairs = zip(numbers, each.offsets if each else (), strict=False)
            lying |= {n: offset for n, offset in pairs if offset is not None}
        given = [n for n in range(plan.arguments) if n not in lying]
        self.given = None if len(given) == plan.arguments else given
        self.results = [n for n in results if n not in lying]

        at = {(n, 0): n for n in range(len(buffers))}
        for step in plan.steps:
            for x in (*step.reads, *step.writes):
                at.setdefault((x.buffer, x.offset), len(at))
        self.tables, batch = batch_tables.of_plan(plan, device)
        # For each buffer in another allocation: the index of that allocation, which continues the
        # count of the buffers, and the offset in the allocation.
        inside = {
            n: (0, x.offset) for n, x in enumerate(buffers) if x.memory is Memory.WORKSPACE
        }
        inside |= {n: (1, start) for n, start in lying.items()}
        for n, number in batch.items():
            i, start = self.tables.place(number)
            inside[n] = 2 + i, start
        count = len(buffers) + 3 + len(self.tables.tensors)
        self.slots: list[Addresses] = [[] for _ in range(count)]
        for (n, offset), slot in at.items():
            i, start = inside.get(n, (n - len(buffers), 0))
            self.slots[len(buffers) + i].append((slot, start + offset))

        launches = [step for step in plan.steps if isinstance(step, Launch)]
        read = {x.buffer for step in plan.steps for x in step.reads}
        read_by_kernels = {x.buffer for step in launches for x in step.reads}
        by_torch = touched_by_torch(plan.steps)
        self.read_arguments = [n for n in given if n in read_by_kernels]
        self.bundle_views = [
            (n, start, buffers[n]) for n, start in lying.items() if n in by_torch
        ]
        self.constants = sorted([n for n in read if buffers[n].memory is Memory.CONSTANT])
        self.read_by_torch = [(i, n) for i, n in enumerate(self.constants) if n in by_torch]
        self.tables_read_by_torch = [
            (n, self.tables.tensor(number)) for n, number in batch.items() if n in by_torch
        ]
        self.joins = [step.beside for step in plan.steps if isinstance(step, Join)]
        self.blank = [None] * (len(buffers) - plan.arguments + len(self.joins))
        self.known: tuple[Any, list[int], int] = lambda: None, [0] * len(at), -1
        self.steps = self._bound(at, read_by_kernels, lying)

    def __call__(
        self, given: Sequence[Tensor], bundle: Tensor | None = None, gives_back: bool = False
    ) -> list[Tensor]:
        """Run the plan. The arguments may have any memory layout, and several may be the same
        tensor.

        Args:
          bundle: the tensor of the bundle, which contains the arguments that are not in `given`.
          gives_back: whether to free the memory of arguments that the plan has `released`.
        """
        tensors: list[Any] = [*given, *self.blank, gives_back]
        if self.given is not None:
            tensors[: len(given)] = [None] * self.plan.arguments
            for number, x in zip(self.given, given, strict=True):
                tensors[number] = x
        shared, slots = self.plan.shared, self.slots
        # a copy of the boundaries has no tables
        borders = None if shared is None else tensors[shared]
        stream = launch.current_stream(self.device) if self.on_gpu else 0
        same, addresses, ready_on = self.known
        constants = same()
        if constants is None or stream != ready_on or is_capturing(self.device):
            constants, addresses = self._constants(stream)
        addresses = addresses.copy()
        for i, number in self.read_by_torch:
            tensors[number] = constants[i]
        for number in self.read_arguments:
            x = tensors[number]
            address = x.data_ptr()
            if address % launch.ALIGNMENT or not x.is_contiguous():
                x = tensors[number] = x.clone(memory_format=torch.contiguous_format)
                address = x.data_ptr()
            for slot, offset in slots[number]:
                addresses[slot] = address + offset
        found = () if borders is None else batch_tables.of(borders, self.tables)
        for number, i in self.tables_read_by_torch:
            tensors[number] = found[i]
        workspace = None  # the workspace keeps its memory until the last launch is queued
        if self.plan.workspace_bytes:
            size = self.plan.workspace_bytes
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.bundle_bytes:
            bundle = torch.empty(self.bundle_bytes, dtype=torch.uint8, device=self.device)
        others: Any = workspace, bundle, *found
        for number, x in enumerate(others, len(self.plan.buffers)):
            if places := slots[number]:
                start = x.data_ptr()
                for slot, offset in places:
                    addresses[slot] = start + offset
        for number, offset, like in self.bundle_views:
            tensors[number] = _in(others[1], offset, like)
        x = None  # delete names that refer to tensors that a step frees
        try:
            for step in self.steps:
                step(tensors, addresses, stream)
        except BaseException:
            # If the plan fails, the side stream may still write to memory that is freed now.
            for event in filter(None, tensors[len(self.plan.buffers) : -1]):
                torch.cuda.current_stream(self.device).wait_event(event)
            raise
        found = [tensors[number] for number in self.results]
        if self.bundle_bytes:
            found.append(bundle)
        return found

    def _constants(self, stream: int) -> tuple[Kept, list[int]]:
        """Return the constants, and a list of addresses that includes the addresses of the
        constants."""
        kept = SHARED.get(self.key, self.device, self._made) if self.constants else NOTHING
        same, addresses, _ = self.known
        if same() is not kept:
            addresses = [0] * len(addresses)
            for n, x in zip(self.constants, kept, strict=True):
                start = x.data_ptr()
                for slot, offset in self.slots[n]:
                    addresses[slot] = start + offset
            # in one assignment, since threads share it
            self.known = weakref.ref(kept), addresses, stream
        return kept, addresses

    def _made(self) -> list[Tensor]:
        """Return the constants. Another plan on this device may already have computed the
        constants, or arrays from which they are computed.
        """
        known: dict[int, tuple[Any, Tensor]] = {}  # the source and the tensor of each buffer
        for step in self.plan.constants:
            reads = [known[x.buffer] for x in step.reads]
            shapes = tuple([x.shape for x in step.reads])
            key = self.device, step.function, step.static, tuple([k for k, _ in reads]), shapes

            def make(step=step, reads=reads):
                arrays = [
                    y.reshape(x.shape) for x, (_, y) in zip(step.reads, reads, strict=True)
                ]
                # A step that reads arrays computes its results on the device of these arrays.
                # Other steps need the device mode of torch, which costs the host as much time as
                # an operator.
                with contextlib.nullcontext() if arrays else self.device:
                    return step.function(TORCH_OPS, *arrays, **dict(step.static))

            for i, (x, y) in enumerate(
                zip(step.writes, SHARED.get(key, self.device, make), strict=True)
            ):
                known[x.buffer] = (key, i), y
        return [known[n][1] for n in self.constants]

    def _bound(self, at, read_by_kernels, lying) -> list[Step]:
        """Return the steps of the bound plan. Consecutive launches become one step.

        Args:
          at: the slot of each part of a buffer.
          lying: the offset of each buffer that is in a bundle.
        """
        # For each launch: the kernel, the slots that it reads and writes, its results that have
        # their own memory, and buffers that no later step uses.
        plan, found, row = self.plan, list[Step](), list[Any]()
        for step, begins, ends in zip(plan.steps, plan.begins, plan.ends, strict=True):
            following = list[Step]()
            gone = [n for n in ends if n in plan.released]
            ends = [n for n in ends if n not in plan.released]
            if by_address(step):
                arguments = [at[x.buffer, x.offset] for x in (*step.reads, *step.writes)]
                allocated = [n for n in begins if n not in lying]
                one = step.kernel, arguments, allocated, ends
                if step.beside is None:
                    row.append(one)
                    ended = [plan.buffers[n] for n in ends]
                    late = all(
                        x.memory is Memory.ARGUMENT or x.bytes <= LATE_BYTES for x in ended
                    )
                    if late and not gone:
                        continue
                else:
                    (start,) = self._launches([one])
                    following.append(self._beside(start, self._event(step.beside)))
            elif isinstance(step, Join):
                following.append(self._join(self._event(step.beside), ends))
            else:
                following.append(self._of_torch(step, ends, read_by_kernels))
            if gone:
                following.append(_release(gone))
            found += self._launches(row) + following
            row = []
        return found + self._launches(row)

    def _event(self, beside: int) -> int:
        """Return the index in the list of tensors for the event at the end of the launch
        `beside`.
        """
        return len(self.plan.buffers) + self.joins.index(beside)

    def _launches(self, row: Sequence[Any]) -> list[Step]:
        """Return the steps that run consecutive launches. At least `ROW` launches become one
        step. Fewer launches become one step each. At its end, a step frees the buffers that no
        later step uses.
        """
        if len(row) >= ROW:
            kernels, arguments, allocated, drops = zip(*row, strict=True)
            place = {x: i for i, x in enumerate(dict.fromkeys(itertools.chain(*arguments)))}
            inner = [[place[x] for x in each] for each in arguments]
            start = launch.sequence(kernels, inner, self.device)
            lists = [[*itertools.chain(*each)] for each in (allocated, drops)]
            return [self._launch(start, [*place], *lists)]
        return [
            self._launch(launch.launcher(kernel, self.device), *rest) for kernel, *rest in row
        ]

    def _launch(self, start, arguments, allocated, drops) -> Step:
        """Return a step that calls `start` with the addresses in the slots `arguments`."""
        device, buffers = self.device, self.plan.buffers
        made = [
            (n, buffers[n].shape, _dtype(buffers[n].dtype), self.slots[n]) for n in allocated
        ]
        addresses_of = operator.itemgetter(*arguments)

        def run(tensors, addresses, stream):
            for number, shape, dtype, slots in made:
                x = tensors[number] = torch.empty(shape, dtype=dtype, device=device)
                address = x.data_ptr()
                for slot, offset in slots:
                    addresses[slot] = address + offset
            start(stream, addresses_of(addresses))
            for number in drops:
                tensors[number] = None

        return run

    def _beside(self, start: Step, event: int) -> Step:
        """Return a step that launches on the side stream, after the work that is already
        queued.
        """

        def run(tensors, addresses, stream):
            if not self.on_gpu:  # tests use this
                return start(tensors, addresses, stream)
            other = _stream_beside(self.device, stream)
            other.wait_stream(torch.cuda.current_stream(self.device))
            start(tensors, addresses, other.cuda_stream)
            tensors[event] = other.record_event()
            return None

        return run

    def _join(self, event: int, drops: Sequence[int]) -> Step:
        """Return a step that makes later work wait for the launch with this `event`."""

        def run(tensors, addresses, stream):
            if tensors[event] is not None:
                torch.cuda.current_stream(self.device).wait_event(tensors[event])
            for number in (event, *drops):
                tensors[number] = None

        return run

    def _of_torch(self, step, drops: Sequence[int], read_by_kernels: set[int]) -> Step:
        """Return a step on tensors: a derived step, or a launch by Triton."""
        reads, writes = [x.buffer for x in step.reads], [x.buffer for x in step.writes]
        # Usually each view is a whole buffer.
        parts = [
            (i, x)
            for i, x in enumerate(step.reads)
            if x.shape != self.plan.buffers[x.buffer].shape
        ]
        in_place, feeds_kernels = False, False
        if isinstance(step, Launch):
            kernel: Any = step.kernel
            function: Any = functools.partial(torch_ops.launch_triton, kernel)
        else:
            function = functools.partial(step.function, TORCH_OPS, **dict(step.static))
            in_place = step.in_place
            feeds_kernels = not in_place and not read_by_kernels.isdisjoint(writes)
        results = [(n, self.slots[n]) for n in writes]

        def run(tensors, addresses, stream):
            arrays = [tensors[number] for number in reads]
            for i, view in parts:
                arrays[i] = _part(arrays[i], view)
            found = function(*arrays)
            if in_place:
                found = [tensors[number] for number in writes]
            for (number, slots), x in zip(results, found, strict=True):
                address = x.data_ptr()
                # Kernels need aligned, contiguous tensors.
                if feeds_kernels and (address % launch.ALIGNMENT or not x.is_contiguous()):
                    x = x.clone(memory_format=torch.contiguous_format)
                    address = x.data_ptr()
                tensors[number] = x
                for slot, offset in slots:
                    addresses[slot] = address + offset
            for number in drops:
                tensors[number] = None

        return run


def _release(arguments: Sequence[int]) -> Step:
    """Return a step that frees the memory of arguments if the call permits this
    (`gives_back`)."""

    def run(tensors, addresses, stream):
        if tensors[-1]:
            release([tensors[number] for number in arguments])

    return run


def _part(x: Tensor, view) -> Tensor:
    """Return the part of the tensor `x` that a `view` of a buffer describes. `x` is the tensor of
    that buffer."""
    if view.bytes != x.nbytes:
        size = _dtype(view.dtype).itemsize
        x = x.view(-1)[view.offset // size : (view.offset + view.bytes) // size]
    return x.reshape(view.shape)


@functools.cache
def _stream_beside(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Return the side stream of a stream on a device. The side stream has a higher priority."""
    return torch.cuda.Stream(device, priority=-1)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


KEPT = 1024  # maximum number of entries in `KNOWN`
# Results of earlier calls, by key. Most public calls need only one look-up. There are five kinds
# of values:
#   call.PlannedProgram      all steps of `attention`, by `call.Signature`
#   BoundPlan                an operator, by its arguments (`Planned.__call__`)
#   names                    the implementation of each step, by `dispatch.problem_key`
#   paged_attend._Launch     a decode step, by `paged_attend.Step`
#   context._Decided, a row  a call of context parallelism, and the row on which all ranks agreed
# Below them only constants (`shared.SHARED`), tables of a batch, and bound kernels are cached.
KNOWN: dict[Hashable, Any] = {}
_lock = threading.Lock()
_prepared: set[Hashable] = set()  # layers on a GPU whose kernels were prepared

# If `instead` is set, steps run on this `ArrayOps` directly, without plans.
instead: ArrayOps | None = None


def keep[Value](key: Hashable, value: Value) -> Value:
    """Put the value into `KNOWN`. If `KNOWN` is full, drop the oldest entries."""
    with _lock:
        KNOWN[key] = value
        while len(KNOWN) > KEPT:
            KNOWN.pop(next(iter(KNOWN)))
    return value


def forget() -> None:
    """Forget all plans and calls. Tests and tuners call this function after they change state on
    which plans depend.
    """
    KNOWN.clear()


@contextlib.contextmanager
def unplanned(ops: ArrayOps) -> Iterator[None]:
    """Disable plans in this process, so that steps run directly on `ops`."""
    global instead
    before, instead = instead, ops
    try:
        yield
    finally:
        instead = before


class Planned(NamedTuple):
    """A function of kernels that is traced once for all calls with the same key. The trace is a
    plan.

    Attributes:
      function: The traced function. The arguments of `function` are an `ArrayOps` and the
        arguments of an operator. `function` returns arrays.
      backward: The function that computes gradients. The arguments of the function `backward` are
        the gradient of the first result, the other results, and the arguments of the call.
        `backward=None` means that there are no gradients.
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
        bound = KNOWN.get(key) or keep(key, self.bind(arguments, tensors))
        return bound(tensors)

    def bind(
        self,
        arguments: Sequence[Any],
        tensors: Sequence[Tensor],
        bundle: Bundle | None = None,
        bundles: bool = False,
    ) -> BoundPlan:
        """Bind a plan of a call to its device.

        Args:
          arguments: The arguments of the call. Arguments in a bundle are `Array`s, not tensors.
          tensors: The tensors among the arguments.
          bundle, bundles: as in `BoundPlan`.
        """
        device = tensors[0].device
        if elsewhere := {x.device for x in tensors} - {device}:
            raise ValueError(
                f"all tensors must be on {device}, got a tensor on {elsewhere.pop()}"
            )
        plan = self.plan(arguments, device)
        if device.type == "cuda" and plan.kernels and not capability.interpret.get():
            self.prepare(plan, arguments, device)
        return BoundPlan(plan, device, bundle, bundles)

    def prepare(self, plan: Plan, arguments: Sequence[Any], device: torch.device) -> None:
        """Compile and load the kernels of a layer, in parallel, at its first call.

        Other lengths may need other kernels of the layer. A kernel for other lengths is loaded
        when a plan that runs it is bound. If one of the call's kernels was never built, all
        kernels of the call are built.
        """
        described = [array_of(x) if isinstance(x, Tensor) else x for x in arguments]
        # Lengths are axes of tensors, and are among the first numbers of
        # `operators.LAYOUT_ARGS`.
        sizes = [(x.shape[2:], x.dtype) if isinstance(x, Array) else None for x in described]
        layer = self.function, device, *sizes, str(described[-2:])
        made = lambda: self.plans(described, device, plan)  # refers to no tensor
        kernels = lambda: [*dict.fromkeys(x for each in made() for x in each.kernels)]
        if layer in _prepared:
            launch.prefetch(kernels)
        elif not torch.cuda.is_current_stream_capturing():
            launch.prepare(kernels(), device)
            _prepared.add(layer)

    def plan(self, arguments: Sequence[Any], device: torch.device | None) -> Plan:
        """Return the plan of a call.

        Args:
          arguments: Tensors or arrays.
          device: The device of the call. `device=None` means no GPU. Without a device, measured
            tile sizes do not apply.
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
        """Return the plan of a call and the plan of its gradient. The arguments are the arguments
        of `Planned.plan`, followed by the plan of the call if that plan exists already.
        """
        plan = plan or self.plan(arguments, device)
        if self.backward is None:
            return [plan]
        return [plan, self.backward.plan([*plan.results, *arguments], device)]


def array_of(x: Any) -> Array:
    """Return the shape and dtype of a tensor or of an `Array`."""
    return Array(tuple(x.shape), str(x.dtype).removeprefix("torch."))

"""Calls of an operator that are alike: what the first ones did is done again, without deciding it
anew.

The steps on kernels are written for both frameworks and decide much by the sizes of their
arguments: kernels, tiles, shapes. All of it follows from the signature of a call: shapes, strides,
dtypes and devices of its tensors, which of them are the same, and all other arguments. The host
never reads a value on the device. So the second call with a signature is recorded, as a list of
launches and of operators of torch on numbered tensors, and from the third on the list is run:

    signature -> Recording -> Program: constants, [Launch | Call, ..] -> results

A call whose signature comes once costs nothing more. Numbers are those of the recorded call, bit
by bit: the same kernels read and write in the same order.
"""

import collections
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interop import launch
from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import capability
from nsa_torch.shared import SHARED

DEVICE_TYPES = ("cuda",)  # where calls are run from a list
PROGRAMS = 256  # kept at most, the least recently used ones dropped first
# Results of kernels that only kernels read lie in one allocation up to this size; larger ones
# are given back as soon as they have been read.
WORKSPACE_BYTES = 32 * 2**20

_local = threading.local()


def recording() -> "Recording | None":
    """What records this thread's calls now."""
    return getattr(_local, "recording", None)


class Slot(NamedTuple):
    """A tensor of a program by its number."""

    number: int


class Launch:
    """One launch of a kernel; `arguments`: numbers of its inputs and outputs."""

    def __init__(self, kernel: Kernel, arguments: Sequence[int], made: Sequence[int]):
        self.kernel, self.arguments, self.made = kernel, tuple(arguments), tuple(made)
        outputs = dict(zip(arguments[len(kernel.inputs) :], kernel.outputs, strict=True))
        self.shapes = {
            number: (outputs[number].shape, getattr(torch, outputs[number].dtype))
            for number in made
        }
        self.allocated: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        self.placed: list[tuple[int, int]] = []  # number, offset in the workspace

    def bind(self, device: torch.device) -> None:
        self.device = device
        self.start = launch.launcher(self.kernel, device)

    def __call__(self, slots: list[Any], stream: int, workspace: int) -> None:
        for number, shape, dtype in self.allocated:
            slots[number] = torch.empty(shape, dtype=dtype, device=self.device)
        for number, offset in self.placed:
            slots[number] = workspace + offset
        found = [slots[i] for i in self.arguments]
        self.start(stream, [x if type(x) is int else x.data_ptr() for x in found])


class Call:
    """One call of an operator of torch, or of any function of tensors."""

    def __init__(self, function, args, options, results: Sequence[int | None]):
        self.function, self.args, self.options, self.results = function, args, options, results
        tensors = _slots((args, options))
        self.reads = tuple(tensors)
        flat = all(not _slots(x) for x in args if not isinstance(x, Slot))
        self.flat = flat and not _slots(options)
        self.at = [(i, x.number) for i, x in enumerate(args) if isinstance(x, Slot)]

    def __call__(self, slots: list[Any], stream: int, workspace: int) -> None:
        if self.flat:
            args, options = list(self.args), self.options
            for i, number in self.at:
                args[i] = slots[number]
        else:
            args, options = _filled((self.args, self.options), slots)
        found = self.function(*args, **options)
        for number, x in zip(self.results, _results(found), strict=True):
            if number is not None:
                slots[number] = x


class Constants(NamedTuple):
    """Tensors that follow from sizes alone, and how to come by them."""

    get: Callable[[], Iterable[Tensor]]
    results: Sequence[int]


type Step = Launch | Call


class Program:
    """The steps of a call in order, and which tensors they leave.

    Args:
      count: tensors of the call, numbers `0 .. count - 1`.
      slots: numbers there are.
      constants: what no step makes. They are asked for at each call: they may have been dropped,
        and a stream or a CUDA graph that did not make them has to be told.
      results: numbers of what it returns.
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        slots: int,
        constants: Sequence[Constants],
        steps: Sequence[Step],
        results: Sequence[int],
    ):
        self.device, self.constants, self.results = device, constants, results
        self.known = [number for each in constants for number in each.results]
        self.blank = [None] * (slots - count)
        self.bytes = self._place(steps)
        # Not the program: what is shared outlives it.
        self.key = object()
        last = {number: i for i, step in enumerate(steps) for number in _read(step)}
        drops = collections.defaultdict(list)
        for number, i in last.items():
            if number >= count and number not in self.results:
                drops[i].append(number)
        self.steps = [(step, tuple(drops[i])) for i, step in enumerate(steps)]
        for step in steps:
            if isinstance(step, Launch):
                step.bind(device)

    def _place(self, steps: Sequence[Step]) -> int:
        """Says of each result of a kernel where it will lie; the size of the workspace."""
        tensors = set(self.results)  # what must be one of torch's
        for step in steps:
            if isinstance(step, Call):
                tensors |= {*step.reads, *step.results}
        launches = [step for step in steps if isinstance(step, Launch)]
        offset, places = 0, {}
        for step in launches:
            for number, (shape, dtype) in step.shapes.items():
                if number not in tensors:
                    places[number] = offset
                    size = torch.Size(shape).numel() * dtype.itemsize
                    offset += -(-size // launch.ALIGNMENT) * launch.ALIGNMENT
        if offset > WORKSPACE_BYTES:
            places, offset = {}, 0
        for step in launches:
            step.placed = [(x, places[x]) for x in step.made if x in places]
            step.allocated = [(x, *step.shapes[x]) for x in step.made if x not in places]
        return offset

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results for the tensors of a call with the same signature."""
        slots: list[Any] = [*tensors, *self.blank]
        if self.known:
            found = SHARED.get(self.key, self.device, self._constants)
            for number, x in zip(self.known, found, strict=True):
                slots[number] = x
        stream = launch.current_stream(self.device)
        kept, workspace = None, 0
        if self.bytes:
            kept = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            workspace = kept.data_ptr()
        for step, drops in self.steps:
            step(slots, stream, workspace)
            for number in drops:
                slots[number] = None
        return [slots[number] for number in self.results]

    def _constants(self) -> list[Tensor]:
        return [x for each in self.constants for x in each.get()]


class Unknown(Exception):
    """A call that cannot be run again from its list."""


class Recording(TorchDispatchMode):
    """Within: what this thread launches and asks of torch is noted, and done.

    Args:
      tensors: of the call.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self.steps: list[Step] = []
        self.asked: list[Constants] = []
        self.count = len(tensors)
        self.kept = list(tensors)  # so that no other gets the identity of one that is gone
        self.numbers = {id(x): i for i, x in reversed([*enumerate(tensors)])}
        self.paused = False

    def __enter__(self):
        _local.recording = self
        return super().__enter__()

    def __exit__(self, *error):
        _local.recording = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), options=None):
        options = options or {}
        found = function(*args, **options)
        if not self.paused:
            args, options = self._numbered(args), self._numbered(options)
            results = [
                self._number(x) if isinstance(x, Tensor) else None for x in _results(found)
            ]
            self.steps.append(Call(function, args, options, results))
        return found

    def launched(self, kernel: Kernel, tensors, run: Callable[[], Sequence[Tensor]]):
        """Notes what `run` does: a launch of `kernel` on `tensors`."""
        if self.paused:
            return run()
        results = self._apart(run)
        inputs = [self._known(x) for x in tensors]
        outputs = [self._number(x) for x in results]
        made = [x for x in outputs if x not in inputs]
        self.steps.append(Launch(kernel, [*inputs, *outputs], made))
        return results

    def called(self, function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]):
        """Notes a call of any function of tensors alone."""
        if self.paused:
            return function(*tensors)
        results = self._apart(functools.partial(function, *tensors))
        given = [Slot(self._known(x)) for x in tensors]
        self.steps.append(Call(function, given, {}, [self._number(x) for x in results]))
        return results

    def constants(self, get: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        """Notes that `get` was asked for tensors."""
        if self.paused:
            return list(get())
        found = list(self._apart(get))
        self.asked.append(Constants(get, [self._number(x) for x in found]))
        return found

    def program(self, device: torch.device, results: Sequence[Tensor]) -> Program:
        """What was recorded, up to these results."""
        numbers = [self._known(x) for x in results]
        sizes = self.count, len(self.kept)
        return Program(device, *sizes, self.asked, self.steps, numbers)

    def _apart(self, function):
        self.paused = True
        try:
            return function()
        finally:
            self.paused = False

    def _number(self, x: Tensor) -> int:
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.kept)
            self.kept.append(x)
        return self.numbers[id(x)]

    def _known(self, x: Tensor) -> int:
        if id(x) not in self.numbers:
            raise Unknown
        return self.numbers[id(x)]

    def _numbered(self, x: Any) -> Any:
        """`x` with slots in place of tensors."""
        if isinstance(x, Tensor):
            return Slot(self._known(x))
        if isinstance(x, list | tuple):
            return type(x)(self._numbered(each) for each in x)
        if isinstance(x, dict):
            return {name: self._numbered(each) for name, each in x.items()}
        return x


def _filled(x: Any, slots: Sequence[Any]) -> Any:
    """`x` with tensors in place of slots."""
    if isinstance(x, Slot):
        return slots[x.number]
    if isinstance(x, list | tuple):
        return type(x)(_filled(each, slots) for each in x)
    if isinstance(x, dict):
        return {name: _filled(each, slots) for name, each in x.items()}
    return x


def _slots(x: Any) -> list[int]:
    if isinstance(x, Slot):
        return [x.number]
    if isinstance(x, dict):
        x = [*x.values()]
    return [n for each in x for n in _slots(each)] if isinstance(x, list | tuple) else []


def _results(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def _read(step: Step) -> Sequence[int]:
    """The numbers that a step has to do with, so that none is dropped before its last use."""
    if isinstance(step, Launch):
        return step.arguments
    return [*step.reads, *(x for x in step.results if x is not None)]


class Replayed:
    """A function of an operator's arguments whose calls alike are run from a list.

    Args:
      function: of tensors, None, numbers and lists of them; returns a list or tuple of tensors.
        What it does may follow from nothing but the signature.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._as_returned: Callable[[list[Tensor]], Any] = list  # or a tuple
        self.__name__ = getattr(function, "__name__", "replayed")
        # None: seen once. False: cannot be run from a list.
        self._programs: collections.OrderedDict[Hashable, Program | bool | None]
        self._programs = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        device = tensors[0].device
        if device.type not in DEVICE_TYPES or recording():
            return self.function(*arguments)
        key = signature(arguments)
        with self._lock:
            known = key in self._programs
            program = self._programs.get(key)
            if known:
                self._programs.move_to_end(key)
        if isinstance(program, Program):
            return self._as_returned(program(tensors))
        if not known:
            self._keep(key, None)
        if not known or program is False:
            return self.function(*arguments)
        found = Recording(tensors)
        try:
            with found:
                results = self.function(*arguments)
            self._as_returned = type(results)
            self._keep(key, found.program(device, results))
        except Unknown:
            self._keep(key, False)
            return self.function(*arguments)
        return results

    def _keep(self, key: Hashable, program: Program | bool | None) -> None:
        with self._lock:
            self._programs[key] = program
            while len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)

    def clear(self) -> None:
        """Forgets all calls."""
        with self._lock:
            self._programs.clear()


def signature(arguments: Sequence[Any]) -> Hashable:
    """What decides all that is done with `arguments` on a device."""
    parts: list[Any] = [capability.interpret.get() is not False]
    seen: dict[int, int] = {}
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor):
            aligned = x.data_ptr() % launch.ALIGNMENT == 0
            laid_out = None if x.is_contiguous() else x.stride()
            first = seen.setdefault(id(x), i)
            parts.append((x.shape, laid_out, x.dtype, x.get_device(), aligned, first))
        else:
            parts.append(tuple(x) if isinstance(x, list) else x)
    return tuple(parts)

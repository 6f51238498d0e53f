"""The steps of a recorded call, bound so that they cost the host little: see `replay`.

A launch reads and writes addresses. So a result of a kernel that only kernels read needs no
tensor: it lies in one allocation of the whole call, in which lifetimes decide who follows whom.
What starts where another tensor starts (a view, a reshape that copies nothing) is that address.
"""

import collections
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interop import launch
from kernels_pallas.kernel import Kernel
from nsa_torch.shared import SHARED

# At most, of results of kernels that only kernels read; what does not fit is allocated by itself
# and given back as soon as it has been read.
WORKSPACE_BYTES = 64 * 2**20


class Slot(NamedTuple):
    """A tensor of a program by its number."""

    number: int


class Array(NamedTuple):
    """A contiguous tensor, not yet there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
      arguments: numbers of its inputs and outputs.
      made: what it allocates, by number.
    """

    kernel: Kernel
    arguments: tuple[int, ...]
    made: Mapping[int, Array]

    @property
    def seen(self) -> Sequence[int]:
        return self.arguments


class Call(NamedTuple):
    """One call of an operator of torch, or of any function of tensors.

    Attributes:
      args, options: with slots in place of tensors.
      results: numbers; None where it returns no tensor.
      starts: of results that are no more than another look at a tensor from its start, the
        number of that tensor.
      arrays: what these results are, where they are contiguous.
    """

    function: Callable[..., Any]
    args: Any
    options: Mapping[str, Any]
    results: Sequence[int | None]
    starts: Mapping[int, int]
    arrays: Mapping[int, Array]

    @property
    def reads(self) -> Sequence[int]:
        return _slots((self.args, self.options))

    @property
    def seen(self) -> Sequence[int]:
        return [*self.reads, *(x for x in self.results if x is not None)]

    @property
    def looks(self) -> bool:
        """Whether it does nothing but look at tensors another way."""
        return len(self.starts) == len(self.results)


type Step = Launch | Call


class Constants(NamedTuple):
    """Tensors that follow from sizes alone, and how to come by them."""

    get: Callable[[], Iterable[Tensor]]
    results: Sequence[int]


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
        self.device, self.constants, self.count = device, constants, count
        self.known = [number for each in constants for number in each.results]
        self.blank, self.nowhere = [None] * (slots - count), [0] * (slots - count)
        # Not the program: what is shared outlives it.
        self.key = object()
        made = {number: x for step in steps for number, x in _made(step).items()}
        self.results, shapes = _made_as_returned(steps, results, made)
        made |= shapes
        self.recorded, dropped, tensors = _needed(steps, self.results)
        roots = _roots(dropped)
        seen = [[roots.get(x, x) for x in step.seen] for step in self.recorded]
        last = {number: i for i, numbers in enumerate(seen) for number in numbers}
        places, self.bytes = _placed(self.recorded, last, made.keys() - tensors, made)
        self.places = [*places.items()]
        drops = collections.defaultdict(list)
        for number, i in last.items():
            if number >= count and number not in self.results and number not in places:
                drops[i].append(number)
        self.steps = [
            _bound(step, numbers, drops[i], places, made, device)
            for i, (step, numbers) in enumerate(zip(self.recorded, seen, strict=True))
        ]

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The results for the tensors of a call with the same signature."""
        tensors: list[Any] = [*given, *self.blank]
        addresses = [x.data_ptr() for x in given] + self.nowhere
        if self.known:
            found = SHARED.get(self.key, self.device, self._constants)
            for number, x in zip(self.known, found, strict=True):
                tensors[number] = x
                addresses[number] = x.data_ptr()
        workspace = None  # until the last launch is queued
        if self.bytes:
            workspace = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            start = workspace.data_ptr()
            for number, offset in self.places:
                addresses[number] = start + offset
        stream = launch.current_stream(self.device)
        for step in self.steps:
            step(tensors, addresses, stream)
        return [tensors[number] for number in self.results]

    def _constants(self) -> list[Tensor]:
        return [x for each in self.constants for x in each.get()]


class _BoundLaunch:
    """`Launch` on a device."""

    __slots__ = ("addresses", "allocated", "device", "drops", "start")

    def __init__(self, start, numbers, allocated, drops, device):
        self.start, self.allocated, self.drops = start, allocated, drops
        self.addresses, self.device = operator.itemgetter(*numbers), device

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        for number, (shape, dtype) in self.allocated:
            x = tensors[number] = torch.empty(shape, dtype=dtype, device=self.device)
            addresses[number] = x.data_ptr()
        self.start(stream, self.addresses(addresses))
        for number in self.drops:
            tensors[number] = None


class _BoundCall:
    """`Call` with what is left to fill in."""

    __slots__ = ("args", "at", "drops", "function", "options", "result", "results")

    def __init__(self, call: Call, drops):
        # An overload's own call is nothing but this one.
        self.function = getattr(call.function, "_op", call.function)
        self.args, self.options = call.args, call.options
        self.results, self.drops = call.results, drops
        self.result = call.results[0] if len(call.results) == 1 else None
        flat = all(not _slots(x) for x in call.args if not isinstance(x, Slot))
        self.at = None
        if flat and not _slots(call.options):
            self.at = [(i, x.number) for i, x in enumerate(call.args) if isinstance(x, Slot)]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        if self.at is None:
            args, options = _filled((self.args, self.options), tensors)
        else:
            args, options = list(self.args), self.options
            for i, number in self.at:
                args[i] = tensors[number]
        found = self.function(*args, **options)
        if self.result is not None and isinstance(found, Tensor):
            tensors[self.result] = found
            addresses[self.result] = found.data_ptr()
        else:
            self._keep(found, tensors, addresses)
        for number in self.drops:
            tensors[number] = None

    def _keep(self, found, tensors, addresses):
        for number, x in zip(self.results, listed(found), strict=True):
            if number is not None:
                tensors[number] = x
                addresses[number] = x.data_ptr()


def _bound(step: Step, numbers, drops, places, made, device):
    """`step` for calls; `numbers`: its tensors, views replaced by what they look at."""
    if isinstance(step, Call):
        return _BoundCall(step, drops)
    allocated = [(x, made[x]) for x in step.made if x not in places]
    start = launch.launcher(step.kernel, device)
    return _BoundLaunch(start, numbers, allocated, drops, device)


def _made(step: Step) -> Mapping[int, Array]:
    return step.made if isinstance(step, Launch) else {}


def _made_as_returned(
    steps: Sequence[Step], results: Sequence[int], made: Mapping[int, Array]
) -> tuple[list[int], dict[int, Array]]:
    """Numbers of the results where none is a look at what a kernel made, as far as that can be,
    and in which shape the kernel makes those instead.
    """
    looks = [step for step in steps if isinstance(step, Call) and step.looks]
    roots = _roots(looks)
    arrays = {number: x for step in looks for number, x in step.arrays.items()}
    shapes: dict[int, Array] = {}
    final = list(results)
    for i, number in enumerate(results):
        root, array = roots.get(number, number), arrays.get(number)
        if array is None or root not in made or root in final:
            continue
        others = [*final[:i], *final[i + 1 :]]
        *_, tensors = _needed(steps, others)
        if array.dtype == made[root].dtype and array.bytes == made[root].bytes:
            if number not in others and root not in tensors:
                final[i], shapes[root] = root, array
    return final, shapes


def _needed(
    steps: Sequence[Step], results: Sequence[int]
) -> tuple[list[Step], list[Call], set[int]]:
    """The steps without looks at tensors that only launches read, these looks, and which numbers
    must be tensors.
    """
    kept, dropped, tensors = [], [], set(results)
    for step in reversed(steps):
        if isinstance(step, Call):
            if step.looks and tensors.isdisjoint(step.results):
                dropped.append(step)
                continue
            tensors.update(step.seen)
        kept.append(step)
    return kept[::-1], dropped[::-1], tensors


def _roots(calls: Iterable[Call]) -> dict[int, int]:
    """Of the results of calls that only look at tensors, in order, which tensor lies there."""
    roots: dict[int, int] = {}
    for call in calls:
        for number, start in call.starts.items():
            roots[number] = roots.get(start, start)
    return roots


def _placed(
    steps: Sequence[Step], last: Mapping[int, int], free: Iterable[int], made
) -> tuple[dict[int, int], int]:
    """Where the results `free` lie in the workspace, and its size; `last`: by number, the index
    of the last step that has to do with it.
    """
    free, places, size = set(free), {}, 0
    taken: dict[int, tuple[int, int]] = {}  # by number: from, to
    for i, step in enumerate(steps):
        taken = {number: x for number, x in taken.items() if last[number] >= i}
        for number in _made(step).keys() & free:
            bytes = -(-made[number].bytes // launch.ALIGNMENT) * launch.ALIGNMENT
            offset = 0
            for start, end in sorted(taken.values()):
                if offset + bytes <= start:
                    break
                offset = max(offset, end)
            if offset + bytes <= WORKSPACE_BYTES:
                places[number] = offset
                taken[number] = offset, offset + bytes
                size = max(size, offset + bytes)
    return places, size


def _filled(x: Any, tensors: Sequence[Any]) -> Any:
    """`x` with tensors in place of slots."""
    if isinstance(x, Slot):
        return tensors[x.number]
    if isinstance(x, list | tuple):
        return type(x)(_filled(each, tensors) for each in x)
    if isinstance(x, dict):
        return {name: _filled(each, tensors) for name, each in x.items()}
    return x


def _slots(x: Any) -> list[int]:
    if isinstance(x, Slot):
        return [x.number]
    if isinstance(x, dict):
        x = [*x.values()]
    return [n for each in x for n in _slots(each)] if isinstance(x, list | tuple) else []


def listed(x: Any) -> list[Any]:
    """What a function returns, as a list."""
    return list(x) if isinstance(x, list | tuple) else [x]

"""The steps of a recorded call, bound so that they cost the host little: see `replay`.

A launch reads and writes addresses. So a result of a kernel that only kernels read needs no
tensor: it lies in one allocation of the whole call, in which lifetimes decide who follows whom.
What starts where another tensor starts (a view, a reshape that copies nothing) is that address.
Launches that follow each other are one step (`kernels_pallas.runtime.sequence`), up to one after
which much memory is given back.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_interop import launch
from nsa_torch import early_release
from nsa_torch.program_steps import (
    SMALL_BYTES,
    Call,
    Constants,
    Launch,
    MergedCasts,
    Slot,
    Step,
    listed,
    made_as_returned,
    made_by,
    merge_casts,
    needed,
    placed,
    roots_of,
    slots_of,
    views_late,
    views_of,
)
from nsa_torch.shared import SHARED

ROW = 3  # launches that become one step; of fewer a graph would save the host little


class Program:
    """The steps of a call in order, and which tensors they leave.

    Args:
      count: tensors of the call, numbers `0 .. count - 1`.
      slots: numbers there are.
      constants: what no step makes. They are asked for at each call: they may have been dropped,
        and a stream or a CUDA graph that did not make them has to be told.
      results: numbers of what it returns.
      released: numbers of tensors of the call that may be given back once they were read
        (`early_release`).
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        slots: int,
        constants: Sequence[Constants],
        steps: Sequence[Step],
        results: Sequence[int],
        released: Sequence[int] = (),
    ):
        self.device, self.constants, self.count = device, constants, count
        self.known = [number for each in constants for number in each.results]
        self.blank, self.nowhere = [None] * (slots - count), [0] * (slots - count)
        # Not the program: what is shared outlives it.
        self.key = object()
        made = {number: x for step in steps for number, x in made_by(step).items()}
        self.results, shapes = made_as_returned(steps, results, made)
        made |= shapes
        kept, dropped, _ = needed(steps, self.results)
        kept, _, tensors = needed(merge_casts(kept, self.results, count), self.results)
        self.recorded = views_late(kept)
        roots, all_roots = roots_of(dropped), roots_of(views_of(steps))
        seen = [
            [(all_roots if isinstance(step, Launch) else roots).get(x, x) for x in step.seen]
            for step in self.recorded
        ]
        last = {number: i for i, numbers in enumerate(seen) for number in numbers}
        places, self.bytes = placed(self.recorded, last, made.keys() - tensors, made)
        self.places = [*places.items()]
        drops = collections.defaultdict(list)
        for number, i in last.items():
            if number >= count and number not in self.results and number not in places:
                drops[i].append(number)
        read = {
            all_roots.get(x, x): i for i, step in enumerate(self.recorded) for x in step.seen
        }
        ends = collections.defaultdict(list)
        for number in {*released} & read.keys() - {all_roots.get(x, x) for x in self.results}:
            ends[read[number]].append(number)
        small = {*self.known, *(x for x, array in made.items() if array.bytes <= SMALL_BYTES)}
        for step in self.recorded:
            if isinstance(step, MergedCasts) and step.bytes <= SMALL_BYTES:
                small.update(step.results)
        self.steps = []
        row: list[_BoundLaunch] = []
        for i, (step, numbers) in enumerate(zip(self.recorded, seen, strict=True)):
            if isinstance(step, Launch):
                allocated = [(x, made[x]) for x in step.made if x not in places]
                row.append(_BoundLaunch.of(step.kernel, numbers, allocated, drops[i], device))
                if small.issuperset(drops[i]) and i not in ends:
                    continue
            self.steps += _in_a_row(row)
            row = []
            if isinstance(step, Call):
                self.steps.append(_BoundCall(step, drops[i]))
            elif isinstance(step, MergedCasts):
                self.steps.append(_BoundTogether(step, drops[i], device))
            if i in ends:
                self.steps.append(_Release(ends[i]))
        self.steps += _in_a_row(row)

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
    """Launches of one or more kernels, one after the other, on a device.

    Args:
      kernels: for `_in_a_row`, with `arguments`: the numbers of inputs and outputs of each.
      start: queues all; takes the addresses of `numbers`.
      allocated: what they make that has memory of its own.
      drops: what no later step has to do with.
    """

    __slots__ = ("addresses", "allocated", "arguments", "device", "drops", "kernels", "start")

    def __init__(self, kernels, arguments, start, numbers, allocated, drops, device):
        self.kernels, self.arguments, self.start = kernels, arguments, start
        self.addresses = operator.itemgetter(*numbers)
        self.allocated, self.drops, self.device = allocated, drops, device

    @classmethod
    def of(cls, kernel, numbers, allocated, drops, device) -> "_BoundLaunch":
        """One launch."""
        start = launch.launcher(kernel, device)
        return cls([kernel], [numbers], start, numbers, allocated, drops, device)

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        for number, (shape, dtype) in self.allocated:
            x = tensors[number] = torch.empty(shape, dtype=dtype, device=self.device)
            addresses[number] = x.data_ptr()
        self.start(stream, self.addresses(addresses))
        for number in self.drops:
            tensors[number] = None


def _in_a_row(launches: list[_BoundLaunch]) -> list[_BoundLaunch]:
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
    if start is None:
        return launches
    numbers = [*place]
    return [_BoundLaunch(kernels, arguments, start, numbers, allocated, drops, device)]


class _BoundCall:
    """`Call` with what is left to fill in."""

    __slots__ = ("args", "at", "drops", "function", "options", "result", "results")

    def __init__(self, call: Call, drops):
        # An overload's own call is nothing but this one.
        self.function = getattr(call.function, "_op", call.function)
        self.args, self.options = call.args, call.options
        self.results, self.drops = call.results, drops
        self.result = call.results[0] if len(call.results) == 1 else None
        flat = all(not slots_of(x) for x in call.args if not isinstance(x, Slot))
        self.at = None
        if flat and not slots_of(call.options):
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


class _BoundTogether:
    """`MergedCasts` on a device."""

    __slots__ = ("device", "drops", "results", "step")

    def __init__(self, step: MergedCasts, drops, device):
        self.step, self.drops, self.device = step, drops, device
        self.results = [(x, i * step.bytes) for i, x in enumerate(step.results)]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        step = self.step
        found = torch.empty(step.shape, dtype=step.dtype, device=self.device)
        found.copy_(torch.as_strided(tensors[step.first], step.shape, step.strides))
        start = found.data_ptr()
        for number, offset in self.results:
            tensors[number] = found
            addresses[number] = start + offset
        for number in self.drops:
            tensors[number] = None


@dataclasses.dataclass(frozen=True)
class _Release:
    """Gives back memory of tensors of the call, where that is allowed."""

    numbers: Sequence[int]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        early_release.release([tensors[number] for number in self.numbers])


def _filled(x: Any, tensors: Sequence[Any]) -> Any:
    """`x` with tensors in place of slots."""
    if isinstance(x, Slot):
        return tensors[x.number]
    if isinstance(x, list | tuple):
        return type(x)(_filled(each, tensors) for each in x)
    if isinstance(x, dict):
        return {name: _filled(each, tensors) for name, each in x.items()}
    return x

"""The steps of a recorded call, bound so that they cost the host little: see `replay`.

A launch reads and writes addresses. So a result of a kernel that only kernels read needs no
tensor: it lies in one allocation of the whole call, in which lifetimes decide who follows whom.
What starts where another tensor starts (a view, a reshape that copies nothing) is that address.
"""

import collections
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interop import launch
from nsa_torch.program_steps import (
    Call,
    Constants,
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
)
from nsa_torch.shared import SHARED


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
        made = {number: x for step in steps for number, x in made_by(step).items()}
        self.results, shapes = made_as_returned(steps, results, made)
        made |= shapes
        kept, dropped, _ = needed(steps, self.results)
        self.recorded, _, tensors = needed(merge_casts(kept, self.results, count), self.results)
        roots = roots_of(dropped)
        seen = [[roots.get(x, x) for x in step.seen] for step in self.recorded]
        last = {number: i for i, numbers in enumerate(seen) for number in numbers}
        places, self.bytes = placed(self.recorded, last, made.keys() - tensors, made)
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
    """`MergedCasts` with what is left to fill in."""

    __slots__ = ("args", "drops", "first", "function", "layout", "options", "results")

    def __init__(self, step: MergedCasts, drops):
        self.function = getattr(step.function, "_op", step.function)
        self.args, self.options, self.drops = step.args, step.options, drops
        self.first, self.layout = step.first, (step.shape, step.strides)
        self.results = [(x, i * step.bytes) for i, x in enumerate(step.results)]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        whole = torch.as_strided(tensors[self.first], *self.layout)
        found = self.function(whole, *self.args, **self.options)
        start = found.data_ptr()
        for number, offset in self.results:
            tensors[number] = found
            addresses[number] = start + offset
        for number in self.drops:
            tensors[number] = None


def _bound(step: Step, numbers, drops, places, made, device):
    """`step` for calls; `numbers`: its tensors, views replaced by what they are views of."""
    if isinstance(step, Call):
        return _BoundCall(step, drops)
    if isinstance(step, MergedCasts):
        return _BoundTogether(step, drops)
    allocated = [(x, made[x]) for x in step.made if x not in places]
    start = launch.launcher(step.kernel, device)
    return _BoundLaunch(start, numbers, allocated, drops, device)


def _filled(x: Any, tensors: Sequence[Any]) -> Any:
    """`x` with tensors in place of slots."""
    if isinstance(x, Slot):
        return tensors[x.number]
    if isinstance(x, list | tuple):
        return type(x)(_filled(each, tensors) for each in x)
    if isinstance(x, dict):
        return {name: _filled(each, tensors) for name, each in x.items()}
    return x

"""What a recorded call did (`nsa_torch.replay`), and what of it is left to do when it is run again
by addresses (`nsa_torch.program`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.kernel import Kernel
from nsa_interop import launch

# At most, of results of kernels that only kernels read; what does not fit is allocated by itself
# and given back as soon as it has been read.
WORKSPACE_BYTES = 64 * 2**20
# Of a tensor that may be allocated early or kept late, so that launches stay in one row.
SMALL_BYTES = 8 * 2**20


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


class Part(NamedTuple):
    """Where a tensor lies that is part of a larger one, in elements.

    Attributes:
      storage: which memory, as a number.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Call(NamedTuple):
    """One call of an operator of torch, or of any function of tensors.

    Attributes:
      args, options: with slots in place of tensors.
      results: numbers; None where it returns no tensor.
      starts: of results that are views of a tensor from its start, the number of that tensor.
      arrays: what results are, where they are contiguous.
      writes: whether it writes to a tensor it was given.
      part: what its only tensor is, where that is not contiguous.
    """

    function: Callable[..., Any]
    args: Any
    options: Mapping[str, Any]
    results: Sequence[int | None]
    starts: Mapping[int, int]
    arrays: Mapping[int, Array]
    writes: bool = False
    part: Part | None = None

    @property
    def reads(self) -> Sequence[int]:
        return slots_of((self.args, self.options))

    @property
    def seen(self) -> Sequence[int]:
        return [*self.reads, *(x for x in self.results if x is not None)]

    @property
    def is_view(self) -> bool:
        """Whether all that it returns are views."""
        return len(self.starts) == len(self.results)


class MergedCasts(NamedTuple):
    """Casts of several parts of one tensor, which only launches read, in one copy.

    Attributes:
      first: number of a tensor that starts where the first part does.
      shape, strides: of all parts as one tensor, from that one's start.
      dtype: of the results, which are contiguous.
      results: numbers, in the order of memory.
      bytes: of each result.
    """

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    results: Sequence[int]
    bytes: int

    @property
    def seen(self) -> Sequence[int]:
        return self.first, *self.results


type Step = Launch | Call | MergedCasts


class Constants(NamedTuple):
    """Tensors that follow from sizes alone, and how to come by them."""

    get: Callable[[], Iterable[Tensor]]
    results: Sequence[int]


def made_by(step: Step) -> Mapping[int, Array]:
    return step.made if isinstance(step, Launch) else {}


def made_as_returned(
    steps: Sequence[Step], results: Sequence[int], made: Mapping[int, Array]
) -> tuple[list[int], dict[int, Array]]:
    """Numbers of the results where none is a view of what a kernel made, as far as that can be,
    and in which shape the kernel makes those instead.
    """
    views = views_of(steps)
    roots = roots_of(views)
    arrays = {number: x for step in views for number, x in step.arrays.items()}
    shapes: dict[int, Array] = {}
    final = list(results)
    for i, number in enumerate(results):
        root, array = roots.get(number, number), arrays.get(number)
        if array is None or root not in made or root in final:
            continue
        others = [*final[:i], *final[i + 1 :]]
        *_, tensors = needed(steps, others)
        if array.dtype == made[root].dtype and array.bytes == made[root].bytes:
            if number not in others and root not in tensors:
                final[i], shapes[root] = root, array
    return final, shapes


def needed(
    steps: Sequence[Step], results: Sequence[int]
) -> tuple[list[Step], list[Call], set[int]]:
    """The steps without views that only launches read, these views, and which numbers
    must be tensors.
    """
    kept, dropped, tensors, seen = [], [], set(results), set(results)
    for step in reversed(steps):
        if isinstance(step, Call):
            if step.is_view and tensors.isdisjoint(step.results):
                dropped.append(step)
                continue
            if getattr(step.function, "is_view", False) and seen.isdisjoint(step.results):
                continue
            tensors.update(step.seen)
        elif isinstance(step, MergedCasts):
            tensors.add(step.first)
        seen.update(step.seen)
        kept.append(step)
    return kept[::-1], dropped[::-1], tensors


CASTS = ("aten::_to_copy", "aten::to")


def merge_casts(steps: Sequence[Step], results: Sequence[int], count: int) -> list[Step]:
    """The steps with one cast in place of those of several parts of one tensor, at equal distances
    in its memory: gates, as a rule. Small ones of tensors of the call, which are `count`, come
    first, so that launches stay together.
    """
    calls = [step for step in steps if isinstance(step, Call)]
    starts = {number: start for call in calls for number, start in call.starts.items()}
    read = {*results, *(number for call in calls for number in call.reads)}
    groups: dict[Any, dict[int, tuple[int, Call]]] = {}
    for i, call in enumerate(steps):
        if not isinstance(call, Call) or call.part is None or call.is_view:
            continue
        name = getattr(getattr(call.function, "_schema", None), "name", "")
        rest = *call.args[1:], *call.options.items()
        contiguous = torch.contiguous_format in (*call.args[1:], *call.options.values())
        if name in CASTS and contiguous and read.isdisjoint(call.results):
            storage, offset, *layout = call.part
            group = groups.setdefault((call.function, rest, storage, *layout), {})
            group[offset] = i, call
    found: list[Any] = list(steps)
    early: list[Step] = []
    for group in groups.values():
        offsets = sorted(group)
        distances = {b - a for a, b in itertools.pairwise(offsets)}
        places, members = zip(*(group[offset] for offset in offsets), strict=True)
        first = min(places)
        there = {*range(count), *(x for step in steps[:first] for x in step.seen)}
        array = members[0].arrays.get(members[0].results[0])
        if len(distances) != 1 or array is None or array.bytes % launch.ALIGNMENT:
            continue
        if any(call.writes for call in calls) or not there.issuperset(
            x for call in members for x in call.reads
        ):
            continue
        _, _, shape, strides = members[0].part
        for place in places:
            found[place] = None
        start = starts.get(members[0].reads[0], members[0].reads[0])
        merged = MergedCasts(
            start,
            (len(members), *shape),
            (*distances, *strides),
            array.dtype,
            [call.results[0] for call in members],
            array.bytes,
        )
        if start < count and array.bytes * len(members) <= SMALL_BYTES:
            early.append(merged)
        else:
            found[first] = merged
    return early + [step for step in found if step is not None]


def views_of(steps: Iterable[Step]) -> list[Call]:
    return [step for step in steps if isinstance(step, Call) and step.is_view]


def views_late(steps: Iterable[Step]) -> list[Step]:
    """The steps, with views right before the first call that reads them: launches, which read
    addresses, stay together.
    """
    waiting: list[Call] = []
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Call) and step.is_view:
            waiting.append(step)
            continue
        if not isinstance(step, Launch):
            wanted = set(step.seen)
            for view in reversed(waiting):
                if not wanted.isdisjoint(view.results):
                    wanted.update(view.reads)
            found += [view for view in waiting if not wanted.isdisjoint(view.results)]
            waiting = [view for view in waiting if wanted.isdisjoint(view.results)]
        found.append(step)
    return found + waiting


def roots_of(calls: Iterable[Call]) -> dict[int, int]:
    """Of the results of calls that return views, in order, which tensor they are views of."""
    roots: dict[int, int] = {}
    for call in calls:
        for number, start in call.starts.items():
            roots[number] = roots.get(start, start)
    return roots


def placed(
    steps: Sequence[Step], last: Mapping[int, int], free: Iterable[int], made
) -> tuple[dict[int, int], int]:
    """Where the results `free` lie in the workspace, and its size; `last`: by number, the index
    of the last step that has to do with it.
    """
    free, places, size = set(free), {}, 0
    taken: dict[int, tuple[int, int]] = {}  # by number: from, to
    for i, step in enumerate(steps):
        taken = {number: x for number, x in taken.items() if last[number] >= i}
        for number in made_by(step).keys() & free:
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


def slots_of(x: Any) -> list[int]:
    if isinstance(x, Slot):
        return [x.number]
    if isinstance(x, dict):
        x = [*x.values()]
    return [n for each in x for n in slots_of(each)] if isinstance(x, list | tuple) else []


def listed(x: Any) -> list[Any]:
    """What a function returns, as a list."""
    return list(x) if isinstance(x, list | tuple) else [x]

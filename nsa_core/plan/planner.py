"""Traces steps into a plan. `PlanOps` is the `ArrayOps` that records the operations of the
steps."""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from kernels_pallas.kernel import ALIGNMENT, Array, Kernel, float32, int32
from nsa_core.array_ops import ArrayOps, Slices, derived, like
from nsa_core.plan.buffers import (
    BYTES,
    Buffer,
    Derived,
    Join,
    Launch,
    Memory,
    Plan,
    View,
    by_address,
    touched_by_torch,
)

# A derived step whose results have fewer bytes than this runs before the first launch, so that
# launches stay adjacent.
SMALL_BYTES = 4 * 2**20

# In the time that the host needs for a step of torch, about 10 us, launches read and write this
# number of bytes.
BUSY_BYTES = 32 * 2**20

# Minimum size in bytes of an argument that is released. A release interrupts a sequence of
# launches, which costs the host another launch.
LEAST_RELEASED = 64 * 2**20


class PlanOps(ArrayOps):
    """Records kernels and derived steps on `View`s. Equal derived steps on the same buffers run
    once. The results of a step that reads only constants, or nothing, are constants. If a step
    also reads the shared argument, its results are batch buffers.

    Args:
      capability: The compute capability of the GPU.
    """

    has_streams = True

    def __init__(self, capability: tuple[int, int]):
        self._capability = capability
        self._buffers: list[Buffer] = []
        self._constants: list[Derived] = []
        self._batch: list[Derived] = []
        self._shared: int | None = None
        self._steps: list[Any] = []
        self._released: set[int] = set()
        self._known: dict[Hashable, tuple[View, ...]] = {}
        # the number of times that each buffer was overwritten
        self._written: dict[int, int] = {}
        # arrays that have no other reference, and may therefore be overwritten
        self._own: set[int] = set()

    def _refused(self, *arguments, **options):
        raise TypeError(
            "a step must not compute with arrays, except inside of nsa_core.array_ops.derived"
        )

    arange = cast = contiguous = take_rows = searchsorted = sort = pad_end = _refused

    # The operations that steps use

    def run(self, kernel, *arrays):
        if isinstance(kernel, Kernel):
            _check(kernel, arrays)
        reads, writes = list(arrays), []
        outputs = list(kernel.outputs)
        over = getattr(kernel, "in_place", 0)
        for i in range(len(reads) - over, len(reads)):
            reads[i] = self._writable(reads[i])
            writes.append(reads[i]._replace(shape=outputs.pop(0).shape))
            self._write_over(reads[i])
        writes += [self._new(x, own=True) for x in outputs]
        self._steps.append(Launch(kernel, tuple(reads), tuple(writes)))
        return writes

    def run_beside(self, kernel, *arrays):
        writes, number = self.run(kernel, *arrays), len(self._steps)
        self._steps[-1] = step = self._steps[-1]._replace(beside=number)
        return writes, Join(number, step.reads, step.writes)

    def join(self, running):
        self._steps.append(running)

    def run_together(self, kernel, *arrays):
        _check(kernel, arrays)
        first, count = kernel.outputs[0], len(kernel.outputs)
        length = _row_length(first.shape, first.dtype)
        rows = self._new(Array((count, length), first.dtype), own=True)
        writes = _rows_in(rows, first.shape)
        self._steps.append(Launch(kernel, tuple(arrays), writes))
        return writes

    def derive(self, function, *arrays, **static):
        versions = tuple([self._written.get(x.buffer, 0) for x in arrays])
        key = function, tuple(sorted(static.items())), arrays, versions
        if key not in self._known:
            memory = self._memory_of_derived(arrays)
            self._known[key] = self._derived(*key[:3], memory)
        return self._known[key]

    def _derived(self, function, named, arrays, memory, own=False) -> tuple[View, ...]:
        found = function.shapes(*arrays, **dict(named))
        writes = tuple([self._new(x, memory, own) for x in found])
        made_once = {Memory.CONSTANT: self._constants, Memory.BATCH: self._batch}
        steps = made_once.get(memory, self._steps)
        steps.append(Derived(function, named, arrays, writes))
        return writes

    def _made(self, function, *arrays, **static) -> View:
        """Run `function` and return a new array with its own memory. Later steps may overwrite
        the new array."""
        named = tuple(sorted(static.items()))
        return self._derived(function, named, arrays, Memory.ALONE, own=True)[0]

    def _memory_of_derived(self, arrays) -> Memory:
        """Return the kind of memory of an array that depends only on `arrays`."""
        found = Memory.CONSTANT
        for x in arrays:
            memory = self._buffers[x.buffer].memory
            if memory is Memory.BATCH or x.buffer == self._shared:
                found = Memory.BATCH
            elif memory is not Memory.CONSTANT:
                return Memory.ALONE
        return found

    def part(self, x, index):
        found = _view_at(x, index)
        if found is not None:
            return found
        return self.derive(_cut, x, index=index)[0]

    def write(self, x, index, part):
        there = _view_at(x, index)
        if there is not None and there[:2] == part[:2] and there.bytes == part.bytes:
            return x  # the kernel has written the result in place
        x = self._writable(x)
        self._steps.append(Derived(_assign, (("index", index),), (x, part), (x,)))
        self._write_over(x)
        return x

    def zeros(self, like, shape):
        return self._made(_zeros, like, shape=shape)

    def copied(self, x, dtype):
        if str(dtype) == x.dtype:
            # `plan` ensures that no result shares memory with another result, an argument or a
            # constant
            return x
        return self._made(_copied, x, dtype=str(dtype))

    def side_by_side(self, arrays):
        return arrays[0] if len(arrays) == 1 else self.derive(_side_by_side, *arrays)[0]

    def extend(self, x, axis, length, fill=None):
        if x.shape[axis] >= length:
            return x
        return self.derive(_extended, x, axis=axis, length=length, fill=fill)[0]

    def to_int32(self, x):
        return x if x.dtype == "int32" else self.derive(_int32, x)[0]

    def to_float32(self, x):
        return x if x.dtype == "float32" else self.derive(_all_float32, x)[0]

    def all_float32(self, arrays):
        if all(x.dtype == "float32" for x in arrays):
            # Arguments may have any layout. If they must be copied, they are copied together.
            given = [self._buffers[x.buffer].memory is Memory.ARGUMENT for x in arrays]
            return self.derive(_all_float32, *arrays) if any(given) else arrays
        if any(self._buffers[x.buffer].memory is not Memory.ARGUMENT for x in arrays):
            return arrays  # each array is cast when a step reads it (`to_float32`)
        return self._rows_of(_float32_rows, arrays, arrays[0].shape)

    def unstacked_float32(self, x):
        return self._rows_of(_unstacked_rows, [x], x.shape[:-1])

    def _rows_of(self, function, arrays, shape):
        (rows,) = self.derive(function, *arrays, length=_row_length(shape, "float32"))
        return _rows_in(rows, shape)

    def stacked(self, arrays, dtype):
        first = arrays[0]
        length = _row_length(first.shape, first.dtype)
        rows = View(first.buffer, 0, (len(arrays), length), first.dtype)
        name = str(dtype).removeprefix("torch.")
        if [*arrays] == [*_rows_in(rows, first.shape)]:
            return self._made(_stacked_rows, rows, dtype=name, shape=first.shape)
        return self._made(_stacked, *arrays, dtype=name)

    def capability(self, x):
        return self._capability

    def per_batch(self, x):
        if self._shared not in (None, x.buffer):
            raise ValueError(
                "a plan must have at most one argument that many calls share (per_batch)"
            )
        self._shared = x.buffer
        return x

    def release(self, arrays):
        large = (x.buffer for x in arrays if x.bytes >= LEAST_RELEASED)
        self._released |= {n for n in large if self._buffers[n].memory is Memory.ARGUMENT}

    # Buffers

    def argument(self, shape: Sequence[int], dtype: str) -> View:
        """Declare an array that the caller passes. All arguments must be declared before the
        first step.
        """
        return self._new(Array(tuple(shape), dtype), Memory.ARGUMENT)

    def _new(self, array, memory=Memory.ALONE, own=False) -> View:
        number = len(self._buffers)
        self._buffers.append(Buffer(array.shape, array.dtype, memory))
        if own:
            self._own.add(number)
        return View(number, 0, array.shape, array.dtype)

    def _writable(self, x: View) -> View:
        return x if x.buffer in self._own else self._copy(x)

    def _copy(self, x: View) -> View:
        return self._made(_copied, x, dtype=x.dtype)

    def _write_over(self, x: View) -> None:
        self._written[x.buffer] = self._written.get(x.buffer, 0) + 1

    # The plan

    def plan(self, results: Iterable[View]) -> Plan:
        """Return the plan of the recorded steps on which `results` depend."""
        final = self._apart(results)
        kept = {x.buffer for x in final}
        steps = self._in_order(_needed(self._steps, kept))
        read = {x.buffer for step in steps for x in step.reads}
        batch = _needed(self._batch, read)
        read |= {x.buffer for step in batch for x in step.reads}
        constants = _needed(self._constants, read)
        touched = [{x.buffer for x in (*step.reads, *step.writes)} for step in steps]
        first = {n: i for i, each in reversed([*enumerate(touched)]) for n in each}
        last = {n: i for i, each in enumerate(touched) for n in each}
        workspace_bytes = self._fill_workspace(steps, first, last, kept)
        begins: list[list[int]] = [[] for _ in steps]
        ends: list[list[int]] = [[] for _ in steps]
        for n in first:
            memory = self._buffers[n].memory
            if memory is Memory.ALONE:
                begins[first[n]].append(n)
            # Arguments are included, since an argument with another layout was copied.
            if memory in (Memory.ALONE, Memory.ARGUMENT) and n not in kept:
                ends[last[n]].append(n)
        return Plan(
            len([x for x in self._buffers if x.memory is Memory.ARGUMENT]),
            tuple(self._buffers),
            tuple(constants),
            tuple(batch),
            self._shared if batch else None,
            tuple(steps),
            tuple(final),
            workspace_bytes,
            tuple(map(tuple, begins)),
            tuple(map(tuple, ends)),
            frozenset(self._released),
        )

    def _apart(self, results: Iterable[View]) -> list[View]:
        """Return results that each have a whole buffer of their own. A result is copied if it is
        a part of a buffer or shares its buffer with another result. A result is also copied if
        its buffer must not be overwritten, such as an argument or a constant.
        """
        final: list[View] = []
        for x in results:
            whole = x.bytes == self._buffers[x.buffer].bytes
            taken = x.buffer in [y.buffer for y in final]
            if taken or not whole or x.buffer not in self._own:
                x = self._copy(x)
            final.append(x)
            self._buffers[x.buffer] = self._buffers[x.buffer]._replace(shape=x.shape)
        return final

    def _fill_workspace(self, steps, first, last, kept) -> int:
        """Place buffers that only kernels read and write in the workspace. Return the size of
        the workspace in bytes.
        """
        tensors, others, lives = kept | touched_by_torch(steps), [0] * len(steps), {}
        for n in sorted(first, key=first.__getitem__):
            if self._buffers[n].memory is Memory.ALONE:
                size, steps_of = self._buffers[n].bytes, range(first[n], last[n] + 1)
                if n not in tensors:
                    lives[n] = size, steps_of
                for i in range(first[n], len(steps)) if n in kept else steps_of:
                    others[i] += size * (n in tensors)
        offsets, size = workspace_offsets(lives, others)
        for n, offset in offsets.items():
            memory = {"memory": Memory.WORKSPACE, "offset": offset}
            self._buffers[n] = self._buffers[n]._replace(**memory)
        return size

    def _in_order(self, steps: list[Any]) -> list[Any]:
        """Move derived steps that depend only on arguments and constants, so that launches stay
        adjacent.

        A large result is computed right before its first read, or at the end if no step reads it.
        Small results are computed before the first launch. If the first launches read no small
        result and keep the device busy for longer than the host needs, small results are computed
        after these launches. Launches that need tensors are never adjacent to other launches.
        """
        if not any(map(by_address, steps)):
            return steps
        given = Memory.ARGUMENT, Memory.CONSTANT, Memory.BATCH
        ready = {n for n, x in enumerate(self._buffers) if x.memory in given}
        first, rest, waiting = [], [], dict[int, Any]()
        for step in steps:
            if isinstance(step, Derived) and ready.issuperset([x.buffer for x in step.reads]):
                made = {x.buffer for x in step.writes}
                if not self._written.keys() & made:
                    if sum(x.bytes for x in step.writes) < SMALL_BYTES:
                        ready |= made
                        first.append(step)
                    else:
                        waiting |= dict.fromkeys(made, step)
                    continue
            for found in [waiting.get(x.buffer) for x in step.reads]:
                if found is not None and found not in rest:
                    rest.append(found)
            rest.append(step)
        for step in waiting.values():
            if step not in rest:
                rest.append(step)
        made = {x.buffer for step in first for x in step.writes}
        reads_none = lambda step: made.isdisjoint([x.buffer for x in step.reads])
        before = [*itertools.takewhile(reads_none, rest)]
        moved = sum([x.bytes for step in before for x in (*step.reads, *step.writes)])
        at = len(before) if moved >= BUSY_BYTES and all(map(by_address, before)) else 0
        return rest[:at] + first + rest[at:]


def _check(kernel: Kernel, arrays: Sequence[View]) -> None:
    got = [(math.prod(x.shape), x.dtype) for x in arrays]
    wanted = [(math.prod(x.shape), x.dtype) for x in kernel.inputs]
    if got != wanted:
        raise ValueError(
            f"the inputs of {kernel.name} must have the elements {wanted}, got {got}"
        )


def _needed(steps: Sequence[Any], wanted: set[int]) -> list[Any]:
    """Return the steps on which the buffers `wanted` depend."""
    wanted, kept = set(wanted), []
    for step in reversed(steps):
        if not wanted.isdisjoint([x.buffer for x in step.writes]):
            wanted.update([x.buffer for x in step.reads])
            kept.append(step)
    return kept[::-1]


def _view_at(x: View, index: Slices) -> View | None:
    """Return the view `x[index]` if it is stored in row-major order and kernels can read it,
    otherwise None."""
    bounds, shape = _cut_to(x, index)
    cut = [i for i, size in enumerate(x.shape) if shape[i] != size]
    start = sum(at * math.prod(x.shape[i + 1 :]) for i, (at, _) in enumerate(bounds))
    offset = x.offset + start * BYTES[x.dtype]
    rows = not cut or math.prod(shape[: cut[-1]]) == 1
    return (
        View(x.buffer, offset, tuple(shape), x.dtype)
        if rows and offset % ALIGNMENT == 0
        else None
    )


def _row_length(shape: Sequence[int], dtype: str) -> int:
    """Return the length of a buffer's rows if each row begins with an array of the given shape."""
    size = BYTES[dtype]
    return -(-math.prod(shape) * size // ALIGNMENT) * ALIGNMENT // size


def _rows_in(rows: View, shape: Sequence[int]) -> tuple[View, ...]:
    """Return arrays of one shape, each at the start of a row of a buffer `[count, length]`."""
    count, length = rows.shape
    row = length * BYTES[rows.dtype]
    return tuple(View(rows.buffer, i * row, tuple(shape), rows.dtype) for i in range(count))


# Derived steps


def _cut_to(x, index: Slices) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the begin and the end of each slice of `x[index]`, and the shape of `x[index]`."""
    bounds = [each.indices(size)[:2] for each, size in zip(index, x.shape, strict=False)]
    return bounds, [end - start for start, end in bounds] + [*x.shape[len(bounds) :]]


@derived(lambda x, *, index: [like(x, *_cut_to(x, index)[1])])
def _cut(ops, x, *, index):
    return [x[index]]


def _assign(ops, x, part, *, index):
    x[index] = part
    return []


@derived(lambda like, *, shape: [Array(shape, like.dtype)])
def _zeros(ops, like, *, shape):
    return [ops.zeros(like, shape)]


@derived(lambda x, *, dtype: [Array(x.shape, dtype)])
def _copied(ops, x, *, dtype):
    return [ops.copied(x, getattr(ops.xp, dtype))]


@derived(
    lambda *arrays: [like(arrays[0], sum(x.shape[0] for x in arrays), *arrays[0].shape[1:])]
)
def _side_by_side(ops, *arrays):
    return [ops.side_by_side(arrays)]


@derived(
    lambda x, *, axis, length, fill: [like(x, *x.shape[:axis], length, *x.shape[axis + 1 :])]
)
def _extended(ops, x, *, axis, length, fill):
    return [ops.extend(x, axis, length, fill)]


@derived(lambda x: [int32(*x.shape)])
def _int32(ops, x):
    return [ops.to_int32(x)]


@derived(lambda *arrays, length: [float32(len(arrays), length)])
def _float32_rows(ops, *arrays, length):
    return [ops.float32_rows(arrays, length)]


@derived(lambda x, *, length: [float32(x.shape[-1], length)])
def _unstacked_rows(ops, x, *, length):
    return [ops.float32_rows(ops.xp.moveaxis(x, -1, 0), length)]


@derived(lambda rows, *, dtype, shape: [Array((*shape, rows.shape[0]), dtype)])
def _stacked_rows(ops, rows, *, dtype, shape):
    arrays = rows[:, : math.prod(shape)].reshape(-1, *shape)
    return [ops.copied(ops.xp.moveaxis(arrays, 0, -1), getattr(ops.xp, dtype))]


@derived(lambda *arrays, dtype: [Array((*arrays[0].shape, len(arrays)), dtype)])
def _stacked(ops, *arrays, dtype):
    return [ops.stacked(arrays, getattr(ops.xp, dtype))]


@derived(lambda *arrays: [float32(*x.shape) for x in arrays])
def _all_float32(ops, *arrays):
    return ops.all_float32(arrays)


# Offsets in one allocation for buffers that only kernels read and write, by their lifetimes

# Maximum size of the workspace. A buffer that does not fit has its own memory, which is freed
# after its last read.
MAX_BYTES = 64 * 2**20
# maximum size of the workspace if most of it would be unused at the peak of memory
FEW_BYTES = 16 * 2**20

# For each buffer: its bytes, and the range of steps from its first to its last use.
type Lives = Mapping[int, tuple[int, range]]


def workspace_offsets(lives: Lives, others: Sequence[int]) -> tuple[dict[int, int], int]:
    """Return the offset of each buffer in the workspace, and its total bytes.

    The workspace exists during the whole call. If less than half of the workspace would be in use
    at the peak of memory, a smaller workspace is used.

    Args:
      lives: Buffers in the order of their first steps.
      others: bytes outside the workspace at each step.
    """
    offsets, size = _offsets(lives, MAX_BYTES)
    if size > FEW_BYTES:
        alone, used = list(others), [0] * len(others)
        for number, (bytes, steps) in lives.items():
            for i in steps:
                (used if number in offsets else alone)[i] += bytes
        both = [a + b for a, b in zip(alone, used, strict=True)]
        if 2 * (size + max(alone) - max(both)) > size:
            return _offsets(lives, FEW_BYTES)
    return offsets, size


def _offsets(lives: Lives, most: int) -> tuple[dict[int, int], int]:
    """Place buffers within `most` bytes, the largest buffer first. Each buffer is placed at the
    first offset that is free during its lifetime.
    """
    places: dict[int, tuple[int, int]] = {}  # begin and end in bytes, by buffer
    for number in sorted(lives, key=lambda number: -lives[number][0]):
        bytes, steps = lives[number]
        size, offset = -(-bytes // ALIGNMENT) * ALIGNMENT, 0
        beside = [
            place
            for other, place in places.items()
            if lives[other][1].start < steps.stop and steps.start < lives[other][1].stop
        ]
        for start, end in sorted(beside):
            if offset + size <= start:
                break
            offset = max(offset, end)
        if offset + size <= most:
            places[number] = offset, offset + size
    offsets = {number: start for number, (start, _) in places.items()}
    return offsets, max((end for _, end in places.values()), default=0)

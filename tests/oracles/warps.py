"""Warp programs on NumPy: the instructions of `warp.py` for all warps of a grid at once.

A word is an array `[warps, 32]`, a value a lane. Pallas' interpreter has neither shuffles nor
votes, so where kernels are interpreted their warps run here (`kernels_pallas.mosaic.interpreter`,
`conftest.py`).

    shared memory   `memory` `[CTAs, words]`; the address of an array is its offset in bytes
    global memory   flat arrays of 32-bit words; an address is `(array, index)`
    loops           as many turns as the longest warp takes; `active` `[warps, 1]` says which
                    warps still run: the others keep their state and write nothing

An address outside an array raises `IndexError`. What this cannot tell: races between lanes,
and whether the GPU's instructions do what `warp.py` says (the tests marked `gpu`). `>>` fills
with the sign here.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

LANES = np.arange(32, dtype=np.int32)
GARBAGE = -77  # what memory holds before it is written
CTAS = 256  # that run at once: bounds the memory of an emulation


class Warps:
    """The instructions for warps whose words have the shape `shape`, `[warps, 32]` or `[32]`.

    Attributes:
      warp_in_cta: the number of each warp, `[warps, 1]`.
      memory: shared memory, `[CTAs, words]`, and the CTA of each warp.
    """

    def __init__(self, ctas: int, warps: int, shared_bytes: int):
        self.shape = (ctas * warps, 32)
        self.active = np.ones((ctas * warps, 1), bool)
        self.warp_in_cta = np.tile(np.arange(warps, dtype=np.int32), ctas)[:, None]
        self.cta = np.repeat(np.arange(ctas, dtype=np.int32), warps)[:, None]
        self.memory = np.full((ctas, shared_bytes // 4), GARBAGE, np.int32)

    def word(self, x: Any) -> np.ndarray:
        if not isinstance(x, np.ndarray):
            x = np.float32(x) if isinstance(x, float) else np.int32(x)
        return np.broadcast_to(x, self.shape)

    # Instructions on the words of a lane.

    def same(self, a, b):
        return self.word(a) == self.word(b)

    def different(self, a, b):
        return self.word(a) != self.word(b)

    def below(self, x, count):
        return (self.word(x) >= 0) & (self.word(x) < self.word(count))

    def where(self, condition, a, b):
        return np.where(condition, self.word(a), self.word(b))

    def smaller(self, a, b):
        return np.minimum(self.word(a), self.word(b))

    def larger(self, a, b):
        return np.maximum(self.word(a), self.word(b))

    def number(self, condition):
        return condition.astype(np.int32)

    def bit(self, place):
        return np.left_shift(np.int32(1), self.word(place))

    def ones(self, x):
        return np.bitwise_count(np.ascontiguousarray(x).view(np.uint32)).astype(np.int32)

    def bits(self, x):
        return np.ascontiguousarray(x).view(np.int32)

    def real(self, x):
        return np.ascontiguousarray(x).view(np.float32)

    def size(self, x):
        return np.abs(x)

    def floating(self, x):
        return x.astype(np.float32)

    def log2(self, x):
        with np.errstate(divide="ignore"):
            return np.log2(x)

    def pack(self, low, high, dtype):
        pair = np.stack([self.word(low), self.word(high)], -1).astype(ml_dtype(dtype))
        return pair.view(np.int32)[..., 0]

    def unpack(self, x, dtype):
        pair = np.ascontiguousarray(self.word(x))[..., None].view(ml_dtype(dtype))
        return [pair[..., half].astype(np.float32) for half in range(2)]

    def divided(self, a, b):
        return self.word(a) / self.word(b)

    def codes(self, x):
        four = np.stack([np.clip(self.word(y), -448, 448) for y in x], -1)
        return np.ascontiguousarray(four.astype(ml_dtypes.float8_e4m3fn)).view(np.int32)[..., 0]

    def integer(self, x: float) -> int:
        return np.float32(x).view(np.int32).item()

    # Between the lanes of a warp.

    def lane(self):
        return self.word(LANES)

    def warp(self):
        return self.word(self.warp_in_cta)

    warp_of_cta = warp

    def exchange(self, x, distance):
        return self.word(x)[..., LANES ^ distance]

    def shuffle(self, x, source):
        return np.take_along_axis(self.word(x), self.word(source), axis=-1)

    def largest(self, x):
        return self.word(self.word(x).max(axis=-1, keepdims=True))

    def smallest(self, x):
        return self.word(self.word(x).min(axis=-1, keepdims=True))

    def votes(self, condition):
        lanes = np.where(condition, np.uint32(1) << LANES.astype(np.uint32), np.uint32(0))
        return self.word(lanes.sum(axis=-1, keepdims=True, dtype=np.uint32).view(np.int32))

    def first_equal(self, a, b):
        equal = self.word(a) == self.word(b)
        return self.word(np.argmax(equal, axis=-1, keepdims=True).astype(np.int32))

    def sync(self):
        pass

    # Memory.

    def shared(self, ref):
        return self.word(ref)

    def read(self, address, offset=0):
        return self.memory[self._shared(address, offset)]

    def write(self, address, x, offset=0, only=True):
        self._store(self.memory, self._shared(address, offset, only), x, only)

    def join(self, address, x, only):
        only = self._here(only)
        at = (np.broadcast_to(i, self.shape)[only] for i in self._shared(address, 0, only))
        np.bitwise_or.at(self.memory, tuple(at), self.word(x)[only])

    def write_pair(self, address, x, y, offset=0):
        assert not (self.word(address) + offset & 7).any()
        self.write(address, self.bits(x), offset)
        self.write(address, self.bits(y), offset + 4)

    def element(self, ref, *places):
        index = self.word(0)
        for i, size in places:
            index = index + self.word(i) * (size // 4)
        return ref.reshape(-1).view(np.int32), index

    def fetch(self, address, offset=0):
        array, index = address
        return array[self._inside(index + offset // 4, array.size, True)]

    def fetch_int(self, array, index):
        return self.fetch(self.element(array, (index, 4)))

    def prefetch(self, address):
        pass

    def put(self, address, x, only):
        array, index = address
        self._store(array, (self._inside(index, array.size, only),), x, only)

    def put_several(self, address, values, only):
        array, index = address
        assert not (index % len(values))[self._here(only)].any()
        for i, x in enumerate(values):
            self.put((array, index + i), x, only)

    def fetch_several(self, address, count, only):
        array, index = address
        assert not (index % count)[self._here(only)].any()
        found = [array[self._inside(index + i, array.size, only)] for i in range(count)]
        return [np.where(only, x, 0) for x in found]

    def _here(self, only):
        """The lanes that do something."""
        return np.broadcast_to(only & self.active, self.shape)

    def _shared(self, address, offset, only=True):
        address = self.word(address) + offset
        assert not (address & 3).any()
        return self.cta, self._inside(address // 4, self.memory.shape[1], only)

    def _inside(self, index, size, only):
        """`index`, checked where it is used, and 0 elsewhere."""
        index = np.where(only & self.active, index, 0)
        if index.min() < 0 or index.max() >= size:
            raise IndexError(f"addresses must be from 0 to {size - 1}, got {index}")
        return index

    def _store(self, array, at, x, only):
        only = self._here(only)
        at = tuple(np.broadcast_to(i, self.shape)[only] for i in at)
        array[at] = self.word(x)[only]

    # Branches and loops.

    def when(self, condition, body):
        self._check_alike(condition)
        outer, self.active = self.active, self.active & condition[..., :1]
        try:
            if self.active.any():
                body()
        finally:
            self.active = outer

    def repeat(self, times, body, *state, unrolled=True):
        times, state = self.word(times), self._words(state)
        self._check_alike(times)
        outer, times = self.active, times[..., :1]
        try:
            for i in range(np.max(times, initial=0, where=outer)):
                self.active = outer & (i < times)
                found = body(self.word(i), *state)
                if len(state) < 2:
                    found = [found][: len(state)]
                state = self._where_active(found, state)
        finally:
            self.active = outer
        return state[0] if len(state) == 1 else state

    def _words(self, state):
        """The numbers in nested lists as words."""
        if isinstance(state, list | tuple):
            return [self._words(x) for x in state]
        return self.word(state)

    def _check_alike(self, x):
        if not (x == x[..., :1])[np.broadcast_to(self.active, self.shape)].all():
            raise ValueError("the lanes of a warp must take the same way: they would part")

    def _where_active(self, new, old):
        if self.active.all():
            return new
        if isinstance(new, np.ndarray):
            return np.where(self.active, new, old)
        return [self._where_active(x, y) for x, y in zip(new, old, strict=True)]


def ml_dtype(name: str) -> np.dtype:
    """The NumPy type of 16 bits with this name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def run(
    program: Callable[..., None],
    sizes: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    grid: Sequence[int],
    warps: int,
    shared: Sequence[tuple[int, ...]] = (),
    kv_heads: int | None = None,
    cluster: int | None = None,
) -> tuple[np.ndarray, ...]:
    """What a program writes that runs as `warp_kernel.warp_kernel` says.

    Args:
      program: what a warp does, on the instructions of `warp.py`.
      sizes: has the numbers of the kernel's sizes by name.
      inputs: arrays.
      outputs: `Array`s, garbage where the program does not write.
      grid: rows, and CTAs of a row.
      warps: of a CTA.
      shared: shapes of int32 arrays in shared memory.
      kv_heads: as `warp_kernel.warp_kernel`.
      cluster: CTAs of a cluster, for the instructions of `warp.py`; None: of `warp.py`.
    """
    machine: Callable[..., Warps] = Warps
    if cluster is not None:
        from tests.oracles.clusters import ClusterWarps

        machine = functools.partial(ClusterWarps, cluster=cluster)
    arrays = [np.ascontiguousarray(x) for x in inputs]
    found = tuple(np.full(x.shape, GARBAGE, x.dtype) for x in outputs)
    room = [4 * math.prod(shape) for shape in shared]
    offsets = [sum(room[:i]) for i in range(len(room))]
    ctas, of_row = math.prod(grid), grid[1]
    for first in range(0, ctas, CTAS):
        some = machine(min(CTAS, ctas - first), warps, sum(room))
        row, group = divmod(first + some.cta, np.int32(of_row))
        places = [row] if kv_heads is None else [*divmod(row, np.int32(kv_heads))]
        with np.errstate(all="ignore"):  # lanes whose results nobody wants
            program(some, sizes, *arrays, *found, *offsets, *map(some.word, [*places, group]))
    return found


def warpgroup(
    program: Callable[..., None], shared: Sequence[np.ndarray], arguments: Sequence[Any]
) -> list[np.ndarray]:
    """What a warpgroup leaves in these arrays in shared memory.

    `program(instructions, *shared, *arguments)`: scalars of `arguments` are words, arrays `[4, 32]`
    a value a lane, arrays of other shapes in global memory.
    """
    sizes = [x.nbytes for x in shared]
    machine = Warps(1, 4, sum(sizes))
    if shared:
        machine.memory[0] = np.concatenate([x.reshape(-1).view(np.int32) for x in shared])
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    words = [machine.word(x) if np.ndim(x) == 0 else x for x in arguments]
    with np.errstate(all="ignore"):
        program(machine, *offsets, *words)
    parts = np.split(machine.memory[0], [x // 4 for x in offsets[1:]])
    return [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, shared, strict=True)]

"""Rows that lanes copy, emulated: they lie where the copy engine would put them, and come back."""

from typing import Any

import numpy as np
import pytest

from kernels_pallas.mosaic.operands import Buffers
from kernels_pallas.mosaic.row_copies import RowCopies
from kernels_pallas.specs.tile import ROWS, Tile
from tests.oracles.warps import Warps

B, T, KV_HEADS, SLOTS = 2, 40, 3, 4
SLAB_BYTES = ROWS * 128


class Copying(Warps):
    """A warpgroup whose copies arrive at once."""

    def copy(self, to, address, to_offset, offset, only=True):
        for i in range(0, 16, 4):
            only = True if only is None else only
            self.write(to, self.fetch(address, offset + i), to_offset + i, only)

    def read_words(self, address, count, offset=0):
        return [self.read(address, offset + 4 * i) for i in range(count)]

    def put_words(self, address, words, only, offset=0):
        array, index = address
        for i, x in enumerate(words):
            self.put((array, index + (offset // 4 + i)), x, only)


class Emulated(RowCopies):
    """Operands are addresses in the memory of `machine`."""

    machine: Any

    def _call(self, function, refs, operands, numbers):
        words = [self.machine.word(x) for x in numbers]
        with np.errstate(all="ignore"):
            function(self.machine, *refs, *operands, *words)


class Operand:
    """Stands in for the views of scratch of which `.at[copy]` is an operand."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __getitem__(self, i):
        return self

    at = property(lambda self: {copy: self.first + copy * self.size for copy in range(2)})


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


def operand_of(memory, address, width):
    """An operand `[64, width]`: the 16 bytes `i` of row `r` of a slab stand at `i ^ r % 8`."""
    slabs = memory.view(np.int16)[address // 2 :][: ROWS * width].reshape(-1, ROWS, 8, 8)
    order = np.arange(8) ^ np.arange(ROWS)[:, None] % 8
    found = np.take_along_axis(slabs, order[None, :, :, None], 2)
    return found.reshape(-1, ROWS, 64).transpose(1, 0, 2).reshape(ROWS, width)


def copies_of(group, memory_bytes):
    buffers = Buffers(np.dtype("float16"), Tile(group, 64, group))
    copies = Emulated(buffers, group, KV_HEADS * SLOTS)
    copies.machine = Copying(1, 4, memory_bytes)
    return copies


def entries_of(tokens, kv_head):
    slot = np.arange(len(tokens)) % SLOTS
    return ((tokens * KV_HEADS + kv_head) * SLOTS + slot).astype(np.int32)


@pytest.mark.parametrize("first", [0, 3, 70])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_load(group, first):
    """Past the last entry comes that one again; rows of no head are left alone."""
    heads, kv_head, b = group * KV_HEADS, 1, 1
    query, do = numbers(B, T, heads, 128), numbers(B, T, heads, 64) + 1
    stats = np.arange(B * KV_HEADS * T * 8 * 4, dtype=np.float32).reshape(-1, T, 8, 4)
    stats = stats.reshape(B, KV_HEADS, T, 8, 4)
    tokens = np.random.default_rng(group).integers(0, T, 75)
    size = 3 * SLAB_BYTES
    copies = copies_of(group, 2 * size + 64 * 128)
    pairs = (query, (Operand(0, size), 1)), (do, (Operand(2 * SLAB_BYTES, size), 1))
    given = entries_of(tokens, kv_head), first, len(tokens), (b, kv_head, T), pairs
    copies.load(*given, (stats, np.int32(2 * size)))
    per_step = ROWS // group
    step = tokens[np.minimum(first + np.arange(per_step), len(tokens) - 1)]
    memory, used = copies.machine.memory[0], per_step * group
    own = slice(kv_head * group, (kv_head + 1) * group)
    for array, address in ((query, size), (do, size + 2 * SLAB_BYTES)):
        found = operand_of(memory, address, array.shape[-1])
        want = array[b, step, own].reshape(used, -1)
        np.testing.assert_array_equal(found[:used], want)
    found = memory[2 * size // 4 :].view(np.float32).reshape(-1, 8, 4)[:per_step, :group]
    np.testing.assert_array_equal(found, stats[b, kv_head, step, :group])


@pytest.mark.parametrize("first", [0, 70])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_store(group, first):
    """Columns of a slab, of the entries that are there."""
    segment_token, kv_head, b = 8, 2, 1
    tokens = np.random.default_rng(group).permutation(np.arange(segment_token, T).repeat(3))[
        :75
    ]
    entries = entries_of(tokens, kv_head)
    less = segment_token * KV_HEADS * SLOTS
    target = np.full((B, (T - segment_token) * KV_HEADS * SLOTS, group, 128), -1, np.int16)
    copies = copies_of(group, SLAB_BYTES)
    copies.machine.memory[0] = numbers(SLAB_BYTES // 2).view(np.int32)
    place = b, target.shape[1], less
    copies.store(entries, first, len(entries), place, target, (Operand(0, 0), 0, 64), 64)
    want = np.full_like(target, -1)
    rows = operand_of(copies.machine.memory[0], 0, 64)
    for i, entry in enumerate(entries[first : first + ROWS // group]):
        want[b, entry - less, :, 64:] = rows[i * group : (i + 1) * group]
    np.testing.assert_array_equal(target, want)

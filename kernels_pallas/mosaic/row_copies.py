"""Copies the rows of listed tokens between global and shared memory, by lanes of warps instead of
TMA. A lane copies 16 bytes at a time.

A multiprocessor needs 13 to 14 cycles to start a TMA copy, regardless of the copy's size. With few
heads per token, 64 rows need more TMA copies than can start during a step. A copy instruction
of a warp, with 16 bytes per lane, moves four rows of a slab.

Thread t copies the 16 bytes with index t % 8 of the rows t / 8, t / 8 + 16, .. of each slab.

The lanes write shared memory that wgmma reads. Each thread waits for its own copies of a step,
and then `commit_smem` makes the rows visible to wgmma. `operands.py` describes the layout of
rows in shared memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kernels_pallas.mosaic import interpreter, warp
from kernels_pallas.mosaic.operands import ROW_STATS, ROW_STATS_MIN_ROWS, ROWS, Buffers

BYTES = 16  # bytes that a lane moves per copy
NUMBER_BYTES = 2
SLAB = 64  # columns of a slab
SLAB_ROW_BYTES = SLAB * NUMBER_BYTES
SLAB_BYTES = ROWS * SLAB_ROW_BYTES
PARTS = SLAB_ROW_BYTES // BYTES  # number of copies per row of a slab
ROWS_AT_A_TIME = 128 // PARTS  # number of rows of a slab that a warpgroup copies at a time


class RowCopies(NamedTuple):
    """Copies between arrays and operands in shared memory. An operand has 64 rows, which are
    the heads of `64 // group` tokens.

    Attributes:
      buffers: The `Buffers` of the operands.
      group: Number of heads per token.
      divisor: An entry of the list is `token * divisor` plus a number less than `divisor`.
    """

    buffers: Buffers
    group: int
    divisor: int

    def load(self, entries, first, end, place, pairs, stats=()) -> None:
        """Start to copy the rows of the entries from `first` on into operands.

        The last entry before `end` replaces all entries from `end` on.

        Args:
          entries: The list, int32.
          first: Index of the first entry of the step.
          end: End of the entries.
          place: Batch row `b`, key/value head `kv_head` and length `T`.
          pairs: Pairs of an array `[B, T, H, width]` and the operand `(ref, copy)` that
            receives its rows.
          stats: The array `row_stats` for query tiles of single tokens, and the memory that
            receives the statistics.
        """
        sources, targets = zip(*pairs, strict=True)
        targets = [ref[0].at[copy] for ref, copy in targets]

        def load(warp, entries, *given):
            *arrays, first, end, b, kv_head, length = given
            count = len(targets)
            arrays, stats, operands = arrays[:count], arrays[count:-count], arrays[-count:]

            def token_of(row):
                index = warp.smaller(first + row // self.group, end - 1)
                return warp.fetch_int(entries, index) // self.divisor

            for row, shared in self._rows(warp):
                token = token_of(row)
                head = kv_head * self.group + row % self.group
                for source, operand in zip(arrays, operands, strict=True):
                    *_, heads, width = interpreter.shape_of(source)
                    address = self._address(warp, source, b * length + token, heads, head)
                    to = warp.shared(operand) + shared
                    for slab in range(width // SLAB):
                        offsets = slab * SLAB_BYTES, slab * SLAB_ROW_BYTES
                        warp.copy(to, address, *offsets, self._used(row))
            if stats:
                source, target = stats
                row = _thread(warp)
                size = ROW_STATS * 4
                at = (b * interpreter.shape_of(source)[1] + kv_head) * length
                at = at + token_of(warp.smaller(row, ROWS - 1))
                member = row % self.group
                address = warp.element(source, (at, ROW_STATS_MIN_ROWS * size), (member, size))
                to = (row // self.group * ROW_STATS_MIN_ROWS + member) * size
                used = row < ROWS // self.group * self.group
                warp.copy(warp.shared(target) + to, address, 0, 0, used)

        self._call(load, [entries, *sources, *stats], targets, [first, end, *place])

    def store(self, entries, first, end, place, target, staged, column: int) -> None:
        """Copy rows of an operand to an array, for each entry from `first` to `end - 1`.

        Args:
          entries, first, end: The same as in the method `load`.
          place: The batch row b, the number of entries per row of the array, and the number to
            subtract from an entry.
          target: Array `[B, count, group, width]`.
          staged: The operand `(ref, copy)`, and the number of its columns.
          column: First column of the array.
        """
        ref, copy, columns = staged

        def store(warp, entries, target, operand, first, end, b, count, less):
            for row, shared in self._rows(warp):
                index = first + row // self.group
                only = index < end
                if self._used(row) is not None:
                    only = only & self._used(row)
                index = warp.smaller(index, end - 1)
                entry = warp.fetch_int(entries, index) - less
                at = b * count + entry
                address = self._address(warp, target, at, self.group, row % self.group)
                for slab in range(columns // SLAB):
                    found = warp.read_words(warp.shared(operand) + shared, 4, slab * SLAB_BYTES)
                    offset = column * NUMBER_BYTES + slab * SLAB_ROW_BYTES
                    warp.put_words(address, found, only, offset)

        words = [first, end, *place]
        self._call(store, [entries, target], [ref[0].at[copy]], words)

    def commit(self) -> None:
        """Commit the copies since the last call as one group, which may be empty."""
        self._call(lambda warp: warp.end_copies(), [], [], [])

    def wait(self, left: int) -> None:
        """Wait until at most the last `left` groups of this thread's copies are pending."""
        self._call(lambda warp: warp.wait_for_copies(left), [], [], [])

    def _call(self, function: Callable, refs: Sequence, operands: Sequence, numbers) -> None:
        types = [self.buffers._matrix_ref] * len(operands)
        call = functools.partial(function, warp)
        warp.each(call, [*refs, *operands], numbers, types=types)

    def _rows(self, warp):
        """Yield each row of which a thread copies 16 bytes, and the offset of these bytes in
        the slab.
        """
        thread = _thread(warp)
        part, first = thread % PARTS, thread // PARTS
        # The offset follows the swizzle of rows of 128 bytes.
        swizzled = (part ^ first % PARTS) * BYTES
        for row in range(0, ROWS, ROWS_AT_A_TIME):
            yield first + row, (first + row) * SLAB_ROW_BYTES + swizzled

    def _used(self, row):
        """Return whether a row is a head and not padding. Return None if all rows are heads."""
        used = ROWS // self.group * self.group
        return row < used if used < ROWS else None

    def _address(self, warp, array, at, heads: int, head):
        """Return the address of a thread's 16 bytes in the first slab of `array[at, head]`,
        where the array is `[.., heads, width]`.
        """
        width = interpreter.shape_of(array)[-1] * NUMBER_BYTES
        part = _thread(warp) % PARTS
        return warp.element(array, (at, heads * width), (head, width), (part, BYTES))


def _thread(warp):
    """Return the index of the thread in the CTA, which is one warpgroup."""
    return warp.warp_of_cta() * 32 + warp.lane()

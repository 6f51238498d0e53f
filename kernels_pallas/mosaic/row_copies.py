"""Copies of rows that a list names, by lanes: 16 bytes each, in place of a TMA copy a token.

A multiprocessor starts a TMA copy in 13 to 14 cycles, however little it moves. Of few heads a
token, 64 rows are so many copies that this bounds a step. A warp's instruction of 16 bytes a lane
moves four rows of a slab.

    thread t   16 bytes t % 8 of the rows t / 8, t / 8 + 16, ..   of each slab

The lanes write what wgmma reads: the copies of a step are waited for by each thread, then
`commit_smem` makes them known. Rows lie in shared memory as `operands.py` says.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import interpreter, warp
from kernels_pallas.mosaic.operands import ROW_STATS, ROW_STATS_MIN_ROWS, ROWS, Buffers
from kernels_pallas.mosaic.warp import SCALAR

BYTES = 16  # of a lane
NUMBER_BYTES = 2
SLAB = 64  # columns
SLAB_ROW_BYTES = SLAB * NUMBER_BYTES
SLAB_BYTES = ROWS * SLAB_ROW_BYTES
PARTS = SLAB_ROW_BYTES // BYTES  # of a row of a slab
ROWS_AT_A_TIME = 128 // PARTS  # of the threads of a warpgroup


@dataclasses.dataclass(frozen=True)
class RowCopies:
    """Copies between operands of 64 rows, which are the heads of `64 // group` tokens, and arrays.

    Attributes:
      divisor: an entry of the list is `token * divisor` and something less than `divisor`.
    """

    buffers: Buffers
    group: int
    divisor: int

    def load(self, entries, first, end, place, pairs, stats=()) -> None:
        """Starts copies of the rows of the entries from `first` on, past `end` of the last one.

        Args:
          entries: the list, int32.
          place: b, kv_head and T.
          pairs: arrays `[B, T, H, width]`, and the operand `(ref, copy)` that takes their rows.
          stats: `row_stats` of single tokens, and where in shared memory they go.
        """
        sources, targets = zip(*pairs, strict=True)
        targets = [ref[0].at[copy] for ref, copy in targets]

        def load(warp, refs, operands, words):
            (entries, *arrays), (first, end, b, kv_head, length) = refs, words
            arrays, stats = arrays[: len(operands)], arrays[len(operands) :]

            def token_of(row):
                index = warp.smaller(first + row // self.group, end - 1)
                return warp.fetch(warp.element(entries, (index, 4))) // self.divisor

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
        """Puts rows of an operand into an array: of each entry from `first` to `end - 1`.

        Args:
          place: b, entries of a row of the array, and what is less than the entries there.
          target: `[B, count, group, width]`.
          staged: the operand `(ref, copy)`, and how many columns of it.
          column: of the array, from which on they go.
        """
        ref, copy, columns = staged

        def store(warp, refs, operands, words):
            (entries, target), (operand,) = refs, operands
            first, end, b, count, less = words
            for row, shared in self._rows(warp):
                index = first + row // self.group
                only = index < end
                if self._used(row) is not None:
                    only = only & self._used(row)
                index = warp.smaller(index, end - 1)
                entry = warp.fetch(warp.element(entries, (index, 4))) - less
                at = b * count + entry
                address = self._address(warp, target, at, self.group, row % self.group)
                for slab in range(columns // SLAB):
                    found = warp.read_words(warp.shared(operand) + shared, 4, slab * SLAB_BYTES)
                    offset = column * NUMBER_BYTES + slab * SLAB_ROW_BYTES
                    warp.put_words(address, found, only, offset)

        words = [first, end, *place]
        self._call(store, [entries, target], [ref[0].at[copy]], words)

    def commit(self) -> None:
        """The copies since the last call are a group, which may be empty."""
        self._call(lambda warp, *_: warp.end_copies(), [], [], [])

    def wait(self, left: int) -> None:
        """All groups of this thread but the last `left` have arrived."""
        self._call(lambda warp, *_: warp.wait_for_copies(left), [], [], [])

    def _call(self, function: Callable, refs: Sequence, operands: Sequence, numbers) -> None:
        types = [plgpu.RefType()] * len(refs), [self.buffers._matrix_ref] * len(operands)
        types = *types[0], *types[1], *[SCALAR] * len(numbers)

        @plgpu.inline_mgpu(arg_types=types, return_type=())
        def call(_, *arguments):
            rest = arguments[len(refs) :]
            words = [warp.scalar(x) for x in rest[len(operands) :]]
            function(warp, arguments[: len(refs)], rest[: len(operands)], words)
            return ()

        call(*refs, *operands, *numbers)

    def _rows(self, warp):
        """The rows of a thread, and where in a slab its 16 bytes of each lie."""
        thread = _thread(warp)
        part, first = thread % PARTS, thread // PARTS
        swizzled = (part ^ first % PARTS) * BYTES  # of rows of 128 bytes
        for row in range(0, ROWS, ROWS_AT_A_TIME):
            yield first + row, (first + row) * SLAB_ROW_BYTES + swizzled

    def _used(self, row):
        """Whether a row stands for a head; None means all do."""
        used = ROWS // self.group * self.group
        return row < used if used < ROWS else None

    def _address(self, warp, array, at, heads: int, head):
        """Of a thread's 16 bytes of the first slab: `array[at, head]`, of `[.., heads, width]`."""
        width = interpreter.shape_of(array)[-1] * NUMBER_BYTES
        part = _thread(warp) % PARTS
        return warp.element(array, (at, heads * width), (head, width), (part, BYTES))


def _thread(warp):
    """Of the CTA, which is one warpgroup."""
    return warp.warp_of_cta() * 32 + warp.lane()

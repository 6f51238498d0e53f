"""Computes means of windows of tokens, and the gradients of tokens from the gradients of their
means.

Loop order: a lane has two adjacent columns (a 32-bit word) of keys or of values. Forward: a warp
loops over the stride blocks (`d` tokens) of a few adjacent windows, and adds each block to all
windows that contain the block. Backward: each warp handles one stride block. All tokens of a stride
block are in the same windows, so the warp sums the gradients of these windows only once.
Tile: 32 words per warp, four warps per CTA; no shared memory. Bound: bandwidth. At B=1 S=65536
Hkv=4 D=Dv=128, l=32, d=16, forward reads 134 MB and writes 8 MB. Backward, with the gradients
of two other branches, reads 277 MB and writes 134 MB.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kernels_pallas.mosaic.warp_kernel import WARPS, warp_kernel
from kernels_pallas.specs.compress import Means
from kernels_pallas.specs.tile import LANES, ROWS

LOADS = 16  # number of loads that a lane starts before it waits for one of them


class Side(NamedTuple):
    """The position of a lane in the keys or in the values.

    Attributes:
      words: Number of words per token.
      row: Index of the batch row.
      column: Index of the lane's word in a token. A lane beyond the last word has the index of the
        last word.
      exists: False for a lane beyond the last word.
    """

    warp: Any
    spec: Any
    words: int
    row: Any
    column: Any
    exists: Any

    def at(self, array, length, token):
        """Return the address of token `token` of `array` `[B, length, words]`."""
        return self.warp.element(
            array, (self.row * length + token, 4 * self.words), (self.column, 4)
        )

    def load(self, address, tokens: int = 0) -> list:
        """Load the lane's word that is `tokens` tokens after `address`, as two float32 values."""
        word = self.warp.fetch(address, tokens * 4 * self.words)
        return self.warp.unpack(word, self.spec.dtype)

    def keys_of_slot(self, sizes, slot, refs) -> tuple:
        """For a slot of packed rows, return the first key of the slot's stride block and the end of
        the slot's sequence.
        """
        place = slot * self.spec.stride
        at = (self.row * sizes.key_tiles + place // ROWS, 4)
        tiles = refs.tile_first, refs.tile_end
        first, end = (self.warp.fetch(self.warp.element(x, at)) for x in tiles)
        return first + place % ROWS, end

    def store(self, address, pair: Sequence, only) -> None:
        """If `only` is true, round two float32 values and store them as one word."""
        self.warp.put(address, self.warp.pack(*pair, self.spec.dtype), only & self.exists)


def plus(a: Sequence, b: Sequence) -> list:
    return [x + y for x, y in zip(a, b, strict=True)]


def on_each_side(warp, spec: Any, refs, body: Callable[[Side, int, Any], None]) -> None:
    """Call `body(side, i, part)`, with `i` = 0 if the warp handles keys and `i` = 1 if it handles
    values. `part` is the index of the warp's part of the row `refs.row`.
    """
    index = refs.group * WARPS + warp.warp()
    column, part = index % sum(spec.columns), index // sum(spec.columns)
    first = 0
    for i, (words, columns) in enumerate(zip(spec.words, spec.columns, strict=True)):

        def run(i=i, words=words, first=first):
            word = (column - first) * LANES + warp.lane()
            own = warp.smaller(word, words - 1)
            body(Side(warp, spec, words, refs.row, own, word < words), i, part)

        warp.when(warp.below(column - first, columns), run)
        first += columns


def largest_divisor(number: int, most: int) -> int:
    return next(i for i in range(min(number, most), 0, -1) if number % i == 0)


def average(warp: Any, spec: Means, sizes, refs) -> None:
    """The program that each warp of the kernel `specs.compress.compress_means` runs."""

    def windows(side, i, part):
        """Write the means of the windows in a warp's part of the sequence."""
        first = part * spec.windows
        tokens = (refs.key, refs.value)[i]
        means = (refs.compressed_key, refs.compressed_value)[i]
        first_key, end = first * spec.stride, sizes.S
        if spec.packed:
            near = warp.smaller(first, sizes.rows - 1)
            first_key, end = side.keys_of_slot(sizes, near, refs)
        loads = largest_divisor(spec.stride, LOADS)
        nothing = [warp.word(0.0)] * 2

        def add_block(block, totals):
            # The stride blocks of a window that does not exist may not exist either. The warp
            # then reads any existing block.
            start = warp.smaller(first_key + block * spec.stride, sizes.S - spec.stride)

            def add(i, total):
                address = side.at(tokens, sizes.S, start + i * loads)
                for x in [side.load(address, token) for token in range(loads)]:
                    total = plus(total, x)
                return total

            own = warp.repeat(spec.stride // loads, add, nothing)
            found = []
            for window, total in enumerate(totals):
                inside = warp.below(block - window, spec.strides)
                found.append(plus(total, [warp.where(inside, x, 0.0) for x in own]))
            return found

        count = spec.windows + spec.strides - 1
        totals = warp.repeat(count, add_block, [nothing] * spec.windows)
        for window, total in enumerate(totals):
            index = first + window
            address = side.at(means, sizes.rows, index)
            if spec.packed:
                exists = first_key + (window * spec.stride + spec.block) <= end
            else:
                exists = index < sizes.C
            mean = [warp.where(exists, x * (1 / spec.block), 0.0) for x in total]
            side.store(address, mean, index < sizes.rows)

    on_each_side(warp, spec, refs, windows)


def merge(warp: Any, spec: Means, sizes, refs) -> None:
    """The program that each warp of the kernel `specs.compress.merge_key_gradients` runs."""

    def stride_block(side, i, block):
        """Write the gradients of the tokens in stride block `block`.

        The tokens of stride block `block` are in the windows from `block - l / d + 1` to `block`. A
        window that would begin in the previous sequence has gradient 0.
        """
        name = ("dk", "dv")[i]
        compressed, output = (getattr(refs, x) for x in (f"compressed_{name}", name))
        others = [getattr(refs, f"{name}_{j}") for j in range(spec.others)]
        first_key, end = block * spec.stride, sizes.S
        if spec.packed:
            near = warp.smaller(block, sizes.rows - 1)
            first_key, end = side.keys_of_slot(sizes, near, refs)
            end = warp.where(block < sizes.rows, end, 0)
        count = sizes.rows if spec.packed else sizes.C
        nothing = [warp.word(0.0)] * 2

        def add_window(i, total):
            window = block - (spec.strides - 1) + i
            exists = warp.below(window, count)
            near = warp.smaller(warp.larger(window, 0), count - 1)
            x = side.load(side.at(compressed, sizes.rows, near))
            return plus(total, [warp.where(exists, each, 0.0) for each in x])

        total = warp.repeat(spec.strides, add_window, nothing)
        share = [x * (1 / spec.block) for x in total]
        each_time = largest_divisor(spec.stride, LOADS // max(spec.others, 1))

        def write(i):
            steps = [i * each_time + each for each in range(each_time)]
            tokens = [first_key + step for step in steps]
            near = [warp.smaller(token, sizes.S - 1) for token in tokens]
            loaded = [
                [side.load(side.at(other, sizes.S, token)) for other in others[spec.placed :]]
                for token in near
            ]
            if spec.placed:
                places = sizes.rows * spec.stride
                for step, found in zip(steps, loaded, strict=True):
                    place = warp.smaller(block * spec.stride + step, places - 1)
                    by_place = [side.at(x, places, place) for x in others[: spec.placed]]
                    found[:0] = [side.load(address) for address in by_place]
            for token, place, gradients in zip(tokens, near, loaded, strict=True):
                total = share
                for x in gradients:
                    total = plus(total, x)
                side.store(side.at(output, sizes.S, place), total, token < end)

        warp.repeat(spec.stride // each_time, write)

    on_each_side(warp, spec, refs, stride_block)


compress_means = warp_kernel(average)
merge_key_gradients = warp_kernel(merge)

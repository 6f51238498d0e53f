"""Keys and values rounded to e4m3, in the order in which products read them.

Loop order: a lane has two neighbouring columns (a 32-bit word) of keys or of values. A warp sums a
chunk of tokens; then it adds up the chunks of its columns and rounds two tiles of 64 places, 16 at
a time: these are the two words of e4m3 of a value's column, and of two keys two lanes exchange a
word each.
Tile: 32 words a warp, four warps a CTA; no shared memory.
Bandwidth bound. At B=1 S=65536 Hkv=4 D=Dv=128 both read 134 MB, and `round_tokens` writes 67 MB.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic.compress import on_each_side, plus
from kernels_pallas.mosaic.warp_kernel import warp_kernel
from kernels_pallas.specs.fp8 import CHUNKS, GROUP, LOADS, TILES, Rounding
from kernels_pallas.specs.tile import ROWS

FINITE = 3.4e38  # what is larger is infinite
EXPONENT = 23  # where it begins in the bits of a float32
AT_MOST = 7  # the largest number becomes 2^7 to 2^8
LEAST = 27 << EXPONENT  # bits of the smallest scale, 2^-100
SUMS = 16  # bytes of two columns of a chunk
BATCH = 8  # chunks that are asked for together
HALF = (1 << 16) - 1  # of a word


@dataclasses.dataclass(frozen=True)
class Sums:
    """The program of `specs.fp8.sum_tokens`."""

    spec: Rounding

    def __call__(self, warp: Any, sizes, *refs) -> None:
        *arrays, row, cta = refs
        inputs, end, outputs = arrays[:2], arrays[2], arrays[3:]

        def run(side, i, part):
            first = part * sizes.chunk
            last = warp.smaller(sizes.S, warp.fetch(warp.element(end, (row, 4))))

            def add(turn, found):
                tokens = [first + turn * LOADS + each for each in range(LOADS)]
                near = [warp.smaller(token, sizes.S - 1) for token in tokens]
                loaded = [side.load(side.at(inputs[i], sizes.S, token)) for token in near]
                sums, sizes_ = found
                for token, pair in zip(tokens, loaded, strict=True):
                    there = token < last
                    pair = [warp.where(there & (warp.size(x) < FINITE), x, 0.0) for x in pair]
                    sums = plus(sums, pair)
                    sizes_ = [
                        warp.larger(a, warp.size(b)) for a, b in zip(sizes_, pair, strict=True)
                    ]
                return [sums, sizes_]

            nothing = [warp.word(0.0)] * 2
            sums, largest = warp.repeat(sizes.chunk // LOADS, add, [nothing, nothing])
            address = warp.element(
                outputs[i], (row * CHUNKS + part, SUMS * side.words), (side.column, SUMS)
            )
            exists = side.exists & (part < CHUNKS)
            warp.put_several(address, [warp.bits(x) for x in (*sums, *largest)], exists)

        on_each_side(warp, self.spec, row, cta, run)


@dataclasses.dataclass(frozen=True)
class Round:
    """The program of `specs.fp8.round_tokens`."""

    spec: Rounding

    def __call__(self, warp: Any, sizes, *refs) -> None:
        *arrays, row, cta = refs
        tokens, end, sums, outputs = arrays[:2], arrays[2], arrays[3:5], arrays[-5:]
        tiles = arrays[5:-5]

        def run(side, i, part):
            last = warp.smaller(sizes.S, warp.fetch(warp.element(end, (row, 4))))
            mean, scale = self._statistics(warp, side, sums[i], last)
            if i:
                mean = [warp.word(0.0)] * 2
            first = warp.same(part, 0)
            given = [(outputs[2 + i], scale)]
            given += [] if i else [(outputs[4], [warp.bits(x) for x in mean])]
            for output, pair in given:
                for column, x in enumerate(pair):
                    at = warp.element(output, (row * side.words + side.column, 8), (column, 4))
                    warp.put(at, x, first & side.exists)
            inverse = [warp.real((254 << EXPONENT) - x) for x in scale]
            write = self._write_values if i else self._write_keys

            def tile(number, state):
                index = part * TILES + number
                begin, stop = index * ROWS, last
                if self.spec.packed:
                    near = warp.smaller(index, sizes.places // ROWS - 1)
                    at = (row * (sizes.places // ROWS) + near, 4)
                    begin, stop = (warp.fetch(warp.element(x, at)) for x in tiles)
                    stop = warp.smaller(stop, last)

                def group(number, state):
                    key = begin + number * GROUP
                    near = [warp.smaller(key + each, sizes.S - 1) for each in range(GROUP)]
                    loaded = [side.load(side.at(tokens[i], sizes.S, each)) for each in near]
                    scaled = []
                    for each, pair in enumerate(loaded):
                        there = key + each < stop
                        # What is infinite becomes NaN, else it would be rounded to a number.
                        pair = [
                            warp.where(there, (x - m + (x - x)) * s, 0.0)
                            for x, m, s in zip(pair, mean, inverse, strict=True)
                        ]
                        scaled.append(pair)
                    place = index * ROWS + number * GROUP
                    exists = side.exists & (place < sizes.places)
                    write(warp, sizes, side, outputs[i], place, scaled, exists)
                    return state

                return warp.repeat(ROWS // GROUP, group, state)

            warp.repeat(TILES, tile, [])

        on_each_side(warp, self.spec, row, cta, run)

    def _statistics(self, warp, side, sums, count) -> tuple[list, list]:
        """Of the lane's columns the mean, and the bits of the scale."""

        def add(turn, found):
            loaded = []
            for each in range(BATCH):
                chunk = side.row * CHUNKS + turn * BATCH + each
                address = warp.element(sums, (chunk, SUMS * side.words), (side.column, SUMS))
                loaded.append(
                    [warp.real(x) for x in warp.fetch_several(address, 4, side.exists)]
                )
            total, largest = found
            for x in loaded:
                total = plus(total, x[:2])
                largest = [warp.larger(a, b) for a, b in zip(largest, x[2:], strict=True)]
            return [total, largest]

        nothing = [warp.word(0.0)] * 2
        total, largest = warp.repeat(CHUNKS // BATCH, add, [nothing, nothing])
        share = warp.divided(1.0, warp.floating(warp.larger(count, 1)))
        mean = [x * share for x in total]
        scale = []
        for size, x in zip(largest, mean, strict=True):
            bits = warp.bits(size + warp.size(x)) >> EXPONENT << EXPONENT
            scale.append(warp.larger(bits - (AT_MOST << EXPONENT), LEAST))
        return mean, scale

    @staticmethod
    def _write_keys(warp, sizes, side, output, place, scaled, exists) -> None:
        """Lane 4 j + t of eight has columns 8 j + 2 t and the next one; the word at 4 t has those
        of both j.
        """
        words = 2 * side.words // 4
        high = (side.column >> 2) & 1
        at = side.column // 8 * 4 + side.column % 4
        for each in range(0, GROUP, 2):
            own = warp.codes([*scaled[each], *scaled[each + 1]])
            other = warp.bits(warp.exchange(warp.real(own), 4))
            of_first = (own & HALF) | other << 16
            of_second = (other >> 16 & HALF) | (own & ~HALF)
            is_second = warp.same(high, 1)
            word = warp.where(is_second, of_second, of_first)
            token = side.row * sizes.places + place + each + high
            warp.put(warp.element(output, (token, 4 * words), (at, 4)), word, exists)

    @staticmethod
    def _write_values(warp, sizes, side, output, place, scaled, exists) -> None:
        for column in range(2):
            x = [pair[column] for pair in scaled]
            words = [
                warp.codes([x[2 * t], x[2 * t + 1], x[8 + 2 * t], x[9 + 2 * t]])
                for t in range(4)
            ]
            index = side.row * 2 * side.words + 2 * side.column + column
            group = index * (sizes.places // GROUP) + place // GROUP
            warp.put_several(warp.element(output, (group, GROUP)), words, exists)


def sum_tokens(kernel: Kernel) -> Callable:
    """The body of `specs.fp8.sum_tokens`."""
    return warp_kernel(kernel, Sums(kernel.spec), interpret=kernel.spec.interpret)


def round_tokens(kernel: Kernel) -> Callable:
    """The body of `specs.fp8.round_tokens`."""
    return warp_kernel(kernel, Round(kernel.spec), interpret=kernel.spec.interpret)

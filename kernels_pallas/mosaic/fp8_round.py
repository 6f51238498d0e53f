"""Rounds keys and values to e4m3, and stores them in the order in which products read them.

Loop order: a lane has two neighbouring columns (a 32-bit word) of keys or of values. A warp of the
first kernel sums a chunk of tokens. A warp of the second kernel adds up the sums of all chunks for
its columns. With the sums, the warp rounds `TILES` tiles of 64 slots, 16 slots at a time. In e4m3,
16 numbers of a column are four words. For keys, two lanes exchange one word for each of two keys.
Tile: 32 words per warp, four warps per CTA; no shared memory. Bound: bandwidth. At B=1 S=65536
Hkv=4 D=Dv=128, each of the two kernels reads 134 MB, and `round_tokens` writes 67 MB.
"""

from typing import Any

from kernels_pallas.mosaic.compress import on_each_side, plus
from kernels_pallas.mosaic.warp_kernel import warp_kernel
from kernels_pallas.specs.fp8 import CHUNKS, GROUP, LOADS, TILES, Rounding
from kernels_pallas.specs.tile import ROWS

FINITE = 3.4e38  # numbers of at least this size are treated as infinite
EXPONENT = 23  # index of the lowest bit of the exponent in a float32
AT_MOST = 7  # scales map the largest number of a column to 2^7 to 2^8
LEAST = 27 << EXPONENT  # bits of 2^-100, the smallest scale, as a float32
SUMS = 16  # bytes that the sums of two columns of a chunk need
BATCH = 8  # number of chunks whose sums are loaded together
HALF = (1 << 16) - 1  # mask of the lower half of a word


def add_up(warp: Any, spec: Rounding, sizes, refs) -> None:
    """The program that each warp of the kernel `specs.fp8.sum_tokens` runs."""

    def run(side, i, part):
        tokens_of_side = (refs.key, refs.value)[i]
        first = part * sizes.chunk
        last = _last(warp, sizes, refs)

        def add(turn, sums, largest):
            tokens = [first + turn * LOADS + each for each in range(LOADS)]
            near = [warp.smaller(token, sizes.S - 1) for token in tokens]
            loaded = [side.load(side.at(tokens_of_side, sizes.S, token)) for token in near]
            for token, pair in zip(tokens, loaded, strict=True):
                there = token < last
                pair = [warp.where(there & (warp.size(x) < FINITE), x, 0.0) for x in pair]
                sums = plus(sums, pair)
                both = zip(largest, pair, strict=True)
                largest = [warp.larger(a, warp.size(b)) for a, b in both]
            return sums, largest

        nothing = [warp.word(0.0)] * 2
        sums, largest = warp.repeat(sizes.chunk // LOADS, add, nothing, nothing)
        address = warp.element(
            (refs.key_sums, refs.value_sums)[i],
            (refs.row * CHUNKS + part, SUMS * side.words),
            (side.column, SUMS),
        )
        exists = side.exists & (part < CHUNKS)
        warp.put_several(address, [warp.bits(x) for x in (*sums, *largest)], exists)

    on_each_side(warp, spec, refs, run)


def _last(warp: Any, sizes, refs) -> Any:
    """Return the end of the tokens of a row."""
    return warp.smaller(sizes.S, warp.fetch_int(refs.end, refs.row))


def round_all(warp: Any, spec: Rounding, sizes, refs) -> None:
    """The program that each warp of the kernel `specs.fp8.round_tokens` runs."""

    def run(side, i, part):
        tokens, sums = (refs.key, refs.value)[i], (refs.key_sums, refs.value_sums)[i]
        last = _last(warp, sizes, refs)
        mean, scale = statistics(side, sums, last)
        if i:
            mean = [warp.word(0.0)] * 2
        first = warp.same(part, 0)
        given = [((refs.key_scale, refs.value_scale)[i], scale)]
        given += [] if i else [(refs.key_mean, [warp.bits(x) for x in mean])]
        for output, pair in given:
            for column, x in enumerate(pair):
                at = warp.element(output, (refs.row * side.words + side.column, 8), (column, 4))
                warp.put(at, x, first & side.exists)
        inverse = [warp.real((254 << EXPONENT) - x) for x in scale]
        write = write_values if i else write_keys

        def tile(number):
            index = part * TILES + number
            begin, stop = index * ROWS, last
            if spec.packed:
                near = warp.smaller(index, sizes.places // ROWS - 1)
                at = (refs.row * (sizes.places // ROWS) + near, 4)
                tiles = refs.tile_first, refs.tile_end
                begin, stop = (warp.fetch(warp.element(x, at)) for x in tiles)
                stop = warp.smaller(stop, last)

            def group(number):
                key = begin + number * GROUP
                near = [warp.smaller(key + each, sizes.S - 1) for each in range(GROUP)]
                loaded = [side.load(side.at(tokens, sizes.S, each)) for each in near]
                scaled = []
                for each, pair in enumerate(loaded):
                    there = key + each < stop
                    # Infinite numbers become NaN, since otherwise they would be rounded to a
                    # finite number.
                    pair = [
                        warp.where(there, (x - m + (x - x)) * s, 0.0)
                        for x, m, s in zip(pair, mean, inverse, strict=True)
                    ]
                    scaled.append(pair)
                place = index * ROWS + number * GROUP
                write(side, place, scaled, side.exists & (place < sizes.places))

            warp.repeat(ROWS // GROUP, group)

        warp.repeat(TILES, tile)

    def statistics(side, sums, count) -> tuple[list, list]:
        """Return the means of the lane's columns, and the bits of the scales of these columns."""

        def add(turn, total, largest):
            loaded = []
            for each in range(BATCH):
                chunk = side.row * CHUNKS + turn * BATCH + each
                address = warp.element(sums, (chunk, SUMS * side.words), (side.column, SUMS))
                four = warp.fetch_several(address, 4, side.exists)
                loaded.append([warp.real(x) for x in four])
            for x in loaded:
                total = plus(total, x[:2])
                largest = [warp.larger(a, b) for a, b in zip(largest, x[2:], strict=True)]
            return total, largest

        nothing = [warp.word(0.0)] * 2
        total, largest = warp.repeat(CHUNKS // BATCH, add, nothing, nothing)
        share = warp.divided(1.0, warp.floating(warp.larger(count, 1)))
        mean = [x * share for x in total]
        scale = []
        for size, x in zip(largest, mean, strict=True):
            bits = warp.bits(size + warp.size(x)) >> EXPONENT << EXPONENT
            scale.append(warp.larger(bits - (AT_MOST << EXPONENT), LEAST))
        return mean, scale

    def write_keys(side, place, scaled, exists) -> None:
        """Write the rounded keys. Among eight lanes, lane 4 j + t (j < 2, t < 4) has the
        columns 8 j + 2 t and 8 j + 2 t + 1. The word at byte 4 t of a group has the columns of
        lanes t and 4 + t.
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
            warp.put(warp.element(refs.key8, (token, 4 * words), (at, 4)), word, exists)

    def write_values(side, place, scaled, exists) -> None:
        for column in range(2):
            x = [pair[column] for pair in scaled]
            words = [
                warp.codes([x[2 * t], x[2 * t + 1], x[8 + 2 * t], x[9 + 2 * t]])
                for t in range(4)
            ]
            index = side.row * 2 * side.words + 2 * side.column + column
            group = index * (sizes.places // GROUP) + place // GROUP
            warp.put_several(warp.element(refs.value8, (group, GROUP)), words, exists)

    on_each_side(warp, spec, refs, run)


sum_tokens = warp_kernel(add_up)
round_tokens = warp_kernel(round_all)

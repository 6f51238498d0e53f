"""New tokens to their pages, and the means which they finish.

Loop order: a lane has two neighbouring columns (a 32-bit word) of the keys or the values of one new
token. Where the token is the last of a window, position i d + l - 1, it also adds the window up:
tokens of this call from the call, which other warps may not have written yet, older ones from
their pages.
Tile: 32 words a warp, four warps a CTA; no shared memory.
What bounds it is the launch: a decode step of 8 rows moves some 16 KB, and one row in `d` reads a
window of `l` tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic.compress import LOADS, Side, largest_divisor, on_each_side, plus
from kernels_pallas.mosaic.warp_kernel import warp_kernel
from kernels_pallas.specs.append import Append
from kernels_pallas.specs.tile import LANES


@dataclasses.dataclass(frozen=True)
class Place:
    """A new token: `begin`, the first one of its row in this call, and where it goes."""

    row: Any
    begin: Any
    position: Any
    page: Any
    there: Any


@dataclasses.dataclass(frozen=True)
class Appending:
    """The program of `specs.append.append`."""

    spec: Append

    def __call__(self, warp: Any, sizes, *refs) -> None:
        spec, rest = self.spec, list(refs)

        def take(count: int) -> list:
            found, rest[:] = rest[:count], rest[count:]
            return found

        new = take(2 * len(spec.branches))
        table, lengths, *starts = take(3 if spec.ragged else 2)
        old = take(2 if spec.means else 0)
        pages = take(2 * len(spec.branches))
        compressed = take(2 if spec.means else 0)
        row, cta = rest

        def run(side: Side, i: int, token) -> None:
            def write():
                place = self._place(warp, sizes, table, lengths, starts, token)
                to = place.page * spec.block + place.position % spec.block

                def one():
                    for x, target in zip(new[i::2], pages[i::2], strict=True):
                        word = warp.fetch(side.at(x, sizes.N, token))
                        warp.put(side.at(target, sizes.P, to), word, side.exists)
                    if spec.means:
                        own = new[i::2][-1], old[i], table, compressed[i]
                        self._finish(warp, sizes, side, token, place, *own)

                warp.when(place.there, one)

            warp.when(token < sizes.N, write)

        on_each_side(warp, spec, row, cta, run)

    def _place(self, warp, sizes, table, lengths, starts: Sequence, token) -> Place:
        if starts:
            row = self._row(warp, sizes, starts[0], token)
            begin, end = (self._entry(warp, starts[0], row + i) for i in range(2))
        else:
            each = warp.word(sizes.N) // sizes.B
            row = token // each
            begin, end = row * each, row * each + each
        length = self._entry(warp, lengths, row)
        position = warp.where(token < end, length - (end - token), -1)
        there = (length > 0) & warp.below(position, sizes.M * self.spec.block)
        position = warp.where(there, position, 0)
        page = self._entry(warp, table, row * sizes.M + position // self.spec.block)
        return Place(row, begin, position, page, there & warp.below(page, sizes.P))

    def _row(self, warp, sizes, starts, token):
        """The last row that begins at or before a token."""

        def count(i, state):
            row = i * LANES + warp.lane()
            begin = self._entry(warp, starts, warp.smaller(row, sizes.B))
            return [state[0] + warp.ones(warp.votes((begin <= token) & (row < sizes.B)))]

        chunks = (warp.word(sizes.B) + (LANES - 1)) // LANES
        (rows,) = warp.repeat(chunks, count, [warp.word(0)])
        return warp.larger(rows - 1, 0)

    def _entry(self, warp, array, index):
        """Of an array of int32."""
        return warp.fetch(warp.element(array, (index, 4)))

    def _finish(self, warp, sizes, side, token, place, new, old, table, compressed) -> None:
        """The mean of the window that ends with a token, if one does."""
        spec = self.spec
        loads = largest_divisor(spec.compress_block, LOADS)
        before = spec.compress_block - 1  # tokens of the window before this one
        start = place.position - before

        def mean():
            older = warp.larger(place.begin - (token - before), 0)  # of the window's tokens

            def add_older(i, total):
                for tap in [i * loads + j for j in range(loads)]:
                    entry = start + tap
                    page = self._entry(warp, table, place.row * sizes.M + entry // spec.block)
                    page = warp.smaller(warp.larger(page, 0), sizes.P - 1)
                    at = page * spec.block + entry % spec.block
                    found = side.load(side.at(old, sizes.P, at))
                    total = plus(total, [warp.where(tap < older, x, 0.0) for x in found])
                return total

            def add_newer(i, total):
                for tap in [i * loads + j for j in range(loads)]:
                    found = side.load(
                        side.at(new, sizes.N, token - before + warp.larger(tap, older))
                    )
                    total = plus(total, [warp.where(tap < older, 0.0, x) for x in found])
                return total

            turns = spec.compress_block // loads
            total = [warp.word(0.0)] * 2
            total = warp.repeat(warp.where(older > 0, turns, 0), add_older, total)
            total = warp.repeat(turns, add_newer, total)
            slot = place.page * spec.per_page + place.position % spec.block // spec.stride
            share = [x * (1 / spec.compress_block) for x in total]
            side.store(side.at(compressed, sizes.P, slot), share, place.there)

        ends = warp.same(warp.larger(start, 0) % spec.stride, 0)
        warp.when((start >= 0) & ends, mean)


def append(kernel: Kernel) -> Callable:
    """The body of `specs.append.append`."""
    spec: Append = kernel.spec
    return warp_kernel(kernel, Appending(spec), interpret=spec.interpret)

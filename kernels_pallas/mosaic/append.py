"""Writes new tokens to their pages, and the means of the windows that the new tokens complete.

Loop order: each lane copies two adjacent columns (a 32-bit word) of the key or the value of one new
token. A token at position `i d + l - 1` ends a window of `l` tokens, and the token's lane also sums
this window. The lane reads tokens of this call from the inputs, since other warps may not have
written these tokens to pages yet. The lane reads tokens of earlier calls from their pages.
Tile: 32 words per warp, four warps per CTA; no shared memory. Bound: latency. A decode step of 8
rows moves about 16 KB. On average one of `d` rows completes a window per step, for which `l` tokens
are read.
"""

from typing import Any

from kernels_pallas.mosaic.compress import LOADS, Side, largest_divisor, on_each_side, plus
from kernels_pallas.mosaic.warp_kernel import warp_kernel
from kernels_pallas.specs.append import Append
from kernels_pallas.specs.tile import LANES, cdiv


def write_token(warp: Any, spec: Append, sizes, refs) -> None:
    """The program that each warp of the kernel `specs.append.append` runs."""

    entry = warp.fetch_int

    def row_of(token):
        """Return the row that contains a token, which is the last row that begins at or before
        the token.
        """

        def count(i, rows):
            row = i * LANES + warp.lane()
            begin = entry(refs.starts, warp.smaller(row, sizes.B))
            return rows + warp.ones(warp.votes((begin <= token) & (row < sizes.B)))

        chunks = cdiv(warp.word(sizes.B), LANES)
        return warp.larger(warp.repeat(chunks, count, 0) - 1, 0)

    def write(side: Side, i: int, token) -> None:
        kind = ("key", "value")[i]
        if spec.ragged:
            row = row_of(token)
            begin, end = (entry(refs.starts, row + i) for i in range(2))
        else:
            each = warp.word(sizes.N) // sizes.B
            row = token // each
            begin, end = row * each, row * each + each  # the row's tokens in this call
        length = entry(refs.lengths, row)
        position = warp.where(token < end, length - (end - token), -1)
        there = (length > 0) & warp.below(position, sizes.M * spec.block)
        position = warp.where(there, position, 0)
        page = entry(refs.page_table, row * sizes.M + position // spec.block)
        there = there & warp.below(page, sizes.P)
        to = page * spec.block + position % spec.block

        def put():
            for branch in spec.branches:
                new = getattr(refs, f"{branch}_{kind}")
                pages = getattr(refs, f"{branch}_{kind}_pages")
                word = warp.fetch(side.at(new, sizes.N, token))
                warp.put(side.at(pages, sizes.P, to), word, side.exists)
            if spec.means:
                finish(side, kind, token, row, begin, position, page, there)

        warp.when(there, put)

    def finish(side, kind, token, row, begin, position, page, there) -> None:
        """If a window ends with the token, write the mean of the window."""
        new = getattr(refs, f"{spec.branches[-1]}_{kind}")
        old, compressed = getattr(refs, f"old_{kind}"), getattr(refs, f"compressed_{kind}")
        loads = largest_divisor(spec.compress_block, LOADS)
        before = spec.compress_block - 1  # number of tokens in the window before the last token
        start = position - before

        def mean():
            older = warp.larger(
                begin - (token - before), 0
            )  # tokens that this call does not have

            def add_older(i, total):
                for tap in [i * loads + j for j in range(loads)]:
                    at = start + tap
                    page = entry(refs.page_table, row * sizes.M + at // spec.block)
                    page = warp.smaller(warp.larger(page, 0), sizes.P - 1)
                    at = page * spec.block + at % spec.block
                    found = side.load(side.at(old, sizes.P, at))
                    total = plus(total, [warp.where(tap < older, x, 0.0) for x in found])
                return total

            def add_newer(i, total):
                for tap in [i * loads + j for j in range(loads)]:
                    at = token - before + warp.larger(tap, older)
                    found = side.load(side.at(new, sizes.N, at))
                    total = plus(total, [warp.where(tap < older, 0.0, x) for x in found])
                return total

            turns = spec.compress_block // loads
            total = [warp.word(0.0)] * 2
            total = warp.repeat(warp.where(older > 0, turns, 0), add_older, total)
            total = warp.repeat(turns, add_newer, total)
            slot = page * spec.per_page + position % spec.block // spec.stride
            share = [x * (1 / spec.compress_block) for x in total]
            side.store(side.at(compressed, sizes.P, slot), share, there)

        ends = warp.same(warp.larger(start, 0) % spec.stride, 0)
        warp.when((start >= 0) & ends, mean)

    def run(side: Side, i: int, token) -> None:
        warp.when(token < sizes.N, lambda: write(side, i, token))

    on_each_side(warp, spec, refs, run)


append = warp_kernel(write_token)

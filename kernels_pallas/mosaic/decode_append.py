"""The new tokens of a decode step: their rows and the means that they finish, put in the pages.

A cluster does it for its key/value head, of all new tokens of the row up to the cluster's own:
clusters do not wait for each other, so those of later tokens of the row put the same bits there
once more. It comes before the first strips, so that what it reads does not wait behind them.

    token p           every branch's key and value, at p % block of its page: the last CTA, a warp
                      a row
    p = i d + l - 1   the mean of the last l tokens too, new ones from the call, others from pages:
                      of keys the first CTA, of values the second, whose warps add up shares of it

To pages in fp8 rows are rounded, and the window's tokens are read from the row's ring where it has
them as they were.
"""

import math
from typing import Any

from kernels_pallas.mosaic.decode_lane import Lane
from kernels_pallas.specs.decode import NEW_PAGES, RAW
from kernels_pallas.specs.tile import LANES, cdiv

COLUMNS = 8  # of a row that a lane has, 16 bytes
ROWS = 8  # of a mean that a warp asks for together
KINDS = "key", "value"
# As in `nsa_core.rounding`.
LARGEST, LEAST = 448.0, 1e-30
NEAR, LEAST_NEAR = 2.0**-4 + 2.0**-7, 2.0**-9


class NewTokens:
    """Of a cluster. The page table is in shared memory, and apart from it the pages of new tokens,
    which may not exist.
    """

    def __init__(self, lane: Lane, sizes: Any, arrays: Any, token: Any, kv_head: Any):
        m, spec = lane.m, lane.spec
        self.lane, self.arrays, self.kv_head = lane, arrays, kv_head
        # A warp adds up several rows of a mean beside each other where they are narrow.
        self.rows = LANES // (max(spec.D, spec.Dv) // COLUMNS)
        self.row_lanes = LANES // self.rows
        self.own_row = lane.lane // self.row_lanes
        self.columns, self.pool = m.word(sizes.table_pages), m.word(sizes.pages)
        self.row, self.count = token // spec.q_len, token % spec.q_len + 1
        self.length = m.fetch(m.element(arrays.lengths, (self.row, 4)))
        self.first = self.length - spec.q_len  # the position of the row's first
        if spec.fp8:
            self.ring = m.fetch(m.element(arrays.slots, (self.row, 4)))
            self.rings = m.word(sizes.rings)

    def put(self) -> None:
        m = self.lane.m

        def token(i, nothing):
            self._put_token(i)
            return nothing

        m.repeat(self.count, token, [], unrolled=False)

    def _put_token(self, i: Any) -> None:
        m, spec = self.lane.m, self.lane.spec
        position = self.first + i
        column = m.larger(position, 0) // spec.block
        later = column - m.larger(self.first, 0) // spec.block
        page = m.read(self.lane.place("new_pages") + m.smaller(later, NEW_PAGES - 1) * 4)
        there = (self.length > 0) & (position >= 0) & (column < self.columns)
        there = there & (page >= 0) & (page < self.pool)
        new = self.row * spec.q_len + i
        inside = m.larger(position, 0) % spec.block
        begin = position - (spec.compress_block - 1)
        ends = there & (begin >= 0) & m.same(m.larger(begin, 0) % spec.stride, 0)
        rows, warps, rank = len(RAW) * len(KINDS), spec.variant.warps, self.lane.rank

        def put_mean():
            self._add_share(rank, begin)
            m.sync_cta()
            slot = inside // spec.stride
            m.when(m.same(self.lane.warp, 0), lambda: self._put_shares(rank, page, slot))
            m.sync_cta()  # the shares have been read

        m.when(ends & (rank < len(KINDS)), put_mean)

        def row(j, nothing):
            self._put_row(self.lane.warp + j * warps, new, page, inside, position)
            return nothing

        mine = (rows + warps - 1 - self.lane.warp) // warps
        there = there & m.same(rank, spec.variant.cluster - 1)
        m.repeat(m.where(there, mine, 0), row, [], unrolled=False)

    def _put_row(self, number: Any, new: Any, page: Any, inside: Any, position: Any) -> None:
        """Row `new` of the array of this number: keys, then values of a branch after the other."""
        m, spec, value = self.lane.m, self.lane.spec, number & 1
        names = [f"{branch}_{kind}" for branch in RAW for kind in KINDS]
        given = self._head(self._one([f"new_{name}" for name in names], number), value, 2)
        words = m.fetch_words(m.beyond(given, new, self._row_bytes(value, 2)))
        at = value, spec.block, page, inside, words
        if not spec.fp8:
            self._put(self._one(names, number), *at)
            return
        scales = self._one([f"{name}_scale" for name in names], number)
        self._put_rounded(self._one(names, number), scales, *at)
        kept = (self.ring >= 0) & (self.ring < self.rings) & (number < len(KINDS))
        m.when(kept, lambda: self._put_words(self._in_ring(value, position), value, words))

    def _numbers(self, words: list) -> list:
        return [x for word in words for x in self.lane.m.unpack(word, self.lane.spec.dtype)]

    @staticmethod
    def _with(sums: list, row: list) -> list:
        return [a + b for a, b in zip(sums, row, strict=True)]

    def _packed(self, x: list) -> list:
        m, dtype = self.lane.m, self.lane.spec.dtype
        return [m.pack(x[i], x[i + 1], dtype) for i in range(0, COLUMNS, 2)]

    # Means.

    def _add_share(self, value: Any, begin: Any) -> None:
        """Adds up a warp's share of the window: of the call's tokens as they are, of older ones
        from the pages. Where these are in fp8, older ones are read from the row's ring where it has
        what the pages' may have been rounded from (`nsa_core.rounding.is_of`).

        Rows are asked for together, before the first is added.
        """
        m, spec, lane = self.lane.m, self.lane.spec, self.lane
        apart = spec.variant.warps * self.rows
        share, block = cdiv(spec.compress_block, apart), spec.block
        together = math.gcd(share, ROWS)
        names, row_bytes = [f"raw_{kind}" for kind in KINDS], self._row_bytes(value, 2)
        given = self._head(self._one([f"new_{x}" for x in names], value), value, 2)
        pages = self._head(self._one(names, value), value, spec.token_bytes)
        page_bytes = self._row_bytes(value, spec.token_bytes)
        if spec.fp8:
            scales = self._one([f"{x}_scale" for x in names], value)
            scales = m.beyond(scales, self.kv_head, 4 * block)

        def rows(i, sums):
            found: list[tuple[Any, Any]] = []
            for j in range(together):
                tap = lane.warp * self.rows + self.own_row + (i * together + j) * apart
                position = begin + m.smaller(tap, spec.compress_block - 1)
                old = position < self.first
                entry = m.where(old, position, 0)
                number = m.read(lane.place("table") + entry // block * 4)
                at = m.beyond(
                    m.beyond(pages, number, page_bytes * block), entry % block, page_bytes
                )
                new = self.row * spec.q_len + m.larger(position - self.first, 0)
                own = m.beyond(given, new, row_bytes)
                if not spec.fp8:
                    words = m.fetch_words(m.where(old, at, own))
                    found.append((tap, lambda words=words: self._numbers(words)))
                    continue
                scale = m.beyond(scales, number, 4 * spec.Hkv * block, entry % block * 4)
                kept = m.where(old, self._in_ring(value, position), own)
                words = m.fetch(at), m.fetch(at, 4), m.fetch(scale), m.fetch_words(kept)
                found.append((tap, lambda old=old, words=words: self._token(old, *words)))
            for tap, numbers in found:
                row = numbers()
                if spec.compress_block % apart:
                    row = [m.where(tap < spec.compress_block, x, 0.0) for x in row]
                sums = self._with(sums, row)
            return sums

        zeros = [m.word(0.0)] * COLUMNS
        sums = m.repeat(share // together, rows, zeros, unrolled=False)
        for i in range(0, COLUMNS, 4):
            m.write_words(self._share(lane.warp, lane.lane), sums[i : i + 4], 4 * i)

    def _token(self, old: Any, low: Any, high: Any, scale: Any, kept: list) -> list:
        """A lane's columns of a token of the window."""
        m, x = self.lane.m, self._numbers(kept)
        scale = m.real(scale)
        halves = [half for word in (low, high) for half in m.widened(word)]
        stored = [y * scale for half in halves for y in m.unpack(half, "float16")]
        stored = self._numbers(self._packed(stored))
        near = self.lane.lane >= 0
        for a, b in zip(x, stored, strict=True):
            most = m.multiply_add(m.size(b), NEAR, scale * LEAST_NEAR)
            near = near & (m.size(a - b) <= most)
        all_near = (1 << self.row_lanes) - 1 if self.rows > 1 else -1
        votes = (m.votes(near) >> self.own_row * self.row_lanes) & all_near
        rounded = old & m.different(votes, all_near)
        return [m.where(rounded, b, a) for a, b in zip(x, stored, strict=True)]

    def _share(self, warp: Any, lane: Any) -> Any:
        """Where a lane of a warp keeps its columns of a share."""
        return self.lane.place("logits") + (warp * LANES + lane) * (4 * COLUMNS)

    def _put_shares(self, value: Any, page: Any, slot: Any) -> None:
        m, spec = self.lane.m, self.lane.spec

        def add(i, sums):
            at = self._share(i // self.rows, i % self.rows * self.row_lanes + own)
            words = [x for i in range(0, COLUMNS, 4) for x in m.read_words(at, 4, 4 * i)]
            return self._with(sums, [m.real(x) for x in words])

        own = self.lane.lane % self.row_lanes
        zeros = [m.word(0.0)] * COLUMNS
        sums = m.repeat(spec.variant.warps * self.rows, add, zeros, unrolled=False)
        words = self._packed([x * (1 / spec.compress_block) for x in sums])
        pages = self._one([f"compressed_{kind}" for kind in KINDS], value)
        at = value, spec.per_page, page, slot, words
        if not spec.fp8:
            self._put(pages, *at)
            return
        m.when(m.same(value, 0), lambda: self._put(pages, *at))
        scales = self._one(["compressed_value_scale"], value)
        m.when(m.same(value, 1), lambda: self._put_rounded(pages, scales, *at))

    def _in_ring(self, value: Any, position: Any) -> Any:
        """The lane's columns of a token of the row's ring; of a row that has none, of another's."""
        m, ring = self.lane.m, self.lane.spec.ring
        base = self._head(self._one([f"recent_{kind}" for kind in KINDS], value), value, 2)
        slot = m.smaller(m.larger(self.ring, 0), self.rings - 1)
        row = slot * ring + m.larger(position, 0) % ring
        return m.beyond(base, row, self._row_bytes(value, 2))

    def _rounded(self, words: list) -> tuple[list, Any]:
        """Codes of a lane's columns and the scale of the row, as `nsa_core.rounding.rounded`."""
        m, x = self.lane.m, self._numbers(words)
        largest = m.size(x[0])
        for y in x[1:]:
            largest = m.larger(largest, m.size(y))
        # Sizes are ordered as their bits are, NaN above infinity.
        largest = m.larger(m.real(m.largest(m.bits(largest))), LEAST)
        factor = m.divided(LARGEST, largest)
        x = [y * factor for y in x]
        return [m.codes(x[i : i + 4]) for i in (0, 4)], largest * (1 / LARGEST)

    # Where things lie. `value` says whether of values, else of keys.

    def _put(self, pages: Any, value: Any, rows: int, page: Any, row: Any, words: list) -> None:
        """Puts a row in its page, of `rows`."""
        self._put_words(self._in_page(pages, value, 2, rows, page, row), value, words)

    def _put_rounded(
        self, pages: Any, scales: Any, value: Any, rows: int, page: Any, row: Any, words: list
    ) -> None:
        m, spec = self.lane.m, self.lane.spec
        codes, scale = self._rounded(words)
        self._put_words(self._in_page(pages, value, 1, rows, page, row), value, codes)
        at = m.beyond(
            m.beyond(scales, self.kv_head, 4 * rows), page, 4 * rows * spec.Hkv, row * 4
        )
        m.put(at, m.bits(scale), m.same(self.lane.lane, 0))

    def _in_page(
        self, pages: Any, value: Any, size: int, rows: int, page: Any, row: Any
    ) -> Any:
        m, row_bytes = self.lane.m, self._row_bytes(value, size)
        at = m.beyond(self._head(pages, value, size), page, row_bytes * rows)
        return m.beyond(at, row, row_bytes)

    def _put_words(self, place: Any, value: Any, words: list) -> None:
        m = self.lane.m
        only = self.lane.lane < self._width(value) // COLUMNS
        for i in range(0, len(words), 2):
            at = m.beyond(place, m.word(i), 4) if i else place
            m.put_words(at, words[i : i + 2], only)

    def _one(self, names: list[str], number: Any) -> Any:
        """Where the array of this number begins."""
        m = self.lane.m
        found, *others = (m.element(getattr(self.arrays, name)) for name in names)
        for i, other in enumerate(others, 1):
            found = m.where(m.same(number, i), other, found)
        return found

    def _head(self, array: Any, value: Any, size: int) -> Any:
        """The lane's columns of the first row; lanes beyond the width read the last ones."""
        m, width = self.lane.m, self._width(value)
        column = m.smaller(self.lane.lane % self.row_lanes, width // COLUMNS - 1)
        return m.beyond(m.beyond(array, self.kv_head, width * size), column, size * COLUMNS)

    def _width(self, value: Any) -> Any:
        spec = self.lane.spec
        return spec.D if spec.D == spec.Dv else self.lane.m.where(value > 0, spec.Dv, spec.D)

    def _row_bytes(self, value: Any, size: int) -> Any:
        """Of all heads."""
        return self._width(value) * (size * self.lane.spec.Hkv)

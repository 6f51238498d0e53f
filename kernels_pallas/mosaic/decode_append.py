"""The new tokens of a decode step: their rows and the means that they finish, put in the pages.

The first CTA of a cluster does it for the cluster's key/value head, before any CTA reads a page:
of all new tokens of the row up to the cluster's own, since clusters do not wait for each other.
Those of later tokens of the row put the same bits there once more.

    token p           every branch's key and value, at p % block of its page
    p = i d + l - 1   the mean of the last l tokens too: new ones from the call, others from pages
"""

import math
from typing import Any

from kernels_pallas.mosaic.decode_lane import Lane
from kernels_pallas.specs.decode import RAW

COLUMNS = 8  # of a row that a lane has, 16 bytes
ROWS = 8  # of a mean that are under way together
KINDS = "key", "value"


class NewTokens:
    """Of a cluster. The page table is in shared memory; it has the nearest page that exists where
    none does, so the pages of new tokens come from `arrays`.
    """

    def __init__(self, lane: Lane, sizes: Any, arrays: Any, token: Any, kv_head: Any):
        m, spec = lane.m, lane.spec
        self.lane, self.arrays, self.kv_head = lane, arrays, kv_head
        self.columns, self.pool = m.word(sizes.table_pages), m.word(sizes.pages)
        self.row, self.count = token // spec.q_len, token % spec.q_len + 1
        self.length = m.fetch(m.element(arrays.lengths, (self.row, 4)))
        self.first = self.length - spec.q_len  # the position of the row's first

    def put(self) -> None:
        m = self.lane.m

        def token(i, nothing):
            self._put_token(i)
            return nothing

        first_cta = m.same(self.lane.rank, 0)
        m.when(first_cta, lambda: m.repeat(self.count, token, [], unrolled=False))

    def _put_token(self, i: Any) -> None:
        m, spec = self.lane.m, self.lane.spec
        position = self.first + i
        column = m.larger(position, 0) // spec.block
        entry = self.row * self.columns + m.smaller(column, self.columns - 1)
        page = m.fetch(m.element(self.arrays.page_table, (entry, 4)))
        there = (self.length > 0) & (position >= 0) & (column < self.columns)
        there = there & (page >= 0) & (page < self.pool)
        new = self.row * spec.q_len + i
        inside = m.larger(position, 0) % spec.block
        for number, (branch, kind) in enumerate((b, k) for b in RAW for k in KINDS):
            self._by_warp(
                number, there, lambda b=branch, k=kind: self._put_row(b, k, new, page, inside)
            )
        begin = position - (spec.compress_block - 1)
        ends = there & (begin >= 0) & m.same(m.larger(begin, 0) % spec.stride, 0)
        slot = inside // spec.stride
        for number, kind in enumerate(KINDS):
            self._by_warp(number, ends, lambda k=kind: self._put_mean(k, begin, page, slot))

    def _by_warp(self, number: int, condition: Any, body: Any) -> None:
        lane = self.lane
        mine = lane.m.same(lane.warp, number % lane.spec.variant.warps)
        lane.m.when(condition & mine, body)

    def _put_row(self, branch: str, kind: str, new: Any, page: Any, inside: Any) -> None:
        m = self.lane.m
        words = m.fetch_words(self._new(branch, kind, new))
        self._put(f"{branch}_{kind}", self.lane.spec.block, kind, page, inside, words)

    def _put_mean(self, kind: str, begin: Any, page: Any, slot: Any) -> None:
        m, spec = self.lane.m, self.lane.spec
        together = math.gcd(spec.compress_block, ROWS)
        base = self._head(getattr(self.arrays, f"raw_{kind}"), kind)
        row_bytes = self._row_bytes(kind)

        def rows(i, sums):
            places = []
            for j in range(together):
                position = begin + i * together + j
                old = position < self.first
                entry = m.where(old, position, 0)
                number = m.read(self.lane.place("table") + entry // spec.block * 4)
                at = m.beyond(
                    base, number, spec.block * row_bytes, entry % spec.block * row_bytes
                )
                new = self.row * spec.q_len + m.larger(position - self.first, 0)
                places.append(m.where(old, at, self._new("raw", kind, new)))
            for words in [m.fetch_words(place) for place in places]:
                parts = [x for word in words for x in m.unpack(word, spec.dtype)]
                sums = [a + b for a, b in zip(sums, parts, strict=True)]
            return sums

        zeros = [m.word(0.0)] * COLUMNS
        sums = m.repeat(spec.compress_block // together, rows, zeros, unrolled=False)
        mean = [x * (1 / spec.compress_block) for x in sums]
        words = [m.pack(mean[i], mean[i + 1], spec.dtype) for i in range(0, COLUMNS, 2)]
        self._put(f"compressed_{kind}", spec.per_page, kind, page, slot, words)

    def _put(self, name: str, rows: int, kind: str, page: Any, row: Any, words: list) -> None:
        m, row_bytes = self.lane.m, self._row_bytes(kind)
        base = self._head(getattr(self.arrays, name), kind)
        place = m.beyond(base, page, rows * row_bytes, row * row_bytes)
        only = self.lane.lane < self._width(kind) // COLUMNS
        for i in (0, 2):
            m.put_words(m.beyond(place, m.word(0), 0, m.word(4 * i)), words[i : i + 2], only)

    def _new(self, branch: str, kind: str, row: Any) -> Any:
        base = self._head(getattr(self.arrays, f"new_{branch}_{kind}"), kind)
        return self.lane.m.beyond(base, row, self._row_bytes(kind), self.lane.m.word(0))

    def _head(self, array: Any, kind: str) -> Any:
        """The lane's columns of the first row; lanes beyond the width read the last ones."""
        m, width = self.lane.m, self._width(kind)
        column = m.smaller(self.lane.lane, width // COLUMNS - 1)
        return m.element(array, (self.kv_head, 2 * width), (column, 2 * COLUMNS))

    def _width(self, kind: str) -> int:
        return self.lane.spec.D if kind == "key" else self.lane.spec.Dv

    def _row_bytes(self, kind: str) -> int:
        """Of all heads."""
        return 2 * self._width(kind) * self.lane.spec.Hkv

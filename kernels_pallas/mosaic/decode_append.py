"""The new tokens of a decode step: their rows and the means that they finish, put in the pages.

The first CTA of a cluster does it for the cluster's key/value head, while others read what was
there before: of all new tokens of the row up to the cluster's own, since clusters do not wait for
each other. Those of later tokens of the row put the same bits there once more.

    token p           every branch's key and value, at p % block of its page: a warp a row
    p = i d + l - 1   the mean of the last l tokens too: new ones from the call, others from pages;
                      half of the warps add up shares of the key's, half of the value's

To pages in fp8 rows are rounded, and the window's tokens are read from the row's ring where it has
them as they were.
"""

import math
from typing import Any

from kernels_pallas.mosaic.decode_lane import Lane
from kernels_pallas.specs.decode import RAW
from kernels_pallas.specs.tile import LANES, cdiv

COLUMNS = 8  # of a row that a lane has, 16 bytes
ROWS = 8  # of a mean that are under way together
KINDS = "key", "value"
# As in `nsa_core.rounding`.
LARGEST, LEAST = 448.0, 1e-30
NEAR, LEAST_NEAR = 2.0**-4 + 2.0**-7, 2.0**-9


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
        if spec.fp8:
            self.ring = m.fetch(m.element(arrays.slots, (self.row, 4)))
            self.rings = m.word(sizes.rings)

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
        begin = position - (spec.compress_block - 1)
        ends = there & (begin >= 0) & m.same(m.larger(begin, 0) % spec.stride, 0)
        for number, kind in enumerate(KINDS):
            mine = ends & m.same(self.lane.warp % 2, number)
            m.when(mine, lambda k=kind: self._add_share(k, begin))
        for number, (branch, kind) in enumerate((b, k) for b in RAW for k in KINDS):
            self._by_warp(
                number, there, lambda b=branch, k=kind: self._put_row(b, k, new, page, inside)
            )
        if spec.fp8:
            kept = there & (self.ring >= 0) & (self.ring < self.rings)
            for number, kind in enumerate(KINDS, len(RAW) * len(KINDS)):
                self._by_warp(number, kept, lambda k=kind: self._keep_row(k, new, position))

        def put_means():
            m.sync_cta()
            slot = page, inside // spec.stride
            for number, kind in enumerate(KINDS):
                self._by_warp(number, ends, lambda k=kind: self._put_shares(k, *slot))
            m.sync_cta()  # the shares have been read

        m.when(ends, put_means)

    def _by_warp(self, number: int, condition: Any, body: Any) -> None:
        lane = self.lane
        mine = lane.m.same(lane.warp, number % lane.spec.variant.warps)
        lane.m.when(condition & mine, body)

    def _put_row(self, branch: str, kind: str, new: Any, page: Any, inside: Any) -> None:
        m = self.lane.m
        words = m.fetch_words(self._new(branch, kind, new))
        self._put(f"{branch}_{kind}", self.lane.spec.block, kind, page, inside, words)

    def _old(self, position: Any) -> tuple[Any, Any, Any]:
        """Whether a token was there before the call; then its page, and where it lies in it."""
        m, block = self.lane.m, self.lane.spec.block
        old = position < self.first
        entry = m.where(old, position, 0)
        return old, m.read(self.lane.place("table") + entry // block * 4), entry % block

    def _numbers(self, words: list) -> list:
        return [x for word in words for x in self.lane.m.unpack(word, self.lane.spec.dtype)]

    @staticmethod
    def _with(sums: list, row: list) -> list:
        return [a + b for a, b in zip(sums, row, strict=True)]

    def _packed(self, x: list) -> list:
        m, dtype = self.lane.m, self.lane.spec.dtype
        return [m.pack(x[i], x[i + 1], dtype) for i in range(0, COLUMNS, 2)]

    # Means.

    def _add_share(self, kind: str, begin: Any) -> None:
        """Adds up a warp's share of the window: of the call's tokens as they are, of older ones
        from the pages. Where these are in fp8, older ones are read from the row's ring where it has
        what the pages' may have been rounded from (`nsa_core.rounding.is_of`).

        Rows are asked for together, before the first is added.
        """
        m, spec, lane = self.lane.m, self.lane.spec, self.lane
        apart = spec.variant.warps // 2
        share = cdiv(spec.compress_block, apart)
        together = math.gcd(share, ROWS // 2 if spec.fp8 else ROWS)
        size = spec.token_bytes
        pages, page_rows = (
            self._head(getattr(self.arrays, f"raw_{kind}"), kind, size),
            spec.block,
        )
        row_bytes = self._row_bytes(kind, size)

        def rows(i, sums):
            found = []
            for j in range(together):
                tap = (lane.warp >> 1) + (i * together + j) * apart
                position = begin + m.smaller(tap, spec.compress_block - 1)
                old, number, inside = self._old(position)
                at = m.beyond(pages, number, page_rows * row_bytes, inside * row_bytes)
                new = self.row * spec.q_len + m.larger(position - self.first, 0)
                given = self._new("raw", kind, new)
                if not spec.fp8:
                    words = m.fetch_words(m.where(old, at, given))
                    found.append((tap, lambda words=words: self._numbers(words)))
                    continue
                scales = self._scales(f"raw_{kind}", page_rows)
                scale = m.fetch(m.beyond(scales, number, 4 * spec.Hkv * page_rows, inside * 4))
                kept = m.where(old, self._in_ring(kind, position), given)
                words = m.fetch(at), m.fetch(at, 4), scale, m.fetch_words(kept)
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
            m.write_words(self._share(lane.warp), sums[i : i + 4], 4 * i)

    def _token(self, old: Any, low: Any, high: Any, scale: Any, kept: list) -> list:
        """A lane's columns of a token of the window."""
        m, x = self.lane.m, self._numbers(kept)
        scale = m.real(scale)
        halves = [half for word in (low, high) for half in m.widened(word)]
        stored = [y * scale for half in halves for y in m.unpack(half, "float16")]
        stored = self._numbers(self._packed(stored))
        near = self.lane.lane >= 0
        for a, b in zip(x, stored, strict=True):
            most = m.multiply_add(self._size(b), NEAR, scale * LEAST_NEAR)
            near = near & (self._size(a - b) <= most)
        rounded = old & m.different(m.votes(near), -1)
        return [m.where(rounded, b, a) for a, b in zip(x, stored, strict=True)]

    def _share(self, warp: Any) -> Any:
        """Where a lane of a warp keeps its columns of a share."""
        lane = self.lane
        return lane.place("logits") + (warp * LANES + lane.lane) * (4 * COLUMNS)

    def _put_shares(self, kind: str, page: Any, slot: Any) -> None:
        m, warps = self.lane.m, self.lane.spec.variant.warps
        sums = [m.word(0.0)] * COLUMNS
        for warp in range(KINDS.index(kind), warps, 2):
            at = self._share(m.word(warp))
            words = [x for i in range(0, COLUMNS, 4) for x in m.read_words(at, 4, 4 * i)]
            sums = self._with(sums, [m.real(x) for x in words])
        spec = self.lane.spec
        words = self._packed([x * (1 / spec.compress_block) for x in sums])
        self._put(f"compressed_{kind}", spec.per_page, kind, page, slot, words)

    def _keep_row(self, kind: str, new: Any, position: Any) -> None:
        words = self.lane.m.fetch_words(self._new("raw", kind, new))
        self._put_words(self._in_ring(kind, position), kind, words)

    def _in_ring(self, kind: str, position: Any) -> Any:
        """The lane's columns of a token of the row's ring; of a row that has none, of another's."""
        m, ring = self.lane.m, self.lane.spec.ring
        base = self._head(getattr(self.arrays, f"recent_{kind}"), kind)
        slot = m.smaller(m.larger(self.ring, 0), self.rings - 1)
        row_bytes = self._row_bytes(kind)
        return m.beyond(base, slot, ring * row_bytes, m.larger(position, 0) % ring * row_bytes)

    def _rounded(self, words: list) -> tuple[list, Any]:
        """Codes of a lane's columns and the scale of the row, as `nsa_core.rounding.rounded`."""
        m, x = self.lane.m, self._numbers(words)
        largest = self._size(x[0])
        for y in x[1:]:
            largest = m.larger(largest, self._size(y))
        # Sizes are ordered as their bits are, NaN above infinity.
        largest = m.larger(m.real(m.largest(m.bits(largest))), LEAST)
        factor = m.divided(LARGEST, largest)
        x = [y * factor for y in x]
        return [m.codes(x[i : i + 4]) for i in (0, 4)], largest * (1 / LARGEST)

    def _size(self, x: Any) -> Any:
        m = self.lane.m
        return m.real(m.bits(x) & 0x7FFFFFFF)

    # Where things lie.

    def _put(self, name: str, rows: int, kind: str, page: Any, row: Any, words: list) -> None:
        m, spec, array = self.lane.m, self.lane.spec, getattr(self.arrays, name)
        if not spec.fp8 or name == "compressed_key":
            row_bytes = self._row_bytes(kind)
            base = self._head(array, kind)
            at = m.beyond(base, page, rows * row_bytes, row * row_bytes)
            self._put_words(at, kind, words)
            return
        codes, scale = self._rounded(words)
        row_bytes = self._row_bytes(kind, 1)
        base = self._head(array, kind, 1)
        at = m.beyond(base, page, rows * row_bytes, row * row_bytes)
        self._put_words(at, kind, codes)
        base = self._scales(name, rows)
        at = m.beyond(base, page, 4 * rows * spec.Hkv, row * 4)
        m.put(at, m.bits(scale), m.same(self.lane.lane, 0))

    def _put_words(self, place: Any, kind: str, words: list) -> None:
        m = self.lane.m
        only = self.lane.lane < self._width(kind) // COLUMNS
        for i in range(0, len(words), 2):
            m.put_words(m.beyond(place, m.word(0), 0, m.word(4 * i)), words[i : i + 2], only)

    def _scales(self, name: str, rows: int) -> Any:
        """Of the first page, which has `rows` tokens."""
        array = getattr(self.arrays, f"{name}_scale")
        return self.lane.m.element(array, (self.kv_head, 4 * rows))

    def _new(self, branch: str, kind: str, row: Any) -> Any:
        base = self._head(getattr(self.arrays, f"new_{branch}_{kind}"), kind)
        return self.lane.m.beyond(base, row, self._row_bytes(kind), self.lane.m.word(0))

    def _head(self, array: Any, kind: str, size: int = 2) -> Any:
        """The lane's columns of the first row; lanes beyond the width read the last ones."""
        m, width = self.lane.m, self._width(kind)
        column = m.smaller(self.lane.lane, width // COLUMNS - 1)
        return m.element(array, (self.kv_head, size * width), (column, size * COLUMNS))

    def _width(self, kind: str) -> int:
        return self.lane.spec.D if kind == "key" else self.lane.spec.Dv

    def _row_bytes(self, kind: str, size: int = 2) -> int:
        """Of all heads."""
        return size * self._width(kind) * self.lane.spec.Hkv

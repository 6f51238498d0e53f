"""The keys and values of a warp in a decode step: its ring of strips, and products with them.

A strip is 16 rows of K or of V. A warp copies it 16 bytes a lane and reads it with other lanes
than copied it: a ring is private to its warp, whose lanes meet before they read a strip and
before they copy over it. It lies in parts of 64 columns, `[16 rows, 128 bytes]`, and at the end
perhaps one of 32 columns, `[16 rows, 64 bytes]`.

    copy   8 lanes have the 128 bytes of a row's part: one line of memory, all banks
    read   8 lanes have 2 rows of K, or 4 of V; the chunks of 16 bytes of a row are exchanged
           (`Queue.swizzle`) so that these lie in all banks too

    S = Q K^T   the order of d in a sum is free: a lane's 8 neighbours of a K row serve two
                products, with Q loaded in the same order
    O += P V    pairs of keys come from two rows of V (`halves`); output tile (h, e) has in its
                column i the width d = 64 h + 8 i + e, so a lane ends with 16 neighbours

The ring is one queue of turns over all branches, and of what comes next there are always
`stages - 1` strips under way, while warps wait for others too:

    turn   0 ..   K compressed, K sliding, V compressed, V sliding   known from the length
           then   K selected, V selected                            known after the top-n
"""

from typing import Any

from kernels_pallas.mosaic.decode_lane import Lane, Words, Work
from kernels_pallas.specs.decode import STRIP

CHUNK = 32  # columns of a K row that four lanes read, 8 each
PART = 64  # columns that lie together, and of V those whose tiles a lane reads at a time: 8
ROW_BYTES = 2 * PART  # of a part
PART_BYTES = STRIP * ROW_BYTES
# Codes are read as 2^-120 times their numbers (`warp_cluster.WIDENED`): scales make up for half of
# it, what logits and the output are multiplied by at last for the rest. Neither is near a border.
WIDER = 2.0**60


class Queue:
    """The strips that a warp reads, and its ring.

    Attributes:
      limit: turns that are known from the length.
      total: all turns.
      near: the first turn of values.
    """

    def __init__(self, lane: Lane, work: Work, arrays: Any, kv_head: Any):
        """`arrays` has the pages of each branch by name."""
        m, spec = lane.m, lane.spec
        self.lane, self.work = lane, work
        self.near = work.mine + spec.sliding_strips
        self.limit = self.near * 2
        self.total = self.limit + 2 * spec.selected_strips
        self.ring = lane.place("ring") + lane.warp * spec.ring_bytes
        self.read_keys_at, self.read_values_at = self._readers()
        self.selected_start = lambda i: m.word(-1)  # until the blocks are known

        def heads(name: str, width: int) -> Words:
            branches = "compressed", "selected", "sliding"
            places = {branch: getattr(arrays, f"{branch}_{name}") for branch in branches}
            sizes = dict.fromkeys(branches, spec.token_bytes)
            if name == "key":
                sizes["compressed"] = 2
            return [m.element(x, (kv_head, sizes[b] * width)) for b, x in places.items()]

        def scales(name: str) -> Words:
            rows = {"compressed": spec.per_page, "selected": spec.block, "sliding": spec.block}
            places = {b: getattr(arrays, f"{b}_{name}_scale", None) for b in rows}
            return [
                None if x is None else m.element(x, (kv_head, 4 * rows[b]))
                for b, x in places.items()
            ]

        self.keys, self.values = heads("key", spec.D), heads("value", spec.Dv)
        if spec.fp8:
            self.key_scales, self.value_scales = scales("key"), scales("value")

    def _stage(self, turn: Any) -> Any:
        spec = self.lane.spec
        return self.ring + turn % spec.variant.stages * spec.stage_bytes

    def take(self, turn: Any) -> Any:
        """The stage of a turn, whose strip has arrived."""
        self.lane.m.wait_for_copies(self.lane.spec.variant.stages - 1)
        self.lane.m.sync()
        return self._stage(turn)

    def _readers(self) -> tuple[list[Any], Any]:
        """Where in a part the lane reads first: of K in either half of the columns, and of V."""
        lane = self.lane
        key = lane.row * ROW_BYTES + lane.pair * 16
        odd = (lane.row & 1) << 6
        value = lane.pair * (2 * ROW_BYTES) + ((lane.row << 4) ^ (lane.pair << 5))
        return [key + odd, key + (64 - odd)], value

    def refill(self, turn: Any, chosen: bool) -> None:
        """Asks for the strip of `turn`, if there is one; `chosen`: the blocks are known."""
        m = self.lane.m
        end = self.total if chosen else self.limit
        m.sync()  # what it is copied over has been read
        m.when(turn < end, lambda: self._copy(turn, chosen))
        m.end_copies()

    def fill(self) -> None:
        """Asks for the first strips."""
        self._refill_stages(lambda i: self.refill(i, False))

    def catch_up(self, done: Any) -> None:
        """Asks for the selected strips among the next `stages` after `done` turns, which were
        left out while the blocks were not known.
        """
        m = self.lane.m

        def late(i):
            turn = done + i
            left_out = (turn >= self.limit) & (turn < self.total)
            m.when(left_out, lambda: self._copy(turn, True))
            m.end_copies()

        m.sync()
        self._refill_stages(late)

    def _refill_stages(self, body) -> None:
        def turn(i, nothing):
            body(i)
            return nothing

        self.lane.m.repeat(self.lane.spec.variant.stages, turn, [], unrolled=False)

    def _copy(self, turn: Any, chosen: bool) -> None:
        lane, work, spec = self.lane, self.work, self.lane.spec
        m, selected = lane.m, spec.selected_strips
        values = turn >= self.near
        i = turn - m.where(values, self.near, 0)
        compressed = i < work.mine
        first = m.where(
            compressed,
            work.compressed_strip(lane, i) * STRIP,
            work.sliding_key(lane, i - work.mine),
        )
        late = None
        if chosen:
            late, i = turn >= self.limit, m.larger(turn - self.limit, 0)
            second = i >= selected
            start = self.selected_start(i - m.where(second, selected, 0))
            compressed = compressed & (turn < self.limit)
            first = m.where(late, m.larger(start, 0), first)
            values = m.where(late, second, values)
        to, rows = self._stage(turn), _Rows(self, first, compressed)
        pages = lambda branches: self._pages(branches, compressed, late)

        def copy_values():
            rows.copy_values(to, pages(self.values))
            if spec.fp8:
                rows.copy_scales(to, pages(self.value_scales))

        m.when(values, copy_values)
        keys = m.same(m.number(values), 0)
        if not spec.fp8:
            m.when(keys, lambda: rows.copy_keys(to, pages(self.keys), 2))
            return
        m.when(keys & compressed, lambda: rows.copy_keys(to, self.keys[0], 2))

        def copy_raw_keys():
            rows.copy_keys(to, self._raw_pages(self.keys, late), 1)
            rows.copy_scales(to, self._raw_pages(self.key_scales, late))

        m.when(keys & m.same(m.number(compressed), 0), copy_raw_keys)

    def _pages(self, branches: Words, compressed: Any, late: Any) -> Any:
        return self.lane.m.where(compressed, branches[0], self._raw_pages(branches, late))

    def _raw_pages(self, branches: Words, late: Any) -> Any:
        _, second, third = branches
        return third if late is None else self.lane.m.where(late, second, third)

    # Products.

    def logits(self, turn: Any, query: list[Words]) -> list[Words]:
        """Q K^T of a strip: two tiles of `[16 heads, 8 keys]`."""
        m, spec = self.lane.m, self.lane.spec
        stage, tiles = self.take(turn), []
        halves = [stage + at for at in self.read_keys_at]
        rest = stage + (self.lane.row * (ROW_BYTES // 2) + self.lane.pair * 16)
        for tile in range(2):
            acc = [m.word(0.0)] * 4
            for chunk in range(spec.D // CHUNK):
                part, half = divmod(chunk, 2)
                start = part * PART_BYTES
                if start + PART_BYTES <= 2 * STRIP * spec.D:
                    k = m.read_words(halves[half], 4, start + 8 * ROW_BYTES * tile)
                else:
                    k = m.read_words(rest, 4, start + 4 * ROW_BYTES * tile)
                acc = m.multiply(acc, query[2 * chunk], k[:2], spec.dtype)
                acc = m.multiply(acc, query[2 * chunk + 1], k[2:], spec.dtype)
            tiles.append(acc)
        return tiles

    def rounded_logits(self, turn: Any, query: list[Words], begin: Any) -> list[Words]:
        """`logits` of a strip of keys in fp8 from `begin` on, `1 / WIDER` times each."""
        m, spec = self.lane.m, self.lane.spec
        stage, tiles = self.take(turn), []
        row, pair = self.lane.row, self.lane.pair * 8
        # Of 128 bytes of a row its four parts of 32 are exchanged; a lane has 8 bytes of each.
        whole = [stage + (row * ROW_BYTES + ((row & 3) << 5 ^ 32 * i) + pair) for i in range(4)]
        rest = stage + (row * (ROW_BYTES // 2) + pair)
        scales = self.scales(turn, begin)
        for tile in range(2):
            acc = [m.word(0.0)] * 4
            for chunk in range(spec.D // CHUNK):
                part, i = divmod(chunk, 4)
                start = part * PART_BYTES
                if start + PART_BYTES <= STRIP * spec.D:
                    codes = m.read_words(whole[i], 2, start + 8 * ROW_BYTES * tile)
                else:
                    codes = m.read_words(rest, 2, start + 4 * ROW_BYTES * tile + CHUNK * i)
                for half, word in enumerate(codes):
                    k = m.widened(word)
                    acc = m.multiply(acc, query[2 * chunk + half], k, spec.dtype)
            tiles.append([x * scales[tile][i % 2] for i, x in enumerate(acc)])
        return tiles

    def scales(self, turn: Any, begin: Any) -> list[Words]:
        """Of the keys of the lane's columns of two tiles, `WIDER` times each, of a strip that has
        been waited for; `begin`: its first key.
        """
        m, spec = self.lane.m, self.lane.spec
        at = self._stage(turn) + ((begin & 3) + self.lane.pair * 2 << 2)
        keys = [[8 * tile + e for e in range(2)] for tile in range(2)]
        return [[m.real(m.read(at, spec.scales_at + 4 * x)) * WIDER for x in y] for y in keys]

    def add_rounded(
        self, acc: list[Words], turn: Any, p: list[Words], begin: Any
    ) -> list[Words]:
        """`acc + P V` of a strip of values in fp8 from key `begin` on, `1 / WIDER` times that; `p`
        in float32, 0 where a scale may be anything.
        """
        m, spec = self.lane.m, self.lane.spec
        lane, stage, acc = self.lane, self.take(turn), list(acc)
        scales = self.scales(turn, begin)
        p = [
            [m.where(m.same(x, 0.0), 0.0, x * scales[t][i % 2]) for i, x in enumerate(tile)]
            for t, tile in enumerate(p)
        ]
        words = [
            m.pack(p[t][2 * r], p[t][2 * r + 1], spec.dtype) for t in range(2) for r in (0, 1)
        ]
        wide = spec.Dv == 2 * PART
        row_bytes = ROW_BYTES if wide else ROW_BYTES // 2
        for part in range(spec.Dv // PART):
            # The parts of 32 bytes of a lane's four rows are exchanged alike.
            column = (part * PART + lane.row * 8) ^ (lane.pair << 5) if wide else lane.row * 8
            at = stage + (lane.pair * (2 * row_bytes) + column)
            v = [m.read_words(at, 2, key * row_bytes) for key in (0, 1, 8, 9)]
            for e in range(8):
                word, place = divmod(e, 4)
                pairs = [m.widened_pair(v[i][word], v[i + 1][word], place) for i in (0, 2)]
                tile = part * 8 + e
                acc[tile] = m.multiply(acc[tile], words, pairs, spec.dtype)
        return acc

    def add(self, acc: list[Words], turn: Any, p: Words) -> list[Words]:
        """`acc + P V` of a strip, P `[16 heads, 16 keys]`."""
        m, spec = self.lane.m, self.lane.spec
        stage, acc = self.take(turn) + self.read_values_at, list(acc)
        for part in range(spec.Dv // PART):
            start = part * PART_BYTES
            v = [m.read_words(stage, 4, start + key * ROW_BYTES) for key in (0, 1, 8, 9)]
            for e in range(8):
                pairs = [m.halves(v[i][e // 2], v[i + 1][e // 2], e % 2) for i in (0, 2)]
                tile = part * 8 + e
                acc[tile] = m.multiply(acc[tile], p, pairs, spec.dtype)
        return acc


class _Rows:
    """The rows of a strip, from row `first` of their branch on.

    A row that was never written may be NaN, and 0 * NaN is not 0: a row past what the query
    sees becomes the last that it sees, a slot before the first compressed token the first.
    """

    def __init__(self, queue: Queue, first: Any, compressed: Any):
        lane, work = queue.lane, queue.work
        m, spec = lane.m, lane.spec
        self.lane, self.m, self.first = lane, m, first
        lead = spec.cover - 1
        self.lowest = m.where(compressed, lead, 0)
        self.highest = m.where(compressed, work.count + (lead - 1), m.larger(work.seen - 1, 0))
        self.shift, self.mask, self.page_rows = (
            m.where(compressed, a, b)
            for a, b in (
                (spec.per_page.bit_length() - 1, spec.block.bit_length() - 1),
                (spec.per_page - 1, spec.block - 1),
                (spec.per_page * spec.Hkv, spec.block * spec.Hkv),
            )
        )

    def _place(self, row: Any) -> tuple[Any, Any]:
        """The page of a row, and its number there."""
        m = self.m
        row = m.larger(m.smaller(self.first + row, self.highest), self.lowest)
        page = m.read(self.lane.place("table") + ((row >> self.shift) << 2))
        return page, row & self.mask

    def _address(self, pages: Any, row: Any, row_bytes: int, column: Any) -> Any:
        """Of byte `column` of a row; each row has all heads."""
        page, row = self._place(row)
        inside = row * (self.lane.spec.Hkv * row_bytes) + column
        return self.m.beyond(pages, page, self.page_rows * row_bytes, inside)

    def copy_scales(self, to: Any, scales: Any) -> None:
        """A lane four rows: those of the strip, from a multiple of four on. Rows past the last one
        that is seen may be anything.
        """
        lane, m = self.lane, self.m
        page, row = self._place(((self.first >> 2) + lane.lane << 2) - self.first)
        at = m.beyond(scales, page, self.page_rows * 4, (row >> 2) * 16)
        m.copy(to + lane.lane * 16, at, lane.spec.scales_at, 0, lane.lane < STRIP // 4 + 1)

    def copy_keys(self, to: Any, pages: Any, size: int) -> None:
        """The lowest bit of a row's number exchanges the halves of its parts; in fp8 (`size` 1) the
        lowest two bits its parts of 32 bytes.
        """
        lane = self.lane.lane
        turned = ((lane >> 3) & 1) << 2 if size == 2 else (lane >> 3) << 1
        self._copy(to, pages, size * self.lane.spec.D, [(lane & 7) ^ turned] * 2)

    def copy_values(self, to: Any, pages: Any) -> None:
        """Bits 1 and 2 of a row's number exchange the chunks of its parts."""
        lane, spec = self.lane.lane, self.lane.spec
        even = (lane & 7) ^ ((lane >> 3) & 2)
        self._copy(to, pages, spec.token_bytes * spec.Dv, [even, even ^ 4])

    def _copy(self, to: Any, pages: Any, row_bytes: int, chunks: Words) -> None:
        """8 lanes a row's part; `chunks`: the place of the lane's, in rows 0 to 3 of 8 and 4 to 7.

        All addresses come first, so that their reads of the table are under way together.
        """
        m, lane, parts = self.m, self.lane.lane, row_bytes // ROW_BYTES
        row, source = lane >> 3, (lane & 7) * 16
        groups = range(0, STRIP, 4) if parts else ()
        places = [self._address(pages, row + first, row_bytes, source) for first in groups]
        tail = range(0, STRIP if row_bytes % ROW_BYTES else 0, 8)
        half_row, half_source = lane >> 2, (lane & 3) * 16 + parts * ROW_BYTES
        ends = [
            self._address(pages, half_row + first, row_bytes, half_source) for first in tail
        ]
        into = [to + row * ROW_BYTES + (chunk << 4) for chunk in chunks]
        for i, at in enumerate(places):
            for part in range(parts):
                offset = part * PART_BYTES + 4 * ROW_BYTES * i
                m.copy(into[i % 2], at, offset, part * ROW_BYTES)
        last = to + lane * 16
        for i, at in enumerate(ends):
            m.copy(last, at, parts * PART_BYTES + 4 * ROW_BYTES * i, 0)


def query_fragments(lane: Lane, query: Any, token: Any, kv_head: Any) -> list[Words]:
    """Q of the group as left operands, in the order of columns of `Queue.logits`."""
    m, spec = lane.m, lane.spec
    row_bytes, found = 2 * spec.D, []
    for chunk in range(spec.D // CHUNK):
        low, high = (
            m.fetch_words(
                m.element(
                    query,
                    (token, spec.H * row_bytes),
                    (kv_head, spec.G * row_bytes),
                    (row, row_bytes),
                    (lane.pair, 16),
                    (chunk, 2 * CHUNK),
                )
            )
            for row in lane.rows()
        )
        found += [[low[i], high[i], low[i + 1], high[i + 1]] for i in (0, 2)]
    return found

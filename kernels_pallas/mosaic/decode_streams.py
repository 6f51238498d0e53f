"""In a decode step, each warp loads keys and values into a ring buffer of strips, and multiplies Q
and P with the strips.

A strip is 16 rows of K or of V, and begins at a multiple of 16. A warp copies a strip with 16 bytes
per lane. Each lane reads bytes of the strip that other lanes copied. Each warp has its own ring
buffer. The lanes of the warp synchronize before they read a strip and before they overwrite it. A
strip is stored as parts `[16 rows, 128 bytes]`, possibly followed by a part `[16 rows, 64 bytes]`.
In each row of a part, the 8 chunks of 16 bytes are permuted by the row's index (`turned`). The
permutation spreads the accesses of 8 lanes over all banks:

| access    | chunks of eight lanes                                    |
|-----------|----------------------------------------------------------|
| copy      | the part of one row                                      |
| read of K | 4 chunks of each of 2 rows                               |
| read of V | one chunk of each of 8 rows, which `ldmatrix` transposes |

The product Q K^T may sum the columns d in any order, and Q has the same order of columns as K.
Column i of the output tile (c, e) of V has d = 16 c + 8 e + i in 16 bits, and d = 16 c + 2 i + e in
8 bits.

The strips of all branches form one queue. A turn is an index in the queue. The next `stages - 1`
strips of the queue are always being loaded, even while the warp waits for other warps. The order of
the queue is:

| turns | strips                                           | known           |
|-------|--------------------------------------------------|-----------------|
| first | K compressed, K sliding, V compressed, V sliding | from the length |
| last  | K selected, V selected                           | after the top-n |

New tokens of this launch are in the warp's last compressed strip or in later strips of the queue. A
warp loads its last compressed strip at the turn `meeting`. Before the turn `meeting`, the warp
waits until the CTAs of the cluster have appended the new tokens.
"""

from typing import Any, NamedTuple

from kernels_pallas.mosaic.decode_lane import Lane, Words, Work
from kernels_pallas.specs.decode import STRIP, WARP_COPY_BYTES
from kernels_pallas.specs.tile import LOG2E

PART = 64  # number of 16-bit columns of a part
CHUNK_BYTES = 16
ROW_BYTES = 2 * PART  # bytes of a row of a part
PART_BYTES = STRIP * ROW_BYTES
LARGEST_EXPONENT = 14  # exponent of a row's largest element in float16 (`half_query`)
# In float16, the products of p and the scales of values must be less than 2^MOST_P_EXPONENT.
# Larger products are scaled to less than 2^(P_EXPONENT + 1).
P_EXPONENT, MOST_P_EXPONENT = 10, 15


def turned(row: Any, size: int) -> Any:
    """Return the number that is XORed with a chunk's index to permute the 8 chunks in a row of a
    part. `size` is the number of bytes per element. Eight adjacent rows have different numbers.
    Lanes that read K also read different chunks in 2 adjacent rows.
    """
    return row & 7 if size == 2 else (row & 1) << 2 | (row >> 1) & 3


class Queue:
    """The queue of strips that a warp reads, with the warp's ring buffer.

    Attributes:
      limit: Number of strips that are known from the length, before the blocks are selected.
      total: Number of all strips.
      near: Index in the queue of the first strip of V. Before the strip at `near`, the queue has
        the strips of K of the compressed and the sliding branch.
    """

    def __init__(self, lane: Lane, work: Work, arrays: Any, kv_head: Any):
        """Prepare the queue. `arrays` has the pages of each branch by name."""
        self.m, self.spec = m, spec = lane.m, lane.spec
        self.lane, self.work = lane, work
        self.near = work.mine + work.sliding
        self.limit = self.near * 2
        self.total = self.limit + 2 * spec.selected_strips
        self.meeting = m.larger(work.mine - 1, 0)
        self.ring = lane.place("ring") + lane.warp * spec.ring_bytes
        self.selected_start = lambda i: m.word(-1)  # until the blocks are known

        def pages(branch: str) -> list[_Pages]:
            rows = spec.per_page if branch == "compressed" else spec.block
            found = []
            for kind, width in (("key", spec.D), ("value", spec.Dv)):
                name = f"{branch}_{kind}"
                size = 2 if name == "compressed_key" else spec.token_bytes
                address = m.element(getattr(arrays, name), (kv_head, size * width))
                scales = getattr(arrays, f"{name}_scale", None)
                if scales is not None:
                    scales = m.element(scales, (kv_head, 4 * rows))
                found.append(_Pages(lane, rows, size * width, size, address, scales))
            return found

        self.compressed, self.selected, self.sliding = map(
            pages, ("compressed", "selected", "sliding")
        )
        row, pair = lane.row, lane.pair

        def chunk(number: Any, size: int) -> Any:
            """Return the offset of chunk `number` in the lane's row of K."""
            return row * ROW_BYTES + ((number ^ turned(row, size)) << 4)

        self.read_keys_at = [chunk(pair * 2 + i, 2) for i in range(2)]
        self.read_rounded_keys_at = [chunk(pair + 4 * i, 1) for i in range(2)]
        key, next_chunk = lane.lane & STRIP - 1, lane.lane >> 4
        self.read_values_at = [
            key * ROW_BYTES + ((next_chunk + 2 * i ^ turned(key, spec.token_bytes)) << 4)
            for i in range(4)
        ]
        self.read_narrow_values_at = key * PART + (next_chunk << 4)

    def _stage(self, turn: Any) -> Any:
        spec = self.spec
        return self.ring + turn % spec.variant.stages * spec.stage_bytes

    def take(self, turn: Any) -> Any:
        """Wait for the strip at index `turn` of the queue and return its stage."""
        self.m.wait_for_copies(self.spec.variant.stages - 1)
        self.m.sync()
        return self._stage(turn)

    def refill(self, turn: Any, chosen: bool, meets: bool = False) -> None:
        """Start to load the strip of `turn`, if such a strip exists.

        Args:
          turn: Index of the strip in the queue.
          chosen: Whether the selected blocks are known.
          meets: Whether the warp may still have to wait for the cluster.
        """
        m = self.m
        end = self.total if chosen else self.limit
        m.sync()  # all lanes have read the strip that is overwritten now
        if meets:
            m.when(m.same(turn, self.meeting), m.wait_for_cluster)
        m.when(turn < end, lambda: self._copy(turn, chosen))
        m.end_copies()

    def fill_before_meeting(self) -> None:
        """Load the strips at the start of the queue whose tokens all existed before the launch."""
        last = self.m.smaller(self.meeting, self.limit)
        self._first_turns(lambda turn: turn < last, False)

    def fill(self) -> None:
        """Load the strips at the start of the queue that `fill_before_meeting` did not load."""
        m = self.m

        def rest(turn):
            m.when(m.same(turn, self.meeting), m.wait_for_cluster)
            return (turn >= self.meeting) & (turn < self.limit)

        self._first_turns(rest, False)

    def catch_up(self, done: Any) -> None:
        """Load the selected branch's strips at indices `done .. done + stages - 1` of the queue.

        The strips of the selected branch were skipped before the selected blocks were known.
        """
        self.m.sync()
        left_out = lambda turn: (turn >= self.limit) & (turn < self.total)
        self._first_turns(left_out, True, done)

    def _first_turns(self, wanted, chosen: bool, done: Any = 0) -> None:
        """Load the `wanted` strips at indices `done .. done + stages - 1` of the queue."""
        m = self.m

        def turn(i):
            now = done + i
            m.when(wanted(now), lambda: self._copy(now, chosen))
            m.end_copies()

        m.repeat(self.spec.variant.stages, turn, unrolled=False)

    def _copy(self, turn: Any, chosen: bool) -> None:
        lane, work, spec = self.lane, self.work, self.spec
        m, selected = lane.m, spec.selected_strips
        values = turn >= self.near
        i = turn - m.where(values, self.near, 0)
        raw, compressed = i >= work.mine, i < work.mine
        first = m.where(
            compressed,
            work.compressed_strip(lane, i) * STRIP,
            work.sliding_key(lane, i - work.mine),
        )
        key, value = self.sliding
        if chosen:
            late, i = turn >= self.limit, m.larger(turn - self.limit, 0)
            second = i >= selected
            start = self.selected_start(i - m.where(second, selected, 0))
            raw, compressed = raw | late, compressed & (turn < self.limit)
            first = m.where(late, m.larger(start, 0), first)
            values = m.where(late, second, values)
            pairs = zip(self.selected, self.sliding, strict=True)
            key, value = (one.where(late, other) for one, other in pairs)
        to = self._stage(turn)
        m.when(compressed, lambda: self._copy_from(*self.compressed, values, to, first))
        m.when(raw, lambda: self._copy_from(key, value, values, to, first))

    def _copy_from(self, key: "_Pages", value: "_Pages", values: Any, *where: Any) -> None:
        m = self.m
        if key.alike(value):
            value.where(values, key).copy(*where)
            return
        m.when(values, lambda: value.copy(*where))
        m.when(m.same(m.number(values), 0), lambda: key.copy(*where))

    # Products.

    def logits(self, turn: Any, query: list[Words], units: Words | None = None) -> list[Words]:
        """Return `scale log2(e) Q K^T` of a strip, as two tiles `[16 heads, 8 keys]`.

        For keys in 16 bits, `query` is the result of `query_fragments` and `units` is None. For
        keys in fp8, `query` and `units` are the two results of `half_query`.
        """
        m, spec = self.m, self.spec
        stage, tiles = self.take(turn), []
        size = 2 if units is None else 1
        places = self.read_keys_at if units is None else self.read_rounded_keys_at
        halves = [stage + at for at in places]
        rest = stage + (self.lane.row * PART + self.lane.pair * CHUNK_BYTES)
        scales = [] if units is None else self._scales(stage)
        for tile in range(2):
            sums, products = [[m.word(0.0)] * 4 for _ in range(2)], 0
            for chunk in range(size * spec.D // PART):
                part, half = divmod(chunk, 2)
                start = part * PART_BYTES
                if start + PART_BYTES <= size * STRIP * spec.D:
                    k = m.read_words(halves[half], 4, start + 8 * ROW_BYTES * tile)
                else:
                    k = m.read_words(rest, 4, start + 4 * ROW_BYTES * tile)
                whole = [k[:2], k[2:]] if units is None else map(m.widened, k)
                for words in whole:  # alternate between two independent sums
                    own, operands = sums[products % 2], (query[products], words)
                    dtype = spec.dtype if units is None else "float16"
                    sums[products % 2] = m.multiply(own, *operands, dtype)
                    products += 1
            factors: Words = [spec.scale * LOG2E] * 4
            if units is not None:
                factors = [scale * unit for unit in units for scale in scales[tile]]
            total = [x + y for x, y in zip(*sums, strict=True)]
            tiles.append([x * factor for x, factor in zip(total, factors, strict=True)])
        return tiles

    def _scales(self, stage: Any) -> list[Words]:
        """Return the scales of a strip for the keys in the lane's columns of two tiles."""
        m, at = self.m, stage + self.lane.pair * 8
        places = [self.spec.scales_at + 32 * tile for tile in range(2)]
        return [[m.real(x) for x in m.read_words(at, 2, place)] for place in places]

    def clear(self, stage: Any, first: Any, low: Any, high: Any) -> None:
        """Set the values (V) of keys outside `low .. high - 1` to zero, in a strip that begins
        with key `first`. Elements of V that were never written may be NaN, and 0 * NaN is NaN.
        """
        m, lane, spec = self.m, self.lane, self.spec
        row_bytes = spec.token_bytes * spec.Dv

        def clear():
            key = first + (lane.lane >> 1)
            unseen = (key < low) | (key >= high)
            for start in range(0, row_bytes, ROW_BYTES):
                width = min(row_bytes - start, ROW_BYTES) // 2
                at = stage + (lane.lane * width)
                for i in range(0, width, CHUNK_BYTES):
                    m.write_words(at, [m.word(0)] * 4, start * STRIP + i, unseen)
            if spec.fp8:
                key = first + lane.lane
                unseen = ((key < low) | (key >= high)) & (lane.lane < STRIP)
                m.write(stage + lane.lane * 4, 0, spec.scales_at, unseen)
            m.sync()

        m.when((first < low) | (first + STRIP > high), clear)

    def add(
        self, acc: list[Words], turn: Any, p: Words, first: Any, low: Any, high: Any
    ) -> list[Words]:
        """Return `acc + P V` of a strip, where P is `[16 heads, 16 keys]`. `first`, `low` and
        `high` are the same as in the method `clear`.
        """
        m, spec = self.m, self.spec
        stage, acc = self.take(turn), list(acc)
        self.clear(stage, first, low, high)
        places = [stage + at for at in self.read_values_at]
        for part in range(spec.Dv // PART):
            for i, place in enumerate(places):
                v = m.read_transposed(place, part * PART_BYTES)
                for e in range(2):
                    tile = 8 * part + 2 * i + e
                    acc[tile] = m.multiply(acc[tile], p, v[2 * e : 2 * e + 2], spec.dtype)
        return acc

    def add_rounded(
        self, state: list, turn: Any, p: list[Words], most: Any, first: Any, low: Any, high: Any
    ) -> list:
        """Return `acc + P V` of a strip for V in fp8, and the new factor of `acc`.

        Args:
          state: `acc` and its factor, a power of two. The product of p, the scale of a row of V and
            the factor fits float16.
          turn, first, low, high: The same as in the method `add`.
          p: P in float32.
          most: Upper bound of the absolute values of the lane's p.
        """
        m, spec = self.m, self.spec
        stage, (acc, unit) = self.take(turn), state
        self.clear(stage, first, low, high)
        scales = self._scales(stage)
        largest = m.size(scales[0][0])
        for scale in (scales[0][1], *scales[1]):
            largest = m.larger(largest, m.size(scale))
        largest = largest * most

        def smaller(_, acc, unit):
            new = _power(m, m.largest(m.bits(largest)), P_EXPONENT)
            less = new * inverse(m, unit)
            return [[x * less for x in tile] for tile in acc], new

        over = m.different(m.votes(largest * unit >= 2.0**MOST_P_EXPONENT), 0)
        acc, unit = m.repeat(m.number(over), smaller, acc, unit, unrolled=False)
        scales = [[x * unit for x in tile] for tile in scales]
        p = [[x * scales[t][i % 2] for i, x in enumerate(tile)] for t, tile in enumerate(p)]
        words = [
            m.pack(p[t][2 * r], p[t][2 * r + 1], "float16") for t in (0, 1) for r in (0, 1)
        ]
        acc = list(acc)
        for i in range(spec.Dv // 32):
            if spec.Dv == ROW_BYTES:
                v = m.read_transposed(stage + self.read_values_at[i])
            else:
                v = m.read_transposed(stage + self.read_narrow_values_at, 32 * i)
            for chunk in range(2):
                halves = [m.widened(m.even_and_odd(v[2 * chunk + half])) for half in range(2)]
                for e in range(2):
                    tile = 4 * i + 2 * chunk + e
                    pairs = [half[e] for half in halves]
                    acc[tile] = m.multiply(acc[tile], words, pairs, "float16")
        return [acc, unit]


def _power(m: Any, bits: Any, exponent: int) -> Any:
    """Return the power of two `p` with `2^exponent <= p x < 2^(exponent + 1)`.

    `x` is the non-negative float32 with the given bits. `p` is limited to the range of float32.
    """
    own = m.smaller(m.larger(254 + exponent - (bits >> 23), 1), 253)
    return m.real(own << 23)


def inverse(m: Any, power: Any) -> Any:
    """Compute `1 / power` for a power of two."""
    return m.real((254 << 23) - m.bits(power))


class _Pages(NamedTuple):
    """The pages of a branch's keys or values.

    Attributes:
      rows: Number of rows per page.
      row_bytes: Number of bytes per row and head.
      size: Number of bytes per element.
      address: Address of the head's first row.
      scales: Address of the head's first scale, for pages in fp8.
    """

    lane: Lane
    rows: int
    row_bytes: int
    size: int
    address: Any
    scales: Any

    def alike(self, other: "_Pages") -> bool:
        """Return whether strips of `self` and of `other` are copied in the same way."""
        return (self.row_bytes, self.size) == (other.row_bytes, other.size)

    def where(self, condition: Any, other: "_Pages") -> "_Pages":
        """Return `self` if `condition` is true, otherwise `other`.

        The method `alike` must be true for `self` and `other`.
        """
        m, scales = self.lane.m, self.scales
        if scales is not None:
            scales = m.where(condition, scales, other.scales)
        address = m.where(condition, self.address, other.address)
        return self._replace(address=address, scales=scales)

    def _places(
        self, base: Any, first: Any, row: Any, step: int, row_bytes: int, column: Any
    ) -> list[tuple[Any, int]]:
        """For rows `row`, `row + step`, .. of a strip, return the address and the offset of byte
        `column`. `row` is below `step`. A row contains all heads. All page indices are read first,
        so that the reads of the page table overlap.
        """
        m = self.lane.m
        shift, last = self.rows.bit_length() - 1, self.rows - 1
        entry = self.lane.place("table") + (first >> shift << 2)
        inside = row & last
        if self.rows >= STRIP:
            pages, inside = [m.read(entry)], (first & last) + row
        elif self.rows >= step:
            pages = m.read_words(entry, STRIP // self.rows)
        else:
            entry = entry + (row >> shift << 2)
            pages = [m.read(entry, i >> shift << 2) for i in range(0, STRIP, step)]
        start = m.beyond(base, inside, row_bytes, column)
        places = [m.beyond(start, page, self.rows * row_bytes) for page in pages]
        span = STRIP // len(places)
        return [(places[i // span], i % span * row_bytes) for i in range(0, STRIP, step)]

    def copy(self, to: Any, first: Any) -> None:
        """Start the copies of the strip that begins at row `first` to the stage `to`."""
        m, spec, lane = self.lane.m, self.lane.spec, self.lane.lane
        parts, rest = divmod(self.row_bytes, ROW_BYTES)
        all_heads = spec.Hkv * self.row_bytes
        if parts:
            row, chunk = lane >> 3, lane & 7
            places = self._places(self.address, first, row, 4, all_heads, chunk << 4)
            even, odd = (chunk ^ turned(row + i, self.size) for i in (0, 4))
            into = [to + row * ROW_BYTES + (x << 4) for x in (even, odd)]
            for i, (at, ahead) in enumerate(places):
                for part in range(parts):
                    offset = part * PART_BYTES + 4 * ROW_BYTES * i
                    m.copy(into[i % 2], at, offset, ahead + part * ROW_BYTES)
        if rest:
            column = ((lane & 3) << 4) + parts * ROW_BYTES
            places = self._places(self.address, first, lane >> 2, 8, all_heads, column)
            into_rest = to + lane * CHUNK_BYTES
            for i, (at, ahead) in enumerate(places):
                m.copy(into_rest, at, parts * PART_BYTES + WARP_COPY_BYTES * i, ahead)
        if self.scales is not None:
            self._copy_scales(to, first)

    def _copy_scales(self, to: Any, first: Any) -> None:
        """Start the copy of a strip's scales to the memory after the strip. A lane copies four
        scales. The scales of a head are contiguous in a page.
        """
        m, spec, lane = self.lane.m, self.lane.spec, self.lane.lane
        row = (lane & 3) << 2
        shift, last = self.rows.bit_length() - 1, self.rows - 1
        page = m.read(self.lane.place("table") + ((first + row) >> shift << 2))
        at = m.beyond(self.scales, page, 4 * self.rows * spec.Hkv, ((first + row) & last) << 2)
        m.copy(to + lane * CHUNK_BYTES, at, spec.scales_at, 0, lane < STRIP // 4)


def query_fragments(lane: Lane, query: Any, token: Any, kv_head: Any) -> list[Words]:
    """Return Q of the group as left operands of products. The columns of Q are in the order in
    which `Queue.logits` reads the columns of K.
    """
    m, spec = lane.m, lane.spec
    row_bytes, found = 2 * spec.D, []
    for chunk in range(2 * spec.D // PART):
        part, half = divmod(chunk, 2)
        whole = (part + 1) * PART <= spec.D
        column = lane.pair * 2 + half if whole else lane.pair
        low, high = (
            m.fetch_words(
                m.element(
                    query,
                    (token, spec.H * row_bytes),
                    (kv_head, spec.G * row_bytes),
                    (row, row_bytes),
                    (column, CHUNK_BYTES),
                    (part, ROW_BYTES),
                )
            )
            for row in lane.rows()
        )
        found += [[low[i], high[i], low[i + 1], high[i + 1]] for i in (0, 2)]
    return found


def half_query(lane: Lane, query: list[Words]) -> tuple[list[Words], Words]:
    """Return the result of `query_fragments` in float16, and a factor for each of the lane's two
    rows. Each row of Q is multiplied by a power of two such that the row fits float16. The factor
    of a row is the scale of the logits, times log2(e), divided by the row's power of two. Products
    of a row of Q with keys must be multiplied by the row's factor.
    """
    m, spec = lane.m, lane.spec
    powers, units = [], []
    for r in range(2):
        most = m.word(0.0)
        for word in (each[i] for each in query for i in (r, r + 2)):
            for x in m.unpack(word, spec.dtype):
                most = m.larger(most, m.size(x))
        for distance in (1, 2):
            most = m.larger(most, m.exchange(most, distance))
        power = _power(m, m.bits(most), LARGEST_EXPONENT)
        powers.append(power)
        units.append(inverse(m, power) * (spec.scale * LOG2E))
    words = []
    for each in query:
        pairs = [m.unpack(word, spec.dtype) for word in each]
        pairs = [[x * powers[i % 2] for x in pair] for i, pair in enumerate(pairs)]
        words.append([m.pack(*pair, "float16") for pair in pairs])
    return words, units

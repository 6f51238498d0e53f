"""One decode step of NSA in one launch: a cluster of CTAs a query token and key/value head.

Algorithm, in the order of events of each warp:

    lengths, page table, Q, gates          one round trip
    (new tokens to their pages)            `decode_append.py`; all CTAs of the cluster wait
    K compressed     S2 to shared memory   strips of 16 slots, dealt out to the cluster
      exchange 0                           maximum and sum, pushed to all CTAs
    K sliding        S2                    while the others' arrive
    importance       p of the compressed strips, summed over heads and pushed by block
      exchange 1                           with maximum and sum of the sliding branch
    top-n            each CTA all blocks, no exchange
    V compressed, V sliding, K selected    the ring never runs dry: selected strips follow
      exchange 2                           maximum and sum of the selected branch
    V selected
      exchange 3                           the sum over warps and CTAs, the output

Loop order: split over the keys; a warp walks alone over its strips (`decode_streams.py`), all
warps meet at the exchanges (`decode_exchange.py`) and at the top-n (`decode_topn.py`).
Tile: 16 query heads x 16 keys of mma.m16n8k16; a group of fewer heads leaves rows idle. wgmma
would pad the rows to 64 and need a barrier over 4 warps.
Bandwidth bound where a cache is long: a strip is read once and used by 16 rows, 16 operations a
byte. Short or alone, bound by latency: three round trips to memory and four exchanges one after
the other (`docs/kernels/decode.md`).
"""

from typing import Any

from kernels_pallas.mosaic import decode_exchange as exchange
from kernels_pallas.mosaic import decode_topn
from kernels_pallas.mosaic.decode_append import put_new_tokens
from kernels_pallas.mosaic.decode_lane import Lane, Words, Work
from kernels_pallas.mosaic.decode_streams import Queue, half_query, inverse, query_fragments
from kernels_pallas.mosaic.warp_kernel import warp_kernel
from kernels_pallas.specs.decode import NEW_PAGES, STRIP, TILE_BYTES, Decode
from kernels_pallas.specs.tile import LANES

FIRST_UNIT = 2.0**120  # that sums are multiplied by before the first strip (`add_rounded`)


def decode_step(m: Any, spec: Decode, sizes: Any, refs: Any) -> None:
    """The program of a warp."""
    token, kv_head = refs.b, refs.g
    lane = Lane.of(m, spec, refs.group, refs.shared)
    seen = _load_table(lane, sizes, refs, token)
    query = query_fragments(lane, refs.query, token, kv_head)
    gates = _gates(lane, refs, token, kv_head)
    work = Work.of(lane, seen)
    queue = Queue(lane, work, refs, kv_head)
    m.sync_cta()  # the page table
    if spec.append:
        put_new_tokens(lane, sizes, refs)
    queue.fill_before_meeting()
    m.open_barriers(lane.barrier(0), exchange.expected_bytes(lane, work), spec.append)
    queue.fill()
    step = _Step(lane, work, queue, query, gates)
    step.score_compressed()
    step.score_sliding()
    step.rank_blocks()
    block = decode_topn.select(lane, work)
    put_list = lambda: decode_topn.put_ascending(lane, block, refs.indices, token, kv_head)
    m.when(m.same(lane.number, 0), put_list)
    step.choose(block)
    acc = step.add_compressed_and_sliding()
    step.score_selected()
    acc = step.add_selected(acc)
    for total, at, mine in exchange.sum_up(lane, acc):
        # Four neighbours of the output `[16, Dv]`; zeros for a row without tokens.
        total = [m.where(seen > 0, x, 0.0) for x in total]
        words = [m.pack(total[i], total[i + 1], spec.dtype) for i in (0, 2)]
        head, row_bytes = at // spec.Dv, 2 * spec.Dv
        place = m.element(
            refs.out,
            (token, spec.H * row_bytes),
            (kv_head, spec.G * row_bytes),
            (m.smaller(head, spec.G - 1), row_bytes),
            (at % spec.Dv, 2),
        )
        m.put_words(place, words, mine & (head < spec.G))


decode = warp_kernel(
    decode_step,
    lambda spec: {"shared": (spec.offsets["end"] // 4,)},
    by_head=True,
    in_clusters=True,
    warps=lambda spec: spec.variant.warps,
)


def _load_table(lane: Lane, sizes: Any, arrays: Any, token: Any) -> Any:
    """Copies the row of the page table to shared memory, with the nearest page that exists
    where none does; and as they are the entries of the pages of new tokens.

    Returns:
      How many tokens the query sees: none if its position is negative.
    """
    m, spec, capacity = lane.m, lane.spec, lane.spec.variant.capacity
    b, columns = token // spec.q_len, m.word(sizes.table_pages)
    length = m.fetch(m.element(arrays.lengths, (b, 4)))
    first_new = m.larger(length - spec.q_len, 0) // spec.block
    for first in range(0, capacity, spec.variant.warps * LANES):
        i = lane.thread + first
        entry = b * columns + m.smaller(i, columns - 1)
        page = m.fetch(m.element(arrays.page_table, (entry, 4)))
        if spec.append:
            at = i - first_new
            new = m.below(at, NEW_PAGES) & (i < columns)
            m.write(lane.place("new_pages") + at * 4, page, only=new)
        page = m.smaller(m.larger(page, 0), m.word(sizes.pages) - 1)
        m.write(lane.place("table") + i * 4, page, only=i < capacity)
    length = m.smaller(length, m.smaller(columns, capacity) * spec.block)
    return m.larger(length - (spec.q_len - 1) + token % spec.q_len, 0)


def _gates(lane: Lane, arrays: Any, token: Any, kv_head: Any) -> list[Words]:
    """Of each branch, of the lane's two rows."""
    m, spec = lane.m, lane.spec
    whole = spec.gate_dtype == "float32"
    size, found = 4 if whole else 2, []
    head = 3 * size
    for branch in range(3):
        token_at = (token, spec.H * head), (kv_head, spec.G * head), (m.word(branch), size)
        places = [m.element(arrays.gates, *token_at, (row, head)) for row in lane.rows()]
        found.append(
            [
                m.real(m.fetch(place)) if whole else m.fetch_half(place, spec.gate_dtype)
                for place in places
            ]
        )
    return found


class _Step:
    """The phases of a warp, in their order; turns of the queue as `decode_streams.py` says."""

    def __init__(self, lane: Lane, work: Work, queue: Queue, query: Any, gates: list[Words]):
        self.lane, self.work, self.queue = lane, work, queue
        self.query: Any = query
        self.raw_query: Any = half_query(lane, query) if lane.spec.fp8 else None
        self.gates = gates  # compressed, selected, sliding
        spec = lane.spec
        self.stages, self.selected = spec.variant.stages, spec.selected_strips
        self.compressed_s2 = lane.logits  # later those of the selected branch
        self.sliding_s2 = lane.logits + (spec.kept_strips - spec.sliding_strips) * TILE_BYTES

    def _repeat(self, times: Any, body, state: list) -> list:
        return self.lane.m.repeat(times, body, state, unrolled=False)

    # Of a strip: its first key, the first that is seen, and the end of those.

    def _slots(self, i: Any) -> tuple[Any, Any, Any]:
        work, lead = self.work, self.lane.spec.cover - 1
        first = work.compressed_strip(self.lane, i) * STRIP
        return first, self.lane.m.word(lead), work.count + lead

    def _window(self, i: Any) -> tuple[Any, Any, Any]:
        return self.work.sliding_key(self.lane, i), self.work.window_start, self.work.seen

    def _chosen(self, i: Any) -> tuple[Any, Any, Any]:
        m, start = self.lane.m, self.queue.selected_start(i)
        return m.larger(start, 0), m.word(0), m.where(start >= 0, self.work.seen, 0)

    def _score(self, kind: int, times: Any, begin: Any, place: Any, keys) -> list[Words]:
        """S2 of strips `i` of a branch at turns `begin + i`, kept from `place` on; `keys(i)`: the
        first key of the strip, the first and the end of those seen. Gives maximum and sum.
        """
        lane, queue = self.lane, self.queue
        compressed, chosen = kind == exchange.COMPRESSED, kind == exchange.SELECTED
        rounded = lane.spec.fp8 and not compressed

        def strip(i, state):
            s2 = queue.logits(begin + i, *(self.raw_query if rounded else [self.query]))
            s2 = exchange.masked(lane, s2, *keys(i))
            exchange.keep(lane, place + i * TILE_BYTES, s2)
            queue.refill(begin + i + self.stages, chosen, meets=compressed)
            return exchange.with_strip(lane, state, s2)

        return self._repeat(times, strip, exchange.no_keys(lane))

    def score_compressed(self) -> None:
        begin = self.lane.m.word(0)
        at = begin, self.compressed_s2, self._slots
        self.compressed_state = self._score(exchange.COMPRESSED, self.work.mine, *at)

    def score_sliding(self) -> None:
        """Tells the state of the compressed branch first: it arrives meanwhile."""
        exchange.tell(self.lane, exchange.COMPRESSED, self.compressed_state)
        at = self.work.mine, self.sliding_s2, self._window
        state = self._score(exchange.SLIDING, self.work.sliding, *at)
        exchange.tell(self.lane, exchange.SLIDING, state)

    def rank_blocks(self) -> None:
        """Pushes the scores; g p of each strip takes the place of its S2."""
        lane, work, gate = self.lane, self.work, self.gates[0]
        lane.m.wait_for_bytes(lane.barrier(exchange.COMPRESSED))
        norms = exchange.told(lane, exchange.COMPRESSED)

        def two_strips(i, nothing):
            """Two, of which one goes on while the other's lanes wait for each other."""
            numbers = [i * 2, i * 2 + 1]
            at = [lane.m.smaller(number, work.mine - 1) for number in numbers]
            places = [self.compressed_s2 + x * TILE_BYTES for x in at]
            s2 = [exchange.kept(lane, place) for place in places]
            for number, strip, place, tiles in zip(numbers, at, places, s2, strict=True):
                there = number < work.mine
                p = exchange.probabilities(lane, tiles, norms)
                weighted = [[x * gate[j // 2] for j, x in enumerate(tile)] for tile in p]
                if lane.spec.fp8:  # whose values have scales
                    exchange.keep(lane, place, weighted, there)
                else:
                    words = exchange.left_operand(lane, weighted)
                    lane.m.write_words(place, words, only=there)
                exchange.push_scores(lane, p, work.compressed_strip(lane, strip), there)
            return nothing

        self._repeat((work.mine + 1) // 2, two_strips, [])
        lane.m.wait_for_bytes(lane.barrier(exchange.SLIDING))

    def choose(self, block: Any) -> None:
        """The queue goes on with the selected blocks, one a lane in `block`."""
        lane, spec, m = self.lane, self.lane.spec, self.lane.m
        in_block = spec.block // STRIP

        def start(i):
            """The first key of the warp's strip `i`, -1 if there is none."""
            item = lane.number * self.selected + i
            place = item // in_block
            found = m.shuffle(block, m.smaller(place, LANES - 1))
            some = (place < spec.n) & (found >= 0)
            return m.where(some, found * spec.block + item % in_block * STRIP, -1)

        self.queue.selected_start = start
        self.queue.catch_up(self.queue.near)

    def add_compressed_and_sliding(self) -> list:
        """What `add_selected` begins with."""
        lane, work, queue, m = self.lane, self.work, self.queue, self.lane.m
        acc = [[m.word(0.0)] * 4 for _ in range(lane.spec.Dv // 8)]
        state = [acc, m.word(FIRST_UNIT)] if lane.spec.fp8 else acc
        at = queue.near, self.compressed_s2, self._slots
        state = self._add(state, work.mine, *at, self.gates[0], None)
        norms = exchange.told(lane, exchange.SLIDING)
        at = queue.near + work.mine, self.sliding_s2, self._window
        return self._add(state, work.sliding, *at, self.gates[2], norms)

    def score_selected(self) -> None:
        at = self.queue.limit, self.compressed_s2, self._chosen
        state = self._score(exchange.SELECTED, self.selected, *at)
        exchange.tell(self.lane, exchange.SELECTED, state)
        self.lane.m.wait_for_bytes(self.lane.barrier(exchange.SELECTED))

    def add_selected(self, state: list) -> list[Words]:
        """The sum of all branches over the strips of this warp."""
        lane, m = self.lane, self.lane.m
        norms = exchange.told(lane, exchange.SELECTED)
        at = self.queue.limit + self.selected, self.compressed_s2, self._chosen
        state = self._add(state, self.selected, *at, self.gates[1], norms)
        if not lane.spec.fp8:
            return state
        acc, unit = state
        return [[x * inverse(m, unit) for x in tile] for tile in acc]

    def _add(self, state: list, times, begin, place, keys, gate: Words, norms) -> list:
        """`state` and `g P V` of strips at turns from `begin` on; `place` has their S2, or where
        there are no `norms` their g p.
        """
        lane, queue, fp8 = self.lane, self.queue, self.lane.spec.fp8
        given = norms is None
        norms = norms and exchange.gated(norms, gate)
        most = lane.m.larger(*(lane.m.size(x) for x in gate)) if fp8 else None

        def strip(i, state):
            at, turn = place + i * TILE_BYTES, begin + i
            if given and not fp8:
                p = lane.m.read_words(at, 4)
            else:
                p = exchange.kept(lane, at)
                p = p if given else exchange.probabilities(lane, p, norms)
            if fp8:
                state = queue.add_rounded(state, turn, p, most, *keys(i))
            else:
                p = p if given else exchange.left_operand(lane, p)
                state = queue.add(state, turn, p, *keys(i))
            queue.refill(turn + self.stages, True)
            return state

        return self._repeat(times, strip, state)

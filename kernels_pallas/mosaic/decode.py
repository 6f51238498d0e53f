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

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import decode_exchange as exchange
from kernels_pallas.mosaic import decode_topn, warp_cluster
from kernels_pallas.mosaic.decode_append import NewTokens
from kernels_pallas.mosaic.decode_lane import Lane, Words, Work
from kernels_pallas.mosaic.decode_streams import WIDER, Queue, query_fragments
from kernels_pallas.mosaic.warp_kernel import warp_kernel
from kernels_pallas.specs.decode import STRIP, TILE_BYTES, Decode
from kernels_pallas.specs.tile import LANES


def decode(kernel: Kernel) -> Callable:
    """`specs.decode.decode`."""
    spec: Decode = kernel.spec
    return warp_kernel(
        kernel,
        DecodeStep(spec, kernel.names[len(kernel.scalars) :]),
        shared=[(spec.offsets["end"] // 4,)],
        kv_heads=spec.Hkv,
        interpret=spec.interpret,
        warps=spec.variant.warps,
        instructions=warp_cluster,
    )


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """The program of a warp; `names` of the arrays, as the description has them."""

    spec: Decode
    names: tuple[str, ...]

    def __call__(self, m: Any, sizes: Any, *arguments: Any) -> None:
        *refs, shared, token, kv_head, rank = arguments
        spec, arrays = self.spec, SimpleNamespace(**dict(zip(self.names, refs, strict=True)))
        lane = Lane.of(m, spec, rank, shared)
        seen = self._load_table(lane, sizes, arrays, token)
        query = query_fragments(lane, arrays.query, token, kv_head)
        gates = self._gates(lane, arrays, token, kv_head)
        work = Work.of(lane, seen)
        if spec.append:
            m.sync_cta()  # the page table
            NewTokens(lane, sizes, arrays, token, kv_head).put()
        m.open_barriers(lane.barrier(0), exchange.expected_bytes(lane, work), spec.append)
        m.sync_cta()
        if spec.append:
            m.wait_for_cluster()
        step = _Step(lane, work, Queue(lane, work, arrays, kv_head), query, gates)
        step.queue.fill()
        step.score_compressed()
        if not spec.append:
            m.wait_for_cluster()
        step.score_sliding()
        step.rank_blocks()
        block = decode_topn.select(lane, work)
        first_warp = m.same(lane.number, 0)
        m.when(
            first_warp,
            lambda: decode_topn.put_ascending(lane, block, arrays.indices, token, kv_head),
        )
        step.choose(block)
        acc = step.add_compressed_and_sliding()
        step.score_selected()
        acc = step.add_selected(acc)
        for total, at, mine in exchange.sum_up(lane, acc):
            self._put(lane, work, arrays.out, token, kv_head, total, at, mine)

    def _load_table(self, lane: Lane, sizes: Any, arrays: Any, token: Any) -> Any:
        """Copies the row of the page table to shared memory.

        Returns:
          How many tokens the query sees: none if its position is negative.
        """
        m, spec, capacity = lane.m, self.spec, self.spec.variant.capacity
        b, columns = token // spec.q_len, m.word(sizes.table_pages)
        length = m.fetch(m.element(arrays.lengths, (b, 4)))
        for first in range(0, capacity, spec.variant.warps * LANES):
            i = lane.thread + first
            entry = b * columns + m.smaller(i, columns - 1)
            page = m.fetch(m.element(arrays.page_table, (entry, 4)))
            page = m.smaller(m.larger(page, 0), m.word(sizes.pages) - 1)
            m.write(lane.place("table") + i * 4, page, only=i < capacity)
        length = m.smaller(length, m.smaller(columns, capacity) * spec.block)
        return m.larger(length - (spec.q_len - 1) + token % spec.q_len, 0)

    def _gates(self, lane: Lane, arrays: Any, token: Any, kv_head: Any) -> list[Words]:
        """Of each branch, of the lane's two rows."""
        m, spec = lane.m, self.spec
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

    def _put(
        self,
        lane: Lane,
        work: Work,
        out: Any,
        token: Any,
        kv_head: Any,
        total: Words,
        at: Any,
        mine: Any,
    ) -> None:
        """Writes four neighbours of the output `[16, Dv]`; zeros for a row without tokens."""
        m, spec = lane.m, self.spec
        if spec.fp8:
            total = [x * WIDER for x in total]
        total = [m.where(work.seen > 0, x, 0.0) for x in total]
        words = [m.pack(total[i], total[i + 1], spec.dtype) for i in (0, 2)]
        head, row_bytes = at // spec.Dv, 2 * spec.Dv
        place = m.element(
            out,
            (token, spec.H * row_bytes),
            (kv_head, spec.G * row_bytes),
            (m.smaller(head, spec.G - 1), row_bytes),
            (at % spec.Dv, 2),
        )
        m.put_words(place, words, mine & (head < spec.G))


class _Step:
    """The phases of a warp, in their order; turns of the queue as `decode_streams.py` says."""

    def __init__(self, lane: Lane, work: Work, queue: Queue, query: Any, gates: list[Words]):
        self.lane, self.work, self.queue, self.query = lane, work, queue, query
        self.gates = gates  # compressed, selected, sliding
        spec = lane.spec
        self.stages, self.sliding = spec.variant.stages, spec.sliding_strips
        self.selected = spec.selected_strips
        self.compressed_s2 = lane.logits  # later those of the selected branch
        self.sliding_s2 = lane.logits + (spec.kept_strips - self.sliding) * TILE_BYTES

    def _repeat(self, times: Any, body, state: list) -> list:
        return self.lane.m.repeat(times, body, state, unrolled=False)

    def _score(self, kind: int, times: Any, begin: Any, place: Any, keys) -> list[Words]:
        """S2 of strips `i` of a branch at turns `begin + i`, kept from `place` on; `keys(i)`: the
        first key of the strip, the first and the end of those seen. Gives maximum and sum.
        """
        chosen = kind == exchange.SELECTED
        lane, queue = self.lane, self.queue
        rounded = lane.spec.fp8 and kind != exchange.COMPRESSED

        def strip(i, state):
            seen = keys(i)
            if rounded:
                tiles, unit = queue.rounded_logits(begin + i, self.query, seen[0]), WIDER
            else:
                tiles, unit = queue.logits(begin + i, self.query), 1.0
            s2 = exchange.masked(lane, tiles, *seen, unit=unit)
            exchange.keep(lane, place + i * TILE_BYTES, s2)
            queue.refill(begin + i + self.stages, chosen)
            return exchange.with_strip(lane, state, s2)

        return self._repeat(times, strip, exchange.no_keys(lane))

    def score_compressed(self) -> None:
        lane, work, lead = self.lane, self.work, self.lane.spec.cover - 1

        def slots(i):
            first = work.compressed_strip(lane, i) * STRIP
            return first, lead, work.count + lead

        self.compressed_state = self._score(
            exchange.COMPRESSED, work.mine, lane.m.word(0), self.compressed_s2, slots
        )

    def score_sliding(self) -> None:
        """Tells the state of the compressed branch first: it arrives meanwhile."""
        lane, work = self.lane, self.work
        exchange.tell(lane, exchange.COMPRESSED, self.compressed_state)

        def keys(i):
            return work.sliding_key(lane, i), work.window_start, work.seen

        at = work.mine, self.sliding_s2
        state = self._score(exchange.SLIDING, self.sliding, *at, keys)
        exchange.tell(lane, exchange.SLIDING, state)

    def rank_blocks(self) -> None:
        """Pushes the scores; g p of each strip takes the place of its S2."""
        lane, work, gate = self.lane, self.work, self.gates[0]
        lane.m.wait_for_bytes(lane.barrier(exchange.COMPRESSED))
        norms = exchange.told(lane, exchange.COMPRESSED)
        self.compressed_norms = norms

        def strip(i, nothing):
            place = self.compressed_s2 + i * TILE_BYTES
            p = exchange.probabilities(lane, exchange.kept(lane, place), norms)
            if not lane.spec.fp8:
                weighted = [[x * gate[i // 2] for i, x in enumerate(tile)] for tile in p]
                lane.m.write_words(place, exchange.left_operand(lane, weighted))
            exchange.push_scores(lane, p, work.compressed_strip(lane, i))
            return nothing

        self._repeat(work.mine, strip, [])
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

    def add_compressed_and_sliding(self) -> list[Words]:
        lane, work, queue, m = self.lane, self.work, self.queue, self.lane.m

        def compressed(i, acc):
            p = m.read_words(self.compressed_s2 + i * TILE_BYTES, 4)
            acc = queue.add(acc, queue.near + i, p)
            queue.refill(queue.near + i + self.stages, True)
            return acc

        acc = [[m.word(0.0)] * 4 for _ in range(lane.spec.Dv // 8)]
        if lane.spec.fp8:  # p is multiplied by scales before it is rounded
            norms, gate = self.compressed_norms, self.gates[0]
            at = queue.near, self.compressed_s2
            acc = self._add(acc, work.mine, *at, norms, gate, m.word(0))
        else:
            acc = self._repeat(work.mine, compressed, acc)
        norms = exchange.told(lane, exchange.SLIDING)
        begin = queue.near + work.mine
        at = begin, self.sliding_s2
        return self._add(acc, self.sliding, *at, norms, self.gates[2], work.window_start)

    def score_selected(self) -> None:
        lane, work, m = self.lane, self.work, self.lane.m

        def keys(i):
            start = self.queue.selected_start(i)
            some = start >= 0
            return m.larger(start, 0), m.word(0), m.where(some, work.seen, 0)

        at = self.queue.limit, self.compressed_s2
        state = self._score(exchange.SELECTED, self.selected, *at, keys)
        exchange.tell(lane, exchange.SELECTED, state)
        m.wait_for_bytes(lane.barrier(exchange.SELECTED))

    def add_selected(self, acc: list[Words]) -> list[Words]:
        norms = exchange.told(self.lane, exchange.SELECTED)
        begin = self.queue.limit + self.selected
        times, place = self.selected, self.compressed_s2
        return self._add(acc, times, begin, place, norms, self.gates[1], self.lane.m.word(0))

    def _add(self, acc, times, begin, place, norms, gate, first) -> list[Words]:
        """`acc + g P V` of strips at turns from `begin` on, of which `place` has S2; `first`: a key
        that some strip begins with.
        """
        lane, queue = self.lane, self.queue
        norms = exchange.gated(norms, gate)

        def strip(i, acc):
            s2 = exchange.kept(lane, place + i * TILE_BYTES)
            p = exchange.probabilities(lane, s2, norms)
            if lane.spec.fp8:
                acc = queue.add_rounded(acc, begin + i, p, first)
            else:
                acc = queue.add(acc, begin + i, exchange.left_operand(lane, p))
            queue.refill(begin + i + self.stages, True)
            return acc

        return self._repeat(times, strip, acc)

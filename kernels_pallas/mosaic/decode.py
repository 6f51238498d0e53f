"""Computes one decode step of NSA in one launch.

Each query token and key/value head has a cluster of CTAs.

The table lists the work of each warp in order. In the table, S2 = scale log2(e) Q K^T are logits in
base 2. Importance is p of the compressed strips, summed over heads.

| step          | work of a warp                                                                   |
|---------------|----------------------------------------------------------------------------------|
| inputs        | loads lengths, page table, Q and gates in one round trip                         |
| new tokens    | writes new tokens to their pages (`decode_append.py`), and waits for the cluster |
| K compressed  | computes S2 of strips of 16 slots, distributed over the cluster                  |
| exchange 0    | pushes maximum and sum of the compressed branch to all CTAs                      |
| K sliding     | computes S2 of sliding keys, while the numbers of other CTAs arrive              |
| exchange 1    | pushes importance by block, and maximum and sum of the sliding branch            |
| top-n         | selects among all blocks in each CTA, without an exchange                        |
| V, K selected | adds P V of the compressed and sliding branch, and computes S2 of selected keys  |
| exchange 2    | pushes maximum and sum of the selected branch                                    |
| V selected    | adds P V of the selected branch                                                  |
| exchange 3    | adds up the outputs of all warps and CTAs                                        |

S2 is stored in shared memory. After the top-n, strips of the selected branch keep the ring buffer
full.

Loop order: split-K. Each warp loops independently over its strips of 16 keys (`decode_streams.py`).
All warps synchronize at the exchanges (`decode_exchange.py`) and at the top-n (`decode_topn.py`).
Tile: 16 query heads x 16 keys (mma.m16n8k16). If a group has fewer than 16 heads, the remaining
rows of the tile are idle. The instruction wgmma would pad the rows to 64 and need a barrier over 4
warps. For long caches the kernel is bandwidth bound, since it does only 16 operations per byte of
the cache. For short caches or few rows, the kernel is latency bound by three round trips to memory
and four exchanges in sequence (`docs/kernels/decode.md`).
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

FIRST_UNIT = 2.0**120  # factor of the sums before the first strip (`add_rounded`)


def _load_table(lane: Lane, sizes: Any, arrays: Any, token: Any) -> Any:
    """Copy the row of the page table to shared memory, with entries clamped to existing pages.

    Entries for the pages of new tokens are also copied without clamping.

    Returns:
      The number of tokens to which the query attends. If the position of the query is negative, the
      number of tokens is 0.
    """
    m, spec, capacity = lane.m, lane.spec, lane.spec.variant.capacity
    b, columns = token // spec.q_len, m.word(sizes.table_pages)
    length = m.fetch_int(arrays.lengths, b)
    first_new = m.larger(length - spec.q_len, 0) // spec.block
    for first in range(0, capacity, spec.variant.warps * LANES):
        i = lane.thread + first
        entry = b * columns + m.smaller(i, columns - 1)
        page = m.fetch_int(arrays.page_table, entry)
        if spec.append:
            at = i - first_new
            new = m.below(at, NEW_PAGES) & (i < columns)
            m.write(lane.place("new_pages") + at * 4, page, only=new)
        page = m.smaller(m.larger(page, 0), m.word(sizes.pages) - 1)
        m.write(lane.place("table") + i * 4, page, only=i < capacity)
    length = m.smaller(length, m.smaller(columns, capacity) * spec.block)
    return m.larger(length - (spec.q_len - 1) + token % spec.q_len, 0)


def _gates(lane: Lane, arrays: Any, token: Any, kv_head: Any) -> list[Words]:
    """Load the gates of each branch for the lane's two rows."""
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


def decode_step(m: Any, spec: Decode, sizes: Any, refs: Any) -> None:
    """The program of each warp in a decode step.

    `decode_streams.py` explains the queue of strips and its turns.
    """
    token, kv_head = refs.b, refs.g
    lane = Lane.of(m, spec, refs.group, refs.shared)
    seen = _load_table(lane, sizes, refs, token)
    query = query_fragments(lane, refs.query, token, kv_head)
    gates = _gates(lane, refs, token, kv_head)  # compressed, selected, sliding
    work = Work.of(lane, seen)
    queue = Queue(lane, work, refs, kv_head)
    m.sync_cta()  # all warps have written the page table
    if spec.append:
        put_new_tokens(lane, sizes, refs)
    queue.fill_before_meeting()
    m.open_barriers(lane.barrier(0), exchange.expected_bytes(lane, work), spec.append)
    queue.fill()
    raw_query: Any = half_query(lane, query) if spec.fp8 else None
    stages, selected_strips = spec.variant.stages, spec.selected_strips
    compressed_s2 = lane.logits  # later the logits of the selected branch
    sliding_s2 = lane.logits + (spec.kept_strips - spec.sliding_strips) * TILE_BYTES

    # Each of these functions returns the first key of a strip, the first visible key, and the
    # end of the visible keys.

    def slots(i):
        lead = spec.cover - 1
        return work.compressed_strip(lane, i) * STRIP, m.word(lead), work.count + lead

    def window(i):
        return work.sliding_key(lane, i), work.window_start, work.seen

    def chosen_keys(i):
        start = queue.selected_start(i)
        return m.larger(start, 0), m.word(0), m.where(start >= 0, work.seen, 0)

    def score(kind: int, times, begin, place, keys) -> list[Words]:
        """Compute the base-2 logits of `times` strips of a branch, and store them at `place`.

        Strip `i` is at index `begin + i` of the warp's queue. `keys(i)` returns the first key of
        strip `i`, and the begin and the end of the visible keys. Return the softmax maximum and sum
        of the lane's rows.
        """
        compressed, chosen = kind == exchange.COMPRESSED, kind == exchange.SELECTED
        rounded = spec.fp8 and not compressed

        def strip(i, state):
            s2 = queue.logits(begin + i, *(raw_query if rounded else [query]))
            s2 = exchange.masked(lane, s2, *keys(i))
            exchange.keep(lane, place + i * TILE_BYTES, s2)
            queue.refill(begin + i + stages, chosen, meets=compressed)
            return exchange.with_strip(lane, state, s2)

        no_keys = [[exchange.NOTHING, 0.0]] * 2  # maximum and sum of the lane's rows
        return m.repeat(times, strip, no_keys, unrolled=False)

    def add(state: list, times, begin, place, keys, gate: Words, norms) -> list:
        """Return `state` plus `g P V` of `times` strips, from index `begin` of the warp's queue on.

        `place` is the address of the strips' base-2 logits in shared memory. Without `norms`,
        `place` has gated probabilities `g p` instead of logits.
        """
        given = norms is None
        norms = norms and exchange.gated(norms, gate)
        most = m.larger(*(m.size(x) for x in gate)) if spec.fp8 else None

        def strip(i, state):
            at, turn = place + i * TILE_BYTES, begin + i
            if given and not spec.fp8:
                p = m.read_words(at, 4)
            else:
                p = exchange.kept(lane, at)
                p = p if given else exchange.probabilities(lane, p, norms)
            if spec.fp8:
                state = queue.add_rounded(state, turn, p, most, *keys(i))
            else:
                p = p if given else exchange.left_operand(lane, p)
                state = queue.add(state, turn, p, *keys(i))
            queue.refill(turn + stages, True)
            return state

        return m.repeat(times, strip, state, unrolled=False)

    # 1. The logits of the compressed branch. Then the logits of the sliding branch, while the
    # statistics of other CTAs arrive.
    state = score(exchange.COMPRESSED, work.mine, m.word(0), compressed_s2, slots)
    exchange.tell(lane, exchange.COMPRESSED, state)
    state = score(exchange.SLIDING, work.sliding, work.mine, sliding_s2, window)
    exchange.tell(lane, exchange.SLIDING, state)

    # 2. The scores of blocks, which are pushed to all CTAs. g p of each strip overwrites the
    # strip's S2.
    m.wait_for_bytes(lane.barrier(exchange.COMPRESSED))
    norms = exchange.told(lane, exchange.COMPRESSED)

    def rank_two_strips(i):
        """Compute the scores of two strips at once, to hide latency.

        The exchanges between lanes for one strip overlap with the work on the other strip.
        """
        numbers = [i * 2, i * 2 + 1]
        at = [m.smaller(number, work.mine - 1) for number in numbers]
        places = [compressed_s2 + x * TILE_BYTES for x in at]
        s2 = [exchange.kept(lane, place) for place in places]
        for number, strip, place, tiles in zip(numbers, at, places, s2, strict=True):
            there = number < work.mine
            p = exchange.probabilities(lane, tiles, norms)
            weighted = [[x * gates[0][j // 2] for j, x in enumerate(tile)] for tile in p]
            if spec.fp8:  # in fp8, values have scales
                exchange.keep(lane, place, weighted, there)
            else:
                words = exchange.left_operand(lane, weighted)
                m.write_words(place, words, only=there)
            exchange.push_scores(lane, p, work.compressed_strip(lane, strip), there)

    m.repeat((work.mine + 1) // 2, rank_two_strips, unrolled=False)
    m.wait_for_bytes(lane.barrier(exchange.SLIDING))

    # 3. The best blocks. The queue then loads the strips of these blocks.
    block = decode_topn.select(lane, work)
    put_list = lambda: decode_topn.put_ascending(lane, block, refs.indices, token, kv_head)
    m.when(m.same(lane.number, 0), put_list)
    in_block = spec.block // STRIP

    def selected_start(i):
        """Return the first key of the warp's strip `i`, or -1 if there is no such strip."""
        item = lane.number * selected_strips + i
        place = item // in_block
        found = m.shuffle(block, m.smaller(place, LANES - 1))
        some = (place < spec.n) & (found >= 0)
        return m.where(some, found * spec.block + item % in_block * STRIP, -1)

    queue.selected_start = selected_start
    queue.catch_up(queue.near)

    # 4. The values of the compressed and the sliding branch, the logits of the selected branch,
    # and the values of the selected branch.
    acc = [[m.word(0.0)] * 4 for _ in range(spec.Dv // 8)]
    state = [acc, m.word(FIRST_UNIT)] if spec.fp8 else acc
    state = add(state, work.mine, queue.near, compressed_s2, slots, gates[0], None)
    norms = exchange.told(lane, exchange.SLIDING)
    begin = queue.near + work.mine
    state = add(state, work.sliding, begin, sliding_s2, window, gates[2], norms)
    of_selected = score(
        exchange.SELECTED, selected_strips, queue.limit, compressed_s2, chosen_keys
    )
    exchange.tell(lane, exchange.SELECTED, of_selected)
    m.wait_for_bytes(lane.barrier(exchange.SELECTED))
    norms = exchange.told(lane, exchange.SELECTED)
    begin = queue.limit + selected_strips
    state = add(state, selected_strips, begin, compressed_s2, chosen_keys, gates[1], norms)
    acc = state
    if spec.fp8:
        acc, unit = state
        acc = [[x * inverse(m, unit) for x in tile] for tile in acc]

    # 5. The sum of all warps.
    for total, at, mine in exchange.sum_up(lane, acc):
        # Four neighbouring elements of the output `[16, Dv]`. They are zeros for a row without
        # tokens.
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

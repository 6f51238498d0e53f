"""Selects the blocks of a decode step: the forced blocks, and the blocks with the best scores among
the rest.

Every CTA has the scores of all blocks, so all CTAs compute the same list. Each warp finds the best
`free` of its blocks, where `free` is the number of slots without a forced block. The warp ranks its
best blocks among the best blocks of all warps. A block precedes all blocks with lower scores, and
later blocks with the same score. Scores are not negative, so their bits are compared as integers.

| blocks                   | way to rank                                                   |
|--------------------------|---------------------------------------------------------------|
| up to 32 per warp        | each lane counts the lanes whose block precedes its own block |
| more per warp            | the warp extracts the winners one by one                      |
| best blocks of all warps | each lane counts the blocks that precede its own block        |

To extract a winner, a warp finds the highest score among the best blocks of its lanes, and the
block with this score and the lowest index. To count blocks of all warps, the lanes read each block
together.

The selection is bound by latency. The counts of preceding blocks are independent, while each
extraction waits twice for a reduction over the warp.
"""

from typing import Any

from kernels_pallas.mosaic.decode_lane import Lane, Words, Work
from kernels_pallas.specs.decode import STRIP
from kernels_pallas.specs.tile import LANES

NO_SCORE = -1
NO_BLOCK = 2**31 - 1


def select(lane: Lane, work: Work) -> Any:
    """Return the selected blocks, one per lane in arbitrary order, and -1 in lanes without a
    block.
    """
    m, spec = lane.m, lane.spec
    forced = spec.num_initial + spec.num_local
    best = m.word(NO_BLOCK)
    if spec.free:
        scores, blocks = _scores(lane, work)
        best = _best_of_cluster(
            lane, *(_ranked if len(scores) == 1 else _best)(lane, scores, blocks)
        )
    place = lane.lane
    back = work.blocks - 1 - (place - spec.num_initial)
    local = m.where(back >= spec.num_initial, back, -1)
    initial = m.where(place < work.blocks, place, -1)
    free = m.shuffle(best, m.larger(place - forced, 0))
    block = m.where(place < forced, local, m.where(m.same(free, NO_BLOCK), -1, free))
    block = m.where(place < spec.num_initial, initial, block)
    return m.where(place < spec.n, block, -1)


def put_ascending(lane: Lane, block: Any, indices: Any, token: Any, kv_head: Any) -> None:
    """Write the selected blocks of a token to `indices` `[tokens, Hkv, n]` in ascending order.
    Empty slots of `indices` are at the end.
    """
    m, spec = lane.m, lane.spec
    key = m.where(block >= 0, block, NO_BLOCK)

    def rank(i, place):
        other = m.shuffle(key, i)
        before = (other < key) | (m.same(other, key) & (i < lane.lane))
        return place + m.number(before)

    place = m.repeat(spec.n, rank, 0, unrolled=False)
    row = (token, 4 * spec.Hkv * spec.n), (kv_head, 4 * spec.n)
    at = m.element(indices, *row, (m.smaller(place, spec.n - 1), 4))
    m.put(at, block, lane.lane < spec.n)


def _scores(lane: Lane, work: Work) -> tuple[Words, Words]:
    """Return the bits of the scores of a lane's blocks, and the blocks. Blocks that must not be
    selected by score have `NO_SCORE`.
    """
    m, spec = lane.m, lane.spec
    warps, capacity = spec.variant.warps, spec.variant.capacity
    # The number of blocks whose sums `push_scores` has written. The memory of other blocks has
    # any contents.
    covered = (work.strips * STRIP) // spec.per_page
    scores, blocks = [], []
    for first in range(0, capacity, LANES * warps):
        block = lane.warp * LANES + (lane.lane + first)
        place = lane.place("scores") + m.smaller(block, capacity - 1) * 8
        own = m.where(block < covered, m.real(m.read(place)), 0.0)
        following = block + 1 < covered
        following = m.where(following, m.real(m.read(place, 12)), 0.0)
        free = (block >= spec.num_initial) & (block < work.blocks - spec.num_local)
        scores.append(m.where(free, m.bits(own + following), NO_SCORE))
        blocks.append(block)
    return scores, blocks


def _best(lane: Lane, scores: Words, blocks: Words) -> tuple[Any, Any, Any]:
    """Find the best blocks of a warp. Lane r gets the score and the block of rank r, or
    `NO_SCORE` past the last rank.

    Each lane first sorts its blocks. Since the blocks of a lane are sorted, an extraction compares
    only the best remaining block of each lane.
    """
    m, scores, blocks = lane.m, list(scores), list(blocks)
    for end in range(len(scores) - 1, 0, -1):
        for i in range(end):  # blocks with equal scores stay in order, the lower block first
            swap = scores[i + 1] > scores[i]
            for x in (scores, blocks):
                x[i : i + 2] = m.where(swap, x[i + 1], x[i]), m.where(swap, x[i], x[i + 1])

    def one(r, won_score, won, scores, blocks):
        most = m.largest(scores[0])
        place = m.smallest(m.where(m.same(scores[0], most), blocks[0], NO_BLOCK))
        mine = m.same(blocks[0], place)
        scores, blocks = (
            [m.where(mine, after, x) for x, after in zip(each, [*each[1:], end], strict=True)]
            for each, end in ((scores, m.word(NO_SCORE)), (blocks, m.word(NO_BLOCK)))
        )
        here = m.same(lane.lane, r)
        won = m.where(here, m.where(most >= 0, place, NO_BLOCK), won)
        return m.where(here, most, won_score), won, scores, blocks

    state = NO_SCORE, NO_BLOCK, scores, blocks
    won_score, won, *_ = m.repeat(lane.spec.free, one, *state, unrolled=False)
    return lane.lane, won_score, won


def _before(m: Any, score: Any, block: Any, other_score: Any, other: Any) -> Any:
    """Return whether `block` precedes the block `other`."""
    return (score > other_score) | (m.same(score, other_score) & (block < other))


def _ranked(lane: Lane, scores: Words, blocks: Words) -> tuple[Any, Any, Any]:
    """Rank the blocks of a warp that has one block per lane, in the order of `_best`. Return
    the rank, the score and the block of each lane.
    """
    m, (score,), (block,) = lane.m, scores, blocks

    def count(i, rank):
        other = m.shuffle(score, i)
        return rank + m.number(_before(m, other, i, score, lane.lane))

    rank = m.repeat(LANES, count, 0)
    return rank, score, m.where(score >= 0, block, NO_BLOCK)


def _best_of_cluster(lane: Lane, rank: Any, score: Any, block: Any) -> Any:
    """Return the best blocks of all warps of this CTA, which are the best of all blocks.

    Args:
      rank: Rank of the lane's block among the blocks of its warp. Only ranks below
        `spec.found_slots` are used.
    """
    m, spec = lane.m, lane.spec
    slots, found = spec.found_slots, lane.place("found")
    winners = lane.place("winners")
    own = found + lane.warp * (8 * slots)
    m.sync_cta()  # all warps have read the scores that are overwritten now
    m.write_words(own + rank * 8, [score, block], only=rank < slots)
    m.write(winners + lane.lane * 4, NO_BLOCK, only=m.same(lane.warp, 0))
    m.sync_cta()
    score, block = m.read_words(own + (lane.lane & slots - 1) * 8, 2)
    shares = LANES // slots  # number of lanes that share the counting for one block

    def count(i, place):
        pair = m.read_words(found + i * (16 * shares) + (lane.lane & -slots) * (16 // slots), 4)
        for other, at in (pair[:2], pair[2:]):
            place = place + m.number(_before(m, other, at, score, block))
        return place

    steps = spec.variant.warps * slots // (2 * shares)
    place = m.repeat(steps, count, 0)
    if shares > 1:
        place = place + m.shuffle(place, lane.lane ^ slots)
    wins = (lane.lane < slots) & (score >= 0) & (place < spec.free)
    m.write(winners + m.smaller(place, LANES - 1) * 4, block, only=wins)
    m.sync_cta()
    return m.read(winners + lane.lane * 4)

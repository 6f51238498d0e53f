"""Defines the exchanges between the warps of a cluster in a decode step.

    S2 = scale log2(e) Q K^T     p = 2 ** (S2 - max) / sum     importance = sum of p over heads

Each branch has two phases: first the logits, then the product with V. After the logits of
a branch, each warp pushes the maximum and the sum of its softmax to every CTA of the cluster.
Before the product P V, p is divided by the sum over the whole cluster and multiplied by the
branch's gate. Since p is already normalized and gated, one accumulator of P V serves all three
branches.

| exchange | pushed data                                                                       |
|----------|-----------------------------------------------------------------------------------|
| 0        | maximum and sum of the compressed branch                                          |
| 1        | maximum and sum of the sliding branch                                             |
| 1        | for each block, the parts of the scores of the block and of the previous block    |
| 2        | maximum and sum of the selected branch                                            |
| 3        | parts of the output                                                               |

In every CTA, each exchange has its own barrier, which counts the received bytes and is used once.
The CTAs need no barrier at the end, since no CTA ends before it has received all data that other
CTAs push to it.
"""

from collections.abc import Iterator
from typing import Any

from kernels_pallas.mosaic.decode_lane import FLOOR, NOTHING, Lane, Words, Work
from kernels_pallas.specs.decode import HEADS, STAT_BYTES, STRIP, WARP_COPY_BYTES
from kernels_pallas.specs.tile import LANES

COMPRESSED, SLIDING, SELECTED, OUTPUT = range(4)
KEPT_STATS = 8  # maximum number of statistics that a lane keeps between its two loops


def expected_bytes(lane: Lane, work: Work) -> list[Any]:
    """Return the number of bytes that each barrier expects."""
    spec = lane.spec
    stats = spec.cluster_warps * STAT_BYTES
    scores = work.strips * (8 * STRIP // spec.per_page)
    floats = lane.m.smaller(spec.slice, HEADS * spec.Dv - lane.rank * spec.slice)
    return [stats, scores + stats, stats, floats * (4 * spec.variant.cluster)]


# Softmax of a warp's strips.


def masked(lane: Lane, s2: list[Words], first: Any, low: Any, high: Any) -> list[Words]:
    """Return the base-2 logits of a strip that begins with key `first`.

    Keys outside `low .. high - 1` are masked.
    """
    m = lane.m

    def unseen_hidden(_, s2):
        found = []
        for tile, each in enumerate(s2):
            keys = [first + (lane.pair * 2 + (8 * tile + e)) for e in range(2)]
            seen = [(key >= low) & (key < high) for key in keys]
            found.append([m.where(seen[i % 2], x, NOTHING) for i, x in enumerate(each)])
        return found

    partial = (first < low) | (first + STRIP > high)
    return m.repeat(m.number(partial), unseen_hidden, s2, unrolled=False)


def with_strip(lane: Lane, state: list[Words], s2: list[Words]) -> list[Words]:
    """Update the softmax maximum and sum of the lane's rows with the logits of a strip."""
    m, found = lane.m, []
    for r, (before, total) in enumerate(state):
        mine = [tile[2 * r + e] for tile in s2 for e in range(2)]
        top = before
        for x in mine:
            top = m.larger(top, x)
        over = m.larger(top, FLOOR)
        total = total * m.exp2(before - over)
        for x in mine:
            total = total + m.exp2(x - over)
        found.append([top, total])
    return found


def probabilities(lane: Lane, s2: list[Words], norms: list[Words]) -> list[Words]:
    """Compute the probabilities p of a strip from its base-2 logits.

    `norms` are the maximum and 1 / sum of the lane's rows.
    """
    return [
        [lane.m.exp2(x - norms[i // 2][0]) * norms[i // 2][1] for i, x in enumerate(tile)]
        for tile in s2
    ]


def gated(norms: list[Words], gate: Words) -> list[Words]:
    """Multiply 1 / sum in `norms` by a gate g, so that `probabilities` returns g p instead of p."""
    return [[top, inverse * g] for (top, inverse), g in zip(norms, gate, strict=True)]


def left_operand(lane: Lane, p: list[Words]) -> Words:
    """Convert P of a strip to the left operand of P V."""
    m, dtype = lane.m, lane.spec.dtype
    return [m.pack(p[t][2 * r], p[t][2 * r + 1], dtype) for t in range(2) for r in range(2)]


def keep(lane: Lane, place: Any, s2: list[Words], only: Any = None) -> None:
    """Store the base-2 logits of a strip if `only` is true."""
    where = {} if only is None else {"only": only}
    for t in range(2):
        lane.m.write_words(place, s2[t], t * WARP_COPY_BYTES, **where)


def kept(lane: Lane, place: Any) -> list[Words]:
    m = lane.m
    return [[m.real(x) for x in m.read_words(place, 4, t * WARP_COPY_BYTES)] for t in range(2)]


# Maximum and sum of the cluster.


def _over_pairs(lane: Lane, x: Any, combine) -> Any:
    """Reduce `x` over the four lanes that have the same rows."""
    for distance in (1, 2):
        x = combine(x, lane.m.exchange(x, distance))
    return x


def _add(a: Any, b: Any) -> Any:
    return a + b


def tell(lane: Lane, kind: int, state: list[Words]) -> None:
    """Push this warp's maximum and sum of each row to all CTAs of the cluster."""
    m, cluster, stats = lane.m, lane.spec.variant.cluster, _stats(lane, kind)
    for r, (top, total) in enumerate(state):
        most = _over_pairs(lane, top, m.larger)
        total = _over_pairs(lane, total * m.exp2(top - m.larger(most, FLOOR)), _add)
        place = stats + lane.number * STAT_BYTES + _stat(lane, lane.number & 3, r)
        for first in range(0, cluster, 4):
            cta = lane.pair + first
            to, only = m.smaller(cta, cluster - 1), cta < cluster
            m.push(lane.barrier(kind), place, [most, total], to, only)


def _stats(lane: Lane, kind: int) -> Any:
    """Return the address in shared memory of the statistics of an exchange."""
    return lane.place("sliding_stats" if kind == SLIDING else "stats")


def _stat(lane: Lane, warp: Any, r: int) -> Any:
    """Return the offset of the lane's row `r` in a warp's 16 rows of statistics.

    `warp` is the index of this warp, modulo four. The rows of four warps are permuted so that 16
    lanes read from all banks.
    """
    return ((lane.row + 8 * r) ^ (warp << 2)) << 3


def told(lane: Lane, kind: int) -> list[Words]:
    """Read the statistics of all warps, and return the maximum and 1 / sum over the cluster for
    the lane's rows. For a row without keys, return 0 instead of 1 / sum.
    """
    m, spec, found = lane.m, lane.spec, []
    count = spec.cluster_warps // 4
    for r in range(2):
        place = _stats(lane, kind) + lane.pair * STAT_BYTES + _stat(lane, lane.pair, r)

        def read(i, place=place):
            return [m.real(x) for x in m.read_words(place, 2, 4 * STAT_BYTES * i)]

        again = [read(i) for i in range(count)] if count <= KEPT_STATS else None
        top = m.word(NOTHING)
        for i in range(count):
            top = m.larger(top, (again[i] if again else read(i))[0])
        top = m.larger(_over_pairs(lane, top, m.larger), FLOOR)
        total = m.word(0.0)
        for i in range(count):
            most, part = again[i] if again else read(i)
            total = m.multiply_add(part, m.exp2(most - top), total)
        total = _over_pairs(lane, total, _add)
        some = (total > 0.0) & lane.used(r)
        inverse = m.quotient(1.0, m.where(some, total, 1.0))
        found.append([top, m.where(some, inverse, 0.0)])
    return found


# Scores of blocks.


def push_scores(lane: Lane, p: list[Words], strip: Any, there: Any) -> None:
    """Compute the contribution of a strip of compressed tokens to the scores of its blocks.

    If `there` is true, push the contribution to all CTAs.

    With `cover = l / d`, the token in slot o of a page shares min(o + 1, cover) strides with the
    page's block. The token in slot o shares the other max(cover - 1 - o, 0) strides with the
    previous block (Eq. 9). The score of block j is the sum of two parts, score[j] = own[j] +
    following[j + 1]. Lanes exchange sums over heads until each lane has the sums of one slot. In
    the index of a slot, bit 0 is lane bit 3, bits 1 and 2 are lane bits 0 and 1, and bit 3 is lane
    bit 4. Lanes whose indices differ only in bit 2 have copies of the same sum.
    """
    m, spec, cluster = lane.m, lane.spec, lane.spec.variant.cluster
    distances = 8, 1, 2, 16  # distance of the lanes whose slots differ in bit 0, 1, 2 or 3
    heads = [[p[t][e] + p[t][2 + e] for e in range(2)] for t in range(2)]
    upper, odd = (lane.lane & 16) > 0, (lane.lane & 8) > 0
    both = [_swapped(m, upper, heads[0][e], heads[1][e], 16) for e in range(2)]
    one = _swapped(m, odd, both[0], both[1], 8)
    one = one + m.exchange(one, 4)
    bits = [m.number((lane.lane & distance) > 0) for distance in distances]
    in_page = spec.per_page.bit_length() - 1
    slot = _number(m, bits[:in_page])
    own = one * m.floating(m.smaller(slot + 1, spec.cover))
    following = one * m.floating(m.larger((spec.cover - 1) - slot, 0))
    for distance in distances[:in_page]:
        own = own + m.exchange(own, distance)
        following = following + m.exchange(following, distance)
    blocks = STRIP // spec.per_page
    block = strip * blocks + _number(m, bits[in_page:])
    copy = _number(m, [*bits[:in_page], m.number((lane.lane & 4) > 0)])
    place = lane.place("scores") + block * 8
    copies = 2 * spec.per_page
    for first in range(0, cluster, copies):
        cta = copy + first
        to, only = m.smaller(cta, cluster - 1), there & (cta < cluster)
        m.push(lane.barrier(SLIDING), place, [own, following], to, only)


def _swapped(m: Any, upper: Any, low: Any, high: Any, distance: int) -> Any:
    """Add values of two lanes whose indices differ by XOR with `distance`.

    The lane in which `upper` is true gets the sum of `high` over the two lanes, and the other lane
    gets the sum of `low`.
    """
    return m.where(upper, high, low) + m.exchange(m.where(upper, low, high), distance)


def _number(m: Any, bits: Words) -> Any:
    """Return the integer with these bits, the lowest bit first."""
    found = m.word(0)
    for i, bit in enumerate(bits):
        found = found + (bit << i)
    return found


# The output.


def sum_up(lane: Lane, acc: list[Words]) -> Iterator[tuple[Words, Any, Any]]:
    """Add up the partial outputs of all warps of the cluster, in the order of the warps.

    Yields: Four neighbouring elements of the output `[16, Dv]`, the index of the first element,
      and whether this lane has elements.
    """
    m, spec, cluster = lane.m, lane.spec, lane.spec.variant.cluster
    warps, width = spec.variant.warps, spec.Dv
    floats = HEADS * width

    def chunk(row, number):
        """Return the offset of 32-byte chunk `number` in output row `row`. The chunks with the same
        number in four rows are in different banks.
        """
        return (((row & 1) << 1 | (row >> 1) & 1) ^ number) << 5

    place = lane.place("ring") + lane.warp * spec.ring_bytes + lane.row * (4 * width)
    if spec.fp8:  # a lane has four neighbouring columns of every two tiles
        places = [
            place + (lane.pair & 1) * 16 + chunk(lane.row, lane.pair // 2 + i) for i in (0, 2)
        ]
    else:
        places = [place + lane.pair * 8 + chunk(lane.row, i) for i in range(4)]
    m.sync()  # lanes overwrite memory that other lanes have read
    for tile in range(0, width // 8, 4 // len(places)):
        for r in range(2):
            own = acc[tile][2 * r : 2 * r + 2]
            if spec.fp8:
                own = [
                    x for pair in zip(own, acc[tile + 1][2 * r :], strict=False) for x in pair
                ]
            to = places[tile % 4 * len(places) // 4]
            m.write_words(to, own, 128 * (tile // 4) + 4 * 8 * width * r)
    m.sync_cta()
    slice_ = spec.slice
    threads = warps * LANES
    for first in range(0, floats, 4 * threads):
        at = lane.thread * 4 + first
        total = [m.word(0.0)] * 4
        row = at // width
        place = lane.place("ring") + row * (4 * width) + (at >> 2 & 1) * 16
        place = place + chunk(row, at % width >> 3)
        for warp in range(warps):
            part = m.read_words(place, 4, warp * spec.ring_bytes)
            total = [x + m.real(y) for x, y in zip(total, part, strict=True)]
        to = lane.place("partial_out") + (lane.rank * slice_ + at % slice_) * 4
        m.push(lane.barrier(OUTPUT), to, total, at // slice_)
    m.wait_for_bytes(lane.barrier(OUTPUT))
    for first in range(0, slice_, 4 * threads):
        at = lane.thread * 4 + first
        mine = (at < slice_) & (at < floats - lane.rank * slice_)
        at = m.smaller(at, slice_ - 4)
        total = [m.word(0.0)] * 4
        for rank in range(cluster):
            part = m.read_words(lane.place("partial_out") + at * 4, 4, 4 * slice_ * rank)
            total = [x + m.real(y) for x, y in zip(total, part, strict=True)]
        yield total, lane.rank * slice_ + at, mine

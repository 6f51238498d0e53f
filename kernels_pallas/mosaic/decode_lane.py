"""Defines the indices of a lane in a decode step, and the work of the lane's warp."""

from typing import Any, NamedTuple

from kernels_pallas.specs.decode import STRIP, TILE_BYTES, Decode
from kernels_pallas.specs.tile import LANES, cdiv

NOTHING = -1e30  # in place of a masked logit
FLOOR = -1e20  # lower bound of a maximum, with which 2 ** (NOTHING - maximum) is 0
Words = list[Any]  # a list of words of `warp.py`, or of emulated words


class Lane(NamedTuple):
    """The position of a lane. Lane `4 row + pair` holds rows `row` and `row + 8` of a product.

    Attributes:
      m: The object with the instructions of a warp (`warp.py`).
      lane: Index of the lane in its warp.
      warp: Index of the warp in its CTA.
      rank: Index of the CTA in its cluster.
      number: Index of the warp in its cluster.
      shared: Address of shared memory.
    """

    m: Any
    spec: Decode
    lane: Any
    row: Any
    pair: Any
    warp: Any
    rank: Any
    number: Any
    shared: Any

    @classmethod
    def of(cls, m: Any, spec: Decode, rank: Any, shared: Any) -> "Lane":
        lane, of_cta = m.lane(), m.warp_of_cta()
        number = rank * spec.variant.warps + of_cta
        return cls(m, spec, lane, lane >> 2, lane & 3, of_cta, rank, number, m.shared(shared))

    @property
    def thread(self) -> Any:
        """Index of the thread in the CTA."""
        return self.warp * LANES + self.lane

    def place(self, part: str) -> Any:
        """Return the address of a part of shared memory."""
        return self.shared + self.spec.offsets[part]

    def barrier(self, exchange: int) -> Any:
        return self.shared + (self.spec.offsets["barriers"] + 8 * exchange)

    def rows(self) -> Words:
        """Return the indices of the lane's two query heads in their group. An unused row has
        the index of the group's last head.
        """
        last = self.spec.G - 1
        return [self.m.smaller(self.row + 8 * r, last) for r in range(2)]

    def used(self, r: int) -> Any:
        """Return whether the lane's row `r`, 0 or 1, is a query head."""
        return self.row + 8 * r < self.spec.G

    @property
    def logits(self) -> Any:
        """Address of this lane's logits for the first strip of the warp."""
        own = self.warp * (self.spec.kept_strips * TILE_BYTES)
        return self.place("logits") + own + self.lane * 16


class Work(NamedTuple):
    """The numbers of visible keys of a query, and this warp's share of the work. Each field is
    a 32-bit word with the same value in all lanes of the warp.

    Attributes:
      seen: Number of visible raw tokens, from the first token of the row.
      count: Number of visible compressed tokens.
      strips: Number of strips of compressed slots in the whole cluster.
      first: Index of the warp's first compressed strip. The indices of the warp's next strips
        increase by `warps`.
      mine: Number of compressed strips of the warp.
      sliding: Number of the warp's strips of the sliding branch. The last warp of the cluster
        has the first strip of the sliding branch, since the last warp has the fewest compressed
        strips.
      window_start: First key of the sliding branch.
      blocks: Number of selection blocks.
    """

    seen: Any
    count: Any
    strips: Any
    first: Any
    mine: Any
    sliding: Any
    window_start: Any
    blocks: Any

    @classmethod
    def of(cls, lane: Lane, seen: Any) -> "Work":
        """Distribute the strips over the warps. Compressed token i is visible if `seen` is at
        least `i * stride + compress_block`. All CTAs have the same number of compressed strips,
        except that the last CTAs may have fewer or none.
        """
        m, spec = lane.m, lane.spec
        cluster, warps = spec.variant.cluster, spec.variant.warps
        after = m.larger(seen - spec.compress_block, 0)
        count = m.where(seen >= spec.compress_block, after // spec.stride + 1, 0)
        strips = m.where(count > 0, (count + (spec.cover - 1 + STRIP - 1)) // STRIP, 0)
        each = cdiv(strips, cluster)
        begin = lane.rank * each
        first = begin + lane.warp
        mine = m.larger(m.smaller(begin + each, strips) - first + (warps - 1), 0) // warps
        start = m.larger(seen - spec.window, 0)
        sliding = m.word(0)
        if spec.window:
            before = spec.cluster_warps - 1 - lane.number
            window_strips = cdiv(seen, STRIP) - start // STRIP
            sliding = m.larger(window_strips - before + (spec.cluster_warps - 1), 0)
            sliding = sliding // spec.cluster_warps
        blocks = cdiv(seen, spec.block)
        return cls(seen, count, strips, first, mine, sliding, start, blocks)

    def compressed_strip(self, lane: Lane, i: Any) -> Any:
        """Convert index `i` among the warp's compressed strips to the index among the cluster's
        compressed strips.
        """
        return self.first + i * lane.spec.variant.warps

    def sliding_key(self, lane: Lane, i: Any) -> Any:
        """Return the first key of the warp's strip `i` of the sliding branch."""
        before = lane.spec.cluster_warps - 1 - lane.number
        return (self.window_start // STRIP + before + i * lane.spec.cluster_warps) * STRIP

"""The distribution of the tokens of one sequence over the ranks of a context group.

The sequence is split into chunks of equal length. With `zigzag`, rank `r` of `R` has the chunks
`r` and `2R - 1 - r`, so that all ranks have equally many query-key pairs. With `contiguous`, rank
`r` has chunk `r`. A shard consists of the chunks of a rank in the order of their tokens.

A sequence is padded at the end if its length is not a multiple of the number of chunks. No real
token attends to the padding, and the output of the padding is undefined.
"""

import dataclasses
from typing import Any, Literal, get_args

from nsa_core import validate

type Layout = Literal["zigzag", "contiguous"]

# Maximum bytes of keys and values that are gathered at once, unless a single head has more. If
# heads are gathered one at a time, the transfer of the next head overlaps with the computation of
# the current head. If the computation is short, however, its launches cost more than the
# transfer.
UNIT_BYTES = 2**27

LAYOUTS: tuple[str, ...] = get_args(Layout.__value__)


def check(layout: str) -> None:
    validate.one_of("context_layout", layout, LAYOUTS)


def padded_length(length: int, size: int, layout: str) -> int:
    """Return the smallest length that is at least `length` and that `size` ranks can split into
    equal chunks.
    """
    check(layout)
    chunks = size * len(_chunks_of(0, size, layout))
    return -(-length // chunks) * chunks


@dataclasses.dataclass(frozen=True)
class Shards:
    """The chunks of tokens of one rank and of the other ranks."""

    layout: str
    size: int  # R
    rank: Any  # an int, or an array
    chunk: int  # tokens per chunk

    @property
    def length(self) -> int:
        """`S`, including padding."""
        return self.chunk * self.size * len(self.own)

    @property
    def own(self) -> tuple[Any, ...]:
        """The indices of this rank's chunks."""
        return _chunks_of(self.rank, self.size, self.layout)

    @property
    def calls(self) -> list[tuple[slice, Any]]:
        """For each chunk of this rank: the slice of the chunk's tokens in the shard, and the
        position in the sequence where the chunk ends.
        """
        return [
            (slice(i * self.chunk, (i + 1) * self.chunk), (number + 1) * self.chunk)
            for i, number in enumerate(self.own)
        ]

    @property
    def order(self) -> list[int]:
        """The indices of the chunks in the order of the concatenated shards."""
        sizes = self.size, self.layout
        return [chunk for rank in range(self.size) for chunk in _chunks_of(rank, *sizes)]

    @property
    def places(self) -> list[int]:
        """The index of each chunk 0, 1, ... in `order`."""
        order = self.order
        return [order.index(chunk) for chunk in range(len(order))]


def _chunks_of(rank: Any, size: int, layout: str) -> tuple[Any, ...]:
    """Return the indices of a rank's chunks in ascending order."""
    return (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)


def chunk_length(name: str, local_length: int, layout: str) -> int:
    """Return the number of tokens per chunk on ranks with `local_length` tokens."""
    check(layout)
    count = len(_chunks_of(0, 1, layout))
    if local_length % count:
        raise ValueError(
            f"{name} must have an even number of tokens on each rank if context_layout is "
            f"{layout!r}, got {local_length}; pad the sequence (shard_sequence does)"
        )
    return local_length // count


def windows_of_chunks(ops: Any, begin: Any, shards: Shards, most: int) -> tuple[list[Any], Any]:
    """Find the chunk in which each window begins.

    Args:
      ops: `array_ops.ArrayOps`.
      begin: The first token of each window `[B, C]`, ascending, followed by -1 in unused slots.
      most: The maximum number of windows per chunk.

    Returns:
      `(offsets, slots)`. `offsets` has one array `[B, most]` per chunk of this rank, with the
      offsets in the chunk at which windows begin. An offset of `shards.chunk` or more means
      that the slot has no window. `slots` `[B, C]` has the slot of each window, counted over all
      chunks. Each chunk has `most` slots. The entry of an unused window is the total number of
      slots.
    """
    xp, chunk, chunks, length = ops.xp, shards.chunk, len(shards.order), shards.length
    begin = xp.where(begin < 0, length, begin)
    ends = ops.numbers(begin, chunks) * chunk
    first = ops.to_int32(ops.searchsorted(begin, ends, "left"))  # window of each chunk
    padded = ops.pad_end(begin, 1, most, length)
    slots = [first[:, number, None] + ops.arange(begin, most) for number in shards.own]
    pairs = zip(slots, shards.own, strict=True)
    own = [ops.take_rows(padded, each) - number * chunk for each, number in pairs]
    number = (begin // chunk).clip(0, chunks - 1)
    slot = ops.arange(begin, begin.shape[1]) - ops.take_rows(first, number)
    return own, xp.where(begin < length, number * most + slot, chunks * most)


def head_groups(kv_heads: int, head_bytes: int) -> list[slice]:
    """Divide the key/value heads into equal groups. The heads of a group are gathered and
    attended to together.

    Args:
      head_bytes: bytes of the keys and values of one head for the whole sequence.
    """
    sizes = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    count = max(n for n in sizes if n == 1 or n * head_bytes <= UNIT_BYTES)
    return [slice(first, first + count) for first in range(0, kv_heads, count)]

"""How the tokens of one sequence lie on the ranks of a context group; no framework.

The sequence is cut in chunks of equal length. `zigzag` gives rank `r` of `R` the chunks `r` and
`2R - 1 - r`, so that all ranks have as many query-key pairs; `contiguous` gives it chunk `r`.
A rank's shard is its chunks in the order of their tokens, so that neither layout turns time
around within a rank.

A length that is no multiple of the number of chunks is padded at the end: no token before the
padding sees it, and its output means nothing.
"""

import dataclasses
from typing import Any, Literal, get_args

type Layout = Literal["zigzag", "contiguous"]

# Of keys and values that are gathered at once. One head at a time hides the transport of the next
# behind its own work; where that work is short, its launches cost more than transport.
UNIT_BYTES = 2**27

LAYOUTS: tuple[str, ...] = get_args(Layout.__value__)


def check(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"context_layout must be one of {LAYOUTS}, got {layout!r}")


def padded_length(length: int, size: int, layout: str) -> int:
    """The shortest length of at least `length` that `size` ranks share in equal chunks."""
    check(layout)
    chunks = size * len(_chunks_of(0, size, layout))
    return -(-length // chunks) * chunks


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where the tokens of a rank and of the others stand."""

    layout: str
    size: int  # R
    rank: Any  # an int, or an array
    chunk: int  # tokens of a chunk

    @property
    def length(self) -> int:
        """`S`, padding included."""
        return self.chunk * self.size * len(self.own)

    @property
    def own(self) -> tuple[Any, ...]:
        """The numbers of this rank's chunks."""
        return _chunks_of(self.rank, self.size, self.layout)

    @property
    def calls(self) -> list[tuple[slice, Any]]:
        """Of each chunk of this rank: its tokens in the shard, and its end in the sequence."""
        return [
            (slice(i * self.chunk, (i + 1) * self.chunk), (number + 1) * self.chunk)
            for i, number in enumerate(self.own)
        ]

    @property
    def order(self) -> list[int]:
        """The numbers of the chunks in the order in which shards, side by side, have them."""
        sizes = self.size, self.layout
        return [chunk for rank in range(self.size) for chunk in _chunks_of(rank, *sizes)]

    @property
    def places(self) -> list[int]:
        """Where chunk 0, 1, ... stands in `order`."""
        order = self.order
        return [order.index(chunk) for chunk in range(len(order))]


def _chunks_of(rank: Any, size: int, layout: str) -> tuple[Any, ...]:
    """The numbers of a rank's chunks, ascending."""
    return (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)


def chunk_length(name: str, local_length: int, layout: str) -> int:
    """Tokens of a chunk on ranks that have `local_length` of them."""
    check(layout)
    count = len(_chunks_of(0, 1, layout))
    if local_length % count:
        raise ValueError(
            f"{name} must have an even number of tokens on each rank where context_layout is "
            f"{layout!r}, got {local_length}: pad the sequence (shard_sequence does)"
        )
    return local_length // count


def head_groups(kv_heads: int, head_bytes: int) -> list[slice]:
    """Key/value heads that are gathered and attended to together, in equal groups.

    Args:
      head_bytes: keys and values of a head, of the whole sequence.
    """
    sizes = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    count = max(n for n in sizes if n == 1 or n * head_bytes <= UNIT_BYTES)
    return [slice(first, first + count) for first in range(0, kv_heads, count)]

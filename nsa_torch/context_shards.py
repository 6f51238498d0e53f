"""Where the tokens of each rank of a context group stand, on tensors (`nsa_core.context_layout`)"""

import dataclasses

import torch
from torch import Tensor

from nsa_core import context_layout as layouts
from nsa_torch.context_ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where the tokens of this rank and of the others stand."""

    layout: str
    size: int  # R
    rank: int
    chunk: int  # tokens of a chunk

    @property
    def length(self) -> int:
        """`S`, padding included."""
        return self.chunk * self.size * layouts.chunks_a_rank(self.layout)

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's chunks."""
        return layouts.chunks_of(self.rank, self.size, self.layout)

    @property
    def calls(self) -> list[tuple[slice, int]]:
        """Of each chunk of this rank: its tokens in the shard, and its end in the sequence."""
        return [
            (slice(i * self.chunk, (i + 1) * self.chunk), (number + 1) * self.chunk)
            for i, number in enumerate(self.own)
        ]

    @property
    def gap(self) -> int:
        """Tokens of other ranks between this rank's chunks."""
        return (self.own[-1] - self.own[0] + 1 - len(self.own)) * self.chunk

    def chunks_of(self, shards: Tensor) -> list[Tensor]:
        """Views of the chunks of all ranks' shards `[R, T, ...]`, in the sequence's order."""
        pieces = [x for shard in shards for x in shard.split(self.chunk)]
        return [pieces[at] for at in layouts.chunk_places(self.size, self.layout)]

    def in_order(self, shards: Tensor, chunk: int | None = None) -> Tensor:
        """`shards` `[R, T, ...]` as the sequence has them, `[S, ...]`.

        Args:
          chunk: entries of a chunk, where they are not its tokens.
        """
        pieces = [x for shard in shards for x in shard.split(chunk or self.chunk)]
        return torch.cat([pieces[at] for at in layouts.chunk_places(self.size, self.layout)])

    def by_rank(self, whole: Tensor, chunk: int | None = None) -> Tensor:
        """The inverse of `in_order`: `[S, ...]` as the shards of all ranks, `[R, T, ...]`."""
        pieces = whole.split(chunk or self.chunk)
        order = layouts.chunk_order(self.size, self.layout)
        return torch.cat([pieces[i] for i in order]).unflatten(0, (self.size, -1))


def shards_of(ranks: Ranks, name: str, local_length: int, layout: str) -> Shards:
    """Of `local_length` tokens on each rank."""
    layouts.check(layout)
    chunk = layouts.chunk_length(name, local_length, layout)
    return Shards(layout, ranks.size, ranks.rank, chunk)

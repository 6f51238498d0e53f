"""The collectives of context parallelism, along a mesh dimension of `torch.distributed`, and
the positions of each rank's tokens.

All data moves through the process group of the mesh. If the process group raises an error, every
rank that waits raises the error again with the name of the step. If a rank is lost, the other ranks
end within the timeout of the process group.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_core import context_layout as layouts
from nsa_torch import plans


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ValueError unless `mesh` is a `DeviceMesh` with one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"context_mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"context_mesh must have one dimension, got {mesh.ndim}; pass one dimension of a "
            "larger mesh, mesh['context']"
        )


class Ranks:
    """The ranks of a mesh with one dimension.

    Raises:
      ValueError: The mesh has more than one dimension, or its process group does not support
        tensors on `device`.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device):
        check_mesh(mesh)
        if mesh.device_type != device.type:
            raise ValueError(
                f"context_mesh must be on the device of query, {device.type}, "
                f"got a mesh of {mesh.device_type}"
            )
        self.group = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        try:
            self.group._get_backend(device)
        except RuntimeError as error:
            name = dist.get_backend(self.group)
            raise ValueError(
                f"context_mesh must have a backend for {device.type} tensors, got {name}"
            ) from error

    def gather(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        """Start an all-gather of `x`. Call the returned function to wait for the result
        `[R, ...]`. `what` is the name of the data in error messages.
        """
        found = x.new_empty(self.size, *x.shape)
        run = dist.all_gather_into_tensor, found.flatten(0, 1), x.contiguous()
        return self._started(*run, found, f"the all-gather of {what}")

    def scatter_sum(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        """Start a reduce-scatter of `x` `[R, ...]`. Call the returned function to wait for the
        part of the sum that belongs to this rank. `what` is the name of the data in error messages.
        """
        found = x.new_empty(x.shape[1:])
        run = dist.reduce_scatter_tensor, found, x.contiguous().flatten(0, 1)
        return self._started(*run, found, f"the reduce-scatter of {what}")

    def _started(self, collective, output, given, found, what):
        def guarded(step, *tensors, **options):
            try:
                return step(*tensors, **options)
            except RuntimeError as error:
                raise RuntimeError(
                    f"context parallelism: {what} failed on rank {self.rank} of {self.size}; "
                    "another rank has ended, or did not answer within the timeout of the process "
                    "group"
                ) from error

        work = guarded(collective, output, given, group=self.group, async_op=True)

        def wait():
            guarded(work.wait)
            return found

        return wait


@dataclasses.dataclass(frozen=True)
class Shards(layouts.Shards):
    """The chunks of tokens of this rank and of the other ranks."""

    ranks: Ranks = dataclasses.field(compare=False)

    @classmethod
    def of(cls, ranks: Ranks, name: str, local_length: int, layout: str) -> "Shards":
        """Return the shards for `local_length` tokens per rank. `name` is the name of the argument
        in error messages.
        """
        chunk = layouts.chunk_length(name, local_length, layout)
        return cls(layout, ranks.size, ranks.rank, chunk, ranks)

    @property
    def gap(self) -> int:
        """The number of tokens of other ranks between this rank's chunks."""
        return (self.own[-1] - self.own[0] + 1 - len(self.own)) * self.chunk

    def chunks_of(self, shards: Tensor, chunk: int | None = None) -> list[Tensor]:
        """Return the chunks of all ranks in the order of the sequence, as views of `shards`
        `[R, T, ...]`.

        Args:
          chunk: Number of entries per chunk, by default the number of tokens per chunk.
        """
        pieces = [x for shard in shards for x in shard.split(chunk or self.chunk)]
        return [pieces[at] for at in self.places]

    def in_order(self, shards: Tensor, chunk: int | None = None) -> Tensor:
        """Put `shards` `[R, T, ...]` into the order of the sequence, `[S, ...]`."""
        return torch.cat(self.chunks_of(shards, chunk))


def agree(
    ranks: Ranks, device: torch.device, describe: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Tensor]:
    """Check that `describe()` returns the same text on all ranks. Return the text, and a row of
    numbers that encodes the text.

    Every call gathers one row of numbers from each rank. On a GPU the host writes and reads rows of
    numbers only for a new description, since writing and reading wait for the device.

    Raises:
      ValueError: The descriptions differ, or `describe` failed on a rank. All ranks raise this
        error, but a rank on which `describe` failed raises the error of `describe`. On a GPU, a
        rank that has already described the same call compares the rows of numbers in the function
        `say`.
    """
    try:
        words = describe()
    except Exception:
        refuse(ranks, device)
        raise
    text = "; ".join(f"{name}={value}" for name, value in words.items())
    known = text, device, ranks.group
    row = plans.KNOWN.get(known)
    if row is not None and device.type != "cpu":
        say(ranks, row)
        return words, row
    row = _row(text, device)
    rows = ranks.gather(row, SIZES)
    texts = [bytes(x).rstrip(b"\0").decode() for x in rows().cpu().tolist()]
    if "" in texts:
        raise ValueError(
            "arguments must be valid on all ranks of context_mesh, got an error on rank "
            f"{texts.index('')}; see the message of that rank"
        )
    for rank, other in enumerate(texts):
        for ours, theirs in zip(texts[0].split("; "), other.split("; "), strict=False):
            if ours != theirs:
                raise ValueError(
                    "arguments must have the same sizes on all ranks of context_mesh, "
                    f"got {ours} on rank 0 and {theirs} on rank {rank}"
                )
    return words, plans.keep(known, row)


def refuse(ranks: Ranks, device: torch.device) -> None:
    """Inform the other ranks that this rank has an error. The other ranks wait in the function
    `agree` or in the function `say`."""
    ranks.gather(_row("", device), SIZES)()


def _row(text: str, device: torch.device) -> Tensor:
    data = text.encode()[:LONGEST].ljust(LONGEST, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def say(ranks: Ranks, row: Tensor) -> None:
    """Gather the row of numbers that `agree` returned for a call that this rank has described
    before. Other ranks may describe the call for the first time. The host does not wait for a GPU.
    If ranks describe different calls, a device-side assertion fails, and the process cannot use the
    device afterwards.
    """
    torch._assert_async((ranks.gather(row, SIZES)() == row).all(), OTHERS)


OTHERS = (
    "arguments must have the same sizes on all ranks of context_mesh, got different sizes on "
    "another rank"
)
SIZES = "the arguments' sizes"
LONGEST = 2048  # number of bytes of a description

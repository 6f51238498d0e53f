"""Exchanges short messages between the processes of a run.

The messages are flags and short texts, which are exchanged on the host. Tensors are exchanged by
other collectives.
"""

import contextlib
import datetime
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

TIMEOUT_S = 900.0


class LostError(RuntimeError):
    """The error that another process of the run ended or did not answer in time."""


class Ranks:
    """A run with a single process. The methods of this class are the interface for all kinds of
    runs."""

    rank, size, timeout_s = 0, 1, TIMEOUT_S

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, in the order of ranks. A value must be valid JSON.
        Every rank must call this method.

        Raises:
          LostError: A rank has ended or does not answer.
        """
        return [value]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Every rank must call this method."""
        return any(self.gather(bool(flag)))

    def first(self, value: Any) -> Any:
        """Return the `value` of rank 0."""
        return self.gather(value)[0]

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that raises `LostError` if a collective fails because a rank is
        missing.
        """
        return contextlib.nullcontext()

    def close(self) -> None:
        """Leave the group of processes."""


@contextlib.contextmanager
def debug_level(name: str) -> Iterator[None]:
    """Return a context in which torch creates process groups with the debug level `name`.
    Collectives of a group with the level "DETAIL" are compared between the ranks before the
    collectives run. With the level "OFF" collectives are not compared.
    """
    import torch.distributed as dist

    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, name))
    try:
        yield
    finally:
        dist.set_debug_level(before)


class TorchRanks(Ranks):
    """The processes of `torch.distributed`, with gloo on the CPU and nccl for tensors on GPUs.

    Args:
      timeout_s: seconds after which a collective without all ranks is an error.
      compared: Whether collectives are compared, as in `debug_level`.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, compared: bool = False):
        import torch
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available()
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched():
                raise ValueError(
                    "--parallel with torch needs the processes of torchrun, got a single process; "
                    "start torchrun --nproc-per-node=N -m bench.train .."
                )
            # Messages use gloo and therefore do not wait for the GPU.
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            if on_gpu:
                torch.cuda.set_device(dist.get_node_local_rank())
            timeout = datetime.timedelta(seconds=timeout_s)
            with debug_level("DETAIL") if compared else contextlib.nullcontext():
                dist.init_process_group(backend, timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with self.together():
            dist.all_gather_object(found, value)
        return found

    def any(self, flag: bool) -> bool:
        import torch
        import torch.distributed as dist

        votes = torch.tensor(int(flag))
        with self.together():
            dist.all_reduce(votes)
        return bool(votes)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        import torch.distributed as dist

        words = "closed", "reset by peer", "timed out", "timeout", "aborted", "broken pipe"
        try:
            yield
        except LostError:
            raise
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and not any(
                word in text.lower() for word in words
            ):
                raise
            first = text.strip().splitlines()[0].partition(". ")[0]
            raise LostError(
                f"rank {self.rank} of {self.size} lost another rank, or waited for "
                f"another rank for longer than {self.timeout_s:.0f} s: {first}"
            ) from error

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class JaxRanks(Ranks):
    """The processes of `jax.distributed`.

    Args:
      coordinator: Address and port of process 0. "auto" means that JAX detects the cluster.
      size: Number of processes. Ignored with "auto".
      rank: Index of this process. Ignored with "auto".
      timeout_s: Seconds that processes wait for each other at the start.
    """

    def __init__(
        self,
        coordinator: str,
        size: int | None,
        rank: int | None,
        timeout_s: float = TIMEOUT_S,
    ):
        import jax

        known: dict[str, Any] = {}
        if coordinator != "auto":
            known = {"coordinator_address": coordinator}
            known |= {"num_processes": size, "process_id": rank}
        jax.distributed.initialize(initialization_timeout=round(timeout_s), **known)
        self.rank, self.size = jax.process_index(), jax.process_count()
        self.timeout_s = timeout_s

    def gather(self, value: Any) -> list[Any]:
        from jax.experimental import multihost_utils

        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.ravel(multihost_utils.process_allgather(np.int32(text.size)))
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: text.size] = text
        rows = np.reshape(multihost_utils.process_allgather(padded), (self.size, -1))
        pairs = zip(rows, lengths, strict=True)
        return [json.loads(row[:length].tobytes()) for row, length in pairs]

    def any(self, flag: bool) -> bool:
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(np.bool_(flag)).any())

    def close(self) -> None:
        import jax

        jax.distributed.shutdown()

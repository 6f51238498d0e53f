"""Converts block indices to half-open ranges of keys, which `fa2` can read instead of blocks.
Two methods compute the same ranges: `v1` loops over the rows on the host, and `v2` runs a dozen
operators on the device. `nsa_jax.ranges` implements `v2` in JAX.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nsa_core.config import NSAConfig
from nsa_torch.plain import constant

MODES = ("none", "v1", "v2", "adaptive")
# The mode `adaptive` uses v2 from this number of queries on, and v1 for fewer queries.
ADAPTIVE_MIN_LEN = 1024

_mode: contextvars.ContextVar[str] = contextvars.ContextVar("ranges", default="none")


@contextlib.contextmanager
def using(mode: str) -> Iterator[None]:
    """Make the selected branch of `fa2` convert blocks to ranges and read the ranges. Reading
    ranges changes only the cost, not the result.

    Raises:
      ValueError: `mode` is unknown.
    """
    if mode not in MODES:
        raise ValueError(f"ranges must be one of {MODES}, got {mode!r}")
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


@constant  # torch 2.11 cannot trace the value of a context variable
def asked() -> str:
    """Return the mode that the context manager `using` has set."""
    return _mode.get()


def way(mode: str, length: int) -> str:
    """Return the method for sequences of `length` queries under this `mode`: `none`, `v1` or
    `v2`.
    """
    if mode == "adaptive":
        return "v2" if length >= ADAPTIVE_MIN_LEN else "v1"
    return mode


def handed(
    block_indices: Tensor, positions: Callable[[], Tensor], config: NSAConfig
) -> Tensor | None:
    """Return the key ranges of `block_indices` if the context manager `using` is active, or None if
    `fa2` reads blocks."""
    chosen = way(asked(), block_indices.shape[1])
    if chosen == "none":
        return None
    make = to_ranges if chosen == "v2" else to_ranges_by_row
    return make(block_indices, positions(), config)


def to_ranges(block_indices: Tensor, position: Tensor, config: NSAConfig) -> Tensor:
    """Return `[start, end)` of each run of consecutive selected keys at or before the query, in
    ascending order.

    Args:
      block_indices: `[B, T, Hkv, n]`, ascending, negative in empty slots.
      position: `[B, T]`, the position of each query in its sequence; negative for padding.

    Returns:
      int32 `[B, T, Hkv, n, 2]`. Adjacent blocks are merged, and ends are limited to `position +
      1`. Unused slots at the end are `(0, 0)`.
    """
    size, count = config.select_block, block_indices.shape[-1]
    block = block_indices.to(torch.int64)
    last = position[:, :, None, None]
    valid = (block >= 0) & (block * size <= last)
    before = torch.nn.functional.pad(block, (1, -1), value=-2)
    opens = valid & (block != before + 1)
    # This is the index of the run of each block. Blocks without a run go to an extra slot, which
    # is removed.
    run = torch.where(valid, opens.cumsum(-1) - 1, count)
    end = torch.where(valid, torch.minimum((block + 1) * size, last + 1), 0)
    starts = block.new_zeros(*block.shape[:-1], count + 1)
    starts.scatter_(-1, torch.where(opens, run, count), block * size)
    ends = torch.zeros_like(starts).scatter_reduce_(-1, run, end, "amax")
    return torch.stack([starts, ends], dim=-1)[..., :-1, :].to(torch.int32)


def to_ranges_by_row(block_indices: Tensor, position: Tensor, config: NSAConfig) -> Tensor:
    """Compute the result of `to_ranges` row by row on the host. The host waits for the device."""
    size, count = config.select_block, block_indices.shape[-1]
    heads, found = block_indices.shape[2], []
    rows = block_indices.flatten(0, 2).tolist()
    places = position.flatten().repeat_interleave(heads).tolist()
    for row, place in zip(rows, places, strict=True):
        runs: list[list[int]] = []
        for block in row:
            start = block * size
            if block < 0 or start > place:
                continue
            end = min(start + size, place + 1)
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        found.append(runs + [[0, 0]] * (count - len(runs)))
    made = torch.tensor(found, dtype=torch.int32).to(block_indices.device)
    return made.reshape(*block_indices.shape, 2)

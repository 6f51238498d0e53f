"""Positions of the sequences in packed rows, made once for all layers.

    meta = nsa_jax.varlen_metadata(segment_ids, config=config)
    for layer in layers:  # or jax.lax.scan, jax.checkpoint
        y = nsa_jax.attention(query, key, value, gates, config=config, varlen=meta)

A pytree of arrays `[B, ..]`: made outside of a scan over layers and of `jax.checkpoint`, it exists
once per step, and no backward pass computes it again.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Int

from nsa_core import validate
from nsa_core.config import NSAConfig
from nsa_jax import checks
from nsa_jax.eager import any_rank, compiled
from nsa_jax.geometry import PackedRows, packed_rows


@any_rank
def varlen_metadata(
    segment_ids: Int[Array, "B S"],
    *,
    config: NSAConfig = NSAConfig(),
    max_segments: int | None = None,
    max_seqlen: int | None = None,
) -> PackedRows:
    """Make the argument `varlen` of calls on packed rows, which replaces `segment_ids`.

    The two limits are checked if the numbers are on the host (not under `jax.jit`), and on a GPU
    while `nsa_jax.debug` reports events. Otherwise the caller guarantees them.

    Args:
      segment_ids: `[B, S]`, as in `attention`.
      config: The config of the calls.
      max_segments: Bound of the runs of equal ids per row, including runs of padding. Defaults to
        `S`. With a bound Mosaic kernels use tiles per sequence, as in rows of one sequence.
      max_seqlen: Bound of the tokens of a run. Defaults to `S`. Blocks of a longer run beyond the
        bound may not be selected. With `max_segments`, Mosaic kernels treat a row that breaks a
        bound as padding.

    Raises:
      ValueError: an argument contradicts another, or numbers that the host reads.
    """
    validate.array("segment_ids", segment_ids, 2, validate.INTEGERS)
    validate.configuration(config)
    limits = {"max_segments": max_segments, "max_seqlen": max_seqlen}
    validate.sizes(**{name: x for name, x in limits.items() if x is not None})
    if any(limits.values()) and checks.is_read(segment_ids):
        _check(np.asarray(segment_ids), limits)
    return compiled(packed_rows)(segment_ids, config=config, **limits)


def rows_of(
    segment_ids: Any, varlen: Any, config: NSAConfig, batch: int, length: int | None = None
) -> Any:
    """The argument `segment_ids` of the steps: these, or the `PackedRows` of `varlen`.

    Args:
      batch, length: Sizes of the rows. A length of None means any.

    Raises:
      ValueError: Both are given, or `varlen` belongs to other rows or another config.
    """
    if varlen is None:
        return segment_ids
    if segment_ids is not None:
        raise ValueError("segment_ids must be None where varlen is given, got both")
    if not isinstance(varlen, PackedRows):
        raise ValueError(
            f"varlen must be what nsa_jax.varlen_metadata returns, got {type(varlen).__name__}"
        )
    if config.of_sizes != varlen.config.of_sizes:
        raise ValueError(f"varlen must be made with {config}, got one of {varlen.config}")
    wanted = batch, varlen.shape[1] if length is None else length
    if varlen.shape != wanted:
        raise ValueError(f"varlen must be of rows {wanted}, got {varlen.shape}")
    return varlen


def _check(segment_ids: np.ndarray, limits: dict[str, int | None]) -> None:
    new = np.ones(segment_ids.shape, bool)
    new[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    found = {"max_segments": int(new.sum(axis=1).max(initial=0)), "max_seqlen": 0}
    for row, ids in zip(new, segment_ids, strict=True):
        starts = np.flatnonzero(row)
        lengths = np.diff(np.append(starts, row.size))[ids[starts] >= 0]
        found["max_seqlen"] = max(found["max_seqlen"], int(lengths.max(initial=0)))
    for name, least in found.items():
        limit = limits[name]
        if limit is not None and limit < least:
            raise ValueError(
                f"{name} must be {least} at least, as segment_ids have, got {limit}"
            )


__all__ = ["PackedRows", "varlen_metadata"]

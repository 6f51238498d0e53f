"""Applies the tolerance rule, which limits the difference between a path (an implementation that
is judged) and the oracle. Arrays are NumPy arrays.

`oracle` is the dense reference in float64 on the already rounded inputs. `yardstick`, the baseline,
is the dense reference in the precision of the path. With `e = path - oracle` and
`y = yardstick - oracle`, all of the following bounds must hold:

max:    max abs(e) <= 2 max abs(y) + 4 eps max abs(oracle); in float32 also at most 5e-5
mean:   mean abs(e) <= 2 mean abs(y) + 4 eps mean abs(oracle); for the output of the selected
        branch in 16 bits also at most 1e-3
rms:    rms(e) <= 1.5 rms(y) + c rms(oracle), with `c` of the dtype (`RMS_OF_ORACLE`)
slope:  abs(<path, oracle> / <oracle, oracle> - 1) <= 1e-3, on 10^5 elements or more

Each bound detects other errors. The bound of the maximum does not detect small errors in all
elements. For example, outputs in bfloat16 that are multiplied by 1.02 satisfy the bound of the
maximum. The slope detects a common factor of all elements. Without a common factor, the slope of
many elements is close to 1, since rounding errors have no direction. The rms detects errors in few
elements or without a direction, such as a missing key in the window.

For products in e4m3 the rule differs in three points. For products in e4m3, the baseline rounds the
same values as the kernels. For products in e4m3, the absolute limits 5e-5 and 1e-3 do not apply,
since the rounding errors of e4m3 exceed these limits. For products in e4m3, the slope of the path
may differ from 1 by 2^-7 more than the slope of the baseline does. The slope of the baseline also
differs from 1, since rounded logits flatten the softmax. The margin of 2^-7 allows for tensor
cores, which keep 13 bits of a sum in steps of 32 keys. Each step may lose 2^-14 of the sum, and a
tile's list of 64 blocks has 128 steps.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

TIMES_YARDSTICK = 2
ROUNDINGS = 4
RMS_TIMES_YARDSTICK = 1.5
# `c` of the rms. In float64 the baseline equals the oracle, and 32 roundings are allowed, as in
# float32.
RMS_OF_ORACLE = {
    "bfloat16": 2.0**-10,
    "float16": 2.0**-13,
    "float32": 2.0**-18,
    "float64": 2.0**-47,
}
SLOPE, SLOPE_ELEMENTS = 1e-3, 10**5
FLOAT8_SLOPE = 2.0**-7
# Absolute limits in addition to the relative bounds.
FLOAT32_MAX = 5e-5
LOW_PRECISION_SELECTION_MEAN = 1e-3
# Relative amount by which a chosen block may score less than the block that it displaced.
SCORE_SLACK = 2.0**-10
NOT_FINITE = {"nan": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
# Number of elements that are converted to float64 at once, so that they fit in a CPU cache.
CHUNK = 2**17


@dataclasses.dataclass(frozen=True)
class Parity:
    """The errors of a path against the oracle, and their bounds. The fields have the same names as
    the fields of a record. `reason` is empty if all bounds hold.

    `error_rms` and its bound are None for indices. `slope` is None if there are too few elements.
    """

    error_max: float
    error_mean: float
    error_bound: float
    error_mean_bound: float
    ok: bool
    reason: str = ""
    rows_differ: int | None = None
    error_of: str = ""  # the array
    error_rms: float | None = None
    error_rms_bound: float | None = None
    slope: float | None = None
    slope_limit: float = SLOPE

    @property
    def share(self) -> float:
        """The largest ratio of an error to its bound. If the ratio is above 1, a bound is
        broken."""
        pairs = [(self.error_max, self.error_bound), (self.error_mean, self.error_mean_bound)]
        if self.error_rms is not None and self.error_rms_bound is not None:
            pairs.append((self.error_rms, self.error_rms_bound))
        if self.slope is not None:
            pairs.append((abs(self.slope - 1), self.slope_limit))
        used = [error / bound if bound else float(error > 0) * 2 for error, bound in pairs]
        return np.inf if not np.isfinite(used).all() else max(used)


@dataclasses.dataclass
class Norms:
    """Maximum, mean and root mean square of magnitudes, computed chunk by chunk."""

    count: int = 0
    max: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, x: np.ndarray) -> None:
        size = np.abs(x)
        self.count += size.size
        self.max = np.maximum(self.max, size.max(initial=0.0)).item()  # `maximum` keeps NaN
        self.total += size.sum().item()
        self.squares += np.einsum("i,i", size, size).item()

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


def check_parity(
    name: str,
    actual: np.ndarray,
    oracle: np.ndarray,
    yardstick: np.ndarray,
    *,
    dtype: str | np.dtype | None = None,
    selection: bool = False,
    in_float8: bool = False,
) -> Parity:
    """Apply the rule to one array.

    Args:
      name: The name of the array, for the reason.
      actual: The path's result.
      oracle: The reference in float64, in the shape of `actual`.
      yardstick: The baseline, which is the reference in the path's precision, in the shape of
        `actual`.
      dtype: The path's precision, if `actual` was converted. By default the dtype of `actual` is
        used.
      selection: Whether the array is the output of the selected branch.
      in_float8: Whether the path and the baseline compute products in e4m3.

    Raises:
      ValueError: The shapes differ.
    """
    dtype = np.dtype(actual.dtype if dtype is None else dtype)
    if not actual.shape == oracle.shape == yardstick.shape:
        shapes = f"{actual.shape}, oracle {oracle.shape}, yardstick {yardstick.shape}"
        raise ValueError(f"{name}: shapes must be equal, got {shapes}")
    error, low, exact = Norms(), Norms(), Norms()
    product, of_yardstick, misplaced = 0.0, 0.0, dict.fromkeys(NOT_FINITE, 0)
    for path, truth, rough in _chunks(actual, oracle, yardstick):
        finite = np.isfinite(truth)
        if not (finite.all() and np.isfinite(path).all()):
            for kind, where in NOT_FINITE.items():
                misplaced[kind] += int((where(path) != where(truth)).sum())
            path, truth, rough = (x[finite] for x in (path, truth, rough))
        if any(misplaced.values()):
            continue
        error.add(path - truth)
        exact.add(truth)
        product += np.einsum("i,i", path, truth).item()
        usable = np.isfinite(rough)
        if not usable.all():
            rough, truth = rough[usable], truth[usable]
        low.add(rough - truth)
        of_yardstick += np.einsum("i,i", rough, truth).item()
    for kind, count in misplaced.items():
        if count:
            return _broken(name, f"{kind} at other places than the oracle ({count})")
    floor = ROUNDINGS * float(ml_dtypes.finfo(dtype).eps)
    bound_max = TIMES_YARDSTICK * low.max + floor * exact.max
    bound_mean = TIMES_YARDSTICK * low.mean + floor * exact.mean
    bound_rms = RMS_TIMES_YARDSTICK * low.rms + RMS_OF_ORACLE[dtype.name] * exact.rms
    if dtype == np.float32 and not in_float8:
        bound_max = min(bound_max, FLOAT32_MAX)
    if selection and dtype.itemsize == 2 and not in_float8:
        bound_mean = min(bound_mean, LOW_PRECISION_SELECTION_MEAN)
    judged = exact.count >= SLOPE_ELEMENTS and exact.squares > 0
    slope = product / exact.squares if judged else None
    limit = SLOPE
    if in_float8 and judged:
        limit = FLOAT8_SLOPE + abs(of_yardstick / exact.squares - 1)
    reason = ""
    for kind, size, bound in (
        ("max", error.max, bound_max),
        ("mean", error.mean, bound_mean),
        ("rms", error.rms, bound_rms),
    ):
        if not size <= bound:
            reason = reason or f"{name}: {kind} error {size:.3g} is above {bound:.3g}"
    if slope is not None and not abs(slope - 1) <= limit:
        reason = reason or f"{name}: slope {slope:.6f} is off 1 by more than {limit:g}"
    return Parity(
        error_max=error.max,
        error_mean=error.mean,
        error_bound=bound_max,
        error_mean_bound=bound_mean,
        ok=not reason,
        reason=reason,
        error_of=name,
        error_rms=error.rms,
        error_rms_bound=bound_rms,
        slope=slope,
        slope_limit=limit,
    )


def _chunks(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Yield the same elements of each array, flat, in float64."""
    flat = [np.ravel(x) for x in arrays]
    for at in range(0, flat[0].size, CHUNK):
        yield [x[at : at + CHUNK].astype(np.float64) for x in flat]


def assert_parity(name, actual, oracle, yardstick, **how) -> None:
    """Call `check_parity`, and raise `AssertionError` with the reason if a bound does not
    hold.
    """
    result = check_parity(name, actual, oracle, yardstick, **how)
    if not result.ok:
        raise AssertionError(result.reason)


def rules(indices: np.ndarray, own: np.ndarray, config) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each rule of Eq. 11 that does not depend on scores, and a bool array `[..]` of the rows
    that obey the rule.

    Args:
      indices: `[.., n]`, -1 in empty slots.
      own: The block of the query, `[.., 1]`.
      config: The config of the selection.
    """
    filled = np.arange(config.num_selected) < np.minimum(config.num_selected, own + 1)
    of_slots = np.where(filled, indices >= 0, indices == -1)
    yield "empty slots must be -1 and stand at the end", of_slots.all(axis=-1)
    ascends = (np.diff(indices) > 0) | ~filled[..., 1:]
    yield "blocks must ascend without duplicates", ascends.all(axis=-1)
    yield "no block after the query's own", (indices <= own).all(axis=-1)
    there = np.ones(indices.shape[:-1], bool)
    for block in (*range(config.num_initial), *(own - i for i in range(config.num_local))):
        there &= ((indices == block) | (block < 0) | (block > own)).any(axis=-1)
    yield "forced blocks must be there", there


def check_indices(
    indices: np.ndarray,
    scores: np.ndarray,
    positions: np.ndarray,
    config,
) -> Parity:
    """Check a selection `[B, T, Hkv, n]` against float64 `scores` `[B, T, Hkv, N]`.

    All `rules` must hold exactly. In addition, the score of every block that is not forced must
    reach `(1 - 2**-10)` times the score of the last block that the oracle selects. `error_max` and
    `error_mean` are the relative amounts by which scores fall short of the score of the last block
    that the oracle selects. `rows_differ` counts the rows that differ from the selection of the
    oracle. The oracle prefers the lower index among equal scores.

    Args:
      indices: The selection, -1 in empty slots.
      scores: The scores of the oracle.
      positions: `[T]`, the position of each query in its sequence.
      config: The config of the selection.

    Raises:
      ValueError: `indices` has another shape.
    """
    if indices.shape != (*scores.shape[:3], config.num_selected):
        expected = (*scores.shape[:3], config.num_selected)
        raise ValueError(f"indices: shape must be {expected}, got {indices.shape}")
    own, forced, ranked = _ranked(scores, positions, config)
    for rule, holds in rules(indices, np.broadcast_to(own, (*scores.shape[:3], 1)), config):
        if not holds.all():
            return _broken("indices", f"{rule} ({(~holds).sum()} rows break it)")
    chosen, best = np.zeros((2, *scores.shape), bool)
    np.put_along_axis(chosen, np.where(indices < 0, indices[..., :1], indices), True, axis=-1)
    chosen &= indices[..., :1] >= 0  # a row of padding selects no block
    order = np.argsort(-ranked, axis=-1, kind="stable")
    np.put_along_axis(best, order[..., : config.num_selected], True, axis=-1)
    best &= ranked > -np.inf
    scores = scores.astype(np.float64)
    bar = np.where(best & ~forced, scores, np.inf).min(axis=-1, keepdims=True)
    scored = chosen & ~forced
    below = 1 - scores / np.where(bar > 0, bar, 1)
    below = np.where(scored & (bar > 0), below, 0.0).clip(0)
    differ = int((chosen != best).any(axis=-1).sum())
    worst = float(below.max(initial=0.0))
    mean = float(below.sum() / max(scored.sum(), 1))
    ok = worst <= SCORE_SLACK
    reason = "" if ok else f"indices: a chosen block scores {worst:.3g} below the n-th best"
    return Parity(worst, mean, SCORE_SLACK, SCORE_SLACK, ok, reason, differ, "indices")


def _ranked(scores, positions, config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the block of each query, a mask of the forced blocks, and the scores by which blocks
    rank. Forced blocks rank first with an infinite score. Blocks after the query have -inf.
    """
    own = (np.asarray(positions) // config.select_block)[None, :, None, None]
    block = np.arange(scores.shape[-1])
    forced = ((block < config.num_initial) | (block > own - config.num_local)) & (block <= own)
    ranked = np.where(forced, np.inf, scores.astype(np.float64))
    return own, forced, np.where(block <= own, ranked, -np.inf)


def decided(scores: np.ndarray, positions: np.ndarray, config) -> np.ndarray:
    """Return a mask of the rows that have only one admissible selection, bool `[B, T, Hkv]`. A row
    has only one admissible selection if the score of the best block that is not selected is too low
    to replace the last selected block.
    """
    *_, ranked = _ranked(scores, positions, config)
    ranked = np.sort(ranked, axis=-1)[..., ::-1]
    if scores.shape[-1] <= config.num_selected:
        return np.ones(scores.shape[:3], bool)
    taken, left = ranked[..., config.num_selected - 1], ranked[..., config.num_selected]
    return (left == -np.inf) | (left < (1 - SCORE_SLACK) * taken)


def merge(parts: Sequence[Parity]) -> Parity:
    """Return the first result that breaks its bound. If no result breaks its bound, return the
    result with the largest share of its bound.
    """
    broken = [part for part in parts if not part.ok]
    worst = broken[0] if broken else max(parts, key=lambda part: part.share)
    differ = [part.rows_differ for part in parts if part.rows_differ is not None]
    return dataclasses.replace(worst, rows_differ=sum(differ) if differ else None)


def _broken(name: str, reason: str) -> Parity:
    return Parity(np.inf, np.inf, np.nan, np.nan, False, f"{name}: {reason}", error_of=name)

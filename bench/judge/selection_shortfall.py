"""Compares a selection of blocks with the selection of the reference in every row, and measures
differences by float64 scores.

A row is one query position and one key/value head. The reference selects in float32, for one slab
of queries after the other. Rows that differ are scored again in float64. The shortfall of a row
that differs is the best score of a block that the row left out, minus the worst score of a block
that the row selected instead. A difference is explained if the row obeys the rules of Eq. 11 and
its shortfall is within the resolution of float32 (`resolution`).
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.config import NSAConfig

from ..harness import heartbeat
from . import oracle, parity

ROUNDOFF = 2.0**-24  # the relative error of one float32 operation
SMALLEST = 2.0**-126  # smaller values may be flushed to zero
MOST_REPORTS = 5
MAX_ROWS = 2**15  # rounding causes fewer differences than this; further rows stay unexplained


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of all rows of a selection with the rows of the reference.

    Attributes:
      rows: Number of rows.
      differing: Number of rows that differ.
      unexplained: Number of rows whose difference is not explained.
      worst: The shortfall and its bound of the row that uses the largest share of its bound, both
        divided by the largest of the compared scores. The bound is None if no row differs. `worst`
        is None if a row breaks a rule.
      reports: Descriptions of the first unexplained rows.
    """

    rows: int
    differing: int
    unexplained: int = 0
    worst: tuple[float, float | None] | None = (0.0, None)
    reports: Sequence[str] = ()

    def report(self, most: int = MOST_REPORTS) -> str:
        """Return the first unexplained rows."""
        lines = [*self.reports[:most]]
        if self.unexplained > most:
            lines.append(f"... and {self.unexplained - most} more")
        return "\n".join(lines)


def resolution(largest, reach, shape: tuple[int, int, int], config) -> np.ndarray:
    """Return the largest difference of two block scores that float32 may not resolve, for each row.
    `largest` is the larger score.

    With `u = 2**-24`, a score has these relative errors to first order:

    - A score is a sum of non-negative terms over the `G` heads and over `l'/d + l/d - 1` compressed
      tokens. The error of the sum is `(G + l'/d + l/d) u`.
    - A term is `exp(x) / total`. `total` is summed in blocks, with an error of `2 sqrt(C) u`.
    - An error of `x` is a relative error of `exp(x)`. Logits are sums over `D` of products, and
      products of 16-bit numbers are exact. Tensor cores add 16 products at a time and cut off up to
      `2 u` of a sum of at most `reach`, so that a logit has an error of `D/8 reach u`. Scaling,
      base 2 and the subtraction of the log-sum-exp are 4 roundings of numbers up to `2 reach + ln
      C`. The exponential itself has an error of `4 u`.

    Since both compared scores have these errors, the bound is twice the sum of the errors, plus
    twice the value that may be flushed to zero.

    Args:
      largest: `[R]`.
      reach: the largest magnitude that a logit of the row can have, `[R]`.
      shape: `(G, C, D)`.
    """
    group, count, width = shape
    stride = config.compress_stride
    terms = group + (config.select_block + config.compress_block) // stride
    exponent = width / 8 * reach + 4 * (2 * reach + math.log(max(count, 1))) + 4
    roundings = terms + 2 * math.sqrt(count) + exponent
    return 2 * (roundings * ROUNDOFF * largest + terms * SMALLEST)


def expected(query: jax.Array, compressed_key: jax.Array, config: NSAConfig) -> np.ndarray:
    """Return the selection of the reference in float32, int32 `[B, T, Hkv, n]`, T = S.

    Args:
      query: `[B, T, H, D]`.
      compressed_key: `[B, C, Hkv, D]`.
    """
    heartbeat.say("makes the reference's selection")
    batch, length, heads, _ = query.shape
    elements = batch * heads * max(compressed_key.shape[1], 1)
    size = min(max(oracle.FORWARD_ELEMENTS // elements, 1), length)
    starts = *range(0, length - size, size), length - size
    slabs = oracle.Slabs(starts, size, length)
    arguments = {"query": query, "compressed_key": compressed_key}
    return oracle.outputs("indices", arguments, config, slabs, low=True)["indices"]


def exact_scores(
    query: jax.Array, compressed_key: jax.Array, rows: np.ndarray, config: NSAConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays about `rows` int `[R, 3]` (batch, token, key/value head). The first array
    has the reference's block scores `[R, N]` in float64. The second array has the largest magnitude
    that a logit of each row can have, `[R]`.
    """
    (batch, token, head), width = rows.T, query.shape[-1]
    tokens, place = np.unique(token, return_inverse=True)
    slabs = oracle.Slabs(tuple(tokens.tolist()), 1, query.shape[1])
    arguments = {"query": query, "compressed_key": compressed_key}
    scores = oracle.outputs("scores", arguments, config, slabs)["scores"]
    grouped = query.reshape(*query.shape[:2], compressed_key.shape[2], -1, width)
    pair = grouped[batch, token, head], jnp.moveaxis(compressed_key, 1, 2)
    own, keys = (
        np.linalg.norm(np.asarray(x, np.float64), axis=-1).max(-1, initial=0.0) for x in pair
    )
    return scores[batch, place, head], own * keys[batch, head] * width**-0.5


def compare(
    chosen: np.ndarray,
    wanted: np.ndarray,
    query: jax.Array,
    compressed_key: jax.Array,
    config: NSAConfig,
) -> Comparison:
    """Compare the selection `chosen` with `wanted`, the selection of the reference.

    Args:
      chosen: int32 `[B, T, Hkv, n]`, -1 in empty slots.
      wanted: int32 `[B, T, Hkv, n]`.
      query: `[B, T, H, D]`.
      compressed_key: `[B, C, Hkv, D]`.
      config: The config of the selection.

    Raises:
      ValueError: The selections differ in shape.
    """
    heartbeat.say("scores the rows that differ")
    if chosen.shape != wanted.shape:
        raise ValueError(f"chosen must have shape {wanted.shape}, got {chosen.shape}")
    differ = np.argwhere((chosen != wanted).any(axis=-1))
    rows, judged = math.prod(chosen.shape[:-1]), differ[:MAX_ROWS]
    if not len(judged):
        return Comparison(rows, 0)
    scores, reach = exact_scores(query, compressed_key, judged, config)
    both, own = (chosen[*judged.T], wanted[*judged.T]), judged[:, 1:2] // config.select_block
    broken = np.full(len(judged), "", object)
    for rule, holds in parity.rules(both[0], own, config):
        broken[~holds & (broken == "")] = rule

    def members(selection: np.ndarray) -> np.ndarray:
        """Return whether each row has each block up to its own, `[R, N]`."""
        found = np.zeros(scores.shape, bool)
        row, slot = np.nonzero((selection >= 0) & (selection <= own))
        found[row, selection[row, slot]] = True
        return found

    mine, theirs = map(members, both)
    taken, left = mine & ~theirs, theirs & ~mine
    largest = np.where(taken | left, scores, 0).max(axis=-1)
    count, kv_heads, width = compressed_key.shape[1:]
    bound = resolution(largest, reach, (query.shape[2] // kv_heads, count, width), config)
    best_left = np.where(left, scores, -np.inf).max(axis=-1)
    short = (best_left - np.where(taken, scores, np.inf).min(axis=-1)).clip(0)

    def report(at: int) -> str:
        (batch, token, head), reason = judged[at], broken[at]
        reason = reason or f"falls short by {short[at]:.3g}, float32 resolves {bound[at]:.3g}"
        only_chosen, only_wanted = (
            ", ".join(f"{block}: {scores[at, block]:.9g}" for block in np.flatnonzero(x[at]))
            for x in (taken, left)
        )
        return (
            f"batch {batch} token {token} kv head {head}: {reason}\n"
            f"  chosen    {both[0][at].tolist()}\n  reference {both[1][at].tolist()}\n"
            f"  scores of those only chosen {{{only_chosen}}}, "
            f"only in the reference {{{only_wanted}}}"
        )

    unexplained = np.flatnonzero((broken != "") | ~(short <= bound))
    at = int(np.where(broken != "", np.inf, short / bound).argmax())
    scale = largest[at] or 1.0
    return Comparison(
        rows,
        len(differ),
        len(unexplained) + len(differ) - len(judged),
        None if broken[at] else (float(short[at] / scale), float(bound[at] / scale)),
        [*map(report, unexplained[:MOST_REPORTS])],
    )

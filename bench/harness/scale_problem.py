"""Defines the sequence of `bench.scale` for both frameworks, and the rule for its results."""

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes

from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout

from .records import Values

PAPER = NSAConfig()


@dataclasses.dataclass(frozen=True)
class Problem:
    """One sequence, with a forward pass, or with a forward and a backward pass.

    Attributes:
      S: tokens of the whole sequence.
      mode: `forward` or `fwdbwd`.
      layout: `zigzag` or `contiguous`.
      checked: length of the longest sequence whose results are judged. To judge a sequence, one
        device must hold the whole sequence.
      documents: number of tokens of each document of a packed row; empty for one sequence.
      recompute: argument of `nsa_torch.attention`.
      by_rows: whether only a few rows of the output are judged (`scale_rows`), for a sequence of
        any length.
    """

    framework: str
    mode: str
    layout: Layout
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    checked: int
    config: NSAConfig = PAPER
    documents: Sequence[int] = ()
    recompute: bool = False
    by_rows: bool = False

    @property
    def gradient(self) -> bool:
        return self.mode == "fwdbwd"

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes that query, key, value and gates have per token."""
        return [(self.H, self.D), (self.Hkv, self.D), (self.Hkv, self.Dv), (self.H, 3)]

    @property
    def about(self) -> Values:
        """The fields of a row that describe the problem."""
        fields = dataclasses.asdict(self)
        return {k: x for k, x in fields.items() if k not in ("checked", "by_rows")}


RESULTS = ("out", "query", "key", "value", "gates")
TIMES_ALONE, ROUNDINGS = 2, 4
FLOAT32_SUMS = 1e-5  # relative error of long sums in float32


def judged(
    problem: Problem,
    errors: Mapping[str, float],
    alone: Mapping[str, float] | None = None,
    stray: bool = False,
) -> Values:
    """Return the fields of a row that state whether the results of several devices are as near to
    the oracle as the results of one device.

    The rule for each result is rms(several - oracle) <= 2 rms(one - oracle) + 4 eps rms(oracle).
    If only a few tokens are judged, the rule is rms(several - oracle) <= max(eps, 1e-5)
    rms(oracle).

    Args:
      problem: The problem.
      errors: Errors on several devices by result. An error is the root mean square of the
        difference from a float32 oracle, divided by the root mean square of the oracle.
      alone: Errors like `errors`, on one device. `alone=None` means that only a few tokens are
        judged.
      stray: Whether queries or gates of tokens that are not judged have a gradient.
    """
    eps = float(ml_dtypes.finfo(problem.dtype).eps)
    found: Values = {"errors": errors}
    if alone is None:
        bound = max(eps, FLOAT32_SUMS)
        most, rule = dict.fromkeys(errors, bound), f"at most {bound:.1e}"
        found["on_some_rows"] = True
    else:
        most = {n: TIMES_ALONE * x + ROUNDINGS * eps for n, x in alone.items()}
        rule = f"at most {TIMES_ALONE} times those of one device plus {ROUNDINGS} roundings"
        found["errors_of_one"] = alone
    bad = {n: x for n, x in errors.items() if not x <= most[n]}
    reason = (
        "queries and gates must have no gradient if their outputs have none" if stray else ""
    )
    reason = f"errors against the oracle must be {rule}, got {bad}" if bad else reason
    return found | ({"status": "wrong", "reason": reason} if reason else {})

"""Scales rotary positions, so that a model can process longer texts than it was trained on.

Pair `i` of the columns of a head of width D is rotated by `rate = base**(-2i / D)` per position. A
scaling divides the rates of slow pairs by `factor`, and does not change the rates of fast pairs.
Between slow and fast pairs, the scaling interpolates. The names and values are those of
`rope_parameters` in transformers. Scalings that depend on the length of the text ("dynamic",
"longrope") are not supported, because cached keys would have to be rotated again.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nsa_core import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """The scaling of Llama 3.1. Slow pairs of columns turn at most `low_freq_factor` times in the
    original length, and fast pairs at least `high_freq_factor` times. Between slow and fast pairs,
    the scaling is linear in the number of turns.
    """

    rope_type: str = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    attention_scaling = 1.0

    def __post_init__(self) -> None:
        _check(self, "factor", "low_freq_factor", "original_max_position_embeddings")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope_scaling: high_freq_factor must be > low_freq_factor="
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )

    def scaled(self, rate: Any, pair: Any, base: float) -> Any:
        """Return the rates `[D / 2]` of the pairs of columns with the numbers `pair`, for any
        framework.
        """
        # torch computes a number divided by an array as the number times the reciprocal of the
        # array. NumPy divides.
        turns = 1 / (2 * math.pi * (1 / rate)) * self.original_max_position_embeddings
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _mixed(rate, kept, self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """The scaling YaRN (arXiv 2309.00071).

    Slow pairs of columns turn at most `beta_slow` times in the original length, and fast pairs at
    least `beta_fast` times. Between slow and fast pairs, the interpolation is linear in the index
    of the pair. `truncate` rounds the two ends of the interpolated range outwards. Rotation
    multiplies the length of queries and keys by `attention_factor`. By default `attention_factor`
    is derived from `factor`, or from `mscale` and `mscale_all_dim`.
    """

    rope_type: str = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check(self, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _check(self, "attention_factor")

    @property
    def attention_scaling(self) -> float:
        """The factor by which rotation multiplies the length of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = 0.1 * math.log(max(self.factor, 1.0))
        if not (self.mscale and self.mscale_all_dim):
            return 1.0 + grown
        return (1.0 + grown * self.mscale) / (1.0 + grown * self.mscale_all_dim)

    def scaled(self, rate: Any, pair: Any, base: float) -> Any:
        """Return the rates `[D / 2]` of the pairs of columns with the numbers `pair`, for any
        framework.
        """
        count = pair.shape[0]
        first, last = (self._pair(x, base, count) for x in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        if first == last:
            last += 0.001
        return _mixed(rate, 1 - (pair - first) / (last - first), self.factor)

    def _pair(self, turns: float, base: float, count: int) -> float:
        """Return the index of the pair of columns that turns `turns` times in the original length.

        The index may be fractional.
        """
        positions = self.original_max_position_embeddings / (2 * math.pi * turns)
        return count * math.log(positions) / math.log(base)


type Scaling = Llama3 | Yarn
SCALINGS: dict[str, type[Llama3] | type[Yarn]] = {"llama3": Llama3, "yarn": Yarn}


def scaling(given: Mapping[str, Any] | Scaling | None) -> Scaling | None:
    """Return the scaling that a dictionary describes.

    The dictionary has the form of `rope_parameters` in transformers, without the base.

    Raises:
      ValueError: The scaling is unknown, or one of its parameters is missing, unknown or out of
        range.
    """
    if given is None or isinstance(given, Llama3 | Yarn):
        return given
    if not isinstance(given, Mapping) or given.get("rope_type") not in SCALINGS:
        raise ValueError(
            f"rope_scaling must have a rope_type of {tuple(SCALINGS)}, or be None, got {given!r}"
        )
    kind = SCALINGS[given["rope_type"]]
    fields = dataclasses.fields(kind)
    unknown = sorted(given.keys() - {field.name for field in fields})
    needed = [x.name for x in fields if x.default is dataclasses.MISSING]
    missing = [name for name in needed if given.get(name) is None]
    if unknown or missing:
        what = f"have {missing[0]}" if missing else f"not have {unknown[0]}"
        raise ValueError(
            f"rope_scaling of {given['rope_type']!r} must {what}, got {dict(given)}"
        )
    return kind(**{name: x for name, x in given.items() if x is not None})


def rotated(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Rotate the pairs `(2i, 2i + 1)` of the last axis of `x` by an angle."""
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = xp.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return pairs.reshape(x.shape)


def _mixed(rate: Any, kept: Any, factor: float) -> Any:
    """Return `rate` for `kept` >= 1 and `rate / factor` for `kept` <= 0, and interpolate in
    between. The operations round as in transformers, since dense models were trained with these
    rates.
    """
    kept = kept.clip(0, 1)
    return rate / factor * (1 - kept) + rate * kept


def _check(given: Scaling, *names: str) -> None:
    for name in names:
        validate.positive(f"rope_scaling: {name}", getattr(given, name))

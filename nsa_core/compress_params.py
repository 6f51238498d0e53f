"""Parameters of compression `phi` (`compression.py`), arrays of JAX or of torch."""

from typing import Any, NamedTuple


class PoolParams(NamedTuple):
    """A learnable weighted sum over the window, per channel (a depthwise convolution)."""

    weight: Any  # [l, D]


class MLPParams(NamedTuple):
    """The paper's MLP with an intra-block position embedding.

    `w2 @ gelu(w1 @ flatten(window + position) + b1) + b2`, the window flattened token by
    token, gelu in its tanh form, shared by the key/value heads. Of keys that were rotated by their
    positions it cannot tell where the window is: a query's product with the compressed key follows
    from both positions, not from their distance (`RopeMLPParams`).
    """

    position: Any  # [l, D]
    w1: Any  # [l * D, F]
    b1: Any  # [F]
    w2: Any  # [F, D]
    b2: Any  # [D]

    def turned(self, rates: Any, factor: float = 1.0) -> "RopeMLPParams":
        """Of keys that were not rotated, where rotated ones are `factor` times as long."""
        if factor == 1:
            return RopeMLPParams(*self, rates)
        longer = self._replace(w2=self.w2 * factor, b2=self.b2 * factor)
        return RopeMLPParams(*longer, rates)


class RopeMLPParams(NamedTuple):
    """`MLPParams` of keys that were not rotated. The compressed key is, by its window's middle.

    That is `first token + (l - 1) / 2`, counted in its own sequence.
    """

    position: Any  # [l, D]
    w1: Any  # [l * D, F]
    b1: Any  # [F]
    w2: Any  # [F, D]
    b2: Any  # [D]
    rates: Any  # [D / 2], radians by which columns 2i and 2i + 1 turn per token


type CompressParams = PoolParams | MLPParams | RopeMLPParams | None  # None means the mean

"""The parameters of the compression `phi`, as arrays of JAX or of torch."""

from typing import Any, NamedTuple


class PoolParams(NamedTuple):
    """A learnable weighted sum over the window, per channel (a depthwise convolution)."""

    weight: Any  # [l, D]


class MLPParams(NamedTuple):
    """The paper's MLP with an intra-block position embedding.

    The MLP computes `w2 @ gelu(w1 @ flatten(window + position) + b1) + b2`. The window is flattened
    token by token, gelu has its tanh form, and all key/value heads share the parameters. If keys
    are rotated before the MLP, a compressed key depends on the position of its window. With rotated
    keys, the product of a query with a compressed key depends on both positions, not only on their
    distance. `RopeMLPParams` avoids this.
    """

    position: Any  # [l, D]
    w1: Any  # [l * D, F]
    b1: Any  # [F]
    w2: Any  # [F, D]
    b2: Any  # [D]

    def turned(self, rates: Any, factor: float = 1.0) -> "RopeMLPParams":
        """Return the same MLP for unrotated keys, as `RopeMLPParams`. `factor` is the factor by
        which the rotation multiplies the length of a key.
        """
        if factor == 1:
            return RopeMLPParams(*self, rates)
        longer = self._replace(w2=self.w2 * factor, b2=self.b2 * factor)
        return RopeMLPParams(*longer, rates)


class RopeMLPParams(NamedTuple):
    """`MLPParams` for unrotated keys.

    The compressed key is rotated by the position of the middle of its window,
    `first token + (l - 1) / 2`, counted in the window's own sequence.
    """

    position: Any  # [l, D]
    w1: Any  # [l * D, F]
    b1: Any  # [F]
    w2: Any  # [F, D]
    b2: Any  # [D]
    rates: Any  # [D / 2], radians by which columns 2i and 2i + 1 turn per token


type CompressParams = PoolParams | MLPParams | RopeMLPParams | None  # None means the mean

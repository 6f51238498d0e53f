"""Parameters of compression `phi` (`compression.py`), arrays of JAX or of torch."""

from typing import Any, NamedTuple


class PoolParams(NamedTuple):
    """A learnable weighted sum over the window, per channel (a depthwise convolution)."""

    weight: Any  # [l, D]


class MLPParams(NamedTuple):
    """The paper's MLP with an intra-block position embedding.

    `w2 @ gelu(w1 @ flatten(window + position) + b1) + b2`, the window flattened token by
    token, gelu in its tanh form, shared by the key/value heads.
    """

    position: Any  # [l, D]
    w1: Any  # [l * D, F]
    b1: Any  # [F]
    w2: Any  # [F, D]
    b2: Any  # [D]


type CompressParams = PoolParams | MLPParams | None  # None: the mean

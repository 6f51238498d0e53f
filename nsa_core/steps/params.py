"""The arguments of every step of attention, on any kernels."""

from typing import Any, NamedTuple

from nsa_core.array_ops import QueryLayout
from nsa_core.config import NSAConfig


class Qkv(NamedTuple):
    """Query, key and value of a branch. The keys are S tokens, or C compressed ones."""

    query: Any  # [B, T, H, D]
    key: Any  # [B, S, Hkv, D]
    value: Any  # [B, S, Hkv, Dv]


class Params(NamedTuple):
    """The arguments of a step that are not arrays.

    Attributes:
      layout: The positions of the queries.
      scale: factor of the logits; None means `D**-0.5`.
    """

    layout: QueryLayout
    config: NSAConfig
    scale: float | None

"""What the gradient of a branch is made from, and what it is, on any kernels."""

import dataclasses
from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """Of a branch: dq `[B, T, H, D]`, dk `[B, S, Hkv, D]`, dv `[B, S, Hkv, Dv]`."""

    query: Any
    key: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class RowResiduals:
    """What a branch's gradient needs of each query row besides its inputs, `[B, T, H]` float32.

    Attributes:
      lse: natural log-sum-exp, -inf where the query sees nothing.
      delta: rowsum(dO * O) of the ungated output; also the gate's gradient.
      gate: g, or None for 1.
      dlse: the gradient of `lse`, or None for 0.
    """

    lse: Any
    delta: Any
    gate: Any = None
    dlse: Any = None

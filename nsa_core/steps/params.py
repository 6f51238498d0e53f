"""The types of the arguments and results of the steps of attention. Steps on Mosaic and on Triton
kernels use the same types."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nsa_core.array_ops import ArrayOps, QueryLayout
from nsa_core.config import NSAConfig


class Qkv(NamedTuple):
    """Query, key and value of a branch, or their gradients. The keys are S tokens, or C
    compressed tokens.
    """

    query: Any  # [B, T, H, D]
    key: Any  # [B, S, Hkv, D]
    value: Any  # [B, S, Hkv, Dv]


class Params(NamedTuple):
    """The arguments of a step that are not arrays.

    Attributes:
      layout: The layout of the queries, with their positions.
      scale: factor of the logits; None means `D**-0.5`.
      may_gather: Whether the forward pass of the selected branch may gather tiles
        (`mosaic_gather`). The order of sums of a gathered query depends on other queries.
    """

    layout: QueryLayout
    config: NSAConfig
    scale: float | None
    may_gather: bool = True


# number of SMs for kernels that run concurrently with dkv and dq of the selected branch
BESIDE_SMS = 56


@dataclasses.dataclass(frozen=True)
class LaterDq:
    """The gradient dq of the compressed and the sliding branch, which is computed on demand for
    some rows of `[B, Hkv]`.

    Attributes:
      describe: Function that returns the kernel for some rows. The arguments of `describe` are
        the fields of `IntervalAttention` that change.
      arrays: The inputs of the kernel.
    """

    describe: Callable[..., Any]
    arrays: Sequence[Any]

    def rows(self, ops: ArrayOps, first: int = 0, end: int | None = None):
        """Return dq as an array in which only the rows `first` to `end - 1` are computed."""
        return ops.run(self.describe(first_row=first, end_row=end), *self.arrays)[0]

    def beside(self, ops: ArrayOps, first: int, end: int, dq) -> tuple[Any, Any]:
        """Start to compute the rows `first` to `end - 1` of dq concurrently. Return dq and an
        event. The rows are complete after `ops.join` is called with the event.
        """
        some = {"first_row": first, "end_row": end, "sms": BESIDE_SMS, "before": True}
        (dq,), running = ops.run_beside(self.describe(**some), *self.arrays, dq)
        return dq, running


@dataclasses.dataclass(frozen=True)
class RowResiduals:
    """The statistics per query row that a branch's gradient needs, `[B, T, H]` float32.

    Attributes:
      lse: Natural log-sum-exp, -inf if the query has no keys.
      delta: rowsum(dO * O) of the output without its gate. `delta` is also the gradient of the
        gate.
      gate: The gate g, or None for 1.
      dlse: The gradient of `lse`, or None for 0.
    """

    lse: Any
    delta: Any
    gate: Any = None
    dlse: Any = None


class Interval(NamedTuple):
    """The data of a branch in which each query attends to an interval of keys, as an input of the
    backward pass.
    """

    qkv: Qkv
    rows: RowResiduals
    bounds: Any  # a `key_bounds.Bounds`

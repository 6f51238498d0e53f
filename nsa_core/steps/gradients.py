"""The inputs and the results of a branch's gradient, on any kernels."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nsa_core.array_ops import ArrayOps


class Gradients(NamedTuple):
    """Gradients of a branch: dq `[B, T, H, D]`, dk `[B, S, Hkv, D]`, dv `[B, S, Hkv, Dv]`."""

    query: Any
    key: Any
    value: Any


BESIDE_SMS = 56  # for kernels that run concurrently with dkv and dq of the selected branch


@dataclasses.dataclass(frozen=True)
class LaterDq:
    """dq of the compressed and the sliding branch, computed on demand for rows of `[B, Hkv]`.

    Attributes:
      describe: the kernel of some rows, from fields of `IntervalAttention`.
      arrays: Its inputs.
    """

    describe: Callable[..., Any]
    arrays: Sequence[Any]

    def rows(self, ops: ArrayOps, first: int = 0, end: int | None = None):
        """An array whose rows `first` to `end` are computed."""
        return ops.run(self.describe(first_row=first, end_row=end), *self.arrays)[0]

    def beside(self, ops: ArrayOps, first: int, end: int, dq) -> tuple[Any, Any]:
        """`dq` in which these rows are there after `ops.join` of the second result."""
        some = {"first_row": first, "end_row": end, "sms": BESIDE_SMS, "before": True}
        (dq,), running = ops.run_beside(self.describe(**some), *self.arrays, dq)
        return dq, running


@dataclasses.dataclass(frozen=True)
class RowResiduals:
    """The statistics per query row that a branch's gradient needs, `[B, T, H]` float32.

    Attributes:
      lse: Natural log-sum-exp, -inf if the query sees no key.
      delta: rowsum(dO * O) of the ungated output; also the gate's gradient.
      gate: g, or None for 1.
      dlse: the gradient of `lse`, or None for 0.
    """

    lse: Any
    delta: Any
    gate: Any = None
    dlse: Any = None

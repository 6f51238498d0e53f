"""What kernels of attention share: the sizes of the problem, and the descriptions of a branch.

AttentionSizes   forward and gradients of each branch, gathered or not
forward, dq      of a branch whose queries walk over the keys: `interval.py`, `selected.py`
"""

import dataclasses
from typing import Any

from kernels_pallas.kernel import Array, Kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Static sizes.

    B: batch; T: query tokens; S: keys; H: query heads; Hkv: key/value heads, each for
    G = H / Hkv query heads; D: width of query and key; Dv: width of value and output.
    """

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    scale: float
    interpret: bool | object = False

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.H // self.Hkv

    def rows(self, width: int, tokens: int | None = None) -> Array:
        """`[B, tokens, H, width]`: query, output or a gradient of them; by default all T tokens."""
        return Array((self.B, self.T if tokens is None else tokens, self.H, width), self.dtype)

    def by_head(self, tokens: int | None = None) -> Array:
        """`[B, tokens, H]`, float32: a value of each query head; by default all T tokens."""
        return Array((self.B, self.T if tokens is None else tokens, self.H), "float32")

    def keys(self, width: int) -> Array:
        """`[B, S, Hkv, width]`: key, value or a gradient of them."""
        return Array((self.B, self.S, self.Hkv, width), self.dtype)

    @property
    def operands(self) -> dict[str, Array]:
        return {
            "query": self.rows(self.D),
            "key": self.keys(self.D),
            "value": self.keys(self.Dv),
        }


def forward(branch: str, spec: Any, inputs: dict[str, Array]) -> Kernel:
    """Output and log-sum-exp for `inputs`, the gate if `gated`, and the sum if `added`."""
    out, inputs = spec.rows(spec.Dv), dict(inputs)
    if spec.gated:
        inputs["gate"] = spec.by_head()
    if spec.added:
        inputs["added"] = out
    outputs = {"out": out, "lse": spec.by_head()}
    body = f"kernels_pallas.mosaic.{branch}_forward:build"
    return Kernel.named(f"{branch}_forward", spec, body, inputs, outputs, in_place=spec.added)


def dq(branch: str, spec: Any, inputs: dict[str, Array], row_stats: Array) -> Kernel:
    """dq for `inputs`, dO, the statistics of query rows, and the sum if `added`."""
    out = spec.rows(spec.D)
    inputs = inputs | {"do": spec.rows(spec.Dv), "row_stats": row_stats}
    if spec.added:
        inputs["added"] = out
    body = f"kernels_pallas.mosaic.{branch}_dq:build"
    return Kernel.named(f"{branch}_dq", spec, body, inputs, {"dq": out}, in_place=spec.added)

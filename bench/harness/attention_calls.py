"""`nsa_torch.attention` of random tensors on a GPU: forward, and with gradients."""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls of the same query, key, value and gates."""

    tensors: tuple[torch.Tensor, ...]
    implementation: Any

    @classmethod
    def of(
        cls,
        batch: int,
        length: int,
        heads: int,
        kv_heads: int,
        width: int,
        implementation: str = "mosaic",
    ) -> "Calls":
        """bfloat16, drawn anew for each length; `width`: of keys and of values."""
        draw = torch.Generator("cuda").manual_seed(length)
        columns = (heads, width), (kv_heads, width), (kv_heads, width), (heads, 3)
        return cls(
            tuple(
                torch.randn(
                    batch, length, *x, generator=draw, device="cuda", dtype=torch.bfloat16
                ).requires_grad_()
                for x in columns
            ),
            implementation,
        )

    def forward(self) -> torch.Tensor:
        import nsa_torch

        with torch.no_grad():
            return nsa_torch.attention(*self.tensors, implementation=self.implementation)

    def both(self) -> Any:
        """The gradients."""
        import nsa_torch

        out = nsa_torch.attention(*self.tensors, implementation=self.implementation)
        return torch.autograd.grad(out, self.tensors, out)

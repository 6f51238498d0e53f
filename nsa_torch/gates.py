"""The gates of a layer: three numbers per token and head, by which branches are added up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_core.layer import LayerSpec


class GateOutput(nn.Linear):
    """A linear layer that starts near zero: gates start near equal."""

    def reset_parameters(self) -> None:
        """Draws the weights again."""
        nn.init.xavier_uniform_(self.weight, gain=0.1)
        nn.init.zeros_(self.bias)


class Gate(nn.Module):
    """Three gates per key/value group from its mean query: `[B, T, Hkv, D]` to `[..., 3]`."""

    def __init__(self, spec: LayerSpec, **factory: Any):
        super().__init__()
        self.fc1 = nn.Linear(spec.d_k, spec.gate_width, **factory)
        self.fc2 = GateOutput(spec.gate_width, 3, **factory)
        self.spec = spec

    def reset_parameters(self) -> None:
        """Draws the weights again."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    @torch.no_grad()
    def set_constant(self, *logits: float) -> None:
        """Gates of these logits (compressed, selected, sliding) for every query."""
        self.fc2.weight.zero_()
        self.fc2.bias.copy_(torch.tensor(logits) * self.spec.gate_temp)

    def forward(self, pooled_query: Tensor) -> Tensor:
        logits = self.fc2(F.silu(self.fc1(pooled_query))) / self.spec.gate_temp
        return logits.softmax(dim=-1) if self.spec.gate == "softmax" else logits.sigmoid()


class HeadGate(nn.Linear):
    """Logits of three gates per query head from the layer's input: `[B, T, dim]` to `[B, T, 3 H]`.

    Head by head: compressed, selected, sliding.
    """

    def __init__(self, spec: LayerSpec, **factory: Any):
        self.start, self.temp = spec.gate_start, spec.gate_temp
        super().__init__(spec.dim, 3 * spec.n_heads, **factory)

    def reset_parameters(self) -> None:
        """Draws the weights again: gates start near what their biases say."""
        self.draw_weight()
        with torch.no_grad():
            self.bias.copy_(self.start_bias())

    def draw_weight(self) -> None:
        """Draw only the weight, not the bias."""
        nn.init.xavier_uniform_(self.weight, gain=0.1)

    def start_bias(self) -> Tensor:
        """The bias of a layer that has not learned, in the shards of this one's."""
        start = torch.tensor(self.start, dtype=self.bias.dtype, device=self.bias.device)
        return _placed(start.repeat(self.out_features // 3), self.bias)

    @torch.no_grad()
    def set_constant(self, *logits: float) -> None:
        """Gates of these logits (compressed, selected, sliding) for every query and head."""
        self.weight.zero_()
        self.bias.copy_((torch.tensor(logits) * self.temp).repeat(self.out_features // 3))


class SelectedGate(nn.Module):
    """The constant gates 0, 1, 0, which leave only the selected branch. It has no weights."""

    def __init__(self, spec: LayerSpec, **factory: Any):
        super().__init__()

    def forward(self, query: Tensor) -> Tensor:
        """The gates `[B, T, H, 3]` of each head of a query `[B, T, H, D]`."""
        # Numbers of the host would be a copy, which a CUDA graph cannot capture.
        gates = torch.arange(3, device=query.device) == 1
        return gates.to(query.dtype).expand(*query.shape[:3], 3)


def _placed(x: Tensor, like: Tensor) -> Tensor:
    """`x`, which is equal on all ranks, sharded in the same way as `like`."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x, mesh, like.placements, src_data_rank=None)

"""Describes how a run is divided over processes and devices."""

import dataclasses
from typing import Literal

from .share import Share
from .spec import Task

Kind = Literal["none", "ddp", "fsdp"]
KINDS: tuple[Kind, ...] = ("none", "ddp", "fsdp")


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The division of a run over devices, which changes losses only by rounding.

    Attributes:
      kind: "none": one device. "ddp": every device has all weights. "fsdp": every device has a
        shard of the weights.
      devices: Total number of devices, a multiple of `tensor`.
      tensor: Number of devices that share the heads of a row. Each of these devices has whole
        key/value heads. JAX only.
      accumulate: number of micro-batches per batch.
      compiled: whether blocks in torch run with `torch.compile`.
      safe: See `torch_parallel.DDPLearner`.

    Raises:
      ValueError: The number of devices does not allow this layout.
    """

    kind: Kind = "none"
    devices: int = 1
    tensor: int = 1
    accumulate: int = 1
    compiled: bool = False
    safe: bool = False

    def __post_init__(self) -> None:
        for name in ("devices", "tensor", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.devices % self.tensor:
            raise ValueError(
                f"devices must be a multiple of tensor={self.tensor}, got {self.devices}"
            )
        if self.kind == "none" and self.devices > 1:
            raise ValueError(
                f"parallel must be ddp or fsdp for {self.devices} devices, got none"
            )

    @property
    def replicas(self) -> int:
        """The number of parts into which the rows of a micro-batch are divided."""
        return self.devices // self.tensor

    def check(self, task: Task) -> None:
        """Raise `ValueError` if `task` cannot be divided in this way."""
        Share(task.training.batch, self.accumulate, 0, self.replicas)
        for name, size in (
            ("n_kv_groups", task.model.layer.n_kv_groups),
            ("hidden", task.model.hidden),
        ):
            if size % self.tensor:
                raise ValueError(
                    f"tensor must divide {name}={size} of the model, got {self.tensor}"
                )

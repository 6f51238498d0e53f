"""The interface of learners, which train a model in either framework."""

from pathlib import Path
from typing import Protocol

import numpy as np

from .data import Batch
from .ranks import Ranks
from .share import Share


class Learner(Protocol):
    """`jax_learner.Learner`, or `torch_learner.Learner` and those of `torch_parallel`.

    `share` has its rows of a global batch, `graph` whether torch captures a step;
    every rank of a run must make the same calls.
    """

    ranks: Ranks
    share: Share
    graph: bool

    def step(
        self, batch: Batch, step: int, following: Batch | None = None
    ) -> tuple[float, float]: ...

    def loss_sums(self, batch: Batch, categories: np.ndarray, count: int) -> np.ndarray: ...

    def observe(self, batch: Batch, row: int = 0) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def parameters(self) -> int: ...

    def peak_bytes(self) -> int | None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, step: int) -> None: ...

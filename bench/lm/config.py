"""The keys that a file of a training run may have in addition to the flags of `bench.train`.
`config_file` reads the files of training runs. A value of None means the default of the command.
"""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Gt

from nsa_core.layer import FIELD_OF

from .spec import ModelSpec, Task

type Size = Annotated[int, Gt(0)]


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes that replace the sizes of the named model. By default `hidden` grows with `dim`, and
    `vocabulary` is the vocabulary of the data.
    """

    dim: Size | None = None
    layers: Size | None = None
    hidden: Size | None = None
    n_heads: Size | None = None
    n_kv_groups: Size | None = None
    d_k: Size | None = None
    d_v: Size | None = None
    rope_base: Annotated[float, Gt(0)] | None = None
    vocabulary: Size | None = None


@dataclasses.dataclass(frozen=True)
class NSA:
    """The fields of `NSAConfig` of a layer, its initial gates, its `kv` and its `key_taps`."""

    compress_block: Size | None = None
    compress_stride: Size | None = None
    select_block: Size | None = None
    num_selected: Size | None = None
    window: int | None = None
    gate_bias: list[float] | None = None
    kv: Literal["separate", "shared"] | None = None
    key_taps: Size | None = None


@dataclasses.dataclass(frozen=True)
class Train:
    """Fields of `spec.Training`."""

    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """Arguments of `data.load`."""

    split: str | None = None
    revision: str | None = None
    cache: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The sections of a file."""

    model: Model = Model()
    nsa: NSA = NSA()
    train: Train = Train()
    data: Data = Data()

    def model_of(self, spec: ModelSpec) -> ModelSpec:
        """Return a copy of `spec` with the given sizes."""
        sizes = _given(self.model)
        layer = {name: sizes.pop(name) for name in LAYER if name in sizes}
        own = _given(self.nsa)
        layer |= {word: own.pop(name) for word, name in FIELD_OF.items() if name in own} | own
        if "dim" in layer:
            sizes.setdefault("hidden", spec.hidden * layer["dim"] // spec.layer.dim)
        return dataclasses.replace(
            spec, layer=dataclasses.replace(spec.layer, **layer), **sizes
        )

    def training(self) -> dict[str, Any]:
        """Return the arguments of `spec.Training` that have no flag."""
        return _given(self.train)

    def fitted(self, task: Task, vocabulary: int) -> Task:
        """Return a copy of `task` whose model supports all tokens below `vocabulary`.

        Raises:
          ValueError: The vocabulary of the model is too small, or rows are shorter than a
            selection block.
        """
        block, length = task.model.layer.l_sel, task.training.seq_len
        if task.model.attention == "nsa" and length < block:
            raise ValueError(
                f"seq_len must be >= select_block={block} of the model, got {length}"
            )
        given = self.model.vocabulary
        if given is not None and given < vocabulary:
            raise ValueError(
                f"model.vocabulary must be >= {vocabulary}, the vocabulary of the tokens "
                f"(--tokenizer), got {given}"
            )
        model = dataclasses.replace(task.model, vocabulary=given or vocabulary)
        return dataclasses.replace(task, model=model)


LAYER = ("dim", "n_heads", "n_kv_groups", "d_k", "d_v", "rope_base")


def _given(section: Any) -> dict[str, Any]:
    return {name: x for name, x in dataclasses.asdict(section).items() if x is not None}

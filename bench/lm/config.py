"""The keys that a file of a training run may have in addition to the flags of `bench.train`.
`config_file` reads the files of training runs. A missing value, or a value of None, means the
default of the command.
"""

import dataclasses
from typing import Annotated, Literal, TypedDict

from annotated_types import Gt

from nsa_core.layer import FIELD_OF

from ..harness.records import Values
from .spec import ModelSpec, Task

type Size = Annotated[int, Gt(0)]


class Model(TypedDict, total=False):
    """Sizes that replace the sizes of the named model. By default `hidden` grows with `dim`, and
    `vocabulary` is the vocabulary of the data.
    """

    dim: Size
    layers: Size
    hidden: Size
    n_heads: Size
    n_kv_groups: Size
    d_k: Size
    d_v: Size
    rope_base: Annotated[float, Gt(0)]
    vocabulary: Size


class NSA(TypedDict, total=False):
    """The fields of `NSAConfig` of a layer, its initial gates, its `kv` and its `key_taps`."""

    compress_block: Size
    compress_stride: Size
    select_block: Size
    num_selected: Size
    window: int
    gate_bias: list[float]
    kv: Literal["separate", "shared"]
    key_taps: Size


class Train(TypedDict, total=False):
    """Fields of `spec.Training`."""

    weight_decay: float
    beta1: float
    beta2: float
    eps: float


@dataclasses.dataclass(frozen=True)
class Data:
    """Arguments of `data.load`."""

    split: str | None = None
    revision: str | None = None
    cache: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The sections of a file."""

    model: Model = dataclasses.field(default_factory=Model)
    nsa: NSA = dataclasses.field(default_factory=NSA)
    train: Train = dataclasses.field(default_factory=Train)
    data: Data = Data()

    def model_of(self, spec: ModelSpec) -> ModelSpec:
        """Return a copy of `spec` with the given sizes."""
        sizes: Values = {**self.model}
        layer = {name: sizes.pop(name) for name in LAYER if name in sizes}
        own: Values = {**self.nsa}
        layer |= {word: own.pop(name) for word, name in FIELD_OF.items() if name in own} | own
        if "dim" in layer:
            sizes.setdefault("hidden", spec.hidden * layer["dim"] // spec.layer.dim)
        return dataclasses.replace(
            spec, layer=dataclasses.replace(spec.layer, **layer), **sizes
        )

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
        given = self.model.get("vocabulary")
        if given is not None and given < vocabulary:
            raise ValueError(
                f"model.vocabulary must be >= {vocabulary}, the vocabulary of the tokens "
                f"(--tokenizer), got {given}"
            )
        model = dataclasses.replace(task.model, vocabulary=given or vocabulary)
        return dataclasses.replace(task, model=model)


LAYER = ("dim", "n_heads", "n_kv_groups", "d_k", "d_v", "rope_base")

"""What a training run is: the sections and keys of a file that `config_file` reads.

None stands for the command's own default.
"""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from .spec import ModelSpec, Task

type Size = Annotated[int, Gt(0)]
type Count = Annotated[int, Ge(0)]
type Positive = Annotated[float, Gt(0)]
type NotNegative = Annotated[float, Ge(0)]


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes: those of `name`, but for what is given. Without `hidden` the MLP grows with `dim`;
    without `vocabulary` it is that of the data."""

    name: Literal["tiny", "13m", "52m", "125m"] | None = None
    attention: Literal["nsa", "dense", "both"] | None = None
    dim: Size | None = None
    layers: Size | None = None
    hidden: Size | None = None
    n_heads: Size | None = None
    n_kv_groups: Size | None = None
    d_k: Size | None = None
    d_v: Size | None = None
    rope_base: Positive | None = None
    vocabulary: Size | None = None


@dataclasses.dataclass(frozen=True)
class NSA:
    """The fields of `NSAConfig` that a layer has, its `phi`, its `gate` and where that starts, and
    its `kv`."""

    compress_block: Size | None = None
    compress_stride: Size | None = None
    select_block: Size | None = None
    num_selected: Size | None = None
    window: Count | None = None
    phi: Literal["avg", "mlp", "mlp_pe", "mlp_rope"] | None = None
    gate: Literal["sigmoid", "softmax", "head", "selected"] | None = None
    gate_bias: list[float] | None = None
    kv: Literal["separate", "shared"] | None = None


@dataclasses.dataclass(frozen=True)
class Train:
    """The optimizer and its steps, as in `spec.Training`; `batch` rows a step in all, on every
    device, `accumulate` micro-batches of them one after the other. `batch_size` in its place: the
    rows of a micro-batch on one device (with others that share its rows' heads, if `tensor`)."""

    framework: Literal["jax", "torch", "both"] | None = None
    dtype: Literal["f32", "bf16"] | None = None
    steps: Size | None = None
    batch: Size | None = None
    batch_size: Size | None = None
    seq_len: Size | None = None
    accumulate: Size = 1
    lr: Positive | None = None
    warmup: int | None = None
    clip: Positive | None = None
    weight_decay: NotNegative | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: Positive | None = None
    seed: int | None = None
    save_every: Size | None = None
    evaluate_every: Size | None = None
    out: str | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """As of `data.load`."""

    dataset: str | None = None
    text_column: str | None = None
    split: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    pack: Literal["documents", "none", "once"] | None = None
    shuffle_buffer: Size | None = None
    corpus_bytes: Size | None = None
    cache: str | None = None


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Which kernels, and how they are called."""

    kernels: str | None = None
    compressed_kernel: str | None = None
    selected_kernel: str | None = None
    sliding_kernel: str | None = None
    on_unsupported: Literal["error", "fallback"] | None = None
    ranges: Literal["none", "v1", "v2", "adaptive"] | None = None
    graph: bool | None = None


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How the rows and weights are spread: "ddp" copies all weights, "fsdp" shards them;
    `devices` in all, `tensor` of them share the heads of a row. None: those that there are.

    torch's processes are torchrun's; JAX's are told here: `coordinator` is "address:port" of
    process 0, of `processes`; this is `process`.
    """

    strategy: Literal["none", "ddp", "fsdp"] = "none"
    devices: Size | None = None
    tensor: Size = 1
    coordinator: str | None = None
    processes: Size | None = None
    process: Count | None = None


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is told of a run besides its lines: seconds between heartbeats; seconds without a
    step after which a rank counts as hung, 0 for never."""

    tensorboard: bool | None = None
    csv: bool | None = None
    heartbeat_s: Positive | None = None
    hang_s: NotNegative | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The sections of a file."""

    model: Model = Model()
    nsa: NSA = NSA()
    train: Train = Train()
    data: Data = Data()
    runtime: Runtime = Runtime()
    parallel: Parallel = Parallel()
    watch: Watch = Watch()

    def model_of(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the sizes that are given here."""
        layer = {name: get(self, f"model.{name}") for name in LAYER}
        layer |= {word: getattr(self.nsa, name) for word, name in SIZES.items()}
        layer |= {"gate_bias": self.nsa.gate_bias, "kv": self.nsa.kv}
        sizes = {
            name: get(self, f"model.{name}") for name in ("layers", "hidden", "vocabulary")
        }
        if self.model.dim is not None and self.model.hidden is None:
            sizes["hidden"] = spec.hidden * self.model.dim // spec.layer.dim
        changed = {name: value for name, value in layer.items() if value is not None}
        return dataclasses.replace(
            spec,
            layer=dataclasses.replace(spec.layer, **changed),
            **{name: value for name, value in sizes.items() if value is not None},
        )

    def training(self) -> dict[str, Any]:
        """What `spec.Training` takes that no flag says."""
        names = ("weight_decay", "beta1", "beta2", "eps")
        found = {name: getattr(self.train, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def fitted(self, task: Task, vocabulary: int) -> Task:
        """`task` with a model for tokens below `vocabulary`.

        Raises:
          ValueError: the model that is asked for has fewer, or its rows are shorter than a
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
                f"model.vocabulary must be >= {vocabulary}, that of the tokens "
                f"(--tokenizer), got {given}"
            )
        model = dataclasses.replace(task.model, vocabulary=given or vocabulary)
        return dataclasses.replace(task, model=model)


LAYER = ("dim", "n_heads", "n_kv_groups", "d_k", "d_v", "rope_base")
SIZES = {
    "l": "compress_block",
    "d": "compress_stride",
    "l_sel": "select_block",
    "n_sel": "num_selected",
    "w": "window",
}


def get(config: TrainConfig, key: str) -> Any:
    """The value of a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)

"""What a training run is, in a YAML file: `bench.train --config NAME_OR_PATH --set key=value`.

A value comes from the flag of the command line, else from `--set`, else from the file, else from
the command's own defaults, which is what None stands for here. The seed system's names are
understood (`SEED_KEYS`); an unknown key or a value of another type is an error.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from absl import flags

import configs
from bench.lm.spec import ModelSpec, Task

FOLDER = configs.FOLDER / "train"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes: those of `name`, but for what is given. Without `hidden` the MLP grows with `dim`;
    without `vocabulary` it is that of the data."""

    name: Literal["tiny", "125m"] | None = None
    attention: Literal["nsa", "dense", "both"] | None = None
    dim: int | None = None
    layers: int | None = None
    hidden: int | None = None
    n_heads: int | None = None
    n_kv_groups: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    rope_base: float | None = None
    vocabulary: int | None = None


@dataclasses.dataclass(frozen=True)
class NSA:
    """The fields of `NSAConfig` that a layer has, and its `phi` and `gate`."""

    compress_block: int | None = None
    compress_stride: int | None = None
    select_block: int | None = None
    num_selected: int | None = None
    window: int | None = None
    phi: Literal["avg", "mlp", "mlp_pe"] | None = None
    gate: Literal["sigmoid", "softmax"] | None = None


@dataclasses.dataclass(frozen=True)
class Train:
    """The optimizer and its steps, as in `spec.Training`; `batch` rows a step in all, on every
    device, `accumulate` micro-batches of them one after the other."""

    framework: Literal["jax", "torch", "both"] | None = None
    dtype: Literal["f32", "bf16"] | None = None
    steps: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    accumulate: int = 1
    lr: float | None = None
    warmup: int | None = None
    clip: float | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    seed: int | None = None
    save_every: int | None = None
    out: str | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """As of `data.load`."""

    dataset: str | None = None
    text_column: str | None = None
    split: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    pack: Literal["documents", "none"] | None = None
    shuffle_buffer: int | None = None
    corpus_bytes: int | None = None
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
    devices: int | None = None
    tensor: int = 1
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is told of a run besides its lines: seconds between heartbeats; seconds without a
    step after which a rank counts as hung, 0 for never."""

    tensorboard: bool | None = None
    csv: bool | None = None
    heartbeat_s: float | None = None
    hang_s: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The sections of a file.

    Raises:
      ValueError: a value is out of range; the message names its key.
    """

    model: Model = Model()
    nsa: NSA = NSA()
    train: Train = Train()
    data: Data = Data()
    runtime: Runtime = Runtime()
    parallel: Parallel = Parallel()
    watch: Watch = Watch()

    def __post_init__(self) -> None:
        for key in POSITIVE:
            value = _get(self, key)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{key} must be over 0, got {value}")
        for key in AT_LEAST_0:
            value = _get(self, key)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{key} must be >= 0, got {value}")

    def check(self) -> None:
        """Raises `ValueError` where values do not go together."""
        batch, parts = self.train.batch, self.train.accumulate
        if batch is not None and batch % parts:
            raise ValueError(
                f"train.batch must be a multiple of train.accumulate={parts}, got {batch}"
            )
        devices, tensor = self.parallel.devices, self.parallel.tensor
        if devices is not None and devices % tensor:
            raise ValueError(
                f"parallel.devices must be a multiple of parallel.tensor={tensor}, got {devices}"
            )
        given = self.parallel.processes, self.parallel.process
        if self.parallel.coordinator is not None and None in given:
            raise ValueError(
                "parallel.coordinator needs parallel.processes and parallel.process, got "
                f"{given[0]} and {given[1]}"
            )
        if self.parallel.strategy == "none" and (devices or 1) > 1:
            raise ValueError(
                f"parallel.strategy must be ddp or fsdp for parallel.devices={devices}, got none"
            )

    def model_of(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the sizes that are given here."""
        layer = {name: _get(self, f"model.{name}") for name in LAYER}
        layer |= {word: getattr(self.nsa, name) for word, name in SIZES.items()}
        layer["gate"] = self.nsa.gate
        sizes = {
            name: _get(self, f"model.{name}") for name in ("layers", "hidden", "vocabulary")
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
POSITIVE = (
    *(f"model.{name}" for name in (*LAYER, "layers", "hidden", "vocabulary")),
    *(f"nsa.{name}" for name in SIZES.values() if name != "window"),
    *(f"train.{name}" for name in ("steps", "batch", "seq_len", "accumulate", "lr", "clip")),
    *("train.save_every", "train.eps", "data.corpus_bytes", "data.shuffle_buffer"),
    *("parallel.devices", "parallel.tensor", "parallel.processes", "watch.heartbeat_s"),
)
AT_LEAST_0 = ("nsa.window", "train.weight_decay", "parallel.process", "watch.hang_s")
# The flag that says the same, which wins where the command line has it.
FLAGS = {
    "model.name": "model",
    "model.attention": "attention",
    "nsa.phi": "phi",
    "parallel.strategy": "parallel",
    **{f"parallel.{name}": f"jax_{name}" for name in ("coordinator", "processes", "process")},
} | {
    f"{section}.{name}": name
    for section, names in {
        "train": (
            "framework dtype steps batch seq_len accumulate lr warmup clip seed save_every out"
        ),
        "data": "dataset text_column tokenizer pack shuffle_buffer corpus_bytes",
        "runtime": (
            "kernels compressed_kernel selected_kernel sliding_kernel on_unsupported ranges graph"
        ),
        "parallel": "devices tensor",
        "watch": "tensorboard csv heartbeat_s hang_s",
    }.items()
    for name in names.split()
}
# The seed system's keys: the name here, or why there is none.
SEED_KEYS = {
    "model.n_layers": "model.layers",
    "model.vocab_size": "model.vocabulary",
    **{f"nsa.{word}": f"nsa.{name}" for word, name in SIZES.items()},
    "train.batch_size": "train.batch",
    "train.accumulate_grad_batches": "train.accumulate",
    "train.warmup_steps": "train.warmup",
    "train.grad_clip": "train.clip",
    "train.max_grad_norm": "train.clip",
    "train.out_dir": "train.out",
    "runtime.precision": "train.dtype",
}
SEED_IGNORED = {
    "train.lr_schedule": "the rate falls by half a cosine, always",
    "train.log_every": "every step is a line of train.jsonl",
    "train.eval_every": "held-out text is evaluated at the end",
    "runtime.device": "a GPU where there is one",
    "runtime.gradient_checkpointing": "nothing of a block is computed again",
    "runtime.compile_cmp_win": "dead in the seed system already: nothing reads it",
    **dict.fromkeys(
        ("runtime.use_flash", "runtime.use_triton_sel", "runtime.fa2_enabled"),
        "name kernels instead: runtime.kernels, runtime.<branch>_kernel",
    ),
    **dict.fromkeys(
        ("runtime.fa2_min_len_win", "runtime.fa2_min_len_cmp", "runtime.sel_triton_min_L"),
        "a flag of the same name",
    ),
}


def path_of(name: str) -> Path:
    """The file that `--config` names: one of `configs/train`, or a path.

    Raises:
      FileNotFoundError: there is no such file.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = sorted(x.stem for x in FOLDER.glob("*.yaml"))
        raise FileNotFoundError(f"no config file {str(path)!r}; configs/train/ has {known}")
    return path


def read(
    name: str | None, changes: Sequence[str] = ()
) -> tuple[TrainConfig, dict[str, Any], list[str]]:
    """The file that `name` names, with `changes` ("train.lr=3e-4") laid over it.

    Returns:
      the config, its values by key as they were given, and a line for each key of the seed
      system that means nothing here.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a key is unknown, or a value is not of its type or out of range; the message
        names the file, or `--set`, and the key.
    """
    values: dict[str, Any] = {}
    told: list[str] = []
    if name is not None:
        path = path_of(name)
        values = _renamed(_flat(configs.load(path)), str(path), told)
        _built(values, str(path))
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set must be key=value, got {change!r}")
        try:
            given = {key.strip(): yaml.safe_load(text)}
        except yaml.YAMLError:
            raise ValueError(f"--set {key} must have a value in YAML, got {text!r}") from None
        one = _renamed(_flat(given), "--set", told)
        _built(one, "--set")
        values |= one
    found = _built(values, "")
    try:
        found.check()
    except ValueError as error:
        origin = " and ".join([*([name] if name else []), *(["--set"] if changes else [])])
        raise ValueError(f"{origin}: {error}") from None
    return found, values, told


def apply(values: Mapping[str, Any], given: Sequence[flags.FlagValues]) -> None:
    """Sets each flag that says the same as a key, but for those of the command line.

    Raises:
      ValueError: the flag cannot have the value, or the command has no such flag and the value
        is not what it does anyway.
    """
    defaults = TrainConfig()
    for key, value in values.items():
        if key not in FLAGS or value is None:
            continue
        name = FLAGS[key]
        flag = next((own[name] for own in given if name in own), None)
        if flag is None:
            if value != _get(defaults, key):
                raise ValueError(f"{key}={value} needs --{name}, which this command has not")
        elif not flag.present:
            try:
                flag.parse(value)
            except flags.IllegalFlagValueError as error:
                raise ValueError(f"{key}: {error}") from None
            flag.using_default_value = False


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{where}.")
        elif value is not None or where not in SECTIONS:  # a section may be empty
            found[where] = value
    return found


def _renamed(values: Mapping[str, Any], where: str, told: list[str]) -> dict[str, Any]:
    """The values by the names here."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in SEED_IGNORED:
            if key == "train.lr_schedule" and value != "cosine":
                raise ValueError(f"{where}: {key} must be cosine, got {value!r}")
            told.append(f"{where}: {key}={value} is ignored: {SEED_IGNORED[key]}")
            continue
        if key == "data.tokenizer" and value == "byte":
            value = None
        name = SEED_KEYS.get(key, key)
        if name in found:
            raise ValueError(f"{where}: {key} and another name of {name} are both given")
        if name not in KEYS:
            nearest = difflib.get_close_matches(name, KEYS, n=1, cutoff=0)[0]
            section = name.partition(".")[0]
            known = [x for x in KEYS if x.startswith(f"{section}.")] or list(SECTIONS)
            raise ValueError(
                f"{where}: unknown key {key!r}, the nearest is {nearest!r}; known: {known}"
            )
        found[name] = value
    return found


def _built(values: Mapping[str, Any], where: str) -> TrainConfig:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        return configs.build(TrainConfig, tree, "")
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('.')}") from None


def _keys() -> Iterator[str]:
    for name in SECTIONS:
        for field in dataclasses.fields(getattr(TrainConfig(), name)):
            yield f"{name}.{field.name}"


def _get(config: TrainConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


SECTIONS = tuple(field.name for field in dataclasses.fields(TrainConfig))
KEYS = tuple(_keys())

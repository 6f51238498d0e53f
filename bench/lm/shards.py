"""Reads checkpoints in shards (`torch.distributed.checkpoint`), and converts them to whole files.

    python -m bench.lm.shards CHECKPOINT FOLDER

The command writes the whole files of a sharded checkpoint to a folder. `weights.safetensors` has
the weights, which `nsa_interop.weights` reads in both frameworks. `mean.safetensors` and
`square.safetensors` have AdamW's moments.
"""

import contextlib
import dataclasses
import json
import pickle
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from absl import app
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from nsa_core.layer import LayerSpec
from nsa_interop import weights

from ..harness import cli
from . import checkpoint, torch_lm
from .spec import ModelSpec
from .torch_learner import MOMENTS, Learner

PARTS = "weights", *MOMENTS
# Objects that the metadata of shards may name, in addition to dtypes and the classes of
# `torch.distributed.checkpoint.metadata`.
DESCRIBED = {
    "pathlib.PosixPath",
    "torch.Size",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
}


def key(part: str, name: str) -> str:
    """Return the name that a tensor has in shards."""
    return f"{part}/{name}"


class Reader(dcp.FileSystemReader):
    """Reads shards. The metadata of shards is a pickle. The reader accepts only classes that
    describe tensors, so that a checkpoint cannot run code.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        """
        Raises:
          ValueError: The metadata names other objects.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            _Description(file).load()
        return super().read_metadata(*args, **kwargs)


class _Description(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        place = f"{module_name}.{global_name}"
        of_torch = getattr(torch, global_name, None) if module_name == "torch" else None
        if place in DESCRIBED or isinstance(of_torch, torch.dtype):
            return super().find_class(module_name, global_name)
        found = getattr(described, global_name, None)
        if isinstance(found, type) and found.__module__ == module_name == described.__name__:
            return found
        raise ValueError(
            f"the metadata of shards must contain only sizes of tensors, got {place}"
        )


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Return weights and moments of a checkpoint in either form, on the CPU. The result is keyed
    by `key`."""
    path = folder / checkpoint.SHARDS
    if not path.exists():
        parts = {part: load_file(folder / f"{part}.safetensors") for part in PARTS}
        return {key(part, n): x for part, some in parts.items() for n, x in some.items()}
    reader = Reader(path)
    known = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in known.items()
        if isinstance(about, TensorStorageMetadata)
    }
    # torch warns that there is no process group, which is intended here
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    """Return weights and moments of `learner`, keyed by `key`. The tensors of a sharded learner
    are DTensors."""
    found = {}
    named = learner.master.named_parameters()
    for (name, parameter), trained in zip(named, learner.trained, strict=True):
        found[key("weights", name)] = parameter.detach()
        state = learner.optimizer.state.get(trained, {})
        for part, moment in MOMENTS.items():
            mine = state.get(moment, torch.zeros_like(trained))
            found[key(part, name)] = _sharded(mine, parameter)
    return found


def put(learner: Learner, tensors: Mapping[str, Tensor], step: int) -> None:
    """Set weights and moments of `learner` to `tensors`, which are whole or sharded like the
    tensors of the learner. The learner continues after `step` steps.
    """
    named = dict(learner.master.named_parameters())

    def placed(part: str, name: str) -> Tensor:
        return _placed(tensors[key(part, name)], named[name])

    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(placed("weights", name))
    optimizer, names = learner.optimizer, dict(zip(learner.trained, named, strict=True))
    order = [names[x] for group in optimizer.param_groups for x in group["params"]]
    state = {
        number: {"step": torch.tensor(float(step))}
        | {moment: local(placed(part, name)).clone() for part, moment in MOMENTS.items()}
        for number, name in enumerate(order)
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    learner.use_master()


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` sharded like `like`. If `tensor` is already sharded, or if `like` is not
    sharded, return `tensor` unchanged.
    """
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    whole = tensor.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the whole tensor if the tensor is not sharded.
    The result shares the memory of the tensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(mine: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor like `like` whose shard in this process is `mine`, in the same memory. If
    `like` is not sharded, return `mine`.
    """
    if not isinstance(like, DTensor):
        return mine
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(mine, mesh, placements, shape=like.shape, stride=like.stride())


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Return a context with a folder that has the whole files of the checkpoint at `path`."""
    if not (path / checkpoint.SHARDS).exists():
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        join(path, Path(scratch))
        yield Path(scratch)


def join(path: Path, target: Path) -> None:
    """Write the sharded checkpoint at `path` as whole files to the folder `target`."""
    settings = json.loads((path / checkpoint.PROGRESS).read_text())["settings"]
    names = {field.name for field in dataclasses.fields(LayerSpec)}
    layer = LayerSpec(**{name: x for name, x in settings.items() if name in names})
    own = {field.name for field in dataclasses.fields(ModelSpec)} - {"layer"}
    model = torch_lm.LM(
        ModelSpec(layer, **{name: settings[name] for name in own & settings.keys()})
    )
    write(target, model, whole_tensors(path))


def write(target: Path, model: torch_lm.LM, tensors: Mapping[str, Tensor]) -> None:
    """Write whole files of weights and moments to the folder `target`. The parameters of `model`
    are overwritten.
    """
    for part in PARTS:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[key(part, name)])
        weights.save(target / f"{part}.safetensors", model)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 3:
        raise app.UsageError("arguments must be a checkpoint in shards and a folder")
    path, target = map(Path, argv[1:])
    if not (path / checkpoint.SHARDS).exists():
        raise ValueError(f"{path} must be a checkpoint in shards")
    target.mkdir(parents=True, exist_ok=True)
    join(path, target)
    print(f"written to {target}")
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)

"""Saves and loads the weights of a module in one safetensors file that both frameworks read.

The file contains the torch module's `state_dict`, with its keys and layouts. The Flax NNX module
has the same names as the torch module. The following rule maps a path in the NNX module to a key of
the file:

  NNX parameter           key in the file      layout
  `a.b.kernel` [in, out]  `a.b.weight`         [out, in]    transposed, as torch.nn.Linear
  `a.weight` [l, d]       `a.weight`           [d, 1, l]    a depthwise torch.nn.Conv1d
  any other               the path with dots   unchanged

Dtypes are unchanged, including bfloat16. The file's metadata records the result of
`module.hyper_parameters()`, a dictionary of numbers and strings, as JSON. Additional entries
(`LayerSpec.kind_keys`) record gate and phi of each attention layer, and kv if it is "shared". The
additional entries have the information in their names, and their values are zero.
"""

import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import safetensors
import safetensors.torch
import torch

from nsa_core.layer import KIND, KIND_MODULE, SILENT, LayerSpec, take_kind

if TYPE_CHECKING:  # a torch module is saved and loaded without JAX and Flax
    import jax
    from flax import nnx

METADATA_KEY = "hyper_parameters"


class Module(Protocol):
    """A torch or NNX module that returns its hyper-parameters."""

    def hyper_parameters(self) -> dict[str, int | float | str]: ...


def save(path: str | Path, module: Module) -> None:
    """Write the weights and hyper-parameters of `module` to `path`. If an error occurs, an
    existing file stays unchanged.

    Args:
      path: The file, which is replaced atomically if it exists.
      module: a `torch.nn.Module` or `nnx.Module` that has `hyper_parameters()`.
    """
    path = Path(path)
    metadata = {METADATA_KEY: json.dumps(module.hyper_parameters())}
    data = safetensors.torch.save(_tensors(module), metadata)
    # A reader of `path` gets the old file or the new one, even if this process ends in the
    # middle.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def opened(path: str | Path) -> safetensors.safe_open:
    """Open a file of weights, whose tensors are read as torch tensors.

    Raises:
      ValueError: The file is not complete.
    """
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a complete safetensors file, got {error}") from None


def load(path: str | Path, module: Module) -> None:
    """Read the weights in `path` into `module`, in place. A loaded value gets the device or
    sharding of the parameter that it replaces.

    A file without hyper-parameters is accepted if its keys, shapes and dtypes fit. A file without
    hyper-parameters must also record gate and phi of each attention layer, unless gate and phi were
    passed to the constructor of the layer.

    Raises:
      ValueError: The file is not complete, or the hyper-parameters, gate, phi, kv, keys, shapes or
        dtypes differ. The message names the first difference, the expected value and the value in
        the file. If the error is raised, the module is unchanged.
    """
    with opened(path) as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    recorded = json.loads(metadata.get(METADATA_KEY, "{}"))
    if METADATA_KEY in metadata:
        sentence = "{}: hyper-parameter {} must be {!r} as in the module, got {!r}"
        _check_same(path, module.hyper_parameters(), recorded, sentence, "no such name")
    for prefix, spec in _layers(module).items():
        stated = take_kind(tensors, prefix)
        if stated or not recorded.keys() >= {*KIND} - {*SILENT}:
            spec.check_kind(stated, f"{path}: {prefix}{KIND_MODULE}")
        tensors |= _kind(prefix, spec)
    expected, got = (
        {key: f"shape {tuple(x.shape)} of {x.dtype}" for key, x in each.items()}
        for each in (_tensors(module), tensors)
    )
    _check_same(path, expected, got, "{}: {}: expected {}, got {}", "no such key")
    if isinstance(module, torch.nn.Module):
        module.load_state_dict(tensors)
        return
    from flax import nnx

    loaded = [
        (steps, param.replace(_to_nnx(steps, tensors[_key(steps)], param.get_value())))
        for steps, param in _params(module)
    ]
    nnx.update(module, nnx.from_flat_state(loaded))


def _check_same(path: str | Path, expected: dict, got: dict, sentence: str, none: str) -> None:
    for name in sorted(expected.keys() | got.keys()):
        ours, theirs = expected.get(name, none), got.get(name, none)
        if ours != theirs:
            raise ValueError(sentence.format(path, name, ours, theirs))


def _tensors(module: Module) -> dict[str, torch.Tensor]:
    """Return the module's weights in the layout of the file."""
    if isinstance(module, torch.nn.Module):
        return {key: value.contiguous() for key, value in module.state_dict().items()}
    tensors: dict[str, torch.Tensor] = {}
    for prefix, spec in _layers(module).items():
        tensors |= _kind(prefix, spec)
    for steps, param in _params(module):
        tensors[_key(steps)] = _from_nnx(steps, param.get_value())
    return tensors


def _layers(module: Module) -> dict[str, LayerSpec]:
    """Return the attention layers in `module` that record gate and phi, keyed by the prefix of
    their entries.
    """
    if isinstance(module, torch.nn.Module):
        keys = module.state_dict().keys()
        found = {
            name and f"{name}.": getattr(layer, "spec", None)
            for name, layer in module.named_modules()
        }
        return {
            prefix: spec
            for prefix, spec in found.items()
            if isinstance(spec, LayerSpec) and keys >= {*spec.kind_keys(prefix)}
        }
    from flax import nnx

    from nsa_jax.nn import NSAAttention

    return {
        "".join(f"{step}." for step in steps): layer.spec
        for steps, layer in nnx.iter_graph(module)
        if isinstance(layer, NSAAttention)
    }


def _kind(prefix: str, spec: LayerSpec) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(()) for key in spec.kind_keys(prefix)}


def _params(module: Module) -> "nnx.FlatState":
    from flax import nnx

    return nnx.to_flat_state(nnx.state(module, nnx.Param))


def _key(steps: tuple[Any, ...]) -> str:
    *parents, name = map(str, steps)
    return ".".join([*parents, "weight" if name == "kernel" else name])


def _from_nnx(steps: tuple[Any, ...], array: "jax.Array") -> torch.Tensor:
    host = np.asarray(array)
    if host.ndim == 2 and steps[-1] in ("kernel", "weight"):
        host = host.T if steps[-1] == "kernel" else host.T[:, None]
    # torch does not support bfloat16 of NumPy, so that the bits are passed as integers.
    bits = np.array(host, order="C").view(f"i{host.dtype.itemsize}")
    return torch.from_numpy(bits).view(getattr(torch, host.dtype.name))


def _to_nnx(steps: tuple[Any, ...], tensor: torch.Tensor, old: "jax.Array") -> "jax.Array":
    """Return the value for the NNX parameter at the path `steps`, on the device or with the
    sharding of `old`.
    """
    import jax

    bits = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy()
    host = bits.view(old.dtype)
    if old.ndim == 2 and steps[-1] in ("kernel", "weight"):
        host = host.T if steps[-1] == "kernel" else host[:, 0].T
    # This copies, since JAX may share the memory of a NumPy array, and the memory of the tensor
    # is the mapped file.
    return jax.device_put(np.array(host, order="C"), old.sharding)

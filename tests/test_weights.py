"""One weights file for the layers of both frameworks: its bytes, its refusals, how it is kept."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from flax import nnx

from nsa_interop import weights
from tests import refusals
from tests.test_layers import in_jax, in_torch

KINDS = [in_torch, in_jax]
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w"


def saved(path, module) -> bytes:
    weights.save(path, module)
    return path.read_bytes()


def of_dtype(module, dtype):
    if isinstance(module, torch.nn.Module):
        return module.to(getattr(torch, dtype))
    nnx.update(module, jax.tree.map(lambda x: x.astype(dtype), nnx.state(module, nnx.Param)))
    return module


@pytest.mark.parametrize(
    ("phi", "dtype"), [("mlp_pe", "float32"), ("mlp", "bfloat16"), ("mlp_rope", "float16")]
)
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_every_pair_gives_the_same_file(path, source, target, phi, dtype):
    module, other = (of_dtype(kind(phi=phi), dtype) for kind in (source, target))
    for x in other.parameters() if target is in_torch else ():
        torch.nn.init.ones_(x)
    if target is in_jax:
        nnx.update(other, jax.tree.map(jnp.ones_like, nnx.state(other, nnx.Param)))
    before, first = saved(path, other), saved(path, module)
    weights.load(path, other)
    assert before != first == saved(path, other)
    shapes = {name: tuple(x.shape) for name, x in in_torch(phi=phi).state_dict().items()}
    loaded = safetensors.torch.load(first)
    assert {key: tuple(x.shape) for key, x in loaded.items()} == shapes
    found = {x.dtype for key, x in loaded.items() if not key.startswith("kind.")}
    assert found == {getattr(torch, dtype)}
    with safetensors.safe_open(path, framework="pt") as file:
        told = json.loads(file.metadata()[weights.METADATA_KEY])
    assert told == module.hyper_parameters()


def rewrite(path, change, metadata=None):
    """The file with its tensors changed; metadata kept unless given."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() if metadata is None else metadata
    tensors = safetensors.torch.load(path.read_bytes())
    change(tensors)
    path.write_bytes(safetensors.torch.save(tensors, metadata))


def keep(tensors):
    """No change."""


CHANGED = [  # what the file has, and the message
    (
        lambda t: t.pop("gate.fc1.bias"),
        "gate.fc1.bias: expected shape (*,) of torch.float32, got no such key",
    ),
    (lambda t: t.update(extra=torch.ones(2)), "extra: expected no such key, got shape (2,)"),
    (
        lambda t: t.update({"W_Q.weight": t["W_Q.weight"].T.contiguous()}),
        "W_Q.weight: expected shape (48, 24) of torch.float32, got shape (24, 48)",
    ),
    (
        lambda t: t.update({"out.weight": t["out.weight"].bfloat16()}),
        "out.weight: expected *torch.float32, got *torch.bfloat16",
    ),
]


@each_kind
@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [(change, {}, sentence) for change, sentence in CHANGED]
    + [(keep, *row) for *row, _ in refusals.rows("weights")],
)
def test_a_file_that_does_not_fit_leaves_the_layer_unchanged(
    change, options, sentence, kind, path
):
    module = kind(**options.get("ours", {}))
    before = saved(path, module)
    weights.save(path, in_torch(**options.get("file", {})))
    rewrite(path, change)
    with pytest.raises(ValueError, match=refusals.words(sentence)):
        weights.load(path, module)
    assert saved(path, module) == before


@each_kind
@pytest.mark.parametrize("contents", [b"", b"not a safetensors file"])
def test_a_damaged_file_is_named(kind, contents, path):
    path.write_bytes(contents)
    with refusals.refused(f"{path} must be a complete safetensors file, got"):
        weights.load(path, kind())


@each_kind
@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_a_file_saved_by_others_loads(kind, metadata, path):
    """Of which nobody knows the hyper-parameters."""
    source, target = in_torch(), kind(w=99)
    weights.save(path, source)
    rewrite(path, keep, metadata)
    weights.load(path, target)
    found = safetensors.torch.load(saved(path, target))
    assert torch.equal(found["W_Q.weight"], source.W_Q.weight)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file(path, monkeypatch, failing):
    old = saved(path, in_torch())

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        weights.save(path, in_torch(seed=1))
    assert path.read_bytes() == old
    assert [entry.name for entry in path.parent.iterdir()] == ["w"]


def test_placement_is_kept(path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    spec = jax.sharding.PartitionSpec(None, "model")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    module, source = in_jax(), in_torch()
    module.W_Q.kernel.set_value(jax.device_put(module.W_Q.kernel.get_value(), sharding))
    weights.save(path, source)
    weights.load(path, module)
    assert module.W_Q.kernel.get_value().sharding == sharding
    np.testing.assert_array_equal(module.W_Q.kernel[...], source.W_Q.weight.detach().T)

"""One weights file for the torch and the NNX module."""

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

DIM, HIDDEN, D, L, FEATURES = 5, 3, 4, 2, 6
HYPER_PARAMETERS = {"dim": DIM, "l": L, "d": 1, "gate_temp": 0.3, "phi": "avg"}
# Key in the file -> shape in the file.
SHAPES = {
    "W_Q.weight": (D, DIM),
    "out.weight": (DIM, D),
    "gate.fc1.weight": (HIDDEN, D),
    "gate.fc1.bias": (HIDDEN,),
    "gate.fc2.weight": (3, HIDDEN),
    "gate.fc2.bias": (3,),
    "phi_k_conv.weight": (D, 1, L),
    "phi_k_mlp.position": (L, D),
    "phi_k_mlp.w1": (L * D, FEATURES),
    "phi_k_mlp.b1": (FEATURES,),
    "phi_k_mlp.w2": (FEATURES, D),
    "phi_k_mlp.b2": (D,),
}
MLP_SHAPES = {
    key.split(".")[1]: shape for key, shape in SHAPES.items() if key.startswith("phi_k_mlp.")
}


class TorchModule(torch.nn.Module):
    def __init__(self, seed=0, **changed):
        super().__init__()
        torch.manual_seed(seed)
        self.changed = changed
        self.W_Q = torch.nn.Linear(DIM, D, bias=False)
        self.out = torch.nn.Linear(D, DIM, bias=False)
        self.gate = torch.nn.Module()
        self.gate.fc1 = torch.nn.Linear(D, HIDDEN)
        self.gate.fc2 = torch.nn.Linear(HIDDEN, 3)
        self.phi_k_conv = torch.nn.Conv1d(D, D, L, groups=D, bias=False)
        self.phi_k_mlp = torch.nn.Module()
        for name, shape in MLP_SHAPES.items():
            self.phi_k_mlp.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

    def hyper_parameters(self):
        return HYPER_PARAMETERS | self.changed


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(D, HIDDEN, rngs=rngs)
        self.fc2 = nnx.Linear(HIDDEN, 3, rngs=rngs)


class Params(nnx.Module):
    def __init__(self, rngs, **shapes):
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jax.random.normal(rngs.params(), shape)))


class FlaxModule(nnx.Module):
    def __init__(self, seed=0, **changed):
        rngs = nnx.Rngs(seed)
        self.changed = tuple(changed.items())
        self.W_Q = nnx.Linear(DIM, D, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(D, DIM, use_bias=False, rngs=rngs)
        self.gate = Gate(rngs)
        self.phi_k_conv = Params(rngs, weight=(L, D))
        self.phi_k_mlp = Params(rngs, **MLP_SHAPES)
        self.rngs = rngs

    def hyper_parameters(self):
        return HYPER_PARAMETERS | dict(self.changed)


def _cast(module, dtype):
    if isinstance(module, torch.nn.Module):
        return module.to(getattr(torch, dtype))
    state = jax.tree.map(lambda x: x.astype(dtype), nnx.state(module, nnx.Param))
    nnx.update(module, state)
    return module


def _values(module):
    """Every parameter as float32 NumPy, for an exact comparison."""
    if isinstance(module, torch.nn.Module):
        state = module.state_dict()
        return {key: value.float().numpy().copy() for key, value in state.items()}
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path: np.array(param[...], np.float32) for path, param in state}


def _same(left, right):
    return left.keys() == right.keys() and all(
        np.array_equal(left[key], right[key]) for key in left
    )


KINDS = [TorchModule, FlaxModule]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_every_pair_gives_the_same_file(tmp_path, source, target, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    module = _cast(source(), dtype)
    other = _cast(target(seed=1), dtype)
    before = _values(other)
    weights.save(first, module)
    weights.load(first, other)
    weights.save(second, other)
    assert first.read_bytes() == second.read_bytes()
    assert not _same(before, _values(other))
    loaded = safetensors.torch.load_file(first)
    assert {key: tuple(value.shape) for key, value in loaded.items()} == SHAPES
    assert {value.dtype for value in loaded.values()} == {getattr(torch, dtype)}


def test_both_modules_compute_the_same_from_one_file(tmp_path):
    torch_module, flax_module = TorchModule(), FlaxModule()
    weights.save(tmp_path / "w", torch_module)
    weights.load(tmp_path / "w", flax_module)
    x = np.random.default_rng(0).normal(size=(7, DIM)).astype(np.float32)
    with torch.no_grad():
        queries = torch_module.W_Q(torch.from_numpy(x))
        gates = torch_module.gate.fc2(torch_module.gate.fc1(queries))
        pooled = torch_module.phi_k_conv(queries.T[None])[0].T
    queries_flax = flax_module.W_Q(x)
    gates_flax = flax_module.gate.fc2(flax_module.gate.fc1(queries_flax))
    kernel = flax_module.phi_k_conv.weight[...]
    windows = jnp.stack([queries_flax[i : i + L] for i in range(len(x) - L + 1)])
    np.testing.assert_allclose(queries_flax, queries, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gates_flax, gates, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose((windows * kernel).sum(1), pooled, rtol=1e-5, atol=1e-6)
    for name in MLP_SHAPES:
        np.testing.assert_array_equal(
            getattr(flax_module.phi_k_mlp, name)[...],
            getattr(torch_module.phi_k_mlp, name).detach(),
        )


def _rewrite(path, change, metadata=None):
    """The file at `path` with its tensors changed; metadata kept unless given."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() if metadata is None else metadata
    tensors = safetensors.torch.load(path.read_bytes())
    change(tensors)
    path.write_bytes(safetensors.torch.save(tensors, metadata))


CHANGES = {
    "missing": (
        lambda t: t.pop("gate.fc1.bias"),
        r"gate\.fc1\.bias: expected shape \(3,\) of torch\.float32, got no such key",
    ),
    "unexpected": (
        lambda t: t.update(extra=torch.ones(2)),
        r"extra: expected no such key, got shape \(2,\)",
    ),
    "shape": (
        lambda t: t.update({"W_Q.weight": t["W_Q.weight"].T.contiguous()}),
        r"W_Q\.weight: expected shape \(4, 5\) of torch\.float32, got shape \(5, 4\)",
    ),
    "dtype": (
        lambda t: t.update({"out.weight": t["out.weight"].bfloat16()}),
        r"out\.weight: expected .*torch\.float32, got .*torch\.bfloat16",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_does_not_fit_leaves_the_module_unchanged(tmp_path, kind, change):
    edit, message = CHANGES[change]
    path = tmp_path / "w"
    weights.save(path, TorchModule())
    _rewrite(path, edit)
    module = kind()
    before = _values(module)
    with pytest.raises(ValueError, match=message):
        weights.load(path, module)
    assert _same(before, _values(module))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"l": 4}, r"hyper-parameter l must be 4 as in the module, got 2"),
        ({"phi": "mlp"}, r"hyper-parameter phi must be 'mlp'.*got 'avg'"),
        ({"gate_temp": 0.1 + 0.2}, r"hyper-parameter gate_temp must be 0\.30{6}"),
        ({"new": 1}, r"hyper-parameter new must be 1.*got 'no such name'"),
        ({"phi": "mlp", "l": 4}, r"hyper-parameter l must be"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_hyper_parameters_are_refused(tmp_path, kind, changed, message):
    path = tmp_path / "w"
    weights.save(path, kind())
    module = kind(**changed)
    before = _values(module)
    with pytest.raises(ValueError, match=message):
        weights.load(path, module)
    assert _same(before, _values(module))


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_saved_by_others_loads(tmp_path, kind, metadata):
    path = tmp_path / "w"
    source, target = TorchModule(), kind(l=99)
    weights.save(path, source)
    _rewrite(path, lambda tensors: None, metadata)
    weights.load(path, target)
    expected = source.W_Q.weight.detach().numpy()
    values = _values(target)
    got = values["W_Q.weight"] if kind is TorchModule else values["W_Q", "kernel"].T
    np.testing.assert_array_equal(got, expected)


def test_hyper_parameters_are_recorded_as_json(tmp_path):
    weights.save(tmp_path / "w", FlaxModule())
    with safetensors.safe_open(tmp_path / "w", framework="pt") as file:
        assert json.loads(file.metadata()[weights.METADATA_KEY]) == HYPER_PARAMETERS


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "w"
    weights.save(path, TorchModule())
    old = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        weights.save(path, TorchModule())
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["w"]


def test_a_loaded_value_does_not_share_the_mapped_file():
    tensor = torch.zeros(L * D, FEATURES)  # aligned, as a tensor in the file may be
    value = weights._to_nnx(("phi_k_mlp", "w1"), tensor, jnp.ones((L * D, FEATURES)))
    tensor.fill_(1)
    assert not value.any()


def test_placement_is_kept(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    spec = jax.sharding.PartitionSpec(None, "model")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    module = FlaxModule()
    module.W_Q.kernel.set_value(jax.device_put(module.W_Q.kernel.get_value(), sharding))
    weights.save(tmp_path / "w", FlaxModule(seed=1))
    weights.load(tmp_path / "w", module)
    assert module.W_Q.kernel.get_value().sharding == sharding
    np.testing.assert_array_equal(module.W_Q.kernel[...], FlaxModule(seed=1).W_Q.kernel[...])

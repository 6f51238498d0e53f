"""A checkpoint says what it is: gate and phi travel with the weights, and are compared."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx

from interop import weights
from nsa_jax.layer import GATES, KIND, KIND_BYTES, KIND_KEY, PHI, LayerSpec
from nsa_jax.nn import Mark
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_torch import NSAAttention as TorchAttention

SIZES = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=16, n_sel=4, w=10)
NAMED = dict(gate="softmax", phi="avg")  # what the seed system's layer is
UNNAMED = [
    ({}, "gate and phi"),
    ({"gate": "softmax"}, "phi"),
    ({"phi": "avg"}, "gate"),
]


def torch_layer(**options):
    torch.manual_seed(0)
    return TorchAttention(**(SIZES | options))


def jax_layer(**options):
    return JaxAttention(LayerSpec(**(SIZES | options)), rngs=nnx.Rngs(0))


def seed_state(**options):
    """A state_dict as the seed system's module has it."""
    state = torch_layer(**options).state_dict()
    del state[KIND_KEY]
    return {name: value + 1 for name, value in state.items()}


def values(module):
    if isinstance(module, torch.nn.Module):
        return {name: value.numpy().copy() for name, value in module.state_dict().items()}
    return {path: np.array(x[...]) for path, x in nnx.to_flat_state(nnx.state(module))}


def same(left, right):
    return left.keys() == right.keys() and all(
        map(np.array_equal, left.values(), right.values())
    )


@pytest.mark.parametrize("phi", PHI)
@pytest.mark.parametrize("gate", GATES)
def test_the_state_survives_torch_save(gate, phi, tmp_path):
    source = torch_layer(gate=gate, phi=phi)
    torch.save(source.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert state[KIND_KEY].dtype == torch.uint8 and state[KIND_KEY].shape == (KIND_BYTES,)
    target = TorchAttention(**SIZES, gate=gate, phi=phi)
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert same(values(source), values(target))
    # safetensors takes tensors only; a cast of everything leaves bytes readable.
    again = safetensors.torch.load(safetensors.torch.save(state))
    again = {name: value.bfloat16() for name, value in again.items()}
    target.load_state_dict(again)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"gate": "softmax"}, "gate must be 'softmax' as in the module, got 'sigmoid'"),
        ({"phi": "mlp"}, "phi must be 'mlp' as in the module, got 'avg'"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_another_kind_is_refused_by_torch(changed, message, strict):
    state = torch_layer().state_dict()
    model = torch.nn.ModuleDict({"layer": torch_layer(**changed)})
    before = values(model)
    state = {f"layer.{name}": value + 1 for name, value in state.items() if name != KIND_KEY}
    state[f"layer.{KIND_KEY}"] = torch_layer().get_extra_state()
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(state, strict=strict)
    assert same(before, values(model))


def test_the_seeds_state_dict_loads_where_gate_and_phi_were_named():
    state, target = seed_state(**NAMED), torch_layer(**NAMED)
    given = dict(state)
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(target.W_Q.weight, state["W_Q.weight"])
    assert state.keys() == given.keys()
    state.pop("out.weight")
    with pytest.raises(RuntimeError, match=r'Missing key.* "out\.weight"'):
        target.load_state_dict(state)


@pytest.mark.parametrize("named, missing", UNNAMED)
@pytest.mark.parametrize("strict", [True, False])
def test_the_seeds_state_dict_is_refused_elsewhere(named, missing, strict):
    target = torch_layer(**named)
    before = values(target)
    message = f"^{missing} must be named when the layer is made.*got no key '{KIND_KEY}'"
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(seed_state(), strict=strict)
    assert same(before, values(target))


def test_a_state_without_weights_of_the_layer_is_left_to_strict():
    model = torch.nn.ModuleDict({"layer": torch_layer(), "head": torch.nn.Linear(2, 2)})
    head = {name: value for name, value in model.state_dict().items() if "head" in name}
    assert model.load_state_dict(head, strict=False).missing_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(head)


def test_a_copy_of_a_torch_layer_checks_for_itself():
    source, twin = torch_layer(gate="softmax"), copy.deepcopy(torch_layer(gate="softmax"))
    twin.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="gate must be 'softmax'"):
        twin.load_state_dict(torch_layer().state_dict())


@pytest.mark.parametrize("make", [torch_layer, jax_layer])
@pytest.mark.parametrize("named, missing", [*UNNAMED, (NAMED, None)])
def test_a_file_with_the_seeds_weights(make, named, missing, tmp_path):
    path = tmp_path / "seed.safetensors"
    path.write_bytes(safetensors.torch.save(seed_state(**NAMED)))
    target = make(**named)
    before = values(target)
    if missing is None:
        weights.load(path, target)
        assert not same(before, values(target))
        return
    with pytest.raises(ValueError, match=f"^{missing} must be named.*seed.safetensors"):
        weights.load(path, target)
    assert same(before, values(target))


@pytest.mark.parametrize("make", [torch_layer, jax_layer])
@pytest.mark.parametrize("name, ours, theirs", [("gate", *GATES), ("phi", "mlp", "avg")])
def test_a_file_without_metadata_says_its_kind(make, name, ours, theirs, tmp_path):
    """What torch users save by themselves: the state_dict, nothing beside it."""
    path = tmp_path / "layer.safetensors"
    path.write_bytes(safetensors.torch.save(torch_layer(**{name: theirs}).state_dict()))
    target = make(**{name: ours})
    before = values(target)
    message = f"{name} must be {ours!r} as in the module, got {theirs!r} in the checkpoint"
    with pytest.raises(ValueError, match=message):
        weights.load(path, target)
    assert same(before, values(target))
    weights.load(path, make(**{name: theirs}))


@pytest.mark.parametrize("changed", [{"gate": "softmax"}, {"phi": "mlp"}], ids=str)
@pytest.mark.parametrize("pure", [False, True], ids=["state", "pure"])
def test_another_kind_is_refused_by_nnx(changed, pure):
    ((name, ours),) = changed.items()
    state = nnx.state(jax_layer())
    state = nnx.to_pure_dict(state) if pure else state
    message = (
        f"{name} must be {ours!r} as in the module, got .*{getattr(LayerSpec(**SIZES), name)}"
    )
    with pytest.raises(ValueError, match=message):
        nnx.update(jax_layer(**changed), state)
    nnx.update(jax_layer(), state)


def test_the_state_of_nnx_is_differentiable_and_compiles_once():
    graph, state = nnx.split(jax_layer())
    marks = nnx.to_flat_state(nnx.filter_state(state, Mark))
    assert [path[-1] for path, _ in marks] == ["gate_sigmoid", "phi_avg"]
    loss = lambda state, x: nnx.merge(graph, state)(x)[0].sum()
    grads = jax.jit(jax.grad(loss))(state, jnp.ones((1, 9, 24)))
    assert not any(np.any(x) for x in jax.tree.leaves(nnx.filter_state(grads, Mark)))
    assert np.any(grads["W_Q"]["kernel"][...])


def test_named_and_unnamed_layers_are_equal():
    named = LayerSpec(**SIZES, gate="sigmoid", phi="avg")
    assert named == LayerSpec(**SIZES) and hash(named) == hash(LayerSpec(**SIZES))
    plain = LayerSpec(**SIZES).as_dict()
    assert {type(plain[name]) for name in KIND} == {str}
    longest = max(len(LayerSpec(**SIZES, gate=g, phi=p).kind()) for g in GATES for p in PHI)
    assert longest == KIND_BYTES

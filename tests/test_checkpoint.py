"""A checkpoint says what it is: gate and phi travel with the weights, and are compared."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from nsa_core.layer import EXTRA_STATE, KIND, SILENT, LayerSpec
from nsa_interop import weights
from nsa_jax.nn import Mark
from tests import refusals
from tests.test_layers import SIZES, in_jax, in_torch

NAMED = dict(gate="softmax", phi="avg")  # what the seed system's layer is
FORMER = dict(gate="softmax", phi="mlp")


def state_of(**options):
    return in_torch(**options).state_dict()


def seed_state():
    """A state_dict as the seed system's module has it."""
    parameters = in_torch(**NAMED).named_parameters()
    return {name: value.detach() + 1 for name, value in parameters}


def former_state():
    """A state_dict as it was until its kind stood in names: 64 bytes of JSON as uint8."""
    layer = in_torch(**FORMER)
    words = {"gate": str(layer.spec.gate), "phi": str(layer.spec.phi)}
    kind = torch.tensor(list(json.dumps(words).ljust(64).encode()), dtype=torch.uint8)
    state = {name: value + 1 for name, value in layer.named_parameters()} | {EXTRA_STATE: kind}
    return {name: value.detach() for name, value in state.items()}


def average(a, b):
    """What scripts of weight averages do: one loop over all keys."""
    return {key: 0.1 * a[key] + 0.9 * b[key] for key in a}


def moved(state):
    return {key: value + key.endswith("W_Q.weight") for key, value in state.items()}


def values(module):
    if isinstance(module, torch.nn.Module):
        return {name: value.numpy().copy() for name, value in module.state_dict().items()}
    return {path: np.array(x[...]) for path, x in nnx.to_flat_state(nnx.state(module))}


def same(left, right):
    return left.keys() == right.keys() and all(
        map(np.array_equal, left.values(), right.values())
    )


WAYS = "torch", "not strict", "in a model", "torch file", "jax file"


def loaded(way, state, scratch, metadata=None, **options):
    """A layer that a state_dict was loaded into, and its values before; or the error."""
    layer = in_jax(**options) if way == "jax file" else in_torch(**options)
    before, error = values(layer), None
    try:
        if way.endswith("file"):
            path = scratch / "layer.safetensors"
            safetensors.torch.save_file(state, path, metadata)
            weights.load(path, layer)
        elif way == "in a model":
            model = torch.nn.ModuleDict({"layer": layer})
            model.load_state_dict({f"layer.{name}": x for name, x in state.items()})
        else:
            layer.load_state_dict(state, strict=way == "torch")
    except ValueError as caught:
        error = caught
    return layer, before, error


LOADED = {  # a state, and the options of the layer that takes it
    "own": (lambda: moved(state_of(**FORMER)), FORMER),
    "average": (lambda: average(state_of(**FORMER), moved(state_of(**FORMER))), FORMER),
    "former": (former_state, FORMER),
    "average of former": (lambda: average(former_state(), moved(former_state())), FORMER),
    "seed": (seed_state, NAMED),
    "no word of kv": (lambda: moved(state_of()), {}),
    "shared": (lambda: moved(state_of(kv="shared")), {"kv": "shared"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", LOADED)
def test_a_state_is_loaded(row, way, tmp_path):
    state, options = LOADED[row][0](), LOADED[row][1]
    given = dict(state)
    layer, before, error = loaded(way, state, tmp_path, **options)
    assert error is None and state.keys() == given.keys() and not same(before, values(layer))
    kernel = layer.W_Q.kernel[...].T if way == "jax file" else layer.W_Q.weight.detach()
    np.testing.assert_array_equal(kernel, state["W_Q.weight"])


def other(name, ours, theirs):
    message = f"{name} must be {ours!r} as in the module, got {theirs!r}"
    return lambda: state_of(**{name: theirs}), {name: ours}, message


LATER = {"kind.norm_layer._extra_state": torch.zeros(())}  # a word of a later version
REFUSED = [
    *(other(*kinds) for kinds in refusals.TABLE["kinds of layers"]),
    (former_state, {"phi": "mlp"}, "gate must be 'sigmoid' as in the module, got 'softmax'"),
    (former_state, {"gate": "softmax"}, "phi must be 'avg' as in the module, got 'mlp'"),
    (lambda: state_of() | LATER, {}, "norm must be 'no such name' .* got 'layer'"),
    (
        seed_state,
        {},
        "^gate and phi must be passed .*(got no '|safetensors)",
    ),
    (seed_state, {"gate": "softmax"}, "^phi must be passed"),
    (seed_state, {"phi": "avg"}, "^gate must be passed"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("state", "options", "message"), REFUSED, ids=[x[2] for x in REFUSED])
def test_a_state_of_another_kind_changes_nothing(state, options, message, way, tmp_path):
    layer, before, error = loaded(way, state(), tmp_path, **options)
    assert same(before, values(layer)) and re.search(message, str(error))
    if way.endswith("file"):
        assert "layer.safetensors" in str(error)


def test_an_average_of_two_kinds_is_no_checkpoint():
    """A loop over the keys of one ends at the other's; a union of both is refused."""
    one, two = state_of(), state_of(gate="softmax")
    with pytest.raises(KeyError, match="gate_sigmoid"):
        average(one, two)
    for layer in (in_torch(), in_torch(gate="softmax")):
        with pytest.raises(ValueError, match="gate must have one value"):
            layer.load_state_dict({**two, **one})


@pytest.mark.parametrize("values", [[*b"none"], [*b'{"gate": "sigmoid"'], [float("inf")]])
def test_a_kind_that_is_no_json(values):
    state = former_state() | {EXTRA_STATE: torch.tensor(values)}
    with pytest.raises(ValueError, match=r"_extra_state must hold bytes of JSON"):
        in_torch(**FORMER).load_state_dict(state)


def test_the_state_of_distributed_checkpoints():
    """torch looks up every key of a state_dict in the module."""
    model = torch.nn.ModuleDict({"layer": in_torch(phi="mlp")})
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(model, state)
    assert not list(model.buffers())  # DDP would send them at each forward pass


def test_missing_weights_are_left_to_torch():
    """Of the layer, and of a state without any of the layer."""
    state = seed_state()
    state.pop("out.weight")
    with pytest.raises(RuntimeError, match=r'Missing key.* "out\.weight"'):
        in_torch(**NAMED).load_state_dict(state)
    model = torch.nn.ModuleDict({"layer": in_torch(), "head": torch.nn.Linear(2, 2)})
    head = {name: value for name, value in model.state_dict().items() if "head" in name}
    assert model.load_state_dict(head, strict=False).missing_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(head)


@pytest.mark.parametrize("changed", [{"gate": "softmax"}, {"phi": "mlp"}], ids=str)
@pytest.mark.parametrize("form", ["state", "pure", "average"])
def test_another_kind_is_refused_by_nnx(changed, form):
    ((name, ours),) = changed.items()
    state = nnx.state(in_jax())
    if form == "pure":
        state = nnx.to_pure_dict(state)
    elif form == "average":
        state = jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, state, nnx.state(in_jax()))
    theirs = getattr(LayerSpec(**SIZES), name)
    message = f"{name} must be {ours!r} as in the module, got .*{theirs}"
    with pytest.raises(ValueError, match=message):
        nnx.update(in_jax(**changed), state)
    nnx.update(in_jax(), state)


def test_kv_in_names_of_a_state():
    assert not any("kv" in key for key in state_of())
    assert "kind.kv_shared._extra_state" in state_of(kv="shared")
    with pytest.raises(ValueError, match="W_K"):  # which is the first that differs
        nnx.update(in_jax(), nnx.state(in_jax(kv="shared")))


def test_the_state_of_nnx_is_differentiable_and_compiles_once():
    graph, state = nnx.split(in_jax())
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
    assert {type(plain[name]) for name in KIND if name not in SILENT} == {str}

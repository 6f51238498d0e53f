"""A checkpoint says what it is: gate and phi travel with the weights, and are compared."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from nsa_core.layer import EXTRA_STATE, GATES, KIND, PHI, SILENT, LayerSpec
from nsa_interop import weights
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
    parameters = torch_layer(**options).named_parameters()
    return {name: value.detach() + 1 for name, value in parameters}


def former_state(text=None, prefix="", **options):
    """A state_dict as it was until its kind stood in names: 64 bytes of JSON as uint8."""
    layer = torch_layer(**options)
    words = {"gate": str(layer.spec.gate), "phi": str(layer.spec.phi)}
    kind = torch.tensor(list((text or json.dumps(words)).ljust(64).encode()), dtype=torch.uint8)
    state = {name: value + 1 for name, value in layer.named_parameters()} | {EXTRA_STATE: kind}
    return {prefix + name: value.detach() for name, value in state.items()}


def average(a, b):
    """What scripts of weight averages do: one loop over all keys."""
    return {key: 0.1 * a[key] + 0.9 * b[key] for key in a}


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
    assert {f"kind.gate_{gate}._extra_state", f"kind.phi_{phi}._extra_state"} < state.keys()
    target = TorchAttention(**SIZES, gate=gate, phi=phi)
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert same(values(source), values(target))
    # safetensors takes tensors only; a cast of everything keeps names.
    again = safetensors.torch.load(safetensors.torch.save(state))
    again = {name: value.bfloat16() for name, value in again.items()}
    target.load_state_dict(again)


@pytest.mark.parametrize("make", [torch_layer, jax_layer])
@pytest.mark.parametrize("former", [False, True])
def test_averages_of_weights_load(make, former, tmp_path):
    """By torch and by a file, from the present form and from that of older checkpoints."""
    kind = {"gate": "softmax", "phi": "mlp"}
    states = former_state(**kind), former_state(**kind)
    if not former:
        states = torch_layer(**kind).state_dict(), torch_layer(**kind).state_dict()
    states[1]["W_Q.weight"] += 1
    mean = average(*states)
    other = {"gate": "softmax"}
    targets = make(**kind), make(**other)
    if make is torch_layer:
        assert str(targets[0].load_state_dict(mean)) == "<All keys matched successfully>"
        with pytest.raises(ValueError, match="phi must be 'avg' as in the module, got 'mlp'"):
            targets[1].load_state_dict(mean)
        torch.testing.assert_close(targets[0].W_Q.weight.data, states[0]["W_Q.weight"] + 0.9)
    path = tmp_path / "mean.safetensors"
    safetensors.torch.save_file(mean, path)
    weights.load(path, targets[0])
    with pytest.raises(ValueError, match=r"phi must be 'avg' .* got 'mlp'.*mean\.safetensors"):
        weights.load(path, targets[1])


def test_moving_averages_load():
    """torch's, and one in place over all values of a state_dict."""
    layer = torch_layer()
    mean = torch.optim.swa_utils.AveragedModel(layer, use_buffers=True)
    mean.update_parameters(layer)
    layer.W_Q.weight.data.zero_()
    layer.load_state_dict(mean.module.state_dict())
    assert layer.W_Q.weight.any()
    shadow = {name: value.clone() for name, value in layer.state_dict().items()}
    for name, value in torch_layer(phi="avg").state_dict().items():
        shadow[name].lerp_(value, 0.1)
    layer.load_state_dict(shadow)
    assert torch.equal(layer.W_Q.weight, shadow["W_Q.weight"])


def test_an_average_of_two_kinds_is_no_checkpoint():
    """A loop over the keys of one ends at the other's; a union of both is refused."""
    one, two = torch_layer().state_dict(), torch_layer(gate="softmax").state_dict()
    with pytest.raises(KeyError, match="gate_sigmoid"):
        average(one, two)
    for layer in (torch_layer(), torch_layer(gate="softmax")):
        with pytest.raises(ValueError, match="gate must have one value"):
            layer.load_state_dict({**two, **one})


@pytest.mark.parametrize("make", [torch_layer, jax_layer])
def test_older_files_load(make, tmp_path):
    """Those with the kind as bytes, with metadata of `nsa_interop.weights` and without."""
    kind = {"gate": "softmax", "phi": "mlp"}
    target, state = make(**kind), former_state(**kind)
    for metadata in (None, {weights.METADATA_KEY: json.dumps(target.hyper_parameters())}):
        path = tmp_path / "older.safetensors"
        safetensors.torch.save_file(state, path, metadata)
        weights.load(path, target)
        before = values(target)
        with pytest.raises(
            ValueError, match="gate must be 'sigmoid' as in the module, got 'softmax'"
        ):
            weights.load(path, make(phi="mlp"))
        assert same(before, values(target))


def test_older_state_dicts_load():
    model = torch.nn.ModuleDict({"layer": torch_layer()})
    state = former_state(prefix="layer.")
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert f"layer.{EXTRA_STATE}" in state
    other = torch.nn.ModuleDict({"layer": torch_layer(phi="mlp")})
    before = values(other)
    for strict in (True, False):
        with pytest.raises(ValueError, match="phi must be 'mlp' as in the module, got 'avg'"):
            other.load_state_dict(state, strict=strict)
    assert same(before, values(other))
    for text in ("none", '{"gate": "sigmoid"'):
        with pytest.raises(ValueError, match=r"layer\._extra_state must hold bytes of JSON"):
            model.load_state_dict(former_state(text, "layer."))


def test_a_word_of_a_later_version_is_refused(tmp_path):
    """What a checkpoint says and this version does not know changes the meaning of weights."""
    state = torch_layer().state_dict() | {"kind.norm_layer._extra_state": torch.zeros(())}
    with pytest.raises(ValueError, match=r"norm must be 'no such name' .* got 'layer'"):
        torch_layer().load_state_dict(state)
    safetensors.torch.save_file(state, tmp_path / "later.safetensors")
    with pytest.raises(ValueError, match=r"norm must be 'no such name' .* got 'layer'"):
        weights.load(tmp_path / "later.safetensors", jax_layer())


def test_the_state_of_distributed_checkpoints():
    """torch looks up every key of a state_dict in the module."""
    model = torch.nn.ModuleDict({"layer": torch_layer(phi="mlp")})
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(model, state)
    assert not list(model.buffers())  # DDP would send them at each forward pass


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
    state = {f"layer.{name}": value + 1 for name, value in state.items()}
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
    message = f"^{missing} must be passed to the layer's constructor .* got no 'kind'"
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
    with pytest.raises(ValueError, match=f"^{missing} must be passed .*seed.safetensors"):
        weights.load(path, target)
    assert same(before, values(target))


@pytest.mark.parametrize("make", [torch_layer, jax_layer])
@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("gate", "sigmoid", "softmax"),
        ("gate", "head", "sigmoid"),
        ("phi", "mlp", "avg"),
        ("phi", "mlp_rope", "mlp_pe"),
    ],
)
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


def test_an_average_of_states_of_nnx_loads():
    one, two = nnx.state(jax_layer()), nnx.state(jax_layer())
    mean = jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, one, two)
    nnx.update(jax_layer(), mean)
    with pytest.raises(ValueError, match="gate must be 'softmax'"):
        nnx.update(jax_layer(gate="softmax"), mean)


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


@pytest.mark.parametrize("make", [torch_layer, jax_layer])
def test_a_checkpoint_that_does_not_say_kv_has_separate_ones(make, tmp_path):
    """As all from before there was a choice; a shared one says so, in either direction."""
    path = tmp_path / "layer.safetensors"
    separate, shared = torch_layer(), torch_layer(kv="shared")
    assert not any("kv" in key for key in separate.state_dict())
    assert "kind.kv_shared._extra_state" in shared.state_dict()
    for state, target, message in (
        (separate, make(kv="shared"), "kv must be 'shared' as in the module, got 'separate'"),
        (shared, make(), "kv must be 'separate' as in the module, got 'shared'"),
    ):
        path.write_bytes(safetensors.torch.save(state.state_dict()))
        before = values(target)
        with pytest.raises(ValueError, match=message):
            weights.load(path, target)
        assert same(before, values(target))
        if make is torch_layer:
            with pytest.raises(ValueError, match=message):
                target.load_state_dict(state.state_dict())
        weights.save(path, state)  # with hyper-parameters
        with pytest.raises(ValueError, match="hyper-parameter kv must be"):
            weights.load(path, target)
    weights.load(path, make(kv="shared"))
    with pytest.raises(ValueError, match="W_K"):  # which is the first that differs
        nnx.update(jax_layer(), nnx.state(jax_layer(kv="shared")))


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
    assert {type(plain[name]) for name in KIND if name not in SILENT} == {str}

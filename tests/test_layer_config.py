"""Layers that are made with an `NSAConfig`, and that those made without one stay as they are."""

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_jax.nn
import nsa_torch
from nsa_core.layer import LayerSpec
from nsa_jax import api
from nsa_torch import Branches, NSAConfig, functional
from tests import pretend
from tests.problems import SMALL

SIZES = {"dim": 32, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8}


def of_torch(**options):
    return nsa_torch.NSAAttention(**SIZES, **options)


def of_jax(**options):
    return nsa_jax.nn.NSAAttention(**SIZES, **options, rngs=nnx.Rngs(0))


def test_a_layer_without_config_is_as_ever():
    """Output and keys of the state are those of commit 770131a."""
    layer = of_torch(l=8, d=4, l_sel=16, n_sel=4, w=10, dtype=torch.float64)
    with torch.no_grad():
        for i, x in enumerate(layer.parameters()):
            at = torch.arange(x.numel(), dtype=torch.float64)
            x.copy_((0.3 * torch.sin(at * (i + 1.3) + i)).view(x.shape))
    y, _ = layer(torch.sin(torch.arange(80 * 32, dtype=torch.float64) * 0.7).view(1, 80, 32))
    expected = [
        [0.026473838, 0.031892008],
        [0.002181133, -0.001229329],
        [0.001268752, 0.00131543],
    ]
    found = y.detach()[0, [0, 37, 79], :2]
    assert (found - torch.tensor(expected, dtype=y.dtype)).abs().max() < 1e-8
    branches = [f"W_{kind}_{x}.weight" for x in ("cmp", "sel", "win") for kind in "KV"]
    gate = [f"gate.{x}.{y}" for x in ("fc1", "fc2") for y in ("weight", "bias")]
    kind = [f"kind.{x}._extra_state" for x in ("gate_sigmoid", "phi_avg")]
    assert [*layer.state_dict()] == ["W_Q.weight", *branches, "out.weight", *gate, *kind]


@pytest.mark.parametrize("make", [of_torch, of_jax])
def test_with_config_the_recommended_options_are_the_defaults(make):
    layer = make(config=SMALL)
    assert (layer.spec.gate, layer.spec.kv, layer.config) == ("head", "shared", SMALL)
    assert layer.spec == LayerSpec(
        **SIZES, l=8, d=4, l_sel=16, n_sel=4, w=10, gate="head", kv="shared"
    )
    named = make(config=SMALL, gate="softmax", kv="separate").spec
    assert (named.gate, named.kv) == ("softmax", "separate")
    given = make(num_initial=2, compute_dtype="float8_e4m3").config
    assert (given.num_initial, given.compute_dtype) == (2, "float8_e4m3")
    assert (make().spec.gate, make().spec.kv) == ("sigmoid", "separate")
    fp8 = make(config=NSAConfig(compute_dtype="float8_e4m3"))
    assert fp8.compute_dtype == fp8.config.compute_dtype == "float8_e4m3"


def test_a_layer_explains_and_packs():
    rows = torch.tensor([0, 30, 80]), jnp.repeat(jnp.arange(2), 40)[None]
    inputs = torch.ones(1, 80, 32), jnp.ones((1, 80, 32))
    for make, borders, x in zip((of_torch, of_jax), rows, inputs, strict=True):
        layer = make(config=SMALL)
        name = layer.explain(100_000).selected.implementation
        assert name == ("sdpa" if make is of_torch else "xla")
        with pytest.raises(ValueError, match="seq_len"):
            layer.explain(0)
        packed = {"cu_seqlens" if make is of_torch else "segment_ids": borders}
        assert (layer(x, varlen=layer.varlen(borders))[0] == layer(x, **packed)[0]).all()
        bounds = {"max_seqlen": 60, "max_sequences" if make is of_torch else "max_segments": 4}
        varlen = layer.varlen(borders, **bounds)
        assert {name: getattr(varlen, name) for name in bounds} == bounds


INPUTS = {of_torch: torch.ones(1, 8, 32), of_jax: jnp.ones((1, 8, 32))}
INVARIANT = Branches.each("invariant")
NAMED = [
    (of_torch, "mosaic"),
    (of_jax, "mosaic"),
    (of_torch, "invariant"),
    (of_torch, INVARIANT),
]


@pytest.mark.parametrize(("make", "name"), NAMED)
@pytest.mark.parametrize("dense_below", [None, 0, 9])
def test_a_layer_passes_on_its_implementation(dense_below, make, name):
    """To whole sequences, to the selected branch alone, to dense attention, and to a cache."""
    options = {} if dense_below is None else {"gate": "selected", "dense_below": dense_below}
    layer = make(config=SMALL, implementation=name, **options)
    whole, cached = (INPUTS[make],), (INPUTS[make], layer.init_cache(1, 9))
    for call, given in ((layer, whole), (layer, cached), (layer.explain, (8,))):
        refused = pytest.raises(NotImplementedError, match=": needs a Hopper GPU")
        with refused, torch.no_grad():
            call(*given)


@pytest.mark.parametrize("make", INPUTS)
def test_a_layer_explains_the_batch_and_dtype_that_it_is_asked_about(make, monkeypatch):
    place = functional if make is of_torch else api
    note = lambda query, *_, **how: (query.shape, query.dtype)
    asked = pretend.calls_of(monkeypatch, place, "explain", note)
    dtype = {"dtype": torch.float16} if make is of_torch else {}
    make(config=SMALL).explain(9, batch=3, **dtype)
    assert asked == [((3, 9, 4, 8), dtype.get("dtype", jnp.float32))]


def test_a_cache_of_a_layer_has_the_dtype_and_device_that_are_asked_for():
    key = of_torch(config=SMALL).init_cache(1, 9, torch.float16, "meta").selected_key
    assert key.is_meta and key.dtype is torch.float16


def test_flax_knows_prefill():
    layer = of_jax(config=SMALL)
    _, kv = layer(jnp.ones((1, 4, 32)), layer.init_cache(1, 16))
    assert layer(jnp.ones((1, 1, 32)), kv, prefill=False)[0].shape == (1, 1, 32)

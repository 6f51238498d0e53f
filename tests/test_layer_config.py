"""Layers that are made with an `NSAConfig`, and that those made without one stay as they are."""

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_jax.nn
import nsa_torch
from nsa_core.layer import LayerSpec
from nsa_torch import NSAConfig

SIZES = {"dim": 32, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8}
SMALL = NSAConfig(8, 4, 16, num_selected=4, window=10)


def of_torch(**options):
    return nsa_torch.NSAAttention(**SIZES, **options)


def of_jax(**options):
    return nsa_jax.nn.NSAAttention(**SIZES, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [of_torch, of_jax])
def test_with_config_the_recommended_options_are_the_defaults(make):
    layer = make(config=SMALL)
    assert (layer.spec.gate, layer.spec.kv, layer.config) == ("head", "shared", SMALL)
    assert layer.spec == LayerSpec(
        **SIZES, l=8, d=4, l_sel=16, n_sel=4, w=10, gate="head", kv="shared"
    )
    named = make(config=SMALL, gate="softmax", kv="separate").spec
    assert (named.gate, named.kv) == ("softmax", "separate")
    assert (make().spec.gate, make().spec.kv) == ("sigmoid", "separate")
    fp8 = make(config=NSAConfig(compute_dtype="float8_e4m3"))
    assert fp8.compute_dtype == fp8.config.compute_dtype == "float8_e4m3"


def test_a_spec_and_values_are_not_mixed():
    spec = LayerSpec(**SIZES)
    for options in ({"dim": 32}, {"config": SMALL}):
        with pytest.raises(ValueError, match="spec must be None if"):
            nsa_jax.nn.NSAAttention(spec, **options, rngs=nnx.Rngs(0))


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


def test_flax_knows_prefill():
    layer = of_jax(config=SMALL)
    _, kv = layer(jnp.ones((1, 4, 32)), layer.init_cache(1, 16))
    assert layer(jnp.ones((1, 1, 32)), kv, prefill=False)[0].shape == (1, 1, 32)

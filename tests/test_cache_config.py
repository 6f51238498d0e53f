"""A cache holds what one configuration makes: with another it is refused, never read wrongly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_jax.paged
import nsa_torch
from nsa_core.layer import LayerSpec
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_torch import NSAAttention as TorchAttention
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelCache,
    NSAModelConfig,
    NSAPagedModelCache,
)
from nsa_torch.huggingface.paged_layer import attend_pages
from tests.inputs import SMALL, Case, problem

CASE = Case(63, 63, H=6, Hkv=2, D=8, Dv=5)
FRAMEWORKS = pytest.mark.parametrize(
    "api, array",
    [(nsa_jax, jnp.asarray), (nsa_torch, torch.tensor)],
    ids=["jax", "torch"],
)
LAYER = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=16, n_sel=4, w=10)
MODEL = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    compress_block=8,
    compress_stride=4,
    select_block=8,
    num_selected=3,
    num_local=1,
    window=7,
)


@FRAMEWORKS
@pytest.mark.parametrize("changed", [dict(compress_stride=2), dict(compress_block=4)], ids=str)
@pytest.mark.parametrize("capacity", [9, 70])
def test_a_cache_of_another_config_is_refused(api, array, changed, capacity):
    """Under jit too, before and after the first token."""
    other = dataclasses.replace(SMALL, **changed)
    ((name, theirs),) = changed.items()
    new = [array(np.zeros((1, 1, 1, n), np.float32)) for n in (8, 8, 8, 3)]

    def step(cache, config=SMALL):
        return api.cached_attention(*new, cache, config=config)[1]

    if api is nsa_jax:
        step = jax.jit(step, static_argnames="config")
    cache = api.init_cache(1, capacity, 1, 8, 8, config=other)
    message = f"cache must be made with {name}={getattr(SMALL, name)}, got one with {theirs}"
    with pytest.raises(ValueError, match=message):
        step(cache)
    cache = step(cache, config=other)
    with pytest.raises(ValueError, match=message):
        step(cache)


@FRAMEWORKS
def test_the_config_is_the_caches_unless_one_is_given(api, array):
    """The window may change: nothing that the cache holds depends on it."""
    p = problem(CASE)
    parts = [array(np.asarray(x)) for x in (p.query, p.key, p.value, p.gates)]
    wide = dataclasses.replace(SMALL, window=30)
    attention, step = api.attention, api.cached_attention
    if api is nsa_jax:
        attention, step = (jax.jit(f, static_argnames="config") for f in (attention, step))

    def decode(**options):
        cache, outs = api.init_cache(2, 63, 2, 8, 5, config=SMALL), []
        for part in (slice(0, 40), slice(40, 63)):
            out, cache = step(*(x[:, part] for x in parts), cache, **options)
            outs.append(np.asarray(out))
        return np.concatenate(outs, axis=1)

    own, other = decode(), decode(config=wide)
    for got, config in ((own, SMALL), (other, wide)):
        whole = np.asarray(attention(*parts, config=config))
        np.testing.assert_allclose(got, whole, rtol=0, atol=1e-5)
    assert np.abs(own - other).max() > 1e-2


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_cache_of_another_layer_is_refused(framework):
    def layer(**changed):
        if framework == "torch":
            return TorchAttention(**(LAYER | changed))
        return JaxAttention(LayerSpec(**(LAYER | changed)), rngs=nnx.Rngs(0))

    x = torch.zeros(1, 3, 24) if framework == "torch" else jnp.zeros((1, 3, 24))
    for changed, message in (
        (dict(d=8), "compress_stride=4, got one with 8"),
        (dict(l=16), "compress_block=8, got one with 16"),
    ):
        with pytest.raises(ValueError, match=f"cache must be made with {message}"):
            layer()(x, layer(**changed).init_cache(1, 20))


@torch.no_grad()
def test_pages_of_another_layer_are_refused():
    layer, config = TorchAttention(**LAYER), TorchAttention(**(LAYER | dict(d=2))).spec.config
    pages = nsa_torch.PagedCache(2, 2, 8, 6, config=config, dtype=torch.float32, separate=True)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    x, position = torch.zeros(1, 1, 24), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="config must be the cache's"):
        attend_pages(layer, x, position, pages, table, lengths, None, 1)


@FRAMEWORKS
def test_a_paged_cache_of_another_config_is_refused(api, array):
    """Every field: attention from pages takes all of them from the cache."""
    cache = api.PagedCache(2, 1, 8, 8, config=SMALL, dtype=array(np.float32(0)).dtype)
    arrays = [array(np.zeros(shape, np.float32)) for shape in ((1, 2, 8), (1, 2, 3))]
    table, lengths = array(np.zeros((1, 1), np.int32)), array(np.ones(1, np.int32))
    for field in dataclasses.fields(SMALL):
        value = {"compress_block": 4, "compress_stride": 8, "select_block": 32}.get(field.name)
        value = getattr(SMALL, field.name) + 1 if value is None else value
        other = dataclasses.replace(SMALL, **{field.name: value})
        with pytest.raises(ValueError, match="config must be the cache's"):
            api.paged_attention(*arrays, cache, table, lengths, config=other)


@torch.no_grad()
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(
    "changed",
    [
        dict(compress_stride=8),
        dict(compress_block=4),
        dict(select_block=16),
        dict(window=8),
        dict(num_selected=4),
        dict(phi="mlp"),
        dict(head_dim=4),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        dict(attention=["nsa", "dense"]),
        dict(num_hidden_layers=3),
    ],
    ids=str,
)
def test_a_cache_of_another_model_is_refused(changed, paged):
    model = NSAForCausalLM(NSAModelConfig(**MODEL)).eval()
    ids = torch.ones(1, 3, dtype=torch.long)

    def cache(**changed):
        config = NSAModelConfig(**(MODEL | changed))
        return NSAPagedModelCache(config, 1, 20) if paged else NSAModelCache(config)

    (name,) = changed
    name = {"attention": "layer_attention", "num_hidden_layers": "layer_attention"}.get(
        name, name
    )
    with pytest.raises(ValueError, match=f"cache must be made for a model with {name}="):
        model(ids, past_key_values=cache(**changed))
    model(ids, past_key_values=cache(gate="softmax"))  # of the gate it holds nothing

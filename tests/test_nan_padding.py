"""NaN in padding changes no bit: in W^T x zero times NaN would be NaN in every weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import nsa_torch
from nsa_core.layer import LayerSpec
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_torch import NSAAttention
from nsa_torch.huggingface import NSAModel, NSAModelCache, NSAModelConfig, NSAPagedModelCache
from tests.limits import set_limits
from tests.model_sizes import MODELS, SMALLEST
from tests.problems import SMALL

SIZES, LAYERS = MODELS["small layer"], MODELS["padded"]
LENGTH, REAL = 40, 29
SEGMENTS = np.repeat([0, 1, -1], [12, REAL - 12, LENGTH - REAL])[None].astype(np.int32)
BORDERS = torch.tensor([0, 12, REAL])


def normal(*shape, behind=None, seed=0):
    """`behind`: the number from token `REAL` on."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if behind is not None:
        x[:, REAL:] = behind
    return x


hidden = functools.partial(normal, 1, LENGTH, 16)


def gradients(outputs, *leaves):
    loss = sum(y.square().sum() for y in outputs)
    return [x.numpy() for x in torch.autograd.grad(loss, leaves)]


def check(results):
    """Of the number in padding."""
    clean, spoiled = ([np.asarray(x) for x in results(number)] for number in (0, np.nan))
    for want, got in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(got, want)
    assert all(np.isfinite(x).all() for x in clean) and any(x.any() for x in clean)
    return spoiled


@pytest.mark.parametrize("how", ["packed", "fused", "cache"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_torch(kind, how, monkeypatch):
    """Behind sequences, and behind `new_lengths`: in a prompt and in what follows it."""
    set_limits(monkeypatch, **{"fused_heads_from": 1} if how == "fused" else {})
    layer = NSAAttention(**SIZES | LAYERS[kind])

    def results(number):
        x = torch.from_numpy(hidden(behind=number)).requires_grad_()
        if how == "cache":
            first, kv = layer(x, layer.init_cache(1, 99), new_lengths=torch.tensor([REAL]))
            then, _ = layer(x[:, 20:], kv, new_lengths=torch.tensor([REAL - 20]))
            outputs = first[:, :REAL], then[:, : REAL - 20]
        else:
            outputs = [layer(x, cu_seqlens=BORDERS)[0][:, :REAL]]
        return gradients(outputs, *layer.parameters(), x)

    assert not check(results)[-1][:, REAL:].any()


@pytest.mark.parametrize("kind", ["mlp", "rotated"])
def test_a_layer_of_flax(kind):
    layer = JaxAttention(LayerSpec(**SIZES | LAYERS[kind]), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(state, x):
        y, _ = nnx.merge(graph, state)(x, segment_ids=jnp.asarray(SEGMENTS))
        return (y[:, :REAL] ** 2).sum()

    found = check(lambda number: jax.tree.leaves(gradient(state, hidden(behind=number))))
    assert not found[-1][:, REAL:].any()


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_outputs_after_a_cache(implementation):
    """What stands behind `new_lengths` is in no product of the function, whoever calls it."""

    def outputs(number):
        shapes = (4, 8), (2, 8), (2, 6), (4, 3)
        given = [torch.from_numpy(normal(1, LENGTH, *x, behind=number)) for x in shapes]
        cache = nsa_torch.init_cache(1, 99, 2, 8, 6, config=SMALL)
        for _ in range(2):
            options = dict(new_lengths=torch.tensor([REAL]), implementation=implementation)
            out, cache = nsa_torch.cached_attention(*given, cache, **options)
            yield out[:, :REAL]

    check(outputs)


MASK = torch.ones(1, LENGTH, dtype=torch.int64)
MASK[:, REAL:] = 0


def model():
    """Of a layer of NSA and a dense one."""
    torch.manual_seed(0)
    return NSAModel(NSAModelConfig(**SMALLEST, attention=["nsa", "dense"]))


@pytest.mark.parametrize(
    "rows",
    [dict(attention_mask=MASK), dict(attention_mask=MASK.flip(1)), dict(cu_seq_lens_q=BORDERS)],
    ids=["right", "left", "packed"],
)
@pytest.mark.parametrize("use_cache", [False, True], ids=["", "cache"])
def test_a_model_of_transformers(rows, use_cache):
    made, mask = model(), rows.get("attention_mask", MASK)
    weights = [p for name, p in made.named_parameters() if name != "embed_tokens.weight"]

    def results(number):
        x = torch.from_numpy(hidden(behind=number)).requires_grad_()
        turned = x.flip(1) if mask[0, 0] == 0 else x
        out = made(inputs_embeds=turned, use_cache=use_cache, **rows).last_hidden_state
        return gradients([out[mask > 0]], *weights, x)

    check(results)


CACHES = {
    "": lambda config: None,
    "grows": NSAModelCache,
    "pages": lambda config: NSAPagedModelCache(config, 2, 99),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_outputs_of_a_model_of_transformers(side, kind):
    """A row of padding alone too; on the left one whose tokens begin in a last, short chunk."""
    made, mask = model(), torch.cat([MASK, torch.zeros_like(MASK)])
    x, chunks = torch.from_numpy(hidden()).repeat(2, 1, 1), [LENGTH]
    if side == "left":
        x, mask = x.flip(1), mask.flip(1)
        mask[1, -2:] = 1
        # The first chunk of a cache may be padding alone.
        chunks = [LENGTH - REAL, REAL - 5, 5] if kind else chunks

    def outputs(number):
        cache, end = CACHES[kind](made.config), 0
        for part in x.masked_fill(mask[..., None] == 0, number).split(chunks, dim=1):
            begin, end = end, end + part.shape[1]
            options = dict(attention_mask=mask[:, :end], cache=cache, use_cache=bool(kind))
            out = made(inputs_embeds=part, **options).last_hidden_state
            yield out[mask[:, begin:end] > 0]

    check(outputs)


@pytest.mark.parametrize("kind", ["grows", "pages"])
@torch.no_grad()
def test_a_cache_of_transformers_that_was_reset(kind):
    """Of NaN before, which dense layers would multiply with behind a shorter row's tokens."""
    made, mask = model(), torch.ones(2, 22, dtype=torch.int64)
    x = torch.from_numpy(normal(2, 30, 16))
    mask[1, :15] = 0

    def outputs(number):
        cache = CACHES[kind](made.config)
        made(inputs_embeds=torch.full_like(x, number), cache=cache)
        cache.reset()
        for part in (slice(0, 20), slice(20, 21), slice(21, 22)):
            options = dict(attention_mask=mask[:, : part.stop], cache=cache)
            out = made(inputs_embeds=x[:, part], **options).last_hidden_state
            yield out[mask[:, part] > 0]

    check(outputs)

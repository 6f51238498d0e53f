"""NaN in the hidden states of padding: in W^T x zero times NaN would be NaN in every weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_torch
from nsa_core.compress_params import MLPParams, PoolParams, RopeMLPParams
from nsa_core.layer import LayerSpec
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_torch import NSAAttention, heads
from nsa_torch.huggingface import NSAModel, NSAModelCache, NSAModelConfig, NSAPagedModelCache
from tests.inputs import SMALL
from tests.limits import set_limits
from tests.model_sizes import SMALLEST as MODEL

SIZES = dict(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=16, n_sel=3, w=10)
LAYERS = {
    "mean": {},
    "pool": dict(phi="mlp"),
    "mlp": dict(phi="mlp_pe", kv="shared", bias=True),
    "rotated": dict(phi="mlp_rope", gate="head", qk_norm_eps=1e-6, bias=True),
}
LENGTH, REAL = 40, 29
SEGMENTS = np.repeat([0, 1, -1], [12, REAL - 12, LENGTH - REAL])[None].astype(np.int32)
BORDERS = torch.tensor([0, 12, REAL])


def hidden(number, real=REAL, seed=0):
    x = np.random.default_rng(seed).standard_normal((1, LENGTH, 16)).astype(np.float32)
    x[:, real:] = number
    return x


def of_torch(loss, module, x):
    """Gradients of the parameters and of `x`."""
    x = torch.from_numpy(x).requires_grad_()
    return [g.numpy() for g in torch.autograd.grad(loss(x), [*module.parameters(), x])]


def check(clean, spoiled):
    """Gradients by name or in order, those of hidden states last."""
    for want, got in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(got, want)
    assert all(np.isfinite(x).all() for x in clean) and any(x.any() for x in clean)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_torch(kind, fused, monkeypatch):
    set_limits(monkeypatch, fused_heads_from=1 if fused else heads.FUSED_FROM)
    layer = NSAAttention(**SIZES | LAYERS[kind])

    def loss(x):
        return layer(x, cu_seqlens=BORDERS)[0][:, :REAL].square().sum()

    clean, spoiled = (of_torch(loss, layer, hidden(x)) for x in (0, np.nan))
    check(clean, spoiled)
    assert not spoiled[-1][:, REAL:].any()


@pytest.mark.parametrize("kind", ["mean", "rotated"])
def test_a_layer_of_torch_with_a_cache(kind):
    """Behind `new_lengths`, in a prompt and in what follows it."""
    layer = NSAAttention(**SIZES | LAYERS[kind])

    def loss(x):
        first, kv = layer(x, layer.init_cache(1, 99), new_lengths=torch.tensor([REAL]))
        then, _ = layer(x[:, 20:], kv, new_lengths=torch.tensor([REAL - 20]))
        return first[:, :REAL].square().sum() + then[:, : REAL - 20].square().sum()

    check(*(of_torch(loss, layer, hidden(x)) for x in (0, np.nan)))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_outputs_after_a_cache(implementation):
    """What stands behind `new_lengths` is in no product of the function, whoever calls it."""

    def outputs(number):
        rng = np.random.default_rng(0)
        shapes = (4, 8), (2, 8), (2, 6), (4, 3)
        given = [rng.standard_normal((1, LENGTH, *x)).astype(np.float32) for x in shapes]
        for x in given:
            x[:, REAL:] = number
        cache = nsa_torch.init_cache(1, 99, 2, 8, 6, config=SMALL)
        for _ in range(2):
            out, cache = nsa_torch.cached_attention(
                *map(torch.from_numpy, given),
                cache,
                new_lengths=torch.tensor([REAL]),
                implementation=implementation,
            )
            yield out[:, :REAL]

    for want, got in zip(outputs(0), outputs(np.nan), strict=True):
        assert torch.equal(got, want)


def masks(layer, x, *cache, **options):
    """Whether a call of a layer masks its hidden states."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        layer(x, *cache, **options)
    masked = [each for each in profile.function_events if each.name == "aten::where"]
    return any([*x.shape] in each.input_shapes for each in masked)


def test_no_padding_no_launch():
    """Nothing is masked in whole sequences, in a packed row without padding, without gradients."""
    layer, x = NSAAttention(**SIZES), torch.from_numpy(hidden(0))
    assert masks(layer, x, cu_seqlens=BORDERS)
    assert not masks(layer, x, cu_seqlens=torch.tensor([0, 12, LENGTH]))
    assert not masks(layer, x) and not masks(layer, x, layer.init_cache(1, LENGTH))
    with torch.no_grad():
        assert not masks(layer, x, cu_seqlens=BORDERS)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_flax(kind):
    layer = JaxAttention(LayerSpec(**SIZES | LAYERS[kind]), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    real = SEGMENTS >= 0

    @jax.jit
    def gradients(state, x):
        def loss(state, x):
            y, _ = nnx.merge(graph, state)(x, segment_ids=jnp.asarray(SEGMENTS))
            return jnp.where(real[..., None], y, 0).sum(where=real[..., None]) ** 2

        return jax.grad(loss, (0, 1))(state, x)

    clean, spoiled = (jax.tree.leaves(gradients(state, hidden(x))) for x in (0, np.nan))
    check(clean, spoiled)
    assert not spoiled[-1][:, REAL:].any()


HYBRID = MODEL | dict(select_block=16, num_local=2, attention=["nsa", "dense"])
MASK = torch.ones(1, LENGTH, dtype=torch.int64)
MASK[:, REAL:] = 0


@pytest.mark.parametrize(
    "rows",
    [dict(attention_mask=MASK), dict(attention_mask=MASK.flip(1)), dict(cu_seq_lens_q=BORDERS)],
    ids=["right", "left", "packed"],
)
@pytest.mark.parametrize("use_cache", [False, True], ids=["", "cache"])
def test_a_model_of_transformers(rows, use_cache):
    torch.manual_seed(0)
    model = NSAModel(NSAModelConfig(**HYBRID))
    mask = rows.get("attention_mask", MASK)

    def loss(x):
        x = x.flip(1) if mask[0, 0] == 0 else x
        out = model(inputs_embeds=x, use_cache=use_cache, **rows).last_hidden_state
        return out[mask > 0].square().sum()

    names = [name for name, _ in model.named_parameters()]

    def gradients(number):
        x = torch.from_numpy(hidden(number)).requires_grad_()
        given = [p for name, p in model.named_parameters() if name != "embed_tokens.weight"]
        return [g.numpy() for g in torch.autograd.grad(loss(x), [*given, x])]

    assert "embed_tokens.weight" in names
    check(gradients(0), gradients(np.nan))


@pytest.mark.parametrize("kind", ["", "grows", "pages"])
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_outputs_of_a_model_of_transformers(side, kind):
    """A row of padding alone too; on the left one whose tokens begin in a last, short chunk."""
    torch.manual_seed(0)
    model = NSAModel(NSAModelConfig(**HYBRID))
    mask = torch.cat([MASK, torch.zeros_like(MASK)])
    mask = mask.flip(1) if side == "left" else mask
    if side == "left":
        mask[1, -2:] = 1

    def outputs(number):
        x = torch.from_numpy(np.tile(hidden(0), (2, 1, 1)))
        x = (x.flip(1) if side == "left" else x).masked_fill(mask[..., None] == 0, number)
        cache = {"grows": NSAModelCache, "pages": NSAPagedModelCache}.get(kind)
        sizes = (2, LENGTH) if kind == "pages" else ()
        given = None if cache is None else cache(model.config, *sizes)
        given, found, end = {"cache": given, "use_cache": bool(kind)}, [], 0
        # The first chunk of a cache may be padding alone.
        chunks = [LENGTH - REAL, REAL - 5, 5] if kind and side == "left" else [LENGTH]
        for part in x.split(chunks, dim=1):
            end += part.shape[1]
            out = model(inputs_embeds=part, attention_mask=mask[:, :end], **given)
            found.append(out.last_hidden_state)
        return torch.cat(found, dim=1)[mask > 0]

    assert torch.equal(outputs(np.nan), outputs(0))


@pytest.mark.parametrize("kind", ["grows", "pages"])
@torch.no_grad()
def test_a_cache_of_transformers_that_was_reset(kind):
    """Of NaN before, which dense layers would multiply with behind a shorter row's tokens."""
    torch.manual_seed(0)
    model = NSAModel(NSAModelConfig(**HYBRID))
    make = {"grows": NSAModelCache, "pages": lambda x: NSAPagedModelCache(x, 2, 99)}[kind]
    x, mask = torch.randn(2, 30, 16), torch.ones(2, 22, dtype=torch.int64)
    mask[1, :15] = 0

    def outputs(cache):
        for part in (slice(0, 20), slice(20, 21), slice(21, 22)):
            yield model(
                inputs_embeds=x[:, part], attention_mask=mask[:, : part.stop], cache=cache
            ).last_hidden_state[mask[:, part] > 0]

    cache = make(model.config)
    model(inputs_embeds=torch.full_like(x, torch.nan), cache=cache)
    cache.reset()
    for want, got in zip(outputs(make(model.config)), outputs(cache), strict=True):
        assert torch.equal(got, want)


PHI = {
    "pool": lambda rng: PoolParams(rng(8, 8)),
    "mlp": lambda rng: MLPParams(rng(8, 8), rng(64, 3), rng(3), rng(3, 8), rng(8)),
    "rotated": lambda rng: RopeMLPParams(
        rng(8, 8), rng(64, 3), rng(3), rng(3, 8), rng(8), rng(4)
    ),
}


@pytest.mark.parametrize("kind", PHI)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_parameters_of_compression(framework, kind):
    """Of packed rows: padding behind the sequences, before them, and alone."""
    rng = np.random.default_rng(0)
    params = PHI[kind](lambda *shape: rng.standard_normal(shape).astype(np.float32))
    rows = np.concatenate([SEGMENTS, SEGMENTS[:, ::-1], np.full_like(SEGMENTS, -1)])
    found = []
    for number in (0, np.nan):
        x = np.random.default_rng(1).standard_normal((3, LENGTH, 2, 8)).astype(np.float32)
        x[rows < 0] = number
        if framework == "torch":  # whose padding stands behind
            leaves = [torch.from_numpy(p).requires_grad_() for p in params]
            own = type(params)(*leaves)
            parts = (
                nsa_torch.compress(torch.from_numpy(row[None]), own, config=SMALL, cu_seqlens=x)
                for row, x in ((x[0], BORDERS), (x[2], 0 * BORDERS))
            )
            loss = sum(y.square().sum() for y in parts)
            found.append([g.numpy() for g in torch.autograd.grad(loss, leaves)])
        else:

            def loss(params, x=x):
                y = nsa_jax.compress(x, params, config=SMALL, segment_ids=jnp.asarray(rows))
                return (y**2).sum()

            found.append(jax.tree.leaves(jax.jit(jax.grad(loss))(params)))
    check(*found)

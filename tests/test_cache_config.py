"""A cache holds what one configuration makes: with another it is refused, never read wrongly."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.autograd import forward_ad
from torch.utils import checkpoint

import nsa_jax
import nsa_jax.paged
import nsa_torch
from nsa_core import rotation
from nsa_core.compress_params import MLPParams, PoolParams
from nsa_core.layer import LayerSpec
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_torch import NSAAttention as TorchAttention
from nsa_torch import functional
from nsa_torch.cache import crop
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelCache,
    NSAModelConfig,
    NSAPagedModelCache,
)
from nsa_torch.huggingface.paged_layer import attend_pages
from tests.devices import needs_gpu
from tests.inputs import SMALL, Case, problem

CASE = Case(63, 63, H=6, Hkv=2, D=8, Dv=5)
FRAMEWORKS = pytest.mark.parametrize(
    "api, array",
    [(nsa_jax, jnp.asarray), (nsa_torch, torch.tensor)],
    ids=["jax", "torch"],
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
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


STORED = [
    dict(rope_base=5e5),
    dict(rope_scale=2.0),
    dict(rope_scaling=YARN),
    dict(qk_norm_eps=1e-6),
    dict(bias=True),
    dict(phi="mlp"),
    dict(phi="mlp_pe"),
    dict(phi="mlp_rope"),
]


def layer_of(framework, **changed):
    if framework == "torch":
        return TorchAttention(**(LAYER | changed))
    return JaxAttention(LayerSpec(**(LAYER | changed)), rngs=nnx.Rngs(0))


@torch.no_grad()
@pytest.mark.parametrize("made_by", ["layer", "function"])
@pytest.mark.parametrize("changed", [*STORED, dict(kv="shared")], ids=str)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_cache_that_another_layer_filled_is_refused(framework, changed, made_by):
    """Nothing is lost: the one that filled it goes on."""
    mine, theirs = layer_of(framework), layer_of(framework, **changed)
    api = nsa_torch if framework == "torch" else nsa_jax
    x = torch.zeros(1, 9, 24) if framework == "torch" else jnp.zeros((1, 9, 24))
    cache = mine.init_cache(1, 20)
    if made_by == "function":
        cache = api.init_cache(1, 20, 2, 8, 6, config=mine.spec.config, separate=True)
    _, cache = mine(x, cache)
    ((name, value),) = changed.items()
    value = rotation.scaling(value) if name == "rope_scaling" else value
    message = (
        f"cache must be made with {name}={value!r}, got one with {getattr(mine.spec, name)!r}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        theirs(x, cache)
    _, cache = mine(x, cache)
    assert cache.length.tolist() == [18]
    again = cache.reset()  # torch's forgets in place
    _, again = theirs(x, cache if again is None else again)
    assert again.length.tolist() == [9]


@torch.no_grad()
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_what_a_cache_does_not_hold_may_differ(framework):
    """Queries, gates, the window; who rotates by hand says nothing of a rotation."""
    filler = layer_of(framework)
    x = torch.zeros(1, 9, 24) if framework == "torch" else jnp.zeros((1, 9, 24))
    _, cache = filler(x, filler.init_cache(1, 40))
    for changed in (dict(gate="softmax", gate_temp=2.0), dict(w=12, n_heads=4)):
        _, cache = layer_of(framework, **changed)(x[:, :1], cache)
    position = cache.length[:, None]
    api = nsa_torch if framework == "torch" else nsa_jax
    _, cache = api.cached_attention(*filler.project(x[:, :1], position), cache)
    assert cache.length.tolist() == [12]


PARAMS = {
    "avg": lambda array: None,
    "mlp": lambda array: PoolParams(array(np.ones((8, 8), np.float32))),
    "mlp_pe": lambda array: MLPParams(
        *(array(np.ones(x, np.float32)) for x in ((8, 8), (64, 2), (2,), (2, 8), (8,)))
    ),
}
KINDS = [("avg", "mlp"), ("mlp", "avg"), ("mlp_pe", "mlp")]


def attends(api, array, traced=False):
    """A step of some tokens with these compress_params."""
    jitted = jax.jit(nsa_jax.cached_attention, static_argnames="config")

    def step(cache, *params, tokens=9):
        new = [array(np.ones((1, tokens, 1, n), np.float32)) for n in (8, 8, 8, 3)]
        function = jitted if traced else api.cached_attention
        return function(*new, cache, config=SMALL, compress_params=params)

    return step


@FRAMEWORKS
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_compress_params_of_another_kind_are_refused(api, array, kinds, side):
    first, then = ([PARAMS["avg"](array)] * 2 for _ in kinds)
    first[side], then[side] = (PARAMS[kind](array) for kind in kinds)
    step = attends(api, array)
    cache = api.init_cache(1, 40, 1, 8, 8, config=SMALL)
    _, cache = step(cache, *first)
    name = f"phi_{'kv'[side]}"
    message = f"cache must be made with {name}='{kinds[1]}', got one with '{kinds[0]}'"
    with pytest.raises(ValueError, match=message):
        step(cache, *then)
    again, cache = step(cache, *first)
    assert cache.length.tolist() == [18] and np.isfinite(np.asarray(again)).all()
    empty = cache.reset()
    again, _ = step(cache if empty is None else empty, *then)
    assert np.isfinite(np.asarray(again)).all()


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_compress_params_of_another_kind_under_jit(kinds):
    """An error as the program is traced; NaN where only the device knows whether there were
    tokens before, which were averaged.
    """
    step = attends(nsa_jax, jnp.asarray, traced=True)
    first, then = ([PARAMS[kind](jnp.asarray)] * 2 for kind in kinds)
    cache = nsa_jax.init_cache(1, 40, 1, 8, 8, config=SMALL)
    out, cache = step(cache, *first)
    assert np.isfinite(np.asarray(out)).all()
    if kinds[0] == "avg":
        assert np.isnan(np.asarray(step(cache, *then)[0])).all()
        return
    with pytest.raises(ValueError, match=f"phi_k='{kinds[1]}', got one with '{kinds[0]}'"):
        step(cache, *then)


def test_a_scan_begins_with_an_empty_cache():
    """Of a layer, and of functions that compress by means: the carry keeps its structure."""
    token = jnp.ones((5, 1, 1, 24))
    layer = layer_of("jax", phi="mlp")
    _, cache = jax.lax.scan(lambda kv, x: layer(x, kv)[::-1], layer.init_cache(1, 9), token)[
        ::-1
    ]
    new = [jnp.ones((1, 1, 1, n)) for n in (8, 8, 8, 3)]
    plain = lambda cache, _: nsa_jax.cached_attention(*new, cache)[::-1]
    cache, outs = jax.lax.scan(
        plain, nsa_jax.init_cache(1, 40, 1, 8, 8, config=SMALL), None, length=12
    )
    assert cache.length.tolist() == [12] and np.isfinite(np.asarray(outs)).all()


def pages_of(api, array):
    return api.PagedCache(4, 1, 8, 8, config=SMALL, dtype=array(np.float32(0)).dtype)


def appends(api, array, traced=False):
    jitted = jax.jit(nsa_jax.append)

    def step(cache, *params, end=9):
        """9 tokens more, `end` in all."""
        new = [array(np.ones((9, 1, 8), np.float32)) for _ in "kv"]
        table, lengths = array(np.arange(4, dtype=np.int32)[None]), array(np.int32([end]))
        function = jitted if traced else api.append
        found = function(cache, *new, table, lengths, params=params)
        return cache if found is None else found

    return step


@FRAMEWORKS
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_pages_with_params_of_another_kind_are_refused(api, array, kinds):
    step = appends(api, array)
    first, then = ([PARAMS[kind](array)] * 2 for kind in kinds)
    cache = step(pages_of(api, array), *first)
    message = f"cache must be made with phi_k='{kinds[1]}', got one with '{kinds[0]}'"
    with pytest.raises(ValueError, match=message):
        step(cache, *then, end=18)
    cache = step(cache, *first, end=18)
    empty = cache.reset()
    step(cache if empty is None else empty, *then)


def test_pages_with_params_of_another_kind_under_jit():
    step = appends(nsa_jax, jnp.asarray, traced=True)
    first, then = ([PARAMS[kind](jnp.asarray)] * 2 for kind in ("avg", "mlp"))
    cache = step(pages_of(nsa_jax, jnp.asarray), *first)
    assert jax.tree.structure(cache) == jax.tree.structure(pages_of(nsa_jax, jnp.asarray))
    mixed = step(cache, *then, end=18)
    assert np.isnan(np.asarray(mixed.compressed_key)).any()
    cache = step(pages_of(nsa_jax, jnp.asarray), *then)
    with pytest.raises(ValueError, match="phi_k='avg', got one with 'mlp'"):
        step(cache, *first, end=18)


@torch.no_grad()
@pytest.mark.parametrize("changed", [dict(d=2), *STORED], ids=str)
def test_pages_of_another_layer_are_refused(changed):
    mine, theirs = TorchAttention(**LAYER), TorchAttention(**(LAYER | changed))
    pages = nsa_torch.PagedCache(
        2, 2, 8, 6, config=theirs.spec.config, dtype=torch.float32, separate=True
    )
    table = torch.zeros(1, 1, dtype=torch.int32)
    x, position = torch.zeros(1, 1, 24), torch.zeros(1, 1)

    def attend(layer, length):
        lengths = torch.full((1,), length, dtype=torch.int32)
        attend_pages(layer, x, position + length - 1, pages, table, lengths, None, 1)

    attend(theirs, 1)
    with pytest.raises(ValueError, match=r"made with|config must be the cache's"):
        attend(mine, 2)
    attend(theirs, 2)
    pages.reset()
    if "d" not in changed:
        attend(mine, 1)


@FRAMEWORKS
def test_a_paged_cache_of_another_config_is_refused(api, array):
    """Every field: attention from pages takes all of them from the cache."""
    cache = api.PagedCache(2, 1, 8, 8, config=SMALL, dtype=array(np.float32(0)).dtype)
    arrays = [array(np.zeros(shape, np.float32)) for shape in ((1, 2, 8), (1, 2, 3))]
    table, lengths = array(np.zeros((1, 1), np.int32)), array(np.ones(1, np.int32))
    for field in dataclasses.fields(SMALL):
        value = {"compress_block": 4, "compress_stride": 8, "select_block": 32}.get(field.name)
        if field.name == "compute_dtype":
            value = "float8_e4m3"
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


def test_a_step_that_is_refused_appends_nothing():
    """torch writes in place: who catches the error may try again."""
    p = problem(CASE)
    p = [torch.tensor(np.asarray(x)) for x in (p.query, p.key, p.value, p.gates)]
    empty = lambda: nsa_torch.init_cache(2, 63, 2, 8, 5, config=SMALL)
    run = lambda part, cache, **options: nsa_torch.cached_attention(
        *(x[:, part] for x in p), cache, **options
    )
    (_, cache), (_, other) = (run(slice(0, 30), empty()) for _ in range(2))
    with pytest.raises(NotImplementedError, match="mosaic"):
        run(slice(30, 63), cache, implementation="mosaic")
    for bad in ([34, 3], [-1, 3]):
        with pytest.raises(ValueError, match=r"new_lengths must be in 0\.\.33, got "):
            run(slice(30, 63), cache, new_lengths=torch.tensor(bad))
    assert cache.longest == 30
    wanted, _ = run(slice(30, 63), other)
    assert torch.equal(run(slice(30, 63), cache)[0], wanted)


@pytest.mark.parametrize("new_lengths", [None, torch.tensor([33, 20])], ids=["all", "some"])
def test_a_step_that_failed_appends_nothing(new_lengths, monkeypatch):
    """As where memory ended: the cache is as it was."""
    p = problem(CASE)
    p = [torch.tensor(np.asarray(x)) for x in (p.query, p.key, p.value, p.gates)]
    run = lambda part, cache, **options: nsa_torch.cached_attention(
        *(x[:, part] for x in p), cache, **options
    )
    caches = [nsa_torch.init_cache(2, 63, 2, 8, 5, config=SMALL) for _ in range(2)]
    for cache in caches:
        run(slice(0, 30), cache)
        cache.record()

    def fails(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(functional, "attend", fails)
        run(slice(30, 63), caches[0], new_lengths=new_lengths)
    assert caches[0].longest == 30 and caches[0].length.tolist() == [30, 30]
    (found, other) = (run(slice(30, 63), x, new_lengths=new_lengths)[0] for x in caches)
    assert torch.equal(found, other)
    for name in (field.name for field in dataclasses.fields(caches[0])):
        one, two = (getattr(cache, name) for cache in caches)
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def steps_of(kind):
    """`step(part, cache)` of 40 tokens, an empty cache, its length, and what all tokens give."""
    if kind == "model":
        model = NSAForCausalLM(NSAModelConfig(**MODEL, attention=["nsa", "dense"])).eval()
        ids = torch.arange(40)[None] % 32
        step = lambda part, cache: model(ids[:, part], past_key_values=cache).logits
        return step, NSAModelCache(model.config, 80), lambda x: x.get_seq_length(), step
    layer, x = TorchAttention(**LAYER), torch.randn(1, 40, 24)
    if kind == "layer":
        step = lambda part, cache: layer(x[:, part], cache, prefill=cache.longest == 0)[0]
        whole = lambda *_: layer(x)[0]
    else:
        given = layer.project(x, torch.arange(40)[None])
        given = [x if isinstance(x, torch.Tensor) else [*x] for x in given]
        cut = lambda x, part: (
            x[:, part]
            if isinstance(x, torch.Tensor)
            else nsa_torch.Branches(*[y[:, part] for y in x])
        )
        step = lambda part, cache: nsa_torch.cached_attention(
            *(cut(x, part) for x in given), cache
        )[0]
        whole = lambda *_: nsa_torch.attention(
            *(cut(x, slice(None)) for x in given), config=layer.spec.config
        )
    return step, layer.init_cache(1, 80), lambda x: x.length.tolist()[0], whole


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no grad"])
@pytest.mark.parametrize("kind", ["functions", "layer", "model"])
def test_a_call_appends_to_the_cache_that_it_is_given(kind, mode):
    """Whether gradients are recorded or not, and whoever binds what comes back."""
    step, cache, length, whole = steps_of(kind)
    with mode():
        first = step(slice(0, 25), cache)
        assert length(cache) == 25
        last = step(slice(25, 40), cache)
        assert length(cache) == 40
        wanted = whole(slice(None), NSAModelCache(cache.config) if kind == "model" else None)
        torch.testing.assert_close(torch.cat([first, last], 1), wanted, rtol=0, atol=1e-5)
        step(slice(25, 40), cache)  # once more: 15 tokens more
    assert length(cache) == 55


@pytest.mark.parametrize("kind", ["functions", "layer", "model"])
def test_a_step_without_gradients_leaves_what_a_graph_keeps(kind):
    step, cache, *_ = steps_of(kind)
    first = step(slice(0, 25), cache)
    with torch.no_grad():
        if kind == "model":
            cache.reorder_cache(torch.tensor([0]))
        step(slice(25, 40), cache)
        cache.reset()
    first.square().sum().backward()


def test_a_checkpoint_that_computes_anew_appends_to_a_copy():
    """A second time to the same cache would be other tokens: an error, in place of gradients."""
    layer, x = TorchAttention(**LAYER), torch.randn(1, 40, 24)
    cache, weight = layer.init_cache(1, 40), layer.W_K_cmp.weight
    _, cache = layer(x[:, :25], cache)
    kept = cache.clone()
    run = functools.partial(checkpoint.checkpoint, use_reentrant=False)
    out = run(lambda x: layer(x, kept.clone())[0], x[:, 25:])
    found = torch.autograd.grad(out.square().sum(), weight, retain_graph=True)
    wanted = torch.autograd.grad(layer(x)[0][:, 25:].square().sum(), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    out = run(lambda x: layer(x, cache)[0], x[:, 25:])
    with pytest.raises(ValueError, match="the cache already has these tokens"):
        out.sum().backward()


@pytest.mark.gpu
@needs_gpu
@torch.no_grad()
def test_a_cache_of_rows_is_no_part_of_a_graph():
    """Whose replays would write to the place that it was captured with."""
    layer, x = TorchAttention(**LAYER, device="cuda"), torch.randn(1, 40, 24, device="cuda")
    cache = layer.init_cache(1, 80)
    layer(x, cache)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(NotImplementedError, match="a CUDA graph must not append"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        layer(x, cache)
    assert cache.longest == 40
    want, _ = layer(x, cache.clone())
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        found, _ = layer(x, cache.clone())
    graph.replay()
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert cache.longest == 40


@pytest.mark.parametrize("phi", ["mlp", "mlp_rope"])
def test_a_cache_is_copied_where_phi_alone_learns(phi):
    """Steps after it write over what the backward pass needs, else."""
    layer = TorchAttention(**LAYER, phi=phi).requires_grad_(False)
    learned = [x.requires_grad_() for name, x in layer.named_parameters() if "phi" in name]
    x = torch.randn(1, 40, 24)
    empty = cache = layer.init_cache(1, 40)
    steps = []
    for part in (slice(0, 25), slice(25, 40)):
        y, cache = layer(x[:, part], cache)
        steps.append(y)
    found = torch.autograd.grad(torch.cat(steps, 1).square().sum(), learned)
    wanted = torch.autograd.grad(layer(x)[0].square().sum(), learned)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert cache is empty


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_forward_mode_derivatives_of_caches_are_refused():
    """Pages pass none on, and a cache has no token of a step that is refused."""
    draw = lambda *shape: torch.randn(*shape)
    table, lengths = torch.tensor([[0, 1]]).int(), torch.tensor([20]).int()
    pages = nsa_torch.PagedCache(2, 2, 8, 8, config=SMALL, dtype=torch.float32)
    cache = nsa_torch.init_cache(1, 30, 2, 8, 8, config=SMALL)
    of_branches = draw(20, 2, 8)
    with forward_ad.dual_level():
        query = forward_ad.make_dual(draw(20, 4, 8), draw(20, 4, 8))
        key = forward_ad.make_dual(draw(20, 2, 8), draw(20, 2, 8))
        gates, lists = draw(20, 4, 3), torch.zeros(20, 1, 1).int()
        for call in (
            lambda: nsa_torch.append(pages, key, of_branches, table, lengths),
            lambda: nsa_torch.paged_attention(query, gates, pages, table, lengths),
            lambda: nsa_torch.paged_block_attention(
                query, *[pages.selected_key] * 2, table, lengths, lists, block_size=16
            ),
            lambda: nsa_torch.cached_attention(
                *(x[None] for x in (query, of_branches, of_branches, gates)), cache
            ),
        ):
            with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
                call()
        assert cache.longest == 0
        assert forward_ad.unpack_dual(pages.selected_key).tangent is None


@FRAMEWORKS
@pytest.mark.parametrize("rows, lengths", [(1, "[0]"), (9, "[0, 0, 0, 0, 0, 0, ...]")])
def test_a_cache_is_shown_in_one_line(api, array, rows, lengths):
    cache = api.init_cache(rows, 70, 1, 8, 4, config=SMALL)
    dtype = "torch.float32" if api is nsa_torch else "float32"
    assert repr(cache) == (
        f"NSACache(selected_key=({rows}, 70, 1, 8), selected_value=({rows}, 70, 1, 4), "
        f"separate=False, dtype={dtype}, lengths={lengths})"
    )
    pages = api.PagedCache(3, 1, 8, 4, config=SMALL, separate=True)
    dtype = dtype.replace("float32", "bfloat16")
    assert repr(pages) == (
        "PagedCache(selected_key=(3, 16, 1, 8), selected_value=(3, 16, 1, 4), separate=True, "
        f"dtype={dtype})"
    )


@torch.no_grad()
def test_caches_that_hold_no_numbers_are_shown():
    model = NSAForCausalLM(NSAModelConfig(**MODEL, attention=["nsa", "dense"])).eval()
    caches = NSAModelCache(model.config), NSAPagedModelCache(NSAModelConfig(**MODEL), 1, 20)
    model(torch.ones(1, 3, dtype=torch.long), past_key_values=caches[0])
    states = [each.state for each in caches[0].layers]
    assert repr(states[1]) == (
        "DenseCache(key=(1, 64, 1, 8), value=(1, 64, 1, 8), dtype=torch.float32, lengths=[3])"
    )
    seen = []
    cache = nsa_jax.init_cache(1, 9, 1, 8, 8, config=SMALL)
    jax.eval_shape(lambda cache: seen.append(repr(cache)), cache)
    axes = jax.tree.map(lambda _: 0, cache)
    meta = nsa_torch.init_cache(1, 9, 1, 8, 8, config=SMALL, device="meta")
    shown = [*seen, *map(repr, (*caches, *states, axes, meta))]
    assert all(x.count("\n") < 2 and len(x) < 300 for x in shown)


@pytest.mark.parametrize("separate", [False, True])
def test_a_cache_of_jax_that_was_reset_holds_no_nan(separate):
    cache = nsa_jax.init_cache(1, 40, 1, 8, 8, config=SMALL, separate=separate)
    x = jnp.full((1, 30, 1, 8), jnp.nan)
    tokens = nsa_jax.Branches.each(x) if separate else x
    query, gates = jnp.ones((1, 30, 2, 8)), jnp.ones((1, 30, 2, 3))
    out, cache = nsa_jax.cached_attention(query, tokens, tokens, gates, cache)
    assert jnp.isnan(out).any()
    fresh = cache.reset()
    assert all((x == 0).all() for x in jax.tree.leaves(fresh)) and fresh.config == SMALL


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("wanted", [False, True], ids=["in place", "in a graph"])
def test_a_cache_that_was_reset_holds_no_nan(wanted, separate):
    """Kernels multiply whole tiles, of which the next tokens may fill a part."""
    cache = nsa_torch.init_cache(1, 40, 1, 8, 8, config=SMALL, separate=separate)
    cache.record()
    before = cache.selected_key.data_ptr()
    x = torch.full((1, 30, 1, 8), torch.nan, requires_grad=wanted)
    tokens = nsa_torch.Branches.each(x) if separate else x
    query, gates = torch.ones(1, 30, 2, 8), torch.ones(1, 30, 2, 3)
    out, cache = nsa_torch.cached_attention(query, tokens, tokens, gates, cache)
    assert out.isnan().any()
    cache.reset()
    assert all(
        bool((x == 0).all()) for x in vars(cache).values() if isinstance(x, torch.Tensor)
    )
    if wanted:
        torch.autograd.grad(out.sum(), x)  # what the graph holds is as it was
    else:
        assert cache.selected_key.data_ptr() == before


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("wanted", [False, True], ids=["in place", "in a graph"])
def test_tokens_that_were_taken_back_leave_no_nan(wanted, separate):
    """Rows of different lengths, whose compressed tokens end at other tokens."""
    cache = nsa_torch.init_cache(2, 40, 1, 8, 8, config=SMALL, separate=separate)
    query, gates = torch.ones(2, 21, 2, 8), torch.ones(2, 21, 2, 3)
    tokens = torch.ones(2, 21, 1, 8, requires_grad=wanted)
    given = nsa_torch.Branches.each(tokens) if separate else tokens
    lengths = torch.tensor([21, 14])
    first, cache = nsa_torch.cached_attention(
        query, given, given, gates, cache, new_lengths=lengths
    )
    cache.record()
    clean = cache.clone()
    count, before = 9, cache.selected_key.data_ptr()
    x = torch.full((2, count, 1, 8), torch.nan)
    given = nsa_torch.Branches.each(x) if separate else x
    out, cache = nsa_torch.cached_attention(
        query[:, :count], given, given, gates[:, :count], cache
    )
    assert out.isnan().any()
    crop(cache, count)
    names = [
        f"{x}_{y}" for x in ("selected", "sliding", "compressed") for y in ("key", "value")
    ]
    for name in names:
        x, y = getattr(cache, name), getattr(clean, name)
        for row, length in enumerate(() if x is None else (21, 14)):
            used = SMALL.num_compressed(length) if "compressed" in name else length
            assert torch.equal(x[row, :used], y[row, :used]) and x.isfinite().all(), name
    if wanted:
        torch.autograd.grad(first.sum(), tokens)  # what the graph holds is as it was
    else:
        assert cache.selected_key.data_ptr() == before

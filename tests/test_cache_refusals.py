"""A cache holds what one configuration makes: with another it is refused, never read wrongly.

A call that is refused, or that fails, leaves the cache as it was.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import checkpoint

import nsa_jax
import nsa_torch
from nsa_torch import paged_attend, plan_runs
from nsa_torch.cache import crop
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelCache,
    NSAModelConfig,
    NSAPagedModelCache,
)
from tests import pretend
from tests.caches import (
    SMALL,
    TABLE,
    Sizes,
    TorchPages,
    bounds,
    by_separate,
    check,
    of_counts,
    phi,
)
from tests.devices import on_hopper
from tests.model_sizes import SMALLEST as MODEL
from tests.refusals import given, refused
from tests.test_layers import in_jax, in_torch
from tests.test_refusals import WORLDS

FRAMEWORKS = {"jax": (nsa_jax, jnp.asarray), "torch": (nsa_torch, torch.tensor)}
by_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
EXPLAIN = {"jax": nsa_jax.paged.explain, "torch": paged_attend.explain}
LAYERS = {"jax": in_jax, "torch": in_torch}


class Used:
    """A cache of rows, or in `pages`, and steps of 9 tokens on it by functions. A step may say
    something else than `config` and `kinds`.
    """

    def __init__(self, framework, pages=False, traced=False, **mine):
        self.mine = {"config": SMALL, "kinds": ("avg", "avg")} | mine
        self.api, self.array = FRAMEWORKS[framework]
        self.framework, self.pages, self.end = framework, pages, 0
        self.call = self.api.append if pages else self.api.cached_attention
        if traced and framework == "jax":
            self.call = jax.jit(self.call, static_argnames=None if pages else "config")
        options = {"config": self.mine["config"], "dtype": self.ones(1).dtype}
        make, sizes = (self.api.PagedCache, [4]) if pages else (self.api.init_cache, [1, 40])
        self.cache = make(*sizes, 1, 8, 8, **options)

    def ones(self, *shape):
        return self.array(np.ones(shape, np.float32))

    def step(self, **said):
        said, end = self.mine | said, self.end + 9
        params = jax.tree.map(self.array, tuple(phi(kind, 8) for kind in said["kinds"]))
        if self.pages:
            new = [self.ones(9, 1, 8) for _ in "kv"]
            at = self.array(np.arange(4, dtype=np.int32)[None]), self.array(np.int32([end]))
            found = self.call(self.cache, *new, *at, params=params)
            self.cache = self.cache if found is None else found  # torch's appends in place
            out = self.cache.compressed_key[0, 1]
        else:
            new = [self.ones(1, 9, 1, width) for width in (8, 8, 8, 3)]
            options = {"config": said["config"], "compress_params": params}
            out, self.cache = self.call(*new, self.cache, **options)
        self.end = end
        return out

    def reset(self):
        self.cache, self.end = self.cache.reset() or self.cache, 0


class OfLayer(Used):
    """The same of a layer, on its own cache."""

    def __init__(self, framework, **changed):
        super().__init__(framework)
        self.mine, self.cache = changed, LAYERS[framework](**changed).init_cache(1, 40)

    @torch.no_grad()
    def step(self, tokens=9, **changed):
        layer = LAYERS[self.framework](**(self.mine | changed))
        out, self.cache = layer(self.ones(1, tokens, 24) * 0, self.cache)
        self.end += tokens
        return out


REFUSED = TABLE["refused"]


USERS = {"rows": Used, "pages": functools.partial(Used, pages=True), "layer": OfLayer}


@pytest.mark.parametrize("row", REFUSED["makers"], ids=lambda row: row["says"][:40])
@by_framework
def test_a_cache_of_another_maker_is_refused(framework, row):
    """Nothing is lost: the one that filled it goes on, and an empty one is anybody's, but that of
    another configuration.
    """
    made, other = (given(row.get(x, {}), framework) for x in ("made", "other"))
    used = USERS[row["of"]](framework, **made)
    said = f"cache must be made with {row['says']}"
    if row["of config"]:
        with refused(said):
            used.step(**other)
    used.step()
    with refused(said):
        used.step(**other)
    assert np.isfinite(np.asarray(used.step())).all()
    if not row["of config"] and (framework == "torch" or type(used) is Used):
        used.reset()
        assert np.isfinite(np.asarray(used.step(**other))).all()


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_params_of_another_kind_where_lengths_are_traced(pages):
    """NaN where the device alone knows whether there were tokens before, which were averaged."""
    used = Used("jax", pages, traced=True)
    used.step()
    out = used.step(kinds=("mlp", "mlp"))
    assert np.isnan(np.asarray(used.cache.compressed_key if pages else out)).any()


@by_framework
def test_what_a_cache_does_not_hold_may_differ(framework):
    """Queries, gates, the window; who rotates by hand says nothing of a rotation."""
    used = OfLayer(framework)
    used.step()
    for changed in (dict(gate="softmax", gate_temp=2.0), dict(w=12, n_heads=4)):
        used.step(tokens=1, **changed)
    layer, position = LAYERS[framework](), used.cache.length[:, None]
    with torch.no_grad():
        given = layer.project(used.ones(1, 1, 24), position)
        _, cache = used.api.cached_attention(*given, used.cache)
    assert cache.length.tolist() == [12]


def model_cache(paged, **changed):
    config = NSAModelConfig(**(MODEL | changed))
    return NSAPagedModelCache(config, 1, 20) if paged else NSAModelCache(config)


@torch.no_grad()
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_a_cache_of_another_model_is_refused(paged):
    model, ids = NSAForCausalLM(NSAModelConfig(**MODEL)).eval(), torch.ones(1, 3).long()
    renamed = dict.fromkeys(("attention", "num_hidden_layers"), "layer_attention")
    for changed in REFUSED["models"]:
        (name,) = changed
        said = f"cache must be made for a model with {renamed.get(name, name)}="
        with refused(said):
            model(ids, past_key_values=model_cache(paged, **changed))
    model(
        ids, past_key_values=model_cache(paged, gate="softmax")
    )  # of the gate it holds nothing


# Arguments.


@pytest.mark.parametrize("name", ["mosaic", "triton"])
@by_framework
def test_a_name_is_that_of_kernels_on_pages_where_rows_have_few_queries(framework, name):
    """A layer has one name, for prompts and for steps: prompts run by it on gathered pages."""
    world, explain = WORLDS[framework], EXPLAIN[framework]
    assert explain(**world.arguments("paged_attention")).implementation == "gathered"
    for count, starts in REFUSED["queries"]:
        changed = {"query": f"zeros {2 * count}x4x8", "gates": f"zeros {2 * count}x4x3"}
        changed |= {"lengths": "ints 12 9", "cu_seqlens_q": starts}
        given = world.arguments("paged_attention") | world.given(changed)
        call = functools.partial(explain, **given, implementation=name)
        if count <= 8:
            with refused(f"decode: {name}: needs a", NotImplementedError):
                call()
        else:
            assert call().implementation == "gathered"


@pytest.mark.parametrize("begin, counts, planned, says", REFUSED["runs"])
def test_runs_of_another_call_are_refused(begin, counts, planned, says):
    """Before a token is appended; more rows or tokens than there are, too."""
    path, starts = TorchPages(Sizes()), bounds([1, 1, 0, 61, 20]).tolist()
    runs = plan_runs(starts, planned, 16)
    path.step = functools.partial(path.attend, new=True, runs=runs)
    with refused(says):
        check(path, of_counts(counts, begin=begin))
    assert all(x.isnan().all() for x in path.cache.tensors().values())


# A cache is as it was.


def held(cache):
    """What a cache of rows holds in torch."""
    return [cache.length, *cache.pages.tensors().values()]


@pytest.mark.parametrize("options", [{}, {"new_lengths": torch.tensor([33, 20])}], ids=str)
def test_a_step_that_fails_appends_nothing(options, monkeypatch):
    """As where memory ended; torch writes in place: who catches it may try again."""
    given = [torch.randn(2, 63, *x) for x in REFUSED["tokens"]]

    def run(part, cache, **options):
        return nsa_torch.cached_attention(*(x[:, part] for x in given), cache, **options)[0]

    caches = [nsa_torch.init_cache(2, 63, 2, 8, 5, config=SMALL) for _ in range(2)]
    for cache in caches:
        run(slice(0, 30), cache)

    def fails(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        pretend.machine(patch, attend=fails)
        run(slice(30, 63), caches[0], **options)
    assert caches[0].longest == 30 and caches[0].length.tolist() == [30, 30]
    assert torch.equal(*(run(slice(30, 63), cache, **options) for cache in caches))
    assert len({(cache.longest, cache.contents) for cache in caches}) == 1
    for one, two in zip(*map(held, caches), strict=True):
        assert torch.equal(one, two)


def steps_of(kind):
    """`step(part, cache)` of 40 tokens, an empty cache, its length, and what all tokens give."""
    if kind == "model":
        model = NSAForCausalLM(NSAModelConfig(**MODEL, attention=["nsa", "dense"])).eval()
        ids = torch.arange(40)[None] % 32
        step = lambda part, cache: model(ids[:, part], past_key_values=cache).logits
        whole = lambda: step(slice(None), None)
        return step, NSAModelCache(model.config), lambda x: x.get_seq_length(), whole
    layer, x = in_torch(), torch.randn(1, 40, 24)
    step = lambda part, cache: layer(x[:, part], cache, prefill=cache.longest == 0)[0]
    whole = lambda: layer(x)[0]
    return step, layer.init_cache(1, 80), lambda x: x.length.tolist()[0], whole


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no grad"])
@pytest.mark.parametrize("kind", ["layer", "model"])
def test_a_call_appends_to_the_cache_that_it_is_given(kind, mode):
    """Whether gradients are recorded or not, and whoever binds what comes back; a step without
    gradients leaves what a graph keeps.
    """
    step, cache, length, whole = steps_of(kind)
    with mode():
        first = step(slice(0, 25), cache)
        assert length(cache) == 25
    with torch.no_grad():
        if kind == "model":
            cache.reorder_cache(torch.tensor([0]))
        last = step(slice(25, 40), cache)
        assert length(cache) == 40
        found = torch.cat([first, last], 1)
        torch.testing.assert_close(found, whole(), rtol=0, atol=1e-5)
        step(slice(25, 40), cache)  # once more: 15 tokens more
        assert length(cache) == 55
        cache.reset()
    if first.requires_grad:
        first.square().sum().backward()


def same_gradients(found, wanted, weights):
    """Of two outputs, whose graphs stay."""
    gradients = lambda x: torch.autograd.grad(x.square().sum(), weights, retain_graph=True)
    torch.testing.assert_close(gradients(found), gradients(wanted), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_computes_anew_appends_to_a_copy():
    """A second time to the same cache would be other tokens: an error, in place of gradients."""
    layer, x = in_torch(), torch.randn(1, 40, 24)
    cache, weight = layer.init_cache(1, 40), layer.W_K_cmp.weight
    _, cache = layer(x[:, :25], cache)
    kept = cache.clone()
    run = functools.partial(checkpoint.checkpoint, use_reentrant=False)
    out = run(lambda x: layer(x, kept.clone())[0], x[:, 25:])
    same_gradients(out, layer(x)[0][:, 25:], weight)
    out = run(lambda x: layer(x, cache)[0], x[:, 25:])
    with refused("cache already has these tokens"):
        out.sum().backward()


@on_hopper
@torch.no_grad()
def test_a_cache_of_rows_is_no_part_of_a_graph():
    """Whose replays would write to the place that it was captured with."""
    layer, x = in_torch(device="cuda"), torch.randn(1, 40, 24, device="cuda")
    cache = layer.init_cache(1, 80)
    layer(x, cache)
    graph = torch.cuda.CUDAGraph()
    with (
        refused("must not be used in a CUDA graph", NotImplementedError),
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
    layer = in_torch(phi=phi).requires_grad_(False)
    learned = [x.requires_grad_() for name, x in layer.named_parameters() if "phi" in name]
    x, cache = torch.randn(1, 40, 24), layer.init_cache(1, 40)
    steps = [layer(x[:, part], cache)[0] for part in (slice(0, 25), slice(25, 40))]
    same_gradients(torch.cat(steps, 1), layer(x)[0], learned)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_forward_mode_derivatives_of_caches_are_refused():
    """Pages pass none on, and a cache has no token of a step that is refused."""
    world = WORLDS["torch"]
    cache, paged = world.rows(), world.pages()
    with forward_ad.dual_level():
        for name, wanted, given in (
            ("append", "key", {"cache": paged}),
            ("paged_attention", "query", {}),
            ("paged_block_attention", "query", {}),
            ("cached_attention", "query", {"cache": cache}),
        ):
            given = world.arguments(name) | given
            given[wanted] = forward_ad.make_dual(given[wanted], given[wanted])
            with refused("no forward-mode derivatives", NotImplementedError):
                world.function(name)(**given)
        assert cache.longest == 0
        assert forward_ad.unpack_dual(paged.selected_key).tangent is None


# A dense cache of JAX that is full.


def test_a_full_cache_is_an_error_or_nan():
    """Under jit, too, where its length is known; where it is not, NaN."""
    arrays = [jnp.ones((2, 63, *x)) for x in REFUSED["tokens"]]
    step = functools.partial(nsa_jax.cached_attention, config=SMALL)
    for begin in (0, 40):
        cache = nsa_jax.init_cache(2, 62, 2, 8, 5, config=SMALL)
        cache = cache._replace(length=jnp.array([0, begin], jnp.int32))
        closed = lambda *new, cache=cache: step(*new, cache)
        with refused("capacity for 63 tokens, got 62"):
            jax.eval_shape(closed, *(x[:, begin:] for x in arrays))
    cache, step = nsa_jax.init_cache(2, 62, 2, 8, 5, config=SMALL), jax.jit(step)
    for part, full in ((slice(0, 31), False), (slice(31, 62), False), (slice(32, 63), True)):
        out, cache = step(*(x[:, part] for x in arrays), cache)
        assert np.isnan(np.asarray(out)).all() == full


def test_a_step_makes_no_nan_where_jax_looks_for_them():
    with jax.debug_nans(True):
        assert np.isfinite(np.asarray(Used("jax").step())).all()


def test_a_scan_begins_with_an_empty_cache():
    """Of a layer, and of functions that compress by means: the carry keeps its structure."""
    layer, token = in_jax(phi="mlp"), jnp.ones((5, 1, 1, 24))
    jax.lax.scan(lambda kv, x: layer(x, kv)[::-1], layer.init_cache(1, 9), token)
    new = [jnp.ones((1, 1, 1, n)) for n in (8, 8, 8, 3)]
    plain = lambda cache, _: nsa_jax.cached_attention(*new, cache)[::-1]
    cache, outs = jax.lax.scan(plain, Used("jax").cache, None, length=12)
    assert cache.length.tolist() == [12] and np.isfinite(np.asarray(outs)).all()


# What a cache shows, and what is left in it.


def step_of(number, api, array, cache, separate, count, graph=False, **options):
    tokens = array(np.full((2, count, 1, 8), number, np.float32))
    tokens = tokens.requires_grad_() if graph else tokens
    given = api.Branches.each(tokens) if separate else tokens
    query, gates = (array(np.ones((2, count, 2, n), np.float32)) for n in (8, 3))
    out, cache = api.cached_attention(query, given, given, gates, cache, **options)
    found = np.isnan(np.asarray(out.detach() if hasattr(out, "detach") else out))
    assert found.any() == np.isnan(number)
    return out, cache, tokens


@by_separate
@pytest.mark.parametrize("how", ["jax", "torch", "torch, in a graph"])
def test_a_cache_that_was_reset_holds_no_nan(how, separate):
    """Kernels multiply whole tiles, of which the next tokens may fill a part."""
    api, array = FRAMEWORKS[how.partition(",")[0]]
    cache = api.init_cache(2, 40, 1, 8, 8, config=SMALL, separate=separate)
    before = held(cache) if how == "torch" else None
    out, cache, tokens = step_of(np.nan, api, array, cache, separate, 30, "graph" in how)
    fresh = cache.reset() or cache
    assert all((x == 0).all() for x in (jax.tree.leaves if how == "jax" else held)(fresh))
    assert fresh.config == SMALL
    if "graph" in how:
        torch.autograd.grad(out.sum(), tokens)  # what the graph holds is as it was
    elif how == "torch":
        assert cache.selected_key.data_ptr() == before[1].data_ptr()


@by_separate
@pytest.mark.parametrize("graph", [False, True], ids=["in place", "in a graph"])
def test_tokens_that_were_taken_back_leave_no_nan(graph, separate):
    """Rows of different lengths, whose compressed tokens end at other tokens."""
    cache = nsa_torch.init_cache(2, 40, 1, 8, 8, config=SMALL, separate=separate)
    lengths, how = torch.tensor([21, 14]), (*FRAMEWORKS["torch"], cache, separate)
    first, cache, tokens = step_of(1, *how, 21, graph, new_lengths=lengths)
    clean, before = cache.clone(), cache.selected_key.data_ptr()
    step_of(np.nan, *how, 11)
    crop(cache, 11)
    for name in clean.pages.tensors():
        x, y = getattr(cache, name), getattr(clean, name)
        for row, length in enumerate((21, 14)):
            used = length // SMALL.compress_stride if "compressed" in name else length
            assert torch.equal(x[row, :used], y[row, :used]) and x.isfinite().all(), name
    crop(cache, 18)  # the second row has 14 tokens
    assert cache.length.tolist() == [3, 0]
    if graph:
        torch.autograd.grad(first.sum(), tokens)  # what the graph holds is as it was
    else:
        assert cache.selected_key.data_ptr() == before


@by_framework
@pytest.mark.parametrize("rows, lengths", [(1, "[0]"), (9, "[0, 0, 0, 0, 0, 0, ...]")])
def test_a_cache_is_shown_in_one_line(framework, rows, lengths):
    api, _ = FRAMEWORKS[framework]
    prefix = "torch." * (framework == "torch")
    assert repr(api.init_cache(rows, 80, 1, 8, 4, config=SMALL)) == (
        f"NSACache(selected_key=({rows}, 80, 1, 8), selected_value=({rows}, 80, 1, 4), "
        f"separate=False, dtype={prefix}float32, lengths={lengths})"
    )
    assert repr(api.PagedCache(3, 1, 8, 4, config=SMALL, separate=True)) == (
        "PagedCache(selected_key=(3, 16, 1, 8), selected_value=(3, 16, 1, 4), separate=True, "
        f"dtype={prefix}bfloat16)"
    )


@torch.no_grad()
def test_caches_that_hold_no_numbers_are_shown():
    caches = model_cache(False, attention=["nsa", "dense"]), model_cache(True)
    NSAForCausalLM(caches[0].config).eval()(torch.ones(1, 3).long(), past_key_values=caches[0])
    seen, cache = [], Used("jax").cache
    jax.eval_shape(lambda cache: seen.append(repr(cache)), cache)
    axes = jax.tree.map(lambda _: 0, cache)
    meta = nsa_torch.init_cache(1, 9, 1, 8, 8, config=SMALL, device="meta")
    shown = [*seen, *map(repr, (*caches, caches[0].layers[0].state, axes, meta))]
    assert all(x.count("\n") < 2 and len(x) < 300 for x in shown)

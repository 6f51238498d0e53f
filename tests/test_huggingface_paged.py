"""`generate` on pages: the text of other caches, steps of static shapes, one graph for all."""

import copy
import functools
import itertools
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from bench.judge.parity import FLOAT32_MAX
from nsa_torch import paged_attend
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModel,
    NSAModelConfig,
    NSAPagedModelCache,
    StepGraph,
    generation,
    step_graph,
)
from nsa_torch.huggingface import rows as rows_module
from tests.test_huggingface import PADDING, WIDTH, alone, difference, left_padded, model, tokens
from tests.test_huggingface import steps as through_cache

ROOM = 64
by_kind = pytest.mark.parametrize("kind", ["nsa", "mixed", "shared"])


FP8 = torch.float8_e4m3fn


def paged(made, batch, capacity=ROOM, dtype=None):
    return NSAPagedModelCache(made.config, batch, capacity, dtype)


def poison(cache):
    """NaN wherever pages hold no token, raw or compressed."""
    for layer in cache.layers:
        pages = getattr(layer, "pages", None)
        if pages is None:
            continue
        size, slots = pages.config.select_block, pages.compressed_key.shape[1]
        for name, x in layer.tensors().items():
            flat = x.flatten(1, 2)
            for row, length in zip(flat, cache.lengths.tolist(), strict=True):
                row[length * slots // size if "compressed" in name else length :] = torch.nan


def steps(made, ids, mask, splits, **options):
    """Logits of left-padded `ids` through a paged cache, chunk after chunk."""
    return through_cache(made, ids, mask, splits, paged(made, len(ids)), **options)


@by_kind
@torch.no_grad()
def test_chunks_and_steps_of_padded_rows(kind):
    """A row computes what it does alone, in chunks where it has no token yet, or begins."""
    made = model(kind)
    ids, mask = left_padded()
    rows = alone(made, ids)
    for splits in ([WIDTH], [20, 15, 6], [35, 1, 1, 1, 1, 2]):
        logits, cache = steps(made, ids, mask, splits)
        assert difference(logits, rows) < FLOAT32_MAX
        assert cache.lengths.tolist() == mask.sum(1).tolist()
        assert cache.get_seq_length() == WIDTH and cache.get_max_length() == ROOM


@torch.no_grad()
def test_shared_keys_and_values_are_kept_once():
    """And compressed ones each `d` tokens: 1 + 1/d, in place of 3 + 1/d."""
    sizes = {}
    for kv in ("separate", "shared"):
        made = model("pooled", kv=kv)
        cache = paged(made, 1)
        made(tokens(1), cache=cache)
        sizes[kv] = {name: x.numel() for name, x in cache.layers[0].tensors().items()}
    branches = {name.partition("_")[0] for name in sizes["shared"]}
    assert branches == {"selected", "compressed"}
    selected, compressed = (sizes["shared"][f"{x}_key"] for x in ("selected", "compressed"))
    assert selected == made.config.compress_stride * compressed
    of_keys = sum(n for name, n in sizes["separate"].items() if name.endswith("key"))
    assert of_keys == 3 * selected + compressed


@torch.no_grad()
def test_what_no_token_wrote_reaches_nothing():
    ids, mask = left_padded()
    splits = [20, 15, 1, 1, 3, 1]
    want, _ = steps(model(), ids, mask, splits)
    got, cache = steps(model(), ids, mask, splits, between=poison)
    own = mask.bool()
    assert torch.equal(got[own], want[own])
    assert any(x.isnan().any() for x in cache.layers[0].pages.tensors().values())


@torch.no_grad()
def test_a_prompt_is_attended_to_without_its_pages(monkeypatch):
    """A chunk of rows that begin has all their tokens; those that follow read pages."""
    made, ids, seen = model("pooled"), tokens(2), []
    copies = paged_attend.side_by_side
    monkeypatch.setattr(
        paged_attend, "side_by_side", lambda *x: seen.append(x[4] is None) or copies(*x)
    )
    for splits, read in (([WIDTH], [False]), ([30, 10, 1], [False, True, True])):
        seen.clear()
        logits, _ = steps(made, ids, torch.ones_like(ids), splits)
        assert difference(logits, alone(made, ids, (0, 0))) < FLOAT32_MAX
        assert seen == read


@torch.no_grad()
def test_poison_of_a_token_is_seen():
    """Were a slot too many poisoned, or a length one too long, the test before would fail."""
    made = model()
    ids, mask = left_padded()
    cache = steps(made, ids, mask, [WIDTH])[1]
    cache.rows.lengths += 1
    poison(cache)
    cache.rows.lengths -= 1
    assert made(ids[:, -1:], cache=cache).logits.isfinite().all()
    cache.rows.lengths -= 2
    poison(cache)
    cache.rows.lengths += 2
    assert made(ids[:, -1:], cache=cache).logits.isnan().any()


@pytest.mark.parametrize(
    "options",
    [dict(), dict(num_beams=2, num_return_sequences=2), dict(prefill_chunk_size=10)],
    ids=["greedy", "beams", "chunks"],
)
@by_kind
def test_generate(kind, options):
    """The text of the contiguous cache and of none; twice, with the same cache reset."""
    made = model(kind)
    ids, mask = left_padded((0, 30, 38))
    generate = functools.partial(
        made.generate, ids, attention_mask=mask, max_new_tokens=10, do_sample=False
    )
    want = generate(**options)
    if not options:
        assert torch.equal(want, generate(use_cache=False))
    cache = paged(made, 3 * options.get("num_beams", 1))
    for _ in range(1 if options else 2):
        assert torch.equal(generate(**options, cache=cache), want)
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.lengths.any()


@by_kind
@torch.no_grad()
def test_a_cache_in_fp8(kind):
    """Rounds what layers with NSA keep, and nothing else; `generate` reads the same."""
    made, (ids, mask) = model(kind), left_padded()
    cache = paged(made, len(ids), dtype=FP8)
    logits, _ = through_cache(made, ids, mask, [20, 15, 1, 1, 4], cache)
    whole = made(ids, attention_mask=mask, use_cache=False).logits
    off, size = (x[mask.bool()].norm() for x in (logits - whole, whole))
    assert 1e-3 < off / size < 0.1
    pages = [layer.pages for layer in cache.layers if hasattr(layer, "pages")]
    assert {x.selected_key.dtype for x in pages} == {FP8}
    assert {x.compressed_key.dtype for x in pages} == {logits.dtype}
    cache.reset()
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    text = made.generate(ids, cache=cache, **options)
    cache.reset()
    seen = torch.cat([mask, torch.ones_like(text[:, WIDTH:])], 1)
    logits, _ = through_cache(made, text[:, :-1], seen, [WIDTH, *[1] * 5], cache)
    assert text[:, WIDTH:].equal(logits[:, WIDTH - 1 :].argmax(-1))
    for dtype in (torch.float16, torch.int8):
        with pytest.raises(
            ValueError, match=r"dtype must be None, the model's, or .*e4m3fn, got"
        ):
            paged(made, 1, dtype=dtype)


def test_generate_with_guesses_takes_them_back():
    ids = tokens(1, 12).repeat(1, 3)
    generate = functools.partial(model().generate, ids, max_new_tokens=16, do_sample=False)
    cropped = []

    class Watched(NSAPagedModelCache):
        def crop(self, tokens_to_remove):
            cropped.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    cache = Watched(model().config, 1, ROOM)
    guessed = generate(prompt_lookup_num_tokens=4, cache=cache)
    assert torch.equal(guessed, generate()) and min(cropped) < 0
    assert type(cache.get_seq_length()) is int


@pytest.mark.parametrize("dtype", [None, FP8])
@by_kind
@torch.no_grad()
def test_operations_on_a_cache(kind, dtype):
    made = model(kind)
    ids, mask = left_padded((0, 13))
    following = tokens(2, 9, seed=1)
    after = torch.ones(2, 9, dtype=torch.long)

    def go_on(cache, rows):
        both = torch.cat([mask, after], 1)[rows]
        return made(following[rows], attention_mask=both, cache=cache).logits

    def fresh():
        return through_cache(made, ids, mask, [WIDTH], paged(made, 2, dtype=dtype))[1]

    first = made(ids, attention_mask=mask, cache=paged(made, 2, dtype=dtype)).logits

    cache = fresh()
    want = go_on(cache, [0, 1])
    cache.crop(-9)
    torch.testing.assert_close(go_on(cache, [0, 1]), want, rtol=0, atol=FLOAT32_MAX)
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    ):
        cache = fresh()
        change(cache)
        assert cache.batch_size == len(rows)
        torch.testing.assert_close(go_on(cache, rows), want[rows], rtol=0, atol=FLOAT32_MAX)
    cache = fresh()
    where = [x.data_ptr() for layer in cache.layers for x in layer.tensors().values()]
    lengths = cache.lengths
    go_on(cache, [0, 1])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    again = made(ids, attention_mask=mask, cache=cache)
    assert again.logits[mask.bool()].equal(first[mask.bool()])
    if dtype is None:
        assert difference(first, alone(made, ids, (0, 13))) < FLOAT32_MAX
    assert where == [x.data_ptr() for layer in cache.layers for x in layer.tensors().values()]
    assert cache.lengths is lengths


def traced(call, device, cache):
    """In place of a CUDA graph: the operations of `call` on the tensors it ran on, with every
    number that the host knew then. What the host reads of a tensor is an error.
    """
    state = [cache.lengths, *(x for layer in cache.layers for x in layer.tensors().values())]
    before = [x.clone() for x in state]
    graph = make_fx(lambda: call())()
    for x, y in zip(state, before, strict=True):
        x.copy_(y)
    found = torch.zeros_like(graph())
    for x, y in zip(state, before, strict=True):
        x.copy_(y)
    return lambda: found.copy_(graph()), found


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Steps by graphs that are `traced`; what a CPU alone checks is left out."""
    monkeypatch.setattr(step_graph, "_why_not_there", lambda model: None)
    monkeypatch.setattr(NSAModel, "_embed", lambda self, x: self.embed_tokens(x))
    monkeypatch.setattr(rows_module, "free_to_read", lambda x: False)
    captured = []

    def use(cache):
        def capture(call, device):
            captured.append(cache.get_seq_length())
            return traced(call, device, cache)

        monkeypatch.setattr(step_graph, "capture", capture)
        return captured

    return use


@torch.no_grad()
def test_one_capture_serves_rows_that_grow_shrink_and_begin(as_on_a_gpu):
    made = model("pooled")
    ids, mask = left_padded((0, 38))
    caches = [paged(made, 2), paged(made, 2)]
    captured = as_on_a_gpu(caches[0])
    graph = StepGraph(made, caches[0])

    def start():
        for cache in caches:
            cache.reset()
            made(ids[:, -9:], attention_mask=mask[:, -9:], cache=cache)

    def step(there=(1, 1)):
        new = torch.randint(1, 64, (2, 1))
        there = torch.tensor(there)[:, None]
        inputs = dict(attention_mask=there, cache=caches[1])
        want, got = made(new, **inputs).logits, graph(new, there)
        own = there[:, 0] > 0
        torch.testing.assert_close(got[own], want[own], rtol=0, atol=FLOAT32_MAX)
        assert torch.equal(*(x.lengths for x in caches))
        assert len({x.get_seq_length() for x in caches}) == 1

    torch.manual_seed(0)
    start()
    for count in range(26):
        step((1, count % 5 != 4))
    for cache in caches:
        cache.crop(-1)
    step()
    start()
    step()
    assert captured == [9 + step_graph.WARMUP]


@torch.no_grad()
def test_a_capture_that_fails_appends_nothing(as_on_a_gpu, monkeypatch):
    made = model("pooled")
    cache, new = paged(made, 2), torch.ones(2, 1, dtype=torch.int64)
    as_on_a_gpu(cache)
    graph = StepGraph(made, cache)
    for _ in range(step_graph.WARMUP):
        graph(new)
    trace = step_graph.capture

    def failing(call, device):
        trace(call, device)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(step_graph, "capture", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        graph(new)
    assert cache.get_seq_length() == step_graph.WARMUP
    monkeypatch.setattr(step_graph, "capture", trace)
    graph(new)
    assert cache.get_seq_length() == step_graph.WARMUP + 1
    assert cache.lengths.tolist() == [step_graph.WARMUP + 1] * 2


@torch.no_grad()
def test_a_step_that_keeps_a_length_of_the_host_is_seen(as_on_a_gpu, monkeypatch):
    made, cache, plain = model(), *(paged(model(), 1) for _ in range(2))
    as_on_a_gpu(cache)
    begin = cache.rows.begin

    def fixed(x, count):
        begin(x, count)
        after = torch.full_like(cache.lengths, cache.rows.columns + 1)
        cache.rows.call = cache.rows.call._replace(after=after, lengths=after)

    monkeypatch.setattr(cache.rows, "begin", fixed)
    graph, new = StepGraph(made, cache), tokens(1, 6)
    found = []
    for each in new.split(1, dim=1):
        got, want = graph(each), made(each, cache=plain).logits
        found.append(float((got - want).abs().max()))
    assert max(found[:4]) < FLOAT32_MAX < min(found[4:]) / 100


@torch.no_grad()
def test_a_step_that_waits_for_the_device_is_seen(as_on_a_gpu, monkeypatch):
    cache = paged(model(), 1)
    as_on_a_gpu(cache)
    begin = cache.rows.begin

    def waiting(x, count):
        begin(x, count)
        assert int(cache.rows.call.after.max()) > 0

    monkeypatch.setattr(cache.rows, "begin", waiting)
    graph = StepGraph(model(), cache)
    with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
        for each in tokens(1, step_graph.WARMUP + 1).split(1, dim=1):
            graph(each)


class Adapted(torch.nn.Module):
    """A linear layer with low-rank adapters, chosen and scaled by attributes, as peft's."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer, self.active_adapter, self.enabled = base, "one", True
        self.scaling = {"one": 1.0, "two": 1.0}

        def drawn(*shape):
            parts = {x: torch.randn(*shape) * 0.5 for x in self.scaling}
            return torch.nn.ParameterDict(parts).to(base.weight)

        self.lora_A, self.lora_B = drawn(rank, base.in_features), drawn(base.out_features, rank)

    def forward(self, x):
        name, y = self.active_adapter, self.base_layer(x)
        if self.enabled:
            y = y + x @ self.lora_A[name].T @ self.lora_B[name].T * self.scaling[name]
        return y


def adapted(made):
    """A copy of the model with adapters on each query projection."""
    torch.manual_seed(0)
    made = copy.deepcopy(made)
    for layer in made.model.layers:
        layer.self_attn.W_Q = Adapted(layer.self_attn.W_Q)
    return made


def switched(made, change):
    for module in made.modules():
        if isinstance(module, Adapted) and change is not None:
            change(module)


CHANGES = {
    "another adapter": lambda x: setattr(x, "active_adapter", "two"),
    "scaling": lambda x: x.scaling.update(two=-3.0),
    "adapter off": lambda x: setattr(x, "enabled", False),
    "weights moved": lambda x: setattr(x.base_layer.weight, "data", -x.base_layer.weight),
    "layer replaced": lambda x: setattr(x, "base_layer", torch.nn.Identity()),
}


def test_generate_sees_what_python_changed(as_on_a_gpu):
    """On one cache, reset: the text of a cache without a graph, after each change."""
    made, ids = adapted(model("dense", num_hidden_layers=1)), tokens(1)
    cache, count = paged(made, 1), dict(max_new_tokens=9, do_sample=False)
    captured, texts = as_on_a_gpu(cache), []
    for change in (None, *CHANGES):
        switched(made, CHANGES.get(change))
        texts.append(made.generate(ids, **count))
        cache.reset()
        assert torch.equal(made.generate(ids, cache=cache, **count), texts[-1]), change
        cache.reset()
        without = made.generate(ids, cache=cache, disable_compile=True, **count)
        assert torch.equal(without, texts[-1])
    assert all(not torch.equal(x, y) for x, y in itertools.pairwise(texts))
    assert captured == [WIDTH + step_graph.WARMUP] * len(texts)


class RowScaled(torch.nn.Module):
    """A linear layer with a factor of each row, as adapters chosen by row have."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    def forward(self, x):
        return self.base_layer(x) * torch.tensor([1.0, -2.0])[:, None, None]


def test_projections_see_rows():
    made = copy.deepcopy(model())
    for name in ("W_Q", "out"):
        layer = made.model.layers[0].self_attn
        setattr(layer, name, RowScaled(getattr(layer, name)))
    ids, mask = left_padded((0, 30))
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False)
    want = made.generate(ids, **options)
    assert torch.equal(made.generate(ids, cache=paged(made, 2), **options), want)
    assert not torch.equal(model().generate(ids, **options)[1], want[1])


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "module_forward"])
def test_forward_hooks_are_called_at_each_step(kind, as_on_a_gpu):
    """What a graph would leave out. It comes back when the hook has gone."""
    made = copy.deepcopy(model(num_hidden_layers=1))
    cache, options = paged(made, 1), dict(max_new_tokens=9, do_sample=False)
    captured, calls = as_on_a_gpu(cache), []
    made(tokens(1), output_hidden_states=True)  # leaves hooks of transformers, which may stay
    if kind == "module_forward":
        place = torch.nn.modules.module.register_module_forward_hook
    else:
        place = getattr(made.model.layers[0].self_attn, f"register_{kind}_hook")
    handle = place(lambda *given: calls.append(given[0]))
    try:
        want = made.generate(tokens(1), **options)
        expected = len(calls)
        assert torch.equal(made.generate(tokens(1), cache=cache, **options), want)
        assert len(calls) == 2 * expected and not captured
        with pytest.raises(ValueError, match="model must have no forward hooks, which a CUDA"):
            StepGraph(made, cache)
    finally:
        handle.remove()
    cache.reset()
    assert torch.equal(made.generate(tokens(1), cache=cache, **options), want)
    assert len(calls) == 2 * expected and captured == [WIDTH + step_graph.WARMUP]


def test_generate_is_on_pages_by_default_on_a_gpu(as_on_a_gpu, monkeypatch):
    """Where a step is a graph of kernels on pages; not for a single new token, where the cache
    comes back, beams, dense layers, or who asks for another cache. Texts are the same.
    """
    made, ids, seen, count = model(), tokens(2), [], 5
    want = made.generate(ids, max_new_tokens=count, do_sample=False)

    class Seen(NSAPagedModelCache):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            seen.append((self.batch_size, self.get_max_length()))
            as_on_a_gpu(self)

    def generate(made=made, **options):
        seen.clear()
        found = made.generate(ids, **dict(max_new_tokens=count, do_sample=False) | options)
        return found if isinstance(found, torch.Tensor) else found.sequences

    monkeypatch.setattr(generation, "NSAPagedModelCache", Seen)
    as_on_a_gpu(None)
    assert torch.equal(generate(), want) and not seen  # no kernels here
    monkeypatch.setattr(generation, "_has_kernels_and_room", lambda *x: True)
    assert torch.equal(generate(), want)
    assert seen == [(2, WIDTH + count - 1)]
    sampled = generate(do_sample=True, top_k=1, num_return_sequences=2)
    assert torch.equal(sampled[::2], want) and seen == [(4, WIDTH + count - 1)]
    few = generation.MIN_NEW_TOKENS - 1
    assert torch.equal(generate(max_new_tokens=few), want[:, : WIDTH + few]) and not seen
    generate(max_new_tokens=None, max_length=WIDTH + count)
    assert seen == [(2, WIDTH + count - 1)]
    for options in (
        dict(cache_implementation="dynamic"),
        dict(use_cache=False),
        dict(num_beams=2),
        dict(return_dict_in_generate=True),
        dict(disable_compile=True),
        dict(made=model("mixed")),
    ):
        generate(**options)
        assert not seen, options


@pytest.mark.parametrize(("free", "expected"), [(1 << 30, True), (1 << 10, False)])
def test_pages_take_half_of_the_free_memory_at_most(free, expected, monkeypatch):
    made = model()
    monkeypatch.setattr(generation, "decodes_on_pages", lambda *x: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    assert generation._has_kernels_and_room(made, 2, 100) is expected
    monkeypatch.undo()
    assert not generation._has_kernels_and_room(made, 2, 100)  # no kernels on a CPU


@torch.no_grad()
def test_what_is_refused(monkeypatch):
    made, ids = model("mixed"), tokens(2)
    generate = functools.partial(made.generate, ids, do_sample=False)
    cache = paged(made, 2, 44)
    for options, message in (
        (
            dict(max_new_tokens=5),
            "capacity for 45 tokens, all of max_length but the last, got 44",
        ),
        (dict(max_new_tokens=2, num_beams=2), "must have batch_size=4, .*, got 2"),
        (dict(max_new_tokens=2, compile_config=CompileConfig()), "compile_config must be None"),
        (dict(max_new_tokens=2, cache_implementation="static"), "cache_implementation must be"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(cache=cache, **options)
    assert cache.lengths is None
    for sizes in ((True, 44), (2, True), (2, 44.0)):
        with pytest.raises(ValueError, match="must be an int >= 1, got"):
            paged(made, *sizes)
    made(ids, cache=cache)
    with pytest.raises(ValueError, match="cache capacity is 44 tokens, got 45"):
        made(ids[:, :4], cache=cache)
    with pytest.raises(ValueError, match=r"each of the 1 rows of the input, got batch_size=2"):
        made(ids[:1, :1], cache=cache)
    with pytest.raises(ValueError, match=r"tokens_to_remove must be in -41\.\.0"):
        cache.crop(-42)
    assert cache.lengths.tolist() == [41, 41]
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="no_grad"):
        made(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="model must be on one CUDA device, got cpu"):
        StepGraph(made, cache)
    monkeypatch.setattr(made.config, "_attn_implementation_internal", "flex_attention")
    with pytest.raises(
        NotImplementedError, match=r"must be 'sdpa' or 'eager' .*flex_attention"
    ):
        made(ids[:, :1], cache=cache)
    for sizes, message in (
        ((0, 8), "batch_size must be"),
        ((1, 2.5), "capacity must be an int"),
    ):
        with pytest.raises(ValueError, match=message):
            NSAPagedModelCache(made.config, *sizes)


@torch.no_grad()
def test_eager_attention_of_dense_layers(monkeypatch):
    made = model("dense")
    monkeypatch.setattr(made.config, "_attn_implementation_internal", "eager")
    ids, mask = left_padded()
    logits, _ = steps(made, ids, mask, [35, 1, 5])
    assert difference(logits, alone(made, ids, PADDING)) < FLOAT32_MAX


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("phi", "kv", "dtype"),
    [("avg", "shared", None), ("mlp", "separate", None), ("avg", "shared", FP8)],
)
@torch.no_grad()
def test_replay_on_a_gpu_equals_eager(phi, kv, dtype):
    """24 steps over a page's border, by the decode kernels; a row without a token, a crop."""
    sizes = dict(vocab_size=128, hidden_size=128, num_attention_heads=8, num_key_value_heads=2)
    sizes |= dict(
        head_dim=64, v_head_dim=64, num_hidden_layers=3, pad_token_id=0, phi=phi, kv=kv
    )
    torch.manual_seed(0)
    config = NSAModelConfig(**sizes, attention=["nsa", "dense", "nsa"])
    made = NSAForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(1, 128, (2, 60), device="cuda")
    mask = (torch.arange(60, device="cuda") >= torch.tensor([[0], [40]], device="cuda")).long()
    caches = [paged(made, 2, 128, dtype) for _ in range(2)]
    for cache in caches:
        made(ids * mask, attention_mask=mask, cache=cache)
    graph = StepGraph(made, caches[0])
    for count in range(step_graph.WARMUP + 24):
        new = torch.randint(1, 128, (2, 1), device="cuda")
        there = torch.tensor([[1], [int(count % 7 != 6)]], device="cuda")
        inputs = dict(attention_mask=there, cache=caches[1])
        want, got = made(new, **inputs).logits, graph(new, there)
        assert torch.equal(got, want), count
        assert torch.equal(*(x.lengths for x in caches))
        if count == 15:
            for cache in caches:
                cache.crop(-2)
    assert graph.replay is not None
    generate = functools.partial(
        made.generate, ids * mask, attention_mask=mask, max_new_tokens=24, do_sample=False
    )
    texts = []
    for off in (False, True):
        caches[0].reset()
        texts.append(generate(cache=caches[0], disable_compile=off))
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["shared", "separate"])
def test_generate_is_on_pages_by_default(kv, monkeypatch):
    """The text of a cache that grows, for padded rows and in chunks."""
    sizes = dict(vocab_size=128, hidden_size=128, num_attention_heads=8, num_key_value_heads=2)
    torch.manual_seed(0)
    config = NSAModelConfig(**sizes, head_dim=64, num_hidden_layers=2, pad_token_id=0, kv=kv)
    made, seen = NSAForCausalLM(config).to("cuda").eval(), []
    init = NSAPagedModelCache.__init__
    monkeypatch.setattr(
        NSAPagedModelCache, "__init__", lambda *x: seen.append(x[2:]) or init(*x)
    )
    ids = torch.randint(1, 128, (2, 700), device="cuda")
    mask = (torch.arange(700, device="cuda") >= torch.tensor([[0], [90]], device="cuda")).long()
    for options in ({}, {"prefill_chunk_size": 300}):
        options |= dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
        texts = [
            made.generate(ids * mask, **options, cache_implementation=name)
            for name in (None, "dynamic")
        ]
        assert torch.equal(*texts)
    assert seen == [(2, 711)] * 2
    made.set_nsa_implementation("triton")  # of prompts and of steps
    assert torch.equal(made.generate(ids * mask, **options), texts[0]) and len(seen) == 3
    made.set_nsa_implementation("sdpa")  # which would gather all pages each step
    made.generate(ids * mask, **options)
    assert len(seen) == 3


@pytest.mark.gpu
def test_adapters_and_hooks_on_a_gpu():
    """Each `generate` on one cache has the logits of steps without a graph."""
    sizes = dict(vocab_size=128, hidden_size=128, num_attention_heads=8, num_key_value_heads=2)
    config = NSAModelConfig(
        **sizes, head_dim=64, num_hidden_layers=2, attention=["nsa", "dense"]
    )
    torch.manual_seed(0)
    made = adapted(NSAForCausalLM(config)).to("cuda", torch.bfloat16).eval()
    ids, cache = torch.randint(1, 128, (2, 70), device="cuda"), paged(made, 2, 128)
    options = dict(max_new_tokens=12, do_sample=False, output_logits=True)
    options |= dict(return_dict_in_generate=True, cache=cache)

    def logits(**more):
        cache.reset()
        return torch.stack(made.generate(ids, **options, **more).logits)

    found = []
    for change in (None, "another adapter", "scaling", "adapter off", "weights moved"):
        switched(made, CHANGES.get(change))
        found.append(logits())
        assert torch.equal(found[-1], logits(disable_compile=True)), change
    for x, y in itertools.pairwise(found):
        assert not torch.equal(x, y)
    calls = []
    handle = made.model.layers[0].mlp.register_forward_hook(
        lambda module, args, y: calls.append(1) or 2 * y
    )
    hooked = logits()
    assert len(calls) == 12 and torch.equal(hooked, logits(disable_compile=True))
    handle.remove()
    assert torch.equal(logits(), found[-1]) and not torch.equal(hooked, found[-1])


@pytest.mark.gpu
def test_a_capture_goes_on_beside_other_threads():
    """One of which needs memory of the driver, as servers do that load, answer or log."""
    x, failed = torch.ones(8, device="cuda"), []
    torch.cuda.empty_cache()

    def elsewhere():
        try:
            torch.empty(2**31, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            failed.append(error)

    def call():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x + 1

    replay, found = step_graph.capture(call, x.device)
    replay()
    assert not failed and bool((found == 2).all())

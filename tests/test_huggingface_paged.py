"""`generate` on pages: what reaches them, steps of static shapes, one graph for all. Texts, chunks
and operations on a cache are rows of `test_huggingface.py`.
"""

import copy
import functools
import itertools
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelConfig,
    NSAPagedModelCache,
    StepGraph,
)
from tests import model_sizes, pretend, refusals
from tests.devices import BOTH
from tests.limits import set_limits
from tests.model_sizes import MODELS
from tests.test_huggingface import (
    CACHES,
    FP8,
    GREEDY,
    WIDTH,
    alone,
    close,
    left_padded,
    model,
    same_rows,
    steps,
    tokens,
)

gpu = pytest.mark.gpu
WARMUP = 3  # steps before one is captured


def paged(made, batch, capacity=128, dtype=None):
    return NSAPagedModelCache(made.config, batch, capacity, dtype)


def on(device, kind="nsa", dtype=torch.bfloat16, **changed):
    """A small model; on a GPU of sizes that kernels have, in `dtype`."""
    if device == "cpu":
        return model(kind, **changed)
    torch.manual_seed(0)
    return (
        NSAForCausalLM(NSAModelConfig(**MODELS["pages on a GPU"] | changed))
        .to(device, dtype)
        .eval()
    )


def one_layer(device):
    """A model of the test's own; on a CPU, where a graph is traced, the quickest."""
    kind = "dense" if device == "cpu" else "nsa"
    return copy.deepcopy(on(device, attention=kind, num_hidden_layers=1))


@pytest.fixture(params=BOTH)
def device(request):
    return request.param


@pytest.fixture
def captured(device, monkeypatch):
    """The tokens that a cache has at each capture of a graph. On a CPU it is `traced`; what a CPU
    alone checks is left out.
    """
    found, capture = [], pretend.original("graph_capture")
    if device == "cpu":
        capture = traced
        set_limits(monkeypatch, graph_device="cpu")
        pretend.machine(monkeypatch, free_to_read=False)

    def watched(call, device):
        found.append(call.__self__.cache.get_seq_length())
        return capture(call, device)

    pretend.machine(monkeypatch, graph_capture=watched)
    return found


def traced(call, device):
    """In place of a CUDA graph: the operations of `call` on the tensors it ran on, with every
    number that the host knew then. What the host reads of a tensor is an error.
    """
    cache = call.__self__.cache
    state = [cache.lengths, *(x for layer in cache.layers for x in layer.tensors())]
    before = [x.clone() for x in state]

    def restored(found):
        for x, y in zip(state, before, strict=True):
            x.copy_(y)
        return found

    graph = restored(make_fx(lambda: call())())
    found = restored(torch.zeros_like(graph()))
    return lambda: found.copy_(graph()), found


@torch.no_grad()
def test_a_prompt_is_attended_to_without_its_pages(monkeypatch):
    """A chunk of rows that begin has all their tokens; those that follow read pages. No output
    shows it: calls are watched.
    """
    made, ids = model("mixed"), tokens(2)
    seen = pretend.watched(monkeypatch, "copied_rows", lambda *x: x[4] is None)
    for splits, read in (([WIDTH], [False]), ([30, 10, 1], [False, True, True])):
        seen.clear()
        logits = steps(made, ids, torch.ones_like(ids), splits, paged(made, 2))
        same_rows(logits, alone(made, ids, (0, 0)))
        assert seen == read


@pytest.mark.parametrize("kind", ["nsa", "mixed", "shared"])
@torch.no_grad()
def test_a_cache_in_fp8(kind):
    """Rounds what layers with NSA keep, and nothing else; `generate` reads the same."""
    made, (ids, mask) = model(kind), left_padded()
    cache = CACHES["fp8 pages"](made.config, len(ids))
    logits = steps(made, ids, mask, [20, 15, 1, 1, 4], cache)
    whole = made(ids, attention_mask=mask, use_cache=False).logits
    off, size = (x[mask.bool()].norm() for x in (logits - whole, whole))
    assert 1e-3 < off / size < 0.1
    pages = [layer.pages for layer in cache.layers if hasattr(layer, "pages")]
    assert {x.selected_key.dtype for x in pages} == {FP8}
    assert {x.compressed_key.dtype for x in pages} == {logits.dtype}
    cache.reset()
    options = dict(attention_mask=mask, max_new_tokens=6, **GREEDY)
    text = made.generate(ids, cache=cache, **options)
    cache.reset()
    seen = torch.cat([mask, torch.ones_like(text[:, WIDTH:])], 1)
    logits = steps(made, text[:, :-1], seen[:, :-1], [WIDTH, *[1] * 5], cache)
    assert text[:, WIDTH:].equal(logits[:, WIDTH - 1 :].argmax(-1))


@pytest.mark.parametrize(
    "device, phi, kv, dtype",
    [
        ("cpu", "mlp", "separate", None),
        pytest.param("cuda", "mlp", "separate", None, marks=gpu),
        pytest.param("cuda", "avg", "shared", None, marks=gpu),
        pytest.param("cuda", "avg", "shared", FP8, marks=gpu),
    ],
)
@torch.no_grad()
def test_one_capture_serves_rows_that_grow_shrink_and_begin(device, phi, kv, dtype, captured):
    """Over a page's border; a row without a token, a crop, a new start. A step that waits for the
    device, or keeps a length of the host, is seen.
    """
    made = on(device, phi=phi, kv=kv, attention=("nsa", "dense"))
    ids, mask = (x.to(device) for x in left_padded((0, 38)))
    caches = [paged(made, 2, dtype=dtype) for _ in "ab"]
    graph = StepGraph(made, caches[0])
    same = functools.partial(close, atol=0) if device == "cuda" else close

    def start():
        for cache in caches:
            cache.reset()
            made(ids, attention_mask=mask, cache=cache)

    def step(count):
        new = tokens(2, 1, seed=count).to(device)
        there = torch.tensor([[1], [int(count % 5 != 4)]], device=device)
        want = made(new, attention_mask=there, cache=caches[1]).logits
        own = there[:, 0] > 0
        same(graph(new, there)[own], want[own])
        assert torch.equal(*(x.lengths for x in caches))
        assert len({x.get_seq_length() for x in caches}) == 1

    start()
    for count in range(WARMUP + (24 if device == "cuda" else 14)):
        step(count)
        if count == 9:
            for cache in caches:
                cache.crop(-2)
    start()
    step(0)
    assert captured == [WIDTH + WARMUP]


@gpu
@pytest.mark.two_gpus
def test_models_on_two_gpus_have_captures_of_their_own():
    """torch's own stream for captures is on the device of the first capture."""
    first = on("cuda")
    second = copy.deepcopy(first).to("cuda:1")
    answers = [model_sizes.alone(each, [7, 8, 9], WARMUP + 10) for each in (first, second)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("device", ["cpu"])
@torch.no_grad()
def test_a_capture_that_fails_appends_nothing(device, captured, monkeypatch):
    made = one_layer(device)
    cache, new = paged(made, 2), torch.ones(2, 1, dtype=torch.int64)
    graph, capture, begun = StepGraph(made, cache), pretend.original("graph_capture"), WARMUP
    for _ in range(begun):
        graph(new)

    def failing(call, device):
        capture(call, device)
        raise RuntimeError("out of memory")

    pretend.machine(monkeypatch, graph_capture=failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        graph(new)
    assert cache.get_seq_length() == begun
    pretend.machine(monkeypatch, graph_capture=capture)
    graph(new)
    assert cache.get_seq_length() == begun + 1 and cache.lengths.tolist() == [begun + 1] * 2


class Scaled(torch.nn.Module):
    """A linear layer with a scaling and an adapter that is on or off, as peft's."""

    scaling, enabled = 1.0, True

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.adapter = base, copy.deepcopy(base)
        self.adapter.weight.data.normal_()

    def forward(self, x):
        y = self.base_layer(x)
        return y + self.adapter(x) * self.scaling if self.enabled else y


CHANGES = {
    "none": lambda x: None,
    "scaling": lambda x: setattr(x, "scaling", -3.0),
    "adapter off": lambda x: setattr(x, "enabled", False),
    "weights moved": lambda x: setattr(x.base_layer.weight, "data", -x.base_layer.weight),
    "layer replaced": lambda x: setattr(x, "base_layer", copy.deepcopy(x.adapter)),
}


def logits_of(made, cache, ids, **more):
    """Those of a text; the cache is reset."""
    cache.reset()
    options = GREEDY | dict(max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
    return torch.stack(made.generate(ids, cache=cache, **options, **more).logits)


def test_generate_sees_what_python_changed(device, captured):
    """On one cache: the logits of steps without a graph, after each change."""
    made = one_layer(device)
    attention = made.model.layers[0].self_attn
    attention.W_Q = adapter = Scaled(attention.W_Q)
    ids, cache, found = tokens(1).to(device), paged(made, 1), []
    for name, change in CHANGES.items():
        change(adapter)
        found.append(logits_of(made, cache, ids))
        close(found[-1], logits_of(made, cache, ids, disable_compile=True), msg=name)
    assert all(not torch.allclose(x, y, atol=0.01) for x, y in itertools.pairwise(found))
    assert captured == [WIDTH + WARMUP] * len(CHANGES)


def test_projections_see_rows():
    """As adapters that are chosen by row need."""
    made = copy.deepcopy(model())
    layer, factor = made.model.layers[0].self_attn, torch.tensor([1.0, -2.0])[:, None, None]
    for linear in (layer.W_Q, layer.out):
        linear.register_forward_hook(lambda module, given, out: out * factor)
    ids, mask = left_padded((0, 30))
    options = dict(attention_mask=mask, max_new_tokens=5, **GREEDY)
    want = made.generate(ids, **options)
    assert torch.equal(made.generate(ids, cache=paged(made, 2), **options), want)
    assert not torch.equal(model().generate(ids, **options)[1], want[1])


def test_forward_hooks_are_called_at_each_step(device, captured):
    """What a graph would leave out. It comes back when the hook has gone."""
    made = one_layer(device)
    cache, ids, layer = paged(made, 1), tokens(1).to(device), made.model.layers[0].mlp
    made(ids, output_hidden_states=True)  # leaves hooks of transformers, which may stay
    plain, calls = logits_of(made, cache, ids, disable_compile=True), []
    doubled = lambda module, given, out: calls.append(1) or 2 * out
    for place, hook in (
        (layer.register_forward_hook, doubled),
        (layer.register_forward_pre_hook, lambda *given: calls.append(1)),
        (torch.nn.modules.module.register_module_forward_hook, lambda *given: calls.append(1)),
    ):
        handle = place(hook)
        try:
            calls.clear()
            want = logits_of(made, cache, ids, disable_compile=True)
            expected = len(calls)
            assert expected >= 6 and torch.equal(want, plain) == (hook is not doubled)
            assert torch.equal(logits_of(made, cache, ids), want)
            assert len(calls) == 2 * expected and not captured
            with pytest.raises(ValueError, match="have no forward hooks, since a CUDA"):
                StepGraph(made, cache)
        finally:
            handle.remove()
    close(logits_of(made, cache, ids), plain)
    assert len(calls) == 2 * expected and captured == [WIDTH + WARMUP]


def test_generate_is_on_pages_by_default_on_a_gpu(device, captured, monkeypatch):
    """Where a step is a graph of kernels on pages; not for a single new token, where the cache
    comes back, beams, dense layers, too little memory, or who asks for another cache.
    """
    made, (ids, mask) = on(device, dtype=torch.float32), left_padded((0, 13))
    ids, mask = ids.to(device), mask.to(device)
    seen, count = [], 3  # on a CPU no step is traced

    class Seen(NSAPagedModelCache):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            seen.append((self.batch_size, self.get_max_length()))

    def generate(made=made, **options):
        seen.clear()
        options = dict(attention_mask=mask, max_new_tokens=count, **GREEDY) | options
        return made.generate(ids, **options)

    pretend.machine(monkeypatch, cache_of_generate=Seen)
    if device == "cpu":
        free = [1 << 30]
        assert generate() is not None and not seen  # no kernels here
        pretend.machine(monkeypatch, decodes_on_pages=True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], free[0]))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    want = generate(cache_implementation="dynamic")
    for options in MODELS["on pages"]:
        copies = options.get("num_return_sequences", 1)
        assert torch.equal(generate(**options)[::copies], want), options
        assert seen == [(2 * copies, WIDTH + count - 1)], options
    mixed = on(device, "mixed", attention=("nsa", "dense"))
    for options in (*MODELS["on no pages"], {"made": mixed}):
        generate(**options)
        assert not seen, options
    if device == "cpu":
        free[0] = 1 << 10  # pages take half of it at most
        generate()
    else:
        made.set_nsa_implementation("triton")  # of prompts and of steps
        assert torch.equal(generate(), want) and seen
        made.set_nsa_implementation("sdpa")  # which would gather all pages each step
        generate()
    assert not seen


@torch.no_grad()
def test_what_is_refused():
    made, ids = copy.deepcopy(model("mixed")), tokens(2)
    cache, generate = paged(made, 2, 44), functools.partial(made.generate, max_new_tokens=2)
    small = functools.partial(NSAPagedModelCache, made.config)

    def refused(message, call, kind=ValueError):
        with pytest.raises(kind, match=message):
            call()

    makers = {"CompileConfig": CompileConfig}
    for row in refusals.rows("text on pages"):
        with row.refused():
            generate(ids, cache=cache, **row.given(makers=makers))
    assert cache.lengths is None
    for row in refusals.rows("pages of a Hugging Face model"):
        with row.refused():
            small(**{"batch_size": 2, "capacity": 44} | row.given())
    step = lambda: made(ids[:, :1], cache=cache)
    made(ids, cache=cache)
    refused("of the 1 rows of the input, got batch_size=2", lambda: made(ids[:1], cache=cache))
    refused("model must be on one CUDA device, got cpu", lambda: StepGraph(made, cache))
    assert cache.lengths.tolist() == [41, 41]
    with torch.enable_grad():
        refused("no_grad", step, NotImplementedError)


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

    replay, found = pretend.original("graph_capture")(call, x.device)
    replay()
    assert not failed and bool((found == 2).all())

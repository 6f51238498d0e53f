"""`generate_batch` of transformers over paged caches: text and log probabilities of `generate`."""

import asyncio
import functools
import gc
import itertools
import re
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving import model_manager
from transformers.cli.serving.utils import CBGenerateManager
from transformers.generation.continuous_batching import cache as batches
from transformers.generation.continuous_batching import continuous_api, model_runner

from examples.policy_gradient import padded_products
from nsa_torch import Branches, PagedCache
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelConfig,
    NSAPagedModelCache,
    continuous_batching_config,
    serve,
)
from tests import pretend, refusals
from tests.devices import BOTH
from tests.model_sizes import MODELS, SERVED, alone, log_probabilities

SIZES, GPU = SERVED | MODELS["in batches"], MODELS["in batches on a GPU"]
devices = pytest.mark.parametrize("device", BOTH)
served = pytest.mark.skipif(
    not hasattr(getattr(batches, "FullAttentionCacheAllocator", None), "layer_type"),
    reason="generate_batch is refused below transformers 5.19 (test_another_manager_is_refused)",
)
TOKENS = 6  # that are asked for


@functools.cache
def model(**changes):
    torch.manual_seed(0)
    config = NSAModelConfig(**(SIZES | changes))
    return NSAForCausalLM(config).eval()


def on(device, **changes):
    """A model of the test's own; on a GPU of sizes that kernels have."""
    gpu = GPU if device == "cuda" else {}
    return model.__wrapped__(**gpu | changes).to(device)


def prompts(lengths=(5, 40, 23), shared=32):
    """The last begins with the first pages of the longest."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]
    return [*found, max(found, key=len)[:shared] + [3, 4]]


def options(lm, tokens=TOKENS, batch=24, blocks=40, more=None, **generation):
    """Keywords of `generate_batch`."""
    generation = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": tokens} | generation
    sizes = {"num_blocks": blocks, "max_batch_tokens": batch, "return_logprobs": True}
    return {
        "generation_config": GenerationConfig(**generation),
        "continuous_batching_config": continuous_batching_config(
            lm.config, **sizes | (more or {})
        ),
    }


def generated(lm, prompts, **given):
    """Results of the requests, in their order."""
    found = lm.generate_batch(prompts, **options(lm, **given))
    assert all(x.error is None for x in found.values()), [x.error for x in found.values()]
    return list(found.values())


def same_as_alone(lm, prompts, results, atol=2e-5):
    for prompt, result in zip(prompts, results, strict=True):
        assert result.generated_tokens == alone(lm, prompt, TOKENS), len(prompt)
        want = log_probabilities(lm, prompt, result.generated_tokens)
        torch.testing.assert_close(torch.tensor(result.logprobs), want, rtol=0, atol=atol)


def replaced(monkeypatch, name, own):
    """Of the allocator; `own(original, *arguments)`: what the manager does with it is seen in no
    result.
    """
    original = pretend.original(name)
    call = lambda self, *arguments: own(functools.partial(original, self), *arguments)
    pretend.machine(monkeypatch, **{name: call})


ANSWERS = [
    *(("cpu", *row) for row in MODELS["answers"]),
    # Decode steps are CUDA graphs, which the manager captures for each number of rows.
    *(
        pytest.param("cuda", {}, {"use_cuda_graph": graph}, marks=pytest.mark.gpu)
        for graph in (True, False)
    ),
]


@served
@pytest.mark.parametrize("device, changes, sizes", ANSWERS, ids=str)
def test_answers_are_those_of_generate(device, changes, sizes, monkeypatch):
    """Prompts longer than a step (24 tokens), shorter ones and decode in the same steps. Memory of
    the manager begins as NaN, as of a request before or of whoever had it.
    """
    gpu = device == "cuda"

    def spoiled(register, sector, count, memory, *rest):
        memory.view(torch.float32).fill_(torch.nan)
        return register(sector, count, memory, *rest)

    if not gpu:
        replaced(monkeypatch, "register_cache_tensor", spoiled)
    lm = on(device, **changes)
    texts = prompts((300, 70, 5), 192) if gpu else prompts()
    found = generated(lm, texts, batch=128 if gpu else 24, more=sizes)
    same_as_alone(lm, texts, found, 1e-3 if gpu else 2e-5)
    assert lm.config._attn_implementation == "sdpa"  # as before


@served
@devices
def test_requests_do_not_depend_on_the_schedule(device):
    """The same prompts again and again, in any order. On a GPU, `invariant` and products of 64 rows
    give them the bits of one forward pass over prompt and answer.
    """
    gpu, kept = device == "cuda", []
    lm = on(device, kv="shared")
    if gpu:
        lm = lm.bfloat16()
        lm.set_nsa_implementation("invariant")
        kept.append(padded_products())
    texts = prompts((300, 70, 5), 192) if gpu else prompts()
    generator = torch.Generator().manual_seed(2)
    order = torch.randint(len(texts), (1000 if gpu else 40,), generator=generator).tolist()
    found = generated(lm, [texts[i] for i in order], batch=200 if gpu else 24)
    for i, text in enumerate(texts):
        own = [x for x, n in zip(found, order, strict=True) if n == i]
        (tokens,) = {tuple(x.generated_tokens) for x in own}
        with torch.no_grad():
            logits = lm(torch.tensor([[*text, *tokens]], device=device), use_cache=False).logits
        shares = logits[0, len(text) - 1 : -1].float().softmax(-1)
        whole = shares.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0].log().cpu()
        apart = torch.tensor([x.logprobs for x in own]) - whole
        assert len(own) > 3 and apart.abs().max() <= (0 if gpu else 2e-5), len(text)


def test_other_products_take_their_place_without_a_warning():
    """Which torch gives once per process, unless it is asked for each."""
    torch.set_warn_always(True)
    try:
        assert padded_products()
    finally:
        torch.set_warn_always(False)


@served
def test_the_document_runs():
    text = (Path(__file__).parents[1] / "docs/serving.md").read_text()
    made, batch = re.findall(
        r"^```py(?:thon)?\n(from transformers.*?|prompts = .*?)^```", text, re.S | re.M
    )
    exec(made + batch, {})


@served
@pytest.mark.parametrize("changes", [{}, {"key_taps": 3}], ids=str)
def test_prefixes_are_shared_and_forks_copied(changes, monkeypatch):
    lm, prompt = model(**changes), prompts()[1]
    shared, copied, found = [], [], {}
    matching = lambda call, *x: shared.append(call(*x)) or shared[-1]
    replaced(monkeypatch, "match_prefix_blocks", matching)
    replaced(monkeypatch, "copy_blocks", lambda call, *x: (copied.append(x), call(*x)))
    # The second begins when the first has ended: one request a step.
    both = [prompt, prompt[:33] + [5, 6]]
    same_as_alone(lm, both, generated(lm, both, batch=16))
    assert max(map(len, shared)) >= 1
    # Two continuations of one prompt, in pages of their own from the fork on; both greedy.
    get = continuous_api.ContinuousBatchingManager.get_result

    def getting(self, *arguments, **options):
        result = get(self, *arguments, **options)
        if result is not None and result.is_finished():
            found[result.request_id] = result
        return result

    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "get_result", getting)
    generated(lm, [prompt], num_return_sequences=2, do_sample=True, top_k=1)
    assert copied and len(found) == 2
    assert all(x.generated_tokens == alone(lm, prompt, TOKENS) for x in found.values())


@served
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_without_tokens(padded, monkeypatch):
    """A request that is to fork keeps its last token back, so that a step may have rows and no
    token: of prompts of one token, and where a step is planned before the forks of the last step
    are made, as on a GPU. There steps are padded to 64 tokens, and the manager passes at most as
    many rows.
    """
    lm, (text,), late, queued = model(), prompts((40,))[:1], iter([True]), []
    processor = continuous_api.ContinuousBatchProcessor
    update, prepare = processor.update_batch, processor.prepare_next_batch

    def preparing(self):
        while queued and self.input_queue.qsize() < queued[0]:  # all begin in one step
            time.sleep(0.001)
        queued.clear()
        return prepare(self)

    monkeypatch.setattr(processor, "prepare_next_batch", preparing)
    monkeypatch.setattr(
        processor, "update_batch", lambda self: next(late, False) or update(self)
    )
    if padded:
        always = property(lambda _: True, lambda *_: None)
        monkeypatch.setattr(model_runner.ModelRunner, "pad_inputs", always, raising=False)
    given = {"num_return_sequences": 2, "do_sample": True, "top_k": 0}
    # the manager sorts prompts, the largest token first
    for texts in ([text], [[96]], [[96]] * 70 + [text]):
        queued.append(len(texts))
        found = generated(lm, texts, batch=128, blocks=400, **given)
        assert [x.prompt_ids for x in found] == [x for x in texts for _ in range(2)]
        for each in found:
            want = log_probabilities(lm, each.prompt_ids, each.generated_tokens)
            torch.testing.assert_close(torch.tensor(each.logprobs), want, rtol=0, atol=2e-5)


@served
def test_a_request_that_is_cancelled_within_its_prompt(monkeypatch):
    """Its blocks are another's; the others' answers are what they were."""
    lm, made, found = model(), [], {}
    long, others = (prompts()[1] * 6)[:230], [x * 3 for x in prompts()[1:3]]
    begun, go_on = threading.Event(), threading.Event()

    def copying(call, request, past, new):
        if request == "long" and past:  # in its second chunk of 15
            made.append(past)
            begun.set()
            assert go_on.wait(30)
        return call(request, past, new)

    replaced(monkeypatch, "get_read_indices", copying)
    with lm.continuous_batching_context_manager(**options(lm, batch=16, blocks=17)) as manager:
        manager.add_request(long, request_id="long", max_new_tokens=4)
        assert begun.wait(30)
        manager.cancel_request("long")
        for i, prompt in enumerate(others):  # no room for these beside it
            manager.add_request(prompt, request_id=str(i), max_new_tokens=TOKENS)
        go_on.set()
        while len(found) < 2:
            result = manager.get_result(timeout=30)
            assert result is not None and result.error is None
            if result.is_finished():
                found[result.request_id] = result
    assert len(made) == 1 and "long" not in found
    same_as_alone(lm, others, [found[str(i)] for i in range(2)])


@served
@pytest.mark.parametrize("kinds", [("nsa", "nsa"), ("nsa", "dense")])
def test_all_that_is_kept_is_counted(kinds, monkeypatch):
    """`num_blocks` blocks have room for compressed tokens and for all branches, in the manager's
    memory, of which no two arrays share an element.
    """
    lm, made = on("cpu", attention=list(kinds)), []
    kept = lambda call, *x: (call(*x), made.append((call.args[0], x[2])))
    replaced(monkeypatch, "register_cache_tensor", kept)
    generated(lm, prompts()[:1], tokens=2, blocks=11)
    ((allocator, memory),) = made
    assert allocator.num_blocks in (11, 12)
    sizes = dict(cache_dtype=torch.float32, layer_indices=[0, 1], allow_block_sharing=True)
    for given, message in (
        (dict(num_key_value_heads=2, page_size=8), "page_size must be select_block=16, got 8"),
        (dict(num_key_value_heads=1, page_size=16), "all 2 key/value heads, got 1"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            type(allocator)(index=0, config=lm.config, **sizes, **given)
    begin, arrays = memory.data_ptr(), []
    for pages in allocator.pages.values():
        arrays += pages.tensors().values() if isinstance(pages, PagedCache) else pages
    spans = sorted((x.data_ptr() - begin, x.data_ptr() - begin + x.nbytes) for x in arrays)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert 0 <= spans[0][0] and spans[-1][1] <= memory.nbytes
    # Of two heads: keys and values, 8 wide, in float32.
    slots = {"nsa": 3 * 16 + 4, "dense": 16}
    of_block = sum(slots[kind] * 2 * 2 * 8 * 4 for kind in kinds)
    assert sum(x.nbytes for x in arrays) == arrays[0].shape[0] * of_block
    for more in ({}, {"warmup": True}):
        with pytest.raises(MemoryError, match="more than available memory"):
            lm.generate_batch(prompts()[:1], **options(lm, blocks=1 << 40), **more)
        assert lm.config._attn_implementation == "sdpa"  # as before


def test_another_manager_is_refused(monkeypatch):
    """One whose allocators have other methods, or none; `generate` runs with it."""
    pretend.machine(monkeypatch, cache_allocator=object)
    lm, given = model(), ["checkpoint", "--continuous-batching"]
    for kind, call in (
        (NotImplementedError, lambda: lm.generate_batch([[1, 2]])),
        (NotImplementedError, lambda: continuous_batching_config(lm.config)),
        (NotImplementedError, lambda: serve.words(given)),
        (SystemExit, lambda: serve.main(given)),
    ):
        with pytest.raises(kind, match=r"transformers 5\.19 to 5\.\d+, got 5\.\d"):
            call()
    assert lm.config._attn_implementation == "sdpa" and alone(lm, [1, 2], 1)


@served
@devices
def test_a_checkpoint_is_served(device, tmp_path, monkeypatch):
    """By the classes of `transformers serve`, without its HTTP."""
    lm = on(device)
    lm.save_pretrained(tmp_path)
    page, given = lm.config.select_block, [str(tmp_path), "--continuous-batching"]
    assert serve.words(given) == ["serve", *given, "--cb-block-size", str(page)]
    for own in ([*given, "--cb-block-size=8"], given[:1], ["--help"]):
        assert serve.words(own) == ["serve", *own]
    with pytest.raises(SystemExit, match="missing"):
        serve.main([str(tmp_path / "missing"), "--continuous-batching"])
    # So that what `register` sets in transformers is undone afterwards.
    monkeypatch.setattr(model_manager.transformers, "NSAForCausalLM", None, raising=False)
    missing = mock.Mock(side_effect=ImportError("pip install transformers[serving]"))
    monkeypatch.setattr("transformers.cli.transformers.main", missing)
    with pytest.raises(SystemExit, match="serving"):
        serve.main(given[:1])
    serve.register()
    models = model_manager.ModelManager(device="cpu" if device == "cpu" else "cuda:0")
    loaded = models._load_model(models.process_model_name(str(tmp_path)))
    assert type(loaded) is NSAForCausalLM
    greedy = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)
    manager = CBGenerateManager(ContinuousBatchingConfig(page_size=page, num_blocks=40))
    manager.init_cb(loaded, greedy)
    prompt = prompts((300 if device == "cuda" else 40,))[0]
    try:
        raw = SimpleNamespace(decode=lambda tokens, **_: tokens)
        call = manager.generate_non_streaming(loaded, raw, {"input_ids": prompt}, greedy, "a")
        assert asyncio.run(call)[0] == alone(loaded, prompt, TOKENS)
    finally:
        manager.stop()


@served
def test_what_is_refused():
    lm = model()
    for row in refusals.rows("continuous batching"):
        with row.refused():
            continuous_batching_config(lm.config, **row.given())
    for message, given in (
        ("num_beams must be 1", options(lm, num_beams=2)),
        ("got 256; pass", {"continuous_batching_config": ContinuousBatchingConfig()}),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate_batch([[1, 2]], **given)
    lm = on("cpu")
    step = lambda: lm(torch.ones(1, 2).long(), cache=NSAPagedModelCache(lm.config, 1, 44))
    lm.set_nsa_implementation(Branches.each("sdpa"))
    with torch.no_grad():
        assert step()
        lm.set_nsa_implementation(Branches(None, "sdpa", None))
        with pytest.raises(NotImplementedError, match="one name for all branches"):
            step()


@pytest.mark.gpu
@served
def test_what_is_queued_is_done_before_the_manager_begins():
    """It has streams of its own. The weights here, and the zeros that its thread writes into its
    inputs, are there a second after the start.
    """
    made, texts = on("cuda"), [[7, 8, 9] * 30, [5]]
    want = [alone(made, text, TOKENS) for text in texts]
    # The first use of a kernel could wait for the sleep.
    assert [x.generated_tokens for x in generated(made, texts, batch=128)] == want
    weights = [(x, x.detach().clone(), x.data.zero_()) for x in made.parameters()]
    manager = made.init_continuous_batching(**options(made, batch=128))
    torch.cuda._sleep(2 * 10**9)
    for x, kept, _ in weights:
        x.data.copy_(kept)
    manager.start()
    try:
        names = manager.add_requests(texts, max_new_tokens=TOKENS)
        found = [manager.get_result(timeout=60) for _ in texts]
    finally:
        manager.stop(block=True, timeout=60)
    found = {x.request_id: x.generated_tokens for x in found}
    assert [found[name] for name in names] == want


@served
def test_a_manager_that_persists_serves_the_weights_of_now():
    """It keeps prefixes from call to call, which were computed by the weights before a step."""
    lm, prompt = on("cpu"), prompts()[1]
    call = lambda: lm.generate_batch([prompt], persistent_manager=True, **options(lm)).values()
    kept = lambda: lm._cached_continuous_batching_manager
    try:
        for change in (None, "step", "other tensors"):
            before = call() and kept()
            if change == "step":
                lm(torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
                torch.optim.SGD(lm.parameters(), lr=10.0).step()
            elif change == "other tensors":
                lm.load_state_dict(model().state_dict(), assign=True)
            same_as_alone(lm, [prompt], call())
            assert (kept() is before) == (change is None)
    finally:
        lm.destroy_cached_continuous_batching_manager()


@served
def test_a_manager_ends_when_it_is_destroyed():
    """And its memory with it, also before the garbage collection."""
    lm = on("cpu")
    lm.generate_batch([[1, 2]], persistent_manager=True, **options(lm))
    manager = weakref.ref(lm._cached_continuous_batching_manager)
    gc.disable()
    try:
        lm.destroy_cached_continuous_batching_manager()
        assert manager() is None
    finally:
        gc.enable()


@served
@pytest.mark.parametrize("row, found, _", refusals.rows("prompt"), ids=str)
def test_a_prompt_that_is_wrong(row, found, _):
    """Before anything runs: in a step it would end the requests beside it."""
    lm, prompt = model(), row["prompt"]
    manager = lm.init_continuous_batching(**options(lm))
    for name, call in (
        ("inputs[1]", lambda: lm.generate_batch([[1, 2], prompt], **options(lm))),
        ("input_ids", lambda: manager.add_request(prompt)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{name} must")) as error:
            call()
        assert found in str(error.value)
    manager.stop()

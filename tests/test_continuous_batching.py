"""`generate_batch` of transformers over paged caches: text and log probabilities of `generate`."""

import asyncio
import functools
import itertools
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving import model_manager
from transformers.cli.serving.utils import CBGenerateManager
from transformers.generation.continuous_batching import continuous_api, model_runner

from nsa_core.types import Branches
from nsa_torch import paged_attend
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelConfig,
    cache_allocator,
    compatibility,
    continuous,
    continuous_batching_config,
    paged_layer,
    serve,
)
from nsa_torch.paged import PagedCache
from tests.model_sizes import SERVED

SIZES = SERVED | dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
SIZES |= dict(kv="separate", pad_token_id=0)
LENGTHS = (5, 40, 23)
served = pytest.mark.skipif(
    not hasattr(compatibility.FullAttentionCacheAllocator, "layer_type"),
    reason="generate_batch is refused below transformers 5.19 (test_another_manager_is_refused)",
)


@functools.cache
def model(**changes):
    torch.manual_seed(0)
    config = NSAModelConfig(**(SIZES | changes))
    return NSAForCausalLM(config).eval()


def prompts():
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    return [*found, found[1][:32] + [3, 4]]  # the first two pages of another


def options(lm, tokens=6, batch=24, blocks=40, more=None, **generation):
    """Keywords of `generate_batch`."""
    generation = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": tokens} | generation
    sizes = {"num_blocks": blocks, "max_batch_tokens": batch, "return_logprobs": True}
    sizes |= more or {}
    return {
        "generation_config": GenerationConfig(**generation),
        "continuous_batching_config": continuous_batching_config(lm.config, **sizes),
    }


def generated(lm, prompts, **given):
    """Results of the requests, in their order."""
    found = lm.generate_batch(prompts, **options(lm, **given))
    assert all(x.error is None for x in found.values()), [x.error for x in found.values()]
    return list(found.values())


def alone(lm, prompt, tokens=6):
    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False)
    ids = torch.tensor([prompt], device=lm.device)
    out = lm.generate(ids, generation_config=greedy)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def log_probabilities(lm, prompt, answer):
    """Of `answer`, each token given those before it, in one pass without a cache."""
    ids = torch.tensor([prompt + answer], device=lm.device)
    logits = lm(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (
        logits.float()
        .log_softmax(1)
        .gather(1, torch.tensor(answer)[:, None].to(ids.device))[:, 0]
    )


def same_as_alone(lm, prompt, result, tokens=6):
    assert result.generated_tokens == alone(lm, prompt, tokens)
    want = log_probabilities(lm, prompt, result.generated_tokens)
    got = torch.tensor(result.logprobs, device=want.device)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def replaced(monkeypatch, name, own):
    """Of the allocator; `own(original, self, *arguments)`."""
    original = getattr(cache_allocator.NSACacheAllocator, name)

    def call(self, *arguments):
        return own(functools.partial(original, self), *arguments)

    monkeypatch.setattr(cache_allocator.NSACacheAllocator, name, call)


@served
@pytest.mark.parametrize(
    "attention", ["nsa", ("nsa", "dense")], ids=["nsa", "with a dense layer"]
)
def test_what_lies_in_the_managers_memory_reaches_nothing(attention, monkeypatch):
    """NaN of a request before, or of whoever had the memory."""

    def spoiled(register, sector, count, memory, *rest):
        memory.view(torch.float32).fill_(torch.nan)
        return register(sector, count, memory, *rest)

    replaced(monkeypatch, "register_cache_tensor", spoiled)
    lm = model(attention=attention)
    for prompt, result in zip(prompts(), generated(lm, prompts()), strict=True):
        same_as_alone(lm, prompt, result)


@served
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": ("nsa", "dense"), "phi": "mlp"},
        {"phi": "mlp_rope", "gate": "head"},
        {"phi": "mlp_pe", "kv": "shared"},
        {"attention": ("dense", "nsa"), "kv": "shared", "v_head_dim": 16},
    ],
    ids=["nsa", "with a dense layer", "rotated after phi", "shared", "other widths"],
)
@pytest.mark.parametrize("tables", [True, False], ids=["block tables", "no block tables"])
def test_answers_are_those_of_generate(changes, tables):
    """Prompts longer than a step (24 tokens), shorter ones and decode in the same steps."""
    changes = {k: list(x) if isinstance(x, tuple) else x for k, x in changes.items()}
    lm = model.__wrapped__(**changes)
    found = generated(lm, prompts(), more={} if tables else {"max_blocks_per_request": 0})
    for prompt, result in zip(prompts(), found, strict=True):
        same_as_alone(lm, prompt, result)
    assert lm.config._attn_implementation == "sdpa"  # as before


@served
def test_the_document_runs():
    text = (Path(__file__).parents[1] / "docs/serving.md").read_text()
    made, batch = re.findall(
        r"^```py(?:thon)?\n(from transformers.*?|prompts = .*?)^```", text, re.S | re.M
    )
    exec(made + batch, {})


@served
def test_dense_models_run_as_transformers_runs_them():
    lm = model.__wrapped__(attention="dense")
    for prompt, result in zip(prompts(), generated(lm, prompts()), strict=True):
        same_as_alone(lm, prompt, result)


@served
def test_with_a_configuration_of_transformers():
    lm, prompt = model(), prompts()[1]
    for name, found in (
        ("page_size=16", ContinuousBatchingConfig(page_size=16, num_blocks=9)),
        ("page_size must be select_block=16, got 256", ContinuousBatchingConfig()),
    ):
        given = options(lm) | {"continuous_batching_config": found}
        if found.page_size == 16:
            result = lm.generate_batch([prompt], **given)["req_0"]
            assert result.generated_tokens == alone(lm, prompt)
        else:
            with pytest.raises(ValueError, match=name):
                lm.generate_batch([prompt], **given)


@served
def test_steps_see_no_padding_and_no_token_lists(monkeypatch):
    """As where CUDA graphs have the manager pad all steps: rows of no token, and tokens of none."""
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(model_runner.ModelRunner, "pad_inputs", always, raising=False)
    lists, steps = [], []
    own = continuous.ContinuousBatch.__init__

    def begin(self, config, x, position, **paged):
        own(self, config, x, position, **paged)
        steps.append((x.shape[1], self.x.shape[1], self.runs is None))

    monkeypatch.setattr(continuous.ContinuousBatch, "__init__", begin)
    replaced(
        monkeypatch,
        "get_read_indices",
        lambda call, *x: lists.append((*x, call(*x))) or call(*x),
    )
    lm = model.__wrapped__(attention=["nsa", "dense"])
    for prompt, result in zip(prompts(), generated(lm, prompts()), strict=True):
        same_as_alone(lm, prompt, result)
    assert any(decode for *_, decode in steps) and any(a > b for a, b, _ in steps)
    assert all(len(blocks) == -(-(past + new) // 16) for _, past, new, blocks in lists)


@served
def test_decode_rows_are_not_gathered_beside_a_prompt(monkeypatch):
    """The kernels on pages take rows of one token, whatever else a step has."""
    seen, gathering = set(), paged_attend.gathering

    def watched(inputs, queries, *rest):
        rows = inputs.page_table.shape[0]
        seen.add((rows, queries or inputs.query.shape[0] // rows))
        return gathering(inputs, queries, *rest)

    monkeypatch.setattr(paged_attend, "gathering", watched)  # no kernels here
    generated(model(), prompts()[:3], tokens=6)
    assert any(rows == 1 and count > 8 for rows, count in seen)  # a prompt
    assert all(count <= 1 for rows, count in seen if rows > 1)  # no row is padded to it
    assert {(1, 1), (3, 1)} <= seen  # beside it, and alone


@served
def test_prefixes_are_shared_and_forks_copied(monkeypatch):
    lm, prompt = model(), prompts()[1]
    shared, copied = [], []
    matching = lambda call, *x: shared.append(call(*x)) or shared[-1]
    replaced(monkeypatch, "match_prefix_blocks", matching)
    replaced(monkeypatch, "copy_blocks", lambda call, *x: (copied.append(x), call(*x)))
    # The second begins when the first has ended: one request a step.
    both = [prompt, prompt[:33] + [5, 6]]
    for each, result in zip(both, generated(lm, both, batch=16), strict=True):
        same_as_alone(lm, each, result)
    assert max(map(len, shared)) >= 1
    # Two continuations of one prompt, in pages of their own from the fork on; both greedy.
    found, get = {}, continuous_api.ContinuousBatchingManager.get_result

    def getting(self, *arguments, **options):
        result = get(self, *arguments, **options)
        if result is not None and result.is_finished():
            found[result.request_id] = result
        return result

    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "get_result", getting)
    generated(lm, [prompt], num_return_sequences=2, do_sample=True, top_k=1)
    assert copied and len(found) == 2
    assert all(x.generated_tokens == alone(lm, prompt) for x in found.values())


@served
def test_a_request_that_is_cancelled_within_its_prompt(monkeypatch):
    """Its blocks are another's; the others' answers are what they were."""
    lm, made = model(), []
    long, others = (prompts()[1] * 6)[:230], prompts()[1:3]
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
            manager.add_request(prompt * 3, request_id=str(i), max_new_tokens=6)
        go_on.set()
        found = {}
        while len(found) < 2:
            result = manager.get_result(timeout=30)
            assert result is not None and result.error is None
            if result.is_finished():
                found[result.request_id] = result
    assert len(made) == 1 and "long" not in found
    for i, prompt in enumerate(others):
        same_as_alone(lm, prompt * 3, found[str(i)])


@served
@pytest.mark.parametrize("kinds", [("nsa", "nsa"), ("nsa", "dense")])
def test_all_that_is_kept_is_counted(kinds, monkeypatch):
    """`num_blocks` blocks have room for compressed tokens and for all branches, in the manager's
    memory, of which no two arrays share an element.
    """
    lm, made = model.__wrapped__(attention=list(kinds)), []
    replaced(
        monkeypatch,
        "register_cache_tensor",
        lambda call, *x: (call(*x), made.append((call.args[0], x[2]))),
    )
    generated(lm, prompts()[:1], tokens=2, blocks=11)
    ((allocator, memory),) = made
    assert allocator.num_blocks in (11, 12)
    begin, arrays = memory.data_ptr(), []
    for pages in allocator.pages.values():
        arrays += pages.tensors().values() if isinstance(pages, PagedCache) else pages
    spans = sorted((x.data_ptr() - begin, x.data_ptr() - begin + x.nbytes) for x in arrays)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert 0 <= spans[0][0] and spans[-1][1] <= memory.nbytes
    width, heads, blocks = 8, 2, arrays[0].shape[0]
    nsa = (3 * 16 + 4) * heads * 2 * width * 4
    dense = 16 * heads * 2 * width * 4
    assert sum(x.nbytes for x in arrays) == blocks * (
        nsa + (nsa if kinds[1] == "nsa" else dense)
    )
    for more in ({}, {"warmup": True}):
        with pytest.raises(MemoryError, match="more than available memory"):
            lm.generate_batch(prompts()[:1], **options(lm, blocks=1 << 40), **more)
        assert lm.config._attn_implementation == "sdpa"  # as before


def test_another_manager_is_refused(monkeypatch):
    """One whose allocators have other methods, or none; `generate` runs with it."""
    monkeypatch.setattr(compatibility, "FullAttentionCacheAllocator", object)
    lm = model()
    for call in (
        lambda: lm.generate_batch([[1, 2]]),
        lambda: continuous_batching_config(lm.config),
        lambda: serve.words(["checkpoint", "--continuous-batching"]),
    ):
        with pytest.raises(
            NotImplementedError, match=r"transformers 5\.19 to 5\.\d+, got 5\.\d"
        ):
            call()
    assert lm.config._attn_implementation == "sdpa" and alone(lm, [1, 2], 1)
    with pytest.raises(SystemExit, match=r"transformers 5\.19 to 5\.\d+, got 5\.\d"):
        serve.main(["checkpoint", "--continuous-batching"])


@served
def test_a_checkpoint_is_served(tmp_path, monkeypatch):
    """By the classes of `transformers serve`, without its HTTP."""
    model().save_pretrained(tmp_path)
    given = [str(tmp_path), "--continuous-batching"]
    assert serve.words(given) == ["serve", *given, "--cb-block-size", "16"]
    for own in ([*given, "--cb-block-size=8"], given[:1], ["--help"]):
        assert serve.words(own) == ["serve", *own]
    with pytest.raises(SystemExit, match="missing"):
        serve.main([str(tmp_path / "missing"), "--continuous-batching"])
    assert_served(tmp_path, monkeypatch, "cpu", prompts()[1])


@pytest.mark.gpu
@served
def test_a_checkpoint_is_served_on_a_gpu(tmp_path, monkeypatch):
    sizes = dict(compress_block=32, compress_stride=16, select_block=64, window=64, head_dim=64)
    model(**sizes).save_pretrained(tmp_path)
    prompt = torch.randint(1, 97, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_served(tmp_path, monkeypatch, "cuda:0", prompt)


def assert_served(folder, monkeypatch, device, prompt):
    # So that what `register` sets in transformers is undone afterwards.
    monkeypatch.setattr(model_manager.transformers, "NSAForCausalLM", None, raising=False)
    serve.register()
    models = model_manager.ModelManager(device=device)
    loaded = models._load_model(models.process_model_name(str(folder)))
    assert type(loaded) is NSAForCausalLM
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    page = loaded.config.select_block
    manager = CBGenerateManager(ContinuousBatchingConfig(page_size=page, num_blocks=40))
    manager.init_cb(loaded, greedy)
    try:
        raw = SimpleNamespace(decode=lambda tokens, **_: tokens)
        call = manager.generate_non_streaming(loaded, raw, {"input_ids": prompt}, greedy, "a")
        assert asyncio.run(call)[0] == alone(loaded, prompt)
    finally:
        manager.stop()


@served
def test_bad_configurations():
    lm = model()
    config = lm.config
    for name in ("page_size", "block_size"):
        with pytest.raises(ValueError, match="page_size must be select_block=16, got 32"):
            continuous_batching_config(config, **{name: 32})
    with pytest.raises(ValueError, match="cpu_offload_space must be 0"):
        continuous_batching_config(config, cpu_offload_space=1.0)
    with pytest.raises(
        ValueError, match=r"use_cuda_graph must be None, a bool or \(False, bool"
    ):
        continuous_batching_config(config, use_cuda_graph=(True, True))
    mixed = Branches(None, "sdpa", None)
    with pytest.raises(NotImplementedError, match="all branches by one implementation, got"):
        paged_layer.one_name(mixed)
    assert paged_layer.one_name(Branches.each("sdpa")) == "sdpa"
    with pytest.raises(ValueError, match="flash_nsa is for generate_batch alone"):
        continuous.dense_attention(None, *[torch.zeros(1)] * 4)


@served
def test_bad_calls():
    lm = model()
    wrong = ContinuousBatchingConfig(page_size=32)
    with pytest.raises(
        ValueError, match=r"select_block=16, got 32: pass continuous_batching_c"
    ):
        lm.generate_batch([[1, 2]], continuous_batching_config=wrong)
    make = functools.partial(
        cache_allocator.NSACacheAllocator,
        index=0,
        config=lm.config,
        cache_dtype=torch.float32,
        layer_indices=[0, 1],
        allow_block_sharing=True,
    )
    with pytest.raises(ValueError, match="page_size must be select_block=16, got 8"):
        make(num_key_value_heads=2, page_size=8)
    with pytest.raises(NotImplementedError, match="all 2 key/value heads, got 1"):
        make(num_key_value_heads=1, page_size=16)


@pytest.mark.gpu
@served
def test_answers_are_those_of_generate_on_a_gpu():
    """Both in float32, on kernels; the last prompt begins with three pages of the first. Decode
    steps are CUDA graphs, which the manager captures for each number of rows.
    """
    sizes = dict(compress_block=32, compress_stride=16, select_block=64, window=64, head_dim=64)
    made = model(**sizes).to("cuda")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (300, 70, 5)]
    texts.append(texts[0][:192] + [3, 4])
    for graph in (True, False):
        found = generated(made, texts, batch=128, more={"use_cuda_graph": graph})
        for text, result in zip(texts, found, strict=True):
            assert result.generated_tokens == alone(made, text), (graph, len(text))
            want = log_probabilities(made, text, result.generated_tokens).cpu()
            torch.testing.assert_close(torch.tensor(result.logprobs), want, rtol=0, atol=1e-3)


@pytest.mark.gpu
@served
def test_what_is_queued_is_done_before_the_manager_begins():
    """It has streams of its own: the weights here are there a second later."""
    sizes = dict(compress_block=32, compress_stride=16, select_block=64, window=64, head_dim=64)
    made, texts = model.__wrapped__(**sizes).to("cuda"), [[7, 8, 9] * 30, [5]]
    want = [alone(made, text) for text in texts]
    weights = [(x, x.detach().clone(), x.data.zero_()) for x in made.parameters()]
    torch.cuda._sleep(2 * 10**9)
    for x, kept, _ in weights:
        x.data.copy_(kept)
    found = generated(made, texts, batch=128)
    assert [x.generated_tokens for x in found] == want


@served
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, False), ({"warmup": True}, True), ({"persistent_manager": True}, True)],
    ids=str,
)
def test_what_warms_up_first(given, expected, monkeypatch):
    """A manager of one call does so where it is asked to: its graphs can wait for their steps."""
    seen = []
    manager = continuous_api.ContinuousBatchingManager
    monkeypatch.setattr(manager, "warmup", lambda self: seen.append(self))
    lm = model.__wrapped__()
    lm.generate_batch([[1, 2, 3]], **options(lm, tokens=2), **given)
    assert bool(seen) == expected
    if "persistent_manager" in given:
        lm.destroy_cached_continuous_batching_manager()


@served
def test_a_manager_that_persists_serves_the_weights_of_now():
    """It keeps prefixes from call to call, which were computed by the weights before a step."""
    lm, prompt = model.__wrapped__(), prompts()[1]
    call = lambda: [
        *lm.generate_batch([prompt], persistent_manager=True, **options(lm)).values()
    ]
    kept = lambda: lm._cached_continuous_batching_manager
    try:
        for change in (None, "step", "other tensors"):
            before = call() and kept()
            if change == "step":
                lm(torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
                torch.optim.SGD(lm.parameters(), lr=10.0).step()
            elif change == "other tensors":
                lm.load_state_dict(model().state_dict(), assign=True)
            (result,) = call()
            same_as_alone(lm, prompt, result)
            assert (kept() is before) == (change is None)
    finally:
        lm.destroy_cached_continuous_batching_manager()


@served
@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([], "list of tokens, at least one, got []"),
        ("text", "list of tokens, at least one, got 'text'"),
        ([1, 97], "tokens in 0..96 (vocab_size), got 97"),
        ([-1], "tokens in 0..96 (vocab_size), got -1"),
        ([1.5], "tokens in 0..96 (vocab_size), got 1.5"),
    ],
    ids=str,
)
def test_a_prompt_that_is_wrong(prompt, found):
    """Before anything runs: in a step it would end the requests beside it."""
    lm = model()
    with pytest.raises(ValueError, match=re.escape("inputs[1] must")) as error:
        lm.generate_batch([[1, 2], prompt], **options(lm))
    assert found in str(error.value)
    manager = lm.init_continuous_batching(**options(lm))
    with pytest.raises(ValueError, match="input_ids must") as error:
        manager.add_request(prompt)
    assert found in str(error.value)
    manager.stop()


@served
def test_sizes_and_modes_that_are_refused():
    lm = model()
    for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, or None, got 0"):
            continuous_batching_config(lm.config, **{name: 0})
    with pytest.raises(ValueError, match="num_beams must be 1"):
        lm.generate_batch([[1, 2]], **options(lm, num_beams=2))

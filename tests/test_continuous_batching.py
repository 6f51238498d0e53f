"""`generate_batch` of transformers over paged caches: the text of `generate`, row by row."""

import functools
import weakref

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from nsa_core.types import Branches
from nsa_torch import paged_attend
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModelConfig,
    continuous,
    continuous_batching_config,
    paged_layer,
)

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    compress_block=8,
    compress_stride=4,
    select_block=16,
    num_selected=3,
    num_local=1,
    window=9,
    initializer_range=0.2,
    pad_token_id=0,
)
LENGTHS = (5, 40, 23)
served = pytest.mark.skipif(
    not hasattr(PagedAttentionCache, "copy_cache"),
    reason="generate_batch is refused above transformers 5.17 (test_another_manager_is_refused)",
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


def generated(model, prompts, tokens=6, name="paged|nsa", batch=24, **options):
    """New tokens of each request, in their order."""
    options = {"do_sample": False, "eos_token_id": -1} | options
    greedy = GenerationConfig(max_new_tokens=tokens, **options)
    sizes = {"num_blocks": 40, "max_batch_tokens": batch, "allow_block_sharing": True}
    model.set_attn_implementation(name)
    try:
        found = model.generate_batch(
            prompts,
            generation_config=greedy,
            continuous_batching_config=continuous_batching_config(model.config, **sizes),
        )
    finally:
        model.set_attn_implementation("sdpa")
    assert all(x.error is None for x in found.values()), [x.error for x in found.values()]
    return found


def alone(model, prompt, tokens=6):
    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False)
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, generation_config=greedy)
    return out[0, len(prompt) :].tolist()


@served
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": ("nsa", "dense"), "phi": "mlp"},
        {"phi": "mlp_rope", "gate": "head"},
        {"phi": "mlp_pe", "kv": "shared"},
    ],
    ids=["nsa", "with a dense layer and learned phi", "rotated after phi", "shared"],
)
def test_text_is_that_of_generate(changes):
    """Prompts longer than a step (24 tokens), shorter ones and decode in the same steps."""
    changes = {k: list(x) if isinstance(x, tuple) else x for k, x in changes.items()}
    lm = model.__wrapped__(**changes)
    found = generated(lm, prompts())
    for i, prompt in enumerate(prompts()):
        assert found[f"req_{i}"].generated_tokens == alone(lm, prompt), i


@served
def test_the_default_implementation_runs_too():
    lm, prompt = model(), prompts()[1]
    found = generated(lm, [prompt], name="sdpa")
    assert found["req_0"].generated_tokens == alone(lm, prompt)


@served
def test_prefixes_are_shared_and_forks_copied(monkeypatch):
    """What NSA keeps besides transformers' keys and values follows them."""
    lm, prompt = model(), prompts()[1]
    shared, copied = [], []
    search = PagedAttentionCache.search_prefix_match
    copy = continuous.PagedCache.copy_pages

    def searching(self, *arguments):
        shared.append(search(self, *arguments))
        return shared[-1]

    def copying(self, source, target):
        copied.extend(zip(source.tolist(), target.tolist(), strict=True))
        copy(self, source, target)

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", searching)
    monkeypatch.setattr(continuous.PagedCache, "copy_pages", copying)
    # The second begins when the first has ended: one request a step.
    both = [prompt, prompt[:33] + [5, 6]]
    found = generated(lm, both, batch=16)
    for i, each in enumerate(both):
        assert found[f"req_{i}"].generated_tokens == alone(lm, each)
    assert max(shared) >= 16
    # Two continuations of one prompt, in pages of their own from the fork on; both greedy.
    # (generate_batch leaves out those that were forked.)
    found, get = {}, continuous_api.ContinuousBatchingManager.get_result

    def getting(self, *arguments, **options):
        result = get(self, *arguments, **options)
        if result is not None and result.is_finished():
            found[result.request_id] = result.generated_tokens
        return result

    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "get_result", getting)
    generated(lm, [prompt], num_return_sequences=2, do_sample=True, top_k=1)
    assert copied and list(found.values()) == [alone(lm, prompt)] * 2


@served
def test_a_step_of_one_token_a_row_is_a_decode_step(monkeypatch):
    """What the kernels on pages take: no bounds of rows."""
    seen, choose = set(), paged_attend.paged_dispatch.choose

    def choosing(registry, attention, problem, name):
        seen.add((problem.packed, problem.T))
        return choose(registry, attention, problem, name)

    monkeypatch.setattr(paged_attend.paged_dispatch, "choose", choosing)
    generated(model(), prompts()[:2], tokens=4)
    assert {(True, 0), (False, 1)} <= seen


@served
def test_pages_go_with_the_manager():
    assert isinstance(continuous._pages, weakref.WeakKeyDictionary)
    generated(model(), prompts()[:1], tokens=2)
    assert not list(continuous._pages)


def test_another_manager_is_refused(monkeypatch):
    """That of later versions, which copies pages by another function."""
    monkeypatch.delattr(PagedAttentionCache, "copy_cache", raising=False)
    with pytest.raises(NotImplementedError, match=r"transformers 5\.17, got \d"):
        continuous_batching_config(model().config)
    with pytest.raises(NotImplementedError, match="keeps its pages in another order"):
        model().generate_batch([[1, 2]])


@served
def test_bad_configurations():
    config = model().config
    with pytest.raises(ValueError, match="block_size must be select_block=16, got 32"):
        continuous_batching_config(config, block_size=32)
    with pytest.raises(ValueError, match="cpu_offload_space must be 0"):
        continuous_batching_config(config, cpu_offload_space=1.0)
    whole = continuous_batching_config(config, max_memory_percent=0.65)
    assert whole.max_memory_percent == pytest.approx(0.2)  # of 3 1/4 times as much
    once = continuous_batching_config(
        model.__wrapped__(kv="shared").config, max_memory_percent=0.65
    )
    assert once.max_memory_percent == pytest.approx(0.52)  # of 1 1/4

    class Manager:
        block_size = 256

    bounds = torch.tensor([0, 1])
    sizes = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_seqlen_q": 1,
        "max_seqlen_k": 1,
        "read_index": [],
        "write_index": [],
    }
    with pytest.raises(ValueError, match=r"select_block=16, got 256: pass continuous_batching"):
        continuous.ContinuousBatch(config, bounds, None, cache=Manager(), **sizes)
    mixed = Branches(None, "sdpa", None)
    with pytest.raises(NotImplementedError, match="all branches by one implementation, got"):
        paged_layer.one_name(mixed)
    assert paged_layer.one_name(Branches.each("sdpa")) == "sdpa"
    with pytest.raises(ValueError, match="attends from pages"):
        continuous.dense_attention(None, *[bounds] * 4)


@pytest.mark.gpu
@served
def test_text_is_that_of_generate_on_a_gpu():
    """Both in float32, on kernels; the last prompt begins with three pages of the first."""
    sizes = dict(compress_block=32, compress_stride=16, select_block=64, window=64, head_dim=64)
    made = model(**sizes).to("cuda")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (300, 70, 5)]
    texts.append(texts[0][:192] + [3, 4])
    found = generated(made, texts, batch=128)
    for text, result in zip(texts, found.values(), strict=True):
        assert result.generated_tokens == alone(made, text), len(text)

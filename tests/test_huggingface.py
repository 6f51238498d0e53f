"""The Hugging Face model: rows alone, a model by plain loops, transformers' own machinery."""

import copy
import dataclasses
import functools
import importlib.metadata
import itertools
import json

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

import nsa_torch
from bench.judge.parity import FLOAT32_MAX
from bench.lm.spec import ModelSpec
from bench.lm.torch_lm import LM
from nsa_core import extras
from nsa_core.layer import LayerSpec
from nsa_interop import weights
from nsa_torch import geometry
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModel,
    NSAModelCache,
    NSAModelConfig,
    NSAPagedModelCache,
    from_safetensors,
    to_safetensors,
)
from nsa_torch.huggingface.compatibility import CACHE
from nsa_torch.huggingface.rows import Rows
from tests import loops

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    v_head_dim=6,
    compress_block=8,
    compress_stride=4,
    select_block=8,
    num_selected=3,
    num_local=1,
    window=7,
    pad_token_id=0,
)
# The layers of each model, its phi, its gates and its keys and values.
KINDS = {
    "nsa": ("nsa", "mlp", "sigmoid", "separate"),
    "dense": ("dense", "avg", "sigmoid", "separate"),
    "mixed": (["nsa", "dense"], "mlp_rope", "head", "separate"),
    "shared": (["nsa", "dense"], "mlp", "head", "shared"),
    "pooled": (["nsa", "dense"], "mlp", "sigmoid", "separate"),
}
WIDTH = 41
PADDING = (0, 13, 30, 38)  # of each row of `batch`; 3 tokens are fewer than a block

# Newer transformers calls it activation checkpointing.
renamed = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
by_kind = pytest.mark.parametrize("kind", ["nsa", "dense", "mixed", "shared"])


@functools.cache
def model(kind="nsa", **changed):
    """Weights of some size, so that a wrong position or block shows."""
    kinds = dict(zip(("attention", "phi", "gate", "kv"), KINDS[kind], strict=True))
    torch.manual_seed(7)
    made = NSAForCausalLM(NSAModelConfig(**SIZES | kinds | changed))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return made.eval()


def tokens(rows=4, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, (rows, width), generator=generator)


def left_padded(padding=PADDING):
    """Tokens and their mask."""
    mask = (torch.arange(WIDTH) >= torch.tensor(padding)[:, None]).long()
    return tokens(len(padding)) * mask, mask


def alone(model, ids, padding=PADDING):
    """Logits of each row of left-padded `ids` without its padding, uncached."""
    pairs = zip(ids, padding, strict=True)
    return [model(row[None, n:], use_cache=False).logits[0] for row, n in pairs]


def difference(got, rows):
    """Of padded logits to those of the rows alone, at the rows' own tokens."""
    pairs = zip(got, rows, strict=True)
    return max(float((x[len(x) - len(y) :] - y).abs().max()) for x, y in pairs)


@by_kind
@torch.no_grad()
def test_cached_equals_uncached(kind):
    ids = tokens(2)
    whole = model(kind)(ids, use_cache=False).logits
    for splits in ([WIDTH], [20, 1, 7, 13], [30] + [1] * 11):
        cache, parts = None, []
        for part in ids.split(splits, dim=1):
            out = model(kind)(part, cache=cache, use_cache=True)
            cache = out[CACHE]
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=FLOAT32_MAX)
        assert cache.get_seq_length() == WIDTH and cache.lengths.tolist() == [WIDTH] * 2


def steps(model, ids, mask, splits, cache=None, between=lambda cache: None):
    """Logits of left-padded `ids` through the cache, chunk after chunk, and `between` them."""
    cache = NSAModelCache(model.config) if cache is None else cache
    begin, parts = 0, []
    for size in splits:
        end = begin + size
        if begin:
            between(cache)
        options = dict(attention_mask=mask[:, :end], cache=cache)
        parts.append(model(ids[:, begin:end], **options).logits)
        begin = end
    return torch.cat(parts, dim=1), cache


@by_kind
@torch.no_grad()
def test_left_padding_computes_what_the_row_does_alone(kind):
    ids, mask = left_padded()
    rows = alone(model(kind), ids)
    got = model(kind)(ids, attention_mask=mask, use_cache=False)
    assert difference(got.logits, rows) < FLOAT32_MAX
    # Chunks in which a row has no token yet, or begins.
    for splits in ([WIDTH], [20, 15, 6], [35, 1, 1, 1, 1, 2]):
        logits, cache = steps(model(kind), ids, mask, splits)
        assert difference(logits, rows) < FLOAT32_MAX
        assert cache.lengths.tolist() == mask.sum(1).tolist()
    # Hidden states stand where the tokens do.
    hidden = model(kind)(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    other = model(kind)(ids[1:2, 13:], output_hidden_states=True).hidden_states
    for x, y in zip(hidden, other, strict=True):
        assert difference(x[1:2], y) < FLOAT32_MAX


@pytest.mark.parametrize("shift", ["to the padding", "a token early"])
@torch.no_grad()
def test_a_block_grid_that_starts_before_the_row_is_seen(shift, monkeypatch):
    ids, mask = left_padded()
    rows = alone(model(), ids)

    def moved(method):
        def run(self, x):
            first = None if shift == "to the padding" else (self.first - 1).clamp(min=0)
            return method(self._replace(first=first), x)

        return run

    for name in ("align", "restore"):
        monkeypatch.setattr(Rows, name, moved(getattr(Rows, name)))
    got = model()(ids, attention_mask=mask, use_cache=False).logits
    assert difference(got, rows) > 100 * FLOAT32_MAX


@by_kind
@torch.no_grad()
def test_a_row_is_bitwise_the_same_whatever_the_padding_of_others(kind):
    ids, mask = left_padded()
    other, fewer = left_padded((0, 0, 5, 38))
    run = functools.partial(model(kind), use_cache=False)
    pair = (run(ids, attention_mask=mask).logits, run(other, attention_mask=fewer).logits)
    assert torch.equal(pair[0][0], pair[1][0]) and torch.equal(pair[0][3, 38:], pair[1][3, 38:])
    full = run(ids[:1]).logits
    assert torch.equal(full, run(ids[:1], attention_mask=mask[:1]).logits)


def rotated(x, base):
    """Rotary embedding of `x` [T, H, D] by complex numbers."""
    T, _, D = x.shape
    turns = np.exp(1j * np.arange(T)[:, None] * base ** (-np.arange(0, D, 2) / D))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turns[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def silu(x):
    return x / (1 + np.exp(-x))


def attention_by_hand(config, kind, h, at):
    """An attention layer's output for `h` [T, hidden_size]; `at`: its weights by name."""
    heads, groups, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    base = config.rope_parameters["rope_theta"]
    rules = loops.Rules(config.layer_spec.config)

    def product(name, count):
        return (h @ at[f"{name}.weight"].T).reshape(len(h), count, -1)

    def fc(x, name):
        return x @ at[f"{name}.weight"].T + at[f"{name}.bias"]

    query = rotated(product("W_Q", heads), base)
    if kind == "dense":
        key, value = rotated(product("W_K", groups), base), product("W_V", groups)
        p, _ = loops.softmax(query, key, lambda t, g, u: u <= t, rules)
        out = loops.weigh(p, value, rules)
    else:
        names = "cmp", "sel", "win"
        keys = [rotated(product(f"W_K_{name}", groups), base) for name in names]
        values = [product(f"W_V_{name}", groups) for name in names]
        if config.gate == "head":
            logits = fc(h, "gate").reshape(len(h), heads, 3)
        else:
            pooled = query.reshape(len(h), groups, -1, D).mean(2)
            logits = fc(silu(fc(pooled, "gate.fc1")), "gate.fc2")
            logits = logits.repeat(heads // groups, axis=1)
        gates = 1 / (1 + np.exp(-logits))
        params = [(at[f"phi_{x}_conv.weight"][:, 0].T,) for x in "kv"]
        out = loops.attention(query, keys, values, gates, rules, params=params).out
    return out.reshape(len(h), -1) @ at["out.weight"].T


def by_hand(made, ids):
    """Logits of one row in float64, from the equations: no code of the model's."""
    config, at = made.config, {k: v.double().numpy() for k, v in made.state_dict().items()}

    def norm(x, name):
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x / rms * at[f"{name}.weight"]

    x = at["model.embed_tokens.weight"][ids]
    for i, kind in enumerate(config.layer_attention):
        name = f"model.layers.{i}"
        own = f"{name}.self_attn."
        of_layer = {k.removeprefix(own): v for k, v in at.items() if k.startswith(own)}
        x = x + attention_by_hand(config, kind, norm(x, f"{name}.input_layernorm"), of_layer)
        h = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (h @ at[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (silu(gate) * up) @ at[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ at["lm_head.weight"].T


@pytest.mark.parametrize("gate", ["sigmoid", "head"])
@torch.no_grad()
def test_the_equations_by_plain_loops(gate):
    """A layer of each kind, a left-padded row. Blocks of the first layer are chosen by score."""
    made = model("pooled", gate=gate)
    ids, mask = left_padded((0, 13))
    want = by_hand(made, ids[1, 13:].numpy())
    got = made(ids, attention_mask=mask).logits[1, 13:].double().numpy()
    assert np.abs(got - want).max() < FLOAT32_MAX
    assert np.abs(want).max() > 0.5


@by_kind
def test_right_padding_in_training(kind):
    """Loss and gradients are those of the rows alone."""
    made = copy.deepcopy(model(kind)).double().train()
    ids = tokens(3)
    mask = (torch.arange(WIDTH) < torch.tensor([[WIDTH], [3], [20]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    out = made(ids * mask, attention_mask=mask, labels=labels)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)  # theirs is in float32
    loss.backward()
    got = [parameter.grad.clone() for parameter in made.parameters()]
    made.zero_grad()
    total, count = 0.0, 0
    for row, n in zip(ids, mask.sum(1).tolist(), strict=True):
        logits = made(row[None, :n]).logits[0]
        total = total + F.cross_entropy(logits[:-1], row[1:n], reduction="sum")
        count += n - 1
    (total / count).backward()
    for x, parameter in zip(got, made.parameters(), strict=True):
        torch.testing.assert_close(x, parameter.grad, rtol=1e-9, atol=1e-12)


@by_kind
@torch.no_grad()
def test_packed_rows(kind):
    ids, bounds = tokens(1), [0, 3, 20, WIDTH]
    pieces = [ids[:, a:b] for a, b in itertools.pairwise(bounds)]
    want = torch.cat([model(kind)(x, use_cache=False).logits for x in pieces], dim=1)
    position = torch.cat([torch.arange(x.shape[1]) for x in pieces])[None]
    run = functools.partial(model(kind), ids, use_cache=False)
    borders = torch.tensor(bounds, dtype=torch.int32)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    collated = collator([{"input_ids": x[0].tolist()} for x in pieces])
    assert torch.equal(collated.pop("input_ids"), ids) and {"max_length_q"} < collated.keys()
    names = "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"
    for options in (
        dict(position_ids=position),
        dict(seq_idx=collated["seq_idx"]),
        *({name: borders} for name in names),
        collated,
    ):
        for more in ({}, {"use_cache": None}):  # a cache is made of other rows alone
            found = run(**options | more)
            torch.testing.assert_close(found.logits, want, rtol=0, atol=FLOAT32_MAX)
            assert found.get(CACHE) is None


def test_packed_rows_are_found_once(monkeypatch):
    """Where the tokens of a packed row stand is worked out once for all layers, and for what
    checkpointing computes again.
    """
    ids, bounds = tokens(1), torch.tensor([0, 3, 20, WIDTH], dtype=torch.int32)
    made, found = model("nsa"), []
    of_borders = geometry._packed_places
    counted = lambda *arguments, **sizes: found.append(sizes) or of_borders(*arguments, **sizes)
    monkeypatch.setattr(geometry, "_packed_places", counted)
    run = lambda: made(ids, cu_seq_lens_q=bounds, labels=ids).loss
    want = torch.autograd.grad(run(), list(made.parameters()), allow_unused=True)
    assert len(made.model.layers) == 2 and len(found) == 2  # of tokens, and of windows
    # Since 5.24 by another name.
    what = "activation" if hasattr(made, "activation_checkpointing_enable") else "gradient"
    getattr(made, f"{what}_checkpointing_enable")()
    made.train()
    try:
        got = torch.autograd.grad(run(), list(made.parameters()), allow_unused=True)
    finally:
        getattr(made, f"{what}_checkpointing_disable")()
        made.eval()
    assert len(found) == 4
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.allclose(x, y, atol=1e-6))


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=False),
        dict(do_sample=True, top_k=8),
        dict(num_beams=3, num_return_sequences=2, do_sample=False),
        dict(do_sample=False, cache_implementation="static"),
        dict(do_sample=False, prefill_chunk_size=16),
    ],
    ids=["greedy", "sampling", "beams", "static", "chunks"],
)
@pytest.mark.parametrize("kind", ["nsa", "mixed"])
def test_generate(kind, options):
    """Through the cache as without it; a padded row as alone."""
    made, new = model(kind), 12
    ids, mask = left_padded((0, 13, 38))

    def generate(ids, mask, **more):
        torch.manual_seed(3)
        return made.generate(ids, attention_mask=mask, max_new_tokens=new, **options | more)

    got = generate(ids, mask)
    assert got.shape[1] == WIDTH + new
    off = dict(cache_implementation=None, prefill_chunk_size=None, use_cache=False)
    assert torch.equal(got, generate(ids, mask, **off))
    if options["do_sample"]:
        return
    per_row = options.get("num_return_sequences", 1)
    for row, n in enumerate((0, 13, 38)):
        short = generate(ids[row : row + 1, n:], None)
        mine = got[row * per_row : (row + 1) * per_row, n:]
        assert torch.equal(short, mine)


@by_kind
def test_generate_with_guesses_takes_them_back(kind):
    """Prompt lookup appends guesses to the cache and crops the wrong ones."""
    ids = tokens(1, 12).repeat(1, 3)
    plain = model(kind).generate(ids, max_new_tokens=24, do_sample=False)
    cropped = []

    class Watched(NSAModelCache):
        def crop(self, count):
            cropped.append(count)
            super().crop(count)

    cache = Watched(model(kind).config)
    guessed = model(kind).generate(
        ids,
        max_new_tokens=24,
        do_sample=False,
        prompt_lookup_num_tokens=4,
        cache=cache,
    )
    assert torch.equal(plain, guessed) and min(cropped) < 0
    assert type(cache.get_seq_length()) is int  # transformers counts guesses in a tensor


@by_kind
@torch.no_grad()
def test_operations_on_a_cache(kind):
    made = model(kind)
    ids, mask = left_padded((0, 13))
    following = tokens(2, 9, seed=1)
    after = torch.ones(2, 9, dtype=torch.long)

    def go_on(cache, rows):
        return made(
            following[rows],
            attention_mask=torch.cat([mask, after], 1)[rows],
            cache=cache,
        ).logits

    def fresh():
        return steps(made, ids, mask, [WIDTH])[1]

    want = go_on(fresh(), [0, 1])
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    ):
        cache = fresh()
        change(cache)
        assert cache.batch_size == len(rows)
        torch.testing.assert_close(go_on(cache, rows), want[rows], rtol=0, atol=FLOAT32_MAX)
    cache = NSAModelCache(made.config)
    cache.activate_past_recording()
    made(ids, attention_mask=mask, cache=cache)
    for count in (9, 4):  # twice, the second time less than was appended
        go_on(cache, [0, 1])
        cache.crop(-count)
        if count < 9:
            options = dict(cache=cache)
            rest = made(following[:, 9 - count :], **options).logits
            torch.testing.assert_close(rest, want[:, 9 - count :], rtol=0, atol=FLOAT32_MAX)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = made(ids, attention_mask=mask, cache=cache)
    assert difference(again.logits, alone(made, ids, (0, 13))) < FLOAT32_MAX


@by_kind
def test_a_row_of_padding_alone(kind):
    """Its first token follows no attention at all, the others what was generated; other rows
    are continued as they would be alone. Whatever the cache.
    """
    made = model(kind)
    ids, mask = left_padded((5, WIDTH, 30))
    count = dict(max_new_tokens=7, do_sample=False)
    generate = functools.partial(made.generate, ids, attention_mask=mask, **count)
    want = generate(use_cache=False)
    for options in (
        dict(),
        dict(cache_implementation="static"),
        dict(prefill_chunk_size=10),
        dict(cache=NSAPagedModelCache(made.config, 3, 64)),
        dict(cache=NSAPagedModelCache(made.config, 3, 64), prefill_chunk_size=10),
    ):
        assert torch.equal(generate(**options), want)
    for row, n in ((0, 5), (2, 30)):
        assert torch.equal(made.generate(ids[row, None, n:], **count)[0], want[row, n:])
    empty = want[1, WIDTH:]
    rest = made.generate(empty[None, :1], max_new_tokens=6, do_sample=False)
    assert torch.equal(rest[0], empty)
    assert torch.equal(made.generate(ids[1:2], attention_mask=mask[1:2], **count)[0], want[1])
    decoder = made.model
    with torch.no_grad():
        x = decoder.embed_tokens(ids[1, -1])
        for layer in decoder.layers:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        assert made.lm_head(decoder.norm(x)).argmax() == empty[0]


class Quantized(torch.nn.Module):
    """A linear layer with weights of 8 bits, as of libraries for quantization."""

    def __init__(self, linear, dtype):
        super().__init__()
        scale = linear.weight.abs().amax() / (127 if dtype == torch.int8 else 448)
        weight = (linear.weight / scale).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale.detach())

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def quantized(made, how):
    """A copy of the model whose linear layers but the head's are quantized."""
    made = copy.deepcopy(made)
    if how == "quantize_dynamic":
        return torch.ao.quantization.quantize_dynamic(made, {torch.nn.Linear})
    for module in list(made.model.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, torch.nn.Linear):
                setattr(module, name, Quantized(linear, how))
    return made


@pytest.mark.parametrize(
    "how", ["quantize_dynamic", torch.int8, torch.float8_e4m3fn], ids=lambda x: str(x)
)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.* are deprecated:UserWarning")
def test_quantized_linears(how):
    """A cache holds what the projections return, not what the weights are stored as."""
    made, dynamic = quantized(model("mixed"), how), how == "quantize_dynamic"
    # There a token's scale is that of all tokens of its call, padding too.
    padding = (0, 0) if dynamic else (0, 13)
    ids, mask = left_padded(padding)
    count = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    want = made.generate(ids, use_cache=False, **count)
    with torch.no_grad():
        once, exact = (x(ids, attention_mask=mask).logits for x in (made, model("mixed")))
    rough = (once - exact).abs().mean()
    caches = NSAModelCache(made.config), NSAPagedModelCache(made.config, 2, 64)
    for cache in caches:
        text = made.generate(ids, cache=cache, **count)
        assert text.shape == want.shape if dynamic else torch.equal(text, want)
        cache.reset()
        with torch.no_grad():
            logits = made(ids, attention_mask=mask, cache=cache).logits
        own = mask.bool()
        assert (logits - once)[own].abs().mean() < rough / (4 if dynamic else 1000)
    assert caches[0].layers[0].state.selected_key.dtype == torch.float32
    layer = made.model.layers[0].self_attn
    assert layer.init_cache(1, 8).selected_key.dtype == torch.float32
    assert layer.init_cache(1, 8, torch.bfloat16, "meta").selected_key.device.type == "meta"


def test_a_prompt_that_its_cache_has_seen():
    made, ids = model(), tokens(2)
    for cache in (NSAModelCache(made.config), NSAPagedModelCache(made.config, 2, 64)):
        with torch.no_grad():
            made(ids, cache=cache)
        with pytest.raises(
            ValueError, match=r"longer than the 41 tokens that cache has seen.*41"
        ):
            made.generate(ids, cache=cache, max_new_tokens=2)
        with pytest.raises(ValueError, match="longer than the 41 tokens that cache has seen"):
            made.generate(ids[:, -1:], cache=cache, max_new_tokens=2)
        more = torch.cat([ids, ids[:, :1]], dim=1)
        options = dict(max_new_tokens=2, do_sample=False)
        assert torch.equal(
            made.generate(more, cache=cache, **options), made.generate(more, **options)
        )
        with pytest.raises(ValueError, match=r"cache must have batch_size=1, .*, got 2"):
            made.generate(more[:1], cache=cache, max_new_tokens=2)
    # As long as its cache's room: one token comes of it, and more are refused at once.
    cache = NSAModelCache(made.config, WIDTH)
    with pytest.raises(
        ValueError, match="capacity for 42 tokens, all of max_length but the last"
    ):
        made.generate(ids, cache=cache, max_new_tokens=2)
    assert cache.lengths is None
    assert made.generate(ids, cache=cache, max_new_tokens=1).shape == (2, WIDTH + 1)


@torch.no_grad()
def test_a_cache_in_which_a_call_did_not_end():
    """Layers before the one that failed have its tokens, the others not."""
    made, ids = model("mixed"), tokens(2)
    cache = NSAModelCache(made.config)
    made(ids[:, :20], cache=cache)

    def interrupted(*_):
        raise KeyboardInterrupt

    hook = made.model.layers[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(ids[:, 20:], cache=cache)
    hook.remove()
    with pytest.raises(
        ValueError, match=r"same tokens in all layers, .*got \[41, 20\] columns"
    ):
        made(ids[:, 20:], cache=cache)
    cache.reset()
    again = made(ids, cache=cache).logits
    assert torch.equal(again, made(ids, use_cache=True).logits)


@torch.no_grad()
def test_a_cache_of_a_call_that_failed_after_its_last_attention():
    """All layers have its tokens then. Of one that is refused before, none has."""
    made, ids = model("mixed"), tokens(2)
    cache = NSAModelCache(made.config, WIDTH)
    made(ids[:, :20], cache=cache)
    with pytest.raises(ValueError, match="cache capacity"):
        made(ids, cache=cache)
    made(ids[:, 20:30], cache=cache)

    def interrupted(*_):
        raise KeyboardInterrupt

    hook = made.model.layers[-1].mlp.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(ids[:, 30:35], cache=cache)
    hook.remove()
    with pytest.raises(ValueError, match=r"calls that ended, got \[35, 35\] columns"):
        made(ids[:, 30:35], cache=cache)
    cache.reset()
    assert torch.equal(made(ids, cache=cache).logits, made(ids, use_cache=True).logits)


@torch.no_grad()
def test_a_crop_that_is_refused_takes_nothing_back():
    made = model("mixed", attention=("dense", "nsa"))
    cache = made(tokens(2))[CACHE]
    with pytest.raises(ValueError, match=r"count must be in 0\.\.0"):
        cache.crop(-1)
    assert [x.get_seq_length() for x in cache.layers] == [WIDTH, WIDTH]


@by_kind
@torch.no_grad()
def test_capacity(kind):
    made, ids = model(kind), tokens(2, 64)
    whole = made(ids, use_cache=False).logits
    cache = NSAModelCache(made.config, capacity=50)
    assert cache.get_max_length() == 50
    made(ids[:, :40], cache=cache)
    with pytest.raises(ValueError, match="cache capacity is 50 tokens, got 51"):
        made(ids[:, 40:51], cache=cache)
    rest = made(ids[:, 40:50], cache=cache)  # nothing was lost
    torch.testing.assert_close(rest.logits, whole[:, 40:50], rtol=0, atol=FLOAT32_MAX)
    grows, lasts = NSAModelCache(made.config), []
    for part in tokens(2, 150, seed=2).split([60, 10, 80], dim=1):
        lasts.append(made(part, cache=grows).logits)
    assert grows.layers[0].state.capacity == 256 and grows.get_max_length() == -1
    want = made(tokens(2, 150, seed=2), use_cache=False).logits
    torch.testing.assert_close(torch.cat(lasts, 1), want, rtol=0, atol=FLOAT32_MAX)


@by_kind
def test_checkpoints(kind, tmp_path):
    made, ids = model(kind), tokens(1)
    made.save_pretrained(tmp_path)
    with torch.no_grad():
        want = made(ids, use_cache=False).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is NSAForCausalLM
        assert torch.equal(loaded(ids, use_cache=False).logits, want)
        base = AutoModel.from_pretrained(tmp_path)
        assert type(base) is NSAModel
        assert torch.equal(loaded.lm_head(base(ids, use_cache=False)[0]), want)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {x.dtype for x in low.parameters()} == {torch.bfloat16}
    assert low.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, WIDTH + 2)


def test_tied_embeddings(tmp_path):
    made = NSAForCausalLM(NSAModelConfig(**SIZES, tie_word_embeddings=True))
    assert made.lm_head.weight is made.model.embed_tokens.weight
    made.save_pretrained(tmp_path)
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, made.lm_head.weight)


def test_the_start_of_the_weights():
    """As `bench.lm.torch_lm.initialize` says, whether drawn at once or where they are missing."""
    config = NSAModelConfig(
        **SIZES | dict(hidden_size=256, intermediate_size=512), phi="mlp_pe", gate="sigmoid"
    )
    made = NSAForCausalLM(config)
    with torch.device("meta"):
        late = NSAForCausalLM(config)
    late.to_empty(device="cpu")
    for module in late.modules():
        module._is_hf_initialized = False
    late.initialize_weights()
    for each in (made, late):
        layer = each.model.layers[0]
        for linear, inputs, less in (
            (layer.self_attn.W_Q, 256, 1),
            (layer.self_attn.out, 24, 2),
            (layer.mlp.up_proj, 256, 1),
            (layer.mlp.down_proj, 512, 2),
        ):
            expected = 1 / (3 * inputs) ** 0.5 / less
            assert linear.weight.std().item() == pytest.approx(expected, rel=0.06)
        assert each.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.06)
        gate = layer.self_attn.gate
        assert not gate.fc2.bias.any() and gate.fc1.bias.any()
        assert gate.fc2.weight.abs().max().item() <= 0.1 * (6 / (4 + 3)) ** 0.5
        assert layer.self_attn.phi_k_mlp.position.std().item() == pytest.approx(0.02, rel=0.5)
        assert bool((each.model.norm.weight == 1).all())
    for start, bias in ((None, [-2, 2, 2]), ([0, 1, 3], [0, 1, 3])):
        config = NSAModelConfig(**SIZES, gate="head", gate_bias=start, initializer_range=0.5)
        gate = NSAForCausalLM(config).model.layers[1].self_attn.gate
        assert gate.bias.tolist() == bias * 4
        assert gate.weight.abs().max().item() <= 0.1 * (6 / (32 + 12)) ** 0.5
    flat = NSAForCausalLM(NSAModelConfig(**SIZES, initializer_range=0.5))
    assert flat.model.layers[0].self_attn.out.weight.std().item() == pytest.approx(0.5, rel=0.1)


LAYER = LayerSpec(
    dim=32,
    n_heads=4,
    n_kv_groups=2,
    d_k=8,
    d_v=6,
    l=8,
    d=4,
    l_sel=8,
    n_sel=3,
    w=7,
    phi="mlp",
    gate="softmax",
    gate_hidden=5,
    gate_temp=2.0,
    rope_base=1000.0,
    rope_scale=2.0,
    num_local=1,
)


GATED = dataclasses.replace(
    LAYER, gate="head", gate_hidden=None, gate_bias=(0, 1, 2), kv="shared"
)


@pytest.mark.parametrize("attention, layer", [("nsa", LAYER), ("nsa", GATED), ("dense", LAYER)])
@torch.no_grad()
def test_weights_of_a_training_run_and_back(attention, layer, tmp_path):
    torch.manual_seed(1)
    lm = LM(ModelSpec(layer, attention, layers=2, hidden=48))
    lm.embedding.normal_()
    ids, want = tokens(2), lm(tokens(2))
    weights.save(tmp_path / "run.safetensors", lm)
    made = from_safetensors(tmp_path / "run.safetensors")
    assert torch.equal(made(ids, use_cache=False).logits, want)
    # ... and back, into a model with other weights.
    for parameter in made.parameters():
        parameter.add_(0.1)
    to_safetensors(tmp_path / "back.safetensors", made)
    weights.load(tmp_path / "back.safetensors", lm)
    assert torch.equal(lm(ids), made(ids, use_cache=False).logits)
    assert not torch.equal(lm(ids), want)
    # A file without hyper-parameters needs the model named; one of another vocabulary is refused.
    tensors = safetensors.torch.load_file(tmp_path / "run.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="must state hyper_parameters"):
        from_safetensors(tmp_path / "bare.safetensors")
    from_safetensors(tmp_path / "bare.safetensors", made)
    assert torch.equal(made(ids, use_cache=False).logits, want)
    other = NSAForCausalLM(NSAModelConfig(**made.config.to_dict() | dict(vocab_size=200)))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="vocabulary must be 200 as in the module, got 256"):
        from_safetensors(tmp_path / "run.safetensors", other)
    assert all(torch.equal(x, before[key]) for key, x in other.state_dict().items())


def test_models_that_training_does_not_have(tmp_path):
    path = tmp_path / "x.safetensors"
    for made, message in (
        (model("mixed"), "attention must be the same in all layers"),
        (
            NSAForCausalLM(NSAModelConfig(**SIZES, attention="dense", qk_norm=True)),
            "attention_bias and qk_norm must be False where all layers are dense",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            to_safetensors(path, made)
    assert not path.exists()
    tied = NSAForCausalLM(NSAModelConfig(**SIZES, tie_word_embeddings=True))
    to_safetensors(path, tied.eval())
    untied = from_safetensors(path)
    assert torch.equal(untied(tokens(1)).logits, tied(tokens(1)).logits)
    with pytest.raises(ValueError, match="tie_word_embeddings must be False"):
        from_safetensors(path, tied)


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = (torch.arange(24) * (index % 3 + 1) + index) % 64
        return dict(input_ids=row, labels=row, attention_mask=torch.ones_like(row))


@renamed
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_trainer(tmp_path):
    """20 steps with gradient checkpointing and bfloat16 autocast; what it saves comes back."""
    torch.manual_seed(0)
    made = NSAForCausalLM(NSAModelConfig(**SIZES, attention=["nsa", "dense"]))
    options = dict(
        max_steps=20,
        per_device_train_batch_size=2,
        learning_rate=2e-2,
        logging_steps=5,
        save_steps=20,
        report_to=[],
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=True,
        disable_tqdm=True,
    )
    arguments = TrainingArguments(str(tmp_path), **options)
    trainer = Trainer(made, arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.8
    assert trainer.evaluate()["eval_loss"] < losses[0] - 0.8
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    for x, y in zip(kept.parameters(), made.parameters(), strict=True):
        assert torch.equal(x, y)


@by_kind
@renamed
def test_gradient_checkpointing_and_float64(kind):
    made = copy.deepcopy(model(kind)).double().train()
    ids = tokens(2)
    made(ids, labels=ids).loss.backward()
    plain = [parameter.grad.clone() for parameter in made.parameters()]
    made.zero_grad()
    made.gradient_checkpointing_enable()
    calls = []
    made.model.layers[1].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    out = made(ids, labels=ids, use_cache=True)
    assert out.get(CACHE) is None
    with pytest.raises(ValueError, match="cache must be None where gradient checkpointing"):
        made(ids, cache=NSAModelCache(made.config))
    out.loss.backward()
    assert len(calls) == 2  # the second time for the backward pass
    for x, parameter in zip(plain, made.parameters(), strict=True):
        torch.testing.assert_close(x, parameter.grad, rtol=1e-12, atol=1e-14)


@by_kind
def test_gradients_through_the_cache(kind):
    made = copy.deepcopy(model(kind)).double().train()
    ids = tokens(2, 20)

    def gradients(logits):
        return torch.autograd.grad(logits.square().sum(), list(made.parameters()))

    want = gradients(made(ids).logits)
    first = made(ids[:, :13], use_cache=True)
    rest = made(ids[:, 13:], cache=first[CACHE])
    got = gradients(torch.cat([first.logits, rest.logits], dim=1))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_fsdp_shards_the_layers_it_is_told_of(tmp_path):
    """All that a state_dict holds is a sharded parameter: what accelerate's FSDP2 asks for."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        made, ids = copy.deepcopy(model("mixed")).train(), tokens(2)
        want = made(ids, labels=ids).loss
        wrapped = [x for x in made.modules() if type(x).__name__ in made._no_split_modules]
        assert len(wrapped) == 2
        for module in [*wrapped, made]:
            fully_shard(module, mesh=mesh)
        loss = made(ids, labels=ids).loss
        loss.backward()
        assert torch.equal(loss, want)
        assert all(isinstance(x, DTensor) for x in made.state_dict().values())
        assert made.state_dict().keys() == model("mixed").state_dict().keys()
        assert all(x.grad is not None for x in made.parameters())
    finally:
        dist.destroy_process_group()


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC |= {"original_max_position_embeddings": 8}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(num_attention_heads=5), "num_attention_heads must be a multiple of"),
        (dict(head_dim=7), "head_dim must be even"),
        (dict(hidden_size=0), "hidden_size must be an int >= 1, got 0"),
        (dict(vocab_size="64"), "vocab_size must be an int >= 1, got '64'"),
        (dict(pad_token_id=64), r"pad_token_id must be in 0..63 \(vocab_size\), got 64"),
        (dict(eos_token_id=[3, 70]), "eos_token_id must be in 0..63"),
        (dict(attention="full"), "attention must be one of .*, got 'full'"),
        (dict(attention=["nsa"] * 3), "attention must be one word or num_hidden_layers=2"),
        (dict(compress_block=6), "compress_block must be a multiple of compress_stride=4"),
        (dict(num_local=9), "num_selected must be >= num_initial"),
        (dict(phi="conv"), "phi must be one of"),
        (dict(gate="relu"), "gate must be one of"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu' in an nsa model, got 'gelu'"),
        (dict(attention_dropout=0.1), "attention_dropout must be 0.0 in an nsa model, got 0.1"),
        (dict(sliding_window=64), "must be None in an nsa model, which has 'window' instead"),
        (
            dict(layer_types=["full_attention"] * 2),
            "layer_types must be None .*'attention' inst",
        ),
        (
            dict(rope_parameters={"rope_type": "default", "factor": 2.0, "rope_theta": 1e4}),
            "'factor'. must be 1.0 or None where rope_type is 'default', got 2.0",
        ),
        (
            dict(rope_parameters=PARTIAL),
            "partial_rotary_factor must be 1.0 in an nsa model, got 0.5",
        ),
        (dict(rope_parameters=DYNAMIC), "rope_type'. must be one"),
        (dict(rope_parameters=DYNAMIC | {"rope_type": "yarn", "factor": None}), "have factor"),
        (dict(rope_parameters=DYNAMIC | {"rope_type": "llama3"}), "have low_freq_factor"),
        (dict(compres_block=8), "unknown key 'compres_block'.*known: 'compress_block'"),
    ],
    ids=lambda x: str(x)[:30],
)
@pytest.mark.filterwarnings("ignore")
def test_configurations_that_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        NSAModelConfig(**SIZES | changed)
    with pytest.raises(ValueError, match=message):
        config = NSAModelConfig(**SIZES)
        vars(config).update(changed)
        if "compres_block" in changed:
            config = NSAModelConfig(**vars(config))
        NSAForCausalLM(config)


def test_new_models_and_what_a_config_that_does_not_say_it_means(tmp_path):
    """Gates of each query head, keys and values once; older files keep what they were."""
    new = NSAModelConfig(**SIZES)
    assert (new.phi, new.kv, new.gate) == ("avg", "shared", "head")
    for path, words in (("new", {}), ("old", {"kv": "separate"})):
        made = NSAForCausalLM(NSAModelConfig(**SIZES, **words)).eval()
        made.save_pretrained(tmp_path / path)
        file = tmp_path / path / "config.json"
        said = json.loads(file.read_text())
        assert said.keys() >= {"phi", "kv", "gate"}
        if path == "old":
            file.write_text(json.dumps({k: x for k, x in said.items() if k not in words}))
        again = NSAForCausalLM.from_pretrained(tmp_path / path)
        assert torch.equal(again(tokens()).logits, made(tokens()).logits)
        assert again.config.layer_spec == made.config.layer_spec


def test_what_other_models_say_and_this_one_does():
    said = dict(hidden_act="silu", attention_dropout=0, sliding_window=None, mlp_bias=False)
    config = NSAModelConfig(**SIZES, **said, my_note="kept")
    assert config.my_note == "kept" and NSAForCausalLM(config).config is config


def test_another_models_configuration(tmp_path):
    LlamaConfig(vocab_size=8).save_pretrained(tmp_path)
    for load in (NSAModelConfig.from_pretrained, NSAForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="model_type must be 'nsa', got 'llama'"):
            load(tmp_path)
    with pytest.raises(ValueError, match="config must be an NSAModelConfig, got LlamaConfig"):
        NSAForCausalLM(LlamaConfig(vocab_size=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(gate="softmax"), "gate must be 'sigmoid' as in the checkpoint .*, got 'softmax'"),
        (dict(phi="avg"), "phi must be 'mlp' as in the checkpoint .*, got 'avg'"),
        (dict(vocab_size=65), r"expected shape \(65, 32\), got \(64, 32\)"),
        (dict(num_hidden_layers=3), "got missing model.layers.2.* and 18 more"),
        (dict(num_hidden_layers=1), "got unexpected model.layers.1.* and 18 more"),
    ],
    ids=str,
)
def test_checkpoints_that_are_refused(folder, changed, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, **changed)


def test_a_checkpoint_with_gate_and_phi_in_its_weights(folder):
    """As the layer itself writes them; others are refused, its own are taken."""
    state = model().state_dict()
    assert not [key for key in state if key.endswith("_extra_state")]
    made = NSAForCausalLM(model().config)
    layer = made.model.layers[0].self_attn
    prefix = "model.layers.0.self_attn."
    made.load_state_dict(state | {prefix + key: x for key, x in layer.state_dict().items()})
    other = dataclasses.replace(layer.spec, gate="softmax").kind_keys(prefix)
    with pytest.raises(ValueError, match="gate must be 'sigmoid' as in the module"):
        made.load_state_dict(state | dict.fromkeys(other, torch.zeros(())))


def test_a_looser_load(folder):
    made, info = NSAForCausalLM.from_pretrained(
        folder, num_hidden_layers=1, strict=False, output_loading_info=True
    )
    assert len(made.model.layers) == 1 and len(info["unexpected_keys"]) == 19
    assert all(
        torch.equal(x, model().state_dict()[key]) for key, x in made.state_dict().items()
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "nsa" and config["gate"] == "sigmoid"


MASKS = {
    "middle": ([[1, 1, 0, 1, 1, 1]], "on the left or on the right.* got 110111 in row 0"),
    "both": ([[0, 1, 1, 1, 1, 0]], "on the left or on the right"),
    "values": ([[0, 2, 1, 1, 1, 1]], "hold 0 and 1 only"),
    "short": ([[1, 1, 1]], r"shape \(1, 6\).*got \(1, 3\)"),
    "axes": ([[[[1, 1, 1, 1, 1, 1]]]], r"shape \(1, 6\).*got \(1, 1, 1, 6\)"),
}


@pytest.mark.parametrize("which", MASKS)
def test_masks_that_are_refused(which):
    mask, message = MASKS[which]
    with pytest.raises(ValueError, match=f"attention_mask must .*{message}"):
        model()(tokens(1, 6), attention_mask=torch.tensor(mask))


@torch.no_grad()
def test_calls_that_are_refused():
    made, ids = model("mixed"), tokens(1, 6)
    ones = torch.ones(1, 6, dtype=torch.long)
    cache = made(ids)[CACHE]
    longer = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    apart = torch.tensor([0, 4, 6]), torch.tensor([0, 2, 6])
    for message, options in (
        ("as many ones as the cache has", dict(attention_mask=longer, cache=cache)),
        ("cache must be an NSAModelCache", dict(cache=DynamicCache())),
        ("position_ids must count", dict(position_ids=torch.arange(6)[None] + 1)),
        ("position_ids must count", dict(position_ids=ones, attention_mask=ones)),
        ("cu_seq_lens_q must not decrease", dict(cu_seq_lens_q=torch.tensor([0, 5, 3, 6]))),
        ("cu_seq_lens_q must be None", dict(cu_seq_lens_q=ones[0, :2], attention_mask=ones)),
        ("cu_seq_lens_q must be a torch tensor, got list", dict(cu_seq_lens_q=[0, 6])),
        ("cu_seq_lens_q must have dtype", dict(cu_seq_lens_q=ones[0] * 1.0)),
        ("cu_seqlens must be a torch tensor, got list", dict(cu_seqlens=[0, 6])),
        ("cu_seqlens must be None", dict(cu_seqlens=ones[0, :2], attention_mask=ones)),
        ("seq_idx must be None where", dict(seq_idx=ones, attention_mask=ones)),
        (r"seq_idx must have shape \(1, 6\), got \(6,\)", dict(seq_idx=ones[0])),
        ("seq_idx must have .* got list", dict(seq_idx=[[0] * 6], cu_seqlens=apart[0])),
        ("seq_idx must not decrease", dict(seq_idx=torch.tensor([[0, 0, 1, 1, 0, 0]]))),
        (
            r"cu_seq_lens_k must be the borders of cu_seq_lens_q, \[0, 4, 6\], got \[0, 2, 6\]",
            dict(cu_seq_lens_q=apart[0], cu_seq_lens_k=apart[1]),
        ),
        (
            r"seq_idx must be the borders of cu_seqlens, \[0, 4, 6\], got \[0, 6\]",
            dict(cu_seqlens=apart[0], seq_idx=ones),
        ),
        (
            "position_ids must count from 0 in every sequence of cu_seq_lens_q, got .0, 1, 2, 3, 4",
            dict(cu_seq_lens_q=apart[0], position_ids=torch.arange(6)[None]),
        ),
        (
            r"labels must have shape \(1, 2\), as the logits of logits_to_keep, got \(1, 6\)",
            dict(labels=ids, logits_to_keep=2),
        ),
        (r"must have shape \(1, 6\).* got dict", dict(attention_mask={"full_attention": ones})),
        (
            r"must have shape \(1, 6\).* got \(1, 1, 6, 6\)",
            dict(attention_mask=ones.expand(1, 1, 6, 6)),
        ),
    ):
        step = ids[:, :1] if options.get("cache") is cache else ids
        with pytest.raises(ValueError, match=message):
            made(step, **options)
    for kind in ("nsa", "dense"):
        with pytest.raises(ValueError, match="input_ids must be one row where cu_seq_lens_q"):
            model(kind)(tokens(2, 6), cu_seq_lens_q=torch.tensor([0, 3, 6]))
    right = torch.tensor([[1, 1, 1, 1, 0, 0]])
    for options in (dict(attention_mask=right), dict()):  # the second from pad_token_id
        with pytest.raises(
            ValueError, match=r"padded on the left in generate .* 111100 in row 0"
        ):
            made.generate(ids * right, max_new_tokens=2, do_sample=False, **options)
    for call in (made, functools.partial(made.generate, max_new_tokens=2)):
        with pytest.raises(
            ValueError, match=r"must have a row and a column, got shape \(1, 0\)"
        ):
            call(ids[:, :0])
    for token in (64, -1):
        with pytest.raises(ValueError, match=rf"input_ids must be in 0..63.*got {token}"):
            made(torch.tensor([[1, token]]))
    with pytest.raises(ValueError, match="both or neither"):
        made()
    for name, found in (("output_attentions", True), ("is_causal", False)):
        for call in (made, made.model, functools.partial(made.generate, max_new_tokens=2)):
            with pytest.raises(NotImplementedError, match=f"{name} must be {not found}, got"):
                call(ids, **{name: found})
    for message, words in (
        ("output_attentions must be False in an nsa model", dict(output_attentions=True)),
        (
            "multiple of num_attention_heads=4 where head_dim is None, got 65",
            dict(hidden_size=65, head_dim=None),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            NSAModelConfig(**SIZES | words)
    assert NSAModelConfig(**SIZES | dict(hidden_size=65)).head_dim == 8
    with pytest.raises(ValueError, match="cache_implementation must be None, 'dynamic'"):
        made.generate(ids, cache_implementation="offloaded", max_new_tokens=1)
    with pytest.raises(
        NotImplementedError, match=r"assistant_early_exit must be None: .*got 1"
    ):
        made.generate(ids, assistant_early_exit=1, max_new_tokens=2)
    assert made(ids).logits.isfinite().all()  # the configuration is as it was
    with pytest.raises(ValueError, match="capacity must be >= 1"):
        NSAModelCache(made.config, 0)
    cache = made(ids)[CACHE]
    with pytest.raises(ValueError, match=r"count must be in 0..0, the tokens since record"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"tokens_to_remove must be in -6\.\.0"):
        cache.crop(-7)


@torch.no_grad()
def test_borders_on_a_gpu_are_compared_once(monkeypatch):
    """Calls wait for the device until one with these words agrees; later ones do not."""
    monkeypatch.setattr("nsa_torch.huggingface.rows.COMPARED", set())
    monkeypatch.setattr("nsa_torch.checks.is_read", lambda x, wait=False: wait)
    borders, position = torch.tensor([0, 4, 6]), torch.arange(6)[None]
    call = functools.partial(model(), tokens(1, 6), cu_seq_lens_q=borders)
    for name, right, wrong in (
        ("position_ids", position - 4 * (position > 3), position),
        ("cu_seq_lens_k", borders, borders // 2),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name} must"):
                call(**{name: wrong})
        for x in (right, wrong):
            torch.testing.assert_close(call(**{name: x}).logits, call().logits)


@pytest.mark.parametrize("name", ["cumulative_seqlens_q", "segment_ids", "cu_seq_len_q"])
@torch.no_grad()
def test_keywords_that_nobody_reads(name):
    """What a caller says and the model does not know would change nothing, without a word."""
    made, ids = model("mixed"), tokens(1, 6)
    for call in (made, made.model, functools.partial(made, labels=ids)):
        with pytest.raises(TypeError, match=f"{name} is no argument of .*boundaries of packed"):
            call(ids, **{name: torch.tensor([0, 4, 6])})
        call(ids, **{name: None}, token_type_ids=torch.zeros_like(ids))


def test_the_module_is_written_with_the_configuration(tmp_path):
    """By the one step of `save_pretrained` whose files transformers uploads to the Hub."""
    config = model().config
    config.save_pretrained(str(tmp_path / "saved"), False)
    (tmp_path / "written").mkdir()
    config.to_json_file(tmp_path / "written" / "config.json")
    for folder in tmp_path.iterdir():
        assert {x.name for x in folder.iterdir()} == {"config.json", "modeling_nsa.py"}
        assert "auto_map" in json.loads((folder / "config.json").read_text())


def test_keywords_of_the_loss():
    made, ids = copy.deepcopy(model()), tokens(1)
    want = made(ids, labels=ids).loss
    found = made(ids, labels=ids, num_items_in_batch=2 * (WIDTH - 1)).loss
    torch.testing.assert_close(found, want / 2)
    assert made(ids, num_items_in_batch=3, shift_labels=None).loss is None

    def loss_function(logits, labels, vocab_size, weight=1.0, **rest):
        return weight * logits.mean()

    made.loss_function = loss_function
    torch.testing.assert_close(
        made(ids, labels=ids, weight=3.0, num_items_in_batch=3).loss,
        3 * made(ids, labels=ids).loss,
    )


def test_a_cached_chunk_that_is_refused():
    layer = nsa_torch.NSAAttention(32, 2, 1, 8, 8)
    x, lengths = torch.randn(2, 5, 32), torch.tensor([5, 2])
    with pytest.raises(ValueError, match="new_lengths must be None where no cache is given"):
        layer(x, new_lengths=lengths)
    for bad, message in (
        (lengths[:1], r"new_lengths must have shape \(2,\)"),
        (lengths.float(), "new_lengths must have dtype in"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, layer.init_cache(2, 9), new_lengths=bad)


def test_an_older_transformers(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(ImportError, match=r"at least 5.17, got 4.57.1: .*attention\[hf\]"):
        extras.require("hf", "transformers", minimum="5.17")


@torch.no_grad()
def test_the_kernel_is_named_for_all_layers():
    made = copy.deepcopy(model("mixed"))
    made.set_nsa_implementation("reference")
    ids, mask = left_padded()
    got = made(ids, attention_mask=mask, use_cache=False).logits
    assert difference(got, alone(model("mixed"), ids)) < FLOAT32_MAX
    made.set_nsa_implementation("triton")
    with pytest.raises(NotImplementedError):
        made(ids)


@torch.no_grad()
def test_eager_dense_layers_equal_sdpa():
    made = copy.deepcopy(model("mixed"))
    made.set_attn_implementation("eager")
    ids, mask = left_padded()
    rows = alone(model("mixed"), ids)
    for splits in ([WIDTH], [20, 15, 5, 1]):
        assert difference(steps(made, ids, mask, splits)[0], rows) < FLOAT32_MAX


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["nsa", ["nsa", "dense"]], ids=str)
@torch.no_grad()
def test_gpu_padded_batch_through_mosaic(attention):
    """bfloat16 by the Mosaic kernels, against the same weights in float32 by SDPA."""
    config = NSAModelConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        attention=attention,
        phi="mlp_pe",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    exact = NSAForCausalLM(config).cuda().eval()
    fast = copy.deepcopy(exact).bfloat16()
    fast.set_nsa_implementation("mosaic")
    exact.set_nsa_implementation("sdpa")
    ids = torch.randint(1, 256, (3, 700), device="cuda")
    padding = torch.tensor([0, 133, 690], device="cuda")
    mask = (torch.arange(700, device="cuda") >= padding[:, None]).long()
    want = exact(ids, attention_mask=mask, use_cache=False).logits
    scale = want.abs().max()
    low = copy.deepcopy(exact).bfloat16()(ids, attention_mask=mask, use_cache=False).logits
    seen = mask.bool()
    rough = float((low - want)[seen].abs().mean())
    whole = fast(ids, attention_mask=mask, use_cache=False).logits
    cached, _ = steps(fast, ids, mask, [500, 190, *[1] * 10])
    for got in (whole, cached):
        assert bool(torch.isfinite(got[seen]).all())
        assert float((got - want)[seen].abs().mean()) <= 2 * rough + 2**-10 * float(scale)
    generated = fast.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    again = fast.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert generated.shape == (3, 708) and torch.equal(generated, again)

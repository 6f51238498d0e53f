"""The Hugging Face model. A row alone, without a cache, is the rule for padding, packed rows and
caches. Its logits are those of dense models in `test_convert.py`, and of a training run's here.
"""

import copy
import dataclasses
import functools
import itertools
import json

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
)

from bench.judge.parity import FLOAT32_MAX
from bench.lm.spec import ModelSpec
from bench.lm.torch_lm import LM, initialize
from nsa_core.layer import LayerSpec
from nsa_interop import weights
from nsa_torch.huggingface import (
    NSAForCausalLM,
    NSAModel,
    NSAModelCache,
    NSAModelConfig,
    NSAPagedModelCache,
    from_safetensors,
    to_safetensors,
)
from tests import pretend, refusals
from tests.model_sizes import CACHE, MODELS
from tests.refusals import refused

SIZES, KINDS = MODELS["huggingface"], MODELS["kinds"]
ROOM, FP8 = 64, torch.float8_e4m3fn
CACHES = {
    "grows": lambda config, rows: NSAModelCache(config),
    "pages": lambda config, rows: NSAPagedModelCache(config, rows, ROOM),
    "fp8 pages": lambda config, rows: NSAPagedModelCache(config, rows, ROOM, FP8),
}
WIDTH = 41
PADDING = (0, 13, 30, 38)  # of each row of `batch`; 3 tokens are fewer than a block
GREEDY = dict(do_sample=False)

by_kind = pytest.mark.parametrize("kind", ["nsa", "dense", "mixed", "shared", "taps"])
by_order = pytest.mark.parametrize("kinds", [("nsa", "dense"), ("dense", "nsa")])
by_cache = pytest.mark.parametrize("cache", ["grows", "pages"])
# Newer transformers calls it activation checkpointing.
renamed = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
close = functools.partial(torch.testing.assert_close, rtol=0, atol=FLOAT32_MAX)


@functools.cache
def model(kind="nsa", **changed):
    """Weights of some size, so that a wrong position or block shows."""
    torch.manual_seed(7)
    made = NSAForCausalLM(NSAModelConfig(**SIZES | KINDS[kind] | changed))
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


def same_rows(found, rows):
    """Padded logits, at the rows' own tokens, are those of the rows alone."""
    for x, y in zip(found, rows, strict=True):
        close(x[len(x) - len(y) :], y)


def steps(model, ids, mask, splits, cache, between=lambda cache: None):
    """Logits of left-padded `ids` through the cache, chunk after chunk, and `between` them."""
    parts = []
    for end, part in zip(itertools.accumulate(splits), ids.split(splits, dim=1), strict=True):
        if parts:
            between(cache)
        seen = None if mask is None else mask[:, :end]
        parts.append(model(part, attention_mask=seen, cache=cache).logits)
    return torch.cat(parts, dim=1)


@by_kind
@by_cache
@torch.no_grad()
def test_padded_rows_in_chunks_are_each_row_alone(kind, cache):
    """Chunks in which a row has no token yet, or begins; rows without padding need no mask."""
    made = model(kind)
    for padding, *all_splits in MODELS["chunks"]:
        ids, mask = left_padded(padding)
        rows = alone(made, ids, padding)
        options = dict(attention_mask=mask, use_cache=False, output_hidden_states=True)
        whole = made(ids, **options)
        same_rows(whole.logits, rows)
        # Hidden states stand where the tokens do.
        other = made(ids[1:2, padding[1] :], output_hidden_states=True).hidden_states
        for x, y in zip(whole.hidden_states, other, strict=True):
            same_rows(x[1:2], y)
        for splits in all_splits:
            kept = CACHES[cache](made.config, len(ids))
            same_rows(steps(made, ids, mask if any(padding) else None, splits, kept), rows)
            assert kept.lengths.tolist() == mask.sum(1).tolist()
            assert kept.get_seq_length() == WIDTH
            assert kept.get_max_length() == {"grows": -1, "pages": ROOM}[cache]


@by_kind
@torch.no_grad()
def test_a_row_is_bitwise_the_same_whatever_the_padding_of_others(kind):
    run = functools.partial(model(kind), use_cache=False)
    one, other = (
        run(ids, attention_mask=mask).logits
        for ids, mask in map(left_padded, (PADDING, (0, 0, 5, 38)))
    )
    assert torch.equal(one[0], other[0]) and torch.equal(one[3, 38:], other[3, 38:])
    ids, mask = left_padded((0,))
    assert torch.equal(run(ids).logits, run(ids, attention_mask=mask).logits)


@by_kind
@renamed
def test_gradients_are_those_of_rows_alone(kind):
    """Of rows padded on the right, the same with checkpoints, and through a cache."""
    made = copy.deepcopy(model(kind)).double().train()
    counts, ids = (WIDTH, 3, 20), tokens(3)
    mask = (torch.arange(WIDTH) < torch.tensor(counts)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    gradients = lambda loss: torch.autograd.grad(loss, list(made.parameters()))
    same = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)

    def loss_of_rows(chunks):
        total = 0.0
        for row, n in zip(ids, counts, strict=True):
            kept, parts = None, []
            for part in row[None, :n].split(-(-n // chunks), dim=1):
                out = made(part, cache=kept, use_cache=chunks > 1)
                kept = out.get(CACHE)
                parts.append(out.logits[0])
            total += F.cross_entropy(torch.cat(parts)[:-1], row[1:n], reduction="sum")
        return total / (sum(counts) - len(counts))

    loss = loss_of_rows(1)
    want = gradients(loss)
    same(gradients(loss_of_rows(2)), want, atol=1e-11)
    calls = []
    made.model.layers[1].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    for again in (1, 2):  # the second time each layer runs in the backward pass, too
        calls.clear()
        out = made(ids * mask, attention_mask=mask, labels=labels, use_cache=again == 2)
        assert out.get(CACHE) is None
        assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)  # theirs is in float32
        padded = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        same(gradients(padded), want)
        assert len(calls) == again
        made.gradient_checkpointing_enable()
    with refused("cache must be None during training with gradient checkpointing"):
        made(ids, cache=NSAModelCache(made.config))


@by_kind
@torch.no_grad()
def test_packed_rows(kind):
    ids, bounds = tokens(1), [0, 3, 20, WIDTH]
    pieces = [ids[:, a:b] for a, b in itertools.pairwise(bounds)]
    want = torch.cat([model(kind)(x, use_cache=False).logits for x in pieces], dim=1)
    borders = torch.tensor(bounds, dtype=torch.int32)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    collated = collator([{"input_ids": x[0].tolist()} for x in pieces])
    assert torch.equal(collated.pop("input_ids"), ids) and {"max_length_q"} < collated.keys()
    for options in (
        *({name: collated[name]} for name in ("position_ids", "seq_idx")),
        *({name: borders} for name in ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")),
        collated,
    ):
        for use_cache in (False, None):  # a cache is made of other rows alone
            found = model(kind)(ids, use_cache=use_cache, **options)
            close(found.logits, want)
            assert found.get(CACHE) is None


MODES = MODELS["texts"]
TEXTS = [(kind, mode) for mode, (_, kinds) in MODES.items() for kind in kinds]


@pytest.mark.parametrize("kind, mode", TEXTS)
def test_generate(kind, mode):
    """Through each cache as without one; a padded row as alone. The first token of a row of padding
    alone follows no attention at all, the others what was generated. Servers pass their tokenizer.
    """
    made, new, (given, _) = model(kind), 7, MODES[mode]
    padding = (0, 38, WIDTH)
    ids, mask = left_padded(padding)

    def generate(ids, mask, **more):
        torch.manual_seed(3)
        options = dict(attention_mask=mask, max_new_tokens=new, tokenizer="any") | given
        return made.generate(ids, **options | more)

    without = dict(cache_implementation=None, prefill_chunk_size=None, use_cache=False)
    want = generate(ids, mask, **without)
    assert want.shape[1] == WIDTH + new and torch.equal(generate(ids, mask), want)
    pages = CACHES["pages"](made.config, len(ids) * given.get("num_beams", 1))
    assert torch.equal(generate(ids, mask, cache=pages, cache_implementation=None), want)
    if mode not in ("greedy", "beams"):
        return
    copies = given.get("num_return_sequences", 1)
    for row, n in enumerate(padding[:2]):
        short = generate(ids[row, None, n:], None)
        assert torch.equal(short, want[row * copies : (row + 1) * copies, n:])
    if mode == "greedy":
        empty = want[2, WIDTH:]
        rest = made.generate(empty[None, :1], max_new_tokens=new - 1, **GREEDY)
        assert torch.equal(rest[0], empty)
        assert torch.equal(generate(ids[2:], mask[2:])[0], want[2])
        with torch.no_grad():
            x = made.model.embed_tokens(ids[2, -1])
            for layer in made.model.layers:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            assert made.lm_head(made.model.norm(x)).argmax() == empty[0]


@pytest.mark.parametrize("kind, cache", MODELS["guessed"])
def test_generate_with_guesses_takes_them_back(kind, cache, monkeypatch):
    """Prompt lookup appends guesses to the cache and crops the wrong ones."""
    made, ids = model(kind), tokens(1, 12).repeat(1, 3)
    generate = functools.partial(made.generate, ids, max_new_tokens=16, **GREEDY)
    kept = CACHES[cache](made.config, 1)
    cropped = pretend.calls_of(monkeypatch, type(kept), "crop", lambda _, count: count)
    assert torch.equal(generate(prompt_lookup_num_tokens=4, cache=kept), generate())
    assert min(cropped) < 0
    assert type(kept.get_seq_length()) is int  # transformers counts guesses in a tensor


@pytest.mark.parametrize("cache, kind", MODELS["operated"])
@torch.no_grad()
def test_operations_on_a_cache(kind, cache):
    made = model(kind)
    ids, mask = left_padded((0, 13))
    following = tokens(2, 9, seed=1)
    both = torch.cat([mask, torch.ones_like(following)], 1)

    def fresh():
        kept = CACHES[cache](made.config, 2)
        kept.activate_past_recording()
        return kept, made(ids, attention_mask=mask, cache=kept).logits

    def go_on(kept, rows=(0, 1)):
        given = following[list(rows)], both[list(rows)]
        return made(given[0], attention_mask=given[1], cache=kept).logits

    kept, first = fresh()
    want = go_on(kept)
    for name, argument, rows in MODELS["operations"]:
        kept, _ = fresh()
        getattr(kept, name)(refusals.given(argument))
        assert kept.batch_size == len(rows)
        close(go_on(kept, rows), want[rows])
    kept, _ = fresh()
    places = lambda: [
        x.data_ptr() for each in kept.layers if cache != "grows" for x in each.tensors()
    ]
    lengths, where = kept.lengths, places()
    assert kept.get_seq_length() == WIDTH
    if kind == "taps":
        close(go_on(kept), want)
        assert not kept.is_croppable
        with refused("tokens cannot be removed from a cache of a layer"):
            kept.crop(-4)
        assert kept.get_seq_length() == WIDTH + 9
    else:
        for count in (9, 4):  # twice, the second time less than was appended
            close(go_on(kept), want)
            kept.crop(-count)
        close(made(following[:, 5:], cache=kept).logits, want[:, 5:])
    kept.reorder_cache(torch.tensor([1, 0]))
    kept.reset()
    assert kept.get_seq_length() == 0 and not kept.lengths.any()
    again = made(ids, attention_mask=mask, cache=kept).logits
    assert torch.equal(again[mask.bool()], first[mask.bool()]) and where == places()
    assert cache == "grows" or kept.lengths is lengths


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


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
@torch.no_grad()
def test_quantized_linears(dtype):
    """A cache holds what the projections return, not what the weights are stored as."""
    made = copy.deepcopy(model("mixed"))
    for module in list(made.model.modules()):  # but the head's
        for name, linear in list(module.named_children()):
            if isinstance(linear, torch.nn.Linear):
                setattr(module, name, Quantized(linear, dtype))
    ids, mask = left_padded((0, 13))
    count = dict(attention_mask=mask, max_new_tokens=6, **GREEDY)
    want = made.generate(ids, use_cache=False, **count)
    once = made(ids, attention_mask=mask).logits
    for cache in ("pages", "grows"):
        kept = CACHES[cache](made.config, 2)
        assert torch.equal(made.generate(ids, cache=kept, **count), want)
        kept.reset()
        close(made(ids, attention_mask=mask, cache=kept).logits[mask > 0], once[mask > 0])
    layer = made.model.layers[0].self_attn
    for state in (kept.layers[0].state, layer.init_cache(1, 8)):
        assert state.selected_key.dtype == torch.float32


@by_cache
def test_a_prompt_that_its_cache_has_seen(cache):
    made, ids, count = model(), tokens(2), dict(max_new_tokens=2, **GREEDY)
    kept = CACHES[cache](made.config, 2)
    with torch.no_grad():
        made(ids, cache=kept)
    more = torch.cat([ids, ids[:, :1]], dim=1)
    for prompt, message in (
        (ids, "the 41 tokens in cache and at least one more, got 41"),
        (ids[:, -1:], "the 41 tokens in cache"),
        (more[:1], "cache must have batch_size=1 (one row per sequence), got 2"),
    ):
        with refused(message):
            made.generate(prompt, cache=kept, **count)
    assert torch.equal(made.generate(more, cache=kept, **count), made.generate(more, **count))
    # As long as its cache's room: one token comes of it, and more are refused at once.
    kept = NSAModelCache(made.config, WIDTH)
    with refused("for 42 tokens (max_length - 1)"):
        made.generate(ids, cache=kept, max_new_tokens=2)
    assert kept.lengths is None
    assert made.generate(ids, cache=kept, max_new_tokens=1).shape == (2, WIDTH + 1)


def interrupt(made, place, ids, cache):
    """A call that ends with an error before the module `place`."""

    def interrupted(*_):
        raise KeyboardInterrupt

    hook = made.model.get_submodule(place).register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(ids, cache=cache)
    hook.remove()


@pytest.mark.parametrize("place", ["layers.1", "layers.1.mlp"])
@torch.no_grad()
def test_a_cache_in_which_a_call_did_not_end(place):
    """Layers before the one that failed have its tokens, the others not; all have them if it failed
    after its last attention.
    """
    made, ids = model("mixed"), tokens(2)
    cache = NSAModelCache(made.config, WIDTH)
    made(ids[:, :30], cache=cache)
    interrupt(made, place, ids[:, 30:35], cache)
    with refused("same tokens in all layers, got [35] columns"):
        made(ids[:, 30:35], cache=cache)
    cache.reset()
    assert torch.equal(made(ids, cache=cache).logits, made(ids, use_cache=True).logits)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@by_order
@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_layers_on_several_devices(kinds, cache, device):
    """As accelerate places them by a `device_map`; a device of its own that computes no number
    shows what stays behind.
    """
    made, (ids, mask) = copy.deepcopy(model(attention=kinds)), left_padded((0, 13))
    splits, want = [20, 15, 5, 1], None
    if device == "cuda":
        want = steps(made, ids, mask, splits, CACHES[cache](made.config, 2))
    skipped = made._skip_keys_device_placement
    for part in (made.model.layers[1], made.model.norm, made.lm_head):
        add_hook_to_module(part.to(device), AlignDevicesHook(device, skip_keys=skipped))
    kept = CACHES[cache](made.config, 2)
    logits = steps(made, ids, mask, splits, kept)
    assert logits.device.type == device and kept.lengths.tolist() == mask.sum(1).tolist()
    kept.crop(-1)
    kept.reorder_cache(torch.tensor([1, 0]))
    again = made(ids[:, -1:].flip(0), attention_mask=mask.flip(0), cache=kept).logits
    if want is not None:
        same_rows(logits.cpu(), [x[n:] for x, n in zip(want, (0, 13), strict=True)])
        close(again.cpu(), want[:, -1:].flip(0))


@pytest.mark.parametrize("first", [0, 1])
@by_order
@torch.no_grad()
def test_a_first_call_that_failed_leaves_nothing(kinds, first):
    """A second one may have other rows."""
    made, ids = copy.deepcopy(model(attention=kinds)), tokens(3)
    kept = NSAModelCache(made.config)
    interrupt(made, f"layers.{first}.mlp", ids[:2, :7], kept)
    assert kept.lengths is None and kept.batch_size == -1
    same_rows(steps(made, ids, None, [20, 21], kept), alone(made, ids, (0, 0, 0)))


@by_kind
@torch.no_grad()
def test_capacity(kind):
    made, ids = model(kind), tokens(2, 150)
    whole = made(ids, use_cache=False).logits
    cache = NSAModelCache(made.config, capacity=50)
    assert cache.get_max_length() == 50
    made(ids[:, :40], cache=cache)
    with refused("cache must have capacity for 51 tokens, got 50"):
        made(ids[:, 40:51], cache=cache)
    close(made(ids[:, 40:50], cache=cache).logits, whole[:, 40:50])  # nothing was lost
    grows = NSAModelCache(made.config)
    close(steps(made, ids, None, [60, 10, 80], grows), whole)
    assert grows.room == 256 and grows.get_max_length() == -1


SAVED = MODELS["saved"]


@pytest.mark.parametrize("which", SAVED)
@torch.no_grad()
def test_checkpoints(which, tmp_path):
    made, ids = NSAForCausalLM(NSAModelConfig(**SIZES | SAVED[which])).eval(), tokens(1)
    made.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    assert said.keys() >= {"phi", "kv", "gate"}
    if which == "new":
        assert (said["phi"], said["kv"], said["gate"]) == ("avg", "shared", "head")
    if which == "old":
        del said["kv"]
        file.write_text(json.dumps(said))
    want = made(ids, use_cache=False).logits
    loaded, base = (x.from_pretrained(tmp_path) for x in (AutoModelForCausalLM, AutoModel))
    assert (type(loaded), type(base)) == (NSAForCausalLM, NSAModel)
    assert torch.equal(loaded(ids, use_cache=False).logits, want)
    assert torch.equal(loaded.lm_head(base(ids, use_cache=False)[0]), want)
    assert loaded.config.layer_spec == made.config.layer_spec
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for each in (made, loaded):
        tied = each.lm_head.weight is each.model.embed_tokens.weight
        assert tied == (which == "tied") == ("lm_head.weight" not in stored)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {x.dtype for x in low.parameters()} == {torch.bfloat16}
    assert low.generate(ids, max_new_tokens=2, **GREEDY).shape == (1, WIDTH + 2)


# Of weights that start as random numbers; the others are as large as those of a training run.
DEVIATIONS = {"embed_tokens.weight": 0.02, "phi_k_mlp.position": 0.02}
DEVIATIONS |= {"W_Q.weight": (3 * 32) ** -0.5, "fc2.weight": 0.1 * (2 / (5 + 3)) ** 0.5}
by_training = pytest.mark.parametrize("attention, layer", MODELS["trained"])


@by_training
def test_the_start_of_the_weights(attention, layer, tmp_path):
    """As a training run draws them, whether drawn at once or where they are missing."""
    spec = ModelSpec(LayerSpec(**layer), attention, layers=2, hidden=48)
    initialize(tmp_path / "start", spec, 0)
    trained = from_safetensors(tmp_path / "start")
    # A file of weights does not say where gates start.
    config = NSAModelConfig(**trained.config.to_dict() | {"gate_bias": layer.get("gate_bias")})
    torch.manual_seed(0)
    once = NSAForCausalLM(config)
    with torch.device("meta"):
        late = NSAForCausalLM(config)
    late.to_empty(device="cpu")
    for module in late.modules():
        module._is_hf_initialized = False
    late.initialize_weights()
    for name, want in trained.named_parameters():
        both = [each.get_parameter(name) for each in (once, late)]
        if torch.equal(*both):  # no random numbers; biases are zero
            assert torch.equal(both[0], want), name
            assert want.any() == name.endswith(("weight", "gate.bias")), name
            continue
        size = DEVIATIONS.get(".".join(name.split(".")[-2:]), want.std().item())
        for weight in both:
            error = 4 * weight.numel() ** -0.5
            assert weight.std().item() == pytest.approx(size, rel=error), name


def test_a_given_range_of_the_start():
    config = NSAModelConfig(**SIZES, gate="head", initializer_range=0.5)
    layer = NSAForCausalLM(config).model.layers[1].self_attn
    assert layer.out.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert layer.gate.weight.abs().max().item() <= 0.1 * (6 / (32 + 12)) ** 0.5


@by_training
@torch.no_grad()
def test_weights_of_a_training_run_and_back(attention, layer, tmp_path):
    torch.manual_seed(1)
    lm, ids = LM(ModelSpec(LayerSpec(**layer), attention, layers=2, hidden=48)), tokens(2)
    lm.embedding.normal_()
    want, run, bare = lm(ids), tmp_path / "run.safetensors", tmp_path / "bare.safetensors"
    weights.save(run, lm)
    made = from_safetensors(run)
    assert torch.equal(made(ids, use_cache=False).logits, want)
    # ... and back, into a model with other weights.
    for parameter in made.parameters():
        parameter.add_(0.1)
    to_safetensors(tmp_path / "back.safetensors", made)
    weights.load(tmp_path / "back.safetensors", lm)
    assert torch.equal(lm(ids), made(ids, use_cache=False).logits)
    assert not torch.equal(lm(ids), want)
    # A file without hyper-parameters needs the model named; one of another vocabulary is refused.
    safetensors.torch.save_file(safetensors.torch.load_file(run), bare)
    with refused("must record all hyper-parameters"):
        from_safetensors(bare)
    from_safetensors(bare, made)
    assert torch.equal(made(ids, use_cache=False).logits, want)
    other = NSAForCausalLM(NSAModelConfig(**made.config.to_dict() | dict(vocab_size=200)))
    before = copy.deepcopy(other.state_dict())
    with refused("vocabulary must be 200 as in the module, got 256"):
        from_safetensors(run, other)
    assert all(torch.equal(x, before[key]) for key, x in other.state_dict().items())


def test_models_that_training_does_not_have(tmp_path):
    path = tmp_path / "x.safetensors"
    made = lambda **x: NSAForCausalLM(NSAModelConfig(**SIZES, **x))
    for row in refusals.rows("training of a Hugging Face model"):
        with row.refused():
            to_safetensors(path, made(**row.changes))
    assert not path.exists()
    tied = made(tie_word_embeddings=True).eval()
    to_safetensors(path, tied)
    assert torch.equal(from_safetensors(path)(tokens(1)).logits, tied(tokens(1)).logits)
    with refused("tie_word_embeddings must be False"):
        from_safetensors(path, tied)
    path.write_bytes(b"")
    with refused(f"{path} must be a complete safetensors file, got"):
        from_safetensors(path)


def test_fsdp_shards_the_layers_it_is_told_of(mesh):
    """All that a state_dict holds is a sharded parameter: what accelerate's FSDP2 asks for."""
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


@refusals.by_row("configuration of a Hugging Face model")
@pytest.mark.filterwarnings("ignore")
def test_configurations_that_are_refused(row):
    config = NSAModelConfig(**SIZES)
    with row.refused():
        NSAModelConfig(**SIZES | row.changes)
    unknown = row.changes.keys() - vars(config)
    with row.refused():
        vars(config).update(row.changes)
        if unknown:
            config = NSAModelConfig(**vars(config))
        NSAForCausalLM(config)


def test_another_models_configuration(tmp_path):
    LlamaConfig(vocab_size=8).save_pretrained(tmp_path)
    for load in (NSAModelConfig.from_pretrained, NSAForCausalLM.from_pretrained):
        with refused("model_type must be 'nsa', got 'llama'"):
            load(tmp_path)
    with refused("config must be an NSAModelConfig, got LlamaConfig"):
        NSAForCausalLM(LlamaConfig(vocab_size=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model().save_pretrained(path)
    return path


@refusals.by_row("checkpoint of a Hugging Face model")
def test_checkpoints_that_are_refused(folder, row):
    with row.refused():
        AutoModelForCausalLM.from_pretrained(folder, **row.changes)


def test_a_checkpoint_with_gate_and_phi_in_its_weights():
    """As the layer itself writes them; others are refused, its own are taken."""
    state, made = model().state_dict(), NSAForCausalLM(model().config)
    assert not [key for key in state if key.endswith("_extra_state")]
    layer, prefix = made.model.layers[0].self_attn, "model.layers.0.self_attn."
    made.load_state_dict(state | {prefix + key: x for key, x in layer.state_dict().items()})
    other = dataclasses.replace(layer.spec, gate="softmax").kind_keys(prefix)
    with refused("gate must be 'sigmoid' as in the module"):
        made.load_state_dict(state | dict.fromkeys(other, torch.zeros(())))


SIX = dict(rows=1, width=6)


@refusals.by_row("call of a Hugging Face model")
@torch.no_grad()
def test_calls_that_are_refused(row):
    makers = refusals.MAKERS | {"DynamicCache": DynamicCache}
    given = {"input_ids": tokens(**SIX)} | row.given(makers=makers)
    for name in ("mixed", "dense"):
        with row.refused():
            model(name)(**given)


@refusals.by_row("text of a Hugging Face model")
def test_texts_that_are_refused(row):
    made, ids = model("mixed"), tokens(**SIX)
    with row.refused():
        made.generate(**dict(inputs=ids, max_new_tokens=2) | GREEDY | row.given())
    assert made(ids).logits.isfinite().all()  # the configuration is as it was


@torch.no_grad()
def test_caches_that_are_refused():
    made, ids = model("mixed", attention=("dense", "nsa")), tokens(**SIX)
    cache, longer = made(ids)[CACHE], torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    with refused("capacity must be an int >= 1"):
        NSAModelCache(made.config, 0)
    with refused("one 1 for each token that the cache has of the row"):
        made(ids[:, :1], longer, cache=cache)
    with refused("tokens_to_remove must be in -6..0"):
        cache.crop(-7)
    # A crop that is refused takes nothing back, of dense layers either.
    want = made(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, 6:]
    close(made(ids[:, :1], cache=cache).logits, want)


@refusals.by_row("keyword of a Hugging Face model")
@torch.no_grad()
def test_keywords_that_nobody_reads(row):
    made, ids = model("mixed"), tokens(**SIX)
    calls = [made, made.model, functools.partial(made, labels=ids)]
    if row.error is NotImplementedError:
        calls.append(functools.partial(made.generate, max_new_tokens=2))
    for call in calls:
        with row.refused():
            call(ids, **row.given())
    for call in calls[:3]:
        call(ids, **dict.fromkeys(row.changes), token_type_ids=torch.zeros_like(ids))


def test_keywords_of_the_loss():
    made, ids = copy.deepcopy(model()), tokens(1)
    loss = lambda **given: made(ids, labels=ids, **given).loss
    torch.testing.assert_close(loss(num_items_in_batch=2 * (WIDTH - 1)), loss() / 2)
    assert made(ids, num_items_in_batch=3, shift_labels=None).loss is None

    def loss_function(logits, labels, vocab_size, weight=1.0, **rest):
        return weight * logits.mean()

    made.loss_function = loss_function
    torch.testing.assert_close(loss(weight=3.0, num_items_in_batch=3), 3 * loss())


@torch.no_grad()
def test_implementations_are_named_for_all_layers():
    """Of NSA, and of dense layers."""
    ids, mask = left_padded()
    made, rows = copy.deepcopy(model("mixed")), alone(model("mixed"), ids)
    made.set_nsa_implementation("reference")
    made.set_attn_implementation("eager")
    same_rows(made(ids, attention_mask=mask, use_cache=False).logits, rows)
    for cache in ("grows", "pages"):
        kept = CACHES[cache](made.config, len(ids))
        same_rows(steps(made, ids, mask, [20, 15, 5, 1], kept), rows)
    made.set_nsa_implementation("triton")
    with pytest.raises(NotImplementedError):
        made(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["nsa", ["nsa", "dense"]], ids=str)
@torch.no_grad()
def test_gpu_padded_batch_through_mosaic(attention):
    """bfloat16 by the Mosaic kernels, against the same weights in float32 by SDPA."""
    torch.manual_seed(0)
    exact = NSAForCausalLM(NSAModelConfig(**MODELS["on a GPU"], attention=attention))
    exact = exact.cuda().eval()
    low, fast = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    fast.set_nsa_implementation("mosaic")
    exact.set_nsa_implementation("sdpa")
    ids = torch.randint(1, 256, (3, 700), device="cuda")
    padding = torch.tensor([0, 133, 690], device="cuda")
    mask = (torch.arange(700, device="cuda") >= padding[:, None]).long()
    seen, options = mask.bool(), dict(attention_mask=mask, use_cache=False)
    want = exact(ids, **options).logits
    off = lambda found: float((found - want)[seen].abs().mean())
    limit = 2 * off(low(ids, **options).logits) + 2**-10 * float(want.abs().max())
    cached = steps(fast, ids, mask, [500, 190, *[1] * 10], NSAModelCache(fast.config))
    for found in (fast(ids, **options).logits, cached):
        assert bool(torch.isfinite(found[seen]).all()) and off(found) <= limit


def test_a_looser_load(folder):
    options = dict(num_hidden_layers=1, strict=False, output_loading_info=True)
    made, info = NSAForCausalLM.from_pretrained(folder, **options)
    assert len(made.model.layers) == 1 and len(info["unexpected_keys"]) == 19
    state = model().state_dict()
    assert all(torch.equal(x, state[key]) for key, x in made.state_dict().items())

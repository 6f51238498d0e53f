"""Released models that choose key blocks: ours in place of transformers' dense mask."""

import copy
import functools
import types

import pytest
import torch
from transformers.masking_utils import causal_mask_function
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
    MiniMaxM3VLTextConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLIndexer,
    eager_attention_forward,
)

from bench.judge.parity import FLOAT32_MAX
from nsa_torch.huggingface import register_block_attention
from nsa_torch.huggingface.block_selection import NAME, block_attention, key_states
from tests import refusals
from tests.limits import set_limits
from tests.model_sizes import MODELS
from tests.torch_sizes import Sizes

SIZES = MODELS["blocks"]
BLOCK, TOPK = SIZES["index_block_size"], SIZES["index_topk_blocks"]
WIDTH = 45
PADDING = (0, 5)  # columns on the left of each row; less than a block
close = functools.partial(torch.testing.assert_close, rtol=0, atol=FLOAT32_MAX)


@functools.cache
def model(name):
    """The same weights under each attention, of some size, so that a wrong block shows."""
    if name != "eager":
        made = copy.deepcopy(model("eager"))
        made.set_attn_implementation(name)
        return made
    torch.manual_seed(7)
    config = MiniMaxM3VLTextConfig(**SIZES)
    made = MiniMaxM3VLForCausalLM._from_config(config, attn_implementation=name).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return made


def tokens(rows=2, width=WIDTH):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, 64, (rows, width), generator=generator)


def padded():
    mask = (torch.arange(WIDTH) >= torch.tensor(PADDING)[:, None]).long()
    return tokens() * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("width", [3, WIDTH])
def test_logits_are_those_of_eager(width):
    ids = tokens(width=width)
    close(model(NAME)(ids).logits, model("eager")(ids).logits)


def gradients(name, ids, mask):
    """Of every parameter; None where a parameter has none (the indexer's).

    The loss is of logits at tokens: a row's first token is predicted by padding.
    """
    made = model(name)
    made.zero_grad()
    labels = ids
    if mask is not None:
        labels = ids.masked_fill(mask * mask.roll(1, dims=1) == 0, -100)
    made(ids, attention_mask=mask, labels=labels).loss.backward()
    return {key: x.grad for key, x in made.named_parameters()}


@pytest.mark.parametrize("name", [NAME, "nsa_blocks_reference"])
@pytest.mark.parametrize("theirs", ["eager", "sdpa"])
def test_gradients_are_those_of_transformers(theirs, name):
    """`sdpa` on padded rows, where it differs from `eager` (`test_padding_is_hidden`)."""
    register_block_attention("nsa_blocks_reference", implementation="reference")
    rows = padded()[:2] if theirs == "sdpa" else (tokens(), None)
    want, got = gradients(theirs, *rows), gradients(name, *rows)
    without = {key for key, x in want.items() if x is None}
    assert without == {key for key, x in got.items() if x is None}
    assert without and all(".indexer." in key for key in without)
    for key in want.keys() - without:
        size = want[key].abs().max()
        assert size > 0, key
        close(got[key] / size, want[key] / size, msg=key)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("with_padding", [False, True])
def test_greedy_tokens_are_those_of_transformers(kind, with_padding):
    ids, mask, _ = padded()
    options = dict(max_new_tokens=12, do_sample=False, disable_compile=True)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    options |= dict(cache_implementation=kind) if kind == "static" else {}
    if with_padding:
        options["attention_mask"] = mask
    got, want = (
        model(name).generate(ids if with_padding else tokens(), **options)
        for name in (NAME, "sdpa" if with_padding else "eager")
    )
    assert torch.equal(got.sequences, want.sequences)
    close(torch.stack(got.logits), torch.stack(want.logits))


@torch.no_grad()
@pytest.mark.parametrize("from_first_token", [False, True])
def test_padding_is_hidden(from_first_token):
    """Padding on the left and on the right; positions of the slots, or from the first token.

    The model's indexer scores padding, and transformers' `eager` and `sdpa` give tokens without
    a key different outputs in dense layers. Ours are those of `sdpa`.
    """
    ids, mask, positions = padded()
    mask[0, -6:] = 0
    named = {"position_ids": positions} if from_first_token else {}
    named["attention_mask"] = mask
    got, want = (model(name)(ids, **named).logits[mask == 1] for name in (NAME, "sdpa"))
    close(got, want)
    unmasked = model(NAME)(ids, position_ids=positions if from_first_token else None).logits
    assert (unmasked[mask == 1] - want).abs().max() > 100 * FLOAT32_MAX


def module(topk=TOPK):
    """What `block_attention` and transformers' functions read of a layer."""
    indexer = MiniMaxM3VLIndexer.__new__(MiniMaxM3VLIndexer)
    torch.nn.Module.__init__(indexer)
    indexer.block_size, indexer.topk_blocks = BLOCK, topk
    indexer.config = types.SimpleNamespace(num_attention_heads=4)
    return types.SimpleNamespace(
        indexer=indexer, num_key_value_groups=2, training=False, is_causal=True
    )


def arguments(queries, keys):
    generator = torch.Generator().manual_seed(5)
    sizes = (4, queries), (2, keys), (2, keys)
    return [torch.randn(2, *size, 16, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.parametrize("index_heads", [1, 2])
@pytest.mark.parametrize("queries", [1, 11, 40])
def test_any_order_and_later_blocks(index_heads, queries):
    """Indices as a set: unsorted, with blocks that begin after the query."""
    layer, tensors = module(topk=6), arguments(queries, 40)
    generator = torch.Generator().manual_seed(1)
    shape = 2, index_heads, queries, 5
    indices = torch.rand(shape, generator=generator).argsort(-1)[..., :4]
    own = torch.arange(40 - queries, 40).expand(2, index_heads, -1)[..., None] // BLOCK
    indices = indices.masked_fill(indices[..., :1] == 4, -1)
    indices = torch.cat([indices.masked_fill(indices == own, -1), own], -1)
    positions = torch.arange(40 - queries, 40).expand(2, -1)
    about = None, 40, torch.float32, torch.device("cpu"), positions
    mask = layer.indexer.build_block_mask(indices, *about)
    scale = tensors[0].shape[-1] ** -0.5
    want, _ = eager_attention_forward(layer, *tensors, mask, scaling=scale)
    got, weights = block_attention(layer, *tensors, None, block_indices=indices)
    assert weights is None
    close(got, want)
    do = torch.randn(want.shape, generator=generator)
    pairs = (torch.autograd.grad(out, tensors, do) for out in (got, want))
    for mine, theirs in zip(*pairs, strict=True):
        close(mine, theirs)


@torch.no_grad()
def test_the_indexer_is_ours_under_our_name(monkeypatch):
    """Those that transformers' own chooses; nothing of queries times keys; undone by a name."""
    ids, found = tokens(1, 300), {}
    made = copy.deepcopy(model("eager"))
    indexer = made.model.layers[1].self_attn.indexer
    indexer.register_forward_hook(lambda module, given, out: found.setdefault(name, out))
    for name in ("eager", NAME, "sdpa"):
        made.set_attn_implementation(name)
        if name != NAME:
            made(ids)
            continue
        with monkeypatch.context() as patch, Sizes() as sizes:
            set_limits(patch, torch_chunk_bytes=50_000)
            made(ids)
        assert sizes.most < 300 * 300
    assert found[NAME].dtype == torch.int32 and found["eager"].dtype == torch.int64
    assert torch.equal(*(found[x].long().sort().values for x in (NAME, "eager")))
    assert torch.equal(found["sdpa"], found["eager"])


def test_dense_layers_go_to_sdpa():
    """The vision tower sees all keys; fewer queries than keys are the last ones."""
    layer, tensors = module(), arguments(9, 9)
    layer.is_causal = False
    mean = block_attention(layer, torch.zeros_like(tensors[0]), *tensors[1:], None)[0]
    close(mean[:, 0, ::2], tensors[2].mean(dim=2))
    layer.is_causal = True
    query, key, value = tensors
    whole = block_attention(layer, *tensors, None)[0]
    last = block_attention(layer, query[:, :, 4:], key, value, None)[0]
    close(last, whole[:, 4:])


def test_autocast_computes_in_its_dtype():
    """Under autocast rotation leaves queries and keys in float32, values in bfloat16."""
    layer, (query, key, value) = module(), arguments(16, 16)
    indices = torch.zeros(2, 2, 16, 1, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = block_attention(
            layer, query, key, value.bfloat16(), None, block_indices=indices
        )
    assert out.dtype == torch.bfloat16


@refusals.by_row("call of block attention")
def test_bad_input(row):
    given = dict(module=module(), attention_mask=None)
    given |= dict(block_indices=torch.zeros(2, 2, 16, 1).long())
    given |= dict(zip(("query", "key", "value"), arguments(16, 16), strict=True))
    with row.refused():
        block_attention(**given | row.given())


@refusals.by_row("model by block attention")
def test_masks_and_packed_rows_that_are_refused(row):
    named = row.given()
    width = named["attention_mask"].shape[-1] if "attention_mask" in named else 8
    with row.refused():
        model(NAME)(tokens(1, width), **named)


def test_a_window_is_refused():
    with pytest.raises(NotImplementedError, match="retain every key"):
        key_states(1, 1, 8, 20, 12, causal_mask_function)


def test_no_padding_needs_no_mask():
    ones = torch.ones(2, 8, dtype=torch.bool)
    assert key_states(2, 3, 8, 5, attention_mask=ones) is None
    assert key_states(2, 8, 8) is None
    ones[1, 0] = False
    assert key_states(2, 3, 8, 5, attention_mask=ones).shape == (2, 1, 2, 8)
    static = key_states(2, 3, 8, torch.tensor(2), attention_mask=ones[:, 1:6])
    assert static.tolist() == [[[[1] * 5 + [0] * 3]]] * 2

"""The layout of zen-E/NSA-1B on tiny weights: loops over tokens, both selections, caches, files."""

import functools
import json

import numpy as np
import pytest
import torch
import transformers

from nsa_torch import NSAConfig
from nsa_torch.huggingface import LlamaNSAConfig, LlamaNSAForCausalLM
from tests import refusals
from tests.model_sizes import CACHE, MODELS
from tests.oracles import nsa

SIZES = MODELS["llama nsa"]
BLOCK, PLACES, WINDOW = (SIZES[x] for x in ("block_size", "block_counts", "window_size"))
HEADS, KV_HEADS, WIDTH = SIZES["num_attention_heads"], 2, SIZES["head_dim"]
by_selection = pytest.mark.parametrize("selection", ["exact", "trained"])
CONFIG = NSAConfig(BLOCK, BLOCK, BLOCK, PLACES, 0, 1, WINDOW)


def model(selection, **changed):
    torch.manual_seed(0)
    config = LlamaNSAConfig(**SIZES | changed, selection=selection)
    made = LlamaNSAForCausalLM(config).eval().double()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "proj" in name:
                weight.normal_(std=0.3)
    return made


def rotated(x, theta=10000.0):
    """`[T, heads, WIDTH]`, in halves."""
    angle = torch.arange(len(x))[:, None, None].double()
    angle = angle * theta ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    one, two = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    turned = one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()
    return torch.cat(turned, -1)


def chosen_by_loops(scores, selection):
    """Blocks of one query from a list of its candidates' scores, the last its own."""
    ranked = lambda pairs: sorted(pairs, key=lambda pair: -pair[0])
    pairs = [(score, j) for j, score in enumerate(scores)]
    if selection == "exact":
        return [j for _, j in ranked(pairs)[:PLACES]]
    held = []
    for first in range(0, len(pairs), PLACES):
        chunk = ranked(pairs[first : first + PLACES])
        half = PLACES // 2
        held = ranked(held[:half] + chunk[:half]) if first else chunk
    return [j for _, j in held]


def attention_by_loops(layer, x, selection):
    """The layer's output `[T, E]` for one row of hidden states, by the oracle of NSA."""
    project = lambda name: (x @ getattr(layer, name).weight.T).unflatten(-1, (-1, WIDTH))
    query, key = rotated(project("q_proj"))[None], rotated(project("k_proj"))[None]
    gates = (x @ layer.g_proj.weight.T).sigmoid().unflatten(-1, (HEADS, 3))[None]
    given = query, (key,) * 3, (project("v_proj")[None],) * 3, gates
    attend = functools.partial(nsa.attention, *given, config=CONFIG)
    lists = torch.full((1, len(x), KV_HEADS, PLACES), -1)
    for place, row in zip(
        np.ndindex(lists.shape[:3]), attend().scores.flatten(0, 2), strict=True
    ):
        candidates = [*row[: place[1] // BLOCK].tolist(), torch.inf]  # the own block is certain
        found = chosen_by_loops(candidates, selection)
        lists[place][: len(found)] = torch.tensor(found)
    return attend(block_indices=lists).out[0].flatten(1) @ layer.o_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("ties", [False, True])
@by_selection
def test_a_layer_is_the_loops(selection, ties):
    """Of equal scores the lower block; half the places are the last chunk's."""
    made, seen = model(selection), {}
    layer = made.model.layers[1].self_attn
    if ties:
        layer.q_proj.weight.zero_()
    keep = lambda module, given, named, out: seen.update(named, out=out[0])
    layer.register_forward_hook(keep, with_kwargs=True)
    made(torch.arange(59)[None] % 40)
    want = attention_by_loops(layer, seen["hidden_states"][0], selection)
    torch.testing.assert_close(seen["out"][0], want, rtol=0, atol=1e-6)
    other = {"exact": "trained", "trained": "exact"}[selection]
    assert (
        attention_by_loops(layer, seen["hidden_states"][0], other) - want
    ).abs().max() > 1e-3


@torch.no_grad()
@by_selection
def test_cached_is_uncached(selection):
    made, ids = model(selection), torch.arange(47)[None] * 7 % 40
    want = made(ids).logits
    cache, parts = None, []
    for part in ids.split([21, 9, 1, 1, 15], dim=1):
        out = made(part, use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-6)
    tokens = made.generate(ids, max_new_tokens=4, do_sample=False)
    assert tokens[0, 47] == want[0, -1].argmax()


@torch.no_grad()
@by_selection
def test_packed_is_apart(selection):
    made, ids, ends = model(selection), torch.arange(59)[None] * 7 % 40, [21, 1, 37]
    want = torch.cat([made(x).logits for x in ids.split(ends, dim=1)], dim=1)
    position = torch.cat([torch.arange(n) for n in ends])[None]
    borders = torch.tensor([0, 21, 22, 59])
    for options in (
        {"position_ids": position},
        {"cu_seq_lens_q": borders, "max_length_q": 37},
        {"cu_seqlens": borders},
        {"cu_seq_lens_k": borders, "position_ids": position},
        {"seq_idx": torch.repeat_interleave(torch.tensor(ends))[None]},
    ):
        got = made(ids, **options)
        torch.testing.assert_close(got.logits, want, rtol=0, atol=1e-6)
        assert got.get(CACHE) is None
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must be None if .* a cache is given"):
        made(ids, cu_seq_lens_q=borders, **{CACHE: transformers.DynamicCache()})


def test_files(tmp_path):
    """Names of the weights and of config.json as the checkpoint has them; either selection."""
    made = model("trained")
    names = {f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkvog"}
    assert names < made.state_dict().keys()
    made.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["model_type"] == "llama-nsa" and about["block_counts"] == PLACES
    found = {}
    exec((tmp_path / "modeling_nsa.py").read_text(), found)
    names = {
        auto: found[name.removeprefix("modeling_nsa.")]
        for auto, name in about["auto_map"].items()
    }
    assert names == {"AutoConfig": LlamaNSAConfig, "AutoModelForCausalLM": LlamaNSAForCausalLM}
    for name in ("selection", "rope_parameters", "dtype"):
        about.pop(name, None)
    about |= {"rope_theta": 500000.0, "architectures": ["LlamaNSAForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LlamaNSAForCausalLM) and loaded.config.selection == "trained"
    assert loaded.config.rope_parameters["rope_theta"] == 500000.0
    exact = LlamaNSAForCausalLM.from_pretrained(tmp_path, selection="exact")
    assert exact.config.selection == "exact"
    for name, weight in made.state_dict().items():
        assert torch.equal(exact.state_dict()[name].double(), weight), name


def test_gradients_reach_every_weight():
    made, ids = model("trained"), torch.arange(40)[None]
    made(ids, labels=ids).loss.backward()
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in made.parameters())


@refusals.by_row("configuration of llama-nsa")
def test_bad_configurations(row):
    with row.refused():
        LlamaNSAConfig(**SIZES | row.changes)


@by_selection
@refusals.by_row("call of llama-nsa")
def test_bad_calls(row, selection):
    given = {"input_ids": torch.arange(12)[None]} | row.given()
    with row.refused():
        model(selection)(**given)


def test_what_would_attend_to_other_tokens_is_refused():
    """A cache with room behind the tokens."""
    made, ids = model("exact"), torch.arange(12)[None]
    cache = transformers.StaticCache(config=made.config, max_cache_len=32)
    with pytest.raises(NotImplementedError, match="got StaticCache, which returned 32 keys"):
        made(ids, **{CACHE: cache})
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with pytest.raises(ValueError, match=r"position_ids must be consecutive if \w+ is given"):
        made(ids, position_ids=positions, **{CACHE: transformers.DynamicCache()})
    later = made(ids, position_ids=torch.arange(5, 17)[None]).logits
    torch.testing.assert_close(later, made(ids).logits)  # a product follows from distances

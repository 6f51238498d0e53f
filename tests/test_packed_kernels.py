"""Packed rows whose tiles and blocks begin where their sequences do, on Mosaic kernels in the
interpreter with its race detector, against the oracle.
"""

import functools
import itertools
from unittest import mock

import pytest
import torch

import nsa_torch
from nsa_core.config import NSAConfig
from nsa_core.plan.kernels import kernels_of
from nsa_core.steps import mosaic_stored_ds
from nsa_torch import mosaic
from tests import planned
from tests.cross_compile import compile_report
from tests.inputs import Case
from tests.test_mosaic_compiled import ALLOWED
from tests.test_torch_mosaic import inputs, interpret
from tests.torch_inputs import check_branch, check_whole, on_the_cpu

FEW = NSAConfig(16, 8, 64, num_selected=3, num_local=1, window=50)
# A tile of each walk has tokens of several sequences; the last of them is padding.
SEGMENTS = 70, 0, 1, 13, -6
PACKED = functools.partial(Case, 90, 90, B=1, config=FEW, segments=SEGMENTS, dtype="bfloat16")
G16 = PACKED(H=16, Hkv=1, Dv=48)
G3 = PACKED(H=6, Hkv=2, D=64, Dv=64)


@pytest.fixture
def ran(interpreted, monkeypatch):
    """The kernels that run."""
    with planned.on_the_cpu(monkeypatch, interpret) as found, on_the_cpu(monkeypatch):
        yield found


def test_ds_is_stored(ran, monkeypatch):
    gradients = mock.Mock(side_effect=mosaic_stored_ds.gradients)
    monkeypatch.setattr(mosaic_stored_ds, "gradients", gradients)
    check_branch(G16, "selected", "mosaic")
    assert gradients.called


def test_list_entries_are_single_tokens(ran):
    check_branch(G3, "selected", "mosaic")
    assert [x.spec.single_token for x in ran if x.name == "dkv_partials"] == [True]


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_means_are_made_in_slots(ran, shared):
    check_whole(G3, "mosaic", shared=shared)
    names = [kernel.name for kernel in ran]
    assert names[0] == "compress_means" and names[-1] == "merge_key_gradients"


SMALL_BLOCKS = NSAConfig(8, 4, 16, num_selected=4, num_local=1, window=37)


@pytest.mark.parametrize("heads", [(16, 1), (6, 2), (20, 1)], ids=str)
def test_each_sequence_selects_what_it_selects_alone(ran, heads):
    """Bit by bit."""
    H, kv_heads = heads
    lengths, S = (70, 0, 1, 98, 13), 190
    query, key = (x.detach() for x in inputs(S, S, H, kv_heads, 16, 16)[:2])
    borders = torch.tensor([0, *itertools.accumulate(lengths)])
    place = {"config": SMALL_BLOCKS, "cu_seqlens": borders}
    compressed_key = nsa_torch.compress(key, **place)
    options = {"implementation": "mosaic"}
    found = nsa_torch.select_blocks(query, compressed_key, **place, **options)
    assert (found[:, sum(lengths) :] == -1).all()
    assert found.amax() == 6  # of which four are selected
    for first, end in itertools.pairwise(borders.tolist()):
        if first == end:
            continue
        own, tokens = (x[:, first:end].clone() for x in (query, key))
        compressed_key = nsa_torch.compress(tokens, config=SMALL_BLOCKS)
        alone = nsa_torch.select_blocks(own, compressed_key, config=SMALL_BLOCKS, **options)
        assert torch.equal(found[:, first:end], alone)


@pytest.mark.parametrize("heads", [(16, 1), (6, 2)], ids=str)
def test_the_last_queries(ran, heads):
    """As a chunk of context parallelism asks: they have the gradients that they have among all."""
    H, kv_heads = heads
    query, key, value = inputs(90, 90, H, kv_heads, 64, 64)[:3]
    rng = torch.Generator().manual_seed(0)
    own = torch.arange(90)[None, :, None, None] // 64
    indices = torch.randint(0, 2, (1, 90, kv_heads, 1), generator=rng).minimum(own)
    indices = torch.cat([indices, torch.full((1, 90, kv_heads, 2), -1)], -1).to(torch.int32)
    do = torch.randn(1, 90, H, 64, generator=rng).bfloat16()
    do[:, :50] = 0
    borders = torch.tensor([0, 70, 70, 71, 84])
    found = []
    for first in (0, 50):
        tokens = query[:, first:].contiguous()
        options = {"config": FEW, "kv_len": 90, "cu_seqlens": borders}
        out, _ = mosaic.selected_attention(tokens, key, value, indices[:, first:], **options)
        dq, *pair = torch.autograd.grad(out, [tokens, key, value], do[:, first:])
        found.append([out[:, -40:], dq[:, -40:], *pair])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


LAYERS = {
    "paper": {"heads": 64, "kv_heads": 4, "key_width": 128, "value_width": 128},
    "small": {"heads": 12, "kv_heads": 2, "key_width": 64, "value_width": 64},
}


def kernels(layer, packed):
    """Those of a forward pass and of its gradients, for any length."""
    options = {"dtype": "bfloat16", "config": NSAConfig(), "gradients": True, "length": 65536}
    options |= {"compresses": True, "shared": True}
    found = kernels_of(**LAYERS[layer], **options, packed=packed)
    return list(dict.fromkeys(kernel.for_any_length() for kernel in found))


def only_packed(layer):
    """The kernels that rows of one sequence do not have."""
    rows = kernels(layer, False)
    return [kernel for kernel in kernels(layer, True) if kernel not in rows]


def build(layer, index):
    return only_packed(layer)[index]


@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_fit_the_chip(layer):
    every = only_packed(layer)
    builders = [(f"{__name__}:build", {"layer": layer, "index": i}) for i in range(len(every))]
    for report in compile_report(builders):
        assert report["registers"] <= ALLOWED.get(report["name"], 255), report
        assert not report["spill_store_bytes"] and not report["remarks"], report

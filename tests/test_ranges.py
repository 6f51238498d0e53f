"""A selection as key ranges in torch, and `fa2` that reads by them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_torch
from bench import ranges as bench_ranges
from nsa_jax import ranges as jax_ranges
from nsa_torch import NSAConfig, geometry, packing, ranges
from tests import pretend
from tests.problems import SMALL
from tests.torch_inputs import on_the_cpu, run


def in_jax(blocks, position, config):
    """`nsa_jax.ranges.to_ranges` of tensors."""
    arrays = (jnp.asarray(x.numpy()) for x in (blocks, position))
    return torch.tensor(np.asarray(jax_ranges.to_ranges(*arrays, config)))


WAYS = (ranges.to_ranges, ranges.to_ranges_by_row, in_jax)
by_way = pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)


def selected(length, n, first=0):
    """Random blocks of `SMALL` that queries at `first` and later may see, some slots empty."""
    drawn = np.random.default_rng(0)
    position = np.broadcast_to(first + np.arange(length), (2, length))
    found = np.full((2, length, 3, n), -1, np.int32)
    for place in np.ndindex(found.shape[:3]):
        blocks = position[place[:2]] // SMALL.select_block + 1
        count = drawn.integers(0, min(n, blocks) + 1)
        found[place][:count] = np.sort(drawn.choice(blocks, count, replace=False))
    return found, position


@by_way
@pytest.mark.parametrize(("length", "n", "first"), [(37, 4, 0), (21, 1, 50), (45, 9, 3)])
def test_selection_v2_equiv(make, length, n, first):
    blocks, position = selected(length, n, first)
    expected = bench_ranges.v1(blocks, position, SMALL)
    found = make(torch.tensor(blocks), torch.tensor(position), SMALL)
    assert found.dtype == torch.int32 and expected.any()
    np.testing.assert_array_equal(found.numpy(), expected)


@by_way
@pytest.mark.parametrize("behind", [7, 2**28, 2**29, 2**31 - 1])  # times a block: beyond int32
def test_what_no_query_may_see_is_in_no_range(make, behind):
    blocks = torch.tensor([[[[0, 1, behind]], [[0, 2, 3]], [[-1, -1, -1]]]], dtype=torch.int32)
    position = torch.tensor([[10, -1, 40]])  # of padding: nothing
    found = make(blocks, position, SMALL)
    size = SMALL.select_block
    assert found.tolist() == [
        [[[[0, min(11, 2 * size)], [0, 0], [0, 0]]], *[[[[0, 0]] * 3]] * 2]
    ]


def test_ranges_are_read_block_by_block():
    blocks, _ = selected(50, 6)
    of = geometry.geometry(
        2, 50, config=SMALL, kv_len=50, cu_seqlens=None, device=torch.device("cpu")
    )
    handed = ranges.to_ranges(torch.tensor(blocks), of.position, SMALL)
    queries = slice(3, 44)
    one, bounds = packing.selected_ranges(of, torch.tensor(blocks), queries, SMALL)
    other, same_bounds = packing.selected_ranges(
        of, torch.tensor(blocks), queries, SMALL, handed
    )
    there = one.length > 0
    assert torch.equal(bounds, same_bounds) and torch.equal(one.length, other.length)
    for name in ("start", "place"):
        assert torch.equal(getattr(one, name)[there], getattr(other, name)[there])
    assert other.longest == SMALL.select_block


def attended(lengths=None, n=4):
    """Output, statistics and gradients of the selected branch by `fa2`, blocks of `SMALL`."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 50, 6, 8), *torch.randn(2, 2, 50, 3, 8)
    blocks, _ = selected(50, n)
    where = {"kv_len": 50}
    if lengths is not None:
        query, key, value, blocks = query[:1], key[:1], value[:1], blocks[:1].copy()
        where["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        local = np.concatenate([np.arange(each) for each in lengths])
        blocks[0, np.arange(len(local), 50)] = -1  # padding
        for t, place in enumerate(local):
            blocks[0, t][blocks[0, t] > place // SMALL.select_block] = -1
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out, lse = run("selected", "fa2", *leaves, torch.tensor(blocks), config=SMALL, **where)
    out.square().sum().backward()
    return out, lse, *(x.grad for x in leaves)


SEEN = {"alone": {}, "packed": {"lengths": (20, 1, 25)}, "more slots than blocks": {"n": 9}}


by_mode = pytest.mark.parametrize("mode", ["v1", "v2"])


@by_mode
@pytest.mark.parametrize("given", SEEN.values(), ids=SEEN)
def test_fa2_by_ranges_is_fa2_by_blocks(given, mode, monkeypatch):
    """Bitwise; `test_parity.py` compares the blocks with the oracle. And ranges were read."""
    name = {"v1": "to_ranges_by_row", "v2": "to_ranges"}[mode]
    used = pretend.calls_of(monkeypatch, ranges, name)
    with on_the_cpu(monkeypatch):
        expected = attended(**given)
        assert not used
        with ranges.using(mode):
            found = attended(**given)
    assert used and expected[0].abs().max() > 0.1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_which_way():
    least = ranges.ADAPTIVE_MIN_LEN
    assert [ranges.way("adaptive", x) for x in (least - 1, least)] == ["v1", "v2"]
    assert [ranges.way(mode, 5) for mode in ("none", "v1", "v2")] == ["none", "v1", "v2"]
    with (
        pytest.raises(ValueError, match=r"ranges must be one of .* got 'v3'"),
        ranges.using("v3"),
    ):
        pass


@pytest.mark.parametrize("mode", ["none", "v2"])
def test_the_choice_is_compiled(mode):
    """Without a break of the graph: torch 2.11 cannot trace what a context holds. The choice is a
    constant of what was compiled, so that another one is compiled anew."""
    torch.compiler.reset()
    blocks, position = (torch.tensor(x) for x in selected(20, 3))

    @torch.compile(fullgraph=True, backend="eager")
    def handed(blocks):
        found = ranges.handed(blocks, lambda: position, SMALL)
        return blocks if found is None else found

    with ranges.using(mode):
        expected = blocks if mode == "none" else ranges.to_ranges(blocks, position, SMALL)
        assert torch.equal(handed(blocks), expected)


@pytest.mark.gpu
@by_mode
def test_ranges_change_nothing_on_a_gpu(mode):
    """Bitwise the output of blocks; gradients add up by atomics, in no fixed order."""
    torch.manual_seed(0)
    shape = dict(device="cuda", dtype=torch.bfloat16)
    query = torch.randn(2, 700, 8, 64, **shape)
    key, value = torch.randn(2, 2, 700, 2, 64, **shape)
    config = NSAConfig()
    blocks = nsa_torch.select_blocks(
        query, nsa_torch.compress(key, config=config), config=config
    )
    results = []
    for how in ("none", mode):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        with ranges.using(how):
            out, lse = nsa_torch.selected_attention(
                *leaves, blocks, config=config, implementation="fa2"
            )
            out.float().square().sum().backward()
        results.append((out, lse, *(x.grad for x in leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    assert torch.equal(results[0][0], results[1][0])

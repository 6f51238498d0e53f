"""The lists that `gathered_attention` reads, emulated and on a GPU, against plain Python."""

import dataclasses

import numpy as np
import pytest
import torch

import nsa_torch.torch_ops
from kernels_pallas.specs import block_query_lists
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.selected import COUNTS
from kernels_pallas.specs.work_items import WorkItems
from tests.limits import set_limits
from tests.oracles.list_kernels import BITMAP_MUTANTS, emulated, interpreted
from tests.test_block_query_lists import draw, needs_gpu

KEYS = 64  # of a block
# Tokens in tiles of some, whose block list may have so many blocks.
SPECS = {
    "one part": WorkItems(
        BlockQueryLists(2, 70, 700, 2, 4, KEYS, 1, False, tile=16, limit=7), 96, 20
    ),
    "parts": WorkItems(
        BlockQueryLists(1, 200, 900, 2, 5, KEYS, 1, False, tile=21, limit=10), 64, 3
    ),
    "all": WorkItems(BlockQueryLists(2, 90, 590, 1, 3, KEYS, 1, False, tile=8, limit=1), 32, 4),
    "nothing": WorkItems(
        BlockQueryLists(1, 60, 300, 2, 4, KEYS, 1, False, tile=16, limit=60), 32, 4
    ),
    "long": WorkItems(
        BlockQueryLists(1, 150, 9000, 1, 31, KEYS, 1, False, tile=64, limit=100), 96, 2
    ),
}
by_spec = pytest.mark.parametrize("name", SPECS)


def arrays_of(spec, seed=0):
    """Indices, positions, first keys; and `BlockCounts` of the tiles' block lists, of which only
    the number of all blocks is read.
    """
    lists = spec.lists
    indices, position, start = draw(lists, seed)
    position[1:] -= 40  # a shorter row, which may begin with padding
    tiles = -(-lists.T // lists.tile)
    counts = np.full((lists.B, lists.Hkv, tiles, COUNTS), -5, np.int32)
    for b, g, tile in np.ndindex(counts.shape[:3]):
        here = slice(tile * lists.tile, (tile + 1) * lists.tile)
        own = position[b, here, None] // KEYS
        blocks = indices[b, here, g]
        counts[b, g, tile, 1] = len(np.unique(blocks[(blocks >= 0) & (blocks <= own)]))
    return indices, position, start, counts


def expected(spec, indices, position, start, counts):
    """By row, tile of keys and chunk of tokens: the entries of the tokens that leave."""
    lists, found = spec.lists, {}
    for b, t, g, j in np.ndindex(indices.shape):
        block = int(indices[b, t, g, j])
        tile = t // lists.tile
        leaves = tile > 0 and counts[b, g, tile - 1, 1] > lists.limit
        near = max(position[b, tile * lists.tile], 0) // KEYS - 1
        if leaves and 0 < block < near and block * KEYS <= position[b, t]:
            place = b * lists.Hkv + g, block, t // lists.chunk
            found.setdefault(place, []).append((t * lists.Hkv + g) * lists.n + j)
    return found


def check_lists(spec, arrays, edges, entries):
    lists, (edges, entries) = spec.lists, (np.asarray(x) for x in (edges, entries))
    want = expected(spec, *arrays)
    places = np.ndindex(lists.rows, lists.key_tiles, lists.chunks)
    for i, place in enumerate(places):
        assert entries[edges[i] : edges[i + 1]].tolist() == sorted(want.get(place, []))
    assert edges[0] == 0 and edges[-1] == sum(map(len, want.values()))
    return len(want)


def by_emulation(spec, arrays):
    lists = interpreted(spec.lists)
    (counts,) = emulated(block_query_lists.count_entries, lists, *arrays)
    edges = np.cumsum(counts, dtype=np.int32)
    return edges, *emulated(block_query_lists.fill_gather_lists, lists, *arrays, edges)


@by_spec
@pytest.mark.parametrize("few", [False, True])
def test_emulated(monkeypatch, name, few):
    """`few`: chunks of several words, and few blocks that have bits at a time."""
    spec = SPECS[name]
    if few:
        set_limits(monkeypatch, query_list_chunks=1, query_list_bits=32)
        spec = dataclasses.replace(spec, segment=spec.lists.chunk)
        assert spec.lists.words_of_chunk > 1
    arrays = arrays_of(spec, seed=few)
    found = by_emulation(spec, arrays)
    assert check_lists(spec, arrays, *found) or name == "nothing"


MUTANTS = {
    name: BITMAP_MUTANTS[name]
    for name in ("no bit of an earlier token", "bits are not cleared")
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        for spec in SPECS.values():
            arrays = arrays_of(spec)
            check_lists(spec, arrays, *by_emulation(spec, arrays))


def test_gather_lists_are_of_single_tokens():
    with pytest.raises(ValueError, match="single tokens"):
        block_query_lists.fill_gather_lists(BlockQueryLists(1, 64, 64, 1, 4, KEYS, 2, False))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [*SPECS, "paper"])
def test_the_kernels(name):
    made = BlockQueryLists(1, 32768, 32768, 8, 16, KEYS, 1, False, tile=16, limit=30)
    spec = SPECS.get(name) or WorkItems(made, 8192, 1024)
    arrays = [torch.from_numpy(x).cuda() for x in arrays_of(spec)]
    ops = nsa_torch.torch_ops.TORCH_OPS
    (counts,) = ops.run(block_query_lists.count_entries(spec.lists), *arrays)
    edges = torch.cumsum(counts, 0, dtype=torch.int32)
    (entries,) = ops.run(block_query_lists.fill_gather_lists(spec.lists), *arrays, edges)
    edges, entries = edges.cpu().numpy(), entries.cpu().numpy()
    want = by_emulation(spec, [x.cpu().numpy() for x in arrays])
    np.testing.assert_array_equal(edges, want[0])
    total = edges[-1]
    np.testing.assert_array_equal(entries[:total], want[1][:total])
    assert total or name == "nothing"

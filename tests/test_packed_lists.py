"""Query lists and work items of packed rows, by places of their sequences: emulated, they are those
of each sequence as a row of its own, moved.
"""

import itertools

import numpy as np
import pytest
import torch

from kernels_pallas.specs import block_query_lists, work_items
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.work_items import WorkItem, WorkItems
from nsa_core import varlen
from nsa_core.config import NSAConfig
from nsa_core.varlen import Capacity, Varlen
from nsa_torch.torch_ops import TORCH_OPS
from tests import test_block_query_lists
from tests.limits import set_limits
from tests.oracles.list_kernels import emulated, interpreted

KEYS = 64
LENGTHS = {
    "short": ((1, 63, 0, 64, 65, 2, 7), 5),
    "long": ((37, 3000, 1, 1200), 0),
    "a chunk": ((199, 1, 48, 5, 180), 30),
    "two chunks": ((199, 1, 48, 5, 180), 31),
}
GAPS = {"two chunks": 130}  # keys between them
SIZES = {"a token": (64, 1), "tokens": (64, 4), "small blocks": (16, 2), "odd blocks": (48, 2)}


class Packed:
    """A selection of random blocks, drawn as `test_block_query_lists.draw` does."""

    def __init__(self, lengths, block=64, tokens=1, n=4, heads=2):
        self.lengths, padding = LENGTHS[lengths]
        S = sum(self.lengths) + padding
        T, gap = S // 2 if "chunk" in lengths else S, GAPS.get(lengths, 0)
        config = NSAConfig(16, 16, block, num_selected=3, num_local=1)
        self.capacity = Capacity(1, T, S, len(self.lengths), max(self.lengths), config, gap)
        borders = torch.tensor(np.cumsum([0, *self.lengths]))[None]
        tables = Varlen(TORCH_OPS, self.capacity, borders)
        self.tokens = varlen.Tokens(*(x.numpy() for x in tables.tokens))
        self.first_key, self.end = (x.numpy() for x in tables.key_tiles)
        lists = 1, T, self.capacity.places, heads, n, block, tokens, False
        self.lists = interpreted(BlockQueryLists(*lists))
        rng = np.random.default_rng(T)
        indices = np.full((1, T, heads, n), -1, np.int32)
        for _, t, g in np.ndindex(indices.shape[:3]):
            own = max(int(self.tokens.position[0, t]), 0) // block
            some = np.unique([0, *own - rng.integers(0, 3, 2), *rng.integers(0, own + 2, 5)])
            some = rng.permutation(some[some >= 0])[: rng.integers(n + 1)]
            indices[0, t, g, : len(some)] = some
        self.arrays = indices, self.tokens.position, self.tokens.place_start

    def edges(self):
        (counts,) = emulated(block_query_lists.count_entries, self.lists, *self.arrays)
        return np.cumsum(counts, dtype=np.int32)


@pytest.fixture(params=[False, True], ids=["", "few"])
def few(request, monkeypatch):
    """Chunks of several words, and few blocks that have bits at a time."""
    if request.param:
        set_limits(monkeypatch, query_list_chunks=2, query_list_bits=32)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lists(lengths, sizes, few):
    packed = Packed(lengths, *SIZES[sizes])
    assert packed.lists.aligned == (sizes != "odd blocks")
    edges = packed.edges()
    lists = emulated(block_query_lists.fill_lists, packed.lists, *packed.arrays, edges)
    assert test_block_query_lists.check(packed.lists, packed.arrays, edges, *lists)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_places_in_the_selection(lengths, few):
    packed = Packed(lengths)
    lists, edges = packed.lists, packed.edges()
    fill = block_query_lists.fill_gather_lists
    (entries,) = emulated(fill, lists, *packed.arrays, edges)
    indices, position, start = packed.arrays
    found: dict = {}
    for i, block in enumerate(indices.reshape(-1)):
        t, g = i // lists.n // lists.Hkv, i // lists.n % lists.Hkv
        if 0 <= block * KEYS <= position[0, t]:
            place = g, start[0, t] // KEYS + block, t // lists.chunk
            found.setdefault(place, []).append(i)
    places = np.ndindex(lists.rows, lists.key_tiles, lists.chunks)
    for place, (begin, end) in zip(places, itertools.pairwise(edges), strict=True):
        assert sorted(entries[begin:end]) == found.pop(place, [])
    assert not found


@pytest.mark.parametrize("lengths", LENGTHS)
def test_work_items(lengths, few):
    """Each has the keys of its tile, and entries that see all of them where it says so."""
    packed = Packed(lengths)
    capacity, lists, edges = packed.capacity, packed.lists, packed.edges()
    (entries,) = emulated(block_query_lists.fill_lists, lists, *packed.arrays, edges)
    spec = WorkItems(lists, 4096, 5, True, capacity.first_query, capacity.gap)
    table, first, count = emulated(work_items.work_items, spec, edges, packed.first_key)
    items = {
        item.partial: item for item in (WorkItem(*row[:7]) for row in table) if item.row >= 0
    }
    unmasked = 0
    for row, tile in np.ndindex(lists.rows, lists.key_tiles):
        at = (row * lists.key_tiles + tile) * lists.chunks
        begin, end = edges[at], edges[at + lists.chunks]
        for i in range(count[0, row, tile]):
            item = items.pop(first[0, row, tile] + i)
            assert (item.row, item.first_key) == (row, packed.first_key[0, tile])
            assert item.begin == begin < item.end
            assert item.begin <= item.unmasked_begin <= item.unmasked_end == item.end
            causal_end = packed.tokens.causal_end[0, entries[item.unmasked_begin : item.end]]
            assert (causal_end >= item.first_key + KEYS).all()
            unmasked, begin = unmasked + len(causal_end), item.end
        assert begin == end
    assert not items
    assert unmasked > 0 or lengths == "short"


def test_another_tile_is_caught():
    """The check of lists sees a sequence that begins a block later."""
    packed = Packed("short")
    indices, position, start = packed.arrays
    edges = packed.edges()
    moved = indices, position, np.where(start > 0, start - KEYS, start)
    lists = emulated(block_query_lists.fill_lists, packed.lists, *moved, edges)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        test_block_query_lists.check(packed.lists, packed.arrays, edges, *lists)

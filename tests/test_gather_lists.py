"""The lists that `gathered` reads, by warps and by sorting; the oracle is plain Python."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

import nsa_torch.mosaic
from kernels_pallas.mosaic import block_bitmap, block_query_lists
from kernels_pallas.mosaic.block_query_lists import BlockQueryLists, Walk
from kernels_pallas.mosaic.work_items import WorkItems
from nsa_jax import sorted_lists
from tests import warp_emulation
from tests.test_inverse import draw, needs_gpu
from tests.torch_inputs import FRAMEWORKS
from tests.warp_emulation import WANTED_MUTANTS

KEYS = 64  # of a block
# Tokens in tiles of some, whose union may have so many blocks.
SPECS = {
    "one part": WorkItems(
        BlockQueryLists(2, 70, 700, 2, 4, KEYS, 1, False, tile=16, limit=7), 96, 20
    ),
    "parts": WorkItems(
        BlockQueryLists(1, 200, 900, 2, 5, KEYS, 1, False, tile=21, limit=10), 64, 3
    ),
    "all": WorkItems(BlockQueryLists(2, 90, 90, 1, 3, KEYS, 1, False, tile=8, limit=1), 32, 4),
    "nothing": WorkItems(
        BlockQueryLists(1, 60, 300, 2, 4, KEYS, 1, False, tile=16, limit=60), 32, 4
    ),
    "long": WorkItems(
        BlockQueryLists(1, 150, 9000, 1, 31, KEYS, 1, False, tile=64, limit=100), 96, 2
    ),
}
by_spec = pytest.mark.parametrize("name", SPECS)


def arrays_of(spec, seed=0):
    """Indices, positions, first keys; and of the tiles' unions `[B, Hkv, tiles, 2]` the second
    number, how many blocks they have.
    """
    inverse = spec.inverse
    indices, position, start = draw(inverse, seed)
    position[1:] -= 40  # a shorter row, which may begin with padding
    tiles = -(-inverse.T // inverse.tile)
    counts = np.full((inverse.B, inverse.Hkv, tiles, 2), -5, np.int32)
    for b, g, tile in np.ndindex(counts.shape[:3]):
        here = slice(tile * inverse.tile, (tile + 1) * inverse.tile)
        own = position[b, here, None] // KEYS
        blocks = indices[b, here, g]
        counts[b, g, tile, 1] = len(np.unique(blocks[(blocks >= 0) & (blocks <= own)]))
    return indices, position, start, counts


def expected(spec, indices, position, start, counts):
    """By row, tile of keys and chunk of tokens: the slots of the tokens that leave."""
    inverse, found = spec.inverse, {}
    for b, t, g, j in np.ndindex(indices.shape):
        block = int(indices[b, t, g, j])
        tile = t // inverse.tile
        leaves = tile > 0 and counts[b, g, tile - 1, 1] > inverse.limit
        if leaves and 0 <= block * KEYS <= position[b, t]:
            place = b * inverse.Hkv + g, block, t // inverse.chunk
            found.setdefault(place, []).append((t * inverse.Hkv + g) * inverse.n + j)
    return found


def check_lists(spec, arrays, edges, entries):
    inverse, (edges, entries) = spec.inverse, (np.asarray(x) for x in (edges, entries))
    want = expected(spec, *arrays)
    places = np.ndindex(inverse.rows, inverse.tiles, inverse.chunks)
    for i, place in enumerate(places):
        assert entries[edges[i] : edges[i + 1]].tolist() == sorted(want.get(place, []))
    assert edges[0] == 0 and edges[-1] == sum(map(len, want.values()))
    return len(want)


@by_spec
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sorting(name, framework):
    spec = SPECS[name]
    arrays = arrays_of(spec)
    steps, load = FRAMEWORKS[framework]

    def make(*arrays):
        return sorted_lists.inverse(steps, *arrays[:3], spec.inverse, arrays[3])

    make = jax.jit(make) if framework == "jax" else make
    found = make(*map(load, arrays))
    assert check_lists(spec, arrays, *found) or name == "nothing"


def by_warps(spec, arrays, monkeypatch):
    """`inverse.Walk.make` of every warp, on numpy."""
    made = spec.inverse
    bits = block_query_lists.WARPS * made.bits
    shared = 4 * (bits + block_query_lists.WARPS * made.window)
    machine = warp_emulation.machine(monkeypatch, shared, block_query_lists, block_bitmap)

    def each(function, warps_of_row, *given):
        machine.each(function, made.rows, warps_of_row, block_query_lists.WARPS, *given)

    counts = np.full(1 + made.rows * made.tiles * made.chunks, -99, np.int32)
    each(Walk(made, False).make, made.chunks, *arrays, counts, 0, 4 * bits)
    edges = np.cumsum(counts, dtype=np.int32)
    entries = np.full(made.B * made.Hkv * made.T * made.n, -99, np.int32)
    slots = Walk(made, True, slots=True)
    each(slots.make, made.chunks, *arrays, edges, entries, 0, 4 * bits)
    return edges, entries


@by_spec
@pytest.mark.parametrize("few", [False, True])
def test_warps(monkeypatch, name, few):
    """`few`: chunks of several words, and few blocks that have bits at a time."""
    spec = SPECS[name]
    if few:
        monkeypatch.setattr(block_query_lists, "CHUNKS", 1)
        monkeypatch.setattr(block_query_lists, "BITS", 32)
        spec = dataclasses.replace(spec, size=spec.inverse.chunk)
        assert spec.inverse.words_of_chunk > 1
    arrays = arrays_of(spec, seed=few)
    found = by_warps(spec, arrays, monkeypatch)
    assert check_lists(spec, arrays, *found) or name == "nothing"


MUTANTS = {
    name: WANTED_MUTANTS[name]
    for name in ("no bit of an earlier token", "bits are not cleared")
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        for spec in SPECS.values():
            arrays = arrays_of(spec)
            check_lists(spec, arrays, *by_warps(spec, arrays, monkeypatch))


def test_slots_are_of_single_tokens():
    with pytest.raises(ValueError, match="single tokens"):
        block_query_lists.slots(BlockQueryLists(1, 64, 64, 1, 4, KEYS, 2, False))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [*SPECS, "paper"])
def test_the_kernels(name):
    made = BlockQueryLists(1, 32768, 32768, 8, 16, KEYS, 1, False, tile=16, limit=30)
    spec = SPECS.get(name) or WorkItems(made, 8192, 1024)
    arrays = [torch.from_numpy(x).cuda() for x in arrays_of(spec)]
    steps = nsa_torch.mosaic.OPS
    edges = steps._edges(arrays, spec.inverse)
    (entries,) = steps.run(block_query_lists.slots(spec.inverse), *arrays, edges)
    want = sorted_lists.inverse(steps, *arrays[:3], spec.inverse, arrays[3])
    assert torch.equal(edges, want[0])
    total = int(edges[-1])
    assert torch.equal(entries[:total], want[1][:total]) and (total or name == "nothing")

"""Lists of the queries that chose a tile of keys, by warps and by sorting; the oracle is plain
Python.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_torch.mosaic
from kernels_pallas.mosaic import block_bitmap, block_query_lists
from kernels_pallas.mosaic.block_query_lists import BlockQueryLists
from kernels_pallas.mosaic.dkv import REACH
from nsa_jax import mosaic, sorted_lists
from tests import warp_emulation
from tests.warp_emulation import WANTED_MUTANTS, lanes

KEYS = 64  # of a tile
# First keys and positions of the tokens of both rows of a batch.
SPECS = {
    "a token a unit": BlockQueryLists(2, 70, 70, 2, 4, 64, 1, False),
    "chunk of a long prompt": BlockQueryLists(2, 50, 700, 2, 4, 64, 1, False),
    "small blocks": BlockQueryLists(2, 90, 150, 2, 4, 16, 2, False),
    "long blocks": BlockQueryLists(2, 90, 300, 1, 2, 128, 4, False),
    "blocks across borders": BlockQueryLists(1, 90, 300, 2, 3, 48, 5, False),
    "sixteen tokens a unit": BlockQueryLists(1, 150, 200, 2, 3, 64, 16, False),
    "packed": BlockQueryLists(2, 90, 90, 2, 3, 16, 3, True),
    "packed, longer blocks": BlockQueryLists(1, 300, 300, 1, 3, 64, 8, True),
    "packed, long blocks": BlockQueryLists(1, 300, 300, 1, 2, 128, 1, True),
    "packed, a chunk": BlockQueryLists(1, 80, 260, 2, 3, 64, 4, True),
    "packed, 32 blocks and no more": BlockQueryLists(1, 40, 517, 1, 3, 16, 1, True),
    "packed, long": BlockQueryLists(1, 80, 4500, 1, 3, 64, 3, True),
    "packed, odd blocks, long": BlockQueryLists(1, 80, 4500, 1, 3, 48, 2, True),
    "long": BlockQueryLists(1, 60, 9000, 1, 6, 64, 1, False),
}
# Of packed rows by their number of keys.
LENGTHS = {
    90: (1, 7, 1, 1, 30, 9),
    300: (1, 7, 1, 1, 30, 9, 120),
    260: (199, 1, 48, 5),
    4500: (37, 4463),
    517: (5, 512),
}


def draw(spec, seed=0):
    """Indices `[B, T, Hkv, n]`, positions and first keys `[B, T]`; neighbours overlap, some
    want what they cannot see, and some nothing.
    """
    rng = np.random.default_rng(seed)
    row = [(t + spec.S - spec.T, 0) for t in range(spec.T)]
    if spec.packed:
        lengths = LENGTHS[spec.S]
        row = [(t, sum(lengths[:i])) for i, n in enumerate(lengths) for t in range(n)]
        row = (row + [(-1, sum(lengths))] * spec.S)[spec.S - spec.T : spec.S]
    position, start = (np.stack([x] * spec.B) for x in np.array(row, np.int32).T)
    indices = np.full((spec.B, spec.T, spec.Hkv, spec.n), -1, np.int32)
    for b, t, g in np.ndindex(indices.shape[:3]):
        own = max(int(position[b, t]), 0) // spec.block
        near, far = own - rng.integers(0, 3, 2), rng.integers(0, own + 2, 5)
        some = np.unique(np.concatenate([[0], near, far]))
        some = rng.permutation(some)[: rng.integers(spec.n + 1)]
        indices[b, t, g, : len(some)] = some
    return indices, position, start


def expected(spec, indices, position, start):
    """By row, tile of keys and chunk of tokens: the entries `(unit, first key of the block)`
    and the bits of their tokens.
    """
    found: dict = {}
    for b, t, g in np.ndindex(spec.B, spec.T, spec.Hkv):
        for block in indices[b, t, g].tolist():
            if not 0 <= block * spec.block <= position[b, t]:
                continue
            first = int(start[b, t]) + block * spec.block
            end = min(first + spec.block, int(start[b, t] + position[b, t]) + 1)
            for tile in range(first // KEYS, (end - 1) // KEYS + 1):
                unit = t // spec.tokens
                here = found.setdefault((b * spec.Hkv + g, tile, unit // spec.chunk), {})
                entry = unit, first
                here[entry] = here.get(entry, 0) | 1 << t % spec.tokens
    return found


def check(spec, arrays, edges, units, marks=None, merged=True):
    edges, units = np.asarray(edges), np.asarray(units)
    want = expected(spec, *arrays)
    assert edges[0] == 0 and len(edges) == 1 + spec.rows * spec.tiles * spec.chunks
    place, words = 0, spec.words_of_chunk
    for row, tile, chunk in np.ndindex(spec.rows, spec.tiles, spec.chunks):
        here = dict(want.get((row, tile, chunk), {}))
        assert edges[place] <= edges[place + 1]
        before = ()
        for i in range(edges[place], edges[place + 1]):
            unit = int(units[i])
            if marks is None:
                (entry,) = (x for x in here if x[0] == unit)
                assert here.pop(entry) == 1
            else:
                mark = int(marks[i]) % 2**32
                entry = unit, (mark >> 16) - REACH + tile * KEYS
                here[entry] -= mark % 2**16
                if merged or not here[entry]:
                    assert here.pop(entry) == 0
            order = unit // spec.units_of_word % words, entry[1], unit
            assert order > before or not merged
            before = order
        assert not here
        place += 1
    assert edges[-1] == sum(map(len, want.values())) or not merged
    return len(want)


by_spec = pytest.mark.parametrize("name", SPECS)


@by_spec
def test_sorting(name):
    spec = SPECS[name]
    arrays = draw(spec)
    found = jax.jit(lambda *x: sorted_lists.inverse(mosaic.OPS, *x, spec))(
        *map(jnp.asarray, arrays)
    )
    assert check(spec, arrays, *found, merged=False)
    tensors = map(torch.from_numpy, arrays)
    other = sorted_lists.inverse(nsa_torch.mosaic.OPS, *tensors, spec)
    for x, y in zip(found, other, strict=True):
        assert y.dtype == torch.int32
        np.testing.assert_array_equal(x, y)


def by_warps(spec, arrays, monkeypatch):
    """`inverse.Walk.make` of every warp, on numpy."""
    bits = block_query_lists.WARPS * spec.bits
    shared = 4 * (bits + block_query_lists.WARPS * spec.window)
    machine = warp_emulation.machine(monkeypatch, shared, block_query_lists, block_bitmap)

    def walk(fill, *outputs):
        given = *arrays, *outputs, 0, 4 * bits
        function = block_query_lists.Walk(spec, fill).make
        machine.each(function, spec.rows, spec.chunks, block_query_lists.WARPS, *given)

    counts = np.full(1 + spec.rows * spec.tiles * spec.chunks, -99, np.int32)
    walk(False, counts)
    edges = np.cumsum(counts, dtype=np.int32)
    lists = [np.full(spec.entries, -99, np.int32) for _ in range(1 + spec.marked)]
    walk(True, edges, *lists)
    return edges, *lists


@by_spec
def test_warps(monkeypatch, name):
    spec = SPECS[name]
    arrays = draw(spec)
    assert check(spec, arrays, *by_warps(spec, arrays, monkeypatch))


@by_spec
def test_warps_with_several_words_and_windows(monkeypatch, name):
    """Chunks are longer than a word, sequences longer than what has bits at a time."""
    monkeypatch.setattr(block_query_lists, "CHUNKS", 1)
    monkeypatch.setattr(block_query_lists, "BITS", 32)
    spec = SPECS[name]
    assert spec.words_of_chunk > 1
    assert (spec.tiles > spec.window) == name.endswith("long")
    arrays = draw(spec, seed=1)
    assert check(spec, arrays, *by_warps(spec, arrays, monkeypatch))


MUTANTS = WANTED_MUTANTS | {
    "tokens before the tile count": (
        block_query_lists.Walk,
        "_ends",
        lambda self, tokens, first: (
            lanes((first + tokens.position[0] + 1).max()),
            lanes(2**20),
        ),
    ),
    "units of one token": (block_query_lists.Walk, "_first_bits", -1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for spec in SPECS.values():
            arrays = draw(spec)
            check(spec, arrays, *by_warps(spec, arrays, monkeypatch))


def by_kernels(spec, arrays):
    from interop.launch import launch

    (counts,) = launch(block_query_lists.counted(spec), *arrays)
    edges = torch.cumsum(counts, 0, dtype=torch.int32)
    return edges, *launch(block_query_lists.filled(spec), *arrays, edges)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU")


@pytest.mark.gpu
@needs_gpu
@by_spec
def test_the_kernels(name):
    spec = SPECS[name]
    arrays = draw(spec)
    on_gpu = [torch.from_numpy(x).cuda() for x in arrays]
    for _ in range(3):
        found = by_kernels(spec, on_gpu)
        assert check(spec, arrays, *(x.cpu() for x in found))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("tokens", "heads", "length"),
    [(1, 4, 65536), (1, 1, 150_000), (4, 2, 150_000), (4, 8, 32768), (16, 2, 16384)],
)
def test_the_kernels_list_what_sorting_lists(tokens, heads, length):
    """Random blocks of long rows; the longest need several windows of bits."""
    spec = BlockQueryLists(1, length, length, heads, 16, 64, tokens, False)
    position = torch.arange(length, device="cuda", dtype=torch.int32)[None]
    generator = torch.Generator("cuda").manual_seed(0)
    draws = torch.rand(length, heads, spec.n, device="cuda", generator=generator)
    indices = (draws * (position[0, :, None, None] // 64 + 1)).int().sort().values
    again = torch.diff(indices, prepend=torch.full_like(indices[..., :1], -1)) == 0
    arrays = torch.where(again, -1, indices)[None], position, 0 * position
    found = by_kernels(spec, arrays)
    wanted = sorted_lists.inverse(nsa_torch.mosaic.OPS, *arrays, spec)
    total = int(found[0][-1])
    assert torch.equal(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(one[:total], other[:total])

"""The query lists of blocks, emulated and on a GPU, against plain Python."""

import numpy as np
import pytest
import torch

from kernels_pallas.mosaic.block_query_lists import Walk
from kernels_pallas.specs import block_query_lists
from kernels_pallas.specs.block_query_lists import BLOCK_OFFSET_BIAS, BlockQueryLists
from tests.limits import set_limits
from tests.oracles.list_kernels import BITMAP_MUTANTS, emulated, interpreted

KEYS = 64  # of a tile
# First keys and positions of the tokens of both rows of a batch.
SPECS = {
    "a token a query tile": BlockQueryLists(2, 70, 70, 2, 4, 64, 1, False),
    "chunk of a long prompt": BlockQueryLists(2, 50, 700, 2, 4, 64, 1, False),
    "small blocks": BlockQueryLists(2, 90, 150, 2, 4, 16, 2, False),
    "long blocks": BlockQueryLists(2, 90, 300, 1, 2, 128, 4, False),
    "blocks across borders": BlockQueryLists(1, 90, 300, 2, 3, 48, 5, False),
    "sixteen tokens a query tile": BlockQueryLists(1, 150, 200, 2, 3, 64, 16, False),
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
    """By row, tile of keys and chunk of tokens: the entries `(query tile, first key of the
    block)` and the bits of their tokens.
    """
    found: dict = {}
    for b, t, g in np.ndindex(spec.B, spec.T, spec.Hkv):
        for block in indices[b, t, g].tolist():
            if not 0 <= block * spec.block <= position[b, t]:
                continue
            first = int(start[b, t]) + block * spec.block
            end = min(first + spec.block, int(start[b, t] + position[b, t]) + 1)
            for tile in range(first // KEYS, (end - 1) // KEYS + 1):
                query_tile = t // spec.tokens
                here = found.setdefault((b * spec.Hkv + g, tile, query_tile // spec.chunk), {})
                entry = query_tile, first
                here[entry] = here.get(entry, 0) | 1 << t % spec.tokens
    return found


def check(spec, arrays, edges, query_tiles, token_bits=None):
    edges, query_tiles = np.asarray(edges), np.asarray(query_tiles)
    want = expected(spec, *arrays)
    assert edges[0] == 0 and len(edges) == 1 + spec.rows * spec.key_tiles * spec.chunks
    place, words = 0, spec.words_of_chunk
    for row, tile, chunk in np.ndindex(spec.rows, spec.key_tiles, spec.chunks):
        here = dict(want.get((row, tile, chunk), {}))
        assert edges[place] <= edges[place + 1]
        before = ()
        for i in range(edges[place], edges[place + 1]):
            query_tile = int(query_tiles[i])
            if token_bits is None:
                (entry,) = (x for x in here if x[0] == query_tile)
                assert here.pop(entry) == 1
            else:
                word = int(token_bits[i]) % 2**32
                entry = query_tile, (word >> 16) - BLOCK_OFFSET_BIAS + tile * KEYS
                here[entry] -= word % 2**16
                assert here.pop(entry) == 0
            order = query_tile // spec.query_tiles_of_word % words, entry[1], query_tile
            assert order > before
            before = order
        assert not here
        place += 1
    assert edges[-1] == sum(map(len, want.values()))
    return len(want)


by_spec = pytest.mark.parametrize("name", SPECS)


def by_emulation(spec, arrays):
    spec = interpreted(spec)
    (counts,) = emulated(block_query_lists.count_entries, spec, *arrays)
    edges = np.cumsum(counts, dtype=np.int32)
    return edges, *emulated(block_query_lists.fill_lists, spec, *arrays, edges)


@by_spec
def test_emulated(name):
    spec = SPECS[name]
    arrays = draw(spec)
    assert check(spec, arrays, *by_emulation(spec, arrays))


@by_spec
def test_several_words_and_windows(monkeypatch, name):
    """Chunks are longer than a word, sequences longer than what has bits at a time."""
    set_limits(monkeypatch, query_list_chunks=1, query_list_bits=32)
    spec = SPECS[name]
    assert spec.words_of_chunk > 1
    assert (spec.key_tiles > spec.window) == name.endswith("long")
    arrays = draw(spec, seed=1)
    assert check(spec, arrays, *by_emulation(spec, arrays))


MUTANTS = BITMAP_MUTANTS | {
    "tokens before the tile count": (
        Walk,
        "_ends",
        lambda self, warp, tokens, first_key: (
            warp.largest(first_key + tokens.position[0] + 1),
            warp.word(2**20),
        ),
    ),
    "query tiles of one token": (Walk, "_first_bits", -1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for spec in SPECS.values():
            arrays = draw(spec)
            check(spec, arrays, *by_emulation(spec, arrays))


def by_kernels(spec, arrays):
    from nsa_interop.launch import launch

    (counts,) = launch(block_query_lists.count_entries(spec), *arrays)
    edges = torch.cumsum(counts, 0, dtype=torch.int32)
    return edges, *launch(block_query_lists.fill_lists(spec), *arrays, edges)


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
def test_the_kernels_do_what_is_emulated(tokens, heads, length):
    """Random blocks of long rows; the longest need several windows of bits."""
    spec = BlockQueryLists(1, length, length, heads, 16, 64, tokens, False)
    position = torch.arange(length, device="cuda", dtype=torch.int32)[None]
    generator = torch.Generator("cuda").manual_seed(0)
    draws = torch.rand(length, heads, spec.n, device="cuda", generator=generator)
    indices = (draws * (position[0, :, None, None] // 64 + 1)).int().sort().values
    again = torch.diff(indices, prepend=torch.full_like(indices[..., :1], -1)) == 0
    arrays = torch.where(again, -1, indices)[None], position, 0 * position
    found = by_kernels(spec, arrays)
    found = [x.cpu().numpy() for x in found]
    want = by_emulation(spec, [x.cpu().numpy() for x in arrays])
    np.testing.assert_array_equal(found[0], want[0])
    total = int(found[0][-1])
    for one, other in zip(found[1:], want[1:], strict=True):
        np.testing.assert_array_equal(one[:total], other[:total])

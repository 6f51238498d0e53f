"""Lists of a selection and work items, integers that no public call shows, against plain Python.

The kernels that make them are emulated on the CPU, and run on a GPU.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kernels_pallas.specs import block_query_lists, tile_block_lists, work_items
from kernels_pallas.specs.block_query_lists import BLOCK_OFFSET_BIAS, BlockQueryLists
from kernels_pallas.specs.selected import COUNTS, BlockCounts, SelectedAttention
from kernels_pallas.specs.work_items import WorkItems, dkv_work_items
from nsa_core.varlen import Capacity, Varlen
from nsa_torch import NSAConfig
from nsa_torch.torch_ops import TORCH_OPS
from tests.devices import BOTH
from tests.limits import set_limits
from tests.oracles.list_kernels import emulated, interpreted
from tests.tables import table

KEYS = 64  # of a tile
by_device = pytest.mark.parametrize("device", BOTH)


def made(describe, spec, device, *arrays):
    """Outputs of the kernel `describe(spec)`, NumPy arrays."""
    if device == "cpu":
        if isinstance(spec, WorkItems):
            spec = dataclasses.replace(spec, lists=interpreted(spec.lists))
            return emulated(describe, spec, *arrays)
        return emulated(describe, interpreted(spec), *arrays)
    from nsa_interop.launch import launch

    found = launch(describe(spec), *(torch.tensor(x, device=device) for x in arrays))
    return [x.cpu().numpy() for x in found]


def packed_row(lengths, size, end):
    """Of each token its position, and where its sequence begins; `end`: of padding."""
    row = [(t, sum(lengths[:i])) for i, n in enumerate(lengths) for t in range(n)]
    return row + [(-1, end)] * (size - len(row))


class Problem(NamedTuple):
    """Lists, the sizes of their work items, and where tokens stand.

    `lengths`: of packed sequences; `placed`: their tiles are of places, and the queries are the
    last tokens, or two chunks of them with `gap` keys between.
    """

    sizes: tuple
    segment: int = 8
    longest: int = 3
    lengths: tuple[int, ...] = ()
    gap: int = 0
    limit: tuple[int, int] = (0, 0)  # tokens of a tile, and blocks from which it is gathered

    @property
    def placed(self):
        return bool(self.lengths) and not self.sizes[7]

    @property
    def capacity(self):
        _, T, S, *_, block, _, _ = self.sizes
        config = NSAConfig(16, 16, block, num_selected=3, num_local=1)
        return Capacity(1, T, S, len(self.lengths), max(self.lengths), config, self.gap)

    @property
    def spec(self):
        sizes = list(self.sizes)
        if self.placed:
            sizes[2] = self.capacity.places
        tile, limit = self.limit
        lists = BlockQueryLists(*sizes, tile=tile, limit=limit)
        where = (self.capacity.first_query, self.gap) if self.placed else (None, 0)
        return WorkItems(lists, self.segment, self.longest, not limit, *where)

    def tokens(self):
        """By token `[B, T]` the position, where blocks begin, and the end of the keys it sees; by
        tile the first key.
        """
        B, T, S = self.sizes[:3]
        tiles = np.arange(self.spec.lists.key_tiles) * KEYS
        if self.placed:
            borders = torch.tensor(np.cumsum([0, *self.lengths]))[None]
            tables = Varlen(TORCH_OPS, self.capacity, borders)
            of = tables.tokens
            arrays = of.position, of.place_start, of.causal_end, tables.key_tiles.first
            return [x.numpy() for x in arrays]
        row = packed_row(self.lengths or [S], S, sum(self.lengths))
        position, start = (np.stack([x] * B) for x in np.array(row[S - T :], np.int32).T)
        if not self.lengths:
            position[1:] -= 40  # a shorter row, which may begin with padding
        return position, start, position + 1, np.stack([tiles] * B)

    def arrays(self):
        """What the kernels that make lists read."""
        lists = self.spec.lists
        position, start, *_ = self.tokens()
        indices = draw(position, lists.Hkv, lists.n, lists.block)
        if not lists.limit:
            return indices, position, start
        counts = np.full((lists.B, lists.Hkv, lists.tiles, COUNTS), -5, np.int32)
        for b, g, tile in np.ndindex(counts.shape[:3]):
            here = slice(tile * lists.tile, (tile + 1) * lists.tile)
            blocks = indices[b, here, g]
            seen = (blocks >= 0) & (blocks <= position[b, here, None] // KEYS)
            counts[b, g, tile, 1] = len(
                np.unique(blocks[seen])
            )  # all that is read of `BlockCounts`
        return indices, position, start, counts


def draw(position, heads, n, block):
    """Indices `[B, T, heads, n]`; neighbours overlap, some want what they cannot see, and some
    nothing.
    """
    rng = np.random.default_rng(0)
    indices = np.full((*position.shape, heads, n), -1, np.int32)
    for b, t, g in np.ndindex(indices.shape[:3]):
        own = max(int(position[b, t]), 0) // block
        some = np.unique([0, *own - rng.integers(0, 3, 2), *rng.integers(0, own + 2, 5)])
        some = rng.permutation(some)[: rng.integers(n + 1)]
        indices[b, t, g, : len(some)] = some
    return indices


TABLE = table("lists")
PROBLEMS = {
    name: Problem(**{k: tuple(x) if isinstance(x, list) else x for k, x in row.items()})
    for name, row in TABLE["lists"].items()
}


def entries_of(lists, arrays):
    """By row, tile of keys and chunk: entries `(query tile, first key of the block)`, of each the
    places in the selection and the bits of its tokens.
    """
    found: dict = {}
    indices, position, start, *counts = arrays
    for b, t, g, slot in np.ndindex(indices.shape):
        block, begin = int(indices[b, t, g, slot]), int(start[b, t])
        if not 0 <= block * lists.block <= position[b, t]:
            continue
        if lists.limit:  # of tokens that leave their tile, far blocks
            tile = t // lists.tile
            leaves = tile > 0 and counts[0][b, g, tile - 1, 1] > lists.limit
            near = max(position[b, tile * lists.tile], 0) // KEYS - 1
            if not (leaves and 0 < block < near):
                continue
        first = begin + block * lists.block
        end = min(first + lists.block, begin + int(position[b, t]) + 1)
        query_tile = t // lists.tokens
        for tile in range(first // KEYS, (end - 1) // KEYS + 1):
            here = found.setdefault((b * lists.Hkv + g, tile, query_tile // lists.chunk), {})
            places, bits = here.setdefault((query_tile, first), ([], 0))
            places = [*places, (t * lists.Hkv + g) * lists.n + slot]
            here[query_tile, first] = places, bits | 1 << t % lists.tokens
    return found


def check_lists(lists, want, edges, query_tiles, token_bits=None):
    places = np.ndindex(lists.rows, lists.key_tiles, lists.chunks)
    for (begin, end), place in zip(itertools.pairwise(edges), places, strict=True):
        here, seen = want.get(place, {}), []
        for i in range(begin, end):
            query_tile = int(query_tiles[i])
            first = [x[1] for x in here if x[0] == query_tile]
            if token_bits is not None:
                word = int(token_bits[i]) % 2**32
                first = [(word >> 16) - BLOCK_OFFSET_BIAS + place[1] * KEYS]
                assert here[query_tile, first[0]][1] == word % 2**16
            word = query_tile // lists.query_tiles_of_word
            seen.append((word, first[0], query_tile))
        assert sorted(set(seen)) == seen and {x[:0:-1] for x in seen} == here.keys()


def cuts(spec):
    """The chunks that segments begin with, and where the last one ends."""
    lists, size = spec.lists, spec.segment
    found, query_tiles = [lists.chunks], lists.query_tiles
    if not spec.halving:
        return [*range(0, lists.chunks, size // lists.chunk), lists.chunks]
    while query_tiles // 2 >= size and lists.T == lists.S and not lists.packed:
        query_tiles //= 2
        found.append(query_tiles // lists.chunk)
    return [*found, 0][::-1]


def full(spec):
    """Edges of as many items as there can be."""
    lists = spec.lists
    counts = np.zeros((lists.rows, lists.key_tiles, lists.chunks), int)
    for low, high in itertools.pairwise(cuts(spec)):
        begin, end = (min(x * lists.chunk * lists.tokens, lists.T) for x in (low, high))
        entries = (end - begin) * lists.n * lists.key_tiles_of_block
        square = lists.T == lists.S and not lists.packed
        seen = min(-(-end // KEYS) if square else lists.key_tiles, entries)
        if entries:
            counts[:, :seen, high - 1] += 1
            counts[:, 0, high - 1] += entries - seen
    return np.append(0, np.cumsum(counts)).astype(np.int32)


def items_of(spec, edges, seen_end, first_key):
    """`{(row, segment): items}`, and of each tile the first partial and their count."""
    lists, found, partials = spec.lists, {}, {}
    chunks = np.arange(lists.chunks) * lists.chunk * lists.tokens
    for row in range(lists.rows):
        place = row * spec.items
        for tile in range(lists.key_tiles):
            key = first_key[row // lists.Hkv, tile]
            first = (row * lists.key_tiles + tile) * lists.chunks
            whole = seen_end[row // lists.Hkv, chunks] >= key + KEYS
            if lists.packed or lists.block % KEYS:
                whole[:] = False  # blocks end within tiles
            whole = edges[first + (whole.argmax() if whole.any() else lists.chunks)]
            first_place = place
            for segment, (low, high) in enumerate(itertools.pairwise(cuts(spec))):
                here = found.setdefault((row, segment), [])
                begin, end = edges[first + low], edges[first + high]
                while begin < end:
                    stop = min(begin + spec.longest, end)
                    masked = min(max(whole, begin), stop)
                    here.append([row, key, begin, masked, stop, stop, place])
                    begin, place = stop, place + 1
            partials[row, tile] = first_place, place - first_place
    return found, partials


def check_items(spec, want, table, *sums, longest_first=False):
    """How many items there are. Segments stand where the spec says, and have the capacity."""
    (items, places), capacities, rows = want, spec.capacities, spec.lists.rows
    assert len(table) == rows * sum(capacities)
    columns = 7 if spec.halving else 6  # without partials
    for (row, segment), here in items.items():
        if longest_first:
            here = sorted(here, key=lambda item: item[2] - item[5])
        first = (segment * rows + row) * capacities[0]
        if spec.halving:
            first = row * sum(capacities) + sum(capacities[:segment])
        found = table[first : first + capacities[segment], :columns].tolist()
        empty = [[-1, 0, 0, 0, 0, 0, 0]] * (capacities[segment] - len(here))
        assert found == [x[:columns] for x in here + empty]
    if spec.halving and not longest_first:
        shape = spec.lists.B, spec.lists.Hkv, spec.lists.key_tiles
        for i, x in enumerate(sums):
            assert (x == np.reshape([each[i] for each in places.values()], shape)).all()
    return sum(map(len, items.values()))


@pytest.mark.parametrize(
    ("name", "few", "device"),
    [
        *((x, False, "cpu") for x in PROBLEMS),
        *(pytest.param(x, False, "cuda", marks=pytest.mark.gpu) for x in PROBLEMS),
        *((x, True, "cpu") for x in TABLE["few"]),
    ],
)
def test_lists(name, few, device, monkeypatch):
    """`few`: chunks of several words, and few blocks that have bits at a time. Machine code is
    built by processes that do not have these limits.
    """
    problem = PROBLEMS[name]
    if few:
        set_limits(monkeypatch, query_list_chunks=1, query_list_bits=32)
    spec = problem.spec
    if few and not spec.halving:
        spec = dataclasses.replace(spec, segment=spec.lists.chunk)
    lists, arrays = spec.lists, problem.arrays()
    assert (lists.words_of_chunk > 1) == few
    assert lists.key_tiles > lists.window or not (few and name.endswith("long"))
    (counts,) = made(block_query_lists.count_entries, lists, device, *arrays)
    edges, want = np.cumsum(counts, dtype=np.int32), entries_of(lists, arrays)
    total = edges[-1]
    assert edges[0] == 0 and total == sum(map(len, want.values()))
    assert total or name == "gathered, nothing"
    if not lists.limit:
        found = made(block_query_lists.fill_lists, lists, device, *arrays, edges)
        check_lists(lists, want, edges, *found)
    if lists.tokens == 1 and lists.block == KEYS and not lists.packed:
        fill = block_query_lists.fill_gather_lists
        (entries,) = made(fill, lists, device, *arrays, edges)
        places = np.ndindex(lists.rows, lists.key_tiles, lists.chunks)
        wanted = [y for x in places for y in sorted(want.get(x, {}).values())]
        assert entries[:total].tolist() == [place for each, _ in wanted for place in each]

    *_, seen_end, first_key = problem.tokens()
    reads = first_key if problem.placed else arrays[1]
    for each in [edges] if problem.placed else [edges, full(spec)]:
        found = made(work_items.work_items, spec, device, each, reads.astype(np.int32))
        want = items_of(spec, each, seen_end, first_key)
        count = check_items(spec, want, *found)
        if spec.halving:
            (ordered,) = made(work_items.ordered_work_items, spec, device, found[0])
            check_items(spec, want, ordered, longest_first=True)
    if spec.halving and not problem.placed:
        assert count == len(found[0]), "no capacity is in vain"


def of_long_row(length, heads, tokens, device):
    """All lists of random blocks of one row."""
    lists = BlockQueryLists(1, length, length, heads, 16, 64, tokens, False)
    position = np.arange(length, dtype=np.int32)[None]
    draws = np.random.default_rng(0).random((1, length, heads, lists.n))
    indices = np.sort((draws * (position[..., None, None] // 64 + 1)).astype(np.int32))
    indices[..., 1:][np.diff(indices) == 0] = -1
    arrays = indices, position, 0 * position
    (counts,) = made(block_query_lists.count_entries, lists, device, *arrays)
    edges = np.cumsum(counts, dtype=np.int32)
    filled = made(block_query_lists.fill_lists, lists, device, *arrays, edges)
    if tokens == 1:
        filled += made(block_query_lists.fill_gather_lists, lists, device, *arrays, edges)
    spec = dkv_work_items(lists)
    table, *sums = made(work_items.work_items, spec, device, edges, position)
    (ordered,) = made(work_items.ordered_work_items, spec, device, table)
    sizes = {"B": 1, "T": length, "S": length, "H": 64 // tokens * heads, "Hkv": heads, "n": 16}
    tiles = SelectedAttention(**sizes, D=64, Dv=64, block=64, dtype="bfloat16", scale=1.0)
    of_tiles = made(tile_block_lists.tile_block_lists, tiles, device, *arrays)
    tables = [x[:, :7] for x in (table, ordered)]  # the last column is not written
    return [counts, *(x[: edges[-1]] for x in filled), *tables, *sums, *of_tiles]


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "heads", "tokens"), TABLE["long rows"])
def test_kernels_do_what_is_emulated(length, heads, tokens):
    """The longest rows need several windows of bits."""
    both = (of_long_row(length, heads, tokens, x) for x in ("cuda", "cpu"))
    for found, want in zip(*both, strict=True):
        np.testing.assert_array_equal(found, want)


TILES = TABLE["tiles"]
OF_TILES = [(tokens, x, {}) for tokens in (1, 8, 32, 64) for x in TILES]
OF_TILES += [(8, "a chunk of a long prompt", {"n": 6, "parts": 2})]
OF_TILES += [(x, "a chunk of a long prompt", {"n": 5}) for x in (8, 64)]  # a small window


@by_device
@pytest.mark.parametrize(("tokens", "place", "change"), OF_TILES, ids=str)
def test_block_lists_of_tiles(tokens, place, change, device, monkeypatch):
    sizes = {"B": 2, "T": 70, "S": 512, "H": 128 // tokens, "Hkv": 2, "D": 64, "Dv": 64, "n": 4}
    spec = SelectedAttention(**sizes | change, block=16, dtype="bfloat16", scale=1.0)
    assert spec.tile.tokens == tokens
    if change == {"n": 5}:
        set_limits(monkeypatch, list_window=64)  # more blocks than have bits at a time
    where = TILES[place]
    if isinstance(where, int):
        row = [(t + where, 0) for t in range(spec.T)]
    else:
        row = packed_row(where, spec.T, 500)
    position, start = (np.stack([x] * spec.B) for x in np.array(row, np.int32).T)
    indices = draw(position, spec.Hkv, spec.n, spec.block)
    if place == "packed, second not cut":
        indices[:] = -1
        indices[:, [0, 21], :, 0] = 0
    describe = tile_block_lists.tile_block_lists
    starts, members, counts = made(describe, spec, device, indices, position, start)
    some = 0
    for at in np.ndindex(spec.B, spec.Hkv, spec.tiles):
        wanted, counted = list_of_tile(spec, indices, position, start, *at)
        bits = sum(
            x.astype(object) << (32 * i) for i, x in enumerate(members[at].view(np.uint32))
        )
        # Past its end a list is zero: an operator gives it out, the same for the same input.
        padded = [*wanted.items(), *[(0, 0)] * (spec.entries - len(wanted))]
        assert [*zip(starts[at].tolist(), bits.tolist(), strict=True)] == padded
        compared = slice(0, 2 if start.any() else None)  # of packed rows no block is far
        assert counts[at].tolist()[compared] == list(counted)[compared]
        some += len(wanted)
    assert bool(some) == (place != "packed, all padding")


def list_of_tile(spec, indices, position, start, b, g, tile):
    """Of each block by its first key the bits of its tokens, and `BlockCounts`."""
    members, cut, far_slots, tokens = {}, [], [], spec.tile.tokens
    here, parts = slice(tile * tokens, (tile + 1) * tokens), spec.parts
    first_position = max(int(position[b, tile * tokens]), 0)
    near = max(first_position // (spec.block * parts) - 1, 0) * parts
    for token, own in enumerate(indices[b, here, g]):
        last, begin = (int(x[b, here][token]) for x in (position, start))
        for slot, block in enumerate(own.tolist()):
            if not 0 <= block * spec.block <= last:
                continue
            first = begin + block * spec.block
            members[first] = members.get(first, 0) | 1 << token
            if (block + 1) * spec.block > last + 1:
                cut.append(first)
            if parts <= block < near:
                far_slots.append(slot // parts)
    found = dict(sorted(members.items()))
    whole = [*found].index(min(cut)) if cut else len(found)
    before = [sum(x < end * spec.block for x in found) for end in (min(near, parts), near)]
    slots = (min(far_slots), max(far_slots) + 1) if far_slots else (spec.n, 0)
    return found, BlockCounts(whole, len(found), *before, *slots)

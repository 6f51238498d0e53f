"""Items of lists, for `gathered` and for gradients of keys, by warps and by array operations;
the oracle is plain Python.
"""

import itertools

import jax
import numpy as np
import pytest
import torch

import nsa_torch.mosaic
from kernels_pallas.mosaic import work_items
from kernels_pallas.mosaic.block_query_lists import BlockQueryLists
from kernels_pallas.mosaic.work_items import Table, WorkItems
from nsa_jax import items, sorted_lists
from tests import test_inverse, test_slots, warp_emulation
from tests.test_inverse import needs_gpu
from tests.torch_inputs import FRAMEWORKS
from tests.warp_emulation import lanes

KEYS = 64  # of a tile


def windows(size, longest, *sizes):
    return WorkItems(BlockQueryLists(*sizes), size, longest, windows=True)


SPECS = {
    "windows": windows(32, 5, 2, 300, 300, 2, 4, 64, 1, False),
    "more windows than warps of a block": windows(8, 3, 1, 640, 640, 1, 3, 64, 1, False),
    "a window": windows(300, 1, 2, 299, 299, 1, 4, 64, 1, False),
    "sixteen tokens a unit": windows(4, 4, 1, 700, 700, 2, 3, 64, 16, False),
    "small blocks": windows(16, 7, 2, 200, 200, 1, 4, 16, 2, False),
    "long blocks": windows(8, 3, 2, 400, 400, 2, 2, 128, 4, False),
    "blocks across borders": windows(8, 2, 1, 300, 300, 2, 3, 48, 5, False),
    "packed": windows(4, 2, 2, 90, 90, 2, 3, 16, 3, True),
    "packed, longer blocks": windows(4, 5, 1, 300, 300, 1, 3, 64, 8, True),
    "packed, a chunk": windows(4, 3, 1, 80, 260, 2, 3, 64, 4, True),
    # The first token of a chunk is the first one that sees a tile to its end, or the last that
    # does not.
    "chunk of a long prompt": windows(8, 6, 2, 70, 709, 2, 4, 64, 1, False),
    "a key less": windows(8, 6, 2, 70, 708, 2, 4, 64, 1, False),
    "few tokens": windows(1, 4, 1, 3, 900, 2, 4, 64, 1, False),
    "more tiles than lanes": windows(256, 9, 1, 2200, 2200, 1, 4, 64, 1, False),
}
SPECS |= {f"gathered, {name}": spec for name, spec in test_slots.SPECS.items()}
by_spec = pytest.mark.parametrize("name", SPECS)
by_edges = pytest.mark.parametrize("full", [False, True], ids=["drawn", "full"])


def cuts(spec):
    """The chunks that sections begin with, and where the last one ends."""
    inverse, size = spec.inverse, spec.size
    found, units = [inverse.chunks], inverse.units
    if not spec.windows:
        return [*range(0, inverse.chunks, size // inverse.chunk), inverse.chunks]
    while units // 2 >= size and inverse.T == inverse.S and not inverse.packed:
        units //= 2
        found.append(units // inverse.chunk)
    return [*found, 0][::-1]


def drawn(spec):
    """Edges of the lists of some selection, and positions."""
    inverse = spec.inverse
    if spec.windows:
        arrays = test_inverse.draw(inverse)
        if not inverse.packed:
            arrays[1][1:] -= 40  # a shorter row, which may begin with padding
        lists = test_inverse.expected(inverse, *arrays)
    else:
        arrays = test_slots.arrays_of(spec)
        lists = test_slots.expected(spec, *arrays)
    places = np.ndindex(inverse.rows, inverse.tiles, inverse.chunks)
    counts = [len(lists.get(place, ())) for place in places]
    return np.cumsum([0, *counts], dtype=np.int32), arrays[1]


def filled(spec):
    """Edges of as many items as there can be, and positions."""
    inverse = spec.inverse
    counts = np.zeros((inverse.rows, inverse.tiles, inverse.chunks), int)
    for low, high in itertools.pairwise(cuts(spec)):
        begin, end = (min(x * inverse.chunk * inverse.tokens, inverse.T) for x in (low, high))
        entries = (end - begin) * inverse.n * inverse.tiles_of_block
        seen = inverse.tiles
        if inverse.T == inverse.S and not inverse.packed:
            seen = -(-end // KEYS)
        if entries:
            counts[:, : min(seen, entries), high - 1] += 1
            counts[:, 0, high - 1] += entries - min(seen, entries)
    position = np.arange(inverse.T, dtype=np.int32) + inverse.S - inverse.T
    edges = np.append(0, np.cumsum(counts)).astype(np.int32)
    return edges, np.stack([position] * inverse.B)


def arrays_of(spec, full):
    return (filled if full else drawn)(spec)


def expected(spec, edges, position):
    """`{(row, section): items}`, and the sums' places `{(row, tile): (first, count)}`."""
    inverse, borders = spec.inverse, cuts(spec)
    clipped = inverse.packed or inverse.block % KEYS
    found, sums = {}, {}
    for row in range(inverse.rows):
        place = row * spec.items
        for tile in range(inverse.tiles):
            first = (row * inverse.tiles + tile) * inverse.chunks
            whole = inverse.chunks
            for chunk in reversed(range(0 if clipped else inverse.chunks)):
                token = chunk * inverse.chunk * inverse.tokens
                if position[row // inverse.Hkv, token] + 1 >= (tile + 1) * KEYS:
                    whole = chunk
            whole, first_place = edges[first + whole], place
            for section, (low, high) in enumerate(itertools.pairwise(borders)):
                here = found.setdefault((row, section), [])
                begin, end = edges[first + low], edges[first + high]
                while begin < end:
                    stop = min(begin + spec.longest, end)
                    masked = min(max(whole, begin), stop)
                    here.append([row, tile * KEYS, begin, masked, stop, stop, place])
                    begin, place = stop, place + 1
            sums[row, tile] = first_place, place - first_place
    return found, sums


def check(spec, edges, position, table, *sums):
    """How many items there are. Their sections may be anywhere, but have room for them."""
    table, rooms, rows = np.asarray(table), spec.rooms, spec.inverse.rows
    assert len(table) == rows * sum(rooms)
    want, places = expected(spec, edges, position)
    total = 0
    for (row, section), here in want.items():
        assert len(here) <= rooms[section]
        if spec.windows:
            first = row * sum(rooms) + sum(rooms[:section])
        else:
            assert len(set(rooms)) == 1
            first = (section * rows + row) * rooms[0]
        found = table[first : first + rooms[section]].tolist()
        columns = 7 if spec.windows else 6
        empty = [[-1, 0, 0, 0, 0, 0, 0]] * (rooms[section] - len(here))
        assert [x[:columns] for x in found] == [x[:columns] for x in here + empty]
        total += len(here)
    assert len(sums) == 2 * spec.windows
    for (row, tile), each in places.items():
        b, g = divmod(row, spec.inverse.Hkv)
        assert not sums or each == (sums[0][b, g, tile], sums[1][b, g, tile])
    return total


@by_spec
@by_edges
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays(name, full, framework):
    spec = SPECS[name]
    given = arrays_of(spec, full)
    steps, load = FRAMEWORKS[framework]

    def make(*arrays):
        return sorted_lists.items(steps, *arrays, spec)

    make = jax.jit(make) if framework == "jax" else make
    found = make(*map(load, given))
    assert all(x.dtype == steps.xp.int32 for x in found)
    assert [x.shape for x in found] == [x.shape for x in spec.outputs]
    assert check(spec, *given, *found) or name == "gathered, nothing"


def by_warps(spec, given, monkeypatch):
    """`pieces.Table.make` of every warp, on numpy."""
    machine = warp_emulation.machine(monkeypatch, 0, work_items)
    outputs = [np.full(x.shape, -99, np.int32) for x in spec.outputs]
    make = Table(spec).make
    machine.each(make, spec.inverse.rows, spec.parts, work_items.WARPS, *given, *outputs)
    return outputs


@by_spec
@by_edges
def test_warps(monkeypatch, name, full):
    spec = SPECS[name]
    given = arrays_of(spec, full)
    found = by_warps(spec, given, monkeypatch)
    count = check(spec, *given, *found)
    assert count or name == "gathered, nothing"
    if full and spec.windows:
        assert count == len(found[0])  # no room is in vain


def test_windows_of_long_rows():
    """Each is half of what is before the next one; items are few, whatever is chosen."""
    spec = items.listed(BlockQueryLists(1, 65536, 65536, 4, 16, 64, 1, False))
    assert [cut * spec.inverse.chunk for cut in spec.cuts] == [
        *(0, 4096, 8192, 16384, 32768, 65536)
    ]
    assert spec.items < 2 * spec.inverse.tiles + 65536 * 16 // spec.longest
    assert items.listed(BlockQueryLists(1, 65536, 65536, 4, 16, 64, 1, True)).parts == 1
    assert items.listed(BlockQueryLists(1, 65536, 65537, 4, 16, 64, 1, False)).parts == 1
    assert items.listed(BlockQueryLists(1, 8191, 8191, 4, 16, 64, 1, False)).parts == 1


def sum_of_all(self, x):
    return lanes(x.sum()) - x


def one_less(self, rooms=WorkItems.rooms.fget):
    return tuple(max(room - 1, 0) for room in rooms(self))


MUTANTS = {
    "no sum of the lanes before": (Table, "_before", sum_of_all),
    "all sections are the first": (
        Table,
        "_of_section",
        lambda self, section, numbers: lanes(numbers[0]),
    ),
    "blocks end with tiles": (BlockQueryLists, "clipped", False),
    "no block ends with a tile": (BlockQueryLists, "clipped", True),
    "too little room": (WorkItems, "rooms", property(one_less)),
    "windows of another size": (WorkItems, "square", True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, IndexError)):
        for spec, full in itertools.product(SPECS.values(), (False, True)):
            given = arrays_of(spec, full)
            check(spec, *given, *by_warps(spec, given, monkeypatch))


LONG = {
    "64k": items.listed(BlockQueryLists(1, 65536, 65536, 4, 16, 64, 1, False)),
    "8 x 2k": items.listed(BlockQueryLists(8, 2048, 2048, 2, 16, 64, 4, False)),
    "gathered, 32k": WorkItems(
        BlockQueryLists(1, 32768, 32768, 8, 16, 64, 1, False, tile=16, limit=30), 8192, 1024
    ),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [*SPECS, *LONG])
@by_edges
def test_the_kernel(name, full):
    spec = (SPECS | LONG)[name]
    given = arrays_of(spec, full or name in LONG)
    on_gpu = [torch.from_numpy(x).cuda() for x in given]
    steps = nsa_torch.mosaic.OPS
    found = steps.run(work_items.items(spec), *on_gpu)
    want = sorted_lists.items(steps, *on_gpu, spec)
    columns = 7 if spec.windows else 6
    assert torch.equal(found[0][:, :columns], want[0][:, :columns])
    for one, other in zip(found[1:], want[1:], strict=True):
        assert torch.equal(one, other)

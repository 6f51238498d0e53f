"""Work items of query lists, for `gathered_attention` and `dkv`, emulated and on a GPU, against
plain Python.
"""

import dataclasses
import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_torch.torch_ops
from kernels_pallas.mosaic.work_items import MakeItems
from kernels_pallas.specs import work_items
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.work_items import WorkItems, dkv_work_items
from nsa_core.steps import mosaic_lists
from nsa_jax.jax_ops import JAX_OPS
from tests import test_block_query_lists, test_gather_lists
from tests.oracles.list_kernels import emulated, interpreted
from tests.test_block_query_lists import needs_gpu

KEYS = 64  # of a tile


def halving(size, longest, *sizes):
    return WorkItems(BlockQueryLists(*sizes), size, longest, halving=True)


SPECS = {
    "halving": halving(32, 5, 2, 300, 300, 2, 4, 64, 1, False),
    "more segments than warps of a CTA": halving(8, 3, 1, 640, 640, 1, 3, 64, 1, False),
    "a segment": halving(300, 1, 2, 299, 299, 1, 4, 64, 1, False),
    "sixteen tokens a query tile": halving(4, 4, 1, 700, 700, 2, 3, 64, 16, False),
    "small blocks": halving(16, 7, 2, 200, 200, 1, 4, 16, 2, False),
    "long blocks": halving(8, 3, 2, 400, 400, 2, 2, 128, 4, False),
    "blocks across borders": halving(8, 2, 1, 300, 300, 2, 3, 48, 5, False),
    "packed": halving(4, 2, 2, 90, 90, 2, 3, 16, 3, True),
    "packed, longer blocks": halving(4, 5, 1, 300, 300, 1, 3, 64, 8, True),
    "packed, a chunk": halving(4, 3, 1, 80, 260, 2, 3, 64, 4, True),
    # The first token of a chunk is the first one that sees a tile to its end, or the last that
    # does not.
    "chunk of a long prompt": halving(8, 6, 2, 70, 709, 2, 4, 64, 1, False),
    "a key less": halving(8, 6, 2, 70, 708, 2, 4, 64, 1, False),
    "few tokens": halving(1, 4, 1, 3, 900, 2, 4, 64, 1, False),
    "more tiles than lanes": halving(256, 9, 1, 2200, 2200, 1, 4, 64, 1, False),
}
SPECS |= {f"gathered, {name}": spec for name, spec in test_gather_lists.SPECS.items()}
by_spec = pytest.mark.parametrize("name", SPECS)
by_edges = pytest.mark.parametrize("full", [False, True], ids=["drawn", "full"])


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


def drawn(spec):
    """Edges of the lists of some selection, and positions."""
    lists = spec.lists
    if spec.halving:
        arrays = test_block_query_lists.draw(lists)
        if not lists.packed:
            arrays[1][1:] -= 40  # a shorter row, which may begin with padding
        entries = test_block_query_lists.expected(lists, *arrays)
    else:
        arrays = test_gather_lists.arrays_of(spec)
        entries = test_gather_lists.expected(spec, *arrays)
    places = np.ndindex(lists.rows, lists.key_tiles, lists.chunks)
    counts = [len(entries.get(place, ())) for place in places]
    return np.cumsum([0, *counts], dtype=np.int32), arrays[1]


def filled(spec):
    """Edges of as many items as there can be, and positions."""
    lists = spec.lists
    counts = np.zeros((lists.rows, lists.key_tiles, lists.chunks), int)
    for low, high in itertools.pairwise(cuts(spec)):
        begin, end = (min(x * lists.chunk * lists.tokens, lists.T) for x in (low, high))
        entries = (end - begin) * lists.n * lists.key_tiles_of_block
        seen = lists.key_tiles
        if lists.T == lists.S and not lists.packed:
            seen = -(-end // KEYS)
        if entries:
            counts[:, : min(seen, entries), high - 1] += 1
            counts[:, 0, high - 1] += entries - min(seen, entries)
    position = np.arange(lists.T, dtype=np.int32) + lists.S - lists.T
    edges = np.append(0, np.cumsum(counts)).astype(np.int32)
    return edges, np.stack([position] * lists.B)


def arrays_of(spec, full):
    return (filled if full else drawn)(spec)


def expected(spec, edges, position):
    """`{(row, segment): items}`, and the partials' places `{(row, tile): (first, count)}`."""
    lists, borders = spec.lists, cuts(spec)
    clipped = lists.packed or lists.block % KEYS
    found, partials = {}, {}
    for row in range(lists.rows):
        place = row * spec.items
        for tile in range(lists.key_tiles):
            first = (row * lists.key_tiles + tile) * lists.chunks
            whole = lists.chunks
            for chunk in reversed(range(0 if clipped else lists.chunks)):
                token = chunk * lists.chunk * lists.tokens
                if position[row // lists.Hkv, token] + 1 >= (tile + 1) * KEYS:
                    whole = chunk
            whole, first_place = edges[first + whole], place
            for segment, (low, high) in enumerate(itertools.pairwise(borders)):
                here = found.setdefault((row, segment), [])
                begin, end = edges[first + low], edges[first + high]
                while begin < end:
                    stop = min(begin + spec.longest, end)
                    masked = min(max(whole, begin), stop)
                    here.append([row, tile * KEYS, begin, masked, stop, stop, place])
                    begin, place = stop, place + 1
            partials[row, tile] = first_place, place - first_place
    return found, partials


def check(spec, edges, position, table, *partials, longest_first=False):
    """How many items there are. Segments stand where the spec says, and have the capacity."""
    table, capacities, rows = np.asarray(table), spec.capacities, spec.lists.rows
    assert len(table) == rows * sum(capacities)
    want, places = expected(spec, edges, position)
    total = 0
    for (row, segment), here in want.items():
        assert len(here) <= capacities[segment]
        if longest_first:
            here = sorted(here, key=lambda item: item[2] - item[5])
        if spec.halving:
            first = row * sum(capacities) + sum(capacities[:segment])
        else:
            assert len(set(capacities)) == 1
            first = (segment * rows + row) * capacities[0]
        found = table[first : first + capacities[segment]].tolist()
        columns = 7 if spec.halving else 6
        empty = [[-1, 0, 0, 0, 0, 0, 0]] * (capacities[segment] - len(here))
        assert [x[:columns] for x in found] == [x[:columns] for x in here + empty]
        total += len(here)
    assert len(partials) == 2 * spec.halving
    for (row, tile), each in places.items():
        b, g = divmod(row, spec.lists.Hkv)
        assert not partials or each == (partials[0][b, g, tile], partials[1][b, g, tile])
    return total


def by_emulation(spec, given, describe=work_items.work_items):
    spec = dataclasses.replace(spec, lists=interpreted(spec.lists))
    return emulated(describe, spec, *given)


@by_spec
@by_edges
def test_emulated(name, full):
    spec = SPECS[name]
    given = arrays_of(spec, full)
    found = by_emulation(spec, given)
    assert [x.shape for x in found] == [x.shape for x in spec.outputs.values()]
    count = check(spec, *given, *found)
    assert count or name == "gathered, nothing"
    if full and spec.halving:
        assert count == len(found[0])  # no capacity is in vain


@pytest.mark.parametrize("ops", [nsa_torch.torch_ops.TORCH_OPS, JAX_OPS], ids=["torch", "jax"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.halving])
@by_edges
def test_longest_first(ops, name, full, monkeypatch):
    spec = SPECS[name]
    edges, position = given = arrays_of(spec, full)
    array = torch.tensor if ops.xp is torch else jnp.asarray

    def run(_, kernel, *arrays):
        describe = getattr(work_items, kernel.name)
        found = by_emulation(spec, [np.asarray(x) for x in arrays], describe)
        return [array(np.asarray(x)) for x in found]

    monkeypatch.setattr(type(ops), "run", run)
    layout = types.SimpleNamespace(position=array(position), varlen=None)
    found = mosaic_lists.sorted_work_items(ops, array(edges), layout, spec)
    assert check(spec, *given, *map(np.asarray, found), longest_first=True)


def test_segments_of_long_rows():
    """Each is half of what is before the next one; items are few, whatever is chosen."""
    spec = dkv_work_items(BlockQueryLists(1, 65536, 65536, 4, 16, 64, 1, False))
    assert [cut * spec.lists.chunk for cut in spec.cuts] == [
        *(0, 4096, 8192, 16384, 32768, 65536)
    ]
    assert spec.items < 2 * spec.lists.key_tiles + 65536 * 16 // spec.longest
    assert dkv_work_items(BlockQueryLists(1, 65536, 65536, 4, 16, 64, 1, True)).segments == 1
    assert dkv_work_items(BlockQueryLists(1, 65536, 65537, 4, 16, 64, 1, False)).segments == 1
    assert dkv_work_items(BlockQueryLists(1, 8191, 8191, 4, 16, 64, 1, False)).segments == 1


def sum_of_all(self, warp, x):
    return warp.word(x.sum(axis=1, keepdims=True)) - x


def one_less(self, capacities=WorkItems.capacities.func):
    return tuple(max(capacity - 1, 0) for capacity in capacities(self))


MUTANTS = {
    "no prefix sum": (MakeItems, "_prefix_sum", sum_of_all),
    "all segments are the first": (
        MakeItems,
        "_of_segment",
        lambda self, warp, segment, values: warp.word(values[0]),
    ),
    "blocks end with tiles": (BlockQueryLists, "clipped", False),
    "no block ends with a tile": (BlockQueryLists, "clipped", True),
    "too little capacity": (WorkItems, "capacities", property(one_less)),
    "segments of another size": (WorkItems, "square", True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, IndexError)):
        for spec, full in itertools.product(SPECS.values(), (False, True)):
            given = arrays_of(spec, full)
            check(spec, *given, *by_emulation(spec, given))


LONG = {
    "64k": dkv_work_items(BlockQueryLists(1, 65536, 65536, 4, 16, 64, 1, False)),
    "8 x 2k": dkv_work_items(BlockQueryLists(8, 2048, 2048, 2, 16, 64, 4, False)),
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
    ops = nsa_torch.torch_ops.TORCH_OPS
    found = [x.cpu().numpy() for x in ops.run(work_items.work_items(spec), *on_gpu)]
    want = by_emulation(spec, given)
    columns = 7 if spec.halving else 6
    np.testing.assert_array_equal(found[0][:, :columns], want[0][:, :columns])
    for one, other in zip(found[1:], want[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    if spec.halving:
        table = torch.from_numpy(want[0].copy()).cuda()
        (ordered,) = ops.run(work_items.ordered_work_items(spec), table)
        check(spec, *given, ordered.cpu().numpy(), *want[1:], longest_first=True)

"""Work items of intervals: every query tile meets every tile of keys that it sees once, and each
item has a partial of its own; the oracle counts pairs in plain Python.
"""

import dataclasses
import heapq
import itertools

import numpy as np
import pytest
import torch

from kernels_pallas.specs import work_items
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.tile import ROWS, WORK_ITEM_INTS
from kernels_pallas.specs.work_items import PART_COLUMNS, WorkItem
from nsa_core.config import NSAConfig
from nsa_core.steps.key_bounds import VisibleCompressed, Window
from nsa_core.steps.mosaic_backward import _interval_split, _known_items
from nsa_core.varlen import Capacity
from nsa_torch.torch_ops import TorchOps

CONFIG = NSAConfig()


@dataclasses.dataclass(frozen=True)
class Problem:
    """`lengths` of packed sequences; `before`: tokens before the queries; `gap`: between the first
    half of the queries and the second; `placed`: compressed tokens are in slots of their sequences.
    """

    branch: str
    B: int = 1
    T: int = 3000
    group: int = 16
    Hkv: int = 2
    before: int = 0
    gap: int = 0
    window: int = 512
    lengths: tuple[int, ...] = ()
    unused: int = 0  # keys behind all that is seen
    width: int = 128
    placed: bool = False

    @property
    def tokens(self):
        """Up to the last query."""
        return self.before + self.T + self.gap

    @property
    def capacity(self):
        if not self.placed:
            return None
        numbers = len(self.lengths), max(self.lengths)
        return Capacity(1, self.T, self.tokens, *numbers, CONFIG, self.gap)

    @property
    def bounds(self):
        config = dataclasses.replace(CONFIG, window=self.window)
        if self.branch == "compressed":
            return VisibleCompressed(config)
        return Window(config, self.S)

    @property
    def S(self):
        if self.branch == "window":
            return self.tokens + self.unused
        if self.placed:
            return self.capacity.slots
        parts = self.lengths or (self.tokens,)
        return sum(CONFIG.num_compressed(x) for x in parts) + self.unused

    def intervals(self):
        """`[T]` both."""
        query = np.arange(self.T)
        at = self.before + query + self.gap * (query >= self.T // 2)
        first, last = self.intervals_of_tokens()
        return first[at], last[at]

    def intervals_of_tokens(self):
        end = np.arange(self.tokens) + 1
        start = np.zeros_like(end)
        compressed_start = start
        if self.lengths:
            begins = np.cumsum([0, *self.lengths])[:-1]
            start = np.repeat(begins, self.lengths)
            counts = [CONFIG.num_compressed(x) for x in self.lengths]
            if self.placed:
                counts = [-(-x // 64) * 64 // CONFIG.compress_stride for x in self.lengths]
            compressed_start = np.repeat(np.cumsum([0, *counts])[:-1], self.lengths)
        if self.branch == "window":
            return np.maximum(start, end - self.window), end
        block, stride = CONFIG.compress_block, CONFIG.compress_stride
        count = np.maximum((end - start + stride - block) // stride, 0)
        return compressed_start, compressed_start + count


# Of a rank of context parallelism.
CHUNKS = {"T": 4096, "before": 2048, "gap": 26624, "lengths": (31000, 31, 1737), "placed": True}

PROBLEMS = {
    "compressed": Problem("compressed", T=40_000),
    "compressed, rows": Problem("compressed", B=3, T=2048, group=6, width=64),
    "compressed, a chunk": Problem("compressed", T=700, before=5000),
    "compressed, a few tokens before": Problem("compressed", T=5000, before=15),
    # As many compressed tokens as strides, of which the last one nobody sees; or all do.
    "compressed, one more": Problem("compressed", T=8192, unused=1),
    "compressed, as many as strides": Problem("compressed", T=8192, before=31),
    "compressed, packed": Problem("compressed", T=3000, lengths=(20, 1500, 31, 32, 1417)),
    "compressed, placed": Problem(
        "compressed", T=3000, lengths=(20, 1500, 31, 32, 1417), placed=True
    ),
    "compressed, placed, alike": Problem(
        "compressed", T=8192, lengths=(2048,) * 4, group=6, width=64, placed=True
    ),
    "compressed, placed, short": Problem(
        "compressed", T=4000, lengths=(65, 15) * 50, placed=True
    ),
    "compressed, two chunks": Problem("compressed", **CHUNKS),
    "window, two chunks": Problem("window", **CHUNKS),
    "compressed, one tile of queries": Problem("compressed", T=33, group=1),
    "window": Problem("window", T=9000),
    "window, rows": Problem("window", B=5, T=2048, group=6, width=64),
    "window, a chunk": Problem("window", T=900, before=4000),
    "window, packed": Problem("window", T=3000, lengths=(20, 1500, 31, 32, 1417)),
    "window, keys behind the queries": Problem("window", T=5, window=20, unused=515),
    "window, rows with keys behind": Problem(
        "window", B=2, T=333, group=6, unused=900, width=64
    ),
    "compressed, keys behind": Problem("compressed", B=2, T=333, group=6, unused=400, width=64),
    "window, of one key": Problem("window", T=700, window=1),
    "window, beyond all keys": Problem("window", T=700, window=10_000),
    "window, tiles of 64 keys": Problem("window", T=3000, width=256),
}


def found(problem):
    """The sizes, the split, and `table`, `first`, `count` of the problem."""
    heads = {"H": problem.group * problem.Hkv, "Hkv": problem.Hkv}
    spec = Dkv(
        B=problem.B,
        T=problem.T,
        S=problem.S,
        **heads,
        D=problem.width,
        Dv=problem.width,
        dtype="bfloat16",
        scale=1.0,
        work_items=0,
    )
    packed = bool(problem.lengths), problem.capacity
    split = _interval_split(spec, problem.bounds, *packed)
    return spec, split, split_by(problem, spec, split)


def split_by(problem, spec, split):
    """`table`, `first`, `count`."""
    bounds = [torch.from_numpy(x).tile(problem.B, 1) for x in problem.intervals()]
    arrays = work_items.interval_work_items(TorchOps(), bounds, spec, split)
    return [x.numpy() for x in arrays]


def check(problem, spec, split, table, first, count):
    begin, end = problem.intervals()
    tokens, tile_keys = spec.query_tile.tokens, spec.tile_keys
    assert len(table) == problem.B * problem.Hkv * split.segments * split.tiles
    met, partials = set(), {}
    for row in table.tolist():
        item = WorkItem(*row[: len(WorkItem._fields)])
        if item.row < 0:
            continue
        assert item.begin < item.end and item.first_key % tile_keys == 0
        tile = item.first_key // tile_keys
        partials.setdefault((item.row, tile), []).append((item.begin, item.partial))
        for part in range(spec.consumers):
            at = WORK_ITEM_INTS + len(PART_COLUMNS) * part
            own, whole, whole_end, own_end = row[at : at + len(PART_COLUMNS)]
            assert item.begin <= own <= own_end <= item.end
            key = item.first_key + part * ROWS
            unmasked = slice(whole * tokens, min(max(whole_end, whole) * tokens, problem.T))
            assert (begin[unmasked] <= key).all() and (end[unmasked] >= key + ROWS).all()
            for query in range(own, own_end):
                pair = item.row, key, query
                assert pair not in met
                met.add(pair)
    wanted = set()
    for token, (low, high) in enumerate(zip(begin, end, strict=True)):
        blocks = range(low // ROWS, -(-high // ROWS)) if low < high else ()
        wanted |= {(block * ROWS, token // tokens) for block in blocks}
    rows = range(problem.B * problem.Hkv)
    assert {(row, *pair) for row, pair in itertools.product(rows, wanted)} <= met

    places = [place for found in partials.values() for _, place in found]
    assert len(set(places)) == len(places)
    assert max(places) < problem.B * problem.Hkv * split.partials
    for row, tile in itertools.product(rows, range(spec.key_tiles)):
        b, g = divmod(row, problem.Hkv)
        mine = [place for _, place in sorted(partials.get((row, tile), []))]
        low = first[b, g, tile]
        assert mine == list(range(low, low + count[b, g, tile]))


@pytest.mark.parametrize("name", PROBLEMS)
def test_items(name):
    spec, split, arrays = found(PROBLEMS[name])
    check(PROBLEMS[name], spec, split, *arrays)


@pytest.mark.parametrize("name", [x for x in PROBLEMS if not PROBLEMS[x].lengths])
def test_items_are_the_same_where_lengths_are_known(name):
    """As constants of a program, without a framework."""
    problem = PROBLEMS[name]
    spec, split, arrays = found(problem)
    known = _known_items(spec, split, problem.bounds, problem.T + problem.before)
    for got, expected in zip(known, arrays, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)


def test_long_sequences_fill_every_sm_alike():
    """At 64k 32 segments have as many items of equal length as 132 SMs do in 16 turns."""
    problem = Problem("compressed", T=65536, Hkv=4)
    _, split, (table, *_) = found(problem)
    lengths = [row[5] - row[2] for row in table.tolist() if row[0] >= 0]
    assert split.segments == 32
    assert len(lengths) == 16 * 132
    assert lengths[0] == max(lengths)


@pytest.mark.parametrize("unused", [0, 1])
def test_cuts_do_not_depend_on_an_unused_token(unused):
    """Torch's means have one: 512 of 8192 tokens, of which 511 are seen."""
    problem = Problem("compressed", T=8192, Hkv=4, unused=unused)
    _, split, _ = found(problem)
    assert (split.segments, split.partials) == (12, 33)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"T": 65536, "Hkv": 4, "lengths": (8192,) * 8}, 1.35),
        ({"T": 32768, "group": 6, "width": 64, "lengths": (2048,) * 16}, 2.0),
    ],
    ids=["8192", "2048"],
)
def test_packed_rows_are_cut_as_finely_as_rows(sizes, most):
    """Query tiles of the SM that is done last, if SMs take items in their order."""

    def longest(problem):
        _, _, (table, *_) = found(problem)
        lengths = [row[5] - row[2] for row in table.tolist() if row[0] >= 0]
        sms = [0] * work_items.SMS
        for length in lengths:
            heapq.heapreplace(sms, sms[0] + length)
        return max(sms)

    lengths = sizes["lengths"]
    rows = {**sizes, "lengths": (), "B": len(lengths), "T": lengths[0]}
    packed = longest(Problem("compressed", **sizes, placed=True))
    assert packed <= most * longest(Problem("compressed", **rows))


def test_streams():
    """Tiles of keys that a segment sees stand `segments * rows` items apart, in their order."""
    problem = Problem("window", T=65536, Hkv=4)
    spec, split, (table, *_) = found(problem)
    apart = split.segments * problem.Hkv
    assert (split.streams, apart) == (True, 24)
    keys = table[::apart, 1][table[::apart, 0] >= 0]
    assert (np.diff(keys) == spec.tile_keys).all()


@pytest.mark.parametrize("change", ["tiles", "partials"])
def test_too_little_room_is_caught(change):
    problem = PROBLEMS["window"]
    spec, split, _ = found(problem)
    assert split.segments > 1
    # Without a partial more for a tile that two segments see.
    room = {"tiles": split.tiles - 1, "partials": spec.key_tiles}[change]
    less = dataclasses.replace(split, **{change: room})
    arrays = split_by(problem, spec, less)
    with pytest.raises(AssertionError):
        check(problem, spec, less, *arrays)

"""Work items of intervals: every query tile meets every tile of keys that it sees once, and each
item has a partial of its own; the oracle counts pairs in plain Python.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

from kernels_pallas.specs import work_items
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.tile import ROWS
from kernels_pallas.specs.work_items import PART_COLUMNS, WorkItem, part_column
from nsa_core.steps.key_bounds import VisibleCompressed, Window
from nsa_core.steps.mosaic_backward import _interval_split, _known_items
from nsa_core.varlen import Capacity
from nsa_torch import NSAConfig
from nsa_torch.torch_ops import TORCH_OPS
from tests.tables import table

CONFIG = NSAConfig()


@dataclasses.dataclass(frozen=True)
class Problem:
    """`window`: of the sliding branch, None: the compressed one; `lengths` of packed sequences;
    `before`: tokens before the queries; `gap`: between the first half of the queries and the
    second; `unused`: keys behind all that is seen; `placed`: compressed tokens are in slots of
    their sequences.
    """

    window: int | None = None
    B: int = 1
    T: int = 3000
    group: int = 16
    Hkv: int = 2
    before: int = 0
    gap: int = 0
    lengths: tuple[int, ...] = ()
    unused: int = 0
    width: int = 128
    placed: bool = False

    @property
    def tokens(self):
        """Up to the last query."""
        return self.before + self.T + self.gap

    @property
    def capacity(self):
        numbers = len(self.lengths), max(self.lengths, default=0)
        return (
            Capacity(1, self.T, self.tokens, *numbers, CONFIG, self.gap)
            if self.placed
            else None
        )

    @property
    def bounds(self):
        if self.window is None:
            return VisibleCompressed(CONFIG)
        return Window(dataclasses.replace(CONFIG, window=self.window), self.S)

    @property
    def S(self):
        if self.window is not None:
            return self.tokens + self.unused
        if self.placed:
            return self.capacity.slots
        return sum(map(CONFIG.num_compressed, self.lengths or (self.tokens,))) + self.unused

    @property
    def spec(self):
        heads = {"H": self.group * self.Hkv, "Hkv": self.Hkv, "D": self.width, "Dv": self.width}
        sizes = {"B": self.B, "T": self.T, "S": self.S}
        return Dkv(**sizes, **heads, dtype="bfloat16", scale=1.0, work_items=0)

    @functools.cached_property
    def split(self):
        return _interval_split(self.spec, self.bounds, bool(self.lengths), self.capacity)

    @functools.cached_property
    def intervals(self):
        """`[T]` both."""
        query = np.arange(self.T)
        at = self.before + query + self.gap * (query >= self.T // 2)
        lengths = self.lengths or (self.tokens,)
        start = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)[at]
        end = at + 1
        if self.window is not None:
            return np.maximum(start, end - self.window), end
        counts = [CONFIG.num_compressed(x) for x in lengths]
        if self.placed:
            counts = [-(-x // 64) * 64 // CONFIG.compress_stride for x in lengths]
        first = np.repeat(np.cumsum([0, *counts])[:-1], lengths)[at]
        seen = (end - start - CONFIG.compress_block) // CONFIG.compress_stride + 1
        return first, first + np.maximum(seen, 0)

    def items(self):
        """`table`, `first`, `count`."""
        bounds = [torch.tensor(np.stack([x] * self.B)) for x in self.intervals]
        found = work_items.interval_work_items(TORCH_OPS, bounds, self.spec, self.split)
        return [np.asarray(x) for x in found]


def of_row(times=1, lengths=(), **fields):
    return Problem(**fields, lengths=tuple(lengths) * times)


TABLE = table("lists")
PROBLEMS = {name: of_row(**row) for name, row in TABLE["intervals"].items()}


def check(problem, table, first, count):
    """The share of met pairs of a query tile and 64 keys that need no mask."""
    spec, split, (begin, end) = problem.spec, problem.split, problem.intervals
    tokens, rows = spec.query_tile.tokens, range(problem.B * problem.Hkv)
    assert len(table) == len(rows) * split.segments * split.tiles
    met, partials, whole = set(), {}, 0
    for row in table.tolist():
        item = WorkItem(*row[: len(WorkItem._fields)])
        if item.row < 0:
            continue
        assert item.begin < item.end and item.first_key % spec.tile_keys == 0
        tile = item.row, item.first_key // spec.tile_keys
        partials.setdefault(tile, []).append((item.begin, item.partial))
        for part in range(spec.consumers):
            columns = row[part_column(part) :][: len(PART_COLUMNS)]
            own, unmasked_begin, unmasked_end, own_end = columns
            assert item.begin <= own <= own_end <= item.end
            key, unmasked_end = item.first_key + part * ROWS, max(unmasked_begin, unmasked_end)
            unmasked = slice(unmasked_begin * tokens, min(unmasked_end * tokens, problem.T))
            assert (begin[unmasked] <= key).all() and (end[unmasked] >= key + ROWS).all()
            whole += max(min(unmasked_end, own_end) - max(unmasked_begin, own), 0)
            pairs = {(item.row, key, query) for query in range(own, own_end)}
            assert not pairs & met
            met |= pairs
    for token in range(problem.T):
        if begin[token] < end[token]:
            keys = range(begin[token] // ROWS * ROWS, end[token], ROWS)
            assert {(x, key, token // tokens) for x in rows for key in keys} <= met

    places = [place for each in partials.values() for _, place in each]
    assert len(set(places)) == len(places)
    assert max(places) < len(rows) * split.partials
    for row, tile in itertools.product(rows, range(spec.key_tiles)):
        at = *divmod(row, problem.Hkv), tile
        mine = [place for _, place in sorted(partials.get((row, tile), []))]
        assert mine == list(range(first[at], first[at] + count[at]))
    return whole / len(met)


@pytest.mark.parametrize("name", PROBLEMS)
def test_items(name):
    """Where lengths are known, they are constants of a program, made without a framework. Only the
    items of a window are streams, and no segment of them has queries of both halves.
    """
    problem, found = PROBLEMS[name], PROBLEMS[name].items()
    assert problem.split.streams == (problem.window is not None)
    assert not (problem.split.streams and problem.gap and problem.split.segments % 2)
    whole = check(problem, *found)
    assert whole > 0.9 or name != "compressed"
    if not problem.lengths:
        at = problem.T + problem.before
        known = _known_items(problem.spec, problem.split, problem.bounds, at)
        for got, expected in zip(known, found, strict=True):
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, expected)

"""What the gradient kernels are told to do: which queries meet which tile of keys.

Of the kernels the lists alone are made, emulated. The other descriptions are recorded, and
plain NumPy follows each work item as `dkv.partials` and `dkv.merge` do: every pair of a query
and a key it saw must count once, and where no mask is asked for, nothing else may be there.
"""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_torch.torch_ops
from kernels_pallas.mosaic import capability
from kernels_pallas.specs import (
    block_query_lists,
    dkv,
    interval,
    selected,
    work_items,
)
from kernels_pallas.specs.tile import ROWS
from kernels_pallas.specs.work_items import PART_COLUMNS, WorkItem, part_column
from nsa_core.config import NSAConfig
from nsa_core.steps import mosaic_backward, mosaic_lists
from nsa_core.steps.params import Params, Qkv
from nsa_jax import geometry, mosaic
from tests.inputs import segment_ids
from tests.limits import set_limits

FIELDS = ("position", "key_start", "compressed_start")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Queries, keys, heads of a group, and how they are selected."""

    T: int
    S: int
    group: int
    block: int = 16
    n: int = 3
    segments: tuple[int, ...] | None = None
    width: int = 16
    batch: int = 2
    heads: int = 2  # of keys

    def __str__(self):
        packed = "-packed" if self.segments else ""
        return f"T{self.T}-S{self.S}-G{self.group}-b{self.block}-D{self.width}{packed}"

    @property
    def config(self):
        return NSAConfig(8, 4, self.block, num_selected=self.n, num_local=1, window=37)

    @functools.cached_property
    def layout(self):
        ids = None
        if self.segments:
            ids = jnp.asarray(np.repeat(segment_ids(self.segments), self.batch, axis=0))
        options = {"kv_len": self.S, "segment_ids": ids, "config": self.config}
        return geometry.query_layout(self.batch, self.T, **options)

    @functools.cached_property
    def indices(self):
        """A random selection int32 `[B, T, Hkv, n]`: some slots empty, some queries bare."""
        rng = np.random.default_rng(self.T)
        position = np.asarray(self.layout.position)
        out = np.full((self.batch, self.T, self.heads, self.n), -1, np.int32)
        for place in np.ndindex(out.shape[:-1]):
            candidates = rng.permutation(position[place[:2]] // self.block + 1)
            few = candidates[: rng.integers(self.n + 1)]
            out[place][rng.permutation(self.n)[: len(few)]] = few
        return out

    @property
    def compressed(self):
        """Compressed tokens."""
        return self.config.num_compressed(self.S)

    def mask(self, branch, indices):
        """Which query sees which key, `[B, Hkv, T, keys]`, from tokens alone."""
        config, shape = self.config, (self.batch, self.heads, self.T, self.S)
        sequence = np.zeros(self.S, int) if self.segments is None else None
        if sequence is None:
            sequence = segment_ids(self.segments)[0]
        border = np.flatnonzero(np.diff(sequence, prepend=-2))
        place = (
            np.arange(self.S) - border[np.searchsorted(border, np.arange(self.S), "right") - 1]
        )
        key, query = np.arange(self.S), np.arange(self.S - self.T, self.S)[:, None]
        mask = (sequence == sequence[query]) & (sequence[query] >= 0) & (key <= query)
        if branch == "sliding":
            mask = mask & (key > query - config.window)
        if branch == "compressed":
            block = config.compress_block
            starts = [
                k
                for k in range(self.S - block + 1)
                if sequence[k] == sequence[k + block - 1] >= 0
                and place[k] % config.compress_stride == 0
            ]
            seen = mask[:, starts] & (np.array(starts) + block - 1 <= query)
            mask = np.zeros((self.T, self.compressed), bool)
            mask[:, : len(starts)] = seen
            return np.broadcast_to(mask, (*shape[:3], self.compressed))
        if branch == "selected":
            block = place // self.block
            chosen = (indices[..., None] == block).any(axis=-2)
            mask = mask & np.moveaxis(chosen, 2, 1)
        return np.broadcast_to(mask, shape)

    def popular(self):
        """The same with every query at the first block of its sequence."""
        indices = self.indices.copy()
        seen = np.asarray(self.layout.position)[..., None] >= 0
        indices[indices == 0] = -1
        indices[..., 0] = np.where(seen, 0, -1)
        return indices


SHAPES = (
    Shape(70, 70, 1),
    Shape(70, 130, 3),
    Shape(50, 200, 4, block=64),
    Shape(45, 200, 16, block=64),
    Shape(45, 300, 16, block=128),
    Shape(45, 300, 2, block=96),
    Shape(40, 150, 16, block=16),
    Shape(300, 300, 4, block=64),
    Shape(300, 300, 1, block=48),
    Shape(30, 100, 64, block=48),
    Shape(90, 90, 1, segments=(20, 1, 43, 8, -18)),
    Shape(200, 200, 4, block=64, segments=(70, 1, 100, -29)),
    Shape(300, 300, 16, block=64, segments=(70, 1, 200, -29), n=2),
    Shape(60, 400, 3, block=128, segments=(70, 310, 1, -19), n=2),
    Shape(60, 400, 16, block=128, segments=(70, 1, 310, -19), n=2, width=256),
)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Told(NamedTuple):
    """In place of a kernel: what it would have been, and its arrays."""

    name: str
    spec: Any
    arrays: tuple = ()


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    for module, name in (
        (interval, "dq"),
        (dkv, "merge"),
        (dkv, "partials"),
        (selected, "dq"),
    ):
        monkeypatch.setattr(module, name, functools.partial(Told, name))
    monkeypatch.setattr(mosaic_lists, "tile_block_lists", lambda *arguments: ())
    with capability.interpreted(True):
        yield


def emulated(kernel, *arrays):
    """The outputs of a list kernel for arrays of either framework."""
    if not torch.is_tensor(arrays[0]):
        return kernel(*arrays)
    return [torch.from_numpy(x) for x in kernel(*(x.numpy() for x in arrays))]


def told(ops, shape, branch, indices=None, **options):
    """Pairs `(partials, merge)` that the gradient of a branch asks for, NumPy arrays."""
    xp, dtype, found = ops.xp, {"dtype": ops.xp.float32}, []
    config = shape.config

    class Recording(type(ops)):
        def run(self, kernel, *arrays):
            if not isinstance(kernel, Told):
                return emulated(kernel, *arrays)
            found.append(kernel._replace(arrays=arrays))
            outputs = 1
            if kernel.name != "dq":
                outputs = kernel.spec.want_dk + kernel.spec.want_dv
            return [xp.zeros((1,), **dtype)] * outputs

        def cached(self, layout, name, make):
            return make()

    def ask(layout, indices):
        found.clear()
        heads = shape.heads * shape.group
        keys = shape.compressed if branch == "compressed" else shape.S
        query, key = (
            xp.zeros((shape.batch, length, count, shape.width), **dtype)
            for length, count in ((shape.T, heads), (keys, shape.heads))
        )
        seen = shape.mask(branch, indices_np).any(axis=-1)
        lse = np.where(np.repeat(np.moveaxis(seen, 1, 2), shape.group, axis=2), 0, -np.inf)
        lse = xp.asarray(lse.astype(np.float32))
        rows = mosaic_backward.RowResiduals(lse, xp.zeros_like(lse))
        before = (indices,) if branch == "selected" else ()
        function = getattr(mosaic_backward, branch)
        params = Params(layout, config, None)
        function(Recording(), Qkv(query, key, key), *before, query, rows, params)
        return [x.arrays for x in found]

    indices_np = shape.indices if indices is None else indices
    layout = shape.layout
    if xp is torch:
        fields = {name: torch.from_numpy(np.array(getattr(layout, name))) for name in FIELDS}
        tensors = types.SimpleNamespace(**fields, packed=layout.packed, varlen=None)
        arrays = ask(tensors, torch.from_numpy(indices_np))
    else:
        arrays = jax.jit(functools.partial(ask, layout))(jnp.asarray(indices_np))
    calls = [
        call._replace(arrays=tuple(map(np.asarray, each)))
        for call, each in zip(found, arrays, strict=True)
    ]
    assert [call.name for call in calls[:1]] == ["dq"]
    pairs = list(zip(calls[1::2], calls[2::2], strict=True))
    assert {(a.name, b.name) for a, b in pairs} == {("partials", "merge")}
    return pairs


def visits(sums: Told, merged: Told):
    """How often each pair of a query and a key is part of a gradient, `[B, Hkv, T, S]`."""
    spec, done = sums.spec, {}
    for row in sums.arrays[5]:
        item = WorkItem(*row[:7].tolist())
        if item.row >= 0:
            assert item.partial not in done, "two work items write one partial"
            done[item.partial] = item, visits_of(spec, sums.arrays, row)
    first, count = merged.arrays[-2:]
    total = np.zeros((spec.B, spec.Hkv, spec.T, spec.key_tiles * spec.tile_keys), int)
    for b, g, tile in np.ndindex(spec.B, spec.Hkv, spec.key_tiles):
        here = slice(tile * spec.tile_keys, (tile + 1) * spec.tile_keys)
        for place in range(first[b, g, tile], first[b, g, tile] + count[b, g, tile]):
            item, seen = done.pop(place)
            assert (item.row, item.first_key) == (b * spec.Hkv + g, tile * spec.tile_keys)
            total[b, g, :, here] += seen
    assert not any(seen.any() for _, seen in done.values()), "sums that nobody adds up"
    assert not total[..., spec.S :].any()
    return total[..., : spec.S]


def visits_of(spec, arrays, row):
    """Of one item `[T, keys]`: of an interval each 64 keys by themselves, as warpgroups go."""
    item = WorkItem(*row[:7].tolist())
    if spec.gathered:
        return visits_of_keys(spec, arrays, item)
    found = []
    for i in range(spec.consumers):
        first = part_column(i)
        columns = row[first : first + len(PART_COLUMNS)].tolist()
        part = dict(zip(PART_COLUMNS, columns, strict=True))
        assert item.begin <= part["begin"] and part["end"] <= item.end
        keys = item._replace(first_key=item.first_key + i * ROWS, **part)
        found.append(visits_of_keys(spec, arrays, keys))
    return np.concatenate(found, axis=1)


def visits_of_keys(spec, arrays, item):
    """Of the first 64 keys of an item, step by step as the kernel goes."""
    rows, more = arrays[4], arrays[6:]
    query_tile, per = spec.query_tile, spec.tiles_per_step
    b, g = divmod(item.row, spec.Hkv)
    key = item.first_key + np.arange(ROWS)
    found = np.zeros((spec.query_tiles * query_tile.tokens, ROWS), int)
    steps = -(-(item.end - item.begin) // per)
    left = np.clip(-(-(item.unmasked_begin - item.begin) // per), 0, steps)
    right = np.clip((item.unmasked_end - item.begin) // per, left, steps)
    for place in range(item.begin, item.begin + steps * per):
        step = (place - item.begin) // per
        at = np.clip(place, item.begin, item.end - 1)
        index = more[0][at] if spec.gathered else place
        numbers = rows[b, g, index, : query_tile.used : query_tile.group]
        seen = np.repeat(np.isfinite(numbers[:, :1]), ROWS, axis=1)
        token_bits = int(more[1][at]) if spec.block else 0
        if spec.block:
            seen &= token_bits >> np.arange(query_tile.tokens)[:, None] & 1 == 1
        if not left <= step < right:
            seen &= (key >= numbers[:, 2:3]) & (key < numbers[:, 3:4])
            if spec.gathered:
                seen &= place < item.end
            if spec.block:
                begins = (
                    (token_bits % 2**32 >> 16)
                    - block_query_lists.BLOCK_OFFSET_BIAS
                    + item.first_key
                )
                seen &= (key >= begins) & (key < begins + spec.block)
        here = slice(index * query_tile.tokens, (index + 1) * query_tile.tokens)
        found[here] += seen
    assert not found[spec.T :].any()
    return found[: spec.T]


def check(ops, shape, branch, indices=None):
    pairs = told(ops, shape, branch, indices)
    want = shape.mask(branch, shape.indices if indices is None else indices)
    assert len(pairs) == (2 if shape.width > 128 else 1)
    for sums, merged in pairs:
        np.testing.assert_array_equal(visits(sums, merged), want.astype(int))
    return pairs


@pytest.fixture
def short(monkeypatch):
    """Work items are many and short, and there are several segments of tokens."""
    describes = block_query_lists.count_entries, block_query_lists.fill_lists
    for describe in (*describes, work_items.work_items):  # which know no `CHUNKS`
        monkeypatch.setattr(describe.__module__ + "." + describe.__name__, describe.__wrapped__)
    set_limits(monkeypatch, min_segment=2, query_list_chunks=8, min_interval=2, item_entries=3)
    mosaic_backward._interval_split.cache_clear()
    yield
    mosaic_backward._interval_split.cache_clear()


@pytest.fixture(params=["long", "short"])
def lengths(request):
    """Items as on a GPU, or many short ones."""
    if request.param == "short":
        request.getfixturevalue("short")
    return request.param


@pytest.mark.parametrize("branch", ["compressed", "sliding", "selected"])
@by_shape
def test_every_pair_counts_once(shape, branch, lengths):
    ((sums, merged), *_) = check(mosaic.OPS, shape, branch)
    # Else nothing would have been merged.
    several = (merged.arrays[-1] > 1).any()
    if lengths == "short" and branch != "sliding":  # which is cut only where that pays
        assert several == (sums.spec.query_tiles > 3)


@by_shape
def test_popular_blocks(shape, short):
    check(mosaic.OPS, shape, "selected", shape.popular())


@pytest.mark.parametrize("branch", ["compressed", "sliding", "selected"])
@by_shape
def test_torch_makes_the_same(shape, branch, short):
    for ours, theirs in zip(
        told(mosaic.OPS, shape, branch),
        told(nsa_torch.torch_ops.TORCH_OPS, shape, branch),
        strict=True,
    ):
        for one, other in zip(ours, theirs, strict=True):
            assert one.spec == other.spec
            for x, y in zip(one.arrays, other.arrays, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


def test_no_more_items_than_entries():
    """Few queries over many keys: no list of most tiles has an entry."""
    ((sums, _),) = check(mosaic.OPS, Shape(2, 900, 4, block=64), "selected")
    spec = sums.spec
    assert spec.work_items <= spec.list_entries < spec.key_tiles * spec.B * spec.Hkv


def test_whole_tiles_are_seen_without_a_mask():
    """Most of a long problem needs none."""
    shape = Shape(512, 2048, 16, block=64, n=8)
    for branch in ("selected", "compressed"):
        ((sums, _),) = told(mosaic.OPS, shape, branch)
        rows = [row for row in sums.arrays[5].tolist() if row[0] >= 0]
        # Of the tile, or of its first 64 keys and of the second.
        places = [2] if sums.spec.gathered else [part_column(0), part_column(1)]
        found = [row[i : i + 4] for row in rows for i in places]
        plain = sum(max(min(c, end) - max(b, begin), 0) for begin, b, c, end in found)
        assert plain > 0.6 * sum(end - begin for begin, *_, end in found)

"""Derived steps of packed rows by kernels of Triton (`kernels_pallas.triton.tables`): all that a
plan wants of the borders in two launches, forward, and with work items of intervals in four.

On CUDA, where Triton can build them; elsewhere, and of more sequences than one program adds up,
torch makes the same.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.specs import sections, work_items
from kernels_pallas.specs.sections import Kind, Section
from kernels_pallas.specs.tile import INTERVAL_ITEM_INTS
from kernels_pallas.triton import capability
from nsa_core import varlen
from nsa_core.steps import key_bounds, mosaic_backward, mosaic_forward
from nsa_core.varlen import Capacity
from nsa_torch import triton_ops
from nsa_torch.shared import SHARED, is_capturing
from nsa_torch.torch_ops import capability_of

MAX_NUMBERS = 2**14  # numbers that one program adds up
KEPT = 1024  # sets of recipes
SEQUENCES = 5  # rows of `varlen.Sequences`
OF_ONE = 3  # sections of a derived step at most

type Made = dict[Any, list[Tensor]]  # by recipe


def made(recipes: Iterable[Any], borders: Tensor, device: torch.device) -> Made:
    """What kernels give of `recipes`, and of what these read."""
    found: Made = {}
    if {device.type, borders.device.type} != {"cuda"} or not usable(device.index):
        return found
    for launches in launches_of(tuple(recipes)):
        found |= launches(borders)
    return found


@functools.cache
def usable(index: int | None) -> bool:
    """Whether kernels of Triton that multiply no matrices run on the GPU with this index."""
    return capability.copies_why_not(capability_of(index), torch.float32) is None


@functools.lru_cache(KEPT)
def launches_of(recipes: tuple[Any, ...]) -> list["Launches"]:
    """Those that make the recipes and what they read, but for what torch must."""
    found: dict[Any, Launches] = {}
    origins: dict[Any, Any] = {}

    def visit(recipe):
        """Its `_sequences`, or None where no kernel makes it."""
        if recipe not in origins:
            origins[recipe] = None
            reads = {visit(each) for each, _, _ in recipe.reads}
            if recipe.function is varlen._sequences:
                capacity = dict(recipe.static)["capacity"]
                if capacity.B == 1 and capacity.sequences <= MAX_NUMBERS:
                    origins[recipe], found[recipe] = recipe, Launches(recipe, capacity)
            elif recipe.function in WRITERS and len(reads) == 1 and None not in reads:
                (origin,) = reads
                if found[origin].add(recipe):
                    origins[recipe] = origin
        return origins[recipe]

    for recipe in recipes:
        visit(recipe)
    return list(found.values())


class Launches:
    """Of the tables of one `Capacity`, which stand in one array, `out`."""

    def __init__(self, sequences: Any, capacity: Capacity):
        self.capacity = capacity
        self.size = 0
        self.pitch = _pitch(capacity.sequences)
        # What `sequences` writes beside, `tables`, `partials` and `tables` after it.
        self.runs, self.first, self.intervals, self.items = [[] for _ in range(4)]
        self.runs_at: dict[int, int] = {}  # by the tokens of a tile
        self.arrays: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
        self.rows(sequences, SEQUENCES, capacity.sequences)

    def add(self, recipe: Any) -> bool:
        """Whether there was room for it."""
        if max(len(self.runs), len(self.first)) + OF_ONE > sections.SECTIONS:
            return False
        return WRITERS[recipe.function](self, recipe, **dict(recipe.static)) is not False

    def room(self, count: int) -> int:
        """Where so many numbers begin."""
        begin, self.size = self.size, self.size + _pitch(count)
        return begin

    def rows(self, recipe: Any, count: int, *shape: int) -> dict[str, int]:
        """Room for arrays of one shape, in `Section`'s words: `[1, *shape]` of a recipe's."""
        numbers = math.prod(shape)
        pitch = _pitch(numbers)
        begin = self.room(pitch * count)
        found = [(begin + i * pitch, (1, *shape)) for i in range(count)]
        self.arrays.setdefault(recipe, []).extend(found)
        return {"out": begin, "total": numbers, "pitch": pitch}

    def runs_of(self, tokens: int) -> int:
        """Where what tiles of so many tokens ask of sequences begins."""
        if tokens not in self.runs_at:
            begin = self.room(self.pitch * sections.RUN_ROWS)
            self.runs_at[tokens] = begin
            self.runs.append(Section(tokens=tokens, runs_at=begin))
        return self.runs_at[tokens]

    def __call__(self, borders: Tensor) -> Made:
        numbers = self._on(borders.device)
        if numbers is None:
            return {}
        from kernels_pallas.triton import tables  # Triton is part of torch's CUDA builds only

        capacity, config = self.capacity, self.capacity.config
        count = capacity.sequences
        out = torch.empty(self.size, dtype=torch.int32, device=borders.device)
        room = max(1 << (count - 1).bit_length(), 2)
        widths = config.compress_block, config.compress_stride, config.window
        constants = tables.Capacity(*widths)
        sizes = capacity.T, capacity.first_query, capacity.half, capacity.gap, capacity.S
        arguments = numbers[0], out, borders.numel(), count, *sizes, self.pitch
        grid = 1 + len(self.runs)
        of_all = constants._replace(UNIT=capacity.unit, ROOM=room)
        _run(tables.sequences, grid, room, borders, *arguments, of_all)
        sizes = *sizes, count, self.pitch, capacity.T.bit_length(), count.bit_length()
        for n, phase in ((1, self.first), (3, self.items)):
            if phase is self.items and phase:
                tiles = max(x.tiles for x in self.intervals)
                room = max(1 << (tiles - 1).bit_length(), 2)
                _run(tables.partials, len(phase), room, numbers[2], out, room)
            if phase:
                programs = sum(_programs(x) for x in phase)
                _run(tables.tables, programs, 0, numbers[n], out, *sizes, constants)
        sizes, views = self._cut
        parts = out.split_with_sizes(sizes)
        return {
            recipe: [parts[i].view(shape) for i, shape in arrays]
            for recipe, arrays in views.items()
        }

    @functools.cached_property
    def _cut(self) -> tuple[list[int], dict[Any, list]]:
        """Sizes of all arrays and of what is between them, and by recipe which of these the arrays
        are, and their shapes.
        """
        places = sorted(array for arrays in self.arrays.values() for array in arrays)
        sizes, number, end = [], {}, 0
        for at, shape in places:
            number[at] = len(sizes) + 1
            sizes += [at - end, math.prod(shape)]
            end = at + sizes[-1]
        views = {
            recipe: [(number[at], shape) for at, shape in arrays]
            for recipe, arrays in self.arrays.items()
        }
        return [*sizes, self.size - end], views

    def _on(self, device: torch.device) -> Tensor | None:
        """The tables of sections; None: they would have to come from the host in a capture."""
        key = device, self
        if is_capturing(device) and key not in SHARED.keys():
            return None
        return SHARED.get(key, device, lambda: [self._table(device)])[0]

    def _table(self, device: torch.device) -> Tensor:
        """`[launches, SECTIONS, INTS]`"""
        blank = Section(begin=sections.NEVER)
        found = []
        for phase in (self.runs, self.first, self.intervals, self.items):
            begin, rows = 0, []
            for each in phase:
                rows.append(each._replace(begin=begin))
                begin += _programs(each)
            rows += [blank] * (sections.SECTIONS - len(rows))
            found.append([[*x, *[0] * (sections.INTS - len(x))] for x in rows])
        table = torch.tensor(found, dtype=torch.int32, pin_memory=device.type == "cuda")
        return table.to(device, non_blocking=True)


def _pitch(count: int) -> int:
    return -(-count // sections.PITCH) * sections.PITCH


def _programs(section: Section) -> int:
    return -(-section.total // sections.PROGRAM)


def _run(kernel, programs: int, room: int, *arguments: Any) -> None:
    # Newer versions of Triton warn where it is not said.
    options = {"enable_fp_fusion": False, "num_warps": min(max(room // 256, 4), 16)}
    triton_ops.run(kernel, (programs,), *arguments, **options)


# What a derived step's arrays are in sections; False: another capacity's, or too many.


def _tokens(launches: Launches, recipe, *, capacity):
    place = launches.rows(recipe, len(varlen.Tokens._fields), capacity.T)
    launches.first.append(Section(kind=Kind.TOKENS, **place))


def _key_tiles(launches: Launches, recipe, *, capacity):
    place = launches.rows(recipe, 2, capacity.key_tiles)
    launches.first.append(Section(kind=Kind.KEY_TILES, **place))


def _places_of_keys(launches: Launches, recipe, *, capacity):
    place = launches.rows(recipe, 1, capacity.S)
    launches.first.append(Section(kind=Kind.PLACES_OF_KEYS, **place))


def _query_tiles(launches: Launches, recipe, *, capacity, tokens):
    place = launches.rows(recipe, 2, capacity.query_tiles(tokens))
    place |= {"tokens": tokens, "runs_at": launches.runs_of(tokens)}
    launches.first.append(Section(kind=Kind.QUERY_TILES, **place))


def _columns(recipe) -> list[int]:
    """Which of `Tokens` a derived step reads first."""
    return [i for each, i, _ in recipe.reads if each.function is varlen._tokens]


def _by_row(launches: Launches, recipe, *, tile, tiles):
    columns = _columns(recipe)
    if len(columns) != len(recipe.reads) or not 1 <= len(columns) <= 2:
        return False
    place = launches.rows(recipe, len(columns), tiles, tile.rows)
    first, last = columns[0], columns[1] if len(columns) > 1 else -1
    sizes = {"tokens": tile.tokens, "group": tile.group, "rows": tile.rows}
    launches.first.append(Section(kind=Kind.BY_ROW, first=first, last=last, **sizes, **place))
    return True


def _candidates_of_tiles(launches: Launches, recipe, *, spec, block):
    first, last, _ = _columns(recipe)
    tokens = dict(recipe.reads[-1][0].static)["tokens"]
    tile, rows = spec.tile, spec.tiling.score_rows
    sizes = {"tokens": tokens, "runs_at": launches.runs_of(tokens)}
    sizes |= {"block": block}
    place = launches.rows(recipe, 2, spec.tiles, tile.rows) | {"rows": tile.rows}
    place |= {"group": tile.group, "first": first, "last": last}
    found = [Section(kind=Kind.CANDIDATE_ROWS, **sizes, **place)]
    place = launches.rows(recipe, 2, spec.tiles, rows) | {"rows": rows, "ratio": spec.ratio}
    found.append(Section(kind=Kind.CANDIDATE_TOKENS, **sizes, **place))
    place = launches.rows(recipe, 1, spec.tiles)
    found.append(Section(kind=Kind.CANDIDATE_SPANS, **sizes, **place))
    launches.first.extend(found)


def _interval_items(launches: Launches, recipe, *, spec, split):
    tiles, heads = spec.key_tiles, spec.Hkv
    if tiles > MAX_NUMBERS:
        return False
    first, last = _columns(recipe)
    parts, columns = tiles * spec.consumers, len(work_items.PART_COLUMNS)
    items = split.segments * split.tiles * heads
    table, by_head = launches.room(items * INTERVAL_ITEM_INTS), (1, heads, tiles)
    firsts, counts = (launches.room(heads * tiles) for _ in range(2))
    launches.arrays[recipe] = [(table, (items, INTERVAL_ITEM_INTS))]
    launches.arrays[recipe] += [(firsts, by_head), (counts, by_head)]
    section = Section(
        tokens=spec.query_tile.tokens,
        first=first,
        last=last,
        query_tiles=spec.query_tiles,
        parts_at=launches.room(parts * columns),
        before_at=launches.room(tiles),
        firsts_at=firsts,
        counts_at=counts,
        columns=spec.consumers * columns,
        tiles=tiles,
        keys=spec.tile_keys,
        heads=heads,
        partials=split.partials,
        span=-(-spec.query_tiles // split.segments),
        segments=split.segments,
        segment_tiles=split.tiles,
        streams=split.streams,
    )
    of_parts = section._replace(kind=Kind.PARTS, out=section.parts_at, total=parts)
    launches.first.append(of_parts)
    launches.intervals.append(section)
    launches.items.append(section._replace(kind=Kind.ITEMS, out=table, total=items))
    return True


WRITERS: dict[Callable[..., Any], Callable[..., Any]] = {
    varlen._tokens: _tokens,
    varlen._key_tiles: _key_tiles,
    varlen._places_of_keys: _places_of_keys,
    varlen._query_tiles: _query_tiles,
    key_bounds.by_row: _by_row,
    mosaic_forward._candidates_of_tiles: _candidates_of_tiles,
    mosaic_backward._interval_items: _interval_items,
}

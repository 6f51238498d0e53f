"""Computes the tables that kernels derive from the boundaries of a packed row, once per batch
or in each call.

If the calls of a batch share boundaries, the tensor of the boundaries has a `Tables` object as an
attribute. Operators, saved tensors of autograd and compiled graphs find the tables, since
all three pass the tensor of the boundaries itself and no copy of the tensor. If a caller passes a
copy of the boundaries instead, the tables are computed again.

On CUDA, Triton kernels (`kernels_pallas.triton.tables`) compute the tables of a plan in two
launches. Tables with work items of interval attention need four launches. Without Triton, torch
computes the tables. For more sequences than one Triton program can sum up, torch also computes the
tables.
"""

import functools
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.specs import sections, work_items
from kernels_pallas.specs.sections import AT, KINDS, Section
from kernels_pallas.triton import capability
from nsa_core import varlen
from nsa_core.plan.buffers import Derived, Plan, touched_by_torch
from nsa_core.steps import key_bounds, mosaic_backward, mosaic_forward
from nsa_core.varlen import Capacity, Tokens
from nsa_torch.shared import SHARED, Kept, Shared, is_capturing
from nsa_torch.torch_ops import TORCH_OPS, capability_of, run_triton

ATTRIBUTE = "nsa_tables"
UNKNOWN = None, True, 0  # the default of `Tables.sizes`, for boundaries that have no tables
MAX_NUMBERS = 2**14  # the maximum number of values that one Triton program can add up

type Make = Callable[[Tensor], Sequence[Tensor]]  # a hashable function of boundaries


class Tables:
    """Stores arrays, keyed by the function that computes them. If a CUDA graph has read an array,
    the array keeps its memory as long as the `Tables` object exists.

    Args:
      max_seqlen: upper bound of tokens per sequence.
      padded: whether some tokens may belong to no sequence.
      gap: Number of tokens between the first and the second half of the queries.
    """

    def __init__(self, max_seqlen: int | None, padded: bool, gap: int = 0):
        self.sizes = max_seqlen, padded, gap
        self.gaps: dict[int, Tensor] = {}
        self._shared = Shared(limit=sys.maxsize)

    def __reduce__(self):
        """Pickle the object without its arrays. The unpickled object computes each array when the
        array is needed.
        """
        return Tables, self.sizes

    def get(self, borders: Tensor, make: Make) -> Kept:
        # `make` depends only on the values of the boundaries, and therefore receives them without
        # tables.
        return self._shared.get(make, borders.device, lambda: make(borders.detach()))

    def refill(self, borders: Tensor) -> None:
        """Compute all arrays again for new `borders`. The arrays keep their memory. The work runs
        on the current stream."""
        self._shared.refill(borders.device, lambda make: make(borders.detach()))
        for x in self.gaps.values():
            getattr(x, ATTRIBUTE).refill(x)


class _Derived(NamedTuple):
    """A function of boundaries, together with the values of its other arguments, which are
    numbers."""

    function: Callable[..., Sequence[Tensor]]
    static: tuple[tuple[str, Hashable], ...]

    def __call__(self, borders: Tensor) -> Sequence[Tensor]:
        return self.function(borders, **dict(self.static))


def of(borders: Tensor, make: Make) -> Sequence[Tensor]:
    """Return the result of `make` for the boundaries `borders`. If the boundaries have a `Tables`
    object, the result is cached in that object.
    """
    tables = tables_of(borders)
    return make(borders) if tables is None else tables.get(borders, make)


def made(function: Callable[..., Sequence[Tensor]], borders: Tensor, **static: Hashable):
    """Return `function(borders, **static)`. The result is cached if the boundaries have a `Tables`
    object.
    """
    if torch.compiler.is_compiling():
        return function(borders, **static)
    return of(borders, _Derived(function, tuple(static.items())))


def attach(tables: Tables, borders: Tensor) -> Tensor:
    """Attach a `Tables` object to `borders`. Arrays that are later derived from `borders` are
    stored in the `Tables` object.
    """
    setattr(borders, ATTRIBUTE, tables)
    return borders


def tables_of(borders: Tensor | None) -> Tables | None:
    """Return the tables attached to `borders`, or None."""
    return getattr(borders, ATTRIBUTE, None)


def sizes_of(borders: Tensor | None) -> tuple[int | None, bool, int]:
    """Return the values of `max_seqlen`, `padded` and `gap` (see `Tables`) for `borders`."""
    tables = tables_of(borders)
    return UNKNOWN if tables is None else tables.sizes


def with_gap(borders: Tensor, gap: int) -> Tensor:
    """Return the same boundaries for calls whose queries have a gap of `gap` tokens between their
    first and their second half. If the boundaries have a `Tables` object, repeated calls return
    the same tensor.
    """
    tables = tables_of(borders) or Tables(*UNKNOWN)
    if gap not in tables.gaps:
        tables.gaps[gap] = attach(Tables(*tables.sizes[:2], gap), borders.detach())
    return tables.gaps[gap]


def of_one(length: int, gap: int, device: torch.device) -> Tensor:
    """Make boundaries of one sequence of `length` tokens. The two halves of its queries have a gap
    of `gap` tokens between them."""
    make = lambda: [torch.arange(0, length + 1, length, dtype=torch.int32, device=device)]
    (found,) = SHARED.get((of_one, length, gap, device), device, make)
    return attach(tables_of(found) or Tables(length, False, gap), found)


def of_plan(plan: Plan, device: torch.device) -> tuple["PlanTables", dict[int, int]]:
    """Return the `PlanTables` of a plan, and a dictionary. The dictionary has an entry for each
    table that the plan reads. The entry maps the buffer of the table to the number of the table.
    Plans with equal tables share one `PlanTables` object.
    """
    numbers = {plan.shared: 0}
    for step in plan.batch:
        for x in step.writes:
            numbers[x.buffer] = len(numbers)
    of = lambda views: tuple(x._replace(buffer=numbers[x.buffer]) for x in views)
    steps = (x._replace(reads=of(x.reads), writes=of(x.writes)) for x in plan.batch)
    tables = numbers.keys() - {plan.shared}
    read = {x.buffer for step in plan.steps for x in step.reads} & tables
    kernels = device.type == "cuda" and (
        capability.copies_why_not(capability_of(device.index), torch.float32) is None
    )
    by_torch = tuple(numbers[n] for n in sorted(touched_by_torch(plan.steps) & tables))
    makes = _plan_tables(tuple(steps), by_torch, device, kernels)
    return makes, {n: numbers[n] for n in sorted(read)}


@functools.lru_cache(1024)
def _plan_tables(*given: Any) -> "PlanTables":
    return PlanTables(*given)


class PlanTables:
    """Computes the tables of a plan. The first result is one array with all tables that Triton
    kernels compute. Each other result is a separate tensor with one table that torch computes or
    reads.

    Args:
      steps: Derived steps of a plan (`nsa_core.plan`), which compute arrays from the boundaries.
        Buffer 0 contains the boundaries, and the next buffers contain the results of the steps in
        order.
      by_torch: Indices of the tables that torch reads in steps of the plan.
      kernels: Whether to compute tables with Triton kernels, if the kernels support these tables.
    """

    def __init__(
        self,
        steps: Sequence[Derived],
        by_torch: Sequence[int],
        device: torch.device,
        kernels: bool,
    ):
        self.steps, self.device, self.size = steps, device, 0
        self.views: dict[int, tuple[int, tuple[int, ...]]] = {}  # offset and shape in the array
        self.by_kernels = set[int]()  # steps
        # The sections of the launches: of `sequences`, then of `tables`, `partials` and
        # `tables`.
        self.phases: list[list[Section]] = [[], [], [], []]
        if kernels and steps and steps[0].function is varlen._sequences:
            first: Any = dict(steps[0].static)
            self.capacity: Capacity = first["capacity"]
            if self.capacity.B == 1 and self.capacity.sequences <= MAX_NUMBERS:
                self._describe()
        written = (x.buffer for step in steps for x in step.writes)
        self.tensors = [n for n in written if n not in self.views or n in by_torch]
        left = (step for i, step in enumerate(steps) if i not in self.by_kernels)
        read = {x.buffer for step in left for x in step.reads} | {*self.tensors}
        self.read_by_torch = [n for n in self.views if n in read]

    def __call__(self, borders: Tensor) -> list[Tensor]:
        out = torch.empty(self.size, dtype=torch.int32, device=self.device)
        done = self.by_kernels if self._launched(borders, out) else ()
        views = self.read_by_torch if done else self.views
        known = {0: borders} | {n: self._view(out, n) for n in views}
        for i, step in enumerate(self.steps):
            if i not in done:
                reads = (known[x.buffer].reshape(x.shape) for x in step.reads)
                found = step.function(TORCH_OPS, *reads, **dict(step.static))
                for x, y in zip(step.writes, found, strict=True):
                    if x.buffer in self.views:
                        known[x.buffer].copy_(y)
                    else:
                        known[x.buffer] = y.contiguous()
        return [out, *(known[n] for n in self.tensors)]

    def place(self, number: int) -> tuple[int, int]:
        """Return the index of the result that contains a table, and the offset of the table in
        bytes.
        """
        if number in self.views:
            return 0, self.views[number][0] * 4
        return self.tensor(number), 0

    def tensor(self, number: int) -> int:
        """Return the index of the separate tensor that contains only the table `number`."""
        return 1 + self.tensors.index(number)

    def _view(self, out: Tensor, number: int) -> Tensor:
        begin, shape = self.views[number]
        return out[begin : begin + math.prod(shape)].view(shape)

    def _room(self, count: int) -> int:
        """Reserve space for `count` numbers and return its offset."""
        begin, self.size = self.size, self.size + _pitch(count)
        return begin

    def _describe(self) -> None:
        """Find the steps that kernels can compute, and describe each of them as sections of a
        launch."""
        runs, first, *_ = self.phases
        runs_at: dict[int, int] = {}  # keyed by the number of tokens per tile
        columns = 0  # the first number of `Tokens`
        tiles_of: dict[int, int] = {}  # tokens per tile, keyed by the index of `QueryTiles`

        def runs_of(tokens):
            """Return the offset of the section about sequences that is used for tiles of `tokens`
            tokens."""
            if tokens not in runs_at:
                room = _pitch(self.capacity.sequences) * sections.RUN_ROWS
                runs_at[tokens] = self._room(room)
                runs.append(Section(tokens=tokens, runs_at=runs_at[tokens]))
            return {"tokens": tokens, "runs_at": runs_at[tokens]}

        for i, step in enumerate(self.steps):
            static: Any = dict(step.static)
            # The fields of `Tokens`. Results of other steps have indices outside of this range.
            read = [x.buffer - columns for x in step.reads]
            written = step.writes[0].buffer if step.writes else 0
            parts: list[dict[str, Any]] = []  # one for every two tables
            match step.function:
                case varlen._sequences:
                    pass
                case varlen._tokens:
                    columns, parts = written, [{"kind": KINDS.tokens}]
                case varlen._key_tiles:
                    parts = [{"kind": KINDS.key_tiles}]
                case varlen._places_of_keys:
                    parts = [{"kind": KINDS.places_of_keys}]
                case varlen._query_tiles:
                    tiles_of[written] = static["tokens"]
                    parts = [{"kind": KINDS.query_tiles} | runs_of(static["tokens"])]
                case key_bounds.by_row if all(n in range(len(Tokens._fields)) for n in read):
                    tile = static["tile"]
                    sizes = {"tokens": tile.tokens, "group": tile.group, "rows": tile.rows}
                    ends = dict(zip(("first", "last"), read, strict=False))
                    parts = [{"kind": KINDS.by_row} | sizes | ends]
                case mosaic_forward._candidates_of_tiles:
                    spec, tile = static["spec"], static["spec"].tile
                    sizes = runs_of(tiles_of[step.reads[-2].buffer])
                    sizes |= {"block": static["block"], "first": read[0], "last": read[1]}
                    rows = {"group": tile.group, "rows": tile.rows}
                    tokens = {"rows": spec.tiling.score_rows, "ratio": spec.ratio}
                    parts = [
                        {"kind": KINDS.candidate_rows} | sizes | rows,
                        {"kind": KINDS.candidate_tokens} | sizes | tokens,
                        {"kind": KINDS.candidate_spans} | sizes,
                    ]
                case mosaic_backward._interval_items if static["spec"].key_tiles <= MAX_NUMBERS:
                    pass
                case _:
                    continue
            self.by_kernels.add(i)
            for x in step.writes:
                self.views[x.buffer] = self._room(math.prod(x.shape)), x.shape
            for x, part in zip(step.writes[::2], parts, strict=False):
                total = math.prod(x.shape)
                place = {"out": self.views[x.buffer][0], "total": total}
                first.append(Section(**part, **place, pitch=_pitch(total)))
            if step.function is mosaic_backward._interval_items:
                self._intervals(*(self.views[x.buffer] for x in step.writes), *read, **static)
        self._prepare()

    def _intervals(self, table, by_head, counts, first, last, *, spec, split) -> None:
        """Add the sections that compute the work items of interval attention."""
        columns = spec.consumers * len(work_items.PART_COLUMNS)
        parts = spec.key_tiles * columns
        section = Section(
            tokens=spec.query_tile.tokens,
            first=first,
            last=last,
            query_tiles=spec.query_tiles,
            parts_at=self._room(parts),
            before_at=self._room(spec.key_tiles),
            firsts_at=by_head[0],
            counts_at=counts[0],
            columns=columns,
            tiles=spec.key_tiles,
            keys=spec.tile_keys,
            heads=spec.Hkv,
            partials=split.partials,
            span=-(-spec.query_tiles // split.segments),
            segments=split.segments,
            segment_tiles=split.tiles,
            streams=split.streams,
        )
        _, of_first, intervals, items = self.phases
        total = parts // len(work_items.PART_COLUMNS)
        of_first.append(section._replace(kind=KINDS.parts, out=section.parts_at, total=total))
        intervals.append(section)
        place = {"out": table[0], "total": table[1][0]}
        items.append(section._replace(kind=KINDS.items, **place))

    def _prepare(self) -> None:
        """Prepare the launches. Each launch reads one row of `self.sections`."""
        from kernels_pallas.triton import tables  # Triton is part of torch's CUDA builds only

        rows, programs = [], []
        for phase in self.phases:
            begin, row = 0, []
            for each in phase:
                row.append(each._replace(begin=begin))
                begin += -(-each.total // sections.PROGRAM)
            row += [Section(begin=sections.NEVER)] * (sections.SECTIONS - len(row))
            rows.append([[*x, *[0] * (sections.INTS - len(x))] for x in row])
            programs.append(begin)
        self.sections = torch.tensor(rows, dtype=torch.int32)
        capacity, config = self.capacity, self.capacity.config
        count, pitch = capacity.sequences, _pitch(capacity.sequences)
        sizes = capacity.T, capacity.first_query, capacity.half, capacity.gap, capacity.S
        widths = config.compress_block, config.compress_stride, config.window
        constants = tables.Capacity(*widths)
        room = _power_of_two(count)
        of_all = constants._replace(UNIT=capacity.unit, ROOM=room)
        searched = (
            *sizes,
            count,
            pitch,
            capacity.T.bit_length(),
            count.bit_length(),
            AT,
            KINDS,
            constants,
        )
        runs, _, intervals, items = self.phases
        # The kernel, the number of programs, options, arguments and, except for the first
        # launch, a row of the sections.
        arguments = count, *sizes, pitch, AT, of_all
        self.first_launch = tables.sequences, 1 + len(runs), _options(room), arguments
        tables_alone = _options(0), searched
        self.launches: list[tuple[Any, ...]] = [(1, tables.tables, programs[1], *tables_alone)]
        if items:
            room = _power_of_two(max(x.tiles for x in intervals))
            self.launches += [
                (2, tables.partials, len(intervals), _options(room), (AT, room)),
                (3, tables.tables, programs[3], *tables_alone),
            ]

    def _launched(self, borders: Tensor, out: Tensor) -> bool:
        """Launch the kernels if they can run on `borders`. Return whether the kernels have
        written the array `out`."""
        if not self.by_kernels:
            return False
        if is_capturing(self.device) and self not in SHARED.keys():
            return False  # the sections would have to be copied from the host
        (numbers,) = SHARED.get(self, self.device, lambda: [self._on_device()])
        kernel, programs, options, arguments = self.first_launch
        given = borders.contiguous(), numbers, out, borders.numel(), *arguments
        run_triton(kernel, (programs,), *given, **options)
        for row, kernel, programs, options, arguments in self.launches:
            run_triton(kernel, (programs,), numbers[row], out, *arguments, **options)
        return True

    def _on_device(self) -> Tensor:
        given = self.sections
        given = given.pin_memory() if self.device.type == "cuda" else given
        return given.to(self.device, non_blocking=True)


def _options(room: int) -> dict[str, Any]:
    """Return the options of a launch. `room` is the number of values whose sum one program of the
    launch computes.
    """
    # Newer versions of Triton warn if it is not specified.
    return {"enable_fp_fusion": False, "num_warps": min(max(room // 256, 4), 16)}


def _pitch(count: int) -> int:
    return -(-count // sections.PITCH) * sections.PITCH


def _power_of_two(count: int) -> int:
    return max(1 << (count - 1).bit_length(), 2)

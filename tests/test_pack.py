"""Packing against torch indexing: on a GPU, and without one in Triton's interpreter.

Where the interpreter is not asked for, this file runs once more in a process that asks for it, and
with it those of other kernels but `test_triton.py`.
"""

import contextlib
import dataclasses
import functools
import re

import pytest
import torch

from nsa_torch import NSAConfig, fa2, packing, select
from nsa_torch.geometry import geometry
from nsa_torch.packing import Ranges
from tests.interpreted_triton import DEVICE, INTERPRETED, ROOT, TRITON, kernel, run_again
from tests.paths import steps_of_torch
from tests.problems import FEW, Case, check, problem
from tests.tables import table
from tests.torch_inputs import normal, on_the_cpu

TABLE = table("pack")
CONFIGS = {name: NSAConfig(**row) for name, row in TABLE["configs"].items()}
TINY, ODD = CONFIGS["tiny"], CONFIGS["odd"]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Some selections; `of` are `cu_seqlens`, or numbers of keys that differ by row."""

    T: int
    S: int
    D: int
    config: NSAConfig = ODD
    B: int = 1
    Hkv: int = 2
    of: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    strided: bool = False
    empty: bool = False

    def where(self, device):
        given = {name: torch.tensor(x, device=device) for name, x in self.of.items()}
        options = {"kv_len": self.S, "cu_seqlens": None} | given
        return geometry(
            self.B, self.T, config=self.config, device=torch.device(device), **options
        )

    def selection(self, device):
        """Random blocks, with empty slots and a few that begin behind their query."""
        make = torch.Generator().manual_seed(self.T)
        where, config = self.where("cpu"), self.config
        count = config.num_blocks(self.S)
        scores = torch.rand(self.B, self.T, self.Hkv, count, generator=make)
        own = where.position[:, :, None].div(config.select_block, rounding_mode="floor")
        blocks = select.select_from_scores(scores, own, config)
        blocks[torch.rand(blocks.shape, generator=make) < 0.1] = -1
        blocks[torch.rand(blocks.shape, generator=make) < 0.05] = count
        if self.empty:
            blocks[:] = -1
        return self.where(device), blocks.to(device)

    def ranges(self):
        where, blocks = self.selection(DEVICE)
        ranges, bounds = packing.selected_ranges(where, blocks, slice(None), self.config)
        return ranges, int(bounds[-1])

    def array(self, dtype):
        shape = self.B, self.S, self.Hkv, self.D
        x = normal(*shape, device=DEVICE, dtype=dtype).detach()
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.strided else x


CASES = [
    Packed(**row | {"config": CONFIGS[row.get("config", "odd")]}) for row in TABLE["cases"]
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.T}-{case.S}")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
by_dtype = pytest.mark.parametrize(
    # The interpreter is slow, and to it 16 bits are 16 bits.
    "dtype",
    [torch.float32] if INTERPRETED else DTYPES,
    ids=lambda x: str(x)[6:],
)
by_mode = pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "sums"])


@contextlib.contextmanager
def determined(whether=True):
    torch.use_deterministic_algorithms(whether)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def add(ranges, x, grad, deterministic):
    total = ranges.zeros(x).neg()  # what is written at all loses its sign
    with determined(deterministic):
        ranges.add(total, grad)
    return total


def by_torch(ranges, x, grad):
    """The same sums by torch indexing, in float64."""
    source = ranges.rows(x.shape[1])
    total = source.zeros(x.double())
    source.add(total, grad)
    return source.gradient(total, x.double())


def gradient(ranges, used, width, dtype=torch.float32):
    """Random, and NaN where no range is; strided, as a slice of what FA-2 pads."""
    grad = normal(ranges.capacity, width + 8, device=DEVICE, dtype=dtype).detach()
    grad[used:] = float("nan")
    return grad[:, :width]


@by_case
def test_the_ranges_are_the_tokens_of_the_blocks(case):
    """In plain loops, on the CPU, and the same by torch indexing."""
    queries = slice(1, case.T)
    where, blocks = case.selection("cpu")
    ranges, bounds = packing.selected_ranges(where, blocks, queries, case.config)
    size, wanted, ends = case.config.select_block, [], [0]
    for b in range(case.B):
        for t in range(*queries.indices(case.T)):
            position, begin = int(where.position[b, t]), int(where.key_start[b, t])
            for h in range(case.Hkv):
                for block in blocks[b, t, h].tolist():
                    tokens = range(block * size, min((block + 1) * size, position + 1))
                    named = [(b * case.S + begin + u) * case.Hkv + h for u in tokens]
                    wanted += named if block >= 0 else []
                ends.append(len(wanted))
    assert bounds.tolist() == ends and bounds.dtype == torch.int32
    rows = ranges.rows(case.S).index
    assert rows.tolist() == wanted + [case.B * case.S * case.Hkv] * (len(rows) - len(wanted))
    assert bool(wanted) != case.empty
    assert (ranges.length == 0).any()


@kernel
@by_case
@by_dtype
def test_ranges_are_read_and_added(case, dtype):
    """In deterministic mode torch fills new memory with NaN: what is not used stays so; and sums
    are the same bits.
    """
    ranges, used = case.ranges()
    x = case.array(dtype)
    with determined():
        got = ranges.read(x)
    assert got.shape == (ranges.capacity, case.D) and got.dtype == dtype
    assert torch.equal(got[:used], ranges.rows(case.S).read(x)[:used])
    assert got[used:].isnan().all()
    grad = gradient(ranges, used, case.D, dtype)
    want, one = by_torch(ranges, x, grad), add(ranges, x, grad, True)
    untouched = by_torch(ranges, x, torch.ones_like(grad)) == 0
    for total in (one, add(ranges, x, grad, False)):
        assert total.dtype == torch.float32 and total.shape == x.shape
        torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=1e-5)
        assert (total[untouched] == 0).all() and total[untouched].signbit().all()
    for _ in range(0 if INTERPRETED else 4):  # which knows one order
        assert torch.equal(one, add(ranges, x, grad, True))
    ranges.add(one, grad)  # to what is there already
    torch.testing.assert_close(one.double(), 2 * want, rtol=1e-6, atol=1e-5)
    assert ranges.gradient(one, x).dtype == dtype


@kernel
@by_dtype
@pytest.mark.parametrize("strided", [False, True])
def test_rows_are_gathered(dtype, strided):
    x = Packed(1, 19, D=48, B=3, Hkv=2, strided=strided).array(dtype)
    for count in (0, 1, 77, 300):
        make = torch.Generator().manual_seed(count)
        rows = torch.randint(-2, 3 * 19 + 2, (count,), generator=make).to(DEVICE)
        want = x.reshape(3 * 19, 2, 48)[rows.clamp(0, 3 * 19 - 1)]
        want[(rows < 0) | (rows >= 3 * 19)] = 0
        assert torch.equal(packing.gather_by_kernel(x, rows), want)
        assert torch.equal(packing.gather(x, rows), want)


@kernel
def test_no_queries_and_no_keys():
    case = Packed(4, 9, D=16)
    where, blocks = case.selection(DEVICE)
    none, bounds = packing.selected_ranges(where, blocks, slice(0, 0), ODD)
    x = case.array(torch.float16)
    assert none.read(x).shape == (0, 16) and bounds.tolist() == [0]
    assert packing.gather_by_kernel(x[:, :0], torch.tensor([-1], device=DEVICE)).sum() == 0


@kernel
@by_mode
def test_tokens_outside_the_array_are_nothing(deterministic):
    """They read as 0 and get no gradient, so that no index can reach other memory."""
    whole = torch.arange(1.0, 37.0, device=DEVICE).reshape(1, 12, 1, 3)
    x = whole[:, 4:8]
    start = torch.tensor([-1, 3, 7], device=DEVICE).reshape(1, 3, 1, 1)
    length, place = torch.full_like(start, 4), start.new_tensor([0, 4, 8]).reshape(start.shape)
    ranges = Ranges(start, length, place, 4)
    want = x.new_zeros(12, 3)
    want[1:4], want[4] = x[0, :3, 0], x[0, 3, 0]
    assert torch.equal(ranges.read(x), want)
    totals = torch.zeros(3, 4, 1, 3, device=DEVICE)  # its neighbours in memory stay 0
    with determined(deterministic):
        ranges.add(totals[1:2], torch.ones(12, 3, device=DEVICE))
    assert (totals[1] == 1).all() and totals.sum() == 12


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The last block of 4.3 GB of keys; then of 8.6 GB of their gradient. The ranges have three
    blocks, which are also those of a small array.
    """
    size, heads, width = 64, 4, 128
    tokens = 2**31 // (heads * width) + 3 * size
    x = torch.zeros(1, tokens, heads, width, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[:, -2 * size :] = torch.randn(2 * size, heads, width, device="cuda")
    block = torch.tensor([[2, 1], [0, 2]], device="cuda")[None, :, None].repeat(1, 1, heads, 1)
    length = torch.full_like(block, size)
    length[0, 0, :, 0] = 17
    place = length.flatten().cumsum(0).reshape(length.shape) - length
    few, used = Ranges(block * size, length, place, size), int(length.sum())
    beyond = tokens - 3 * size
    ranges = dataclasses.replace(few, start=few.start + beyond * (block > 0))
    small_of = lambda x: torch.cat([x[:, :size], x[:, -2 * size :]], dim=1)
    small, got = small_of(x), ranges.read(x)[:used]
    assert torch.equal(got, few.rows(3 * size).read(small)[:used])
    assert got.count_nonzero() > 0.6 * got.numel()
    some = torch.tensor([tokens - 1, -1, 0, tokens - 65], device="cuda")
    want = x[0, some.clamp(min=0)]
    want[1] = 0
    assert torch.equal(packing.gather_by_kernel(x, some), want)
    del x
    grad = torch.randn(few.capacity, width, device="cuda", dtype=torch.bfloat16)
    want = by_torch(few, small, grad)
    for deterministic in (False, True):
        total = torch.zeros(1, tokens, heads, width, device="cuda")
        with determined(deterministic):
            ranges.add(total, grad)
        torch.testing.assert_close(small_of(total).double(), want, rtol=1e-6, atol=1e-5)
        assert total[0, size : -2 * size].count_nonzero() == 0
        del total


if INTERPRETED:

    def test_sums_in_deterministic_mode_do_not_hang_on_the_order_of_launch(monkeypatch):
        from triton.runtime.interpreter import interpreter_builder as builder

        case = Packed(64, 64, D=40, config=TINY, of={"cu_seqlens": [0, 50, 51, 64]})
        ranges, used = case.ranges()
        x, grad = case.array(torch.float32), gradient(ranges, used, case.D)
        both = functools.partial(add, ranges, x, grad)
        atomics, sums = both(False), both(True)
        in_order = builder.set_grid_idx

        def reverse(*index):
            last = (count - 1 - i for i, count in zip(index, builder.grid_dim, strict=True))
            in_order(*last)

        monkeypatch.setattr(builder, "set_grid_idx", reverse)
        assert torch.equal(sums, both(True))
        assert not torch.equal(atomics, both(False))  # the check can fail

    @by_mode
    def test_branches_through_the_kernels(deterministic, monkeypatch):
        """FA-2's stand-in on packed rows; on a GPU the table of all paths has FA-2 itself."""
        calls = []

        def rows(self, num_keys):
            calls.append(self)
            return self

        def gather(x, rows):
            calls.append(rows)
            return packing.gather_by_kernel(x, rows)

        monkeypatch.setattr(Ranges, "rows", rows)
        monkeypatch.setattr(fa2, "gather", gather)
        p = problem(Case(25, 25, H=6, documents=(1, 10, 0, 1, 8), config=FEW))
        with on_the_cpu(monkeypatch), determined(deterministic):
            found = steps_of_torch(p, "fa2", of_lse=False)  # FA-2 gives it no gradient
            check(p, found, p.expected_steps(False))
        assert len(calls) > 2


if TRITON and not INTERPRETED:

    def test_the_kernels_in_the_interpreter():
        """Those of other files too: a process takes seconds to begin."""
        others = "test_table_kernels.py test_split_heads.py test_caches_triton.py"
        files = [*others.split(), "test_blocks.py::test_row"]
        run_again(__file__, *(f"{ROOT}/tests/{x}" for x in files))

    @pytest.mark.parametrize(
        "name", ["gather_ranges", "gather_rows", "add_ranges", "sum_ranges"]
    )
    @pytest.mark.parametrize("width", [128, 192])
    def test_the_kernels_compile_to_accesses_of_16_bytes(name, width):
        """For a Hopper GPU, which need not be there."""
        accesses = re.findall(r".*(?:ld|st|red|atom)\.global.*", ptx(name, width))
        others = [line for line in accesses if not re.search(r"\.v4\.[bf]32", line)]
        assert len(others) < len(accesses)
        assert all(".b64" in line for line in others)  # which read the 64-bit indices


def ptx(name, width):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from kernels_pallas.triton import pack as kernels

    function = getattr(kernels, name)
    tile = (kernels.sum_tile if name == "sum_ranges" else kernels.tile)(64, width)
    fixed = {"c": tile._replace(HEADS=4), "source_column": 1, "grad_column": 1}
    fixed = {x: value for x, value in fixed.items() if x in function.arg_names}
    types = {"source": "*bf16", "packed": "*bf16", "grad": "*bf16", "total": "*fp32"}
    indices = ("block", "order", "end", "start", "length", "place", "rows")
    types |= dict.fromkeys(indices, "*i64") | dict.fromkeys(fixed, "constexpr")
    names = function.arg_names
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in {*fixed, *kernels.SIZES}
    }
    signature = {x: types.get(x, "i32") for x in names}
    source = ASTSource(function, signature, fixed, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=tile.options).asm["ptx"]

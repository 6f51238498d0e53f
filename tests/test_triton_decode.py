"""The Triton kernels of a decode step: on a GPU, and without one in Triton's interpreter.

Where the interpreter is not asked for, this file runs once more in a process that asks for it.
"""

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.judge.parity import FLOAT32_MAX
from kernels_pallas.triton import capability, decode_descriptions
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem
from nsa_core.steps import triton_decode as steps
from nsa_jax.triton_ops import compiled_for
from nsa_torch import gathered_rows, paged, paged_attend
from tests import interpreted_triton, pretend
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.limits import set_limits
from tests.paged_rows import SMALL, Rows, Sizes, bounds, tables

pytestmark = pytest.mark.skipif(not TRITON, reason="triton is not installed")

JAX_TRITON = importlib.util.find_spec("jax_triton") is not None
ODD = NSAConfig(8, 4, 12, num_selected=5, num_initial=1, num_local=2, window=7)
ONE = NSAConfig(16, 16, 16, num_selected=2, num_initial=0, num_local=1, window=0)
POOL = 40


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """In the interpreter no kernel refuses, and short rows are several splits and tiles."""
    if INTERPRETED:
        set_limits(monkeypatch, decode_split=16, decode_candidates=32)
        interpreted_triton.right_bfloat16(monkeypatch)
        interpreted_triton.right_fp8(monkeypatch)


def tensor(x, dtype=torch.float32):
    return torch.from_numpy(np.array(x)).to(DEVICE, dtype if x.dtype == np.float32 else None)


@dataclasses.dataclass
class Call:
    """Rows in a cache whose other entries are NaN, and their last `queries` as a decode step."""

    rows: Rows
    queries: int
    dtype: torch.dtype = torch.float32
    width: int = 9
    seed: int = 0
    fp8: bool = False

    def inputs(self) -> paged_attend.Inputs:
        rows, sizes = self.rows, self.rows.sizes
        as_tensor = lambda x: tensor(x, self.dtype)
        cache = nsa_torch.PagedCache(
            *(POOL, sizes.Hkv, sizes.D, sizes.Dv),
            config=sizes.config,
            dtype=torch.float8_e4m3fn if self.fp8 else self.dtype,
            compressed_dtype=self.dtype,
            device=DEVICE,
            separate=sizes.separate,
        )
        for x in cache.tensors().values():
            x.fill_(torch.nan)
        table = tensor(tables(rows.lengths, sizes.config, POOL, self.width, self.seed))
        lengths = tensor(np.array(rows.lengths, np.int32))
        zeros = [0] * len(rows.lengths)
        key, value = (rows.cut(x, zeros, rows.lengths, as_tensor) for x in ("key", "value"))
        starts = tensor(bounds(rows.lengths))
        nsa_torch.append(cache, key, value, table, lengths, cu_seqlens_q=starts)
        query, gates = (self.last(x, as_tensor) for x in ("query", "gates"))
        return paged_attend.Inputs(query, gates, cache, table, lengths, None, None)

    def last(self, name, as_tensor):
        """`queries` tokens of each row; those that a row has not are NaN."""
        found = []
        for x in getattr(self.rows, name):
            missing = np.full((max(self.queries - len(x), 0), *x.shape[1:]), np.nan, x.dtype)
            found.append(np.concatenate([missing, x[max(len(x) - self.queries, 0) :]]))
        return as_tensor(np.concatenate(found))

    def expected(self):
        """In float64, 0 for what is padding: `[B, queries, H, Dv]`."""
        counts = [min(n, self.queries) for n in self.rows.lengths]
        begin = [n - c for n, c in zip(self.rows.lengths, counts, strict=True)]
        want = iter(self.rows.expected(begin, self.rows.lengths))
        sizes = self.rows.sizes
        out = np.zeros((len(counts), self.queries, sizes.H, sizes.Dv))
        for b, count in enumerate(counts):
            for i in range(self.queries - count, self.queries):
                out[b, i] = next(want)
        return out


def check(call: Call, atol: float):
    out, indices = paged_attend.with_indices("triton", call.inputs())
    want = call.expected()
    found = out.double().cpu().numpy().reshape(want.shape)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, want, rtol=0, atol=atol)
    assert (found[np.array(call.rows.lengths) == 0] == 0).all()
    return out, indices


CASES = {
    "borders": Call(Rows(Sizes(2, 1), [64, 0, 1, 7, 8, 9, 16, 130]), 1),
    "several queries": Call(Rows(Sizes(2, 1, Dv=16), [70, 2]), 3),
    "one head a group, own keys": Call(Rows(Sizes(H=2, separate=True), [75]), 2),
    "nothing a power of two": Call(Rows(Sizes(3, 1, 24, 40, ODD), [200]), 1, width=17),
    "no window": Call(Rows(Sizes(4, 1, 16, 16, ONE), [90, 16]), 8),
    "many heads": Call(Rows(Sizes(20, 1, 16, 16), [80]), 2),
}


@kernel
@pytest.mark.parametrize("name", CASES)
def test_decode_equals_whole_sequences(name):
    check(CASES[name], FLOAT32_MAX)


@kernel
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(
    "sizes", [Sizes(separate=True), Sizes(2, 1, 24, 40, ODD)], ids=["own keys", "odd"]
)
def test_rows_are_copied_side_by_side(sizes, fp8, monkeypatch):
    """One launch an array gives what torch's indexing gives, bit for bit; of the NaN that stand
    behind rows and before the windows of the last 20 queries there is none.
    """
    block = sizes.config.select_block
    given = Call(Rows(sizes, [0, 1, block, 4 * block]), 1, width=4, fp8=fp8).inputs()
    set_limits(monkeypatch, decode_gathered=512)  # several programs a row
    if INTERPRETED:
        pretend.machine(monkeypatch, append_why_not=None)
    # Tokens that were not written; of the selected branch the last page alone.
    for more, last_page in ((0, False), (3, False), (0, True), (3, True)):
        call = given.cache, given.page_table, given.lengths + more, 20, None, None, last_page
        found = gathered_rows.side_by_side(*call)
        with monkeypatch.context() as patch:
            patch.setattr(paged, "append_why_not", lambda cache: "torch")
            want = gathered_rows.side_by_side(*call)
        for x, y in zip(itertools.chain(*found), itertools.chain(*want), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
            assert more or x.isfinite().all()


@kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(dtype):
    """Inputs are rounded first, so that the oracle has the same."""
    rows = Rows(Sizes(16, 1, 32, 32), [100])
    for name in ("query", "gates"):
        for x in getattr(rows, name):
            x[:] = torch.from_numpy(x).to(dtype).float().numpy()
    for x in [*rows.key, *rows.value]:
        for y in x:
            y[:] = torch.from_numpy(y).to(dtype).float().numpy()
    check(Call(rows, 1, dtype), 2e-2 if dtype == torch.bfloat16 else 2e-3)


@kernel
def test_blocks_are_those_of_the_reference(monkeypatch):
    """A compressed token counts in two blocks, wherever a chunk of them ends."""
    set_limits(monkeypatch, decode_candidates=16)  # of four blocks
    config = NSAConfig(16, 4, 16, num_selected=6)
    call = Call(Rows(Sizes(2, 1, config=config), [200, 2]), 8, width=13)
    _, indices = paged_attend.with_indices("triton", call.inputs())
    rows, sizes = call.rows, call.rows.sizes
    indices = indices.reshape(len(rows.lengths), 8, sizes.Hkv, -1).cpu()
    for b, n in enumerate(rows.lengths):
        query, key = (torch.from_numpy(x[b])[None] for x in (rows.query, rows.key[0]))
        compressed = nsa_torch.compress(key.double(), config=config)
        want = nsa_torch.select_blocks(
            query.double(), compressed, config=config, implementation="reference"
        )
        count = min(n, 8)
        assert torch.equal(indices[b, 8 - count :], want[0, n - count :])
        assert (indices[b, : 8 - count] == -1).all()


@kernel
@pytest.mark.parametrize("name", ["borders", "several queries", "one head a group, own keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_in_fp8(name, dtype):
    """The kernels against the steps of `attention` on gathered pages, which an oracle of its own
    judges (`test_fp8_cache.py`); blocks are those of keys that were not rounded.
    """
    call = dataclasses.replace(CASES[name], dtype=dtype, fp8=True)
    inputs = call.inputs()
    out, indices = paged_attend.with_indices("triton", inputs)
    want = paged_attend.gathered(
        inputs, None, "reference" if dtype is torch.float32 else "sdpa"
    )
    atol = FLOAT32_MAX if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out, want, rtol=0, atol=atol)
    if dtype is torch.float32:
        whole = dataclasses.replace(call, fp8=False).inputs()
        assert torch.equal(indices, paged_attend.with_indices("triton", whole)[1])
        assert not torch.allclose(out, paged_attend.with_indices("triton", whole)[0], atol=1e-4)


@kernel
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_append_writes_what_torch_writes(separate, fp8, monkeypatch):
    """Prompts, chunks, tokens, padding; the pages are compared, unwritten entries too. In fp8 a
    prompt that takes its own places in the ring, and rows that have another one later.
    """
    pretend.machine(monkeypatch, append_why_not=None)
    sizes, ends = Sizes(2, 2, separate=separate), [61, 24, 0, 17]
    rows, table = Rows(sizes, ends), tensor(tables(ends, SMALL, POOL, 6))
    # No page: its tokens are lost. One beyond the pool is an error where the host reads it.
    table[3, 1] = POOL if DEVICE == "cuda" else -1
    caches = {}
    for name in ("triton", "torch"):
        cache = nsa_torch.PagedCache(
            *(POOL, sizes.Hkv, sizes.D, sizes.Dv),
            config=SMALL,
            dtype=torch.float8_e4m3fn if fp8 else torch.float32,
            compressed_dtype=torch.float32,
            device=DEVICE,
            separate=separate,
        )
        for x in cache.tensors().values():
            x.fill_(torch.nan)
        at = [0] * 4
        for counts, slots in (
            ([44, 3, 0, 16], None),
            ([1, 20, 0, 1], [0, 1, 9, 3]),
            ([16, 1, 0, 0], [0, 9, 2, 1]),
        ):
            end = [a + c for a, c in zip(at, counts, strict=True)]
            lengths = [n if c else 0 for n, c in zip(end, counts, strict=True)]
            key, value = (rows.cut(x, at, end, tensor) for x in ("key", "value"))
            nsa_torch.append(
                cache,
                key,
                value,
                table,
                tensor(np.array(lengths, np.int32)),
                cu_seqlens_q=tensor(bounds(counts)),
                slots=None if slots is None else tensor(np.array(slots, np.int32)),
                implementation=name,
            )
            at = end
        caches[name] = {k: x.float() for k, x in cache.tensors().items()}
    for name, x in caches["triton"].items():
        torch.testing.assert_close(x, caches["torch"][name], rtol=0, atol=1e-6, equal_nan=True)


@kernel
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "even"])
@pytest.mark.parametrize("name", ["triton"] if INTERPRETED else ["triton", "mosaic"])
def test_a_prefix_that_comes_with_the_same_call(name, ragged, monkeypatch):
    """A row goes on after pages that a later one fills in this call, as engines share prefixes: its
    compressed tokens that span the page's end are made of these tokens.
    """
    pretend.machine(monkeypatch, append_why_not=None)
    sizes, page = Sizes(2, 1, *((64, 64) if DEVICE == "cuda" else ())), SMALL.select_block
    begin, end = ([2 * page, 0], [2 * page + 7, 40]) if ragged else ([2 * page, 0], [64, 32])
    rows, table = (
        Rows(sizes, end),
        torch.tensor([[5, 9, 2, 1], [5, 9, 7, 3]], dtype=torch.int32),
    )
    for each in (*rows.key, *rows.value):
        each[0][: 2 * page] = each[1][: 2 * page]
    counts = [b - a for a, b in zip(begin, end, strict=True)]
    dtype, found = torch.bfloat16 if name == "mosaic" else torch.float32, []
    for implementation in (name, "torch"):
        cache = nsa_torch.PagedCache(
            POOL, 1, sizes.D, sizes.Dv, config=SMALL, dtype=dtype, device=DEVICE
        )
        key, value = (rows.cut(x, begin, end, tensor).to(dtype) for x in ("key", "value"))
        at = table.to(DEVICE), tensor(np.array(end, np.int32))
        starts = tensor(bounds(counts)) if ragged else None
        options = {"cu_seqlens_q": starts, "implementation": implementation}
        nsa_torch.append(cache, key, value, *at, **options)
        found.append(cache.tensors())
    for part, x in found[1].items():
        torch.testing.assert_close(found[0][part], x, rtol=0.01, atol=1e-6)


@kernel
def test_append_of_as_many_tokens_a_row(monkeypatch):
    pretend.machine(monkeypatch, append_why_not=None)
    rows, found = Rows(Sizes(2, 1), [30, 45]), []
    table = tensor(tables([30, 45], SMALL, POOL, 6))
    for name in ("triton", "torch"):
        cache = nsa_torch.PagedCache(
            POOL, 1, 8, 6, config=SMALL, dtype=torch.float32, device=DEVICE
        )
        key, value = (rows.cut(x, [0, 15], [30, 45], tensor) for x in ("key", "value"))
        lengths = tensor(np.array([30, 45], np.int32))
        nsa_torch.append(cache, key, value, table, lengths, implementation=name)
        found.append(cache.tensors())
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=0, atol=1e-6)


@kernel
def test_a_row_depends_on_nothing_else():
    """Bit for bit: where its pages lie, how long the table is, what other rows are."""
    rows = Rows(Sizes(2, 1), [90, 61])
    alone = Rows(Sizes(2, 1), [90, 61])
    alone.lengths = [90]
    for name in ("query", "gates", "key", "value"):
        found = getattr(alone, name)
        setattr(
            alone, name, found[:1] if name in ("query", "gates") else [x[:1] for x in found]
        )
    first, indices = paged_attend.with_indices("triton", Call(rows, 1).inputs())
    for other in (Call(rows, 1, width=6, seed=3), Call(alone, 1, width=20)):
        found = paged_attend.with_indices("triton", other.inputs())
        assert torch.equal(found[0][:1], first[:1])
        assert torch.equal(found[1][:1], indices[:1])


@kernel
@pytest.mark.parametrize(
    ("launch", "change"),
    [
        ("partials", {"WINDOW": 10}),
        ("partials", {"scale": 1.01}),
        ("finish", {"scale": 1.01}),
        ("finish", {"NUM_LOCAL": 0}),
        # Shorter than a whole split elsewhere.
        *([("finish", {"SPLIT": 2})] if INTERPRETED else []),
    ],
    ids=str,
)
def test_mutants_are_caught(launch, change, monkeypatch):
    """A constant of one launch is wrong (`SPLIT`: times so much), or its scale. None reads what
    was never written.
    """
    whole = getattr(decode_descriptions.Decode, launch)

    def wrong(self, pool):
        found = whole(self, pool)
        *sizes, scale = found.scalars
        scalars = *sizes, scale * change.get("scale", 1.0)
        constants = {k: x for k, x in change.items() if k != "scale"}
        if "SPLIT" in change:
            constants["SPLIT"] = found.constants.SPLIT * change["SPLIT"]
        constants = found.constants._replace(**constants)
        return dataclasses.replace(found, constants=constants, scalars=scalars)

    monkeypatch.setattr(decode_descriptions.Decode, launch, wrong)
    with pytest.raises(AssertionError):
        check(Call(Rows(Sizes(2, 1), [86]), 1), FLOAT32_MAX)


@pytest.mark.gpu
def test_one_graph_serves_growing_rows():
    """Lengths grow, a row ends, another begins: replays equal eager calls, bit for bit."""
    sizes = Sizes(16, 1, 64, 64, NSAConfig())
    call = Call(Rows(sizes, [300, 64]), 1, torch.bfloat16)
    inputs = call.inputs()
    for x in inputs.cache.tensors().values():
        x.nan_to_num_()  # rows grow by more tokens than are appended here
    tensors = [inputs.query, inputs.lengths, *inputs.gates]

    def new(width):
        return torch.randn(2, 1, width, device=DEVICE, dtype=torch.bfloat16)

    key, value = new(64), new(64)

    def step():
        at = inputs.page_table, inputs.lengths
        nsa_torch.append(inputs.cache, key, value, *at)
        return paged_attend.on_triton(inputs)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    for lengths in ([301, 65], [302, 0], [303, 1], [304, 2], [640, 128]):
        inputs.lengths.copy_(torch.tensor(lengths))
        for x in (*tensors[:1], key, value):
            x.normal_()
        graph.replay()
        assert torch.equal(out, step())


def problem(**changes) -> Problem:
    sizes = {"B": 8, "T": 1, "S": 8192, "H": 64, "Hkv": 4, "D": 128, "Dv": 128}
    rest = {"packed": False, "config": NSAConfig(), "capability": (8, 0)}
    return Problem("torch", "decode", "cuda", "bfloat16", **(sizes | rest | changes))


@pytest.mark.skipif(INTERPRETED, reason="the same in both processes")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"T": 8}, None),
        ({"T": 9}, "same 1 to 8 queries for each row, got 9 a row"),
        ({"T": 0, "packed": True}, "got rows of different numbers"),
        ({"H": 1024}, "up to 128 query heads"),
        ({"D": 512}, "widths up to 256"),
        ({"is_fp8": True}, r"(8, 9) or more for pages in fp8, got (8, 0)"),
        ({"is_fp8": True, "capability": (8, 9)}, None),
    ],
)
def test_what_kernels_take(changes, reason):
    found = capability.decode_why_not(problem(**changes))
    assert found is None if reason is None else reason in found


@pytest.mark.skipif(INTERPRETED, reason="the same in both processes")
def test_choice_on_posed_devices(monkeypatch):
    """Mosaic on Hopper, Triton for what it cannot do there and on others, which ask for no
    threshold: what stands behind gathers all pages.
    """
    registry = paged_attend.REGISTRY
    pretend.machine(monkeypatch, jax_has_cuda=True)
    for posed, want in (((8, 0), "triton"), ((8, 9), "triton"), ((9, 0), "mosaic")):
        assert registry.choose(problem(capability=posed)).implementation == want
        assert registry.choose(problem(capability=posed), "triton").implementation == "triton"
    assert registry.choose(problem(capability=(9, 0)), "mosaic").implementation == "mosaic"
    with pytest.raises(NotImplementedError, match="needs compute capability"):
        registry.choose(problem(), "mosaic")
    with pytest.raises(NotImplementedError, match="H / Hkv of 1 to 16, got 32"):
        registry.choose(problem(capability=(9, 0), H=128), "mosaic")
    pretend.machine(monkeypatch, jax_has_cuda=False)
    for there, want in ((False, "triton"), (True, "mosaic")):
        pretend.machine(monkeypatch, on_disk=there)
        assert registry.choose(problem(capability=(9, 0))).implementation == want
    eight = problem(capability=(9, 0), is_fp8=True)
    assert registry.choose(eight).implementation == "mosaic"
    for refused in (eight._replace(dtype="float16"), eight._replace(D=96)):
        assert registry.choose(refused).implementation == "triton"
        with pytest.raises(NotImplementedError, match="pages in fp8, got"):
            registry.choose(refused, "mosaic")
    large_groups = problem(capability=(9, 0), H=128)
    assert registry.choose(large_groups).implementation == "triton"
    strided = problem(strided="cache contiguous")
    assert registry.choose(strided).implementation == "gathered"


@pytest.mark.skipif(INTERPRETED, reason="the same in both processes")
def test_no_length_compiles_anything():
    """Rows, pages of the pool: the constants are the same; of the table's width the power of 2."""

    def constants(**changes):
        found = problem(**changes)
        sizes = found._asdict()
        names = ("B", "T", "S", "H", "Hkv", "D", "Dv", "dtype", "capability")
        from kernels_pallas.triton.descriptions import Problem as Sizes

        decode = decode_descriptions.Decode(
            Sizes(**{x: sizes[x] for x in names}, scale=1.0), found.config
        )
        return [x.constants for x in (decode.partials(99), decode.finish(99))]

    assert constants() == constants(B=3) == constants(S=7000)
    assert constants(S=2**16) == constants(S=2**20)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.skipif(not JAX_TRITON, reason="jax-triton is not installed")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["16 bits", "fp8"])
def test_jax_lowers_a_decode_step(dtype):
    sizes, lengths = Sizes(16, 1, 32, 32), jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = nsa_jax.PagedCache(8, 1, 32, 32, config=sizes.config, dtype=dtype)
    query = jax.ShapeDtypeStruct((2, 16, 32), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((2, 16, 3), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((2, 4), jnp.int32)

    def step(*arrays):
        from nsa_jax import triton

        return steps.attention(triton.OPS, *arrays, None)

    with compiled_for((9, 0)):
        traced = jax.jit(step).trace(query, gates, cache, table, lengths)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@triton_kernel_call") == 2


@pytest.mark.skipif(INTERPRETED, reason="runs here")
def test_interpreted():
    interpreted_triton.run_again(__file__)

"""A decode step that appends its tokens: one launch, known from the second one on."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch

import nsa_torch
from kernels_pallas.mosaic import capability
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_torch import paged, paged_attend
from tests import planned, pretend

CONFIG = NSAConfig(num_selected=4, window=100)
HEADS, KV_HEADS, WIDTH, POOL = 4, 2, 64, 12
TABLE = torch.tensor([[3, 7, 1], [0, 4, 9]], dtype=torch.int32)


def array(x):
    """A tensor's memory in NumPy."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if x.dtype is torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return x.numpy()


def emulated(kernel, *tensors):
    found = kernel.call(*map(array, tensors))
    half = lambda x: x.view(np.int16) if x.itemsize == 2 else x
    return [
        torch.from_numpy(half(np.asarray(x))).view(getattr(torch, wanted.dtype))
        for x, wanted in zip(found, kernel.outputs, strict=True)
    ]


@pytest.fixture
def ran(monkeypatch):
    """The kernels that run, on emulated warps; calls are known as on a GPU."""
    with planned.on_the_cpu(monkeypatch, emulated) as ran, capability.interpreted(True):
        yield ran


def draw(generator, count, heads, *width):
    width = width or (WIDTH,)
    return torch.randn(count, heads, *width, generator=generator).to(torch.bfloat16)


class Rows:
    """Two rows with `lengths` tokens in pages."""

    def __init__(self, lengths, separate=False, seed=0, dtype=torch.bfloat16):
        self.generator = torch.Generator().manual_seed(seed)
        sizes, options = (
            (POOL, KV_HEADS, WIDTH, WIDTH),
            {"config": CONFIG, "separate": separate},
        )
        self.cache = nsa_torch.PagedCache(*sizes, **options, dtype=dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        self.append(self.tokens(sum(lengths)), cu_seqlens_q=starts)

    def tokens(self, count):
        new = lambda: draw(self.generator, count, KV_HEADS)
        if not self.cache.separate:
            return new(), new()
        return Branches(new(), new(), new()), Branches(new(), new(), new())

    def append(self, new, **options):
        nsa_torch.append(self.cache, *new, TABLE, self.lengths, **options)

    def copy(self):
        other = object.__new__(Rows)
        other.lengths, other.generator = self.lengths.clone(), self.generator
        tensors = {k: x.clone() for k, x in self.cache.tensors().items()}
        other.cache = object.__new__(nsa_torch.PagedCache)
        paged.PagedArrays.__init__(other.cache, CONFIG, **tensors, contents=self.cache.contents)
        return other

    def queries(self, count):
        gates = torch.rand(count, HEADS, 3, generator=self.generator)
        return draw(self.generator, count, HEADS), gates

    def attend(self, query, gates, **options):
        return nsa_torch.paged_attention(
            query, gates, self.cache, TABLE, self.lengths, **options
        )


def pages_equal(one, other):
    for name, x in one.cache.tensors().items():
        assert x.view(torch.int16).equal(other.cache.tensors()[name].view(torch.int16)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["", "fp8"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_appends_and_attends(ran, separate, count, dtype):
    """As `append` and then `paged_attention`: pages bit for bit; the second row's token finishes
    a compressed one. Twice, the second time by what is known of the first.
    """
    rows = Rows([70, 79 - count], separate, dtype=dtype)
    for _ in range(2):
        rows.lengths += count
        new, asked = rows.tokens(2 * count), rows.queries(2 * count)
        apart = rows.copy()
        apart.append(new)
        want = apart.attend(*asked, implementation="sdpa")
        ran.clear()
        out = rows.attend(*asked, key=new[0], value=new[1])
        assert [x.name for x in ran] == ["decode"] and ran[0].spec.append
        torch.testing.assert_close(out, want, rtol=0, atol=0.03)
        pages_equal(rows, apart)
        # What is in the pages already is attended to, and nothing is written.
        torch.testing.assert_close(rows.attend(*asked), out, rtol=0, atol=0)
        assert not ran[-1].spec.append
        pages_equal(rows, apart)
    assert len(paged_attend._LAUNCHES._values) == 2


def test_rows_of_a_cache_in_fp8_say_which_ring_they_have(ran):
    """By slots, in steps that are known too; pages and means are those of `append`."""
    rows = Rows([77, 61], dtype=torch.float8_e4m3fn)
    apart = rows.copy()
    for slots in (torch.tensor([1, 0]).int(), torch.tensor([5, 63]).int(), None):
        for _ in range(2):
            rows.lengths += 1
            apart.lengths += 1
            new, asked = rows.tokens(2), rows.queries(2)
            rows.attend(*asked, key=new[0], value=new[1], slots=slots)
            apart.append(new, slots=slots, implementation="torch")
            pages_equal(rows, apart)
    assert all(x.spec.keeps for x in ran) and len(paged_attend._LAUNCHES._values) == 2
    with pytest.raises(ValueError, match=r"slots must have shape \(2,\)"):
        rows.attend(*asked, key=new[0], value=new[1], slots=torch.zeros(3).int())


def test_steps_that_are_known_are_neither_checked_nor_decided_anew(ran, monkeypatch):
    rows, checked = Rows([70, 30]), []
    see = lambda name, call: lambda *x, **y: checked.append(name) or call(*x, **y)
    for module, name in ((paged_attend, "_checked"), (paged_attend, "checked_tokens")):
        monkeypatch.setattr(module, name, see(name, getattr(module, name)))
    step = lambda **options: rows.attend(*rows.queries(2), **options)
    for times in range(4):
        rows.lengths += 1
        key, value = rows.tokens(2)
        step(key=key, value=value)
        step()
        assert len(checked) == 3, times
    # Of other strides: read as they are, once.
    key = torch.cat([key, key], -1)[..., :WIDTH]
    assert not key.is_contiguous()
    for _ in range(2):
        step(key=key, value=value)
    assert len(checked) == 5


def test_a_known_step_is_checked_where_anything_differs(ran):
    rows = Rows([70, 30])
    (query, gates), (key, value) = rows.queries(2), rows.tokens(2)
    new = {"key": key, "value": value}
    for _ in range(2):
        rows.attend(query, gates, **new)
    with pytest.raises(ValueError, match="query must have the dtype of the cache"):
        rows.attend(query.float(), gates, **new)
    with pytest.raises(ValueError, match="runs need cu_seqlens_q"):
        rows.attend(query, gates, **new, runs=[])
    with pytest.raises(ValueError, match="value must have shape"):
        rows.attend(query, gates, key=key[:1], value=value)
    with pytest.raises(ValueError, match="key and value must both be given or both be None"):
        rows.attend(query, gates, key=key)
    with pytest.raises(NotImplementedError, match="no gradient"):
        rows.attend(query.clone().requires_grad_(), gates, **new)
    with pytest.raises(NotImplementedError, match="no gradient on: use no_grad"):
        rows.attend(query, gates, key=key.clone().requires_grad_(), value=value)
    rows.attend(query, gates, **new, made_with=(("rotation", "a"),))
    with pytest.raises(ValueError, match="rotation='b'"):
        rows.attend(query, gates, **new, made_with=(("rotation", "b"),))
    with pytest.raises(ValueError, match="config must be the cache's"):
        rows.attend(query, gates, **new, config=NSAConfig())


def test_without_the_kernel_the_tokens_are_appended_first(ran, monkeypatch):
    """Where learned parameters compress them, and where another implementation attends."""
    rows = Rows([70, 63])
    rows.lengths += 1
    new, asked = rows.tokens(2), rows.queries(2)
    apart = rows.copy()
    apart.append(new)
    want = apart.attend(*asked, implementation="sdpa")
    out = rows.attend(*asked, key=new[0], value=new[1], implementation="sdpa")
    assert out.equal(want) and not ran
    pages_equal(rows, apart)
    pretend.machine(monkeypatch, mosaic_appends=False)
    rows.lengths += 1
    new = rows.tokens(2)
    rows.attend(*asked, key=new[0], value=new[1])
    assert [x.spec.append for x in ran] == [False]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    runs = nsa_torch.plan_runs([0, 1, 2], rows.lengths.tolist(), 64)
    again = rows.attend(*asked, key=new[0], value=new[1], cu_seqlens_q=starts, runs=runs)
    torch.testing.assert_close(again, rows.attend(*asked), rtol=0, atol=0)


@pytest.mark.parametrize("planned", [False, True], ids=["by the longest", "by runs"])
def test_rows_of_different_few_tokens_are_one_launch(ran, planned):
    """Each row's own stand at its end; what fills up the others is left out again."""
    rows = Rows([70, 61])
    rows.lengths += torch.tensor([1, 3], dtype=torch.int32)
    new, asked = rows.tokens(4), rows.queries(4)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    how = {"max_seqlen_q": 3}
    if planned:
        how = {"runs": nsa_torch.plan_runs([0, 1, 4], rows.lengths.tolist(), 64)}
    out = rows.attend(*asked, key=new[0], value=new[1], cu_seqlens_q=starts, **how)
    assert [(x.name, x.spec.q_len) for x in ran if x.name == "decode"] == [("decode", 3)]
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 3}
    want = rows.attend(*asked, **given, implementation="sdpa")
    torch.testing.assert_close(out, want, rtol=0, atol=0.03)
    if not planned:
        at = *asked, rows.cache, TABLE, rows.lengths, starts
        assert paged_attend.explain(*at, max_seqlen_q=3).implementation == "mosaic"
        assert paged_attend.explain(*at).implementation == "gathered"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_a_step_appends_and_attends_on_a_gpu(separate):
    """500 steps of one graph: outputs and pages are those of `append` and `paged_attention`;
    memory around the pages does not change.
    """
    config, batch, pages = NSAConfig(), 3, 20
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda").bfloat16()
    sizes = 2, 128, 128
    elements = paged.paged_layout.page_elements(*sizes, config, separate)
    memory = torch.full((2, batch * pages * elements + 4096), 7.0, device="cuda").bfloat16()
    carve = functools.partial(nsa_torch.PagedCache.carve, config=config, separate=separate)
    one, other = (carve(x[:-4096], *sizes) for x in memory)
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    lengths = torch.tensor([30, 700, 0], dtype=torch.int32, device="cuda")
    query, gates = draw(batch, 32, 128), torch.rand(batch, 32, 3, device="cuda")
    make = lambda n: (
        Branches(*(draw(n, *sizes[:2]) for _ in range(3))) if separate else draw(n, *sizes[:2])
    )
    starts = torch.tensor([0, 30, 730, 730], dtype=torch.int32, device="cuda")
    first = make(730), make(730)
    for cache in (one, other):
        nsa_torch.append(cache, *first, table, lengths, cu_seqlens_q=starts)
    new = make(batch), make(batch)
    step = lambda: nsa_torch.paged_attention(
        query, gates, one, table, lengths, key=new[0], value=new[1], implementation="mosaic"
    )
    with torch.no_grad():
        before = {k: x.clone() for k, x in one.tensors().items()}
        step()
        for name, x in before.items():
            one.tensors()[name].copy_(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = step()
        for turn in range(500):
            lengths += (lengths > 0).int()
            if turn == 100:
                lengths[2] = 1  # a row begins
            for each in new:
                for x in {id(x): x for x in Branches.each(each)}.values():
                    x.copy_(draw(*x.shape))
            query.copy_(draw(*query.shape))
            graph.replay()
            nsa_torch.append(other, *new, table, lengths)
            for kind in ("compressed_key", "compressed_value"):  # sums of another order
                mine, theirs = (getattr(x, kind) for x in (one, other))
                torch.testing.assert_close(theirs, mine, rtol=2**-7, atol=0)
                theirs.copy_(mine)
            want = nsa_torch.paged_attention(
                query, gates, other, table, lengths, implementation="mosaic"
            )
            assert torch.equal(out, want), turn
    for name, x in one.tensors().items():
        assert torch.equal(x, other.tensors()[name]), name
    assert (memory[:, -4096:] == 7).all()

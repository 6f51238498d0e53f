"""Caches of both frameworks against whole sequences: one table of histories and paths."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from nsa_torch import NSAConfig, plan_runs
from tests import pretend
from tests.caches import (
    DENSE,
    HISTORIES,
    LAZY,
    POOL,
    SMALL,
    TABLE,
    JaxDense,
    JaxPages,
    Rows,
    Sizes,
    TorchDense,
    TorchPages,
    Turn,
    bounds,
    by_fp8,
    by_separate,
    call_of,
    check,
    close,
    of_counts,
    phi,
    sized,
    tables,
)
from tests.limits import set_limits

OWN = Sizes(H=6, Hkv=1, Dv=8, separate=True)
PATHS = {"torch": TorchPages, "jax": JaxPages}
by_path = pytest.mark.parametrize("path", PATHS)
SIZES = dict.fromkeys(HISTORIES, Sizes())
SIZES["tokens"] = Sizes(config=NSAConfig(16, 16, 16, 3, 0, 0, window=3))  # l = d = l'
SIZES |= {"chunks": OWN, "draft tokens": OWN, "even rows": Sizes(H=2, config=LAZY)}


@by_fp8
@pytest.mark.parametrize("history", HISTORIES)
@by_path
def test_pages(path, history, fp8):
    sizes = dataclasses.replace(SIZES[history], fp8=fp8)
    compiled = JaxPages.attending._cache_size()
    check(PATHS[path](sizes), HISTORIES[history])
    if history == "tokens":
        assert JaxPages.attending._cache_size() - compiled <= 1, "compiled once"


DENSE_PATHS = {"torch rows": TorchDense, "jax rows": JaxDense}


@pytest.mark.parametrize("name", TABLE["kinds"])
def test_kinds_of_caches(name):
    """Learned compression is of tokens that were not rounded, whether they come in one call or in
    several; autocast changes nothing; outputs have the dtype of the cache.
    """
    sizes, row = sized(TABLE["kinds"][name])
    made = {"made_with": SMALL} if "other window" in name else {}
    path = (PATHS | DENSE_PATHS)[row["path"]](sizes, **made)
    turns, kind = (HISTORIES | DENSE)[row["history"]], row.get("phi")
    params = kind and (phi(kind, sizes.D), phi(kind, sizes.Dv))
    rows = Rows(sizes, turns[-1].end, params)
    if "later" in name:
        for x in rows.tokens.values():
            x[1][:5] = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=kind is not None):
        check(path, turns, rows, bound=row.get("bound"))


@pytest.mark.parametrize("path", [JaxPages, JaxDense])
def test_places_known_to_the_compiler(path, monkeypatch):
    """Integers of a call, and caches of rows, are constants of its program."""

    def append(cache, key, value, *at, **rest):
        return jax.jit(lambda *x: nsa_jax.append(*x, *at, **rest))(cache, key, value)

    def attend(*new_and_cache, **rest):
        *new, cache = new_and_cache
        return jax.jit(lambda *x: nsa_jax.cached_attention(*x, cache, **rest))(*new)

    monkeypatch.setattr(JaxPages, "appending", staticmethod(append))
    monkeypatch.setattr(JaxDense, "attending", staticmethod(attend))
    history = HISTORIES["fork and crop"] if path is JaxPages else DENSE["chunks and tokens"]
    check(path(Sizes()), history[:3])


@dataclasses.dataclass
class Adopted(TorchPages):
    """Pages in the memory of another manager, with what lies around them; `kinds`: of pages that
    lie one behind the other, of which keys and values are the first two; 0: memory is carved.
    """

    kinds: int = 1

    def made(self, device):
        sizes, block = self.sizes, self.sizes.config.select_block
        half, widths = getattr(torch, sizes.dtype), (sizes.D, sizes.Dv)
        dtype = torch.float8_e4m3fn if sizes.fp8 else half
        options = {"config": sizes.config, "separate": sizes.separate}
        if self.kinds == 0:
            page = (16 * (3 if sizes.separate else 1) + 4) * sizes.Hkv * sum(widths)
            self.memory = torch.full((self.pool * page + 5,), torch.nan)
            return nsa_torch.PagedCache.carve(self.memory, sizes.Hkv, *widths, **options)
        options |= {"compressed_dtype": half, "max_rows": self.rings}
        if self.kinds > 1:
            shape = self.pool, self.kinds, block, sizes.Hkv, sizes.D
            self.memory = torch.full(shape, torch.nan, dtype=dtype, device=device)
            return nsa_torch.PagedCache.view(*self.memory.unbind(1)[:2], **options)
        ones, arrays = functools.partial(torch.ones, self.pool), {}
        for kind, width in zip(("key", "value"), widths, strict=True):
            arrays[f"{kind}_pages"] = ones(block, sizes.Hkv, width).to(dtype)
            if sizes.fp8:
                arrays[f"{kind}_scale"] = ones(sizes.Hkv, block)
            else:
                slots = block // sizes.config.compress_stride
                arrays[f"compressed_{kind}"] = ones(slots, sizes.Hkv, width)
        self.memory = [*arrays.values()]
        return nsa_torch.PagedCache.view(**arrays, **options)

    def snapshot(self):
        return {name: x[:: self.kinds or 1] for name, x in super().snapshot().items()}


@by_separate
@pytest.mark.parametrize(
    "kinds, fp8", [(0, False), (1, False), (1, True), (2, False), (3, False)]
)
def test_adopted_pages_are_written_in_place(kinds, fp8, separate):
    """What lies between them, or behind whole pages, is not touched; a fork is of the caller's
    numbers of pages. Pages in fp8 bring their scales, others may bring compressed tokens.
    """
    path = Adopted(Sizes(Dv=8, separate=separate, fp8=fp8), kinds=kinds)
    check(path, HISTORIES["fork and crop"])
    key, tensors = path.cache.selected_key, path.cache.tensors().values()
    assert all(x.is_contiguous() for x in tensors) and key.float().isfinite().any()
    assert key.data_ptr() == path.memory[0].data_ptr()
    if kinds == 1:
        adopted = {x.data_ptr() for x in path.memory}
        assert adopted <= {x.data_ptr() for x in tensors} and len(adopted) == 4
    if kinds == 0:
        assert path.cache.num_pages == POOL and path.memory[-5:].isnan().all()
        assert sum(x.isfinite().sum() for x in tensors) == path.memory.isfinite().sum()
    if kinds > 1:
        assert path.memory[:, 2:].isnan().all()
    query, gates = torch.zeros(1, 4, 8), torch.zeros(1, 4, 3)
    at = torch.tensor([[POOL]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"0\.\.{POOL - 1}, got {POOL}"):
        nsa_torch.paged_attention(query, gates, path.cache, *at)


@by_path
def test_where_pages_lie_changes_no_bit(path):
    """Nor what other rows are, nor what lies in pages and entries that a row does not need."""
    sizes, other = Sizes(), Rows(Sizes(), [35, 50, 0, 0])
    turns = of_counts([34, 49, 0, 0], [1, 1, 0, 0])
    other.redraw(1, 0)
    one, two = (check(PATHS[path](sizes), turns, *x)[-1] for x in ((), (other, None, None, 1)))
    assert (one[0] == two[0]).all() and (one[1:] != two[1:]).any()


@by_fp8
@by_path
def test_nothing_is_written_without_a_page(path, fp8):
    """By an entry below 0, behind the table, of rows of length 0, nor rings of other rows and of
    slots beyond them.
    """
    sizes = Sizes(fp8=fp8)
    paged = PATHS[path](sizes, rings=3)
    turns = [Turn([0] * 4, [40, 20, 9, 16], attends=False)]
    turns += [Turn([100, 20, 9, 16], [120, 20, 9, 16], attends=False)]
    check(paged, turns, table=np.array(TABLE["lost"], np.int32))


def test_a_page_beyond_the_pool_is_none():
    pages = jnp.array([[1], [POOL + 3]])
    numbered = lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    cache = jax.tree.map(numbered, JaxPages(Sizes()).cache)
    found = jax.jit(nsa_jax.PagedCache.copy_pages)(cache, *pages)
    for one, other in zip(*map(jax.tree.leaves, (found, cache)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("most", [7, 2**31 - 1])
@by_path
def test_lengths_may_be_said_to_be_longer_than_a_table(path, most):
    """A bound of all calls' rows; a row beyond its table counts as the table's tokens."""
    paged, turn = PATHS[path](Sizes()), Turn([91, 0, 0, 0], [96, 0, 0, 0])
    check(paged, [Turn([0] * 4, [91, 0, 0, 0], attends=False), turn])
    want = paged.attend(paged.call)
    beyond = dataclasses.replace(paged.call, lengths=np.array([1000, 0, 0, 0], np.int32))
    close(paged.attend(beyond, max_seqlen_q=most), want)


@by_path
def test_tokens_of_any_size_are_rounded_to_the_nearest(path):
    """In fp8; of zeros, too. A head's token that is not finite in one element stays so."""
    sizes, turn, table = Sizes(fp8=True), Turn([0], [60], attends=False), tables([60], SMALL)
    rows, paged = Rows(sizes, [60]), PATHS[path](sizes)
    for name in ("selected_key", "selected_value"):
        x = rows.tokens[name][0]
        x *= np.float32(10.0 ** rows.rng.integers(-9, 9, (60, 2, 1)))
        x[::3, :, 5] *= 300
        x[7], x[8, 0, 3], x[9, 1, 3] = 0, np.inf, np.nan
    paged.append(call_of(rows, table, turn, [0]))
    with np.errstate(invalid="ignore"):
        found = paged.snapshot()
        for name in ("selected_key", "selected_value"):
            tokens = found[name][table[0, :4]].reshape(64, 2, -1)[:60]
            want = sizes.stored(rows.tokens[name][0])
            finite = np.isfinite(want).all(-1)
            assert (np.isfinite(tokens).all(-1) == finite).all() and (~finite).sum() == 2
            np.testing.assert_allclose(tokens[finite], want[finite], rtol=1e-6, atol=0)


# Runs of a step.


@pytest.mark.parametrize(("starts", "lengths", "page", "wanted"), TABLE["planned runs"])
def test_runs_of_a_step(starts, lengths, page, wanted):
    found = [
        [x.rows.start, x.rows.stop, x.tokens.start, x.tokens.stop]
        + [x.queries, x.columns, x.few, x.even, x.whole]
        for x in plan_runs(starts, lengths, page)
    ]
    assert found == wanted


def test_runs_change_nothing_but_what_is_gathered(monkeypatch):
    """Rows of decode and of prompts in one call, some of no token; tables are cut to each run."""
    turns = of_counts([37, 44, 0, 0, 0], [1, 1, 0, 61, 20])
    starts, lengths = bounds([1, 1, 0, 61, 20]).tolist(), turns[1].end
    for planned in (lengths, [40, 60, 0, 90, 40]):  # upper bounds will do
        path = TorchPages(Sizes())
        path.append, whole = path.append, path.attend
        runs = plan_runs(starts, planned, 16)
        gathered = pretend.watched(monkeypatch, "copied_rows", lambda *x: x[1].shape)
        path.attend = lambda call, whole=whole, runs=runs: whole(
            call, runs=runs if call.new["query"].shape[0] == 83 else None
        )
        check(path, turns)
        if planned is lengths:  # no kernels here; the prompts' pages alone
            assert gathered[1:] == [(2, 6), (2, 4)]


@pytest.mark.parametrize("counts", [[38, 38], [41, 35]])
def test_prompts_are_appended_and_read_in_one_call(counts):
    """Only prompts of one length are attended as they were given."""
    path = TorchPages(Sizes())
    (run,) = runs = plan_runs(bounds(counts).tolist(), counts, 16)
    assert run.whole and run.even == (counts[0] == counts[1])
    path.step = lambda call: path.attend(call, new=True, runs=runs)
    check(path, of_counts(counts))


def test_a_cache_in_fp8_is_of_bfloat16():
    cache = nsa_torch.PagedCache(1, 1, 8, 8, dtype=torch.float8_e4m3fn)
    assert cache.compressed_key.dtype is cache.dtype is torch.bfloat16


# On a GPU.

by_kernel = pytest.mark.parametrize("implementation", ["mosaic", "triton", "gathered"])
ON_GPU = Sizes(16, 2, 64, 64, dtype="bfloat16")


@pytest.mark.gpu
@by_fp8
@pytest.mark.parametrize("history", HISTORIES)
@by_kernel
def test_pages_on_a_gpu(implementation, history, fp8):
    sizes = dataclasses.replace(ON_GPU, fp8=fp8, separate=history == "chunks")
    path = TorchPages(sizes, "cuda", implementation, together=True)
    check(path, HISTORIES[history], bound=1e-2)


@pytest.mark.gpu
@by_kernel
def test_pages_between_which_others_lie_on_a_gpu(implementation):
    path = Adopted(ON_GPU, "cuda", implementation, together=True, kinds=2)
    check(path, HISTORIES["draft tokens"], bound=1e-2)


@pytest.mark.gpu
@by_kernel
def test_a_needle_is_found_among_64k_tokens(implementation):
    """One token that the last query looks for, beyond the window, is found in fp8 as in 16 bits."""
    tokens, draw = 65536, normal()
    config = NSAConfig(num_selected=5)  # two of them are free
    query, key, value = draw(1, 1, 64), draw(tokens, 1, 64), draw(tokens, 1, 64)
    place, pages = tokens // 3, -(-tokens // config.select_block)
    key[place] = 8 * query[0]
    at = torch.randperm(pages).int()[None].cuda(), torch.tensor([tokens]).int().cuda()
    gates = torch.tensor([0.0, 1.0, 0.0]).bfloat16().cuda().repeat(1, 16, 1)
    outs, keys = [], []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        options = {"config": config, "dtype": dtype, "device": "cuda"}
        cache = nsa_torch.PagedCache(pages, 1, 64, 64, **options)
        nsa_torch.append(cache, key, value, *at, implementation="triton")  # one order of sums
        given = query.repeat(1, 16, 1), gates, cache, *at
        outs.append(nsa_torch.paged_attention(*given, implementation=implementation)[0])
        keys.append(cache.compressed_key)
    assert torch.equal(*keys), "the blocks are the same"
    want = value[place].expand_as(outs[0])
    torch.testing.assert_close(outs[0], want, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(outs[1], want, rtol=2**-4, atol=1e-2)
    assert not torch.equal(*outs)


def normal(seed=0):
    """What draws random tensors on the GPU."""
    make = torch.Generator("cuda").manual_seed(seed)
    return lambda *shape: torch.randn(
        shape, generator=make, device="cuda", dtype=torch.bfloat16
    )


def bits(cache):
    return {name: x.view(torch.uint8).clone() for name, x in cache.tensors().items()}


@pytest.mark.gpu
@by_kernel
@pytest.mark.parametrize("kind", ["shared", "own keys", "fp8", "draft tokens"])
@torch.no_grad()
def test_one_graph_over_500_steps(implementation, kind):
    """Rows grow, end and begin again: a replay has the bits of an eager step on a cache of its own,
    both caches end alike, and pages and rings that nobody names are as before.
    """
    draw, batch, pages, around, most = normal(), 4, 40, 8, 4 if kind == "draft tokens" else 1
    options = {"max_rows": batch + 1, "separate": kind == "own keys", "device": "cuda"}
    if kind == "fp8":
        options["dtype"] = torch.float8_e4m3fn
    captured, eager = (
        nsa_torch.PagedCache(batch * pages + around, 2, 64, 64, **options) for _ in range(2)
    )
    for name, x in captured.tensors().items():  # what stands there of rows that begin so
        x.copy_(draw(*x.shape).to(x.dtype))
        eager.tensors()[name].copy_(x)
    before = bits(captured)
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    begin = torch.tensor([0, 700, 63, 500], device="cuda", dtype=torch.int32)
    lengths, counts = begin.clone(), torch.ones_like(begin)
    slots = torch.tensor([2, 0, 3, 1], device="cuda").int() if kind == "fp8" else None
    each = lambda n: nsa_torch.Branches(*(draw(n, 2, 64) for _ in range(3)))
    new = [
        each(batch * most) if kind == "own keys" else draw(batch * most, 2, 64) for _ in "kv"
    ]
    query, gates = draw(batch * most, 32, 64), draw(batch * most, 32, 3)
    starts = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    how = {"cu_seqlens_q": starts, "max_seqlen_q": 8} if most > 1 else {}
    how |= {"key": new[0], "value": new[1], "slots": slots, "implementation": implementation}
    step = lambda cache: nsa_torch.paged_attention(query, gates, cache, table, lengths, **how)
    out, graph = None, torch.cuda.CUDAGraph()
    for turn in range(500):
        counts.copy_(torch.randint(0, most + 1, (batch,)) if most > 1 else torch.ones(batch))
        lengths.copy_((begin + counts if turn else begin + 1) * (counts > 0))
        lengths[3] *= turn % 200 > 10  # padding, and again from the start
        begin.copy_(torch.where(lengths > 0, lengths, begin))
        begin[3] *= turn % 200 != 0
        starts[1:] = counts.cumsum(0)
        for x in (query, gates, *itertools.chain(*map(nsa_torch.Branches.each, new))):
            x.copy_(draw(*x.shape))
        if out is None:
            step(captured)
            step(eager)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = step(captured)
        graph.replay()
        found, want = out.clone(), step(eager)
        assert torch.equal(found, want) and found.isfinite().all(), f"step {turn}"
    mine, theirs = bits(captured), bits(eager)
    for name, x in mine.items():
        assert torch.equal(x, theirs[name]), name
        unnamed = slice(-1, None) if name.startswith("recent") else slice(-around, None)
        assert torch.equal(x[unnamed], before[name][unnamed]), name
    assert begin[1] > 1000 and not torch.equal(mine["selected_key"], before["selected_key"])


@pytest.mark.gpu
@pytest.mark.parametrize("around", [0, 2])
@by_kernel
def test_a_table_of_anything_on_a_gpu(implementation, around):
    """What lies around the pages, and pages that no entry names, are as before; an entry of no
    page reads as the nearest one. `around`: pages in the same allocation, before and behind; with
    0 a memory checker sees every access beside them.
    """
    config, pool, batch, draw = NSAConfig(), 24, 6, normal()
    make = torch.Generator("cuda").manual_seed(0)
    slots = [config.select_block] * 2 + [config.select_block // config.compress_stride] * 2
    whole = [draw(pool + 2 * around, n, 2, 64) for n in slots]
    inner = [x[around : around + pool] for x in whole]
    pair = {"compressed_key": inner[2], "compressed_value": inner[3]}
    cache = nsa_torch.PagedCache.view(*inner[:2], config=config, **pair)
    table = torch.randint(-3 * pool, 4 * pool, (batch, 20), generator=make, device="cuda")
    odd = [-(2**31), 2**31 - 1, -1, pool, 2**20, -pool]
    table[:, ::3] = torch.tensor(odd, device="cuda")[:, None]
    table[(table == 0) | (table == pool - 1)] = 3  # no entry names the first page or the last
    table[2, 9], table[5, 2] = 5, 7  # of the last tokens of two rows
    table = table.to(torch.int32)
    lengths = torch.tensor([0, 1, 640, 1280, 2**31 - 1, 130], device="cuda", dtype=torch.int32)
    before = [x.clone() for x in whole]
    named = torch.zeros(pool + 2 * around, dtype=torch.bool, device="cuda")
    named[table[(table >= 0) & (table < pool)].long() + around] = True
    for tokens in (1, 4):
        query, gates = draw(batch * tokens, 32, 64), draw(batch * tokens, 32, 3)
        new = draw(batch * tokens, 2, 64), draw(batch * tokens, 2, 64)
        nsa_torch.append(cache, *new, table, lengths)
        attend = functools.partial(nsa_torch.paged_attention, implementation=implementation)
        tables = table, table.clamp(0, pool - 1)
        outs = [attend(query, gates, cache, entries, lengths) for entries in tables]
        assert torch.equal(*outs) and outs[0].isfinite().all()
        for x, y in zip(whole, before, strict=True):
            assert torch.equal(x[~named], y[~named])
    assert not torch.equal(whole[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("lengths", [[4096 + 70], [3000, 700]], ids=["one row", "two"])
@torch.no_grad()
def test_what_is_not_copied_is_not_read(implementation, lengths, monkeypatch):
    """A chunk's copies of the sliding branch are written near its window alone: NaN in the rest of
    the memory changes no bit.
    """
    count, rows, draw = 300, len(lengths), normal()
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = nsa_torch.PagedCache(80, 2, 64, 64, separate=True, **options)
    for x in cache.tensors().values():
        x.normal_()
    table = torch.randperm(80, device="cuda").int()[:66].repeat(rows, 1)
    starts = [count * i for i in range(rows + 1)]
    at = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, starts)]
    runs = plan_runs(starts, lengths, 64)
    assert [run.even for run in runs] == [True]
    poison = torch.full((1 << 28,), torch.nan, **options)
    del poison
    given = draw(count * rows, 32, 64), draw(count * rows, 32, 3), cache, table, *at
    attend = functools.partial(
        nsa_torch.paged_attention, *given, runs=runs, implementation=implementation
    )
    found = attend()
    set_limits(monkeypatch, reading_tiles=())  # all is written
    assert found.isfinite().all() and torch.equal(found, attend())

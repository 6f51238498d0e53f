"""The paged cache in both frameworks: pages in any order, rows that grow, share, fork and end."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.judge.parity import FLOAT32_MAX
from nsa_core import paged_layout, validate_paged
from nsa_core.config import NSAConfig
from nsa_core.paged_runs import GATHERED_KEYS, plan_runs
from nsa_core.types import Branches
from nsa_torch import gathered_rows, paged_attend
from tests.paged_rows import SMALL, Rows, Sizes, bounds, tables
from tests.test_cache import phi

POOL, WIDTH = 24, 6
LAZY = NSAConfig(12, 4, 12, num_selected=3, num_initial=0, num_local=1, window=0)


class Torch:
    """A cache and its calls in NumPy arrays; unwritten entries are NaN."""

    def __init__(self, sizes: Sizes, pool: int = POOL):
        self.cache = nsa_torch.PagedCache(
            *(pool, sizes.Hkv, sizes.D, sizes.Dv),
            config=sizes.config,
            dtype=torch.float32,
            separate=sizes.separate,
        )
        for x in self.cache.tensors().values():
            x.fill_(torch.nan)

    array = staticmethod(lambda x: torch.from_numpy(np.array(x)))

    def append(self, key, value, table, lengths, starts=None, params=None):
        at = self.array(table), self.array(lengths)
        starts = None if starts is None else self.array(starts)
        nsa_torch.append(self.cache, key, value, *at, cu_seqlens_q=starts, params=params)

    def attend(self, query, gates, table, lengths, starts=None, **options):
        at = self.array(table), self.array(lengths)
        starts = None if starts is None else self.array(starts)
        return nsa_torch.paged_attention(
            query, gates, self.cache, *at, starts, **options
        ).numpy()

    def copy_pages(self, source, target):
        self.cache.copy_pages(self.array(source), self.array(target))

    def snapshot(self):
        return {name: x.clone().numpy() for name, x in self.cache.tensors().items()}


class Jax:
    """The same; calls are compiled, for few numbers of tokens: the rest is in no row."""

    attending = staticmethod(
        jax.jit(nsa_jax.paged_attention, static_argnames=("max_seqlen_q", "implementation"))
    )
    appending = staticmethod(jax.jit(nsa_jax.append, donate_argnums=0))

    def __init__(self, sizes: Sizes, pool: int = POOL):
        cache = nsa_jax.PagedCache(
            *(pool, sizes.Hkv, sizes.D, sizes.Dv),
            config=sizes.config,
            dtype=jnp.float32,
            separate=sizes.separate,
        )
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)

    array = staticmethod(jnp.asarray)

    def append(self, key, value, table, lengths, starts=None, params=None):
        if starts is not None:
            key, value = (jax.tree.map(longer, x) for x in (key, value))
        self.cache = self.appending(
            self.cache, key, value, table, lengths, cu_seqlens_q=starts, params=params
        )

    def attend(self, query, gates, table, lengths, starts=None, **options):
        count = len(query)
        if starts is not None:
            query, gates = longer(query), longer(gates)
        out = self.attending(query, gates, self.cache, table, lengths, starts, **options)
        assert (out[count:] == 0).all()
        return np.asarray(out)[:count]

    def copy_pages(self, source, target):
        self.cache = self.cache.copy_pages(np.asarray(source), np.asarray(target))

    def snapshot(self):
        names = paged_layout.ARRAYS
        fields = {name: getattr(self.cache, name) for name in names}
        return {name: np.array(x) for name, x in fields.items() if x is not None}


def longer(x):
    """`x` with NaN behind it, so that there are 8 tokens or 96."""
    size = 8 if len(x) <= 8 else 96
    return np.concatenate([x, np.full((size - len(x), *x.shape[1:]), np.nan, x.dtype)])


FRAMEWORKS = pytest.mark.parametrize("framework", [Torch, Jax], ids=["torch", "jax"])


def step(paged, rows: Rows, table, begin, end, uniform=False, **options):
    """Appends the tokens `begin .. end - 1` of each row and attends from them; rows that have
    none are padding.
    """
    counts = [last - first for first, last in zip(begin, end, strict=True)]
    lengths = np.array([n if c else 0 for n, c in zip(end, counts, strict=True)], np.int32)
    starts = None if uniform else bounds(counts)
    cut = functools.partial(rows.cut, begin=begin, end=end, as_array=paged.array)
    paged.append(cut("key"), cut("value"), table, lengths, starts)
    return paged.attend(cut("query"), cut("gates"), table, lengths, starts, **options)


def close(found, want, atol=FLOAT32_MAX):
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=0, atol=atol)


@FRAMEWORKS
@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(H=6, Hkv=1, Dv=8, separate=True), Sizes(H=2, config=LAZY)],
    ids=["shared", "separate", "no window"],
)
def test_prompts_chunks_and_tokens_equal_whole_sequences(framework, sizes):
    """Rows of different lengths, prefill and decode in one call, over every border."""
    last = [61, 40, 0, 17]
    rows, paged = Rows(sizes, last), framework(sizes)
    table = tables(last, sizes.config, POOL, WIDTH)
    at = [0, 0, 0, 0]
    for counts in ([30, 1, 0, 8], [1, 15, 0, 1], [17, 8, 0, 0], [13, 16, 0, 8]):
        end = [a + c for a, c in zip(at, counts, strict=True)]
        found = step(paged, rows, table, at, end, max_seqlen_q=30)
        close(found, rows.expected(at, end))
        at = end
    assert at == last


@FRAMEWORKS
def test_tokens_one_by_one(framework):
    """Each length up to where every border was crossed: blocks, windows, pages. Compiled once."""
    sizes = Sizes()
    rows, paged = Rows(sizes, [38, 45]), framework(sizes)
    table = tables([38, 45], SMALL, POOL, WIDTH)
    compiled = Jax.attending._cache_size()
    for n in range(38):
        # The second row begins later, and three at a time.
        if n < 30:
            begin, end = [n, 0], [n + 1, 0]
            found = step(paged, rows, table, begin, end)
        else:
            m = (n - 30) * 2
            begin, end = [n, m], [n + 1, m + 2]
            found = step(paged, rows, table, begin, end)
        close(found, rows.expected(begin, end))
    if framework is Jax:
        assert Jax.attending._cache_size() - compiled <= 1


@FRAMEWORKS
def test_uniform_rows_need_no_bounds(framework):
    sizes = Sizes()
    rows, paged = Rows(sizes, [20, 33]), framework(sizes)
    table = tables([20, 33], SMALL, POOL, WIDTH)
    step(paged, rows, table, [0, 0], [16, 29])
    for begin in ([16, 29], [18, 31]):
        end = [x + 2 for x in begin]
        close(step(paged, rows, table, begin, end, uniform=True), rows.expected(begin, end))


@FRAMEWORKS
def test_rows_of_few_tokens_are_one_call(framework):
    """1 to 8 each and none, a row shorter than the longest of them, padding behind; guesses are
    taken back and written over.
    """
    sizes, last = Sizes(separate=True), [45, 40, 3, 20]
    rows, paged = Rows(sizes, last), framework(sizes)
    table = tables(last, SMALL, POOL, WIDTH)
    at = [37, 30, 0, 20]
    step(paged, rows, table, [0] * 4, at)
    for counts, taken in (([1, 8, 3, 0], [1, 2, 3, 0]), ([7, 8, 0, 0], [7, 8, 0, 0])):
        end = [a + c for a, c in zip(at, counts, strict=True)]
        found = step(paged, rows, table, at, end, max_seqlen_q=8)
        close(found, rows.expected(at, end))
        at = [a + c for a, c in zip(at, taken, strict=True)]


@FRAMEWORKS
@pytest.mark.parametrize("bound", [7, 100, 2**31 - 1])
def test_the_longest_row_may_be_said_to_be_longer_than_a_table(framework, bound):
    """A bound of all calls, whatever the room of this one's rows; of few queries too."""
    config = NSAConfig(4, 4, 4, num_selected=3, num_initial=1, num_local=1, window=5)
    sizes = Sizes(config=config)
    rows, paged = Rows(sizes, [4, 3]), framework(sizes)
    table = tables([4, 3], config, POOL, 1)
    found = step(paged, rows, table, [0, 0], [4, 3], max_seqlen_q=bound)
    close(found, rows.expected([0, 0], [4, 3]))


def test_float64_is_not_rounded():
    """By gates in float32, say."""
    generator = torch.Generator().manual_seed(0)
    options = dict(generator=generator, dtype=torch.float64)
    heads = [(4, 8), (2, 8), (2, 6), (4, 3)]
    query, key, value, gates = (torch.randn(30, *x, **options) for x in heads)
    cache = nsa_torch.PagedCache(2, 2, 8, 6, config=SMALL, dtype=torch.float64)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([30]).int()
    nsa_torch.append(cache, key, value, table, lengths)
    whole = nsa_torch.attention(*(x[None] for x in (query, key, value, gates)), config=SMALL)[0]
    for given in (gates, Branches(*gates.unbind(-1))):
        found = nsa_torch.paged_attention(query, given, cache, table, lengths)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)


@FRAMEWORKS
def test_where_pages_lie_changes_no_bit(framework):
    """Nor what other rows are, nor what lies in pages and entries that a row does not need."""
    sizes, ends = Sizes(), [35, 50]
    rows, found = Rows(sizes, ends), []
    for seed in (0, 1):
        paged, table = framework(sizes), tables(ends, SMALL, POOL, WIDTH, seed)
        other = Rows(sizes, ends, seed=seed + 5)
        for name in ("query", "key", "value", "gates"):
            mixed = getattr(rows, name)
            mine = [mixed] if name in ("query", "gates") else mixed
            theirs = getattr(other, name)
            theirs = [theirs] if name in ("query", "gates") else theirs
            for x, y in zip(mine, theirs, strict=True):
                x[1] = y[1]
        step(paged, rows, table, [0, 0], [34, 49])
        found.append(step(paged, rows, table, [34, 49], ends)[0])
    assert (found[0] == found[1]).all()


@FRAMEWORKS
def test_shared_prefix_fork_and_crop(framework):
    """Rows share pages by their tables; a fork within a page copies it; a crop is a shorter
    length. Each equals a sequence of its own.
    """
    sizes = Sizes()
    rows = Rows(sizes, [60, 60])
    for name in ("key", "value"):
        for x in getattr(rows, name):
            x[1][:37] = x[0][:37]
    paged, table = framework(sizes), tables([64, 0], SMALL, POOL, WIDTH)
    step(paged, rows, table, [0, 0], [45, 0])
    free = sorted(set(range(POOL)) - set(table[0, :4]))
    table[1, :2] = table[0, :2]  # two whole pages
    table[1, 2:4] = free[:2]
    paged.copy_pages([table[0, 2]], [free[0]])  # tokens 32 .. 36, and more that are cropped
    begin, end = [45, 37], [52, 60]
    close(step(paged, rows, table, begin, end), rows.expected(begin, end))
    # The first row goes back to 40 tokens and on with others.
    again = Rows(sizes, [60, 60], seed=9)
    for name in ("key", "value"):
        for x, y in zip(getattr(again, name), getattr(rows, name), strict=True):
            x[0][:40], x[1][:] = y[0][:40], y[1]
    begin, end = [40, 59], [55, 60]
    close(step(paged, again, table, begin, end), again.expected(begin, end))


@FRAMEWORKS
@pytest.mark.parametrize("kind", ["pool", "mlp", "rope"])
def test_learned_compression(framework, kind, rng):
    sizes = Sizes()
    rows, paged = Rows(sizes, [40]), framework(sizes)
    params = phi(kind, rng, sizes.D), phi(kind, rng, sizes.Dv)
    if framework is Torch:
        params = tuple(type(x)(*(torch.from_numpy(np.array(y)) for y in x)) for x in params)
    table, at = tables([40], SMALL, POOL, WIDTH), 0
    for n in (13, 14, 40):
        cut = functools.partial(rows.cut, begin=[at], end=[n], as_array=paged.array)
        lengths, starts = np.array([n], np.int32), bounds([n - at])
        paged.append(cut("key"), cut("value"), table, lengths, starts, params)
        at = n
    module = nsa_torch if framework is Torch else nsa_jax
    pages = paged.snapshot()
    for name, one in zip(("key", "value"), params, strict=True):
        whole = paged.array(getattr(rows, name)[0][0][None])
        want = np.asarray(module.compress(whole, one, config=SMALL))[0]
        slots = pages[f"compressed_{name}"][table[0, :3]].reshape(12, *want.shape[1:])
        close(slots[1 : 1 + len(want)], want, atol=1e-6)


@FRAMEWORKS
def test_nothing_is_written_without_a_page(framework):
    """Behind the table, by an entry below 0, of rows of length 0: the pool is as before."""
    sizes = Sizes()
    rows, paged = Rows(sizes, [64]), framework(sizes)
    table = np.array([[-1, 3, -1, 5], [POOL, -1, -1, -1]], np.int32)
    cut = functools.partial(rows.cut, begin=[0], end=[64], as_array=paged.array)
    starts, before = np.array([0, 64, 64], np.int32), paged.snapshot()
    paged.append(cut("key"), cut("value"), table, np.array([64, 0], np.int32), starts)
    for name, x in paged.snapshot().items():
        assert (np.isnan(x).all(axis=(1, 2, 3)) == ~np.isin(np.arange(POOL), [3, 5])).all(), (
            name
        )
    before = paged.snapshot()
    for lengths in ([0, 0], [200, 0]):  # padding; tokens behind the table
        lengths = np.array(lengths, np.int32)
        paged.append(cut("key"), cut("value"), table, lengths, starts)
        assert all(np.array_equal(x, before[k], True) for k, x in paged.snapshot().items())
    # All that is left of a row beyond its table counts as the table's 64 tokens.
    query, gates = cut("query")[:1], cut("gates")[:1]
    table = tables([64], SMALL, POOL, 4)
    paged.append(cut("key"), cut("value"), table, np.array([64], np.int32))
    beyond, full = (
        paged.attend(query, gates, table, np.array([n], np.int32)) for n in (1000, 64)
    )
    assert (beyond == full).all() and np.isfinite(full).all()


def test_adopted_pages_are_written_in_place():
    """Pages of another manager; compressed ones are made, or adopted too."""
    sizes = Sizes()
    key, value = (
        torch.full((POOL, 16, 2, 8), torch.nan),
        torch.full((POOL, 16, 2, 6), torch.nan),
    )
    paged = Torch(sizes)
    paged.cache = nsa_torch.PagedCache.view(key, value, config=SMALL)
    rows, table = Rows(sizes, [30]), tables([30], SMALL, POOL, WIDTH)
    close(step(paged, rows, table, [0], [30]), rows.expected([0], [30]))
    assert (key[table[0, 1], :14] == torch.from_numpy(rows.key[0][0][16:])).all()
    compressed = paged.cache.compressed_key, paged.cache.compressed_value
    again = nsa_torch.PagedCache.view(
        key,
        value,
        config=SMALL,
        compressed_key=compressed[0],
        compressed_value=compressed[1],
    )
    assert again.compressed_key is compressed[0]
    own = nsa_torch.PagedCache.view(key, value, config=SMALL, separate=True)
    assert own.separate and own.raw_value.shape == value.shape and own.selected_key is key
    with pytest.raises(ValueError, match="pages of select_block=16 tokens, got 8"):
        nsa_torch.PagedCache.view(key[:, :8], value[:, :8], config=SMALL)
    with pytest.raises(ValueError, match="must both be given"):
        nsa_torch.PagedCache.view(key, value, config=SMALL, compressed_key=compressed[0])
    with pytest.raises(ValueError, match=r"selected_value must have shape \(24, 16, 2, 6\)"):
        nsa_torch.PagedCache.view(key, value[:4], config=SMALL)


def interleaved(kinds: int, separate=False):
    """A cache on the first two of `kinds` pages that lie one behind the other, in memory of NaN."""
    memory = torch.full((POOL, kinds, 16, 2, 8), torch.nan)
    pages = memory[:, 0], memory[:, 1]
    return memory, nsa_torch.PagedCache.view(*pages, config=SMALL, separate=separate)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kinds", [2, 3])
def test_pages_between_which_others_lie(kinds, separate):
    """Kernels take the tensors as they are; what is between is not touched; forks and bounds are of
    the caller's numbers.
    """
    sizes = Sizes(Dv=8, separate=separate)
    rows, table = Rows(sizes, [30, 7]), tables([30, 7], SMALL, POOL, WIDTH)
    paged = Torch(sizes)
    memory, paged.cache = interleaved(kinds, separate)
    assert all(x.is_contiguous() for x in paged.cache.tensors().values())
    assert paged.cache.selected_key.data_ptr() == memory.data_ptr()
    close(step(paged, rows, table, [0, 0], [30, 7]), rows.expected([0, 0], [30, 7]))
    close(step(paged, rows, table, [29, 6], [30, 7], True), rows.expected([29, 6], [30, 7]))
    assert (memory[table[0, 1], 0, :14] == torch.from_numpy(rows.key[separate][0][16:])).all()
    written = torch.zeros(POOL, dtype=torch.bool)
    written[[*table[0, :2], table[1, 0]]] = True
    assert memory[~written].isnan().all() and memory[:, 2:].isnan().all()
    free = int((~written).nonzero()[0])
    paged.cache.copy_pages(torch.tensor([table[0, 0]]), torch.tensor([free]))
    moved = table.copy()
    moved[0, 0] = free
    close(step(paged, rows, moved, [29, 6], [30, 7], True), rows.expected([29, 6], [30, 7]))
    moved[0, 1] = POOL
    with pytest.raises(ValueError, match=rf"page_table\[0, 1\] .* 0..{POOL - 1}, got {POOL}"):
        step(paged, rows, moved, [29, 6], [30, 7], True)


@pytest.mark.parametrize("separate", [False, True])
def test_memory_of_another_manager_is_carved(separate):
    """One piece of it, of whole pages; what lies behind them stays."""
    sizes = Sizes(separate=separate)
    page = paged_layout.page_elements(2, 8, 6, SMALL, separate)
    assert page == (16 * (3 if separate else 1) + 4) * 2 * (8 + 6)
    memory = torch.full((POOL * page + 5,), torch.nan)
    carve = functools.partial(nsa_torch.PagedCache.carve, config=SMALL, separate=separate)
    paged = Torch(sizes)
    paged.cache = carve(memory, 2, 8, 6)
    assert paged.cache.num_pages == POOL and paged.cache.separate == separate
    rows, table = Rows(sizes, [30]), tables([30], SMALL, POOL, WIDTH)
    close(step(paged, rows, table, [0], [30]), rows.expected([0], [30]))
    kept = paged.cache.tensors().values()
    assert sum(x.isfinite().sum() for x in kept) == memory.isfinite().sum() > 0
    assert memory[-5:].isnan().all()
    with pytest.raises(ValueError, match=f"must have {page} elements, those of a page, got 3"):
        carve(memory[:3], 2, 8, 6)
    with pytest.raises(ValueError, match="memory must be contiguous, got strides"):
        carve(memory[::2], 2, 8, 6)


def test_runs_of_a_step():
    """Decode rows, rows of nothing, guesses, prompts: which are attended together."""
    lengths = [30, 17, 0, 40, 8, 25, 61]
    counts = [1, 1, 0, 3, 3, 25, 30]
    found = plan_runs(bounds(counts).tolist(), lengths, 16)
    facts = "rows", "tokens", "queries", "columns", "few", "even", "whole"
    assert [tuple(getattr(x, name) for name in facts) for x in found] == [
        (slice(0, 2), slice(0, 2), 1, 2, True, True, False),
        (slice(3, 5), slice(2, 8), 3, 3, True, True, False),
        (slice(5, 6), slice(8, 33), 25, 2, False, True, True),
        (slice(6, 7), slice(33, 63), 30, 4, False, True, False),
    ]
    # A prompt of few tokens beside guesses, whose rows have tokens before them.
    assert [x.whole for x in plan_runs([0, 2, 4], [2, 50], 16)] == [False]
    # Guesses of different numbers are one run, of which 64 queries or a half may be padding.
    guesses = plan_runs(bounds([1, 4, 2, 8, 9]).tolist(), [40] * 5, 16)
    assert [(x.rows, x.queries, x.even) for x in guesses] == [
        (slice(0, 4), 8, False),
        (slice(4, 5), 9, True),
    ]
    many = plan_runs(bounds([1] * 100 + [8] * 100).tolist(), [40] * 200, 16)
    assert [(x.rows, x.queries) for x in many] == [(slice(0, 100), 1), (slice(100, 200), 8)]
    much = plan_runs([0, 9, 18, 27], [65536, 65536, 65536], 64)  # 2^17 keys are copied at most
    assert [x.rows for x in much] == [slice(0, 2), slice(2, 3)]
    padded = plan_runs([0, 1000, 1500, 2000], [1000, 500, 500], 64)  # nor 500 queries padded
    assert [x.rows for x in padded] == [slice(0, 2), slice(2, 3)]
    assert plan_runs([0, 0], [0], 16) == []
    assert plan_runs([0, 9, 18], [0, 9], 16) == plan_runs([9, 9, 18], [0, 9], 16)  # no tokens
    with pytest.raises(ValueError, match="count the new tokens, got 1 with 2 new at row 1"):
        plan_runs([0, 1, 3], [1, 1], 16)
    with pytest.raises(ValueError, match="starts must have 3 entries, one more than lengths"):
        plan_runs([0, 1], [1, 1], 16)
    with pytest.raises(ValueError, match="starts must not descend, got 5, 3 at row 1"):
        plan_runs([0, 5, 3], [9, 9], 16)
    with pytest.raises(ValueError, match="page_size must be an int >= 1, got 0"):
        plan_runs([0, 1], [1], 0)


def test_a_prompt_does_not_gather_the_rows_beside_it():
    """71 rows that decode and one prompt of 512 tokens, at 131072 tokens each, with 4 heads of 128:
    39 GB of keys and values of two branches, were all rows copied; and whatever a step is, no run
    copies more than one row of the longest, or 2^17 keys.
    """
    rows, length, page = 72, 131072, 64
    copied = lambda run: 0 if run.few else (run.rows.stop - run.rows.start) * run.columns * page
    runs = plan_runs(bounds([1] * 71 + [512]).tolist(), [length] * rows, page)
    key = 4 * (128 + 128) * 2 * 2
    assert rows * length * key > 38e9
    assert sum(map(copied, runs)) * key == length * key < 0.6e9
    rng = np.random.default_rng(0)
    for _ in range(100):
        counts = rng.choice([0, 1, 1, 4, 30, 900], size=20)
        lengths = (counts + rng.integers(0, 1 << 16, 20)) * (counts > 0)
        runs = plan_runs(bounds(counts).tolist(), lengths.tolist(), page)
        assert sum(run.tokens.stop - run.tokens.start for run in runs) == counts.sum()
        assert max(map(copied, runs)) <= max(GATHERED_KEYS, lengths.max() + page)


def test_runs_change_nothing_but_what_is_gathered(monkeypatch):
    """Rows of decode and of prompts in one call, some of no token; tables are cut to each run."""
    sizes = Sizes()
    last = [38, 45, 1, 61, 20]
    rows, paged = Rows(sizes, last), Torch(sizes)
    table = tables(last, SMALL, POOL, WIDTH)
    begin, end = [37, 44, 0, 0, 0], [38, 45, 0, 61, 20]
    step(paged, rows, table, [0] * 5, [37, 44, 0, 0, 0])
    gathered, side_by_side = [], paged_attend.side_by_side

    def seen(cache, page_table, *rest):
        gathered.append(tuple(page_table.shape))
        return side_by_side(cache, page_table, *rest)

    monkeypatch.setattr(paged_attend, "side_by_side", seen)
    runs = plan_runs(bounds([1, 1, 0, 61, 20]).tolist(), end, 16)
    found = step(paged, rows, table, begin, end, runs=runs)
    close(found, rows.expected(begin, end))
    assert gathered == [(2, WIDTH), (2, 4)]  # no kernels here; the prompts' pages alone
    most = plan_runs(bounds([1, 1, 0, 61, 20]).tolist(), [40, 60, 0, 90, 40], 16)
    close(step(paged, rows, table, begin, end, runs=most), rows.expected(begin, end))
    with pytest.raises(ValueError, match="runs need cu_seqlens_q"):
        step(paged, rows, table, [37, 44, 0, 60, 19], [38, 45, 1, 61, 20], True, runs=runs)


PLANNED = [38, 45, 0, 61, 20]


@pytest.mark.parametrize(
    ("counts", "last", "planned", "message"),
    [
        (
            [1, 2, 0, 60, 20],
            [],
            [],
            r"runs\[0\] must have tokens 0 to 3 and at most 2 of a row",
        ),
        (
            [1, 1, 1, 60, 20],
            [],
            [],
            r"runs\[1\] must have tokens 3 to 83 and at most 60 of a row",
        ),
        (
            [1, 1, 0, 60, 21],
            [],
            [],
            r"runs\[1\] must have tokens 2 to 83 and at most 60 of a row",
        ),
        (
            [1, 1, 0, 61, 2],
            [],
            [],
            r"runs\[1\]\.tokens must lie within 2 and 65, .* got 2 to 83",
        ),
        ([1, 1, 0, 61], [], [], r"runs\[1\]\.rows must lie within 2 and 4, .* got 3 to 5"),
        (
            [1, 1, 0, 61, 20],
            [],
            [],
            r"runs\[1\] must have columns=4 .* whole=False, as lengths",
        ),
        (
            [1, 1, 0, 61, 20],
            [],
            [1, 1, 0, 61, 30],
            r"runs\[0\] must have .* whole=False, .* and whole=True",
        ),
        (
            [1, 1, 0, 61, 20],
            [38, 45, 1, 90, 20],
            [],
            r"runs\[1\] must have columns=6 at least .* got columns=4",
        ),
        (
            [1, 1, 0, 61, 20],
            [],
            [38, 45, 0, 0, 30],
            "runs must have each row with new tokens, .* row 3",
        ),
        (
            [1, 1, 0, 61, 20],
            [],
            [38, 45, 0, 61, 0],
            "runs must have each row with new tokens, .* row 4",
        ),
    ],
)
def test_runs_of_another_call_are_refused(counts, last, planned, message):
    """Before a token is appended; more rows or tokens than there are also where the host reads
    nothing.
    """
    sizes, last = Sizes(), last or [38, 45, 1, 61, 30][: len(counts)]
    rows, paged = Rows(sizes, last), Torch(sizes)
    table = tables(last, SMALL, POOL, WIDTH)
    runs = plan_runs(bounds([1, 1, 0, 61, 20]).tolist(), planned or PLANNED, 16)
    begin = [end - count for end, count in zip(last, counts, strict=True)]
    cut = functools.partial(rows.cut, begin=begin, end=last, as_array=paged.array)
    lengths = np.array(last, np.int32) * (np.array(counts) > 0)
    new = {"key": cut("key"), "value": cut("value"), "runs": runs}
    with pytest.raises(ValueError, match=message):
        paged.attend(cut("query"), cut("gates"), table, lengths, bounds(counts), **new)
    assert all(x.isnan().all() for x in paged.cache.tensors().values())
    backwards = runs[::-1]
    with pytest.raises(ValueError, match=r"runs\[1\]\.rows must lie within"):
        validate_paged.runs(backwards, np.zeros((5, 4)), 83, 16, None, None)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("counts", [[40, 0], [33, 33]], ids=["one row", "two alike"])
def test_rows_that_begin_are_not_copied_from_pages(separate, counts, monkeypatch):
    """All of their tokens are those of the call; the bits are those of copied ones."""
    sizes = Sizes(separate=separate)
    rows, table = Rows(sizes, counts), tables(counts, SMALL, POOL, WIDTH)
    lengths, starts = (
        torch.from_numpy(np.array(x, np.int32)) for x in (counts, bounds(counts))
    )
    cut = functools.partial(rows.cut, begin=[0, 0], end=counts, as_array=torch.from_numpy)
    new, raw = {"key": cut("key"), "value": cut("value")}, []
    copy = gathered_rows._copy

    def seen(*call):
        pair = copy(*call)
        raw.append(pair[0].shape[1] > counts[0] // 2)
        return pair

    monkeypatch.setattr(gathered_rows, "_copy", seen)
    found = []
    for runs in (plan_runs(starts.tolist(), counts, 16), None):
        paged = Torch(sizes)
        at = paged.cache, torch.from_numpy(table), lengths, starts
        options = {"runs": runs, "max_seqlen_q": max(counts)}
        raw.clear()
        found.append(
            nsa_torch.paged_attention(cut("query"), cut("gates"), *at, **new, **options)
        )
        assert any(raw) == (runs is None)
    close(found[0].numpy(), rows.expected([0, 0], counts))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def _mutant_slot(monkeypatch):
    monkeypatch.setattr(paged_layout, "first_slot", lambda config: 0)


def _mutant_finish(monkeypatch):
    whole = paged_layout.finished

    def late(ops, tokens, batch, config):
        found = whole(ops, tokens, batch, config)
        return found._replace(there=found.there & (tokens.position[found.token] > 12))

    monkeypatch.setattr(paged_layout, "finished", late)


def _mutant_position(monkeypatch):
    whole = paged_layout.tokens_of

    def shifted(*arguments):
        found = whole(*arguments)
        return found._replace(position=found.position - (found.position > 20) * 1)

    monkeypatch.setattr(paged_layout, "tokens_of", shifted)


@pytest.mark.parametrize("mutant", [_mutant_slot, _mutant_finish, _mutant_position])
def test_mutants_are_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_prompts_chunks_and_tokens_equal_whole_sequences(Torch, Sizes())


def arguments(**changes):
    """Those of `append` and `paged_attention` in torch, with some of them changed."""
    sizes = Sizes()
    zeros = torch.zeros
    found = {
        "cache": nsa_torch.PagedCache(4, 2, 8, 6, config=SMALL, dtype=torch.float32),
        "key": zeros(2, 2, 8),
        "value": zeros(2, 2, 6),
        "query": zeros(2, sizes.H, 8),
        "gates": zeros(2, sizes.H, 3),
        "page_table": zeros(2, 3, dtype=torch.int32),
        "lengths": zeros(2, dtype=torch.int32),
    }
    return found | changes


APPEND = ("cache", "key", "value", "page_table", "lengths")
ATTEND = ("query", "gates", "cache", "page_table", "lengths")
BAD = [
    (APPEND, {"key": torch.zeros(2, 3, 8)}, r"key must have shape \(2, 2, 8\)"),
    (APPEND, {"value": torch.zeros(3, 2, 6)}, r"value must have shape \(2, 2, 6\)"),
    (APPEND, {"key": torch.zeros(2, 2, 8).half()}, "must have the dtype of the cache, float32"),
    (APPEND, {"key": torch.zeros(0, 2, 8), "value": torch.zeros(0, 2, 6)}, "tokens must be"),
    (APPEND, {"key": Branches(*torch.zeros(3, 2, 2, 8))}, "where the cache is not separate"),
    (APPEND, {"key": torch.zeros(3, 2, 8), "value": torch.zeros(3, 2, 6)}, "multiple of 2"),
    (APPEND, {"page_table": torch.zeros(2, 3)}, "page_table must have dtype"),
    (APPEND, {"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must have shape \(2,\)"),
    (ATTEND, {"query": torch.zeros(2, 3, 8)}, "multiple of the cache's heads, got 3 and 2"),
    (ATTEND, {"query": torch.zeros(2, 4, 6)}, r"query must have shape \(2, 4, 8\)"),
    (ATTEND, {"gates": torch.zeros(2, 4, 2)}, r"gates must have shape \(2, 4, 3\)"),
    (ATTEND, {"query": torch.zeros(2, 4, 8).half()}, "query must have the dtype of the cache"),
    (ATTEND, {"scale": -1.0}, "scale must be a positive number"),
    (ATTEND, {"config": NSAConfig()}, "config must be the cache's"),
    (ATTEND, {"implementation": "fast"}, "implementation must be one of"),
    (ATTEND, {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, r"have shape \(3,\)"),
]


@pytest.mark.parametrize(("names", "changes", "message"), BAD)
def test_bad_input_is_named(names, changes, message):
    function = nsa_torch.append if names is APPEND else nsa_torch.paged_attention
    found = arguments(**changes)
    rest = {name: x for name, x in changes.items() if name not in names}
    with pytest.raises(ValueError, match=message):
        function(*(found[name] for name in names), **rest)


@pytest.mark.parametrize("api", [nsa_torch, nsa_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("entry", [4, 2**31 - 1, -1])
def test_a_page_that_does_not_exist(api, entry):
    """Of a row's own tokens; what it does not need may be anything. Below 0 there is none to write
    to, and none to read.
    """
    found = arguments(
        page_table=torch.tensor([[1, 9, -7], [3, entry, 9]], dtype=torch.int32),
        lengths=torch.tensor([16, 17], dtype=torch.int32),
    )
    if api is nsa_jax:
        cache = nsa_jax.PagedCache(4, 2, 8, 6, config=SMALL, dtype=jnp.float32)
        found = {k: cache if k == "cache" else jnp.asarray(x) for k, x in found.items()}
    given = {names: [found[name] for name in names] for names in (APPEND, ATTEND)}
    message = rf"page_table\[1, 1\] must be a page of the cache, 0..3, got {entry}"
    with pytest.raises(ValueError, match=message):
        api.paged_attention(*given[ATTEND])
    if entry < 0:
        api.append(*given[APPEND])
        return
    with pytest.raises(ValueError, match=message):
        api.append(*given[APPEND])


def test_more_queries_than_a_table_has_tokens():
    found = arguments(query=torch.zeros(98, 4, 8), gates=torch.zeros(98, 4, 3))
    with pytest.raises(ValueError, match="must not have more queries than tokens, 48"):
        nsa_torch.paged_attention(*(found[name] for name in ATTEND))


def test_gradients_and_kernels_are_refused():
    found = arguments(key=torch.zeros(2, 2, 8, requires_grad=True))
    with pytest.raises(NotImplementedError, match="no gradient"):
        nsa_torch.append(*(found[name] for name in APPEND))
    found = arguments(query=torch.zeros(2, 4, 8, requires_grad=True))
    with pytest.raises(NotImplementedError, match="no gradient"):
        nsa_torch.paged_attention(*(found[name] for name in ATTEND))
    found = arguments()
    with pytest.raises(NotImplementedError, match="decode: triton: needs an NVIDIA GPU"):
        nsa_torch.paged_attention(*(found[x] for x in ATTEND), implementation="triton")


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_a_name_is_that_of_kernels_on_pages_where_rows_have_few_queries(name):
    """A layer has one name, for prompts and for steps: prompts run by it on gathered pages."""
    found, more = arguments(), torch.tensor([0, 9, 18], dtype=torch.int32)
    for count, starts, decode in ((1, None, True), (8, None, True), (9, None, False)) + (
        (9, more, False),
    ):
        query, gates = torch.zeros(2 * count, 4, 8), torch.zeros(2 * count, 4, 3)
        given = found | {"query": query, "gates": gates}
        call = functools.partial(
            paged_attend.explain, *(given[x] for x in ATTEND), starts, implementation=name
        )
        if decode:
            with pytest.raises(NotImplementedError, match=f"decode: {name}: needs a"):
                call()
        else:
            assert call().implementation == "gathered"


def test_cache_of_bad_sizes():
    for module in (nsa_torch, nsa_jax):
        with pytest.raises(ValueError, match="num_pages must be an int >= 1, got 0"):
            module.PagedCache(0, 2, 8, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("around", [0, 2])
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "gathered"])
def test_a_table_of_anything_on_a_gpu(implementation, around):
    """What lies around the pages, and pages that no entry names, are as before; an entry of no
    page reads as the nearest one. `around`: pages in the same allocation, before and behind; with
    0 a memory checker sees every access beside them.
    """
    config, pool, kv_heads, width, batch = NSAConfig(), 24, 2, 64, 6
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16)

    slots = [config.select_block] * 2 + [config.select_block // config.compress_stride] * 2
    whole = [normal(pool + 2 * around, n, kv_heads, width) for n in slots]
    inner = [x[around : around + pool] for x in whole]
    pair = {"compressed_key": inner[2], "compressed_value": inner[3]}
    cache = nsa_torch.PagedCache.view(*inner[:2], config=config, **pair)
    table = torch.randint(-3 * pool, 4 * pool, (batch, 20), generator=make, device="cuda")
    table[:, ::3] = torch.tensor([-(2**31), 2**31 - 1, -1, pool, 2**20, -pool], device="cuda")[
        :, None
    ]
    table[(table == 0) | (table == pool - 1)] = 3  # no entry names the first page or the last
    table[2, 9], table[5, 2] = 5, 7  # of the last tokens of two rows
    table = table.to(torch.int32)
    lengths = torch.tensor([0, 1, 640, 1280, 2**31 - 1, 130], device="cuda", dtype=torch.int32)
    before = [x.clone() for x in whole]
    named = torch.zeros(pool + 2 * around, dtype=torch.bool, device="cuda")
    exists = table[(table >= 0) & (table < pool)].long()
    named[exists + around] = True
    for tokens in (1, 4):
        query, gates = normal(batch * tokens, 32, width), normal(batch * tokens, 32, 3)
        new = normal(batch * tokens, kv_heads, width), normal(batch * tokens, kv_heads, width)
        nsa_torch.append(cache, *new, table, lengths)
        outs = [
            nsa_torch.paged_attention(
                query, gates, cache, entries, lengths, implementation=implementation
            )
            for entries in (table, table.clamp(0, pool - 1))
        ]
        assert torch.equal(*outs) and outs[0].isfinite().all()
        for x, y in zip(whole, before, strict=True):
            assert torch.equal(x[~named], y[~named])
    assert not torch.equal(whole[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "gathered"])
def test_rows_of_few_tokens_on_a_gpu(implementation):
    """1 to 8 tokens a row in one graph are what each row gives alone, and as many by another
    replay: lengths and bounds are read on the device.
    """
    config, pages, kv_heads, width = NSAConfig(), 20, 2, 64
    make = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(
        shape, generator=make, device="cuda", dtype=torch.bfloat16
    )
    cache = nsa_torch.PagedCache(
        5 * pages, kv_heads, width, width, config=config, device="cuda"
    )
    for x in cache.tensors().values():
        x.copy_(draw(*x.shape))
    table = torch.randperm(5 * pages, device="cuda").view(5, pages).int()
    query, gates = draw(16, 32, width), draw(16, 32, 3)
    starts, lengths = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (6, 5))

    def call():
        at = cache, table, lengths, starts
        options = {"max_seqlen_q": 8, "implementation": implementation}
        return nsa_torch.paged_attention(query, gates, *at, **options)

    calls = [([1, 4, 2, 8, 0], [700, 63, 4, 1280, 9]), ([8, 1, 1, 1, 5], [8, 1, 640, 64, 1000])]
    replay, out = None, None
    for counts, ends in calls:
        starts.copy_(torch.from_numpy(bounds(counts)))
        lengths.copy_(torch.tensor(ends))
        if replay is None:
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = call()
            replay = graph.replay
        replay()
        assert out[sum(counts) :].eq(0).all()
        for b, (first, last) in enumerate(itertools.pairwise(bounds(counts))):
            if first < last:
                tokens, at = slice(first, last), (cache, table[b : b + 1], lengths[b : b + 1])
                alone = nsa_torch.paged_attention(
                    query[tokens], gates[tokens], *at, implementation=implementation
                )
                torch.testing.assert_close(out[tokens], alone, rtol=0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "gathered"])
@torch.no_grad()
def test_pages_between_which_others_lie_on_a_gpu(implementation):
    """A prompt and steps, each the bits of pages side by side."""
    pool, heads, width = 40, 2, 64
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    memory = torch.full((pool, 2, 64, heads, width), torch.nan, **options)
    pairs = memory.unbind(1), memory.clone().transpose(0, 1).contiguous().unbind()
    caches = [nsa_torch.PagedCache.view(*pair) for pair in pairs]
    assert [cache.apart for cache in caches] == [2, 1]
    table = torch.randperm(pool, device="cuda").int().view(2, -1)
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    for count in (700, 1, 1, 3):
        lengths += count
        draw = lambda n, count=count: torch.randn(2 * count, n, width, **options)
        new = {"key": draw(heads), "value": draw(heads)}
        query, gates = draw(32), torch.rand(2 * count, 32, 3, **options)
        found = [
            nsa_torch.paged_attention(
                query, gates, cache, table, lengths, implementation=implementation, **new
            )
            for cache in caches
        ]
        assert found[0].isfinite().all() and torch.equal(*found)
    assert torch.equal(memory[:, 0].nan_to_num(), caches[1].selected_key.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("lengths", [[4096 + 70], [3000, 700]], ids=["one row", "two"])
@torch.no_grad()
def test_what_is_not_copied_is_not_read(implementation, lengths, monkeypatch):
    """A chunk's copies of the sliding branch are written near its window alone: NaN in the rest of
    the memory changes no bit.
    """
    count, heads, width, pool = 300, 2, 64, 80
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    config = NSAConfig(select_block=64, compress_block=32, compress_stride=16)
    cache = nsa_torch.PagedCache(
        pool, heads, width, width, separate=True, config=config, **options
    )
    for x in cache.tensors().values():
        x.normal_()
    rows = len(lengths)
    table = torch.randperm(pool, device="cuda").int()[:66].repeat(rows, 1)
    at = table, torch.tensor(lengths, dtype=torch.int32, device="cuda")
    starts = [count * i for i in range(rows + 1)]
    query = torch.randn(count * rows, 32, width, **options)
    gates = torch.rand(count * rows, 32, 3, **options)
    bounds = torch.tensor(starts, dtype=torch.int32, device="cuda")
    runs = plan_runs(starts, lengths, 64)
    assert [run.even for run in runs] == [True]
    poison = torch.full((1 << 28,), torch.nan, **options)
    del poison
    given = query, gates, cache, *at, bounds
    attend = functools.partial(
        nsa_torch.paged_attention, *given, runs=runs, implementation=implementation
    )
    found = attend()
    monkeypatch.setattr(paged_attend, "READING_TILES", ())  # all is written
    want = attend()
    assert found.isfinite().all() and torch.equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_one_graph_over_500_steps(implementation):
    """Rows grow by a token a step, end and begin again: a replay has the bits of an eager step on
    a cache of its own, and both caches end alike.
    """
    config, kv_heads, width, batch, pages = NSAConfig(), 2, 64, 4, 20
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16)

    sizes = batch * pages, kv_heads, width, width
    captured, eager = (
        nsa_torch.PagedCache(*sizes, config=config, device="cuda") for _ in range(2)
    )
    order = torch.randperm(batch * pages, generator=make, device="cuda")
    table = order.view(batch, pages).to(torch.int32)
    starts = torch.tensor([0, 700, 63, 500], device="cuda", dtype=torch.int32)
    for cache in (captured, eager):
        for x in cache.tensors().values():
            x.normal_(generator=make.manual_seed(1))  # what stands there of rows that begin so
    lengths = starts.clone()
    query, gates = normal(batch, 32, width), normal(batch, 32, 3)
    new = normal(batch, kv_heads, width), normal(batch, kv_heads, width)

    def step(cache):
        nsa_torch.append(cache, *new, table, lengths)
        return nsa_torch.paged_attention(
            query, gates, cache, table, lengths, implementation=implementation
        )

    step(eager)
    step(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step(captured)
    for i in range(500):
        grown = starts + i + 1
        grown[3] = (
            0 if i < 5 or 200 <= i < 210 else i % 200
        )  # padding, and again from the start
        lengths.copy_(grown)
        for x in (query, gates, *new):
            x.normal_(generator=make)
        graph.replay()
        found, wanted = out.clone(), step(eager)
        assert torch.equal(found, wanted) and found.isfinite().all(), f"step {i}"
    for name, x in captured.tensors().items():
        assert torch.equal(x, eager.tensors()[name]), name
    assert lengths[1] == 1200

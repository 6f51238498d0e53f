"""The paged cache in fp8, in both frameworks: rounding, means of unrounded tokens, rings.

The oracle rounds by itself (`nearest`), and attends in float64 over whole sequences.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from nsa_core import paged_layout, rounding
from nsa_core.config import NSAConfig
from nsa_jax.jax_ops import JAX_OPS
from nsa_torch import paged
from nsa_torch.paged import FP8
from nsa_torch.torch_ops import TORCH_OPS
from tests import test_paged
from tests.paged_rows import SMALL, Rows, Sizes, bounds, tables
from tests.test_cache import phi
from tests.test_paged import POOL, WIDTH, close, step

# Every number of e4m3 from 0 on, in the order of their codes.
POSITIVE = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)]
)[:127]


def nearest(x: np.ndarray) -> np.ndarray:
    """`x` float64 to the nearest number of e4m3, of two equally near ones the even code."""
    above = np.searchsorted(POSITIVE, np.abs(x)).clip(0, 126)
    below = (above - 1).clip(0)
    up, down = POSITIVE[above] - np.abs(x), np.abs(x) - POSITIVE[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(POSITIVE[code], x)


def as_stored(x: np.ndarray) -> np.ndarray:
    """What a cache in fp8 has of rows of tokens, float64; the quotients are of float32."""
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30))
    return nearest((x * (np.float32(448) / largest)).astype(np.float64)) * (largest / 448.0)


def means(config: NSAConfig, x: np.ndarray) -> np.ndarray:
    """Of each window of a row."""
    starts = range(0, len(x) - config.compress_block + 1, config.compress_stride)
    whole = [x[i : i + config.compress_block].astype(np.float64).mean(0) for i in starts]
    return np.array(whole).reshape(-1, *x.shape[1:])


class Expected:
    """What attention from the cache gives of `rows`; `dtype`: of means."""

    def __init__(self, rows: Rows, dtype=torch.float64):
        self.rows, self.config, self.dtype = rows, rows.sizes.config, dtype
        self.stored = Rows(rows.sizes, rows.lengths)
        self.stored.query, self.stored.gates = rows.query, rows.gates
        for kind in ("key", "value"):
            kept = [[as_stored(x) for x in one] for one in getattr(rows, kind)]
            setattr(self.stored, kind, kept)

    def compressed(self, b: int, last: int):
        """Keys and values of row `b`, of its first `last` tokens."""
        both = (means(self.config, x[0][b][:last]) for x in (self.rows.key, self.rows.value))
        keys, values = (torch.from_numpy(x).to(self.dtype).double().numpy() for x in both)
        return keys, as_stored(values.astype(np.float32))

    def __call__(self, begin, end) -> np.ndarray:
        outs = [np.zeros((0, self.rows.sizes.H, self.rows.sizes.Dv))]
        for b, (first, last) in enumerate(zip(begin, end, strict=True)):
            here = [0] * len(begin), [0] * len(begin)
            here[0][b], here[1][b] = first, last
            pair = [torch.from_numpy(x)[None] for x in self.compressed(b, last)]
            outs.append(self.stored.expected(*here, compressed=lambda *_, pair=pair: pair))
        return np.concatenate(outs)


def options(module, config, dtype="float32", **rest):
    return {"config": config, "dtype": module.float8_e4m3fn, **rest} | {
        "compressed_dtype": getattr(module, dtype)
    }


class Torch(test_paged.Torch):
    """What was never written is NaN: codes, scales and rings."""

    def __init__(self, sizes: Sizes, pool: int = POOL, **rest):
        given = options(torch, sizes.config, separate=sizes.separate, **rest)
        self.cache = nsa_torch.PagedCache(pool, sizes.Hkv, sizes.D, sizes.Dv, **given)
        for x in self.cache.tensors().values():
            x.fill_(torch.nan)

    def append(self, key, value, table, lengths, starts=None, params=None, slots=None):
        at = self.array(table), self.array(lengths)
        starts, slots = (None if x is None else self.array(x) for x in (starts, slots))
        given = {"cu_seqlens_q": starts, "params": params, "slots": slots}
        nsa_torch.append(self.cache, key, value, *at, **given)

    def snapshot(self):
        return {k: x.float().numpy().copy() for k, x in self.cache.tensors().items()}


class Jax(test_paged.Jax):
    def __init__(self, sizes: Sizes, pool: int = POOL, **rest):
        given = options(jnp, sizes.config, separate=sizes.separate, **rest)
        cache = nsa_jax.PagedCache(pool, sizes.Hkv, sizes.D, sizes.Dv, **given)
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)

    def append(self, key, value, table, lengths, starts=None, params=None, slots=None):
        if starts is not None:
            key, value = (jax.tree.map(test_paged.longer, x) for x in (key, value))
        given = {"cu_seqlens_q": starts, "params": params, "slots": slots}
        self.cache = self.appending(self.cache, key, value, table, lengths, **given)

    def snapshot(self):
        return {k: x.astype(np.float32) for k, x in super().snapshot().items()}


FRAMEWORKS = pytest.mark.parametrize("framework", [Torch, Jax], ids=["torch", "jax"])


# Rounding.


@pytest.mark.parametrize("ops", [TORCH_OPS, JAX_OPS], ids=["torch", "jax"])
def test_tokens_are_rounded_to_the_nearest(ops, rng):
    """Of rows of any size, with an element that is much larger than the others."""
    x = rng.standard_normal((2000, 16)).astype(np.float32) * 10.0 ** rng.integers(
        -9, 9, (2000, 1)
    )
    x[::3, 5] *= 300
    x[1::50] = 0
    x = x.astype(np.float32)
    make = torch.from_numpy if ops is TORCH_OPS else jnp.asarray
    codes, scale = rounding.rounded(ops, make(x))
    found = np.asarray(rounding.restored(ops, codes, scale, ops.xp.float32))
    scale = np.asarray(scale)
    np.testing.assert_allclose(found, as_stored(x), rtol=1e-6, atol=0)
    largest = np.abs(x).max(-1)
    np.testing.assert_allclose(np.abs(found).max(-1), largest, rtol=1e-6)
    off = np.abs(found.astype(np.float64) - x)
    assert (
        off <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * scale[:, None]) * (1 + 1e-6)
    ).all()
    some = np.abs(x) > largest[:, None] / 16
    assert (off[some] / np.abs(x[some])).max() > 0.9 * 2.0**-4  # the bound is tight


@pytest.mark.parametrize("ops", [TORCH_OPS, JAX_OPS], ids=["torch", "jax"])
def test_a_token_that_is_not_finite_stays_so(ops):
    x = np.ones((3, 4), np.float32)
    x[0, 1], x[1, 2] = np.inf, np.nan
    make = torch.from_numpy if ops is TORCH_OPS else jnp.asarray
    found = np.asarray(rounding.restored(ops, *rounding.rounded(ops, make(x)), ops.xp.float32))
    assert (np.isfinite(found).all(1) == [False, False, True]).all()


@pytest.mark.parametrize("ops", [TORCH_OPS, JAX_OPS], ids=["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_token_is_known_by_what_it_was_rounded_to(ops, dtype, rng):
    """A token's own; not another one, nor one with an element that is one code off."""
    make = torch.from_numpy if ops is TORCH_OPS else jnp.asarray
    dtype = getattr(ops.xp, dtype)
    x = ops.cast(make(rng.standard_normal((4000, 16)).astype(np.float32)), dtype)
    codes, scale = rounding.rounded(ops, x)
    found = rounding.restored(ops, codes, scale, dtype)
    assert np.asarray(rounding.is_of(ops, x, found, scale)).all()
    other = make(np.roll(np.asarray(ops.to_float32(x)), 1, axis=0))
    assert not np.asarray(rounding.is_of(ops, other, found, scale)).any()
    off = np.asarray(ops.to_float32(x)).copy()
    off[:, 3] += np.abs(off[:, 3]) * 0.16 + np.asarray(scale) * 2**-7
    assert not np.asarray(rounding.is_of(ops, make(off), found, scale)).any()


# Rows.


@FRAMEWORKS
@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(H=6, Hkv=1, Dv=8, separate=True)],
    ids=["shared", "separate"],
)
def test_prompts_chunks_and_tokens(framework, sizes):
    """Against whole sequences; compressed keys are those of tokens that were not rounded."""
    ends = [50, 40, 70]
    rows, paged_rows, at = Rows(sizes, ends), framework(sizes), [0, 0, 0]
    table, expected = tables(ends, sizes.config, POOL, WIDTH), Expected(rows)
    for counts in ([30, 7, 24], [1, 1, 1], [1, 1, 0], [3, 20, 30], [8, 2, 8], [1, 1, 1]):
        end = [a + c for a, c in zip(at, counts, strict=True)]
        close(step(paged_rows, rows, table, at, end), expected(at, end))
        at = end
    pages = paged_rows.snapshot()
    for b, last in enumerate(at):
        keys, values = expected.compressed(b, last)
        scaled = pages["compressed_value"], pages["compressed_value_scale"]
        stored = scaled[0] * scaled[1].swapaxes(1, 2)[..., None]
        for name, want in (("key", keys), ("value", values)):
            given = pages["compressed_key"] if name == "key" else stored
            slots = given[table[b]].reshape(-1, *want.shape[1:])
            close(slots[1 : 1 + len(want)], want, atol=1e-6)


@FRAMEWORKS
@pytest.mark.parametrize("kind", ["pool", "rope"])
def test_learned_compression(framework, kind, rng):
    """Of tokens that were not rounded, whether they come in one call or in several."""
    sizes, ends = Sizes(), [13, 14, 40]
    rows, table = Rows(sizes, [40]), tables([40], SMALL, POOL, WIDTH)
    params = phi(kind, rng, sizes.D), phi(kind, rng, sizes.Dv)
    if framework is Torch:
        params = tuple(type(x)(*(torch.from_numpy(np.array(y)) for y in x)) for x in params)
    found = []
    for chunks in ([40], ends):
        one, at = framework(sizes), 0
        for n in chunks:
            cut = functools.partial(rows.cut, begin=[at], end=[n], as_array=one.array)
            at_call = np.array([n], np.int32), bounds([n - at])
            one.append(cut("key"), cut("value"), table, *at_call, params)
            at = n
        found.append(one.snapshot())
    for name, x in found[0].items():
        close(found[1][name], x, atol=1e-6)


@FRAMEWORKS
def test_rows_that_change_places_keep_their_rings_by_slots(framework):
    """The same bits; without slots the next two means are of rounded tokens, and of no others."""
    sizes, ends = Sizes(), [50, 61]
    rows, table = Rows(sizes, ends), tables(ends, SMALL, POOL, WIDTH)
    turned = np.array([1, 0], np.int32)
    snapshots = []
    for slots in ([0, 1], [7, 3], None):
        one = framework(sizes, max_rows=8)
        for begin, end in (([0, 0], [40, 49]), ([40, 49], [50, 61])):
            counts = [y - x for x, y in zip(begin, end, strict=True)]
            cut = functools.partial(rows.cut, begin=begin, end=end, as_array=one.array)
            key, value = cut("key"), cut("value")
            given, now = (
                [None if slots is None else np.array(slots, np.int32), slice(None)],
                table,
            )
            lengths, starts = np.array(end, np.int32), bounds(counts)
            if begin[0]:  # the other row first
                split = lambda x, n=counts[0], one=one: one.array(
                    np.concatenate([x[n:], x[:n]])
                )
                key, value, now, lengths = (
                    split(key),
                    split(value),
                    table[turned],
                    lengths[turned],
                )
                starts = bounds(counts[::-1])
                given[0] = None if slots is None else given[0][turned]
            one.append(key, value, now, lengths, starts, slots=given[0])
        snapshots.append(one.snapshot())
    first, other, without = snapshots
    for name, x in first.items():
        if name.startswith("recent"):
            np.testing.assert_array_equal(x[[0, 1]], other[name][[7, 3]])
        else:
            np.testing.assert_array_equal(x, other[name])
            if not name.startswith("compressed"):
                np.testing.assert_array_equal(x, without[name])
    off = np.abs(first["compressed_key"] - without["compressed_key"])
    assert 0 < np.nanmax(off) < 2**-4 * 4
    # Each row has finished two means whose window began before it changed its place, at most.
    changed = np.nan_to_num(off).max((2, 3)) > 0
    assert changed.sum() <= 4


@FRAMEWORKS
def test_fork_and_crop(framework):
    """A fork copies its last page and the ring; up to eight guesses are taken back."""
    sizes, config = Sizes(), SMALL
    rows = Rows(sizes, [60, 60])
    for name in ("key", "value"):
        for x in getattr(rows, name):
            x[1][:37] = x[0][:37]
    one, table = framework(sizes), tables([64, 0], config, POOL, WIDTH)
    step(one, rows, table, [0, 0], [37, 0])
    free = sorted(set(range(POOL)) - set(table[0, :4]))
    table[1, :2] = table[0, :2]
    table[1, 2:4] = free[:2]
    one.copy_pages([table[0, 2]], [free[0]])
    copied = one.cache.copy_recent(one.array(np.array([0])), one.array(np.array([1])))
    one.cache = one.cache if framework is Torch else copied
    expected = Expected(rows)
    begin, end = [37, 37], [52, 58]
    close(step(one, rows, table, begin, end), expected(begin, end))
    again = Rows(sizes, [60, 60], seed=9)
    for name in ("key", "value"):
        for x, y in zip(getattr(again, name), getattr(rows, name), strict=True):
            x[0][:44], x[1][:50] = y[0][:44], y[1][:50]
    begin, end = [44, 50], [55, 60]
    close(step(one, again, table, begin, end), Expected(again)(begin, end))


@FRAMEWORKS
def test_nothing_else_is_written(framework):
    """Pages that no entry names, rings of no row, tokens without a page, rows of length 0, and
    slots beyond the rings.
    """
    sizes = Sizes()
    rows, one = Rows(sizes, [64, 20]), framework(sizes, max_rows=3)
    table = np.array([[-1, 3, -1, 5], [7, 2, -1, -1]], np.int32)
    cut = functools.partial(rows.cut, begin=[0, 0], end=[64, 20], as_array=one.array)
    given = cut("key"), cut("value"), table
    starts = np.array([0, 64, 84], np.int32)
    one.append(*given, np.array([64, 20], np.int32), starts, slots=np.array([1, 3], np.int32))
    found = one.snapshot()
    untouched = ~np.isin(np.arange(POOL), [2, 3, 5, 7])
    for name, x in found.items():
        written = np.isfinite(x).reshape(len(x), -1).any(1)
        if name.startswith("recent"):
            assert (written == [False, True, False]).all(), name
        else:
            assert (written == ~untouched).all(), name
    one.append(*given, np.array([0, 0], np.int32), starts, slots=np.array([0, 2], np.int32))
    for name, x in one.snapshot().items():
        np.testing.assert_array_equal(x, found[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_of_16_bits(dtype):
    """Within what 16 bits add to the oracle; prefill in two chunks, then a token."""
    sizes = Sizes(H=8, Hkv=2, D=32, Dv=32)
    rows, dtype = Rows(sizes, [61]), getattr(torch, dtype)
    for x in (rows.query, rows.gates, *rows.key, *rows.value):
        x[0] = torch.from_numpy(x[0]).to(dtype).float().numpy()
    one = Torch(sizes)
    given = options(torch, SMALL) | {"compressed_dtype": dtype}
    one.cache = nsa_torch.PagedCache(POOL, 2, 32, 32, **given)
    one.array = lambda x: torch.from_numpy(np.array(x)).to(
        dtype if np.asarray(x).dtype == np.float32 else None
    )
    table, at = tables([61], SMALL, POOL, WIDTH), 0
    for n in (37, 60, 61):
        cut = functools.partial(rows.cut, begin=[at], end=[n], as_array=one.array)
        where = one.array(table), torch.tensor([n]).int(), torch.tensor([0, n - at]).int()
        nsa_torch.append(one.cache, cut("key"), cut("value"), *where[:2], cu_seqlens_q=where[2])
        out = nsa_torch.paged_attention(cut("query"), cut("gates"), one.cache, *where)
        assert out.dtype is dtype
        want, eps = Expected(rows, dtype)([at], [n]), torch.finfo(dtype).eps
        np.testing.assert_allclose(out.double().numpy(), want, rtol=eps, atol=2 * eps)
        at = n


def test_what_it_saves():
    """Bytes of a token, head and layer; a ring is those of 64 tokens a row."""
    sizes = 1, 1, 128, 128

    def bytes_of(cache):
        pages = {k: x for k, x in cache.tensors().items() if not k.startswith("recent")}
        return sum(x.numel() * x.element_size() for x in pages.values()) / 64

    half = bytes_of(nsa_torch.PagedCache(*sizes))
    eight = nsa_torch.PagedCache(*sizes, dtype=torch.float8_e4m3fn, max_rows=1)
    assert (half, bytes_of(eight)) == (544, 288.25)
    assert eight.recent_key.numel() == 64 * 128 and eight.dtype is torch.bfloat16


# Pages of another manager, and what is refused.


def test_adopted_pages_bring_their_scales():
    sizes, pages = (
        Sizes(),
        [torch.zeros(POOL, 16, 2, w).to(torch.float8_e4m3fn) for w in (8, 6)],
    )
    scales = {f"{x}_scale": torch.ones(POOL, 2, 16) for x in ("key", "value")}
    given = {"config": SMALL, "compressed_dtype": torch.float32}
    one = Torch(sizes)
    one.cache = nsa_torch.PagedCache.view(*pages, **given, **scales)
    rows, table = Rows(sizes, [30]), tables([30], SMALL, POOL, WIDTH)
    close(step(one, rows, table, [0], [30]), Expected(rows)([0], [30]))
    assert one.cache.selected_key is pages[0] and (scales["key_scale"] != 1).any()
    view = functools.partial(nsa_torch.PagedCache.view, *pages, **given)
    for missing in ({}, {"key_scale": scales["key_scale"]}):
        with pytest.raises(
            ValueError, match="of float8_e4m3fn must have key_scale and value_sc"
        ):
            view(**missing)
    with pytest.raises(ValueError, match=r"selected_key_scale must have shape \(24, 2, 16\)"):
        view(key_scale=torch.ones(1, 2, 16), value_scale=scales["value_scale"])
    with pytest.raises(ValueError, match=r"must have 3 axes, got shape \(2,\)"):  # of an engine
        view(key_scale=torch.ones(2), value_scale=torch.ones(2))
    with pytest.raises(ValueError, match="key_pages must have dtype in"):
        nsa_torch.PagedCache.view(*(x.view(torch.uint8) for x in pages), config=SMALL)
    whole = [x.float() for x in pages]
    with pytest.raises(
        ValueError, match="selected_key_scale must be None where pages are float32"
    ):
        nsa_torch.PagedCache.view(*whole, config=SMALL, **scales)


@pytest.mark.parametrize("module", [torch, jnp], ids=["torch", "jax"])
def test_what_there_is_no_cache_of(module):
    api = nsa_torch if module is torch else nsa_jax
    make = functools.partial(api.PagedCache, 4, 2, 8, 8, config=SMALL)
    for dtype in (module.float8_e5m2, module.int8):
        with pytest.raises(ValueError, match=r"dtype must be one of .*float8_e4m3fn.*, got"):
            make(dtype=dtype)
    with pytest.raises(
        ValueError, match=r"compressed_dtype must be one of .*, got float8_e4m3fn"
    ):
        make(dtype=module.float8_e4m3fn, compressed_dtype=module.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"compressed_dtype must be the cache's where .*float16"
    ):
        make(dtype=module.float16, compressed_dtype=module.bfloat16)
    with pytest.raises(ValueError, match="max_rows must be an int >= 1, got 0"):
        make(dtype=module.float8_e4m3fn, max_rows=0)


def call(**changes):
    """Those of `append` in torch, three rows."""
    zeros = torch.zeros
    given = options(torch, SMALL, dtype="bfloat16", max_rows=2)
    found = {
        "cache": nsa_torch.PagedCache(4, 2, 8, 6, **given),
        "key": zeros(3, 2, 8).bfloat16(),
        "value": zeros(3, 2, 6).bfloat16(),
        "page_table": zeros(3, 3).int(),
        "lengths": zeros(3).int(),
        "slots": zeros(3).int(),
    }
    return found | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": None}, "made for max_rows=2 takes no more rows without slots, got 3"),
        ({"slots": torch.zeros(2).int()}, r"slots must have shape \(3,\)"),
        ({"slots": torch.zeros(3)}, "slots must have dtype in"),
        ({"key": torch.zeros(3, 2, 8)}, "key must have the dtype of the cache, bfloat16"),
        ({"key": torch.zeros(3, 2, 8).to(torch.float8_e4m3fn)}, "key must have dtype in"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        nsa_torch.append(**call(**changes))


def test_memory_in_fp8_is_not_carved():
    memory = torch.zeros(10000).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"memory must have dtype in .* got float8_e4m3fn"):
        nsa_torch.PagedCache.carve(memory, 2, 8, 8, config=SMALL)


# Mutants.


def of_stored_tokens(monkeypatch):
    monkeypatch.setattr(rounding, "is_of", lambda ops, x, *_: torch.zeros(x.shape[:-1]).bool())


def short_ring(monkeypatch):
    keep = paged._Recent.keep

    def wrong(self, tokens, at):
        keep(self, tokens, at._replace(there=at.there & (tokens.position % 8 != 3)))

    monkeypatch.setattr(paged._Recent, "keep", wrong)


def scale_of_the_head_before(monkeypatch):
    write = paged.PagedCache.write

    def wrong(self, name, at, new):
        write(self, name, at, new)
        if name == "selected_value":
            self.selected_value_scale.copy_(self.selected_value_scale.roll(1, 1))

    monkeypatch.setattr(paged.PagedCache, "write", wrong)


def unscaled_values(monkeypatch):
    read = paged.PagedCache.read

    def wrong(self, name, at):
        found = read(self, name, at)
        return found * 1.02 if name == "compressed_value" else found

    monkeypatch.setattr(paged.PagedCache, "read", wrong)


@pytest.mark.parametrize(
    "mutant", [of_stored_tokens, short_ring, scale_of_the_head_before, unscaled_values]
)
def test_mutants_are_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_prompts_chunks_and_tokens(Torch, Sizes())


def test_the_oracle_tells_rounding_from_none():
    """An unrounded cache does not pass for one in fp8."""
    sizes, rows = Sizes(), Rows(Sizes(), [50])
    whole = dataclasses.replace(sizes)
    one = test_paged.Torch(whole)
    found = step(one, rows, tables([50], SMALL, POOL, WIDTH), [0], [50])
    with pytest.raises(AssertionError):
        close(found, Expected(rows)([0], [50]))


def needle(tokens, implementation, device):
    """One token of `tokens` that the last query looks for, beyond the window: its value, and what
    selected attention gives, from a cache of 16 bits and from one in fp8.
    """
    config = NSAConfig(num_selected=5)  # two of them are free
    make = torch.Generator(device).manual_seed(0)
    draw = lambda *x: torch.randn(x, generator=make, device=device).bfloat16()
    query, key, value = draw(1, 1, 64), draw(tokens, 1, 64), draw(tokens, 1, 64)
    place = tokens // 3
    key[place] = 8 * query[0]
    pages = -(-tokens // config.select_block)
    table = torch.randperm(pages, generator=make, device=device).int()[None]
    at = table, torch.tensor([tokens], device=device).int()
    starts = torch.tensor([0, tokens], device=device).int()
    gates = torch.tensor([0.0, 1.0, 0.0], device=device).bfloat16().expand(1, 16, 3)
    caches = [
        nsa_torch.PagedCache(pages, 1, 64, 64, config=config, dtype=x, device=device)
        for x in (torch.bfloat16, FP8)
    ]
    how = {} if device == "cpu" else {"implementation": "triton"}  # the same order of sums
    outs = []
    for cache in caches:
        nsa_torch.append(cache, key, value, *at, cu_seqlens_q=starts, **how)
        given = query.repeat(1, 16, 1), gates.contiguous(), cache, *at
        outs.append(nsa_torch.paged_attention(*given, implementation=implementation)[0])
    assert torch.equal(*(x.compressed_key for x in caches)), "the blocks are the same"
    return value[place], outs


def check_needle(tokens, implementation, device="cpu"):
    value, (half, eight) = needle(tokens, implementation, device)
    torch.testing.assert_close(half, value.expand_as(half), rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(eight, value.expand_as(half), rtol=2**-4, atol=1e-2)
    assert not torch.equal(half, eight)


def test_a_needle_is_found():
    check_needle(2000, "gathered")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "gathered"])
@torch.no_grad()
def test_a_needle_is_found_among_64k_tokens(implementation):
    check_needle(65536, implementation, "cuda")


def filled(seed, batch=4, pages=20, kv_heads=2, width=64, around=8):
    """A cache whose pages lie within memory of others, and that memory, all of it random. Kernels
    take what begins at a multiple of 256 bytes, which 8 pages' scales are.
    """
    make = torch.Generator("cuda").manual_seed(seed)
    pool = batch * pages

    def whole(shape, dtype):
        x = torch.randn((shape[0] + 2 * around, *shape[1:]), generator=make, device="cuda")
        return x.to(dtype)

    sizes = pool, kv_heads, width, width, NSAConfig(), False, batch
    memory = {
        name: whole(shape, paged_layout.dtype_of(name, FP8, torch.bfloat16, torch.float32))
        for name, shape in paged_layout.shapes(*sizes).items()
        if shape is not None
    }
    cache = object.__new__(nsa_torch.PagedCache)
    inner = {name: x[around:-around] for name, x in memory.items()}
    paged_layout.PagedArrays.__init__(cache, NSAConfig(), **inner)
    return cache, memory


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "gathered"])
def test_one_graph_over_500_steps(implementation):
    """Rows grow by a token a step, end and begin again: a replay has the bits of an eager step on a
    cache of its own, both caches end alike, and memory around pages and rings is as before.
    """
    batch, pages, kv_heads, width = 4, 20, 2, 64
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16)

    (captured, around), (eager, _) = filled(1), filled(1)
    before = {name: x.clone() for name, x in around.items()}
    table = torch.randperm(batch * pages, generator=make, device="cuda")
    table = table.view(batch, pages).to(torch.int32)
    starts = torch.tensor([0, 700, 63, 500], device="cuda", dtype=torch.int32)
    lengths, slots = starts.clone(), torch.tensor([2, 0, 3, 1], device="cuda").int()
    query, gates = normal(batch, 32, width), normal(batch, 32, 3)
    new = normal(batch, kv_heads, width), normal(batch, kv_heads, width)

    def step(cache):
        return nsa_torch.paged_attention(
            *(query, gates, cache, table, lengths),
            key=new[0],
            value=new[1],
            slots=slots,
            implementation=implementation,
        )

    with torch.no_grad():
        step(eager)
        step(captured)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = step(captured)
        for i in range(500):
            grown = starts + i + 1
            grown[3] = 0 if i < 5 or 200 <= i < 210 else i % 200
            lengths.copy_(grown)
            for x in (query, gates, *new):
                x.normal_(generator=make)
            graph.replay()
            found, wanted = out.clone(), step(eager)
            assert torch.equal(found, wanted) and found.isfinite().all(), f"step {i}"
    bits = lambda x: x.view(torch.uint8)
    for name, x in captured.tensors().items():
        assert torch.equal(bits(x), bits(eager.tensors()[name])), name
        for part in (slice(8), slice(-8, None)):
            assert torch.equal(bits(around[name][part]), bits(before[name][part])), name


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize(("heads", "width"), [((64, 4), 128), ((8, 2), 64)], ids=str)
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_steps_are_those_of_gathered_pages(implementation, heads, width, q_len):
    """Chunks of a prompt, then a step, with the kernels that append on this device; the blocks of a
    cache of 16 bits.
    """
    make = torch.Generator("cuda").manual_seed(0)
    draw = lambda *x: torch.randn(x, generator=make, device="cuda", dtype=torch.bfloat16)
    given = {"config": NSAConfig(), "device": "cuda"}
    sizes = 120, heads[1], width, width
    caches = [nsa_torch.PagedCache(*sizes, dtype=x, **given) for x in (FP8, torch.bfloat16)]
    table = torch.randperm(120, generator=make, device="cuda").to(torch.int32).view(3, 40)
    lengths = torch.tensor([2100, 33, 1500], device="cuda").int()
    starts = torch.tensor([0, 2100, 2133, 3633], device="cuda").int()
    new = [draw(3633, heads[1], width) for _ in range(2)]
    for cache in caches:
        how = {"cu_seqlens_q": starts, "implementation": "triton"}  # the same order of sums
        nsa_torch.append(cache, *new, table, lengths, **how)
    assert torch.equal(*(x.compressed_key for x in caches))
    lengths += q_len
    new = {x: draw(3 * q_len, heads[1], width) for x in ("key", "value")}
    query, gates = draw(3 * q_len, heads[0], width), torch.rand(3 * q_len, heads[0], 3)
    gates = gates.cuda().bfloat16()
    at = table, lengths
    with torch.no_grad():
        call = nsa_torch.paged_attention
        out = call(query, gates, caches[0], *at, **new, implementation=implementation)
        want = call(query, gates, caches[0], *at, implementation="gathered")
        torch.testing.assert_close(out, want, rtol=0, atol=2e-2)
        nsa_torch.append(caches[1], *new.values(), *at)
        half = call(query, gates, caches[1], *at, implementation="gathered")
    assert 1e-3 < (out - half).abs().max() < 0.3
    means = [x.compressed_key.float() for x in caches]  # sums of another order
    torch.testing.assert_close(*means, rtol=2**-7, atol=2**-9)

"""The decode kernel: its program on emulated lanes against the oracle, and its mutants."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.judge.parity import SCORE_SLACK, check_parity
from kernels_pallas.mosaic import decode as body
from kernels_pallas.mosaic import (
    decode_append,
    decode_exchange,
    decode_lane,
    decode_streams,
    decode_topn,
)
from kernels_pallas.mosaic.capability import interpreted
from kernels_pallas.specs.decode import Variant, decode, why_not, with_variant
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import PagedArrays
from nsa_core.steps import mosaic_decode
from nsa_jax.jax_ops import JAX_OPS
from nsa_torch import paged_attend
from tests import decode_oracle as oracle
from tests.decode_oracle import PAPER
from tests.emulated_clusters import ClusterWarps

EIGHT_WARPS = Variant(4, 8, 4, 128)
# Borders of the stride, of a compressed token, of a block, of the window and of the n blocks.
BORDERS = [0, 1, 15, 16, 31, 32, 47, 48, 63, 64, 65, 511, 512, 513, 1023, 1025]
CASES = {
    "borders": (BORDERS, {"window": 512, "pages": 120}),
    "paper": ([2125, 0, 4097], {"variant": EIGHT_WARPS, "pages": 100}),
    "three queries": ([2, 1090], {"q_len": 3, "H": 8, "Hkv": 2}),  # G = 4
    "one head": ([1100], {"H": 2, "Hkv": 2, "D": 96}),
    "wide": ([1300], {"D": 192, "variant": Variant(4, 8, 2, 128), "scale": 192**-0.5}),
    "narrow": ([1300], {"D": 32, "Dv": 64, "H": 6, "Hkv": 1}),
    "long blocks": ([3001], {"stride": 8, "block": 128, "n": 8}),
    "cover 4": ([1500], {"compress_block": 64, "window": 0, "dtype": "float16"}),
    "one slot a page": ([450], {"compress_block": 16, "block": 16, "n": 6, "window": 33}),
    "16 slots a page": (
        [1450],
        {"compress_block": 16, "stride": 4, "n": 6, "num_initial": 0, "num_local": 1},
    ),
    "all forced": ([1000], {"n": 3, "gate_dtype": "float16"}),
    "cluster of 16": ([5000], {"variant": Variant(16, 8, 4, 128)}),
    # Slices of the output, strips and stages that do not come out even.
    "cluster of 3": ([2125, 0, 4097], {"variant": Variant(3, 8, 4, 128), "pages": 100}),
    "fp8": (BORDERS, {"window": 512, "pages": 120, "fp8": True}),
    "fp8, three queries": ([2, 1090], {"q_len": 3, "H": 8, "Hkv": 2, "fp8": True}),
    "fp8, wide": ([1300], {"D": 192, "variant": Variant(4, 8, 2, 128), "fp8": True}),
    "fp8, narrow": ([1300], {"D": 64, "Dv": 64, "H": 6, "Hkv": 1, "fp8": True}),
    "fp8, cluster of 3": (
        [2125, 4097],
        {"variant": Variant(3, 8, 4, 128), "pages": 100, "fp8": True},
    ),
    "3 stages, narrow": ([1300, 40], {"Dv": 64, "variant": Variant(3, 4, 3, 128), "pages": 60}),
}


def run(spec, made):
    out, indices = decode.__wrapped__(spec)(*made.arrays.values())
    return np.asarray(out), np.asarray(indices)


def in_dtype(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    return lambda x: x.astype(dtype).astype(np.float64)


def check(lengths, seed=0, zero_query=False, **sizes):
    """Runs a case against the oracle; gives the share of lists that are those of float64."""
    spec = dataclasses.replace(PAPER, B=len(lengths), **sizes)
    made = oracle.problem(spec, lengths, seed, zero_query)
    return compare(made, *run(spec, made))


def compare(made, out, indices):
    spec = made.spec
    rounded = in_dtype(spec.dtype)
    wanted, rough = np.zeros(out.shape), np.zeros(out.shape)
    alike = []
    for b, i, g in np.ndindex(spec.B, spec.q_len, spec.Hkv):
        token, heads = b * spec.q_len + i, slice(g * spec.G, (g + 1) * spec.G)
        row = indices[token, g]
        found = [int(j) for j in row if j >= 0]
        wanted[token, heads], score, blocks = oracle.one_token(made, b, i, g, found)
        rough[token, heads] = rounded(oracle.one_token(made, b, i, g, found, rounded)[0])
        assert found == sorted(set(found)) and len(found) == len(blocks), (row, blocks)
        assert list(row[len(found) :]) == [-1] * (spec.n - len(found)), row
        forced = set(oracle.selected(dataclasses.replace(spec, n=spec.n - spec.free), score))
        assert forced <= set(found), (row, forced)
        if found:
            lowest = score[blocks].min() * (1 - SCORE_SLACK)
            assert score[found].min() >= lowest, (row, blocks)
        alike.append(found == blocks)
    parity = check_parity("out", out.astype(np.float64), wanted, rough, dtype=out.dtype)
    assert parity.ok, parity
    return np.mean(alike)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_oracles(name):
    lengths, sizes = CASES[name]
    assert check(lengths, **sizes) > 0.9


def test_equal_scores_go_to_the_lower_blocks():
    assert check([4096], zero_query=True) == 1


def test_copies_may_arrive_at_once(monkeypatch):
    made = ClusterWarps.__init__

    def early(self, *arguments, **options):
        made(self, *arguments, **options, late=False)

    monkeypatch.setattr(ClusterWarps, "__init__", early)
    check([1090], seed=1)


def test_the_same_bits_alone_and_with_another_capacity():
    spec = dataclasses.replace(PAPER, B=2)
    both = oracle.problem(spec, [1290, 700])
    out, indices = run(spec, both)
    columns = np.full((1, 40), -1, np.int32)
    own = both.arrays["page_table"][:1, :60]
    alone = both.arrays | {
        name: both.arrays[name][:1] for name in ("query", "gates", "lengths")
    }
    alone["page_table"] = np.concatenate([own, columns], 1)
    other = dataclasses.replace(
        spec, B=1, table_pages=100, variant=dataclasses.replace(spec.variant, capacity=512)
    )
    found, blocks = run(other, dataclasses.replace(both, arrays=alone))
    np.testing.assert_array_equal(found.view(np.int16), out[:1].view(np.int16))
    np.testing.assert_array_equal(blocks, indices[:1])


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**90, -(2.0**90)], ids=str)
def test_values_in_fp8_may_be_small_or_large(factor):
    """The output is as many times smaller or larger, to the bit; scales of a cache that someone
    filled may be negative.
    """
    made = oracle.problem(dataclasses.replace(PAPER, fp8=True), [1090])
    wanted, _ = run(made.spec, made)
    factor = np.float32(factor)
    for name in ("compressed_value_scale", "selected_value_scale", "sliding_value_scale"):
        made.arrays[name] = made.arrays[name] * factor
    found, _ = run(made.spec, made)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32) * factor)


def test_a_length_beyond_the_table_is_that_of_the_table():
    spec = dataclasses.replace(PAPER, table_pages=5)
    made = oracle.problem(spec, [320])
    wanted = run(spec, made)
    longer = dataclasses.replace(
        made, arrays=made.arrays | {"lengths": np.array([2**31 - 1], np.int32)}
    )
    for x, y in zip(run(spec, longer), wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_step_runs_on_a_paged_cache():
    """As the steps call it, one array of keys and values for the selected and sliding branch."""
    lengths, config = [652, 65], NSAConfig(num_selected=6, window=130)
    wide = {"n": 6, "window": 130, "variant": EIGHT_WARPS, "gate_dtype": "bfloat16"}
    made = oracle.problem(dataclasses.replace(PAPER, B=2, **wide), lengths)
    for name in ("key", "value"):
        made.arrays[f"sliding_{name}"] = made.arrays[f"selected_{name}"]
    query, gates = made.arrays["query"], made.arrays["gates"]
    names = "selected_key", "selected_value", "compressed_key", "compressed_value"
    cache = PagedArrays(config, *(made.arrays[name] for name in names))
    rest = made.arrays["page_table"], made.arrays["lengths"], None
    with interpreted(True):
        found = mosaic_decode.attention(JAX_OPS, query, gates, cache, *rest)
    for x, y in zip(found, run(made.spec, made), strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


def test_the_step_runs_on_a_paged_cache_in_fp8():
    """By the public function, as `gathered` does it on the same pages."""
    config, sizes = NSAConfig(num_selected=6, window=130), (14, 1, 128, 128)
    cache = nsa_torch.PagedCache(*sizes, config=config, dtype=torch.float8_e4m3fn)
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=make).bfloat16()
    for x in cache.tensors().values():
        x.fill_(torch.nan)
    table = torch.randperm(14, generator=make).int()[:13][None]
    at, new = (table, torch.tensor([652]).int()), (draw(652, 1, 128), draw(652, 1, 128))
    nsa_torch.append(cache, *new, *at)
    call = functools.partial(
        nsa_torch.paged_attention, draw(1, 16, 128), torch.rand(1, 16, 3), cache, *at
    )
    with interpreted(True):
        inputs = paged_attend.Inputs(*call.args, None, None)
        arrays = mosaic_decode.step_arrays(*call.args, None)
        kernel = mosaic_decode.step_kernel(*call.args[:4], None, False)
        assert paged_attend.explain(*call.args).implementation == "mosaic" and kernel.spec.fp8
    plain = [
        x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if x.dtype is torch.bfloat16
        else x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        if x.dtype is torch.float8_e4m3fn
        else x.numpy()
        for x in arrays
    ]
    out, _ = kernel.call(*plain)
    want = paged_attend.gathered(inputs, None, "sdpa").float().numpy()
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=0, atol=0.02)


def test_jax_runs_the_step_on_a_cache_in_fp8(rng):
    config = NSAConfig(num_selected=6, window=130)
    cache = nsa_jax.PagedCache(14, 1, 128, 128, config=config, dtype=jnp.float8_e4m3fn)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(14)[:13][None], jnp.int32)
    at = table, jnp.asarray([652], jnp.int32)
    cache = nsa_jax.append(cache, draw(652, 1, 128), draw(652, 1, 128), *at)
    asked = draw(1, 16, 128), jnp.asarray(rng.random((1, 16, 3), np.float32)), cache, *at
    with interpreted(True):
        out = nsa_jax.paged_attention(*asked, implementation="mosaic")
    want = nsa_jax.paged_attention(*asked, implementation="gathered")
    close = np.abs(np.asarray(out, np.float32) - np.asarray(want, np.float32)).max()
    assert 0 < close < 0.02


# New tokens.


def before_append(made, seed=5):
    """The same problem, in which the tokens of the call are not in the pages yet, and the means
    that they finish are not either: arrays of a step that appends, and the pages that it leaves.
    """
    spec, arrays = dataclasses.replace(made.spec, append=True), dict(made.arrays)
    rng, dtype = np.random.default_rng(seed), arrays["query"].dtype
    after = {x: made.arrays[x].copy() for x in made.arrays if x.endswith(("_key", "_value"))}
    for kind, width in (("key", spec.D), ("value", spec.Dv)):
        shape = spec.pages, spec.block, spec.Hkv, width
        after[f"raw_{kind}"] = rng.standard_normal(shape, np.float32).astype(dtype)
    before = {name: x.copy() for name, x in after.items()}
    new = {
        f"new_{branch}_{kind}": np.full((spec.tokens, spec.Hkv, width), np.nan, dtype)
        for branch in ("raw", "selected", "sliding")
        for kind, width in (("key", spec.D), ("value", spec.Dv))
    }
    rows = [{k: tuple(x.copy() for x in v) for k, v in row.items()} for row in made.rows]
    for b, i in np.ndindex(spec.B, spec.q_len):
        position, token = made.lengths[b] - spec.q_len + i, spec.q_len * b + i
        if position < 0:
            continue
        table = made.arrays["page_table"][b]
        at = lambda p, table=table: (table[p // spec.block], p % spec.block)
        for name, x in new.items():
            branch = name.removeprefix("new_")
            x[token] = after[branch][at(position)]
            before[branch][at(position)] = np.nan
        begin = position - spec.compress_block + 1
        if begin < 0 or begin % spec.stride:
            continue
        page, slot = at(position)[0], position % spec.block // spec.stride
        window = [at(p) for p in range(begin, position + 1)]
        for kind, own in zip(("key", "value"), rows[b]["compressed"], strict=True):
            mean = np.mean([after[f"raw_{kind}"][p].astype(np.float32) for p in window], 0)
            after[f"compressed_{kind}"][page, slot] = mean.astype(dtype)
            before[f"compressed_{kind}"][page, slot] = np.nan
            own[begin // spec.stride] = mean.astype(dtype).astype(np.float64)
    names = "query", "gates", "page_table", "lengths"
    order = [x for x in before if not x.startswith("raw")]
    kept = {x: arrays[x] for x in names} | {x: before[x] for x in order}
    kept |= new | {x: before[x] for x in ("raw_key", "raw_value")}
    return dataclasses.replace(made, spec=spec, arrays=kept, rows=rows), after


def check_append(lengths, seed=0, **sizes):
    spec = dataclasses.replace(PAPER, B=len(lengths), **sizes)
    made, after = before_append(oracle.problem(spec, lengths, seed))
    found = run(made.spec, made)
    for name, wanted in after.items():
        same = made.arrays[name].view(np.int16) == wanted.view(np.int16)
        both_nan = np.isnan(made.arrays[name].astype(np.float32)) & np.isnan(
            wanted.astype(np.float32)
        )
        assert (same | both_nan).all(), name
    return compare(made, *found)


APPENDS = {
    "borders": CASES["borders"],
    "three queries": ([2, 1090, 64, 66, 33], CASES["three queries"][1]),
    "wide, several heads": ([1296, 1300], {"D": 192, "H": 6, "Hkv": 2}),
    "other blocks": ([3008, 40], CASES["long blocks"][1]),
    "cover 4": CASES["cover 4"],
    "cluster of 3": CASES["cluster of 3"],
}


def rounded_tokens(x):
    """Codes and scales of tokens."""
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(-1), np.float32(1e-30))
    codes = (x * (np.float32(448) / largest)[..., None]).clip(-448, 448).astype(oracle.E4M3)
    return codes, largest * np.float32(1 / 448)


def before_append_in_fp8(made, seed=5):
    """`before_append` of pages in fp8. What a ring has of a row's older tokens is what was rounded,
    but for some, of which it has anything.
    """
    rings = made.spec.B + 2
    spec = dataclasses.replace(made.spec, append=True, rings=rings)
    rng, half = np.random.default_rng(seed), made.arrays["query"].dtype
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(half)
    after = {k: x.copy() for k, x in made.arrays.items() if "_key" in k or "_value" in k}
    slots = rng.permutation(rings)[: spec.B].astype(np.int32)
    rows = [{k: [x.copy() for x in v] for k, v in row.items()} for row in made.rows]
    new = {}
    for number, (kind, width) in enumerate((("key", spec.D), ("value", spec.Dv))):
        raw = normal(spec.pages, spec.block, spec.Hkv, width)
        after[f"raw_{kind}"], scale = rounded_tokens(raw)
        after[f"raw_{kind}_scale"] = np.ascontiguousarray(scale.swapaxes(1, 2))
        ring = normal(rings, spec.ring, spec.Hkv, width)
        for branch in ("raw", "selected", "sliding"):
            new[f"new_{branch}_{kind}"] = normal(spec.tokens, spec.Hkv, width)
        stored = (after[f"raw_{kind}"].astype(np.float32) * scale[..., None]).astype(half)
        given = {}  # by row and position, what counts of raw tokens
        for b, length in enumerate(made.lengths):
            table, first = made.arrays["page_table"][b], length - spec.q_len
            for p in range(max(first - spec.ring, 0), max(first, 0)):
                at = table[p // spec.block], p % spec.block
                given[b, p] = stored[at]
                if p % 7 != 2 and p < first:
                    given[b, p] = raw[at]
                    ring[slots[b], p % spec.ring] = raw[at]
        after[f"recent_{kind}"] = ring.copy()
        if number == 0:
            before_rings = {}
        before_rings[f"recent_{kind}"] = ring
        for b, i in np.ndindex(spec.B, spec.q_len):
            length, token = made.lengths[b], spec.q_len * b + i
            p = length - spec.q_len + i
            if p < 0:
                continue
            table = made.arrays["page_table"][b]
            page, place = table[p // spec.block], p % spec.block
            for branch in ("raw", "selected", "sliding"):
                codes, scale = rounded_tokens(new[f"new_{branch}_{kind}"][token])
                after[f"{branch}_{kind}"][page, place] = codes
                after[f"{branch}_{kind}_scale"][page, :, place] = scale
                if branch != "raw":
                    exact = codes.astype(np.float64) * scale[..., None]
                    rows[b][branch][number][p] = exact
            given[b, p] = new[f"new_raw_{kind}"][token]
            after[f"recent_{kind}"][slots[b], p % spec.ring] = given[b, p]
            begin = p - spec.compress_block + 1
            if begin < 0 or begin % spec.stride:
                continue
            window = [given[b, q].astype(np.float32) for q in range(begin, p + 1)]
            mean = np.mean(window, 0).astype(half)
            at, exact = place // spec.stride, mean.astype(np.float64)
            if kind == "key":
                after["compressed_key"][page, at] = mean
            else:
                codes, scale = rounded_tokens(mean)
                after["compressed_value"][page, at] = codes
                after["compressed_value_scale"][page, :, at] = scale
                exact = codes.astype(np.float64) * scale[..., None]
            rows[b]["compressed"][number][begin // spec.stride] = exact
    before = {name: x.copy() for name, x in after.items()} | before_rings
    for b, i in np.ndindex(spec.B, spec.q_len):  # what the step writes is NaN
        p = made.lengths[b] - spec.q_len + i
        if p < 0:
            continue
        page, place = made.arrays["page_table"][b][p // spec.block], p % spec.block
        ends = (p - spec.compress_block + 1) % spec.stride == 0 and p >= spec.compress_block - 1
        for name, x in before.items():
            if name.startswith("recent") or (name.startswith("compressed") and not ends):
                continue
            at = place // spec.stride if name.startswith("compressed") else place
            x[(page, slice(None), at) if name.endswith("scale") else (page, at)] = np.nan
    names = "query", "gates", "page_table", "lengths"
    pages = [x for x in made.arrays if x in before]
    kept = {x: made.arrays[x] for x in names} | {x: before[x] for x in pages}
    branches = "raw", "selected", "sliding"
    kept |= {x: new[x] for b in branches for x in (f"new_{b}_key", f"new_{b}_value")}
    rest = [f"{x}_{kind}" for x in ("raw", "recent") for kind in ("key", "value")]
    rest[2:2] = ["raw_key_scale", "raw_value_scale"]
    kept |= {x: before[x] for x in rest} | {"slots": slots}
    rows = [{k: tuple(v) for k, v in row.items()} for row in rows]
    return dataclasses.replace(made, spec=spec, arrays=kept, rows=rows), after


APPENDS_IN_FP8 = {
    "fp8, borders": ([0, 1, 31, 32, 47, 48, 64, 65, 1023, 1025, 1024], {"pages": 120}),
    "fp8, three queries": ([2, 1090, 64, 66, 33], CASES["three queries"][1]),
    "fp8, wide, several heads": ([1296, 1300], {"D": 192, "H": 6, "Hkv": 2}),
    "fp8, other blocks": ([3008, 40], CASES["long blocks"][1]),
    "fp8, cluster of 3": CASES["fp8, cluster of 3"],
}


@pytest.mark.parametrize("name", APPENDS_IN_FP8)
def test_a_step_rounds_its_tokens_and_puts_them_in_pages_and_rings(name):
    """Means are of tokens that were not rounded, where the row's ring has them."""
    lengths, sizes = APPENDS_IN_FP8[name]
    assert check_append_in_fp8(lengths, **sizes | {"fp8": True}) > 0.9


def check_append_in_fp8(lengths, seed=0, **sizes):
    spec = dataclasses.replace(PAPER, B=len(lengths), **sizes)
    made, after = before_append_in_fp8(oracle.problem(spec, lengths, seed))
    found = run(made.spec, made)
    for name, wanted in after.items():
        mine, theirs = (x.astype(np.float32) for x in (made.arrays[name], wanted))
        np.testing.assert_array_equal(mine, theirs, name)
    return compare(made, *found)


@pytest.mark.parametrize("name", APPENDS)
def test_a_step_puts_its_tokens_in_the_pages(name):
    """And the means that they finish, and attends to them; other memory is not touched."""
    lengths, sizes = APPENDS[name]
    assert check_append(lengths, **sizes) > 0.9


def test_a_token_without_a_page_is_not_put():
    """By an entry of no page, beyond the pool, beyond the table, or in a row of length 0."""
    spec = dataclasses.replace(PAPER, B=5, table_pages=6)
    made, _ = before_append(oracle.problem(spec, [100, 120, 384, 90, 65]))
    table, lengths = made.arrays["page_table"], made.arrays["lengths"]
    table[0, 1], table[1, 1], lengths[2], lengths[3] = -1, spec.pages, 386, 0
    before = {name: x.copy() for name, x in made.arrays.items()}
    run(made.spec, made)
    bits = lambda x, name: x[name].view(np.int16)
    changed = [
        tuple(at)
        for name in ("raw_key", "selected_value", "sliding_key")
        for at in np.argwhere((bits(made.arrays, name) != bits(before, name)).any((-2, -1)))
    ]
    assert set(changed) == {(table[4, 1], 0)}


# Mutants.

SMALL = {"lengths": [652, 641, 611], "n": 6, "window": 130}


def work(**changes):
    """`Work.of` with other numbers: functions of the lane and of the number."""
    of = decode_lane.Work.of

    def wrong(lane, seen):
        right = of(lane, seen)
        new = {name: change(lane, getattr(right, name)) for name, change in changes.items()}
        return dataclasses.replace(right, **new)

    return decode_lane.Work, "of", wrong


def without_a_block(self, block, choose=body._Step.choose):
    choose(self, np.where(self.lane.lane == 5, np.int32(-1), block))


def without_following(self, address, offset=0, read=ClusterWarps.read):
    found = read(self, address, offset)
    return found * 0 if offset == 12 else found


def fewer_bytes(lane, work, expected=decode_exchange.expected_bytes):
    first, *others = expected(lane, work)
    return [first - 8, *others]


def refilled_at_once(self, *turn, refill=decode_streams.Queue.refill, **options):
    """`Queue.refill`, not waiting for the lanes that still read the stage."""
    with mock.patch.object(ClusterWarps, "sync", lambda self: None):
        refill(self, *turn, **options)


def of_the_next_rows(self, to, first, copy=decode_streams._Pages._copy_scales):
    copy(self, to, first + 4)


FP8_MUTANTS = {
    "scales of the next rows": (decode_streams._Pages, "_copy_scales", of_the_next_rows),
    "a lane's scales are its neighbour's": (
        decode_streams.Queue,
        "_scales",
        lambda self, *at, scales=decode_streams.Queue._scales: [
            x[::-1] for x in scales(self, *at)
        ],
    ),
    "a row's queries have the power of another": (
        ClusterWarps,
        "exchange",
        lambda self, x, distance: x,
    ),
    "codes of neighbouring keys are taken for neighbouring columns": (
        ClusterWarps,
        "even_and_odd",
        lambda self, x: x,
    ),
    "sums stay in their first range": (decode_streams, "MOST_P_EXPONENT", 120),
}
MUTANTS = {
    "a strip is copied over while it is read": (
        decode_streams.Queue,
        "refill",
        refilled_at_once,
    ),
    "a strip is read before it came": (
        ClusterWarps,
        "wait_for_copies",
        lambda self, left, wait=ClusterWarps.wait_for_copies: wait(self, left + 1),
    ),
    "all strips share a stage": (
        decode_streams.Queue,
        "_stage",
        lambda self, turn: self.ring,
    ),
    "the window is a key short": work(window_start=lambda lane, x: x + 1),
    "a compressed token of the future": work(count=lambda lane, x: x + 1),
    "a compressed token is missing": work(count=lambda lane, x: x - 1),
    "values that were never written": (
        decode_streams.Queue,
        "clear",
        lambda self, *strip: None,
    ),
    "keys that were never written": (
        decode_exchange,
        "masked",
        lambda lane, s2, *strip: s2,
    ),
    "a selected block is not attended to": (body._Step, "choose", without_a_block),
    "nothing counts for the block before": (ClusterWarps, "read", without_following),
    "ties go to the higher block": (
        decode_topn,
        "_before",
        lambda m, score, block, other_score, other: (
            (score > other_score) | (m.same(score, other_score) & (block > other))
        ),
    ),
    "a barrier expects too few bytes": (decode_exchange, "expected_bytes", fewer_bytes),
    "warps do not meet": (ClusterWarps, "sync_cta", lambda self: None),
    "lanes do not meet": (ClusterWarps, "sync", lambda self: None),
    "nobody waits for the cluster": (ClusterWarps, "wait_for_cluster", lambda self: None),
    "nobody waits for what was pushed": (ClusterWarps, "wait_for_bytes", lambda self, x: None),
    "the scale is 1 % too large": (decode_streams, "LOG2E", decode_streams.LOG2E * 1.01),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        assert check(**SMALL, zero_query=name.startswith("ties")) == 1


@pytest.mark.parametrize("name", [None, *FP8_MUTANTS])
def test_mutants_in_fp8_are_caught(monkeypatch, name):
    if name is None:
        assert check(**SMALL, fp8=True) == 1
        return
    monkeypatch.setattr(*FP8_MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        assert check(**SMALL, fp8=True) == 1


def with_token(**changes):
    """`NewTokens` with other attributes: functions of them."""
    begin = decode_append.NewTokens.__init__

    def wrong(self, *arguments):
        begin(self, *arguments)
        for name, change in changes.items():
            setattr(self, name, change(getattr(self, name)))

    return decode_append.NewTokens, "__init__", wrong


def meeting_late(self, *arguments, begin=decode_streams.Queue.__init__):
    begin(self, *arguments)
    self.meeting = self.meeting + 2


APPEND_MUTANTS = {
    "tokens stand a place too early": with_token(first=lambda x: x - 1),
    "only a row's first token": with_token(count=lambda x: x * 0 + 1),
    "all new tokens lie in the page of the first": (decode_append, "NEW_PAGES", 1),
    "a mean is of the stride alone": (
        decode_append.NewTokens,
        "_add_share",
        lambda self, value, begin, add=decode_append.NewTokens._add_share: add(
            self, value, begin + 1
        ),
    ),
    "tokens are read before they are put": (decode_streams.Queue, "__init__", meeting_late),
    "no mean": (decode_append.NewTokens, "_put_shares", lambda self, *rest: None),
    "no key": (
        decode_append.NewTokens,
        "_put_row",
        lambda self, number, *rest, put=decode_append.NewTokens._put_row: self.lane.m.when(
            number != 4, lambda: put(self, number, *rest)
        ),
    ),
}


NEW = decode_append.NewTokens
FP8_APPEND_MUTANTS = {
    "a ring is believed whatever it has": (
        NEW,
        "_token",
        lambda self, old, low, high, scale, kept: self._numbers(kept),
    ),
    "a ring is never believed": (decode_append, "LEAST_NEAR", -1.0),
    "rings are not kept": with_token(rings=lambda x: x * 0),
    "a mean lacks a share": (
        NEW,
        "_share",
        lambda self, warp, lane, at=NEW._share: at(self, warp & 2, lane),
    ),
    "the largest is that of a lane": (ClusterWarps, "largest", lambda self, x: x),
    "a scale is a power of two": (decode_append, "LARGEST", 256.0),
}


@pytest.mark.parametrize("name", [None, *FP8_APPEND_MUTANTS])
def test_mutants_that_append_to_fp8_are_caught(monkeypatch, name):
    given = dict(lengths=[2, 641, 611, 656], q_len=3, n=6, window=130, table_pages=12, fp8=True)
    if name is None:
        check_append_in_fp8(**given)
        return
    monkeypatch.setattr(*FP8_APPEND_MUTANTS[name])
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_append_in_fp8(**given)


@pytest.mark.parametrize("name", APPEND_MUTANTS)
def test_mutants_that_append_are_caught(monkeypatch, name):
    monkeypatch.setattr(*APPEND_MUTANTS[name])
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_append([2, 641, 611, 656], q_len=3, n=6, window=130, table_pages=12)


def test_the_case_of_mutants_that_append_is_right():
    check_append([2, 641, 611, 656], q_len=3, n=6, window=130, table_pages=12)


@pytest.mark.parametrize("zero_query", [False, True])
def test_the_mutants_case_is_right(zero_query):
    assert check(**SMALL, zero_query=zero_query) == 1


# What is refused, and which variant is taken.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"H": 32}, "H / Hkv of 1 to 16, got 32"),
        ({"H": 24, "Hkv": 16}, "a multiple of Hkv, got 24 and 16"),
        ({"D": 48}, "D of a multiple of 32 up to 192, got 48"),
        ({"Dv": 192}, "Dv of 64 or 128, got 192"),
        ({"q_len": 9}, "q_len of 1 to 8, got 9"),
        ({"n": 33}, "num_selected of 1 to 32, got 33"),
        ({"block": 96}, "select_block / compress_stride of 1, 2, 4, 8 or 16, got 6"),
        ({"stride": 32, "block": 512}, "select_block of 16, 32, 64, 128 or 256, got 512"),
        ({"variant": Variant(1, 8, 4, 128)}, "cluster of 2, 3, 4, 8 or 16, got 1"),
        ({"dtype": "float32"}, "dtype of bfloat16 or float16, got float32"),
        ({"fp8": True, "dtype": "float16"}, "bfloat16 beside pages in fp8, got float16"),
        ({"fp8": True, "D": 96}, "D of 64, 128 or 192 of pages in fp8, got 96"),
        ({"fp8": True, "stride": 32}, "4, 8 or 16 of pages in fp8, got 2"),
        ({"table_pages": 129}, "page tables of up to 128 columns, got 129"),
        ({"D": 192, "variant": EIGHT_WARPS}, "of shared memory, needs"),
    ],
)
def test_what_the_kernel_cannot_do(change, words):
    spec = dataclasses.replace(PAPER, **change)
    assert words in (why_not(spec) or "")
    with pytest.raises(NotImplementedError, match="the decode kernel"):
        decode(spec)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, Variant(8, 4, 2, 128)),
        ({"B": 8, "Hkv": 4, "H": 64}, Variant(4, 4, 4, 128)),
        ({"B": 32, "Hkv": 4, "H": 64}, Variant(2, 4, 2, 128)),
        ({"B": 7, "Hkv": 4, "H": 64, "table_pages": 1024}, Variant(8, 4, 2, 1024)),
        ({"B": 8, "Hkv": 4, "H": 64, "table_pages": 512}, Variant(3, 8, 4, 512)),
        ({"B": 8, "Hkv": 4, "H": 64, "table_pages": 1024}, Variant(3, 8, 3, 1024)),
        ({"B": 1, "Hkv": 4, "H": 64, "table_pages": 1024}, Variant(16, 4, 3, 1024)),
        ({"B": 32, "Hkv": 4, "H": 64, "table_pages": 500}, Variant(2, 8, 4, 512)),
        ({"B": 8, "q_len": 4, "Hkv": 4, "H": 64, "table_pages": 1024}, Variant(2, 8, 2, 1024)),
        ({"B": 32, "table_pages": 2000}, Variant(8, 8, 2, 2560)),
        ({"D": 192, "table_pages": 200}, Variant(8, 4, 4, 512)),
    ],
)
def test_the_variant_follows_batch_and_table(change, wanted):
    found = with_variant(dataclasses.replace(PAPER, **change))
    assert found.variant == wanted and why_not(found) is None


def test_a_table_too_long_for_all_variants_says_so():
    found = with_variant(dataclasses.replace(PAPER, table_pages=3000))
    assert "page tables of up to 2560 columns, got 3000" in (why_not(found) or "")


def test_what_a_step_runs_is_built_ahead():
    """Of any batch and pages of a row, in fp8 too; gates in the dtype of the queries."""
    config = NSAConfig()
    ahead = mosaic_decode.kernels_of(64, 4, 128, 128, "bfloat16", config)
    assert len(set(ahead)) == len(ahead) > 5
    sizes = {"H": 64, "Hkv": 4, "D": 128, "Dv": 128, "dtype": "bfloat16", "config": config}
    for batch, pages in (
        (1, 7),
        (8, 128),
        (32, 128),
        (8, 500),
        (32, 500),
        (8, 1024),
        (1, 2000),
    ):
        for fp8, append in itertools.product((False, True), repeat=2):
            posed = SimpleNamespace(B=batch, T=1, S=64 * pages, is_fp8=fp8, **sizes)
            assert mosaic_decode.kernel_of(posed, append) in ahead, (batch, pages, fp8, append)
    assert not mosaic_decode.kernels_of(64, 2, 128, 128, "bfloat16", config)  # G = 32

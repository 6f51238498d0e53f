"""Products in e4m3 (`compute_dtype`): rounding, errors beside float64, blocks, refusals.

The bounds of errors are those of a model that rounds what the kernels round (`oracles/fp8.py`).
"""

import dataclasses
import functools
import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.judge.parity import assert_parity, check_parity
from kernels_pallas.mosaic import capability
from kernels_pallas.specs import fp8
from nsa_core.config import FLOAT8
from nsa_core.plan.kernels import kernels_of_layer
from nsa_core.varlen import KeyTiles
from nsa_torch import Branches, NSAConfig
from nsa_torch.dispatch import REGISTRY
from tests import paths, refusals
from tests.devices import on_hopper
from tests.jaxprs import equations
from tests.oracles import fp8 as model
from tests.oracles import nsa
from tests.paths import named, to_jax
from tests.posed import pose
from tests.problems import CASES, TABLE, Case, array, problem

PAPER = NSAConfig(compute_dtype=FLOAT8)
SMALL = NSAConfig(16, 16, 32, 3, 1, 1, 40, compute_dtype=FLOAT8)
MIDDLE = NSAConfig(num_selected=6, window=200, compute_dtype=FLOAT8)
CASE = Case(300, 300, 16, 1, 32, 32, config=PAPER, dtype="bfloat16", blocks="given")
NUMBER = [8 * (i % 4 // 2) + 2 * (i // 4) + i % 2 for i in range(16)]  # at each place


# Rounding, emulated


def in_order(x):
    """Pairs `[.., n]` as float64 `[.., 2 n]`, as they are counted."""
    codes = np.ascontiguousarray(x).view(np.uint8)
    groups = codes.reshape(*codes.shape[:-1], -1, 16)
    found = np.empty_like(groups)
    found[..., NUMBER] = groups
    return found.reshape(codes.shape).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded(key, value, end, places, tiles=()):
    """Keys and values in the kernels' codes, their scales and the mean of keys."""
    sizes = *key.shape, value.shape[3], places
    spec = fp8.Rounding(*sizes, "bfloat16", packed=bool(tiles), interpret=True)
    sums = fp8.sum_tokens.__wrapped__(spec)(key, value, end)
    return [
        *map(np.asarray, fp8.round_tokens.__wrapped__(spec)(key, value, end, *sums, *tiles))
    ]


@pytest.mark.parametrize("name", TABLE["rounded to e4m3"])
def test_rounded_tokens(name):
    (batch, count, heads, width, value_width), end, sequences = TABLE["rounded to e4m3"][name]
    rng = np.random.default_rng(0)
    normal = lambda width: rng.normal(size=(batch, count, heads, width))
    key = (normal(width) * np.exp(rng.normal(size=width)) + 3).astype(ml_dtypes.bfloat16)
    value = normal(value_width).astype(ml_dtypes.bfloat16)
    for x, (row, stop) in itertools.product((key, value), enumerate(end)):
        x[row, stop:] = np.nan  # which no query sees
    end, tiles, place_of = np.array(end, np.int32), [], np.arange(count)
    places = -(-count // 64) * 64
    if sequences:
        edges = np.cumsum([0, *sequences, count - sum(sequences)])
        spans = [range(*pair, 64) for pair in itertools.pairwise(edges)]
        first = [at for span in spans for at in span]
        last = [span.stop for span in spans for _ in span]
        tiles = [np.array([x], np.int32) for x in KeyTiles(first, last)]
        places = 64 * len(first)
        begin = 64 * np.cumsum([0, *map(len, spans[:-1])])
        place_of = np.concatenate(
            [b + np.arange(x.stop - x.start) for b, x in zip(begin, spans, strict=True)]
        )
    key8, value8, key_scale, value_scale, mean = rounded(key, value, end, places, tiles)
    tensors = (torch.from_numpy(x.astype(np.float64)) for x in (key, value))
    keys, values, scale = model.rounded(*tensors, torch.from_numpy(end))
    assert (key_scale == scale[:, 0].numpy()).all()
    there = np.arange(count) < end[:, None]
    off = np.abs(in_order(key8)[:, place_of][there] - keys.numpy()[there])
    # The mean in float32 may turn a rounding: to the next number, in few places.
    assert (off > 0).mean() < 0.01 and off.max(initial=0) <= 16
    got = in_order(value8).transpose(0, 3, 1, 2) * value_scale[:, None].astype(np.float64)
    assert (got[:, place_of] == values.numpy()).all()
    assert not np.delete(got, place_of, axis=1).any()
    exact = [row[:stop].astype(np.float64).mean(0) for row, stop in zip(key, end, strict=True)]
    np.testing.assert_allclose(mean, np.stack(exact), rtol=1e-5, atol=1e-5)


def test_infinite_tokens_become_nan():
    key = np.ones((1, 64, 1, 32), ml_dtypes.bfloat16)
    key[0, 5, 0, 3] = np.inf
    key8, value8, *_ = rounded(key, key, np.array([64], np.int32), 64)
    for x in (in_order(key8)[0, :, 0], in_order(value8)[0, 0].T):
        assert np.isnan(x[5, 3]) and np.isnan(x).sum() == 1


# What it is for, and what refuses it


def arrays():
    """Query, key, value and gates of JAX, of a head of keys."""
    return [*map(to_jax, problem(CASE).leaves)]


def gradient(interpreted=capability.interpreted):
    query, *rest = arrays()
    run = functools.partial(nsa_jax.attention, config=PAPER, implementation="mosaic")
    with interpreted(True):
        jax.grad(lambda query: run(query, *rest).astype("float32").sum())(query)


KERNELS = {"heads": 64, "kv_heads": 4, "key_width": 128, "value_width": 128, "scale": None}
KERNELS |= {"dtype": "bfloat16", "config": PAPER}
REFUSED = [
    (gradient, "no gradient"),
    (
        lambda: kernels_of_layer([4096], gradients=True, **KERNELS),
        "no gradient; leave compute_dtype out",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_refuses_it(call, said):
    with pytest.raises((ValueError, NotImplementedError), match=said):
        call()


@refusals.by_row("mosaic in 8 bits")
def test_what_kernels_refuse(row):
    problem = pose("attention", 64, H=16, Hkv=1, config=PAPER, capability=(9, 0), device=None)
    assert capability.why_not(problem) is None
    changed = problem._replace(**row.given())
    found = capability.why_not(changed)
    assert found is not None and found.startswith("compute_dtype='float8_e4m3' ")
    assert row.sentence in found
    exact = changed._replace(config=changed.config.of_sizes)
    assert row.sentence not in (capability.why_not(exact) or "")


def test_explain_says_it():
    assert PAPER.of_sizes == NSAConfig()
    with capability.interpreted(True):
        plan = str(nsa_jax.explain(*arrays(), config=PAPER))
    assert plan.splitlines()[:5] == TABLE["plan in e4m3"].splitlines()


# In the interpreter


@pytest.mark.parametrize("branch", ["selected", "sliding"])
@pytest.mark.usefixtures("interpreted")
def test_a_branch(branch):
    """A chunk of a longer row; keys have a mean."""
    p = problem(CASE.but(T=7, S=75, Dv=16, config=SMALL))
    query, key, value = p.query, p.keys[0] + 3, p.values[0]
    indices, where = [], {"config": SMALL, "kv_len": 75}
    if branch == "selected":
        compressed = nsa_torch.compress(key, config=SMALL)
        by = {"implementation": "reference"}
        indices = [nsa_torch.select_blocks(query, compressed, **where, **by)]
    given, name = [*map(to_jax, (query, key, value, *indices))], f"{branch}_attention"
    function = functools.partial(getattr(nsa_jax, name), implementation="mosaic", **where)
    made = (
        x.aval for e in equations(jax.make_jaxpr(function)(*given).jaxpr) for x in e.outvars
    )
    sizes = {(str(x.dtype), x.size) for x in made if hasattr(x, "size")}
    assert ("float32", query.numel()) not in sizes  # the query is rounded within kernels
    judge = REGISTRY.entry(branch, "reference").load()
    low = {"compute_dtype": torch.bfloat16}
    exact = map(array, judge(*(x.double() for x in (query, key, value)), *indices, **where))
    rough = map(array, judge(query, key, value, *indices, **where, **low))
    for part, mine, want, low in zip(
        ("out", "lse"), map(np.asarray, function(*given)), exact, rough, strict=True
    ):
        assert_parity(part, mine, want, low, dtype="bfloat16", in_float8=True)
        assert np.abs(mine - want).mean() > 0.3 * np.abs(low - want).mean()  # in 8 bits


# On a GPU: errors of a branch


def drawn(case):
    """A problem on the GPU, whose keys have a mean: its arguments, where they stand, and those."""
    p = problem(case)
    p = dataclasses.replace(p, keys=tuple(x + 2 for x in p.keys))
    where = paths.in_torch(p, "cuda")
    return p.of([x.cuda() for x in p.leaves], Branches), where


def error(x, exact):
    """Root of the mean square, and the largest."""
    off = (x.double() - exact).abs()
    return (off**2).mean().sqrt().item(), off.max().item()


def check_branch(case, branch, got, given, indices):
    """`got` beside float64, where the model of the kernel has some error too."""
    query, key, value = (getattr(x, branch, x) for x in given[:3])
    documents = case.documents or (case.S,)
    rows = nsa.Rows(case.T, case.S, documents, "cuda")
    if branch == "selected":
        mask = nsa.selected_mask(indices, case.config, rows)
    else:
        mask = nsa.sliding_mask(case.config, rows)
    mask = mask.expand(case.B, case.Hkv, -1, -1)
    end = torch.full((case.B,), sum(documents), device="cuda")
    real = slice(0, sum(documents) if case.documents else case.T)
    exact, rough = (
        model.attention(query, key, value, mask, end, in_fp8=in_fp8)[:, real]
        for in_fp8 in (False, True)
    )
    assert torch.isfinite(got[:, real]).all() and not got[:, real.stop :].any()
    # Tensor cores keep 13 bits of a sum: each of its steps, of 32 keys, loses half of the last.
    # They are those of a tile's list, or window. Then the output is rounded.
    tokens = max(64 // (case.H // case.Hkv), 1)
    keys = case.config.num_selected * case.config.select_block * tokens
    keys = min(case.S, keys if branch == "selected" else case.config.window + 2 * tokens)
    lost = keys / 32 * 2.0**-14 + torch.finfo(query.dtype).eps
    mine, models = error(got[:, real], exact), error(rough, exact)
    for x, y, size in zip(mine, models, error(exact, 0), strict=True):
        assert x <= 1.25 * y + lost * size, (branch, mine, models, size)
    assert mine[0] > 0.3 * models[0] > 0  # it was in 8 bits


LARGE = CASE.but(D=128, Dv=128, config=MIDDLE)


@on_hopper
@torch.no_grad()
@pytest.mark.parametrize("name", named("gpu fp8: *"))
def test_gpu_branches_and_blocks(name):
    """Both branches, and that the whole takes the blocks that 16 bits choose."""
    case = CASES[name]
    given, where = drawn(case)
    query, key, value, gates = given
    exact = where | {"config": case.config.of_sizes}
    packed = {x: exact[x] for x in ("config", "cu_seqlens") if x in exact}
    compressed = nsa_torch.compress(getattr(key, "compressed", key), **packed)
    place = {} if case.documents else {"kv_len": case.S}
    indices = nsa_torch.select_blocks(
        query, compressed, **exact, **place, implementation="mosaic"
    )
    run = functools.partial(nsa_torch.attention, query, key, value, **where)
    for i, branch in ((1, "selected"), (2, "sliding")):
        alone = torch.zeros_like(gates)
        alone[..., i] = torch.where(gates[..., i].isnan(), torch.nan, 1.0)
        check_branch(case, branch, run(alone, block_indices=indices), given, indices)
    assert torch.equal(run(gates), run(gates, block_indices=indices))


@on_hopper
def test_gpu_log_sum_exp_has_the_mean_of_keys():
    (query, key, value, _), _ = drawn(LARGE.but(D=64, Dv=64))
    found, exact = (
        nsa_torch.sliding_attention(query, key, value, config=x, implementation="mosaic")[1]
        for x in (MIDDLE, MIDDLE.of_sizes)
    )
    # Logits of keys and queries that are each rounded by 1 in 16 at most, 64 columns in sum.
    assert (found - exact).abs().max() < 0.5 and (found - exact).abs().mean() < 0.05


@on_hopper
def test_gpu_refuses_gradients():
    given = [x.requires_grad_() for x in drawn(LARGE)[0]]
    with pytest.raises(NotImplementedError, match=f"compute_dtype='{FLOAT8}' has no gradient"):
        nsa_torch.attention(*given, config=MIDDLE, implementation="mosaic")
    with torch.no_grad():  # automatic choice
        out = nsa_torch.attention(*given, config=MIDDLE)
    assert torch.equal(out, nsa_torch.attention(*(x.detach() for x in given), config=MIDDLE))


@on_hopper
@pytest.mark.parametrize("documents", [None, (150, 1, 129)], ids=["rows", "packed"])
def test_gpu_jax_is_torch(documents):
    """The same kernels, so the same bits."""
    p = problem(LARGE.but(H=32, Hkv=2, documents=documents))
    given = [x.cuda() for x in p.leaves]
    with torch.no_grad():
        wanted = nsa_torch.attention(*given, **paths.in_torch(p, "cuda"))
    options = paths.in_jax(p, metadata=True) | {"implementation": "mosaic"}
    attend = jax.jit(functools.partial(nsa_jax.attention, **options))
    mine = [jax.dlpack.from_dlpack(x) for x in given]
    assert torch.equal(torch.from_dlpack(attend(*mine)), wanted)
    loss = lambda q: attend(q, *mine[1:]).astype("float32").sum()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        jax.grad(loss)(mine[0])


def test_the_slope_of_errors_follows_the_yardsticks():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=2 * 10**5)
    noise = lambda: rng.normal(size=exact.size) * 0.03
    rough = 0.99 * exact + noise()
    judge = functools.partial(check_parity, "x", dtype="bfloat16", in_float8=True)
    assert judge(0.985 * exact + noise(), exact, rough).ok
    found = judge(0.975 * exact + noise(), exact, rough)
    assert not found.ok and "slope 0.97" in found.reason
    assert not check_parity("x", 0.99 * exact, exact, rough, dtype="bfloat16").ok

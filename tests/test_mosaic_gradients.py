"""Gradients of the Mosaic kernels in Pallas' GPU interpreter, against autodiff in float64.

The selection is the reference's and frozen. As `test_mosaic.py`, races included.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from bench.judge.parity import assert_parity
from kernels_pallas.mosaic import dkv_gathered, dkv_interval, dkv_step
from kernels_pallas.specs import block_query_lists, dkv, work_items
from kernels_pallas.specs.work_items import WorkItem
from nsa_core.config import NSAConfig
from nsa_core.steps import mosaic_backward
from nsa_core.types import Branches
from nsa_jax import reference
from tests import torch_oracle
from tests.inputs import Case, call, once, problem
from tests.limits import set_limits
from tests.test_mosaic import patched, steps_of

BLOCKS = NSAConfig(16, 8, 64, num_selected=3, num_local=1, window=50)
LARGE = NSAConfig(16, 8, 128, num_selected=2, num_local=1, window=30)
# Large groups, whose dS is stored: `test_stored_ds.py`.
CASES = {
    "G3": Case(26, 70, H=3, Hkv=1, D=48, Dv=32, B=1, dtype="bfloat16"),
    # Tokens that copies bring together choose different blocks, all of whose keys they see.
    "G4": Case(28, 222, H=4, Hkv=1, D=32, Dv=16, B=2, config=BLOCKS, dtype="float16"),
    "packed": Case(60, 60, H=6, Hkv=2, B=1, segments=(20, 1, 34, -5), dtype="bfloat16"),
    "wide": Case(20, 20, H=2, Hkv=1, D=192, Dv=128, B=1, dtype="bfloat16"),
}
# A block of the second sequence stands in three tiles of keys.
BLOCK_128 = Case(
    24, 220, H=2, Hkv=1, B=1, config=LARGE, segments=(10, 200, -10), dtype="float16"
)
EMPTY = Case(5, 5, H=2, Hkv=1, B=1, dtype="bfloat16")
TINY = Case(20, 20, H=2, Hkv=1, B=1, dtype="bfloat16")
STEPS = ("compressed_attention", "selected_attention", "sliding_attention")
NAMES = (
    "query",
    "key.selected",
    "key.sliding",
    "value.selected",
    "value.sliding",
    "gates",
    "compressed_key",
    "compressed_value",
)


def puller(function):
    """`pulled` with the same function, compiled once."""

    @jax.jit
    def both(arrays, cotangents):
        outputs, pull = jax.vjp(function, *arrays)
        return pull(jax.tree.map(lambda x, y: x.astype(y.dtype), cotangents, outputs))

    return lambda *arguments: [np.asarray(x) for x in both(*arguments)]


def pulled(function, arrays, cotangents):
    """Gradients of the arrays from those of the outputs, NumPy."""
    return puller(function)(arrays, cotangents)


def widened(arrays):
    return [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]


@once
def references(step, arrays, rest, cotangents, **where):
    """Gradients of `SLOW[step](arrays, *rest, **where)`, exact and in the arrays' own precision."""
    if torch_oracle.USED:
        given = {"cotangents": jax.tree.leaves(cotangents), **where}
        both = (
            torch_oracle.results(step, arrays + rest, exact=exact, **given)
            for exact in (True, False)
        )
        return tuple(gradients for _, gradients in both)

    def attend(dtype):
        return lambda *arrays: SLOW[step](arrays, *rest, compute_dtype=dtype, **where)

    with jax.enable_x64(True):
        exact = pulled(attend(None), widened(arrays), cotangents)
    return exact, pulled(attend(arrays[0].dtype), arrays, cotangents)


def compare(names, fast, step, arrays, rest, cotangents, **where):
    """Gradients of `fast(*arrays)` against those of `SLOW[step](arrays, *rest, **where)`."""
    got = pulled(fast, arrays, cotangents)
    dtype = arrays[0].dtype
    found = references(step, tuple(arrays), tuple(rest), cotangents, **where)
    for name, array, *parts in zip(names, arrays, got, *found, strict=True):
        assert parts[0].dtype == array.dtype
        assert_parity(f"d{name}", *parts, dtype=dtype)


def normal(shape, dtype, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def slow_step(arrays, *rest, name, **options):
    return getattr(reference, name)(*arrays, *rest, **options)


def slow_whole(arrays, indices, **options):
    query, key, sliding_key, value, sliding_value, gates, *compressed = arrays
    parts = (
        reference.compressed_attention(query, *compressed, **options),
        reference.selected_attention(query, key, value, indices, **options),
        reference.sliding_attention(query, sliding_key, sliding_value, **options),
    )
    gates = Branches(*jnp.unstack(gates, axis=-1))
    return reference.combine(Branches(*(out for out, _ in parts)), gates)


SLOW = {name: functools.partial(slow_step, name=name) for name in STEPS}
SLOW["whole"] = slow_whole


def check_step(p, name, indices=None):
    """Gradients of one branch, through its output and its log-sum-exp."""
    arrays, rest = steps_of(p)[name][:3], steps_of(p)[name][3:]
    rest = rest if indices is None else (indices,)
    shape = arrays[0].shape[:3]
    cotangents = normal((*shape, p.case.Dv), p.query.dtype), normal(shape, jnp.float32, 2)

    def fast(*arrays):
        step = getattr(nsa_jax, name)
        return step(*arrays, *rest, implementation="mosaic", **p.where)

    names = [f"{part} of {name}" for part in ("query", "key", "value")]
    compare(names, fast, name, arrays, rest, cotangents, **p.where)


def arrays_of(p):
    """What the gradients of the whole are taken of, as `NAMES`, and the selection."""
    steps = steps_of(p)
    compressed = steps["compressed_attention"][1:]
    other = problem(p.case, 3)  # keys and values of the sliding branch are others
    arrays = (p.query, p.key, other.key, p.value, other.value, p.gates, *compressed)
    return arrays, steps["selected_attention"][3]


def whole(p, indices, implementation="mosaic", **options):
    options |= {"config": p.case.config, "segment_ids": p.segment_ids}

    def attend(query, key, sliding_key, value, sliding_value, gates, *compressed):
        return nsa_jax.attention(
            query,
            Branches(key, key, sliding_key),
            Branches(value, value, sliding_value),
            gates,
            compressed=compressed,
            block_indices=indices,
            implementation=implementation,
            **options,
        )

    return attend


def check_whole(p):
    arrays, indices = arrays_of(p)
    cotangent = normal((*p.query.shape[:3], p.case.Dv), p.query.dtype)
    fast = whole(p, indices)
    compare(NAMES, fast, "whole", arrays, (indices,), cotangent, **p.where)


@pytest.fixture
def in_pieces(monkeypatch):
    """Partial sums are many, so that there is something to add up."""
    set_limits(monkeypatch, min_interval=1, item_entries=4)
    mosaic_backward._interval_split.cache_clear()
    yield
    mosaic_backward._interval_split.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_whole(name, interpreted):
    check_whole(problem(CASES[name]))


def check_recomputed(implementation):
    """The same gradients, of kernels bit by bit, and no output of a branch is kept."""
    p = problem(TINY)
    arrays, _ = arrays_of(p)
    cotangent = normal((*p.query.shape[:3], p.case.Dv), p.query.dtype)
    results = []
    for recompute in (False, True):
        attend = whole(p, None, implementation, recompute=recompute)
        out, pull = jax.vjp(jax.jit(attend), *arrays)
        kept = [x for x in jax.tree.leaves(pull) if x.shape == out.shape]
        results.append((out, pull(cotangent), len(kept)))
    (one, kept, count), (other, again, fewer) = results
    assert count >= fewer + 3
    # Kernels round the sum of the branches after each, unless these are kept.
    np.testing.assert_allclose(*map(jnp.float32, (one, other)), rtol=2e-2, atol=2e-2)
    for name, x, y in zip(NAMES, kept, again, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        # XLA rounds an output that it keeps, and not one that it computes again: one rounding.
        rounding = 0 if implementation == "mosaic" else 2.0**-7 * abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=rounding, err_msg=name)


def test_recomputed(interpreted):
    check_recomputed("mosaic")


def test_recomputed_without_kernels():
    check_recomputed("xla")


@pytest.mark.parametrize("name", STEPS)
def test_step(name, interpreted, in_pieces):
    check_step(problem(CASES["packed"]), name)


def test_blocks_across_tiles(interpreted):
    check_step(problem(BLOCK_128), "selected_attention")


def test_no_compressed_token(interpreted):
    check_whole(problem(EMPTY))


def test_queries_that_see_nothing(interpreted):
    """Empty slots anywhere, queries without a block, blocks of the future; no window."""
    config = dataclasses.replace(TINY.config, num_selected=3, window=0)
    p = problem(dataclasses.replace(TINY, config=config))
    indices = np.random.default_rng(0).permuted(
        np.tile(np.arange(3) - 1, (1, 20, 1, 1)), axis=-1
    )
    indices[:, ::4] = -1
    check_step(p, "selected_attention", jnp.asarray(indices, jnp.int32))
    check_step(p, "sliding_attention")


def test_gates_of_any_sign(interpreted, in_pieces):
    """The exponent has the size of a gate and its last bit the sign; many are 0."""
    p = problem(dataclasses.replace(TINY, T=40, S=40))
    gates = normal(p.gates.shape, jnp.float32).round(1)
    assert (gates < 0).any() and (gates == 0).any()
    check_whole(dataclasses.replace(p, gates=gates.astype(p.gates.dtype)))


def test_keys_behind_the_queries(interpreted):
    """Of a cache whose room is not filled: their gradients are zero, all others as without them."""
    length, config = 60, dataclasses.replace(TINY.config, window=20)
    p = problem(Case(5, 520, H=16, Hkv=1, B=1, config=config, dtype="bfloat16"))
    do = normal((*p.query.shape[:3], p.case.Dv), jnp.bfloat16)

    def gradients(key, value, kv_len):
        def attend(query, key, value):
            options = {"config": config, "kv_len": kv_len, "implementation": "mosaic"}
            return nsa_jax.sliding_attention(query, key, value, **options)[0]

        return pulled(attend, (p.query, key, value), do)

    found = gradients(p.key, p.value, jnp.int32(length))
    wanted = gradients(p.key[:, :length], p.value[:, :length], length)
    np.testing.assert_array_equal(found[0], wanted[0])
    for grad, own in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(grad[:, :length], own)
        assert not grad[:, length:].any()


def test_causality(interpreted):
    """The gradient of output `u` is exactly zero at every later input."""
    p, token = problem(TINY), 12
    _, indices = arrays_of(p)
    options = {"config": p.case.config, "block_indices": indices, "implementation": "mosaic"}
    attend = functools.partial(nsa_jax.attention, **options)
    cotangent = jnp.zeros_like(p.query).at[:, token].set(1)
    found = pulled(attend, (p.query, p.key, p.value, p.gates), cotangent)
    for name, grad in zip(("query", "key", "value", "gates"), found, strict=True):
        assert (grad[:, token + 1 :] == 0).all(), name
        assert grad[:, token].any(), name
        assert grad[:, :token].any() == (name in ("key", "value"))


def poisoned(array, rows):
    return array.at[:, -rows:].set(jnp.nan)


def test_padding_may_be_nan(interpreted):
    """What no query may see is not read; what sees nothing has a gradient of zero."""
    p = problem(Case(24, 40, H=2, Hkv=1, B=1, dtype="bfloat16", segments=(16, 17, -7)))
    arrays, indices = arrays_of(p)
    cotangent = normal((*p.query.shape[:3], p.case.Dv), p.query.dtype)
    pull = puller(whole(p, indices))
    clean = pull(arrays, cotangent)
    # Compressed tokens are made of whole sequences.
    arrays = (*(poisoned(x, 7) for x in arrays[:6]), *arrays[6:])
    found = pull(arrays, poisoned(cotangent, 7))
    for name, grad, want in zip(NAMES, found, clean, strict=True):
        np.testing.assert_array_equal(grad, want, name)
        if "compressed" not in name:
            assert not grad.astype(np.float32)[:, -7:].any(), name


@pytest.mark.parametrize("name", STEPS)
def test_padding_of_a_step_may_be_nan(name, interpreted):
    p = problem(Case(24, 40, H=2, Hkv=1, B=1, dtype="bfloat16", segments=(16, 17, -7)))
    *arrays, last = steps_of(p)[name]
    arrays, rest = ([*arrays, last], []) if len(arrays) == 2 else (arrays, [last])
    shape = arrays[0].shape[:3]
    cotangents = normal((*shape, p.case.Dv), p.query.dtype), normal(shape, jnp.float32, 2)

    def step(*arrays):
        function = getattr(nsa_jax, name)
        return function(*arrays, *rest, implementation="mosaic", **p.where)

    pull = puller(step)
    clean = pull(arrays, cotangents)
    count = 1 if name.startswith("compressed") else 3
    arrays = [*(poisoned(x, 7) for x in arrays[:count]), *arrays[count:]]
    found = pull(arrays, tuple(poisoned(x, 7) for x in cotangents))
    for grad, want in zip(found, clean, strict=True):
        np.testing.assert_array_equal(grad, want)


def test_vmap_equals_a_loop_bit_by_bit(interpreted):
    p, other = problem(TINY), problem(TINY, 1)
    (query, key, value), (indices,) = steps_of(p)[STEPS[1]][:3], steps_of(p)[STEPS[1]][3:]

    def loss(query, key):
        options = {"config": TINY.config, "implementation": "mosaic"}
        out, lse = nsa_jax.selected_attention(query, key, value, indices, **options)
        return out.astype(jnp.float32).sum() + lse.sum()

    gradient = jax.grad(loss, (0, 1))
    mapped = call(jax.vmap(gradient, (0, None)), jnp.stack([query, other.query]), key)
    alone = jax.jit(gradient)
    for i, one in enumerate((query, other.query, other.query)):  # the last repeats itself
        for got, want in zip(mapped, alone(one, key), strict=True):
            np.testing.assert_array_equal(np.asarray(got[min(i, 1)]), np.asarray(want))


# Mutants: wrong kernels and lists that the checks above must catch.


def caught(name, part, case=TINY):
    with pytest.raises(AssertionError, match=f"d{part} of {name}: "):
        check_step(problem(case), name)


def changed(monkeypatch, module, name, change):
    """`module.name` with `change(result)` for a result."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: change(original(*args)))


def changed_outputs(monkeypatch, module, name, change):
    """The kernel `module.name(spec)` with `change(outputs)` for its outputs."""
    original = getattr(module, name)
    kernel = lambda spec: lambda *arrays: change(original(spec)(*arrays))
    monkeypatch.setattr(module, name, kernel)


def test_a_missing_scale_is_caught(mutant, monkeypatch):
    original = dkv.partials

    def partials(spec):
        def run(*arrays):
            first, *rest = original(spec)(*arrays)
            return first / spec.scale, *rest

        return run

    monkeypatch.setattr(dkv, "partials", partials)
    caught("sliding_attention", "key")


def test_a_missing_offset_is_caught(mutant, monkeypatch):
    """The gate times the product of the output and its gradient."""
    changed(monkeypatch, mosaic_backward, "row_stats", lambda found: found.at[..., 1].set(0.0))
    caught("compressed_attention", "query")


def test_a_mask_off_by_one_is_caught(mutant, monkeypatch):
    def broadcasted_iota(dtype, shape, dimension, **options):
        found = plgpu.broadcasted_iota(dtype, shape, dimension, **options)
        return found + int(dimension == 0)

    plgpu = dkv_step.plgpu
    wrong = patched(plgpu, broadcasted_iota=broadcasted_iota)
    monkeypatch.setattr(dkv_step, "plgpu", wrong)
    caught("sliding_attention", "key")


def test_a_lost_entry_is_caught(mutant, monkeypatch):
    begin, end = map(WorkItem._fields.index, ("begin", "end"))

    def shorter(outputs):
        table, *partials = outputs
        last = jnp.maximum(table[:, begin], table[:, end] - 1)
        return table.at[:, end].set(last), *partials

    changed_outputs(monkeypatch, work_items, "work_items", shorter)
    caught("selected_attention", "key")


def test_sums_that_are_not_added_are_caught(mutant, monkeypatch, in_pieces):
    original = dkv.merge

    def merge(spec):
        return lambda *arrays: original(spec)(*arrays[:-1], (arrays[-1] + 1) // 2)

    monkeypatch.setattr(dkv, "merge", merge)
    caught("selected_attention", "key", CASES["packed"])


def test_a_lost_token_of_a_query_tile_is_caught(mutant, monkeypatch):
    def first_token_only(outputs):
        query_tile, token_bits = outputs
        bits = token_bits & (2**16 - 1)
        return query_tile, token_bits - bits + (bits & -bits)

    changed_outputs(monkeypatch, block_query_lists, "fill_lists", first_token_only)
    caught("selected_attention", "key")


# The first wait of intervals is that of a warpgroup which leaves a step out: it reads nothing.
@pytest.mark.parametrize(
    ("name", "body", "missing"),
    [("selected_attention", dkv_gathered, 1), ("sliding_attention", dkv_interval, 2)],
    ids=["selected", "sliding"],
)
def test_a_wait_that_is_missing_is_a_race(name, body, missing, mutant, monkeypatch):
    """Queries are read before they have come."""
    waits = []

    def barrier_wait(barrier):
        waits.append(barrier)
        if len(waits) != missing:
            plgpu.barrier_wait(barrier)

    plgpu = body.plgpu
    monkeypatch.setattr(body, "plgpu", patched(plgpu, barrier_wait=barrier_wait))
    with contextlib.suppress(AssertionError, jax.errors.JaxRuntimeError):
        check_step(problem(TINY), name)
    assert any(detector.races_found for detector in mutant)

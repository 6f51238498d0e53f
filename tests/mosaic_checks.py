"""Checks of Mosaic kernels against JAX's reference: forward, and gradients, the selection frozen.

Tests on GPUs and those of gathered and of stored parts have them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import nsa_jax
from bench.judge.parity import assert_parity, check_indices
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_jax import geometry, reference
from tests import torch_oracle
from tests.inputs import (
    SMALL,
    Case,
    any_blocks,
    call,
    once,
    oracle,
    problem,
    selection,
    yardstick,
)

# A block of every 16 keys: many candidates.
FINE = NSAConfig(16, 16, 16, num_selected=6, window=10)
PACKED = Case(80, 90, 3, 1, B=1, segments=(20, 1, 43, 8, -18), dtype="bfloat16")
# Of a score, relatively: what float32 arithmetic on the chip may leave undecided.
RESOLUTION = 1e-4


def compare(name, actual, arrays, **options):
    """Against the float64 oracle and the yardstick."""
    exact, low = oracle(name, *arrays, **options), yardstick(name, *arrays, **options)
    for part, got, want, rough in zip(("out", "lse"), actual, exact, low, strict=True):
        dtype = arrays[0].dtype
        assert_parity(f"{name}.{part}", np.asarray(got), want, rough, dtype=dtype)


@once
def compressed(x, **options):
    return call(nsa_jax.compress, x, **options)


def compressed_of(p):
    options = {"config": p.case.config, "segment_ids": p.segment_ids}
    return tuple(compressed(x, **options) for x in (p.key, p.value))


def run(step, *arrays, **options):
    return call(getattr(nsa_jax, step), *arrays, implementation="mosaic", **options)


def check_selection(p, key, indices):
    """`indices` are the oracle's, or worse by less than `RESOLUTION`."""
    scores = oracle("block_scores", p.query, key, **p.where)
    length = {"kv_len": p.case.S}
    where = geometry.query_layout(p.case.B, p.case.T, **p.where | length)
    position = np.asarray(where.position)
    assert (position == position[0]).all()
    parity = check_indices(np.asarray(indices), scores, position[0], p.case.config)
    assert parity.ok, parity.reason
    assert parity.error_max <= RESOLUTION


def steps_of(p):
    """Arguments of the three attentions, by name; the selection is the reference's."""
    compressed = compressed_of(p)
    indices = selection(p.query, compressed[0], **p.where)
    return {
        "compressed_attention": (p.query, *compressed),
        "selected_attention": (p.query, p.key, p.value, indices),
        "sliding_attention": (p.query, p.key, p.value),
    }


def check_steps(p, names):
    """`names`: steps, `scores` and `whole`."""
    steps = steps_of(p)
    compressed = steps["compressed_attention"][1:]
    for name in steps.keys() & set(names):
        compare(name, run(name, *steps[name], **p.where), steps[name], **p.where)
    if "scores" in names:
        indices = run("select_blocks", p.query, compressed[0], **p.where)
        check_selection(p, compressed[0], indices)
    if "whole" in names:
        out = attention(p, compressed=compressed)
        exact, rough = (
            sum(
                np.asarray(of(name, *arrays, **p.where)[0], wide)
                * np.asarray(p.gates[..., i, None], wide)
                for i, (name, arrays) in enumerate(steps.items())
            )
            for of, wide in ((oracle, np.float64), (yardstick, np.float32))
        )
        rough = rough.astype(out.dtype)
        assert_parity("whole", np.asarray(out), exact, rough, dtype=out.dtype)


def attention(p, implementation="mosaic", **options):
    options |= {"config": p.case.config, "segment_ids": p.segment_ids}
    whole = functools.partial(nsa_jax.attention, implementation=implementation)
    return call(whole, p.query, p.key, p.value, p.gates, **options)


def check_any_blocks(p, scale=None):
    arrays = p.query, p.key, p.value, jnp.asarray(any_blocks(p.case))
    options = p.where | {"scale": scale}
    out = run("selected_attention", *arrays, **options)
    assert np.isneginf(np.asarray(out[1])[:, ::7]).all()
    assert not np.asarray(out[0], np.float32)[:, ::7].any()
    compare("selected_attention", out, arrays, **options)


TIES = (
    Case(
        30, 100, 2, 1, B=1, dtype="float16", config=dataclasses.replace(SMALL, num_selected=6)
    ),
    Case(18, 2200, H=3, Hkv=1, B=1, dtype="float16", config=FINE),
)


def selection_of_equals(case):
    """Indices `[T, n]` where every visible compressed token is as probable as the others."""
    config = case.config
    chosen = np.full((case.T, config.num_selected), -1)
    for t, position in enumerate(range(case.S - case.T, case.S)):
        seen = max((position - config.compress_block) // config.compress_stride + 1, 0)
        block = np.arange(position // config.select_block + 1)
        score = np.zeros(len(block), int)
        for shift in range(config.compress_block // config.compress_stride):
            stride = np.arange(seen) + shift
            at = stride * config.compress_stride // config.select_block
            np.add.at(score, at[at < len(block)], 1)
        score[: config.num_initial] = score[len(block) - config.num_local :] = 2**30
        best = np.sort(np.argsort(-score, kind="stable")[: config.num_selected])
        chosen[t, : len(best)] = best
    return chosen


def check_ties(case):
    p = problem(case)
    indices = run("select_blocks", p.query * 0, compressed_of(p)[0], **p.where)
    np.testing.assert_array_equal(np.asarray(indices[0, :, 0]), selection_of_equals(case))


ARRAYS = ("query", "key", "value", "gates")
LARGE = NSAConfig(16, 8, 128, num_selected=2, num_local=1, window=30)
# A block of the second sequence stands in three tiles of keys.
BLOCK_128 = Case(
    24, 220, H=2, Hkv=1, B=1, config=LARGE, segments=(10, 200, -10), dtype="float16"
)
STEPS = ("compressed_attention", "selected_attention", "sliding_attention")
GRADIENTS = (
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


def compare_gradients(names, fast, step, arrays, rest, cotangents, **where):
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
    compare_gradients(names, fast, name, arrays, rest, cotangents, **p.where)


def arrays_of(p):
    """What the gradients of the whole are taken of, as `GRADIENTS`, and the selection."""
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
    compare_gradients(GRADIENTS, fast, "whole", arrays, (indices,), cotangent, **p.where)

"""What the tolerance rule must see: small mistakes of a path, in every dtype and branch.

The path is the dense reference in float32, rounded once; unchanged it passes. A mutant is its
result with one mistake: all outputs or one gradient times 1.005, the softmax scale 1 % larger,
a window that is one key shorter or longer, one of sixteen selected blocks dropped. Every array
that a mutant is looked for in has 10^5 elements or more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.judge import parity
from nsa_core.types import Branches
from nsa_jax import NSAConfig, reference

CONFIG = NSAConfig(
    compress_block=8, compress_stride=2, select_block=16, num_selected=16, window=64
)
BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 272, 16, 8, 48
SCALE = WIDTH**-0.5
DTYPES = ("bfloat16", "float16", "float32")
FACTOR = 1.005


@functools.cache
def inputs(dtype):
    """`(query, keys, values, gates)`, the block indices and a cotangent, NumPy."""
    rng = np.random.default_rng(1337)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    tokens = CONFIG.num_compressed(LENGTH), LENGTH, LENGTH
    query = normal(BATCH, LENGTH, HEADS, WIDTH)
    key, value = (
        Branches(*(normal(BATCH, count, KV_HEADS, WIDTH) for count in tokens)) for _ in "kv"
    )
    gates = rng.uniform(size=(BATCH, LENGTH, HEADS, 3)).astype(dtype)
    return (query, key, value, gates), selection(rng), normal(*query.shape)


def selection(rng):
    """`[B, T, Hkv, n]`: random blocks up to a query's own, ascending, then -1."""
    blocks = CONFIG.num_blocks(LENGTH)
    own = (np.arange(LENGTH) // CONFIG.select_block)[None, :, None, None]
    order = rng.uniform(size=(BATCH, LENGTH, KV_HEADS, blocks))
    order = np.where(np.arange(blocks) <= own, order, np.inf).argsort(axis=-1)
    taken = np.sort(np.where(order <= own, order, blocks)[..., : CONFIG.num_selected])
    return np.where(taken < blocks, taken, -1).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("branch", "config", "dtype"))
def step(branch, arrays, indices, scale, *, config=CONFIG, dtype=None):
    """The output of one branch from its query, keys and values."""
    how = {"config": config, "kv_len": LENGTH, "scale": scale, "compute_dtype": dtype}
    slots = (indices,) if branch == "selected" else ()
    return getattr(reference, f"{branch}_attention")(*arrays, *slots, **how)[0]


@jax.jit
def combine(outs, gates):
    return reference.combine(outs, Branches(*jnp.unstack(gates, axis=-1)))


@functools.partial(jax.jit, static_argnames="dtype")
def both(arrays, indices, cotangent, *, dtype=None):
    """Outputs and gradients of the branches and of the whole, by step and array."""
    query, key, value, gates = arrays

    def run(arrays, gates):
        outs = Branches(
            *(
                step(branch, arrays[i], indices, SCALE, dtype=dtype)
                for i, branch in enumerate(Branches._fields)
            )
        )
        return outs, combine(outs, gates)

    own = [(query, k, v) for k, v in zip(key, value, strict=True)]
    (outs, whole), pull = jax.vjp(run, own, gates)
    nothing = jnp.zeros_like(whole)
    of_branches, _ = pull((Branches(*(cotangent,) * 3), nothing))
    of_whole, _ = pull((Branches(*(nothing,) * 3), cotangent))
    found = {("all", "out"): whole, ("all", "dq"): sum(grads[0] for grads in of_whole)}
    for i, branch in enumerate(Branches._fields):
        found[branch, "out"] = outs[i]
        for name, alone, within in zip(
            ("dq", "dk", "dv"), of_branches[i], of_whole[i], strict=True
        ):
            found[branch, name] = alone
            if name != "dq":
                found["all", f"{name}.{branch}"] = within
    return found


@jax.jit
def gate_gradients(outs, gates, cotangent):
    """A row of the width holds three gates only: more, narrower rows than `inputs` has."""
    return {
        ("all", "dgates"): jax.vjp(lambda gates: combine(outs, gates), gates)[1](cotangent)[0]
    }


def wide(arrays):
    return jax.tree.map(lambda x: x.astype(np.float64), arrays)


@functools.cache
def results(dtype):
    """Path, oracle and yardstick by step and array, NumPy."""
    arrays, indices, cotangent = inputs(dtype)
    path = both(arrays, indices, cotangent)
    low = both(arrays, indices, cotangent, dtype=jnp.dtype(dtype))
    normal = np.random.default_rng(2).normal
    many = [normal(size=(33400, 1, 1, 4)).astype(dtype) for _ in range(4)]
    gates = (Branches(*many[:3]), np.abs(normal(size=(33400, 1, 1, 3))).astype(dtype), many[3])
    floats = jax.tree.map(lambda x: x.astype(np.float32), gates)
    rounded = {name: np.asarray(x).astype(dtype) for name, x in gate_gradients(*floats).items()}
    low |= gate_gradients(*gates)
    with jax.enable_x64(True):
        exact = both(wide(arrays), indices, wide(cotangent))
        exact |= gate_gradients(*wide(gates))
        return jax.tree.map(np.asarray, (path | rounded, exact, low))


def factor(x):
    return (x.astype(np.float32) * np.float32(FACTOR)).astype(x.dtype)


def mutated_outputs(dtype):
    """The outputs that a mutant touches, by its name and the step."""
    (query, key, value, gates), indices, _ = inputs(dtype)
    path = results(dtype)[0]
    fewer = np.concatenate(
        [np.delete(indices, 7, axis=-1), np.full_like(indices[..., :1], -1)], axis=-1
    )
    windows = {f"window {window}": window for window in (CONFIG.window - 1, CONFIG.window + 1)}
    wrong = {
        "one of sixteen blocks dropped": {"selected": (fewer, SCALE, CONFIG)},
        "scale + 1 %": {branch: (indices, 1.01 * SCALE, CONFIG) for branch in Branches._fields},
        **{
            name: {"sliding": (indices, SCALE, dataclasses.replace(CONFIG, window=window))}
            for name, window in windows.items()
        },
    }
    for name, branches in wrong.items():
        outs = Branches(*(path[branch, "out"] for branch in Branches._fields))
        for branch, (slots, scale, config) in branches.items():
            arrays = query, getattr(key, branch), getattr(value, branch)
            out = np.asarray(step(branch, arrays, slots, scale, config=config))
            outs = outs._replace(**{branch: out})
            yield name, branch, out
        yield name, "all", np.asarray(combine(outs, gates))


def judge(dtype, where, got):
    _, exact, low = results(dtype)
    assert exact[where].size >= parity.SLOPE_ELEMENTS, where
    selection = where == ("selected", "out")
    return parity.check_parity(
        " ".join(where), got, exact[where], low[where], dtype=dtype, selection=selection
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_separates(dtype):
    """In one test: the parts of a dtype share their oracle, whichever worker runs them."""
    path = results(dtype)[0]
    assert len(path) == 21
    broken = {where: judge(dtype, where, got).reason for where, got in path.items()}
    assert not any(broken.values()), broken
    mutants = [(f"x {FACTOR}", where, factor(got)) for where, got in path.items()]
    for name, of, out in mutated_outputs(dtype):
        mutants.append((name, (of, "out"), out))
    assert len(mutants) == 21 + 4 + 2 + 2 + 2
    unseen = [(name, where) for name, where, got in mutants if judge(dtype, where, got).ok]
    assert not unseen

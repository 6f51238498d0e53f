"""The dense reference in float64 against the paper's equations in plain loops."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from nsa_core.compress_params import MLPParams, PoolParams, RopeMLPParams
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_jax import reference
from tests import loops

SMALL = NSAConfig(8, 4, 16, num_selected=3, num_initial=1, num_local=1, window=10)
FINE = NSAConfig(4, 2, 8, num_selected=4, num_initial=1, num_local=1, window=7)


class Case(NamedTuple):
    config: NSAConfig
    T: int
    S: int
    H: int
    Hkv: int
    D: int = 4
    Dv: int = 3
    phi: tuple = (None, None)  # kind of the keys' and of the values' compression
    spans: tuple | None = None  # for each row the [start, end) of its sequences
    scale: float | None = None
    keys: str = "normal"


RATES = np.array([1, 0.1])
PACKED = (((0, 1), (1, 24), (24, 59)), ((0, 7), (10, 11), (11, 63)))
CASES = {
    "G=1": Case(SMALL, 61, 61, 2, 2, phi=("pool", "mlp")),
    "G=3, T<S": Case(SMALL, 29, 61, 6, 2, phi=("mlp", "pool"), scale=0.3),
    "G=6, l=d=l'": Case(NSAConfig(8, 8, 8, 4, 1, 2, 5), 45, 45, 6, 1, phi=("mlp", None)),
    "G=16, l'=2l": Case(NSAConfig(12, 4, 24, 3, 1, 1, 30), 21, 115, 16, 1, D=5, Dv=2),
    "paper's sizes": Case(NSAConfig(num_selected=4, window=50), 9, 411, 1, 1),
    "T=1": Case(FINE, 1, 50, 4, 2),
    "packed": Case(SMALL, 63, 63, 4, 2, phi=("rope", "pool"), spans=PACKED),
    "packed, T<S": Case(SMALL, 40, 63, 2, 1, spans=PACKED),
    "rope": Case(SMALL, 29, 61, 6, 2, phi=("rope", "mlp")),
    "S<l": Case(SMALL, 7, 7, 2, 1, phi=("mlp", "pool")),
    "w=0, n>N": Case(NSAConfig(4, 2, 8, 9, 1, 2, 0), 30, 30, 2, 1),
    "2 + 3 forced": Case(NSAConfig(4, 2, 8, 6, 2, 3, 7), 40, 95, 2, 1),
    "none forced": Case(NSAConfig(4, 2, 8, 2, 0, 0, 7), 43, 43, 2, 1),
    "equal keys": Case(FINE, 70, 70, 6, 2, keys="equal"),
    "equal scores": Case(FINE, 70, 70, 3, 1, keys="zero"),
}


class Problem(NamedTuple):
    query: np.ndarray  # [B, T, H, D]
    keys: list  # of a branch [B, S, Hkv, D]
    values: list  # of a branch [B, S, Hkv, Dv]
    gates: np.ndarray  # [B, T, H, 3]
    params: tuple
    segment_ids: np.ndarray | None  # [B, S]


@functools.cache
def problem(name):
    case = CASES[name]
    normal = np.random.default_rng(list(name.encode())).normal
    block = case.config.compress_block
    keys = [normal(size=(2, case.S, case.Hkv, case.D)) for _ in range(3)]
    if case.keys == "equal":
        keys[0][:] = keys[0][:, :1]
    if case.keys == "zero":
        keys[0][:] = 0

    def phi(kind, width):
        if kind == "pool":
            return PoolParams(normal(size=(block, width)))
        shapes = (block, width), (block * width, 6), (6,), (6, width), (width,)
        if kind is None:
            return None
        arrays = [normal(size=s) / 2 for s in shapes]
        return MLPParams(*arrays) if kind == "mlp" else RopeMLPParams(*arrays, RATES)

    ids = None
    if case.spans is not None:
        ids = np.full((2, case.S), -1, np.int32)
        for row, spans in enumerate(case.spans):
            for number, (start, end) in enumerate(spans):
                ids[row, start:end] = number
    return Problem(
        query=normal(size=(2, case.T, case.H, case.D)),
        keys=keys,
        values=[normal(size=(2, case.S, case.Hkv, case.Dv)) for _ in range(3)],
        gates=normal(size=(2, case.T, case.H, 3)),
        params=(phi(case.phi[0], case.D), phi(case.phi[1], case.Dv)),
        segment_ids=ids,
    )


def by_loops(name, rules):
    """Every stage by the loops, row by row; without packing the row is one sequence."""
    case, p = CASES[name], problem(name)
    rows = []
    for row in range(2):
        keys, values = [k[row] for k in p.keys], [v[row] for v in p.values]
        arrays = p.query[row], keys, values, p.gates[row]
        spans = [(0, case.S)] if case.spans is None else case.spans[row]
        rows.append(loops.packed(spans, *arrays, rules, params=p.params, scale=case.scale))
    return loops.Stages(*map(np.stack, zip(*rows, strict=True)))


def stages(case, p, kv_len=None):
    """Every stage by the reference; `kv_len` is passed on, or S where only it tells S."""
    where = {"config": case.config, "segment_ids": p.segment_ids}
    ck, cv = (
        reference.compress(x[0], params, **where)
        for x, params in zip((p.keys, p.values), p.params, strict=True)
    )
    where |= {"scale": case.scale, "kv_len": kv_len}
    length = case.S if kv_len is None and case.spans is None else kv_len
    compressed = reference.compressed_attention(p.query, ck, cv, **where | {"kv_len": length})
    scores = reference.block_scores(p.query, ck, **where | {"kv_len": length})
    blocks = reference.select_blocks(p.query, ck, **where | {"kv_len": length})
    selected = reference.selected_attention(p.query, p.keys[1], p.values[1], blocks, **where)
    sliding = reference.sliding_attention(p.query, p.keys[2], p.values[2], **where)
    branches = Branches(compressed[0], selected[0], sliding[0])
    out = reference.combine(branches, Branches(*jnp.moveaxis(p.gates, -1, 0)))
    return loops.Stages(ck, cv, *compressed, scores, blocks, *selected, *sliding, out)


@functools.cache
def compiled(name):
    return jax.jit(functools.partial(stages, CASES[name]))


def run(name, *arguments):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compiled(name)(*jax.tree.map(jnp.asarray, arguments)))


@functools.cache
def by_reference(name):
    return run(name, problem(name))


def agree(got, want):
    return got.shape == want.shape and np.allclose(got, want, rtol=1e-12, atol=1e-13)


def differing(got, want):
    return [s for s in got._fields if not agree(getattr(got, s), getattr(want, s))]


@pytest.mark.parametrize("name", CASES)
def test_every_stage_equals_the_loops(name):
    got, want = by_reference(name), by_loops(name, loops.Rules(CASES[name].config))
    assert differing(got, want) == []
    assert got.blocks.dtype == np.int32
    assert all(getattr(got, s).dtype == np.float64 for s in got._fields if s != "blocks")


# The stage that a wrong rule reaches first, where it is not the lse of the sliding branch.
REACHES = {
    "sees_compressed": "compressed_lse",
    "sees_selected": "selected_lse",
    "num_free": "selected_lse",
    "overlap": "scores",
    "candidates": "blocks",
    "forced": "blocks",
    "rank": "blocks",
}
overlap = loops.Rules.overlap
MUTANTS = {
    "aligned to the first key": ("G=3, T<S", "position", lambda _, t, T, S: t),
    "heads interleaved": ("G=3, T<S", "kv_head", lambda _, h, H, Hkv: h % Hkv),
    "no scale": ("G=1", "scale", lambda _, D: 1.0),
    "window begun": ("G=1", "sees_compressed", lambda _, p, i: p >= i * 4),
    "strictly after": ("G=1", "sees_compressed", lambda _, p, i: p > i * 4 + 7),
    "own block's future": ("G=1", "sees_selected", lambda _, p, u, js: u // 16 in js),
    "w + 1 keys": ("G=1", "sees_sliding", lambda _, p, u: p - 10 <= u <= p),
    "not itself": ("G=1", "sees_sliding", lambda _, p, u: p - 10 <= u < p),
    "Eq. 9 late by one": ("G=1", "overlap", lambda r, i, j: overlap(r, i + 1, j)),
    "Eq. 9 early by one": ("G=1", "overlap", lambda r, i, j: overlap(r, i - 1, j)),
    "Eq. 9 0-based": ("paper's sizes", "overlap", lambda r, i, j: overlap(r, i + 3, j)),
    "Eq. 9 each once": ("G=1", "overlap", lambda r, i, j: min(1, overlap(r, i, j))),
    "future blocks": ("G=1", "candidates", lambda _, p, S: range(-(-S // 16))),
    "not the own block": ("none forced", "candidates", lambda _, p, S: range(p // 8)),
    "one initial": ("2 + 3 forced", "forced", lambda _, j, p: j < 1 or 0 <= p // 8 - j < 3),
    "two local": ("2 + 3 forced", "forced", lambda _, j, p: j < 2 or 0 <= p // 8 - j < 2),
    "forced beside n": ("G=1", "num_free", lambda _, num_forced: 3),
    "lowest first": ("G=1", "rank", lambda _, score, j: (score, j)),
    "equal keys: higher": ("equal keys", "rank", lambda _, score, j: (-score, -j)),
    "equal scores: higher": ("equal scores", "rank", lambda _, score, j: (-score, -j)),
    "border crossed": ("packed", "sequences", lambda _, spans: [(spans[0][0], spans[-1][1])]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_noticed(name):
    case, method, wrong = MUTANTS[name]
    mutant = type("Mutant", (loops.Rules,), {method: wrong})(CASES[case].config)
    stage = REACHES.get(method, "sliding_lse")
    assert stage in differing(by_reference(case), by_loops(case, mutant))


@pytest.mark.parametrize("lengths", [(37, 37), (53, 37)], ids=["one int", "an array"])
def test_keys_beyond_kv_len_do_not_exist(lengths):
    name = "G=3, T<S"
    case, p = CASES[name], problem(name)
    if len(set(lengths)) == 1:
        with jax.enable_x64(True):
            got = jax.tree.map(np.asarray, jax.jit(lambda p: stages(case, p, lengths[0]))(p))
    else:
        got = run(name, p, np.array(lengths, np.int32))
    for row, length in enumerate(lengths):
        keys, values = ([x[row, :length] for x in xs] for xs in (p.keys, p.values))
        arrays = p.query[row], keys, values, p.gates[row]
        rules = loops.Rules(case.config)
        want = loops.attention(*arrays, rules, params=p.params, scale=case.scale)
        blocks = want.scores.shape[-1]
        assert agree(got.scores[row, ..., :blocks], want.scores)
        assert not got.scores[row, ..., blocks:].any()
        for stage in set(loops.Stages._fields[2:]) - {"scores"}:
            assert agree(getattr(got, stage)[row], getattr(want, stage)), stage


def test_padding_may_hold_anything():
    p = jax.tree.map(np.copy, problem("packed"))
    for x in (p.query, *p.keys, *p.values):
        x[p.segment_ids < 0] = np.nan
    assert differing(run("packed", p), by_reference("packed")) == []


def branch(name, which):
    """(query, key, value) -> (out, lse) of one branch, its block indices frozen."""
    case, p = CASES[name], problem(name)
    where = {"config": case.config, "segment_ids": p.segment_ids, "scale": case.scale}

    @functools.partial(jax.jit, static_argnames="compute_dtype")
    def function(query, key, value, compute_dtype=None):
        how = where | {"compute_dtype": compute_dtype}
        if which == "selected":
            blocks = jnp.asarray(by_reference(name).blocks)
            return reference.selected_attention(query, key, value, blocks, **how)
        if which == "sliding":
            return reference.sliding_attention(query, key, value, **how)
        length = None if case.spans else case.S
        return reference.compressed_attention(query, key, value, kv_len=length, **how)

    keys = Branches(by_reference(name).compressed_key, *p.keys[1:])
    values = Branches(by_reference(name).compressed_value, *p.values[1:])
    return function, (p.query, getattr(keys, which), getattr(values, which))


def visible_lse(out, lse):
    return out, jnp.where(lse == -jnp.inf, 0, lse)


@pytest.mark.parametrize("which", Branches._fields)
def test_gradients_equal_finite_differences(which):
    with jax.enable_x64(True):
        function, inputs = branch("packed, T<S", which)
        inputs = tuple(map(jnp.asarray, inputs))
        check_grads(lambda *x: visible_lse(*function(*x)), inputs, order=1, modes=("rev",))


@pytest.mark.parametrize(
    "name, which",
    [("G=3, T<S", 0), ("packed", 0), ("packed", 1), ("packed, T<S", 0)],
    ids=["mlp", "rope", "pool", "mean"],
)
def test_gradients_of_the_compression(name, which):
    case, p = CASES[name], problem(name)
    where = {"config": case.config, "segment_ids": p.segment_ids}
    with jax.enable_x64(True):
        inputs = jax.tree.map(jnp.asarray, ((p.keys, p.values)[which][0], p.params[which]))
        compress = jax.jit(lambda x, params: reference.compress(x, params, **where))
        check_grads(compress, inputs, order=1, modes=("rev",))


@pytest.mark.parametrize("which", Branches._fields)
@pytest.mark.parametrize("name", ["packed", "S<l", "w=0, n>N"])
def test_a_row_without_keys_is_exactly_zero(name, which):
    blind = getattr(by_reference(name), which + "_lse") == -np.inf
    has_blind = {"packed": True, "S<l": which == "compressed", "w=0, n>N": which != "selected"}
    assert blind.any() == has_blind[name]
    with jax.enable_x64(True):
        function, inputs = branch(name, which)
        inputs = tuple(map(jnp.asarray, inputs))
        out, backward = jax.vjp(lambda *x: visible_lse(*function(*x)), *inputs)
        gradients = backward(jax.tree.map(jnp.ones_like, out))
    assert not np.asarray(out[0])[blind].any()
    assert not np.asarray(gradients[0])[blind].any()
    assert all(np.isfinite(g).all() for g in gradients)
    if name == "packed" and which != "compressed":
        padding = problem(name).segment_ids < 0
        assert not any(np.asarray(g)[padding].any() for g in gradients)


@pytest.mark.parametrize("which", Branches._fields)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_low_precision(dtype, which):
    """float32 inside, the inputs' dtype outside; all in `compute_dtype` when it is given."""
    function, inputs = branch("G=1", which)
    low = [jnp.asarray(x, dtype) for x in inputs]
    out, lse = function(*low)
    coarse = function(*low, compute_dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        exact = function(*(jnp.asarray(np.asarray(x, np.float64)) for x in low))
        exact = tuple(map(np.asarray, exact))
    seen = np.isfinite(exact[1])
    assert out.dtype == dtype and lse.dtype == coarse[1].dtype == jnp.float32
    assert coarse[0].dtype == jnp.bfloat16

    def error(got, want):
        return np.abs(np.asarray(got, np.float64)[seen] - want[seen]).max()

    assert (np.isfinite(lse) == seen).all()
    assert error(lse, exact[1]) < 5e-6
    assert error(out, exact[0]) < max(5e-6, jnp.finfo(dtype).eps * np.abs(exact[0]).max())
    assert 1e-3 < error(coarse[1], exact[1]) < 0.2
    assert 1e-3 < error(coarse[0], exact[0]) < 0.2

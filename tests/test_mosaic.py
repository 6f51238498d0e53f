"""Mosaic kernels in Pallas' GPU interpreter, which reports races, against the float64 oracle.

Gradients are in `test_mosaic_gradients.py`. What the interpreter cannot tell, registers and
spills, is in `test_mosaic_compiled.py`; the kernels themselves run in `test_mosaic_gpu.py`,
with the checks of this file.
"""

import contextlib
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import Mesh, PartitionSpec

import kernels_pallas
import nsa_jax
from bench.judge.parity import assert_parity, check_indices
from kernels_pallas.mosaic import (
    capability,
    operands,
    scores_kq,
    scores_qk,
    softmax,
    tile_steps,
)
from kernels_pallas.specs import scores
from kernels_pallas.specs import selected as selected_spec
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem
from nsa_core.steps import key_bounds
from nsa_jax import geometry, mosaic
from tests.inputs import (
    PAPER,
    SMALL,
    Case,
    any_blocks,
    call,
    oracle,
    problem,
    selection,
    yardstick,
)
from tests.jaxprs import equations
from tests.test_branches import compare, compressed_of
from tests.test_small_scores import BY_SCORE, FAR, LOWEST, far_blocks

# Keys enough that a ring of blocks goes round, and that blocks are seen in full.
LONG = NSAConfig(8, 4, 16, num_selected=17, window=250)
# A block of every 16 keys: many candidates.
FINE = NSAConfig(16, 16, 16, num_selected=6, window=10)
FORCED = dataclasses.replace(FINE, num_selected=3)
# The first sequence begins before the queries; `test_torch_mosaic.py` has T = S.
PACKED = Case(80, 90, 3, 1, B=1, segments=(20, 1, 43, 8, -18), dtype="bfloat16")
CASES = (
    Case(63, 63, H=2, D=32, B=1, dtype="bfloat16"),  # G=1
    Case(70, 70, H=3, Hkv=1, D=48, Dv=32, B=1, dtype="bfloat16"),  # G=3, D != Dv
    Case(37, 111, H=6, Hkv=1, D=32, Dv=64, B=1, dtype="float16"),  # G=6, T < S
    Case(12, 1200, H=16, Hkv=1, D=128, Dv=64, B=1, config=LONG, dtype="bfloat16"),  # G=16
    PACKED,
    Case(5, 5, B=1, dtype="bfloat16"),  # no compressed token at all
    Case(  # n > blocks
        40,
        40,
        B=1,
        config=dataclasses.replace(SMALL, window=0, num_selected=9),
        dtype="float16",
    ),
)
by_case = pytest.mark.parametrize("case", CASES, ids=str)
# Of a score, relatively: what float32 arithmetic on the chip may leave undecided.
RESOLUTION = 1e-4


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


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3)])
def test_selected_with_other_stages(stages, interpreted, monkeypatch):
    chosen = dict(zip(("key_stages", "value_stages"), stages, strict=True))
    monkeypatch.setattr(selected_spec, "forward_stages", lambda *widths: chosen)
    check_steps(problem(TINY), ("selected_attention",))


def attention(p, implementation="mosaic", **options):
    options |= {"config": p.case.config, "segment_ids": p.segment_ids}
    whole = functools.partial(nsa_jax.attention, implementation=implementation)
    return call(whole, p.query, p.key, p.value, p.gates, **options)


@by_case
def test_compressed_and_scores(case, interpreted):
    check_steps(problem(case), ("compressed_attention", "scores"))


@by_case
def test_selected_and_sliding(case, interpreted):
    check_steps(problem(case), ("selected_attention", "sliding_attention"))


@pytest.mark.parametrize("case", CASES[4:], ids=str)
def test_whole(case, interpreted):
    check_steps(problem(case), ("whole",))


@pytest.fixture
def in_parts(interpreted, monkeypatch):
    """As few scores as can be are held at a time, which are not all."""
    specs, build = [], scores.best_blocks

    def few(spec):
        specs.append(dataclasses.replace(spec, held=scores.KEYS))
        return build(specs[-1])

    monkeypatch.setattr(scores, "best_blocks", few)
    yield
    assert all(spec.chunks > 1 for spec in specs) and specs


@pytest.mark.parametrize(
    "case",
    [
        Case(18, 4500, H=3, Hkv=1, B=1, config=FINE, dtype="bfloat16"),
        # A tile with tokens of both sequences, the second from block 132 on.
        Case(40, 2140, H=3, Hkv=1, B=1, config=FINE, dtype="float16", segments=(2105, 35)),
        Case(
            18,
            2200,
            3,
            1,
            B=1,
            config=dataclasses.replace(FINE, num_selected=3),
            dtype="float16",
        ),
        Case(6, 2200, H=20, Hkv=1, B=1, config=FINE, dtype="float16"),
    ],
    ids=["", "packed", "forced", "a large group"],
)
def test_scores_in_parts(case, in_parts):
    check_steps(problem(case), ("scores",))


@pytest.mark.parametrize("group", [3, 20])  # of `scores_qk` and `scores_kq`
def test_scores_are_carried_from_one_part_to_the_next(group, in_parts):
    """A compressed token that lies in two blocks counts in both, wherever a part ends."""
    config = NSAConfig(16, 8, 16, num_selected=8)
    p = problem(Case(4, 2200, H=group, Hkv=1, B=1, config=config, dtype="float16"))
    key = compressed_of(p)[0] * 0
    key = key.at[:, [127, 255]].set(1)  # in the blocks 63 and 64, 127 and 128
    indices = np.asarray(run("select_blocks", p.query * 0 + 1, key, **p.where))
    for chosen in indices.reshape(-1, 8):
        assert {63, 64, 127, 128} <= {*chosen.tolist()}


@pytest.mark.parametrize(
    "config",
    [
        NSAConfig(16, 4, 16, num_selected=3, num_initial=0, num_local=0),
        NSAConfig(4, 4, 32, num_selected=3),  # forced blocks only
    ],
    ids=["none-forced", "all-forced"],
)
@pytest.mark.parametrize("group", [2, 20])  # of `scores_qk` and `scores_kq`
def test_scores_of_other_blocks(config, group, interpreted):
    case = Case(30, 110, H=group, Hkv=1, B=1, config=config, dtype="bfloat16")
    check_steps(problem(case), ("scores",))


@pytest.mark.parametrize(("scale", "group", "n"), [(None, 3, 4), (8.0, 1, 6)], ids=str)
def test_any_blocks_in_any_order(scale, group, n, interpreted):
    """Empty slots anywhere, blocks of the future, queries without a block; large logits."""
    config = dataclasses.replace(SMALL, num_selected=n)
    case = Case(70, 130, 2 * group, 2, B=1, config=config, dtype="bfloat16")
    check_any_blocks(problem(case), scale)


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
LARGE_GROUP = dataclasses.replace(TIES[0], H=20)
# The bodies of scores, what they are checked with, and the axis of a product that keys lie along.
SCORES = {"qk": (scores_qk, TIES[0], 1), "kq": (scores_kq, LARGE_GROUP, 0)}
by_scores = pytest.mark.parametrize(("body", "case", "keys"), SCORES.values(), ids=SCORES)


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


@pytest.mark.parametrize("case", [TIES[0], LARGE_GROUP], ids=str)
def test_ties_go_to_the_lower_block(case, interpreted):
    check_ties(case)


@pytest.mark.parametrize("heads", [2, 20])
def test_scores_below_the_range_of_float32_are_equal(heads, interpreted):
    given = map(jnp.asarray, far_blocks(heads, jnp.bfloat16))
    found = run("select_blocks", *given, config=FAR, kv_len=480, scale=1.0)
    assert found.tolist() == [[[BY_SCORE]], [[LOWEST]]]


def test_ties_between_parts_go_to_the_lower_block(in_parts):
    check_ties(TIES[1])


# Transformations

TINY = Case(20, 20, H=2, Hkv=1, B=1, dtype="bfloat16")


def test_vmap_equals_a_loop_bit_by_bit(interpreted):
    p, other = problem(TINY), problem(TINY, 1)
    query, gates = (jnp.stack([getattr(x, name) for x in (p, other)]) for name in ARRAYS[::3])
    whole = functools.partial(nsa_jax.attention, config=SMALL, implementation="mosaic")
    mapped = call(jax.vmap(whole, (0, None, None, 0)), query, p.key, p.value, gates)
    one = jax.jit(whole)
    for i in (0, 1, 1):  # the last repeats itself
        alone = one(query[i], p.key, p.value, gates[i])
        np.testing.assert_array_equal(np.asarray(mapped[i]), np.asarray(alone))


ARRAYS = ("query", "key", "value", "gates")


def test_vmap_over_lengths(interpreted):
    p = problem(dataclasses.replace(TINY, T=3))
    lengths = jnp.array([20, 9], jnp.int32)

    def sliding(kv_len):
        return nsa_jax.sliding_attention(
            p.query, p.key, p.value, kv_len=kv_len, config=SMALL, implementation="mosaic"
        )

    mapped = jax.vmap(sliding)(lengths)
    for i, length in enumerate((20, 9)):
        for a, b in zip(mapped, sliding(length), strict=True):
            np.testing.assert_array_equal(np.asarray(a[i]), np.asarray(b))


@pytest.mark.parametrize("where", ["whole", "kv_len", "segment_ids"])
def test_shard_map_over_batch_and_heads(where):
    """Traced and lowered for GPUs: the interpreter knows one device."""
    p = problem(dataclasses.replace(TINY, B=2, H=4, Hkv=2))
    config = dataclasses.replace(SMALL, num_selected=4 if where == "whole" else 9)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, spec = Mesh(devices, ("batch", "heads")), PartitionSpec("batch", None, "heads")
    options = {
        "whole": jnp.zeros(2, jnp.int32),
        "kv_len": jnp.full(2, 20, jnp.int32),
        "segment_ids": jnp.zeros((2, 20), jnp.int32),
    }

    def attend(query, key, value, gates, option):
        at = {where: option} if where != "whole" else {"kv_len": 20}
        segments = {"segment_ids": at.get("segment_ids")}
        compressed = [nsa_jax.compress(x, config=config, **segments) for x in (key, value)]
        each = nsa_jax.Branches.each
        gates = nsa_jax.Branches(*(gates[..., i] for i in range(3)))
        return mosaic.attention(
            query, each(key), each(value), gates, compressed, None, config=config, **at
        )

    specs = (*[spec] * 4, PartitionSpec("batch"))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    arrays = [getattr(p, name) for name in ARRAYS] + [options[where]]
    loss = lambda *x: sharded(*x).astype(jnp.float32).sum()
    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*arrays)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


# Lengths and padding


def test_lengths_of_a_buffer(interpreted):
    """`kv_len` of each row, traced, over buffers with NaN behind it."""
    case = Case(9, 80, H=1, Hkv=1, dtype="bfloat16")
    p, lengths = problem(case), (80, 41)
    buffers = [x.at[1, 41:].set(jnp.nan) for x in (p.key, p.value)]
    compressed = compressed_of(p)
    rows = []
    for row, length in enumerate(lengths):
        options = {"config": SMALL, "kv_len": length}
        one = [x[row : row + 1] for x in (p.query, p.key, p.value)]
        keys = [x[:, :length] for x in one[1:]]
        small = [x[row : row + 1, : SMALL.num_compressed(length)] for x in compressed]
        indices = selection(one[0], small[0], **options)
        rows.append((options, (one[0], *small), (one[0], *keys, indices), (one[0], *keys)))
    indices = jnp.concatenate([row[2][-1] for row in rows])
    arrays = {
        "compressed_attention": (p.query, *compressed),
        "selected_attention": (p.query, *buffers, indices),
        "sliding_attention": (p.query, *buffers),
    }
    kv_len = jnp.array(lengths, jnp.int32)
    for i, (name, args) in enumerate(arrays.items()):
        step = functools.partial(getattr(nsa_jax, name), config=SMALL, implementation="mosaic")
        together = jax.jit(lambda length, args, step=step: step(*args, kv_len=length))
        together = together(kv_len, args)
        for row, (options, *steps) in enumerate(rows):
            own = jax.tree.map(lambda x, row=row: x[row : row + 1], together)
            compare(name, own, steps[i], **options)
    got = run("select_blocks", p.query, compressed[0], config=SMALL, kv_len=kv_len)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(indices))


@pytest.mark.parametrize("name", ["compressed", "selected", "sliding"])
def test_a_row_shorter_than_its_queries(name, interpreted):
    """The queries in front of it are padding: NaN there gives zeros and gradients of zero."""
    p = problem(Case(9, 40, H=2, Hkv=1, dtype="bfloat16"))
    there = (np.arange(9) >= np.array([[0], [5]]))[..., None, None]
    query, cotangent = (jnp.where(there, x, jnp.nan) for x in (p.query, p.query[..., :16]))
    rest = [compressed_of(p)] if name == "compressed" else [(p.key, p.value)]
    rest += [(jnp.zeros((2, 9, 1, 4), jnp.int32).at[..., 1:].set(-1),)] * (name == "selected")
    step = functools.partial(
        getattr(nsa_jax, f"{name}_attention"),
        config=SMALL,
        kv_len=jnp.array([40, 4], jnp.int32),
        implementation="mosaic",
    )

    @jax.jit
    def both(query, key, value, *more):
        out, pull = jax.vjp(lambda *x: step(*x, *more)[0], query, key, value)
        return out, *pull(cotangent)

    out, grad, *others = both(query, *(x for each in rest for x in each))
    for x in (out, grad):
        x = np.asarray(x, np.float32)
        assert not x[1, :5].any() and np.isfinite(x).all()
        assert x[0].any() and (name == "compressed" or x[1, 5:].any())
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in others)


def test_padding_may_be_nan(interpreted):
    """What no query may see is not read, and queries that see nothing give zeros."""
    p = problem(Case(30, 50, H=2, Hkv=1, B=1, dtype="bfloat16", segments=(20, 20, -10)))
    poisoned = [getattr(p, name).at[:, -10:].set(jnp.nan) for name in ARRAYS[:3]]
    whole = jax.jit(
        functools.partial(
            nsa_jax.attention, config=SMALL, segment_ids=p.segment_ids, implementation="mosaic"
        )
    )
    clean, out = whole(p.query, p.key, p.value, p.gates), whole(*poisoned, p.gates)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(clean))
    assert (np.asarray(out, np.float32)[:, -10:] == 0).all()


def test_cached_attention_in_chunks(interpreted):
    case = Case(32, 32, H=2, Hkv=1, dtype="bfloat16")
    p = problem(case)
    cache = nsa_jax.init_cache(2, 40, 1, 16, 16, config=SMALL, dtype=jnp.bfloat16)
    step = jax.jit(
        functools.partial(nsa_jax.cached_attention, config=SMALL, implementation="mosaic")
    )
    outs = []
    for begin in range(0, 32, 16):
        new = [getattr(p, name)[:, begin : begin + 16] for name in ARRAYS]
        out, cache = step(*new, cache)
        outs.append(out)
    want = np.asarray(attention(p, "xla"), np.float32)
    got = np.asarray(jnp.concatenate(outs, axis=1), np.float32)
    np.testing.assert_allclose(got, want, atol=8 * 2.0**-8 * abs(want).max())


def test_nothing_is_larger_than_the_output():
    """Outside of the kernels, in the whole program; and no call back to the host."""
    length = 2048
    shape = lambda *s: jax.ShapeDtypeStruct((1, length, *s), jnp.bfloat16)
    key, gate = nsa_jax.Branches.each(shape(4, 64)), nsa_jax.Branches.each(shape(16))
    compressed = [jax.ShapeDtypeStruct((1, 127, 4, 64), jnp.bfloat16)] * 2
    jaxpr = jax.make_jaxpr(functools.partial(mosaic.attention, config=PAPER, kv_len=length))(
        shape(16, 64), key, key, gate, compressed, None
    )
    found = list(equations(jaxpr.jaxpr))
    sizes = [v.aval.size for e in found for v in e.outvars if hasattr(v.aval, "size")]
    assert max(sizes) <= length * 16 * 64
    assert not [e for e in found if "callback" in e.primitive.name]


# Refusals

FIT = Problem(
    "jax", "selected", "gpu", "bfloat16", 1, 8, 8, 4, 2, 64, 64, False, PAPER, capability=(9, 0)
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "needs a Hopper GPU, got cpu"),
        ({"capability": (10, 0)}, "needs compute capability (9, 0), got (10, 0)"),
        ({"capability": None}, "needs compute capability (9, 0), got None"),
        ({"dtype": "float32"}, "computes in bfloat16 and float16, got float32"),
        ({"H": 130}, "takes up to 64 query heads a key/value head, got 65"),
        ({"D": 24}, "takes widths that are multiples of 16 up to 256, got D=24"),
        ({"Dv": 272}, "takes widths that are multiples of 16 up to 256, got Dv=272"),
        (
            {"config": NSAConfig(8, 8, 24)},
            "takes selection blocks that are multiples of 16 up to 128, got 24",
        ),
        (
            {"config": NSAConfig(select_block=256)},
            "takes selection blocks that are multiples of 16 up to 128, got 256",
        ),
        (
            {"config": NSAConfig(num_selected=65)},
            "takes up to 64 selected blocks, got 65",
        ),
        ({"S": 2**24 + 1}, "takes up to 16777216 keys, got 16777217"),
        ({"B": 2**15, "H": 2, "Hkv": 2}, "takes up to 65535 rows of B Hkv, got 65536"),
        (
            {
                "H": 2,
                "D": 256,
                "Dv": 256,
                "config": NSAConfig(select_block=128, num_selected=64),
            },
            "takes D, Dv, select_block and num_selected that fit in 229376 bytes of shared "
            "memory, got 278528",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_refusals(change, reason):
    assert capability.why_not(FIT) is None
    assert capability.why_not(FIT._replace(**change)) == reason
    assert kernels_pallas.why_not("mosaic", FIT._replace(**change)) == reason


def test_the_interpreter_needs_no_gpu():
    on_cpu = FIT._replace(platform="cpu", capability=None)
    with capability.interpreted(InterpretGPUParams()):
        assert capability.why_not(on_cpu) is None
    assert capability.why_not(on_cpu)


def test_registers_that_no_multiprocessor_has_are_refused():
    operands.check_registers(232, 232, 40)
    operands.check_registers(240)
    for wrong in ((240, 240, 40), (232, 232, 44), (232, 232, 16), (248, 24), (168,) * 4):
        with pytest.raises(ValueError, match="registers a thread do not fit a pool of"):
            operands.check_registers(*wrong)


# Mutants: wrong kernels that the checks above must catch.


def patched(module, **names):
    return types.SimpleNamespace(**vars(module) | names)


def test_a_mask_that_does_not_hide_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(softmax, "MASKED", 0.0)
    with pytest.raises(AssertionError, match=r"sliding_attention\.out: m"):
        check_steps(problem(TINY), ("sliding_attention",))


def test_a_token_too_many_is_caught(mutant, monkeypatch):
    visible = key_bounds.visible_compressed
    monkeypatch.setattr(
        key_bounds,
        "visible_compressed",
        lambda *args: (visible(*args)[0], visible(*args)[1] + 1),
    )
    with pytest.raises(AssertionError, match=r"compressed_attention\.out: "):
        check_steps(problem(TINY), ("compressed_attention",))


def test_a_future_key_in_a_block_is_caught(mutant, monkeypatch):
    by_row = key_bounds.by_row
    later = lambda *arrays, **sizes: [x + 1 for x in by_row(*arrays, **sizes)]
    monkeypatch.setattr(key_bounds, "by_row", later)
    with pytest.raises(AssertionError, match=r"selected_attention\.out: m"):
        check_steps(problem(TINY), ("selected_attention",))


@by_scores
def test_scores_that_depend_on_their_place_are_caught(body, case, keys, mutant, monkeypatch):
    """Ties then go to the higher block."""

    def exp2(x):
        place = jax.lax.broadcasted_iota(jnp.float32, x.shape, keys)
        return jnp.exp2(x) * (1 + place * 2.0**-20)

    monkeypatch.setattr(body, "jnp", patched(jnp, exp2=exp2))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_ties(case)


@pytest.mark.parametrize(
    ("name", "body", "case"),
    [
        ("sliding_attention", tile_steps, TINY),
        ("selected_attention", tile_steps, TINY),
        # The first wait that is traced is that of steps without a mask.
        ("select_blocks", scores_qk, dataclasses.replace(TIES[0], S=1200, config=FINE)),
    ],
    ids=["sliding", "selected", "scores"],
)
def test_a_wait_that_is_missing_is_a_race(name, body, case, mutant, monkeypatch):
    waits = []

    def barrier_wait(barrier):
        if waits:
            plgpu.barrier_wait(barrier)
        waits.append(barrier)

    plgpu, p = body.plgpu, problem(case)
    monkeypatch.setattr(body, "plgpu", patched(plgpu, barrier_wait=barrier_wait))
    steps = steps_of(p) | {"select_blocks": (p.query, compressed_of(p)[0])}
    # After the wait that was left out it may stop at the next one: the race is noted by then.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        run(name, *steps[name], **p.where)
    assert any(detector.races_found for detector in mutant)

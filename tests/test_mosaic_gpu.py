"""Mosaic kernels on a Hopper GPU: the checks of `test_mosaic.py` on larger shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import nsa_jax
from kernels_pallas.specs import scores, work_items
from nsa_core.config import NSAConfig
from tests import pretend
from tests.devices import needs_gpu
from tests.inputs import PAPER, Case, call, posed, problem
from tests.limits import set_limits
from tests.mosaic_checks import (
    ARRAYS,
    BLOCK_128,
    PACKED,
    attention,
    bits,
    check_any_blocks,
    check_step,
    check_steps,
    check_ties,
    check_whole,
    run,
)
from tests.oracles.nsa import BRANCHES

pytestmark = [pytest.mark.gpu, needs_gpu]

MIDDLE = NSAConfig(num_selected=8, window=200)
GROUPS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
WIDTHS = 64, 96  # the same forward and backward: a kernel serves all lengths, and is built once
PAPER_HEADS = Case(1337, 1337, 32, 2, 192, 128, 1, PAPER, dtype="bfloat16")
CASES = (
    *(Case(777, 777, 2 * G, 2, *WIDTHS, 1, MIDDLE, dtype="bfloat16") for G in GROUPS),
    PAPER_HEADS,
    dataclasses.replace(PAPER_HEADS, D=128, B=2, T=301, S=2049, dtype="float16"),
    dataclasses.replace(PAPER_HEADS, D=256, Dv=256, H=8, T=500, S=500),
    dataclasses.replace(PAPER_HEADS, D=48, Dv=80, H=6, config=MIDDLE, B=3, T=200, S=900),
    # More blocks than scores are held at a time.
    dataclasses.replace(PAPER_HEADS, D=128, H=16, Hkv=1, T=65, S=131072),
    dataclasses.replace(
        PAPER_HEADS,
        H=12,
        T=1500,
        S=1500,
        config=MIDDLE,
        segments=(700, 1, 33, 1, 500, 200, -65),
    ),
    dataclasses.replace(
        PAPER_HEADS,
        D=64,
        T=300,
        S=900,
        config=MIDDLE,
        segments=(1,) * 50 + (600, 230, -20),
        dtype="float16",
    ),
    dataclasses.replace(PAPER_HEADS, T=9, S=9),  # no compressed token
    PACKED,
    # Nearly all is padding, in which all is NaN.
    Case(777, 777, 32, 2, *WIDTHS, 1, MIDDLE, (1,) * 99 + (-678,), "bfloat16"),
    dataclasses.replace(
        PAPER_HEADS, config=NSAConfig(16, 16, 16, num_selected=64, window=0), H=4, T=600, S=3000
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps(case):
    check_steps(posed(case), *BRANCHES, "scores", "whole")


@pytest.mark.parametrize("scale", [None, 4.0])
def test_any_blocks_in_any_order(scale):
    for heads in (2, 6, 32):
        check_any_blocks(dataclasses.replace(CASES[0], H=heads, T=701, S=777), scale)


# 134 blocks; a tile with tokens of two sequences.
BLOCKS = Case(
    65,
    2140,
    dtype="bfloat16",
    B=1,
    D=64,
    config=NSAConfig(16, 16, 16, num_selected=6, window=10),
)
GROUPED = [(group, segments) for group in GROUPS for segments in (None, (2105, 35))]


@pytest.fixture(params=[scores.KEYS, scores.Scores.held], ids=["in-parts", ""])
def specs(request, monkeypatch):
    """Those of the kernels for scores; with few scores held at a time, or all."""
    found, make = [], scores.Scores

    @functools.wraps(make, updated=())  # a description names it as of its module
    def record(**sizes):
        found.append(make(**{**sizes, "held": request.param}))
        return found[-1]

    monkeypatch.setattr(scores, "Scores", record)
    yield found
    assert found and all((spec.chunks > 1) == (request.param == scores.KEYS) for spec in found)


@pytest.mark.parametrize(("group", "segments"), GROUPED, ids=str)
def test_scores_of_both_ways(group, segments, specs):
    case = dataclasses.replace(BLOCKS, H=2 * group, Hkv=2, segments=segments)
    check_steps(posed(case), "scores")
    assert all(spec.swap_ab == (group > 16) for spec in specs)


@pytest.mark.parametrize(
    "config",
    [
        NSAConfig(16, 4, 32, num_selected=6),  # a token reaches 3 strides further
        NSAConfig(16, 16, 16, num_selected=40, num_initial=0, num_local=0),
        NSAConfig(4, 4, 32, num_selected=3),  # forced blocks only
    ],
    ids=["cover-4", "none-forced", "all-forced"],
)
@pytest.mark.parametrize("group", [4, 16])
def test_scores_of_other_blocks(group, config):
    case = dataclasses.replace(BLOCKS, H=group, Hkv=1, S=1100, config=config)
    check_steps(posed(case), "scores")


@pytest.mark.parametrize("group", GROUPS)
def test_ties_of_all_groups_go_to_the_lower_block(group, specs):
    check_ties(dataclasses.replace(BLOCKS, H=group, Hkv=1, T=18))


def test_automatic_choice_takes_the_kernels():
    p = problem(PAPER_HEADS)
    plan = nsa_jax.explain(p.query, p.key, p.value, config=PAPER)
    assert [choice.implementation for choice in plan] == ["mosaic"] * 4
    np.testing.assert_array_equal(
        *(np.asarray(attention(p, name)) for name in (None, "mosaic"))
    )


def test_vmap_and_shard_map_change_nothing():
    p = problem(dataclasses.replace(CASES[6], B=2, T=300, S=300))
    arrays = [getattr(p, name) for name in ARRAYS]
    whole = functools.partial(nsa_jax.attention, config=MIDDLE, implementation="mosaic")
    spec, devices = PartitionSpec("batch", None, "heads"), np.array(jax.devices()[:1])
    mesh = Mesh(devices.reshape(1, 1), ("batch", "heads"))
    sharded = jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=spec)
    want = np.asarray(call(whole, *arrays))
    np.testing.assert_array_equal(np.asarray(call(sharded, *arrays)), want)
    mapped = call(jax.vmap(whole), *(x[:, None] for x in arrays))
    np.testing.assert_array_equal(np.asarray(mapped)[:, 0], want)


OF_THREE, OF_SIXTEEN = (  # heads a group
    Case(333, 411, 2 * G, 2, *WIDTHS, 1, MIDDLE, dtype="bfloat16") for G in (3, 16)
)
GRADIENTS = (
    # Others have groups of 2, 4, 5, 8 and 9, here and in `test_gathered.py`.
    *(dataclasses.replace(OF_THREE, H=2 * G) for G in (1, 3, 6, 16, 32, 64)),
    dataclasses.replace(PAPER_HEADS, T=500, S=500),
    dataclasses.replace(PAPER_HEADS, D=128, B=2, T=301, S=1049, dtype="float16"),
    dataclasses.replace(PAPER_HEADS, D=256, Dv=256, H=8, T=300, S=300),
    dataclasses.replace(PAPER_HEADS, D=48, Dv=80, H=6, config=MIDDLE, B=3, T=200, S=500),
    dataclasses.replace(PAPER_HEADS, D=96, Dv=80, H=10, T=300, S=300),
    dataclasses.replace(PAPER_HEADS, D=16, Dv=48, H=18, config=MIDDLE, T=200, S=300),
    dataclasses.replace(
        PAPER_HEADS,
        H=12,
        T=700,
        S=700,
        config=MIDDLE,
        segments=(300, 1, 33, 1, 100, 200, -65),
    ),
    dataclasses.replace(
        PAPER_HEADS,
        D=64,
        T=300,
        S=500,
        config=MIDDLE,
        segments=(1,) * 50 + (200, 230, -20),
        dtype="float16",
    ),
    dataclasses.replace(
        PAPER_HEADS,
        T=600,
        S=600,
        D=128,
        H=16,
        config=dataclasses.replace(MIDDLE, select_block=128, num_selected=3),
        segments=(1, 70, 500, 1, -28),
    ),
    dataclasses.replace(
        PAPER_HEADS, config=NSAConfig(16, 16, 16, num_selected=20, window=0), H=4, T=300, S=700
    ),
    dataclasses.replace(PAPER_HEADS, T=9, S=9),  # no compressed token
    BLOCK_128,
    PACKED,
)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients(case):
    check_whole(posed(case))


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("case", [OF_THREE, OF_SIXTEEN, *GRADIENTS[9:11]], ids=str)
def test_gradients_of_a_step(case, name):
    """Those of the log-sum-exp too."""
    check_step(posed(case), name)


@pytest.mark.parametrize("longest", [100, work_items.MAX_ENTRIES])
def test_gradients_of_popular_blocks(longest, monkeypatch):
    """Every query has the first block: its list is many work items."""
    set_limits(monkeypatch, item_entries=longest)
    p = posed(dataclasses.replace(OF_SIXTEEN, T=900, S=900))
    assert (p.block_indices == 0).any(dim=-1).all()
    check_step(p, "selected")


@pytest.mark.parametrize("heads", [2, 6, 32])
def test_repeated_gradients_are_bitwise_equal(heads):
    p = posed(dataclasses.replace(PAPER_HEADS, H=heads, T=4096, S=4096), "any")
    first, *others = (bits(p) for _ in range(3))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_cached_attention_in_chunks():
    case = dataclasses.replace(PAPER_HEADS, D=128, B=2, T=1000, S=1000)
    p = problem(case)
    cache = nsa_jax.init_cache(2, 1024, 2, 128, 128, config=PAPER, dtype=jnp.bfloat16)
    step = jax.jit(
        functools.partial(nsa_jax.cached_attention, config=PAPER, implementation="mosaic")
    )
    outs, begin = [], 0
    for size in (500, 499, 1):
        new = [getattr(p, name)[:, begin : begin + size] for name in ARRAYS]
        out, cache = step(*new, cache)
        outs.append(out)
        begin += size
    got, want = (
        np.asarray(x, np.float32) for x in (jnp.concatenate(outs, axis=1), attention(p, "xla"))
    )
    np.testing.assert_allclose(got, want, atol=8 * 2.0**-8 * abs(want).max())


def test_offsets_above_31_bits():
    """The last of more than 2**31 elements of the query are those of a small problem."""
    length, few = 131072 + 64, 100
    key = jax.random.key(0)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(seed, tokens, heads):
        return jax.random.normal(
            jax.random.fold_in(key, seed), (1, tokens, heads, 128), jnp.bfloat16
        )

    query, keys, values = (normal(i, length, heads) for i, heads in enumerate((128, 8, 8)))
    assert query.size > 2**31
    where = {"config": PAPER, "kv_len": length}
    compressed = [call(nsa_jax.compress, x, config=PAPER) for x in (keys, values)]
    tail = query[:, -few:]
    indices = run("select_blocks", query, compressed[0], **where)
    steps = {
        "select_blocks": compressed[:1],
        "compressed_attention": compressed,
        "selected_attention": [keys, values, indices],
        "sliding_attention": [keys, values],
    }
    for name, arrays in steps.items():
        large = run(name, query, *arrays, **where)
        large = [np.asarray(x[:, -few:]) for x in jax.tree.leaves(large)]
        if name == "selected_attention":
            arrays[2] = indices[:, -few:]
        small = call(getattr(nsa_jax, name), tail, *arrays, implementation="xla", **where)
        for got, want in zip(large, jax.tree.leaves(small), strict=True):
            if got.dtype == np.int32:
                np.testing.assert_array_equal(got, np.asarray(want))
                continue
            got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
            np.testing.assert_allclose(got, want, atol=4 * 2.0**-8 * abs(want).max())


@pytest.mark.parametrize("segments", [None, (300, 1, 399, -77)], ids=["", "packed"])
def test_a_custom_call_gives_the_bits_of_kernels_of_one_length(segments, monkeypatch):
    p = problem(dataclasses.replace(CASES[6], B=1 if segments else 2, segments=segments))

    def found():
        def both(*arrays):
            options = {"config": MIDDLE, "segment_ids": p.segment_ids}
            out, pull = jax.vjp(
                lambda *x: nsa_jax.attention(*x, implementation="mosaic", **options), *arrays
            )
            return out, *pull(jnp.ones_like(out))

        return call(both, *(getattr(p, name) for name in ARRAYS))

    once = found()
    pretend.machine(monkeypatch, ffi_serves=False)
    for x, y in zip(once, found(), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

"""What Mosaic kernels do besides the numbers of `test_parity.py`: in Pallas' GPU interpreter, which
reports races, and what they refuse.
"""

import contextlib
import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import Mesh, PartitionSpec

import kernels_pallas
import nsa_jax
from kernels_pallas.mosaic import capability, mainloop, operands
from nsa_core.config import NSAConfig
from nsa_core.plan.kernels import kernels_of
from nsa_core.steps import mosaic_gather
from nsa_jax.dispatch import REGISTRY
from tests import pretend, refusals
from tests.devices import on_hopper
from tests.jaxprs import equations, layer_types
from tests.limits import set_limits
from tests.paths import of_jax, steps_of_jax, to_jax
from tests.posed import pose
from tests.problems import CASES, PAPER, SMALL, TABLE, TINY, check, problem
from tests.problems import FAR as FAR_BLOCKS
from tests.tables import table
from tests.test_small_scores import BY_SCORE, FAR, LOWEST, far_blocks


def run(step, *arrays, **options):
    step = functools.partial(getattr(nsa_jax, step), implementation="mosaic", **options)
    return jax.jit(step)(*arrays)


def tokens_of(p):
    """Query, key, value and gates, of JAX."""
    return [*map(to_jax, p.leaves)]


@pytest.mark.parametrize("stages", TABLE["stages"])
def test_selected_with_other_stages(stages, interpreted, monkeypatch):
    chosen = dict(zip(("key_stages", "value_stages"), stages, strict=True))
    set_limits(monkeypatch, selected_stages=lambda *widths: chosen)
    p = problem(TINY)
    found = steps_of_jax(p, "mosaic", gradients=False, only=["selected"])
    check(p, found, p.expected_steps())


@pytest.mark.parametrize("heads", [2, 20])
def test_scores_below_the_range_of_float32_are_equal(heads, interpreted):
    given = map(jnp.asarray, far_blocks(heads, jnp.bfloat16))
    found = run("select_blocks", *given, config=FAR, kv_len=480, scale=1.0)
    assert found.tolist() == [[[BY_SCORE]], [[LOWEST]]]


# Transformations


def test_vmap_equals_a_loop_bit_by_bit(interpreted):
    """Outputs and gradients of queries."""
    query, key, value, gates = tokens_of(problem(TINY))
    queries = jnp.stack([query, query[:, ::-1]])

    @jax.jit
    def both(query):
        options = {"config": SMALL, "implementation": "mosaic"}
        out, pull = jax.vjp(lambda x: nsa_jax.attention(x, key, value, gates, **options), query)
        return out, pull(jnp.ones_like(out))[0]

    mapped = jax.jit(jax.vmap(both))(queries)
    for i in (0, 1):
        for many, one in zip(mapped, both(queries[i]), strict=True):
            np.testing.assert_array_equal(many[i], one)


@pytest.mark.parametrize("name", TABLE["over devices"])
def test_shard_map_over_batch_and_heads(name, monkeypatch):
    """Traced and lowered for GPUs: the interpreter knows one device."""
    heads, kv_heads, length, width, config, kernel = TABLE["over devices"][name]
    config = NSAConfig(**config)
    set_limits(monkeypatch, long_list=0.7, gathered_bytes=1)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, spec = Mesh(devices, ("batch", "heads")), PartitionSpec("batch", None, "heads")
    where = "segment_ids" if name == "segment_ids" else "kv_len"
    option = jnp.full(2, length) if where == "kv_len" else jnp.zeros((2, length), jnp.int32)

    def attend(query, key, value, gates, option):
        """All steps at once, which know the lengths of a cache."""
        at = {where: option}
        segments = {"segment_ids": at.get("segment_ids")}
        compressed = [nsa_jax.compress(x, config=config, **segments) for x in (key, value)]
        each = nsa_jax.Branches.each
        gates = nsa_jax.Branches(*(gates[..., i] for i in range(3)))
        run = REGISTRY.entry("attention", "mosaic").load()
        return run(query, each(key), each(value), gates, compressed, None, config=config, **at)

    of_keys = spec if kv_heads > 1 else PartitionSpec("batch")
    specs = (spec, of_keys, of_keys, spec, PartitionSpec("batch"))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    loss = lambda *x: sharded(*x).astype(jnp.float32).sum()
    arrays = layer_types(2, length, heads=heads, kv_heads=kv_heads, width=width)
    gradients = loss if name == "e4m3" else jax.grad(loss, (0, 1, 2, 3))
    traced = jax.jit(gradients).trace(*arrays, option)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and kernel in text


by_path = pytest.mark.parametrize("implementation", ["mosaic", "xla"])


@by_path
def test_recomputed(implementation):
    """No output of a branch is kept: traced alone."""
    kept = []
    for recompute in (False, True):
        options = {"config": SMALL, "implementation": implementation, "recompute": recompute}
        attend = jax.jit(functools.partial(nsa_jax.attention, **options))
        with capability.interpreted(InterpretGPUParams()):
            out, pull = jax.eval_shape(
                functools.partial(jax.vjp, attend), *tokens_of(problem(TINY))
            )
        kept.append(len([x for x in jax.tree.leaves(pull) if x.shape == out.shape]))
    assert kept[0] >= kept[1] + 3


@by_path
def test_nothing_is_larger_than_the_output(implementation, monkeypatch):
    """Outside of the kernels, in the whole program; and no call back to the host. No array has all
    queries by all keys (or blocks, or compressed tokens), none every selected key.
    """
    pretend.jax_gpu(monkeypatch)
    set_limits(monkeypatch, jax_chunk_bytes=2**20)
    length = 2048
    given = layer_types(1, length, heads=16, kv_heads=4, width=64)
    attend = functools.partial(nsa_jax.attention, config=PAPER, implementation=implementation)
    jaxpr = jax.make_jaxpr(attend)(*given)
    found = list(equations(jaxpr.jaxpr))
    sizes = [v.aval.size for e in found for v in e.outvars if hasattr(v.aval, "size")]
    assert max(sizes) <= length * 16 * 64
    assert not [e for e in found if re.search("callback|infeed", e.primitive.name)]


# Tokens that leave the union of their tile


def test_later_tokens_change_nothing(interpreted, monkeypatch):
    """Not a bit, though with one block more the tiles after theirs leave."""
    set_limits(monkeypatch, long_list=0.7, gathered_bytes=1)
    p = problem(CASES["gathered: four heads"].but(T=50, S=306, own=False))
    given, where = [*map(to_jax, p.steps["selected"][:3])], {"config": FAR_BLOCKS}
    attend = lambda: run("selected_attention", *given, jnp.array(indices), **where)
    own = np.arange(256, 306) // 64
    indices = np.stack([0 * own + 1, own, 0 * own - 1], axis=-1)  # far and near
    indices = indices[None, :, None].astype(np.int32)
    first = attend()
    token = 31  # the last of its tile
    indices[0, token, 0] = 0, 1, own[token]
    for x, y in zip(attend(), first, strict=True):
        np.testing.assert_array_equal(x[:, :token], y[:, :token])
        assert (np.asarray(x[:, token + 1 : 48]) != np.asarray(y[:, token + 1 : 48])).any()


CHOICES = table("choice")


@pytest.mark.parametrize(("change", "packed", "limit"), CHOICES["gathered"])
def test_where_tokens_may_leave(change, packed, limit):
    empty = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arrays = {
        name: empty(shape) for name, shape in (CHOICES["gathered shapes"] | change).items()
    }
    value, config = arrays["key"], NSAConfig()
    given = arrays["query"], arrays["key"], value, arrays["indices"], config, packed
    assert mosaic_gather.gather_limit(*given) == limit
    other = dataclasses.replace(config, select_block=128)  # walked over in halves
    limit = 64 if arrays["query"].shape[2] == 32 else limit
    assert mosaic_gather.gather_limit(*given[:4], other, packed) == limit


def test_partials_are_at_most_half_an_output(monkeypatch):
    """Where an output is larger than what partials may take in any case."""
    set_limits(monkeypatch, gathered_bytes=1)
    layer = {"heads": 16, "kv_heads": 4, "key_width": 128, "value_width": 128}
    how = {"dtype": "bfloat16", "config": PAPER, "gradients": True}
    kernels = kernels_of(length=8192, **layer, **how, compresses=True, shared=True)
    names = "gathered_forward", "gathered_dq"
    made = {x.name: x.outputs[0].size for x in kernels if x.name in names}
    assert {*made} == {*names} and 2 * max(made.values()) <= 8192 * 16 * 128


# Refusals

FIT = pose("selected", 8, "jax", platform="gpu", H=4, capability=(9, 0), device=None)


@refusals.by_row("mosaic")
def test_refusals(row):
    problem = FIT._replace(**row.given())
    assert capability.why_not(FIT) is None
    assert kernels_pallas.why_not("mosaic", problem) == row.sentence


def test_registers_that_no_multiprocessor_has_are_refused():
    operands.check_registers(232, 232, 40)
    operands.check_registers(240)
    for wrong in CHOICES["registers"]:
        with pytest.raises(ValueError, match="registers per thread must fit the pool of"):
            operands.check_registers(*wrong)


def test_a_wait_that_is_missing_is_a_race(mutant, monkeypatch):
    """Which the fixture `interpreted` would report of any kernel."""
    waits, plgpu = [], mainloop.plgpu

    def barrier_wait(barrier):
        if waits:
            plgpu.barrier_wait(barrier)
        waits.append(barrier)

    wrong = types.SimpleNamespace(**vars(plgpu) | {"barrier_wait": barrier_wait})
    monkeypatch.setattr(mainloop, "plgpu", wrong)
    # After the wait that was left out it may stop at the next one: the race is noted by then.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        run("sliding_attention", *tokens_of(problem(TINY))[:3], config=SMALL)
    assert any(detector.races_found for detector in mutant)


# On a GPU


OF_MIDDLE = CASES["gpu jax forward: 1 heads, 777 tokens"].but(own=False)


@on_hopper
def test_automatic_choice_takes_the_kernels():
    query, key, value, gates = tokens_of(problem(CASES["gpu jax: paper"].but(own=False)))
    plan = nsa_jax.explain(query, key, value)
    assert [choice.implementation for choice in plan] == ["mosaic"] * 4
    attend = lambda name: nsa_jax.attention(query, key, value, gates, implementation=name)
    np.testing.assert_array_equal(attend(None), attend("mosaic"))


@on_hopper
def test_vmap_and_shard_map_change_nothing_on_a_gpu():
    case = OF_MIDDLE.but(B=2, T=300, S=300, H=12)
    arrays = tokens_of(problem(case))
    whole = functools.partial(nsa_jax.attention, config=case.config, implementation="mosaic")
    spec, devices = PartitionSpec("batch", None, "heads"), np.array(jax.devices()[:1])
    mesh = Mesh(devices.reshape(1, 1), ("batch", "heads"))
    sharded = jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=spec)
    want = jax.jit(whole)(*arrays)
    np.testing.assert_array_equal(jax.jit(sharded)(*arrays), want)
    mapped = jax.jit(jax.vmap(whole))(*(x[:, None] for x in arrays))
    np.testing.assert_array_equal(mapped[:, 0], want)


@on_hopper
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
    compressed = [
        jax.jit(functools.partial(nsa_jax.compress, config=PAPER))(x) for x in (keys, values)
    ]
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
        plain = functools.partial(getattr(nsa_jax, name), implementation="xla", **where)
        for got, want in zip(
            large, jax.tree.leaves(jax.jit(plain)(tail, *arrays)), strict=True
        ):
            if got.dtype == np.int32:
                np.testing.assert_array_equal(got, want)
                continue
            got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
            np.testing.assert_allclose(got, want, atol=4 * 2.0**-8 * abs(want).max())


@on_hopper
@pytest.mark.parametrize("documents", [None, (300, 1, 399)], ids=["", "packed"])
def test_a_custom_call_gives_the_bits_of_kernels_of_one_length(documents, monkeypatch):
    case = OF_MIDDLE.but(H=12, documents=documents, B=1 if documents else 2)
    p = problem(case)
    once = of_jax(p, "mosaic")
    pretend.machine(monkeypatch, ffi_serves=False)
    for x, y in zip(once.values(), of_jax(p, "mosaic").values(), strict=True):
        np.testing.assert_array_equal(x, y)

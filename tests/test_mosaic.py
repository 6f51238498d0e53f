"""What Mosaic kernels do besides the numbers of `test_parity.py`: in Pallas' GPU interpreter, which
reports races, and what they refuse.
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
from kernels_pallas.mosaic import capability, mainloop, operands
from kernels_pallas.specs import scores
from kernels_pallas.specs import selected as selected_spec
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem
from nsa_jax import mosaic
from nsa_jax.jax_ops import JaxOps
from tests.jaxprs import equations
from tests.limits import set_limits
from tests.paths import steps_of_jax, to_jax
from tests.problems import PAPER, SMALL, TINY, Case, check, check_selection, problem
from tests.test_small_scores import BY_SCORE, FAR, LOWEST, far_blocks

# A block of every 16 keys: many candidates.
FINE = NSAConfig(16, 16, 16, num_selected=6, window=10)
SIX = dataclasses.replace(SMALL, num_selected=6)
SELECTIONS = {
    f"{name}-{group}": Case(30, 110, group, 1, config=config, dtype="bfloat16", blocks="given")
    for name, config in {
        "none forced": NSAConfig(16, 4, 16, num_selected=3, num_initial=0, num_local=0),
        "all forced": NSAConfig(4, 4, 32, num_selected=3),
    }.items()
    for group in (2, 20)  # of `scores_qk` and `scores_kq`
}
SELECTIONS |= {
    f"ties-{group}": Case(30, 100, group, 1, dtype="float16", config=SIX, ties=True)
    for group in (2, 20)
}
IN_PARTS = {
    "many parts": Case(18, 4500, 3, 1, config=FINE, dtype="bfloat16", blocks="given"),
    # A tile with tokens of both documents, the second from block 132 on.
    "documents": Case(
        40, 2140, 3, 1, config=FINE, dtype="float16", documents=(2105, 35), blocks="given"
    ),
    "forced": Case(
        18,
        2200,
        3,
        1,
        config=dataclasses.replace(FINE, num_selected=3),
        dtype="float16",
        blocks="given",
    ),
    "a large group": Case(6, 2200, 20, 1, config=FINE, dtype="float16", blocks="given"),
    "ties": Case(18, 2200, 3, 1, dtype="float16", config=FINE, ties=True),
}


def run(step, *arrays, **options):
    step = functools.partial(getattr(nsa_jax, step), implementation="mosaic", **options)
    return jax.jit(step)(*arrays)


def tokens_of(p):
    """Query, key, value and gates, of JAX."""
    return [*map(to_jax, p.leaves)]


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3)])
def test_selected_with_other_stages(stages, interpreted, monkeypatch):
    chosen = dict(zip(("key_stages", "value_stages"), stages, strict=True))
    monkeypatch.setattr(selected_spec, "forward_stages", lambda *widths: chosen)
    p = problem(TINY)
    found = steps_of_jax(p, "mosaic", gradients=False, only=["selected"])
    check(p, found, p.expected_steps())


def check_choice(p):
    query, key, _ = map(to_jax, p.steps["compressed"])
    ids = None
    if p.case.documents is not None:
        ids = jnp.asarray(p.rows.tokens()[0][None].numpy(), jnp.int32)
    where = {"config": p.case.config, "kv_len": p.kv_len, "segment_ids": ids}
    check_selection(p, run("select_blocks", query, key, **where))


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection(name, interpreted):
    check_choice(problem(SELECTIONS[name]))


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


@pytest.mark.parametrize("name", IN_PARTS)
def test_scores_in_parts(name, in_parts):
    check_choice(problem(IN_PARTS[name]))


@pytest.mark.parametrize("group", [3, 20])  # of `scores_qk` and `scores_kq`
def test_scores_are_carried_from_one_part_to_the_next(group, in_parts):
    """A compressed token that lies in two blocks counts in both, wherever a part ends."""
    config = NSAConfig(16, 8, 16, num_selected=8)
    query = jnp.ones((1, 4, group, 16), jnp.float16)
    key = jnp.zeros((1, config.num_compressed(2200), 1, 16), jnp.float16)
    key = key.at[:, [127, 255]].set(1)  # in the blocks 63 and 64, 127 and 128
    indices = np.asarray(run("select_blocks", query, key, config=config, kv_len=2200))
    for chosen in indices.reshape(-1, 8):
        assert {63, 64, 127, 128} <= {*chosen.tolist()}


@pytest.mark.parametrize("heads", [2, 20])
def test_scores_below_the_range_of_float32_are_equal(heads, interpreted):
    given = map(jnp.asarray, far_blocks(heads, jnp.bfloat16))
    found = run("select_blocks", *given, config=FAR, kv_len=480, scale=1.0)
    assert found.tolist() == [[[BY_SCORE]], [[LOWEST]]]


# Transformations


def test_vmap_equals_a_loop_bit_by_bit(interpreted):
    """Outputs and gradients of queries, of two of which the last repeats itself."""
    query, key, value, gates = tokens_of(problem(TINY))
    queries = jnp.stack([query, query[:, ::-1]])

    @jax.jit
    def both(query):
        options = {"config": SMALL, "implementation": "mosaic"}
        out, pull = jax.vjp(lambda x: nsa_jax.attention(x, key, value, gates, **options), query)
        return out, pull(jnp.ones_like(out))[0]

    mapped = jax.jit(jax.vmap(both))(queries)
    for i in (0, 1, 1):
        for many, one in zip(mapped, both(queries[i]), strict=True):
            np.testing.assert_array_equal(np.asarray(many[i]), np.asarray(one))


def test_vmap_over_lengths(interpreted):
    query, key, value, _ = tokens_of(problem(TINY))
    options = {"config": SMALL, "implementation": "mosaic"}
    sliding = lambda kv_len: nsa_jax.sliding_attention(
        query[:, :3], key, value, kv_len=kv_len, **options
    )
    mapped = jax.vmap(sliding)(jnp.array([20, 9], jnp.int32))
    for i, length in enumerate((20, 9)):
        for a, b in zip(mapped, sliding(length), strict=True):
            np.testing.assert_array_equal(np.asarray(a[i]), np.asarray(b))


SHARDED = {  # heads, key/value heads, tokens, width; a kernel that must be there
    "kv_len": ((4, 2, 20, 16), SMALL, "selected_dq"),
    "segment_ids": ((4, 2, 20, 16), SMALL, "selected_dq"),
    "gathered": ((8, 4, 256, 64), NSAConfig(32, 32, 64, 3, 1, 1, 20), "gathered_dq"),
    "stored dS": ((32, 2, 128, 64), NSAConfig(16, 8, 64, 3, 1, 1, 50), "stored_ds_dq"),
}


@pytest.mark.parametrize("name", SHARDED)
def test_shard_map_over_batch_and_heads(name, monkeypatch):
    """Traced and lowered for GPUs: the interpreter knows one device."""
    (heads, kv_heads, length, width), config, kernel = SHARDED[name]
    set_limits(monkeypatch, long_list=0.7, gathered_bytes=1)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, spec = Mesh(devices, ("batch", "heads")), PartitionSpec("batch", None, "heads")
    where = "segment_ids" if name == "segment_ids" else "kv_len"
    option = jnp.full(2, length) if where == "kv_len" else jnp.zeros((2, length), jnp.int32)
    ran = []

    class Recording(JaxOps):
        def run(self, kernel, *arrays):
            ran.append(kernel.name)
            return super().run(kernel, *arrays)

    monkeypatch.setattr(mosaic, "OPS", Recording())

    def attend(query, key, value, gates, option):
        at = {where: option}
        segments = {"segment_ids": at.get("segment_ids")}
        compressed = [nsa_jax.compress(x, config=config, **segments) for x in (key, value)]
        each = nsa_jax.Branches.each
        gates = nsa_jax.Branches(*(gates[..., i] for i in range(3)))
        return mosaic.attention(
            query, each(key), each(value), gates, compressed, None, config=config, **at
        )

    specs = (*[spec] * 4, PartitionSpec("batch"))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    loss = lambda *x: sharded(*x).astype(jnp.float32).sum()
    shapes = (heads, width), (kv_heads, width), (kv_heads, width), (heads, 3)
    arrays = [jax.ShapeDtypeStruct((2, length, *x), jnp.bfloat16) for x in shapes]
    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*arrays, option)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert kernel in ran


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
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

"""Context parallelism: several ranks equal one device; bad input and faults."""

import functools
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P

import nsa_jax
import nsa_torch
from nsa_core import context_layout as layouts
from nsa_torch.context import local_graph
from nsa_torch.dispatch import REGISTRY
from tests import context_devices, spawned, torch_inputs
from tests import context_worker as worker
from tests.context_worker import CASES, CONFIG, Case

# The order of sums differs; relative to the largest entry.
TOLERANCE = 2e-6
SIZES = dict(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, config=CONFIG)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What each rank has found, and how it ended."""
    folder = tmp_path_factory.mktemp("context")
    codes = spawned.run(worker.main, worker.RANKS, folder)
    return [torch.load(folder / f"results.{rank}.pt") for rank in range(worker.RANKS)], codes


def assert_equal(found: dict, expected: dict, tolerance=TOLERANCE) -> None:
    """Each is within `tolerance` of the expected, relative to the largest entry."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        many = found[name][:, : one.shape[1]] if name == "k_cmp" else found[name]
        assert many.shape == one.shape, name
        if name == "indices":
            assert torch.equal(many, one)
        elif one.numel():
            apart = (many - one).abs().max() / one.abs().max().clamp(min=1e-30)
            assert apart < tolerance, name


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_equal_one_device(several, name):
    """Outputs, indices and every gradient, on every rank."""
    if name == "nan":  # reaches the queries that see it, and no chunk before the last
        one = worker.run(Case(96), worker.tensors(Case(96)))
        for found in several[0]:
            for x in ("out", "d query"):
                assert found[name][x][0, -1].isnan().any()
                assert_equal({x: found[name][x][:, :84]}, {x: one[x][:, :84]})
        return
    expected = worker.run(CASES[name], worker.tensors(CASES[name]))
    for found in several[0]:
        assert_equal(found[name], expected)


def test_the_module_has_positions_of_the_whole_sequence(several):
    expected = worker.through_layer()
    for found in several[0]:
        assert_equal(found["through_layer"], expected, 10 * TOLERANCE)


def test_scaling_is_measured_and_judged(several):
    """`bench.scale` on ranks: the same row everywhere but for the time of the own work."""
    for name in ("forward", "fwdbwd"):
        rows = [found["scaling"][name] for found in several[0]]
        for row in rows:
            assert row["status"] == "ok" and row["p20_ms"] <= row["ms"] <= row["p80_ms"]
            assert row["compute_ms"] > 0 and row["transport_ms"] > 0 and row["imbalance"] >= 1
            assert row["errors"] == rows[0]["errors"]
            assert len(row["errors"]) == (5 if name == "fwdbwd" else 1)
            assert max(row["errors"].values()) < 1e-6
    for found in several[0]:
        mutant = found["scaling"]["mutant"]
        assert mutant["status"] == "wrong"
        assert "key" in mutant["reason"] and "query" not in mutant["reason"]


def test_a_graph_that_is_retained(several):
    assert all(found["twice"] for found in several[0])


ALL = "must be valid on all ranks of context_mesh, got an error on rank 2"
BAD = [(kind, name) for kind, names in worker.TABLE["errors"].items() for name in names]


@pytest.mark.parametrize(("kind", "name"), BAD)
def test_bad_input_on_every_rank(several, kind, name):
    said = worker.TABLE["errors"][kind][name]
    for rank, found in enumerate(several[0]):
        error = found["bad_input"][name]
        if isinstance(said, dict):
            assert (said["own"] if rank == 2 else ALL) in error
            assert rank != 2 or "on all ranks" not in error
        else:
            assert said in error and error.startswith(f"{kind}: ")


def test_ranks_go_on_after_bad_input(several):
    assert all(found["bad_input"]["after"] == "" for found in several[0])


def test_calls_that_ranks_have_seen_are_decided_once(several):
    """Where a rank has not, the others say what they have; where they differ, each fails."""
    for rank, each in enumerate(several[0]):
        found, asked = each["known calls"], rank == 2
        assert found["seen"] == 3  # of four calls
        assert found["asked"] == asked and found["equal"] == [True] * 3
        assert found["scale"].startswith(
            "RuntimeError: arguments must have the same sizes on all"
        )
        assert found["new"].startswith("ValueError: " if asked else "RuntimeError: ")
        assert "on all ranks of context_mesh" in found["new"]


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_equal_one_and_stop_where_they_differ(tmp_path):
    ended = spawned.run(worker.main_on_gpus, 2, tmp_path)
    assert set(ended) <= {0, -signal.SIGABRT}
    for rank in range(2):
        found = torch.load(tmp_path / f"results.{rank}.pt")
        first, *others = found["ranks"]
        for one, two in zip(found["alone"], first, strict=True):
            torch.testing.assert_close(two, one, rtol=2e-2, atol=2e-2 * float(one.abs().max()))
        for again in others:
            assert all(map(torch.equal, again, first))


def test_a_rank_that_is_gone(several):
    found, ended = several
    assert ended == [0, 0, 0, 9]
    for each in found[:3]:
        error, seconds = each["gone"]
        assert (
            error.startswith("RuntimeError: context parallelism: ")
            and "rank has ended" in error
        )
        assert seconds < worker.TIMEOUT_S + 5


def test_a_graph_holds_nothing_that_it_kept():
    """Checkpointing drops that and makes it again; the graph then takes what it is given."""
    x, kept = torch.linspace(1, 2, 5), []
    out, gradients = local_graph(lambda x: x * x.exp().sin(), [x], kept)
    same, held = [t.clone() for t in kept], [weakref.ref(t) for t in kept]
    kept.clear()
    del kept
    assert held and not any(each() is not None for each in held)
    (found,) = gradients([x.clone()], same, torch.ones(5), False)
    want = out / x + x * x.exp() * x.exp().cos()
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(("kv_heads", "head_mib", "together"), worker.TABLE["head groups"])
def test_short_heads_are_gathered_together(kv_heads, head_mib, together):
    """As many as have 128 MiB, in equal groups; a long one goes by itself."""
    groups = layouts.head_groups(kv_heads, head_mib * 2**20)
    assert [x.stop - x.start for x in groups] == [together] * (kv_heads // together)
    assert [i for x in groups for i in range(x.start, x.stop)] == list(range(kv_heads))


@pytest.mark.parametrize("name", context_devices.CHOSEN)
def test_eight_devices_of_jax_equal_one_of_torch(name):
    """Outputs, indices and gradients: rows, tokens and heads on their own axes; packed rows."""
    found, gathers = context_devices.compared(name)
    assert gathers == context_devices.gathered_again(name)
    assert found.pop("indices") == 0
    assert {"out", "k_cmp", "d query", "d key", "d value", "d gates"} <= found.keys()
    assert max(found.values()) < TOLERANCE


@pytest.mark.parametrize("start, end", [(30, 52), (0, 41), (64, 96)])
@pytest.mark.parametrize("name", ["fa2", "sdpa", "reference"])
def test_the_last_queries_of_a_part_of_a_packed_row(name, start, end, monkeypatch):
    """A chunk's call gives what the whole row gives there."""
    case = CASES["packed"]
    x = worker.tensors(case)
    query, key, value = x["query"], x["key"][0], x["value"][0]
    borders = torch.tensor([0, 20, 21, 64, 72, 86])
    place = {"config": CONFIG, "cu_seqlens": borders}
    k_cmp, v_cmp = (nsa_torch.compress(t, **place) for t in (key, value))
    indices = nsa_torch.select_blocks(query, k_cmp, **place)
    steps = {
        "compressed": (k_cmp, v_cmp),
        "selected": (key, value, indices),
        "sliding": (key, value),
    }
    part, count = slice(start, end), CONFIG.num_compressed(end)
    for step, (*pair, rest) in ((k, (*v[:2], v[2:])) for k, v in steps.items()):
        by = lambda name, step=step: REGISTRY.entry(step, name).load()
        whole = by("sdpa")(query, *pair, *rest, kv_len=96, **place)[0]
        pair = [t[:, : count if t.shape[1] < 96 else end] for t in pair]
        with torch_inputs.on_the_cpu(monkeypatch):
            given = query[:, part], *pair, *(t[:, part] for t in rest)
            found = by(name)(*given, kv_len=end, **place)[0]
        torch.testing.assert_close(found, whole[:, part], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed, kind, layout", worker.TABLE["layers"])
def test_a_layer_of_jax_on_four_devices(packed, kind, layout):
    """Output and gradients of the weights are those of one device."""
    x = jax.random.normal(jax.random.key(0), (2, 61, 16))
    ids = jnp.arange(61)[None] // jnp.array([[23], [61]]) if packed else None
    auto = (jax.sharding.AxisType.Auto,)
    mesh, shard = jax.make_mesh((4,), ("context",), axis_types=auto), {"context_layout": layout}
    own = lambda t: t if t is None else nsa_jax.context.shard_sequence(t, 4, **shard)

    def loss(run, state):
        out = run(state)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    found = {}
    for several in (False, True):
        options = {"context_axis": "context", **shard} if several else {}
        layer = nsa_jax.nn.NSAAttention(**SIZES, **kind, **options, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        local = lambda state, x, ids, graph=graph: nnx.merge(graph, state)(x, segment_ids=ids)[
            0
        ]
        run = lambda state, local=local: local(state, x, ids)
        if several:
            tokens = P(None, "context")
            place = dict(mesh=mesh, in_specs=(P(), tokens, tokens), out_specs=tokens)
            shards = jax.shard_map(local, **place, check_vma=False)
            run = lambda state, shards=shards: nsa_jax.context.unshard_sequence(
                shards(state, own(x), own(ids)), 4, length=61, **shard
            )
        both = jax.jit(jax.value_and_grad(functools.partial(loss, run), has_aux=True))
        found[several] = jax.tree.leaves(both(state))
    for one, four in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(
            torch.tensor(np.array(four)), torch.tensor(np.array(one)), rtol=2e-4, atol=2e-5
        )


def test_what_a_layer_of_jax_refuses_on_several_devices():
    layer = nsa_jax.nn.NSAAttention(**SIZES, context_axis="context", rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 8, 16))
    with pytest.raises(ValueError, match="kv must be None if context_axis is given"):
        layer(x, layer.init_cache(1, 8))
    with pytest.raises(ValueError, match="varlen must be None if context_axis is given"):
        layer(x, varlen=layer.varlen(jnp.zeros((1, 8), jnp.int32)))
    with pytest.raises(ValueError, match="context_axis must be an axis of jax"):
        layer(x)

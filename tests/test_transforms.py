"""`jit`, `vmap`, `shard_map`, and what the hot path must not do."""

import functools
import importlib.util
import pathlib
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import nsa_jax
import nsa_jax.blocks
import nsa_jax.index_loss
import nsa_jax.indexer
from kernels_pallas.triton import index_descriptions
from nsa_jax import chunks, context
from nsa_jax.triton_ops import compiled_for
from tests import pretend
from tests.inputs import PAPER, SMALL, Case, call, problem
from tests.jaxprs import equations
from tests.limits import set_limits

ROOT = pathlib.Path(__file__).parent.parent


def arrays_of(p):
    return p.query, p.key, p.value, p.gates


class VariantsTest(chex.TestCase):
    """With and without `jit`, from arrays on the host and on the device."""

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_vmap_over_a_leading_axis(self):
        problems = [arrays_of(problem(Case(40, 40), seed)) for seed in (0, 3)]
        whole = functools.partial(nsa_jax.attention, config=SMALL)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *problems)
        together = self.variant(jax.vmap(whole))(*stacked)
        alone = [call(whole, *arrays) for arrays in problems]
        chex.assert_trees_all_close(list(together), alone, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("budget", [20_000, chunks.BUDGET_BYTES], ids=["chunks", "whole"])
@pytest.mark.parametrize("axes", [(2, 1), (1, 4), (2, 4)], ids=str)
def test_shard_map_over_batch_and_heads(axes, budget, monkeypatch):
    set_limits(monkeypatch, jax_chunk_bytes=budget)
    if len(jax.devices()) < axes[0] * axes[1]:
        pytest.fail(f"needs {axes[0] * axes[1]} devices; XLA_FLAGS of conftest were overridden")
    p = problem(Case(50, 50, H=8, Hkv=4))
    devices = np.array(jax.devices()[: axes[0] * axes[1]]).reshape(axes)
    spec = PartitionSpec("batch", None, "heads")
    whole = functools.partial(nsa_jax.attention, config=SMALL)
    sharded = jax.shard_map(
        whole, mesh=Mesh(devices, ("batch", "heads")), in_specs=spec, out_specs=spec
    )
    arrays = arrays_of(p)
    got, want = call(sharded, *arrays), call(whole, *arrays)
    chex.assert_trees_all_close(jax.device_get(got), want, rtol=1e-7, atol=1e-6)
    loss = lambda f: lambda *x: (f(*x) ** 2).sum()
    got = call(jax.grad(loss(sharded), (0, 1, 2)), *arrays)
    want = call(jax.grad(loss(whole), (0, 1, 2)), *arrays)
    chex.assert_trees_all_close(jax.device_get(got), want, rtol=1e-7, atol=2e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_a_scale_of_numpy(kind, wrap):
    """Is a number as Python's is, whatever is differentiated."""
    p = problem(Case(40, 40, H=4, Hkv=2))
    lists = jnp.zeros((*p.query.shape[:2], 1, 1), jnp.int32)
    scale, found = kind(0.25), []

    def losses(query, scale):
        arrays = p.key, p.value
        out = nsa_jax.attention(query, *arrays, p.gates, config=SMALL, scale=scale)
        by_list, lse = nsa_jax.block_attention(
            query, *arrays, lists, block_size=16, scale=scale, return_residual=True
        )
        index = query[:, :, :2], p.key[:, :, 0]
        scales = {"scale": scale, "index_scale": scale}
        kl = nsa_jax.indexer_kl(query, p.key, lse, *index, lists, block_size=16, **scales)
        return out.sum() + by_list.sum() + kl.sum()

    for each in (0.25, scale):
        found.append(wrap(jax.grad(functools.partial(losses, scale=each)))(p.query))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_where_integers_have_64_bits(dtype):
    """With `jax_enable_x64` arrays of lengths and lists mix with no integers of 64 bits."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
        query, key, gates = normal(2, 20, 4, 8), normal(2, 24, 2, 8), normal(2, 20, 4, 3)
        lists = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (2, 20, 1, 2))
        new = query, key[:, :20], key[:, :20], gates
        lengths = jnp.array([20, 24])
        nsa_jax.sliding_attention(query, key, key, config=SMALL, kv_len=lengths)
        _, lse = nsa_jax.block_attention(
            *(query, key, key, lists),
            block_size=8,
            query_seq_lengths=jnp.array([5, 20]),
            key_value_seq_lengths=lengths,
            return_residual=True,
        )
        index = normal(2, 20, 2, 4), normal(2, 24, 4)
        nsa_jax.indexer_kl(query, key, lse.astype("float32"), *index, lists, block_size=8)
        nsa_jax.indexer_kl(query, key, lse, *index, kv_len=22)
        cache = nsa_jax.init_cache(2, 40, 2, 8, 8, config=SMALL, dtype=dtype)
        _, cache = nsa_jax.cached_attention(*new, cache)
        assert cache.length.dtype == jnp.int32
        pages = nsa_jax.PagedCache(10, 2, 8, 8, config=SMALL, dtype=dtype)
        where = jnp.arange(6, dtype=jnp.int32).reshape(2, 3), jnp.full(2, 20, jnp.int32)
        flat = [x.reshape(40, *x.shape[2:]) for x in new]
        pages = nsa_jax.append(pages, *flat[1:3], *where)
        found = nsa_jax.paged_attention(flat[0], flat[3], pages, *where)
        want = nsa_jax.attention(*new, config=SMALL).reshape(found.shape)
        np.testing.assert_allclose(found, want, atol=1e-5)


def on_pages() -> dict[str, tuple[Any, tuple]]:
    """Calls on pages, each with its arrays, of NumPy: rows of 5 and 3 queries."""
    floats = lambda *shape: np.ones(shape, np.float32)
    integers = lambda *rows: np.array(rows, np.int32)
    cache = nsa_jax.PagedCache(8, 2, 8, 8, config=SMALL, dtype=jnp.float32)
    cache = jax.tree.map(np.asarray, cache)
    where = integers([5, 0], [2, 3]), integers(20, 21)
    few = functools.partial(nsa_jax.paged_attention, max_seqlen_q=5)
    tail = functools.partial(nsa_jax.paged_block_attention, block_size=16, include="tail")
    query, gates, starts = floats(8, 4, 8), floats(8, 4, 3), integers(0, 5, 8)
    attention = query, gates, cache, *where
    return {
        "paged_attention": (nsa_jax.paged_attention, attention),
        "paged_attention, rows that differ": (nsa_jax.paged_attention, (*attention, starts)),
        "paged_attention, rows made even": (few, (*attention, starts)),
        "paged_block_attention": (
            lambda *x: tail(*x[:-1], cu_seqlens_q=x[-1]),
            (query, *floats(2, 8, 16, 2, 8), *where, np.full((8, 1, 2), -1, np.int32), starts),
        ),
        "copy_pages": (nsa_jax.PagedCache.copy_pages, (cache, integers(1), integers(2))),
    }


@pytest.mark.parametrize("name", on_pages())
def test_arrays_of_numpy_beside_traced_ones(name):
    function, arrays = on_pages()[name]
    for i in range(len(arrays)):
        for traced in ({i}, {*range(len(arrays))} - {i}):

            def call(given, traced=traced):
                return function(*(given[j] if j in traced else x for j, x in enumerate(arrays)))

            jax.eval_shape(call, {j: arrays[j] for j in traced})


ON_LISTS = (
    "index_blocks",
    "indexer_kl",
    "block_attention",
    "paged_block_attention",
    "paged_index_blocks",
    "paged_attention",
)


def on_lists(batch=2):
    """Calls whose automatic choice is Triton on a GPU: each with its arrays and launches."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    query, key, value = normal(batch, 32, 4, 16), *normal(2, batch, 48, 2, 16)
    index_query, index_key = normal(batch, 32, 2, 16), normal(batch, 48, 16)
    few, many = (
        jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, 32, 1, n)) for n in (2, 80)
    )
    pages = *normal(2, 8, 16, 2, 16), jnp.asarray(rng.permutation(8)[: 3 * batch], jnp.int32)
    where = pages[2].reshape(batch, 3), jnp.full(batch, 40, jnp.int32)
    chosen, lse = {"pool": 16, "num_selected": 2}, jnp.zeros((batch, 32, 4))
    cache = nsa_jax.PagedCache(8, 2, 16, 16, config=SMALL)
    cache = cache.replace(selected_key=pages[0], selected_value=pages[1])

    def kl(index_query, index_key):
        given = query, key, lse, index_query, index_key, few
        return nsa_jax.indexer_kl(*given, block_size=16).sum()

    return {
        "index_blocks": (
            functools.partial(nsa_jax.index_blocks, **chosen),
            (index_query, index_key),
            1,
        ),
        "indexer_kl": (jax.grad(kl, (0, 1)), (index_query, index_key), 6),
        "block_attention": (
            lambda *x: nsa_jax.block_attention(*x, many, block_size=16),
            (query, key, value),
            2,
        ),
        "paged_block_attention": (
            lambda x: nsa_jax.paged_block_attention(
                x, *pages[:2], *where, few[:, 0], block_size=16
            ),
            (query[:, 0],),
            2,
        ),
        "paged_index_blocks": (
            lambda x: nsa_jax.paged_index_blocks(x, pages[0][:, :, 0], *where, **chosen),
            (index_query[:, 0],),
            2,
        ),
        "paged_attention": (
            lambda x: nsa_jax.paged_attention(
                x, x[..., :3], cache, *where, implementation="triton"
            ),
            (query[:, 0],),
            2,
        ),
    }


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="lowers kernels")
@pytest.mark.parametrize("name", ON_LISTS)
def test_kernels_on_lists_are_mapped(name, monkeypatch):
    """For a GPU that need not be there: as many launches as for one."""
    for module in (nsa_jax.indexer, nsa_jax.index_loss, nsa_jax.blocks):
        monkeypatch.setattr(module, "chosen_implementation", lambda *_: "triton")
    monkeypatch.setattr(nsa_jax.indexer, "_implementation", lambda *_: "triton")
    monkeypatch.setattr(index_descriptions, "_kl_tiles", lambda *_: (16, 4, 1))  # compile fast
    pretend.machine(monkeypatch, jax_capability=(9, 0))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    function, arrays, launches = on_lists()[name]
    with compiled_for((9, 0)):
        traced = jax.jit(jax.vmap(function)).trace(*(jnp.stack([x, x]) for x in arrays))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_LISTS)
def test_mapped_kernels_on_lists_on_a_gpu(name):
    function, arrays, _ = on_lists()[name]
    both = [jnp.stack([x, x[::-1]]) for x in arrays]
    found = jax.tree.leaves(jax.jit(jax.vmap(function))(*both))
    for i in range(2):
        alone = jax.tree.leaves(jax.jit(function)(*(x[i] for x in both)))
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_array_equal(x[i].astype(jnp.float32), y.astype(jnp.float32))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("spec", [PartitionSpec("rows"), PartitionSpec(None, None, "rows")])
def test_arrays_over_explicit_axes(spec, wrap):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    arrays = arrays_of(problem(Case(30, 30, H=4, Hkv=2)))
    whole = functools.partial(nsa_jax.attention, config=SMALL)
    want = call(whole, *arrays)
    arrays = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, spec))
    message = (
        "^arrays must not be sharded over explicit axes .*'rows'.*; call attention inside of"
    )
    with pytest.raises(NotImplementedError, match=message):
        wrap(whole)(*arrays)
    with pytest.raises(ValueError, match=r"^scale must be"):
        wrap(functools.partial(whole, scale=-1.0))(*arrays)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.sharding.auto_axes(whole, out_sharding=spec))(*arrays)
    chex.assert_trees_all_close(jax.device_get(got), want, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_sequence_over_an_explicit_axis(layout):
    """Which an axis of `jax.make_mesh` is where nothing is said."""
    mesh, spec = jax.make_mesh((2,), ("context",)), PartitionSpec(None, "context")
    where = jax.sharding.NamedSharding(mesh, spec)
    options = {"context_layout": layout}
    x = jnp.arange(32).reshape(1, 16, 2)
    want = context.shard_sequence(x, 2, **options)
    for wrap in (lambda f: f, jax.jit):
        there = wrap(functools.partial(context.shard_sequence, size=2, **options))
        found = there(jax.device_put(x, where))
        assert jax.typeof(found).sharding.spec[1] == "context"
        np.testing.assert_array_equal(found, want)
        for length in (None, 13):
            back = wrap(
                functools.partial(context.unshard_sequence, size=2, length=length, **options)
            )
            np.testing.assert_array_equal(back(found), x[:, :length])


def compiled_memory(case, function, dtype=jnp.float32):
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    arrays = (
        shape(case.B, case.T, case.H, case.D),
        shape(case.B, case.S, case.Hkv, case.D),
        shape(case.B, case.S, case.Hkv, case.Dv),
        shape(case.B, case.T, case.H, 3),
    )
    memory = jax.jit(function).lower(*arrays).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def test_performance_guards_memory():
    """32k tokens stay under 2 GB forward, and grow with T, not with T * S."""
    whole = functools.partial(nsa_jax.attention, config=PAPER, implementation="xla")
    long = Case(32768, 32768, H=16, Hkv=1, D=128, Dv=128, B=1)
    assert compiled_memory(long, whole) < 2e9
    grads = jax.grad(lambda *x: whole(*x).astype(jnp.float32).sum(), (0, 1, 2, 3))
    assert compiled_memory(long, grads) < 5e9
    short = Case(16384, 16384, H=16, Hkv=1, D=128, Dv=128, B=1)
    assert compiled_memory(long, whole) < 2.5 * compiled_memory(short, whole)


def test_performance_guards_sizes(monkeypatch):
    """No array of all queries by all keys (or blocks, or compressed tokens), none of every
    selected key, in the whole program; and no call back to the host."""
    length = 2048
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    arrays = shape(1, length, 16, 64), shape(1, length, 4, 64), shape(1, length, 4, 64)
    set_limits(monkeypatch, jax_chunk_bytes=2**20)
    jaxpr = jax.make_jaxpr(functools.partial(nsa_jax.attention, config=PAPER))(
        *arrays, shape(1, length, 16, 3)
    )
    largest = max(
        var.aval.size
        for eqn in equations(jaxpr.jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "size")
    )
    assert largest <= length * 16 * 64  # nothing is larger than the output
    names = {eqn.primitive.name for eqn in equations(jaxpr.jaxpr)}
    assert not {n for n in names if "callback" in n or "infeed" in n}


def test_performance_guards_compile_once():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def whole(*arrays):
        return nsa_jax.attention(*arrays, config=SMALL)

    for seed in (0, 1, 2):
        p = problem(Case(40, 40), seed)
        whole(*arrays_of(p))
    with pytest.raises(AssertionError, match="traced"):
        p = problem(Case(41, 41))
        whole(*arrays_of(p))


IMPORTS = {
    r"jax\.experimental\.pallas|jax\.experimental import pallas": ["kernels_pallas/"],
    r"dlpack": ["interop/", "nsa_torch/autograd.py"],
    r"^\s*(import|from) torch": ["nsa_torch/", "interop/", "bench/"],
    # Folders of the checkout, which a user's project may have too.
    r"^\s*(import|from) (bench|configs|interop)\b": [],
    r"os\.environ|getenv": [
        "bench/__init__.py",
        "bench/harness/seed_env.py",
        "bench/lm/experiments.py",  # which GPUs there are: each run sees one of them
        "bench/harness/launchers.py",  # those of torchrun, srun, mpirun
        "kernels_pallas/triton/capability.py",  # CC, as Triton reads it
        # These hand a changed copy to a child:
        "bench/harness/process.py",
        "kernels_pallas/runtime/build.py",
    ],
}


@pytest.mark.parametrize("pattern", IMPORTS)
def test_layering(pattern):
    """Who may name what: kernels, DLPack, torch, environment variables."""
    packages = ("nsa_core", "nsa_jax", "nsa_torch", "interop", "kernels_pallas", "bench")
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if any(name.startswith(allowed) for allowed in IMPORTS[pattern]):
                continue
            found = re.search(pattern, path.read_text(), re.MULTILINE)
            assert not found, f"{name} must not say {found.group()!r}"

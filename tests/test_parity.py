"""All paths against one oracle: outputs, log-sum-exps, gradients and selections of all problems.

A path is a row of `paths.PATHS`, a problem one of `problems.CASES`, in whose padding all is NaN.
Paths on a GPU have `pytest.mark.gpu`.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from kernels_pallas.specs import scores
from kernels_pallas.specs.stored_ds import array as stored_array
from nsa_torch import sdpa
from tests import interpreted_triton, planned, pretend, problems
from tests.devices import needs_gpu
from tests.limits import set_limits
from tests.oracles import fa2, nsa
from tests.paths import PATHS, to_jax
from tests.problems import CASES, SMALL, STEP_NAMES, Case, Ragged, array, problem
from tests.tables import table

LIMITS = table("paths")["limits"]


@pytest.fixture
def in_chunks(monkeypatch):
    """Several chunks in every call, of which the last is not full."""
    short = sdpa.SHORT_CHUNK | {"cpu": 5}  # less than a window
    limits = {"torch_chunk_bytes": 50_000, "jax_chunk_bytes": 20_000, "short_chunk": short}
    set_limits(monkeypatch, **limits)


@pytest.fixture
def long_chunks(monkeypatch):
    """Longer than all queries, as on a GPU."""
    set_limits(monkeypatch, short_chunk=sdpa.SHORT_CHUNK | {"cpu": 1024})


@pytest.fixture
def few_scores(monkeypatch):
    """As few scores as can be are held at a time, which are not all."""
    specs, made = [], scores.Scores.__init__

    def few(spec, **sizes):
        specs.append(spec)
        made(spec, **{"held": scores.KEYS} | sizes)

    # The class stays: a description of a kernel names it.
    monkeypatch.setattr(scores.Scores, "__init__", few)
    yield
    assert all(spec.chunks > 1 for spec in specs) and specs


@pytest.fixture
def gathered_parts(monkeypatch):
    """Tiles gather tokens after one with more than two blocks, a thousand or so at a time."""
    set_limits(monkeypatch, long_list=0.7, gathered_bytes=2**24)
    built = pretend.watched(monkeypatch, "gathered_parts")
    yield
    assert built


@pytest.fixture
def gathered_tiles(gathered_parts, monkeypatch):
    """The same, in segments of few tokens."""
    set_limits(monkeypatch, gathered_bytes=1)


@pytest.fixture
def stored_ds(monkeypatch):
    """Every dq is of dS that is stored."""
    made = pretend.watched(monkeypatch, "stored_ds_gradients")
    yield
    assert made


@pytest.fixture
def planned_kernels(monkeypatch):
    """Kernels of torch's plans are interpreted."""
    with planned.interpreted(monkeypatch) as ran:
        yield ran


@pytest.fixture
def ds_chunks(planned_kernels, monkeypatch):
    """dS of two of five rows of `[B, Hkv]` at a time, where there is room for twice as many."""
    row = stored_array(1, 11, 3, 16, "float16").size * 2
    set_limits(monkeypatch, ds_chunk_bytes=4 * row)
    yield
    rows = [x.spec.stored_rows for x in planned_kernels if x.name == "stored_ds_dq"]
    assert rows == [2, 2, 1]


small_triton = pytest.fixture(interpreted_triton.small)


@pytest.fixture
def fa2_on_a_cpu(monkeypatch, in_chunks):
    pretend.machine(monkeypatch, fa2_kernel=fa2.varlen)


def rows(cases):
    """A parameter for each path and each of its cases."""
    return pytest.mark.parametrize(
        ("path", "case"),
        [
            pytest.param(name, case, marks=path.marks, id=f"{name}-{case}")
            for name, path in PATHS.items()
            for case in cases(path)
        ],
    )


def run(request, path, part, p, **options):
    for fixture in PATHS[path].fixtures:
        if fixture in LIMITS:
            set_limits(request.getfixturevalue("monkeypatch"), **LIMITS[fixture])
        else:
            request.getfixturevalue(fixture)
    return getattr(PATHS[path], part)(p, **options)


@rows(lambda path: path.cases)
def test_backward_parity(path, case, request):
    """The whole of attention: its output and the gradient of all that it reads."""
    p = problem(CASES[case])
    problems.check(p, run(request, path, "whole", p), p.expected)


@rows(lambda path: path.cases_of_steps)
def test_steps_and_selection_packed_or_not(path, case, request):
    """Each branch alone, gradients through its log-sum-exp too, and the selection."""
    p = problem(CASES[case])
    found = run(request, path, "steps", p)
    if "block_indices" in found:
        problems.check_selection(p, found.pop("block_indices"))
    if found:
        problems.check(p, found, p.expected_steps(PATHS[path].of_lse))


# Names of the seed's tests (docs/seed.md): `pytest -k` of them runs rows of these tables.
def test_backward_varlen(request):
    test_backward_parity("torch sdpa", "documents", request)


def test_gradcheck_varlen(request):
    test_backward_parity("torch reference", "documents", request)


@needs_gpu
@pytest.mark.gpu
def test_sel_cuda_gpu(request):
    test_backward_parity("cuda torch mosaic", "gpu: documents", request)


@pytest.mark.gpu
def test_triton_sel_backward_gpu(request):
    test_backward_parity("cuda torch triton", "gpu: documents", request)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["gpu: documents", "fewer queries than keys"])
def test_triton_sel_parity_gpu_and_triton_sel_edge_cases(case, request):
    test_steps_and_selection_packed_or_not("cuda torch triton", case, request)


def by_path(*names):
    rows = [pytest.param(name, marks=PATHS[name].marks) for name in names]
    return pytest.mark.parametrize("path", rows)


@by_path(
    "torch reference",
    "torch sdpa",
    "torch sdpa in chunks",
    "torch fa2",
    "jax reference",
    "jax xla",
    "torch mosaic",
    "torch triton",
    "cuda torch sdpa",
    "cuda torch fa2",
    "cuda torch mosaic",
)
def test_rows_of_different_lengths(path, request):
    """One is shorter than the queries, of which the first are padding then."""
    dtype, compressed = "float16" if "cuda" in path else "float32", torch.nan
    most, heads = 9, 2
    if "mosaic" in path:
        # Of compressed tokens that no query may see it has gradients of NaN where these are NaN.
        dtype, compressed = "bfloat16", 0.0
    if path == "torch mosaic":  # several tiles of queries
        dtype, most, heads = "float16", 24, 6
    cases = [Case(min(most, n), n, heads, 1, Dv=32, dtype=dtype, seed=n) for n in (80, 41, 4)]
    p = Ragged(*cases, compressed=compressed)
    p.check(run(request, path, "steps", p), PATHS[path].of_lse)


in_16_bits = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@by_path("torch reference", "torch sdpa", "torch jax", "jax xla", "torch triton")
@in_16_bits
def test_gradients_under_a_loss_scale(path, dtype, request):
    """dO . V is beyond float16, and no gradient that is asked for but those of gates."""
    # Kernels multiply with gradients of the logits in 16 bits.
    loud = 600.0 if "triton" in path else 4800.0
    p = problem(Case(40, 40, dtype=dtype, loud=loud, blocks="given"))
    problems.check_loud(p, run(request, path, "whole", p))


@in_16_bits
def test_gradients_of_blocks_under_a_loss_scale(dtype):
    """One block of all keys, which the sliding branch sees as well."""
    config = dataclasses.replace(SMALL, window=40)
    p = problem(Case(40, 40, config=config, dtype=dtype, loud=4800.0 / 3, blocks="given"))
    exact = (p.expected_steps(False)[0][f"sliding.{x}"] for x in STEP_NAMES[2:])
    lists, options = np.zeros((1, 40, 1, 1), np.int32), {"block_size": 40}
    run = functools.partial(nsa_jax.block_attention, implementation="xla", **options)
    _, pull = jax.vjp(lambda *x: run(*x, lists), *map(to_jax, (p.query, *p.keys, *p.values)))
    for x, want in zip(pull(to_jax(p.weight)), exact, strict=True):
        assert np.abs(array(x).astype(np.float64) - want).max() < 0.02 * np.abs(want).max()


@by_path("jax xla", "torch sdpa")
def test_the_same_input_gives_the_same_bits(path, request):
    """Under autocast too."""
    p = problem(CASES["fewer queries than keys"])
    first = run(request, path, "whole", p)
    with torch.autocast("cpu", torch.bfloat16):
        again = run(request, path, "whole", p)
    for name, x in first.items():
        np.testing.assert_array_equal(array(x), array(again[name]), name)


@by_path("torch sdpa", "jax xla")
def test_group_consistency(path, request):
    """Equal queries of a group give equal outputs, whatever the other heads of the group."""
    p = problem(CASES["three heads a group"])
    query = p.query.clone()
    query[:, :, 1] = query[:, :, 0]
    gates = p.gates[:, :, :1].repeat(1, 1, 6, 1)
    equal = dataclasses.replace(p, query=query, gates=gates)
    out = array(run(request, path, "whole", equal)["out"])
    np.testing.assert_array_equal(out[:, :, 0], out[:, :, 1])


MLP = [(8, 16), (128, 12), (12,), (12, 16), (16,)]
PHI = {
    "mean": (None, None),
    "pool": (nsa_torch.PoolParams, [(8, 16)]),
    "mlp": (nsa_torch.MLPParams, MLP),
    "rope": (nsa_torch.RopeMLPParams, [*MLP, (8,)]),
}


def compressed_by(name, kind, config, documents, x, params, weight):
    """The compression and its gradients of `x` and the parameters."""
    if name == "torch":
        leaves = [y.detach().requires_grad_() for y in (x, *params)]
        bounds = None if documents is None else torch.tensor(np.cumsum([0, *documents]))
        given = kind and kind(*leaves[1:])
        out = nsa_torch.compress(leaves[0], given, config=config, cu_seqlens=bounds)
        return out, *torch.autograd.grad(out, leaves, weight)
    ids = None
    if documents is not None:
        ids = nsa.Rows(1, x.shape[1], documents).tokens()[0][None].int()

    @jax.jit
    def both(weight, ids, *leaves):
        given = lambda x, *y: nsa_jax.compress(
            x, kind and kind(*y), config=config, segment_ids=ids
        )
        out, pull = jax.vjp(given, *leaves)
        return out, *pull(weight)

    return both(to_jax(weight), ids if ids is None else to_jax(ids), *map(to_jax, (x, *params)))


@pytest.mark.parametrize(
    "documents", [None, (1, 20, 0, 7, 43, 8), (0,)], ids=["", "documents", "padding alone"]
)
@pytest.mark.parametrize("phi", PHI)
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_gradcheck_of_compress(name, phi, documents, rng):
    """Windows and gradients of tokens and parameters in float64, NaN behind the last document."""
    normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape))
    (kind, shapes), place = PHI[phi], nsa.Rows(97, 97, documents or (97,))
    leaves = [normal(1, 97, 2, 16), *(normal(*shape) / 3 for shape in shapes or ())]
    if phi == "rope":
        leaves[-1] /= 100  # angles, which are computed in float32
    weight, hidden = normal(1, SMALL.num_compressed(97), 2, 16), place.padding(97)
    leaves = [x.requires_grad_() for x in leaves]
    clean = torch.where(hidden[:, None, None], 0, leaves[0])
    out = nsa.compress(clean, SMALL, place, leaves[1:] or None)
    grads = torch.autograd.grad(out, leaves, weight[:, : out.shape[1]])
    spare = weight.shape[1] - out.shape[1]
    expected = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, spare)), *grads
    dirty = torch.where(hidden[:, None, None], torch.nan, leaves[0].detach())
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = compressed_by(name, kind, SMALL, documents, dirty, leaves[1:], weight)
    for got, want in zip(found, map(array, expected), strict=True):
        np.testing.assert_allclose(array(got), want, rtol=1e-6, atol=1e-6 * abs(want).max())


@pytest.mark.parametrize("length", [3, 60, 62])
@pytest.mark.parametrize("block", [4, 12])
def test_the_mean_is_rounded_once(block, length):
    config = nsa_torch.NSAConfig(block, 4, 12)
    x = torch.randn(2, length, 3, 5).bfloat16().requires_grad_()
    place = nsa.Rows(length, length, (length,))
    wide = x.detach().double().requires_grad_()
    out, want = nsa_torch.compress(x, config=config), nsa.compress(wide, config, place)
    assert out.shape == want.shape
    half_ulp = functools.partial(torch.testing.assert_close, rtol=2**-8, atol=1e-6)
    half_ulp(out.double(), want)
    if length >= block:
        weight = torch.randn(out.shape).bfloat16()
        (grad,) = torch.autograd.grad(out, x, weight)
        (want_grad,) = torch.autograd.grad(want, wide, weight.double())
        half_ulp(grad.double(), want_grad)

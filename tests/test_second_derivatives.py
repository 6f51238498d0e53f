"""Second derivatives: right by `reference`, and JAX's `xla`; refused by all others."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.autograd.functional import hvp

import nsa_jax
import nsa_torch
from bench.block_selection import layer_of
from kernels_pallas.mosaic import capability
from kernels_pallas.triton.descriptions import Heads
from nsa_jax import mosaic, triton
from nsa_torch import Branches, MLPParams, NSAAttention, NSAConfig, PoolParams, heads
from nsa_torch.first_order import MESSAGE
from nsa_torch.huggingface.block_selection import block_attention
from tests import torch_inputs
from tests.devices import needs_gpu
from tests.inputs import SMALL
from tests.limits import set_limits
from tests.stand_in_kernels import stand_ins

LENGTH = 40
REFUSAL = re.escape(MESSAGE)


def normal(*shape, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), **options)


def inputs(dtype=torch.float32, length=LENGTH, num_heads=4, kv_heads=2, width=8):
    """Query, key, value, gates."""
    tokens = [(1, length, count, width) for count in (num_heads, kv_heads, kv_heads)]
    return [normal(*x, dtype=dtype) for x in (*tokens, (1, length, num_heads, 3))]


def indices(length=LENGTH, config=SMALL):
    found = torch.full((1, length, 2, config.num_selected), -1, dtype=torch.int32)
    found[..., 0] = 0
    return found


def whole(**given):
    def call(name, *tensors, config=SMALL):
        return nsa_torch.attention(*tensors, config=config, implementation=name, **given)

    return call


def with_compressed(name, query, key, value, gates, config=SMALL):
    pair = tuple(nsa_torch.compress(x, config=config) for x in (key, value))
    return whole(compressed=pair)(name, query, key, value, gates, config=config)


def branch(step, name, query, key, value, gates, config=SMALL):
    given = {
        "compressed": [nsa_torch.compress(x, config=config) for x in (key, value)],
        "selected": [key, value, indices(key.shape[1], config)],
        "sliding": [key, value],
    }
    return torch_inputs.run(step, name, query, *given[step], config=config)[0]


def adapter(name, query, key, value, gates):
    of = layer_of(heads=4, kv_heads=2, block=16, chosen=2)
    swapped = (x.transpose(1, 2) for x in (query, key, value))
    chosen = torch.zeros(1, 2, LENGTH, 1, dtype=torch.int64)
    return block_attention(of, *swapped, None, block_indices=chosen, implementation=name)[0]


CALLS = {
    "attention": whole(),
    "recompute": whole(recompute=True),
    "packed": whole(cu_seqlens=torch.tensor([0, 17, 33])),
    "block_indices": whole(block_indices=indices()),
    "compressed tokens": with_compressed,
    "block selection": adapter,
}
BRANCHES = {x: functools.partial(branch, x) for x in ("compressed", "selected", "sliding")}
PATHS = [(call, name) for call in CALLS for name in ("sdpa", "jax", "mosaic")]
PATHS += [(call, name) for call in BRANCHES for name in ("sdpa", "fa2", "jax", "mosaic")]


def check_refused(function, x):
    """Of a function of one tensor, in each of the ways to ask for a second derivative."""
    loss = lambda x: (function(x) ** 2).sum()
    x = x.detach().requires_grad_()
    with pytest.raises(NotImplementedError, match=REFUSAL):
        hvp(loss, x, torch.ones_like(x))
    for given in (loss(x), function(x).sum()):  # whose cotangent wants a gradient, or does not
        with pytest.raises(NotImplementedError, match=REFUSAL):
            torch.autograd.grad(given, x, create_graph=True)
    torch.autograd.grad(loss(x), x)


@pytest.mark.parametrize(("call", "name"), PATHS)
def test_refused(call, name, monkeypatch):
    """Kernels and FlashAttention-2 are stand-ins."""
    options = {"dtype": torch.bfloat16, "width": 16} if name == "mosaic" else {}
    tensors, function = inputs(**options), (CALLS | BRANCHES)[call]
    around = stand_ins if name == "mosaic" else torch_inputs.on_the_cpu
    with around(monkeypatch):
        for i in range(3):
            others = tensors[:i], tensors[i + 1 :]
            one = lambda x, others=others: function(name, *others[0], x, *others[1])
            check_refused(one, tensors[i])


TINY = NSAConfig(4, 2, 4, num_selected=2, num_local=1, window=3)
REFERENCE = {
    "attention": whole(),
    "recompute": whole(recompute=True),
    "packed": whole(cu_seqlens=torch.tensor([0, 6, 11])),
    "block_indices": whole(block_indices=indices(13, TINY)),
    "compressed tokens": with_compressed,
    **BRANCHES,
}


@pytest.mark.parametrize("call", REFERENCE)
def test_reference_against_finite_differences(call, monkeypatch):
    set_limits(monkeypatch, torch_chunk_bytes=300)  # several chunks of the gated sum
    tensors = [x.requires_grad_() for x in inputs(torch.float64, 13, 2, 2, 2)]
    function = functools.partial(REFERENCE[call], "reference", config=TINY)
    options = {"fast_mode": True, "atol": 1e-6}
    assert torch.autograd.gradgradcheck(lambda *x: function(*x).square(), tensors, **options)


@pytest.mark.parametrize("kind", [None, PoolParams, MLPParams])
def test_compression_against_finite_differences(kind):
    x = normal(1, 13, 2, 2, dtype=torch.float64)
    shapes = {None: [], PoolParams: [(4, 2)], MLPParams: [(4, 2), (8, 3), (3,), (3, 2), (2,)]}
    params = [normal(*shape, dtype=torch.float64) for shape in shapes[kind]]
    leaves = [t.requires_grad_() for t in (x, *params)]
    for bounds in (None, torch.tensor([0, 6, 11])):
        function = lambda x, *params, bounds=bounds: nsa_torch.compress(
            x, kind and kind(*params), config=TINY, cu_seqlens=bounds
        ).square()
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def layer(name, **options):
    torch.manual_seed(0)
    sizes = dict(l=4, d=2, l_sel=4, n_sel=2, w=3, num_local=1)
    return NSAAttention(16, 4, 2, 4, 4, **sizes, implementation=name, **options)


@pytest.mark.parametrize(("phi", "fused"), [("avg", False), ("mlp", False), ("mlp_pe", True)])
def test_a_layer(phi, fused, monkeypatch):
    """A Hessian times a vector, of input and weights, by `reference`; refused by default."""
    set_limits(monkeypatch, fused_heads_from=1 if fused else heads.FUSED_FROM)
    x = normal(1, 20, 16, dtype=torch.float64)
    made = layer("reference", phi=phi).double()
    names, weights = zip(*made.named_parameters(), strict=True)

    def loss(x, *weights):
        found = torch.func.functional_call(made, dict(zip(names, weights, strict=True)), (x,))
        return (found[0] ** 2).sum()

    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    ways = [normal(*t.shape, dtype=torch.float64) for t in leaves]
    _, found = hvp(loss, tuple(leaves), tuple(ways))
    step, grads = 1e-6, []
    for sign in (1, -1):
        moved = [
            (t.detach() + sign * step * way).requires_grad_()
            for t, way in zip(leaves, ways, strict=True)
        ]
        grads.append(torch.autograd.grad(loss(*moved), moved))
    for got, after, before in zip(found, *grads, strict=True):
        want = (after - before) / (2 * step)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with torch_inputs.on_the_cpu(monkeypatch):
        check_refused(lambda x: layer(None, phi=phi).double()(x)[0], x)


def test_norms_of_heads_on_a_gpu():
    """The gradient by a kernel is refused as it is recorded; here without memory."""
    sizes = [4, 2, 8, 8, 3, 0, 0, 0]  # of `Heads`
    row = Heads(*sizes).row
    made = lambda *shape: torch.empty(shape, device="meta", requires_grad=True)
    angles = [made(1, 9, 4).detach() for _ in range(2)]
    given = made(1, 9, row), *angles, made(8), made(8), 1e-6, sizes
    query = torch.ops.nsa.split_heads(*given)[0]
    (grad,) = torch.autograd.grad(query.sum(), given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        torch.autograd.grad(grad.sum(), given[0])


# JAX: an outer derivative is of what the inner one did, so that nothing is missing from it.


def of_jax(name, segments, *arrays):
    options = {"config": SMALL, "segment_ids": segments, "implementation": name}
    return jnp.square(nsa_jax.attention(*arrays, **options)).sum()


def test_xla_is_the_reference(monkeypatch):
    set_limits(monkeypatch, jax_chunk_bytes=20_000)
    segments = jnp.asarray([[0] * 17 + [1] * 16 + [-1] * 7], jnp.int32)
    arrays = [jnp.asarray(x) for x in inputs()]
    ways = [jnp.asarray(x.flip(1)) for x in inputs()]

    def times(name):
        loss = functools.partial(of_jax, name, segments)

        def along(*arrays):
            grads = jax.grad(loss, (0, 1, 2, 3))(*arrays)
            return sum((x * y).sum() for x, y in zip(grads, ways, strict=True))

        return torch_inputs.compiled(jax.grad(along, (0, 1, 2, 3)), *arrays)

    for got, want in zip(times("xla"), times("reference"), strict=True):
        far = jnp.abs(got - want).max() / jnp.abs(want).max()
        assert jnp.abs(want).max() > 1 and far < 1e-5


@pytest.mark.parametrize("path", [mosaic.PATH, triton.PATH], ids=["mosaic", "triton"])
@pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd])
def test_refused_in_jax(path, outer):
    """Of the queries; of the gradient that comes in alone, where Mosaic kernels are interpreted."""
    query, key, value, gates = (jnp.asarray(x, jnp.bfloat16) for x in inputs(width=16))
    each = Branches(*jnp.moveaxis(gates, -1, 0))
    tokens = Branches.each(key), Branches.each(value)
    pair = tuple(nsa_jax.compress(x, config=SMALL) for x in (key, value))
    calls = (
        lambda query: path.attention(query, *tokens, each, pair, None, config=SMALL),
        lambda query: path.sliding_attention(query, key, value, config=SMALL)[0],
    )
    for call, argument in itertools.product(calls, (0, 1) if path is mosaic.PATH else (0,)):
        loss = lambda x, y, call=call: (call(x) * y).sum().astype(jnp.float32)
        norm = lambda *x, loss=loss: jnp.square(jax.grad(loss)(*x)).sum().astype(jnp.float32)
        with (
            capability.interpreted(True),
            pytest.raises(
                NotImplementedError, match="'reference' alone have second derivatives"
            ),
        ):
            jax.eval_shape(outer(norm, argument), query, query + 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["mosaic", "triton", "fa2", None])
@pytest.mark.parametrize("call", ["attention", "recompute", "packed"])
def test_refused_on_gpu(call, name):
    """Of calls that are run from a list too."""
    options = dict(dtype=torch.bfloat16, device="cuda")
    tensors = [torch.randn(1, 600, n, 64, **options) for n in (8, 2, 2)]
    tensors.append(torch.rand(1, 600, 8, 3, **options))
    place = {"cu_seqlens": torch.tensor([0, 300, 590], device="cuda")}
    how = {"packed": place, "recompute": {"recompute": True}}.get(call, {})
    for _ in range(3):
        for i in range(3):
            others = tensors[:i], tensors[i + 1 :]
            one = lambda x, others=others: nsa_torch.attention(
                *others[0], x, *others[1], implementation=name, **how
            )
            check_refused(one, tensors[i])


@pytest.mark.gpu
@needs_gpu
def test_a_layer_on_gpu():
    """Its heads are split by a kernel: the Hessian times a vector of a CPU's."""
    x, made = normal(1, 20, 16), layer("reference")
    found = []
    for device in ("cpu", "cuda"):
        made = made.to(device)
        loss = lambda x, made=made: (made(x)[0] ** 2).sum()
        found.append(hvp(loss, x.to(device), torch.ones_like(x, device=device))[1].cpu())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)

"""The table of transforms in `docs/quickstart.md`: each cell is a test of what it says."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch.aot_autograd import make_boxed_func
from torch.autograd import forward_ad
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import nsa_jax
import nsa_torch
from bench.doc_tables import ROOT
from nsa_torch import dispatch, fa2, operators
from tests import torch_inputs
from tests.inputs import SMALL

DOCUMENT = (ROOT / "docs" / "quickstart.md").read_text()
SECTION = re.search(r"^## Transforms\n(.*?)^## ", DOCUMENT, re.S | re.M)[1]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("|")]
HEADER, _, *LINES = ROWS
PLACE: dict = {}  # device and dtype of torch's arrays
WORDS = ("yes", "refused", "-")


def arrays(length=40, batch=2):
    """Query, key, value, gates."""
    rng = np.random.default_rng(length)
    shapes = [(batch, length, heads, 8) for heads in (4, 2, 2)]
    shapes.append((batch, length, 4, 3))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


# torch


def tensors(length=40, batch=2, gradient=False):
    given = (torch.from_numpy(x).to(**PLACE) for x in arrays(length, batch))
    return [x.requires_grad_(gradient) for x in given]


def attention(name, **options):
    return functools.partial(nsa_torch.attention, config=SMALL, implementation=name, **options)


@torch.library.custom_op("tests::varlen", mutates_args=())
def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: list[int],
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stand-in for FlashAttention-2's kernel as an operator, which FA-2's is too."""
    options = dict(causal=causal, window=window, scale=scale)
    bounds = query_bounds, key_bounds
    out, lse = torch_inputs.varlen(query, key, value, bounds, longest, **options)
    return out.clone(), lse.clone()


@varlen.register_fake
def _(query, key, value, *rest):
    out = query.new_empty(*query.shape[:2], value.shape[2])
    return out, query.new_empty(query.shape[1], query.shape[0])


def varlen_backward(grad, query, key, value, query_bounds, key_bounds, longest, *rest):
    causal, window, scale = rest
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    options = dict(causal=causal, window=window, scale=scale)
    with torch.enable_grad():
        out, _ = torch_inputs.varlen(*leaves, (query_bounds, key_bounds), longest, **options)
    return [*torch.autograd.grad(out, leaves, grad)]


# Not a custom_op, in which autograd does not work.
torch.library.define(
    "tests::varlen_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor query_bounds, Tensor key_bounds, "
    "SymInt[] longest, bool causal, int window, float scale) -> Tensor[]",
)
torch.library.impl("tests::varlen_backward", "CompositeExplicitAutograd", varlen_backward)


@torch.library.register_fake("tests::varlen_backward")
def _(grad, query, key, value, *rest):
    return [torch.empty_like(x) for x in (query, key, value)]


def keep(ctx, inputs, output):
    *tensors, ctx.longest, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def pull_back(ctx, grad, _):
    rest = [*ctx.longest], ctx.causal, ctx.window, ctx.scale
    backward = torch.ops.tests.varlen_backward
    return *backward(grad.contiguous(), *ctx.saved_tensors, *rest), *[None] * 6


varlen.register_autograd(pull_back, setup_context=keep)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, request):
    """On a CPU for FA-2's kernel, which has no other reason to refuse it."""

    def call(query, key, value, bounds, longest, **options):
        if not torch.compiler.is_compiling():
            return torch_inputs.varlen(query, key, value, bounds, longest, **options)
        tensors = (x.contiguous() for x in (query, key, value))
        return varlen(*tensors, *bounds, [*longest], **options)

    def runs_here(entry):
        why_not = lambda problem: None if problem.platform == "cpu" else entry.why_not(problem)
        return dataclasses.replace(entry, why_not=why_not) if entry.name == "fa2" else entry

    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(fa2, "varlen", call)
    for step, entries in dispatch.REGISTRY.table.items():
        monkeypatch.setitem(dispatch.REGISTRY.table, step, tuple(map(runs_here, entries)))


def layer(name, phi="mlp"):
    torch.manual_seed(0)
    sizes = dict(l=8, d=4, l_sel=16, n_sel=4, w=12)
    made = nsa_torch.NSAAttention(32, 4, 2, 8, 8, **sizes, phi=phi, implementation=name)
    return made.to(**PLACE)


def hidden(length=40, batch=2, gradient=False):
    x = np.random.default_rng(length).standard_normal((batch, length, 32), np.float32)
    return torch.from_numpy(x).to(**PLACE).requires_grad_(gradient)


def gradients(function, given, wanted):
    out = function(*given)
    out = out if isinstance(out, torch.Tensor) else out[0]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


def equal(got, want):
    close = dict(rtol=3e-2, atol=3e-2) if PLACE else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, want, **close)


def meta(name):
    on_meta = [x.to("meta").requires_grad_() for x in tensors()]
    found = gradients(attention(name), on_meta, on_meta)
    assert [x.shape for x in found[1:]] == [x.shape for x in on_meta]
    assert layer(name).to("meta")(hidden().to("meta"))[0].shape == (2, 40, 32)


def compiled(function, counter, **options):
    torch._dynamo.reset()

    def backend(graph, example):
        counter.append(1)
        return aot_eager(graph, example)

    return torch.compile(function, backend=backend, fullgraph=True, **options)


def torch_compile(name):
    function, x = attention(name), tensors(gradient=True)
    equal(gradients(compiled(function, []), x, x), gradients(function, x, x))
    borders = torch.tensor([0, 9, 26], device=x[0].device)
    packed = functools.partial(function, cu_seqlens=borders)
    x = tensors(batch=1)
    equal(compiled(packed, [])(*x), packed(*x))


def torch_compile_lengths(name):
    function, given, wanted = attention(name), tensors, lambda x: x
    if name == "sdpa":  # the function in a layer
        function, given = layer(name), lambda *x, **options: [hidden(*x, **options)]
        wanted = lambda x: [*x, *function.parameters()]
    counter, compilations = [], set()
    fast = compiled(function, counter, dynamic=True)
    for length in (40, 53, 100):
        x = given(length, gradient=True)
        equal(gradients(fast, x, wanted(x)), gradients(function, x, wanted(x)))
        compilations.add(len(counter))
    assert len(compilations) == 1


class Whole(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = attention(name)

    def forward(self, *given):
        return self.function(*given)


def export(name):
    shape = {0: Dim("B", max=64), 1: Dim("T", min=SMALL.select_block + 1, max=2**16)}
    exported = torch.export.export(Whole(name), (*tensors(),), dynamic_shapes=((shape,) * 4,))
    for x in (tensors(), tensors(77, 3), tensors(17, 1)):
        equal(exported.module()(*x), attention(name)(*x))
    if name == "reference":
        return
    module = layer(name)
    exported = torch.export.export(module, (hidden(),), dynamic_shapes={"x": shape})
    for x in (hidden(), hidden(77, 3), hidden(17, 1)):
        equal(exported.module()(x)[0], module(x)[0])


def func_grad(name):
    function, x = attention(name), tensors()
    want = gradients(function, y := tensors(gradient=True), y)
    loss = lambda *given: function(*given).square().sum()
    got = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*x)
    equal([*got], want[1:])
    found, value = torch.func.grad_and_value(loss)(*x)
    equal(found, want[1])
    equal(value, want[0].detach().square().sum())
    out, pull_back = torch.func.vjp(function, *x)
    equal([*pull_back(2 * out)], want[1:])


def functional_call(name):
    module, x = layer(name), hidden()
    params = dict(module.named_parameters())
    loss = lambda params: torch.func.functional_call(module, params, (x,))[0].square().sum()
    want = gradients(module, [x], [*params.values()])[1:]
    equal([*torch.func.grad(loss)(params).values()], want)


def torch_checkpoint(name):
    function, x = attention(name), tensors(gradient=True)
    again = functools.partial(checkpoint, function, use_reentrant=False)
    equal(gradients(again, x, x), gradients(function, x, x))


def torch_second(name):
    function, x = attention(name), tensors()
    inner = torch.func.grad(lambda query: function(query, *x[1:]).square().sum())
    found = torch.func.grad(lambda query: inner(query).square().sum() / 2)(x[0])
    step = 1e-3 * inner(x[0])
    want = (inner(x[0] + step) - inner(x[0] - step)) / 2e-3  # the Hessian times the gradient
    assert (found - want).norm() < 1e-2 * want.norm()


def torch_jvp(name):
    function, (query, *x) = attention(name), tensors()
    with forward_ad.dual_level():
        out = function(forward_ad.make_dual(query, query), *x)
        tangent = forward_ad.unpack_dual(out).tangent
    equal(torch.func.jvp(lambda query: function(query, *x), (query,), (query,))[1], tangent)


def torch_vmap(name):
    function, x = attention(name), tensors()
    equal(torch.func.vmap(function)(*(y[:, None] for y in x))[:, 0], function(*x))


# JAX


def jax_attention(name):
    return functools.partial(nsa_jax.attention, config=SMALL, implementation=name)


def close(got, want, tolerance=1e-5):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def loss_of(function):
    return lambda *x: (function(*x) ** 2).sum()


def jit(name):
    function, x = jax_attention(name), arrays()
    close(jax.jit(function)(*x), nsa_torch.attention(*tensors(), config=SMALL).numpy())
    close(function(*x), jax.jit(function)(*x))


def jax_grad(name):
    function, x = jax_attention(name), arrays()
    found = jax.value_and_grad(loss_of(function), (0, 1, 2, 3))
    _, got = found(*x)
    close(got, jax.jit(found)(*x)[1], 1e-4)
    want = gradients(attention("reference"), y := tensors(gradient=True), y)[1:]
    close(got, [x.numpy() for x in want], 1e-4)


def jax_checkpoint(name):
    loss, x = loss_of(jax_attention(name)), arrays()
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(*x), jax.jit(jax.grad(loss))(*x), 1e-4)


def jax_second(name):
    loss, (query, *x) = loss_of(jax_attention(name)), arrays()
    inner = jax.jit(jax.grad(lambda query: loss(query, *x)))
    found = jax.jit(jax.grad(lambda query: (inner(query) ** 2).sum() / 2))(query)
    step = 1e-3 * np.asarray(inner(query))
    want = (inner(query + step) - inner(query - step)) / 2e-3
    assert np.linalg.norm(found - want) < 1e-2 * np.linalg.norm(want)


def jax_jvp(name):
    function, (query, *x) = jax_attention(name), arrays()
    along = lambda query: function(query, *x)
    try:
        tangent = jax.jit(lambda x: jax.jvp(along, (x,), (x,))[1])(query)
    except TypeError as error:  # JAX's own words
        raise NotImplementedError(str(error)) from error
    step = 1e-3
    close(tangent, (along(query * (1 + step)) - along(query * (1 - step))) / (2 * step), 1e-2)


def jax_vmap(name):
    function, x = jax_attention(name), arrays()
    close(jax.jit(jax.vmap(function))(*(y[:, None] for y in x))[:, 0], function(*x))


def shard_map(name):
    function, x = jax_attention(name), arrays()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "heads"))
    spec = PartitionSpec("batch", None, "heads")
    parts = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    close(jax.jit(parts)(*x), function(*x))


def jax_export(name):
    function, x = jax_attention(name), [*map(jnp.asarray, arrays())]
    close(jax.export.export(jax.jit(function))(*x).call(*x), function(*x))


CHECKS = {
    "no values, shapes only": (
        meta,
        lambda name: jax.eval_shape(jax_attention(name), *arrays()),
    ),
    "compiled": (torch_compile, jit),
    "compiled once for all lengths": (torch_compile_lengths, None),
    "exported": (export, jax_export),
    "gradients of functions": (func_grad, jax_grad),
    "gradients of a module's parameters": (functional_call, None),
    "checkpointed": (torch_checkpoint, jax_checkpoint),
    "mapped over devices": (None, shard_map),
    "second derivatives": (torch_second, jax_second),
    "forward-mode derivatives": (torch_jvp, jax_jvp),
    "mapped over an axis": (torch_vmap, jax_vmap),
}


def cells():
    torch_names = [f"torch `{name}`" for name in ("sdpa", "fa2", "jax", "reference")]
    assert HEADER[2:] == [*torch_names, "JAX `xla`", "JAX `reference`"]
    assert [line[0] for line in LINES] == [*CHECKS]
    for line in LINES:
        for column, word in zip(HEADER[2:], line[2:], strict=True):
            yield pytest.param(line[0], column, word, id=f"{line[0]}-{column}")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of jvp
@pytest.mark.parametrize(("row", "column", "word"), [*cells()])
def test_cell(row, column, word):
    framework, name = column.replace("`", "").split()
    check = CHECKS[row][framework == "JAX"]
    assert word in WORDS and (check is None) == (word == "-")
    if word == "yes":
        check(name)
    elif word == "refused":
        with pytest.raises(NotImplementedError, match=r"\w+ \w+ \w+"):
            check(name)


@pytest.mark.gpu
@pytest.mark.filterwarnings(  # torch.compile's own: what it compiles by, how it traces a Function
    "ignore:`torch.jit.script_method` is deprecated", "ignore:.*should not be instantiated"
)
@pytest.mark.parametrize("row", [line[0] for line in LINES if line[3] == "yes"])
def test_cell_of_fa2_on_a_gpu(row, monkeypatch):
    monkeypatch.setitem(PLACE, "device", "cuda")
    monkeypatch.setitem(PLACE, "dtype", torch.bfloat16)
    CHECKS[row][0]("fa2")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # as above
@pytest.mark.parametrize("name", ["sdpa", "fa2"])
def test_a_compiled_gradient_is_operators(name):
    """Not what their functions do, which may launch kernels. torch 2.11 does not say that it
    compiles where it traces a backward pass.
    """
    found = []

    def kept(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept)
    x = tensors(gradient=True)
    torch.compile(attention(name), backend=backend, fullgraph=True)(*x).sum().backward()
    assert sum(x.startswith("nsa.") and "backward" in x for x in found) >= 2, found


@pytest.mark.parametrize("name", ["sdpa", "fa2"])
def test_a_pull_back_gives_kernels_memory(name, monkeypatch):
    """It runs when its transform has ended, on wrappers that have no address. Operators' functions
    are patched, since those of a CPU ask for no address.
    """
    asked = []

    def reading(function):
        def call(*arguments):
            asked.extend(x.data_ptr() for x in arguments if isinstance(x, torch.Tensor))
            return function(*arguments)

        return call

    x = tensors()
    out, pull_back = torch.func.vjp(attention(name), *x)
    for kind, call in operators._calls.items():
        backward = call.backward and reading(call.backward)
        call = call._replace(run=reading(call.run), backward=backward)
        monkeypatch.setitem(operators._calls, kind, call)
    found = pull_back(out)
    assert asked and all(bool(x.isfinite().all()) for x in found)


def test_the_model_is_exported_and_compiled():
    from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    nsa = dict(compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=12)
    torch.manual_seed(0)
    config = NSAModelConfig(
        **sizes, **heads, **nsa, attention=["nsa", "dense"], use_cache=False
    )
    model = NSAForCausalLM(config).eval()

    def ids(batch, length):
        seed = torch.Generator().manual_seed(length)
        return torch.randint(0, 64, (batch, length), generator=seed)

    shape = {0: Dim("B", max=64), 1: Dim("T", min=17, max=2**16)}
    exported = torch.export.export(
        model, (), {"input_ids": ids(2, 40)}, dynamic_shapes={"input_ids": shape}
    ).module()
    for x in (ids(2, 40), ids(3, 77)):
        equal(exported(input_ids=x).logits, model(x).logits)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    pair = (
        each(ids(2, 40), attention_mask=mask).logits for each in (compiled(model, []), model)
    )
    equal(*(x[mask > 0] for x in pair))


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_arrays_of_different_ranks_are_the_library_s_own_business(name):
    """`jax_numpy_rank_promotion` of the caller, forward and backward."""
    options = dict(config=SMALL, implementation=name)
    query, key, value, gates = arrays(24, 1)
    segments = np.repeat([[0, 1, -1]], 8, axis=1).astype(np.int32)
    cache = nsa_jax.init_cache(1, 32, 2, 8, 8, config=SMALL)

    def calls(query, key, value, gates):
        x = query, key, value, gates
        yield nsa_jax.attention(*x, **options)
        yield nsa_jax.attention(*x, segment_ids=segments, recompute=True, **options)
        yield nsa_jax.cached_attention(*x, cache, **options)[0]

    loss = lambda *x: sum((each**2).sum() for each in calls(*x))
    with jax.numpy_rank_promotion("raise"):
        found = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(query, key, value, gates)
        with pytest.raises(ValueError, match="rank_promotion"):  # the caller's own
            jnp.ones((2, 3)) + jnp.ones(3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def compilations(function, *given):
    """Names of what XLA compiles for a call, as JAX's own log has them."""
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("jax._src.dispatch")
    log.addHandler(handler)
    try:
        with jax.log_compiles():
            jax.block_until_ready(function(*given))
    finally:
        log.removeHandler(handler)
    return [line for line in lines if line.startswith("Finished XLA compilation")]


@pytest.mark.parametrize("recompute", [False, True])
def test_an_eager_call_compiles_steps_not_operations(recompute):
    """Operation by operation it would compile some 130 programs."""
    function = functools.partial(jax_attention("xla"), recompute=recompute)
    x = [*map(jnp.asarray, arrays(33 + 2 * recompute))]
    loss = jax.grad(loss_of(function))
    for each, most in ((function, 9), (loss, 30)):
        assert 0 < len(compilations(each, *x)) <= most
        assert not compilations(each, *x)

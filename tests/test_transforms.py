"""Transforms of torch and JAX: each gives what a plain call gives, or one sentence that refuses.

The table of `docs/quickstart.md` says which; each of its cells is a test.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch.aot_autograd import make_boxed_func
from torch.autograd import forward_ad
from torch.autograd.functional import hvp
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import nsa_jax
import nsa_torch
from bench.doc_tables import ROOT
from kernels_pallas.mosaic import capability
from kernels_pallas.triton.descriptions import Heads
from nsa_jax import context
from nsa_torch import NSAConfig, dispatch
from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig
from tests import pretend, refusals, test_layers
from tests.limits import set_limits
from tests.model_sizes import SMALLEST
from tests.problems import SMALL
from tests.stand_in_kernels import stand_ins
from tests.tables import table

# torch's own, of jvp, of what it compiles by, and of how it traces a Function.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        "`torch.jit.script` is deprecated",
        "`torch.jit.script_method` is deprecated",
        ".*should not be instantiated",
    )
]
DOCUMENT = (ROOT / "docs" / "quickstart.md").read_text()
SECTION = re.search(r"^## Transforms\n(.*?)^## ", DOCUMENT, re.S | re.M)[1]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("|")]
HEADER, _, *LINES = ROWS
PLACE: dict = {}  # device and dtype of torch's arrays
ALL = (0, 1, 2, 3)


def arrays(length=40, batch=2, heads=(8, 4), width=8):
    """Query, key, value, gates."""
    rng = np.random.default_rng(length)
    shapes = [(batch, length, each, width) for each in (heads[0], heads[1], heads[1])]
    shapes.append((batch, length, heads[0], 3))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def tensors(length=40, batch=2, gradient=False):
    given = (torch.from_numpy(x).to(**PLACE) for x in arrays(length, batch))
    return [x.requires_grad_(gradient) for x in given]


def attention(name, **options):
    return functools.partial(nsa_torch.attention, config=SMALL, implementation=name, **options)


def jax_attention(name, **options):
    return functools.partial(nsa_jax.attention, config=SMALL, implementation=name, **options)


def squares(function):
    return lambda *given: (function(*given) ** 2).sum()


def varlen(query, key, value, bounds, longest, *, causal, window, scale):
    """In the place of FlashAttention-2's kernel: few operations, which tell its arguments apart."""
    sums = (value * key.mean(-1, keepdim=True) * scale).cumsum(0)
    sequence = torch.searchsorted(bounds[0], torch.arange(query.shape[0]).int(), right=True)
    last = bounds[1][sequence.clamp(max=bounds[1].shape[0] - 1)] - 1
    seen = sums[last.clamp(min=0)].repeat_interleave(query.shape[1] // key.shape[1], 1)
    size = query.mean(-1, keepdim=True)
    return size * seen * (3 + causal + window), size[..., 0].T.float()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, request):
    """On a CPU for FA-2's kernel, which has no other reason to refuse it."""

    def runs_here(entry):
        why_not = lambda problem: None if problem.platform == "cpu" else entry.why_not(problem)
        return dataclasses.replace(entry, why_not=why_not) if entry.name == "fa2" else entry

    if request.node.get_closest_marker("gpu"):
        return
    pretend.machine(monkeypatch, fa2_kernel=varlen)
    for step, entries in dispatch.REGISTRY.table.items():
        monkeypatch.setitem(dispatch.REGISTRY.table, step, tuple(map(runs_here, entries)))


# torch's cells


def layer(name, phi="mlp", **options):
    if PLACE:  # FA-2 has widths that are multiples of 8
        options = {"d_v": 8} | options
    return test_layers.in_torch(phi=phi, implementation=name, **options).to(**PLACE)


def hidden(length=40, batch=2, gradient=False):
    x = np.random.default_rng(length).standard_normal((batch, length, 24), np.float32)
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
    assert layer(name).to("meta")(hidden().to("meta"))[0].shape == (2, 40, 24)


def compiled(function, name=None, counter=None, **options):
    """By AOT too, but of `reference` and of models, whose operators the other cells are of."""
    torch._dynamo.reset()

    def backend(graph, example):
        if counter is not None:
            counter.append(1)
        return graph if name in ("reference", None) else aot_eager(graph, example)

    return torch.compile(function, backend=backend, fullgraph=True, **options)


def packed(name):
    place = PLACE.get("device", "cpu")
    return attention(name, cu_seqlens=torch.tensor([0, 9, 26], device=place))


def torch_compile(name):
    """Of packed rows."""
    if name == "reference":
        return torch_compile_lengths(name)
    x, function = tensors(batch=1, gradient=True), packed(name)
    equal(gradients(compiled(function, name), x, x), gradients(function, x, x))


@functools.cache
def torch_compile_lengths(name):
    """Of packed rows by `reference`, by `sdpa` in a layer."""
    function, given, wanted = attention(name), tensors, lambda x: x
    if name == "reference":
        function, given = packed(name), functools.partial(tensors, batch=1)
    if name == "sdpa":
        function, given = layer(name, "avg"), lambda *x, **options: [hidden(*x, **options)]
        wanted = lambda x: [*x, *function.parameters()]
    counter, compilations = [], set()
    fast = compiled(function, name, counter, dynamic=True)
    for length in (40, 101):
        x = given(length, gradient=True)
        equal(gradients(fast, x, wanted(x)), gradients(function, x, wanted(x)))
        compilations.add(len(counter))
    assert len(compilations) == 1


class Whole(torch.nn.Module):
    """The function, and a layer where it can be exported."""

    def __init__(self, name):
        super().__init__()
        self.function = attention(name)
        self.layer = layer(name) if name != "reference" else lambda x: [x]

    def forward(self, x, *given):
        return self.layer(x)[0], self.function(*given)


def check_exported(module, shapes, given, *sizes):
    """Of `given(*sizes)`, whose shapes are those of the export for the first sizes alone."""
    exported = torch.export.export(module, given(*sizes[0]), dynamic_shapes=shapes).module()
    for each in sizes:
        equal(exported(*given(*each)), module(*given(*each)))


def export(name):
    shape = {0: Dim("B", max=64), 1: Dim("T", min=SMALL.select_block + 1, max=2**16)}
    given = lambda *sizes: (hidden(*sizes), *tensors(*sizes))
    shapes = {"x": shape, "given": (shape,) * 4}
    check_exported(Whole(name), shapes, given, (40, 2), (77, 3), (17, 1))


def func_grad(name):
    function, x = attention(name), tensors()
    want = gradients(function, y := tensors(gradient=True), y)
    found, value = torch.func.grad_and_value(squares(function), argnums=ALL)(*x)
    equal([*found], want[1:])
    equal(value, want[0].detach().square().sum())
    equal(torch.func.grad(squares(function))(*x), want[1])
    out, pull_back = torch.func.vjp(function, *x)
    equal([*pull_back(2 * out)], want[1:])


def functional_call(name):
    module, x = layer(name), hidden()
    params = dict(module.named_parameters())
    loss = lambda params: torch.func.functional_call(module, params, (x,))[0].square().sum()
    want = gradients(module, [x], [*params.values()])[1:]
    equal([*torch.func.grad(loss)(params).values()], want)


def in_torch(transform):
    """A check of what a transformed call and its gradients give."""

    def check(name):
        function, x = attention(name), tensors(gradient=True)
        equal(gradients(transform(function), x, x), gradients(function, x, x))

    return check


def over_axis(vmap, function):
    return lambda *x: vmap(function)(*(y[:, None] for y in x))[:, 0]


def torch_second(name):
    function, (query, *x) = attention(name), [x.double() for x in tensors()]
    loss = squares(lambda query: function(query, *x))
    inner = torch.func.grad(loss)
    found = torch.func.grad(lambda query: inner(query).square().sum() / 2)(query)
    _, want = hvp(loss, query, inner(query))
    equal(found, want)


def torch_jvp(name):
    function, (query, *x) = attention(name), tensors()
    with forward_ad.dual_level():
        out = function(forward_ad.make_dual(query, query), *x)
        tangent = forward_ad.unpack_dual(out).tangent
    equal(torch.func.jvp(lambda query: function(query, *x), (query,), (query,))[1], tangent)


# JAX's cells, against torch's reference


@functools.cache
def expected():
    """The output, the gradients of its squares, its derivative along the query."""
    function, (query, *x) = attention("reference"), tensors()
    out, *found = gradients(function, y := tensors(gradient=True), y)
    along = lambda query: function(query, *x)
    _, tangent = torch.func.jvp(along, (query,), (query,))
    return out.detach().numpy(), [x.numpy() for x in found], tangent.numpy()


def close(got, want, tolerance=1e-5):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def in_jax(transform=lambda function: function):
    """A check of what a transformed call and its gradients give, of loops in chunks."""

    def check(name):
        function, x = transform(jax_attention(name)), arrays()
        both = jax.jit(jax.value_and_grad(squares(function), ALL))
        with pytest.MonkeyPatch.context() as patch:
            set_limits(patch, jax_chunk_bytes=20_000)
            close(function(*x), expected()[0])
            value, found = both(*x)
        close(value, (expected()[0] ** 2).sum())
        close(found, expected()[1], 1e-4)

    return check


def jax_second(name):
    """Of packed rows, in several chunks, by all arguments."""
    x, ways = arrays(batch=1), [y[:, ::-1].copy() for y in arrays(batch=1)]
    segments = np.repeat([[0, 1, -1]], [17, 16, 7], axis=1).astype(np.int32)
    loss = squares(jax_attention(name, segment_ids=segments))
    along = lambda *x: sum(
        (a * b).sum() for a, b in zip(jax.grad(loss, ALL)(*x), ways, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, jax_chunk_bytes=20_000)
        found = jax.jit(jax.grad(along, ALL))(*x)
    exact = squares(attention("reference", cu_seqlens=torch.tensor([0, 17, 33])))
    wide = (tuple(torch.from_numpy(y).double() for y in each) for each in (x, ways))
    for got, want in zip(found, hvp(exact, *wide)[1], strict=True):
        far = np.abs(got - want.numpy()).max() / want.abs().max()
        assert want.abs().max() > 1 and far < 1e-5


def jax_jvp(name):
    function, (query, *x) = jax_attention(name), arrays()
    along = lambda query: function(query, *x)
    try:
        tangent = jax.jit(lambda x: jax.jvp(along, (x,), (x,))[1])(query)
    except TypeError as error:  # JAX's own words
        raise NotImplementedError(str(error)) from error
    close(tangent, expected()[2], 1e-4)


def over_devices(batch, queries, keys):
    """The transform that divides the axes of arrays over eight devices, `two` by `four`."""

    def transform(function):
        if len(jax.devices()) < 8:
            pytest.fail("needs 8 devices; XLA_FLAGS of conftest were overridden")
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("two", "four"))
        whole, part = (PartitionSpec(batch, None, heads) for heads in (queries, keys))
        specs = whole, part, part, whole
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=whole)

    return transform


def jax_exported(function):
    x = [*map(jnp.asarray, arrays())]
    return jax.export.export(jax.jit(function))(*x).call


CHECKS = {
    "shapes without values": (
        meta,
        lambda name: jax.eval_shape(jax_attention(name), *arrays()),
    ),
    "compiled": (torch_compile, in_jax(jax.jit)),
    "compiled once for all lengths": (torch_compile_lengths, None),
    "exported": (export, in_jax(jax_exported)),
    "gradients of functions": (func_grad, in_jax()),
    "gradients of a module's parameters": (functional_call, None),
    "checkpointed": (
        in_torch(lambda function: functools.partial(checkpoint, function, use_reentrant=False)),
        in_jax(jax.checkpoint),
    ),
    "mapped over devices": (None, in_jax(over_devices("two", "four", "four"))),
    "query heads of a group on several devices": (
        None,
        in_jax(over_devices(None, ("four", "two"), "four")),
    ),
    "second derivatives": (torch_second, jax_second),
    "forward-mode derivatives": (torch_jvp, jax_jvp),
    "mapped over an axis": (
        in_torch(functools.partial(over_axis, torch.func.vmap)),
        in_jax(functools.partial(over_axis, jax.vmap)),
    ),
}


def cells():
    torch_names = [f"torch `{name}`" for name in ("sdpa", "fa2", "jax", "reference")]
    assert HEADER[2:] == [*torch_names, "JAX `xla`", "JAX `reference`"]
    assert [line[0] for line in LINES] == [*CHECKS]
    for line in LINES:
        for column, word in zip(HEADER[2:], line[2:], strict=True):
            yield pytest.param(line[0], column, word, id=f"{line[0]}-{column}")


@pytest.mark.parametrize(("row", "column", "word"), [*cells()])
def test_cell(row, column, word):
    framework, name = column.replace("`", "").split()
    check = CHECKS[row][framework == "JAX"]
    assert word in ("yes", "refused", "-") and (check is None) == (word == "-")
    if word == "yes":
        check(name)
    elif word == "refused":
        with pytest.raises(NotImplementedError, match=r"\w+ \w+ \w+"):
            check(name)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [line[0] for line in LINES if line[3] == "yes"])
def test_cell_of_fa2_on_a_gpu(row, monkeypatch):
    monkeypatch.setitem(PLACE, "device", "cuda")
    monkeypatch.setitem(PLACE, "dtype", torch.bfloat16)
    CHECKS[row][0]("fa2")


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


def test_names_under_torch_compile():
    """A name for a step, and `Branches` of names made inside what is compiled."""

    def function(*given):
        names = nsa_torch.Branches(None, "sdpa", "sdpa")
        out = nsa_torch.attention(*given, config=SMALL, implementation=names)
        steps = (
            nsa_torch.sliding_attention(*given[:3], config=SMALL, implementation=name)[0]
            for name in ("sdpa", None)
        )
        return out + sum(steps)

    x = tensors()
    equal(compiled(function)(*x), function(*x))


def test_the_model_is_exported_and_compiled():
    torch.manual_seed(0)
    config = NSAModelConfig(**SMALLEST, use_cache=False, attention=["nsa", "dense"])
    model = NSAForCausalLM(config).eval()
    ids = lambda batch, length: (torch.arange(batch * length).view(batch, length) * 7 % 32,)
    shape = {0: Dim("B", max=64), 1: Dim("T", min=17, max=2**16)}
    check_exported(model, {"input_ids": shape}, ids, (2, 40), (3, 77))
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    pair = (each(*ids(2, 40), attention_mask=mask).logits for each in (compiled(model), model))
    equal(*(x[mask > 0] for x in pair))


@pytest.mark.filterwarnings("ignore")  # torch warns of what it traces between graphs
def test_a_call_that_appends_to_a_cache_is_compiled_in_several_graphs():
    torch.compiler.reset()
    layer = nsa_torch.NSAAttention(32, 4, 2, 8, 8, config=SMALL)
    weights, x = [*layer.parameters()], torch.ones(1, 20, 32).cumsum(1).sin()
    calls = layer, torch.compile(layer, backend="aot_eager")
    equal(*(gradients(f, (x, layer.init_cache(1, 32)), weights) for f in calls))


# Second derivatives: right by `reference` and by JAX's `xla`, refused by all others.

REFUSAL = "only implementation='reference' has second derivatives "
STEPS = "compressed_attention", "selected_attention", "sliding_attention"
CALLS = "attention", "recompute", "packed", "block_indices", "compressed tokens", *STEPS


def tokens(dtype, *sizes):
    return [torch.from_numpy(x).to(dtype) for x in arrays(*sizes)]


def called(call, name, query, key, value, gates, config=SMALL):
    """The output of one of `CALLS`."""
    lists = torch.full((*key.shape[:3], config.num_selected), -1, dtype=torch.int32)
    lists[..., 0] = 0
    pair = [nsa_torch.compress(x, config=config) for x in (key, value)]
    options = {"config": config, "implementation": name}
    if call in STEPS:
        given = pair, (key, value, lists), (key, value)
        own = given[STEPS.index(call)]
        return getattr(nsa_torch, call)(query, *own, **options)[0]
    own = {
        "attention": {},
        "recompute": {"recompute": True},
        "packed": {"cu_seqlens": torch.tensor([0, 6, query.shape[1] - 2])},
        "block_indices": {"block_indices": lists},
        "compressed tokens": {"compressed": pair},
    }[call]
    return nsa_torch.attention(query, key, value, gates, **options, **own)


def check_refused(function, x):
    """Of a function of one tensor, in each of the ways to ask for a second derivative."""
    loss = squares(function)
    x = x.detach().requires_grad_()
    with pytest.raises(NotImplementedError, match=REFUSAL):
        hvp(loss, x, torch.ones_like(x))
    for given in (loss(x), function(x).sum()):  # whose cotangent wants a gradient, or does not
        with pytest.raises(NotImplementedError, match=REFUSAL):
            torch.autograd.grad(given, x, create_graph=True)
    torch.autograd.grad(loss(x), x)


REFUSED = [(call, name) for call in CALLS for name in ("sdpa", "mosaic")]
REFUSED += [(call, "fa2") for call in STEPS]
REFUSED += [("attention", "jax"), ("sliding_attention", "jax")]  # the same operators in all


@pytest.mark.parametrize(("call", "name"), REFUSED)
def test_second_derivatives_are_refused(call, name, monkeypatch):
    """By query, key and value. Kernels and FlashAttention-2 are stand-ins."""
    kernels = name == "mosaic"
    given = tokens(torch.bfloat16, 40, 1, (4, 2), 16) if kernels else tensors(batch=1)
    with stand_ins(monkeypatch) if kernels else contextlib.nullcontext():
        for i in range(3):
            along = lambda x, i=i: called(call, name, *given[:i], x, *given[i + 1 :])
            check_refused(along, given[i])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mosaic", "triton", "fa2", None])
@pytest.mark.parametrize("call", ["attention", "recompute", "packed"])
def test_second_derivatives_are_refused_on_a_gpu(call, name):
    """Of calls that are run from a list too."""
    with torch.device("cuda"):
        given = [x.cuda() for x in tokens(torch.bfloat16, 600, 1, (8, 2), 64)]
        along = lambda x: called(call, name, x, *given[1:], config=NSAConfig())
        for _ in range(3):
            check_refused(along, given[0])


TINY = NSAConfig(4, 2, 4, num_selected=2, num_local=1, window=3)
by_differences = functools.partial(torch.autograd.gradgradcheck, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_second_derivatives_of_the_reference(call, monkeypatch):
    set_limits(monkeypatch, torch_chunk_bytes=300)  # several chunks of the gated sum
    leaves = [x.requires_grad_() for x in tokens(torch.float64, 13, 1, (2, 2), 2)]
    assert by_differences(
        lambda *x: called(call, "reference", *x, config=TINY).square(), leaves
    )


@pytest.mark.parametrize(("phi", "fused"), [("avg", False), ("mlp", False), ("mlp_pe", True)])
def test_second_derivatives_of_a_layer(phi, fused, monkeypatch):
    """Of input and weights, by `reference`, of packed rows too; refused by default."""
    set_limits(monkeypatch, **{"fused_heads_from": 1} if fused else {})
    sizes = dict(phi=phi, l=4, d=2, l_sel=4, n_sel=2, w=3, num_local=1)
    x, made = hidden(20, 1).double(), layer("reference", **sizes).double()
    names, weights = zip(*made.named_parameters(), strict=True)
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    for rows in {}, {"cu_seqlens": torch.tensor([0, 9, 17])}:

        def function(x, *weights, rows=rows):
            given = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(made, given, (x,), rows)[0].square()

        assert by_differences(function, leaves)
    check_refused(lambda x: layer(None, **sizes).double()(x)[0], x)


@pytest.mark.gpu
def test_second_derivatives_of_a_layer_on_a_gpu():
    """Its heads are split by a kernel: the Hessian times a vector of a CPU's."""
    x, made = hidden(20, 1), layer("reference", "avg")
    of = lambda device: squares(lambda x: made.to(device)(x)[0])
    found = [hvp(of(x.device), x, torch.ones_like(x))[1].cpu() for x in (x, x.cuda())]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normed", [False, True])
def test_second_derivatives_of_split_heads(normed):
    """With norms the gradient by a kernel is refused as it is recorded; here without memory."""
    sizes = [4, 2, 8, 8, 3, 0, 0, 0]  # of `Heads`
    row = Heads(*sizes).row
    made = lambda *shape: torch.empty(shape, device="meta", requires_grad=True)
    angles = [made(1, 9, 4).detach() for _ in range(2)]
    weight = made(1, 9, 4, 8)
    given = made(1, 9, row), *angles, [made(8), made(8)] if normed else [], 1e-6, sizes
    query = torch.ops.nsa.split_heads(*given)[0]
    (grad,) = torch.autograd.grad(query, given[0], weight, create_graph=True)
    if not normed:
        assert torch.autograd.grad(grad.sum(), weight)[0].shape == weight.shape
        return
    with pytest.raises(NotImplementedError, match=REFUSAL):
        torch.autograd.grad(grad.sum(), given[0])


@pytest.mark.parametrize("name", ["mosaic", "triton"])
@pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd])
def test_second_derivatives_are_refused_in_jax(name, outer, monkeypatch):
    """Of the queries; of the gradient that comes in alone, where Mosaic kernels are interpreted."""
    if name == "triton":
        pretend.jax_gpu(monkeypatch, kernels_why_not=None)
    query, *rest = (jnp.asarray(x, jnp.bfloat16) for x in arrays(40, 1, (4, 2), 16))
    options = dict(config=SMALL, implementation=name)
    calls = (
        lambda query: nsa_jax.attention(query, *rest, **options),
        lambda query: nsa_jax.sliding_attention(query, *rest[:2], **options)[0],
    )
    message = "'reference' have second derivatives"
    for call in calls:
        for argument in (0, 1) if name == "mosaic" else (0,):
            loss = lambda x, y, call=call: (call(x) * y).sum().astype(jnp.float32)
            norm = lambda *x, loss=loss: squares(jax.grad(loss))(*x).astype(jnp.float32)
            refused = pytest.raises(NotImplementedError, match=message)
            with capability.interpreted(True), refused:
                jax.eval_shape(outer(norm, argument), query, query + 1)


# JAX: meshes, kinds of numbers, and what the hot path must not do


@pytest.mark.parametrize("spec", [PartitionSpec("rows"), PartitionSpec(None, None, "rows")])
def test_arrays_over_explicit_axes(spec):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,))
    function, x = jax_attention("xla"), jax.device_put(arrays(), NamedSharding(mesh, spec))
    message = (
        "^arrays must not be sharded over explicit axes .*'rows'.*; call attention inside of"
    )
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(NotImplementedError, match=message):
            wrap(function)(*x)
        with pytest.raises(ValueError, match=r"^scale must be"):
            wrap(functools.partial(function, scale=-1.0))(*x)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.sharding.auto_axes(function, out_sharding=spec))(*x)
    close(jax.device_get(got), expected()[0])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_sequence_over_an_explicit_axis(layout):
    """Which an axis of `jax.make_mesh` is where nothing is said."""
    mesh, spec = jax.make_mesh((2,), ("context",)), PartitionSpec(None, "context")
    of, x = dict(size=2, context_layout=layout), jnp.arange(32).reshape(1, 16, 2)
    there = functools.partial(context.shard_sequence, **of)
    for wrap in (lambda f: f, jax.jit):
        found = wrap(there)(jax.device_put(x, NamedSharding(mesh, spec)))
        assert jax.typeof(found).sharding.spec[1] == "context"
        np.testing.assert_array_equal(found, there(x))
        for length in (None, 13):
            back = functools.partial(context.unshard_sequence, length=length, **of)
            np.testing.assert_array_equal(wrap(back)(found), x[:, :length])


CALLED = table("test_transforms")
CACHES = {
    "pages": functools.partial(nsa_jax.PagedCache, 8, 2, 16, 16, config=SMALL, dtype="float32"),
    "rows": functools.partial(nsa_jax.init_cache, 2, 40, 2, 16, 16, config=SMALL),
}


def of_row(name, dtype=np.float32, **more):
    """A function of arrays by name, and these: arrays of NumPy, random numbers in place of zeros.
    Log-sum-exps are float32 in any call.
    """
    row, rng = CALLED[name], np.random.default_rng(0)
    call, options = row["call"], refusals.given(row.get("options", {}))
    run = getattr(nsa_jax, call, None) or getattr(nsa_jax.PagedCache, call)

    def drawn(x):
        return rng.normal(size=x.shape).astype(dtype) if x.dtype == np.float32 else np.array(x)

    given = refusals.given(row["arrays"], "numpy", CACHES)
    arrays = {x: y if x == "lse" else jax.tree.map(drawn, y) for x, y in given.items()}
    return lambda given: run(**given, **options, **more), arrays


def loss_of(call, given, moving):
    """Gradients of the first result by the arrays `moving`."""

    def loss(floats):
        return (jax.tree.leaves(call(given | floats))[0] ** 2).sum()

    return jax.grad(loss), {x: given[x] for x in moving}


@pytest.mark.parametrize("name", ["attention", "blocks", "loss"])
def test_a_scale_of_numpy(name):
    """Is a number as Python's is, whatever is differentiated: the same program under `jit`, the
    same gradient without it.
    """
    traced, eager = set(), set()
    for scale in (0.25, np.float32(0.25), np.float64(0.25), np.float16(0.25)):
        scales = {"scale": scale} | ({"index_scale": scale} if name == "loss" else {})
        wanted = ["index_query" if name == "loss" else "query"]
        gradient, x = loss_of(*of_row(name, **scales), wanted)
        traced.add(re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(gradient)(x))))
        eager.add(jax.tree.leaves(gradient(x))[0].tobytes())
    assert len(traced) == len(eager) == 1


@pytest.mark.parametrize("name", [name for name in CALLED if "pages" in name])
def test_arrays_of_numpy_beside_traced_ones(name):
    call, given = of_row(name)
    for word in given:
        for traced in ({word}, given.keys() - {word}):
            jax.eval_shape(lambda x: call(given | x), {x: given[x] for x in traced})


@pytest.mark.parametrize("name", CALLED)
def test_settings_of_jax_are_the_caller_s_own_business(name):
    """`jax_enable_x64`, where arrays of lengths and lists mix with no integers of 64 bits, and
    `jax_numpy_rank_promotion`: JAX refuses as it traces, forward and backward.
    """
    forward = "index" in name or "pages" in name or name == "append"

    def shapes(dtype):
        call, given = of_row(name, dtype)
        found = jax.eval_shape(call, given)
        floats = [x for x in given if x in ("query", "key", "value", "index_query")]
        return found if forward else (found, jax.eval_shape(*loss_of(call, given, floats)))

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        with jax.numpy_rank_promotion("raise"):
            found = jax.tree.leaves(shapes(np.float32))
            assert all(x.dtype.itemsize <= 4 for x in found)
            with pytest.raises(ValueError, match="rank_promotion"):  # the caller's own
                jnp.ones((2, 3)) + jnp.ones(3)
        shapes(np.float64)


MAPPED = {name: row["mapped"] for name, row in CALLED.items() if "mapped" in row}


def on_triton(name):
    """A function of the arrays that are mapped, and these."""
    # Lists of more than 64 blocks are cut where nobody names the implementation.
    options = {} if name == "blocks" else {"implementation": "triton"}
    call, given = of_row(name, jnp.bfloat16, **options)
    mapped = MAPPED[name][0].split()
    if name == "loss":
        return loss_of(call, given, mapped)
    return lambda x: call(given | x), {x: given[x] for x in mapped}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="lowers kernels")
@pytest.mark.parametrize("name", MAPPED)
def test_kernels_on_lists_are_mapped(name, monkeypatch):
    """For a GPU that need not be there: as many launches as for one."""
    set_limits(monkeypatch, index_loss_tiles=lambda *_: (16, 4, 1))  # compile fast
    pretend.jax_gpu(monkeypatch)
    function, given = on_triton(name)
    both = jax.tree.map(lambda x: np.stack([x, x]), given)
    mapped = jax.jit(jax.vmap(function))
    assert pretend.triton_launches(mapped, both) == MAPPED[name][1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAPPED)
def test_mapped_kernels_on_lists_on_a_gpu(name):
    function, given = on_triton(name)
    both = jax.tree.map(lambda x: np.stack([x, x[::-1]]), given)
    found = jax.jit(jax.vmap(function))(both)
    for i in range(2):
        alone = jax.jit(function)(jax.tree.map(lambda x, i=i: x[i], both))
        for x, y in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
            np.testing.assert_array_equal(x[i].astype(jnp.float32), y.astype(jnp.float32))


def compilations(caplog, function, *given):
    """Of XLA for a call, as JAX's own log has them, and the result."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax._src.dispatch"):
        found = jax.block_until_ready(function(*given))
    return sum(x.startswith("Finished XLA compilation") for x in caplog.messages), found


@pytest.mark.parametrize("recompute", [False, True])
def test_an_eager_call_compiles_steps_not_operations(recompute, caplog):
    """Operation by operation it would compile some 130 programs."""
    function = jax_attention("xla", recompute=recompute)
    x = [*map(jnp.asarray, arrays(33 + 2 * recompute))]
    loss = jax.grad(squares(function))
    for each, most in ((function, 9), (loss, 30)):
        count, found = compilations(caplog, each, *x)
        assert 0 < count <= most
        assert compilations(caplog, each, *x)[0] == 0
    close(found, jax.jit(loss)(*x), 1e-4)


def compiled_memory(length, function):
    shape = lambda *s: jax.ShapeDtypeStruct((1, length, *s), jnp.float32)
    given = shape(16, 128), shape(1, 128), shape(1, 128), shape(16, 3)
    memory = jax.jit(function).lower(*given).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def test_performance_guards_memory():
    """32k tokens stay under 2 GB forward, and grow with T, not with T * S."""
    function = functools.partial(nsa_jax.attention, implementation="xla")
    long = compiled_memory(32768, function)
    assert long < 2e9 and long < 2.5 * compiled_memory(16384, function)
    assert compiled_memory(32768, jax.grad(squares(function), ALL)) < 5e9


IMPORTS = table("named_in_sources")


@pytest.mark.parametrize("pattern", IMPORTS)
def test_layering(pattern):
    """Who may name what: kernels, DLPack, environment variables. Who imports what is a contract of
    `pyproject.toml`.
    """
    for package in ("nsa_core", "nsa_jax", "nsa_torch", "interop", "kernels_pallas", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if not name.startswith(tuple(IMPORTS[pattern])):
                found = re.search(pattern, path.read_text(), re.MULTILINE)
                assert not found, f"{name} must not say {found.group()!r}"

"""Kernels for any length: which there are, and that nothing of a length is left in them."""

import ast
from pathlib import Path

import pytest
import torch

import nsa_torch
from bench.harness.checked_layer import Watch, symbol
from kernels_pallas.kernel import LENGTHS, SCALAR, SIZE
from kernels_pallas.mosaic import capability
from kernels_pallas.runtime import lowering
from nsa_core.plan import kernels
from nsa_torch import NSAConfig, invariant
from tests import planned, pretend
from tests.problems import TABLE

LAYERS = TABLE["any length"]
MODES = {"wide": planned.MODES["apart"]}  # of the others: `SHARED`
SHARED = planned.MODES["shared"]
by_layer = pytest.mark.parametrize("name", LAYERS)
by_pass = pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])


def kernels_of(name, length, gradients, batch=1):
    mode = MODES.get(name, SHARED)
    return kernels.kernels_of(
        batch=batch,
        length=length,
        **LAYERS[name],
        dtype="bfloat16",
        config=NSAConfig(),
        gradients=gradients,
        compresses=mode.compresses,
        shared=mode.shared,
    )


def generic(kernels):
    return list(dict.fromkeys(kernel.for_any_length() for kernel in kernels))


@by_pass
@by_layer
def test_an_operator_of_torch_runs_these_kernels(name, gradients):
    mode = MODES.get(name, SHARED)
    function = planned.PATHS["mosaic"].planned(mode, "saving" if gradients else "forward")
    given = planned.described(mode, 1, 9000, **LAYERS[name], config=NSAConfig())
    found = [x for plan in function.plans(given, None) for x in plan.kernels]
    assert ("compress_means" in {x.name for x in found}) == mode.compresses
    wanted = kernels_of(name, 9000, gradients)
    assert {*found} == {*wanted} and len({*wanted}) == len(wanted)


def test_invariant_gathers_no_tiles():
    """In training with eight heads per group, `mosaic` does."""
    heads = {"heads": 16, "kv_heads": 2, "key_width": 64, "value_width": 64}
    given = planned.described(SHARED, 1, 9000, **heads, config=NSAConfig())
    for path in (planned.PATHS["mosaic"], invariant.PATH):
        plans = path.planned(SHARED, "saving").plans(given, None)
        found = [x for plan in plans for x in plan.kernels if x.name == "selected_forward"]
        assert [x.spec.gather_limit > 0 for x in found] == [path is not invariant.PATH]


@by_pass
@by_layer
def test_one_kernel_serves_lengths_and_batches(name, gradients):
    """Those of a few lengths serve all."""
    first = generic([x for length in LENGTHS for x in kernels_of(name, length, gradients)])
    batch = 1 if name == "packed" else 3  # a packed batch is one row
    assert {*generic(kernels_of(name, 12001, gradients, batch))} <= {*first}
    assert [x.sizes.keys() for x in first] == [x.for_any_length().sizes.keys() for x in first]
    assert len({repr((x.name, x.spec)) for x in first}) == len(first)


@by_layer
def test_an_axis_of_a_length_is_never_one(name):
    """Mosaic drops the index of an axis of size 1: all would read its first element."""
    kernels = {*kernels_of(name, 9000, True), *kernels_of(name, 9000, False)}
    for kernel in kernels:
        any_length = kernel.for_any_length()
        scalars = len(any_length.scalars)
        assert any_length.names[:scalars] == tuple(SIZE + x for x in kernel.sizes)
        assert any_length.inputs[:scalars] == (SCALAR,) * len(kernel.sizes)
        actual = *kernel.inputs, *kernel.outputs
        nominal = *any_length.inputs[scalars:], *any_length.outputs
        for array, other in zip(actual, nominal, strict=True):
            assert array.dtype == other.dtype and len(array.shape) == len(other.shape)
            pairs = zip(array.shape, other.shape, strict=True)
            assert all(b > 1 for a, b in pairs if a != b), (kernel.name, array, other)


def test_bodies_ask_refs_for_the_place_of_a_cta():
    """`refs.cta_index` keeps the compiler from knowing the grid of nominal lengths."""
    asked = []
    for path in sorted(Path(capability.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("axis_index"):
                asked.append((path.name, ast.unparse(node.args[0])))
    grid = [(name, axis) for name, axis in asked if axis not in ("'wg'", "'rank'")]
    assert grid == [("refs.py", "axis")] and len(asked) > 2


@pytest.mark.parametrize("name", ["tile_block_lists", "gathered_dq"])
def test_machine_code_has_the_name_of_its_kernel(name):
    """Of each of the two ways to build one; a profile shows it."""
    kernel = next(x for x in kernels_of("gathered", 9000, True) if x.name == name)
    module = symbol(name).removesuffix("_kernel").encode()
    assert module in lowering.lower(kernel.for_any_length())


def on_a_gpu(length, heads, kv_heads, key_width, value_width, packed=False):
    """Query, key, value, gates and the output's gradient; borders."""
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = (heads, key_width), (kv_heads, key_width), (kv_heads, value_width), (heads, 3)
    how = {"generator": draw, "device": "cuda", "dtype": torch.bfloat16}
    found = [torch.randn(1, length, *x, **how) for x in (*shapes, (heads, value_width))]
    return found, torch.tensor([0, 7, length - 100], device="cuda") if packed else None


def with_gradients(tensors, do, bounds=None):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = nsa_torch.attention(*leaves, cu_seqlens=bounds, implementation="mosaic")
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.gpu
@by_layer
def test_calls_alike_run_from_a_list(name, monkeypatch):
    """The same bits as what was decided anew: where launches have become graphs, on another stream
    and in a capture too."""
    # Up to 4096 tokens no list of blocks is too long where a token selects 16.
    length = 9000 if name == "gathered" else 3000
    (*tensors, do), bounds = on_a_gpu(length, **LAYERS[name])

    def both(tensors):
        with torch.no_grad():
            plain = nsa_torch.attention(*tensors, cu_seqlens=bounds, implementation="mosaic")
        return [plain, *with_gradients(tensors, do, bounds)]

    watch, graphs = Watch(), pretend.watched(monkeypatch, "graph_launch")
    with planned.by_steps(watch):
        both(tensors)
    assert bool(watch.gathered_tiles) == (name == "gathered")
    for _ in range(24):
        repeated = None  # so that addresses come again
        repeated = both(tensors)
    # Of packed rows torch works between launches.
    assert graphs or name == "packed"
    for x in tensors:  # in the same memory
        x.copy_(torch.randn_like(x))
    listed = both(tensors)
    assert not torch.equal(listed[0], repeated[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        apart = both(tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = both(tensors)
    graph.replay()
    with planned.by_steps():
        decided = both(tensors)
    for found in (listed, apart, captured):
        assert all(torch.equal(a, b) for a, b in zip(found, decided, strict=True))

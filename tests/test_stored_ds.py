"""Gradients of the selected branch where dS is stored: in Pallas' GPU interpreter, which reports
races, and on a GPU, against the float64 oracle.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch.mosaic
from kernels_pallas.specs import dkv, stored_ds
from kernels_pallas.specs.dkv import Dkv
from nsa_core.config import NSAConfig
from nsa_core.plan.buffers import Join
from nsa_core.steps import mosaic_stored_ds
from nsa_core.types import Branches
from nsa_jax import eager, ffi, mosaic, xla_call
from nsa_jax.jax_ops import JaxOps
from nsa_torch import execute, input_modes, plans
from nsa_torch.torch_ops import TORCH_OPS
from tests import plan_checks, planned
from tests.devices import needs_gpu
from tests.inputs import PAPER, Case, posed
from tests.limits import set_limits
from tests.mosaic_checks import bits, check_step, check_whole
from tests.test_torch_mosaic import inputs

FEW = NSAConfig(16, 8, 64, num_selected=3, num_local=1, window=50)
G16 = Case(14, 150, H=32, Hkv=2, D=64, Dv=64, B=1, config=FEW, dtype="bfloat16")
# Rows of no head, and tiles of fewer tokens than those of the forward pass.
G10 = Case(11, 140, H=20, Hkv=2, D=32, Dv=64, B=2, config=FEW, dtype="float16")
# Two tokens in the rows of a warp.
G8 = Case(14, 150, H=16, Hkv=2, D=64, Dv=64, B=1, config=FEW, dtype="bfloat16")
G64 = Case(5, 130, H=64, Hkv=1, D=16, Dv=48, B=1, config=FEW, dtype="bfloat16")


class InPlace(JaxOps):
    """Keeps in an output what the kernel does not write, as kernels that run on a GPU do."""

    def __init__(self):
        self.ds_chunks = []

    def writes_in_place(self, kernel):
        return kernel.in_place

    def run(self, kernel, *arrays):
        found = super().run(kernel, *arrays)
        if kernel.name == "stored_ds_dq":
            self.ds_chunks.append(kernel.spec.stored_rows)
        if not kernel.in_place or kernel.name not in ("stored_ds_dq", "dkv_merge"):
            return found
        spec, before = kernel.spec, arrays[-1].reshape(found[0].shape)
        ds_chunk = arrays[kernel.names.index("ds_chunk")]
        heads = jnp.arange(before.shape[2]) * spec.Hkv // before.shape[2]
        row = jnp.arange(spec.B)[:, None] * spec.Hkv + heads
        first = ds_chunk[stored_ds.FIRST_ROW]
        mine = (row >= first) & (row < first + spec.stored_rows)
        return [jnp.where(mine[:, None, :, None], found[0], before)]


ROWS_OF_CHUNKS = {1: [1, 1, 1, 1], 3: [3, 1], 4: [4]}  # of four rows of `[B, Hkv]`


@pytest.fixture
def ds_chunks(request, monkeypatch):
    """Chunks of so many rows of `[B, Hkv]`."""
    ops = InPlace()
    ds_of_a_row = stored_ds.array(1, G10.T, FEW.num_selected, 16, G10.dtype)
    set_limits(monkeypatch, ds_chunk_bytes=request.param * 2 * ds_of_a_row.size)
    monkeypatch.setattr(mosaic, "OPS", ops)
    yield
    assert ops.ds_chunks == ROWS_OF_CHUNKS[request.param]


@pytest.fixture
def stored(monkeypatch):
    """Every dq is of stored dS."""
    gradients = mock.Mock(side_effect=mosaic_stored_ds.gradients)
    monkeypatch.setattr(mosaic_stored_ds, "gradients", gradients)
    yield gradients
    assert gradients.called


@pytest.mark.parametrize("case", [G8, G16, G64], ids=str)
def test_gradients(case, interpreted, stored):
    check_whole(posed(case))


@pytest.mark.parametrize(
    ("ds_chunks", "name"), [(1, "whole"), (3, "branch"), (4, "branch")], indirect=["ds_chunks"]
)
def test_ds_chunks(name, interpreted, stored, ds_chunks):
    """Those of the branch alone begin with nothing that they are added to."""
    p = posed(G10)
    check_whole(p) if name == "whole" else check_step(p, "selected")


def test_one_ds_chunk_where_dq_is_not_added_in_place(interpreted, stored, monkeypatch):
    set_limits(monkeypatch, ds_chunk_bytes=1)
    check_step(posed(G10), "selected")


def test_blocks_of_the_future_and_empty_slots(interpreted, stored):
    """The first tokens of a tile do not see the block that the others see."""
    p = posed(dataclasses.replace(G16, T=7, S=132))  # positions 125 to 131: 3 are before 128
    indices = np.full((1, 7, 2, 3), -1, np.int32)
    indices[..., 1] = 2
    indices[:, :, 1, 0] = 0
    check_step(p, "selected", indices)


def test_neighbours_that_select_other_blocks(interpreted, stored):
    p = posed(dataclasses.replace(G16, T=14, S=450))
    indices = np.full((1, 14, 2, 3), -1, np.int32)
    token, head = np.ogrid[:14, :2]
    indices[0, ..., 0], indices[0, ..., 1] = token % 5, 5 + (token + head) % 2
    check_step(p, "selected", indices)


def test_ds_is_written_by_the_pass_of_dk():
    sizes = SIZES | {"D": 256, "Dv": 256, "stored_rows": 4, "selection_entries": 16}
    base = Dkv(**sizes, dtype="bfloat16", scale=1.0, work_items=8, list_entries=64)
    found = [[*dkv.partials(each).outputs] for each in base.passes]
    shapes = [[x.dtype for x in outputs] for outputs in found]
    assert [list(each.widths) for each in base.passes] == [["dk"], ["dv"]]
    assert shapes == [["float32", "bfloat16"], ["float32"]]


def plan_of_backward(monkeypatch):
    """Torch's, of a row of the paper's heads: a chunk of dS for each of four."""
    set_limits(monkeypatch, ds_chunk_bytes=1)
    sizes = {"heads": 64, "kv_heads": 4, "key_width": 128, "value_width": 128}
    given = planned.described(input_modes.SHARED_KV, 1, 2048, **sizes, config=PAPER)
    function = nsa_torch.mosaic.PATH.planned[input_modes.SHARED_KV, "saving"]
    return function.plans(given, None)[1]


def test_torch_has_one_ds_chunk_at_a_time(monkeypatch):
    """A plan drops dS of one before it makes that of the next."""
    plan = plan_of_backward(monkeypatch)
    there, made = set(), 0
    for step, begins, ends in zip(plan.steps, plan.begins, plan.ends, strict=True):
        if step.name == "dkv_partials" and step.writes[-1].dtype == "bfloat16":
            assert not there, "dS twice"
            there, made = {step.writes[-1].buffer} & {*begins}, made + 1
        there -= {*ends}
    assert made == 4 and not there


def test_dq_of_the_other_branches_runs_beside(monkeypatch):
    """That of a chunk's rows beside dkv of the chunk before, until it is added to."""
    plan = plan_of_backward(monkeypatch)
    plan_checks.check(plan)
    ready, running, seen = [], {}, []
    for step in plan.steps:
        if step.name == "interval_dq":
            rows = [*range(step.kernel.spec.first_row, step.kernel.spec.end_row)]
            assert bool(ready or running) == (step.beside is not None)
            if step.beside is None:
                ready += rows
            else:
                running[step.beside] = rows
        elif isinstance(step, Join):
            ready += running.pop(step.beside)
        elif step.name == "stored_ds_dq":
            assert len(seen) < len(ready)
            seen.append(len(running))
    assert ready == [0, 1, 2, 3] and seen == [1, 1, 1, 0]


class Stream:
    """In place of both streams of a call."""

    cuda_stream = 0

    def __init__(self):
        self.events, self.waited = [], []
        self.wait_event = self.waited.append

    def wait_stream(self, other):
        """Nothing runs."""

    def record_event(self):
        self.events.append(object())
        return self.events[-1]


def test_a_call_that_fails_waits_for_what_runs_beside(monkeypatch):
    """Its memory goes with it, to which kernels on the other stream still write."""
    plan = plan_of_backward(monkeypatch)
    launched, failing, stream = [], [], Stream()

    def launcher(kernel, device):
        def start(stream, addresses):
            launched.append(kernel.name)
            if len(launched) in failing:
                raise MemoryError

        return start

    monkeypatch.setattr(execute.launch, "launcher", launcher)
    sequence = lambda kernels, arguments, device: (
        lambda *given: [launcher(kernel, device)(*given) for kernel in kernels]
    )
    monkeypatch.setattr(execute.launch, "sequence", sequence)
    monkeypatch.setattr(execute.launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(execute, "_stream_beside", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    bound = execute.BoundPlan(plan, torch.device("cpu"))
    bound.on_gpu = True
    given = [
        torch.zeros(x.shape, dtype=getattr(torch, x.dtype))
        for x in plan.buffers[: plan.arguments]
    ]
    bound(given)
    assert len(stream.events) == 3 == len({*stream.waited}) and launched
    beside = [i for i, x in enumerate(launched, 1) if x == "interval_dq"][1:]
    assert len(beside) == 3
    for i in beside:
        launched.clear(), stream.events.clear(), stream.waited.clear()
        failing[:] = [i + 1]
        with pytest.raises(MemoryError):
            bound(given)
        assert stream.events and stream.waited == stream.events


HANDLER = xla_call.handler(lambda call: None)  # XLA knows it until the process ends


def test_jax_has_one_ds_chunk_at_a_time(monkeypatch):
    """By XLA's count of the memory between its custom calls."""
    set_limits(monkeypatch, ds_chunk_bytes=1)
    monkeypatch.setattr(ffi, "serves", lambda kernel: bool(kernel.source))
    monkeypatch.setattr(ffi, "TARGET", "test_stored_ds")  # never run
    jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(HANDLER), platform="cpu")
    length, heads, kv_heads, width = 4096, 64, 4, 128

    def attend(query, key, value, gates):
        compressed = [nsa_jax.compress(x, config=PAPER) for x in (key, value)]
        keys = Branches.each(key), Branches.each(value)
        gates = Branches(*(gates[..., i] for i in range(3)))
        options = {"config": PAPER, "kv_len": length}
        return mosaic.attention(query, *keys, gates, compressed, None, **options)

    def gradients(do, *arrays):
        return jax.vjp(attend, *arrays)[1](do)

    shapes = [(heads, width), (heads, width), (kv_heads, width), (kv_heads, width), (heads, 3)]
    arrays = [jax.ShapeDtypeStruct((1, length, *x), jnp.bfloat16) for x in shapes]
    memory = jax.jit(gradients).lower(*arrays).compile().memory_analysis()
    ds_chunk = length * PAPER.num_selected * 16 * 64 * 2
    assert ds_chunk < memory.temp_size_in_bytes < 2 * ds_chunk


SIZES = {"B": 2, "T": 700, "S": 900, "H": 64, "Hkv": 4, "D": 128, "Dv": 128}


@pytest.mark.parametrize(
    ("change", "selection_entries", "block", "packed", "wanted"),
    [
        ({}, 16, 64, False, True),
        ({"T": 2**18, "S": 2**18}, 16, 64, False, True),
        ({"T": 2**20, "S": 2**20}, 16, 64, False, False),  # 34 GB of a row
        ({}, 16, 64, True, False),  # blocks begin anywhere
        ({}, 16, 32, False, False),  # of two blocks in a tile of keys
        ({}, 32, 64, False, True),
        ({}, 33, 64, False, False),  # more slots than lanes
        ({"H": 32}, 16, 64, False, True),  # G=8
        ({"H": 16}, 16, 64, False, False),  # G=4: two tokens have eight rows
        ({"H": 40}, 16, 64, False, True),  # G=10
        ({"Hkv": 2}, 16, 64, False, True),  # G=32
        ({"H": 16, "Hkv": 1}, 16, 64, False, False),  # a row is eight outputs
        ({"T": 2**24, "S": 2**24}, 16, 64, False, False),  # more entries than an int32 counts
    ],
)
def test_where_it_is_stored(change, selection_entries, block, packed, wanted):
    sizes = SIZES | change
    group = sizes["H"] // sizes["Hkv"]
    base = Dkv(
        **sizes,
        dtype="bfloat16",
        scale=1.0,
        work_items=0,
        list_entries=1,
        single_token=group <= 8,
    )
    assert mosaic_stored_ds.serves(TORCH_OPS, base, selection_entries, block, packed) == wanted


def test_all_rows_at_once_may_be_too_large():
    """Where dq is not added in place: 17 GB."""
    sizes = SIZES | {"T": 2**16, "S": 2**16}
    base = Dkv(**sizes, dtype="bfloat16", scale=1.0, work_items=0, list_entries=1)
    assert mosaic_stored_ds.serves(TORCH_OPS, base, 16, 64, False)
    assert not mosaic_stored_ds.serves(JaxOps(), base, 16, 64, False)


# On a GPU, shapes that the interpreter would take minutes for.
CASES = [
    Case(1700, 1700, 64, 4, 128, 128, 1, PAPER, dtype="bfloat16"),
    Case(900, 900, 32, 4, 128, 64, 2, PAPER, dtype="bfloat16"),  # two tokens in a warp's rows
    Case(700, 700, 40, 4, 64, 128, 2, PAPER, dtype="float16"),
    Case(333, 3000, 64, 2, 192, 128, 2, PAPER, dtype="bfloat16"),
    Case(500, 900, 64, 1, 128, 256, 1, PAPER, dtype="bfloat16"),
    Case(130, 130, 128, 2, 256, 256, 1, PAPER, dtype="bfloat16"),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_on_gpu(case, stored):
    check_whole(posed(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_ds_chunks_change_nothing_on_gpu(framework, monkeypatch):
    """Not a bit, and neither does a run repeated."""
    if framework == "jax":
        p = posed(CASES[0])
        gradients = lambda: [*bits(p).values()]
    else:
        tensors = inputs(1500, 1500, 64, 4, 128, 128, device="cuda")

        def gradients():
            out = nsa_torch.attention(*tensors, implementation="mosaic")
            return [x.float().cpu().numpy() for x in torch.autograd.grad(out, tensors, out)]

    runs = [gradients() for _ in range(3)]
    set_limits(monkeypatch, ds_chunk_bytes=1)
    # A description names it as of its module.
    dq = functools.update_wrapper(mock.Mock(side_effect=stored_ds.dq), stored_ds.dq)
    monkeypatch.setattr(stored_ds, "dq", dq)
    plans.forget()
    eager.forget()
    runs += [gradients() for _ in range(3)]
    rows = [call.args[0].stored_rows for call in dq.call_args_list]
    assert rows.count(1) >= 4  # of [B, Hkv]
    for found in runs[1:]:
        for got, want in zip(found, runs[0], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@needs_gpu
def test_what_runs_beside_changes_nothing_on_gpu(monkeypatch):
    """Eager, on another stream, after work that is queued, and in a CUDA graph: the bits of one
    chunk.
    """
    tensors = inputs(6000, 6000, 64, 4, 128, 128, device="cuda")

    def gradients():
        out = nsa_torch.attention(*tensors, implementation="mosaic")
        return torch.autograd.grad(out, tensors, out)

    want = [x.clone() for x in gradients()]
    set_limits(monkeypatch, ds_chunk_bytes=1)
    plans.forget()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    found = [gradients()]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        found += [gradients() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = gradients()
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        found.append([x.clone() for x in captured])
    for each in found:
        assert all(torch.equal(x, y) for x, y in zip(each, want, strict=True))

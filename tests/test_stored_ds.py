"""Where dS of the selected branch is stored, how much of it at a time, and what runs beside it."""

import functools

import jax
import numpy as np
import pytest
import torch

import nsa_jax
from kernels_pallas.specs.dkv import Dkv
from nsa_core.plan.buffers import Join
from nsa_core.steps import mosaic_stored_ds
from nsa_jax import ffi, xla_call
from nsa_jax.jax_ops import JaxOps
from nsa_torch import plans
from nsa_torch.torch_ops import TORCH_OPS
from tests import paths, planned, pretend
from tests.devices import on_hopper
from tests.jaxprs import layer_types
from tests.limits import forget, set_limits
from tests.problems import CASES, PAPER, array, problem
from tests.tables import table


def plan_of_backward(monkeypatch):
    """Torch's, of a row of the paper's heads: a chunk of dS for each of four."""
    set_limits(monkeypatch, ds_chunk_bytes=1)
    sizes = {"heads": 64, "kv_heads": 4, "key_width": 128, "value_width": 128}
    mode = planned.MODES["shared"]
    given = planned.described(mode, 1, 2048, **sizes, config=PAPER)
    function = planned.PATHS["mosaic"].planned(mode, "saving")
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

    sequence = lambda kernels, arguments, device: (
        lambda *given: [launcher(kernel, device)(*given) for kernel in kernels]
    )
    gpu = {"launcher": launcher, "launch_sequence": sequence, "current_stream": 0}
    pretend.machine(monkeypatch, **gpu, stream_beside=stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    bound = plans.BoundPlan(plan, torch.device("cpu"))
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
    pretend.jax_gpu(monkeypatch, ffi_serves=lambda kernel: bool(kernel.source))
    monkeypatch.setattr(ffi, "TARGET", "test_stored_ds")  # never run
    jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(HANDLER), platform="cpu")
    length = 4096
    attend = functools.partial(nsa_jax.attention, config=PAPER, implementation="mosaic")

    def gradients(do, *arrays):
        return jax.vjp(attend, *arrays)[1](do)

    arrays = layer_types(1, length, heads=64, kv_heads=4, width=128)
    memory = jax.jit(gradients).lower(arrays[0], *arrays).compile().memory_analysis()
    ds_chunk = length * PAPER.num_selected * 16 * 64 * 2
    assert ds_chunk < memory.temp_size_in_bytes < 2 * ds_chunk


SIZES = {"B": 2, "T": 700, "S": 900, "H": 64, "Hkv": 4, "D": 128, "Dv": 128}


of_sizes = functools.partial(Dkv, dtype="bfloat16", scale=1.0, work_items=0, list_entries=1)
ROWS = table("choice")["stored dS"]


@pytest.mark.parametrize(("change", "selection_entries", "block", "packed", "wanted"), ROWS)
def test_where_it_is_stored(change, selection_entries, block, packed, wanted):
    sizes = SIZES | change
    base = of_sizes(**sizes, single_token=sizes["H"] // sizes["Hkv"] <= 8)
    assert mosaic_stored_ds.serves(TORCH_OPS, base, selection_entries, block, packed) == wanted


def test_all_rows_at_once_may_be_too_large():
    """Where dq is not added in place: 17 GB."""
    base = of_sizes(**SIZES | {"T": 2**16, "S": 2**16})
    assert mosaic_stored_ds.serves(TORCH_OPS, base, 16, 64, False)
    assert not mosaic_stored_ds.serves(JaxOps(), base, 16, 64, False)


@on_hopper
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_ds_chunks_change_nothing_on_gpu(framework, monkeypatch):
    """Not a bit: of one chunk, and of a chunk for each row of `[B, Hkv]`."""
    p = problem(CASES["gpu stored dS: sixteen heads"])
    of_torch = functools.partial(paths.of_torch, device="cuda")
    of = {"jax": paths.of_jax, "torch": of_torch}[framework]
    want = of(p, "mosaic")
    set_limits(monkeypatch, ds_chunk_bytes=1)
    rows = pretend.watched(monkeypatch, "stored_ds_dq", lambda spec: spec.stored_rows)
    forget()
    found = of(p, "mosaic")
    assert rows.count(1) >= 4  # of [B, Hkv]
    for name, x in found.items():
        np.testing.assert_array_equal(array(x), array(want[name]))

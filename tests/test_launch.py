"""Mosaic GPU kernels on torch tensors: refusals, what is lowered, what is built when.

The GPU part holds a stream back by a delay (`torch.cuda._sleep`), so that a launch on another
stream, or a host that waits, shows every time.
"""

import ctypes
import functools
import importlib.metadata
import itertools
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from nsa_interop.launch import launch, prepare

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import build_child
from kernels_pallas.runtime.lowering import lower
from nsa_interop import launch as module
from tests import cross_compile, pretend, spawned
from tests.runtime_kernels import Copy, copy

N = 4096
FLOATS = jax.ShapeDtypeStruct((N,), jnp.float32)
HALVES = jax.ShapeDtypeStruct((N,), jnp.bfloat16)
COPY = copy(Copy(1, 32))  # bfloat16 [1, 32, 2, 64]: N elements; and int32 [1, 2]


def kernel_of(call, inputs=(FLOATS,), outputs=(FLOATS,)):
    return Kernel("sample", None, call, inputs, outputs)


def aligned(size=N, dtype=torch.bfloat16, offset=0):
    """Zeros in CPU memory, `offset` bytes after a multiple of 256."""
    bytes_ = torch.zeros(size * dtype.itemsize + 512, dtype=torch.uint8)
    start = -bytes_.data_ptr() % 256 + offset
    return bytes_[start : start + size * dtype.itemsize].view(dtype)


# Refusals


sample = kernel_of(lambda x: [x])
MUST = r"argument 0 of copy must be a contiguous tensor of torch.bfloat16 with the 4096 .* got"
BAD = {
    "dtype": (f"{MUST} torch.float32", lambda: launch(COPY, aligned(dtype=torch.float32))),
    "size": (rf"{MUST} .* shape \(4095,\)", lambda: launch(COPY, aligned(N - 1))),
    "strides": (rf"{MUST} .* strides \(2,\)", lambda: launch(COPY, aligned(2 * N)[::2])),
    "alignment": (f"{MUST} .* at 0x.*10,", lambda: launch(COPY, aligned(offset=16))),
    "gradient": (f"{MUST} .*_grad=True", lambda: launch(COPY, aligned().requires_grad_())),
    "out": (
        "out 1 of copy must be a contiguous tensor of torch.int32",
        lambda: launch(COPY, aligned(), out=[None, aligned()]),
    ),
    "CPU": ("argument 0 of copy must be on a GPU, got cpu", lambda: launch(COPY, aligned())),
    "prepare": ("device must be a GPU, got cpu", lambda: prepare([COPY], "cpu")),
    "JAX: count": ("sample needs 1 arrays", lambda: sample(jnp.zeros(N), jnp.zeros(N))),
    "JAX: dtype": ("argument 0 of .*float32.*got int32", lambda: sample(jnp.zeros(N, int))),
    "JAX: size": (r".*4096 elements of \(4096,\), .*\(5,\)", lambda: sample(jnp.zeros(5))),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    words, call = BAD[name]
    with pytest.raises(ValueError, match=f"^{words}"):
        call()


def test_another_gpu_is_refused(monkeypatch):
    pretend.gpu(monkeypatch, (10, 0))
    words = r"copy needs .* 9\.0 .*, got 10\.0 on cuda:0"
    with pytest.raises(NotImplementedError, match=words):
        module.launcher(COPY, torch.device("cuda:0"))


@pytest.mark.parametrize("version", ["0.11.2", "0.12.0"])
def test_the_plugins_launcher_takes_what_its_version_does(monkeypatch, version):
    """From JAX 0.12 on the kernel comes first and the device last."""
    pointer, told = ctypes.c_void_p, []
    kinds = [pointer] * 3 if version == "0.11.2" else [*[pointer] * 4, ctypes.c_int]
    called = ctypes.CFUNCTYPE(None, *kinds)(lambda *given: told.append(given))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    start = build_child.launcher((7, ctypes.cast(called, pointer).value, 8))
    addresses = (pointer * 2)(256, 512)
    start(5, addresses)
    at = ctypes.addressof(addresses)
    assert told == [(7, 5, at) if version == "0.11.2" else (8, 7, 5, at, 0)]


# Lowering, and compilation without a GPU


def new_tiny():
    """`x + 2 y` in float32 and `x - y` in bfloat16, of x in float32 and y in bfloat16."""

    def body(x, y, total, difference):
        part = pl.ds(jax.lax.axis_index("part") * 128, 128)
        a, b = x[part], y[part].astype(jnp.float32)
        total[part] = a + 2 * b
        difference[part] = (a - b).astype(jnp.bfloat16)

    call = plgpu.kernel(body, out_type=[FLOATS, HALVES], grid=(N // 128,), grid_names=("part",))
    return Kernel("tiny", None, call, (FLOATS, HALVES), (FLOATS, HALVES))


def spilling():
    """Holds more values alive than a thread has registers."""

    def body(x, out):
        values = [x[pl.ds(i * N, N)] for i in range(10)]  # 32 registers each, of 255
        total = jnp.sum(functools.reduce(jnp.add, values))
        out[...] = functools.reduce(jnp.multiply, [value + total for value in values])

    many = jax.ShapeDtypeStruct((10 * N,), jnp.float32)
    return Kernel("spilling", None, plgpu.kernel(body, out_type=[FLOATS]), (many,), (FLOATS,))


_copy = plgpu.kernel(lambda x, out: out.__setitem__(..., x[...]), out_type=[FLOATS])
_two = new_tiny().call
_semaphore = plgpu.kernel(
    lambda x, out, scratch: out.__setitem__(..., x[...]),
    out_type=[FLOATS],
    scratch_types=[plgpu.SemaphoreType.REGULAR],
)
NOT_ONE = {
    "more": kernel_of(lambda x: [x + 1]),
    "none": kernel_of(lambda x: [x]),
    "around it": kernel_of(lambda x: _copy(x + 1)),
    "two": kernel_of(lambda x: _copy(_copy(x)[0])),
    "in a function": kernel_of(jax.jit(lambda x: _copy(x))),
    "scratch": kernel_of(_semaphore),
    "arguments in another order": kernel_of(
        lambda y, x: _two(x, y), (HALVES, FLOATS), (FLOATS, HALVES)
    ),
    "an argument less": kernel_of(lambda x, unused: _copy(x), (FLOATS, FLOATS)),
    "results in another order": kernel_of(
        lambda x, y: _two(x, y)[::-1], (FLOATS, HALVES), (HALVES, FLOATS)
    ),
    "a result less": kernel_of(lambda x, y: _two(x, y)[:1], (FLOATS, HALVES)),
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_anything_but_one_kernel_is_refused(name):
    with pytest.raises(ValueError, match="sample must be one Mosaic GPU kernel that has all"):
        lower(NOT_ONE[name])


def test_other_results_are_refused():
    words = r"must return \['bfloat16\[4096\]'\], got \['float32\[4096\]'\]"
    with pytest.raises(ValueError, match=words):
        lower(kernel_of(_copy, outputs=(HALVES,)))


def test_cross_compilation_reports_registers_and_spills():
    place = f"{__name__}:"
    clean, bad = cross_compile.compile_report(
        [(place + "new_tiny", {}), (place + "spilling", {})]
    )
    assert clean["name"] == "tiny" and 0 < clean["registers"] < 64
    assert clean["spill_store_bytes"] == clean["spill_load_bytes"] == 0
    assert clean["remarks"] == []
    assert bad["spill_store_bytes"] > 0 and bad["spill_load_bytes"] > 0
    assert bad["remarks"]
    with pytest.raises(RuntimeError, match="no attribute 'no_such_builder'"):
        cross_compile.compile_report([(f"{__name__}:no_such_builder", {})])


# On a GPU

DELAY = 300_000_000  # clock cycles, above 0.1 s
HEADS = itertools.count(3)


def new_kernel():
    """One that is not loaded yet, and its input."""
    heads = next(HEADS)
    return copy(Copy(1, 32, heads)), torch.randn(1, 32, heads, 64, device="cuda").bfloat16()


def values(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(N, device="cuda", generator=generator).bfloat16()


def right(outputs, x):
    out, lengths = outputs
    return torch.equal(out.view(-1), x.view(-1)) and lengths.view(-1).tolist() == [32] * (
        lengths.numel()
    )


@pytest.mark.gpu
def test_out_is_written_and_returned():
    x = values()
    assert right(launch(COPY, x.view(2, -1)), x)
    out = [torch.empty(64, N // 64, device="cuda", dtype=x.dtype), None]
    outputs = launch(COPY, x, out=out)
    assert outputs[0] is out[0] and right(outputs, x)
    with pytest.raises(ValueError, match=r"out 0 of copy must .* on GPU 0.* on cpu"):
        launch(COPY, x, out=[aligned(), None])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["default", "side"])
def test_a_launch_follows_the_current_stream_and_does_not_wait(kind):
    wanted = values()
    stream = torch.cuda.default_stream() if kind == "default" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = torch.empty_like(wanted)
        for scale, delay in (0, 1), (1, DELAY):  # the first loads all code and takes memory
            torch.cuda._sleep(delay)
            torch.mul(wanted, scale, out=x)
            outputs = launch(COPY, x)
        assert not stream.query(), "the host waited"
        assert right(outputs, wanted)


@pytest.mark.gpu
def test_freed_memory_is_reused_in_stream_order():
    with torch.cuda.stream(torch.cuda.Stream()):
        x = values()
        wanted = x.clone()
        torch.cuda._sleep(DELAY)
        outputs = launch(COPY, x)
        del x
        junk = [torch.full((N,), -5.0, device="cuda").bfloat16() for _ in range(4)]
        assert right(outputs, wanted)
        del junk


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_the_device_is_that_of_the_tensors():
    x = values().to("cuda:1")
    assert right(launch(COPY, x), x)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match=r"out 0 of copy must .* on GPU 1.* on cuda:0"):
        launch(COPY, x, out=[torch.empty_like(x, device="cuda:0"), None])


@pytest.mark.gpu
def test_a_first_load_during_capture_is_refused():
    kernel, x = new_kernel()
    refused = pytest.raises(RuntimeError, match="must be loaded before a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        launch(kernel, x + 0)
    assert right(launch(kernel, x), x)


@pytest.mark.gpu
def test_a_load_while_another_thread_captures():
    # In a process of its own, which a refusal of the driver would end.
    script = """
        import threading, torch
        from nsa_interop.launch import launch, prepare
        from tests.test_launch import COPY, new_kernel, right, values

        prepare([COPY], "cuda")
        x, (second, y) = values(), new_kernel()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = launch(COPY, x)
            thread = threading.Thread(target=prepare, args=([second], "cuda:0"))
            thread.start()
            thread.join()
        graph.replay()
        assert right(outputs, x) and right(launch(second, y), y)
    """
    _run_on_gpu(script)


@pytest.mark.gpu
def test_threads_load_once_and_launch_at_once(monkeypatch):
    kernel, x = new_kernel()
    made = pretend.watched(monkeypatch, "load_on_device")
    inputs = [x + i for i in range(8)]
    torch.cuda.synchronize()
    start = threading.Barrier(len(inputs))

    def work(i):
        stream = torch.cuda.Stream()
        start.wait()
        for _ in range(100):
            with torch.cuda.stream(stream):
                found = launch(kernel, inputs[i])
        stream.synchronize()
        return found

    with ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(work, range(len(inputs))))
    assert len(made) == 1 and all(map(right, results, inputs))


@pytest.mark.gpu
def test_a_thread_that_has_not_called_cuda_may_launch():
    x = values()
    out = launch(COPY, x)
    for tensor in out:
        tensor.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=launch, args=(COPY, x), kwargs={"out": out})
    thread.start()
    thread.join()
    assert right(out, x)


@pytest.mark.gpu
def test_a_launch_starts_no_jax_client_and_stands_beside_one():
    script = """
        import jax, torch
        from jax._src import xla_bridge
        from nsa_interop.launch import launch
        from tests.test_launch import new_kernel, right

        for before in True, False:
            kernel, x = new_kernel()
            assert right(launch(kernel, x), x)
            assert xla_bridge.backends_are_initialized() != before
            assert jax.numpy.zeros(3).devices().pop().platform == "gpu"
    """
    _run_on_gpu(script)


def _run_on_gpu(script):
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = spawned.python("-c", textwrap.dedent(script), **variables)
    assert not done.returncode, done.stderr

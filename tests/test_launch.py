"""Mosaic GPU kernels on torch tensors: refusals, what lowering starts, the call of the driver.

The GPU part holds a stream back by a delay (`torch.cuda._sleep`), so that a launch on another
stream, or a host that waits, shows every time.
"""

import ctypes
import functools
import importlib.metadata
import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from nsa_interop.launch import launch, prepare

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import loaded, plugin
from kernels_pallas.runtime.lowering import lower
from kernels_pallas.specs.bwd_preprocess import RowStats, row_stats
from kernels_pallas.specs.combine import Combine, gated_sum
from nsa_interop import launch as module
from tests import cross_compile, pretend

N = 4096
DELAY = 300_000_000  # clock cycles, above 0.1 s
FLOATS = jax.ShapeDtypeStruct((N,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((64, N // 64), jnp.float32)
HALVES = jax.ShapeDtypeStruct((N,), jnp.bfloat16)


def new_tiny():
    """`x + 2 y` in float32 and `x - y` in bfloat16, of x in float32 and y in bfloat16."""

    def body(x, y, total, difference):
        part = pl.ds(jax.lax.axis_index("part") * 128, 128)
        a, b = x[part], y[part].astype(jnp.float32)
        total[part] = a + 2 * b
        difference[part] = (a - b).astype(jnp.bfloat16)

    call = plgpu.kernel(body, out_type=[FLOATS, HALVES], grid=(N // 128,), grid_names=("part",))
    return Kernel("tiny", None, call, (FLOATS, HALVES), (FLOATS, HALVES))


tiny = functools.cache(new_tiny)


def spilling():
    """Holds more values alive than a thread has registers."""

    def body(x, out):
        values = [x[pl.ds(i * N, N)] for i in range(10)]  # 32 registers each, of 255
        total = jnp.sum(functools.reduce(jnp.add, values))
        out[...] = functools.reduce(jnp.multiply, [value + total for value in values])

    many = jax.ShapeDtypeStruct((10 * N,), jnp.float32)
    return Kernel("spilling", None, plgpu.kernel(body, out_type=[FLOATS]), (many,), (FLOATS,))


def aligned(size, dtype=torch.float32, offset=0):
    """Zeros in CPU memory, `offset` bytes after a multiple of 256."""
    bytes_ = torch.zeros(size * dtype.itemsize + 512, dtype=torch.uint8)
    start = -bytes_.data_ptr() % 256 + offset
    return bytes_[start : start + size * dtype.itemsize].view(dtype)


def good_inputs():
    return [aligned(N), aligned(N, torch.bfloat16)]


# Kernel


def _with(call, inputs=(FLOATS,), outputs=(FLOATS,)):
    return Kernel("sample", None, call, inputs, outputs)


def test_a_kernel_reshapes_its_arrays_and_returns_a_tuple():
    kernel = _with(lambda x, y: [x + y], (SQUARE, SQUARE), (SQUARE,))
    x, y = np.ones(N, np.float32), jnp.ones((2, N // 2), jnp.float32)
    outputs = kernel(x, y)
    assert isinstance(outputs, tuple)
    assert outputs[0].shape == SQUARE.shape and float(outputs[0].sum()) == 2 * N


def test_kernels_are_compared_by_identity():
    assert new_tiny() != new_tiny()
    assert {tiny(): 1}[tiny()] == 1


# Refusals


def given(*changes, **options):
    """A launch of `tiny` with other tensors at some positions."""
    tensors = good_inputs()
    for position, tensor in changes:
        tensors[position] = tensor
    return launch(tiny(), *tensors, **options)


def without_gradient(call):
    with torch.no_grad():
        return call()


sample = _with(lambda x: [x])
BAD = {
    "tiny takes argument 0, argument 1: 2, got 0": lambda: launch(tiny()),
    "tiny takes argument 0, argument 1: 2, got 3": lambda: launch(tiny(), *[aligned(N)] * 3),
    "argument 0 of tiny must be a torch.Tensor, got ndarray": lambda: given((0, np.zeros(N))),
    "argument 1 of tiny must be a torch.Tensor, got NoneType": lambda: given((1, None)),
    "argument 1 of tiny must have dtype torch.bfloat16, got torch.float32": lambda: given(
        (1, aligned(N))
    ),
    r".* must have the 4096 elements of \(4096,\), got \(4095,\)": lambda: given(
        (0, aligned(N - 1))
    ),
    r".* must be contiguous, got .* strides \(2,\): pass a copy": lambda: given(
        (0, aligned(2 * N)[::2])
    ),
    ".* must start at a multiple of 256 bytes, got 0x.*: pass a c": lambda: given(
        (0, aligned(N, offset=16))
    ),
    ".* must not require a gradient": lambda: given((0, aligned(N).requires_grad_())),
    "argument 0 of tiny must be on a GPU, got cpu": lambda: without_gradient(
        lambda: given((0, aligned(N).requires_grad_()))
    ),
    r"tiny takes out\[0\], out\[1\]: 2, got 1": lambda: given(out=[aligned(N)]),
    r"out\[1\] of tiny must have dtype torch.bfloat16": lambda: given(out=[aligned(N)] * 2),
    "device must be a GPU, got cpu": lambda: prepare(tiny(), "cpu"),
    "sample takes 1 arrays, got 2": lambda: sample(jnp.zeros(N), jnp.zeros(N)),
    "argument 0 of sample must.*float32.*got int32": lambda: sample(jnp.zeros(N, int)),
    r".* must.*4096 elements of \(4096,\), got.*\(5,\)": lambda: sample(jnp.zeros(5)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BAD[message]()


def test_another_gpu_is_refused(monkeypatch):
    pretend.gpu(monkeypatch, (10, 0))
    with pytest.raises(
        NotImplementedError, match=r"tiny needs .* 9\.0 .*, got 10\.0 on cuda:0"
    ):
        module._load(tiny(), 0)


def test_the_plugin_is_asked_for(monkeypatch):
    monkeypatch.setattr(plugin, "PLUGINS", ("jax_plugins.none",))
    with pytest.raises(RuntimeError, match=r"plugin is missing: pip install 'jax\[cuda13\]'"):
        plugin.compiler.__wrapped__()


@pytest.mark.parametrize("version", ["0.11.2", "0.12.0"])
def test_the_plugins_launcher_takes_what_its_version_does(monkeypatch, version):
    """From JAX 0.12 on the kernel comes first and the device last."""
    pointer, told = ctypes.c_void_p, []
    kinds = [pointer] * 3 if version == "0.11.2" else [*[pointer] * 4, ctypes.c_int]
    called = ctypes.CFUNCTYPE(None, *kinds)(lambda *given: told.append(given))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    start = plugin.launcher((7, ctypes.cast(called, pointer).value, 8), 3)
    addresses = (pointer * 2)(256, 512)
    start(5, addresses)
    at = ctypes.addressof(addresses)
    assert told == [(7, 5, at) if version == "0.11.2" else (8, 7, 5, at, 3)]


def test_a_kernel_that_is_nowhere_and_cannot_be_built_is_said(monkeypatch):
    pretend.no_module(monkeypatch, "kernels_pallas.runtime.lowering")  # no JAX
    pretend.machine(monkeypatch, plugin=False)
    words = (
        "tiny is none of the kernels on disk, .* cannot build it: JAX's CUDA plugin is missing"
    )
    with pytest.raises(RuntimeError, match=words):
        module._compile(tiny(), 0)


BUILT = SimpleNamespace(cubin=None, image=None)


def test_what_is_announced_is_built_beside_a_kernel_that_never_was(monkeypatch):
    specs = (Combine(64, 64, branches, "bfloat16") for branches in (1, 2, 3))
    first, second, third = (gated_sum(spec) for spec in specs)
    generic = [x.for_any_length() for x in (first, second, third)]
    on_disk, fetched = {generic[2]}, []

    class Store:
        def get(self, kernel):
            return BUILT if kernel in on_disk else None

        def fetch(self, kernels, jobs, progress):
            fetched.append(list(kernels))
            on_disk.update(kernels)
            return [BUILT for _ in kernels]

    monkeypatch.setattr(loaded, "store", Store)
    monkeypatch.setattr(loaded, "_loaded", {})
    pretend.machine(monkeypatch, can_build=True)
    monkeypatch.setattr(loaded.driver, "load", lambda *_: None)
    asked = []
    module.prefetch(lambda: asked.append(1) or [first, second, third])
    load = functools.partial(loaded.load, device=0, prefetch=module._prefetched)
    load([generic[2]])  # on disk: nothing else is asked for
    assert not fetched and not asked
    load([generic[0]])
    assert fetched == [generic[:2]] and asked == [1]
    load([generic[1]])
    assert len(fetched) == 1


# Lowering


def test_lowering_gives_bytecode():
    assert lower(tiny()).startswith(b"ML\xefR")


_copy = plgpu.kernel(lambda x, out: out.__setitem__(..., x[...]), out_type=[FLOATS])
_two = tiny().call
_semaphore = plgpu.kernel(
    lambda x, out, scratch: out.__setitem__(..., x[...]),
    out_type=[FLOATS],
    scratch_types=[plgpu.SemaphoreType.REGULAR],
)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_with(lambda x: [x + 1]), r"exactly one Mosaic GPU kernel, got \['stablehlo"),
        (_with(lambda x: [x]), r"exactly one Mosaic GPU kernel, got \[\]"),
        (_with(lambda x: _copy(x + 1)), "stablehlo.add.*mosaic_gpu_v2"),
        (_with(lambda x: _copy(_copy(x)[0])), "got .'mosaic_gpu_v2', 'mosaic_gpu_v2'"),
        (_with(jax.jit(lambda x: _copy(x))), "func.call.*func.func"),
        (_with(_semaphore), "stablehlo.*mosaic_gpu_v2"),
        (
            _with(lambda y, x: _two(x, y), (HALVES, FLOATS), (FLOATS, HALVES)),
            "sample must pass all its arguments to the kernel, in their order",
        ),
        (_with(lambda x, unused: _copy(x), (FLOATS, FLOATS)), "pass all its arguments"),
        (
            _with(lambda x, y: _two(x, y)[::-1], (FLOATS, HALVES), (HALVES, FLOATS)),
            "sample must return all results of the kernel, in their order",
        ),
        (_with(lambda x, y: _two(x, y)[:1], (FLOATS, HALVES)), "return all results"),
        (
            _with(_copy, outputs=(HALVES,)),
            r"must return \['bfloat16\[4096\]'\], got \['float32\[4096\]'\]",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.name,
)
def test_anything_but_one_kernel_is_refused(kernel, message):
    with pytest.raises(ValueError, match=message):
        lower(kernel)


def test_lowering_hides_the_devices_from_its_own_thread_only():
    original, devices = jax.local_devices, jax.local_devices()
    seen = {}

    def call(x):
        look = lambda name: seen.update({name: jax.local_devices()})
        look("here")
        other = threading.Thread(target=look, args=("elsewhere",))
        other.start()
        other.join()
        return _copy(x)

    lower(_with(call))
    assert seen["elsewhere"] == devices and seen["here"] != devices
    assert jax.local_devices is original


# Compilation, and the call of a driver that only writes down


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


def test_what_cannot_be_built_is_compiled_for_its_length(monkeypatch):
    """`prepare` leaves nothing to a later capture, where kernels for any length are out of
    reach."""
    kernels = [row_stats(RowStats(1, length, 8, 2, 16, 64)) for length in (40, 41, 40)]
    compiled = []
    monkeypatch.setattr(module.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(module, "_launchers", {})
    monkeypatch.setattr(loaded, "_loaded", {})
    pretend.machine(monkeypatch, can_build=False)
    monkeypatch.setattr(module, "_check_may_load", lambda kernel, index: None)
    monkeypatch.setattr(module, "_compile", lambda kernel, index: compiled.append(kernel))
    assert prepare(kernels, "cuda:3") == 1
    assert compiled == kernels[:2]
    assert list(module._launchers) == [(kernel, 3) for kernel in kernels[:2]]


def test_cross_compilation_fails_aloud():
    with pytest.raises(RuntimeError, match="no attribute 'no_such_builder'"):
        cross_compile.compile_report([(f"{__name__}:no_such_builder", {})])


def test_a_launch_hands_the_driver_function_stream_and_addresses_in_order(tmp_path):
    """In a process in which lowering starts no backend and leaves them usable."""
    script = """
        import jax
        from jax._src import xla_bridge
        from kernels_pallas.runtime.lowering import lower
        from tests.test_launch import new_tiny

        before = lower(new_tiny())
        assert not xla_bridge.backends_are_initialized()
        assert float(jax.numpy.arange(4.0).sum()) == 6
        assert xla_bridge.backends_are_initialized()
        assert jax.devices()[0].client is jax.numpy.zeros(3).devices().pop().client
        assert len(lower(new_tiny())) == len(before)

        import ctypes, threading
        from interop import launch
        from kernels_pallas.runtime import build_child
        from kernels_pallas.runtime.driver import RELAXED
        from tests.test_launch import tiny

        driver = ctypes.CDLL("libcuda.so.1")
        launcher = launch._compile(tiny(), 0)
        assert driver.recorder_depth() == 0
        calls = build_child.recorded()
        (mode,) = [x["capture_mode"] for x in calls if x["call"] == "cuModuleLoadData"]
        assert mode == RELAXED
        mode = ctypes.c_int(0)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        assert mode.value == 0

        build_child.expect([(8 * i, 8) for i in range(4)])
        launcher(0x1230, [0x100, 0x200, 0x300, 0x400])
        (first,) = build_child.launches()
        assert first.function and first.stream == 0x1230 and first.context
        numbers = [int.from_bytes(x, "little") for x in first.parameters]
        assert numbers == [0x100, 0x200, 0x300, 0x400]
        assert driver.recorder_depth() == 0

        thread = threading.Thread(target=launcher, args=(0, [0x500, 0x600, 0x700, 0x800]))
        thread.start()
        thread.join()
        (second,) = build_child.launches()
        assert second[:3] == (first.function, 0, first.context)
        numbers = [int.from_bytes(x, "little") for x in second.parameters]
        assert numbers == [0x500, 0x600, 0x700, 0x800]
    """
    cross_compile.run(["-c", textwrap.dedent(script)], tmp_path)


# On a GPU


def inputs_on_gpu(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(N, device="cuda", generator=generator)
    return x, torch.randn(N, device="cuda", generator=generator).bfloat16()


def expected(x, y):
    return x + 2 * y.float(), (x - y.float()).bfloat16()


def assert_same(outputs, wanted):
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output, want, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_result_is_that_of_torch_and_of_jax():
    x, y = inputs_on_gpu()
    outputs = launch(tiny(), x.view(2, -1), y)
    assert isinstance(outputs, tuple)
    assert_same(outputs, expected(x, y))
    arrays = tiny()(
        jnp.asarray(x.cpu().numpy()), jnp.asarray(y.float().cpu().numpy(), HALVES.dtype)
    )
    for array, output in zip(arrays, outputs, strict=True):
        np.testing.assert_array_equal(
            np.asarray(array, np.float32), output.float().cpu().numpy()
        )


@pytest.mark.gpu
def test_out_is_written_and_returned():
    x, y = inputs_on_gpu()
    out = [torch.empty(64, N // 64, device="cuda"), torch.empty_like(y)]
    outputs = launch(tiny(), x, y, out=out)
    assert all(a is b for a, b in zip(outputs, out, strict=True))
    assert_same([output.view(-1) for output in outputs], expected(x, y))
    first, second = launch(tiny(), x, y, out=[None, out[1]])
    assert second is out[1] and first is not out[0]
    assert_same([first, second], expected(x, y))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["default", "side"])
def test_a_launch_follows_the_current_stream_and_does_not_wait(kind):
    values, y = inputs_on_gpu()
    stream = torch.cuda.default_stream() if kind == "default" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = torch.empty_like(values)
        for scale, delay in (0, 1), (1, DELAY):  # the first loads all code and takes memory
            torch.cuda._sleep(delay)
            torch.mul(values, scale, out=x)
            outputs = launch(tiny(), x, y)
        assert not stream.query(), "the host waited"
        assert_same(outputs, expected(values, y))


@pytest.mark.gpu
def test_freed_memory_is_reused_in_stream_order():
    with torch.cuda.stream(torch.cuda.Stream()):
        x, y = inputs_on_gpu()
        wanted = expected(x, y)
        torch.cuda._sleep(DELAY)
        outputs = launch(tiny(), x, y)
        del x, y
        junk = [torch.full((N,), -5.0, device="cuda") for _ in range(4)]
        assert_same(outputs, wanted)
        del junk


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_the_device_is_that_of_the_tensors():
    x, y = (tensor.to("cuda:1") for tensor in inputs_on_gpu())
    outputs = launch(tiny(), x, y)
    assert torch.cuda.current_device() == 0
    assert_same(outputs, expected(x, y))
    with pytest.raises(ValueError, match="argument 1 of tiny must be on cuda:1, got cuda:0"):
        launch(tiny(), x, y.to("cuda:0"))


@pytest.mark.gpu
def test_a_captured_launch_is_replayed():
    prepare(tiny(), "cuda")
    x, y = (tensor.clone() for tensor in inputs_on_gpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = launch(tiny(), x, y)
    for seed in (1, 2):
        for static, value in zip((x, y), inputs_on_gpu(seed), strict=True):
            static.copy_(value)
        graph.replay()
        assert_same(outputs, expected(x, y))


@pytest.mark.gpu
def test_a_first_compilation_during_capture_is_refused():
    x, y = inputs_on_gpu()
    kernel = new_tiny()
    refused = pytest.raises(RuntimeError, match="must be compiled before a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        z = x + 1
        launch(kernel, z, y)
    assert_same(launch(kernel, x, y), expected(x, y))


@pytest.mark.gpu
def test_a_compilation_while_another_thread_captures():
    # In a process of its own, which a refusal of the driver would end.
    script = """
        import threading, torch
        from nsa_interop.launch import launch, prepare
        from tests.test_launch import assert_same, expected, inputs_on_gpu, new_tiny

        first, second = new_tiny(), new_tiny()
        prepare(first, "cuda")
        x, y = inputs_on_gpu()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = launch(first, x, y)
            thread = threading.Thread(target=prepare, args=(second, "cuda:0"))
            thread.start()
            thread.join()
        graph.replay()
        assert_same(outputs, expected(x, y))
        assert_same(launch(second, x, y), expected(x, y))
    """
    _run_on_gpu(script)


@pytest.mark.gpu
def test_threads_compile_once_and_launch_at_once(monkeypatch):
    compiled = []
    compile_ = module._compile
    monkeypatch.setattr(
        module, "_compile", lambda *arguments: compiled.append(1) or compile_(*arguments)
    )
    kernel, count = new_tiny(), 8
    inputs = [inputs_on_gpu(seed) for seed in range(count)]
    torch.cuda.synchronize()
    results, start = {}, threading.Barrier(count)

    def work(i):
        stream = torch.cuda.Stream()
        start.wait()
        for _ in range(100):
            with torch.cuda.stream(stream):
                results[i] = launch(kernel, *inputs[i])
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    for i in range(count):
        assert_same(results[i], expected(*inputs[i]))


@pytest.mark.gpu
def test_a_thread_that_has_not_called_cuda_may_launch():
    x, y = inputs_on_gpu()
    out = launch(tiny(), x, y)
    wanted = expected(x, y)
    for tensor in out:
        tensor.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=launch, args=(tiny(), x, y), kwargs={"out": out})
    thread.start()
    thread.join()
    assert_same(out, wanted)


@pytest.mark.gpu
def test_refusals_on_a_gpu():
    x, y = inputs_on_gpu()
    with pytest.raises(ValueError, match="argument 1 of tiny must be on cuda:0, got cpu"):
        launch(tiny(), x, aligned(N, torch.bfloat16))
    with pytest.raises(ValueError, match=r"out\[0\] of tiny must be on cuda:0, got cpu"):
        launch(tiny(), x, y, out=[aligned(N), y])
    with pytest.raises(ValueError, match=r"must be contiguous, got .* \(2,\)"):
        launch(tiny(), torch.zeros(2 * N, device="cuda")[::2], y)
    with pytest.raises(ValueError, match="multiple of 256 bytes"):
        launch(tiny(), torch.zeros(N + 4, device="cuda")[4:], y)


@pytest.mark.gpu
def test_a_launch_starts_no_jax_client_and_stands_beside_one():
    script = """
        import jax, torch
        from jax._src import xla_bridge
        from nsa_interop.launch import launch
        from tests.test_launch import assert_same, expected, inputs_on_gpu, new_tiny

        x, y = inputs_on_gpu()
        assert_same(launch(new_tiny(), x, y), expected(x, y))
        assert not xla_bridge.backends_are_initialized()
        assert jax.numpy.zeros(3).devices().pop().platform == "gpu"
        assert_same(launch(new_tiny(), x, y), expected(x, y))
        assert jax.numpy.zeros(3).devices().pop().platform == "gpu"
    """
    _run_on_gpu(script)


def _run_on_gpu(script):
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        cwd=cross_compile.ROOT,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )

"""Plans on the CPU: launches read and write addresses, kernels are what a test gives."""

import contextlib
import ctypes
import functools

import jax
import ml_dtypes
import numpy as np
import torch
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from kernels_pallas.specs.decode import Decode
from nsa_core.plan.kernels import SEQUENCES
from nsa_interop import dlpack
from nsa_torch import mosaic, operators, plans, triton
from nsa_torch.torch_ops import TorchOps
from tests import limits, pretend
from tests.torch_inputs import on_the_cpu as chunks_on_the_cpu

MODES = {
    "shared": operators.SHARED_KV,
    "apart": operators.SEPARATE_KV,
    "given": operators.PRECOMPRESSED,
}
PATHS = {"mosaic": mosaic.PATH, "triton": triton.PATH}
# Operators of kernels, by the kinds that they have as an argument.
KINDS = {
    x: operators.kind_of(x) for x in operators._kinds if x.split("/")[1] in ("mosaic", "triton")
}


def layout(config, kv_len, bounds=None):
    """The last arguments of an operator."""
    return operators.pack_layout(config, kv_len, bounds, None)


def described(
    mode,
    batch,
    length,
    *,
    heads,
    kv_heads,
    key_width,
    value_width,
    config,
    packed=False,
    sequences=SEQUENCES,
    dtype="bfloat16",
):
    """Arguments of an operator of all steps, without memory."""
    array = lambda *shape: Array((batch, *shape), dtype)
    compressed = length if mode.compresses else config.num_compressed(length)
    tokens = [
        array(count, kv_heads, width)
        for width in (key_width, value_width)
        for count in (compressed, length, length)
    ]
    tokens = [tokens[1], tokens[4]] if mode.shared else tokens
    borders = Array((sequences + 1,), "int32")
    place = layout(config, length, borders if packed else None)
    return (
        array(length, heads, key_width),
        *tokens,
        *([array(length, heads, 3)] if mode.joined else [array(length, heads)] * 3),
        None,
        False,
        *place,
    )


class Eager(TorchOps):
    """Every step at once, on kernels of either kind; none runs beside others."""

    has_streams = True

    def run_beside(self, kernel, *tensors):
        return self.run(kernel, *tensors), None

    def join(self, running):
        pass


def by_steps(ops=None):
    """Within: no plans; steps run on `ops`."""
    return plans.unplanned(ops or Eager())


def _write(place, found, kernel):
    """Puts an output in its place; the interpreter has NaN where a kernel wrote nothing."""
    found, spec = found.reshape(place.shape), kernel.spec
    of_some_rows = "before" in kernel.names or getattr(spec, "stored_rows", 0)
    if getattr(spec, "stays", False) or (kernel.in_place and of_some_rows):
        found = torch.where(found.isnan(), place, found)
    return place.copy_(found)


@functools.cache
def _jitted(kernel):
    return jax.jit(kernel.__call__)


def interpret(kernel, *tensors):
    """The outputs of a kernel in Pallas' interpreter. A step of decoding, which writes into its
    inputs, runs on emulated warps."""
    if isinstance(kernel.spec, Decode):
        return emulated(kernel, *tensors)
    arrays = [dlpack.to_jax(x.detach().clone()) for x in tensors]
    return [dlpack.to_torch(x, copy=True) for x in _jitted(kernel)(*arrays)]


def _array(x):
    """A tensor's memory in NumPy."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if x.dtype is torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return x.numpy()


def emulated(kernel, *tensors):
    """The outputs of a kernel on emulated warps."""
    found = kernel.call(*map(_array, tensors))
    half = lambda x: x.view(np.int16) if x.itemsize == 2 else x
    return [
        torch.from_numpy(half(np.asarray(x))).view(getattr(torch, wanted.dtype))
        for x, wanted in zip(found, kernel.outputs, strict=True)
    ]


def tensors_at(kernel, addresses):
    """Inputs and outputs of a kernel on the CPU, by the addresses of its launch."""
    found = []
    for address, array in zip(addresses, (*kernel.inputs, *kernel.outputs), strict=True):
        dtype = getattr(torch, array.dtype)
        memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address)
        found.append(torch.frombuffer(memory, dtype=dtype).view(array.shape))
    count = len(kernel.inputs)
    return found[:count], found[count:]


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Within: Mosaic kernels of torch run in Pallas' interpreter; gives those that ran."""
    with (
        on_the_cpu(monkeypatch, interpret) as ran,
        capability.interpreted(InterpretGPUParams()),
        chunks_on_the_cpu(monkeypatch),
    ):
        yield ran


@contextlib.contextmanager
def on_the_cpu(monkeypatch, run):
    """Within: calls on the CPU are decided once, as on a GPU, and kernels are `run`.

    Args:
      run: the outputs of a kernel for its input tensors.

    Yields:
      The kernels that ran, in order.
    """
    ran = []

    def launch(kernel, *tensors, out=()):
        """`nsa_interop.launch.launch`, as strict about what it is given."""
        for x, wanted in zip(tensors, kernel.inputs, strict=True):
            assert x.is_contiguous() and x.numel() == wanted.size
            assert str(x.dtype) == f"torch.{wanted.dtype}"
        ran.append(kernel)
        results = list(run(kernel, *tensors))
        if out:
            over = tensors[len(tensors) - kernel.in_place :]
            assert over and len(out) == len(results)
            for i, place in enumerate(over):
                assert out[i] is place
                results[i] = _write(place, results[i], kernel)
        return tuple(results)

    def launcher(kernel, device):
        def start(stream, addresses):
            assert stream == 0
            ran.append(kernel)
            inputs, outputs = tensors_at(kernel, addresses)
            for place, x in zip(outputs, run(kernel, *inputs), strict=True):
                _write(place, x, kernel)

        return start

    def sequence(kernels, arguments, device):
        starts = [launcher(kernel, device) for kernel in kernels]

        def start(stream, addresses):
            for each, numbers in zip(starts, arguments, strict=True):
                each(stream, [addresses[i] for i in numbers])

        return start

    gpu = {"launch": launch, "launch_triton": run, "launcher": launcher}
    pretend.machine(monkeypatch, **gpu, launch_sequence=sequence, current_stream=0)
    limits.set_limits(monkeypatch, alignment=16, planned_devices=("cpu",))
    limits.forget()
    yield ran
    limits.forget()

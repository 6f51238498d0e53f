"""Calls the CUDA driver through ctypes to load and launch kernels."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernels_pallas.runtime.cubin import Cubin

DRIVER = "libcuda.so.1"
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("number", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Function(NamedTuple):
    """Machine code that is loaded in the primary context of a device until the process ends."""

    handle: int
    context: int


@functools.cache
def library() -> ctypes.CDLL:
    """Return the driver library for calls that may block.

    Calls through this library release Python's global lock.

    Raises:
      RuntimeError: No driver is installed.
    """
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as error:
        raise RuntimeError(f"the CUDA driver is missing: {error}") from error


@functools.cache
def quick() -> ctypes.PyDLL:
    """Return the driver library for calls that return immediately.

    Calls through this library keep Python's global lock, since keeping it is cheaper than releasing
    it.
    """
    library()
    return ctypes.PyDLL(DRIVER)


def check(error: int, what: str) -> None:
    """Raise RuntimeError with the CUDA name and description of an error. 0 means no error."""
    if error:
        found = []
        for function in (library().cuGetErrorName, library().cuGetErrorString):
            text = ctypes.c_char_p()
            function(error, ctypes.byref(text))
            found.append(text.value.decode() if text.value else "unknown")
        raise RuntimeError(f"{what} failed with CUDA error {error}, {': '.join(found)}")


def call(name: str, *arguments: Any, of: str = "") -> None:
    """Call a function of the driver.

    Raises:
      RuntimeError: The call returned an error. The error message begins with the argument `of`,
        which names the kernels for which the driver is called.
    """
    check(getattr(library(), name)(*arguments), f"{of}{': ' if of else ''}{name}")


def load(cubin: Cubin, image: bytes, device: int) -> Function:
    """Load machine code into the primary context of a GPU, which the frameworks also use.

    Another thread may capture a CUDA graph while code is loaded.

    Loaded code stays loaded until the process ends, since CUDA graphs and queued launches may still
    refer to the code.

    Raises:
      RuntimeError: The driver reports an error. If the driver is older than the compiler of the
        kernel, the message has a remedy.
    """
    of = f"{cubin.name} on device {device}"
    module, function, context = (ctypes.c_void_p() for _ in range(3))
    number, release = ctypes.c_int(), ctypes.c_int()
    call("cuInit", 0, of=of)
    call("cuDeviceGet", ctypes.byref(number), device, of=of)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number, of=of)
    assert context.value
    with current(context.value, of), relaxed(of):
        try:
            call("cuModuleLoadData", ctypes.byref(module), image, of=of)
        except RuntimeError as error:
            call("cuDriverGetVersion", ctypes.byref(release))
            have = release.value // 1000, release.value % 1000 // 10
            ptxas = cubin.versions["ptxas"]
            if tuple(map(int, ptxas.split(".")[:2])) <= have:
                raise
            of = ".".join(map(str, have))
            raise RuntimeError(
                f"{error} (the driver supports CUDA {of}, but the kernel was compiled with CUDA "
                f"{ptxas}; update the driver, or build the kernels with CUDA {of} after "
                f"pip install 'native-sparse-attention[cuda{have[0]}]')"
            ) from error
        call("cuModuleGetFunction", ctypes.byref(function), module, cubin.entry.encode(), of=of)
        for attribute in cubin.attributes:
            call("cuFuncSetAttribute", function, *attribute, of=of)
        # Without this call, the driver may defer loading to the first launch, which a stream
        # may capture.
        if hasattr(library(), "cuFuncLoad"):  # the driver has this function since CUDA 12.4
            call("cuFuncLoad", function, of=of)
    assert function.value
    return Function(function.value, context.value)


@contextlib.contextmanager
def current(context: int, of: str = "") -> Iterator[None]:
    """Make a context current in this thread."""
    call("cuCtxPushCurrent_v2", ctypes.c_void_p(context), of=of)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()), of=of)


@contextlib.contextmanager
def relaxed(of: str) -> Iterator[None]:
    """Allow all calls of the driver in this thread while another thread captures a CUDA graph."""
    mode = ctypes.c_int(RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode), of=of)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode), of=of)

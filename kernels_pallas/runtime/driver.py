"""The calls of the CUDA driver that loading and launching takes, by ctypes."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernels_pallas.runtime.cubin import CLUSTER, Cubin

DRIVER = "libcuda.so.1"
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# What a driver says of machine code that a later ptxas made.
TOO_NEW = (
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("number", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


def cluster_attributes(cluster: int) -> ctypes.Array:
    """The attributes of a launch in clusters of so many neighbours; none for 1."""
    if cluster == 1:
        return (LaunchAttribute * 0)()
    value = (ctypes.c_uint * 16)(cluster, 1, 1)
    return (LaunchAttribute * 1)(LaunchAttribute(CLUSTER, 0, value))


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
    """Machine code in the primary context of a device, until the process ends."""

    handle: int
    context: int


@functools.cache
def library() -> ctypes.CDLL:
    """The driver, for calls that may take long: without Python's lock.

    Raises:
      RuntimeError: there is none.
    """
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as error:
        raise RuntimeError(f"the CUDA driver is missing: {error}") from error


@functools.cache
def quick() -> ctypes.PyDLL:
    """The driver, for calls that return at once: under Python's lock, which costs less."""
    library()
    return ctypes.PyDLL(DRIVER)


def words(error: int) -> str:
    """CUDA's name for an error, and its words."""
    found = []
    for function in (library().cuGetErrorName, library().cuGetErrorString):
        text = ctypes.c_char_p()
        function(error, ctypes.byref(text))
        found.append(text.value.decode() if text.value else "unknown")
    return f"CUDA error {error}, {found[0]}: {found[1]}"


def call(name: str, *arguments: Any, of: str = "") -> None:
    """Calls the driver.

    Raises:
      RuntimeError: it returned an error; `of` says what the call was for.
    """
    if error := getattr(library(), name)(*arguments):
        raise RuntimeError(f"{of}{': ' if of else ''}{name} failed with {words(error)}")


def load(cubin: Cubin, image: bytes, device: int) -> Function:
    """Loads machine code into the primary context of a GPU, which is the frameworks' too.

    What is loaded stays loaded until the process ends: CUDA graphs and queued launches refer to
    it, and nothing says when the last one is gone.

    Raises:
      RuntimeError: in the driver's words; where it is older than what compiled the kernel, with
        what to do.
    """
    of = f"{cubin.name} on device {device}"
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with loading(device, of) as context:
        try:
            call("cuModuleLoadData", ctypes.byref(module), image, of=of)
            entry = cubin.entry.encode()
            call("cuModuleGetFunction", ctypes.byref(function), module, entry, of=of)
            for number, value in ((x.number, x.value) for x in cubin.attributes):
                call("cuFuncSetAttribute", function, number, value, of=of)
            load_now(function, of)
        except RuntimeError as error:
            raise RuntimeError(f"{error}{_advice(str(error), cubin)}") from error
    assert function.value
    return Function(function.value, context)


@contextlib.contextmanager
def loading(device: int, of: str) -> Iterator[int]:
    """The primary context of a GPU, which is current within; code may be loaded there although
    another thread captures a CUDA graph. `of` says what is loaded.
    """
    number, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0, of=of)
    call("cuDeviceGet", ctypes.byref(number), device, of=of)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number, of=of)
    assert context.value
    with current(context.value, of), relaxed(of):
        yield context.value


@contextlib.contextmanager
def current(context: int, of: str = "") -> Iterator[None]:
    """Within: the current context."""
    call("cuCtxPushCurrent_v2", ctypes.c_void_p(context), of=of)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()), of=of)


@contextlib.contextmanager
def relaxed(of: str) -> Iterator[None]:
    """Within: no call of this thread disturbs a capture of another one."""
    mode = ctypes.c_int(RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode), of=of)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode), of=of)


@contextlib.contextmanager
def graph(of: str) -> Iterator[ctypes.c_void_p]:
    """A graph without nodes, destroyed at the end; for the current context."""
    found = ctypes.c_void_p()
    call("cuGraphCreate", ctypes.byref(found), 0, of=of)
    try:
        yield found
    finally:
        call("cuGraphDestroy", found, of=of)


def add_kernel(
    graph: ctypes.c_void_p,
    after: ctypes.c_void_p | None,
    node: KernelNode,
    attributes: ctypes.Array,
    of: str,
) -> ctypes.c_void_p:
    """Adds a launch to a graph, which copies its parameters; `after`: a node of it."""
    found, given = ctypes.c_void_p(), ctypes.byref(node)
    before = (ctypes.byref(after), ctypes.c_size_t(1)) if after else (None, ctypes.c_size_t(0))
    call("cuGraphAddKernelNode_v2", ctypes.byref(found), graph, *before, given, of=of)
    for each in attributes:
        value = ctypes.byref(each, LaunchAttribute.value.offset)
        call("cuGraphKernelNodeSetAttribute", found, each.number, value, of=of)
    return found


def executable(graph: ctypes.c_void_p, of: str) -> ctypes.c_void_p:
    """What `cuGraphLaunch` takes."""
    found, flags = ctypes.c_void_p(), ctypes.c_ulonglong(0)
    call("cuGraphInstantiateWithFlags", ctypes.byref(found), graph, flags, of=of)
    return found


def load_now(function: ctypes.c_void_p, of: str) -> None:
    """Loads a function that the driver may put off loading until its first launch, which may be
    in a capture.
    """
    if hasattr(library(), "cuFuncLoad"):  # since CUDA 12.4
        call("cuFuncLoad", function, of=of)


def version() -> tuple[int, int]:
    """Of the CUDA that the driver is for."""
    found = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(found))
    return found.value // 1000, found.value % 1000 // 10


def _advice(error: str, cubin: Cubin) -> str:
    """What to do where the driver is older than the ptxas that made a cubin; else nothing."""
    compiler = cubin.versions.get("ptxas", "")
    numbers = tuple(int(x) for x in compiler.split(".")[:2] if x.isdecimal())
    if numbers <= version() or not any(name in error for name in TOO_NEW):
        return ""
    of, needed = ".".join(map(str, version())), ".".join(map(str, numbers))
    return (
        f" (the driver is for CUDA {of}, the kernel was compiled by that of CUDA {needed}: "
        f"update the driver, or build the kernels with the compiler of CUDA {of}: "
        f"pip install 'native-sparse-attention[cuda{version()[0]}]')"
    )

"""A child process that compiles kernels to machine code.

In the child process, a library called the recorder replaces the CUDA driver.

`build.py` starts the child process with the names of the modules that may describe kernels. For
each kernel the child reads one line of JSON and writes one line of JSON as a reply. Mosaic does not
return the launch parameters of a kernel. To find the launch parameters, the child runs the launcher
of JAX's CUDA plugin with addresses that identify the arguments. The recorder logs the launcher's
calls of the driver.
"""

import base64
import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
from packaging.version import Version

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.runtime import cubin, description, lowering
from kernels_pallas.runtime.build import PLUGINS

ARGUMENT = 1 << 32  # difference between the addresses that identify two arguments
FIRST = 0x7F00 * ARGUMENT
PARAMETER_INFO = 0x17  # EIATTR_KPARAM_INFO
NO_BITS = 8  # SHT_NOBITS: a section without content
# version of jaxlib from which launchers also accept kernel and device
DEVICE_SINCE = Version("0.12.0.dev0")


class Compiled(NamedTuple):
    """The results of the compiler in JAX's CUDA plugin.

    Attributes:
      start: The launcher, a function of a stream and of an array of addresses.
      layout: Size of each parameter in bytes.
      log: The output of the compiler, including the statistics of ptxas.
    """

    start: Callable[[int, Any], None]
    image: bytes
    entry: str
    attributes: tuple[tuple[int, int], ...]
    layout: list[int]
    log: str


@functools.cache
def recorder() -> ctypes.CDLL:
    """Return the library that records calls of the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.recorder_log.restype = ctypes.c_char_p
    return driver


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Make the recorder's primary context current."""
    context = ctypes.c_void_p()
    recorder().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    recorder().cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        recorder().cuCtxPopCurrent_v2(ctypes.byref(context))


def recorded(call: str) -> list[dict[str, Any]]:
    """Return the calls of the driver function `call` that were recorded since `recorder_clear`."""
    lines = map(json.loads, recorder().recorder_log().splitlines())
    return [line for line in lines if line["call"] == call]


def build(kernel: Kernel) -> tuple[cubin.Cubin, bytes]:
    """Build the machine code of `kernel` for Hopper. The machine code consists of the launch
    parameters and the image.

    Raises:
      ValueError: The same as in `lowering.lower`.
      RuntimeError: JAX's CUDA plugin could not compile the kernel, or launches the kernel in an
        unknown way. If compilation failed, the error has the message of ptxas.
    """
    compiled = compile_kernel(kernel)
    sizes = tuple(kernel.sizes) if kernel.any_length else ()
    arguments = [*kernel.inputs, *kernel.outputs]
    launched = launch(compiled, [FIRST + i * ARGUMENT for i in range(len(arguments))])
    clusters = [[cubin.CLUSTER, kernel.cluster, 1, 1]] if kernel.cluster > 1 else []
    grid = [*reversed(kernel.grid), 1, 1, 1][:3] if kernel.grid else launched["grid"]
    if (launched["attributes"], launched["grid"]) != (clusters, grid):
        raise RuntimeError(
            f"{kernel.name} must launch clusters {clusters} on the grid {grid}, got {launched}"
        )

    def argument(address: int) -> int:
        index, rest = divmod(address - FIRST, ARGUMENT)
        if rest or not 0 <= index < len(arguments):
            raise RuntimeError(
                f"{kernel.name} must launch with addresses of its arguments, got {address:#x}"
            )
        return index

    def parameter(packed: bytes) -> Any:
        if len(packed) < cubin.MAP_BYTES:
            i = argument(int.from_bytes(packed, "little"))
            return sizes[i] if i < len(sizes) else i - len(sizes)
        found = []
        for each in unpacked(packed):
            i = argument(each.base)
            found.append(_tensor_map(each, i - len(sizes), arguments[i]))
        return tuple(found)

    built = cubin.Cubin(
        name=kernel.name,
        entry=compiled.entry,
        block=tuple(launched["block"]),
        cluster=kernel.cluster,
        shared_bytes=launched["shared_bytes"],
        attributes=compiled.attributes,
        parameters=tuple(parameter(bytes.fromhex(x)) for x in launched["parameters"]),
        **_figures(kernel.name, compiled.log),
        versions=versions(),
    )
    return built, compiled.image


def compile_kernel(kernel: Kernel) -> Compiled:
    """Compile `kernel`. This function does not run the launcher."""
    code = lowering.lower(kernel)
    for name in PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):
            path = importlib.import_module(name)._get_library_path()
            break
    else:
        raise RuntimeError("JAX's CUDA plugin is missing: pip install 'jax[cuda13]'")
    compiler = ctypes.CDLL(str(path)).MosaicGpuCompile
    compiler.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compiler.restype = ctypes.POINTER(ctypes.c_void_p)
    recorder().recorder_clear()
    with tempfile.TemporaryFile() as file:
        with _context(), _printing_to(file):
            compiled = compiler(code, len(code))
        file.seek(0)
        log = file.read().decode(errors="replace")
    if not compiled:
        raise RuntimeError(f"JAX's CUDA plugin could not compile {kernel.name}:\n{log}")
    (module,) = recorded("cuModuleLoadData")
    image = ctypes.string_at(module["image"], module["bytes"])
    (function,) = recorded("cuModuleGetFunction")
    attributes = [(x["attribute"], x["value"]) for x in recorded("cuFuncSetAttribute")]
    entry = function["name"]
    start = launcher(compiled)
    return Compiled(start, image, entry, tuple(attributes), _layout(image, entry), log)


def launcher(compiled: Any) -> Callable[[int, Any], None]:
    """Return the launcher in the compiler's result. The launcher is a function of a stream and
    an array of addresses.
    """
    function, address = compiled[0], compiled[1]
    pointer = ctypes.c_void_p
    if Version(importlib.metadata.version("jaxlib")) < DEVICE_SINCE:
        start = ctypes.CFUNCTYPE(None, *[pointer] * 3)(address)
        return lambda stream, addresses: start(function, stream, addresses)
    start, kernel = ctypes.CFUNCTYPE(None, *[pointer] * 4, ctypes.c_int)(address), compiled[2]
    return lambda stream, addresses: start(kernel, function, stream, addresses, 0)


def launch(compiled: Compiled, addresses: Sequence[int], stream: int = 0) -> dict[str, Any]:
    """Run the launcher of JAX's CUDA plugin with the given addresses of inputs and outputs.

    Return the launch that the recorder logs. The launch has the numbers that `cuLaunchKernelEx`
    receives, with parameters in hexadecimal digits.
    """
    expect(compiled.layout)
    recorder().recorder_clear()
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    with _context():
        compiled.start(stream, pointers)
    (found,) = recorded("cuLaunchKernelEx")
    return found


def expect(layout: Sequence[int]) -> None:
    """Pass the sizes of the parameters of the next launches, in bytes, to the recorder."""
    recorder().recorder_expect(len(layout), (ctypes.c_int * len(layout))(*layout))


class Map(NamedTuple):
    """A tensor map in the format in which the recorder packs it."""

    base: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    enums: tuple[int, ...]


def unpacked(packed: bytes) -> Iterator[Map]:
    """Return the tensor maps that a parameter of a kernel contains."""
    for start in range(0, len(packed), cubin.MAP_BYTES):
        base, *rest = struct.unpack_from("<10Q5H11B", packed, start)
        kind, rank, *others = rest[19:]
        dims, strides = tuple(rest[:rank]), tuple(rest[5 : 4 + rank])
        box, steps = tuple(rest[9 : 9 + rank]), tuple(rest[14 : 14 + rank])
        yield Map(base, dims, strides, box, steps, (kind, *others))


def _tensor_map(found: Map, index: int, array: Array) -> cubin.TensorMap:
    """Convert a recorded tensor map of `array`, which is argument `index`. For each dimension,
    the returned tensor map names the axis of `array`.
    """
    item_bytes = jnp.dtype(array.dtype).itemsize
    strides = cubin.byte_strides(array.shape, item_bytes)
    axes = []
    for dim in zip(found.dims, (item_bytes, *found.strides), strict=True):
        # The last of the matching axes. All matching axes, and the axes between them, have size
        # 1.
        alike = [
            axis
            for axis in range(len(array.shape))
            if (array.shape[axis], strides[axis]) == dim and axis not in axes
        ]
        if not alike:
            raise RuntimeError(f"the dimensions of {found} must be axes of {array}")
        axes.append(alike[-1])
    if any(array.shape[i] > 1 for i in range(len(array.shape)) if i not in axes):
        raise RuntimeError(
            f"the tensor map {found} lacks an axis of {array} that is longer than 1"
        )
    return cubin.TensorMap(index, item_bytes, tuple(axes), found.enums, found.box, found.steps)


def _figures(name: str, log: str) -> dict[str, Any]:
    """Return the statistics in a log of ptxas: the maximum number of registers over a kernel's
    functions, the sums of stack and spill bytes, and the remarks.

    Raises:
      RuntimeError: The log has no statistics, or statistics of a GPU other than Hopper.
    """
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    registers = re.findall(r"Used (\d+) registers", log)
    if f"for '{cubin.ARCHITECTURE}'" not in log or not frames or not registers:
        raise RuntimeError(f"ptxas did not compile {name} for {cubin.ARCHITECTURE}:\n{log}")
    stack, stores, loads = (sum(map(int, numbers)) for numbers in zip(*frames, strict=True))
    remarks = re.findall(r"ptxas warning.*|.*Potential Performance Loss.*", log)
    return {
        "registers": max(map(int, registers)),
        "stack_bytes": stack,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "remarks": tuple(remarks),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of JAX and ptxas."""
    printed = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release ([\d.]+)", printed.stdout)
    assert release, printed.stdout
    return {"jax": importlib.metadata.version("jax"), "ptxas": release[1]}


def _layout(image: bytes, entry: str) -> list[int]:
    """Return the size in bytes of each parameter of the function, from `.nv.info.<entry>` of
    the ELF image.
    """
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    heads = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    strings = image[heads[names][4] :]
    wanted = f".nv.info.{entry}\0".encode()
    (info,) = (
        image[offset : offset + size]
        for name, kind, _, _, offset, size in heads
        if kind != NO_BITS and strings[name:].startswith(wanted)
    )
    at, found = 0, {}
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if attribute == PARAMETER_INFO:
            _, ordinal, _, flags = struct.unpack_from("<IHHI", info, at + 4)
            found[ordinal] = flags >> 18
        at += 4 + (value if form == 4 else 0)
    return [found[i] for i in sorted(found)]


@contextlib.contextmanager
def _printing_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect the output of C code to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        built, image = build(description.kernel_of(request))
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}
    return {"cubin": built._asdict(), "image": base64.b64encode(image).decode()}


if __name__ == "__main__":
    description.PLACES[:] = sys.argv[1:]
    # Only replies go to stdout; all other output goes to stderr.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(_reply(json.loads(line))), file=out, flush=True)

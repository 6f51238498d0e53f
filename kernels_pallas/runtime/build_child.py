"""A process that makes machine code of kernels, with the recorder as its CUDA driver.

`build` starts it, and names the places of the kernels that it may be asked for. It reads a line of
JSON for each kernel and writes one for each reply. What a launch must know is not asked of Mosaic:
the plugin's launcher runs with an address for each argument that tells whose it is, and the
recorder writes down what it does.
"""

import base64
import contextlib
import ctypes
import functools
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

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.runtime import cubin, description, lowering, plugin

DRIVER = "libcuda.so.1"
ARGUMENT = 1 << 32  # distance of the addresses that tell arguments apart
FIRST = 0x7F00 * ARGUMENT
PARAMETER_INFO = 0x17  # EIATTR_KPARAM_INFO
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")


class Map(NamedTuple):
    """A tensor map as the recorder packs it."""

    base: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    type: int
    interleave: int
    swizzle: int
    l2: int
    oob: int

    @classmethod
    def unpack(cls, packed: bytes) -> "Map":
        base, *rest = struct.unpack_from("<10Q5H11B", packed)
        kind, rank, interleave, swizzle, l2, oob = rest[19:]
        return cls(
            base,
            dims=tuple(rest[:rank]),
            strides=tuple(rest[5 : 4 + rank]),
            box=tuple(rest[9 : 9 + rank]),
            steps=tuple(rest[14 : 14 + rank]),
            type=kind,
            interleave=interleave,
            swizzle=swizzle,
            l2=l2,
            oob=oob,
        )


class Launched(NamedTuple):
    """A launch as the recorder writes it down; its numbers as `cuLaunchKernelEx` gets them.

    `attributes`: of the launch, each its number and the first three of its values.
    """

    function: int
    stream: int
    context: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    attributes: tuple[tuple[int, int, int, int], ...]
    parameters: tuple[bytes, ...]


class Compiled(NamedTuple):
    """What the plugin's compiler gave, and what it told the driver.

    `layout`: offset and bytes of each parameter. `log`: what it printed, with ptxas' figures.
    `start`: the launcher, a function of the stream and of an array of addresses.
    """

    start: Callable[[int, Any], None]
    image: bytes
    entry: str
    attributes: tuple[cubin.Attribute, ...]
    layout: tuple[tuple[int, int], ...]
    log: str


@functools.cache
def recorder() -> ctypes.CDLL:
    """The recorder.

    Raises:
      RuntimeError: the CUDA driver of this process is another one.
    """
    driver = ctypes.CDLL(DRIVER)
    if not hasattr(driver, "recorder_log"):
        raise RuntimeError("kernels are built by `build.build` in a process of its own")
    driver.recorder_log.restype = ctypes.c_char_p
    return driver


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """The recorder's primary context is the current one."""
    context = ctypes.c_void_p()
    recorder().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    recorder().cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        recorder().cuCtxPopCurrent_v2(ctypes.byref(context))


def recorded() -> list[dict[str, Any]]:
    """What the driver was told since it was last asked; images are bytes."""
    lines = [json.loads(line) for line in recorder().recorder_log().splitlines()]
    for line in lines:
        if "image" in line:
            line["image"] = ctypes.string_at(line["image"], line["bytes"])
    recorder().recorder_clear()
    return lines


def build(kernel: Kernel) -> tuple[cubin.Cubin, bytes]:
    """Machine code of `kernel` for Hopper: what a launch must know of it, and the image.

    Raises:
      ValueError: what `lowering.lower` raises.
      RuntimeError: the plugin could not compile it, in the words of ptxas, or launches it in a
        way that is not known here.
    """
    compiled = compile_kernel(kernel)
    addresses = [FIRST + i * ARGUMENT for i in range(len(kernel.inputs) + len(kernel.outputs))]
    launched = launch(compiled, addresses)
    try:
        return _cubin(kernel, compiled, launched), compiled.image
    except ValueError as error:
        raise RuntimeError(f"{kernel.name} is launched in an unknown way: {error}") from error


def compile_kernel(kernel: Kernel) -> Compiled:
    """As `build`, before the launcher ran."""
    code, compiler = lowering.lower(kernel), plugin.compiler()
    recorder().recorder_clear()
    with tempfile.TemporaryFile() as file:
        with _context(), _printing_to(file):
            compiled = compiler(code, len(code))
        file.seek(0)
        log = file.read().decode(errors="replace")
    if not compiled:
        raise RuntimeError(f"JAX's CUDA plugin could not compile {kernel.name}:\n{log}")
    calls = recorded()
    (image,) = (x["image"] for x in calls if x["call"] == "cuModuleLoadData")
    (entry,) = (x["name"] for x in calls if x["call"] == "cuModuleGetFunction")
    attributes = tuple(
        cubin.Attribute(x["attribute"], x["value"])
        for x in calls
        if x["call"] == "cuFuncSetAttribute"
    )
    layout = tuple(_layout(image, entry))
    start = plugin.launcher(compiled, 0)
    return Compiled(start, image, entry, attributes, layout, log)


def launch(compiled: Compiled, addresses: Sequence[int], stream: int = 0) -> Launched:
    """What the plugin's launcher does with these addresses of inputs and outputs."""
    expect(compiled.layout)
    recorder().recorder_clear()
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    with _context():
        compiled.start(stream, pointers)
    (found,) = launches()
    return found


def expect(layout: Sequence[tuple[int, int]]) -> None:
    """Tells the recorder the parameters, offset and bytes, of the launches to come."""
    bytes_ = [size for _, size in layout]
    recorder().recorder_expect(len(bytes_), (ctypes.c_int * len(bytes_))(*bytes_))


def launches() -> list[Launched]:
    """Those among `recorded`."""
    found = []
    for line in recorded():
        if line.pop("call") == "cuLaunchKernelEx":
            line["parameters"] = map(bytes.fromhex, line["parameters"])
            line["attributes"] = map(tuple, line["attributes"])
            for name in ("grid", "block", "attributes", "parameters"):
                line[name] = tuple(line[name])
            found.append(Launched(**line))
    return found


def _cubin(kernel: Kernel, compiled: Compiled, launched: Launched) -> cubin.Cubin:
    sizes = tuple(kernel.sizes) if kernel.any_length else ()
    arguments = [*kernel.inputs, *kernel.outputs]
    clusters = ((cubin.CLUSTER, kernel.cluster, 1, 1),) if kernel.cluster > 1 else ()
    if launched.attributes != clusters:
        expected = f"those of a cluster of {kernel.cluster}"
        raise ValueError(
            f"its launch has attributes {launched.attributes}, expected {expected}"
        )
    grid = (*reversed(kernel.grid), 1, 1, 1)[:3]
    if kernel.grid and grid != launched.grid:
        raise ValueError(f"its grid must be {grid}, by its description, got {launched.grid}")

    def argument(address: int) -> int:
        index, rest = divmod(address - FIRST, ARGUMENT)
        if rest or not 0 <= index < len(arguments):
            raise ValueError(f"{address:#x} must be the address of an argument")
        return index - len(sizes)

    def parameter(offset: int, packed: bytes) -> cubin.Parameter:
        if len(packed) == cubin.POINTER_BYTES:
            i = argument(int.from_bytes(packed, "little"))
            value = cubin.Pointer(i) if i >= 0 else cubin.Size(sizes[i + len(sizes)])
        else:
            maps = [
                Map.unpack(packed[i : i + cubin.MAP_BYTES])
                for i in range(0, len(packed), cubin.MAP_BYTES)
            ]
            found = [
                _tensor_map(x, argument(x.base), arguments[argument(x.base) + len(sizes)])
                for x in maps
            ]
            value = cubin.TensorMaps(tuple(found))
        return cubin.Parameter(offset, len(packed), value)

    both = zip(compiled.layout, launched.parameters, strict=True)
    return cubin.Cubin(
        name=kernel.name,
        entry=compiled.entry,
        block=launched.block,
        cluster=kernel.cluster,
        shared_bytes=launched.shared_bytes,
        attributes=compiled.attributes,
        parameters=tuple(parameter(offset, packed) for (offset, _), packed in both),
        arguments=tuple(cubin.Argument(len(x.shape), x.dtype) for x in arguments[len(sizes) :]),
        **_figures(kernel.name, compiled.log),
        versions=versions(),
    )


def _tensor_map(found: Map, index: int, array: Array) -> cubin.TensorMap:
    """A recorded map with the axis of `array`, argument `index`, that each dimension is."""
    strides = cubin.byte_strides(array.shape, array.dtype)
    axes = []
    for dim, stride in zip(
        found.dims, (cubin.ITEM_BYTES[array.dtype], *found.strides), strict=True
    ):
        # The last of those that look alike: they have size 1, and so has what is between.
        last = (
            axis
            for axis in reversed(range(len(array.shape)))
            if (array.shape[axis], strides[axis]) == (dim, stride) and axis not in axes
        )
        axis = next(last, None)
        if axis is None:
            raise ValueError(f"{found} must have dimensions that are axes of {array}")
        axes.append(axis)
    if any(array.shape[i] > 1 for i in range(len(array.shape)) if i not in axes):
        raise ValueError(f"{found} must have all axes of {array} that are longer than 1")
    rest = found.type, found.interleave, found.swizzle, found.l2, found.oob
    return cubin.TensorMap(index, tuple(axes), *rest, found.box, found.steps)


def _figures(name: str, log: str) -> dict[str, Any]:
    """The figures in a log of ptxas, summed where a kernel has functions of its own.

    Raises:
      RuntimeError: they are not for Hopper, or not there.
    """
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    registers = re.findall(r"Used (\d+) registers", log)
    if f"for '{cubin.Cubin.ARCHITECTURE}'" not in log or not frames or not registers:
        raise RuntimeError(
            f"ptxas did not compile {name} for {cubin.Cubin.ARCHITECTURE}:\n{log}"
        )
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
    """Of what makes machine code."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    said = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release ([\d.]+)", said.stdout)
    return found | {"ptxas": release[1] if release else said.stdout.strip()}


def _layout(image: bytes, entry: str) -> list[tuple[int, int]]:
    """Offset and bytes of the function's parameters, as the image's `.nv.info.<entry>` says."""
    info, at, found = _sections(image)[f".nv.info.{entry}"], 0, {}
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if attribute == PARAMETER_INFO:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", info, at + 4)
            found[ordinal] = offset, flags >> 18
        at += 4 + (value if form == 4 else 0)
    return [found[i] for i in sorted(found)]


def _sections(image: bytes) -> dict[str, bytes]:
    """The sections of an ELF image by name, those without content left out."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    heads = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    strings = heads[names][4]

    def name(head: tuple[int, ...]) -> str:
        begin = strings + head[0]
        return image[begin : image.index(b"\0", begin)].decode()

    without = 8  # SHT_NOBITS
    return {name(h): image[h[4] : h[4] + h[5]] for h in heads if h[1] != without}


@contextlib.contextmanager
def _printing_to(file: IO[bytes]) -> Iterator[None]:
    """Sends what C code prints to a file."""
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
        kernel = description.described(request["description"])
        arguments = [[list(x.shape), x.dtype] for x in (*kernel.inputs, *kernel.outputs)]
        if arguments != request["arguments"]:
            raise ValueError(
                f"{kernel.source or 'source'} must describe the same kernel here, with "
                f"{request['arguments']}, got {arguments}"
            )
        built, image = build(kernel)
    except Exception as error:
        expected = isinstance(error, RuntimeError | ValueError)
        return {"error": str(error) if expected else traceback.format_exc()}
    return {"cubin": built.to_json(), "image": base64.b64encode(image).decode()}


def _main() -> None:
    description.PLACES[:] = sys.argv[1:]
    # Replies have the way out for themselves; what else is printed goes where errors go.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(_reply(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    _main()

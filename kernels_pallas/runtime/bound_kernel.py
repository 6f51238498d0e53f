"""A kernel bound to the sizes of a problem: what is left to a launch is the addresses.

`BoundKernel.of` works out all that no address changes. The first launch with certain addresses
encodes their tensor maps and lays the parameters out; as allocators give the same addresses
again and again, the next ones find all that and are a call of the driver.
"""

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from kernels_pallas.kernel import ALIGNMENT
from kernels_pallas.runtime import driver
from kernels_pallas.runtime.cubin import (
    MAP_BYTES,
    POINTER_BYTES,
    Cubin,
    Pointer,
    Size,
    TensorMap,
    TensorMaps,
    byte_strides,
)

MAP_ALIGNMENT = 64
MAX_RANK = 5
LONGEST_DIM = 1 << 32
LARGEST_STRIDE = 1 << 40  # bytes, exclusive
STRIDE_MULTIPLE = 16
LARGEST_GRID = ((1 << 31) - 1, 65535, 65535)
REMEMBERED = 256  # launches of a kernel that differ in stream or addresses


_Dims = ctypes.c_uint64 * MAX_RANK
_Boxes = ctypes.c_uint32 * MAX_RANK


@functools.cache
def _boxes(sizes: tuple[int, ...]) -> ctypes.Array:
    """In the driver's terms; never written."""
    return _Boxes(*sizes)


class _Map(NamedTuple):
    """A tensor map as the driver takes it: where it goes, then what stands before its address,
    and after.
    """

    offset: int  # in the parameters' memory
    argument: int
    head: tuple[Any, ...]  # type, rank
    tail: tuple[Any, ...]  # dims, strides, box, steps, interleave, swizzle, l2, oob


class _Layout(NamedTuple):
    """Where the parameters lie in memory of their own, and what they hold; but for the maps in
    words of 8 bytes.
    """

    offsets: tuple[int, ...]
    pointers: tuple[tuple[int, int], ...]  # word, argument
    numbers: tuple[tuple[int, int], ...]  # word, value
    maps: tuple[_Map, ...]
    # Types: the memory with room to align it, its words, the places of the parameters.
    memory: type[ctypes.Array]
    words: type[ctypes.Array]
    places: type[ctypes.Array]


class _Bound(NamedTuple):
    """What `cuLaunchKernelEx` takes: a pointer to `launch`, and `parameters`; the others are
    memory that these refer to.
    """

    config: Any
    parameters: Any
    launch: driver.LaunchConfig
    attributes: ctypes.Array
    memory: ctypes.Array


class BoundKernel:
    """A loaded kernel with the sizes of a problem; any thread may launch it."""

    def __init__(
        self,
        cubin: Cubin,
        function: driver.Function,
        layout: _Layout,
        sizes: Mapping[str, int],
        grid: Sequence[int],
    ):
        """By `of`."""
        self.cubin, self.sizes, self.grid = cubin, dict(sizes), _cuda_grid(cubin, grid)
        self._layout = layout
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._lock = threading.Lock()
        quick = driver.quick()
        self._encode, self._start = (
            quick.cuTensorMapEncodeTiled,
            driver.library().cuLaunchKernelEx,
        )
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self.context = function.context
        self._context = ctypes.c_void_p(function.context)
        self._handle = ctypes.c_void_p(function.handle)
        self._popped = ctypes.byref(ctypes.c_void_p())

    @classmethod
    def of(
        cls,
        cubin: Cubin,
        function: driver.Function,
        shapes: Sequence[Sequence[int]],
        sizes: Mapping[str, int],
        grid: Sequence[int],
    ) -> Self:
        """The kernel for a problem.

        Args:
          cubin: of the kernel.
          function: where it is loaded.
          shapes: of all inputs and outputs, contiguous.
          sizes: as `Kernel.sizes`; those that the cubin does not ask for do not count.
          grid: as `Kernel.grid`.

        Raises:
          ValueError: the shapes, the sizes or the grid are not the kernel's, or beyond what
            CUDA can do.
        """
        return cls(cubin, function, _lay_out(cubin, shapes, sizes), sizes, grid)

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Queues one run.

        Args:
          stream: a CUstream of the device; 0 for the default one.
          addresses: of the inputs and outputs, multiples of 256 bytes.

        Raises:
          ValueError: the number of addresses, or one of them, is not as described.
          RuntimeError: in the driver's words.
        """
        key = (stream, *addresses)
        # A thread that has not called the CUDA runtime yet has no context, which tensor maps
        # need too, and another device may be current.
        if error := self._push(self._context):
            self._fail("cuCtxPushCurrent", error)
        try:
            bound = self._bound.get(key) or self._remembered(key)
            error = self._start(bound.config, self._handle, bound.parameters, None)
        finally:
            self._pop(self._popped)
        if error:
            self._fail("cuLaunchKernelEx", error)

    def add_to(
        self,
        graph: ctypes.c_void_p,
        after: ctypes.c_void_p | None,
        addresses: Sequence[int],
    ) -> ctypes.c_void_p:
        """Adds a run to a graph of the current context, which must be the kernel's; the node.

        Args:
          after: a node that ends before it begins.
          addresses: as of `launch`.

        Raises:
          as `launch`.
        """
        bound = self._bind((0, *addresses))
        launch, parameters = bound.launch, ctypes.cast(bound.parameters, ctypes.c_void_p)
        node = driver.KernelNode(
            self._handle.value, launch.grid, launch.block, launch.shared_bytes, parameters
        )
        return driver.add_kernel(graph, after, node, bound.attributes, self.cubin.name)

    def _remembered(self, key: tuple[int, ...]) -> _Bound:
        """`_bind`, for the next launches too."""
        bound = self._bind(key)
        with self._lock:
            if len(self._bound) >= REMEMBERED:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = bound
        return bound

    def _bind(self, key: tuple[int, ...]) -> _Bound:
        """Lays the parameters out for a stream and addresses."""
        stream, *addresses = key
        name, count = self.cubin.name, len(self.cubin.arguments)
        if len(addresses) != count:
            raise ValueError(f"{name} must get {count} addresses, got {len(addresses)}")
        for i, address in enumerate(addresses):
            if address % ALIGNMENT:
                raise ValueError(
                    f"argument {i} of {name} must start at a multiple of {ALIGNMENT} "
                    f"bytes, got {address:#x}"
                )
        layout = self._layout
        memory = layout.memory()
        start = ctypes.addressof(memory)
        start += -start % MAP_ALIGNMENT
        words = layout.words.from_address(start)
        for word, value in layout.numbers:
            words[word] = value
        for word, argument in layout.pointers:
            words[word] = addresses[argument]
        encode, address = self._encode, ctypes.c_void_p
        for offset, argument, head, tail in layout.maps:
            place, base = address(start + offset), address(addresses[argument])
            if error := encode(place, *head, base, *tail):
                self._fail(f"cuTensorMapEncodeTiled of argument {argument}", error)
        places = layout.places(*[start + offset for offset in layout.offsets])
        attributes = driver.cluster_attributes(self.cubin.cluster)
        config = driver.LaunchConfig(
            self.grid,
            self.cubin.block,
            self.cubin.shared_bytes,
            stream,
            ctypes.cast(attributes, ctypes.c_void_p) if attributes else None,
            len(attributes),
        )
        return _Bound(ctypes.byref(config), places, config, attributes, memory)

    def _fail(self, name: str, error: int) -> None:
        of = f" of {self.sizes}" if self.sizes else ""
        raise RuntimeError(f"{self.cubin.name}{of}: {name} failed with {driver.words(error)}")


def _lay_out(
    cubin: Cubin, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]
) -> _Layout:
    name, arguments = cubin.name, cubin.arguments
    ranks = [x.rank for x in arguments]
    if [len(shape) for shape in shapes] != ranks:
        raise ValueError(f"{name} must have arguments of ranks {ranks}, got shapes {shapes}")
    offsets, pointers, numbers, maps, end = [], [], [], [], 0
    for parameter in cubin.parameters:
        value = parameter.value
        alignment = MAP_ALIGNMENT if isinstance(value, TensorMaps) else POINTER_BYTES
        offset = -(-end // alignment) * alignment
        end = offset + parameter.bytes
        offsets.append(offset)
        if isinstance(value, Pointer):
            pointers.append((offset // POINTER_BYTES, value.argument))
        elif isinstance(value, Size):
            numbers.append((offset // POINTER_BYTES, _carried(name, value.name, sizes)))
        else:
            for i, found in enumerate(value.maps):
                shape, dtype = shapes[found.argument], arguments[found.argument].dtype
                maps.append(_map(name, found, offset + i * MAP_BYTES, tuple(shape), dtype))
    return _Layout(
        tuple(offsets),
        tuple(pointers),
        tuple(numbers),
        tuple(maps),
        ctypes.c_char * (end + MAP_ALIGNMENT),
        ctypes.c_uint64 * (end // POINTER_BYTES),
        ctypes.c_void_p * len(offsets),
    )


def _cuda_grid(cubin: Cubin, grid: Sequence[int]) -> tuple[int, int, int]:
    name = cubin.name
    x, y, z = (*reversed(grid), 1, 1, 1)[:3]
    within = all(1 <= n <= most for n, most in zip((x, y, z), LARGEST_GRID, strict=True))
    if not within or not 1 <= len(grid) <= 3:
        raise ValueError(
            f"the grid of {name}, reversed, must be within 1 and {LARGEST_GRID}, got {(x, y, z)}"
        )
    if x % cubin.cluster:
        raise ValueError(f"the last axis of {name}'s grid must be clusters, got {grid}")
    return x, y, z


def _carried(name: str, size: str, sizes: Mapping[str, int]) -> int:
    """A size in place of an address, of which the lowest 8 bits are zero."""
    if size not in sizes:
        raise ValueError(f"{name} must have the size {size}, got {dict(sizes)}")
    value = sizes[size]
    if not 0 <= value < 1 << 31:
        raise ValueError(f"the size {size} of {name} must be 0 to {2**31 - 1}, got {value}")
    return value << 8


def _map(name: str, found: TensorMap, offset: int, shape: tuple[int, ...], dtype: str) -> _Map:
    """A tensor map for an actual shape."""
    where = f"argument {found.argument} of {name}"
    axes = found.axes
    if len(axes) < len(shape) and any(
        size != 1 for axis, size in enumerate(shape) if axis not in axes
    ):
        raise ValueError(f"{where} must have size 1 but on axes {axes}, got {shape}")
    strides = byte_strides(shape, dtype)
    dims = [shape[axis] for axis in axes]
    steps = [strides[axis] for axis in axes[1:]]
    if min(dims) < 1 or max(dims) > LONGEST_DIM:
        raise ValueError(
            f"{where} must have axes of 1 to {LONGEST_DIM} elements, a limit of CUDA's tensor "
            f"maps, got {shape}"
        )
    if any(step % STRIDE_MULTIPLE or step >= LARGEST_STRIDE for step in steps):
        raise ValueError(
            f"{where} must have strides below {LARGEST_STRIDE} bytes that are multiples of "
            f"{STRIDE_MULTIPLE}, a limit of CUDA's tensor maps, got {steps} of {shape}"
        )
    arrays = _Dims(*dims), _Dims(*steps), _boxes(found.box), _boxes(found.steps)
    tail = *arrays, found.interleave, found.swizzle, found.l2, found.oob
    return _Map(offset, found.argument, (found.type, len(dims)), tail)

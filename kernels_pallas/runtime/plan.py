"""A kernel bound to the sizes of a problem: what is left to a launch is the addresses.

`LaunchPlan.of` works out all that no address changes. The first launch with certain addresses
encodes their tensor maps and lays the parameters out; as allocators give the same addresses
again and again, the next ones find all that and are a call of the driver.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kernels_pallas.runtime import driver
from kernels_pallas.runtime.cubin import (
    MAP_BYTES,
    Cubin,
    Pointer,
    Size,
    TensorMap,
    TensorMaps,
    byte_strides,
)

# Mosaic compiles every pointer as a multiple of it.
ALIGNMENT = 256
MAP_ALIGNMENT = 64
LONGEST_DIM = 1 << 32
LARGEST_STRIDE = 1 << 40  # bytes, exclusive
STRIDE_MULTIPLE = 16
LARGEST_GRID = ((1 << 31) - 1, 65535, 65535)
REMEMBERED = 256  # launches of a plan that differ in stream or addresses


class _Map(NamedTuple):
    """A tensor map without its address, as the driver takes it."""

    argument: int
    offset: int  # in the parameters' memory
    head: tuple[int, int]  # type, rank
    arrays: tuple[ctypes.Array, ...]  # dims, strides, box, steps
    tail: tuple[int, int, int, int]  # interleave, swizzle, l2, oob


class _Bound(NamedTuple):
    """What `cuLaunchKernelEx` takes; `kept` is the memory that it refers to."""

    config: int
    parameters: int
    kept: tuple[ctypes.Array | ctypes.Structure, ...]


class LaunchPlan:
    """A loaded kernel with the sizes of a problem; any thread may launch it."""

    def __init__(self, name: str, function: driver.Function, arguments: int):
        self.name, self.function, self.arguments = name, function, arguments
        self.description = name
        self.grid = self.block = (1, 1, 1)
        self.shared_bytes = 0
        self._offsets: list[int] = []  # of the parameters, in memory of their own
        self._pointers: list[tuple[int, int]] = []  # offset, argument
        self._numbers: list[tuple[int, int]] = []  # offset, value
        self._maps: list[_Map] = []
        self._bytes = 0
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._lock = threading.Lock()
        quick = driver.quick()
        self._start = driver.library().cuLaunchKernelEx
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
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
    ) -> "LaunchPlan":
        """The plan of a problem.

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
        plan = cls(cubin.name, function, len(cubin.arguments))
        plan.description = f"{cubin.name} of {dict(sizes)}" if sizes else cubin.name
        plan.block, plan.shared_bytes = cubin.block, cubin.shared_bytes
        plan.grid = _cuda_grid(cubin.name, grid)
        ranks = [x.rank for x in cubin.arguments]
        if [len(shape) for shape in shapes] != ranks:
            raise ValueError(
                f"{cubin.name} must have arguments of ranks {ranks}, got shapes {shapes}"
            )
        for parameter in cubin.parameters:
            alignment = MAP_ALIGNMENT if isinstance(parameter.value, TensorMaps) else 8
            offset = -(-plan._bytes // alignment) * alignment
            plan._offsets.append(offset)
            plan._bytes = offset + parameter.bytes
            match parameter.value:
                case Pointer(argument):
                    plan._pointers.append((offset, argument))
                case Size(name):
                    if name not in sizes:
                        raise ValueError(f"{cubin.name} must have the size {name}, got {sizes}")
                    plan._numbers.append((offset, _carried(cubin.name, name, sizes[name])))
                case TensorMaps(maps):
                    for i, found in enumerate(maps):
                        place, dtype = offset + i * MAP_BYTES, cubin.arguments[found.argument].dtype
                        shape = tuple(shapes[found.argument])
                        plan._maps.append(_map(cubin.name, found, place, shape, dtype))
        return plan

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
        bound = self._bound.get(key) or self._bind(key)
        # A thread that has not called the CUDA runtime yet has no context, and another device
        # may be current.
        if error := self._push(self._context):
            self._fail("cuCtxPushCurrent", error)
        error = self._start(bound.config, self._handle, bound.parameters, None)
        self._pop(self._popped)
        if error:
            self._fail("cuLaunchKernelEx", error)

    def _bind(self, key: tuple[int, ...]) -> _Bound:
        """Lays the parameters out for a stream and addresses, and remembers them."""
        stream, *addresses = key
        if len(addresses) != self.arguments:
            raise ValueError(
                f"{self.name} must get {self.arguments} addresses, got {len(addresses)}"
            )
        for i, address in enumerate(addresses):
            if address % ALIGNMENT:
                raise ValueError(
                    f"argument {i} of {self.name} must start at a multiple of {ALIGNMENT} "
                    f"bytes, got {address:#x}"
                )
        memory = (ctypes.c_char * (self._bytes + MAP_ALIGNMENT))()
        start = ctypes.addressof(memory)
        start += -start % MAP_ALIGNMENT
        for offset, argument in self._pointers:
            ctypes.c_uint64.from_address(start + offset).value = addresses[argument]
        for offset, value in self._numbers:
            ctypes.c_uint64.from_address(start + offset).value = value
        encode = driver.quick().cuTensorMapEncodeTiled
        for found in self._maps:
            place = ctypes.c_void_p(start + found.offset)
            base = ctypes.c_void_p(addresses[found.argument])
            if error := encode(place, *found.head, base, *found.arrays, *found.tail):
                self._fail(f"cuTensorMapEncodeTiled of argument {found.argument}", error)
        places = (ctypes.c_void_p * len(self._offsets))(*(start + x for x in self._offsets))
        config = driver.LaunchConfig(self.grid, self.block, self.shared_bytes, stream)
        bound = _Bound(ctypes.byref(config), places, (memory, config))
        with self._lock:
            if len(self._bound) >= REMEMBERED:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = bound
        return bound

    def _fail(self, name: str, error: int) -> None:
        raise RuntimeError(f"{self.description}: {name} failed with {driver.words(error)}")


def _cuda_grid(name: str, grid: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*reversed(grid), 1, 1, 1)[:3]
    within = all(1 <= n <= most for n, most in zip((x, y, z), LARGEST_GRID, strict=True))
    if not within or not 1 <= len(grid) <= 3:
        raise ValueError(
            f"the grid of {name}, reversed, must be within 1 and {LARGEST_GRID}, got {(x, y, z)}"
        )
    return x, y, z


def _carried(name: str, size: str, value: int) -> int:
    """A size in place of an address, of which the lowest 8 bits are zero."""
    if not 0 <= value < 1 << 31:
        raise ValueError(f"the size {size} of {name} must be an int32, not negative, got {value}")
    return value << 8


def _map(name: str, found: TensorMap, offset: int, shape: tuple[int, ...], dtype: str) -> _Map:
    """A tensor map for an actual shape."""
    where = f"argument {found.argument} of {name}"
    if any(size != 1 for axis, size in enumerate(shape) if axis not in found.axes):
        raise ValueError(f"{where} must have size 1 but on axes {found.axes}, got {shape}")
    strides = byte_strides(shape, dtype)
    dims = [shape[axis] for axis in found.axes]
    steps = [strides[axis] for axis in found.axes[1:]]
    if not all(1 <= dim <= LONGEST_DIM for dim in dims):
        raise ValueError(
            f"{where} must have axes of 1 to {LONGEST_DIM} elements, a limit of CUDA's tensor "
            f"maps, got {shape}"
        )
    if any(step % STRIDE_MULTIPLE or step >= LARGEST_STRIDE for step in steps):
        raise ValueError(
            f"{where} must have strides below {LARGEST_STRIDE} bytes that are multiples of "
            f"{STRIDE_MULTIPLE}, a limit of CUDA's tensor maps, got {steps} of {shape}"
        )
    rank = len(dims)
    arrays = (
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*steps),
        (ctypes.c_uint32 * rank)(*found.box),
        (ctypes.c_uint32 * rank)(*found.steps),
    )
    tail = found.interleave, found.swizzle, found.l2, found.oob
    return _Map(found.argument, offset, (found.type, rank), arrays, tail)

"""Binds a kernel to the sizes of a problem.

A launch of a bound kernel needs only the addresses of the arrays.

`BoundKernel` computes everything that does not depend on addresses. The first launch with given
addresses encodes the tensor maps and lays out the parameters. Allocators return the same addresses
repeatedly. A later launch with the same addresses reuses the tensor maps and the parameters, and is
a single call of the driver.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kernels_pallas.kernel import ALIGNMENT
from kernels_pallas.runtime import driver
from kernels_pallas.runtime.cubin import CLUSTER, MAP_BYTES, Cubin, TensorMap, byte_strides

MAP_ALIGNMENT = 64
WORD = 8  # bytes
REMEMBERED = 256  # number of cached launches per kernel, by stream and addresses


class _Bound(NamedTuple):
    """The arguments of `cuLaunchKernelEx`: a pointer to `launch`, and `parameters`. The
    parameters point into `memory`.
    """

    config: Any
    parameters: ctypes.Array
    launch: driver.LaunchConfig
    memory: ctypes.Array


class BoundKernel:
    """A loaded kernel with the sizes of a problem. Any thread may launch a `BoundKernel`.

    Args:
      cubin: The kernel's machine code.
      function: The loaded machine code.
      shapes: Shapes of all inputs and outputs. The arrays are contiguous.
      sizes: The same as `Kernel.sizes`. Sizes that the cubin does not use are ignored.
      grid: The same as `Kernel.grid`.
    """

    def __init__(
        self,
        cubin: Cubin,
        function: driver.Function,
        shapes: Sequence[Sequence[int]],
        sizes: Mapping[str, int],
        grid: Sequence[int],
    ):
        self.cubin, self.sizes, self.context = cubin, dict(sizes), function.context
        self.grid = (*reversed(grid), 1, 1, 1)[:3]
        # Offsets of the parameters in the memory of the parameters. All parameters except
        # tensor maps are words.
        self._offsets: list[int] = []
        self._pointers: list[tuple[int, int]] = []  # word, argument
        self._numbers: list[tuple[int, int]] = []  # word, value
        # For each tensor map: its offset, the index of its argument, and the arguments of the
        # driver's function before and after the address.
        self._maps: list[tuple[int, int, tuple[int, int], tuple[Any, ...]]] = []
        end = 0
        for parameter in cubin.parameters:
            if isinstance(parameter, tuple):
                end += -end % MAP_ALIGNMENT
            self._offsets.append(end)
            if isinstance(parameter, int):
                self._pointers.append((end // WORD, parameter))
            elif isinstance(parameter, str):
                self._numbers.append((end // WORD, sizes[parameter] << 8))
            else:
                for i, found in enumerate(parameter):
                    place = end + i * MAP_BYTES, found.argument
                    self._maps.append((*place, *_encoded(found, shapes[found.argument])))
            end += MAP_BYTES * len(parameter) if isinstance(parameter, tuple) else WORD
        self._memory = ctypes.c_char * (end + MAP_ALIGNMENT)
        self._words = ctypes.c_uint64 * (end // WORD)
        self._places = ctypes.c_void_p * len(self._offsets)
        clusters = [(CLUSTER, 0, (cubin.cluster, 1, 1))] if cubin.cluster > 1 else []
        self.attributes = (driver.LaunchAttribute * len(clusters))(*clusters)
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._lock = threading.Lock()
        quick = driver.quick()
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._encode = quick.cuTensorMapEncodeTiled
        self._start = driver.library().cuLaunchKernelEx
        self._context = ctypes.c_void_p(function.context)
        self._handle = ctypes.c_void_p(function.handle)
        self._popped = ctypes.byref(ctypes.c_void_p())

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Queue one run of the kernel.

        Args:
          stream: A CUstream of the device; 0 is the default stream.
          addresses: Addresses of the inputs and outputs, multiples of 256 bytes.

        Raises:
          ValueError: An address is not a multiple of 256 bytes.
          RuntimeError: The driver reports an error.
        """
        key = (stream, *addresses)
        # A thread that has not called the CUDA runtime yet has no context, and in other threads
        # another device may be current. Tensor maps also need a context.
        if error := self._push(self._context):
            self._check(error, "cuCtxPushCurrent")
        try:
            bound = self._bound.get(key) or self._remembered(key)
            error = self._start(bound.config, self._handle, bound.parameters, None)
        finally:
            self._pop(self._popped)
        if error:
            self._check(error, "cuLaunchKernelEx")

    def node(self, addresses: Sequence[int]) -> tuple[driver.KernelNode, _Bound]:
        """Return one run as a node of a CUDA graph, and the object that owns the memory to
        which the node refers.
        """
        bound = self._bind((0, *addresses))
        launch, parameters = bound.launch, ctypes.cast(bound.parameters, ctypes.c_void_p)
        handle, shared_bytes = self._handle.value, launch.shared_bytes
        return (
            driver.KernelNode(handle, launch.grid, launch.block, shared_bytes, parameters),
            bound,
        )

    def _remembered(self, key: tuple[int, ...]) -> _Bound:
        """Return the result of `_bind`, and cache it for later launches."""
        bound = self._bind(key)
        with self._lock:
            if len(self._bound) >= REMEMBERED:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = bound
        return bound

    def _bind(self, key: tuple[int, ...]) -> _Bound:
        """Lay out the parameters for the stream and the addresses in `key`. The context of the
        kernel must be current.
        """
        stream, *addresses = key
        for i, address in enumerate(addresses):
            if address % ALIGNMENT:
                raise ValueError(
                    f"argument {i} of {self.cubin.name} must start at a multiple of {ALIGNMENT} "
                    f"bytes, got {address:#x}"
                )
        memory = self._memory()
        start = ctypes.addressof(memory)
        start += -start % MAP_ALIGNMENT
        words = self._words.from_address(start)
        for word, value in self._numbers:
            words[word] = value
        for word, argument in self._pointers:
            words[word] = addresses[argument]
        encode, address = self._encode, ctypes.c_void_p
        for offset, argument, head, tail in self._maps:
            place, base = address(start + offset), address(addresses[argument])
            if error := encode(place, *head, base, *tail):
                self._check(error, f"cuTensorMapEncodeTiled of argument {argument}")
        places = self._places(*[start + offset for offset in self._offsets])
        attributes = ctypes.cast(self.attributes, ctypes.c_void_p) if self.attributes else None
        launch = driver.LaunchConfig(
            self.grid,
            self.cubin.block,
            self.cubin.shared_bytes,
            stream,
            attributes,
            len(self.attributes),
        )
        return _Bound(ctypes.byref(launch), places, launch, memory)

    def _check(self, error: int, name: str) -> None:
        of = f" of {self.sizes}" if self.sizes else ""
        driver.check(error, f"{self.cubin.name}{of}: {name}")


def _encoded(found: TensorMap, shape: Sequence[int]) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """Return the arguments of a tensor map for a shape. The first tuple has the arguments
    before the address: type and rank. The second tuple has the arguments after the address:
    dims, strides, box, steps, interleave, swizzle, l2 and oob.
    """
    strides, rank = byte_strides(shape, found.item_bytes), len(found.axes)
    wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    dims = wide(*[shape[axis] for axis in found.axes])
    steps = wide(*[strides[axis] for axis in found.axes[1:]])
    kind, *enums = found.enums
    return (kind, rank), (dims, steps, narrow(*found.box), narrow(*found.steps), *enums)

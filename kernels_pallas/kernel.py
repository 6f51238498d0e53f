"""Describes a kernel by its static sizes and its input and output arrays.

The function with the kernel's code is imported only when the kernel runs. Describing a kernel does
not import JAX, so PyTorch can find compiled kernels without JAX.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

# Mosaic assumes that every pointer is a multiple of 256 bytes, and its code may compute
# addresses with OR in place of addition. torch's allocator returns multiples of 512 bytes. Only
# a view that starts inside its storage can have another address.
ALIGNMENT = 256
SIZE = "sizes."  # prefix of the names of scalar arguments, whose addresses are sizes
# The address of a scalar argument is a size times this number (`Kernel.for_any_length`).
SCALAR_STEP = ALIGNMENT
NOMINAL_LENGTH = 2**18  # the length of arrays in the description of a kernel for any length
# The kernels for these lengths serve all lengths. The step of the scores has a kernel for each
# power of two. Other steps have kernels for short and for long sequences.
LENGTHS = tuple(2**i for i in range(9, 20))


class Array(NamedTuple):
    """Shape and dtype of an argument. `dtype` is a name such as `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def int32(*shape: int) -> Array:
    return Array(shape, "int32")


def float32(*shape: int) -> Array:
    return Array(shape, "float32")


SCALAR = int32(64)
DESCRIPTIONS = 4096  # cached descriptions per function, enough for a few hundred lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Static sizes of a kernel.

    Attributes:
      interpret: Parameters of the Pallas interpreter, or False to compile the kernel.
      any_length: True if one compiled kernel serves all lengths and reads its sizes at launch.
    """

    interpret: bool | object = False
    any_length: bool = False

    @property
    def nominal(self) -> dict[str, Any]:
        """The length fields of a spec, with placeholder values for a kernel of all lengths."""
        return {"B": 2, "T": NOMINAL_LENGTH, "S": NOMINAL_LENGTH}

    def for_any_length(self) -> Self:
        """A copy of the spec for a kernel that serves all lengths."""
        return dataclasses.replace(self, any_length=True, **self.nominal)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One Mosaic GPU kernel with fixed shapes. A kernel can be called from both frameworks.

    Kernels are compared by identity, since `described` creates one `Kernel` object per spec. Each
    `Kernel` object is traced and compiled once.

    Attributes:
      name: Name in messages and reports.
      spec: The static sizes, a frozen dataclass.
      body: `module:function`. The function `body` gets the `Kernel` and returns a JAX function that
        `plgpu.kernel` has built. The JAX function maps arrays with the shapes of `inputs` to a list
        or tuple of arrays with the shapes of `outputs`. In tests, `body` may be the JAX function
        itself.
      inputs: Shapes and dtypes of at least one input array.
      outputs: Shapes and dtypes of at least one output array.
      in_place: Number `n` of shared arrays. The first `n` outputs may share memory with the last
        `n` inputs, in order. The kernel reads each part of a shared input before it writes the same
        part of the output.
      names: Names of the inputs, then of the outputs (`Kernel.named`).
      sizes: Integers that depend on the lengths of arrays and that the body reads, by name.
      grid: Number of CTAs along each of at most two axes.
      cluster: Number of CTAs per cluster. The CTAs of a cluster are neighbours on the grid's
        last axis, run together, and access each other's shared memory.
      source: `module:function` that describes the kernel from its spec. Tests may omit `source`,
        and the kernel is then compiled only for its own lengths.
    """

    name: str
    spec: Any
    body: str | Callable[..., Any]
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    in_place: int = 0
    names: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    grid: tuple[int, ...] = ()
    cluster: int = 1
    source: str = ""

    @classmethod
    def named(
        cls,
        spec: Any,
        inputs: Mapping[str, Array | bool],
        outputs: Mapping[str, Array],
        *,
        name: str = "",
        body: str = "",
        sizes: Mapping[str, int] | None = None,
        **options: Any,
    ) -> Self:
        """Return a kernel whose body gets each array as `refs.<key>`, for the keys of `inputs` and
        `outputs`.

        An input whose value is False is omitted. If `spec.any_length` is true, the kernel's first
        inputs carry `sizes`, one input per size. If `name` or `body` is empty, `described` adds the
        default.
        """
        sizes = dict(sizes or {})
        given = {key: x for key, x in inputs.items() if isinstance(x, Array)}
        if getattr(spec, "any_length", False):
            given = {f"{SIZE}{size}": SCALAR for size in sizes} | given
        arrays, names = (tuple(given.values()), tuple(outputs.values())), (*given, *outputs)
        return cls(name, spec, body, *arrays, names=names, sizes=sizes, **options)

    def __post_init__(self):
        for name in ("inputs", "outputs"):
            arrays = [Array(tuple(x.shape), str(x.dtype)) for x in getattr(self, name)]
            object.__setattr__(self, name, tuple(arrays))

    @property
    def any_length(self) -> bool:
        """Whether the kernel reads its sizes at launch, from the addresses of its first inputs."""
        return getattr(self.spec, "any_length", False)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the inputs that carry sizes."""
        return tuple(SIZE + size for size in self.sizes) if self.any_length else ()

    @functools.lru_cache(DESCRIPTIONS)  # noqa: B019
    def for_any_length(self) -> "Kernel":
        """Return the variant of this kernel that serves all lengths.

        The arrays of the returned kernel have the placeholder length `NOMINAL_LENGTH`. The body
        must not compute addresses from `NOMINAL_LENGTH`. The kernel gets one more input per entry
        of `sizes`, before the arrays. The address of an input for a size is the size times
        `SCALAR_STEP`, and the kernel reads no memory there. A size that is passed as an address
        needs no copy to the GPU, and is stored in CUDA graphs.
        """
        module, function = self.source.split(":")
        describe = getattr(importlib.import_module(module), function)
        return describe(self.spec.for_any_length())

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The function that runs the kernel.

        If `body` is a name, `call` is the result of the named function. If `body` is a function,
        `call` is `body`.
        """
        if callable(self.body):
            return self.body
        module, function = self.body.split(":")
        return getattr(importlib.import_module(module), function)(self)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Reshape JAX arrays to the shapes of the inputs, and run the kernel."""
        return tuple(self.call(*self.shaped(arrays)))

    def shaped(self, arrays: Sequence[Any]) -> list[Any]:
        """Reshape arrays of any framework to the shapes of the inputs.

        Raises:
          ValueError: The number of arrays is wrong, or an array has the wrong dtype or size.
        """
        if len(arrays) != len(self.inputs):
            raise ValueError(f"{self.name} needs {len(self.inputs)} arrays, got {len(arrays)}")
        for i, (array, expected) in enumerate(zip(arrays, self.inputs, strict=True)):
            if array.dtype.name != expected.dtype or math.prod(array.shape) != expected.size:
                raise ValueError(
                    f"argument {i} of {self.name} must be {expected.dtype} with the "
                    f"{expected.size} elements of {expected.shape}, got {array.dtype.name} "
                    f"{tuple(array.shape)}"
                )
        return [a.reshape(s.shape) for a, s in zip(arrays, self.inputs, strict=True)]


def described(describe: Callable[[Any], Kernel]) -> Callable[[Any], Kernel]:
    """Decorate a function that describes a kernel from its spec.

    Equal specs get the same kernel object. The decorated function becomes the kernel's `source`. By
    default the kernel has the name of the function. By default the body of the kernel that
    `specs.x.f` describes is `mosaic.x.f`.
    """
    module, name = describe.__module__, describe.__name__
    body = f"kernels_pallas.mosaic.{module.rpartition('.')[2]}:{name}"

    @functools.lru_cache(DESCRIPTIONS)
    @functools.wraps(describe)
    def cached(spec):
        kernel = describe(spec)
        found = {"name": kernel.name or name, "body": kernel.body or body}
        # The new kernel is modified in place, since no other object refers to it yet. A copy
        # would cost 10 us for each new length.
        for field, x in (found | {"source": f"{module}:{name}"}).items():
            object.__setattr__(kernel, field, x)
        return kernel

    return cached

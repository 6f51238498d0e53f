"""Describes a kernel by its static sizes and its input and output arrays.

The body is imported when the kernel runs. A description imports no JAX, so a framework can plan,
allocate and look up compiled code without it.
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
      interpret: Parameters of the Pallas interpreter. False means compiled code.
      any_length: Whether the lengths are nominal and the kernel reads its sizes at launch.
    """

    interpret: bool | object = False
    any_length: bool = False

    @property
    def nominal(self) -> dict[str, Any]:
        """The fields of the spec that are lengths, with their nominal values."""
        return {"B": 2, "T": NOMINAL_LENGTH, "S": NOMINAL_LENGTH}

    def for_any_length(self) -> Self:
        """A copy of the spec with nominal lengths."""
        return dataclasses.replace(self, any_length=True, **self.nominal)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One Mosaic GPU kernel with fixed shapes. A kernel can be called from both frameworks.

    Kernels are compared by identity. The function that describes a kernel caches its results by
    spec (`described`). A spec therefore has one kernel object, which is traced and compiled
    once.

    Attributes:
      name: Name in messages and reports.
      spec: The static sizes, a frozen dataclass.
      body: `module:function`. This function accepts the `Kernel` and returns a result of
        `plgpu.kernel`. That result is a function whose arguments have the shapes of `inputs`,
        and which returns a list or tuple of arrays with the shapes of `outputs`. In tests,
        `body` may be such a result of `plgpu.kernel` instead of a name.
      inputs: At least one array.
      outputs: At least one array.
      in_place: Number of first outputs that may share memory with the same number of last
        inputs, in order. The kernel reads each part of such an input before it writes the same
        part of the output.
      names: Names of the inputs, then of the outputs (`Kernel.named`).
      sizes: Numbers that the body needs and that depend on lengths, by name.
      grid: Number of CTAs along each of at most two axes.
      cluster: Number of CTAs per cluster. The CTAs of a cluster are neighbours on the grid's
        last axis, run together, and access each other's shared memory.
      source: `module:function` that describes the kernel from its spec. Kernels without a source
        (tests) are compiled only for their lengths.
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
        """Return a kernel whose body accesses its refs by the keys of `inputs` and `outputs`
        (`mosaic.refs.build_kernel`).

        Inputs whose value is False are omitted. If the spec is for any length, the kernel
        begins with an input for each of its `sizes`. By default, `described` adds the name and
        the body.
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
        """Return the kernel with the same description that serves every length. The arrays of
        the returned kernel have nominal lengths (`NOMINAL_LENGTH`), and no address in the body
        may depend on a nominal length. Scalar arguments precede the arrays. There is a scalar
        argument for each entry of `sizes`, and its address is the size times `SCALAR_STEP`. The
        kernel reads nothing at these addresses. An address is a parameter of the launch.
        Passing a size therefore needs no copy, and a CUDA graph stores the size.
        """
        module, function = self.source.split(":")
        describe = getattr(importlib.import_module(module), function)
        return describe(self.spec.for_any_length())

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The function that runs the kernel. If `body` is a name, `call` is the result of the
        function with this name. If `body` is a function, `call` is `body`.
        """
        if callable(self.body):
            return self.body
        module, function = self.body.split(":")
        return getattr(importlib.import_module(module), function)(self)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the kernel on JAX arrays. `shaped` first reshapes the arrays."""
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
    """Decorate a function that describes a kernel from its spec. The decorated function returns
    the same kernel object for equal specs, and is the kernel's source. By default the kernel
    has the name of the function. By default the body is the function of the same name in
    `mosaic`, in the module with the same name as the module of the description.
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

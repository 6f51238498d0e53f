"""What a kernel is to the rest of the library: a description; the body is imported to run it.

A description holds static sizes and the arrays that go in and come out. It imports no JAX, so
that a framework can plan, allocate and look up compiled code without it.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

# Mosaic compiles every pointer as a multiple of so many bytes, and code made of that promise may
# compute addresses with OR in place of addition. torch's allocator gives multiples of 512; only
# a view that starts inside its storage can break it.
ALIGNMENT = 256
# Scalar arguments (`Kernel.for_any_length`), which are addresses.
SIZE = "sizes."  # what the names of scalar arguments begin with
SCALAR_STEP = ALIGNMENT
NOMINAL_LENGTH = 2**18  # of the arrays of a kernel for any length, in its types alone
# Lengths whose kernels serve all lengths: each power of two has one of its own for scores, others
# differ in short and long ones.
LENGTHS = tuple(2**i for i in range(9, 20))


class Array(NamedTuple):
    """Shape and dtype of an argument; `dtype` is a name, e.g. `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def _plain(x: Any) -> Array:
    return x if type(x) is Array else Array(tuple(x.shape), str(x.dtype))


SCALAR = Array((64,), "int32")
DESCRIPTIONS = 4096  # that a function remembers: those of some hundred lengths

# Decorates a function that describes a kernel: the same spec gives the same object.
described = functools.lru_cache(DESCRIPTIONS)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One Mosaic GPU kernel with fixed shapes, called from both frameworks.

    Compared by identity: the function that describes it is cached by its static arguments, so
    that one description is one object, traced and compiled once.

    Attributes:
      name: for messages and reports.
      spec: the static part, a frozen dataclass.
      body: `module:function`; the function takes this kernel and returns what `plgpu.kernel`
        returns, nothing around it: arrays shaped as `inputs` in, a list or tuple of arrays
        shaped as `outputs` out. Or that function itself (tests).
      inputs: at least one.
      outputs: at least one.
      in_place: how many of the first outputs may take the memory of as many last inputs, in
        their order, of which each part is read before the same part of the output is written.
      names: of the inputs, then of the outputs (`Kernel.named`).
      sizes: the numbers of the body that follow from lengths, by name.
      grid: CTAs, at most two axes.
      cluster: how many CTAs, neighbours on the grid's last axis, run together and reach each
        other's shared memory.
      source: `module:function` that describes it from its spec. Without (tests) it is compiled
        for its lengths alone.
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
        name: str,
        spec: Any,
        body: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        in_place: int = 0,
        sizes: Mapping[str, int] | None = None,
        grid: tuple[int, ...] = (),
        cluster: int = 1,
        source: str = "",
    ) -> Self:
        """A kernel whose body finds its refs by these names (`mosaic.refs.build_kernel`).

        One of `spec.any_length` begins with an input for each of its `sizes`.
        """
        sizes = dict(sizes or {})
        if getattr(spec, "any_length", False):
            inputs = {f"{SIZE}{size}": SCALAR for size in sizes} | dict(inputs)
        arrays = tuple(inputs.values()), tuple(outputs.values())
        names = (*inputs, *outputs)
        return cls(name, spec, body, *arrays, in_place, names, sizes, grid, cluster, source)

    def __post_init__(self):
        for name in ("inputs", "outputs"):
            arrays = tuple(map(_plain, getattr(self, name)))
            object.__setattr__(self, name, arrays)

    @property
    def any_length(self) -> bool:
        """Whether it takes its sizes at launch, from the addresses of its first inputs."""
        return getattr(self.spec, "any_length", False)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the inputs that carry sizes."""
        return tuple(SIZE + size for size in self.sizes) if self.any_length else ()

    @described
    def for_any_length(self) -> "Kernel":
        """The kernel of the same description that serves every length.

        Its arrays have nominal lengths (`NOMINAL_LENGTH`), of which no address in the body may
        depend, and before them stand scalar arguments: an input for each of `sizes`, whose
        address is the number times `SCALAR_STEP`. Nothing is read there. An address lies among the
        parameters of a launch, so a number costs no copy, and a CUDA graph keeps it.
        """
        module, function = self.source.split(":")
        describe = getattr(importlib.import_module(module), function)
        return describe(self.spec.for_any_length())

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The function that `body` names, applied to this kernel."""
        if callable(self.body):
            return self.body
        module, function = self.body.split(":")
        return getattr(importlib.import_module(module), function)(self)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """The outputs for JAX arrays, as `shaped`."""
        return tuple(self.call(*self.shaped(arrays)))

    def shaped(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays of any framework, each reshaped to its input's shape.

        Raises:
          ValueError: another number of arrays, or an array of another dtype or size.
        """
        if len(arrays) != len(self.inputs):
            raise ValueError(f"{self.name} takes {len(self.inputs)} arrays, got {len(arrays)}")
        for i, (array, expected) in enumerate(zip(arrays, self.inputs, strict=True)):
            if array.dtype.name != expected.dtype or math.prod(array.shape) != expected.size:
                raise ValueError(
                    f"argument {i} of {self.name} must be {expected.dtype} with the "
                    f"{expected.size} elements of {expected.shape}, got {array.dtype.name} "
                    f"{tuple(array.shape)}"
                )
        return [a.reshape(s.shape) for a, s in zip(arrays, self.inputs, strict=True)]

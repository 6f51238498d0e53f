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


class Array(NamedTuple):
    """Shape and dtype of an argument; `dtype` is a name, e.g. `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


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
      in_place: whether the first output may take the memory of the last input, of which each
        part is read before the same part of the output is written.
      names: of the inputs, then of the outputs (`Kernel.named`).
      sizes: the numbers that follow from lengths, by name.
      grid: CTAs, by axis, two at most.
      source: `module:function` of the function that makes this kernel of its spec.
      any_length: whether it is for any lengths: those of the spec are capacities, and for each
        of `sizes` there is an input more, before the others, whose address is `value << 8`.
    """

    name: str
    spec: Any
    body: str | Callable[..., Any]
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    in_place: bool = False
    names: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    grid: tuple[int, ...] = ()
    source: str = ""
    any_length: bool = False

    @classmethod
    def named(
        cls,
        name: str,
        spec: Any,
        body: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        in_place: bool = False,
    ) -> Self:
        """A kernel whose body finds its refs by these names (`mosaic.refs.build_kernel`)."""
        arrays = tuple(inputs.values()), tuple(outputs.values())
        return cls(name, spec, body, *arrays, in_place, (*inputs, *outputs))

    def __post_init__(self):
        for name in ("inputs", "outputs"):
            arrays = tuple(Array(tuple(x.shape), str(x.dtype)) for x in getattr(self, name))
            object.__setattr__(self, name, arrays)

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The function that `body` names, applied to this kernel."""
        if callable(self.body):
            return self.body
        module, function = self.body.split(":")
        return getattr(importlib.import_module(module), function)(self)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """The outputs for JAX arrays, each reshaped to its input's shape first.

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
        shaped = [a.reshape(s.shape) for a, s in zip(arrays, self.inputs, strict=True)]
        return tuple(self.call(*shaped))

"""What a kernel is to the rest of the library: a function with fixed shapes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One Mosaic GPU kernel with fixed shapes, called from both frameworks.

    Compared by identity: a builder is cached by its static arguments, so that one description
    is one object, traced and compiled once.

    Attributes:
      name: for messages and reports.
      call: what `plgpu.kernel` returns, nothing around it: arrays shaped as `inputs` in, a list
        or tuple of arrays shaped as `outputs` out.
      inputs: shapes and dtypes; at least one.
      outputs: shapes and dtypes; at least one.
      in_place: whether the first output may take the memory of the last input, of which each
        part is read before the same part of the output is written.
    """

    name: str
    call: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    in_place: bool = False

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """The outputs for JAX arrays, each reshaped to its input's shape first.

        Raises:
          ValueError: another number of arrays, or an array of another dtype or size.
        """
        if len(arrays) != len(self.inputs):
            raise ValueError(f"{self.name} takes {len(self.inputs)} arrays, got {len(arrays)}")
        for i, (array, wanted) in enumerate(zip(arrays, self.inputs, strict=True)):
            if array.dtype != wanted.dtype or math.prod(array.shape) != wanted.size:
                raise ValueError(
                    f"argument {i} of {self.name} must be {wanted.dtype.name} with the "
                    f"{wanted.size} elements of {wanted.shape}, got {array.dtype.name} "
                    f"{tuple(array.shape)}"
                )
        shaped = [a.reshape(s.shape) for a, s in zip(arrays, self.inputs, strict=True)]
        return tuple(self.call(*shaped))

"""Describes the launch parameters of a kernel's machine code, which are stored as JSON.

A cubin contains no shapes. For each dimension of a tensor map, the stored parameters name the axis
of an argument. A launch adds the size of the axis (`bound_kernel.BoundKernel`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

ARCHITECTURE = "sm_90a"
MAP_BYTES = 128  # bytes of a CUtensorMap
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class TensorMap(NamedTuple):
    """The arguments of `cuTensorMapEncodeTiled`, without sizes, strides and address.

    Attributes:
      argument: Index of the argument whose memory the tensor map describes. The tensor map begins
        at the first byte of the argument.
      item_bytes: Bytes of an element.
      axes: Axis of the argument for each dimension of the map. The elements of the first dimension
        are adjacent in memory. Axes that are not listed have size 1.
      enums: The values of type, interleave, swizzle, l2 and oob for the driver.
      box: Number of elements per copy, by dimension.
      steps: Stride between the elements of a copy, by dimension.
    """

    argument: int
    item_bytes: int
    axes: tuple[int, ...]
    enums: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]


class Cubin(NamedTuple):
    """The launch parameters of a kernel's machine code, without the machine code itself (the
    image).

    Attributes:
      name: Name of the kernel.
      entry: Name of the kernel's function in the image.
      block: Number of threads per CTA, by axis.
      cluster: Number of CTAs per cluster, which are neighbours on the first axis of the CUDA
        grid.
      shared_bytes: Dynamic shared memory per CTA.
      attributes: Number (a CUfunction_attribute) and value of each attribute that is set before
        the first launch.
      parameters: Parameters of the function, in order. A number stands for an array argument, as an
        index among inputs and outputs without scalar arguments. A launch passes the address of the
        array. A name stands for one of `Kernel.sizes`. A launch passes the address `value << 8` of
        a size. All other parameters are consecutive tensor maps, which are passed by value.
      registers: Number of registers per thread.
      stack_bytes: Bytes of stack per thread, as reported by ptxas, summed over the functions of the
        image.
      spill_store_bytes: Bytes of spill stores per thread, summed like `stack_bytes`.
      spill_load_bytes: Bytes of spill loads per thread, summed like `stack_bytes`.
      remarks: Warnings and performance losses reported by ptxas, such as serialised wgmma.
      versions: Versions of jax and ptxas.
    """

    name: str
    entry: str
    block: tuple[int, int, int]
    cluster: int
    shared_bytes: int
    attributes: tuple[tuple[int, int], ...]
    parameters: tuple[int | str | tuple[TensorMap, ...], ...]
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    remarks: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build a `Cubin` from the result of `_asdict` after it was stored as JSON."""
        fields = {name: _tuples(value) for name, value in data.items()}
        fields["parameters"] = tuple(
            tuple(TensorMap(*x) for x in each) if isinstance(each, tuple) else each
            for each in fields["parameters"]
        )
        return cls(**fields)


def _tuples(data: Any) -> Any:
    return tuple(map(_tuples, data)) if isinstance(data, list) else data


def byte_strides(shape: Sequence[int], item_bytes: int) -> list[int]:
    """Return the strides of a contiguous array, by axis."""
    strides = [item_bytes]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]

"""What a launch must know of a kernel's machine code, as JSON and back.

A kernel is compiled for shapes, but a cubin names none: a tensor map says which axis of which
argument each of its dimensions is, and a launch fills in the sizes (`bound_kernel.BoundKernel`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

ARCHITECTURE = "sm_90a"
MAP_BYTES = 128  # of a CUtensorMap
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class TensorMap(NamedTuple):
    """What `cuTensorMapEncodeTiled` is called with, but for sizes, strides and address.

    Attributes:
      argument: whose memory it describes, from its first byte on.
      item_bytes: of an element.
      axes: the argument's axis that each dimension is, the last axis first. Axes that are
        missing have size 1.
      enums: the driver's type, interleave, swizzle, l2, oob.
      box: elements that a copy moves, by dimension.
      steps: distance between these, by dimension.
    """

    argument: int
    item_bytes: int
    axes: tuple[int, ...]
    enums: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]


class Cubin(NamedTuple):
    """A kernel's machine code, without its image.

    Attributes:
      name: of the kernel.
      entry: of its function in the image.
      block: threads of a CTA, by axis.
      cluster: CTAs of a cluster, neighbours on the grid's first axis (CUDA's).
      shared_bytes: dynamic shared memory of a CTA.
      attributes: number (a CUfunction_attribute) and value of those that are set before the
        first launch.
      parameters: in the order of the function's. A number is that of an argument, whose address
        it is: inputs, then outputs, without those that carry sizes. A name is one of
        `Kernel.sizes`, carried by an address: `value << 8`. Others are tensor maps by value, one
        after the other.
      registers: of a thread.
      stack_bytes, spill_store_bytes, spill_load_bytes: of a thread, as ptxas says.
      remarks: of ptxas: warnings and performance losses, such as serialised wgmma.
      versions: of jax and ptxas.
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
        """The inverse of `_asdict`, which went through JSON."""
        fields = {name: _tuples(value) for name, value in data.items()}
        fields["parameters"] = tuple(
            tuple(TensorMap(*x) for x in each) if isinstance(each, tuple) else each
            for each in fields["parameters"]
        )
        return cls(**fields)


def _tuples(data: Any) -> Any:
    return tuple(map(_tuples, data)) if isinstance(data, list) else data


def byte_strides(shape: Sequence[int], item_bytes: int) -> list[int]:
    """Of a contiguous array, by axis."""
    strides = [item_bytes]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]

"""What a launch must know of a kernel's machine code, as JSON and back.

A kernel is compiled for shapes, but a cubin names none: a tensor map says which axis of which
argument each of its dimensions is, and a launch fills in the sizes (`bound_kernel.BoundKernel`).
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

MAP_BYTES = 128  # of a CUtensorMap
POINTER_BYTES = 8
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
ITEM_BYTES = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float16": 2,
    "float32": 4,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint8": 1,
}


@dataclasses.dataclass(frozen=True)
class Argument:
    """An input or output: a contiguous array of `rank` axes."""

    rank: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What `cuTensorMapEncodeTiled` is called with, but for sizes, strides and address.

    Attributes:
      argument: whose memory it describes, from its first byte on.
      axes: the argument's axis that each dimension is, the last axis first. Axes that are
        missing have size 1.
      type, interleave, swizzle, l2, oob: the driver's enums.
      box: elements that a copy moves, by dimension.
      steps: distance between these, by dimension.
    """

    argument: int
    axes: tuple[int, ...]
    type: int
    interleave: int
    swizzle: int
    l2: int
    oob: int
    box: tuple[int, ...]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The address of an argument."""

    argument: int
    kind: Literal["pointer"] = "pointer"


@dataclasses.dataclass(frozen=True)
class Size:
    """A number of `Kernel.sizes`, carried by an address: `value << 8`."""

    name: str
    kind: Literal["size"] = "size"


@dataclasses.dataclass(frozen=True)
class TensorMaps:
    """Tensor maps by value, one after the other."""

    maps: tuple[TensorMap, ...]
    kind: Literal["maps"] = "maps"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the machine code: where it lies among all, its bytes, what it holds."""

    offset: int
    bytes: int
    value: Pointer | Size | TensorMaps


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A `CUfunction_attribute` that is set before the first launch."""

    number: int
    value: int


@dataclasses.dataclass(frozen=True)
class Cubin:
    """A kernel's machine code, without its image.

    Attributes:
      name: of the kernel.
      entry: of its function in the image.
      block: threads of a CTA, by axis.
      cluster: CTAs of a cluster, neighbours on the grid's first axis (CUDA's).
      shared_bytes: dynamic shared memory of a CTA.
      attributes: of the function.
      parameters: in the order of the function's.
      arguments: inputs, then outputs; those that carry sizes are not among them.
      registers: of a thread.
      stack_bytes, spill_store_bytes, spill_load_bytes: of a thread, as ptxas says.
      remarks: of ptxas: warnings and performance losses, such as serialised wgmma.
      versions: of jax, jaxlib, the plugin and ptxas.
    """

    name: str
    entry: str
    block: tuple[int, int, int]
    cluster: int
    shared_bytes: int
    attributes: tuple[Attribute, ...]
    parameters: tuple[Parameter, ...]
    arguments: tuple[Argument, ...]
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    remarks: tuple[str, ...]
    versions: dict[str, str]

    ARCHITECTURE: ClassVar[str] = "sm_90a"

    def to_json(self) -> dict[str, Any]:
        """Of lists, dictionaries, strings and integers."""
        return _plain(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of `to_json`.

        Raises:
          ValueError: a field is missing, unknown or of another type, or the parts do not fit.
        """
        return _read(cls, data, "cubin")

    def __post_init__(self):
        counted = len(self.arguments)
        for i, argument in enumerate(self.arguments):
            if argument.dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise ValueError(f"arguments[{i}].dtype must be one of {known}, got {argument}")
        for i, parameter in enumerate(self.parameters):
            where, value, expected = f"parameters[{i}]", parameter.value, POINTER_BYTES
            if isinstance(value, TensorMaps):
                expected = MAP_BYTES * len(value.maps)
                for found in value.maps:
                    self._check_map(where, found)
            elif isinstance(value, Pointer) and not 0 <= value.argument < counted:
                raise ValueError(f"{where} must be of one of {counted} arguments, got {value}")
            if parameter.bytes != expected:
                raise ValueError(f"{where} must have {expected} bytes, got {parameter.bytes}")

    def _check_map(self, where: str, found: TensorMap) -> None:
        if not 0 <= found.argument < len(self.arguments):
            raise ValueError(
                f"{where} must be of one of {len(self.arguments)} arguments, got {found}"
            )
        rank, axes = self.arguments[found.argument].rank, found.axes
        if not 1 <= len(axes) <= 5 or len(set(axes)) < len(axes):
            raise ValueError(f"{where} must have 1 to 5 different axes, got {axes}")
        if axes[0] != rank - 1 or not all(0 <= axis < rank for axis in axes):
            raise ValueError(f"{where} must have axes of {rank}, the last first, got {axes}")
        if not len(axes) == len(found.box) == len(found.steps):
            raise ValueError(f"{where} must have one box and step an axis, got {found}")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _read(kind: Any, data: Any, where: str) -> Any:
    """`data` as `kind`: a dataclass, a union of some that have a `kind`, or built-in types."""

    def refuse(expected: str) -> ValueError:
        return ValueError(f"{where} must be {expected}, got {data!r:.200}")

    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if data not in parts:
            raise refuse(f"one of {parts}")
        return data
    if origin is dict:
        if not isinstance(data, dict):
            raise refuse("an object")
        key, value = parts
        return {_read(key, k, where): _read(value, v, f"{where}.{k}") for k, v in data.items()}
    if origin is tuple:
        if not isinstance(data, list):
            raise refuse("a list")
        hints = parts[:1] * len(data) if parts[-1] is Ellipsis else parts
        if len(hints) != len(data):
            raise refuse(f"a list of {len(hints)}")
        both = enumerate(zip(hints, data, strict=True))
        return tuple(_read(hint, x, f"{where}[{i}]") for i, (hint, x) in both)
    if origin in (typing.Union, types.UnionType):
        found = data.get("kind") if isinstance(data, dict) else None
        for part in parts:
            if typing.get_args(_hints(part)["kind"]) == (found,):
                return _read(part, data, where)
        raise refuse("of a known kind")
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise refuse("an object")
        hints = _hints(kind)
        if data.keys() != hints.keys():
            odd = sorted(map(str, data.keys() ^ hints.keys()))
            raise ValueError(f"{where} must have the fields {', '.join(hints)}: see {odd}")
        return kind(
            **{name: _read(h, data[name], f"{where}.{name}") for name, h in hints.items()}
        )
    if type(data) is not kind:  # a bool is no int
        raise refuse(kind.__name__)
    return data


def byte_strides(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Of a contiguous array, by axis."""
    strides = [ITEM_BYTES[dtype]]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))

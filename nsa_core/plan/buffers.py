"""The parts of a plan. `nsa_torch.plans` runs plans on torch tensors."""

import enum
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeGuard

from kernels_pallas.kernel import Kernel
from kernels_pallas.triton.kernel import TritonKernel

BYTES = {"bool": 1, "int8": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "int16": 2} | {
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


def _bytes(array: Any) -> int:
    """Return the number of bytes of a `Buffer` or a `View`."""
    return math.prod(array.shape) * BYTES[array.dtype]


class Memory(enum.Enum):
    """The kind of memory of a buffer.

    Attributes:
      ARGUMENT: The memory belongs to the caller and is never written.
      CONSTANT: The contents depend only on the plan. The contents are computed once and never
        written again.
      BATCH: The contents depend only on the plan and on the argument that many calls share
        (`ArrayOps.per_batch`). The contents are computed once per shared argument and never
        written again.
      WORKSPACE: The memory is a part of the workspace, a single allocation per call.
      ALONE: The buffer has a separate allocation, which exists from its first step to its last.
    """

    ARGUMENT = enum.auto()
    CONSTANT = enum.auto()
    BATCH = enum.auto()
    WORKSPACE = enum.auto()
    ALONE = enum.auto()


class Buffer(NamedTuple):
    """An array of a plan, stored in row-major order.

    `offset` is the position of the array in the workspace, in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    memory: Memory
    offset: int = 0

    bytes = property(_bytes)


class View(NamedTuple):
    """A part of a buffer, stored row by row, with the array attributes that the steps read.

    Attributes:
      buffer: The index of the buffer.
      offset: The first byte of the part, a multiple of `kernels_pallas.kernel.ALIGNMENT`.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: str

    bytes = property(_bytes)

    def reshape(self, *shape: Any) -> "View":
        """Return a view of the same memory in another shape of the same size. One number of the
        shape may be -1.
        """
        flat = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = math.prod(x for x in flat if x != -1)
        size = math.prod(self.shape)
        full = tuple(size // max(known, 1) if x == -1 else x for x in flat)
        if math.prod(full) != size:
            raise ValueError(f"shape must have the {size} elements of {self.shape}, got {full}")
        return self._replace(shape=full)


class Launch(NamedTuple):
    """A launch of a kernel. An `in_place` kernel overwrites its last inputs. If `beside` is set,
    the kernel runs concurrently with the next steps, until the `Join` with the same number.
    """

    kernel: Kernel | TritonKernel
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    beside: int | None = None

    @property
    def name(self) -> str:
        return self.kernel.name


class Derived(NamedTuple):
    """A derived step (`nsa_core.array_ops`), which the framework computes.

    Attributes:
      static: The arguments of the step that are not arrays, by name.
      writes: The outputs, which are new buffers or the first buffer of the field `reads`. If the
        output is the first buffer of the field `reads`, the function writes into that buffer and
        returns nothing.
    """

    function: Callable[..., Any]
    static: tuple[tuple[str, Hashable], ...]
    reads: tuple[View, ...]
    writes: tuple[View, ...]

    @property
    def name(self) -> str:
        return self.function.__name__.removeprefix("_")

    @property
    def in_place(self) -> bool:
        return bool(self.reads) and self.writes == self.reads[:1]


class Join(NamedTuple):
    """The end of a launch that ran `beside` other steps.

    From a `Join` on, the buffers of its launch may be reused.
    """

    beside: int
    reads: tuple[View, ...]
    writes: tuple[View, ...]

    name = "join"


type Step = Launch | Derived | Join


def by_address(step: Step) -> TypeGuard[Launch]:
    """Return whether the step needs only addresses of buffers, and no tensors."""
    return isinstance(step, Launch) and isinstance(step.kernel, Kernel)


def touched_by_torch(steps: Iterable[Step]) -> set[int]:
    """Return the buffers that must be tensors, since torch reads or writes them."""
    steps = (x for x in steps if not by_address(x) and not isinstance(x, Join))
    return {x.buffer for step in steps for x in (*step.reads, *step.writes)}


class Plan(NamedTuple):
    """The steps of a call.

    Attributes:
      buffers: The buffers by index. The arguments come first.
      constants: The derived steps that compute the constants, in order. The steps in `constants`
        run once per plan.
      batch: The derived steps that compute the batch buffers, in order. The steps in `batch` run
        once for each array that a caller passes as the argument `shared`.
      results: The results, which are whole buffers with separate allocations.
      begins: For each step, the `ALONE` buffers that the step is the first to write.
      ends: For each step, the `ALONE` buffers and the arguments that no later step uses.
      released: Arguments whose memory may be freed after the last step that uses them.
    """

    arguments: int
    buffers: tuple[Buffer, ...]
    constants: tuple[Derived, ...]
    batch: tuple[Derived, ...]
    shared: int | None
    steps: tuple[Step, ...]
    results: tuple[View, ...]
    workspace_bytes: int
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    released: frozenset[int]

    @property
    def kernels(self) -> list[Kernel]:
        """The Mosaic kernels of the plan, without repetitions."""
        launches = (x.kernel for x in self.steps if isinstance(x, Launch))
        return list(dict.fromkeys(x for x in launches if isinstance(x, Kernel)))

    def __str__(self) -> str:
        return "\n".join(f"{type(x).__name__.lower()} {x.name}" for x in self.steps)

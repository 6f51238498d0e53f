"""Starts asynchronous products on the tensor cores of Hopper, as wgmma instructions in inline PTX.

`plgpu.wgmma` requires accumulators that were set to zero, and adds the offset of every step to a
64-bit descriptor in registers. In this module a new sum needs no zeroed accumulator (scale-d 0),
and offsets are constants in the text of the instruction.

A product is pending from its start, by the function `product` or `added`, until the function `wait`
returns its registers. While a product is pending, no instruction may access its registers or the
registers of its left operand. While a product is pending, no iteration of a loop may begin. While a
product is pending, a loop may compute registers for a later product only if the same iteration
fences and starts the later product. If a kernel breaks the rules of pending products, ptxas waits
after every instruction, and reports remarks C7510 to C7514 (`Cubin.remarks`). The assembler ptxas
deletes a product whose result is unused.

An operand is an array `[slabs, rows, columns per slab]` of 16-bit numbers in shared memory. Each
slab is one swizzled box (`operands.py`). `Q K^T` sums along the rows of both operands. For `P V`, V
is read transposed. Numbers in e4m3 are stored in pairs, int16, and a pair counts as a column.
Operands in e4m3 are never read transposed, since wgmma cannot transpose e4m3.

The PTX ISA defines the descriptor of an operand ("Matrix descriptor format"):

| bits     | content             |
|----------|---------------------|
| 0 to 13  | address / 16        |
| 16 to 29 | leading offset / 16 |
| 32 to 45 | stride offset / 16  |
| 62 to 63 | swizzle             |
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.specs.tile import ROWS

THREADS = 128  # threads of a warpgroup, which hold the 64 rows and the columns of a result
STEP = 16  # number of columns of the left operand that one instruction reads
BYTES = 2  # bytes per column of a row; a column is one number, or two numbers in e4m3
SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes of a slab's row, and their code in a descriptor
MAX_COLUMNS = 256


class Operand(NamedTuple):
    """A matrix in shared memory.

    In the tiling of Mosaic, the matrix has the shape `[slabs, rows / 8, 1, 8, columns per slab]`.

    Attributes:
      ref: The memory of the matrix.
      transposed: Whether products read the matrix as `[width, rows]`. Only a right operand may be
        transposed.
      some: First row and number of rows that are used, multiples of 8; None means all.
    """

    ref: ir.Value
    transposed: bool = False
    some: tuple[int, int] | None = None

    @property
    def _shape(self) -> tuple[int, int, int]:
        slabs, tiles, _, height, slab = ir.MemRefType(self.ref.type).shape
        return slabs, tiles * height, slab

    @property
    def dtype(self) -> ir.Type:
        return ir.MemRefType(self.ref.type).element_type

    @property
    def rows(self) -> int:
        return self._shape[1] if self.some is None else self.some[1]

    @property
    def width(self) -> int:
        return self._shape[0] * self._shape[2]

    @property
    def _stride(self) -> int:
        """Return the number of bytes from one group of eight rows to the next."""
        return 8 * self._shape[2] * BYTES

    @property
    def _slab_bytes(self) -> int:
        return self._shape[1] * self._shape[2] * BYTES

    def word(self) -> ir.Value:
        """Return the lower word of the first step's descriptor."""
        address = llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(self.ref))
        if self.some is not None and self.some[0]:
            address = arith.addi(address, number(self.some[0] // 8 * self._stride))
        word = arith.shrui(arith.andi(address, number(0x3FFFF)), number(4))
        leading = self._slab_bytes if self.transposed else 0
        return arith.ori(word, number(leading >> 4 << 16)) if leading else word

    def descriptor(self, name: str, word: str, step: int) -> str:
        """Return PTX that computes the descriptor `name` of a step. `word` is the register with
        the result of `word()`.
        """
        high = self._stride >> 4 | SWIZZLES[self._shape[2] * BYTES] << 30
        offset = self._offset(step)
        low = f"add.u32 low, {word}, {offset};" if offset else f"mov.b32 low, {word};"
        return f"{low} mov.b32 high, {high}; mov.b64 {name}, {{low, high}};"

    def _offset(self, step: int) -> int:
        """Return the offset of this step's data from the data of the first step, in units of 16
        bytes.
        """
        if self.transposed:  # a step is sixteen rows
            return step * 2 * self._stride >> 4
        slab, column = divmod(step * STEP, self._shape[2])
        return slab * self._slab_bytes + column * BYTES >> 4


def product(left: Operand | Sequence[ir.Value], right: Operand) -> list[ir.Value]:
    """Start `left @ right.T`.

    `left` may be in registers. The product sums over the columns of the narrower operand.

    Returns:
      Pending registers, in the order of `registers`.

    Raises:
      ValueError: No wgmma instruction supports the sizes.
    """
    if not isinstance(left, Operand):
        # A register holds two numbers.
        depth = min(len(left) * 2 * THREADS // ROWS, right.width)
        return _start([], left, _registers_of_step, right, right.rows, depth, flags="0")

    def of_step(step: int, word: str) -> tuple[str, str]:
        return left.descriptor("a", word, step), "a"

    words, depth = [left.word()], min(left.width, right.width)
    return _start([], words, of_step, right, right.rows, depth, flags="0, 0")


def added(
    total: Sequence[ir.Value], left: Sequence[ir.Value], right: Operand
) -> list[ir.Value]:
    """Start `total + left @ right` if `right` is transposed, otherwise `total + left @
    right.T`. `left` and `total` are registers. The function `added` returns pending registers, and
    raises the same errors as the function `product`.
    """
    columns, depth = right.rows, right.width
    if right.transposed:
        columns, depth = depth, columns
    flags = str(int(right.transposed))
    return _start(total, left, _registers_of_step, right, columns, depth, flags)


def _registers_of_step(step: int, word: str) -> tuple[str, str]:
    """The function `of_step` of `_start` for a left operand in registers. Return the PTX and
    the left operand of a step.
    """
    first = int(word.removeprefix("$")) + 4 * step
    return "", "{" + ",".join(f"${first + i}" for i in range(4)) + "}"


def _start(
    total: Sequence[ir.Value],
    words: Sequence[ir.Value],
    of_step: Callable[[int, str], tuple[str, str]],
    right: Operand,
    columns: int,
    depth: int,
    flags: str,
) -> list[ir.Value]:
    """Start a product in its own group of wgmma instructions, and return its pending registers.

    Args:
      total: Registers to which the product is added, or empty.
      words: Registers of the left operand, or `[left.word()]` for a left operand in shared memory.
      of_step: Function that returns PTX and the left operand of a step. The PTX precedes the
        instruction of the step. The arguments of `of_step` are the step and the first of `words`.
      right: The right operand.
      columns: Number of columns of the result.
      depth: Number of columns over which the product sums.
      flags: Which operands are transposed.

    Raises:
      ValueError: No wgmma instruction supports the sizes.
    """
    if columns % 8 or columns > MAX_COLUMNS or depth % STEP:
        raise ValueError(
            f"columns must have a size that wgmma supports, got {columns} columns and a depth of "
            f"{depth}"
        )
    # Operands of the PTX: results, registers to add to, the left operand, the right operand.
    count = columns // 2
    left_word = count + len(total)
    sums = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    kind, step_depth, flags = str(right.dtype), STEP, f", {flags}"
    if isinstance(right.dtype, ir.IntegerType):
        kind, step_depth, flags = "e4m3", 2 * STEP, ""
    lines = ["{ .reg .pred p; .reg .b32 low, high; .reg .b64 a, b;"]
    for step in range(depth // STEP):
        before, left = of_step(step, f"${left_word}")
        lines += [
            f"setp.ne.b32 p, {int(bool(total) or step > 0)}, 0;",
            before,
            right.descriptor("b", f"${left_word + len(words)}", step),
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{step_depth}.f32.{kind}.{kind} "
            f"{sums}, {left}, b, p, 1, 1{flags};",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    constraints = ["=&f"] * count + [str(i) for i in range(len(total))]
    constraints += ["r"] * (len(words) + 1)
    types = [ir.F32Type.get()] * count
    return _asm("\n".join(lines), constraints, types, [*total, *words, right.word()])


def fence(*groups: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Emit a fence, and return the given registers. Products that start after the fence may read
    the registers and accumulate in them.
    """
    return _hold("wgmma.fence.sync.aligned;", groups)


def wait(running: int, *groups: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Wait until at most the `running` newest products are pending. Return the registers of the
    finished products.
    """
    return _hold(f"wgmma.wait_group.sync.aligned {running};", groups)


def registers(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return the 32-bit registers of an array `[64, columns]` in the layout of products, in the
    order of the instruction. Each register has one float32 or two 16-bit numbers.
    """
    float32 = isinstance(array.mlir_dtype, ir.F32Type)
    kind = ir.F32Type.get() if float32 else i32()
    found = []
    for vector in array.registers.flat:
        count = mgpu_utils.bitwidth(vector.type) // 32
        vector = llvm.bitcast(ir.VectorType.get((count,), kind), vector)
        found += [llvm.extractelement(vector, number(i)) for i in range(count)]
    return found


def array(registers: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    """Build a float32 array `[64, columns]` from its registers."""
    layout = mgpu.WGMMA_LAYOUT
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    vectors = np.empty(len(registers) // 2, object)
    for i in range(len(vectors)):
        vector = llvm.mlir_undef(pair)
        for j in range(2):
            vector = llvm.insertelement(vector, registers[2 * i + j], number(j))
        vectors[i] = vector
    shape = layout.registers_shape((ROWS, 2 * len(registers)))
    return fragments(vectors.reshape(shape), layout)


def array_of_pairs(registers: Sequence[ir.Value], dtype: ir.Type) -> mgpu.FragmentedArray:
    """Build a 16-bit array `[64, columns]` from its registers, in the order of `registers`."""
    layout = mgpu.WGMMA_LAYOUT
    pair, single = ir.VectorType.get((2,), dtype), ir.VectorType.get((1,), i32())
    vectors = np.empty(len(registers), object)
    for i, x in enumerate(registers):
        x = llvm.insertelement(llvm.mlir_undef(single), x, number(0))
        vectors[i] = llvm.bitcast(pair, x)
    shape = layout.registers_shape((ROWS, 4 * len(registers)))
    signed = True if isinstance(dtype, ir.IntegerType) else None
    return fragments(vectors.reshape(shape), layout, signed)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def number(value: int) -> ir.Value:
    """Return a constant of 32 bits."""
    return arith.constant(i32(), value)


def fragments(registers: np.ndarray, layout, signed: bool | None = None):
    """Return an array that consists of the given registers.

    `signed` states whether integers in the array are signed.
    """
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _hold(instruction: str, groups: Sequence[Sequence[ir.Value]]) -> list[list[ir.Value]]:
    """Return registers that compilers do not move across an instruction."""
    values = [value for group in groups for value in group]
    letters = ["f" if value.type == ir.F32Type.get() else "r" for value in values]
    constraints = [f"={letter}" for letter in letters] + [str(i) for i in range(len(values))]
    held = iter(_asm(instruction, constraints, [value.type for value in values], values))
    return [[next(held) for _ in group] for group in groups]


def _asm(text: str, constraints, types, values) -> list[ir.Value]:
    """Emit inline PTX, and return the results of the instruction. `types` has the types of the
    results.
    """
    whole = llvm.StructType.get_literal(types) if types else ir.Type.parse("!llvm.void")
    done: Any = llvm.inline_asm(
        whole, list(values), text, ",".join(constraints), asm_dialect=0, has_side_effects=True
    )
    return [llvm.extractvalue(kind, done, [i]) for i, kind in enumerate(types)]

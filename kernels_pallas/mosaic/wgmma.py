"""Asynchronous products of Hopper's tensor cores, as text of PTX.

`plgpu.wgmma` multiplies into accumulators that were zeroed, and adds the offset of every step to
a 64-bit descriptor in registers. Here a product that adds to nothing starts from nothing
(scale-d 0), and offsets are constants of the instruction's text.

A product is under way from `product` until `wait` gives its registers back. Until then nothing
may touch them, nor those of its left operand; no round of a loop may begin; and what a later
product reads may not be made, unless a `fence` follows. Else ptxas waits after every
instruction (its remarks C7510 to C7514, which `Cubin.remarks` keeps).

Operands lie in shared memory in slabs `[slabs, rows, slab]` of 16-bit numbers, each slab one
swizzled box (`operands.py`). Along a row lies the sum of `Q K^T`, and the result's columns of
`P V`: the right operand of the latter is read transposed.

    descriptor   bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16,
                 62-63 swizzle; PTX ISA, "Matrix descriptor format"
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

ROWS = 64  # of the result
THREADS = 128  # of a warpgroup, over which rows and columns lie
STEP = 16  # columns of the left operand that one instruction takes
BYTES = 2  # of a number
SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes of a row of a slab, and what a descriptor calls it
MOST_COLUMNS = 256


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix in shared memory: its slabs `[slabs, rows / 8, 1, 8, slab]`, as Mosaic tiles them.

    Attributes:
      ref: of it.
      transposed: read as `[width, rows]`.
    """

    ref: ir.Value
    transposed: bool = False

    @property
    def _shape(self) -> tuple[int, int, int]:
        slabs, tiles, _, height, slab = ir.MemRefType(self.ref.type).shape
        return slabs, tiles * height, slab

    @property
    def dtype(self) -> ir.Type:
        return ir.MemRefType(self.ref.type).element_type

    @property
    def rows(self) -> int:
        return self._shape[1]

    @property
    def width(self) -> int:
        return self._shape[0] * self._shape[2]

    @property
    def _stride(self) -> int:
        """Bytes from eight rows to the next eight."""
        return 8 * self._shape[2] * BYTES

    @property
    def _slab_bytes(self) -> int:
        return self._shape[1] * self._shape[2] * BYTES

    @property
    def high(self) -> int:
        """The descriptor's upper word."""
        return self._stride >> 4 | SWIZZLES[self._shape[2] * BYTES] << 30

    def low(self) -> ir.Value:
        """The descriptor's lower word, of the operand's first step."""
        i32 = ir.IntegerType.get_signless(32)
        address = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(self.ref))
        low = arith.shrui(arith.andi(address, _number(0x3FFFF)), _number(4))
        leading = self._slab_bytes if self.transposed else 0
        return arith.ori(low, _number(leading >> 4 << 16)) if leading else low

    def offset(self, step: int) -> int:
        """Of a step, what is added to the lower word."""
        if self.transposed:  # a step is sixteen rows
            return step * 2 * self._stride >> 4
        slab, column = divmod(step * STEP, self._shape[2])
        return slab * self._slab_bytes + column * BYTES >> 4


def product(
    total: Sequence[ir.Value] | None, left: Operand | Sequence[ir.Value], right: Operand
) -> list[ir.Value]:
    """Starts `total + left @ right.T`, or `left @ right` where `right` is transposed.

    Args:
      total: float32 registers of `[64, columns]`, as `registers` has them; None: nothing.
      left: `[64, width]` in shared memory, or its registers.
      right: in shared memory.

    Returns:
      Registers that are under way.

    Raises:
      ValueError: no instruction has these sizes.
    """
    columns, depth = right.rows, right.width
    if right.transposed:
        columns, depth = depth, columns
    if isinstance(left, Operand):
        depth = min(depth, left.width)
        words = [left.low()]
    else:
        words = list(left)
    if columns % 8 or columns > MOST_COLUMNS or depth % STEP:
        raise ValueError(f"no product of {columns} columns over a depth of {depth}")
    if not isinstance(left, Operand) and len(words) != ROWS * depth // (2 * THREADS):
        raise ValueError(f"{len(words)} registers for weights of {depth} columns")
    count, steps = columns // 2, depth // STEP
    # Operands of the text: results, what they add to, the left operand, the right one.
    first_word = count * (1 if total is None else 2)
    right_word = f"${first_word + len(words)}"
    sums = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    kind = str(right.dtype)
    lines = ["{ .reg .pred p; .reg .b32 low, high; .reg .b64 a, b;"]

    def descriptor(name: str, word: str, operand: Operand, step: int) -> str:
        offset, high = operand.offset(step), operand.high
        add = f"add.u32 low, {word}, {offset};" if offset else f"mov.b32 low, {word};"
        return f"{add} mov.b32 high, {high}; mov.b64 {name}, {{low, high}};"

    for step in range(steps):
        adds = int(total is not None or step > 0)
        lines.append(f"setp.ne.b32 p, {adds}, 0;")
        if isinstance(left, Operand):
            lines.append(descriptor("a", f"${first_word}", left, step))
            a, flags = "a", f"0, {int(right.transposed)}"
        else:
            four = range(first_word + 4 * step, first_word + 4 * step + 4)
            a, flags = "{" + ",".join(f"${i}" for i in four) + "}", f"{int(right.transposed)}"
        lines.append(descriptor("b", right_word, right, step))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{kind}.{kind} "
            f"{sums}, {a}, b, p, 1, 1, {flags};"
        )
    lines.append("wgmma.commit_group.sync.aligned; }")
    constraints = ["=&f"] * count
    if total is not None:
        constraints += [str(i) for i in range(count)]
    constraints += ["r"] * (len(words) + 1)
    f32 = ir.F32Type.get()
    return _asm(
        "\n".join(lines), constraints, [f32] * count, [*(total or ()), *words, right.low()]
    )


def fence(*groups: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """The registers again; products started from here on may read and add to them."""
    return _hold("wgmma.fence.sync.aligned;", groups)


def wait(running: int, *groups: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """The registers of products, once at most the `running` newest are under way."""
    return _hold(f"wgmma.wait_group.sync.aligned {running};", groups)


def registers(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Of `[64, columns]` in the layout of products: 32-bit registers in the order in which the
    instruction names them, float32 or two 16-bit numbers each.
    """
    kind = ir.F32Type.get() if _is_float32(array) else ir.IntegerType.get_signless(32)
    result = []
    for vector in array.registers.flat:
        count = mgpu_utils.bitwidth(vector.type) // 32
        vector = llvm.bitcast(ir.VectorType.get((count,), kind), vector)
        result += [llvm.extractelement(vector, _number(i)) for i in range(count)]
    return result


def result(values: Sequence[ir.Value], layout) -> mgpu.FragmentedArray:
    """float32 `[64, columns]` of registers."""
    layout = layout.to_mgpu()
    shape = layout.registers_shape((ROWS, 2 * len(values)))
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    vectors = np.empty(len(values) // 2, object)
    for i in range(len(vectors)):
        vector = llvm.mlir_undef(pair)
        for j in range(2):
            vector = llvm.insertelement(vector, values[2 * i + j], _number(j))
        vectors[i] = vector
    return mgpu.FragmentedArray(
        _registers=vectors.reshape(shape), _layout=layout, _is_signed=None
    )


def _is_float32(array: mgpu.FragmentedArray) -> bool:
    return isinstance(array.mlir_dtype, ir.F32Type)


def _hold(instruction: str, groups: Sequence[Sequence[ir.Value]]) -> list[list[ir.Value]]:
    """Registers that nothing moves across an instruction."""
    values = [value for group in groups for value in group]
    letters = ["f" if value.type == ir.F32Type.get() else "r" for value in values]
    constraints = [f"={letter}" for letter in letters] + [str(i) for i in range(len(values))]
    held = iter(_asm(instruction, constraints, [value.type for value in values], values))
    return [[next(held) for _ in group] for group in groups]


def _asm(text: str, constraints, types, values) -> list[ir.Value]:
    """The results of an instruction; `types`: theirs."""
    result = llvm.StructType.get_literal(types) if types else ir.Type.parse("!llvm.void")
    done: Any = llvm.inline_asm(
        result, list(values), text, ",".join(constraints), asm_dialect=0, has_side_effects=True
    )
    return [llvm.extractvalue(kind, done, [i]) for i, kind in enumerate(types)]


def _number(number: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), number)

"""What a warp does by itself: a 32-bit word a lane, and the instructions on words.

For bodies of `plgpu.inline_mgpu`; Pallas has neither shuffles nor votes. Addresses are in
bytes. A program that takes its instructions as an argument also runs where kernels are interpreted,
on an object with the same functions (`interpreter.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())
TYPES = {"bfloat16": "bf16", "float16": "f16"}
type Number = "Word | int | float"


def _i32():
    return ir.IntegerType.get_signless(32)


class Word:
    """An integer, a float32 or a truth value of each lane; a Python number is a constant.

    Comparisons are of signed integers; `//` and `%` are for integers from 0; `>>` fills with
    zeros.
    """

    def __init__(self, value: Any):
        self.value = value

    @property
    def real(self) -> bool:
        return isinstance(self.value.type, ir.F32Type)

    def __add__(self, other: Number) -> "Word":
        return _apply(arith.addf if self.real else arith.addi, self, other)

    def __radd__(self, other: int) -> "Word":
        return self + other

    def __rmul__(self, other: int) -> "Word":
        return self * other

    def __rsub__(self, other: int) -> "Word":
        return word(other) - self

    def __sub__(self, other: Number) -> "Word":
        return _apply(arith.subf if self.real else arith.subi, self, other)

    def __mul__(self, other: Number) -> "Word":
        return _apply(arith.mulf if self.real else arith.muli, self, other)

    def __floordiv__(self, other: Number) -> "Word":
        return _apply(arith.divui, self, other)

    def __mod__(self, other: Number) -> "Word":
        return _apply(arith.remui, self, other)

    def __rshift__(self, other: Number) -> "Word":
        return _apply(arith.shrui, self, other)

    def __and__(self, other: Number) -> "Word":
        return _apply(arith.andi, self, other)

    def __lshift__(self, other: Number) -> "Word":
        return _apply(arith.shli, self, other)

    def __or__(self, other: Number) -> "Word":
        return _apply(arith.ori, self, other)

    def __xor__(self, other: Number) -> "Word":
        return _apply(arith.xori, self, other)

    def __lt__(self, other: Number) -> "Word":
        return _compare("slt", self, other)

    def __le__(self, other: Number) -> "Word":
        return _compare("sle", self, other)

    def __gt__(self, other: Number) -> "Word":
        return _compare("sgt", self, other)

    def __ge__(self, other: Number) -> "Word":
        return _compare("sge", self, other)


def word(x: Number) -> Word:
    if isinstance(x, Word):
        return x
    return Word(utils.c(x, ir.F32Type.get() if isinstance(x, float) else _i32()))


def _apply(operation, *operands: Number) -> Word:
    return Word(operation(*(word(x).value for x in operands)))


def _compare(kind, a, b) -> Word:
    a, b = word(a), word(b)
    if a.real:
        ordered = getattr(arith.CmpFPredicate, "O" + kind.removeprefix("s").upper())
        return Word(arith.cmpf(ordered, a.value, b.value))
    return Word(arith.cmpi(getattr(arith.CmpIPredicate, kind), a.value, b.value))


def same(a: Number, b: Number) -> Word:
    return _compare("eq", a, b)


def different(a: Number, b: Number) -> Word:
    return _compare("ne", a, b)


def below(x: Number, count: Number) -> Word:
    """`0 <= x < count`, for `count` from 0."""
    return _compare("ult", x, count)


def where(condition: Word, a: Number, b: Number) -> Word:
    return _apply(arith.select, condition, a, b)


def smaller(a: Number, b: Number) -> Word:
    return _apply(arith.minsi, a, b)


def larger(a: Number, b: Number) -> Word:
    return _apply(arith.maximumf if word(a).real else arith.maxsi, a, b)


def number(condition: Word) -> Word:
    """1 or 0."""
    return Word(arith.extui(_i32(), condition.value))


def bit(place: Number) -> Word:
    """The integer with this bit alone, `place` from 0 to 31."""
    return word(1) << place


def ones(x: Word) -> Word:
    """How many bits are set."""
    return _ptx("popc.b32 $0, $1;", x)


def bits(x: Word) -> Word:
    """A float32 as an integer; those from 0 are ordered as the floats are."""
    return Word(arith.bitcast(_i32(), x.value))


def real(x: Word) -> Word:
    """The float32 with these bits."""
    return Word(arith.bitcast(ir.F32Type.get(), x.value))


def size(x: Word) -> Word:
    """The absolute value of a float32."""
    return real(bits(x) & 0x7FFFFFFF)


def floating(x: Word) -> Word:
    """An integer as a float32."""
    return Word(arith.sitofp(ir.F32Type.get(), x.value))


def log2(x: Word) -> Word:
    """Of float32, within 2^-22, or relative to a result beyond 1."""
    return _ptx("lg2.approx.f32 $0, $1;", x, result=ir.F32Type.get())


def pack(low: Word, high: Word, dtype: str) -> Word:
    """Two float32 as two numbers of `dtype` in one word."""
    return _ptx(f"cvt.rn.{TYPES[dtype]}x2.f32 $0, $2, $1;", low, high)


def unpack(x: Word, dtype: str) -> list[Word]:
    """The two numbers of `dtype` in a word as float32, the low one first."""
    if dtype == "bfloat16":
        return [real(x << 16), real(x & -(1 << 16))]
    text = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.f32.f16 $0, h%d; }"
    return [_ptx(text % half, x, result=ir.F32Type.get()) for half in range(2)]


def codes(x: Sequence[Word]) -> Word:
    """Four float32 of at most 448 as numbers of e4m3 in a word, rounded to the nearest."""
    convert = "cvt.rn.satfinite.e4m3x2.f32"
    text = f"{{ .reg .b16 h<2>; {convert} h0, $2, $1; {convert} h1, $4, $3; "
    return _ptx(text + "mov.b32 $0, {h0, h1}; }", *x)


def divided(a: Number, b: Number) -> Word:
    """`a / b` of float32, rounded to the nearest."""
    return _ptx("div.rn.f32 $0, $1, $2;", a, b, result=ir.F32Type.get())


def lane() -> Word:
    return Word(utils.thread_idx()) & 31


def warp() -> Word:
    """Number of the warp in its warpgroup."""
    return warp_of_cta() % 4


def warp_of_cta() -> Word:
    """Number of the warp in its CTA."""
    return Word(utils.warp_idx())


def _ptx(text: str, *operands: Number, result=None, together=False, reads=False) -> Word:
    """One instruction; `together`: all lanes take part; `reads`: memory, or what others do."""
    values = [word(x).value for x in operands]
    options = {"has_side_effects": reads, "convergent": together}
    return Word(utils.inline_ptx(text, *values, result_types=result or _i32(), **options))


def exchange(x: Word, distance: int) -> Word:
    """The float32 of the lane `distance` away, a power of two."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return _ptx(text, x, result=ir.F32Type.get(), together=True)


def shuffle(x: Word, source: Number) -> Word:
    """The integer of lane `source`."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return _ptx(text, x, source, together=True, reads=True)


def largest(x: Word) -> Word:
    """Of all lanes."""
    return _ptx("redux.sync.max.s32 $0, $1, 0xffffffff;", x, together=True, reads=True)


def smallest(x: Word) -> Word:
    """Of all lanes."""
    return _ptx("redux.sync.min.s32 $0, $1, 0xffffffff;", x, together=True, reads=True)


def votes(condition: Word) -> Word:
    """One bit a lane: where it holds."""
    return _ballot("ne", number(condition), 0)


def first_equal(a: Word, b: Word) -> Word:
    """The lowest lane where both are the same."""
    lanes = _ballot("eq", a, b)
    return _ptx("{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", lanes)


def _ballot(kind: str, a: Number, b: Number) -> Word:
    compare = f"setp.{kind}.b32 p, $1, $2;"
    vote = f"{{ .reg .pred p; {compare} vote.sync.ballot.b32 $0, p, 0xffffffff; }}"
    return _ptx(vote, a, b, together=True, reads=True)


def sync() -> None:
    """What lanes wrote before, all lanes read after."""
    utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True, convergent=True)


def shared(ref) -> Word:
    """Address of an array in shared memory."""
    return Word(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)))


def read(address: Word, offset: int = 0) -> Word:
    """The integer at an address in shared memory."""
    return _ptx(f"ld.shared.b32 $0, [$1+{offset}];", address, reads=True)


def write(address: Word, x: Number, offset: int = 0, only: Word | None = None) -> None:
    """Puts an integer in shared memory, where `only` holds."""
    text = f"st.shared.b32 [$0+{offset}], $1;"
    condition = None if only is None else only.value
    utils.inline_ptx(text, address.value, word(x).value, predicate=condition)


def join(address: Word, x: Word, only: Word) -> None:
    """Sets the bits of `x` in shared memory, where `only` holds; lanes may meet there."""
    text = "red.shared.or.b32 [$0], $1;"
    utils.inline_ptx(text, address.value, x.value, predicate=only.value)


def write_pair(address: Word, x: Word, y: Word, offset: int = 0) -> None:
    """Puts two float32 beside each other in shared memory, at a multiple of 8."""
    text = f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};"
    utils.inline_ptx(text, address.value, x.value, y.value)


def element(ref, *places: tuple[Number, int]):
    """Address in global memory: index and bytes a step of each axis."""
    i64 = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
    for index, size in places:
        step = arith.muli(arith.extsi(i64, word(index).value), utils.c(size, i64))
        address = arith.addi(address, step)
    return Word(address)


def fetch(address: Word, offset: int = 0) -> Word:
    """32 bits from global memory, which the kernel never writes."""
    return _ptx(f"ld.global.nc.b32 $0, [$1+{offset}];", address)


def prefetch(address: Word) -> None:
    """Asks for the line of global memory with this address, into the cache next to the warp."""
    utils.inline_ptx("prefetch.global.L1 [$0];", address.value, has_side_effects=True)


def put(address: Word, x: Number, only: Word) -> None:
    """Puts an integer in global memory, where `only` holds."""
    utils.inline_ptx(
        "st.global.b32 [$0], $1;", address.value, word(x).value, predicate=only.value
    )


def put_several(address: Word, values: Sequence[Word], only: Word) -> None:
    """Puts 2 or 4 integers in global memory, from a multiple of their bytes, where `only` holds."""
    listed = ", ".join(f"${i + 1}" for i in range(len(values)))
    utils.inline_ptx(
        f"st.global.v{len(values)}.b32 [$0], {{{listed}}};",
        address.value,
        *(x.value for x in values),
        predicate=only.value,
    )


def fetch_several(address: Word, count: int, only: Word) -> list[Word]:
    """2 or 4 integers from global memory that is read once and not written, from a multiple of
    their bytes; zeros where `only` does not hold.
    """
    listed = ", ".join(f"${i}" for i in range(count))
    load = f"ld.global.nc.L1::no_allocate.v{count}.b32 {{{listed}}}, [${count}];"
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {load} }}"
    result = llvm.StructType.get_literal([_i32()] * count)
    found: Any = llvm.inline_asm(
        result,
        [address.value, number(only).value],
        text,
        "=&r," * count + "l,r",
        asm_dialect=0,
        has_side_effects=True,
    )
    return [Word(llvm.extractvalue(_i32(), found, [i])) for i in range(count)]


def transposed(pair: Word) -> Word:
    """An 8 x 8 matrix of 16-bit numbers whose row `l // 4` lane `l` has the columns `2 * (l % 4)`
    and the next one of, transposed.
    """
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return _ptx(text, pair, together=True, reads=True)


def when(condition: Word, body) -> None:
    """`body()` where `condition` holds, which is the same in all lanes."""
    with utils.when(condition.value):
        body()


def repeat(times: Number, body, state, *, unrolled: bool = True):
    """`state = body(i, state)` for `i` below `times`; `state`: nested lists of words.

    `times` is the same in all lanes, or they part: what they do together then never ends.
    `unrolled`: the compilers may write several turns one after the other.
    """
    if not unrolled:
        times = _ptx("mov.b32 $0, $1;", times, reads=True)  # which LLVM cannot count

    def values(tree):
        return jax.tree.map(lambda x: x.value, tree)

    def step(i, inner):
        if not unrolled:
            utils.inline_ptx('.pragma "nounroll";', has_side_effects=True)  # for ptxas
        return values(body(Word(i), jax.tree.map(Word, inner)))

    found = utils.fori(word(times).value, values(state))(step).results
    return jax.tree.map(Word, found)


def scalar(number) -> Word:
    """What `inline_mgpu` gives for an argument of the layout `SCALAR`."""
    return Word(number.registers.flat[0])


def each(function, refs, numbers, matrices=(), layout=None) -> None:
    """Calls `function` in every warp of a Pallas kernel: with references, with scalars as
    words, and with matrices of this layout.
    """
    types = [plgpu.RefType()] * len(refs), [SCALAR] * len(numbers), [layout] * len(matrices)

    @plgpu.inline_mgpu(arg_types=[x for each in types for x in each], return_type=())
    def call(_, *arguments):
        rest = arguments[len(refs) :]
        words = map(scalar, rest[: len(numbers)])
        function(*arguments[: len(refs)], *words, *rest[len(numbers) :])
        return ()

    call(*refs, *numbers, *matrices)


def integer(x: float) -> int:
    """The bits of a float32 constant."""
    return np.float32(x).view(np.int32).item()

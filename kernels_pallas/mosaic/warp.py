"""The instructions of a warp on words.

A word is one value per lane, of 64 bits for addresses in global memory and of 32 bits for all other
values. The instructions are for bodies of `plgpu.inline_mgpu`, since Pallas has neither shuffles
nor votes. Addresses are in bytes. A program of a warp receives the instructions as an argument. In
the Pallas interpreter, the program receives an object with the same functions (`interpreter.py`).

Programs on clusters of CTAs also use asynchronous copies, products of 16 rows, and stores to
the shared memory of another CTA:

| instruction | PTX                                                                      |
|-------------|--------------------------------------------------------------------------|
| `copy`      | cp.async of 16 bytes                                                     |
| `multiply`  | mma.m16n8k16 with sums in float32                                        |
| `push`      | st.async, a store to a CTA of the cluster whose barrier counts the bytes |

A lane waits for its own copies, and then `sync` makes the copies visible to the other lanes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.mosaic.wgmma import i32

SCALAR = plgpu.Layout.WG_SPLAT(())
TYPES = {"bfloat16": "bf16", "float16": "f16"}
type Number = "Word | int | float"


def _operator(of_integers: Callable, of_floats: Callable | None = None) -> Callable:
    """Return a binary operator of `Word`.

    Without `of_floats` the operator supports only integers.
    """

    def apply(self, other: Number) -> "Word":
        return _apply(of_floats if of_floats and self.real else of_integers, self, other)

    return apply


def _comparison(kind: str) -> Callable[[Any, Any], "Word"]:
    return lambda a, b: _compare(kind, a, b)


class Word:
    """An integer, a float32, a truth value or a 64-bit address in each lane.

    A Python number becomes a constant.

    Comparisons of integers are signed. `//` and `%` need non-negative integers. `>>` fills with
    zeros.
    """

    def __init__(self, value: Any):
        self.value = value

    @property
    def real(self) -> bool:
        return isinstance(self.value.type, ir.F32Type)

    def __rsub__(self, other: int) -> "Word":
        return word(other) - self

    __add__ = __radd__ = _operator(arith.addi, arith.addf)
    __sub__ = _operator(arith.subi, arith.subf)
    __mul__ = __rmul__ = _operator(arith.muli, arith.mulf)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __rshift__ = _operator(arith.shrui)
    __lshift__ = _operator(arith.shli)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __xor__ = _operator(arith.xori)
    __lt__ = _comparison("slt")
    __le__ = _comparison("sle")
    __gt__ = _comparison("sgt")
    __ge__ = _comparison("sge")


def word(x: Number) -> Word:
    if isinstance(x, Word):
        return x
    return Word(utils.c(x, ir.F32Type.get() if isinstance(x, float) else i32()))


def _apply(operation, *operands: Number) -> Word:
    return Word(operation(*(word(x).value for x in operands)))


def _compare(kind: str, a: Number, b: Number) -> Word:
    a, b = word(a), word(b)
    if a.real:
        ordered = getattr(arith.CmpFPredicate, "O" + kind.removeprefix("s").upper())
        return Word(arith.cmpf(ordered, a.value, b.value))
    return Word(arith.cmpi(getattr(arith.CmpIPredicate, kind), a.value, b.value))


same, different = _comparison("eq"), _comparison("ne")
below = _comparison("ult")  # `0 <= x < count`, for a `count` of at least 0
where = functools.partial(_apply, arith.select)  # `where(condition, x, y)`
smaller = functools.partial(_apply, arith.minsi)


def larger(a: Number, b: Number) -> Word:
    return _apply(arith.maximumf if word(a).real else arith.maxsi, a, b)


def number(condition: Word) -> Word:
    """Return 1 in lanes in which the condition is true, and 0 in others."""
    return Word(arith.extui(i32(), condition.value))


def bit(place: Number) -> Word:
    """Return the integer in which only bit `place` (0 to 31) is set."""
    return word(1) << place


def ones(x: Word) -> Word:
    """Return the number of bits that are set."""
    return _ptx("popc.b32 $0, $1;", x)


def bits(x: Word) -> Word:
    """Return the bits of a float32 as an integer.

    The bits of non-negative numbers have the same order as the numbers.
    """
    return Word(arith.bitcast(i32(), x.value))


def real(x: Word) -> Word:
    """Convert the bits of a float32 to the float32."""
    return Word(arith.bitcast(ir.F32Type.get(), x.value))


def size(x: Word) -> Word:
    """Return the absolute value of a float32."""
    return real(bits(x) & 0x7FFFFFFF)


def floating(x: Word) -> Word:
    """Return an integer as a float32."""
    return Word(arith.sitofp(ir.F32Type.get(), x.value))


def pack(low: Word, high: Word, dtype: str) -> Word:
    """Convert two float32 to two numbers of `dtype` in one word."""
    return _ptx(f"cvt.rn.{TYPES[dtype]}x2.f32 $0, $2, $1;", low, high)


def unpack(x: Word, dtype: str) -> list[Word]:
    """Return the two numbers of `dtype` in a word as float32, the low one first."""
    if dtype == "bfloat16":
        return [real(x << 16), real(x & -(1 << 16))]
    text = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.f32.f16 $0, h%d; }"
    return [_to_float32(text % half)(x) for half in range(2)]


def codes(x: Sequence[Word]) -> Word:
    """Round four float32 of at most 448 to the nearest numbers of e4m3, and return a word with
    the four results.
    """
    convert = "cvt.rn.satfinite.e4m3x2.f32"
    text = f"{{ .reg .b16 h<2>; {convert} h0, $2, $1; {convert} h1, $4, $3; "
    return _ptx(text + "mov.b32 $0, {h0, h1}; }", *x)


def lane() -> Word:
    return Word(utils.thread_idx()) & 31


def warp() -> Word:
    """Return the index of the warp in its warpgroup."""
    return warp_of_cta() % 4


def warp_of_cta() -> Word:
    """Return the index of the warp in its CTA."""
    return Word(utils.warp_idx())


def _ptx(text: str, *operands: Number, result: Any = None, together=False, reads=False) -> Any:
    """Emit an instruction.

    Return the instruction's result as a word, or as a list of words if `result` is a list of types.

    Args:
      together: Whether all lanes execute the instruction together.
      reads: Whether the instruction reads memory or registers of other lanes.
    """
    values, several = [word(x).value for x in operands], isinstance(result, list)
    options = {"has_side_effects": reads, "convergent": together}
    found: Any = utils.inline_ptx(text, *values, result_types=result or i32(), **options)
    return list(map(Word, found)) if several else Word(found)


def _to_float32(text: str) -> Callable[..., Word]:
    """Return a function that emits an instruction and returns its result, a float32."""
    return lambda *operands: _ptx(text, *operands, result=ir.F32Type.get())


# The error of log2 is at most 2^-22 for inputs from 0.5 to 2. For other inputs it is at most
# 2^-22 times the result.
log2 = _to_float32("lg2.approx.f32 $0, $1;")
exp2 = _to_float32("ex2.approx.ftz.f32 $0, $1;")
divided = _to_float32("div.rn.f32 $0, $1, $2;")  # the quotient, rounded to the nearest
quotient = _to_float32("div.approx.ftz.f32 $0, $1, $2;")
multiply_add = _to_float32("fma.rn.ftz.f32 $0, $1, $2, $3;")  # `a * b + c`, rounded once


def _do(text: str, *operands: Number, only: "Word | None" = None, together=False) -> None:
    """Emit an instruction without a result. The instruction runs in the lanes in which `only`
    is true.
    """
    values = [word(x).value for x in operands]
    predicate = None if only is None else only.value
    utils.inline_ptx(text, *values, predicate=predicate, convergent=together)


def _listed(first: int, count: int) -> str:
    """Return the operands of an instruction from `first` on, as a vector."""
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def exchange(x: Word, distance: int) -> Word:
    """Return the float32 of lane `lane ^ distance`, where `distance` is a power of two."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return _ptx(text, x, result=ir.F32Type.get(), together=True)


def _of_warp(text: str) -> Callable[..., Word]:
    """Return a function that emits an instruction and returns its result. All lanes execute the
    instruction together.
    """
    return functools.partial(_ptx, text, together=True, reads=True)


shuffle = _of_warp("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")  # the integer of a lane
largest = _of_warp("redux.sync.max.s32 $0, $1, 0xffffffff;")  # the largest integer of all lanes
smallest = _of_warp("redux.sync.min.s32 $0, $1, 0xffffffff;")
# The transpose of an 8 x 8 matrix of 16-bit numbers. Lane `l` has the columns `2 * (l % 4)` and
# `2 * (l % 4) + 1` of row `l // 4`.
transposed = _of_warp("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


def votes(condition: Word) -> Word:
    """Return a word with one bit per lane, which is set if the condition holds."""
    return _ballot("ne", number(condition), 0)


def first_equal(a: Word, b: Word) -> Word:
    """Return the index of the lowest lane in which `a` and `b` are equal."""
    lanes = _ballot("eq", a, b)
    return _ptx("{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", lanes)


def _ballot(kind: str, a: Number, b: Number) -> Word:
    compare = f"setp.{kind}.b32 p, $1, $2;"
    vote = f"{{ .reg .pred p; {compare} vote.sync.ballot.b32 $0, p, 0xffffffff; }}"
    return _of_warp(vote)(a, b)


def sync() -> None:
    """Make earlier writes of all lanes visible to all lanes."""
    _do("bar.warp.sync 0xffffffff;", together=True)


def shared(ref) -> Word:
    """Return the address of an array in shared memory."""
    return Word(llvm.ptrtoint(i32(), utils.memref_ptr(ref)))


def read(address: Word, offset: int = 0) -> Word:
    """Return the integer at an address in shared memory."""
    return _ptx(f"ld.shared.b32 $0, [$1+{offset}];", address, reads=True)


def write(address: Word, x: Number, offset: int = 0, only: Word | None = None) -> None:
    """Write an integer to shared memory, if `only` holds."""
    _do(f"st.shared.b32 [$0+{offset}], $1;", address, x, only=only)


def join(address: Word, x: Word, only: Word) -> None:
    """Set the bits of `x` in the word at an address in shared memory, if `only` is true.
    Several lanes may have the same address.
    """
    _do("red.shared.or.b32 [$0], $1;", address, x, only=only)


def write_pair(address: Word, x: Word, y: Word, offset: int = 0) -> None:
    """Write two neighbouring float32 to shared memory. The address must be a multiple of 8."""
    _do(f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};", address, x, y)


def element(ref, *places: tuple[Number, int]):
    """Return the address in global memory of an element of `ref`.

    Each argument in `axes` is a pair of an index along an axis and the axis's stride in bytes.
    """
    i64 = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
    for index, size in places:
        step = arith.muli(arith.extsi(i64, word(index).value), utils.c(size, i64))
        address = arith.addi(address, step)
    return Word(address)


def fetch(address: Word, offset: int = 0) -> Word:
    """Load 32 bits from global memory.

    The kernel must never write the memory from which it loads.
    """
    return _ptx(f"ld.global.nc.b32 $0, [$1+{offset}];", address)


def fetch_int(array, index: Number) -> Word:
    """Load an element of an int32 array from global memory."""
    return fetch(element(array, (index, 4)))


def prefetch(address: Word) -> None:
    """Prefetch the cache line that contains an address of global memory into L1."""
    _do("prefetch.global.L1 [$0];", address)


def put(address: Word, x: Number, only: Word) -> None:
    """Write an integer to global memory, if `only` holds."""
    _do("st.global.b32 [$0], $1;", address, x, only=only)


def put_several(address: Word, values: Sequence[Word], only: Word) -> None:
    """Write 2 or 4 integers to global memory if `only` holds. The address must be a multiple of
    the total size in bytes.
    """
    text = f"st.global.v{len(values)}.b32 [$0], {_listed(1, len(values))};"
    _do(text, address, *values, only=only)


def fetch_several(address: Word, count: int, only: Word) -> list[Word]:
    """Read 2 or 4 integers from global memory that is read once and not written. The address must
    be a multiple of the total size in bytes. The result is zeros if `only` does not hold.
    """
    load = f"ld.global.nc.L1::no_allocate.v{count}.b32 {_listed(0, count)}, [${count}];"
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {load} }}"
    result = llvm.StructType.get_literal([i32()] * count)
    found: Any = llvm.inline_asm(
        result,
        [address.value, number(only).value],
        text,
        "=&r," * count + "l,r",
        asm_dialect=0,
        has_side_effects=True,
    )
    return [Word(llvm.extractvalue(i32(), found, [i])) for i in range(count)]


def when(condition: Word, body) -> None:
    """Run `body()` if `condition` is true. `condition` must have the same value in all lanes."""
    with utils.when(condition.value):
        body()


def repeat(times: Number, body, *state, unrolled: bool = True) -> Any:
    """Compute `state = body(i, *state)` for `i` below `times`.

    `state` has words, numbers, and nested lists of words and numbers. If `state` has one value,
    `repeat` returns the value instead of a list.

    `times` must be the same in all lanes, since diverging lanes deadlock in instructions that all
    lanes execute together. `unrolled` allows the compilers to unroll the loop.
    """
    tree, before = jax.tree.structure(state), _values(state)
    if not unrolled:
        # LLVM cannot know the result of inline PTX, and therefore does not unroll the loop.
        times = _ptx("mov.b32 $0, $1;", times, reads=True)

    def step(i, inner):
        if not unrolled:
            _do('.pragma "nounroll";')  # ptxas does not unroll the loop either
        return _values(body(Word(i), *jax.tree.unflatten(tree, map(Word, inner))))

    found = utils.fori(word(times).value, before)(step).results
    state = jax.tree.unflatten(tree, map(Word, found))
    return state[0] if len(state) == 1 else state


def _values(tree) -> list:
    return [word(x).value for x in jax.tree.leaves(tree)]


# Instructions that only programs on clusters use.


def widened(codes: Word) -> list[Word]:
    """Convert four numbers of e4m3 to float16, two in each word."""
    halves = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.rn.f16x2.e4m3x2 $0, h%d; }"
    return [_ptx(halves % i, codes) for i in range(2)]


def even_and_odd(x: Word) -> Word:
    """Return the bytes 0 and 2 of a word, then bytes 1 and 3."""
    return _ptx("prmt.b32 $0, $1, $1, 0x3120;", x)


def multiply(acc: Sequence[Word], a: Sequence[Word], b: Sequence[Word], dtype: str) -> list:
    """Return `acc + A B` of A `[16, 16]` and B `[16, 8]`.

    The PTX ISA defines the layout ("Matrix Fragments for mma.m16n8k16"). Lane `4 r + c` has pairs
    of columns of A, from 2 c and from 2 c + 8 on, in rows r and r + 8. Lane `4 r + c` has pairs of
    rows of B, from 2 c and from 2 c + 8 on, in column r. Lane `4 r + c` has columns 2 c and 2 c + 1
    of the result, in rows r and r + 8.
    """
    kind = TYPES[dtype]
    names = [_listed(*each) for each in ((0, 4), (4, 4), (8, 2), (10, 4))]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {', '.join(names)};"
    return _ptx(text, *a, *b, *acc, result=[ir.F32Type.get()] * 4, together=True)


def read_words(address: Word, count: int, offset: int = 0) -> list[Word]:
    """Read 2 or 4 neighbouring integers from shared memory. The address must be a multiple of
    the total size in bytes.
    """
    text = f"ld.shared.v{count}.b32 {_listed(0, count)}, [${count}+{offset}];"
    return _ptx(text, address, result=[i32()] * count, reads=True)


def read_transposed(address: Word, offset: int = 0) -> list[Word]:
    """Read four matrices of 8 rows of 16 bytes from shared memory, and transpose each matrix.

    Lane `l` passes the address of row `l % 8` of matrix `l // 8`. Of each matrix, lane `l` receives
    the 16-bit column `l // 4` of rows `2 (l % 4)` and `2 (l % 4) + 1`.
    """
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    text = f"{load} {_listed(0, 4)}, [$4+{offset}];"
    return _ptx(text, address, result=[i32()] * 4, together=True, reads=True)


def write_words(
    address: Word, words: Sequence[Word], offset: int = 0, only: Word | None = None
) -> None:
    """Write 2 or 4 neighbouring words to shared memory, if `only` holds. The address must be a
    multiple of the total size in bytes.
    """
    text = f"st.shared.v{len(words)}.b32 [$0+{offset}], {_listed(1, len(words))};"
    _do(text, address, *map(_integer, words), only=only)


def _integer(x: Word) -> Word:
    return bits(x) if x.real else x


def fetch_words(address: Word) -> list[Word]:
    """Load 4 adjacent words of global memory, which the kernel must never write."""
    text = f"ld.global.nc.v4.b32 {_listed(0, 4)}, [$4];"
    return _ptx(text, address, result=[i32()] * 4, reads=True)


def fetch_half(address: Word, dtype: str) -> Word:
    """Load a 16-bit number from global memory as float32.

    The kernel must never write the memory from which it loads.
    """
    load = f"ld.global.nc.b16 h, [$1]; cvt.f32.{TYPES[dtype]} $0, h;"
    return _to_float32(f"{{ .reg .b16 h; {load} }}")(address)


def put_words(address: Word, words: Sequence[Word], only: Word, offset: int = 0) -> None:
    """Write 2 or 4 neighbouring words to global memory, if `only` holds. The address must be a
    multiple of the total size in bytes.
    """
    text = f"st.global.v{len(words)}.b32 [$0+{offset}], {_listed(1, len(words))};"
    _do(text, address, *words, only=only)


def beyond(address: Word, steps: Word, size: int, more: Word | None = None) -> Word:
    """Return the address `address + steps * size + more` in global memory, in bytes."""
    text, values = "mad.wide.s32 $0, $2, $3, $1;", [address, steps, size]
    if more is not None:
        text = "{ .reg .b64 t, u; mad.wide.s32 t, $2, $3, $1; cvt.s64.s32 u, $4; "
        text, values = text + "add.s64 $0, u, t; }", [*values, more]
    return _ptx(text, *values, result=ir.IntegerType.get_signless(64))


def copy(
    to: Word, address: Word, to_offset: int, offset: int, only: Word | None = None
) -> None:
    """Start a copy of 16 bytes from global to shared memory, if `only` holds.

    The copy bypasses L1, so it also reads data that other multiprocessors have written.
    """
    text = "cp.async.cg.shared.global.L2::128B"
    _do(f"{text} [$0+{to_offset}], [$1+{offset}], 16;", to, address, only=only)


def end_copies() -> None:
    """Commit the copies since the last call as a group, which may be empty."""
    _do("cp.async.commit_group;")


def wait_for_copies(left: int) -> None:
    """Wait until at most the last `left` groups of the lane's copies are pending."""
    _do(f"cp.async.wait_group {left};")


def sync_cta() -> None:
    """Make earlier writes of all warps visible to all warps of the CTA."""
    _do("bar.sync 0;", together=True)


def open_barriers(address: Word, bytes_: Sequence[Number], publish: bool = False) -> None:
    """Initialize barriers from `address` on, 8 bytes each. Each barrier completes once, when
    the number of bytes that it expects has arrived. If `publish` is true, the writes of this lane
    to global memory become visible to every warp of the cluster that has called `wait_for_cluster`.
    """
    first = same(warp_of_cta() * 32 + lane(), 0)
    for i, _ in enumerate(bytes_):
        _do(f"mbarrier.init.shared::cta.b64 [$0+{8 * i}], 1;", address, only=first)
    _do("fence.mbarrier_init.release.cluster;")
    for i, count in enumerate(bytes_):
        text = "mbarrier.arrive.expect_tx.shared::cta.b64"
        _do(f"{text} _, [$0+{8 * i}], $1;", address, count, only=first)
    order = "release" if publish else "relaxed"
    _do(f"barrier.cluster.arrive.{order}.aligned;", together=True)


def wait_for_cluster() -> None:
    """Wait until all CTAs of the cluster have initialized their barriers.

    A warp may call `push` only after `wait_for_cluster`.
    """
    _do("barrier.cluster.wait.aligned;", together=True)


def push(
    barrier: Word, address: Word, words: Sequence[Word], cta: Word, only: Word | None = None
) -> None:
    """Write 2 or 4 neighbouring words to the shared memory of CTA `cta` of the cluster, if `only`
    holds. The barrier in CTA `cta` counts the bytes of the words. `barrier` and `address` are
    addresses in this CTA, which `push` translates to addresses in CTA `cta`.
    """
    to, its_barrier = (
        _ptx("mapa.shared::cluster.u32 $0, $1, $2;", x, cta) for x in (address, barrier)
    )
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
    text = f"{text}.v{len(words)}.b32 [$0], {_listed(2, len(words))}, [$1];"
    _do(text, to, its_barrier, *map(_integer, words), only=only)


def wait_for_bytes(barrier: Word) -> None:
    """Wait until all bytes of a barrier of this CTA have arrived."""
    wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;"
    lines = "AGAIN${:uid}: " + wait + " @!p bra AGAIN${:uid};"
    _do("{ .reg .pred p; " + lines + " }", barrier, together=True)


# Programs in Pallas kernels.


def scalar(number) -> Word:
    """Return an argument of `inline_mgpu` with the layout `SCALAR` as a word."""
    return Word(number.registers.flat[0])


def each(function, refs, numbers, matrices=(), layout=None, *, types=(), result: Any = ()):
    """Call `function` in every warp of a Pallas kernel. The arguments of `function` are the
    references, the scalars as words, and the matrices in the given layout.

    Args:
      types: Types of the last references. By default, the last references have no transforms.
      result: Types of the results.
    """
    plain = [plgpu.RefType()] * (len(refs) - len(types))
    rest = [SCALAR] * len(numbers) + [layout] * len(matrices)

    @plgpu.inline_mgpu(arg_types=[*plain, *types, *rest], return_type=result)
    def call(_, *arguments):
        rest = arguments[len(refs) :]
        words = map(scalar, rest[: len(numbers)])
        found = function(*arguments[: len(refs)], *words, *rest[len(numbers) :])
        return () if found is None else found

    return call(*refs, *numbers, *matrices)


def integer(x: float) -> int:
    """Return the bits of a float32 constant."""
    return np.float32(x).view(np.int32).item()

"""What a warp does: a 32-bit word per lane, and the instructions on words.

For bodies of `plgpu.inline_mgpu`; Pallas has neither shuffles nor votes. Addresses are in
bytes. A program that takes its instructions as an argument also runs where kernels are interpreted,
on an object with the same functions (`interpreter.py`).

In clusters of CTAs there are also copies that a lane waits for itself, products of 16 rows, and
stores to a neighbour's shared memory:

    copy      cp.async of 16 bytes; a lane reads what it copied, so a warp needs no barrier
    multiply  mma.m16n8k16, sums in float32
    push      st.async: a store to a CTA of the cluster, whose barrier counts the bytes
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


def _ptx(text: str, *operands: Number, result: Any = None, together=False, reads=False) -> Any:
    """An instruction: a word, or a list of words where `result` is a list of types; `together`: all
    lanes take part; `reads`: memory, or what others do.
    """
    values, several = [word(x).value for x in operands], isinstance(result, list)
    options = {"has_side_effects": reads, "convergent": together}
    found: Any = utils.inline_ptx(text, *values, result_types=result or _i32(), **options)
    return list(map(Word, found)) if several else Word(found)


def _do(text: str, *operands: Number, only: "Word | None" = None, together=False) -> None:
    """An instruction without a result, where `only` holds."""
    values = [word(x).value for x in operands]
    predicate = None if only is None else only.value
    utils.inline_ptx(text, *values, predicate=predicate, convergent=together)


def _listed(first: int, count: int) -> str:
    """The operands `first` and after of an instruction, as a vector."""
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


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
    """One bit per lane: where it holds."""
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
    _do("bar.warp.sync 0xffffffff;", together=True)


def shared(ref) -> Word:
    """Address of an array in shared memory."""
    return Word(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)))


def read(address: Word, offset: int = 0) -> Word:
    """The integer at an address in shared memory."""
    return _ptx(f"ld.shared.b32 $0, [$1+{offset}];", address, reads=True)


def write(address: Word, x: Number, offset: int = 0, only: Word | None = None) -> None:
    """Puts an integer in shared memory, where `only` holds."""
    _do(f"st.shared.b32 [$0+{offset}], $1;", address, x, only=only)


def join(address: Word, x: Word, only: Word) -> None:
    """Sets the bits of `x` in shared memory, where `only` holds; lanes may meet there."""
    _do("red.shared.or.b32 [$0], $1;", address, x, only=only)


def write_pair(address: Word, x: Word, y: Word, offset: int = 0) -> None:
    """Puts two float32 beside each other in shared memory, at a multiple of 8."""
    _do(f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};", address, x, y)


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
    _do("prefetch.global.L1 [$0];", address)


def put(address: Word, x: Number, only: Word) -> None:
    """Puts an integer in global memory, where `only` holds."""
    _do("st.global.b32 [$0], $1;", address, x, only=only)


def put_several(address: Word, values: Sequence[Word], only: Word) -> None:
    """Puts 2 or 4 integers in global memory, from a multiple of their bytes, where `only` holds."""
    text = f"st.global.v{len(values)}.b32 [$0], {_listed(1, len(values))};"
    _do(text, address, *values, only=only)


def fetch_several(address: Word, count: int, only: Word) -> list[Word]:
    """2 or 4 integers from global memory that is read once and not written, from a multiple of
    their bytes; zeros where `only` does not hold.
    """
    load = f"ld.global.nc.L1::no_allocate.v{count}.b32 {_listed(0, count)}, [${count}];"
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
            _do('.pragma "nounroll";')  # for ptxas
        return values(body(Word(i), jax.tree.map(Word, inner)))

    found = utils.fori(word(times).value, values(state))(step).results
    return jax.tree.map(Word, found)


# Of clusters.


def exp2(x: Word) -> Word:
    return _ptx("ex2.approx.ftz.f32 $0, $1;", x, result=ir.F32Type.get())


def quotient(a: Number, b: Number) -> Word:
    return _ptx("div.approx.ftz.f32 $0, $1, $2;", a, b, result=ir.F32Type.get())


def multiply_add(a: Number, b: Number, c: Number) -> Word:
    """`a * b + c`, rounded once."""
    return _ptx("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c, result=ir.F32Type.get())


def widened(codes: Word) -> list[Word]:
    """Four numbers of e4m3 as float16, two in a word."""
    halves = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.rn.f16x2.e4m3x2 $0, h%d; }"
    return [_ptx(halves % i, codes) for i in range(2)]


def even_and_odd(x: Word) -> Word:
    """Bytes 0 and 2 of a word, then 1 and 3."""
    return _ptx("prmt.b32 $0, $1, $1, 0x3120;", x)


def multiply(acc: Sequence[Word], a: Sequence[Word], b: Sequence[Word], dtype: str) -> list:
    """`acc + A B` of A `[16, 16]` and B `[16, 8]`.

    PTX ISA, "Matrix Fragments for mma.m16n8k16": lane `4 r + c` has of A the pairs of columns
    2 c and 2 c + 8 in rows r and r + 8, of B the pairs of rows 2 c and 2 c + 8 in column r, of
    the result columns 2 c and 2 c + 1 in rows r and r + 8.
    """
    kind = TYPES[dtype]
    names = [_listed(*each) for each in ((0, 4), (4, 4), (8, 2), (10, 4))]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {', '.join(names)};"
    return _ptx(text, *a, *b, *acc, result=[ir.F32Type.get()] * 4, together=True)


def read_words(address: Word, count: int, offset: int = 0) -> list[Word]:
    """2 or 4 neighbours in shared memory, at a multiple of their bytes."""
    text = f"ld.shared.v{count}.b32 {_listed(0, count)}, [${count}+{offset}];"
    return _ptx(text, address, result=[_i32()] * count, reads=True)


def read_transposed(address: Word, offset: int = 0) -> list[Word]:
    """Four matrices of 8 rows of 16 bytes in shared memory, transposed: lane `l` has the address of
    row `l % 8` of matrix `l // 8`, and gets of each the 16-bit column `l // 4` of rows `2 (l % 4)`
    and the next one.
    """
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    text = f"{load} {_listed(0, 4)}, [$4+{offset}];"
    return _ptx(text, address, result=[_i32()] * 4, together=True, reads=True)


def write_words(
    address: Word, words: Sequence[Word], offset: int = 0, only: Word | None = None
) -> None:
    """Puts 2 or 4 neighbours in shared memory, where `only` holds."""
    text = f"st.shared.v{len(words)}.b32 [$0+{offset}], {_listed(1, len(words))};"
    _do(text, address, *map(_integer, words), only=only)


def _integer(x: Word) -> Word:
    return bits(x) if x.real else x


def fetch_words(address: Word) -> list[Word]:
    """4 neighbours of global memory, which the kernel never writes."""
    text = f"ld.global.nc.v4.b32 {_listed(0, 4)}, [$4];"
    return _ptx(text, address, result=[_i32()] * 4, reads=True)


def fetch_half(address: Word, dtype: str) -> Word:
    """A number of 16 bits of global memory, which the kernel never writes, as float32."""
    load = f"ld.global.nc.b16 h, [$1]; cvt.f32.{TYPES[dtype]} $0, h;"
    return _ptx(f"{{ .reg .b16 h; {load} }}", address, result=ir.F32Type.get())


def put_words(address: Word, words: Sequence[Word], only: Word, offset: int = 0) -> None:
    """Puts 2 or 4 neighbours in global memory, where `only` holds."""
    text = f"st.global.v{len(words)}.b32 [$0+{offset}], {_listed(1, len(words))};"
    _do(text, address, *words, only=only)


def beyond(address: Word, steps: Word, size: int, more: Word | None = None) -> Word:
    """The address in global memory `steps * size + more` bytes on."""
    text, values = "mad.wide.s32 $0, $2, $3, $1;", [address, steps, size]
    if more is not None:
        text = "{ .reg .b64 t, u; mad.wide.s32 t, $2, $3, $1; cvt.s64.s32 u, $4; "
        text, values = text + "add.s64 $0, u, t; }", [*values, more]
    return _ptx(text, *values, result=ir.IntegerType.get_signless(64))


def copy(
    to: Word, address: Word, to_offset: int, offset: int, only: Word | None = None
) -> None:
    """Starts a copy of 16 bytes of global memory to shared memory, where `only` holds; past the L1
    cache, so that what another multiprocessor has put there is read.
    """
    text = "cp.async.cg.shared.global.L2::128B"
    _do(f"{text} [$0+{to_offset}], [$1+{offset}], 16;", to, address, only=only)


def end_copies() -> None:
    """The copies started since the last call are a group, which may be empty."""
    _do("cp.async.commit_group;")


def wait_for_copies(left: int) -> None:
    """All of a lane's groups but the last `left` have arrived."""
    _do(f"cp.async.wait_group {left};")


def sync_cta() -> None:
    """What warps wrote before, all warps of the CTA read after."""
    _do("bar.sync 0;", together=True)


def open_barriers(address: Word, bytes_: Sequence[Number], publish: bool = False) -> None:
    """Barriers from `address` on, 8 bytes each: each is complete, once, when its bytes came.

    `publish`: what this lane has put in global memory is there for every warp of the cluster that
    has called `wait_for_cluster`.
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
    """All CTAs have opened their barriers: from here on a warp may push."""
    _do("barrier.cluster.wait.aligned;", together=True)


def push(
    barrier: Word, address: Word, words: Sequence[Word], cta: Word, only: Word | None = None
) -> None:
    """Puts 2 or 4 neighbours in the shared memory of CTA `cta` of the cluster, where `only`
    holds; its barrier counts them. `barrier` and `address` are this CTA's.
    """
    to, its_barrier = (
        _ptx("mapa.shared::cluster.u32 $0, $1, $2;", x, cta) for x in (address, barrier)
    )
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
    text = f"{text}.v{len(words)}.b32 [$0], {_listed(2, len(words))}, [$1];"
    _do(text, to, its_barrier, *map(_integer, words), only=only)


def wait_for_bytes(barrier: Word) -> None:
    """All bytes of a barrier of this CTA have come."""
    wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;"
    lines = "AGAIN${:uid}: " + wait + " @!p bra AGAIN${:uid};"
    _do("{ .reg .pred p; " + lines + " }", barrier, together=True)


# Programs in Pallas kernels.


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

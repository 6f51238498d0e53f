"""What the warps of a cluster of CTAs do beside what `warp.py` has.

Copies that a lane waits for itself, products of 16 rows, and stores to a neighbour's shared
memory. The names of `warp.py` are found here too, so that a program takes one object of
instructions, also where kernels are interpreted (`interpreter.py`).

    copy      cp.async of 16 bytes; a lane reads what it copied, so a warp needs no barrier
    multiply  mma.m16n8k16, sums in float32
    push      st.async: a store to a CTA of the cluster, whose barrier counts the bytes
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.warp import TYPES, Number, Word, word


def __getattr__(name: str) -> Any:
    return getattr(warp, name)


def _i32(count: int) -> list[ir.Type]:
    return [ir.IntegerType.get_signless(32)] * count


def _do(text: str, *operands: Number, together: bool = False) -> None:
    """Instructions without a result."""
    values = [word(x).value for x in operands]
    utils.inline_ptx(text, *values, has_side_effects=True, convergent=together)


def _only(text: str, *operands: Number, only: Word | None) -> None:
    values = [word(x).value for x in operands]
    utils.inline_ptx(text, *values, predicate=None if only is None else only.value)


def _several(text: str, *operands: Number, types: Sequence[ir.Type], **options) -> list[Word]:
    """An instruction with several results."""
    values = [word(x).value for x in operands]
    return list(map(Word, utils.inline_ptx(text, *values, result_types=types, **options)))


def _listed(first: int, count: int) -> str:
    """The operands `first` and after of an instruction, as a vector."""
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


# Numbers of a lane.


def exp2(x: Word) -> Word:
    return _float("ex2.approx.ftz.f32 $0, $1;", x)


def quotient(a: Number, b: Number) -> Word:
    return _float("div.approx.ftz.f32 $0, $1, $2;", a, b)


def multiply_add(a: Number, b: Number, c: Number) -> Word:
    """`a * b + c`, rounded once."""
    return _float("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c)


def _float(text: str, *operands: Number) -> Word:
    values = [word(x).value for x in operands]
    return Word(utils.inline_ptx(text, *values, result_types=ir.F32Type.get()))


def widened(codes: Word) -> list[Word]:
    """Four numbers of e4m3 as float16, two in a word."""
    halves = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.rn.f16x2.e4m3x2 $0, h%d; }"
    return [
        Word(utils.inline_ptx(halves % i, codes.value, result_types=_i32(1)[0]))
        for i in range(2)
    ]


def even_and_odd(x: Word) -> Word:
    """Bytes 0 and 2 of a word, then 1 and 3."""
    text = "prmt.b32 $0, $1, $1, 0x3120;"
    return Word(utils.inline_ptx(text, x.value, result_types=_i32(1)[0]))


def multiply(acc: Sequence[Word], a: Sequence[Word], b: Sequence[Word], dtype: str) -> list:
    """`acc + A B` of A `[16, 16]` and B `[16, 8]`.

    PTX ISA, "Matrix Fragments for mma.m16n8k16": lane `4 r + c` has of A the pairs of columns
    2 c and 2 c + 8 in rows r and r + 8, of B the pairs of rows 2 c and 2 c + 8 in column r, of
    the result columns 2 c and 2 c + 1 in rows r and r + 8.
    """
    kind = TYPES[dtype]
    names = [_listed(*each) for each in ((0, 4), (4, 4), (8, 2), (10, 4))]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {', '.join(names)};"
    types = [ir.F32Type.get()] * 4
    return _several(text, *a, *b, *acc, types=types, convergent=True)


# Memory.


def read_words(address: Word, count: int, offset: int = 0) -> list[Word]:
    """2 or 4 neighbours in shared memory, at a multiple of their bytes."""
    text = f"ld.shared.v{count}.b32 {_listed(0, count)}, [${count}+{offset}];"
    return _several(text, address, types=_i32(count), has_side_effects=True)


def read_transposed(address: Word, offset: int = 0) -> list[Word]:
    """Four matrices of 8 rows of 16 bytes in shared memory, transposed: lane `l` has the address of
    row `l % 8` of matrix `l // 8`, and gets of each the 16-bit column `l // 4` of rows `2 (l % 4)`
    and the next one.
    """
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    text = f"{load} {_listed(0, 4)}, [$4+{offset}];"
    return _several(text, address, types=_i32(4), has_side_effects=True, convergent=True)


def write_words(
    address: Word, words: Sequence[Word], offset: int = 0, only: Word | None = None
) -> None:
    """Puts 2 or 4 neighbours in shared memory, where `only` holds."""
    count = len(words)
    text = f"st.shared.v{count}.b32 [$0+{offset}], {_listed(1, count)};"
    _only(text, address, *map(_integer, words), only=only)


def _integer(x: Word) -> Word:
    return warp.bits(x) if x.real else x


def fetch_words(address: Word) -> list[Word]:
    """4 neighbours of global memory, which the kernel never writes."""
    text = f"ld.global.nc.v4.b32 {_listed(0, 4)}, [$4];"
    return _several(text, address, types=_i32(4), has_side_effects=True)


def fetch_half(address: Word, dtype: str) -> Word:
    """A number of 16 bits of global memory, which the kernel never writes, as float32."""
    load = f"ld.global.nc.b16 h, [$1]; cvt.f32.{TYPES[dtype]} $0, h;"
    return Word(
        utils.inline_ptx(
            f"{{ .reg .b16 h; {load} }}", address.value, result_types=ir.F32Type.get()
        )
    )


def put_words(address: Word, words: Sequence[Word], only: Word, offset: int = 0) -> None:
    """Puts 2 or 4 neighbours in global memory, where `only` holds."""
    text = f"st.global.v{len(words)}.b32 [$0+{offset}], {_listed(1, len(words))};"
    _only(text, address, *words, only=only)


def beyond(address: Word, steps: Word, size: int, more: Word | None = None) -> Word:
    """The address in global memory `steps * size + more` bytes on."""
    i64 = ir.IntegerType.get_signless(64)
    text, values = "mad.wide.s32 $0, $2, $3, $1;", [address, steps, size]
    if more is not None:
        text = "{ .reg .b64 t, u; mad.wide.s32 t, $2, $3, $1; cvt.s64.s32 u, $4; "
        text, values = text + "add.s64 $0, u, t; }", [*values, more]
    values = [word(x).value for x in values]
    return Word(utils.inline_ptx(text, *values, result_types=i64))


def copy(
    to: Word, address: Word, to_offset: int, offset: int, only: Word | None = None
) -> None:
    """Starts a copy of 16 bytes of global memory to shared memory, where `only` holds; past the L1
    cache, so that what another multiprocessor has put there is read.
    """
    text = "cp.async.cg.shared.global.L2::128B"
    _only(f"{text} [$0+{to_offset}], [$1+{offset}], 16;", to, address, only=only)


def end_copies() -> None:
    """The copies started since the last call are a group, which may be empty."""
    _do("cp.async.commit_group;")


def wait_for_copies(left: int) -> None:
    """All of a lane's groups but the last `left` have arrived."""
    _do(f"cp.async.wait_group {left};")


# Between the warps of a CTA and the CTAs of a cluster.


def sync_cta() -> None:
    """What warps wrote before, all warps of the CTA read after."""
    _do("bar.sync 0;", together=True)


def open_barriers(address: Word, bytes_: Sequence[Number], publish: bool = False) -> None:
    """Barriers from `address` on, 8 bytes each: each is complete, once, when its bytes came.

    `publish`: what this lane has put in global memory is there for every warp of the cluster that
    has called `wait_for_cluster`.
    """

    first = warp.same(warp.warp_of_cta() * 32 + warp.lane(), 0)
    for i, _ in enumerate(bytes_):
        _only(f"mbarrier.init.shared::cta.b64 [$0+{8 * i}], 1;", address, only=first)
    _do("fence.mbarrier_init.release.cluster;")
    for i, count in enumerate(bytes_):
        text = "mbarrier.arrive.expect_tx.shared::cta.b64"
        _only(f"{text} _, [$0+{8 * i}], $1;", address, count, only=first)
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
    count = len(words)

    def there(x: Word) -> Word:
        text = "mapa.shared::cluster.u32 $0, $1, $2;"
        values = x.value, word(cta).value
        return Word(utils.inline_ptx(text, *values, result_types=_i32(1)[0]))

    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
    text = f"{text}.v{count}.b32 [$0], {_listed(2, count)}, [$1];"
    _only(text, there(address), there(barrier), *map(_integer, words), only=only)


def wait_for_bytes(barrier: Word) -> None:
    """All bytes of a barrier of this CTA have come."""
    wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;"
    lines = "AGAIN${:uid}: " + wait + " @!p bra AGAIN${:uid};"
    _do("{ .reg .pred p; " + lines + " }", barrier, together=True)

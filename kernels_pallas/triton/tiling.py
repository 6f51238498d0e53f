"""Chooses the sizes of tiles, the number of warps and the number of stages.

The first combination of sizes that fits in the shared memory of the architecture is used.

The model of shared memory is an upper bound of Triton's usage for the loops of attention kernels.
The model adds up three parts: tiles that stay in shared memory during the loop, one set of loaded
tiles per pipeline stage, and one tile of products for a change of their layout.
`capability.why_not` checks first that tiles fit, since a launch without tiles that fit would fail.
"""

import functools
from typing import NamedTuple

# Largest shared memory of a program in bytes, by compute capability; `SMEM_LEAST` for others.
SMEM = {
    (8, 0): 163 * 1024,
    (8, 7): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
}
SMEM_LEAST = 99 * 1024  # the shared memory of the capabilities 8.6, 8.9 and 12.0
SPARE = 1024  # bytes for barriers and reductions
LEAST = 16  # minimum numbers of rows and columns of an operand
# Maximum number of rows and of keys in float32. Products in float32 use no tensor core, and their
# operands are in registers.
FLOAT32 = 32
HEADS = 128  # maximum number of heads per group, which must fit in one tile of the scores


class Tiling(NamedTuple):
    """The numbers of query rows and keys per tile, of warps per program, and of stages of the
    program's loop.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def launch(self) -> tuple[int, int]:
        """The numbers of warps and stages of a launch."""
        return self.warps, self.stages


# Major versions of capability whose products read operands from shared memory and not from
# registers.
WIDE = (9, 10)


def most(kernel: str, capability: tuple[int, int], D: int, Dv: int) -> tuple[int, int]:
    """Return the numbers of rows and keys of the largest useful tiles of intervals, for forward, dq
    or dkv. The sums and operands of a useful tile fit in registers.
    """
    if kernel == "forward":
        return 128, 64 if capability[0] in WIDE or max(D, Dv) <= 64 else 32
    if kernel == "dq":
        return 64, 64 if capability[0] in WIDE else 32
    return 64 if D + Dv <= 128 else 32, 64


def smem_of(capability: tuple[int, int]) -> int:
    """Return the largest shared memory of a program, in bytes."""
    return SMEM.get(capability, SMEM_LEAST)


def power(size: int, least: int = LEAST) -> int:
    """Return the smallest power of two that is at least `size` and at least `least`."""
    return max(1 << (size - 1).bit_length(), least)


def needed(kernel: str, tiling: Tiling, D: int, Dv: int, itemsize: int) -> int:
    """Return an upper bound of a kernel's shared memory, in bytes."""
    width, value_width = power(D), power(Dv)
    rows, keys, _, stages = tiling
    both = width + value_width
    held, streamed = {  # elements of the rows that stay in memory, and of the streamed rows
        "forward": (rows * width, keys * both),
        "dq": (rows * both, keys * both),
        "dkv": (keys * both, rows * both),
        "scores": (rows * width, keys * width),
    }[kernel]
    # The statistics of streamed rows are also streamed, in float32.
    extra = 5 * 4 * rows * stages if kernel == "dkv" else 0
    moved = 4 * rows * keys if kernel == "scores" else itemsize * rows * keys
    return itemsize * (held + stages * streamed) + moved + extra + SPARE


def itemsize(dtype: str) -> int:
    """Return the number of bytes of an element."""
    return 4 if dtype == "float32" else 2


def precision(dtype: str) -> str:
    """Return the precision of products. Only products of float32 have a choice."""
    return "ieee" if dtype == "float32" else "tf32"


def _warps(elements: int, a_thread: int = 64) -> int:
    """Return the number of warps of a program that has a float32 sum of `elements` elements,
    with at most `a_thread` elements per thread.
    """
    return 4 if elements <= a_thread * 128 else 8


@functools.cache
def choose(
    kernel: str,
    rows: int,
    keys: int,
    D: int,
    Dv: int,
    itemsize: int,
    capability: tuple[int, int],
) -> Tiling | None:
    """Return the largest tiles that fit and are within the given bounds, or None. If operands are
    in shared memory, the number of stages leaves room for two programs per multiprocessor, or for
    three programs with 16 rows. On an H100 several programs are up to twice as fast as one program
    with more stages.

    Args:
      kernel: forward, dq or dkv.
      rows: Upper bound of query rows, a power of two.
      keys: Upper bound of keys, a power of two.
      D: Width of keys.
      Dv: Width of values.
      itemsize: Bytes of an element.
      capability: Compute capability of the GPU.
    """
    most_rows, most_keys = rows, keys
    if itemsize == 4:
        most_rows, most_keys = min(rows, FLOAT32), min(keys, FLOAT32)
    width, value_width = power(D), power(Dv)
    wide = capability[0] in WIDE and itemsize == 2
    # In float32 a thread has few sums, since operands and corrections also need registers.
    a_thread = 64 if kernel != "dkv" else 128 if itemsize == 2 else 16
    while True:
        if kernel == "dkv":
            held = most_keys * (width + value_width)
        else:
            held = most_rows * (value_width if kernel == "forward" else width)
            held += most_rows * value_width if kernel == "dq" else 0
        few = most_rows == LEAST and kernel != "dkv"
        single = Tiling(most_rows, most_keys, _warps(held, a_thread), 0)
        shared = single._replace(warps=2 if few else _warps(held, 128))
        choices = [(shared, 3 if few else 2)] if wide and shared.warps <= 4 else []
        for tiling, programs in [*choices, (single, 1)]:
            limit = smem_of(capability) // programs
            # One stage hides no latency, so smaller tiles are preferred.
            small = programs == 1 and LEAST in (most_rows, most_keys)
            for stages in (3, 2, 1) if small else (3, 2):
                tiling = tiling._replace(stages=stages)
                if needed(kernel, tiling, D, Dv, itemsize) <= limit:
                    return tiling
        # The streamed tile is reduced first.
        streams_rows = kernel == "dkv"
        streamed, held = (most_rows, most_keys) if streams_rows else (most_keys, most_rows)
        if streamed > 2 * LEAST or held == LEAST:
            streamed //= 2
        else:
            held //= 2
        most_rows, most_keys = (streamed, held) if streams_rows else (held, streamed)
        if most_keys < LEAST or most_rows < LEAST:
            return None


@functools.cache
def scores_tiling(
    group: int, D: int, itemsize: int, capability: tuple[int, int]
) -> Tiling | None:
    """Return the tiling of the scores, whose rows are whole groups, or None if a group does not
    fit.
    """
    group = power(group, 1)
    # If there are few heads, a tile has few tokens, so that their best blocks stay in
    # registers.
    rows = max(min(HEADS, max(group * 32, LEAST)), group)
    if itemsize == 4:
        rows = max(min(rows, 32), group)
    while rows >= max(group, LEAST):
        for keys, stages in ((64, 3), (64, 2), (32, 2), (32, 1), (LEAST, 1)):
            if itemsize == 4 and keys > 32:
                continue
            tiling = Tiling(rows, keys, _warps(rows * keys), stages)
            if needed("scores", tiling, D, D, itemsize) <= smem_of(capability):
                return tiling
        rows //= 2
    return None

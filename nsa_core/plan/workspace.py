"""Offsets in one allocation for buffers that only kernels read and write, by their lifetimes."""

import operator
from collections.abc import Mapping, Sequence

from kernels_pallas.kernel import ALIGNMENT

# The limit. A buffer that does not fit has its own memory, which is freed after its last read.
MAX_BYTES = 64 * 2**20
FEW_BYTES = 16 * 2**20  # the limit if most of it would be idle at the call's peak of memory


def placed(
    begins: Sequence[Sequence[int]],
    last: Mapping[int, int],
    sizes: Mapping[int, int],
    others: Sequence[int],
) -> tuple[dict[int, int], int]:
    """The offset of each buffer that has a place, and the bytes of all.

    The workspace is there during the whole call. Where less than half of it is in use while memory
    is at its peak, it is a small one.

    Args:
      begins: For each step, the buffers that it writes first.
      last: For each buffer, the last step that uses it.
      sizes: Sizes in bytes.
      others: bytes that have memory of their own whatever has a place, at each step.
    """
    offsets, size = _placed(begins, last, sizes, MAX_BYTES)
    if size > FEW_BYTES:
        alone, used = list(others), [0] * len(begins)
        for step, numbers in enumerate(begins):
            for number in numbers:
                held = used if number in offsets else alone
                for i in range(step, last[number] + 1):
                    held[i] += sizes[number]
        idle = size + max(alone) - max(map(operator.add, alone, used))
        if 2 * idle > size:
            return _placed(begins, last, sizes, FEW_BYTES)
    return offsets, size


def _placed(
    begins: Sequence[Sequence[int]],
    last: Mapping[int, int],
    sizes: Mapping[int, int],
    most: int,
) -> tuple[dict[int, int], int]:
    """`placed` in `most` bytes: the largest first, each at the first offset that is free during its
    lifetime.
    """
    first = {number: i for i, numbers in enumerate(begins) for number in numbers}
    places: dict[int, tuple[int, int]] = {}  # by number: from, to
    for number in sorted(first, key=lambda number: -sizes[number]):
        size, offset = -(-sizes[number] // ALIGNMENT) * ALIGNMENT, 0
        beside = [
            place
            for other, place in places.items()
            if first[other] <= last[number] and first[number] <= last[other]
        ]
        for start, end in sorted(beside):
            if offset + size <= start:
                break
            offset = max(offset, end)
        if offset + size <= most:
            places[number] = offset, offset + size
    offsets = {number: start for number, (start, _) in places.items()}
    return offsets, max((end for _, end in places.values()), default=0)

"""Offsets in one allocation for buffers that only kernels read and write, by their lifetimes."""

from collections.abc import Mapping, Sequence

from kernels_pallas.kernel import ALIGNMENT

# The limit. A buffer that does not fit has its own memory, which is freed after its last read.
MAX_BYTES = 64 * 2**20
FEW_BYTES = 16 * 2**20  # the limit if most of it would be idle at the call's peak of memory

# For each buffer its bytes, and the steps from its first to its last use.
type Lives = Mapping[int, tuple[int, range]]


def placed(lives: Lives, others: Sequence[int]) -> tuple[dict[int, int], int]:
    """The offset of each buffer that has a place, and the bytes of all.

    The workspace is there during the whole call. Where less than half of it is in use while memory
    is at its peak, it is a small one.

    Args:
      lives: Buffers in the order of their first steps.
      others: bytes that have memory of their own whatever has a place, at each step.
    """
    offsets, size = _placed(lives, MAX_BYTES)
    if size > FEW_BYTES:
        alone, used = list(others), [0] * len(others)
        for number, (bytes, steps) in lives.items():
            for i in steps:
                (used if number in offsets else alone)[i] += bytes
        both = [a + b for a, b in zip(alone, used, strict=True)]
        if 2 * (size + max(alone) - max(both)) > size:
            return _placed(lives, FEW_BYTES)
    return offsets, size


def _placed(lives: Lives, most: int) -> tuple[dict[int, int], int]:
    """`placed` in `most` bytes: the largest first, each at the first offset that is free during its
    lifetime.
    """
    places: dict[int, tuple[int, int]] = {}  # by number: from, to
    for number in sorted(lives, key=lambda number: -lives[number][0]):
        bytes, steps = lives[number]
        size, offset = -(-bytes // ALIGNMENT) * ALIGNMENT, 0
        beside = [
            place
            for other, place in places.items()
            if lives[other][1].start < steps.stop and steps.start < lives[other][1].stop
        ]
        for start, end in sorted(beside):
            if offset + size <= start:
                break
            offset = max(offset, end)
        if offset + size <= most:
            places[number] = offset, offset + size
    offsets = {number: start for number, (start, _) in places.items()}
    return offsets, max((end for _, end in places.values()), default=0)

"""Where buffers lie that kernels alone read and write: in one allocation, by their lifetimes."""

from collections.abc import Mapping, Sequence

from nsa_core.plan.buffers import ALIGNMENT

# At most. What does not fit has memory of its own, which is given back once it was read.
MAX_BYTES = 64 * 2**20


def placed(
    begins: Sequence[Sequence[int]], last: Mapping[int, int], sizes: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """The offset of each buffer that has a place, and the bytes of all: the largest first, each
    where it fits first beside those that are there at the same time.

    Args:
      begins: of each step, the buffers that it is the first to write.
      last: of a buffer, the last step that has to do with it.
      sizes: in bytes.
    """
    first = {number: i for i, numbers in enumerate(begins) for number in numbers}
    places: dict[int, tuple[int, int]] = {}  # by number: from, to
    for number in sorted(first, key=lambda number: -sizes[number]):
        size, offset = -(-sizes[number] // ALIGNMENT) * ALIGNMENT, 0
        beside = (
            place
            for other, place in places.items()
            if first[other] <= last[number] and first[number] <= last[other]
        )
        for start, end in sorted(beside):
            if offset + size <= start:
                break
            offset = max(offset, end)
        if offset + size <= MAX_BYTES:
            places[number] = offset, offset + size
    offsets = {number: start for number, (start, _) in places.items()}
    return offsets, max((end for _, end in places.values()), default=0)

"""Where buffers lie that kernels alone read and write: in one allocation, by their lifetimes."""

from collections.abc import Mapping, Sequence

from nsa_core.plan.buffers import ALIGNMENT

# At most. What does not fit has memory of its own, which is given back once it was read.
MOST_BYTES = 64 * 2**20


def placed(
    begins: Sequence[Sequence[int]], last: Mapping[int, int], sizes: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """The offset of each buffer that has a place, and the bytes of all: first fit.

    Args:
      begins: of each step, the buffers that it is the first to write.
      last: of a buffer, the last step that has to do with it.
      sizes: in bytes.
    """
    offsets: dict[int, int] = {}
    taken: dict[int, tuple[int, int]] = {}  # by number: from, to
    end_of_all = 0
    for i, numbers in enumerate(begins):
        taken = {number: x for number, x in taken.items() if last[number] >= i}
        for number in numbers:
            size, offset = -(-sizes[number] // ALIGNMENT) * ALIGNMENT, 0
            for start, end in sorted(taken.values()):
                if offset + size <= start:
                    break
                offset = max(offset, end)
            if offset + size <= MOST_BYTES:
                offsets[number], taken[number] = offset, (offset, offset + size)
                end_of_all = max(end_of_all, offset + size)
    return offsets, end_of_all

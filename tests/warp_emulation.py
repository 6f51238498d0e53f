"""One warp on numpy: the names of `kernels_pallas/mosaic/warp.py` for arrays of 32 lanes.

Pallas' interpreter cannot run what is written for a warp. Here the project's own functions run,
a warp at a time. `>>` fills with the sign here. What this cannot tell: races between lanes, and
whether the instructions do what `warp.py` says (the tests marked `gpu`).
"""

import numpy as np

from kernels_pallas.mosaic.block_bitmap import BlockBitmap

LANES = np.arange(32, dtype=np.int32)


def lanes(x):
    return np.broadcast_to(x if isinstance(x, np.ndarray) else np.int32(x), (32,))


class Warp:
    """`warp.py`: `memory` stands for shared memory, arrays for references to global memory."""

    integer = staticmethod(lambda x: np.float32(x).view(np.int32).item())
    word = staticmethod(lanes)
    smaller, larger = staticmethod(np.minimum), staticmethod(np.maximum)

    def __init__(self, bytes_: int):
        self.memory = np.full(bytes_ // 4, -77, np.int32)
        self.number_of_warp = 0

    def warp(self):
        return lanes(self.number_of_warp)

    def lane(self):
        return LANES

    def same(self, a, b):
        return lanes(a) == lanes(b)

    def below(self, x, count):
        return (lanes(x) >= 0) & (lanes(x) < lanes(count))

    def where(self, condition, a, b):
        return np.where(condition, lanes(a), lanes(b))

    def number(self, condition):
        return condition.astype(np.int32)

    def different(self, a, b):
        return lanes(a) != lanes(b)

    def bit(self, place):
        return np.left_shift(np.int32(1), lanes(place))

    def ones(self, x):
        return np.bitwise_count(x.view(np.uint32)).astype(np.int32)

    def votes(self, condition):
        return lanes(
            (np.uint32(1) << LANES[condition].astype(np.uint32))
            .sum(dtype=np.uint32)
            .view(np.int32)
        )

    def join(self, address, x, only):
        np.bitwise_or.at(self.memory, self._words(lanes(address)[only]), lanes(x)[only])

    def bits(self, x):
        return x.view(np.int32)

    def real(self, x):
        return np.ascontiguousarray(x).view(np.float32)

    def floating(self, x):
        return x.astype(np.float32)

    def exchange(self, x, distance):
        return x[LANES ^ distance]

    def shuffle(self, x, source):
        return x[lanes(source)]

    def largest(self, x):
        return lanes(x.max())

    def smallest(self, x):
        return lanes(x.min())

    def first_equal(self, a, b):
        return lanes(int(np.argmax(a == b)))

    def sync(self):
        pass

    def shared(self, ref):
        return lanes(ref)

    def _words(self, address, step=4):
        assert not (address % step).any() and (address >= 0).all()
        return address // 4

    def read(self, address, offset=0):
        return self.memory[self._words(lanes(address) + offset)]

    def write(self, address, x, offset=0, only=True):
        only = np.broadcast_to(only, (32,))
        self.memory[self._words(lanes(address) + offset)[only]] = lanes(x)[only]

    def write_pair(self, address, x, y, offset=0):
        at = self._words(address + offset, 8)
        self.memory[at], self.memory[at + 1] = x.view(np.int32), y.view(np.int32)

    def element(self, ref, *places):
        sizes = [size // 4 for _, size in places]
        return ref.reshape(-1), sum(
            lanes(i) * size for (i, _), size in zip(places, sizes, strict=True)
        )

    def fetch(self, address, offset=0):
        array, at = address
        return array[at + offset // 4]

    def put(self, address, x, only):
        array, at = address
        array[at[only]] = lanes(x)[only]

    def repeat(self, times, body, state):
        times = lanes(times)
        assert (times == times[0]).all()  # else lanes would part
        for i in range(times[0]):
            state = body(lanes(i), state)
        return state

    def each(self, function, rows: int, warps: int, of_group: int, *given) -> None:
        """`function(*given, row, group)` of so many warps a row, in groups of `of_group`."""
        for row in range(rows):
            for group in range(-(-warps // of_group)):
                for self.number_of_warp in range(of_group):
                    function(*given, lanes(row), lanes(group))


def machine(monkeypatch, bytes_: int, *modules) -> Warp:
    """A warp with so much shared memory, on which these modules' functions run."""
    made = Warp(bytes_)
    for module in modules:
        monkeypatch.setattr(module, "warp", made)
    return made


# Of what lists are made from (`block_bitmap.py`): class, name, and what is wrong.
WANTED_MUTANTS = {
    "no bit of an earlier token": (
        Warp,
        "join",
        lambda self, a, x, only: self.write(a, x, 0, only),
    ),
    "a word whose last bit is set is empty": (
        Warp,
        "different",
        lambda self, a, b: lanes(a) > lanes(b),
    ),
    "bits are not cleared": (BlockBitmap, "clear", lambda self, *arguments: None),
    "sequences run together": (BlockBitmap, "sequences", lambda self, tokens: lanes(1)),
}

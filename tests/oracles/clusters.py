"""Warp programs of clusters on NumPy: the instructions of `warp.py`.

All warps take each instruction together, so a program never waits here. What it forgets to
wait for shows all the same:

    copies     arrive as late as they may (`late`) or at once
    barriers   must have got exactly their bytes where they are waited for
    shared     a thread reads what it wrote itself, what its warp wrote before the last `sync`,
    memory     another warp before the last `sync_cta`, and what was pushed under a barrier that
               it waited for; and it writes over what others have read only after one of these
    global     what a kernel has put there is read only by warps that have waited for the cluster
               after it was published, or by nobody
"""

import ml_dtypes
import numpy as np

from tests.oracles.warps import LANES, Warps, ml_dtype

BARRIERS = 8  # of a CTA at most
PLACE = 40  # bits of an address for the byte in its array
# Who wrote or read a word: a thread of the CTA (from 1 on), and in its place
PUBLIC = 0  # all may read or write
WARP = 1 << 12  # and above: all lanes of this warp may
LANES_OF = 1 << 13  # and above: several lanes of this warp read it
MANY = -99  # several warps read it; above, from -1 down: what was pushed to a barrier


class ClusterWarps(Warps):
    """The instructions for warps in clusters of `cluster` CTAs.

    Attributes:
      late: whether copies arrive only where they are waited for.
    """

    def __init__(
        self, ctas: int, warps: int, shared_bytes: int, *, cluster: int, late: bool = True
    ):
        super().__init__(ctas, warps, shared_bytes)
        self.cluster, self.late = cluster, late
        self.first_cta = self.cta // cluster * cluster
        self.thread = self.word(self.warp_in_cta * 32 + LANES + 1).astype(np.int64)
        self.arrays: list[np.ndarray] = []
        self.writer = np.full(self.memory.shape, PUBLIC)
        self.reader = np.full(self.memory.shape, PUBLIC)
        self.ended = np.zeros((ctas * warps, 1), np.int64)  # groups of copies
        self.copies: list[list] = []  # mask, group, destination, words
        self.expected = np.full((ctas, BARRIERS), -1)
        self.came = np.zeros((ctas, BARRIERS), np.int64)
        self.met = np.zeros((ctas * warps, 1), bool)  # warps that have waited for the cluster
        self.opened = False
        # Words of each array that nobody may read, and those that warps may that have waited.
        self.put_there: list[set[int]] = []
        self.published: list[set[int]] = []

    # Numbers of a lane.

    def exp2(self, x):
        return np.exp2(x)

    quotient = Warps.divided

    def multiply_add(self, a, b, c):
        return self.word(a) * self.word(b) + self.word(c)

    def widened(self, codes):
        four = np.ascontiguousarray(codes)[..., None].view(ml_dtypes.float8_e4m3fn)
        exact = four.astype(np.float32)
        return [self.pack(exact[..., i], exact[..., i + 1], "float16") for i in (0, 2)]

    def even_and_odd(self, x):
        four = np.ascontiguousarray(x)[..., None].view(np.uint8)
        return np.ascontiguousarray(four[..., [0, 2, 1, 3]]).view(np.int32)[..., 0]

    def multiply(self, acc, a, b, dtype):
        row, column = LANES // 4, 2 * (LANES % 4)
        A, B, C = (
            np.zeros((*self.shape[:-1], *x), np.float32) for x in ((16, 16), (16, 8), (16, 8))
        )
        for i, word in enumerate(a):
            pair = np.stack(self.unpack(word, dtype), -1)
            for e in range(2):
                A[:, row + 8 * (i % 2), column + 8 * (i // 2) + e] = pair[..., e]
        for i, word in enumerate(b):
            pair = np.stack(self.unpack(word, dtype), -1)
            for e in range(2):
                B[:, column + 8 * i + e, row] = pair[..., e]
        for i, x in enumerate(acc):
            C[:, row + 8 * (i // 2), column + i % 2] = x
        C += A @ B
        return [C[:, row + 8 * (i // 2), column + i % 2] for i in range(4)]

    # Memory. An address in global memory is an array's number and a byte in it.

    def element(self, ref, *places):
        number = next((i for i, x in enumerate(self.arrays) if x is ref), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(ref)
            self.put_there.append(set())
            self.published.append(set())
        address = np.full(self.shape, number << PLACE)
        for i, size in places:
            address = address + self.word(i).astype(np.int64) * size
        return address

    def beyond(self, address, steps, size, more=0):
        return address + self.word(steps).astype(np.int64) * self.word(size) + self.word(more)

    def fetch(self, address, offset=0):
        return self._fetched(address + offset, 1)[0]

    def fetch_words(self, address):
        return self._fetched(address, 4)

    def fetch_half(self, address, dtype):
        both = self._fetched(address - address % 4, 1)[0].view(np.uint32)
        half = np.where(address % 4 > 0, both >> 16, both).astype(np.uint16)
        return half.view(ml_dtype(dtype)).astype(np.float32)

    def put(self, address, x, only):
        self._put(address, [x], only)

    def put_words(self, address, words, only, offset=0):
        self._put(address + offset, words, only)

    def _fetched(self, address, count):
        found = np.zeros((count, *self.shape), np.int32)
        for array, here, index in self._global(address, True, count):
            early = here & ~self.met
            for unseen, some in (self.put_there, here), (self.published, early):
                unseen = self._of(array, unseen)
                if unseen and some.any():
                    first = set(index[some[here]].tolist())
                    if any({x + i for x in first} & unseen for i in range(count)):
                        raise RuntimeError("read before it was published to the cluster")
            for i in range(count):
                found[i][here] = array[index + i]
        return list(found)

    def _put(self, address, words, only):
        for array, here, index in self._global(address, only, len(words)):
            for i, x in enumerate(words):
                array[index + i] = self.word(x)[here]
                self._of(array, self.put_there).update((index + i).tolist())

    def _of(self, array, words):
        numbers = (n for n, x in enumerate(self.arrays) if np.shares_memory(x, array))
        return words[next(numbers)]

    def _global(self, address, only, count):
        """Of each array: its words, which lanes want some of them, and which."""
        only = self._here(only)
        number = address >> PLACE
        for i in np.unique(number[only]):
            array = self.arrays[i].reshape(-1).view(np.int32)
            here = only & (number == i)
            place = address[here] & (1 << PLACE) - 1
            if (place % (4 * count)).any() or (place // 4 + count > array.size).any():
                raise IndexError(f"bytes of array {i} of {4 * array.size}, got {place}")
            yield array, here, place // 4

    def read(self, address, offset=0):
        return self.read_words(address, 1, offset)[0]

    def read_words(self, address, count, offset=0):
        assert not ((self.word(address) + offset) % (4 * count))[self._here(True)].any()
        found = []
        for i in range(count):
            cta, index = (
                np.broadcast_to(x, self.shape) for x in self._shared(address, offset + 4 * i)
            )
            here = self._here(True)
            if not self._mine(self.writer[cta, index])[here].all():
                raise RuntimeError(f"read before its writer was waited for: {address} {offset}")
            before = self.reader[cta, index]
            warp = self.warp_in_cta
            alone = (before == PUBLIC) | (before == self.thread)
            near = ((before > 0) & (before < WARP) & ((before - 1) // 32 == warp)) | np.isin(
                before - warp, (WARP, LANES_OF)
            )
            mark = np.where(alone, self.thread, np.where(near, LANES_OF + warp, MANY))
            self.reader[cta[here], index[here]] = mark[here]
            found.append(self.memory[cta, index])
        return found

    def read_transposed(self, address, offset=0):
        rows = np.stack(self.read_words(address, 4, offset), -1).view(np.uint16)
        matrices = rows.reshape(*rows.shape[:-2], 4, 8, 8)  # matrix, row, column
        column, row = LANES // 4, 2 * (LANES % 4)
        pairs = np.stack([matrices[..., row + i, column] for i in range(2)], -1)
        return list(np.moveaxis(np.ascontiguousarray(pairs).view(np.int32)[..., 0], -2, 0))

    def _mine(self, marks):
        """Whether the marks of words forbid a thread nothing."""
        own_warp = marks == WARP + self.warp_in_cta
        return (marks == PUBLIC) | (marks == self.thread) | own_warp

    def write(self, address, x, offset=0, only=True):
        self.write_words(address, [x], offset, only)

    def write_words(self, address, words, offset=0, only=True):
        assert not ((self.word(address) + offset) % (4 * len(words)))[self._here(only)].any()
        for i, x in enumerate(words):
            _, index = self._shared(address, offset + 4 * i, only)
            self._write(self.cta, index, x, only)

    def _write(self, cta, index, x, only, barrier=None):
        """`barrier`: that the words are pushed under."""
        here = self._here(only)
        cta, index = (np.broadcast_to(x, self.shape) for x in (cta, index))
        self._check_free(cta, index, here, barrier)
        cta, index = cta[here], index[here]
        self.memory[cta, index] = self.word(x)[here].view(np.int32)
        self.writer[cta, index] = self.thread[here] if barrier is None else -1 - barrier

    def _check_free(self, cta, index, here, barrier=None):
        for marks in (x[cta, index] for x in (self.reader, self.writer)):
            allowed = self._mine(marks) if barrier is None else marks == PUBLIC
            if not allowed[here].all():
                raise RuntimeError("written over before others were waited for")

    def copy(self, to, address, to_offset, offset, only=True):
        self._copy(self.word(to) + to_offset, self._fetched(address + offset, 4), only)

    def _copy(self, to, words, only):
        for i in range(len(words)):  # it may arrive at once
            cta, index = (np.broadcast_to(x, self.shape) for x in self._shared(to, 4 * i, only))
            self._check_free(cta, index, self._here(only))
        entry = [self._here(only).copy(), self.ended.copy(), to, words]
        self._arrive(*entry) if not self.late else self.copies.append(entry)

    def end_copies(self):
        self.ended = self.ended + self.active

    def wait_for_copies(self, left):
        for entry in self.copies:
            mask, group, *_ = entry
            now = mask & self.active & (group < self.ended - left)
            self._arrive(now, *entry[1:])
            entry[0] = mask & ~now
        self.copies = [x for x in self.copies if x[0].any()]

    def _arrive(self, mask, _, to, words):
        self.write_words(to, words, 0, mask)

    # Between lanes and warps.

    def sync(self):
        for marks in self.reader, self.writer:
            thread = (marks > PUBLIC) & (marks < WARP)
            marks[thread] = WARP + (marks[thread] - 1) // 32
            marks[marks >= LANES_OF] -= LANES_OF - WARP

    def sync_cta(self):
        here = np.unique(self.cta[self.active])
        if not self.active[np.isin(self.cta, here)].all():
            raise RuntimeError("sync_cta must be reached by all warps of a CTA")
        writer = self.writer[here]
        self.writer[here] = np.where(writer > PUBLIC, PUBLIC, writer)
        self.reader[here] = PUBLIC

    def open_barriers(self, address, bytes_, publish=False):
        del address
        self._must_be_all("open_barriers")
        if publish:
            for words, seen in zip(self.put_there, self.published, strict=True):
                seen |= words
                words.clear()
        for i, count in enumerate(bytes_):
            self.expected[self.cta[:, 0], i] = self.word(count)[:, 0]
        self.opened = True

    def wait_for_cluster(self):
        if not self.opened or (self.met & self.active).any():
            raise RuntimeError("wait_for_cluster must follow open_barriers, once a warp")
        self.met = self.met | self.active

    def push(self, barrier, address, words, cta, only=True):
        number = self._barrier(barrier)
        if not self.met[self.active].all():
            raise RuntimeError("pushed before the CTAs of the cluster have begun")
        here, cta = self._here(only), self.word(cta)
        if ((cta < 0) | (cta >= self.cluster))[here].any():
            raise IndexError(f"CTAs must be 0 to {self.cluster - 1}, got {cta[here]}")
        there = self.first_cta + cta
        for i, x in enumerate(words):
            _, index = self._shared(address, 4 * i, only)
            self._write(there, index, x, only, number)
        np.add.at(self.came[:, number], there[here], 4 * len(words))

    def wait_for_bytes(self, barrier):
        self._must_be_all("wait_for_bytes")
        number = self._barrier(barrier)
        came, expected = self.came[:, number], self.expected[:, number]
        if (came != expected).any():
            raise RuntimeError(f"barrier {number} must get {expected} bytes, got {came}")
        self.writer[self.writer == -1 - number] = PUBLIC
        self.reader[:] = PUBLIC  # each warp pushed to it after what it read before

    def _barrier(self, address):
        """Its number: barriers are the last words of shared memory."""
        (place,) = np.unique(address)
        number = (int(place) - 4 * self.memory.shape[1]) // 8 + BARRIERS
        assert 0 <= number < BARRIERS, place
        return number

    def _must_be_all(self, what):
        if not self.active.all():
            raise RuntimeError(f"{what} must be reached by all warps")

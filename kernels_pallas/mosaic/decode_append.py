"""Writes the new tokens of a decode step to the pages, and also the means of the windows that the
new tokens complete.

For its row and key/value head, a cluster writes the new tokens up to the cluster's own token. Since
clusters do not wait for each other, the clusters of later tokens in a row write the same bits
again. New tokens are written before the warps load strips, so that reads of older tokens do not
wait for the loads of strips.

The last CTA of a cluster writes the key and the value of each branch of token p at index p % block
of the token's page, with a warp per row. If p = i d + l - 1, the first CTA also writes the mean of
the last l keys, and the second CTA writes the mean of the last l values. New tokens are read from
the inputs of the call, and all other tokens are read from their pages. The warps of a CTA add up
shares of the window.

For pages in fp8, rows of tokens are rounded before they are written. The older tokens of a window
are read from the ring buffer of the row if the ring buffer has their exact values.
"""

import math
from typing import Any

from kernels_pallas.mosaic.compress import plus
from kernels_pallas.mosaic.decode_lane import Lane
from kernels_pallas.specs.decode import NEW_PAGES, RAW
from kernels_pallas.specs.tile import LANES, cdiv

COLUMNS = 8  # number of columns of a row that a lane has, 16 bytes
ROWS = 8  # tokens of a window that a lane loads before it adds the first one
KINDS = "key", "value"
# The constants of `nsa_core.rounding`.
LARGEST, LEAST = 448.0, 1e-30
NEAR, LEAST_NEAR = 2.0**-4 + 2.0**-7, 2.0**-9


def put_new_tokens(lane: Lane, sizes: Any, refs: Any) -> None:
    """Write a cluster's share of the new tokens.

    The page table must be in shared memory. Shared memory must also contain the unclamped
    page-table entries of new tokens, which show whether a token has a page. In the functions below,
    the argument `value` is 1 for the value tensor and 0 for the key tensor.
    """
    m, spec, token, kv_head = lane.m, lane.spec, refs.b, refs.g
    warps = spec.variant.warps
    # If rows are narrow, a warp adds up several tokens of a window in parallel.
    rows = LANES // (max(spec.D, spec.Dv) // COLUMNS)
    row_lanes = LANES // rows
    own_row = lane.lane // row_lanes
    columns, pool = m.word(sizes.table_pages), m.word(sizes.pages)
    row, count = token // spec.q_len, token % spec.q_len + 1
    length = m.fetch_int(refs.lengths, row)
    first = length - spec.q_len  # the position of the row's first new token
    if spec.fp8:
        ring = m.fetch_int(refs.slots, row)
        rings = m.word(sizes.rings)

    # Addresses.

    def width_of(value):
        return spec.D if spec.D == spec.Dv else m.where(value > 0, spec.Dv, spec.D)

    def row_bytes(value, size):
        """Return the number of bytes of a row with all heads."""
        return width_of(value) * (size * spec.Hkv)

    def head(array, value, size):
        """Return the address of the lane's columns in the first row of `array`. Lanes beyond
        the width get the address of the last columns.
        """
        width = width_of(value)
        column = m.smaller(lane.lane % row_lanes, width // COLUMNS - 1)
        return m.beyond(m.beyond(array, kv_head, width * size), column, size * COLUMNS)

    def one(names, number):
        """Return the address of an array, given its index."""
        found, *others = (m.element(getattr(refs, name)) for name in names)
        for i, other in enumerate(others, 1):
            found = m.where(m.same(number, i), other, found)
        return found

    def put_words(place, value, words):
        only = lane.lane < width_of(value) // COLUMNS
        for i in range(0, len(words), 2):
            at = m.beyond(place, m.word(i), 4) if i else place
            m.put_words(at, words[i : i + 2], only)

    def put(pages, value, size, in_page, page, row, words):
        """Write one token's row to row `row` of page `page`.

        A page has `in_page` rows, and an element has `size` bytes.
        """
        each = row_bytes(value, size)
        at = m.beyond(m.beyond(head(pages, value, size), page, each * in_page), row, each)
        put_words(at, value, words)

    def put_rounded(pages, scales, value, in_page, page, row, words):
        """Write the codes and the scale of a row, as in `nsa_core.rounding.rounded`."""
        x = numbers(words)
        largest = m.size(x[0])
        for y in x[1:]:
            largest = m.larger(largest, m.size(y))
        # The bits of absolute values, as integers, have the order of the values. NaN is above
        # infinity.
        largest = m.larger(m.real(m.largest(m.bits(largest))), LEAST)
        factor = m.divided(LARGEST, largest)
        x = [y * factor for y in x]
        codes, scale = [m.codes(x[i : i + 4]) for i in (0, 4)], largest * (1 / LARGEST)
        put(pages, value, 1, in_page, page, row, codes)
        of_head = m.beyond(scales, kv_head, 4 * in_page)
        at = m.beyond(of_head, page, 4 * in_page * spec.Hkv, row * 4)
        m.put(at, m.bits(scale), m.same(lane.lane, 0))

    def in_ring(value, position):
        """Return the address of the lane's columns of a token in the ring buffer of the row.
        For a row without a ring buffer, the address is in the ring buffer of another row.
        """
        base = head(one([f"recent_{kind}" for kind in KINDS], value), value, 2)
        slot = m.smaller(m.larger(ring, 0), rings - 1)
        at = slot * spec.ring + m.larger(position, 0) % spec.ring
        return m.beyond(base, at, row_bytes(value, 2))

    def share_at(warp, of_lane):
        """Return the address of the lane's columns in a warp's partial sum of the window."""
        return lane.place("logits") + (warp * LANES + of_lane) * (4 * COLUMNS)

    # The numbers of a lane's columns.

    def numbers(words):
        return [x for word in words for x in m.unpack(word, spec.dtype)]

    def packed(x):
        return [m.pack(x[i], x[i + 1], spec.dtype) for i in range(0, COLUMNS, 2)]

    def stored_token(old, low, high, scale, kept):
        """Return the lane's columns of an older token, from its page or from a ring buffer."""
        x, scale = numbers(kept), m.real(scale)
        halves = [half for word in (low, high) for half in m.widened(word)]
        stored = [y * scale for half in halves for y in m.unpack(half, "float16")]
        stored = numbers(packed(stored))
        near = lane.lane >= 0
        for a, b in zip(x, stored, strict=True):
            most = m.multiply_add(m.size(b), NEAR, scale * LEAST_NEAR)
            near = near & (m.size(a - b) <= most)
        all_near = (1 << row_lanes) - 1 if rows > 1 else -1
        votes = (m.votes(near) >> own_row * row_lanes) & all_near
        rounded = old & m.different(votes, all_near)
        return [m.where(rounded, b, a) for a, b in zip(x, stored, strict=True)]

    # Means.

    def add_share(value, begin):
        """Add up this warp's share of the tokens in the window.

        Tokens of the call are read from the inputs, and older tokens from the pages. With fp8, an
        older token is read from the ring buffer of the row if the page may contain the token's
        rounded value (`nsa_core.rounding.is_of`).

        All tokens are loaded before the first token is added.
        """
        stride = warps * rows
        share, block = cdiv(spec.compress_block, stride), spec.block
        together = math.gcd(share, ROWS)
        names, new_bytes = [f"raw_{kind}" for kind in KINDS], row_bytes(value, 2)
        given = head(one([f"new_{x}" for x in names], value), value, 2)
        pages = head(one(names, value), value, spec.token_bytes)
        page_bytes = row_bytes(value, spec.token_bytes)
        if spec.fp8:
            scales = one([f"{x}_scale" for x in names], value)
            scales = m.beyond(scales, kv_head, 4 * block)

        def some(i, sums):
            found: list[tuple[Any, Any]] = []
            for j in range(together):
                tap = lane.warp * rows + own_row + (i * together + j) * stride
                position = begin + m.smaller(tap, spec.compress_block - 1)
                old = position < first
                entry = m.where(old, position, 0)
                number = m.read(lane.place("table") + entry // block * 4)
                of_page = m.beyond(pages, number, page_bytes * block)
                at = m.beyond(of_page, entry % block, page_bytes)
                new = row * spec.q_len + m.larger(position - first, 0)
                own = m.beyond(given, new, new_bytes)
                if not spec.fp8:
                    words = m.fetch_words(m.where(old, at, own))
                    found.append((tap, lambda words=words: numbers(words)))
                    continue
                scale = m.beyond(scales, number, 4 * spec.Hkv * block, entry % block * 4)
                kept = m.where(old, in_ring(value, position), own)
                words = m.fetch(at), m.fetch(at, 4), m.fetch(scale), m.fetch_words(kept)
                found.append((tap, lambda old=old, words=words: stored_token(old, *words)))
            for tap, own_columns in found:
                x = own_columns()
                if spec.compress_block % stride:
                    x = [m.where(tap < spec.compress_block, y, 0.0) for y in x]
                sums = plus(sums, x)
            return sums

        zeros = [m.word(0.0)] * COLUMNS
        sums = m.repeat(share // together, some, zeros, unrolled=False)
        for i in range(0, COLUMNS, 4):
            m.write_words(share_at(lane.warp, lane.lane), sums[i : i + 4], 4 * i)

    def put_shares(value, page, slot):
        def add(i, sums):
            at = share_at(i // rows, i % rows * row_lanes + own)
            words = [x for i in range(0, COLUMNS, 4) for x in m.read_words(at, 4, 4 * i)]
            return plus(sums, [m.real(x) for x in words])

        own = lane.lane % row_lanes
        zeros = [m.word(0.0)] * COLUMNS
        sums = m.repeat(warps * rows, add, zeros, unrolled=False)
        words = packed([x * (1 / spec.compress_block) for x in sums])
        pages = one([f"compressed_{kind}" for kind in KINDS], value)
        at = spec.per_page, page, slot, words
        if not spec.fp8:
            put(pages, value, 2, *at)
            return
        m.when(m.same(value, 0), lambda: put(pages, value, 2, *at))
        scales = one(["compressed_value_scale"], value)
        m.when(m.same(value, 1), lambda: put_rounded(pages, scales, value, *at))

    def put_row(number, new, page, inside, position):
        """Write row `new` of input array `number` to its page.

        The input arrays are the new keys and values of each branch, one branch after the other.
        """
        value = number & 1
        names = [f"{branch}_{kind}" for branch in RAW for kind in KINDS]
        given = head(one([f"new_{name}" for name in names], number), value, 2)
        words = m.fetch_words(m.beyond(given, new, row_bytes(value, 2)))
        at = spec.block, page, inside, words
        if not spec.fp8:
            put(one(names, number), value, 2, *at)
            return
        scales = one([f"{name}_scale" for name in names], number)
        put_rounded(one(names, number), scales, value, *at)
        kept = (ring >= 0) & (ring < rings) & (number < len(KINDS))
        m.when(kept, lambda: put_words(in_ring(value, position), value, words))

    def put_token(i):
        position = first + i
        column = m.larger(position, 0) // spec.block
        later = column - m.larger(first, 0) // spec.block
        page = m.read(lane.place("new_pages") + m.smaller(later, NEW_PAGES - 1) * 4)
        there = (length > 0) & (position >= 0) & (column < columns)
        there = there & (page >= 0) & (page < pool)
        new = row * spec.q_len + i
        inside = m.larger(position, 0) % spec.block
        begin = position - (spec.compress_block - 1)
        ends = there & (begin >= 0) & m.same(m.larger(begin, 0) % spec.stride, 0)

        def put_mean():
            add_share(lane.rank, begin)
            m.sync_cta()
            slot = inside // spec.stride
            m.when(m.same(lane.warp, 0), lambda: put_shares(lane.rank, page, slot))
            m.sync_cta()  # the shares have been read

        m.when(ends & (lane.rank < len(KINDS)), put_mean)

        def some(j):
            put_row(lane.warp + j * warps, new, page, inside, position)

        mine = (len(RAW) * len(KINDS) + warps - 1 - lane.warp) // warps
        there = there & m.same(lane.rank, spec.variant.cluster - 1)
        m.repeat(m.where(there, mine, 0), some, unrolled=False)

    m.repeat(count, put_token, unrolled=False)

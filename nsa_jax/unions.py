"""Which blocks a tile of tokens reads, and for which of its tokens: the lists of `selected`.

Sorted, the blocks that several tokens of a tile want stand side by side; sums along the row
give each its place in the list and one bit a token.
"""

from kernels_pallas.mosaic import union
from kernels_pallas.mosaic.union import NOTHING

TOKENS = 64  # of a tile at most


def wanted(first_key, token, cut):
    """One int32 a wanted block, ordered by its first key, then by the token that wants it.

    `cut`: the block ends after the token's last key. First keys up to 2**24.
    """
    return (first_key * TOKENS + token) * 2 + cut


def lists(steps, wanted, spec):
    """The lists of tiles, from `wanted` `[B, Hkv, tiles, entries]`, `NOTHING` in empty places.

    Returns int32 `starts` `[B, Hkv, tiles, entries]`, the first keys of the blocks, ascending;
    `members` `[B, Hkv, tiles, words, entries]`, bit `token % 32` of word `token // 32`; and
    `counts` `[B, Hkv, tiles, 2]`: blocks before the first that is cut for a member, all blocks.
    Entries past the count have no meaning. `steps`: `nsa_jax.tiled.Framework`; `spec`: the
    `selected.Selected` that will read them.
    """
    if spec.entries <= union.LONGEST:
        starts, members, counts = steps.run(union.lists(spec), wanted)
        return starts, members, counts[..., 0]
    xp, shape = steps.xp, wanted.shape
    entries = shape[-1]
    key = steps.sort(wanted.reshape(-1, entries))
    there = key < NOTHING
    block = key // (2 * TOKENS)
    fresh = steps.integers(block[:, 1:] != block[:, :-1])
    fresh = xp.concatenate([xp.ones_like(key[:, :1]), fresh], axis=1)
    fresh = xp.where(there, fresh, 0)
    count = xp.cumsum(fresh, axis=1, dtype=xp.int32)[:, -1:]
    size = xp.cumsum(steps.integers(there), axis=1, dtype=xp.int32)[:, -1:]
    # Where the k-th block begins in the row, and where the last one ends.
    every = steps.numbers(key, entries) + 1
    begin = steps.sort(xp.where(fresh == 1, every - 1, entries))
    begin = xp.minimum(xp.concatenate([begin, size], axis=1), size)
    at = begin[:, :-1].clip(0, entries - 1)
    starts = steps.rows(block, at)
    token = key // 2 % TOKENS
    members = []
    for word in range(spec.words):
        bit = xp.where(there & (token // 32 == word), xp.ones_like(key) << (token % 32), 0)
        # A block's tokens are distinct, so their bits add up; int32 wraps around rightly.
        total = xp.cumsum(bit, axis=1, dtype=xp.int32)
        before = xp.concatenate([xp.zeros_like(key[:, :1]), total], axis=1)
        before = steps.rows(before, begin)
        members.append(before[:, 1:] - before[:, :-1])
    # The first member has the earliest last key: it is cut if any is.
    cut = (steps.rows(key, at) % 2 == 1) & (every <= count)
    whole = xp.amin(xp.where(cut, every - 1, count), axis=1)
    counts = xp.concatenate([whole[:, None], count], axis=1)
    lead = shape[:-1]
    return (
        starts.reshape(shape),
        xp.concatenate([word[:, None] for word in members], axis=1).reshape(
            *lead, spec.words, entries
        ),
        counts.reshape(*lead, 2),
    )

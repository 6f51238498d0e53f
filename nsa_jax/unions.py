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
    begin, end, count = runs(steps, block[:, 1:] != block[:, :-1], there)
    at = begin.clip(0, entries - 1)
    starts = steps.rows(block, at)
    token = key // 2 % TOKENS
    members = []
    for word in range(spec.words):
        bit = xp.where(there & (token // 32 == word), xp.ones_like(key) << (token % 32), 0)
        members.append(run_sums(steps, bit, begin, end))
    every = steps.numbers(key, entries) + 1
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


def runs(steps, changes, there):
    """Where the k-th run of like neighbours begins and ends in each row; how many there are.

    `changes` `[rows, entries - 1]`: whether an entry differs from the one before; `there`
    `[rows, entries]`: entries that count, in front. Runs past the last are empty, at the end.
    """
    xp, entries = steps.xp, there.shape[1]
    fresh = xp.concatenate([xp.ones_like(there[:, :1]), changes], axis=1) & there
    number = steps.numbers(there, entries)
    count, size = (
        xp.cumsum(steps.integers(x), axis=1, dtype=xp.int32)[:, -1:] for x in (fresh, there)
    )
    begin = xp.minimum(steps.sort(xp.where(fresh, number, entries)), size)
    return begin, xp.concatenate([begin[:, 1:], size], axis=1), count


def run_sums(steps, bits, begin, end):
    """The int32 sum of each run. Bits of distinct tokens: int32 wraps around rightly."""
    xp = steps.xp
    total = xp.cumsum(bits, axis=1, dtype=xp.int32)
    total = xp.concatenate([xp.zeros_like(total[:, :1]), total], axis=1)
    return steps.rows(total, end) - steps.rows(total, begin)

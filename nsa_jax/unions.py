"""The lists of `selected` in Pallas' interpreter, which cannot run `mosaic/union.py`.

Sorted, the blocks that several tokens of a tile want stand side by side; sums along the row
give each its place in the list and one bit a token.
"""

NOTHING = 2**31 - 1  # in place of a wanted block: none
TOKENS = 64  # of a tile at most


def lists(steps, indices, position, key_start, spec):
    """What `union.lists` gives, from the same arrays.

    `steps`: `nsa_jax.tiled.Framework`; `spec`: the `selected.Selected` that will read them.
    """
    xp, wanted = steps.xp, _wanted(steps, indices, position, key_start, spec)
    *lead, entries = wanted.shape
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
    members = xp.concatenate([word[:, None] for word in members], axis=1)
    return (
        starts.reshape(*lead, entries),
        members.reshape(*lead, spec.words, entries),
        counts.reshape(*lead, 2),
    )


def _wanted(steps, indices, position, key_start, spec):
    """One int32 a wanted block, `(first key * TOKENS + token) * 2 + cut`, `NOTHING` in empty
    places: `[B, Hkv, tiles, entries]`. `cut`: the block ends after the token's last key. First
    keys up to 2**24.
    """
    xp, size, (batch, _, kv_heads, n) = steps.xp, spec.block, indices.shape
    tokens, tiles = spec.tile.tokens, spec.tiles
    position, start = (x[..., None, None] for x in (position, key_start))
    token = steps.numbers(position, indices.shape[1])[..., None, None] % tokens
    cut = steps.integers(indices >= (position + 1) // size)
    wanted = ((start + indices * size) * TOKENS + token) * 2 + cut
    wanted = xp.where((indices >= 0) & (indices <= position // size), wanted, NOTHING)
    wanted = steps.longer(wanted, 1, tiles * tokens, NOTHING)
    wanted = xp.moveaxis(wanted.reshape(batch, tiles, tokens, kv_heads, n), 3, 1)
    wanted = wanted.reshape(batch, kv_heads, tiles, tokens * n)
    return steps.longer(wanted, 3, spec.entries, NOTHING)


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

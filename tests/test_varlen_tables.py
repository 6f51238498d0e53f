"""The tables of packed rows (`nsa_core.varlen`) against plain loops, in both frameworks."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nsa_core.config import NSAConfig
from nsa_core.varlen import Capacity, Varlen, sequences_of_segments
from nsa_jax.jax_ops import JAX_OPS
from nsa_torch.torch_ops import TORCH_OPS

SMALL = functools.partial(NSAConfig, num_selected=3, num_initial=1, num_local=1)
CONFIGS = {
    "paper": NSAConfig(),
    "16": SMALL(compress_block=8, compress_stride=4, select_block=16, window=10),
    "128": SMALL(compress_block=32, compress_stride=8, select_block=128, window=70),
    "48": SMALL(compress_block=48, compress_stride=16, select_block=48, window=64),
}
FRAMEWORKS = {
    "torch": (TORCH_OPS, lambda x: torch.tensor(x, dtype=torch.int32)),
    "jax": (JAX_OPS, lambda x: jnp.array(x, jnp.int32)),
}
# Lengths of sequences, then tokens behind the last one.
LENGTHS = {
    "one": ([200], 0),
    "many": ([70, 64, 130, 33, 31, 1], 0),
    "padding": ([65, 200], 40),
    "empty": ([0, 90, 0, 0, 129, 0], 3),
    "only padding": ([0], 70),
    "a token": ([1], 0),
    "tokens": ([1] * 9, 2),
    # Each is longer than a multiple of a tile: no table has an entry to spare.
    "full": ([1, 65, 129, 65, 1, 129, 129, 1], 0),
}
FULL = "many", "full"  # there is room for these sequences and no more


def loops(lengths, spare, capacity):
    """All tables of a row, by name."""
    config, unit = capacity.config, capacity.unit
    found = {name: [] for name in ("start", "length", "end", "place", "window")}
    tokens, tiles, queries = [], [], []
    start = place = window = 0
    empty = [0] * (capacity.max_sequences - len(lengths))
    every = [(n, n) for n in [*lengths, *empty]] + [(spare, 0)]
    for keys, length in every:
        values = start, length, start + keys, place, window
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
        slot = place // config.compress_stride
        for i in range(keys):
            seen = config.num_compressed(i + 1) if length else 0
            own = start + i + 1 if length else start
            first = max(start, own - config.window)
            position = i if length else -1
            tokens.append((position, start, place, slot, slot + seen, first, own))
        for first in range(0, keys, 64):
            tiles.append((place // 64 + first // 64, start + first, start + keys))
        queries.append((start, start + keys))
        start, place = start + keys, place + -(-keys // unit) * unit
        window += config.num_compressed(length)
    return found, tokens, tiles, queries


# Arrays of JAX, of which each shape is compiled, where their operations have all to do.
CASES = [(*x, "torch") for x in itertools.product(CONFIGS, LENGTHS, ("all", "last", "cut"))]
CASES += [("16", "empty", "last", "jax"), ("48", "padding", "cut", "jax")]


@pytest.mark.parametrize(("config", "lengths", "queries", "framework"), CASES)
def test_tables_are_those_of_loops(config, lengths, queries, framework):
    ops, array = FRAMEWORKS[framework]
    given, spare = LENGTHS[lengths]
    borders = np.cumsum([0, *given])[None]
    S = sum(given) + spare
    if queries == "cut":  # before the end of the last sequences
        S = max(S - 80, 1)
        given = np.diff(borders[0].clip(0, S)).tolist()
        spare = S - sum(given)
    T = max(S - 17, 1) if queries != "all" else S
    room = len(given) + (0 if lengths in FULL else 3)
    capacity = Capacity(1, T, S, room, max(given), CONFIGS[config])
    found, tokens, tiles, ranges = loops(given, spare, capacity)

    tables = Varlen(ops, capacity, array(borders))
    for name, values in found.items():
        np.testing.assert_array_equal(getattr(tables.sequences, name)[0], values, name)
    of_tokens = tables.tokens
    wanted = np.array(tokens[S - T :]).T
    for name, x, values in zip(of_tokens._fields, of_tokens, wanted, strict=True):
        assert "int32" in str(x.dtype)
        np.testing.assert_array_equal(x[0], values, name)

    first, end = (np.asarray(x[0]) for x in tables.key_tiles)
    used = {tile: (first, end) for tile, first, end in tiles}
    assert len(first) >= max(used, default=-1) + 1
    for tile, pair in enumerate(zip(first, end, strict=True)):
        if tile in used:
            assert pair == used[tile]
        else:
            assert pair[0] >= pair[1]

    for count in (1, 4, 32):
        first, end = (np.asarray(x[0]) for x in tables.query_tiles(count))
        pairs = [pair for pair in zip(first, end, strict=True) if pair[0] < pair[1]]
        offset = S - T
        expected = []
        for low, high in ranges:
            low, high = (min(max(x - offset, 0), T) for x in (low, high))
            expected += [(x, min(x + count, high)) for x in range(low, high, count)]
        assert pairs == expected


def test_rows_of_a_batch_have_tables_of_their_own():
    rows, config = torch.tensor([[0, 70, 90, 90], [0, 1, 2, 128]]), NSAConfig()

    def made(borders):
        capacity = Capacity(len(borders), 128, 128, 4, 128, config)
        tables = Varlen(TORCH_OPS, capacity, borders)
        return [*tables.tokens, *tables.key_tiles]

    alone = [made(row[None]) for row in rows]
    for both, *each in zip(made(rows), *alone, strict=True):
        assert torch.equal(both, torch.cat(each))


@pytest.mark.parametrize(
    ("segments", "longest", "fits"), [(4, 33, True), (3, 33, False), (4, 32, False)]
)
def test_where_there_is_no_room_all_is_padding(segments, longest, fits):
    """Runs of ids, of which JAX does not know how many there are."""
    ids = torch.tensor([[-1] * 3 + [0] * 33 + [-1] * 2 + [1] * 6], dtype=torch.int32)
    capacity = Capacity(1, 44, 44, segments - 1, longest, NSAConfig(4, 2, 16, 2, 1, 1, 7))
    sequences = sequences_of_segments(TORCH_OPS, ids, capacity)
    tables = Varlen(TORCH_OPS, capacity, sequences=sequences)
    position = [*[-1] * 3, *range(33), -1, -1, *range(6)] if fits else [-1] * 44
    assert tables.tokens.position[0].tolist() == position
    first, end = tables.key_tiles
    assert int((torch.minimum(end, first + 64) - first).clamp(min=0).sum()) == 44

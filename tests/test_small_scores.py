"""Blocks whose probabilities float32 cannot hold are chosen in the order of their scores too."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
import nsa_torch
from bench.judge.parity import SCORE_SLACK
from nsa_core.config import NSAConfig
from tests import loops
from tests.inputs import segment_ids
from tests.torch_oracle import to_torch

PLAIN = NSAConfig(1, 1, 1, num_selected=3, num_initial=0, num_local=1, window=1)
FINE = NSAConfig(8, 4, 8, num_selected=4, num_initial=1, num_local=1, window=9)
# Compressed tokens of three strides, blocks of five.
WIDE = NSAConfig(12, 4, 20, num_selected=7, num_initial=1, num_local=1, window=9)
NONE_FORCED = NSAConfig(4, 4, 4, num_selected=2, num_initial=0, num_local=0, window=0)
PATHS = {
    f"{module.__name__}-{name}": (module, name)
    for module, names in ((nsa_jax, ("reference", "xla")), (nsa_torch, ("reference", "sdpa")))
    for name in names
}
by_path = pytest.mark.parametrize("path", PATHS)


def select(path, query, key, config, lengths, cached=False):
    """Of sequences of these lengths, of which there is one where the queries are fewer."""
    module, name = PATHS[path]
    of_torch = module is nsa_torch
    array = (lambda x: to_torch(np.asarray(x), False)) if of_torch else jnp.asarray
    where = {"kv_len": array(np.int32(lengths)) if cached else lengths[0]}
    if len(lengths) > 1:
        where = {"segment_ids": array(segment_ids(lengths))}
        if of_torch:
            where = {"cu_seqlens": array(np.cumsum([0, *lengths], dtype=np.int32))}
    options = {"config": config, "scale": 1.0, "implementation": name, **where}
    return np.asarray(module.select_blocks(array(query), array(key), **options))


def log_scores(query, key, position, config):
    """Logarithms of Eqs. 8 to 10 in float64, of one query `[G, D]` and keys `[C, D]`: `[N]`."""
    rules = loops.Rules(config)
    own = position // config.select_block
    terms = [[] for _ in range(own + 1)]
    count = sum(rules.sees_compressed(position, i) for i in range(len(key)))
    for logits in query.astype(np.float64) @ key[:count].astype(np.float64).T:
        lse = log_sum(logits)
        for i, logit in enumerate(logits):
            first = i * config.compress_stride // config.select_block
            for j in range(first, min(first + 2, own + 1)):
                if times := rules.overlap(i, j):
                    terms[j].append(logit - lse + math.log(times))
    return np.array([log_sum(x) for x in terms])


def log_sum(terms):
    top = max(terms, default=-math.inf)
    if top == -math.inf:
        return top
    return top + math.log(math.fsum(math.exp(x - top) for x in terms))


def check(found, query, key, config, first):
    """`found` `[T, Hkv, n]` of one sequence, whose first query is at position `first`."""
    rules = loops.Rules(config)
    group = query.shape[1] // key.shape[1]
    decided = 0
    for t, g in np.ndindex(found.shape[:2]):
        p = first + t
        scores = log_scores(query[t, g * group : (g + 1) * group], key[:, g], p, config)
        want, got = loops.select(scores, p, p + 1, rules), found[t, g].tolist()
        assert got == sorted(set(got) - {-1}) + [-1] * got.count(-1)
        chosen = [j for j in got if j >= 0]
        assert len(chosen) == len(want)
        forced = {j for j in range(len(scores)) if rules.forced(j, p)}
        assert forced <= set(chosen)
        free = [scores[j] for j in want if j not in forced]
        if free:
            least = min(scores[j] for j in chosen if j not in forced)
            assert least >= min(free) + math.log1p(-SCORE_SLACK), (t, g, got, want)
            decided += min(free) < -87 and len(want) < len(scores)
    return decided


@by_path
@pytest.mark.parametrize("gap", [80, 95, 104, 150, 5000])
def test_a_block_below_the_range_of_float32(path, gap):
    """The third best of five logits is less than the best by `gap`."""
    key = np.array([-1.5, -1, -1.2, 0, -9], np.float32).reshape(1, 5, 1, 1)
    query = np.full((1, 1, 1, 1), gap, np.float32)
    found = select(path, query, key, PLAIN, [5])
    assert found[0, 0, 0].tolist() == [1, 3, 4]


CASES = {
    "one head": ((60, 60, 1, 1), {}),
    "groups": ((40, 230, 6, 2), {"config": WIDE}),
    "the last queries": ((9, 75, 4, 2), {}),
    "a cache": ((9, 75, 4, 2), {"cached": True}),
    "no forced block": ((30, 30, 2, 1), {"config": NONE_FORCED}),
    "packed": ((90, 90, 4, 2), {"lengths": (37, 1, 43, 9)}),
    "bfloat16": ((50, 50, 2, 2), {"dtype": "bfloat16"}),
}


@by_path
@pytest.mark.parametrize("std", [300, 2000])
@pytest.mark.parametrize("case", CASES)
def test_logits_far_apart(path, case, std, rng):
    (T, S, H, Hkv), options = CASES[case]
    config, lengths = options.get("config", FINE), options.get("lengths", (S,))
    dtype = jnp.dtype(options.get("dtype", "float32"))
    query = rng.normal(size=(1, T, H, 8), scale=std / 8**0.5).astype(dtype)
    key = rng.normal(size=(1, config.num_compressed(S), Hkv, 8)).astype(dtype)
    found = select(path, query, key, config, lengths, options.get("cached", False))
    slot, token, decided = 0, 0, 0
    for length in lengths:
        queries = min(T, length)
        slots = slice(slot, slot := slot + config.num_compressed(length))
        tokens = slice(token, token := token + queries)
        decided += check(
            found[0, tokens], query[0, tokens], key[0, slots], config, length - queries
        )
    assert decided


# A block each 16 keys, which kernels take too.
FAR = NSAConfig(16, 16, 16, num_selected=6, window=0)
BY_SCORE, LOWEST = [0, 10, 26, 27, 28, 29], [0, 1, 2, 10, 28, 29]


def far_blocks(heads, dtype):
    """Queries `[2, 1, heads, 32]` and keys `[2, 30, 1, 32]` of 30 blocks: the logits of block 10
    are 0, those of the others less by 80 (120 in the second row) and more, least of the lowest.
    """
    query, key = np.zeros((2, 1, heads, 32), dtype), np.zeros((2, 30, 1, 32), dtype)
    query[..., 0] = 1
    key[:, :, 0, 0] = -np.array([[80], [120]]) - np.arange(30)[::-1]
    key[:, 10] = 0
    return query, key


@by_path
def test_far_blocks(path):
    found = select(path, *far_blocks(2, jnp.bfloat16), FAR, [480])
    assert found.tolist() == [[[BY_SCORE]]] * 2

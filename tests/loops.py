"""The paper's equations in plain loops, NumPy float64: the oracle's oracle.

One token, one head, one key at a time, from arXiv 2502.11089 v2, Eqs. 5-12, sharing no code
with `nsa_jax`. One batch row: query [T, H, D], key [S, Hkv, D], value [S, Hkv, Dv]. What is
easily got wrong is a method of `Rules`.
"""

import math
from typing import NamedTuple

import numpy as np


class Rules:
    """Who reads what, by the contract; `config` has the fields of `NSAConfig`."""

    def __init__(self, config):
        self.config = config

    def position(self, t, T, S):
        return t + S - T

    def kv_head(self, h, H, Hkv):
        return h // (H // Hkv)

    def scale(self, D):
        return D**-0.5

    def sees_compressed(self, p, i):
        return p >= i * self.config.compress_stride + self.config.compress_block - 1

    def sees_selected(self, p, u, blocks):
        return u // self.config.select_block in blocks and u <= p

    def sees_sliding(self, p, u):
        return p - self.config.window + 1 <= u <= p

    def overlap(self, i, j):
        """w(i, j): stride-sized sub-blocks that token i and block j share (Eq. 9)."""
        in_token = self.config.compress_block // self.config.compress_stride
        in_block = self.config.select_block // self.config.compress_stride
        token = range(i, i + in_token)
        return sum(m in token for m in range(j * in_block, (j + 1) * in_block))

    def candidates(self, p, S):
        return range(p // self.config.select_block + 1)

    def forced(self, j, p):
        own = p // self.config.select_block
        return j < self.config.num_initial or own - self.config.num_local < j <= own

    def num_free(self, num_forced):
        return self.config.num_selected - num_forced

    def rank(self, score, j):
        """The smallest rank is chosen first."""
        return (-score, j)

    def sequences(self, spans):
        return spans


class Stages(NamedTuple):
    """Everything that the attention computes on its way, in order."""

    compressed: np.ndarray
    compressed_lse: np.ndarray
    scores: np.ndarray
    blocks: np.ndarray
    selected: np.ndarray
    selected_lse: np.ndarray
    sliding: np.ndarray
    sliding_lse: np.ndarray
    out: np.ndarray


# What a padding row holds.
UNSEEN = Stages(0, -np.inf, 0, -1, 0, -np.inf, 0, -np.inf, 0)


def compress(x, config):
    """Eq. 7: [S, Hkv, D] -> [C, Hkv, D], the means of windows."""
    block, stride = config.compress_block, config.compress_stride
    starts = [s for s in range(0, len(x), stride) if s + block <= len(x)]
    out = np.zeros((len(starts), *x.shape[1:]))
    for i, start in enumerate(starts):
        for head in range(x.shape[1]):
            out[i, head] = sum(x[start : start + block, head]) / block
    return out


def softmax(query, key, sees, rules, scale=None):
    """Probabilities [T, H, keys] over the keys u with `sees(t, kv_head, u)`, and lse [T, H]."""
    T, H, D = query.shape
    scale = rules.scale(D) if scale is None else scale
    probability, lse = np.zeros((T, H, len(key))), np.full((T, H), -np.inf)
    for t in range(T):
        for h in range(H):
            g = rules.kv_head(h, H, key.shape[1])
            seen = [u for u in range(len(key)) if sees(t, g, u)]
            logit = {u: scale * sum(query[t, h] * key[u, g]) for u in seen}
            if seen:
                top = max(logit.values())
                lse[t, h] = top + math.log(math.fsum(math.exp(x - top) for x in logit.values()))
            for u in seen:
                probability[t, h, u] = math.exp(logit[u] - lse[t, h])
    return probability, lse


def weigh(probability, value, rules):
    """out[t, h] = sum_u probability[t, h, u] * value[u, kv head of h]."""
    T, H, U = probability.shape
    out = np.zeros((T, H, value.shape[2]))
    for t in range(T):
        for h in range(H):
            g = rules.kv_head(h, H, value.shape[1])
            for u in range(U):
                out[t, h] += probability[t, h, u] * value[u, g]
    return out


def block_scores(probability, Hkv, N, rules):
    """Eqs. 9 and 10: [T, H, C] -> [T, Hkv, N]."""
    T, H, C = probability.shape
    scores = np.zeros((T, Hkv, N))
    for t in range(T):
        for h in range(H):
            for j in range(N):
                for i in range(C):
                    g = rules.kv_head(h, H, Hkv)
                    scores[t, g, j] += rules.overlap(i, j) * probability[t, h, i]
    return scores


def select(scores, p, S, rules):
    """Eq. 11, one query and kv head: scores [N] -> the chosen blocks, ascending."""
    candidates = list(rules.candidates(p, S))
    forced = [j for j in candidates if rules.forced(j, p)]
    rest = sorted(set(candidates) - set(forced), key=lambda j: rules.rank(scores[j], j))
    return sorted(forced + rest[: rules.num_free(len(forced))])


def attention(query, keys, values, gates, rules, scale=None):
    """Eq. 5 for one sequence, every stage of it.

    `keys`, `values` and the last axis of `gates` [T, H, 3]: compressed, selected, sliding.
    """
    T, S, Hkv, config = len(query), len(keys[0]), keys[0].shape[1], rules.config
    position = [rules.position(t, T, S) for t in range(T)]

    def attend(key, value, sees):
        probability, lse = softmax(query, key, sees, rules, scale)
        return probability, weigh(probability, value, rules), lse

    pair = compress(keys[0], config), compress(values[0], config)
    p_cmp, *compressed = attend(*pair, lambda t, g, i: rules.sees_compressed(position[t], i))

    scores = block_scores(p_cmp, Hkv, -(-S // config.select_block), rules)
    blocks = np.full((T, Hkv, config.num_selected), -1)
    chosen = {}
    for t in range(T):
        for g in range(Hkv):
            chosen[t, g] = select(scores[t, g], position[t], S, rules)
            recorded = chosen[t, g][: config.num_selected]
            blocks[t, g, : len(recorded)] = recorded

    _, *selected = attend(
        keys[1], values[1], lambda t, g, u: rules.sees_selected(position[t], u, chosen[t, g])
    )
    _, *sliding = attend(keys[2], values[2], lambda t, g, u: rules.sees_sliding(position[t], u))
    branches = (compressed[0], selected[0], sliding[0])
    out = sum(gates[..., c, None] * branch for c, branch in enumerate(branches))
    return Stages(*compressed, scores, blocks, *selected, *sliding, out)


def packed(spans, query, keys, values, gates, rules, **options):
    """`attention` of every sequence [start, end) of the row on its own, laid side by side.

    What belongs to no sequence is padding. The T queries are the last T tokens of the row.
    """
    shapes = attention(query, keys, values, gates, rules, **options)
    whole = Stages(*(np.full_like(x, unseen) for x, unseen in zip(shapes, UNSEEN, strict=True)))
    first_query = len(keys[0]) - len(query)
    for start, end in rules.sequences(spans):
        rows = slice(max(start - first_query, 0), max(end - first_query, 0))
        own_keys, own_values = ([x[start:end] for x in xs] for xs in (keys, values))
        part = attention(query[rows], own_keys, own_values, gates[rows], rules, **options)
        for stage, of_part in zip(whole, part, strict=True):
            stage[rows][..., : of_part.shape[-1]] = of_part
    return whole

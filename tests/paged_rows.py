"""Rows of tokens in a paged cache, and what attention over each row alone gives: the oracle is
the dense reference in float64 over whole sequences, which knows no pages.
"""

import dataclasses

import numpy as np
import torch

import nsa_torch
from nsa_core.config import NSAConfig
from nsa_core.types import Branches

SMALL = NSAConfig(8, 4, 16, num_selected=3, num_initial=1, num_local=1, window=9)


@dataclasses.dataclass(frozen=True)
class Sizes:
    H: int = 4
    Hkv: int = 2
    D: int = 8
    Dv: int = 6
    config: NSAConfig = SMALL
    separate: bool = False


class Rows:
    """Sequences of random tokens, NumPy float32; each branch its own where they are separate."""

    def __init__(self, sizes: Sizes, lengths: list[int], seed: int = 0):
        rng = np.random.default_rng(seed)
        self.sizes, self.lengths = sizes, list(lengths)

        def draw(heads, width):
            return [rng.standard_normal((n, heads, width)).astype(np.float32) for n in lengths]

        copies = 3 if sizes.separate else 1
        self.query = draw(sizes.H, sizes.D)
        self.gates = [rng.random((n, sizes.H, 3)).astype(np.float32) for n in lengths]
        self.key = [draw(sizes.Hkv, sizes.D) for _ in range(copies)]  # by branch, by row
        self.value = [draw(sizes.Hkv, sizes.Dv) for _ in range(copies)]

    def cut(self, name: str, begin, end, as_array):
        """The tokens `begin[b] .. end[b] - 1` of each row, one row after the other."""
        spans = [slice(*span) for span in zip(begin, end, strict=True)]

        def flat(rows):
            return as_array(np.concatenate([x[s] for x, s in zip(rows, spans, strict=True)]))

        found = getattr(self, name)
        if name in ("query", "gates"):
            return flat(found)
        each = [flat(rows) for rows in found]
        return Branches(*each) if self.sizes.separate else each[0]

    def expected(self, begin, end, dtype=torch.float64, compressed=None):
        """What attention gives for these tokens, from whole sequences: NumPy `[N, H, Dv]`.

        `compressed`: of a row's keys and values, in place of the mean.
        """
        outs = []
        for b, (first, last) in enumerate(zip(begin, end, strict=True)):
            if first >= last:
                continue
            tensor = lambda x, last=last: torch.from_numpy(x[:last])[None].to(dtype)
            key, value = (
                Branches(*(tensor(rows[b]) for rows in x))
                if self.sizes.separate
                else tensor(x[0][b])
                for x in (self.key, self.value)
            )
            out = nsa_torch.attention(
                tensor(self.query[b]),
                key,
                value,
                tensor(self.gates[b]),
                config=self.sizes.config,
                compressed=None if compressed is None else compressed(key, value),
                implementation="reference",
            )
            outs.append(out[0, first:last].to(torch.float64).numpy())
        shape = 0, self.sizes.H, self.sizes.Dv
        return np.concatenate([np.zeros(shape), *outs])


def tables(capacities: list[int], config: NSAConfig, pool: int, width: int, seed: int = 0):
    """A table of shuffled pages, int32 `[B, width]`; entries of no page are anything."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(pool))
    table = rng.integers(-5, pool + 5, (len(capacities), width)).astype(np.int32)
    for row, tokens in enumerate(capacities):
        for column in range(-(-tokens // config.select_block)):
            table[row, column] = free.pop()
    return table


def bounds(counts) -> np.ndarray:
    """`cu_seqlens` of rows of so many tokens."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

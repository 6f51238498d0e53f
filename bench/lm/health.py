"""Measures gates and selections per layer, which show whether every branch is used.

In this module a head is a unit with its own gates. A head is a query head, or a key/value head
whose query heads share gates. The query heads of a key/value head always share a selection. Since
sigmoid gates have no fixed sum, the entropy and the largest share use gates divided by their sum.
"""

import math

import numpy as np

from nsa_core.types import Branches

from .data import Batch
from .learner import Learner

# A head has collapsed to one branch if its gates have a lower entropy and a larger share than
# these.
COLLAPSED_ENTROPY, COLLAPSED_SHARE = 0.1, 0.95
EVEN = math.log(3)  # the entropy of three equal gates
SMALL = 1e-9


def layer(gates: np.ndarray, indices: np.ndarray) -> dict[str, float]:
    """Measure gates `[T, heads, 3]` and block indices `[T, key/value heads, n]`. All values are
    means over the tokens.

    Returns:
      compressed: Gate of the compressed branch, mean over heads. The fields `selected` and
        `sliding` have the gates of the selected and the sliding branch.
      entropy: Entropy of the gates in nats, mean over heads.
      entropy_min: Entropy of the head with the lowest entropy.
      largest: Share of the largest gate, mean over heads.
      collapsed: Share of the heads with an entropy below 0.1 and a largest share over 0.95.
      overlap: Share of a query's blocks that the previous query also selected.
    """
    gates = gates.astype(np.float64)
    shares = gates / np.maximum(gates.sum(axis=-1, keepdims=True), SMALL)
    entropies = -(shares * np.log(np.maximum(shares, SMALL))).sum(axis=-1).mean(axis=0)
    largest = shares.max(axis=-1).mean(axis=0)
    gone = (entropies < COLLAPSED_ENTROPY) & (largest > COLLAPSED_SHARE)
    found = dict(zip(Branches._fields, gates.mean(axis=(0, 1)).tolist(), strict=True))
    return found | {
        "entropy": float(entropies.mean()),
        "entropy_min": float(entropies.min()),
        "largest": float(largest.mean()),
        "collapsed": float(gone.mean()),
        "overlap": overlap(indices),
    }


def layers(learner: Learner, batch: Batch) -> list[dict[str, float]]:
    """Return the measures of each layer for the first row of `batch`, as means over the processes.
    Every process must call this function. For dense attention there are no measures.
    """
    found = learner.ranks.gather([layer(*each) for each in learner.observe(batch)])
    return [
        {name: float(np.mean([each[name] for each in same])) for name in same[0]}
        for same in zip(*found, strict=True)
    ]


def overlap(indices: np.ndarray) -> float:
    """Return the overlap between the blocks of adjacent queries. `indices` `[T, heads, n]` has -1
    in empty slots.
    """
    now, before = indices[1:], indices[:-1]
    filled = now >= 0
    common = (now[..., None] == before[..., None, :]).any(axis=-1) & filled
    shares = common.sum(axis=-1) / np.maximum(filled.sum(axis=-1), 1)
    return float(shares.mean()) if now.size else 0.0

"""Derives from records the length from which NSA is faster than dense attention, for each
combination of heads and pass.

Only records of one sequence with the paper's config in bfloat16 count. Only records with random
inputs count, since NSA is slowest on random inputs. `reports/crossover.py` defines when NSA is
faster. If the answer is known at only one length, and NSA is faster at this length, no length is
derived.
"""

import itertools
from collections.abc import Iterable

from nsa_core import policy
from nsa_core.config import NSAConfig

from ..harness.records import Record
from ..reports import crossover

PAPER = NSAConfig().as_dict()


def lengths(records: Iterable[Record]) -> dict[str, dict[str, policy.Length]]:
    """Return the lengths by `policy.heads_of` and pass, for the section `faster_than_dense` of a
    device's file.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        counts = r.mode in policy.PASSES and r.B == 1 and r.T == r.S and r.config == PAPER
        if counts and r.input == "random" and r.dtype == "bfloat16":
            heads = policy.heads_of(r.framework, r.H, r.Hkv, r.D, r.Dv)
            groups.setdefault((heads, r.mode), []).append(r)
    found: dict[str, dict[str, policy.Length]] = {}
    for (heads, mode), each in groups.items():
        for panel in itertools.chain.from_iterable(crossover.asked(each).values()):
            if len(panel.known) > 1 or (panel.known and not panel.known[0].faster):
                found.setdefault(heads, {})[mode] = panel.crossover or policy.NEVER
    return dict(sorted(found.items()))

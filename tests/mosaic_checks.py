"""Checks of Mosaic kernels in JAX on the problems and the oracle of the tables.

Tests on GPUs and those of gathered and of stored parts have them.
"""

import dataclasses
import functools

import numpy as np
import torch

import nsa_jax
from nsa_core.config import NSAConfig
from tests import problems
from tests.inputs import Case, call, posed
from tests.paths import of_jax, steps_of_jax

PACKED = Case(80, 90, 3, 1, B=1, segments=(20, 1, 43, 8, -18), dtype="bfloat16")
ARRAYS = ("query", "key", "value", "gates")
LARGE = NSAConfig(16, 8, 128, num_selected=2, num_local=1, window=30)
# A block of the second sequence stands in three tiles of keys.
BLOCK_128 = Case(
    24, 220, H=2, Hkv=1, B=1, config=LARGE, segments=(10, 200, -10), dtype="float16"
)


def run(step, *arrays, **options):
    return call(getattr(nsa_jax, step), *arrays, implementation="mosaic", **options)


def attention(p, implementation="mosaic", **options):
    """Of a problem of `tests.inputs`."""
    options |= {"config": p.case.config, "segment_ids": p.segment_ids}
    whole = functools.partial(nsa_jax.attention, implementation=implementation)
    return call(whole, p.query, p.key, p.value, p.gates, **options)


def check_steps(p, *names):
    """Forward; `names`: branches, `scores` and `whole`."""
    found = steps_of_jax(p, "mosaic", gradients=False, only=names)
    if "scores" in names:
        problems.check_selection(p, found.pop("block_indices"))
    if found:
        problems.check(p, found, p.expected_steps())
    if "whole" in names:
        problems.check(p, of_jax(p, "mosaic", gradients=False), p.expected)


def check_step(p, branch, indices=None):
    """Gradients of one branch, through its output and its log-sum-exp."""
    if indices is not None:
        p = dataclasses.replace(p, block_indices=torch.from_numpy(indices))
    problems.check(p, steps_of_jax(p, "mosaic", only=(branch,)), p.expected_steps())


def check_whole(p):
    problems.check(p, of_jax(p, "mosaic"), p.expected)


def check_any_blocks(case, scale=None):
    check_steps(posed(case, "any", scale=scale), "selected")


def check_ties(case):
    """Every compressed token is as probable as the others."""
    check_steps(posed(case, "own", ties=True), "scores")


def bits(p):
    """The output and the gradients, in NumPy."""
    return {name: np.asarray(x) for name, x in of_jax(p, "mosaic").items()}

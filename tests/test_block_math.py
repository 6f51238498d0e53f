"""Sizes, and what a compressed token weighs in a selection block (Eqs. 9 and 10)."""

import pytest

from nsa_torch import NSAConfig
from tests.paths import steps_of_jax, steps_of_torch
from tests.problems import TABLE, Case, check_selection, problem

SIZES = TABLE["windows"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("path", ["torch sdpa", "torch reference", "jax xla", "jax reference"])
def test_selection_is_by_these_weights(path, sizes):
    framework, implementation = path.split()
    steps = {"torch": steps_of_torch, "jax": steps_of_jax}[framework]
    config = NSAConfig(*sizes, num_selected=3, num_initial=0, num_local=1, window=7)
    length = 6 * config.select_block + 1
    p = problem(Case(length, length, H=2, Hkv=1, config=config, own=True))
    check_selection(p, steps(p, implementation, only=["scores"])["block_indices"])


def test_decode_counters():
    config = NSAConfig(8, 4, 16, num_selected=3, window=7)
    for length in range(1, 100):
        compressed = [s for s in range(0, length, 4) if s + 8 <= length]
        selected = [(slot, row) for slot in range(3) for row in range(16)]
        sliding = [u for u in range(length) if u > length - 1 - 7]
        assert config.reads(length) == len(compressed) + len(selected) + len(sliding)
    assert NSAConfig().reads(65536) == 4095 + 16 * 64 + 512

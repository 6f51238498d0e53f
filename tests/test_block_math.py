"""Sizes, and what a compressed token weighs in a selection block (Eqs. 9 and 10)."""

import numpy as np
import pytest
import torch

from nsa_torch import NSAConfig
from tests.oracles import nsa
from tests.paths import steps_of_jax, steps_of_torch
from tests.problems import TABLE, Case, check_selection, problem

SIZES = TABLE["windows"]


def config_of(block, stride, select_block):
    return NSAConfig(block, stride, select_block, num_selected=3, window=7)


def shared_tokens(config, i, j):
    first, block = i * config.compress_stride, j * config.select_block
    token = set(range(first, first + config.compress_block))
    return len(token & set(range(block, block + config.select_block)))


def equation_9(config, i, j):
    """How often the double sum for block `j` names token `i`; the paper counts both from 1."""
    ratio = config.select_block // config.compress_stride
    cover = config.compress_block // config.compress_stride
    named = [ratio * (j + 1) - m - n for m in range(ratio) for n in range(cover)]
    return named.count(i + 1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weights_count_shared_stride_blocks(sizes):
    """w(i, j) of the oracle: what token `i` of probability 1 gives the blocks."""
    config = config_of(*sizes)
    length = 3 * config.select_block + config.compress_block + 1
    one = torch.eye(config.num_compressed(length))
    got = nsa.scores(one[None, None, None], config, nsa.Rows(length, length, (length,)))
    got = got.reshape(len(one), -1).numpy()
    for (i, j), w in np.ndenumerate(got):
        assert w * config.compress_stride == shared_tokens(config, i, j)
        assert w == equation_9(config, i, j)
    # No part of a token is lost.
    assert (got.sum(axis=1) == config.compress_block // config.compress_stride).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("path", ["torch sdpa", "torch reference", "jax xla", "jax reference"])
def test_selection_is_by_these_weights(path, sizes):
    framework, implementation = path.split()
    steps = {"torch": steps_of_torch, "jax": steps_of_jax}[framework]
    config = NSAConfig(*sizes, num_selected=3, num_initial=0, num_local=1, window=7)
    length = 6 * config.select_block + 1
    p = problem(Case(length, length, H=2, Hkv=1, config=config, own=True))
    check_selection(p, steps(p, implementation, only=["scores"])["block_indices"])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_count_windows_and_blocks(sizes):
    config = config_of(*sizes)
    for length in range(4 * config.select_block):
        starts = range(0, length, config.compress_stride)
        windows = [s for s in starts if s + config.compress_block <= length]
        blocks = {token // config.select_block for token in range(length)}
        assert config.num_compressed(length) == len(windows)
        assert config.num_blocks(length) == len(blocks)


def test_reads_count_the_rows_of_a_decode_step():
    config = config_of(8, 4, 16)
    for length in range(1, 100):
        compressed = [s for s in range(0, length, 4) if s + 8 <= length]
        selected = [(slot, row) for slot in range(3) for row in range(16)]
        sliding = [u for u in range(length) if u > length - 1 - 7]
        assert config.reads(length) == len(compressed) + len(selected) + len(sliding)
    assert NSAConfig().reads(65536) == 4095 + 16 * 64 + 512

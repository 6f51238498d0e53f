"""Sizes, and what a compressed token weighs in a selection block (Eqs. 9 and 10)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_core import selection
from nsa_jax import reference
from nsa_jax.jax_ops import JAX_OPS
from nsa_torch import NSAConfig
from nsa_torch.torch_ops import TORCH_OPS
from tests.problems import TABLE

SIZES = TABLE["windows"]


def config_of(block, stride, select_block):
    return NSAConfig(block, stride, select_block, num_selected=3, window=7)


def weights(path, config, length):
    """w(i, j) [C, N]: what token `i` of probability 1 gives the blocks."""
    count, blocks = config.num_compressed(length), config.num_blocks(length)
    if path != "reference":
        ops = {"jax": JAX_OPS, "torch": TORCH_OPS}[path]
        one = ops.xp.eye(count, dtype=ops.xp.float32)
        return np.asarray(selection.map_to_blocks(ops, one, blocks, config))
    query = jnp.ones((count, 1, 1, 1), jnp.float32)
    key = 1000 * jnp.eye(count, dtype=jnp.float32)[..., None, None]
    how = {"config": config, "kv_len": length, "scale": 1.0}
    scores = jax.jit(functools.partial(reference.block_scores, **how))
    return np.asarray(scores(query, key)[:, 0, 0])


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


PATHS = [(path, x) for path in ("jax", "torch") for x in SIZES]
PATHS += [("reference", x) for x in SIZES[4:6]]


@pytest.mark.parametrize(("path", "sizes"), PATHS, ids=str)
def test_weights_count_shared_stride_blocks(path, sizes):
    config = config_of(*sizes)
    length = 3 * config.select_block + config.compress_block + 1
    got = weights(path, config, length)
    for (i, j), w in np.ndenumerate(got):
        assert w * config.compress_stride == shared_tokens(config, i, j)
        assert w == equation_9(config, i, j)
    # No part of a token is lost.
    assert (got.sum(axis=1) == config.compress_block // config.compress_stride).all()


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

"""Blocks whose probabilities float32 cannot hold are chosen in the order of their scores too."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.judge.parity import check_indices
from nsa_torch import NSAConfig
from tests.oracles import nsa
from tests.problems import of_kind

PATHS = [
    (nsa_jax, "reference"),
    (nsa_jax, "xla"),
    (nsa_torch, "reference"),
    (nsa_torch, "sdpa"),
]


def select(api, name, query, key, config, rows, cached=False):
    """Blocks of NumPy arrays; `cached`: the length is an array."""
    of_torch, where = api is nsa_torch, {"kv_len": rows.keys}
    # NumPy's bfloat16 is none of torch's.
    wide = lambda x: torch.from_numpy(x.astype(np.float32)).to(getattr(torch, str(x.dtype)))
    if len(rows.documents) > 1 and of_torch:
        where = {"cu_seqlens": torch.tensor(np.cumsum([0, *rows.documents]))}
    elif len(rows.documents) > 1:
        where = {"segment_ids": jnp.asarray(rows.tokens()[0][None].numpy(), jnp.int32)}
    elif cached:
        where = {"kv_len": (torch.tensor if of_torch else jnp.asarray)([rows.keys])}
    given = map(wide if of_torch else jnp.asarray, (query, key))
    options = {"config": config, "scale": 1.0, "implementation": name}
    return np.asarray(api.select_blocks(*given, **options, **where))


def check(found, query, key, config, rows):
    """By the scores of Eqs. 8 to 10, whose logarithms float64 holds; whether float32 holds none of
    the last block's that some query takes.
    """
    query, key = (torch.from_numpy(x[0].astype(np.float64)) for x in (query, key))
    mask = nsa.compressed_mask(config, rows)[0, 0]
    split = query.unflatten(1, (key.shape[1], -1))
    logits = torch.einsum("tkgd,skd->tkgs", split, key[: mask.shape[1]])
    logits = logits.masked_fill(~mask[:, None, None], -torch.inf).log_softmax(-1)
    # Of one compressed token alone the score of a block is how many strides they share.
    one = torch.eye(mask.shape[1], dtype=torch.float64)[None, None, None]
    shared = nsa.scores(one, config, rows)[0, :, 0].log()
    logs = (logits.nan_to_num(-torch.inf)[..., None] + shared).logsumexp((2, 3))
    position = rows.tokens()[1][-rows.queries :]
    own, block = (position // config.select_block)[:, None, None], torch.arange(logs.shape[-1])
    forced = (block < config.num_initial) | (block > own - config.num_local)
    ranked = logs.masked_fill(forced & (block <= own), torch.inf)
    last = ranked.topk(min(config.num_selected, len(block))).values[..., -1:]
    last = last.masked_fill(last.isinf(), 0)  # of few blocks, which are all taken
    near = (logs - last).clamp(-60, 60).exp()
    parity = check_indices(found, near[None].numpy(), position.numpy(), config)
    assert parity.ok, parity.reason
    return bool((last < -87).any())


CASES = of_kind("far logits")


@pytest.mark.parametrize(("api", "name"), PATHS)
@pytest.mark.parametrize("std", [300, 2000])
@pytest.mark.parametrize("case", CASES)
def test_logits_far_apart(api, name, case, std, rng):
    cached, case = case == "a cache", CASES[case]
    rows, config = nsa.Rows(case.T, case.S, case.documents), case.config
    query = rng.normal(size=(1, case.T, case.H, 8), scale=std / 8**0.5)
    key = rng.normal(size=(1, config.num_compressed(case.S), case.Hkv, 8))
    query, key = (x.astype(jnp.dtype(case.dtype)) for x in (query, key))
    found = select(api, name, query, key, config, rows, cached)
    assert check(found, query, key, config, rows)


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

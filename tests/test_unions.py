"""The lists of the selected branch, made in both ways, against plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from kernels_pallas.mosaic import selected, union
from nsa_jax import mosaic, unions

SPEC = selected.Selected(
    B=1, T=70, S=512, H=2, Hkv=2, D=64, Dv=64, n=4, block=64, dtype="bfloat16", scale=1.0
)


def draw(tokens: int, seed: int):
    """Per tile and place, what is wanted; blocks overlap between tokens, some places empty."""
    rng = np.random.default_rng(seed)
    spec = dataclasses.replace(SPEC, H=128 // tokens, interpret=InterpretGPUParams())
    assert spec.tile.tokens == tokens
    shape = (1, spec.Hkv, spec.tiles)
    wanted = np.full((*shape, spec.entries), union.NOTHING, np.int64)
    for index in np.ndindex(shape):
        cut_from = int(rng.integers(6))
        for token in range(tokens):
            for i, block in enumerate(rng.permutation(8)[: rng.integers(spec.n + 1)]):
                # Later tokens see further: a block is cut for the first of them only.
                cut = int(block >= cut_from + token // 2)
                place = (*index, token * spec.n + i)
                wanted[place] = unions.wanted(64 * int(block) + 3, token, cut)
    return spec, wanted.astype(np.int32)


def expected(spec, row):
    members: dict[int, int] = {}
    cuts = set()
    for key in sorted(int(k) for k in row if k != union.NOTHING):
        start, token, cut = key >> 7, (key >> 1) & 63, key & 1
        cuts |= {start} if cut and start not in members else set()
        members[start] = members.get(start, 0) | 1 << token
    starts = sorted(members)
    whole = min((starts.index(start) for start in cuts), default=len(starts))
    return starts, [members[start] for start in starts], whole


def check(spec, wanted, starts, members, counts):
    starts, members, counts = (np.asarray(x) for x in (starts, members, counts))
    for index in np.ndindex(wanted.shape[:-1]):
        want, bits, whole = expected(spec, wanted[index])
        got = members[index].astype(np.uint32).astype(object)
        words = sum(word << (32 * w) for w, word in enumerate(got))
        assert starts[index][: len(want)].tolist() == want
        assert list(words[: len(want)]) == bits
        assert counts[index].tolist() == [whole, len(want)]


@pytest.mark.parametrize("tokens", [8, 32, 64])
@pytest.mark.parametrize("longest", [0, 256])
def test_both_ways_make_the_same_lists(tokens, longest, monkeypatch):
    monkeypatch.setattr(union, "LONGEST", longest)
    spec, wanted = draw(tokens, seed=tokens)
    found = jax.jit(lambda x: unions.lists(mosaic.STEPS, x, spec))(jnp.asarray(wanted))
    check(spec, wanted, *found)


def test_torch_sorts_alike(monkeypatch):
    from nsa_torch.mosaic import STEPS

    monkeypatch.setattr(union, "LONGEST", 0)
    spec, wanted = draw(64, seed=0)
    found = unions.lists(STEPS, torch.from_numpy(wanted), spec)
    assert all(x.dtype == torch.int32 for x in found)
    check(spec, wanted, *found)


@pytest.mark.parametrize("row", ["abcd", "aabb", "aaab", "abb.", "a...", "...."])
def test_runs(row):
    """`.`: entries that do not count."""
    letters = jnp.asarray([[ord(c) for c in row]], jnp.int32)
    there = letters != ord(".")
    changes = letters[:, 1:] != letters[:, :-1]
    begin, end, count = unions.runs(mosaic.STEPS, changes, there)
    runs = [sum(c == letter for c in row) for letter in dict.fromkeys(row.replace(".", ""))]
    assert count.tolist() == [[len(runs)]]
    assert (end - begin).tolist() == [runs + [0] * (len(row) - len(runs))]
    sums = unions.run_sums(mosaic.STEPS, 2 ** jnp.arange(4, dtype=jnp.int32)[None], begin, end)
    bits = iter(range(4))
    assert sums[0, : len(runs)].tolist() == [
        sum(2 ** next(bits) for _ in range(n)) for n in runs
    ]

"""Sizes, strides, block lists and lengths drawn at random, against the dense reference of whole
contiguous tensors, each row alone.
"""

import functools

import numpy as np
import pytest
import torch

import nsa_torch
from nsa_torch import NSAConfig


def in_order(x):
    """Its axes in the other order in memory."""
    back = [*reversed(range(x.ndim))]
    return x.permute(*back).contiguous().permute(*back)


def within(x):
    """A part of an array that is NaN around it."""
    whole = x.new_full((x.shape[0] + 1, x.shape[1] + 3, *x.shape[2:]), torch.nan)
    whole[1:, 2:-1] = x
    return whole[1:, 2:-1]


def every_other(x):
    """Columns of twice as many, of which the others are NaN."""
    whole = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    whole[..., ::2] = x
    return whole[..., ::2]


LAYOUTS = (lambda x: x, in_order, within, every_other)


class Drawn:
    """A problem; `S >= T`, selected blocks in any order, -1 anywhere among them."""

    def __init__(self, seed):
        rng = self.rng = np.random.default_rng(seed)
        stride = int(rng.choice([1, 2, 4, 8]))
        block = stride * int(rng.integers(1, 4))
        first, last = (int(x) for x in rng.integers(0, 3, size=2))
        self.config = NSAConfig(
            compress_block=block,
            compress_stride=stride,
            select_block=max(block, stride * int(rng.integers(1, 5))),
            num_selected=max(1, first + last, int(rng.integers(1, 7))),
            num_initial=first,
            num_local=last,
            window=int(rng.choice([0, 1, 3, 9, 40])),
        )
        self.B, self.T, self.Hkv = (int(rng.integers(1, n)) for n in (4, 50, 3))
        self.S = self.T + int(rng.choice([0, 1, 7, 30]))
        H, D, Dv = self.Hkv * int(rng.integers(1, 4)), *rng.choice([2, 4, 8], size=2)
        self.query, self.key = self.normal(self.T, H, D), self.normal(self.S, self.Hkv, D)
        self.value, self.gates = self.normal(self.S, self.Hkv, Dv), self.normal(self.T, H, 3)
        number, count = self.config.num_blocks(self.S), self.config.num_selected
        self.indices = torch.full((self.B, self.T, self.Hkv, count), -1, dtype=torch.int32)
        for place in np.ndindex(self.B, self.T, self.Hkv):
            found = rng.permutation(number)[:count]
            slots = rng.permutation(count)[: len(found)]
            kept = rng.random(len(found)) < 0.7
            self.indices[place][slots[kept]] = torch.from_numpy(found[kept].astype(np.int32))

    def normal(self, *shape):
        drawn = self.rng.standard_normal((self.B, *map(int, shape)))
        return torch.from_numpy(drawn.astype(np.float32))


def close(found, want):
    torch.testing.assert_close(found, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", range(12))
def test_strides_change_nothing(seed):
    """Outputs and gradients; of expanded tensors too."""
    p = Drawn(seed)
    tensors = p.query, p.key, p.value, p.gates
    indices = p.indices if seed % 2 else None
    layouts = [LAYOUTS[i] for i in p.rng.integers(0, len(LAYOUTS), size=4)]

    def results(name, given):
        leaves = [x.detach().requires_grad_() for x in given]
        call = functools.partial(nsa_torch.attention, config=p.config, block_indices=indices)
        out = call(*leaves, implementation=name)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    strided = [layout(x) for layout, x in zip(layouts, tensors, strict=True)]
    for name in ("sdpa", "reference"):
        close(results(name, strided), results("reference", tensors))
    expanded = [
        p.query,
        *(x[:1, :, :1].expand(p.B, -1, p.Hkv, -1) for x in (p.key, p.value)),
        p.gates[..., :1].expand(p.gates.shape),
    ]
    whole = results("reference", [x.contiguous() for x in expanded])
    close(results("sdpa", expanded), whole)


@pytest.mark.parametrize("seed", range(100, 112))
def test_lengths_of_rows(seed):
    """`kv_len` as a tensor: each row is what it is alone, NaN behind it reaches nothing, and
    queries before its first token are padding.
    """
    p = Drawn(seed)
    lengths = p.rng.integers(1, p.S + 1, size=p.B)
    behind = torch.arange(p.S) >= torch.from_numpy(lengths)[:, None]
    hidden = [x.masked_fill(behind[..., None, None], torch.nan) for x in (p.key, p.value)]
    kv_len = torch.from_numpy(lengths.astype(p.rng.choice(["int32", "int64"])))
    compress = functools.partial(nsa_torch.compress, config=p.config)

    def steps(name, query, key, value, indices, kv_len, compressed=None):
        options = {"config": p.config, "kv_len": kv_len, "implementation": name}
        pair = compressed or (compress(key), compress(value))
        return (
            nsa_torch.compressed_attention(query, *pair, **options),
            nsa_torch.selected_attention(query, key, value, indices, **options),
            nsa_torch.sliding_attention(query, key, value, **options),
            (nsa_torch.select_blocks(query, pair[0], **options),),
        )

    pair = compress(p.key), compress(p.value)
    for name in ("sdpa", "reference"):
        found = steps(name, p.query, *hidden, p.indices, kv_len, pair)
        for b, length in enumerate(map(int, lengths)):
            first, row = max(0, p.T - length), slice(b, b + 1)
            own = [x[row, first:] for x in (p.query, p.indices)]
            alone = [x[row, :length] for x in (p.key, p.value)]
            want = steps("reference", own[0], *alone, own[1], length)
            for got, wanted in zip(found, want, strict=True):
                close([x[row, first:] for x in got], [*wanted])
            for out, lse in found[:3]:
                assert (out[b, :first] == 0).all() and (lse[b, :first] == -torch.inf).all()

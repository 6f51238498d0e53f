"""Strides and lengths of rows give what whole contiguous tensors give, each row alone."""

import dataclasses
import functools

import pytest
import torch

import nsa_torch
from tests.paths import of_torch
from tests.problems import CASES, FEW, Case, check, problem


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


def expanded(x):
    """One head of one row for all; of other numbers."""
    return x[:1, :, :1].expand(x.shape)


LAYOUTS = in_order, within, every_other, expanded


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
@pytest.mark.parametrize("name", ["fewer queries than keys", "any blocks"])
def test_strides_change_nothing(name, shift, implementation):
    """Outputs and gradients; each tensor has each layout once."""
    p = problem(CASES[name])
    if p.case.blocks == "own":  # that other numbers would not leave beyond doubt
        p = dataclasses.replace(p, block_indices=p.steps["selected"][3])
    laid = lambda i, x: LAYOUTS[(i + shift) % len(LAYOUTS)](x.detach())
    pair = {"keys": (laid(1, p.keys[0]),), "values": (laid(2, p.values[0]),)}
    strided = dataclasses.replace(p, query=laid(0, p.query), **pair, gates=laid(3, p.gates))
    check(strided, of_torch(strided, implementation), strided.expected)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("lengths", [(61, 9, 1), (38, 37, 36)])
@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_lengths_of_rows(implementation, lengths, dtype):
    """`kv_len` as a tensor: each row is what it is alone, NaN behind it reaches nothing, and
    queries before its first token are padding.
    """
    p = problem(Case(T=37, S=61, H=6, B=3, D=8, Dv=4, config=FEW, blocks="any"))
    tokens = [x.detach() for x in (p.keys[0], p.values[0])]
    behind = torch.arange(61) >= torch.tensor(lengths)[:, None]
    hidden = [x.masked_fill(behind[..., None, None], torch.nan) for x in tokens]
    compress = functools.partial(nsa_torch.compress, config=FEW)

    def steps(name, query, key, value, indices, kv_len, pair):
        options = {"config": FEW, "kv_len": kv_len, "implementation": name}
        return (
            nsa_torch.compressed_attention(query, *pair, **options),
            nsa_torch.selected_attention(query, key, value, indices, **options),
            nsa_torch.sliding_attention(query, key, value, **options),
            (nsa_torch.select_blocks(query, pair[0], **options),),
        )

    query, kv_len = p.query.detach(), torch.tensor(lengths, dtype=getattr(torch, dtype))
    given = query, *hidden, p.block_indices, kv_len
    found = steps(implementation, *given, [compress(x) for x in tokens])
    for b, length in enumerate(lengths):
        first, row = max(0, 37 - length), slice(b, b + 1)
        own = (
            query[row, first:],
            *(x[row, :length] for x in tokens),
            p.block_indices[row, first:],
        )
        want = steps("reference", *own, length, [compress(x) for x in own[1:3]])
        for got, wanted in zip(found, want, strict=True):
            for x, y in zip(got, wanted, strict=True):
                torch.testing.assert_close(x[row, first:], y, rtol=2e-4, atol=2e-5)
        for out, lse in found[:3]:
            assert (out[b, :first] == 0).all() and (lse[b, :first] == -torch.inf).all()

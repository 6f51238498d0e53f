"""Block attention, an indexer and its loss under torch.compile: one graph, the same numbers."""

import functools

import pytest
import torch

import nsa_torch

own = (torch.arange(64) // 16).int()[None, :, None, None].expand(1, 64, 2, 1)


def attended(query, key):
    out, lse = nsa_torch.block_attention(
        query, key, key, own, block_size=16, return_residual=True
    )
    return out.sum() + lse.sum()


def indexed(query, key):
    return nsa_torch.index_blocks(query, key[:, :, 0], pool=16, num_selected=2)


def loss(query, key):
    _, lse = nsa_torch.block_attention(
        query, key, key, own, block_size=16, return_residual=True
    )
    index = query[:, :, :2], key[:, :, 0]
    return nsa_torch.indexer_kl(query, key, lse, *index, own, block_size=16).sum()


@pytest.mark.parametrize("function", [attended, indexed, loss])
def test_one_graph(function):
    make = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    leaves = [make(1, 64, n, 16).requires_grad_() for n in (4, 2)]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    got, want = compiled(*leaves), function(*leaves)
    torch.testing.assert_close(got, want)
    if want.requires_grad:
        pairs = (torch.autograd.grad(x, leaves) for x in (got, want))
        for mine, plain in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)

"""FA-2 on a CPU: plain attention over packed rows, which leaves NaN where FA-2 writes nothing. The
library's index work around FA-2 needs no GPU, and is tested with it.
"""

import itertools

import torch
import torch.nn.functional as F

from tests.oracles import nsa


def varlen(query, key, value, bounds, longest, *, causal, window, scale):
    """FA-2's contract in plain torch; rows outside all sequences are NaN, gradients too."""
    (query_bounds, key_bounds), (heads, kv_heads) = bounds, (query.shape[1], key.shape[1])
    for x, most in zip(bounds, longest, strict=True):
        assert x.dtype == torch.int32 and (x.diff() >= 0).all() and x.diff().max() <= most
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query_bounds[-1] <= query.shape[0] and key_bounds[-1] <= key.shape[0]
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    # With one query a sequence FA-2 regroups the heads and forgets where sequences begin.
    assert longest[0] > 1 or window >= 0 or heads == kv_heads
    query = Unwritten.apply(query, query_bounds[-1])
    key, value = (Unwritten.apply(x, key_bounds[-1]) for x in (key, value))
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value)]
    found = []
    after = 0 if causal or window >= 0 else torch.inf
    before = window if window >= 0 else torch.inf
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in bounds), strict=True):
        # Keys after the query's own, bottom right.
        ahead = torch.arange(c - d, 0) - torch.arange(a - b, 0)[:, None]
        mask = (-before <= ahead) & (ahead <= after)
        given = (x[None, i:j] for x, i, j in zip(wide, (a, c, c), (b, d, d), strict=True))
        found.append(nsa.attend(*given, mask[None, None], scale)[:2])
    some, lse = (torch.cat(x, dim=1)[0] for x in zip(*found, strict=True))
    around = int(query_bounds[0]), query.shape[0] - int(query_bounds[-1])
    out = F.pad(some.to(query.dtype), (0, 0, 0, 0, *around), value=torch.nan)
    lse = F.pad(lse.detach(), (0, 0, *around), value=torch.nan)
    return out, lse.T.masked_fill(lse.T == -float("inf"), float("inf"))


class Unwritten(torch.autograd.Function):
    """The identity, whose gradient is NaN from row `end` on."""

    @staticmethod
    def forward(x, end):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.end = int(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        there = torch.arange(grad.shape[0])[:, None, None] < ctx.end
        return torch.where(there, grad, float("nan")), None

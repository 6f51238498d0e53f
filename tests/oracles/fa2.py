"""FA-2 on a CPU: plain attention over packed rows, which leaves NaN where FA-2 writes nothing. The
library's index work around FA-2 needs no GPU, and is tested with it.
"""

import torch

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
    places, inside = zip(*map(sequence_rows, bounds), strict=True)
    query_row, key_row = places
    mask = inside[0][:, :, None] & inside[1][:, None]
    lengths = [x.diff()[:, None, None] for x in bounds]
    ahead = torch.arange(key_row.shape[1]) - torch.arange(query_row.shape[1])[:, None]
    ahead = ahead - lengths[1] + lengths[0]  # keys after the query's own, bottom right
    if causal or window >= 0:
        mask = mask & (ahead <= 0)
    if window >= 0:
        mask = mask & (ahead >= -window)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value)]
    # What a sequence does not have is read by none of its rows.
    given = [
        torch.where(there[..., None, None], x[row], 0)
        for x, row, there in zip(
            wide, (query_row, key_row, key_row), inside[:1] + inside[1:] * 2, strict=True
        )
    ]
    some, some_lse, _ = nsa.attend(*given, mask[:, None], scale)
    out = query.new_full((*query.shape[:2], value.shape[-1]), float("nan"))
    lse = some_lse.new_full(query.shape[:2], float("nan"))
    out = out.index_put((query_row[inside[0]],), some[inside[0]].to(out.dtype))
    lse[query_row[inside[0]]] = some_lse[inside[0]].detach()
    return out, lse.T.masked_fill(lse.T == -float("inf"), float("inf"))


def sequence_rows(bounds):
    """Rows of each sequence `[N, longest]`, and which of them there are."""
    bounds = bounds.to(torch.int64)
    step = torch.arange(int(bounds.diff().max()))
    inside = step < bounds.diff()[:, None]
    return torch.where(inside, bounds[:-1, None] + step, 0), inside


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

"""Work on a chunk of queries at a time, so that memory stays bounded in both directions.

A chunk is computed again in the backward pass instead of being kept, and the gradients of
keys and values, to which every chunk adds, accumulate in float32 whatever the dtype. That is
why this is not torch.utils.checkpoint, which would add them up in the dtype of the keys.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_torch.first_order import first_order

# Bytes of the largest intermediate of one chunk (logits, or gathered keys and values).
BUDGET_BYTES = 256 * 2**20


class Rows(NamedTuple):
    """Rows of an array whose first `axes` axes count as one; an index past them is no row."""

    index: Tensor
    axes: int

    def read(self, x: Tensor) -> Tensor:
        shape = x.shape[: self.axes]
        index = self.index.clamp(max=shape.numel() - 1)
        if x.is_contiguous():
            return x.flatten(0, self.axes - 1)[index]
        return x[torch.unravel_index(index, shape)]  # a cache must not be copied

    def zeros(self, x: Tensor) -> Tensor:
        # The spare row takes what has no row, be it NaN.
        count = x.shape[: self.axes].numel()
        return x.new_zeros(count + 1, *x.shape[self.axes :], dtype=wide(x.dtype))

    def add(self, total: Tensor, grad: Tensor) -> None:
        grad = grad.flatten(0, self.index.ndim - 1).to(total.dtype)
        total.index_add_(0, self.index.flatten(), grad)

    def gradient(self, total: Tensor, x: Tensor) -> Tensor:
        return total[:-1].view(x.shape).to(x.dtype)


class Span(NamedTuple):
    """Tokens `begin .. end - 1` of every batch row, read without a copy."""

    begin: int
    end: int

    def read(self, x: Tensor) -> Tensor:
        return x[:, self.begin : self.end]

    def zeros(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=wide(x.dtype))

    def add(self, total: Tensor, grad: Tensor) -> None:
        total[:, self.begin : self.end] += grad

    def gradient(self, total: Tensor, x: Tensor) -> Tensor:
        return total.to(x.dtype)


class Chunk(NamedTuple):
    """What one chunk of queries reads, and `attend(query, key, value) -> (out, lse)` on it."""

    source: Rows | Span
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and accumulation."""
    return torch.promote_types(dtype, torch.float32)


def chunks(num_queries: int, row_bytes: int, most: int | None = None) -> Iterator[slice]:
    """Slices of the query axis within the budget; `row_bytes` is what one index costs."""
    size = max(1, BUDGET_BYTES // max(row_bytes, 1))
    size = min(size, most or size)
    for begin in range(0, num_queries, size):
        yield slice(begin, min(begin + size, num_queries))


def over_queries(
    plan: Callable[[slice], Chunk],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_bytes: int,
    most: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`plan(slice)` carried out for every chunk: out `[B, T, H, Dv]`, lse `[B, T, H]`.

    `row_bytes` is what one query index costs in the largest intermediate, `most` the largest
    number of queries in a chunk. No gradient flows through lse.
    """
    parts = tuple(chunks(query.shape[1], row_bytes, most))
    return _OverQueries.apply(plan, parts, query, key, value)


class _OverQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan, parts, query, key, value):
        out, lse = query.new_empty(*query.shape[:3], value.shape[-1]), None
        for part in parts:
            source, attend = plan(part)
            keys, values = source.read(key), source.read(value)
            out[:, part], chunk_lse = attend(query[:, part], keys, values)
            if chunk_lse is not None:
                lse = chunk_lse.new_empty(query.shape[:3]) if lse is None else lse
                lse[:, part] = chunk_lse
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.parts = plan, parts
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad, _):
        query, *pair = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        source, _ = ctx.plan(ctx.parts[0])
        totals = [source.zeros(x) for x in pair]
        for part in ctx.parts:
            source, attend = ctx.plan(part)
            inputs = [x.detach() for x in (query[:, part], *map(source.read, pair))]
            # As in the forward pass, whatever surrounds the backward pass.
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                out, _ = attend(*(x.requires_grad_() for x in inputs))
                grads = torch.autograd.grad(out, inputs, grad[:, part])
            grad_query[:, part] = grads[0]
            for total, chunk_grad in zip(totals, grads[1:], strict=True):
                source.add(total, chunk_grad)
        grads = (source.gradient(t, x) for t, x in zip(totals, pair, strict=True))
        return None, None, grad_query, *grads


def nothing_seen(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What queries without keys give: out 0, lse -inf, gradients 0."""
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=wide(query.dtype))
    return _NothingSeen.apply(query, key, value), lse


class _NothingSeen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value):
        ctx.save_for_backward(query, key, value)
        return query.new_zeros(*query.shape[:3], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad):
        return tuple(map(torch.zeros_like, ctx.saved_tensors))

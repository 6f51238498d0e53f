"""Computes attention in chunks of queries, which bounds the memory of the forward and the
backward pass.

The backward pass computes each chunk again. Every chunk adds to the gradients of keys and values.
The gradients of keys and values accumulate in float32 or wider. torch.utils.checkpoint is not used,
since it would accumulate these gradients in the dtype of the keys.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core.types import Branches
from nsa_torch import operators
from nsa_torch.plain import plain

# Maximum size in bytes of an intermediate array of one chunk, such as logits or gathered keys.
BUDGET_BYTES = 256 * 2**20


class Rows(NamedTuple):
    """Rows of an array at given indices. The first `axes` axes of the array are merged to one. For
    an index beyond the last row, the method `read` returns the last row, and the gradient is
    dropped.
    """

    index: Tensor
    axes: int

    def read(self, x: Tensor) -> Tensor:
        shape = x.shape[: self.axes]
        index = self.index.clamp(max=shape.numel() - 1)
        if x.is_contiguous():
            return x.flatten(0, self.axes - 1)[index]
        return x[
            torch.unravel_index(index, shape)
        ]  # the array may be a cache, which must not be copied

    def zeros(self, x: Tensor) -> Tensor:
        # Gradients that belong to no row, including NaN, go to the spare row.
        count = x.shape[: self.axes].numel()
        return x.new_zeros(count + 1, *x.shape[self.axes :], dtype=wide(x.dtype))

    def add(self, total: Tensor, grad: Tensor) -> None:
        grad = grad.flatten(0, self.index.ndim - 1).to(total.dtype)
        total.index_add_(0, self.index.flatten(), grad)

    def gradient(self, total: Tensor, x: Tensor) -> Tensor:
        return total[:-1].view(x.shape).to(x.dtype)


class Span(NamedTuple):
    """The tokens `range(begin, end)` of every batch row, which are read without a copy."""

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
    """The inputs of one chunk of queries, and `attend(query, key, value) -> (out, lse)`."""

    source: Rows | Span
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and sums are computed."""
    return torch.promote_types(dtype, torch.float32)


def chunks(num_queries: int, row_bytes: int, most: int | None = None) -> Iterator[slice]:
    """Return slices of the query axis whose chunks fit the memory budget. `row_bytes` is the size
    per query of the largest intermediate array.
    """
    size = max(1, BUDGET_BYTES // max(row_bytes, 1))
    size = min(size, most or size)
    for begin in range(0, num_queries, size):
        yield slice(begin, min(begin + size, num_queries))


def over_queries(
    body: Callable[..., Any],
    arrays: Sequence[Tensor],
    shared: Sequence[Tensor],
    row_bytes: int,
    seen: Callable[[int], int] | None = None,
) -> Any:
    """Apply `body(*chunk, *shared)` to chunks of the queries of `arrays` `[B, T, ...]`. `body`
    returns one tensor or several. `over_queries` has no gradient.

    Args:
      shared: Arrays `[B, S, ...]` that every query may read.
      row_bytes: bytes per query of the largest intermediate.
      seen: Function that maps a number `n` to the number of rows of `shared` that the first `n`
        queries can read. `seen=None` means that every query can read all rows.
    """
    found = []
    for part in chunks(arrays[0].shape[1], row_bytes):
        read = shared if seen is None else [x[:, : seen(part.stop)] for x in shared]
        found.append(body(*(x[:, part] for x in arrays), *read))
    if isinstance(found[0], Tensor):
        return torch.cat(found, 1)
    return [torch.cat(x, 1) for x in zip(*found, strict=True)]


class Work(NamedTuple):
    """Attention in chunks of queries. The forward and the backward pass use the same division
    into chunks.

    Attributes:
      plan: Function that maps the slice of a chunk's queries to a `Chunk`.
      row_bytes: Bytes of the largest intermediate per query.
      most: the maximum number of queries per chunk.
    """

    plan: Callable[[slice], Chunk]
    row_bytes: int
    most: int | None = None

    def parts(self, query: Tensor) -> Iterator[slice]:
        return chunks(query.shape[1], self.row_bytes, self.most)

    def forward(
        self, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Write the output `[B, T, H, Dv]` to `out`. Write the log-sum-exp `[B, T, H]` to
        `lse`, unless `lse` is empty.
        """
        for part in self.parts(query):
            source, attend = self.plan(part)
            keys, values = source.read(key), source.read(value)
            out[:, part], found = attend(query[:, part], keys, values)
            if found is not None and lse.numel():
                lse[:, part] = found

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> list[Tensor]:
        """Return the gradients of query, key and value, given the gradients of `out` and `lse`."""
        pair = key, value
        grad_query = torch.empty_like(query)
        source, _ = self.plan(slice(0, 1))
        totals = [source.zeros(x) for x in pair]
        for part in self.parts(query):
            source, attend = self.plan(part)
            inputs = [x.detach() for x in (query[:, part], *map(source.read, pair))]
            # Autocast is off, as in the forward pass, whether or not it is on where the backward
            # pass is called.
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                out, lse = attend(*(x.requires_grad_() for x in inputs))
                results, grads = [out], [grad[:, part]]
                if lse is not None and grad_lse is not None:
                    results.append(lse)
                    grads.append(grad_lse[:, part])
                grads = torch.autograd.grad(results, inputs, grads)
            grad_query[:, part] = grads[0]
            for total, chunk_grad in zip(totals, grads[1:], strict=True):
                source.add(total, chunk_grad)
        grads = (source.gradient(t, x) for t, x in zip(totals, pair, strict=True))
        return [grad_query, *grads]


def chunked(name: str, count: int) -> Callable[[Callable[..., Work | None]], Callable]:
    """Register a branch as an operator `nsa::branch_attention`. The decorated function returns
    the `Work` of the branch.

    Args:
      name: Part of the name of the kind of calls, `branch_attention/<name>`.
      count: Number of tensors, which are the positional arguments of the decorated function. The
        keyword arguments of that function are `with_lse` and the entries of the result of
        `operators.unpack_layout`. The decorated function returns None if no query has a key.
    """

    def define(work_of):
        def work(with_lse, arguments):
            lengths = operators.unpack_layout(*arguments[count + 1 :])
            return work_of(*arguments[:count], with_lse=with_lse, **lengths)

        def shapes(with_lse, query, key, value, *rest):
            out = query.new_empty(*query.shape[:3], value.shape[-1])
            rows = query.shape[:3] if with_lse else (0,)
            return out, query.new_empty(rows, dtype=wide(query.dtype))

        def forward(with_lse, *arguments):
            todo, (out, lse) = work(with_lse, arguments), shapes(with_lse, *arguments)
            if todo is None:
                return out.zero_(), lse.fill_(float("-inf"))
            todo.forward(out, lse, *arguments[:3])
            return out, lse

        def backward(grad, *arguments):
            grad_lse, arguments = operators.second_gradient(arguments, count)
            todo = work(grad_lse is not None, arguments)
            if todo is None:
                return [torch.zeros_like(x) for x in arguments[:3]]
            return todo.backward(grad, grad_lse, *arguments[:3])

        kind, without_lse = f"branch_attention/{name}", f"branch_attention/{name}/without_lse"
        for with_lse, each in ((True, kind), (False, without_lse)):
            bound = [functools.partial(f, with_lse) for f in (forward, shapes)]
            gradient = {"backward": backward, "floats": 3, "returned": 2}
            operators.define(each, *bound, **gradient, composed=True)

        return functools.wraps(work_of)(operators.step_of_kind(kind, without_lse))

    return define


def nothing_seen(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results for queries without keys: outputs of 0, a log-sum-exp of -inf, and
    gradients of 0.
    """
    nothing = sum(x[..., :0].sum() for x in (key, value))
    rows = query[..., :0].sum(dim=-1, keepdim=True) + nothing
    lse = rows[..., 0].to(wide(query.dtype)) - float("inf")
    return rows.repeat(1, 1, 1, value.shape[-1]), lse


def combine(outputs: Branches[Tensor], gates: Branches[Tensor]) -> Tensor:
    """Compute `sum_c gate[c] * out[c]` (Eq. 5) in float32, with gates `[B, T, H]`."""
    if not plain((*outputs, *gates)):
        return _weighted_sum(outputs, gates).to(outputs[0].dtype)
    return _Combine.apply(*outputs, *gates)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors):
        outputs, gates = tensors[:3], tensors[3:]
        ctx.save_for_backward(*tensors)
        total = torch.empty_like(outputs[0])
        for part in _combine_parts(total):
            cut = ([x[:, part] for x in each] for each in (outputs, gates))
            total[:, part] = _weighted_sum(*cut)
        return total

    @staticmethod
    def backward(ctx: Any, grad):
        # read only once, since a checkpoint does not provide saved tensors a second time
        saved = ctx.saved_tensors
        found = [torch.empty_like(x) for x in saved]
        for part in _combine_parts(grad):
            for i, out in enumerate(saved[:3]):
                found[i][:, part] = _gated(grad[:, part], saved[i + 3][:, part])
                product = out[:, part].to(wide(out.dtype)) * grad[:, part]
                found[i + 3][:, part] = product.sum(dim=-1)
        return tuple(found)


def _weighted_sum(outputs, gates):
    compressed, selected, sliding = map(_gated, outputs, gates)
    return compressed + selected + sliding


def _gated(x, gate):
    return x.to(wide(x.dtype)) * gate.to(wide(x.dtype))[..., None]


def _combine_parts(x):
    return chunks(x.shape[1], x[:, :1].numel() * wide(x.dtype).itemsize)

"""The attention of context parallelism, forward and backward (described in `context.py`).

The graph of each local call is kept for the backward pass without its input tensors: they are
sliced from the rank's own again, or gathered again (`local_graph`). The other saved tensors belong
to the outer node, so that `torch.utils.checkpoint` around it works.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from nsa_core import context_layout as layouts
from nsa_core.types import Branches
from nsa_torch import batch_tables, early_release, functional, operators
from nsa_torch.batch_tables import tables_of
from nsa_torch.chunks import wide
from nsa_torch.context_ranks import Shards
from nsa_torch.first_order import first_order
from nsa_torch.plain import as_given


class Given(NamedTuple):
    """The inputs of the node: this rank's tensors, and compressed tokens of the sequence."""

    query: Tensor  # [B, T, H, D]
    compressed: tuple[Tensor, ...]  # [B, C, Hkv, .]: keys, values; or none: the means
    gates: tuple[Tensor, ...]  # three [B, T, H], or one [B, T, H, 3]
    keys_values: tuple[Tensor, ...]  # [B, T, Hkv, .]: selected key, value (, sliding)
    block_indices: Tensor | None  # [B, T, Hkv, n]


class Unit(NamedTuple):
    """The unit of gathers and of attention: a batch row with some heads
    (`context_layout.head_groups`).
    """

    row: int
    kv_heads: slice
    heads: slice
    wait: Callable[[], list[Tensor]]  # for its keys and values `[1, S, h, .]`


# A local call has queries that are the last of some keys, but for a gap between two chunks: their
# tokens in the shard, the end of the keys, and options, whose boundaries record the length of the
# gap (`batch_tables`).
type LocalCall = tuple[slice, int, dict]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call. `options` are keywords of `functional.decided`."""

    shards: Shards
    separate: bool  # whether the sliding branch has keys and values of its own
    recompute: bool
    takes_gaps: bool  # whether one call may have two chunks with tokens between them
    options: dict

    def calls(self, device: torch.device) -> list[LocalCall]:
        """The calls of a unit: one for all queries if the kernels support it, otherwise one per
        chunk."""
        borders, gap, options = self.options["cu_seqlens"], self.shards.gap, self.options
        if gap and not self.takes_gaps:
            return [(tokens, end, options) for tokens, end in self.shards.calls]
        *_, (tokens, end) = self.shards.calls
        if gap:
            whole = borders is None
            borders = (
                batch_tables.of_one(end, gap, device)
                if whole
                else batch_tables.with_gap(borders, gap)
            )
            options = options | {"cu_seqlens": borders}
        return [(slice(0, tokens.stop), end, options)]

    def __call__(self, query, key, value, gates, compressed, block_indices) -> Tensor:
        keys_values = key.selected, value.selected
        if self.separate:
            keys_values += key.sliding, value.sliding
        gates = (gates,) if isinstance(gates, Tensor) else gates
        tensors = query, *(compressed or (None, None)), block_indices, *keys_values, *gates
        floats = (x for x in tensors if x is not None and x is not block_indices)
        keep = operators.requires_grad(*floats)
        with as_given(query):
            return _Attention.apply(self, keep, *tensors)

    def given(self, tensors: Sequence) -> Given:
        query, k_cmp, v_cmp, indices, *rest = tensors
        compressed = () if k_cmp is None else (k_cmp, v_cmp)
        count = 4 if self.separate else 2
        return Given(query, compressed, tuple(rest[count:]), tuple(rest[:count]), indices)

    def units(self, given: Given) -> Iterator[Unit]:
        """The gather of the next unit starts before one is handed out."""
        batch, _, kv_heads = given.keys_values[0].shape[:3]
        group = given.query.shape[2] // kv_heads
        widths = [x.shape[-1] for x in given.keys_values]
        payload = torch.cat(given.keys_values, dim=-1)
        head_bytes = self.shards.length * payload.shape[-1] * payload.element_size()
        groups = layouts.head_groups(kv_heads, head_bytes)

        def start(row, heads):
            wait = self.shards.ranks.gather(payload[row, :, heads], "keys and values")

            def whole():
                columns = wait().split(widths, dim=-1)
                return [self.shards.in_order(x)[None] for x in columns]

            return Unit(row, heads, slice(heads.start * group, heads.stop * group), whole)

        before = None
        for row in range(batch):
            for heads in groups:
                following = start(row, heads)
                if before is not None:
                    yield before
                before = following
        if before is not None:
            yield before

    def leaves(self, given: Given, unit: Unit, tokens, end, whole) -> list[Tensor]:
        """The tensors of a local call with the heads of a unit, `B = 1`, contiguous."""
        row = slice(unit.row, unit.row + 1)
        count = self.options["config"].num_compressed(end)
        own = (x[row, tokens, unit.heads].contiguous() for x in (given.query, *given.gates))
        compressed = (x[row, :count, unit.kv_heads].contiguous() for x in given.compressed)
        return [*own, *compressed, *(x[:, :end] for x in whole)]

    def local(self, given: Given, unit: Unit, tokens, options: dict):
        """The function of `leaves` that returns the chunk's output `[1, T, h G, Dv]`."""
        indices = given.block_indices
        if indices is not None:
            indices = indices[unit.row : unit.row + 1, tokens, unit.kv_heads].contiguous()
        first, behind = len(given.gates), len(given.gates) + len(given.compressed)

        def run(query, *rest):
            gates: Any = rest[0] if first == 1 else Branches(*rest[:first])
            key, value, *sliding = rest[behind:]
            own_key, own_value = sliding or (key, value)
            pair = Branches(key, key, own_key), Branches(value, value, own_value)
            borders, compressed = options["cu_seqlens"], rest[first:behind] or None
            arguments = query, *pair, gates, compressed, indices, borders
            how = options["config"], options["scale"], False, options["implementation"]
            return functional.decided(arguments, *how, checked=True)

        return run


def local_graph(
    function: Callable[..., Tensor], leaves: list[Tensor], kept: list[Tensor]
) -> tuple[Tensor, Callable[..., list[Tensor | None]]]:
    """A call's output, and its graph without the memory of the tensors it was given.

    Args:
      kept: List to which the tensors that the graph saves are appended. The graph does not own
        them.

    Returns:
      The output, and `gradients(leaves, kept, do, retain)`, which returns the gradient of each leaf
      from that of the output, the leaves of the graph, and the tensors that it saved. `retain`
      means that this is not the last use.
    """
    found, present = list[Tensor | None](), [leaves, kept]
    places = {x.untyped_storage().data_ptr(): i for i, x in enumerate(leaves) if x.numel()}
    dtypes = [x.dtype for x in leaves]

    def pack(x):
        i = places.get(x.untyped_storage().data_ptr()) if x.numel() else None
        if i is not None and x.dtype == dtypes[i]:
            return i, (x.size(), x.stride(), x.storage_offset())
        # Boundaries come with their tables, which another tensor would not have.
        present[1].append(x.detach() if tables_of(x) is None else x)
        return len(present[1]) - 1, None

    def unpack(packed):
        (given, saved), (i, view) = present, packed
        return saved[i] if view is None else given[i].as_strided(*view)

    token = leaves[0].new_zeros((), requires_grad=True)
    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        out = function(*_Enter.apply(token, found, *leaves))
    edge = get_gradient_edge(out)
    present.clear()  # the graph keeps its hooks

    def gradients(leaves, kept, do, retain):
        present[:] = leaves, kept
        torch.autograd.grad(edge, token, do, retain, allow_unused=True)
        grads = [*found]
        present.clear(), found.clear()
        return grads

    return out.detach(), gradients


class _Enter(torch.autograd.Function):
    """Leaves a graph begins with, which holds none of them; their gradients go to `found`."""

    @staticmethod
    def forward(ctx: Any, token, found, *leaves):
        ctx.found = found
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in leaves)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads):
        ctx.found[:] = grads
        return None, None, *(None for _ in grads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, keep: bool, *tensors):
        given = call.given(tensors)
        kept, graphs, calls = list[Tensor](), list[Callable](), list[LocalCall]()
        width = given.keys_values[1].shape[-1]
        out = Whole(given.query, given.query.shape[:3] + (width,))
        for unit in call.units(given):
            calls = calls or call.calls(given.query.device)  # while the first gather runs
            whole = unit.wait()
            for tokens, end, options in calls:
                leaves = call.leaves(given, unit, tokens, end, whole)
                function = call.local(given, unit, tokens, options)
                if keep and not call.recompute:
                    part, gradients = local_graph(function, leaves, kept)
                    graphs.append(gradients)
                else:
                    part = function(*leaves)
                out.put(part, unit, tokens)
        if keep:
            # The boundaries too, so that torch knows if they were written to since.
            ctx.save_for_backward(call.options["cu_seqlens"], *tensors, *kept)
            ctx.call, ctx.graphs, ctx.count, ctx.calls = call, graphs, len(tensors), calls
        return out.found

    @staticmethod
    @first_order
    def backward(ctx: Any, do):
        call, (_, *saved) = ctx.call, ctx.saved_tensors
        given, kept = call.given(saved[: ctx.count]), list(saved[ctx.count :])
        query, compressed, gates, keys_values, _ = given
        shards, dtype = call.shards, wide(query.dtype)
        own = [Whole(x, x.shape) for x in (query, *gates)]
        grad_compressed = [torch.zeros_like(x, dtype=dtype) for x in compressed]
        mine, first = len(own), len(own) + len(compressed)
        widths = [x.shape[-1] for x in keys_values]
        graphs, sums, retain = iter(ctx.graphs), [], not early_release.is_last_pass()
        with torch.autocast(query.device.type, enabled=False):
            for unit in call.units(given):
                whole, count = unit.wait(), unit.kv_heads.stop - unit.kv_heads.start
                shape = shards.size, query.shape[1], count, sum(widths)
                shares = query.new_empty(shape, dtype=dtype)
                chunks = shards.chunks_of(shares)
                done = [None if call.recompute else next(graphs) for _ in ctx.calls]
                # The longest first: its gradients are written, those of others added.
                for i, (tokens, end, options) in reversed([*enumerate(ctx.calls)]):
                    leaves = call.leaves(given, unit, tokens, end, whole)
                    gradients, again, adds = done[i], kept, i + 1 < len(done)
                    if gradients is None:
                        again = []
                        function = call.local(given, unit, tokens, options)
                        gradients = local_graph(function, leaves, again)[1]
                    part = do[unit.row : unit.row + 1, tokens, unit.heads].contiguous()
                    twice = retain and not call.recompute
                    grads = gradients(leaves, again, part, twice)
                    for target, grad in zip(own, grads[:mine], strict=True):
                        target.put(grad, unit, tokens)
                    for target, grad in zip(grad_compressed, grads[mine:first], strict=True):
                        if grad is not None:
                            target[unit.row, : grad.shape[1], unit.kv_heads] += grad[0]
                    for begin, chunk in zip(
                        range(0, shards.length, shards.chunk), chunks, strict=True
                    ):
                        targets = chunk.split(widths, dim=-1)
                        for target, grad in zip(targets, grads[first:], strict=True):
                            seen = grad is not None and begin < end
                            keys = slice(begin, begin + shards.chunk)
                            if not adds:
                                target.copy_(grad[0, keys]) if seen else target.zero_()
                            elif seen:
                                target += grad[0, keys]
                sums.append(shards.ranks.scatter_sum(shares, "gradients of keys and values"))
        if not retain:
            ctx.graphs = []
        batch = query.shape[0]
        found = [wait() for wait in sums]  # [T, h, W] a unit
        each = len(found) // batch
        rows = [torch.cat(found[i * each : (i + 1) * each], dim=1) for i in range(batch)]
        parts = torch.stack(rows).split(widths, dim=-1)
        grad_kv = (part.to(x.dtype) for part, x in zip(parts, keys_values, strict=True))
        grad_cmp = [
            part.to(x.dtype) for part, x in zip(grad_compressed, compressed, strict=True)
        ] or [None, None]
        grad_query, *grad_gates = (x.found for x in own)
        return None, None, grad_query, *grad_cmp, None, *grad_kv, *grad_gates


class Whole:
    """A tensor built from parts, with the properties of `like` except its shape. A single part is
    not copied.
    """

    def __init__(self, like: Tensor, shape: Sequence[int]):
        self.like, self.shape = like, torch.Size(shape)
        self._found: Tensor | None = None

    def put(self, part: Tensor | None, unit: Unit, tokens: slice) -> None:
        """`part` `[1, t, h, ..]` of a unit; None means zeros."""
        if part is not None and part.shape == self.shape and part.dtype == self.like.dtype:
            self._found = part
        else:
            self.found[unit.row, tokens, unit.heads] = 0 if part is None else part[0]

    @property
    def found(self) -> Tensor:
        if self._found is None:
            self._found = self.like.new_empty(self.shape)
        return self._found

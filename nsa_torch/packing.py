"""Reorders rows so that dense kernels for sequences of variable length, such as
FlashAttention-2, compute the branches of NSA.

The device computes the new orders of rows by cumulative sums and searches. Arrays have the
maximum possible length, so that the host need not know the actual length. On CUDA, the Triton
kernels of `kernels_pallas.triton.pack` move the rows. The Triton kernels need 24 bytes of indices
per range of tokens, such as a selected block. On a CPU, torch indexes the tensors.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_torch.chunks import Rows, wide
from nsa_torch.geometry import Geometry, compressed_bounds
from nsa_torch.torch_ops import run_triton


def residue_classes(
    where: Geometry, count: int, config
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a packed order of queries and compressed keys in which plain causal attention
    computes the compressed branch. R is the number of sequences.

    Returns:
      row_of: `[B*T]`, the packed row of each query. A query without keys has the row -1.
      query_of: `[B*T]`, the inverse of `row_of`. An unused packed row has the query -1.
      key_of: `[B*d*C]`, the compressed token, counted over `[B*C]`, in each packed row of keys.
        An unused packed row has the index `B*C`.
      bounds: The `cu_seqlens` of the queries and of the keys, int32 `[R*d + 1]`.
    """
    device, stride, borders = where.position.device, config.compress_stride, where.cu_seqlens
    batch, length = where.position.shape
    # These arrays `[R]` have an entry per batch row, or per sequence of the packed row. The entry
    # is the index of its first query in the flattened `[B*T]`, or that of its compressed token 0
    # in the flattened `[B*C]`.
    if borders is not None and where.offset is not None:
        query_start = (borders[:-1] - where.offset).clamp(0, length)
        compressed_start = compressed_bounds(borders, config)[:-1]
    else:
        row = torch.arange(batch, device=device)
        query_start, compressed_start = row * length, row * count
    # `steps` are positions, counted from the first one that attends to a compressed token.
    step = where.position.flatten() - (config.compress_block - 1)
    token = torch.arange(batch * length, device=device)
    run = torch.searchsorted(query_start, token, right=True) - 1
    classes = query_start.numel() * stride
    own_class = torch.where(step >= 0, run * stride + step % stride, classes)
    own_class, order = own_class.sort(stable=True)
    query_bounds = torch.searchsorted(own_class, torch.arange(classes + 1, device=device))
    query_of = torch.where(own_class < classes, order, -1)
    row_of = torch.where(step >= 0, torch.empty_like(order).scatter(0, order, token), -1)
    # The last query of a class attends to all keys of the class.
    last = step[order[query_bounds[1:] - 1]]
    keys = torch.where(query_bounds.diff() > 0, last // stride + 1, 0)
    key_bounds = _bounds(keys)

    row = torch.arange(batch * stride * count, device=device)
    key_class = torch.searchsorted(key_bounds[1:], row, right=True)
    inside = key_class < classes
    key_class = torch.where(inside, key_class, 0)
    source = compressed_start[key_class // stride] + row - key_bounds[key_class]
    key_of = torch.where(inside, source, batch * count)
    query_bounds, key_bounds = query_bounds.to(torch.int32), key_bounds.to(torch.int32)
    return row_of, query_of, key_of, query_bounds, key_bounds


def sliding_bounds(batch, length, num_keys, kv_len, cu_seqlens, device):
    """Return `cu_seqlens` of queries and keys that assign every row to a sequence. Padding queries
    form a sequence without keys. Keys to which no query may attend form a sequence without queries.
    Without these two sequences, FA-2 would not write the outputs and gradients of rows that belong
    to no sequence.
    """
    if cu_seqlens is not None:
        ends = cu_seqlens.to(device, torch.int64).clamp(0, kv_len)
        queries, keys = ends.clamp(min=kv_len - length).diff(), ends.diff()
        spare_queries = (length - queries.sum()).reshape(1)
        spare_keys = (num_keys - keys.sum()).reshape(1)
        none = torch.zeros_like(spare_keys)
        queries = torch.cat((queries, spare_queries, none))
        keys = torch.cat((keys, none, spare_keys))
    else:
        seen = torch.zeros(batch, dtype=torch.int64, device=device) + kv_len
        queries = torch.stack((torch.full_like(seen, length), torch.zeros_like(seen)), 1)
        keys = torch.stack((seen, num_keys - seen), dim=1)
    return tuple(_bounds(x.flatten()).to(torch.int32) for x in (queries, keys))


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Runs of consecutive tokens in a packed buffer, from which a `Chunk` reads its keys. The runs
    are stored one after the other. Two runs of one head either begin at the same token or share no
    token, as selection blocks do. The methods `read` and `add` launch Triton kernels. If Triton
    kernels cannot run, torch uses the method `rows` instead of the methods `read` and `add`.
    """

    start: Tensor  # int64 [B, Q, Hkv, n]: index of the run's first token in the key array
    length: Tensor  # int64 [B, Q, Hkv, n]: number of tokens of the run; 0 in an empty slot
    place: Tensor  # int64 [B, Q, Hkv, n]: index of the run's first packed row
    longest: int  # maximum number of tokens per run

    @property
    def capacity(self) -> int:
        """The largest possible number of rows of the packed buffer."""
        return self.start.numel() * self.longest

    def read(self, x: Tensor) -> Tensor:
        """Return the runs of `x` `[B, S, Hkv, D]`, packed as `[capacity, D]`. `x` may have any
        strides. Rows of the result after the last run are not written.
        """
        x = x.resolve_neg()
        packed = x.new_empty(self.capacity, x.shape[-1])
        pack = _kernels()
        self._launch(pack.gather_ranges, pack.tile, (x, packed), x, x.stride())
        return packed

    def zeros(self, x: Tensor) -> Tensor:
        """Return the accumulator for the gradient of `x`, which is float32 zeros of the same
        shape.
        """
        return x.new_zeros(x.shape, dtype=wide(x.dtype))

    def add(self, total: Tensor, grad: Tensor) -> None:
        """Add the gradient `grad` `[capacity, D]` of the runs to `total`, a result of `zeros`.

        By default the kernel adds with atomics, whose order varies. If
        torch.are_deterministic_algorithms_enabled(), the order of the sums is fixed and the
        result is bitwise reproducible.
        """
        pack = _kernels()
        if torch.are_deterministic_algorithms_enabled():
            arrays = (total, grad, *self._inverse)
            self._launch(pack.sum_ranges, pack.sum_tile, arrays, total, grad.stride())
        else:
            self._launch(pack.add_ranges, pack.tile, (total, grad), total, grad.stride())

    def gradient(self, total: Tensor, x: Tensor) -> Tensor:
        return total.to(x.dtype)

    def rows(self, num_keys: int) -> Rows:
        """Return the index of every packed row as `Rows`, for torch."""
        batch, _, heads, _ = self.start.shape
        device = self.start.device
        step = torch.arange(self.longest, device=device)
        inside = step < self.length[..., None]
        first = torch.arange(batch, device=device)[:, None, None, None, None] * num_keys
        head = torch.arange(heads, device=device)[:, None, None]
        row = (first + self.start[..., None] + step) * heads + head
        place = torch.where(inside, self.place[..., None] + step, self.capacity)
        none = batch * num_keys * heads
        packed = torch.full((self.capacity + 1,), none, device=device)
        packed = packed.scatter(0, place.flatten(), row.flatten())[:-1]
        return Rows(packed, axes=3)

    @functools.cached_property
    def _inverse(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the runs by their first token and then by query. Empty runs come first. Return
        three arrays over sorted runs: the first token, the original index of the run, and the
        end of the list of runs with the same first token.
        """
        batch, _, heads, _ = self.start.shape
        # The sort key has 32 bits for the token, which may be outside the array, so that keys
        # of different heads differ.
        owner = (torch.arange(batch * heads, device=self.start.device) << 32) + 2**31
        block = owner.reshape(batch, 1, heads, 1) + self.start
        block = torch.where(self.length > 0, block, -1)
        block, order = block.flatten().sort(stable=True)
        return block, order, torch.searchsorted(block, block, right=True)

    def _launch(self, kernel, tile, arrays, x, strides) -> None:
        if self.start.numel() == 0 or x.numel() == 0:
            return
        _, queries, heads, slots = self.start.shape
        c = tile(self.longest, x.shape[-1])
        tiles = -(-self.longest // c.ROWS)
        grid = self.start.numel() * tiles, -(-x.shape[-1] // c.COLUMNS)
        ranges = (y.contiguous() for y in (self.start, self.length, self.place))
        sizes = x.shape[1], heads, slots, queries * heads * slots, tiles
        run_triton(kernel, grid, *arrays, *ranges, *sizes, *strides, c, **c.options)


def selected_ranges(
    where: Geometry,
    block_indices: Tensor,
    queries: slice,
    config,
    handed: Tensor | None = None,
) -> tuple[Ranges, Tensor]:
    """Return the `Ranges` of the packed keys and values of a chunk of queries. The ranges are
    ordered by row, query and key/value head.

    Args:
      block_indices: `[B, T, Hkv, n]`. An entry counts as empty if it is negative or if its block
        begins after the query.
      handed: The key ranges of the same selection, int32 `[B, T, Hkv, n, 2]`. If `handed` is
        given, the ranges are read instead of the blocks. Each range begins at the start of a
        block, and empty slots are `(0, 0)`. A range of several blocks is split into blocks, since
        two runs must begin at the same token or share no token (`Ranges`).

    Returns: The ranges, and the `cu_seqlens` of the packed keys, int32 `[B*Q*Hkv + 1]`.
    """
    size = config.select_block
    if handed is None:
        blocks = block_indices[:, queries].to(torch.int64)
        first = blocks * size  # positions in the sequence
        length = (where.position[:, queries, None, None] + 1 - first).clamp(min=0, max=size)
        length = length.masked_fill(blocks < 0, 0)
    else:
        begin, end = handed[:, queries].to(torch.int64).unbind(-1)
        count = handed.shape[-2]
        pieces = -((begin - end) // size)  # rounded up
        until = pieces.cumsum(-1)  # number of blocks in the ranges up to this one
        slot = torch.arange(count, device=handed.device)
        owner = (slot[:, None] >= until[..., None, :]).sum(-1)
        of = owner.clamp(max=count - 1)
        within = slot - (until - pieces).gather(-1, of)
        first = begin.gather(-1, of) + within * size
        length = (end.gather(-1, of) - first).clamp(min=0, max=size)
        length = length.masked_fill(owner == count, 0)
    start = first + where.key_start[:, queries, None, None]
    place = length.flatten().cumsum(0).reshape(length.shape) - length
    bounds = _bounds(length.sum(dim=-1).flatten()).to(torch.int32)
    return Ranges(start, length, place, size), bounds


def packed_bytes(key: Tensor, value: Tensor, slots: int) -> int:
    """Return the number of bytes per query that `slots` packed keys and values per head need,
    including their 64-bit indices.
    """
    batch, _, heads, width = key.shape
    return batch * heads * slots * ((width + value.shape[-1]) * key.itemsize + 16)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Gather the rows `rows` `[M]` of `x` `[B, S, H, D]`, whose first two axes are merged. The
    result is `[M, H, D]`.

    A row with an index outside `range(B * S)` is 0 in the result. `x` may have any strides.
    """
    if torch.compiler.is_compiling():
        return torch.ops.nsa.gather_rows(x, rows)
    return _gather(x, rows)


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    if x.is_cuda:
        return gather_by_kernel(x, rows)
    count = x.shape[:2].numel()
    if count == 0:
        return x.new_zeros(rows.numel(), *x.shape[2:])
    none = (rows < 0) | (rows >= count)
    return Rows(rows.clamp(min=0), axes=2).read(x).masked_fill_(none[:, None, None], 0)


def gather_by_kernel(x: Tensor, rows: Tensor) -> Tensor:
    """Run the function `gather` on CUDA with a Triton kernel."""
    batch, tokens, heads, width = x.shape
    packed = x.new_empty(rows.numel(), heads, width)
    if packed.numel() == 0 or x.numel() == 0:
        return packed.zero_()
    pack = _kernels()
    c = pack.tile(rows.numel(), width, heads)
    grid = -(-rows.numel() // c.ROWS), -(-width // c.COLUMNS), heads
    sizes = rows.numel(), tokens, batch
    rows = rows.to(torch.int64).contiguous()
    run_triton(pack.gather_rows, grid, x, packed, rows, *sizes, *x.stride(), c, **c.options)
    return packed


torch.library.define("nsa::gather_rows", "(Tensor x, Tensor rows) -> Tensor")
torch.library.impl("nsa::gather_rows", "CompositeExplicitAutograd", _gather)


@torch.library.register_fake("nsa::gather_rows")
def _(x, rows):
    return x.new_empty(rows.numel(), *x.shape[2:])


def _kernels():
    # Triton is part of torch's CUDA builds only.
    from kernels_pallas.triton import pack

    return pack


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))

"""Packed orders of rows in which dense kernels for sequences of any length compute NSA.

Everything is found on the device by cumulative sums and searches; arrays are as long as they
could have to be, so that the host need not know how long they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_torch.chunks import Rows
from nsa_torch.geometry import Geometry, sequences
from nsa_torch.sdpa import block_rows


def residue_classes(
    where: Geometry, count: int, config
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The packed order in which causal attention is compressed attention.

    Returns:
      row_of: `[B*T]`, the packed row of each query; -1 for what sees nothing.
      query_of: `[B*T]`, its inverse; -1 for the packed rows left over.
      key_of: `[B*d*C]`, the compressed row (of `[B*C]`) in each packed key row; `B*C`: none.
      the `cu_seqlens` of the queries and of the keys, int32 `[R*d + 1]`.
    """
    runs, stride = sequences(where, count, config), config.compress_stride
    device = where.position.device
    batch, length = where.position.shape
    reach = config.compress_block - 1
    # Steps: positions counted from the first that sees a compressed token.
    begin = (runs.first_position - reach).clamp(min=0)[:, None]
    end = (runs.first_position + runs.num_queries - reach)[:, None]
    residue = torch.arange(stride, device=device)
    first = begin + (residue - begin) % stride  # [R, d]: the class's first step
    queries = _ceil_div((end - first).clamp(min=0), stride)
    keys = torch.where(queries > 0, first // stride + queries, 0)
    query_bounds, key_bounds = _bounds(queries.flatten()), _bounds(keys.flatten())

    token = torch.arange(batch * length, device=device)
    run = torch.searchsorted(runs.query_start, token, right=True) - 1
    step = where.position.flatten() - reach
    own_class = run * stride + step % stride
    order = (step - first.flatten()[own_class]).div(stride, rounding_mode="floor")
    row_of = torch.where(step >= 0, query_bounds[own_class] + order, -1)
    query_of = torch.full((batch * length + 1,), -1, device=device)
    spare = torch.where(step >= 0, row_of, batch * length)
    query_of = query_of.scatter(0, spare, token)[:-1]

    row = torch.arange(batch * stride * count, device=device)
    key_class = torch.searchsorted(key_bounds[1:], row, right=True)
    inside = key_class < keys.numel()
    key_class = torch.where(inside, key_class, 0)
    source = runs.compressed_start[key_class // stride] + row - key_bounds[key_class]
    key_of = torch.where(inside, source, batch * count)
    query_bounds, key_bounds = query_bounds.to(torch.int32), key_bounds.to(torch.int32)
    return row_of, query_of, key_of, query_bounds, key_bounds


def sliding_bounds(batch, length, num_keys, kv_len, cu_seqlens, device):
    """`cu_seqlens` of queries and keys, every row in some sequence.

    Padding queries are a sequence without keys, and keys that nothing may see one without
    queries: FA-2 leaves the output and the gradient of a row outside all sequences unwritten.
    """
    if cu_seqlens is not None:
        lengths = cu_seqlens.to(device, torch.int64).diff()
        rest = (length - lengths.sum()).reshape(1)
        none = torch.zeros_like(rest)
        queries = torch.cat((lengths, rest, none))
        keys = torch.cat((lengths, none, rest))
    else:
        seen = torch.zeros(batch, dtype=torch.int64, device=device) + kv_len
        queries = torch.stack((torch.full_like(seen, length), torch.zeros_like(seen)), 1)
        keys = torch.stack((seen, num_keys - seen), dim=1)
    return tuple(_bounds(x.flatten()).to(torch.int32) for x in (queries, keys))


def pack_selected(
    where: Geometry, block_indices: Tensor, queries: slice, num_keys: int, config
) -> tuple[Rows, Tensor]:
    """What a chunk of queries sees, packed: one (row, query, key/value head) after the other.

    Returns:
      source: `source.read(key)` are the packed keys `[B*Q*Hkv * n*l', D]`, as many as there
        can be, so that the host need not know how many there are; the rest is not read.
      bounds: `cu_seqlens` of the keys, int32 `[B*Q*Hkv + 1]`.
    """
    rows, seen = block_rows(where, block_indices, queries, num_keys, config)
    none = rows.shape[0] * num_keys * rows.shape[2]
    bounds = _bounds(seen.sum(dim=-1).flatten()).to(torch.int32)
    place = seen.flatten().cumsum(0) - 1
    place = torch.where(seen.flatten(), place, place.numel())
    packed = torch.full((place.numel() + 1,), none, device=rows.device)
    packed = packed.scatter(0, place, rows.flatten())[:-1]
    return Rows(packed, axes=3), bounds


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def _ceil_div(x: Tensor, divisor: int) -> Tensor:
    return (x + divisor - 1).div(divisor, rounding_mode="floor")

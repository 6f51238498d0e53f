"""Indexers: which blocks a query attends to (`index_blocks`), and what trains them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_pallas.triton import capability, index_descriptions
from nsa_core import index as indexing
from nsa_core.index import Index
from nsa_torch import checks
from nsa_torch.chunks import chunks, wide
from nsa_torch.functional import as_given
from nsa_torch.geometry import Geometry, geometry
from nsa_torch.select import select_from_scores
from nsa_torch.torch_ops import capability_of

IMPLEMENTATIONS = "triton", "torch"


def index_blocks(
    index_query: Tensor,
    index_key: Tensor,
    *,
    pool: int = 128,
    num_selected: int = 16,
    num_initial: int = 0,
    num_local: int = 1,
    activation: str | None = None,
    reduce: str | None = None,
    entry: int = 1,
    kv_len: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """The key blocks with the highest scores of an indexer, without gradient.

        s[t, h, r] = activation(index_query[t, h] . index_key[r])      of the keys that t sees
        z[t, h, j] = max of s over the `pool` keys of block j           (reduce: of sum_h s)

    in float32. Chosen are the first `num_initial` blocks, the last `num_local` up to the query's
    own, and those of the highest z; of equal scores the lower block. Never is there an array of
    queries times keys: the plain implementation takes a chunk of queries at a time.

    Args:
      index_query: `[B, T, Hi, Di]`, float; the queries are the last `T` tokens.
      index_key: `[B, S', Di]`, one key head; key `r` stands for the tokens `entry * r ..
        entry * r + entry - 1`, and is seen from the last of them on.
      pool: keys of a block, which has `pool * entry` tokens.
      num_selected: `n`, blocks of a query at most, the forced ones included.
      num_initial, num_local: forced blocks, as of `NSAConfig`.
      activation: `relu` or None.
      reduce: `sum`: one list for all heads; None: a list a head.
      kv_len: number of tokens, an int, or int32 or int64 `[]` or `[B]`; None: `S'`, with an
        `entry` above 1: `T`.
      cu_seqlens: `[num_seqs + 1]`, a packed batch (see `nsa_torch.functional`), `entry` 1; blocks
        are local to the sequence.
      implementation: `triton` (a kernel from which no score gets out: GPUs from Ampere on; `pool`
        of 16 to 256, up to 64 blocks, scores of each head, no packed rows), `torch`, or None:
        the first that can.

    Returns:
      int32 `[B, T, Hi or 1, n]`, ascending, -1 in empty slots at the end: `block_indices` of
      `block_attention` with `block_size = pool * entry`.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    given = {"index_query": index_query, "index_key": index_key}
    checks.tensors(**given)
    forced = num_initial, num_local
    index = Index(pool, num_selected, *forced, activation, reduce, entry)
    indexing.check(index_query, index_key, index, cu_seqlens is not None)
    checks.devices(index_query, given)
    checks.packed(cu_seqlens, index_query, "index_query")
    batch, length = index_query.shape[:2]
    if cu_seqlens is None:
        tokens = indexing.key_length(kv_len, length, index_key.shape[1], entry)
    else:
        checks.length(kv_len, index_query, cu_seqlens, None)
        tokens, cu_seqlens = length, checks.clamped(cu_seqlens, length)
    name = _implementation(implementation, index, index_query, index_key, cu_seqlens)
    with torch.no_grad(), as_given(index_query):
        options = {"config": index.config, "kv_len": tokens, "cu_seqlens": cu_seqlens}
        where = geometry(batch, length, **options, device=index_query.device)
        if name == "torch":
            return _in_chunks(index_query, index_key, where, index)
        return _on_triton(index_query, index_key, where, index)


def blocks_at(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    pool: int,
    num_selected: int,
    num_initial: int,
    num_local: int,
) -> Tensor:
    """`index_blocks` of queries at any places: `position` `[B or 1, T]`, negative: padding."""
    index = Index(pool, num_selected, num_initial, num_local, None, None, 1)
    indexing.check(query, key, index, False)
    with torch.no_grad(), as_given(query):
        query, key = query.contiguous(), key.contiguous()
        position = position.expand(query.shape[:2])
        none = torch.zeros_like(position)
        where = Geometry(position, none, none, None, None)
        if _implementation(None, index, query, key, None) == "torch":
            return _in_chunks(query, key, where, index)
        return _on_triton(query, key, where, index)


def _implementation(asked: str | None, index: Index, query, key, cu_seqlens) -> str:
    """The name of what runs.

    Raises:
      ValueError: there is none of the name that was asked for.
      NotImplementedError: the one that was asked for cannot.
    """
    if asked not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {asked!r}")
    if asked == "torch":
        return "torch"
    reason = index.kernel_why_not() or index_descriptions.why_not(index.sizes(query, key))
    if cu_seqlens is not None:
        reason = "takes no packed rows"
    if reason is None and not (query.is_contiguous() and key.is_contiguous()):
        reason = "needs contiguous tensors: pass copies"
    reason = reason or device_why_not(query)
    if asked == "triton" and reason is not None:
        raise NotImplementedError(f"implementation 'triton' {reason}")
    return "torch" if reason is not None else "triton"


def device_why_not(query: Tensor) -> str | None:
    if query.device.type != "cuda":
        return f"needs an NVIDIA GPU, got {query.device.type}"
    return capability.copies_why_not(capability_of(query.device.index), query.dtype)


def _on_triton(query: Tensor, key: Tensor, where: Geometry, index: Index) -> Tensor:
    from nsa_torch.triton_ops import TRITON_OPS

    kernel = index_descriptions.index_blocks(
        index.sizes(query, key), TRITON_OPS.capability(query)
    )
    position = where.position.to(torch.int32).contiguous()
    return TRITON_OPS.run(kernel, query.detach(), key.detach(), position)[0]


def _in_chunks(query: Tensor, key: Tensor, where: Geometry, index: Index) -> Tensor:
    batch, length, heads, _ = query.shape
    rows = key.shape[1]
    lists = heads if index.reduce is None else 1
    shape = batch, length, lists, index.num_selected
    found = torch.empty(shape, dtype=torch.int32, device=query.device)
    for part in chunks(length, batch * heads * max(rows, 1) * 8):
        seen, blocks = rows, index.num_blocks(rows) + (index.entry > 1)
        if where.offset is not None:  # the query's own block may have no key yet
            seen = min(rows, (where.offset + part.stop) // index.entry)
            blocks = index.config.num_blocks(where.offset + part.stop)
        scores = _block_scores(query[:, part], key[:, :seen], where, part, index, blocks)
        own = where.position[:, part, None].div(
            index.config.select_block, rounding_mode="floor"
        )
        found[:, part] = select_from_scores(scores, own, index.config)
    return found


def _block_scores(query, key, where: Geometry, part: slice, index: Index, blocks) -> Tensor:
    """z `[B, Q, lists, blocks]` of a chunk of queries."""
    dtype = wide(query.dtype)
    rows = key.shape[1]
    query, key = query.to(dtype), key.to(dtype)
    scores = (query.flatten(1, 2) @ key.mT).unflatten(1, query.shape[1:3])  # [B, Q, Hi, S']
    if index.activation == "relu":
        scores = scores.relu_()
    if index.reduce == "sum":
        scores = scores.sum(dim=2, keepdim=True)
    row = torch.arange(rows, device=key.device)
    if where.cu_seqlens is not None:  # blocks begin with the sequence
        local = (row + where.key_start[:, part, None]).clamp(max=rows - 1)
        scores = scores.gather(-1, local[:, :, None].expand_as(scores))
    seen = (row + 1) * index.entry <= where.position[:, part, None] + 1
    scores = scores.masked_fill_(~seen[:, :, None], -torch.inf)
    scores = F.pad(scores, (0, blocks * index.pool - rows), value=-torch.inf)
    return scores.unflatten(-1, (-1, index.pool)).amax(dim=-1)

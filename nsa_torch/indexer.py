"""Indexers, which choose the blocks of a query (`index_blocks`), and their loss."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_pallas.triton import capability
from nsa_core import index as indexing
from nsa_core import paged_layout, validate_paged
from nsa_core.index import Index
from nsa_core.steps import triton_index, triton_paged_blocks
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_torch import checks
from nsa_torch.chunks import chunks, wide
from nsa_torch.geometry import Geometry, geometry
from nsa_torch.plain import as_given
from nsa_torch.select import select_from_scores
from nsa_torch.torch_ops import TORCH_OPS, capability_of

PLAIN = "torch"


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
    implementation: Literal["triton", "torch"] | None = None,
) -> Tensor:
    """The key blocks with the highest scores of an indexer, without gradient.

        s[t, h, r] = activation(index_query[t, h] . index_key[r])      of the keys that t sees
        z[t, h, j] = max of s over the `pool` keys of block j           (reduce: of sum_h s)

    in float32. The lists contain the first `num_initial` blocks, the last `num_local` up to the
    query's own, and those of the highest z. If scores are equal, the lower block is chosen. No
    array of queries times keys is allocated: the plain implementation processes chunks of queries.

    Args:
      index_query: `[B, T, Hi, Di]`, float; the queries are the last `T` tokens.
      index_key: `[B, S', Di]`, one key head; key `r` represents the tokens `entry * r ..
        entry * r + entry - 1`, and is visible from the last of them on.
      pool: keys per block, which has `pool * entry` tokens.
      num_selected: `n`, the maximum of blocks per query, including the forced ones.
      num_initial, num_local: forced blocks, as in `NSAConfig`.
      activation: `relu` or None.
      reduce: `sum` makes one list for all heads; None makes one list per head.
      kv_len: number of tokens, an int, or int32 or int64 `[]` or `[B]`. None means `S'`, or `T` if
        `entry` is above 1.
      cu_seqlens: `[num_seqs + 1]`, a packed batch (see `nsa_torch.functional`), `entry` 1; blocks
        are local to the sequence.
      implementation: `triton`, `torch`, or None for the first that can run. `triton` needs a GPU
        since Ampere, a `pool` of a power of two up to 256, and no packed rows. It writes no scores
        if up to 64 blocks of 16 keys or more are chosen per head. Otherwise it writes up to 256 MB
        of scores at a time, for up to 32768 blocks per row.

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
    index = indexing.check(index_query, index_key, index, cu_seqlens is not None)
    checks.packed(cu_seqlens, index_query, "index_query")
    batch, length = index_query.shape[:2]
    if cu_seqlens is None:
        checks.length(kv_len, index_query, None, None, (index_key.shape[1] + 1) * entry - 1)
        tokens = indexing.key_length(kv_len, length, index_key.shape[1], entry)
    else:
        checks.length(kv_len, index_query, cu_seqlens, None)
        tokens, cu_seqlens = length, checks.clamped(cu_seqlens, length)
    with torch.no_grad(), as_given(index_query):
        options = {"config": index.config, "kv_len": tokens, "cu_seqlens": cu_seqlens}
        where = geometry(batch, length, **options, device=index_query.device)
        return _blocks(implementation, index_query, index_key, where, index)


def blocks_at(query: Tensor, key: Tensor, position: Tensor, index: Index) -> Tensor:
    """`index_blocks` of queries at any `position` `[B or 1, T]`; negative ones are padding."""
    index = indexing.check(query, key, index, False)
    with torch.no_grad(), as_given(query):
        query, key = query.contiguous(), key.contiguous()
        return _blocks(None, query, key, _anywhere(position.expand(query.shape[:2])), index)


def _anywhere(position: Tensor) -> Geometry:
    none = torch.zeros_like(position)
    return Geometry(position, none, none, None, None)


def paged_index_blocks(
    index_query: Tensor,
    index_key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    pool: int = 128,
    num_selected: int = 16,
    num_initial: int = 0,
    num_local: int = 1,
    activation: str | None = None,
    reduce: str | None = None,
    entry: int = 1,
    cu_seqlens_q: Tensor | None = None,
    implementation: Literal["triton", "torch"] | None = None,
) -> Tensor:
    """`index_blocks` of each row's last tokens with keys in pages: the lists of
    `paged_block_attention`.

    Only shapes determine the launches, so that a CUDA graph serves growing lengths.

    Args:
      index_query: `[N, Hi, Di]`, the rows' tokens one after the other.
      index_key_pages: `[P, page, Di]`, one key head; a page has `page * entry` tokens.
      page_table: int32 `[B, M]`, the pages of each row in the order of its tokens.
      lengths: int32 `[B]`, tokens per row including the queries' own; 0 means no row.
      pool, num_selected, num_initial, num_local, activation, reduce, entry: see `index_blocks`.
      cu_seqlens_q: int32 `[B + 1]`, where each row's queries begin. None means that all rows have
        the same number.
      implementation: `triton` (GPUs since Ampere, `pool` a power of two up to 256, tables of up to
        32768 blocks), `torch` (copies the keys of all rows), or None for the first that can run.

    Returns:
      int32 `[N, Hi or 1, n]`, ascending, -1 in empty slots at the end.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    tensors = index_query, index_key_pages, page_table, lengths
    names = "index_query", "index_key_pages", "page_table", "lengths"
    given = dict(zip(names, tensors, strict=True))
    given |= {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}
    checks.tensors(**given)
    chosen = num_selected, num_initial, num_local
    index = Index(pool, *chosen, activation, reduce, entry)
    index = indexing.check_paged(*tensors, cu_seqlens_q, index)
    pool_pages, keys = index_key_pages.shape[:2]
    at = page_table, lengths, cu_seqlens_q, index_query.shape[0]
    validate_paged.numbers(checks.read, *at, pool_pages, keys * entry)
    paged = Paged(page_table, lengths, cu_seqlens_q)
    with torch.no_grad(), as_given(index_query):
        query, pages = index_query.detach(), index_key_pages.detach()
        reason = triton_paged_blocks.index_why_not(query, pages, page_table, index)
        if runs_on(implementation, query, reason) == "torch":
            return _of_copies(query, pages, paged, index)
        from nsa_torch.triton_ops import TRITON_OPS

        return triton_paged_blocks.blocks(TRITON_OPS, query, pages, paged, index)


def _of_copies(query: Tensor, pages: Tensor, paged: Paged, index: Index) -> Tensor:
    """The lists from contiguous copies of the keys of all rows."""
    count, table = query.shape[0], paged.page_table
    most = table.shape[1] * pages.shape[1] * index.entry
    lengths = paged.lengths.clamp(max=most)
    starts = paged.cu_seqlens_q
    tokens = paged_layout.tokens_of(TORCH_OPS, lengths, starts, count)
    key = pages[table.long().clamp(0, pages.shape[0] - 1)].flatten(1, 2)
    longest = count // table.shape[0] if starts is None else count
    rows = paged_layout.pad_queries(TORCH_OPS, tokens, lengths, starts, longest)
    position = tokens.position[rows.token].masked_fill(~rows.there, -1)
    found = _in_chunks(query[rows.token], key, _anywhere(position), index)
    return found.flatten(0, 1)[rows.flat.clamp(0, found.shape[0] * longest - 1)]


def runs_on(asked: str | None, query: Tensor, *reasons: str | bool | None) -> str:
    """`triton` or `torch`, as `nsa_core.index.implementation`."""
    return indexing.implementation(asked, PLAIN, *reasons, device_why_not(query))


def device_why_not(query: Tensor) -> str | None:
    if query.device.type != "cuda":
        return f"needs an NVIDIA GPU, got {query.device.type}"
    return capability.copies_why_not(capability_of(query.device.index), query.dtype)


def _blocks(
    asked: str | None, query: Tensor, key: Tensor, where: Geometry, index: Index
) -> Tensor:
    apart = not (query.is_contiguous() and key.is_contiguous())
    name = runs_on(
        *(asked, query, where.cu_seqlens is not None and "takes no packed rows"),
        triton_index.why_not(query, key, index),
        apart and "needs contiguous tensors: pass copies",
    )
    if name == "torch":
        return _in_chunks(query, key, where, index)
    from nsa_torch.triton_ops import TRITON_OPS

    position = where.position.to(torch.int32).contiguous()
    arrays = query.detach(), key.detach(), position
    return triton_index.blocks(TRITON_OPS, *arrays, index, where.offset)


def _in_chunks(query: Tensor, key: Tensor, where: Geometry, index: Index) -> Tensor:
    batch, length, heads, _ = query.shape
    rows = key.shape[1]
    shape = batch, length, index.lists(heads), index.num_selected
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

"""Functions for indexers. An indexer is a small scorer that selects key blocks for each query.
`indexer_kl` is the loss that trains an indexer.
"""

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.triton import capability
from nsa_core import block_lists
from nsa_core import index as indexing
from nsa_core.array_ops import zero_padding
from nsa_core.index import Index, Loss, Teacher
from nsa_core.steps import triton_index, triton_paged_blocks
from nsa_core.steps.triton_index import Kept
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_torch import checks
from nsa_torch.chunks import chunks, over_queries
from nsa_torch.geometry import Geometry, geometry, own_tokens
from nsa_torch.plain import as_given, first_order
from nsa_torch.torch_ops import TORCH_OPS as OPS
from nsa_torch.torch_ops import capability_of

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
    """Select the key blocks with the highest scores of an indexer, without gradient.

        s[t, h, r] = activation(index_query[t, h] . index_key[r])      of the keys that t sees
        z[t, h, j] = max of s over the `pool` keys of block j           (reduce: of sum_h s)

    The scores are computed in float32. A list contains the first `num_initial` blocks, the last
    `num_local` blocks up to the query's own block, and the blocks with the highest z. If scores are
    equal, the block with the lower index is chosen. No array of size queries times keys is
    allocated. The implementation `torch` processes chunks of queries.

    Args:
      index_query: `[B, T, Hi, Di]`, floating point; the queries are the last `T` tokens.
      index_key: `[B, S', Di]`, one key head. Key `r` represents the tokens
        `range(entry * r, entry * (r + 1))`. Only queries at or after the last token of key `r` use
        this key.
      pool: number of index keys per block. A block has `pool * entry` tokens.
      num_selected: `n`, the maximum number of blocks per query, including those that
        `num_initial` and `num_local` force.
      num_initial, num_local: numbers of blocks that every list contains, as in `NSAConfig`.
      activation: `relu` or None.
      reduce: `sum` adds the scores of all index heads and makes one list. `reduce=None` makes one
        list per index head.
      entry: number of tokens that an index key represents.
      kv_len: number of tokens, an int, or an int32 or int64 tensor `[]` or `[B]`. `kv_len=None`
        means `S'`, or `T` if `entry` is above 1.
      cu_seqlens: `[num_seqs + 1]`, the boundaries of a packed batch (see `nsa_torch.functional`). A
        packed batch requires `entry=1`. In a packed batch, block indices count from the start of
        each sequence.
      implementation: `triton` or `torch`; None means the first of the two that can run. `triton`
        needs an Ampere GPU or newer, contiguous tensors, and at most 64 index heads of at most 256
        columns. `triton` requires a `pool` that is a power of two up to 256, and does not support
        packed rows. `triton` writes no scores to memory if `activation` and `reduce` are None,
        `num_selected <= 64` and `pool >= 16`. In other calls `triton` supports up to 32768 blocks
        per row, and writes up to 256 MiB of scores at a time.

    Returns:
      The selected blocks, int32 `[B, T, Hi or 1, n]`, ascending, with -1 in empty slots at the
      end. Pass the result as `block_indices` to `block_attention`, with `block_size = pool *
      entry`.

    Raises:
      ValueError: Shapes, dtypes or sizes do not fit.
      NotImplementedError: The named implementation cannot run this call.
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
    """Select blocks as `index_blocks` does, for queries at arbitrary positions. `position` is
    `[B or 1, T]`, and a negative number marks padding.
    """
    index = indexing.check(query, key, index, False)
    with torch.no_grad(), as_given(query):
        query, key = query.contiguous(), key.contiguous()
        position = position.expand(query.shape[:2])
        start = torch.zeros_like(position)
        where = Geometry(position, start, start, None, None)
        return _blocks(None, query, key, where, index)


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
    """Select blocks for the last tokens of each row, with index keys in pages. Pass the result as
    `block_indices` to `paged_block_attention`. The launches depend only on shapes, so that one CUDA
    graph serves rows that grow.

    Args:
      index_query: `[N, Hi, Di]`, the queries of all rows, one row after the other.
      index_key_pages: `[P, page, Di]`, one key head; a page has `page * entry` tokens.
      page_table: int32 `[B, M]`, the pages of each row in the order of its tokens.
      lengths: int32 `[B]`, tokens per row, including the tokens of the queries. A row of length 0
        is unused.
      pool, num_selected, num_initial, num_local, activation, reduce, entry: see `index_blocks`.
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first query, then the number of
        queries of all rows. `cu_seqlens_q=None` means that all rows have the same number of
        queries.
      implementation: `triton` or `torch`; None means the first of the two that can run. `triton`
        needs an Ampere GPU or newer, at most 64 index heads of at most 256 columns, and page tables
        of at most 32768 blocks. `triton` requires a `pool` that is a power of two up to 256.
        `torch` copies the keys of all rows.

    Returns:
      The selected blocks, int32 `[N, Hi or 1, n]`, ascending, with -1 in empty slots at the end.

    Raises:
      ValueError: Shapes, dtypes or sizes do not fit.
      NotImplementedError: The named implementation cannot run this call.
    """
    given = {"index_query": index_query, "index_key_pages": index_key_pages}
    given |= {"page_table": page_table, "lengths": lengths}
    checks.tensors(**given, **checks.present(cu_seqlens_q=cu_seqlens_q))
    paged = Paged(page_table, lengths, cu_seqlens_q)
    chosen = num_selected, num_initial, num_local
    index = Index(pool, *chosen, activation, reduce, entry)
    index = indexing.check_paged(checks.read, index_query, index_key_pages, paged, index)
    with torch.no_grad(), as_given(index_query):
        query, pages = index_query.detach(), index_key_pages.detach()
        reason = triton_paged_blocks.index_why_not(query, pages, page_table, index)
        if runs_on(implementation, query, reason) == "torch":
            return indexing.blocks_of_pages(OPS, over_queries, query, pages, paged, index)
        return triton_paged_blocks.blocks(OPS, query, pages, paged, index)


def runs_on(asked: str | None, query: Tensor, *reasons: str | bool | None) -> str:
    """Choose the implementation `triton` or `torch`. `asked` and `reasons` are arguments of
    `nsa_core.index.implementation`.
    """
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
        *(asked, query, where.cu_seqlens is not None and "does not support packed rows"),
        triton_index.why_not(query, key, index),
        apart and "needs contiguous tensors: pass copies",
    )
    if name == "torch":
        seen = None
        if (offset := where.offset) is not None:
            seen = lambda end: (offset + end) // index.entry
        by_chunks = functools.partial(over_queries, seen=seen)
        start = None if where.cu_seqlens is None else where.key_start
        return indexing.blocks_at(OPS, by_chunks, query, key, where.position, start, index)
    position = where.position.to(torch.int32).contiguous()
    arrays = query.detach(), key.detach(), position
    return triton_index.blocks(OPS, *arrays, index, where.offset)


def indexer_kl(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    block_indices: Tensor | None = None,
    *,
    block_size: int | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    kv_len: int | None = None,
    cu_seqlens: Tensor | None = None,
    implementation: Literal["triton", "torch"] | None = None,
) -> Tensor:
    """Compute the loss KL(attention || indexer) for each query and index head. The loss is a sum
    over the keys `j` that the query attends to:

        t_j = mean over the index head's heads of exp(scale q . k_j - lse)   (no gradient)
        p   = softmax of index_scale index_query . index_key_j
        L   = sum_j t_j (log t_j - log p_j)

    With `block_indices` the sum is over the keys of the listed blocks, as in the sparse stage of
    training. Without `block_indices` the sum is over all keys up to the query, as in dense warm-up.
    Only `index_query` and `index_key` receive gradients. The loss needs neither values nor the
    gradient of the attention's output, so that the attention may be frozen. Neither the forward nor
    the backward pass allocates an array of size queries times keys. Sums have a fixed order.

    Sources: the indexer loss comes from DeepSeek-V3.2. The mean over the heads of a group comes
      from MiniMax-M3.

    Args:
      query, key: inputs of the attention, `[B, T, H, D]`, `[B, S, Hkv, D]`; the queries are the
        last `T` tokens.
      lse: `[B, T, H]`, the natural log-sum-exp of the attention over the same keys, as
        `block_attention` and `sliding_attention` return it. A value of -inf means that the query
        has no keys, and that its loss is 0.
      index_query, index_key: `[B, T, Hi, Di]`, `[B, S, Di]`. Index head `h` learns from the query
        heads `range(h * H / Hi, (h + 1) * H / Hi)`.
      block_indices: int32 `[B, T, Hi or 1, n]`, as in `block_attention`; None means all keys.
      block_size: tokens per block, if `block_indices` are given.
      scale: factor of the attention's logits; None means `D**-0.5`.
      index_scale: factor of the indexer's logits; None means `Di**-0.5`.
      kv_len: number of keys; None means `S`.
      cu_seqlens: `[num_seqs + 1]`, the boundaries of a packed batch (see `nsa_torch.functional`).
      implementation: `triton` or `torch` (a chunk of queries at a time); None means the first of
        the two that can run. `triton` needs an Ampere GPU or newer, `block_indices`, one dtype for
        attention and indexer, and at least one index head per key/value head. `triton` supports
        blocks of 16, 32, 64 or 128 keys and widths up to 128. `triton` does not support packed
        rows. `triton` stores one value per query, index head and listed key. A stored value has 16
        bits, or 32 bits for float32.

    Returns:
      The loss, float32 `[B, T, Hi]` (float64 for float64 input). The loss is 0 for padding. The
      loss is not negative if `lse` comes from attention over the same keys. For a scalar loss,
      compute the mean over the tokens that should count.

    Raises:
      ValueError: Shapes or dtypes do not fit.
      NotImplementedError: A second derivative is required, or the named implementation cannot
        run this call.
    """
    given = dict(query=query, key=key, lse=lse, index_query=index_query, index_key=index_key)
    if block_indices is not None:
        given["block_indices"] = block_indices
    checks.tensors(**given)
    arrays = query, key, lse, index_query, index_key, block_indices
    teacher = indexing.check_loss(*arrays, block_size, scale, index_scale)
    checks.packed(cu_seqlens, query, "query")
    length = checks.length(kv_len, query, cu_seqlens, key.shape[1])
    if block_indices is not None:
        checks.distinct(block_indices)
    options: dict[str, Any] = {"kv_len": length}
    options["cu_seqlens"] = checks.clamped(cu_seqlens, query.shape[1])
    config = block_lists.config_of(teacher.block, 1)
    where = geometry(*query.shape[:2], **options, config=config, device=query.device)
    index_query, index_key = _real(index_query, index_key, where, length)
    tensors = query.detach(), key.detach(), lse.detach()
    work = _Work(*tensors, block_indices, where, teacher)
    name = runs_on(
        *(implementation, query, cu_seqlens is not None and "does not support packed rows"),
        triton_index.loss_why_not(query, key, index_query, block_indices, teacher.block),
    )
    run = _Loss if name == PLAIN else _KernelLoss
    with as_given(query):
        return run.apply(index_query, index_key, work)


def _real(index_query, index_key, where: Geometry, length: int | Tensor):
    """Return the index queries and index keys with zeros in place of padding. Without these zeros,
    a NaN in padding would spread. The gradient of index queries is a product with index keys, and
    the gradient of index keys is a product with index queries.
    """
    (index_query,) = zero_padding(torch, where, index_query)
    if where.cu_seqlens is not None:
        count = where.cu_seqlens[-1:]
    elif isinstance(length, Tensor):
        count = length.reshape(-1)
    elif length == index_key.shape[1]:
        count = None
    else:
        count = torch.full((1,), length, device=index_key.device)
    return index_query, *own_tokens(count, index_key)


class _Work(NamedTuple):
    """All inputs of `indexer_kl` except index queries and index keys. The first fields are the
    caller's tensors.
    """

    query: Tensor
    key: Tensor
    lse: Tensor
    block_indices: Tensor | None
    where: Geometry
    teacher: Teacher

    def loss(self, index_query: Tensor, index_key: Tensor) -> Loss:
        return indexing.loss_of(
            OPS, self.teacher, *self[:4], self.where, index_query, index_key
        )


class _KernelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index_query, index_key, work: _Work):
        sizes = work.key.shape[1], work.teacher.block
        lists = triton_index.lists_for(OPS, work.block_indices, index_query, *sizes)
        position = work.where.position.to(torch.int32).contiguous()
        arrays = work.query, work.key, work.lse.float(), index_query, index_key
        loss, kept = triton_index.loss(OPS, arrays, lists, position, work.teacher)
        ctx.teacher = work.teacher
        ctx.save_for_backward(index_query, index_key, lists, position, *kept)
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad):
        index_query, index_key, lists, position, *kept = ctx.saved_tensors
        given = index_query, index_key, lists, position, Kept(*kept), grad
        return *triton_index.gradients(OPS, ctx.teacher, *given), None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index_query, index_key, work: _Work):
        # They are saved so that torch detects whether one of them is modified before the backward
        # pass.
        ctx.save_for_backward(index_query, index_key, *work[:4])
        ctx.rest = work[4:]
        return over_queries(*work.loss(index_query, index_key)[1:])

    @staticmethod
    @first_order
    def backward(ctx, grad):
        """Compute dS = grad (p sum(t) - t), the gradient of the scores. A row of scores, and an
        entry of `grad`, belong to one query and one index head.
        """
        index_query, index_key, *given = ctx.saved_tensors
        work = _Work(*given, *ctx.rest)
        parts, _, arrays, shared, row_bytes = work.loss(index_query, index_key)
        dq, dk = torch.empty_like(index_query), torch.zeros_like(index_key, dtype=grad.dtype)
        for part in chunks(grad.shape[1], row_bytes):
            with torch.autocast(grad.device.type, enabled=False):
                t, logp, seen, rows = parts(*(x[:, part] for x in arrays), *shared)
                p = logp.exp().masked_fill(~seen, 0)
                ds = (p * t.sum(dim=-1, keepdim=True) - t) * grad[:, part, :, None]
                ds = ds * work.teacher.index_scale
                if rows is not None:  # masked entries add 0 to key 0
                    whole = ds.new_zeros(*ds.shape[:3], index_key.shape[1])
                    ds = whole.scatter_add_(-1, rows.long().expand_as(ds), ds)
                dq[:, part] = OPS.product("bqhk,bkd->bqhd", ds, index_key)
                dk += OPS.product("bqhk,bqhd->bkd", ds, index_query[:, part])
        return dq, dk.to(index_key.dtype), None

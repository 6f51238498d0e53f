"""The loss of an indexer: the divergence of its scores from the attention that it serves."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nsa_core import block_lists, index_loss
from nsa_core.array_ops import zero_padding
from nsa_core.index_loss import Teacher
from nsa_core.steps import triton_index
from nsa_core.steps.triton_index import Kept
from nsa_torch import checks
from nsa_torch.chunks import chunks, wide
from nsa_torch.first_order import first_order
from nsa_torch.geometry import Geometry, geometry, own_tokens
from nsa_torch.indexer import PLAIN, runs_on
from nsa_torch.plain import as_given
from nsa_torch.torch_ops import TORCH_OPS


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
    """KL(attention || indexer) of each query and index head, over the keys `j` that it attends to:

        t_j = mean over the heads of exp(scale q . k_j - lse)          (no gradient)
        p   = softmax of index_scale index_query . index_key_j
        L   = sum_j t_j (log t_j - log p_j)

    With `block_indices` these are the keys of the named blocks (the sparse stage), otherwise all
    keys up to the query (dense warm-up). Only `index_query` and `index_key` receive gradients.
    Values and the output's gradient are not needed, so it also works if the attention is frozen.
    No array of queries times keys is allocated, forward or backward. Sums have a fixed order.

    Source: DeepSeek-V3.2's indexer loss, with MiniMax-M3's mean over the heads of a group.

    Args:
      query, key: inputs of the attention, `[B, T, H, D]`, `[B, S, Hkv, D]`; the queries are the
        last `T` tokens.
      lse: `[B, T, H]`, its natural log-sum-exp over the same keys, as `block_attention` and
        `sliding_attention` return it. A row with -inf has no keys, and its loss is 0.
      index_query, index_key: `[B, T, Hi, Di]`, `[B, S, Di]`. Index head `h` learns from the query
        heads `h * H / Hi ..`.
      block_indices: int32 `[B, T, Hi or 1, n]`, as in `block_attention`; None means all keys.
      block_size: tokens per block, if `block_indices` are given.
      scale: factor of the attention's logits; None means `D**-0.5`.
      index_scale: factor of the indexer's logits; None means `Di**-0.5`.
      kv_len: number of keys; None means `S`.
      cu_seqlens: `[num_seqs + 1]`, a packed batch (see `nsa_torch.functional`).
      implementation: `triton`, `torch` (a chunk of queries at a time), or None for the first that
        can run. `triton` needs a GPU since Ampere, named blocks, no packed rows, and at least one
        index head per key/value head. It stores a 16-bit number per query, index head and listed
        key.

    Returns:
      float32 `[B, T, Hi]`, not negative if `lse` belongs to the same keys; 0 for padding. Compute
      the mean over tokens that count.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: a second derivative; the named implementation cannot run this.
    """
    given = dict(query=query, key=key, lse=lse, index_query=index_query, index_key=index_key)
    if block_indices is not None:
        given["block_indices"] = block_indices
    checks.tensors(**given)
    arrays = query, key, lse, index_query, index_key, block_indices
    teacher = index_loss.check(*arrays, block_size, scale, index_scale)
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
        *(implementation, query, cu_seqlens is not None and "takes no packed rows"),
        triton_index.loss_why_not(query, key, index_query, block_indices, teacher.block),
    )
    run = _Loss if name == PLAIN else _KernelLoss
    with as_given(query):
        return run.apply(index_query, index_key, work)


def _real(index_query, index_key, where: Geometry, length: int | Tensor):
    """The results of an indexer with zeros for padding: its gradients are products of both."""
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


GIVEN = 4  # the first tensors in `_Work` belong to the caller


class _Work(NamedTuple):
    """All inputs except the results of the indexer."""

    query: Tensor
    key: Tensor
    lse: Tensor
    block_indices: Tensor | None
    where: Geometry
    teacher: Teacher

    def parts(self):
        batch, _, heads, width = self.query.shape
        keys, most = self.key.shape[1], 0
        if self.block_indices is not None:
            most = keys * self.teacher.index_heads
            keys = self.block_indices.shape[-1] * self.teacher.block
            heads = self.teacher.pairs * (width + self.teacher.heads)
        return chunks(self.query.shape[1], batch * (keys * heads + most) * 4)

    def attention(self, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """t `[B, Q, Hi, K]`, which keys are seen, and their rows, behind the keys where they are
        not; None for all.
        """
        teacher, dtype, keys = self.teacher, wide(self.query.dtype), self.key.shape[1]
        lists = None if self.block_indices is None else self.block_indices[:, part]
        at = self.where.position[:, part], self.where.key_start[:, part]
        seen, rows = index_loss.seen_keys(TORCH_OPS, lists, *at, self.teacher.block, keys)
        query = self.query[:, part].to(dtype).unflatten(2, (teacher.pairs, teacher.heads))
        repeats = teacher.pairs // teacher.kv_heads
        if rows is None:
            key = self.key.to(dtype).repeat_interleave(repeats, dim=2)
            logits = torch.einsum("bqphd,bkpd->bqphk", query, key)
        else:
            rows = rows.long().masked_fill(~seen, keys)
            row = rows.clamp(max=keys - 1)
            row = row.repeat_interleave(teacher.pairs // row.shape[2], dim=2)
            batch = torch.arange(row.shape[0], device=row.device)[:, None, None, None]
            head = torch.arange(teacher.pairs, device=row.device)[:, None] // repeats
            key = self.key[batch, row, head].to(dtype)  # [B, Q, pairs, K, D]
            logits = query @ key.mT
        lse = self.lse[:, part].to(dtype)
        return teacher.targets(torch, logits, lse, seen), seen, rows

    def log_probs(
        self, query: Tensor, key: Tensor, seen: Tensor, rows: Tensor | None
    ) -> Tensor:
        """log p `[B, Q, Hi, K]`, 0 for masked keys."""
        dtype = wide(query.dtype)
        scores = torch.einsum("bqhd,bkd->bqhk", query.to(dtype), key.to(dtype))
        if rows is not None:
            row = rows.clamp(max=key.shape[1] - 1)
            scores = scores.gather(-1, row.expand(*scores.shape[:3], -1))
        scores = (scores * self.teacher.index_scale).masked_fill(~seen, -torch.inf)
        return scores.log_softmax(dim=-1).masked_fill(~seen, 0)

    def loss(self, index_query: Tensor, index_key: Tensor) -> Tensor:
        loss = index_query.new_empty(index_query.shape[:3], dtype=wide(index_query.dtype))
        for part in self.parts():
            t, seen, rows = self.attention(part)
            logp = self.log_probs(index_query[:, part], index_key, seen, rows)
            loss[:, part] = (torch.xlogy(t, t) - t * logp).sum(dim=-1)
        return loss

    def gradients(self, index_query: Tensor, index_key: Tensor, grad: Tensor):
        """dS = grad (p sum(t) - t), by rows of scores; each has one entry of a query."""
        dtype, keys = wide(index_query.dtype), index_key.shape[1]
        dq = torch.empty_like(index_query)
        dk = torch.zeros_like(index_key, dtype=dtype)
        for part in self.parts():
            t, seen, rows = self.attention(part)
            logp = self.log_probs(index_query[:, part], index_key, seen, rows)
            p = logp.exp().masked_fill(~seen, 0)
            ds = (p * t.sum(dim=-1, keepdim=True) - t) * grad[:, part, :, None].to(dtype)
            ds = ds * self.teacher.index_scale
            if rows is not None:  # a row after the keys receives masked entries
                whole = ds.new_zeros(*ds.shape[:3], keys + 1)
                ds = whole.scatter_(-1, rows.expand_as(ds), ds)[..., :keys]
            dq[:, part] = torch.einsum("bqhk,bkd->bqhd", ds, index_key.to(dtype))
            dk += torch.einsum("bqhk,bqhd->bkd", ds, index_query[:, part].to(dtype))
        return dq, dk.to(index_key.dtype)


class _KernelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index_query, index_key, work: _Work):
        from nsa_torch.triton_ops import TRITON_OPS as ops

        sizes = work.key.shape[1], work.teacher.block
        lists = triton_index.lists_for(ops, work.block_indices, index_query, *sizes)
        position = work.where.position.to(torch.int32).contiguous()
        arrays = work.query, work.key, work.lse.float(), index_query, index_key
        loss, kept = triton_index.loss(ops, arrays, lists, position, work.teacher)
        ctx.teacher = work.teacher
        ctx.save_for_backward(index_query, index_key, lists, position, *kept)
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad):
        from nsa_torch.triton_ops import TRITON_OPS as ops

        index_query, index_key, lists, position, *kept = ctx.saved_tensors
        given = index_query, index_key, lists, position, Kept(*kept), grad
        return *triton_index.gradients(ops, ctx.teacher, *given), None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index_query, index_key, work: _Work):
        # Saved, so that torch knows if one was written to since.
        ctx.save_for_backward(index_query, index_key, *work[:GIVEN])
        ctx.rest = work[GIVEN:]
        return work.loss(index_query, index_key)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        index_query, index_key, *given = ctx.saved_tensors
        work = _Work(*given, *ctx.rest)
        with torch.autocast(grad.device.type, enabled=False):
            return *work.gradients(index_query, index_key, grad), None

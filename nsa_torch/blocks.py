"""Attention to key blocks that the caller lists, for whole sequences and for pages."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from nsa_core import block_lists
from nsa_core.steps import triton_paged_blocks
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_torch import checks
from nsa_torch.chunks import over_queries
from nsa_torch.functional import Name, one_step
from nsa_torch.geometry import geometry_of
from nsa_torch.indexers import runs_on
from nsa_torch.operators import refuse_transforms, requires_grad
from nsa_torch.plain import as_given
from nsa_torch.sdpa import attend_rows
from nsa_torch.torch_ops import TORCH_OPS as OPS


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    include: Literal["selected", "tail"] = "selected",
    kv_len: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_residual: bool = False,
    implementation: Name | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute causal attention of each query to the key blocks in its list. One softmax covers
    the keys of all blocks in the list.

    Block `j` contains the tokens `range(j * block_size, (j + 1) * block_size)` of the query's
    sequence. A query attends to the tokens of its listed blocks at or before its own position. The
    queries are the last `T` of the `S` tokens. Query, key and value receive gradients through the
    output and through the log-sum-exp. On `mosaic` and `triton` the gradients are deterministic,
    since sums have a fixed order.

    Args:
      query: `[B, T, H, D]`, floating point.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`.
      block_indices: int32 `[B, T, G, n]`. `G` is the number of lists per token and divides `H`.
        List `g` serves the query heads `range(g * H / G, (g + 1) * H / G)`. `G` is a divisor of
        `Hkv`, often 1, or a multiple of `Hkv`. If `G` is a multiple of `Hkv`, keys and values are
        repeated. The entries of a list may have any order, and negative entries are empty. Blocks
        after the query's own block, or beyond the last key, are masked. A list must not contain a
        block twice, since the keys of this block would count twice.
      block_size: tokens per block. `mosaic` supports multiples of 16 up to 128, and `triton`
        supports any size up to 128. `mosaic` and `triton` also support larger multiples of 64.
        `mosaic` and `triton` split blocks of more than 128 tokens into parts of 128 tokens. If
        `block_size` is not a multiple of 128, the parts have 64 tokens. A list of blocks that are
        split must have at most 64 parts.
      scale: factor of the logits; None means `D**-0.5`.
      include: `include="selected"` means that a query attends only to the blocks in its list.
        `include="tail"` means that a query also attends to its own block, unless the query is the
        last token of that block. With `include="tail"` the lists must not contain the query's own
        block.
      kv_len: number of valid keys, an int, or an int32 or int64 tensor `[]` or `[B]`; None means
        `S`.
      cu_seqlens: `[num_seqs + 1]`, the boundaries of a packed batch (see `nsa_torch.functional`).
        In a packed batch, block indices are local to the sequence.
      return_residual: whether to return the log-sum-exp too.
      implementation: as in `selected_attention`.

    Returns:
      The output `[B, T, H, Dv]` in the dtype of `query`. The output is 0 for a query that attends
      to no key. With `return_residual` the function also returns the natural log-sum-exp `[B, T,
      H]` in float32 (float64 for float64 input). The log-sum-exp is -inf for a query that attends
      to no key. To add an attention sink with logit `s`, compute `out * sigmoid(lse - s)`.

    Raises:
      ValueError: Shapes or dtypes do not fit. On a CPU, or under `nsa_core.debug`, a list that
        contains a block twice also raises `ValueError`.
      NotImplementedError: The named implementation cannot run this call.
    """
    given = {"query": query, "key": key, "value": value, "block_indices": block_indices}
    checks.tensors(**given)
    block_lists.check(query, key, value, block_indices, block_size, include, scale)
    block_size = block_lists.within(block_size, key.shape[1])
    checks.packed_keys(cu_seqlens, query, key)
    kv_len = checks.length(kv_len, query, cu_seqlens, key.shape[1])
    entries, kv_heads = block_indices.shape[-1], key.shape[2]
    if cu_seqlens is None and entries > block_lists.MAX_ENTRIES:
        found = _of_long_lists(
            *(query, key, value, block_indices, block_size, include, scale),
            kv_len,
            implementation,
        )
        if found is not None:
            return found if return_residual else found[0]
    if include == "tail":
        config = block_lists.config_of(block_size, entries)
        at: Any = kv_len, checks.clamped(cu_seqlens, query.shape[1])
        position = geometry_of(query, config, *at).position
        block_indices = block_lists.with_tail(torch, block_indices, position, block_size)
        entries += 1
    checks.distinct(block_indices)
    parts, config = block_lists.split(block_size, entries)
    sizes = key.shape[1], block_size, kv_heads
    found = block_lists.for_kernels(OPS, block_indices, parts, *sizes)
    repeats = found.shape[2] // kv_heads
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    memory = {"query": query, "key": key, "value": value}
    place = config, kv_len, cu_seqlens, scale
    out, lse = one_step("selected", implementation, memory, *place, found)
    return (out, lse) if return_residual else out


def _of_long_lists(
    query, key, value, block_indices, block_size, include, scale, kv_len, implementation
) -> tuple[Tensor, Tensor] | None:
    """Compute `(out, lse)` with the kernels for long block lists. The kernels for long lists
    gather single keys and have no gradient. Return None if the kernels do not support the call or
    if the caller named another implementation.
    """
    arrays = query, key, value, block_indices
    if implementation not in (None, "triton") or requires_grad(query, key, value):
        return None
    of = OPS.capability(query), *arrays, block_size, include
    if runs_on(None, query, triton_paged_blocks.why_not(*of, whole=True)) != "triton":
        return None
    refuse_transforms(query, key, value)
    checks.distinct(block_indices)
    lengths = torch.as_tensor(kv_len, dtype=torch.int32, device=query.device)
    lengths = lengths.expand(query.shape[0])
    with torch.no_grad(), as_given(query):
        how = block_size, include, scale
        found = triton_paged_blocks.attention_of_rows(OPS, *arrays, lengths, *how)
    return found[0], found[1]


def paged_block_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    include: Literal["selected", "tail"] = "selected",
    cu_seqlens_q: Tensor | None = None,
    return_residual: bool = False,
    implementation: Literal["triton", "torch"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `block_attention` of each row's last tokens to the row's keys and values in pages.
    The result is `[N, H, Dv]`. The kernels read only the listed blocks. The launches depend only on
    shapes, so that one CUDA graph serves rows that grow.

    Args:
      query: `[N, H, D]`, the queries of all rows, one row after the other.
      key_pages, value_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`; a page may have any number
        of tokens.
      page_table: int32 `[B, M]`, the pages of each row in the order of its tokens.
      lengths: int32 `[B]`, tokens per row, including the tokens of the queries. A row of length 0
        is unused.
      block_indices: int32 `[N, G, n]`, as in `block_attention`.
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first query, then the number of
        queries of all rows. `cu_seqlens_q=None` means that all rows have the same number of
        queries.
      block_size, scale, include, return_residual: as in `block_attention`; a block may have any
        number of tokens.
      implementation: `triton` (GPUs since Ampere), `torch` (gathers and a softmax), or None, which
        means the first of `triton` and `torch` that can run.

    Raises:
      ValueError: Shapes or dtypes do not fit. If the host reads the indices, duplicate blocks in a
        list and indices of pages that do not exist also raise `ValueError`.
      NotImplementedError: A gradient is required, or the named implementation cannot run this call.
    """
    given = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    given |= {"block_indices": block_indices, "page_table": page_table, "lengths": lengths}
    checks.tensors(**given, **checks.present(cu_seqlens_q=cu_seqlens_q))
    arrays = query, key_pages, value_pages, block_indices
    paged = Paged(page_table, lengths, cu_seqlens_q)
    how = block_size, include, scale
    block_size = block_lists.check_paged(OPS, checks.read, *arrays, paged, *how)
    refuse_transforms(query, key_pages, value_pages)
    if requires_grad(query, key_pages, value_pages):
        raise NotImplementedError(
            "paged_block_attention has no gradient; call it under torch.no_grad()"
        )
    with torch.no_grad(), as_given(query):
        rest = paged, block_size, include, scale
        of = OPS.capability(query), *arrays, block_size, include
        if runs_on(implementation, query, triton_paged_blocks.why_not(*of)) == "torch":
            attend = functools.partial(attend_rows, with_lse=True)
            out, lse = block_lists.attention_to_pages(OPS, over_queries, attend, *arrays, *rest)
        else:
            out, lse = triton_paged_blocks.attention(OPS, *arrays, *rest)
    return (out, lse) if return_residual else out

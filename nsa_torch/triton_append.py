"""`paged.append` in one launch of a Triton kernel."""

from typing import Any

from torch import Tensor

from kernels_pallas.triton import decode_descriptions
from nsa_core.types import Branches
from nsa_torch import paged
from nsa_torch.paged import PagedCache
from nsa_torch.triton_ops import TRITON_OPS as OPS


def why_not(cache: PagedCache, *call: Any) -> str | None:
    """Why the kernel cannot write such pages, or None."""
    return paged.append_why_not(cache.selected_key)


def is_ready(*call: Any) -> bool:
    return True  # Triton builds it at once


def append(
    cache: PagedCache,
    key: Branches,
    value: Branches,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    means: bool,
) -> None:
    """Writes new tokens to their pages in one launch; the means too, if compressed tokens are.

    Arguments as of `paged.append`. The cache's tensors are contiguous.
    """
    tokens = key.selected.shape[0]
    rows, pages = page_table.shape
    kernel = decode_descriptions.append(
        tokens,
        rows,
        pages,
        cache.num_pages,
        cache.kv_heads,
        (key.selected.shape[2], value.selected.shape[2]),
        cache.config,
        ragged=cu_seqlens_q is not None,
        separate=cache.separate,
        means=means,
    )
    new = (key.selected, value.selected, key.sliding, value.sliding)
    new = (*new, key.compressed, value.compressed)
    OPS.run_in_place(
        kernel,
        *(x.contiguous() for x in new),
        *(cache.selected_key, cache.selected_value),
        *cache.sliding,
        *cache.raw,
        *(cache.compressed_key, cache.compressed_value),
        *(x.contiguous() for x in (page_table, lengths)),
        lengths if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
    )

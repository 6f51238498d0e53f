"""`paged.append` in one launch of a Triton kernel."""

from typing import Any

from torch import Tensor

from kernels_pallas.triton import decode_descriptions
from nsa_core.types import Branches
from nsa_torch import paged
from nsa_torch.paged import PagedCache
from nsa_torch.triton_ops import TRITON_OPS as OPS


def why_not(cache: PagedCache, *call: Any) -> str | None:
    """Why the kernel cannot run this call, or None."""
    *_, means = call
    if cache.is_fp8 and not means:
        return "makes means alone in a cache in fp8"
    return paged.append_why_not(cache)


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
    slots: Tensor | None,
) -> None:
    """Writes new tokens to their pages in one launch; the means too, if compressed tokens are.

    Arguments as in `paged.append`. The cache's tensors are contiguous.
    """
    tokens = key.selected.shape[0]
    (rows, pages), ragged = page_table.shape, cu_seqlens_q is not None
    launches = decode_descriptions.append(
        tokens,
        rows,
        pages,
        cache.num_pages,
        cache.kv_heads,
        (key.selected.shape[2], value.selected.shape[2]),
        cache.config,
        ragged=ragged,
        separate=cache.separate,
        means=means,
        fp8_rows=cache.recent_key.shape[0] if cache.is_fp8 else 0,
        slots=slots is not None,
    )
    new = (key.selected, value.selected, key.sliding, value.sliding)
    new = (*new, key.compressed, value.compressed)
    keys, values = cache.sources("key"), cache.sources("value")
    raw = "raw" if cache.separate else "selected"
    rounded = [keys.selected, values.selected, keys.sliding, values.sliding]
    rounded += [f"{raw}_key", f"{raw}_value", values.compressed]
    scales = [getattr(cache, f"{name}_scale") for name in rounded]
    arrays = [
        *(x.contiguous() for x in new),
        *(cache.selected_key, cache.selected_value),
        *cache.sliding,
        *cache.raw,
        *(cache.compressed_key, cache.compressed_value),
        *(x.contiguous() for x in (page_table, lengths)),
        lengths if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        *(lengths if x is None else x for x in (*scales, cache.recent_key, cache.recent_value)),
        lengths if slots is None else slots.contiguous(),
    ]
    for _ in range(paged.launches_of_means(tokens, rows, ragged, means)):
        OPS.run_in_place(launches[0], *arrays)
    for kernel in launches[1:]:
        OPS.run_in_place(kernel, *arrays)

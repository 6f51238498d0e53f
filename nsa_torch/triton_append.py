"""`paged.append` in one launch of a Triton kernel."""

from typing import Any

from torch import Tensor

from kernels_pallas.triton import decode_descriptions
from nsa_core.types import Branches
from nsa_torch import paged
from nsa_torch.paged import PagedCache
from nsa_torch.triton_ops import TRITON_OPS, TritonOps


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
    ops: TritonOps = TRITON_OPS,
) -> None:
    """Writes new tokens to their pages in one launch; the means too, if compressed tokens are.

    Arguments as in `paged.append`. The cache's tensors are contiguous.
    """
    ragged, (rows, _) = cu_seqlens_q is not None, page_table.shape
    flags = {"ragged": ragged, "means": means, "slots": slots is not None}
    first, *others = decode_descriptions.append(
        cache, key.selected, value.selected, page_table, **flags
    )
    compressed, selected, sliding = zip(
        cache.sources("key"), cache.sources("value"), strict=True
    )
    raw = selected if cache.raw_key is None else ("raw_key", "raw_value")
    names = *selected, *sliding, *raw
    scales = [getattr(cache, f"{name}_scale") for name in (*names, compressed[1])]
    recent = cache.recent_key, cache.recent_value
    new = (
        key.selected,
        value.selected,
        key.sliding,
        value.sliding,
        key.compressed,
        value.compressed,
    )
    one = page_table, lengths, lengths if cu_seqlens_q is None else cu_seqlens_q
    arrays = [
        *(x.contiguous() for x in (*one, lengths if slots is None else slots)),
        tuple(x.contiguous() for x in new),
        *(tuple(getattr(cache, x) for x in some) for some in (names, compressed)),
        *(tuple(lengths if x is None else x for x in some) for some in (scales, recent)),
    ]
    for _ in range(paged.launches_of_means(key.selected.shape[0], rows, ragged, means)):
        ops.run_in_place(first, *arrays)
    for kernel in others:
        ops.run_in_place(kernel, *arrays)

"""Rows of a paged cache side by side, as attention over whole rows takes them.

On an NVIDIA GPU one launch copies an array: each entry is read once and written once. Elsewhere
torch copies whole pages. Entries that no query looks at are zeros, whatever stands in their pages.
"""

import torch
from torch import Tensor

from kernels_pallas.triton import decode_descriptions
from nsa_core import paged_layout
from nsa_core.paged_layout import Entries
from nsa_core.types import Branches
from nsa_torch import paged
from nsa_torch.paged import PagedCache

type Pair = tuple[Tensor, Tensor]


def side_by_side(
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    queries: int,
    at_hand: tuple[Branches, Branches] | None = None,
) -> Branches[Pair]:
    """Keys and values of each branch, `[B, S, Hkv, .]` or `[B, C, Hkv, .]`.

    Args:
      page_table, lengths: as of `paged_attention`.
      queries: of the longest row; its window is all that the sliding branch looks at.
      at_hand: keys and values `[B, S, Hkv, .]` of all of the rows' tokens: only the compressed ones
        are copied.
    """
    config = cache.config
    raw = paged_layout.raw_entries(config)
    compressed = paged_layout.compressed_entries(config)
    whole = page_table.shape[1] * config.select_block

    def copies(branch: str, entries: Entries, reach: int) -> Pair:
        key, value = (
            _copy(cache, f"{branch}_{kind}", page_table, lengths, entries, reach)
            for kind in ("key", "value")
        )
        return key, value

    if at_hand is not None:
        key, value = at_hand
        pair = copies("compressed", compressed, whole)
        return Branches(pair, (key.selected, value.selected), (key.sliding, value.sliding))
    selected = copies("selected", raw, whole)
    sliding = selected
    if cache.separate:
        sliding = copies("sliding", raw, queries + config.window)
    return Branches(copies("compressed", compressed, whole), selected, sliding)


def _copy(
    cache: PagedCache,
    name: str,
    page_table: Tensor,
    lengths: Tensor,
    entries: Entries,
    reach: int,
) -> Tensor:
    rows, width = page_table.shape
    count, pages = entries.count(width), getattr(cache, name)
    scale = getattr(cache, f"{name}_scale", None)
    if count > 0 and pages.is_contiguous() and paged.append_why_not(cache) is None:
        from nsa_torch.triton_ops import TRITON_OPS

        fp8 = scale is not None
        dtype = str(cache.dtype if fp8 else pages.dtype).removeprefix("torch.")
        pool, _, heads, columns = pages.shape
        sizes = rows, width, pool, heads, columns
        kernel = decode_descriptions.gather(*sizes, dtype, entries, reach, fp8)
        (out,) = TRITON_OPS.run(kernel, pages, scale if fp8 else lengths, page_table, lengths)
        return out
    found = cache.read(name, (page_table.clamp(0, cache.num_pages - 1),))
    found = found.flatten(1, 2)[:, entries.first :]
    token = torch.arange(found.shape[1], device=pages.device) * entries.stride
    end = lengths.clamp(max=width * entries.per_page * entries.stride)[:, None]
    seen = (token + entries.block <= end) & (token >= end - reach)
    return torch.where(seen[..., None, None], found, 0)

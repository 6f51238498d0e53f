"""Gathers rows of a paged cache into contiguous arrays for attention over whole rows.

On an NVIDIA GPU one launch copies keys and values of a branch: each entry is read once and written
once. On other devices torch copies whole pages. Entries that no query sees are zeros, regardless of
the contents of their pages.
"""

import torch
from torch import Tensor

from kernels_pallas.triton import decode_descriptions
from nsa_core import paged_append, paged_layout
from nsa_core.paged_layout import Entries
from nsa_core.types import Branches
from nsa_torch import paged
from nsa_torch.paged import PagedCache
from nsa_torch.torch_ops import TORCH_OPS

type Pair = tuple[Tensor, Tensor]


def side_by_side(
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    queries: int,
    at_hand: tuple[Branches, Branches] | None = None,
    margin: int | None = None,
    last_page: bool = False,
) -> Branches[Pair]:
    """Keys and values of each branch, `[B, S, Hkv, .]`, or `[B, C, Hkv, .]` of as many compressed
    tokens as the pages have room for.

    Args:
      page_table, lengths: as in `paged_attention`.
      queries: The queries of the longest row, which bound the tokens of the sliding branch.
      at_hand: keys and values `[B, S, Hkv, .]` of all of the rows' tokens: only the compressed ones
        are copied.
      margin: The number of tokens before those of the sliding branch that must be zeros. Earlier
        ones may be uninitialized. None means that all must be zeros.
      last_page: Whether to copy only the page of each row's last token for the selected branch.
    """
    config = cache.config
    whole = page_table.shape[1] * config.select_block
    raw = cache, page_table, lengths, paged_layout.raw_entries(config)
    at = cache, page_table, lengths, paged_layout.compressed_entries(config)
    compressed = _copy("compressed", *at, whole)
    if at_hand is not None:
        key, value = at_hand
        pairs = (key.selected, value.selected), (key.sliding, value.sliding)
        return Branches(compressed, *pairs)
    selected = sliding = _copy("selected", *raw, whole, None, last_page)
    if cache.separate or last_page:
        branch = "sliding" if cache.separate else "selected"
        sliding = _copy(branch, *raw, queries + config.window, margin)
    return Branches(compressed, selected, sliding)


def _copy(
    branch: str,
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    entries: Entries,
    reach: int,
    margin: int | None = None,
    last_page: bool = False,
) -> Pair:
    """Keys and values of a branch."""
    names = f"{branch}_key", f"{branch}_value"
    key, value = (getattr(cache, name) for name in names)
    in_order = key.is_contiguous() and value.is_contiguous()
    if in_order and paged.append_why_not(cache) is None:
        from nsa_torch.triton_ops import TRITON_OPS

        scales = [getattr(cache, f"{name}_scale", None) for name in names]
        fp8 = scales[0] is not None, scales[1] is not None
        dtype = str(cache.dtype if any(fp8) else key.dtype).removeprefix("torch.")
        which = entries, reach, margin, fp8, last_page
        kernel = decode_descriptions.gather(key, value, page_table, dtype, *which)
        given = (lengths if x is None else x for x in scales)
        found = TRITON_OPS.run(kernel, key, value, *given, page_table, lengths)
        return found[0], found[1]
    pages, width = page_table.clamp(0, cache.num_pages - 1), page_table.shape[1]
    token = torch.arange(entries.per_page * width, device=key.device) * entries.stride
    size = entries.per_page * entries.stride  # tokens of a page
    end = lengths.clamp(max=width * size)[:, None]
    if last_page:
        column = (end - 1).clamp(min=0) // size
        pages, token = pages.gather(1, column.long()), token[:size] + column * size
    seen = ((token + entries.block <= end) & (token >= end - reach))[..., None, None]

    def copied(name: str) -> Tensor:
        found = paged_append.read(TORCH_OPS, cache, name, (pages,)).flatten(1, 2)
        return torch.where(seen, found.roll(-entries.first, 1) if entries.first else found, 0)

    return copied(names[0]), copied(names[1])

"""The convolution of projected keys (`key_taps` of `LayerSpec`), for whole sequences and for tokens
that continue a cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_core import paged_layout
from nsa_torch.torch_ops import TORCH_OPS as OPS


class KeyConvolution(nn.Conv1d):
    """Computes `k + silu(c)` for projected keys `k`. Here `c` is the causal depthwise convolution
    of the keys.
    """

    def __init__(self, taps: int, columns: int, **factory: Any):
        super().__init__(columns, columns, taps, groups=columns, bias=False, **factory)

    def forward(self, key: Tensor, position: Tensor, before: Tensor | None = None) -> Tensor:
        """Convolve `key` [B, T, columns].

        Args:
          position: `[B, T]` or `[1, T]`, the position of each token in its sequence, from 0.
          before: `[B * C, taps - 1, columns]`, the projected keys before each of the `C` equal
            chunks of a row. `before=None` means that each row begins a new sequence.
        """
        (taps,), (rows, length, columns) = self.kernel_size, key.shape
        if before is None:
            before = key.new_zeros(rows, taps - 1, columns)
        chunks = key.reshape(before.shape[0], -1, columns)
        position = position.expand(rows, length).reshape(*chunks.shape[:2], 1)
        joined = torch.cat([before.to(key.dtype), chunks], dim=1)
        earlier = [
            torch.where(position >= back, joined[:, taps - 1 - back : -back], 0)
            for back in range(1, taps)
        ]
        return self.combined(chunks, earlier).view(key.shape)

    def combined(self, key: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Convolve `key` [.., columns]. `earlier` are the keys of 1, 2, .. tokens before, with
        zeros before the start of a sequence.
        """
        weight, wide = self.weight[:, 0].T, torch.promote_types(key.dtype, torch.float32)
        total = weight[-1].to(wide) * key
        for back, x in enumerate(earlier, 1):
            total = total + weight[-1 - back].to(wide) * x
        return (key + F.silu(total)).to(key.dtype)

    def in_pages(
        self,
        key: Tensor,
        pages: Tensor,
        page_size: int,
        page_table: Tensor,
        lengths: Tensor,
        cu_seqlens_q: Tensor | None,
    ) -> Tensor:
        """Convolve the projected keys `key` [N, columns] of new tokens, and store the newest
        projected keys in `pages`.

        Args:
          pages: `[P, taps - 1, columns]`. Each page of `page_size` tokens stores the projected
            keys of the newest tokens in the page. The key of position `p` has index `p % (taps -
            1)`.
          page_table, lengths, cu_seqlens_q: as in `paged.append`.
        """
        kept, counts = pages.shape[1], key.shape[0] // lengths.shape[0]
        if cu_seqlens_q is not None:
            counts = cu_seqlens_q.diff()
        row, position = paged_layout.tokens_of(OPS, lengths, cu_seqlens_q, key.shape[0])
        begin, last = (lengths - counts)[row], lengths[row] - 1

        def stored(at: Tensor) -> paged_layout.Places:
            found = paged_layout.places(page_table, row, at, page_size, pages.shape[0])
            return found._replace(offset=at % kept)

        def read() -> list[Tensor]:
            found = [stored(position - back) for back in range(1, kept + 1)]
            return [torch.where(x.there[:, None], pages[x.page, x.offset], 0) for x in found]

        before, at = read(), stored(position)
        newest = position + kept > last
        newest |= (position + kept) // page_size != position // page_size
        OPS.put(pages, at._replace(there=at.there & newest), key)
        # Tokens that continue a page replace the stored keys of that page. Tokens at the start
        # of a page read the keys of the previous page, which another row may fill in this call.
        continues = (begin % page_size != 0)[:, None]
        earlier = []
        for back, (old, new) in enumerate(zip(before, read(), strict=True), 1):
            own = (position - back >= begin)[:, None]
            earlier.append(
                torch.where(own, key.roll(back, 0), torch.where(continues, old, new))
            )
        return self.combined(key, earlier)


def newest_keys(before: Tensor, key: Tensor, count: Tensor | None) -> Tensor:
    """Return the newest projected keys of each row after new tokens, in the shape of `before`.
    The new tokens are the first `count` [B] of `key` [B, T, columns]. If `count` is None, all
    tokens of `key` are new.
    """
    kept, key = before.shape[1], key.to(before.dtype)
    if count is None:
        return torch.cat([before, key[:, -kept:]], dim=1)[:, -kept:].clone()
    at = count[:, None].long() + torch.arange(kept, device=key.device)
    return torch.cat([before, key], dim=1).gather(1, at[..., None].expand(-1, -1, key.shape[2]))

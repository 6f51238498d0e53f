"""Native Sparse Attention (arXiv 2502.11089 v2, Eqs. 5-12), dense, on torch tensors with autograd.

Written from the paper: nothing of the library is imported. In float64 it is the oracle; in a
narrower `dtype`, its own arithmetic in that dtype, it is the yardstick of the tolerance rule.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BRANCHES = "compressed", "selected", "sliding"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the tokens stand: `documents`, the lengths of sequences in a row of `keys` tokens, of
    which what is left over at the end is padding. The queries are the last `queries` tokens.
    """

    queries: int
    keys: int
    documents: tuple[int, ...]
    device: str | torch.device = "cpu"

    def tokens(self) -> tuple[Tensor, Tensor]:
        """The document of each token, -1 of padding, and its position there."""
        lengths = [*self.documents, self.keys - sum(self.documents)]
        document = [torch.full((n,), i) for i, n in enumerate(lengths)]
        document[-1].fill_(-1)
        position = [torch.arange(n) for n in lengths]
        return torch.cat(document).to(self.device), torch.cat(position).to(self.device)

    def of_queries(self) -> list[Tensor]:
        """`tokens` of the queries."""
        return [x[self.keys - self.queries :] for x in self.tokens()]

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, S]`: how far each key is before each query, and whether the query may see it; the
        positions of keys.
        """
        document, position = self.tokens()
        own, at = (x[:, None] for x in self.of_queries())
        return at - position, (own == document) & (own >= 0) & (position <= at), position

    def padding(self, last: int) -> Tensor:
        """Which of the last tokens are of no document."""
        return self.tokens()[0][self.keys - last :] < 0

    def windows(self, config) -> tuple[Tensor, Tensor, Tensor]:
        """The document of each window, and where it begins there and in the row."""
        size, stride, found, begin = config.compress_block, config.compress_stride, [], 0
        for document, length in enumerate(self.documents):
            starts = range(0, length - size + 1, stride)
            found += [(document, start, begin + start) for start in starts]
            begin += length
        return torch.tensor(found, device=self.device).long().reshape(-1, 3).unbind(1)


def compress(x: Tensor, config, rows: Rows, params=None) -> Tensor:
    """`phi` of windows (Eq. 7), `[B, C, Hkv, D]`, those of all documents one after the other.

    `params`: None, the mean; `(weight,)`, a weighted sum; or an MLP, of which a last array is what
    pairs of columns turn by from a token to the next.
    """
    _, start, first = rows.windows(config)
    tokens = first[:, None] + torch.arange(config.compress_block, device=rows.device)
    windows = x.to(torch.promote_types(x.dtype, torch.float32))[:, tokens]  # [B, C, l, Hkv, D]
    if params is None:
        return windows.mean(2).to(x.dtype)
    if len(params) == 1:
        return torch.einsum("bcmhd,md->bchd", windows, params[0]).to(x.dtype)
    position, w1, b1, w2, b2, *rates = params
    flat = (windows + position[:, None]).movedim(3, 2).flatten(3)
    out = F.gelu(flat @ w1 + b1, approximate="tanh") @ w2 + b2
    if rates:
        angle = (start + (config.compress_block - 1) / 2)[:, None, None] * rates[0]
        even, odd = out[..., ::2], out[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        out = torch.stack(turned, -1).flatten(-2)
    return out.to(x.dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    rounded: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor, Tensor]:
    """One softmax under `mask` `[B, Hkv or 1, T, S]`: output, log-sum-exp, probabilities.

    `rounded` is applied to the four operands of the two products.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[2] // key.shape[2]
    split = rounded(query).unflatten(2, (key.shape[2], group))
    mask, some = mask[:, :, None], mask.any(-1)[:, :, None, :, None]
    logits = torch.einsum("btkgd,bskd->bkgts", split, rounded(key)) * scale
    # Of a row that sees nothing every number is made of zeros, so that no gradient is NaN.
    logits = torch.where(mask, logits, -torch.inf).masked_fill(~some, 0)
    probability = logits.softmax(-1).masked_fill(~mask, 0)
    lse = logits.logsumexp(-1).masked_fill(~some[..., 0], -torch.inf)
    out = torch.einsum("bkgts,bskd->btkgd", rounded(probability), rounded(value))
    return out.flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2), probability


def compressed_mask(config, rows: Rows) -> Tensor:
    """`[1, 1, T, C]`: a query sees the windows that end at it or before."""
    document, start, _ = rows.windows(config)
    own, position = (x[:, None] for x in rows.of_queries())
    return ((own == document) & (start + config.compress_block <= position + 1))[None, None]


def scores(probability: Tensor, config, rows: Rows) -> Tensor:
    """Of all blocks (Eqs. 9 and 10) `[B, T, Hkv, N]`, of the heads' probabilities together."""
    _, start, _ = rows.windows(config)
    group = probability.sum(2)
    found = group.new_zeros(*group.shape[:-1], -(-rows.keys // config.select_block))
    # Stride by stride, so that equal scores are equal sums.
    for at in range(0, config.compress_block, config.compress_stride):
        found.index_add_(-1, (start + at) // config.select_block, group)
    return found.transpose(1, 2)


def select(scores: Tensor, config, rows: Rows) -> Tensor:
    """The selection (Eq. 11): forced blocks, then by score, of equal ones the lower block."""
    own, position = rows.of_queries()
    last = torch.where(own < 0, -1, position // config.select_block)[:, None, None]
    block = torch.arange(scores.shape[-1], device=rows.device)
    forced = (block < config.num_initial) | (block > last - config.num_local)
    ranked = scores.detach().masked_fill(forced, torch.inf)
    ranked = ranked.masked_fill(block > last, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    order = order[..., : config.num_selected]
    chosen = order.masked_fill(order > last, len(block)).sort(-1).values
    empty = config.num_selected - chosen.shape[-1]
    chosen = F.pad(chosen, (0, empty), value=len(block))
    return chosen.masked_fill(chosen == len(block), -1).to(torch.int32)


def selected_mask(block_indices: Tensor, config, rows: Rows) -> Tensor:
    """`[B, Hkv, T, S]`: tokens of the chosen blocks of the query's document, up to the query."""
    _, causal, position = rows.seen()
    block = position // config.select_block
    chosen = torch.stack([slot[..., None] == block for slot in block_indices.unbind(-1)])
    return chosen.any(0).transpose(1, 2) & causal


def sliding_mask(config, rows: Rows) -> Tensor:
    before, causal, _ = rows.seen()
    return (causal & (before < config.window))[None, None]


@dataclasses.dataclass
class Found:
    """What a call makes: outputs and log-sum-exps by branch, and the gated sum."""

    out: Tensor
    branches: dict[str, tuple[Tensor, Tensor]]
    scores: Tensor
    block_indices: Tensor


def attention(
    query: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    gates: Tensor,
    *,
    config,
    documents: tuple[int, ...] | None = None,
    compressed: tuple[Tensor, Tensor] | None = None,
    block_indices: Tensor | None = None,
    scale: float | None = None,
    rounded: Callable[[Tensor], Tensor] = lambda x: x,
) -> Found:
    """All of Eq. 5 in the dtype of its tensors, `[B, T, H, D]` and so on.

    `keys`, `values`: of the branches in their order. `rounded`: of the operands of the selected
    and the sliding branch, as in `attend`.
    """
    tokens = keys[0].shape[1]
    documents = (tokens,) if documents is None else documents
    rows = Rows(query.shape[1], tokens, tuple(documents), query.device)
    if compressed is None:
        compressed = compress(keys[0], config, rows), compress(values[0], config, rows)
    windows = len(rows.windows(config)[0])  # slots behind them are of no window
    pair = [x[:, :windows] for x in compressed]
    *first, probability = attend(query, *pair, compressed_mask(config, rows), scale)
    block_scores = scores(probability.detach(), config, rows)
    if block_indices is None:
        block_indices = select(block_scores, config, rows)
    masks = selected_mask(block_indices, config, rows), sliding_mask(config, rows)
    others = [
        attend(query, key, value, mask, scale, rounded)[:2]
        for key, value, mask in zip(keys[1:], values[1:], masks, strict=True)
    ]
    branches = dict(zip(BRANCHES, [tuple(first), *others], strict=True))
    wide = torch.promote_types(query.dtype, torch.float32)
    total = sum(
        out.to(wide) * gate[..., None].to(wide)
        for (out, _), gate in zip(branches.values(), gates.unbind(-1), strict=True)
    )
    return Found(total.to(query.dtype), branches, block_scores, block_indices)

"""A loss that trains the selection of blocks. The loss of the model does not train the selection,
since the choice of blocks has no gradient.

The block scores of the compressed branch should predict to which blocks the selected branch would
attend without a limit on their number. For each query and group of query heads:

    p[j] = sum of softmax(q . k_sel / sqrt(D)) over the keys of block j and the heads of the group
    s[j] = the score by which the selection ranks block j
    KL   = sum of p log((p / sum p) / (s / sum s))      over the blocks that are not forced

The loss is the sum of KL over all queries and groups, divided by the sum of p. The weight of a
query in the loss is its attention to the blocks that are not forced. Neither `p` nor the queries
nor the input of the layer have a gradient, so that the loss trains only the weights that compute
compressed keys.
"""

import torch
from torch import Tensor

from nsa_torch import functional
from nsa_torch.module import NSAAttention
from nsa_torch.select import map_to_blocks

EVERY = 7  # one query in seven is used, since 7 does not divide the size of a block
SMALL = 1e-9


def loss(attention: NSAAttention, x: Tensor) -> Tensor:
    """Return the loss, a float32 scalar, for the input `x` [B, T, dim] of a layer. Each row must
    be one sequence.
    """
    spec, config = attention.spec, attention.spec.config
    length = x.shape[1]
    where = torch.arange(length, device=x.device)
    query, key, _, _ = attention.project(x.detach(), where.expand(x.shape[:2]))
    at = where[EVERY // 2 :: EVERY]
    query = query[:, EVERY // 2 :: EVERY].unflatten(
        2, (spec.n_kv_groups, -1)
    )  # [B, t, g, h, D]
    query = query.detach() * spec.d_k**-0.5
    compressed = functional.compress(
        key.compressed, attention.compress_params()[0], config=config
    )
    blocks = config.num_blocks(length)

    def attend(query: Tensor, key: Tensor, last: Tensor) -> Tensor:
        """Return the probabilities [B, g, h, t, keys]. Key `k` is visible to queries from the
        position `last[k]` on, where `last` is `[keys]`.
        """
        logits = torch.einsum("btghd,bsgd->bghts", query, key).float()
        return logits.masked_fill(last > at[:, None], -1e30).softmax(-1)

    with torch.no_grad():
        p = attend(query, key.selected, where)
        rest = blocks * config.select_block - length
        p = torch.nn.functional.pad(p, (0, rest)).unflatten(-1, (blocks, -1))
        p = p.sum((2, -1))  # [B, g, t, blocks]
    ends = torch.arange(compressed.shape[1], device=x.device) * config.compress_stride
    p_cmp = attend(query, compressed, ends + config.compress_block - 1)
    s = map_to_blocks(p_cmp.sum(2), blocks, config)
    block, own = torch.arange(blocks, device=x.device), at[:, None] // config.select_block
    free = (block >= config.num_initial) & (block <= own - config.num_local)
    p, s = p * free, s * free + SMALL * free
    mass = p.sum(-1, keepdim=True)
    wanted = (p / mass.clamp(min=SMALL)).clamp(min=SMALL).log()
    given = (s / s.sum(-1, keepdim=True).clamp(min=SMALL)).clamp(min=SMALL).log()
    return (p * (wanted - given)).sum() / mass.sum().clamp(min=SMALL)

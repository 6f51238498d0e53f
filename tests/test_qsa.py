"""QSA, the sparse attention of `qwen4_exp`, by `index_blocks` and `block_attention` with a tail:
transformers' own layer, which loops over queries, gives the same outputs.
"""

import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

import nsa_torch
from tests.model_sizes import MODELS

B, T, SIZES = 2, 61, MODELS["qsa"]
HEADS, KV_HEADS = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
INDEX_HEADS, RATIO, BUDGET = (
    SIZES[f"indexer_{x}"] for x in ("n_heads", "compress_ratio", "budget")
)


def layer():
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(**SIZES)
    config._attn_implementation = "eager"
    module = qwen4.Qwen4ExpTextAttention(config, 0)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return module, qwen4.Qwen4ExpTextRotaryEmbedding(config)


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def rotated(x, cos, sin):
    """`[B, T, heads, D]`: the first channels, in halves."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    one, two = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


CHOICE = dict(entry=RATIO, pool=1, num_selected=BUDGET // RATIO, num_local=0)
CHOICE |= dict(activation="relu", reduce="sum")


def on_blocks(weights, x, cos, sin):
    """The layer's output, and the scores of complete blocks `[B, T, N]`."""
    heads = lambda name, n: (x @ weights[f"{name}.weight"].T).unflatten(-1, (n, -1))
    of = lambda name, y, *at: rotated(normed(y, weights[f"{name}.weight"]), *(at or (cos, sin)))
    query, gate = heads("q_proj", HEADS).chunk(2, -1)
    query, key = of("q_norm", query), of("k_norm", heads("k_proj", KV_HEADS))
    both = heads("indexer.index_qk_proj", INDEX_HEADS + 1)
    index_query = of("indexer.q_layernorm", both[:, :, :INDEX_HEADS])
    blocks = T // RATIO
    pooled = both[:, : blocks * RATIO, INDEX_HEADS:].unflatten(1, (blocks, RATIO)).mean(2)
    first = torch.arange(blocks) * RATIO
    index_key = of("indexer.k_layernorm", pooled, cos[first], sin[first]).squeeze(2)
    lists = nsa_torch.index_blocks(index_query, index_key, **CHOICE)
    value, options = heads("v_proj", KV_HEADS), {"block_size": RATIO, "include": "tail"}
    out = nsa_torch.block_attention(query, key, value, lists, **options)
    gated = out.flatten(2) * torch.sigmoid(gate.flatten(2))
    scores = torch.einsum("bthd,bsd->bths", index_query, index_key).relu().sum(2)
    return gated @ weights["o_proj.weight"].T, scores


@torch.no_grad()
def test_a_layer_is_transformers():
    """But for queries whose last block and the next one have the same score, zero as a rule."""
    module, embedding = layer()
    x, position = torch.randn(B, T, SIZES["hidden_size"]), torch.arange(T)
    hidden = torch.finfo(torch.float32).min
    causal = torch.zeros(T, T).masked_fill(position > position[:, None], hidden)
    cos, sin = embedding(x, position[None, None].expand(3, B, -1))
    want, _ = module(x, (cos, sin), causal.expand(B, 1, T, T))
    got, scores = on_blocks(module.state_dict(), x, cos[0], sin[0])
    n, complete = (
        BUDGET // RATIO,
        torch.arange(1, T // RATIO + 1) * RATIO - 1 <= position[:, None],
    )
    best = scores.masked_fill(~complete, -1).sort(-1, descending=True).values
    tied = (best[..., n - 1] == best[..., n]) & (best[..., n] >= 0)
    assert 0 < tied.sum() < B * T / 8
    torch.testing.assert_close(got[~tied], want[~tied], rtol=0, atol=2e-5)

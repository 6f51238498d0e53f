"""Small models of transformers that serve: their sizes, and what one computes alone."""

import torch
from transformers import GenerationConfig

SERVED = dict(
    vocab_size=97,
    num_attention_heads=4,
    num_key_value_heads=2,
    compress_block=8,
    compress_stride=4,
    select_block=16,
    num_selected=3,
    num_local=1,
    window=9,
    initializer_range=0.2,
)


def alone(lm, prompt, tokens):
    """What `generate` adds to a prompt."""
    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False)
    out = lm.generate(torch.tensor([prompt], device=lm.device), generation_config=greedy)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def log_probabilities(lm, prompt, answer):
    """Of `answer`, each token given those before it, in one pass without a cache."""
    ids = torch.tensor([[*prompt, *answer]], device=lm.device)
    logits = lm(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    every = logits.float().log_softmax(1)
    return every.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


# Of caches: two layers whose pages have one stride.
SMALLEST = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    compress_block=8,
    compress_stride=4,
    select_block=8,
    num_selected=3,
    num_local=1,
    window=7,
)

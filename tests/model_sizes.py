"""Small models of transformers that serve: their sizes, and what one computes alone."""

import torch
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.tables import table

# The name that transformers gives a cache in outputs; it has changed in 5.24.
(CACHE,) = {"past_key_values", "cache"} & CausalLMOutputWithPast.__dataclass_fields__.keys()
MODELS = table("models")
SERVED, SMALLEST = MODELS["served"], MODELS["smallest"]


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

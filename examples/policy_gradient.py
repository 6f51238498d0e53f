"""Trains a model by policy gradient on answers of `generate_batch`, and prints the sampler's gap.

    python examples/policy_gradient.py                      # a minute on a CPU
    python examples/policy_gradient.py --old trainer        # another origin of the ratio, see below
    python examples/policy_gradient.py --dtype bfloat16 --max_gap 1       # a sampler in 16 bits
    python examples/policy_gradient.py --layers 7 --hidden 384 --heads 6 --kv_heads 1 \
        --select_block 64 --prompt_tokens 1024 --answer_tokens 16 --prompts 16 --lr 3e-4 \
        --steps 200 --dtype bfloat16 --max_gap 1            # 12 million weights, for a GPU
    python examples/policy_gradient.py --dtype bfloat16 --invariant --max_gap 0   # on a Hopper GPU

A prompt repeats two tokens in random order and ends with token 0. The reward of an answer is the
share of its tokens that are one of the prompt's two tokens. The model begins with random weights,
and thus with a reward of about 2 / 16. The baseline is the mean reward of all --answers answers to
a prompt.
--seed determines weights, prompts and answers.

The sampler is a copy of the model in --dtype. `generate_batch` returns the log probability of each
token that it samples (`return_logprobs`). The trainer has float32 weights, rounds them to --dtype,
and computes the log probabilities of the same tokens without a cache. With --invariant, attention
and products have one order of sums in the sampler and in the trainer, so that the gap is 0. The
script prints for each step:

    gap       absolute difference of the two log probabilities in nats, before the first update
    outside   share of tokens with a ratio p(new) / p(old) outside 0.8 .. 1.2, in the first and in
              the last of --updates updates. The loss clips such ratios

    --old sampler   p(old) is the sampler's probability. The ratio includes the gap
    --old trainer   p(old) is the trainer's probability before the first update, so that the first
                    ratio is 1. The weight p(old) / p(sampler), at most 2, corrects the gap

docs/determinism.md states when to use each value of --old. The exit status is 1 if a gap exceeds
the value of --max_gap, or if the mean reward of the last quarter of the steps is less than 0.1
above the reward before the first update. The script needs the extra `hf` and transformers 5.19.
"""

import argparse
import copy
import sys
import warnings

import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig, continuous_batching_config

VOCABULARY, CLIP, LARGEST_WEIGHT, LEAST_RISE = 16, 0.2, 2.0, 0.1
FLAGS = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "select_block": 16, "prompts": 8}
FLAGS |= {"answers": 8, "prompt_tokens": 64, "answer_tokens": 4, "steps": 40, "updates": 2}
FLAGS |= {"lr": 2e-3, "seed": 0, "max_gap": 1e-4}
LEAST = {
    "answers": 2,
    "steps": 2,
    "prompt_tokens": 2,
    "select_block": 4,
    "lr": 0,
    "seed": 0,
    "max_gap": 0,
}


def sample(sampler, prompts: list[list[int]], flags: argparse.Namespace) -> list[torch.Tensor]:
    """Return the tokens of each prompt and its answer, and the answers' log probabilities."""
    requests = flags.prompts * flags.answers
    blocks = 2 + (flags.prompt_tokens + flags.answer_tokens) // flags.select_block
    batching = continuous_batching_config(
        sampler.config, num_blocks=blocks * requests, return_logprobs=True
    )
    options = GenerationConfig(
        max_new_tokens=flags.answer_tokens, num_return_sequences=flags.answers,
        do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    found = sampler.generate_batch(prompts, options, batching).values()
    if len(found) < requests or any(x.error for x in found):
        sys.exit(f"requests failed: {[x.error for x in found]}")
    columns = [x.prompt_ids + x.generated_tokens for x in found], [x.logprobs for x in found]
    return [torch.tensor(x, device=sampler.device) for x in columns]


def padded_products(rows: int = 64) -> torch.library.Library:
    """As long as the result exists, compute products of CUDA tensors with at least `rows` rows.
    Libraries choose the order of sums by the number of rows, and a decode step has few."""

    def padded(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = F.pad(left, (0, 0, 0, max(0, rows - len(left))))
        return left, left.new_empty(len(left), right.shape[1])

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        more, out = padded(left, right)
        return torch.mm(more, right, out=out)[: len(left)]

    def addmm(
        bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **how
    ) -> torch.Tensor:
        more, out = padded(left, right)
        return torch.addmm(bias, more, right, **how, out=out)[: len(left)]

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        replaced = r"(?s).*Overriding a previously registered kernel"
        warnings.filterwarnings("ignore", replaced, UserWarning)
        for product in (mm, addmm):
            library.impl(product.__name__, product, "CUDA")
    return library


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--old", choices=["sampler", "trainer"], default="sampler")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--invariant", action="store_true")
    flags = parser.parse_args(argv)
    for name in FLAGS:
        if not getattr(flags, name) >= (least := LEAST.get(name, 1)):
            parser.error(f"--{name} must be at least {least}, got {getattr(flags, name)}")
    torch.manual_seed(flags.seed)  # of weights, prompts and answers
    device, rewards = "cuda" if torch.cuda.is_available() else "cpu", []
    try:
        config = NSAModelConfig(
            vocab_size=VOCABULARY, hidden_size=flags.hidden, intermediate_size=3 * flags.hidden,
            num_hidden_layers=flags.layers, num_attention_heads=flags.heads,
            num_key_value_heads=flags.kv_heads, select_block=flags.select_block,
            compress_block=flags.select_block // 2, compress_stride=flags.select_block // 4,
            num_selected=3, window=flags.select_block,
        )  # fmt: skip
        with torch.device(device):
            model = NSAForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.0)
        dtype = getattr(torch, flags.dtype)
        sampler = copy.deepcopy(model).to(dtype).eval()
        if flags.invariant:
            sampler.set_nsa_implementation("invariant")
            token = torch.zeros(1, 1, dtype=torch.long, device=device)
            sampler(token, use_cache=False)  # raises an error if attention cannot run
            _products = padded_products()
        continuous_batching_config(config)  # supports transformers 5.19 and newer
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    for step in range(flags.steps):
        pairs = 1 + torch.rand(flags.prompts, VOCABULARY - 1).topk(2).indices
        prompts = pairs.gather(1, torch.randint(0, 2, (flags.prompts, flags.prompt_tokens)))
        prompts[:, -1] = 0
        sampler.load_state_dict(model.state_dict())
        texts, sampled = sample(sampler, prompts.tolist(), flags)
        answers = texts[:, flags.prompt_tokens :]
        groups = answers.unflatten(0, (flags.prompts, flags.answers))[..., None]
        reward = (groups == pairs.to(device)[:, None, None]).any(3).float().mean(2)
        advantage = (reward - reward.mean(1, keepdim=True)).view(-1, 1)
        old, gaps, outside = sampled, [], []
        for update in range(flags.updates):
            rounded = {name: x.to(dtype) for name, x in model.named_parameters()}
            given = rounded, texts, {"use_cache": False}
            logits = torch.func.functional_call(sampler, *given).logits
            shares = logits[:, flags.prompt_tokens - 1 : -1].float().softmax(-1)
            new = shares.gather(2, answers[..., None])[..., 0].log()
            if update == 0 and flags.old == "trainer":
                old = new.detach()
            ratio, weight = (new - old).exp(), (old - sampled).exp().clamp(max=LARGEST_WEIGHT)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gaps.append((new - sampled).detach().abs())
            outside.append((ratio != clipped).float().mean().item())
            loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rewards.append(reward.mean().item())
        mean, largest = gaps[0].mean(), gaps[0].max()
        print(
            f"step {step} reward {rewards[-1]:.3f} gap mean {mean:.1e} max {largest:.1e} "
            f"outside {outside[0]:.4f} {outside[-1]:.4f}"
        )
        if not largest <= flags.max_gap:
            sys.exit(f"the gap must be at most --max_gap {flags.max_gap}, got {largest:.1e}")
    ends = max(1, flags.steps // 4)
    rise = sum(rewards[-ends:]) / ends - rewards[0]
    if not rise >= LEAST_RISE:
        sys.exit(f"the reward must rise by {LEAST_RISE}, got {rise:.3f}")
    print(f"the mean reward rose by {rise:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a cache in fp8 costs a language model: held-out loss, and a passage that it has read before.

    python -m bench.lm.cached --steps=600
    python -m bench.lm.cached --model=tiny --length=512 --steps=20    # a minute on a CPU

A model learns bytes of the standard library, and then reads held-out text as where it serves: each
token is appended to a paged cache before it is attended to. The same text and weights, by what the
cache keeps; in nats a token. `copied`: how much better a passage is predicted that stands further
up (`recall.py`), which a cache that loses the selection or the values would not show.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from absl import flags
from torch import Tensor

from nsa_torch import PagedCache, paged_attention
from nsa_torch.module import NSAAttention

from ..harness import cli, markdown, records
from . import data, recall, spec
from .torch_learner import Learner
from .torch_lm import LM, Block, initialize

STEP = 8  # tokens of a row that are attended to together: as many as kernels of decode take
FLAGS = flags.FlagValues()
_own = {"flag_values": FLAGS}
MODEL = flags.DEFINE_enum("model", "13m", list(spec.MODELS), "Sizes of the model.", **_own)
STEPS = flags.DEFINE_integer("steps", 600, "Of its training.", lower_bound=1, **_own)
BATCH = flags.DEFINE_integer("batch", 4, "Rows a step.", lower_bound=2, **_own)
LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of a row.", lower_bound=256, **_own)
HELD_OUT = flags.DEFINE_integer("held_out", 4, "Batches that judge.", lower_bound=1, **_own)
SEED = flags.DEFINE_integer("seed", 0, "Of weights and rows.", **_own)
OUT = cli.define_lines(FLAGS)
COMMIT = cli.define_commit(FLAGS)


@torch.no_grad()
def losses(model: LM, tokens: Tensor, cache_dtype: torch.dtype, step: int = STEP) -> Tensor:
    """The losses `[B, T]` of tokens `[B, T + 1]`, all but the first, in nats.

    Args:
      model: of attention layers that are all NSA and compress by means.
      cache_dtype: the model's, or `torch.float8_e4m3fn`.
      step: tokens at a time.

    Raises:
      ValueError: the model has other layers.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    attentions = [x.attention for x in blocks if isinstance(x.attention, NSAAttention)]
    if len(attentions) < len(blocks) or any(x.spec.phi != "avg" for x in attentions):
        raise ValueError("model must have NSA layers alone, which compress by means")
    spec, dtype = model.spec.layer, model.head.weight.dtype
    pages = -(-length // spec.config.select_block)
    table = torch.arange(rows * pages, device=tokens.device).int().view(rows, pages)
    sizes = rows * pages, spec.n_kv_groups, spec.d_k, spec.d_v
    options: dict[str, Any] = {
        "config": spec.config,
        "device": tokens.device,
        "separate": spec.separate,
    }
    if cache_dtype.itemsize == 1:
        options |= {"compressed_dtype": dtype, "max_rows": rows}
    caches = [PagedCache(*sizes, dtype=cache_dtype, **options) for _ in attentions]
    found = []
    for first in range(0, length, step):
        now = tokens[:, first : min(first + step, length)].long()
        position = torch.arange(first, first + now.shape[1], device=now.device)
        lengths = torch.full((rows,), first + now.shape[1], device=now.device).int()
        x = F.embedding(now, model.embedding).to(dtype)
        for block, attention, cache in zip(blocks, attentions, caches, strict=True):
            each = block.norm_attention(x)
            query, key, value, gates = attention.project(each, position.expand(now.shape))
            out = paged_attention(
                query.flatten(0, 1),
                gates.flatten(0, 1),
                cache,
                table,
                lengths,
                key=type(key)(*(y.flatten(0, 1) for y in key)),
                value=type(value)(*(y.flatten(0, 1) for y in value)),
            )
            x = x + attention.out(out.view(*now.shape, -1))
            x = x + block.mlp(block.norm_mlp(x))
        logits = model.head(model.norm(x)).float()
        target = tokens[:, first + 1 : first + 1 + now.shape[1]].long()
        found.append(F.cross_entropy(logits.transpose(1, 2), target, reduction="none"))
    return torch.cat(found, 1)


def trained(model: spec.ModelSpec, batches: data.Batches, dtype: str) -> LM:
    """The model after `--steps` steps on `batches`."""
    training = spec.Training(
        *(STEPS.value, BATCH.value, LENGTH.value),
        lr=1.5e-3,
        warmup=max(1, STEPS.value // 10),
        seed=SEED.value,
    )
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.safetensors"
        initialize(start, model, SEED.value)
        learner = Learner(spec.Task("cached", model, training, dtype), start, None)
    for step in range(STEPS.value):
        loss, _ = learner.step(batches.train(step), step)
        if step % 100 == 0 or step == STEPS.value - 1:
            print(f"step {step}: {loss:.4f}", flush=True)
    assert isinstance(learner.model, LM)
    return learner.model


def main(argv: Sequence[str]) -> int:
    gpu = torch.cuda.is_available()
    dtype, device = ("bfloat16", "cuda") if gpu else ("float32", "cpu")
    batches = data.load(data.TEXT, BATCH.value, LENGTH.value, SEED.value)
    sizes = spec.model(MODEL.value, "nsa", gate="head")
    model = trained(sizes, batches, dtype)
    held_out = batches.evaluation(HELD_OUT.value)
    about: dict[str, Any] = {"model": MODEL.value, "steps": STEPS.value}
    about |= {"length": LENGTH.value, "seed": SEED.value, "input_sha256": batches.sha256}
    about |= {"device": torch.cuda.get_device_name() if gpu else "cpu"}
    print("| cache | loss | above | copied |\n| --- | --- | --- | --- |")
    tokens = [batch.tokens for batch in held_out]
    for i, batch in enumerate(held_out):
        starts = recall.passages(batch, sizes.layer.w, (SEED.value, 2, i))
        if starts is not None:
            rows = recall.copies(batch, starts)
            tokens += [rows.read.tokens, rows.unread.tokens]
    together = torch.from_numpy(np.concatenate(tokens)).to(device)
    first = None
    for kind in (getattr(torch, dtype), torch.float8_e4m3fn):
        each = losses(model, together, kind).double().view(len(tokens), BATCH.value, -1)
        loss, again = each[: len(held_out)].mean().item(), each[len(held_out) :]
        first = loss if first is None else first
        ends = again[..., -recall.PASSAGE :].mean((1, 2)).tolist()
        copied = float(np.mean(ends[1::2]) - np.mean(ends[::2])) if ends else None
        name = str(kind).removeprefix("torch.")
        line = {"cache": name, "loss": loss, "above": loss - first, "copied": copied}
        numbers = (markdown.number(x, ".4f") for x in (loss, loss - first, copied))
        print(markdown.line([name, *numbers]), flush=True)
        if OUT.value is not None:
            made = records.record("cached", COMMIT.value, **about, **line)
            records.append(OUT.value, [made])
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)

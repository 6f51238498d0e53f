"""Measures how much quality a trained language model loses when it reads keys and values from a
cache, as a sampler does.

    python -m bench.lm.cached --steps=600
    python -m bench.lm.cached --model=52m --length=8192 --batch=2 --attention=dense
    python -m bench.lm.cached --model=tiny --length=512 --steps=20    # a minute on a CPU

A model learns bytes of the standard library. The model then reads held-out text in two ways with
the same weights. In the first way, one call per layer computes all tokens, as in training. In the
second way, the model reads a cache, to which each token is appended before the model attends to the
token. The table has one row per combination of the dtype of the cache and the number of tokens per
step. Values are in nats per token, except for `other_blocks`:

| column | meaning |
|---|---|
| loss | mean of `-log p` of the text's tokens |
| above | the loss minus the loss of the first row |
| copied | how much an earlier occurrence of a passage lowers the loss of the passage (`recall`) |
| gap, gap_p999 | mean and 99.9th percentile of `|log p - log p of training|` |
| kl | mean of `KL(training, cache)` over all tokens of the vocabulary |
| other_blocks | share of layers, tokens and key/value heads whose blocks differ from training |

Dense attention trains on FA-2, or on a CPU with the backend `math` of torch's SDPA. Dense
attention reads a cache with the default backend of SDPA.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import nsa_torch
from nsa_core import paged_dispatch
from nsa_torch import Branches, NSAAttention, PagedCache, paged_attend, paged_attention

from .. import run, tables
from ..harness import cli
from ..harness.records import Values
from . import data, recall, spec, variants
from .torch_learner import Learner
from .torch_lm import LM, Block, DenseAttention, initialize

STEP, CHUNK = 8, 512  # tokens per step: the maximum of the decode kernels, and a longer chunk
FLAGS = cli.define(
    model=("13m", "Model, by the name of its sizes.", list(spec.MODELS)),
    steps=(600, "Number of training steps."),
    batch=(4, "Number of rows per training step.", 2),
    length=(2048, "Number of tokens per row.", 256),
    held_out=(4, "Number of batches of held-out text."),
    seed=(0, "Seed of the weights and of the rows.", None),
    attention=("nsa", "Kind of attention of the model.", ["nsa", "dense"]),
    kv=(
        "separate",
        "Whether the branches share their keys and values.",
        ["separate", "shared"],
    ),
)
cli.define_lines(FLAGS)


class Whole:
    """Attention as in training. A call returns `(out, blocks)` for all tokens. Dense attention
    has no blocks.
    """

    def __init__(self, attention: NSAAttention | DenseAttention):
        self.attention = attention

    def __call__(self, query, key, value, gates) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.attention, DenseAttention):
            return self.attention.attend(query, key, value), None
        config = self.attention.config
        out = nsa_torch.attention(query, key, value, gates, config=config)
        compressed = nsa_torch.compress(key.compressed, config=config)
        return out, nsa_torch.select_blocks(query, compressed, config=config)


class Dense:
    """Dense attention of new tokens to all tokens up to their own position, with SDPA and a
    cache.
    """

    def __init__(self):
        self.key, self.value = [], []

    def __call__(self, query, key, value, gates) -> tuple[Tensor, None]:
        self.key.append(key)
        self.value.append(value)
        key, value = (torch.cat(x, 1).transpose(1, 2) for x in (self.key, self.value))
        new, length, mask = query.shape[1], key.shape[2], None
        if new > 1:
            mask = torch.ones(new, length, device=key.device).tril(length - new).bool()
        how = {"attn_mask": mask, "enable_gqa": True}
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, **how)
        return out.transpose(1, 2), None


class Pages:
    """NSA from a paged cache of `length` tokens per row. The cache has the dtype `cache_dtype`.

    Raises:
      ValueError: the layer does not compress by means.
    """

    def __init__(self, layer: NSAAttention, rows: int, length: int, cache_dtype: torch.dtype):
        spec = layer.spec
        if spec.phi != "avg":
            raise ValueError(f"phi must be 'avg' (compression by means), got {spec.phi!r}")
        weight = layer.out.weight
        pages = -(-length // spec.config.select_block)
        self.table = torch.arange(rows * pages, device=weight.device).int().view(rows, pages)
        options: Values = {"separate": spec.separate, "device": weight.device}
        if cache_dtype.itemsize == 1:
            options |= {"compressed_dtype": weight.dtype, "max_rows": rows}
        sizes = rows * pages, spec.n_kv_groups, spec.d_k, spec.d_v
        self.cache = PagedCache(*sizes, config=spec.config, dtype=cache_dtype, **options)
        self.keys: list[Tensor] = []
        self.length = 0

    def __call__(self, query, key, value, gates) -> tuple[Tensor, Tensor]:
        config, (rows, new) = self.cache.config, query.shape[:2]
        self.keys.append(key.compressed)
        self.length += new
        lengths = torch.full((rows,), self.length, device=query.device).int()
        flat = [Branches(*(y.flatten(0, 1) for y in x)) for x in (key, value)]
        flat = flat if self.cache.separate else [x.selected for x in flat]
        given = query.flatten(0, 1), gates.flatten(0, 1), self.cache, self.table, lengths
        out = paged_attention(*given, key=flat[0], value=flat[1]).view(*query.shape[:3], -1)
        if query.is_cuda and new <= STEP:  # the kernels that read pages select the blocks
            inputs = paged_dispatch.Inputs(*given, None, None)
            chosen = paged_attend.with_indices("mosaic", inputs)[1]
            return out, chosen.view(rows, new, *chosen.shape[1:])
        compressed = nsa_torch.compress(torch.cat(self.keys, 1), config=config)
        how = {"config": config, "kv_len": self.length}
        return out, nsa_torch.select_blocks(query, compressed, **how)


@torch.no_grad()
def read(
    model: LM, tokens: Tensor, step: int | None = None, cache_dtype: torch.dtype | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the log probabilities `[B, T, vocabulary]` after each of the tokens `[B, T]`, and
    the blocks `[B, T, Hkv, n]` that each NSA layer selected.

    Args:
      model: A model whose layers are all NSA or all dense.
      tokens: Integers `[B, T]`.
      step: Tokens per step from a cache. `step=None` means all tokens, without a cache.
      cache_dtype: The dtype of NSA's cache: the dtype of the model, or `torch.float8_e4m3fn`.
    """
    rows, length = tokens.shape
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    if step is None:
        attends = [Whole(block.attention) for block in blocks]
    elif model.spec.attention == "dense":
        attends = [Dense() for _ in blocks]
    else:
        layers = [x.attention for x in blocks if isinstance(x.attention, NSAAttention)]
        assert cache_dtype is not None and len(layers) == len(blocks)
        attends = [Pages(layer, rows, length, cache_dtype) for layer in layers]
    found, chosen, step = [], [[] for _ in blocks], step or length
    places = torch.arange(length, device=tokens.device).split(step)
    for now, position in zip(tokens.long().split(step, 1), places, strict=True):
        x = F.embedding(now, model.embedding).to(model.head.weight.dtype)
        for block, attend, each in zip(blocks, attends, chosen, strict=True):
            inputs = block.attention.project(
                block.norm_attention(x), position.expand(now.shape)
            )
            out, selected = attend(*inputs)
            each += [] if selected is None else [selected]
            x = x + block.attention.out(out.flatten(2))
            x = x + block.mlp(block.norm_mlp(x))
        found.append(model.head(model.norm(x)).float().log_softmax(-1))
    return torch.cat(found, 1), [torch.cat(each, 1) for each in chosen if each]


def trained(model: spec.ModelSpec, batches: data.Batches, dtype: str) -> LM:
    """Return the model after `--steps` steps on `batches`."""
    training = spec.Training(
        *(FLAGS.steps, FLAGS.batch, FLAGS.length),
        lr=1.5e-3,
        warmup=max(1, FLAGS.steps // 10),
        seed=FLAGS.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.safetensors"
        initialize(start, model, FLAGS.seed)
        backend = variants.dense("torch", "auto", dtype).implementation
        implementation = backend if model.attention == "dense" else None
        learner = Learner(spec.Task("cached", model, training, dtype), start, implementation)
    for step in range(FLAGS.steps):
        loss, _ = learner.step(batches.train(step), step)
        if step % 100 == 0 or step == FLAGS.steps - 1:
            print(f"step {step}: {loss:.4f}", flush=True)
    assert isinstance(learner.model, LM)
    return learner.model


def compared(
    trained: tuple[Tensor, list[Tensor]], found: tuple[Tensor, list[Tensor]], target: Tensor
) -> Values:
    """Return the columns that compare a row with `trained`, for the tokens `target` `[B, T]`."""
    first, last = (x.gather(2, target[..., None])[..., 0] for x, _ in (trained, found))
    gap = (first - last).abs().flatten()
    kl = (trained[0].exp() * (trained[0] - found[0])).sum(-1).mean()
    pairs = zip(trained[1], found[1], strict=True)
    others = [(a != b).any(-1).float().mean() for a, b in pairs]
    return {
        "gap": gap.mean().item(),
        "gap_p999": gap.sort().values[int(0.999 * len(gap))].item(),
        "kl": kl.item(),
        "other_blocks": torch.stack(others).mean().item() if others else None,
    }


def main(argv: Sequence[str]) -> int:
    gpu = torch.cuda.is_available()
    dtype, device = ("bfloat16", "cuda") if gpu else ("float32", "cpu")
    batches = data.load(data.TEXT, FLAGS.batch, FLAGS.length, FLAGS.seed)
    sizes = spec.model(FLAGS.model, FLAGS.attention, gate="head")
    own: Values = {"kv": FLAGS.kv}
    sizes = dataclasses.replace(sizes, layer=dataclasses.replace(sizes.layer, **own))
    model = trained(sizes, batches, dtype)
    held_out = batches.evaluation(FLAGS.held_out)
    names = "model", "attention", "kv", "steps", "length", "seed"
    about: Values = {name: FLAGS[name].value for name in names}
    about |= {"input_sha256": batches.sha256}
    about |= {"device": torch.cuda.get_device_name() if gpu else "cpu"}
    print(tables.LINES["cached"]["head"])
    tokens = [batch.tokens for batch in held_out]
    for i, batch in enumerate(held_out):
        starts = recall.passages(batch, sizes.layer.w, (FLAGS.seed, 2, i))
        if starts is not None:
            rows = recall.copies(batch, starts)
            tokens += [rows.read.tokens, rows.unread.tokens]
    given = [torch.from_numpy(x).to(device).long() for x in tokens]
    alike = [read(model, x[:, :-1]) for x in given]
    own, fp8, first = getattr(torch, dtype), torch.float8_e4m3fn, None
    for kind, step in ((own, STEP), (fp8, STEP), (own, 1), (own, CHUNK), (fp8, 1)):
        if kind == fp8 and FLAGS.attention == "dense":
            continue
        losses, rows = [], []
        for x, whole in zip(given, alike, strict=True):
            found = read(model, x[:, :-1], step, kind)
            losses.append(-found[0].gather(2, x[:, 1:, None])[..., 0].double())
            rows.append(compared(whole, found, x[:, 1:]))
        again = losses[len(held_out) :]
        loss = torch.stack(losses[: len(held_out)]).mean().item()
        first = loss if first is None else first
        ends = [x[:, -recall.PASSAGE :].mean().item() for x in again]
        copied = float(np.mean(ends[1::2]) - np.mean(ends[::2])) if ends else None
        row = about | {"cache": str(kind).removeprefix("torch."), "step": step}
        row |= {"loss": loss, "above": loss - first, "copied": copied}
        for name in rows[0]:  # only the batches of held-out text
            parts = [each[name] for each in rows[: len(held_out)]]
            row[name] = None if None in parts else float(np.mean(parts))
        run.rows("cached", FLAGS, [row])
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)

"""Continues the training of converted models, and compares their held-out losses with those of
the dense model.

    python -m bench.lm.converted --seed 0 --out runs/converted
    python -m bench.lm.converted --preset tiny --out converted    # minutes on a CPU

A Llama learns bytes of the standard library with dense attention for `--steps` steps. It is
converted by each start of `nsa_torch.huggingface.convert` and trained on for `--after` steps, as
is the dense model itself, all on the same batches; no text is seen twice. The held-out loss, in
nats per byte, is measured for all positions, within and beyond num_selected * select_block
tokens. Within this length a converted model starts equal to the dense one. Each evaluation
appends a line to `converted.jsonl` in the folder `--out`.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nsa_torch.huggingface import NSAForCausalLM
from nsa_torch.huggingface.convert import STARTS, convert

from ..harness import cli, markdown, records, text

SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
HELD = 32  # rows held out, the last of the text


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the model, of NSA and of the two trainings."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    nsa: dict[str, int]
    length: int
    batch: int
    steps: int
    after: int
    every: int  # steps between evaluations after the conversion
    lr: float
    after_lr: float


PRESETS = {
    "tiny": Preset(
        *(64, 128, 2, 4, 2),
        dict(compress_block=8, compress_stride=4, select_block=8, num_selected=4, window=16),
        length=128, batch=4, steps=200, after=40, every=20, lr=3e-3, after_lr=5e-4,
    ),
    # 24 million parameters; 512 of 2048 tokens are selected; 11 MB of text.
    "small": Preset(
        *(512, 1536, 8, 8, 2),
        dict(select_block=64, num_selected=8, window=256),
        length=2048, batch=8, steps=480, after=200, every=40, lr=1e-3, after_lr=2e-4,
    ),
}  # fmt: skip
FLAGS = cli.define(
    out=("runs/converted", "Folder of the lines."),
    seed=(0, "Of the weights and of the order of rows.", 0),
    preset=("small", "Sizes of all.", list(PRESETS)),
    folder=(str, "Whose *.py files are the text; default: the standard library's."),
    steps=(int, "Of dense training."),
    after=(int, "Of training after it."),
)


def rows(
    preset: Preset, seed: int, folder: str | None = None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the rows `[N, length + 1]` in the order of `seed`, those that are held out, and the
    text's hash.

    Raises:
      ValueError: the text has fewer.
    """
    count = (preset.steps + preset.after) * preset.batch
    width = preset.length + 1
    corpus = text.corpus((count + HELD) * width, None if folder is None else Path(folder))
    each = corpus.tokens.reshape(-1, width).astype(np.int64)
    order = np.random.default_rng(seed).permutation(count)
    return each[:count][order], each[count:], corpus.sha256


def loss_of(model: PreTrainedModel, batch: np.ndarray) -> torch.Tensor:
    """Return the losses `[B, T]` in nats per byte."""
    device = model.device
    given = torch.from_numpy(batch).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(given[:, :-1], use_cache=False).logits
    flat = F.cross_entropy(
        logits.float().flatten(0, 1), given[:, 1:].flatten(), reduction="none"
    )
    return flat.view(given.shape[0], -1)


def train(
    model: PreTrainedModel, given: np.ndarray, preset: Preset, lr: float
) -> Iterator[int]:
    """Train with AdamW on the rows with these indices. The learning rate rises during 20 steps
    and falls to a tenth.
    """
    how: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, fused=model.device.type == "cuda", **how
    )
    steps = len(given) // preset.batch
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        batch = given[step * preset.batch : (step + 1) * preset.batch]
        optimizer.zero_grad()
        loss = loss_of(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step + 1


@torch.no_grad()
def held_out(model: PreTrainedModel, held: np.ndarray, reach: int) -> dict[str, float]:
    """Return the mean losses for all positions, for the first `reach` positions, and for the
    positions beyond.
    """
    model.eval()
    size = max(1, len(held) // 8)
    found = torch.cat([loss_of(model, held[i : i + size]) for i in range(0, len(held), size)])
    model.train()
    means = found, found[:, :reach], found[:, reach:]
    return dict(
        zip(("loss", "within", "beyond"), (x.mean().item() for x in means), strict=True)
    )


def main(argv: Sequence[str]) -> int:
    path = Path(FLAGS.out) / "converted.jsonl"
    records.check_appendable(path)
    preset = PRESETS[FLAGS.preset]
    given: dict[str, Any] = {"steps": FLAGS.steps, "after": FLAGS.after}
    preset = dataclasses.replace(preset, **{k: x for k, x in given.items() if x is not None})
    learned, held, sha256 = rows(preset, FLAGS.seed, FLAGS.folder)
    first = preset.steps * preset.batch
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(FLAGS.seed)
    shape = {name: getattr(preset, name) for name in SHAPE}
    reach = preset.nsa["num_selected"] * preset.nsa["select_block"]
    config = LlamaConfig(
        vocab_size=text.VOCABULARY, max_position_embeddings=preset.length, **shape,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    dense: Any = LlamaForCausalLM(config)
    dense.to(device)
    for _ in train(dense, learned[:first], preset, preset.lr):
        pass
    about: dict[str, Any] = {"seed": FLAGS.seed, "input_sha256": sha256}
    about |= {"preset": dataclasses.asdict(preset)}
    print("| run | steps after | all | within | beyond |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        dense.save_pretrained(source)
        for run in ("dense", *STARTS):
            model: Any = dense
            if run != "dense":
                sizes: dict[str, Any] = preset.nsa
                convert(source, Path(folder) / run, start=run, **sizes)
                model = cast(Any, NSAForCausalLM.from_pretrained(Path(folder) / run))
                model.to(device)
            steps = train(model, learned[first:], preset, preset.after_lr)
            for step in itertools.chain([0], steps):
                if step % preset.every and step != preset.after:
                    continue
                found = held_out(model, held, reach)
                line = about | {"run": run, "step": step, **found}
                records.append(path, [records.record("converted", FLAGS.commit, **line)])
                cells = run, step, *(f"{x:.4f}" for x in found.values())
                print(markdown.line(map(str, cells)), flush=True)
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)

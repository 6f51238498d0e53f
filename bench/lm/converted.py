"""Continues the training of converted models, and compares their held-out losses with the losses of
the dense model from which the models were converted.

    python -m bench.lm.converted --seed 0 --out runs/converted
    python -m bench.lm.converted --preset tiny --out converted    # minutes on a CPU
    python -m bench.lm.converted --preset 52m --corpus corpus \\
        --runs values,shared,shared:num_selected=64,shared:lora=16

A Llama trains with dense attention for `--steps` steps, on bytes of the standard library or on the
tokens of a corpus. `nsa_torch.huggingface.convert` converts it. After the conversion, the converted
models and the dense model are trained for `--after` further steps, all on the same batches. No text
is read twice. The held-out loss, in nats per token, is measured for all positions, for positions
within num_selected * select_block tokens, and for later positions. Within num_selected *
select_block tokens a converted model starts equal to the dense model. `recall` and `copied` are
measured as in `bench.lm.recall`, in total and by distance, if rows are long enough. A model is
evaluated before the first step, after 1, 2, 4, .. times the preset's `every` steps, and at the end.
Each evaluation appends a line to `converted.jsonl` in the folder `--out`.
"""

import dataclasses
import importlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nsa_core import extras
from nsa_core.layer import LayerSpec
from nsa_torch.huggingface import NSAForCausalLM
from nsa_torch.huggingface.convert import STARTS, convert

from ..harness import cli, markdown, records, text
from . import corpus, measures, share
from .data import Batch, Batches
from .learner import Learner
from .ranks import Ranks
from .tokens import Documents

SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
HELD = 32  # number of held-out rows, which are the last of the text
# adapters start at zero and need larger steps, so their rate is this multiple of the rate of all
# weights
LORA_RATE = 5
COLUMNS = "loss", "within", "beyond", "recall", "copied"


@dataclasses.dataclass(frozen=True)
class Preset:
    """The sizes of the model, of NSA and of the two trainings."""

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
    every: int  # number of steps to the first evaluation after the conversion
    lr: float
    after_lr: float


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PRESETS = {name: Preset(**sizes) for name, sizes in _ROWS.items()}
FLAGS = cli.define(
    out=("runs/converted", "Folder of the records."),
    seed=(0, "Seed of the weights and of the order of the rows.", 0),
    preset=("small", "Sizes of the model, of the rows and of the training.", list(PRESETS)),
    folder=(str, "Folder whose *.py files are the text; default: the standard library."),
    corpus=(
        str,
        "Folder that bench.lm.corpus wrote. Its tokens replace the bytes of *.py files.",
    ),
    runs=(
        [*STARTS],
        "Starts of the conversion. Options may follow a start: `:NAME=NUMBER` sets an option of "
        "NSA. With `:lora=RANK`, peft trains low-rank adapters instead of all weights.",
    ),
    steps=(int, "Number of steps of dense training."),
    after=(int, "Number of training steps after the conversion."),
)


def rows(
    preset: Preset, seed: int, folder: str | None = None, built: str | None = None
) -> Batches:
    """Return the batches of a preset, in the order of `seed`. The text of the batches is the
    bytes of the `*.py` files in `folder`, or the corpus `built`.

    Raises:
      ValueError: The text is too short for all steps without repetition.
    """
    steps, width = preset.steps + preset.after, preset.length + 1
    if built is None:
        size = (steps * preset.batch + HELD) * width
        of = text.corpus(size, None if folder is None else Path(folder))
        given = of.tokens, of.starts, text.VOCABULARY, of.sha256, HELD * width
        documents = Documents("text", *given)
    else:
        documents = corpus.read(built)
    found = Batches(preset.batch, preset.length, seed, documents=documents, pack="once")
    epochs = found.epochs(steps)
    if epochs is None or epochs > 1:
        raise ValueError(f"{steps} steps must read no text twice, got {epochs} epochs")
    return found


def loss_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the losses `[B, T]` in nats per token."""
    device = model.device
    given = torch.from_numpy(batch.tokens.astype(np.int64)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(given[:, :-1], use_cache=False).logits
    flat = F.cross_entropy(
        logits.float().flatten(0, 1), given[:, 1:].flatten(), reduction="none"
    )
    return flat.view(given.shape[0], -1)


def train(model: PreTrainedModel, batches: Batches, steps: range, lr: float) -> Iterator[int]:
    """Train with AdamW on the batches of `steps`, and yield the number of steps done. The
    learning rate rises to `lr` during the first tenth of the steps and then falls to a tenth of
    `lr`.
    """
    how: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, fused=model.device.type == "cuda", **how)
    warmup = max(1, len(steps) // 10)
    model.train()
    for done, step in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (done + 1) / warmup) * (1 - 0.9 * done / len(steps))
        optimizer.zero_grad()
        loss = loss_of(model, batches.train(step)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        yield done + 1


class Judged:
    """A model of transformers with the interface of a learner that `measures` needs. Selections
    are not observed."""

    ranks = Ranks()

    def __init__(self, model: PreTrainedModel, batch: int):
        self.model, self.share = model, share.Share(batch)

    @torch.no_grad()
    def loss_sums(self, batch: Batch, categories: np.ndarray, count: int) -> np.ndarray:
        losses = loss_of(self.model, batch).double().cpu().numpy()
        which = np.minimum(categories, count).ravel()
        return np.bincount(which, losses.ravel(), count + 1)[:count]

    def observe(self, batch: Batch, row: int = 0) -> list[Any]:
        return []


def judged(
    model: PreTrainedModel, preset: Preset, held: list[Batch], seed: int
) -> records.Values:
    """Return the mean losses for all positions, for the positions within the exact length, and for
    the later positions. Also return the gains from earlier passages (`measures.copies`).
    """
    model.eval()
    learner = cast(Learner, Judged(model, preset.batch))
    reach = preset.nsa["num_selected"] * preset.nsa["select_block"]
    beyond = (np.arange(preset.length) >= reach).astype(np.int32)
    which = np.tile(beyond, (preset.batch, 1))
    sums = measures.HeldOut(held, [which] * len(held)).sums(learner, 2)
    counts = np.bincount(beyond, minlength=2) * HELD
    within, after = (sums / counts).tolist()
    layer = LayerSpec(preset.hidden_size, *(1, 1, 2, 2), w=preset.nsa["window"])
    gained = measures.copies(learner, held, layer, (seed, 4), thorough=True)
    model.train()
    losses = {"loss": float(sums.sum() / counts.sum()), "within": within, "beyond": after}
    gains = gained.pop("copied_at", {})
    renamed = {name.removesuffix("_gain"): x for name, x in gained.items()}
    return losses | renamed | {f"copied_{distance}": x for distance, x in gains.items()}


def converted(folder: Path, run: str, nsa: dict[str, int]) -> Any:
    """Convert the model in `folder / "dense"`. The argument `run` is a start, with options after
    colons.

    Raises:
      ValueError: A start or an option is invalid, or peft is not installed.
    """
    start, *given = run.split(":")
    pairs = [each.partition("=") for each in given]
    if not all(number.isdecimal() for _, _, number in pairs):
        raise ValueError(f"--runs must be START[:NAME=NUMBER..], got {run!r}")
    options: dict[str, Any] = nsa | {name: int(number) for name, _, number in pairs}
    rank = options.pop("lora", None)
    target = folder / "converted"
    convert(folder / "dense", target, start=start, **options)
    model: Any = NSAForCausalLM.from_pretrained(target)
    shutil.rmtree(target)
    if rank is None:
        return model
    if extras.version("peft") is None:
        raise ValueError(
            f"--runs={run} needs peft, which is not installed; run pip install peft"
        )
    peft: Any = importlib.import_module("peft")
    # peft ignores names that the model does not have, so these are the names of its branches
    branches = itertools.chain.from_iterable(model.config.layer_spec.key_values)
    projections = ["W_Q", *dict.fromkeys(branches), "out"]
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=projections
    )
    return peft.get_peft_model(model, adapters)


def main(argv: Sequence[str]) -> int:
    path = Path(FLAGS.out) / "converted.jsonl"
    records.check_appendable(path)
    preset = PRESETS[FLAGS.preset]
    given: dict[str, Any] = {"steps": FLAGS.steps, "after": FLAGS.after}
    preset = dataclasses.replace(preset, **{k: x for k, x in given.items() if x is not None})
    batches = rows(preset, FLAGS.seed, FLAGS.folder, FLAGS.corpus)
    held = batches.evaluation(HELD // preset.batch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(FLAGS.seed)
    shape = {name: getattr(preset, name) for name in SHAPE}
    config = LlamaConfig(
        vocab_size=batches.vocabulary, max_position_embeddings=preset.length, **shape,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    dense: Any = LlamaForCausalLM(config)
    dense.to(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense.save_pretrained(folder / "dense")
        for run in FLAGS.runs:  # this refuses a wrong run before the training
            converted(folder, run, preset.nsa)
        for _ in train(dense, batches, range(preset.steps), preset.lr):
            pass
        dense.save_pretrained(folder / "dense")
        about: records.Values = {"seed": FLAGS.seed, "input_sha256": batches.sha256}
        about |= {"preset": dataclasses.asdict(preset)}
        print(markdown.table(["run", "steps after", *COLUMNS]), end="")
        after = range(preset.steps, preset.steps + preset.after)
        due = {0, preset.after, *(preset.every << i for i in range(preset.after.bit_length()))}
        for run in ("dense", *FLAGS.runs):
            model: Any = dense
            if run != "dense":
                model = converted(folder, run, preset.nsa).to(device)
            lr = preset.after_lr * (LORA_RATE if ":lora=" in run else 1)
            for step in itertools.chain([0], train(model, batches, after, lr)):
                if step not in due:
                    continue
                found = judged(model, preset, held, FLAGS.seed)
                line = about | {"run": run, "step": step, **found}
                records.append(path, [records.record("converted", FLAGS.commit, **line)])
                cells = (markdown.number(found.get(name), ".4f") for name in COLUMNS)
                print(markdown.line([run, str(step), *cells]), flush=True)
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)

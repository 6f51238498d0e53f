"""Trains a model with Native Sparse Attention on packed rows, with `Trainer` of transformers.

    python examples/train.py --out model                                    # minutes on a CPU
    python examples/train.py --out model --resume       # continue after Ctrl-C
    python examples/train.py --out model --layers 12 --hidden 768 --heads 12 --row_tokens 16384 \
        --document_tokens 4096 --num_selected 16 --window 512 --steps 2000 --lr 6e-4 \
        --texts 'texts/*.txt'                                               # a GPU

Documents are pieces of the files with up to `--document_tokens` bytes. A row packs `row_tokens //
document_tokens` documents, and the tokens of a document attend only to that document. The model
is saved to --out, a new folder. Ctrl-C saves a checkpoint in --out. The script needs the
extra `hf`.
"""

import argparse
import glob
import math
import signal
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig

SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "steps": 50, "row_tokens": 1024}
SIZES |= {"document_tokens": 512, "num_selected": 4, "window": 128}


class Stop(TrainerCallback):
    """Ends training at Ctrl-C, after the current step, with a checkpoint. A second Ctrl-C ends
    training at once.
    """

    asked = False

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)

    def ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, self.before)

    def on_step_end(self, args, state, control, **_):
        if self.asked:
            control.should_save = control.should_training_stop = True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--texts", default=f"{sysconfig.get_paths()['stdlib']}/*.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in --out")
    flags = parser.parse_args(argv)
    for name in SIZES:
        least = 2 if name == "document_tokens" else 1  # the first token is not predicted
        if getattr(flags, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(flags, name)}")
    checkpoint = get_last_checkpoint(flags.out) if flags.out.is_dir() else None
    if flags.resume and checkpoint is None:
        parser.error(f"--resume needs a checkpoint in --out, found none in {flags.out}")
    if flags.resume and (flags.out / "model.safetensors").is_file():
        parser.error(f"--resume needs a run that has not ended, got {flags.out}")
    used = flags.out.exists() and not (flags.out.is_dir() and not any(flags.out.iterdir()))
    if used and not flags.resume:
        parser.error(f"--out must be a new or an empty folder, got {flags.out}")
    most, rows = flags.document_tokens, flags.row_tokens // flags.document_tokens
    if not rows:
        parser.error(f"--document_tokens must fit in a row, got {most}")
    paths = map(Path, sorted(glob.glob(flags.texts, recursive=True)))
    data = [x.read_bytes() for x in paths if x.is_file()]
    texts = [{"input_ids": list(x[i : i + most])} for x in data for i in range(0, len(x), most)]
    if len(texts) < 16:
        parser.error(f"--texts must give 16 documents, got {len(texts)} of {flags.texts}")
    held_out, gpu = min(len(texts) // 16, 32), torch.cuda.is_available()
    sizes = dict(
        hidden_size=flags.hidden, intermediate_size=3 * flags.hidden,
        num_hidden_layers=flags.layers, num_attention_heads=flags.heads,
        num_key_value_heads=flags.kv_heads, num_selected=flags.num_selected, window=flags.window,
    )  # fmt: skip
    try:
        config = NSAModelConfig(vocab_size=256, **sizes)
    except ValueError as error:
        parser.error(str(error))
    saved = NSAModelConfig.from_pretrained(checkpoint) if checkpoint else config
    for name, size in sizes.items():
        if getattr(saved, name) != size:
            parser.error(
                f"--resume needs the model in --out: {name} must be "
                f"{getattr(saved, name)}, got {size}"
            )
    how = TrainingArguments(
        flags.out, max_steps=flags.steps, learning_rate=flags.lr, warmup_steps=flags.steps // 10,
        per_device_train_batch_size=rows, per_device_eval_batch_size=rows, save_strategy="no",
        logging_steps=max(1, flags.steps // 5), report_to="none", bf16=gpu,
        dataloader_pin_memory=gpu,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(
        NSAForCausalLM(config), how, train_dataset=texts[held_out:],
        eval_dataset=texts[:held_out], data_collator=DataCollatorWithFlattening(),
    )  # fmt: skip
    with Stop() as stop:
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < flags.steps:
        done = f"stopped after {trainer.state.global_step} of {flags.steps} steps"
        print(f"{done}; the same command with --resume continues", file=sys.stderr)
        return 130
    loss = trainer.evaluate()["eval_loss"]
    print(f"held-out loss {loss:.4f} nats per byte")
    if not math.isfinite(loss):
        raise SystemExit("the held-out loss must be finite; no model was saved")
    trainer.save_model()
    return 0


if __name__ == "__main__":
    sys.exit(main())

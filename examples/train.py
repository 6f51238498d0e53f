"""Trains a model of transformers with Native Sparse Attention by `Trainer`, on packed rows.

    python examples/train.py --out model                                    # minutes on a CPU
    python examples/train.py --out model --layers 12 --hidden 768 --heads 12 --row_tokens 16384 \
        --document_tokens 4096 --num_selected 16 --window 512 --steps 2000 --lr 6e-4 \
        --texts 'texts/*.txt'                                               # a GPU

Documents are bytes of the files, cut to `--document_tokens`; a row packs as many as `Trainer`'s
batch has, each attends to itself alone. The model is saved to --out. Needs the extra `hf`.
"""

import argparse
import glob
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig


def documents(pattern: str, most: int) -> list[dict[str, list[int]]]:
    """The bytes of the files, at most `most` a document."""
    data = (Path(path).read_bytes() for path in sorted(glob.glob(pattern, recursive=True)))
    return [{"input_ids": list(x[i : i + most])} for x in data for i in range(0, len(x), most)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 2,
        "steps": 50,
        "num_selected": 4,
        "window": 128,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--row_tokens", type=int, default=1024, help="of a packed row, at most")
    parser.add_argument("--document_tokens", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--texts", default=f"{sysconfig.get_paths()['stdlib']}/*.py")
    parser.add_argument("--out", required=True, help="folder of the model")
    flags = parser.parse_args(argv)
    for name, value in vars(flags).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if flags.document_tokens > flags.row_tokens:
        parser.error(f"--document_tokens must fit in a row, got {flags.document_tokens}")
    texts = documents(flags.texts, flags.document_tokens)
    if len(texts) < 16:
        parser.error(f"--texts must give 16 documents, got {len(texts)} of {flags.texts}")
    held_out = min(len(texts) // 16, 32)  # documents
    sizes = {"hidden_size": flags.hidden, "intermediate_size": 3 * flags.hidden}
    heads = {"num_attention_heads": flags.heads, "num_key_value_heads": flags.kv_heads}
    nsa = {"num_selected": flags.num_selected, "window": flags.window}
    config = NSAModelConfig(
        vocab_size=256, num_hidden_layers=flags.layers, **sizes, **heads, **nsa
    )
    how = TrainingArguments(
        flags.out, max_steps=flags.steps, learning_rate=flags.lr, warmup_steps=flags.steps // 10,
        per_device_train_batch_size=flags.row_tokens // flags.document_tokens,
        per_device_eval_batch_size=flags.row_tokens // flags.document_tokens,
        logging_steps=max(1, flags.steps // 5), save_strategy="no", report_to="none",
        bf16=torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(
        NSAForCausalLM(config), how, train_dataset=texts[held_out:],
        eval_dataset=texts[:held_out], data_collator=DataCollatorWithFlattening(),
    )  # fmt: skip
    trainer.train()
    print(f"held-out loss, nats a byte: {trainer.evaluate()['eval_loss']:.4f}")
    trainer.save_model()
    return 0


if __name__ == "__main__":
    sys.exit(main())

# %% [markdown]
# # Packed rows in a Hugging Face Trainer
# A packed row contains several documents without padding. `DataCollatorWithFlattening` of
# transformers builds such rows, and `NSAForCausalLM` reads their boundaries. No token attends to
# another document. This tutorial needs the extras `hf` and `bench`.

# %%
import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig

torch.manual_seed(0)
gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
longest, documents, steps = (4096, 4, 500) if gpu else (96, 2, 10)
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
texts = [{"input_ids": list(x.read_bytes()[:longest])} for x in files if x.stat().st_size > 1]

# %% [markdown]
# ## One batch
# The collator joins the documents of a batch into one row. Position 0 marks each boundary.

# %%
collator = DataCollatorWithFlattening(return_tensors="pt")
row = collator(texts[:documents])
print(row["input_ids"].shape, (row["position_ids"] == 0).nonzero()[:, 1].tolist())

# %% [markdown]
# ## Model
# The model derives the tables of a packed row once per batch, and all layers share the tables.
# Up to rounding, the logits of a document do not depend on the other documents in its row. On a
# GPU the logits are computed in bfloat16, as in training (`bf16=True` below).

# %%
if gpu:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 1}
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_selected": 4}
    sizes |= {"compress_block": 8, "compress_stride": 4, "select_block": 16, "window": 32}
model = NSAForCausalLM(NSAModelConfig(vocab_size=256, **sizes)).to(device).eval()

with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=gpu):
    ids, position = row["input_ids"].to(device), row["position_ids"].to(device)
    packed = model(ids, position_ids=position).logits
    length = len(texts[0]["input_ids"])
    single = model(ids[:, :length], use_cache=False).logits
    print(f"difference {(packed[:, :length] - single).abs().max():.1e}")

# %% [markdown]
# ## Train
# `per_device_train_batch_size` is the number of documents per row.

# %%
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=steps,
    learning_rate=1e-3,
    per_device_train_batch_size=documents,
    logging_steps=steps // 5,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    bf16=gpu,
    dataloader_pin_memory=gpu,
)
trainer = Trainer(model, arguments, train_dataset=texts, data_collator=collator)
trainer.train()

history = [x for x in trainer.state.log_history if "loss" in x]
print(f"loss {history[0]['loss']:.2f}, at the end {history[-1]['loss']:.2f} nats per byte")
plt.figure(figsize=(6, 3))
plt.plot([x["step"] for x in history], [x["loss"] for x in history])
plt.xlabel("step")
plt.ylabel("loss, nats per byte")
plt.show()

# %% [markdown]
# `examples/train.py` adds held-out documents, checkpoints and command-line options.
# [Packed rows](../packed.md) describes the tables, CUDA graphs and run times.

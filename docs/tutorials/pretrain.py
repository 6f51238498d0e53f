# %% [markdown]
# # Pretrain, test, generate and serve
# This tutorial trains a small language model with NSA on Python source code, tests whether it
# recalls passages far beyond its sliding window, generates text, and serves the model.
# On a CPU the tutorial uses tiny sizes and runs for less than a minute. The tiny model shows the
# steps but learns little. On a GPU the tutorial trains 29 million weights for 1500 steps of 2 rows
# of 8192 tokens, in bfloat16, because the Mosaic kernels need 16-bit inputs. To run the tutorial:
# ```bash
# pip install '.[hf,bench]'            # in a checkout of the repository
# python docs/tutorials/pretrain.py    # or open the file as a notebook with jupytext
# ```

# %%
import json
import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig

torch.manual_seed(0)
gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
autocast = torch.autocast(device, torch.bfloat16, enabled=gpu)  # the weights stay float32
tokens, batch, steps, passage = (8192, 2, 1500, 64) if gpu else (192, 2, 10, 16)

# %% [markdown]
# ## Data
# The text is the source of the standard library. `ByT5Tokenizer` maps each byte to a token.
# Each row ends with a copy of an earlier passage, so that the model learns to recall.

# %%
tokenizer = ByT5Tokenizer(extra_ids=0)
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = b"".join(file.read_bytes() for file in files[: None if gpu else 20])
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + 3  # 0 to 2 are special
learned = len(data) * 15 // 16  # the rest is held out


def rows(begin: int, end: int, distance: int) -> torch.Tensor:
    """Rows of text whose last tokens repeat the passage `distance` tokens earlier."""
    start = torch.randint(begin, end - tokens, (batch, 1))
    found = data[start + torch.arange(tokens)]
    found[:, -passage:] = found[:, -passage - distance : tokens - distance]
    return found.to(device)


# %% [markdown]
# ## Model
# At full size, each query reads 16 blocks of 64 tokens and a window of 512 tokens.

# %%
if gpu:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, **heads}
else:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **heads}
    sizes |= {"compress_block": 8, "compress_stride": 4, "select_block": 16}
    sizes |= {"num_selected": 4, "window": 32}
config = NSAModelConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **sizes)
model = NSAForCausalLM(config).to(device)
print(f"{model.num_parameters() / 1e6:.1f} million weights, {config.gate=}, {config.kv=}")

# %% [markdown]
# ## Train

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
losses = []
for _ in range(steps):
    distance = int(torch.randint(passage, tokens - passage, ()))
    x = rows(0, learned, distance)
    with autocast:
        loss = model(x, labels=x).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.detach())
losses = torch.stack(losses).cpu()
print(
    f"loss of the first step {losses[0]:.2f}, of the last step {losses[-1]:.2f} nats per byte"
)

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss, nats per byte")
plt.show()

# %% [markdown]
# ## Recall by distance
# For each distance the plot shows the recall: how much the loss of the copy rises if another text
# replaces the earlier passage. A model that cannot read the passage has a recall of 0. The dashed
# line marks the end of the window.

# %%
model.eval()


@torch.no_grad()
def copy_loss(x: torch.Tensor) -> float:
    with autocast:
        logits = model(x, use_cache=False).logits[:, -passage - 1 : -1]
    return F.cross_entropy(logits.float().flatten(0, 1), x[:, -passage:].flatten()).item()


def recall(distance: int) -> float:
    read = rows(learned, len(data), distance)
    other = read.clone()
    place = slice(tokens - passage - distance, tokens - distance)
    other[:, place] = other.roll(1, 0)[:, place]
    return copy_loss(other) - copy_loss(read)


distances = torch.linspace(passage, tokens - passage, 12 if gpu else 4).int().tolist()
repeats = 16 if gpu else 1
found = [sum(recall(x) for _ in range(repeats)) / repeats for x in distances]
for distance, value in zip(distances, found, strict=True):
    print(f"recall of a passage {distance} tokens back: {value:.2f} nats per byte")

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(distances, found, "o-")
axes.axvline(config.window, linestyle="--", color="gray")
axes.set(xlabel="distance in tokens", ylabel="recall, nats per byte")
plt.show()

# %% [markdown]
# ## Generate
# `generate` of transformers works without changes. The saved model loads with the Auto classes.
# On a GPU load it in bfloat16, so that the kernels for decoding run.

# %%
folder = Path(tempfile.mkdtemp()) / "pretrained"
model.save_pretrained(folder)
tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
tokenizer.save_pretrained(folder)

dtype = torch.bfloat16 if gpu else torch.float32
loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
prompt = tokenizer("def main(", add_special_tokens=False, return_tensors="pt").to(device)
output = loaded.generate(**prompt, max_new_tokens=64 if gpu else 16, do_sample=False)
print(tokenizer.decode(output[0]))

# %% [markdown]
# ## Serve
# The folder is a checkpoint for every engine in [Serving](../serving.md). The cell prints two
# commands: one starts a server with OpenAI's API, the other sends a request. The commands need
# `pip install 'transformers[serving]' requests`. If you have transformers 5.19 or newer, add
# `--continuous-batching`, so that requests share one pool of pages.

# %%
print(f"python -m nsa_torch.huggingface.serve {folder} --port 8000")
request = {"model": str(folder), "messages": [{"role": "user", "content": "def main("}]}
print("curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\")
print(f"  -d '{json.dumps(request)}'")

# %% [markdown]
# # Convert a dense model and tune it
# This tutorial trains a small dense Llama, converts it to NSA, and tunes the converted model.
# Up to a certain number of tokens, the exact length, both models compute the same. The tutorial
# needs the extras `hf` and `bench`. To convert your own checkpoint, replace `folder / "dense"` with
# its path. [Dense checkpoints](../convert.md) lists the supported models and all options.

# %%
import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from nsa_torch.huggingface import NSAForCausalLM
from nsa_torch.huggingface.convert import convert

torch.manual_seed(0)
gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
autocast = torch.autocast(device, torch.bfloat16, enabled=gpu)  # the weights stay float32
tokens, batch, steps, tuning = (4096, 4, 1000, 200) if gpu else (192, 2, 20, 5)
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = b"".join(file.read_bytes() for file in files[: None if gpu else 20])
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
learned = len(data) * 15 // 16  # the rest is held out


def rows(begin: int, end: int) -> torch.Tensor:
    start = torch.randint(begin, end - tokens, (batch, 1))
    return data[start + torch.arange(tokens)].to(device)


def train(model, steps: int, lr: float) -> None:
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    for _ in range(steps):
        x = rows(0, learned)
        with autocast:
            loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# %% [markdown]
# ## A dense model
# On a GPU the model trains in bfloat16, as with `bf16=True` in a `Trainer`. In float32 torch has
# no fast kernel for attention with grouped heads, and would store all attention weights.

# %%
width = 512 if gpu else 64
sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": 256}
sizes |= {"num_hidden_layers": 8 if gpu else 2}
heads = {"num_attention_heads": 8 if gpu else 4, "num_key_value_heads": 2}
dense = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(device)
train(dense, steps, 1e-3)
folder = Path(tempfile.mkdtemp())
dense.save_pretrained(folder / "dense")

# %% [markdown]
# ## Convert
# The exact length is `num_selected * select_block` tokens. The call below does the same as the
# command `python -m nsa_torch.huggingface.convert dense nsa --start shared --set num_selected=16`.
# With `start="shared"` all branches share one set of keys and values. The cache then has a third
# of the size that it has with separate keys and values.

# %%
nsa = {"num_selected": 16}
if not gpu:
    nsa = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "num_selected": 8}
convert(folder / "dense", folder / "nsa", start="shared", **nsa)
model = NSAForCausalLM.from_pretrained(folder / "nsa").to(device)
exact = model.config.num_selected * model.config.select_block

with torch.no_grad():  # in float32, so that rounding hides no difference
    x = rows(learned, len(data))[:1, :exact]
    error = (model(x).logits - dense(x).logits).abs().max().item()
print(f"largest difference of logits within {exact} tokens: {error:.1e}")


# %% [markdown]
# ## Compare
# Within the exact length the two losses are equal. Beyond the exact length NSA reads only
# selected blocks.


# %%
@torch.no_grad()
def losses(model) -> torch.Tensor:
    """Mean loss within and beyond the exact length, over the same held-out rows."""
    torch.manual_seed(1)
    x = rows(learned, len(data))
    with autocast:
        logits = model(x, use_cache=False).logits[:, :-1].float()
    each = F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none")
    return torch.stack([each[:, : exact - 1].mean(), each[:, exact - 1 :].mean()]).cpu()


found = {"dense": losses(dense), "converted": losses(model)}

# %% [markdown]
# ## Tune
# A few training steps on long rows adapt the model to the selection. Use the learning rate with
# which you would tune the dense model.

# %%
train(model, tuning, 1e-4)
found["tuned"] = losses(model)
for name, (within, beyond) in found.items():
    print(
        f"{name}: loss {within:.2f} within {exact} tokens, {beyond:.2f} beyond, in nats per byte"
    )

for i, part in enumerate(("within", "beyond")):
    plt.bar([j + 0.4 * i for j in range(3)], [x[i] for x in found.values()], 0.4, label=part)
plt.xticks([0.2, 1.2, 2.2], list(found))
plt.ylabel("loss, nats per byte")
plt.legend(title=f"{exact} tokens", loc="lower right")
plt.show()

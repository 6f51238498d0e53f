# %% [markdown]
# # Which attention is fastest on my GPU
# NSA is slower than dense attention for short rows and faster for long rows. This tutorial finds
# the break-even length for your model on your device. The tutorial needs the extras `torch` and
# `bench`.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

import nsa_torch

gpu = torch.cuda.is_available()
options = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
heads, kv_heads, width = (64, 4, 128) if gpu else (4, 1, 16)  # put the sizes of your model here
lengths = [2**i for i in range(11, 17)] if gpu else [256, 512, 1024]


def inputs(length):
    query = torch.randn(1, length, heads, width, **options)
    key, value = torch.randn(2, 1, length, kv_heads, width, **options)
    return query, key, value, torch.rand(1, length, heads, 3, **options)


# %% [markdown]
# ## Which implementations run?
# `explain` states which implementation runs each step, and why the other implementations do not.

# %%
print(nsa_torch.explain(*inputs(lengths[-1])[:3]))


# %% [markdown]
# ## Measure
# Each function computes the forward pass. With `nsa(None)` the library chooses the implementation.


# %%
def dense(query, key, value, gates):
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def nsa(implementation):
    return lambda *x: nsa_torch.attention(*x, implementation=implementation)


candidates = {"dense (SDPA)": dense, "NSA, automatic": nsa(None)}
if gpu:
    candidates |= {f"NSA, {name}": nsa(name) for name in ("mosaic", "triton", "fa2")}

times: dict[str, list[float]] = {name: [] for name in candidates}
for length in lengths:
    arguments = inputs(length)
    for name, function in candidates.items():
        try:
            timer = Timer("f(*x)", globals={"f": function, "x": arguments})
            times[name].append(timer.blocked_autorange(min_run_time=0.2).median * 1000)
        except NotImplementedError as refused:  # a named implementation never falls back
            print(f"{name}, {length} tokens: {refused}")
            times[name].append(float("nan"))

for name, each in times.items():
    print(f"{name}:", ", ".join(f"{ms:.3g} ms" for ms in each), f"for {lengths} tokens")
    plt.plot(lengths, each, "o-", label=name)
plt.xscale("log", base=2)
plt.yscale("log")
plt.xlabel("tokens")
plt.ylabel("ms, forward")
plt.legend()
plt.show()

# %% [markdown]
# ## More measurements
# These commands compare each result with an oracle before they measure its time:
# ```bash
# python -m nsa_bench.compare --framework both --mode fwdbwd --seq_len 4096,16384,65536
# python -m nsa_bench.decode                 # decode steps
# python -m nsa_bench.tune_thresholds --help # thresholds of the automatic choice
# ```
# [Which kernel runs on my GPU](../which_kernel.md) lists the defaults, and
# [Benchmarks](../benchmarks.md) lists our figures.

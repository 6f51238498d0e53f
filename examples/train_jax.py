"""Trains a small model with Native Sparse Attention in JAX: Flax NNX and optax, packed rows.

    python examples/train_jax.py                                            # minutes on a CPU
    python examples/train_jax.py --layers 12 --dim 768 --heads 12 --tokens 8192

Rows are bytes of the standard library's modules, one after the other; `segment_ids` say which
module a byte belongs to, and each attends to itself alone. Needs the extra `train`.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from nsa_jax.layer import LayerSpec
from nsa_jax.nn import NSAAttention

SIZES = {"layers": 2, "dim": 64, "heads": 4, "tokens": 512, "batch": 4, "steps": 50}


class Block(nnx.Module):
    def __init__(self, spec: LayerSpec, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(spec.dim, rngs=rngs) for _ in range(2)])
        self.attention = NSAAttention(spec, rngs=rngs)
        self.up = nnx.Linear(spec.dim, 4 * spec.dim, rngs=rngs)
        self.down = nnx.Linear(4 * spec.dim, spec.dim, rngs=rngs)

    def __call__(self, x, segment_ids):
        x = x + self.attention(self.norms[0](x), segment_ids=segment_ids)[0]
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))))


class LM(nnx.Module):
    def __init__(self, spec: LayerSpec, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, spec.dim, rngs=rngs)
        self.blocks = nnx.List([Block(spec, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(spec.dim, rngs=rngs)
        self.head = nnx.Linear(spec.dim, 256, rngs=rngs)

    def loss(self, tokens, segments):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, segments[:, :-1])
        logits, labels = self.head(self.norm(x)), tokens[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean(where=segments[:, 1:] == segments[:, :-1])  # not over a border


@nnx.jit
def step(model: LM, optimizer: nnx.Optimizer, tokens, segments):
    loss, grads = nnx.value_and_grad(LM.loss)(model, tokens, segments)
    optimizer.update(model, grads)
    return loss


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    flags = parser.parse_args(argv)
    for name, value in vars(flags).items():
        if value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    data = [x.read_bytes() for x in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    tokens = np.frombuffer(b"".join(data), np.uint8).astype(np.int32)
    if flags.tokens >= len(tokens):
        parser.error(f"--tokens must be below the text's {len(tokens)}, got {flags.tokens}")
    segments = np.repeat(np.arange(len(data), dtype=np.int32), [len(x) for x in data])
    if flags.dim % flags.heads:
        parser.error(f"--dim must be a multiple of --heads={flags.heads}, got {flags.dim}")
    heads, width = (flags.heads, flags.heads // 2 or 1), flags.dim // flags.heads
    try:
        spec = LayerSpec(flags.dim, *heads, width, width, gate="head", kv="shared")
    except ValueError as error:
        parser.error(str(error))
    model = LM(spec, flags.layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    random = np.random.default_rng(0)
    for number in range(1, flags.steps + 1):
        starts = random.integers(0, len(tokens) - flags.tokens, (flags.batch, 1))
        rows = starts + np.arange(flags.tokens + 1)
        loss = step(model, optimizer, tokens[rows], segments[rows])
        if number % max(1, flags.steps // 5) == 0:
            print(f"step {number}: loss {float(loss):.4f} nats a byte", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

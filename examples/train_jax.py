"""Trains a small model with Native Sparse Attention in JAX on packed rows, with Flax NNX and
optax.

    python examples/train_jax.py                                            # minutes on a CPU
    python examples/train_jax.py --texts 'texts/*.txt' --out model.safetensors --prompt 'Once '
    python examples/train_jax.py --layers 12 --dim 768 --heads 12 --tokens 8192

Rows are bytes of the files, one file after the other. `segment_ids` give the file of each byte, and
a byte attends only to its own file. The last sixteenth of the bytes is held out. After training the
script prints the loss on up to 32 held-out rows, and the text that the model writes after --prompt.
Ctrl-C ends the training, and the script continues with the evaluation. The script needs the extra
`train`.
"""

import argparse
import glob
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from nsa_core.layer import LayerSpec
from nsa_interop import weights
from nsa_jax.nn import NSAAttention

SIZES = {"layers": 2, "dim": 64, "heads": 4, "tokens": 512, "batch": 4, "steps": 50}
SIZES |= {"new_tokens": 64}


class Block(nnx.Module):
    def __init__(self, spec: LayerSpec, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(spec.dim, rngs=rngs) for _ in range(2)])
        self.attention = NSAAttention(spec, rngs=rngs)
        self.up = nnx.Linear(spec.dim, 4 * spec.dim, rngs=rngs)
        self.down = nnx.Linear(4 * spec.dim, spec.dim, rngs=rngs)

    def __call__(self, x, segments, cache):
        mixed, cache = self.attention(self.norms[0](x), cache, segment_ids=segments)
        x = x + mixed
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x)))), cache


class LM(nnx.Module):
    def __init__(self, spec: LayerSpec, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, spec.dim, rngs=rngs)
        self.blocks = nnx.List([Block(spec, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(spec.dim, rngs=rngs)
        self.head = nnx.Linear(spec.dim, 256, rngs=rngs)

    def hyper_parameters(self):
        """Return the hyper-parameters of the model, which a file of its weights must record."""
        return self.blocks[0].attention.spec.as_dict() | {"layers": len(self.blocks)}

    def __call__(self, tokens, segments=None, caches=None):
        """Return the logits of `tokens`, and the caches to which these tokens were appended."""
        x, caches = self.embed(tokens), list(caches or [None] * len(self.blocks))
        for i, block in enumerate(self.blocks):
            x, caches[i] = block(x, segments, caches[i])
        return self.head(self.norm(x)), caches

    def loss(self, tokens, segments):
        logits, labels = self(tokens[:, :-1], segments[:, :-1])[0], tokens[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # the next byte is in another file, so there is no label
        return each.mean(where=segments[:, 1:] == segments[:, :-1])


@nnx.jit
def step(model: LM, optimizer: nnx.Optimizer, tokens, segments):
    loss, grads = nnx.value_and_grad(LM.loss)(model, tokens, segments)
    optimizer.update(model, grads)
    return loss


evaluate = nnx.jit(LM.loss)


@nnx.jit
def following(model: LM, tokens, caches):
    """Return the likeliest byte after `tokens`, and the caches to which these tokens were
    appended."""
    logits, caches = model(tokens, caches=caches)
    return logits[:, -1:].argmax(-1), caches


def generate(model: LM, prompt: bytes, count: int) -> bytes:
    tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
    caches = [x.attention.init_cache(1, tokens.size + count) for x in model.blocks]
    for _ in range(count):
        tokens, caches = following(model, tokens, caches)
        prompt += bytes([int(tokens[0, 0])])
    return prompt


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--texts", default=f"{sysconfig.get_paths()['stdlib']}/*.py")
    parser.add_argument("--out", type=Path, help="a new file of weights, safetensors")
    parser.add_argument("--load", type=Path, help="weights to begin with, which --out saved")
    parser.add_argument("--prompt", default="import ")
    flags = parser.parse_args(argv)
    for name in SIZES:
        if getattr(flags, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(flags, name)}")
    if flags.out and (flags.out.exists() or not flags.out.parent.is_dir()):
        parser.error(f"--out must be a new file in a folder that is there, got {flags.out}")
    if flags.load and not flags.load.is_file():
        parser.error(f"--load must be a file that --out named, got {flags.load}")
    if not flags.prompt:
        parser.error("--prompt must have a byte, got none")
    paths = map(Path, sorted(glob.glob(flags.texts, recursive=True)))
    data = [x.read_bytes() for x in paths if x.is_file()]
    tokens = np.frombuffer(b"".join(data), np.uint8).astype(np.int32)
    if not data:
        parser.error(f"--texts must name a file, got {flags.texts}")
    if flags.tokens >= len(tokens) // 2:
        limit = f"half of the text's {len(tokens)} bytes"
        parser.error(f"--tokens must be below {limit}, got {flags.tokens}")
    segments = np.repeat(np.arange(len(data), dtype=np.int32), [len(x) for x in data])
    if flags.dim % flags.heads:
        parser.error(f"--dim must be a multiple of --heads={flags.heads}, got {flags.dim}")
    heads, width = (flags.heads, flags.heads // 2 or 1), flags.dim // flags.heads
    try:
        spec = LayerSpec(flags.dim, *heads, width, width, gate="head", kv="shared")
        model = LM(spec, flags.layers, nnx.Rngs(0))
        if flags.load:
            weights.load(flags.load, model)
    except ValueError as error:
        parser.error(str(error))
    optimizer = nnx.Optimizer(model, optax.adamw(flags.lr), wrt=nnx.Param)
    random, row, number = np.random.default_rng(0), np.arange(flags.tokens + 1), 0
    learned = len(tokens) - max(len(row), len(tokens) // 16)
    try:
        for number in range(1, flags.steps + 1):
            rows = random.integers(0, learned - flags.tokens, (flags.batch, 1)) + row
            loss = step(model, optimizer, tokens[rows], segments[rows])
            if number % max(1, flags.steps // 5) == 0:
                print(f"step {number}: loss {float(loss):.4f} nats per byte", flush=True)
    except KeyboardInterrupt:
        print(f"stopped in step {number}", file=sys.stderr)
    starts = range(learned, len(tokens) - flags.tokens, flags.tokens)[:32]
    held_out = [evaluate(model, tokens[None, x + row], segments[None, x + row]) for x in starts]
    loss = np.mean(held_out)
    print(f"held-out loss {loss:.4f} nats per byte")
    if not np.isfinite(loss):
        raise SystemExit("the held-out loss must be finite; no model was saved")
    if flags.out:
        weights.save(flags.out, model)
    written = generate(model, flags.prompt.encode(), flags.new_tokens)
    print(written.decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

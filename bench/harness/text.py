"""Makes attention inputs from real text. The text is Python source. The bytes of the text are the
tokens of a small seeded model, which computes the inputs.

Random normal queries and keys select random blocks. With text, equal contexts attend to each other,
and adjacent queries select mostly the same blocks. The attention of some heads is sharp, and the
attention of other heads is flat. With text, scores and selections have a structure as in real use.
The weights of the model are not trained, but drawn from a fixed seed.
"""

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.types import Branches

VOCABULARY = 256
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# The context of a token is the sum of two parts. The first has the last 16 bytes, with weights that
# decay by 0.85 per byte. The second is the topic, the sum of the last 128 bytes.
RECENT_TOKENS, RECENT_DECAY = 16, 0.85
TOPIC_TOKENS, TOPIC_WEIGHT = 128, 1.5
# Share of the variance of the query and key projections that is common to heads and branches.
SHARED = 0.75
VALUE_SCALE = 0.5
SIZES = ("dim", "n_heads", "n_kv_groups", "d_k", "d_v", "rope_base", "seed")


class Corpus(NamedTuple):
    """The first bytes of the corpus, and the SHA-256 of exactly these bytes."""

    tokens: np.ndarray  # uint8 [size]
    sha256: str
    starts: np.ndarray  # int64 [files + 1]: where each file begins, and the end


class TextInputs(NamedTuple):
    """The arrays that the model computes from the tokens."""

    query: jax.Array  # [B, T, H, D]
    key: Branches[jax.Array]  # [B, S, Hkv, D]
    value: Branches[jax.Array]  # [B, S, Hkv, Dv]
    gates: jax.Array  # [B, T, H, 3]


def corpus(size: int, folder: Path | None = None) -> Corpus:
    """Return the first `size` bytes of the standard library's `*.py` files in sorted order.

    Raises:
      ValueError: the files hold fewer bytes.
    """
    folder = Path(folder or sysconfig.get_paths()["stdlib"])
    data, starts = bytearray(), []
    for path in _sources(folder):
        starts.append(len(data))
        data += path.read_bytes()
        if len(data) >= size:
            break
    if len(data) < size:
        raise ValueError(f"corpus in {folder} must have at least {size} bytes, got {len(data)}")
    used = bytes(data[:size])
    borders = np.array([*starts, size], np.int64)
    return Corpus(np.frombuffer(used, np.uint8), hashlib.sha256(used).hexdigest(), borders)


@functools.lru_cache(1)  # this needs half a second for the standard library
def _sources(folder: Path) -> list[Path]:
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    kept = (path for path in paths if not SKIPPED.intersection(path.parts[:-1]))
    return [folder / path for path in sorted(kept, key=Path.as_posix)]


@functools.partial(jax.jit, static_argnames=(*SIZES, "num_queries", "dtype"))
def project(
    tokens: np.ndarray,
    *,
    dim: int,
    n_heads: int,
    n_kv_groups: int,
    d_k: int,
    d_v: int,
    rope_base: float,
    seed: int = 0,
    num_queries: int | None = None,
    dtype: Any = jnp.float32,
) -> TextInputs:
    """Return the keys and values of `tokens` [B, S], and the queries and gates of the last
    `num_queries` tokens, by default of all tokens. No result depends on later tokens. The results
    are computed in float32 and rounded to `dtype`. The sizes are in `problems.Model`.
    """
    length = tokens.shape[1]
    count = length if num_queries is None else num_queries
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    def mixed(shared, own):
        return SHARED**0.5 * shared + (1 - SHARED) ** 0.5 * own

    embedded = normal(VOCABULARY, dim)[jnp.asarray(tokens, jnp.int32)]  # [B, T, dim]
    hidden = _context(embedded)
    last = hidden[:, length - count :]
    group = n_heads // n_kv_groups
    base = normal(dim, n_kv_groups, d_k)
    query_weight = mixed(jnp.repeat(base, group, axis=1), normal(dim, n_heads, d_k))
    sharpness = jnp.tile(jnp.linspace(0.5, 1.5, group), n_kv_groups)
    query_weight *= sharpness[:, None]
    root = dim**-0.5
    query = jnp.einsum("btm,mhd->bthd", last, query_weight * root)
    query = _rotate(query, rope_base, length - count)
    key, value = [], []
    for _ in Branches._fields:
        weight = mixed(base, normal(*base.shape)) * root
        key.append(_rotate(jnp.einsum("btm,mhd->bthd", hidden, weight), rope_base))
        weight = normal(dim, n_kv_groups, d_v) * root * VALUE_SCALE
        value.append(jnp.einsum("btm,mhd->bthd", hidden, weight))
    logits = jnp.einsum("btm,mhc->bthc", last, normal(dim, n_heads, 3) * root)
    found = TextInputs(query, Branches(*key), Branches(*value), jax.nn.sigmoid(logits))
    return jax.tree.map(lambda x: x.astype(dtype), found)


def _norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _context(embedded):
    """Return the context of each token: its recent bytes in their order, and its topic."""
    length, dim = embedded.shape[1:]

    def earlier(x, by):  # x shifted to later tokens, with zeros at the start
        return jnp.pad(x, ((0, 0), (by, 0), (0, 0)))[:, :length]

    recent = jnp.zeros_like(embedded)
    for lag in range(min(RECENT_TOKENS, length)):
        # Rolled channels distinguish "ab" from "ba".
        recent += RECENT_DECAY**lag * earlier(jnp.roll(embedded, lag * (dim // 8 + 1), -1), lag)
    total = jnp.cumsum(embedded, axis=1)
    topic = total - earlier(total, TOPIC_TOKENS)
    return _norm(_norm(recent) + TOPIC_WEIGHT * _norm(topic))


def _rotate(x, base, begin=0):
    """Apply the rotary position embedding to `x` [B, T, heads, D], whose first token has the
    position `begin`. The two halves of `D` form pairs.
    """
    half = x.shape[-1] // 2
    rate = base ** (-jnp.arange(half, dtype=x.dtype) / half)
    position = begin + jnp.arange(x.shape[1], dtype=x.dtype)
    angle = (position[:, None] * rate)[:, None]  # [T, 1, D/2]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1)

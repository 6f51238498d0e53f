"""What a first call costs in JAX: the stages of `bench.first_call` that run there."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import nsa_jax

TIMES = 5  # lengths never seen


def arrays(length: int, heads: int, kv_heads: int, width: int) -> tuple[jax.Array, ...]:
    """query, key, value, gates of one sequence."""
    shapes = [(heads, width), (kv_heads, width), (kv_heads, width), (heads, 3)]
    keys = jax.random.split(jax.random.key(length), len(shapes))
    return tuple(
        jax.random.normal(key, (1, length, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )


def both() -> Callable[..., Any]:
    """Forward and backward, compiled anew for each shape."""

    def loss(query, key, value, gates):
        out = nsa_jax.attention(query, key, value, gates, implementation="mosaic")
        return jnp.square(out.astype(jnp.float32)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


def seconds(call: Callable[..., Any], given: tuple[jax.Array, ...]) -> float:
    """Of a call and all that it queued."""
    jax.block_until_ready(given)
    start = time.perf_counter()
    jax.block_until_ready(call(*given))
    return time.perf_counter() - start


def lengths(layer: tuple[int, int, int], longest: int, seed: int) -> dict[str, float]:
    """The first call of a process, then lengths never seen, each called once.

    Args:
      layer: query heads, kv heads, columns of a head.
      longest: tokens at most.
    """
    call, draw = both(), random.Random(seed)
    first = seconds(call, arrays(4096, *layer))
    found = []
    for _ in range(TIMES):
        given = arrays(draw.randint(65, longest), *layer)
        found.append(seconds(call, given))
    given = arrays(4096, *layer)
    return {
        "first_both_s": first,
        "lengths": TIMES,
        "new_length_s_median": statistics.median(found),
        "new_length_s_max": max(found),
        "both_s": statistics.median(seconds(call, given) for _ in range(10)),
    }

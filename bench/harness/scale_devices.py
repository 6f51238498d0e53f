"""One sequence over the devices of JAX's process, timed: what `bench.scale` measures in JAX."""

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nsa_jax
from nsa_core import context_layout as layouts

from .scale_problem import RESULTS, Problem, judged, spread


def run(problems: list[Problem], size: int, samples: int) -> None:
    """Measures every problem on the first `size` devices, and prints a line of JSON each."""
    if len(jax.devices()) < size:
        raise NotImplementedError(f"{size} devices are needed, got {len(jax.devices())}")
    mesh = Mesh(np.array(jax.devices()[:size]), ("context",))
    for problem in problems:
        try:
            found = _row(problem, mesh, samples)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = {"status": "unsupported", "reason": str(error).splitlines()[0]}
        print(json.dumps(problem.about | {"devices": size} | found), flush=True)


def _row(problem: Problem, mesh: Mesh, samples: int) -> dict[str, Any]:
    sharding = NamedSharding(mesh, P(None, "context"))
    given = jax.jit(lambda: _drawn(problem), out_shardings=[sharding] * 4)()
    call = _call(problem, mesh)
    jax.block_until_ready(call(*given))
    ms = []
    for _ in range(samples):
        start = time.perf_counter()
        jax.block_until_ready(call(*given))
        ms.append((time.perf_counter() - start) * 1e3)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    found = {
        "status": "ok",
        **spread(ms),
        "memory_mib": None if peak is None else peak / 2**20,
        "compute_ms": None,  # XLA decides which work overlaps transport
        "transport_ms": None,
        "imbalance": None,
    }
    return found | _parity(problem, mesh)


def _drawn(problem: Problem) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (1, problem.S, *shape), problem.dtype)
        for key, shape in zip(keys, problem.shapes, strict=True)
    ]


def _call(problem: Problem, mesh: Mesh | None, **options: Any) -> Callable[..., Any]:
    """A compiled function of query, key, value, gates and perhaps block indices: the output, and
    where they are asked for the gradients for it as its own; without a mesh on one device."""
    place: dict[str, Any] = {}
    if mesh is not None and mesh.size > 1:
        place = {"context_axis": "context", "context_layout": problem.layout}

    def attend(indices, *arrays):
        given = options | place | {"block_indices": indices}
        return nsa_jax.attention(*arrays, config=problem.config, **given)

    def results(*arrays, indices=None):
        function = functools.partial(attend, indices)
        if not problem.gradient:
            return (function(*arrays),)
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(out)

    if not place:
        return jax.jit(results)
    spec = P(None, "context")

    def sharded(*arrays, indices=None):
        extra = [] if indices is None else [indices]
        inner = lambda *x: results(*x[:4], indices=x[4] if extra else None)
        count = 5 if problem.gradient else 1
        mapped = jax.shard_map(
            inner, mesh=mesh, in_specs=(spec,) * (4 + len(extra)), out_specs=(spec,) * count
        )
        return mapped(*arrays, *extra)

    return jax.jit(sharded)


def _parity(problem: Problem, mesh: Mesh) -> dict[str, Any]:
    """As `scale_ranks.Measured.parity`."""
    if mesh.size == 1 or not problem.judged:
        return {"errors": None}
    whole = jax.jit(lambda: _drawn(problem))()
    config = problem.config
    indices = nsa_jax.select_blocks(
        whole[0], nsa_jax.compress(whole[1], config=config), config=config
    )
    wide = [x.astype(jnp.float32) for x in whole]
    expected = _call(problem, None, implementation="xla")(*wide, indices=indices)
    alone = _errors(_call(problem, None)(*whole, indices=indices), expected)
    order = layouts.Shards(problem.layout, mesh.size, 0, 1).order

    def moved(x, places):
        return jnp.concatenate([jnp.split(x, len(places), axis=1)[i] for i in places], axis=1)

    sharding = NamedSharding(mesh, P(None, "context"))
    given = [jax.device_put(moved(x, order), sharding) for x in (*whole, indices)]
    found = _call(problem, mesh)(*given[:4], indices=given[4])
    back = np.argsort(order).tolist()
    ordered = [moved(jax.device_put(x, jax.devices()[0]), back) for x in found]
    return judged(problem, _errors(ordered, expected), alone)


def _errors(results, expected) -> dict[str, float]:
    square = lambda x: float(jnp.square(x.astype(jnp.float32)).mean())
    pairs = zip(RESULTS, results, expected, strict=False)
    return {n: (square(x - y) / square(y)) ** 0.5 for n, x, y in pairs}

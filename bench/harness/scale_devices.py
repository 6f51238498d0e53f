"""Times attention to one sequence that is divided over the devices of a JAX process, for
`bench.scale`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nsa_jax
from nsa_jax import context

from . import timing
from .records import Values
from .scale_problem import RESULTS, Problem, judged

SPEC = P(None, "context")


@contextlib.contextmanager
def devices(size: int) -> Iterator[Mesh]:
    """Return a context with the mesh of the first `size` devices.

    Raises:
      NotImplementedError: There are fewer than `size` devices.
    """
    if len(jax.devices()) < size:
        raise NotImplementedError(f"{size} devices are needed, got {len(jax.devices())}")
    yield Mesh(np.array(jax.devices()[:size]), ("context",))


def row(problem: Problem, mesh: Mesh, samples: int) -> Values:
    sharding = NamedSharding(mesh, SPEC)
    given = jax.jit(lambda: _drawn(problem), out_shardings=[sharding] * 4)()
    call = functools.partial(_call(problem, mesh), None, *given)
    how: Values = {"wait": jax.block_until_ready, "done": True, "warmup": 1}
    ms = timing.in_a_row(call, samples=samples, **how)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    found = {
        "status": "ok",
        **timing.spread(ms),
        "memory_mib": None if peak is None else peak / 2**20,
        "compute_ms": None,  # XLA decides which work overlaps with transport
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
    """Return a compiled function of block indices or None, query, key, value and gates. The
    compiled function returns the output, and if requested the gradients with the output as
    cotangent. Without a mesh the compiled function runs on one device.
    """
    several = mesh is not None and mesh.size > 1
    if several:
        options |= {"context_axis": "context", "context_layout": problem.layout}

    def results(indices, *arrays):
        how = options | {"config": problem.config, "block_indices": indices}
        function = functools.partial(nsa_jax.attention, **how)
        if not problem.gradient:
            return (function(*arrays),)
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(out)

    if several:
        results = jax.shard_map(results, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    return jax.jit(results)


def _parity(problem: Problem, mesh: Mesh) -> Values:
    """Judge the results of all devices, as `scale_ranks.Measured.parity` does."""
    if mesh.size == 1 or problem.S > problem.checked:
        return {"errors": None}
    whole = jax.jit(lambda: _drawn(problem))()
    config = problem.config
    indices = nsa_jax.select_blocks(
        whole[0], nsa_jax.compress(whole[1], config=config), config=config
    )
    wide = [x.astype(jnp.float32) for x in whole]
    expected = _call(problem, None, implementation="xla")(indices, *wide)
    alone = _errors(_call(problem, None)(indices, *whole), expected)
    how: Values = {"context_layout": problem.layout}
    shards = (context.shard_sequence(x, mesh.size, **how) for x in (indices, *whole))
    given = jax.device_put([*shards], NamedSharding(mesh, SPEC))
    found = jax.device_put(_call(problem, mesh)(*given), jax.devices()[0])
    ordered = [context.unshard_sequence(x, mesh.size, **how) for x in found]
    return judged(problem, _errors(ordered, expected), alone)


def _errors(results, expected) -> dict[str, float]:
    square = lambda x: float(jnp.square(x.astype(jnp.float32)).mean())
    pairs = zip(RESULTS, results, expected, strict=False)
    return {n: (square(x - y) / square(y)) ** 0.5 for n, x, y in pairs}

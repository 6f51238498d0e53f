"""Compares two programs that convert selected blocks to half-open ranges of keys.

    python -m bench.ranges
    python -m bench.ranges --S_list=256,1024,4096

v1 is a loop on the host over the blocks of one row after the other. v2 is
`nsa_jax.ranges.to_ranges`, one compiled array program. v1 and v2 must return the same ranges before
their times are measured. The last printed line is the adaptive rule. The adaptive rule gives the
smallest length from which v2 was faster at every measured length, or `never`.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.config import NSAConfig
from nsa_jax import ranges

from .harness import cli, command, problems, timing
from .harness.command import config_of, integers, speed_up
from .harness.measure import guarded
from .harness.records import Record
from .harness.runners import JaxRunner

FLAGS = command.flag_values(
    **command.SIZES,
    B=(1, "Sequences."),
    S_list=(list, "Numbers of tokens; default: 64,256,1024,2048."),
)


def v1(block_indices: np.ndarray, position: np.ndarray, config: NSAConfig) -> np.ndarray:
    """Return the ranges of a selection `[B, T, Hkv, n]`, int32 `[B, T, Hkv, n, 2]`, row by row.
    Adjacent blocks are merged, no range goes beyond the query, and empty slots are `(0, 0)`.
    """
    found, size = np.zeros((*block_indices.shape, 2), np.int32), config.select_block
    for at in np.ndindex(block_indices.shape[:3]):
        runs: list[list[int]] = []
        for block in (x for x in block_indices[at].tolist() if x >= 0):
            start, end = block * size, min((block + 1) * size, int(position[at[:2]]) + 1)
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        found[at][: len(runs)] = np.reshape(runs, (-1, 2))
    return found


def threshold(pairs: Sequence[tuple[Record, Record]]) -> int | None:
    """Return the smallest length from which v2 was faster at every measured length."""
    gains = ((slow.S, speed_up(slow, fast) or 0.0) for slow, fast in pairs)
    return command.least([(length, gain > 1) for length, gain in gains])


def measure(inputs: problems.Inputs, config: NSAConfig, how) -> list[dict]:
    """Return the fields of the records of v1 and v2."""
    shape = inputs.query.shape[:2]
    position = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    step = jax.jit(functools.partial(ranges.to_ranges, config=config))
    indices, places = np.asarray(inputs.block_indices), np.asarray(position)
    expected = v1(indices, places, config)
    differ = int(
        (np.asarray(step(inputs.block_indices, position)) != expected).any((3, 4)).sum()
    )
    parity = {"rows_checked": shape[1], "rows_differ": differ}
    if differ:
        reason = (
            f"the ranges of v1 and v2 differ in {differ} of {expected[..., 0, 0].size} rows"
        )
        return [parity | {"status": "wrong", "reason": reason}] * 2
    first = timing.time_host(
        lambda: v1(indices, places, config), lambda x: x, **{**how, "warmup": 1}
    )
    second = timing.time_host(
        lambda: step(inputs.block_indices, position), jax.block_until_ready, **how
    )
    return [parity | vars(found) for found in (first, second)]


def main(argv: Sequence[str]) -> int:
    lengths = integers("S_list", FLAGS.S_list, (64, 256, 1024, 2048))
    runner, config = JaxRunner(FLAGS.device), config_of(FLAGS)
    gpu = runner.platform != "cpu"
    how, pairs = command.sampling(FLAGS, gpu=False), []  # v1 runs on the host
    results = command.Results("ranges", FLAGS)
    print(f"device: {runner.device}; v1 on the host, v2 compiled by JAX", flush=True)
    for length in lengths:
        at = command.settings(FLAGS, config, gpu, seq_len=length, batch=FLAGS.B)
        inputs = problems.make(at, "random", FLAGS.seed)
        common = command.about(runner, at, inputs) | {"branch": "scores", "mode": "forward"}
        take = lambda inputs=inputs: {"both": measure(inputs, config, how)}
        failed = guarded(f"ranges S={length}", take)
        found = failed.get("both", [failed] * 2)
        names = ("ranges_v1", "ranges_v2")
        first, second = (
            results.add(**common | {"implementation": name} | fields)
            for name, fields in zip(names, found, strict=True)
        )
        pairs.append((first, second))
        equal = None if second.rows_differ is None else second.rows_differ == 0
        results.row(v1=first, v2=second, speedup=speed_up(first, second), equal=equal)
    least = threshold(pairs)
    rule = "never" if least is None else f"from S={least} on"
    print(f"adaptive rule: v2 {rule} (measured at {', '.join(map(str, sorted(lengths)))})")
    return results.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)

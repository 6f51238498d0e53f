"""A selection as half-open ranges of keys: a loop over its rows beside the array program.

    python -m bench.ranges
    python -m bench.ranges --S_list=256,1024,4096

v1 walks over the blocks of one row after the other on the host;
v2 is `nsa_jax.ranges.to_ranges`, one compiled program. Both must give the same ranges before
either is timed. The last line is the adaptive rule: the least length from which on v2 was
faster at every measured length, or never.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from nsa_core.config import NSAConfig
from nsa_jax import ranges

from .harness import cli, command, problems, timing
from .harness.command import config_of, integers, shown, speed_up
from .harness.measure import guarded
from .harness.records import Record
from .harness.runners import JaxRunner

FLAGS = command.flag_values(**command.SIZES)
_own = {"flag_values": FLAGS}
BATCH = flags.DEFINE_integer("B", 1, "Sequences.", lower_bound=1, **_own)
LENGTHS = flags.DEFINE_list("S_list", None, "Lengths; default: 64,256,1024,2048.", **_own)
COLUMNS = ("S", "v1_ms", "v2_ms", "speedup", "equal", "v1_p20_ms", "v1_p80_ms", "v2_p20_ms")
COLUMNS += ("v2_p80_ms", "B", "Hkv", "n", "l_sel", "device", "commit", "status", "reason")


def v1(block_indices: np.ndarray, position: np.ndarray, config: NSAConfig) -> np.ndarray:
    """The ranges of a selection `[B, T, Hkv, n]`, row by row: adjacent blocks are merged, the
    last range ends with the query, slots left over are `(0, 0)`."""
    batch, length, groups, _ = block_indices.shape
    found = np.zeros((*block_indices.shape, 2), np.int32)
    for b in range(batch):
        for t in range(length):
            for g in range(groups):
                runs: list[list[int]] = []
                for block in block_indices[b, t, g].tolist():
                    if block < 0:
                        continue
                    start = block * config.select_block
                    end = min(start + config.select_block, int(position[b, t]) + 1)
                    if runs and runs[-1][1] == start:
                        runs[-1][1] = end
                    else:
                        runs.append([start, end])
                found[b, t, g, : len(runs)] = np.reshape(runs, (-1, 2))
    return found


def threshold(pairs: Sequence[tuple[Record, Record]]) -> int | None:
    """The least length from which on v2 was faster at every measured length."""
    least = None
    for slow, fast in sorted(pairs, key=lambda pair: pair[0].S, reverse=True):
        gain = speed_up(slow, fast)
        if gain is None or gain <= 1:
            break
        least = slow.S
    return least


def measure(inputs: problems.Inputs, config: NSAConfig, how) -> list[dict]:
    """The fields of v1's record and of v2's."""
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
        reason = f"v1 and v2 differ in {differ} of {expected[..., 0, 0].size} rows"
        return [parity | {"status": "wrong", "reason": reason}] * 2
    first = timing.time_host(
        lambda _: v1(indices, places, config), lambda x: x, **{**how, "warmup": 1}
    )
    second = timing.time_host(
        lambda _: step(inputs.block_indices, position), jax.block_until_ready, **how
    )
    return [parity | vars(found) for found in (first, second)]


def row(pair: tuple[Record, Record]) -> dict[str, Any]:
    """A line of the CSV file."""
    base, fast = pair
    cells: dict[str, Any] = {
        "speedup": speed_up(base, fast),
        "equal": None if fast.rows_differ is None else fast.rows_differ == 0,
        "n": base.config["num_selected"],
        "l_sel": base.config["select_block"],
    }
    for name, record in (("v1", base), ("v2", fast)):
        cells |= {f"{name}_ms": record.time_ms}
        cells |= {f"{name}_{p}_ms": getattr(record, f"{p}_ms") for p in ("p20", "p80")}
    same = ("S", "B", "Hkv", "device", "commit", "status", "reason")
    return cells | {name: getattr(fast, name) for name in same}


def line(cells: dict[str, Any]) -> str:
    """What is printed of a length."""
    text = (
        f"S={cells['S']} v1 {shown(cells['v1_ms'], ' ms')}  v2 {shown(cells['v2_ms'], ' ms')}"
    )
    text += f"  speedup {shown(cells['speedup'], 'x', 1)}  equal {cells['equal']}"
    bad = f"  {cells['status']}: {cells['reason']}" if cells["status"] != "ok" else ""
    return text + bad


def main(argv: Sequence[str]) -> int:
    lengths = integers("S_list", LENGTHS.value, (64, 256, 1024, 2048))
    runner, config = JaxRunner(FLAGS.device), config_of(FLAGS)
    gpu = runner.platform != "cpu"
    how, pairs = command.sampling(FLAGS, gpu=False), []  # v1 runs on the host
    results = command.Results("ranges", FLAGS)
    print(f"device: {runner.device}; v1 on the host, v2 compiled by JAX", flush=True)
    for length in lengths:
        at = command.settings(FLAGS, config, gpu, seq_len=length, batch=BATCH.value)
        inputs = problems.make(at, "random", FLAGS.seed)
        common = command.about(runner, at, inputs) | {"branch": "scores", "mode": "forward"}
        both: list[dict] = []

        def take(inputs=inputs, both=both):
            both.extend(measure(inputs, config, how))
            return {}

        failed = guarded(f"ranges S={length}", take, library=False)
        found = both or [failed] * 2
        names = ("ranges_v1", "ranges_v2")
        first, second = (
            results.add(**common | {"implementation": name} | fields)
            for name, fields in zip(names, found, strict=True)
        )
        pair = first, second
        pairs.append(pair)
        print(line(row(pair)), flush=True)
    least = threshold(pairs)
    rule = "never" if least is None else f"from S={least} on"
    print(f"adaptive rule: v2 {rule} (of {', '.join(map(str, sorted(lengths)))})")
    return results.finish(COLUMNS, map(row, pairs))


if __name__ == "__main__":
    cli.run(main, FLAGS)

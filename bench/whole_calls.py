"""What whole calls take in a row, after a rest of the GPU, and as a CUDA graph.

    python -m bench.whole_calls
    python -m bench.whole_calls --only 64k --out variants.jsonl

`bench.shapes` times single calls with flushed caches, one after the other. A GPU at its power
limit is faster after a rest, and calls in a row hide the host. Milliseconds, medians of
`--rounds`; shapes are those of `bench.against`, forward and with gradients, on `mosaic`:

    <shape>                          of calls in a row, nothing flushed
    <shape>, after 50 ms of rest     of a single call, caches flushed

A shape in a CUDA graph is replayed in a row; one of JAX runs compiled. The results of the replay
must have the bits of the calls: exit status 1 where they have not. Whether the numbers are right,
`bench.shapes` reports. Hopper.

Lines of `--out` are those of `bench/records/<device>/kernel_log/variants.jsonl`.
"""

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import against
from .harness import cli, exit_status, records, timing
from .harness.timed_problem import Problem, digest, jax_calls, milliseconds, torch_calls

FLAGS = cli.define(
    only=cli.ONLY,
    rounds=(7, "Samples of each.", 5),
)
cli.define_lines(FLAGS)

REST_SECONDS = 0.05  # as in `timing.RESTED`


def measure(
    problem: Problem, rounds: int, commit: str | None, broken: list[str]
) -> Iterator[tuple[str, list[records.Record]]]:
    """Lines to print, each with those of `--out`; `broken`: gets replays of other bits."""

    def line(name: str, times: Mapping[str, float]):
        made = [
            records.variant("whole_calls", mode, name, time, commit)
            for mode, time in times.items()
        ]
        return f"{name:45} {' / '.join(f'{x:.3f}' for x in times.values())}", made

    of: Any = {"torch": torch_calls, "jax": jax_calls}[problem.framework]
    calls, sync = of(problem)
    replays = dict(calls)  # graphs read the tensors of `calls`
    for name, call in calls.items() if problem.graph else ():
        wanted = digest(call())
        replays[name], found = timing.cuda_graph(call)
        replays[name]()
        sync(found)
        if digest(found) != wanted:
            broken.append(f"{problem.name}, {name}: other bits than without a graph")
            yield broken[-1], []
            return
    in_a_row = {name: [] for name in replays}
    for _ in range(rounds):
        for name, call in replays.items():
            in_a_row[name].append(milliseconds(call, sync))
    yield line(problem.name, {name: statistics.median(x) for name, x in in_a_row.items()})
    if problem.framework == "torch" and not problem.graph:
        how: dict[str, Any] = {"iters": rounds, "rest": REST_SECONDS}
        rested = {
            name: timing.time_cuda_events(lambda _, call=call: call(), **how).time_ms
            for name, call in calls.items()
        }
        yield line(timing.RESTED.format(problem.name), rested)


def main(argv: Sequence[str]) -> int:
    commit, broken = records.environment(FLAGS.commit)["commit"], list[str]()
    how = {"rounds": FLAGS.rounds, "commit": commit, "broken": broken}
    against.measured(FLAGS, against.ROWS, functools.partial(measure, **how))
    return exit_status.WRONG if broken else exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)

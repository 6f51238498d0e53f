"""Times whole calls in three ways: in a series, after a rest of the GPU, and as a CUDA graph.

    python -m bench.whole_calls
    python -m bench.whole_calls --only 64k --out variants.jsonl

`bench.shapes` times single calls with flushed caches. `bench.whole_calls` measures two other
conditions. A GPU at its power limit is faster after a rest, and consecutive calls hide the host
time. Times per call are in milliseconds, as medians of `--rounds`. The shapes are the shapes of
`bench.against`, forward and with gradients, on `mosaic`:

- `<shape>` is a series of calls, without a flush of caches.
- `<shape>, after 50 ms of rest` is a single call with flushed caches (only in eager torch).

A shape with a CUDA graph is a series of replays. A shape of JAX runs compiled. The results of a
replay must be bit-equal to the results of the call; otherwise the exit status is 1. `bench.shapes`
checks that the results are right. A Hopper GPU is needed.

The lines of `--out` have the format of `bench/records/<device>/kernel_log/variants.jsonl`.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from . import run
from .harness import cli, exit_status, timing
from .harness.timed_problem import Problem, digest, jax_calls, milliseconds, torch_calls

FLAGS = cli.define(
    only=cli.ONLY,
    rounds=(7, "Number of samples per time.", 5),
)
cli.define_lines(FLAGS)

REST_SECONDS = 0.05  # as in `timing.RESTED`


def measure(problem: Problem) -> str:
    """Print and record the times of a problem. Return the reason why a replay is wrong, or an
    empty string."""
    of: Any = torch_calls if problem.framework == "torch" else jax_calls
    calls, sync = of(problem)
    replays = dict(calls)  # graphs read the tensors of `calls`
    for name, call in calls.items() if problem.graph else ():
        wanted = digest(call())
        replays[name], found = timing.cuda_graph(call)
        replays[name]()
        sync(found)
        if digest(found) != wanted:
            return (
                f"{problem.name}, {name}: the results with a graph have other bits than without"
            )
    rounds = [
        [milliseconds(call, sync) for call in replays.values()] for _ in range(FLAGS.rounds)
    ]
    medians = map(statistics.median, zip(*rounds, strict=True))
    run.variants(FLAGS, "whole_calls", problem.name, dict(zip(replays, medians, strict=True)))
    if problem in run.EAGER:
        how: dict[str, Any] = {"iters": FLAGS.rounds, "rest": REST_SECONDS}
        rested = {
            name: timing.time_cuda_events(call, **how).time_ms for name, call in calls.items()
        }
        run.variants(FLAGS, "whole_calls", timing.RESTED.format(problem.name), rested)
    return ""


def main(argv: Sequence[str]) -> int:
    status = exit_status.OK
    for problem in run.chosen(FLAGS, run.CALLS, "ms"):
        if wrong := measure(problem):
            print(wrong, flush=True)
            status = exit_status.WRONG
    return status


if __name__ == "__main__":
    cli.run(main, FLAGS)

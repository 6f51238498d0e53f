"""What whole calls take in a row, after a rest of the GPU, and as a CUDA graph.

    python -m bench.whole_calls
    python -m bench.whole_calls --only 64k --out variants.jsonl

`bench.shapes` times a call by itself, caches flushed, one after the other. A GPU at its power
limit is faster after a rest, and calls in a row hide the host. Milliseconds, medians of
`--rounds`; shapes are those of `bench.against`, forward and with gradients, on `mosaic`:

    <shape>                          of calls in a row, nothing flushed
    <shape>, after 50 ms of rest     of a call by itself, caches flushed

A shape in a CUDA graph is replayed in a row; one of JAX runs compiled. The results of the replay
must have the bits of the calls: exit status 1 where they have not. Whether the numbers are right,
`bench.shapes` says. Hopper.

Lines of `--out` are those of `bench/records/<device>/kernel_log/variants.jsonl`.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch
from absl import flags

from . import against
from .harness import cli, exit_status, records, timing
from .harness.timed_problem import Problem, digest, jax_calls, milliseconds, torch_calls

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
ONLY = flags.DEFINE_multi_string("only", [], "Rows whose names begin so (repeatable).", **at)
ROUNDS = flags.DEFINE_integer("rounds", 7, "Samples of each.", lower_bound=5, **at)
OUT = cli.define_lines(FLAGS)
COMMIT = cli.define_commit(FLAGS)

REST_SECONDS = 0.05  # as `timing.RESTED` says


class OtherBits(Exception):
    """A replay computed something else than the calls that were captured."""


def measure(problem: Problem, rounds: int) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Names of `--out`, each with the milliseconds of each pass.

    Raises:
      OtherBits: see there.
    """
    calls, sync = {"torch": torch_calls, "jax": jax_calls}[problem.framework](problem)
    if problem.graph:
        replays = {}
        for name, call in calls.items():
            wanted = digest(call())
            replays[name], found = timing.cuda_graph(call)
            replays[name]()
            sync(found)
            if digest(found) != wanted:
                raise OtherBits(f"{problem.name}, {name}: other bits than without a graph")
        calls = replays
    in_a_row = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            in_a_row[name].append(milliseconds(call, sync))
    yield problem.name, {name: statistics.median(each) for name, each in in_a_row.items()}
    if problem.framework == "torch" and not problem.graph:
        rested = {
            name: timing.time_cuda_events(
                lambda _, call=call: call(), iters=rounds, rest=REST_SECONDS
            )
            for name, call in calls.items()
        }
        yield (
            timing.RESTED.format(problem.name),
            {name: x.time_ms for name, x in rested.items()},
        )


def main(argv: Sequence[str]) -> int:
    rows = against.chosen(ONLY.value, against.ROWS)
    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")
    commit, status = records.environment(COMMIT.value)["commit"], exit_status.OK
    print(f"{torch.cuda.get_device_name()}, ms")
    for problem in rows:
        try:
            for name, times in measure(problem, ROUNDS.value):
                print(f"{name:45}", " / ".join(f"{x:.3f}" for x in times.values()), flush=True)
                if OUT.value:
                    found = [
                        records.variant("whole_calls", mode, name, time, commit)
                        for mode, time in times.items()
                    ]
                    records.append(OUT.value, found)
        except OtherBits as error:
            print(error, flush=True)
            status = exit_status.WRONG
        torch.cuda.empty_cache()
    return status


if __name__ == "__main__":
    cli.run(main, FLAGS)

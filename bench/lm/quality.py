"""NSA against dense attention over several seeds: is one better, and by how much?

    for seed in 0 1 2; do python -m bench.train --model 125m --batch 16 --steps 1000 \
        --framework torch --seed $seed --out runs/$seed; done
    python -m bench.lm.quality runs/*/train.jsonl

Runs of a seed start from the same weights and see the same batches, so a seed is a pair. Of its
pairs the mean difference NSA - dense is given with its standard error, `s / sqrt(n)`, and how
many of these it is away from 0 (`t`, of n - 1 degrees of freedom):

    held-out loss   nats a token, less is better
    recall          nats a token gained where a passage was read before (`bench.lm.recall`)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app

from ..harness import cli
from . import curves, log, watched
from .log import Header, Line, Summary

MEASURES = {"held-out loss": "held_out_loss", "recall": "recall_gain"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one framework and measure, over `seeds`."""

    framework: str
    measure: str
    nsa: float
    dense: float
    mean: float
    error: float
    seeds: tuple[int, ...]

    @property
    def t(self) -> float:
        return self.mean / self.error if self.error else float("nan")


def differences(found: Mapping[str, Sequence[Line]]) -> list[Difference]:
    """Of the runs of files, by name.

    Raises:
      ValueError: a file without both attentions or with a run that did not end; tasks that
        differ in more than the seed; a seed twice; fewer than two seeds.
    """
    pairs: dict[str, dict[int, tuple[Summary, Summary]]] = {}
    tasks = set()
    for name, lines in found.items():
        headers, ends = curves.last(lines, Header), curves.last(lines, Summary)
        for framework in dict.fromkeys(header.framework for header in headers.values()):
            nsa, dense = runs = [f"{framework}-{x}" for x in ("nsa", "dense")]
            lost = [x for x in runs if x not in headers or _status(ends.get(x)) != "ok"]
            if lost:
                raise ValueError(f"{name} must hold a run that ended of {lost[0]}")
            header = headers[nsa]
            rest = {k: v for k, v in header.training.items() if k != "seed"}
            tasks.add(repr(watched.task_of(dataclasses.replace(header, training=rest))))
            seed = header.training["seed"]
            if seed in pairs.setdefault(framework, {}):
                raise ValueError(f"{name} must have a seed of its own, got {seed} again")
            pairs[framework][seed] = ends[nsa], ends[dense]
    if len(tasks) > 1:
        raise ValueError(f"runs must be alike but for the seed, got {' and '.join(tasks)}")
    return [
        each
        for framework, of in pairs.items()
        for measure, field in MEASURES.items()
        if (each := _difference(framework, measure, field, of)) is not None
    ]


def _status(summary: Summary | None) -> str | None:
    return None if summary is None else summary.status


def _difference(framework, measure, field, of) -> Difference | None:
    if len(of) < 2:
        raise ValueError(f"a standard error needs two seeds, got {sorted(of)} of {framework}")
    values = np.array([[getattr(x, field) for x in ends] for ends in of.values()], float)
    if np.isnan(values).any():  # rows that are too short for it
        return None
    apart = values[:, 0] - values[:, 1]
    error = apart.std(ddof=1) / len(apart) ** 0.5
    nsa, dense, mean, error = map(float, (*values.mean(axis=0), apart.mean(), error))
    return Difference(framework, measure, nsa, dense, mean, error, tuple(sorted(of)))


HEAD = ("framework", "measure", "NSA", "dense", "NSA - dense", "standard error", "t", "seeds")


def rows(found: Sequence[Difference]) -> list[list[str]]:
    """The cells below `HEAD`."""
    return [
        [x.framework, x.measure, f"{x.nsa:.4f}", f"{x.dense:.4f}", f"{x.mean:+.4f}"]
        + [f"{x.error:.4f}", f"{x.t:+.1f}", ", ".join(map(str, x.seeds))]
        for x in found
    ]


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        raise app.UsageError("files of runs, a seed each")
    found = differences({path: log.read(Path(path)) for path in argv[1:]})
    for cells in (HEAD, ["---"] * len(HEAD), *rows(found)):
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)

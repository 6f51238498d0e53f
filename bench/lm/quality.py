"""Compares NSA with dense attention over several seeds, and reports with error bounds whether NSA
is as good.

    python -m bench.lm.experiments table_8k --corpus corpus --out runs
    python -m bench.lm.quality runs/52m_8k/*.jsonl
    python -m bench.lm.quality runs/*/train.jsonl         # of bench.train, a seed each

Runs of one seed start from the same weights and read the same batches. A run of NSA and the run of
dense attention with the same seed form a pair of runs. For dense attention the table has means. If
there are several kinds of dense runs, the first kind is used. For every other kind the table has
the mean difference over the pairs of runs, and its standard error `s / sqrt(n)`. From three seeds
on the table also has t, which is the mean difference divided by the standard error, with n - 1
degrees of freedom. Losses are in nats per token. The table has these columns:

- `new`, `near`, `far`: the loss of held-out targets by kind (`bench.lm.measures`).
- `end`: the loss of all held-out targets after the last step.
- `area`: the loss of the training batches, as a mean over the steps after the warm-up.
- `copying`: the step at which near targets cost 1.5 less than new targets.
- `recall`, `copied`: the gain in loss from an earlier passage (`bench.lm.recall`). A separate table
  has `copied` by the distance of the passage.
- `hit / chance`: how often a selection contains the block that a copy continues, by layer.
- `found / unread`: how often the best head selects the block of a copied passage, and how often
  it selects this block if another text replaces the passage.
- `seen`: how often a run sees its text. A run that sees its text several times can memorize the
  text.

A verdict needs at least five pairs of runs. Differences must be within these limits. For the
columns `new` and `end`, the upper bound of 95 % must be within the limit. For other columns, the
mean must be within the limit.

- `new` and `end` may exceed the losses of dense attention by at most 0.3 %.
- `far` may exceed the loss of dense attention by at most 1 %.
- `recall` may be at most 0.03 below the `recall` of dense attention.
- If chance is below a quarter, the best head must select blocks with the copied passage more often
  than with another text, by at least three standard errors.

The exit status is 1 if a bound is exceeded, otherwise 3 if a kind has fewer pairs of runs or lacks
a measure.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app

from nsa_core.layer import LayerSpec

from .. import tables
from ..harness import cli, exit_status
from ..harness.markdown import length, table
from . import curves, log
from .curves import Verdict
from .log import Evaluation, Header, Line, Speed, Step, Summary
from .measures import DISTANCES, KINDS, PARTS, found_by_best

LEAST_PAIRS, LEAST_FOUND = 5, 3  # older runs lack what their heads find
CONFIDENCE = 0.95
BOUNDS = {"new": 0.003, "end": 0.003, "far": 0.01, "recall": 0.03}
UPPER = "new", "end"  # by their upper bounds, as shares; far by its mean, recall in nats
ERRORS, CHANCE = 3, 0.25
COPIED = 1.5  # nats that near targets cost less than new ones
LEAST_RECALL = 0.2  # nats that counting the window's tokens gains at rows of 8k
MEASURES = (*KINDS, "end", "area", "copying", "recall", "copied", *PARTS)
# Values that may differ between compared runs: of dense attention, of training.
OF_DENSE = (
    *("dim", "n_heads", "n_kv_groups", "d_k", "d_v", "rope_base", "rope_scale", "rope_scaling"),
    *("layers", "hidden", "vocabulary", "norm_eps", "key_taps"),
)
OWN = ("seed", "lr", "warmup")
NAMED = "gate", "kv", "n_sel", "key_taps"
# Unnamed.
USUAL = {
    name: getattr(LayerSpec, name) for name in ("l", "d", "l_sel", "n_sel", "w", "kv", "phi")
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run that has ended. `values` has what was measured by name: losses and gains, `hits` (by
    layer: hit, chance), `found` (hit and unread of the best head), `ms`, `epochs`, `records_at` and
    `needle` (`bench.lm.tasks`).
    """

    file: str
    header: Header
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Runs that differ only in the seed, by seed."""

    label: str
    runs: Mapping[int, Ended]

    @property
    def first(self) -> Header:
        """The header of the first run."""
        return next(iter(self.runs.values())).header

    def each(self, name: str) -> np.ndarray:
        """Return the values of those runs that have a value of this name."""
        return np.array([x.values[name] for x in self.runs.values() if name in x.values])

    @property
    def over_text(self) -> np.ndarray:
        """For each run that recorded the hits of heads, the hits of the best head minus the hits
        of this head with another text.
        """
        found = self.each("found")
        return found[:, 0] - found[:, 1] if len(found) else found

    @property
    def chance_is_low(self) -> bool:
        """Whether a random selection has so few hits that hits are meaningful."""
        hits = self.each("hits")
        return bool(len(hits) and hits[..., 1].mean() < CHANCE)


@dataclasses.dataclass(frozen=True)
class Group:
    """Kinds of runs that can be compared, the dense kinds first. `dense` is the first dense
    kind."""

    name: str
    kinds: Sequence[Kind]
    dense: Kind

    @property
    def nsa(self) -> list[Kind]:
        return [kind for kind in self.kinds if not kind.label.startswith("dense")]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The measure of a kind minus the measure of dense attention, over `pairs` seeds. `dense` is
    the mean of dense attention.
    """

    mean: float
    error: float  # NaN for a single pair
    pairs: int
    dense: float
    least: float  # of the pairs
    most: float
    none: bool  # the kind is dense attention itself

    def reach(self, share: float) -> float:
        """Return a distance. With the probability `share`, the true value is below the mean plus
        the returned distance.
        """
        from scipy import special

        return float(special.stdtrit(self.pairs - 1, share)) * self.error

    @property
    def half(self) -> float:
        """Half the width of the two-sided interval."""
        return self.reach((1 + CONFIDENCE) / 2)

    def __format__(self, spec: str) -> str:
        """Return the mean as text in a form such as `.3f`, with the standard error if the error is
        known. The form `.3f and t` adds t. For dense attention, return only the mean.
        """
        form, _, with_t = spec.partition(" and ")
        if self.none:
            return f"{self.dense:{form}}"
        error = "" if math.isnan(self.error) else f" ± {self.error:{form}}"
        # With one degree of freedom t is meaningless.
        several = with_t and self.pairs > 2
        t = f" (t {self.mean / self.error if self.error else math.nan:+.1f})" if several else ""
        return f"{self.mean:+{form}}{error}{t}"


def groups(found: Mapping[str, Sequence[Line]]) -> list[Group]:
    """Group the runs of files, given by name.

    Raises:
      ValueError: A run did not end, a seed occurs twice in one kind, or there is no run of dense
        attention with the same seed and settings.
    """
    grouped: dict[str, list[Ended]] = {}
    for run in _ended(found):
        # the settings that compared runs must share
        header = run.header
        training = {k: v for k, v in header.training.items() if k not in OWN}
        model = {name: header.model.get(name) for name in ("dim", "layers", "vocabulary")}
        alike = header.framework, header.dtype, header.input_sha256, training, model
        grouped.setdefault(repr(alike), []).append(run)
    return [_group(runs) for runs in grouped.values()]


def kind_of(label: str, found: Mapping[str, Sequence[Line]]) -> Kind:
    """Return the kind of the runs in these files. Each file has one run, and the runs must differ
    only in the seed.

    Raises:
      ValueError: A file does not contain one finished run, or its run has the same seed as
        another run.
    """
    for name, lines in found.items():
        if len(curves.last(lines, Header)) != 1:
            raise ValueError(f"{name} must contain one run")
    return _by_seed(label, _ended(found))


def _by_seed(label: str, runs: Iterable[Ended]) -> Kind:
    found: dict[int, Ended] = {}
    for run in runs:
        seed = run.header.training["seed"]
        if found.setdefault(seed, run) is not run:
            raise ValueError(
                f"{run.file}: seed {seed} occurs twice among the runs with {label}; each run "
                "needs its own seed"
            )
    return Kind(label, dict(sorted(found.items())))


def _ended(found: Mapping[str, Sequence[Line]]) -> Iterator[Ended]:
    """Yield the runs of files."""
    for name, every in found.items():
        headers = curves.last(every, Header)
        if not headers:
            raise ValueError(f"{name} must contain a run, got none")
        for run, header in headers.items():
            lines = [line for line in every if line.run == run]
            end = curves.last(lines, Summary).get(run)
            if end is None or end.status != "ok" or end.held_out_loss is None:
                raise ValueError(f"{name} must contain a finished run of {run}")
            evaluations = [line for line in lines if isinstance(line, Evaluation)]
            speed = curves.last(lines, Speed).get(run)
            losses = {line.step: line.loss for line in lines if isinstance(line, Step)}
            warmup = header.training.get("warmup", 0)
            late = [loss for step, loss in losses.items() if step >= warmup]
            values = dict(evaluations[-1].measures) if evaluations else {}
            values |= {
                "end": end.held_out_loss,
                "area": float(np.mean(late)) if late else None,
                "recall": end.recall_gain,
                "copied": end.copied_gain,
                **(end.copied_at or {}),
                "copying": _copying(evaluations),
                "hits": end.hits or None,
                "found": found_by_best(np.array(end.heads)) if end.heads else None,
                "ms": speed and speed.time_ms,
                "epochs": header.epochs,
                "records_at": end.records_at,
                "needle": end.needle,
            }
            yield Ended(name, header, {x: y for x, y in values.items() if y is not None})


def _copying(evaluations: Sequence[Evaluation]) -> float | None:
    """Return the step at which the loss of near targets is `COPIED` lower than the loss of new
    targets. The step is interpolated between evaluations.
    """
    gaps = [(0, 0.0)]  # before training
    for x in evaluations:
        if {"new", "near"} <= x.measures.keys():
            gaps.append((x.steps, x.measures["new"] - x.measures["near"]))
    for (before, low), (after, high) in itertools.pairwise(gaps):
        if high >= COPIED:
            return before + (after - before) * (COPIED - low) / (high - low)
    return None


def _group(runs: Sequence[Ended]) -> Group:
    named: dict[str, list[Ended]] = {}
    for attention, always in (("dense", ()), ("nsa", NAMED)):
        some = [run for run in runs if run.header.attention == attention]
        settings = [
            {x: y for x, y in run.header.model.items() if attention == "nsa" or x in OF_DENSE}
            | {"lr": run.header.training["lr"]}
            for run in some
        ]
        names = dict.fromkeys(itertools.chain(always, *settings))
        for name in names.keys() - always:
            if len({repr(own.get(name)) for own in settings}) == 1:
                del names[name]
        for run, own in zip(some, settings, strict=True):
            stated = [f"{x}={own[x]}" for x in names if own.get(x) not in (None, USUAL.get(x))]
            named.setdefault(" ".join([attention, *stated]), []).append(run)
    kinds = [_by_seed(label, of) for label, of in named.items()]
    dense, about = kinds[0], runs[0].header
    at = about.training
    rows = f"{at['steps']} steps of {at['batch']} x {at['seq_len']} on {about.framework}"
    if not dense.label.startswith("dense"):
        raise ValueError(f"runs of {rows} must include dense attention, got {[*named]}")
    for kind in kinds:
        if alone := kind.runs.keys() - dense.runs.keys():
            raise ValueError(
                f"{dense.label} must have the seeds of {kind.label} in runs of {rows}, but lacks "
                f"the seeds {sorted(alone)}"
            )
    size = dense.first.parameters
    name = f"{size / 1e6:.0f}M, {at['steps']} x {at['batch']} x {length(at['seq_len'])}"
    if about.framework != "torch":
        name += f", {about.framework}"
    seen = max(run.header.epochs or 0 for run in runs)
    if seen > 1:
        name += f", text seen {seen:.1f} times"
    return Group(name, kinds, dense)


def difference(kind: Kind, dense: Kind, measure: str) -> Difference | None:
    """Return the difference from dense attention, or None if a run lacks the measure."""
    pairs = [(run.values, dense.runs[seed].values) for seed, run in kind.runs.items()]
    if any(measure not in x for pair in pairs for x in pair):
        return None
    ours, theirs = np.array([[x[measure] for x in pair] for pair in pairs]).T
    apart = ours - theirs
    ends = float(apart.min()), float(apart.max())
    about = len(apart), float(theirs.mean()), *ends, kind is dense
    return Difference(*_mean_and_error(apart), *about)


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and its standard error. For a single value the error is NaN."""
    several = len(values) > 1
    error = float(values.std(ddof=1) / len(values) ** 0.5) if several else math.nan
    return float(values.mean()), error


def verdicts(group: Group, kind: Kind) -> tuple[list[Verdict], str]:
    """Return the verdicts on a kind of NSA: for each of `BOUNDS`, in order, whether the kind is
    within the bound, then whether its selections find copies. If a verdict is missing, also return
    the reason. There is no verdict on selections if a random selection would often contain the
    copies.
    """
    name, found = f"{kind.label} ({group.name})", []
    if len(kind.runs) < LEAST_PAIRS:
        return (
            [],
            f"a verdict on {name} needs {LEAST_PAIRS} seeds, got the seeds {[*kind.runs]}",
        )
    apart = {x: difference(kind, group.dense, x) for x in BOUNDS}
    if missing := [x for x, y in apart.items() if y is None]:
        return [], f"runs of {name} lack the measures {missing}"
    about = f"{kind.label}, {group.name}"
    for measure, x in apart.items():
        assert x is not None
        less, note = x.mean / x.dense, ""
        if measure in UPPER:
            less, note = (x.mean + x.reach(CONFIDENCE)) / x.dense, ", upper bound of 95 %"
        elif measure == "recall":
            less = -x.mean
        found.append(Verdict(f"{measure} as good, {about}", less, BOUNDS[measure], note))
    if not kind.chance_is_low:
        return found, ""
    over = kind.over_text
    if len(over) < LEAST_FOUND:
        return found, (
            f"{LEAST_FOUND} runs of {name} must have records of what heads find, got {len(over)} "
            "such runs"
        )
    mean, error = _mean_and_error(over)
    note = f", best head: {mean:+.3f} ± {error:.3f} over another text, {len(over)} seeds"
    question = f"selection finds copies, {about}"
    return [*found, Verdict(question, ERRORS * error - mean, 0.0, note)], ""


def _copies_from(kind: Kind) -> str | None:
    """Return the mean step at which runs begin to copy, over the runs that begin to copy. For bytes
    the result is None, since losses per byte are too small for `COPIED`.
    """
    runs, steps = len(kind.each("near")), kind.each("copying")
    if not runs or kind.first.model["vocabulary"] <= 256:
        return None
    few = "" if len(steps) == runs else f" ({len(steps)} of {runs} runs)"
    return f"{steps.mean():.0f}{few}" if len(steps) else "not yet"


def _held(over: np.ndarray) -> str:
    """Return whether selections contain copied passages, judged by hits minus other hits."""
    if len(over) < LEAST_FOUND:
        return "not decided"
    mean, error = _mean_and_error(over)
    held = "yes" if mean >= ERRORS * error else "no"
    return f"{held}: {mean:+.3f} ± {error:.3f}, {len(over)} seeds"


def _decided(kind: Kind, told: Sequence[Verdict], untold: str) -> str:
    """Return the verdict that follows from the bounds."""
    broken = [x.question.split(f", {kind.label}")[0] for x in told if not x.ok]
    if broken:
        return f"no: {', '.join(broken)}"
    if not told:
        return "not decided"
    return "yes, but whether selections find copies is not decided" if untold else "yes"


def line(group: Group, kind: Kind) -> dict[str, Any]:
    """Return the values of a kind for the tables `quality_..` of `tables.yaml`."""
    times, best, epochs, hits = map(kind.each, ("ms", "found", "epochs", "hits"))
    alike = len({x.header.device for x in kind.runs.values()}) == 1
    told, untold = verdicts(group, kind)
    found: dict[str, Any] = {x: difference(kind, group.dense, x) for x in MEASURES} | {
        "at": {x: difference(kind, group.dense, str(x)) for x in DISTANCES},
        "group": group.name,
        "label": kind.label,
        "of_nsa": kind.label.removeprefix("nsa").strip() or None,
        "millions": [x.first.parameters / 1e6 for x in (kind, group.dense)],
        # times of different devices have no mean
        "ms": times.mean() if alike and len(times) else None,
        "found": best.mean(axis=0) if len(best) else None,
        "seen": epochs.max() if len(epochs) == len(kind.runs) else None,
        "seeds": ", ".join(map(str, kind.runs)),
        "pairs": len(kind.runs),
        "copies_from": _copies_from(kind),
        "over_text": _held(kind.over_text),
        "bounds": dict(zip(BOUNDS, told, strict=False)),
        "decided": _decided(kind, told, untold),
    }
    if len(hits):
        mean = hits.mean(axis=0)
        each = " ".join(f"{x:.2f}" for x in mean[:, 0])
        found["hits"] = f"{each} / {mean[:, 1].mean():.2f}"
        found["highest"] = max(mean.tolist())
        # in the layer in which hits exceed chance the most
        over = hits[..., 0] - hits[..., 1]
        found["over_chance"] = _held(over[:, over.mean(axis=0).argmax()])
    return {name: x for name, x in found.items() if x is not None}


def rows(name: str, group: Group) -> list[list[str]]:
    """Return the cells of the table `quality_<name>` below its `head`. A kind without enough runs
    or measures has no row.
    """
    nsa = group.nsa
    least = {
        "found": LEAST_FOUND,
        "bounds": LEAST_PAIRS,
        # The kinds with the most pairs are shown.
        "summary": max([2, *(len(kind.runs) for kind in nsa)]),
    }
    kinds = group.kinds
    if name == "distances":  # of the pairs of runs that have them
        has = lambda kind: {x for x, y in kind.runs.items() if str(DISTANCES[0]) in y.values}
        kinds = [
            Kind(kind.label, {x: kind.runs[x] for x in sorted(has(kind) & has(group.dense))})
            for kind in group.kinds
        ]
        group = Group(group.name, kinds, kinds[0])
        kinds = [kind for kind in kinds if kind.runs]
        kinds = kinds if len(kinds) > 1 else []
    if name in least:
        kinds = [kind for kind in nsa if len(kind.runs) >= least[name]]
    if name == "found":
        kinds = [kind for kind in kinds if kind.chance_is_low]
    if name == "summary":
        # Losses of models without recall depend only on the step at which a model learns to copy.
        recall = ((kind, difference(kind, group.dense, "recall")) for kind in kinds)
        kinds = [k for k, x in recall if x and x.dense + max(0, x.mean) > LEAST_RECALL]
    lines = tables.rows(f"quality_{name}", (line(group, kind) for kind in kinds))
    return [[*cells.values()] for cells in lines]


def head(name: str) -> list[str]:
    return [*tables.KINDS[f"quality_{name}"]["cells"]]


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        raise app.UsageError("arguments must be files of runs")
    found = groups({path: log.read(Path(path)) for path in argv[1:]})
    for name in ("all", "parts", "distances", "found"):
        print(table(head(name), (cells for group in found for cells in rows(name, group))))
    status = exit_status.OK
    kinds = [(group, kind) for group in found for kind in group.nsa]
    if not kinds:
        print("not decided, since no run has NSA", file=sys.stderr)
        status = exit_status.NOT_MEASURED
    for group, kind in kinds:
        told, untold = verdicts(group, kind)
        if untold:
            print(f"not decided: {untold}", file=sys.stderr)
            status = status or exit_status.NOT_MEASURED
        for verdict in told:
            print(verdict)
        if not all(verdict.ok for verdict in told):
            status = exit_status.WRONG
    return status


if __name__ == "__main__":
    cli.run(main, arguments=True)

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
from collections.abc import Container, Iterable, Mapping, Sequence
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
DISTANCE = str(DISTANCES[0])
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
    """A run that has ended. `values` has the measures of the run by name."""

    header: Header
    values: Mapping[str, float]
    hits: Sequence[Sequence[float]]  # by layer: hit, chance
    found: tuple[float, float] | None  # hit and unread of the best head
    ms: float | None

    @property
    def seed(self) -> int:
        return self.header.training["seed"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Runs that differ only in the seed."""

    label: str
    runs: Mapping[int, Ended]

    @property
    def first(self) -> Header:
        """The header of the first run."""
        return next(iter(self.runs.values())).header

    @property
    def hits(self) -> np.ndarray:
        """Hits and chance of the runs that have hits, `[runs, layers, 2]`."""
        return np.array([run.hits for run in self.runs.values() if len(run.hits)])


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
    none: bool = False  # the kind is dense attention itself

    @property
    def t(self) -> float:
        return self.mean / self.error if self.error else math.nan

    def reach(self, share: float) -> float:
        """Return a distance. With the probability `share`, the true value is below the mean plus
        the returned distance.
        """
        from scipy import special

        return float(special.stdtrit(self.pairs - 1, share)) * self.error

    @property
    def upper(self) -> float:
        """The upper end of the one-sided interval."""
        return self.mean + self.reach(CONFIDENCE)

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
        t = f" (t {self.t:+.1f})" if with_t and self.pairs > 2 else ""
        return f"{self.mean:+{form}}{error}{t}"


def groups(found: Mapping[str, Sequence[Line]]) -> list[Group]:
    """Group the runs of files, given by name.

    Raises:
      ValueError: A run did not end, a seed occurs twice in one kind, or there is no run of dense
        attention with the same seed and settings.
    """
    grouped: dict[str, list[tuple[str, Ended]]] = {}
    for name, lines in found.items():
        headers = curves.last(lines, Header)
        if not headers:
            raise ValueError(f"{name} must contain a run, got none")
        for run, header in headers.items():
            grouped.setdefault(_alike(header), []).append((name, _ended(name, run, lines)))
    return [_group(runs) for runs in grouped.values()]


def kind_of(label: str, found: Mapping[str, Sequence[Line]]) -> Kind:
    """Return the kind of the runs in these files. Each file has one run, and the runs must differ
    only in the seed.

    Raises:
      ValueError: A file does not contain one finished run, or its run has the same seed as
        another run.
    """

    def runs():
        for name, lines in found.items():
            try:
                (run,) = curves.last(lines, Header)
            except ValueError:
                raise ValueError(f"{name} must contain one run") from None
            yield name, _ended(name, run, lines)

    return _by_seed(label, runs())


def _by_seed(label: str, runs: Iterable[tuple[str, Ended]]) -> Kind:
    found: dict[int, Ended] = {}
    for name, run in runs:
        if found.setdefault(run.seed, run) is not run:
            raise ValueError(
                f"{name}: seed {run.seed} occurs twice among the runs with {label}; each run "
                "needs its own seed"
            )
    return Kind(label, dict(sorted(found.items())))


def _ended(name: str, run: str, lines: Sequence[Line]) -> Ended:
    mine = [line for line in lines if line.run == run]
    header, end = curves.last(mine, Header).get(run), curves.last(mine, Summary).get(run)
    if header is None or end is None or end.status != "ok" or end.held_out_loss is None:
        raise ValueError(f"{name} must contain a finished run of {run}")
    evaluations = [line for line in mine if isinstance(line, Evaluation)]
    values = dict(evaluations[-1].measures) if evaluations else {}
    values |= {
        "end": end.held_out_loss,
        "area": _area(header, mine),
        "recall": end.recall_gain,
        "copied": end.copied_gain,
        **(end.copied_at or {}),
        "copying": _copying(evaluations),
    }
    speed = curves.last(mine, Speed).get(run)
    return Ended(
        header,
        {name: value for name, value in values.items() if value is not None},
        end.hits or (),
        None if end.heads is None else found_by_best(np.array(end.heads)),
        None if speed is None else speed.time_ms,
    )


def _area(header: Header, lines: Sequence[Line]) -> float | None:
    """Return the mean of the training losses in `lines` after the warm-up."""
    steps = {line.step: line.loss for line in lines if isinstance(line, Step)}
    found = [loss for step, loss in steps.items() if step >= header.training.get("warmup", 0)]
    return float(np.mean(found)) if found else None


def _copying(evaluations: Sequence[Evaluation]) -> float | None:
    """Return the step at which the loss of near targets is `COPIED` lower than the loss of new
    targets. The step is interpolated between evaluations.
    """
    gaps = [(0, 0.0)]  # before training
    for x in evaluations:
        if {"new", "near"} <= x.measures.keys():
            gaps.append((x.steps, x.measures["new"] - x.measures["near"]))
    for (before, low), (after, high) in itertools.pairwise(gaps):
        if low < COPIED <= high:
            return before + (after - before) * (COPIED - low) / (high - low)
    return None


def _alike(header: Header) -> str:
    """Return those settings of a run that compared runs must share."""
    training = {k: v for k, v in header.training.items() if k not in OWN}
    model = {name: header.model.get(name) for name in ("dim", "layers", "vocabulary")}
    return repr((header.framework, header.dtype, header.input_sha256, training, model))


def _settings(header: Header) -> dict[str, Any]:
    """Return the settings that determine the kind of a run."""
    model = header.model
    if header.attention == "dense":
        model = {name: x for name, x in model.items() if name in OF_DENSE}
    return {**model, "attention": header.attention, "lr": header.training["lr"]}


def _group(runs: Sequence[tuple[str, Ended]]) -> Group:
    settings = [_settings(run.header) for _, run in runs]
    differ = {
        attention: _differing([x for x in settings if x["attention"] == attention])
        for attention in ("dense", "nsa")
    }
    named: dict[str, list[tuple[str, Ended]]] = {}
    for run, own in zip(runs, settings, strict=True):
        names = differ[own["attention"]]
        if own["attention"] == "nsa":
            names = dict.fromkeys([*NAMED, *names])
        stated = [f"{x}={own[x]}" for x in names if own.get(x) not in (None, USUAL.get(x))]
        named.setdefault(" ".join([own["attention"], *stated]), []).append(run)
    kinds = [_by_seed(label, of) for label, of in named.items()]
    kinds.sort(key=lambda kind: not kind.label.startswith("dense"))
    dense, about = kinds[0], runs[0][1].header
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
    seen = max((run.header.epochs or 0 for _, run in runs))
    if seen > 1:
        name += f", text seen {seen:.1f} times"
    return Group(name, kinds, dense)


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    return [x for x in names if len({repr(each.get(x)) for each in settings}) > 1]


def difference(kind: Kind, dense: Kind, measure: str) -> Difference | None:
    """Return the difference from dense attention, or None if a run lacks the measure."""
    pairs = [(run.values, dense.runs[seed].values) for seed, run in kind.runs.items()]
    if any(measure not in x for pair in pairs for x in pair):
        return None
    ours, theirs = np.array([[x[measure] for x in pair] for pair in pairs]).T
    apart = ours - theirs
    least, most = float(apart.min()), float(apart.max())
    about = len(apart), float(theirs.mean()), least, most
    return Difference(*_mean_and_error(apart), *about, kind is dense)


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and its standard error. For a single value the error is NaN."""
    several = len(values) > 1
    error = float(values.std(ddof=1) / len(values) ** 0.5) if several else math.nan
    return float(values.mean()), error


def verdicts(group: Group, kind: Kind) -> list[Verdict]:
    """Return for each of `BOUNDS`, in order, whether a kind of NSA is within the bound.

    Raises:
      NotImplementedError: There are too few pairs of runs for a verdict, or a measure is missing.
    """
    if len(kind.runs) < LEAST_PAIRS:
        raise NotImplementedError(
            f"a verdict on {kind.label} ({group.name}) needs {LEAST_PAIRS} seeds, got the seeds "
            f"{[*kind.runs]}"
        )
    found, missing = [], []
    for name, bound in BOUNDS.items():
        x = difference(kind, group.dense, name)
        if x is None:
            missing.append(name)
            continue
        less, note = (x.mean / x.dense), ""
        if name in UPPER:
            less, note = x.upper / x.dense, ", upper bound of 95 %"
        elif name == "recall":
            less = -x.mean
        about = f"{name} as good, {kind.label}, {group.name}"
        found.append(Verdict(about, less, bound, note))
    if missing:
        raise NotImplementedError(
            f"runs of {kind.label} ({group.name}) lack the measures {missing}"
        )
    return found


def selection(group: Group, kind: Kind) -> list[Verdict]:
    """Return whether selections of NSA find copies. There is no verdict if a random selection
    would often contain the copies.

    Raises:
      NotImplementedError: There are too few runs for a verdict.
    """
    if not _chance_is_low(kind):
        return []
    over = _over_text(kind)
    if len(over) < LEAST_FOUND:
        raise NotImplementedError(
            f"{LEAST_FOUND} runs of {kind.label} ({group.name}) must have records of what heads "
            f"find, got {len(over)} such runs"
        )
    mean, error = _mean_and_error(over)
    note = f", best head: {mean:+.3f} ± {error:.3f} over another text, {len(over)} seeds"
    about = f"selection finds copies, {kind.label}, {group.name}"
    return [Verdict(about, ERRORS * error - mean, 0.0, note)]


def _chance_is_low(kind: Kind) -> bool:
    """Return whether a random selection has so few hits that hits are meaningful."""
    return bool(len(kind.hits) and kind.hits[..., 1].mean() < CHANCE)


def _over_chance(kind: Kind) -> np.ndarray:
    """For each run and for passages at random positions, return the hits minus chance, in the layer
    with the highest mean."""
    over = kind.hits[..., 0] - kind.hits[..., 1]
    return over[:, over.mean(axis=0).argmax()]


def _over_text(kind: Kind) -> np.ndarray:
    """For each run that recorded the hits of heads, return the hits of the best head minus the hits
    of this head with another text.
    """
    return np.array([x.found[0] - x.found[1] for x in kind.runs.values() if x.found])


def _copies_from(kind: Kind) -> str | None:
    """Return the mean step at which runs begin to copy, over the runs that begin to copy. For bytes
    the result is None, since losses per byte are too small for `COPIED`.
    """
    runs = [
        x.values
        for x in kind.runs.values()
        if "near" in x.values and x.header.model["vocabulary"] > 256
    ]
    steps = [x["copying"] for x in runs if "copying" in x]
    if not runs or not steps:
        return "not yet" if runs else None
    few = "" if len(steps) == len(runs) else f" ({len(steps)} of {len(runs)} runs)"
    return f"{np.mean(steps):.0f}{few}"


def _held(over: np.ndarray) -> str:
    """Return whether selections contain copied passages, judged by hits minus other hits."""
    if len(over) < LEAST_FOUND:
        return "not decided"
    mean, error = _mean_and_error(over)
    held = "yes" if mean >= ERRORS * error else "no"
    return f"{held}: {mean:+.3f} ± {error:.3f}, {len(over)} seeds"


def _decided(kind: Kind, told: Sequence[Verdict], untold: Sequence[str]) -> str:
    """Return the verdict that follows from the bounds."""
    broken = [x.question.split(f", {kind.label}")[0] for x in told if not x.ok]
    if broken:
        return f"no: {', '.join(broken)}"
    if not told:
        return "not decided"
    return "yes, but whether selections find copies is not decided" if untold else "yes"


def _told(group: Group, kind: Kind) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts that are possible, and the reasons for the missing verdicts."""
    told, untold = [], []
    for judge in (verdicts, selection):
        try:
            told += judge(group, kind)
        except NotImplementedError as error:
            untold.append(str(error))
            break
    return told, untold


def line(group: Group, kind: Kind) -> dict[str, Any]:
    """Return the values of a kind for the tables `quality_..` of `tables.yaml`."""
    runs, hits = kind.runs.values(), kind.hits
    alike = len({x.header.device for x in runs}) == 1  # times of different devices have no mean
    times = [x.ms for x in runs if x.ms is not None and alike]
    best = [x.found for x in runs if x.found is not None]
    seen = [x.header.epochs for x in runs]
    told, untold = _told(group, kind)
    found: dict[str, Any] = {x: difference(kind, group.dense, x) for x in MEASURES} | {
        "at": {x: difference(kind, group.dense, str(x)) for x in DISTANCES},
        "group": group.name,
        "label": kind.label,
        "of_nsa": kind.label.removeprefix("nsa").strip() or None,
        "millions": [x.first.parameters / 1e6 for x in (kind, group.dense)],
        "ms": np.mean(times) if times else None,
        "found": np.mean(best, axis=0) if best else None,
        "seen": None if None in seen else max(x for x in seen if x is not None),
        "seeds": ", ".join(map(str, kind.runs)),
        "pairs": len(runs),
        "copies_from": _copies_from(kind),
        "over_text": _held(_over_text(kind)),
        "bounds": dict(zip(BOUNDS, told, strict=False)),
        "decided": _decided(kind, told, untold),
    }
    if len(hits):
        mean = hits.mean(axis=0)
        each = " ".join(f"{x:.2f}" for x in mean[:, 0])
        found["hits"] = f"{each} / {mean[:, 1].mean():.2f}"
        found["highest"] = max(mean.tolist())
        found["over_chance"] = _held(_over_chance(kind))
    return {name: x for name, x in found.items() if x is not None}


def _with_distances(group: Group) -> Group:
    """Return the pairs of runs for which copied passages were measured by distance."""

    def measured(kind: Kind, seeds: Container[int]) -> Kind:
        runs = {k: x for k, x in kind.runs.items() if k in seeds and DISTANCE in x.values}
        return Kind(kind.label, runs)

    dense = measured(group.dense, group.dense.runs)
    others = [measured(kind, dense.runs) for kind in group.kinds[1:]]
    there = [kind for kind in others if kind.runs]
    return Group(group.name, [dense, *there] if there else [], dense)


def _shown(name: str, group: Group) -> Group:
    """Return the group with only those kinds that have a row in the table `name`."""
    enough = lambda kinds, least: [kind for kind in kinds if len(kind.runs) >= least]
    kinds = group.kinds
    if name == "distances":
        return _with_distances(group)
    if name == "found":
        kinds = filter(_chance_is_low, enough(kinds, LEAST_FOUND))
    elif name == "bounds":
        kinds = enough(group.nsa, LEAST_PAIRS)
    elif name == "summary":
        # The kinds with the most pairs are shown. Losses of models without recall depend only on
        # the step at which a model learns to copy.
        kinds = enough(group.nsa, max([2, *(len(kind.runs) for kind in group.nsa)]))
        recall = ((kind, difference(kind, group.dense, "recall")) for kind in kinds)
        least = LEAST_RECALL
        kinds = (k for k, x in recall if x and max(x.dense, x.dense + x.mean) > least)
    return dataclasses.replace(group, kinds=[*kinds])


def rows(name: str, group: Group) -> list[list[str]]:
    """Return the cells of the table `quality_<name>` below its `head`."""
    some = _shown(name, group)
    lines = tables.rows(f"quality_{name}", (line(some, kind) for kind in some.kinds))
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
        told, untold = _told(group, kind)
        for reason in untold:
            print(f"not decided: {reason}", file=sys.stderr)
            status = status or exit_status.NOT_MEASURED
        for verdict in told:
            print(verdict)
        if not all(verdict.ok for verdict in told):
            status = exit_status.WRONG
    return status


if __name__ == "__main__":
    cli.run(main, arguments=True)

"""Compares NSA with dense attention over several seeds, and reports whether it is as good, with
bounds.

    python -m bench.lm.experiments table_8k --corpus corpus --out runs
    python -m bench.lm.quality runs/52m_8k/*.jsonl
    python -m bench.lm.quality runs/*/train.jsonl         # of bench.train, a seed each

Runs of a seed start from the same weights and see the same batches, so a seed is a pair. Dense
attention's means are given (of the first dense run, where they differ in more than the seed), and
of all others the mean difference of the pairs, its standard error `s / sqrt(n)`, and how many of
these it is away from 0 (t, of n - 1 degrees of freedom; from three seeds on). Losses are in nats
a token:

    new, near, far   of held-out targets by earlier tokens in the row (`bench.lm.measures`)
    end              of all of them, after the last step
    area             of the training batches, mean over the steps after the warm-up
    copying          the step at which near targets cost 1.5 less than new ones
    recall, copied   gained where a passage was read before (`bench.lm.recall`); copied also by
                     how far away it is, in a table of its own
    hit / chance     how often a selection holds the block that a copy continues, by layer
    found / unread   the same for the head that finds copies best, and with another text
    seen             how often a run sees its text; above 1 it can memorize the text

Bounds decide, over at least five pairs, as upper bounds of 95 % if no mean is named:

    new and end at most 0.3 % over dense; far, by its mean, at most 1 %; recall, by its mean, at
    least dense's less 0.03; where chance is under a quarter, the best head holds blocks with the
    copied passage more often than with another text, by three standard errors

The exit status is 1 if a bound is exceeded, otherwise 3 if a kind has fewer pairs or lacks a
measure.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app

from nsa_core.layer import LayerSpec

from ..harness import cli, exit_status
from ..harness.markdown import length, table
from . import curves, log
from .curves import Verdict
from .log import Evaluation, Header, Line, Speed, Step, Summary
from .measures import DISTANCES, KINDS, PARTS, found_by_best

LEAST_PAIRS, LEAST_FOUND = 5, 3  # older runs lack what their heads find
CONFIDENCE = 0.95
WORSE, FAR_WORSE, RECALL_LESS = 0.003, 0.01, 0.03
ERRORS, CHANCE = 3, 0.25
COPIED = 1.5  # nats that near targets cost less than new ones
LEAST_RECALL = 0.2  # nats that counting the window's tokens gains at rows of 8k
LOSSES = (*KINDS, "end", "area")
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
    """A run that has ended; `values` of the measures that it has, by name."""

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


@dataclasses.dataclass(frozen=True)
class Group:
    """Kinds that can be compared, the first dense one first."""

    name: str
    kinds: Sequence[Kind]

    @property
    def dense(self) -> Kind:
        return self.kinds[0]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The measure of a kind minus that of dense attention, over `pairs` seeds. `dense` is the
    mean of the latter.
    """

    mean: float
    error: float  # NaN of one pair
    pairs: int
    dense: float
    least: float  # of the pairs
    most: float

    @property
    def t(self) -> float:
        return self.mean / self.error if self.error else math.nan

    def reach(self, share: float) -> float:
        """Return the distance above the mean below which the true value is with this
        probability.
        """
        from scipy import special

        return float(special.stdtrit(self.pairs - 1, share)) * self.error

    @property
    def upper(self) -> float:
        """The one-sided bound."""
        return self.mean + self.reach(CONFIDENCE)

    @property
    def half(self) -> float:
        """Half of the two-sided interval."""
        return self.reach((1 + CONFIDENCE) / 2)

    def shown(self, digits: int = 3) -> str:
        """Return the mean, and its error where there is one."""
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:+.{digits}f}{error}"

    def __str__(self) -> str:
        # With one degree of freedom t is meaningless.
        return self.shown() + (f" (t {self.t:+.1f})" if self.pairs > 2 else "")


def groups(found: Mapping[str, Sequence[Line]]) -> list[Group]:
    """Group the runs of files, given by name.

    Raises:
      ValueError: a run did not end; a seed twice of one kind; runs without dense attention's of
        the same seed that are alike but for attention.
    """
    grouped: dict[str, list[tuple[str, Ended]]] = {}
    for name, lines in found.items():
        headers = curves.last(lines, Header)
        if not headers:
            raise ValueError(f"{name} must hold a run, got none")
        for run, header in headers.items():
            grouped.setdefault(_alike(header), []).append((name, _ended(name, run, lines)))
    return [_group(runs) for runs in grouped.values()]


def kind_of(label: str, found: Mapping[str, Sequence[Line]]) -> Kind:
    """Return the runs of files with one run each, which differ only in the seed.

    Raises:
      ValueError: a file does not contain one finished run, or has the seed of another.
    """
    runs: dict[int, Ended] = {}
    for name, lines in found.items():
        try:
            (run,) = curves.last(lines, Header)
        except ValueError:
            raise ValueError(f"{name} must hold one run") from None
        ended = _ended(name, run, lines)
        if runs.setdefault(ended.seed, ended) is not ended:
            raise ValueError(
                f"{name}: seed {ended.seed} occurs twice among the runs with {label}; each run "
                "needs its own seed"
            )
    return Kind(label, dict(sorted(runs.items())))


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
    """Return the mean of the training losses after the warm-up, of the steps that the lines
    have.
    """
    steps = {line.step: line.loss for line in lines if isinstance(line, Step)}
    found = [loss for step, loss in steps.items() if step >= header.training.get("warmup", 0)]
    return float(np.mean(found)) if found else None


def _copying(evaluations: Sequence[Evaluation]) -> float | None:
    """Return the step at which near targets cost `COPIED` less than new ones, between
    evaluations.
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
    """Return the settings that compared runs must share."""
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
    kinds: dict[str, dict[int, Ended]] = {}
    for (name, run), own in zip(runs, settings, strict=True):
        names = differ[own["attention"]]
        if own["attention"] == "nsa":
            names = dict.fromkeys([*NAMED, *names])
        stated = [f"{x}={own[x]}" for x in names if own.get(x) not in (None, USUAL.get(x))]
        label = " ".join([own["attention"], *stated])
        if run.seed in kinds.setdefault(label, {}):
            raise ValueError(
                f"{name}: seed {run.seed} occurs twice among the runs with {label}; each run "
                "needs its own seed"
            )
        kinds[label][run.seed] = run
    about = runs[0][1].header
    at = about.training
    rows = f"{at['steps']} steps of {at['batch']} x {at['seq_len']} on {about.framework}"
    dense = [label for label in kinds if label.startswith("dense")]
    if not dense:
        raise ValueError(f"runs of {rows} must include dense attention, got {[*kinds]}")
    for label, of in kinds.items():
        alone = of.keys() - kinds[dense[0]].keys()
        if alone:
            raise ValueError(
                f"{dense[0]} must have the seeds of {label} in runs of {rows}, but lacks "
                f"{sorted(alone)}"
            )
    order = dense + [label for label in kinds if label not in dense]
    size = next(iter(kinds[dense[0]].values())).header.parameters
    row = length(at["seq_len"])
    name = f"{size / 1e6:.0f}M, {at['steps']} x {at['batch']} x {row}"
    if about.framework != "torch":
        name += f", {about.framework}"
    seen = max((run.header.epochs or 0 for _, run in runs))
    if seen > 1:
        name += f", text seen {seen:.1f} times"
    return Group(name, [Kind(label, dict(sorted(kinds[label].items()))) for label in order])


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    return [x for x in names if len({repr(each.get(x)) for each in settings}) > 1]


def difference(kind: Kind, dense: Kind, measure: str) -> Difference | None:
    """Return the difference from dense attention, or None if a run lacks the measure."""
    pairs = [(run.values, dense.runs[seed].values) for seed, run in kind.runs.items()]
    if any(measure not in x for pair in pairs for x in pair):
        return None
    values = np.array([[x[measure] for x in pair] for pair in pairs])
    apart = values[:, 0] - values[:, 1]
    several = len(apart) > 1
    error = float(apart.std(ddof=1) / len(apart) ** 0.5) if several else math.nan
    mean, least, most = (float(f(apart)) for f in (np.mean, np.min, np.max))
    return Difference(mean, error, len(apart), float(values[:, 1].mean()), least, most)


def verdicts(group: Group, kind: Kind) -> list[Verdict]:
    """Whether a kind of NSA keeps the bounds.

    Raises:
      NotImplementedError: there are too few pairs to say, or a measure is missing.
    """
    if len(kind.runs) < LEAST_PAIRS:
        raise NotImplementedError(
            f"a verdict on {kind.label} ({group.name}) needs {LEAST_PAIRS} seeds, got "
            f"{[*kind.runs]}"
        )
    of = {name: difference(kind, group.dense, name) for name in ("new", "end", "far", "recall")}
    missing = [name for name, each in of.items() if each is None]
    if missing:
        raise NotImplementedError(f"runs of {kind.label} ({group.name}) lack {missing}")
    new, end, far, recall = (x for x in of.values() if x is not None)
    about = f"{kind.label}, {group.name}"
    found = [
        Verdict(f"{name} as good, {about}", x.upper / x.dense, WORSE, ", upper bound of 95 %")
        for name, x in (("new", new), ("end", end))
    ]
    found.append(Verdict(f"far as good, {about}", far.mean / far.dense, FAR_WORSE))
    found.append(Verdict(f"recall as good, {about}", -recall.mean, RECALL_LESS))
    return found


def selection(group: Group, kind: Kind) -> list[Verdict]:
    """Whether selections of NSA find copies. There is no verdict if chance is high.

    Raises:
      NotImplementedError: there are too few runs to say.
    """
    if not _chance_is_low(kind):
        return []
    over = _over_text(kind)
    if len(over) < LEAST_FOUND:
        raise NotImplementedError(
            f"{LEAST_FOUND} runs of {kind.label} ({group.name}) must have what heads find, "
            f"got {len(over)}"
        )
    mean, error = _mean_and_error(over)
    note = f", best head: {mean:+.3f} ± {error:.3f} over another text, {len(over)} seeds"
    about = f"selection finds copies, {kind.label}, {group.name}"
    return [Verdict(about, float(ERRORS * error - mean), 0.0, note)]


def _chance_is_low(kind: Kind) -> bool:
    """Whether chance is low enough for hits to be meaningful."""
    chance = [layer[1] for run in kind.runs.values() for layer in run.hits]
    return bool(chance) and bool(np.mean(chance) < CHANCE)


def _over_chance(kind: Kind) -> np.ndarray:
    """For each run, the hits for passages at random positions minus chance, in the layer with
    the highest mean."""
    hits = np.array([run.hits for run in kind.runs.values() if len(run.hits)])
    over = hits[..., 0] - hits[..., 1]
    return over[:, over.mean(axis=0).argmax()]


def _over_text(kind: Kind) -> np.ndarray:
    """Return the hits of the best head of each run that has them, less those with another text."""
    return np.array([x.found[0] - x.found[1] for x in kind.runs.values() if x.found])


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


HEAD = ("model, steps x rows", "attention", "M-parameters", "ms", *LOSSES, "copying", "recall")
HEAD = (*HEAD, "copied", "hit / chance", "found / unread", "seen", "seeds")


def rows(group: Group) -> list[list[str]]:
    """Return the cells below `HEAD`."""
    found = []
    for kind in group.kinds:
        runs = list(kind.runs.values())
        header = runs[0].header
        alike = len({x.header.device for x in runs}) == 1  # times of two devices have no mean
        times = [x.ms for x in runs if x.ms is not None and alike]
        hits = [np.array(x.hits) for x in runs if len(x.hits)]
        seen = {x.header.epochs for x in runs}
        found.append(
            [
                *(group.name, kind.label, f"{header.parameters / 1e6:.1f}"),
                f"{np.mean(times):.1f}" if times else "-",
                *(
                    _cell(kind, group.dense, name)
                    for name in (*LOSSES, "copying", "recall", "copied")
                ),
                _hits(hits),
                _found(kind),
                "-" if None in seen else f"{max(x for x in seen if x is not None):.2f}",
                ", ".join(map(str, kind.runs)),
            ]
        )
    return found


PART_HEAD = ("model, steps x rows", "attention", *PARTS)


def part_rows(group: Group) -> list[list[str]]:
    """Return the cells below `PART_HEAD`: losses by position in the row."""
    return [
        [group.name, kind.label, *(_cell(kind, group.dense, name) for name in PARTS)]
        for kind in group.kinds
    ]


DISTANCE = str(DISTANCES[0])
DISTANCE_HEAD = ("model, steps x rows", "attention", *map(str, DISTANCES), "seeds")


def distance_rows(group: Group) -> list[list[str]]:
    """Return the cells below `DISTANCE_HEAD`: copied passages by distance, from the pairs for which
    it was measured.
    """
    kinds = [
        Kind(
            kind.label, {seed: run for seed, run in kind.runs.items() if DISTANCE in run.values}
        )
        for kind in group.kinds
    ]
    dense, *others = kinds
    paired = [
        Kind(x.label, {seed: run for seed, run in x.runs.items() if seed in dense.runs})
        for x in others
    ]
    return [
        [
            *(group.name, kind.label),
            *(_cell(kind, dense, str(each)) for each in DISTANCES),
            ", ".join(map(str, kind.runs)),
        ]
        for kind in (dense, *paired)
        if kind.runs and any(x.runs for x in paired)
    ]


FOUND_HEAD = ("model, steps x rows", "NSA", "at random places, over chance")
FOUND_HEAD += ("just beyond the window, over another text",)


def found_rows(group: Group) -> list[list[str]]:
    """Return the cells below `FOUND_HEAD`: copied passages in selections, for kinds with enough
    runs, where chance is low.
    """
    return [
        [
            *(group.name, _of_nsa(kind)),
            *map(_found_cell, (_over_chance(kind), _over_text(kind))),
        ]
        for kind in group.kinds
        if len(kind.runs) >= LEAST_FOUND and _chance_is_low(kind)
    ]


def _found_cell(over: np.ndarray) -> str:
    if len(over) < LEAST_FOUND:
        return "not decided"
    mean, error = _mean_and_error(over)
    held = "yes" if mean >= ERRORS * error else "no"
    return f"{held}: {mean:+.3f} ± {error:.3f}, {len(over)} seeds"


ANSWER = ("new", "far", "end", "recall")
ANSWER_HEAD = (*ANSWER, "copying", "hit / chance", "found / unread", "seeds")


def answer_row(kind: Kind, dense: Kind) -> list[str]:
    """Return the cells below `ANSWER_HEAD`: differences from `dense`, the absolute steps of
    copying, and hits in the layer with the highest ones.
    """
    hits = [np.array(x.hits) for x in kind.runs.values() if len(x.hits)]
    highest = max(np.mean(hits, axis=0).tolist()) if hits else None
    return [
        *(_cell(kind, dense, name, with_t=False) for name in ANSWER),
        _copies_from(kind),
        "-" if highest is None else "{:.2f} / {:.2f}".format(*highest),
        _found(kind),
        ", ".join(map(str, kind.runs)),
    ]


def _copies_from(kind: Kind) -> str:
    """Return the mean step at which runs begin to copy, of those that do; none of bytes, which cost
    too little for `COPIED`.
    """
    runs = [
        x.values
        for x in kind.runs.values()
        if "near" in x.values and x.header.model["vocabulary"] > 256
    ]
    steps = [x["copying"] for x in runs if "copying" in x]
    if not runs or not steps:
        return "not yet" if runs else "-"
    few = "" if len(steps) == len(runs) else f" ({len(steps)} of {len(runs)} runs)"
    return f"{np.mean(steps):.0f}{few}"


def _found(kind: Kind) -> str:
    best = [x.found for x in kind.runs.values() if x.found is not None]
    return " / ".join(f"{x:.2f}" for x in np.mean(best, axis=0)) if best else "-"


BOUNDS_HEAD = ("model, steps x rows", "NSA")
BOUNDS_HEAD += tuple(f"{name}, 95 % bound at most {WORSE:+.1%}" for name in ("new", "end"))
BOUNDS_HEAD += (f"far, mean at most {FAR_WORSE:+.1%}",)
BOUNDS_HEAD += (f"recall, mean at least {-RECALL_LESS:+.2f}", "pairs")


def bound_rows(group: Group) -> list[list[str]]:
    """Return the cells below `BOUNDS_HEAD`, of kinds with enough pairs."""
    found = []
    for kind in group.kinds:
        if kind.label.startswith("dense") or len(kind.runs) < LEAST_PAIRS:
            continue
        *losses, recall = verdicts(group, kind)
        values = [f"{x.value:+.1%}" for x in losses] + [f"{-recall.value:+.2f}"]
        told = (
            f"{'yes' if x.ok else 'no'}: {value}"
            for x, value in zip((*losses, recall), values, strict=True)
        )
        found.append([group.name, _of_nsa(kind), *told, str(len(kind.runs))])
    return found


def _of_nsa(kind: Kind) -> str:
    return kind.label.removeprefix("nsa").strip() or "-"


SUMMARY = ("new", "end", "recall")
SUMMARY_HEAD = ("model, steps x rows", "NSA", "M-parameters; of dense attention")
SUMMARY_HEAD += ("loss of new tokens", "of all tokens", "recall", "pairs", "as good as dense")


def summary_rows(group: Group) -> list[list[str]]:
    """Return the cells below `SUMMARY_HEAD`, for the kinds with the most pairs, at least two: dense
    attention, then the difference of NSA with its 95 % interval and the range of the pairs. Kinds
    without any recall are omitted, since their losses show only when a model learns to copy.
    """
    kinds = [kind for kind in group.kinds if not kind.label.startswith("dense")]
    pairs = max((len(kind.runs) for kind in kinds), default=0)
    found = []
    for kind in kinds:
        of = {name: difference(kind, group.dense, name) for name in SUMMARY}
        recall = of["recall"]
        recalled = recall and max(recall.dense, recall.dense + recall.mean) > LEAST_RECALL
        if len(kind.runs) < max(pairs, 2) or not recalled:
            continue
        ours, theirs = (next(iter(x.runs.values())) for x in (kind, group.dense))
        sizes = (f"{x.header.parameters / 1e6:.1f}" for x in (ours, theirs))
        cells = (
            "-"
            if x is None
            else f"{x.dense:.2f}, {x.mean:+.3f} ± {x.half:.3f} ({x.least:+.2f} to {x.most:+.2f})"
            for x in of.values()
        )
        size, decided = "; ".join(sizes), _decided(group, kind)
        found.append([group.name, _of_nsa(kind), size, *cells, str(pairs), decided])
    return found


def _decided(group: Group, kind: Kind) -> str:
    """Return the verdict from the bounds."""
    told, untold = _told(group, kind)
    broken = [x.question.split(f", {kind.label}")[0] for x in told if not x.ok]
    if broken:
        return f"no: {', '.join(broken)}"
    if not told:
        return "not decided"
    return "yes, but for what selections find: not decided" if untold else "yes"


def _told(group: Group, kind: Kind) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts that are possible, and the reasons for the missing ones."""
    told, untold = [], []
    for judge in (verdicts, selection):
        try:
            told += judge(group, kind)
        except NotImplementedError as error:
            untold.append(str(error))
            break
    return told, untold


def _cell(kind: Kind, dense: Kind, measure: str, with_t: bool = True) -> str:
    found = difference(kind, dense, measure)
    steps = measure == "copying"
    if found is None:
        return "-"
    if kind is dense:
        return f"{found.dense:.{0 if steps else 3}f}"
    if steps:
        return found.shown(digits=0)
    return str(found) if with_t else found.shown()


def _hits(hits: Sequence[np.ndarray]) -> str:
    if not hits:
        return "-"
    mean = np.mean(hits, axis=0)
    return f"{' '.join(f'{x:.2f}' for x in mean[:, 0])} / {mean[:, 1].mean():.2f}"


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        raise app.UsageError("files of runs")
    found = groups({path: log.read(Path(path)) for path in argv[1:]})
    parts = (HEAD, rows), (PART_HEAD, part_rows), (DISTANCE_HEAD, distance_rows)
    for head, of in (*parts, (FOUND_HEAD, found_rows)):
        print(table(head, itertools.chain.from_iterable(map(of, found))))
    status = exit_status.OK
    kinds = [(group, kind) for group in found for kind in group.kinds]
    kinds = [(group, kind) for group, kind in kinds if not kind.label.startswith("dense")]
    if not kinds:
        print("not decided: no run with NSA", file=sys.stderr)
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

"""Generates the tables of the documentation from records, so that no figure is typed by hand.

python -m bench.doc_tables            # reports tables that differ from the records
python -m bench.doc_tables --write    # and writes them

A document names a table between two comments, and this command fills in the table:

    <!-- table: attention mode=forward -->
    <!-- end table -->

Most tables show fields of recorded lines, as `bench/tables.yaml` describes. The options of these
tables are `device`, `commit` (the first digits of a commit) and the options in the description of
the table. The value of an option is one value, or several values separated by commas. The other
tables are made by functions:

| table | content | options |
|---|---|---|
| `summary` | times of NSA and of dense attention in a few rows | `device` |
| `first_call` | the costs of a first call (`bench.first_call`) | `device` |
| `quality` | NSA against dense attention over seeds (`bench.lm.quality`) | `part`, `steps` |
| `experiment` | the results of an experiment of `bench.lm.experiments` | `name`, `runs`, `seeds` |
| `solved` | the share of records that trained models solve | `setting`, `runs` |
| `versions` | the results of `make test-versions` | `names` |
| `parallel_training` | training on several GPUs compared with one | `device` |
| `parity` | the worst error of each path, from all records of `bench.compare` | |
| `crossovers` | the answers of the first chart of `bench.report` | |
| `seed_names` | scripts, commands and tests (docs/seed.md), and their names here | |
| `seed_variables` | environment variables, and their flags here | |

The command also writes three pictures. `docs/crossover.svg` is the first chart of `bench.report`.
`docs/distance.svg` shows the gain from an earlier passage by its distance.
`docs/needle.svg` shows which needles four models find, by length and depth.

A cell shows the newest record of its shape, or the status of a record that failed. `-` means that
there is no record, or that the path was refused. The column `commit` lists the commits of all
figures in a row. The exit status is 0. Without `--write` the exit status is 1 if a table or picture
differs. The exit status is 2 if a marker is invalid.
"""

import dataclasses
import functools
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from .harness import cli, records, seed_env, seed_names
from .harness.markdown import commits, length, table
from .harness.records import Record
from .lm import curves, quality, tasks, watched
from .lm import log as train_log
from .lm.log import Header, Speed
from .lm.measures import DISTANCES
from .reports import crossover, plots, render, sources
from .tables import KINDS, MISSING, REFUSED, Line, cell, packing
from .tuners.dense_crossover import PAPER

FLAGS = flags.FlagValues()
WRITE = flags.DEFINE_bool("write", False, "Write the tables.", flag_values=FLAGS)

ROOT = records.FOLDER.parents[1]
DEVICE = records.FOLDER / "nvidia-h100-80gb-hbm3"
CHARTED = "nvidia-h200"  # the device of `docs/crossover.svg`
DOCUMENTS = ("README.md", "docs/*.md", "docs/kernels/*.md", "bench/records/README.md")
DOCUMENTS += ("bench/records/log/quality_tables.md",)
MARKER = re.compile(
    r"(<!-- table: (?P<what>[^>]*?) -->\n)(?P<body>.*?)(<!-- end table -->)", re.S
)
VERSIONS = "kernel_log/versions.jsonl"  # of the folder of the CPU
SHORTEST = 2048  # tokens; shorter records only show correctness
PASSES = {"forward": "forward", "fwdbwd": "forward and backward"}
DENSE = "cudnn", "flash", "fa4"  # the fastest of these is compared with NSA


def lines_of(name: str, device: str = DEVICE.name) -> list[Line]:
    """Return the lines of a file of a device's folder, with the fields of `_derived`."""
    return [x | _derived(x) for x in records.flat_lines(DEVICE.parent / device / name)]


def _derived(x: Line) -> Line:
    """Return fields that are derived from the fields of a line, such as `kernel`. A line of
    attention also has its sizes as text, `whole_name`, `papers` and `place`. `whole_name` is the
    name of the implementation before it is split. `papers` states whether the line has
    the paper's config, bfloat16 and at least `SHORTEST` tokens. `place` orders the rows by the
    number of query columns, largest first, then by length, longest first.
    """
    if "kind" in x:
        return {"kernel": "NSA" if x["attention"] == "nsa" else x["implementation"]}
    if x.get("bench") == "scale":  # one GPU has no transport
        alone = dict.fromkeys(("efficiency", "exposed_ms", "imbalance"))
        return alone if x["devices"] == 1 else {"order_of_tokens": x["layout"]}
    if x.get("bench") == "block_selection":
        return {"call": f"{x['mode']} {x['implementation']}"}
    if "branch" not in x:
        return {}
    heads, kv_heads, width, value_width = x["H"], x["Hkv"], x["D"], x["Dv"]
    kind, slash, _ = x["implementation"].partition("/")
    dense = x["branch"] == "dense"
    return {
        "kernel": kind if dense or slash else "NSA",
        "implementation": None if dense else kind,
        "whole_name": x["implementation"],
        "tokens": f"{x['B']} x {length(x['T'])}" if x["B"] > 1 else length(x["T"]),
        "heads": f"{heads} / {kv_heads} ({heads // kv_heads})",
        "widths": f"{width}" if width == value_width else f"{width} / {value_width}",
        "bits": "e4m3" if "compute_dtype" in x["config"] else "16",
        "papers": x["dtype"] == "bfloat16"
        and PAPER.items() <= x["config"].items()
        and x["T"] == x["S"] >= SHORTEST,
        "place": [-heads * width, kv_heads, width, -x["T"], x["B"], value_width, x["input"]],
    }


def summary(device: str = CHARTED) -> str:
    """Return the times of NSA and of the fastest dense kernel on some problems, and of packed
    rows.
    """
    found, lines = [], {mode: chosen("attention", device, mode=mode) for mode in PASSES}
    for what, sizes in KINDS["summary"].items():
        about = sizes | {"framework": "torch", "input": "random"}
        for mode, which in PASSES.items():
            last = {x["kernel"]: x for x in lines[mode] if about.items() <= x.items()}
            dense = [last[x] for x in DENSE if x in last and last[x]["status"] == "ok"]
            if "NSA" not in last or len(dense) < len(DENSE):
                raise ValueError(
                    f"{device} must have records of {what} by NSA and each of {DENSE}"
                )
            found.append((which, what, last["NSA"], min(dense, key=lambda x: x["time_ms"])))
    # The first shape of `bench.packed`, compared with separate rows.
    documents = (packed := chosen("packed", device))[0]["documents"]
    newest = {(x["form"], x["mode"]): x for x in packed if x["documents"] == documents}
    forms = {
        form: [newest.get((form, mode), {}) for mode in PASSES.values()]
        for form in ("rows", "varlen", "cu_seqlens")
    }
    about = {"found": found, "passes": PASSES.values(), "packed": packing(documents)}
    return render.filled("summary.md.jinja", **about, **forms)


def chosen(name: str, device: str = "", commit: str = "", **options: str) -> list[Line]:
    """Return the lines of a table of `KINDS`.

    Args:
      name: The table.
      device: Folder of the records. Defaults to the folder in the table's description, or to
        `DEVICE`.
      commit: The first digits of the commits, separated by commas. By default all commits are used.
      options: The options of a marker other than `device` and `commit`.

    Raises:
      ValueError: The table has no such option, or no line has a value that an option lists.
    """
    kind = KINDS[name]
    known, only = kind.get("options", {}), kind.get("only", {})
    if unknown := options.keys() - known:
        raise ValueError(f"no option {sorted(unknown)}")
    lines = [
        line
        for file in kind["files"]
        for each in lines_of(file, device or kind.get("device", DEVICE.name))
        if (line := kind.get("default", {}) | each)
        and all(line[field] in values for field, values in only.items())
        and (line.get("commit") or "").startswith(tuple(commit.split(",")))
    ]
    for field, value in (known | options).items():
        texts = [str(line.get(field)).replace(" ", "") for line in lines]
        if missing := {*value.split(",")} - {*texts}:
            raise ValueError(f"{kind['files']} have no {field} {missing.pop()!r}")
        wanted = ["None", *value.split(",")]
        lines = [
            x for each in wanted for x, text in zip(lines, texts, strict=True) if text == each
        ]
    rank = lambda x, field: [*only[field]].index(x[field]) if field in only else x[field]
    lines.sort(key=lambda line: [rank(line, field) for field in kind.get("sort", ())])
    words = kind.get("words", {})
    return [line | {x: words[x].get(line[x], line[x]) for x in words} for line in lines]


def made(name: str, lines: Iterable[Line]) -> str:
    """Return a table of `KINDS` from these lines. Lines with equal cells `row` share a row, in
    which the last line of each column counts. Rows without a figure are left out, and columns of
    the template `column` without a figure.
    """
    kind = KINDS[name]
    found: dict[tuple, dict[str, Line]] = {}
    for line in lines:
        row: list[Any] = [cell(x, line) for x in kind["row"].values()]
        row += (repr(line[x]) for x in kind.get("apart", ()))
        found.setdefault((*row,), {})[cell(kind.get("column", ""), line)] = line
    for names, of in found.items():  # a refused call has no column
        found[names] = {x: y for x, y in of.items() if not x or y.get("status") != REFUSED}
    if needs := {*kind.get("needs", ())}:
        found = {names: of for names, of in found.items() if needs & of.keys()}
    seen = dict.fromkeys(x for of in found.values() for x in of)
    columns = kind.get("columns") or [(x, x) for x in seen]
    if "column" not in kind:
        columns = [("", *x) for x in kind["cells"].items()]
    shown = []
    for column, title, *own in columns:
        (template,) = own or [kind["cells"]]
        cells = [cell(template, of.get(column, {})) for of in found.values()]
        if not column or {*cells} - {MISSING}:
            shown.append((column, title, cells))
    ends = kind.get("commits", {"commit": ""})
    rows = []
    for (names, of), *cells in zip(found.items(), *(x[2] for x in shown), strict=True):
        if {*cells} - {MISSING}:
            measured = [x for x, *_ in shown if x in of]
            about = (commits(of[x] for x in measured if x.startswith(y)) for y in ends.values())
            rows.append([*names[: len(kind["row"])], *cells, *about])
    return table([*kind["row"], *(x[1] for x in shown), *ends], rows)


def of_lines(name: str, **options: str) -> str:
    return made(name, chosen(name, **options))


def first_call(device: str) -> str:
    """Return the last measurement of `bench.first_call`, together with its target."""
    stage = {line["stage"]: line for line in lines_of("kernel_log/first_call.jsonl", device)}
    return render.filled("first_call.md.jinja", stages=stage.values(), **stage)


def _crossovers() -> tuple[str, list[crossover.Panel]]:
    """Return the device and the panels of the first chart of `bench.report`."""
    report = sources.read(sorted((DEVICE.parent / CHARTED).glob("*.jsonl")))
    (found,) = crossover.panels(report.records, report.training_lines).items()
    return found


def crossovers() -> str:
    """Return the table of crossovers in the first chart of `bench.report`."""
    device, panels = _crossovers()
    return render.filled("crossovers.md.jinja", device=device, panels=panels)


def parallel_training(device: str = DEVICE.name) -> str:
    """Return a row per run of parallel training. A run on several devices is compared with the run
    on one device.
    """
    runs = []
    for path in sorted((DEVICE.parent / device / "train").glob("*.jsonl")):
        lines = train_log.read(path)
        ((run, header),) = curves.last(lines, Header).items()
        task = repr([run, *watched.task_of(header)])
        runs.append((task, header, curves.last(lines, Speed)[run], curves.losses(lines)[run]))
    single = {task: (x, y, z) for task, x, y, z in runs if x.parallel is None}
    made_of: list[Line] = []
    for task, header, speed, losses in runs:
        line = dataclasses.asdict(speed) | {"how": curves.devices(header)}
        line["commits"] = commits([header])
        if header.parallel and task in single:
            one, one_speed, expected = single[task]
            far = curves.difference(losses, expected)
            line |= {"first": far[: watched.PARITY_STEPS].max(), "far": far.max()}
            rates = [(x.tokens_per_s or 0) / x.devices for x in (speed, one_speed)]
            line |= {"kept": rates[0] / rates[1], "commits": commits([header, one])}
        made_of.append(line)
    place = lambda x: (f"{x['batch']} x {x['seq_len']}", x["framework"] != "torch", x["how"])
    return made("parallel_training", sorted(made_of, key=place))


def parity(found: Sequence[Record] | None = None) -> str:
    """Return a row per path, with the problem on which the path's largest error is closest to its
    bound. If the path fails on a problem, the row has that problem. The argument `found` defaults
    to all records of `bench.compare`.
    """
    if found is None:
        paths = sorted(DEVICE.parent.glob("*/compare.jsonl"))
        found = [r for path in paths for r in records.read(path)]
    problem = operator.attrgetter(*"B T S H Hkv D Dv dtype input".split())
    badness = lambda r: (r.status != "ok", r.error_rms is not None, r.bound_share or 0.0)
    paths = [
        {
            "path": path,
            "rows": rows,
            "worst": max(rows, key=badness),
            "problems": {*map(problem, rows)},
            "judged_by_rms": {problem(r) for r in rows if r.error_rms is not None},
            "groups": {r.H // r.Hkv for r in rows},
        }
        for path, rows in render.judged(found, "device").items()
    ]
    return render.filled("parity.md.jinja", paths=paths)


@functools.cache
def _quality_groups() -> list[quality.Group]:
    """Return the kinds of attention with their results over seeds, setting by setting."""
    settings: dict[str, dict[str, list[train_log.Line]]] = {}
    for path in sorted(DEVICE.parent.glob("*/quality/*/*.jsonl"), key=lambda path: path.name):
        settings.setdefault(path.parent.name, {})[str(path)] = train_log.read(path)
    return [group for found in settings.values() for group in quality.groups(found)]


def quality_table(part: str, steps: str = "") -> str:
    """Return a table that compares NSA with dense attention. `part` is "summary" (the kinds with
    the most pairs of runs), "bounds", "distances" or "found". `steps` is the number of training
    steps of the runs, by default any.
    """
    found = (cells for group in _quality_groups() for cells in quality.rows(part, group))
    wanted = (cells for cells in found if not steps or f" {steps} x " in cells[0])
    return table(quality.head(part), wanted)


def _kind(setting: str, run: str, seeds: str = "") -> quality.Kind:
    """Return the recorded runs of a variant; `seeds` is as in `experiment`."""
    found = {
        str(path): train_log.read(path)
        for path in sorted(DEVICE.parent.glob(f"*/quality/{setting}/{run}-*.jsonl"))
        if not seeds or path.stem.rpartition("-")[2] in seeds.split(",")
    }
    return quality.kind_of(run, found)


def experiment(name: str, runs: str = "", seeds: str = "") -> str:
    """Return the results of an experiment. The results are the means of dense attention, and the
    differences of the other runs from dense attention. `runs` and `seeds` are comma-separated
    lists. `runs` and `seeds` default to all.
    """
    from .lm.experiments import EXPERIMENTS, VARIANTS

    at = EXPERIMENTS[name]
    names = at.runs[0], *(runs.split(",") if runs else at.runs[1:])
    what = {run: VARIANTS[run].what for run in names}
    dense, *others = (_kind(at.setting, run, seeds) for run in names)
    kinds = [kind for kind in (dense, *others) if kind.runs]
    cells = quality.rows("answers", quality.Group(name, kinds, dense))
    rows = ([f"`{x.label}`", what[x.label], *y] for x, y in zip(kinds, cells, strict=True))
    return table(["run", "description", *quality.head("answers")], rows)


def solved(setting: str, runs: str) -> str:
    """Return the share of records that each run solves, by distance. A second row has `hit` and
    `chance` (`bench.lm.tasks`), if the model has a selection.
    """
    found = {run: _kind(setting, run).each("records_at") for run in runs.split(",")}
    return render.filled("solved.md.jinja", found=found, distances=[*map(str, DISTANCES[:-1])])


def versions(names: str) -> str:
    """Return the last run of each of `names`, which are separated by commas."""
    last = {line["name"]: line for line in lines_of(VERSIONS, "cpu")}
    found = [last[name] for name in names.split(",")]
    return render.filled("versions.md.jinja", found=found)


def drawn(old: str, data: Any, draw: Callable[[], str]) -> str:
    """Return the picture `old`, or a new picture if the data have changed. A picture of the same
    data is not drawn again, since other versions of matplotlib draw the same data differently.
    """
    mark = f"<!-- data: {hashlib.sha256(repr(data).encode()).hexdigest()} -->"
    return old if mark in old else f"{draw().rstrip()}\n{mark}\n"


def crossover_picture(old: str) -> str:
    """Return `docs/crossover.svg`."""
    _, each = _crossovers()
    data = [(x.name, x.answer, x.curves) for x in each if x.drawn]
    return drawn(old, data, lambda: plots.answers(each))


def distance_picture(old: str) -> str:
    """Return `docs/distance.svg`."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for title, (setting, seeds, runs) in KINDS["pictures"]["distance"].items():
        for run, label in runs.items():
            kind = _kind(setting, run, seeds)
            gains = [kind.each(str(n)).tolist() for n in DISTANCES]
            found.setdefault(title, {})[label] = gains
    return drawn(old, found, lambda: plots.distances(found, DISTANCES))


def needle_picture(old: str) -> str:
    """Return `docs/needle.svg`."""
    setting, runs = KINDS["pictures"]["needle"]
    found = {}
    for run, label in runs.items():
        (found[label],) = _kind(setting, run).each("needle")
    return drawn(old, found, lambda: plots.needles(found, tasks.NEEDLE_DEPTHS))


PICTURES = {
    "docs/crossover.svg": crossover_picture,
    "docs/distance.svg": distance_picture,
    "docs/needle.svg": needle_picture,
}
TABLES: Mapping[str, Callable[..., str]] = {
    **{name: functools.partial(of_lines, name) for name in KINDS},
    "quality": quality_table,
    "seed_names": functools.partial(render.filled, "seed_names.md.jinja", names=seed_names),
    "seed_variables": functools.partial(render.filled, "seed_env.md.jinja", env=seed_env),
} | {
    x.__name__: x
    for x in (summary, first_call, versions, parallel_training, experiment, solved)
    + (crossovers, parity)
}


def filled(text: str, name: str) -> str:
    """Return `text` with every table generated from records. `name` is the name of the document in
    error messages.

    Raises:
      ValueError: A marker names an unknown table, or an option that the table does not have.
    """

    def fill(match: re.Match[str]) -> str:
        kind, *options = match["what"].split()
        if kind not in TABLES:
            raise ValueError(f"{name}: table must be one of {sorted(TABLES)}, got {kind!r}")
        try:
            body = TABLES[kind](**dict(option.split("=", 1) for option in options))
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{name}: table {match['what']!r}: {error}") from None
        return f"{match[1]}{body}{match[4]}"

    return MARKER.sub(fill, text)


def documents(root: Path = ROOT) -> list[Path]:
    return [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]


def main(argv: Sequence[str]) -> int:
    makers: dict[Path, Callable[[str], str]] = {
        path: functools.partial(filled, name=path.name) for path in documents()
    } | {ROOT / name: picture for name, picture in PICTURES.items()}
    old = {path: path.read_text() if path.exists() else "" for path in makers}
    new = {path: make(old[path]) for path, make in makers.items()}
    stale = [path for path, text in new.items() if text != old[path]]
    for path in stale:
        if WRITE.value:
            path.write_text(new[path])
        print(f"{path.relative_to(ROOT)}: {'written' if WRITE.value else 'differs'}")
    return int(bool(stale) and not WRITE.value)


if __name__ == "__main__":
    cli.run(main, FLAGS)

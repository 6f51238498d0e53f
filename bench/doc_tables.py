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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from .harness import cli, records, seed_env, seed_names
from .harness.markdown import length, table
from .harness.records import Record
from .lm import curves, quality, tasks, watched
from .lm import log as train_log
from .lm.log import Header, Speed
from .lm.measures import DISTANCES
from .reports import crossover, plots, render, sources
from .tables import KINDS, MISSING, REFUSED, Line, cell, packing, rows
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


def commits(found: Iterable[Any]) -> str:
    """Return the commits of these lines, without repetitions."""
    names = (x.get("commit") if isinstance(x, dict) else x.commit for x in found)
    return ", ".join(dict.fromkeys(name[:7] for name in names if name)) or MISSING


def lines_of(name: str, device: str = DEVICE.name) -> list[Line]:
    """Return the lines of a file of a device's folder, with the fields of `_derived`."""
    return [x | _derived(x) for x in records.flat_lines(DEVICE.parent / device / name)]


def _derived(x: Line) -> Line:
    """Return fields that are derived from the fields of a line, such as `kernel`. A line of
    attention also has its sizes as text, `papers` and `place`. `papers` states whether the line has
    the paper's config, bfloat16 and at least `SHORTEST` tokens. `place` orders the rows by the
    number of query columns, largest first, then by length, longest first.
    """
    if "kind" in x:
        return {"kernel": "NSA" if x["attention"] == "nsa" else x["implementation"]}
    if x.get("bench") == "scale":  # one GPU has no transport
        alone = dict.fromkeys(("efficiency", "exposed_ms", "imbalance"))
        return alone if x["devices"] == 1 else {"order_of_tokens": x["layout"]}
    if "branch" not in x:
        return {}
    heads, kv_heads, width, value_width = x["H"], x["Hkv"], x["D"], x["Dv"]
    kind, slash, _ = x["implementation"].partition("/")
    dense = x["branch"] == "dense"
    return {
        "kernel": kind if dense or slash else "NSA",
        "implementation": None if dense else kind,
        "tokens": f"{x['B']} x {length(x['T'])}" if x["B"] > 1 else length(x["T"]),
        "heads": f"{heads} / {kv_heads} ({heads // kv_heads})",
        "widths": f"{width}" if width == value_width else f"{width} / {value_width}",
        "bits": "e4m3" if "compute_dtype" in x["config"] else "16",
        "papers": x["dtype"] == "bfloat16"
        and PAPER.items() <= x["config"].items()
        and x["T"] == x["S"] >= SHORTEST,
        "place": [-heads * width, kv_heads, width, -x["T"], x["B"], value_width, x["input"]],
    }


def newest(lines: Iterable[Line], **wanted: Any) -> Line | None:
    """Return the newest line whose fields have these values, or None."""
    found = [x for x in lines if wanted.items() <= x.items()]
    return max(reversed(found), key=lambda x: x["time"], default=None)


def _time(line: Line | None) -> str:
    return MISSING if line is None else cell("{time_ms:ms}", line)


def summary(device: str = CHARTED) -> str:
    """Return the times of NSA and of the fastest dense kernel on some problems, and of packed
    rows.
    """
    found, lines = [], {mode: chosen("attention", device, mode=mode) for mode in PASSES}
    for what, sizes in KINDS["summary"].items():
        for mode, which in PASSES.items():
            about = sizes | {"framework": "torch", "input": "random"}
            ours, *others = (newest(lines[mode], kernel=x, **about) for x in ("NSA", *DENSE))
            dense = [x for x in others if x and x["status"] == "ok"]
            if ours is None or len(dense) < len(DENSE):
                raise ValueError(
                    f"{device} must have records of {what} by NSA and each of {DENSE}"
                )
            found.append((which, what, ours, min(dense, key=lambda x: x["time_ms"])))
    # The first shape of `bench.packed`, compared with separate rows.
    documents = (packed := chosen("packed", device))[0]["documents"]
    forms = {
        form: [
            newest(packed, mode=mode, form=form, documents=documents) or {}
            for mode in PASSES.values()
        ]
        for form in ("rows", "varlen", "cu_seqlens")
    }
    about = {"found": found, "passes": PASSES.values(), "packed": packing(documents)}
    return render.filled("summary.md.jinja", **about, **forms, time=_time, commits=commits)


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
    known = kind.get("options", {})
    if unknown := options.keys() - known:
        raise ValueError(f"no option {sorted(unknown)}")
    only = kind.get("only", {})
    files = kind["file"] if isinstance(kind["file"], list) else [kind["file"]]
    lines = [
        line | {"order": [_rank(only, line, x) for x in kind.get("order", ())]}
        for file in files
        for each in lines_of(file, device or kind.get("device", DEVICE.name))
        if (line := kind.get("default", {}) | each)
        and all(line[field] in values for field, values in only.items())
        and (line.get("commit") or "").startswith(tuple(commit.split(",")))
    ]
    for field, value in (known | options).items():
        texts = [str(line.get(field)).replace(" ", "") for line in lines]
        if missing := {*value.split(",")} - {*texts}:
            raise ValueError(f"{kind['file']} has no {field} {missing.pop()!r}")
        wanted = ["None", *value.split(",")]
        lines = [
            x for each in wanted for x, text in zip(lines, texts, strict=True) if text == each
        ]
    if "newest" in kind:
        lines = [*{cell(kind["newest"], x): x for x in lines}.values()]
    lines.sort(key=lambda line: [line[field] for field in kind.get("sort", ())])
    words = kind.get("words", {})
    return [line | {x: words[x].get(line[x], line[x]) for x in words} for line in lines]


def _rank(only: Mapping[str, list], line: Line, field: str) -> Any:
    """Return the rank of a line by a field: the value, or its position in the list of `only`."""
    return only[field].index(line[field]) if field in only else line[field]


def made(name: str, lines: Iterable[Line]) -> str:
    """Return a table of `KINDS` from these lines. Each line is a row. If the table has a template
    `column`, a line is one cell, and lines with equal cells `row` share a row.
    """
    kind = KINDS[name]
    if "column" not in kind:
        cells = kind["row"] | kind["cells"]
        rows = (
            [*(cell(x, line) for x in cells.values()), commits(line.get("of", [line]))]
            for line in lines
        )
        return table([*cells, "commit"], rows)
    found: dict[tuple, dict[str, Line]] = {}
    for line in lines:
        row: list[Any] = [cell(x, line) for x in kind["row"].values()]
        row += map(line.get, kind.get("apart", ()))
        found.setdefault((*row,), {})[cell(kind["column"], line)] = line
    for names, of in found.items():  # a refused call is no cell
        found[names] = {x: y for x, y in of.items() if y.get("status") != REFUSED}
    if "rows" in kind:
        found = {(x,): found.get((x,), {}) for x in kind["rows"]}
    needs = {*kind.get("needs", ())}
    found = {x: of for x, of in found.items() if not needs or needs & of.keys()}
    if "order" in kind:
        place = lambda item: next(iter(item[1].values()))["order"]
        found = dict(sorted(found.items(), key=place))
    columns = []
    seen = dict.fromkeys(x for of in found.values() for x in of)
    for column, title, *own in kind.get("columns") or ((x, x) for x in seen):
        (template,) = own or [kind["cells"]]
        cells = [cell(template, of.get(column, {})) for of in found.values()]
        if {*cells} - {MISSING}:
            columns.append((column, title, cells))
    ends = kind.get("commits", {"commit": ""})
    rows = []
    for (names, of), *cells in zip(found.items(), *(x[2] for x in columns), strict=True):
        if {*cells} - {MISSING}:
            titles = [kind.get("rows", {}).get(x, x) for x in names[: len(kind["row"])]]
            shown = [x[0] for x in columns if x[0] in of]
            about = (
                commits(of[x] for x in shown if x.startswith(begin)) for begin in ends.values()
            )
            rows.append([*titles, *cells, *about])
    return table([*kind["row"], *(x[1] for x in columns), *ends], rows)


def of_lines(name: str, **options: str) -> str:
    return made(name, chosen(name, **options))


def first_call(device: str) -> str:
    """Return the last measurement of `bench.first_call`, together with its target."""
    stage = {line["stage"]: line for line in lines_of("kernel_log/first_call.jsonl", device)}
    lengths = stage["lengths"]
    more = (lengths["after_all_mib"] - lengths["longest_alone_mib"]) * 2**20 / 1e6
    rows = [[cell(x, stage | {"more_mb": more}) for x in row] for row in KINDS["first_call"]]
    commit = commits(stage.values())
    return table(["", "target", f"torch, {commit}", f"JAX, {commit}"], rows)


def _crossovers() -> dict[str, tuple[str, crossover.Panel]]:
    """Return the panels of the first chart of `bench.report` by name, each with its device."""
    report = sources.read(sorted((DEVICE.parent / CHARTED).glob("*.jsonl")))
    found = crossover.panels(report.records, report.training_lines)
    return {x.name: (device, x) for device, panels in found.items() for x in panels}


def crossovers() -> str:
    """Return the table of crossovers in the first chart of `bench.report`."""
    rows = (
        [x.name, x.answer, device, x.about if x.points else MISSING, commits(x.rows)]
        for device, x in _crossovers().values()
    )
    return table(["what", "NSA is faster", "device", "measured", "commit"], rows)


def parallel_training(device: str = DEVICE.name) -> str:
    """Return a row per run of parallel training. A run on several devices is compared with the run
    on one device.
    """
    runs = []
    for path in sorted((DEVICE.parent / device / "train").glob("*.jsonl")):
        lines = train_log.read(path)
        ((run, header),) = curves.last(lines, Header).items()
        runs.append((header, curves.last(lines, Speed)[run], curves.losses(lines)[run]))
    made_of: list[Line] = []
    for header, speed, losses in runs:
        line = dataclasses.asdict(speed) | {"how": curves.devices(header), "of": [header]}
        task = [header.run, *watched.task_of(header)]
        for other, single, expected in runs if header.parallel else ():
            if other.parallel is None and [other.run, *watched.task_of(other)] == task:
                far = curves.difference(losses, expected)
                line |= {"first": far[: watched.PARITY_STEPS].max(), "far": far.max()}
                rates = [(x.tokens_per_s or 0) / x.devices for x in (speed, single)]
                line |= {"kept": rates[0] / rates[1], "of": [header, other]}
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
    problem = lambda r: (r.B, r.T, r.S, r.H, r.Hkv, r.D, r.Dv, r.dtype, r.input)
    lines = []
    for (device, *_), group in render.judged(found, "device").items():
        new = {problem(r) for r in group if r.error_rms is not None}
        badness = lambda r: (r.status != "ok", r.error_rms is not None, r.bound_share or 0.0)
        worst, count = max(group, key=badness), len({*map(problem, group)})
        fate, old = "ok", count - len(new)
        if worst.status != "ok":
            fate = f"{worst.status}: {worst.reason}"
        elif old and worst.branch != "scores":  # which are judged by their own rule
            fate += f"{f', {old} of {count}' if new else ''} by max and mean only"
        line = dataclasses.asdict(worst) | {"device": device, "problems": count, "fate": fate}
        line["dtypes"] = ", ".join(sorted({r.dtype for r in group}))
        line["groups"] = ", ".join(map(str, sorted({r.H // r.Hkv for r in group})))
        lines.append(line | {"longest": max(r.T for r in group)})
    return table(KINDS["parity"]["cells"], (x.values() for x in rows("parity", lines)))


@functools.cache
def _quality_groups() -> list[quality.Group]:
    """Return the kinds of attention with their results over seeds."""
    paths = sorted(DEVICE.parent.glob("*/quality/**/*.jsonl"), key=lambda path: path.name)
    return quality.groups({str(path): train_log.read(path) for path in paths})


def quality_table(part: str, steps: str = "") -> str:
    """Return a table that compares NSA with dense attention. `part` is "summary" (the kinds with
    the most pairs of runs), "bounds", "distances" or "found". `steps` is the number of training
    steps of the runs, by default any.
    """
    found = (cells for group in _quality_groups() for cells in quality.rows(part, group))
    wanted = (cells for cells in found if not steps or f" {steps} x " in cells[0])
    return table(quality.head(part), wanted)


def _recorded(setting: str, run: str, seeds: str = "") -> dict[str, list[train_log.Line]]:
    """Return the lines of each recorded run of a variant; `seeds` is as in `experiment`."""
    return {
        str(path): train_log.read(path)
        for path in sorted(DEVICE.parent.glob(f"*/quality/{setting}/{run}-*.jsonl"))
        if not seeds or path.stem.rpartition("-")[2] in seeds.split(",")
    }


def _kind(setting: str, run: str, seeds: str) -> quality.Kind:
    return quality.kind_of(run, _recorded(setting, run, seeds))


def _ends(setting: str, run: str) -> list[train_log.Summary]:
    """Return the last line of each recorded run of a variant."""
    lines = [x for each in _recorded(setting, run).values() for x in each]
    return [x for x in lines if isinstance(x, train_log.Summary)]


def experiment(name: str, runs: str = "", seeds: str = "") -> str:
    """Return the results of an experiment. The results are the means of dense attention, and the
    differences of the other runs from dense attention. `runs` and `seeds` are comma-separated
    lists. `runs` and `seeds` default to all.
    """
    from .lm.experiments import EXPERIMENTS, VARIANTS

    at = EXPERIMENTS[name]
    names = at.runs[0], *(runs.split(",") if runs else at.runs[1:])
    kinds = [(VARIANTS[run].what, _kind(at.setting, run, seeds)) for run in names]
    found = [(what, kind) for what, kind in kinds if kind.runs]
    group = quality.Group(name, [kind for _, kind in found], kinds[0][1])
    pairs = zip(found, quality.rows("answers", group), strict=True)
    rows = ([f"`{kind.label}`", what, *cells] for (what, kind), cells in pairs)
    return table(["run", "description", *quality.head("answers")], rows)


def solved(setting: str, runs: str) -> str:
    """Return the share of records that each run solves, by distance. A second row has `hit` and
    `chance` (`bench.lm.tasks`), if the model has a selection.
    """
    found, distances = [], list(map(str, DISTANCES[:-1]))
    for run in runs.split(","):
        for end in _ends(setting, run):
            found.append((run, [(end.records_at or {})[x] for x in distances]))
    return render.filled("solved.md.jinja", found=found, distances=distances)


def versions_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a column for each environment of `tests/versions.py`."""
    names = dict.fromkeys(x for each in found for x in each["versions"])
    return render.filled("versions.md.jinja", found=found, names=names, commits=commits)


def versions(names: str) -> str:
    """Return the last run of each of `names`, which are separated by commas."""
    last = {line["name"]: line for line in lines_of(VERSIONS, "cpu")}
    return versions_table([last[name] for name in names.split(",")])


def drawn(old: str, data: Any, draw: Callable[[], str]) -> str:
    """Return the picture `old`, or a new picture if the data have changed. A picture of the same
    data is not drawn again, since other versions of matplotlib draw the same data differently.
    """
    mark = f"<!-- data: {hashlib.sha256(repr(data).encode()).hexdigest()} -->"
    return old if mark in old else f"{draw().rstrip()}\n{mark}\n"


def crossover_picture(old: str) -> str:
    """Return `docs/crossover.svg`."""
    each = [panel for _, panel in _crossovers().values()]
    data = [(x.name, x.answer, x.curves) for x in each if x.drawn]
    return drawn(old, data, lambda: plots.answers(each))


# Runs of `docs/distance.svg` by setting, and the seeds that all of them have.
FAR = {
    "10,000 steps, one pair": (
        "52m_8k_long",
        "7",
        {"dense": "dense", "head_shared": "16 blocks", "shared_n64": "64 blocks"},
    ),
    "30,000 steps, four pairs": (
        "52m_8k_once",
        "7,8,9,10",
        {"dense": "dense", "shared_taps_n64": "64 blocks, key_taps=3"},
    ),
}


def distance_picture(old: str) -> str:
    """Return `docs/distance.svg`."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for title, (setting, seeds, runs) in FAR.items():
        for run, label in runs.items():
            values = [x.values for x in _kind(setting, run, seeds).runs.values()]
            curves = [[x[str(n)] for x in values] for n in DISTANCES]
            found.setdefault(title, {})[label] = curves
    return drawn(old, found, lambda: plots.distances(found, DISTANCES))


NEEDLE_RUNS = {
    "dense": "dense",
    "window": "sliding window",
    "head_shared": "16 blocks",
    "shared_taps_n64": "64 blocks, key_taps=3",
}


def needle_picture(old: str) -> str:
    """Return `docs/needle.svg`."""
    found = {}
    for run, label in NEEDLE_RUNS.items():
        (end,) = _ends("52m_8k_tasks", run)
        found[label] = end.needle or {}
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

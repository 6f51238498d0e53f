"""Tables of the documentation, made from records: no figure in it is typed.

python -m bench.doc_tables            # reports tables that differ from the records
python -m bench.doc_tables --write    # and writes them

A document names a table between two comments, and this command fills it:

    <!-- table: attention mode=forward -->
    <!-- end table -->

| table | what it shows | options |
|---|---|---|
| `summary` | times of NSA and of dense attention in a few rows | `device` |
| `packed` | packed rows compared with rows (`bench.packed`) | `device`, `implementation` |
| `attention` | whole NSA and dense attention, by shape | `mode`, `implementation`, `device` |
| `branches` | the time of each branch, a row per shape | `mode`, `framework`, `device` |
| `targets` | the newest times and their targets (`bench/targets.yaml`) | `device` |
| `fp8` | products in e4m3 and in 16 bits, and their errors | `device` |
| `variants` | variants of a kernel, measured while it was written | `kernel`, `device`, `commit` |
| `kernel_times` | times of kernels in a whole call (`bench.call_kernels`) | `kernels`, `device` |
| `counters` | hardware counters of the kernels, by `ncu` | |
| `memory_check` | what `compute-sanitizer` found in layers (`bench.memory_check`) | `device` |
| `training` | time of a training step of the 124 M model | `device` |
| `decode` | a step from pages and dense attention (`bench.decode`) | `device`, `commit` |
| `cached` | what a cache in fp8 costs trained models (`bench.lm.cached`) | `device` |
| `host` | host time of a call (`bench.host_time`) | `device`, `implementation` |
| `first_call` | what a first call costs (`bench.first_call`) | `device` |
| `quality` | NSA against dense attention over seeds (`bench.lm.quality`) | `part` |
| `gates` | a training step by the kind of gates, each measured twice in turn | `device` |
| `experiment` | the results of one of them | `name`, `runs`, `seeds` |
| `experiments` | questions of `bench.lm.experiments`, and which runs have a record | |
| `converted` | converted models and their dense one (`bench.lm.converted`) | `device` |
| `installed` | what the first calls of an installed wheel cost (`nsa_torch.installed`) | `device` |
| `versions` | what `make test-versions` found | `names` |
| `parallel_training` | training on several GPUs compared with one | `device` |
| `showcase` | a training step by how `fa2` reads the selection (`bench.showcase`) | `device` |
| `selection` | the selection matrix `s2`: medians and least over its sizes | |
| `block_selection` | MiniMax-M3's attention by ours and by transformers | `device` |
| `block_attention` | the functions of block attention, by length and kind of lists | `device` |
| `scaling` | one sequence over several GPUs, a row per number of them (`bench.scale`) | `device` |
| `seed_names` | scripts, commands and tests (docs/seed.md), and their names here | |
| `seed_variables` | environment variables, and their flags here | |

Tables that show fields of lines are described in `bench/tables.yaml`; the others are functions.
It writes `docs/crossover.svg` too, the first chart of `bench.report`.

A cell shows the newest record of its shape, or the status of a failed one, and nothing if it was
refused. The column `commit` lists the commits of all figures that a row compares.
Exit status: 0, 1 where a table differs, 2 for a marker that cannot be understood.
"""

import dataclasses
import functools
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import flags

from .harness import cli, records, seed_env, seed_names, timing
from .harness.markdown import length, table
from .harness.scale_model import problem
from .lm import curves, quality, watched
from .lm import log as train_log
from .lm.log import Header, Speed
from .reports import crossover, sources
from .tables import KINDS, MISSING, REFUSED, Kind, Line, cell, packing
from .tuners.dense_crossover import PAPER

FLAGS = flags.FlagValues()
WRITE = flags.DEFINE_bool("write", False, "Write the tables.", flag_values=FLAGS)

ROOT = records.FOLDER.parents[1]
TARGETS = Path(__file__).parent / "targets.yaml"
DEVICE = records.FOLDER / "nvidia-h100-80gb-hbm3"
DOCUMENTS = ("README.md", "docs/*.md", "docs/kernels/*.md", "bench/records/log/*.md")
MARKER = re.compile(
    r"(<!-- table: (?P<what>[^>]*?) -->\n)(?P<body>.*?)(<!-- end table -->)", re.S
)
VERSIONS = "kernel_log/versions.jsonl"  # of the folder of the CPU
SHORTEST = 2048  # tokens; shorter records only show correctness


def commits(found: Iterable[Any]) -> str:
    """Of these lines, each once."""
    names = (x.get("commit") if isinstance(x, dict) else x.commit for x in found)
    return ", ".join(dict.fromkeys(name[:7] for name in names if name)) or MISSING


# Runs of `bench.memory_check`, and the cell of a clean one.
CHECKS = {
    "alone": "same bits",
    "memcheck": "clean",
    "synccheck": "clean",
    "racecheck": "clean",
}


def _judged(line: Line) -> str:
    if line["status"] != "ok":
        return line["reason"]
    said = CHECKS[line["tool"]] if line["layer"] else "found"
    return f"{said} (`{line['watched']}`)" if line["watched"] else said


def lines_of(name: str, device: str = DEVICE.name) -> list[Line]:
    """A file of a device's folder; lines of attention and of training steps have some words more
    (`_words`)."""
    return [x | _words(x) for x in records.flat_lines(DEVICE.parent / device / name)]


def _words(x: Line) -> Line:
    """Of a line: its kernel, where that is not ours; sizes of attention; whether all but those are
    the paper's, and the order of its row: the most heads first, then the longest."""
    if "kind" in x:
        return {"kernel": "NSA" if x["attention"] == "nsa" else x["implementation"]}
    if "layer" in x:
        return {"judged": _judged(x), "planted": not x["layer"]}
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


# What the README shows: problems of whole attention, their `SIZES` and tokens.
SUMMARY = {
    "a long context: 64k tokens, 64 / 4 heads": (64, 4, 128, 128, 1, 65536),
    "short rows: 8 of 2k tokens, 12 / 2 heads": (12, 2, 64, 64, 8, 2048),
    "one query head per key/value head: 16k tokens": (16, 16, 128, 128, 1, 16384),
}
PASSES = {"forward": "forward", "fwdbwd": "forward and backward"}
USUAL = "cudnn", "flash"  # dense kernels that are everywhere


def _newest(file: str, device: str) -> dict[tuple, Line]:
    """The newest line of torch by sizes, input, kernel and pass of whole or dense attention."""
    lines = sorted(lines_of(file, device), key=lambda x: x["time"])
    return {
        (*(x[n] for n in SIZES), x["T"], x["input"], x["kernel"], x["mode"]): x
        for x in lines
        if x["papers"] and x["framework"] == "torch" and x["branch"] in ("all", "dense")
        if x["implementation"] in (None, "mosaic")
    }


def _time(line: Line | None) -> str:
    return MISSING if line is None else cell("{time_ms:ms}", line)


def _timed(line: Line | None) -> float | None:
    return line["time_ms"] if line and line["status"] == "ok" else None


def summary(device: str = "nvidia-h200") -> str:
    """The times of NSA and of the faster dense kernel on some problems."""
    rows, newest = [], _newest("compare.jsonl", device)
    for what, sizes in SUMMARY.items():
        for mode, which in PASSES.items():
            ours, *dense = (newest.get((*sizes, "random", x, mode)) for x in ("NSA", *USUAL))
            timed = [(time, x) for x in dense if x and (time := _timed(x))]
            if ours is None or len(timed) < len(dense):
                raise ValueError(f"{device} has no times of {what}")
            best, fastest = min(timed, key=lambda x: x[0])
            said = ours["status"]
            if time := _timed(ours):
                ratio = best / time
                said = f"{ratio:.1f}x as fast" if ratio > 1 else f"{1 / ratio:.1f}x as slow"
            cells = [f"{which}, ms", what, _time(ours), _time(fastest), f"**{said}**"]
            rows.append([*cells, commits([ours, fastest])])
    rows.append(_packed_summary())
    return table(["pass", "problem", "NSA", "dense attention", "NSA is", "commit"], rows)


def _packed_summary() -> list[str]:
    """The row of the first shape of `bench.packed`, compared with separate rows."""
    lines = chosen("packed")
    newest = {
        (x["mode"], x["form"]): x for x in lines if x["documents"] == lines[0]["documents"]
    }
    ours, rows = (
        [newest[pass_, form] for pass_ in PASSES.values()] for form in ("varlen", "rows")
    )
    apart = [(_timed(x), _timed(y)) for x, y in zip(ours, rows, strict=True)]
    said = "; ".join(f"{x / y - 1:+.1%}" if x and y else MISSING for x, y in apart)
    return [
        f"{'; '.join(PASSES.values())}, ms",
        f"packed: {packing(lines[0]['documents'])} in one row, 64 / 4 heads, on an H100",
        "; ".join(map(_time, ours)),
        MISSING,
        f"**{said}** of rows' {'; '.join(map(_time, rows))}",
        commits([*ours, *rows]),
    ]


SIZES = {"H": 64, "Hkv": 4, "D": 128, "Dv": 128, "B": 1}  # of a target that names no others
INPUTS = "random", "text"  # columns of the targets


def targets(device: str = DEVICE.name) -> str:
    """Forward / with backward, a row per target; single calls, and calls in a row."""
    newest, eight = (_newest(x, device) for x in ("compare.jsonl", records.FP8_RECORDS))
    packed = {
        (packing(x["documents"]), x["mode"]): x
        for x in chosen("packed", device)
        if x["form"] == "varlen"
    }
    calls: dict[str, dict[str, Line]] = {}  # by variant and pass
    for line in lines_of("kernel_log/variants.jsonl", device):
        if line["kernel"] == "whole_calls":
            calls.setdefault(line["variant"], {})[line["shape"]] = line
    rows = []
    for row in yaml.safe_load(TARGETS.read_text()):
        found: list[list[Line | None]] = [[], []]  # random, text
        if "packed" in row:
            found[0] = [packed.get((row["packed"], x)) for x in PASSES.values()]
        for of, name, modes in ((newest, "problem", PASSES), (eight, "e4m3", ["forward"])):
            for each, source in zip(found, row.get("inputs", INPUTS), strict=False):
                if sizes := row.get(name):
                    shape = (SIZES | sizes).values()
                    each += [of.get((*shape, source, "NSA", mode)) for mode in modes]
        cells = [" / ".join(map(_time, each)) if any(each) else MISSING for each in found]
        name = row.get("calls", "")
        lines = [[*calls.get(x, {}).values()] for x in (name, timing.RESTED.format(name))]
        times = [" / ".join(f"{x['time_ms']:.3g}" for x in each) for each in lines if each]
        cells += ["; ".join(times) or MISSING, row["bound"]]
        used = [x for each in (*found, *lines) for x in each if x]
        rows.append([row["shape"], row["target"], *cells, commits(used)])
    head = ["shape", "target", *INPUTS, "calls in a row; after 50 ms of rest"]
    return table([*head, "what bounds it", "commit"], rows)


def chosen(name: str, device: str = "", commit: str = "", **options: str) -> list[Line]:
    """The lines of a table of `KINDS`; `commit`: how theirs begins.

    Raises:
      ValueError: the table has no such option, or no line has what the options say.
    """
    kind = KINDS[name]
    known = kind.get("options", {})
    if unknown := options.keys() - known:
        raise ValueError(f"no option {sorted(unknown)}")
    only, asked = kind.get("only", {}), known | options
    files = kind["file"] if isinstance(kind["file"], list) else [kind["file"]]
    lines = [
        line | {"order": [_rank(only, line, x) for x in kind.get("order", ())]}
        for file in files
        for each in lines_of(file, device or kind.get("device", DEVICE.name))
        if (line := kind.get("default", {}) | each)
        and all(line[field] in values for field, values in only.items())
        and all(line.get(field) in (x, None) for field, x in asked.items())
        and (line.get("commit") or "").startswith(tuple(commit.split(",")))
    ]
    if known and not lines:
        said = ", ".join(f"{x} {value!r}" for x, value in asked.items())
        raise ValueError(f"{kind['file']} has no {said}")
    if "newest" in kind:
        lines = [*{cell(kind["newest"], x): x for x in lines}.values()]
    lines.sort(key=lambda line: [line[field] for field in kind.get("sort", ())])
    words = kind.get("words", {})
    return [line | {x: words[x].get(line[x], line[x]) for x in words} for line in lines]


def _rank(only: Mapping[str, list], line: Line, field: str) -> Any:
    """The rank of a line by a field: the value, or its position in the list of `only`."""
    return only[field].index(line[field]) if field in only else line[field]


def made(name: str, lines: Iterable[Line], columns: Iterable[str] = ()) -> str:
    """A table of `KINDS` from these lines; `columns`: all that it has, if lines have them."""
    kind = KINDS[name]
    if "column" in kind:
        return _crossed(kind, lines, [(x, x) for x in columns] or kind.get("columns", []))
    cells = kind["row"] | kind["cells"]
    rows = (
        [*(cell(x, line) for x in cells.values()), commits(line.get("of", [line]))]
        for line in lines
    )
    return table([*cells, "commit"], rows)


def _crossed(kind: Kind, lines: Iterable[Line], columns: Sequence[Sequence[str]]) -> str:
    """A row per value of the templates `row`, a column per value of `column`. `columns` has the
    name, the title and perhaps the template of each; by default all columns with a time."""
    found: dict[tuple[Any, ...], dict[str, list[Line]]] = {}
    timed: dict[str, str] = {}
    for line in lines:
        names = (cell(x, line) for x in kind["row"].values())
        row = *names, *map(line.get, kind.get("apart", ()))
        column = cell(kind["column"], line)
        of = found.setdefault(row, {}).setdefault(column, [])
        of[:] = [*of, line] if kind.get("each") else [line]
        if line.get("status", "ok") == "ok":
            timed[column] = column
    for row, of in list(found.items()):
        found[row] = {x: y for x, y in of.items() if y[-1].get("status") != REFUSED}
        if not found[row]:
            del found[row]
    if "rows" in kind:
        found = {(x,): found.get((x,), {}) for x in kind["rows"]}
    if "needs" in kind:
        found = {row: of for row, of in found.items() if {*kind["needs"]} & {*of}}
    if "order" in kind:
        found = dict(sorted(found.items(), key=lambda x: next(iter(x[1].values()))[0]["order"]))
    each: list[tuple[str, str, list[str]]] = []
    for name, title, *own in columns or timed.items():
        template = own[0] if own else kind["cells"]
        each.append((title, name, [_cells(template, x.get(name, [])) for x in found.values()]))
    each = [x for x in each if {*x[2]} - {MISSING}]
    said = kind.get("commits", {"commit": ""})
    rows = []
    for (row, of), *cells in zip(found.items(), *(x[2] for x in each), strict=True):
        if {*cells} - {MISSING}:
            names = [kind.get("rows", {}).get(x, x) for x in row[: len(kind["row"])]]
            about = (
                commits(y for x in each if x[1].startswith(begin) for y in of.get(x[1], []))
                for begin in said.values()
            )
            rows.append([*names, *cells, *about])
    return table([*kind["row"], *(x[0] for x in each), *said], rows)


def _cells(template: str, lines: Iterable[Line]) -> str:
    return "; ".join(cell(template, x) for x in lines) or MISSING


def of_lines(name: str, **options: str) -> str:
    return made(name, chosen(name, **options))


def kernel_times(kernels: str, device: str = "") -> str:
    """`kernels`: columns of the kernel log without spaces, by commas."""
    lines = chosen("kernel_times", device)
    named = {line["shape"].replace(" ", ""): line["shape"] for line in lines}
    columns = kernels.split(",")
    if unknown := [x for x in columns if x not in named]:
        raise ValueError(f"the kernel log has no {unknown}")
    titles = [named[x] for x in columns]
    return made("kernel_times", (x for x in lines if x["shape"] in titles), titles)


def scaling(device: str = "") -> str:
    """The newest line per problem and number of GPUs; one GPU has no transport."""
    newest = {(*problem(x), x["devices"]): x for x in chosen("scaling", device)}
    alone = dict.fromkeys(("layout", "efficiency", "exposed_ms", "imbalance"))
    lines = (newest[x] | (alone if newest[x]["devices"] == 1 else {}) for x in sorted(newest))
    return made("scaling", lines)


def first_call(device: str) -> str:
    """The last measurement of `bench.first_call`, with the target."""
    stage = {line["stage"]: line for line in chosen("first_call", device)}
    lengths = stage["lengths"]
    more = (lengths["after_all_mib"] - lengths["longest_alone_mib"]) * 2**20 / 1e6
    rows = [
        [cell(x, stage | {"more_mb": more}) for x in row] for row in KINDS["first_call"]["rows"]
    ]
    commit = commits(stage.values())
    return table(["", "target", f"torch, {commit}", f"JAX, {commit}"], rows)


def selection() -> str:
    """The matrix `s2` as far as it was measured, the newest of each problem."""
    problems: dict[tuple[Any, ...], dict[tuple[int, ...], dict[str, Line]]] = {}
    for x in lines_of("selection.jsonl"):
        if x["framework"] == "torch" and x["dtype"] == "float16":
            each = problems.setdefault((x["L"], x["dist"], x["streams"]), {})
            each.setdefault((x["T"], x["H"], x["D"], x["Dv"]), {})[x["implementation"]] = x
    lines = []
    for (keys, dist, streams), each in sorted(problems.items()):
        times = [{name: _timed(x) for name, x in found.items()} for found in each.values()]
        timed = [found["triton"] for found in times if found.get("triton")]
        line: Line = {"dist": dist, "keys": keys, "streams": streams, "timed": len(timed)}
        line |= {"all": len(each), "triton": statistics.median(timed) if timed else None}
        for base in ("sdpa", "fa2"):
            both = [(found.get(base), found.get("triton")) for found in times]
            if gains := [slow / fast for slow, fast in both if slow and fast]:
                line |= {base: statistics.median(gains), f"{base}_least": min(gains)}
        lines.append(line | {"of": [x for found in each.values() for x in found.values()]})
    return made("selection", lines)


def _crossovers() -> tuple[str, list[crossover.Panel]]:
    """The device, and its part of the first chart of `bench.report`, from all its records."""
    report = sources.read(sorted(DEVICE.glob("*.jsonl")))
    (found,) = crossover.panels(report.records, report.training_lines).items()
    return found


def crossovers() -> str:
    """The answers of that chart."""
    _, each = _crossovers()
    return made(
        "crossovers",
        (
            {"question": x.name, "answer": x.answer, "of": x.rows}
            | ({"about": x.about} if x.points else {})
            for x in each
        ),
    )


def parallel_training(device: str = DEVICE.name) -> str:
    """A row per run on several devices, compared with the same run on one."""
    paths = sorted((DEVICE.parent / device / "train").glob("*.jsonl"))
    found = [train_log.read(path) for path in paths]
    runs = []
    for lines in found:
        ((run, header),) = curves.last(lines, Header).items()
        speed = curves.last(lines, Speed)[run]
        assert speed.tokens_per_s
        rate = speed.tokens_per_s / speed.devices
        runs.append((run, header, curves.losses(lines)[run], speed, rate))
    key = lambda run, header: json.dumps([run, *watched.task_of(header)], sort_keys=True)
    alone = {key(x[0], x[1]): x for x in runs if x[1].parallel is None}
    made_of: list[Line] = []
    for run, header, losses, speed, rate in runs:
        line = dataclasses.asdict(speed) | {"how": curves.devices(header), "of": [header]}
        if header.parallel is not None and key(run, header) in alone:
            _, other, others, _, single = alone[key(run, header)]
            far = curves.difference(losses, others)
            line |= {"first": far[: watched.PARITY_STEPS].max(), "far": far.max()}
            line["kept"] = rate / single
            line["of"].append(other)
        made_of.append(line)
    place = lambda x: (f"{x['batch']} x {x['seq_len']}", x["framework"] != "torch", x["how"])
    return made("parallel_training", sorted(made_of, key=place))


@functools.cache
def _quality_groups() -> list[quality.Group]:
    """Kinds of attention over seeds."""
    paths = sorted(DEVICE.parent.glob("*/quality/**/*.jsonl"), key=lambda path: path.name)
    return quality.groups({str(path): train_log.read(path) for path in paths})


def quality_table(part: str) -> str:
    """NSA against dense attention; `part` is "summary" (the kinds with most pairs), "bounds",
    "distances" or "found"."""
    head, rows = {
        "summary": (quality.SUMMARY_HEAD, quality.summary_rows),
        "bounds": (quality.BOUNDS_HEAD, quality.bound_rows),
        "distances": (quality.DISTANCE_HEAD, quality.distance_rows),
        "found": (quality.FOUND_HEAD, quality.found_rows),
    }[part]
    return table(head, (cells for group in _quality_groups() for cells in rows(group)))


def _files(setting: str, variant: str) -> list[Path]:
    """Of the runs of `bench.lm.experiments` that are recorded."""
    return sorted(DEVICE.parent.glob(f"*/quality/{setting}/{variant}-*.jsonl"))


def experiment(name: str, runs: str | None = None, seeds: str | None = None) -> str:
    """The results of an experiment: dense attention's means, and the differences of its other runs.
    `runs` and `seeds` are lists with commas; by default all."""
    from .lm.experiments import EXPERIMENTS, VARIANTS

    at = EXPERIMENTS[name]
    found: list[tuple[str, quality.Kind]] = []
    for run in (at.runs[0], *(at.runs[1:] if runs is None else runs.split(","))):
        files = [
            path
            for path in _files(at.setting, run)
            if seeds is None or path.stem.rpartition("-")[2] in seeds.split(",")
        ]
        kind = quality.kind_of(run, {str(path): train_log.read(path) for path in files})
        found.append((VARIANTS[run].what, kind))
    dense = found[0][1]
    rows = [
        [f"`{kind.label}`", what, *quality.answer_row(kind, dense)]
        for what, kind in found
        if kind.runs
    ]
    return table(["run", "what it is", *quality.ANSWER_HEAD], rows)


def experiments() -> str:
    """The questions, the seeds whose runs have a record, and the seeds that are missing."""
    from .lm.experiments import EXPERIMENTS

    rows = []
    for name, at in EXPERIMENTS.items():
        seeds = {
            variant: [path.stem.rpartition("-")[2] for path in _files(at.setting, variant)]
            for variant in at.runs
        }
        there = [f"`{x}` {', '.join(sorted(found))}" for x, found in seeds.items() if found]
        wanted = {
            x: sorted({str(s) for s in at.seeds} - set(found)) for x, found in seeds.items()
        }
        missing = [f"`{x}` {', '.join(left)}" for x, left in wanted.items() if left]
        cells = "; ".join(there) or "none", "; ".join(missing) or "none"
        rows.append([f"`{name}`", at.question, f"`{at.setting}`", *cells])
    return table(
        ["experiment", "question", "setting", "recorded: seeds", "planned, not run"], rows
    )


def converted(device: str = DEVICE.name) -> str:
    """Held-out loss of each run, less the dense model's at the same step: mean over seeds."""
    lines = list(lines_of("kernel_log/converted.jsonl", device))
    at = {(x["run"], x["step"], x["seed"]): x for x in lines}
    seeds = sorted({x["seed"] for x in lines})
    rows = []
    for run, step in dict.fromkeys((x["run"], x["step"]) for x in lines):
        cells = []
        for name in ("loss", "within", "beyond"):
            both = [(at[run, step, s][name], at["dense", step, s][name]) for s in seeds]
            apart = [a - b for a, b in both]
            mean, spread = statistics.mean(apart), max(apart) - min(apart)
            if run == "dense":
                cells.append(f"{statistics.mean(b for _, b in both):.4f}")
            else:
                cells.append(f"{mean:+.4f} (spread {spread:.4f})")
        if not step % 100:
            rows.append([run, str(step), *cells])
    return table(["run", "steps after", "loss", "within", "beyond"], rows)


def versions_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A column an environment of `tests/versions.py`."""
    names = list(dict.fromkeys(x for each in found for x in each["versions"]))
    rows = [[x, *(each["versions"].get(x, MISSING) for each in found)] for x in names]
    skips = [
        "; ".join(f"{n}: {why}" for why, n in each["skipped"].items()) or "none"
        for each in found
    ]
    rows += [
        ["passed", *(str(each["passed"]) for each in found)],
        ["failed", *(", ".join(each["failed"]) or "none" for each in found)],
        ["skipped", *skips],
        ["minutes", *(f"{each['test_minutes']}" for each in found)],
        ["commit", *(commits([each]) for each in found)],
    ]
    return table(["", *(each["name"] for each in found)], rows)


def versions(names: str) -> str:
    """The last run of each of `names`, with commas between."""
    last = {line["name"]: line for line in lines_of(VERSIONS, "cpu")}
    return versions_table([last[name] for name in names.split(",")])


def picture(old: str) -> str:
    """`docs/crossover.svg`, drawn again if its data have changed: other versions of matplotlib
    draw the same data otherwise."""
    _, each = _crossovers()
    data = repr([(x.name, x.answer, x.curves) for x in each if x.drawn])
    mark = f"<!-- data: {hashlib.sha256(data.encode()).hexdigest()} -->"
    if mark in old:
        return old
    from .reports import plots

    return f"{plots.answers(each).rstrip()}\n{mark}\n"


PICTURES = {"docs/crossover.svg": picture}
TABLES: Mapping[str, Callable[..., str]] = {
    **{name: functools.partial(of_lines, name) for name in KINDS},
    "quality": quality_table,
    "seed_names": seed_names.markdown,
    "seed_variables": seed_env.markdown,
} | {
    function.__name__: function
    for function in (
        *(summary, targets, kernel_times, scaling, first_call),
        *(
            versions,
            parallel_training,
            experiment,
            experiments,
            converted,
            selection,
            crossovers,
        ),
    )
}


def filled(text: str, name: str) -> str:
    """`text` with every table as the records give it; `name`: of the document, for errors.

    Raises:
      ValueError: a marker names no table, or an option that the table does not have.
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
    stale = []
    made = {path: filled(path.read_text(), path.name) for path in documents()}
    made |= {ROOT / path: drawn((ROOT / path).read_text()) for path, drawn in PICTURES.items()}
    for path, new in made.items():
        if new != path.read_text():
            stale.append(path)
            if WRITE.value:
                path.write_text(new)
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'written' if WRITE.value else 'differs'}")
    return int(bool(stale) and not WRITE.value)


if __name__ == "__main__":
    cli.run(main, FLAGS)

"""How right every path is on every device: the records of `compare`, one row a path.

python -m bench.parity_table            # print it
python -m bench.parity_table --write    # and write bench/records/README.md
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from .harness import cli, markdown, records
from .harness.records import Record
from .reports import render

FOLDER = Path(__file__).parent / "records"
WRITE = flags.DEFINE_bool("write", False, "Write bench/records/README.md.")

HEAD = """# Records

One JSON line a measurement, under the device that made it; `bench/harness/records.py` says
what the fields mean. The table below is made from them by
`python -m bench.parity_table --write`: each path with the problem on which its largest error
uses most of its bound (`bench/judge/parity.py`), over all its problems. A path of which a row
fails shows that row. `oneshot/` beside them is one whole run of `bench.oneshot` there: its
summary, report and page.

`log/` has what was measured and tried while kernels and training were written. Its tables
of variants are made from `<device>/kernel_log/variants.jsonl` by `bench.doc_tables --write`. Most
variants were timed on working trees, so they have no commit, and are gone. They say what a choice
was worth, not what today's kernel takes (`docs/kernels/`). Some lines name a commit of a branch
that was rebased; the same change in this history: 2ce971b b8405f0, f230cc2 a53b620,
d026010 13240f3, ed9930f and 3faf8bb 663dc8b, bdb35a9 e2d6c45.

Older rows were judged by maximum and mean only: they have no rms and no slope, and the status
says of how many problems no newer row does. The slope is judged of 10^5 elements or more. Parts of
a contiguous decode step measured until f764ddc contain a copy of all values, which the whole step
does not make. `kernel_log/block_selection.jsonl`: rows that ran out of memory were written as
`unsupported` and have been renamed `oom`. `nvidia-h200/kernel_log/variants.jsonl`: figures of
`bench.train --throughput`, of torch's profiler (kernels of a call) and of CUDA events around one
kernel (`dkv_segments`, `selected_forward`, `selected_dq`), typed. Lines that no page shows (steps
of runs in `quality/`, `train_mlp_pe.jsonl`, `train/other_runs/`, replaced measurements) are in the
history, at commit 8b3d42c; at b2b9bee most steps of the other training runs, `against.jsonl`,
`nvidia-h200/decode.jsonl`, the first calls of an H100 and more replaced measurements.

"""
ERRORS = ("worst", "error", "bound", "rms", "rms bound", "slope")
COLUMNS = ("device", "framework", "branch", "implementation", "mode", "problems", "dtypes")
COLUMNS += ("heads per group", "longest", *ERRORS, "status")


def table(found: Sequence[Record]) -> str:
    """Markdown; a path is `ok` when every one of its records is."""
    rows = []
    for key, group in render.judged(found, "device").items():
        worst = max(
            group,
            key=lambda r: (r.status != "ok", r.error_rms is not None, r.bound_share or 0.0),
        )
        groups = sorted({r.H // r.Hkv for r in group})
        cells = (
            *key,
            str(len(set(map(_problem, group)))),
            ", ".join(sorted({r.dtype for r in group})),
            ", ".join(map(str, groups)),
            str(max(r.T for r in group)),
            *(render.rows([worst])[0][name] for name in ERRORS),
            _status(worst, group),
        )
        rows.append(cells)
    return markdown.table(COLUMNS, rows)


def _problem(r: Record) -> tuple:
    return r.B, r.T, r.S, r.H, r.Hkv, r.D, r.Dv, r.dtype, r.input


def _status(worst: Record, group: Sequence[Record]) -> str:
    """The worst row's; where all are right, also by which rule."""
    if worst.status != "ok":
        return f"{worst.status}: {worst.reason}"
    if worst.branch == "scores":  # judged by its own rule
        return "ok"
    problems = set(map(_problem, group))
    old = len(problems - {_problem(r) for r in group if r.error_rms is not None})
    if not old:
        return "ok"
    share = "" if old == len(problems) else f", {old} of {len(problems)}"
    return f"ok{share} by max and mean only"


def load(folder: Path = FOLDER) -> list[Record]:
    """All records of `compare` under `folder`."""
    return [r for path in sorted(folder.glob("*/compare.jsonl")) for r in records.read(path)]


def main(argv: Sequence[str]) -> int:
    found = load()
    text = table(found)
    print(text)
    if WRITE.value:
        (FOLDER / "README.md").write_text(HEAD + text)
    return int(any(r.status in ("wrong", "error") for r in found))


if __name__ == "__main__":
    cli.run(main)

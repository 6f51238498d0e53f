"""Attention to selected blocks: the fastest implementation that runs beside the portable one.

    python -m bench.selection
    python -m bench.selection --framework=jax --L_list=512,1024 --dist=many
    python -m bench.selection --decode=1 --selected_kernel=mosaic --streams=2
    python -m bench.selection --preset=s2
    python -m bench.selection --preset=s2 --N=1024 --H=8 --D=128 --Dv=128 --streams=1

`N` queries of one sequence each select `L` keys, `L / l_sel` blocks before all of them, in runs
of adjacent blocks (`--dist`): few is 1 run, mixed 4, many 8, at random places. `tri_ms` is the
library's selected attention by what `kernel` names, whatever that is, `ref_ms` the
portable path, `speedup` the one over the other where `kernel` is a kernel, else nothing, `mae`
the mean error beside the float64 reference. What is named by `--beside` has columns of its own.
With `--streams k` all are k calls on k CUDA streams at once. All are checked before they are
timed. With `--processes p` the rows are made ready by p processes side by side, and a kernel that
crashes or hangs costs its own row alone.

`--preset` names a matrix in `configs/selection/`, or a path; a flag that is given stands in
place of what it lists. `s2` is a matrix of sizes, Triton beside packed SDPA and FA-2;
its rows also go to `sel_dense.csv` (one run) and `sel_varlen.csv`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from nsa_core import config_files, policy
from nsa_core import flags as kernel_flags

from .harness import cli, command, records
from .harness.command import integers, shown, speed_up
from .harness.measure import Judged, guarded, shape_without_inputs
from .harness.parts import Parts
from .harness.records import Record
from .harness.runners import RUNNERS
from .harness.selection_case import Case, settings_of
from .harness.selection_rows import SPANS, Matrix, Row

FLAGS = command.flag_values(frameworks=True, heads=8, groups=1, dk=64, dv=64, l_sel=64)
_own = {"flag_values": FLAGS}
PRESET = flags.DEFINE_string(
    "preset", None, "A matrix of problems: a name in configs/selection/, or a path.", **_own
)
QUERIES = flags.DEFINE_integer(
    "N", None, "Queries; default: 256, without a GPU 64.", lower_bound=1, **_own
)
for _short, _name in (("H", "heads"), ("D", "dk"), ("Dv", "dv")):
    flags.DEFINE_alias(_short, _name, **_own)
LENGTHS = flags.DEFINE_list(
    "L_list", None, "Selected keys a query; default: 64,128,256,512.", **_own
)
DIST = flags.DEFINE_multi_enum(
    "dist", list(SPANS), list(SPANS), "How the blocks lie (repeatable).", **_own
)
STREAMS = flags.DEFINE_integer("streams", 1, "Calls at once.", lower_bound=1, **_own)
DECODE = flags.DEFINE_integer(
    "decode", 0, "1: one query a sequence.", lower_bound=0, upper_bound=1, **_own
)
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1, **_own)
REF = flags.DEFINE_string(
    "ref", None, "The reference implementation; default: sdpa in torch, xla in JAX.", **_own
)
BESIDE = flags.DEFINE_list("beside", [], "Implementations with columns of their own.", **_own)
PARTS = Parts(FLAGS)
COLUMNS = ("mode", "N", "H", "D", "Dv", "L", "nspans", "streams", "tri_ms", "ref_ms")
COLUMNS += ("speedup", "mae", "dist", "B", "S", "dtype", "framework", "kernel", "ref_kernel")
COLUMNS += ("tri_p20_ms", "tri_p80_ms", "ref_p20_ms", "ref_p80_ms", "error_max", "error_bound")
COLUMNS += ("l_sel", "device", "commit", "status", "reason")


def matrix_of(gpu: bool) -> Matrix:
    """The matrix of `--preset` or of the flags, with what flags give in place of its lists.

    Raises:
      ValueError: the file or a flag holds what no matrix can have.
    """
    sizes = {"H": "heads", "D": "dk", "Dv": "dv", "l_sel": "l_sel", "streams": "streams"}
    preset = PRESET.value
    given: dict[str, Any] = {
        name: [FLAGS[flag].value]
        for name, flag in sizes.items()
        if preset is None or FLAGS[flag].present
    }
    if preset is None or DECODE.value or FLAGS["N"].present:
        given["N"] = [1 if DECODE.value else QUERIES.value or (256 if gpu else 64)]
    named = {"kernel": kernel_flags.named().selected, "ref": REF.value, "beside": BESIDE.value}
    given |= {name: value for name, value in named.items() if value}
    dists = dict.fromkeys(DIST.value)
    lengths = integers("L_list", LENGTHS.value, (64, 128, 256, 512))
    if preset is None:
        return Matrix(**given, L=dict.fromkeys(dists, lengths))
    path = preset if preset.endswith((".yaml", ".yml", ".json")) else f"selection/{preset}"
    made = config_files.build(Matrix, config_files.load(path), preset)
    listed = {dist: each for dist, each in made.L.items() if dist in dists}
    if LENGTHS.value is not None:
        listed = dict.fromkeys(listed, lengths)
    return dataclasses.replace(made, **given, L=listed)


def gain(base: Record, fast: Record) -> float | None:
    """Of a kernel over the portable path; None where no kernel ran."""
    kernel = fast.implementation in policy.KERNELS
    over_itself = fast.implementation == base.implementation
    return speed_up(base, fast) if kernel and not over_itself else None


def cells(fast: Record, base: Record, *beside: Record) -> dict[str, Any]:
    """A line of the CSV file."""
    worst = next((r for r in (fast, base) if r.status != "ok"), fast)
    extra = fast.extra
    same = ("H", "D", "Dv", "B", "S", "dtype", "framework", "error_max", "error_bound")
    found = {name: getattr(fast, name) for name in (*same, "device", "commit")} | {
        "mode": extra["mode"],
        "N": fast.T,
        "L": extra["L"],
        "nspans": extra["nspans"],
        "streams": extra["streams"],
        "tri_ms": fast.time_ms,
        "ref_ms": base.time_ms,
        "speedup": gain(base, fast),
        "mae": fast.error_mean,
        "dist": extra["dist"],
        "l_sel": fast.config["select_block"],
        "kernel": fast.implementation,
        "ref_kernel": base.implementation,
        "tri_p20_ms": fast.p20_ms,
        "tri_p80_ms": fast.p80_ms,
        "ref_p20_ms": base.p20_ms,
        "ref_p80_ms": base.p80_ms,
        "status": worst.status,
        "reason": worst.reason,
    }
    for each in beside:
        bad = "" if each.status == "ok" else f"{each.status}: {each.reason}"
        values = each.time_ms, speed_up(each, fast), each.error_mean, bad
        found |= dict(zip(columns_of(each.implementation), values, strict=True))
    return found


def columns_of(name: str) -> tuple[str, ...]:
    """The columns of an implementation beside: its time, the kernel's speed-up over it, its mean
    error, why it has none."""
    return f"{name}_ms", f"speedup_over_{name}", f"{name}_mae", f"{name}_reason"


def line(cells: dict[str, Any], beside: Sequence[str] = ()) -> str:
    """A row as a line."""
    names = ("N", "H", "D", "Dv", "L", "nspans", "streams")
    sizes = ",".join(f"{name}={cells[name]}" for name in names)
    mae = "n/a" if cells["mae"] is None else f"{cells['mae']:.3g}"
    text = f"{cells['mode']},{sizes} tri_ms={shown(cells['tri_ms'])}, "
    text += f"ref_ms={shown(cells['ref_ms'])}, speedup={shown(cells['speedup'], 'x', 2)}, "
    text += f"mae={mae} {cells['kernel']}/{cells['ref_kernel']}"
    text += "".join(f" {name}_ms={shown(cells[f'{name}_ms'])}" for name in beside)
    bad = f" {cells['status']}: {cells['reason']}" if cells["status"] != "ok" else ""
    return text + bad


def mode(dist: str) -> str:
    """The kind of a row."""
    if DECODE.value:
        return "decode"
    return "dense" if SPANS[dist] == 1 else "varlen"


class Selection:
    """A row of the matrix: what `names` has, for each number of streams."""

    def __init__(self, runner, row: Row, matrix: Matrix, names: Sequence[str | None]):
        self.runner, self.row, self.names, self.matrix = runner, row, names, matrix
        gpu = runner.platform != "cpu"
        self.settings = settings_of(FLAGS, row, matrix, BATCH.value, gpu)
        self.how = command.sampling(FLAGS, gpu, iters=matrix.iters, warmup=matrix.warmup)
        self.shape = shape_without_inputs(self.settings, row.N)
        self.overlap: float | None = None

    @property
    def calls(self) -> list[tuple[int, str | None]]:
        """Streams and implementation of each record."""
        return [(streams, name) for streams in self.matrix.streams for name in self.names]

    def judge(self) -> Callable[[], list[Record]]:
        judged: list[Judged] = []
        on_unsupported, row = kernel_flags.on_unsupported(), self.row
        found, failed = list[Case](), {}
        if not row.why_not:
            make = lambda: found.append(Case(self.runner, self.settings, row, FLAGS.seed)) or {}
            failed = guarded("inputs", make, library=False)
        for streams, name in self.calls:
            refusal = row.why_not or self._no_streams(streams)
            if refusal:
                failed = {"status": "unsupported", "reason": refusal}
            if refusal or not found:
                judged.append(Judged("", False, {"implementation": name or "auto"} | failed))
            else:
                judged.append(found[0].judge(name, on_unsupported, streams))
                self.overlap = found[0].inputs.overlap
        return lambda: self._records([each.timed(**self.how) for each in judged])

    def lost(self, reason: str) -> list[Record]:
        fields = {"status": "error", "reason": reason}
        return self._records(
            [{"implementation": name or "auto"} | fields for _, name in self.calls]
        )

    def _no_streams(self, streams: int) -> str:
        runner = self.runner
        if streams == 1 or (runner.framework, runner.platform) == ("torch", "cuda"):
            return ""
        where = f"in {runner.framework} on {runner.platform}"
        return f"{streams} streams need torch on CUDA, the run is {where}"

    def _records(self, found: Sequence[dict[str, Any]]) -> list[Record]:
        row = self.row
        about = command.about_shape(self.runner, self.settings, self.shape)
        about |= {"branch": "selected", "mode": "decode" if DECODE.value else "forward"}
        about |= {"overlap": self.overlap}
        extra = {"mode": mode(row.dist), "dist": row.dist, "L": row.L, "nspans": row.runs}
        return [
            records.record(
                "selection", FLAGS.commit, **about | each, extra=extra | {"streams": k}
            )
            for (k, _), each in zip(self.calls, found, strict=True)
        ]


def main(argv: Sequence[str]) -> int:
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu = runner.platform != "cpu"
    matrix = matrix_of(gpu)
    if STREAMS.value > 1 and (runner.framework, gpu) != ("torch", True):
        raise ValueError(
            f"streams must be 1 but in torch on CUDA, got {STREAMS.value} in "
            f"{runner.framework} on {runner.platform}"
        )
    reference = matrix.ref or ("sdpa" if runner.framework == "torch" else "xla")
    names = matrix.kernel, reference, *matrix.beside
    for known in filter(None, names):
        if known not in runner.registry.names("selected"):
            listed = runner.registry.names("selected")
            raise ValueError(f"{runner.framework} has {listed}, got {known!r}")
    rows = [Selection(runner, row, matrix, names) for row in matrix.rows()]
    if PARTS.is_child:
        return PARTS.child(rows)
    # A row without a problem is none that could be measured.
    no_problem = {row.row.why_not for row in rows if row.row.why_not}
    results, table = command.Results("selection", FLAGS), []
    print(f"device: {runner.device}; {runner.framework}", flush=True)
    for found in PARTS.measure("selection", rows, results.folder):
        for several in itertools.batched(found, len(names)):
            for i, record in enumerate(several):
                results.keep([record], beside=i > 0 or record.reason in no_problem)
            table.append(cells(*several))
            print(line(table[-1], matrix.beside), flush=True)
    columns = *COLUMNS, *(column for name in matrix.beside for column in columns_of(name))
    if PRESET.value is not None:  # a file each kind
        for kind in ("dense", "varlen"):
            some = [each for each in table if each["mode"] == kind]
            command.write_csv(results.folder / f"sel_{kind}.csv", columns, some)
    return results.finish(columns, table)


if __name__ == "__main__":
    cli.run(main, FLAGS)

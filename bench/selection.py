"""Attention to selected blocks: the fastest implementation that runs beside the portable one.

    python -m bench.selection
    python -m bench.selection --framework=jax --L_list=512,1024 --dist=many
    python -m bench.selection --decode=1 --selected_kernel=mosaic --streams=2

`N` queries of one sequence each select `L` keys, `L / l_sel` blocks before all of them, in runs
of adjacent blocks (`--dist`): few is 1 run, mixed 4, many 8, at random places. `tri_ms` (the
seed system's column) is the library's selected attention by what `kernel` names, `ref_ms` the
portable path, `speedup` the one over the other where `kernel` is a kernel, else nothing, `mae`
the mean error beside the float64 reference. With `--streams k` both are k calls on k CUDA
streams at once. Both are checked before they are timed.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from bench.harness import cli, command, cost, problems
from bench.harness.command import integers, shown, speed_up
from bench.harness.measure import guarded, judged, shape_of, timed
from bench.harness.records import Record
from bench.harness.runners import RUNNERS, problem
from bench.judge.checks import Checker
from nsa_jax import flags as kernel_flags
from nsa_jax import policy
from nsa_jax.config import NSAConfig

FLAGS = command.flag_values(frameworks=True, heads=8, groups=1, dk=64, dv=64, l_sel=64)
_own = {"flag_values": FLAGS}
QUERIES = flags.DEFINE_integer(
    "N", None, "Queries; default: 256, without a GPU 64.", lower_bound=1, **_own
)
for _short, _name in (("H", "heads"), ("D", "dk"), ("Dv", "dv")):
    flags.DEFINE_alias(_short, _name, **_own)
LENGTHS = flags.DEFINE_list(
    "L_list", None, "Selected keys a query; default: 64,128,256,512.", **_own
)
SPANS = {"few": 1, "many": 8, "mixed": 4}
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
COLUMNS = ("mode", "N", "H", "D", "Dv", "L", "nspans", "streams", "tri_ms", "ref_ms")
COLUMNS += ("speedup", "mae", "dist", "B", "S", "dtype", "framework", "kernel", "ref_kernel")
COLUMNS += ("tri_p20_ms", "tri_p80_ms", "ref_p20_ms", "ref_p80_ms", "error_max", "error_bound")
COLUMNS += ("device", "commit", "status", "reason")


def spans(rows: int, blocks: int, count: int, runs: int, seed: int) -> np.ndarray:
    """`[rows, count]` ascending blocks below `blocks`, in `runs` runs that do not touch.

    Raises:
      ValueError: they do not fit.
    """
    free = blocks - count - (runs - 1)
    if not 1 <= runs <= count or free < 0:
        raise ValueError(f"{count} of {blocks} blocks cannot lie in {runs} runs")
    random = np.random.default_rng(seed)
    before = np.sort(random.integers(0, free + 1, (rows, runs)), axis=-1) + np.arange(runs)
    run = np.sort(np.arange(count) % runs)  # which one a block belongs to: sizes alike
    return (before[:, run] + np.arange(count)).astype(np.int32)


class Case:
    """One row of the table: its problem, and the calls that are measured on it."""

    def __init__(self, runner, keys: int, runs: int, gpu: bool):
        size = FLAGS.l_sel
        count = keys // size
        longest = max(integers("L_list", LENGTHS.value, (64, 128, 256, 512))) // size
        queries = 1 if DECODE.value else QUERIES.value or (256 if gpu else 64)
        blocks = 2 * longest + max(SPANS.values())
        self.runner, self.config = runner, selected(size, count)
        self.settings = command.settings(
            FLAGS,
            self.config,
            gpu,
            seq_len=blocks * size + queries,
            batch=BATCH.value,
        )
        groups = FLAGS.groups
        shape = BATCH.value, queries, groups, count
        rows = spans(BATCH.value * queries * groups, blocks, count, runs, FLAGS.seed)
        self.inputs = problems.make(
            self.settings,
            "random",
            FLAGS.seed,
            num_queries=queries,
            block_indices=jnp.asarray(rows.reshape(shape)),
        )
        self.checker = Checker(self.settings, self.inputs, backward=False)
        asked = problem(self.settings, runner.framework, runner.platform, runner.capability)
        self.asked = asked._replace(branch="selected", T=queries, S=self.inputs.num_keys)

    def measure(self, name: str | None, on_unsupported, how) -> dict[str, Any]:
        """The fields of a record of the implementation called `name`, None: the first."""
        found: dict[str, Any] = {"implementation": name or "auto"}

        def take():
            choice = self.runner.registry.choose(self.asked, name, on_unsupported)
            found["implementation"] = choice.implementation
            found["refused"] = dict(choice.refused)
            return self._take(choice.load(), how)

        label = f"{self.runner.framework} selected {name or 'auto'}"
        return found | guarded(label, take, library=False)

    def _take(self, target, how) -> dict[str, Any]:
        runner, inputs = self.runner, self.inputs
        where: dict[str, Any] = {"config": self.config, "kv_len": inputs.num_keys}
        if runner.framework == "torch":
            where |= {"with_lse": False}  # as in the whole attention
        else:
            where |= {"segment_ids": None, "scale": None}
        names = "query", "key", "value", "block_indices"

        def function(given):
            return {"out": target(*(given[name] for name in names), **where)[0]}

        arguments = runner.load(inputs.arguments("selected"))
        step = runner.prepare(function, arguments)
        parity = self.checker.check(runner, step, "selected", arguments)
        found = judged(parity, len(self.checker.rows))
        if "status" in found:
            return found
        if STREAMS.value > 1:
            step = runner.prepare(at_once(runner.torch, function, STREAMS.value), arguments)
        shape = shape_of(self.settings, inputs)
        timing = step.time(**how)
        found |= timed(timing, self.work(shape), runner.device, shape.itemsize)
        return found | {"extra_peak_bytes": step.extra_peak_bytes}

    def work(self, shape: cost.Shape) -> cost.Cost:
        """All selected keys are visible; a block that several queries read counts once."""
        size, indices = self.config.select_block, np.asarray(self.inputs.block_indices)
        pairs = shape.B * shape.T * shape.H * self.config.num_selected * size
        kinds = np.moveaxis(indices, 1, -1).reshape(shape.B * shape.Hkv, -1)
        read = sum(np.unique(each).size for each in kinds) * size
        rows = shape.B * shape.T * shape.H + read
        flops = STREAMS.value * pairs * 2 * (shape.D + shape.Dv)
        return cost.Cost(flops, rows * (shape.D + shape.Dv) * shape.itemsize)


def selected(size: int, count: int) -> NSAConfig:
    """A config of `count` blocks, none of them forced."""
    return NSAConfig(
        compress_block=size,
        compress_stride=size,
        select_block=size,
        num_selected=count,
        num_initial=0,
        num_local=0,
    )


def at_once(torch, function, count: int):
    """`function` on `count` CUDA streams, which wait for the current one, and it for them."""
    streams = [torch.cuda.Stream() for _ in range(count)]

    def call(given):
        current, found = torch.cuda.current_stream(), []
        for stream in streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.append(function(given))
        for stream in streams:
            current.wait_stream(stream)
        return found[0]

    return call


def gain(base: Record, fast: Record) -> float | None:
    """Of a kernel over the portable path; None where no kernel ran."""
    kernel = fast.implementation in policy.KERNELS
    over_itself = fast.implementation == base.implementation
    return speed_up(base, fast) if kernel and not over_itself else None


def row(fast: Record, base: Record) -> dict[str, Any]:
    """A line of the CSV file."""
    worst = next((r for r in (fast, base) if r.status != "ok"), fast)
    extra = fast.extra
    same = ("H", "D", "Dv", "B", "S", "dtype", "framework", "error_max", "error_bound")
    return {name: getattr(fast, name) for name in (*same, "device", "commit")} | {
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
        "kernel": fast.implementation,
        "ref_kernel": base.implementation,
        "tri_p20_ms": fast.p20_ms,
        "tri_p80_ms": fast.p80_ms,
        "ref_p20_ms": base.p20_ms,
        "ref_p80_ms": base.p80_ms,
        "status": worst.status,
        "reason": worst.reason,
    }


def line(cells: dict[str, Any]) -> str:
    """The seed system's line."""
    names = ("N", "H", "D", "Dv", "L", "nspans", "streams")
    sizes = ",".join(f"{name}={cells[name]}" for name in names)
    mae = "n/a" if cells["mae"] is None else f"{cells['mae']:.3g}"
    text = f"{cells['mode']},{sizes} tri_ms={shown(cells['tri_ms'])}, "
    text += f"ref_ms={shown(cells['ref_ms'])}, speedup={shown(cells['speedup'], 'x', 2)}, "
    text += f"mae={mae} {cells['kernel']}/{cells['ref_kernel']}"
    bad = f" {cells['status']}: {cells['reason']}" if cells["status"] != "ok" else ""
    return text + bad


def mode(dist: str) -> str:
    """The seed system's word for the kind of a row."""
    if DECODE.value:
        return "decode"
    return "dense" if SPANS[dist] == 1 else "varlen"


def main(argv: Sequence[str]) -> int:
    lengths = integers("L_list", LENGTHS.value, (64, 128, 256, 512))
    size = FLAGS.l_sel
    if size < 1 or any(length % size for length in lengths):
        raise ValueError(f"L_list must be multiples of l_sel={size}, got {lengths}")
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu = runner.platform != "cpu"
    if STREAMS.value > 1 and (runner.framework, gpu) != ("torch", True):
        raise ValueError(
            f"streams must be 1 but in torch on CUDA, got {STREAMS.value} in "
            f"{runner.framework} on {runner.platform}"
        )
    name, on_unsupported = kernel_flags.named().selected, kernel_flags.on_unsupported()
    reference = REF.value or ("sdpa" if runner.framework == "torch" else "xla")
    for known in filter(None, (name, reference)):
        if known not in runner.registry.names("selected"):
            names = runner.registry.names("selected")
            raise ValueError(f"{runner.framework} has {names}, got {known!r}")
    how, rows = command.sampling(FLAGS, gpu), []
    results = command.Results("selection", FLAGS)
    print(f"device: {runner.device}; {runner.framework}", flush=True)
    for length in lengths:
        for dist in dict.fromkeys(DIST.value):
            runs, count = SPANS[dist], length // size
            fits = runs <= count
            case = Case(runner, length, min(runs, count), gpu)
            common = command.about(runner, case.settings, case.inputs) | {
                "branch": "selected",
                "mode": "decode" if DECODE.value else "forward",
                "extra": {
                    "mode": mode(dist),
                    "dist": dist,
                    "L": length,
                    "nspans": runs,
                    "streams": STREAMS.value,
                },
            }
            reason = f"{runs} runs need {runs} blocks of {size}, L={length} has {count}"
            refused = {"status": "unsupported", "reason": reason}
            pair = []
            for asked in (name, reference):
                found = {"implementation": asked or "auto"} | refused
                if fits:
                    found = case.measure(asked, on_unsupported, how)
                pair.append(results.add(beside=len(pair) > 0, **common | found))
            rows.append(row(*pair))
            print(line(rows[-1]), flush=True)
    return results.finish(COLUMNS, rows)


if __name__ == "__main__":
    cli.run(main, FLAGS)

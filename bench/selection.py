"""Measures attention to selected blocks with the fastest implementation that runs, and with the
portable implementation.

    python -m bench.selection
    python -m bench.selection --framework=jax --L_list=512,1024 --dist=many
    python -m bench.selection --decode=1 --selected_kernel=mosaic --streams=2
    python -m bench.selection --preset=s2
    python -m bench.selection --preset=s2 --N=1024 --H=8 --D=128 --Dv=128 --streams=1

Each of `N` queries of a sequence selects `L` keys in `L / l_sel` blocks, which precede all queries.
The blocks form runs of adjacent blocks at random positions. `--dist few` means 1 run,
`--dist mixed` means 4 runs, and `--dist many` means 8 runs. Columns:

- `tri_ms`: time of the library's selected attention on the implementation in column `kernel`.
- `ref_ms`: time of the reference implementation, by default the portable path.
- `speedup`: `ref_ms / tri_ms`, if `kernel` is not a portable path.
- `mae`: mean absolute error against the float64 reference.

Implementations of `--beside` have their own columns. With `--streams k` each time is the time of k
concurrent calls on k CUDA streams. All implementations are checked before any implementation is
timed. With `--processes p`, p processes prepare the rows in parallel, and a kernel that crashes or
hangs costs only its own row.

`--preset` names a matrix in `configs/selection/`, or the path of a matrix file. A flag that is
given replaces the corresponding list of the matrix. The preset `s2` compares Triton, packed SDPA
and FA-2 at many sizes. With `--preset` the rows also go to `sel_dense.csv` (one run) and
`sel_varlen.csv` (several runs).
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from nsa_core import config_files, policy
from nsa_core import flags as kernel_flags
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem
from nsa_core.types import Branches

from .harness import cli, command, cost, parts, problems
from .harness.command import integers, speed_up
from .harness.jobs import Job, jobs
from .harness.records import Record, Values
from .harness.runners import RUNNERS, asked
from .harness.selection_rows import SPANS, Matrix, Row, spans

FLAGS = command.flag_values(
    **parts.FLAGS,
    frameworks=True,
    **{"heads": 8, "groups": 1, "dk": 64, "dv": 64, "l_sel": 64},
    H="heads",
    D="dk",
    Dv="dv",
    preset=(str, "Matrix of problems: a name in configs/selection/, or a path."),
    N=(int, "Number of queries; default: 256, or 64 without a GPU."),
    L_list=(list, "Numbers of selected keys per query; default: 64,128,256,512."),
    dist=(tuple(SPANS), "Distribution of the selected blocks (repeatable).", SPANS),
    streams=(1, "Number of concurrent calls."),
    decode=(0, "1: each sequence has one query.", (0, 1)),
    batch=(1, "Sequences."),
    ref=(str, "The reference implementation; default: sdpa in torch, xla in JAX."),
    beside=([], "Further implementations, each with its own columns."),
)


def matrix_of(gpu: bool) -> Matrix:
    """Return the matrix of `--preset` or of the flags. Flags replace lists of the matrix.

    Raises:
      ValueError: The file or a flag has an invalid value.
    """
    sizes = {"H": "heads", "D": "dk", "Dv": "dv", "l_sel": "l_sel", "streams": "streams"}
    preset = FLAGS.preset
    given: Values = {
        name: [FLAGS[flag].value]
        for name, flag in sizes.items()
        if preset is None or FLAGS[flag].present
    }
    if preset is None or FLAGS.decode or FLAGS["N"].present:
        given["N"] = [1 if FLAGS.decode else FLAGS.N or (256 if gpu else 64)]
    named = {"kernel": kernel_flags.named().selected, "ref": FLAGS.ref, "beside": FLAGS.beside}
    given |= {name: value for name, value in named.items() if value}
    dists = dict.fromkeys(FLAGS.dist)
    lengths = integers("L_list", FLAGS.L_list, (64, 128, 256, 512))
    if preset is None:
        return Matrix(**given, L=dict.fromkeys(dists, lengths))
    path = preset if preset.endswith((".yaml", ".yml", ".json")) else f"selection/{preset}"
    made = config_files.build(Matrix, config_files.load(path), preset)
    listed = {dist: each for dist, each in made.L.items() if dist in dists}
    if FLAGS.L_list is not None:
        listed = dict.fromkeys(listed, lengths)
    return dataclasses.replace(made, **given, L=listed)


def gain(base: Record, fast: Record) -> float | None:
    """Return the speed-up of a kernel over the portable path, or None if no kernel ran."""
    kernel = fast.implementation in policy.KERNELS
    over_itself = fast.implementation == base.implementation
    return speed_up(base, fast) if kernel and not over_itself else None


def values(fast: Record, base: Record, *beside: Record) -> Values:
    """Return the values of a row of the table."""
    more, others = {}, ""
    for each in beside:
        bad = "" if each.status == "ok" else f"{each.status}: {each.reason}"
        found = each.time_ms, speed_up(each, fast), each.error_mean, bad
        more |= dict(zip(columns_of(each.implementation), found, strict=True))
        time = "n/a" if each.time_ms is None else f"{each.time_ms:.3f}"
        others += f" {each.implementation}_ms={time}"
    about = {"speedup": gain(base, fast), "more": more, "line": {"others": others}}
    return {"fast": fast, "base": base} | about


def columns_of(name: str) -> tuple[str, ...]:
    """Return the columns of a further implementation. The columns have the time of the
    implementation `name`, the speed-up of the kernel over `name`, the mean error of `name`, and the
    reason for a missing time.
    """
    return f"{name}_ms", f"speedup_over_{name}", f"{name}_mae", f"{name}_reason"


def mode(dist: str) -> str:
    """Return the mode of a row, as in a record."""
    if FLAGS.decode:
        return "decode"
    return "dense" if SPANS[dist] == 1 else "varlen"


def selected(size: int, count: int) -> NSAConfig:
    """Return a config of `count` blocks, none of them forced."""
    forced = {"num_selected": count, "num_initial": 0, "num_local": 0}
    return NSAConfig(compress_block=size, compress_stride=size, select_block=size, **forced)


def problem(runner, row: Row, matrix: Matrix, names: Sequence[str | None]) -> parts.Problem:
    """Return a row of the matrix. The row measures the implementations `names`, for each number of
    streams."""
    gpu = runner.platform != "cpu"
    blocks = 2 * (matrix.lengths[-1] // row.l_sel) + max(SPANS.values())
    sizes: Values = {"batch": FLAGS.batch, "heads": row.H, "dk": row.D, "dv": row.Dv}
    sizes |= {"seq_len": blocks * row.l_sel + row.N, "dtype": matrix.dtype}
    config = selected(row.l_sel, row.count)
    settings = command.settings(FLAGS, config, gpu, **sizes)
    extra = {"mode": mode(row.dist), "dist": row.dist, "L": row.L, "nspans": row.runs}

    def inputs():
        groups = settings.model.n_kv_groups
        listed = spans(FLAGS.batch * row.N * groups, blocks, row.count, row.runs, FLAGS.seed)
        indices = jnp.asarray(listed.reshape(FLAGS.batch, row.N, groups, row.count))
        how: Values = {"num_queries": row.N, "block_indices": indices}
        return problems.make(settings, "random", FLAGS.seed, **how)

    def calls():
        there = asked(settings, runner)._replace(T=row.N, device=None)
        for streams, name in itertools.product(matrix.streams, names):
            found = Job("selected", name or "auto")
            if not row.why_not:
                found = job(runner, there, name, streams)
            yield dataclasses.replace(found, extra=extra | {"streams": streams})

    return parts.Problem(
        *("selection", runner, settings, FLAGS, inputs, calls),
        command.sampling(FLAGS, gpu, iters=matrix.iters, warmup=matrix.warmup),
        queries=row.N,
        refusal=row.why_not,
        branch="selected",
        mode="decode" if FLAGS.decode else "forward",
    )


def job(runner, there: Problem, name: str | None, streams: int) -> Job:
    """Return the job of an implementation, or of the automatic choice, on several streams."""
    wanted, on_unsupported = Branches(None, name, None), kernel_flags.on_unsupported()
    (found,) = jobs(runner, there, wanted, on_unsupported, ["selected"], chosen=True)
    if streams > 1 and (runner.framework, runner.platform) != ("torch", "cuda"):
        here = f"in {runner.framework} on {runner.platform}"
        refusal = f"{streams} streams need torch on CUDA, the run is {here}"
        return dataclasses.replace(found, label=name or "auto", unsupported=refusal)
    if found.unsupported:
        return found
    # The implementation without the checks of the public function.
    where: Values = {"config": there.config, "kv_len": there.S}
    if runner.framework == "torch":
        where |= {"with_lse": False}  # the same values as in whole attention
    else:
        where |= {"segment_ids": None, "scale": None}
    entries = {entry.name: entry for entry in runner.registry.table["selected"]}
    attend = entries[found.label].load()
    arrays = operator.itemgetter("query", "key", "value", "block_indices")
    function = lambda given: {"out": attend(*arrays(given), **where)[0]}
    several = at_once(runner.torch, function, streams) if streams > 1 else None
    cost_of = functools.partial(work, streams, there.config.select_block)
    return dataclasses.replace(found, function=function, timed=several, work=cost_of)


def work(streams: int, size: int, shape: cost.Shape, inputs: problems.Inputs) -> cost.Cost:
    """Return the useful work with blocks of `size` tokens. All selected keys are visible, and a
    block that several queries read counts once.
    """
    indices = np.asarray(inputs.block_indices)
    kinds = np.moveaxis(indices, 1, -1).reshape(shape.B * shape.Hkv, -1)
    queries, columns = shape.B * shape.T * shape.H, shape.D + shape.Dv
    read = queries + sum(np.unique(each).size for each in kinds) * size
    flops = streams * queries * indices.shape[-1] * size * 2 * columns
    return cost.Cost(flops, read * columns * shape.itemsize)


def at_once(torch, function, count: int):
    """Return a function that runs `function` on `count` CUDA streams. The `count` streams wait for
    the current stream. The current stream then waits for the `count` streams.
    """
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


def main(argv: Sequence[str]) -> int:
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu = runner.platform != "cpu"
    matrix = matrix_of(gpu)
    if FLAGS.streams > 1 and (runner.framework, gpu) != ("torch", True):
        raise ValueError(
            f"streams must be 1 except in torch on CUDA, got {FLAGS.streams} in "
            f"{runner.framework} on {runner.platform}"
        )
    reference = matrix.ref or ("sdpa" if runner.framework == "torch" else "xla")
    names = matrix.kernel, reference, *matrix.beside
    for known in filter(None, names):
        if known not in runner.registry.names("selected"):
            listed = runner.registry.names("selected")
            raise ValueError(
                f"implementations of {runner.framework} must be of {listed}, got {known!r}"
            )
    rows = [problem(runner, row, matrix, names) for row in matrix.rows()]
    if FLAGS.turn is not None:
        return parts.child(FLAGS, rows)
    # A row whose problem does not exist is not counted among the rows that were not measured.
    no_problem = {row.refusal for row in rows if row.refusal}
    results = command.Results("selection", FLAGS)
    print(f"device: {runner.device}; {runner.framework}", flush=True)
    for found in parts.measured(FLAGS, "selection", rows, results.folder):
        for several in itertools.batched(found, len(names)):
            for i, record in enumerate(several):
                results.keep([record], beside=i > 0 or record.reason in no_problem)
            results.row(**values(*several))
    if FLAGS.preset is not None:  # one file per kind
        for kind in ("dense", "varlen"):
            some = [each for each in results.rows if each["mode"] == kind]
            command.write_csv(results.folder / f"sel_{kind}.csv", results.columns, some)
    return results.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)

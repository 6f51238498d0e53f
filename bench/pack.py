"""The speed of packing selected keys and values and of adding gradients, compared with a copy.

    python -m bench.pack
    python -m bench.pack --config paper --save_records

The last chunk of queries of a sequence, as `fa2` packs it, its selection random. `torch`
indexes by rows, `triton` by blocks; `+plan` makes the indices too, as every chunk must.
`deterministic` is the backward kernel of that mode, with its sorting. `copy` is `torch.clone`
of as many bytes. Bytes: each row that is read and each that is written, and the ranges, once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_torch import chunks, fa2, packing
from nsa_torch.geometry import geometry
from nsa_torch.select import select_from_scores

from . import tables
from .harness import cli, command, cost, exit_status, markdown, problems, records
from .harness.measure import judged_row, timed
from .harness.records import Record
from .harness.runners import RUNNERS

FLAGS = cli.define(
    config=(tuple, "Names of files in configs/ or paths; default: tiny, on a GPU paper, seed."),
    row_seconds=(0.5, "Time spent on samples of a row."),
    seed=(0, "Of the random arrays and selections.", None),
    out=(str, "Folder of the lines; default: bench/results/<time>."),
    save_records=(False, "Append to bench/records/<device>/pack.jsonl too."),
)
FORWARD = ("copy", "torch", "torch+plan", "triton", "triton+plan")
BACKWARD = ("copy", "torch", "triton", "triton deterministic")
RANGE_BYTES = 24


class Packing:
    """Random keys, values, gradients and selections of one chunk, and the calls that pack them."""

    def __init__(self, settings: problems.Settings, device: str, seed: int):
        torch.manual_seed(seed)
        model, run, config = settings.model, settings.runtime, settings.nsa
        batch, heads, self.keys = run.batch, model.n_kv_groups, run.seq_len
        dtype = getattr(torch, run.dtype.name)
        normal = functools.partial(torch.randn, dtype=dtype, device=device)
        key, value = (normal(batch, self.keys, heads, w) for w in (model.d_k, model.d_v))
        self.pair, slots = (key, value), config.num_selected * config.select_block
        row_bytes = packing.packed_bytes(key, value, slots)
        most = max(1, fa2.MAX_SEQUENCES // (batch * heads))
        self.queries = next(chunks.chunks(self.keys, row_bytes, most))
        length, options = self.queries.stop, {"config": config, "device": torch.device(device)}
        where = geometry(batch, length, kv_len=self.keys, cu_seqlens=None, **options)
        scores = torch.rand(batch, length, heads, config.num_blocks(self.keys), device=device)
        own = where.position[:, :, None].div(config.select_block, rounding_mode="floor")
        self.blocks = select_from_scores(scores, own, config)
        given = where, self.blocks, self.queries, config
        self.plan = functools.partial(packing.selected_ranges, *given)
        self.ranges, bounds = self.plan()
        self.rows, self.used = self.ranges.rows(self.keys), int(bounds[-1])
        self.grads = [normal(self.ranges.capacity, x.shape[-1]) for x in self.pair]

    def bytes(self, mode: str) -> int:
        """The bytes that have to be moved, as the head of this file describes them."""
        distinct = torch.unique(self.rows.index[: self.used]).numel()
        width, x = sum(x.shape[-1] for x in self.pair), self.pair[0]
        once = distinct * x.itemsize
        if mode == "backward":  # the sums are read and written
            once = distinct * 2 * chunks.wide(x.dtype).itemsize
        return (once + self.used * x.itemsize) * width + RANGE_BYTES * self.blocks.numel()

    def source(self, name: str) -> Any:
        ranges = self.plan()[0] if name.endswith("+plan") else self.ranges
        if name.endswith("deterministic"):
            return dataclasses.replace(ranges)  # a copy has not sorted yet
        if name.startswith("triton"):
            return ranges
        return ranges.rows(self.keys) if name.endswith("+plan") else self.rows

    def read(self, name: str, _: Any = None) -> list[torch.Tensor]:
        source = self.source(name)
        return [source.read(x) for x in self.pair]

    def add(self, name: str, totals: Sequence[torch.Tensor], _: Any = None) -> None:
        source = self.source(name)
        torch.use_deterministic_algorithms(name.endswith("deterministic"))
        try:
            for total, grad in zip(totals, self.grads, strict=True):
                source.add(total, grad)
        finally:
            torch.use_deterministic_algorithms(False)

    def call(self, mode: str, name: str) -> Callable[[Any], Any]:
        """The call that is timed."""
        if name == "copy":
            size = self.bytes(mode) // 2
            data = torch.empty(size, dtype=torch.uint8, device=self.blocks.device)
            return lambda _: data.clone()
        if mode == "forward":
            return functools.partial(self.read, name)
        source = self.source(name)
        return functools.partial(self.add, name, [source.zeros(x) for x in self.pair])

    def sums(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The gradients of key and value, flat; `dtype` is that of the sums."""
        like, source = [x.to(dtype) for x in self.pair], self.source(name)
        totals = [source.zeros(x) for x in like]
        self.add(name, totals)
        pairs = zip(totals, like, strict=True)
        return torch.cat([source.gradient(total, x).flatten() for total, x in pairs])

    def parity(self, mode: str, name: str) -> dict[str, Any]:
        """Packed rows have torch's bits. The error of sums against float64 is at most twice
        torch's and 4 roundings."""
        if not name.startswith("triton"):
            return {}
        if mode == "forward":
            pairs = zip(self.read(name), self.read("torch"), strict=True)
            same = all(torch.equal(a[: self.used], b[: self.used]) for a, b in pairs)
            return {} if same else {"status": "wrong", "reason": "not what torch packs"}
        exact, wide = self.sums("torch", torch.float64), chunks.wide(self.pair[0].dtype)
        found, beside = (
            float((self.sums(x, wide) - exact).abs().max()) for x in (name, "torch")
        )
        bound = 2 * beside + 4 * torch.finfo(wide).eps * float(exact.abs().max())
        fields = {"error_max": found, "error_bound": bound}
        if found <= bound:
            return fields
        return fields | {"status": "wrong", "reason": f"error {found:.2g} above {bound:.2g}"}


def measure(problem: Packing, runner, mode: str, name: str, seconds: float) -> dict[str, Any]:
    """The fields of the record of one row; a row that is wrong is not timed."""
    if name.startswith("triton") and runner.device == "cpu":
        return {"status": "unsupported", "reason": "the kernels need a CUDA device, got cpu"}

    def take():
        found = problem.parity(mode, name)
        step = None if "status" in found else runner.prepare(problem.call(mode, name), {})
        return found, step and functools.partial(time, step)

    def time(step, **how):
        work = cost.Cost(0, problem.bytes(mode))
        found = timed(step.time(**how), work, runner.device, problem.pair[0].itemsize)
        return found | {"extra_peak_bytes": step.extra_peak_bytes}

    return judged_row(f"{mode} {name}", take).timed(seconds=seconds)


def table(found: Sequence[Record]) -> str:
    """Markdown, one row per record."""
    copies = {(r.S, r.D, r.mode): r.time_ms for r in found if r.implementation == "copy"}
    lines = []
    for r in found:
        copy = copies.get((r.S, r.D, r.mode))
        share = copy / r.time_ms if copy and r.time_ms else None
        fate = r.status if r.status == "ok" else f"{r.status}: {r.reason}"
        lines.append(vars(r) | {"status": "ok", "fate": fate, "share": share})
    rows = tables.rows("pack", lines)
    return markdown.table(rows[0], (row.values() for row in rows))


def main(argv: Sequence[str]) -> int:
    runner = RUNNERS["torch"]()
    lines = command.new_file(FLAGS.out, "pack.jsonl")
    for config in FLAGS.config or (["tiny"] if runner.device == "cpu" else ["paper", "seed"]):
        settings = problems.settings(config)
        problem = Packing(settings, runner.platform, FLAGS.seed)
        about = command.about(runner, settings, queries=problem.queries.stop)
        about["branch"] = "selected"
        for mode, names in (("forward", FORWARD), ("backward", BACKWARD)):
            for name in names:
                row = measure(problem, runner, mode, name, FLAGS.row_seconds)
                row |= {"mode": mode, "implementation": name}
                record = records.record("pack", FLAGS.commit, **about, **row)
                records.append(lines, [record])
    done = records.read(lines)
    print(f"device: {runner.device}\n\n{table(done)}\nwritten to {lines}")
    if FLAGS.save_records:
        records.append(records.folder_of(runner.device) / "pack.jsonl", done)
    return exit_status.of(done)


if __name__ == "__main__":
    cli.run(main, FLAGS)

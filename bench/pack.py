"""How fast selected keys and values are packed, and their gradients added, beside a copy.

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
TITLES = ("shape", "mode", "what", "status", "ms", "p20", "p80", "GB/s", "of the copy's speed")


class Packing:
    """Random keys, values, gradients and selections of one chunk, and what packs them."""

    def __init__(self, settings: problems.Settings, device: str, seed: int):
        torch.manual_seed(seed)
        model, run, config = settings.model, settings.runtime, settings.nsa
        batch, heads, self.keys = run.batch, model.n_kv_groups, run.seq_len
        self.config, dtype = config, getattr(torch, run.dtype.name)
        normal = functools.partial(torch.randn, dtype=dtype, device=device)
        key, value = (normal(batch, self.keys, heads, w) for w in (model.d_k, model.d_v))
        self.pair = key, value
        slots = config.num_selected * config.select_block
        row_bytes = packing.packed_bytes(key, value, slots)
        most = max(1, fa2.MAX_SEQUENCES // (batch * heads))
        self.queries = next(chunks.chunks(self.keys, row_bytes, most))
        length = self.queries.stop
        self.where = geometry(
            batch,
            length,
            config=config,
            kv_len=self.keys,
            cu_seqlens=None,
            device=torch.device(device),
        )
        scores = torch.rand(batch, length, heads, config.num_blocks(self.keys), device=device)
        own = self.where.position[:, :, None].div(config.select_block, rounding_mode="floor")
        self.blocks = select_from_scores(scores, own, config)
        self.ranges, bounds = self.plan()
        self.rows, self.used = self.ranges.rows(self.keys), int(bounds[-1])
        capacity = self.ranges.capacity
        self.grads = [normal(capacity, x.shape[-1]) for x in self.pair]

    def plan(self):
        return packing.selected_ranges(self.where, self.blocks, self.queries, self.config)

    def bytes(self, mode: str) -> int:
        """What must be moved: see the head of this file."""
        distinct = torch.unique(self.rows.index[: self.used]).numel()
        width, x = sum(x.shape[-1] for x in self.pair), self.pair[0]
        once = distinct * x.itemsize
        if mode == "backward":  # the sums are read and written
            once = distinct * 2 * chunks.wide(x.dtype).itemsize
        return (once + self.used * x.itemsize) * width + RANGE_BYTES * self.blocks.numel()

    def source(self, name: str):
        triton = name.startswith("triton")
        if not name.endswith("+plan"):
            return self.ranges if triton else self.rows
        ranges, _ = self.plan()
        return ranges if triton else ranges.rows(self.keys)

    def read(self, name: str) -> list[torch.Tensor]:
        source = self.source(name)
        return [source.read(x) for x in self.pair]

    def add(self, name: str, totals) -> None:
        ordered = name.endswith("deterministic")
        # A copy has not sorted yet.
        source = dataclasses.replace(self.ranges) if ordered else self.source(name)
        torch.use_deterministic_algorithms(ordered)
        try:
            for total, grad in zip(totals, self.grads, strict=True):
                source.add(total, grad)
        finally:
            torch.use_deterministic_algorithms(False)

    def call(self, mode: str, name: str) -> Callable[[Any], Any]:
        """What is timed."""
        if name == "copy":
            data = torch.empty(
                self.bytes(mode) // 2, dtype=torch.uint8, device=self.blocks.device
            )
            return lambda _: data.clone()
        if mode == "forward":
            return lambda _: self.read(name)
        totals = [self.source(name).zeros(x) for x in self.pair]
        return lambda _: self.add(name, totals)

    def sums(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The gradients of key and value in `dtype`, that the sums are made in, flat."""
        like, source = [x.to(dtype) for x in self.pair], self.source(name)
        totals = [source.zeros(x) for x in like]
        self.add(name, totals)
        pairs = zip(totals, like, strict=True)
        return torch.cat([source.gradient(total, x).flatten() for total, x in pairs])

    def parity(self, mode: str, name: str) -> dict[str, Any]:
        """Packed: torch's bits. Sums: twice torch's error against float64, and 4 roundings."""
        if name == "copy" or name.startswith("torch"):
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
    """Markdown, one row a record."""
    copies = {(r.S, r.D, r.mode): r.times_ms for r in found if r.implementation == "copy"}
    rows = []
    for r in found:
        shape = f"B{r.B} Q{r.T} S{r.S} Hkv{r.Hkv} D{r.D} Dv{r.Dv} {r.dtype}"
        state = r.status if r.status == "ok" else f"{r.status}: {r.reason}"
        copy, times = copies.get((r.S, r.D, r.mode)), r.times_ms
        cells = [shape, r.mode, r.implementation, state, *"-----"]
        if times is not None:
            cells[4:8] = [*(f"{ms:.4g}" for ms in times), f"{r.gbps:.4g}"]
        if times is not None and copy is not None:
            cells[8] = f"{copy[0] / times[0]:.0%}"
        rows.append(cells)
    return markdown.table(TITLES, rows)


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

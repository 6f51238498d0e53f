"""Selected attention of one problem by each implementation: parity, then time, on k streams."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from nsa_core.config import NSAConfig

from ..judge.checks import Checker
from . import command, cost, problems
from .measure import Judged, guarded, judged, shape_of, timed
from .runners import problem
from .selection_rows import SPANS, Matrix, Row, spans


def settings_of(
    own: flags.FlagValues, row: Row, matrix: Matrix, batch: int, gpu: bool
) -> problems.Settings:
    """The settings of one row of `matrix`; `batch`: sequences, `own`: the command's flags."""
    blocks = 2 * (matrix.lengths[-1] // row.l_sel) + max(SPANS.values())
    return command.settings(
        own,
        selected(row.l_sel, row.count),
        gpu,
        seq_len=blocks * row.l_sel + row.N,
        batch=batch,
        dtype=matrix.dtype,
        heads=row.H,
        dk=row.D,
        dv=row.Dv,
    )


class Case:
    """One problem, and the calls that are measured on it; `settings`: of `settings_of`."""

    def __init__(self, runner, settings: problems.Settings, row: Row, seed: int):
        self.runner, self.settings, self.config = runner, settings, settings.nsa
        batch, groups = settings.runtime.batch, settings.model.n_kv_groups
        blocks = (settings.runtime.seq_len - row.N) // row.l_sel
        listed = spans(batch * row.N * groups, blocks, row.count, row.runs, seed)
        self.inputs = problems.make(
            settings,
            "random",
            seed,
            num_queries=row.N,
            block_indices=jnp.asarray(listed.reshape(batch, row.N, groups, row.count)),
        )
        self.checker = Checker(settings, self.inputs, backward=False)
        asked = problem(settings, runner.framework, runner.platform, runner.capability)
        self.asked = asked._replace(step="selected", T=row.N, S=self.inputs.num_keys)

    def judge(self, name: str | None, on_unsupported, streams: int) -> Judged:
        """What the implementation called `name` comes to, None: the first, before it is timed."""
        label = f"{self.runner.framework} selected {name or 'auto'}"
        found: dict[str, Any] = {"implementation": name or "auto"}
        step: Any = None

        def take():
            nonlocal step
            choice = self.runner.registry.choose(self.asked, name, on_unsupported)
            found["implementation"] = choice.implementation
            found["refused"] = dict(choice.refused)
            step, parity = self._judge(choice.load(), streams)
            return parity

        made = guarded(label, take, library=False)
        found |= made
        if "status" in found:
            return Judged(label, False, found)
        ran = found["implementation"]
        return Judged(label, False, found, lambda **how: self._time(step, ran, streams, how))

    def _judge(self, target, streams: int) -> tuple[Any, dict[str, Any]]:
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
        if streams > 1:
            step = runner.prepare(at_once(runner.torch, function, streams), arguments)
        return step, judged(parity, len(self.checker.rows))

    def _time(self, step, name: str, streams: int, how) -> dict[str, Any]:
        shape = shape_of(self.settings, self.inputs)
        timing = step.time(**how)
        found = timed(timing, self.work(shape, streams), self.runner.device, shape.itemsize)
        if "reason" not in found:
            found["reason"] = self.runner.note("selected", name, self.asked)
        return found | {"extra_peak_bytes": step.extra_peak_bytes}

    def work(self, shape: cost.Shape, streams: int) -> cost.Cost:
        """All selected keys are visible; a block that several queries read counts once."""
        size, indices = self.config.select_block, np.asarray(self.inputs.block_indices)
        pairs = shape.B * shape.T * shape.H * self.config.num_selected * size
        kinds = np.moveaxis(indices, 1, -1).reshape(shape.B * shape.Hkv, -1)
        read = sum(np.unique(each).size for each in kinds) * size
        rows = shape.B * shape.T * shape.H + read
        flops = streams * pairs * 2 * (shape.D + shape.Dv)
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

"""Which tiles of the Triton kernels are fastest: each pass of a branch by itself, on torch tensors.

A variant runs the whole pass of its branch, as `triton_forward` and `triton_backward` of
`nsa_core.steps` do, and keeps the launches of the kernel that is tuned with their tensors: only
those are timed. The results of the pass must be those of the heuristic's tiles.
"""

import functools
from collections.abc import Callable
from typing import Any

from kernels_pallas.triton.descriptions import SCORES_LIMITS, Problem, Selected
from kernels_pallas.triton.tiling import candidates, power, scores_tiling
from nsa_core import tiles
from nsa_core.steps import triton_backward, triton_forward
from nsa_core.steps.gradients import RowResiduals

from ..harness import timing
from ..harness.problems import Inputs, Settings

# The functions that a pass launches, of which its tiles decide the time.
LAUNCHED = {
    "forward": ("forward",),
    "dq": ("dq",),
    "dkv": ("of_intervals", "of_blocks", "merge"),
    "scores": ("best_blocks",),
}


class _Kept:
    """The `ops` that a pass runs with, and the launches of some functions."""

    def __init__(self, ops: Any, names: tuple[str, ...]):
        self.ops, self.names, self.launches = ops, names, list[tuple]()

    def __getattr__(self, name):
        return getattr(self.ops, name)

    def run(self, kernel, *tensors):
        if kernel.name in self.names:
            self.launches.append((kernel, *tensors))
        return self.ops.run(kernel, *tensors)


class Step:
    """A variant that has run: what its pass gave, and the launches to time."""

    def __init__(self, kept: _Kept, result: Any, clock: Callable[[Callable], float]):
        self.result, self.launches = result, kept.launches
        self._run, self._clock = kept.ops.run, clock

    def time_ms(self) -> float:
        """Of the launches one after the other, the median of several."""
        return self._clock(lambda _: [self._run(*launch) for launch in self.launches])


class Kernels:
    """The passes of one problem on Triton kernels, ready to run with any tiles.

    Args:
      runner: a `TorchRunner`.
      seconds: spent on samples of a variant.
      ops: what kernels run with; None: `nsa_torch.triton_ops`.
      clock: milliseconds of a call; None: CUDA events.
    """

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        runner: Any,
        seconds: float,
        ops: Any = None,
        clock: Callable[[Callable], float] | None = None,
    ):
        from nsa_torch.triton_ops import TRITON_OPS

        self.settings, self.inputs, self.runner = settings, inputs, runner
        self.ops = TRITON_OPS if ops is None else ops
        events = lambda call: timing.time_cuda_events(call, seconds=seconds).time_ms
        self.clock = events if clock is None else clock

    def shape(self, kernel: str) -> tiles.Shape:
        """What the entry of `kernel` is for."""
        model, run, config = self.settings.model, self.settings.runtime, self.settings.nsa
        step, _ = _parts(kernel)
        count = config.num_compressed(run.seq_len)
        return tiles.Shape.of(
            kernel,
            dtype=run.dtype.name,
            G=model.n_heads // model.n_kv_groups,
            D=model.d_k,
            Dv=0 if step == "scores" else model.d_v,
            queries=run.seq_len,
            keys=count if step in ("compressed", "scores") else run.seq_len,
            config=config,
        )

    def heuristic(self, kernel: str) -> dict[str, int]:
        """What the kernel uses without an entry."""
        step, part = _parts(kernel)
        problem = self._problem(kernel)
        if step == "scores":
            where = problem.group, problem.D, problem.itemsize, problem.capability
            found = scores_tiling(*where)
            if found is None:
                raise NotImplementedError(f"triton: no tiles of the scores fit, got {where}")
            return found._asdict()
        return problem.tiling(part, *self._limits(kernel, problem))._asdict()

    def variants(self, kernel: str) -> list[dict[str, int]]:
        """All tiles that fit in the memory of this architecture."""
        step, part = _parts(kernel)
        problem = self._problem(kernel)
        if step == "scores":
            where = problem.D, problem.D, problem.itemsize, problem.capability
            found = candidates("scores", SCORES_LIMITS, *where)
            found = [x for x in found if x.rows >= problem.group]
        else:
            found = problem.candidates(part, *self._limits(kernel, problem))
        return [x._asdict() for x in found]

    def prepare(self, kernel: str, chosen) -> Step:
        """Runs the pass of `kernel` with the tiles `chosen`."""
        step, part = _parts(kernel)
        kept = _Kept(self.ops, LAUNCHED[part])
        with self.runner.torch.no_grad(), tiles.forced(**{kernel: chosen}):
            found = self._pass(kept, step, part)
        if not kept.launches:
            raise RuntimeError(f"{kernel}: its pass launches none of {LAUNCHED[part]}")
        return Step(kept, [self.runner.numpy(x) for x in found], self.clock)

    def _pass(self, ops, step: str, part: str) -> list:
        """All that a pass gives."""
        arrays, given = self._arrays[step], (self._layout, self.settings.nsa, None)
        if step == "scores":
            query, key, lse = *arrays, self._forward["compressed"][1]
            blocks = self.settings.nsa.num_blocks(self.settings.runtime.seq_len)
            return [triton_forward.select_blocks(ops, query, key, lse, *given, blocks)]
        if part == "forward":
            return list(getattr(triton_forward, step)(ops, *arrays, *given))
        out, lse = self._forward[step]
        (delta,) = triton_backward.delta_of(self.ops, self._do, out)
        rows = RowResiduals(lse, delta)
        return list(getattr(triton_backward, step)(ops, *arrays, self._do, rows, *given))

    @functools.cached_property
    def _forward(self) -> dict[str, Any]:
        """Output and log-sum-exp of each branch."""
        given = self._layout, self.settings.nsa, None
        with self.runner.torch.no_grad(), _untuned():
            return {
                step: getattr(triton_forward, step)(self.ops, *self._arrays[step], *given)
                for step in ("compressed", "selected", "sliding")
            }

    @functools.cached_property
    def _arrays(self) -> dict[str, tuple]:
        steps = ("compressed", "scores", "selected", "sliding")
        given = {step: self.inputs.arguments(step).values() for step in steps}
        return {step: tuple(map(self.runner.load, arrays)) for step, arrays in given.items()}

    @functools.cached_property
    def _do(self):
        return self.runner.load(self.inputs.cotangent)

    @functools.cached_property
    def _layout(self):
        from nsa_torch import operators
        from nsa_torch.kernel_layout import KernelLayout

        config, length = self.settings.nsa, self.settings.runtime.seq_len
        place = operators.arguments(config, length, None, None)
        return KernelLayout(self.ops, self._arrays["sliding"][0], *place, clean=True)

    def _problem(self, kernel: str) -> Problem:
        """The sizes of the branch, without measured tiles."""
        step, _ = _parts(kernel)
        query, key, *rest = self._arrays[step]
        value = key if step == "scores" else rest[0]
        with _untuned():
            return triton_forward.problem_of(
                self.ops, step, query, key, value, self.settings.nsa, None
            )

    def _limits(self, kernel: str, problem: Problem) -> tuple[int | None, int | None]:
        """Rows and keys of a tile at most, besides what `Problem.limits` has."""
        step, part = _parts(kernel)
        config = self.settings.nsa
        if step != "selected":
            return None, None
        if part == "dkv":
            return None, power(config.select_block)
        return Selected(problem, config.num_selected, config.select_block).limits


def _untuned():
    """Within: every kernel has the tiles of its heuristic."""
    return tiles.forced(**{kernel: {} for kernel in tiles.TRITON})


def _parts(kernel: str) -> tuple[str, str]:
    """Branch and pass of `triton_<branch>_<pass>`."""
    _, step, part = kernel.split("_")
    return step, part

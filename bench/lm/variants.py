"""Determines which attention runs in a framework, and creates the learner for it."""

import contextlib
import dataclasses
import gc
from pathlib import Path
from typing import Any

from nsa_core.dispatch import OnUnsupported
from nsa_core.types import Branches

from ..harness import jobs
from ..harness.runners import RUNNERS, registry_problem
from .parallel import Parallel
from .ranks import Ranks
from .spec import Attention, Task

RANGES = ("none", "v1", "v2", "adaptive")  # nsa_torch.ranges.MODES
# The first backend is the default in 16 bits on a GPU. In other cases the last one is the
# default.
DENSE = {"jax": ("cudnn", "xla"), "torch": ("flash", "cudnn", "math")}


@dataclasses.dataclass(frozen=True)
class Variant:
    """An attention in one framework.

    Attributes:
      framework: "jax" or "torch".
      attention: "nsa" or "dense".
      label: The implementations that run, as text.
      implementation: The argument of the learner.
      graph: Whether torch may capture a step in a CUDA graph (`torch_learner.Learner`).
      parallel: The layout on several devices.
    """

    framework: str
    attention: Attention
    label: str
    implementation: Any
    graph: bool = True
    parallel: Parallel = dataclasses.field(default_factory=Parallel)

    @property
    def name(self) -> dict[str, Any]:
        """The fields that name this variant in a line of `log`."""
        return {
            "framework": self.framework,
            "attention": self.attention,
            "implementation": self.label,
        }


def dense(framework: str, name: str, dtype: str) -> Variant:
    """Return dense attention with the backend `name`, or with the default backend for "auto".

    Raises:
      ValueError: The framework has no such backend.
    """
    if name == "auto":
        fast = dtype != "float32" and gpu(framework)
        name = DENSE[framework][0 if fast else -1]
    if name not in DENSE[framework]:
        raise ValueError(f"dense must be in {DENSE[framework]} for {framework}, got {name!r}")
    return Variant(framework, "dense", name, name)


def nsa(
    framework: str,
    names: Branches[str | None],
    on_unsupported: OnUnsupported,
    task: Task,
    packed: bool = False,
) -> Variant:
    """Return the variant of NSA on the implementations `names`.

    Args:
      framework: "jax" or "torch".
      names: An implementation per branch. `names=None` means the automatic choice for the forward
        pass.
      on_unsupported: "error" or "fallback", for a named implementation that cannot run.
      task: The model and its training.
      packed: Whether rows have several documents.

    Raises:
      ValueError: The framework has no such implementation.
      NotImplementedError: A named implementation cannot run, and `on_unsupported` is "error".
    """
    runner = RUNNERS[framework]()
    for name in filter(None, names):
        if name not in runner.registry.names():
            raise ValueError(
                f"implementations of {framework} must be in {runner.registry.names()}, got {name!r}"
            )
    at, training = task.model.layer, task.training
    sizes = task.dtype, training.batch, training.seq_len
    problem = registry_problem(runner, at, at.config, *sizes, packed)
    chosen = runner.registry.choices(problem, names, on_unsupported)
    named = Branches(*(getattr(chosen, step).implementation for step in Branches._fields))
    return Variant(framework, "nsa", jobs.label(chosen), named)


def with_ranges(found: Variant, mode: str, task: Task) -> Variant:
    """Return the variant `found` with the `label` and the `graph` that are right in the context
    `ranges(mode)`. Ranges by `v1` cannot be captured in a CUDA graph.

    Raises:
      NotImplementedError: The selected branch of the variant `found` does not read ranges.
    """
    if mode == "none":
        return found
    kernel = found.implementation.selected
    if (found.framework, kernel) != ("torch", "fa2"):
        raise NotImplementedError(
            f"ranges={mode} needs the selected branch by fa2 in torch, got {kernel} in "
            f"{found.framework}; pass --framework torch --selected_kernel fa2"
        )
    from nsa_torch.ranges import way

    way_here = way(mode, task.training.seq_len)
    label = f"{found.label} ranges={mode}" + (f"={way_here}" if way_here != mode else "")
    return dataclasses.replace(found, label=label, graph=way_here != "v1")


def ranges(mode: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `fa2` of torch reads keys by ranges in the mode `mode`
    (`nsa_torch.ranges.using`).
    """
    if mode == "none":
        return contextlib.nullcontext()
    from nsa_torch.ranges import using

    return using(mode)


def device(framework: str) -> str:
    """Return the driver's name of the device on which the framework computes, or "cpu"."""
    return RUNNERS[framework]().device


def gpu(framework: str) -> bool:
    """Return whether the framework computes on a GPU here."""
    return device(framework) != "cpu"


def learner(variant: Variant, task: Task, scratch: Path, ranks: Ranks = Ranks()):
    """Return the learner of `task` with the attention `variant`.

    Args:
      variant: The attention, its framework and the layout.
      task: The model and its training.
      scratch: Folder for the initial weights, which a later learner of the task reads.
      ranks: The processes of the run.

    Raises:
      ValueError: The task cannot be divided as `variant.parallel` demands, or the number of torch
        processes differs from the number of devices.
      NotImplementedError: torch cannot divide heads over devices, train with
        `selection_loss` on several devices, or capture a graph with `safe` or `compiled`.
    """
    from . import torch_learner, torch_lm

    spread = variant.parallel
    spread.check(task)
    initial = scratch / f"{task.name}-{task.model.attention}.safetensors"
    if not initial.exists():
        torch_lm.initialize(initial, task.model, task.training.seed)
    if variant.framework == "jax":
        from . import jax_learner

        return jax_learner.Learner(task, initial, variant.implementation, spread, ranks)
    if spread.tensor > 1:
        raise NotImplementedError(f"tensor must be 1 in torch, got {spread.tensor}")
    if spread.kind != "none":
        if task.model.selection_loss:
            raise NotImplementedError("selection_loss must be 0 on several devices")
        if spread.devices != ranks.size:
            raise ValueError(
                f"devices must be {ranks.size}, the number of processes, got {spread.devices}"
            )
        if variant.graph and (spread.safe or spread.compiled):
            raise NotImplementedError(
                "a CUDA graph supports neither --ddp_safe (the graph does not run its hooks) nor "
                "--compile"
            )
    kind: Any = torch_learner.Learner
    if spread.kind == "fsdp" or (spread.kind == "ddp" and not variant.graph):
        from . import torch_parallel

        sharded = spread.kind == "fsdp"
        kind = torch_parallel.FSDPLearner if sharded else torch_parallel.DDPLearner
    return kind(task, initial, variant.implementation, spread, ranks, variant.graph)


def free() -> None:
    """Free the device memory of learners without references."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

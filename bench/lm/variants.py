"""Which attention runs in which framework, and the learner that has it."""

import contextlib
import dataclasses
import gc
from pathlib import Path
from typing import Any

from nsa_core.dispatch import OnUnsupported, Problem
from nsa_core.types import Branches

from ..harness import jobs
from ..harness.runners import RUNNERS
from .parallel import Parallel
from .ranks import Ranks
from .spec import Attention, Task

RANGES = ("none", "v1", "v2", "adaptive")  # nsa_torch.ranges.MODES
# The first that the dtype and device allow is the default: 16-bit on a GPU, or else the last.
DENSE = {"jax": ("cudnn", "xla"), "torch": ("flash", "cudnn", "math")}


@dataclasses.dataclass(frozen=True)
class Variant:
    """An attention of one framework; `label` is what runs, `implementation` how it is named,
    `graph` whether torch captures a step (`torch_learner.Learner`), `parallel` how it is spread.
    """

    framework: str
    attention: Attention
    label: str
    implementation: Any
    graph: bool = True
    parallel: Parallel = dataclasses.field(default_factory=Parallel)

    @property
    def name(self) -> dict[str, Any]:
        """The fields of a line of `log`."""
        return {
            "framework": self.framework,
            "attention": self.attention,
            "implementation": self.label,
        }


def dense(framework: str, name: str, dtype: str) -> Variant:
    """Dense attention by the backend `name`, or "auto".

    Raises:
      ValueError: the framework has no such backend.
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
    """NSA by the implementations `names`; None is the first that can run the forward pass,
    of `packed` rows where these have documents.

    Raises:
      ValueError: the framework has no such implementation.
      NotImplementedError: a named one refuses, and `on_unsupported` is "error".
    """
    runner = RUNNERS[framework]()
    for name in filter(None, names):
        if name not in runner.registry.names():
            raise ValueError(f"{framework} has {runner.registry.names()}, got {name!r}")
    at, training = task.model.layer, task.training
    problem = Problem(
        framework=framework,
        step="",
        platform=runner.platform,
        capability=runner.capability,
        dtype=task.dtype,
        B=training.batch,
        T=training.seq_len,
        S=training.seq_len,
        H=at.n_heads,
        Hkv=at.n_kv_groups,
        D=at.d_k,
        Dv=at.d_v,
        packed=packed,
        config=at.config,
        device=None if runner.device == "cpu" else runner.device,
    )
    chosen = runner.registry.choices(problem, names, on_unsupported)
    named = Branches(*(getattr(chosen, step).implementation for step in Branches._fields))
    return Variant(framework, "nsa", jobs.label(chosen), named)


def with_ranges(found: Variant, mode: str, task: Task) -> Variant:
    """Return `found` within `ranges(mode)`; v1 cannot be captured in a CUDA graph.

    Raises:
      NotImplementedError: its selected branch reads no ranges.
    """
    if mode == "none":
        return found
    kernel = found.implementation.selected
    if (found.framework, kernel) != ("torch", "fa2"):
        raise NotImplementedError(
            f"ranges={mode} needs the selected branch by fa2 in torch "
            f"(--framework torch --selected_kernel fa2), got {kernel} in {found.framework}"
        )
    from nsa_torch.ranges import way

    way_here = way(mode, task.training.seq_len)
    label = f"{found.label} ranges={mode}" + (f"={way_here}" if way_here != mode else "")
    return dataclasses.replace(found, label=label, graph=way_here != "v1")


def ranges(mode: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `fa2` of torch reads keys by ranges in this mode
    (`nsa_torch.ranges.using`).
    """
    if mode == "none":
        return contextlib.nullcontext()
    from nsa_torch.ranges import using

    return using(mode)


def device(framework: str) -> str:
    """Return the device on which the framework computes, in the driver's words, or "cpu"."""
    return RUNNERS[framework]().device


def gpu(framework: str) -> bool:
    """Whether the framework computes on a GPU here."""
    return device(framework) != "cpu"


def learner(variant: Variant, task: Task, scratch: Path, ranks: Ranks = Ranks()):
    """Return the learner of `task` by `variant`; `scratch` keeps initial weights for the next one.

    Raises:
      ValueError: The task cannot be divided as `variant.parallel` demands.
      NotImplementedError: torch, over heads, or a `selection_loss` on several devices.
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
                "a CUDA graph runs neither hooks of ddp_safe nor compiled blocks"
            )
    options = dict(accumulate=spread.accumulate, compiled=spread.compiled, graph=variant.graph)
    kind: Any = torch_learner.Learner
    if spread.kind == "fsdp" or (spread.kind == "ddp" and not variant.graph):
        from . import torch_parallel

        options |= {"safe": spread.safe}
        sharded = spread.kind == "fsdp"
        kind = torch_parallel.FSDPLearner if sharded else torch_parallel.DDPLearner
    return kind(task, initial, variant.implementation, ranks=ranks, **options)


def free() -> None:
    """Gives back the device memory of learners that nothing refers to any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

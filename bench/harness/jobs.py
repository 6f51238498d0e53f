"""Determines the rows of a comparison. By default there is a row for every implementation of every
branch. If implementations are named, only the named implementations have rows.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from nsa_core.dispatch import Choices
from nsa_core.types import Branches

from .cost import Cost, Shape
from .problems import Inputs
from .records import Values
from .runners import forward


@dataclasses.dataclass(frozen=True)
class Job:
    """One row to measure, or the reason why there is nothing to measure."""

    branch: str
    label: str  # the implementation and its form
    implementation: Any = None  # the argument of the public functions
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    unsupported: str = ""
    # Whether this row must be measured, since its implementation was named. None if the name
    # belongs to another framework. If False, it is enough to measure one row of the branch.
    asked: bool | None = False
    # a function that runs instead of the public function
    function: Callable[[Values], Values] | None = None
    # a function that is timed instead of the judged function
    timed: Callable[[Values], Values] | None = None
    # the cost of the timed call on the inputs, if it differs from that of the branch
    work: Callable[[Shape, Inputs], Cost] | None = None
    # For whole attention of another library: computes its compressed `key` and its `blocks`.
    own: Callable[[Values], Values] | None = None
    # False if the row computes another function than the oracle, see `note`
    judged: bool = True
    library: bool = False  # code of another library, which may refuse in its own ways
    note: str = ""  # the note of a row whose status is ok
    extra: Values = dataclasses.field(default_factory=dict)  # of the record
    form: str = ""  # form of whole attention: "recompute", "packed", or "" for a plain call

    def named(self, branch: str) -> Any:
        """Return this job for the implementation of one branch."""
        each = self.implementation
        return getattr(each, branch) if isinstance(each, Branches) else each


def jobs(
    runner, question, wanted: Branches, on_unsupported: str, branches, *, chosen: bool = False
) -> Iterator[Job]:
    """Yield the rows of one framework, branch by branch.

    Args:
      runner: The runner of the framework.
      question: The `Problem` to solve.
      wanted: The named implementation of each branch, or None.
      on_unsupported: See `Registry.choose`.
      branches: The branches.
      chosen: Whether only the automatic choice is measured for a branch without a name. By
        default all implementations are measured.
    """
    for branch in branches:
        if branch == "dense":
            yield from (Job(branch, name, name) for name in runner.dense_names)
        elif branch == "all":
            yield from _whole(runner.registry, question, wanted, on_unsupported, chosen)
        else:
            yield from _step(runner.registry, question, branch, wanted, on_unsupported, chosen)


def _step(registry, question, branch, wanted, on_unsupported, chosen) -> Iterator[Job]:
    question = question._replace(step=branch)
    # The scores run on the implementation of the selected branch, as in `Registry.choices`.
    name = wanted.selected if branch == "scores" else getattr(wanted, branch)
    if name is None and not chosen:
        for entry in registry.table[branch]:
            yield Job(branch, entry.name, entry.name, {}, entry.refusal(question) or "")
        return
    try:
        choice = registry.choose(question, name, on_unsupported)
    except (NotImplementedError, ValueError) as error:
        known = name is None or name in registry.names() or None
        yield Job(branch, name or "auto", None, {}, str(error), known)
    else:
        name = choice.implementation
        yield Job(branch, name, name, dict(choice.refused), asked=True)


def _whole(registry, question, wanted, on_unsupported, chosen) -> Iterator[Job]:
    """Yield the rows of the table for attention of all branches. There is one row per
    implementation, on which all steps run, and one row for the automatic choice. If implementations
    are named or `chosen` is given, there is only one row.
    """
    if any(wanted) or chosen:
        try:
            chosen = registry.choices(question, wanted, on_unsupported)
        except (NotImplementedError, ValueError) as error:
            known = all(name is None or name in registry.names() for name in wanted) or None
            yield Job("all", "/".join(n or "auto" for n in wanted), None, {}, str(error), known)
            return
        names = Branches(*(getattr(chosen, step).implementation for step in Branches._fields))
        yield Job("all", label(chosen), names, refusals(chosen), asked=True)
        return
    automatic, refused = None, ""
    try:
        automatic = registry.choices(question)
    except NotImplementedError as error:
        refused = str(error)
    seen = False
    for name in registry.names():
        try:
            chosen = registry.choices(question, name)
        except NotImplementedError as error:
            yield Job("all", name, None, {}, str(error))
            continue
        same = automatic is not None and label(chosen) == label(automatic)
        seen = seen or same
        yield Job("all", label(chosen), name, refusals(automatic) if automatic and same else {})
    if automatic is None:
        yield Job("all", "auto", None, {}, refused)
    elif not seen:
        yield Job("all", label(automatic), None, refusals(automatic))


def in_form(form: str, runner, job: Job, settings) -> Job:
    """Make a job that computes all branches like the job `job`, but with `recompute` or as one
    packed row.

    `recompute` stores no branch outputs for the backward pass. `packed` uses one packed row with
    metadata that is made before the call."""
    run, config = settings.runtime, settings.nsa
    meta = runner.metadata(run.batch, run.seq_len, config) if form == "packed" else None

    def function(arguments):
        given, rows = {**arguments, "recompute": True}, arguments["query"].shape[:2]
        if form == "packed":
            flat = lambda x: x.reshape(1, -1, *x.shape[2:])
            given = {name: jax.tree.map(flat, x) for name, x in arguments.items()}
            given["varlen"] = meta
        out = forward(runner.api, "all", config, job.implementation, given)["out"]
        return {"out": out.reshape(*rows, *out.shape[2:])}

    return dataclasses.replace(job, label=f"{job.label} {form}", function=function, form=form)


def label(chosen: Choices) -> str:
    """Return the name of the implementation that all steps share. If the steps have different
    implementations, return the names of the implementations of the four steps, in the order of the
    steps."""
    return joined(choice.implementation for choice in chosen)


def joined(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(set(names)) == 1 else "/".join(names)


def refusals(chosen: Choices) -> dict[str, str]:
    return {
        f"{choice.step}.{name}": reason
        for choice in chosen
        for name, reason in choice.refused.items()
    }

"""Measures one row of a table: first its parity, then its time. Wrong rows are not timed. Failed
rows have a reason.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax

from ..judge.checks import Checker
from . import cost, heartbeat
from .jobs import Job
from .records import FIELDS, Values
from .runners import forward, out_of_memory

log = logging.getLogger(__name__)


def guarded(name: str, take: Callable[[], Values], *, library: bool = False) -> Values:
    """Return the fields from `take`, or a status and the reason if `take` raises an exception.

    `NotImplementedError` gives the status `unsupported`, a lack of memory `oom`, and any other
    exception `error`. `library` means that the code of another library is measured. With
    `library`, all other exceptions also give `unsupported`.
    """
    heartbeat.say(name)
    try:
        return take()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
        if out_of_memory(error):
            return {"status": "oom", "reason": reason.splitlines()[0]}
        if isinstance(error, NotImplementedError) or library:
            return {"status": "unsupported", "reason": reason}
        log.exception("%s", name)
        return {"status": "error", "reason": reason}


@dataclasses.dataclass(frozen=True)
class Judged:
    """A row whose parity has been judged. The object has the fields that are known so far, and a
    function that times the row if the results are right.
    """

    name: str
    library: bool
    found: Values
    time: Callable[..., Values] | None = None

    def timed(self, **how: Any) -> Values:
        """Time the row and return the fields of its record. `how` has arguments of `timing`."""
        time = self.time
        if time is None:
            return self.found
        return self.found | guarded(self.name, lambda: time(**how), library=self.library)


def judged_row(
    name: str,
    take: Callable[[], tuple[Values, Any]],
    *,
    library: bool = False,
    refused: str = "",
) -> Judged:
    """Return a row from `take`, which returns the fields of parity and a function that times the
    row. If there is a reason `refused`, `take` is not called and the row is `unsupported`.
    """
    if refused:
        return Judged(name, library, {"status": "unsupported", "reason": refused})
    found = guarded(name, lambda: {"taken": take()}, library=library)
    found, time = found.get("taken", (found, None))
    return Judged(name, library, found, None if "status" in found else time)


def judge(job: Job, runner, checker: Checker, load: Callable | None = None) -> Judged:
    """Compile `job` and compare its results with the oracle. The function `load` is `runner.load`
    or `once(runner.load)`.
    """
    name, config = f"{runner.framework} {job.branch} {job.label}", checker.config
    load, inputs = load or runner.load, checker.inputs

    def function(arguments):
        if job.function is not None:
            return job.function(arguments)
        if job.branch == "dense":
            return runner.dense(job.implementation, **arguments)
        return forward(runner.api, job.branch, config, job.implementation, arguments)

    def take():
        arguments = load(inputs.arguments(job.branch))
        cotangent = load(inputs.cotangent) if checker.backward else None
        step, found = runner.prepare(function, arguments, cotangent), None
        if job.judged and job.branch == "all":
            own = selection(runner, config, job, arguments)
            given = arguments | {"block_indices": own[1]}
            frozen = runner.prepare(function, given, cotangent)
            found = checker.check_whole(runner, step, frozen, own)
        elif job.judged:
            found = checker.check(runner, step, job.branch)
        if job.timed is not None:
            step = runner.prepare(job.timed, arguments, cotangent)
        fields = judged(found, len(checker.rows)) if found else {"extra": {"judged": False}}
        return fields, functools.partial(_time, step, job, runner, checker)

    library = job.library or job.branch == "dense"
    return judged_row(name, take, library=library, refused=job.unsupported)


def once(load: Callable) -> Callable:
    """Return a version of the function `load` that loads each array once and caches the array."""
    known: dict[int, tuple[Any, Any]] = {}

    def one(array):
        if id(array) not in known:
            known[id(array)] = array, load(array)
        return known[id(array)][1]

    return lambda arrays: jax.tree.map(one, arrays)


def _time(step, job, runner, checker: Checker, **how) -> Values:
    settings, inputs = checker.settings, checker.inputs
    timing, shape = step.time(**how), shape_of(settings, inputs)
    if job.work:
        work = job.work(shape, inputs)
    else:
        work = cost.cost(job.branch, shape, settings.nsa, backward=checker.backward)
    found = timed(timing, work, runner.device, shape.itemsize)
    if "jax" not in job.label.split("/"):  # torch does not count the memory of JAX
        found["extra_peak_bytes"] = step.extra_peak_bytes
    if "reason" not in found:
        found["reason"] = job.note or runner.note(job.branch, job.label, settings.model)
    return found


def judged(parity, rows: int) -> Values:
    """Return the fields of a `parity` that was checked on `rows` rows. If a bound is broken, the
    fields include `status`.
    """
    found: Values = {"rows_checked": rows}
    for name, x in vars(parity).items():
        if name in FIELDS:
            found[name] = None if isinstance(x, float) and not math.isfinite(x) else x
    reason = found.pop("reason")
    return found if parity.ok else found | {"status": "wrong", "reason": reason}


def timed(timing, work: cost.Cost, device: str, itemsize: int) -> Values:
    """Return the fields of a time. An impossible time gives the status `error`."""
    found = dataclasses.asdict(timing) | {
        "useful_flops": work.flops,
        "bytes": work.bytes,
        "tflops": work.flops / timing.time_ms / 1e9,
        "gbps": work.bytes / timing.time_ms / 1e6,
    }
    doubt = cost.impossible(work, timing.time_ms, device, itemsize)
    return found | ({"status": "error", "reason": doubt} if doubt else {})


def selection(runner, config, job: Job, arguments: Values) -> tuple:
    """Return the compressed keys and the blocks that `job` computes in attention of all
    branches."""
    name = job.named("selected")
    if isinstance(name, str) and name not in runner.registry.names("scores"):
        name = None

    def select(given):
        key = runner.api.compress(given["key"].compressed, config=config)
        where = {"config": config, "implementation": name}
        return {"key": key, "blocks": runner.api.select_blocks(given["query"], key, **where)}

    given = {"query": arguments["query"], "key": arguments["key"]}
    result = runner.prepare(job.own or select, given)()
    return result["key"], result["blocks"]


def shape_of(settings, inputs=None, queries: int | None = None) -> cost.Shape:
    """Return the sizes of a problem, with or without its inputs. `queries` is the number of
    queries, which are the last tokens. `queries` defaults to all tokens.
    """
    run, model = settings.runtime, settings.model
    batch, queries, keys = run.batch, queries or run.seq_len, run.seq_len
    if inputs is not None:
        (batch, queries), keys = inputs.query.shape[:2], inputs.num_keys
    sizes = (model.n_heads, model.n_kv_groups, model.d_k, model.d_v)
    return cost.Shape(batch, queries, keys, *sizes, run.dtype.itemsize)

"""One row: parity first, then time; what is wrong is not timed, what fails says why."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..judge.checks import Checker
from . import cost, heartbeat
from .jobs import Job
from .runners import forward, out_of_memory, problem

log = logging.getLogger(__name__)


def guarded(name: str, take: Callable[[], dict[str, Any]], *, library: bool) -> dict[str, Any]:
    """What `take` measures, or status and reason of what it raised.

    `library`: the code measured is not ours and may refuse in its own ways.
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
    """A row after its parity: what was found, and what times it unless that ends the row."""

    name: str
    library: bool
    found: dict[str, Any]
    time: Callable[..., dict[str, Any]] | None = None

    def timed(self, **how: Any) -> dict[str, Any]:
        """The fields of the record; `how`: as `timing` takes it."""
        time = self.time
        if time is None:
            return self.found
        return self.found | guarded(self.name, lambda: time(**how), library=self.library)


def measure(
    job: Job, runner, settings, inputs, checker: Checker, mode: str, **how: Any
) -> dict[str, Any]:
    """The fields of the record that measuring `job` gives; `how`: as `timing` takes it."""
    return judge(job, runner, settings, inputs, checker, mode).timed(**how)


def judge(
    job: Job,
    runner,
    settings,
    inputs,
    checker: Checker,
    mode: str,
    load: Callable | None = None,
) -> Judged:
    """Compiles `job` and compares it with the oracle; `load`: `runner.load`, or `once` of it."""
    name, library = f"{runner.framework} {job.branch} {job.label}", job.library
    if job.unsupported:
        return Judged(name, library, {"status": "unsupported", "reason": job.unsupported})
    library = library or job.branch == "dense"
    step = None

    def take():
        nonlocal step
        found, step = _judge(job, runner, settings, inputs, checker, mode, load or runner.load)
        return found

    found = guarded(name, take, library=library)
    if step is None or "status" in found:
        return Judged(name, library, found)

    def time(**how):
        return _time(step, job, runner, settings, inputs, mode, **how)

    return Judged(name, library, found, time)


def once(load: Callable) -> Callable:
    """`load` that loads each array once, and keeps it."""
    known: dict[int, tuple[Any, Any]] = {}

    def one(array):
        if id(array) not in known:
            known[id(array)] = array, load(array)
        return known[id(array)][1]

    return lambda arrays: jax.tree.map(one, arrays)


def _judge(job, runner, settings, inputs, checker, mode, load) -> tuple[dict[str, Any], Any]:
    """What parity says, and the step to time."""
    config = settings.nsa

    def function(arguments):
        if job.function is not None:
            return job.function(arguments)
        if job.branch == "dense":
            return runner.dense(job.implementation, **arguments)
        return forward(runner.api, job.branch, config, job.implementation, arguments)

    arguments = load(inputs.arguments(job.branch))
    cotangent = load(inputs.cotangent) if mode == "fwdbwd" else None
    step = runner.prepare(function, arguments, cotangent)
    if not job.judged:
        return {"extra": {"judged": False}}, step
    if job.branch == "all":
        own = selection(runner, config, job, arguments)
        given = arguments | {"block_indices": own[1]}
        frozen = runner.prepare(function, given, cotangent)
        parity = checker.check_whole(runner, step, frozen, arguments, own)
    else:
        parity = checker.check(runner, step, job.branch, arguments)
    return judged(parity, len(checker.rows)), step


def _time(step, job, runner, settings, inputs, mode, **how) -> dict[str, Any]:
    timing = step.time(**how)
    shape = shape_of(settings, inputs)
    work = cost.cost(job.branch, shape, settings.nsa, backward=mode == "fwdbwd")
    found = timed(timing, work, runner.device, shape.itemsize)
    found["extra_peak_bytes"] = runner.extra_peak_bytes(step, job.label)
    if "reason" not in found:
        asked = problem(settings, "", "")
        found["reason"] = job.note or runner.note(job.branch, job.label, asked)
    return found


def judged(parity, rows: int) -> dict[str, Any]:
    """What a record says of its parity on so many rows; `status` is among it only where that
    is broken.
    """
    values = {
        "error_max": parity.error_max,
        "error_mean": parity.error_mean,
        "error_bound": parity.bound_max,
        "error_mean_bound": parity.bound_mean,
        "error_rms": parity.error_rms,
        "error_rms_bound": parity.bound_rms,
        "slope": parity.slope,
    }
    finite = {
        name: None if x is None or not math.isfinite(x) else x for name, x in values.items()
    }
    found = {
        "rows_checked": rows,
        "rows_differ": parity.rows_differ,
        "error_of": parity.name,
        **finite,
    }
    return found if parity.ok else found | {"status": "wrong", "reason": parity.reason}


def timed(timing, work: cost.Cost, device: str, itemsize: int) -> dict[str, Any]:
    """What a record says of its time; a time that cannot be true is an error."""
    found = dataclasses.asdict(timing) | {
        "useful_flops": work.flops,
        "bytes": work.bytes,
        "tflops": work.flops / timing.time_ms / 1e9,
        "gbps": work.bytes / timing.time_ms / 1e6,
    }
    doubt = cost.impossible(work, timing.time_ms, device, itemsize)
    return found | ({"status": "error", "reason": doubt} if doubt else {})


def selection(runner, config, job: Job, arguments: Mapping[str, Any]) -> tuple:
    """The compressed keys and the blocks that the whole attention of `job` makes on its way."""
    name = job.named("selected")
    if isinstance(name, str) and name not in runner.registry.names("scores"):
        name = None

    def select(given):
        key = runner.api.compress(given["key"].compressed, config=config)
        where = {"config": config, "implementation": name}
        return {"key": key, "blocks": runner.api.select_blocks(given["query"], key, **where)}

    given = {"query": arguments["query"], "key": arguments["key"]}
    result = runner.prepare(job.own or select, given)(given)
    return result["key"], result["blocks"]


def shape_of(settings, inputs) -> cost.Shape:
    """The sizes of a problem."""
    batch, queries = inputs.query.shape[:2]
    return _shape(settings, batch, queries, inputs.num_keys)


def shape_without_inputs(settings, queries: int | None = None) -> cost.Shape:
    """The sizes of a problem that was not made; `queries`: the last of its tokens, None: all."""
    run = settings.runtime
    return _shape(settings, run.batch, queries or run.seq_len, run.seq_len)


def _shape(settings, batch: int, queries: int, keys: int) -> cost.Shape:
    model = settings.model
    sizes = (model.n_heads, model.n_kv_groups, model.d_k, model.d_v)
    return cost.Shape(batch, queries, keys, *sizes, settings.runtime.dtype.itemsize)

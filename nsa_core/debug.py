"""Logs the events of a call, one per line, with the loggers `nsa_jax.<event>`, `nsa_torch.<event>`.

    nsa_core.debug.enable("routing", "timing")  # and logging.basicConfig(), or a handler

All events are off at first.

| event     | logged data                                                          |
|-----------|----------------------------------------------------------------------|
| `routing` | the chosen implementation and each refusal, once per set of choices  |
| `shapes`  | dtypes and shapes of the arguments of each step                      |
| `timing`  | milliseconds of each step                                            |
| `compare` | mean and largest absolute error of each branch against the reference |

For `timing`, the host waits for the device before and after a step, which makes the whole call
slower. `compare` runs the reference on the same arguments. For the scores, `compare` logs the
number of lists of selected blocks that differ.

A line has the form `NSA-LOG <event> key=value ...`. A line of `compare` has the form `NSA-DBG
key=value ...` with the keys `<branch>_mae` and `<branch>_max`. A fused path runs its steps one by
one while `timing` or `compare` is on. Under `jax.jit` and other transforms, `routing` and `shapes`
report once, while the call is traced. While a call is traced, arrays have no values, and `timing`
and `compare` print the reason why the events cannot run. Under `torch.compile` only `routing` is
reported. While an event is on, the torch functions also read `cu_seqlens` on a GPU, and raise the
same errors as on a CPU.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nsa_core import validate

EVENTS = ("routing", "shapes", "timing", "compare")
FRAMEWORKS = ("nsa_jax", "nsa_torch")
ARGUMENTS = {
    "compress": ("x",),
    "compressed": ("query", "compressed_key", "compressed_value"),
    "scores": ("query", "compressed_key"),
    "selected": ("query", "key", "value", "block_indices"),
    "sliding": ("query", "key", "value"),
    "combine": ("outputs", "gates"),
    "attention": ("query", "key", "value", "gates", "compressed", "block_indices"),
}
SEED_NAMES = {"compressed": "cmp", "selected": "sel", "sliding": "win"}
# The reference is dense and needs several float32 arrays [B, H, T, S] at the same time.
MAX_BYTES, BYTES_EACH = 2 * 2**30, 16

on = False  # every call reads this flag; while no event is on, `debug` costs nothing else
_left: dict[str, int] = {}  # number of remaining lines for each event that is on
_told: set[tuple[str, str, str]] = set()


class Backend(NamedTuple):
    """The functions of a framework that read its arrays."""

    package: str  # nsa_jax or nsa_torch
    silent: Callable[[], bool]  # whether a step cannot report anything in the current context
    traced: Callable[
        [Any], bool
    ]  # whether any of these arrays has no value, since it is traced
    wait: Callable[[Any], Any]  # waits until the device has computed the arrays
    numpy: Callable[[Any], np.ndarray]


def enable(*events: str, limit: int = 100) -> None:
    """Enable the given events and disable all others. An event is disabled after `limit` lines.

    Raises:
      ValueError: An event is unknown, or the limit is below 1.
    """
    global on
    for event in events:
        validate.one_of("event", event, EVENTS)
    if limit < 1:
        raise ValueError(f"limit must be at least 1 line, got {limit}")
    on = bool(events)
    _left.clear()
    _left.update(dict.fromkeys(events, limit))
    _told.clear()
    for package in FRAMEWORKS:
        for event in EVENTS:
            level = logging.INFO if event in events else logging.NOTSET
            logging.getLogger(f"{package}.{event}").setLevel(level)


def stepwise(backend: Backend, *arrays) -> bool:
    """Return whether a fused path must run step by step to time or compare single steps."""
    if not on or backend.silent():
        return False
    return not _left.keys().isdisjoint({"timing", "compare"}) and not backend.traced(arrays)


def choices(backend: Backend, problem, chosen) -> None:
    """Report the `Choices` of `problem`."""
    sizes = ("dtype", "B", "T", "S", "H", "Hkv", "D", "Dv")
    fields = {name: getattr(problem, name) for name in sizes}
    fields |= {choice.step: choice.implementation for choice in chosen}
    for choice in chosen:
        fields |= {f"{choice.step}.not_{x}": why for x, why in choice.refused.items()}
    _tell(backend.package, "routing", fields, once=str(chosen))


def watch(
    backend: Backend,
    step: str,
    name: str,
    function: Callable,
    registry: Any = None,
) -> Callable:
    """Wrap `function`, which computes `step` with the implementation `name`. The returned
    function also reports the enabled events. `registry` contains the reference implementation of
    the step.
    """
    if not on or backend.silent():
        return function

    def told(*args, **options):
        about = {"step": step, "implementation": name}
        given = dict(zip(ARGUMENTS[step], args, strict=False))
        traced = backend.traced((args, options))
        if "shapes" in _left:
            shapes = {key: _shape(x) for key, x in given.items() if x is not None}
            _tell(backend.package, "shapes", about | shapes | {"traced": traced})
        if traced:
            why = "there are no values under a transform (jit, grad, vmap)"
            for event in ("timing", "compare"):
                _tell(backend.package, event, {"refused": why})
            return function(*args, **options)
        timed = "timing" in _left
        if timed:
            backend.wait((args, options))
        start = time.perf_counter()
        result = function(*args, **options)
        if timed:
            backend.wait(result)
            spent_ms = (time.perf_counter() - start) * 1e3
            ms = {"ms": f"{spent_ms:.4g}", "synchronizes": True}
            _tell(backend.package, "timing", about | ms)
        oracle = registry and registry.entry(step, "reference")
        if "compare" in _left and oracle:
            fields = _errors(backend, about, oracle.load(), result, args, options)
            _tell(backend.package, "compare", fields)
        return result

    return told


def _errors(backend, about, oracle, result, args, options) -> dict[str, Any]:
    """Return the errors of a result relative to the reference, or the reason why they cannot be
    computed.
    """
    query, key = args[:2]
    size = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[1] * BYTES_EACH
    if size > MAX_BYTES:
        most = MAX_BYTES / 2**30
        why = f"the dense reference needs {size / 2**30:.1f} GiB, more than {most:.0f}"
        return about | {"refused": why}
    exact = oracle(*args, **options)
    if about["step"] == "scores":
        differ = (backend.numpy(result) != backend.numpy(exact)).any(axis=-1)
        return {"scores_rows_differ": int(differ.sum()), "rows": differ.size} | about
    pair = (backend.numpy(x[0]).astype(np.float64) for x in (result, exact))
    error, short = np.abs(np.subtract(*pair)), SEED_NAMES[about["step"]]
    found = {f"{short}_mae": f"{error.mean():.3g}", f"{short}_max": f"{error.max():.3g}"}
    return found | about


def _tell(package: str, event: str, fields: dict[str, Any], once: str = "") -> None:
    """Log one line, unless the event is off or a line with the same key `once` was logged before.
    Each reason for a refusal is logged once, and does not count towards the limit.
    """
    global on
    refusal = "refused" in fields
    about = package, event, str(fields) if refusal else once
    if event not in _left or (about[-1] and about in _told):
        return
    _told.add(about)
    words = ["NSA-DBG"] if event == "compare" and not refusal else ["NSA-LOG", event]
    words += [f"framework={package.removeprefix('nsa_')}"]
    words += [f"{key}={_value(x)}" for key, x in fields.items()]
    log = logging.getLogger(f"{package}.{event}")
    log.info("%s", " ".join(words))
    _left[event] -= not refusal
    if not _left[event]:
        log.info("NSA-LOG limit event=%s: further lines are omitted", event)
        del _left[event]
        on = bool(_left)


def _value(x: Any) -> str:
    """Return a single word unchanged, and any other text in quotes."""
    text = str(x).lower() if isinstance(x, bool) else str(x)
    return json.dumps(text) if " " in text or not text else text


def _shape(x: Any) -> str:
    """Return text such as `bfloat16[1,512,4,32]`, or a list of such texts in brackets."""
    if isinstance(x, tuple):
        return f"({','.join('None' if y is None else _shape(y) for y in x)})"
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"

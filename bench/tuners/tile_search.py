"""Which tiles are fastest: variants of the Mosaic kernels, each beside the heuristic's.

Every variant runs in the step of `nsa_core.steps.mosaic_forward` that builds the kernel, with the
gates and sums of the whole forward. It must give what the heuristic's tiles give before it is
timed; the winner is timed once more in turn with the heuristic, and must gain both times.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.specs import interval, scores, selected
from nsa_core import tiles
from nsa_core.steps import mosaic_forward
from nsa_jax import geometry
from nsa_jax.jax_ops import JAX_OPS

from ..harness import records
from ..harness.problems import Inputs, Settings

type Tiles = Mapping[str, int]

GAIN = 0.02  # of the heuristic's time, or no entry is written
ROUNDINGS = 4  # of the output's dtype, that two orders of summation may differ by
_BAND: dict[str, tuple[int, ...]] = {"block": (64, 128, 192), "stages": (2, 3, 4)}
VARIANTS: dict[str, dict[str, tuple[int, ...]]] = {
    "compressed": _BAND,
    "scores": {"stages": (2, 3, 4), "held": (256, 512, 1024)},
    "selected": {"key_stages": (1, 2, 3), "value_stages": (1, 2)},
    "sliding": _BAND,
}
SPECS: dict[str, Any] = {
    "compressed": interval.IntervalAttention,
    "scores": scores.Scores,
    "selected": selected.SelectedAttention,
    "sliding": interval.IntervalAttention,
}


class Step(Protocol):
    """A compiled call: its result, and how long one takes, the median of several."""

    result: Any

    def time_ms(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Trial:
    """One variant: its time, or why it has none."""

    tiles: dict[str, int]
    time_ms: float | None
    reason: str = ""
    wrong: bool = False  # it ran, and gave something else than the heuristic


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All variants of a kernel for one shape, the heuristic's first."""

    trials: tuple[Trial, ...]
    winner: Trial | None  # None: nothing gains enough
    pairs_ms: tuple[tuple[float, float], ...] = ()  # heuristic and best, each time beside it

    @property
    def heuristic(self) -> Trial:
        return self.trials[0]

    @property
    def gain(self) -> float:
        """The part of the heuristic's time that the best variant saves, the smaller of two."""
        return min((1 - best / base for base, best in self.pairs_ms), default=0.0)


def variants(kernel: str) -> list[dict[str, int]]:
    """All combinations of what can be tuned; some will not fit the chip."""
    values = VARIANTS[kernel]
    return [
        dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
    ]


def heuristic(kernel: str, settings: Settings) -> dict[str, int]:
    """What the kernel uses without an entry."""
    model = settings.model
    if SPECS[kernel] is interval.IntervalAttention:
        window = None if kernel == "compressed" else settings.nsa.window
        group = model.n_heads // model.n_kv_groups
        return interval.forward_blocks(group, model.d_k, model.d_v, window)
    if kernel == "selected":
        return selected.forward_stages(model.d_k, model.d_v, settings.nsa.select_block)
    return {name: getattr(SPECS[kernel], name) for name in tiles.TUNABLE[kernel]}


def tune(
    base: Tiles,
    candidates: Iterable[Tiles],
    prepare: Callable[[Tiles], Step],
    differs: Callable[[Any, Any], str],
) -> Outcome:
    """Times `base` and every candidate that can be prepared and whose result is that of `base`.

    Args:
      prepare: compiles and runs a variant, or raises.
      differs: why two results are not the same, or "".
    """
    first = prepare(base)
    base_ms = first.time_ms()
    trials = [Trial(dict(base), base_ms)]
    best: tuple[float, Trial, Step] | None = None
    for each in candidates:
        if each == base:
            continue
        try:
            step = prepare(each)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            reason = f"refused: {type(error).__name__}: {lines[0]}"
            trials.append(Trial(dict(each), None, reason))
            continue
        if reason := differs(step.result, first.result):
            trials.append(Trial(dict(each), None, reason, wrong=True))
            continue
        step.result = None
        time_ms = step.time_ms()
        trials.append(Trial(dict(each), time_ms))
        if best is None or time_ms < best[0]:
            best = time_ms, trials[-1], step
    if best is None:
        return Outcome(tuple(trials), None)
    # The clock may have changed since the first: once more, side by side.
    best_ms, winner, step = best
    pairs = ((base_ms, best_ms), (first.time_ms(), step.time_ms()))
    outcome = Outcome(tuple(trials), winner, pairs)
    return outcome if outcome.gain > GAIN else dataclasses.replace(outcome, winner=None)


def differs(found: Any, wanted: Any) -> str:
    """Why the arrays of two results are not the same but for rounding, or "".

    Integers must be equal; floats may differ by 4 roundings of the largest, the natural
    log-sum-exp, which is float32, by 2**-14 of it.
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for i, (a, b) in enumerate(pairs):
        unequal, error, scale = map(float, _distance(a, b))
        if not jnp.issubdtype(a.dtype, jnp.floating):
            if unequal:
                return f"wrong: result {i} differs in {unequal:.0f} places"
            continue
        eps = float(jnp.finfo(a.dtype).eps) if a.dtype != jnp.float32 else 2.0**-16
        if unequal or not error <= ROUNDINGS * eps * scale:
            return f"wrong: result {i} is off by {error:.3g} of {scale:.3g}"
    return ""


@jax.jit
def _distance(a, b):
    """Places unequal (floats: not finite in one only), largest difference, largest value."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return (a != b).sum(), 0.0, 0.0
    finite = jnp.isfinite(b)
    same = jnp.where(finite, jnp.isfinite(a), a == b)
    a, b = (jnp.where(finite & same, x, 0).astype(jnp.float32) for x in (a, b))
    return (~same).sum(), jnp.abs(a - b).max(), jnp.abs(b).max()


class Kernels:
    """The steps of one problem on Mosaic kernels, ready to be built with any tiles."""

    def __init__(self, settings: Settings, inputs: Inputs, runner: Any, seconds: float):
        self.settings, self.inputs = settings, inputs
        self.runner, self.seconds = runner, seconds

    def shape(self, kernel: str) -> tiles.Shape:
        """What the entry of `kernel` is for."""
        model, run, config = self.settings.model, self.settings.runtime, self.settings.nsa
        keys = {
            "compressed": config.num_compressed(run.seq_len),
            "scores": config.num_blocks(run.seq_len),
        }
        return tiles.Shape.of(
            kernel,
            dtype=run.dtype.name,
            G=model.n_heads // model.n_kv_groups,
            D=model.d_k,
            Dv=0 if kernel == "scores" else model.d_v,
            queries=run.seq_len,
            keys=keys.get(kernel, run.seq_len),
            config=config,
        )

    def heuristic(self, kernel: str) -> dict[str, int]:
        """What the kernel uses without an entry."""
        return heuristic(kernel, self.settings)

    def variants(self, kernel: str) -> list[dict[str, int]]:
        """All combinations of what can be tuned."""
        return variants(kernel)

    def prepare(self, kernel: str, chosen: Tiles) -> Step:
        """Compiles the step of `kernel` with the tiles `chosen`, and runs it once."""
        # A function of its own: JAX would take up the trace of one that it knows.
        function = functools.partial(self._call, kernel)
        arguments = self._arguments[kernel]
        with tiles.forced(**{kernel: chosen}):
            step = self.runner.prepare(lambda arguments: function(**arguments), arguments)
        return _Timed(step, arguments, self.seconds)

    @functools.cached_property
    def _arguments(self) -> dict[str, dict[str, Any]]:
        made = self.inputs
        gates = jnp.unstack(made.gates, axis=-1)
        with tiles.forced(**{name: heuristic(name, self.settings) for name in VARIANTS}):
            compressed = made.arguments("compressed") | {"gate": None}
            _, lse = jax.jit(functools.partial(self._call, "compressed"))(**compressed)
        # The last kernels of a forward add what was found before them: anything will do.
        rest = [{"gate": gate, "added": made.cotangent} for gate in gates[1:]]
        return {
            "compressed": compressed | {"gate": gates[0]},
            "scores": made.arguments("scores") | {"lse": lse},
            "selected": made.arguments("selected") | rest[0],
            "sliding": made.arguments("sliding") | rest[1],
        }

    def _call(self, kernel, query, **rest):
        config = self.settings.nsa
        batch, length = query.shape[:2]
        layout = geometry.query_layout(
            batch, length, kv_len=length, segment_ids=None, config=config
        )
        how = {"layout": layout, "config": config, "scale": None}
        if kernel == "compressed":
            pair = rest["compressed_key"], rest["compressed_value"]
            return mosaic_forward.compressed(JAX_OPS, query, *pair, **how, gate=rest["gate"])
        if kernel == "scores":
            pair = rest["compressed_key"], rest["lse"]
            blocks = config.num_blocks(length)
            return mosaic_forward.select_blocks(JAX_OPS, query, *pair, **how, num_blocks=blocks)
        return getattr(mosaic_forward, kernel)(JAX_OPS, query, **rest, **how)


class _Timed:
    def __init__(self, step: Any, arguments, seconds: float):
        self.step, self.seconds = step, seconds
        self.result: Any = jax.block_until_ready(step(arguments))

    def time_ms(self) -> float:
        return self.step.time(self.seconds).time_ms


class Tunable(Protocol):
    """The kernels of one problem, Mosaic's (`Kernels`) or Triton's (`triton_tiles.Kernels`)."""

    settings: Settings
    inputs: Inputs

    def shape(self, kernel: str) -> tiles.Shape: ...

    def heuristic(self, kernel: str) -> dict[str, int]: ...

    def variants(self, kernel: str) -> list[dict[str, int]]: ...

    def prepare(self, kernel: str, chosen: Tiles) -> Step: ...


def entry(kernels: Tunable, kernel: str, outcome: Outcome, environment) -> dict[str, Any]:
    """The table's entry of a winner, with the measurement that chose it."""
    if outcome.winner is None:
        raise ValueError(f"no variant of {kernel} gains more than {GAIN:.0%}")
    run, model = kernels.settings.runtime, kernels.settings.model
    base, best = (float(np.mean(times)) for times in zip(*outcome.pairs_ms, strict=True))
    return kernels.shape(kernel).entry() | {
        "tiles": outcome.winner.tiles,
        "evidence": {
            "heuristic": outcome.heuristic.tiles,
            "heuristic_ms": base,
            "time_ms": best,
            "gain": outcome.gain,
            "variants": len(outcome.trials),
            "B": run.batch,
            "T": run.seq_len,
            "H": model.n_heads,
            "Hkv": model.n_kv_groups,
            "input": kernels.inputs.name,
            "time": records.utc_now(),
            **environment,
        },
    }


def write(
    path: Path, device: str, tuned: Iterable[tiles.Shape], entries: Iterable[dict[str, Any]]
) -> int:
    """Puts `entries` in the table at `path`, in place of all that it had for shapes `tuned`.

    Returns how many it has then; a table without any is not begun.

    Raises:
      ValueError: the table there is damaged, or of another device.
    """
    kept = tiles.read(path) if path.is_file() else {}
    known = path.is_file()
    kept = {shape: each for shape, each in kept.items() if shape not in set(tuned)}
    listed = [*kept.values(), *entries]
    if not listed and not known:
        return 0
    listed.sort(key=lambda each: json.dumps(each, sort_keys=True))
    listed.sort(key=lambda each: each["kernel"])
    data = {"schema": tiles.SCHEMA, "device": device, "entries": listed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    tiles.read(path)
    return len(listed)

"""A needle in a long sequence: is the block that holds it selected, and read?

    python -m bench.needle
    python -m bench.needle --S=65536 --pos=1234 --framework=jax

One key, `pos`, points where the query of the last token looks; all others are noise. Reported
is what the kernels did, not what a map of the scores says: whether the block of `pos` is among
the indices that came out for the last query of each key/value head, the weight that selected
attention gave to the needle (the output where all values are 0 but the needle's), the cosine
of the whole output and the planted value (`cos`), the mean error beside the float64 reference
on the last row (`mae`), and the time of the whole attention over all `S` tokens. A needle
that is not attended to is a wrong result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from nsa_core.types import Branches

from .harness import cli, command, cost, problems
from .harness.command import config_of
from .harness.jobs import Job
from .harness.measure import guarded, judged, selection, shape_of, timed
from .harness.runners import RUNNERS, forward
from .judge import oracle, parity
from .prefill import job

FLAGS = command.flag_values(frameworks=True, **command.SIZES)
_own = {"flag_values": FLAGS}
LENGTH = flags.DEFINE_integer(
    "S", None, "Tokens; default: 65536, without a GPU 1024.", lower_bound=2, **_own
)
POSITION = flags.DEFINE_integer(
    "pos", None, "Where the needle is; default: S // 3.", lower_bound=0, **_own
)
COLUMNS = (
    "S",
    "pos",
    "cos",
    "mae",
    "time_ms",
    "p20_ms",
    "p80_ms",
    "block",
    "forced",
    "selected",
)
COLUMNS += ("weight", "H", "Hkv", "dtype", "framework", "kernel", "error_max", "error_bound")
COLUMNS += ("device", "commit", "status", "reason")
LEAST_WEIGHT = 0.5  # on the needle, against all other selected keys together


def plant(inputs: problems.Inputs, position: int, config) -> problems.Inputs:
    """The inputs with the needle at `position`, and a last query that looks for it.

    The query is long `sqrt(D)`, as noise is, so that logits of noise keep the variance 1. The
    needle is long `2 l`: its compressed token holds an `l`-th of it, and must stand out.
    """
    width, dtype = inputs.query.shape[-1], inputs.query.dtype
    look = jax.random.normal(jax.random.key(position), (width,), jnp.float32)
    look = look / jnp.linalg.norm(look) * width**0.5
    query = inputs.query.at[:, -1].set(look.astype(dtype))
    long = (look * (2 * config.compress_block / width**0.5)).astype(dtype)
    key = Branches(*(x.at[:, position].set(long) for x in inputs.key))
    return dataclasses.replace(inputs, query=query, key=key, gates=jnp.ones_like(inputs.gates))


def forced(block: int, length: int, config) -> bool:
    """Whether the last of `length` tokens reads the block whatever the scores are."""
    return not config.num_initial <= block < config.num_blocks(length) - config.num_local


class Search:
    """What the whole attention of one plan does with the needle."""

    def __init__(self, runner, settings, inputs, position: int, what: Job):
        self.runner, self.settings, self.inputs = runner, settings, inputs
        self.config, self.position, self.job = settings.nsa, position, what
        self.block = position // self.config.select_block
        self.forced = forced(self.block, inputs.num_keys, self.config)

    def run(self, how: dict[str, Any]) -> dict[str, Any]:
        """The fields of the record; parity and the needle first, then the time."""
        runner, config, names = self.runner, self.config, self.job.implementation
        arguments = runner.load(self.inputs.arguments("all"))

        def whole(given):
            return forward(runner.api, "all", config, names, given)

        _, indices = selection(runner, config, self.job, arguments)
        step = runner.prepare(whole, arguments)
        frozen = runner.prepare(whole, arguments | {"block_indices": indices})
        last = np.array([self.inputs.num_keys - 1])
        out = runner.numpy(step(arguments)["out"], last)
        given = frozen(arguments | {"block_indices": indices})["out"]
        chosen = runner.numpy(indices, last)
        found = self._parity(runner.numpy(given, last), chosen)
        if "status" in found:
            return found
        holds = (chosen[:, 0] == self.block).any(axis=-1)  # [B, Hkv]
        weight = self._weight(indices, last)
        planted = np.asarray(self.inputs.value.selected)[:, self.position].astype(np.float64)
        planted = np.repeat(planted, out.shape[2] // planted.shape[1], axis=1)
        row = out[:, 0].astype(np.float64)
        cosine = (row * planted).sum(-1)
        cosine /= np.linalg.norm(row, axis=-1) * np.linalg.norm(planted, axis=-1)
        found["extra"] = {
            "pos": self.position,
            "block": self.block,
            "forced": self.forced,
            "selected": holds.ravel().tolist(),
            "weight": float(weight.min()),
            "cos": float(cosine.mean()),
        }
        if not holds.all():
            missing = np.flatnonzero(~holds.all(axis=0)).tolist()
            reason = f"block {self.block} is not among the selected of kv heads {missing}"
            return found | {"status": "wrong", "reason": reason}
        if not weight.min() > LEAST_WEIGHT:
            reason = f"the needle's weight is {weight.min():.3g}, expected over {LEAST_WEIGHT}"
            return found | {"status": "wrong", "reason": reason}
        shape = shape_of(self.settings, self.inputs)
        work = cost.cost("all", shape, config)
        return found | timed(step.time(**how), work, runner.device, shape.itemsize)

    def _parity(self, out: np.ndarray, chosen: np.ndarray) -> dict[str, Any]:
        """The last row, given the selection, beside the reference."""
        inputs = self.inputs
        known = inputs.arguments("all") | {"block_indices": jnp.asarray(chosen)}
        known |= {"query": inputs.query[:, -1:], "gates": inputs.gates[:, -1:]}
        slab = oracle.Slabs((0,), 1, 1, inputs.num_keys - 1)
        exact, low = (
            oracle.outputs("all", known, self.config, slab, low=low)["out"]
            for low in (False, True)
        )
        dtype = self.settings.runtime.dtype
        found = parity.check_parity("last row", out, exact, low, dtype=dtype)
        return judged(found, rows=1)

    def _weight(self, indices, last: np.ndarray) -> np.ndarray:
        """`[B, H]`: what selected attention gives to the needle for the last query."""
        runner, value = self.runner, jnp.zeros_like(self.inputs.value.selected)
        value = value.at[:, self.position].set(1)
        given = {"query": self.inputs.query, "key": self.inputs.key.selected, "value": value}
        arguments = runner.load(given) | {"block_indices": indices}
        name = self.job.named("selected")

        def attend(given):
            return forward(runner.api, "selected", self.config, name, given)

        found = runner.prepare(attend, arguments)(arguments)["out"]
        return runner.numpy(found, last)[:, 0, :, 0].astype(np.float64)


def main(argv: Sequence[str]) -> int:
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu, config = runner.platform != "cpu", config_of(FLAGS)
    length = LENGTH.value or (65536 if gpu else 1024)
    position = length // 3 if POSITION.value is None else POSITION.value
    if not 0 <= position < length - 1:
        raise ValueError(f"pos must be in 0..{length - 2} for S={length}, got {position}")
    settings = command.settings(FLAGS, config, gpu, seq_len=length)
    inputs = plant(problems.make(settings, "random", FLAGS.seed), position, config)
    results, what = command.Results("needle", FLAGS), job(runner, settings)
    found: dict[str, Any] = {"status": "unsupported", "reason": what.unsupported}
    if not what.unsupported:
        search = Search(runner, settings, inputs, position, what)
        how = command.sampling(FLAGS, gpu)
        found = guarded("needle", lambda: search.run(how), library=False)
    common: dict[str, Any] = command.about(runner, settings, inputs)
    common |= {"implementation": what.label}
    record = results.add(branch="all", mode="forward", refused=what.refused, **common | found)
    extra = {"pos": position, "cos": None, **record.extra}
    shown = {"S": length, "pos": position, "cos": extra["cos"], "mae": record.error_mean}
    print(shown | {"time_ms": record.time_ms})
    print(f"device {record.device}, {record.implementation}: {record.status} {record.reason}")
    block = position // config.select_block
    note = " (forced: says nothing of the scores)" if forced(block, length, config) else ""
    print(
        f"block {block}{note} selected by each kv head: "
        f"{extra.get('selected')}; weight {extra.get('weight')}"
    )
    same = (name for name in COLUMNS if hasattr(record, name))
    cells = {name: getattr(record, name) for name in same}
    cells |= {name: extra[name] for name in COLUMNS if name in extra}
    cells |= {"mae": record.error_mean, "kernel": record.implementation}
    return results.finish(COLUMNS, [cells])


if __name__ == "__main__":
    cli.run(main, FLAGS)

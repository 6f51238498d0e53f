"""Tests whether the block with a needle in a long sequence is selected and read.

    python -m bench.needle
    python -m bench.needle --S=65536 --pos=1234 --framework=jax

The key at `pos` points in the direction of the query of the last token; all other keys are noise.
The values of the table are results of the kernels for the last query, not a map of scores:

- `selected`: whether each key/value head selects the block of `pos`.
- `weight`: the smallest weight, over the heads, that selected attention gives to the needle. The
  weight is the output of a call in which the value vector of the needle is 1, and all other value
  vectors are 0.
- `cos`: cosine between the output of all branches and the value vector at `pos`, as a mean over the
  heads.
- `mae`: mean absolute error against the float64 reference.
- `time_ms`: time of attention of all branches over all `S` tokens.

The result is wrong if the needle's block is not selected, or if the needle's weight is at most
0.5.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.types import Branches

from .harness import cli, command, cost, problems
from .harness.command import config_of
from .harness.jobs import Job
from .harness.measure import judged, judged_row, selection, shape_of, timed
from .harness.records import Values
from .harness.runners import RUNNERS, forward
from .judge.checks import Checker
from .prefill import job

FLAGS = command.flag_values(
    frameworks=True,
    **command.SIZES,
    S=(int, "Number of tokens; default: 65536, or 1024 without a GPU.", 2),
    pos=(int, "Position of the needle; default: S // 3.", 0),
)
# the minimum weight of the needle; all other selected keys together have the rest
LEAST_WEIGHT = 0.5


def plant(inputs: problems.Inputs, position: int, config) -> problems.Inputs:
    """Return inputs in which the needle is at `position`, the last query points to the needle, and
    all gates are 1.

    The query has the norm `sqrt(D)`, like noise, so that logits of noise have the variance 1. The
    needle has the norm `2 l`. A compressed token contains only an `l`-th of the needle, and this
    part must still differ clearly from noise.
    """
    width, dtype = inputs.query.shape[-1], inputs.query.dtype
    look = jax.random.normal(jax.random.key(position), (width,), jnp.float32)
    look = look / jnp.linalg.norm(look) * width**0.5
    query = inputs.query.at[:, -1].set(look.astype(dtype))
    long = (look * (2 * config.compress_block / width**0.5)).astype(dtype)
    key = Branches(*(x.at[:, position].set(long) for x in inputs.key))
    return dataclasses.replace(inputs, query=query, key=key, gates=jnp.ones_like(inputs.gates))


def forced(block: int, length: int, config) -> bool:
    """Return whether the last of `length` tokens reads the block regardless of the scores."""
    return not config.num_initial <= block < config.num_blocks(length) - config.num_local


def judge(runner, settings, inputs, position: int, job: Job) -> tuple[Values, Any]:
    """Judge how `job`, which computes attention of all branches, treats the needle. Return the
    fields of the record, and the function that times the call.
    """
    config, block = settings.nsa, position // settings.nsa.select_block
    arguments = runner.load(inputs.arguments("all"))
    whole = functools.partial(forward, runner.api, "all", config, job.implementation)
    _, indices = selection(runner, config, job, arguments)
    step = runner.prepare(whole, arguments)
    frozen = runner.prepare(whole, arguments | {"block_indices": indices})
    last = np.array([inputs.num_keys - 1])
    chosen = runner.numpy(indices, last)
    # The last row is compared with the reference for the same selection of blocks.
    query, gates = inputs.query[:, -1:], inputs.gates[:, -1:]
    blocks = jnp.asarray(chosen)
    row = dataclasses.replace(inputs, query=query, gates=gates, block_indices=blocks)
    checker = Checker(settings, row, backward=False)
    of_row = lambda: {"out": frozen()["out"][:, -1:]}
    found = judged(checker.check(runner, of_row, "all"), rows=1)

    def time(**how: Any) -> Values:
        shape = shape_of(settings, inputs)
        work = cost.cost("all", shape, config)
        return timed(step.time(**how), work, runner.device, shape.itemsize)

    if "status" in found:
        return found, time
    holds = (chosen[:, 0] == block).any(axis=-1)  # [B, Hkv]
    weight = weight_of(runner, config, job.named("selected"), inputs, position, indices)
    out = runner.numpy(step()["out"], last)[:, 0].astype(np.float64)
    planted = np.asarray(inputs.value.selected)[:, position].astype(np.float64)
    planted = np.repeat(planted, out.shape[1] // planted.shape[1], axis=1)
    cosine = (out * planted).sum(-1)
    cosine /= np.linalg.norm(out, axis=-1) * np.linalg.norm(planted, axis=-1)
    found["extra"] = {
        "pos": position,
        "block": block,
        "forced": forced(block, inputs.num_keys, config),
        "selected": holds.ravel().tolist(),
        "weight": float(weight.min()),
        "cos": float(cosine.mean()),
    }
    reason = ""
    if not holds.all():
        missing = np.flatnonzero(~holds.all(axis=0)).tolist()
        reason = f"block {block} is not selected by key/value heads {missing}"
    elif not weight.min() > LEAST_WEIGHT:
        reason = f"the weight of the needle must exceed {LEAST_WEIGHT}, got {weight.min():.3g}"
    return found | ({"status": "wrong", "reason": reason} if reason else {}), time


def weight_of(runner, config, name, inputs, position: int, indices) -> np.ndarray:
    """Return the weight of the needle in the selected attention of the last query, `[B, H]`."""
    value = jnp.zeros_like(inputs.value.selected).at[:, position].set(1)
    given = {"query": inputs.query, "key": inputs.key.selected, "value": value}
    arguments = runner.load(given) | {"block_indices": indices}
    attend = functools.partial(forward, runner.api, "selected", config, name)
    found = runner.prepare(attend, arguments)()["out"]
    return runner.numpy(found, np.array([inputs.num_keys - 1]))[:, 0, :, 0].astype(np.float64)


def main(argv: Sequence[str]) -> int:
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu, config = runner.platform != "cpu", config_of(FLAGS)
    length = FLAGS.S or (65536 if gpu else 1024)
    position = length // 3 if FLAGS.pos is None else FLAGS.pos
    if not 0 <= position < length - 1:
        raise ValueError(f"pos must be in 0..{length - 2} for S={length}, got {position}")
    settings = command.settings(FLAGS, config, gpu, seq_len=length)
    inputs = plant(problems.make(settings, "random", FLAGS.seed), position, config)
    results, what = command.Results("needle", FLAGS), job(runner, settings)
    take = functools.partial(judge, runner, settings, inputs, position, what)
    row = judged_row("needle", take, refused=what.unsupported)
    about = command.about(runner, settings, inputs) | row.timed(**command.sampling(FLAGS, gpu))
    about |= {"branch": "all", "mode": "forward", "implementation": what.label}
    record = results.add(refused=what.refused, **about)
    block = position // config.select_block
    note = " (forced: says nothing of the scores)" if forced(block, length, config) else ""
    results.row(found=record, pos=position, line={"note": note, "block": block})
    return results.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)

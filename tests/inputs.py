"""Problems in arrays of JAX, of two rows by default."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.config import NSAConfig
from tests import problems

SMALL = NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=10
)
PAPER = NSAConfig()


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem's shape; `segments` are the lengths of packed sequences, negative: padding."""

    T: int
    S: int
    H: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    B: int = 2
    config: NSAConfig = SMALL
    segments: tuple[int, ...] | None = None
    dtype: str = "float32"

    def __str__(self):
        packed = "-packed" if self.segments else ""
        return (
            f"T{self.T}-S{self.S}-H{self.H}x{self.Hkv}-D{self.D}x{self.Dv}"
            f"-w{self.config.window}-n{self.config.num_selected}-{self.dtype}{packed}"
        )


@dataclasses.dataclass(frozen=True)
class Problem:
    case: Case
    query: Any
    key: Any
    value: Any
    gates: Any
    segment_ids: Any


def segment_ids(lengths: tuple[int, ...]) -> np.ndarray:
    """`[1, S]` ids of sequences of these lengths; a negative length is padding."""
    runs = [np.full(abs(n), i if n > 0 else -1) for i, n in enumerate(lengths)]
    return np.concatenate(runs)[None].astype(np.int32)


@functools.lru_cache
def problem(case: Case, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return Problem(
        case,
        normal(case.B, case.T, case.H, case.D),
        normal(case.B, case.S, case.Hkv, case.D),
        normal(case.B, case.S, case.Hkv, case.Dv),
        jnp.asarray(rng.uniform(size=(case.B, case.T, case.H, 3)), dtype),
        None if case.segments is None else jnp.asarray(segment_ids(case.segments)),
    )


def call(function, *arrays, **options):
    """`function` compiled as a whole: op by op each shape would cost a compilation an op."""
    return jax.jit(functools.partial(function, **options))(*arrays)


def posed(case: Case, blocks: str = "given", own: bool = True, **rest):
    """`case` as a problem of the tables, in which padding is NaN; float32 decides a selection."""
    shape = {name: x for name, x in vars(case).items() if name != "segments"}
    documents = case.segments and tuple(n for n in case.segments if n >= 0)
    if blocks == "own" and case.dtype != "float32" and "ties" not in rest:
        blocks = "given"
    shape |= {"documents": documents, "blocks": blocks, "own": own, **rest}
    return problems.problem(problems.Case(**shape))

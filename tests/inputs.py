"""One builder of problems, and the float64 oracle and low-precision yardstick of each step."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.config import NSAConfig
from nsa_jax import reference
from tests import problems, torch_oracle

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

    @property
    def where(self):
        """The keyword arguments that say where the queries stand."""
        kv_len = None if self.segment_ids is not None else self.case.S
        return dict(config=self.case.config, kv_len=kv_len, segment_ids=self.segment_ids)


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


def any_blocks(case: Case) -> np.ndarray:
    """As `problems.any_blocks`."""
    return problems.any_blocks(case).numpy()


def call(function, *arrays, **options):
    """`function` compiled as a whole: op by op each shape would cost a compilation an op."""
    return jax.jit(functools.partial(function, **options))(*arrays)


def once(function):
    """`function`, of arrays and options, called once for what is the same in every bit: for
    references, which no test changes.
    """
    results = {}

    def content(x):
        if not hasattr(x, "dtype"):
            return type(x), x
        x = np.asarray(x)
        return x.shape, x.dtype.name, hashlib.sha256(x.tobytes()).digest()

    @functools.wraps(function)
    def known(*arrays, **options):
        leaves, tree = jax.tree.flatten((arrays, options))
        key = (tree, *map(content, leaves))
        if key not in results:
            results[key] = function(*arrays, **options)
        return results[key]

    return known


def _by_torch(name, arrays, **options):
    outputs, _ = torch_oracle.results(name, arrays, **options)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


@once
def oracle(name: str, *arrays, **options):
    """`reference.<name>` in float64 on the already rounded `arrays`, as NumPy."""
    if torch_oracle.USED:
        return _by_torch(name, arrays, exact=True, **options)
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(x), jnp.float64)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for x in arrays
        ]
        out = call(getattr(reference, name), *wide, **options)
        return jax.tree.map(np.asarray, out)


@once
def yardstick(name: str, *arrays, **options):
    """`reference.<name>` computed in the arrays' own precision, as NumPy."""
    if torch_oracle.USED and options["config"].compute_dtype is None:
        return _by_torch(name, arrays, exact=False, **options)
    out = call(getattr(reference, name), *arrays, compute_dtype=arrays[0].dtype, **options)
    return jax.tree.map(np.asarray, out)


@once
def selection(query, key, **options):
    """The indices of the reference."""
    if torch_oracle.USED:
        found = _by_torch("select_blocks", (query, key), exact=False, **options)
        return jnp.asarray(found)
    return call(reference.select_blocks, query, key, **options)

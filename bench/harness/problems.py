"""Problems to measure. A problem has settings from a config file, and input arrays."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

import nsa_jax
from nsa_core import config_files, debug
from nsa_core.config import NSAConfig
from nsa_core.policy import Length, Thresholds
from nsa_core.types import Branches

from . import heartbeat, text

ARGUMENTS = {
    "compressed": ("query", "compressed_key", "compressed_value"),
    "scores": ("query", "compressed_key"),
    "selected": ("query", "key", "value", "block_indices"),
    "sliding": ("query", "key", "value"),
    "all": ("query", "key", "value", "gates"),
    "dense": ("query", "key", "value"),
}  # attributes of `Inputs`; `key` and `value` are those of one branch, except for `all`
BRANCHES = tuple(ARGUMENTS)
KINDS = ("random", "text", "alike")  # the kinds of inputs
ALIKE = 0.95  # correlation of adjacent queries in inputs of the kind `alike`
PRECISIONS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Model:
    dim: int
    n_heads: int
    n_kv_groups: int
    d_k: int
    d_v: int
    rope_base: float


@dataclasses.dataclass(frozen=True)
class Runtime:
    precision: Literal["bf16", "f16", "f32"]
    batch: int
    seq_len: int
    compressed_kernel: str
    selected_kernel: str
    sliding_kernel: str
    on_unsupported: Literal["error", "fallback"]
    fa2_min_len_win: Length | None = None
    fa2_min_len_cmp: Length | None = None
    sel_min_len: Length | None = None
    sel_triton_min_L: Length | None = None

    @property
    def thresholds(self) -> Thresholds:
        """Return the thresholds of this section, which replace the thresholds of the device."""
        names = (field.name for field in dataclasses.fields(Thresholds))
        return Thresholds(**{name: getattr(self, name) for name in names})

    @property
    def dtype(self):
        return jnp.dtype(PRECISIONS[self.precision])


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sections of a config file. `configs/base.yaml` has every key."""

    model: Model
    nsa: NSAConfig
    runtime: Runtime


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of one problem, in its dtype. `nsa_core.types` defines the letters of shapes."""

    query: jax.Array
    key: Branches[jax.Array]
    value: Branches[jax.Array]
    gates: jax.Array  # [B, T, H, 3]
    compressed_key: jax.Array
    compressed_value: jax.Array
    block_indices: jax.Array
    cotangent: jax.Array  # the cotangent of the output
    name: str  # one of KINDS
    sha256: str | None  # the SHA-256 of the text
    overlap: float | None  # None if there is one query

    @property
    def num_keys(self) -> int:
        return self.key.selected.shape[1]

    def arguments(self, branch: str) -> dict[str, Any]:
        """Return the arrays for a branch, keyed by the names of its arguments."""
        found = {name: getattr(self, name) for name in ARGUMENTS[branch]}
        if branch != "all" and "key" in found:
            own = "selected" if branch == "selected" else "sliding"
            found |= {name: getattr(found[name], own) for name in ("key", "value")}
        return found


def settings(name: str, runtime: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings in `configs/<name>.yaml` or in the file at a path, which override the
    settings of the base file. `runtime` overrides single values of the section `runtime`. A value
    of None overrides nothing.
    """
    merged = config_files.over_base(name)
    given = {name: x for name, x in (runtime or {}).items() if x is not None}
    if given:  # a section that is no mapping is unchanged here, and is refused below
        merged = config_files.overlay(merged, {"runtime": given})
    return config_files.build(Settings, merged)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Return a context in which the debug log is off, since making inputs is not part of the
    measurement.
    """
    on, debug.on = debug.on, False
    try:
        yield
    finally:
        debug.on = on


@unlogged()
def make(
    settings: Settings,
    kind: str,
    seed: int = 0,
    *,
    num_queries: int | None = None,
    block_indices: jax.Array | None = None,
    shared: bool = False,
) -> Inputs:
    """Return the inputs of a problem.

    Args:
      settings: The problem.
      kind: "random": normal arrays. "text": arrays computed from text. "alike": normal arrays in
        which adjacent queries are similar.
      seed: Seed of the random arrays, and of the model that projects the text.
      num_queries: `T`, the number of queries, which are the last of the `S` tokens. By default all
        tokens are queries.
      block_indices: int32 `[B, T, Hkv, n]`, by default the blocks that the inputs themselves
        select.
      shared: Whether all branches have the keys and values of the selected branch.

    Raises:
      ValueError: `num_queries` is invalid.
    """
    heartbeat.say("makes the inputs")
    model, run, config = settings.model, settings.runtime, settings.nsa
    batch, length = run.batch, run.seq_len
    queries = length if num_queries is None else num_queries
    if not 1 <= queries <= length:
        raise ValueError(f"num_queries must be in 1..{length}, got {queries}")
    keys = iter(jax.random.split(jax.random.key(seed), 9))

    def normal(heads, width, length=length):
        return jax.random.normal(next(keys), (batch, length, heads, width), run.dtype)

    sha256 = None
    if kind == "text":
        corpus = text.corpus(batch * length)
        sha256 = corpus.sha256
        tokens = corpus.tokens.reshape(batch, length)
        options = {"seed": seed, "num_queries": queries, "dtype": run.dtype}
        arrays = text.project(tokens, **dataclasses.asdict(model), **options)
        query, key, value, gates = arrays
    else:
        query = normal(model.n_heads, model.d_k, queries)
        query = correlated(query, ALIKE) if kind == "alike" else query
        key = Branches(*(normal(model.n_kv_groups, model.d_k) for _ in Branches._fields))
        value = Branches(*(normal(model.n_kv_groups, model.d_v) for _ in Branches._fields))
        gates = jax.nn.sigmoid(normal(model.n_heads, 3, queries))
    if shared:
        key, value = (Branches.each(x.selected) for x in (key, value))
    compressed_key = nsa_jax.compress(key.compressed, config=config)
    indices = block_indices
    if indices is None:
        indices = jax.jit(nsa_jax.select_blocks, static_argnames=("config", "kv_len"))(
            query, compressed_key, config=config, kv_len=length
        )
    return Inputs(
        query=query,
        key=key,
        value=value,
        gates=gates,
        compressed_key=compressed_key,
        compressed_value=nsa_jax.compress(value.compressed, config=config),
        block_indices=indices,
        cotangent=normal(model.n_heads, model.d_v, queries),
        name=kind,
        sha256=sha256,
        overlap=float(overlap(indices)) if queries > 1 else None,
    )


@functools.partial(jax.jit, static_argnums=1)
def correlated(query, rho: float) -> jax.Array:
    """Compute `q[t] = rho q[t - 1] + sqrt(1 - rho**2) query[t]` along the tokens of `[B, T, H, D]`,
    in float32. The result has the dtype of `query`.
    """

    def step(before, noise):
        now = rho * before + math.sqrt(1 - rho**2) * noise.astype(jnp.float32)
        return now, now.astype(query.dtype)

    noise = jnp.moveaxis(query, 1, 0)
    _, found = jax.lax.scan(step, noise[0].astype(jnp.float32), noise)
    return jnp.moveaxis(found, 0, 1)


@jax.jit
def overlap(block_indices) -> jax.Array:
    """Return the mean share of a query's blocks that the previous query also selected."""
    now, before = block_indices[:, 1:], block_indices[:, :-1]
    filled = now >= 0

    # XLA fuses the comparison into `any`, so that no array [.., n, n] is stored.
    same = (now[..., None] == before[..., None, :]).any(axis=-1)
    common, total = (same & filled).sum(axis=-1), jnp.maximum(filled.sum(axis=-1), 1)
    return jnp.mean(common / total)

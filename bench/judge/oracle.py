"""Computes the dense reference on slabs of query rows. Results of implementations are compared
with the reference.

A slab is a run of adjacent query rows. Since queries are aligned to the end of the keys, rows `a`
to `b` are a separate problem with the keys up to `b + S - T`. Long problems are checked on the
first rows, the last rows and some rows between. The gradients of a long problem belong to a
cotangent that is zero in all rows that are not checked. The oracle computes in float64, and the
baseline in the dtype of the implementation that is judged. Oracle and baseline have the same
rounded inputs.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nsa_core.reference import wide
from nsa_jax import reference

# Arguments with one entry per query. Other arguments have one entry per key.
PER_QUERY = ("query", "gates", "block_indices")
EDGE_ROWS, MIDDLE_ROWS, MIDDLES = 256, 64, 4
# If the logits have at most this number of elements, every row is checked.
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 2**27, 2**32
# Otherwise the logits of the checked rows have at most this number of elements. In the longest
# problems fewer rows are checked.
CHOSEN_ELEMENTS = 2**32
# The number of logits of one slab. Gradients store several arrays of this size.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 2**26, 2**24


class Slabs(NamedTuple):
    """Slabs of `size` query rows, which begin at the ascending `starts`. If two slabs overlap, the
    common rows belong to the earlier slab.
    """

    starts: tuple[int, ...]
    size: int
    num_queries: int
    offset: int = 0  # S - T

    @classmethod
    def of(
        cls,
        num_queries: int,
        row_elements: int,
        *,
        backward: bool = False,
        offset: int = 0,
        most_rows: int | None = None,
    ) -> "Slabs":
        """Choose all rows of a small problem, and some rows of a large problem.

        Args:
          num_queries: Query positions of each sequence.
          row_elements: Logits of one query position, `B * H * S`.
          backward: Whether gradients are computed, which needs smaller slabs.
          offset: `S - T`.
          most_rows: Maximum number of rows, at least 12, also for a small problem. By default all
            rows of a small problem, and at most 768 rows of a large problem, are checked.
        """
        on_cpu = jax.default_backend() == "cpu"
        limit = ELEMENTS_ON_CPU if on_cpu else ELEMENTS_ON_GPU
        budget = BACKWARD_ELEMENTS if backward else FORWARD_ELEMENTS
        size = max(1, budget // max(row_elements, 1))
        short = num_queries <= 2 * EDGE_ROWS + MIDDLES * MIDDLE_ROWS
        few = num_queries <= (most_rows or num_queries)
        if few and (short or num_queries * row_elements <= limit):
            size = min(size, num_queries)
            starts = [*range(0, num_queries - size, size), num_queries - size]
            return cls(tuple(starts), size, num_queries, offset)
        edge, middle = EDGE_ROWS, MIDDLE_ROWS
        most = min(most_rows or num_queries, CHOSEN_ELEMENTS // row_elements)
        while middle > 1 and 2 * edge + MIDDLES * middle > most:
            edge, middle = edge // 2, middle // 2
        size = 2 ** min(size.bit_length() - 1, middle.bit_length() - 1)
        inside = (num_queries - 2 * edge) // middle
        picked = np.random.default_rng(0).choice(inside, MIDDLES, replace=False)
        middles = [edge + int(at) * middle for at in sorted(picked)]
        runs = [(0, edge), *((at, middle) for at in middles), (num_queries - edge, edge)]
        starts = [start for at, rows in runs for start in range(at, at + rows, size)]
        return cls(tuple(starts), size, num_queries, offset)

    @property
    def skips(self) -> tuple[int, ...]:
        """The number of first rows of each slab that an earlier slab contains."""
        ends = (0, *(start + self.size for start in self.starts[:-1]))
        pairs = zip(self.starts, ends, strict=True)
        return tuple(max(0, end - start) for start, end in pairs)

    @property
    def rows(self) -> np.ndarray:
        """The indices of the checked rows, ascending."""
        pairs = zip(self.starts, self.skips, strict=True)
        return np.concatenate([np.arange(at + skip, at + self.size) for at, skip in pairs])

    def masked(self, cotangent: jax.Array) -> jax.Array:
        """Return `cotangent` [B, T, ...] with zeros in the rows that are not checked."""
        keep = np.zeros(self.num_queries, bool)
        keep[self.rows] = True
        return cotangent * keep.reshape(-1, *[1] * (cotangent.ndim - 2)).astype(cotangent.dtype)


def dense(branch: str, arguments: Mapping[str, Any], config, kv_len, dtype=None) -> dict:
    """Return the reference results of a branch. The results are `out` and `lse` for a branch, only
    `scores` for the scores, only `indices` for the selection (`indices`), and only `out` for
    attention of all branches (`all`). `arguments` are the arguments of the branch, and for `all`
    also the block indices.
    """
    where = {"config": config, "kv_len": kv_len}
    at = {**where, "compute_dtype": dtype}
    if branch in ("compressed", "scores", "indices"):
        arguments = {name.removeprefix("compressed_"): x for name, x in arguments.items()}
    if branch == "scores":
        return {"scores": reference.block_scores(**arguments, **where)}
    if branch == "indices":
        return {"indices": reference.select_blocks(**arguments, **where)}
    if branch == "all":
        return {"out": _whole(**arguments, where=at)}
    if branch == "dense":
        # Causal dense attention is a sliding window as long as the keys.
        wide = dataclasses.replace(config, window=arguments["key"].shape[1])
        out, _ = reference.sliding_attention(**arguments, **{**at, "config": wide})
        return {"out": out}
    out, lse = getattr(reference, f"{branch}_attention")(**arguments, **at)
    return {"out": out, "lse": lse}


def _whole(query, key, value, gates, block_indices, where, compressed=None):
    config = where["config"]
    pooled = compressed or [_means(x.compressed, config) for x in (key, value)]
    selected = (query, key.selected, value.selected, block_indices)
    parts = (
        reference.compressed_attention(query, *pooled, **where),
        reference.selected_attention(*selected, **where),
        reference.sliding_attention(query, key.sliding, value.sliding, **where),
    )
    outs = [out for out, _ in parts]
    dtype = wide(jnp, outs[0].dtype)
    gates = gates.astype(dtype)[..., None]
    first, *rest = [out.astype(dtype) * gates[..., c, :] for c, out in enumerate(outs)]
    return sum(rest, first).astype(outs[0].dtype)


def _means(x, config):
    """Compute the means of windows of `l` tokens, which begin every `d` tokens (Eq. 7)."""
    first = np.arange(config.num_compressed(x.shape[1])) * config.compress_stride
    taps = first[:, None] + np.arange(config.compress_block)
    return x[:, taps].mean(axis=2, dtype=wide(jnp, x.dtype)).astype(x.dtype)


def outputs(
    branch: str, arguments: Mapping[str, Any], config, slabs: Slabs, *, low: bool = False
) -> dict[str, np.ndarray]:
    """Run the function `dense` on the rows of `slabs` and stack the results. With `low` the results
    come from the baseline, otherwise from the oracle.
    """
    with jax.enable_x64(True):
        step, kept = _forward_slab(branch, config, slabs.size, slabs.offset, low), []
        for start, skip in zip(slabs.starts, slabs.skips, strict=True):
            part = step(dict(arguments), jnp.int32(start))
            kept.append({name: np.asarray(x[:, skip:]) for name, x in part.items()})
    return _stacked(kept)


@functools.cache
def _forward_slab(branch, config, size, offset, low):
    def slab(arguments, start):
        local, kv_len, dtype = _local(arguments, start, size, offset, low)
        return dense(branch, local, config, kv_len, dtype)

    return compiled(slab)


def gradients(
    branch: str,
    arguments: Mapping[str, Any],
    cotangent: jax.Array,
    config,
    slabs: Slabs,
    *,
    low: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the `outputs`, and the gradients of `sum(out * cotangent)` over the rows of `slabs`.

    Gradients of arguments with one entry per query have the rows of `slabs`. Gradients of keys and
    values are summed over the slabs in float64. Integer arguments have no gradients.
    """
    with jax.enable_x64(True):
        step, totals = _backward_slab(branch, config, slabs.size, slabs.offset, low), None
        kept = [], []
        for start, skip in zip(slabs.starts, slabs.skips, strict=True):
            at = jnp.int32(start), jnp.int32(skip)
            *parts, sums = step(dict(arguments), cotangent, *at)
            for found, part in zip(kept, parts, strict=True):
                found.append({name: np.asarray(x[:, skip:]) for name, x in part.items()})
            totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
        out, per_query = map(_stacked, kept)
        return out, per_query | jax.tree.map(np.asarray, totals)


@functools.cache
def _backward_slab(branch, config, size, offset, low):
    def slab(arguments, cotangent, start, skip):
        local, kv_len, dtype = _local(arguments, start, size, offset, low)
        fixed = {name: local.pop(name) for name in ("block_indices",) if name in local}
        weight = lax.dynamic_slice_in_dim(cotangent, start, size, axis=1)
        fresh = jnp.arange(size, dtype=jnp.int32)[:, None, None] >= skip

        def out_of(diff):
            found = dense(branch, {**diff, **fixed}, config, kv_len, dtype)
            return found["out"], found

        out, pull, found = jax.vjp(out_of, local, has_aux=True)
        grads = pull(jnp.where(fresh, weight, 0).astype(out.dtype))[0]
        rows = {name: x for name, x in grads.items() if name in PER_QUERY}
        sums = {name: x for name, x in grads.items() if name not in PER_QUERY}
        return found, rows, jax.tree.map(lambda x: x.astype(jnp.float64), sums)

    return compiled(slab)


def compiled(slab):
    """Compile the function without tuning. On a GPU, tuning would take longer than the oracle
    itself."""
    gpu = jax.default_backend() != "cpu"
    return jax.jit(slab, compiler_options={"xla_gpu_autotune_level": 0} if gpu else None)


def _stacked(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}


def _local(arguments, start, size, offset, low):
    """Return the slab's own arguments, its `kv_len` and the dtype to compute in."""
    local = {
        name: lax.dynamic_slice_in_dim(x, start, size, axis=1) if name in PER_QUERY else x
        for name, x in arguments.items()
    }
    kv_len = start + size + offset
    if low:
        return local, kv_len, local["query"].dtype

    def widen(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, local), kv_len, None

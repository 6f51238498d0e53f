"""The steps on Mosaic kernels in JAX (implementation `mosaic`): `jit`, `vmap` and gradients.

Arguments are those of `branches.py` and `select.py`. The backward pass is that of `xla`.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.mosaic.operands import slab_width
from nsa_jax import branches, geometry, select
from nsa_jax.tiled import Framework
from nsa_jax.types import Branches


def _run(kernel, *arrays):
    return kernel(*arrays)


def _search(rows, values, side):
    return jax.vmap(functools.partial(jnp.searchsorted, side=side))(rows, values)


STEPS = Framework(
    jnp, _run, jax.vmap(lambda row, index: row[index]), _search, jnp.asarray, jnp.sort
)


def _varying(x, axes):
    """`x` typed as varying along mesh axes: `shard_map` sees no such thing in kernels."""
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying")


def _foldable(function):
    """`function` of arrays `[B, ...]` under `vmap`: the mapped axis becomes part of `B`."""

    @jax.custom_batching.custom_vmap
    def folded(*arrays):
        types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(arrays)]
        axes = frozenset().union(*(each.varying for each in types))
        return jax.tree.map(lambda x: _varying(x, axes), function(*arrays))

    @folded.def_vmap
    def rule(size, mapped, *arrays):
        def merge(x, is_mapped):
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        merged = [jax.tree.map(merge, x, flag) for x, flag in zip(arrays, mapped, strict=True)]
        outputs = folded(*merged)
        split = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), outputs)
        return split, jax.tree.map(lambda _: True, split)

    return folded


def _differentiable(fast, plain, arrays, integers):
    """The output of `fast(arrays, integers)`, with the gradient of `plain`.

    `fast` returns besides a dict of integers that it found, which `plain` is given too.
    """

    @jax.custom_vjp
    def function(arrays, integers):
        return _foldable(fast)(arrays, integers)[0]

    def forward(arrays, integers):
        output, found = _foldable(fast)(arrays, integers)
        return output, (arrays, integers | found)

    def backward(saved, cotangents):
        arrays, integers = saved
        _, pull = jax.vjp(lambda arrays: plain(arrays, integers), arrays)
        return *pull(cotangents), None

    function.defvjp(forward, backward)
    return function(arrays, integers)


class _Place:
    """`kv_len` and `segment_ids` as arrays `[B, ...]`, so that they can be mapped over."""

    def __init__(self, query, num_keys, kv_len, segment_ids):
        self.static = kv_len if isinstance(kv_len, int) or kv_len is None else None
        self.batch, self.length = query.shape[:2]
        if self.static is None and kv_len is None:
            self.static = num_keys
        self.integers = {}
        if segment_ids is not None:
            self.integers["segment_ids"] = segment_ids
        elif self.static is None:
            self.integers["kv_len"] = jnp.broadcast_to(
                jnp.asarray(kv_len, jnp.int32), (self.batch,)
            )

    def options(self, integers):
        return {
            "kv_len": integers.get("kv_len", self.static),
            "segment_ids": integers.get("segment_ids"),
        }

    def where(self, query, integers, config):
        batch, length = query.shape[:2]
        return geometry.positions(batch, length, **self.options(integers), config=config)

    def queries(self, query, where):
        """`query` with zeros for padding, whose rows `selected` does not mask."""
        if "segment_ids" not in self.integers:
            return query
        zero = jnp.zeros((), query.dtype)
        return jnp.where((where.position >= 0)[..., None, None], query, zero)


def compressed_attention(
    query,
    compressed_key,
    compressed_value,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
):
    """`branches.compressed_attention`."""
    place = _Place(query, query.shape[1], kv_len, segment_ids)

    def fast(arrays, integers):
        query, key, value = arrays
        where = place.where(query, integers, config)
        return STEPS.compressed(query, key, value, where, config, scale), {}

    def plain(arrays, integers):
        options = place.options(integers)
        return branches.compressed_attention(*arrays, config=config, scale=scale, **options)

    arrays = (query, compressed_key, compressed_value)
    return _differentiable(fast, plain, arrays, place.integers)


def selected_attention(
    query, key, value, block_indices, *, config, kv_len=None, segment_ids=None, scale=None
):
    """`branches.selected_attention`."""
    place = _Place(query, key.shape[1], kv_len, segment_ids)
    integers = place.integers | {"indices": block_indices}

    def fast(arrays, integers):
        query, key, value = arrays
        where = place.where(query, integers, config)
        query = place.queries(query, where)
        indices = integers["indices"]
        return STEPS.selected(query, key, value, indices, where, config, scale), {}

    def plain(arrays, integers):
        query, key, value = arrays
        options = place.options(integers)
        return branches.selected_attention(
            query, key, value, integers["indices"], config=config, scale=scale, **options
        )

    key, value = (geometry.without_padding(x, kv_len, segment_ids) for x in (key, value))
    return _differentiable(fast, plain, (query, key, value), integers)


def sliding_attention(query, key, value, *, config, kv_len=None, segment_ids=None, scale=None):
    """`branches.sliding_attention`."""
    place = _Place(query, key.shape[1], kv_len, segment_ids)

    def fast(arrays, integers):
        query, key, value = arrays
        where = place.where(query, integers, config)
        return STEPS.sliding(query, key, value, where, config, scale), {}

    def plain(arrays, integers):
        options = place.options(integers)
        return branches.sliding_attention(*arrays, config=config, scale=scale, **options)

    key, value = (geometry.without_padding(x, kv_len, segment_ids) for x in (key, value))
    return _differentiable(fast, plain, (query, key, value), place.integers)


def select_blocks(query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None):
    """`select.select_blocks`; the normalisation is a pass of its own here."""
    query, compressed_key = jax.lax.stop_gradient((query, compressed_key))
    place = _Place(query, query.shape[1], kv_len, segment_ids)
    blocks = select.num_blocks(query, compressed_key, kv_len, segment_ids, config)

    def fast(arrays, integers):
        query, key = arrays
        where = place.where(query, integers, config)
        # Only the log-sum-exp is wanted: the narrowest values do.
        value = key[..., : slab_width(key.shape[-1])]
        _, lse = STEPS.compressed(query, key, value, where, config, scale)
        packed = segment_ids is not None
        return STEPS.best_blocks(query, key, lse, where, config, scale, blocks, packed)

    return _foldable(fast)((query, compressed_key), place.integers)


def attention(
    query,
    key: Branches,
    value: Branches,
    gates: Branches,
    compressed,
    block_indices,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
):
    """All steps: gates and the sum of the branches are part of the last kernels."""
    place = _Place(query, key.selected.shape[1], kv_len, segment_ids)
    blocks = select.num_blocks(query, compressed[0], kv_len, segment_ids, config)
    packed = segment_ids is not None

    def fast(arrays, integers):
        query, key, value, gates, (compressed_key, compressed_value) = arrays
        where = place.where(query, integers, config)
        indices = integers.get("indices")
        out, lse = STEPS.compressed(
            query, compressed_key, compressed_value, where, config, scale, gates.compressed
        )
        found = {}
        if indices is None:
            indices = found["indices"] = STEPS.best_blocks(
                query, compressed_key, lse, where, config, scale, blocks, packed
            )
        out, _ = STEPS.sliding(
            query, key.sliding, value.sliding, where, config, scale, gates.sliding, out
        )
        out, _ = STEPS.selected(
            place.queries(query, where),
            key.selected,
            value.selected,
            indices,
            where,
            config,
            scale,
            gates.selected,
            out,
        )
        return out, found

    def plain(arrays, integers):
        query, key, value, gates, compressed = arrays
        rest = {"config": config, "scale": scale, **place.options(integers)}
        outputs = Branches(
            branches.compressed_attention(query, *compressed, **rest)[0],
            branches.selected_attention(
                query, key.selected, value.selected, integers["indices"], **rest
            )[0],
            branches.sliding_attention(query, key.sliding, value.sliding, **rest)[0],
        )
        return branches.combine(outputs, gates)

    key, value = (
        Branches(None, *(geometry.without_padding(x, kv_len, segment_ids) for x in each[1:]))
        for each in (key, value)
    )
    integers = place.integers
    if block_indices is not None:
        integers = integers | {"indices": block_indices}
    return _differentiable(fast, plain, (query, key, value, gates, compressed), integers)

"""The steps on Mosaic kernels in JAX (implementation `mosaic`): `jit`, `vmap` and gradients.

Arguments are those of `branches.py` and `select.py`. For the backward pass each branch's own
output and log-sum-exp are kept, and the selection.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.mosaic.operands import slab_width
from nsa_jax import geometry, mosaic_backward, select
from nsa_jax.mosaic_forward import Framework
from nsa_jax.types import Branches


def _run(kernel, *arrays):
    return kernel(*arrays)


def _search(rows, values, side):
    return jax.vmap(functools.partial(jnp.searchsorted, side=side))(rows, values)


def _sort_pairs(keys, values):
    return jax.lax.sort((keys, values), num_keys=1, is_stable=True)


def _pad(x, axis, count, value):
    widths = [(0, count if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


STEPS = Framework(
    jnp,
    _run,
    jax.vmap(lambda row, index: row[index]),
    _search,
    jnp.asarray,
    jnp.sort,
    _sort_pairs,
    lambda x, n: jnp.arange(n, dtype=jnp.int32)[None],
    lambda where, name, make: make(),
    _pad,
    lambda x, index, part: x.at[index].set(part),
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


def _differentiable(fast, saving, pull, arrays, integers):
    """The output of `fast(arrays, integers)`, with gradients of the arrays.

    `saving` returns besides what `pull(arrays, integers, saved, cotangents)` needs.
    """

    @jax.custom_vjp
    def function(arrays, integers):
        return _foldable(fast)(arrays, integers)

    def forward(arrays, integers):
        output, saved = _foldable(saving)(arrays, integers)
        return output, (arrays, integers, saved)

    def backward(residuals, cotangents):
        return _foldable(pull)(*residuals, cotangents), None

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
        if "segment_ids" not in self.integers and (self.static or 0) >= self.length:
            return query  # no padding
        zero = jnp.zeros((), query.dtype)
        return jnp.where((where.position >= 0)[..., None, None], query, zero)


def _branch(attend, differentiate, arrays, place, integers=None):
    """`(out, lse)` of one branch: `attend(query, key, value, integers)` with its gradients
    `differentiate(query, key, value, integers, grad, saved)`.
    """
    integers = place.integers if integers is None else integers

    def fast(arrays, integers):
        return attend(*arrays, integers)

    def saving(arrays, integers):
        output = attend(*arrays, integers)
        return output, output

    def pull(arrays, integers, output, cotangents):
        (out, lse), (grad, lse_grad) = output, cotangents
        (dots,) = mosaic_backward.output_dots(STEPS, grad, out)
        # What sees nothing has no log-sum-exp that could change.
        lse_grad = jnp.where(lse == -jnp.inf, 0.0, lse_grad)
        saved = mosaic_backward.Saved(lse, dots, lse_grad=lse_grad)
        return tuple(differentiate(*arrays, integers, grad, saved))

    return _differentiable(fast, saving, pull, arrays, integers)


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

    def attend(query, key, value, integers):
        where = place.where(query, integers, config)
        return STEPS.compressed(query, key, value, where, config, scale)

    def differentiate(query, key, value, integers, grad, saved):
        where = place.where(query, integers, config)
        query, grad = (place.queries(x, where) for x in (query, grad))
        return mosaic_backward.compressed(
            STEPS, query, key, value, grad, saved, where, config, scale
        )

    arrays = (query, compressed_key, compressed_value)
    return _branch(attend, differentiate, arrays, place)


def selected_attention(
    query, key, value, block_indices, *, config, kv_len=None, segment_ids=None, scale=None
):
    """`branches.selected_attention`."""
    place = _Place(query, key.shape[1], kv_len, segment_ids)
    packed = segment_ids is not None

    def attend(query, key, value, integers):
        where = place.where(query, integers, config)
        query = place.queries(query, where)
        rest = integers["indices"], where, config, scale
        return STEPS.selected(query, key, value, *rest, packed=packed)

    def differentiate(query, key, value, integers, grad, saved):
        where = place.where(query, integers, config)
        query, grad = (place.queries(x, where) for x in (query, grad))
        return mosaic_backward.chosen(
            STEPS,
            query,
            key,
            value,
            integers["indices"],
            grad,
            saved,
            where,
            config,
            scale,
            packed,
        )

    key, value = (geometry.without_padding(x, kv_len, segment_ids) for x in (key, value))
    integers = place.integers | {"indices": block_indices}
    return _branch(attend, differentiate, (query, key, value), place, integers)


def sliding_attention(query, key, value, *, config, kv_len=None, segment_ids=None, scale=None):
    """`branches.sliding_attention`."""
    place = _Place(query, key.shape[1], kv_len, segment_ids)

    def attend(query, key, value, integers):
        where = place.where(query, integers, config)
        return STEPS.sliding(query, key, value, where, config, scale)

    def differentiate(query, key, value, integers, grad, saved):
        where = place.where(query, integers, config)
        query, grad = (place.queries(x, where) for x in (query, grad))
        return mosaic_backward.sliding(
            STEPS, query, key, value, grad, saved, where, config, scale
        )

    key, value = (geometry.without_padding(x, kv_len, segment_ids) for x in (key, value))
    return _branch(attend, differentiate, (query, key, value), place)


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
    recompute=False,
):
    """All steps: gates and the sum of the branches are part of the last kernels.

    Kept for the backward pass are the inputs, the selection, its lists, and each branch's
    output and log-sum-exp; inputs and selection alone if it shall `recompute` the rest.
    """
    place = _Place(query, key.selected.shape[1], kv_len, segment_ids)
    blocks = select.num_blocks(query, compressed[0], kv_len, segment_ids, config)
    packed = segment_ids is not None

    def best_blocks(query, key, lse, where, integers):
        if "indices" in integers:
            return integers["indices"]
        return STEPS.best_blocks(query, key, lse, where, config, scale, blocks, packed)

    def fused(arrays, integers):
        query, key, value, gates, (compressed_key, compressed_value) = arrays
        where = place.where(query, integers, config)
        rest = where, config, scale
        out, lse = STEPS.compressed(
            query, compressed_key, compressed_value, *rest, gates.compressed
        )
        indices = best_blocks(query, compressed_key, lse, where, integers)
        out, _ = STEPS.sliding(query, key.sliding, value.sliding, *rest, gates.sliding, out)
        chosen = place.queries(query, where), key.selected, value.selected, indices
        out, _ = STEPS.selected(*chosen, *rest, gates.selected, out, packed=packed)
        return out, indices

    def fast(arrays, integers):
        return fused(arrays, integers)[0]

    def again(arrays, integers):
        out, indices = fused(arrays, integers)
        return out, (None, indices, None)

    def saving(arrays, integers):
        query, key, value, gates, (compressed_key, compressed_value) = arrays
        where = place.where(query, integers, config)
        rest = where, config, scale
        first = STEPS.compressed(query, compressed_key, compressed_value, *rest)
        indices = best_blocks(query, compressed_key, first[1], where, integers)
        chosen = place.queries(query, where), key.selected, value.selected, indices
        lists = STEPS.selected_lists(*chosen, *rest)
        found = Branches(
            first,
            STEPS.selected(*chosen, *rest, lists=lists, packed=packed),
            STEPS.sliding(query, key.sliding, value.sliding, *rest),
        )
        out = mosaic_backward.gated_sum(STEPS, [out for out, _ in found], gates)
        return out, (found, indices, lists)

    def pull(arrays, integers, saved, grad):
        query, key, value, gates, compressed = arrays
        found, indices, lists = saved
        where = place.where(query, integers, config)
        query, grad = (place.queries(x, where) for x in (query, grad))
        query_grad, pairs, dots = mosaic_backward.whole(
            STEPS,
            query,
            key,
            value,
            gates,
            compressed,
            indices,
            grad,
            found,
            where,
            config,
            scale,
            packed,
            lists,
        )
        keys, values = (
            Branches(None, *each) for each in zip(pairs.selected, pairs.sliding, strict=True)
        )
        gates = Branches(*(x.astype(y.dtype) for x, y in zip(dots, gates, strict=True)))
        return query_grad, keys, values, gates, tuple(pairs.compressed)

    key, value = (
        Branches(None, *(geometry.without_padding(x, kv_len, segment_ids) for x in each[1:]))
        for each in (key, value)
    )
    integers = place.integers
    if block_indices is not None:
        integers = integers | {"indices": block_indices}
    arrays = query, key, value, gates, tuple(compressed)
    return _differentiable(fast, again if recompute else saving, pull, arrays, integers)

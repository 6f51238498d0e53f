"""Context parallelism inside `jax.shard_map`, in which the devices of a mesh axis share one
sequence.

Each device has the queries, keys and values of its own tokens (`nsa_core.context_layout`). Keys
and values are gathered for a group of key/value heads at a time (`head_groups`), by
`lax.all_gather`. The gather of the next group does not depend on the computation of the current
group, so XLA may overlap communication and computation. After the gather, attention of a chunk of
queries is an ordinary call, whose queries are the last of the first `kv_len` tokens. `kv_len` is a
traced value, so that all devices run the same program. Gathered keys and values are not saved,
since the backward pass gathers them again. `lax.psum_scatter` sums the gradients over the devices
in float32.

Each device computes the compressed tokens of those windows that begin in its own tokens. Windows
extend beyond the device's chunks. The tokens that follow a chunk and belong to its windows are
the halo of the chunk. All devices then gather the compressed tokens.

Shapes: `T` and `S` are the numbers of tokens of one device and of the whole sequence.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import NamedSharding, PartitionSpec

from nsa_core import context_layout as layouts
from nsa_core import validate
from nsa_core.array_ops import masked
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.types import RESIDUAL, Branches
from nsa_jax import api, geometry
from nsa_jax.compression import apply_phi, windows_at
from nsa_jax.compression import compress as compress_windows
from nsa_jax.eager import any_rank, custom_vjp, is_explicit
from nsa_jax.jax_ops import JAX_OPS
from nsa_jax.numerics import wide


def shard_sequence(x, size: int, *, axis: int = 1, context_layout: Layout = "zigzag"):
    """Reorder `x` along `axis`. In the result, each of `size` equal shards has the tokens of one
    device. If the length is not a multiple of the number of chunks, padding is added at the end.
    Padding has the value 0, or -1 for integers such as `segment_ids`.

    Raises:
      ValueError: There is no layout with the name `context_layout`.
    """
    x = jnp.asarray(x)
    length = x.shape[axis]
    spare = layouts.padded_length(length, size, context_layout) - length
    fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    order = layouts.Shards(context_layout, size, 0, 1).order

    def moved(x):
        widths = [(0, spare)] + [(0, 0)] * (x.ndim - 1)
        return _moved(jnp.pad(x, widths, constant_values=fill), order)

    return _along(moved, x, axis, length + spare)


def unshard_sequence(
    x, size: int, *, axis: int = 1, length=None, context_layout: Layout = "zigzag"
):
    """Undo `shard_sequence`: return the sequence in its original order. `length` is the length
    without padding."""
    layouts.check(context_layout)
    x = jnp.asarray(x)
    length = x.shape[axis] if length is None else length
    places = layouts.Shards(context_layout, size, 0, 1).places
    return _along(lambda x: _moved(x, places)[:length], x, axis, length)


def _along(function, x, axis: int, length: int):
    """Apply `function` to `x` with `axis` moved to the front. In the result, which has `length`
    entries on this axis, the axis is moved back. Explicit axes of a mesh are supported, although
    reshape and indexing do not support them. The result is sharded like `x`, except along an axis
    that cannot be divided in the same way.
    """

    def run(x):
        return jnp.moveaxis(function(jnp.moveaxis(x, axis, 0)), 0, axis)

    sharding = jax.typeof(x).sharding
    if not is_explicit(sharding):
        return run(x)
    if length % (x.shape[axis] // sharding.shard_shape(x.shape)[axis]):
        spec = [*sharding.spec]
        spec[axis] = None
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.jit(jax.sharding.auto_axes(run, out_sharding=sharding))(x)


def _moved(x, order):
    """Return the chunks of `x` `[S, ...]` in another order."""
    pieces = x.reshape(len(order), -1, *x.shape[1:])
    return pieces[np.array(order)].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class _Shards(layouts.Shards):
    """The shards of a sequence along `axis` of the mesh."""

    axis: str

    def gather(self, x):
        """Gather `x` `[B, n, ...]` of each device to `[B, R n, ...]`, in the order of the
        sequence. Each of the `C` chunks of a device has `n / C` of the device's entries, such as
        tokens. If `x` is None, return None.
        """
        if x is None:
            return None
        return _gather(self.axis, tuple(self.places), tuple(self.order), x)


def _shards(axis: str, layout: str, name: str, local_length: int) -> _Shards:
    """Return the shards for `local_length` tokens per device. `name` is the name of the argument in
    error messages."""
    chunk = layouts.chunk_length(name, local_length, layout)
    try:
        size, rank = lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)
    except NameError as error:
        raise ValueError(
            f"context_axis must be an axis of jax.shard_map around the call, got {axis!r}"
        ) from error
    return _Shards(layout, size, rank, chunk, axis)


@functools.partial(custom_vjp, static=3)
def _gather(axis, places, order, x):
    found = lax.all_gather(x, axis, axis=1, tiled=True)
    return jnp.moveaxis(_moved(jnp.moveaxis(found, 1, 0), places), 0, 1)


def _gather_forward(axis, places, order, x):
    return _gather(axis, places, order, x), None


def _gather_backward(axis, places, order, _, grad):
    if grad.dtype == jax.dtypes.float0:  # JAX represents gradients of integers with this dtype
        return (None,)
    wider = jnp.moveaxis(grad.astype(wide(grad.dtype)), 1, 0)
    total = lax.psum_scatter(_moved(wider, order), axis, scatter_dimension=0, tiled=True)
    return (jnp.moveaxis(total, 0, 1).astype(grad.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


@any_rank
def shard_positions(
    local_length: int, *, context_axis: str, segment_ids=None, context_layout: Layout = "zigzag"
):
    """Return the position of each token of this device in its own sequence, int32 `[1 or B, T]`.

    Args:
      local_length: `T`.
      segment_ids: `[B, T]`, the ids of this device's tokens. Padding has position -1.
      context_axis, context_layout: as in `nsa_jax.attention`.

    Raises:
      ValueError: The tokens cannot be split into chunks, or `context_axis` is no mesh axis of a
        `jax.shard_map` around the call.
    """
    shard = _shards(context_axis, context_layout, "query", local_length)
    segment_ids = shard.gather(segment_ids)
    batch = 1 if segment_ids is None else segment_ids.shape[0]
    where = (
        geometry.query_layout(
            batch, shard.chunk, kv_len=end, segment_ids=segment_ids, config=NSAConfig()
        )
        for _, end in shard.calls
    )
    return jnp.concatenate([each.position for each in where], axis=1)


@any_rank
def compress(
    x,
    params: CompressParams = None,
    *,
    config: NSAConfig,
    segment_ids=None,
    context_axis: str,
    context_layout: Layout = "zigzag",
):
    """Apply `nsa_jax.compress` to the whole sequence. Every device gets the result.

    Args:
      x: `[B, T, Hkv, D]`, the device's own tokens.
      params, config: as in `nsa_jax.compress`.
      segment_ids: `[B, T]`, the ids of the device's own tokens.
      context_axis, context_layout: as in `nsa_jax.attention`.

    Returns:
      The compressed tokens, `[B, C, Hkv, D]`, `C = config.num_compressed(S)`.

    Raises:
      ValueError: Shapes or dtypes do not fit, or `shard_positions` would raise an error.
    """
    validate.array("x", x, 4)
    validate.phi(params, x, config)
    validate.segments(segment_ids, *x.shape[:2])
    shard = _shards(context_axis, context_layout, "x", x.shape[1])
    segment_ids = shard.gather(segment_ids)
    return _compressed_tokens(shard, x, params, config, segment_ids)


def _compressed_tokens(shard, x, params, config, segment_ids):
    """Return the compressed tokens of the whole sequence. `x` has only the device's own tokens,
    but `segment_ids` has the ids of the whole sequence.
    """
    block, stride, chunk = config.compress_block, config.compress_stride, shard.chunk
    count, most = config.num_compressed(shard.length), -(-chunk // stride)
    if count == 0:
        return x[:, :0]
    whole_strides = segment_ids is None and chunk % stride == 0
    pieces = _with_halo(shard, x, block - stride if whole_strides else block - 1)
    if whole_strides:
        made = [
            compress_windows(tokens, params, config=config, first=number * chunk)
            for number, tokens in zip(shard.own, pieces, strict=True)
        ]
        return shard.gather(jnp.concatenate(made, axis=1))[:, :count]
    if segment_ids is None:
        segment_ids = jnp.zeros((x.shape[0], shard.length), jnp.int32)
    packed = geometry.packed_rows(segment_ids, config)
    begin, position = packed.window_starts, packed.position
    starts, slots = layouts.windows_of_chunks(JAX_OPS, begin, shard, most)
    made = []
    for number, tokens, start in zip(shard.own, pieces, starts, strict=True):
        inside = start < chunk
        at = JAX_OPS.take_rows(position, jnp.where(inside, start, 0) + number * chunk)
        start = jnp.where(inside, start, -1)
        windows = apply_phi(windows_at(block, stride, tokens, start), params, at)
        made += masked(jnp, inside, windows)
    found = shard.gather(jnp.concatenate(made, axis=1))
    used = begin >= 0
    return masked(jnp, used, JAX_OPS.take_rows(found, jnp.where(used, slots, 0)))[0]


@any_rank
def tokens_before(x, count: int, *, context_axis: str, context_layout: Layout = "zigzag"):
    """Return the `count` tokens before each of the `C` chunks of this device, `[B C, count,
    columns]`. `x` `[B, T, columns]` has this device's tokens. Tokens before the start of the
    sequence are zeros.

    Raises:
      ValueError: a chunk has fewer tokens than `count`.
    """
    shard = _shards(context_axis, context_layout, "x", x.shape[1])
    if shard.chunk < count:
        raise ValueError(
            f"x must have at least {count} tokens per chunk of context_layout, got {shard.chunk}"
        )
    own = jnp.split(x, len(shard.own), axis=1)
    last: Any = shard.gather(jnp.concatenate([chunk[:, -count:] for chunk in own], axis=1))
    padded = jnp.pad(last, [(0, 0), (count, 0), (0, 0)])
    before = [
        lax.dynamic_slice_in_dim(padded, number * count, count, 1) for number in shard.own
    ]
    return jnp.stack(before, axis=1).reshape(-1, count, x.shape[2])


def _with_halo(shard, x, halo):
    """Return each chunk of `x` `[B, T, ...]`, followed by its `halo` next tokens. Entries after the
    end of the sequence are zeros.
    """
    own = jnp.split(x, len(shard.own), axis=1)
    width = min(halo, shard.chunk)
    if halo == 0:
        return own
    heads = shard.gather(jnp.concatenate([chunk[:, :width] for chunk in own], axis=1))
    heads = jnp.pad(heads, [(0, 0), (0, halo)] + [(0, 0)] * (x.ndim - 2))
    behind = (
        lax.dynamic_slice_in_dim(heads, (number + 1) * width, halo, 1) for number in shard.own
    )
    return [jnp.concatenate(pair, axis=1) for pair in zip(own, behind, strict=True)]


@any_rank
def select_blocks(
    query,
    compressed_key,
    *,
    config: NSAConfig,
    segment_ids=None,
    scale: float | None = None,
    implementation: str | None = None,
    context_axis: str,
    context_layout: Layout = "zigzag",
):
    """Select the blocks that the queries of this device read, int32 `[B, T, Hkv, n]`.

    Args:
      query: `[B, T, H, D]`, the device's own queries.
      compressed_key: `[B, C, Hkv, D]` of the whole sequence, from `compress`.
      segment_ids: `[B, T]`, the ids of the device's own tokens.
      config, scale, implementation: as in `nsa_jax.select_blocks`.
      context_axis, context_layout: as in `nsa_jax.attention`.

    Raises:
      ValueError: Shapes or dtypes do not fit, or `shard_positions` would raise an error.
      NotImplementedError: The named implementation cannot run this call.
    """
    validate.queries(query)
    shard = _shards(context_axis, context_layout, "query", query.shape[1])
    segment_ids = shard.gather(segment_ids)
    validate.scoring(query, compressed_key, config, shard.length, None, scale)
    chosen = api.choices_of(
        query, compressed_key, query.shape[-1], config, segment_ids, implementation, "scores"
    )
    place = dict(config=config, segment_ids=segment_ids, scale=scale)
    parts = [
        api.function_of(chosen.scores)(query[:, tokens], compressed_key, kv_len=end, **place)
        for tokens, end in shard.calls
    ]
    return jnp.concatenate(parts, axis=1)


@any_rank
def attention(
    query,
    key: Branches,
    value: Branches,
    gates: Branches,
    *,
    config,
    compressed,
    block_indices,
    segment_ids,
    scale,
    recompute,
    implementation,
    context_axis,
    context_layout,
):
    """Compute `api.attention` for the queries of this device. The arguments are the same as in
    `api.attention`."""
    validate.in_dtype_of_query(config, "context parallelism")
    shard = _shards(context_axis, context_layout, "query", query.shape[1])
    for branch, k in key._asdict().items():
        if k.shape[1] != query.shape[1]:
            raise ValueError(
                f"key.{branch} must have as many tokens as query if context_axis is given, "
                f"got {k.shape[1]} and {query.shape[1]}"
            )
    segment_ids = shard.gather(segment_ids)
    if compressed is None:
        compressed = tuple(
            _compressed_tokens(shard, x.compressed, None, config, segment_ids)
            for x in (key, value)
        )
    k_cmp, v_cmp = validate.pair(compressed)
    validate.compressed(query, k_cmp, v_cmp, config, shard.length, value.selected)
    if block_indices is not None:
        validate.indices(block_indices, query, key.selected, config)
    separate = key.sliding is not key.selected or value.sliding is not value.selected
    options = dict(config=config, segment_ids=segment_ids, scale=scale)

    def some_heads(query, gates, compressed, keys_values, indices):
        whole = [shard.gather(x) for x in keys_values]
        own_key, own_value = whole[2:] or whole[:2]
        parts = [
            api.attend(
                query[:, tokens],
                Branches(None, whole[0], own_key),
                Branches(None, whole[1], own_value),
                Branches(*(gate[:, tokens] for gate in gates)),
                compressed,
                block_indices=None if indices is None else indices[:, tokens],
                kv_len=end,
                implementation=implementation,
                assume_finite=segment_ids is None,  # tokens of other devices follow a chunk
                **options,
            )
            for tokens, end in shard.calls
        ]
        return jnp.concatenate(parts, axis=1)

    kept = checkpoint_policies.save_only_these_names(RESIDUAL)
    some_heads = jax.checkpoint(some_heads, policy=None if recompute else kept)
    tensors = [key.selected, value.selected]
    tensors += [key.sliding, value.sliding] if separate else []
    group = query.shape[2] // key.selected.shape[2]
    outputs = []
    columns = sum(x.shape[0] * x.shape[-1] * x.dtype.itemsize for x in tensors)
    for some in layouts.head_groups(key.selected.shape[2], shard.length * columns):
        heads = slice(some.start * group, some.stop * group)
        outputs.append(
            some_heads(
                query[:, :, heads],
                Branches(*(gate[:, :, heads] for gate in gates)),
                tuple(x[:, :, some] for x in compressed),
                [x[:, :, some] for x in tensors],
                None if block_indices is None else block_indices[:, :, some],
            )
        )
    return jnp.concatenate(outputs, axis=2)

"""The layout of weights and rows on a mesh of `(data, fsdp, tensor)` devices in JAX.

Rows are divided over `data` and `fsdp`. Weights are divided over `fsdp`. When a block runs, its
weights are gathered in the dtype of the computation. The gradients of the weights are summed and
divided again in float32. The heads and the MLP are divided over `tensor`. Each device has some
key/value heads with their query heads, so that attention and its kernels run as on one device
(`shard_map`).
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .parallel import Parallel
from .spec import ModelSpec

AXES = DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = DATA, FSDP
# Name of gathered weights, which the backward pass gathers again instead of storing them.
GATHERED = "gathered weights"
# The parts of attention whose weights all heads share.
OF_ALL_HEADS = frozenset(
    ("gate", "phi_k_mlp", "phi_v_mlp", "phi_k_conv", "phi_v_conv", "q_norm", "k_norm")
)
KEEP = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)


def spec_of(path: tuple[Any, ...], x: Any) -> PartitionSpec:
    """Return the partition spec of the weight `x` at `path` of a state, or of the moments of this
    weight. Small weights are not divided.
    """
    *parents, name = _names(path)
    if not x.ndim:
        return PartitionSpec()
    if name == "embedding":
        return PartitionSpec(None, FSDP)
    if parents[-2:] == ["attention", "gate"] and name == "bias":
        return PartitionSpec(TENSOR)  # the model of each device's heads
    if name != "kernel" or "fc1" in parents or "fc2" in parents:
        return PartitionSpec()
    if parents[-1] == "head":
        return PartitionSpec(FSDP)
    if parents[-1] in ("out", "down"):
        return PartitionSpec(TENSOR, FSDP)
    return PartitionSpec(FSDP, TENSOR)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the layout of weights and rows on the mesh."""

    mesh: Mesh

    @classmethod
    def of(cls, parallel: Parallel, model: ModelSpec) -> "Layout":
        """Return a layout of the first `parallel.devices` devices; replicas of a process are
        neighbours.

        Raises:
          ValueError: There are fewer devices, several processes have more devices, or `dim` cannot
            be divided. The error is also raised if projections that are divided by heads have
            biases or a convolution.
        """
        if parallel.tensor > 1 and model.layer.bias:
            raise ValueError(f"bias must be False if tensor={parallel.tensor}, got True")
        if parallel.tensor > 1 and model.layer.key_taps is not None:
            raise ValueError(
                f"key_taps must be None if tensor={parallel.tensor}, got {model.layer.key_taps}"
            )
        devices = jax.devices()
        if len(devices) < parallel.devices:
            raise ValueError(f"devices must be at most {len(devices)}, got {parallel.devices}")
        if jax.process_count() > 1 and len(devices) > parallel.devices:
            raise ValueError(
                f"devices must be {len(devices)}, the number of devices of all "
                f"{jax.process_count()} processes, got {parallel.devices}"
            )
        shards = parallel.replicas if parallel.kind == "fsdp" else 1
        if model.layer.dim % shards:
            raise ValueError(
                f"dim must be a multiple of the {shards} devices that share the weights with fsdp, "
                f"got {model.layer.dim}"
            )
        shape = parallel.replicas // shards, shards, parallel.tensor
        return cls(Mesh(np.array(devices[: parallel.devices]).reshape(shape), AXES))

    def shown(self, tree: Any) -> Any:
        """Within `jit`, replicate `tree` on every device, so that any process can read it."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    def part(self, model: ModelSpec) -> ModelSpec:
        """Return the model of one device, with the device's part of the heads."""
        layer, tensor = model.layer, self.mesh.shape[TENSOR]
        heads = dict(n_heads=layer.n_heads // tensor, n_kv_groups=layer.n_kv_groups // tensor)
        layer = dataclasses.replace(layer, **heads)
        return dataclasses.replace(model, layer=layer, hidden=model.hidden // tensor)

    def placed(self, tree: Any) -> Any:
        """Place weights or moments with their shardings."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: _global(x, NamedSharding(self.mesh, spec_of(path, x))), tree
        )

    def pinned(self, tree: Any) -> Any:
        """Within `jit`, constrain `tree` to its shardings."""
        specs = jax.tree_util.tree_map_with_path(spec_of, tree)
        shardings = jax.tree.map(functools.partial(NamedSharding, self.mesh), specs)
        return jax.lax.with_sharding_constraint(tree, shardings)

    def rows(self, x: np.ndarray) -> jax.Array:
        """Return micro-batches `[accumulate, B, ...]` of all processes, given the rows `x` of
        this process.
        """
        sharding = NamedSharding(self.mesh, PartitionSpec(None, ROWS))
        return jax.make_array_from_process_local_data(sharding, x)

    def gathered(self, stored: Any, dtype: Any) -> Any:
        """Return the weights of a device in `dtype`, gathered along `fsdp`."""

        def gather(path, x):
            names, axes = set(_names(path)), set(ROWS)
            if OF_ALL_HEADS & names and "attention" in names:
                axes.add(TENSOR)
            # The weights are declared as varying before the cast, so that gradients are summed
            # over devices in float32.
            x, spec = _varying(x, axes), spec_of(path, x)
            if FSDP not in spec:
                return x.astype(dtype)
            return checkpoint_name(_gather(x, spec.index(FSDP), dtype), GATHERED)

        return jax.tree_util.tree_map_with_path(gather, stored)

    def summed(self, compute: Any) -> Any:
        """Sum `compute(params, total, tokens, segment_ids)` over the rows of all devices."""

        def local(*inputs):
            return jax.lax.psum(compute(*inputs), ROWS)

        return self._of_rows(local)

    @property
    def data_only(self) -> bool:
        """Whether every device has all weights."""
        return self.mesh.size == self.mesh.shape[DATA]

    def summed_gradients(self, compute: Any) -> Any:
        """Return a function that computes the gradients of `summed` as one array. The last number
        of the returned array is the loss. The function needs only one all-reduce, and is valid
        only if `data_only` is true.

        If XLA summed the gradient of each weight, XLA would copy the gradients into buffers of 30
        MB before each all-reduce, and would copy the gradients back afterwards.
        """

        def local(params, *inputs):
            params = jax.tree.map(lambda x: _varying(x, AXES), params)
            loss, grads = jax.value_and_grad(compute)(params, *inputs)
            return jax.lax.psum(ravel_pytree((grads, loss))[0], AXES)

        return self._of_rows(local)

    def _of_rows(self, local: Any) -> Any:
        """Return a function that calls `local(params, total, tokens, segment_ids)` on each device
        with its rows and weights. `local` must return the same value on all devices."""
        rows, whole = PartitionSpec(ROWS), PartitionSpec()

        def mapped(params, total, tokens, segment_ids):
            weights = jax.tree_util.tree_map_with_path(spec_of, params)
            packed = None if segment_ids is None else rows
            specs = weights, whole, rows, packed
            function = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=whole)
            return function(params, total, tokens, segment_ids)

        return mapped


def _varying(x: Any, axes: Iterable[str]) -> Any:
    """Within `shard_map`, declare that `x` differs between the devices along `axes`. The gradient
    of a declared `x` is the gradient of one device. Without this declaration, JAX would sum the
    gradients of all devices for `x`.
    """
    missing = frozenset(axes) - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x, axis: int, dtype):
    """Gather all rows or columns of a divided weight `x`, in `dtype`."""
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=axis, tiled=True)


def _gather_forward(x, axis, dtype):
    return _gather(x, axis, dtype), None


def _gather_backward(axis, dtype, _, grad):
    wide = grad.astype(jnp.float32)
    return (jax.lax.psum_scatter(wide, FSDP, scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _global(x: Any, sharding: NamedSharding) -> jax.Array:
    """Divide `x` among devices. Every process has all of `x`, or `x` is already divided."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _names(path: tuple[Any, ...]) -> list[str]:
    """Return a path into an `nnx.State` as names. The entries of the path for values of variables
    are left out."""
    names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return [name for name in names if name != "value"]

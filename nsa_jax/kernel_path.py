"""Runs the steps of an implementation on kernels, `mosaic` or `triton`, in JAX, with `jit`,
`vmap` and gradients. `nsa_core.steps.fused.Steps` has the steps themselves, and this module adds
the transforms of JAX. The arguments are the same as in `branches.py`. The block indices, and the
output and log-sum-exp of each branch, are saved for the backward pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from nsa_core.steps import fused
from nsa_core.steps.fused import Inputs, Residuals, Steps, in_slots, of_slots
from nsa_core.steps.params import Params, Qkv
from nsa_core.types import RESIDUAL, Branches
from nsa_core.varlen import Capacity, Varlen, sequences_of_segments
from nsa_jax import branches, geometry
from nsa_jax.eager import custom_vjp, foldable, refuse_derivatives
from nsa_jax.jax_ops import JAX_OPS

_first_order = functools.partial(
    refuse_derivatives,
    "only implementations 'xla' and 'reference' have second derivatives (Hessians, gradient "
    "penalties); use one of them",
)


def _differentiable(forward, forward_with_residuals, backward, arrays, integers, config):
    """Return the output of `forward(arrays, integers)`. Only `arrays` have gradients.
    `forward_with_residuals` also returns the residuals. `backward(arrays, integers, residuals,
    cotangents)` computes the gradients from the residuals.
    """

    @custom_vjp
    def function(arrays, integers):
        return foldable(forward)(arrays, integers)

    def keep(arrays, integers):
        config.check_differentiable()
        arrays = _first_order(arrays)
        output, residuals = foldable(forward_with_residuals)(arrays, integers)
        residuals = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL), residuals)
        return output, (arrays, integers, residuals)

    def pull_back(kept, cotangents):
        cotangents = _first_order(cotangents)
        return foldable(backward)(*kept, cotangents), None

    function.defvjp(keep, pull_back)
    return function(arrays, integers)


class _Lengths:
    """`kv_len` and `segment_ids` as arrays `[B, ...]`, so that `jax.vmap` can map over these
    arrays.

    Args:
      ops: The `ArrayOps` of kernels that read tables of packed rows (`nsa_core.varlen`), or None
        if no kernel reads such tables.
      padded: Whether there may be padding, which means queries before the first key.
    """

    def __init__(self, query, num_keys, kv_len, segment_ids, config, ops=None, padded=True):
        self.config, self.ops, self.padded = config, ops, padded
        self.static = kv_len if isinstance(kv_len, int) else None
        if kv_len is None:
            self.static = num_keys
        self.integers = {}
        if segment_ids is not None:
            self.integers["segment_ids"] = segment_ids
        if self.static is None:
            shape = query.shape[:1]
            kv_len = jnp.asarray(kv_len, jnp.int32)
            self.integers["kv_len"] = jnp.broadcast_to(kv_len, shape)

    def layout(self, query, integers):
        """Return the layout of `query` `[B, T, H, D]`."""
        segments = integers.get("segment_ids")
        found = geometry.query_layout(
            *query.shape[:2],
            kv_len=integers.get("kv_len", self.static),
            segment_ids=segments,
            config=self.config,
        )
        if segments is None and not self.padded:
            found = dataclasses.replace(found, padded=False)
        most = getattr(segments, "max_segments", None)
        if self.ops is None or most is None or self.static is None:
            return found
        (batch, count), length = query.shape[:2], segments.shape[1]
        longest = min(segments.max_seqlen or length, length)
        capacity = Capacity(batch, count, length, most, longest, self.config)
        ids = segments.segment_ids
        tables = {"sequences": sequences_of_segments(self.ops, ids, capacity)}
        varlen = Varlen(self.ops, capacity, **tables)
        names = "position", "key_start", "compressed_start"
        places = {name: getattr(varlen.tokens, name) for name in names}
        return dataclasses.replace(found, **places, varlen=varlen)


class KernelPath:
    """The functions of an implementation that consists of kernels.

    Args:
      steps: The steps on the kernels of the implementation.
    """

    def __init__(self, steps: Steps):
        self.steps = steps

    def _lengths(self, *sizes, padded=True):
        """Return the `_Lengths` of a call. `sizes` are the arguments of `_Lengths` before
        `ops`."""
        ops = JAX_OPS if self.steps.reads_places else None
        return _Lengths(*sizes, ops=ops, padded=padded)

    def _attention(
        self,
        name: str,
        query,
        key,
        value,
        *indices,
        config,
        kv_len=None,
        segment_ids=None,
        scale=None,
    ):
        """Compute `branches.<name>_attention` with the function of this branch in
        `steps.forward`. The function of the same name in `steps.backward` computes the
        gradients of query, key and value.
        """
        tokens, pair = query if name == "compressed" else key, (key, value)
        lengths = self._lengths(query, tokens.shape[1], kv_len, segment_ids, config)
        if name != "compressed":
            pair = (geometry.without_padding(x, kv_len, segment_ids) for x in pair)

        def run(function, arrays, integers, *gradient):
            qkv, chosen = Qkv(*arrays), [integers["block_indices"]] if indices else []
            params = Params(lengths.layout(qkv.query, integers), config, scale)
            given = qkv, chosen, params, *gradient
            return tuple(function(self.steps, JAX_OPS, name, *given))

        forward, backward = (
            functools.partial(run, x) for x in (fused.one_branch, fused.one_branch_backward)
        )

        def forward_with_residuals(arrays, integers):
            output = forward(arrays, integers)
            return output, output

        functions = forward, forward_with_residuals, backward
        integers = lengths.integers | ({"block_indices": indices[0]} if indices else {})
        return _differentiable(*functions, (query, *pair), integers, config)

    def compressed_attention(self, *arrays, **options):
        return self._attention("compressed", *arrays, **options)

    def selected_attention(self, *arrays, **options):
        return self._attention("selected", *arrays, **options)

    def sliding_attention(self, *arrays, **options):
        return self._attention("sliding", *arrays, **options)

    def select_blocks(
        self, query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None
    ):
        """Select blocks as the function `branches.select_blocks` does. A separate pass computes the
        log-sum-exp of the compressed branch.
        """
        query, compressed_key = jax.lax.stop_gradient((query, compressed_key))
        lengths = self._lengths(query, query.shape[1], kv_len, segment_ids, config)
        num_blocks = branches.num_blocks(query, compressed_key, kv_len, segment_ids, config)

        def forward(arrays, integers):
            query, key = arrays
            params = Params(lengths.layout(query, integers), config, scale)
            return fused.select_blocks(self.steps, JAX_OPS, query, key, params, num_blocks)

        return foldable(forward)((query, compressed_key), lengths.integers)

    def attention(
        self,
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
        assume_finite=False,
    ):
        """Run all steps. The inputs, the block indices, the block lists, and the output and
        log-sum-exp of each branch are saved for the backward pass. With `recompute` only the
        inputs and the block indices are saved.

        Args:
          key, value: `Branches`, whose compressed fields are not read.
          compressed: `(k_cmp, v_cmp)`.
          assume_finite: as in `api.attend`.
        """
        sizes = key.selected.shape[1], kv_len, segment_ids, config
        lengths = self._lengths(query, *sizes, padded=not assume_finite)
        num_blocks = branches.num_blocks(query, compressed[0], kv_len, segment_ids, config)

        def prepared(inputs, integers):
            layout = lengths.layout(inputs.query, integers)
            pair = in_slots(layout, inputs.key.compressed, inputs.value.compressed)
            return inputs.with_compressed(*pair), Params(layout, config, scale)

        def run(function, inputs, integers):
            inputs, params = prepared(inputs, integers)
            given = integers.get("block_indices")
            return function(self.steps, JAX_OPS, inputs, given, params, num_blocks)

        def forward(inputs, integers):
            out, _ = run(fused.forward, inputs, integers)
            return out

        def forward_with_residuals(inputs, integers):
            if not recompute:
                return run(fused.forward_with_residuals, inputs, integers)
            out, indices = run(fused.forward, inputs, integers)
            return out, Residuals(indices)

        def backward(inputs, integers, residuals, do):
            count = inputs.key.compressed.shape[1]
            inputs, params = prepared(inputs, integers)
            found = fused.backward(self.steps, JAX_OPS, inputs, residuals, do, params)
            gates = (
                x.astype(gate.dtype) for x, gate in zip(found.gates, inputs.gates, strict=True)
            )
            grads = found.key.compressed, found.value.compressed
            found = found.with_compressed(*of_slots(params.layout, count, *grads))
            return found._replace(gates=Branches(*gates))

        def inputs_of(compressed, branches):
            if assume_finite:
                return branches._replace(compressed=compressed)
            padded = (geometry.without_padding(x, kv_len, segment_ids) for x in branches[1:])
            return Branches(compressed, *padded)

        key, value = (
            inputs_of(x, branches) for x, branches in zip(compressed, (key, value), strict=True)
        )
        integers = lengths.integers
        if block_indices is not None:
            integers = integers | {"block_indices": block_indices}
        inputs = Inputs(query, key, value, gates)
        functions = forward, forward_with_residuals, backward
        return _differentiable(*functions, inputs, integers, config)

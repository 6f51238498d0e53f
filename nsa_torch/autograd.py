"""The functions of `nsa_jax` on torch tensors (implementation `jax`), with their gradients."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import torch
from torch import Tensor

import nsa_jax
from nsa_core.types import Branches
from nsa_interop import dlpack
from nsa_torch.first_order import first_order


def jax_function(name: str, arrays: Mapping[str, Any], static: Mapping[str, Any]):
    """`nsa_jax.<name>` on torch tensors: one jitted call forward, one backward.

    `arrays` are tensors, None, or `Branches` and pairs of them; `static` must be hashable. A
    gradient flows through the first output only, and none through integers.
    """
    leaves, tree = jax.tree.flatten(dict(arrays))
    leaves = [x.to(torch.int32) if x.dtype == torch.int64 else x for x in leaves]
    call = _JaxCall(name, tree, tuple(static.items()))
    return _JaxFunction.apply(call, *leaves)


class _JaxCall(NamedTuple):
    name: str
    tree: Any
    static: tuple

    def __call__(self, *leaves):
        function = getattr(nsa_jax, self.name)
        return function(**jax.tree.unflatten(self.tree, leaves), **dict(self.static))

    def pull_back(self, grad, *leaves):
        """Gradients of the floating leaves, the forward pass computed again."""
        moving = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in leaves]

        def of_floats(*floats):
            supply = iter(floats)
            pairs = zip(moving, leaves, strict=True)
            out = self(*(next(supply) if moves else x for moves, x in pairs))
            return out if isinstance(out, jax.Array) else out[0]

        floats = [x for moves, x in zip(moving, leaves, strict=True) if moves]
        return jax.vjp(of_floats, *floats)[1](grad)


@functools.lru_cache(maxsize=256)
def _jitted(call: _JaxCall, backward: bool):
    return jax.jit(call.pull_back if backward else call.__call__)


class _JaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call, *leaves):
        ctx.call = call
        ctx.save_for_backward(*leaves)
        outputs = _run(call, False, leaves)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad, *_):
        leaves = ctx.saved_tensors
        supply = iter(_run(ctx.call, True, (grad, *leaves)))
        return None, *(next(supply) if x.is_floating_point() else None for x in leaves)


def _run(call, backward, tensors):
    # DLPack shares dense row-major memory only; a copy is small beside the call.
    dense = (x.detach().contiguous() for x in tensors)
    return dlpack.call_jax(_jitted(call, backward), *dense)


def segment_ids(cu_seqlens: Tensor | None, length: int, device: torch.device):
    """int32 `[1, S]`: the sequence of each token, -1 for padding."""
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.to(device, torch.int32)
    token = torch.arange(length, dtype=torch.int32, device=device)
    sequence = torch.searchsorted(bounds[1:], token, right=True)
    return torch.where(token < bounds[-1], sequence, -1).to(torch.int32)[None]


def _branch(name: str, arrays: dict, config, kv_len, cu_seqlens, scale):
    query = arrays["query"]
    static = {"config": config, "scale": scale}
    arrays["segment_ids"] = segment_ids(cu_seqlens, kv_len, query.device)
    if cu_seqlens is None:
        (static if isinstance(kv_len, int) else arrays)["kv_len"] = kv_len
    return jax_function(name, arrays, static)


def attention(
    query,
    key: Branches,
    value: Branches,
    gates: Branches,
    compressed,
    block_indices,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    clean=False,
    recompute=False,
):
    """All steps in one call; `compressed` None: compressed there."""
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "gates": gates,
        "compressed": compressed,
        "block_indices": block_indices,
        "segment_ids": segment_ids(cu_seqlens, kv_len, query.device),
    }
    return jax_function("attention", arrays, {"config": config, "scale": scale})


def compressed_attention(
    query,
    compressed_key,
    compressed_value,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
):
    arrays = {
        "query": query,
        "compressed_key": compressed_key,
        "compressed_value": compressed_value,
    }
    return _branch("compressed_attention", arrays, config, kv_len, cu_seqlens, scale)


def select_blocks(query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None):
    arrays = {"query": query.detach(), "compressed_key": compressed_key.detach()}
    return _branch("select_blocks", arrays, config, kv_len, cu_seqlens, scale)


def selected_attention(
    query,
    key,
    value,
    block_indices,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
):
    arrays = {"query": query, "key": key, "value": value, "block_indices": block_indices}
    return _branch("selected_attention", arrays, config, kv_len, cu_seqlens, scale)


def sliding_attention(
    query, key, value, *, config, kv_len, cu_seqlens=None, scale=None, with_lse=True
):
    arrays = {"query": query, "key": key, "value": value}
    return _branch("sliding_attention", arrays, config, kv_len, cu_seqlens, scale)

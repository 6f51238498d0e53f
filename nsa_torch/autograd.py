"""Runs the functions of `nsa_jax` on torch tensors (implementation `jax`). The forward pass is one
jitted call of JAX. The backward pass is a second jitted call, which computes the forward pass
again.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

import nsa_jax
from nsa_interop import dlpack
from nsa_torch import operators
from nsa_torch.operators import MODES, InputMode, all_steps


def _branch(*arrays, name, words, kv_len, **static):
    """Call the function `<name>` of `nsa_jax` on the arrays, with segment ids and with a `kv_len`,
    which may be None. `words` has the argument names of the arrays.
    """
    *arrays, segment_ids, lengths = arrays
    given = dict(zip(words, arrays, strict=True)) | {"segment_ids": segment_ids}
    given["kv_len"] = kv_len if lengths is None else lengths
    return getattr(nsa_jax, name)(**given, **static)


def _whole(*arrays, mode, kv_len, **static):
    """Call `nsa_jax.attention`. The arrays are the tensors of an `operators.InputMode`, followed by
    `block_indices`. `kv_len` and the segment ids are the same as in `_branch`.
    """
    *given, block_indices, segment_ids, _ = arrays
    query, key, value, gates = mode.inputs(given)
    compressed = None
    if not mode.compresses:
        compressed = key.compressed, value.compressed
        key, value = (x._replace(compressed=x.selected) for x in (key, value))
    options = {"block_indices": block_indices, "segment_ids": segment_ids}
    return nsa_jax.attention(
        query, key, value, gates, compressed=compressed, **options, **static
    )


def _pull_back(function: Callable[..., Any], grads, *arrays):
    """Return the gradients of the floating-point arrays, given the gradients of the first
    outputs of `function`.
    """

    def outputs(*arrays):
        out = function(*arrays)
        return [out] if isinstance(out, jax.Array) else [*out][: len(grads)]

    found = jax.vjp(outputs, *arrays)[1]([*grads])
    return tuple(x for x in jax.tree.leaves(found) if x.dtype != jax.dtypes.float0)


@functools.lru_cache(maxsize=256)
def _jitted(function, static, backward: bool):
    run = functools.partial(function, **dict(static))
    return jax.jit(functools.partial(_pull_back, run) if backward else run)


def _run(function, static: dict, tensors: Iterable[Tensor | None], grads: Sequence[Tensor]):
    """Run `function` or its backward pass. If `grads` is None, return the results of `function`. If
    `grads` has gradients of the first results of `function`, return the gradients of the
    floating-point arrays.
    """
    dense: list[Any] = [None if x is None else _dense(x) for x in tensors]
    if grads:
        dense.insert(0, tuple(map(_dense, grads)))
    return dlpack.call_jax(_jitted(function, tuple(static.items()), bool(grads)), *dense)


def _dense(x: Tensor) -> Tensor:
    """Return a tensor that JAX accepts through DLPack. The returned tensor is row-major and needs
    no gradient. An int64 tensor is converted to int32. `x` is copied only if necessary.
    """
    x = x.to(torch.int32) if x.dtype == torch.int64 else x
    return x.detach().contiguous()


def _segment_ids(cu_seqlens: Tensor | None, length: int, device: torch.device):
    """Return the sequence of each token, int32 `[1, S]`. Padding has the sequence -1."""
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.to(device, torch.int32)
    token = torch.arange(length, dtype=torch.int32, device=device)
    sequence = torch.searchsorted(bounds[1:], token, right=True)
    return torch.where(token < bounds[-1], sequence, -1).to(torch.int32)[None]


def _define(kind, function, count, shapes, floats=0, returned=1, **facts: Any) -> None:
    """Register a kind of call with `count` tensors. `facts` are the static arguments of
    `function`.
    """

    def run(*arguments, grads=()):
        static = operators.unpack_layout(*arguments[count + 1 :]) | facts
        kv_len, cu_seqlens = static["kv_len"], static.pop("cu_seqlens")
        lengths = kv_len if isinstance(kv_len, Tensor) else None
        segment_ids = _segment_ids(cu_seqlens, kv_len, arguments[0].device)
        static["kv_len"] = kv_len if lengths is segment_ids is None else None
        return _run(function, static, [*arguments[:count], segment_ids, lengths], grads)

    def backward(grad, *given):
        grad_lse, given = operators.second_gradient(given, count)
        return run(*given, grads=[x for x in (grad, grad_lse) if x is not None])

    pull_back = backward if floats else None
    operators.define(kind, run, shapes, pull_back, floats=floats, returned=returned)


def _branch_step(branch: str, *words: str) -> Callable[..., Any]:
    """Return the function to which `dispatch.py` refers for a branch. `words` are the names of the
    function's tensors in `nsa_jax`.
    """
    kind, name = f"branch_attention/jax/{branch}", f"{branch}_attention"
    facts = {"floats": 3, "returned": 2, "name": name, "words": words}
    _define(kind, _branch, len(words), operators.branch_shapes, **facts)
    return operators.step_of_kind(kind)


compressed_attention = _branch_step("compressed", "query", "compressed_key", "compressed_value")
selected_attention = _branch_step("selected", "query", "key", "value", "block_indices")
sliding_attention = _branch_step("sliding", "query", "key", "value")

_scores: Any = {"name": "select_blocks", "words": ("query", "compressed_key")}
_define("select_blocks/jax", _branch, 2, operators.index_shapes, **_scores)
select_blocks = operators.step_of_kind("select_blocks/jax")


def _shapes_of_whole(mode, *arguments):
    query, _, value, _ = mode.inputs(arguments)
    return operators.branch_shapes(query, None, value.selected)[:1]


def _kind(mode: InputMode, keep: str = "") -> str:
    return f"attention/jax/{mode.name}"


for _mode in MODES:
    _shapes = functools.partial(_shapes_of_whole, _mode)
    _define(_kind(_mode), _whole, _mode.count + 1, _shapes, floats=_mode.count, mode=_mode)


def attention(*tensors: Any, **options: Any) -> Tensor:
    """Run all steps in one call of JAX. The arguments are the same as in `operators.all_steps`.
    The backward pass always computes the forward pass again.
    """
    return all_steps(_kind, *tensors, **options)

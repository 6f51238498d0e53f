"""The functions of `nsa_jax` on torch tensors (implementation `jax`), and their gradients: one
jitted call forward, one backward, which computes the forward pass again.
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
from nsa_torch.input_modes import MODES, InputMode, all_steps


def _branch(*arrays, name, words, **static):
    """Call `nsa_jax.<name>` with arrays, whose names are `words`."""
    return getattr(nsa_jax, name)(**dict(zip(words, arrays, strict=True)), **static)


def _whole(*arrays, mode, **static):
    """`nsa_jax.attention` of the arrays of an input mode, `block_indices` and `segment_ids`."""
    *given, block_indices, segment_ids = arrays
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
    """Gradients of the floating-point `arrays`, from those of the first outputs."""

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
    """The results of `function`, or, if `grads` of the first results are given, the gradients of
    its floating-point arrays.
    """
    dense: list[Any] = [None if x is None else _dense(x) for x in tensors]
    if grads:
        dense.insert(0, tuple(map(_dense, grads)))
    return dlpack.call_jax(_jitted(function, tuple(static.items()), bool(grads)), *dense)


def _dense(x: Tensor) -> Tensor:
    """A tensor that DLPack can share: row-major, no 64-bit integers. The copy costs little."""
    x = x.to(torch.int32) if x.dtype == torch.int64 else x
    return x.detach().contiguous()


def _segment_ids(cu_seqlens: Tensor | None, length: int, device: torch.device):
    """int32 `[1, S]`: the sequence of each token, -1 for padding."""
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.to(device, torch.int32)
    token = torch.arange(length, dtype=torch.int32, device=device)
    sequence = torch.searchsorted(bounds[1:], token, right=True)
    return torch.where(token < bounds[-1], sequence, -1).to(torch.int32)[None]


def _define_branch(branch: str, *words: str) -> Callable[..., Any]:
    """Makes a kind of calls known; returns the function that `dispatch.py` names.

    Args:
      words: the names of its tensors in `nsa_jax`.
    """
    count, selects = len(words), branch == "scores"
    name = "select_blocks" if selects else f"{branch}_attention"
    kind = "select_blocks/jax" if selects else f"branch_attention/jax/{branch}"

    def run(*arguments, grads=()):
        place = operators.lengths(*arguments[count + 1 :])
        kv_len, cu_seqlens = place.pop("kv_len"), place.pop("cu_seqlens")
        given = dict(zip(words, arguments, strict=False))
        given["segment_ids"] = _segment_ids(cu_seqlens, kv_len, arguments[0].device)
        if cu_seqlens is None:
            (place if isinstance(kv_len, int) else given)["kv_len"] = kv_len
        static = {"name": name, "words": tuple(given), **place}
        return _run(_branch, static, given.values(), grads)

    def backward(grad, *given):
        grad_lse, given = operators.second_gradient(given, count)
        return run(*given, grads=[x for x in (grad, grad_lse) if x is not None])

    if selects:
        operators.define(kind, run, operators.index_shapes)
    else:
        operators.define(kind, run, operators.branch_shapes, backward, floats=3, returned=2)
    return operators.one_step(kind)


compressed_attention = _define_branch(
    "compressed", "query", "compressed_key", "compressed_value"
)
select_blocks = _define_branch("scores", "query", "compressed_key")
selected_attention = _define_branch("selected", "query", "key", "value", "block_indices")
sliding_attention = _define_branch("sliding", "query", "key", "value")


def _define_whole(mode: InputMode) -> None:
    """Makes all steps in one call known."""

    def run(*arguments, grads=()):
        tensors = arguments[: mode.count + 1]
        static = operators.lengths(*arguments[mode.count + 2 :]) | {"mode": mode}
        kv_len, cu_seqlens = static.pop("kv_len"), static.pop("cu_seqlens")
        segment_ids = _segment_ids(cu_seqlens, kv_len, tensors[0].device)
        return _run(_whole, static, [*tensors, segment_ids], grads)

    def shapes(*arguments):
        query, _, value, _ = mode.inputs(arguments)
        return operators.branch_shapes(query, None, value.selected)[:1]

    backward = lambda grad, *given: run(*given, grads=[grad])
    operators.define(_kind(mode), run, shapes, backward, floats=mode.count)


def _kind(mode: InputMode, keep: str = "") -> str:
    return f"attention/jax/{mode.name}"


for _mode in MODES:
    _define_whole(_mode)


def attention(*tensors: Any, **options: Any) -> Tensor:
    """All steps in one call; arguments as in `all_steps`. The backward pass always computes the
    forward pass again.
    """
    return all_steps(_kind, *tensors, **options)

"""The oracle and the yardstick by torch's reference, operation by operation: nothing is compiled.

Used on a GPU, where float64 costs little and compilation nearly everything: a program of JAX's
reference serves one shape, which few tests have. `test_torch_oracle.py` holds both references
beside each other.
"""

import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from nsa_torch import reference

USED = torch.cuda.is_available()
DEVICE = "cuda" if USED else "cpu"


def results(name, arrays, *, exact, cotangents=(), kv_len=None, segment_ids=None, **options):
    """Outputs and gradients of `reference.<name>`, or of `whole` or `whole_of_tokens` below.

    Args:
      arrays: of JAX or NumPy, each `[B, tokens, heads, ..]`; the second has a key's heads.
      exact: in float64, else in the arrays' own precision.
      cotangents: of the first outputs; without them there are no gradients.

    Returns:
      NumPy: the outputs, and the gradients of all arrays of floats.
    """
    queries, keys = (x.shape[1] for x in arrays[:2])
    of_compressed = name in ("compressed_attention", "block_scores", "select_blocks")
    if segment_ids is not None:
        kv_len = segment_ids.shape[1]
    elif kv_len is None:
        kv_len = queries if of_compressed else keys
    options |= {"kv_len": kv_len, "cu_seqlens": borders(segment_ids)}
    if not exact and name not in ("block_scores", "select_blocks"):
        options["compute_dtype"] = getattr(torch, jnp.dtype(arrays[0].dtype).name)
    step = STEPS.get(name) or getattr(reference, name)

    def function(*tensors):
        found = step(*tensors, **options)
        return found if isinstance(found, tuple) else (found,)

    return by_head(function, [np.asarray(x) for x in arrays], cotangents, exact)


def by_head(
    function: Callable, arrays: Sequence[np.ndarray], cotangents: Sequence, exact: bool
):
    """`results` of a function of tensors. One key/value head of one row is computed at a time, so
    that its `[T, S]` fits beside those of other tests.
    """
    rows, kv_heads = [], arrays[1].shape[2]
    for row in range(len(arrays[0])):
        heads = []
        for head in range(kv_heads):

            def own(x, exact, row=row, head=head):
                each = x.shape[2] // kv_heads
                part = np.asarray(x)[row : row + 1, :, head * each : (head + 1) * each]
                return to_torch(part, exact)

            tensors = [own(x, exact) for x in arrays]
            floats = [x.requires_grad_() for x in tensors if x.is_floating_point()]
            with torch.set_grad_enabled(bool(cotangents)):
                outputs, gradients = function(*tensors), ()
            if cotangents:
                asked = outputs[: len(cotangents)]
                pairs = zip(cotangents, asked, strict=True)
                given = [own(x, exact=True).to(out.dtype) for x, out in pairs]
                gradients = torch.autograd.grad(asked, floats, given, materialize_grads=True)
            heads.append([[to_numpy(x) for x in part] for part in (outputs, gradients)])
        rows.append(_joined(heads, axis=2))
    if USED:
        torch.cuda.empty_cache()  # the processes of other tests want it
    return _joined(rows, axis=0)


def _joined(parts, axis):
    return [
        [np.concatenate(arrays, axis) for arrays in zip(*part, strict=True)]
        for part in zip(*parts, strict=True)
    ]


def to_torch(x: np.ndarray, exact: bool) -> torch.Tensor:
    """On `DEVICE`; `exact`: floats in float64."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return torch.tensor(x, device=DEVICE)
    made = torch.tensor(x.astype(np.float64), device=DEVICE)
    return made if exact else made.to(getattr(torch, x.dtype.name))


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def borders(segment_ids) -> torch.Tensor | None:
    """`cu_seqlens` of ids `[1, S]`, with padding at the end alone."""
    if segment_ids is None:
        return None
    (ids,) = np.asarray(segment_ids)
    tokens = int((ids >= 0).sum())
    assert (ids[:tokens] >= 0).all(), "padding must be at the end"
    inner = np.flatnonzero(np.diff(ids[:tokens])) + 1
    return torch.tensor([0, *inner, tokens], device=DEVICE)


def compress(x: torch.Tensor, config, cu_seqlens=None) -> torch.Tensor:
    """Means of the windows of each sequence, `[B, C, Hkv, D]`; zeros behind them."""
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    length, wide = config.compress_block, x.to(torch.promote_types(x.dtype, torch.float32))
    means = [
        wide[:, begin:end].unfold(1, length, config.compress_stride).mean(-1)
        for begin, end in itertools.pairwise(bounds)
        if end - begin >= length
    ]
    found = torch.cat(means, dim=1) if means else wide[:, :0]
    spare = config.num_compressed(x.shape[1]) - found.shape[1]
    return F.pad(found, (0, 0, 0, 0, 0, spare)).to(x.dtype)


def compressed(x, p) -> jnp.ndarray:
    """`compress` of tokens of the problem `p`, an array of JAX."""
    tokens = to_torch(np.asarray(x), exact=False)
    found = compress(tokens, p.case.config, borders(p.segment_ids))
    return jnp.asarray(to_numpy(found), p.case.dtype)


def whole(query, key, sliding_key, value, sliding_value, gates, *rest, **options):
    """Attention of compressed tokens that are given; `rest`: these, and block indices."""
    *compressed, indices = rest
    outputs = (
        reference.compressed_attention(query, *compressed, **options),
        reference.selected_attention(query, key, value, indices, **options),
        reference.sliding_attention(query, sliding_key, sliding_value, **options),
    )
    wide = torch.promote_types(query.dtype, torch.float32)
    parts = zip(outputs, gates.unbind(-1), strict=True)
    total = sum(out.to(wide) * gate[..., None].to(wide) for (out, _), gate in parts)
    return total.to(query.dtype)


def whole_of_tokens(query, *rest, config, cu_seqlens, **options):
    """Attention of three keys and three values, each in the order of the branches, and gates."""
    *pairs, gates, indices = rest
    keys, values = pairs[:3], pairs[3:]
    compressed = [compress(x[0], config, cu_seqlens) for x in (keys, values)]
    others = keys[1], keys[2], values[1], values[2]
    options |= {"config": config, "cu_seqlens": cu_seqlens}
    return whole(query, *others, gates, *compressed, indices, **options)


STEPS = {"whole": whole, "whole_of_tokens": whole_of_tokens}

"""Computes the three branches with the variable-length kernels of FlashAttention-2 (CUDA). The
kernels come from the package `flash_attn` if it is installed, otherwise from torch. The kernels
align causal masks to the bottom right: the last query of a sequence attends to its last key.

Compressed branch: a query at position `p` attends to `t // d + 1` compressed tokens, where
`t = p - (l - 1)`. Among the queries with the same `t % d`, where `t = p - (l - 1)`, each query
attends to one more token than the previous query. The queries with the same `t % d` therefore have
plain causal attention. For each value of `t % d`, the queries with this value are a separate
sequence for FA-2. A dozen operators reorder queries, keys and results before and after the call of
FA-2. The host needs 0.7 to 0.8 ms to launch the reordering operators. Below a few thousand tokens,
the GPU needs less time than the host. On an H100 the compressed branch takes 0.76 ms at 256 tokens,
0.82 ms at 1024 and 1.1 to 1.2 ms at 4096. On an H100, one call of SDPA with a dense mask takes 0.22
ms. In eager mode, FA-2 is worthwhile for the compressed branch only if the dense mask is too large.
A CUDA graph replays the operators without the host. The indices for the reordering are computed
once for all calls of the same sizes (`_once`).

Sliding branch: FA-2 computes attention with a causal window.

Selected branch: a pair is one query with one key/value head. For all pairs of query and key/value
head in a chunk, the keys that the query may read are packed one after the other. The `G` query
heads of a pair of query and key/value head are the queries of one sequence of FA-2. The packed keys
are copied block by block, or as key ranges under `nsa_torch.ranges.using`.

If values and queries differ in width, the narrower tensor is padded with zeros.
"""

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core.extras import version
from nsa_torch import ranges
from nsa_torch.chunks import Chunk, Rows, Work, chunked, nothing_seen
from nsa_torch.geometry import geometry_of
from nsa_torch.operators import refuse_transforms
from nsa_torch.packing import (
    gather,
    packed_bytes,
    residue_classes,
    selected_ranges,
    sliding_bounds,
)
from nsa_torch.plain import constant, once
from nsa_torch.shared import SHARED

# FA-2 uses a grid axis of CUDA for the sequences of a call, which is limited to 16 bits.
MAX_SEQUENCES = 65535


@constant
def library() -> str:
    """Return the name and version of the installed FlashAttention-2."""
    return _library()


@functools.cache
def _library() -> str:
    # The module flash_attn may also belong to the package flash-attn-4, which lacks these
    # functions.
    found = version("flash_attn")
    return f"flash_attn {found}" if found else f"torch {torch.__version__} (bundled)"


def why_not(problem) -> str | None:
    """Return the reason why FlashAttention-2 cannot run `problem`, or None."""
    if problem.platform != "cuda":
        return f"FA-2 needs CUDA tensors, got {problem.platform}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"FA-2 needs float16 or bfloat16, got {problem.dtype}"
    if problem.D % 8 or problem.Dv % 8 or max(problem.D, problem.Dv) > 256:
        return (
            "FA-2 needs head widths that are multiples of 8 and at most 256, "
            f"got D={problem.D}, Dv={problem.Dv}"
        )
    if problem.B * problem.Hkv > MAX_SEQUENCES:
        return f"FA-2 needs B * Hkv <= {MAX_SEQUENCES}, got {problem.B * problem.Hkv}"
    if torch.version.cuda and importlib.util.find_spec("triton") is None:
        return (
            "FA-2 needs the package triton, which is not installed; its kernels pack the rows"
        )
    major, minor = problem.capability
    if major < 8:
        return f"FA-2 needs compute capability 8.0 or more, got {major}.{minor}"
    return None


def varlen(query, key, value, bounds, longest, *, causal, window, scale):
    """Run FlashAttention-2 on packed rows `[rows, heads, width]`. Return the output, and the
    log-sum-exp `[heads, rows]`.

    Args:
      bounds: `cu_seqlens` of the queries and of the keys, int32 on the device.
      longest: Upper bounds of the number of queries and of the number of keys per sequence.
      causal: Whether attention is causal, with the mask aligned to the bottom right.
      window: Number of keys before a query's own position to which the query attends; -1 means all
        keys. A window implies a causal mask.
    """
    if library().startswith("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            query,
            key,
            value,
            *bounds,
            *longest,
            softmax_scale=scale,
            causal=causal,
            window_size=(window, 0 if window >= 0 else -1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            return_attn_probs=True,
        )[:2]
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *bounds,
        *longest,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window if window >= 0 else None,
        window_size_right=0 if window >= 0 else None,
    )[:2]


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
    """Compute attention over compressed tokens. A query at position `p` attends to compressed
    token `i` if and only if `p >= i*d + l - 1`.
    """
    refuse_transforms(query, compressed_key, compressed_value)
    batch, length, heads, _ = query.shape
    count, stride = compressed_key.shape[1], config.compress_stride
    if count == 0:
        return nothing_seen(query, compressed_key, compressed_value)

    def classes():
        where = geometry_of(query, config, kv_len, cu_seqlens)
        return residue_classes(where, count, config)

    sizes = batch, length, count, config
    row_of, query_of, key_of, *bounds = _once(
        classes, "compressed", sizes, kv_len, cu_seqlens, query.device
    )
    key, value = (_Gather.apply(x, key_of, None) for x in (compressed_key, compressed_value))
    out, lse = _call(
        _Gather.apply(query.flatten(0, 1)[None], query_of, row_of),
        key,
        value,
        bounds,
        # The bound is at least 2, since FA-2 treats a single query as decoding, which has
        # another layout.
        (max(2, -(-length // stride)), count),
        causal=True,
        scale=scale,
    )
    out = _Gather.apply(out[None], row_of, query_of)
    lse = lse[:, row_of.clamp(min=0)].masked_fill(row_of < 0, float("-inf"))
    return out.unflatten(0, (batch, length)), lse.t().reshape(batch, length, heads)


def sliding_attention(
    query, key, value, *, config, kv_len, cu_seqlens=None, scale=None, with_lse=True
):
    """Compute attention of each query to the last `window` keys up to its own key."""
    refuse_transforms(query, key, value)
    batch, length, heads, _ = query.shape
    if config.window == 0:
        return nothing_seen(query, key, value)
    before = None
    if isinstance(kv_len, Tensor):  # a batch row may have fewer keys than queries
        # For a query before the first key, FA-2 returns a gradient of NaN. The gradients of
        # keys are NaN too if the query or the gradient of its output is NaN.
        before = (geometry_of(query, config, kv_len, None).position < 0)[..., None, None]
        query = query.masked_fill(before, 0)
    key, value, last = _band(key, value, length + config.window - 1, kv_len)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens - (kv_len - last)
    kv_len = last
    num_keys, device = key.shape[1], query.device
    bounds = _once(
        lambda: sliding_bounds(batch, length, num_keys, kv_len, cu_seqlens, device),
        "sliding",
        (batch, length, num_keys),
        kv_len,
        cu_seqlens,
        device,
    )
    out, lse = _call(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        bounds,
        (max(2, length), num_keys),
        window=config.window - 1,
        scale=scale,
    )
    out = out.unflatten(0, (batch, length))
    if before is not None:
        out = out.masked_fill(before, 0)
    return out, lse.t().reshape(batch, length, heads)


def _band(key, value, size, kv_len):
    """Return the last `size` keys and values up to the last valid token. Also return the number of
    valid tokens among the returned tokens.
    """
    batch, num_keys = key.shape[:2]
    if size >= num_keys:
        return key, value, kv_len
    if isinstance(kv_len, int):
        first = max(kv_len - size, 0)
        band = slice(first, first + size)
        return key[:, band], value[:, band], kv_len - first
    first = (kv_len.to(key.device, torch.int64) - size).clamp(min=0).expand(batch)
    row = torch.arange(batch, device=key.device) * num_keys + first
    rows = row[:, None] + torch.arange(size, device=key.device)
    key, value = (
        _Gather.apply(x, rows.flatten(), None).unflatten(0, (batch, size)) for x in (key, value)
    )
    return key, value, kv_len.to(key.device) - first


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
    """Compute attention of each query to the keys of its selected blocks, up to its own position.
    One softmax covers all these keys.
    """

    def positions():
        return geometry_of(query, config, kv_len, cu_seqlens).position

    handed = ranges.handed(block_indices, positions, config)
    lengths = {"config": config, "kv_len": kv_len, "cu_seqlens": cu_seqlens, "scale": scale}
    return _selected_attention(
        query, key, value, block_indices, handed, **lengths, with_lse=with_lse
    )


@chunked("fa2/selected", 5)
def _selected_attention(
    query, key, value, block_indices, handed, *, config, kv_len, cu_seqlens, scale, with_lse
):
    batch, _, heads, width = query.shape
    num_keys, kv_heads = key.shape[1:3]
    where = geometry_of(query, config, kv_len, cu_seqlens)
    group = heads // kv_heads
    slots = block_indices.shape[-1] * config.select_block

    def plan(queries):
        packed, key_bounds = selected_ranges(where, block_indices, queries, config, handed)
        source: Any = packed if block_indices.is_cuda else packed.rows(num_keys)

        def attend(query, keys, values):
            part = query.shape[1]
            starts = torch.arange(batch * part * kv_heads + 1, device=query.device) * group
            out, lse = _call(
                query.reshape(-1, 1, width),
                keys[:, None],
                values[:, None],
                (starts.to(torch.int32), key_bounds),
                (group, slots),
                scale=scale,
            )
            shape = batch, part, heads
            return out.reshape(*shape, -1), lse.reshape(shape)

        return Chunk(source, attend)

    row_bytes = packed_bytes(key, value, slots)
    most = max(1, MAX_SEQUENCES // (batch * kv_heads))
    return Work(plan, row_bytes, most)


def _once(make, branch, sizes, kv_len, cu_seqlens, device):
    """Return the result of `make()`. Calls on whole sequences with the same `sizes` share the
    result of `make()`. The second entry of `sizes` is the number of queries.

    The function `make` runs dozens of small operators. At a few thousand tokens the host needs more
    time to launch these operators than a GPU needs for FA-2. The results of decode steps are not
    shared, since each step has a new length.
    """
    if torch.compiler.is_compiling() or cu_seqlens is not None:
        return make()
    if not isinstance(kv_len, int) or kv_len != sizes[1]:
        return make()
    return SHARED.get(("fa2", branch, *sizes, device), device, make)


def _call(query, key, value, bounds, longest, *, causal=False, window=-1, scale=None):
    """Run `varlen` with values of any width. A row without keys has a log-sum-exp of -inf."""
    if (number := bounds[0].numel() - 1) > MAX_SEQUENCES:
        raise NotImplementedError(
            f"fa2 supports at most {MAX_SEQUENCES} sequences per call, got {number}; in the "
            "compressed branch each sequence counts compress_stride times"
        )
    width, value_width = query.shape[-1], value.shape[-1]
    scale = width**-0.5 if scale is None else scale
    common = max(width, value_width)
    padded = (F.pad(x, (0, common - x.shape[-1])) for x in (query, key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in padded)
    out, lse = varlen(
        query, key, value, bounds, longest, causal=causal, window=window, scale=scale
    )
    lse = lse.detach().masked_fill(lse == float("inf"), float("-inf"))
    if query.requires_grad and torch.is_grad_enabled():
        # torch.compile always traces the backward pass of a `Function`. It traces the backward
        # pass of an operator only if that pass is needed. torch.func does not support the
        # gradient of an operator.
        tied = _traced_lse if torch.compiler.is_compiling() else _WithoutGradient.apply
        lse = tied(query, lse)
    return once(out)[..., :value_width], lse


class _WithoutGradient(torch.autograd.Function):
    """Returns `lse` unchanged and raises an error for its gradient, which FA-2 would ignore."""

    @staticmethod
    def forward(query, lse):
        return lse.view_as(lse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad):
        return (None, None) if grad is None else _no_gradient_of_lse(ctx, grad)


def _no_gradient_of_lse(ctx, grad):
    raise NotImplementedError(
        "fa2 has no gradient of its log-sum-exp; name another implementation"
    )


@torch.library.custom_op("nsa::fa2_lse", mutates_args=())
def _traced_lse(query: Tensor, lse: Tensor) -> Tensor:
    return lse.clone()


_traced_lse.register_fake(lambda query, lse: torch.empty_like(lse))
_traced_lse.register_autograd(_no_gradient_of_lse)


class _Gather(torch.autograd.Function):
    """Computes `x.flatten(0, 1)[rows]`, with 0 for indices outside the rows of `x`. If the array
    `rows` is a permutation, the gradient is gathered with the inverse permutation `back`. The
    gradients of repeated rows are summed in float32.
    """

    @staticmethod
    def forward(x, rows, back):
        return gather(x, rows)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, rows, back = ctx.saved_tensors
        if back is not None:
            return _Gather.apply(grad[None], back, rows)[None], None, None
        source = Rows(rows, axes=2)
        total = source.zeros(x)
        source.add(total, grad)
        return source.gradient(total, x), None, None

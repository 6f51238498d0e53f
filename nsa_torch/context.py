"""Context parallelism: one sequence over the ranks of a mesh dimension.

Each rank has the queries, keys and values of its own tokens (`nsa_core.context_layout`). Keys and
values are gathered one batch row and some key/value heads at a time (`head_groups`); the gather of
the next is under way while this one is computed. A chunk of queries is then a call like any other,
whose queries are the last of the keys up to its end. The backward pass gathers again, and sums the
gradients of keys and values over the ranks in float32 by a reduce-scatter, some heads at a time.

On Mosaic kernels the two chunks of a rank are one call, whose queries have a gap in the middle, and
each rank computes the means of all windows from the gathered tokens. On other kernels, and with a
learned compression, each rank computes the compressed tokens that begin in its own tokens, from
these and the tokens after them (the halo). All ranks then gather compressed tokens, which are `d`
times fewer than the raw ones; `phi` runs once for each.

Shapes: `T` is what one rank has, `S` the whole sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kernels_pallas.specs.tile import ROWS
from nsa_core import context_layout as layouts
from nsa_core import debug, validate
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.steps.mosaic_gather import max_heads
from nsa_core.types import Branches
from nsa_torch import call, checks, context_ranks, plans
from nsa_torch.context_compress import compressed_tokens
from nsa_torch.context_ranks import Ranks, Shards
from nsa_torch.dispatch import choose, description
from nsa_torch.geometry import geometry
from nsa_torch.plain import as_given
from nsa_torch.varlen import borders_of


def shard_sequence(
    x: Tensor, context_mesh: DeviceMesh, *, dim: int = 1, context_layout: Layout = "zigzag"
) -> Tensor:
    """This rank's tokens of `x`, which every rank has whole, along `dim`.

    A length that is no multiple of the chunks there are is padded with zeros at the end.
    """
    ranks = Ranks(context_mesh, x.device)
    length = layouts.padded_length(x.shape[dim], ranks.size, context_layout)
    shape = [*x.shape]
    shape[dim] = length - x.shape[dim]
    whole = torch.cat([x, x.new_zeros(shape)], dim) if shape[dim] else x
    shards = Shards.of(ranks, "x", length // ranks.size, context_layout)
    return torch.cat([whole.split(shards.chunk, dim)[i] for i in shards.own], dim)


def unshard_sequence(
    x: Tensor,
    context_mesh: DeviceMesh,
    *,
    dim: int = 1,
    length: int | None = None,
    context_layout: Layout = "zigzag",
) -> Tensor:
    """The whole sequence on every rank, without gradient; `length`: without padding."""
    ranks = Ranks(context_mesh, x.device)
    shards = Shards.of(ranks, "x", x.shape[dim], context_layout)
    found = ranks.gather(x.detach().movedim(dim, 0), "the sequence")()
    return shards.in_order(found)[:length].movedim(0, dim)


def shard_positions(
    context_mesh: DeviceMesh,
    local_length: int,
    *,
    cu_seqlens: Tensor | None = None,
    device: torch.device | None = None,
    context_layout: Layout = "zigzag",
) -> Tensor:
    """Position of each token of this rank in its own sequence, int64 `[1, T]`; -1: padding."""
    device = device or torch.device(context_mesh.device_type)
    ranks = Ranks(context_mesh, device)
    shards = Shards.of(ranks, "query", local_length, context_layout)
    cu_seqlens = checks.clamped(cu_seqlens, shards.length)
    where = (
        geometry(
            1,
            shards.chunk,
            config=NSAConfig(),
            kv_len=end,
            cu_seqlens=cu_seqlens,
            device=device,
        )
        for _, end in shards.calls
    )
    return torch.cat([each.position for each in where], dim=1)


def compress(
    x: Tensor,
    params: CompressParams = None,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    context_mesh: DeviceMesh,
    context_layout: Layout = "zigzag",
) -> Tensor:
    """`nsa_torch.compress` of the whole sequence, on every rank.

    Args:
      x: `[B, T, Hkv, D]`, the rank's own tokens.
      params: the same on every rank. A rank's gradient of them is that of its own windows: the
        ranks' sum is the whole.
      cu_seqlens: Boundaries of the whole sequence, the same on every rank.

    Returns:
      `[B, C, Hkv, D]`, `C = config.num_compressed(S)`.
    """
    ranks, device = _ranks_of(context_mesh, x)

    def describe():
        validate.array("x", x, 4)
        validate.phi(params, x, config)
        length = Shards.of(ranks, "x", x.shape[1], context_layout).length
        checks.packed(cu_seqlens, x, "x", length)
        return _words(x=x, config=config, params=params, context_layout=context_layout)

    context_ranks.agree(ranks, device, describe)
    shards = Shards.of(ranks, "x", x.shape[1], context_layout)
    cu_seqlens = checks.clamped(cu_seqlens, shards.length)
    return compressed_tokens(shards, x, params, config, cu_seqlens)


def select_blocks(
    query: Tensor,
    compressed_key: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    context_mesh: DeviceMesh,
    context_layout: Layout = "zigzag",
) -> Tensor:
    """The blocks that this rank's queries read, int32 `[B, T, Hkv, n]`; nothing is moved.

    Args:
      query: `[B, T, H, D]`, the rank's own.
      compressed_key: `[B, C, Hkv, D]` of the whole sequence, from `compress`.
    """
    ranks = Ranks(context_mesh, query.device)
    validate.queries(query)
    shards = Shards.of(ranks, "query", query.shape[1], context_layout)
    checks.packed(cu_seqlens, query, "query", shards.length)
    cu_seqlens = checks.clamped(cu_seqlens, shards.length)
    checks.scoring(query, compressed_key, config, shards.length, None, scale)
    found = []
    for tokens, end in shards.calls:
        chunk = query[:, tokens].contiguous()
        key = compressed_key[:, : config.num_compressed(end)].contiguous()
        memory = {"query": chunk, "compressed_key": key}
        packed = cu_seqlens is not None
        problem = description(chunk, key, chunk.shape[-1], config, packed, memory)
        chosen = choose(problem, implementation, "scores")
        place = {"kv_len": end, "cu_seqlens": cu_seqlens, "scale": scale}
        with as_given(query):
            found.append(chosen.load("scores")(chunk, key, config=config, **place))
    return torch.cat(found, dim=1)


def _ranks_of(mesh, x) -> tuple[Ranks, torch.device]:
    """The ranks of a mesh for tensors like `x`. If `x` is no tensor, all ranks are informed."""
    device = x.device if isinstance(x, Tensor) else torch.device(mesh.device_type)
    return Ranks(mesh, device), device


class _Decided(NamedTuple):
    """The decisions that calls of one signature share.

    Attributes:
      row: This rank's description of the call (`context_ranks.agree`).
      on_mosaic: all steps run on Mosaic kernels.
      gaps: Whether one call may have two chunks with tokens between them.
    """

    shards: Shards
    row: Tensor
    on_mosaic: bool
    gaps: bool


def attention(
    arguments, varlen, config, scale, recompute, implementation, context_mesh, context_layout
) -> Tensor:
    """`functional.attention` of this rank's queries; `arguments`: of `functional.decided`."""
    from nsa_torch import context_attention

    query, key, value, gates, compressed, block_indices, cu_seqlens = arguments
    ranks, device = _ranks_of(context_mesh, query)
    if varlen is not None:
        try:
            length = query.shape[1] * ranks.size
            cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config, length)
        except Exception:
            context_ranks.refuse(ranks, device)
            raise
        arguments = *arguments[:-1], cu_seqlens
    called, tensors = call.describe(arguments, implementation, config, scale, recompute)
    wanted = tuple(x.requires_grad for x in tensors)  # ranks agree on each of them
    key, value = Branches.each(key), Branches.each(value)
    separate = key.sliding is not key.selected or value.sliding is not value.selected
    known = called and (called, wanted, ranks.group, str(context_layout), separate)

    def describe():
        validate.flag("recompute", recompute)
        checks.tensors(query=query, gates=gates)
        validate.queries(query)
        each = validate.gates(gates, query)
        shards = Shards.of(ranks, "query", query.shape[1], context_layout)
        rest = compressed, block_indices, cu_seqlens, config, scale
        checks.attention(query, key, value, *rest, shards.length)
        validate.in_dtype_of_query(config, "context parallelism")
        on_mosaic = _on_mosaic(query, key, value, each, config, shards, implementation)
        options = {"recompute": recompute, "context_layout": context_layout, "config": config}
        options |= {"scale": scale, "separate": separate, "on_mosaic": on_mosaic}
        lists = {"block_indices": block_indices, "cu_seqlens": cu_seqlens}
        floats = {"key": key, "value": value, "gates": gates, "compressed": compressed}
        return _words(query=query, **floats, **lists, **options)

    decided = None if known is None else plans.PROGRAMS.get(known)
    if decided is not None:
        context_ranks.say(ranks, decided.row)
    else:
        words, row = context_ranks.agree(ranks, device, describe)
        shards = Shards.of(ranks, "query", query.shape[1], context_layout)
        group = query.shape[2] // key.selected.shape[2]
        # No tile may have queries of both chunks. One sequence is gathered for few heads, packed
        # rows are not.
        whole_tiles = ROWS % group == 0 and shards.chunk % (ROWS // group) == 0
        gaps = whole_tiles and (
            cu_seqlens is not None or group > max_heads(config.select_block)
        )
        decided = _Decided(shards, row, words["on_mosaic"], words["on_mosaic"] and gaps)
        if known is not None:
            plans.keep(known, decided)
    shards, _, on_mosaic, gaps = decided
    cu_seqlens = checks.clamped(cu_seqlens, shards.length)
    one_pair = key.compressed is key.selected and value.compressed is value.selected
    if compressed is None and not (on_mosaic and one_pair):
        # The mean of a column knows no others.
        both = torch.cat([key.compressed, value.compressed], dim=-1)
        widths = key.compressed.shape[-1], value.compressed.shape[-1]
        means = compressed_tokens(shards, both, None, config, cu_seqlens)
        compressed = means.split(widths, dim=-1)
    options = {
        "config": config,
        "cu_seqlens": cu_seqlens,
        "scale": scale,
        "implementation": "mosaic" if on_mosaic else implementation,
    }
    local = context_attention.Call(shards, separate, recompute, gaps, options)
    return local(query, key, value, gates, compressed, block_indices)


def _on_mosaic(query, key, value, gates, config, shards, implementation) -> bool:
    """Whether all steps of the whole row would run on Mosaic kernels: so do they of its parts."""
    floats, width = (*key, *value, *gates), value.selected.shape[-1]
    place, dtype, sizes, *rest, _ = description(
        query, key.selected, width, config, True, {}, floats
    )
    batch, length, _, *others = sizes
    problem = place, dtype, (batch, length, shards.length, *others), *rest, None
    return not debug.on and choose(problem, implementation).attention == "mosaic"


def _words(**given: Any) -> dict[str, Any]:
    """The arguments as text that `agree` compares: for tensors and tuples of tensors the shapes,
    the dtypes, and which require a gradient. The steps of a backward pass depend on it, and every
    rank must run them.
    """

    def word(x):
        if isinstance(x, tuple):
            return ", ".join(map(str, map(word, x)))
        if not isinstance(x, Tensor):
            return x
        wanted = " with gradient" if x.requires_grad and torch.is_grad_enabled() else ""
        return f"{tuple(x.shape)} {validate.dtype_name(x)}{wanted}"

    return {name: word(x) for name, x in given.items()}

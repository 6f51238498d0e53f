"""Context parallelism, in which the ranks of a mesh dimension share one sequence.

Each rank has the queries, keys and values of its own tokens (`nsa_core.context_layout`). Keys and
values are gathered for one batch row and a few key/value heads at a time (`head_groups`). The
gather of the next heads runs while the current heads are computed. The attention of a chunk of
queries is an ordinary call on one rank, whose keys end with the chunk's last token. The backward
pass gathers keys and values again. A reduce-scatter in float32 sums the gradients of keys and
values over the ranks, for a few heads at a time.

On Mosaic kernels one local call can compute both chunks of a rank, with a gap between the queries
of the chunks. On Mosaic kernels, each rank computes from the gathered tokens of the selected branch
the means of all windows. Each other compressed token is computed by the rank in whose tokens its
window begins. Windows extend beyond the rank's chunks. The tokens that follow a chunk and belong to
its windows are the halo of the chunk. The ranks gather the compressed tokens, of which there are
`d` times fewer than raw tokens. Since compressed tokens are gathered, `phi` runs once per window,
not once per rank and window. A window of `l` tokens belongs to the chunk with its first token. In
general the halo has `l - 1` tokens. The halo has only `l - d` tokens if the row is not packed and
the length of a chunk is a multiple of the stride. The ranks provide the halos by gathering the
first tokens of every chunk. In the backward pass the gathers of halos and of compressed tokens
become reduce-scatters in float32. The backward pass computes a learned `phi` again.

The autograd graph of each local call is stored without its input tensors (`local_graph`). The
backward pass slices the input tensors from the rank's own tensors, or gathers them again. Since the
outer autograd node saves all other tensors, `torch.utils.checkpoint` around the call works.

Shapes: `T` is the number of tokens of one rank, and `S` is the number of tokens of the whole
sequence.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from kernels_pallas.specs.tile import ROWS
from nsa_core import context_layout as layouts
from nsa_core import debug, validate
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.steps.mosaic_gather import max_heads
from nsa_core.types import Branches
from nsa_torch import batch_tables, call, checks, context_ranks, functional, operators, plans
from nsa_torch.batch_tables import tables_of
from nsa_torch.chunks import wide
from nsa_torch.compress import compress as compress_windows
from nsa_torch.compress import used_windows
from nsa_torch.context_ranks import Ranks, Shards
from nsa_torch.dispatch import choose, problem_key
from nsa_torch.geometry import geometry, window_starts
from nsa_torch.plain import as_given, first_order, is_last_pass
from nsa_torch.torch_ops import TORCH_OPS
from nsa_torch.varlen import borders_of


def shard_sequence(
    x: Tensor, context_mesh: DeviceMesh, *, dim: int = 1, context_layout: Layout = "zigzag"
) -> Tensor:
    """Return this rank's tokens of `x` along `dim`. Every rank must pass the whole sequence as `x`,
    with the same values.

    If the length is not a multiple of the number of chunks, zeros are added at the end.
    `context_mesh` and `context_layout` are as in `nsa_torch.attention`.
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
    """Gather the whole sequence on every rank, without gradient. `length` is the length of the
    sequence without the padding of `shard_sequence`. With `length=None` the result includes the
    padding. The other arguments are the same as in `shard_sequence`.
    """
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
    """Return the position of each token of this rank in its own sequence, int64 `[1, T]`. Padding
    after the last sequence of a packed row has position -1.

    Args:
      local_length: `T`, the number of tokens of this rank.
      cu_seqlens: int `[num_seqs + 1]`, boundaries of the whole row. `cu_seqlens=None` means one
        sequence.
      device: None means the current device of the mesh's device type.
      context_mesh, context_layout: as in `nsa_torch.attention`.
    """
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
    """Apply `nsa_torch.compress` to the whole sequence. Every rank gets the result.

    Args:
      x: `[B, T, Hkv, D]`, the rank's own tokens.
      params: The parameters of `phi`, which must be the same on every rank. The gradient of the
        parameters on a rank covers only the windows of that rank. Sum the gradient of the
        parameters over the ranks to get the full gradient.
      config: as in `nsa_torch.compress`.
      cu_seqlens: Boundaries of the whole sequence, which must be the same on every rank.
      context_mesh, context_layout: as in `nsa_torch.attention`.

    Returns:
      The compressed tokens, `[B, C, Hkv, D]`, `C = config.num_compressed(S)`.
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


def tokens_before(
    x: Tensor, count: int, *, context_mesh: DeviceMesh, context_layout: Layout = "zigzag"
) -> Tensor:
    """Return the `count` tokens before each of the `C` chunks of this rank,
    `[B * C, count, columns]`. `x` `[B, T, columns]` has this rank's tokens. Tokens before the start
    of the sequence are zeros.

    Raises:
      ValueError: a chunk has fewer tokens than `count`.
    """
    ranks, _ = _ranks_of(context_mesh, x)
    shards = Shards.of(ranks, "x", x.shape[1], context_layout)
    if shards.chunk < count:
        raise ValueError(
            f"x must have at least {count} tokens per chunk of context_layout, got {shards.chunk}"
        )
    last = [tokens[:, -count:] for tokens in x.split(shards.chunk, dim=1)]
    last = _Gather.apply(shards, "the last tokens", torch.cat(last, dim=1).transpose(0, 1))
    padded = F.pad(last, (0, 0, 0, 0, count, 0)).transpose(0, 1)
    own = [padded[:, number * count : (number + 1) * count] for number in shards.own]
    return torch.stack(own, dim=1).flatten(0, 1)


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
    """Select the blocks that the queries of this rank read, int32 `[B, T, Hkv, n]`. The ranks
    exchange no tokens in this function.

    Args:
      query: `[B, T, H, D]`, the queries of this rank.
      compressed_key: `[B, C, Hkv, D]` of the whole sequence, from `compress`.
      cu_seqlens: boundaries of the whole sequence.
      config, scale, implementation: as in `nsa_torch.select_blocks`.
      context_mesh, context_layout: as in `nsa_torch.attention`.
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
        problem = problem_key(chunk, key, chunk.shape[-1], config, packed, memory)
        chosen = choose(problem, implementation, "scores")
        place = {"kv_len": end, "cu_seqlens": cu_seqlens, "scale": scale}
        with as_given(query):
            found.append(chosen.load("scores")(chunk, key, config=config, **place))
    return torch.cat(found, dim=1)


def _ranks_of(mesh, x) -> tuple[Ranks, torch.device]:
    """Return the ranks of a mesh, and the device of `x`. If `x` is not a tensor, return the device
    of the mesh instead. The rank needs a device to inform the other ranks of the error.
    """
    device = x.device if isinstance(x, Tensor) else torch.device(mesh.device_type)
    return Ranks(mesh, device), device


def attention(
    arguments, varlen, config, scale, recompute, implementation, context_mesh, context_layout
) -> Tensor:
    """Compute `functional.attention` for the queries of this rank. `arguments` are the same as
    in `functional.decided`.
    """
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
    called, tensors = call.signature_of(arguments, implementation, config, scale, recompute)
    wanted = tuple(x.requires_grad for x in tensors)  # this value is the same on all ranks
    key, value = map(Branches.each, (key, value))
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

    decided = None if known is None else plans.KNOWN.get(known)
    if decided is not None:
        shards, row, on_mosaic, gaps = decided
        context_ranks.say(ranks, row)
    else:
        words, row = context_ranks.agree(ranks, device, describe)
        shards = Shards.of(ranks, "query", query.shape[1], context_layout)
        on_mosaic = words["on_mosaic"]
        group = query.shape[2] // key.selected.shape[2]
        # A tile must not have queries from both chunks. A call with a gap is a call on a packed
        # row, which gathers no blocks (`mosaic_gather`). One sequence with few heads per group
        # is therefore computed per chunk, so that its blocks can be gathered.
        whole_tiles = ROWS % group == 0 and shards.chunk % (ROWS // group) == 0
        several = cu_seqlens is not None or group > max_heads(config.select_block)
        gaps = on_mosaic and whole_tiles and several  # one call may compute both chunks
        if known is not None:
            plans.keep(known, (shards, row, on_mosaic, gaps))
    cu_seqlens = checks.clamped(cu_seqlens, shards.length)
    one_pair = key.compressed is key.selected and value.compressed is value.selected
    if compressed is None and not (on_mosaic and one_pair):
        # Keys and values can be averaged as one tensor, since the mean of a column does not
        # depend on other columns.
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
    keys_values = key.selected, value.selected
    if separate:
        keys_values += key.sliding, value.sliding
    gates = (gates,) if isinstance(gates, Tensor) else (*gates,)
    indices = () if block_indices is None else (block_indices,)
    own = Given((query, *gates), tuple(compressed or ()), keys_values, indices)
    keep = operators.requires_grad(*(x for each in own[:3] for x in each))
    local = Call(shards, own.sizes, recompute, gaps, options)
    with as_given(query):
        return _Attention.apply(local, keep, *own.flat)


def _on_mosaic(query, key, value, gates, config, shards, implementation) -> bool:
    """Return whether all steps on the whole row would run on Mosaic kernels. If the result is
    True, the steps on parts of the row also run on Mosaic kernels.
    """
    floats, width = (*key, *value, *gates), value.selected.shape[-1]
    place, dtype, sizes, *rest, _ = problem_key(
        query, key.selected, width, config, True, {}, floats
    )
    batch, length, _, *others = sizes
    problem = place, dtype, (batch, length, shards.length, *others), *rest, None
    return not debug.on and choose(problem, implementation).attention == "mosaic"


def _words(**given: Any) -> dict[str, Any]:
    """Describe the arguments as text, which the function `agree` compares between ranks. The text
    about a tensor has its shape, its dtype and whether it requires a gradient. The steps of the
    backward pass depend on these properties, and all ranks must run the same steps.
    """

    def word(x):
        if isinstance(x, tuple):
            return ", ".join(map(str, map(word, x)))
        if not isinstance(x, Tensor):
            return x
        wanted = " with gradient" if x.requires_grad and torch.is_grad_enabled() else ""
        return f"{tuple(x.shape)} {validate.dtype_name(x)}{wanted}"

    return {name: word(x) for name, x in given.items()}


class Given(NamedTuple):
    """The tensors of a call. The compressed tokens belong to the whole sequence. All other tensors
    have only the tokens of this rank.
    """

    own: tuple[Tensor, ...]  # query [B, T, H, D]; three gates [B, T, H], or one [B, T, H, 3]
    compressed: tuple[Tensor, ...]  # keys and values [B, C, Hkv, .], or empty if they are means
    # [B, T, Hkv, .]: key and value of the selected branch, then of the sliding branch if they
    # differ
    keys_values: tuple[Tensor, ...]
    block_indices: tuple[Tensor, ...]  # [B, T, Hkv, n], or empty

    @classmethod
    def of(cls, tensors: Iterable[Tensor], sizes: Sequence[int]) -> Self:
        """Build a `Given` from a flat list of tensors, given the number of tensors in each
        field.
        """
        supply = iter(tensors)
        return cls(*(tuple(itertools.islice(supply, count)) for count in sizes))

    @property
    def flat(self) -> list[Tensor]:
        return [x for each in self for x in each]

    @property
    def sizes(self) -> list[int]:
        """The number of tensors in each field."""
        return [*map(len, self)]


class Unit(NamedTuple):
    """One batch row with one group of heads (`context_layout.head_groups`). The gathers and local
    calls of a rank process one such unit at a time.
    """

    row: int
    kv_heads: slice
    heads: slice
    wait: Callable[[], list[Tensor]]  # returns the gathered keys and values `[1, S, h, .]`


# A local call: the slice of the shard with its queries, the number of its keys, and its options
# (`Call.options`). The queries are the last of these keys. If they have a gap between two chunks,
# the boundaries in the options record its length (`batch_tables`).
type LocalCall = tuple[slice, int, dict]


class Call(NamedTuple):
    """One call of context-parallel attention. `options` has the config, the boundaries
    (`cu_seqlens`), the scale and the implementation of the local calls.
    """

    shards: Shards
    sizes: list[int]  # the number of tensors in each field of the call's `Given`
    recompute: bool
    takes_gaps: bool  # whether one local call may have queries with a gap
    options: dict

    def calls(self, device: torch.device) -> list[LocalCall]:
        """Return the local calls of a unit. If the kernels support a gap between queries, a
        single call computes all queries. If the kernels do not support a gap, there is one call
        per chunk of queries.
        """
        borders, gap, options = self.options["cu_seqlens"], self.shards.gap, self.options
        if gap and not self.takes_gaps:
            return [(tokens, end, options) for tokens, end in self.shards.calls]
        *_, (tokens, end) = self.shards.calls
        if gap:
            whole = borders is None
            borders = (
                batch_tables.of_one(end, gap, device)
                if whole
                else batch_tables.with_gap(borders, gap)
            )
            options = options | {"cu_seqlens": borders}
        return [(slice(0, tokens.stop), end, options)]

    def units(self, given: Given) -> Iterator[Unit]:
        """Yield the units of this call. Before a unit is yielded, the gather of the next unit
        starts.
        """
        batch, _, kv_heads = given.keys_values[0].shape[:3]
        group = given.own[0].shape[2] // kv_heads
        widths = [x.shape[-1] for x in given.keys_values]
        payload = torch.cat(given.keys_values, dim=-1)
        head_bytes = self.shards.length * payload.shape[-1] * payload.element_size()
        groups = layouts.head_groups(kv_heads, head_bytes)

        def start(row, heads):
            wait = self.shards.ranks.gather(payload[row, :, heads], "keys and values")

            def whole():
                columns = wait().split(widths, dim=-1)
                return [self.shards.in_order(x)[None] for x in columns]

            return Unit(row, heads, slice(heads.start * group, heads.stop * group), whole)

        started = (start(row, heads) for row in range(batch) for heads in groups)
        before = next(started)
        for following in started:
            yield before
            before = following
        yield before

    def local(self, given: Given, unit: Unit, whole, tokens, end, options):
        """Return the function that runs a local call, and the tensors of the call. The tensors
        are contiguous, with `B = 1` and the heads of the unit. The function returns the output
        `[1, T, h G, Dv]`.
        """
        row, count = slice(unit.row, unit.row + 1), options["config"].num_compressed(end)
        cut = lambda each, *at: (x[row, *at].contiguous() for x in each)
        leaves = [
            *cut(given.own, tokens, unit.heads),
            *cut(given.compressed, slice(count), unit.kv_heads),
            *(x[:, :end] for x in whole),
            *cut(given.block_indices, tokens, unit.kv_heads),
        ]
        return functools.partial(_attend, options, self.sizes), leaves


def _attend(options: dict, sizes: Sequence[int], *tensors: Tensor) -> Tensor:
    """Run `functional.decided` on the flat list of tensors of a `Given`."""
    (query, *gates), compressed, keys_values, indices = Given.of(tensors, sizes)
    key, value, *sliding = keys_values
    own_key, own_value = sliding or (key, value)
    pair = Branches(key, key, own_key), Branches(value, value, own_value)
    each = gates[0] if len(gates) == 1 else Branches(*gates)
    chosen = indices[0] if indices else None
    arguments = query, *pair, each, compressed or None, chosen, options["cu_seqlens"]
    how = options["config"], options["scale"], False, options["implementation"]
    return functional.decided(arguments, *how, checked=True)


def local_graph(
    function: Callable[..., Tensor], leaves: list[Tensor], kept: list[Tensor]
) -> tuple[Tensor, Callable[..., list[Tensor | None]]]:
    """Run a local call. Return the output of the call, and a function that computes its
    gradients. The autograd graph of the call does not keep the input tensors alive.

    Args:
      leaves: The input tensors of the call.
      kept: A list. `local_graph` appends to this list the tensors that the autograd graph saves.
        The graph does not own these tensors.

    Returns:
      The output, and `gradients(leaves, kept, do, retain)`, which returns the gradient of each
      leaf. Of the arguments of `gradients`, `kept` are the saved tensors, `do` is the gradient of
      the output, and `retain` is true if the graph is used again afterwards.
    """
    found, present = list[Tensor | None](), [leaves, kept]
    places = {x.untyped_storage().data_ptr(): i for i, x in enumerate(leaves) if x.numel()}
    dtypes = [x.dtype for x in leaves]

    def pack(x):
        i = places.get(x.untyped_storage().data_ptr()) if x.numel() else None
        if i is not None and x.dtype == dtypes[i]:
            return i, (x.size(), x.stride(), x.storage_offset())
        # Boundaries are kept as the same tensor, since their tables are attached to it.
        present[1].append(x.detach() if tables_of(x) is None else x)
        return len(present[1]) - 1, None

    def unpack(packed):
        (given, saved), (i, view) = present, packed
        return saved[i] if view is None else given[i].as_strided(*view)

    token = leaves[0].new_zeros((), requires_grad=True)
    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        out = function(*_Enter.apply(token, found, *leaves))
    edge = get_gradient_edge(out)
    present.clear()  # the graph refers to its hooks, which refer to this list

    def gradients(leaves, kept, do, retain):
        present[:] = leaves, kept
        torch.autograd.grad(edge, token, do, retain, allow_unused=True)
        grads = [*found]
        present.clear(), found.clear()
        return grads

    return out.detach(), gradients


class _Enter(torch.autograd.Function):
    """Starts an autograd graph from leaves without keeping them alive. The backward pass writes
    the gradients of the leaves to `found`.
    """

    @staticmethod
    def forward(ctx: Any, token, found, *leaves):
        ctx.found = found
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in leaves)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads):
        ctx.found[:] = grads
        return None, None, *(None for _ in grads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, keep: bool, *tensors):
        given = Given.of(tensors, call.sizes)
        query, value = given.own[0], given.keys_values[1]
        kept, graphs, calls = list[Tensor](), list[Callable](), list[LocalCall]()
        out = Whole(query, query.shape[:3] + value.shape[3:])
        for unit in call.units(given):
            # The host runs this while the first gather is in progress.
            calls = calls or call.calls(query.device)
            whole = unit.wait()
            for each in calls:
                function, leaves = call.local(given, unit, whole, *each)
                if keep and not call.recompute:
                    part, gradients = local_graph(function, leaves, kept)
                    graphs.append(gradients)
                else:
                    part = function(*leaves)
                out.put(part, unit, each[0])
        if keep:
            # The boundaries are saved too, so that torch detects whether they are modified
            # before the backward pass.
            ctx.save_for_backward(call.options["cu_seqlens"], *tensors, *kept)
            ctx.call, ctx.graphs, ctx.calls = call, graphs, calls
        return out.found

    @staticmethod
    @first_order
    def backward(ctx: Any, do):
        call, (_, *saved) = ctx.call, ctx.saved_tensors
        given, kept = Given.of(saved, call.sizes), saved[sum(call.sizes) :]
        query, shards, dtype = given.own[0], call.shards, wide(do.dtype)
        own = [Whole(x, x.shape) for x in given.own]
        compressed = [torch.zeros_like(x, dtype=dtype) for x in given.compressed]
        widths = [x.shape[-1] for x in given.keys_values]
        first = len(own) + len(compressed)
        last = first + len(widths)
        graphs, sums, retain = iter(ctx.graphs), [], not is_last_pass()
        with torch.autocast(query.device.type, enabled=False):
            for unit in call.units(given):
                whole = unit.wait()
                shape = shards.size, query.shape[1], whole[0].shape[2], sum(widths)
                shares = query.new_empty(shape, dtype=dtype)
                chunks = shards.chunks_of(shares)
                done = [next(graphs, None) for _ in ctx.calls]
                # The longest call comes first, since its gradients are written and those of the
                # other calls are added.
                for i, each in reversed([*enumerate(ctx.calls)]):
                    (tokens, end, _), adds = each, i + 1 < len(done)
                    function, leaves = call.local(given, unit, whole, *each)
                    gradients, again, twice = done[i], kept, retain
                    if gradients is None:
                        again, twice = [], False
                        _, gradients = local_graph(function, leaves, again)
                    part = do[unit.row : unit.row + 1, tokens, unit.heads].contiguous()
                    grads = gradients(leaves, again, part, twice)
                    for target, grad in zip(own, grads[: len(own)], strict=True):
                        target.put(grad, unit, tokens)
                    for target, grad in zip(compressed, grads[len(own) : first], strict=True):
                        if grad is not None:
                            target[unit.row, : grad.shape[1], unit.kv_heads] += grad[0]
                    for number, chunk in enumerate(chunks):
                        begin = number * shards.chunk
                        keys = slice(begin, begin + shards.chunk)
                        targets = chunk.split(widths, dim=-1)
                        for target, grad in zip(targets, grads[first:last], strict=True):
                            seen = grad is not None and begin < end
                            if not adds:
                                target.copy_(grad[0, keys]) if seen else target.zero_()
                            elif seen:
                                target += grad[0, keys]
                sums.append(
                    (unit, shards.ranks.scatter_sum(shares, "gradients of keys and values"))
                )
        if not retain:
            ctx.graphs = []
        total = query.new_empty(*given.keys_values[0].shape[:3], sum(widths), dtype=dtype)
        for unit, wait in sums:
            total[unit.row, :, unit.kv_heads] = wait()
        found = [*(x.found for x in own), *compressed, *total.split(widths, dim=-1)]
        pairs = zip(found, saved[: len(found)], strict=True)
        return (
            None,
            None,
            *(x.to(like.dtype) for x, like in pairs),
            *[None] * len(given.block_indices),
        )


class Whole:
    """Builds a tensor from parts, with the dtype and device of `like`. A single part is not
    copied.
    """

    def __init__(self, like: Tensor, shape: Sequence[int]):
        self.like, self.shape = like, torch.Size(shape)
        self._found: Tensor | None = None

    def put(self, part: Tensor | None, unit: Unit, tokens: slice) -> None:
        """Write the part `[1, t, h, ..]` of a unit to the positions `tokens`. If `part` is None,
        write zeros."""
        if part is not None and part.shape == self.shape and part.dtype == self.like.dtype:
            self._found = part
        else:
            self.found[unit.row, tokens, unit.heads] = 0 if part is None else part[0]

    @property
    def found(self) -> Tensor:
        if self._found is None:
            self._found = self.like.new_empty(self.shape)
        return self._found


def compressed_tokens(shards: Shards, x, params, config, cu_seqlens) -> Tensor:
    """Apply `phi` to the windows of the whole sequence and return `[B, C, Hkv, D]`. `x` `[B, T,
    Hkv, D]` has the tokens of this rank.
    """
    windows: Any = WholeWindows(shards, config)
    if cu_seqlens is not None or shards.chunk % config.compress_stride:
        if cu_seqlens is None:
            cu_seqlens = batch_tables.of_one(shards.length, 0, x.device)
        windows = PackedWindows(shards, config, cu_seqlens)
    # The halo of a chunk has the first tokens of the next chunk. If chunks are shorter than the
    # halo, it has tokens of several next chunks.
    width = min(windows.halo, shards.chunk)
    heads = [tokens[:, :width] for tokens in x.split(shards.chunk, dim=1)]
    heads = _Gather.apply(shards, "the halo", torch.cat(heads, dim=1).transpose(0, 1))

    def made(x, heads, *learned):
        """Return the compressed tokens of this rank's chunks, `[chunks * most, B, Hkv, D]`."""
        parts = []
        heads = F.pad(heads.transpose(0, 1), (0, 0, 0, 0, 0, windows.halo))
        for place, tokens in enumerate(x.split(shards.chunk, dim=1)):
            at = (shards.own[place] + 1) * width
            tokens = torch.cat([tokens, heads[:, at : at + windows.halo]], dim=1)
            parts.append(windows.make(place, tokens, kind(*learned) if learned else None))
        return torch.cat(parts, dim=1).transpose(0, 1)

    kind: Any = type(params)
    own = made(x, heads) if params is None else _Learned.apply(made, x, heads, *params)
    found = _Gather.apply(shards, "compressed tokens", own)
    return windows.joined(found).transpose(0, 1).contiguous()


class _Gather(torch.autograd.Function):
    """Gathers the tensors `[chunks * n, ..]` of all ranks and puts them into the order of the
    sequence."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, what: str, x):
        ctx.shards, ctx.what, ctx.count = shards, what, x.shape[0] // len(shards.own)
        return shards.in_order(shards.ranks.gather(x, what)(), ctx.count) if ctx.count else x

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        if ctx.count:
            shards, pieces = ctx.shards, grad.to(wide(grad.dtype)).split(ctx.count)
            parts = torch.cat([pieces[i] for i in shards.order])  # the inverse of `in_order`
            parts = parts.unflatten(0, (shards.size, -1))
            total = shards.ranks.scatter_sum(parts, f"gradients of {ctx.what}")()
            grad = total.to(grad.dtype)
        return None, None, grad


class _Learned(torch.autograd.Function):
    """Applies `function` to tensors. The backward pass runs `function` again, this time with
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, function, *tensors):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            made = ctx.function(*leaves)
            return None, *torch.autograd.grad(made, leaves, grad, materialize_grads=True)


class WholeWindows(NamedTuple):
    """The windows of one sequence, if the length of a chunk is a multiple of the stride `d`. A
    window begins every `d` tokens, so that the windows of a chunk have fixed positions in the
    chunk.
    """

    shards: Shards
    config: NSAConfig

    @property
    def halo(self) -> int:
        return self.config.compress_block - self.config.compress_stride

    def make(self, place: int, tokens, params: CompressParams) -> Tensor:
        """Compress the windows of a chunk and its halo. Windows after the end of the sequence are
        zeros.
        """
        first = self.shards.own[place] * self.shards.chunk
        return compress_windows(tokens, params, config=self.config, first=first)

    def joined(self, found) -> Tensor:
        """Join the compressed windows of all chunks to one tensor `[C, ..]`."""
        return found[: self.config.num_compressed(self.shards.length)]


class PackedWindows:
    """The windows of packed sequences. The class also serves one sequence if the length of a
    chunk is no multiple of the stride. Only the device knows the starts of packed windows.

    Since the starts of two windows differ by at least `d` tokens, a packed chunk has no more
    windows than a chunk of a single sequence.
    """

    def __init__(self, shards: Shards, config: NSAConfig, cu_seqlens: Tensor):
        self.shards, self.halo = shards, config.compress_block - 1
        found = batch_tables.made(_packed_windows, cu_seqlens, shards=shards, config=config)
        self.taps, self.unused, self.first, self.at, self.covering = found

    def make(self, place: int, tokens, params: CompressParams) -> Tensor:
        taps, unused = self.taps[place], self.unused[place]
        if params is None:
            return _Means.apply(tokens, taps, unused, self.covering[place])
        return used_windows(tokens, taps, unused, params, self.first[place, None])

    def joined(self, found) -> Tensor:
        spare = found.new_zeros(1, *found.shape[1:])
        return torch.cat([found, spare]).index_select(0, self.at)


class _Means(torch.autograd.Function):
    """Computes `used_windows` for means, with its own backward pass. The gradient of a token is
    gathered from the windows that contain the token. Autograd would compute this gradient as a
    scattered sum.
    """

    @staticmethod
    def forward(ctx: Any, tokens, taps, unused, covering):
        ctx.save_for_backward(covering)
        ctx.block = taps.shape[-1]
        return used_windows(tokens, taps, unused, None, None)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        (covering,) = ctx.saved_tensors
        means = F.pad(grad.to(wide(grad.dtype)) / ctx.block, (0, 0, 0, 0, 0, 1))
        return means[:, covering].sum(dim=1).to(grad.dtype), None, None, None


def _packed_windows(cu_seqlens, *, shards: Shards, config: NSAConfig):
    """Return five tables of windows. Each chunk of this rank has `most` slots for windows.

    1. The first table has the tokens of each slot, `[chunks, most, l]`, as indices into the chunk
    and its halo.

    2. The second table `[chunks, most, 1, 1]` is true for empty slots.

    3. The third table has the position of each slot's first token, `[chunks, most]`.

    4. The fourth table has the slot of each window of the sequence, `[C]`, counted over all chunks.
    The entry of a window without a slot is the total number of slots.

    5. The fifth table has, for each token of a chunk and its halo, the slots of the windows that
    contain the token, `[chunks, l/d, tokens]`. Unused entries of the fifth table are `most`.
    """
    length, chunk, device = shards.length, shards.chunk, cu_seqlens.device
    most = -(-chunk // config.compress_stride)
    where = geometry(
        1, length, config=config, kv_len=length, cu_seqlens=cu_seqlens, device=device
    )
    begin = window_starts(where, config)[None]
    own, at = layouts.windows_of_chunks(TORCH_OPS, begin, shards, most)
    local = torch.cat(own)
    block = config.compress_block
    taps = local.clamp(max=chunk - 1)[..., None] + torch.arange(block, device=device)
    tokens = (x + number * chunk for x, number in zip(own, shards.own, strict=True))
    position = where.position[0, torch.cat([*tokens]).clamp(max=length - 1)]
    token = torch.arange(chunk + block - 1, device=device).expand(len(shards.own), -1)
    last = torch.searchsorted(local, token.contiguous(), right=True) - 1
    covering = []
    for back in range(block // config.compress_stride):
        slot = (last - back).clamp(min=0)
        start = local.gather(1, slot)
        inside = (last >= back) & (token < start + block) & (start < chunk)
        covering.append(torch.where(inside, slot, most))
    unused = (local >= chunk)[..., None, None]
    return taps, unused, position, at[0], torch.stack(covering, dim=1)

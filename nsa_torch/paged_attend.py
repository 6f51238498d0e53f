"""Attention from a paged cache in torch. If each row has few queries, as in decoding with or
without draft tokens, kernels read the pages directly. For rows with more queries, the keys and
values of each row are gathered from the pages, and the steps of `attention` run on the gathered
rows.

On an NVIDIA GPU one launch gathers the keys and values of a branch. The launch reads and writes
each entry once. On other devices torch copies whole pages. Gathered entries that no query attends
to are set to zero, regardless of the contents of their pages.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_pallas.runtime import loaded
from kernels_pallas.specs import interval
from kernels_pallas.specs.tile import cdiv
from kernels_pallas.triton import decode_descriptions
from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core import debug, paged_append, paged_dispatch, paged_layout
from nsa_core.array_ops import masked
from nsa_core.cache_contents import Contents, Facts
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Choice, Problem
from nsa_core.paged_dispatch import Decided, Inputs
from nsa_core.paged_layout import Entries
from nsa_core.paged_runs import Run
from nsa_core.steps import mosaic_decode, mosaic_forward, triton_decode
from nsa_core.steps.fused import Pages
from nsa_core.types import Branches
from nsa_core.validate import dtype_name
from nsa_interop import launch
from nsa_torch import call, checks, dispatch, functional, paged, plans
from nsa_torch.debug import TORCH
from nsa_torch.operators import refuse_transforms, requires_grad
from nsa_torch.paged import NewTokens, PagedCache, checked_tokens, write_tokens
from nsa_torch.torch_ops import TORCH_OPS as OPS
from nsa_torch.torch_ops import readable

# The implementations whose sliding branch reads only tiles with a key in some query's window, and
# the size of their largest tile. A tile begins at a multiple of its size.
READING_TILES = "mosaic", "triton"
KEY_TILE = max(128, *interval.BLOCKS)


def paged_attention(
    query: Tensor,
    gates: Tensor | Branches[Tensor],
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    key: Tensor | Branches[Tensor] | None = None,
    value: Tensor | Branches[Tensor] | None = None,
    params: tuple[CompressParams, CompressParams] | None = None,
    made_with: Facts = (),
    slots: Tensor | None = None,
    config: NSAConfig | None = None,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    runs: Sequence[Run] | None = None,
    implementation: functional.Name | None = None,
) -> Tensor:
    """Compute attention of each row's last tokens to all tokens of the row in the cache. The
    result is `[N, H, Dv]`.

    Query `j` of a row with `q` queries is at position `lengths - q + j`. Call the function `append`
    before this function, or pass the new tokens to this function. On `mosaic`, one launch appends
    the tokens and attends, for rows of up to 8 tokens. The launch requires that compressed tokens
    are means and that `cu_seqlens_q` is None. In a launch that also appends tokens, no row may
    begin with pages that another row fills. The output of a row is bitwise independent of the other
    rows. The output is 0 for rows of length 0 and for tokens that belong to no row. If the page
    table names a page that does not exist, the call raises an error on a CPU or under
    `nsa_core.debug`. On a GPU without `debug`, an entry beyond the pool of pages is clamped to the
    pool. A length beyond the page table is clamped to the table's capacity.

    Args:
      query: `[N, H, D]`, the queries of all rows, one row after the other.
      gates: `Branches` of `[N, H]`, or `[N, H, 3]` in the branches' order.
      cache: the cache with the tokens of all rows.
      page_table, lengths, cu_seqlens_q: as in `append`.
      key, value, params, made_with, slots: arguments of `append`. If `key` and `value` are given,
      the function `append` runs first. Without `key` and `value` the tokens must already be in the
      cache.
      config: None, or the config of the cache.
      scale: factor of the logits; None means `D**-0.5`.
      max_seqlen_q: Upper bound of the queries per row. If the host reads `cu_seqlens_q`, a row with
        more queries raises an error. If the host does not read `cu_seqlens_q`, the output of a row
        with more queries is undefined. `max_seqlen_q` is also limited to the capacity of the page
        table. Without `cu_seqlens_q`, or with `runs`, `max_seqlen_q` is not used.
        `max_seqlen_q=None` means that the host reads `cu_seqlens_q` from the device. If
        `max_seqlen_q` is at most 8, rows are padded to this length and run on kernels that read
        pages. The rounding of the output of padded rows depends on `max_seqlen_q`.
      runs: the result of `plan_runs` for copies of `cu_seqlens_q` and `lengths` on the host. The
        rows of one run are processed together. With `runs` the host reads nothing from the
        device. The lengths that `plan_runs` receives may be upper bounds. `runs=None` means that
        all rows are one run.
      implementation: `mosaic` or `triton` for kernels that read pages, or an implementation of
        `attention`, which runs on gathered pages. Kernels that read pages support rows of 1 to 8
        queries. `implementation=None` means that the implementation is chosen automatically.

    Raises:
      ValueError: Shapes or dtypes do not fit, `runs` is given without `cu_seqlens_q`, or `runs`
        has more rows or tokens than the call. `ValueError` is also raised if the host can detect
        that `runs` belongs to another call.
      NotImplementedError: A gradient is required, or the named implementation cannot run this
        call. `NotImplementedError` is raised before any token is written.
    """
    paged_layout.check_cache(cache, config)
    if (key is None) != (value is None):
        raise ValueError("key and value must both be given or both be None")
    if runs is not None and cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q must be given if runs are given, got None")
    if implementation == dispatch.INVARIANT:
        check_invariant(cache, params)
    step = None
    if cu_seqlens_q is None and isinstance(gates, Tensor) and (key is None or params is None):
        rest = key, value, scale, made_with, slots, implementation
        step = Step(query, gates, cache, cache.in_memory(page_table), lengths, *rest)
        if (known := step.known()) is not None:
            return known
    new = None
    if key is not None and value is not None:
        given = key, value, page_table, lengths, cu_seqlens_q, params, made_with, slots
        new = checked_tokens(cache, *given)
    rest = page_table, lengths, cu_seqlens_q, scale, max_seqlen_q
    inputs, max_seqlen_q = _checked(query, gates, cache, *rest)
    if runs is not None:
        sizes = query.shape[0], cache.config.select_block
        at = map(checks.read, (inputs.cu_seqlens_q, inputs.lengths))
        paged_layout.check_runs(runs, page_table, *sizes, *at)
    refuse_transforms(query, inputs.gates)
    if requires_grad(query, inputs.gates, *cache.tensors().values()):
        raise NotImplementedError(
            "paged_attention has no gradient; call it under torch.no_grad()"
        )
    # Everything is decided before a token is written, so that a refused call changes nothing.
    if runs is None:
        return finish(inputs, _decide(inputs, max_seqlen_q, implementation), new, slots, step)
    attend = _in_runs(inputs, runs, implementation, new)
    if new is not None:
        write_tokens(cache, new, inputs.page_table, lengths, cu_seqlens_q, slots)
        cache.contents = new.contents
    return attend()


def check_invariant(cache: PagedCache, params: Any) -> None:
    """Raise an error if the implementation `invariant` does not support the cache. Tokens that
    were appended one by one may have means with other bits than in training. The means are
    therefore computed again, from keys and values of the selected branch.

    Args:
      params: The compressors of new tokens.
    """
    said = dict(cache.contents.said)
    learned = {said.get(name, "avg") for name in ("phi_k", "phi_v")} != {"avg"}
    if cache.separate or cache.is_fp8 or learned or params not in (None, (None, None)):
        raise NotImplementedError(
            f"{dispatch.INVARIANT}: attention to a cache needs keys and values in 16 bits that all "
            "branches share, and compressed tokens that are means"
        )


def finish(
    inputs: Inputs,
    decided: Decided,
    new: NewTokens | None,
    slots: Tensor | None,
    step: "Step | None",
) -> Tensor:
    """Append the new tokens, run the chosen implementation and return its output. If the `step`
    is a single launch, the launch is cached.
    """
    cache, on_mosaic = inputs.cache, decided.choice.implementation == "mosaic"
    attend = None if on_mosaic and decided.of_tokens is None else _prepared(decided)
    together = None
    if new is not None and attend is None and _appends(inputs, new):
        together = new.key, new.value
    elif new is not None:
        step = None
        at = inputs.page_table, inputs.lengths, inputs.cu_seqlens_q
        write_tokens(cache, new, *at, slots)
        cache.contents = new.contents
    if attend is not None:
        return attend()
    out, _ = with_indices("mosaic", inputs, together, slots)
    if new is not None:
        cache.contents = new.contents
    return out if step is None else step.keep(inputs, out)


def decide_step(
    query, gates, pages, page_table, lengths, scale, implementation
) -> Decided | None:
    """Choose the kernels that read pages for attention of the last tokens `[B, T, H, D]` of all
    rows, or the implementation `invariant` if it is named. Return None if no kernel on pages can
    run. The arguments are the checked arguments of
    `cached_attention`, and the pages of the cache.
    """
    one = Branches.each(implementation)[0]
    implementation = one if implementation == Branches.each(one) else implementation
    invariant = implementation == dispatch.INVARIANT
    on_pages = implementation in (None, *paged_dispatch.KERNELS) and query.shape[1] <= QUERIES
    if not (invariant or on_pages):
        return None
    gates = paged_dispatch.joined_gates(OPS, gates, query).flatten(0, 1)
    at = page_table, lengths, None, scale
    try:
        found = _decide(Inputs(query.flatten(0, 1), gates, pages, *at), None, implementation)
    except NotImplementedError:
        if invariant:
            raise
        return None
    return (
        found if invariant or found.choice.implementation != paged_dispatch.GATHERED else None
    )


def _in_runs(
    inputs: Inputs, runs: Sequence[Run], implementation: str | None, new: NewTokens | None
) -> Callable[[], Tensor]:
    """Return a function that computes attention run by run (`plan_runs`). `new` has the keys and
    values of the new tokens.
    """
    query, cache, starts = inputs.query, inputs.cache, inputs.cu_seqlens_q
    at_hand = new is not None and new.key.selected.dtype == cache.selected_key.dtype
    parts: list[tuple[slice, Callable[[], Tensor]]] = []
    for run in runs:
        table, own = inputs.page_table[run.rows], None
        if not run.few:
            table = table[:, : run.columns]
        if not run.even:
            own = starts[run.rows.start : run.rows.stop + 1] - run.tokens.start
        mine = dataclasses.replace(
            inputs,
            query=query[run.tokens],
            gates=inputs.gates[run.tokens],
            page_table=table,
            lengths=inputs.lengths[run.rows],
            cu_seqlens_q=own,
        )
        whole = None
        if new is not None and at_hand and run.whole and run.even:
            whole = new.of(run.tokens, table.shape[0])
        # The lengths on the host are exact for rows of a prompt. Every position of these rows has
        # a token, so that no output is masked.
        rest = whole, run.even and not run.few
        if run.few or implementation is not None:
            part = _prepared(_decide(mine, run.queries, implementation), *rest)
        else:  # no kernel that reads pages supports this number of queries
            part = gathering(mine, run.queries, None, *rest)
        parts.append((run.tokens, part))
    covered = sum(x.stop - x.start for x, _ in parts) == query.shape[0]
    if len(parts) == 1 and covered:
        return parts[0][1]

    def attend() -> Tensor:
        shape = *query.shape[:2], cache.selected_value.shape[-1]
        joined = query.new_empty(shape) if covered else query.new_zeros(shape)
        for tokens, part in parts:
            joined[tokens] = part()
        return joined

    return attend


def _prepared(
    decided: Decided, whole: tuple[Branches, Branches] | None = None, full: bool = False
) -> Callable[[], Tensor]:
    """Return a function that computes the output of the call with the chosen implementation.
    `whole` and `full` are the same as in the function `gathering`.
    """
    name, of_tokens = decided.choice.implementation, decided.of_tokens
    if decided.name == dispatch.INVARIANT:
        run = gathering_as_in_training(decided.inputs, decided.max_seqlen_q)
    elif name == paged_dispatch.GATHERED:
        run = gathering(decided.inputs, decided.max_seqlen_q, decided.name, whole, full)
    else:
        run = lambda: with_indices(name, decided.inputs)[0]
    return run if of_tokens is None else lambda: of_tokens(run())


def _decide(inputs: Inputs, max_seqlen_q: int | None, implementation: str | None) -> Decided:
    registries = REGISTRY, dispatch.REGISTRY
    given = inputs, max_seqlen_q, implementation
    return paged_dispatch.decide(OPS, *registries, _problem, *given)


class _Launch(NamedTuple):
    """The launch of a decode step. All steps with the same key (`Step._key`) share one launch."""

    start: Callable[[int, Sequence[int]], None]
    outputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    copied: Sequence[
        int
    ]  # indices in `Step.given` of tensors that must be copied for the kernel
    contents: Contents  # the `Contents` of the cache after the step


class Step(NamedTuple):
    """The host side of a decode step that is one kernel. The launch of the kernel depends only on
    shapes. If a step with the same key ran before, its launch is reused without checks.
    """

    query: Tensor
    gates: Tensor | Branches[Tensor]
    cache: PagedCache
    page_table: Tensor
    lengths: Tensor
    key: Tensor | Branches[Tensor] | None
    value: Tensor | Branches[Tensor] | None
    scale: float | None
    made_with: Facts
    slots: Tensor | None
    implementation: functional.Names

    def known(self) -> Tensor | None:
        """Run the step if a step with the same key ran before, and return its output. Otherwise
        return None.
        """
        query, cache = self.query, self.cache
        if not isinstance(query, Tensor) or query.device.type not in call.DEVICE_TYPES:
            return None
        given = self.given()
        try:
            found = plans.KNOWN.get(self._key(given))
        except TypeError:  # `made_with` is not hashable
            return None
        if found is None:
            return None
        for i in found.copied:
            given[i] = readable(given[i])
        query, gates, table, lengths, *pair = given
        new = slots = None
        if pair:
            new = Branches(*pair[:3]), Branches(*pair[3:])
            slots = _slots(cache, table, self.slots) if cache.recent_key is not None else None
        arrays = mosaic_decode.step_arrays(query, gates, cache, table, lengths, new, slots)
        device = query.device
        results = [torch.empty(shape, dtype=x, device=device) for shape, x in found.outputs]
        addresses = [x.data_ptr() for x in (*arrays, *results)]
        found.start(launch.current_stream(device), addresses)
        cache.contents = found.contents
        return results[0].view(*query.shape[:-1], -1)

    def given(self) -> list[Any]:
        """Return the inputs of the kernel, without the cache. Keys and values are listed by
        branch.
        """
        found = [self.query, self.gates, self.page_table, self.lengths]
        for x in (self.key, self.value):
            if x is not None:
                found += x if isinstance(x, Branches) else (x, x, x)
        return found

    def _key(self, given: list[Any]) -> Hashable | None:
        """Return the key under which the launch is cached, or None if shapes do not determine
        the launch.
        """
        # `signature_of` expects the boundaries of a packed row last. A decode step has no such
        # boundaries.
        arrays = *given, *self.cache.tensors().values(), self.slots, None
        config = self.cache.config
        found, _ = call.signature_of(arrays, self.implementation, config, self.scale, False)
        one = len({*map(id, given[4:])}) == 2  # one key and one value for all branches
        return found and (found, one, self.cache.contents, tuple(self.made_with))

    def keep(self, inputs: Inputs, out: Tensor) -> Tensor:
        """Cache the launch of the step that has just run. Return `out` unchanged."""
        given, device = self.given(), self.query.device
        as_given = isinstance(self.gates, Tensor) and self.gates.dtype is inputs.gates.dtype
        key = self._key(given) if as_given and device.type in call.DEVICE_TYPES else None
        if key is not None:
            arrays = inputs.query, inputs.gates, inputs.cache, inputs.page_table
            appends = self.key is not None
            kernel = mosaic_decode.step_kernel(*arrays, inputs.scale, appends)
            outputs = [(x.shape, getattr(torch, x.dtype)) for x in kernel.outputs]
            start = launch.launcher(kernel, device)
            copied = [i for i, x in enumerate(given) if readable(x) is not x]
            plans.keep(key, _Launch(start, outputs, copied, self.cache.contents))
        return out


def _appends(inputs: Inputs, new: NewTokens) -> bool:
    """Return whether the kernel of the decode step also appends the new tokens."""
    if not new.are_means:
        return False
    there = loaded.on_disk(mosaic_decode.kernel_of(_problem(inputs), append=True))
    return loaded.can_build() or there or inputs.query.device.type != "cuda"


def explain(
    query: Tensor,
    gates: Tensor | Branches[Tensor],
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    implementation: functional.Name | None = None,
) -> Choice:
    """Report which implementation `paged_attention` would choose for these arguments."""
    paged_layout.check_cache(cache)
    if implementation == dispatch.INVARIANT:
        check_invariant(cache, None)
    rest = page_table, lengths, cu_seqlens_q, None, max_seqlen_q
    inputs = _checked(query, gates, cache, *rest)
    return _decide(*inputs, implementation).choice


def _checked(
    query, gates, cache, page_table, lengths, cu_seqlens_q, scale, max_seqlen_q
) -> tuple[Inputs, int | None]:
    """Check the arguments of a call. Also return the maximum number of queries per row."""
    given = {"query": query, "gates": gates, "page_table": page_table, "lengths": lengths}
    given |= checks.present(cu_seqlens_q=cu_seqlens_q)
    checks.tensors(cache.selected_key, "the cache", **given)
    arguments = query, gates, cache, page_table, lengths, cu_seqlens_q, scale
    found = paged_dispatch.checked(OPS, checks.read, cache.own_pages, *arguments)
    at = max_seqlen_q, cu_seqlens_q, found.capacity
    longest = paged_layout.longest_row(checks.read, *at)
    return dataclasses.replace(found, page_table=cache.in_memory(page_table)), longest


def _why_not(name: str, problem: Problem) -> str | None:
    reason = paged_dispatch.why_not(name, problem)
    if reason is None and name == "mosaic" and problem.platform == "cuda":
        there = loaded.can_build() or loaded.on_disk(mosaic_decode.kernel_of(problem))
        reason = None if there else f"{dispatch.COMPILER} --decode"
    return reason or problem.strided


REGISTRY = paged_dispatch.registry("torch", _why_not)


def _problem(inputs: Inputs) -> Problem:
    cache = inputs.cache
    key, width = cache.selected_key, cache.selected_value.shape[-1]
    memory = {"query": inputs.query, **cache.tensors()}
    arguments = inputs.query[None], key, width, cache.config, False, memory
    return inputs.posed(dispatch.problem_of(*dispatch.problem_key(*arguments)))


def with_indices(
    name: str,
    inputs: Inputs,
    new: tuple[Branches, Branches] | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels of the implementation `name`. Return the output, and the selected blocks of
    each query, int32 `[N, Hkv, n]`. `new` has the keys and values that the `mosaic` kernel appends
    first. `slots` has the indices of the buffers with the newest tokens of their rows.
    """
    arguments = inputs.query, inputs.gates, inputs.cache, inputs.page_table, inputs.lengths
    if name == "mosaic":
        slots = _slots(inputs.cache, inputs.page_table, slots) if new else None
        return mosaic_decode.attention(OPS, *arguments, inputs.scale, new, slots)
    return triton_decode.attention(OPS, *arguments, inputs.scale)


def _slots(cache: PagedCache, page_table: Tensor, slots: Tensor | None) -> Tensor | None:
    """In an fp8 cache, return for each row the index of the buffer with its newest tokens."""
    if not cache.is_fp8:
        return None
    return cache.first_slots(page_table.shape[0]) if slots is None else readable(slots)


def gathering(
    inputs: Inputs,
    max_seqlen_q: int | None,
    implementation: str | None,
    whole: tuple[Branches, Branches] | None = None,
    full: bool = False,
) -> Callable[[], Tensor]:
    """Return a function that gathers the pages of each row and runs `attention`. Call the
    returned function after the new tokens have been written to their pages.

    The argument `whole` has the keys and values of all tokens if the rows have no earlier tokens.
    If `whole` is given, the pages are not read. `full` states that all rows have the same number of
    queries and that no row has length 0. With `full`, no output is masked.
    """
    query, cache, table = inputs.query, inputs.cache, inputs.page_table
    config, rows, cu_seqlens_q = cache.config, table.shape[0], inputs.cu_seqlens_q
    capacity = inputs.capacity
    length = _row_length(inputs, max_seqlen_q)
    lengths = inputs.lengths.clamp(max=capacity)
    tokens = None
    if not full:
        tokens = paged_layout.tokens_of(OPS, lengths, cu_seqlens_q, query.shape[0])
    if tokens is None or cu_seqlens_q is None:  # no row is padded
        padded = None
        given = readable(query), inputs.gates
        queries, gates = (x.unflatten(0, (rows, length)) for x in given)
    else:
        padded = paged_layout.pad_queries(OPS, tokens, lengths, cu_seqlens_q, length)
        given = (x[padded.token] for x in (query, inputs.gates))
        queries, gates = masked(torch, padded.there, *given)
    gates = Branches(*gates.unbind(-1))

    width = cache.selected_value.shape[-1]
    # Gathered copies are contiguous. The choice therefore depends only on their shapes.
    keys = query.new_empty(0, capacity, *cache.selected_key.shape[2:])
    memory = {"query": queries}
    if whole is not None:
        keys, memory["key"], memory["value"] = whole[0].selected, *(x.selected for x in whole)
    problem = queries, keys, width, config, False, memory
    chosen = dispatch.choose(dispatch.problem_key(*problem, gates, cached=True), implementation)

    def attend() -> Tensor:
        margin = KEY_TILE if full and chosen.attention in READING_TILES else None
        at = cache, table, lengths, length, whole, margin
        in_pages = full and whole is None and _reads_pages(chosen, inputs)
        compressed, selected, sliding = side_by_side(*at, in_pages)
        if in_pages:
            page_table = table.clamp(0, cache.num_pages - 1)
            pages = Pages(page_table.to(torch.int32), lengths.to(torch.int32), *selected)
            selected = (
                x.flatten(0, 1)[None] for x in (cache.selected_key, cache.selected_value)
            )
            key, value = map(Branches, compressed, selected, sliding)
            options = {"config": config, "kv_len": lengths, "scale": inputs.scale}
            tensors = queries, key, value, gates, compressed, None
            out = chosen.load("attention")(*tensors, assume_finite=True, pages=pages, **options)
            return out.flatten(0, 1)
        key, value = (Branches(None, *pair) for pair in zip(selected, sliding, strict=True))
        rest = {"config": config, "kv_len": lengths, "cu_seqlens": None, "scale": inputs.scale}
        out = functional.attend(
            queries, key, value, gates, compressed, None, chosen, rest, True
        )
        out = out.flatten(0, 1)
        if tokens is None:
            return out
        out = out if padded is None else out[padded.flat]
        return masked(torch, tokens.position >= 0, out)[0]

    return attend


def _row_length(inputs: Inputs, max_seqlen_q: int | None) -> int:
    """Return the number of queries per row, after padding."""
    starts = inputs.cu_seqlens_q
    if starts is None:
        length = inputs.query.shape[0] // inputs.page_table.shape[0]
    elif max_seqlen_q is None:
        length = int((starts[1:] - starts[:-1]).max())
    else:
        length = max_seqlen_q
    length = max(length, 1)
    paged_layout.check_row_length(length, inputs.capacity)
    return length


def gathering_as_in_training(inputs: Inputs, max_seqlen_q: int | None) -> Callable[[], Tensor]:
    """Return the function of `gathering` for the implementation `invariant`. The rows of queries
    have the work items of the forward pass of training, and the compressed tokens are computed
    from the gathered keys and values as in training.
    """
    query, cache, starts = inputs.query, inputs.cache, inputs.cu_seqlens_q
    config, width = cache.config, cache.selected_value.shape[-1]
    problem = query[None], cache.selected_key, width, config, False, {}
    chosen = dispatch.choose(dispatch.problem_key(*problem, cached=True), dispatch.INVARIANT)
    (heads, key_width), kv_heads = query.shape[1:], cache.selected_key.shape[2]
    multiple = mosaic_forward.work_item_tokens(heads, kv_heads, key_width, width)
    length = cdiv(_row_length(inputs, max_seqlen_q) + multiple - 1, multiple) * multiple
    # Queries after a row's tokens need room in the table.
    table = F.pad(inputs.page_table, (0, cdiv(length, config.select_block)))
    lengths = inputs.lengths.clamp(max=inputs.capacity)
    tokens = paged_layout.tokens_of(OPS, lengths, starts, query.shape[0])
    aligned = OPS, tokens, lengths, starts, length, multiple
    padded, ends = paged_layout.align_queries(*aligned)
    given = (x[padded.token] for x in (query, inputs.gates))
    queries, gates = masked(torch, padded.there, *given)

    def attend() -> Tensor:
        entries, reach = paged_layout.raw_entries(config), table.shape[1] * config.select_block
        pair = _copy("selected", cache, table, lengths, entries, reach)
        tensors = queries, *map(Branches.each, pair), Branches(*gates.unbind(-1)), None, None
        options = {"config": config, "kv_len": ends, "scale": inputs.scale}
        out = chosen.load("attention")(*tensors, assume_finite=True, **options)
        return masked(torch, tokens.position >= 0, out.flatten(0, 1)[padded.flat])[0]

    return attend


def _reads_pages(chosen: Any, inputs: Inputs) -> bool:
    """Return whether the chosen kernels read the keys and values of the selected branch from
    pages."""
    cache, query = inputs.cache, inputs.query
    key, value = cache.selected_key, cache.selected_value
    in_order = key.is_contiguous() and value.is_contiguous()
    if chosen.attention != "mosaic" or cache.is_fp8 or not in_order:
        return False
    kv_heads, key_width = key.shape[2:]
    sizes = query.shape[1], kv_heads, key_width, value.shape[3], dtype_name(query)
    kernel = mosaic_forward.selected_on_pages(*sizes, cache.config, inputs.scale)
    if kernel is None or debug.stepwise(TORCH, query):
        return False
    return query.device.type != "cuda" or loaded.can_build() or loaded.on_disk(kernel)


type Pair = tuple[Tensor, Tensor]


def side_by_side(
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    queries: int,
    at_hand: tuple[Branches, Branches] | None = None,
    margin: int | None = None,
    last_page: bool = False,
) -> Branches[Pair]:
    """Return the keys and values of each branch as `[B, S, Hkv, .]`. The compressed branch has
    `[B, S / d, Hkv, .]`, with one entry per slot in the pages. The compressed branch begins with
    compressed token 0, and its last `l / d - 1` entries are unused.

    Args:
      page_table, lengths: as in `paged_attention`.
      queries: The maximum number of queries per row. `queries` bounds the number of tokens that
        the sliding branch needs.
      at_hand: Keys and values `[B, S, Hkv, .]` of all tokens of the rows. If `at_hand` is given,
        only compressed tokens are copied.
      margin: The number of tokens directly before the tokens of the sliding branch that must be
        zeros. Tokens before the `margin` zeros may be uninitialized. `margin=None` means that all
        earlier tokens must be zeros.
      last_page: Whether the selected branch needs only the page with each row's last token.
    """
    config = cache.config
    whole = page_table.shape[1] * config.select_block
    raw = cache, page_table, lengths, paged_layout.raw_entries(config)
    at = cache, page_table, lengths, paged_layout.compressed_entries(config)
    compressed = _copy("compressed", *at, whole)
    if at_hand is not None:
        key, value = at_hand
        pairs = (key.selected, value.selected), (key.sliding, value.sliding)
        return Branches(compressed, *pairs)
    selected = sliding = _copy("selected", *raw, whole, None, last_page)
    if cache.separate or last_page:
        branch = "sliding" if cache.separate else "selected"
        sliding = _copy(branch, *raw, queries + config.window, margin)
    return Branches(compressed, selected, sliding)


def _copy(
    branch: str,
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    entries: Entries,
    reach: int,
    margin: int | None = None,
    last_page: bool = False,
) -> Pair:
    """Copy the keys and values of one branch from the pages to one tensor per row."""
    names = f"{branch}_key", f"{branch}_value"
    key, value = (getattr(cache, name) for name in names)
    in_order = key.is_contiguous() and value.is_contiguous()
    if in_order and paged.append_why_not(cache) is None:
        scales = [getattr(cache, f"{name}_scale", None) for name in names]
        fp8 = scales[0] is not None, scales[1] is not None
        dtype = str(cache.dtype if any(fp8) else key.dtype).removeprefix("torch.")
        which = entries, reach, margin, fp8, last_page
        kernel = decode_descriptions.gather(key, value, page_table, dtype, *which)
        given = (lengths if x is None else x for x in scales)
        found = OPS.run(kernel, key, value, *given, page_table, lengths)
        return found[0], found[1]
    pages, width = page_table.clamp(0, cache.num_pages - 1), page_table.shape[1]
    token = torch.arange(entries.per_page * width, device=key.device) * entries.stride
    size = entries.per_page * entries.stride  # tokens per page
    end = lengths.clamp(max=width * size)[:, None]
    if last_page:
        column = (end - 1).clamp(min=0) // size
        pages, token = pages.gather(1, column.long()), token[:size] + column * size
    seen = ((token + entries.block <= end) & (token >= end - reach))[..., None, None]

    def copied(name: str) -> Tensor:
        found = paged_append.read(OPS, cache, name, (pages,)).flatten(1, 2)
        return torch.where(seen, found.roll(-entries.first, 1) if entries.first else found, 0)

    return copied(names[0]), copied(names[1])

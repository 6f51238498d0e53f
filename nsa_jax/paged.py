"""A paged cache for decoding and serving in JAX. The function `append` writes tokens to the cache,
and the function `paged_attention` reads the tokens. The counterpart in torch is `nsa_torch.paged`.
The function `append` returns a new cache and writes nothing in place. Donate the cache
(`jax.jit(.., donate_argnums=..)`), so that XLA reuses the memory of the cache. All sizes are
static, so one compilation serves growing lengths. If each row has few queries, as in decoding with
or without draft tokens, kernels read the pages directly. For rows with more queries, the keys and
values of each row are gathered from the pages, and the steps of `attention` run on the gathered
rows.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from nsa_core import (
    paged_append,
    paged_dispatch,
    paged_layout,
)
from nsa_core.array_ops import masked
from nsa_core.cache_contents import UNSAID, Contents, Facts, facts_of
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Choice, Problem
from nsa_core.paged_dispatch import Decided, Inputs
from nsa_core.paged_layout import ARRAYS, PAGES, PagedArrays
from nsa_core.types import Branches
from nsa_jax import api, checks, jax_problem
from nsa_jax.cache import known_contents
from nsa_jax.compression import apply_phi
from nsa_jax.dispatch import REGISTRY as ATTENTION
from nsa_jax.eager import any_rank, compiled
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.numerics import put

MAX_ROWS = 64


@jax.tree_util.register_pytree_node_class
class PagedCache(PagedArrays):
    """The pages of one layer's cache. `PagedArrays` lists the arrays of the cache, which are
    zeros at first.

    Args:
      num_pages: number of pages, with `config.select_block` tokens each.
      kv_heads, key_width, value_width: Hkv, D and Dv.
      config: the block sizes of the layer.
      dtype, compressed_dtype, max_rows: as in `nsa_torch.PagedCache`; fp8 is `jnp.float8_e4m3fn`.
      separate: whether each branch has its own keys and values (`Branches`), which triples the
        memory for raw tokens.

    Raises:
      ValueError: A size is not a positive int, or the dtype is not supported.
      NotImplementedError: `config` has a `compute_dtype`.
    """

    def __init__(
        self,
        num_pages: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        *,
        config: NSAConfig = NSAConfig(),
        dtype: Any = jnp.bfloat16,
        separate: bool = False,
        compressed_dtype: Any = None,
        max_rows: int = MAX_ROWS,
    ):
        zeros = lambda name, shape, dtype: jnp.zeros(shape, dtype)
        how = zeros, dtype, compressed_dtype, max_rows
        sizes = num_pages, kv_heads, key_width, value_width, config, separate
        name_of = lambda dtype: jnp.dtype(dtype).name
        super().__init__(config, **paged_layout.new_arrays(jnp, name_of, *how, *sizes))

    def tree_flatten(self):
        return [getattr(self, name) for name in ARRAYS], (self.config, self.contents)

    @classmethod
    def tree_unflatten(cls, static, arrays) -> Self:
        return cls.of(static[0], *arrays, contents=static[1])

    def reset(self) -> Self:
        """Return the cache without the record of how its tokens were computed."""
        return self.holding(UNSAID)

    def holding(self, contents: Contents) -> Self:
        """Return a copy of the cache with `contents` as the record of how its tokens were
        computed."""
        return self.of(self.config, **self.tensors(), contents=contents)

    def replace(self, **arrays: jax.Array) -> Self:
        """Return the cache with the given `arrays`, each in the field of its name.

        Raises:
          ValueError: Shapes or dtypes do not fit.
        """
        fields = self.tensors() | arrays
        cache = self.of(self.config, **fields, contents=self.contents)
        paged_layout.check_pages(cache)
        return cache

    def copy_pages(self, source, target) -> Self:
        """Return the cache after whole pages are copied, for example when a row forks in the
        middle of a page. `source` and `target` are page indices, int32 or int64 `[K]`. Forked
        rows share earlier pages through their page tables. To crop a row, pass a shorter length
        to the next call.
        """
        return self._copied(PAGES, source, target)

    def copy_recent(self, source, target) -> Self:
        """Return an fp8 cache after the buffers with the unrounded newest tokens of forked rows
        are copied, as in `nsa_torch.PagedCache`.
        """
        return self._copied(("recent_key", "recent_value"), source, target)

    def _copied(self, names, source, target) -> Self:
        paged_layout.check_copied(source, target)
        given = ((name, getattr(self, name)) for name in names)
        kept = {name: jnp.asarray(x) for name, x in given if x is not None}
        for x in kept.values():
            for name, index in (("source", source), ("target", target)):
                checks.within(name, index, 0, x.shape[0] - 1)
        return self.replace(
            **{k: put(x, jnp.asarray(target), x[jnp.asarray(source)]) for k, x in kept.items()}
        )


@any_rank
def append(
    cache: PagedCache,
    key,
    value,
    page_table,
    lengths,
    *,
    cu_seqlens_q=None,
    params: tuple[CompressParams, CompressParams] | None = None,
    made_with: Facts = (),
    slots=None,
) -> PagedCache:
    """Write new tokens to their pages, together with the compressed tokens that they complete.
    Return the new cache.

    A token beyond the end of the row's page table is not written, and neither is a token whose
    entry of the page table is negative. Rows of length 0 write nothing. If a token's entry of the
    table is beyond the pool of pages, the call raises an error on a CPU outside traced code. On
    other devices and in traced code, a token whose entry is beyond the pool is not written. Two
    rows must not write to the same page.

    Args:
      cache: the cache, which the call does not change. If you donate the cache, it is invalid
        afterwards.
      key, value: `[N, Hkv, D]`, `[N, Hkv, Dv]`, the new tokens of all rows, one row after the
        other. If the cache is `separate`, `key` and `value` are `Branches`.
      page_table: int32 `[B, M]`; entries that a row does not need may have any value.
      lengths: int32 `[B]`, tokens per row including the new ones. A row of length 0 is padding.
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first new token, then the end of the
        last row, at most `N`. `cu_seqlens_q=None` means that each row has `N / B` new tokens.
      params: parameters of the compressors of keys and values (`nsa_core.compress_params`).
        `params=None` means that compressed tokens are means.
      made_with: as in `cached_attention`.
      slots: As in `nsa_torch.append`, for a cache in fp8.

    Raises:
      ValueError: Shapes or dtypes do not fit the cache, or the cache was filled with parameters
        of another kind. In traced code, where the kind of a row's tokens is unknown, a row with
        tokens of another kind has outputs NaN.
    """
    paged_layout.check_cache(cache)
    key, value = map(Branches.each, (key, value))
    at = page_table, lengths, cu_seqlens_q
    params = paged_layout.check_tokens(
        checks.read, cache, key, value, *at, params, slots, cache.num_pages
    )
    facts = facts_of(params, made_with)

    def before():
        if cu_seqlens_q is None:
            return lengths - key.compressed.shape[0] // lengths.shape[0]
        return lengths - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])

    contents, mixed = known_contents(cache.contents, facts, before)
    wrong = None if mixed is False else mixed
    return compiled(_append)(cache.holding(contents), key, value, *at, params, slots, wrong)


def _append(cache, *given) -> PagedCache:
    return cache.replace(**paged_append.append(OPS, apply_phi, cache, *given))


@any_rank
def paged_attention(
    query,
    gates,
    cache: PagedCache,
    page_table,
    lengths,
    cu_seqlens_q=None,
    *,
    config: NSAConfig | None = None,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    implementation: api.Name | None = None,
):
    """Compute attention of each row's last tokens to all tokens of the row in the cache. The
    result is `[N, H, Dv]`.

    Query `j` of a row with `q` queries has position `lengths - q + j`. Call the function `append`
    first, since the cache must already have the tokens of the queries. The output of a row is
    independent of the other rows. The output is 0 for rows of length 0 and for tokens that belong
    to no row. If the page table names a page that does not exist, the call raises an error on a CPU
    outside traced code. On other devices and in traced code, the nearest existing page is used. A
    length beyond the page table is clamped to the table's capacity. Under `jax.vmap` the kernels
    run once per index of the mapped axis, one after the other.

    Args:
      query: `[N, H, D]`, the queries of all rows, one row after the other.
      gates: `Branches` of `[N, H]`, or `[N, H, 3]` in the branches' order.
      cache: the cache, including the tokens of the queries.
      page_table, lengths, cu_seqlens_q: as in `append`.
      config: None, or the config of the cache.
      scale: factor of the logits; None means `D**-0.5`.
      max_seqlen_q: Upper bound of the queries per row. `max_seqlen_q` is also limited to the
        capacity of the page table. Defaults to `N`. If `max_seqlen_q` is at most 8, rows are
        padded to this length and run on kernels that read pages.
      implementation: `mosaic` or `triton` for kernels that read pages (rows of 1 to 8 queries), or
        an implementation of `attention`, which runs on gathered pages. `implementation=None` means
        that the implementation is chosen automatically.

    Raises:
      ValueError: Shapes or dtypes do not fit.
      NotImplementedError: The named implementation cannot run this call.
    """
    paged_layout.check_cache(cache, config)
    given = query, gates, cache, page_table, lengths, cu_seqlens_q, scale
    decided = _decide(given, max_seqlen_q, implementation)
    name = decided.choice.implementation
    if name == paged_dispatch.GATHERED:
        out = gathered(decided.inputs, decided.max_seqlen_q, decided.name)
    else:
        out, _ = with_indices(name, decided.inputs)
    return out if decided.of_tokens is None else decided.of_tokens(out)


def explain(
    query,
    gates,
    cache: PagedCache,
    page_table,
    lengths,
    cu_seqlens_q=None,
    *,
    max_seqlen_q: int | None = None,
    implementation: api.Name | None = None,
) -> Choice:
    """Report which implementation `paged_attention` would choose for these arguments. Return the
    choice, with the reason why each earlier candidate was refused.

    Raises: the same errors as `paged_attention`.
    """
    paged_layout.check_cache(cache)
    given = query, gates, cache, page_table, lengths, cu_seqlens_q, None
    return _decide(given, max_seqlen_q, implementation).choice


def _decide(given, max_seqlen_q, implementation) -> Decided:
    """Check the arguments of a call and choose its implementation."""
    found = paged_dispatch.checked(OPS, checks.read, given[2].num_pages, *given)
    # Arrays of NumPy, which the checks could read, do not support a traced index.
    of_jax = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
    arrays = vars(found) | {"scale": None}
    found = dataclasses.replace(found, **jax.tree.map(of_jax, arrays) | {"scale": found.scale})
    at = max_seqlen_q, found.cu_seqlens_q, found.capacity
    call = found, paged_layout.longest_row(checks.read, *at), implementation
    return paged_dispatch.decide(OPS, REGISTRY, ATTENTION, _problem, *call)


REGISTRY = paged_dispatch.registry("jax", paged_dispatch.why_not)


def _problem(inputs: Inputs) -> Problem:
    cache = inputs.cache
    sizes = cache.kv_heads, inputs.capacity, cache.selected_value.shape[-1]
    problem = jax_problem.problem_of(inputs.query[None], *sizes, cache.config, False)
    return inputs.posed(problem)._replace(requires_grad=False)


def with_indices(name: str, inputs: Inputs):
    """Run the kernels of the implementation `name`. Return the output, and the selected blocks of
    each query, int32 `[N, Hkv, n]`.
    """
    from nsa_core.steps import mosaic_decode, triton_decode

    step = mosaic_decode if name == "mosaic" else triton_decode
    run = sequential_vmap(
        lambda *arrays: tuple(step.attention(OPS, *arrays, scale=inputs.scale))
    )
    return run(inputs.query, inputs.gates, inputs.cache, inputs.page_table, inputs.lengths)


def gathered(inputs: Inputs, max_seqlen_q: int | None, implementation: str | None):
    """Gather the pages of each row, then run the steps of `attention`."""
    query, cache, table = inputs.query, inputs.cache, inputs.page_table
    config, rows, cu_seqlens_q = cache.config, table.shape[0], inputs.cu_seqlens_q
    capacity = inputs.capacity
    if cu_seqlens_q is None:
        length = query.shape[0] // rows
    else:
        length = min(query.shape[0], capacity) if max_seqlen_q is None else max_seqlen_q
    paged_layout.check_row_length(length, capacity)
    lengths = jnp.minimum(inputs.lengths, capacity)
    tokens = paged_layout.tokens_of(OPS, lengths, cu_seqlens_q, query.shape[0])
    padded = paged_layout.pad_queries(OPS, tokens, lengths, cu_seqlens_q, length)
    given = (x[padded.token] for x in (query, inputs.gates))
    queries, gates = masked(jnp, padded.there, *given)
    gates = Branches(*(gates[..., c] for c in range(3)))

    copies = functools.partial(_side_by_side, cache, table, lengths)
    whole = paged_layout.raw_entries(config)
    selected = copies(whole, "selected_key", "selected_value")
    sliding = copies(whole, "sliding_key", "sliding_value") if cache.separate else selected
    finished = paged_layout.compressed_entries(config)
    compressed = copies(finished, "compressed_key", "compressed_value")
    key, value = (Branches(None, *pair) for pair in zip(selected, sliding, strict=True))
    out = api.attend(
        queries,
        key,
        value,
        gates,
        compressed,
        config=config,
        kv_len=lengths,
        scale=inputs.scale,
        implementation=implementation,
    )
    out = out.reshape(rows * length, *out.shape[2:])
    return masked(jnp, tokens.position >= 0, out[padded.flat])[0]


def _side_by_side(cache, page_table, lengths, entries: paged_layout.Entries, *names: str):
    """Return the pages of each row as contiguous tokens, `[B, S, Hkv, .]`. Entries that end after a
    row's last token become zeros, since a probability of zero times NaN is NaN.
    """
    pages = jnp.clip(page_table, 0, cache.num_pages - 1)
    index = jnp.arange(entries.count(page_table.shape[1]), dtype=jnp.int32)
    there = index * entries.stride + entries.block <= lengths[:, None]

    def copy(name):
        found = paged_append.read(OPS, cache, name, (pages,))
        rows = found.reshape(pages.shape[0], -1, *found.shape[3:])
        return masked(jnp, there, rows[:, entries.first :])[0]

    return tuple(map(copy, names))

"""Attention from a paged cache in JAX: on kernels that read the pages if rows have few queries
(decode, draft tokens), otherwise on rows gathered from the pages, by the steps of `attention`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from nsa_core import paged_append, paged_dispatch, paged_layout, validate_paged
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Choice, Problem
from nsa_core.paged_dispatch import Decided, Inputs
from nsa_core.types import Branches
from nsa_jax import api, checks, jax_problem
from nsa_jax.dispatch import REGISTRY as ATTENTION
from nsa_jax.eager import any_rank
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.paged import PagedCache


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
    """Attention of each row's last tokens to all its tokens in the cache: `[N, H, Dv]`.

    Query `j` of a row with `q` of them has position `lengths - q + j`: append first, then attend.
    A row's output depends only on its own tokens. Rows of length 0 and tokens of no row are 0. A
    table entry of a page that does not exist is an error on a CPU outside of traced code; otherwise
    it counts as the nearest existing page. A length beyond the table counts as the table's.
    Under `jax.vmap` kernels run once for each index of the mapped axis, one after the other.

    Args:
      query: `[N, H, D]`, the rows' tokens one after the other.
      gates: `Branches` of `[N, H]`, or `[N, H, 3]` in the branches' order.
      page_table, lengths, cu_seqlens_q: as in `append`.
      config: must be the cache's where it is given.
      scale: factor of the logits; None means `D**-0.5`.
      max_seqlen_q: Bound of the tokens of a row of `cu_seqlens_q`. The tokens of a table bound it
        too. Defaults to `N`. Up to 8, rows are padded to it and run on kernels that read pages.
      implementation: A name of `REGISTRY` (`mosaic`, `triton`: kernels on pages, for rows of 1 to 8
        queries), or one of `attention`, which then runs on gathered pages. By default automatic.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    validate_paged.paged(cache, config)
    given = query, gates, cache, page_table, lengths, cu_seqlens_q, scale
    decided = _decide(*given, max_seqlen_q, implementation)
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
    """Explains the choice of `paged_attention` for these arguments."""
    validate_paged.paged(cache)
    given = query, gates, cache, page_table, lengths, cu_seqlens_q, None
    return _decide(*given, max_seqlen_q, implementation).choice


def _decide(
    query,
    gates,
    cache,
    page_table,
    lengths,
    cu_seqlens_q,
    scale,
    max_seqlen_q,
    implementation,
) -> Decided:
    """Checks a call."""
    validate_paged.queries(cache, query, gates, scale)
    at, sizes = (
        (page_table, lengths, cu_seqlens_q),
        (cache.num_pages, cache.config.select_block),
    )
    validate_paged.tables(checks.read, "query", query.shape[0], at, *sizes)
    gates = paged_dispatch.joined_gates(OPS, gates, query)
    # NumPy's arrays, which the checks could read, take no traced index.
    inputs = query, gates, cache, page_table, lengths, cu_seqlens_q
    of_jax = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
    query, gates, cache, page_table, lengths, cu_seqlens_q = jax.tree.map(of_jax, inputs)
    found = Inputs(query, gates, cache, page_table, lengths, cu_seqlens_q, scale)
    most = validate_paged.longest(checks.read, max_seqlen_q, cu_seqlens_q, found.capacity)
    registries = REGISTRY, ATTENTION
    return paged_dispatch.decide(OPS, *registries, _problem, found, most, implementation)


REGISTRY = paged_dispatch.registry("jax", "nsa_jax.paged_attend", paged_dispatch.why_not)


def _problem(inputs: Inputs) -> Problem:
    cache = inputs.cache
    sizes = cache.kv_heads, inputs.capacity, cache.selected_value.shape[-1]
    problem = jax_problem.problem_of(inputs.query[None], *sizes, cache.config, False)
    return inputs.posed(problem)._replace(requires_grad=False)


def with_indices(name: str, inputs: Inputs):
    """The output on these kernels, and the blocks that each query chose: int32 `[N, Hkv, n]`."""
    from nsa_core.steps import mosaic_decode, triton_decode
    from nsa_jax import triton

    @sequential_vmap
    def run(*arrays):
        if name == "mosaic":
            return tuple(mosaic_decode.attention(OPS, *arrays, scale=inputs.scale))
        return tuple(triton_decode.attention(triton.OPS, *arrays, scale=inputs.scale))

    return run(inputs.query, inputs.gates, inputs.cache, inputs.page_table, inputs.lengths)


def gathered(inputs: Inputs, max_seqlen_q: int | None, implementation: str | None):
    """Each row's pages side by side, then the steps of `attention`."""
    query, cache, table = inputs.query, inputs.cache, inputs.page_table
    config, rows, cu_seqlens_q = cache.config, table.shape[0], inputs.cu_seqlens_q
    capacity = inputs.capacity
    if cu_seqlens_q is None:
        length = query.shape[0] // rows
    else:
        length = min(query.shape[0], capacity) if max_seqlen_q is None else max_seqlen_q
    validate_paged.row_length(length, capacity)
    lengths = jnp.minimum(inputs.lengths, capacity)
    tokens = paged_layout.tokens_of(OPS, lengths, cu_seqlens_q, query.shape[0])
    padded = paged_layout.pad_queries(OPS, tokens, lengths, cu_seqlens_q, length)
    there = padded.there[..., None]
    gates = jnp.where(there[..., None], inputs.gates[padded.token], 0)
    gates = Branches(*(gates[..., c] for c in range(3)))
    queries = jnp.where(there[..., None], query[padded.token], 0)

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
        block_indices=None,
        kv_len=lengths,
        segment_ids=None,
        scale=inputs.scale,
        implementation=implementation,
    )
    out = out.reshape(rows * length, *out.shape[2:])
    out = out[padded.flat.clip(0, rows * length - 1)]
    return jnp.where((tokens.position >= 0)[:, None, None], out, 0)


def _side_by_side(cache, page_table, lengths, entries: paged_layout.Entries, *names: str):
    """The pages of each row, `[B, S, Hkv, .]`: whole pages, with zeros for unfinished entries.

    A probability of zero times a value that is NaN is NaN.
    """
    pages = jnp.clip(page_table, 0, cache.num_pages - 1)
    index = jnp.arange(entries.count(page_table.shape[1]), dtype=jnp.int32)
    there = index * entries.stride + entries.block <= lengths[:, None]

    def copy(name):
        found = paged_append.read(OPS, cache, name, (pages,))
        rows = found.reshape(pages.shape[0], -1, *found.shape[3:])
        return jnp.where(there[..., None, None], rows[:, entries.first :], 0)

    return tuple(map(copy, names))

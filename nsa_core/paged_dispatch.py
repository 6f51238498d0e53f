"""For a paged call, chooses either kernels that read pages, or `attention` on rows gathered from
pages.

Gathered rows can run on any implementation of `attention`, so a paged call also accepts the names
of these implementations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from kernels_pallas.specs.decode import GATE_DTYPES
from kernels_pallas.triton import capability
from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core import paged_layout
from nsa_core.array_ops import ArrayOps, masked
from nsa_core.dispatch import Choice, Implementation, Problem, Registry
from nsa_core.policy import DECODE
from nsa_core.steps import mosaic_decode
from nsa_core.types import Branches
from nsa_core.validate import dtype_name

GATHERED = "gathered"
KERNELS = "mosaic", "triton"  # implementations whose kernels read pages


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The checked arguments of `paged_attention`. `gates` is `[N, H, 3]`, in the dtype of
    `joined_gates`.
    """

    query: Any
    gates: Any
    cache: Any  # the framework's `PagedCache`
    page_table: Any
    lengths: Any
    cu_seqlens_q: Any
    scale: float | None

    @property
    def capacity(self) -> int:
        """The number of tokens for which the page table of a row has pages."""
        return self.page_table.shape[1] * self.cache.config.select_block

    def posed(self, problem: Problem) -> Problem:
        """Return a copy of `problem` for `B` rows of `T` queries and up to `S` tokens. `T` is 0 if
        `cu_seqlens_q` is given, since rows may then have different numbers of queries.
        """
        rows, same = self.page_table.shape[0], self.cu_seqlens_q is None
        length = self.query.shape[0] // rows if same else 0
        sizes = {"B": rows, "T": length, "S": self.capacity}
        is_fp8 = self.cache.is_fp8
        return problem._replace(**sizes, packed=not same, cached=True, is_fp8=is_fp8)


def joined_gates(ops: ArrayOps, gates, query):
    """Join gates, which may be `Branches` of `[N, H]`, to `[N, H, 3]`, and cast them to a dtype
    that kernels read. If the queries are float64, which no kernel supports, the gates keep their
    dtype.
    """
    if isinstance(gates, Branches):
        if len({x.dtype for x in gates}) > 1:
            gates = Branches(*map(ops.to_float32, gates))
        gates = ops.xp.stack(list(gates), -1)
    kept = dtype_name(gates) in GATE_DTYPES or dtype_name(query) == "float64"
    return ops.contiguous(gates) if kept else ops.to_float32(gates)


def checked(
    ops: ArrayOps,
    read: Callable[[Any], Any],
    pool: int,
    query,
    gates,
    cache,
    page_table,
    lengths,
    cu_seqlens_q,
    scale,
) -> Inputs:
    """Check the arguments of `paged_attention` for a cache of `pool` pages. The function `read` is
    the same as in `paged_layout.check_tables`.
    """
    paged_layout.check_queries(cache, query, gates, scale)
    at, size = (page_table, lengths, cu_seqlens_q), cache.config.select_block
    paged_layout.check_tables(read, "query", query.shape[0], at, pool, size)
    return Inputs(query, joined_gates(ops, gates, query), cache, *at, scale)


def registry(framework: str, why_not: Callable[[str, Problem], str | None]) -> Registry:
    """Return the registry of a framework for paged calls. The registry only chooses an
    implementation, and `paged_attention` runs it.

    Args:
      why_not: Function that returns the reason why the kernels of a given name cannot run a
        problem in this framework, or None.
    """
    kernels = (
        Implementation(name, why_not=functools.partial(why_not, name)) for name in KERNELS
    )
    return Registry(framework, {DECODE: (*kernels, Implementation(GATHERED))})


def why_not(name: str, problem: Problem) -> str | None:
    """Return the reason why kernels on pages cannot run a paged call, or None."""
    if name == "mosaic":
        return mosaic_decode.why_not(problem)
    return capability.decode_why_not(problem)


class Decided(NamedTuple):
    """The choice of implementation for a paged call.

    Attributes:
      inputs: The arrays in the form that kernels on pages require.
      name: The implementation of `attention` on gathered rows that the caller named, or None.
      of_tokens: Function that maps the output of padded rows to the tokens of the call.
        `of_tokens=None` means that no rows were padded.
    """

    inputs: Inputs
    max_seqlen_q: int | None
    choice: Choice
    name: str | None
    of_tokens: Callable[[Any], Any] | None


def decide(
    ops: ArrayOps,
    own: Registry,
    attention: Registry,
    problem_of: Callable[[Inputs], Problem],
    inputs: Inputs,
    max_seqlen_q: int | None,
    name: str | None,
) -> Decided:
    """Choose the implementation of a paged call.

    Rows of up to `QUERIES` tokens are padded at their start to `max_seqlen_q` tokens, since kernels
    on pages need rows of equal length. If both registries have `name`, the kernels on pages are
    chosen for rows with few queries.

    Raises:
      ValueError: No implementation is called `name`.
      NotImplementedError: The named implementation cannot run the problem.
    """
    of_tokens, starts = None, inputs.cu_seqlens_q
    if starts is not None and max_seqlen_q is not None and max_seqlen_q <= QUERIES:
        lengths = inputs.lengths.clip(0, inputs.capacity)
        tokens = paged_layout.tokens_of(ops, lengths, starts, inputs.query.shape[0])
        padded = paged_layout.pad_queries(ops, tokens, lengths, starts, max_seqlen_q)
        token = padded.token.reshape(-1)
        query, gates = (x[token] for x in (inputs.query, inputs.gates))

        def of_tokens(out):
            return masked(ops.xp, tokens.position >= 0, out[padded.flat])[0]

        inputs = dataclasses.replace(inputs, query=query, gates=gates, cu_seqlens_q=None)
    problem = problem_of(inputs)
    asked, few = name, not problem.packed and problem.T <= QUERIES
    if name is not None and (name not in own.names() or (name != GATHERED and not few)):
        if name not in attention.names():
            known = tuple(dict.fromkeys((*own.names(), *attention.names())))
            raise ValueError(f"implementation must be one of {known} or None, got {name!r}")
        asked = GATHERED
    choice = own.choose(problem._replace(step=DECODE), asked)
    name = None if name == GATHERED else name
    return Decided(inputs, max_seqlen_q, choice, name, of_tokens)

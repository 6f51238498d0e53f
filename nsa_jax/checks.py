"""Checks of the numbers in public arguments, where the host reads them; the twin of
`nsa_torch.checks`. What shapes and dtypes tell is `nsa_core.validate`'s.
"""

from typing import Any

import jax
import numpy as np

from nsa_core import block_lists, debug, validate, validate_paged


def is_read(x: Any) -> bool:
    """Whether the host reads the numbers of an argument: nothing waits for it, or `debug` asks."""
    if isinstance(x, jax.core.Tracer):
        return False
    here = not isinstance(x, jax.Array) or {each.platform for each in x.devices()} == {"cpu"}
    return here or debug.on


def within(name: str, x: Any, least: int, most: int) -> None:
    """Checks the numbers of an array; of what is none, nothing."""
    if hasattr(x, "dtype") and is_read(x):
        validate.numbers(name, np.asarray(x), least, most)


def distinct(block_indices: Any) -> None:
    """Raises where a list names a block twice."""
    if is_read(block_indices):
        block_lists.refuse_repeated(np.asarray(block_indices))


def rows_of_tokens(lengths: Any, cu_seqlens_q: Any, count: int) -> None:
    """Checks where the rows of `count` tokens begin, and that `lengths` count them."""
    starts = None
    if cu_seqlens_q is not None:
        if not is_read(cu_seqlens_q):
            return
        starts = np.asarray(cu_seqlens_q)
        validate.borders("cu_seqlens_q", starts.tolist(), count)
    if is_read(lengths):
        validate_paged.counted(np.asarray(lengths), starts, count)


def page_numbers(page_table: Any, lengths: Any, count: int, size: int, *, read: bool) -> None:
    """Checks the numbers of a table; `count`: of pages of `size` tokens, `read`: as of
    `validate_paged`.
    """
    if is_read(page_table) and is_read(lengths):
        table, tokens = np.asarray(page_table), np.asarray(lengths)
        validate_paged.page_numbers(table, tokens, count, size, read)


def written_once(
    page_table: Any, lengths: Any, cu_seqlens_q: Any, count: int, size: int
) -> None:
    """Checks that rows write to pages of their own."""
    given = page_table, lengths, *(() if cu_seqlens_q is None else (cu_seqlens_q,))
    if all(map(is_read, given)):
        table, tokens, *starts = map(np.asarray, given)
        validate_paged.written_once(table, tokens, starts[0] if starts else None, count, size)


def longest(max_seqlen_q: int | None, cu_seqlens_q: Any, capacity: int) -> int | None:
    """`max_seqlen_q`, at most the `capacity` of a row's pages. Checks that no row has more queries,
    where the host reads them.
    """
    if max_seqlen_q is None:
        return None
    validate.sizes(max_seqlen_q=max_seqlen_q)
    if cu_seqlens_q is not None and is_read(cu_seqlens_q):
        validate_paged.longest(max_seqlen_q, np.asarray(cu_seqlens_q), capacity)
    return min(max_seqlen_q, capacity)

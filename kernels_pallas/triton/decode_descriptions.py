"""Launches on pages beside a decode step, described: `append`, `gather`. Needs no Triton."""

from typing import Any

from kernels_pallas.kernel import Array
from kernels_pallas.triton.kernel import TritonKernel, cdiv
from kernels_pallas.triton.tiling import power

QUERIES = 8  # of a row in a decode step, at most
GATHERED = 8192  # elements that a program copies from pages


def gather(
    key: Any,
    value: Any,
    page_table: Any,
    dtype: str,
    entries: Any,
    reach: int,
    margin: int | None = None,
    fp8: tuple[bool, bool] = (False, False),
    last: bool = False,
) -> TritonKernel:
    """Arrays: pages of keys and of values, the scales of both (where there are none: any),
    page_table, lengths; results: `[rows, S, heads, width]` of both, of as many entries as a row's
    pages have, so that scores, which read whole blocks of them, need no copy.

    Args:
      key, value: the pages.
      dtype: of the results, and of pages but those in `fp8`.
      entries: `nsa_core.paged_layout.Entries` of a page.
      reach: the last tokens of a row, whose entries are copied; others are zeros.
      margin: tokens before these whose entries are zeros, others are not written; None: all are.
      last: of each row the last page alone, of raw tokens.
    """
    (pool, _, heads, width), (rows, pages) = key.shape, page_table.shape
    widths = width, value.shape[3]
    count = entries.per_page * (1 if last else pages)
    together = max(GATHERED // power(heads * max(widths)), 1)
    margin = pages * entries.per_page * entries.stride if margin is None else margin
    return TritonKernel.of(
        "paged_gather:gather",
        rows * cdiv(count, together),
        (pages, pool, count, reach, margin),
        [Array((rows, count, heads, width), dtype) for width in widths],
        HEADS=heads,
        KEY_WIDTH=heads * width,
        VALUE_WIDTH=heads * widths[1],
        KEY_FP8=fp8[0],
        VALUE_FP8=fp8[1],
        PER_PAGE=entries.per_page,
        FIRST=entries.first,
        BLOCK=entries.block,
        STRIDE=entries.stride,
        ENTRIES=together,
        LAST=last,
    )


def append(
    cache: Any, key: Any, value: Any, page_table: Any, *, ragged: bool, means: bool, slots: bool
) -> list[TritonKernel]:
    """One launch, or two, that write in place. `paged_append.append` lists the arrays. Pass any
    array in place of one that is not read.

    Where a row of a cache in fp8 may have so many tokens that they take the places in its ring of
    those that its means need, the ring is written by a launch of its own.

    Args:
      cache: `nsa_core.paged_layout.PagedArrays`.
      key, value: the new tokens `[N, Hkv, .]` of all rows.
      ragged: whether rows have different numbers of tokens; means: whether compressed tokens are
        means, which are made here; slots: whether the rows say which ring they have.
    """
    (tokens, heads, width), rows, config = key.shape, page_table.shape[0], cache.config
    rings = cache.recent_key.shape[0] if cache.is_fp8 else 0
    longest = tokens if ragged else tokens // rows
    apart = rings > 0 and longest > config.compress_block + 1
    return [
        TritonKernel.of(
            "paged_append:append",
            tokens * heads,
            (tokens, *page_table.shape, cache.num_pages, rings),
            (),
            (4 if rings else 1, 1),
            HEADS=heads,
            WIDTH=width,
            VALUE_WIDTH=value.shape[2],
            PAGE=config.select_block,
            COMPRESS_BLOCK=config.compress_block,
            COMPRESS_STRIDE=config.compress_stride,
            BLOCK_ROWS=power(config.compress_block, 1),
            RING=2 * config.compress_block,
            RAGGED=ragged,
            SEPARATE=cache.separate,
            MEANS=means,
            FP8=rings > 0,
            SLOTS=slots,
            WRITES=writes,
            KEEPS=keeps,
        )
        for writes, keeps in ([(True, False), (False, True)] if apart else [(True, True)])
    ]

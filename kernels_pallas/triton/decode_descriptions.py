"""Describes the launches `append` and `gather` on pages. This module does not import Triton."""

from typing import Any

from kernels_pallas.kernel import Array
from kernels_pallas.triton.kernel import TritonKernel, cdiv
from kernels_pallas.triton.tiling import power

QUERIES = 8  # maximum number of queries per row in a decode step
GATHERED = 8192  # number of elements that a program copies from pages


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
    """Describe the launch that gathers pages.

    The arrays of the launch are the pages of keys and of values, the scales of both, page_table and
    lengths. If the pages have no scales, pass any arrays as scales. The results are keys and values
    `[rows, S, heads, width]`. S is the number of entries in the pages of a row. S covers whole
    pages, so that the scores read whole blocks without a copy.

    Args:
      key, value: The pages.
      page_table: The page table `[rows, pages]`.
      dtype: Dtype of the results, and of pages that are not in `fp8`.
      entries: `nsa_core.paged_layout.Entries` of a page.
      reach: Number of last tokens of a row whose entries are copied; other entries are zeros.
      margin: Number of tokens before the copied tokens whose entries are set to zero. Earlier
        entries are not written. By default, `margin` covers all tokens.
      fp8: Whether the pages of keys are in fp8, and whether the pages of values are.
      last: Whether only the last page of each row is copied, as for raw tokens. If `last` is
        true, S is the number of entries of one page.
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
    """Describe one or two launches that append tokens in place.

    `paged_append.append` lists the arrays. For arrays that are not read, pass any array.

    In a cache in fp8, a separate launch writes the ring buffer if the new tokens of a row may
    overwrite slots that the means still need.

    Args:
      cache: `nsa_core.paged_layout.PagedArrays`.
      key, value: The new tokens `[N, Hkv, .]` of all rows.
      page_table: The page table `[B, M]`.
      ragged: Whether rows have different numbers of tokens.
      means: Whether compressed tokens are means, which the launch computes.
      slots: Whether the caller passes the index of each row's ring buffer.
    """
    (tokens, heads, width), rows, config = key.shape, page_table.shape[0], cache.config
    rings = cache.recent_key.shape[0] if cache.is_fp8 else 0
    longest = tokens if ragged else tokens // rows
    separate = rings > 0 and longest > config.compress_block + 1
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
        for writes, keeps in ([(True, False), (False, True)] if separate else [(True, True)])
    ]

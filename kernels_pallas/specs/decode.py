"""Describes one decode step over a paged cache.

One launch computes the three branches, their gated sum and the selection.

A page holds one selection block. A page has `block` raw tokens and `block / stride` compressed
tokens. Compressed token `i` is in slot `i + compress_block / stride - 1` of its row. Slot `s` is at
index `s % per_page` of page `s // per_page` of the row. The same page has the last raw token of the
window.

A cluster of `cluster` CTAs of `warps` warps serves one query token and one key/value head. A warp
handles strips of 16 keys. The only length that is compiled into a kernel is `capacity`, the maximum
number of pages per row. Shared memory has `capacity` page-table entries, and the scores and logits
of `capacity` pages.
"""

import dataclasses
import functools
import itertools
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, Spec, described, float32, int32
from kernels_pallas.specs.tile import LANES, SMEM_BYTES, cdiv

STRIP = 16  # number of keys per product of a warp
HEADS = 16  # number of query rows per product; rows beyond the group are unused
WARP_COPY_BYTES = 512  # bytes that the lanes of a warp copy together, 16 bytes per lane
TILE_BYTES = 4 * HEADS * STRIP  # bytes of the float32 logits of a strip
STAT_BYTES = 8 * HEADS  # maximum and sum of each row
NEW_PAGES = 2  # maximum number of pages for a row's new tokens
BARRIERS = 8  # 8-byte words at the end of shared memory, of which four are used
WIDEST_KEY, WIDEST_VALUE = 192, 128
RAW = "raw", "selected", "sliding"  # raw tokens are those that are compressed
FP8 = "float8_e4m3fn"
GATE_DTYPES = "float32", "bfloat16", "float16"


@dataclasses.dataclass(frozen=True)
class Variant:
    """Resources of one compiled kernel.

    Attributes:
      cluster: Number of CTAs per cluster.
      warps: Number of warps per CTA.
      stages: Number of pipeline stages in the ring buffer of a warp.
      capacity: Maximum number of pages per row.
    """

    cluster: int
    warps: int
    stages: int
    capacity: int


# The compiled variants, in the order of their capacity. For each capacity, the first variants have
# the lowest latency. Later variants run more clusters at once, or need less shared memory.
VARIANTS = (
    Variant(8, 4, 2, 128),
    Variant(4, 4, 4, 128),
    Variant(4, 4, 2, 128),
    Variant(2, 4, 2, 128),
    Variant(4, 8, 2, 128),  # for a D that needs more than half of an SM
    Variant(8, 4, 4, 512),
    Variant(3, 8, 4, 512),
    Variant(4, 4, 2, 512),
    Variant(2, 8, 4, 512),
    Variant(2, 8, 2, 512),
    Variant(4, 8, 2, 512),
    Variant(16, 4, 3, 1024),
    Variant(8, 8, 4, 1024),
    Variant(8, 4, 2, 1024),
    Variant(3, 8, 3, 1024),
    Variant(2, 8, 2, 1024),
    Variant(4, 8, 4, 1024),
    Variant(4, 8, 2, 1024),
    Variant(8, 8, 2, 2560),
)
# Number of clusters that an H100 runs at once with one CTA per SM, for each cluster size, from
# `cuOccupancyMaxActiveClusters`. For sizes 4, 8 and 16 the number here is one less than the
# function returned, since chips differ in which SMs are disabled.
CLUSTERS = {2: 66, 3: 39, 4: 30, 8: 14, 16: 6}
SMEM = SMEM_BYTES - 1024  # bytes per CTA, without the alignment and the word that Mosaic needs
HALF_SM = SMEM_BYTES // 2 - 1024  # shared memory of a CTA if two share an SM


@dataclasses.dataclass(frozen=True)
class Decode(Spec):
    """Static sizes.

    `B`, `pages`, `table_pages` and `rings` are not compiled into the kernel. A launch passes
    `pages`, `table_pages` and `rings` as arguments, and `B` by the size of the grid.

    Attributes:
      B: Number of rows.
      q_len: Number of query tokens per row, which are the newest tokens of the row.
      H: Number of query heads.
      Hkv: Number of key/value heads.
      D: Width of keys.
      Dv: Width of values.
      compress_block: `l`, the number of tokens per compressed window.
      stride: `d`, the number of tokens between the starts of two windows.
      block: Number of tokens per selection block and page.
      n: Number of selected blocks per query token, forced ones included.
      num_initial: Number of forced blocks at the begin of the row.
      num_local: Number of forced blocks up to the block of the query token.
      window: Number of keys of the sliding branch. `window=0` means none.
      pages: Number of pages in the pool.
      table_pages: Number of columns of the page table.
      dtype: Dtype of the query, the output and pages that are not in fp8.
      scale: Factor of the logits.
      gate_dtype: Dtype of the gates, float32 or a 16-bit dtype.
      variant: The resources of the compiled kernel.
      append: Whether the step writes its new tokens to their pages.
      fp8: Whether pages store 8-bit numbers with scales. Pages of compressed keys are never in 8
        bits.
      rings: Number of ring buffers for the newest tokens of rows, if a step appends to pages in
        fp8.
    """

    B: int
    q_len: int
    H: int
    Hkv: int
    D: int
    Dv: int
    compress_block: int
    stride: int
    block: int
    n: int
    num_initial: int
    num_local: int
    window: int
    pages: int
    table_pages: int
    dtype: str
    scale: float
    variant: Variant = Variant(4, 8, 2, 128)
    gate_dtype: str = "float32"
    append: bool = False
    fp8: bool = False
    rings: int = 0

    @property
    def nominal(self) -> dict[str, Any]:
        lengths = dict.fromkeys(("B", "pages", "table_pages"), NOMINAL_LENGTH)
        return lengths | {"rings": NOMINAL_LENGTH if self.keeps else 0}

    @cached_property
    def tokens(self) -> int:
        return self.B * self.q_len

    @cached_property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.Hkv

    @cached_property
    def per_page(self) -> int:
        """Compressed slots of a page."""
        return self.block // self.stride

    @cached_property
    def cover(self) -> int:
        """The number of stride blocks per compressed token."""
        return self.compress_block // self.stride

    @cached_property
    def free(self) -> int:
        """The number of blocks that are selected by score."""
        return self.n - self.num_initial - self.num_local

    @cached_property
    def keeps(self) -> bool:
        """Whether the step also writes its tokens to ring buffers."""
        return self.append and self.fp8

    @cached_property
    def ring(self) -> int:
        """Number of tokens per ring."""
        return 2 * self.compress_block

    @cached_property
    def token_bytes(self) -> int:
        """Bytes per element of raw keys, raw values and compressed values."""
        return 1 if self.fp8 else 2

    @cached_property
    def scales_at(self) -> int:
        """Offset of a strip's scales in a stage. In memory, the scales
        are after the tokens of the strip.
        """
        return STRIP * max(self.D, self.Dv)

    @cached_property
    def cluster_warps(self) -> int:
        return self.variant.cluster * self.variant.warps

    # Maximum numbers of strips per warp.

    @cached_property
    def compressed_strips(self) -> int:
        strips = cdiv(self.variant.capacity * self.per_page, STRIP)
        return cdiv(cdiv(strips, self.variant.cluster), self.variant.warps)

    @cached_property
    def sliding_strips(self) -> int:
        """The number of strips of the sliding branch, not counting `spare_strips`."""
        return cdiv(cdiv(self.window, STRIP), self.cluster_warps)

    @cached_property
    def spare_strips(self) -> int:
        """1 if a window that begins within a strip can have more strips than the
        `sliding_strips` of all warps together, otherwise 0. The last warp of the cluster has
        the additional strip.
        """
        strips = cdiv(self.window + STRIP - 1, STRIP) if self.window else 0
        return cdiv(strips, self.cluster_warps) - self.sliding_strips

    @cached_property
    def selected_strips(self) -> int:
        return cdiv(self.n * self.block // STRIP, self.cluster_warps)

    # Shared memory of a CTA.

    @cached_property
    def kept_strips(self) -> int:
        """The number of strips whose logits a warp stores.

        The compressed strips come first, and the sliding strips follow. The logits of selected
        strips later overwrite the logits of compressed strips.
        """
        return max(self.compressed_strips, self.selected_strips) + self.sliding_strips

    @cached_property
    def stage_bytes(self) -> int:
        """The number of bytes of a stage, which holds a strip of keys or of values."""
        return STRIP * max(self.D, self.Dv) * 2

    @cached_property
    def ring_bytes(self) -> int:
        """Bytes of a warp's ring buffer."""
        return self.variant.stages * self.stage_bytes

    @cached_property
    def slice(self) -> int:
        """The number of elements of the output `[16, Dv]` that a CTA adds up, a multiple of 4.
        The last CTA may have fewer elements.
        """
        return 4 * cdiv(HEADS * self.Dv // 4, self.variant.cluster)

    @cached_property
    def found_slots(self) -> int:
        """Number of slots for the best blocks of a warp."""
        return 16 if self.free <= 16 else LANES

    @property
    def offsets(self) -> dict[str, int]:
        """The byte offset of each part of shared memory, and the end of all parts.

        The part `found` reuses the memory of the scores, which the warps of the CTA have already
        read. The statistics of the selected branch reuse the memory of the statistics of the
        compressed branch. A warp with compressed strips reads the statistics of the compressed
        branch before it writes scores to other CTAs. No warp starts the selected branch before it
        has all scores. The part `partial_out` reuses the memory from the part `sliding_stats` on,
        since every warp of the cluster has read this memory before the third exchange ends.
        """
        capacity, warps = self.variant.capacity, self.variant.warps
        stats = self.cluster_warps * STAT_BYTES
        partial_out = 4 * self.variant.cluster * self.slice
        scored = cdiv(capacity * self.per_page, STRIP) * STRIP // self.per_page
        best = 8 * warps * self.found_slots
        sizes = {
            "ring": warps * self.ring_bytes,
            "logits": (warps * self.kept_strips + self.spare_strips) * TILE_BYTES,
            "table": 4 * capacity,
            "new_pages": 4 * NEW_PAGES,
            "stats": stats,
            "sliding_stats": stats,
            "scores": max(8 * max(scored, capacity + 1), best + 4 * LANES),
        }
        at, found = 0, {}
        for name, size in sizes.items():
            found[name] = at
            at += cdiv(size, 64) * 64
        found["found"] = found["scores"]
        found["winners"] = found["found"] + best
        found["partial_out"] = found["sliding_stats"]
        found["barriers"] = max(at, found["partial_out"] + partial_out)
        return found | {"end": found["barriers"] + 8 * BARRIERS}

    @cached_property
    def resident(self) -> int:
        """The number of clusters that an H100 runs at once.

        An SM runs two CTAs if registers and shared memory suffice.
        """
        shared = self.variant.warps == 4 and self.offsets["end"] <= HALF_SM
        return CLUSTERS[self.variant.cluster] * (2 if shared else 1)


def why_not(spec: Decode) -> str | None:
    """Return the reason why no kernel supports the sizes, or None."""
    limits = {
        "q_len": (spec.q_len, range(1, 9), "1 to 8"),
        "H / Hkv": (spec.G, range(1, HEADS + 1), f"1 to {HEADS}"),
        "D": (spec.D, range(32, WIDEST_KEY + 1, 32), f"a multiple of 32 up to {WIDEST_KEY}"),
        "Dv": (spec.Dv, range(64, WIDEST_VALUE + 1, 64), f"64 or {WIDEST_VALUE}"),
        "num_selected": (spec.n, range(1, LANES + 1), f"1 to {LANES}"),
        "select_block / compress_stride": (spec.per_page, (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16"),
        "select_block": (spec.block, (16, 32, 64, 128, 256), "16, 32, 64, 128 or 256"),
        "capacity": (
            spec.variant.capacity,
            range(STRIP, 2**16, STRIP),
            f"a multiple of {STRIP}",
        ),
        "cluster": (spec.variant.cluster, (2, 3, 4, 8, 16), "2, 3, 4, 8 or 16"),
        "warps": (spec.variant.warps, (4, 8), "4 or 8"),
        "stages": (spec.variant.stages, (2, 3, 4, 8), "2, 3, 4 or 8"),
        "dtype": (spec.dtype, ("bfloat16", "float16"), "bfloat16 or float16"),
        "gates": (spec.gate_dtype, GATE_DTYPES, ", ".join(GATE_DTYPES)),
    }
    for name, (value, allowed, words) in limits.items():
        if value not in allowed:
            return f"the decode kernel needs {name} to be {words}, got {value}"
    if spec.H % spec.Hkv:
        return f"the decode kernel needs H to be a multiple of Hkv, got {spec.H} and {spec.Hkv}"
    if spec.fp8:
        if spec.dtype != "bfloat16":
            return f"the decode kernel needs bfloat16 with pages in fp8, got {spec.dtype}"
        if spec.D % 64:
            return (
                f"the decode kernel needs D of 64, 128 or 192 with pages in fp8, got {spec.D}"
            )
        if spec.per_page % 4:  # scales are copied four at a time
            return (
                "the decode kernel needs select_block / compress_stride of 4, 8 or 16 with pages "
                f"in fp8, got {spec.per_page}"
            )
    if spec.table_pages > spec.variant.capacity and not spec.any_length:
        most, got = spec.variant.capacity, spec.table_pages
        return f"the decode kernel supports page tables of up to {most} columns, got {got}"
    if (needed := spec.offsets["end"]) > SMEM:
        return f"the decode kernel has {SMEM} bytes of shared memory, needs {needed}"
    return None


@described
def decode(spec: Decode) -> Kernel:
    """Describe the kernel of one decode step.

    In the list of inputs, `length` is `lengths[b]`, but at most the capacity of the page table.

    Inputs:
    - `query` `[tokens, H, D]`: token `t` of row `b` has index `q_len * b + t` and position
      `length - q_len + t`.
    - `gates` `[tokens, H, 3]`, of the compressed, the selected and the sliding branch.
    - `page_table` int32 `[B, table_pages]`: entries past a row's pages may have any value.
    - `lengths` int32 `[B]`: the number of tokens of each row; 0 is padding.
    - `compressed_key` `[pages, per_page, Hkv, D]` and `compressed_value`.
    - `selected_key` `[pages, block, Hkv, D]` and `selected_value`; `sliding_key` and
      `sliding_value`, which may be the same arrays.
    - If `fp8` is true, all pages except `compressed_key` are float8_e4m3fn. If `fp8` is true, the
      next inputs are float32 `compressed_value_scale` `[pages, Hkv, per_page]`,
      `selected_key_scale` `[pages, Hkv, block]`, `selected_value_scale`, `sliding_key_scale` and
      `sliding_value_scale`.
    - With `append`: `new_raw_key`, `new_raw_value`, `new_selected_key`, .. `[tokens, Hkv, .]`, the
      new tokens. The step writes the new tokens, and the means of the windows that the new tokens
      complete, to the pages. `raw_key` and `raw_value` are the pages of raw tokens, and may be the
      same arrays as `selected_key` and `selected_value`. A token without a page is not written.
      If `fp8` is true, the kernel also reads `raw_key_scale` and `raw_value_scale`, and the rings
      `recent_key` and `recent_value` `[rings, 2 l, Hkv, .]`. The ring of each row is in int32
      `slots` `[B]`.

    Outputs: `out` `[tokens, H, Dv]`, and int32 `indices` `[tokens, Hkv, n]`: the blocks that each
    token selected, ascending, -1 in empty slots. For a token before position 0, `out` is 0 and
    `indices` is -1.

    Raises:
      NotImplementedError: No kernel supports the sizes (`why_not`).
    """
    if reason := why_not(spec):
        raise NotImplementedError(reason)
    heads, kinds = (spec.tokens, spec.H), {"key": spec.D, "value": spec.Dv}
    page_dtype = FP8 if spec.fp8 else spec.dtype
    pages, scales = {}, {}
    for branch, rows in (
        ("compressed", spec.per_page),
        ("selected", spec.block),
        ("sliding", spec.block),
    ):
        for kind, width in kinds.items():
            array = f"{branch}_{kind}"
            rounded = spec.fp8 and array != "compressed_key"
            dtype = FP8 if rounded else spec.dtype
            pages[array] = Array((spec.pages, rows, spec.Hkv, width), dtype)
            if rounded:
                scales[f"{array}_scale"] = float32(spec.pages, spec.Hkv, rows)
    pages |= scales
    if spec.append:
        for branch in RAW:
            for kind, width in kinds.items():
                new = Array((spec.tokens, spec.Hkv, width), spec.dtype)
                pages[f"new_{branch}_{kind}"] = new
        for kind, width in kinds.items():
            pages[f"raw_{kind}"] = Array((spec.pages, spec.block, spec.Hkv, width), page_dtype)
    if spec.keeps:
        scale = float32(spec.pages, spec.Hkv, spec.block)
        pages |= {f"raw_{kind}_scale": scale for kind in kinds}
        for kind, width in kinds.items():
            shape = spec.rings, spec.ring, spec.Hkv, width
            pages[f"recent_{kind}"] = Array(shape, spec.dtype)
        pages["slots"] = int32(spec.B)
    rings = {"rings": spec.rings} if spec.keeps else {}
    return Kernel.named(
        spec,
        {
            "query": Array((*heads, spec.D), spec.dtype),
            "gates": Array((*heads, 3), spec.gate_dtype),
            "page_table": int32(spec.B, spec.table_pages),
            "lengths": int32(spec.B),
            **pages,
        },
        {
            "out": Array((*heads, spec.Dv), spec.dtype),
            "indices": int32(spec.tokens, spec.Hkv, spec.n),
        },
        sizes={"pages": spec.pages, "table_pages": spec.table_pages, **rings},
        grid=(spec.tokens * spec.Hkv * spec.variant.cluster,),
        cluster=spec.variant.cluster,
    )


@functools.lru_cache(1024)
def with_variant(spec: Decode) -> Decode:
    """Return `spec` with the variant for its batch and its page table.

    Among the variants with the smallest sufficient capacity, this function returns the first one
    with the fewest rounds of concurrent clusters. If no capacity is sufficient, the variant with
    the largest capacity is chosen, and `why_not` then returns the reason.
    """
    for _, variants in itertools.groupby(VARIANTS, lambda x: x.capacity):
        each = [dataclasses.replace(spec, variant=x) for x in variants]
        if found := [x for x in each if not why_not(x)]:
            return min(found, key=lambda x: cdiv(spec.tokens * spec.Hkv, x.resident))
    return dataclasses.replace(spec, variant=VARIANTS[-1])

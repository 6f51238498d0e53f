"""One decode step over a paged cache: three branches, their gates and the choice, in one launch.

A page is a selection block: `block` raw tokens and `block / stride` compressed ones. Compressed
token `i` lies in slot `i + compress_block / stride - 1` of its row, slot `s` in place
`s % per_page` of page `s // per_page`: the page of its last raw token.

A cluster of `cluster` CTAs of `warps` warps serves one query token and one key/value head. A
warp takes strips of 16 keys. Of the sizes of a problem only `capacity` compiles anything: the
pages of a row, of which shared memory keeps the numbers, the scores and the logits.
"""

import dataclasses
import functools
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs.tile import LANES, SMEM_BYTES, cdiv

STRIP = 16  # keys that a product of a warp takes
HEADS = 16  # query rows of a product; those beyond the group are idle
WARP_COPY_BYTES = 512  # bytes that the lanes of a warp copy together, 16 each
TILE_BYTES = 4 * HEADS * STRIP  # logits of a strip
STAT_BYTES = 8 * HEADS  # maximum and sum of each row
NEW_PAGES = 2  # that a row's new tokens lie in at most
BARRIERS = 8  # the last words of shared memory; four are used
WIDEST_KEY, WIDEST_VALUE = 192, 128
RAW = "raw", "selected", "sliding"  # branches with rows of single tokens
FP8 = "float8_e4m3fn"
GATE_DTYPES = "float32", "bfloat16", "float16"


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one compiled kernel has of the machine.

    Attributes:
      cluster: CTAs.
      warps: of a CTA.
      stages: of a warp's ring.
      capacity: pages of a row at most.
    """

    cluster: int
    warps: int
    stages: int
    capacity: int


# What is compiled. Of a capacity, the first ones take the least time alone, the later ones serve
# more clusters at once.
VARIANTS = (
    Variant(8, 4, 2, 128),
    Variant(4, 4, 4, 128),
    Variant(4, 4, 2, 128),
    Variant(2, 4, 2, 128),
    Variant(4, 8, 2, 128),  # where D is so wide that half an SM is not enough
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
# Clusters that an H100 runs at once with an SM for each CTA, by CTAs of a cluster, as
# `cuOccupancyMaxActiveClusters` has it; of 4, 8 and 16 one less, since chips differ in which SMs
# they lack.
CLUSTERS = {2: 66, 3: 39, 4: 30, 8: 14, 16: 6}
SMEM = SMEM_BYTES - 1024  # of a CTA, beside what Mosaic aligns it by and a word of its own
HALF_SM = SMEM_BYTES // 2 - 1024  # of shared memory, where two CTAs share an SM


@dataclasses.dataclass(frozen=True)
class Decode:
    """Static sizes; at a launch `B`, `pages` and `table_pages` are numbers alone.

    Attributes:
      q_len: tokens of a row, the last of which is the row's newest.
      pages: of the pool.
      table_pages: columns of the page table.
      gate_dtype: float32 or one of 16 bits.
      variant: cluster, warps, stages and capacity.
      append: whether the step puts its new tokens in their pages.
      fp8: whether all pages but those of compressed keys are in 8 bits, with scales.
      rings: of the newest tokens of rows, where a step appends to such pages.
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
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with a nominal batch, pool and table."""
        lengths = dict.fromkeys(("B", "pages", "table_pages"), NOMINAL_LENGTH)
        lengths["rings"] = NOMINAL_LENGTH if self.keeps else 0
        return dataclasses.replace(self, any_length=True, **lengths)

    @property
    def tokens(self) -> int:
        return self.B * self.q_len

    @property
    def G(self) -> int:
        """Query heads of a key/value head."""
        return self.H // self.Hkv

    @property
    def per_page(self) -> int:
        """Compressed slots of a page."""
        return self.block // self.stride

    @property
    def cover(self) -> int:
        """Strides of a compressed token."""
        return self.compress_block // self.stride

    @property
    def free(self) -> int:
        """Blocks that are chosen by score."""
        return self.n - self.num_initial - self.num_local

    @property
    def keeps(self) -> bool:
        """Whether the step puts its tokens in rings too."""
        return self.append and self.fp8

    @property
    def ring(self) -> int:
        """Tokens of a ring."""
        return 2 * self.compress_block

    @property
    def token_bytes(self) -> int:
        """Of an element of a token's keys or values, and of compressed values."""
        return 1 if self.fp8 else 2

    @property
    def scales_at(self) -> int:
        """Where in a stage the scales of a strip of tokens lie, behind it."""
        return STRIP * max(self.D, self.Dv)

    @property
    def cluster_warps(self) -> int:
        return self.variant.cluster * self.variant.warps

    # Strips of a warp, at most.

    @property
    def compressed_strips(self) -> int:
        strips = cdiv(self.variant.capacity * self.per_page, STRIP)
        return cdiv(cdiv(strips, self.variant.cluster), self.variant.warps)

    @property
    def sliding_strips(self) -> int:
        """But for `spare_strips`."""
        return cdiv(cdiv(self.window, STRIP), self.cluster_warps)

    @property
    def spare_strips(self) -> int:
        """One more of the cluster's last warp, where a window can begin within a strip."""
        strips = cdiv(self.window + STRIP - 1, STRIP) if self.window else 0
        return cdiv(strips, self.cluster_warps) - self.sliding_strips

    @property
    def selected_strips(self) -> int:
        return cdiv(self.n * self.block // STRIP, self.cluster_warps)

    # Shared memory of a CTA.

    @property
    def kept_strips(self) -> int:
        """Whose logits a warp keeps: compressed, later selected; sliding behind them."""
        return max(self.compressed_strips, self.selected_strips) + self.sliding_strips

    @property
    def stage_bytes(self) -> int:
        """A strip of keys or of values."""
        return STRIP * max(self.D, self.Dv) * 2

    @property
    def ring_bytes(self) -> int:
        """Of a warp."""
        return self.variant.stages * self.stage_bytes

    @property
    def slice(self) -> int:
        """Floats of the output `[16, Dv]` that a CTA adds up, in fours; the last one has fewer
        where they do not come out even.
        """
        return 4 * cdiv(HEADS * self.Dv // 4, self.variant.cluster)

    @property
    def found_slots(self) -> int:
        """Of the best blocks that a warp finds."""
        return 16 if self.free <= 16 else LANES

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part of shared memory begins, and where all end.

        What warps find lies over the scores, which the warps of the CTA have read before. The
        selected branch's statistics lie over those of the compressed one: a warp that has strips of
        it read them before it pushed scores, and without these no warp goes on to the selected
        branch. `partial_out` lies over what lies behind: every warp of the cluster has read that
        before the third exchange ends.
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

    @property
    def resident(self) -> int:
        """Clusters that an H100 runs at once: two CTAs an SM where registers and memory allow."""
        shared = self.variant.warps == 4 and self.offsets["end"] <= HALF_SM
        return CLUSTERS[self.variant.cluster] * (2 if shared else 1)


def why_not(spec: Decode) -> str | None:
    """Why there is no such kernel, or None."""
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
            return f"the decode kernel takes {name} of {words}, got {value}"
    if spec.H % spec.Hkv:
        return f"the decode kernel takes H of a multiple of Hkv, got {spec.H} and {spec.Hkv}"
    if spec.fp8:
        if spec.dtype != "bfloat16":
            return f"the decode kernel takes bfloat16 beside pages in fp8, got {spec.dtype}"
        if spec.D % 64:
            return f"the decode kernel takes D of 64, 128 or 192 of pages in fp8, got {spec.D}"
        if spec.per_page % 4:  # scales are copied four at a time
            return (
                "the decode kernel takes select_block / compress_stride of 4, 8 or 16 of pages in "
                f"fp8, got {spec.per_page}"
            )
    if spec.table_pages > spec.variant.capacity and not spec.any_length:
        most, got = spec.variant.capacity, spec.table_pages
        return f"the decode kernel takes page tables of up to {most} columns, got {got}"
    if (needed := spec.offsets["end"]) > SMEM:
        return f"the decode kernel has {SMEM} bytes of shared memory, needs {needed}"
    return None


@described
def decode(spec: Decode) -> Kernel:
    """One decode step; `length` is `lengths[b]`, at most what the page table holds.

    Inputs:

    - `query` `[tokens, H, D]`: token `t` of row `b`, at `q_len * b + t`, stands at position
      `length - q_len + t`.
    - `gates` `[tokens, H, 3]`, of the compressed, the selected and the sliding branch.
    - `page_table` int32 `[B, table_pages]`: entries past a row's pages may be anything.
    - `lengths` int32 `[B]`: 0 is padding.
    - `compressed_key` `[pages, per_page, Hkv, D]` and `compressed_value`.
    - `selected_key` `[pages, block, Hkv, D]` and `selected_value`; `sliding_key` and
      `sliding_value`, which may be the same arrays.
    - of pages in `fp8`: these arrays but `compressed_key` are float8_e4m3fn, and behind them come
      float32 `compressed_value_scale` `[pages, Hkv, per_page]`, `selected_key_scale` `[pages, Hkv,
      block]`, `selected_value_scale`, `sliding_key_scale` and `sliding_value_scale`.
    - of a step that appends: `new_raw_key`, `new_raw_value`, `new_selected_key`, .. `[tokens, Hkv,
      .]`, which it writes to the pages, with the means of raw ones that they finish; `raw_key` and
      `raw_value`, pages of these, which may be the selected ones. A token without a page is not
      written. To pages in `fp8`: also `raw_key_scale` and `raw_value_scale`, and of the rings
      `recent_key`, `recent_value` `[rings, 2 l, Hkv, .]` and int32 `slots` `[B]`.

    Outputs: `out` `[tokens, H, Dv]`, and int32 `indices` `[tokens, Hkv, n]`: the blocks that
    each token selected, ascending, -1 in empty places. A token before position 0 has zeros and
    -1.

    Raises:
      NotImplementedError: there is no such kernel (`why_not`).
    """
    if reason := why_not(spec):
        raise NotImplementedError(reason)
    heads = spec.tokens, spec.H
    pages, scales = {}, {}
    for branch, rows in (
        ("compressed", spec.per_page),
        ("selected", spec.block),
        ("sliding", spec.block),
    ):
        for name, width in (("key", spec.D), ("value", spec.Dv)):
            shape, array = (spec.pages, rows, spec.Hkv, width), f"{branch}_{name}"
            rounded = spec.fp8 and array != "compressed_key"
            pages[array] = Array(shape, FP8 if rounded else spec.dtype)
            if rounded:
                scales[f"{array}_scale"] = Array((spec.pages, spec.Hkv, rows), "float32")
    pages |= scales
    if spec.append:
        for name, rows, width in _appended(spec):
            places = (spec.pages, rows) if rows else (spec.tokens,)
            dtype = FP8 if rows and spec.fp8 else spec.dtype
            pages[name] = Array((*places, spec.Hkv, width), dtype)
    if spec.keeps:
        shape = spec.pages, spec.Hkv, spec.block
        pages |= {f"raw_{kind}_scale": Array(shape, "float32") for kind in ("key", "value")}
        for kind, width in (("key", spec.D), ("value", spec.Dv)):
            pages[f"recent_{kind}"] = Array(
                (spec.rings, spec.ring, spec.Hkv, width), spec.dtype
            )
        pages["slots"] = Array((spec.B,), "int32")
    return Kernel.named(
        "decode",
        spec,
        "kernels_pallas.mosaic.decode:decode",
        {
            "query": Array((*heads, spec.D), spec.dtype),
            "gates": Array((*heads, 3), spec.gate_dtype),
            "page_table": Array((spec.B, spec.table_pages), "int32"),
            "lengths": Array((spec.B,), "int32"),
            **pages,
        },
        {
            "out": Array((*heads, spec.Dv), spec.dtype),
            "indices": Array((spec.tokens, spec.Hkv, spec.n), "int32"),
        },
        sizes={"pages": spec.pages, "table_pages": spec.table_pages}
        | ({"rings": spec.rings} if spec.keeps else {}),
        grid=(spec.tokens * spec.Hkv * spec.variant.cluster,),
        cluster=spec.variant.cluster,
        source="kernels_pallas.specs.decode:decode",
    )


def _appended(spec: Decode) -> list[tuple[str, int, int]]:
    """Of each array of a step that appends: rows of a page (0: new tokens), and width."""
    widths = ("key", spec.D), ("value", spec.Dv)
    new = [(f"new_{branch}_{kind}", 0, n) for branch in RAW for kind, n in widths]
    return new + [(f"raw_{kind}", spec.block, n) for kind, n in widths]


@functools.lru_cache(1024)
def with_variant(spec: Decode) -> Decode:
    """`spec` with the variant for its batch and its page table.

    Of the least capacity that is enough: where clusters wait for others, they take that much
    longer, so the fewest rounds of them, and of these the first. Where none fits, that of the
    most pages, of which `why_not` says why.
    """
    clusters, found = spec.tokens * spec.Hkv, []
    for variant in VARIANTS:
        each = dataclasses.replace(spec, variant=variant)
        if not why_not(each):
            found.append((variant.capacity, cdiv(clusters, each.resident), each))
    if not found:
        return dataclasses.replace(spec, variant=VARIANTS[-1])
    return min(found, key=lambda x: x[:2])[-1]

"""A paged cache for decoding and serving in torch, and the function `append`, which writes tokens
to the cache.

The caller manages the pool of pages and the page table of each row, as serving engines do with a
page allocator. Shapes are static, and the host reads no tensor, so that one CUDA graph serves rows
that grow, shrink, end or begin. A row whose length is 0 is padding.

The function `append` writes new tokens to pages, together with the compressed tokens that the new
tokens complete. `paged_attention` reads the pages (`paged_attend.py`). The counterpart in JAX is
`nsa_jax.paged`. `nsa_core.paged_layout` describes the layout.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from nsa_interop.launch import ALIGNMENT, launch
from torch import Tensor

from kernels_pallas.mosaic.capability import HOPPER
from kernels_pallas.runtime import loaded
from kernels_pallas.specs import append as specs
from kernels_pallas.triton import capability, decode_descriptions
from nsa_core import paged_append, paged_layout, validate
from nsa_core.cache_contents import UNSAID, Contents, Facts, facts_of
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.layer import LayerSpec
from nsa_core.paged_layout import PAGES, PagedArrays
from nsa_core.steps import mosaic_append
from nsa_core.types import Branches
from nsa_core.validate import dtype_name
from nsa_torch import checks
from nsa_torch.compress import apply_phi
from nsa_torch.operators import refuse_transforms, requires_grad
from nsa_torch.torch_ops import FP8, capability_of, readable
from nsa_torch.torch_ops import TORCH_OPS as OPS

APPENDERS = "mosaic", "triton", "torch"
MAX_ROWS = 64
# The fields of a cache that the arguments of `PagedCache.view` fill.
ARRAY_OF = {f"{kind}_pages": f"selected_{kind}" for kind in ("key", "value")}
ARRAY_OF |= {f"{kind}_scale": f"selected_{kind}_scale" for kind in ("key", "value")}


class PagedCache(PagedArrays):
    """The pages of one layer's cache. `PagedArrays` lists the tensors of the cache, which are
    zeros at first.

    Args:
      num_pages: number of pages, with `config.select_block` tokens each.
      kv_heads, key_width, value_width: Hkv, D and Dv.
      config: the sizes of the layer, which also determine the compressed tokens.
      dtype: dtype of the stored tokens. With `torch.float8_e4m3fn`, the function `append` rounds
        all tokens except compressed keys (`nsa_core.rounding`).
      device: device of the tensors; None means torch's default.
      separate: whether each branch has its own keys and values (`Branches`), which triples the
        memory for raw tokens.
      compressed_dtype: for a cache in fp8, the dtype of compressed keys, new tokens and queries.
        `compressed_dtype=None` means bfloat16.
      max_rows: for a cache in fp8, the number of rows whose newest `2 l` tokens are stored
        unrounded.

    Attributes:
      apart: The stride between two pages of this cache in the tensors, in units of pages. `apart`
        is above 1 if other pages are between the pages of this cache (`view`).

    Raises:
      ValueError: A size is not a positive int, or the dtype is not supported.
      NotImplementedError: `config` has a `compute_dtype`.
    """

    apart = 1

    def __init__(
        self,
        num_pages: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        *,
        config: NSAConfig = NSAConfig(),
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        separate: bool = False,
        compressed_dtype: torch.dtype | None = None,
        max_rows: int = MAX_ROWS,
    ):
        sizes = num_pages, kv_heads, key_width, value_width, config, separate
        how = dtype, compressed_dtype, max_rows
        super().__init__(config, **_allocated({}, checks.device(device), *how, *sizes))

    @classmethod
    def view(
        cls,
        key_pages: Tensor,
        value_pages: Tensor,
        *,
        config: NSAConfig = NSAConfig(),
        compressed_key: Tensor | None = None,
        compressed_value: Tensor | None = None,
        separate: bool = False,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        compressed_dtype: torch.dtype = torch.bfloat16,
        max_rows: int = MAX_ROWS,
    ) -> Self:
        """Make a cache on pages that a serving engine owns, without copying the pages. Other pages,
        such as the pages of other layers, may be between the given pages. For example, pages of
        keys and values alternate in `[P, 2, l', Hkv, D]`. If all given arrays have the same stride
        between pages, kernels read the arrays in place. With a common stride, the tensors of the
        cache include the pages in between, and tensors that this method allocates have the same
        number of pages.

        Args:
          key_pages, value_pages: `[P, l', Hkv, D]`, `[P, l', Hkv, Dv]`, of the selected branch.
          config: as in `PagedCache`.
          compressed_key, compressed_value: `[P, l'/d, Hkv, .]`; None means that zeros are
            allocated.
          separate: whether each branch has its own keys and values. With `separate`, this method
            allocates the pages for the other branches.
          key_scale, value_scale: for pages in fp8, float32 `[P, Hkv, l']`, per token and head.
          compressed_dtype, max_rows: for pages in fp8, as in `PagedCache`. This method allocates
            the other tensors of an fp8 cache.

        Raises:
          ValueError: Shapes or dtypes do not fit. For example, the error is raised if pages do
            not have `config.select_block` tokens, or if fp8 pages have no scales.
        """
        validate.configuration(config)
        given: dict[str, Any] = {"key_pages": key_pages, "value_pages": value_pages}
        given |= checks.present(
            compressed_key=compressed_key,
            compressed_value=compressed_value,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        checks.tensors(**given)
        for name, x in given.items():
            axes = 3 if name.endswith("_scale") else 4
            validate.array(name, x, axes, paged_layout.PAGE_DTYPES)
            if name in ("key_pages", "value_pages") and x.shape[1] != config.select_block:
                raise ValueError(
                    f"{name} must have pages of select_block={config.select_block} tokens, "
                    f"got {x.shape[1]}"
                )
        if (compressed_key is None) != (compressed_value is None):
            raise ValueError(
                "compressed_key and compressed_value must both be given or both be None"
            )
        is_fp8 = key_pages.dtype is FP8
        if is_fp8 and (key_scale is None or value_scale is None or compressed_key is not None):
            raise ValueError(
                "key_pages of float8_e4m3fn must have key_scale and value_scale, and "
                "compressed_key must be None"
            )
        compressed_dtype = compressed_dtype if is_fp8 else key_pages.dtype
        given = {ARRAY_OF.get(name, name): x for name, x in given.items()}
        apart = _pages_apart(list(given.values()))
        if apart > 1:
            given = {k: _with_gaps(x, apart) for k, x in given.items()}
        pages, _, kv_heads, key_width = given["selected_key"].shape
        sizes = pages, kv_heads, key_width, value_pages.shape[3], config, separate
        how = key_pages.device, key_pages.dtype, compressed_dtype, max_rows
        cache = cls.of(config, **_allocated(given, *how, *sizes))
        cache.apart = apart
        paged_layout.check_pages(cache)
        return cache

    @classmethod
    def carve(
        cls,
        memory: Tensor,
        kv_heads: int,
        key_width: int,
        value_width: int,
        *,
        config: NSAConfig = NSAConfig(),
        separate: bool = False,
    ) -> Self:
        """Make a cache with the maximum number of pages that fit in a given block of memory.

        Args:
          memory: `[elements]`, contiguous, in the dtype of the cache. This method does not change
            the content of `memory`. The tensors of the cache use parts of `memory`, one after the
            other. A page needs `paged_layout.page_elements` elements over all tensors.
          kv_heads, key_width, value_width, config, separate: as in `PagedCache`.

        Raises:
          ValueError: `memory` is not a contiguous tensor with one axis, or is smaller than a
            page.
        """
        sizes = kv_heads, key_width, value_width, config, separate
        checks.tensors(memory=memory)
        validate.array("memory", memory, 1)
        if not memory.is_contiguous():
            raise ValueError(f"memory must be contiguous, got strides {memory.stride()}")
        page = paged_layout.page_elements(*sizes)
        if memory.shape[0] < page:
            raise ValueError(
                f"memory must have at least the {page} elements of a page, got {memory.shape[0]}"
            )
        begin, arrays = 0, {}
        for name, shape in paged_layout.shapes(memory.shape[0] // page, *sizes).items():
            if shape is not None:
                end = begin + math.prod(shape)
                arrays[name], begin = memory[begin:end].view(shape), end
        return cls.of(config, **arrays)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a cache with `function` applied to each tensor."""
        cache = copy.copy(self)
        for name, x in self.tensors().items():
            setattr(cache, name, function(x))
        return cache

    def reset(self) -> None:
        """Clear the record of how the tokens were computed. The pages keep their contents."""
        self.contents = UNSAID

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, for example when a row forks in the middle of a page. `source` and
        `target` are page indices, int32 or int64 `[K]`, from 0. Forked rows share earlier pages
        through their page tables. To crop a row, pass a shorter length to the next call.
        """
        _check_numbers(source, target, self.own_pages)
        for name, x in self.tensors().items():
            if name in PAGES:
                x[target * self.apart] = x[source * self.apart]

    @property
    def own_pages(self) -> int:
        """The number of pages that belong to this cache, without other pages between them."""
        return -(-self.num_pages // self.apart)

    def in_memory(self, page_table: Tensor) -> Tensor:
        """Convert a page table to indices into the cache's tensors. The tensors may include other
        pages."""
        if self.apart == 1 or not isinstance(page_table, Tensor):
            return page_table
        return page_table.clamp(-1, self.own_pages) * self.apart

    def copy_recent(self, source: Tensor, target: Tensor) -> None:
        """In an fp8 cache, copy the buffers with the unrounded newest tokens of forked rows.
        `source` and `target` are indices `[K]` of buffers, as in the argument `slots` of the
        function `append`. Without `copy_recent`, up to `l / d` of the fork's next compressed tokens
        are computed from rounded tokens.
        """
        for x in (self.recent_key, self.recent_value):
            if x is not None:
                _check_numbers(source, target, x.shape[0])
                x[target] = x[source]

    def first_slots(self, rows: int) -> Tensor:
        """Return the index of the default buffer of newest tokens for each row of a call, int32
        `[rows]`. By default row `b` uses buffer `b`.
        """
        found, ring = getattr(self, "_slots", None), self.recent_key
        if found is None or found.shape[0] != ring.shape[0]:
            found = torch.arange(ring.shape[0], dtype=torch.int32, device=ring.device)
            if not (ring.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._slots = found
        return found[:rows]


def block_elements(spec: LayerSpec) -> int:
    """Return the number of elements that a layer stores per block of `select_block` tokens."""
    sizes = spec.n_kv_groups, spec.d_k, spec.d_v, spec.config, spec.separate
    return paged_layout.page_elements(*sizes) + math.prod(spec.kept_keys)


def carve_blocks(memory: Tensor, blocks: int, spec: LayerSpec) -> tuple[PagedCache, Tensor]:
    """Divide `memory` [elements] into two parts: the pages of `blocks` blocks of a layer, and the
    projected keys that `KeyConvolution.in_pages` stores per block.
    """
    memory = memory[: blocks * block_elements(spec)]
    kept = blocks * math.prod(spec.kept_keys)
    pages, newest = memory.split_with_sizes([len(memory) - kept, kept])
    options: Any = {"config": spec.config, "separate": spec.separate}
    made = PagedCache.carve(pages, spec.n_kv_groups, spec.d_k, spec.d_v, **options)
    return made, newest.view(blocks, *spec.kept_keys)


def _allocated(
    given: dict[str, Any], device: torch.device, dtype, compressed_dtype, *rest: Any
) -> dict[str, Any]:
    """Return the arrays of a cache. Arrays that are not in `given` are allocated and filled with
    zeros. `rest` has the other arguments of `new_arrays`.
    """
    for name, x in (("dtype", dtype), ("compressed_dtype", compressed_dtype or dtype)):
        if not isinstance(x, torch.dtype):
            raise ValueError(f"{name} must be a torch.dtype, got {x!r}")

    def zeros(name, shape, dtype):
        return None if name in given else torch.zeros(shape, dtype=dtype, device=device)

    name_of = lambda dtype: str(dtype).removeprefix("torch.")
    how = zeros, dtype, compressed_dtype, *rest
    return paged_layout.new_arrays(torch, name_of, *how) | given


def _check_numbers(source: Tensor, target: Tensor, count: int) -> None:
    """Check that `source` and `target` are indices below `count`."""
    checks.tensors(source=source)
    checks.tensors(target=target)
    paged_layout.check_copied(source, target)
    for name, numbers in (("source", source), ("target", target)):
        checks.within(name, numbers, 0, count - 1)


def _pages_apart(arrays: Sequence[Tensor]) -> int:
    """Return the stride between pages, in units of pages. If the arrays have different strides,
    return 1.
    """
    size = lambda x: x[0].numel()
    if any(x.shape[0] < 2 or not x[0].is_contiguous() or size(x) == 0 for x in arrays):
        return 1
    if any(x.stride(0) % size(x) for x in arrays):
        return 1
    found = {x.stride(0) // size(x) for x in arrays}
    return max(found.pop(), 1) if len(found) == 1 else 1


def _with_gaps(pages: Tensor, apart: int) -> Tensor:
    """Return `pages` together with the memory between the pages, as one contiguous tensor."""
    shape = (pages.shape[0] - 1) * apart + 1, *pages.shape[1:]
    return pages.as_strided(shape, (pages[0].numel(), *pages.stride()[1:]))


def append(
    cache: PagedCache,
    key: Tensor | Branches[Tensor],
    value: Tensor | Branches[Tensor],
    page_table: Tensor,
    lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    params: tuple[CompressParams, CompressParams] | None = None,
    made_with: Facts = (),
    slots: Tensor | None = None,
    implementation: Literal["mosaic", "triton", "torch"] | None = None,
) -> None:
    """Write new tokens to their pages in place, together with the compressed tokens that they
    complete.

    A token beyond the end of the row's page table, or with a negative entry in the table, is not
    written. Rows of length 0 write nothing. If a token's entry of the table is beyond the pool of
    pages, the call raises an error on a CPU or under `nsa_core.debug`. On a GPU without `debug`, a
    token whose entry is beyond the pool is not written. Two rows must not write to the same page. A
    row may begin with pages that another row fills in this call, except in a call of one token per
    row.

    Args:
      cache: the cache, which is modified in place.
      key, value: `[N, Hkv, D]`, `[N, Hkv, Dv]`, the new tokens of all rows, one row after the
        other. If the cache is `separate`, `key` and `value` are `Branches`.
      page_table: int32 `[B, M]`; entries that a row does not need may have any value.
      lengths: int32 `[B]`, tokens per row including the new ones. A row of length 0 is padding.
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first new token, then the number of new
        tokens of all rows. Tokens from the index `cu_seqlens_q[B]` on belong to no row.
        `cu_seqlens_q=None` means that each row has `N / B` new tokens.
      params: parameters of the compressors of keys and values (`nsa_core.compress_params`).
        `params=None` means that compressed tokens are means.
      made_with: as in `cached_attention`.
      slots: int32 `[B]`, only for a cache in fp8. `slots[b]`, below `max_rows`, is the index of the
        buffer that stores the newest tokens of row `b` unrounded. Two rows must not share a buffer,
        and a row must have the same buffer in all calls. A row with an index of `max_rows` or more
        has no buffer. `slots=None` means that row `b` uses buffer `b`. Means of tokens that are not
        in a buffer are computed from rounded tokens.
      implementation: `mosaic` or `triton`, which write the tokens in one launch, or `torch`. If
        compressed tokens are means, the launch also writes the compressed tokens. A second launch
        then follows if a row has several new tokens. Compressed tokens that are not means are
        computed by torch. `implementation=None` means the first of the three that can run, but
        `mosaic` only if its kernel is stored on disk.

    Raises:
      ValueError: Shapes, dtypes or devices do not fit the cache, or the cache was filled with
        parameters of another kind.
      NotImplementedError: An argument, or one of `params`, requires a gradient, or the named
        implementation cannot run. `NotImplementedError` is raised before any token is written.
    """
    paged_layout.check_cache(cache)
    given = page_table, lengths, cu_seqlens_q
    new = checked_tokens(cache, key, value, *given, params, made_with, slots)
    write_tokens(cache, new, cache.in_memory(page_table), *given[1:], slots, implementation)
    cache.contents = new.contents


def write_tokens(
    cache, new: "NewTokens", page_table, lengths, cu_seqlens_q, slots, implementation=None
) -> None:
    """Append the new tokens of a call whose arguments have been checked."""
    at, means = (page_table, lengths, cu_seqlens_q), new.are_means
    by_kernel = _kernel(cache, new.key, page_table, cu_seqlens_q, means, implementation)
    if by_kernel is not None:
        # Serving engines share prefixes, so that a row may begin with pages that another row
        # fills in the same call. A second launch therefore computes the means from the tokens
        # that the first has written. With one token per row this cannot occur.
        several = cu_seqlens_q is not None or new.key.selected.shape[0] > lengths.shape[0]
        by_kernel(cache, new.key, new.value, *at, means, slots, 1 + (means and several))
    if by_kernel is None or not means:
        rest = new.params, slots, None, by_kernel is not None
        paged_append.append(OPS, apply_phi, cache, new.key, new.value, *at, *rest)


class NewTokens(NamedTuple):
    """The checked new tokens of a call. `contents` describes the cache after these tokens are
    appended."""

    key: Branches[Tensor]
    value: Branches[Tensor]
    params: tuple[CompressParams, CompressParams]
    contents: Contents

    @property
    def are_means(self) -> bool:
        """Whether the compressed tokens are means, rather than results of a learned function."""
        return self.params == (None, None)

    def of(self, tokens: slice, rows: int) -> tuple[Branches, Branches]:
        """Return the keys and values of the selected and the sliding branch, `[rows, S, Hkv, .]`.
        All rows must have the same number of tokens.
        """

        def cut(x: Branches[Tensor]) -> Branches:
            selected, sliding = (
                readable(each[tokens]).unflatten(0, (rows, -1))
                for each in (x.selected, x.sliding)
            )
            return Branches(None, selected, selected if x.sliding is x.selected else sliding)

        return cut(self.key), cut(self.value)


def checked_tokens(
    cache: PagedCache,
    key: Tensor | Branches[Tensor],
    value: Tensor | Branches[Tensor],
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    params: tuple[CompressParams, CompressParams] | None,
    made_with: Facts,
    slots: Tensor | None = None,
) -> NewTokens:
    """Check the arguments of the function `append` and return the new tokens. The errors are the
    same as the errors of `append`.
    """
    given = {"key": key, "value": value, "page_table": page_table, "lengths": lengths}
    given |= checks.present(cu_seqlens_q=cu_seqlens_q, slots=slots)
    checks.tensors(cache.selected_key, "the cache", **given)
    key, value = (
        Branches(*(y.resolve_neg() for y in x))
        if isinstance(x, Branches)
        else Branches.each(x.resolve_neg())
        for x in (key, value)
    )
    at = page_table, lengths, cu_seqlens_q
    params = paged_layout.check_tokens(
        checks.read, cache, key, value, *at, params, slots, cache.own_pages
    )
    contents = cache.contents.with_facts(facts_of(params, made_with))
    learned = checks.parameters(params, cache.selected_key, "the cache")
    refuse_transforms(*key, *value)
    if requires_grad(*key, *value, *learned):
        raise NotImplementedError(
            "a paged cache has no gradient; call append under torch.no_grad()"
        )
    return NewTokens(key, value, params, contents)


def _kernel(cache, key, page_table, cu_seqlens_q, means, implementation) -> Any:
    """Return the function that writes the tokens with a kernel, or None if torch operations write
    the tokens.
    """
    if implementation not in (None, *APPENDERS):
        raise ValueError(
            f"implementation must be one of {', '.join(APPENDERS)} or None, got {implementation!r}"
        )
    unordered = [name for name, x in cache.tensors().items() if not x.is_contiguous()]
    call = cache, key, page_table, cu_seqlens_q, means
    for name in (implementation,) if implementation else APPENDERS:
        if name == "torch":
            return None
        why_not = mosaic_why_not if name == "mosaic" else triton_why_not
        reason = f"needs {unordered[0]} contiguous" if unordered else why_not(*call)
        ready = implementation or name == "triton"  # Triton builds its kernel at once
        if reason is None and not ready and not torch.compiler.is_compiling():
            ready = loaded.on_disk(specs.append(append_spec(*call).for_any_length()))
        if reason is None and ready:
            return append_by_mosaic if name == "mosaic" else append_by_triton
        if implementation:
            raise NotImplementedError(f"append: {name}: {reason}")
    return None


def mosaic_why_not(cache: PagedCache, *call: Any) -> str | None:
    """Return the reason why the Mosaic kernel does not support this call, or None. The
    arguments are the same as in `append_spec`.
    """
    device = cache.selected_key.device
    if device.type != "cuda":
        return f"needs a Hopper GPU, got {device.type}"
    if (found := capability_of(device.index)) != HOPPER:
        return f"needs compute capability {HOPPER}, got {found}"
    for name, x in cache.tensors().items():
        if x.data_ptr() % ALIGNMENT:
            return f"needs {name} to start at a multiple of {ALIGNMENT} bytes"
    return specs.why_not(append_spec(cache, *call))


def triton_why_not(cache: PagedCache, key, page_table, cu_seqlens_q, means) -> str | None:
    """Return the reason why the Triton kernel of the function `append` cannot run this call, or
    None."""
    if cache.is_fp8 and not means:
        return "supports a cache in fp8 only if compressed tokens are means"
    return append_why_not(cache)


def append_why_not(cache: PagedCache) -> str | None:
    """Return the reason why Triton kernels cannot read and write the pages of this cache, or
    None."""
    device = cache.selected_key.device
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, got {device.type}"
    found = capability_of(device.index)
    reason = capability.copies_why_not(found, cache.dtype)
    return reason or (capability.fp8_why_not(found) if cache.is_fp8 else None)


def append_spec(cache: PagedCache, key, page_table, cu_seqlens_q, means: bool) -> specs.Append:
    """Return the static sizes of the Mosaic kernel that runs this call of the function `append`."""
    (rows, pages), (_, _, _, width) = page_table.shape, cache.selected_value.shape
    return mosaic_append.append_spec(
        *(*key.selected.shape[1:], width, dtype_name(cache.selected_key), cache.config),
        N=key.selected.shape[0],
        B=rows,
        pages=cache.num_pages,
        table_pages=pages,
        separate=cache.separate,
        ragged=cu_seqlens_q is not None,
        means=means,
    )


def append_by_mosaic(
    cache, key, value, page_table, lengths, cu_seqlens_q, means, slots, launches
) -> None:
    """Write new tokens to their pages. If compressed tokens are means, also write the compressed
    tokens. The tensors of the cache must be contiguous, with more than 8 bits per element.
    """
    spec = append_spec(cache, key, page_table, cu_seqlens_q, means)
    if not spec.N:
        return
    new, pages = [key.selected, value.selected], [cache.selected_key, cache.selected_value]
    if cache.separate:
        new += [key.sliding, value.sliding, key.compressed, value.compressed]
        pages += [*cache.sliding, *cache.raw]
    new += [x for x in (page_table, lengths, cu_seqlens_q) if x is not None]
    if means:
        new += cache.raw
        pages += [cache.compressed_key, cache.compressed_value]
    given = [*map(readable, new)]
    for _ in range(launches):
        launch(specs.append(spec), *given, out=pages)


def append_by_triton(
    cache, key, value, page_table, lengths, cu_seqlens_q, means, slots, launches, ops=OPS
) -> None:
    """Write new tokens and means to their pages with Triton kernels, which also support caches in
    fp8.
    """
    flags = {"ragged": cu_seqlens_q is not None, "means": means, "slots": slots is not None}
    first, *others = decode_descriptions.append(
        cache, key.selected, value.selected, page_table, **flags
    )
    compressed, selected, sliding = zip(
        cache.sources("key"), cache.sources("value"), strict=True
    )
    raw = selected if cache.raw_key is None else ("raw_key", "raw_value")
    names = *selected, *sliding, *raw
    scales = [getattr(cache, f"{name}_scale") for name in (*names, compressed[1])]
    pairs = zip(key, value, strict=True)
    of_compressed, of_selected, of_sliding = ([x.contiguous() for x in each] for each in pairs)
    at = page_table, lengths, cu_seqlens_q, slots
    arrays = [
        *((lengths if x is None else x).contiguous() for x in at),
        (*of_selected, *of_sliding, *of_compressed),
        *(tuple(getattr(cache, x) for x in some) for some in (names, compressed)),
        *(
            tuple(lengths if x is None else x for x in some)
            for some in (scales, (cache.recent_key, cache.recent_value))
        ),
    ]
    for kernel in [first] * launches + others:
        ops.run_in_place(kernel, *arrays)

"""`paged.append` in one launch of a Mosaic kernel."""

from typing import Any

import torch
from nsa_interop.launch import ALIGNMENT, launch
from torch import Tensor

from kernels_pallas.mosaic.capability import HOPPER
from kernels_pallas.runtime import loaded
from kernels_pallas.specs.append import Append
from kernels_pallas.specs.append import append as kernel_of
from kernels_pallas.specs.append import why_not as spec_why_not
from nsa_core.steps import mosaic_append as step
from nsa_core.types import Branches
from nsa_core.validate import dtype_name
from nsa_torch.paged import PagedCache, launches_of_means
from nsa_torch.torch_ops import capability_of, readable


def why_not(cache: PagedCache, *call: Any) -> str | None:
    """Why the kernel does not support this call (arguments of `described`), or None."""
    device = cache.selected_key.device
    if device.type != "cuda":
        return f"needs a Hopper GPU, got {device.type}"
    if (found := capability_of(device.index)) != HOPPER:
        return f"needs compute capability {HOPPER}, got {found}"
    for name, x in cache.tensors().items():
        if x.data_ptr() % ALIGNMENT:
            return f"needs {name} to start at a multiple of {ALIGNMENT} bytes"
    return spec_why_not(described(cache, *call))


def is_ready(*call: Any) -> bool:
    """Whether nothing is to be built, nor traced."""
    generic = described(*call).for_any_length()
    return not torch.compiler.is_compiling() and loaded.on_disk(kernel_of(generic))


def described(
    cache: PagedCache,
    key: Branches,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None,
    means: bool,
) -> Append:
    """The launch of a call."""
    (rows, pages), (_, _, _, width) = page_table.shape, cache.selected_value.shape
    return step.described(
        *(*key.selected.shape[1:], width, dtype_name(cache.selected_key), cache.config),
        N=key.selected.shape[0],
        B=rows,
        pages=cache.num_pages,
        table_pages=pages,
        separate=cache.separate,
        ragged=cu_seqlens_q is not None,
        means=means,
    )


def append(
    cache: PagedCache,
    key: Branches,
    value: Branches,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    means: bool,
    slots: Tensor | None,
) -> None:
    """The same as `triton_append.append`, but without caches in fp8 and their `slots`."""
    spec = described(cache, key, page_table, cu_seqlens_q, means)
    if not spec.N:
        return
    new, pages = [key.selected, value.selected], [cache.selected_key, cache.selected_value]
    if cache.separate:
        new += [key.sliding, value.sliding, key.compressed, value.compressed]
        pages += [*cache.sliding, *cache.raw]
    new += [page_table, lengths]
    if cu_seqlens_q is not None:
        new.append(cu_seqlens_q)
    if means:
        new += cache.raw
        pages += [cache.compressed_key, cache.compressed_value]
    given, sizes = [*map(readable, new)], (spec.N, spec.B, spec.ragged, means)
    for _ in range(launches_of_means(*sizes)):
        launch(kernel_of(spec), *given, out=pages)

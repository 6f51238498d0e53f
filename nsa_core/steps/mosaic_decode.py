"""Runs a decode step with one launch of a Mosaic kernel, for both frameworks."""

import dataclasses
import itertools
from typing import Any

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic.capability import HOPPER, interpret
from kernels_pallas.specs.decode import VARIANTS, Decode, decode, with_variant
from kernels_pallas.specs.decode import why_not as decode_why_not
from nsa_core.array_ops import ArrayOps
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import PagedArrays
from nsa_core.types import Branches
from nsa_core.validate import dtype_name


def attention(
    ops: ArrayOps,
    query,
    gates,
    cache: PagedArrays,
    page_table,
    lengths,
    scale: float | None,
    new: tuple[Branches, Branches] | None = None,
    slots: Any = None,
):
    """Return `(out, indices)`, which are `[N, H, Dv]` and int32 `[N, Hkv, n]`.

    Each of the B rows has `N / B` queries.

    The arguments are the same as in `nsa_torch.paged_attention`. If arrays are mutable, as in
    torch, `new` may have keys and values of new tokens. The step appends the new tokens before it
    computes attention. For an fp8 cache, `slots` has the index of each row's ring
    (`nsa_core.paged_layout`).

    Raises:
      NotImplementedError: No kernel supports the sizes (`specs.decode.why_not`).
    """
    kernel = step_kernel(query, gates, cache, page_table, scale, new is not None)
    arrays = step_arrays(query, gates, cache, page_table, lengths, new, slots)
    out, indices = ops.run(kernel, *arrays)
    return out, indices


def step_kernel(
    query, gates, cache: PagedArrays, page_table, scale: float | None, append: bool
) -> Kernel:
    """Return the kernel that `attention` runs for the same arguments."""
    (rows, pages), config = page_table.shape, cache.config
    tokens, heads, width = query.shape
    spec = _decode_spec(
        config,
        B=rows,
        q_len=tokens // rows,
        H=heads,
        Hkv=cache.kv_heads,
        D=width,
        Dv=cache.selected_value.shape[3],
        dtype=dtype_name(query),
        pages=cache.num_pages,
        table_pages=pages,
        scale=float(width**-0.5 if scale is None else scale),
        gate_dtype=dtype_name(gates),
        append=append,
        fp8=cache.is_fp8,
        rings=cache.recent_key.shape[0] if cache.is_fp8 and append else 0,
    )
    return decode(spec)


def step_arrays(
    query,
    gates,
    cache: PagedArrays,
    page_table,
    lengths,
    new: tuple[Branches, Branches] | None,
    slots: Any = None,
) -> list[Any]:
    """Return the inputs of `step_kernel`."""
    is_fp8 = cache.is_fp8
    compressed = cache.compressed_key, cache.compressed_value
    selected = cache.selected_key, cache.selected_value
    found = [query, gates, page_table, lengths, *compressed, *selected, *cache.sliding]
    if is_fp8:
        # Compressed keys are not rounded.
        keys, values = cache.sources("key"), cache.sources("value")
        names = values.compressed, keys.selected, values.selected, keys.sliding, values.sliding
        found += [getattr(cache, f"{name}_scale") for name in names]
    if new is not None:
        # written out, since every decode step runs this line
        key, value = new
        found += key.compressed, value.compressed, key.selected, value.selected
        found += key.sliding, value.sliding, *cache.raw
        if is_fp8:
            raw = "raw" if cache.separate else "selected"
            found += [getattr(cache, f"{raw}_{kind}_scale") for kind in ("key", "value")]
            found += [cache.recent_key, cache.recent_value, slots]
    return found


def why_not(problem: Any) -> str | None:
    """Return the reason why the kernel does not support a paged call of `T` queries per row, or
    None.
    """
    if problem.packed:
        return "needs the same number of queries, 1 to 8, in all rows, got different numbers"
    if not interpret.get() and problem.platform not in ("gpu", "cuda"):
        return f"needs a Hopper GPU, got {problem.platform}"
    if not interpret.get() and problem.capability != HOPPER:
        return f"needs compute capability {HOPPER}, got {problem.capability}"
    return decode_why_not(_posed(problem, "float32"))


def kernel_of(problem: Any, append: bool = False) -> Kernel:
    """Return the kernel of a paged call. One kernel serves any batch, pool of pages and page table.
    The gates must have the dtype of the queries.
    """
    return decode(_posed(problem, problem.dtype, append)).for_any_length()


def kernels_of(
    heads: int, kv_heads: int, key_width: int, value_width: int, dtype: str, config: NSAConfig
) -> list[Kernel]:
    """Return the kernels of decode steps with one token per row, for caches in `dtype` and for
    caches in fp8. The kernels serve any number of rows of any length. The result is empty if no
    kernel supports the layer's sizes.
    """
    sizes = {"H": heads, "Hkv": kv_heads, "D": key_width, "Dv": value_width, "dtype": dtype}
    found = []
    for variant, fp8 in itertools.product(VARIANTS, (False, True)):
        spec = _decode_spec(
            config,
            **sizes,
            B=1,
            q_len=1,
            pages=variant.capacity,
            table_pages=variant.capacity,
            scale=key_width**-0.5,
            gate_dtype=dtype,
            fp8=fp8,
        )
        spec = dataclasses.replace(spec, variant=variant)
        if not decode_why_not(spec):
            both = (dataclasses.replace(spec, append=append) for append in (False, True))
            found += [decode(each).for_any_length() for each in both]
    return found


def _posed(problem: Any, gate_dtype: str, append: bool = False) -> Decode:
    pages = problem.S // problem.config.select_block
    sizes = {name: getattr(problem, name) for name in ("B", "H", "Hkv", "D", "Dv", "dtype")}
    return _decode_spec(
        problem.config,
        **sizes,
        q_len=problem.T,
        pages=pages,
        table_pages=pages,
        scale=problem.D**-0.5,
        gate_dtype=gate_dtype,
        append=append,
        fp8=problem.is_fp8,
        rings=int(problem.is_fp8 and append),
    )


def _decode_spec(config: NSAConfig, **sizes: Any) -> Decode:
    """Return the spec of a decode kernel.

    `sizes` has the fields of `Decode` that `config` does not determine.
    """
    spec = Decode(
        **sizes,
        compress_block=config.compress_block,
        stride=config.compress_stride,
        block=config.select_block,
        n=config.num_selected,
        num_initial=config.num_initial,
        num_local=config.num_local,
        window=config.window,
        interpret=interpret.get(),
    )
    return with_variant(spec)

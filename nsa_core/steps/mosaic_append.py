"""Writes new tokens to the pages of a cache with one launch of a Mosaic kernel, for both
frameworks.
"""

import itertools

from kernels_pallas.kernel import Kernel
from kernels_pallas.specs.append import Append, append, why_not
from nsa_core.config import NSAConfig


def kernels_of(
    heads: int, kv_heads: int, key_width: int, value_width: int, dtype: str, config: NSAConfig
) -> list[Kernel]:
    """Return the kernels that append tokens, for a layer that compresses by means. The kernels
    serve any batch, pool of pages and page table.
    """
    found = []
    for ragged, separate in itertools.product((False, True), repeat=2):
        flags = {"ragged": ragged, "separate": separate, "means": True}
        sizes = dict.fromkeys(("N", "B", "pages", "table_pages"), 1)
        spec = append_spec(kv_heads, key_width, value_width, dtype, config, **sizes, **flags)
        if not why_not(spec):
            found.append(append(spec).for_any_length())
    return found


def append_spec(kv_heads, key_width, value_width, dtype, config, **rest) -> Append:
    """Return the `Append` spec of a launch.

    `rest` has the fields of the spec that the layer does not determine.
    """
    return Append(
        Hkv=kv_heads,
        D=key_width,
        Dv=value_width,
        compress_block=config.compress_block,
        stride=config.compress_stride,
        block=config.select_block,
        dtype=dtype,
        **rest,
    )

"""Native Sparse Attention (arXiv 2502.11089) in JAX. `nsa_core.types` describes shapes and
numerics.

Names are imported at their first use, so that `import nsa_jax` does not import JAX.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from nsa_core import __version__ as __version__

if TYPE_CHECKING:
    from nsa_core import debug as debug
    from nsa_core.compress_params import MLPParams, PoolParams, RopeMLPParams
    from nsa_core.config import NSAConfig
    from nsa_core.types import Branches
    from nsa_jax import context as context
    from nsa_jax import indexers as indexers
    from nsa_jax import nn as nn
    from nsa_jax import pages as pages
    from nsa_jax.api import (
        attention,
        compress,
        compressed_attention,
        explain,
        select_blocks,
        selected_attention,
        sliding_attention,
        varlen_metadata,
    )
    from nsa_jax.blocks import block_attention, paged_block_attention
    from nsa_jax.cache import NSACache, cached_attention, init_cache
    from nsa_jax.indexers import index_blocks, indexer_kl, paged_index_blocks
    from nsa_jax.pages import PagedCache, append, paged_attention
    from nsa_jax.warm_up import prepare

__all__ = [
    "Branches",
    "MLPParams",
    "NSACache",
    "NSAConfig",
    "PagedCache",
    "PoolParams",
    "RopeMLPParams",
    "append",
    "attention",
    "block_attention",
    "cached_attention",
    "compress",
    "compressed_attention",
    "explain",
    "index_blocks",
    "indexer_kl",
    "init_cache",
    "paged_attention",
    "paged_block_attention",
    "paged_index_blocks",
    "prepare",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
    "varlen_metadata",
]

_MODULES = ("context", "debug", "indexers", "nn", "pages")
# Older programs and pickles, from before `nsa_core` existed, import these names from here.
for _name in ("compress_params", "config", "debug", "layer", "types"):
    globals()[_name] = importlib.import_module(f"nsa_core.{_name}")
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
# The module of each public name. A name without an entry is in `nsa_jax.api`.
_HOMES = {
    "Branches": "types",
    "MLPParams": "compress_params",
    "NSACache": "cache",
    "NSAConfig": "config",
    "PagedCache": "pages",
    "PoolParams": "compress_params",
    "RopeMLPParams": "compress_params",
    "append": "pages",
    "block_attention": "blocks",
    "cached_attention": "cache",
    "index_blocks": "indexers",
    "indexer_kl": "indexers",
    "init_cache": "cache",
    "paged_attention": "pages",
    "paged_block_attention": "blocks",
    "paged_index_blocks": "indexers",
    "prepare": "warm_up",
    "varlen_metadata": "api",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'api')}")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        from nsa_core import extras

        raise extras.missing("jax", error) from error
    globals()[name] = found = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]

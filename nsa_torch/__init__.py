"""Native Sparse Attention (arXiv 2502.11089) in PyTorch. `nsa_core.types` documents shapes. The
configuration (`NSAConfig`) and the container of the branches (`Branches`) come from `nsa_core`.
JAX is imported only by the implementation `jax` and by the separate processes that build Mosaic
kernels. The backends of JAX start at the first call that uses them.
"""

from nsa_core import __version__ as __version__
from nsa_core import extras

extras.require("torch", "torch")

from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_torch.blocks import block_attention, paged_block_attention
from nsa_torch.cache import NSACache, cached_attention, init_cache
from nsa_torch.compress import MLPParams, PoolParams, RopeMLPParams
from nsa_torch.functional import (
    attention,
    compress,
    compressed_attention,
    explain,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa_torch.indexers import index_blocks, indexer_kl, paged_index_blocks
from nsa_torch.module import NSAAttention
from nsa_torch.pages import PagedCache, append, paged_attention, plan_runs
from nsa_torch.varlen import VarlenMetadata, varlen_metadata
from nsa_torch.warm_up import prepare

__all__ = [
    "Branches",
    "MLPParams",
    "NSAAttention",
    "NSACache",
    "NSAConfig",
    "PagedCache",
    "PoolParams",
    "RopeMLPParams",
    "VarlenMetadata",
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
    "plan_runs",
    "prepare",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
    "varlen_metadata",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

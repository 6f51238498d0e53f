"""Native Sparse Attention (arXiv 2502.11089) in JAX; shapes and numerics: `nsa_jax.types`."""

from nsa_jax.api import (
    attention,
    compress,
    compressed_attention,
    explain,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa_jax.cache import NSACache, cached_attention, init_cache
from nsa_jax.compress import MLPParams, PoolParams
from nsa_jax.config import NSAConfig
from nsa_jax.types import Branches

__all__ = [
    "Branches",
    "MLPParams",
    "NSACache",
    "NSAConfig",
    "PoolParams",
    "attention",
    "cached_attention",
    "compress",
    "compressed_attention",
    "explain",
    "init_cache",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
]

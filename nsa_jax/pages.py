"""Exports the class and the functions of paged caches: `PagedCache`, `append` and attention from
pages."""

from nsa_jax.paged import PagedCache as PagedCache
from nsa_jax.paged import append as append
from nsa_jax.paged import paged_attention as paged_attention

"""Exports the class `PagedCache`, the function `append`, and attention from pages."""

from nsa_jax.paged import PagedCache as PagedCache
from nsa_jax.paged import append as append
from nsa_jax.paged import paged_attention as paged_attention

"""A cache in pages, appending to it, and attention from it."""

from nsa_jax.paged import PagedCache as PagedCache
from nsa_jax.paged import append as append
from nsa_jax.paged import paged_attention as paged_attention

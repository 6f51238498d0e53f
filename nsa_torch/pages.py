"""Exports paged caches, attention from pages, and the functions `append` and `plan_runs`."""

from nsa_core.paged_runs import plan_runs as plan_runs
from nsa_torch.paged import PagedCache as PagedCache
from nsa_torch.paged import append as append
from nsa_torch.paged_attend import paged_attention as paged_attention

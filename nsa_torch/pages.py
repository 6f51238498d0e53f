"""Exports the functions of paged caches: the cache, `append`, attention from pages, and
`plan_runs`.
"""

from nsa_core.paged_runs import plan_runs as plan_runs
from nsa_torch.paged import PagedCache as PagedCache
from nsa_torch.paged import append as append
from nsa_torch.paged_attend import paged_attention as paged_attention

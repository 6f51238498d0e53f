"""A cache in pages, appending to it, attention from it, and which rows of a call run together."""

from nsa_core.paged_runs import plan_runs as plan_runs
from nsa_torch.paged import PagedCache as PagedCache
from nsa_torch.paged import append as append
from nsa_torch.paged_attend import paged_attention as paged_attention

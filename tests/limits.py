"""Limits beyond which work is cut, or done by other kernels: where they stand, for tests in which
small problems shall have all of it.
"""

import functools
import importlib

from nsa_jax import eager

LIMITS = {
    "jax_chunk_bytes": ("nsa_jax.chunks.BUDGET_BYTES", "nsa_jax.branches.BUDGET_BYTES"),
    "torch_chunk_bytes": ("nsa_torch.chunks.BUDGET_BYTES",),
    "fused_heads_from": ("nsa_torch.heads.FUSED_FROM",),
    "workspace_bytes": ("nsa_core.plan.workspace.MAX_BYTES",),
    "long_list": ("nsa_core.steps.mosaic_gather.LONG_LIST",),
    "gathered_bytes": ("nsa_core.steps.mosaic_gather.MAX_BYTES",),
    "ds_chunk_bytes": ("nsa_core.steps.mosaic_stored_ds.CHUNK_BYTES",),
    "small_bytes": ("nsa_core.plan.planner.SMALL_BYTES",),
    "least_released": ("nsa_core.plan.planner.LEAST_RELEASED",),
    "bundled_bytes": ("nsa_torch.execute.BUNDLED_BYTES",),
    "many_pinned": ("nsa_torch.shared.MANY_PINNED",),
    "graph_after": ("kernels_pallas.runtime.sequence.GRAPH_AFTER",),
    "held_bytes": ("nsa_interop.dlpack.HELD_BYTES",),
    "debug_bytes": ("nsa_core.debug.MAX_BYTES",),
    "min_interval": ("kernels_pallas.specs.work_items.MIN_INTERVAL",),
    "min_segment": ("kernels_pallas.specs.work_items.MIN_SEGMENT",),
    "item_entries": ("kernels_pallas.specs.work_items.MAX_ENTRIES",),
    "query_list_chunks": ("kernels_pallas.specs.block_query_lists.CHUNKS",),
    "query_list_bits": ("kernels_pallas.specs.block_query_lists.BITS",),
    "list_window": ("kernels_pallas.mosaic.lists.WINDOW",),
    "triton_segment": ("nsa_core.steps.triton_backward.SEGMENT",),
    "triton_programs": ("nsa_core.steps.triton_backward.PROGRAMS",),
    "index_chunk": ("nsa_core.steps.triton_index.CHUNK",),
    "index_loss_tiles": ("nsa_core.steps.triton_index._kl_tiles",),
    "index_scores_bytes": ("nsa_core.steps.triton_index.SCORES_BYTES",),
    "paged_block_split": ("nsa_core.steps.triton_paged_blocks.SPLIT",),
    "paged_index_chunk": ("nsa_core.steps.triton_paged_blocks.CHUNK",),
    "long_list_bytes": ("nsa_core.steps.triton_paged_blocks.PARTIAL_BYTES",),
    "index_part": ("nsa_core.steps.triton_paged_blocks.PART",),
    "index_list_part": ("nsa_core.steps.triton_paged_blocks.LIST_PART",),
    "decode_split": ("nsa_core.steps.triton_decode.SPLIT",),
    "decode_candidates": ("nsa_core.steps.triton_decode.CANDIDATES",),
    "decode_gathered": ("kernels_pallas.triton.decode_descriptions.GATHERED",),
    "split_numbers": ("kernels_pallas.triton.descriptions.SPLIT_NUMBERS",),
    "oracle_elements": ("bench.judge.oracle.FORWARD_ELEMENTS",),
    "shortfall_rows": ("bench.judge.selection_shortfall.MAX_ROWS",),
    "slope_elements": ("bench.judge.parity.SLOPE_ELEMENTS",),
    "judged_elements": ("bench.judge.parity.CHUNK",),
    "rounds_of_parts": ("bench.harness.parts.ROUNDS",),
}


def set_limits(monkeypatch, **values):
    """Of a test, by the names of `LIMITS`. Programs of JAX are compiled again: what was compiled
    before has other limits.
    """
    program = functools.lru_cache(eager._program.__wrapped__)
    monkeypatch.setattr(eager, "_program", program)
    for name, value in values.items():
        for place in LIMITS[name]:
            module, _, attribute = place.rpartition(".")
            monkeypatch.setattr(importlib.import_module(module), attribute, value)

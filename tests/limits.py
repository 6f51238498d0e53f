"""Limits beyond which work is cut, or done by other kernels: where they stand, for tests in which
small problems shall have all of it.
"""

LIMITS = {
    "jax_chunk_bytes": ("nsa_jax.chunks.BUDGET_BYTES", "nsa_jax.branches.BUDGET_BYTES"),
    "torch_chunk_bytes": ("nsa_torch.chunks.BUDGET_BYTES",),
    "fused_heads_from": ("nsa_torch.heads.FUSED_FROM",),
    "workspace_bytes": ("nsa_core.plan.workspace.MAX_BYTES",),
    "long_list": ("nsa_core.steps.mosaic_gather.LONG_LIST",),
    "gathered_bytes": ("nsa_core.steps.mosaic_gather.MAX_BYTES",),
    "ds_chunk_bytes": ("nsa_core.steps.mosaic_stored_ds.CHUNK_BYTES",),
}


def set_limits(monkeypatch, **values):
    """Of a test, by the names of `LIMITS`."""
    for name, value in values.items():
        for place in LIMITS[name]:
            monkeypatch.setattr(place, value)

"""bench.call_kernels: which column a kernel is in, on tensors without memory."""

import collections

import pytest

from bench import call_kernels
from nsa_core.plan.kernels import kernels_of
from nsa_torch import NSAConfig

# Columns of kernels that only the selected branch runs: dS stored; tiles gathered.
STORED = {"selected_forward": "selected", "stored_ds_dq": "dq: selected"}
GATHERED = {
    "selected_forward": "selected",
    "gathered_forward": "selected",
    "gathered_merge": "selected",
    "selected_dq": "dq: selected",
    "gathered_dq": "dq: selected",
    "gathered_merge_dq": "dq: selected",
}


@pytest.mark.parametrize("heads, of_selected", [(64, STORED), (16, GATHERED)])
def test_columns(heads, of_selected):
    kernels = kernels_of(
        length=65536,
        heads=heads,
        kv_heads=4,
        key_width=128,
        value_width=128,
        dtype="bfloat16",
        config=NSAConfig(),
        gradients=True,
        compresses=True,
        shared=True,
    )
    columns = collections.defaultdict(set)
    for kernel in kernels:
        columns[kernel.name].add(call_kernels.column(kernel))
    assert {name: {column} for name, column in of_selected.items()}.items() <= columns.items()
    assert columns["interval_forward"] == {"compressed", "sliding"}
    assert columns["interval_dq"] == {"dq: compressed and sliding"}
    assert columns["dkv_partials"] == {
        f"dkv: {x}" for x in ("compressed", "selected", "sliding")
    }
    alone = {"dq: compressed", "dq: sliding"}  # where one kernel has no room for both
    found = set.union(*columns.values())
    assert found == {*call_kernels.COLUMNS} - {call_kernels.WHOLE} - alone

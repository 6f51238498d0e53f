"""Which bodies a problem gets: the same whether kernels are interpreted or compiled."""

import math

import pytest

from kernels_pallas.specs import dkv, interval, selected

SIZES = dict(B=1, T=256, Hkv=1, D=64, dtype="bfloat16", scale=1.0)
DKV = SIZES | dict(S=256, H=16, Dv=64, work_items=4)


@pytest.mark.parametrize(
    ("widths", "entries", "kernels"),
    [
        ((128, 128), 0, [["dk", "dv"]]),
        ((192, 128), 0, [["dk", "dv"]]),
        ((256, 128), 0, [["dk"], ["dv"]]),
        ((192, 128), 64, [["dk", "dv"]]),
        ((256, 128), 64, [["dk"], ["dv"]]),
    ],
)
def test_kernels_of_both_gradients(widths, entries, kernels):
    spec = dkv.Dkv(**DKV | dict(zip(("D", "Dv"), widths, strict=True)), list_entries=entries)
    assert [list(x.widths) for x in spec.passes] == kernels


@pytest.mark.parametrize(
    ("widths", "block", "overlap"),
    [
        ((128, 128), 64, True),
        ((256, 256), 64, True),
        ((256, 256), 80, False),
        ((128, 128), 128, True),
        ((64, 80), 64, False),  # a second stage of values would take more than one of keys
    ],
)
def test_forward_overlaps_products_where_registers_hold_them(widths, block, overlap):
    assert selected.overlap_pv(*widths, block) == overlap
    stages = selected.forward_stages(*widths, block)
    assert stages == dict(key_stages=2 - overlap, value_stages=1 + overlap)
    key, value = widths
    needed = stages["key_stages"] * key + stages["value_stages"] * value
    assert needed <= 2 * key + value  # as `capability.selected_bytes` counts


@pytest.mark.parametrize("group", [1, 4, 6, 16, 64])
@pytest.mark.parametrize("window", [0, 1, 64, 512, 700, 4096])
def test_blocks_fit_the_window(group, window):
    """A pair of tiles of 64 rows has no more blocks than of 128 keys, and no smaller ones do."""
    keys = window + 2 * (64 // group) - 1
    chosen = interval.forward_blocks(group, 128, 128, window)["block"]
    assert math.ceil(keys / chosen) == math.ceil(keys / 128)
    for smaller in range(96, chosen, 16):
        assert math.ceil(keys / smaller) > math.ceil(keys / chosen)


@pytest.mark.parametrize("window", [0, 512])
def test_wide_heads_with_a_window_have_small_blocks(window):
    wanted = {"block": 64, "stages": 3}  # larger ones spill where an array is added
    assert interval.forward_blocks(16, 192, 128, window) == wanted
    assert interval.forward_blocks(16, 192, 128, None) == {"block": 128, "stages": 2}

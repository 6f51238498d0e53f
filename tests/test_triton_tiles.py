"""Measured tiles of Triton kernels: which fit, which reach a kernel, and the tuner's arithmetic.

No kernel runs: the stand-in for launches gives zeros, the stand-in for the clock times the
constants of what was launched.
"""

import dataclasses

import pytest
import torch

from bench.harness import problems, records
from bench.harness.runners import TorchRunner
from bench.tuners import tile_search, triton_tiles
from kernels_pallas.triton import descriptions, tiling
from kernels_pallas.triton.tiling import Tiling
from nsa_core import config_files, tiles
from nsa_core.config import NSAConfig
from nsa_torch.torch_ops import TorchOps

GPU = "NVIDIA Test L4"
ADA, AMPERE = (8, 9), (8, 0)
MICRO = """
model: {dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 64, d_v: 64}
nsa: {compress_block: 8, compress_stride: 4, select_block: 32, num_selected: 4, window: 40}
runtime: {precision: bf16, seq_len: 128}
"""


class Launched(TorchOps):
    """Gives zeros for results, and keeps what was launched."""

    def __init__(self, device=None):
        self.kernels, self.device = [], device

    def run(self, kernel, *tensors):
        self.kernels.append(kernel)
        return [
            torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in kernel.outputs
        ]

    def capability(self, x):
        return ADA

    def device_name(self, x):
        return self.device


def problem(capability=ADA, dtype="bfloat16", **given):
    sizes = {"B": 1, "T": 4096, "S": 4096, "H": 32, "Hkv": 2, "D": 128, "Dv": 128}
    return descriptions.Problem(
        **sizes, dtype=dtype, scale=1.0, capability=capability, tiles=given
    )


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_fit_and_are_more_where_there_is_more(kernel, dtype):
    counts = []
    for capability in (ADA, AMPERE):
        p = problem(capability, dtype)
        found = p.candidates(kernel)
        limits = p.limits(kernel)
        assert len(found) == len(set(found)) > 1
        for each in found:
            needed = tiling.needed(kernel, each, p.D, p.Dv, p.itemsize)
            assert needed <= tiling.smem_of(capability)
            assert each.rows <= limits[0] and each.keys <= limits[1]
            assert dtype == "bfloat16" or max(each.rows, each.keys) <= tiling.FLOAT32
        counts.append(len(found))
    assert counts[0] < counts[1], "an A100 has more shared memory than an L4"


def test_a_measured_tile_counts_where_it_fits():
    heuristic = problem().tiling("dq")
    small = Tiling(32, 16, 4, 2)
    assert problem(dq=small._asdict()).tiling("dq") == small != heuristic
    assert problem(forward=small._asdict()).tiling("dq") == heuristic
    wide = problem(AMPERE).limits("dq")
    large = Tiling(*wide, 8, 4)
    assert tiling.needed("dq", large, 128, 128, 2) > tiling.smem_of(ADA)
    assert problem(AMPERE, dq=large._asdict()).tiling("dq") == large
    assert problem(ADA, dq=large._asdict()).tiling("dq") == heuristic, "it would not launch"
    for bad in ({"rows": 48}, {"rows": 8}, {"warps": 3}, {"rows": 256}, {"keys": 128}):
        given = small._replace(**bad)._asdict()
        assert problem(dq=given).tiling("dq") == heuristic, bad


def test_a_measured_tile_has_no_more_keys_than_a_block():
    given = Tiling(16, 32, 4, 1)._asdict()
    for block, keys in ((64, 32), (16, 16)):
        found = descriptions.Selected(problem(forward=given), 4, block).forward()
        assert found.constants["KEYS"] == keys
        assert (found.stages == 1) == (block == 64), "else the heuristic's"


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "micro.yaml"
    path.write_text(MICRO)
    settings = problems.settings(path)
    made, ops = problems.make(settings, "random"), Launched()

    def clock(call):
        """Milliseconds: by how far a launch is from `CHOSEN`'s tiles."""
        ops.kernels = []
        call(0)
        return 5.0 + sum(_distance(kernel) for kernel in ops.kernels)

    return triton_tiles.Kernels(settings, made, TorchRunner("cpu"), 0.0, ops, clock)


def _distance(kernel):
    """From 16 keys a tile and 2 stages, the fewest of all."""
    if kernel.name == "merge":
        return 0.0
    constants = kernel.constants
    keys = constants["KEYS"] if "KEYS" in constants else 16 * constants["BLOCKS"]
    return abs(keys - 16) + abs(kernel.stages - 2) + (kernel.warps == 8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "FOLDER", tmp_path / "tiles")
    tiles.table.cache_clear()
    yield tiles.FOLDER
    tiles.table.cache_clear()


@pytest.mark.parametrize("kernel", list(tiles.TRITON))
def test_the_fastest_tiles_reach_the_kernel(kernel, kernels, folder):
    found = tile_search.tune(
        kernels.heuristic(kernel),
        kernels.variants(kernel),
        lambda chosen: kernels.prepare(kernel, chosen),
        tile_search.differs,
    )
    assert not any(trial.wrong or trial.reason for trial in found.trials)
    best = min(trial.time_ms for trial in found.trials)
    assert found.winner is not None and found.winner.time_ms == best < found.heuristic.time_ms
    entry = tile_search.entry(kernels, kernel, found, records.environment("abc"))
    assert entry["evidence"]["heuristic"] == kernels.heuristic(kernel)
    path = folder / f"{config_files.slug(GPU)}.json"
    assert tile_search.write(path, GPU, [kernels.shape(kernel)], [entry]) == 1

    ops = Launched(GPU)  # a call on that device takes them from the table
    step, part = kernel.split("_")[1:]
    kept = triton_tiles._Kept(ops, triton_tiles.LAUNCHED[part])
    kernels._pass(kept, step, part)
    (launch, *_) = kept.launches
    winner = found.winner.tiles
    assert (launch[0].warps, launch[0].stages) == (winner["warps"], winner["stages"])
    if part != "scores":
        assert launch[0].constants["KEYS"] == winner["keys"]
        assert launch[0].constants["ROWS"] == winner["rows"]


def test_only_the_pass_is_timed(kernels):
    names = {}
    for kernel in tiles.TRITON:
        step = kernels.prepare(kernel, kernels.heuristic(kernel))
        names[kernel] = [launch[0].name for launch in step.launches]
    assert names["triton_selected_dq"] == ["dq"] and names["triton_sliding_forward"] == [
        "forward"
    ]
    assert names["triton_compressed_dkv"] == ["of_intervals", "merge"]
    assert names["triton_selected_dkv"] == ["of_blocks", "merge"]
    assert names["triton_sliding_dkv"] == ["of_intervals"]
    assert names["triton_scores_scores"] == ["best_blocks"]


def test_a_variant_with_another_result_is_wrong(kernels, monkeypatch):
    kernel = "triton_sliding_forward"
    base = kernels.heuristic(kernel)
    run = Launched.run

    def other(self, launch, *tensors):
        found = run(self, launch, *tensors)
        if launch.name == "forward" and launch.stages == 1:
            found[0] += 1
        return found

    monkeypatch.setattr(Launched, "run", other)
    first = base | {"stages": 2}
    prepare = lambda chosen: kernels.prepare(kernel, chosen)
    found = tile_search.tune(first, [base | {"stages": 1}], prepare, tile_search.differs)
    assert [trial.wrong for trial in found.trials] == [False, True] and found.winner is None


def test_a_measured_tile_of_scores_has_whole_groups():
    config = NSAConfig()
    given = Tiling(16, 64, 4, 1)._asdict()
    found = [
        descriptions.best_blocks(dataclasses.replace(problem(scores=given), H=heads), config)
        for heads in (4, 128)
    ]
    assert [kernel.constants["TOKENS"] for kernel in found] == [8, 1]
    assert [kernel.constants["GROUP_COLUMNS"] for kernel in found] == [2, 64]
    assert {kernel.stages for kernel in found} == {1}

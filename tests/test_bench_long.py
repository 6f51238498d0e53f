"""`bench.prefill`, `bench.ranges` and `bench.needle`: their tables, and what is wrong."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from bench import needle, prefill, ranges
from bench.harness import exit_status
from nsa_core.config import NSAConfig
from nsa_jax import branches
from nsa_jax import ranges as library
from tests.commands import break_sliding, results, run
from tests.measured import record

SIZES = ("--heads=4", "--dk=8", "--dv=8", "--l=8", "--d=4", "--l_sel=8", "--n_sel=4", "--w=12")
SMALL = (*SIZES, "--iters=2", "--device=cpu")
CONFIG = NSAConfig(8, 4, 8, 4, 1, 2, 12)


def test_prefill(tmp_path, capsys):
    given = ("--framework=jax", "--S_list=31", "--B=2", "--input=random")
    status, (found,), (row,) = run(prefill, tmp_path, *SMALL, *given)
    assert status == 0
    assert (found.S, found.T, found.B, found.branch) == (31, 31, 2, "all")
    assert (found.implementation, found.status, found.device) == ("xla", "ok", "cpu")
    assert float(row["tokens_per_s"]) == pytest.approx(2 * 31 / found.time_ms * 1e3)
    assert float(row["ms"]) == found.time_ms and row["scaling"] == row["exponent"] == ""
    assert f"S=31 {found.time_ms:.3f} ms (p20 " in capsys.readouterr().out
    longer = dataclasses.replace(found, S=124, time_ms=8 * found.time_ms)
    table = results(prefill, tmp_path / "more")
    cells = table.row(**prefill.scaling(longer, found))
    assert (cells["scaling"], cells["exponent"]) == (pytest.approx(8), pytest.approx(1.5))
    assert "31->124: 8.00x" in capsys.readouterr().out
    failed = dataclasses.replace(longer, status="oom", reason="no room")
    cells = table.row(**prefill.scaling(failed, found))
    assert cells["scaling"] is None and "oom: no room" in capsys.readouterr().out


def test_a_wrong_prefill_has_no_time(tmp_path, capsys, monkeypatch):
    break_sliding(monkeypatch)
    given = ("--framework=jax", "--S_list=31", "--B=2", "--input=random")
    status, found, (row,) = run(prefill, tmp_path, *SMALL, *given)
    assert status == 1 and found[0].status == row["status"] == "wrong"
    assert row["ms"] == row["tokens_per_s"] == ""
    assert "S=31 n/a" in capsys.readouterr().out


def test_a_prefill_that_refuses_is_a_row(tmp_path):
    given = ("--S_list=31", "--kernels=mosaic", "--input=random")
    status, found, (row,) = run(prefill, tmp_path, *SMALL, *given)
    assert status == exit_status.NOT_MEASURED
    assert found[0].status == row["status"] == "unsupported"
    assert "needs a Hopper GPU" in row["reason"] and row["kernel"] == "mosaic/mosaic/mosaic"


def test_the_loop_makes_ranges():
    blocks = np.array([0, 1, 4, -1, 2, 3, 4, 5, 0, 2, 4, 6], np.int32).reshape(1, 3, 1, 4)
    position = np.array([[34, 44, 55]])
    found = ranges.v1(blocks, position, CONFIG)
    assert found[0, :, 0].tolist() == [
        [[0, 16], [32, 35], [0, 0], [0, 0]],
        [[16, 45], [0, 0], [0, 0], [0, 0]],
        [[0, 8], [16, 24], [32, 40], [48, 56]],
    ]
    again = library.to_ranges(jnp.asarray(blocks), jnp.asarray(position), CONFIG)
    np.testing.assert_array_equal(again, found)


def test_ranges(tmp_path, capsys):
    status, found, table = run(ranges, tmp_path, *SMALL, "--S_list=9,63", "--B=2")
    assert status == 0
    assert [(r.implementation, r.S, r.rows_differ, r.status) for r in found] == [
        (name, length, 0, "ok") for length in (9, 63) for name in ("ranges_v1", "ranges_v2")
    ]
    for row in table:
        assert row["equal"] == "True"
        assert float(row["speedup"]) == float(row["v1_ms"]) / float(row["v2_ms"])
    assert re.search(
        r"adaptive rule: v2 (never|from S=\d+ on) \(measured at 9, 63\)",
        capsys.readouterr().out,
    )


def test_ranges_that_differ_are_not_timed(tmp_path, capsys, monkeypatch):
    whole = library.to_ranges

    def unmerged(block_indices, position, config):
        return whole(block_indices, position, config).at[0, 40, 0, 0, 1].add(1)

    monkeypatch.setattr(library, "to_ranges", unmerged)
    status, found, (row,) = run(ranges, tmp_path, *SMALL, "--S_list=63")
    assert status == 1 and {r.status for r in found} == {"wrong"}
    assert row["equal"] == "False" and row["v2_ms"] == row["speedup"] == ""
    printed = capsys.readouterr().out
    assert "differ in 1 of 126 rows" in printed and "v2 never" in printed


def pair(length, *times):
    names = "ranges_v1", "ranges_v2"
    return [record("scores", x, ms, S=length) for x, ms in zip(names, times, strict=True)]


@pytest.mark.parametrize(
    ("pairs", "least"),
    [
        ([(8, 1.0, 2.0), (16, 2.0, 1.0), (32, 4.0, 1.0)], 16),
        ([(8, 2.0, 1.0), (16, 1.0, 2.0), (32, 4.0, 1.0)], 32),
        ([(32, 4.0, 1.0), (8, 2.0, 1.0)], 8),
        ([(8, 2.0, 1.0), (16, 1.0, 1.0)], None),
        ([], None),
    ],
)
def test_the_adaptive_rule(pairs, least):
    assert ranges.threshold([pair(*x) for x in pairs]) == least


NEEDLE = ("--framework=jax", "--S=128", "--dtype=f32")


def test_the_needle_is_found(tmp_path, capsys):
    status, (found,), (row,) = run(needle, tmp_path, *SMALL, *NEEDLE, "--pos=53")
    assert status == 0 and found.status == "ok", found.reason
    assert (row["block"], row["selected"], row["forced"]) == ("6", "[True, True]", "False")
    assert float(row["weight"]) > 0.99 and float(row["cos"]) > 0.8
    assert 0 < float(row["mae"]) < 1e-6 and float(row["time_ms"]) == found.time_ms
    assert re.match(
        r"\{'S': 128, 'pos': 53, 'cos': 0\.\d+, 'mae': \S+, 'time_ms': \d",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    ("block", "expected"), [(0, True), (1, False), (13, False), (14, True)]
)
def test_a_forced_block_says_nothing_of_the_scores(block, expected):
    assert needle.forced(block, 128, CONFIG) == expected


def test_a_needle_that_is_not_selected_fails(tmp_path, capsys, monkeypatch):
    whole = branches.select_blocks

    def blind(query, compressed_key, **options):
        found = whole(query, compressed_key, **options)
        row = jnp.asarray([0, 9, 14, 15], jnp.int32)
        return found.at[:, -1, 1].set(row) if query.shape[1] == 128 else found

    monkeypatch.setattr(branches, "select_blocks", blind)
    status, (found,), (row,) = run(needle, tmp_path, *SMALL, *NEEDLE, "--pos=53")
    assert status == 1 and found.status == "wrong"
    assert "block 6 is not selected by key/value heads [1]" in found.reason
    assert row["selected"] == "[True, False]" and row["time_ms"] == ""
    assert "'time_ms': None" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "needle.csv").write_text("mine")
    with pytest.raises(ValueError, match=r"needle\.csv exists; --out and --csv must name"):
        run(needle, tmp_path, *SMALL, *NEEDLE)
    assert (tmp_path / "needle.csv").read_text() == "mine"

"""`bench.prefill`, `bench.ranges` and `bench.needle`: their tables, and what is wrong."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from bench import needle, prefill, ranges
from nsa_jax import branches
from nsa_jax import ranges as library
from tests.commands import CONFIG, SIZES, run
from tests.measured import pairs
from tests.refusals import refused
from tests.tables import table

SMALL = f"{SIZES} --B=2 --framework=jax --S_list=31,40 --input=random"


def test_prefill(tmp_path, capsys):
    status, found, rows = run(prefill, tmp_path, SMALL)
    printed = capsys.readouterr().out
    assert status == 0
    for length, each, row in zip((31, 40), found, rows, strict=True):
        assert (each.S, each.T, each.B, each.branch) == (length, length, 2, "all")
        assert (each.implementation, each.status, each.device) == ("xla", "ok", "cpu")
        assert float(row["tokens_per_s"]) == pytest.approx(2 * length / each.time_ms * 1e3)
        assert float(row["ms"]) == each.time_ms
        assert f"S={length} {each.time_ms:.3f} ms (p20 " in printed
    gain = found[1].time_ms / found[0].time_ms
    scaling = [float(rows[1][name]) for name in ("scaling", "exponent")]
    assert scaling == pytest.approx([gain, np.log(gain) / np.log(40 / 31)])
    assert rows[0]["scaling"] == rows[0]["exponent"] == "" and f"31->40: {gain:.2f}x" in printed


def test_ranges(tmp_path, capsys):
    status, found, table = run(ranges, tmp_path, SIZES, "--S_list=9,63 --B=2")
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
    status, found, (row,) = run(ranges, tmp_path, SIZES, "--S_list=63")
    assert status == 1 and {r.status for r in found} == {"wrong"}
    assert row["equal"] == "False" and row["v2_ms"] == row["speedup"] == ""
    printed = capsys.readouterr().out
    assert "differ in 1 of 126 rows" in printed and "v2 never" in printed


@pytest.mark.parametrize("gains, least", table("bench")["adaptive rule"])
def test_the_adaptive_rule(gains, least):
    found = pairs("scores", gains, "ranges_v2", base="ranges_v1")
    assert ranges.threshold([*itertools.batched(found, 2)]) == least


NEEDLE = f"{SIZES} --framework=jax --S=128 --dtype=f32 --pos=53"


def test_the_needle_is_found(tmp_path, capsys):
    status, (found,), (row,) = run(needle, tmp_path, NEEDLE)
    assert status == 0 and found.status == "ok", found.reason
    assert (row["block"], row["selected"], row["forced"]) == ("6", "[True, True]", "False")
    assert float(row["weight"]) > 0.99 and float(row["cos"]) > 0.8
    assert 0 < float(row["mae"]) < 1e-6 and float(row["time_ms"]) == found.time_ms
    assert re.match(
        r"\{'S': 128, 'pos': 53, 'cos': 0\.\d+, 'mae': \S+, 'time_ms': \d",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize("block, expected", table("bench")["forced blocks"])
def test_a_forced_block_says_nothing_of_the_scores(block, expected):
    assert needle.forced(block, 128, CONFIG) == expected


def test_a_needle_that_is_not_selected_fails(tmp_path, capsys, monkeypatch):
    whole = branches.select_blocks

    def blind(query, compressed_key, **options):
        found = whole(query, compressed_key, **options)
        row = jnp.asarray([0, 9, 14, 15], jnp.int32)
        return found.at[:, -1, 1].set(row) if query.shape[1] == 128 else found

    monkeypatch.setattr(branches, "select_blocks", blind)
    status, (found,), (row,) = run(needle, tmp_path, NEEDLE)
    assert status == 1 and found.status == "wrong"
    assert "block 6 is not selected by key/value heads [1]" in found.reason
    assert row["selected"] == "[True, False]" and row["time_ms"] == ""
    assert "'time_ms': None" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "needle.csv").write_text("mine")
    with refused("needle.csv exists; --out and --csv must name"):
        run(needle, tmp_path, NEEDLE)
    assert (tmp_path / "needle.csv").read_text() == "mine"

"""Every row of a selection beside the reference's: what differs must be rounding."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from bench import indices
from bench.harness import problems
from bench.judge import selection_shortfall
from nsa_jax import branches
from tests.commands import run
from tests.limits import set_limits

SETTINGS = problems.settings("tiny", {"seq_len": 447})
CONFIG = SETTINGS.nsa


@pytest.fixture(scope="module", params=["random", "text"])
def inputs(request):
    return problems.make(SETTINGS, request.param)


@pytest.fixture(scope="module")
def wanted(inputs):
    return selection_shortfall.expected(inputs.query, inputs.compressed_key, CONFIG)


def compare(chosen, wanted, inputs):
    return selection_shortfall.compare(
        chosen, wanted, inputs.query, inputs.compressed_key, CONFIG
    )


def test_slabs_select_what_the_whole_selects(inputs, wanted, monkeypatch):
    assert wanted.shape == (1, 447, 2, CONFIG.num_selected)
    set_limits(monkeypatch, oracle_elements=4 * 55 * 100)  # slabs of 100 rows
    again = selection_shortfall.expected(inputs.query, inputs.compressed_key, CONFIG)
    np.testing.assert_array_equal(again, wanted)


def test_one_altered_index_is_caught(inputs, wanted):
    """The mutant: in one row a block that was left out takes the place of a scored one. Where the
    reference's own rounding chose so, the other side is not to blame.
    """
    token, head = 440, 1
    row = wanted[0, token, head].tolist()
    spare = next(block for block in range(1, 12) if block not in row)
    chosen = wanted.copy()
    chosen[0, token, head] = sorted([row[0], spare, *row[2:]])
    found = compare(chosen, wanted, inputs)
    assert (found.differing, found.unexplained) == (1, 1)
    error, bound = found.worst
    assert error > 10 * bound > 0
    first, mine, theirs, scores = found.report().splitlines()
    assert first.startswith(f"batch 0 token {token} kv head {head}: falls short by")
    assert mine.endswith(str(chosen[0, token, head].tolist())) and theirs.endswith(str(row))
    only = re.search(r"chosen {(\d+): (\S+)}, only in the reference {(\d+): (\S+)}", scores)
    assert [int(x) for x in only.group(1, 3)] == [spare, row[1]]
    lower, higher = map(float, only.group(2, 4))
    assert error == pytest.approx((higher - lower) / higher, rel=1e-6)
    turned = compare(wanted, chosen, inputs)
    assert (turned.differing, turned.unexplained, turned.worst[0]) == (1, 0, 0)


def test_a_row_of_the_wrong_form_is_reported(inputs, wanted):
    for token, slot in ((440, -1), (5, -2)):  # a block is missing; an empty slot has a number
        chosen = wanted.copy()
        chosen[0, token, 0, -1] = slot
        found = compare(chosen, wanted, inputs)
        assert found.unexplained == 1 and found.worst is None
        assert "empty slots must be -1" in found.report()


@pytest.mark.parametrize("scale, explained", [(1e-7, True), (0.0, True), (1e-2, False)])
def test_a_near_tie_is_explained(scale, explained):
    """Queries of nearly zero see all keys nearly alike: any blocks are as good as the best."""
    inputs = problems.make(SETTINGS, "random")
    query = inputs.query * scale
    wanted = selection_shortfall.expected(query, inputs.compressed_key, CONFIG)
    token = 440
    row = wanted[0, token, 0].tolist()
    # Block 0 has one compressed token less, and is forced.
    others = [block for block in range(1, 12) if block not in row][:3]
    chosen = wanted.copy()
    chosen[0, token, 0] = [0, *others, *row[4:]]
    found = selection_shortfall.compare(chosen, wanted, query, inputs.compressed_key, CONFIG)
    assert found.differing == 1 and found.unexplained == (not explained)
    error, bound = found.worst
    assert (error <= bound) == explained and bound < 1e-4


def test_rows_beyond_the_most_that_are_scored_stay_unexplained(inputs, wanted, monkeypatch):
    set_limits(monkeypatch, shortfall_rows=3)
    chosen = wanted.copy()
    chosen[0, 440:445, :, -1] = -1
    found = compare(chosen, wanted, inputs)
    assert (found.differing, len(found.reports), found.unexplained) == (10, 3, 10)
    assert found.report(2).endswith("... and 8 more")
    with pytest.raises(ValueError, match="chosen must have shape"):
        compare(chosen[..., :-1], wanted, inputs)


def test_devices_are_named_once(tmp_path, monkeypatch, capsys):
    """That of both frameworks is one."""
    monkeypatch.setattr(indices.run, "rows", lambda *_: [])
    run(indices, tmp_path, "--framework=both", "--config=tiny")
    assert capsys.readouterr().out.startswith("device: cpu; ")


@pytest.mark.parametrize("mutant", [False, True])
def test_the_command(mutant, tmp_path, monkeypatch, capsys):
    """The implementation `xla` as it is, or with one index altered."""
    whole = branches.select_blocks

    def altered(*arguments, **options):
        found = whole(*arguments, **options)
        row = found[0, 300, 1]
        return found.at[0, 300, 1, 1].set(jnp.where(row[1] == 1, 2, 1))

    if mutant:
        monkeypatch.setattr(branches, "select_blocks", altered)
    words = "--framework=both --config=tiny --seq_len=318 --row_seconds=0"
    status, found, _ = run(indices, tmp_path, words)
    assert status == mutant
    assert {(row.bench, row.implementation, row.rows_checked, row.input) for row in found} == {
        ("indices", name, 318, kind) for name in ("xla", "sdpa") for kind in ("random", "text")
    }
    if not mutant:
        assert all(row.status == "ok" and row.time_ms for row in found)
        return
    found = [row for row in found if row.implementation == "xla"]
    assert "batch 0 token 300 kv head 1: " in capsys.readouterr().out
    for row in found:
        assert row.status == "wrong" and row.rows_differ == 1
        assert "1 of 636 rows unexplained" in row.reason

"""The committed records: readable, what fails is shown, and the page is made from them."""

import dataclasses

import pytest

from bench import doc_tables
from bench.harness import records
from bench.lm import log
from bench.reports import render

RECORDS = [
    r for path in sorted(records.FOLDER.glob("*/compare.jsonl")) for r in records.read(path)
]
RULE = {"error_rms": 1e-3, "error_rms_bound": 4e-3, "slope": 1.0002}


def row_of(table, record):
    """Cells by column of the row of a record's path."""
    path = [record.device, record.framework, record.branch, record.implementation, record.mode]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    (cells,) = (cells for cells in lines if cells[:5] == path)
    return dict(zip(lines[0], cells, strict=True))


def test_no_committed_row_broke_and_what_is_wrong_is_shown():
    assert RECORDS, "bench/records holds no record of bench.compare"
    broken = [r for r in RECORDS if r.status == "error"]
    assert not broken, [(r.device, r.branch, r.implementation, r.reason) for r in broken]
    table = doc_tables.parity(RECORDS)
    for record in RECORDS:
        if record.status == "wrong" and record.branch != "dense":
            assert row_of(table, record)["status"].startswith("wrong: "), record


def good(**fields):
    found = next(
        r for r in RECORDS if r.status == "ok" and r.branch == "selected" and not r.slope
    )
    return dataclasses.replace(found, **fields)


def test_a_failing_record_shows_in_the_table():
    for rule in ({}, RULE):
        bad = good(status="wrong", reason="far off", T=3)
        row = row_of(doc_tables.parity([good(**rule), bad, good(**rule)]), bad)
        assert row["status"] == "wrong: far off" and row["problems"] == "2"


def test_a_record_without_rms_is_shown_as_such():
    old, new, other = good(), good(**RULE), good(T=3)
    assert old.error_rms is None and old.slope is None
    for some, said in (
        ([old], "ok by max and mean only"),
        ([old, new], "ok"),  # measured again
        ([old, new, other], "ok, 1 of 2 by max and mean only"),
    ):
        row = row_of(doc_tables.parity(some), old)
        assert row["status"] == said
        judged = new in some
        assert row["rms"] == ("0.001" if judged else "-")
        assert row["slope"] == ("1.00020" if judged else "-")


def test_a_slope_that_fails_uses_more_than_its_bound():
    assert good(**RULE).bound_share == pytest.approx(max(0.25, 0.2, good().bound_share))
    assert good(**RULE | {"slope": 0.998}).bound_share == pytest.approx(2)


def test_every_committed_line_is_whole():
    for path in sorted(records.FOLDER.rglob("*.jsonl")):
        first = next(iter(records.read_lines(path)))[1]
        assert (log if "kind" in first else records).read(path)


def test_dense_and_refused_rows_are_no_paths():
    good = next(r for r in RECORDS if r.status == "ok")
    for change in ({"branch": "dense"}, {"status": "unsupported"}, {"status": "oom"}):
        change |= {"reason": "no"}
        assert not render.judged([dataclasses.replace(good, **change)])

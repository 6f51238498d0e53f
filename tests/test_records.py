"""The committed records: readable, none wrong, and the page beside them made from them."""

import dataclasses

from bench import parity_table

RECORDS = parity_table.load()


def test_the_committed_records_hold_no_failing_row():
    assert RECORDS, "bench/records holds no record of bench.compare"
    bad = [r for r in RECORDS if r.status in ("wrong", "error")]
    assert not bad, [(r.device, r.framework, r.branch, r.implementation, r.reason) for r in bad]


def test_the_page_is_made_from_the_records():
    page = (parity_table.FOLDER / "README.md").read_text()
    assert page == parity_table.HEAD + parity_table.table(RECORDS)


def test_a_failing_record_shows_in_the_table():
    good = next(r for r in RECORDS if r.status == "ok" and r.branch == "selected")
    bad = dataclasses.replace(good, status="wrong", reason="far off", T=3)
    row = next(
        line
        for line in parity_table.table([good, bad]).splitlines()
        if f"| {good.implementation} | {good.mode} |" in line
    )
    assert row.endswith("| wrong: far off |")
    assert "| 2 |" in row


def test_dense_and_refused_rows_are_no_paths():
    good = next(r for r in RECORDS if r.status == "ok")
    for change in ({"branch": "dense"}, {"status": "unsupported"}, {"status": "oom"}):
        assert not parity_table.paths([dataclasses.replace(good, **change)])

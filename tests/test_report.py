"""The report: everything in it comes from records, nothing in it is hidden or made up."""

import dataclasses
import html
import re

import pytest
import yaml
from markupsafe import escape

from bench import report
from bench.harness import records
from bench.reports import plots, render, sources
from nsa_core import policy
from tests import commands, pretend
from tests.measured import GPU, made, record
from tests.tables import table

TABLE = table("test_report")
EVIL = "<script>alert('x')</script>"


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Writes the rows and reads them as a report."""
    pretend.folder(monkeypatch, "devices", tmp_path / "devices")

    def call(rows):
        records.append(tmp_path / "rows.jsonl", rows)
        return sources.read([tmp_path / "rows.jsonl"])

    return call


def rows_of(text):
    """The cells of each row of the table of measurements, as text."""
    body = text[text.index('id="rows"') :]
    body = body[body.index("<tbody>") : body.index("</tbody>")]
    lines = [re.findall(r"<td.*?</td>", line) for line in body.split("</tr>")[:-1]]
    names = re.findall(r'<button type="button">(.*?)</button>', text)
    plain = [[html.unescape(re.sub(r"<[^>]*>", " ", cell)) for cell in row] for row in lines]
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in plain]


def test_rows_with_speed_ups_and_errors(build):
    _, sdpa, fast = rows_of(report.html(build(made(TABLE["speed-ups"])), []))
    assert (sdpa["over dense"], sdpa["over portable"]) == ("4x", "1x")
    assert (fast["over dense"], fast["over portable"]) == ("8x", "2x")
    assert fast["ms"].split()[0] == "0.5" and fast["error / bound"].split() == [
        "0.01",
        "of",
        "0.1",
    ]


def test_a_speed_up_is_over_the_fastest_dense_of_the_same_problem():
    assert render.speed_ups(made(TABLE["fastest dense"])) == [0.1, 1.0, 4.0, *[None] * 5]
    assert render.speed_ups(made(TABLE["wrong dense"])) == [None] * 2


@pytest.mark.parametrize("status", ["wrong", "oom", "unsupported", "error"])
def test_a_failed_row_shows_its_reason_and_no_speed(build, status):
    bad = record("sliding", "fa2", 0.5, status=status, reason="it went astray")
    found = build([*made(TABLE["failed"]), bad])
    row = rows_of(report.html(found, []))[2]
    assert row["status"] == status and "it went astray" in row["note"]
    assert [row[name] for name in ("ms", "over dense", "over portable", "TFLOP/s")] == ["-"] * 4
    text = report.markdown(found)
    assert f"- {status}: torch sliding fa2, 1 rows: it went astray" in text
    assert "x2.00" not in text
    if status in ("wrong", "error"):
        assert f"| torch sliding fa2 forward | 1 | 0.10 | FAIL: 1 {status} |" in text


def test_text_of_records_is_escaped(build):
    fields = dict(reason=EVIL, device=EVIL, input=EVIL, dtype=EVIL, commit=EVIL)
    fields |= dict(versions={"python": EVIL}, bench=EVIL, refused={EVIL: EVIL})
    rows = [record("sliding", EVIL, None, status="error", **fields)]
    for length in (1024, 2048):  # of which there is a chart, in the first section
        rows += [record("all", "mosaic", 1.0, S=length, **fields)]
        rows += [record("dense", EVIL, 2.0, S=length, **fields)]
    found = build(rows)
    found.title = EVIL
    text = report.html(found, [])
    assert EVIL not in text and escape(EVIL) in text
    assert "&lt;script&gt;" in text[text.index('class="answers"') : text.index("</section>")]
    assert text.count("<script>") == 1


def test_the_page_asks_for_nothing(build, tmp_path):
    found = build(made(TABLE["page"]))
    figures = plots.plots(found.records, tmp_path)
    text = report.html(found, figures)
    assert not re.search(r"(src|href)=[\"'](?!#|data:)", text)
    assert "@import" not in text and '<link rel="icon" href="data:,">' in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_plots_of_what_was_timed(build, tmp_path):
    timed = made(TABLE["plots"])
    found = plots.plots(timed, tmp_path)
    titles = [plot.title.partition(":")[0] for plot in found]
    assert titles == ["Time", "Speed-up over dense attention"]
    assert all(plot.png.read_bytes().startswith(b"\x89PNG") for plot in found)
    assert all("currentColor" in plot.svg and plots.INK not in plot.svg for plot in found)
    wrong = [dataclasses.replace(r, status="wrong", reason="x") for r in timed]
    assert plots.plots(wrong, tmp_path) == []


def test_lines_join_what_differs_in_length_only():
    found = list(plots.panels(made(TABLE["lines"]), lambda r: r.time_ms))
    assert [panel[:2] for panel in found] == [
        ("selected", "selected keys per query"),
        ("sliding", "tokens"),
    ]
    assert [len(line) for _, _, lines in found for line in lines] == [2, 2, 2, 2]


def test_single_dots_are_no_plot(tmp_path):
    assert plots.plots(made(TABLE["dots"]), tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_markdown_has_the_seeds_sections(build):
    text = report.markdown(build(made(TABLE["sections"])))
    assert not [part for part in TABLE["has"] if part not in text]
    assert not [part for part in TABLE["lacks"] if part in text]


def test_verdicts_of_a_training_run_are_shown(tmp_path):
    path = records.FOLDER / "nvidia-h100-80gb-hbm3" / "train.jsonl"
    found = sources.read([path])
    text, shown = report.markdown(found), report.html(found, [])
    for question in ("JAX and torch agree at every step, nsa", "NSA's held-out loss within"):
        assert f"- {question}" in text and f"<li>{escape(question)}" in shown


def test_thresholds_stand_with_their_evidence(build, tmp_path):
    data = {"schema": policy.SCHEMA, "device": GPU, "runtime": {"fa2_min_len_win": "never"}}
    about = {"margin": 1.25, "rows": 7, "decided_by": [{"length": 512, "row": "a.jsonl:3"}]}
    data["evidence"] = {"fa2_min_len_win": about}
    rule = dict(kernel="triton", steps=["selected"], allowed=False, reason=EVIL, since="2025")
    data["policy"] = [rule]
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "nvidia-test-80gb.yaml").write_text(yaml.safe_dump(data))
    found = build([record("sliding", "fa2", 1.0)])
    text = report.html(found, [])
    for part in ("runtime.fa2_min_len_win", ">never<", "margin 1.25", "7 rows", "a.jsonl:3"):
        assert part in text
    assert "triton not allowed for selected since 2025" in text and EVIL not in text
    assert "- runtime.fa2_min_len_win: never (7 rows, margin 1.25)" in report.markdown(found)


def test_the_committed_records_make_a_report(tmp_path, monkeypatch):
    """All of them and the training logs, by the command; without plots, which are slow."""
    monkeypatch.setattr(plots, "plots", lambda rows, folder: [])
    paths = sorted(records.FOLDER.glob("*/*.jsonl"))
    given = report, "--out", tmp_path, *paths
    assert commands.called(*given) == 0
    with pytest.raises(ValueError, match=r"report.md exists; --out must name a new folder"):
        commands.called(*given)
    text = (tmp_path / "report.html").read_text()
    found = sources.read(paths)
    assert len(rows_of(text)) == len(found.rows) > 0
    assert found.training and 'id="training"' in text
    assert {f"bench/records/{p.parent.name}/{p.name}" for p in paths} <= set(
        re.findall(r"<code>([^<]*jsonl)</code>", text)
    )
    assert (
        str(records.FOLDER) not in text
        and str(records.FOLDER) not in (tmp_path / "report.md").read_text()
    )

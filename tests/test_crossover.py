"""From which length NSA is faster: the answer, its words and its drawing, from records alone."""

import dataclasses
import re

import pytest

from bench import report
from bench.lm.log import Speed
from bench.reports import crossover, plots, sources
from tests.measured import GPU, logged, record
from tests.tables import table


def sweep(gains, *, dense=("cudnn", "flash"), **fields):
    """Rows at each length: cuDNN takes 1 ms, FA-2 2 ms; a gain of None is a wrong row."""
    rows = []
    for tokens, gain in gains.items():
        rows.append(record("all", "mosaic", gain and 1 / gain, S=tokens, **fields))
        times = {"cudnn": 1.0, "flash": 2.0}
        rows += [record("dense", name, times[name], S=tokens, **fields) for name in dense]
    return rows


def speed(attention, implementation, seq_len, ms, batch=None):
    times = dict(time_ms=ms, p20_ms=ms, p80_ms=ms, samples=5)
    name = dict(attention=attention, implementation=implementation, seq_len=seq_len)
    return logged(Speed, **name, **times, model="125m", batch=batch or 32768 // seq_len)


def panel(rows, question="forward", lines=()):
    (each,) = crossover.panels(rows, lines).values()
    return next(panel for panel in each if panel.name == crossover.QUESTIONS[question])


NOT_MEASURED = "not measured together with dense attention"


@pytest.mark.parametrize("gains, answer", table("bench")["answers"])
def test_the_length_from_which_it_is_faster(gains, answer):
    beside = sweep({512: 1.0, 1024: 1.0}, mode="decode")
    assert panel([*sweep(gains), *beside]).answer == answer


def test_several_queries_are_a_problem_of_their_own():
    """Of a decode step: rows of four new tokens do not stand among those of one."""
    rows = sweep({1024: 0.5, 2048: 2.0}, mode="decode", T=1)
    rows += sweep({1024: 4.0, 2048: 4.0, 4096: 8.0}, mode="decode", T=4)
    found = list(crossover.runs(rows, []))
    assert {run.problem for run in found[:6]}.isdisjoint(run.problem for run in found[6:])
    about = [crossover.render.filled("problem.txt.jinja", row=found[i].row) for i in (0, -1)]
    assert "queries" not in about[0] and "4 queries each" in about[1]
    one = [row for row in rows if row.T == 1]
    assert panel(one, "decode").crossover == 2048


def test_the_sentence_of_a_device():
    (each,) = crossover.panels(sweep({1024: 0.5, 2048: 2.0}), []).values()
    assert crossover.render.filled("sentence.txt.jinja", device=GPU, panels=each) == (
        f"{GPU}: forward from 2k tokens (2x); forward + backward {NOT_MEASURED}; "
        f"training step {NOT_MEASURED}; decode {NOT_MEASURED}."
    )


def test_a_dense_kernel_that_is_not_beside_it_leaves_a_win_open():
    """cuDNN, faster than FA-2, has no row at 4k: NSA may or may not beat it there."""
    rows = sweep({1024: 0.5, 2048: 2.0}) + sweep({4096: 3.0, 512: 0.1}, dense=("flash",))
    found = panel(rows)
    assert [point.faster for point in found.points] == [False, False, True, None]
    assert found.crossover == 2048 and found.answer == "from 2k tokens (2x)"
    hollow = [tokens for tokens, _, _, missing in found.curves[""] if missing]
    assert hollow == [512, 4096]
    oom = record("dense", "cudnn", None, S=4096, status="oom", reason="too long")
    assert panel([*rows, oom]).answer == "from 2k tokens (6x at 4k)"  # a failure is an answer


def test_frameworks_shapes_and_devices_are_not_mixed():
    """Of several problems the one with the most lengths is shown, each beside its own dense."""
    rows = sweep({1024: 0.5, 2048: 2.0, 4096: 4.0})
    jax = [r for r in sweep({1024: 9.0, 2048: 9.0}, framework="jax") if r.branch == "all"]
    assert panel([*rows, *jax]).answer == "from 2k tokens (4x at 4k)"
    assert crossover.panels(jax, []) == {}
    wide = sweep({1024: 8.0, 2048: 8.0}, H=64)
    assert panel([*rows, *wide]).about.startswith("torch, 8/2 heads of 64")
    both = crossover.panels([*rows, *sweep({1024: 2.0, 2048: 3.0}, device="B")], [])
    assert list(both) == [GPU, "B"]


@pytest.mark.parametrize("names, lengths, fields", table("bench")["faster rows"])
def test_faster_rows_that_do_not_count(names, lengths, fields):
    rows = sweep({1024: 0.5, 2048: 2.0})
    rows += [record("all", name, 0.01, S=n, **fields) for name in names for n in lengths]
    found = panel(rows)
    assert found.crossover == 2048
    assert {point.ours.implementation for point in found.points} == {"mosaic"}


def test_the_newest_row_counts():
    old = sweep({512: 0.4, 1024: 0.5, 2048: 0.6})
    new = record("all", "mosaic", 0.25, S=2048, time="2026-02-02T00:00:00+00:00", commit="b")
    assert panel([new, *old]).crossover == 2048
    dense = [dataclasses.replace(r, commit="d") for r in old if r.branch == "dense"]
    rows = panel([new, *old, *dense]).rows
    assert [*dict.fromkeys(row.commit for row in rows)] == ["c0ffee", "d", "b"]
    wrong = dataclasses.replace(new, status="wrong", reason="far off", time="2026-03-03")
    assert panel([wrong, new, *old]).crossover is None


def test_training_steps_are_compared_at_equal_tokens_a_step():
    lines = [speed("nsa", "mosaic", n, ms) for n, ms in ((2048, 9.0), (8192, 9.0))]
    lines += [speed("dense", "cudnn", n, ms) for n, ms in ((2048, 5.0), (8192, 18.0))]
    lines += [speed("nsa", "mosaic", 512, 0.1, batch=1)]
    found = panel([], "step", lines)
    assert found.answer == "from 8k tokens (2x)"
    about = "torch, 125m model, 32768 tokens per step, bfloat16"
    assert found.about == f"{about}; NSA by mosaic"


def test_a_wrong_row_is_a_word_and_breaks_the_line():
    rows = sweep({1024: 0.5, 2048: 0.7, 4096: None, 8192: 2.0, 16384: 4.0})
    found = panel(rows)
    assert [ratio for _, ratio, *_ in found.curves[""]] == [0.5, 0.7, None, 2.0, 4.0]
    assert [ratio for _, ratio, *_ in found.curves["cudnn"]] == [1.0] * 5
    drawing = plots.answer(found, 0)
    assert re.findall(r">(\w+)</text>", drawing).count("wrong") == 1
    assert found.crossover == 8192 and "cuDNN" in drawing


def page(rows):
    return report.html(sources.Report("x", [], [("a:1", r) for r in rows], [], []), [])


def test_no_chart_of_nothing_or_of_single_dots():
    some = sweep({1024: 2.0})
    alone = [r for r in sweep({1024: 2.0, 2048: 2.0}) if r.branch == "all"]
    failed = sweep({1024: None, 2048: None})
    for rows in ([], some, alone, failed):
        assert crossover.panels(rows, []) == {}
        text = page(rows)
        assert "From which length" not in text and 'class="answers"' not in text
    rows = [*sweep({1024: 0.5, 2048: 2.0}), *sweep({1024: 2.0}, mode="fwdbwd")]
    rows += [record("dense", "math", 9.0, S=2048)]
    (each,) = crossover.panels(rows, []).values()
    text = page(rows)
    drawing = text[text.index('class="answers"') : text.index("</section>")]
    assert drawing.count("<svg") == 1 and drawing.count('<figure class="none">') == 3
    assert "math" not in drawing, "one dot of a dense kernel is no line"
    assert plots.answers(each).count('id="axes_') == 1

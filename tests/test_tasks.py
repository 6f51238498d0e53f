"""`bench.lm.tasks`: rows with records, and what is measured on them."""

import dataclasses

import numpy as np
import pytest

from bench.lm import experiments, log, tasks, tokens
from bench.lm.share import Share
from nsa_core.layer import LayerSpec
from tests.test_experiments import TINY, command  # noqa: F401, a fixture
from tests.test_train import TABLE

WIDTH, VOCABULARY = 4001, 512
LAYER = LayerSpec(**TABLE["layers"]["records"])


def rows_of(share, seed=1, pack="once"):
    places = np.arange(200_000) % 300  # no token of the text is a symbol
    documents = tokens.Documents("x", places, np.array([0, 200_000]), VOCABULARY, "0" * 64)
    return tasks.Tasks(2, WIDTH - 1, seed, share=share, documents=documents, pack=pack)


class Solver:
    """Predicts a value if its record occurs within `reach` tokens; its head 3 selects the blocks
    of all sources, and no other head of it selects one."""

    def __init__(self, batches, reach):
        self.batches, self.reach, self.share = batches, reach, Share(2)

    def loss_sums(self, batch, categories, count):
        found = np.zeros(count)
        for row, column in np.argwhere(categories < count):
            record = batch.tokens[row, column - 2 : column + 2]
            before = batch.tokens[row, max(0, column + 1 - self.reach) : column]
            seen = (np.lib.stride_tricks.sliding_window_view(before, 4) == record).all(-1)
            found[categories[row, column]] = 0.1 if seen.any() else 4.0
        return found

    def observe(self, batch, row=0):
        length, text = WIDTH - 1, batch.tokens[row]
        heads = np.zeros((length, 2, 4), int)
        heads[..., 1:] = -1
        last = {}
        for at in np.flatnonzero(text == VOCABULARY - tasks.SYMBOLS - 1):
            record = tuple(text[at : at + 4])
            if record in last and at + 2 < length:
                heads[at + 2, 1, 1] = (last[record] + 3) // LAYER.l_sel
            last[record] = at
        silent = np.zeros_like(heads)
        return [(np.zeros(0), silent), (np.zeros(0), heads)]


def test_the_copies_of_records_lie_at_log_uniform_distances():
    row = np.arange(WIDTH)
    at = tasks.place(row, np.random.default_rng(0), VOCABULARY)
    assert (row != np.arange(WIDTH)).sum() > 4 * 2 * len(at)  # repeated text, too
    source, copy = at.T
    for offset in range(tasks.RECORD):
        assert (row[source - offset] == row[copy - offset]).all()
    assert len({tuple(row[x - 2 : x]) for x in source}) == len(at)  # different keys
    apart = np.concatenate(
        [
            np.diff(tasks.place(row.copy(), np.random.default_rng(i), VOCABULARY)).ravel()
            for i in range(40)
        ]
    )
    assert (apart > 0).all()
    counts = [((apart >= x) & (apart < 2 * x)).sum() for x in (128, 256, 512, 1024)]
    assert min(counts) > 0.75 * max(counts)


def test_a_share_of_the_rows_has_tasks_and_the_held_out_rows_have_none():
    some, none = rows_of(0.3), rows_of(0.0)
    assert some.sha256 != none.sha256
    changed = []
    for step in range(40):
        before, after = none.train(step).tokens, some.train(step).tokens
        assert (some.train(step, slice(1, 2)).tokens == after[1:]).all()
        changed += (before != after).any(axis=1).tolist()
    assert 0.15 < np.mean(changed) < 0.45
    assert all(x.tokens.max() < 300 for x in some.evaluation(4))


def test_solved_by_distance_and_the_head_that_selects_the_sources():
    batches = rows_of(1.0)
    found = tasks.measured(Solver(batches, reach=1024), batches, LAYER)
    at = found["records_at"]
    assert list(at) == ["64", "128", "256", "512", "1024", "2048"]
    for distance, values in at.items():
        near = int(distance) < 1024
        assert values["solved"] == near, distance
        assert values["loss"] == pytest.approx(0.1 if near else 4.0)
        if int(distance) >= 128:
            assert values["hit"] == 1 and values["chance"] < 0.2
    assert list(found["needle"]) == ["1024", "2048", "4096"]
    assert found["needle"]["1024"] == [1.0] * 6
    assert found["needle"]["4096"] == [0.0] * 4 + [1.0] * 2  # 0.2 of 4096 is in reach


def test_a_run_on_rows_with_tasks_measures_them(command, tmp_path, monkeypatch):  # noqa: F811
    tiny = dataclasses.replace(TINY, tasks=0.5, length=400)
    monkeypatch.setitem(experiments.SETTINGS, "tiny", tiny)
    assert command("--seeds=1") == 0
    for name in ("dense", "sigmoid"):
        lines = log.read(tmp_path / f"runs/tiny/{name}-1.jsonl")
        (end,) = (x for x in lines if isinstance(x, log.Summary))
        assert end.records_at and all(0 <= x["solved"] <= 1 for x in end.records_at.values())
        assert ("hit" in end.records_at["64"]) == (name == "sigmoid")


def test_rows_that_cannot_have_tasks_are_refused():
    with pytest.raises(
        ValueError, match=r"must come from one text .* and have at least 256 tokens, got"
    ):
        rows_of(0.1, pack="documents")

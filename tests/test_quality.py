"""Recall of passages, and NSA against dense attention over seeds, from posed rows and runs."""

import numpy as np
import pytest

from bench.lm import log, loop, quality, recall
from bench.lm.data import Batch
from bench.lm.recall import PASSAGE
from tests.test_train import run_of, task

WINDOW, WIDTH = 40, 400


def rows(count=50, seed=0):
    return Batch(np.random.default_rng(seed).integers(0, 250, (count, WIDTH)))


def ends_in_its_own(row, window):
    """Whether the last tokens stand in the row further up, with `window` tokens between."""
    last = row[-PASSAGE:].tolist()
    return any(
        row[i : i + PASSAGE].tolist() == last
        for i in range(len(row) - 2 * PASSAGE - window + 1)
    )


def test_rows_end_in_what_they_hold_and_the_control_in_what_they_do_not():
    batch = rows()
    before = batch.tokens.copy()
    copy, control = recall.pair(batch, WINDOW, (1, 2))
    assert (batch.tokens == before).all()
    for each in (copy, control):
        assert (each.tokens[:, :-PASSAGE] == before[:, :-PASSAGE]).all()
        assert each.segment_ids is None
    assert all(ends_in_its_own(row, WINDOW) for row in copy.tokens)
    assert not any(ends_in_its_own(row, 0) for row in control.tokens)
    both = [np.sort(x.tokens[:, -PASSAGE:].ravel()) for x in (copy, control)]
    assert (both[0] != both[1]).any()  # places differ from row to row
    again, _ = recall.pair(batch, WINDOW, (1, 2))
    assert (again.tokens == copy.tokens).all()
    other, _ = recall.pair(batch, WINDOW, (1, 3))
    assert (other.tokens != copy.tokens).any()


def test_rows_without_room_have_none():
    packed = Batch(rows().tokens, np.zeros((50, WIDTH), np.int32))
    assert recall.pair(packed, WINDOW, (0,)) is None
    assert recall.pair(rows(1), WINDOW, (0,)) is None
    assert recall.pair(rows(), WIDTH - 2 * PASSAGE, (0,)) is None
    assert recall.pair(rows(), WIDTH - 2 * PASSAGE - 1, (0,)) is not None


def reader(batch):
    """The mean loss of a model that knows what follows four tokens that it has read before:
    1 nat there, 5 elsewhere.
    """
    losses = []
    for row in batch.tokens.tolist():
        seen = set()
        for i in range(len(row) - 1):
            known = tuple(row[i - 4 : i + 2]) in seen if i >= 4 else False
            losses.append(1.0 if known else 5.0)
            seen.add(tuple(row[i - 4 : i + 2]))
    return np.mean(losses)


def test_what_a_reader_gains():
    """Of 64 tokens it knows all but the first five, which follow too little of the passage."""
    pair = recall.pair(rows(), WINDOW, (0,))
    losses = np.array([[reader(x) for x in pair]])
    found = recall.gain(losses, WIDTH - 1)
    assert found == pytest.approx(4.0 * (PASSAGE - 5) / PASSAGE, abs=0.01)
    assert recall.gain(losses[:, ::-1], WIDTH - 1) == pytest.approx(-found)


def test_a_run_ends_with_its_recall(tmp_path):
    """Of rows that are long enough; the tiny model has learned nothing of it."""
    for length, there in ((200, True), (32, False)):
        run = run_of(tmp_path / str(length), "torch", task("nsa", seq_len=length, steps=2))
        gain = loop.run(run, loop.Stop()).recall_gain
        assert (gain is not None) == there
        assert gain is None or abs(gain) < 0.5


def lines(attention, seed, held_out, gain, steps=10, status="ok"):
    name = {"framework": "torch", "attention": attention, "implementation": "x"}
    training = {"seed": seed, "steps": steps, "batch": 2, "seq_len": 8}
    header = log.Header(
        **name,
        model={"layers": 1},
        training=training,
        dtype="float32",
        parameters=10 + (attention == "nsa"),
        input_sha256="0" * 64,
        device="cpu",
        time="now",
        versions={},
        commit="abc",
        first_step=0,
        flops=1,
        dirty=None,
        parallel=None,
    )
    end = log.Summary(
        **name, status=status, steps=steps, held_out_loss=held_out, recall_gain=gain
    )
    return [header, end]


def pair(seed, nsa, dense, **options):
    """Held-out loss and recall of both."""
    return [*lines("nsa", seed, *nsa, **options), *lines("dense", seed, *dense, **options)]


RUNS = {
    "a": pair(0, (1.10, 2.0), (1.00, 1.0)),
    "b": pair(1, (1.20, 2.5), (1.00, 1.0)),
    "c": pair(2, (1.60, 3.0), (1.30, 1.0)),
}


def test_differences_are_of_pairs():
    """0.1, 0.2, 0.3: mean 0.2, s = 0.1; 1, 1.5, 2: mean 1.5, s = 0.5."""
    loss, gain = quality.differences(RUNS)
    assert (loss.measure, gain.measure) == ("held-out loss", "recall")
    assert loss.mean == pytest.approx(0.2) and loss.error == pytest.approx(0.1 / 3**0.5)
    assert gain.mean == pytest.approx(1.5) and gain.error == pytest.approx(0.5 / 3**0.5)
    assert loss.t == pytest.approx(0.2 / (0.1 / 3**0.5)) and loss.seeds == (0, 1, 2)
    assert loss.nsa == pytest.approx(1.3) and loss.dense == pytest.approx(1.1)
    cells = quality.rows([loss])[0]
    assert cells[4:] == ["+0.2000", "0.0577", "+3.5", "0, 1, 2"]


def test_no_recall_of_short_rows():
    short = {"a": pair(0, (1.1, None), (1, None)), "b": pair(1, (1.2, None), (1, None))}
    assert [x.measure for x in quality.differences(short)] == ["held-out loss"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None, "c": None}, "needs two seeds"),
        ({"b": pair(0, (1, 1), (1, 1))}, "seed of its own"),
        ({"b": pair(1, (1, 1), (1, 1), steps=11)}, "alike but for the seed"),
        ({"b": pair(1, (1, 1), (1, 1), status="diverged")}, "a run that ended of torch-nsa"),
        ({"b": lines("nsa", 1, 1.0, 1.0)}, "a run that ended of torch-dense"),
    ],
)
def test_runs_that_are_no_pairs_are_refused(change, message):
    found = {name: each for name, each in (RUNS | change).items() if each}
    with pytest.raises(ValueError, match=message):
        quality.differences(found)


def test_the_command_prints_a_table(tmp_path, capsys):
    for name, each in RUNS.items():
        log.append(tmp_path / name, each)
    assert quality.main(["", *(str(tmp_path / name) for name in RUNS)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4 and table[2].startswith(
        "| torch | held-out loss | 1.3000 | 1.1000 |"
    )

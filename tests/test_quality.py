"""What is measured of held-out text; NSA against dense attention over seeds, of posed runs."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from bench.lm import log, measures, quality, recall
from bench.lm.data import Batch
from bench.lm.recall import PASSAGE
from bench.lm.share import Share
from nsa_core.layer import LayerSpec
from tests.measured import logged
from tests.parallel_worker import learner_of
from tests.refusals import refused
from tests.tables import table
from tests.test_train import task

TABLE = table("test_quality")
WINDOW, WIDTH = 40, 400
SIZES = dict(l=8, d=4, l_sel=16, n_sel=6, w=WINDOW)
small = functools.partial(LayerSpec, 8, 1, 1, 8, 8)
CONFIG = small(**SIZES).config


def rows(count=50, seed=0):
    return Batch(np.random.default_rng(seed).integers(0, 250, (count, WIDTH)))


def ends_in_its_own(row, window):
    """Whether the last tokens stand in the row further up, with `window` tokens between."""
    last = row[-PASSAGE:].tolist()
    return any(
        row[i : i + PASSAGE].tolist() == last
        for i in range(len(row) - 2 * PASSAGE - window + 1)
    )


def copies(batch, seed):
    return recall.copies(batch, recall.passages(batch, WINDOW, seed))


def test_rows_are_alike_but_for_a_passage_and_its_copy():
    batch = rows()
    before = batch.tokens.copy()
    read, control, unread = copies(batch, (1, 2))
    assert (batch.tokens == before).all()
    for each in (read, control):
        assert (each.tokens[:, :-PASSAGE] == before[:, :-PASSAGE]).all()
        assert each.segment_ids is None
    assert all(ends_in_its_own(row, WINDOW) for row in read.tokens)
    assert not any(ends_in_its_own(row, 0) for row in (*control.tokens, *unread.tokens))
    expected = read.tokens.copy()
    for row, start in enumerate(recall.passages(batch, WINDOW, (1, 2))):
        passage = slice(start, start + PASSAGE)
        expected[row, passage] = before[row - 1, passage]
        assert (control.tokens[row, -PASSAGE:] == before[row - 1, passage]).all()
    assert (unread.tokens == expected).all()
    both = [np.sort(x.tokens[:, -PASSAGE:].ravel()) for x in (read, control)]
    assert (both[0] != both[1]).any()  # places differ from row to row
    again = copies(batch, (1, 2))
    assert (again.read.tokens == read.tokens).all()
    other = copies(batch, (1, 3))
    assert (other.read.tokens != read.tokens).any()


def test_rows_without_room_have_none():
    packed = Batch(rows().tokens, np.zeros((50, WIDTH), np.int32))
    room = WIDTH - 2 * PASSAGE
    for batch, window in ((packed, WINDOW), (rows(1), WINDOW), (rows(), room)):
        assert recall.passages(batch, window, (0,)) is None
    assert recall.passages(rows(), room - 1, (0,)) is not None


class Reads:
    """A learner that knows what follows four tokens that it has read before, for 1 nat, and of
    what subject its row is: 3 nats for such a token, 5 for others."""

    share = Share(1)

    def loss_sums(self, batch, categories, count):
        found = np.zeros(count)
        for row, which in zip(batch.tokens.tolist(), categories.tolist(), strict=True):
            subject, seen = np.bincount(np.array(row) // 50).argmax(), set()
            for i, category in enumerate(which):
                five = tuple(row[max(0, i - 3) : i + 2])
                if category < count:
                    found[category] += (
                        1 if five in seen else 3 if five[-1] // 50 == subject else 5
                    )
                seen.add(five)
        return found

    def observe(self, batch, row=0):
        return []


def test_what_a_reader_gains():
    """Of 64 tokens it knows all but the first four, which follow too little of the passage; that
    they fit their row is no copying, and what other texts cost where they stand is none."""
    subject = np.arange(20)[:, None] % 5
    tokens = subject * 50 + np.random.default_rng(0).integers(0, 50, (20, WIDTH))
    held_out = [Batch(x[None]) for x in tokens]
    known, unknown = 1 * (PASSAGE - 4) / PASSAGE, 3 * 4 / PASSAGE
    found = measures.copies(Reads(), held_out, small(w=WINDOW), (0,), True)
    assert found["recall_gain"] == pytest.approx(5 - known - unknown, abs=0.01)
    assert found["copied_gain"] == pytest.approx(3 - known - unknown, abs=0.01)
    assert found["copied_at"] == pytest.approx(
        dict.fromkeys(("128", "256"), 3 - known - unknown), abs=0.02
    )


def slow_kinds(tokens, order, window, segments):
    """By loops over all earlier places."""
    found = np.zeros((tokens.shape[0], tokens.shape[1] - 1), int)
    for row, at in itertools.product(range(len(tokens)), range(order - 1, tokens.shape[1])):
        gram = tokens[row, at - order + 1 : at + 1].tolist()
        where = [
            before
            for before in range(order - 1, at)
            if tokens[row, before - order + 1 : before + 1].tolist() == gram
            and segments[row, before] == segments[row, at]
        ]
        if where:
            found[row, at - 1] = 1 if at - where[-1] < window else 2
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_kinds_of_targets_are_what_loops_say(dtype, packed):
    tokens = np.random.default_rng(0).integers(0, 4, (3, 90)).astype(dtype)
    segments = packed * np.repeat([[0, 1, 2]] * 3, 30, axis=1)
    found = measures.kinds(Batch(tokens, segments if packed else None), 3, 20)
    assert (found == slow_kinds(tokens, 3, 20, segments)).all()
    assert set(np.unique(found)) == {0, 1, 2}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_measures_are_means_of_the_losses_of_targets(tmp_path, attention):
    """In torch beside the loss of each target, in JAX beside torch."""
    todo = task(attention)
    torch, run = learner_of(tmp_path, todo)
    jax, _ = learner_of(tmp_path, todo, framework="jax")
    (batch,) = run.batches.evaluation(1)
    length = batch.tokens.shape[1] - 1
    each = np.arange(len(batch.tokens) * length).reshape(-1, length).astype(np.int32)
    losses = torch.loss_sums(batch, each, each.size).reshape(each.shape)
    assert measures.loss(torch, batch) == pytest.approx(losses.mean(), rel=1e-5)
    which = measures.categories(batch, 4, 256)
    kind, part = which // 3, which % 3
    expected = {"loss": losses.mean()}
    for names, index in ((measures.KINDS, kind), (measures.PARTS, part)):
        there = [(x, index == i) for i, x in enumerate(names)]
        expected |= {name: losses[mask].mean() for name, mask in there if mask.any()}
    assert (part == np.repeat([0, 1, 2, 2], length // 4)).all()
    for learner in (torch, jax):
        found = measures.HeldOut.of([batch, batch], 4, 256).measured(learner)
        assert found == pytest.approx(expected, rel=1e-5)


def test_copies_in_forced_blocks_have_no_hits():
    near, found = WIDTH - 1 - PASSAGE - 5, np.full((WIDTH - 1, 2, 6), -1)
    assert measures.hit(found, near, CONFIG) is None


def test_queries_whose_block_is_forced_do_not_count():
    """The passage starts in block 0, which every query selects, and goes on in free blocks."""
    found = np.zeros((WIDTH - 1, 2, 1), int)
    hits, chance = measures.hit(found, 0, CONFIG).T
    assert hits.tolist() == [0, 0] and (chance > 0).all()


class Selects:
    """A learner of one layer whose heads select, beside the blocks that all have to: the blocks
    that follow what stood before the query's last four tokens; as many at random; those before
    the forced ones, as models do that look at what is near."""

    share = Share(1)

    def __init__(self):
        self.random = np.random.default_rng(0)

    def loss_sums(self, batch, categories, count):
        return np.full(count, batch.tokens.size - len(batch.tokens), float)

    def observe(self, batch, row=0):
        tokens = batch.tokens[row]
        after, found = {}, np.full((len(tokens) - 1, 3, 6), -1)
        for query in range(3, len(tokens) - 1):
            own = query // 16
            free = np.arange(1, max(1, own - 1))
            last = tokens[query - 3 : query + 1].tobytes()
            # three heads by three free slots
            known = [after[last] // 16] if last in after else []
            chosen = self.random.permutation(free)[:3]
            for head, blocks in enumerate((known, chosen, free[::-1][:3])):
                slots = [0, own - 1, own, *(x for x in blocks if x in free)]
                found[query, head, : len(slots)] = slots
            after[last] = query + 1
        return [(np.zeros(0), found)]


def test_what_selections_find_of_copies():
    """Chance, which counts no forced block, is what a head at random hits. A head that looks at
    what is near hits less, which says nothing on copies: rows decide in which another text stands
    there, and a passage just beyond the window, where models can copy."""
    tokens = np.random.default_rng(1).integers(0, 250, (30, WIDTH))
    layer = LayerSpec(dim=8, n_heads=3, n_kv_groups=3, d_k=8, d_v=8, **SIZES)
    found = measures.copies(Selects(), [Batch(x[None]) for x in tokens], layer, (0,), True)
    assert found["recall_gain"] == found["copied_gain"] == 0
    ((_, chance),) = found["hits"]
    heads = np.array(found["heads"])
    assert heads.shape == (1, 3, 2, 2)  # layers, heads, halves of the rows, read and not
    copying, random, near = heads.mean(axis=2)[0]
    assert copying.tolist() == [1, 0]
    assert random == pytest.approx(chance, abs=0.03) and chance == pytest.approx(
        0.146, abs=0.005
    )
    assert near.tolist() == [0, 0]
    assert measures.found_by_best(heads) == (1, 0)
    assert measures.found_by_best(heads[:, 2:]) == (0, 0)


def test_the_best_head_is_chosen_by_other_rows():
    """Of heads that find nothing none does, though one is best of each half."""
    heads = np.zeros((1, 2, 2, 2))
    heads[0, 0, 0, 0] = heads[0, 1, 1, 0] = 0.5
    assert measures.found_by_best(heads) == (0, 0)


def lines(
    attention, seed, held_out, gain, *, steps=10, status="ok", epochs=0.5, over=0.2, far=True,
    measured=None, cut=None, **model,
):  # fmt: skip
    """A run's lines, the first `cut` of them; `measured`: losses by kind at all evaluations.

    `over`: what the head of the second layer finds of copies beyond chance; `far`: whether copies
    have distances.
    """
    make, end = functools.partial(logged, attention=attention), {}
    training, model = TABLE["training"] | dict(seed=seed, steps=steps), TABLE["model"] | model
    parameters = 10 * 10**6 + (attention == "nsa")
    losses = {5: (3.0, 2.0, 3.0), steps: (held_out + 1.5, held_out - 0.5, held_out + 1)}
    if measured is not None:
        losses = dict.fromkeys(losses, measured) if measured else {}
    if attention == "nsa":
        end["hits"] = [[0.1, 0.1], [0.3 + 0.01 * seed, 0.1]]
        if over is not None:
            end["heads"] = [[[[0.1, 0.1]] * 2], [[[0.1 + over, 0.1]] * 2]]
    if far:
        end["copied_at"] = {str(x): gain for x in measures.DISTANCES[:4]}
    end |= dict(status=status, steps=steps, held_out_loss=held_out)
    found = [
        make(log.Header, model=model, training=training, parameters=parameters, epochs=epochs),
        *(make(log.Step, step=i, loss=x) for i, x in enumerate((9.0, held_out + 2, held_out))),
    ]
    for at, each in losses.items():
        kinds = dict(zip(measures.KINDS, each, strict=True))
        found.append(make(log.Evaluation, steps=at, measures=kinds))
    return [*found, make(log.Summary, recall_gain=gain, copied_gain=gain, **end)][:cut]


def made(files):
    """The lines of the runs of each file (`test_quality.yaml`)."""
    found = {}
    for name, runs in files.items():
        if name == "five":
            found |= five(**runs)
        else:
            found[name] = [x for run in runs for x in lines(*run[:4], **dict(*run[4:]))]
    return found


def five(apart=0.0, recall=1.0, spread=0.001, near=("",) * 5, over=TABLE["over"], **more):
    """Pairs whose losses are `apart` on average; `near`: whose copies have no distances."""
    found = {}
    for seed, shift in enumerate((-spread, 0, 0, 0, spread)):
        pair = ("nsa", 1 + apart + shift, recall), ("dense", 1, 1.0)
        found[str(seed)] = [
            x
            for name, *numbers in pair
            for x in lines(
                name, seed, *numbers, over=over[seed], far=name not in near[seed], **more
            )
        ]
    return found


@pytest.mark.parametrize("files, message", TABLE["no pairs"])
def test_runs_that_are_no_pairs_are_refused(files, message):
    with refused(message):
        quality.groups(made(files))


@pytest.mark.parametrize("files, message", TABLE["no kind"])
def test_runs_that_are_no_kind_are_refused(files, message):
    with refused(message):
        quality.kind_of("nsa", made(files))


@pytest.mark.parametrize("files, broken, text", TABLE["bounds"])
def test_bounds_decide(files, broken, text, tmp_path, capsys):
    """The exit status of the command, and what it prints."""
    for name, each in made(files).items():
        log.append(tmp_path / name, each)
    status = quality.main(["", *map(str, sorted(tmp_path.iterdir()))])
    said = capsys.readouterr()
    told = said.out.splitlines()
    assert [x.split()[0] for x in told if ": NO" in x] == broken.split()
    undecided = "not decided" in said.err
    assert status == (1 if broken else 3 * undecided) and text in said.out + said.err


GOLDEN = Path(__file__).with_name("golden") / "quality.md"


def tables():
    found = []
    for name, shown, files in TABLE["tables"]:
        groups = quality.groups(made(files))
        for kind in shown.split():
            cells = [row for group in groups for row in quality.rows(kind, group)]
            text = quality.table(quality.head(kind), cells) if cells else "no rows\n"
            found.append(f"{name}: {kind}\n\n{text}")
    return "\n".join(found)


def test_tables():
    """Those of `golden/quality.md`, which `python -m tests.test_quality` writes again."""
    assert GOLDEN.read_text() == tables()


if __name__ == "__main__":
    GOLDEN.write_text(tables())

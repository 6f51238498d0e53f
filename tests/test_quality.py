"""What is measured of held-out text; NSA against dense attention over seeds, of posed runs."""

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from bench.lm import log, measures, quality, recall
from bench.lm.data import Batch
from bench.lm.ranks import Ranks
from bench.lm.recall import PASSAGE
from bench.lm.share import Share
from nsa_core.layer import LayerSpec
from tests.measured import logged
from tests.parallel_worker import learner_of, trained
from tests.test_train import task

WINDOW, WIDTH = 40, 400
SIZES = dict(l=8, d=4, l_sel=16, n_sel=6, w=WINDOW)
CONFIG = LayerSpec(dim=8, n_heads=1, n_kv_groups=1, d_k=8, d_v=8, **SIZES).config


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
    assert recall.passages(packed, WINDOW, (0,)) is None
    assert recall.passages(rows(1), WINDOW, (0,)) is None
    assert recall.passages(rows(), WIDTH - 2 * PASSAGE, (0,)) is None
    assert recall.passages(rows(), WIDTH - 2 * PASSAGE - 1, (0,)) is not None


class Reads:
    """A learner that knows what follows four tokens that it has read before, for 1 nat, and of
    what subject its row is: 3 nats for such a token, 5 for others."""

    ranks, share = Ranks(), Share(1)

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
    layer = LayerSpec(dim=8, n_heads=1, n_kv_groups=1, d_k=8, d_v=8, w=WINDOW)
    known, unknown = 1 * (PASSAGE - 4) / PASSAGE, 3 * 4 / PASSAGE
    found = measures.copies(Reads(), held_out, layer, (0,), True)
    assert found["recall_gain"] == pytest.approx(5 - known - unknown, abs=0.01)
    assert found["copied_gain"] == pytest.approx(3 - known - unknown, abs=0.01)
    assert found["copied_at"] == pytest.approx(
        dict.fromkeys(("128", "256"), 3 - known - unknown), abs=0.02
    )


def test_a_run_ends_with_its_recall(tmp_path):
    """Of rows that are long enough; the tiny model has learned nothing of it."""
    _, end, _ = trained(tmp_path, task("nsa", seq_len=200, steps=2))
    assert all(abs(gain) < 0.5 for gain in (end.recall_gain, end.copied_gain))


def slow_kinds(tokens, order, window, segments=None):
    """By loops over all earlier places."""
    found = np.zeros((tokens.shape[0], tokens.shape[1] - 1), int)
    for row, at in itertools.product(range(len(tokens)), range(order - 1, tokens.shape[1])):
        gram = tokens[row, at - order + 1 : at + 1].tolist()
        where = [
            before
            for before in range(order - 1, at)
            if tokens[row, before - order + 1 : before + 1].tolist() == gram
            and (segments is None or segments[row, before] == segments[row, at])
        ]
        if where:
            found[row, at - 1] = 1 if at - where[-1] < window else 2
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_kinds_of_targets_are_what_loops_say(dtype, packed):
    tokens = np.random.default_rng(0).integers(0, 4, (3, 90)).astype(dtype)
    segments = np.repeat(np.arange(3)[None], 30, axis=1).repeat(3, axis=0) if packed else None
    found = measures.kinds(Batch(tokens, segments), 3, 20)
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
        there = [(x, index == i) for i, x in enumerate(names) if (index == i).any()]
        expected |= {name: losses[mask].mean() for name, mask in there}
    assert (part == [[0] * (length // 4) + [1] * (length // 4) + [2] * (length // 2)]).all()
    for learner in (torch, jax):
        found = measures.HeldOut.of([batch, batch], 4, 256).measured(learner)
        assert found == pytest.approx(expected, rel=1e-5)
    left_out = np.where(kind == 0, 0, 7).astype(np.int32)
    (only,) = torch.loss_sums(batch, left_out, 1)
    assert only == pytest.approx(losses[kind == 0].sum(), rel=1e-5)


def test_a_hit_is_the_block_of_the_next_token():
    """The passage stands at 70: with blocks of 16 the copy goes on from blocks 4 to 8."""
    length, start = 399, 70
    indices = np.full((length, 2, 6), -1)
    for query in range(length - PASSAGE, length):
        source = start + query + 1 - (length + 1 - PASSAGE)
        indices[query, 0, 3] = source // 16
        indices[query, 1, 3] = source // 16 + 1
    hits = measures.hit(indices, start, CONFIG)
    assert hits[:, 0].tolist() == [1.0, 0.0]
    own = np.arange(length - PASSAGE + 1 + measures.KNOWN, length - 1) // 16
    assert hits[:, 1] == pytest.approx((3 / (own + 1 - 3)).mean())
    near = length - PASSAGE - 5  # in forced blocks
    assert measures.hit(indices, near, CONFIG) is None


class Selects:
    """A learner of one layer whose heads select, beside the blocks that all have to: the blocks
    that follow what stood before the query's last four tokens; as many at random; those before
    the forced ones, as models do that look at what is near."""

    ranks, share, config = Ranks(), Share(1), CONFIG

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
    assert heads[..., 0].max() == 0.5


def finds(over):
    """Two layers of a head each, of which the second holds copies."""
    return [[[[0.1, 0.1]] * 2], [[[0.1 + over, 0.1]] * 2]]


def lines(attention, seed, held_out, gain, steps=10, status="ok", **model):
    make = functools.partial(logged, attention=attention)
    nsa = attention == "nsa"
    training = dict(seed=seed, steps=steps, batch=2, seq_len=2048, lr=0.1, warmup=1)
    model = {"layers": 1, "dim": 8, "vocabulary": 300} | model
    parameters = 10 * 10**6 + nsa
    about = dict(model=model, training=training, parameters=parameters, epochs=0.5)
    losses = {5: (3.0, 2.0, 3.0), steps: (held_out + 1.5, held_out - 0.5, held_out + 1)}
    return [
        make(log.Header, **about),
        *(make(log.Step, step=i, loss=x) for i, x in enumerate((9.0, held_out + 2, held_out))),
        *(
            make(
                log.Evaluation, steps=at, measures=dict(zip(measures.KINDS, each, strict=True))
            )
            for at, each in losses.items()
        ),
        make(
            log.Summary,
            status=status,
            steps=steps,
            held_out_loss=held_out,
            recall_gain=gain,
            copied_gain=gain,
            copied_at={str(x): gain for x in measures.DISTANCES[:4]},
            hits=[[0.1, 0.1], [0.3 + 0.01 * seed, 0.1]] if nsa else None,
            heads=finds(0.2 + 0.01 * seed) if nsa else None,
        ),
    ]


def changed(lines, kind, **values):
    """The lines, those of a kind with other values."""
    return [dataclasses.replace(x, **values) if isinstance(x, kind) else x for x in lines]


def pair(seed, nsa, dense, **options):
    """Held-out loss and recall of both."""
    return [*lines("nsa", seed, *nsa, **options), *lines("dense", seed, *dense, **options)]


RUNS = {
    "a": pair(0, (1.10, 2.0), (1.00, 1.0)),
    "b": pair(1, (1.20, 2.5), (1.00, 1.0)),
    "c": pair(2, (1.60, 3.0), (1.30, 1.0)),
}


ALONE = lines("nsa", 1, 1.0, 1.0)
kind_of = functools.partial(quality.kind_of, "nsa")


@pytest.mark.parametrize(
    ("function", "found", "message"),
    [
        (
            quality.groups,
            RUNS | {"b": RUNS["a"]},
            "seed 0 occurs twice among the runs with dense",
        ),
        (
            quality.groups,
            RUNS | {"b": lines("nsa", 1, 1.0, 1.0, steps=11)},
            "must include dense attention",
        ),
        (
            quality.groups,
            RUNS | {"b": pair(1, (1, 1), (1, 1), status="diverged")},
            "a finished run of torch-nsa",
        ),
        (
            quality.groups,
            RUNS | {"b": ALONE},
            r"dense must have the seeds of nsa .*but lacks the seeds \[1\]",
        ),
        (quality.groups, RUNS | {"b": ALONE[:1]}, "a finished run of torch-nsa"),
        (quality.groups, {"b": []}, "must contain a run, got none"),
        (kind_of, {"a": RUNS["a"]}, "a must contain one run"),
        (kind_of, {"a": []}, "a must contain one run"),
        (kind_of, {"a": ALONE[:1]}, "a finished run of torch-nsa"),
        (kind_of, {"a": ALONE, "b": ALONE}, "b: seed 1 occurs twice among the runs with"),
    ],
)
def test_runs_that_are_no_pairs_or_no_kind_are_refused(function, found, message):
    with pytest.raises(ValueError, match=message):
        function(found)


@pytest.fixture
def command(tmp_path, capsys):
    """The command on files of these runs: its exit status and what it prints."""

    def call(runs):
        for name, each in runs.items():
            log.append(tmp_path / name, each)
        status = quality.main(["", *(str(tmp_path / name) for name in runs)])
        return status, capsys.readouterr()

    return call


def five(apart, recall=1.0, spread=0.001):
    """Pairs whose losses are `apart` on average."""
    shifts = (-spread, 0, 0, 0, spread)
    return {
        str(seed): pair(seed, (1 + apart + shift, recall), (1, 1.0))
        for seed, shift in enumerate(shifts)
    }


def test_the_head_of_the_bounds():
    losses = [f"95 % bound at most {quality.BOUNDS[x]:+.1%}" for x in quality.UPPER]
    losses.append(f"mean at most {quality.BOUNDS['far']:+.1%}")
    rules = [*losses, f"mean at least {-quality.BOUNDS['recall']:+.2f}"]
    titles = [", ".join(x) for x in zip(quality.BOUNDS, rules, strict=True)]
    assert quality.head("bounds")[2:] == [*titles, "pairs"]


def with_heads(heads):
    """The pairs' runs, with what `heads` makes of a seed in place of theirs."""
    return {
        name: [
            dataclasses.replace(x, heads=heads(int(name))) if getattr(x, "heads", None) else x
            for x in each
        ]
        for name, each in five(-0.1).items()
    }


NOTHING = with_heads(lambda seed: finds(0.01 * (seed % 2)))
THREE, TWO = (
    with_heads(lambda seed, after=after: finds(0.2) if seed > after else None)
    for after in (1, 2)
)
BEST = "best head: +0.220 ± 0.007 over another text, 5 seeds"
UNMEASURED = {
    k: [x for x in v if not isinstance(x, log.Evaluation)] for k, v in five(0.0).items()
}
FEW = {"one": lines("nsa", 0, 1.0, 1.0, gate="sigmoid"), **five(0.05)}
ROW = "| 10M, 10 x 2 x 2k | nsa | 10.0 | - | +0.200 ± 0.058 (t +3.5) |"


@pytest.mark.parametrize(
    ("runs", "broken", "text"),
    [
        (five(0.0), "", BEST),
        (five(-0.1, 0.975), "", BEST),
        (five(0.0, 0.96), "recall", BEST),
        (five(0.0029), "end", BEST),  # the mean is within the bound, the upper bound is not
        (five(0.0, spread=0.02), "new end", BEST),
        (five(0.05), "new end far", BEST),
        (NOTHING, "selection", "selection finds copies, nsa"),
        (THREE, "", "+0.200 ± 0.000 over another text, 3 seeds"),
        (TWO, "", "must have records of what heads find, got 2 such runs"),
        (RUNS, "", "(10M, 10 x 2 x 2k) needs 5 seeds, got the seeds [0, 1, 2]"),
        (RUNS, "", ROW),
        ({"dense": lines("dense", 0, 1.0, 1.0)}, "", "not decided, since no run has NSA"),
        # A kind of few pairs hides no verdict on others.
        (FEW, "new end far", "needs 5 seeds, got the seeds [0]"),
        (
            UNMEASURED,
            "",
            "not decided: runs of nsa (10M, 10 x 2 x 2k) lack the measures ['new', 'far']",
        ),
    ],
)
def test_bounds_decide(runs, broken, text, command):
    status, said = command(runs)
    told = said.out.splitlines()
    assert [x.split()[0] for x in told if ": NO" in x] == broken.split()
    undecided = "not decided" in said.err
    assert status == (1 if broken else 3 * undecided) and text in said.out + said.err


def tabled():
    """Runs, and the tables that show what the name says."""
    late = dict(zip(measures.KINDS, (2.0, 1.0, 2.0), strict=True))
    a, never = RUNS["a"], changed(RUNS["a"], log.Evaluation, measures=late)
    unpaired = lines("nsa", 0, 1.0, 1.0, gate="sigmoid")
    early = {str(seed): pair(seed, (1.0, 0.19), (1.0, 0.05)) for seed in range(2)}
    again = changed(lines("nsa", 0, 1.1, 2.0), log.Header, epochs=4.17)
    unsaid = changed(lines("dense", 0, 1.0, 1.0), log.Header, epochs=None)
    some = five(-0.1)
    for name, lost in {"0": "dense nsa", "1": "dense", "2": "nsa"}.items():
        without = changed(some[name], log.Summary, copied_at=None)
        pairs = zip(some[name], without, strict=True)
        some[name] = [y if y.attention in lost else x for x, y in pairs]
    yield "three pairs decide nothing", "all answers bounds summary", RUNS
    yield "one pair says nothing", "answers found summary", {"a": a}
    yield "better at the same recall", "bounds summary", five(-0.1)
    yield "better, but for recall", "summary", five(-0.1, 0.96)
    yield "worse, by 95 % bounds of losses and the mean of recall", "bounds", five(0.05, 0.96)
    yield "fewer pairs than another kind", "summary", {"few": unpaired, **five(0.05)}
    yield "no recall yet", "summary", early
    yield "a little recall", "summary", early | {"2": pair(2, (1.0, 0.3), (1.0, 0.05))}
    yield "runs that never copy", "all answers", {"a": never}
    yield "some runs copy", "answers", RUNS | {"a": never}
    yield (
        "runs that copy early",
        "all",
        {"a": changed(never, log.Evaluation, measures=late | {"new": 3.0})},
    )
    yield "no recall of short rows", "all", {"a": pair(0, (1.1, None), (1.0, None))}
    yield "bytes", "answers", {"a": pair(0, (1.1, 2.0), (1.0, 1.0), vocabulary=256)}
    yield "no measures", "answers", {"a": [x for x in a if not isinstance(x, log.Evaluation)]}
    yield "a text seen again, by the runs that say so", "all", {"a": again, "b": unsaid}
    yield ("heads of three runs", "found", THREE)
    yield "heads of two runs", "found summary", TWO
    yield "heads that find nothing", "found summary", NOTHING
    yield "distances of some runs", "distances", some
    yield "distances of no run", "distances", {"0": some["0"]}
    # Gates of dense attention make no kind; the first dense one is what others are beside. Gates
    # and keys of NSA are named where all runs have the same, too; the usual sizes are not.
    yield "one kind", "parts", {"a": pair(0, (1.1, 1.0), (1.0, 1.0), gate="head", kv="shared")}
    runs = {
        "a": lines("dense", 0, 1.0, 1.0, gate="head", hidden=8),
        "b": lines("dense", 0, 0.9, 1.0, gate="sigmoid", hidden=9),
        "c": lines("nsa", 0, 1.1, 1.0, gate="head", hidden=8),
        "d": lines("nsa", 0, 1.2, 1.0, gate="sigmoid", hidden=8),
        "e": lines("dense", 0, 1.0, 1.0, steps=20),
    }
    yield (
        "kinds are named by what differs; other steps are another group",
        "answers parts",
        runs,
    )
    more = functools.partial(lines, seed=1, held_out=1.0, gain=1.0, gate="head", hidden=8)
    runs |= {"f": more("dense"), "g": more("nsa", n_sel=16, kv="shared")}
    yield "kinds of several sizes", "parts", runs | {"h": more("nsa", n_sel=32)}


GOLDEN = Path(__file__).with_name("golden") / "quality.md"


def tables():
    found = []
    for name, shown, runs in tabled():
        groups = quality.groups(runs)
        for table in shown.split():
            cells = [row for group in groups for row in quality.rows(table, group)]
            text = quality.table(quality.head(table), cells) if cells else "no rows\n"
            found.append(f"{name}: {table}\n\n{text}")
    return "\n".join(found)


def test_tables():
    """Those of `golden/quality.md`, which `python -m tests.test_quality` writes again."""
    assert GOLDEN.read_text() == tables()


if __name__ == "__main__":
    GOLDEN.write_text(tables())

"""`bench.lm.corpus` from small made-up wheels: what is taken, what is refused, what is read."""

import functools
import hashlib
import json
import lzma
import zipfile

import numpy as np
import pytest
import yaml

from bench.lm import corpus, data
from bench.lm.tokens import Documents
from tests import commands, refusals

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


def text(seed, words=60):
    random = np.random.default_rng(seed)
    return "".join(f"{WORDS[i]} = {WORDS[j]}\n" for i, j in random.integers(0, 10, (words, 2)))


def wheel(folder, name, files):
    """Writes a wheel; the line of a list that names it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for inner, content in files.items():
            file.writestr(f"{name}/{inner}", content)
    return {f"{name}==1.0": hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.fixture
def given(tmp_path):
    """A folder of wheels and their list; `many` and `held` have a file in common."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    files = {f"m{i}.py": text(i) for i in range(12)} | {
        "notes.txt": text(99),
        "s.py": "x = 1\n",
    }
    train = wheel(folder, "many", files | {"bytes.py": b"\xff" * 400, "same.py": text(50)})
    train |= wheel(folder, "other", {"a.py": text(30), "again.py": text(3)})
    held = wheel(folder, "held", {"same.py": text(50), "h.py": text(51)})
    sizes = dict(file_bytes=[200, 5000], package_bytes=10**5, tokenizer_bytes=10**5)
    return folder, {"train": train, "held_out": held, "vocabulary": 300} | sizes


@pytest.fixture
def build(tmp_path, given):
    """The command on a list with changes: what it tells of the corpus."""
    folder, listed = given

    def call(out="corpus", **changes):
        path = tmp_path / "list.yaml"
        path.write_text(yaml.safe_dump(listed | changes))
        places = f"--out={tmp_path / out}", f"--wheels={folder}", f"--list={path}"
        assert commands.called(corpus, *places) == 0
        return json.loads((tmp_path / out / "corpus.json").read_text())

    return call


def decoded(found, folder):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = np.split(found.tokens, found.starts[1:-1])
    assert all(part[0] == 0 for part in parts)
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


def test_every_text_once_and_whole_packages_held_out(build, tmp_path, capsys):
    about = build()
    found = corpus.read(tmp_path / "corpus")
    texts = decoded(found, tmp_path / "corpus")
    border = int(np.searchsorted(found.starts, len(found.tokens) - found.held_out))
    assert set(texts[border:]) == {text(50), text(51)}  # what both have is held out
    assert sorted(texts[:border]) == sorted([text(i) for i in (*range(12), 30)])
    assert about["documents"] == [13, 2] and about["vocabulary"] == found.vocabulary <= 300
    assert found.sha256 == about["sha256"]["tokens.xz"] in capsys.readouterr().out


def test_the_same_again_by_its_hashes(build, tmp_path):
    sums = build()["sha256"]
    pinned = {"tokenizer": sums["tokenizer.json"], "tokens": sums["tokens.xz"]}
    build("again", **pinned)
    one, two = (tmp_path / x / "tokens.xz" for x in ("corpus", "again"))
    assert one.read_bytes() == two.read_bytes()
    for name in pinned:
        with pytest.raises(
            ValueError, match=f"{name} must have SHA-256 {'0' * 64} as in the list"
        ):
            build("third", **pinned | {name: "0" * 64})
        assert not (tmp_path / "third").exists()


def test_a_tokenizer_that_another_list_learns(build, given, tmp_path):
    build()
    (tmp_path / "list.yaml").rename(tmp_path / "plain.yaml")
    folder, listed = given
    more = {f"z{i}.py": text(i, 90).swapcase() for i in range(70, 90)}
    train = wheel(folder, "more", more) | listed["train"]
    build("own", train=train)
    build("large", train=train, learns_from="plain.yaml")
    plain, own, large = (tmp_path / x / "tokenizer.json" for x in ("corpus", "own", "large"))
    assert large.read_bytes() == plain.read_bytes() != own.read_bytes()
    one, other = (corpus.read(tmp_path / x) for x in ("corpus", "large"))
    assert len(other.tokens) > len(one.tokens) and other.held_out == one.held_out
    assert (other.tokens[-other.held_out :] == one.tokens[-one.held_out :]).all()


def test_no_more_than_a_package_may_give(build, tmp_path):
    one = len(text(0))
    train, held_out = build(package_bytes=3 * one)["documents"]
    assert train <= 5 and held_out == 2


def test_rows_of_a_corpus(build, tmp_path):
    build()
    found = corpus.read(tmp_path / "corpus")
    load = functools.partial(data.load, str(tmp_path / "corpus"), 2, 16)
    one, other = load(3), load(4)
    assert one.pack == "once" and one.vocabulary == found.vocabulary
    assert np.array_equal(np.concatenate([one.training, one.held_out]), found.tokens)
    assert len(one.held_out) == found.held_out
    for mine, theirs in zip(one.evaluation(3), other.evaluation(3), strict=True):
        assert (mine.tokens == theirs.tokens).all()  # the same for every seed
    assert load(3, pack="documents").train(0).segment_ids is not None


def test_a_second_epoch_has_the_same_rows_in_another_order():
    tokens = np.arange(100, dtype=np.int32)
    documents = Documents("x", tokens, np.array([0, 100]), 100, "0", held_out=20)
    batches = data.Batches(3, 13, 0, documents=documents, pack="once")
    rows = np.concatenate([batches.train(i).tokens for i in range(4)])  # six rows an epoch
    assert (np.diff(rows) == 1).all() and rows.max() < 80
    for epoch in (rows[:6], rows[6:]):
        predicted = epoch[:, 1:].ravel()
        assert len(set(predicted.tolist())) == 6 * 13
    assert (np.sort(rows[:6, 0]) != rows[:6, 0]).any()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokens.xz", b"no", "is not a complete corpus"),
        ("tokens.xz", None, "is not a complete corpus"),
        ("corpus.json", b"{}", "is not a complete corpus"),
        ("tokenizer.json", b"{}", "tokenizer must be the tokenizer of the corpus"),
        ("tokens.xz", lzma.compress(b"\0\1\0\0"), "tokens of corpus .* must have SHA-256"),
    ],
)
def test_a_corpus_that_is_not_as_it_was_written(build, tmp_path, name, content, message):
    build()
    (tmp_path / "corpus" / name).unlink()
    if content is not None:
        (tmp_path / "corpus" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load(str(tmp_path / "corpus"), 2, 16, 0)


def test_a_tokenizer_of_another_corpus(build, tmp_path):
    build()
    build("other", vocabulary=280)
    own, other = (str(tmp_path / x / "tokenizer.json") for x in ("corpus", "other"))
    data.load(str(tmp_path / "corpus"), 2, 16, 0, tokenizer=own)
    with pytest.raises(
        ValueError, match=r"tokenizer must be the tokenizer of the corpus .* with SHA-256"
    ):
        data.load(str(tmp_path / "corpus"), 2, 16, 0, tokenizer=other)


def test_a_wheel_of_another_hash(build, given, tmp_path, monkeypatch):
    """pip is asked for it, and what pip says is told."""
    _, listed = given
    (name,) = listed["held_out"]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=rf"pip must download \['{name}'\]"):
        build(held_out={name: "0" * 64})
    assert not (tmp_path / "corpus").exists()


@refusals.by_row("corpus")
def test_lists_that_are_refused(build, tmp_path, row):
    with row.refused():
        build(**row.changes)
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    "path", sorted(corpus.LIST.parent.glob("*.yaml")), ids=lambda x: x.stem
)
def test_lists_that_come_with_it(path):
    found, plain = corpus.wheels(path), corpus.wheels(corpus.LIST)
    assert len(found.train) >= 20 and len(found.held_out) >= 3
    assert found.tokens is not None and found.tokenizer == plain.tokenizer
    assert found.held_out == plain.held_out and found.train.items() >= plain.train.items()

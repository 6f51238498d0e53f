"""Where batches come from: local files, a stream, packing; their order, and what is wrong."""

import itertools
import json
import re

import numpy as np
import pytest

from bench.lm import data, log, sources, stream, tokens
from bench.lm.data import Batches
from bench.lm.packing import Packed
from tests import spawned
from tests.measured import of_kind
from tests.refusals import by_row, refused, words
from tests.tables import table

WIDTH = 9
TABLE = table("training")


@pytest.mark.parametrize("width", [2, 5, 9, 40])
@pytest.mark.parametrize("lengths", TABLE["lengths"])
def test_packing_predicts_each_token_once(width, lengths):
    """Of tokens that are their own places."""
    starts = np.cumsum([0, *lengths])
    packed = Packed(np.arange(starts[-1]), starts, (1,), width)
    rows, segments = packed.rows(np.arange(packed.count))
    same = np.diff(np.searchsorted(starts, rows, side="right")) == 0
    assert (segments[:, 0] == 0).all() and (np.diff(segments) >= 0).all()
    assert ((np.diff(segments) == 0) == same).all()  # the borders
    assert (np.diff(rows)[same] == 1).all()  # the order within a document
    assert np.isin(rows[:, 1:][~same], starts[:-1]).all()  # which begins at its first token
    predicted = np.bincount(rows[:, 1:].ravel(), minlength=starts[-1])
    left_over = (starts[-1] - 1) % (width - 1) + 1  # the first token, and less than a row
    assert predicted.max() <= 1 and (predicted == 0).sum() == left_over


def documents(total=60):
    return [f"<{i:03d}{'abcdefgh' * (i % 5)}>" for i in range(total)]


def jsonl(folder, texts):
    """A file of JSON lines, of which the last one is empty."""
    lines = [json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(lines) + "\n")
    return folder / "a.jsonl"


@pytest.fixture
def texts(tmp_path):
    """A folder of `documents()`: the first 40 in a file of JSON lines, each other in a file."""
    found, folder = documents(), tmp_path / "texts"
    folder.mkdir()
    jsonl(folder, found[:40])
    for i, text in enumerate(found[40:]):
        (folder / f"b{i:02d}.txt").write_text(text)
    return folder


@pytest.fixture
def load(tmp_path):
    """`data.load` with small rows, its tokens kept in the test's folder."""

    def call(dataset, batch=4, length=WIDTH - 1, seed=0, **options):
        cache = tmp_path / "cache"
        return data.load(str(dataset), batch, length, seed, cache=cache, **options)

    return call


def same(one, other):
    """The same tokens and segments, or no segments."""
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


def parts_of(batches):
    """The text of each part of a document, by the rows of these batches."""
    for batch in batches:
        for row, segments in zip(batch.tokens, batch.segment_ids, strict=True):
            yield [row[segments == x].tobytes().decode() for x in np.unique(segments)]


@pytest.mark.parametrize("pack", data.PACKS)
def test_a_batch_follows_from_seed_and_step(texts, load, pack):
    one, again, other = (load(texts, pack=pack, seed=seed) for seed in (1, 1, 2))
    late = one.train(70)  # of a later epoch
    same(again.train(70), late)  # a run that goes on there
    assert late.tokens.shape == (4, WIDTH) and late.tokens.dtype == np.uint8
    assert (late.segment_ids is None) == (pack != "documents")
    assert (one.train(71).tokens != late.tokens).any()
    assert (other.train(70).tokens != late.tokens).any()
    for step, size in itertools.product((0, 13, 70), (1, 2)):
        parts = [again.train(step, slice(i, i + size)) for i in range(0, 4, size)]
        same(data.joined(parts), one.train(step))
    for mine, whole in zip(again.evaluation(2), one.evaluation(2), strict=True):
        same(mine, whole)
    assert one.vocabulary == 256 and one.sha256 == other.sha256
    others = {load(texts, pack=x).sha256 for x in data.PACKS}
    assert len(others) == 3 and one.sha256 in others


def test_rows_hold_the_documents(texts, load):
    """A segment is a part of one document, and held-out text is in no batch for training."""
    found, batches = documents(), load(texts)
    whole = "".join(found).encode()
    assert batches.training.tobytes() + batches.held_out.tobytes() == whole
    assert len(batches.held_out) == len(whole) // 16
    rows = batches._packed.count
    steps = range(rows // 4), range(-(-rows // 4), 2 * rows // 4)  # of one epoch each
    epochs = [[batches.train(i) for i in each] for each in steps]
    for parts in parts_of(itertools.chain(*epochs, batches.evaluation(2))):
        assert all(any(text in document for document in found) for text in parts)
    first, second = ([b.tokens.tobytes() for b in epoch] for epoch in epochs)
    assert len(first) == len(set(first)) and set(first).isdisjoint(second)
    held_out = batches.held_out.tobytes()
    assert all(row.tobytes() in held_out for b in batches.evaluation(2) for row in b.tokens)


def test_text_is_the_offline_default(load):
    plain, other = load("text", size=2**14), Batches(4, WIDTH - 1, 0, 2**14)
    same(plain.train(3), other.train(3))
    assert plain.sha256 == other.sha256 and plain.train(0).segment_ids is None
    packed = load("text", length=512, size=2**17, pack="documents")
    borders = [np.diff(packed.train(i).segment_ids).any() for i in range(40)]
    assert any(borders)  # files follow each other


def test_local_tokens_are_kept_until_the_file_changes(texts, load, monkeypatch, tmp_path):
    first = load(texts / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_jsonl", lambda *_: pytest.fail("read again"))
        same(load(str(texts / "*.jsonl")).train(0), first.train(0))
    jsonl(texts, documents()[:39])
    assert load(texts / "a.jsonl").sha256 != first.sha256
    for kept in tmp_path.glob("cache/*/tokens"):
        kept.write_bytes(kept.read_bytes()[:-3])
    with refused("have changed; remove this folder"):
        load(texts / "a.jsonl")


@by_row("local files")
def test_bad_files_are_named(load, tmp_path, row):
    path, text = tmp_path / row.changes["name"], row.changes["text"]
    path.write_text(text, encoding="latin-1")
    with row.refused():
        load(path)
    left = [x for x in (tmp_path / "cache").glob("*") if x.suffix != ".lock"]
    # A whole file, only too short for this row.
    assert bool(left) == (text == "short")


def test_files_that_are_not_there(load, tmp_path):
    for name in (tmp_path / "none", tmp_path / "*.jsonl", "none.jsonl", "a/b/c"):
        with refused("no such file with one of", FileNotFoundError):
            load(name)
    (tmp_path / "owner").mkdir()
    names = TABLE["hub"] | {str(tmp_path / "owner"): False}
    assert {name: data.is_hub(name) for name in names} == names


@pytest.fixture
def parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra data")
    from pyarrow import parquet

    table = pyarrow.table({"text": documents(), "id": list(range(60))})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=7, compression=None)
    return tmp_path / "x.parquet"


def test_parquet_is_the_same_as_jsonl(parquet, load, tmp_path):
    one, other = load(parquet), load(jsonl(tmp_path, documents()))
    same(one.train(5), other.train(5))
    assert one.sha256 == other.sha256


@pytest.mark.parametrize("zeros, end, column, message", TABLE["faults of parquet"])
def test_faults_of_parquet(parquet, load, zeros, end, column, message):
    content = parquet.read_bytes()
    parquet.write_bytes(bytes(zeros) + content[zeros:end])
    with refused(message):
        load(parquet, column=column)


@pytest.fixture
def tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers", reason="needs the extra data")
    words = {word: i for i, word in enumerate(("?", "a", "b", "c", "end"))}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.post_processor = library.processors.TemplateProcessing(
        single="$A end", special_tokens=[("end", 4)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokens_are_those_of_the_tokenizer(tokenizer, load, tmp_path):
    texts = jsonl(tmp_path, ["a b x", "c", "b b b b"] * 20)
    batches = load(texts, tokenizer=str(tokenizer))
    expected = [1, 2, 0, 4, 3, 4, 2, 2, 2, 2, 4] * 20
    assert np.concatenate([batches.training, batches.held_out]).tolist() == expected
    assert batches.vocabulary == 5 and batches.train(0).tokens.dtype == np.uint16
    assert load(texts).sha256 != batches.sha256
    found = load("text", tokenizer=str(tokenizer), size=2**12)
    assert found.vocabulary == 5 and found.train(0).tokens.max() < 5


def test_faults_of_a_tokenizer(tokenizer, load, tmp_path):
    tokenizer.write_text(tokenizer.read_text()[:40])
    with refused("(Hugging Face tokenizers), got *r.json: "):
        load("text", tokenizer=str(tokenizer))
    for name, reason in (("gpt2", "No such file"), (tmp_path, "Is a directory")):
        message = f"a tokenizer.json file *, got {name}: {reason}*; download the tok"
        with refused(message, FileNotFoundError):
            load("text", tokenizer=str(name))


class Memory:
    """A source of documents that are at hand; `fails` are errors of the next calls."""

    def __init__(self, texts):
        self.texts, self.read = texts, []

    def __repr__(self):
        return "memory"

    def take(self, state, count):
        first = 0 if state is None else state["at"]
        self.read.append(first)
        found = self.texts[first : first + count]
        return found, {"at": first + len(found)}


@pytest.fixture
def streamed(tmp_path):
    def make(texts=None, notes=True, pack="documents", seed=0, buffer=16):
        source = Memory(documents(70) if texts is None else texts)
        where = {"buffer": buffer, "notes": tmp_path / "notes" if notes else None}
        return stream.Streamed(source, tokens.Bytes(), 4, WIDTH - 1, seed, pack, **where)

    return make


def test_a_stream_goes_on_exactly_where_it_was(streamed, capsys):
    whole = streamed(notes=False)
    expected = [whole.train(i) for i in range(60)]
    assert whole.block.start.epoch == 1 and capsys.readouterr().err.count("epoch 0 ends") == 1
    first = streamed()
    for i in range(41):
        same(first.train(i), expected[i])
    capsys.readouterr()
    later = streamed()
    later.source.read.clear()
    for i in (40, 41, 59):
        same(later.train(i), expected[i])
    # Of what was consumed only the block at hand is read again, and that is said.
    assert later.source.read[0] == 64
    said = capsys.readouterr().err
    assert "to continue at row 160, the stream is read from document 64 of epoch 0 on" in said
    assert "shuffle buffer of 16 documents is filled again, and the order does not" in said
    unknown = streamed(notes=False)  # in another folder: by all that lies between
    same(unknown.train(59), expected[59])
    assert "read from document 16 of epoch 0 on" in capsys.readouterr().err
    same(later.train(3), expected[3])  # back, as the next of several runs


def test_a_damaged_note_is_not_believed(streamed):
    expected = [streamed().train(i) for i in range(50)]
    notes = sorted(streamed().notes.glob("*.json"))
    notes[1].write_text("{")
    later = streamed()
    assert len(later.known) == 2
    same(later.train(49), expected[49])


@pytest.mark.parametrize("pack", ["documents", "none"])
def test_ranks_of_a_stream_share_its_rows(streamed, pack):
    one, other = streamed(pack=pack), streamed(pack=pack)
    for step, rows in itertools.product((0, 9, 10, 40), (slice(0, 2), slice(2, 4))):
        whole, part = one.train(step), other.train(step, rows)
        np.testing.assert_array_equal(part.tokens, whole.tokens[rows])
        assert (part.segment_ids is None) == (pack == "none")
    assert (streamed(seed=1).train(0).tokens != one.train(0).tokens).any()


def test_a_stream_holds_out_every_sixteenth_document(streamed):
    texts = documents(70)
    batches = streamed(texts, buffer=64)
    held_out = {texts[i] for i in range(15, 64, 16)}
    for parts in parts_of(batches.train(i) for i in range(40)):
        assert {*parts[1:-1]} <= {*texts} - held_out  # whole documents
    evaluated = batches.evaluation(2)
    assert {batch.tokens.shape for batch in evaluated} == {(4, WIDTH)}
    for parts in parts_of(evaluated):
        assert all(any(text in document for document in held_out) for text in parts)


@pytest.mark.parametrize("texts, buffer, message", TABLE["streams without a row"])
def test_a_stream_that_fills_no_row(streamed, texts, buffer, message):
    with refused(message):
        streamed(texts, buffer=buffer).evaluation(1)


# In a process of its own: the library reads the Hub's address when it is imported.
REAL = """
import json, pathlib, sys, urllib.request
from absl import flags
from bench import train
from bench.lm import data, hub, stream, tokens

out, url = pathlib.Path(sys.argv[1]), sys.argv[2]
source = hub.Hub("me/tiny").pinned()
texts, state = source.take(None, 25)
rest, _ = source.take(json.loads(json.dumps(state)), 99)
result = {"revision": source.revision, "texts": texts + rest, "errors": []}
options = dict(batch=4, length=8, seed=0, buffer=32)
whole = data.load("me/tiny", **options)
expected = [whole.train(i).tokens for i in range(45)]
noted = data.load("me/tiny", **options, notes=out)
for i in range(30):
    noted.train(i)
later = data.load("me/tiny", **options, notes=out)
result["same"] = all((later.train(i).tokens == expected[i]).all() for i in (30, 31, 44, 2))
for name, given in (
    ("me/none", {}), ("me/tiny", {"column": "body"}), ("me/tiny", {"split": "test"}),
    ("me/tiny:big", {}), ("me/tiny", {"column": "id"}),
):
    try:
        data.load(name, **options, **given)
    except (ValueError, OSError) as error:
        result["errors"].append(f"{type(error).__name__}: {error}")
train.FLAGS([
    "train", "--dataset=me/tiny", "--pack=none", "--framework=torch", "--attention=dense",
    "--seq_len=64", "--batch=2", "--steps=2", "--shuffle_buffer=64", f"--out={out}/run",
])
flags.FLAGS.mark_as_parsed()
result["status"] = train.main(["train"])
urllib.request.urlopen(url + "/down").read()
try:
    hub.Hub("me/tiny").pinned()
except ConnectionError as error:
    result["errors"].append(f"{type(error).__name__}: {error}")
print("RESULT", json.dumps(result))
"""


def test_the_real_library_beside_a_fake_hub(tmp_path):
    """`datasets` and `huggingface_hub` over HTTP: all but the real Hub."""
    pytest.importorskip("datasets", reason="needs the extra data")
    import pyarrow
    from pyarrow import parquet

    from tests.fake_hub import COMMIT, hub_of

    found, files = documents(70), {}
    for i, part in enumerate((range(40), range(40, 70))):
        table = pyarrow.table({"text": [found[x] for x in part], "id": list(part)})
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink, row_group_size=8)
        files[f"data/train-0000{i}-of-00002.parquet"] = sink.getvalue().to_pybytes()
    with hub_of("me/tiny", files) as url:
        changes = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        changes |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        done = spawned.python("-c", REAL, tmp_path, url, **changes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the order does not change" in done.stderr
    result = json.loads(done.stdout.partition("RESULT ")[2])
    assert result["revision"] == COMMIT and result["texts"] == found
    assert result["same"] and result["status"] == 0
    for error, message in zip(result["errors"], TABLE["errors of the Hub"], strict=True):
        assert re.match(words(message), error), error
    assert len(of_kind(log.Step, tmp_path / "run" / "train.jsonl")) == 2


def test_rows_that_repeat_passages_of_theirs():
    """Each copy stands beyond the window from what it copies; all else is as it was."""
    places = np.arange(6000)  # a token says where it stood
    documents = tokens.Documents("x", places, np.array([0, 6000]), 6000, "0" * 64)
    given = {"documents": documents, "pack": "once"}
    plain = data.Batches(2, 299, 1, **given)
    made = data.Repeating(2, 299, 1, passages=3, size=8, apart=20, **given)
    assert made.sha256 != plain.sha256
    copies = 0
    for step in range(5):
        before, after = plain.train(step).tokens, made.train(step).tokens
        assert (made.train(step, slice(1, 2)).tokens == after[1:]).all()
        for row, column in np.argwhere(before != after):
            back = column - (after[row] == after[row, column]).argmax()
            assert back >= 8 + 20 and column >= 8 + 20
            copies += 1
    assert 5 * 2 * 8 < copies <= 5 * 2 * 3 * 8
    assert (made.evaluation(2)[1].tokens == plain.evaluation(2)[1].tokens).all()
    with refused("have at least 36 tokens, got pack="):
        data.Repeating(2, 34, 1, passages=3, size=8, apart=20, **given)

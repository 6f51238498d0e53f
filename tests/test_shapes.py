"""bench.shapes: what it asks bench.compare for, in which order, and what it keeps."""

from pathlib import Path

import pytest

from bench import shapes
from bench.harness import exit_status, problems, records, turns
from nsa_core import config_files
from tests import commands, pretend
from tests.measured import record


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Children that write a record, and the words of each; those of text are wrong."""
    found = []

    class Pretended:
        def __init__(self, words, log, environment):
            self.given = dict(word.split("=", 1) for word in words if "=" in word)
            found.append((words, log.name, environment))

        def ready(self):
            return "ready after 1 s"

        def take_turn(self):
            wrong = self.given["--input"] == "text"
            row = record("all", "mosaic", None if wrong else 1.0)
            records.append(Path(self.given["--out"]) / "compare.jsonl", [row])
            return int(wrong), ""

        def end(self):
            pass

    monkeypatch.setattr(turns, "Child", Pretended)
    pretend.folder(monkeypatch, "records", tmp_path / "records")
    return found


def run(*words) -> int:
    return commands.called(shapes, *words)


def test_every_shape_of_both_inputs(asked, tmp_path):
    out = tmp_path / "out"
    assert run(f"--out={out}", "--save_records", "--commit=abc") == 1
    assert len(asked) == 2 * len(shapes.SHAPES)
    for words, _, environment in asked:
        assert {"--turn", "--nosave_records", "--commit=abc", "--mode=fwdbwd"} <= {*words}
        assert environment.items() >= shapes.ENVIRONMENT.items()
    inputs = [word for words, *_ in asked for word in words if word.startswith("--input=")]
    assert inputs == sorted(inputs)  # those of a shape find what the first one compiled
    (folder,) = {environment["JAX_COMPILATION_CACHE_DIR"] for *_, environment in asked}
    assert not Path(folder).exists()
    found = records.read(out / "compare.jsonl")
    assert len(found) == len(asked)
    (kept,) = (tmp_path / "records").glob("*/compare.jsonl")
    assert sorted(map(str, records.read(kept))) == sorted(map(str, found))


def test_one_shape(asked, tmp_path):
    assert run(f"--out={tmp_path / 'out'}", "--only=8 x", "--input=random") == 0
    ((words, log, _),) = asked
    assert log == "8 x 2k, G=6, D=64, random.log"
    (path,) = (word.split("=", 1)[1] for word in words if word.startswith("--config="))
    settings = problems.settings(path, {})
    model, sizes = settings.model, settings.runtime
    assert (model.n_heads, model.n_kv_groups, model.d_k, model.d_v) == (12, 2, 64, 64)
    assert (sizes.batch, sizes.seq_len) == (8, 2048)
    assert not (tmp_path / "records").exists()
    assert "--branch=dense" not in words


def test_dense_attention_beside(asked, tmp_path):
    """The first input: its times do not depend on it."""
    run(f"--out={tmp_path / 'out'}", "--only=8k", "--dense")
    (first, _, _), (second, _, _) = asked
    assert {"--branch=all", "--branch=dense"} <= {*first}
    assert "--branch=all" in second and "--branch=dense" not in second


def test_waves(asked, tmp_path, monkeypatch):
    alive = []
    monkeypatch.setattr(
        turns, "of_names", lambda commands, *rest: alive.append(len(commands)) or iter(())
    )
    status = run(f"--out={tmp_path / 'out'}", "--at_once=3", "--input=text")
    assert status == exit_status.NOT_MEASURED  # nothing ran
    assert alive == [3, 3, 3, 2]


def test_a_folder_that_has_results_stays(asked, tmp_path):
    out = tmp_path / "out"
    run(f"--out={out}", "--only=8k")
    with pytest.raises(ValueError, match="new folder"):
        run(f"--out={out}", "--only=8k")


def test_shapes_are_settings():
    for name, problem in shapes.SHAPES.items():
        settings = shapes.settings(problem)
        assert settings["model"]["n_heads"] % settings["model"]["n_kv_groups"] == 0, name
        assert config_files.overlay(config_files.load("base"), settings)

"""The table of mutants fits the sources, and its runner refuses one that does not."""

import json
import queue

import pytest

from tests import mutants


def test_the_table_fits_the_sources():
    assert len(mutants.read()) >= 100


ROW = {
    "path": "core",
    "name": "nothing",
    "file": "nsa_core/__init__.py",
    "old": "no such text",
    "new": "",
    "tests": ["tests/test_properties.py"],
}
SAME = ROW | {"file": "tests/mutants.py", "old": '"""Small mistakes in the library, each'}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW], "old must occur once in nsa_core/__init__.py, got 0 times"),
        ([ROW | {"file": "pyproject.toml", "old": "["}], "old must occur once"),
        ([ROW | {"file": "none.py"}], "none.py"),
        ([SAME | {"tests": ["tests/test_none.py::test_it"]}], "the file of tests/test_none.py"),
        ([SAME | {"tests": ["tests/test_oracle.py::test_it[x]"]}], "the file of tests/test_or"),
        ([SAME | {"tests": []}], "must be there once, with tests"),
        ([SAME, SAME], "must be there once, with tests"),
        ([ROW | {"kind": "x"}], "a mutant must have"),
    ],
    ids="no text,several texts,no file,no test file,no test,no tests,twice,keys".split(","),
)
def test_rows_that_are_refused(rows, words, tmp_path, capsys):
    table = tmp_path / "mutants.toml"
    table.write_text(
        "\n".join(
            "[[mutant]]\n" + "\n".join(f"{key} = {json.dumps(x)}" for key, x in row.items())
            for row in rows
        )
    )
    assert mutants.main(["--table", str(table)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["no such mutant"], ["--part", "one"], ["--part", "0/3"]]
)
def test_arguments_that_are_refused(arguments, capsys):
    assert mutants.main(arguments) == 2
    assert capsys.readouterr().err.startswith("mutants: ")


@pytest.mark.parametrize(
    ("body", "good"), [("pass", True), ("pytest.skip()", False), ("assert False", False)]
)
def test_a_control_needs_a_test_that_passes(body, good, tmp_path):
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    {body}\n")
    copies = queue.Queue()
    copies.put(tmp_path)
    row = {"path": "control", "name": "test_it.py", "tests": ["test_it.py"]}
    assert mutants.judged(copies, row) is good

"""What the documents say: examples run, links lead somewhere, tables are what the records give."""

import ast
import inspect
import os
import re
import traceback
import xml.etree.ElementTree

import pytest
import torch

import nsa_jax
import nsa_torch
from bench import doc_tables
from bench.harness import records, seed_env
from tests import parse_commands, spawned
from tests.commands import called
from tests.measured import made
from tests.refusals import refused
from tests.tables import table

ROOT = doc_tables.ROOT
LOG = sorted(ROOT.glob("bench/records/log/*.md"))
DOCUMENTS = [*doc_tables.documents(), *LOG, ROOT / "WORKSPACE.md", ROOT / "cloud" / "README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXAMPLES = [path for path in DOCUMENTS if BLOCK.search(path.read_text())]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def example(rank, folder):
    """Runs the code of the folder, in a process that has imported the frameworks."""
    os.environ["MPLBACKEND"] = "agg"
    try:
        exec((folder / "code.py").read_text(), {"__name__": "__main__"})
    except BaseException:
        (folder / "said").write_text(traceback.format_exc())
        raise


@pytest.mark.parametrize("path", [*EXAMPLES, *TUTORIALS], ids=name)
def test_examples_run(path, tmp_path):
    """The blocks of a page one after the other, and the whole of a tutorial."""
    text = path.read_text()
    code = text if path.suffix == ".py" else "\n".join(BLOCK.findall(text))
    (tmp_path / "code.py").write_text(code)
    assert spawned.run(example, 1, tmp_path) == [0], (tmp_path / "said").read_text()


@pytest.mark.parametrize("path, cache", [("README.md", "cache"), ("docs/seed.md", "kv")])
def test_decoding_keeps_no_graph(path, cache):
    """Of all steps before, as autograd would."""
    (block,) = [x for x in BLOCK.findall((ROOT / path).read_text()) if "init_cache" in x]
    names = {}
    exec("import torch, nsa_torch\n" + block, names)
    assert names[cache].longest and names["y"].grad_fn is None
    assert names[cache].selected_key.grad_fn is None


def test_adapters_name_every_projection():
    """The names for peft, which passes over those that are not there."""
    text = (ROOT / "docs" / "convert.md").read_text()
    lists = [re.findall(r'"(\w+)"', x) for x in re.findall(r"target_modules=(\[.*?\])", text)]
    for names, kv in zip(lists, ("separate", "shared"), strict=True):
        layer = nsa_torch.NSAAttention(
            dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, gate="head", kv=kv
        )
        found = {x for x, y in layer.named_modules() if isinstance(y, torch.nn.Linear)}
        assert {*names, "gate"} == found


def anchors(text):
    """Of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", [*DOCUMENTS, *TUTORIALS], ids=name)
def test_links_lead_somewhere(path):
    """Those that are relative."""
    for link in LINK.findall(path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists() and (not anchor or anchor in anchors(file.read_text())), link


COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [*sorted(ROOT.glob("bench/*.py")), *sorted(ROOT.glob("bench/lm/*.py"))]
    if '\nif __name__ == "__main__":\n    cli.run(' in path.read_text()
]


def test_every_command_of_a_page_parses():
    """By the flags that it has by itself, after the variables that stand before it."""
    pages = [path.read_text() for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]]
    for folder in ("bench", "cloud", "examples", "interop", "nsa_core", "nsa_torch"):
        modules = [ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")]
        pages += [ast.get_docstring(module) or "" for module in modules]
    pages += [
        f"`{name}=1 NSA_DEBUG_TIMING=1 python -m bench.fa2`"
        for name, meaning in seed_env.TABLE.items()
        if "FA2" in name and meaning.flags
    ]
    lines = [line for page in pages for line in parse_commands.lines(page)]
    wrong = """`python -m bench.fa2 --no_such` `python -m bench.report`
        `NSA_SEL_CUDA=1 python -m bench.fa2` `python -m bench.fa2 word`
        `python examples/train.py --steps` `python examples/train.py --out x --again`"""
    found = parse_commands.parsed([*lines, *parse_commands.lines(wrong)])
    faults = [(line, x.said) for line, x in zip(lines, found, strict=False) if not x.ok]
    assert len(lines) > 200 and not faults
    assert [x.ok for x in found[len(lines) :]] == [False, True, False, False, False, False]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_a_document(command):
    name = re.compile(rf"-m (nsa_)?{re.escape(command)}\b")
    assert any(name.search(path.read_text()) for path in doc_tables.documents())


FUNCTIONS = [
    pytest.param(function, id=f"{module.__name__}.{name}")
    for module in (nsa_jax, nsa_torch)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_public_function_says_what_it_takes_gives_and_raises(function):
    """Its docstring, or those that it refers to."""
    module = nsa_torch if function.__module__.startswith("nsa_torch") else nsa_jax
    said = inspect.getdoc(function) or ""
    others = re.findall(
        r"(?:Args|Raises|Returns): (?:the same (?:errors )?)?as (?:of |in )?`(\w+)`", said
    )
    said += "".join(inspect.getdoc(getattr(module, name)) or "" for name in others)
    for word in (*inspect.signature(function).parameters, "Raises"):
        assert re.search(rf"\b{word}\b", said), word
    assert re.search(r"`\[[A-Z]|Returns", said), "what comes back"


@pytest.mark.parametrize("path", doc_tables.documents(), ids=name)
def test_tables_are_what_the_records_give(path):
    text = path.read_text()
    assert doc_tables.filled(text, path.name) == text


@pytest.mark.parametrize("path", doc_tables.PICTURES)
def test_pictures_are_what_the_records_give(path):
    text = (ROOT / path).read_text()
    assert text == doc_tables.PICTURES[path](text), (
        "write it: python -m bench.doc_tables --write"
    )
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


def test_a_typed_figure_and_a_missing_picture_are_seen(tmp_path, monkeypatch, capsys):
    page, text = tmp_path / "a.md", (ROOT / "docs" / "benchmarks.md").read_text()
    page.write_text(re.sub(r"\| \d+\.\d+ \|", "| 0.01 |", text, count=1))
    monkeypatch.setattr(doc_tables, "ROOT", tmp_path)
    monkeypatch.setattr(doc_tables, "documents", lambda: [page])
    monkeypatch.setattr(doc_tables, "PICTURES", {"a.svg": lambda old: f"{old}drawn"})
    assert called(doc_tables) == 1
    assert capsys.readouterr().out == "a.md: differs\na.svg: differs\n"
    assert called(doc_tables, "--write") == 0
    assert page.read_text() == text and (tmp_path / "a.svg").read_text() == "drawn"


@pytest.mark.parametrize("what, message", table("bench")["markers"])
def test_markers_that_cannot_be_understood(what, message):
    with refused(f"page.md: *{message}"):
        doc_tables.filled(f"<!-- table: {what} -->\n<!-- end table -->", "page.md")


def test_runs_and_seeds_of_an_experiment():
    told = doc_tables.experiment("table_8k", runs="head_shared", seeds="0,1").splitlines()[2:]
    assert [line.split(" | ")[0] for line in told] == ["| `dense`", "| `head_shared`"]
    assert all(line.endswith("| 0, 1 |") for line in told)


def test_packed_rows_that_failed_have_no_ratio(monkeypatch):
    """Theirs and those of separate rows are shown where they are right."""
    lines = table("bench")["packed rows"]
    monkeypatch.setattr(doc_tables, "chosen", lambda *given, **options: lines)
    monkeypatch.setitem(doc_tables.KINDS, "summary", {})
    found, alone = (x.strip("| ").split(" | ") for x in doc_tables.summary().splitlines()[-2:])
    assert found[2] == "wrong; 2.00" and found[4].startswith(
        "**-; +0.0%** time compared with NSA on separate rows (2.00; 2.00)"
    )
    assert alone[2] == "2.00; 2.00" and alone[4].startswith(
        "**+0.0%; +0.0%** time compared with NSA on separate rows"
    )


def test_a_row_that_failed_since_is_no_older_time(tmp_path, monkeypatch):
    """Of a shape the newest record counts: one that is wrong shows no time and no ratio. Other
    sizes and precisions than the tables speak of are other rows."""
    given, path = table("bench")["newest records"], tmp_path / "card/compare.jsonl"
    monkeypatch.setattr(doc_tables, "DEVICE", tmp_path / "card")
    monkeypatch.setitem(doc_tables.KINDS, "summary", {"it": given["shape"]})
    monkeypatch.setattr(doc_tables, "PASSES", {"forward": "forward"})
    shown, packed = doc_tables.chosen, [{"documents": [8], "form": "", "mode": ""}]
    none = lambda name, *given, **how: (
        packed if name == "packed" else shown(name, *given, **how)
    )
    monkeypatch.setattr(doc_tables, "chosen", none)
    for name, rows, cells in given["rows"]:
        records.append(path, made(rows))
        head, _, *lines = doc_tables.TABLES[name](device="card").splitlines()
        assert {line.count(" | ") for line in lines} == {head.count(" | ")}
        begin = {"attention": 4, "summary": 2}[name]
        assert lines[0].strip("| ").split(" | ")[begin : begin + len(cells)] == cells
    assert "4.00" not in str(lines)
    with refused("card must have records of it"):
        doc_tables.TABLES["summary"](device="card")

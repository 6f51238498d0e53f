"""Counts words and forms that docs, docstrings, comments and messages avoid (`plain_english.yaml`).

    python -m tests.plain_english              # status 1 where a folder has more than it may
    python -m tests.plain_english FILE..       # every hit of these files

Code, generated tables and links' targets are not read.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
RULES = {name: (re.compile(x["pattern"]), x["write"]) for name, x in DATA["rules"].items()}
SKIPPED = re.compile(r"```.*?^ *```|<!-- table.*?<!-- end table -->", re.S | re.M)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of text of a file, with their numbers."""
    source = path.read_text()
    if path.suffix == ".md":
        blank = SKIPPED.sub(lambda found: "\n" * found[0].count("\n"), source)
        yield from enumerate(blank.splitlines(), 1)
        return
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node, clean=False)):
            yield from enumerate(text.splitlines(), node.body[0].lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def hits(path: Path) -> Iterator[str]:
    for number, line in prose(path):
        text = re.sub(r"\]\([^)]*\)|<[^>]*>|https?://\S+", "", line)
        text = re.sub(r"`[^`]*`", "CODE", text).strip(" |-*")
        for name, (pattern, advice) in RULES.items():
            for found in pattern.finditer(text):
                yield f"{path}:{number}: {name}: {found[0].strip()!r}: {advice}"


def counted() -> dict[str, int]:
    """Hits by folder."""
    listed = subprocess.run(
        ["git", "ls-files", *DATA["allowed"]], cwd=ROOT, capture_output=True, text=True
    )
    found = dict.fromkeys(DATA["allowed"], 0)
    for name in listed.stdout.split():
        if name.endswith((".md", ".py")):
            found[name.partition("/")[0]] += len([*hits(ROOT / name)])
    return found


def main(arguments: list[str]) -> int:
    if arguments:
        print(*(hit for name in arguments for hit in hits(Path(name))), sep="\n")
        return 0
    found, allowed = counted(), DATA["allowed"]
    for folder, count in found.items():
        print(f"{folder}: {count} of {allowed[folder]}")
    return int(any(count > allowed[folder] for folder, count in found.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

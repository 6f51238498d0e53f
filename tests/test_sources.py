"""What a kernel's key is made of: a change of code changes the keys of its users, and no others."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from kernels_pallas.kernel import LENGTHS
from kernels_pallas.runtime import sources, store
from kernels_pallas.runtime.sources import FOLDER, Sources
from nsa_interop import build
from tests.cross_compile import ROOT

CODE = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.py"))
RECORDER = sources.RECORDER
# Prints what Python imports for each line of modules, the builder's last; packages do not count.
IMPORTS = """
import json, os, sys, types
import jax.experimental.pallas.mosaic_gpu
package = types.ModuleType("kernels_pallas")
package.__path__ = ["kernels_pallas"]
sys.modules["kernels_pallas"] = package
for line in sys.stdin:
    if os.fork() == 0:
        for name in line.split():
            __import__(name)
        ours = {x: m for x, m in sys.modules.items() if x.startswith("kernels_pallas.")}
        print(json.dumps([x for x, m in ours.items() if not hasattr(m, "__path__")]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def kernels():
    """One of each body that the presets run."""
    ends = LENGTHS[0], LENGTHS[-1]
    found = (x for preset in ("paper", "seed") for x in build.kernels_of(preset, True, ends))
    return list({(x.source, x.body): x for x in found}.values())


@pytest.fixture
def tree(tmp_path):
    """A copy of the package."""
    unread = shutil.ignore_patterns("presets", "__pycache__")
    return shutil.copytree(FOLDER, tmp_path / "tree", ignore=unread)


@pytest.fixture
def keys_in(kernels, monkeypatch):
    """Keys of the kernels from a copy of the package; what one call parsed the next one knows."""
    parsed = {}

    def keys(tree):
        found = Sources(tree)
        found.learn(parsed)
        monkeypatch.setattr(store, "sources", lambda: found)
        keys = [store.key_of(x) for x in kernels]
        parsed.update(found.used)
        return keys

    return keys


def users(kernels):
    """Which kernels Python imports each module for."""
    builder = sources.BUILDER
    lines = [f"{x.source.split(':')[0]} {x.body.split(':')[0]} {builder}" for x in kernels]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        input="\n".join(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for i, line in enumerate(done.stdout.splitlines()):
        for name in json.loads(line):
            found.setdefault(name, set()).add(i)
    return found


def test_a_mutant_of_each_source_changes_the_keys_of_its_users(kernels, tree, keys_in):
    imported, everyone = users(kernels), set(range(len(kernels)))
    before = keys_in(tree)
    for path in [*CODE, RECORDER]:
        name = ".".join(("kernels_pallas", *path.with_suffix("").parts))
        expected = everyone if path == RECORDER else imported.get(name, set())
        if path.stem.endswith("_emulation"):
            assert expected, f"{name} is imported for no kernel"
            expected = set()
        original = (tree / path).read_text()
        (tree / path).write_text(original + "\nint mutant;\n")
        if path != RECORDER:
            (tree / path).write_text(original + "\nMUTANT = 1\n")
        after = keys_in(tree)
        (tree / path).write_text(original)
        changed = {i for i in everyone if before[i] != after[i]}
        assert changed == expected, f"{name}: {[kernels[i].name for i in changed ^ expected]}"
    never = {"store", "loaded", "bound_kernel", "sequence", "captures", "driver", "build"}
    assert not any(f"kernels_pallas.runtime.{name}" in imported for name in never)


def test_comments_and_docstrings_change_no_key(tree, keys_in):
    before = keys_in(tree)
    for path in CODE:
        text = (tree / path).read_text()
        text = re.sub(r'^((?:    )*)"""(?=\w)', r'\1"""Otherwise: ', text, flags=re.MULTILINE)
        (tree / path).write_text(f"# A comment.\n\n{text}# Another.\n")
    (tree / RECORDER).write_text(
        "/* A\n comment. */" + (tree / RECORDER).read_text() + "// b\n"
    )
    assert keys_in(tree) == before


SAMPLE = '''
"""A module."""
from . import emulator
import kernels_pallas.kernel as kernel, os.path
from kernels_pallas.specs import tile

type Word = int


class Spec[T](tuple):
    """A class."""

    size: int = -1_000
    values = (1.5e-3, b"bytes", None, ..., 2j, True)


async def f(a, /, b=1, *c, d: "int" = 2, **e) -> str:  # a comment
    async with a as b, c:
        match b:
            case {"x": [1, *rest], **others} | Spec(size=2) if a:
                return f"{a!r:>{b}} {d=} {'nested'}" "joined"
    try:
        lambda *x, y=1: (yield)
    except* (ValueError, TypeError) as error:
        raise error from None
    return [x async for x in a if x][::2]
'''


def test_a_source_has_one_hash_on_every_python():
    module = sources.parse(SAMPLE.encode(), "kernels_pallas.specs.sample")
    assert module.digest == ("b4ad7192bf3c71e5c7ccc2669712bc2436f414b9040a6f1f160918224f8f2a8f")
    assert module.imports == (
        "kernels_pallas.kernel",
        "kernels_pallas.specs:emulator",
        "kernels_pallas.specs:tile",
    )


@pytest.mark.parametrize(
    "before, after",
    [
        ("-1_000", "-1_001"),
        ("f(a, /", "f(a"),
        ("b=1", "b=2"),
        (" | Spec(size=2)", ""),
        ("*c, ", ""),
    ],
)
def test_code_changes_a_hash(before, after):
    assert before in SAMPLE
    hashes = {
        sources.parse(text.encode(), "kernels_pallas.specs.sample").digest
        for text in (SAMPLE, SAMPLE.replace(before, after))
    }
    assert len(hashes) == 2


def test_what_was_parsed_is_not_parsed_again(tree, keys_in, monkeypatch):
    before = keys_in(tree)
    monkeypatch.setattr(sources, "parse", None)
    assert keys_in(tree) == before
    path = tree / "specs" / "tile.py"
    path.write_text(path.read_text() + "X = 1\n")
    with pytest.raises(TypeError, match="not callable"):
        keys_in(tree)


def test_equal_modules_of_two_packages_import_each_from_its_own(tree):
    for package in ("specs", "mosaic"):
        (tree / package / "twin.py").write_text("from . import tile\n")
    found = Sources(tree)
    imports = [found.module(f"kernels_pallas.{x}.twin").imports for x in ("specs", "mosaic")]
    assert imports == [("kernels_pallas.specs:tile",), ("kernels_pallas.mosaic:tile",)]
    again = Sources(tree)
    again.learn(found.used)
    assert imports[1] == again.module("kernels_pallas.mosaic.twin").imports


def test_strings_of_c_are_no_comments():
    text = '/* c */ a("http://x",\n"/*"); // b\nc /* d */ "\\"//"'
    assert sources.plain_c(text) == 'a("http://x", "/*"); c "\\"//"'

"""What a kernel's key is made of: all sources that its machine code follows from."""

import json
import subprocess
import sys

import pytest

from kernels_pallas.kernel import LENGTHS
from kernels_pallas.runtime import sources
from nsa_interop import build
from tests.cross_compile import ROOT

# Prints the modules of the package that Python imports to build kernels.
IMPORTED = """
import json, sys, types
package = types.ModuleType("kernels_pallas")
package.__path__ = ["kernels_pallas"]
sys.modules["kernels_pallas"] = package
for name in sys.argv[1:]:
    __import__(name)
found = {x: m for x, m in sys.modules.items() if x.startswith("kernels_pallas.")}
print(json.dumps([x for x, m in found.items() if not hasattr(m, "__path__")]))
"""


def test_what_builds_kernels_is_among_the_sources():
    presets = ("paper", "seed")
    kernels = [x for name in presets for x in build.kernels_of(name, True, LENGTHS[:1])]
    places = {place.partition(":")[0] for x in kernels for place in (x.source, x.body)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, "kernels_pallas.runtime.build_child", *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in json.loads(done.stdout)}
    assert len(files) > 40 and files <= set(sources.files())
    assert sources.FOLDER / "runtime" / "recorder.c" in set(sources.files())


@pytest.fixture
def folder(tmp_path):
    """A package of a few sources."""
    for name in ("mosaic/a.py", "specs/b.py", "runtime/recorder.c", "kernel.py", "triton/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in sources.BUILDER:
        (tmp_path / "runtime" / f"{name}.py").write_text(name)
    return tmp_path


def test_a_change_of_any_source_changes_the_digest(folder):
    found = {sources.digest.__wrapped__(folder)}
    for path in sources.files(folder):
        before = path.read_text()
        path.write_text(f"{before[:-1]}#")  # of the same length
        found.add(sources.digest.__wrapped__(folder))
        path.write_text(before)
    assert len(found) == 1 + len([*sources.files(folder)]) == 10


def test_a_moved_source_changes_the_digest_and_others_do_not(folder):
    before = sources.digest.__wrapped__(folder)
    (folder / "triton" / "c.py").write_text("another")
    assert sources.digest.__wrapped__(folder) == before
    (folder / "mosaic" / "a.py").rename(folder / "mosaic" / "b.py")
    assert sources.digest.__wrapped__(folder) != before

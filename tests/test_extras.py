"""What each extra brings, and what is said where it is missing. Packages are hidden here."""

import itertools
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from bench.harness.process import ROOT
from tests.clean_environments import ENVIRONMENTS, program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# The import system finds no hidden package, as if it were not installed.
HIDE = """
import importlib.machinery, sys
class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {hidden}:
            return super().find_spec(name, path, target)
place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = Hidden
"""


def run(code: str, hidden: tuple[str, ...]) -> subprocess.CompletedProcess:
    code = HIDE.format(hidden=set(hidden) or "()") + code
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ["base", "jax"])
def test_the_programs_of_clean_environments(name):
    environment = ENVIRONMENTS[name]
    done = run(program(environment), environment.absent)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


@pytest.mark.parametrize(
    "statement, hidden, extra",
    [
        ("import nsa_torch", "torch", "torch"),
        ("import nsa_interop.weights", "torch", "torch"),
        ("import nsa_torch.huggingface", "transformers", "hf"),
        ("import nsa_jax.nn", "flax", "nnx"),
        ("import nsa_jax; nsa_jax.attention", "jax", "jax"),
        ("import bench.compare", "rich", "bench"),
        ("import bench.report", "matplotlib", "bench"),
        ("from bench.lm import hub; hub.Hub('a/b').pinned()", "datasets", "data"),
        ("from bench.lm import tokens; tokens.tokenizer('x')", "tokenizers", "data"),
    ],
)
def test_a_missing_package_names_its_extra(statement, hidden, extra):
    done = run(statement, (hidden,))
    message = (
        f"ModuleNotFoundError: {hidden} must be installed, got no such package: "
        f"pip install 'native-sparse-attention[{extra}]'"
    )
    assert done.stderr.strip().splitlines()[-1] == message, done.stderr
    assert hidden in {Requirement(line).name for line in EXTRAS[extra]}


def test_a_package_has_one_bound():
    """What tests install may be narrower."""
    bounds = {}
    others = (lines for extra, lines in EXTRAS.items() if extra != "test")
    for line in itertools.chain(PROJECT["dependencies"], *others):
        requirement = Requirement(line)
        bounds.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}
    for requirement in map(Requirement, EXTRAS["test"]):
        for bound in bounds.get(requirement.name, ()):
            assert set(requirement.specifier) >= set(Requirement(f"x{bound}").specifier)


def test_every_package_of_the_checkout_is_installed():
    """`packages.find` finds what stands in the checkout, tests and scripts left out."""
    setuptools = pytest.importorskip("setuptools")
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = setuptools.find_packages(str(ROOT), include=tool["packages"]["find"]["include"])
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("[a-z]*/**/__init__.py")
        if path.parts[len(ROOT.parts)] not in ("tests", "build")
    }
    assert set(found) == there

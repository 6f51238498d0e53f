"""What each extra brings, and what is said where it is missing. Packages are hidden here."""

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from bench.harness.process import ROOT
from tests import spawned
from tests.clean_environments import (
    ENVIRONMENTS,
    NO_JAX,
    TORCH,
    beside,
    examples,
    program,
    project,
)
from tests.tables import table

FILE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = FILE["project"], FILE["tool"]["setuptools"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
# Nothing of the library comes from elsewhere.
HOME = """
for name, module in sorted(sys.modules.items()):
    if name.startswith(("nsa_", "kernels_pallas")) and module.__file__:
        assert module.__file__.startswith({installed!r}), (name, module.__file__)
"""
# The import system finds no hidden package, as if it were not installed.
HIDE = """
import importlib.machinery, sys
class Hidden(importlib.machinery.PathFinder):
    names = {hidden}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in cls.names:
            return super().find_spec(name, path, target)
place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = Hidden
"""


def run(code: str, hidden: tuple[str, ...], folder: Path = ROOT) -> subprocess.CompletedProcess:
    code = HIDE.format(hidden=set(hidden) or "()") + code
    return spawned.python("-c", code, folder=folder)


@pytest.mark.parametrize("name", ["base", "jax", "torch"])
def test_the_programs_of_clean_environments(name, tmp_path, monkeypatch):
    environment = ENVIRONMENTS[name]
    if name == "torch":  # which kernels a wheel has, a checkout does not show
        environment = environment._replace(program=TORCH + NO_JAX + examples("torch"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = run(program(environment), environment.absent, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


MISSING = table("missing_packages")
# What each of them ends with, in a process of its own.
EACH = """
import os, traceback
for i, (statement, hidden) in enumerate({rows!r}):
    if i == 3:
        import jax, torch
    if os.fork() == 0:
        try:
            Hidden.names = {{hidden}}
            exec(statement)
        except BaseException as error:
            print(traceback.format_exception_only(error)[-1].strip(), flush=True)
        else:
            print("nothing", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def refused():
    done = run(EACH.format(rows=[row[:2] for row in MISSING]), ())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("row", range(len(MISSING)), ids=[row[0] for row in MISSING])
def test_a_missing_package_names_its_extra(row, refused):
    _, hidden, extra = MISSING[row]
    assert refused[row] == (
        f"ModuleNotFoundError: {hidden} must be installed; run "
        f"pip install 'native-sparse-attention[{extra}]'"
    )
    assert hidden in {Requirement(line).name for line in EXTRAS[extra]}


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_a_console_script_names_the_extra_that_it_needs(script):
    module, function = PROJECT["scripts"][script].split(":")
    done = run(
        f"import sys; from {module} import {function}; {function}()", ("jinja2", "matplotlib")
    )
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "pip install 'native-sparse-attention[bench]'" in line
    shown = (
        f"import sys; sys.argv[1:] = ['--help']; from {module} import {function}; {function}()"
    )
    done = run(shown, ())
    assert (done.returncode == 0 and "--preset" in done.stdout) or "--plan" in done.stdout


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
            for each in Requirement(f"x{bound}").specifier:
                narrower = [
                    x for x in requirement.specifier if x.operator == each.operator == "<"
                ]
                assert each in set(requirement.specifier) or any(
                    Version(x.version) <= Version(each.version) for x in narrower
                ), f"test takes {requirement}, others {bound}"


def test_what_is_pinned_is_within_the_bounds():
    lines = [line for line in CONSTRAINTS.splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    asked = itertools.chain(PROJECT["dependencies"], *EXTRAS.values())
    for requirement in map(Requirement, asked):
        if version := pinned.get(requirement.name):
            assert version in requirement.specifier, f"{requirement} is pinned to {version}"
    assert {"jax", "torch", "transformers"} <= pinned.keys()


def folders() -> set[Path]:
    """Where the checkout has the packages that are installed."""
    found = set()
    for package in SETUPTOOLS["packages"]:
        for name, folder in SETUPTOOLS["package-dir"].items():
            if f"{package}.".startswith(f"{name}."):
                package = folder + package.removeprefix(name)
        found.add(Path(*package.split(".")))
    return found


def test_every_package_of_the_checkout_is_installed():
    """Tests and scripts are not, and no name is one that a user's project may have too."""
    there = {
        path.parent.relative_to(ROOT)
        for path in [*ROOT.glob("[a-z]*/**/__init__.py"), *ROOT.glob("configs/**/*.yaml")]
        if path.relative_to(ROOT).parts[0] not in ("tests", "build")
    }
    assert folders() == there
    names = {package.partition(".")[0] for package in SETUPTOOLS["packages"]}
    ours = {f"nsa_{name}" for name in ("bench", "core", "interop", "jax", "torch")}
    assert names == {"kernels_pallas", *ours}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that a wheel would put into site-packages."""
    pytest.importorskip("setuptools")
    sources, tree = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE", *{x.parts[0] for x in folders()}):
        (sources / name).symlink_to(ROOT / name)
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_py"]
    subprocess.run([*build, "--build-lib", tree], cwd=sources, check=True)
    return tree


def test_every_file_of_configs_is_installed(installed):
    there, here = (
        {path.relative_to(folder) for path in folder.rglob("*.yaml")}
        for folder in (installed / "nsa_core" / "configs", ROOT / "configs")
    )
    assert there == here


def test_type_checkers_are_told(installed):
    assert all(
        (installed / name / "py.typed").is_file()
        for name in ("nsa_core", "nsa_jax", "nsa_torch")
    )


# What a project does with the library, and which of the commands it can look at.
USES = {
    "base": ENVIRONMENTS["base"].program.partition("refused")[0],
    "torch": """
import pathlib
import nsa_bench.harness.command, nsa_bench.harness.process, nsa_bench.harness.records
import nsa_interop.build
import torch, nsa_torch, nsa_interop.weights
layer = nsa_torch.NSAAttention(16, 2, 1, 8, 8)
layer(torch.ones(1, 40, 16))[0].sum().backward()
assert nsa_interop.build.kernels_of
here = pathlib.Path.cwd() / "bench"  # what commands write does not go into the package
assert nsa_bench.harness.records.folder_of("a GPU") == here / "records" / "a-gpu"
assert nsa_bench.harness.command.folder(None).parent == here / "results"
assert nsa_bench.harness.process.module("bench.train") == "nsa_bench.train"
""",
}


@pytest.mark.parametrize(("uses", "first"), [("base", True), ("base", False), ("torch", True)])
def test_a_project_with_packages_called_as_ours(installed, tmp_path, uses, first):
    """It imports its own and runs the installed library, wherever on the path it is."""
    code = beside(project(tmp_path), first, USES[uses] + HOME.format(installed=str(installed)))
    # No site: its .pth files would bring the checkout.
    paths = [str(installed), *(x for x in sys.path if x.endswith("site-packages"))]
    head = f"import sys\nsys.path += {paths}\n"
    done = spawned.python("-I", "-S", "-c", head + code, folder=tmp_path)
    assert done.returncode == 0, done.stderr

"""The tests that other versions of Python, torch, JAX and transformers can break, each set in an
environment of its own.

    python -m tests.versions                  # oldest, pinned and newest
    python -m tests.versions newest --keep    # with what is installed there already
    python -m tests.versions --save_records   # and keeps what it found (docs/versions.md)

    oldest        Python 3.12, and of each package the lowest version that pyproject.toml allows
    pinned        the environment that runs this: `make setup` installs constraints.txt
    newest        Python 3.13, else 3.12, and the newest versions that it allows
    pre-release   the same, above the ceilings and with what is not released yet (`pip --pre`)

An environment lies under build/versions. The exit status is 1 if a test failed; failures of
`pre-release` are only reported.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bench import doc_tables
from bench.harness import records
from bench.reports import render
from tests.tables import table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
TABLE = table("versions")
NAMES = tuple(TABLE["pythons"])
KEPT = records.FOLDER / "cpu" / doc_tables.VERSIONS
EXTRAS = "test", "compiler", "hf"  # of a package that two name the bound of the last one counts


def requirements(name: str) -> list[str]:
    """What pip installs for an environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][extra] for extra in EXTRAS]
    lines = {Requirement(x).name: x for x in itertools.chain(project["dependencies"], *extras)}
    if name == "oldest":
        return [lowest(Requirement(line)) for line in lines.values()]
    if name == "pre-release":  # above every ceiling
        return [without_ceiling(Requirement(line)) for line in lines.values()]
    return list(lines.values())


def without_ceiling(requirement: Requirement) -> str:
    bounds = [x for x in requirement.specifier if x.operator != "<"]
    requirement.specifier = SpecifierSet(",".join(map(str, bounds)))
    return str(requirement)


def lowest(requirement: Requirement) -> str:
    """The same at its lower bound; parts of CUDA stay at what they allow together."""
    bounds = [x.version for x in requirement.specifier if x.operator == ">="]
    if requirement.name.startswith("nvidia-") or not bounds:
        return str(requirement)
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def python_of(name: str) -> str:
    """
    Raises:
      SystemExit: there is none.
    """
    for version in TABLE["pythons"][name]:
        if found := shutil.which(f"python{version}"):
            done = subprocess.run([found, "-c", ""], capture_output=True)
            if done.returncode == 0:
                return found
    sys.exit(f"{name} needs Python {' or '.join(TABLE['pythons'][name])} on PATH")


def install(name: str) -> Path:
    """A new environment; its Python."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python_of(name), "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    before = ["--pre", "--upgrade"] if name == "pre-release" else ["--only-binary", ":all:"]
    subprocess.run([*pip, *before, *requirements(name), "setuptools"], check=True)
    return python


def run(name: str, keep: bool) -> dict[str, Any]:
    """Installs, tests, and says what was found."""
    begin = time.monotonic()
    python = FOLDER / name / "bin" / "python"
    if name == "pinned":
        python = Path(sys.executable)
    elif not keep or not python.exists():
        python = install(name)
    installed = time.monotonic()
    report = FOLDER / f"{name}.xml"
    tests = [f"tests/{x}" for x in TABLE["tests"]]
    options = ["-m", "not gpu", "-n", "2", "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-q", *options, f"--junit-xml={report}", *tests]
    status = subprocess.run(command, cwd=ROOT).returncode
    return {
        "name": name,
        "commit": records.environment()["commit"],
        "exit": status,
        "install_minutes": round((installed - begin) / 60, 1),
        "test_minutes": round((time.monotonic() - installed) / 60, 1),
        "versions": versions(python),
        **outcomes(report),
    }


def versions(python: Path) -> dict[str, str]:
    """Of Python and of the packages that matter."""
    program = (
        "import json, platform, importlib.metadata as m\n"
        "there = {x.name.lower().replace('_', '-'): x.version for x in m.distributions()}\n"
        f"found = {{x: there[x] for x in {TABLE['shown']} if x in there}}\n"
        "print(json.dumps({'Python': platform.python_version()} | found))"
    )
    done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def outcomes(report: Path) -> dict[str, Any]:
    """How many passed, which failed, and why the others were skipped."""
    passed, failed, skipped = 0, [], {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message") or ""
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", default=["oldest", "pinned", "newest"])
    parser.add_argument("--keep", action="store_true", help="what is installed stays")
    parser.add_argument("--save_records", action="store_true", help=f"in {KEPT.name}")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"environments must be among {', '.join(NAMES)}, got {', '.join(unknown)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = []
    for name in options.names:
        found.append(run(name, options.keep))
        if options.save_records:
            records.append(KEPT, [records.record("versions", **found[-1])])
    print(render.filled("versions.md.jinja", found=found))
    return int(any(each["exit"] for each in found if each["name"] != "pre-release"))


if __name__ == "__main__":
    sys.exit(main())

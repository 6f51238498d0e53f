"""Computes the cost of a run in the cloud: an upper bound before the run, and the used share of the
bound after the run.

    python cloud/cost.py cloud/sky/l4.yaml                     # before
    python cloud/cost.py cloud/sky/l4.yaml artifacts/<commit>  # after

Before the run, the cost is the hourly limit of all nodes times the maximum time of setup, run and
idle machine before `autostop`. After the run, the cost is the hourly limit times the time of the
run itself. `sky cost-report` shows the charged cost. The Modal app (`modal_app.py`) prints both
costs without this command.
"""

import json
import re
import sys
from pathlib import Path

import yaml

# minutes that are assumed for the start of the machine and the installation
SETUP_MINUTES = 15.0
# For each value of GPU, Modal's name of the GPU and its price in dollars per hour on 2026-05-07.
# modal.com/pricing has the current prices. The "!" states that Modal must not provide a newer GPU
# instead.
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
    """Return the maximum minutes of setup, run and idle machine of a SkyPilot task. Without
    `autostop` the machine continues to run after the task.
    """
    (limit,) = re.findall(r"timeout [^\n]*?(\d+)m ", task["run"])
    idle = task["resources"].get("autostop", {}).get("idle_minutes", 0)
    return SETUP_MINUTES + float(limit) + idle


def hourly_limit(task: dict) -> float | None:
    """Return the maximum dollars per hour of all nodes of a task, or None if the task has no
    limit. The task file has the resources of one node.
    """
    limit = task["resources"].get("max_hourly_cost")
    return None if limit is None else limit * task.get("num_nodes", 1)


def estimate(task: dict) -> str:
    """Return the line that is printed before a run and states the cost."""
    hourly = hourly_limit(task)
    if hourly is None:
        return "no maximum cost is known, since the task runs on your cluster"
    minutes = task_minutes(task)
    cost = f"${dollars(hourly, minutes):.2f}"
    if "autostop" in task["resources"]:
        return f"the run costs at most {cost}: {minutes:.0f} minutes at ${hourly:.2f} per hour"
    return (
        f"a run of {minutes:.0f} minutes costs at most {cost}; the cloud never ends the machine "
        f"automatically, and the machine costs up to ${hourly:.2f} per hour until `sky down`"
    )


def used(hourly: float, seconds: float) -> str:
    """Return the line that is printed after a run and states the cost."""
    return (
        f"the run took {seconds:.0f} s and costs at most ${dollars(hourly, seconds / 60):.2f} at "
        f"${hourly:.2f} per hour"
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
        print(f"{used(hourly, summary['seconds'])}; `sky cost-report` shows the charged cost")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

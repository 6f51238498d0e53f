"""Prints which implementation each step uses for each preset and framework, as `explain` reports.

python -m bench.routing              # print it
python -m bench.routing --out DIR    # and store it in DIR/routing.json
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app

from nsa_core import config_files

from .harness import cli, problems, records
from .harness.jobs import label
from .harness.runners import RUNNERS, asked

SCHEMA = 1
# Not in flags.FLAGS until this is the main program, since other commands use the same names.
FLAGS = cli.define(
    out=(str, "Folder for routing.json. The folder must not have this file yet."),
)


def presets() -> list[str]:
    """Return the names of the problems in configs/."""
    return sorted(
        path.stem for path in config_files.FOLDER.glob("*.yaml") if path.stem != "base"
    )


def plans(runners) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the `Choices` of each preset and framework, and their entries in `routing.json`."""
    for preset in presets():
        settings = problems.settings(preset)
        for runner in runners:
            wanted = asked(settings, runner)
            chosen = runner.registry.choices(wanted)
            steps = {
                choice.step: {
                    "implementation": choice.implementation,
                    "refused": dict(choice.refused),
                }
                for choice in chosen
            }
            sizes = wanted._asdict() | {"config": wanted.config.as_dict()}
            del sizes["step"], sizes["strided"]
            yield chosen, {"preset": preset, **sizes, "steps": steps}


def main(argv: Sequence[str]) -> int:
    path = Path(FLAGS.out) / "routing.json" if FLAGS.out else None
    if path is not None and path.exists():
        raise app.UsageError(f"--out must name a folder without routing.json, {path} exists")
    runners = [runner() for runner in RUNNERS.values()]
    found = []
    for chosen, about in plans(runners):
        print(f"{about['preset']} {about['framework']}: {label(chosen)}")
        print("\n".join(f"  {choice}" for choice in chosen))
        found.append(about)
    if path is not None:
        environment = records.environment(FLAGS.commit)
        text = json.dumps({"schema": SCHEMA, **environment, "plans": found}, indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS)

"""Prints the text of a pull request that proposes thresholds, with the tables of the measurements.

    python cloud/pull_request.py artifacts thresholds.txt https://.../runs/1 > body.md

`thresholds.txt` has the output of `bench.tune_thresholds`.
"""

import sys
from pathlib import Path

MOST = 60_000  # maximum number of characters; GitHub's limit is 65536
TABLES = ("seed_report.md", "compare.md")


def body(artifacts: Path, thresholds: str, run: str) -> str:
    """Return the text of the pull request in Markdown. Tables that do not fit are left out, and
    the text names them."""
    parts = [f"Measured by {run}", "## Thresholds", f"```\n{thresholds.strip()}\n```"]
    size, left_out = sum(map(len, parts)), []
    for path in sorted(x for name in TABLES for x in artifacts.rglob(name)):
        title = str(path.relative_to(artifacts))
        text = f"<details><summary>{title}</summary>\n\n{path.read_text()}\n</details>"
        if size + len(text) > MOST:
            left_out.append(title)
            continue
        parts.append(text)
        size += len(text)
    if left_out:
        parts.append(
            "These tables are too long for this text, but are among the artifacts: "
            f"{', '.join(left_out)}"
        )
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    if len(argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    print(body(Path(argv[1]), Path(argv[2]).read_text(), argv[3]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

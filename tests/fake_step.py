"""A step for `test_oneshot.py` and `test_turns.py`: `python -m tests.fake_step <what> [<path>]`."""

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import turns


def main(what: str, path: str = "") -> int:
    print(f"fake step: {what}")
    match what:
        case "ok":
            return int(sys.dont_write_bytecode)  # then the next step compiles it again
        case "fail":
            print("the last words of the log")
            return 3
        case "records":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("{}\n")
            return 0
        case "turn":  # `path` is the file that all children add a line to
            turns.wait()
            for word in ("begins", "ends"):
                with Path(path).open("a") as file:
                    print(os.getpid(), word, file=file)
                time.sleep(0.05)
            print("timed")
            return 0
        case "hang":  # with a child of its own, whose number is written to `path`
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            Path(path).write_text(str(child.pid))
            time.sleep(300)
    raise ValueError(f"unknown {what!r}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

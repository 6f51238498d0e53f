"""Reads the sources of a report: records, training logs, and the files of their devices."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from nsa_core import policy

from ..harness import records
from ..harness.records import Record, Values
from ..lm import log, watch


@dataclasses.dataclass
class Report:
    """The records that were read, and the files of their devices."""

    title: str
    files: list[str]
    rows: list[tuple[str, Record]]  # each with its location, <file>:<line>
    training: list[tuple[str, list[log.Line]]]
    devices: list[policy.Device]

    @property
    def records(self) -> list[Record]:
        return [record for _, record in self.rows]

    @property
    def training_lines(self) -> list[log.Line]:
        return [line for _, lines in self.training for line in lines]

    @property
    def environments(self) -> list[Values]:
        """The environments of the runs. Each environment has the device, commit, versions, number
        of rows, first and last time.
        """
        found: dict[str, Values] = {}
        for record in self.records:
            about = {
                "device": record.device,
                "commit": (record.commit or "unknown")[:12]
                + (" with local changes" if record.dirty else ""),
                **{name: value or "-" for name, value in record.versions.items()},
            }
            here = found.setdefault(
                json.dumps(about), about | {"rows": 0, "from": "", "to": ""}
            )
            here["rows"] += 1
            here["from"] = min(filter(None, (here["from"], record.time)), default="")
            here["to"] = max(here["to"], record.time)
        return list(found.values())


def read(paths: Iterable[str | Path], title: str | None = None) -> Report:
    """Return all records of the files, and the files of their devices. Heartbeats are read
    together with the lines of their run. Files of heartbeats among `paths` are skipped.

    Raises:
      ValueError: A line is damaged, a file has no records, or there are no records in any file. The
        error message names the file.
    """
    rows: list[tuple[str, Record]] = []
    training: list[tuple[str, list[log.Line]]] = []
    files = [str(path) for path in paths if not Path(path).match(watch.HEARTBEATS)]
    for path in files:
        first = next(iter(records.read_lines(path)), None)
        if first is None:
            raise ValueError(f"{path} has no records")
        if isinstance(first[1], dict) and "kind" in first[1]:
            training.append((path, log.read(path)))
        else:
            rows += records.placed(path)
    if not files:
        raise ValueError("no records were found; pass the files that have them")
    names = sorted({record.device for _, record in rows})
    devices = [found for found in map(policy.of, names) if found]
    title = title or f"Native Sparse Attention on {', '.join(names) or 'no device'}"
    return Report(title, files, rows, training, devices)

"""Reads and writes checkpoints. A checkpoint is a folder `step-<steps done>`. A checkpoint folder
is complete or does not exist. The last two checkpoints of a run are stored.

A folder has the weights and AdamW's moments in the files `weights`, `mean` and `square` of
`nsa_interop.weights`. A run can continue from these files in the other framework, with another
layout and with any number of processes. `progress.json` has the number of steps done (the position
in the data), the settings that must not change, and the checksum of every file.
"""

import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from nsa_interop import weights

from .learner import Learner
from .ranks import Ranks

PROGRESS = "progress.json"
KEPT = 2  # the previous checkpoint is used if the last one is damaged


class DamagedError(ValueError):
    """A checkpoint has changed since it was written, or is incomplete."""


def found(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`. The checkpoint with the most steps is first."""
    steps = lambda path: int(path.name.removeprefix("step-"))
    return sorted(folder.glob("step-*"), key=steps, reverse=True)


def latest(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps in `folder`, or None."""
    return next(iter(found(folder)), None)


def save(
    folder: Path, learner: Learner, step: int, settings: dict[str, Any], ranks: Ranks = Ranks()
) -> Path:
    """Write the checkpoint of `step` into `folder`. Then remove all checkpoints except the new one
    and the previous one.

    Every rank must call this function. Rank 0 writes the files. The function returns on all ranks,
    or raises an error on all ranks.

    Raises:
      ValueError: A weight or moment is not finite. Existing checkpoints are unchanged.
      OSError: Rank 0 could not write, for example to a full disk. Existing checkpoints are
        unchanged.
    """
    target = folder / f"step-{step:06d}"
    if ranks.first(target.exists()):
        return target
    scratch, sums = folder / f".{target.name}.{uuid.uuid4().hex}", dict[str, str]()
    try:
        for name, module in learner.whole():
            path = scratch / f"{name}.safetensors"
            sums[path.name] = _on_first(ranks, _write, path, module)
        progress = {"step": step, "settings": settings, "files": sums}
        _on_first(ranks, _publish, scratch, target, progress)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write(path: Path, module: weights.Module) -> str:
    """Write the file at `path`, and return its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights.save(path, module)
    with safetensors.safe_open(path, framework="np") as file:
        for name in file.keys():
            if not np.isfinite(file.get_tensor(name)).all():
                raise ValueError(
                    f"{path.stem} of {name} must be finite; no checkpoint was written"
                )
    return _checksum(path)


def _publish(scratch: Path, target: Path, progress: dict[str, Any]) -> None:
    folder = target.parent
    (scratch / PROGRESS).write_text(json.dumps(progress, indent=1))
    _sync(scratch / PROGRESS)
    _sync(scratch)
    os.replace(scratch, target)
    _sync(folder)
    # Also remove unfinished folders of processes that were killed.
    for path in [*found(folder)[KEPT:], *folder.glob(".step-*")]:
        shutil.rmtree(path)


def load_last(
    folder: Path, learner: Learner, settings: dict[str, Any], ranks: Ranks = Ranks()
) -> int:
    """Read the last checkpoint in `folder` that is not damaged, and return its number of steps. A
    damaged checkpoint is reported on stderr. Rank 0 checks the checkpoints, and all ranks read the
    same checkpoint.

    Raises:
      ValueError: All checkpoints are damaged, or a setting differs.
    """
    path = folder / _on_first(ranks, _newest, folder, settings)
    step = check_settings(path, settings)["step"]
    learner.load(path, step)
    return step


def _newest(folder: Path, settings: dict[str, Any]) -> str:
    """Return the name of the last checkpoint that is not damaged."""
    told = []
    for path in found(folder):
        try:
            check(path, settings)
        except DamagedError as error:
            told.append(str(error))
            print(f"warning: {error}; the previous checkpoint is tried next", file=sys.stderr)
            continue
        if told:
            print(f"warning: the run is continuing from {path}", file=sys.stderr)
        return path.name
    raise ValueError(f"no checkpoint in {folder} is complete: {'; '.join(told)}")


def check(path: Path, settings: dict[str, Any]) -> None:
    """Check the checkpoint at `path`.

    Raises:
      DamagedError: A file is missing, or has changed.
      ValueError: The checkpoint was written under other settings. The error message names the
        first setting that differs.
    """
    for name, expected in check_settings(path, settings)["files"].items():
        if not (path / name).is_file():
            raise DamagedError(f"{path}: {name} is missing")
        if _checksum(path / name) != expected:
            raise DamagedError(f"{path}: {name} is damaged, since its checksum has changed")


def check_settings(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Check a checkpoint as the function `check` does, but not its files of tensors. Return the
    contents of `progress.json`.
    """
    try:
        progress = json.loads((path / PROGRESS).read_text())
        written, _ = progress["settings"], progress["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path}: {PROGRESS} is damaged: {error}") from None
    for name in sorted(settings.keys() | written.keys()):
        ours, theirs = settings.get(name), written.get(name)
        if ours != theirs:
            raise ValueError(
                f"{path}: {name} must be {theirs!r} as in the checkpoint, got {ours!r}"
            )
    return progress


def _on_first(ranks: Ranks, do: Callable[..., Any], *given: Any) -> Any:
    """Call `do(*given)` on rank 0, and return its result on all ranks. An `OSError` or `ValueError`
    of `do` is raised on all ranks."""
    found = fault = None
    if ranks.rank == 0:
        try:
            found = do(*given)
        except (OSError, ValueError) as error:
            if ranks.size == 1:
                raise
            fault = [isinstance(error, OSError), f"rank 0: {error}"]
    found, fault = ranks.first([found, fault])
    if fault is not None:
        raise (OSError if fault[0] else ValueError)(fault[1])
    return found


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

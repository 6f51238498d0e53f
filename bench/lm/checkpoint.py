"""Checkpoints: folders `step-<steps done>`, each whole or not there.

A folder holds `weights`, `mean` and `square` (AdamW's moments) as `interop.weights` writes
them, so that a run may go on in the other framework, and `progress.json`: the steps done, which
are the position in the data too, and what must not change from then on.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

PROGRESS = "progress.json"


class Kept(Protocol):
    """What a checkpoint is made of (`jax_lm.Learner`, `torch_lm.Learner`)."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, step: int) -> None: ...


def latest(folder: Path) -> Path | None:
    """The checkpoint with the most steps in `folder`, if there is one."""
    found = folder.glob("step-*")
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(folder: Path, learner: Kept, step: int, settings: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step` into `folder`, then removes the ones before it.

    Raises:
      ValueError: a weight or moment is not finite; the checkpoints that there are stay.
    """
    target = folder / f"step-{step:06d}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{target.name}.{uuid.uuid4().hex}"
    scratch.mkdir()
    try:
        learner.save(scratch)
        for path in scratch.glob("*.safetensors"):
            _check_finite(path)
        progress = {"step": step, "settings": settings}
        (scratch / PROGRESS).write_text(json.dumps(progress, indent=1))
        _sync(scratch / PROGRESS)
        _sync(scratch)
        os.replace(scratch, target)
        _sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for path in folder.glob("step-*"):
        if path != target:
            shutil.rmtree(path)
    return target


def load(path: Path, learner: Kept, settings: dict[str, Any]) -> int:
    """Reads the checkpoint at `path` into `learner`; the steps done.

    Raises:
      ValueError: it was written under other settings; the message names the first that differs.
    """
    progress = json.loads((path / PROGRESS).read_text())
    written = progress["settings"]
    for name in sorted(settings.keys() | written.keys()):
        ours, theirs = settings.get(name), written.get(name)
        if ours != theirs:
            raise ValueError(f"{path}: {name} must be {theirs!r} as it was, got {ours!r}")
    learner.load(path, progress["step"])
    return progress["step"]


def _check_finite(path: Path) -> None:
    with safetensors.safe_open(path, framework="np") as file:
        for name in file.keys():
            if not np.isfinite(file.get_tensor(name)).all():
                raise ValueError(f"{path.stem} of {name} must be finite; no checkpoint written")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

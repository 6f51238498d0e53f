"""How far it is from a public call to a launch, and through which packages."""

import sys
from pathlib import Path

import pytest
import torch

import nsa_torch
from nsa_torch import batch_tables
from tests.inputs import SMALL
from tests.stand_in_kernels import stand_in, stand_ins

ROOT, TORCH = Path(nsa_torch.__file__).parents[1], Path(torch.__file__).parent
PACKAGES = ["nsa_torch", "interop", "nsa_jax", "nsa_core", "kernels_pallas"]  # from the top
DEEPEST = 8  # frames to the launch of a kernel, which calls the driver; torch's do not count


def package(frame):
    """Of the library, or None."""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else None
    return name if name in PACKAGES else None


class Walk:
    """Within: which functions call which, across packages, and how deep launches are."""

    def __init__(self):
        self.depths, self.packages, self.climbs = [], set(), set()

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event == "call" and (callee := package(frame)):
            self.packages.add(callee)
            caller = package(frame.f_back)
            if caller and PACKAGES.index(caller) > PACKAGES.index(callee):
                self.climbs.add(f"{caller} -> {Path(frame.f_code.co_filename).name}")

    def launched(self, kernel, *tensors):
        """A kernel in whose place nothing runs."""
        frame, depth = sys._getframe(1), 0  # of what stands for the launch of a kernel
        while frame.f_code is not a_call.__code__:
            depth += TORCH not in Path(frame.f_code.co_filename).parents
            frame = frame.f_back
        self.depths.append(depth)
        return stand_in(kernel, *tensors)


def a_call(gradients):
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16).requires_grad_(gradients)
    given = make(1, 40, 4, 16), make(1, 40, 2, 16), make(1, 40, 2, 16), make(1, 40, 4, 3)
    out = nsa_torch.attention(*given, config=SMALL, implementation="mosaic")
    if gradients:
        torch.autograd.grad(out, given, out)


@pytest.mark.parametrize("gradients", [False, True])
def test_from_a_call_to_a_launch(gradients, monkeypatch):
    """The first call of a signature and its gradient are as deep as later ones. These call up for
    nothing but what torch computes.
    """
    walk = Walk()
    with stand_ins(monkeypatch, walk.launched):
        for _ in range(2):
            walk.climbs.clear()
            with walk:
                a_call(gradients)
    assert len(walk.depths) > 10 and max(walk.depths) <= DEEPEST
    assert walk.packages == {"nsa_torch", "nsa_core", "kernels_pallas"}
    assert walk.climbs == {"nsa_core -> torch_ops.py"}


@pytest.mark.parametrize(
    ("gradients", "packed", "most"),
    [(False, None, 20), (True, None, 20), (False, "varlen", 24), (False, "cu_seqlens", 60)],
)
def test_a_known_call_takes_few_frames(gradients, packed, most, monkeypatch):
    """Calls of Python functions of the library, and files that they are in. Of borders alone the
    tables are made in each call, by kernels in whose place nothing runs.
    """
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16).requires_grad_(gradients)
    given = make(1, 40, 4, 16), make(1, 40, 2, 16), make(1, 40, 2, 16), make(1, 40, 4, 3)
    options = {"config": SMALL, "implementation": "mosaic"}
    if packed:
        borders = torch.tensor([0, 17, 40], dtype=torch.int32)
        meta = nsa_torch.varlen_metadata(borders, total=40, config=SMALL)
        options[packed] = meta if packed == "varlen" else borders
    if packed == "cu_seqlens":
        pytest.importorskip("triton")
        made = batch_tables.PlanTables
        by_kernels = lambda *given: made(*given[:-1], True)
        monkeypatch.setattr(batch_tables, "_plan_tables", by_kernels)
        monkeypatch.setattr("nsa_torch.triton_ops.run", lambda *_, **options: None)
    found = []

    def note(frame, event, _):
        # What stands for the launch of a kernel calls the library too.
        stand = "tests" in Path(frame.f_back.f_code.co_filename).parts and found
        if event == "call" and package(frame) and not stand:
            found.append(frame.f_code.co_filename)

    def frames(function):
        found.clear()
        sys.setprofile(note)
        try:
            result = function()
        finally:
            sys.setprofile(None)
        return result, len(found), len(set(found))

    with stand_ins(monkeypatch):
        for _ in range(2):
            out, forward, files = frames(lambda: nsa_torch.attention(*given, **options))
            if gradients:
                grads = lambda out=out: torch.autograd.grad(out, given, torch.ones_like(out))
                _, backward, _ = frames(grads)
    assert forward <= most and files <= (14 if packed == "cu_seqlens" else 10)
    if gradients:
        assert backward <= 30

"""List kernels on NumPy, and one warp by itself.

`emulated` runs a kernel's program for all its warps; `Warp` is a single one, with words of 32
lanes.
"""

import dataclasses

import numpy as np

from kernels_pallas.kernel import Kernel
from tests.emulated_warps import GARBAGE, LANES, Warps  # noqa: F401


def interpreted(spec):
    """`spec`, of a kernel that is emulated."""
    return dataclasses.replace(spec, interpret=True)


def emulated(describe, spec, *arrays):
    """The outputs of the kernel `describe(spec)`, built anew: sizes may be patched."""
    kernel: Kernel = describe.__wrapped__(spec)
    return kernel(*arrays)


def lanes(x):
    return np.broadcast_to(x if isinstance(x, np.ndarray) else np.int32(x), (32,))


class Warp(Warps):
    """A single warp: words are arrays of 32 lanes."""

    def __init__(self, bytes_: int):
        self.shape = (32,)
        self.active = np.ones(1, bool)
        self.cta = np.zeros(1, np.int32)
        self.memory = np.full((1, bytes_ // 4), GARBAGE, np.int32)
        self.number_of_warp = 0

    def warp(self):
        return lanes(self.number_of_warp)

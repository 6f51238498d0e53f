"""List kernels on NumPy: a kernel's program for all its warps."""

import dataclasses

from kernels_pallas.kernel import Kernel


def interpreted(spec):
    """`spec`, of a kernel that is emulated."""
    return dataclasses.replace(spec, interpret=True)


def emulated(describe, spec, *arrays):
    """The outputs of the kernel `describe(spec)`, built anew: sizes may be patched."""
    kernel: Kernel = describe.__wrapped__(spec)
    return kernel(*arrays)

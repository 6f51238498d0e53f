"""Triton kernels compiled for GPUs that are not here: registers, spills, shared memory.

Each kernel for one architecture or two, each architecture and each shape several times.
"""

import dataclasses
from functools import partial

import pytest

from kernels_pallas.triton.tiling import smem_of
from nsa_core.index import Index
from tests import triton_compile as compiled
from tests.interpreted_triton import INTERPRETED, TRITON
from tests.problems import of_kind
from tests.tables import table

pytestmark = [
    pytest.mark.skipif(not TRITON, reason="triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="compiles"),
]

SHAPES = of_kind("chip triton")
M3 = Index(128, 16, 0, 1, None, None, 1)
QSA = Index(1, 512, 0, 0, "relu", "sum", 4)
# Functions of a capability.
CASES = {name: partial(compiled.launches, x, False) for name, x in SHAPES.items()} | {
    "decode": partial(compiled.decode, 8, 1, 64, 4, 128, 128, 1024, False),
    "verify": partial(compiled.decode, 8, 8, 32, 2, 192, 128, 64, False),
    "decode fp8": partial(compiled.decode, 8, 1, 64, 4, 128, 128, 1024, True),
    "pages": compiled.paged_lists,
    "m3 pages": partial(compiled.paged_index, M3, (9, 0)),
    "qsa pages": partial(compiled.paged_index, QSA, (8, 0)),
    "m3": partial(compiled.index, 32768, 32768, M3, "bfloat16"),
    "loss": compiled.index_loss,
    "qsa": partial(compiled.index, 32768, 8192, QSA, "bfloat16"),
    "index32": partial(compiled.index, 4096, 4096, M3, "float32"),
}
PACKED = [partial(compiled.launches, x, True) for x in SHAPES.values()]
COMPILED = [
    (shape, arch, name)
    for shape, names in table("test_triton_compiled").items()
    for name, archs in names.items()
    for arch in archs
]
# Bytes that a thread may keep in local memory: registers of loops with masks.
SPILLS = 128


def test_kernels_compile_within_the_limits_of_an_architecture():
    found = compiled.reports([(CASES[shape], arch, name) for shape, arch, name in COMPILED])
    for (shape, arch, name), report in zip(COMPILED, found, strict=True):
        about = f"{shape} on {arch}: {report}"
        assert report.name == name.split()[0] and report.capability == arch, about
        assert report.shared <= smem_of(divmod(arch, 10)), about
        assert report.registers <= 255 and report.spills <= SPILLS, about
        products = not name.startswith(
            ("combine", "dkv:merge", "selected:tile", "paged_append", "paged_gather", "split")
        ) and name.removeprefix("paged_blocks:") not in ("merge", "best", "digits", "chosen")
        assert report.tensor_cores == (products and "32" not in shape), about


def test_long_float32_sums_are_compensated():
    """Products in float32 are one multiply-add after the other: none goes into a sum over queries.

    Of the interpreter's products NumPy makes the sums, so that it cannot tell.
    """
    found = {}
    for shape in ("float32", "G6"):
        for launch in CASES[shape]((9, 0)):
            name = launch.kernel.name
            if name in ("of_blocks", "of_intervals"):
                found[shape, name] = compiled.running_sums(launch, 90)
    for name in ("of_blocks", "of_intervals"):
        # dk and dv in three loops; tensor cores add in higher precision than 16 bits hold.
        assert (found["float32", name], found["G6", name]) == (0, 6)


def test_nothing_that_a_length_changes_is_compiled_in():
    """Another length and batch have the same kernels, but for what they are launched with."""
    for shape in SHAPES.values():
        longer = dataclasses.replace(shape, T=shape.T + 37, S=shape.S + 101, B=3)
        both = (compiled.launches(x, False, (8, 0)) for x in (shape, longer))
        for one, other in zip(*both, strict=True):
            assert one.kernel.constants == other.kernel.constants
            assert one.dtypes == other.dtypes

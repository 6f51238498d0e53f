"""`MosaicGpuCompile` of JAX's CUDA plugin: bytecode in, a function and its launcher out."""

import ctypes
import importlib

import pytest

from kernels_pallas.runtime import build, plugin
from tests.canaries import canary
from tests.runtime_kernels import Copy, copy

MEND = "kernels_pallas/runtime/plugin.py"
NAME = next((x for x in plugin.PLUGINS if plugin._found(x)), None)
pytestmark = pytest.mark.skipif(NAME is None, reason="JAX's CUDA plugin is not installed")
PACKAGE = "" if NAME is None else f"jax-{NAME.rpartition('_')[2]}-plugin"


def test_the_library_has_the_compiler():
    with canary(PACKAGE, "keeps its compiler of Mosaic kernels elsewhere", MEND):
        path = importlib.import_module(NAME)._get_library_path()
        assert ctypes.CDLL(str(path)).MosaicGpuCompile


def test_a_kernel_is_compiled_and_launched_as_its_description_says():
    """In a process whose driver is the recorder."""
    mend = f"{MEND} and build_child.py"
    with canary(PACKAGE, "compiles or launches a Mosaic kernel in another way", mend):
        ((_, built),) = build.build([copy(Copy(2, 64, any_length=True))], jobs=1)
        if isinstance(built, RuntimeError):
            raise built
        assert built.image.startswith(b"\x7fELF"), "its image is no cubin"
        assert built.cubin.parameters and built.cubin.registers

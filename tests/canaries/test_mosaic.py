"""JAX's Mosaic: a kernel becomes one call whose payload the plugin compiles, and ours make arrays
of registers and read those of others.
"""

import ctypes
import importlib

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.mosaic.operands import PARAMS
from kernels_pallas.runtime import build, lowering
from tests.canaries import canary, said
from tests.runtime_kernels import Copy, copy

LOWERING, PLUGIN = (f"kernels_pallas/runtime/{x}.py" for x in ("lowering", "build_child"))
REGISTERS = "kernels_pallas/mosaic/operands.py, wgmma.py and scores.py"
NAME = next((x for x in build.PLUGINS if build.has_plugin(x)), None)
needs_plugin = pytest.mark.skipif(NAME is None, reason="JAX's CUDA plugin is not installed")
PACKAGE = "" if NAME is None else f"jax-{NAME.rpartition('_')[2]}-plugin"
LAYOUT = plgpu.Layout.WGMMA
TILE = Array((64, 32), "float32")


def lowered(change) -> bytes:
    """Of the smallest kernel: a tile through registers, changed there."""
    result = plgpu.ShapeDtypeStruct(TILE.shape, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)
    def inner(_, x):
        return change(x)

    def body(x, out):
        out[...] = inner(plgpu.load(x, layout=LAYOUT, optimized=False))

    made = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(TILE.shape, TILE.dtype)],
        grid=(1,),
        grid_names=("x",),
        compiler_params=PARAMS,
    )
    return lowering.lower(Kernel("registers", None, lambda x: made(x), [TILE], [TILE]))


def test_a_kernel_is_one_call_with_a_module():
    with canary("jax", "lowers a kernel to something else than one Mosaic GPU call", LOWERING):
        assert lowered(lambda x: x).startswith(b"ML\xefR"), "its module is no MLIR bytecode"


def test_an_array_is_made_of_registers():
    """As `operands` does where Pallas has no function."""

    def made_anew(x):
        expected = mgpu.WGMMA_LAYOUT.registers_shape(TILE.shape)
        assert x.registers.shape == expected, f"{x.registers.shape} in place of {expected}"
        registers = np.empty_like(x.registers)
        for i in np.ndindex(registers.shape):
            registers[i] = x.registers[i]
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    with canary("jax", "makes no array of the registers of another", REGISTERS):
        lowered(made_anew)


def test_a_product_has_its_registers():
    for kind, names in {
        mgpu.FragmentedArray: ("registers", "layout", "is_signed", "to_layout"),
        mgpu.WGMMAAccumulator: ("value", "zero", "from_registers"),
    }.items():
        there = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
        there |= set(getattr(kind, "__annotations__", ())) | {*getattr(kind, "__slots__", ())}
        gone = [x for x in names if x not in there]
        assert not gone, f"{said('jax')}: {kind.__name__} has no {gone}: mend {REGISTERS}"


@needs_plugin
def test_the_library_has_the_compiler():
    with canary(PACKAGE, "keeps its compiler of Mosaic kernels elsewhere", PLUGIN):
        path = importlib.import_module(NAME)._get_library_path()
        assert ctypes.CDLL(str(path)).MosaicGpuCompile


@needs_plugin
def test_a_kernel_is_compiled_and_launched_as_its_description_says():
    """In a process whose driver is the recorder."""
    with canary(PACKAGE, "compiles or launches a Mosaic kernel in another way", PLUGIN):
        ((_, built),) = build.build([copy(Copy(2, 64, any_length=True))], jobs=1)
        if isinstance(built, RuntimeError):
            raise built
        assert built.image.startswith(b"\x7fELF"), "its image is no cubin"
        assert built.cubin.parameters and built.cubin.registers


def test_what_broke_is_one_sentence():
    unknown = lambda x: mgpu.FragmentedArray(_values=x.registers)
    with pytest.raises(AssertionError) as error:
        with canary("jax", "makes no array of the registers of another", REGISTERS):
            lowered(unknown)
    words = str(error.value)
    assert words.startswith(f"jax {jax.__version__} makes no array of the registers")
    assert "(TypeError: " in words and words.endswith(f"): mend {REGISTERS}")
    assert "\n" not in words

"""Registers of Mosaic's arrays: ours make one from registers, and read those of another."""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.mosaic.operands import PARAMS
from kernels_pallas.runtime import lowering
from tests.canaries import canary, said

MEND = "kernels_pallas/mosaic/operands.py, wgmma.py and scores_qk.py"
LAYOUT = plgpu.Layout.WGMMA
TILE = Array((64, 32), "float32")


def made_anew(x):
    """As `operands` does where Pallas has no function."""
    registers = np.empty_like(x.registers)
    for i in np.ndindex(registers.shape):
        registers[i] = x.registers[i]
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def kernel(change):
    """A tile through registers, changed there."""
    result = plgpu.ShapeDtypeStruct(TILE.shape, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)
    def inner(_, x):
        return change(x)

    def body(x, out):
        out[...] = inner(plgpu.load(x, layout=LAYOUT, optimized=False))

    shape = jax.ShapeDtypeStruct(TILE.shape, TILE.dtype)
    made = plgpu.kernel(
        body, out_type=[shape], grid=(1,), grid_names=("x",), compiler_params=PARAMS
    )
    return Kernel("registers", None, lambda x: made(x), [TILE], [TILE])


def test_an_array_is_made_of_registers():
    with canary("jax", "makes no array of the registers of another", MEND):
        lowering.lower(kernel(made_anew))


def test_layouts_say_how_many_registers_there_are():
    def counted(x):
        expected = mgpu.WGMMA_LAYOUT.registers_shape(TILE.shape)
        assert x.registers.shape == expected, f"{x.registers.shape} in place of {expected}"
        return x

    with canary("jax", "has other registers of a wgmma tile than its layout says", MEND):
        lowering.lower(kernel(counted))


def test_a_product_has_its_registers():
    for kind, names in {
        mgpu.FragmentedArray: ("registers", "layout", "is_signed", "to_layout"),
        mgpu.WGMMAAccumulator: ("value", "zero", "from_registers"),
    }.items():
        there = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
        there |= set(getattr(kind, "__annotations__", ())) | {*getattr(kind, "__slots__", ())}
        gone = [x for x in names if x not in there]
        assert not gone, f"{said('jax')}: {kind.__name__} has no {gone}: mend {MEND}"


def test_what_broke_is_one_sentence():
    def unknown(x):
        return mgpu.FragmentedArray(_values=x.registers)

    with pytest.raises(
        AssertionError, match=r"^jax .* makes no array .*TypeError.*: mend kernels"
    ):
        with canary("jax", "makes no array of the registers of another", MEND):
            lowering.lower(kernel(unknown))

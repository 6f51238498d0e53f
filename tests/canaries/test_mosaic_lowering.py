"""JAX's Mosaic lowering: a kernel becomes one call whose payload the plugin compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.mosaic.operands import PARAMS
from kernels_pallas.runtime import lowering
from tests.canaries import canary

MEND = "kernels_pallas/runtime/lowering.py"
ROW = Array((128,), "float32")


def doubled(kernel):
    """The smallest kernel: it copies a row twice over."""

    def body(x, out):
        out[...] = x[...] * 2

    shape = jax.ShapeDtypeStruct(ROW.shape, ROW.dtype)
    made = plgpu.kernel(
        body, out_type=[shape], grid=(1,), grid_names=("x",), compiler_params=PARAMS
    )
    return lambda x: made(x)


def lowered(text=doubled) -> bytes:
    return lowering.lower(Kernel("doubled", None, text(None), [ROW], [ROW]))


def test_a_kernel_is_one_call_with_a_module():
    with canary("jax", "lowers a kernel to something else than one Mosaic GPU call", MEND):
        assert lowered().startswith(b"ML\xefR"), "its module is no MLIR bytecode"


def test_lowering_starts_no_backend(monkeypatch):
    """Of a GPU it would take most of the memory."""

    def start(*_, **__):
        raise RuntimeError("a backend was asked for")

    monkeypatch.setattr(jax, "devices", start)
    monkeypatch.setattr(jax, "local_devices", start)
    with canary("jax", "asks for a backend in another way while it lowers", MEND):
        lowered()


def test_what_broke_is_one_sentence():
    with pytest.raises(AssertionError) as error:
        with canary("jax", "lowers a kernel to something else than one Mosaic GPU call", MEND):
            lowered(lambda _: lambda x: jnp.sin(x))
    words = str(error.value)
    assert words.startswith(f"jax {jax.__version__} lowers a kernel to something else")
    assert words.endswith(f"): mend {MEND}") and "\n" not in words

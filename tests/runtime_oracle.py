"""What our launcher tells the driver, beside what the plugin's launcher tells it.

Both run against the recorder (`cross_compile.run`), with the same addresses, so that what is
written down must be the same byte for byte: the recorder's tensor maps hold what they are made
of.
"""

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import bound_kernel, build_child, cubin, driver

STREAM = 0x1230


def addresses(count: int) -> list[int]:
    """Others than those that `build_child` tells arguments apart by."""
    return [0x7E00_0000_0000 - (i * i + 1) * 0x1_2345_6700 for i in range(count)]


def plugin(kernel: Kernel) -> dict:
    """What the plugin's launcher does with a kernel of fixed sizes."""
    compiled = build_child.compile_kernel(kernel)
    count = len(kernel.inputs) + len(kernel.outputs)
    return build_child.launch(compiled, addresses(count), STREAM)


def expect(built: cubin.Cubin) -> None:
    """Tells the recorder the parameters of the launches to come."""
    sizes = [len(x) * cubin.MAP_BYTES if isinstance(x, tuple) else 8 for x in built.parameters]
    build_child.expect(sizes)


def ours(built: tuple[cubin.Cubin, bytes], kernel: Kernel) -> dict:
    """What our launcher does with a cubin for the sizes of `kernel`."""
    shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
    function = driver.load(*built, 0)
    bound = bound_kernel.BoundKernel(built[0], function, shapes, kernel.sizes, kernel.grid)
    expect(built[0])
    build_child.recorder().recorder_clear()
    bound.launch(STREAM, addresses(len(shapes)))
    bound.launch(STREAM, addresses(len(shapes)))
    first, second = build_child.recorded("cuLaunchKernelEx")
    assert first == second
    return first


def assert_launched_alike(found: dict, wanted: dict) -> None:
    """All but the handles and the parameters: those of an any-length kernel are its own."""
    own = "function", "parameters"
    assert [found[x] for x in found if x not in own] == [
        wanted[x] for x in wanted if x not in own
    ]


def numbers(launched: dict) -> list[int]:
    """The parameters of a word, smallest first."""
    words = [bytes.fromhex(x) for x in launched["parameters"]]
    return sorted(int.from_bytes(x, "little") for x in words if len(x) == 8)


def maps(launched: dict) -> list[tuple]:
    """The tensor maps of a launch, in an order that does not depend on the parameters', without
    dimensions of size 1: the plugin leaves out the batch where a kernel is compiled for one.
    """
    found = []
    for packed in map(bytes.fromhex, launched["parameters"]):
        for x in build_child.unpacked(packed) if len(packed) > 8 else ():
            dims = zip(x.dims, (2, *x.strides), x.box, x.steps, strict=True)  # of bfloat16
            found.append((x.base, tuple(dim for dim in dims if dim[0] > 1), x.enums))
    return sorted(found)

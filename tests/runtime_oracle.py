"""What our launcher tells the driver, beside what the plugin's launcher tells it.

Both run against the recorder (`cross_compile.run`), with the same addresses, so that what is
written down must be the same byte for byte: the recorder's tensor maps hold what they are made
of.
"""

from collections.abc import Sequence

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import bound_kernel, build_child, cubin, driver
from kernels_pallas.runtime.build_child import Launched, Map

STREAM = 0x1230


def addresses(count: int) -> list[int]:
    """Others than those that `build_child` tells arguments apart by."""
    return [0x7E00_0000_0000 - (i * i + 1) * 0x1_2345_6700 for i in range(count)]


def plugin(kernel: Kernel) -> Launched:
    """What the plugin's launcher does with a kernel of fixed sizes."""
    compiled = build_child.compile_kernel(kernel)
    count = len(kernel.inputs) + len(kernel.outputs)
    return build_child.launch(compiled, addresses(count), STREAM)


def ours(
    built: tuple[cubin.Cubin, bytes], kernel: Kernel, grid: Sequence[int] = ()
) -> Launched:
    """What our launcher does with a cubin for the sizes of `kernel`."""
    shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
    function = driver.load(*built, 0)
    launch = bound_kernel.BoundKernel.of(
        built[0], function, shapes, kernel.sizes, grid or kernel.grid
    )
    build_child.expect([(x.offset, x.bytes) for x in built[0].parameters])
    build_child.recorder().recorder_clear()
    launch.launch(STREAM, addresses(len(shapes)))
    launch.launch(STREAM, addresses(len(shapes)))
    first, second = build_child.launches()
    assert first == second
    return first


def assert_same(found: Launched, wanted: Launched) -> None:
    """All but the handles and what maps do not hold: parameters of an any-length kernel are its
    own.
    """
    assert found.parameters == wanted.parameters, (found, wanted)
    assert_launched_alike(found, wanted)


def assert_launched_alike(found: Launched, wanted: Launched) -> None:
    for name in ("stream", "context", "grid", "block", "shared_bytes", "attributes"):
        assert getattr(found, name) == getattr(wanted, name), (name, found, wanted)


def maps(launched: Launched) -> list[tuple]:
    """The tensor maps of a launch, in an order that does not depend on the parameters', without
    dimensions of size 1: the plugin leaves out the batch where a kernel is compiled for one.
    """
    found = []
    for packed in (x for x in launched.parameters if len(x) % cubin.MAP_BYTES == 0):
        for i in range(0, len(packed), cubin.MAP_BYTES):
            x = Map.unpack(packed[i:])
            first = cubin.ITEM_BYTES["bfloat16"]
            dims = zip(x.dims, (first, *x.strides), x.box, x.steps, strict=True)
            kept = tuple(dim for dim in dims if dim[0] > 1)
            found.append((x.base, kept, x.type, x.interleave, x.swizzle, x.l2, x.oob))
    return sorted(found)

"""What our plan tells the driver, beside what the plugin's launcher tells it.

Both run against the recorder (`cross_compile.run`), with the same addresses, so that what is
written down must be the same byte for byte: the recorder's tensor maps hold what they are made
of.
"""

from collections.abc import Sequence

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import build_child, driver, plan
from kernels_pallas.runtime.build_child import Launched
from kernels_pallas.runtime.cubin import Cubin, TensorMaps

STREAM = 0x1230


def addresses(count: int) -> list[int]:
    """Others than those that `build_child` tells arguments apart by."""
    return [0x7E00_0000_0000 - (i * i + 1) * 0x1_2345_6700 for i in range(count)]


def plugin(kernel: Kernel) -> Launched:
    """What the plugin's launcher does with a kernel of fixed sizes."""
    compiled = build_child.compile_kernel(kernel)
    count = len(kernel.inputs) + len(kernel.outputs)
    return build_child.launch(compiled, addresses(count), STREAM)


def ours(built: tuple[Cubin, bytes], kernel: Kernel, grid: Sequence[int] = ()) -> Launched:
    """What our plan does with a cubin for the sizes of `kernel`."""
    shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
    function = driver.load(*built, 0)
    launch = plan.LaunchPlan.of(built[0], function, shapes, kernel.sizes, grid or kernel.grid)
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


def maps(launched: Launched) -> list[bytes]:
    """The tensor maps of a launch, in an order that does not depend on the parameters'."""
    found = [x for x in launched.parameters if len(x) % 128 == 0]
    return sorted(x[i : i + 128] for x in found for i in range(0, len(x), 128))


def map_count(built: tuple[Cubin, bytes]) -> int:
    values = [x.value for x in built[0].parameters]
    return sum(len(x.maps) for x in values if isinstance(x, TensorMaps))

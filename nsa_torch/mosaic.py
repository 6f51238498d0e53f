"""The implementation `mosaic` in torch, which runs all steps on Mosaic kernels on Hopper GPUs. The
first call of a shape compiles the kernels, and a CUDA graph can capture later calls of this shape.
"""

from kernels_pallas.specs.selected import of_blocks
from kernels_pallas.specs.tile_block_lists import list_arrays
from nsa_core.steps import mosaic_attention
from nsa_core.steps.mosaic_forward import sizes_of
from nsa_core.steps.params import Qkv
from nsa_torch.kernel_path import KernelPath


def _list_shapes(query, key, value, n, block) -> list[tuple[int, ...]]:
    """Return the shapes of the three arrays with the block lists of tiles: `starts`, `members`
    and `counts`."""
    spec = of_blocks(sizes_of(Qkv(query, key, value), None), n, block)
    return [array.shape for array in list_arrays(spec).values()]


def path(name: str, may_gather: bool) -> KernelPath:
    """Return the functions of the implementation `name` on Mosaic kernels."""
    options = {"masks": False, "may_gather": may_gather, "list_shapes": _list_shapes}
    return KernelPath(name, mosaic_attention.STEPS, **options)


PATH = path("mosaic", True)
compressed_attention = PATH.compressed_attention
selected_attention = PATH.selected_attention
sliding_attention = PATH.sliding_attention
select_blocks = PATH.select_blocks
attention = PATH

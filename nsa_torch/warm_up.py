"""Which kernels a call needs, compiled and loaded before it runs: all at once, in parallel.

A kernel serves every length, so what is prepared once for a layer (heads, widths, dtype,
`NSAConfig`) stays, on disk too (`kernels_pallas.runtime.store`). The first call of a layer
prepares itself; `prepare` does it ahead.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kernels_pallas.kernel import LENGTHS, Kernel
from kernels_pallas.mosaic import capability
from nsa_core.config import NSAConfig
from nsa_core.steps import fused, mosaic_attention
from nsa_core.steps.mosaic_attention import Inputs
from nsa_core.types import Branches
from nsa_interop import launch
from nsa_torch import operators
from nsa_torch.call_forms import APART, GIVEN, SHARED, Form
from nsa_torch.kernel_layout import KernelLayout
from nsa_torch.torch_ops import TorchOps, device_name


class Layer(NamedTuple):
    """What kernels depend on besides lengths.

    Attributes:
      form: what the operator of a call takes.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    config: NSAConfig
    scale: float | None
    gradients: bool
    packed: bool
    form: Form = GIVEN


class Recording(TorchOps):
    """Runs no kernel: notes which ones would run, on tensors without memory."""

    def __init__(self, index: int | None):
        self.index, self.kernels = index, {}

    def run(self, kernel, *tensors):
        self.kernels[kernel] = None
        return [
            torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="meta")
            for x in kernel.outputs
        ]

    def device_name(self, x):
        return None if self.index is None else device_name(self.index)


def kernels_of(
    layer: Layer, batch: int, length: int, keys: int, index: int | None
) -> list[Kernel]:
    """The kernels that `nsa_torch.attention` runs for `length` queries and `keys` keys.

    Args:
      index: of the GPU whose measured tiles count; None: of none.
    """
    ops = Recording(index)

    def tensor(*shape, dtype=layer.dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    query = tensor(batch, length, layer.heads, layer.key_width)
    compressed = keys if layer.form.compresses else layer.config.num_compressed(keys)
    key, value = (
        Branches(
            tensor(batch, compressed, layer.kv_heads, width),
            *[tensor(batch, keys, layer.kv_heads, width)] * 2,
        )
        for width in (layer.key_width, layer.value_width)
    )
    gate = tensor(batch, length, layer.heads)
    inputs = Inputs(query, key, value, Branches(gate, gate, gate))
    cu_seqlens = tensor(2, dtype=torch.int32) if layer.packed else None
    place = operators.arguments(layer.config, keys, cu_seqlens, layer.scale)
    layout = KernelLayout(query, *place)
    if layer.form.compresses:
        inputs = fused.with_means(mosaic_attention.STEPS, ops, inputs, layer.config)
        key = inputs.key
    arguments = *layout.rest, layout.num_blocks(key.compressed)
    if not layer.gradients:
        mosaic_attention.forward(ops, inputs, None, *arguments)
        return list(ops.kernels)
    out, residuals = mosaic_attention.forward_with_residuals(ops, inputs, None, *arguments)
    found = mosaic_attention.backward(ops, inputs, residuals, out, *layout.rest)
    if layer.form.compresses:
        rest = keys, layer.config, layer.form.shared
        fused.gradients_of_tokens(mosaic_attention.STEPS, ops, found, *rest)
    return list(ops.kernels)


_prepared: set[tuple] = set()  # layers on a GPU


def before_call(inputs: Inputs, place: Sequence, form: Form, *, gradients: bool) -> None:
    """Compiles and loads what a layer needs, at its first call. Other lengths may need others of
    its kernels: each is loaded when it is launched; where one was never built, all are that the
    call needs.

    Args:
      inputs: of the call.
      place: its `operators.PLACE`.
      form: of its operator.
      gradients: whether a backward pass will follow.
    """
    query, key = inputs.query, inputs.key.selected
    if query.device.type != "cuda" or capability.interpret.get():
        return
    _, _, cu_seqlens, config, scale = place
    batch, length, heads, width = query.shape
    layer = Layer(
        heads,
        key.shape[2],
        width,
        inputs.value.selected.shape[-1],
        query.dtype,
        operators.config_of(*config),
        scale,
        gradients,
        cu_seqlens is not None,
        form,
    )
    sizes = layer, batch, length, key.shape[1], query.get_device()
    if (layer, query.device) in _prepared:
        launch.announce(functools.partial(kernels_of, *sizes))
    elif not torch.cuda.is_current_stream_capturing():
        launch.prepare(kernels_of(*sizes), query.device)
        _prepared.add((layer, query.device))


def prepare(
    *,
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: NSAConfig = NSAConfig(),
    scale: float | None = None,
    gradients: bool = True,
    packed: bool = False,
    lengths: Iterable[int] = LENGTHS,
    device: torch.device | str | int = "cuda",
    jobs: int | None = None,
) -> int:
    """Compiles the kernels of a layer that are not on disk yet, and loads all of them.

    Args:
      heads, kv_heads: query heads, and those of keys and values.
      key_width, value_width: columns of a head; by default those of a value are those of a key.
      gradients: those of the backward pass too.
      packed: for batches with `cu_seqlens`; else for compression by means too, of tokens that
        the branches share and of tokens of their own.
      lengths: tokens. A kernel serves all lengths; which kernels run differs between short and
        long sequences.
      jobs: processes that build what is not on disk; by default one a core.

    Returns:
      How many kernels are ready.

    Raises:
      ValueError: `device` is no GPU.
      NotImplementedError: the GPU is not a Hopper one.
      RuntimeError: a kernel could not be built; its compiler's words.
    """
    device = torch.device(device)
    widths = key_width, key_width if value_width is None else value_width
    sizes = heads, kv_heads, *widths, dtype, config, scale
    index = device.index or 0
    wanted: dict[Kernel, None] = {}
    lengths, form = list(lengths), GIVEN if packed else SHARED
    calls = [(length, each, form) for length in lengths for each in {False, gradients}]
    if gradients and not packed:  # one kernel more, of any length
        calls += [(length, True, APART) for length in lengths[:1]]
    for length, each, form in calls:
        layer = Layer(*sizes, each, packed, form)
        wanted |= dict.fromkeys(kernels_of(layer, 1, length, length, index))
    return launch.prepare(list(wanted), device, jobs)

"""`ArrayOps` for torch tensors. Kernels run on the current stream, and the host never waits for the
device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from nsa_interop.launch import ALIGNMENT, launch
from torch import Tensor

from kernels_pallas.triton.kernel import TritonKernel
from nsa_core.array_ops import ArrayOps
from nsa_torch.plain import plain

FP8 = torch.float8_e4m3fn
INTERPRETED = (8, 0)  # the GPU whose tile sizes Triton's interpreter uses


class TorchOps(ArrayOps):
    xp: Any = torch
    nn: Any = torch

    def run(self, kernel, *tensors):
        tensors = [readable(x) for x in tensors]
        if isinstance(kernel, TritonKernel):
            return launch_triton(kernel, *tensors)
        # The tensor to which a branch is added was always computed here, and no other operation
        # reads it later.
        over = tensors[len(tensors) - kernel.in_place :]
        out = [*over, *[None] * (len(kernel.outputs) - len(over))] if over else ()
        return launch(kernel, *tensors, out=out)

    def run_in_place(self, kernel, *tensors):
        """Run a Triton kernel that writes to its arguments. An argument may be a tuple of tensors.
        All tensors must be contiguous. No tensor is copied.
        """
        for i, x in enumerate(tensors):
            if not all(y.is_contiguous() for y in (x if type(x) is tuple else [x])):
                raise ValueError(f"{kernel.name}: argument {i} must be contiguous")
        launch_triton(kernel, *tensors)

    def capability(self, x):
        return capability_of(x.device.index) if x.device.type == "cuda" else INTERPRETED

    def zeros(self, like, shape):
        return like.new_zeros(shape)

    def copied(self, x, dtype):
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def all_float32(self, arrays):
        if all(x.dtype is torch.float32 and x.is_contiguous() for x in arrays):
            return arrays
        rows = self.float32_rows(arrays, -(-arrays[0].numel() // ALIGNMENT) * ALIGNMENT)
        return [row[: x.numel()].view(x.shape) for row, x in zip(rows, arrays, strict=True)]

    def float32_rows(self, arrays, length):
        together = arrays if isinstance(arrays, torch.Tensor) else _parts_of_one(arrays)
        if together is not None and together.numel() == length * len(arrays):
            return self.copied(together, torch.float32)
        first = arrays[0]
        found = first.new_empty((len(arrays), length), dtype=torch.float32)
        places = found[:, : first.numel()].view(-1, *first.shape)
        if together is not None:
            places.copy_(together)
        else:
            for place, x in zip(places, arrays, strict=True):
                place.copy_(x)
        return found

    def arange(self, like, count):
        return torch.arange(count, dtype=torch.int32, device=like.device)[None]

    def cast(self, x, dtype):
        return x.to(dtype, memory_format=torch.contiguous_format)

    def contiguous(self, x):
        return x.contiguous()

    def take_rows(self, x, index):
        row = torch.arange(x.shape[0], device=x.device)[:, None]
        return x[row, index]

    def searchsorted(self, rows, values, side):
        values = values.to(rows.dtype).contiguous()
        return torch.searchsorted(rows.contiguous(), values, side=side, out_int32=True)

    def sort(self, rows):
        return torch.sort(rows, dim=-1, stable=True)

    def pad_end(self, x, axis, count, value):
        return F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, count), value=value)

    def product(self, subscripts, x, y):
        dtype = torch.promote_types(y.dtype, torch.float32)
        return torch.einsum(subscripts, x.to(dtype), y.to(dtype))

    def top(self, x, count):
        return x.topk(count, dim=-1).values

    def take_along(self, x, index):
        return torch.take_along_dim(x, index.long(), dim=-1)

    def stop_gradient(self, x):
        return x.detach()

    def if_any(self, condition, made, otherwise):
        # The host must not wait for a GPU, and traced tensors have no values.
        if condition.device.type != "cpu":
            return otherwise
        return otherwise if plain([condition]) and not condition.any() else made()

    def take(self, pages, at):
        # Not every version of torch indexes and copies 8-bit floats on every device.
        if pages.dtype is FP8:
            return pages.view(torch.uint8)[at].view(FP8)
        return pages[at]

    def put(self, pages, at, new):
        if pages.dtype is FP8:
            return self.put(pages.view(torch.uint8), at, new.view(torch.uint8)).view(FP8)
        if new.shape[0] == 0:
            return pages
        if torch.is_grad_enabled() and (new.requires_grad or pages.requires_grad):
            there = at.there
            pages[at.page[there], at.offset[there]] = new[there]
            return pages
        # Shapes are static, so that an invalid entry must also write. An invalid entry writes the
        # same value as the first valid entry. If no entry is valid, it writes the value that is
        # already stored.
        index = torch.arange(new.shape[0], device=new.device)
        source = torch.where(at.there, index, at.there.to(torch.uint8).argmax())
        page, offset = at.page[source], at.offset[source]
        none = ~at.there.any()
        pages[page, offset] = torch.where(none, pages[page, offset], new[source])
        return pages

    def write(self, x, index, part):
        # If the addresses are equal, the kernel has already written the result there.
        if x[index].data_ptr() != part.data_ptr():
            x[index] = part
        return x


TORCH_OPS = TorchOps()


@functools.cache
def device_name(index: int | None) -> str:
    """Return the driver's name of the GPU with this index; None means the current GPU."""
    return torch.cuda.get_device_name(index)


@functools.cache
def capability_of(index: int | None) -> tuple[int, int]:
    """Return the compute capability of the GPU with this index; None means the current GPU."""
    return torch.cuda.get_device_capability(index)


def _parts_of_one(arrays: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that contains the arrays at equal distances, so that one copy serves all
    arrays. The arrays are usually gates. Return None if no single tensor contains the arrays.
    """
    first, *others = arrays
    if not others:
        return None
    base, strides, start = first._base, first.stride(), first.storage_offset()
    step = others[0].storage_offset() - start
    if step <= 0:
        return None
    memory = None if base is not None else first.untyped_storage().data_ptr()
    for i, x in enumerate(others, 1):
        if x.storage_offset() != start + i * step or x.stride() != strides:
            return None
        if x.dtype is not first.dtype:
            return None
        # The arrays are views of one tensor, which inference mode does not record.
        if x._base is not base if memory is None else x.untyped_storage().data_ptr() != memory:
            return None
    return first.as_strided((len(arrays), *first.shape), (step, *strides))


def readable(x):
    """Return `x`, or a copy if kernels cannot read `x` in place.

    Copies can be needed for bounds, gates, block indices, tokens that only the compressed branch
    reads, tensors from torch.compile, and tensors with the negative bit. If kernels cannot read
    another tensor of the caller in place, `dispatch.choose` refuses the kernels instead.
    """
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 and not x.is_neg():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def launch_triton(kernel: TritonKernel, *tensors: Any) -> list[Tensor]:
    """Run a Triton kernel and return its outputs. Every input and output tensor is row-major."""
    outputs = [
        tensors[0].new_empty(shape, dtype=getattr(torch, dtype))
        for shape, dtype in kernel.outputs
    ]
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    arguments: Any = *tensors, *kernel.scalars, *outputs, kernel.constants
    # Newer versions of Triton warn if the fusing of multiply and add is not specified. Calls of
    # JAX specify it too.
    run_triton(kernel.jitted, (kernel.programs,), *arguments, **options, enable_fp_fusion=True)
    return outputs


def run_triton(kernel, grid, x: Tensor, *arguments, **options) -> None:
    """Launch a Triton kernel on the device of its first argument."""
    index = x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        kernel[grid](x, *arguments, **options)
    else:  # Triton launches on the current device
        with torch.cuda.device(index):
            kernel[grid](x, *arguments, **options)

"""`ArrayOps` for torch tensors: kernels run on the current stream, the host never waits."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from nsa_interop.launch import ALIGNMENT, launch

from kernels_pallas.mosaic import capability
from nsa_core.array_ops import ArrayOps
from nsa_torch import early_release, replay

INTERPRETED = (8, 0)  # the GPU whose tiles Triton's interpreter takes


class TorchOps(ArrayOps):
    xp: Any = torch

    def run(self, kernel, *tensors):
        tensors = [readable(x) for x in tensors]
        # What a branch is added to is always made here, and read by nothing else afterwards.
        in_place = [tensors[-1], *[None] * (len(kernel.outputs) - 1)]
        run = lambda: launch(kernel, *tensors, out=in_place if kernel.in_place else ())
        recording = replay.recording()
        return recording.launched(kernel, tensors, run) if recording else run()

    def writes_in_place(self, kernel):
        return kernel.in_place

    def after(self, x, done):
        return x  # steps are queued one after the other

    def device_name(self, x):
        on_gpu = x.device.type == "cuda" and not capability.interpret.get()
        return device_name(x.device.index) if on_gpu else None

    def capability(self, x):
        return capability_of(x.device.index) if x.device.type == "cuda" else INTERPRETED

    def cached(self, layout, name, make):
        return layout.cached(name, make)

    def release(self, arrays):
        if recording := replay.recording():
            recording.released(early_release.worth_it(arrays))
        early_release.release(arrays)

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
        return torch.searchsorted(rows.contiguous(), values, side=side)

    def sort(self, x):
        return torch.sort(x, dim=-1).values

    def sort_pairs(self, keys, values):
        keys, order = torch.sort(keys, dim=-1, stable=True)
        return keys, torch.gather(values, -1, order)

    def pad_end(self, x, axis, count, value):
        return F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, count), value=value)

    def write(self, x, index, part):
        if x[index].data_ptr() != part.data_ptr():  # else the kernel has written it there
            x[index] = part
        return x


TORCH_OPS = TorchOps()


@functools.cache
def device_name(index: int | None) -> str:
    """What the driver calls the GPU with this index; None: the current one."""
    return torch.cuda.get_device_name(index)


@functools.cache
def capability_of(index: int | None) -> tuple[int, int]:
    """The compute capability of the GPU with this index; None: the current one."""
    return torch.cuda.get_device_capability(index)


def readable(x):
    """`x`, or a copy where kernels cannot read it in place.

    Only bounds, gates, block indices, tokens that are compressed and nothing else, and what
    torch.compile laid out are ever copied: `dispatch.choose` refuses other such tensors of the
    caller.
    """
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)

"""Runs Mosaic GPU kernels on torch tensors without XLA. A launch is one C call on torch's current
stream.

Machine code that serves every sequence length is read from disk, or is built once and stored on
disk (`kernels_pallas.runtime`). A launch calls the CUDA driver with the sizes and tensor maps of
the problem.

The order of execution and the lifetime of memory are the same as for any torch operator. The kernel
reads and writes on the stream that is current when the function `launch` is called, and torch
allocates outputs on that stream. The host never waits. If another stream writes to an input, the
caller makes the current stream wait for it. If another stream allocated an input, the caller calls
`record_stream` before dropping the tensor.

Kernels stay loaded until the process ends (`runtime.loaded`).
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_pallas.kernel import ALIGNMENT, DESCRIPTIONS, Array, Kernel
from kernels_pallas.mosaic.capability import HOPPER
from kernels_pallas.runtime import loaded
from kernels_pallas.runtime.bound_kernel import BoundKernel
from kernels_pallas.runtime.sequence import LaunchSequence

_thread = threading.local()


def launch(
    kernel: Kernel,
    *tensors: torch.Tensor,
    out: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, ...]:
    """Run `kernel` on torch's current stream.

    Args:
      kernel: The kernel. A kernel that is not stored on disk is built at its first launch, or
        earlier by the function `prepare`.
      tensors: One tensor for each of `kernel.inputs`, with the same dtype and number of
        elements, in any shape. All tensors must be contiguous, start at a multiple of 256 bytes,
        and be on one Hopper GPU. No tensor may require a gradient, except under
        `torch.no_grad()`, since a launch records nothing for autograd.
      out: One tensor or None for each of `kernel.outputs`, under the same rules as inputs. An
        output must not overlap any other tensor of the call. As an exception, the first outputs of
        an `in_place` kernel may be its last inputs. Outputs that are None are allocated. If `out`
        is empty, all outputs are allocated.

    Returns:
      The outputs: the tensors of `out`, or new tensors in the shapes of `kernel.outputs`.

    Raises:
      ValueError: A tensor breaks a rule of `tensors` or `out`.
      NotImplementedError: the GPU has another compute capability than 9.0.
      RuntimeError: The kernel is not loaded yet and a CUDA graph is being captured, or building the
        kernel failed.
    """
    device, index = tensors[0].device, tensors[0].get_device()
    inputs, outputs = _arguments(kernel)
    out = out or [None] * len(outputs)
    recording, addresses = torch.is_grad_enabled(), []
    for role, given, expected in ("argument", tensors, inputs), ("out", out, outputs):
        for i, (x, (shape, size, dtype)) in enumerate(zip(given, expected, strict=True)):
            if x is None:
                continue
            if (
                x.dtype is not dtype
                or x.numel() != size
                or not x.is_contiguous()
                or x.get_device() != index
                or (address := x.data_ptr()) % ALIGNMENT
                or (recording and x.requires_grad)
            ):
                raise ValueError(
                    f"{role} {i} of {kernel.name} must be a contiguous tensor of {dtype} with the "
                    f"{size} elements of {shape} on GPU {index}, aligned to {ALIGNMENT} bytes, "
                    f"without gradient, got {x.dtype} of shape {tuple(x.shape)} and "
                    f"strides {x.stride()} on {x.device} at {x.data_ptr():#x}, "
                    f"requires_grad={x.requires_grad}"
                )
            if given is tensors:
                addresses.append(address)
    if index < 0:
        raise ValueError(f"argument 0 of {kernel.name} must be on a GPU, got {device}")
    bound = _bound(kernel, index)
    results = [
        torch.empty(shape, dtype=dtype, device=device) if x is None else x
        for (shape, _, dtype), x in zip(outputs, out, strict=True)
    ]
    addresses += [x.data_ptr() for x in results]
    bound.launch(torch._C._cuda_getCurrentRawStream(index), addresses)
    return tuple(results)


def launcher(kernel: Kernel, device: torch.device) -> Callable[[int, Sequence[int]], None]:
    """Return the function that `launch` itself calls to queue one run. The arguments of this
    function are a stream (`current_stream`) and the addresses of inputs and outputs. The tensors at
    these addresses must follow the rules of the function `launch`.

    Raises:
      NotImplementedError, RuntimeError: as `launch`.
    """
    return _bound(kernel, _index(device)).launch


def sequence(
    kernels: Sequence[Kernel], arguments: Sequence[Sequence[int]], device: torch.device
) -> Callable[[int, tuple[int, ...]], None]:
    """Return a function like the result of `launcher`, for a sequence of kernels
    (`runtime.sequence`).

    Args:
      arguments: For each kernel, the indices of its addresses in the list of addresses.
    """
    return LaunchSequence([_bound(x, _index(device)) for x in kernels], arguments).launch


def current_stream(device: torch.device) -> int:
    """Return the address of torch's current stream."""
    return torch._C._cuda_getCurrentRawStream(_index(device))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def prepare(
    kernels: Sequence[Kernel], device: torch.device | str | int, jobs: int | None = None
) -> int:
    """Build and load kernels on a GPU before a capture or a timed run.

    Args:
      kernels: The kernels. Kernels that differ only in lengths count as one.
      device: The GPU.
      jobs: Number of processes that build missing kernels. Defaults to one per core.

    Returns:
      The number of kernels.

    Raises:
      ValueError: `device` is not a GPU.
      NotImplementedError, RuntimeError: as `launch`.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a GPU, got {device}")
    torch.cuda.init()
    index = _index(device)
    generic = list(dict.fromkeys(x.for_any_length() for x in kernels))
    _check_may_load(generic, index)
    loaded.load(generic, index, jobs)
    for kernel in kernels:
        _bound(kernel, index)
    return len(generic)


@functools.cache
def _arguments(kernel: Kernel) -> list[list[tuple[tuple[int, ...], int, torch.dtype]]]:
    """Return the shape, size and dtype of each input and each output."""

    def convert(arrays: Sequence[Array]):
        return [(x.shape, x.size, getattr(torch, x.dtype)) for x in arrays]

    return [convert(kernel.inputs), convert(kernel.outputs)]


@functools.lru_cache(DESCRIPTIONS)
def _bound(kernel: Kernel, index: int) -> BoundKernel:
    """Return `kernel`, loaded on the GPU `index` and ready to launch."""
    _check_may_load([kernel.for_any_length()], index)
    return loaded.bound(kernel, index, _prefetched)


def prefetch(kernels: Callable[[], Sequence[Kernel]]) -> None:
    """Register the kernels that the current thread will launch. If a launch finds a kernel that
    was never built, all registered kernels are built together.
    """
    _thread.prefetched = kernels


def _prefetched() -> Sequence[Kernel]:
    """Return the kernels that the current thread registered last. Each registration is returned
    only once.
    """
    found, _thread.prefetched = getattr(_thread, "prefetched", None), None
    return found() if found else []


def _check_may_load(kernels: Sequence[Kernel], index: int) -> None:
    """Raise an error if a kernel is not loaded yet and cannot be loaded now."""
    kernel: Any = next((x for x in kernels if not loaded.is_loaded(x, index)), None)
    if kernel is None:
        return
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER:  # other GPUs lack its instructions
        raise NotImplementedError(
            f"{kernel.name} needs a GPU of compute capability {HOPPER[0]}.{HOPPER[1]} "
            f"(Hopper), got {capability[0]}.{capability[1]} on cuda:{index}"
        )
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel.name} must be loaded before a CUDA graph is captured; "
                f"call prepare([kernel], {index}), or launch it once"
            )

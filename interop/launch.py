"""Mosaic GPU kernels on torch tensors: one C call on torch's current stream, no XLA.

Machine code that serves every length comes from disk, or is built there once
(`kernels_pallas.runtime`); a launch is a call of the driver with the numbers and tensor maps of
the problem. A kernel that is compiled for one length only (it has no `source`), or whose code
cannot be built here, is compiled in this process by JAX's CUDA plugin, once for each device. No
JAX GPU client is started, and one that runs already is not disturbed.

Order and lifetime are those of any torch operator. The kernel reads and writes on the stream
that is current when `launch` is called, outputs come from torch's allocator on that stream, and
the host never waits. Where another stream writes a tensor, the caller makes the current stream
wait for it; where another stream allocated one, `record_stream` comes before it is dropped.

What is loaded stays loaded (`runtime.loaded`).
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernels_pallas.kernel import ALIGNMENT, DESCRIPTIONS, Array, Kernel
from kernels_pallas.mosaic.capability import HOPPER
from kernels_pallas.runtime import build, driver, loaded, plugin
from kernels_pallas.runtime.bound_kernel import BoundKernel
from kernels_pallas.runtime.sequence import LaunchSequence

_launchers: dict[tuple[Kernel, int], Callable[[int, Sequence[int]], None]] = {}
LAUNCHERS = DESCRIPTIONS  # kept at most; code that was loaded stays
_lock = threading.RLock()
_thread = threading.local()


def launch(
    kernel: Kernel,
    *tensors: torch.Tensor,
    out: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, ...]:
    """Runs `kernel` on torch's current stream.

    Args:
      kernel: compiled at its first launch on a device, or ahead of it by `prepare`.
      tensors: one for each of `kernel.inputs`, with its dtype and number of elements, in any
        shape: contiguous, starting at a multiple of 256 bytes, all on one Hopper GPU. Nothing
        is recorded for autograd.
      out: one tensor for each of `kernel.outputs`, under the same rules, that overlaps no other
        tensor of the call, but for the first where they are the last inputs of a kernel that
        works `in_place`; None in place of one, or nothing for all, allocates them.

    Returns:
      The outputs: those of `out` as they are, or new ones in the shapes of `kernel.outputs`.

    Raises:
      ValueError: a tensor that is not as described; what `lower` raises.
      NotImplementedError: the GPU has another compute capability than 9.0.
      RuntimeError: a first compilation or load while a CUDA graph is captured; JAX's CUDA plugin
        is missing or could not compile the kernel.
    """
    inputs, outputs = _arguments(kernel)
    index = tensors[0].get_device() if tensors and torch.is_tensor(tensors[0]) else -1
    addresses = _checked(kernel, "argument {}", tensors, inputs, index)
    if out:
        _checked(kernel, "out[{}]", out, outputs, index, optional=True)
    device = tensors[0].device
    if device.type != "cuda":
        raise ValueError(f"argument 0 of {kernel.name} must be on a GPU, got {device}")
    launcher = _launchers.get((kernel, index)) or _load(kernel, index)
    given = out or [None] * len(outputs)
    results = [
        torch.empty(shape, dtype=dtype, device=device) if x is None else x
        for (shape, _, dtype), x in zip(outputs, given, strict=True)
    ]
    addresses += [x.data_ptr() for x in results]
    launcher(torch._C._cuda_getCurrentRawStream(index), addresses)
    return tuple(results)


def launcher(kernel: Kernel, device: torch.device) -> Callable[[int, Sequence[int]], None]:
    """What `launch` calls: a function of a stream (`current_stream`) and of the addresses of
    inputs and outputs, which must be as `launch` wants them, that queues one run.

    Raises:
      NotImplementedError, RuntimeError: as `launch`.
    """
    index = _index(device)
    return _launchers.get((kernel, index)) or _load(kernel, index)


def sequence(
    kernels: Sequence[Kernel], arguments: Sequence[Sequence[int]], device: torch.device
) -> Callable[[int, tuple[int, ...]], None] | None:
    """As `launcher`, of several kernels one after the other (`runtime.sequence`); None where one
    is compiled for one length only.

    Args:
      arguments: of each kernel, which of the addresses it takes.
    """
    bound = [getattr(launcher(kernel, device), "__self__", None) for kernel in kernels]
    found = [x for x in bound if isinstance(x, BoundKernel)]
    return LaunchSequence(found, arguments).launch if len(found) == len(bound) else None


def current_stream(device: torch.device) -> int:
    """The address of torch's current stream."""
    return torch._C._cuda_getCurrentRawStream(_index(device))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def prepare(
    kernels: Kernel | Sequence[Kernel],
    device: torch.device | str | int,
    jobs: int | None = None,
) -> int:
    """Compiles and loads kernels on a GPU, so that a capture or a timed run need not.

    Args:
      kernels: what differs in lengths alone is one kernel.
      jobs: processes that build what is not on disk; by default one a core.

    Returns:
      How many kernels that are.

    Raises:
      ValueError: `device` is not a GPU; what `lower` raises.
      NotImplementedError, RuntimeError: as `launch`.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a GPU, got {device}")
    torch.cuda.init()
    index = _index(device)
    kernels = [kernels] if isinstance(kernels, Kernel) else list(kernels)
    generic = dict.fromkeys(x.for_any_length() for x in kernels if x.source)
    with _lock:
        for kernel in generic:
            if not loaded.is_loaded(kernel, index):
                _check_may_load(kernel, index)
        loaded.load(list(generic), index, jobs)
    for kernel in kernels:
        if (kernel, index) not in _launchers:
            _load(kernel, index)
    return len(generic) + len({x for x in kernels if not x.source})


class _Argument(NamedTuple):
    shape: tuple[int, ...]
    size: int
    dtype: torch.dtype


@functools.cache
def _arguments(kernel: Kernel) -> tuple[list[_Argument], list[_Argument]]:
    """The inputs and the outputs in torch's terms."""

    def convert(arrays: Sequence[Array]) -> list[_Argument]:
        return [_Argument(x.shape, x.size, getattr(torch, x.dtype)) for x in arrays]

    return convert(kernel.inputs), convert(kernel.outputs)


def _checked(
    kernel: Kernel,
    role: str,
    tensors: Sequence[torch.Tensor | None],
    expected: Sequence[_Argument],
    index: int,
    optional: bool = False,
) -> list[int]:
    """The tensors' addresses; refuses one that is not as expected. `index` is the GPU's, -1
    elsewhere; `optional`: None is as good.
    """
    if len(tensors) != len(expected):
        names = ", ".join(role.format(i) for i in range(len(expected)))
        raise ValueError(f"{kernel.name} takes {names}: {len(expected)}, got {len(tensors)}")
    recording, addresses = torch.is_grad_enabled(), []
    for i, (tensor, (_, size, dtype)) in enumerate(zip(tensors, expected, strict=True)):
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is dtype
            and tensor.numel() == size
            and tensor.is_contiguous()
            and tensor.get_device() == index
            and (address := tensor.data_ptr()) % ALIGNMENT == 0
            and not (recording and tensor.requires_grad)
        ):
            addresses.append(address)
        elif tensor is not None or not optional:
            must = f"{role.format(i)} of {kernel.name} must"
            raise ValueError(f"{must} {_broken_rule(tensor, expected[i], index)}")
    return addresses


def _broken_rule(tensor: Any, expected: _Argument, index: int) -> str:
    """What a refused tensor must do or be, and does or is instead."""
    if not isinstance(tensor, torch.Tensor):
        return f"be a torch.Tensor, got {type(tensor).__name__}"
    if tensor.dtype != expected.dtype:
        return f"have dtype {expected.dtype}, got {tensor.dtype}"
    if tensor.numel() != expected.size:
        return (
            f"have the {expected.size} elements of {expected.shape}, got {tuple(tensor.shape)}"
        )
    if not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        return f"be contiguous, got shape {shape} with strides {strides}: pass a copy"
    if tensor.get_device() != index:
        device = f"cuda:{index}" if index >= 0 else "the device of argument 0"
        return f"be on {device}, got {tensor.device}"
    if tensor.data_ptr() % ALIGNMENT:
        address = f"{tensor.data_ptr():#x}"
        return f"start at a multiple of {ALIGNMENT} bytes, got {address}: pass a clone"
    return "not require a gradient, which the kernel does not compute: detach it"


def _load(kernel: Kernel, index: int) -> Callable[[int, Sequence[int]], None]:
    """The launcher of `kernel` on a GPU, made once."""
    with _lock:
        launcher = _launchers.get((kernel, index))
        if launcher is None:
            launcher = _made(kernel, index)
            if len(_launchers) >= LAUNCHERS:
                _launchers.pop(next(iter(_launchers)))
            _launchers[kernel, index] = launcher
    return launcher


def _made(kernel: Kernel, index: int) -> Callable[[int, Sequence[int]], None]:
    if not kernel.source or not loaded.is_loaded(kernel.for_any_length(), index):
        _check_may_load(kernel, index)
    found = loaded.bound(kernel, index, prefetch=_prefetched)
    return found.launch if found else _compile(kernel, index)


def prefetch(kernels: Callable[[], Sequence[Kernel]]) -> None:
    """Says what this thread is about to launch: it is asked for, and built at once, where a launch
    finds a kernel that has never been built.
    """
    _thread.prefetched = kernels


def _prefetched() -> Sequence[Kernel]:
    """What this thread last said; once."""
    found, _thread.prefetched = getattr(_thread, "prefetched", None), None
    return found() if found else []


def _check_may_load(kernel: Kernel, index: int) -> None:
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER:  # whose instructions exist nowhere else
        raise NotImplementedError(
            f"{kernel.name} needs a GPU of compute capability {HOPPER[0]}.{HOPPER[1]} "
            f"(Hopper), got {capability[0]}.{capability[1]} on cuda:{index}"
        )
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel.name} must be compiled before a CUDA graph is captured, code cannot "
                f"be loaded meanwhile: call prepare(kernel, {index}), or launch it once"
            )


def _compile(kernel: Kernel, index: int) -> Callable[[int, Sequence[int]], None]:
    """Machine code for `kernel` in the primary context of a GPU, which is torch's too.

    Returns:
      A function of the stream and of the addresses of inputs and outputs that queues one run.
    """
    try:
        from kernels_pallas.runtime.lowering import lower  # imports JAX
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{kernel.name} is none of the kernels on disk, and this machine cannot build it: "
            f"{build.why_not()}; a layer's scale is part of its kernels"
        ) from error

    code = lower(kernel)
    compiler = plugin.compiler()
    of = f"{kernel.name} on device {index}"
    with driver.loading(index, of) as address:  # where refused, the plugin ends the process
        compiled = compiler(code, len(code))
        if not compiled:
            raise RuntimeError(
                f"JAX's CUDA plugin could not compile {kernel.name}: its reasons, if it gave "
                "any, are on stderr; MOSAIC_GPU_DUMP_PTXAS=1 adds those of ptxas"
            )
        start = plugin.launcher(compiled, index)
        driver.load_now(ctypes.c_void_p(compiled[0]), of)

    context = ctypes.c_void_p(address)
    pointers = ctypes.c_void_p * (len(kernel.inputs) + len(kernel.outputs))
    quick = driver.quick()  # keeps the GIL: the two calls return at once
    push, pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
    popped = ctypes.byref(ctypes.c_void_p())

    def launcher(stream: int, addresses: Sequence[int]) -> None:
        # A thread that has not called the CUDA runtime yet has no context, and another device
        # may be current; the launch would end the process.
        if error := push(context):
            raise RuntimeError(f"{of}: cuCtxPushCurrent failed with {driver.words(error)}")
        try:
            start(stream, pointers(*addresses))
        finally:
            pop(popped)

    return launcher

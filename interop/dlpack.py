"""Shares arrays between torch and JAX without a copy. This module describes and follows the rules
that make sharing safe.

Both frameworks queue work on CUDA streams and return before the work has run. Each framework has
its own memory pool, which reuses freed memory in the order of the framework's streams. DLPack
shares only the memory, so programs must also follow the rules below.

Order: these rules determine which stream waits for which. Pass only array objects to
`from_dlpack`, never a capsule. A capsule has no stream, so that no stream would wait for another.
  torch -> JAX  JAX names its stream to `Tensor.__dlpack__`, which makes that stream wait for
                torch's current stream. JAX sees the results of all work that torch's current stream
                has queued.
  JAX -> torch  torch names its current stream to `Array.__dlpack__`, which makes that stream
                wait for the array. Any other torch stream that reads the array must wait for the
                current stream.
On CUDA the host does not wait. On the CPU torch runs each operation at once, and `to_torch` waits
until JAX has computed the array.

Lifetime: these rules determine which object keeps which memory alive.
  Input of JAX  An alias keeps the tensor's storage alive, but XLA may drop the alias before its
                stream has read the memory. Keep tensor and array until `to_torch` has returned, on
                the current stream, every output that was computed from the array. After that,
                torch's order of streams protects the tensor's memory. If another stream allocated
                the tensor, call `record_stream`.
  JAX's output  A torch alias keeps the array alive, but XLA does not know torch's streams. Once
                the alias is dropped, the next XLA program may reuse the array's memory while a
                queued torch kernel still reads the array. Drop an alias only after the kernels
                that read the alias have finished. If you cannot wait for these kernels, request
                a copy: `to_torch(array, copy=True)` clones on the current stream into torch's
                memory, and keeps the array until an event shows that the clone has run.

Mutation: JAX arrays are immutable, so never write to the torch alias of a JAX array. Do not write
to a tensor while JAX may still read it. JAX has read the tensor when `to_torch` has returned all
outputs.

`call_jax` follows all these rules for a function of tensors. `call_jax` clones every output,
which costs one read and one write, and twice the memory until the clone has run. Arrays whose
clone has run are released at the next copy, or by `release_finished`. If the retained arrays
exceed `HELD_BYTES`, the host waits for the oldest clone.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

# alignment in bytes on a GPU, where XLA reads its parameters with vector instructions
ALIGNMENT = 16
# Without a limit on retained arrays, a host that runs ahead of the GPU would fill the memory.
HELD_BYTES = 1 << 30

_held: list[tuple[torch.cuda.Event, torch.Tensor]] = []
_lock = threading.Lock()


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return a JAX array with the values of `tensor`. JAX reads the tensor after the queued work
    of torch's current stream. The array shares the tensor's memory if the tensor is contiguous
    and aligned.

    Args:
      tensor: A tensor with a device that JAX supports and a dtype that JAX does not convert. Keep
        the tensor alive and do not write to it while JAX uses it (see the module).

    Raises:
      ValueError: The type of the tensor is a subclass of `torch.Tensor` (which may have no memory),
        the dtype is one that JAX would convert (64-bit types without x64), or the tensor requires
        a gradient while gradients are on.
      NotImplementedError: torch's current stream is capturing a CUDA graph.
      BufferError, RuntimeError: JAX does not support the device or dtype. torch or JAX raises these
        errors.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"tensor must be a plain torch.Tensor, got {type(tensor).__name__}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    kept = jax.dtypes.canonicalize_dtype(dtype)
    if kept.name != dtype:
        raise ValueError(
            f"tensor must have a dtype that JAX does not convert, got {dtype}, which becomes "
            f"{kept}; pass tensor.to(torch.{kept}), or enable 64-bit types with "
            "jax.config.update('jax_enable_x64', True)"
        )
    if not torch.is_grad_enabled():  # the call is inside a custom operator
        tensor = tensor.detach()
    if tensor.requires_grad:
        raise ValueError("tensor must not require a gradient; pass tensor.detach()")
    tensor = tensor.contiguous().resolve_neg()  # JAX knows of no negative bit
    if tensor.is_cpu:
        return _share_host_memory(tensor, kept)
    if not tensor.is_cuda:
        return jax.dlpack.from_dlpack(tensor)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "JAX must not run while torch captures a CUDA graph, since XLA launches on its own "
            "stream, which is not captured"
        )
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    # torch waits on a stream of the current device, not of the tensor's device.
    with torch.cuda.device(tensor.device):
        return jax.dlpack.from_dlpack(tensor)


def _share_host_memory(tensor: torch.Tensor, dtype: np.dtype) -> jax.Array:
    """Return a JAX array with the memory of a contiguous tensor on the CPU.

    The array is made from a NumPy array and not by DLPack. One of JAX's threads drops an input
    after reading it. To drop a tensor, that thread takes the interpreter lock, which makes Python
    3.12 abort if the process ends at the same time. JAX leaves NumPy arrays to Python's threads.
    """
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    array = data.view(dtype).reshape(tensor.shape)
    return jax.device_put(array, jax.local_devices(backend="cpu")[0], may_alias=True)


def to_torch(array: jax.Array, *, copy: bool = False) -> torch.Tensor:
    """Return the torch tensor of a JAX array. Later work on torch's current stream waits for the
    array.

    Args:
      array: A JAX array on one device, which is not traced.
      copy: If False, tensor and array share memory. Never write to a tensor that shares memory, and
        drop the tensor only after all its reads have finished. If True, the tensor is a copy in
        torch's memory, for which the rules of the module do not apply.
    """
    alias = torch.from_dlpack(array)
    if not copy:
        return alias
    clone = alias.clone()
    if alias.is_cuda:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(alias.device))
        with _lock:
            _held.append((event, alias))
        release_finished()
    return clone


def call_jax(function: Callable[..., Any], *tensors: Any) -> tuple[Any, ...]:
    """Call a JAX function on torch tensors, with correct order of streams and lifetime of
    memory.

    The function must be pure: all its effects must be in its outputs. Pass the same jitted object
    in every call, since a new object is traced again. Nothing is recorded for autograd.

    Args:
      function: A function of arrays in the structure of `tensors` that returns an array or a tuple.
      tensors: Tensors on one device, or tuples of them, nested to any depth. A None among `tensors`
        is passed to `function` as None.

    Returns:
      The results of the function as tensors with their own memory, to which you may write. If the
      function returns a single array, the result is a tuple with one tensor.

    Raises: The same errors as `to_jax`.
    """
    # These names keep tensors and aliases alive until the outputs are on torch's current
    # stream.
    arrays = jax.tree.map(to_jax, tensors)
    device = next((x.device for x in jax.tree.leaves(arrays)), None)
    # Without this, an array that is made inside the function would be on JAX's first device.
    with jax.default_device(device):
        outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = jax.tree.map(lambda x: to_torch(x, copy=True), outputs)
    for tensor in jax.tree.leaves(tensors):
        if tensor.is_cuda:
            # This costs nothing if the current stream allocated the tensor.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return results


def release_finished() -> None:
    """Release the JAX arrays whose clone has run. If more than `HELD_BYTES` remain, the host waits
    for the oldest clone.
    """
    with _lock:
        _held[:] = [(event, alias) for event, alias in _held if not event.query()]
        while len(_held) > 1 and sum(alias.nbytes for _, alias in _held) > HELD_BYTES:
            _held[0][0].synchronize()
            del _held[0]

"""Arrays between torch and JAX without a copy, and the protocol that keeps this safe.

Both frameworks queue work on CUDA streams and return before it has run, and each has its own
memory pool, which hands out freed memory in the order of its own streams. DLPack shares the
memory; these rules make sharing it correct.

Order (who waits for whom). Only array objects are passed to `from_dlpack`, never a capsule:
a capsule carries no stream, and nothing would wait for anything.
  torch -> JAX  JAX names its stream to `Tensor.__dlpack__`, which makes that stream wait for
                torch's current stream. What the current stream has queued is visible to JAX.
  JAX -> torch  torch names its current stream to `Array.__dlpack__`, which makes that stream
                wait for the array. Another torch stream must wait for that one.
  The host does not wait on CUDA. On the CPU torch runs at once, and `to_torch` waits until
  the array is computed.

Lifetime (who keeps what alive).
  Input of JAX  An alias keeps the tensor's storage alive, but XLA may drop the alias before its
                stream has read the memory. Keep the tensor until every output computed from it
                has been through `to_torch` on the current stream: from then on torch's own
                order covers its memory (`record_stream` if another stream allocated it).
  JAX's output  A torch alias keeps the array alive, but XLA knows nothing of torch's streams:
                once the alias is dropped, the next XLA program may get that memory while a
                queued torch kernel still reads it. So an alias may be dropped only when the
                kernels that read it have finished. If you cannot promise that, ask for a copy:
                `to_torch(array, copy=True)` clones on the current stream into torch's memory
                and holds the array until an event says that the clone has run.

Mutation. JAX arrays are immutable: never write the torch alias of one. Nor write a tensor while
JAX may still read it: wait until the outputs came back through `to_torch`.

`call_jax` keeps all these rules for a function of tensors. Its price is one read and one write
of every output, and an output's memory twice until the clone has run. Arrays whose clone has
run are released at the next copy, or by `release_finished`; above `HELD_BYTES` of them the host
waits for the oldest.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import torch

# XLA reads its parameters with vector instructions; the CPU client copies what is less aligned.
ALIGNMENT = {"cpu": 64, "cuda": 16}

INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
FLOATS = ("bfloat16", "float16", "float32", "float64")
DTYPES = INTEGERS + FLOATS

# Without a limit a host that runs ahead would fill the memory.
HELD_BYTES = 1 << 30

_held: list[tuple[torch.cuda.Event, torch.Tensor]] = []
_lock = threading.Lock()


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The JAX array that shares the memory of `tensor`, ordered after torch's current stream.

    Args:
      tensor: dense, contiguous, on a device that JAX sees too, of a dtype that JAX keeps. It
        must outlive and not be written during JAX's use of it (see the module).

    Returns:
      An array of the same shape and dtype, at the same address.

    Raises:
      ValueError: the tensor requires a gradient, is not contiguous or not aligned, is sparse,
        quantised, meta, pinned or a tracing stand-in, has the negative bit or a dtype that JAX
        would convert (64-bit types without x64), or JAX has no such device.
      NotImplementedError: torch's current stream is capturing a CUDA graph.
    """
    return _to_jax(tensor, "tensor")


def to_torch(array: jax.Array, *, copy: bool = False) -> torch.Tensor:
    """The torch tensor of a JAX array, ordered before what torch's current stream runs next.

    Args:
      array: a computed array on one device.
      copy: False shares the memory: never write the tensor, and drop it only when all reads of
        it have finished. True gives a tensor of torch's own, free of both rules.

    Raises:
      ValueError: not a `jax.Array`, a tracer, deleted or donated, spread over several devices,
        or of a dtype that torch does not have.
      NotImplementedError: torch's current stream is capturing a CUDA graph.
    """
    return _to_torch(array, "array", copy)


def call_jax(function: Callable[..., Any], *tensors: Any) -> tuple[Any, ...]:
    """Calls a JAX function on torch tensors, safe in stream order and lifetime.

    The function must be pure (what it reads of its inputs leaves through its outputs) and
    should be one jitted object from call to call, or it is traced anew each time. Nothing is
    recorded for autograd; where gradients are off (inside a custom operator) inputs are
    detached.

    Args:
      function: takes arrays in the structure of `tensors`, returns an array or a tuple.
      tensors: tensors of one device, tuples of them, nested at will; None stays None. They are
        shared, except that a tensor which is too little aligned for XLA is cloned.

    Returns:
      What the function returned, as tensors that own their memory and may be written; a single
      array comes back as a tuple of one.

    Raises:
      ValueError: as `to_jax` and `to_torch`, naming `tensors[i]` or `outputs[i]`; tensors of
        several devices; a tensor that requires a gradient while gradients are on.
      NotImplementedError: torch's current stream is capturing a CUDA graph.
    """
    # This name holds the tensors until the outputs are on torch's current stream.
    inputs = _map(_shareable, tensors, "tensors")
    arrays = _map(_to_jax, inputs, "tensors")
    leaves = jax.tree.leaves(inputs)
    devices = {tensor.device for tensor in leaves}
    if len(devices) > 1:
        raise ValueError(f"tensors must be on one device, got {sorted(map(str, devices))}")
    device = _jax_device(devices.pop(), "tensors") if devices else None
    # Without this an array made inside the function would land on JAX's first device.
    with jax.default_device(device):
        outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = _map(_to_torch, outputs, "outputs")
    for tensor in leaves:
        if tensor.is_cuda:
            # No cost where the current stream allocated the tensor.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return results


def release_finished() -> None:
    """Releases the JAX arrays whose clone has run; above `HELD_BYTES` waits for the oldest."""
    with _lock:
        _held[:] = [(event, alias) for event, alias in _held if not event.query()]
        while len(_held) > 1 and sum(alias.nbytes for _, alias in _held) > HELD_BYTES:
            _held[0][0].synchronize()
            del _held[0]


def _to_jax(tensor: torch.Tensor, name: str) -> jax.Array:
    _check_plain(tensor, name)
    if tensor.requires_grad:
        raise ValueError(
            f"{name} must not require a gradient, JAX would not record it: pass "
            f"{name}.detach(), or call nsa_torch.attention, which has a backward pass"
        )
    _jax_device(tensor.device, name)
    _check_dtype(tensor.dtype, name)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}: pass {name}.contiguous()"
        )
    if tensor.is_neg():
        raise ValueError(
            f"{name} must not have the negative bit, got a view whose memory holds its negative: "
            f"pass {name}.resolve_neg()"
        )
    if not _is_aligned(tensor, name):
        raise ValueError(
            f"{name} must start at a multiple of {ALIGNMENT[tensor.device.type]} bytes, got "
            f"{tensor.data_ptr():#x}: pass {name}.clone()"
        )
    if tensor.device.type == "cpu" and tensor.is_pinned():
        raise ValueError(
            f"{name} must not be in pinned memory, which JAX takes for its GPU's: pass "
            f"{name}.clone() to compute on the CPU, {name}.cuda() to compute on the GPU"
        )
    if not tensor.is_cuda:
        return jax.dlpack.from_dlpack(tensor, copy=False)
    # torch takes the stream to wait for from the current device, not from the tensor's.
    with torch.cuda.device(tensor.device):
        _refuse_capture()
        return jax.dlpack.from_dlpack(tensor)


def _to_torch(array: jax.Array, name: str, copy: bool = True) -> torch.Tensor:
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            f"{name} must be a computed array, got a tracer of {array.aval}: leave jit, grad "
            "or vmap before going to torch"
        )
    if not isinstance(array, jax.Array):
        raise ValueError(f"{name} must be a jax.Array, got {type(array).__name__}")
    if array.is_deleted():
        raise ValueError(f"{name} must hold data, got an array that was deleted or donated")
    if len(array.sharding.device_set) != 1:
        raise ValueError(f"{name} must be on one device, got {array.sharding}")
    if array.dtype.name not in DTYPES:
        raise ValueError(f"{name} must have a dtype among {DTYPES}, got {array.dtype}")
    (device,) = array.sharding.device_set
    if device.platform != "cpu":
        if not torch.cuda.is_available():
            raise ValueError(f"{name} is on {device}, but torch has no CUDA device")
        _refuse_capture()
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


def _shareable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor`, detached where gradients are off, cloned if XLA cannot read it in place."""
    _check_plain(tensor, name)
    if tensor.requires_grad and not torch.is_grad_enabled():
        tensor = tensor.detach()
    tensor = tensor.resolve_neg()
    # A clone of a strided tensor would be contiguous, which is the caller's to decide.
    shared = _is_aligned(tensor, name) or not tensor.is_contiguous()
    return tensor if shared else tensor.clone()


def _check_plain(tensor: torch.Tensor, name: str) -> None:
    """Refuses what has no plain memory: DLPack would give some of these away as garbage."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(
            f"{name} must be a plain torch.Tensor, got its subclass {type(tensor).__name__}"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be dense, got {tensor.layout}: pass {name}.to_dense()")


def _check_dtype(dtype: torch.dtype, name: str) -> None:
    name_of = str(dtype).removeprefix("torch.")
    if name_of not in DTYPES:
        raise ValueError(f"{name} must have a dtype among {DTYPES}, got {dtype}")
    kept = jax.dtypes.canonicalize_dtype(name_of).name
    if kept != name_of:
        raise ValueError(
            f"{name} must have a dtype that JAX keeps, got {dtype}, which JAX converts to "
            f"{kept}: pass {name}.to(torch.{kept}), or enable 64-bit types with "
            "jax.config.update('jax_enable_x64', True)"
        )


def _is_aligned(tensor: torch.Tensor, name: str) -> bool:
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        raise ValueError(f"{name} must have memory, got a torch.func wrapper") from None
    return address % ALIGNMENT.get(tensor.device.type, 1) == 0


def _jax_device(device: torch.device, name: str) -> jax.Device:
    """JAX's device for a torch device."""
    platform = {"cpu": "cpu", "cuda": "gpu"}.get(device.type)
    if platform is None:
        raise ValueError(f"{name} must be on a cpu or cuda device, got {device}")
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ValueError(
            f"{name} is on {device}, but JAX has no {device.type} device: install JAX with "
            f"support for it, or move the tensor ({error})"
        ) from error
    if platform == "cpu":
        return found[0]
    for candidate in found:
        if candidate.local_hardware_id == device.index:
            return candidate
    raise ValueError(f"{name} is on {device}, but JAX sees only {found}")


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "JAX cannot run while torch captures a CUDA graph: XLA launches on a stream of "
            "its own, which the capture does not cover"
        )


def _map(convert: Callable[[Any, str], Any], tree: Any, root: str) -> Any:
    """`convert(leaf, name)` for each leaf of a tree; None is no leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: convert(leaf, root + jax.tree_util.keystr(path)), tree
    )

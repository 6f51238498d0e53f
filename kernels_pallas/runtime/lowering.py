"""Kernels to MLIR, as the compiler of JAX's CUDA plugin takes it (`plugin`). Imports JAX."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jaxlib import xla_client

from kernels_pallas.kernel import Kernel

_lock = threading.RLock()  # `no_backend` replaces a function of jax


def lower(kernel: Kernel) -> bytes:
    """The MLIR bytecode of `kernel` for Hopper, as the plugin's compiler takes it.

    Needs neither a GPU nor the plugin.

    Raises:
      ValueError: `kernel.call` is anything but one Mosaic GPU kernel that takes exactly the
        arguments, in order, and gives exactly the results, in order; or the results are not
        `kernel.outputs`.
    """
    with _lock, no_backend():
        inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.inputs]
        traced = jax.jit(kernel.call, keep_unused=True).trace(*inputs)
        lowered = traced.lower(lowering_platforms=("cuda",))
    results = [f"{r.dtype.name}{list(r.shape)}" for r in jax.tree.leaves(traced.out_info)]
    expected = [f"{o.dtype}{list(o.shape)}" for o in kernel.outputs]
    if results != expected:
        raise ValueError(f"{kernel.name} must return {expected}, got {results}")
    return _payload(kernel.name, lowered.compiler_ir())


@contextlib.contextmanager
def no_backend() -> Iterator[None]:
    """Lets this thread trace and lower without starting any of JAX's backends.

    jit asks for the default device, Mosaic for the first local one, to learn the compute
    capability and the size of shared memory. Either question would start all backends, and the
    GPU's takes 75 % of the memory. Here the CPU device of a client that JAX has no record of
    answers both, and Mosaic assumes 9.0 and 227 KiB, beside a running GPU client too. JAX's own
    backends stay as they are, to be started later or never, and other threads see nothing.
    """
    device = _unregistered_cpu()
    thread, original = threading.get_ident(), jax.local_devices

    def local_devices(*args: Any, **options: Any) -> list[jax.Device]:
        here = threading.get_ident() == thread
        return [device] if here else original(*args, **options)

    jax.local_devices = local_devices
    try:
        with jax.default_device(device):
            yield
    finally:
        jax.local_devices = original


@functools.cache
def _unregistered_cpu() -> jax.Device:
    return xla_client.make_cpu_client(num_devices=1).local_devices()[0]


def _payload(name: str, module: Any) -> bytes:
    """What the Mosaic GPU call of a StableHLO module holds; the call must be all there is."""
    main, *others = module.body.operations
    (block,) = main.regions[0].blocks
    *body, end = block.operations
    names = [_name(op) for op in (*body, *others)]
    if names != ["mosaic_gpu_v2"]:
        raise ValueError(f"{name} must be exactly one Mosaic GPU kernel, got {names}")
    (call,) = body
    if list(call.operands) != list(block.arguments):
        raise ValueError(f"{name} must pass all its arguments to the kernel, in their order")
    if list(end.operands) != list(call.results):
        raise ValueError(f"{name} must return all results of the kernel, in their order")
    if len(call.attributes["output_operand_aliases"]):
        raise ValueError(f"{name} must not write to its arguments")
    return call.attributes["mhlo.backend_config"]["module"].value_bytes


def _name(op: Any) -> str:
    call = op.operation.name == "stablehlo.custom_call"
    return op.attributes["call_target_name"].value if call else op.operation.name

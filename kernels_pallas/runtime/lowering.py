"""Lowers kernels to MLIR for the compiler of JAX's CUDA plugin. This module imports JAX."""

from typing import Any

import jax

from kernels_pallas.kernel import Kernel


def lower(kernel: Kernel) -> bytes:
    """Return the MLIR bytecode of `kernel` for Hopper.

    The compiler of JAX's CUDA plugin accepts the bytecode.

    Lowering needs neither a GPU nor the plugin. JAX's first device in the process must be a CPU
    or a Hopper GPU, since Mosaic reads the size of shared memory from this device.

    Raises:
      ValueError: `kernel.call` is not one Mosaic GPU kernel that reads all arguments in order and
        returns `kernel.outputs` in order. A lowered kernel must not write to its arguments.
    """
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.inputs]
    traced = jax.jit(kernel.call, keep_unused=True).trace(*inputs)
    results = [f"{r.dtype.name}{list(r.shape)}" for r in jax.tree.leaves(traced.out_info)]
    expected = [f"{o.dtype}{list(o.shape)}" for o in kernel.outputs]
    if results != expected:
        raise ValueError(f"{kernel.name} must return {expected}, got {results}")
    module: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    main, *others = module.body.operations
    (block,) = main.regions[0].blocks
    *body, end = block.operations
    if not others and len(body) == 1 and "call_target_name" in body[0].attributes:
        call, attributes = body[0], body[0].attributes
        operands, values = list(call.operands), list(call.results)
        if (
            attributes["call_target_name"].value == "mosaic_gpu_v2"
            and (operands, list(end.operands)) == (list(block.arguments), values)
            and not len(attributes["output_operand_aliases"])
        ):
            return attributes["mhlo.backend_config"]["module"].value_bytes
    raise ValueError(
        f"{kernel.name} must be one Mosaic GPU kernel that has all arguments and results in "
        f"order and does not write to its arguments, got\n{module}"
    )

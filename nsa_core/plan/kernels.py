"""Lists the Mosaic kernels of a problem by planning its steps. No kernel runs."""

import types
from collections.abc import Sequence
from typing import Any

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic.capability import HOPPER
from nsa_core.config import NSAConfig
from nsa_core.plan.planner import PlanOps
from nsa_core.steps import fused
from nsa_core.steps.fused import Inputs
from nsa_core.steps.mosaic_attention import STEPS
from nsa_core.steps.params import Params
from nsa_core.types import Branches
from nsa_core.varlen import Capacity, Varlen

# number of sequences of the packed row that is planned; kernels do not depend on it
SEQUENCES = 8


def kernels_of(
    *,
    length: int,
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    dtype: str,
    config: NSAConfig,
    gradients: bool,
    scale: float | None = None,
    packed: bool = False,
    batch: int = 1,
    compresses: bool = False,
    shared: bool = False,
) -> list[Kernel]:
    """Return the kernels of `attention` for `batch` sequences of `length` tokens, without
    repetitions.

    Args:
      heads, kv_heads, key_width, value_width: H, Hkv, D and Dv.
      dtype: `bfloat16` or `float16`.
      scale: None means 1 / sqrt(key_width).
      gradients: Whether to include the backward pass, and the forward pass that stores residuals.
      packed: Whether rows have several sequences.
      compresses: Whether to include compression by means (torch) and the gradients of tokens. If
        `packed` is also set, each sequence has its own slots (`nsa_core.varlen`).
      shared: Whether all branches read the same tokens.
    """
    ops = PlanOps(HOPPER)
    array = lambda *shape: ops.argument((batch, *shape), dtype)
    place = lambda: ops.argument((batch, length), "int32")
    varlen = None
    if packed and compresses:
        capacity = Capacity(batch, length, length, SEQUENCES, length, config)
        borders = ops.argument((batch, SEQUENCES + 1), "int32")
        varlen = Varlen(ops, capacity, borders)
    layout: Any = types.SimpleNamespace(
        packed=packed, varlen=varlen, padded=False, num_keys=None
    )
    layout.position, layout.key_start, layout.compressed_start = place(), place(), place()
    params = Params(layout, config, scale)
    count = length if compresses else config.num_compressed(length)
    key, value = (
        Branches(array(count, kv_heads, width), *[array(length, kv_heads, width)] * 2)
        for width in (key_width, value_width)
    )
    gates = Branches.each(array(length, heads))
    inputs = Inputs(array(length, heads, key_width), key, value, gates)
    if compresses:
        pair = key.compressed, value.compressed
        inputs = inputs.with_compressed(*STEPS.compression.means(ops, *pair, params))
    blocks = config.num_blocks(length)
    if not gradients:
        out, _ = fused.forward(STEPS, ops, inputs, None, params, blocks)
        return ops.plan([out]).kernels
    out, residuals = fused.forward_with_residuals(STEPS, ops, inputs, None, params, blocks)
    shared = compresses and shared
    found = fused.backward(STEPS, ops, inputs, residuals, out, params, shared)
    if compresses:
        found = fused.gradients_of_tokens(STEPS, ops, found, length, params, shared)
    made = out, found.query, *found.key, *found.value, *found.gates
    return ops.plan([x for x in made if x is not None]).kernels


def kernels_of_layer(
    lengths: Sequence[int],
    *,
    gradients: bool = True,
    packed: bool = False,
    compresses: bool = True,
    **layer: Any,
) -> list[Kernel]:
    """Return the kernels for the calls of a layer, without repetitions. If `gradients` is true, the
    kernels of calls with gradients are included.

    Args:
      lengths: Lengths of sequences.
      compresses: Whether tokens are compressed in the plan, as in torch.
      layer: the other arguments of `kernels_of`.
    """
    calls = [(length, each, True) for length in lengths for each in {False, gradients}]
    if gradients and compresses:
        # Only one kernel, which serves all lengths, depends on whether branches share their
        # tokens.
        calls += [(length, True, False) for length in lengths[:1]]
    found: dict[Kernel, None] = {}
    for length, each, shared in calls:
        call = {"length": length, "gradients": each, "shared": shared, "packed": packed}
        found |= dict.fromkeys(kernels_of(**layer, **call, compresses=compresses))
    return list(found)

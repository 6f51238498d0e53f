"""The public functions on torch tensors. Each function checks its arguments once and then runs
the chosen implementations.

The functions, their arguments and their results are the same as in `nsa_jax`, except that
`cu_seqlens` replaces `segment_ids`, and `context_mesh` replaces `context_axis`. `nsa_core.types`
documents the shapes. `key` and `value` may each be one tensor, or a `Branches` with one tensor per
branch. `implementation` is None (automatic), a name for all branches, or a `Branches` of names. A
named implementation never falls back to another one. These implementations exist:

- `mosaic`: kernels for Hopper GPUs and contiguous 16-bit tensors (`nsa_torch.mosaic`)
- `triton`: kernels for contiguous tensors on NVIDIA GPUs from compute capability 8.0
  (`nsa_torch.triton`)
- `fa2`: FlashAttention-2 for float16 or bfloat16 on CUDA (`nsa_torch.fa2`)
- `sdpa`: torch's scaled_dot_product_attention, on any device
- `jax`: `nsa_jax` through DLPack, with one call forward and one backward
- `reference`: dense computation for tests

A packed batch is one row (`B = 1`, `T = S`) with `cu_seqlens` `[num_seqs + 1]`, int32 or int64,
which starts with 0. Sequence `i` has the tokens `range(cu_seqlens[i], cu_seqlens[i + 1])` and may
be empty. Tokens after the last sequence are padding. In every sequence, positions and block indices
start at 0. No query reads another sequence. On a CPU the host reads the boundaries in `cu_seqlens`,
and invalid boundaries raise `ValueError`. While `nsa_core.debug` reports events, the host reads the
boundaries on every device. On a GPU and under torch.compile, invalid boundaries are corrected:

- A first boundary other than 0 counts as 0.
- A boundary below its predecessor counts as the predecessor.
- A boundary above `T` counts as `T`.

Kernels need tables that are derived from the boundaries. Each call computes the tables again,
unless `varlen_metadata` has made metadata for the batch. The metadata stores the tables.

All functions are differentiable with respect to floating-point tensors, through the outputs and
through the log-sum-exp. Only `fa2` raises an error for a gradient through the log-sum-exp. No
gradient flows through the block indices. Only `reference` has second derivatives. With other
implementations, a backward pass that autograd records (`create_graph=True`) raises an error.
Invalid input raises `ValueError`. The error message names the argument, the rule and the value. A
call that a named implementation does not support raises `NotImplementedError`.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from nsa_core import debug, validate
from nsa_core.array_ops import zero_padding
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.dispatch import Choices
from nsa_core.types import Branches
from nsa_torch import checks, plans
from nsa_torch.call import KERNELS, PlannedProgram, signature_of
from nsa_torch.chunks import combine
from nsa_torch.compress import compress as compress_windows
from nsa_torch.debug import TORCH
from nsa_torch.dispatch import REGISTRY, choose, problem_key, problem_of
from nsa_torch.geometry import geometry_of
from nsa_torch.plain import as_given
from nsa_torch.varlen import VarlenMetadata, borders_of

type Name = Literal["mosaic", "triton", "fa2", "sdpa", "jax", "reference", "invariant"]
type Names = Name | Branches[Name | None] | None


def attention(
    query: Tensor,
    key: Tensor | Branches[Tensor],
    value: Tensor | Branches[Tensor],
    gates: Tensor | Branches[Tensor],
    *,
    config: NSAConfig = NSAConfig(),
    compressed: tuple[Tensor, Tensor] | None = None,
    block_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
    scale: float | None = None,
    recompute: bool = False,
    implementation: Names = None,
    context_mesh: DeviceMesh | None = None,
    context_layout: Layout = "zigzag",
) -> Tensor:
    """Compute causal Native Sparse Attention, `sum_c gate[c] * attention_c(query)` (Eq. 5).

    Source: arXiv 2502.11089 v2. The queries are the last `T` of the `S` tokens.

    Args:
      query: `[B, T, H, D]`, floating point.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`, or `Branches` of them.
      gates: `Branches` of `[B, T, H]`, or one tensor `[B, T, H, 3]` in the branches' order.
      config: block sizes, strides and number of selected blocks; the defaults come from the paper.
        `config.compute_dtype` is for inference only.
      compressed: the pair `(k_cmp, v_cmp)` of compressed keys `[B, C, Hkv, D]` and values `[B, C,
        Hkv, Dv]`; `compressed=None` means that each compressed token is the mean of its window.
      block_indices: int32 `[B, T, Hkv, n]`, -1 in empty slots, no duplicates; None means that
        the blocks are selected by the scores of the compressed branch.
      cu_seqlens: `[num_seqs + 1]`, the boundaries of a packed batch (see the module).
      varlen: the result of `varlen_metadata`, which replaces `cu_seqlens`. Call `varlen_metadata`
        once per batch.
      scale: factor of the logits, a positive number; None means `D**-0.5`.
      recompute: whether to save only the inputs and the block indices for the backward pass. With
        `recompute`, the backward pass computes the branches again. If `recompute` is False, three
        more tensors of the output's size are saved.
      context_mesh: one dimension of a mesh whose ranks share the sequence (`nsa_torch.context`).
        With a mesh, the tensors contain only the tokens of this rank (`T = S`), but the arguments
        `compressed` and `cu_seqlens` describe the whole sequence.
      context_layout: distribution of the tokens over ranks, `zigzag` or `contiguous`.
      implementation: a name for all steps, or `Branches` of names; None means automatic.

    Returns:
      The output, `[B, T, H, Dv]` in the dtype of `query`.

    Raises:
      ValueError: An argument has a shape, dtype, device or value that no implementation supports.
      NotImplementedError: The named implementation cannot run this call. The error is also raised
        if `config.compute_dtype` is set and the Mosaic kernels cannot run the call.
    """
    if context_mesh is not None:
        from nsa_torch import context

        arguments = query, key, value, gates, compressed, block_indices, cu_seqlens
        how = config, scale, recompute, implementation
        return context.attention(arguments, varlen, *how, context_mesh, context_layout)
    if varlen is not None:
        cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    elif cu_seqlens is not None and isinstance(query, Tensor):
        cu_seqlens = checks.clamped(cu_seqlens, query.shape[1])
    arguments = query, key, value, gates, compressed, block_indices, cu_seqlens
    return decided(arguments, config, scale, recompute, implementation)


def decided(arguments, config, scale, recompute, implementation, checked: bool = False):
    """Run `attention` on checked or unchecked arguments. If a call with the same signature ran
    before, its stored program runs.

    Args:
      arguments: The tensors of the call, with boundaries that have been clamped.
      checked: whether the arguments have been checked. If `checked` is true, `key` and `value` are
        `Branches`. In addition, the queries of a packed row may be the last `T` of the row's first
        `S` tokens.
    """
    signature, tensors = None, []
    if not torch.compiler.is_compiling():
        given = implementation, config, scale, recompute, checked
        signature, tensors = signature_of(arguments, *given)
        if signature is not None and (known := plans.KNOWN.get(signature)) is not None:
            if torch.is_autocast_enabled(tensors[0].device.type):
                with as_given(arguments[0]):
                    return known(tensors)
            return known(tensors)
    query, key, value, gates, compressed, block_indices, cu_seqlens = arguments
    key, value = Branches.each(key), Branches.each(value)
    if checked:
        gates = validate.gates(gates, query)
    else:
        validate.flag("recompute", recompute)
        checks.tensors(query=query, gates=gates)
        gates = checks.gates(gates, query)
        rest = compressed, block_indices, cu_seqlens
        checks.attention(query, key, value, *rest, config, scale)
    problem = _problem(query, key, value, config, cu_seqlens, compressed)
    chosen = choose(problem_key(*problem, gates), implementation)
    with as_given(query):
        if signature is not None and chosen.attention in KERNELS:
            path: Any = chosen.load("attention")
            program = PlannedProgram(path, signature, config, tensors)
            return plans.keep(signature, program)(tensors)
        lengths = {"config": config, "kv_len": key.selected.shape[1], "cu_seqlens": cu_seqlens}
        if compressed is None and (chosen.attention is None or debug.stepwise(TORCH, query)):
            phi = debug.watch(TORCH, "compress", "torch", compress_windows)
            packed = {"config": config, "cu_seqlens": cu_seqlens}
            compressed = phi(key.compressed, **packed), phi(value.compressed, **packed)
        tensors = query, key, value, gates, compressed, block_indices
        return attend(*tensors, chosen, lengths | {"scale": scale}, recompute=recompute)


def attend(
    query,
    key,
    value,
    gates,
    compressed,
    block_indices,
    chosen,
    lengths,
    assume_finite=False,
    recompute=False,
):
    """Run the chosen implementation of each step on compressed tokens that already exist.

    Args:
      query .. block_indices: as in `attention`, but `key`, `value` and `gates` are `Branches`.
      compressed: the compressed keys and values. `compressed=None` means that compressed tokens
        are means, which requires one implementation that runs all steps.
      lengths: a dictionary with `config`, `kv_len`, `cu_seqlens` and `scale`.
      assume_finite: whether keys and values that no query attends to are known to be finite.

    Returns:
      The output, `[B, T, H, Dv]`.
    """

    def by_branch(query, block_indices, cu_seqlens, *rest):
        key, value, gates = (Branches(*rest[i : i + 3]) for i in (0, 3, 6))
        place = lengths | {"cu_seqlens": cu_seqlens}
        options = place | {"with_lse": False}
        selected = key.selected, value.selected, block_indices
        outputs = Branches(
            chosen.load("compressed")(query, *rest[9:], **options)[0],
            chosen.load("selected")(query, *selected, **options)[0],
            chosen.load("sliding")(query, key.sliding, value.sliding, **options)[0],
        )
        place.pop("scale")
        gates = Branches(*zero_padding(torch, geometry_of(query, **place), *gates))
        return debug.watch(TORCH, "combine", "torch", combine)(outputs, gates)

    with as_given(query):
        if chosen.attention is not None and not debug.stepwise(TORCH, query):
            tensors = query, key, value, gates, compressed, block_indices
            whole = chosen.load("attention")
            return whole(*tensors, **lengths, assume_finite=assume_finite, recompute=recompute)
        if block_indices is None:
            block_indices = chosen.load("scores")(query, compressed[0], **lengths)
        # `torch.utils.checkpoint` detects later writes to tensors that are its direct
        # arguments, and calls saved-tensor hooks for them. For tensors in tuples it does neither.
        tensors = block_indices, lengths["cu_seqlens"], *key, *value, *gates, *compressed
        if not (recompute and torch.is_grad_enabled()):
            return by_branch(query, *tensors)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(by_branch, query, *tensors, **options)


def compress(
    x: Tensor,
    params: CompressParams = None,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
) -> Tensor:
    """Apply `phi` to windows of `l` tokens, which begin every `d` tokens (Eq. 7).

    Args:
      x: keys or values `[B, S, Hkv, D]`.
      params: the parameters of `phi`, `PoolParams`, `MLPParams` or `RopeMLPParams`. `params=None`
        means that `phi` is the mean.
      config: the sizes `compress_block` (`l`) and `compress_stride` (`d`) of the windows.
      cu_seqlens: `[num_seqs + 1]`, the boundaries of a packed batch. The compressed tokens of all
        sequences of the batch are in the order of their first tokens, without gaps. The remaining
        slots of the result are zeros.
      varlen: as in `attention`.

    Returns:
      The compressed tokens, `[B, C, Hkv, D]` in the dtype of `x`, `C = config.num_compressed(S)`.

    Raises:
      ValueError: Shapes or dtypes do not fit.
    """
    checks.tensors(x=x)
    validate.array("x", x, 4)
    validate.phi(params, x, config)
    cu_seqlens = borders_of(cu_seqlens, varlen, x, "x", config)
    checks.packed(cu_seqlens, x, "x")
    checks.parameters((params,), x, "x")
    cu_seqlens = checks.clamped(cu_seqlens, x.shape[1])
    with as_given(x):
        return compress_windows(x, params, config=config, cu_seqlens=cu_seqlens)


def select_blocks(
    query: Tensor,
    compressed_key: Tensor,
    *,
    config: NSAConfig,
    kv_len: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> Tensor:
    """Select the blocks that each query reads (Eqs. 8-12), without gradient.

    If scores are equal, the block with the lower index is chosen. A score underflows in float32 if
    each of its logits is at least 87 below the log-sum-exp (at least 103 for `sdpa` and `fa2` on a
    GPU). Most implementations treat scores that underflow as 0. Scores that underflow are still
    ordered by `reference` on every device, and by `sdpa` and `jax` on a CPU
    (docs/kernels/numerics.md).

    Args:
      query: `[B, T, H, D]`.
      compressed_key: `[B, C, Hkv, D]`.
      config: the block sizes and the number of selected blocks.
      kv_len: Number of keys, an int, or an int32 or int64 tensor `[]` or `[B]`. Query `t` has
        position `t + kv_len - T`. `kv_len=None` means `T`. If the batch is not packed and `kv_len`
        is an int or None, `C` must be `config.num_compressed(kv_len)`. If `kv_len` is a tensor,
        `compressed_key` may have more entries than `kv_len` keys need.
      cu_seqlens, varlen: boundaries of a packed batch, as in `attention`.
      scale: factor of the logits; None means `D**-0.5`.
      implementation: a name; None means automatic.

    Returns:
      The selected blocks, int32 `[B, T, Hkv, n]`, ascending, with -1 in the empty slots at the end.

    Raises:
      ValueError: An argument has a shape, dtype, device or value that no implementation supports.
      NotImplementedError: The named implementation cannot run this call.
    """
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    kv_len = checks.scoring(query, compressed_key, config, kv_len, cu_seqlens, scale)
    memory = {"query": query, "compressed_key": compressed_key}
    return one_step("scores", implementation, memory, config, kv_len, cu_seqlens, scale)


def compressed_attention(
    query: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    *,
    config: NSAConfig,
    kv_len: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over compressed tokens. A query at position `p` attends to compressed
    token `i` if and only if `p >= i*d + l - 1`.

    Args: the same as in `select_blocks`, and `compressed_value` `[B, C, Hkv, Dv]`.

    Returns:
      `(out, lse)`, where `out` is `[B, T, H, Dv]`, and `lse` is the natural log-sum-exp `[B, T,
      H]` in float32, or in float64 for float64 input. SDPA does not return the log-sum-exp. To
      get the log-sum-exp, `sdpa` on a GPU computes the product `q . k` a second time.

    Raises: the same errors as `select_blocks`.
    """
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    kv_len = checks.scoring(query, compressed_key, config, kv_len, cu_seqlens, scale)
    checks.compressed(query, compressed_key, compressed_value, config, kv_len)
    memory = {"query": query, "compressed_key": compressed_key}
    memory["compressed_value"] = compressed_value
    return one_step("compressed", implementation, memory, config, kv_len, cu_seqlens, scale)


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    kv_len: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each query to the keys of its selected blocks, up to its own position.
    Return `(out, lse)`.

    Args:
      query: `[B, T, H, D]`.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`.
      block_indices: int32 `[B, T, Hkv, n]`, -1 in empty slots, no duplicates. In a packed batch
        the indices count from the start of each sequence. Keys after the query are always
        masked.
      config: the block sizes and the number of selected blocks.
      kv_len: number of valid keys, an int, or an int32 or int64 tensor `[]` or `[B]`; None means
        `S`.
      cu_seqlens, varlen, scale, implementation: as in `select_blocks`.

    Returns: the same as `compressed_attention`.
    Raises: the same errors as `select_blocks`.
    """
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    checks.tokens(query, key, value, config, cu_seqlens, scale)
    checks.indices(block_indices, query, key, config)
    kv_len = checks.length(kv_len, query, cu_seqlens, key.shape[1])
    memory = {"query": query, "key": key, "value": value}
    place = config, kv_len, cu_seqlens, scale
    return one_step("selected", implementation, memory, *place, block_indices)


def sliding_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: NSAConfig,
    kv_len: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each query to the last `window` keys up to its own key.
    Return `(out, lse)`.

    Args: as in `selected_attention`, without `block_indices`.

    Returns: the same as `compressed_attention`.
    Raises: the same errors as `select_blocks`.
    """
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    checks.tokens(query, key, value, config, cu_seqlens, scale)
    kv_len = checks.length(kv_len, query, cu_seqlens, key.shape[1])
    memory = {"query": query, "key": key, "value": value}
    return one_step("sliding", implementation, memory, config, kv_len, cu_seqlens, scale)


def one_step(step, implementation, memory, config, kv_len, cu_seqlens, scale, *lists):
    """Choose an implementation for one step of attention and run the step.

    Args:
      memory: the query, the keys and the values, keyed by argument name.
      lists: block indices, if the step reads block indices.
    """
    query, key, *_ = tensors = [*memory.values()]
    width, packed = tensors[-1].shape[-1], cu_seqlens is not None
    problem = problem_key(query, key, width, config, packed, memory)
    run = choose(problem, implementation, step).load(step)
    borders = checks.clamped(cu_seqlens, query.shape[1])
    lengths = dict(config=config, kv_len=kv_len, cu_seqlens=borders, scale=scale)
    with as_given(query):
        return run(*memory.values(), *lists, **lengths)


def explain(
    query: Tensor,
    key: Tensor | Branches[Tensor],
    value: Tensor | Branches[Tensor],
    gates: Tensor | Branches[Tensor] | None = None,
    *,
    config: NSAConfig = NSAConfig(),
    compressed: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    varlen: VarlenMetadata | None = None,
    implementation: Names = None,
) -> Choices:
    """Report which implementations `attention` would choose for these arguments.

    Args: The same as in `attention`. Arguments of `attention` that `explain` lacks do not affect
      the choice, except `context_mesh`. `gates` affect the choice only if no other argument
      requires a gradient. The argument `compressed` affects the choice only if its tensors require
      a gradient, or if kernels cannot read the memory layout of its tensors.

    Returns:
      One choice per step, with the reason why each earlier candidate was refused. The printed
      result has one line per step.

    Raises: the same errors as `attention`.
    """
    key, value = Branches.each(key), Branches.each(value)
    each = ()
    if gates is not None:
        checks.tensors(query=query, gates=gates)
        each = checks.gates(gates, query)
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    checks.attention(query, key, value, compressed, None, cu_seqlens, config, None)
    problem = _problem(query, key, value, config, cu_seqlens, compressed)
    return REGISTRY.choices(problem_of(*problem_key(*problem, each)), implementation)


def _problem(query, key, value, config, cu_seqlens, compressed=None):
    """Return the arguments `query .. memory` of `dispatch.problem_key` for a call of
    `attention`."""
    memory = {"query": query}
    for name, x in (("key", key), ("value", value)):
        memory |= {f"{name}.selected": x.selected, f"{name}.sliding": x.sliding}
    if compressed is not None:
        memory |= dict(zip(("compressed_key", "compressed_value"), compressed, strict=True))
    width, packed = value.selected.shape[-1], cu_seqlens is not None
    return query, key.selected, width, config, packed, memory

"""The public functions on torch tensors: validation once, then the chosen implementations.

Names, arguments and numbers are those of `nsa_jax`; shapes are those of `nsa_core.types`.
Wherever `key`/`value` is taken, a `Branches` of tensors is taken too. `implementation` is None
(automatic), a name for all branches, or a `Branches` of names; a named one never falls back:
  `mosaic`     kernels (Hopper, 16-bit, contiguous tensors; see `nsa_torch.mosaic`)
  `triton`     kernels (NVIDIA from 8.0, contiguous tensors; see `nsa_torch.triton`)
  `fa2`        FlashAttention-2 (CUDA, float16 or bfloat16; see `nsa_torch.fa2`)
  `sdpa`       torch's scaled_dot_product_attention, any device
  `jax`        `nsa_jax` through DLPack, one call forward and one backward
  `reference`  dense, for tests

A packed batch is one row (`B = 1`, `T = S`) with `cu_seqlens` `[num_seqs + 1]`, int32 or
int64, from 0: sequence `i` is `cu_seqlens[i] .. cu_seqlens[i + 1] - 1`, may be empty, and what
follows the last is padding. Positions restart, nothing crosses a border, block indices are
local to the sequence. Where the host reads the numbers (on a CPU, and anywhere while
`nsa_torch.debug` tells events), wrong ones raise `ValueError`. Elsewhere (on a GPU, and under
torch.compile) they are put right:
  the first is not 0                  it counts as 0
  one is less than the one before it  it counts as that one
  one is beyond `T`                   it counts as `T`
What follows from them is made anew in each call, or once a batch: `varlen_metadata`.

All functions return gradients for floating tensors, through the log-sum-exp too, where `fa2`
alone has none and raises; none flows through the block indices. `reference` alone has second
derivatives: of the others a backward pass that autograd records (`create_graph=True`) raises.
Bad input raises `ValueError` (argument, expected, got); what an implementation cannot do raises
`NotImplementedError`.
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
from nsa_torch.call import KERNELS, Program, describe
from nsa_torch.combine import combine
from nsa_torch.compress import compress as compress_windows
from nsa_torch.debug import TORCH
from nsa_torch.dispatch import REGISTRY, choose, description, problem_of
from nsa_torch.geometry import geometry_of
from nsa_torch.plain import as_given
from nsa_torch.varlen import VarlenMetadata, borders_of

type Name = Literal["mosaic", "triton", "fa2", "sdpa", "jax", "reference"]
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
    """Native Sparse Attention, `sum_c gate[c] * attention_c(query)` (Eq. 5), causal.

    Source: arXiv 2502.11089 v2. The queries are the last `T` of the `S` tokens.

    Args:
      query: `[B, T, H, D]`, float.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`, or `Branches` of them.
      gates: `Branches` of `[B, T, H]`, or one tensor `[B, T, H, 3]` in the branches' order.
      config: the sizes; defaults are the paper's. Its `compute_dtype` is for inference.
      compressed: `(k_cmp, v_cmp)`, `[B, C, Hkv, D]` and `[B, C, Hkv, Dv]`; None: the mean.
      block_indices: int32 `[B, T, Hkv, n]`, -1 in empty slots, no duplicates; None: selected
        from the compressed scores.
      cu_seqlens: `[num_seqs + 1]`, a packed batch (see the module).
      varlen: in place of `cu_seqlens`, what `varlen_metadata` made of them once a batch.
      scale: of the logits; None: `D**-0.5`.
      recompute: keep inputs and selection for the backward pass, which then computes the
        branches again; else three tensors like the output are kept besides.
      context_mesh: one dimension of a mesh whose ranks share the sequence (`nsa_torch.context`);
        the tensors are then this rank's tokens, `T = S`, but `compressed` and `cu_seqlens` are
        those of the whole sequence.
      context_layout: which tokens a rank has, `zigzag` or `contiguous`.
      implementation: a name for all steps, or `Branches` of names; None: automatic.

    Returns:
      `[B, T, H, Dv]` in the dtype of `query`.

    Raises:
      ValueError: an argument that no implementation could take.
      NotImplementedError: the named implementation cannot run this.
    """
    if context_mesh is not None:
        from nsa_torch import context

        return context.attention(
            *(query, key, value, gates),
            config=config,
            compressed=compressed,
            block_indices=block_indices,
            cu_seqlens=cu_seqlens,
            varlen=varlen,
            scale=scale,
            recompute=recompute,
            implementation=implementation,
            context_mesh=context_mesh,
            context_layout=context_layout,
        )
    if varlen is not None:
        cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    elif cu_seqlens is not None and isinstance(query, Tensor):
        cu_seqlens = checks.clamped(cu_seqlens, query.shape[1])
    arguments = query, key, value, gates, compressed, block_indices, cu_seqlens
    return decided(arguments, config, scale, recompute, implementation)


def decided(arguments, config, scale, recompute, implementation, checked: bool = False):
    """`attention`, of a known call by its program.

    Args:
      arguments: its tensors, of which borders are clamped.
      checked: they are known to fit, `key` and `value` as `Branches`; of a packed row the queries
        may then be the last `T` of the first `S` tokens.
    """
    call, tensors = None, []
    if not torch.compiler.is_compiling():
        call, tensors = describe(arguments, implementation, config, scale, recompute, checked)
        if call is not None and (known := plans.PROGRAMS.get(call)) is not None:
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
    chosen = choose(description(*problem, gates), implementation)
    with as_given(query):
        if call is not None and chosen.attention in KERNELS:
            path: Any = chosen.load("attention")
            return plans.keep(call, Program(path, call, config, tensors))(tensors)
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
    """The steps as `chosen`, on compressed tokens that are there already (see `cache.py`).

    Args:
      query .. block_indices: as of `attention`, `key`, `value` and `gates` as `Branches`.
      compressed: None, the means, only where `chosen` runs all steps at once.
      lengths: `config`, `kv_len`, `cu_seqlens` and `scale` by name.
      assume_finite: keys and values that no query may look at are finite.

    Returns:
      `[B, T, H, Dv]`.
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
        # Of tensors that are its arguments, not of those in tuples, a checkpoint knows whether they
        # were written to since, and tells hooks.
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
    """`phi` over windows of `l` tokens, one each `d` tokens (Eq. 7).

    Args:
      x: keys or values `[B, S, Hkv, D]`.
      params: None: the mean; `PoolParams`, `MLPParams` of tensors: learnable.
      cu_seqlens: `[num_seqs + 1]`; the tokens of all sequences then stand in the order of
        their first token, without gaps, zeros in the slots left over.
      varlen: as of `attention`.

    Returns:
      `[B, C, Hkv, D]`, `C = config.num_compressed(S)`.

    Raises:
      ValueError: shapes or dtypes that do not fit.
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
    """The blocks that each query reads (Eqs. 8-12), without gradient.

    Of equal scores the lower block is chosen. Scores too small for float32, of logits 87 less than
    the log-sum-exp, `reference`, and `sdpa` on a CPU, order too; others take them for 0
    (docs/kernels/numerics.md).

    Args:
      query: `[B, T, H, D]`.
      compressed_key: `[B, C, Hkv, D]`.
      config: the sizes.
      kv_len: number of keys, an int, or int32 or int64 `[]` or `[B]` (`compressed_key` may
        then be longer than they need); query `t` is at `t + kv_len - T`. None: `T`.
      cu_seqlens, varlen: of a packed batch, as of `attention`.
      scale: of the logits; None: `D**-0.5`.
      implementation: a name; None: automatic.

    Returns:
      int32 `[B, T, Hkv, n]`, ascending, -1 in the empty slots at the end.

    Raises:
      ValueError: an argument that no implementation could take.
      NotImplementedError: the named implementation cannot run this.
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
    """Attention over compressed tokens; position `p` sees token `i` iff `p >= i*d + l - 1`.

    Args: as of `select_blocks`; `compressed_value`: `[B, C, Hkv, Dv]`. Raises: as `select_blocks`.

    Returns:
      `(out, lse)`: `[B, T, H, Dv]`, and the natural log-sum-exp `[B, T, H]` in float32. SDPA
      gives none: there it costs a second product `q . k`.
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
    """Attention over the keys of the selected blocks at or before the query: `(out, lse)`.

    Args:
      query: `[B, T, H, D]`.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`.
      block_indices: int32 `[B, T, Hkv, n]`, -1 in empty slots, no duplicates; local to the
        sequence in a packed batch. Keys behind the query are not seen, whatever it names.
      config: the sizes.
      kv_len: number of valid keys, an int, or int32 or int64 `[]` or `[B]`; None: `S`.
      cu_seqlens, varlen, scale, implementation: as of `select_blocks`.

    Returns: as `compressed_attention`. Raises: as `select_blocks`.
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
    """Attention over the last `window` keys, the query's own included: `(out, lse)`.

    Args: as of `selected_attention`, without `block_indices`.

    Returns: as `compressed_attention`. Raises: as `select_blocks`.
    """
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    checks.tokens(query, key, value, config, cu_seqlens, scale)
    kv_len = checks.length(kv_len, query, cu_seqlens, key.shape[1])
    memory = {"query": query, "key": key, "value": value}
    return one_step("sliding", implementation, memory, config, kv_len, cu_seqlens, scale)


def one_step(step, implementation, memory, config, kv_len, cu_seqlens, scale, *lists):
    """One step alone, chosen and run.

    Args:
      memory: the query, the keys and the values by name.
      lists: block indices, if the step reads them.
    """
    query, key, *_ = tensors = [*memory.values()]
    width, packed = tensors[-1].shape[-1], cu_seqlens is not None
    problem = description(query, key, width, config, packed, memory)
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
    """What `attention` would run for these arguments (without `context_mesh`), and why not what
    stands before it.

    Args: as of `attention`. `gates` have a say where they alone want a gradient, `compressed`
      where they want one or lie in memory in another way.

    Returns:
      A choice a step, with the reason of each refusal; printed, a line each.

    Raises: as `attention`.
    """
    key, value = Branches.each(key), Branches.each(value)
    each = ()
    if gates is not None:
        checks.tensors(query=query, gates=gates)
        each = checks.gates(gates, query)
    cu_seqlens = borders_of(cu_seqlens, varlen, query, "query", config)
    checks.attention(query, key, value, compressed, None, cu_seqlens, config, None)
    problem = _problem(query, key, value, config, cu_seqlens, compressed)
    return REGISTRY.choices(problem_of(*problem, gates=each), implementation)


def _problem(query, key, value, config, cu_seqlens, compressed=None):
    """What decides between the implementations of `attention`, for `dispatch`."""
    memory = {"query": query}
    for name, x in (("key", key), ("value", value)):
        memory |= {f"{name}.selected": x.selected, f"{name}.sliding": x.sliding}
    if compressed is not None:
        memory |= dict(zip(("compressed_key", "compressed_value"), compressed, strict=True))
    width, packed = value.selected.shape[-1], cu_seqlens is not None
    return query, key.selected, width, config, packed, memory

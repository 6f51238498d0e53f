"""The public functions. Each function checks its arguments once and then runs the chosen
implementation of every step.

`nsa_core.types` explains the letters of shapes, `B T S H Hkv D Dv C N n`. Each of the arguments
`key` and `value` is one array, or a `Branches` with one array per branch (paper section 3.3.3).
`implementation` is None (automatic), a name for all branches, or a `Branches` of names. A named
implementation never falls back to another one. Every function raises `ValueError` for input that no
implementation supports. The error message names the argument, the rule and the value. If a named
implementation cannot run the call, the function raises `NotImplementedError`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nsa_core import debug, validate
from nsa_core.array_ops import zero_padding
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.dispatch import Choice, Choices
from nsa_core.types import RESIDUAL, Branches
from nsa_jax import branches, checks, geometry, jax_debug
from nsa_jax.compression import CompressParams
from nsa_jax.compression import compress as compress_windows
from nsa_jax.dispatch import REGISTRY
from nsa_jax.eager import any_rank, compiled
from nsa_jax.geometry import PackedRows, rows_of
from nsa_jax.jax_problem import problem_of

type Name = Literal["mosaic", "triton", "xla", "reference"]
type Names = Name | Branches[Name | None] | None
type KeyLength = int | Int[Array, ""] | Int[Array, " B"] | None
type OutLse = tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]


@any_rank
def attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Branches[Array],
    value: Float[Array, "B S Hkv Dv"] | Branches[Array],
    gates: Float[Array, "B T H 3"] | Branches[Array],
    *,
    config: NSAConfig = NSAConfig(),
    compressed: tuple[Array, Array] | None = None,
    block_indices: Int[Array, "B T Hkv n"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
    scale: float | None = None,
    recompute: bool = False,
    implementation: Names = None,
    context_axis: str | None = None,
    context_layout: Layout = "zigzag",
) -> Float[Array, "B T H Dv"]:
    """Compute causal Native Sparse Attention, `sum_c gate[c] * attention_c(query)` (Eq. 5).

    Source: arXiv 2502.11089 v2. The queries are the last `T` of the `S` tokens.

    Args:
      query: `[B, T, H, D]`, floating point.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`, or `Branches` of them.
      gates: `Branches` of `[B, T, H]`, or one array `[B, T, H, 3]` in the branches' order.
      config: block sizes, strides and number of selected blocks; the defaults come from the paper.
        `config.compute_dtype` is for inference only.
      compressed: the pair `(k_cmp, v_cmp)` of compressed keys `[B, C, Hkv, D]` and values `[B, C,
        Hkv, Dv]`; `compressed=None` means that each compressed token is the mean of its window.
      block_indices: int32 `[B, T, Hkv, n]`, -1 in empty slots, no duplicates; None means that
        the blocks are selected by the scores of the compressed branch.
      segment_ids: int `[B, S]`, for packed rows. Consecutive tokens with the same id are one
        sequence. Tokens with a negative id are padding. The outputs of padding are 0, and no
        query attends to padding.
      varlen: the result of `varlen_metadata`, which replaces `segment_ids`. Call
        `varlen_metadata` once for all layers.
      scale: factor of the logits; None means `D**-0.5`.
      recompute: whether to save only the inputs and the block indices for the backward pass. If
        `recompute` is True, the backward pass computes the branches again. If `recompute` is False,
        three more arrays of the output's size are saved.
      context_axis: inside `jax.shard_map`, the mesh axis whose devices share the sequence
        (`nsa_jax.context`). With `context_axis`, the arrays contain only the tokens of this device
        (`T = S`), but the argument `compressed` describes the whole sequence.
      context_layout: distribution of the tokens over devices, `zigzag` or `contiguous`.
      implementation: a name for all steps, or `Branches` of names; None means automatic.

    Returns:
      The output, `[B, T, H, Dv]` in the dtype of `query`.

    Raises:
      ValueError: An argument has a value that no implementation supports.
      NotImplementedError: The named implementation cannot run this call. `NotImplementedError` is
        also raised if no implementation supports `config.compute_dtype` on this device, in context
        parallelism or for a gradient.
    """
    validate.flag("recompute", recompute)
    key, value = map(Branches.each, (key, value))
    gates = validate.gates(gates, query)
    _check(query, key, value, config, segment_ids, scale)
    rows = rows_of(segment_ids, varlen, config, *key.selected.shape[:2])
    segment_ids = geometry.ids_of(rows)
    if context_axis is not None:
        from nsa_jax import context

        return context.attention(
            query,
            key,
            value,
            gates,
            config=config,
            compressed=compressed,
            block_indices=block_indices,
            segment_ids=segment_ids,
            scale=scale,
            recompute=recompute,
            implementation=implementation,
            context_axis=context_axis,
            context_layout=context_layout,
        )
    if compressed is None:
        phi = debug.watch(jax_debug.JAX, "compress", "xla", compiled(compress_windows))
        compressed = (
            phi(key.compressed, config=config, segment_ids=rows),
            phi(value.compressed, config=config, segment_ids=rows),
        )
    return attend(
        query,
        key,
        value,
        gates,
        compressed,
        config=config,
        block_indices=block_indices,
        kv_len=key.selected.shape[1],
        segment_ids=rows,
        scale=scale,
        recompute=recompute,
        implementation=implementation,
    )


def _check(query, key, value, config, segment_ids, scale):
    for *names, k, v in validate.named(key, value):
        validate.attention(query, k, v, config, segment_ids, scale, *names)
    validate.same_in_branches(key, value)


def attend(
    query,
    key: Branches,
    value: Branches,
    gates: Branches,
    compressed,
    *,
    config,
    kv_len,
    scale,
    implementation,
    block_indices=None,
    segment_ids=None,
    recompute=False,
    assume_finite=False,
):
    """Run all steps of `attention` after compression, on compressed tokens that already exist.

    Args:
      assume_finite: Whether keys and values after `kv_len` are finite and no query is padding. If
        `assume_finite` is true, kernels need no copies of the inputs with zeros in place of
        padding.
    """
    compressed_key, compressed_value = validate.pair(compressed)
    validate.compressed(query, compressed_key, compressed_value, config, kv_len, value.selected)
    if block_indices is not None:
        validate.indices(block_indices, query, key.selected, config)
        checks.distinct(block_indices)
    chosen = choices_of(
        query, key.selected, value.selected.shape[-1], config, segment_ids, implementation
    )
    rest = dict(config=config, kv_len=kv_len, segment_ids=segment_ids, scale=scale)
    arrays = query, key, value, gates, compressed
    if chosen.attention is not None and not debug.stepwise(jax_debug.JAX, *arrays):
        how = {"recompute": recompute, "assume_finite": assume_finite}
        return function_of(chosen.attention)(*arrays, block_indices, **rest, **how)
    if block_indices is None:
        block_indices = function_of(chosen.scores)(query, compressed_key, **rest)
        block_indices = checkpoint_name(block_indices, RESIDUAL)
    steps = Branches(*(function_of(getattr(chosen, x)) for x in Branches._fields))
    by_branch = _recomputing if recompute else _by_branch
    if recompute and not debug.on:
        by_branch = compiled(by_branch)
    return by_branch(steps, *arrays, block_indices, **rest)


def _by_branch(steps, query, key, value, gates, compressed, block_indices, **rest):
    selected = key.selected, value.selected, block_indices
    outputs = Branches(
        steps.compressed(query, *compressed, **rest)[0],
        steps.selected(query, *selected, **rest)[0],
        steps.sliding(query, key.sliding, value.sliding, **rest)[0],
    )
    outputs = Branches(*(checkpoint_name(out, RESIDUAL) for out in outputs))
    combine = compiled(_gated_sum)
    return debug.watch(jax_debug.JAX, "combine", "xla", combine)(outputs, gates, **rest)


def _gated_sum(outputs, gates, *, config, kv_len, segment_ids, scale):
    del scale  # only the branches, which compute logits, use the scale
    where = geometry.layout_of(gates.compressed, 0, config, kv_len, segment_ids)
    return branches.combine(outputs, Branches(*zero_padding(jnp, where, *gates)))


def _recomputing(steps, *arrays, **rest):
    return jax.checkpoint(functools.partial(_by_branch, steps, **rest))(*arrays)


@any_rank
def compress(
    x: Float[Array, "B S Hkv D"],
    params: CompressParams = None,
    *,
    config: NSAConfig,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
) -> Float[Array, "B C Hkv D"]:
    """Apply `phi` to windows of `l` tokens, which begin every `d` tokens (Eq. 7).

    Args:
      x: keys or values `[B, S, Hkv, D]`.
      params: the parameters of `phi`, `PoolParams`, `MLPParams` or `RopeMLPParams`
        (`nsa_core.compress_params`). `params=None` means that `phi` is the mean.
      config: the block sizes.
      segment_ids: `[B, S]`, for packed rows. The compressed tokens of all sequences in a row are
        in the order of their first tokens, without gaps. The remaining slots of the result are
        zeros.
      varlen: as in `attention`.

    Returns:
      The compressed tokens, `[B, C, Hkv, D]`, `C = config.num_compressed(S)`.

    Raises:
      ValueError: Shapes or dtypes do not fit.
    """
    validate.array("x", x, 4)
    validate.phi(params, x, config)
    rows = rows_of(segment_ids, varlen, config, *x.shape[:2])
    validate.segments(geometry.ids_of(rows), x.shape[0], x.shape[1])
    return compiled(compress_windows)(x, params, config=config, segment_ids=rows)


@any_rank
def select_blocks(
    query: Float[Array, "B T H D"],
    compressed_key: Float[Array, "B C Hkv D"],
    *,
    config: NSAConfig,
    kv_len: KeyLength = None,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> Int[Array, "B T Hkv n"]:
    """Select the blocks that each query reads (Eqs. 8-12), without gradient.

    If scores are equal, the block with the lower index is chosen. A score underflows in float32 if
    its logit is at least 87 below the log-sum-exp. Most implementations treat scores that underflow
    as 0. Scores that underflow are still ordered by `reference` on every device, and by `xla` on a
    CPU (docs/kernels/numerics.md).

    Args:
      query: `[B, T, H, D]`.
      compressed_key: `[B, C, Hkv, D]`.
      config: the block sizes and the number of selected blocks.
      kv_len: number of keys, an int or int32 `[]` or `[B]`. Query `t` has position `t + kv_len -
        T`. `kv_len=None` means `T`.
      segment_ids, varlen: descriptions of packed rows, as in `attention`.
      scale: factor of the logits; None means `D**-0.5`.
      implementation: a name; None means automatic.

    Returns:
      The selected blocks, int32 `[B, T, Hkv, n]`, ascending, with -1 in the empty slots at the end.

    Raises:
      ValueError: An argument has a value that no implementation supports.
      NotImplementedError: The named implementation cannot run this call.
    """
    arrays = query, compressed_key
    return _step("scores", arrays, config, kv_len, segment_ids, varlen, scale, implementation)


@any_rank
def compressed_attention(
    query: Float[Array, "B T H D"],
    compressed_key: Float[Array, "B C Hkv D"],
    compressed_value: Float[Array, "B C Hkv Dv"],
    *,
    config: NSAConfig,
    kv_len: KeyLength = None,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> OutLse:
    """Compute attention over compressed tokens. A query at position `p` attends to compressed
    token `i` if and only if `p >= i*d + l - 1`.

    Args: the same as `select_blocks`, and `compressed_value` `[B, C, Hkv, Dv]`.
    Raises: the same errors as `select_blocks`.

    Returns:
      `(out, lse)`, where `out` is `[B, T, H, Dv]`, and `lse` is the natural log-sum-exp `[B, T,
      H]` in float32.
    """
    arrays, where = (query, compressed_key, compressed_value), (kv_len, segment_ids, varlen)
    return _step("compressed", arrays, config, *where, scale, implementation)


@any_rank
def selected_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    block_indices: Int[Array, "B T Hkv n"],
    *,
    config: NSAConfig,
    kv_len: KeyLength = None,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> OutLse:
    """Compute attention of each query to the keys of its selected blocks, up to its own position.
    Return `(out, lse)`.

    Args:
      query: `[B, T, H, D]`.
      key, value: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`.
      block_indices: int32 `[B, T, Hkv, n]`, -1 in empty slots, no duplicates. In a packed batch
        the indices count from the start of each sequence. Keys after the query are always
        masked.
      config: the block sizes and the number of selected blocks.
      kv_len: number of valid keys, int or int32 `[]` or `[B]`; None means `S`.
      segment_ids, varlen, scale, implementation: as in `select_blocks`.

    Returns: the same as `compressed_attention`.
    Raises: the same errors as `select_blocks`.
    """
    arrays, where = (query, key, value), (kv_len, segment_ids, varlen)
    return _step("selected", arrays, config, *where, scale, implementation, block_indices)


@any_rank
def sliding_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    *,
    config: NSAConfig,
    kv_len: KeyLength = None,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> OutLse:
    """Compute attention of each query to the last `window` keys up to its own key.
    Return `(out, lse)`.

    Args: as in `selected_attention`, without `block_indices`.

    Returns: the same as `compressed_attention`.
    Raises: the same errors as `select_blocks`.
    """
    arrays, where = (query, key, value), (kv_len, segment_ids, varlen)
    return _step("sliding", arrays, config, *where, scale, implementation)


def _step(
    step, arrays, config, kv_len, segment_ids, varlen, scale, implementation, block_indices=None
):
    """Check the arguments of one step, choose its implementation and run it. `arrays` are the
    query, the keys and the values.
    """
    query, key, *values = arrays
    value = values[0] if values else query
    if step in ("selected", "sliding"):
        validate.attention(query, key, value, config, segment_ids, scale)
        most = key.shape[1]
        rows = rows_of(segment_ids, varlen, config, query.shape[0], most)
        validate.length(kv_len, query, rows, most)
    else:
        validate.configuration(config)
        validate.queries(query)
        rows = rows_of(segment_ids, varlen, config, query.shape[0])
        kv_len = validate.scoring(query, key, config, kv_len, geometry.ids_of(rows), scale)
        most = validate.most_tokens(config, key.shape[1])
    checks.within("kv_len", kv_len, 0, most)
    if step == "compressed":
        validate.compressed(query, key, value, config, kv_len)
    if step == "selected":
        validate.indices(block_indices, query, key, config)
        checks.distinct(block_indices)
        arrays += (block_indices,)
    chosen = choices_of(query, key, value.shape[-1], config, rows, implementation, step)
    return function_of(getattr(chosen, step))(
        *arrays, config=config, kv_len=kv_len, segment_ids=rows, scale=scale
    )


def explain(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Branches[Array],
    value: Float[Array, "B S Hkv Dv"] | Branches[Array],
    gates: Float[Array, "B T H 3"] | Branches[Array] | None = None,
    *,
    config: NSAConfig = NSAConfig(),
    compressed: tuple[Array, Array] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    varlen: PackedRows | None = None,
    implementation: Names = None,
) -> Choices:
    """Report which implementations `attention` would choose for these arguments.

    Args: As in `attention`. The arguments `gates` and `compressed` are checked, but do not affect
      the choice.

    Returns:
      One choice per step, with the reason why each earlier candidate was refused. The printed
      result has one line per step.

    Raises: the same errors as `attention`.
    """
    key, value = map(Branches.each, (key, value))
    if gates is not None:
        validate.gates(gates, query)
    _check(query, key, value, config, segment_ids, None)
    rows = rows_of(segment_ids, varlen, config, *key.selected.shape[:2])
    if compressed is not None:
        pair = validate.pair(compressed)
        validate.compressed(query, *pair, config, key.selected.shape[1], value.selected)
    sizes = value.selected.shape[-1], config
    return choices_of(query, key.selected, *sizes, rows, implementation)


def choices_of(
    query, key, value_width, config, segment_ids, implementation, step=None
) -> Choices:
    """Return the choice of an implementation for each step of a call.

    Args:
      query, key: `[B, T, H, D]` and `[B, S, Hkv, D]`. For a step on compressed keys, `key` has
        the compressed keys.
      step: the step to which `implementation` applies; None means all steps.
    """
    problem = problem_of(
        query, key.shape[2], key.shape[1], value_width, config, segment_ids is not None
    )
    chosen = REGISTRY.choices(problem, implementation, step=step)
    if debug.on:
        debug.choices(jax_debug.JAX, problem, chosen)
    return chosen


def function_of(choice: Choice):
    """Return the compiled implementation of a step. While `nsa_core.debug` reports events, the
    returned function is wrapped so that its calls are reported.
    """
    name, run = choice.implementation, compiled(choice.load())
    return debug.watch(jax_debug.JAX, choice.step, name, run, REGISTRY)


@any_rank
def varlen_metadata(
    segment_ids: Int[Array, "B S"],
    *,
    config: NSAConfig = NSAConfig(),
    max_segments: int | None = None,
    max_seqlen: int | None = None,
) -> PackedRows:
    """Make the argument `varlen` of calls on packed rows, which replaces `segment_ids`.

    The limits `max_segments` and `max_seqlen` are checked only if the host can read
    `segment_ids`. The host can read `segment_ids` on a CPU outside `jax.jit`, and on a GPU while
    `nsa_jax.debug` reports events. If the host cannot read `segment_ids`, the caller must ensure
    that the rows respect the limits.

    Args:
      segment_ids: `[B, S]`, as in `attention`.
      config: The config of the calls.
      max_segments: Upper bound for the number of runs of equal ids per row, including runs of
        padding. `max_segments=None` means that no bound is known. With a bound, Mosaic kernels
        use separate tiles for each sequence, so that no tile covers two sequences.
      max_seqlen: Upper bound for the number of tokens per sequence. Defaults to `S`. In a sequence
        longer than the bound, blocks beyond the bound may be left out of the selection. With
        `max_segments`, Mosaic kernels treat a row that exceeds a bound as padding.

    Raises:
      ValueError: An argument is invalid, or values that the host reads exceed a bound.
    """
    validate.array("segment_ids", segment_ids, 2, validate.INTEGERS)
    validate.configuration(config)
    limits = {"max_segments": max_segments, "max_seqlen": max_seqlen}
    validate.sizes(**{name: x for name, x in limits.items() if x is not None})
    if any(limits.values()) and checks.is_read(segment_ids):
        _check_limits(np.asarray(segment_ids), limits)
    return compiled(geometry.packed_rows)(segment_ids, config=config, **limits)


def _check_limits(segment_ids: np.ndarray, limits: dict[str, int | None]) -> None:
    new = np.ones(segment_ids.shape, bool)
    new[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    found = {"max_segments": int(new.sum(axis=1).max(initial=0)), "max_seqlen": 0}
    for row, ids in zip(new, segment_ids, strict=True):
        starts = np.flatnonzero(row)
        lengths = np.diff(np.append(starts, row.size))[ids[starts] >= 0]
        found["max_seqlen"] = max(found["max_seqlen"], int(lengths.max(initial=0)))
    for name, least in found.items():
        limit = limits[name]
        if limit is not None and limit < least:
            raise ValueError(
                f"{name} must be {least} or more because of segment_ids, got {limit}"
            )

"""Chooses an implementation for each step of a call on torch tensors. `nsa_core.dispatch` defines
the registry of implementations.

A target is the function with which an implementation computes a step. A target has the arguments of
the public function of the step, without `varlen` and `implementation`. The `kv_len` of a target is
never None. The target of a branch has the additional argument `with_lse`. If `with_lse` is False,
the target may return None for the log-sum-exp. A target of the step `attention` runs all steps at
once, and has the arguments that follow `kind` in `operators.all_steps`.
"""

import functools
import importlib.util
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from nsa_interop.launch import ALIGNMENT

import kernels_pallas
from kernels_pallas.mosaic import capability
from kernels_pallas.runtime import loaded
from nsa_core import debug, policy
from nsa_core.config import NSAConfig
from nsa_core.dispatch import (
    FUNCTIONS,
    INVARIANT,
    WHOLE,
    Implementation,
    Problem,
    Registry,
    layer_note,
)
from nsa_core.steps import mosaic_forward
from nsa_core.types import Branches
from nsa_torch import fa2, operators, plans
from nsa_torch.debug import TORCH
from nsa_torch.operators import config_of, requires_grad
from nsa_torch.plain import constant
from nsa_torch.torch_ops import device_name

COMPILER = (
    "needs a C compiler and the compiler in JAX's CUDA plugin (pip install 'jax[cuda13]'), or "
    "kernels that are already built (python -m nsa_interop.build)"
)


def jax_why_not(problem: Problem) -> str | None:
    """Return the reason why JAX does not support the tensors, or None. The function does not
    start the backends of JAX.
    """
    if problem.step == WHOLE and problem.cached:
        return "JAX runs all steps at once only for whole sequences, got a cache"
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed: pip install 'native-sparse-attention[jax]'"
    import jax

    if problem.dtype == "float64" and not jax.config.jax_enable_x64:
        return "JAX computes in float64 only with jax_enable_x64"
    if problem.platform in ("cpu", "meta"):
        return None
    if problem.platform != "cuda":
        return f"JAX supports only cpu and cuda tensors, got {problem.platform}"
    if not jax_has_cuda():
        return "JAX is installed without support for CUDA"
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX must not use CUDA because of jax_platforms={platforms!r}"
    return None


@functools.cache
def jax_has_cuda() -> bool:
    return any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin")))


@functools.lru_cache(4096)
def on_disk(*layer) -> bool:
    """Return whether the kernels of a layer are stored on disk. The arguments are the same as in
    `layer_note`.
    """
    return loaded.store().serves(layer_note(*layer))


def mosaic_why_not(problem: Problem) -> str | None:
    """Return the reason why the Mosaic kernels cannot run the problem or read the tensors in place,
    or None.
    """
    reason = kernels_pallas.why_not("mosaic", problem)
    if reason is not None:
        return reason
    if problem.platform == "cuda" and not loaded.can_build():
        sizes = problem.H, problem.Hkv, problem.D, problem.Dv
        if not on_disk(*sizes, problem.dtype, problem.config):
            return COMPILER
    return problem.strided


def invariant_why_not(problem: Problem) -> str | None:
    """Return the reason why the implementation `invariant` cannot run the problem, or None."""
    if reason := mosaic_why_not(problem):
        return reason
    if problem.cached:
        return "has no gradient for a cache" if problem.requires_grad else None
    if problem.packed:
        return "supports no packed rows, where bits depend on the position of a sequence"
    first = problem.S - problem.T
    multiple = mosaic_forward.work_item_tokens(problem.H, problem.Hkv, problem.D, problem.Dv)
    if first > 0 and first % multiple:
        return f"needs queries that begin at a multiple of {multiple} tokens, got {first}"
    return None


def triton_why_not(problem: Problem) -> str | None:
    """Return the reason why the Triton kernels cannot run the problem or read the tensors in place,
    or None.
    """
    reason = kernels_pallas.why_not("triton", problem)
    return reason or problem.strided


def _table(step: str) -> tuple[Implementation, ...]:
    function = FUNCTIONS[step]
    # FA-2 and SDPA return no probabilities, so that both names compute scores with torch
    # products.
    products = "select" if step == "scores" else None
    rows = [
        ("mosaic", "mosaic", mosaic_why_not),  # Hopper
        ("triton", "triton", triton_why_not),  # NVIDIA GPUs from Ampere on
        # uses tensor cores, but has no kernel for blocks
        ("fa2", products or "fa2", fa2.why_not),
        ("sdpa", products or "sdpa"),  # any device, with bounded memory
        # JAX is a second framework in the process. Only an explicit name selects it, since `sdpa`
        # never refuses a call and comes first
        ("jax", "autograd", jax_why_not),
        ("reference", "reference"),  # dense computation
        # Mosaic kernels in one order of sums. `reference` comes first, so that only an explicit
        # name selects it
        (INVARIANT, INVARIANT, invariant_why_not),
    ]
    return tuple(
        Implementation(name, f"nsa_torch.{module}:{function}", *why_not)
        for name, module, *why_not in rows
        if step != WHOLE or name in ("mosaic", "triton", "jax", INVARIANT)
    )


REGISTRY = Registry("torch", {step: _table(step) for step in FUNCTIONS})


class Chosen(NamedTuple):
    """The implementation of each step of a call, as plain values that torch.compile supports."""

    compressed: str
    scores: str
    selected: str
    sliding: str
    # the implementation that runs all steps at once, including compression by means, or None
    attention: str | None

    def load(self, step: str) -> Callable:
        """Return the function of the chosen implementation that runs `step`."""
        name = getattr(self, step)
        (entry,) = (x for x in REGISTRY.table[step] if x.name == name)
        return (
            debug.watch(TORCH, step, name, entry.load(), REGISTRY) if debug.on else entry.load()
        )


def choose(problem: tuple, implementation, step: str | None = None) -> Chosen:
    """Choose the implementation for the problem of a `problem_key`. The argument `step` is the same
    as in `Registry.choices`.

    Under `torch.compile` the choice is a constant of the compiled code, regardless of the number
    of tokens.
    """
    if implementation == INVARIANT and step is not None:
        raise NotImplementedError(f"{step}: {INVARIANT}: runs only all steps together")
    # This is a plain tuple, like all arguments that torch.compile treats as constants.
    names = tuple(implementation) if isinstance(implementation, Branches) else implementation
    fields: Any = _chosen(names, step, *problem)
    return Chosen(*fields)


@constant
def _chosen(implementation, step, *problem) -> tuple[str | None, ...]:
    names = implementation if isinstance(implementation, tuple) else (implementation,)
    known = all(
        name is None or isinstance(name, str) for name in names
    )  # other values are refused
    key = None
    if not debug.on and problem[0][0] == "cuda" and known:
        # The other inputs of a choice. The choice is cached, since it costs as much time as the
        # launches of a short row.
        state = policy.in_force(), capability.interpret.get() is not False
        key = implementation, step, problem, state
        if (found := plans.KNOWN.get(key)) is not None:
            return found
    asked = problem_of(*problem)
    if isinstance(implementation, tuple):
        implementation = Branches(*implementation)
    chosen = REGISTRY.choices(asked, implementation, step=step)
    if debug.on:
        debug.choices(TORCH, asked, chosen)
    for choice in chosen:
        choice.load()  # this imports the module outside the code that torch.compile traces
    whole = chosen.attention
    found = *(x.implementation for x in chosen), None if whole is None else whole.implementation
    return found if key is None else plans.keep(key, found)


def problem_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value_width: int,
    config: NSAConfig,
    packed: bool,
    memory: Mapping[str, torch.Tensor],
    gates: Iterable[torch.Tensor] = (),
    cached: bool = False,
) -> tuple:
    """Describe a call by numbers and strings. The result is a hashable key, from which `problem_of`
    makes the problem.

    Args:
      query, key: `[B, T, H, D]` and `[B, S, Hkv, D]`. For a step on compressed keys, `key` has
        the compressed keys.
      memory: The tensors that kernels read in place, keyed by name.
      gates: other tensors of the call that may require a gradient.
      cached: whether the keys are in a cache.
    """
    device = query.device.type, query.device.index
    dtype = str(query.dtype).removeprefix("torch.")
    batch, length, heads, width = query.shape
    num_keys, kv_heads = key.shape[1:3]
    if torch.compiler.is_compiling():
        # Sizes may be symbolic here. Zeros mean that no threshold on a length applies.
        batch, length, num_keys = 1, 0, 0
    sizes = batch, length, num_keys, heads, kv_heads, width, value_width
    numbers = operators.numbers_of(config)
    flags = packed, requires_grad(*memory.values(), *gates), cached
    return device, dtype, tuple(map(operator.index, sizes)), numbers, flags, _strided(memory)


def problem_of(device, dtype, sizes, numbers, flags, strided) -> Problem:
    """Return the problem that a `problem_key` describes. The caller sets the field `step`
    later."""
    platform, index = device
    names = "B", "T", "S", "H", "Hkv", "D", "Dv"
    packed, gradient, cached = flags
    return Problem(
        framework="torch",
        step="",
        platform=platform,
        capability=torch.cuda.get_device_capability(index) if platform == "cuda" else None,
        dtype=dtype,
        **dict(zip(names, sizes, strict=True)),
        packed=packed,
        config=config_of(*numbers),
        strided=strided,
        device=device_name(index) if platform == "cuda" else None,
        requires_grad=gradient,
        cached=cached,
    )


def _strided(memory) -> str | None:
    """Return the reason why kernels do not support the memory layout of a tensor, or None."""
    for name, x in memory.items():
        if not x.is_contiguous():
            return f"needs {name} contiguous, got strides {tuple(x.stride())}; pass a copy"
        if torch.compiler.is_compiling():
            continue  # alignment is not known here; unaligned tensors are copied (`readable`)
        start = x.storage_offset() * x.itemsize
        if start % ALIGNMENT:
            return (
                f"needs {name} to start at a multiple of {ALIGNMENT} bytes, got byte {start} of "
                "its storage; pass a clone"
            )
    return None

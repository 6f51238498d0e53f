"""Runs a step in each framework, with the same arguments and named results, and measures time
and memory.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import nsa_jax
from nsa_core.dispatch import Problem
from nsa_jax.dispatch import REGISTRY
from nsa_jax.jax_problem import capability

from . import timing
from .problems import Model, Settings
from .records import Values

# JAX has no L2 flush. Its inputs instead rotate through copies whose total size is this number of
# bytes.
ROTATED_BYTES, MAX_COPIES = 2 * timing.L2_FLUSH_BYTES, 8
# Note of a row whose library supports only one head width for query, key and value.
PADDED = "values padded to the width of the keys"


def forward(api, branch: str, config, implementation, arguments) -> Values:
    """Compute a branch with the public functions of `api`, whose names are the same in both
    frameworks.
    """
    how = {"config": config, "implementation": implementation}
    if branch == "scores":
        return {"indices": api.select_blocks(**arguments, **how)}
    if branch == "all":
        return {"out": api.attention(**arguments, **how)}
    out, lse = getattr(api, f"{branch}_attention")(**arguments, **how)
    return {"out": out} if lse is None else {"out": out, "lse": lse}


def asked(settings: Settings, runner) -> Problem:
    """Return the result of `registry_problem` for `settings`."""
    run = settings.runtime
    sizes = run.dtype.name, run.batch, run.seq_len
    return registry_problem(runner, settings.model, settings.nsa, *sizes)


def registry_problem(
    runner, heads: Any, config, dtype: str, batch: int, length: int, packed: bool = False
) -> Problem:
    """Return the problem for the registry of `runner` on the device of `runner`. The policy of that
    device applies to the problem. The caller sets the problem's `step` later. `heads` has the
    numbers and widths of heads, by the names of a `LayerSpec`.
    """
    return Problem(
        framework=runner.framework,
        step="",
        platform=runner.platform,
        capability=runner.capability,
        dtype=dtype,
        B=batch,
        T=length,
        S=length,
        H=heads.n_heads,
        Hkv=heads.n_kv_groups,
        D=heads.d_k,
        Dv=heads.d_v,
        packed=packed,
        config=config,
        device=None if runner.device == "cpu" else runner.device,
    )


@dataclasses.dataclass
class Step:
    """A function with arguments. `step()` calls the function with `sources`, and
    `step(*arguments)` with other arguments of the same shapes. `time` measures `step()`.
    """

    function: Callable[..., Values]
    sources: tuple[Any, ...]
    time: Callable[..., timing.Timing]
    extra_peak_bytes: int | None = None

    def __call__(self, *sources) -> Values:
        return self.function(*sources or self.sources)


class JaxRunner:
    """Steps compiled ahead of time, timed by the host clock."""

    framework = "jax"
    api = nsa_jax
    registry = REGISTRY

    def __init__(self, device: str = "auto"):
        _choose(device)
        self.platform, self.capability = jax.default_backend(), capability()
        if device == "cuda" and self.platform == "cpu":
            raise ValueError("device must be auto or cpu, got cuda; JAX finds no GPU")
        self.device = "cpu" if self.platform == "cpu" else jax.devices()[0].device_kind
        self.dense_names = ("xla",) if self.platform == "cpu" else ("cudnn", "xla")

    def load(self, arguments: Any) -> Any:
        return arguments

    def metadata(self, batch: int, length: int, config) -> Any:
        """Return the metadata of a packed row with `batch` sequences of one length."""
        segment_ids = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), length)[None]
        sizes = {"max_segments": batch, "max_seqlen": length}
        return nsa_jax.varlen_metadata(segment_ids, config=config, **sizes)

    def dense(self, name: str, query, key, value) -> Values:
        """Compute causal attention with JAX's own function. `name` is the implementation of that
        function."""
        width = value.shape[-1]
        value = jnp.pad(value, ((0, 0),) * 3 + ((0, query.shape[-1] - width),))
        causal = _is_causal(query.shape[1], key.shape[1])
        how: Values = {"is_causal": causal, "implementation": name}
        out = jax.nn.dot_product_attention(query, key, value, **how)
        return {"out": out[..., :width]}

    def note(self, branch: str, implementation: str, model: Model) -> str:
        """Return a note on the implementation that ran, in addition to its name."""
        return PADDED if branch == "dense" and model.d_v < model.d_k else ""

    def prepare(self, function, arguments: Values, cotangent=None) -> Step:
        """Compile `function(arguments)`. If a cotangent is given, a call also returns the
        gradients."""

        def both(arguments, cotangent):
            diff, fixed = divided(arguments)
            out, pull = jax.vjp(lambda diff: function({**diff, **fixed})["out"], diff)
            return {"out": out, "gradients": pull(cotangent)[0]}

        sources = (dict(arguments),) if cotangent is None else (dict(arguments), cotangent)
        run = jax.jit(function if cotangent is None else both).lower(*sources).compile()
        memory, peak = run.memory_analysis(), None
        if memory is not None:
            peak = int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
            host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if self.platform == "cpu" and peak > host:
                raise MemoryError(
                    f"the call needs {peak / 2**30:.1f} GiB in addition to its inputs, but the "
                    f"host has {host / 2**30:.1f} GiB"
                )

        def timed(**how: Any) -> timing.Timing:
            copies = itertools.cycle(rotated(sources))
            return self.time(lambda: run(*next(copies)), **how)

        return Step(run, sources, timed, peak)

    def time(self, call, **how: Any) -> timing.Timing:
        return timing.time_host(call, jax.block_until_ready, **how)

    def numpy(self, x, rows: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(x if rows is None else x[:, rows])


def divided(arguments: Values) -> tuple[Values, Values]:
    """Return the arguments that have gradients, and the other arguments."""
    fixed = {name: x for name, x in arguments.items() if name == "block_indices"}
    return {name: x for name, x in arguments.items() if name not in fixed}, fixed


def rotated[T](sources: T) -> list[T]:
    """Return `sources` and, on a GPU, enough copies that they cannot all stay in the L2 cache, but
    at most `MAX_COPIES` in total.
    """
    if jax.default_backend() == "cpu":
        return [sources]
    size = sum(x.nbytes for x in jax.tree.leaves(sources))
    wanted = min(MAX_COPIES, -(-ROTATED_BYTES // size))
    return [sources, *(jax.tree.map(jnp.copy, sources) for _ in range(wanted - 1))]


class TorchRunner:
    """Eager calls, timed by CUDA events if there is a GPU."""

    framework = "torch"

    def __init__(self, device: str = "auto"):
        import torch

        import nsa_torch
        import nsa_torch.dispatch

        self.torch, self.api = torch, nsa_torch
        self.registry = nsa_torch.dispatch.REGISTRY
        _choose(device)
        cuda = torch.cuda.is_available() and device != "cpu"
        if device == "cuda" and not cuda:
            raise ValueError("device must be auto or cpu, got cuda; torch finds no GPU")
        self.platform = "cuda" if cuda else "cpu"
        self.capability = torch.cuda.get_device_capability() if cuda else None
        self.device = torch.cuda.get_device_name() if cuda else "cpu"
        self.dense_names = ("flash", "cudnn") if cuda else ("flash",)

    def metadata(self, batch: int, length: int, config) -> Any:
        """Return the metadata of a packed row with `batch` sequences of one length."""
        borders = self.torch.arange(batch + 1, dtype=self.torch.int32) * length
        return self.api.varlen_metadata(borders, config=config, device=self.platform)

    def load(self, arguments: Any) -> Any:
        """Copy the values of the arguments to new tensors."""

        def tensor(x):
            array = np.array(x)
            if array.dtype == ml_dtypes.bfloat16:
                words = self.torch.from_numpy(array.view(np.int16))
                return words.view(self.torch.bfloat16).to(self.platform)
            return self.torch.from_numpy(array).to(self.platform)

        return jax.tree.map(tensor, arguments)

    def dense(self, name: str, query, key, value) -> Values:
        """Compute causal attention with `scaled_dot_product_attention`. `name` is the backend of
        that function."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }
        functional, width = self.torch.nn.functional, value.shape[-1]
        causal = _is_causal(query.shape[1], key.shape[1])
        if name == "flash":
            value = functional.pad(value, (0, query.shape[-1] - width))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel([backend[name]]):
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=True
            )
        return {"out": out.transpose(1, 2)[..., :width]}

    def note(self, branch: str, implementation: str, model: Model) -> str:
        """Return a note on the implementation that ran, in addition to its name."""
        if branch == "dense" and implementation == "flash":
            said = [PADDED] if model.d_v < model.d_k else []
            if self.platform == "cuda":
                said = [f"the copy of FA-2 in torch {self.torch.__version__}", *said]
            return "; ".join(said)
        if "fa2" in implementation.split("/") and branch != "scores":
            from nsa_torch import fa2

            return f"FA-2 of {fa2.library()}"
        return ""

    def prepare(self, function, arguments: Values, cotangent=None) -> Step:
        """Return the eager call of `function(arguments)`. If a cotangent is given, a call also
        returns the gradients."""
        torch, cuda = self.torch, self.torch.cuda

        def call(arguments, *cotangent) -> Values:
            if not cotangent:
                with torch.no_grad():
                    return function(arguments)
            diff, fixed = divided(arguments)
            diff = jax.tree.map(lambda x: x.detach().requires_grad_(), diff)
            leaves, tree = jax.tree.flatten(diff)
            out = function({**diff, **fixed})["out"]
            grads = torch.autograd.grad(
                out, leaves, cotangent, allow_unused=True, materialize_grads=True
            )
            return {"out": out, "gradients": jax.tree.unflatten(tree, grads)}

        sources = (dict(arguments),) if cotangent is None else (dict(arguments), cotangent)
        once, extra = functools.partial(call, *sources), None
        if self.platform == "cuda":
            once()  # caches and compiled kernels are not the call's own memory
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
            once()
            extra = cuda.max_memory_allocated() - before
            # JAX, and processes that wait for their turn, need this memory more
            cuda.empty_cache()
        return Step(call, sources, functools.partial(self.time, once), extra)

    def time(self, call, **how: Any) -> timing.Timing:
        if self.platform == "cuda":
            return timing.time_cuda_events(call, **how)
        return timing.time_host(call, lambda result: result, **how)

    def numpy(self, x, rows: np.ndarray | None = None) -> np.ndarray:
        x = x if rows is None else x[:, self.torch.as_tensor(rows, device=x.device)]
        x = x.detach().contiguous().cpu()
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()


RUNNERS: dict[str, Any] = {"jax": JaxRunner, "torch": TorchRunner}


def started(framework: str) -> tuple[list[Any], bool]:
    """Return the runners of `framework`, which may be `both`, and whether one of the runners has a
    GPU.
    """
    found = [make() for name, make in RUNNERS.items() if framework in (name, "both")]
    return found, any(runner.device != "cpu" for runner in found)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of either framework means that memory ran out."""
    kind = type(error).__name__
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or kind == "OutOfMemoryError"
        or "RESOURCE_EXHAUSTED" in text
        or "can't allocate memory" in text
    )


def _choose(device: str) -> None:
    """Restrict JAX, which makes inputs and oracles for both frameworks, to the requested
    device.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")


def _is_causal(queries: int, keys: int) -> bool:
    """Return whether a causal mask is needed. Masks of the libraries are aligned to the top left,
    which is right only for T = S. A single query attends to all keys and needs no mask.
    """
    if queries not in (1, keys):
        raise NotImplementedError(f"dense needs T = S or T = 1, got T={queries}, S={keys}")
    return queries > 1

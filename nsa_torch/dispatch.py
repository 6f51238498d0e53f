"""Which implementation runs on torch tensors; the registry itself is `nsa_jax.dispatch`'s.

A target takes the arguments of its public function, `kv_len` never None, and `with_lse`:
False allows it to return None for the log-sum-exp.
"""

import functools
import importlib.util

import jax
import torch

import kernels_pallas
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation, Plan, Problem, Registry
from nsa_torch import fa2

FUNCTIONS = {
    "compressed": "compressed_attention",
    "scores": "select_blocks",
    "selected": "selected_attention",
    "sliding": "sliding_attention",
}


def kernel(name: str, step: str) -> Implementation:
    """A kernel of `kernels_pallas`, launched on torch's stream."""
    target = f"interop.{name}:{FUNCTIONS[step]}"
    return Implementation(name, target, functools.partial(kernels_pallas.why_not, name))


def jax_why_not(problem: Problem) -> str | None:
    """Why JAX cannot take the tensors; asks without starting JAX's backends."""
    if problem.dtype == "float64" and not jax.config.jax_enable_x64:
        return "JAX computes in float64 only with jax_enable_x64"
    if problem.platform == "cpu":
        return None
    if problem.platform != "cuda":
        return f"JAX shares cpu and cuda tensors, got {problem.platform}"
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(map(importlib.util.find_spec, plugins)):
        return "JAX is installed without CUDA"
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX is kept off CUDA by jax_platforms={platforms!r}"
    return None


def _table(step: str) -> tuple[Implementation, ...]:
    function = FUNCTIONS[step]
    # FA-2 and SDPA return no probabilities: under both names scores are torch products.
    scores = step == "scores"
    return (
        kernel("mosaic", step),  # built for Hopper
        kernel("triton", step),  # any recent NVIDIA GPU
        Implementation(  # tensor cores, but no kernel of its own for blocks
            "fa2", f"nsa_torch.{'select' if scores else 'fa2'}:{function}", fa2.why_not
        ),
        Implementation(  # any device, memory bounded
            "sdpa", f"nsa_torch.{'select' if scores else 'sdpa'}:{function}"
        ),
        # a second framework in the process: only where torch has nothing
        Implementation("jax", f"nsa_torch.autograd:{function}", jax_why_not),
        Implementation("reference", f"nsa_torch.reference:{function}"),  # dense
    )


REGISTRY = Registry("torch", {step: _table(step) for step in FUNCTIONS})


def plan_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value_width: int,
    config: NSAConfig,
    packed: bool,
    implementation,
) -> Plan:
    """The choice of every step for these tensors."""
    batch, length, heads, width = query.shape
    problem = Problem(
        framework="torch",
        branch="",
        platform=query.device.type,
        dtype=str(query.dtype).removeprefix("torch."),
        B=batch,
        T=length,
        S=key.shape[1],
        H=heads,
        Hkv=key.shape[2],
        D=width,
        Dv=value_width,
        packed=packed,
        config=config,
    )
    return REGISTRY.plan(problem, implementation)

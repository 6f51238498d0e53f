"""Whether automatic choice switches from the portable path to the kernel where a file says.

Two ways. The decision: a problem of one length less and of that length is described, on a GPU
of the file's device, and the registry is asked between the kernel and the portable path, both
taken as able. And where that GPU is there, `attention` itself runs on arrays of such lengths,
and the functions that it calls are watched.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from nsa_core import policy
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Choices, Problem, Registry
from nsa_core.policy import Device
from nsa_core.types import Branches
from nsa_jax import dispatch

from .threshold_evidence import PORTABLE

FAR, FAR_RUN = 2**20, 8192  # lengths at which `never` still refuses: described, run
# The attention that runs: small, 16 bits, and what every kernel takes.
HEADS, KV_HEADS, WIDTH = 4, 1, 64


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was chosen or ran at a length, and whether it is what the file says."""

    how: str  # decision, or ran
    framework: str
    threshold: str
    length: int
    expected: str  # kernel, or portable path
    got: str
    why: str = ""

    @property
    def ok(self) -> bool:
        kernels = policy.DECIDES[self.threshold][1]
        portable = PORTABLE[self.framework]
        return self.got in kernels if self.expected == "kernel" else self.got == portable

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL"
        what = f"{self.framework} {self.threshold} at {self.length}"
        why = f" ({self.why})" if self.why else ""
        return f"{mark} {self.how}: {what}: {self.got}, expected the {self.expected}{why}"


def check(device: Device) -> list[Finding]:
    """All findings for the thresholds of `device`.

    Raises:
      ValueError: its file has no thresholds.
    """
    given = device.runtime.given()
    if not given:
        raise ValueError(f"{device.source} has no thresholds to check")
    findings = []
    for name in given:
        value = device.limit(name)
        assert value is not None  # one is given
        step, kernels = policy.DECIDES[name][0], device.kept_back(name)
        for registry in _registries(step, kernels):
            known = [kernel for kernel in kernels if kernel in registry.names(step)]
            if all(policy.barred(device, kernel, step) for kernel in known):
                value = policy.NEVER
            for length, expected in _sides(value, 1, FAR):
                findings.append(_decided(registry, device, name, length, expected))
            if _present(registry.framework, device.device):
                block = NSAConfig().select_block if step == "selected" else 1
                for length, expected in _sides(
                    value, block, FAR_RUN // 4 if block > 1 else FAR_RUN
                ):
                    findings.append(_ran(registry, device, name, length, expected))
    return findings


def _sides(value: policy.Length, step: int, far: int) -> list[tuple[int, str]]:
    """Lengths on both sides of a threshold, multiples of `step`; `far` for `never`."""
    if value == policy.NEVER:
        return [(far, "portable path")]
    at = max(-(-value // step), 1) * step
    return [*([(at - step, "portable path")] if step < at else []), (at, "kernel")]


def _registries(step: str, kernels: tuple[str, ...]) -> list[Registry]:
    from nsa_torch.dispatch import REGISTRY

    found = (REGISTRY, dispatch.REGISTRY)
    return [r for r in found if set(kernels) & set(r.names(step))]


def _present(framework: str, device: str) -> bool:
    if framework == "jax":
        import jax

        return device in {d.device_kind for d in jax.devices()}
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_name() == device


def _config(name: str, length: int, block: int) -> NSAConfig:
    if policy.DECIDES[name][0] != "selected":
        return NSAConfig()
    sizes: dict[str, Any] = {} if block > 1 else {"compress_block": 1, "compress_stride": 1}
    few = {"num_initial": 0, "num_local": 1}
    # One block holds the query itself, so a selection has one at least.
    return NSAConfig(select_block=block, num_selected=length // block, **sizes, **few)


def _decided(
    registry: Registry, device: Device, name: str, length: int, expected: str
) -> Finding:
    """The choice between kernel and portable path, neither of which refuses by itself."""
    step, kernels = policy.DECIDES[name][0], device.kept_back(name)
    entries = tuple(
        dataclasses.replace(entry, why_not=lambda problem: None)
        for entry in registry.table[step]
        if entry.name in (*kernels, PORTABLE[registry.framework])
    )
    tokens = max(length, 1) if step != "selected" else FAR
    problem = Problem(
        framework=registry.framework,
        step=step,
        platform="cuda" if registry.framework == "torch" else "gpu",
        dtype="bfloat16",
        B=1,
        T=tokens,
        S=tokens,
        H=HEADS,
        Hkv=KV_HEADS,
        D=WIDTH,
        Dv=WIDTH,
        packed=False,
        config=_config(name, length, 1),
        device=device.device,
    )
    with _applied(device):
        choice = Registry(registry.framework, {step: entries}).choose(problem)
    why = next(iter(choice.refused.values()), "")
    at = (registry.framework, name, length, expected, choice.implementation)
    return Finding("decision", *at, why)


def _ran(registry: Registry, device: Device, name: str, length: int, expected: str) -> Finding:
    """What `attention` calls for the step, with the kernels that the threshold is not about
    out of the way."""
    step, kernels = policy.DECIDES[name][0], device.kept_back(name)
    tokens = length if step != "selected" else 1024
    config = _config(name, length, NSAConfig().select_block)
    with (
        _applied(device),
        _only(registry, step, (*kernels, PORTABLE[registry.framework])),
        _watched(registry, step) as called,
    ):
        chosen = _attention(registry.framework, step, tokens, config)
    got = "/".join(called) or "nothing that was watched"
    why = next(iter(getattr(chosen, step).refused.values()), "")
    return Finding("ran", registry.framework, name, length, expected, got, why)


def _applied(device: Device):
    """The thresholds of the file, where it is not the one that choice reads anyway."""
    if policy.of(device.device) == device:
        return contextlib.nullcontext()
    limits = {name: device.limit(name) for name in device.runtime.given()}
    return policy.overridden(policy.Thresholds(**limits), str(device.path))


@contextlib.contextmanager
def _only(registry: Registry, step: str, names: tuple[str, ...]) -> Iterator[None]:
    before = registry.table[step]
    registry.table[step] = tuple(entry for entry in before if entry.name in names)
    try:
        yield
    finally:
        registry.table[step] = before


@contextlib.contextmanager
def _watched(registry: Registry, step: str) -> Iterator[list[str]]:
    """The names of the implementations of `step` whose functions are called within."""
    called: list[str] = []

    def watch(name, function):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return watched

    with contextlib.ExitStack() as stack:
        for entry in registry.table[step]:
            module, _, function = entry.target.partition(":")
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                continue  # not there yet, and its entry says so
            stack.enter_context(
                mock.patch.object(found, function, watch(entry.name, getattr(found, function)))
            )
        yield called


def _attention(framework: str, step: str, tokens: int, config: NSAConfig) -> Choices:
    """Runs `attention` with automatic choice of one branch on random arrays; the others are
    portable, so that no kernel of the whole stands in for it. Returns what it says it runs."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    query, gates = normal(1, tokens, HEADS, WIDTH), normal(1, tokens, HEADS, 3)
    key, value = (normal(1, tokens, KV_HEADS, WIDTH) for _ in range(2))
    arrays = (query, key, value, gates)
    names = Branches.each(PORTABLE[framework])._replace(**{step: None})
    how: dict[str, Any] = {"config": config, "implementation": names}
    if framework == "jax":
        import jax
        import jax.numpy as jnp

        import nsa_jax

        on_device: Any = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
        jax.block_until_ready(nsa_jax.attention(*on_device, **how))
        return nsa_jax.explain(*on_device, **how)
    import torch

    import nsa_torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.from_numpy(x).to(kind, torch.bfloat16) for x in arrays]
    nsa_torch.attention(*tensors, **how)
    if kind == "cuda":
        torch.cuda.synchronize()
    return nsa_torch.explain(*tensors, **how)

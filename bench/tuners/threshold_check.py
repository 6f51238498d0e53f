"""Checks whether the automatic choice switches from the portable path to the kernel at the
lengths of a file.

Two ways. The decision: a problem of one length less and of that length is described, on a GPU
of the file's device, and the registry is asked between the kernel and the portable path, both
assumed to be able. If that GPU is present, `attention` itself runs on arrays of such lengths,
and the functions that it calls are watched.
"""

import contextlib
import dataclasses
import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from nsa_core import policy
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Choices, Implementation, Problem, Registry
from nsa_core.policy import Device
from nsa_core.types import Branches

from ..harness.runners import RUNNERS, JaxRunner, TorchRunner
from .threshold_evidence import PORTABLE

FAR, FAR_RUN = 2**20, 8192  # lengths at which `never` still refuses: described, run
# The attention that runs: small, 16 bits, and supported by every kernel.
HEADS, KV_HEADS, WIDTH = 4, 1, 64


@dataclasses.dataclass(frozen=True)
class Finding:
    """The implementation that was chosen or ran at a length, compared with the file."""

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
        block = NSAConfig().select_block if step == "selected" else 1
        for runner in (RUNNERS["torch"](), RUNNERS["jax"]()):
            known = set(kernels) & set(runner.registry.names(step))
            if not known:
                continue
            if all(policy.barred(device, kernel, step) for kernel in known):
                value = policy.NEVER
            for length, expected in _sides(value, 1, FAR):
                findings.append(_decided(runner, device, name, length, expected))
            if runner.device == device.device:
                for length, expected in _sides(
                    value, block, FAR_RUN // (4 if block > 1 else 1)
                ):
                    findings.append(ran(runner, device, name, length, expected))
    return findings


def _sides(value: policy.Length, step: int, far: int) -> list[tuple[int, str]]:
    """Lengths on both sides of a threshold, multiples of `step`; `far` for `never`."""
    if value == policy.NEVER:
        return [(far, "portable path")]
    at = max(-(-value // step), 1) * step
    return [*([(at - step, "portable path")] if step < at else []), (at, "kernel")]


def _config(name: str, length: int, block: int) -> NSAConfig:
    if policy.DECIDES[name][0] != "selected":
        return NSAConfig()
    sizes: dict[str, Any] = {} if block > 1 else {"compress_block": 1, "compress_stride": 1}
    few = {"num_initial": 0, "num_local": 1}
    # One block holds the query itself, so a selection has one at least.
    return NSAConfig(select_block=block, num_selected=length // block, **sizes, **few)


def _entries(registry: Registry, device: Device, name: str) -> tuple[Implementation, ...]:
    """The kernels that a threshold is about, and the portable path."""
    names = *device.kept_back(name), PORTABLE[registry.framework]
    return tuple(x for x in registry.table[policy.DECIDES[name][0]] if x.name in names)


def _decided(
    runner: JaxRunner | TorchRunner, device: Device, name: str, length: int, expected: str
) -> Finding:
    """The choice between kernel and portable path, neither of which refuses on its own."""
    step, framework = policy.DECIDES[name][0], runner.framework
    entries = tuple(
        dataclasses.replace(entry, why_not=lambda problem: None)
        for entry in _entries(runner.registry, device, name)
    )
    tokens = max(length, 1) if step != "selected" else FAR
    problem = Problem(
        framework=framework,
        step=step,
        platform="cuda" if framework == "torch" else "gpu",
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
        choice = Registry(framework, {step: entries}).choose(problem)
    why = next(iter(choice.refused.values()), "")
    return Finding("decision", framework, name, length, expected, choice.implementation, why)


def ran(
    runner: JaxRunner | TorchRunner, device: Device, name: str, length: int, expected: str
) -> Finding:
    """The function that `attention` calls for the step, with all other kernels disabled."""
    step, watched = policy.DECIDES[name][0], {}
    tokens = length if step != "selected" else 1024
    config = _config(name, length, NSAConfig().select_block)
    entries = _entries(runner.registry, device, name)
    with _applied(device), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(runner.registry.table, {step: entries}))
        for entry in entries:
            module, _, function = entry.target.partition(":")
            with contextlib.suppress(ModuleNotFoundError):  # then the entry refuses
                found = importlib.import_module(module)
                spy = mock.patch.object(found, function, wraps=getattr(found, function))
                watched[entry.name] = stack.enter_context(spy)
        chosen = _attention(runner, step, tokens, config)
    got = "/".join(x for x, spy in watched.items() if spy.called) or "nothing that was watched"
    why = next(iter(getattr(chosen, step).refused.values()), "")
    return Finding("ran", runner.framework, name, length, expected, got, why)


def _applied(device: Device):
    """Apply the thresholds of the file, unless the automatic choice reads this file already."""
    if policy.of(device.device) == device:
        return contextlib.nullcontext()
    limits = {name: device.limit(name) for name in device.runtime.given()}
    return policy.overridden(policy.Thresholds(**limits), str(device.path))


def _attention(
    runner: JaxRunner | TorchRunner, step: str, tokens: int, config: NSAConfig
) -> Choices:
    """Runs `attention` with automatic choice of one branch on random arrays; the others are
    portable, so that no kernel of the whole replaces it. Returns the choices that it reports."""
    sizes = {"query": (HEADS, WIDTH), "key": (KV_HEADS, WIDTH), "value": (KV_HEADS, WIDTH)}
    arrays = runner.load(
        {
            name: jax.random.normal(jax.random.key(0), (1, tokens, *size), jnp.bfloat16)
            for name, size in (sizes | {"gates": (HEADS, 3)}).items()
        }
    )
    names = Branches.each(PORTABLE[runner.framework])._replace(**{step: None})
    how: dict[str, Any] = {"config": config, "implementation": names}
    jax.block_until_ready(runner.api.attention(**arrays, **how))
    return runner.api.explain(**arrays, **how)

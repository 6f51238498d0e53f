"""Checks whether the automatic choice switches from the portable path to the kernel at the
thresholds of a device's file.

The registry chooses between the kernel and the portable path for two problems on this device. The
length of one problem is the threshold, and the other problem is shorter by 1. The command assumes
that kernel and portable path support both problems. No GPU is needed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from nsa_core import policy
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem, Registry
from nsa_core.policy import Device

from ..harness.runners import RUNNERS
from .threshold_evidence import PORTABLE

FAR = 2**20  # a length at which the threshold `never` still excludes the kernel
SIZES = {"dtype": "bfloat16", "B": 1, "H": 4, "Hkv": 1, "D": 64, "Dv": 64, "packed": False}


def check(device: Device) -> Iterator[tuple[bool, str]]:
    """Yield a verdict and a sentence about the verdict, for each of the two problems at each
    threshold of `device`.

    Raises:
      ValueError: The file has no thresholds.
    """
    if not device.runtime.given():
        raise ValueError(f"{device.source} has no thresholds to check")
    # Apply the thresholds of the file, unless the automatic choice reads this file anyway.
    limits = {name: device.limit(name) for name in device.runtime.given()}
    given = policy.overridden(policy.Thresholds(**limits), str(device.path))
    with contextlib.nullcontext() if policy.of(device.device) == device else given:
        for name, value in limits.items():
            for framework, portable in PORTABLE.items():
                yield from _sides(device, name, value, framework, portable)


def _sides(
    device: Device, name: str, value: policy.Length | None, framework: str, portable: str
) -> Iterator[tuple[bool, str]]:
    step, kernels = policy.DECIDES[name][0], device.kept_back(name)
    entries = tuple(
        dataclasses.replace(entry, why_not=lambda problem: None)
        for entry in RUNNERS[framework]().registry.table[step]
        if entry.name in (*kernels, portable)
    )
    able = [entry.name for entry in entries if entry.name != portable]
    sides = {FAR: [portable]}
    if (
        not all(policy.barred(device, kernel, step) for kernel in able)
        and value != policy.NEVER
    ):
        at = max(int(value or 0), 1)
        sides = ({at - 1: [portable]} if at > 1 else {}) | {at: able}
    for length, wanted in sides.items() if able else ():
        # Blocks have one token, so that `num_selected` is the number of selected keys. The
        # query's own block is forced, so that at least one block is selected.
        small: dict[str, Any] = {"select_block": 1, "compress_block": 1, "compress_stride": 1}
        small |= {"num_selected": length, "num_initial": 0, "num_local": 1}
        selects = step == "selected"
        tokens = FAR if selects else length
        problem = Problem(
            framework=framework,
            step=step,
            platform="cuda" if framework == "torch" else "gpu",
            T=tokens,
            S=tokens,
            config=NSAConfig(**small) if selects else NSAConfig(),
            device=device.device,
            **SIZES,
        )
        choice = Registry(framework, {step: entries}).choose(problem)
        got, refused = choice.implementation, [*choice.refused.values()]
        expected = "portable path" if wanted == [portable] else "kernel"
        why = f" ({refused[0]})" if refused else ""
        mark = "ok  " if got in wanted else "FAIL"
        yield (
            got in wanted,
            f"{mark} {framework} {name} at {length}: {got}, expected the {expected}{why}",
        )

"""Stand-ins for kernels on the CPU: each output is a number of the means of the inputs."""

import contextlib
import math

import nsa_interop.launch
import torch

from kernels_pallas.mosaic import capability
from nsa_torch import alike, replay, torch_ops
from tests.torch_inputs import on_the_cpu, tensors_at


def stand_in(kernel, *tensors, out=()):
    """`nsa_interop.launch.launch` of a kernel that is none."""
    mean = sum(x.double().mean().item() * (i + 1) for i, x in enumerate(tensors) if x.numel())
    mean = mean if math.isfinite(mean) else 0.5  # the log-sum-exp of nothing is among them
    out = out or [None] * len(kernel.outputs)
    found = []
    for i, (x, array) in enumerate(zip(out, kernel.outputs, strict=True)):
        dtype = getattr(torch, array.dtype)
        x = torch.empty(array.shape, dtype=dtype) if x is None else x
        value = math.sin(97 * mean / (i + 2))  # of any size of inputs
        found.append(x.fill_(value if dtype.is_floating_point else int(abs(3 * value))))
    return tuple(found)


def launcher(kernel, device):
    """`nsa_interop.launch.launcher` of the same."""

    def start(stream, addresses):
        assert stream == 0
        inputs, outputs = tensors_at(kernel, addresses)
        stand_in(kernel, *inputs, out=outputs)

    return start


def sequence(kernels, arguments, device):
    """`nsa_interop.launch.sequence` of the same."""
    starts = [launcher(kernel, device) for kernel in kernels]

    def start(stream, addresses):
        for each, numbers in zip(starts, arguments, strict=True):
            each(stream, [addresses[i] for i in numbers])

    return start


@contextlib.contextmanager
def stand_ins(monkeypatch):
    """Within: calls on the CPU are run from a list, as on a GPU, with these kernels."""
    monkeypatch.setattr(torch_ops, "launch", stand_in)
    monkeypatch.setattr(nsa_interop.launch, "launcher", launcher)
    monkeypatch.setattr(nsa_interop.launch, "sequence", sequence)
    monkeypatch.setattr(nsa_interop.launch, "current_stream", lambda device: 0)
    for module in (nsa_interop.launch, torch_ops):
        monkeypatch.setattr(module, "ALIGNMENT", 16)
    monkeypatch.setattr(replay, "DEVICE_TYPES", ("cpu",))
    alike.DECIDED.clear()
    with capability.interpreted(True), on_the_cpu(monkeypatch):
        yield
    alike.DECIDED.clear()

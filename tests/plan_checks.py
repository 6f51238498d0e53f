"""A plan run on memory that is NaN before it is written and after it was read last: a lifetime that
is a step too short, or memory that two buffers have at once, changes a result.
"""

import torch

from kernels_pallas.kernel import Kernel
from nsa_core.plan.buffers import Derived, Join, Launch, Memory
from nsa_torch.torch_ops import TORCH_OPS

POISON = 0xFF  # bytes of which every float is NaN, and every integer is no index


def peak(plan):
    """Bytes that a plan holds at most, beside its arguments and constants."""
    held, most = {}, 0
    for step, ends in zip(plan.steps, plan.ends, strict=True):
        buffers = {x.buffer: plan.buffers[x.buffer] for x in step.writes}
        held |= {n: x.bytes for n, x in buffers.items() if x.memory is Memory.ALONE}
        most = max(most, sum(held.values()))
        for n in ends:
            held.pop(n, None)
    return most + plan.workspace_bytes


def run(plan, given, kernels, triton):
    """The results of a plan; memory is NaN until it is written, and after it was read last.

    Args:
      given: its arguments.
      kernels, triton: outputs of a kernel for its input tensors.
    """
    workspace = torch.full((plan.workspace_bytes,), POISON, dtype=torch.uint8)
    memory, last = {}, {}
    for i, step in enumerate(plan.steps):
        last |= {x.buffer: i for x in (*step.reads, *step.writes)}
    for n, buffer in enumerate(plan.buffers):
        if buffer.memory is Memory.ARGUMENT:
            memory[n] = _bytes(given[n].detach().contiguous())
        elif buffer.memory is Memory.WORKSPACE:
            memory[n] = workspace[buffer.offset :][: buffer.bytes]
        else:
            memory[n] = torch.full((buffer.bytes,), POISON, dtype=torch.uint8)

    def at(x):
        part = memory[x.buffer][x.offset :][: x.bytes]
        return part.view(getattr(torch, x.dtype)).view(x.shape)

    made = *plan.constants, *plan.batch
    for i, step in enumerate((*made, *plan.steps), -len(made)):
        inputs = [at(x).clone() for x in step.reads]
        if isinstance(step, Launch):
            found = (kernels if isinstance(step.kernel, Kernel) else triton)(
                step.kernel, *inputs
            )
        elif isinstance(step, Derived):
            found = step.function(TORCH_OPS, *inputs, **dict(step.static))
            found = inputs[:1] if step.in_place else found
        elif isinstance(step, Join):
            found = [at(x) for x in step.writes]
        else:
            found = []
        for x, y in zip(step.writes, found, strict=True):
            assert str(y.dtype) == f"torch.{x.dtype}" and y.numel() == at(x).numel(), step.name
            at(x).copy_(y.reshape(x.shape))
        for n, end in last.items():
            if end == i and n not in [x.buffer for x in plan.results]:
                if plan.buffers[n].memory is not Memory.ARGUMENT:
                    memory[n].fill_(POISON)
    return [at(x).clone() for x in plan.results]


def _bytes(x):
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    return x.reshape(-1).view(torch.uint8).clone()

"""What every plan must be, and a plan run on memory that is full of NaN wherever nobody reads."""

import torch

from kernels_pallas.kernel import ALIGNMENT, Kernel
from nsa_core.plan.buffers import Derived, Join, Launch, Place
from nsa_torch.torch_ops import TORCH_OPS

POISON = 0xFF  # bytes of which every float is NaN, and every integer is no index


def check(plan):
    """No write to what is not the plan's own, every read after a write, views inside buffers,
    memory shared one after the other only.
    """
    buffers = plan.buffers
    kept = {Place.ARGUMENT, Place.CONSTANT, Place.BATCH}
    assert [x.place is Place.ARGUMENT for x in buffers[: plan.arguments]] == [
        True
    ] * plan.arguments
    written = {n for n, x in enumerate(buffers) if x.place is Place.ARGUMENT}
    for step in plan.constants:
        assert written.issuperset(x.buffer for x in step.reads)
        assert all(buffers[x.buffer].place is Place.CONSTANT for x in step.writes)
        written |= {x.buffer for x in step.writes}
    for step in plan.batch:
        reads = {x.buffer for x in step.reads}
        assert written.issuperset(reads)
        others = {n for n in reads if buffers[n].place is Place.ARGUMENT} - {plan.shared}
        assert not others and all(buffers[x.buffer].place is Place.BATCH for x in step.writes)
        written |= {x.buffer for x in step.writes}
    touched = {}  # by buffer: first and last step
    for i, step in enumerate(plan.steps):
        assert written.issuperset(x.buffer for x in step.reads), step.name
        assert all(buffers[x.buffer].place not in kept for x in step.writes), step.name
        written |= {x.buffer for x in step.writes}
        for x in (*step.reads, *step.writes):
            buffer = buffers[x.buffer]
            assert x.offset % ALIGNMENT == 0 and 0 <= x.offset <= buffer.bytes - x.bytes
            assert x.dtype == buffer.dtype
            touched[x.buffer] = touched.get(x.buffer, (i, i))[0], i
        over = getattr(step.kernel, "in_place", 0) if isinstance(step, Launch) else 0
        for read, write in zip(step.reads[len(step.reads) - over :], step.writes, strict=False):
            assert write[:2] == read[:2]
    results = [x.buffer for x in plan.results]
    assert len({*results}) == len(results)
    for x in plan.results:
        assert x.buffer in touched and buffers[x.buffer].place is Place.ALONE
        assert x.shape == buffers[x.buffer].shape
    _check_lifetimes(plan, touched, results)
    _check_workspace(plan, touched)


def _check_lifetimes(plan, touched, results):
    assert all(plan.buffers[n].place is Place.ARGUMENT for n in plan.released)
    for i, (begins, ends) in enumerate(zip(plan.begins, plan.ends, strict=True)):
        for n in begins:
            assert plan.buffers[n].place is Place.ALONE and touched[n][0] == i
        for n in ends:
            assert touched[n][1] == i and n not in results
    alone = {n for n in touched if plan.buffers[n].place is Place.ALONE}
    assert {n for each in plan.begins for n in each} == alone
    assert alone - {*results} <= {n for each in plan.ends for n in each}


def _check_workspace(plan, touched):
    places = [(n, x) for n, x in enumerate(plan.buffers) if x.place is Place.WORKSPACE]
    for i, (n, x) in enumerate(places):
        assert x.offset % ALIGNMENT == 0 and x.offset + x.bytes <= plan.workspace_bytes
        for m, y in places[:i]:
            apart = x.offset + x.bytes <= y.offset or y.offset + y.bytes <= x.offset
            (a, b), (c, d) = touched[n], touched[m]
            assert apart or b < c or d < a


def peak(plan):
    """Bytes that a plan holds at most, beside its arguments and constants."""
    held, most = {}, 0
    for step, ends in zip(plan.steps, plan.ends, strict=True):
        buffers = {x.buffer: plan.buffers[x.buffer] for x in step.writes}
        held |= {n: x.bytes for n, x in buffers.items() if x.place is Place.ALONE}
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
        if buffer.place is Place.ARGUMENT:
            memory[n] = _bytes(given[n].detach().contiguous())
        elif buffer.place is Place.WORKSPACE:
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
                if plan.buffers[n].place is not Place.ARGUMENT:
                    memory[n].fill_(POISON)
    return [at(x).clone() for x in plan.results]


def _bytes(x):
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    return x.reshape(-1).view(torch.uint8).clone()

"""Arguments that are one tensor, or lie in the same memory, in one call and not in the next.

Calls alike run from one plan (`nsa_core.plan`), which knows tensors by the role that they play.
Every call here has its gradients compared, bit by bit, with those of copies of its arguments. On
the CPU kernels are stand-ins, whose outputs tell any two of their inputs apart.
"""

import contextlib
import random

import pytest
import torch

import nsa_torch
from nsa_torch import Branches
from tests import planned, pretend
from tests.limits import forget, set_limits
from tests.paths import negated, same
from tests.problems import SMALL
from tests.stand_in_kernels import stand_ins

BF16 = torch.bfloat16
CALLS = 10  # with the same kind of arguments
OFFSET = 128  # elements: where kernels may read
PARTED = "key", "value", "gates"  # arguments that branches may have of their own


class Problem:
    """Arguments of calls, by role: `key.sliding`, `gates.selected`, ...

    Args:
      kind: `shared`, `apart`, `compressed`, `indices` or `packed`.
      draw: decides what is one tensor, and the numbers.
    """

    def __init__(self, kind, draw, device, config, length, width, implementation):
        self.kind, self.draw, self.device, self.length = kind, draw, device, length
        self.make = torch.Generator(device).manual_seed(draw.randrange(2**31))
        self.options = {"config": config, "implementation": implementation}
        self.options["recompute"] = draw.random() < 0.3
        tokens, pair = (1, length, 2, width), (1, config.num_compressed(length), 2, width)
        names = {x: [f"{x}.{branch}" for branch in Branches._fields] for x in PARTED}
        of_tokens = names["key"] + names["value"] if kind == "apart" else ["key", "value"]
        self.shapes = dict.fromkeys(["query", *of_tokens], tokens)
        self.shapes |= dict.fromkeys(names["gates"], tokens[:3])
        if kind == "compressed":
            self.shapes |= dict.fromkeys(("compressed.key", "compressed.value"), pair)
        # Two patterns take turns: what is one tensor in the first is not in the second.
        self.patterns = [draw.random() for _ in range(2)]

    def memory(self, shape):
        """Of a tensor, and of one that begins a little later."""
        count = torch.Size(shape).numel() + OFFSET
        return torch.randn(count, generator=self.make, device=self.device, dtype=BF16)

    def inputs(self):
        """Leaves by role, and int32 tensors by argument."""
        pattern, found, memories = random.Random(self.draw.choice(self.patterns)), {}, {}
        for role, shape in self.shapes.items():
            others = [x for x in memories if self.shapes[x] == shape]
            shares = others and pattern.random() < 0.6
            other = pattern.choice(others) if shares else role
            how = pattern.choice(["same", "view", "beside"]) if shares else "own"
            if how == "same":
                found[role] = found[other]
                continue
            if how == "own":
                memories[role] = self.memory(shape)
            there = memories[other][OFFSET * (how == "beside") :][: torch.Size(shape).numel()]
            found[role] = there.view(shape).detach().requires_grad_()
        return found, self._integers()

    def _integers(self):
        if self.kind not in ("indices", "packed"):
            return {}
        config = self.options["config"]
        shape = 1, self.length, 2, config.num_selected
        indices = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        indices[..., 0] = 0
        indices[:, config.select_block :, :, 1] = 1
        given = {"block_indices": indices}
        if self.kind == "packed":
            bounds = indices[0, -1, 0, :2]  # 0, 1, within the other argument
            if self.draw.random() < 0.5:
                bounds = bounds * (self.length - 3)
            given = given if self.draw.random() < 0.7 else {}
            given = given | {"cu_seqlens": bounds}
        return given

    def arguments(self, inputs):
        """Query, keys, values, gates."""
        each = lambda name: Branches(*(inputs[f"{name}.{x}"] for x in Branches._fields))
        pair = (each(x) if self.kind == "apart" else inputs[x] for x in ("key", "value"))
        return inputs["query"], *pair, each("gates")

    def call(self, inputs, integers):
        given = {}
        if self.kind == "compressed":
            given["compressed"] = inputs["compressed.key"], inputs["compressed.value"]
        return nsa_torch.attention(*self.arguments(inputs), **given, **integers, **self.options)

    def cotangent(self, inputs, out):
        """Any tensor like the output: its own, or what is there already."""
        given = [x for x in inputs.values() if x.shape == out.shape]
        kept = [x for x in out.grad_fn.saved_tensors if x is not None]
        kept = [x for x in kept if x.shape == out.shape and x.dtype == out.dtype]
        memory, size = self.memory(out.shape), out.numel()
        row = memory[: size // self.length].view(1, 1, *out.shape[2:]).expand_as(out)
        turned = memory[:size].view(1, out.shape[2], self.length, -1).transpose(1, 2)
        own = [memory[begin:][:size].view(out.shape) for begin in (0, 8, OFFSET)]
        some = [self.draw.choice(x) for x in (given, given, given, given, kept, kept)]
        some[0], some[1] = some[0].detach(), some[1].detach()[:, :1].expand_as(out)
        return self.draw.choice([*own, row, turned, out, out.detach(), *some])


def each_of(function, tensors):
    """Of the same objects in the same roles."""
    made = {id(x): function(x) for x in tensors.values()}
    return {role: made[id(x)] for role, x in tensors.items()}


def copies(tensors):
    """Each in memory of its own."""
    copied = lambda x: x.detach().clone().requires_grad_(x.requires_grad)
    return each_of(copied, tensors)


def objects(tensors):
    return list({id(x): x for x in tensors.values()}.values())


def elsewhere(x):
    """The same numbers, between others."""
    return torch.stack([x, x * 3 + 1], dim=-1)[..., 0]


def saved_as(back):
    """Within: what is saved for a gradient comes back as `back` gives it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, back)


def check_calls(problem):
    """Forward alone, and with gradients, by plans of the first call."""
    forget()
    for _ in range(CALLS):
        inputs, integers = problem.inputs()
        plain_mode = problem.draw.choice([torch.no_grad, torch.inference_mode])
        with plain_mode():
            plain = problem.call(inputs, integers)
        assert plain.is_inference() == (plain_mode is torch.inference_mode)
        inside = problem.draw.choice([*5 * [contextlib.nullcontext], *WITHIN])
        moved = problem.draw.choice([*5 * [same], negated])
        with inside():
            out = problem.call(each_of(moved, inputs), integers)
        do = problem.cotangent(inputs, out)
        do_copy = do.detach().clone()
        got = torch.autograd.grad(out, objects(inputs), do)
        with planned.by_steps():
            apart = copies(inputs)
            with torch.no_grad():
                want_plain = problem.call(apart, copies(integers))
            want = problem.call(apart, copies(integers))
            grads = torch.autograd.grad(want, objects(apart), do_copy)
        for x, y in zip((plain, out, *got), (want_plain, want, *grads), strict=True):
            assert torch.equal(x, y)


# What else is in force as a call runs.
WITHIN = (
    lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: saved_as(torch.clone),
    lambda: saved_as(elsewhere),
)
KINDS = "shared", "apart", "compressed", "indices", "packed"


def small(kind, draw):
    return Problem(kind, draw, "cpu", SMALL, 24, 16, "mosaic")


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_in_the_same_memory(kind, monkeypatch):
    """Small tensors are saved as one; of some kinds none is, and outputs of branches go as soon as
    they were read.
    """
    draw = random.Random(kind)
    if kind in ("shared", "apart"):
        set_limits(monkeypatch, least_released=0, bundled_bytes=0)
    known = pretend.watched(monkeypatch, "planned_call")
    with stand_ins(monkeypatch):
        for _ in range(8):
            check_calls(small(kind, draw))
    assert known


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_in_the_same_memory_on_gpu(kind, implementation):
    draw = random.Random(kind)
    for _ in range(5):
        config = nsa_torch.NSAConfig()
        check_calls(Problem(kind, draw, "cuda", config, 300, 64, implementation))


@torch.no_grad()
def test_tokens_of_a_cache_in_the_same_memory(monkeypatch):
    def outputs(copied):
        problem = small("shared", random.Random(0))
        sizes = dict(config=SMALL, dtype=BF16, device="cpu")
        cache = nsa_torch.init_cache(1, 24 * CALLS, 2, 16, 16, **sizes)
        for _ in range(CALLS):
            inputs, _ = problem.inputs()
            given = problem.arguments(copies(inputs) if copied else inputs)
            out, cache = nsa_torch.cached_attention(*given, cache, implementation="mosaic")
            yield out

    with stand_ins(monkeypatch):
        found = [*outputs(copied=False)]
        with planned.by_steps():
            assert all(map(torch.equal, found, outputs(copied=True)))


def test_a_cache_that_a_graph_keeps_is_not_written_to():
    """Chunks of which the query alone wants a gradient."""
    given = [torch.randn(1, 24, *shape) for shape in ((4, 16), (2, 16), (2, 16), (4, 3))]
    leaf = given[0].requires_grad_()
    cache = nsa_torch.init_cache(1, 24, 2, 16, 16, config=SMALL)
    chunks = zip(*(x.split([13, 7, 4], dim=1) for x in given), strict=True)
    out = torch.cat([nsa_torch.cached_attention(*x, cache)[0] for x in chunks], dim=1)
    whole = nsa_torch.attention(*given, config=SMALL)
    pair = (torch.autograd.grad(x.square().sum(), leaf)[0] for x in (out, whole))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)

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
from nsa_torch import Branches, call, plans
from tests.devices import needs_gpu
from tests.inputs import SMALL
from tests.planned import Eager
from tests.stand_in_kernels import stand_ins

BF16 = torch.bfloat16
CALLS = 10  # with the same kind of arguments
OFFSET = 128  # elements: where kernels may read


class Problem:
    """Arguments of calls, by role: `key.sliding`, `gates.selected`, ...

    Args:
      kind: `shared`, `apart`, `compressed`, `indices` or `packed`.
      draw: decides what is one tensor, and the numbers.
    """

    def __init__(self, kind, draw, device, config, length, heads, width, implementation):
        self.kind, self.draw, self.device, self.length = kind, draw, device, length
        self.make = torch.Generator(device).manual_seed(draw.randrange(2**31))
        self.options = {
            "config": config,
            "implementation": implementation,
            "recompute": draw.random() < 0.3,
        }
        tokens, gates = (1, length, heads, width), (1, length, heads)
        each = lambda name, shape: {f"{name}.{b}": shape for b in Branches._fields}
        self.shapes = {"query": tokens, **each("gates", gates)}
        if kind == "apart":
            self.shapes |= each("key", tokens) | each("value", tokens)
        else:
            self.shapes |= {"key": tokens, "value": tokens}
        if kind == "compressed":
            pair = (1, config.num_compressed(length), heads, width)
            self.shapes |= {"compressed.key": pair, "compressed.value": pair}
        # Two patterns take turns: what is one tensor in the first is not in the second.
        self.patterns = [self._pattern() for _ in range(2)]

    def _pattern(self):
        """Of some roles, another one and how they share its memory."""
        found = {}
        for role, shape in self.shapes.items():
            others = [x for x in self.shapes if x != role and self.shapes[x] == shape]
            others = [x for x in others if x not in found]
            if others and role not in {other for other, _ in found.values()}:
                if self.draw.random() < 0.4:
                    how = self.draw.choice(["same", "view", "beside"])
                    found[role] = self.draw.choice(others), how
        return found

    def normal(self, shape):
        return torch.randn(shape, generator=self.make, device=self.device, dtype=BF16)

    def inputs(self):
        """Leaves by role, and int32 tensors by argument."""
        pattern, found, memories = self.draw.choice(self.patterns), {}, {}
        leaf = lambda x: x.detach().requires_grad_()
        for role, shape in self.shapes.items():
            if role not in pattern:
                count = torch.Size(shape).numel()
                memories[role] = self.normal((count + OFFSET,))
                found[role] = leaf(memories[role][:count].view(shape))
        for role, (other, how) in pattern.items():
            if how == "same":
                found[role] = found[other]
            elif how == "view":
                found[role] = leaf(found[other].view_as(found[other]))
            else:
                found[role] = leaf(memories[other][OFFSET:].view(self.shapes[role]))
        return {role: found[role] for role in self.shapes}, self._integers()

    def _integers(self):
        if self.kind not in ("indices", "packed"):
            return {}
        config, heads = self.options["config"], self.shapes["query"][2]
        shape = 1, self.length, heads, config.num_selected
        indices = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        indices[..., 0] = 0
        indices[:, config.select_block :, :, 1] = 1
        if self.kind == "indices":
            return {"block_indices": indices}
        bounds = indices[0, -1, 0, :2]  # 0, 1, within the other argument
        if self.draw.random() < 0.5:
            bounds = bounds * (self.length - 3)
        return {"cu_seqlens": bounds} | (
            {"block_indices": indices} if self.draw.random() < 0.7 else {}
        )

    def call(self, inputs, integers):
        each = lambda name: Branches(*(inputs[f"{name}.{b}"] for b in Branches._fields))
        key, value = (each(x) if self.kind == "apart" else inputs[x] for x in ("key", "value"))
        pair = {}
        if self.kind == "compressed":
            pair["compressed"] = inputs["compressed.key"], inputs["compressed.value"]
        given = inputs["query"], key, value, each("gates")
        return nsa_torch.attention(*given, **pair, **integers, **self.options)

    def cotangent(self, inputs, out):
        """Any tensor like the output: its own, or what is there already."""
        given = [x for x in inputs.values() if x.shape == out.shape]
        kept = [x for x in out.grad_fn.saved_tensors if x is not None]
        kept = [x for x in kept if x.shape == out.shape and x.dtype == out.dtype]
        memory = self.normal((out.numel() + OFFSET,))
        expanded = self.normal((1, 1, *out.shape[2:])).expand_as(out)
        turned = self.normal((*out.shape[:1], out.shape[2], out.shape[1], out.shape[3]))
        return self.draw.choice(
            [
                memory[: out.numel()].view(out.shape),
                memory[OFFSET:].view(out.shape),
                memory[8 : out.numel() + 8].view(out.shape),
                expanded,
                turned.transpose(1, 2),
                out,
                out.detach(),
                *(self.draw.choice(x) for x in (given, given, kept, kept)),
                self.draw.choice(given).detach(),
                self.draw.choice(given).detach()[:, :1].expand_as(out),
            ]
        )


def copies(tensors):
    """The same objects in the same roles, each in memory of its own."""
    made = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in tensors.values()}
    return {role: made[id(x)] for role, x in tensors.items()}


def objects(tensors):
    return list({id(x): x for x in tensors.values()}.values())


def check_calls(problem, calls, monkeypatch):
    """Forward alone, and with gradients."""
    for _ in range(calls):
        inputs, integers = problem.inputs()
        with torch.no_grad():
            plain = problem.call(inputs, integers)
        out = problem.call(inputs, integers)
        do = problem.cotangent(inputs, out)
        do_copy = do.detach().clone()
        got = torch.autograd.grad(out, objects(inputs), do)
        with plans.unplanned(Eager()):
            apart = copies(inputs)
            with torch.no_grad():
                assert torch.equal(plain, problem.call(apart, copies(integers)))
            want = problem.call(apart, copies(integers))
            grads = torch.autograd.grad(want, objects(apart), do_copy)
        assert torch.equal(out, want)
        assert all(torch.equal(x, y) for x, y in zip(got, grads, strict=True))


KINDS = "shared", "apart", "compressed", "indices", "packed"


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_in_the_same_memory(kind, monkeypatch):
    draw = random.Random(kind)
    with stand_ins(monkeypatch):
        for _ in range(10):
            problem = Problem(kind, draw, "cpu", SMALL, 24, 2, 16, "mosaic")
            check_calls(problem, CALLS, monkeypatch)
        assert call.PROGRAMS._values


def test_numbers_by_identity_are_found(monkeypatch):
    """A planner that takes two arguments for one where they are one tensor."""
    views = plans._views

    def by_identity(ops, arguments):
        first = {id(x): i for i, x in reversed([*enumerate(arguments)])}
        found = views(ops, arguments)
        return [found[first[id(x)]] for x in arguments]

    draw = random.Random(1)
    with stand_ins(monkeypatch):
        monkeypatch.setattr(plans, "_views", by_identity)
        with pytest.raises(AssertionError):
            for _ in range(4):
                problem = Problem("shared", draw, "cpu", SMALL, 24, 2, 16, "mosaic")
                check_calls(problem, CALLS, monkeypatch)


def test_tokens_of_a_cache_in_the_same_memory(monkeypatch):
    draw = random.Random(0)
    with contextlib.ExitStack() as stack, stand_ins(monkeypatch), torch.no_grad():
        problem = Problem("shared", draw, "cpu", SMALL, 24, 2, 16, "mosaic")
        found = []
        for planned in (True, False):
            if not planned:
                stack.enter_context(plans.unplanned(Eager()))
            problem.make.manual_seed(0)
            draw.seed(0)
            cache = nsa_torch.init_cache(
                1, 24 * CALLS, 2, 16, 16, config=SMALL, dtype=BF16, device="cpu"
            )
            for _ in range(CALLS):
                inputs, _ = problem.inputs()
                inputs = inputs if planned else copies(inputs)
                given = (inputs[x] for x in ("query", "key", "value"))
                gates = Branches(*(inputs[f"gates.{b}"] for b in Branches._fields))
                options = {"config": SMALL, "implementation": "mosaic"}
                out, cache = nsa_torch.cached_attention(*given, gates, cache, **options)
                found.append(out)
        for x, y in zip(found[:CALLS], found[CALLS:], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "gates"])
def test_a_cache_that_a_graph_keeps_is_not_written_to(wanted):
    """Chunks of which one argument wants a gradient."""
    shapes = {"query": (4, 16), "key": (2, 16), "value": (2, 16), "gates": (4, 3)}
    given = {name: torch.randn(1, 24, *shape) for name, shape in shapes.items()}
    leaf = given[wanted].requires_grad_()
    whole = nsa_torch.attention(*given.values(), config=SMALL).square().sum()
    cache = nsa_torch.init_cache(1, 24, 2, 16, 16, config=SMALL)
    found = []
    for chunk in (slice(0, 13), slice(13, 20), slice(20, 24)):
        tokens = (x[:, chunk] for x in given.values())
        out, cache = nsa_torch.cached_attention(*tokens, cache)
        found.append(out.square().sum())
    pair = (torch.autograd.grad(x, leaf)[0] for x in (sum(found), whole))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", call.KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_in_the_same_memory_on_gpu(kind, implementation, monkeypatch):
    draw = random.Random(kind)
    for _ in range(5):
        problem = Problem(kind, draw, "cuda", nsa_torch.NSAConfig(), 300, 2, 64, implementation)
        check_calls(problem, CALLS, monkeypatch)


def test_a_chunk_without_gradients_leaves_what_a_graph_keeps():
    """The cache of a chunk that wanted gradients, and a later one that wants none."""
    query, gates = torch.randn(1, 20, 4, 16), torch.randn(1, 20, 4, 3)
    key, value = (torch.randn(1, 20, 2, 16) for _ in range(2))
    leaf = key[:, :13].clone().requires_grad_()
    parts = query[:, :13], leaf, value[:, :13], gates[:, :13]
    whole = nsa_torch.attention(*parts, config=SMALL).square().sum()
    cache = nsa_torch.init_cache(1, 24, 2, 16, 16, config=SMALL)
    out, cache = nsa_torch.cached_attention(*parts, cache)
    nsa_torch.cached_attention(*(x[:, 13:] for x in (query, key, value, gates)), cache)
    pair = (torch.autograd.grad(x, leaf)[0] for x in (out.square().sum(), whole))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)

"""Public calls of one signature decide once (`nsa_torch.signature`), and what decides is seen.

Kernels are stand-ins here. What real ones give: `test_any_length.py`, on a GPU.
"""

import contextlib
import ctypes
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import Parameter

import nsa_torch
from kernels_pallas.mosaic import capability
from nsa_core import debug, policy
from nsa_torch import Branches
from tests import planned, pretend, refusals
from tests.limits import set_limits
from tests.planned import Eager
from tests.problems import SMALL
from tests.stand_in_kernels import stand_in, stand_ins
from tests.tables import table
from tests.torch_sizes import Sizes

LEFT = [math.inf]  # launches until one fails


@pytest.fixture(autouse=True)
def on_stand_ins(monkeypatch):
    def run(kernel, *tensors):
        LEFT[0] -= 1
        if LEFT[0] < 0:
            raise MemoryError
        return stand_in(kernel, *tensors)

    with stand_ins(monkeypatch, run):
        yield
    LEFT[0] = math.inf


@pytest.fixture
def checked(monkeypatch):
    """How often a call was checked."""
    return pretend.watched(monkeypatch, "checked_tokens")


def good(**changes):
    """Arguments of a call."""
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16)
    arguments = {
        "query": make(1, 24, 4, 16),
        "key": make(1, 24, 2, 16),
        "value": make(1, 24, 2, 16),
        "gates": make(1, 24, 4, 3),
        "config": SMALL,
        "implementation": "mosaic",
    }
    return arguments | changes


@pytest.fixture
def decided(checked):
    """Whether a call is decided, not known; one that is refused is decided too."""

    def decided(arguments):
        checked.clear()
        with contextlib.suppress(RuntimeError):
            nsa_torch.attention(**arguments)
        return bool(checked)

    return decided


def by_steps(**arguments):
    """The output without a plan."""
    with planned.by_steps():
        return nsa_torch.attention(**arguments)


VARIANTS = {
    "plain": {},
    "branches": {"gates": None},
    "packed": {"cu_seqlens": torch.tensor([0, 5, 20])},
    "compressed": {"compressed": (torch.ones(1, 5, 2, 16, dtype=torch.bfloat16),) * 2},
    "indices": {"block_indices": torch.arange(4, dtype=torch.int32).expand(1, 24, 2, 4)},
}


def variant(name):
    arguments = good(**VARIANTS[name])
    if name == "branches":
        each = lambda shape: Branches(*(torch.randn(shape).bfloat16() for _ in range(3)))
        shapes = {"gates": (1, 24, 4), "key": (1, 24, 2, 16), "value": (1, 24, 2, 16)}
        arguments |= {x: each(shape) for x, shape in shapes.items()}
    return arguments


@pytest.fixture
def no_autocast(monkeypatch):
    """Kernels are launched, on the stream 0, where it is off alone."""
    on = torch.is_autocast_enabled
    pretend.machine(monkeypatch, current_stream=lambda device: int(on("cpu")))


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((x, "mosaic") for x in VARIANTS), ("plain", "triton"), ("branches", "triton")],
)
@torch.no_grad()
def test_the_second_call_is_known(name, implementation, checked, no_autocast, monkeypatch):
    if implementation == "triton":
        pretend.machine(monkeypatch, kernels_why_not=None)
    for i in range(4):
        arguments = variant(name) | {"implementation": implementation}
        want = by_steps(**arguments)
        checked.clear()
        with torch.autocast("cpu", dtype=torch.float16, enabled=i == 3):
            got = nsa_torch.attention(**arguments)
        assert torch.equal(got, want) and got.abs().sum() > 0
        assert bool(checked) == (i == 0)
    again = nsa_torch.attention(**arguments)
    assert again.data_ptr() != got.data_ptr() and not again._is_view()


GIVEN = "query", "key", "value", "gates"


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_a_gradient_without_a_plan(before):
    """Of a call that had one: that call's own, and later ones have plans again."""

    def gradients(arguments, inside):
        leaves = [arguments[name].requires_grad_() for name in GIVEN]
        out = nsa_torch.attention(**arguments)
        with inside:
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

    ran, ops = [], Eager()
    run, ops.run = ops.run, lambda kernel, *x: ran.append(kernel) or run(kernel, *x)
    for inside in [contextlib.nullcontext()] * before + [planned.by_steps(ops)]:
        gradients(good(), inside)
    assert ran  # step by step, whether there is a plan or not
    ran.clear()
    arguments = good()
    got = gradients(arguments, contextlib.nullcontext())
    assert not ran
    with planned.by_steps():
        want = gradients(arguments, contextlib.nullcontext())
    assert all(torch.equal(a, b) and a.any() for a, b in zip(got, want, strict=True))


@pytest.fixture
def released(monkeypatch):
    """Bytes that each release leaves of its tensors; what goes is written over first."""
    set_limits(monkeypatch, least_released=0, bundled_bytes=0)
    left, release = [], pretend.original("release")

    def noted(tensors):
        for x in tensors:
            if x.untyped_storage().nbytes() == x.nbytes:
                ctypes.memset(x.data_ptr(), 0xFF, x.nbytes)
        release(tensors)
        left.append([x.untyped_storage().nbytes() for x in tensors])

    pretend.machine(monkeypatch, release=noted)
    return left


def a_call(**changes):
    """A function of `retain_graph` that gives the gradients of a call, its output, and inputs."""
    arguments = good(**changes)
    leaves = [arguments[x].requires_grad_() for x in GIVEN]
    out = nsa_torch.attention(**arguments)
    grad = torch.ones_like(out)
    return lambda retain: torch.autograd.grad(out, leaves, grad, retain_graph=retain), out


def test_outputs_of_branches_go_once_they_were_read(released):
    """Not before the last pass through the graph."""
    for _ in range(4):
        gradients, _ = a_call(scale=0.3)  # no list of another test
        found = gradients(True), gradients(False)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert released == [[0] * 3]
        released.clear()


@pytest.mark.parametrize("how", ["a mode forward", "recomputed", "hooks"])
def test_what_others_may_have_stays(how, released):
    options = {"recompute": how == "recomputed", "scale": 0.4}
    with contextlib.ExitStack() as stack:
        if how == "a mode forward":
            stack.enter_context(Sizes())
        if how == "hooks":
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            stack.enter_context(hooks)
        gradients, _ = a_call(**options)
    gradients(False)
    assert not released


retained_or_not = pytest.mark.parametrize("retain", [True, False])


@pytest.mark.parametrize("launches", [0, 4])
@retained_or_not
def test_a_pass_that_failed(retain, launches, released):
    """It is done again, or an error says what to do."""
    gradients, _ = a_call(scale=0.5 + retain + 2 * launches)
    LEFT[0] = launches
    with pytest.raises(MemoryError):
        gradients(retain)
    LEFT[0] = math.inf
    assert len(released) == (launches > 0 and not retain)
    if retain or not launches:
        gradients(False)
    else:
        with pytest.raises(RuntimeError, match="run the forward pass again"):
            gradients(False)


@retained_or_not
def test_many_gradients_at_once_are_refused(retain):
    arguments = good(gates=good()["gates"].requires_grad_())
    for _ in range(2):
        out = nsa_torch.attention(**arguments)
    many = torch.stack([out.detach()] * 2)
    with pytest.raises(NotImplementedError, match="does not support vmap"):
        torch.autograd.grad(
            out, arguments["gates"], many, retain_graph=retain, is_grads_batched=True
        )


def shifted(x, elements):
    """`x` at another place of its memory."""
    memory = x.new_zeros(x.numel() + elements)
    memory[elements:] = x.flatten()
    return memory[elements:].view(x.shape)


SAME = torch.randn(1, 24, 2, 16).bfloat16()
CHANGES = {
    name: lambda a, row=row: a | refusals.given(row)
    for name, row in table("test_signature").items()
} | {
    "strides": lambda a: a | {"key": a["key"].transpose(1, 2).contiguous().transpose(1, 2)},
    "alignment": lambda a: a | {"value": shifted(a["value"], 4)},
    "branches": lambda a: a | {"key": Branches(a["key"], SAME, a["key"])},
    "branches of one": lambda a: a | {"key": Branches.each(a["key"])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_argument_counts(change, decided):
    one = good()
    assert decided(one) and not decided(one) and decided(CHANGES[change](one))


UNCHANGED = {
    "aligned offset": lambda a: a | {"value": shifted(a["value"], 8)},  # 16 bytes
    "one tensor": lambda a: a | {"key": SAME, "value": SAME},
    "numbers": lambda a: a | {"query": a["query"] * 2},
    "a leaf": lambda a: a | {"query": Parameter(a["query"], requires_grad=False)},
}


@pytest.mark.parametrize("change", UNCHANGED)
@torch.no_grad()
def test_what_no_plan_depends_on_does_not_count(change, decided):
    one = good()
    other = UNCHANGED[change](one)
    assert decided(one) and not decided(other)
    copies = {x: y.clone() if isinstance(y, torch.Tensor) else y for x, y in other.items()}
    assert torch.equal(nsa_torch.attention(**other), nsa_torch.attention(**copies))


def test_which_tensors_belong_together_counts(decided):
    one = good()
    a, b, c, d = (one["key"] + i for i in range(4))
    assert decided(one | {"key": Branches(a, b, c), "value": d})
    assert decided(one | {"key": a, "value": Branches(b, c, d)})


def test_whether_gradients_are_wanted_counts(decided):
    assert decided(good())
    for name in GIVEN:
        arguments = good()
        arguments[name].requires_grad_()
        assert decided(arguments) == (name == "query")  # whichever comes first
        with torch.no_grad():
            assert not decided(arguments)


def test_what_is_in_force_counts(decided):
    arguments = good()
    assert decided(arguments)
    with capability.interpreted(False):
        assert decided(arguments)
    with policy.overridden(policy.Thresholds(sel_min_len=7), "a test"):
        assert decided(arguments) and not decided(arguments)
    assert not decided(arguments)


def test_tuples_are_refused_after_a_good_call():
    arguments = variant("branches")
    nsa_torch.attention(**arguments)
    for name in ("gates", "key", "value"):
        with pytest.raises(ValueError, match="must be a torch tensor, got tuple"):
            nsa_torch.attention(**arguments | {name: tuple(arguments[name])})


class Own(torch.Tensor):
    pass


def test_a_mode_sees_the_operator(checked):
    arguments = good()
    for _ in range(3):
        nsa_torch.attention(**arguments)
    checked.clear()
    with Sizes() as mode:
        nsa_torch.attention(**arguments)
    assert any("nsa.attention" in name for name in mode.names) and checked


def test_where_something_else_has_a_say_a_call_decides_anew(decided):
    arguments = good()
    again = lambda **changes: [decided(arguments | changes) for _ in range(2)]
    assert again() == [True, False]
    with torch.device("cpu"):  # a mode, through which functions of torch go
        assert all(again())
    assert all(again(query=arguments["query"].as_subclass(Own)))
    assert again(query=Parameter(arguments["query"])) == [True, False]
    names = ["mosaic"], Branches(["mosaic"], None, None)
    wrong = {"config": None, "scale": SAME, "gates": arguments["gates"].float().numpy()}
    wrong = [*wrong.items(), ("query", arguments["query"].to_sparse())]
    for name, x in [*wrong, *(("implementation", x) for x in names)]:
        with pytest.raises(ValueError, match=f"^{name}.* must be"):
            decided(arguments | {name: x})
    seen = []
    watch = lambda x: seen.append(decided(arguments | {"query": x})) or x.float().sum()
    torch.func.grad(watch)(arguments["query"])
    torch.func.vmap(watch)(arguments["query"][None])
    with torch.autograd.forward_ad.dual_level():
        watch(arguments["query"])
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # that it is deprecated; it supports no such operator
        torch.jit.trace(watch, arguments["query"], check_trace=False)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        watch(fake.from_tensor(arguments["query"]))
        watch(arguments["query"])
    assert seen == [True] * 6
    debug.enable("routing")
    assert decided(arguments)
    debug.enable()
    assert not decided(arguments)


def test_threads_share_what_was_decided():
    arguments = good()
    with torch.no_grad():
        want = nsa_torch.attention(**arguments)

    def work(_):
        with torch.no_grad(), capability.interpreted(True):
            return [nsa_torch.attention(**arguments) for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        found = [x for each in pool.map(work, range(3)) for x in each]
    assert len(found) == 60 and all(torch.equal(x, want) for x in found)


def test_other_implementations_decide_at_every_call(decided):
    arguments = good(implementation="sdpa")
    assert all(decided(arguments) for _ in range(3))

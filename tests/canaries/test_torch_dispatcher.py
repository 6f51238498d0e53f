"""torch's dispatcher: what our operators ask it, of modes, transforms and passes of autograd."""

import pytest
import torch
from torch._C._functorch import TransformType, is_functorch_wrapped_tensor, unwrap_if_dead
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from nsa_torch.plain import constant, has_hooks, is_last_pass, plain, under_transforms
from tests.canaries import canary
from tests.torch_sizes import Sizes

OPERATORS, PLAIN = "nsa_torch/operators.py", "nsa_torch/plain.py and checks.py"
RELEASE = "nsa_torch/plain.py"


@pytest.fixture(scope="module")
def operator():
    """An operator that says which of its functions ran."""
    torch.library.define("nsa_canary::which", "(Tensor x) -> Tensor")
    torch.library.impl("nsa_canary::which", "CompositeExplicitAutograd", lambda x: x + 1)
    torch.library.impl("nsa_canary::which", "Autograd", lambda x: x + 2)
    return torch.ops.nsa_canary.which


def test_below_autograd_the_function_runs_and_no_gradient_is_recorded(operator):
    x = torch.zeros((), requires_grad=True)
    with canary("torch", "calls an operator's autograd below it too", OPERATORS):
        assert operator(x) == 2
        with torch._C._AutoDispatchBelowAutograd():
            assert operator(x) == 1 and not (x * 2).requires_grad
        returns = torch.ops.nsa_canary.which.default._schema.returns
        assert [str(x.type) for x in returns] == ["Tensor"]


def test_a_backward_pass_has_a_number():
    with canary("torch", "numbers backward passes otherwise", "nsa_torch/cache.py"):
        assert torch._C._current_graph_task_id() == -1
        numbers, x = [], torch.zeros((), requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        for _ in range(2):
            y.backward(retain_graph=True)
        assert numbers[0] >= 0 and numbers[0] != numbers[1]


def test_the_compiler_is_told_of_a_constant_as_torch_does_it():
    with canary("torch", "marks what compiled code takes as a constant otherwise", PLAIN):
        told = torch.compiler.assume_constant_result(lambda: 1)
        assert vars(constant(lambda: 1)) == vars(told)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_what_sees_a_call_is_seen():
    """Where the dispatcher would do more than find the function, a call is not plain."""
    x, seen = torch.ones(2), {}

    def look(name, here):
        seen[name] = plain([here])
        return (here * here).sum()

    with canary("torch", "hides modes or transforms from a call", PLAIN):
        look("nothing", x)
        with Sizes():
            look("dispatch mode", x)
        with torch.device("cpu"):
            look("function mode", x)
        torch.func.grad(lambda y: look("transform", y))(x)
        with torch.autograd.forward_ad.dual_level():
            look("dual numbers", x)
        torch.jit.trace(lambda y: look("trace", y), (x,), check_trace=False)
        assert seen.pop("nothing") and not any(seen.values()), seen
        assert plain([x])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of jvp
def test_transforms_have_names_and_wrappers():
    found = {}

    def look(name, x):
        keys = [each.key() for each in retrieve_all_functorch_interpreters()]
        found[name] = keys, is_functorch_wrapped_tensor(x), under_transforms()
        return (x * x).sum()

    x, one = torch.ones(2), [torch.ones(2)]
    with canary("torch", "names transforms of torch.func otherwise", OPERATORS):
        torch.func.grad(lambda y: look("Grad", y))(x)
        torch.func.vmap(lambda y: look("Vmap", y))(x)
        torch.func.jvp(lambda y: look("Jvp", y), (x,), (x,))
        for name, (keys, wrapped, under) in found.items():
            assert keys[-1] == getattr(TransformType, name) and wrapped and under, name
    with canary("torch", "leaves other wrappers when torch.func.vjp has ended", OPERATORS):
        torch.func.vjp(lambda y: one.append(y) or (y * y).sum(), x)
        dead = one[-1]
        assert is_functorch_wrapped_tensor(dead)
        assert unwrap_if_dead(dead).data_ptr() == x.data_ptr()


def test_a_pass_that_keeps_its_graph_is_told_from_the_last_one():
    """Without these names memory is kept, and nothing else says so."""
    found = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            found.append(is_last_pass())
            return grad

    x = torch.ones((), requires_grad=True)
    with canary("torch", "does not say which backward pass is the last one", RELEASE):
        y = Told.apply(x)
        y.backward(retain_graph=True)
        y.backward()
        assert found == [False, True], found
    with canary("torch", "does not say whether hooks see what is saved", RELEASE):
        assert not has_hooks()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert has_hooks()

"""Calls alike run from a list: `nsa_torch.replay` on functions of torch alone.

With kernels in the list: `test_torch_mosaic.py` in the interpreter, `test_any_length.py` on a GPU.
"""

import ctypes
import functools
import operator
import weakref

import numpy as np
import pytest
import torch

from kernels_pallas.kernel import Array
from nsa_interop import launch
from nsa_torch import program, program_steps, replay
from nsa_torch.program_steps import Launch
from nsa_torch.replay import Replayed
from nsa_torch.shared import SHARED

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """There is no stream, and torch aligns memory to less."""
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(launch, "ALIGNMENT", 16)
    monkeypatch.setattr(replay, "DEVICE_TYPES", ("cpu",))


def everything(x, y, others, number):
    """Views, writes, lists of tensors, several results, numbers, shared tensors."""
    steps = shared(x.shape[1])
    total = torch.cat([x[:, 1:], y[:, 1:]], dim=1) * number
    total[:, :1] = y[:, :1] + steps
    values, indices = total.sort(dim=1)
    even = values.reshape(x.shape[0], -1)[:, ::2].contiguous()
    kept = torch.where(indices > 1, values, 0)
    return [even, kept.amax(dim=1), x.new_zeros(others[0])]


def shared(count):
    """As `KernelLayout.cached`."""
    make = lambda: [torch.arange(count, dtype=torch.float32)[None, :1]]
    get = lambda: SHARED.get(("test_replay", count), DEVICE, make)
    noted = replay.recording()
    (found,) = noted.constants(get) if noted else get()
    return found


@pytest.fixture
def counted():
    """`everything` from a list, and how often it was run itself."""
    calls = []

    def count(*arguments):
        calls.append(1)
        return everything(*arguments)

    yield Replayed(count), calls
    SHARED.clear()


def check(function, *arguments):
    for got, want in zip(function(*arguments), everything(*arguments), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_the_third_call_is_run_from_the_list(counted):
    function, calls = counted
    for i in range(5):
        x, y = torch.randn(2, 5), torch.randn(2, 5)
        check(function, x, y, [3], 2.0)
        assert len(calls) == min(i + 1, 2)
    one, other = (function(x, y, [3], 2.0) for _ in range(2))
    assert not {x.data_ptr() for x in one} & {x.data_ptr() for x in other}


def test_shared_tensors_may_be_dropped(counted):
    function, calls = counted
    for _ in range(4):
        check(function, torch.randn(2, 5), torch.randn(2, 5), [3], 2.0)
        SHARED.clear()
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x, y, [4], 2.0),
        lambda x, y: (x, y, [3], 3.0),
        lambda x, y: (x[:, :4], y[:, :4], [3], 2.0),
        lambda x, y: (x.double(), y.double(), [3], 2.0),
        lambda x, y: (x.t().contiguous().t(), y, [3], 2.0),
        lambda x, y: (torch.cat([x[0], x.flatten()])[5:].view_as(x), y, [3], 2.0),
        lambda x, y: (x, x, [3], 2.0),
    ],
    ids=["list", "number", "shape", "dtype", "strides", "alignment", "same tensor"],
)
def test_other_calls_are_not_alike(counted, change):
    function, calls = counted
    x, y = torch.randn(2, 5), torch.randn(2, 5)
    first = (x, y, [3], 2.0)
    other = change(x, y)
    assert replay.signature(first) != replay.signature(other)
    for _ in range(3):
        check(function, *first)
        check(function, *other)
    assert len(calls) == 4


def test_one_tensor_in_two_places_is_not_two_tensors():
    """A function may ask which of its arguments are the same."""
    once = lambda x, y: [x * 3] if x is y else [x + y]
    function = Replayed(once)
    x = torch.randn(3)
    for _ in range(4):
        assert torch.equal(function(x, x)[0], x * 3)
        y = torch.randn(3)
        assert torch.equal(function(x, y)[0], x + y)


def test_what_reads_another_tensor_is_never_run_from_a_list():
    outside = torch.ones(3)
    function = Replayed(lambda x: [x + outside])
    for i in range(5):
        outside = torch.full((3,), float(i))
        assert torch.equal(function(torch.zeros(3))[0], outside)


def test_an_error_leaves_nothing_behind(counted):
    function, calls = counted
    wrong = torch.randn(2, 5), torch.randn(3, 5), [3], 2.0
    for _ in range(3):
        with pytest.raises(RuntimeError, match="must match"):
            function(*wrong)
    assert replay.recording() is None and len(calls) == 3


def test_the_least_recently_used_list_goes_first(counted, monkeypatch):
    monkeypatch.setattr(replay, "PROGRAMS", 2)
    function, calls = counted
    x, y = torch.randn(2, 5), torch.randn(2, 5)
    for number in (1.0, 1.0, 2.0, 1.0, 3.0, 1.0):
        check(function, x, y, [3], number)
    assert len(calls) == 4  # twice 1.0, once each of the others
    for _ in range(3):
        check(function, x, y, [3], 2.0)
    assert len(calls) == 6


def test_other_devices_are_called_as_they_are(monkeypatch):
    monkeypatch.setattr(replay, "DEVICE_TYPES", ("cuda",))
    calls = []
    function = Replayed(lambda x: calls.append(1) or [x])
    for _ in range(4):
        function(torch.zeros(1))
    assert len(calls) == 4


# Kernels in the list: any function of arrays may be one


class Doubling:
    """A kernel in the words of `kernels_pallas.kernel`: `y = 2 x`, or `x + x` of two."""

    name = "doubling"

    def __init__(self, *shapes, outputs):
        self.inputs = [Array(shape, "float32") for shape in shapes]
        self.outputs = [Array(shape, "float32") for shape in outputs]

    def __call__(self, *arrays):
        return [sum(x.reshape(-1) for x in arrays) * (i + 1) for i in range(len(self.outputs))]

    def launched(self, *tensors):
        """As `TorchOps.run`."""
        make = lambda: [
            x.reshape(y.shape) for x, y in zip(self(*tensors), self.outputs, strict=True)
        ]
        noted = replay.recording()
        return noted.launched(self, tensors, make) if noted else make()


@pytest.fixture(params=[False, True], ids=["each", "in a row"])
def launches(monkeypatch, request):
    """What was launched by addresses: where the outputs were; launches in a row are a step, or each
    is one.
    """
    found = []

    def launcher(kernel, device):
        def start(stream, addresses):
            arrays = [
                np.ctypeslib.as_array((ctypes.c_float * x.size).from_address(address))
                for x, address in zip((*kernel.inputs, *kernel.outputs), addresses, strict=True)
            ]
            count = len(kernel.inputs)
            for place, x in zip(arrays[count:], kernel(*arrays[:count]), strict=True):
                place[:] = x
            found.append(addresses[count:])

        return start

    def sequence(kernels, arguments, device):
        starts = [launcher(kernel, device) for kernel in kernels]

        def start(stream, addresses):
            for each, numbers in zip(starts, arguments, strict=True):
                each(stream, [addresses[i] for i in numbers])

        return start if request.param else None

    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setattr(launch, "sequence", sequence)
    return found


def rows_of(function):
    """Of each step of the only program of a function: how many kernels it launches, 0 of others."""
    (known,) = function._known._values.values()
    return [len(getattr(step, "kernels", ())) for step in known.program.steps]


in_a_row = pytest.mark.parametrize("launches", [True], indirect=True)


def five(x, view=False):
    """Five kernels; what the second made is looked at then, and read by torch after all."""
    size = x.numel()
    one = Doubling((size,), outputs=[(size,)])
    made, looked = [x], []
    for i in range(5):
        made += one.launched(made[-1])
        if view and i == 1:
            looked.append(made[-1].view(x.shape))
    return [made[-1], *(look.sum() for look in looked)]


@in_a_row
@pytest.mark.parametrize(
    ("view", "workspace", "small", "rows"),
    [
        (False, 2**20, 2**20, [5]),
        (True, 2**20, 2**20, [5, 0, 0]),  # the view, the sum
        (False, 0, 2**20, [5]),
        (False, 0, 0, [1, 1, 1, 1, 1]),  # memory is given back after each but the last
    ],
)
def test_launches_in_a_row_are_one_step(view, workspace, small, rows, launches, monkeypatch):
    monkeypatch.setattr(program_steps, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(program, "SMALL_BYTES", small)
    function = Replayed(functools.partial(five, view=view))
    for _ in range(4):
        x = torch.randn(4, 8)
        for want, got in zip(five(x, view), function(x), strict=True):
            assert torch.equal(want, got)
    assert rows_of(function) == rows


def late_casts(x):
    """Casts of parts of what a kernel made, read by another kernel."""
    one = Doubling((x.numel(),), outputs=[x.shape])
    (made,) = one.launched(x)
    parts = made.double().unbind(-1)
    how = dict(memory_format=torch.contiguous_format)
    first, second = (part.to(torch.float32, **how) for part in parts)
    both = Doubling((first.numel(),), (first.numel(),), outputs=[first.shape])
    return both.launched(first, second)


def test_casts_of_what_was_made_come_after_it(launches):
    function = Replayed(late_casts)
    for _ in range(4):
        x = torch.randn(8, 4, 2)
        assert torch.equal(function(x)[0], late_casts(x)[0])
    assert rows_of(function) == [1, 0, 0, 1]


def cast_between(x, *tensors):
    """Casts of arguments after a kernel, for another one."""
    one = Doubling((x.numel(),), outputs=[x.shape])
    (made,) = one.launched(x)
    return [*one.launched(made), *casts(*tensors)]


@in_a_row
@pytest.mark.parametrize(("small", "rows"), [(2**20, [0, 4]), (0, [1, 1, 0, 1, 1])])
def test_small_casts_of_arguments_come_first(small, rows, launches, monkeypatch):
    for module in (program, program_steps):
        monkeypatch.setattr(module, "SMALL_BYTES", small)
    function = Replayed(cast_between)
    for _ in range(4):
        tensors = torch.randn(4, 8), *parts()
        for want, got in zip(cast_between(*tensors), function(*tensors), strict=True):
            assert torch.equal(want, got)
    assert rows_of(function) == rows


def chain(x):
    """Kernels one after another, views of what they make between them."""
    size = x.numel()
    one = Doubling((size,), outputs=[(size,), (1, size)])
    two = Doubling((size,), (size,), outputs=[(size,)])
    a, b = one.launched(x)
    (c,) = two.launched(a.view(x.shape), b.reshape(-1).view(2, -1))
    (d,) = two.launched(c.view(2, -1), a)
    (e,) = two.launched(d.detach(), c)
    (f,) = two.launched(e, x)
    found = [f.view(x.shape)]
    return found if size < 100 else [*found, f.sum() + e[1:3].sum()]


@pytest.mark.parametrize("workspace", [2**20, 2**9, 0])
@pytest.mark.parametrize("shape", [(2, 32), (2, 64)], ids=["alone", "beside a sum"])
def test_kernels_write_where_others_read(workspace, shape, launches, monkeypatch):
    monkeypatch.setattr(program_steps, "WORKSPACE_BYTES", workspace)
    function = Replayed(chain)
    for i in range(4):
        x = torch.randn(*shape)
        want, got = chain(x), function(x)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert got[0]._is_view() == (i < 2 or len(got) == 2)
        assert len(launches) == max(i - 1, 0) * 5
    (known,) = function._known._values.values()
    calls = [x.function for x in known.program.recorded if not hasattr(x, "kernel")]
    if len(got) == 1:
        assert not calls  # views cost nothing
        size = x.numel() * 4
        assert known.program.bytes == {2**20: 3 * size, 2**9: 2 * size, 0: 0}[workspace]


def test_memory_is_used_again_only_after_its_last_reader():
    arrays = {i: program_steps.Array((4,), torch.float32) for i in range(1, 5)}
    kernel = Doubling(outputs=[])
    numbers = (0, 1), (1, 2), (2, 3), (1, 4)
    steps = [program_steps.Launch(kernel, x, {x[1]: arrays[x[1]]}) for x in numbers]
    last = {0: 0, 1: 3, 2: 2, 3: 2, 4: 3}
    places, size = program_steps.placed(steps, last, arrays, arrays)
    assert places == {1: 0, 2: 16, 3: 32, 4: 16} and size == 48


def test_a_look_that_is_written_to_is_kept():
    def function(x):
        y = x * 2
        y.view(-1)[:2].copy_(x.view(-1)[2:4])
        return [y.view(-1)]

    listed = Replayed(function)
    for _ in range(4):
        x = torch.randn(2, 3)
        assert torch.equal(listed(x)[0], function(x)[0])


def test_a_recorded_call_keeps_nothing_that_was_made():
    """Neither while it is recorded nor afterwards: it takes no more memory than others."""
    gone = []

    def function(x):
        first = x + 1
        made = weakref.ref(first)
        second = first * 2
        del first
        gone.append(made() is None)
        again = second - 1  # perhaps with the identity of the first
        return [again + second]

    call, x = Replayed(function), torch.ones(3)
    wanted = [call(x)[0].tolist() for _ in range(3)]
    assert gone == [True, True]  # the third call ran from a list
    assert wanted == [[7.0] * 3] * 3


def casts(a, b, c, returned=0):
    """What a kernel reads of three tensors that are cast first, and some of the casts."""
    floats = [x.to(torch.float32, memory_format=torch.contiguous_format) for x in (c, a, b)]
    kernel = Doubling(*[(x.numel(),) for x in floats[:2]], outputs=[(a.numel(),)])
    (one,) = kernel.launched(*floats[:2])
    (other,) = kernel.launched(one, floats[2])
    return [other, *floats[:returned]]


def parts(count=3, rows=8, columns=4):
    return list(torch.randn(rows, columns, count, dtype=torch.float16).unbind(-1))


CAST = {
    "parts of one tensor": (lambda: parts(), 1),
    "in another order": (lambda: parts()[::-1], 1),
    "at other distances": (lambda: operator.itemgetter(0, 1, 3)(parts(4)), 3),
    "of several tensors": (lambda: [parts()[i] for i in range(3)], 3),
    "too few for a place of their own": (lambda: parts(rows=3, columns=1), 3),
}


@pytest.mark.parametrize("name", CAST)
def test_parts_of_one_tensor_are_cast_together(name, launches):
    make, count = CAST[name]
    function = Replayed(casts)
    for _ in range(4):
        tensors = make()
        assert torch.equal(function(*tensors)[0], casts(*tensors)[0])
    (known,) = function._known._values.values()
    casts_there = [x for x in known.program.recorded if not isinstance(x, Launch)]
    assert len(casts_there) == count


def test_a_cast_that_torch_reads_is_a_tensor(launches):
    function = lambda *tensors: casts(*tensors, returned=1)
    listed = Replayed(function)
    for _ in range(4):
        tensors = parts()
        for want, got in zip(function(*tensors), listed(*tensors), strict=True):
            assert torch.equal(want, got) and got.shape == want.shape


def test_parts_of_other_tensors_are_not_alike(launches):
    """Three parts of one tensor come first, then parts of three tensors that lie the same."""
    function = Replayed(casts)
    for _ in range(4):
        for tensors in (parts(), [parts()[i] for i in range(3)]):
            assert torch.equal(function(*tensors)[0], casts(*tensors)[0])
    assert len(function._known._values) == 2

"""Calls alike run from a list: `nsa_torch.replay` on functions of torch alone.

With kernels in the list: `test_torch_mosaic.py` in the interpreter, `test_any_length.py` on a GPU.
"""

import pytest
import torch

from interop import launch
from nsa_torch import replay
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

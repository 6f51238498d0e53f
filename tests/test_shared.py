"""Tensors that calls of the same sizes share."""

import pytest
import torch

from nsa_torch import NSAConfig
from nsa_torch import shared as shared_module
from nsa_torch.shared import Shared
from tests import pretend
from tests.limits import set_limits
from tests.torch_inputs import on_the_cpu, run

CPU = torch.device("cpu")


def counted(*values):
    """A maker of int32 tensors, and how often it was asked."""
    calls = []

    def make():
        calls.append(1)
        return [torch.tensor(value, dtype=torch.int32) for value in values]

    return make, calls


def test_the_least_recently_used_are_dropped():
    shared, (make, calls) = Shared(limit=2 * 8, recent=1), counted([1, 2])
    for key in "abacab":  # c drops b, which is then made again
        shared.get(key, CPU, make)
    assert len(calls) == 4
    assert shared.size == 16


def test_what_the_last_calls_used_stays_however_large():
    shared, (make, calls) = Shared(limit=4, recent=2), counted([1, 2])
    for key in "abab":
        assert shared.get(key, CPU, make)[0].tolist() == [1, 2]
    assert len(calls) == 2 and shared.size == 16
    for key in "ccca":  # a, then b is dropped
        shared.get(key, CPU, make)
    assert len(calls) == 4 and shared.size == 16


def test_they_can_be_read_by_kernels_and_in_any_mode():
    shared = Shared()
    with torch.inference_mode():
        (x,) = shared.get("a", CPU, lambda: [torch.ones(1).expand(4)])
    assert x.is_contiguous() and not x.is_inference()
    x.clone().requires_grad_().sum().backward()


MADE = {"compressed": "fa2_classes", "sliding": "fa2_bounds"}


@pytest.mark.parametrize("branch", MADE)
def test_fa2_shares_what_whole_sequences_alone_decide(branch, monkeypatch):
    calls = pretend.watched(monkeypatch, MADE[branch])
    config = NSAConfig(window=33)  # of this test alone

    def get(length, kv_len, packed=None):
        before, keys = len(calls), torch.zeros(1, 64, 2, 8)
        query = torch.zeros(1, length, 2, 8)
        run(branch, "fa2", query, keys, keys, config=config, kv_len=kv_len, cu_seqlens=packed)
        return len(calls) - before

    with on_the_cpu(monkeypatch):
        assert [get(64, 64), get(64, 64), get(32, 32)] == [1, 0, 1]
        for case in ((64, 63), (64, torch.tensor([64])), (64, 64, torch.tensor([0, 64]))):
            assert [get(*case), get(*case)] == [1, 1]


def slow_sevens():
    torch.cuda._sleep(100_000_000)
    return [torch.full((1 << 20,), 7, device="cuda")]


@pytest.mark.gpu
def test_another_stream_waits_for_the_maker():
    device, shared = torch.device("cuda"), Shared()

    for round_number in range(3):
        maker, reader = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(maker):
            shared.get(round_number, device, slow_sevens)
        with torch.cuda.stream(reader):
            (x,) = shared.get(round_number, device, slow_sevens)
            total = x.sum()
        reader.synchronize()
        assert int(total) == 7 << 20


@pytest.fixture
def capturing(monkeypatch):
    """A function that says whether the current stream is being captured."""
    state = [False]
    pretend.machine(monkeypatch, is_capturing=lambda device: state[0])
    return lambda yes: state.__setitem__(0, yes)


def test_a_graph_makes_what_was_not_there(capturing):
    shared, (make, calls) = Shared(), counted([1, 2])
    capturing(True)
    found = [shared.get("a", CPU, make)[0] for _ in range(2)]
    capturing(False)
    found.append(shared.get("a", CPU, make)[0])
    assert len({*map(id, found)}) == len(calls) == 3
    assert shared.size == 8  # not those of graphs, whose memory is theirs


def test_what_a_graph_has_read_stays(capturing):
    shared, (make, calls) = Shared(limit=8, recent=1), counted([1, 2])
    (kept,) = shared.get("a", CPU, make)
    capturing(True)
    assert shared.get("a", CPU, make)[0] is kept
    capturing(False)
    assert shared.size == 0 and shared.pinned_bytes == 8
    for key in "bcb":
        shared.get(key, CPU, make)
    shared.clear()
    for yes in (False, True, True):
        capturing(yes)
        assert shared.get("a", CPU, make)[0] is kept
    assert len(calls) == 4 and shared.pinned_bytes == 8


def test_many_shapes_of_graphs_are_told(capturing, monkeypatch, caplog):
    set_limits(monkeypatch, many_pinned=12)
    shared, (make, _) = Shared(), counted([1, 2])
    for i in range(4):
        capturing(False)
        shared.get(i, CPU, make)
        capturing(True)
        shared.get(i, CPU, make)
        assert len(caplog.records) == (i > 0)
    assert "capture fewer shapes" in caplog.text


@pytest.mark.gpu
def test_a_capture_on_another_device_is_seen():
    here = torch.device("cuda", torch.cuda.current_device())
    for device in (here, torch.device("cuda")):
        assert not shared_module.is_capturing(device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)
            assert shared_module.is_capturing(device)


@pytest.mark.gpu
def test_graphs_read_what_was_there():
    device, shared, made = torch.device("cuda"), Shared(limit=0, recent=1), []

    def get(key):
        def make():
            made.append(key)
            return slow_sevens()

        return shared.get(key, device, make)[0]

    def captured():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = get("a").sum()
        return graph, total

    maker = torch.cuda.Stream()
    with torch.cuda.stream(maker):
        address = get("a").data_ptr()
    graphs = [captured() for _ in range(2)]
    assert made == ["a"]
    get("b"), shared.clear()
    # Would be given the memory of a, had it been given back.
    others = [torch.zeros(1 << 20, dtype=torch.int64, device=device) for _ in range(8)]
    assert address not in [x.data_ptr() for x in others]
    for graph, total in graphs:
        graph.replay()
        assert int(total) == 7 << 20


@pytest.mark.gpu
def test_what_a_graph_makes_is_its_own():
    device, shared = torch.device("cuda"), Shared()

    def get():
        return shared.get("a", device, lambda: [torch.ones(8, device=device)])[0]

    found = []
    for _ in range(2):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            x = get()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = get() + 1
            torch.cuda.current_stream().wait_stream(side)
        found.append((graph, x, y))
    assert len({x.data_ptr() for _, x, _ in found}) == 2
    for graph, x, y in found:
        x.zero_()
        graph.replay()
        assert y.tolist() == [2.0] * 8

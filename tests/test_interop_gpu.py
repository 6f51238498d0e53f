"""Arrays between torch and JAX on a GPU: streams, freed memory, many calls in flight.

A delay (`torch.cuda._sleep`) holds one stream back while the others run on, so that a missing
wait or a memory block freed too early gives a wrong value, not a rare one.
"""

import gc
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from nsa_interop.dlpack import call_jax, release_finished, to_jax, to_torch

from nsa_interop import dlpack
from tests.limits import set_limits

pytestmark = pytest.mark.gpu

SIZES = (1 << 18, 1 << 20)  # floats: 1 and 4 MiB
N = SIZES[-1]
DELAY = 300_000_000  # clock cycles, above 0.1 s


@jax.jit
def _step(x):
    return 2 * x + 1


@jax.jit
def _pair(x):
    return 2 * x + 1, -x


_fill = jax.jit(jnp.full, static_argnums=0)


def _full(value, size=N):
    return torch.full((size,), float(value), device="cuda")


def _count_wrong(tensor, value):
    return (tensor != value).sum()


def _churn(size=N, copies=6):
    """Writes -5 over whatever memory XLA believes to be free."""
    gc.collect(0)  # JAX drops its garbage in a callback of any collection
    return [_fill((size,), -5.0) for _ in range(copies)]


@pytest.fixture(scope="module", autouse=True)
def _compiled_and_loaded():
    # A compilation or a kernel's first load would outlast the delays.
    for size in SIZES:
        tensor = _full(1, size)
        torch.cuda._sleep(1)
        _count_wrong(call_jax(_step, tensor)[0].clone(), 3)
        call_jax(_pair, tensor)
        _step(to_jax(tensor))
        jax.block_until_ready(_churn(size))
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _quiet_device():
    yield
    torch.cuda.synchronize()
    release_finished()


def _stream(kind):
    return torch.cuda.default_stream() if kind == "default" else torch.cuda.Stream()


def _delayed_output(stream, share, value):
    """JAX's `2 * value + 1`, its input still 0 until the delay on `stream` is over."""
    with torch.cuda.stream(stream):
        x = _full(0)
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        x.fill_(value)
        output = _step(share(x))
    assert not stream.query(), "the host waited, so nothing was tested"
    return x, output


@pytest.mark.parametrize("kind", ["default", "side"])
def test_jax_reads_after_the_current_stream(kind):
    _, output = _delayed_output(_stream(kind), to_jax, 3)
    np.testing.assert_array_equal(output, 7)


@pytest.mark.parametrize("kind", ["default", "side"])
def test_the_current_stream_reads_after_jax(kind):
    reader = _stream(kind)
    x, output = _delayed_output(torch.cuda.Stream(), to_jax, 5)
    with torch.cuda.stream(reader):
        wrong = _count_wrong(to_torch(output), 11)
        assert not reader.query(), "the host waited, so nothing was tested"
        assert int(wrong) == 0
    del x


def test_a_copy_may_be_dropped_while_its_read_is_queued():
    output = _step(to_jax(_full(8)))
    output.block_until_ready()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(DELAY)
        tensor = to_torch(output, copy=True)
        wrong = _count_wrong(tensor, 17)
        del output, tensor
        churn = _churn()
        jax.block_until_ready(churn)
        assert int(wrong) == 0


def test_input_of_another_stream_freed_while_jax_has_not_read_it():
    owner, user = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(owner):
        x = _full(9)
    with torch.cuda.stream(user):
        user.wait_stream(owner)
        torch.cuda._sleep(DELAY)
        (output,) = call_jax(_step, x)
        address = x.data_ptr()
    del x
    gc.collect(0)  # of the young only: a whole collection could outlast the delay
    with torch.cuda.stream(owner):
        reused = [_full(-5) for _ in range(6)]
    assert not user.query(), "the host waited, so nothing was tested"
    assert address not in [tensor.data_ptr() for tensor in reused]
    with torch.cuda.stream(user):
        assert int(_count_wrong(output, 19)) == 0


def test_stress(steps=400):
    """Many calls on five streams with delays and churn in both pools."""
    rng = random.Random(0)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(4))]
    wrong = []
    for i in range(1, steps + 1):
        size = rng.choice(SIZES)
        with torch.cuda.stream(rng.choice(streams)):
            torch.cuda._sleep(rng.randrange(2_000_000))
            x = _full(i, size)
            first, second = call_jax(_pair, x)
            del x
            junk = _full(-5, size)
            torch.cuda._sleep(rng.randrange(2_000_000))
            wrong += [_count_wrong(first, 2 * i + 1), _count_wrong(second, -i)]
            wrong += [_count_wrong(to_torch(_fill((size,), i + 0.5), copy=True), i + 0.5)]
            del first, second, junk
        if rng.random() < 0.5:
            _churn(size, copies=rng.randrange(4))
    torch.cuda.synchronize()
    assert not sum(int(count) for count in wrong)


def test_held_arrays_are_released_and_bounded(monkeypatch):
    torch.cuda.synchronize()
    release_finished()
    assert not dlpack._held
    torch.cuda._sleep(DELAY)
    for _ in range(3):
        call_jax(_step, _full(1))
    assert len(dlpack._held) == 3
    set_limits(monkeypatch, held_bytes=1)
    call_jax(_step, _full(1))
    assert len(dlpack._held) == 1
    monkeypatch.undo()
    torch.cuda.synchronize()
    release_finished()
    assert not dlpack._held


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float32])
def test_round_trip_shares_memory(dtype):
    tensor = torch.arange(24, device="cuda").reshape(2, 3, 4).remainder(2).to(dtype)
    array = to_jax(tensor)
    back = to_torch(array)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
    assert back.dtype == dtype and back.device == tensor.device
    assert torch.equal(back, tensor)


def test_empty_misaligned_and_pinned_tensors():
    assert call_jax(_step, torch.ones(0, 3, device="cuda"))[0].shape == (0, 3)
    base = torch.arange(100, dtype=torch.float32, device="cuda")
    sixteen, four = base[4:], base[1:]
    assert torch.equal(to_torch(_step(to_jax(sixteen))), 2 * sixteen + 1)
    assert torch.equal(call_jax(_step, four)[0], 2 * four + 1)
    assert to_jax(torch.zeros(16).pin_memory()).device.platform == "cpu"


def test_devices_are_kept():
    outputs = call_jax(lambda x: (x + 1, jnp.zeros(3)), torch.ones(16))
    assert [output.device.type for output in outputs] == ["cpu", "cpu"]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return call_jax(lambda x: x**3, x)[0]

    @staticmethod
    def backward(ctx, gradient):
        # The gradient of a sum is expanded, strides 0.
        tensors = (*ctx.saved_tensors, gradient.contiguous())
        return call_jax(lambda x, g: 3 * x**2 * g, *tensors)[0]


def test_gradient_on_a_side_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        x = _full(2).requires_grad_()
        torch.cuda._sleep(DELAY)
        Cube.apply(x).sum().backward()
        assert int(_count_wrong(x.grad, 12)) == 0


def test_graph_capture_is_refused():
    x = _full(1)
    refused = pytest.raises(NotImplementedError, match="captures a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = x + 1
        call_jax(_step, y)

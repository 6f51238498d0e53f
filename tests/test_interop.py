"""Arrays between torch and JAX on the CPU: aliasing, lifetime, refusals, calls."""

import functools
import gc
import threading
import time
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from nsa_interop.dlpack import call_jax, to_jax, to_torch
from torch._subclasses.fake_tensor import FakeTensorMode

SHARED_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("dtype", SHARED_DTYPES, ids=str)
def test_round_trip_shares_memory_dtype_and_values(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).remainder(5).to(dtype)
    array = to_jax(tensor)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    back = to_torch(array)
    assert back.dtype == dtype and torch.equal(back, tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
    np.testing.assert_array_equal(np.asarray(array, np.float32), tensor.float().numpy())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_64_bit_dtypes_alias_with_x64_and_are_refused_without(dtype):
    tensor = torch.arange(6).to(dtype)
    words = str(dtype).removeprefix("torch.")
    message = rf"a dtype that JAX does not convert.*{words}.*tensor\.to\(.*jax_enable_x64"
    with pytest.raises(ValueError, match=message):
        to_jax(tensor)
    with jax.enable_x64(True):
        array = to_jax(tensor)
        assert array.dtype.name == words
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert to_torch(array).dtype == dtype


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 0, 3), (1, 2, 1)])
def test_scalars_and_empty_tensors(shape):
    tensor = torch.ones(shape)
    array = to_jax(tensor)
    assert array.shape == to_torch(array).shape == to_torch(jnp.ones(shape)).shape == shape
    assert torch.equal(call_jax(lambda x: 2 * x, tensor)[0], 2 * tensor)


def test_an_alias_shows_later_writes_and_a_copy_does_not():
    tensor = torch.zeros(16)
    array = to_jax(tensor)
    alias, copy = to_torch(array), to_torch(array, copy=True)
    tensor.fill_(7)
    assert array.tolist() == alias.tolist() == [7] * 16 and copy.tolist() == [0] * 16
    copy.fill_(1)
    assert array.tolist() == [7] * 16


def collect():
    """JAX drops its garbage in a callback of any collection; one of the young is soon done."""
    gc.collect(0)


@pytest.mark.parametrize("of_torch", [True, False])
def test_an_alias_keeps_the_memory_alive(of_torch):
    numbers, full = (
        np.arange(4096, dtype=np.float32),
        functools.partial(np.full, 4096, -1.0, "f"),
    )
    given = torch.from_numpy(numbers.copy()) + 0 if of_torch else jnp.asarray(numbers) + 0
    alias = to_jax(given) if of_torch else to_torch(given)
    del given
    collect()
    churn = [
        torch.from_numpy(full()) + 0 if of_torch else jnp.asarray(full()) + 0 for _ in range(32)
    ]
    np.testing.assert_array_equal(alias, numbers)
    del churn


def test_dropping_the_alias_frees_the_torch_memory():
    memory = np.zeros(1024, np.uint8)
    start = -memory.ctypes.data % 64
    freed = weakref.ref(memory)
    array = to_jax(torch.from_numpy(memory[start : start + 512]))
    del memory
    collect()
    assert freed() is not None
    del array
    collect()
    assert freed() is None


def test_no_thread_of_jax_drops_a_tensor():
    """A thread that waits for the lock of Python while Python ends would abort the process."""
    threads = []
    function = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.sin(x @ y), x))
    for _ in range(2):
        tensor = torch.ones(256, 256)
        weakref.finalize(tensor, lambda: threads.append(threading.current_thread()))
        found = function(to_jax(tensor))
        del tensor
        found.block_until_ready()
    for _ in range(1000):  # JAX drops its inputs some time after the result is there
        if len(threads) < 2:
            time.sleep(0.01)
            collect()
    assert threads == 2 * [threading.main_thread()]


def _fake():
    with FakeTensorMode():
        return torch.zeros(16)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.zeros(3), ValueError, "tensor must be a plain torch.Tensor, got ndarray"),
        (_fake, ValueError, "got FakeTensor"),
        (lambda: torch.zeros(16, requires_grad=True), ValueError, r"tensor\.detach\(\)"),
        (lambda: torch.zeros(16, device="meta"), ValueError, "meta"),
    ],
)
def test_to_jax_refuses(make, error, message):
    with pytest.raises(error, match=message):
        to_jax(make())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x[:, :4],
        lambda x: x[:1].expand(8, 8),
        lambda x: x.view(-1)[1:],
        torch._neg_view,
    ],
    ids=["transposed", "part", "expanded", "not aligned", "negative bit"],
)
def test_what_jax_cannot_share_is_copied(change):
    x = change(torch.arange(64.0).view(8, 8))
    np.testing.assert_array_equal(to_jax(x), x.resolve_neg().numpy())


class Pair(NamedTuple):
    first: object
    second: object


def test_call_jax_keeps_structure_and_none():
    """And gives a tuple of one for an array."""

    def function(pair, nothing, nested):
        assert nothing is None
        return Pair(pair.first + 1, (None, nested[0][0] * 2)), None

    x, y = torch.ones(3), torch.full((2,), 3, dtype=torch.int32)
    result = call_jax(function, Pair(x, None), None, ((y,),))
    assert type(result) is tuple and type(result[0]) is Pair
    assert torch.equal(result[0].first, x + 1) and torch.equal(result[0].second[1], y * 2)
    assert result[0].second[0] is None and result[1] is None
    (alone,) = call_jax(jnp.negative, torch.ones(5, dtype=torch.bfloat16))
    assert torch.equal(alone, -torch.ones(5, dtype=torch.bfloat16))
    assert call_jax(lambda: None) == (None,)
    assert call_jax(lambda: jnp.ones(2))[0].tolist() == [1, 1]


def test_call_jax_outputs_own_their_memory():
    constant, tensor = jnp.arange(16.0), torch.zeros(16)
    same, also, fixed = call_jax(lambda x: (x, x, constant), tensor)
    assert len({x.data_ptr() for x in (tensor, same, also, fixed)}) == 4
    fixed.fill_(-1), same.fill_(-1)
    assert constant.tolist() == list(range(16))
    assert tensor.tolist() == also.tolist() == [0] * 16

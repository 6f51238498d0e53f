"""Arrays between torch and JAX on the CPU: aliasing, lifetime, refusals, calls."""

import functools
import gc
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from nsa_interop.dlpack import call_jax, to_jax, to_torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_interop import dlpack

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
    message = rf"tensor must.*{words}.*tensor\.to\(.*jax_enable_x64"
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
    start = -memory.ctypes.data % dlpack.ALIGNMENT["cpu"]
    freed = weakref.ref(memory)
    array = to_jax(torch.from_numpy(memory[start : start + 512]))
    del memory
    collect()
    assert freed() is not None
    del array
    collect()
    assert freed() is None


def _deleted():
    array = jnp.zeros(4) + 1
    array.delete()
    return array


def _fake():
    with FakeTensorMode():
        return torch.zeros(16)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.zeros(3), "must be a torch.Tensor, got ndarray"),
        (lambda: torch.zeros(16, requires_grad=True), r"gradient.*tensor\.detach\(\)"),
        (lambda: torch.nn.Parameter(torch.zeros(16)), r"gradient.*tensor\.detach\(\)"),
        (lambda: torch.zeros(4, 8).t(), r"\(8, 4\) with strides \(1, 8\).*contiguous\(\)"),
        (lambda: torch.zeros(4, 8)[:, :4], r"contiguous.*strides.*contiguous\(\)"),
        (lambda: torch.zeros(1).expand(16), r"contiguous.*strides.*contiguous\(\)"),
        (lambda: torch.zeros(40)[1:], r"multiple of 64 bytes.*tensor\.clone\(\)"),
        (lambda: torch._neg_view(torch.zeros(16)), r"negative bit.*tensor\.resolve_neg\(\)"),
        (lambda: torch.zeros(4, 4).to_sparse(), r"dense, got torch\.sparse_coo.*to_dense"),
        (lambda: torch.zeros(16, device="meta"), "must be on a cpu or cuda device, got meta"),
        (_fake, "must be a plain torch.Tensor, got its subclass FakeTensor"),
        (lambda: torch.zeros(4, dtype=torch.complex64), "dtype among .*got torch.complex64"),
        (lambda: torch.zeros(4, dtype=torch.uint16), "dtype among .*got torch.uint16"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.quint8),
            r"must have a dtype.*got torch\.quint8",
        ),
        (lambda: torch.func.vmap(to_jax)(torch.zeros(3, 16)), "must have memory"),
    ],
)
def test_to_jax_refuses(make, message):
    with pytest.raises(ValueError, match=f"^tensor .*{message}"):
        to_jax(make())


def test_a_cuda_device_that_jax_does_not_see(monkeypatch):
    def no_backend(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_backend)
    with pytest.raises(ValueError, match=r"q is on cuda:0, but JAX has no cuda device"):
        dlpack._jax_device(torch.device("cuda:0"), "q")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    with pytest.raises(ValueError, match=r"q is on cuda:0, but JAX sees only \[\]"):
        dlpack._jax_device(torch.device("cuda:0"), "q")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.zeros(3), "must be a jax.Array, got ndarray"),
        (lambda: torch.zeros(3), "must be a jax.Array, got Tensor"),
        (lambda: 1.0, "must be a jax.Array, got float"),
        (lambda: jax.random.key(0), "must have a dtype among"),
        (lambda: jnp.zeros(4, jnp.int4), "must have a dtype among .*got int4"),
        (lambda: jax.jit(to_torch)(jnp.ones(4)), "must be a computed array, got a tracer"),
        (lambda: jax.vmap(to_torch)(jnp.ones(4)), "must be a computed array, got a tracer"),
        (lambda: jax.grad(to_torch)(1.0), "must be a computed array, got a tracer"),
        (_deleted, "must hold data"),
    ],
)
def test_to_torch_refuses(make, message):
    with pytest.raises(ValueError, match=f"^array .*{message}"):
        to_torch(make())


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


def test_call_jax_shares_aligned_inputs_and_clones_the_others():
    seen = []

    def function(*arrays):
        seen.extend(array.unsafe_buffer_pointer() for array in arrays)
        return tuple(array + 0 for array in arrays)

    base = torch.arange(80, dtype=torch.float32)
    aligned, shifted = base[16:32], base[1:17]
    out = call_jax(function, aligned, shifted)
    assert seen[0] == aligned.data_ptr() and seen[1] != shifted.data_ptr()
    assert torch.equal(out[0], aligned) and torch.equal(out[1], shifted)


def test_call_jax_survives_freed_inputs_and_outputs():
    step = jax.jit(lambda x, y: (x + y, x * y))
    expected, kept = torch.arange(4096, dtype=torch.float32), []
    for i in range(50):
        total, product = call_jax(step, expected + i, torch.full((4096,), 2.0))
        kept.append(total)
        del product
        collect()
    for i, total in enumerate(kept):
        assert torch.equal(total, expected + i + 2)


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


def test_call_jax_and_gradients():
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert not call_jax(jnp.exp, x)[0].requires_grad
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    Cube.apply(x).backward(torch.ones(3))
    assert x.grad.tolist() == [3, 12, 27]


@pytest.mark.parametrize(
    ("function", "tensors", "message"),
    [
        (
            jnp.exp,
            (torch.ones(4, requires_grad=True),),
            r"^tensors\[0\] must not require a grad",
        ),
        (jnp.exp, (3.0,), r"^tensors\[0\] must be a torch\.Tensor, got float"),
        (jnp.add, (torch.ones(2), (torch.ones(2, 2).t()[:1],)), r"^tensors\[1\]\[0\].*contig"),
        (jnp.exp, (torch.zeros(4, 8)[:, 1:5],), r"^tensors\[0\] must be contiguous"),
        (jnp.exp, (torch.ones(2, dtype=torch.int64),), r"^tensors\[0\].*int64"),
        (
            lambda x: (x, 1.0),
            (torch.ones(2),),
            r"^outputs\[1\] must be a jax\.Array, got float",
        ),
        (
            jnp.add,
            (torch.ones(2), torch.ones(2, device="meta")),
            r"^tensors\[1\] must be on a cpu or cuda device, got meta",
        ),
    ],
)
def test_call_jax_names_what_it_refuses(function, tensors, message):
    with pytest.raises(ValueError, match=message):
        call_jax(function, *tensors)

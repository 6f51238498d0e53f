"""What operators promise `torch.compile` is what their plans make: shapes, dtypes, strides."""

import random

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kernels_pallas.mosaic import capability
from nsa_core.config import NSAConfig
from nsa_torch import mosaic, operators, triton  # noqa: F401  whose calls are looked at
from nsa_torch.input_modes import PRECOMPRESSED, SEPARATE_KV, SHARED_KV

CONFIGS = (
    NSAConfig(),
    NSAConfig(32, 32, 64, num_selected=3, num_local=1, window=20),
    NSAConfig(num_selected=4, window=64),
)
KINDS = [x for x in operators._calls if x.split("/")[1] in ("mosaic", "triton")]
MODES = {
    x.name: x
    for mode in (PRECOMPRESSED, SEPARATE_KV, SHARED_KV)
    for x in (mode, mode.with_joined_gates())
}


def arguments(kind, pick):
    """Of a call of any size, without memory."""
    kv_heads, D, Dv = (pick.choice(x) for x in ([1, 2, 4], [16, 64, 128], [32, 64, 128]))
    heads, config = kv_heads * pick.choice([1, 4, 8, 16]), pick.choice(CONFIGS)
    S, packed = pick.randint(1, 3000), pick.random() < 0.3
    B, T = (1, S) if packed else (pick.randint(1, 3), pick.choice([S, pick.randint(1, S)]))
    C, n = config.num_compressed(S), config.num_selected
    dtype = pick.choice([torch.bfloat16, torch.float16])

    def array(*shape, dtype=dtype):
        return torch.empty(B, *shape, dtype=dtype, device="meta")

    pair = lambda length: (array(length, kv_heads, D), array(length, kv_heads, Dv))
    lengths = torch.empty(B, dtype=torch.int32, device="meta")
    borders = torch.empty(pick.randint(2, 9), dtype=torch.int32, device="meta")
    indices = array(T, kv_heads, n, dtype=torch.int32)
    query, gate_dtype = array(T, heads, D), pick.choice([dtype, torch.float32])
    gates = [array(T, heads, dtype=gate_dtype) for _ in range(3)]
    operator, _, name, *keeps = (*kind.split("/"), "")
    if operator == "attention":
        mode = MODES[name]
        if mode.joined:
            gates = [array(T, heads, 3, dtype=gate_dtype)]
        tokens = pair(S if mode.compresses else C), pair(S), pair(S)
        if "pages" in keeps:  # of a pool
            pool = [
                torch.empty(1, *x.shape[1:], dtype=dtype, device="meta") for x in pair(4096)
            ]
            tokens = tokens[0], pool, tokens[2]
        listed = zip(*(tokens[:1] if mode.shared else tokens), strict=True)
        tensors = [query, *(x for each in listed for x in each), *gates]
        if "pages" in keeps:
            page = (config.select_block, kv_heads)
            table = array(-(-S // page[0]), dtype=torch.int32)
            tensors += [table, lengths, *(array(*page, width) for width in (D, Dv))]
            packed = False
        tensors.append(pick.choice([None, indices]))
        packed &= not mode.compresses
    else:
        tensors = [query, *pair(C if name in ("", "compressed") else S)]
        tensors = tensors[:2] if operator == "select_blocks" else tensors
        tensors += [indices] if name == "selected" else []
    kv_len = S if packed or pick.random() < 0.7 else lengths
    place = operators.arguments(config, kv_len, borders if packed else None, None)
    return tensors, (pick.random() < 0.5, *place)


def check(fakes, plan):
    assert len(fakes) == len(plan.results)
    for fake, x in zip(fakes, plan.results, strict=True):
        assert (*fake.shape,) == x.shape and str(fake.dtype) == f"torch.{x.dtype}"
        assert fake.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_fakes_are_what_plans_make(kind):
    operator = getattr(torch.ops.nsa, kind.partition("/")[0])
    gradient = getattr(torch.ops.nsa, f"{kind.partition('/')[0]}_backward", None)
    call = operators.call_of(kind)
    for seed in range(10):
        tensors, rest = arguments(kind, random.Random(f"{kind} {seed}"))
        with capability.interpreted(True):
            fakes = operator(kind, tensors, *rest)
            check(fakes, call.run.plan([*tensors, *rest], None))
            if call.backward is None:
                continue
            grad, kept = torch.empty_like(fakes[0]), fakes[call.kept]
            grads = gradient(kind, grad, kept, tensors, *rest)
            check(grads, call.backward.plan([grad, *kept, *tensors, *rest], None))


@pytest.mark.parametrize("kind", KINDS)
def test_fakes_of_sizes_without_numbers(kind):
    """As `torch.compile(dynamic=True)` asks: sizes are symbols, which nobody can hash."""
    operator = getattr(torch.ops.nsa, kind.partition("/")[0])
    for seed in range(3):
        tensors, rest = arguments(kind, random.Random(f"{kind} {seed}"))
        mode = FakeTensorMode(shape_env=ShapeEnv())

        def symbolic(values, mode=mode):
            return [
                mode.from_tensor(x, source=ConstantSource(f"{len(values)}_{i}"))
                if isinstance(x, torch.Tensor)
                else x
                for i, x in enumerate(values)
            ]

        with capability.interpreted(True):
            want = operator(kind, tensors, *rest)
            with mode:
                given, place = symbolic(tensors), symbolic(rest)
                found = operator(kind, given, *place)
            if (call := operators.call_of(kind)).backward is not None:
                gradient = getattr(torch.ops.nsa, f"{kind.partition('/')[0]}_backward")
                grad = torch.empty_like(want[0])
                with mode:
                    grads = gradient(
                        kind, torch.empty_like(found[0]), found[call.kept], given, *place
                    )
                want = [*want, *gradient(kind, grad, want[call.kept], tensors, *rest)]
                found = [*found, *grads]
        for x, y in zip(found, want, strict=True):
            assert tuple(map(int, x.shape)) == tuple(y.shape) and x.dtype == y.dtype

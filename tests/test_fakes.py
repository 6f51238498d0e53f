"""What operators promise `torch.compile` is what their plans make: shapes, dtypes, strides."""

import random

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kernels_pallas.mosaic import capability
from nsa_core.config import NSAConfig
from tests import planned
from tests.planned import KINDS
from tests.stand_in_kernels import stand_ins

CONFIGS = (
    NSAConfig(),
    NSAConfig(32, 32, 64, num_selected=3, num_local=1, window=20),
    NSAConfig(num_selected=4, window=64),
)
MODES = {x.name: x for mode in planned.MODES.values() for x in (mode, mode.with_joined_gates())}


def arguments(kind, pick, real=False):
    """Of a call of any size, without memory, or of a small one."""
    kv_heads, D, Dv = (pick.choice(x) for x in ([1, 2, 4], [16, 64, 128], [32, 64, 128]))
    heads, config = kv_heads * pick.choice([1, 4, 8, 16]), pick.choice(CONFIGS)
    S, packed = pick.randint(1, 30 if real else pick.choice([30, 3000])), pick.random() < 0.3
    B, T = (1, S) if packed else (pick.randint(1, 3), pick.choice([S, pick.randint(1, S)]))
    C, dtype = config.num_compressed(S), pick.choice([torch.bfloat16, torch.float16])
    gate_dtype, learns = pick.choice([dtype, torch.float32]), KINDS[kind].backward

    def array(*shape, dtype=dtype, batch=B):
        x = torch.ones(batch, *shape, dtype=dtype, device="cpu" if real else "meta")
        return x.requires_grad_(real and bool(learns) and x.is_floating_point())

    pair = lambda length, batch=B: [
        array(length, kv_heads, width, batch=batch) for width in (D, Dv)
    ]
    integers = lambda *shape: array(*shape, dtype=torch.int32)
    lengths = integers()
    indices, query = integers(T, kv_heads, config.num_selected), array(T, heads, D)
    operator, _, name, *keeps = (*kind.split("/"), "")
    if operator == "attention":
        mode, pages = MODES[name], "pages" in keeps
        gates = [array(T, heads, dtype=gate_dtype) for _ in range(3)]
        if mode.joined:
            gates = [array(T, heads, 3, dtype=gate_dtype)]
        tokens = pair(S if mode.compresses else C), pair(S), pair(S)
        if pages:  # of a pool
            tokens = tokens[0], pair(4096, 1), tokens[2]
        listed = zip(*(tokens[:1] if mode.shared else tokens), strict=True)
        tensors = [query, *(x for each in listed for x in each), *gates]
        if pages:
            page = config.select_block
            tensors += [integers(-(-S // page)), lengths, *pair(page)]
        tensors.append(pick.choice([None, indices]))
        packed &= not mode.compresses and not pages
    else:
        tensors = [query, *pair(C if name in ("", "compressed") else S)]
        tensors = tensors[:2] if operator == "select_blocks" else tensors
        tensors += [indices] if name == "selected" else []
    kv_len = S if packed or pick.random() < 0.7 else lengths
    borders = array(dtype=torch.int32, batch=pick.randint(2, 9)) if packed else None
    place = planned.layout(config, kv_len, borders)
    return tensors, (pick.random() < 0.5, *place)


def promised(kind, tensors, rest):
    """The results of an operator and of its gradient."""
    operator, call = kind.partition("/")[0], KINDS[kind]
    found = list(getattr(torch.ops.nsa, operator)(kind, tensors, *rest))
    if call.backward is None:
        return found, []
    gradient = getattr(torch.ops.nsa, f"{operator}_backward")
    grad, kept = torch.empty_like(found[0]), found[call.kept]
    return found, list(gradient(kind, grad, kept, tensors, *rest))


def made(kind, tensors, rest, found):
    """The same by plans."""
    call, given = KINDS[kind], [*tensors, *rest]
    plans = [call.run.plan(given, None)]
    if call.backward is not None:
        first = torch.empty_like(found[0]), *found[call.kept]
        plans.append(call.backward.plan([*first, *given], None))
    return [x for plan in plans for x in plan.results]


def unnumbered(values, mode):
    """As `torch.compile(dynamic=True)` asks: sizes are symbols, which nobody can hash."""
    return [
        mode.from_tensor(x, source=ConstantSource(f"{len(values)}_{i}"))
        if isinstance(x, torch.Tensor)
        else x
        for i, x in enumerate(values)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_fakes_are_what_plans_make(kind):
    for seed in range(10):
        tensors, rest = arguments(kind, random.Random(f"{kind} {seed}"))
        with capability.interpreted(True):
            found, grads = promised(kind, tensors, rest)
            want = made(kind, tensors, rest, found)
            for fake, x in zip([*found, *grads], want, strict=True):
                assert (*fake.shape,) == x.shape and str(fake.dtype) == f"torch.{x.dtype}"
                assert fake.is_contiguous()
            if seed:
                continue
            mode = FakeTensorMode(shape_env=ShapeEnv())
            with mode:
                symbols, more = promised(
                    kind, unnumbered(tensors, mode), unnumbered(rest, mode)
                )
        for x, y in zip([*symbols, *more], [*found, *grads], strict=True):
            assert (*map(int, x.shape),) == (*y.shape,) and x.dtype == y.dtype


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", [x for x in KINDS if "pages" not in x])
def test_operator(kind, monkeypatch):
    """Schema, autograd and tracing, of kernels that are stand-ins."""
    tensors, rest = arguments(kind, random.Random(kind), real=True)
    operator = getattr(torch.ops.nsa, kind.partition("/")[0]).default
    with stand_ins(monkeypatch):
        torch.library.opcheck(operator, (kind, tensors, *rest))

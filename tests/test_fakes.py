"""What operators promise `torch.compile` is what their plans make: shapes, dtypes, strides."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from kernels_pallas.mosaic import capability
from tests import planned
from tests.planned import KINDS
from tests.stand_in_kernels import stand_ins
from tests.test_plan import SIZES, WHERE, call, normal, of_step

MODES = {x.name: x for mode in planned.MODES.values() for x in (mode, mode.with_joined_gates())}


def arguments(kind, sizes, **how):
    """Tensors of an operator, and its other arguments."""
    operator, _, name, *keeps = (*kind.split("/"), "")
    if operator != "attention":
        return of_step(kind, sizes, **how)
    mode, (B, _, S, _, Hkv, *widths, config) = MODES[name], sizes
    given = call(mode, sizes, **how)
    *tensors, lists = given[: mode.count + 1]
    if "pages" in keeps:
        page, pool = config.select_block, (normal(1, 4096, Hkv, x) for x in widths)
        tensors[2], tensors[5] = pool
        ints = [torch.zeros(B, *x, dtype=torch.int32) for x in ((-(-S // page),), ())]
        tensors += [*ints, *(normal(B, page, Hkv, x) for x in widths)]
    return [*tensors, lists], given[mode.count + 1 :]


def asked(kind):
    """Arguments of calls of many sizes, without memory."""
    packs = not any(x in kind for x in ("shared", "separate", "pages"))
    how = [(sizes, {}) for sizes in SIZES.values()]
    how += [(SIZES["rows"], x) for x in WHERE.values() if packs or "cu_seqlens" not in x]
    if "pages" not in kind:
        how += [
            (SIZES["late"], dict(dtype=torch.float16, gate_dtype=torch.float32, indices=True))
        ]
    to_meta = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x
    return [tree_map(to_meta, arguments(kind, x, **options)) for x, options in how]


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
    for i, (tensors, (_, *place)) in enumerate(asked(kind)):
        rest = [i % 2 == 1, *place]
        with capability.interpreted(True):
            found, grads = promised(kind, tensors, rest)
            want = made(kind, tensors, rest, found)
            for fake, x in zip([*found, *grads], want, strict=True):
                assert (*fake.shape,) == x.shape and str(fake.dtype) == f"torch.{x.dtype}"
                assert fake.is_contiguous()
            if i:
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
    tensors, rest = arguments(kind, SIZES["rows"])
    for x in tensors if KINDS[kind].backward else ():
        if x is not None and x.is_floating_point():
            x.requires_grad_()
    operator = getattr(torch.ops.nsa, kind.partition("/")[0]).default
    with stand_ins(monkeypatch):
        torch.library.opcheck(operator, (kind, tensors, *rest))

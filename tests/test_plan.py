"""Plans (`nsa_core.plan`) give what the steps give one by one, bit by bit, of any kind of call."""

import pytest
import torch

from kernels_pallas.mosaic import capability
from nsa_torch import NSAConfig
from nsa_torch.plans import Planned
from tests import plan_checks, planned, refusals
from tests.limits import set_limits
from tests.oracles.nsa import BRANCHES
from tests.planned import MODES, PATHS
from tests.problems import TABLE
from tests.stand_in_kernels import stand_in

SIZES = {name: (*x, NSAConfig(**config)) for name, (*x, config) in TABLE["plans"].items()}
ROWS, GIVEN = SIZES["rows"], MODES["given"]
WHERE = refusals.given(TABLE["places of plans"])
WHERE["a length"] = {"kv_len": torch.tensor(19)}


def normal(*shape, dtype=torch.bfloat16):
    make = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=make).to(dtype)


def call(
    mode,
    sizes,
    kv_len=None,
    cu_seqlens=None,
    indices=False,
    dtype=torch.bfloat16,
    gate_dtype=torch.bfloat16,
):
    """Arguments of an operator of all steps."""
    B, T, S, H, Hkv, D, Dv, config = sizes
    if cu_seqlens is not None:
        B, S = 1, T
    C = S if mode.compresses else config.num_compressed(S)
    tokens = [normal(B, n, Hkv, width, dtype=dtype) for width in (D, Dv) for n in (C, S, S)]
    tokens = [tokens[1], tokens[4]] if mode.shared else tokens
    gates = normal(B, T, H, 3, dtype=gate_dtype).sigmoid()
    gates = [gates] if mode.joined else gates.unbind(-1)
    chosen = None
    if indices:
        chosen = torch.full((B, T, Hkv, config.num_selected), -1, dtype=torch.int32)
        chosen[..., 0] = 0
    place = planned.layout(config, S if kv_len is None else kv_len, cu_seqlens)
    return [normal(B, T, H, D, dtype=dtype), *tokens, *gates, chosen, False, *place]


def of_step(kind, sizes, **how):
    """Tensors of an operator of one step, and its other arguments."""
    query, *rest = call(GIVEN, sizes, **how | {"indices": True})
    tokens, (indices, *place), step = rest[:6], rest[9:], kind.split("/")[-1]
    if step not in BRANCHES:
        return [query, tokens[0]], place
    lists = [indices] if step == "selected" else []
    return [query, *tokens[BRANCHES.index(step) :: 3], *lists], place


def both_ways(function: Planned, arguments):
    """Results of the plan, after those of the steps were found to be the same."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    with torch.no_grad():
        plan = function.plan(arguments, tensors[0].device)
        want = list(function.function(planned.Eager(), *arguments))
        poisoned = plan_checks.run(plan, tensors, stand_in, stand_in)
        bound = function(*arguments)
    for i, (x, *others) in enumerate(zip(want, poisoned, bound, strict=True)):
        for y in others:
            assert x.shape == y.shape and x.dtype == y.dtype, i
            assert torch.equal(x, y), f"result {i}"
    assert all(map(torch.equal, tensors, before))
    memory = {x.untyped_storage().data_ptr() for x in tensors}
    assert not memory & {x.untyped_storage().data_ptr() for x in bound if x.numel()}
    return list(bound)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    set_limits(monkeypatch, long_list=0.7, gathered_bytes=1, ds_chunk_bytes=1)
    with (
        planned.on_the_cpu(monkeypatch, stand_in),
        capability.interpreted(request.param == "mosaic"),
    ):
        yield PATHS[request.param]


def check_all(path, mode, arguments):
    """Forward alone, with residuals and gradients, and with branches computed again."""
    both_ways(path.planned(mode, "forward"), arguments)
    for keep in "saving", "recomputing":
        function = path.planned(mode, keep)
        out, *kept = both_ways(function, arguments)
        grads = both_ways(function.backward, [out.flip(1), *kept, *arguments])
        assert len(grads) == mode.count


OF_PATHS = {f"{path}-{name}": (path, MODES[name]) for path in PATHS for name in MODES}


@pytest.mark.parametrize(("path", "mode"), OF_PATHS.values(), ids=OF_PATHS, indirect=["path"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes(mode, sizes, path):
    check_all(path, mode, call(mode, sizes))


by_place = pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)


@by_place
@pytest.mark.parametrize("indices", [False, True], ids=["selected", "given indices"])
def test_where(where, indices, path):
    check_all(path, GIVEN, call(GIVEN, ROWS, indices=indices, **where))


# Kinds of operators that run one step, with their path.
SINGLE = {x: x.split("/")[1] for x in planned.KINDS if not x.startswith("attention/")}


@pytest.mark.parametrize(("kind", "path"), SINGLE.items(), ids=SINGLE, indirect=["path"])
@by_place
def test_single_steps(kind, where, path):
    """Keys are wider than the narrowest values that kernels have."""
    tensors, place = of_step(kind, SIZES["wide"], **where)
    operator, given = planned.KINDS[kind], [*tensors, *place]
    found = both_ways(operator.run, given)
    if operator.backward is not None:
        grads = both_ways(operator.backward, [found[0].flip(1), *found[operator.kept], *given])
        assert len(grads) == operator.floats


@pytest.mark.parametrize("most", [0, 2**12])
def test_a_workspace_of_any_size(most, path, monkeypatch):
    set_limits(monkeypatch, workspace_bytes=most)
    check_all(path, GIVEN, call(GIVEN, SIZES["gathered"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["rows", "packed"])
def test_gates_in_one_tensor(dtype, where, path):
    """Apart, too."""
    for mode in (GIVEN, GIVEN.with_joined_gates()):
        check_all(path, mode, call(mode, ROWS, gate_dtype=dtype, **WHERE[where]))


@pytest.mark.parametrize("most", [0, 2**22], ids=["large", "small"])
def test_results_that_no_other_step_reads(most, path, monkeypatch):
    """Beside a launch, after which they are made where they are large."""
    set_limits(monkeypatch, small_bytes=most)

    def function(ops, do, out):
        deltas = path.steps.backward.delta_of(ops, do, out)
        return [*deltas, ops.zeros(out, out.shape), ops.copied(do, deltas[0].dtype), out]

    arguments = [normal(1, 24, 4, 16), normal(1, 24, 4, 16).flip(1)]
    _, zeros, copied, same = both_ways(Planned(function), arguments)
    assert not zeros.any() and torch.equal(copied, arguments[0].float())
    assert torch.equal(same, arguments[1])


def test_calls_of_other_shapes_and_dtypes_have_other_plans():
    traced = []
    function = Planned(lambda ops, x: traced.append(x) or [ops.zeros(x, x.shape)])
    for x in 2 * [normal(2, 3), normal(3, 2), normal(2, 3).float(), normal(2, 3).half()]:
        (result,) = function(x)
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
    assert len(traced) == 4


@pytest.mark.parametrize("sizes", TABLE["peaks"].values(), ids=TABLE["peaks"])
def test_no_large_workspace_lies_idle_while_memory_is_at_its_peak(sizes, monkeypatch):
    length, heads, kv_heads, width = sizes
    layer = {"heads": heads, "kv_heads": kv_heads, "key_width": width, "value_width": width}
    mode = MODES["shared"].with_joined_gates()
    arguments = planned.described(mode, 1, length, **layer, config=NSAConfig())
    function = PATHS["mosaic"].planned(mode, "saving")
    with_workspace = function.plans(arguments, None)
    set_limits(monkeypatch, workspace_bytes=0)
    for plan, without in zip(with_workspace, function.plans(arguments, None), strict=True):
        assert not without.workspace_bytes
        assert plan_checks.peak(plan) <= 1.01 * plan_checks.peak(without)


@by_place
def test_arrays_are_made_where_those_are_that_they_follow_from(where, path):
    """Whatever torch's default device is: constants, batch buffers, derived steps."""
    arguments = call(GIVEN, ROWS, **where)
    function = path.planned(GIVEN, "saving")
    with torch.device("meta"):
        out, *kept = function(*arguments)
        grads = function.backward(out.flip(1), *kept, *arguments)
    assert not any(x.is_meta for x in (out, *kept, *grads))

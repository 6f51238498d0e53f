"""The Triton kernel of the selected branch: on a GPU, and without one in Triton's interpreter.

Where the interpreter is not asked for, this file runs once more in a process that asks for it.
"""

import dataclasses

import numpy as np
import pytest
import torch

import nsa_torch
from nsa_jax import policy
from nsa_torch import NSAConfig, dispatch
from tests import interpreted_triton
from tests.inputs import CASES, Case
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.torch_inputs import check_branch

pytestmark = pytest.mark.skipif(not TRITON, reason="triton is not installed")

ODD_BLOCKS = NSAConfig(8, 4, 12, num_selected=5, num_initial=1, num_local=1)
LONG_BLOCKS = NSAConfig(32, 16, 96, num_selected=2, num_initial=0, num_local=1)
MORE = (
    Case(110, 110, B=1, H=2, Hkv=1, config=LONG_BLOCKS),  # a block is two steps
    Case(50, 50, B=1, H=4, Hkv=2, D=32, Dv=16, dtype="bfloat16"),
    Case(33, 33, B=1, H=34, Hkv=2, D=24, Dv=40, config=ODD_BLOCKS),  # nothing a power of two
    Case(30, 30, B=1, H=2, Hkv=1, segments=(9, 0, 1, 12, -8), config=ODD_BLOCKS),
)
# Not the longest, which takes the interpreter most of a minute.
WANTED = [c for c in (*CASES, *MORE) if c.T < 120 and (c.T == c.S or not c.segments)]


@pytest.fixture
def named(monkeypatch):
    """The kernel has no reason to refuse, in the interpreter neither."""
    if INTERPRETED:
        monkeypatch.setitem(dispatch.kernels_pallas.KERNELS, ("triton", "selected"), no_reason)
        interpreted_triton.right_bfloat16(monkeypatch)


def no_reason(problem):
    return None


@kernel
@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("case", WANTED, ids=str)
def test_triton_sel_parity_gpu(case):
    """Output, log-sum-exp and gradients against the reference."""
    check_branch(case, "selected", "triton", DEVICE)


@kernel
@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("lengths", [[40, 13], [1, 40]])
def test_triton_sel_edge_cases_of_a_cache(lengths, rng=np.random.default_rng(0)):
    """Keys behind the end may be NaN, and a cache is read where it lies."""
    batch, size, heads, kv_heads, width = 2, 40, 4, 2, 16

    def draw(*shape):
        return torch.tensor(rng.normal(size=shape), dtype=torch.float32, device=DEVICE)

    query = draw(batch, 1, heads, width)
    pair = [draw(batch, kv_heads, width, size).permute(0, 3, 1, 2) for _ in range(2)]
    kv_len = torch.tensor(lengths, device=DEVICE)
    indices = torch.tensor([0, 2, -1, 4], dtype=torch.int32, device=DEVICE)
    indices = indices.expand(batch, 1, kv_heads, 4).contiguous()
    config = dataclasses.replace(ODD_BLOCKS, select_block=12, num_selected=4)
    options = {"config": config, "kv_len": kv_len}
    want = nsa_torch.selected_attention(query, *pair, indices, **options, implementation="sdpa")
    for x in pair:
        for row, length in enumerate(lengths):
            x[row, length:] = torch.nan
    got = nsa_torch.selected_attention(
        query, *pair, indices, **options, implementation="triton"
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def leaves():
    """Query, key, value, and a selection."""
    generator, length = torch.Generator().manual_seed(0), 40
    shapes = [(1, length, heads, 16) for heads in (4, 2, 2)]
    made = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    indices = torch.tensor([0, 1, -1, -1], dtype=torch.int32, device=DEVICE)
    return [x.requires_grad_() for x in made], indices.expand(1, length, 2, 4).contiguous()


SOME = dataclasses.replace(ODD_BLOCKS, num_selected=4)


@kernel
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_operator():
    from nsa_torch import operators, triton

    floats, indices = leaves()
    place = operators.arguments(SOME, 40, None, None)
    operator = getattr(torch.ops.nsa, triton.NAME).default
    torch.library.opcheck(operator, (*floats, indices, *place))


@kernel
@pytest.mark.usefixtures("named")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_without_a_graph_break():
    floats, indices = leaves()

    def function(query, key, value):
        options = {"config": SOME, "implementation": "triton"}
        return nsa_torch.selected_attention(query, key, value, indices, **options)[0] * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for call in (function, compiled):
        out = call(*floats)
        results.append((out, *torch.autograd.grad(out.square().sum(), floats)))
    (out, *one), (same, *other) = results
    assert torch.equal(out, same)
    # A GPU adds up the gradients, which are those of `sdpa`, in any order.
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


if not INTERPRETED:

    @pytest.mark.skipif(not TRITON, reason="triton is not installed")
    def test_triton_sel_parity_in_the_interpreter():
        interpreted_triton.run_again(__file__)

    PROBLEM = {"D": 128, "Dv": 128, "platform": "cuda", "capability": (8, 9)}

    def problem(**change):
        query, key = torch.empty(1, 64, 4, 64), torch.empty(1, 64, 2, 64)
        made = dispatch.problem_of(query, key, 64, NSAConfig(), False)
        return made._replace(branch="selected", **PROBLEM | change)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"framework": "jax"}, "from torch only"),
            ({"platform": "cpu"}, "CUDA tensors"),
            ({"capability": (7, 5)}, "compute capability"),
            ({"dtype": "float64"}, "computes in"),
            ({"H": 130}, "65"),
            ({"Dv": 512}, "Dv=512"),
            ({"config": NSAConfig(select_block=256)}, "256"),
            ({"H": 128, "D": 256, "Dv": 256}, "bytes of shared memory"),
        ],
    )
    def test_refusals(change, reason):
        assert dispatch.kernels_pallas.why_not("triton", problem()) is None
        assert reason in dispatch.kernels_pallas.why_not("triton", problem(**change))

    def test_automatic_choice_wants_a_measurement(monkeypatch):
        """The kernel runs where it is named, or where the device's file has measured it."""
        entries = [
            e for e in dispatch.REGISTRY.table["selected"] if e.name in ("triton", "sdpa")
        ]
        monkeypatch.setitem(dispatch.REGISTRY.table, "selected", tuple(entries))
        at = problem(device="Some GPU")
        choose = dispatch.REGISTRY.choose
        assert choose(at, "triton").implementation == "triton"
        chosen = choose(at)
        assert chosen.implementation == "sdpa"
        assert "not measured on this device" in chosen.refused["triton"]
        # A user's threshold says at which length, not which kernel can be trusted.
        with policy.overridden(policy.Thresholds(sel_min_len=64), "a flag"):
            assert choose(at).implementation == "sdpa"
        for measured, want in (("triton", "triton"), ("mosaic", "sdpa")):
            evidence = {"sel_min_len": {"kernel": measured, "commits": ["abc"]}}
            found = policy.Device("Some GPU", policy.FOLDER / "x.yaml", evidence=evidence)
            monkeypatch.setattr(policy, "of", lambda name, found=found: found)
            assert choose(at).implementation == want
        seeds = {"sel_min_len": {"kernel": "triton", "commits": []}}  # of a table of the seed's
        found = policy.Device("Some GPU", policy.FOLDER / "x.yaml", evidence=seeds)
        monkeypatch.setattr(policy, "of", lambda name: found)
        assert choose(at).implementation == "sdpa"

    # The largest of each kind that `limits` lets through; 8.9 gives a program the least memory.
    EDGES = [(64, 256, 256, 128), (64, 192, 128, 64), (64, 128, 128, 128), (16, 256, 256, 64)]
    EDGES += [(16, 128, 128, 64), (1, 64, 64, 32)]

    @pytest.mark.parametrize("capability", [80, 89, 90])
    @pytest.mark.parametrize("sizes", EDGES, ids=str)
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_it_compiles_within_shared_memory(capability, sizes, dtype):
        """For GPUs that need not be there: no more than each of them gives a program."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        from kernels_pallas.triton import selected

        group, width, value_width, block = sizes
        refused = dtype == "fp32" and group == 64 and width > 128
        kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        at = problem(H=2 * group, D=width, Dv=value_width, dtype=kind)
        assert (dispatch.kernels_pallas.why_not("triton", at) is not None) == refused
        if refused:
            return
        function = selected.selected_attention
        options = selected.options(*sizes, 4 if dtype == "fp32" else 2)
        fixed = {"HEADS": 4, "GROUP": group, "N": 16, "BLOCK": block, "WIDTH": width}
        fixed |= {"VALUE_WIDTH": value_width, **options}
        fixed |= {f"{name}_column": 1 for name in ("query", "key", "value")}
        launch = {x: fixed.pop(x) for x in ("num_warps", "num_stages", "enable_fp_fusion")}
        types = dict.fromkeys(("query", "key", "value", "out"), f"*{dtype}")
        types |= dict.fromkeys(("indices", "position", "key_start"), "*i32")
        types |= {"lse": "*fp32", "scale": "fp32"} | dict.fromkeys(fixed, "constexpr")
        signature = {x: types.get(x, "i32") for x in function.arg_names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, x in enumerate(function.arg_names)
            if x not in fixed and x not in ("scale", "tokens")
        }
        source = ASTSource(function, signature, fixed, aligned)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
        assert made.metadata.shared <= 99 * 1024
        assert ("mma" in made.asm["ptx"]) == (dtype == "bf16")

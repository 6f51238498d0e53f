"""Tokens that leave the union of their tile, and the kernels that gather them: in Pallas' GPU
interpreter, which reports races, and on a GPU, against the float64 oracle.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels_pallas.mosaic.gathered import staged_columns
from kernels_pallas.specs import dkv, gathered
from nsa_core.config import NSAConfig
from nsa_core.plan.kernels import kernels_of
from nsa_core.steps import mosaic_gather
from tests import pretend
from tests.devices import needs_gpu
from tests.inputs import PAPER, Case, posed
from tests.limits import set_limits
from tests.mosaic_checks import (
    bits,
    check_any_blocks,
    check_step,
    check_steps,
    check_whole,
    run,
)
from tests.paths import to_jax

FEW = NSAConfig(32, 32, 64, num_selected=3, num_local=1, window=20)
G4 = Case(34, 400, H=4, Hkv=1, D=64, Dv=64, B=1, config=FEW, dtype="bfloat16")
LARGE = dataclasses.replace(FEW, select_block=128)
G16 = Case(9, 660, H=16, Hkv=1, D=64, Dv=64, B=1, config=LARGE, dtype="bfloat16")
G3 = Case(30, 330, H=6, Hkv=2, D=128, Dv=64, B=1, config=FEW, dtype="float16")


@pytest.fixture
def leaving(monkeypatch):
    """Every tile after one with more than two blocks is gathered, in segments of few tokens;
    the kernels of partials that are built.
    """
    set_limits(monkeypatch, long_list=0.7, gathered_bytes=1)
    built = []

    def remembered(spec, build):
        built.append(build(spec))
        return built[-1]

    for name in ("partials", "partial_dq"):
        own = getattr(gathered, name)
        build = functools.partial(remembered, build=own)
        # A description names it as of its module.
        monkeypatch.setattr(gathered, name, functools.update_wrapper(build, own))
    yield built
    assert built


def left(case, **change):
    """The problem, in which a tile leaves that has far blocks and near ones."""
    p = posed(dataclasses.replace(case, **change))
    tokens = 64 * p.case.Hkv // p.case.H
    indices, first = p.block_indices.numpy(), p.case.S - p.case.T
    block = p.case.config.select_block

    def blocks(tile, head):
        found = indices[0, tile * tokens : (tile + 1) * tokens, head]
        return {*found.ravel().tolist()} - {-1}

    def leaves(tile, head):
        own, near = blocks(tile, head), max(first + tile * tokens, 0) // block - 1
        far = {x for x in own if 0 < x < near}
        walked = len(blocks(tile - 1, head)) * block // 64
        long = walked > int(mosaic_gather.LONG_LIST * 3)
        return long and far and own - far

    tiles = range(1, -(-p.case.T // tokens))
    assert any(leaves(*place) for place in itertools.product(tiles, range(p.case.Hkv)))
    return p


@pytest.mark.parametrize(("case", "parts"), [(G4, 2), (G3, 1), (G16, 1)], ids=str)
def test_forward(case, parts, interpreted, leaving):
    check_steps(left(case), "selected")
    assert {kernel.spec.segments for kernel in leaving} == {parts}


def test_gates_and_other_branches(interpreted, leaving):
    check_steps(left(G4, T=24), "whole")


def test_gradients_of_the_branch(interpreted, leaving):
    """Of which a slab is staged at a time."""
    check_step(left(G3, Dv=128), "selected")
    specs = [kernel.spec for kernel in leaving if kernel.name == "gathered_dq"]
    assert {(staged_columns(x, x.D + x.Dv, x.D), x.D) for x in specs} == {(64, 128)}


def test_gradients(interpreted, leaving, monkeypatch):
    """Those of the keys of the branch too, whose queries come one by one."""
    built = pretend.calls_of(monkeypatch, dkv, "partials", lambda spec: spec)
    check_whole(left(G4, T=20, S=330))
    assert {spec.single_token for spec in built if spec.gathered} == {True}


def test_gradients_of_large_blocks(interpreted, leaving):
    """Those of the query gathered too, of fewer heads than have dS stored."""
    check_step(left(G16, T=20, H=6), "selected")
    assert {(x.name, x.spec.block) for x in leaving} == {
        ("gathered_forward", 128),
        ("gathered_dq", 128),
    }


def test_any_blocks_in_any_order(interpreted, leaving):
    """Half the tokens of the second tile do not see the last block."""
    left(G3, T=45, S=397)
    check_any_blocks(dataclasses.replace(G3, T=45, S=397))


def test_later_tokens_change_nothing(interpreted, leaving):
    """Not a bit, though with one block more the tiles after theirs leave."""
    p = posed(dataclasses.replace(G4, T=50, S=306))
    given, where = [*map(to_jax, p.steps["selected"][:3])], {"config": FEW, "kv_len": 306}
    attend = lambda: run("selected_attention", *given, jnp.array(indices), **where)
    own = np.arange(256, 306) // 64
    indices = np.stack([0 * own + 1, own, 0 * own - 1], axis=-1)  # far and near
    indices = indices[None, :, None].astype(np.int32)
    first = attend()
    token = 31  # the last of its tile
    indices[0, token, 0] = 0, 1, own[token]
    for x, y in zip(attend(), first, strict=True):
        np.testing.assert_array_equal(x[:, :token], y[:, :token])
        assert (np.asarray(x[:, token + 1 : 48]) != np.asarray(y[:, token + 1 : 48])).any()


PROBLEM = {"query": (2, 64, 8, 64), "key": (2, 6400, 2, 64), "indices": (2, 64, 2, 16)}


@pytest.mark.parametrize(
    ("change", "packed", "limit"),
    [
        ({}, False, 64),
        ({}, True, 0),  # blocks may begin anywhere
        ({"key": (2, 64 * 64, 2, 64)}, False, 0),  # no union of more blocks
        ({"key": (2, 6400, 8, 64), "indices": (2, 64, 8, 16)}, False, 64),  # G=1
        ({"key": (2, 6400, 1, 64), "indices": (2, 64, 1, 16)}, False, 64),  # G=8
        ({"query": (2, 64, 32, 64)}, False, 0),  # G=16
        ({"query": (2, 15, 8, 64)}, False, 0),  # no whole tile
        ({"query": (2, 64, 8, 32)}, False, 0),  # narrower than what is copied at a time
        ({"indices": (2, 64, 2, 32)}, False, 0),  # more slots than bits
        ({"indices": (2**10, 2**17, 2, 16)}, False, 0),  # more entries than an int32 counts
    ],
)
def test_where_tokens_may_leave(change, packed, limit):
    empty = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arrays = {name: empty(shape) for name, shape in (PROBLEM | change).items()}
    value, config = arrays["key"], NSAConfig()
    given = arrays["query"], arrays["key"], value, arrays["indices"], config, packed
    assert mosaic_gather.gather_limit(*given) == limit
    other = dataclasses.replace(config, select_block=128)  # walked over in halves
    limit = 64 if arrays["query"].shape[2] == 32 else limit
    assert mosaic_gather.gather_limit(*given[:4], other, packed) == limit


@pytest.fixture
def long_parts(leaving, monkeypatch):
    """Parts of a thousand tokens or so: each kernel of each is compiled into the call."""
    set_limits(monkeypatch, gathered_bytes=2**24)
    return leaving


PAPER_LARGE = dataclasses.replace(PAPER, select_block=128)
# On a GPU, shapes that the interpreter would take minutes for.
CASES = [
    *(
        Case(1700, 1700, 2 * G, 2, 64, 64, 1, PAPER, dtype="bfloat16")
        for G in (1, 2, 3, 4, 5, 6, 7, 8)
    ),
    Case(333, 3000, 16, 4, 192, 128, 2, PAPER, dtype="float16"),
    Case(500, 1500, 8, 1, 128, 256, 1, PAPER, dtype="bfloat16"),
    Case(1700, 1700, 32, 2, 128, 128, 1, PAPER_LARGE, dtype="bfloat16"),
    Case(700, 2600, 12, 2, 128, 64, 2, PAPER_LARGE, dtype="float16"),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_gpu(case, long_parts):
    check_steps(posed(case), "selected", "whole")
    check_any_blocks(case)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7], *CASES[-4:]], ids=str)
def test_gradients_on_gpu(case, long_parts):
    check_whole(posed(case))


@pytest.mark.gpu
@needs_gpu
def test_repeated_calls_are_bitwise_equal(long_parts):
    p = posed(dataclasses.replace(CASES[3], T=4096, S=4096))
    for one, other in itertools.pairwise([bits(p) for _ in range(3)]):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_torch_on_gpu(batch, long_parts, monkeypatch):
    """Outputs and gradients of torch beside those of tiles that all stay: in parts, in place
    where the batch is one row, on a side stream and in a CUDA graph.
    """
    import nsa_torch

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        made = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return made.requires_grad_()

    length = 3000
    shapes = [(batch, length, heads, 128) for heads in (8, 2, 2)]
    arrays = [*(draw(*shape) for shape in shapes), draw(batch, length, 8, 3)]
    cotangent = draw(batch, length, 8, 128).detach()

    def step(scale=None):
        out = nsa_torch.attention(*arrays, implementation="mosaic", scale=scale)
        return out.detach(), *torch.autograd.grad(out, arrays, cotangent)

    found = step()
    assert len({kernel.spec.segment_tokens for kernel in long_parts}) > 1
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        beside = step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(
        graph, capture_error_mode="thread_local"
    ):  # which the host could not wait in
        again = step()
    graph.replay()
    for got, other, want in zip(again, beside, found, strict=True):
        assert torch.equal(got, want) and torch.equal(other, want)
    with monkeypatch.context() as patch:
        patch.setattr(mosaic_gather, "MAX_HEADS", 0)
        # A call alike would run what those before did: this one says what its scale is.
        wanted = step(128**-0.5)
    for got, want in zip(found, wanted, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert 0 < error < 4e-3


def test_partials_are_at_most_half_an_output(monkeypatch):
    """Where an output is larger than what partials may take in any case."""
    set_limits(monkeypatch, gathered_bytes=1)
    kernels = kernels_of(
        length=8192,
        heads=16,
        kv_heads=4,  # with more heads of a group dS is stored
        key_width=128,
        value_width=128,
        dtype="bfloat16",
        config=NSAConfig(),
        gradients=True,
        compresses=True,
        shared=True,
    )
    names = "gathered_forward", "gathered_dq"
    made = {x.name: x.outputs[0].size for x in kernels if x.name in names}
    assert {*made} == {*names} and 2 * max(made.values()) <= 8192 * 16 * 128

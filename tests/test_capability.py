"""What the capability check of Mosaic accepts runs forward and backward; the rest it refuses.

One rule is for both passes, so that no shape runs forward and fails in the backward pass.
"""

import functools
import itertools
from unittest import mock

import jax
import pytest

import nsa_jax
import nsa_torch
from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import capability
from kernels_pallas.runtime import lowering
from kernels_pallas.specs.tile import Tile, slab_width
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem
from nsa_torch import torch_ops
from tests import test_mosaic_compiled
from tests.inputs import PAPER, SMALL, Case, problem
from tests.mosaic_checks import check_step
from tests.torch_inputs import on_the_cpu, tensor

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
GROUPS = (1, 2, 3, 5, 6, 8, 10, 16, 64)
MOVING = ("tile_block_lists", "dkv_merge")  # kernels that have sizes of others
LENGTH = 8192  # so long that tiles may be gathered

# (D, Dv, G): each width of keys, each width of values and each group once.
SAMPLE = (
    (32, 192, 1),
    (48, 112, 3),
    (64, 64, 2),
    (80, 48, 64),
    (96, 80, 5),
    (112, 32, 6),
    (128, 96, 8),
    (160, 160, 10),
    (192, 128, 16),
    (256, 256, 64),
)
# The narrowest; the largest odd groups that copies of slabs of 16 and of 32 columns can move; a
# group that does not divide the rows of `scores_kq`.
BORDERS = ((16, 16, 15), (96, 32, 31), (64, 64, 24))
COPIED = "Only copies transferring a number of bytes divisible by"
TOO_WIDE = "no product of 272 columns"
# And how compiling it fails.
REFUSED = {
    "a group with more rows than a tile": ({"G": 65}, ZeroDivisionError, "by zero"),
    "no multiple of 16": ({"D": 24}, StopIteration, None),  # no slab has such a width
    "too wide a key": ({"D": 272}, ValueError, TOO_WIDE),  # in dq
    "too wide a value": ({"Dv": 272}, ValueError, TOO_WIDE),
    "an odd group in slabs of 16": ({"D": 48, "G": 17}, NotImplementedError, COPIED),
    "an odd group in slabs of 32": ({"D": 96, "G": 33}, NotImplementedError, COPIED),
    "too much shared memory": (
        {
            "D": 256,
            "Dv": 256,
            "G": 1,
            "config": NSAConfig(select_block=128, num_selected=64),
        },
        ValueError,
        "exceeds available shared memory",
    ),
}


def asked(D=128, Dv=128, G=4, **change):
    """The problem of this shape on a Hopper GPU."""
    sizes = {"B": 1, "T": LENGTH, "S": LENGTH, "H": 2 * G, "Hkv": 2, "D": D, "Dv": Dv}
    place = {"framework": "jax", "step": "selected", "platform": "gpu", "packed": False}
    place |= {"dtype": "bfloat16", "config": PAPER, "capability": capability.HOPPER}
    return Problem(**sizes | place | change)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_width_and_group_is_accepted(dtype):
    shapes = list(itertools.product(WIDTHS, WIDTHS, GROUPS))
    assert len(shapes) == 900
    reasons = {shape: capability.why_not(asked(*shape, dtype=dtype)) for shape in shapes}
    assert {shape: reason for shape, reason in reasons.items() if reason} == {}


def narrowest(group: int) -> int:
    """Of which number widths must be multiples, so that a copy can move rows of `group` heads:
    rows * width of a slab * 2 bytes are a multiple of 128, of up to 64 rows.
    """
    if group % 2:
        return 16 if group <= 15 else 32 if group <= 31 else 64
    return 32 if group % 4 and group > 32 else 16


def test_large_groups_whose_rows_no_copy_moves_are_refused():
    for group, width in itertools.product(range(1, 65), (16, 48, 96, 160, 64, 256)):
        reason, least = capability.why_not(asked(width, 128, group)), narrowest(group)
        if width % least == 0:
            assert reason is None
            tile = Tile(group, slab_width(width, 128))
            assert tile.used > 0 == tile.used * tile.slab * 2 % 128
            continue
        assert reason == (
            f"takes D, Dv and select_block that are multiples of {least} where {group} query "
            f"heads share a key/value head, got D={width}, Dv=128, select_block=64"
        )
    narrow = asked(G=17, config=NSAConfig(select_block=48))
    assert capability.why_not(narrow).endswith("got D=128, Dv=128, select_block=48")


# What is accepted is compiled by Mosaic, and what is refused would not. Mosaic counts the shared
# memory; what ptxas makes of such kernels is in `test_mosaic_compiled.py`.


@functools.cache
def kernels(D=128, Dv=128, G=4, config=PAPER):
    """The kernels of both passes that multiply, one of a kind: others depend on no width, or
    move rows of one width.
    """
    name, found = f"{D=} {Dv=} {G=} {config}", {}
    case = Case(LENGTH, LENGTH, 2 * G, 2, D, Dv, 1, config, dtype="bfloat16")
    with mock.patch.dict(test_mosaic_compiled.SHAPES, {name: case}):
        for backward in (False, True):
            for kernel in test_mosaic_compiled.kernels(name, backward):
                if hasattr(kernel.spec, "D") and kernel.name not in MOVING:
                    gathered = getattr(kernel.spec, "gathered", False)
                    found[kernel.name, gathered] = kernel
    return list(found.values())


def test_gathered_query_tiles_can_be_copied():
    """Three tokens of five heads are 480 bytes a slab, which no copy moves."""
    kernel = next(k for k in kernels(96, 80, 5) if getattr(k.spec, "gathered", False))
    assert (kernel.spec.query_tile, kernel.spec.query_tile.tokens) == (Tile(5, 16, 32), 4)
    assert lowering.lower(kernel)


def test_gradients_from_query_tiles_with_rows_of_no_token(interpreted):
    case = Case(13, 33, H=5, Hkv=1, D=96, Dv=80, B=1, dtype="bfloat16")
    check_step(problem(case), "selected_attention")


def test_small_groups_are_compiled_with_the_gathered_kernels():
    names = {kernel.name for shape in SAMPLE for kernel in kernels(*shape)}
    assert {"gathered_forward", "gathered_dq"} < names


@pytest.mark.parametrize("shape", SAMPLE + BORDERS)
def test_what_is_accepted_compiles(shape):
    assert not capability.why_not(asked(*shape))
    assert all(lowering.lower(kernel) for kernel in kernels(*shape))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_does_not_compile(name, monkeypatch):
    change, error, message = REFUSED[name]
    assert capability.why_not(asked(**change))
    if message == COPIED:  # with as many tokens as a tile has room for
        monkeypatch.setattr(Tile, "tokens", property(lambda tile: tile.rows // tile.group))
    with pytest.raises(error, match=message):
        for kernel in kernels(**change):
            lowering.lower(kernel)


# A refusal comes before any kernel runs.

ODD = Case(20, 20, H=17, Hkv=1, D=48, Dv=16, B=1, dtype="bfloat16")
REASON = "takes D, Dv and select_block that are multiples of 32 where 17 query heads share"


@pytest.fixture
def no_kernel(monkeypatch):
    """No GPU is asked for, as in the interpreter, and a kernel that runs is an error."""

    def run(*arguments, **options):
        raise AssertionError("a Mosaic kernel ran")

    monkeypatch.setattr(Kernel, "__call__", run)
    monkeypatch.setattr(torch_ops, "launch", run)
    with capability.interpreted(True), on_the_cpu(monkeypatch):
        yield


def check_refusal(explain, attend, portable):
    """`attend(implementation)`: the gradient of the query through all steps."""
    with pytest.raises(NotImplementedError, match=f"mosaic: {REASON}"):
        attend("mosaic")
    plan = explain()
    assert {choice.implementation for choice in plan} == {portable}
    assert all(choice.refused["mosaic"].startswith(REASON) for choice in plan)
    assert attend(None).shape == (1, ODD.T, ODD.H, ODD.D)


@pytest.mark.usefixtures("no_kernel")
def test_jax_refuses_before_the_forward_pass():
    p = problem(ODD)

    def attend(implementation):
        def total(query):
            where = {"config": SMALL, "implementation": implementation}
            return nsa_jax.attention(query, p.key, p.value, p.gates, **where).sum()

        return jax.jit(jax.grad(total))(p.query)

    explain = functools.partial(nsa_jax.explain, p.query, p.key, p.value, config=SMALL)
    check_refusal(explain, attend, "xla")


@pytest.mark.usefixtures("no_kernel")
def test_torch_refuses_before_the_forward_pass():
    p = problem(ODD)
    query, *tensors = map(tensor, (p.query, p.key, p.value, p.gates))
    query.requires_grad_()

    def attend(implementation):
        where = {"config": SMALL, "implementation": implementation}
        nsa_torch.attention(query, *tensors, **where).sum().backward()
        return query.grad

    explain = functools.partial(nsa_torch.explain, query, *tensors[:2], config=SMALL)
    check_refusal(explain, attend, "sdpa")

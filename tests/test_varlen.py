"""Packed rows whose metadata is made once a batch (`nsa_torch.varlen_metadata`)."""

import pytest
import torch

from kernels_pallas.mosaic import capability
from nsa_core.plan.buffers import Launch, Place
from nsa_torch import batch_tables, mosaic, triton
from tests import planned
from tests.inputs import SMALL
from tests.stand_in_kernels import stand_in
from tests.test_plan import FORMS, call

PATHS = {"mosaic": mosaic.PATH, "triton": triton.PATH}
SIZES = 1, 90, 90, 4, 2, 16, 16, SMALL


def borders(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setattr("nsa_torch.triton_ops.launch", stand_in)
    with (
        planned.on_the_cpu(monkeypatch, stand_in),
        capability.interpreted(request.param == "mosaic"),
    ):
        yield PATHS[request.param]


def plans_of(path, cu_seqlens):
    """Of a call with residuals, and of its gradient."""
    arguments = call(FORMS["given"], SIZES, cu_seqlens=cu_seqlens)
    function = path.planned["attention_saving"]
    return function.plans(arguments, torch.device("cpu"))


def test_what_follows_from_the_borders_is_apart(path):
    """No step of a layer reads nothing but what follows from `cu_seqlens`."""
    for plan in plans_of(path, borders(30, 30, 70)):
        fixed = {plan.shared}
        fixed |= {
            n for n, x in enumerate(plan.buffers) if x.place in (Place.CONSTANT, Place.BATCH)
        }
        assert len(plan.batch) > 4
        for step in plan.steps:
            reads = {x.buffer for x in step.reads}
            assert isinstance(step, Launch) or not reads or not reads <= fixed, step.name


def test_made_once_and_written_again_in_place(path):
    """Tables of borders that say so: of two plans, the same memory; after other borders came, the
    numbers of these in that memory.
    """
    own = borders(30, 30, 70, 70)
    tables = batch_tables.Tables(None, True)
    batch_tables.attach(tables, own)
    arguments = call(FORMS["given"], SIZES, cu_seqlens=own)
    function = path.planned["attention_saving"]

    def bare(cu_seqlens):
        others = [cu_seqlens if x is own else x for x in arguments]
        return function(*others)

    first = function(*arguments)
    kept = [x for key, (_, (each, *_)) in tables._shared._kept.items() for x in each]
    assert kept and all(
        torch.equal(x, y) for x, y in zip(first, bare(own.clone()), strict=True)
    )
    again = function(*arguments)
    addresses = [x.data_ptr() for x in kept]
    own.copy_(borders(12, 41, 41, 90))
    tables.refill(own, own.device)
    now = [x for key, (_, (each, *_)) in tables._shared._kept.items() for x in each]
    assert [x.data_ptr() for x in now] == addresses
    other = function(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert all(torch.equal(x, y) for x, y in zip(other, bare(own.clone()), strict=True))

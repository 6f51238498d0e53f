"""Tensors of any strides give what contiguous ones give."""

import dataclasses

import pytest
import torch

from tests import pretend
from tests.oracles import fa2
from tests.paths import of_torch, steps_of_torch
from tests.problems import CASES, check, problem


def in_order(x):
    """Its axes in the other order in memory."""
    back = [*reversed(range(x.ndim))]
    return x.permute(*back).contiguous().permute(*back)


def within(x):
    """A part of an array that is NaN around it."""
    whole = x.new_full((x.shape[0] + 1, x.shape[1] + 3, *x.shape[2:]), torch.nan)
    whole[1:, 2:-1] = x
    return whole[1:, 2:-1]


def every_other(x):
    """Columns of twice as many, of which the others are NaN."""
    whole = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    whole[..., ::2] = x
    return whole[..., ::2]


def expanded(x):
    """One head of one row for all; of other numbers."""
    return x[:1, :, :1].expand(x.shape)


LAYOUTS = in_order, within, every_other, expanded


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "fa2"])
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
@pytest.mark.parametrize("name", ["fewer queries than keys", "any blocks"])
def test_strides_change_nothing(name, shift, implementation, monkeypatch):
    """Outputs and gradients; each tensor has each layout once."""
    p = problem(CASES[name])
    if p.case.blocks == "own":  # that other numbers would not leave beyond doubt
        p = dataclasses.replace(p, block_indices=p.steps["selected"][3])
    laid = lambda i, x: LAYOUTS[(i + shift) % len(LAYOUTS)](x.detach())
    pair = {"keys": (laid(1, p.keys[0]),), "values": (laid(2, p.values[0]),)}
    strided = dataclasses.replace(p, query=laid(0, p.query), **pair, gates=laid(3, p.gates))
    if implementation != "fa2":
        check(strided, of_torch(strided, implementation), strided.expected)
        return
    pretend.machine(monkeypatch, fa2_kernel=fa2.varlen)
    found = steps_of_torch(strided, "fa2", of_lse=False)
    check(strided, found, strided.expected_steps(False))

"""Packed rows whose tiles and blocks begin where their sequences do, on Mosaic kernels in the
interpreter with its race detector, against the oracle.
"""

import dataclasses
import functools
from unittest import mock

import pytest

from nsa_core.config import NSAConfig
from nsa_core.steps import mosaic_stored_ds
from tests import planned
from tests.inputs import Case
from tests.test_torch_mosaic import interpret
from tests.torch_inputs import check_branch, on_the_cpu

FEW = NSAConfig(16, 8, 64, num_selected=3, num_local=1, window=50)
# A tile of each walk has tokens of several sequences; the last of them is padding.
SEGMENTS = 70, 0, 1, 13, -6
PACKED = functools.partial(Case, 90, 90, B=1, config=FEW, segments=SEGMENTS, dtype="bfloat16")
G16 = PACKED(H=16, Hkv=1, Dv=48)
G3 = PACKED(H=6, Hkv=2, D=64, Dv=64)
LATE = dataclasses.replace(G16, T=40, S=150, segments=(100, 30, 1, 19))


@pytest.fixture
def ran(interpreted, monkeypatch):
    """The kernels that run."""
    with planned.on_the_cpu(monkeypatch, interpret) as found, on_the_cpu(monkeypatch):
        yield found


def test_ds_is_stored(ran, monkeypatch):
    gradients = mock.Mock(side_effect=mosaic_stored_ds.gradients)
    monkeypatch.setattr(mosaic_stored_ds, "gradients", gradients)
    check_branch(G16, "selected", "mosaic")
    assert gradients.called


def test_list_entries_are_single_tokens(ran):
    check_branch(G3, "selected", "mosaic")
    assert [x.spec.single_token for x in ran if x.name == "dkv_partials"] == [True]

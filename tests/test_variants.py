"""Which bodies a problem gets: the same whether kernels are interpreted or compiled."""

import pytest

from kernels_pallas.specs import dkv, scores

SIZES = dict(B=1, T=256, Hkv=1, D=64, dtype="bfloat16", scale=1.0)
SCORES = SIZES | dict(
    blocks=8, candidates=8, ratio=4, cover=2, n=4, num_initial=1, num_local=2, packed=False
)
DKV = SIZES | dict(S=256, H=16, Dv=64, work_items=4)


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize(("group", "body"), [(1, "qk"), (16, "qk"), (17, "kq"), (64, "kq")])
def test_scores(group, body, interpret):
    kernel = scores.best_blocks(scores.Scores(**SCORES, H=group, interpret=interpret))
    assert kernel.body == f"kernels_pallas.mosaic.scores_{body}:best_blocks"


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize(("entries", "body"), [(0, "interval"), (64, "gathered")])
def test_dkv(entries, body, interpret):
    options = {"list_entries": entries, "interval_partials": 4, "interpret": interpret}
    kernel = dkv.partials(dkv.Dkv(**DKV, **options))
    assert kernel.body == f"kernels_pallas.mosaic.dkv_{body}:partials"


@pytest.mark.parametrize(
    ("widths", "entries", "kernels"),
    [
        ((128, 128), 0, [["dk", "dv"]]),
        ((192, 128), 0, [["dk"], ["dv"]]),
        ((192, 128), 64, [["dk", "dv"]]),
        ((256, 128), 64, [["dk"], ["dv"]]),
    ],
)
def test_kernels_of_both_gradients(widths, entries, kernels):
    spec = dkv.Dkv(**DKV | dict(zip(("D", "Dv"), widths, strict=True)), list_entries=entries)
    assert [list(x.widths) for x in spec.passes] == kernels

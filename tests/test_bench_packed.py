"""bench.packed: what a row says, without a GPU."""

import torch

from bench import packed
from tests.measured import record


def test_lengths_of_documents():
    for shape in packed.SHAPES.values():
        assert min(shape.lengths) > 0
    sizes = packed.SHAPES["31 documents, 61444 tokens"].lengths
    assert (len(sizes), sum(sizes)) == (31, 61444) and max(sizes) > 8 * min(sizes)


def test_the_array_that_is_farthest_counts():
    one, two = torch.ones(2, 4), torch.full((2, 4), 3.0)
    assert packed.farthest([one, two], [one, two]) == 0
    assert packed.farthest([one, two + 0.3], [one, two]) < 0.1001
    assert packed.farthest([one * 1.5, two + 0.3], [one, two]) == 0.5


def test_a_line():
    extra = {"form": "varlen", "farthest": 2e-3, "host_ms": 0.5, "metadata_ms": 0.02}
    cells = packed.cells("16 x 2048", record("all", "mosaic", 1.0, extra=extra))
    assert [*cells.values()][1:] == [
        *("forward", "varlen", "1.000", "0.900 to 1.100", "0.500", "0.020", "-", "2.00e-03")
    ]
    wrong = record("all", "mosaic", None, extra=extra, reason="2 % off")
    assert packed.cells("16 x 2048", wrong)["ms"] == "wrong: 2 % off"

"""bench.packed: what a row says, without a GPU."""

import torch

from bench import packed, tables


def test_lengths_of_documents():
    for shape in packed.SHAPES.values():
        assert min(shape["documents"]) > 0 and sum(shape["documents"]) == shape["T"]
    sizes = packed.SHAPES["31 documents, 61444 tokens"]["documents"]
    assert len(sizes) == 31 and max(sizes) > 8 * min(sizes)


def test_the_array_that_is_farthest_counts():
    one, two = torch.ones(2, 4), torch.full((2, 4), 3.0)
    assert packed.farthest([one, two], [one, two]) == 0
    assert packed.farthest([one, two + 0.3], [one, two]) < 0.1001
    assert packed.farthest([one * 1.5, two + 0.3], [one, two]) == 0.5


def test_a_line():
    extra = {"form": "varlen", "farthest": 2e-3, "host_ms": 0.5, "metadata_ms": 0.02}
    row = {"name": "16 x 2048", "mode": "forward", **extra}
    times = {"time_ms": 1.0, "p20_ms": 0.9, "p80_ms": 1.1}
    assert tables.line("packed", row | times).split("forward")[1].split() == [
        *("varlen", "1.000", "ms", "(0.900", "to", "1.100)", "host", "0.500"),
        *("metadata", "0.020", "distance", "2.00e-03"),
    ]
    assert "wrong: 2 % off" in tables.line("packed", row | {"fate": "wrong: 2 % off"})

"""`bench.block_selection` on a CPU: rows, what is judged, what a wrong result does."""

from unittest import mock

import pytest
import torch

from bench import block_selection
from bench.harness import block_peers, exit_status, flex_blocks, records
from nsa_torch.huggingface import block_selection as ours
from tests.commands import called
from tests.refusals import refused
from tests.tables import table

TABLE = table("bench")
SMALL = "--lengths=48,64 --heads=4 --kv_heads=2 --dk=16 --block=8 --n_sel=3 --device=cpu"


def run(folder, *arguments):
    """Exit status and rows of the command."""
    path = folder / "rows.jsonl"
    status = called(block_selection, SMALL, "--seconds=0.01 --out", path, *arguments)
    return status, records.flat_lines(path)


def test_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(block_selection.QSA, "num_selected", 8)
    status, rows = run(tmp_path, "--checked=20 --dtype=float32")
    assert status == exit_status.OK and len(rows) == 50
    assert {(x["S"], x["mode"], x["implementation"]) for x in rows} == {
        (length, mode, name)
        for length in (48, 64)
        for mode in block_selection.MODES
        for name in block_selection.IMPLEMENTATIONS
        if name in block_selection.MODES[mode].names
    }
    for row in rows:
        if row["implementation"] in ("flex", *block_peers.MODULES):  # on a CPU
            assert row["status"] == "unsupported" and "GPU" in row["reason"]
            continue
        assert row["status"] == "ok" and row["ms"] > 0
        assert row["peak_gib"] is None and row["extra_gib"] is None
        mode = block_selection.MODES[row["mode"]]
        if row["implementation"] in mode.elsewhere:
            assert row["errors"] == {}
            continue
        lists = [] if row["mode"] in ("forward", "fwdbwd", "loss") else ["lists"]
        assert list(row["errors"]) == [*mode.results, *lists]
        assert all(error < 1e-6 for error in row["errors"].values())
        assert row["errors"].get("lists", 0) == 0


@pytest.mark.parametrize("queries, keys, block", TABLE["blocks of flex attention"])
def test_what_flex_attention_reads(queries, keys, block):
    """The tiles that are read are those that have a pair that is seen."""
    make = torch.Generator().manual_seed(0)
    blocks = -(-keys // block)
    at = torch.arange(keys - queries, keys)
    indices = torch.rand(1, 2, queries, blocks, generator=make).argsort(-1)[..., :2]
    indices[..., 1].masked_fill_(at % 3 == 0, -1)
    mask = flex_blocks.mask_of(indices, keys, block, 4)
    key = torch.arange(keys)
    named = (indices[..., None] == key // block).any(3) & (key <= at[:, None])
    grid = torch.meshgrid(torch.arange(4), torch.arange(queries), key, indexing="ij")
    assert torch.equal(mask.mask_mod(torch.tensor(0), *grid), named[0].repeat_interleave(2, 0))
    pad = torch.nn.functional.pad(named, (0, -keys % 128, 0, -queries % 128))
    tiles = pad.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).any(-1).any(3)
    read = mask.to_dense()[0].bool()
    assert torch.equal(read, tiles[0].repeat_interleave(2, 0))


def test_what_vllm_reads():
    """A page a block of each row, and lists a key/value head of all rows' queries."""
    make = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 2, 3, 384, 16, generator=make).unbind()
    lists = block_selection.blocks_of(2, 3, 384, 128, 2, "cpu")[:, :, -200:]
    read = block_peers.pages_of(key, value, lists)
    block = lists[1, 2, 7, 0]
    pair = [x[1, 2].unflatten(0, (-1, 128))[block] for x in (key, value)]
    page = read["kv_cache"][read["block_table"][1, block], 2]
    assert torch.equal(page, torch.cat(pair, -1))
    assert torch.equal(read["topk_idx"][2, 200 + 7], lists[1, 2, 7].int())
    assert read["cu_seqlens_q"].tolist() == [0, 200, 400]
    assert read["seq_lens"].tolist() == [384] * 2 and read["prefix_lens"].tolist() == [184] * 2
    lists[0, 0, 199, 0] = -1
    with refused("select min(n, visible blocks)"):
        block_peers.pages_of(key, value, lists)


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has")
    timed = mock.Mock(wraps=block_selection.timed, side_effect=(mock.DEFAULT, full))
    monkeypatch.setattr(block_selection, "timed", timed)
    status, rows = run(tmp_path, "--mode=forward --implementation=nsa_blocks")
    assert status == exit_status.NOT_MEASURED
    found = [(row["status"], row.get("reason", "")) for row in rows]
    assert found == [("ok", ""), ("oom", "CUDA out of memory. Tried to allocate 16.00 GiB")]


def test_a_block_too_early_is_wrong(tmp_path, monkeypatch):
    attend = ours.block_attention

    def early(module, *rest, block_indices=None):
        return attend(module, *rest, block_indices=block_indices - 1)

    monkeypatch.setattr(ours, "block_attention", early)
    status, rows = run(tmp_path, "--mode=forward --dtype=float32")
    assert status == exit_status.WRONG
    wrong = [x for x in rows if x["status"] == "wrong"]
    assert {x["implementation"] for x in wrong} == {"nsa_blocks"} and len(wrong) == 2
    assert wrong[0]["reason"].startswith("out: max error ")


@pytest.mark.parametrize("words, ends, count", TABLE["rows of block selection"])
def test_some_rows(words, ends, count, tmp_path):
    status, rows = run(tmp_path, words)
    assert status == getattr(exit_status, ends) and len(rows) == count
    assert {row["S"] for row in rows} == {48, 64}


@pytest.mark.parametrize("length, count, overlap", [(45, 3, 0.0), (200, 5, 0.9)])
def test_blocks_are_distinct_and_may_be_seen(length, count, overlap):
    found = block_selection.blocks_of(1, 2, length, 8, count, "cpu", overlap)
    own = torch.arange(length)[:, None] // 8
    assert found.shape == (1, 2, length, count) and found.dtype == torch.int64
    assert (found <= own).all() and (found == own).any(dim=-1).all()
    ordered = found.sort(dim=-1).values
    assert ((ordered[..., 1:] > ordered[..., :-1]) | (ordered[..., 1:] < 0)).all()
    if not overlap:
        assert ((found >= 0).sum(dim=-1) == (own[:, 0] + 1).clamp(max=count)).all()
        return
    assert (found[..., -1:] == own).all()
    assert (found[:, :, 100:] >= 0).double().mean() > 0.9
    kept = (found[:, :, 101:, :-1, None] == found[:, :, 100:-1, None, :-1]).any(-1)
    assert 0.8 < kept.double().mean() < 0.95

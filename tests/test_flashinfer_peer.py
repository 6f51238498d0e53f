"""FlashInfer's arguments, by stand-ins for its kernels that compute from pages; no GPU."""

import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import block_selection, decode
from bench.harness import block_peers, flashinfer_peer
from tests.commands import SIZES as SIZES_OF_RUNS
from tests.commands import run

SIZES = 2, 2, 384, 128, 3  # sequences, key/value heads, tokens, tokens of a block, blocks


def attend(query, key, value):
    """Of `[H, D]` to `[keys, Hkv, D]`."""
    pair = (x.transpose(0, 1)[None] for x in (key, value))
    return scaled_dot_product_attention(query[None, :, None], *pair, enable_gqa=True)[0, :, 0]


class Wrapper:
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and layout == "NHD" and use_tensor_cores

    def plan(self, ends, pages, last, heads, kv_heads, width, size, **dtypes):
        assert {x.dtype for x in (ends, pages, last)} == {torch.int32}
        assert ends[-1] == len(pages) and len(ends) == len(last) + 1
        self.ends, self.pages, self.last = ends.tolist(), pages, last.tolist()
        self.shape, self.query, self.dtypes = (size, kv_heads, width), (heads, width), dtypes

    def run(self, query, pair):
        assert query.shape[1:] == self.query and query.is_contiguous()
        assert {x.dtype for x in pair} == {*self.dtypes.values()} == {query.dtype}
        assert {x.shape[1:] for x in pair} == {self.shape} and pair[0].stride() == pair[
            1
        ].stride()
        rows = []
        for i, row in enumerate(query):
            pages = self.pages[self.ends[i] : self.ends[i + 1]].long()
            count = (len(pages) - 1) * self.shape[0] + self.last[i]
            rows.append(attend(row, *(x[pages].flatten(0, 1)[:count] for x in pair)))
        return torch.stack(rows)


def msa_sparse_attention(query, key, value, lists, ends, *, page_table, seqused_k, causal, out):
    assert key.dtype == value.dtype == torch.float8_e4m3fn and causal
    assert lists.shape[1:] == (len(query), 16) and lists.dtype == torch.int32
    assert value.data_ptr() - key.data_ptr() == key.shape[-1] == key.stride(2) // 2
    for row, listed in enumerate(lists.transpose(0, 1)):
        sequence = int((ends[1:] <= row).sum())
        place = seqused_k[sequence] - ends[sequence + 1] + row
        for head, blocks in enumerate(listed):
            filled = int((blocks >= 0).sum())
            assert (blocks[:filled].diff() > 0).all() and (blocks[filled:] == -1).all()
            pages = page_table[sequence, blocks[:filled]]
            count = (filled - 1) * 128 + place % 128 + 1
            read = (x[pages, head].flatten(0, 1)[:count, None].float() for x in (key, value))
            groups = slice(head * 2, head * 2 + 2)
            out[row, groups] = attend(query[row, groups].float(), *read)
    return out


@pytest.fixture
def installed(monkeypatch):
    module = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, msa_sparse_attention=msa_sparse_attention
    )
    for name in ("flashinfer", "flashinfer.msa_ops"):
        monkeypatch.setitem(sys.modules, name, module)


def arrays():
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 384, 16, generator=make) for heads in (4, 2, 2)]


@pytest.mark.parametrize("overlap", [0.0, 0.9])
@pytest.mark.parametrize("name", flashinfer_peer.LISTED)
def test_attention_to_given_blocks(name, overlap, installed):
    query, key, value = arrays()
    lists = block_selection.blocks_of(*SIZES, "cpu", overlap)[:, :, -140:]
    query = query[:, :, -140:]
    out = flashinfer_peer.LISTED[name](key, value, lists, 4)(query)
    if name == "flashinfer_fp8":
        key, value = (x.to(torch.float8_e4m3fn).float() for x in (key, value))
    at, place = torch.arange(384), torch.arange(244, 384)[:, None]
    seen = (lists[..., None] == at // 128).any(3) & (at <= place)
    how = {"attn_mask": seen.repeat_interleave(2, 1), "enable_gqa": True}
    expected = scaled_dot_product_attention(query, key, value, **how)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert block_peers.why_not(name, "cpu") == f"{name} has kernels only for GPUs"


def test_lists_without_the_own_block():
    _, key, value = arrays()
    lists = block_selection.blocks_of(*SIZES, "cpu")
    lists[0, 0, 200, 0] = 0
    with pytest.raises(ValueError, match="only queries that select their own block"):
        flashinfer_peer.listed(key, value, lists, 4)


@pytest.mark.parametrize("length", [61, 64, 150])
def test_attention_to_a_cache(length, installed):
    given = [x[:, :, :n] for x, n in zip(arrays(), (1, length, length), strict=True)]
    expected = scaled_dot_product_attention(*given, enable_gqa=True).transpose(1, 2)
    query, key, value = (x.transpose(1, 2).contiguous() for x in given)
    torch.testing.assert_close(flashinfer_peer.cached(query, key, value)(query), expected)
    with pytest.raises(NotImplementedError, match="D = Dv, got D=16, Dv=8"):
        flashinfer_peer.cached(query, key, value[..., :8])


def test_a_row_of_decoding(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(flashinfer_peer, "dense_names", lambda *_: ("flashinfer",))
    words = "--B=2 --S_list=61 --warmup=1 --input=random --dtype=f32 --framework=torch"
    status, found, (row,) = run(decode, tmp_path, SIZES_OF_RUNS, words, "--dv=16 --dk=16")
    assert status == 0 and float(row["ms_dense_flashinfer"]) > 0
    assert [r.status for r in found if r.implementation == "flashinfer"] == ["ok"]


@pytest.mark.parametrize(
    "framework, queries, there, names",
    [("torch", 1, True, 1), ("torch", 1, False, 0), ("torch", 2, True, 0), ("jax", 1, True, 0)],
)
def test_a_dense_name(framework, queries, there, names, monkeypatch):
    runner = types.SimpleNamespace(framework=framework, platform="cuda")
    monkeypatch.setattr(flashinfer_peer.importlib.util, "find_spec", lambda name: there)
    assert flashinfer_peer.dense_names(runner, queries) == ("flashinfer",) * names

"""flash_nsa and fsa by stand-ins with their arguments, layouts and checks, on the CPU.

The stand-ins' functions are those of github.com/mdy666/Scalable-Flash-Native-Sparse-Attention at
fcf117c and github.com/Relaxed-System-Lab/Flash-Sparse-Attention at 1da34f3.
"""

import dataclasses
import types

import pytest
import torch

from bench.harness import peer_nsa_triton, peers
from tests import pretend
from tests.test_peer_nsa_triton import CONFIG, SETTINGS, StandIn, asked
from tests.test_peers import BRANCHES, row

LENGTH = SETTINGS.runtime.seq_len
EMPTY = CONFIG.num_blocks(LENGTH)  # in a slot without a block


class FlashNSA(StandIn):
    """The functions of `flash_nsa` and of its `NSAHelper`."""

    def set_hyperparameters(
        self,
        kernel_size,
        stride,
        block_size,
        window_size,
        top_n,
        num_init_blocks,
        num_local_blocks,
    ):
        assert (kernel_size, stride) == (CONFIG.compress_block, CONFIG.compress_stride)
        assert (block_size, window_size) == (CONFIG.select_block, CONFIG.window)
        assert (num_init_blocks, num_local_blocks) == (CONFIG.num_initial, CONFIG.num_local)
        self.top_n = top_n

    def init_cu_seqlens(self, x_cu_seqlens):
        self.bounds = x_cu_seqlens

    def mean_pooling(self, x):
        sizes = CONFIG.compress_block, CONFIG.compress_stride
        return self.avgpool_compress(x, None, self.bounds, *sizes)[0]

    def both(self, q, k, v):
        sizes = CONFIG.compress_block, CONFIG.compress_stride, CONFIG.select_block
        count = CONFIG.num_compressed(LENGTH)
        of_keys = self.bounds // LENGTH * count
        bounds = self.bounds, of_keys, LENGTH, count
        forced = {"init_blocks": CONFIG.num_initial, "local_blocks": CONFIG.num_local}
        return self.compressed_attention(q, k, v, *sizes, self.top_n, *bounds, **forced)

    def compress_attn(self, q, k, v):
        self.lse = torch.zeros(q.shape[1::-1])
        return self.both(q, k, v)[0], self.lse

    def slc_topk_indices(self, q, k, lse, *, maybe_efficient_version):
        assert lse is self.lse and maybe_efficient_version
        blocks = self.both(q, k, k)[1]
        return blocks.masked_fill(blocks < 0, EMPTY).flip(-1), None

    def select_attn(self, q, k, v, topk):
        assert topk.shape[-1] == self.top_n and ((topk >= 0) & (topk <= EMPTY)).all()
        visible = torch.arange(len(q)) % LENGTH // CONFIG.select_block + 1
        assert ((topk < EMPTY).sum(-1) == visible.clamp(max=self.top_n)).all()
        blocks = topk.masked_fill(topk == EMPTY, -1)
        return self.topk_sparse_attention(q, k, v, blocks, CONFIG.select_block, self.bounds)


@pytest.fixture
def put_in_place(monkeypatch):
    """Installs the stand-ins, and gives a package's rows."""

    def put(name, broken="", **changes):
        found = FlashNSA(broken)
        names = "mean_pooling compress_attn slc_topk_indices select_attn"
        functions = {each: getattr(found, each) for each in names.split()}
        helper = types.SimpleNamespace(
            set_hyperparameters=found.set_hyperparameters,
            init_cu_seqlens=found.init_cu_seqlens,
        )
        pretend.module(monkeypatch, "flash_nsa", NSAHelper=helper, **functions)
        function = found.topk_sparse_attention
        for module in ("fsa", "fsa.ops"):
            pretend.module(monkeypatch, module, FSA_topk_sparse_attention=function)
        pretend.module(monkeypatch, "flash_attn", flash_attn_func=found.flash_attn_func)
        monkeypatch.setattr(peer_nsa_triton.records, "version", lambda package: "1.0")
        return {job.branch: job for job in peers.jobs(asked(**changes), BRANCHES, [name])}

    return put


def test_what_they_cannot_run_says_why(put_in_place):
    assert list(put_in_place("flash_nsa")) == ["compressed", "scores", "selected", "all"]
    assert list(put_in_place("fsa")) == ["selected"]
    small = {"config": dataclasses.replace(CONFIG, select_block=16)}
    for name, changes, reason in (
        ("flash_nsa", {"platform": "cpu"}, "needs CUDA tensors, got cpu"),
        ("fsa", {"dtype": "float32"}, "needs float16 or bfloat16, got float32"),
        ("flash_nsa", {"D": 192, "Dv": 128}, "is called with D = Dv only, got D=192, Dv=128"),
        ("fsa", small, "needs blocks of (32, 64, 128, 256) keys, got 16"),
        ("flash_nsa", small, ""),
    ):
        found = put_in_place(name, **changes)["selected"].unsupported
        assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(
    "name, branch, mode, broken",
    [
        *(("flash_nsa", branch, "forward", branch) for branch in BRANCHES[:3]),
        *(("flash_nsa", "all", "fwdbwd", part) for part in ("compress", "sliding")),
        ("fsa", "selected", "fwdbwd", "selected"),
    ],
)
def test_each_branch_is_judged(name, branch, mode, broken, put_in_place):
    job = put_in_place(name)[branch]
    found = row(job, SETTINGS, mode)
    assert found.get("status", "ok") == "ok" and found["time_ms"] > 0, found
    assert found["rows_checked"] == LENGTH and found["reason"] == job.note
    assert row(put_in_place(name, broken)[branch], SETTINGS, mode)["status"] == "wrong"

"""native-sparse-attention-triton by a stand-in with its arguments, layouts and checks, on the CPU.

The stand-in's functions are those of github.com/XunhaoLai/native-sparse-attention-triton at
9bea856; a mutant of each must not pass.
"""

import dataclasses
import warnings

import pytest
import torch

from bench.harness import peer_nsa_triton, peers, problems
from bench.harness.runners import TorchRunner
from nsa_torch import functional
from tests import pretend
from tests.measured import problem
from tests.tables import table
from tests.test_peers import BRANCHES, row

SETTINGS = problems.settings("tiny", {"seq_len": 165, "batch": 2, "precision": "bf16"})
CONFIG = dataclasses.replace(SETTINGS.nsa, num_selected=4)  # of 6: one is not forced
SETTINGS = dataclasses.replace(SETTINGS, nsa=CONFIG)
NAME = peer_nsa_triton.NAME
OPS = "native_sparse_attention.ops"


def asked(**changes):
    known = {"platform": "cuda", "capability": (9, 0), **changes}
    return problem(SETTINGS)._replace(**known)


class StandIn:
    """The functions of `native_sparse_attention.ops`, on sequences of one length. They have only
    the arguments that are passed.

    Attributes:
      broken: which mutant it is, or nothing.
    """

    def __init__(self, broken=""):
        self.broken = broken

    def by_sequence(self, x, cu_seqlens):
        """`[B, T, ..]` of packed rows, whose bounds must be those of equal sequences."""
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.ndim == 1 and x.ndim == 3
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == x.shape[0]
        (length,) = set(cu_seqlens.diff().tolist())
        return x.unflatten(0, (-1, length))

    def avgpool_compress(self, x, w, cu_seqlens, kernel_size, kernel_stride):
        assert w is None
        assert (kernel_size, kernel_stride) == (CONFIG.compress_block, CONFIG.compress_stride)
        found = functional.compress(self.by_sequence(x, cu_seqlens), config=CONFIG)
        if self.broken == "compress":
            found = found.roll(1, dims=1)
        count = torch.arange(len(cu_seqlens), dtype=torch.int32) * found.shape[1]
        return found.flatten(0, 1), count

    def compressed_attention(
        self,
        q,
        k,
        v,
        kernel_size,
        kernel_stride,
        block_size,
        topk,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        *,
        init_blocks,
        local_blocks,
    ):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert k.shape == v.shape and q.shape[0] > k.shape[0]
        assert (kernel_size, kernel_stride) == (CONFIG.compress_block, CONFIG.compress_stride)
        query = self.by_sequence(q, cu_seqlens_q)
        key, value = (self.by_sequence(x, cu_seqlens_k) for x in (k, v))
        assert (max_seqlen_q, max_seqlen_k) == (query.shape[1], key.shape[1])
        seen = key.roll(1, dims=1) if self.broken == "compressed" else key
        out, _ = functional.compressed_attention(query, seen, value, config=CONFIG)
        out = out.flatten(0, 1)
        if topk <= 0:
            warnings.warn("topk <= 0, returned topk_idx will be None", stacklevel=1)
            return out, None
        assert topk >= init_blocks + local_blocks
        most = min(topk, CONFIG.num_blocks(query.shape[1]))
        local = local_blocks - (self.broken == "scores")
        config = dataclasses.replace(
            CONFIG, num_selected=most, num_initial=init_blocks, num_local=local
        )
        blocks = functional.select_blocks(query, key, config=config)
        return out, blocks.flatten(0, 1).transpose(0, 1).contiguous()

    def topk_sparse_attention(self, q, k, v, topk_idx, block_size, cu_seqlens):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert topk_idx.dtype == torch.int32 and block_size == CONFIG.select_block
        assert topk_idx.shape[:2] == (k.shape[1], q.shape[0]) and topk_idx.is_contiguous()
        filled = topk_idx >= 0  # it counts them and reads so many from the first on
        assert not (filled[..., 1:] & ~filled[..., :-1]).any()
        query, key, value = (self.by_sequence(x, cu_seqlens) for x in (q, k, v))
        if self.broken == "selected":
            topk_idx = (topk_idx - 1).clamp(min=-1)
        blocks = topk_idx.transpose(0, 1).unflatten(0, query.shape[:2])
        config = dataclasses.replace(CONFIG, num_selected=blocks.shape[-1])
        out, _ = functional.selected_attention(query, key, value, blocks, config=config)
        return out.flatten(0, 1)

    def flash_attn_func(self, q, k, v, *, causal, window_size):
        assert causal and window_size == (CONFIG.window - 1, 0)
        wide = CONFIG.window + (self.broken == "sliding")  # as in the package's own module
        config = dataclasses.replace(CONFIG, window=wide)
        return functional.sliding_attention(q, k, v, config=config)[0]


@pytest.fixture
def put_in_place(monkeypatch):
    """Installs a stand-in, and gives the package's rows."""

    def put(broken="", **changes):
        found = StandIn(broken)
        names = "avgpool_compress compressed_attention topk_sparse_attention flash_attn_func"
        functions = {name: getattr(found, name) for name in names.split()}
        for name in ("native_sparse_attention", OPS, "flash_attn"):
            pretend.module(monkeypatch, name, **functions)
        monkeypatch.setattr(peer_nsa_triton.records, "version", lambda package: "0.1.0")
        return {job.branch: job for job in peers.jobs(asked(**changes), BRANCHES, [NAME])}

    return put


def test_what_it_cannot_run_says_why(put_in_place, monkeypatch):
    (first, *_) = peers.jobs(asked(), BRANCHES, [NAME])
    assert first.unsupported.startswith(f"{NAME} is not installed: pip install git+https://")
    assert [job.branch for job in put_in_place().values() if job.unsupported] == []
    config = {"config": dataclasses.replace(CONFIG, select_block=16)}
    blocks = "needs blocks of (32, 64, 128, 256) keys, got 16"
    refusals = table("bench")["refusals of the other package"]
    for changes, branch, reason in (*refusals, (config, "selected", blocks)):
        assert reason in put_in_place(**changes)[branch].unsupported
    installed = {NAME: "0.1.0", "flash-attn-4": "4.0.0"}
    monkeypatch.setattr(peer_nsa_triton.records, "version", installed.get)
    assert "needs flash_attn for the sliding window" in peer_nsa_triton.why_not(asked(), "all")
    assert peer_nsa_triton.why_not(asked(), "selected") is None


def test_rows_say_what_they_are(put_in_place):
    found = put_in_place()
    assert list(found) == ["compressed", "scores", "selected", "all"]
    assert all(job.judged and job.library and NAME in job.note for job in found.values())
    assert "w + 1" in found["all"].note and "the time includes both" in found["scores"].note


@pytest.mark.parametrize(
    "branch, mode",
    [
        *((branch, "forward") for branch in ("compressed", "scores", "selected", "all")),
        ("all", "fwdbwd"),  # gradients flow through its layouts
    ],
)
def test_each_branch_is_judged(branch, mode, put_in_place):
    job = put_in_place()[branch]
    found = row(job, SETTINGS, mode)
    assert found.get("status", "ok") == "ok" and found["time_ms"] > 0, found
    assert found["rows_checked"] == 165 and found["reason"] == job.note
    assert "judged" not in found.get("extra", {})


@pytest.mark.parametrize(
    "broken, branch",
    [(name, name) for name in ("compressed", "scores", "selected")]
    + [(name, "all") for name in ("compress", "compressed", "scores", "selected", "sliding")],
)
def test_what_is_wrong_is_not_timed(broken, branch, put_in_place):
    found = row(put_in_place(broken)[branch], SETTINGS)
    assert found["status"] == "wrong" and "time_ms" not in found


def test_a_package_of_the_same_module_name_is_a_row(put_in_place, monkeypatch):
    job = put_in_place()["selected"]
    pretend.module(monkeypatch, OPS)
    found = row(job, SETTINGS)
    assert found["status"] == "unsupported" and "topk_sparse_attention" in found["reason"]


def test_empty_slots_of_short_sequences(put_in_place):
    settings = problems.settings("tiny", {"seq_len": 70, "precision": "bf16"})
    assert settings.nsa.num_selected > settings.nsa.num_blocks(70) == 3
    made, runner = problems.make(settings, "random"), TorchRunner("cpu")
    function = put_in_place(config=settings.nsa)["scores"].function
    found = function(runner.load(made.arguments("scores")))["indices"]
    assert (found.numpy() == made.block_indices).all()


def test_peers_are_a_list():
    assert peers.named([f"fla, {NAME}", "fa4"]) == ["fla", NAME, "fa4"]
    with pytest.raises(ValueError, match=r"--peers must be in .*, got other"):
        peers.named(["fla,other"])

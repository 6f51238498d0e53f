"""Compares implementations of the attention of a released model that selects key blocks.

    python -m bench.block_selection                              # MiniMax-M3's sizes, 8k and 32k
    python -m bench.block_selection --lengths 1024 --heads 8 --kv_heads 2 --out rows.jsonl

The command measures one layer without its projections. Only the mode `indexer` includes the
indexer. Every query attends to its own block and to earlier blocks. By default the earlier blocks
are random. With `--overlap 0.95` each block of the previous query is selected again with
probability 0.95. The file `--out` gets one line of JSON per length, mode and implementation.

These implementations are compared:

- `nsa_torch`: `block_attention`, `index_blocks` and `indexer_kl` in their own layout.
- `nsa_blocks`: the functions of `nsa_torch` in transformers' layout, as
  `attn_implementation="nsa_blocks"` runs them.
- `sdpa`, `eager`: transformers' functions of these names, with a mask `[B, H, S, S]`. The model
  builds the mask from the blocks in every layer, and the time includes building the mask.
- `flex`: torch's FlexAttention, which reads the union of the blocks of 128 queries and masks single
  pairs of query and key. The time of `flex` excludes building the mask.
- `vllm`: vLLM's Triton kernel for this model, forward only. The time of `vllm` excludes filling
  pages.
- `flash_msa`: flash-msa's kernels, which select the blocks themselves from an indexer's queries and
  key. The time of `flash_msa` includes the selection, and the results of `flash_msa` are not
  compared.
- `flashinfer`: FlashInfer's paged decode kernel, forward only. Every pair of a query and a
  key/value head is a request, and the pages of the request are its blocks. The time of `flashinfer`
  excludes filling pages and planning.
- `flashinfer_fp8`: FlashInfer's kernels for this model, forward only. On Hopper the kernels read
  only keys and values in fp8. The time excludes rounding to fp8 and filling pages, but the errors
  include the rounding. The number of queries determines the kernel, so that the compared kernel can
  differ from the timed kernel.
- `plain`: the functions of this library without kernels.

These modes are measured:

- `forward`: attention.
- `fwdbwd`: attention, and the gradients of query, key and value.
- `indexer`: the selection of blocks from 256 columns of a hidden state. `eager` runs the model's
  indexer, and `nsa_blocks` runs the indexer with `index_blocks`. `nsa_torch` begins with the
  queries and keys of the indexer.
- `loss`: `indexer_kl` and its gradients.
- `decode`: the selection and attention for one token per row, from pages of one block, in one CUDA
  graph.
- `qsa`: selection and attention of QSA's layer, whose sizes replace the sizes of the flags. In mode
  `qsa`, `sdpa` is dense attention without blocks.
- `qsa_decode`: a decode step of QSA's layer.

A line has these fields:

- `ms` is the median. `p20_ms` and `p80_ms` are the 20th and 80th percentile.
- `peak_gib` is the peak allocation, including the arguments.
- `extra_gib` is the peak allocation of one call, including its results.
- `errors` has relative errors for the last `--checked` queries and all keys. An error is the root
  mean square of the difference from an oracle, divided by the root mean square of the oracle. The
  oracle of attention is `eager` in float32, or `sdpa` in float64 if the inputs are float32. The
  oracle of the other modes is `plain` in the same precision.
- `errors.lists` in mode `indexer` is the share of queries whose blocks differ from the blocks of
  float32 scores, and may be at most 2 %. `errors.lists` in modes `decode`, `qsa` and `qsa_decode`
  is the share of blocks that `plain` does not select. This share may be at most `2 eps` of the
  inputs' dtype.
- `status` is `wrong` if our results break the rule of `bench/judge/parity.py`. The baseline of the
  rule is `sdpa` or `plain` in the precision of the inputs.

The command needs the extra `hf`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from absl import app
from torch import Tensor

import nsa_torch
from nsa_core import extras

from . import run
from .harness import (
    block_peers,
    cli,
    command,
    exit_status,
    flashinfer_peer,
    flex_blocks,
    heartbeat,
    runners,
    timing,
)
from .harness.records import Values
from .judge import parity

OURS = "nsa_torch", "nsa_blocks"
PEERS = tuple(block_peers.MODULES)
FORWARD_ONLY = "vllm", *flashinfer_peer.LISTED
WHOLE = *OURS, "sdpa", "eager", "flex", *PEERS
IMPLEMENTATIONS = *OURS, "plain", *WHOLE[2:]
HIDDEN, LISTS_APART, ROUNDINGS = 256, 0.02, 2
QSA_HEADS, QSA_KV_HEADS, QSA_WIDTH = 24, 2, 256
QSA_INDEX_HEADS, QSA_INDEX_WIDTH, QSA_PAGE, QSA_BLOCK = 4, 128, 64, 4
QSA: Values = {
    "pool": 1,
    "num_selected": 512,
    "num_local": 0,
    "activation": "relu",
    "reduce": "sum",
    "entry": QSA_BLOCK,
}
QSA_ATTENTION: Values = {"block_size": QSA_BLOCK, "include": "tail"}

type Call = Callable[[], Any]
type To = Callable[[Tensor], Tensor]  # another precision of a tensor


def device() -> str:
    return FLAGS.device or ("cuda" if torch.cuda.is_available() else "cpu")


def drawn(seed: int = 0) -> Callable[..., Tensor]:
    """Return a function that draws a normally distributed tensor of a given shape. Each call of
    this function returns a new tensor.
    """
    draw = torch.Generator(device()).manual_seed(seed)
    about = {"generator": draw, "device": device(), "dtype": getattr(torch, FLAGS.dtype)}
    return lambda *shape: torch.randn(*shape, **about)


def same(x: Tensor, dim: int = 1) -> Tensor:
    return x


def wide(x: Tensor) -> Tensor:
    """Convert a tensor to the precision of the oracle."""
    return x.double() if x.dtype == torch.float32 else x.float()


def turned(x: Tensor) -> Tensor:
    """Swap the axes of heads and tokens: return `[B, S, H, D]` for an input `[B, H, S, D]`."""
    return x.transpose(1, 2)


def lists_of(indices: Tensor) -> Tensor:
    """Convert indices `[B, Hkv, Sq, n]` to int32 `[B, Sq, Hkv, n]`."""
    return turned(indices).to(torch.int32).contiguous()


def blocks_of(
    batch: int,
    kv_heads: int,
    length: int,
    block: int,
    chosen: int,
    device: str,
    overlap: float = 0.0,
) -> Tensor:
    """Return the blocks of each query, int64 `[batch, kv_heads, length, chosen]`: the query's own
    block, and random earlier blocks. With `overlap`, each random block is drawn again only with
    probability `1 - overlap`. A block that is not drawn again is the block of the previous query.
    """
    draw = torch.Generator(device).manual_seed(0)
    if overlap:
        shape = batch, kv_heads, length, chosen - 1
        token = torch.arange(length, device=device)[:, None]
        redrawn = torch.rand(shape, generator=draw, device=device) >= overlap
        last = torch.where(redrawn, token, 0).cummax(dim=2).values
        place = torch.rand(shape, generator=draw, device=device).gather(2, last)
        # One block is drawn from each of `chosen - 1` equal parts of the earlier blocks, so that
        # few coincide.
        part = torch.arange(chosen - 1, device=device)
        found = ((part + place) / (chosen - 1) * (last // block)).long()
        own = (token // block).expand(batch, kv_heads, length, 1)
        found = found.masked_fill(found >= own, -1).sort(dim=-1).values
        twice = torch.nn.functional.pad(found[..., 1:] == found[..., :-1], (1, 0))
        return torch.cat([found.masked_fill(twice, -1), own], dim=-1)
    rows = []
    for own in range(-(-length // block)):
        shape = batch, kv_heads, min(block, length - own * block), own
        weight = torch.rand(shape, generator=draw, device=device)
        earlier = weight.topk(min(chosen - 1, own), dim=-1).indices
        found = torch.nn.functional.pad(earlier, (1, 0), value=own)
        rows.append(torch.nn.functional.pad(found, (0, chosen - found.shape[-1]), value=-1))
    return torch.cat(rows, dim=2)


def ours(name: str) -> Values:
    """Return the arguments of our functions for the implementation `name`."""
    return {"implementation": "torch" if name == "plain" else None}


def made_indexer() -> Any:
    """Return the indexer of a layer of MiniMax-M3, with random weights."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    config: Any = MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=FLAGS.heads,
        num_key_value_heads=FLAGS.kv_heads,
        index_n_heads=FLAGS.kv_heads,
        index_head_dim=FLAGS.dk,
        index_block_size=FLAGS.block,
        index_topk_blocks=FLAGS.n_sel,
    )
    return MiniMaxM3VLIndexer(config, 0)


def attention(name: str, query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Any:
    """Return a function of query, key and value that computes the output `[B, Sq, H, Dv]`. Only
    the returned function is timed.

    Args:
      name: The implementation.
      query: `[B, H, Sq, D]`, the last tokens.
      key: `[B, Hkv, Sk, D]`.
      value: `[B, Hkv, Sk, Dv]`.
      indices: int64 `[B, Hkv, Sq, n]`, -1 in empty slots.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as model

    from nsa_torch.huggingface.block_selection import block_attention

    if name == "nsa_torch":
        lists, attend = lists_of(indices), nsa_torch.block_attention
        how = {"block_size": FLAGS.block}
        return lambda q, k, v: attend(turned(q), turned(k), turned(v), lists, **how)
    if name == "flex":
        mask = flex_blocks.mask_of(indices, key.shape[2], FLAGS.block, FLAGS.heads)
        return lambda q, k, v: flex_blocks.attend(q, k, v, mask)
    if name == "vllm":
        pages = block_peers.pages_of(key, value, indices)
        return lambda query, *_: block_peers.on_vllm(query, pages)
    if name in flashinfer_peer.LISTED:
        attend = flashinfer_peer.LISTED[name](key, value, indices, query.shape[1])
        return lambda query, *_: attend(query)
    if name == "flash_msa":
        index = [torch.randn_like(key), torch.randn_like(key[:, :1])]
        return lambda q, k, v: block_peers.on_flash_msa(q, k, v, index, FLAGS.n_sel)
    # A layer of MiniMax-M3 with only the attributes that the attention functions read.
    indexer, groups = made_indexer(), FLAGS.heads // FLAGS.kv_heads
    layer: Any = SimpleNamespace(
        indexer=indexer, num_key_value_groups=groups, training=False, is_causal=True
    )
    if name == "nsa_blocks":
        how = {"block_indices": indices}
        return lambda q, k, v: block_attention(layer, q, k, v, None, **how)[0]
    function = sdpa_attention_forward if name == "sdpa" else model.eager_attention_forward
    keys = key.shape[2]
    places = torch.arange(keys - query.shape[2], keys, device=query.device)
    about = None, keys, query.dtype, query.device, places.expand(query.shape[0], -1)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = indexer.build_block_mask(indices, *about)
        return function(layer, q, k, v, mask, scaling=q.shape[-1] ** -0.5)[0]

    return masked


class Mode:
    """The measurements of one mode for one length. All sizes except the length come from flags.

    Attributes:
      names: Names of the implementations.
      beside: The implementation that is the baseline of the parity rule.
      results: Names of the results of the method `checked`.
      elsewhere: Names of implementations that select or read other blocks, and are not compared.
      lists_apart: The largest allowed share of our lists, or of their blocks, that differ from the
        expected lists or blocks.
    """

    names: tuple[str, ...] = "nsa_torch", "plain"
    beside, results = "plain", ("out",)
    elsewhere = ("flash_msa",)
    lists_apart = 0.0

    def run(self, name: str, to: To = same, queries: Callable[..., Tensor] = same) -> Call:
        """Return a call of the implementation `name`, which returns a list of results. `to`
        converts the inputs to a precision. `queries` returns the queries of an array.
        """
        raise NotImplementedError

    def call(self, name: str) -> Call:
        """Return the call of the implementation `name` that is timed."""
        return self.run(name)

    def checked(self, name: str, to: To = same) -> list[Tensor]:
        """Return the results of the implementation `name` for the last queries. `to` converts the
        inputs to a precision."""
        return self.run(name, to, last)()

    def exact(self) -> list[Tensor]:
        return self.checked("plain", wide)

    def apart(self) -> float | None:
        """Return the share of our lists, or of the blocks in our lists, that differ from the
        expected lists or blocks. Return None if the mode has no lists.
        """
        return None

    def errors(self) -> dict[str, tuple[dict[str, float], str]]:
        """Return the errors of each requested implementation, and the reasons why our results are
        wrong."""
        found = {name: ({}, "") for name in FLAGS.implementation if name in self.names}
        apart = self.apart()
        exact, beside = self.exact(), self.checked(self.beside)
        for name in found:
            if name in self.elsewhere or why_not(name):
                continue
            refusals = Exception if name in PEERS else ValueError
            try:
                results = self.checked(name)
            except refusals:  # the row of this implementation has the reason
                continue
            errors, parts = {}, []
            for of, x, y, z in zip(self.results, results, exact, beside, strict=False):
                error = (x.to(y.dtype) - y).square().mean() / y.square().mean()
                arrays = (wide(each.detach()).cpu().numpy() for each in (x, y, z))
                errors[of] = error.sqrt().item()
                parts.append(parity.check_parity(of, *arrays, dtype=FLAGS.dtype).reason)
            if apart is not None:
                errors["lists"] = apart
                if not apart <= self.lists_apart:
                    parts.append(
                        f"lists: a share of {apart:.3g} differs from the expected lists"
                    )
            found[name] = errors, "; ".join(filter(None, parts)) if name in OURS else ""
        return found


def last(x: Tensor, dim: int = 1) -> Tensor:
    """Return the part of `x` that belongs to the last queries, which are judged."""
    return x.narrow(dim, max(x.shape[dim] - FLAGS.checked, 0), min(x.shape[dim], FLAGS.checked))


class Attention(Mode):
    names, beside, gradients = WHOLE, "sdpa", False

    def __init__(self, length: int):
        make = drawn()
        heads = FLAGS.heads, FLAGS.kv_heads, FLAGS.kv_heads
        self.tensors = [make(FLAGS.B, n, length, FLAGS.dk) for n in heads]
        sizes = FLAGS.B, FLAGS.kv_heads, length, FLAGS.block, FLAGS.n_sel
        self.blocks = blocks_of(*sizes, device(), FLAGS.overlap)

    def run(self, name, to=same, queries=same):
        query, *rest = map(to, self.tensors)
        inputs = queries(query, 2), *rest
        leaves = [x.detach().requires_grad_(self.gradients) for x in inputs]
        function = attention(name, *leaves, indices=queries(self.blocks, 2))

        def call():
            out = function(*leaves)
            grads = torch.autograd.grad(out, leaves, out.detach()) if self.gradients else ()
            return [out, *grads]

        return call

    def call(self, name):
        if name == "nsa_torch":  # `nsa_torch` runs in its own layout
            self.tensors = [turned(turned(x).contiguous()) for x in self.tensors]
        return self.run(name)

    def exact(self):
        # eager's softmax is always in float32.
        return self.checked("sdpa" if FLAGS.dtype == "float32" else "eager", wide)


class Gradients(Attention):
    """Computes the output, and the gradients with the output as cotangent."""

    names, gradients = tuple(x for x in WHOLE if x not in FORWARD_ONLY), True
    results = "out", "query", "key", "value"


class Indexer(Mode):
    """The indexer of MiniMax-M3 with random weights, on hidden states."""

    names, results, lists_apart = (*OURS, "eager"), (), LISTS_APART

    def __init__(self, length: int):
        from nsa_torch.huggingface import block_selection

        block_selection.take_over()
        torch.manual_seed(0)
        how: Values = {"device": device(), "dtype": getattr(torch, FLAGS.dtype)}
        self.module = made_indexer().to(**how).requires_grad_(False)
        self.hidden = torch.randn(FLAGS.B, length, HIDDEN, **how)
        ones = torch.ones(1, length, FLAGS.dk, **how)
        self.embedding = ones, torch.zeros_like(ones)
        self.position = torch.arange(length, device=device()).expand(FLAGS.B, -1)

    def run(self, name, to=same, queries=same):
        made = self.module
        if name in ("eager", "nsa_blocks"):
            made.config._attn_implementation = name
            given = self.hidden, self.embedding, None, self.position
            return functools.partial(made, *given)
        project = lambda norm, by: to(norm(by(self.hidden).unflatten(-1, (-1, FLAGS.dk))))
        key = project(made.k_norm, made.k_proj).squeeze(2)
        query = queries(project(made.q_norm, made.q_proj))
        how: Values = {"pool": FLAGS.block, "num_selected": FLAGS.n_sel}
        return functools.partial(nsa_torch.index_blocks, query, key, **how, **ours(name))

    def checked(self, name, to=same):
        return []

    def apart(self):
        found = last(turned(self.run("nsa_blocks")()))
        want = self.run("plain", torch.Tensor.float, last)()
        return (found != want).any(dim=-1).double().mean().item()


class Loss(Mode):
    """`indexer_kl` over the blocks of `Attention`, and the gradients of its mean."""

    names, results = ("nsa_torch",), ("loss", "index_query", "index_key")

    def __init__(self, length: int):
        problem, make = Attention(length), drawn(1)
        self.lists = lists_of(problem.blocks)
        query, key, value = (turned(x).contiguous() for x in problem.tensors)
        how: Values = {"block_size": FLAGS.block, "return_residual": True}
        _, self.lse = nsa_torch.block_attention(query, key, value, self.lists, **how)
        index = make(FLAGS.B, length, FLAGS.kv_heads, FLAGS.dk), make(FLAGS.B, length, FLAGS.dk)
        self.arrays = query, key, *index

    def run(self, name, to=same, queries=same):
        query, key, index_query, index_key = map(to, self.arrays)
        leaves = [x.detach().requires_grad_() for x in (queries(index_query), index_key)]
        arrays = queries(query), key, queries(self.lse), *leaves, queries(self.lists)
        how: Values = {"block_size": FLAGS.block, **ours(name)}

        def call():
            loss = nsa_torch.indexer_kl(*arrays, **how)
            return [loss, *torch.autograd.grad(loss.mean(), leaves)]

        return call


class Listed(Mode):
    """A mode that computes lists of blocks, and attention to the listed blocks."""

    lists: Tensor | None = None

    def attend(self, name: str, to: To, queries: Any, lists: Any = None) -> list[Tensor]:
        """Return the lists and the output. If no lists are given, the lists are selected."""
        raise NotImplementedError

    def run(self, name, to=same, queries=same):
        return functools.partial(self.attend, name, to, queries)

    @property
    def lists_apart(self) -> float:
        return ROUNDINGS * torch.finfo(getattr(torch, FLAGS.dtype)).eps

    def apart(self):
        found, expected = (self.attend(x, same, last)[0] for x in Mode.names)
        self.lists = found
        there = (found[..., :, None] == expected[..., None, :]).any(dim=-1)
        return (~there & (found >= 0)).sum().item() / max((expected >= 0).sum().item(), 1)

    def checked(self, name, to=same):
        """Return the results of the implementation `name` on our lists."""
        return self.attend(name, to, last, self.lists)[1:]


class Decode(Listed):
    """A decode step with one token per row: blocks are selected with index keys in pages, and
    attention to these blocks is computed.
    """

    def __init__(self, length: int):
        page, width, kv_heads = FLAGS.block, FLAGS.dk, FLAGS.kv_heads
        self.select: Values = {"pool": page, "num_selected": FLAGS.n_sel}
        self.reading: Values = {"block_size": page}
        heads = FLAGS.heads, kv_heads, width
        table = self.draw(length, page, heads, (kv_heads, page, width))
        draw = torch.Generator(device()).manual_seed(0)
        order = torch.randperm(table.numel(), generator=draw, device=device())
        table.copy_(order.view_as(table))

    def draw(self, length: int, page: int, heads: Any, index: Any) -> Tensor:
        """Draw all tensors, and the page table."""
        make, rows, (query_heads, kv_heads, width) = drawn(), FLAGS.B, heads
        columns, (index_heads, entries, index_width) = -(-length // page), index
        pages = rows * columns
        kv = [make(pages, page, kv_heads, width) for _ in range(2)]
        self.attention = make(rows, query_heads, width), *kv
        self.indexer = (
            make(rows, index_heads, index_width),
            make(pages, entries, index_width),
        )
        table = torch.arange(pages, dtype=torch.int32, device=device()).view(rows, columns)
        self.at = table, torch.full((rows,), length, dtype=torch.int32, device=device())
        return table

    def attend(self, name, to, queries, lists=None):
        if lists is None:
            arrays = *map(to, self.indexer), *self.at
            lists = nsa_torch.paged_index_blocks(*arrays, **self.select, **ours(name))
        arrays = *map(to, self.attention), *self.at, lists
        return [lists, nsa_torch.paged_block_attention(*arrays, **self.reading, **ours(name))]

    def call(self, name):
        """Return the call of the implementation `name`, as a CUDA graph if graphs are
        supported."""
        step = self.run(name)
        return step if device() == "cpu" else timing.cuda_graph(step)[0]


class QsaDecode(Decode):
    """The decode step of QSA's layer."""

    def __init__(self, length: int):
        self.select, self.reading = QSA, QSA_ATTENTION
        heads = QSA_HEADS, QSA_KV_HEADS, QSA_WIDTH
        index = QSA_INDEX_HEADS, QSA_PAGE // QSA_BLOCK, QSA_INDEX_WIDTH
        self.draw(length, QSA_PAGE, heads, index)


class Qsa(Listed):
    """The selection of blocks and the attention of QSA's layer, for whole sequences."""

    names, elsewhere = ("nsa_torch", "sdpa"), ("sdpa",)

    def __init__(self, length: int):
        make, batch = drawn(), FLAGS.B
        widths = (QSA_HEADS, QSA_WIDTH), (QSA_KV_HEADS, QSA_WIDTH), (QSA_KV_HEADS, QSA_WIDTH)
        attention = [make(batch, length, *width) for width in widths]
        index_query = make(batch, length, QSA_INDEX_HEADS, QSA_INDEX_WIDTH)
        if FLAGS.overlap:  # about 1 / (1 - overlap) adjacent tokens share an index query
            equal = max(round(1 / (1 - FLAGS.overlap)), 1) if FLAGS.overlap < 1 else length
            index_query = index_query[:, torch.arange(length) // equal * equal]
        index_key = make(batch, length // QSA_BLOCK, QSA_INDEX_WIDTH)
        self.arrays = *attention, index_query, index_key

    def attend(self, name, to, queries, lists=None):
        query, key, value, index_query, index_key = map(to, self.arrays)
        kv_len, how = key.shape[1], ours(name)
        if lists is None:
            index = queries(index_query), index_key
            lists = nsa_torch.index_blocks(*index, kv_len=kv_len, **QSA, **how)
        how["implementation"] = "sdpa" if name == "plain" else None
        arrays = queries(query), key, value, lists
        out = nsa_torch.block_attention(*arrays, kv_len=kv_len, **QSA_ATTENTION, **how)
        return [lists, out]

    def call(self, name):
        if name == "nsa_torch":
            return self.run(name)
        dense = torch.nn.functional.scaled_dot_product_attention
        query, key, value = map(turned, self.arrays[:3])
        return functools.partial(dense, query, key, value, is_causal=True, enable_gqa=True)


MODES: Values = {
    "forward": Attention,
    "fwdbwd": Gradients,
    "indexer": Indexer,
    "loss": Loss,
    "decode": Decode,
    "qsa": Qsa,
    "qsa_decode": QsaDecode,
}
FLAGS = cli.define(
    lengths=(["8192", "32768"], "Tokens."),
    B=(1, "Sequences."),
    heads=(64, "Query heads."),
    kv_heads=(4, "Key/value heads."),
    dk=(128, "Number of columns per head."),
    block=(128, "Number of tokens per block."),
    n_sel=(16, "Number of blocks per query."),
    dtype=("bfloat16", "Precision.", ("bfloat16", "float16", "float32")),
    device=(str, "Device; default: a GPU if there is one.", ("cuda", "cpu")),
    mode=(tuple(MODES), "What to measure (repeatable).", MODES),
    implementation=(
        IMPLEMENTATIONS,
        "Implementations to measure (repeatable).",
        IMPLEMENTATIONS,
    ),
    overlap=(
        0.0,
        "Probability that a block of the previous query is selected again; default: blocks are "
        "independent.",
        (0.0, 1.0),
    ),
    checked=(256, "Number of queries that are compared with the oracle."),
    seconds=(1.0, "Approximate seconds of samples per row."),
)
cli.define_lines(FLAGS)


def why_not(name: str) -> str | None:
    """Return the reason why an implementation cannot run, or None."""
    if name in PEERS:
        return block_peers.why_not(name, device())
    if name == "flex" and device() == "cpu":
        return "FlexAttention has gradients only on a GPU"
    return None


def measured(mode: Mode, name: str) -> Values:
    """Measure an implementation."""
    if reason := why_not(name):
        return {"status": "unsupported", "reason": reason}
    try:
        return {"status": "ok"} | timed(mode.call(name))
    except Exception as error:
        if runners.out_of_memory(error):
            return {"status": "oom", "reason": str(error).partition(". GPU")[0]}
        if name not in PEERS:
            raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {"status": "unsupported", "reason": reason}


def timed(call: Call) -> Values:
    """Return the times of a call, and on a GPU the memory that the call needs."""
    peak = extra = None
    if device() == "cpu":
        found = timing.time_host(call, same, seconds=FLAGS.seconds)
    else:
        call()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        most = torch.cuda.max_memory_allocated()
        peak, extra = most / 2**30, (most - before) / 2**30
        found = timing.time_cuda_events(call, seconds=FLAGS.seconds)
    return found.spread | {"peak_gib": peak, "extra_gib": extra}


def rows() -> Iterator[Values]:
    about = {name: FLAGS[name].value for name in ("B", "block", "dtype", "overlap")}
    about |= {"H": FLAGS.heads, "Hkv": FLAGS.kv_heads, "D": FLAGS.dk, "n": FLAGS.n_sel}
    about["device"] = "cpu" if device() == "cpu" else torch.cuda.get_device_name()
    lengths = command.integers("lengths", FLAGS.lengths, ())
    for length, mode in itertools.product(lengths, FLAGS.mode):
        heartbeat.say(f"{mode} {length}")
        for name, (errors, wrong) in MODES[mode](length).errors().items():
            heartbeat.say(f"{mode} {length} {name}")
            row = about | {"S": length, "mode": mode, "implementation": name, "errors": errors}
            row |= measured(MODES[mode](length), name)
            if wrong and row["status"] == "ok":
                row |= {"status": "wrong", "reason": wrong}
            yield row
            if device() != "cpu":
                torch.cuda.empty_cache()


def main(argv: Sequence[str]) -> int:
    extras.require("hf", "transformers", minimum="5.17")
    if FLAGS.heads % FLAGS.kv_heads:
        raise app.UsageError(
            f"--heads must be a multiple of --kv_heads, got {FLAGS.heads}, {FLAGS.kv_heads}"
        )
    ours = list[str]()

    def shown(row):
        """Return the values of the printed line. The line of a failed row has no figures."""
        ok = row["status"] == "ok"
        ours.extend([row["status"]] * (row["implementation"] in OURS))
        figures = dict.fromkeys(("ms", "peak_gib", "extra_gib", "error"))
        return {"error": max(row["errors"].values(), default=float("nan"))} if ok else figures

    statuses = run.rows("block_selection", FLAGS, rows(), shown)
    return exit_status.of_statuses(ours, statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)

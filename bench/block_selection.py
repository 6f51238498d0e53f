"""The attention of a released model that chooses key blocks: ours beside transformers' own.

    python -m bench.block_selection                              # MiniMax-M3's sizes, 8k and 32k
    python -m bench.block_selection --lengths 1024 --heads 8 --kv_heads 2 --out rows.jsonl

One layer, without its projections and its indexer. Every query gets its own block and others of
those that it may see: at random, or (`--overlap 0.95`) those of the query before it, of which each
is drawn anew with that probability less than 1. A row of JSON each in `--out`:

  nsa_torch     `block_attention` in its own layout, `index_blocks`, `indexer_kl`
  nsa_blocks    the same in transformers' layout: what `attn_implementation="nsa_blocks"` runs
  sdpa, eager   transformers' functions of these names, on a mask `[B, H, S, S]` that the model
                makes of the blocks at every layer: its time counts
  flex          torch's FlexAttention on the unions of the blocks of 128 queries, and a mask of
                each pair; what it reads of the blocks is made before, and does not count
  vllm          vLLM's Triton kernel for this model, forward, from pages that are made before
  flash_msa     flash-msa's kernels, which choose the blocks themselves, in the time that is
                given, by an indexer's queries and key; their results are not compared
  ms            median, p20, p80; forward, and with the gradients of query, key and value. Mode
                `indexer`: the blocks themselves, from 256 columns of a hidden state, by the model's
                indexer (`eager`) and on `index_blocks` (`nsa_blocks`); `nsa_torch` begins with the
                indexer's queries and keys. Mode `loss`: `indexer_kl` and its gradients. Mode
                `decode`: one token a row, its blocks and its attention, from pages as large as a
                block, in one CUDA graph; `plain`: without kernels. Modes `qsa` and `qsa_decode`:
                lists and attention of QSA's layer, whatever the other sizes are; `sdpa` is dense
                attention there, without lists
  peak_gib      the most that was allocated, arguments included
  extra_gib     the most that a call added to what was allocated before it, results included
  errors        distance from `eager` in float32, over the size of its results, as are sdpa's and
                eager's own: of the last `--checked` queries and all keys. Ours is `wrong` beyond
                twice sdpa's and one rounding. Of an indexer, the share of lists that are not those
                of float32 scores: 2 % at most. Of the loss, of decoding and of QSA, from the plain
                implementation: two roundings at most, of lists the share of their blocks

Needs the extra `hf`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from absl import app, flags
from torch import Tensor

from nsa_core import extras

from .harness import (
    block_peers,
    cli,
    command,
    exit_status,
    flex_blocks,
    heartbeat,
    records,
    runners,
    timing,
)

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
OURS = "nsa_torch", "nsa_blocks"
PEERS = tuple(block_peers.MODULES)
IMPLEMENTATIONS = *OURS, "plain", "sdpa", "eager", "flex", *PEERS
MODES = "forward", "fwdbwd", "indexer", "loss", "decode", "qsa", "qsa_decode"
LENGTHS = flags.DEFINE_list("lengths", ["8192", "32768"], "Tokens.", **at)
BATCH = flags.DEFINE_integer("B", 1, "Sequences.", lower_bound=1, **at)
HEADS = flags.DEFINE_integer("heads", 64, "Query heads.", lower_bound=1, **at)
KV_HEADS = flags.DEFINE_integer("kv_heads", 4, "Key/value heads.", lower_bound=1, **at)
WIDTH = flags.DEFINE_integer("dk", 128, "Columns of a head.", lower_bound=1, **at)
BLOCK = flags.DEFINE_integer("block", 128, "Tokens of a block.", lower_bound=1, **at)
CHOSEN = flags.DEFINE_integer("n_sel", 16, "Blocks of a query.", lower_bound=1, **at)
DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Precision.", **at
)
DEVICE = flags.DEFINE_enum(
    "device", None, ["cuda", "cpu"], "Where it runs; default: a GPU if any.", **at
)
MODE = flags.DEFINE_multi_enum("mode", list(MODES), MODES, "Repeatable.", **at)
NAMES = flags.DEFINE_multi_enum(
    "implementation", list(IMPLEMENTATIONS), IMPLEMENTATIONS, "Repeatable.", **at
)
OVERLAP = flags.DEFINE_float(
    "overlap", 0.0, "Of a query's blocks with the ones before it.", 0.0, 1.0, **at
)
CHECKED = flags.DEFINE_integer("checked", 256, "Queries that are judged.", lower_bound=1, **at)
SECONDS = flags.DEFINE_float("seconds", 1.0, "Of samples a row, about.", lower_bound=0, **at)
OUT = cli.define_lines(FLAGS)
COMMIT = cli.define_commit(FLAGS)
RESULTS = ("out", "query", "key", "value")
LOSS_RESULTS = ("loss", "index_query", "index_key")
TIMES_SDPA, LOSS_ROUNDINGS = 2.0, 2
WHOLE = tuple(x for x in IMPLEMENTATIONS if x != "plain")
HAS = {  # implementations of a mode
    "forward": WHOLE,
    "fwdbwd": tuple(x for x in WHOLE if x != "vllm"),
    "indexer": (*OURS, "eager"),
    "loss": ("nsa_torch",),
    "decode": ("nsa_torch", "plain"),
    "qsa": ("nsa_torch", "sdpa"),
    "qsa_decode": ("nsa_torch", "plain"),
}
HIDDEN, LISTS_APART = 256, 0.02


def layer_of(heads: int, kv_heads: int, block: int, chosen: int) -> Any:
    """What attention functions read of a layer of MiniMax-M3, its indexer's mask included."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    indexer: Any = MiniMaxM3VLIndexer.__new__(MiniMaxM3VLIndexer)
    torch.nn.Module.__init__(indexer)
    indexer.block_size, indexer.topk_blocks = block, chosen
    indexer.config = SimpleNamespace(num_attention_heads=heads)
    return SimpleNamespace(
        indexer=indexer, num_key_value_groups=heads // kv_heads, training=False, is_causal=True
    )


def attend(
    name: str,
    of: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    read: Any = None,
) -> Tensor:
    """The output `[B, Sq, H, Dv]` of an implementation; arguments as the model hands them to it.

    Args:
      of: `layer_of`.
      query, key, value: `[B, H, Sq, D]`, `[B, Hkv, Sk, D]`, `[B, Hkv, Sk, Dv]`; the queries are
        the last tokens.
      indices: int64 `[B, Hkv, Sq, n]`, -1 in empty slots.
      read: what `Problem.read` makes of the indices.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import eager_attention_forward

    import nsa_torch
    from nsa_torch.huggingface.block_selection import block_attention

    if name == "nsa_blocks":
        return block_attention(of, query, key, value, None, block_indices=indices)[0]
    if name == "nsa_torch":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        block = of.indexer.block_size
        out = nsa_torch.block_attention(query, key, value, read, block_size=block)
        assert isinstance(out, Tensor)
        return out
    if name == "flex":
        return flex_blocks.attend(query, key, value, read)
    if name == "vllm":
        return block_peers.on_vllm(query, read)
    if name == "flash_msa":
        return block_peers.on_flash_msa(query, key, value, read, of.indexer.topk_blocks)
    queries, keys = query.shape[2], key.shape[2]
    positions = torch.arange(keys - queries, keys, device=query.device)
    positions = positions.expand(query.shape[0], -1)
    about = None, keys, query.dtype, query.device, positions
    mask = of.indexer.build_block_mask(indices, *about)
    function = sdpa_attention_forward if name == "sdpa" else eager_attention_forward
    return function(of, query, key, value, mask, scaling=query.shape[-1] ** -0.5)[0]


def lists_of(indices: Tensor) -> Tensor:
    """int32 `[B, Sq, Hkv, n]` of indices `[B, Hkv, Sq, n]`."""
    return indices.transpose(1, 2).to(torch.int32).contiguous()


def random_blocks(
    batch: int, kv_heads: int, length: int, block: int, chosen: int, device: str
) -> Tensor:
    """int64 `[batch, kv_heads, length, chosen]`: a query's own block and others before it."""
    draw = torch.Generator(device).manual_seed(0)
    count = -(-length // block)
    blocks = torch.arange(count, device=device)
    rows = []
    for own in range(count):  # queries of one block may see as many
        tokens = min(block, length - own * block)
        shape = batch, kv_heads, tokens, count
        weight = torch.rand(shape, generator=draw, device=device)
        weight = weight.masked_fill(blocks > own, -1.0).masked_fill(blocks == own, 2.0)
        best = weight.topk(min(chosen, count), dim=-1)
        found = best.indices.masked_fill(best.values < 0, -1)
        rows.append(torch.nn.functional.pad(found, (0, chosen - found.shape[-1]), value=-1))
    return torch.cat(rows, dim=2)


def similar_blocks(
    batch: int, kv_heads: int, length: int, block: int, chosen: int, device: str, overlap: float
) -> Tensor:
    """As `random_blocks`, but each of the others is drawn anew with probability `1 - overlap`."""
    draw = torch.Generator(device).manual_seed(0)
    shape = batch, kv_heads, length, chosen - 1
    token = torch.arange(length, device=device)[:, None]
    redrawn = torch.rand(shape, generator=draw, device=device) >= overlap
    last = torch.where(redrawn, token, 0).cummax(dim=2).values
    place = torch.rand(shape, generator=draw, device=device).gather(2, last)
    part = torch.arange(chosen - 1, device=device)  # of the blocks before: most differ
    found = ((part + place) / (chosen - 1) * (last // block)).long()
    own = (token // block).expand(batch, kv_heads, length, 1)
    found = found.masked_fill(found >= own, -1).sort(dim=-1).values
    twice = torch.nn.functional.pad(found[..., 1:] == found[..., :-1], (1, 0))
    return torch.cat([found.masked_fill(twice, -1), own], dim=-1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Of a length and a mode of `MODES`; the other sizes are flags."""

    length: int
    mode: str

    def tensors(self) -> list[Tensor]:
        make, gradient = _drawn(0), self.mode == "fwdbwd"
        heads = HEADS.value, KV_HEADS.value, KV_HEADS.value
        shapes = [(BATCH.value, n, self.length, WIDTH.value) for n in heads]
        return [make(*shape).requires_grad_(gradient) for shape in shapes]

    def blocks(self) -> Tensor:
        sizes = BATCH.value, KV_HEADS.value, self.length, BLOCK.value, CHOSEN.value
        if OVERLAP.value:
            return similar_blocks(*sizes, device(), OVERLAP.value)
        return random_blocks(*sizes, device())

    def results(
        self, name: str, tensors: Sequence[Tensor], indices: Tensor, read: Any = None
    ) -> list[Tensor]:
        """The output, and with gradients those for it as its own."""
        of = layer_of(HEADS.value, KV_HEADS.value, BLOCK.value, CHOSEN.value)
        query, key, value = tensors
        out = attend(name, of, query, key, value, indices, read)
        if self.mode == "forward":
            return [out]
        return [out, *torch.autograd.grad(out, tensors, out.detach())]

    def row(self, name: str) -> dict[str, Any]:
        """What an implementation takes."""
        if reason := _why_not(name):
            return {"status": "unsupported", "reason": reason}
        if self.mode in DECODES:
            call: Callable[..., Any] = _step(DECODES[self.mode](self.length), name)
        elif self.mode == "qsa":
            call = Qsa(self.length).of(name)
        elif self.mode == "indexer":
            call = Indexer(self.length).of(name)
        elif self.mode == "loss":
            loss = Loss(self, self.length)
            call = lambda _=0: loss.results(None)
        else:
            tensors, indices = self.tensors(), self.blocks()
            if name == "nsa_torch":
                tensors = [
                    x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors
                ]
                tensors = [x.requires_grad_(self.mode == "fwdbwd") for x in tensors]
            try:
                read = self.read(name, indices, tensors)
            except ValueError as error:
                return {"status": "unsupported", "reason": str(error)}
            call = lambda _=0: self.results(name, tensors, indices, read)
        try:
            return {"status": "ok"} | _timed(call)
        except Exception as error:
            if runners.out_of_memory(error):
                return {"status": "oom", "reason": str(error).partition(". GPU")[0]}
            if name not in PEERS:
                raise
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return {"status": "unsupported", "reason": reason}

    def read(self, name: str, indices: Tensor, tensors: Sequence[Tensor]) -> Any:
        """What `attend` reads beside the indices."""
        if name == "nsa_torch":
            return lists_of(indices)
        if name == "flex":
            return flex_blocks.mask_of(indices, self.length, BLOCK.value, HEADS.value)
        if name == "vllm":
            return block_peers.pages_of(tensors[1], tensors[2], indices)
        if name == "flash_msa":
            return [torch.randn_like(tensors[1]), torch.randn_like(tensors[1][:, :1])]
        return None

    def errors(self) -> Mapping[str, Mapping[str, float]]:
        """Of each implementation's results for the last queries, from `eager` in float32."""
        if self.mode == "indexer":
            return dict.fromkeys(HAS["indexer"], Indexer(self.length).errors())
        if self.mode in DECODES or self.mode == "qsa":
            decode = Qsa(self.length) if self.mode == "qsa" else DECODES[self.mode](self.length)
            (lists, out), (others, _) = (decode.attend(x) for x in (None, "torch"))
            _, exact = decode.attend("torch", lists)
            error = {"out": _distance(out, exact.float()), "lists": _apart(lists, others)}
            other = HAS[self.mode][1]
            return {"nsa_torch": error, other: dict.fromkeys(error, 0.0)}
        if self.mode == "loss":
            loss = Loss(self, min(CHECKED.value, self.length))
            pairs = zip(LOSS_RESULTS, loss.results(None), loss.results("torch"), strict=True)
            return {"nsa_torch": {n: _distance(x, y.float()) for n, x, y in pairs}}
        (query, *rest), indices = self.tensors(), self.blocks()[:, :, -CHECKED.value :]
        query = query.detach()[:, :, -CHECKED.value :].requires_grad_(query.requires_grad)
        tensors = [query, *rest]
        wide = [x.detach().float().requires_grad_(x.requires_grad) for x in tensors]
        expected = self.results("eager", wide, indices)
        found = {name: {} for name in NAMES.value}
        names = set(HAS[self.mode]) & {*NAMES.value, "sdpa"} - {"flash_msa"}
        for name in names:
            if _why_not(name):
                continue
            try:
                read = self.read(name, indices, tensors)
            except ValueError:  # its row says so
                continue
            results = self.results(name, tensors, indices, read)
            pairs = zip(RESULTS, results, expected, strict=False)
            found[name] = {n: _distance(x, y) for n, x, y in pairs}
        return found


def _why_not(name: str) -> str | None:
    """A sentence that says why an implementation cannot run, or None."""
    if name in PEERS:
        return block_peers.why_not(name, device())
    if name == "flex" and device() == "cpu":
        return "torch has gradients of FlexAttention on a GPU alone"
    return None


class Indexer:
    """MiniMax-M3's, with random weights, on `length` hidden states."""

    def __init__(self, length: int):
        from transformers import MiniMaxM3VLTextConfig
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

        from nsa_torch.huggingface import block_selection

        block_selection.take_over()
        config: Any = MiniMaxM3VLTextConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS.value,
            num_key_value_heads=KV_HEADS.value,
            index_n_heads=KV_HEADS.value,
            index_head_dim=WIDTH.value,
            index_block_size=BLOCK.value,
            index_topk_blocks=CHOSEN.value,
        )
        torch.manual_seed(0)
        dtype = getattr(torch, DTYPE.value)
        self.module = MiniMaxM3VLIndexer(config, 0).to(device(), dtype)
        self.hidden = torch.randn(BATCH.value, length, HIDDEN, device=device(), dtype=dtype)
        ones = torch.ones(1, length, WIDTH.value, device=device(), dtype=dtype)
        self.embedding = ones, torch.zeros_like(ones)
        self.position = torch.arange(length, device=device()).expand(BATCH.value, -1)

    @torch.no_grad()
    def blocks(self, name: str) -> Tensor:
        self.module.config._attn_implementation = name
        return self.module(self.hidden, self.embedding, None, self.position)

    @torch.no_grad()
    def projected(self) -> tuple[Tensor, Tensor]:
        """Queries `[B, S, Hi, D]` and keys `[B, S, D]`."""
        made = self.module
        project = lambda norm, to: norm(to(self.hidden).unflatten(-1, (-1, WIDTH.value)))
        key = project(made.k_norm, made.k_proj).squeeze(2)
        return project(made.q_norm, made.q_proj), key

    def of(self, name: str) -> Callable[..., Tensor]:
        """What is timed."""
        if name != "nsa_torch":
            return lambda _=0: self.blocks(name)
        query, key = self.projected()
        return lambda _=0: self.indexed(query, key, None)

    def indexed(self, query: Tensor, key: Tensor, implementation: Any) -> Tensor:
        import nsa_torch

        sizes = {"pool": BLOCK.value, "num_selected": CHOSEN.value}
        return nsa_torch.index_blocks(query, key, **sizes, implementation=implementation)

    @torch.no_grad()
    def errors(self) -> dict[str, float]:
        """The share of lists of ours that float32 scores do not give."""
        checked = slice(-CHECKED.value, None)
        found = self.blocks("nsa_blocks").transpose(1, 2)[:, checked]
        query, key = (x.float() for x in self.projected())
        want = self.indexed(query[:, checked], key, "torch")
        return {"lists": (found != want).any(dim=-1).double().mean().item()}


class Loss:
    """`indexer_kl` of the last `queries`, over the blocks of a problem."""

    def __init__(self, problem: Problem, queries: int):
        import nsa_torch

        with torch.no_grad():
            last = slice(-queries, None)
            query, key, value = (
                x.detach().transpose(1, 2).contiguous() for x in problem.tensors()
            )
            query, lists = query[:, last].contiguous(), lists_of(problem.blocks()[:, :, last])
            _, lse = nsa_torch.block_attention(
                query, key, value, lists, block_size=BLOCK.value, return_residual=True
            )
        make, batch, width = _drawn(1), BATCH.value, WIDTH.value
        self.index_query = make(batch, queries, KV_HEADS.value, width)
        self.index_key = make(batch, problem.length, width)
        for x in (self.index_query, self.index_key):
            x.requires_grad_()
        self.attention, self.lists = (query, key, lse), lists

    def results(self, implementation: Any) -> list[Tensor]:
        """The loss, and gradients of its mean."""
        import nsa_torch

        indexer = self.index_query, self.index_key
        loss = nsa_torch.indexer_kl(
            *self.attention,
            *indexer,
            self.lists,
            block_size=BLOCK.value,
            implementation=implementation,
        )
        return [loss, *torch.autograd.grad(loss.mean(), indexer)]


class Decode:
    """A token of each row: its blocks from pages of index keys, its attention to them."""

    def __init__(self, length: int):
        draw = torch.Generator(device()).manual_seed(0)
        about = {"generator": draw, "device": device(), "dtype": getattr(torch, DTYPE.value)}
        rows, page, columns = BATCH.value, BLOCK.value, -(-length // BLOCK.value)
        count, kv_heads, width = rows * columns, KV_HEADS.value, WIDTH.value
        kv = [torch.randn(count, page, kv_heads, width, **about) for _ in range(2)]
        table = torch.randperm(count, generator=draw, device=device()).int()
        self.at = (
            table.view(rows, columns),
            torch.full((rows,), length, dtype=torch.int32, device=device()),
        )
        self.attention = torch.randn(rows, HEADS.value, width, **about), *kv
        self.indexer = (
            torch.randn(rows, kv_heads, width, **about),
            torch.randn(count, page, width, **about),
        )
        self.select: dict[str, Any] = {"pool": BLOCK.value, "num_selected": CHOSEN.value}
        self.reading: dict[str, Any] = {"block_size": BLOCK.value}

    @torch.no_grad()
    def attend(self, implementation: Any, lists: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lists, made where there are none, and the output."""
        import nsa_torch

        how = {"implementation": implementation}
        if lists is None:
            lists = nsa_torch.paged_index_blocks(*self.indexer, *self.at, **self.select, **how)
        arrays = *self.attention, *self.at, lists
        out = nsa_torch.paged_block_attention(*arrays, **self.reading, **how)
        assert isinstance(out, Tensor)
        return lists, out


QSA_HEADS, QSA_KV_HEADS, QSA_WIDTH = 24, 2, 256
QSA_INDEX_HEADS, QSA_INDEX_WIDTH, QSA_PAGE = 4, 128, 64
QSA: dict[str, Any] = {
    "pool": 1,
    "num_selected": 512,
    "num_local": 0,
    "activation": "relu",
    "reduce": "sum",
}
QSA_BLOCK = QSA["entry"] = 4
QSA_ATTENTION: dict[str, Any] = {"block_size": QSA_BLOCK, "include": "tail"}


def _drawn(seed: int) -> Callable[..., Tensor]:
    draw = torch.Generator(device()).manual_seed(seed)
    about = {"generator": draw, "device": device(), "dtype": getattr(torch, DTYPE.value)}
    return lambda *shape: torch.randn(*shape, **about)


class Qsa:
    """Lists and attention of whole rows, of QSA's layer."""

    def __init__(self, length: int):
        make, batch = _drawn(0), BATCH.value
        widths = (QSA_HEADS, QSA_WIDTH), (QSA_KV_HEADS, QSA_WIDTH)
        query, key, value = (make(batch, length, *widths[i]) for i in (0, 1, 1))
        self.attention = query, key, value
        index_query = make(batch, length, QSA_INDEX_HEADS, QSA_INDEX_WIDTH)
        if OVERLAP.value:  # neighbours have one query for about as many tokens
            same = max(round(1 / (1 - OVERLAP.value)), 1) if OVERLAP.value < 1 else length
            index_query = index_query[:, torch.arange(length) // same * same]
        self.indexer = index_query, make(batch, length // QSA_BLOCK, QSA_INDEX_WIDTH)

    def of(self, name: str) -> Callable[..., Any]:
        if name == "nsa_torch":
            return lambda _=0: self.on_lists(self.attention, self.indexer, None)
        query, key, value = (x.transpose(1, 2) for x in self.attention)
        dense = torch.nn.functional.scaled_dot_product_attention
        return lambda _=0: dense(query, key, value, is_causal=True, enable_gqa=True)

    @torch.no_grad()
    def on_lists(
        self,
        attention: tuple[Tensor, Tensor, Tensor],
        indexer: tuple[Tensor, Tensor],
        implementation: Any,
        lists: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        import nsa_torch

        at: dict[str, Any] = {"kv_len": attention[1].shape[1]}
        if lists is None:
            how = {"implementation": implementation}
            lists = nsa_torch.index_blocks(*indexer, **QSA, **at, **how)
        at["implementation"] = "sdpa" if implementation else None
        out = nsa_torch.block_attention(*attention, lists, **QSA_ATTENTION, **at)
        assert isinstance(out, Tensor)
        return lists, out

    def attend(self, implementation: Any, lists: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of the last queries, the lists, made where there are none, and the output."""
        last = slice(-CHECKED.value, None)
        (query, key, value), (index_query, index_key) = self.attention, self.indexer
        attention, indexer = (query[:, last], key, value), (index_query[:, last], index_key)
        return self.on_lists(attention, indexer, implementation, lists)


class QsaDecode(Decode):
    """The same of QSA's layer."""

    def __init__(self, length: int):
        make, rows = _drawn(0), BATCH.value
        columns = -(-length // QSA_PAGE)
        count = rows * columns
        kv = [make(count, QSA_PAGE, QSA_KV_HEADS, QSA_WIDTH) for _ in range(2)]
        self.attention = make(rows, QSA_HEADS, QSA_WIDTH), *kv
        self.indexer = (
            make(rows, QSA_INDEX_HEADS, QSA_INDEX_WIDTH),
            make(count, QSA_PAGE // QSA_BLOCK, QSA_INDEX_WIDTH),
        )
        pages = torch.arange(count, dtype=torch.int32, device=device())
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device())
        self.at = pages.view(rows, columns), lengths
        self.select, self.reading = QSA, QSA_ATTENTION


DECODES = {"decode": Decode, "qsa_decode": QsaDecode}


def _step(decode: Decode, name: str) -> Callable[..., Any]:
    """What is timed: a graph, where there are any."""
    implementation = "torch" if name == "plain" else None
    if device() == "cpu":
        return lambda _=0: decode.attend(implementation)
    replay, _ = timing.cuda_graph(lambda: decode.attend(implementation))
    return lambda _=0: replay()


def _distance(x: Tensor, y: Tensor) -> float:
    return ((x.float() - y).square().mean() / y.square().mean()).sqrt().item()


def _apart(found: Tensor, expected: Tensor) -> float:
    """The share of the blocks in lists `[.., n]` that those expected have not."""
    there = (found[..., :, None] == expected[..., None, :]).any(dim=-1)
    return (~there & (found >= 0)).sum().item() / max((expected >= 0).sum().item(), 1)


def _timed(call: Callable[..., Any]) -> dict[str, Any]:
    """Times, and memory where it can be read."""
    if device() == "cpu":
        found = timing.time_host(call, lambda x: x, seconds=SECONDS.value)
        peak = extra = None
    else:
        call()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        most = torch.cuda.max_memory_allocated()
        peak, extra = most / 2**30, (most - before) / 2**30
        found = timing.time_cuda_events(call, seconds=SECONDS.value)
    return {
        "ms": found.time_ms,
        "p20_ms": found.p20_ms,
        "p80_ms": found.p80_ms,
        "peak_gib": peak,
        "extra_gib": extra,
    }


def _judged(mode: str, name: str, errors: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Status and reason where a result of ours is wrong."""
    found, eps = errors[name], torch.finfo(getattr(torch, DTYPE.value)).eps
    if mode == "indexer":
        most, than = dict.fromkeys(found, LISTS_APART), "float32's"
    elif mode not in ("forward", "fwdbwd"):
        most, than = dict.fromkeys(found, LOSS_ROUNDINGS * eps), "plain"
    else:
        most, than = {n: TIMES_SDPA * x + eps for n, x in errors["sdpa"].items()}, "sdpa"
    far = {n: x for n, x in found.items() if not x <= most[n]}
    return {"status": "wrong", "reason": f"farther than {than}: {far}"} if far else {}


def device() -> str:
    return DEVICE.value or ("cuda" if torch.cuda.is_available() else "cpu")


def line(row: Mapping[str, Any]) -> str:
    """Of the table."""
    text = f"{row['mode']:8} {row['S']:>7} tokens  {row['implementation']:10}"
    if row["status"] != "ok":
        return f"{text} {row['status']}: {row['reason']}"
    peak = "" if row["peak_gib"] is None else f"  {row['peak_gib']:.2f} GiB"
    peak += "" if row["extra_gib"] is None else f", {row['extra_gib']:.3f} of the call"
    error = max(row["errors"].values(), default=float("nan"))
    return f"{text} {row['ms']:9.3f} ms{peak}  error rms {error:.2g}"


def main(argv: Sequence[str]) -> int:
    extras.require("hf", "transformers", minimum="5.17")
    if HEADS.value % KV_HEADS.value:
        raise app.UsageError(
            f"--heads must be a multiple of --kv_heads, got {HEADS.value}, {KV_HEADS.value}"
        )
    there = "cpu" if device() == "cpu" else torch.cuda.get_device_name()
    sizes = {
        "B": BATCH.value,
        "H": HEADS.value,
        "Hkv": KV_HEADS.value,
        "D": WIDTH.value,
        "block": BLOCK.value,
        "n": CHOSEN.value,
        "dtype": DTYPE.value,
        "overlap": OVERLAP.value,
    }
    statuses = []
    for length in command.integers("lengths", LENGTHS.value, ()):
        for mode in MODE.value:
            problem = Problem(length, mode)
            errors = problem.errors()
            names = [x for x in NAMES.value if x in HAS[mode]]
            for name in names:
                heartbeat.say(f"{mode} {length} {name}")
                row = {"S": length, "mode": mode, "implementation": name, **sizes}
                row |= {"errors": errors[name]} | problem.row(name)
                if name in OURS and row["status"] == "ok":
                    row |= _judged(mode, name, errors)
                statuses.append((name, str(row["status"])))
                print(line(row), flush=True)
                if OUT.value:
                    made = records.record("block_selection", COMMIT.value, device=there, **row)
                    records.append(OUT.value, [made])
                if device() != "cpu":
                    torch.cuda.empty_cache()
    ours = [status for name, status in statuses if name in OURS]
    return exit_status.of_statuses(ours, [status for _, status in statuses])


if __name__ == "__main__":
    cli.run(main, FLAGS)

"""`indexer_kl` against autograd on whole arrays in float64, and an indexer that learns by it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from kernels_pallas.triton import index_descriptions
from nsa_core.config import NSAConfig
from nsa_jax.triton_ops import compiled_for
from tests import interpreted_triton, pretend
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.limits import set_limits
from tests.torch_sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Case:
    sparse: bool = True
    G: int = 2
    block: int = 8
    n: int = 3
    T: int = 30
    S: int = 45
    H: int = 8
    Hkv: int = 2
    Hi: int = 2
    B: int = 2
    kv_len: int | None = None
    segments: tuple[int, ...] | None = None
    other_lse: bool = False  # of all keys, though blocks are named


CASES = (
    Case(),
    Case(G=1, Hi=4),  # index heads share a key head
    Case(Hi=1, G=1, Hkv=4, S=30),  # key heads share an index head
    Case(sparse=False),
    Case(sparse=False, Hi=1, kv_len=40),
    Case(kv_len=40),
    Case(B=1, T=40, S=40, segments=(17, 1, 0, 15)),
    Case(B=1, T=40, S=40, segments=(17, 1, 0, 15), sparse=False),
    Case(other_lse=True),
)
by_case = pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
WIDTH, INDEX_WIDTH, SCALE, INDEX_SCALE = 16, 8, 0.4, 0.6


@functools.cache
def inputs(case):
    """query, key, index_query, index_key, the gradient of the loss, lists or None; float64."""
    make = torch.Generator().manual_seed(4)
    shapes = (case.B, case.T, case.H, WIDTH), (case.B, case.S, case.Hkv, WIDTH)
    shapes += (case.B, case.T, case.Hi, INDEX_WIDTH), (case.B, case.S, INDEX_WIDTH)
    shapes += ((case.B, case.T, case.Hi),)
    found = [torch.randn(x, generator=make, dtype=torch.float64) for x in shapes]
    if not case.sparse:
        return *found, None
    blocks = -(-case.S // case.block)
    lists = torch.rand(case.B, case.T, case.G, blocks + 1, generator=make).argsort(-1)
    lists = lists[..., : case.n].int()
    lists[:, ::5] = -1
    lists[:, 1::5, :, 0] = 2**31 - 1
    return *found, lists


def spoiled(case):
    """query, key, lse, index_query, index_key, the gradient and lists, with NaN for padding."""
    query, key, iq, ik, grad, lists = inputs(case)
    end = case.S if case.kv_len is None else case.kv_len
    if case.segments is not None:
        end = sum(case.segments)
    position = torch.arange(case.T) + (case.S - case.T if case.segments else end - case.T)

    def without(x, real):
        return torch.where(real.reshape(-1, *[1] * (x.ndim - 2)), x, torch.nan)

    query, lse, iq = (without(x, position < end) for x in (query, expected(case)[0], iq))
    key, ik = (without(x, torch.arange(case.S) < end) for x in (key, ik))
    return query, key, lse, iq, ik, grad, lists


def visible(case):
    """`[B, T, Hi, S]` of the named blocks, and of all keys; at or before the query."""
    end = case.S if case.kv_len is None else case.kv_len
    at = torch.arange(case.T) + end - case.T
    keys = torch.arange(case.S)
    causal, local = keys <= at[:, None], keys.expand(case.T, case.S)
    if case.segments is not None:
        number = torch.full((case.S,), -1)
        start = torch.zeros(case.S, dtype=torch.long)
        begin = 0
        for i, length in enumerate(case.segments):
            number[begin : begin + length], start[begin : begin + length] = i, begin
            begin += length
        same = (number == number[:, None]) & (number >= 0)[:, None]
        causal, local = causal & same, (keys - start).expand(case.T, case.S)
    every = causal.expand(case.B, case.Hi, case.T, case.S).transpose(1, 2)
    lists = inputs(case)[-1]
    if lists is None:
        return every, every
    named = (lists[..., None] == (local // case.block)[:, None, None]).any(-2)
    return every & named, every


@functools.cache
def expected(case):
    """lse, loss, and gradients of index_query and index_key."""
    query, key, iq, ik, grad, _ = inputs(case)
    iq, ik = (x.clone().requires_grad_() for x in (iq, ik))
    named, every = visible(case)
    group = case.H // case.Hi
    logits = torch.einsum(
        "bthd,bshd->bths", query, key.repeat_interleave(case.H // case.Hkv, 2)
    )
    of_heads = (every if case.other_lse else named).repeat_interleave(group, 2)
    lse = (logits * SCALE).masked_fill(~of_heads, -torch.inf).logsumexp(-1)
    t = torch.exp(logits * SCALE - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    t = t.unflatten(2, (case.Hi, group)).mean(3).masked_fill(~named, 0)
    scores = torch.einsum("bthd,bsd->bths", iq, ik) * INDEX_SCALE
    scores = scores.masked_fill(~named, -torch.inf)
    some = named.any(-1, keepdim=True)
    logp = scores.masked_fill(~some, 0).log_softmax(-1).masked_fill(~named, 0)
    loss = (torch.xlogy(t, t) - t * logp).sum(-1)
    return lse, loss.detach(), *torch.autograd.grad(loss, (iq, ik), grad)


def options_of(case):
    found = {"scale": SCALE, "index_scale": INDEX_SCALE}
    if case.sparse:
        found["block_size"] = case.block
    if case.kv_len is not None:
        found["kv_len"] = case.kv_len
    return found


@pytest.mark.parametrize("chunk", [3000, 10**8])
@by_case
def test_torch(case, chunk, monkeypatch):
    """In float64, and twice the same bits."""
    set_limits(monkeypatch, torch_chunk_bytes=chunk)
    query, key, lse, iq, ik, grad, lists = spoiled(case)
    _, *want = expected(case)
    options = options_of(case)
    if case.segments is not None:
        options["cu_seqlens"] = torch.tensor(np.cumsum([0, *case.segments]))
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (iq, ik)]
        loss = nsa_torch.indexer_kl(query, key, lse, *leaves, lists, **options)
        runs.append((loss.detach(), *torch.autograd.grad(loss, leaves, grad)))
    for got, again, exact in zip(*runs, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)
        assert torch.equal(got, again)


@by_case
def test_jax(case):
    query, key, lse, iq, ik, grad, lists = spoiled(case)
    _, *want = expected(case)
    options = options_of(case)
    if case.segments is not None:
        ids = np.repeat(np.arange(len(case.segments)), case.segments)
        ids = np.pad(ids, (0, case.S - ids.size), constant_values=-1)
        options["segment_ids"] = jnp.asarray(ids, jnp.int32)[None]
    array = lambda x: None if x is None else jnp.asarray(x.numpy().astype(np.float32))
    lists = None if lists is None else jnp.asarray(lists.numpy())

    def whole(iq, ik):
        given = array(query), array(key), array(lse), iq, ik, lists
        return nsa_jax.indexer_kl(*given, **options)

    loss, pull = jax.jit(lambda *x: jax.vjp(whole, *x))(array(iq), array(ik))
    for got, exact in zip((loss, *pull(array(grad))), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=2e-5)


def test_a_block_of_more_than_all_keys():
    """No memory is taken for what it might hold."""
    query, key, index_query, index_key, *_ = inputs(Case(B=1, Hi=1, sparse=False))
    lists = torch.zeros(1, 30, 1, 1).int()
    _, lse = nsa_torch.block_attention(
        query, key, key, lists, block_size=45, return_residual=True
    )
    given = query, key, lse, index_query, index_key, lists
    want = nsa_torch.indexer_kl(*given, block_size=45)
    torch.testing.assert_close(nsa_torch.indexer_kl(*given, block_size=2**40), want)
    arrays = [jnp.asarray(x.numpy()) for x in given]
    np.testing.assert_allclose(
        nsa_jax.indexer_kl(*arrays, block_size=2**40), want, atol=1e-5, rtol=1e-5
    )


def test_jax_in_chunks(monkeypatch):
    case = CASES[0]
    monkeypatch.setattr("nsa_jax.chunks.BUDGET_BYTES", 30_000)
    test_jax(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    query, key, iq, ik, grad, lists = inputs(CASES[0])
    lse, *want = expected(CASES[0])
    leaves = [x.to(dtype).requires_grad_() for x in (iq, ik)]
    given = query.to(dtype), key.to(dtype), lse.float()
    loss = nsa_torch.indexer_kl(*given, *leaves, lists, **options_of(CASES[0]))
    assert loss.dtype == torch.float32
    found = loss, *torch.autograd.grad(loss, leaves, grad.float())
    for got, exact in zip(found, want, strict=True):
        error = (got.double() - exact).norm() / exact.norm()
        assert error < 0.02, error


def test_the_main_weights_get_no_gradient():
    query, key, iq, ik, _, lists = inputs(CASES[0])
    lse, *_ = expected(CASES[0])
    main = [x.clone().requires_grad_() for x in (query, key, lse)]
    iq = iq.clone().requires_grad_()
    nsa_torch.indexer_kl(*main, iq, ik, lists, **options_of(CASES[0])).sum().backward()
    assert iq.grad is not None and all(x.grad is None for x in main)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        loss = nsa_torch.indexer_kl(*main, iq, ik, lists, **options_of(CASES[0]))
        torch.autograd.grad(loss.square().sum(), iq, create_graph=True)


@pytest.mark.parametrize("changed", range(4), ids=["query", "key", "lse", "lists"])
def test_what_was_written_to_since_has_no_gradient(changed):
    """As of any operator of torch: the backward pass would read other numbers."""
    query, key, iq, ik, _, lists = inputs(CASES[0])
    given = [x.clone() for x in (query, key, expected(CASES[0])[0], lists)]
    iq = iq.clone().requires_grad_()
    loss = nsa_torch.indexer_kl(*given[:3], iq, ik, given[3], **options_of(CASES[0])).sum()
    given[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("sparse", [True, False])
def test_no_array_of_all_pairs(sparse, monkeypatch):
    length = 700
    set_limits(monkeypatch, torch_chunk_bytes=400_000)
    query, key = torch.randn(1, length, 2, 8), torch.randn(1, length, 1, 8)
    iq, ik = (torch.randn(1, length, *x, 8, requires_grad=True) for x in ((1,), ()))
    own = (torch.arange(length) // 8).int()[None, :, None, None]
    lists = dict(block_indices=own, block_size=8) if sparse else {}
    with Sizes() as sizes:
        lse = torch.zeros(1, length, 2)
        nsa_torch.indexer_kl(query, key, lse, iq, ik, **lists).sum().backward()
    assert sizes.most < length * length


EMBED, HEADS, KV_HEADS, BLOCK, TOP, TOKENS = 24, 4, 2, 8, 6, 256


def attended(x, projections):
    """Queries, keys, and what the attention of all keys gives for each block `[B, T, Hkv, N]`."""
    query, key = (
        (x @ w).unflatten(-1, (n, -1))
        for w, n in zip(projections, (HEADS, KV_HEADS), strict=True)
    )
    logits = torch.einsum("bthd,bshd->bths", query, key.repeat_interleave(HEADS // KV_HEADS, 2))
    logits = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool()[:, None], -torch.inf)
    logits = logits * 16**-0.5
    mean = logits.softmax(-1).unflatten(2, (KV_HEADS, -1)).mean(3)
    blocks = mean.unflatten(-1, (-1, BLOCK)).amax(-1)
    own = torch.arange(TOKENS)[:, None, None] // BLOCK
    forced = torch.arange(blocks.shape[-1]) == own
    return query, key, logits.logsumexp(-1), blocks.masked_fill(forced, torch.inf)


def recall(index_query, index_key, blocks):
    """Of the teacher's best blocks beside the own one, where no more than a quarter is chosen."""
    chosen = nsa_torch.index_blocks(
        index_query, index_key, pool=BLOCK, num_selected=TOP, num_local=1
    )
    late = slice(4 * TOP * BLOCK - 1, None)
    best = blocks[:, late].topk(TOP, dim=-1).indices[..., 1:]
    return (best[..., None] == chosen[:, late, :, None]).any(-1).double().mean().item()


def test_an_indexer_learns_the_blocks_of_an_attention():
    """From random weights, on all keys, then on the blocks that it chooses; held-out tokens."""
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=make)
    of_group = draw(EMBED, KV_HEADS, 1, 16).expand(-1, -1, HEADS // KV_HEADS, -1)
    near = of_group + 0.1 * draw(EMBED, KV_HEADS, HEADS // KV_HEADS, 16)
    main = near.flatten(1) * EMBED**-0.5, draw(EMBED, KV_HEADS * 16) * 2 * EMBED**-0.5
    # One key head serves both: it has to be as wide as their keys together.
    weights = [(draw(EMBED, n * EMBED) * EMBED**-0.5).requires_grad_() for n in (KV_HEADS, 1)]
    held_out = draw(1, TOKENS, EMBED)
    *_, blocks = attended(held_out, main)

    def index(x):
        return (x @ weights[0]).unflatten(-1, (KV_HEADS, -1)), x @ weights[1]

    assert recall(*index(held_out), blocks) < 0.5
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for step in range(110):
        x = draw(1, TOKENS, EMBED)
        query, key, lse, _ = attended(x, main)
        index_query, index_key = index(x)
        lists, options = None, {}
        if step >= 80:
            lists = nsa_torch.index_blocks(
                index_query, index_key, pool=BLOCK, num_selected=TOP, num_local=1
            )
            options = {"block_size": BLOCK}
            _, lse = nsa_torch.block_attention(
                query, key, key, lists, **options, return_residual=True
            )
        given = query, key, lse, index_query, index_key, lists
        loss = nsa_torch.indexer_kl(*given, **options).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert recall(*index(held_out), blocks) >= 0.9


def test_nsa_that_selects_by_an_indexer():
    """In place of NSA's own scores: the loss trains the indexer alone, the output all else; the
    same in both frameworks.
    """
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=make)
    query, key, gates = draw(1, 90, 4, 16), draw(1, 90, 2, 16), draw(1, 90, 4, 3).sigmoid()
    indexer = draw(1, 90, 2, 16).requires_grad_(), draw(1, 90, 16).requires_grad_()
    config = NSAConfig(8, 4, 16, num_selected=3, num_initial=1, num_local=1, window=20)
    choice = {"pool": 16, "num_selected": 3, "num_initial": 1, "num_local": 1}
    query.requires_grad_()

    def layer(nsa, query, gates, index_query, index_key, key):
        lists = nsa.index_blocks(index_query, index_key, **choice)
        out = nsa.attention(query, key, key, gates, config=config, block_indices=lists)
        _, lse = nsa.selected_attention(query, key, key, lists, config=config)
        loss = nsa.indexer_kl(query, key, lse, index_query, index_key, lists, block_size=16)
        return out.mean() + loss.mean()

    given = query, gates, *indexer, key
    total = layer(nsa_torch, *given)
    dquery, *of_indexer = torch.autograd.grad(total, (query, *indexer))
    arrays = [jnp.asarray(x.detach().numpy()) for x in given]
    run = jax.value_and_grad(functools.partial(layer, nsa_jax), (0, 2, 3))
    found, grads = run(*arrays)
    torch.testing.assert_close(total.item(), float(found), rtol=1e-5, atol=0)
    for got, want in zip(grads, (dquery, *of_indexer), strict=True):
        assert want.any()
        np.testing.assert_allclose(got, want, atol=1e-5)
    out_alone = nsa_torch.attention(
        query,
        key,
        key,
        gates,
        config=config,
        block_indices=nsa_torch.index_blocks(*indexer, **choice),
    )
    torch.testing.assert_close(torch.autograd.grad(out_alone.mean(), query)[0], dquery)


IN_TRITON = (
    Case(block=16, n=3, T=5, S=45, B=1, kv_len=42),
    Case(block=16, G=1, Hi=4, Hkv=2, n=2, T=4, S=60, other_lse=True),
)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize("case", IN_TRITON, ids=range(len(IN_TRITON)))
def test_triton(case, monkeypatch):
    if INTERPRETED:  # it takes tensors on the CPU
        pretend.machine(monkeypatch, index_loss_why_not=None)
        set_limits(monkeypatch, index_segment=8, triton_segment=8)
    runs = [on_triton(case, torch.float32) for _ in range(2)]
    for got, again, exact in zip(*runs, expected(case)[1:], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-5)
        assert torch.equal(got, again)


def on_triton(case, dtype):
    """Loss and gradients on `DEVICE`, brought back."""
    query, key, lse, iq, ik, grad, lists = spoiled(case)
    query, key, iq, ik = (x.to(DEVICE, dtype) for x in (query, key, iq, ik))
    leaves = [x.requires_grad_() for x in (iq, ik)]
    given = query, key, lse.to(DEVICE).float(), *leaves, lists.to(DEVICE)
    options = options_of(case) | {"implementation": "triton"}
    with torch.no_grad():
        alone = nsa_torch.indexer_kl(*given, **options)
    loss = nsa_torch.indexer_kl(*given, **options)
    assert torch.equal(alone, loss)
    grads = torch.autograd.grad(loss, leaves, grad.to(DEVICE).float())
    return [x.detach().cpu() for x in (loss, *grads)]


@pytest.mark.skipif(INTERPRETED, reason="runs once more there")
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_in_its_interpreter():
    interpreted_triton.run_again(__file__)


@pytest.mark.skipif(INTERPRETED or not TRITON, reason="lowers kernels")
def test_jax_kernels_are_lowered(monkeypatch):
    """Loss and gradients, for a GPU that need not be there."""
    monkeypatch.setattr("nsa_jax.index_loss.chosen_implementation", lambda *_: "triton")
    monkeypatch.setattr(index_descriptions, "_kl_tiles", lambda *_: (16, 4, 1))  # compile fast
    case = Case(block=16, n=3, T=30, S=45)
    arrays = [jnp.asarray(x.numpy(), jnp.bfloat16) for x in inputs(case)[:4]]
    lse, lists = jnp.zeros((case.B, case.T, case.H)), jnp.asarray(inputs(case)[-1].numpy())

    def loss(iq, ik):
        return nsa_jax.indexer_kl(*arrays[:2], lse, iq, ik, lists, **options_of(case)).sum()

    with compiled_for((9, 0)):
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(*arrays[2:])
        text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 3 + 3


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("block", [16, 64, 128])
def test_gpu(block):
    case = Case(block=block, n=4, T=300, S=700, H=32, Hkv=2, Hi=2, kv_len=650)
    first, second = (on_triton(case, torch.bfloat16) for _ in range(2))
    for got, again, exact in zip(first, second, expected(case)[1:], strict=True):
        assert (got.double() - exact).norm() / exact.norm() < 0.02
        assert torch.equal(got, again)


BAD = (
    (dict(lse=torch.zeros(1, 20, 4).half()), "lse must have dtype"),
    (dict(lse=torch.zeros(1, 20, 3)), r"lse must have shape \(1, 20, 4\)"),
    (dict(index_query=torch.zeros(1, 20, 3, 8)), "got Hi=3"),
    (dict(index_key=torch.zeros(1, 20, 8)), r"index_key must have shape \(1, 40, 8\)"),
    (dict(index_key=torch.zeros(1, 40, 8).half()), "index_key must have the dtype"),
    (dict(block_size=16), "block_size must be None"),
    (dict(block_indices=torch.zeros(1, 20, 2, 1).int()), "block_size must be an int"),
    (dict(block_indices=torch.zeros(1, 20, 4, 1).int(), block_size=8), "got 4"),
    (dict(index_scale=-1.0), "index_scale must be a positive number"),
    (dict(query=torch.zeros(1, 41, 4, 8)), "query must not be longer than key"),
)
IMPLEMENTATIONS = (
    ("mosaic", {}, ValueError, "implementation must be one of"),
    ("triton", {}, NotImplementedError, "takes named blocks"),
    ("triton", dict(block_size=24), NotImplementedError, "takes blocks of 16, 32, 64"),
    ("triton", dict(block_size=16), NotImplementedError, "needs an NVIDIA GPU"),
)


@pytest.mark.parametrize(("name", "blocks", "error", "message"), IMPLEMENTATIONS)
def test_named_implementations(name, blocks, error, message):
    x, y = torch.zeros(1, 20, 2, 8), torch.zeros(1, 20, 8)
    lists = torch.zeros(1, 20, 1, 1).int() if blocks else None
    with pytest.raises(error, match=message):
        nsa_torch.indexer_kl(x, x, x[..., 0], x, y, lists, **blocks, implementation=name)


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_bad_input(changed, message):
    given = dict(query=torch.zeros(1, 20, 4, 8), key=torch.zeros(1, 40, 2, 8))
    given |= dict(lse=torch.zeros(1, 20, 4), index_query=torch.zeros(1, 20, 2, 8))
    given |= dict(index_key=torch.zeros(1, 40, 8)) | changed
    with pytest.raises(ValueError, match=message):
        nsa_torch.indexer_kl(**given)
    given = {k: jnp.asarray(v.numpy()) if hasattr(v, "numpy") else v for k, v in given.items()}
    with pytest.raises(ValueError, match=message):
        nsa_jax.indexer_kl(**given)

"""`block_attention` against dense masks in float64, which share no code with it, on every
implementation; kernels in their interpreters, and on a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nsa_jax
import nsa_torch
from bench.harness import timing
from bench.judge.parity import assert_parity
from kernels_pallas.specs.tile import parts_of_block
from kernels_pallas.triton import paged_blocks_descriptions
from nsa_core import block_lists
from nsa_core.steps import triton_paged_blocks
from nsa_jax.triton_ops import compiled_for
from nsa_torch import blocks
from tests import interpreted_triton, pretend, torch_oracle
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.test_torch_mosaic import interpreted  # noqa: F401, a fixture

LENGTHS = "query_seq_lengths", "key_value_seq_lengths"
NAMES = "out", "lse", "dquery", "dkey", "dvalue"


@dataclasses.dataclass(frozen=True)
class Case:
    """`segments`: lengths of packed sequences, then padding; `lengths`: valid keys of each row."""

    block: int = 16
    n: int = 3
    T: int = 40
    S: int = 70
    H: int = 4
    Hkv: int = 2
    G: int = 2
    D: int = 16
    Dv: int = 8
    B: int = 2
    include: str = "selected"
    segments: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    dtype: str = "float32"

    def places(self):
        """Each key's sequence and position `[B, S]`, each query's index in the keys `[B, T]`."""
        lengths = np.array(self.lengths or (self.S,) * self.B)
        index = np.broadcast_to(np.arange(self.S), (self.B, self.S))
        sequence = np.where(index < lengths[:, None], 0, -1)
        position = index
        if self.segments is not None:
            of = np.full(self.S, -1)
            start = np.zeros(self.S, int)
            begin = 0
            for i, length in enumerate(self.segments):
                of[begin : begin + length] = i
                start[begin : begin + length] = begin
                begin += length
            sequence, position = of[None], (np.arange(self.S) - start)[None]
        query = lengths[:, None] - self.T + np.arange(self.T)
        return sequence, position, query

    def where(self, torch_side: bool) -> dict[str, Any]:
        options: dict[str, Any] = dict(
            block_size=self.block, include=self.include, scale=self.scale, return_residual=True
        )
        if self.segments is not None and torch_side:
            options["cu_seqlens"] = torch.tensor(np.cumsum([0, *self.segments]))
        elif self.segments is not None:
            options["segment_ids"] = jnp.asarray(self.places()[0], jnp.int32)
        elif self.lengths is not None and torch_side:
            options["kv_len"] = torch.tensor(self.lengths)
        elif self.lengths is not None:
            options["key_value_seq_lengths"] = jnp.asarray(self.lengths, jnp.int32)
        return options


CASES = (
    Case(),
    Case(block=128, n=2, T=150, S=300, H=8, Hkv=4, G=1, B=1),  # one list for all heads
    Case(H=6, Hkv=3, G=6, T=20, scale=0.7),  # a list a query head
    Case(H=8, Hkv=1, G=4, block=5, T=70),
    Case(include="tail", block=4, n=5, G=1, S=50),
    Case(include="tail", block=4, n=4, T=55, S=55, B=1, segments=(17, 1, 20, 3)),
    Case(T=61, S=61, B=1, segments=(20, 0, 1, 33)),
    Case(lengths=(52, 70)),
    Case(block=64, n=40, T=9, S=200, H=2, G=1),  # more entries than blocks
    Case(block=192, n=2, T=30, S=500, H=2, G=1, B=1),  # three of 64
)
by_case = pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))


def lists_of(case: Case) -> np.ndarray:
    """Random blocks in any order, none twice: of the future, beyond the keys, empty anywhere."""
    rng = np.random.default_rng(3)
    shape = case.B, case.T, case.G
    blocks = max(-(-case.S // case.block) + 2, case.n)
    order = rng.permuted(np.broadcast_to(np.arange(blocks), (*shape, blocks)), axis=-1)
    lists = order[..., : case.n].astype(np.int32)
    lists = np.where(lists == blocks - 1, 2**31 - 1, lists)
    lists[rng.uniform(size=lists.shape) < 0.3] = -1
    lists[:, ::7] = -1
    if case.include == "tail":
        _, position, query = case.places()
        own = np.take_along_axis(position, query, 1)[:, :, None, None] // case.block
        lists = np.where(lists == own, -1, lists)
    return lists.astype(np.int32)


@functools.cache
def tensors_of(case: Case) -> list[torch.Tensor]:
    """Query, key, value, and gradients of the output and the log-sum-exp."""
    make = torch.Generator().manual_seed(1)
    kv = case.B, case.S, case.Hkv
    shapes = (case.B, case.T, case.H, case.D), (*kv, case.D), (*kv, case.Dv)
    shapes += (case.B, case.T, case.H, case.Dv), (case.B, case.T, case.H)
    dtype = getattr(torch, case.dtype)
    found = [torch.randn(shape, generator=make).to(dtype) for shape in shapes]
    return [*found[:4], found[4].float()]


@functools.cache
def expected(case: Case, dtype=torch.float64) -> list[np.ndarray]:
    """`NAMES` by one dense mask, gradients by autograd."""
    query, key, value, do, dlse = (x.to(torch_oracle.DEVICE, dtype) for x in tensors_of(case))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    sequence, position, at = case.places()
    inside = np.clip(at, 0, None)
    own = np.where(at >= 0, np.take_along_axis(sequence, inside, 1), -1)[:, :, None]
    seen = (sequence[:, None] == own) & (own >= 0)
    seen &= np.arange(case.S) <= at[..., None]
    block = position // case.block
    lists = lists_of(case)
    chosen = (lists[..., None] == block[:, None, None, None]).any(3)  # [B, T, G, S]
    if case.include == "tail":
        mine = np.take_along_axis(position, inside, 1)
        tail = block[:, None] == (mine // case.block)[..., None]
        tail &= (mine % case.block != case.block - 1)[..., None]
        chosen |= tail[:, :, None]
    mask = torch.tensor(chosen & seen[:, :, None], device=torch_oracle.DEVICE).transpose(1, 2)
    mask = mask.repeat_interleave(case.H // case.G, 1)
    key, value = (x.repeat_interleave(case.H // case.Hkv, 2) for x in (key, value))
    scale = case.D**-0.5 if case.scale is None else case.scale
    logits = torch.einsum("bthd,bshd->bhts", query, key) * scale
    some = mask.any(-1)
    low = logits.masked_fill(~mask, -torch.inf).masked_fill(~some[..., None], 0)
    out = torch.einsum("bhts,bshd->bthd", low.softmax(-1).masked_fill(~mask, 0), value)
    lse = low.logsumexp(-1).masked_fill(~some, -torch.inf).transpose(1, 2)
    grads = torch.autograd.grad([out, lse], leaves, [do, dlse])
    return doubles([x.detach().cpu() for x in (out, lse, *grads)])


def judge(case: Case, found) -> None:
    found = [np.asarray(x, np.float64) for x in found]
    for name, got, want in zip(NAMES, found, expected(case), strict=True):
        if case.dtype == "float32":
            np.testing.assert_allclose(got, want, rtol=0, atol=5e-5, err_msg=name)
        else:
            rough = expected(case, getattr(torch, case.dtype))[NAMES.index(name)]
            assert_parity(name, got, want, rough, dtype=jnp.dtype(case.dtype))


def on_torch(case: Case, implementation, device="cpu") -> list[torch.Tensor]:
    query, key, value, do, dlse = (x.to(device) for x in tensors_of(case))
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    options = case.where(True)
    options |= {k: v.to(device) for k, v in options.items() if isinstance(v, torch.Tensor)}
    lists = torch.tensor(lists_of(case), device=device)
    out, lse = nsa_torch.block_attention(
        *leaves, lists, **options, implementation=implementation
    )
    grads = torch.autograd.grad([out, lse], leaves, [do, dlse])
    return [x.detach().cpu() for x in (out, lse, *grads)]


def doubles(found):
    return [x.double().numpy() for x in found]


def on_jax(case: Case, implementation):
    query, key, value, do, dlse = (jnp.asarray(x.numpy()) for x in tensors_of(case))
    options = case.where(False) | {"implementation": implementation}

    @jax.jit
    def whole(lists, *leaves):
        attend = lambda *leaves: nsa_jax.block_attention(*leaves, lists, **options)
        found, pull = jax.vjp(attend, *leaves)
        return *found, *pull((do, dlse))

    return whole(jnp.asarray(lists_of(case)), query, key, value)


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("implementation", ["sdpa", "reference", "jax"])
@by_case
def test_torch(case, implementation):
    judge(case, on_torch(case, implementation))


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@by_case
def test_jax(case, implementation):
    judge(case, on_jax(case, implementation))


KERNELS = (
    Case(block=128, n=2, T=4, S=140, H=16, Hkv=1, G=1, B=1, Dv=16, dtype="bfloat16"),
    Case(T=22, S=22, B=1, Dv=16, segments=(9, 0, 1, 8), dtype="bfloat16"),
)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.skipif(INTERPRETED, reason="kernels of Pallas")
@pytest.mark.parametrize("case", KERNELS, ids=["halves", "packed"])
def test_mosaic(case):
    found = on_torch(case, "mosaic")
    judge(case, doubles(found))


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize(
    "case", [dataclasses.replace(x, dtype="float32") for x in KERNELS], ids=["halves", "packed"]
)
def test_triton(case, monkeypatch):
    if INTERPRETED:  # it takes tensors on the CPU
        pretend.machine(monkeypatch, kernels_why_not=None)
    judge(case, on_torch(case, "triton", DEVICE))


@pytest.mark.skipif(INTERPRETED, reason="runs once more there")
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_in_its_interpreter():
    interpreted_triton.run_again(__file__)


ON_A_GPU = (
    Case(block=128, n=6, T=400, S=1300, H=32, Hkv=2, G=2, D=128, Dv=128, B=1),
    Case(
        block=128, n=3, T=500, S=500, H=16, Hkv=2, G=1, D=64, Dv=64, B=1, segments=(300, 1, 150)
    ),
    Case(block=64, n=5, T=300, S=500, H=8, Hkv=2, G=8, D=64, Dv=64),
    Case(block=32, n=8, T=300, S=500, H=8, Hkv=2, D=64, Dv=64, lengths=(411, 500)),
)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "sdpa"])
@pytest.mark.parametrize("case", ON_A_GPU, ids=range(len(ON_A_GPU)))
def test_gpu(case, implementation):
    case = dataclasses.replace(case, dtype="bfloat16")
    first, second = (on_torch(case, implementation, "cuda") for _ in range(2))
    judge(case, doubles(first))
    if implementation != "sdpa":  # whose gradients are added atomically there
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
def test_the_same_bits_twice():
    first, second = (on_torch(CASES[1], "sdpa") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
def test_a_gradient_of_the_log_sum_exp_alone():
    """A penalty on it, as router z-losses: autograd gives no gradient of the output then."""
    case = CASES[0]
    leaves = [x.detach().double().requires_grad_() for x in tensors_of(case)[:3]]
    lists = torch.tensor(lists_of(case))

    def penalty(query, key, implementation):
        options = case.where(True) | {"implementation": implementation}
        lse = nsa_torch.block_attention(query, key, leaves[2], lists, **options)[1]
        return lse.masked_fill(lse == -torch.inf, 0).square().sum()

    assert torch.autograd.gradcheck(
        lambda q, k: penalty(q, k, "sdpa"), leaves[:2], fast_mode=True
    )
    for name in ("jax", "reference"):
        low = [x.detach().float().requires_grad_() for x in leaves[:2]]
        got = torch.autograd.grad(penalty_of(case, lists, low, name), low)
        want = torch.autograd.grad(penalty(*leaves[:2], "sdpa"), leaves[:2])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def penalty_of(case, lists, low, name):
    options = case.where(True) | {"implementation": name}
    value = tensors_of(case)[2]
    lse = nsa_torch.block_attention(*low, value, lists, **options)[1]
    return lse.masked_fill(lse == -torch.inf, 0).square().sum()


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
def test_valid_queries_come_first():
    """`query_seq_lengths`: the last valid query stands at the last valid key; NaN in padding."""
    case = Case(T=12, S=40, B=2)
    query, key, value = (jnp.asarray(x.numpy()) for x in tensors_of(case)[:3])
    lists = jnp.asarray(lists_of(case))
    counts, ends = (12, 7), (31, 40)
    dirty = (
        query.at[1, 7:].set(jnp.nan),
        key.at[0, 31:].set(jnp.nan),
        value.at[0, 31:].set(jnp.nan),
    )
    for include, name in (("selected", "reference"), ("tail", "xla")):
        options = dict(block_size=16, include=include, return_residual=True)
        options["implementation"] = name
        if include == "tail":
            lists = jnp.full_like(lists, -1)
        attend = jax.jit(functools.partial(nsa_jax.block_attention, **options))
        lengths = dict(zip(LENGTHS, map(jnp.asarray, (counts, ends)), strict=True))
        out, lse = attend(*dirty, lists, **lengths)
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            alone = query[row, :count], key[row, :end], value[row, :end], lists[row, :count]
            want = attend(*(x[None] for x in alone))
            np.testing.assert_allclose(out[row, :count], want[0][0], atol=1e-6)
            np.testing.assert_allclose(lse[row, :count], want[1][0], atol=1e-6)
            assert not out[row, count:].any() and np.isneginf(lse[row, count:]).all()


def test_large_blocks_are_several():
    assert block_lists.parts_of(192, 21) == 3 and block_lists.parts_of(256, 17) == 2
    assert block_lists.parts_of(128, 16) == block_lists.parts_of(256, 33) == 1
    assert parts_of_block(128, 16) == 2 == parts_of_block(128, 32)
    assert parts_of_block(128, 33) == parts_of_block(64, 16) == 1


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
def test_numbers_whose_multiples_are_small():
    """Of blocks in four parts: four times 2**30 is 0 in an int32."""
    query, key, value = (torch.randn(1, n, 1, 16) for n in (9, 600, 600))
    lists = torch.tensor([2**30, -(2**31), 2**31 - 1, 2**30 + 1]).int()
    lists = lists.expand(1, 9, 1, 4)
    assert block_lists.parts_of(block_lists.within(512, 600), 4) == 4
    for name in ("sdpa", "reference"):
        out = nsa_torch.block_attention(
            query, key, value, lists, block_size=512, implementation=name
        )
        assert not out.any()
    out = nsa_jax.block_attention(
        *(jnp.asarray(x.numpy()) for x in (query, key, value, lists)), block_size=512
    )
    assert not out.any()


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("include", ["selected", "tail"])
@pytest.mark.parametrize("tokens", [9, 128])
def test_a_block_of_more_than_all_keys(tokens, include):
    """No memory is taken for what it might hold; no token is its last one."""
    query, key, value = (torch.randn(1, tokens, 1, 16) for _ in range(3))
    lists = torch.full((1, tokens, 1, 1), -1 if include == "tail" else 0).int()
    options = {"include": include, "implementation": "sdpa"}
    by_heads = (x.transpose(1, 2) for x in (query, key, value))
    want = F.scaled_dot_product_attention(*by_heads, is_causal=True).transpose(1, 2)
    for size in (2**31 - 1, tokens + 1):
        out = nsa_torch.block_attention(query, key, value, lists, block_size=size, **options)
        torch.testing.assert_close(out, want)
    arrays = [jnp.asarray(x.numpy()) for x in (query, key, value, lists)]
    found = nsa_jax.block_attention(*arrays, block_size=2**31 - 1, include=include)
    np.testing.assert_allclose(found, want, atol=1e-5)
    pages = (x[0, :, None] for x in (key, value))
    table, lengths = torch.arange(tokens).int()[None], torch.tensor([tokens]).int()
    given = query[0], *pages, table, lengths, lists[0]
    found = nsa_torch.paged_block_attention(*given, block_size=2**31 - 1, include=include)
    torch.testing.assert_close(found, want[0])


BAD = (
    (dict(block_indices=torch.zeros(1, 20, 2, 3).short()), "block_indices must have dtype"),
    (dict(block_indices=torch.zeros(1, 20, 3).int()), "block_indices must have 4 axes"),
    (dict(block_indices=torch.zeros(1, 19, 2, 3).int()), r"\[1, 20, G, n >= 1\]"),
    (dict(block_indices=torch.zeros(1, 20, 2, 0).int()), r"\[1, 20, G, n >= 1\]"),
    (dict(block_indices=torch.zeros(1, 20, 3, 1).int()), "got G=3"),
    (dict(block_indices=torch.zeros(1, 20, 0, 1).int()), "got G=0"),
    (dict(block_size=0), "block_size must be an int >= 1, got 0"),
    (dict(block_size=64.0), "block_size must be an int >= 1, got 64.0"),
    (dict(include="window"), "include must be one of"),
    (dict(scale=0.0), "scale must be a positive number"),
    (dict(query=torch.zeros(1, 41, 4, 8)), "query must not be longer than key"),
    (dict(value=torch.zeros(1, 40, 1, 8)), "the same"),
    (dict(implementation="mosaic"), "mosaic"),
)


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize(("changed", "message"), BAD)
def test_bad_input(changed, message):
    given = dict(
        query=torch.zeros(1, 20, 4, 8),
        key=torch.zeros(1, 40, 2, 8),
        value=torch.zeros(1, 40, 2, 8),
        block_indices=torch.zeros(1, 20, 2, 1).int(),
        block_size=16,
    )
    with pytest.raises((ValueError, NotImplementedError), match=message):
        nsa_torch.block_attention(**given | changed)
    arrays = {
        k: jnp.asarray(v.numpy()) if isinstance(v, torch.Tensor) else v
        for k, v in (given | changed).items()
    }
    with pytest.raises((ValueError, NotImplementedError), match=message):
        nsa_jax.block_attention(**arrays)


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("queries", [None, [3]])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (4.0, "an integer or an array of them, got 4.0"),
        (True, "an integer or an array of them, got True"),
        (-3, "at least .*, got -3"),
        (41, "at most the keys there are, 40, got 41"),
        (jnp.array([7.0]), "have dtype in .'int32', 'int64'., got float32"),
        (jnp.array([41]), "in 0..40, got 41"),
        (jnp.array([7, 7]), r"shape \(\) or \(1,\), got \(2,\)"),
    ],
    ids=str,
)
def test_lengths_that_are_refused(keys, message, queries):
    shapes = (1, 20, 4, 8), (1, 40, 2, 8), (1, 40, 2, 8)
    arrays = *(jnp.zeros(x) for x in shapes), jnp.zeros((1, 20, 1, 1), jnp.int32)
    lengths = dict(zip(LENGTHS, (queries and jnp.array(queries), keys), strict=True))
    with pytest.raises(ValueError, match=f"key_value_seq_lengths must .*{message}"):
        nsa_jax.block_attention(*arrays, block_size=16, **lengths)


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize("block", [3, 0])
def test_a_block_named_twice(block):
    x = torch.zeros(1, 20, 2, 8)
    lists = torch.tensor([block, -1, 1, block, -1]).int().expand(1, 20, 1, 5)
    message = rf"block_indices\[0, 0, 0\] must name a block once, got block {block} twice"
    with pytest.raises(ValueError, match=message):
        nsa_torch.block_attention(x, x, x, lists, block_size=4)
    arrays = [jnp.asarray(y.numpy()) for y in (x, x, x, lists)]
    with pytest.raises(ValueError, match=message):
        nsa_jax.block_attention(*arrays, block_size=4)
    jax.jit(nsa_jax.block_attention, static_argnames="block_size")(*arrays, block_size=4)


def pages_of(page, block, scopes, same, include):
    """Arguments of `paged_block_attention`, its `cu_seqlens_q`, and what `block_attention` has for
    each row alone; what no row has is NaN.
    """
    rng = np.random.default_rng(0)
    heads, kv_heads, width, columns = 4, 2, 16, 96 // page
    lengths, counts = [77, 0, 5, 96], ([3, 3, 3, 3] if same else [7, 0, 1, 40])
    if INTERPRETED:  # slowly
        counts = [min(x, 2) for x in counts]
    pages = rng.normal(size=(2, 4 * columns + 3, page, kv_heads, width)).astype(np.float32)
    table = rng.permutation(4 * columns + 3)[: 4 * columns].reshape(4, columns).astype(np.int32)
    total, blocks = sum(counts), -(-96 // block) + 1
    query = rng.normal(size=(total, heads, width)).astype(np.float32)
    order = np.broadcast_to(np.arange(blocks), (total, scopes, blocks))
    lists = rng.permuted(order, axis=-1)[..., :3].astype(np.int32)
    lists[rng.uniform(size=lists.shape) < 0.2] = -1
    starts = np.cumsum([0, *counts]).astype(np.int32)
    rows = []
    for row, length in enumerate(lengths):
        key, value = pages[:, table[row]].reshape(2, 1, 96, kv_heads, width)[:, :, :length]
        mine = slice(starts[row], starts[row + 1])
        if length < counts[row] or not counts[row]:
            rows.append((mine, None))
            continue
        if include == "tail":  # the query's own block is not named
            own = (length - counts[row] + np.arange(counts[row])) // block
            lists[mine] = np.where(lists[mine] == own[:, None, None], -1, lists[mine])
        arrays = (torch.tensor(x) for x in (query[None, mine], key, value, lists[None, mine]))
        options = dict(block_size=block, return_residual=True, include=include)
        options |= {"implementation": "sdpa"}
        found = nsa_torch.block_attention(*arrays, **options)
        rows.append((mine, [x[0].numpy() for x in found]))
    used = np.zeros(pages.shape[1:3], bool)
    for row, length in enumerate(lengths):
        used[table[row, np.arange(length) // page], np.arange(length) % page] = True
    pages[:, ~used] = np.nan
    given = query, *pages, table, np.array(lengths, np.int32), lists
    return given, None if same else starts, rows


def judge_rows(found, rows):
    out, lse = (np.asarray(x) for x in found)
    for mine, want in rows:
        if want is None:
            assert not out[mine].any() and np.isneginf(lse[mine]).all()
            continue
        np.testing.assert_allclose(out[mine], want[0], atol=2e-6)
        np.testing.assert_allclose(lse[mine], want[1], atol=2e-6)


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize(
    ("page", "block", "scopes", "include"),
    [(32, 16, 2, "selected"), (8, 24, 1, "tail"), (16, 16, 4, "selected")],
)
@pytest.mark.parametrize("same", [True, False])
def test_pages(page, block, scopes, same, include):
    given, starts, rows = pages_of(page, block, scopes, same, include)
    options = {"block_size": block, "return_residual": True, "include": include}
    cu = None if same else torch.tensor(starts)
    of_torch = nsa_torch.paged_block_attention(
        *map(torch.tensor, given), cu_seqlens_q=cu, **options
    )
    judge_rows(of_torch, rows)
    of_jax = nsa_jax.paged_block_attention(
        *map(jnp.asarray, given), cu_seqlens_q=starts, **options
    )
    judge_rows(of_jax, rows)


@pytest.mark.parametrize("wanted", range(3), ids=["query", "key_pages", "value_pages"])
def test_pages_have_no_gradient(wanted):
    """It is an error in JAX too, no zeros; what stops it may be in a function that has one."""
    given, *_ = pages_of(32, 16, 2, True, "selected")
    floats = list(map(jnp.asarray, given[:3]))

    def loss(x, stop=lambda x: x):
        arrays = *floats[:wanted], stop(x), *floats[wanted + 1 :], *given[3:]
        return x[0].sum() + nsa_jax.paged_block_attention(*arrays, block_size=16).sum()

    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(NotImplementedError, match="paged_block_attention has no gradient"):
            transform(loss)(floats[wanted])
    stopped = functools.partial(loss, stop=jax.lax.stop_gradient)
    assert jax.jit(jax.grad(stopped))(floats[wanted])[0].all()


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize(
    ("page", "block", "scopes", "same", "include"),
    [(32, 16, 2, True, "tail"), (8, 24, 1, False, "selected"), (16, 4, 4, False, "tail")],
)
def test_pages_on_triton(page, block, scopes, same, include, monkeypatch):
    if INTERPRETED:  # it takes tensors on the CPU
        monkeypatch.setattr(blocks, "chosen_implementation", lambda *_: "triton")
        monkeypatch.setattr(paged_blocks_descriptions, "SPLIT", 32)  # several parts
    given, starts, rows = pages_of(page, block, scopes, same, include)
    options: dict[str, Any] = {"block_size": block, "return_residual": True, "include": include}
    options |= {"cu_seqlens_q": None if same else torch.tensor(starts, device=DEVICE)}
    given = [torch.tensor(x, device=DEVICE) for x in given]
    given[1:3] = torch.stack(given[1:3], 1).unbind(1)  # other pages lie between
    twice = [
        nsa_torch.paged_block_attention(*given, **options, implementation="triton")
        for _ in range(2)
    ]
    judge_rows([x.cpu() for x in twice[0]], rows)
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
def test_a_step_in_a_graph():
    """Lists and attention of MiniMax-M3's shape, from pages, in one graph for growing lengths: the
    lists are those of prefill, the output is near that of `block_attention`.
    """
    make = torch.Generator("cuda").manual_seed(0)
    columns, page, widths = 30, 128, (64, 4, 128)
    about = {"generator": make, "device": "cuda", "dtype": torch.bfloat16}
    heads, kv_heads, width = widths
    pages = torch.randn(3, 3 * columns + 2, page, kv_heads, width, **about)
    key_pages, value_pages, index_pages = pages[0], pages[1], pages[2, :, :, 0].contiguous()
    table = torch.randperm(3 * columns, generator=make, device="cuda").int().view(3, columns)
    query = torch.randn(3, heads, width, **about)
    index_query = torch.randn(3, kv_heads, width, **about)
    lengths = torch.ones(3, dtype=torch.int32, device="cuda")

    def step():
        lists = nsa_torch.paged_index_blocks(
            index_query, index_pages, table, lengths, implementation="triton"
        )
        arrays = query, key_pages, value_pages, table, lengths, lists
        out = nsa_torch.paged_block_attention(*arrays, block_size=128, implementation="triton")
        return lists, out

    with torch.no_grad():
        replay, (lists, out) = timing.cuda_graph(step)
        for found in ((1, 129, 3840), (2500, 127, 3000)):
            lengths.copy_(torch.tensor(found))
            replay()
            for row, length in enumerate(found):
                mine = (x[table[row].long()].flatten(0, 1) for x in (key_pages, value_pages))
                key, value = (x[None, :length] for x in mine)
                index_key = index_pages[table[row].long()].flatten(0, 1)[None, :length]
                want = nsa_torch.index_blocks(index_query[None, row : row + 1], index_key)
                assert torch.equal(lists[row], want[0, 0])
                given = query[None, row : row + 1], key, value, want
                exact = nsa_torch.block_attention(
                    *(x.float() for x in given[:3]), want, block_size=128, implementation="sdpa"
                )
                assert (out[row] - exact[0, 0]).norm() / exact.norm() < 0.005


BAD_PAGES = (
    (dict(include="window"), "include must be one of"),
    (dict(implementation="mosaic"), "implementation must be one of"),
    (dict(implementation="triton"), "needs an NVIDIA GPU, got cpu"),
    (dict(query=torch.zeros(2, 3, 8)), "multiple of the pages' heads"),
    (dict(value_pages=torch.zeros(5, 8, 2, 8)), r"value_pages must have shape \(6, 8, 2, 8\)"),
    (dict(page_table=torch.zeros(2, 3)), "page_table must have dtype"),
    (dict(lengths=torch.zeros(3).int()), r"lengths must have shape \(2,\)"),
    (dict(block_indices=torch.zeros(2, 3, 1).int()), "got G=3"),
    (
        dict(query=torch.zeros(2, 4, 8, requires_grad=True)),
        "has no gradient: call it under no_grad",
    ),
)


@pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
@pytest.mark.parametrize(("changed", "message"), BAD_PAGES)
def test_bad_pages(changed, message):
    given = dict(query=torch.zeros(2, 4, 8), key_pages=torch.zeros(6, 8, 2, 8))
    given |= dict(value_pages=torch.zeros(6, 8, 2, 8), page_table=torch.zeros(2, 3).int())
    given |= dict(lengths=torch.ones(2).int(), block_indices=torch.zeros(2, 1, 1).int())
    with pytest.raises((ValueError, NotImplementedError), match=message):
        nsa_torch.paged_block_attention(**given | changed, block_size=8)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize(("include", "scopes"), [("selected", 2), ("tail", 1)])
def test_long_lists(include, scopes, monkeypatch):
    """Beyond 64 entries kernels gather single keys: rows of two lengths, a part of the queries at a
    time.
    """
    if INTERPRETED:  # it takes tensors on the CPU
        monkeypatch.setattr(blocks, "device_why_not", lambda query: None)
        monkeypatch.setattr(triton_paged_blocks, "PARTIAL_BYTES", 4000)
    make = torch.Generator().manual_seed(0)
    batch, length, keys, block, n = 2, 7, 300, 4, 66
    draw = functools.partial(torch.randn, generator=make)
    query, key, value = (
        draw(batch, *x) for x in ((length, 6, 24), (keys, 2, 24), (keys, 2, 16))
    )
    lists = torch.rand(batch, length, scopes, keys // block + 1, generator=make).argsort(-1)
    kv_len = torch.tensor([300, 283], dtype=torch.int32)
    own = (kv_len[:, None] - length + torch.arange(length)) // block
    lists = lists[..., :n].int()
    lists = lists.masked_fill((lists == own[..., None, None]) & (include == "tail"), -1)
    options = {"block_size": block, "include": include, "return_residual": True}
    wide = [x.double() for x in (query, key, value)]
    exact = nsa_torch.block_attention(
        *wide, lists, **options, kv_len=kv_len, implementation="sdpa"
    )
    given = [x.to(DEVICE) for x in (query, key, value, lists)]
    options |= {"kv_len": kv_len.to(DEVICE), "implementation": "triton"}
    for got, want in zip(nsa_torch.block_attention(*given, **options), exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=0, atol=3e-5)
    with pytest.raises(NotImplementedError, match="triton"):
        given[0].requires_grad_()
        nsa_torch.block_attention(*given, **options)


@pytest.mark.skipif(INTERPRETED or not TRITON, reason="lowers kernels")
def test_jax_kernels_of_long_lists_are_lowered(monkeypatch):
    """For a GPU that need not be there; gradients are those of `xla`."""
    monkeypatch.setattr("nsa_jax.blocks.chosen_implementation", lambda *_: "triton")
    monkeypatch.setattr("nsa_jax.blocks.jax_problem.capability", lambda: (9, 0))
    query, key, value = (jnp.ones((2, 5, h, 32), jnp.bfloat16) for h in (4, 2, 2))
    lists = jnp.full((2, 5, 1, 66), -1, jnp.int32)

    def attend(*arrays):
        out = nsa_jax.block_attention(*arrays, lists, block_size=4, include="tail")
        return out.astype(jnp.float32).sum()

    with compiled_for((9, 0)):
        traced = jax.jit(jax.value_and_grad(attend, (0, 1, 2))).trace(query, key, value)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 2

"""`index_blocks` against plain loops in float64 that share no code with it; Triton's kernel in its
interpreter, and on a GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from kernels_pallas.triton import index_descriptions, paged_blocks_descriptions
from nsa_core.steps import triton_index
from nsa_jax.triton_ops import compiled_for
from nsa_torch import indexer
from tests import interpreted_triton, pretend
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.limits import set_limits

plain = pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")


@dataclasses.dataclass(frozen=True)
class Case:
    pool: int = 16
    n: int = 3
    initial: int = 0
    local: int = 1
    activation: str | None = None
    reduce: str | None = None
    entry: int = 1
    T: int = 60
    S: int = 100
    heads: int = 3
    width: int = 16
    B: int = 2
    lengths: tuple[int, ...] | None = None
    segments: tuple[int, ...] | None = None
    dtype: str = "float32"
    equal: bool = False  # small integers: many scores are the same

    @property
    def keys(self) -> int:
        return self.S // self.entry

    @property
    def options(self):
        return dict(
            pool=self.pool,
            num_selected=self.n,
            num_initial=self.initial,
            num_local=self.local,
            activation=self.activation,
            reduce=self.reduce,
            entry=self.entry,
        )

    def where(self, of_torch: bool):
        if self.segments is not None:
            ids = np.repeat(np.arange(len(self.segments)), self.segments)
            ids = np.pad(ids, (0, self.S - ids.size), constant_values=-1)
            if of_torch:
                return {"cu_seqlens": torch.tensor(np.cumsum([0, *self.segments]))}
            return {"segment_ids": jnp.asarray(ids, jnp.int32)[None]}
        lengths = self.lengths or (self.S,)
        if len(lengths) == 1:
            return {"kv_len": lengths[0]}
        return {"kv_len": (torch.tensor if of_torch else jnp.asarray)(lengths)}


CASES = (
    Case(),
    Case(n=9, initial=1, local=2),  # more than there are blocks
    Case(local=0, heads=1, T=100),
    Case(pool=7, n=4, equal=True),
    Case(pool=1, n=5, entry=4, local=0, activation="relu", reduce="sum"),  # QSA's
    Case(pool=2, n=3, entry=4, local=1, S=98, T=98, equal=True),
    Case(B=1, T=70, S=70, segments=(9, 0, 1, 50), n=2),
    Case(lengths=(71, 100)),
    Case(pool=128, n=2, T=140, S=300, B=1, heads=4),
)


@functools.cache
def tensors_of(case: Case):
    rng = np.random.default_rng(2)
    shapes = (case.B, case.T, case.heads, case.width), (case.B, case.keys, case.width)
    if case.equal:
        found = [rng.integers(-1, 2, size=shape).astype(np.float32) for shape in shapes]
    else:
        found = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return [torch.tensor(x).to(getattr(torch, case.dtype)) for x in found]


@functools.cache
def expected(case: Case):
    """The scores `[B, T, lists, N]` of candidates, else -inf, +inf where forced; by loops."""
    query, key = (x.double().numpy() for x in tensors_of(case))
    lists = 1 if case.reduce else case.heads
    block = case.pool * case.entry
    scores = np.full((case.B, case.T, lists, -(-case.S // block)), -np.inf)
    lengths = case.lengths or (case.S,) * case.B
    for b in range(case.B):
        for t in range(case.T):
            start, p = 0, lengths[b] - case.T + t
            if case.segments is not None:
                ends = np.cumsum(case.segments)
                start = max([0, *ends[ends <= p]])
                if p >= ends[-1]:
                    continue
                p = p - start
            for j in range(p // block + 1):
                rows = [r for r in range(j * case.pool, (j + 1) * case.pool)]
                rows = [start + r for r in rows if r * case.entry + case.entry - 1 <= p]
                s = query[b, t] @ key[b, rows].T
                s = np.maximum(s, 0) if case.activation else s
                s = s.sum(0, keepdims=True) if case.reduce else s
                scores[b, t, :, j] = s.max(-1, initial=-np.inf)
                if j < case.initial or j > p // block - case.local:
                    scores[b, t, :, j] = np.inf
    return scores


def chosen(case: Case) -> np.ndarray:
    """The lists: of equal scores the lower blocks."""
    spare, order = ordered(case)
    best = np.take_along_axis(spare, order, -1)
    want = np.sort(np.where(best > -np.inf, order, 2**30), -1)
    return np.where(want == 2**30, -1, want)


def ordered(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Scores with `n` more, and the places of the `n` highest."""
    spare = ((0, 0),) * 3 + ((0, case.n),)
    scores = np.pad(expected(case), spare, constant_values=-np.inf)
    return scores, np.argsort(-scores, axis=-1, kind="stable")[..., : case.n]


def judge(case: Case, found) -> None:
    """Ascending, once each, the highest; in float32 and of equal scores exactly the lower ones."""
    found, want = np.asarray(found), chosen(case)
    assert found.dtype == np.int32 and found.shape == want.shape
    spare, order = ordered(case)
    best = np.take_along_axis(spare, order, -1)
    if case.dtype == "float32" or case.equal:
        np.testing.assert_array_equal(found, want)
        return
    filled = found >= 0
    np.testing.assert_array_equal(filled, want >= 0)
    later = np.where(filled, found, np.arange(10**6, 10**6 + case.n))
    assert (np.diff(later, axis=-1) > 0).all()
    got = np.take_along_axis(spare, np.maximum(found, 0), -1)
    query, key = (x.double().numpy() for x in tensors_of(case))
    size = np.linalg.norm(query, axis=-1)[..., None] * np.linalg.norm(key, axis=-1).max()
    least = np.where(best > -np.inf, best, np.inf).min(-1, keepdims=True)
    assert np.where(filled, got >= least - 2.0**-16 * size, True).all()
    forced = np.isinf(best) & (best > 0)
    np.testing.assert_array_equal((np.isinf(got) & filled).sum(-1), forced.sum(-1))


def on_torch(case, implementation, device="cpu"):
    tensors = (x.to(device) for x in tensors_of(case))
    options = case.options | case.where(True) | {"implementation": implementation}
    options = {k: v.to(device) if hasattr(v, "to") else v for k, v in options.items()}
    return nsa_torch.index_blocks(*tensors, **options).cpu()


@plain
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_torch(case, monkeypatch):
    set_limits(monkeypatch, torch_chunk_bytes=50_000)
    judge(case, on_torch(case, None))


@plain
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_jax(case):
    arrays = (jnp.asarray(x.numpy()) for x in tensors_of(case))
    run = functools.partial(nsa_jax.index_blocks, **case.options, **case.where(False))
    judge(case, jax.jit(run)(*arrays))


# Few keys, none of which is forced: a query's own, and none after it, is often among the best.
OWN = Case(T=8, S=12, pool=1, n=5, heads=2, B=1, local=0)
IN_TRITON = (
    OWN,
    Case(T=3, S=300, n=17, initial=1, local=2, heads=1, width=24, B=1),
    Case(T=5, S=70, entry=4, heads=2, B=1, local=0),
    Case(T=2, S=90, heads=2, lengths=(90, 55), equal=True, dtype="float16"),
    Case(pool=32, T=3, S=700, n=2, B=1, dtype="float16"),  # several steps of the selection
    Case(T=4, pool=1, n=5, entry=4, local=0, activation="relu", reduce="sum"),  # QSA's
    Case(T=3, S=90, pool=4, n=9, heads=3, initial=1, local=2, activation="relu", equal=True),
    Case(T=5, S=300, pool=128, n=2, heads=1, reduce="sum", lengths=(300, 140)),
    # Blocks in several parts, and many of one score.
    Case(T=3, S=400, pool=2, n=12, heads=1, reduce="sum", initial=1, lengths=(400, 390)),
    Case(T=3, S=300, pool=1, n=70, heads=2, activation="relu", B=1, equal=True),
)


# A row that has fewer blocks than are wanted.
FEW = dataclasses.replace(IN_TRITON[-4], lengths=(90, 12))


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize(
    ("case", "of_part"),
    [
        *((case, 2048) for case in IN_TRITON),
        (FEW, 8),
        *((x, 64) for x in IN_TRITON[-2:]),
    ],
)
def test_triton(case, of_part, monkeypatch):
    """Of lists with one program, and with one for each `of_part` of their blocks."""
    set_limits(monkeypatch, index_list_part=of_part)
    if INTERPRETED:  # it takes tensors on the CPU
        pretend.machine(monkeypatch, indexer_why_not=None)
        monkeypatch.setattr(triton_index, "SCORES_BYTES", 2000)  # several segments of tokens
        monkeypatch.setattr(index_descriptions, "CHUNK", 32)
        set_limits(monkeypatch, index_part=16)
    judge(case, on_torch(case, "triton", DEVICE))


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
def test_a_key_counts_from_its_own_token_on(monkeypatch):
    """Key 255, the highest: it lies in the last of the first 16 blocks, which most queries see."""
    if INTERPRETED:
        pretend.machine(monkeypatch, indexer_why_not=None)
    query, key = torch.ones(1, 10, 2, 16, device=DEVICE), torch.zeros(1, 262, 16, device=DEVICE)
    key[:, 255] = 1
    options = {"pool": 16, "num_selected": 3, "num_local": 0, "implementation": "triton"}
    found = (nsa_torch.index_blocks(query, key, **options) == 15).any(dim=-1)[0]
    assert found.tolist() == [[position >= 255] * 2 for position in range(252, 262)]


@plain
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_in_its_interpreter():
    interpreted_triton.run_again(__file__)


ON_A_GPU = (
    Case(
        pool=1,
        n=512,
        T=3000,
        S=20000,
        entry=4,
        local=0,
        heads=4,
        width=128,
        B=1,
        activation="relu",
        reduce="sum",
        dtype="bfloat16",
        equal=True,
    ),
    Case(pool=128, n=16, T=900, S=9000, heads=4, width=128, reduce="sum", dtype="bfloat16"),
    Case(pool=128, n=16, T=3000, S=9000, heads=4, width=128, B=1, dtype="bfloat16"),
    Case(pool=64, n=40, T=2000, S=6000, heads=2, width=64, B=2, dtype="float16"),
    Case(pool=128, n=16, T=500, S=4000, heads=4, width=128, B=1, dtype="bfloat16", equal=True),
    Case(pool=32, n=8, T=300, S=2000, heads=3, width=96, lengths=(1500, 2000)),
)


@pytest.mark.gpu
@plain
@pytest.mark.parametrize("case", ON_A_GPU, ids=range(len(ON_A_GPU)))
@pytest.mark.parametrize("of_part", [2048, 64])
def test_gpu(case, of_part, monkeypatch):
    set_limits(monkeypatch, index_list_part=of_part)
    found = on_torch(case, "triton", "cuda")
    judge_fast(case, found)
    assert torch.equal(found, on_torch(case, "triton", "cuda"))
    assert nsa_torch.indexer.index_blocks.__name__ == "index_blocks"


def judge_fast(case, found):
    """By `torch`, which the loops judge on small cases, in float64."""
    wide = dataclasses.replace(case, dtype="float64")
    tensors = [x.double().cuda() for x in tensors_of(case)]
    options = case.options | case.where(True)
    options = {k: v.cuda() if hasattr(v, "cuda") else v for k, v in options.items()}
    want = nsa_torch.index_blocks(*tensors, **options, implementation="torch").cpu()
    same = (found == want).all(-1).double().mean().item()
    assert same == 1 if case.equal else same > 0.999, (wide, same)


# Pages of keys, and which case; rows have other numbers of queries where it says so.
PAGED = (
    (8, False, Case(T=3, lengths=(71, 100))),
    (16, True, Case(T=4, pool=4, n=7, initial=1, local=2, lengths=(55, 100), equal=True)),
    (32, False, Case(T=2, pool=128, n=2, S=300, heads=4)),
    (5, True, Case(T=4, pool=1, n=5, entry=4, local=0, activation="relu", reduce="sum")),
    (4, False, Case(T=3, pool=2, n=3, entry=4, S=98, equal=True)),
    (4, True, OWN),
)


def paged(case: Case, page: int, ragged: bool, device="cpu"):
    """Arguments and options of `paged_index_blocks`, and which of the case's queries they have."""
    rng = np.random.default_rng(5)
    query, key = (x.numpy() for x in tensors_of(case))
    columns = -(-case.S // (page * case.entry))
    pages = np.full((case.B * columns + 2, page, case.width), np.nan, query.dtype)
    table = rng.permutation(len(pages))[: case.B * columns].reshape(case.B, columns)
    for b in range(case.B):
        spare = np.full((columns * page - case.keys, case.width), np.nan, query.dtype)
        pages[table[b]] = np.concatenate([key[b], spare]).reshape(columns, page, case.width)
    lengths = np.array(case.lengths or (case.S,) * case.B)
    counts = [case.T - 2 * b if ragged else case.T for b in range(case.B)]
    taken = [slice(case.T - count, case.T) for count in counts]
    query = np.concatenate([query[b, x] for b, x in enumerate(taken)])
    arrays = query, pages, table.astype(np.int32), lengths.astype(np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32) if ragged else None
    return arrays, starts, taken


def judge_paged(case: Case, found, taken) -> None:
    whole = np.full((*expected(case).shape[:3], case.n), -2, np.int32)
    begin = 0
    for b, mine in enumerate(taken):
        count = mine.stop - mine.start
        whole[b, mine], begin = np.asarray(found)[begin : begin + count], begin + count
    assert begin == len(found)
    there = whole[..., 0] > -2
    want = chosen(case)
    np.testing.assert_array_equal(whole[there], want[there])


@plain
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_jax_kernels_are_lowered(monkeypatch):
    """A decode step of an indexer and its attention, for a GPU that need not be there."""
    for module in ("blocks", "indexer"):  # whose import is of the other's own
        name = f"nsa_jax.{module}.chosen_implementation"
        monkeypatch.setattr(name, lambda *_: "triton")
    table, lengths = jnp.zeros((2, 6), jnp.int32), jnp.array([90, 50], jnp.int32)
    array = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    arrays = array(2, 2, 16), array(12, 16, 16), array(2, 4, 16), array(12, 16, 2, 16)

    def step(index_query, index_pages, query, pages):
        lists = nsa_jax.paged_index_blocks(
            index_query, index_pages, table, lengths, pool=16, num_selected=3
        )
        given = query, pages, pages, table, lengths, lists
        return nsa_jax.paged_block_attention(*given, block_size=16)

    with compiled_for((9, 0)):
        text = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 4


BAD = (
    (dict(index_key=torch.zeros(1, 40, 1, 8)), "index_key must have 3 axes"),
    (dict(index_key=torch.zeros(1, 40, 9)), r"index_key must have shape \(1, 40, 8\)"),
    (
        dict(index_key=torch.zeros(1, 40, 8).half()),
        "index_key must have the dtype of index_query",
    ),
    (dict(pool=0), "pool must be an int >= 1, got 0"),
    (dict(num_selected=0), "num_selected must be >= 1"),
    (dict(num_selected=2, num_local=3), "num_initial . num_local = 3"),
    (dict(activation="gelu"), "activation must be one of"),
    (dict(reduce="mean"), "reduce must be one of"),
    (dict(kv_len=19), "kv_len must be"),
    (dict(kv_len=41), "kv_len must be"),
    (dict(implementation="sdpa"), "implementation must be one of"),
    (dict(implementation="triton", pool=20), "takes blocks of"),
    (dict(implementation="triton", pool=1), "needs an NVIDIA GPU"),
    (dict(implementation="triton"), "needs an NVIDIA GPU"),
)


@plain
@plain
@pytest.mark.parametrize(("page", "ragged", "case"), PAGED, ids=range(len(PAGED)))
def test_pages(page, ragged, case, monkeypatch):
    set_limits(monkeypatch, torch_chunk_bytes=50_000)
    arrays, starts, taken = paged(case, page, ragged)
    tensors, cu = map(torch.tensor, arrays), None if starts is None else torch.tensor(starts)
    found = nsa_torch.paged_index_blocks(*tensors, **case.options, cu_seqlens_q=cu)
    judge_paged(case, found, taken)
    found = nsa_jax.paged_index_blocks(
        *map(jnp.asarray, arrays), **case.options, cu_seqlens_q=starts
    )
    judge_paged(case, found, taken)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize(("page", "ragged", "case"), PAGED, ids=range(len(PAGED)))
def test_pages_on_triton(page, ragged, case, monkeypatch):
    set_limits(monkeypatch, index_list_part=8)
    if INTERPRETED:  # it takes tensors on the CPU
        monkeypatch.setattr(indexer, "device_why_not", lambda query: None)
        set_limits(monkeypatch, index_part=16)
        monkeypatch.setattr(paged_blocks_descriptions, "CHUNK", 128)
    arrays, starts, taken = paged(case, page, ragged)
    tensors = [torch.tensor(x, device=DEVICE) for x in arrays]
    tensors[1] = torch.stack([tensors[1]] * 2, 1)[:, 1]  # other pages lie between
    cu = None if starts is None else torch.tensor(starts, device=DEVICE)
    found = nsa_torch.paged_index_blocks(
        *tensors, **case.options, cu_seqlens_q=cu, implementation="triton"
    )
    judge_paged(case, found.cpu(), taken)


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_bad_input(changed, message):
    given = dict(index_query=torch.zeros(1, 20, 2, 8), index_key=torch.zeros(1, 40, 8))
    given |= changed
    with pytest.raises((ValueError, NotImplementedError), match=message):
        nsa_torch.index_blocks(**given)
    given = {k: jnp.asarray(v.numpy()) if hasattr(v, "numpy") else v for k, v in given.items()}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        nsa_jax.index_blocks(**given)


@plain
@pytest.mark.parametrize("entry", [1, 5])
def test_a_pool_of_more_than_all_keys(entry):
    """No memory is taken for what it might hold, and its tokens count in 32 bits."""
    query, key = torch.randn(1, 30, 2, 8), torch.randn(1, 30 // entry, 8)
    pages, table = key.view(-1, 3, 8), torch.arange(10 // entry).int()[None]
    given = query[0, -2:], pages, table, torch.tensor([30]).int()
    options = dict(num_selected=2, num_local=0, entry=entry)
    arrays = [jnp.asarray(x.numpy()) for x in (query, key)]
    in_pages = [jnp.asarray(x.numpy()) for x in given]
    want = nsa_torch.index_blocks(query, key, pool=40, **options)
    for pool in (2**31, 2**40):
        assert torch.equal(nsa_torch.index_blocks(query, key, pool=pool, **options), want)
        found = nsa_torch.paged_index_blocks(*given, pool=pool, **options)
        assert torch.equal(found, want[0, -2:])
        found = nsa_jax.index_blocks(*arrays, pool=pool, **options)
        np.testing.assert_array_equal(found, want)
        found = nsa_jax.paged_index_blocks(*in_pages, pool=pool, **options)
        np.testing.assert_array_equal(found, want[0, -2:])


@plain
def test_packed_rows_of_entries_are_refused():
    query, key = torch.zeros(1, 20, 2, 8), torch.zeros(1, 5, 8)
    with pytest.raises(ValueError, match="entry must be 1 in packed rows"):
        nsa_torch.index_blocks(query, key, entry=4, cu_seqlens=torch.tensor([0, 20]))


BAD_PAGES = (
    (dict(index_query=torch.zeros(2, 8)), "index_query must have 3 axes"),
    (dict(index_query=torch.zeros(3, 2, 8)), "must have a multiple of 2 tokens"),
    (dict(index_query=torch.zeros(0, 2, 8)), "must not be empty"),
    (dict(index_key_pages=torch.zeros(6, 4, 9)), r"must have shape \(6, 4, 8\)"),
    (dict(index_key_pages=torch.zeros(6, 4, 8).half()), "the dtype of index_query"),
    (dict(page_table=torch.zeros(2, 3)), "page_table must have dtype"),
    (dict(lengths=torch.ones(3).int()), r"lengths must have shape \(2,\)"),
    (dict(cu_seqlens_q=torch.zeros(2).int()), r"cu_seqlens_q must have shape \(3,\)"),
    (dict(num_selected=2, num_local=3), "num_initial . num_local = 3"),
    (dict(reduce="mean"), "reduce must be one of"),
    (dict(entry=2**30), "entry must be at most 8388608 for 12 keys, got 1073741824"),
    (dict(implementation="mosaic"), "implementation must be one of"),
    (dict(implementation="triton"), "needs an NVIDIA GPU"),
)


@plain
@pytest.mark.parametrize(("changed", "message"), BAD_PAGES)
def test_bad_pages(changed, message):
    given = dict(index_query=torch.zeros(2, 2, 8), index_key_pages=torch.zeros(6, 4, 8))
    given |= dict(page_table=torch.zeros(2, 3).int(), lengths=torch.ones(2).int()) | changed
    errors = ValueError, NotImplementedError
    with pytest.raises(errors, match=message):
        nsa_torch.paged_index_blocks(**given)
    arrays = {k: jnp.asarray(v.numpy()) if hasattr(v, "numpy") else v for k, v in given.items()}
    with pytest.raises(errors, match=message):
        nsa_jax.paged_index_blocks(**arrays)

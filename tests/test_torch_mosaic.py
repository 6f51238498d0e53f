"""Mosaic kernels on torch tensors: parity, operators, streams, graphs.

Without a GPU the kernels run in Pallas' interpreter: what torch computes around them is real.
"""

import dataclasses
import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa_torch
from nsa_torch import (
    Branches,
    NSAConfig,
    plan_runs,
)
from nsa_torch.shared import SHARED
from tests import planned, pretend
from tests.caches import Rows, Sizes, TorchPages, Turn, call_of, check, tables
from tests.devices import BOTH, HOPPER
from tests.limits import forget, set_limits
from tests.oracles.nsa import BRANCHES
from tests.problems import FEW, PAPER, SMALL, TABLE, TINY, problem
from tests.reach import NUMBERS, check_torch
from tests.test_torch_gpu import REACH_ON_GPU
from tests.torch_inputs import check_compiled, inputs, normal, outcome, run, steps


@pytest.fixture
def interpreted(monkeypatch):
    with planned.interpreted(monkeypatch) as ran:
        yield ran


@pytest.fixture
def hopper():
    """The oracle on the CPU, and kernels on the GPU that is there."""
    if not HOPPER:
        pytest.skip("needs compute capability 9.0")
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=BOTH)
def device(request):
    request.getfixturevalue("interpreted" if request.param == "cpu" else "hopper")
    return request.param


HALF = {"dtype": "bfloat16", "gate_dtype": "bfloat16"}

# In the interpreter

# Sizes of `inputs`, with `FEW`; several tests have them, so that kernels are compiled once.
SIZES = 5, 21, 2, 1, 16, 16


@pytest.mark.usefixtures("interpreted")
def test_tokens_that_are_only_compressed_may_lie_anyhow():
    """In place they cannot be read: a copy of them is, as elsewhere they are copied anyway."""
    query, key, value, gates = (x.detach() for x in inputs(*SIZES))
    strided = torch.cat([key, key], dim=-1)[..., : key.shape[-1]]
    assert not strided.is_contiguous()
    one, other = (
        nsa_torch.attention(query, Branches(x, key, key), value, gates, config=FEW)
        for x in (strided, key.clone())
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("interpreted")
def test_keys_beyond_a_length_on_the_host(rows):
    """A call has the result of fewer keys, and gradients of zero beyond; NaN counts nowhere."""
    query, *pair, _ = inputs(*SIZES, B=rows)
    longer = [
        F.pad(x.detach(), (0, 0, 0, 0, 0, 4), value=math.nan).requires_grad_() for x in pair
    ]
    where = {"config": FEW, "kv_len": SIZES[1]}
    lists = steps("reference", query, *pair, **where)["indices"]
    for branch, rest in ("selected", lists), ("sliding", []):
        want = run(branch, "reference", query, *pair, *rest, **where)
        found = run(branch, "mosaic", query, *longer, *rest, **where)
        weights = normal(*want[0].shape), normal(*want[1].shape, dtype=torch.float32)
        wants = torch.autograd.grad(want, (query, *pair), weights)
        grads = torch.autograd.grad(found, (query, *longer), weights)
        short = [grads[0], *(x[:, : SIZES[1]] for x in grads[1:])]
        assert not any(x[:, SIZES[1] :].any() for x in grads[1:])
        torch.testing.assert_close((*found, *short), (*want, *wants), rtol=0.02, atol=0.02)


class Rank:
    """A rank of context parallelism; what the others send is known."""

    def __init__(self, rank, payloads):
        self.rank, self.size, self.payloads, self.sent = rank, len(payloads), payloads, []
        self.group, self.gathered = f"{self.size} ranks, {rank}", []

    def gather(self, x, what):
        self.gathered.append(what)
        assert what in ("keys and values", "the arguments' sizes")  # means need no others
        found = self.payloads if what == "keys and values" else [x] * self.size
        return lambda: torch.stack(found)

    def scatter_sum(self, x, what):
        self.sent.append(x.clone())
        return lambda: x[self.rank]


@pytest.mark.parametrize("ends", [None, [0, 20, 21, 50, 60]], ids=["row", "documents"])
def test_two_ranks_in_one_call_each(ends, interpreted, monkeypatch):
    """Each rank's output, and the sum of their gradients of keys and values, beside the whole row;
    a rank's steps run once, not once a chunk: there is a gap between its queries. Tables of
    metadata for it are made once, and renewed with the others; those of another gap, as the first
    of four ranks has, are others.
    """
    tokens, borders = 64, ends and torch.tensor(ends)
    whole = inputs(tokens, tokens, 8, 1, 16, 16)
    packed = {"config": SMALL, "cu_seqlens": borders}
    weight = normal(1, tokens, 8, 16).detach()
    pair = [nsa_torch.compress(x, **packed).detach() for x in whole[1:3]]
    indices = nsa_torch.select_blocks(whole[0], pair[0], implementation="sdpa", **packed)
    options = packed | {"block_indices": indices}
    want = nsa_torch.attention(*whole, implementation="sdpa", **options)
    wants = torch.autograd.grad(want, whole, weight)

    cut = lambda x, at: x.detach()[:, at].contiguous()

    def ranks_of(size):
        """Where the tokens of each rank are in the row, and the ranks."""
        chunks = torch.arange(tokens).view(2 * size, -1)
        places = [torch.cat([chunks[i], chunks[-1 - i]]) for i in range(size)]
        payloads = [torch.cat([cut(x, at) for x in whole[1:3]], dim=-1)[0] for at in places]
        return places, [Rank(rank, payloads) for rank in range(size)]

    def call(rank, at):
        monkeypatch.setattr(nsa_torch.context, "Ranks", lambda *_: ranks[rank])
        own = [cut(x, at).requires_grad_() for x in whole]
        given = options | {"block_indices": cut(indices, at), "context_mesh": object()}
        return own, nsa_torch.attention(*own, implementation="mosaic", **given)

    made = pretend.watched(monkeypatch, "attached_tables")
    close = functools.partial(torch.testing.assert_close, rtol=3e-2, atol=3e-2)
    places, ranks = ranks_of(2)
    if ends:
        others = torch.tensor([0, 9, 40, 41, 61])
        meta = nsa_torch.varlen_metadata(others, total=tokens, max_seqlen=64, config=SMALL)
        options |= {"cu_seqlens": None, "varlen": meta}
        call(0, places[0])
        meta.update(borders)
    made.clear()
    sums = 0
    for rank, at in enumerate(places):
        interpreted.clear()
        own, out = call(rank, at)
        assert not ends or not made
        names = [kernel.name for kernel in interpreted]
        assert names.count("compress_means") == 1
        found = torch.autograd.grad(out, own, cut(weight, at))
        close(out, want[:, at])
        close(found[0], wants[0][:, at])
        close(found[3], wants[3][:, at])
        sums = sums + ranks[rank].sent[-1]
    for i, x in enumerate(wants[1:3]):
        both = torch.stack([x[0, at] for at in places])
        error = sums[..., 16 * i : 16 * (i + 1)] - both.float()
        assert error.square().mean() < 1e-4 * both.float().square().mean()
    (at, *_), ranks = ranks_of(4)
    interpreted.clear()
    close(call(0, at)[1], want[:, at])
    assert [kernel.name for kernel in interpreted].count("compress_means") == 1


@pytest.mark.parametrize("branch", BRANCHES)
def test_what_nan_reaches(branch, device):
    """Of one token, in both directions, as docs/kernels/numerics.md says."""
    small = dataclasses.replace(TINY, T=24, S=24, config=FEW, blocks="given")
    p = problem(small) if device == "cpu" else problem(REACH_ON_GPU)
    check_torch(p, branch, "mosaic", device, NUMBERS[:: 2 if device == "cpu" else 1])


def check_chunks(sizes, lengths, count, device="cpu"):
    """A chunk of each row on pages; what no query may look at is NaN. Returns the call, and what it
    gave.
    """
    page, batch = sizes.config.select_block, len(lengths)
    width = -(-max(lengths) // page)
    path = TorchPages(sizes, device, "mosaic", pool=batch * width + 3, width=width)
    runs = plan_runs([count * i for i in range(batch + 1)], lengths, page)
    path.attend = functools.partial(path.attend, runs=runs, implementation="mosaic")
    begin = [n - count for n in lengths]
    turns = [Turn([0] * batch, begin, attends=False)] if any(begin) else []
    turns.append(Turn(begin, lengths))
    (out,) = check(path, turns, bound=2e-2)
    return functools.partial(path.attend, path.call), out


def copied_first(monkeypatch):
    pretend.machine(monkeypatch, reads_pages=False)


def test_chunks_on_pages(interpreted, monkeypatch):
    """A row that ends within a page, and one that ends with it; pages in no order. The bits are
    those of copies.
    """
    call, out = check_chunks(Sizes(10, 1, 16, 32, SMALL, separate=True, **HALF), [37, 48], 20)
    (selected,) = (x for x in interpreted if x.name == "selected_forward")
    assert selected.spec.pages == 3
    copied_first(monkeypatch)
    assert (call() == out).all()


@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_invariant_chunks_and_steps_have_the_bits_of_training():
    """Two rows on a cache and on pages. A work item has twelve tokens, whose windows span two
    blocks of keys; with `mosaic`, a chunk that begins within a work item has other bits.
    """
    config = NSAConfig(compress_block=8, compress_stride=4, num_selected=4, window=130)
    sizes = Sizes(16, 1, 64, 64, config, **HALF)
    rows = Rows(sizes, [150, 150])
    names = "query", "selected_key", "selected_value", "gates"
    tokens = [torch.stack([*map(torch.from_numpy, rows.tokens[x])]).bfloat16() for x in names]
    how = {"config": config, "implementation": "invariant"}
    whole = nsa_torch.attention(*tokens, **how)
    with torch.enable_grad():
        query = tokens[0].clone().requires_grad_()
        assert torch.equal(nsa_torch.attention(query, *tokens[1:], **how), whole)

    def part(at):
        """The arguments of the queries at `at`."""
        ends = [at, slice(at.stop), slice(at.stop), at]
        return [x[:, end].contiguous() for x, end in zip(tokens, ends, strict=True)]

    for first, name, equal in ((140, "mosaic", False), (132, "invariant", True)):
        at = slice(first, first + 2)
        out = nsa_torch.attention(*part(at), config=config, implementation=name)
        assert torch.equal(out, whole[:, at]) == equal, name
    cache = nsa_torch.init_cache(2, 192, 1, 64, 64, config=config, dtype=torch.bfloat16)
    used = 0
    for count in (141, 1):
        new = [x[:, used : used + count].contiguous() for x in tokens]
        out, _ = nsa_torch.cached_attention(*new, cache, implementation="invariant")
        assert torch.equal(out, whole[:, used : used + count]), count
        used += count
    path, table = TorchPages(sizes, pool=6, width=3), tables([150, 150], config, 6, 3)
    for begin, end in itertools.pairwise(([0, 0], [133, 60], [134, 63])):  # different lengths
        call = call_of(rows, table, Turn(begin, end), [0, 1])
        out = path.attend(call, new=True, implementation="invariant")
        want = [whole[row, slice(*at)] for row, at in enumerate(zip(begin, end, strict=True))]
        assert (out == torch.cat(want).double().numpy()).all(), end


@pytest.mark.gpu
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("lengths", [[4096 + 70], [3000, 704], [40]], ids=str)
@torch.no_grad()
def test_chunks_on_pages_on_a_gpu(lengths, separate, monkeypatch):
    config = dataclasses.replace(PAPER, num_selected=8)
    sizes = Sizes(32, 2, 128, 128, config, separate=separate, **HALF)
    call, out = check_chunks(sizes, lengths, min(300, *lengths), "cuda")
    copied_first(monkeypatch)
    assert (call() == out).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_without_a_graph_break(device):
    def function(query, key, value, gates):
        out = nsa_torch.attention(query, key, value, gates, config=FEW)
        local = nsa_torch.sliding_attention(query, key, value, config=FEW)[0]
        return out + local

    backend = "aot_eager" if device == "cpu" else "inductor"
    check_compiled(function, inputs(*SIZES, device=device), backend, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("implementation", ["mosaic", "sdpa"])
@pytest.mark.usefixtures("interpreted")
def test_recomputed(implementation, monkeypatch):
    """The same gradients, bit by bit, and no output of a branch is kept; lists of the selection
    are made once forward, and once backward where they are not kept.
    """
    made = pretend.watched(monkeypatch, "lists_of_tiles")
    leaves, results = inputs(*SIZES), []
    for recompute in (False, True):
        saved = []
        options = {"implementation": implementation, "recompute": recompute}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x.shape) or x, lambda x: x
        ):
            out = nsa_torch.attention(*leaves, config=FEW, **options)
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append((out, found, saved.count(out.shape)))
        assert len(made) == (1 + 2 * recompute if implementation == "mosaic" else 0)
    (one, kept, count), (other, again, fewer) = results
    assert count >= fewer + 3
    # Kernels round the sum of the branches after each, unless these are kept.
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True))


# Far blocks and near ones, where a list of more than two blocks is too long.
FAR = NSAConfig(32, 32, 64, num_selected=3, num_local=1, window=20)

# Without a kernel


@pytest.mark.usefixtures("interpreted")
def test_a_tensor_that_cannot_be_read_in_place_is_named():
    query, key, value, gates = inputs(20, 20, 4, 2, 16, 16)
    strided = key.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(NotImplementedError, match=r"mosaic: needs key contiguous, got strid"):
        run("sliding", "mosaic", query, strided, value, config=SMALL)
    plan = nsa_torch.explain(query, Branches(key, key, strided), value, config=SMALL)
    assert {choice.implementation for choice in plan} == {"sdpa"}
    assert "needs key.sliding contiguous" in plan.compressed.refused["mosaic"]
    shifted = torch.cat([gates.flatten(), query.flatten()])[gates.numel() :].view_as(query)
    with pytest.raises(NotImplementedError, match="needs query to start at a multiple of 256"):
        run("sliding", "mosaic", shifted, key, value, config=SMALL)


def test_torch_needs_the_compiler_of_jax_or_kernels_on_disk(monkeypatch):
    missing = "needs a C compiler and the compiler in JAX's CUDA plugin"
    pretend.gpu(monkeypatch)
    for compiler, on_disk in itertools.product((True, False), repeat=2):
        pretend.machine(monkeypatch, can_build=compiler, torch_on_disk=on_disk)
        with FakeTensorMode():
            x = torch.empty(1, 20, 4, 16, dtype=torch.bfloat16, device="cuda:63")
            found = nsa_torch.explain(x, x, x, config=SMALL).selected
        if compiler or on_disk:
            assert found.implementation == "mosaic"
        else:
            assert found.refused["mosaic"].startswith(missing)


# On a Hopper GPU

DELAY = 2_000_000_000  # clock cycles: about a second, longer than any launch


def gpu(function):
    return pytest.mark.gpu(pytest.mark.usefixtures("hopper")(function))


@gpu
def test_the_kernels_are_chosen_on_gpu():
    query, key, value, _ = inputs(20, 20, 4, 2, 16, 16, device="cuda")
    plan = nsa_torch.explain(query, key, value, config=SMALL)
    assert {choice.implementation for choice in plan} == {"mosaic"}


@pytest.fixture(params=TABLE["ways"])
def way(request, monkeypatch):
    """Query, key, value and gates of 1000 tokens, borders, and the options of a call."""
    heads, ends, limits = TABLE["ways"][request.param]
    set_limits(monkeypatch, **limits)
    forget()
    tensors = inputs(1000, 1000, *heads, 64, 64, device="cuda")
    bounds = ends and torch.tensor(ends, device="cuda")
    return tensors, bounds, {"config": FAR, "implementation": "mosaic", "cu_seqlens": bounds}


def with_gradients(tensors, **options):
    """On tensors that may be leaves of a graph."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    return outcome(functools.partial(nsa_torch.attention, **options), leaves)


@gpu
def test_the_current_stream_is_followed(way):
    values, _, options = way
    want = with_gradients(values, **options)
    assert all(torch.isfinite(x).all() for x in want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensors = [torch.zeros_like(x) for x in values]
        torch.cuda._sleep(DELAY)
        for x, value in zip(tensors, values, strict=True):
            x.copy_(value.detach())
        found = with_gradients(tensors, **options)
        assert not stream.query(), "the host waited"
        assert all(map(torch.equal, found, want))


@gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_threads_on_streams_of_their_own(implementation):
    """Lengths change from call to call, and what they share is made by whichever comes first."""
    lengths = 300, 64, 511
    given = {n: inputs(n, n, 8, 2, 64, 32, device="cuda") for n in lengths}
    run = functools.partial(with_gradients, config=FEW, implementation=implementation)
    wanted = {n: run(given[n]) for n in lengths}
    torch.cuda.synchronize()
    forget()
    SHARED.clear()

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(24):
                n = lengths[(i * (number + 1) + number) % 3]
                for x, y in zip(run(given[n]), wanted[n], strict=True):
                    assert torch.equal(x, y), (number, i, n)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("where", ["kv_len", "cu_seqlens", None])
def test_the_host_never_waits(where):
    *tensors, gates = inputs(300, 300, 8, 2, 64, 32, device="cuda")
    at = {"kv_len": [300], "cu_seqlens": [0, 100, 101, 290]}
    options = {where: torch.tensor(at[where], device="cuda")} if where else {}
    for mode in ("default", "error"):  # the first call compiles and loads the kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            found = steps("mosaic", *tensors, FEW, **options)
            loss = sum(found[branch][0].sum() for branch in BRANCHES)
            if where != "kv_len":
                how = options | {"config": FEW, "implementation": "mosaic"}
                loss = loss + nsa_torch.attention(*tensors, gates, **how).sum()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
def test_a_captured_call_is_replayed(way):
    static, bounds, options = way
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(static, **options)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = with_gradients(static, **options)
    for seed, ends in enumerate(([0, 100, 101, 990], [0, 1, 200, 1000])):
        make = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for x in static:
                x.copy_(torch.randn(x.shape, generator=make, device="cuda"))
        if bounds is not None:
            bounds.copy_(torch.tensor(ends))
        graph.replay()
        assert all(map(torch.equal, found, with_gradients(static, **options)))


@gpu
@pytest.mark.parametrize(("heads", "most"), [(32, 1.75), (16, 3.0)])
def test_memory_beside_the_output_is_small(heads, most, monkeypatch):
    """Nothing of the size of `[T, n * l']` for a key, or of `[T, C]` for a head; where tokens
    are gathered (8 heads a group), the walk's output besides, and partial outputs half as large.
    """
    set_limits(monkeypatch, gathered_bytes=1)
    tensors = [x.detach() for x in inputs(8192, 8192, heads, 2, 128, 128, device="cuda")]
    call = functools.partial(nsa_torch.attention, implementation="mosaic")
    call(*tensors)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*tensors)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < most * out.nbytes, f"{peak / out.nbytes:.2f}"


@gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_gradients(recompute):
    """Four tensors like the output: three branches and their sum, of which the branches are gone
    when the query's gradient is made; where branches are computed again, three: their sum, one
    of them, and the gradient.

    Besides them 0.3 GB of partial sums, whatever the shape: as much as the output here.
    """
    options = {"implementation": "mosaic", "recompute": recompute}
    *tensors, gates = inputs(65536, 65536, 16, 1, 128, 128, device="cuda")

    def call():
        out = nsa_torch.attention(*tensors, gates, **options)
        return out, torch.autograd.grad(out, [*tensors, gates], out.detach())

    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = call()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < (4.4 if recompute else 5.2) * out.nbytes, f"{peak / 2**20:.0f} MiB"

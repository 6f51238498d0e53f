"""Packed rows whose metadata is made once a batch (`nsa_torch.varlen_metadata`)."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nsa_torch
from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from nsa_core import debug
from nsa_core.plan.buffers import Launch, Place
from nsa_torch import NSAAttention, batch_tables, mosaic, operators, triton
from nsa_torch.input_modes import PRECOMPRESSED
from nsa_torch.kernel_path import SAVING
from nsa_torch.plans import Planned
from tests import planned
from tests.devices import needs_gpu
from tests.inputs import SMALL
from tests.stand_in_kernels import stand_in
from tests.test_plan import call

PATHS = {"mosaic": mosaic.PATH, "triton": triton.PATH}
T = 90
BATCHES = {
    "documents": [0, 12, 41, 70],
    "empty ones": [0, 0, 33, 33, 33, 90],
    "one token": [0, 1, 2, 60, 61],
    "one": [0, 90],
    "none": [0, 0],
    "full": [0, 10, 20, 30, 40, 50, 60, 70, 90],
}


def borders(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def leaves(seed=0, device="cpu", dtype=torch.float32, heads=4, kv_heads=2, width=16, length=T):
    """Query, key, value, gates."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(1, length, n, width) for n in (heads, kv_heads, kv_heads)]
    shapes += [(1, length, heads, 3)]
    found = [torch.randn(x, generator=make).to(device, dtype) for x in shapes]
    return [x.requires_grad_() for x in found]


def with_gradients(inputs, **options):
    """Output and gradients of `attention`."""
    out = nsa_torch.attention(*inputs, config=options.pop("config", SMALL), **options)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out)
    return [out, *torch.autograd.grad(out, inputs, weight)]


def same(one, two):
    return all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def on_the_cpu(monkeypatch, name):
    """As `planned.on_the_cpu`, of the kernels of a path."""
    monkeypatch.setattr("nsa_torch.triton_ops.launch", stand_in)
    stack = planned.contextlib.ExitStack()
    stack.enter_context(planned.on_the_cpu(monkeypatch, stand_in))
    stack.enter_context(capability.interpreted(name == "mosaic"))
    return stack


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    with on_the_cpu(monkeypatch, request.param):
        yield PATHS[request.param]


# Plans


def test_what_follows_from_the_borders_is_apart(path):
    """No step of a layer reads nothing but what follows from `cu_seqlens`."""
    sizes = 1, T, T, 4, 2, 16, 16, SMALL
    arguments = call(PRECOMPRESSED, sizes, cu_seqlens=borders(BATCHES["documents"]))
    function = path.planned[PRECOMPRESSED, SAVING]
    for plan in function.plans(arguments, torch.device("cpu")):
        fixed = {plan.shared}
        fixed |= {
            n for n, x in enumerate(plan.buffers) if x.place in (Place.CONSTANT, Place.BATCH)
        }
        assert len(plan.batch) > 4
        for step in plan.steps:
            reads = {x.buffer for x in step.reads}
            assert isinstance(step, Launch) or not reads or not reads <= fixed, step.name


@pytest.mark.parametrize("path", ["mosaic"], indirect=True)
def test_made_once_for_all_layers(path, monkeypatch):
    """Of a second layer, its backward pass, and any batch of the same room: nothing is planned; of
    the layer nothing is made but by its kernels' steps; the numbers are those of bare borders.
    """
    planned_calls, inputs = [], leaves(dtype=torch.bfloat16)
    plan = Planned.plan

    def counted(self, *arguments):
        planned_calls.append(self)
        return plan(self, *arguments)

    monkeypatch.setattr(Planned, "plan", counted)
    name = "mosaic"
    meta = nsa_torch.varlen_metadata(
        borders(BATCHES["one"]), total=T, padded=True, max_seqlen=T, config=SMALL
    )
    with_gradients(inputs, varlen=meta, implementation=name)
    known, bares = len(planned_calls), 0
    for numbers in BATCHES.values():
        meta.update(borders(numbers))
        found = with_gradients(inputs, varlen=meta, implementation=name)
        assert same(found, with_gradients(inputs, varlen=meta, implementation=name))
        assert len(planned_calls) == known
        fresh = nsa_torch.varlen_metadata(
            borders(numbers), total=T, padded=True, max_seqlen=T, config=SMALL
        )
        assert same(found, with_gradients(inputs, varlen=fresh, implementation=name))
        assert len(planned_calls) == known
        bare = with_gradients(inputs, cu_seqlens=borders(numbers), implementation=name)
        assert same(found, bare)
        # Plans of bare borders know no longest sequence; they too are alike.
        assert len(planned_calls) == known + (not bares) * 2
        bares += 1
        known = len(planned_calls)


@pytest.mark.parametrize("name", PATHS)
def test_tables_of_a_layer(name):
    """Made before a call, which then makes none; other borders come into the same memory."""
    made = lambda numbers: nsa_torch.varlen_metadata(
        borders(numbers), total=T, padded=True, max_seqlen=T, config=SMALL
    )
    with capability.interpreted(name == "mosaic"):
        layer = {"dtype": torch.bfloat16, "implementation": name}
        tables = lambda meta: meta.tensors(4, 2, 16, **layer)
        meta = made(BATCHES["one"])
        first = tables(meta)
        assert len(first) > 6 and len(meta.tensors(4, 2, 16, **layer, gradients=False)) > 3
        before = [x.clone() for x in first]
        for numbers in BATCHES.values():
            meta.update(borders(numbers))
            again = tables(meta)
            assert [x.data_ptr() for x in again] == [x.data_ptr() for x in first]
            assert same(again, tables(made(numbers)))
        assert not same(before, again)
    with refused("varlen must be made with total, or used before"):
        nsa_torch.varlen_metadata(borders([0, 9]).to("meta"), config=SMALL).tensors(4, 2, 16)
    with refused("implementation must be 'mosaic' or 'triton', got 'sdpa'"):
        made([0, 9]).tensors(4, 2, 16, implementation="sdpa")


def test_memory_of_many_documents():
    """Tables and buffers of a layer, forward and backward, hardly grow while documents have some
    16 tokens on average.
    """

    def bytes_of(sequences, length=4096):
        array = lambda *shape: Array((1, length, *shape), "bfloat16")
        numbers = Array((sequences + 1,), "int32")
        place = operators.arguments(nsa_torch.NSAConfig(), length, numbers, None)
        gates = [array(16)] * 3
        with capability.interpreted(True):
            plans = mosaic.PATH.plans(
                array(16, 64), array(2, 64), array(2, 64), gates, place, True, None
            )
        return sum(x.bytes for plan in plans for x in plan.buffers)

    assert bytes_of(256) < 1.25 * bytes_of(8)


def test_a_gap_has_tables_of_its_own():
    """Of the two chunks of a rank of context parallelism: made once, renewed with the others."""
    meta = nsa_torch.varlen_metadata(
        borders(BATCHES["one"]), total=T, padded=True, config=SMALL
    )
    gap = batch_tables.with_gap(meta.cu_seqlens, 8)
    assert batch_tables.with_gap(meta.cu_seqlens, 8) is gap
    other = batch_tables.with_gap(meta.cu_seqlens, 16)
    known = batch_tables.sizes_of(meta.cu_seqlens)[:2]
    assert [batch_tables.sizes_of(x) for x in (gap, other)] == [(*known, 8), (*known, 16)]
    alone = [batch_tables.of_one(24, size, torch.device("cpu")) for size in (8, 16)]
    assert [batch_tables.sizes_of(x) for x in alone] == [(24, False, 8), (24, False, 16)]
    shifted = lambda ops, ends: [ends + 1]
    (found,) = batch_tables.made(shifted, gap)
    meta.update(borders(BATCHES["documents"]))
    assert batch_tables.made(shifted, gap)[0] is found
    assert torch.equal(found, meta.cu_seqlens + 1)


# All implementations


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "jax"])
def test_the_same_blocks_at_any_place(implementation):
    """Of a document alone, and of the same between others."""

    def chosen(inputs, **packed):
        query, key, *_ = inputs
        packed |= {"config": SMALL}
        compressed = nsa_torch.compress(key, **packed)
        options = packed | {"implementation": implementation}
        return nsa_torch.select_blocks(query, compressed, **options)

    document, before, after = (leaves(x, length=n) for x, n in enumerate((70, 37, 130)))
    alone = chosen(document)
    for parts in [document, after], [before, document], [after, before, document, before]:
        ends = [0, *itertools.accumulate(x[0].shape[1] for x in parts)]
        first = next(a for a, x in zip(ends, parts, strict=False) if x is document)
        row = [torch.cat(x, dim=1) for x in zip(*parts, strict=True)]
        found = chosen(row, varlen=nsa_torch.varlen_metadata(borders(ends), config=SMALL))
        assert torch.equal(found[:, first : first + 70], alone)


OF_BATCHES = [(x, y) for x in ("sdpa", "reference") for y in BATCHES]


@pytest.mark.parametrize(("implementation", "batch"), [*OF_BATCHES, ("jax", "empty ones")])
def test_as_bare_borders(implementation, batch):
    numbers, inputs = borders(BATCHES[batch]), leaves()
    meta = nsa_torch.varlen_metadata(numbers, total=T, config=SMALL)
    found = with_gradients(inputs, varlen=meta, implementation=implementation)
    bare = with_gradients(inputs, cu_seqlens=numbers, implementation=implementation)
    assert same(found, bare) or implementation == "jax"
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(found, bare, strict=True))


def test_every_function_takes_it():
    query, key, value, _ = leaves()
    numbers = borders(BATCHES["documents"])
    options = [{"cu_seqlens": numbers}]
    options += [{"varlen": nsa_torch.varlen_metadata(numbers, total=T, config=SMALL)}]
    found = []
    for packed in options:
        packed |= {"config": SMALL}
        pair = [nsa_torch.compress(x, **packed) for x in (key, value)]
        scored = nsa_torch.select_blocks(query, pair[0], **packed)
        found.append([*pair, scored])
        found[-1] += nsa_torch.compressed_attention(query, *pair, **packed)
        found[-1] += nsa_torch.selected_attention(query, key, value, scored, **packed)
        found[-1] += nsa_torch.sliding_attention(query, key, value, **packed)
        nsa_torch.explain(query, key, value, **packed)
    assert same(*found)


@pytest.mark.parametrize("phi", ["avg", "mlp", "mlp_rope"])
def test_layers(phi):
    """Two of a model, one of them checkpointed, without borders between the calls."""
    sizes = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 10, "num_initial": 1, "num_local": 1}
    torch.manual_seed(0)
    first, second = (NSAAttention(16, 4, 2, 8, 8, phi=phi, **sizes) for _ in range(2))
    x, numbers = torch.randn(1, T, 16, requires_grad=True), borders(BATCHES["documents"])
    weights = [*first.parameters(), *second.parameters()]

    def gradients(**packed):
        run = lambda layer, x: layer(x, **packed)[0]
        y = run(first, x)
        out = checkpoint(run, second, y, use_reentrant=False)
        grads = torch.autograd.grad(out.square().sum(), [x, *weights], allow_unused=True)
        return [out, *(g for g in grads if g is not None)]

    meta = nsa_torch.varlen_metadata(numbers, total=T, config=first.spec.config)
    assert same(gradients(varlen=meta), gradients(cu_seqlens=numbers))


def test_two_at_once_and_copies():
    inputs = leaves()
    some, others = (
        nsa_torch.varlen_metadata(borders(BATCHES[x]), total=T, config=SMALL)
        for x in ("documents", "full")
    )
    first = [with_gradients(inputs, varlen=x) for x in (some, others)]
    assert not same(*first)
    with torch.inference_mode():
        made = nsa_torch.varlen_metadata(borders(BATCHES["full"]), total=T, config=SMALL)
        nsa_torch.attention(*inputs, config=SMALL, varlen=made)
    again = [with_gradients(inputs, varlen=x) for x in (some, others, made)]
    assert same(first[0], again[0]) and same(first[1], again[1]) and same(first[1], again[2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    inputs = leaves()
    meta = nsa_torch.varlen_metadata(borders(BATCHES["documents"]), total=T, config=SMALL)

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(*inputs):
        return nsa_torch.attention(*inputs, config=SMALL, varlen=meta, implementation="sdpa")

    for numbers in BATCHES["documents"], BATCHES["full"]:
        meta = nsa_torch.varlen_metadata(borders(numbers), total=T, padded=True, config=SMALL)
        out = compiled(*inputs)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        want = nsa_torch.attention(
            *inputs, config=SMALL, cu_seqlens=borders(numbers), implementation="sdpa"
        )
        more = torch.autograd.grad(want.square().sum(), inputs)
        for x, y in zip((out, *grads), (want, *more), strict=True):
            assert torch.allclose(x, y, atol=1e-5)


# Bad input


def refused(match, error=ValueError):
    return pytest.raises(error, match=match)


def test_what_contradicts_itself():
    make = lambda numbers, **options: nsa_torch.varlen_metadata(
        torch.tensor(numbers), **{"config": SMALL} | options
    )
    assert (make([0, 9, 20]).total, make([0, 9, 20]).padded) == (20, False)
    assert make([0, 9, 20], total=24).padded and make([0, 3]).max_sequences == 8
    assert make([*range(12)]).max_sequences == 16
    with refused("cu_seqlens must not decrease, got 3 after 9 at index 2"):
        make([0, 9, 3])
    with refused("cu_seqlens must begin with 0, got 1"):
        make([1, 9])
    with refused("cu_seqlens must end with 8, the number of tokens, at most, got 9"):
        make([0, 9], total=8)
    with refused("max_seqlen must be 11 at least, as the longest sequence has, got 10"):
        make([0, 9, 20], max_seqlen=10)
    with refused("cu_seqlens must have max_sequences \\+ 1 = 3 entries at most, got 4"):
        make([0, 9, 20, 30], max_sequences=2)
    with refused("cu_seqlens must end with 24, .* where padded is False, got 20"):
        make([0, 9, 20], total=24, padded=False)
    with refused("cu_seqlens must have num_seqs \\+ 1 >= 2 entries, got 1"):
        make([0])
    with refused("cu_seqlens must have dtype"):
        make([0.0, 1.0])
    for name in ("max_seqlen", "total", "max_sequences"):
        for wrong in (0, -1, True, 2.0, "8"):
            with refused(f"{name} must be an int of at least 1, got {wrong!r}"):
                make([0, 9], **{name: wrong})
    with refused("config must be an NSAConfig, got dict"):
        make([0, 9], config={})


def test_what_does_not_belong_together():
    inputs, numbers = leaves(), torch.tensor(BATCHES["documents"])
    meta = nsa_torch.varlen_metadata(numbers, total=T, config=SMALL)
    call = lambda *inputs, **options: nsa_torch.attention(
        *inputs, **{"config": SMALL, "varlen": meta} | options
    )
    with refused("cu_seqlens must be None where varlen is given, got both"):
        call(*inputs, cu_seqlens=numbers)
    with refused("varlen must be what nsa_torch.varlen_metadata returns, got Tensor"):
        call(*inputs, varlen=numbers)
    with refused("varlen must be made with NSAConfig.*, got one of NSAConfig"):
        call(*inputs, config=nsa_torch.NSAConfig())
    with refused("varlen must be of the 60 tokens of query, got total=90"):
        call(*(x[:, :60] for x in inputs))
    with refused("query must be one row, B=1, where varlen is given, got B=2"):
        call(*(x.expand(2, -1, -1, -1) for x in inputs))
    with refused("varlen must be on the device of query, meta, got one on cpu"):
        call(*(x.to("meta") for x in inputs))
    layer = NSAAttention(16, 4, 2, 8, 8)
    with refused("varlen must be made with"):
        layer(torch.zeros(1, T, 16), varlen=meta)
    with refused("varlen must be None where a cache is given, got both"):
        layer(torch.zeros(1, T, 16), layer.init_cache(1, 100), varlen=meta)
    numbers[1] += 1
    with refused("cu_seqlens must not be written to after varlen was made of them"):
        call(*inputs)
    meta.update(numbers)
    out = call(*inputs)
    meta.update(torch.tensor(BATCHES["full"]))
    with refused("modified by an inplace operation", RuntimeError):
        out.sum().backward()
    with refused("cu_seqlens must have max_sequences"):
        meta.update(torch.arange(10))
    # A refused one has changed nothing.
    assert same([call(*inputs)], [call(*inputs, varlen=None, cu_seqlens=meta.cu_seqlens)])


def test_a_length_is_that_of_the_first_call(monkeypatch):
    """Where the host does not read the borders."""
    monkeypatch.setattr("nsa_torch.checks.is_read", lambda x: False)
    meta = nsa_torch.varlen_metadata(torch.tensor([0, 30, 200]), config=SMALL)
    assert (meta.total, meta.padded, meta.max_seqlen) == (None, True, None)
    inputs = leaves()
    found = with_gradients(inputs, varlen=meta, implementation="sdpa")
    bare = with_gradients(inputs, cu_seqlens=torch.tensor([0, 30, T]), implementation="sdpa")
    assert same(found, bare) and meta.total == T
    with refused("varlen must be of the 80 tokens of query, got total=90"):
        nsa_torch.attention(*(x[:, :80] for x in inputs), config=SMALL, varlen=meta)


def test_a_sequence_that_is_too_long(monkeypatch):
    """All is padding where the host does not read them, a sentence where `debug` does."""
    numbers = torch.tensor([0, 30, T])
    with monkeypatch.context() as patch:
        patch.setattr("nsa_torch.checks.is_read", lambda x: False)
        meta = nsa_torch.varlen_metadata(numbers, max_seqlen=59, total=T, config=SMALL)
        for x in with_gradients(leaves(), varlen=meta, implementation="sdpa"):
            assert not x.any()
        meta.update(torch.tensor([0, 31, T]))
        assert nsa_torch.attention(*leaves(), config=SMALL, varlen=meta).all()
    debug.enable("routing")
    try:
        with refused("max_seqlen must be 60 at least"):
            meta.update(numbers)
    finally:
        debug.enable()


# On a GPU


def on_a_gpu(seed=0, length=640):
    return leaves(seed, "cuda", torch.bfloat16, heads=12, width=64, length=length)


GPU_BATCHES = [0, 130, 131, 520, 600], [0, 0, 40, 40, 640], [0, 640], [*range(0, 633, 79)]
CONFIG = nsa_torch.NSAConfig()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "sdpa"])
def test_no_wait_on_a_gpu(implementation):
    """Numbers of bare borders, from one object and from one each, without a wait."""
    inputs, options = on_a_gpu(), {"config": CONFIG, "implementation": implementation}
    batches = [borders(x).cuda() for x in GPU_BATCHES]
    meta = nsa_torch.varlen_metadata(batches[0], total=640, max_sequences=8, config=CONFIG)
    with_gradients(inputs, varlen=meta, **options)
    for numbers in batches:
        want = with_gradients(inputs, cu_seqlens=numbers, **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            meta.update(numbers)
            fresh = nsa_torch.varlen_metadata(numbers, total=640, config=CONFIG)
            found = [with_gradients(inputs, varlen=x, **options) for x in (meta, fresh)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for each in found:
            if implementation == "sdpa":  # which adds up gradients in any order
                assert all(
                    torch.allclose(x, y, atol=1e-2, rtol=1e-2)
                    for x, y in zip(each, want, strict=True)
                )
            else:
                assert same(each, want)


def near(one, other, most=0.01):
    """Whether the difference is small, root mean square, beside the numbers or beside 0.001."""
    one, other = one.float(), other.float()
    return (one - other).square().mean() <= most**2 * other.square().mean() + 1e-6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_a_million_tokens(implementation):
    """Forward; documents that are longer than 2^16, empty, of one token, and padding."""
    total, numbers = 2**20, [0, 70_001, 70_001, 70_002, 1_000_000, 1_000_900]
    make = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, total, n, 64) for n in (16, 2, 2)] + [(1, total, 16, 3)]
    how = {"device": "cuda", "dtype": torch.bfloat16, "generator": make}
    inputs = [torch.randn(x, **how) for x in shapes]
    packed = {"config": CONFIG, "implementation": implementation}
    meta = nsa_torch.varlen_metadata(
        borders(numbers), total=total, device="cuda", config=CONFIG
    )
    with torch.no_grad():
        out = nsa_torch.attention(*inputs, varlen=meta, **packed)
        assert not out[:, numbers[-1] :].any()
        for first, end in (
            (0, 70_001),
            (70_001, 70_002),
            (70_002, 1_000_000),
            (1_000_000, 1_000_900),
        ):
            alone = nsa_torch.attention(
                *(x[:, first:end].contiguous() for x in inputs), **packed
            )
            assert near(out[:, first:end], alone)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_any_number_of_documents(implementation):
    """Up to one a token, forward and backward, beside `sdpa`; the same room is the same plan."""
    options, length = {"config": CONFIG, "implementation": implementation}, 4096
    inputs = on_a_gpu(length=length)
    for numbers in ([*range(length + 1)], [*range(0, length + 1, 20)], [0, length]):
        meta = nsa_torch.varlen_metadata(
            borders(numbers), total=length, max_sequences=length, device="cuda", config=CONFIG
        )
        packed = {"varlen": meta, **options}
        query, key, *_ = inputs
        compressed = nsa_torch.compress(key, config=CONFIG, varlen=meta)
        packed["block_indices"] = nsa_torch.select_blocks(query, compressed, **packed)
        found = with_gradients(inputs, **packed)
        want = with_gradients(inputs, **packed | {"implementation": "sdpa"})
        assert all(near(x, y, 0.02) for x, y in zip(found, want, strict=True))


ALL = None, 0, 1, 2  # branches: of all together, and of each alone
# Heads, key/value heads, columns, tokens of the document, branches, the numbers of tokens before
# it, and how many of output, dq, dk, dv are the same bits.
SAME_BITS = {
    "mosaic": [
        # Tiles of four tokens: places at multiples of it.
        (64, 4, 128, 2048, ALL, (0, 64, 1040, 2048), 2),
        (64, 4, 128, 2048, (1,), (37, 2047), 2),
        (12, 2, 64, 2048, (1,), (0, 37, 64, 1040, 2047), 4),
    ],
    "triton": [
        (64, 4, 128, 2048, (1,), (0, 37, 64, 2047), 2),
        (12, 2, 64, 2048, (1,), (0, 37, 64, 2047), 2),
        (12, 2, 64, 2048, (1, 2), (0, 64, 2048), 4),
    ],
}
SAME_BITS_CASES = [(name, *case) for name, cases in SAME_BITS.items() for case in cases]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", SAME_BITS_CASES, ids=lambda x: "-".join(map(str, x[:5])))
def test_the_same_bits_at_another_place(case):
    """What docs/packed.md says of a document alone and in a longer row; blocks always."""
    implementation, heads, kv_heads, width, length, branches, places, count = case
    options = {"config": CONFIG, "implementation": implementation}
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width}
    make = lambda seed, n: leaves(seed, "cuda", torch.bfloat16, length=n, **sizes)
    document = make(1, length)

    def found(parts, branch):
        row = [torch.cat(x, dim=1).detach() for x in zip(*parts, strict=True)]
        if branch is not None:
            row[3] = (
                torch.nn.functional.one_hot(torch.tensor(branch), 3)
                .to(row[3])
                .expand_as(row[3])
            )
        ends = [0, *itertools.accumulate(x[0].shape[1] for x in parts)]
        packed = options | {"cu_seqlens": borders(ends).cuda()}
        blocks = nsa_torch.select_blocks(
            row[0],
            nsa_torch.compress(row[1], config=CONFIG, cu_seqlens=packed["cu_seqlens"]),
            **packed,
        )
        row = [x.contiguous().requires_grad_() for x in row]
        out = nsa_torch.attention(*row, **packed)
        weight = torch.linspace(-1, 1, heads * width, device="cuda").view(heads, width).to(out)
        grads = torch.autograd.grad(out, row, weight.expand_as(out))
        return [blocks, out.detach(), *grads[:3]]

    for branch in branches:
        alone = found([document], branch)
        for before in places:
            parts = [make(2, before)] * (before > 0) + [document, make(3, length + 9)]
            other = [x[:, before : before + length] for x in found(parts, branch)]
            assert same(other[: count + 1], alone[: count + 1]), (branch, before)


STREAMS = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_other_documents_at_each_replay(implementation):
    """A training step of two layers as a CUDA graph; the tables are made before the capture, or
    within it.
    """
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "implementation": implementation}
    layers = [NSAAttention(256, 12, 2, 64, 64, **options) for _ in range(2)]
    weights = [x for layer in layers for x in layer.parameters()]
    x = torch.randn(1, 640, 256, device="cuda", dtype=torch.bfloat16)

    def step(**packed):
        y = layers[1](layers[0](x, **packed)[0], **packed)[0]
        grads = torch.autograd.grad(y.float().square().sum(), weights, allow_unused=True)
        # Whoever holds a graph of another stream keeps its leaves' nodes there, and a capture
        # that needs them fails.
        return [y.detach(), *(g for g in grads if g is not None)]

    config = layers[0].spec.config
    batches = [borders(x).cuda() for x in GPU_BATCHES]
    wants = [step(cu_seqlens=numbers) for numbers in batches]
    for warm in (True, False):
        sizes = {"total": 640, "max_sequences": 8, "config": config}
        meta = nsa_torch.varlen_metadata(batches[0], **sizes)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(varlen=meta if warm else nsa_torch.varlen_metadata(batches[0], **sizes))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = step(varlen=meta)
        for numbers, want in zip(batches, wants, strict=True):
            meta.update(numbers)
            graph.replay()
            assert same(found, want)
        assert same(step(varlen=meta), wants[-1])


@pytest.mark.gpu
@needs_gpu
@STREAMS
def test_two_streams():
    inputs = on_a_gpu()
    numbers = borders(GPU_BATCHES[0]).cuda()
    want = with_gradients(inputs, cu_seqlens=numbers, config=CONFIG)
    meta = nsa_torch.varlen_metadata(numbers, total=640, config=CONFIG)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(with_gradients(inputs, varlen=meta, config=CONFIG))
    torch.cuda.synchronize()
    assert all(same(x, want) for x in found)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_on_a_gpu():
    """The metadata of a compiled call is read by its operators, forward and backward."""
    inputs = on_a_gpu()

    @torch.compile(fullgraph=True)
    def compiled(meta, *inputs):
        return nsa_torch.attention(*inputs, config=CONFIG, varlen=meta, implementation="mosaic")

    for numbers in GPU_BATCHES[:2]:
        meta = nsa_torch.varlen_metadata(
            borders(numbers), total=640, device="cuda", config=CONFIG
        )
        out = compiled(meta, *inputs)
        grads = torch.autograd.grad(out.float().square().sum(), inputs)
        want = nsa_torch.attention(
            *inputs, config=CONFIG, cu_seqlens=borders(numbers).cuda(), implementation="mosaic"
        )
        more = torch.autograd.grad(want.float().square().sum(), inputs)
        assert torch.equal(out, want)
        for x, y in zip(grads, more, strict=True):
            assert torch.allclose(x, y, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@needs_gpu
def test_bad_borders_on_a_gpu():
    inputs = on_a_gpu()
    numbers = borders([0, 700, 300, 600]).cuda()
    meta = nsa_torch.varlen_metadata(numbers, total=640, config=CONFIG)
    held = borders([0, 640, 640, 640]).cuda()
    found = with_gradients(inputs, varlen=meta, config=CONFIG)
    assert same(found, with_gradients(inputs, cu_seqlens=held, config=CONFIG))
    numbers = borders([0, 300, 600]).cuda()
    meta = nsa_torch.varlen_metadata(numbers, max_seqlen=299, total=640, config=CONFIG)
    assert not any(x.any() for x in with_gradients(inputs, varlen=meta, config=CONFIG))
    debug.enable("routing")
    try:
        with refused("max_seqlen must be 300 at least"):
            meta.update(numbers)
    finally:
        debug.enable()
    with refused("varlen must be on the device of query, cuda:0, got one on cpu"):
        cpu = nsa_torch.varlen_metadata(borders([0, 640]), config=CONFIG)
        nsa_torch.attention(*inputs, config=CONFIG, varlen=cpu)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda meta: pickle.loads(pickle.dumps(meta))],
    ids=["a copy", "a pickle"],
)
def test_metadata_is_copied_and_pickled(copied, used):
    """As workers of a DataLoader do; a copy has its own memory."""
    numbers = borders(BATCHES["documents"])
    numbers += 0  # its version is not the first
    meta = nsa_torch.varlen_metadata(numbers, total=T, max_sequences=7, config=SMALL)
    inputs = leaves()
    wanted = with_gradients(inputs, varlen=meta)
    if not used:
        meta = nsa_torch.varlen_metadata(numbers, total=T, max_sequences=7, config=SMALL)
    other = copied(meta)
    assert repr(other) == repr(meta) and other.config == meta.config
    assert torch.equal(other.cu_seqlens, meta.cu_seqlens)
    assert same(with_gradients(inputs, varlen=other), wanted)
    other.update(borders([0, 30, 60]))
    assert same(with_gradients(inputs, varlen=meta), wanted)
    assert torch.equal(copy.deepcopy(meta.cu_seqlens), meta.cu_seqlens)
    numbers[1] = 11
    with refused("must not be written to after varlen was made"):
        copied(meta)

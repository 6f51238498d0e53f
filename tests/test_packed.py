"""Packed rows beside their documents alone, and metadata that is made once a batch.

What attention makes of documents is in the table of all paths (`test_parity.py`).
"""

import copy
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_jax.nn
import nsa_torch
from kernels_pallas.mosaic import capability
from kernels_pallas.mosaic.operands import REGISTERS
from nsa_core import debug
from nsa_core.layer import LayerSpec
from nsa_core.plan.buffers import Launch, Memory
from nsa_core.plan.kernels import kernels_of
from nsa_torch import NSAAttention, NSAConfig
from tests import planned, pretend, refusals
from tests.cross_compile import compile_report
from tests.devices import BOTH
from tests.limits import set_limits
from tests.model_sizes import MODELS
from tests.planned import MODES, PATHS, interpret
from tests.problems import SMALL
from tests.refusals import refused
from tests.tables import table
from tests.test_mosaic_compiled import ALLOWED
from tests.test_plan import call
from tests.torch_inputs import outcome
from tests.torch_sizes import Sizes

T = 90
TABLE = table("packed")
BATCHES = TABLE["batches"]
gpu = pytest.mark.gpu


def borders(numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def metadata(numbers, **options):
    options = {"total": T, "config": SMALL} | options
    return nsa_torch.varlen_metadata(borders(numbers), **options)


def leaves(device="cpu", dtype=torch.float32, heads=4, kv_heads=2, width=16, length=T, seed=0):
    """Query, key, value, gates."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(1, length, n, width) for n in (heads, kv_heads, kv_heads)]
    shapes += [(1, length, heads, 3)]
    found = [torch.randn(x, generator=make).to(device, dtype) for x in shapes]
    return [x.requires_grad_() for x in found]


def with_gradients(inputs, **options):
    """Output and gradients of `attention`."""
    return outcome(
        functools.partial(nsa_torch.attention, **{"config": SMALL} | options), inputs
    )


def same(one, two):
    return all(bool((x == y).all()) for x, y in zip(one, two, strict=True))


def calls(inputs, implementation, **packed):
    """By name, each function that takes borders; their results."""
    query, key, value, _ = inputs
    packed = {"config": SMALL} | packed
    config, how = packed["config"], packed | {"implementation": implementation}
    pair = [x[:, : config.num_compressed(query.shape[1])] for x in (key, value)]
    shape = *key.shape[:3], config.num_selected
    chosen = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    chosen[..., 0].zero_()  # no number comes from the host
    api = nsa_torch
    return {
        "attention": lambda: [api.attention(*inputs, **how)],
        "compress": lambda: [api.compress(key, **packed)],
        "scores": lambda: [api.select_blocks(query, pair[0], **how)],
        "compressed": lambda: api.compressed_attention(query, *pair, **how),
        "selected": lambda: api.selected_attention(query, key, value, chosen, **how),
        "sliding": lambda: api.sliding_attention(query, key, value, **how),
    }


def results(found):
    return [x for each in found.values() for x in each()]


# Documents alone


# Implementation, heads and key/value heads.
SELECTING = [(nsa_torch, x, 4, 2) for x in ("sdpa", "reference")] + [(nsa_jax, "xla", 4, 2)]
SELECTING += [(nsa_torch, "mosaic", 20, 1)]


@pytest.fixture
def ran(interpreted, monkeypatch):
    """The kernels that run, interpreted with their race detector."""
    with planned.on_the_cpu(monkeypatch, interpret) as found:
        yield found


@pytest.mark.parametrize(("api", "implementation", "heads", "kv_heads"), SELECTING)
def test_each_document_selects_what_it_selects_alone(
    api, implementation, heads, kv_heads, request
):
    """Bit by bit, at any place."""
    kernels = implementation == "mosaic"
    if kernels:
        request.getfixturevalue("ran")
    config = NSAConfig(8, 4, 16, num_selected=3, num_local=1, window=37)
    lengths, S = (21, 0, 1, 70, 5), 100
    inputs = leaves(heads=heads, kv_heads=kv_heads, length=S)[:2]
    arrays = [x.detach().to(torch.bfloat16 if kernels else torch.float32) for x in inputs]
    if api is nsa_jax:
        arrays = [jnp.array(x.numpy()) for x in arrays]

    def chosen(query, key, lengths, padding=0):
        numbers = borders(np.cumsum([0, *lengths]))
        if api is nsa_jax:
            ids = np.repeat([*range(len(lengths)), -1], [*lengths, padding])
            numbers = jnp.array(ids[None], jnp.int32)
        sizes = {} if api is nsa_jax else {"total": query.shape[1]}
        packed = {"varlen": api.varlen_metadata(numbers, config=config, **sizes)}
        packed |= {"config": config}
        compressed = api.compress(key, **packed)
        return api.select_blocks(query, compressed, **packed, implementation=implementation)

    found = chosen(*arrays, lengths, S - sum(lengths))
    assert (found[:, sum(lengths) :] == -1).all()
    assert found.max() == 4  # of which three are selected
    for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        if length > 1:
            own = [x[:, end - length : end] for x in arrays]
            own = [x.clone() for x in own] if api is nsa_torch else own
            assert (found[:, end - length : end] == chosen(*own, [length])).all()


LAYERS = TABLE["layers"]
COMPRESSION = {"compress_means", "merge_key_gradients"}


def only_packed(layer):
    """The kernels of a training step, for any length, that rows of one sequence do not have, and
    those that make compressed tokens.
    """
    options = {"dtype": "bfloat16", "config": NSAConfig(), "gradients": True, "length": 65536}
    options |= {"compresses": True, "shared": True}
    rows, packed = (
        [x.for_any_length() for x in kernels_of(**LAYERS[layer], **options, packed=x)]
        for x in (False, True)
    )
    both = dict.fromkeys([*packed, *rows])
    return [x for x in both if x not in rows or x.name in COMPRESSION]


def build(layer, index):
    return only_packed(layer)[index]


@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_fit_the_chip(layer):
    count = len(only_packed(layer))
    builders = [(f"{__name__}:build", {"layer": layer, "index": i}) for i in range(count)]
    for report in compile_report(builders):
        # Eight CTAs of those that compress on a multiprocessor: loads under way hide the latency.
        most = REGISTERS // (8 * 128) if report["name"] in COMPRESSION else 255
        assert report["registers"] <= ALLOWED.get(report["name"], most), report
        assert not report["spill_store_bytes"] and not report["remarks"], report


# Metadata


def of_jax():
    """Ids, then query, key, value, gates."""
    inputs = [x.detach().numpy() for x in leaves(length=60)]
    return jnp.array(TABLE["ids"], jnp.int32), [jnp.concatenate([x, -2 * x]) for x in inputs]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_metadata_is_segment_ids(implementation):
    """Where padding is anywhere and an id comes again."""
    ids, inputs = of_jax()
    meta = nsa_jax.varlen_metadata(ids, config=SMALL, max_segments=60, max_seqlen=60)

    @jax.jit
    def run(*inputs, **packed):
        how = {"config": SMALL, "implementation": implementation}
        out, pull = jax.vjp(lambda *x: nsa_jax.attention(*x, **how, **packed), *inputs)
        return [out, *pull(out)]

    assert same(run(*inputs, varlen=meta), run(*inputs, segment_ids=ids))


def test_metadata_of_jax_is_worked_out_once():
    """Where tokens stand, for all layers of a scan, checkpointed or not, forward and backward:
    positions and windows are of one running maximum.
    """
    ids, _ = of_jax()
    spec = LayerSpec(**MODELS["small layer"])
    layer = nsa_jax.nn.NSAAttention(spec, rngs=nnx.Rngs(0))
    y = jnp.ones((2, 60, 16))

    def layers(again, made, ids, x):
        packed = made(ids, layer.spec.config)
        body = lambda x, _: (layer(x, **packed)[0], None)
        found, _ = jax.lax.scan(jax.checkpoint(body) if again else body, x, None, length=3)
        return jnp.square(found).sum()

    once = lambda ids, config: {"varlen": nsa_jax.varlen_metadata(ids, config=config)}
    bare = lambda ids, config: {"segment_ids": ids}
    for again in (False, True):
        steps = (functools.partial(layers, again, made) for made in (once, bare))
        counts = [str(jax.make_jaxpr(jax.grad(x, 1))(ids, y)).count("cummax") for x in steps]
        assert counts[0] == 1 and counts[1] > 3


@pytest.mark.parametrize("name", PATHS)
def test_tables_of_a_layer(name):
    """Made before a call, which then makes none; other borders come into the same memory. No step
    of a layer reads nothing but what follows from borders.
    """
    layer = {"dtype": torch.bfloat16, "implementation": name}
    make = lambda numbers: metadata(numbers, padded=True, max_seqlen=T)
    tables = lambda meta: meta.tensors(4, 2, 16, **layer)
    with capability.interpreted(name == "mosaic"):
        meta = make(BATCHES["one"])
        first = tables(meta)
        assert len(first) > 6 and len(meta.tensors(4, 2, 16, **layer, gradients=False)) > 3
        before = [x.clone() for x in first]
        for numbers in BATCHES.values():
            meta.update(borders(numbers))
            again = tables(meta)
            assert [x.data_ptr() for x in again] == [x.data_ptr() for x in first]
            assert same(again, tables(make(numbers)))
        assert not same(before, again)
        sizes = 1, T, T, 4, 2, 16, 16, SMALL
        arguments = call(MODES["given"], sizes, cu_seqlens=borders(BATCHES["documents"]))
        function = PATHS[name].planned(MODES["given"], "saving")
        plans = function.plans(arguments, torch.device("cpu"))
    for plan in plans:
        of_batch = Memory.CONSTANT, Memory.BATCH
        fixed = {i for i, x in enumerate(plan.buffers) if x.memory in of_batch} | {plan.shared}
        assert len(plan.batch) > 4
        for step in plan.steps:
            reads = {x.buffer for x in step.reads}
            assert isinstance(step, Launch) or not reads or not reads <= fixed, step.name


def test_memory_of_many_documents():
    """Tables and buffers of a layer, forward and backward, hardly grow while documents have some
    16 tokens on average.
    """

    layer = {"heads": 16, "kv_heads": 2, "key_width": 64, "value_width": 64}
    layer |= {"config": NSAConfig(), "packed": True}

    def bytes_of(sequences):
        mode = MODES["shared"]
        given = planned.described(mode, 1, 4096, **layer, sequences=sequences)
        with capability.interpreted(True):
            plans = PATHS["mosaic"].planned(mode, "saving").plans(given, None)
        return sum(x.bytes for plan in plans for x in plan.buffers)

    assert bytes_of(256) < 1.25 * bytes_of(8)


COPIES = {"copy": copy.deepcopy, "pickle": lambda meta: pickle.loads(pickle.dumps(meta))}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", COPIES)
def test_metadata_is_copied_and_pickled(how, used):
    """As workers of a DataLoader do; a copy has its own memory, and so has another beside it, be it
    made in inference mode.
    """
    inputs, numbers = leaves(), borders(BATCHES["documents"])
    numbers += 0  # its version is not the first
    run = lambda meta: with_gradients(inputs, varlen=meta)
    meta = nsa_torch.varlen_metadata(numbers, total=T, max_sequences=7, config=SMALL)
    wanted = with_gradients(inputs, cu_seqlens=numbers)
    if used:
        run(meta)
    with torch.inference_mode():
        full = metadata(BATCHES["full"])
        nsa_torch.attention(*inputs, config=SMALL, varlen=full)
    assert not same(run(full), wanted)
    other = COPIES[how](meta)
    assert repr(other) == repr(meta) and other.config == meta.config
    assert torch.equal(other.cu_seqlens, meta.cu_seqlens)
    assert same(run(other), wanted)
    other.update(borders([0, 30, 60]))
    assert same(run(meta), wanted)
    assert torch.equal(copy.deepcopy(meta.cu_seqlens), meta.cu_seqlens)
    numbers[1] = 11
    with refused("must not be modified after varlen was made"):
        COPIES[how](meta)


COMPILED = [("cpu", "eager", "sdpa"), ("cpu", "aot_eager", "sdpa")]
COMPILED += [pytest.param("cuda", "inductor", "mosaic", marks=gpu)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(("device", "backend", "implementation"), COMPILED)
def test_compiled(device, backend, implementation):
    """The metadata of a compiled call is read by its operators, forward and backward."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = leaves(device, dtype, width=64)
    attend = functools.partial(nsa_torch.attention, config=SMALL, implementation=implementation)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    near = 1e-5 if device == "cpu" else 1e-2
    for numbers in BATCHES["documents"], BATCHES["full"]:
        meta = metadata(numbers, padded=True, device=device)
        found = outcome(functools.partial(compiled, varlen=meta), inputs)
        bounds = borders(numbers, device)
        want = outcome(functools.partial(attend, cu_seqlens=bounds), inputs)
        assert device == "cpu" or torch.equal(found[0], want[0])
        torch.testing.assert_close(found, want, atol=near, rtol=near)


# Bad numbers


BAD = TABLE["bad"]


def held(numbers, device="cpu", total=T):
    """What counts of bad numbers where the host reads none."""
    return borders([0, *np.maximum.accumulate(np.clip(numbers[1:], 0, total))], device)


@pytest.mark.parametrize("name", BAD)
def test_bad_borders(name, monkeypatch):
    """Refused where the host reads them, else counted as those that hold."""
    numbers, message = BAD[name]
    bounds, inputs = borders(numbers), leaves()
    layer = NSAAttention(**MODELS["small layer"])
    checked = calls(inputs, None, cu_seqlens=bounds)
    checked["layer"] = lambda: layer(torch.zeros(1, T, 16), cu_seqlens=bounds)
    for each in (*checked.values(), lambda: metadata(numbers)):
        with refused(f"cu_seqlens {message}"):
            each()
    set_limits(monkeypatch, torch_chunk_bytes=50_000)
    for implementation in ("sdpa", "reference"):
        with torch.no_grad(), Sizes() as ran:
            found = results(calls(inputs, implementation, cu_seqlens=bounds))
        assert not any("_local_scalar_dense" in x for x in ran.names)  # numbers that are read
        right = results(calls(inputs, implementation, cu_seqlens=held(numbers)))
        assert same(found, right)


def test_what_follows_from_borders():
    make = lambda numbers, **how: nsa_torch.varlen_metadata(torch.tensor(numbers), **how)
    assert (make([0, 9, 20]).total, make([0, 9, 20]).padded) == (20, False)
    assert make([0, 9, 20], total=24).padded
    assert [make(x).max_sequences for x in ([0, 3], [*range(12)])] == [8, 16]


def test_what_does_not_belong_together():
    inputs, numbers = leaves(), borders(BATCHES["documents"])
    meta = nsa_torch.varlen_metadata(numbers, total=T, config=SMALL)
    attend = lambda *inputs, **options: nsa_torch.attention(
        *inputs, **{"config": SMALL, "varlen": meta} | options
    )
    layer = NSAAttention(16, 4, 2, 8, 8)
    with refused("varlen must be None if a cache is given, got both"):
        layer(torch.zeros(1, T, 16), layer.init_cache(1, 100), varlen=meta)
    with refused("varlen must have a known total"):
        nsa_torch.varlen_metadata(numbers.to("meta"), config=SMALL).tensors(4, 2, 16)
    for row in refusals.rows("tables of metadata"):
        with row.refused():
            meta.tensors(4, 2, **{"key_width": 16} | row.changes)
    numbers[1] += 1
    with refused("cu_seqlens must not be modified after varlen was made"):
        attend(*inputs)
    meta.update(numbers)
    with refused("cu_seqlens must have max_sequences"):
        meta.update(torch.arange(10))
    # A refused one has changed nothing.
    assert same([attend(*inputs)], [attend(*inputs, varlen=None, cu_seqlens=meta.cu_seqlens)])


def test_what_metadata_of_jax_refuses():
    good = {"segment_ids": np.array(TABLE["ids"], np.int32), "config": SMALL}
    nsa_jax.varlen_metadata(**good, max_segments=4, max_seqlen=30)
    for row in refusals.rows("metadata of JAX"):
        with row.refused():
            nsa_jax.varlen_metadata(**good | row.given("numpy"))


@pytest.mark.parametrize("device", BOTH)
def test_numbers_that_the_host_does_not_read(device, monkeypatch):
    """A length is that of the first call; of a sequence that is too long all is padding, but where
    `debug` reads the numbers.
    """
    inputs, numbers = leaves(device), borders([0, 30, T], device)
    run = lambda **packed: with_gradients(inputs, implementation="sdpa", **packed)
    with monkeypatch.context() as patch:
        if device == "cpu":  # as if they were on a GPU
            pretend.machine(patch, is_read=False)
        meta = nsa_torch.varlen_metadata(numbers, config=SMALL)
        assert (meta.total, meta.padded, meta.max_seqlen) == (None, True, None)
        if device == "cpu":
            assert same(run(varlen=meta), run(cu_seqlens=numbers))
        else:  # torch adds up gradients of gathered keys in any order
            torch.testing.assert_close(run(varlen=meta), run(cu_seqlens=numbers))
        assert meta.total == T
        meta = nsa_torch.varlen_metadata(numbers, max_seqlen=59, total=T, config=SMALL)
        assert not any(x.any() for x in run(varlen=meta))
        meta.update(borders([0, 31, T], device))
        assert run(varlen=meta)[0].all()
    debug.enable("routing")
    try:
        with refused("max_seqlen must be at least 60"):
            meta.update(numbers)
        with refused("must not decrease"):
            run(cu_seqlens=borders(BAD["decreasing"][0], device))
    finally:
        debug.enable()


# On a GPU


CONFIG = NSAConfig()
NUMBERS = TABLE["on a GPU"]


def on_a_gpu(length=640, **sizes):
    return leaves("cuda", torch.bfloat16, length=length, **{"heads": 12, "width": 64} | sizes)


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "fa2", "sdpa", "reference"])
def test_any_numbers_on_a_gpu(implementation):
    """Of bare borders, of one metadata and of one each: outputs and gradients without a wait."""
    kernels = implementation in ("mosaic", "triton")
    total = 640 if kernels else 60  # of which atomics add up gradients in one order
    inputs, draw = on_a_gpu(total), np.random.default_rng(0)
    options = {"config": CONFIG, "implementation": implementation}
    cases = [*NUMBERS, *(x for x, _ in BAD.values())]
    cases += [[0, *draw.integers(-total, 2 * total, 3).tolist()] for _ in range(12)]
    cases += [[0, 2**31 - 1, -(2**31), 60], [0, 60, 0, 60]]
    sizes = {"total": total, "max_sequences": 8, "config": CONFIG}
    meta = nsa_torch.varlen_metadata(borders([0, 60], "cuda"), **sizes)

    def run(**packed):
        found = with_gradients(inputs, **options, **packed)
        with torch.no_grad():
            steps = calls(inputs, implementation, config=CONFIG, **packed)
            return [*found, *results(steps)]

    run(varlen=meta)  # the first calls load kernels
    run(cu_seqlens=borders([0, 60], "cuda"))
    for numbers in cases:
        want = run(cu_seqlens=held(numbers, "cuda", total))
        bounds = borders(numbers, "cuda")
        torch.cuda.set_sync_debug_mode("default" if implementation == "reference" else "error")
        try:
            meta.update(bounds)
            fresh = nsa_torch.varlen_metadata(bounds, **sizes)
            found = [run(cu_seqlens=bounds), run(varlen=meta), run(varlen=fresh)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(same(each, want) for each in found)
        assert not any(x.isposinf().any() for x in want)  # nor NaN, which is not the same


def near(one, other, most=0.01):
    """Whether the difference is small, root mean square, beside the numbers or beside 0.001."""
    one, other = one.float(), other.float()
    return (one - other).square().mean() <= most**2 * other.square().mean() + 1e-6


@gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_a_million_tokens(implementation):
    """Forward; documents that are longer than 2^16, empty, of one token, and padding."""
    total, numbers = 2**20, [0, 70_001, 70_001, 70_002, 1_000_000, 1_000_900]
    make = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, total, n, 64) for n in (16, 2, 2)] + [(1, total, 16, 3)]
    how = {"device": "cuda", "dtype": torch.bfloat16, "generator": make}
    inputs = [torch.randn(x, **how) for x in shapes]
    options = {"config": CONFIG, "implementation": implementation}
    meta = metadata(numbers, total=total, device="cuda", config=CONFIG)
    with torch.no_grad():
        out = nsa_torch.attention(*inputs, varlen=meta, **options)
        assert not out[:, numbers[-1] :].any()
        for first, end in itertools.pairwise(numbers):
            if first < end:
                own = [x[:, first:end].contiguous() for x in inputs]
                assert near(out[:, first:end], nsa_torch.attention(*own, **options))


@gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_any_number_of_documents(implementation):
    """Up to one a token, forward and backward, beside `sdpa`; the same room is the same plan."""
    length, inputs = 4096, on_a_gpu(4096)
    options = {"config": CONFIG, "implementation": implementation}
    for numbers in ([*range(length + 1)], [*range(0, length + 1, 20)], [0, length]):
        sizes = {"total": length, "max_sequences": length, "device": "cuda", "config": CONFIG}
        packed = {"varlen": metadata(numbers, **sizes), **options}
        compressed = nsa_torch.compress(inputs[1], config=CONFIG, varlen=packed["varlen"])
        packed["block_indices"] = nsa_torch.select_blocks(inputs[0], compressed, **packed)
        want = with_gradients(inputs, **packed | {"implementation": "sdpa"})
        pairs = zip(with_gradients(inputs, **packed), want, strict=True)
        assert all(near(x, y, 0.02) for x, y in pairs)


@gpu
@pytest.mark.parametrize("case", TABLE["same bits"], ids=lambda x: "-".join(map(str, x[:5])))
def test_the_same_bits_at_another_place(case):
    """What docs/packed.md says of a document alone and in a longer row; blocks always."""
    implementation, heads, kv_heads, width, branches, places, count = case
    options, length = {"config": CONFIG, "implementation": implementation}, 2048
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width}
    make = lambda seed, n: on_a_gpu(n, seed=seed, **sizes)
    document = make(1, length)

    def found(parts, branch):
        row = [torch.cat(x, dim=1).detach() for x in zip(*parts, strict=True)]
        if branch is not None:
            row[3] = torch.eye(3).to(row[3])[branch].expand_as(row[3])
        ends = [0, *itertools.accumulate(x[0].shape[1] for x in parts)]
        packed = {"config": CONFIG, "cu_seqlens": borders(ends, "cuda")}
        compressed = nsa_torch.compress(row[1], **packed)
        blocks = nsa_torch.select_blocks(row[0], compressed, **packed | options)
        row = [x.contiguous().requires_grad_() for x in row]
        out = nsa_torch.attention(*row, **packed | options)
        weight = torch.linspace(-1, 1, heads * width, device="cuda").view(heads, width).to(out)
        grads = torch.autograd.grad(out, row, weight.expand_as(out))
        return [blocks, out.detach(), *grads[:3]]

    for branch in branches:
        alone = found([document], branch)
        for before in places:
            parts = [make(2, before)] * (before > 0) + [document, make(3, length + 9)]
            other = [x[:, before : before + length] for x in found(parts, branch)]
            assert same(other[: count + 1], alone[: count + 1]), (branch, before)


@gpu
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

    batches = [borders(x, "cuda") for x in NUMBERS]
    wants = [step(cu_seqlens=numbers) for numbers in batches]
    for warm in (True, False):
        sizes = {"total": 640, "max_sequences": 8, "config": layers[0].spec.config}
        meta, other = (nsa_torch.varlen_metadata(batches[0], **sizes) for _ in range(2))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(varlen=meta if warm else other)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = step(varlen=meta)
        for numbers, want in zip(batches, wants, strict=True):
            meta.update(numbers)
            graph.replay()
            assert same(found, want)
        assert same(step(varlen=meta), wants[-1])


@gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_two_streams():
    inputs = on_a_gpu()
    want = with_gradients(inputs, cu_seqlens=borders(NUMBERS[0], "cuda"), config=CONFIG)
    meta = metadata(NUMBERS[0], total=640, device="cuda", config=CONFIG)
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(with_gradients(inputs, varlen=meta, config=CONFIG))
    torch.cuda.synchronize()
    assert all(same(x, want) for x in found)

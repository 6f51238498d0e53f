"""Products in e4m3 (`compute_dtype`): rounding, errors beside float64, blocks, refusals.

The bounds of errors are those of a model that rounds what the kernels round (`fp8_model.py`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

import nsa_jax
import nsa_torch
from bench.judge.parity import assert_parity, check_parity
from kernels_pallas.mosaic import capability
from kernels_pallas.specs import fp8
from nsa_core.config import FLOAT8
from nsa_core.dispatch import Problem
from nsa_core.plan.kernels import kernels_of_layer
from nsa_core.varlen import KeyTiles
from nsa_jax import mosaic
from nsa_torch import Branches, NSAConfig
from tests import fp8_model
from tests.devices import needs_gpu
from tests.inputs import Case as InputCase
from tests.inputs import oracle, problem, selection, yardstick

PAPER = NSAConfig(compute_dtype=FLOAT8)
SMALL = NSAConfig(16, 16, 32, 3, 1, 1, 40, compute_dtype=FLOAT8)
MIDDLE = NSAConfig(num_selected=6, window=200, compute_dtype=FLOAT8)
NUMBER = [8 * (i % 4 // 2) + 2 * (i // 4) + i % 2 for i in range(16)]  # at each place


# Rounding, emulated


def in_order(x):
    """Pairs `[.., n]` as float64 `[.., 2 n]`, as they are counted."""
    codes = np.ascontiguousarray(x).view(np.uint8)
    groups = codes.reshape(*codes.shape[:-1], -1, 16)
    found = np.empty_like(groups)
    found[..., NUMBER] = groups
    return found.reshape(codes.shape).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


ROUNDINGS = {
    "ends in a tile": ((2, 70, 2, 64, 48), (70, 33), None),
    "one key": ((1, 1, 1, 32, 16), (1,), None),
    "more tiles than a warp has": ((1, 300, 1, 96, 128), (300,), None),
    "more tokens than a lane asks for": ((1, 2100, 1, 32, 16), (2100,), None),
    "packed": ((1, 150, 1, 32, 32), (140,), (70, 1, 69)),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounded_tokens(name):
    (batch, count, heads, width, value_width), end, sequences = ROUNDINGS[name]
    rng = np.random.default_rng(0)
    normal = lambda width: rng.normal(size=(batch, count, heads, width))
    key = (normal(width) * np.exp(rng.normal(size=width)) + 3).astype(ml_dtypes.bfloat16)
    value = normal(value_width).astype(ml_dtypes.bfloat16)
    for x, stop in ((x, stop) for x in (key, value) for stop in end):
        x[end.index(stop), stop:] = np.nan  # which no query sees
    end = np.array(end, np.int32)
    tiles, place_of = [], np.arange(count)
    places = -(-count // 64) * 64
    if sequences:
        starts = np.cumsum([0, *sequences])
        units = [-(-n // 64) for n in (*sequences, count - starts[-1])]
        first = [s + 64 * i for s, n in zip(starts, units, strict=True) for i in range(n)]
        stops = [*starts[1:], count]
        last = [stop for stop, n in zip(stops, units, strict=True) for _ in range(n)]
        tiles = [np.array([x], np.int32) for x in KeyTiles(first, last)]
        places = 64 * sum(units)
        begin = 64 * np.cumsum([0, *units[:-1]])
        place_of = np.concatenate(
            [b + np.arange(stop - s) for b, s, stop in zip(begin, starts, stops, strict=True)]
        )
    sizes = batch, count, heads, width, value_width, places, "bfloat16", bool(sequences), True
    spec = fp8.Rounding(*sizes)
    sums = fp8.sum_tokens.__wrapped__(spec)(key, value, end)
    found = fp8.round_tokens.__wrapped__(spec)(key, value, end, *sums, *tiles)
    key8, value8, key_scale, value_scale, mean = map(np.asarray, found)
    tensors = (torch.from_numpy(x.astype(np.float64)) for x in (key, value))
    keys, values, scale = fp8_model.rounded(*tensors, torch.from_numpy(end))
    assert (key_scale == scale[:, 0].numpy()).all()
    there = np.arange(count) < end[:, None]
    got = in_order(key8)[:, place_of][there]
    # The mean in float32 may turn a rounding: to the next number, in few places.
    turned = got != keys.numpy()[there]
    assert turned.mean() < 0.01
    assert np.abs(got - keys.numpy()[there]).max(initial=0) <= 16
    got = in_order(value8).transpose(0, 3, 1, 2) * value_scale[:, None].astype(np.float64)
    assert (got[:, place_of] == values.numpy()).all()
    assert not np.delete(got, place_of, axis=1).any()
    exact = [row[:stop].astype(np.float64).mean(0) for row, stop in zip(key, end, strict=True)]
    np.testing.assert_allclose(mean, np.stack(exact), rtol=1e-5, atol=1e-5)


def test_infinite_tokens_become_nan():
    key = np.ones((1, 64, 1, 32), ml_dtypes.bfloat16)
    key[0, 5, 0, 3] = np.inf
    spec = fp8.Rounding(1, 64, 1, 32, 32, 64, "bfloat16", interpret=True)
    end = np.array([64], np.int32)
    sums = fp8.sum_tokens.__wrapped__(spec)(key, key, end)
    key8, value8, *_ = fp8.round_tokens.__wrapped__(spec)(key, key, end, *sums)
    for x in (in_order(key8)[0, :, 0], in_order(value8)[0, 0].T):
        assert np.isnan(x[5, 3]) and np.isnan(x).sum() == 1


# What it is for, and what refuses it


def test_compute_dtype_is_checked():
    with pytest.raises(ValueError, match=r"compute_dtype must be one of .*, got 'float8_e5m2'"):
        NSAConfig(compute_dtype="float8_e5m2")
    assert PAPER.of_sizes == NSAConfig()


def tensors(T=130, H=16, D=32, Dv=32, device="cpu", dtype=torch.bfloat16, B=1, S=None, Hkv=1):
    make = torch.Generator(device).manual_seed(T + D)
    normal = functools.partial(torch.randn, generator=make, device=device, dtype=dtype)
    S = T if S is None else S
    tokens = normal(B, T, H, D), normal(B, S, Hkv, D) + 2, normal(B, S, Hkv, Dv)
    return *tokens, normal(B, T, H, 3).sigmoid()


def arrays(**sizes):
    """`tensors` of JAX."""
    return [jnp.asarray(x.float().numpy(), jnp.bfloat16) for x in tensors(**sizes)]


def test_other_implementations_refuse():
    options = {"config": PAPER, "implementation": Branches(None, "sdpa", "sdpa")}
    reason = (
        "selected: sdpa: computes in the dtype of the query, got compute_dtype='float8_e4m3'"
    )
    with pytest.raises(NotImplementedError, match=reason):
        nsa_torch.attention(*tensors(), **options)
    options["implementation"] = Branches(None, "xla", "xla")
    with pytest.raises(NotImplementedError, match=reason.replace("sdpa", "xla")):
        nsa_jax.attention(*arrays(), **options)


@pytest.mark.parametrize("framework", [nsa_torch, nsa_jax])
def test_without_a_hopper_gpu_nothing_runs(framework):
    given = tensors() if framework is nsa_torch else arrays()
    message = "no implementation of selected can run this: mosaic: needs a Hopper GPU"
    with pytest.raises(NotImplementedError, match=message):
        framework.attention(*given, config=PAPER)


SHAPES = {
    "D that is a multiple of 32, got 48": {"D": 48},
    "has no gradient: compute under torch.no_grad()": {"requires_grad": True},
    "takes whole sequences, got a cache": {"cached": True},
    "select_block that is a multiple of 32, got 48": {
        "config": NSAConfig(48, 48, 48, compute_dtype=FLOAT8)
    },
}


@pytest.mark.parametrize("reason", SHAPES)
def test_what_kernels_refuse(reason):
    problem = Problem(
        *("torch", "attention", "cuda", "bfloat16", 1, 64, 64, 16, 1, 64, 64, False, PAPER),
        capability=(9, 0),
    )
    assert capability.why_not(problem) is None
    changed = problem._replace(**SHAPES[reason])
    found = capability.why_not(changed)
    assert found is not None and found.startswith("compute_dtype='float8_e4m3' ")
    assert reason in found
    exact = changed._replace(config=changed.config.of_sizes)
    assert reason not in (capability.why_not(exact) or "")


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_caches_and_context_parallelism_refuse():
    sizes = 1, 64, 1, 16, 16
    for framework in (nsa_torch, nsa_jax):
        with pytest.raises(
            NotImplementedError, match="a cache computes in the dtype of the query"
        ):
            framework.init_cache(*sizes, config=PAPER)
        with pytest.raises(
            NotImplementedError, match="a cache computes in the dtype of the query"
        ):
            framework.PagedCache(4, 1, 16, 16, config=PAPER)
    said = "context parallelism computes in the dtype of the query"
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(NotImplementedError, match=said):
            nsa_torch.attention(*tensors(), config=PAPER, context_mesh=mesh)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(NotImplementedError, match=said):
        nsa_jax.attention(*arrays(), config=PAPER, context_axis="ranks")


def test_a_call_of_a_cache_refuses():
    query, key, value, gates = tensors(T=3)
    sizes = 1, 64, 1, 32, 32
    cache = nsa_torch.init_cache(*sizes, config=PAPER.of_sizes, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="a cache computes in the dtype of the query"):
        nsa_torch.cached_attention(query, key, value, gates, cache, config=PAPER)


def test_explain_says_it():
    with capability.interpreted(True):
        found = str(nsa_jax.explain(*arrays(), config=PAPER)).splitlines()
    assert found[:2] == ["compressed: mosaic", "scores: mosaic"]
    assert found[2:4] == [f"{x}: mosaic (in float8_e4m3)" for x in ("selected", "sliding")]
    assert found[4] == "attention: mosaic"


def test_gradients_are_refused_where_jax_asks_for_them():
    query, *rest = arrays()
    run = functools.partial(nsa_jax.attention, config=PAPER, implementation="mosaic")
    with capability.interpreted(True), pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda query: run(query, *rest).astype("float32").sum())(query)


def test_shard_map_over_batch_and_heads():
    """Traced and lowered for GPUs: the interpreter knows one device."""
    config = dataclasses.replace(SMALL, num_selected=4)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, spec = Mesh(devices, ("batch", "heads")), PartitionSpec("batch", None, "heads")

    def attend(query, key, value, gates):
        each = nsa_jax.Branches.each
        compressed = [nsa_jax.compress(x, config=config) for x in (key, value)]
        gates = nsa_jax.Branches(*(gates[..., i] for i in range(3)))
        rest = {"config": config, "kv_len": 40}
        return mosaic.attention(query, each(key), each(value), gates, compressed, None, **rest)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
    traced = jax.jit(sharded).trace(*arrays(T=40, B=2, H=4, Hkv=2))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_kernels_are_prepared_without_gradients():
    heads = {"heads": 64, "kv_heads": 4, "key_width": 128, "value_width": 128}
    layer = heads | {"dtype": "bfloat16", "config": PAPER, "scale": None}
    found = {x.name for x in kernels_of_layer([4096], gradients=False, **layer)}
    assert found >= {"fp8_sums", "fp8_round", "selected_forward", "interval_forward"}
    with pytest.raises(NotImplementedError, match="has no gradient: leave it out to train"):
        kernels_of_layer([4096], gradients=True, **layer)


def test_layers_take_it():
    sizes = {"dim": 32, "n_heads": 16, "n_kv_groups": 1, "d_k": 32, "d_v": 32}
    with pytest.raises(ValueError, match="compute_dtype must be one of"):
        nsa_torch.NSAAttention(**sizes, compute_dtype="float16")
    layer = nsa_torch.NSAAttention(**sizes, compute_dtype=FLOAT8, dtype=torch.bfloat16)
    x = torch.zeros(1, 70, 32, dtype=torch.bfloat16)
    message = "no implementation of selected"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        layer(x)
    layer.compute_dtype = None
    assert layer(x)[0].shape == x.shape
    layer.compute_dtype = FLOAT8
    cache = layer.init_cache(1, 80)
    with torch.no_grad():
        assert layer(x, cache)[0].shape == x.shape  # in 16 bits


# In the interpreter


def outputs_of(jaxpr):
    """The shapes and dtypes that steps give, those within kernels left out."""
    for step in jaxpr.eqns:
        inner = [x for x in step.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        if step.primitive.name == "pallas_call" or not inner:
            yield from (x.aval for x in step.outvars)
        else:
            for x in inner:
                yield from outputs_of(getattr(x, "jaxpr", x))


@pytest.mark.parametrize("branch", ["selected", "sliding"])
@pytest.mark.usefixtures("interpreted")
def test_a_branch(branch):
    """A chunk of a longer row; keys have a mean."""
    p = problem(InputCase(7, 75, 16, 1, 32, 16, 1, SMALL, dtype="bfloat16"))
    key = p.key + 3
    indices = []
    if branch == "selected":
        compressed = nsa_jax.compress(key, config=SMALL)
        indices = [selection(p.query, compressed, config=SMALL, kv_len=75)]
    given, where = (p.query, key, p.value, *indices), {"config": SMALL, "kv_len": 75}
    name = f"{branch}_attention"
    function = functools.partial(getattr(nsa_jax, name), implementation="mosaic", **where)
    is_query = lambda x: x.dtype == "float32" and x.size == p.query.size
    assert not any(map(is_query, outputs_of(jax.make_jaxpr(function)(*given).jaxpr)))
    got = function(*given)
    exact, rough = oracle(name, *given, **where), yardstick(name, *given, **where)
    for part, mine, want, low in zip(("out", "lse"), got, exact, rough, strict=True):
        mine = np.asarray(mine)
        assert_parity(part, mine, want, low, dtype="bfloat16", in_float8=True)
        assert np.abs(mine - want).mean() > 0.3 * np.abs(low - want).mean()  # in 8 bits


# Errors of a branch


@dataclasses.dataclass(frozen=True)
class Case:
    T: int
    S: int
    H: int = 16
    Hkv: int = 1
    D: int = 128
    Dv: int = 128
    B: int = 1
    config: NSAConfig = MIDDLE
    dtype: torch.dtype = torch.bfloat16
    segments: tuple[int, ...] = ()  # lengths of packed sequences; the rest is padding, NaN

    def __str__(self):
        return f"T{self.T}-S{self.S}-G{self.H // self.Hkv}-D{self.D}x{self.Dv}" + (
            "-packed" if self.segments else ""
        )


def draw(case, device):
    """Query, key, value, gates, and `cu_seqlens` or None."""
    sizes = {x: getattr(case, x) for x in ("T", "S", "H", "Hkv", "D", "Dv", "B", "dtype")}
    query, key, value, gates = tensors(**sizes, device=device)
    if not case.segments:
        return (query, key, value, gates), None
    borders = np.cumsum([0, *case.segments])
    for x in (query, key, value, gates):
        x[:, borders[-1] :] = math.nan
    return (query, key, value, gates), torch.tensor(borders, device=device)


def visible(case, indices, device):
    """Which keys the selected and the sliding branch see, `[B, Hkv, T, S]`, and the end of all."""
    segments = case.segments or (case.S,)
    number = torch.full((case.S,), -1, device=device)
    place = torch.full((case.S,), -1, device=device)
    first = 0
    for i, count in enumerate(segments):
        number[first : first + count] = i
        place[first : first + count] = torch.arange(count, device=device)
        first += count
    own, at = number[case.S - case.T :], place[case.S - case.T :]
    seen = (own[:, None] == number) & (own[:, None] >= 0) & (place <= at[:, None])
    sliding = seen & (place > at[:, None] - case.config.window)
    blocks = place.clamp(min=0) // case.config.select_block
    chosen = (indices[..., None] == blocks).any(3).transpose(1, 2) & seen
    end = torch.full((case.B,), first, device=device)
    return {"selected": chosen, "sliding": sliding.expand(chosen.shape)}, end


def error(x, exact):
    """Root of the mean square, and the largest."""
    off = (x.double() - exact).abs()
    return (off**2).mean().sqrt().item(), off.max().item()


def check_branch(case, branch, got, arrays, indices):
    """`got` beside float64, where the model of the kernel has some error too."""
    masks, end = visible(case, indices, got.device)
    real = slice(0, sum(case.segments) or case.T)
    exact, model = (
        fp8_model.attention(*arrays[:3], masks[branch], end, in_fp8=in_fp8)[:, real]
        for in_fp8 in (False, True)
    )
    assert torch.isfinite(got[:, real]).all() and not got[:, real.stop :].any()
    # Tensor cores keep 13 bits of a sum: each of its steps, of 32 keys, loses half of the last.
    # They are those of a tile's list, or window. Then the output is rounded.
    tokens = max(64 // (case.H // case.Hkv), 1)
    keys = case.config.num_selected * case.config.select_block * tokens
    keys = min(case.S, keys if branch == "selected" else case.config.window + 2 * tokens)
    lost = keys / 32 * 2.0**-14 + torch.finfo(case.dtype).eps
    for mine, models, size in zip(
        error(got[:, real], exact), error(model, exact), error(exact, 0), strict=True
    ):
        assert mine <= 1.25 * models + lost * size, (branch, mine, models, size)
    assert error(got[:, real], exact)[0] > 0.3 * error(model, exact)[0] > 0  # it was in 8 bits


def check_attention(case, device="cuda"):
    """Both branches, and that the whole takes the blocks that 16 bits choose."""
    arrays, borders = draw(case, device)
    query, key, value, gates = arrays
    where = {"cu_seqlens": borders}
    exact = {"config": case.config.of_sizes, "implementation": "mosaic"} | where
    compressed = [
        nsa_torch.compress(x, config=case.config.of_sizes, **where) for x in (key, value)
    ]
    place = {} if borders is not None else {"kv_len": case.S}
    indices = nsa_torch.select_blocks(query, compressed[0], **exact, **place)
    run = functools.partial(nsa_torch.attention, query, key, value, config=case.config, **where)
    for i, branch in ((1, "selected"), (2, "sliding")):
        alone = torch.zeros_like(gates)
        alone[..., i] = torch.where(gates[..., i].isnan(), math.nan, 1.0)
        check_branch(case, branch, run(alone, block_indices=indices), arrays, indices)
    assert torch.equal(run(gates), run(gates, block_indices=indices))


ON_GPU = (
    Case(1337, 1337, 32, 2, config=PAPER),
    Case(301, 2049, 32, 2, B=2, config=PAPER, dtype=torch.float16),  # a chunk
    Case(1337, 1337, 32, 2, D=192, config=PAPER),
    Case(777, 777, 8, 2, D=64, Dv=96, B=2),
    Case(500, 500, 8, 1, D=256, Dv=256),
    Case(300, 300, 3, 1, D=96, Dv=48, config=dataclasses.replace(MIDDLE, select_block=128)),
    Case(200, 200, 2, 2, D=32, Dv=32, config=dataclasses.replace(MIDDLE, select_block=32)),
    Case(1, 1),
    Case(1500, 1500, 32, 2, segments=(700, 1, 33, 1, 500, 200)),
)


def test_the_slope_of_errors_follows_the_yardsticks():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=2 * 10**5)
    noise = lambda: rng.normal(size=exact.size) * 0.03
    rough = 0.99 * exact + noise()
    judge = functools.partial(check_parity, "x", dtype="bfloat16", in_float8=True)
    assert judge(0.985 * exact + noise(), exact, rough).ok
    found = judge(0.975 * exact + noise(), exact, rough)
    assert not found.ok and "slope 0.97" in found.reason
    assert not check_parity("x", 0.99 * exact, exact, rough, dtype="bfloat16").ok


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_gpu_branches_and_blocks(case):
    with torch.no_grad():
        check_attention(case)


@pytest.mark.gpu
@needs_gpu
def test_gpu_branches_have_tokens_of_their_own():
    query, key, value, gates = tensors(T=333, D=64, Dv=64, device="cuda")
    others = Branches(key, key.flip(1), key.roll(7, 1)), Branches(value, value.flip(1), value)
    options = {"config": MIDDLE, "implementation": "mosaic"}
    out = nsa_torch.attention(query, *others, gates, **options)
    indices = nsa_torch.select_blocks(
        query, nsa_torch.compress(key, config=MIDDLE), config=MIDDLE.of_sizes
    )
    branches = Branches(
        nsa_torch.compressed_attention(
            query, *(nsa_torch.compress(x, config=MIDDLE) for x in (key, value)), **options
        )[0],
        nsa_torch.selected_attention(
            query, others[0].selected, others[1].selected, indices, **options
        )[0],
        nsa_torch.sliding_attention(query, others[0].sliding, others[1].sliding, **options)[0],
    )
    total = sum(gates[..., i, None].float() * x.float() for i, x in enumerate(branches))
    assert (
        error(out, total.double())[1] <= 4 * torch.finfo(torch.bfloat16).eps * total.abs().max()
    )


@pytest.mark.gpu
@needs_gpu
def test_gpu_log_sum_exp_has_the_mean_of_keys():
    query, key, value, _ = tensors(T=300, D=64, Dv=64, device="cuda")
    options = {"implementation": "mosaic"}
    found, exact = (
        nsa_torch.sliding_attention(query, key, value, config=config, **options)[1]
        for config in (MIDDLE, MIDDLE.of_sizes)
    )
    # Logits of keys and queries that are each rounded by 1 in 16 at most, 64 columns in sum.
    assert (found - exact).abs().max() < 0.5 and (found - exact).abs().mean() < 0.05


@pytest.mark.gpu
@needs_gpu
def test_gpu_refuses_gradients():
    arrays = [x.requires_grad_() for x in tensors(device="cuda")]
    with pytest.raises(
        NotImplementedError, match="compute_dtype='float8_e4m3' has no gradient"
    ):
        nsa_torch.attention(*arrays, config=MIDDLE, implementation="mosaic")
    with torch.no_grad():  # automatic choice
        out = nsa_torch.attention(*arrays, config=MIDDLE)
    assert torch.equal(out, nsa_torch.attention(*(x.detach() for x in arrays), config=MIDDLE))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("segments", [(), (150, 1, 140)], ids=["rows", "packed"])
def test_gpu_jax_is_torch(segments):
    """The same kernels, so the same bits."""
    case = Case(300, 300, 32, 2, segments=segments)
    arrays, borders = draw(case, "cuda")
    with torch.no_grad():
        wanted = nsa_torch.attention(*arrays, config=MIDDLE, cu_seqlens=borders)
    mine = [jax.dlpack.from_dlpack(x.contiguous()) for x in arrays]
    packed = {}
    if segments:
        ids = np.repeat([*range(len(segments)), -1], [*segments, 300 - sum(segments)])
        ids = jnp.asarray(ids[None], jnp.int32)
        packed["varlen"] = nsa_jax.varlen_metadata(ids, config=MIDDLE, max_segments=4)
    options = {"config": MIDDLE, "implementation": "mosaic"} | packed
    out = jax.jit(functools.partial(nsa_jax.attention, **options))(*mine)
    assert torch.equal(torch.from_dlpack(out), wanted)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        jax.grad(lambda q: nsa_jax.attention(q, *mine[1:], **options).astype("float32").sum())(
            mine[0]
        )

"""Calls on a cache that are refused leave it as it was, and say in a sentence what was wrong."""

import functools

import numpy as np
import pytest
import torch

import nsa_torch
from nsa_core.types import Branches
from nsa_torch import NSAConfig, PagedCache, PoolParams, plan_runs
from tests.caches import SMALL

COUNTS, LENGTHS = [0, 1, 22], [5, 21]  # a row of 4 tokens and one more, a prompt of 21
FACTS = (("rope_base", 1e4),)
zeros, int32 = torch.zeros, functools.partial(torch.tensor, dtype=torch.int32)


def cache_of(kind, rows):
    if kind == "between others":
        memory = zeros(8, 2, 16, 2, 8)
        return PagedCache.view(memory[:, 0], memory[:, 1], config=SMALL)
    options = {"config": SMALL, "dtype": torch.float32, "separate": kind == "separate"}
    if rows:
        return nsa_torch.init_cache(rows, 99, 2, 8, 8, **options)
    if kind == "fp8":
        options |= {"dtype": torch.float8_e4m3fn, "compressed_dtype": torch.float32}
    return PagedCache(8, 2, 8, 8, **options, max_rows=4)


def right(name, kind):
    """Arguments of a call that is not refused."""
    count = 2 if name == "a step" else 22
    axes = (2, 11) if name == "cached_attention" else (count,)
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*axes, *shape, generator=make)
    kv = lambda: Branches(*(draw(2, 8) for _ in range(3))) if kind == "separate" else draw(2, 8)
    given = {"key": kv(), "value": kv(), "made_with": FACTS}
    given |= {} if name == "append" else {"query": draw(4, 8), "gates": draw(4, 3)}
    given["implementation"] = None
    if name == "cached_attention":
        return given | {"new_lengths": int32([11, 4]), "compress_params": (None, None)}
    given |= {"page_table": int32([[0, 1, 7], [2, 3, 4]]), "lengths": int32(LENGTHS)}
    given |= {"params": None} | ({"slots": int32([0, 1])} if kind == "fp8" else {})
    if name != "a step":
        given["cu_seqlens_q"] = int32(COUNTS)
    if name == "runs":
        given["runs"] = plan_runs(COUNTS, LENGTHS, 16)
    return given


def wrong_tensors(name, x, gradients):
    """In place of `x`."""
    if isinstance(x, Branches):
        return [
            x._replace(**{field: wrong})
            for field in x._fields
            for wrong in wrong_tensors(name, getattr(x, field), gradients)
        ]
    found = [3, "x", [1], x.numpy(), x[None], torch.cat([x, x[:1]]), x[:0], x.bool()]
    found += [x.to_sparse(), x.to("meta")]
    if x.is_floating_point():
        found += [x[..., :-1], *([x.clone().requires_grad_()] if gradients else [])]
    if name in ("query", "key", "value"):
        found += [None, x.double(), x.half()]
    return found


def wrong_options(name, kind):
    pool = lambda **options: PoolParams(torch.ones(8, 8, **options))
    pairs = [(pool(), x) for x in (pool(device="meta"), PoolParams(zeros(4, 8)), pool().weight)]
    pairs += [(PoolParams(x),) * 2 for x in (pool().weight.to_sparse(), np.ones((8, 8)), None)]
    pairs += [3, "ab", (3, 4), (None,)]
    made_with = [3, None, "ab", ("rope_base",), ((1, 2),), (("a", [1]),), (("rope_base", 2),)]
    made_with += [torch.ones(2), (("a", torch.ones(2)),)]
    wrong = {
        "made_with": made_with,
        "implementation": ["fast", 3, ["sdpa"], "mosaic", "triton"],
    }
    if name == "cached_attention":
        wrong |= {"compress_params": [None, *pairs], "config": [3, NSAConfig()]}
        wrong["new_lengths"] = [int32([12, 3]), int32([-1, 3])]
        return wrong | {"scale": ["x", -1.0]}
    wrong["params"] = [*pairs, (pool(requires_grad=True),) * 2]
    wrong["page_table"] = [int32([[0, 1, 7], [0, 3, 4]]), int32([[0, 1, 7], [2, 99, 4]])]
    wrong["page_table"] *= name != "a step"
    wrong["lengths"] = [int32([5, 9])] * (name != "a step")
    if name != "a step":
        wrong["cu_seqlens_q"] = [int32(x) for x in ([0, 5, 3], [1, 2, 22], [0, 1, 30])]
    if name == "append":
        return wrong
    wrong["implementation"] += ["fa2"] if name != "a step" else []
    wrong["config"], wrong["scale"] = [3, NSAConfig()], ["x", -1.0, float("nan"), True]
    wrong["max_seqlen_q"] = ["x", 0, 2.5, True] + [20] * (name != "a step")
    plan = plan_runs(COUNTS, LENGTHS, 16)
    wrong["runs"] = [[1, 2], 3, "ab", [None], plan[:1], plan[1:], [], plan[::-1]]
    wrong["runs"] += [plan_runs([0, 2, 22], LENGTHS, 16), plan_runs(COUNTS, [1, 21], 16)]
    wrong["runs"] += [[x._replace(columns=1) for x in plan]]
    return wrong


def state(cache):
    as_bytes = lambda x: x.contiguous().view(torch.uint8).numpy().tobytes()
    return {k: as_bytes(x) if torch.is_tensor(x) else x for k, x in vars(cache).items()}


KINDS = ["shared", "separate", "fp8", "between others"]
CALLS = [(x, y) for x in ("append", "paged_attention", "runs", "a step") for y in KINDS]
CALLS += [("cached_attention", x) for x in KINDS[:2]]


@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_a_refused_call_changes_nothing(name, kind):
    """Not a byte, nor what is known of the tokens; each is an error that the page names."""
    given = right(name, kind)
    cache = cache_of(kind, 2 if name == "cached_attention" else 0)
    function = getattr(nsa_torch, name, nsa_torch.paged_attention)
    function(cache=cache, **given)
    wrong = wrong_options(name, kind)
    for argument, x in given.items():
        if isinstance(x, torch.Tensor | Branches):
            more = wrong_tensors(argument, x, name != "cached_attention")
            wrong[argument] = [*wrong.get(argument, ()), *more]
    before = state(cache)
    for argument, values in wrong.items():
        for i, value in enumerate(values):
            with pytest.raises((ValueError, NotImplementedError)):
                function(**{"cache": cache, **given, argument: value})
                pytest.fail(f"{argument}={value!r} was not refused")
            assert state(cache) == before, (argument, i, value)
    function(cache=cache, **given)
    assert before.keys() == state(cache).keys()


def view(key=None, value=None, **options):
    pages = zeros(4, 16, 2, 8)
    pair = pages if key is None else key, pages if value is None else value
    return PagedCache.view(*pair, **{"config": SMALL, **options})


def carve(memory=None, *sizes, **options):
    memory = zeros(9999) if memory is None else memory
    return PagedCache.carve(memory, *(sizes or (2, 8, 6)), **{"config": SMALL, **options})


def attend(**options):
    given = right("paged_attention", "shared") | options
    return nsa_torch.paged_attention(cache=cache_of("shared", 0), **given)


def at_blocks(lists, function=nsa_torch.attention):
    query, key = zeros(1, 20, 4, 8), zeros(1, 20, 2, 8)
    if function is nsa_torch.selected_attention:
        return function(query, key, key, lists, config=SMALL)
    gates = zeros(1, 20, 4, 3)
    return function(query, key, key, gates, config=SMALL, block_indices=lists)


PAGES, CU = zeros(4, 16, 2, 8), torch.tensor([0, 5, 20])
SPARSE = zeros(1, 20, 2, 3, dtype=torch.int32).to_sparse()
FP8 = {"key": PAGES.to(torch.float8_e4m3fn), "value": PAGES.to(torch.float8_e4m3fn)}
FP8 |= {"key_scale": zeros(4, 2, 16), "value_scale": zeros(4, 2, 16)}
MESSAGES = [
    (
        lambda: PagedCache.view(None, PAGES, config=SMALL),
        "key_pages must be a torch tensor, got None",
    ),
    (lambda: view(3), "key_pages must be a torch tensor, got int"),
    (lambda: view([PAGES]), "key_pages must be a torch tensor, got list"),
    (lambda: view(PAGES.numpy()), "key_pages must be a torch tensor, got a numpy.ndarray"),
    (lambda: view(value=PAGES.numpy()), "value_pages must be a torch tensor, got a numpy"),
    (lambda: view(PAGES.to_sparse()), "key_pages must be dense, got torch.sparse_coo"),
    (
        lambda: view(value=PAGES.to("meta")),
        "value_pages must be on the device of key_pages, cpu",
    ),
    (lambda: view(PAGES[:0], PAGES[:0]), "num_pages must be an int >= 1, got 0"),
    (lambda: view(PAGES[..., :0]), "key_width must be an int >= 1, got 0"),
    (lambda: view(value=PAGES[..., :0]), "value_width must be an int >= 1, got 0"),
    (lambda: view(config=None), "config must be an NSAConfig, got NoneType"),
    (lambda: view(separate="yes"), "separate must be a bool, got 'yes'"),
    (
        lambda: view(compressed_key=3, compressed_value=3),
        "compressed_key must be a torch tensor, got",
    ),
    (lambda: view(key_scale=3, value_scale=3), "key_scale must be a torch tensor, got int"),
    (
        lambda: view(**FP8, compressed_dtype="x"),
        "compressed_dtype must be a torch.dtype, got 'x'",
    ),
    (lambda: view(**FP8, max_rows=1.5), "max_rows must be an int >= 1, got 1.5"),
    (lambda: carve(3), "memory must be a torch tensor, got int"),
    (lambda: carve([1.0]), "memory must be a torch tensor, got list"),
    (lambda: carve(np.zeros(999, np.float32)), "memory must be a torch tensor, got a numpy"),
    (lambda: carve(zeros(2, 999)), "memory must have 1 axes, got shape"),
    (lambda: carve(zeros(999).to_sparse()), "memory must be dense, got torch.sparse_coo"),
    (lambda: carve(None, 0, 8, 6), "kv_heads must be an int >= 1, got 0"),
    (lambda: carve(None, 2, 0, 6), "key_width must be an int >= 1, got 0"),
    (lambda: carve(None, 2, 8.5, 6), "key_width must be an int >= 1, got 8.5"),
    (lambda: carve(None, 2, 8, -6), "value_width must be an int >= 1, got -6"),
    (lambda: carve(config={}), "config must be an NSAConfig, got dict"),
    (lambda: carve(separate=1), "separate must be a bool, got 1"),
    (
        lambda: PagedCache(4, 2, 8, 8, dtype="float32"),
        "dtype must be a torch.dtype, got 'float32'",
    ),
    (lambda: PagedCache(4, 2, 8, 8, device="here"), "device must be a device that torch has"),
    (
        lambda: attend(runs=[1, 2]),
        r"runs must be a list of Run, as plan_runs makes it, got \[1",
    ),
    (lambda: attend(runs=3), "runs must be a list of Run, as plan_runs makes it, got 3"),
    (lambda: attend(made_with=("rope",)), "made_with must be pairs of a name and a value"),
    (
        lambda: attend(value=zeros(22, 2, 8).to("meta")),
        "value must be on the device of the cache",
    ),
    (lambda: plan_runs(None, [1], 16), "starts must be a list of ints, got None"),
    (lambda: plan_runs([0, 1], None, 16), "lengths must be a list of ints, got None"),
    (lambda: plan_runs([0, 1.5], [2], 16), r"starts must be a list of ints, got \[0, 1.5\]"),
    (lambda: plan_runs("ab", [2], 16), "starts must be a list of ints, got 'ab'"),
    (lambda: plan_runs([0, 1], [1], 16.5), "page_size must be an int >= 1, got 16.5"),
    (lambda: at_blocks(SPARSE), "block_indices must be dense, got torch.sparse_coo"),
    (
        lambda: at_blocks(SPARSE, nsa_torch.selected_attention),
        "block_indices must be dense, got torch.sparse_coo",
    ),
    (
        lambda: at_blocks(SPARSE.to_dense().numpy()),
        "block_indices must be a torch tensor, got a",
    ),
    (
        lambda: nsa_torch.compress(
            PAGES, PoolParams(torch.ones(8, 8).to_sparse()), config=SMALL
        ),
        "params.weight must be dense, got torch.sparse_coo",
    ),
    (lambda: nsa_torch.varlen_metadata(CU, device="h"), "device must be a device .*, got 'h'"),
    (lambda: nsa_torch.varlen_metadata(CU, device=1.5), "device must be a device .*, got 1.5"),
    (lambda: nsa_torch.varlen_metadata(CU, device=[]), r"device must be a device .*, got \[\]"),
    (
        lambda: nsa_torch.varlen_metadata(CU.to("meta"), device="cpu"),
        "device must be that of cu_seqlens, meta, got cpu",
    ),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES, ids=[x[:60] for _, x in MESSAGES])
def test_messages_name_the_argument(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_metadata_on_another_device_than_the_inputs():
    meta = nsa_torch.varlen_metadata(CU, device="meta", config=SMALL)
    query, key = zeros(1, 20, 4, 8), zeros(1, 20, 2, 8)
    with pytest.raises(
        ValueError, match="varlen must be on the device of query, cpu, got one on"
    ):
        nsa_torch.attention(query, key, key, zeros(1, 20, 4, 3), config=SMALL, varlen=meta)

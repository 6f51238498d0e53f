"""Block attention, an indexer and its loss, in rows and in pages: every path against masks in
float64 (`tests/oracles/blocks.py`); kernels in their interpreters, and on a GPU.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.harness import timing
from bench.judge.parity import assert_parity
from tests import pretend
from tests.interpreted_triton import DEVICE, INTERPRETED
from tests.limits import set_limits
from tests.oracles import blocks as oracle
from tests.oracles.blocks import Case
from tests.tables import table
from tests.test_refusals import World
from tests.test_torch_mosaic import interpreted  # noqa: F401, a fixture
from tests.torch_inputs import check_compiled
from tests.torch_sizes import Sizes

TABLE = table("blocks")
FUNCTIONS, LIMITS = TABLE["functions"], TABLE["limits"]
TOLERANCE = TABLE["tolerance"]


def given_of(function: str, case: Case) -> dict[str, torch.Tensor]:
    """Arrays by their names, with NaN for padding, in float64; in pages those of the valid tokens
    one after the other, between which lie other pages.
    """
    sequence = oracle.places(case)[0]
    found = dict(oracle.tensors(case))
    if function == "indexer_kl":
        found["lse"] = oracle.main(case)[0]
    absent = {"query": oracle.positions(case) < 0, "key": sequence < 0}
    absent |= {"value": absent["key"], "lse": absent["query"], "index_query": absent["query"]}
    entry = case.entry
    absent["index_key"] = absent["key"][
        :, entry - 1 : found["index_key"].shape[1] * entry : entry
    ]
    given = {
        name: found[name].masked_fill(
            absent[name].reshape(absent[name].shape + (1,) * (found[name].ndim - 2)), torch.nan
        )
        for name in FUNCTIONS[function]["arrays"]
    }
    if function != "index_blocks" and not case.every:
        given["block_indices"] = oracle.lists(case)
    if case.page is None:
        return given
    columns = -(-case.S // (case.page * entry))
    make = torch.Generator().manual_seed(5)
    table = torch.randperm(case.B * columns + 2, generator=make)[: case.B * columns]
    table = table.view(case.B, columns)
    for name in [x for x in given if "key" in x or x == "value"]:
        rows = given.pop(name)
        size = case.page if name == "index_key" else case.page * entry
        pages = rows.new_full((case.B * columns + 2, 2, size, *rows.shape[2:]), torch.nan)
        spare = rows.new_full(
            (case.B, columns * size - rows.shape[1], *rows.shape[2:]), torch.nan
        )
        pages[table, 0] = torch.cat([rows, spare], 1).unflatten(1, (columns, size))
        given[f"{name}_pages"] = pages[:, 0]
    given = {
        name: x if name.endswith("pages") else valid_of(case, x) for name, x in given.items()
    }
    lengths = case.lengths_of_rows.int().expand(case.B, 1)[:, 0].contiguous()
    return given | {"page_table": table.int(), "lengths": lengths}


def valid_of(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The rows' valid queries one after the other."""
    counts = case.counts or (case.T,) * case.B
    return torch.cat([row[:count] for row, count in zip(x, counts, strict=True)])


def options_of(function: str, case: Case, of_torch: bool) -> dict[str, Any]:
    """All but the arrays."""
    names = FUNCTIONS[function]["options"]
    found = {x: getattr(case, y) if isinstance(y, str) else y for x, y in names.items()}
    if case.every:
        found["block_size"] = None
    array = torch.tensor if of_torch else functools.partial(jnp.asarray, dtype=jnp.int32)
    if case.page is not None and case.counts:
        return found | {"cu_seqlens_q": array(np.cumsum([0, *case.counts]).astype(np.int32))}
    if case.segments is not None and of_torch:
        return found | {"cu_seqlens": torch.tensor(np.cumsum([0, *case.segments]))}
    if case.segments is not None:
        return found | {"segment_ids": jnp.asarray(oracle.places(case)[0], jnp.int32)}
    lengths = case.lengths or (case.S if function == "index_blocks" else None)
    if case.page is not None or lengths is None:
        return found
    lengths = lengths if isinstance(lengths, int) else array(lengths)
    if of_torch or function != "block_attention":
        return found | {"kv_len": lengths}
    counts = {} if case.counts is None else {"query_seq_lengths": array(case.counts)}
    return found | counts | {"key_value_seq_lengths": lengths}


def name_of(function: str, case: Case) -> str:
    return function if case.page is None else f"paged_{function}"


def on_torch(function: str, case: Case, implementation=None, device="cpu", gradients=None):
    """Results and gradients."""
    dtype, wide = getattr(torch, case.dtype), ("lse",) if case.dtype != "float64" else ()
    given = {}
    for name, x in given_of(function, case).items():
        if name.endswith("pages"):  # still between other pages
            given[name] = x._base.to(device, dtype)[:, 0]
        elif x.is_floating_point():
            given[name] = x.to(device, torch.float32 if name in wide else dtype)
        else:
            given[name] = x.to(device)
    options = options_of(function, case, True) | {"implementation": implementation}
    options |= {k: x.to(device) for k, x in options.items() if isinstance(x, torch.Tensor)}
    call = functools.partial(getattr(nsa_torch, name_of(function, case)), **options)
    if gradients is None:  # which kernels of long lists have not
        gradients = case.page is None and case.n <= 64
    names = FUNCTIONS[function]["leaves"] if gradients else ()
    leaves = [given[name].requires_grad_() for name in names]
    found = call(**given)
    found = found if isinstance(found, tuple) else (found,)
    if function == "indexer_kl":
        with torch.no_grad():
            assert torch.equal(call(**given), found[0])
    if not leaves:
        return found
    moving = slice(case.lse_alone, None)
    wanted = [
        oracle.tensors(case)[name].to(device, x.dtype)
        for name, x in zip(FUNCTIONS[function]["results"], found, strict=True)
    ]
    options = {"materialize_grads": True, "allow_unused": True}
    return *found, *torch.autograd.grad(found[moving], leaves, wanted[moving], **options)


def program_of(function: str, case: Case, implementation=None):
    """Of JAX: results, and gradients by name; with its arguments."""
    given = {
        name: jnp.asarray(x.numpy(), case.dtype if x.is_floating_point() else jnp.int32)
        for name, x in given_of(function, case).items()
    }
    if "lse" in given:
        given["lse"] = given["lse"].astype(jnp.float32)
    options = options_of(function, case, False)
    options |= {"implementation": implementation} if implementation else {}
    moving = {x: given.pop(x) for x in FUNCTIONS[function]["leaves"] if case.page is None}
    call = functools.partial(getattr(nsa_jax, name_of(function, case)), **options)

    @jax.jit
    def whole(moving, given):
        if not moving:
            return call(**given), {}
        found, pull = jax.vjp(lambda moving: call(**moving, **given), moving)
        weights = iter(oracle.tensors(case)[x] for x in FUNCTIONS[function]["results"])
        return found, pull(jax.tree.map(lambda x: jnp.asarray(next(weights), x.dtype), found))[
            0
        ]

    return whole, moving, given


def on_jax(function: str, case: Case, implementation=None):
    whole, moving, given = program_of(function, case, implementation)
    found, grads = whole(moving, given)
    return *(found if isinstance(found, tuple) else (found,)), *map(grads.get, moving)


def of_row(paths: str, **fields) -> tuple[Case, list[str]]:
    """A row of `blocks.yaml`."""
    tuples = {k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()}
    return Case(**tuples), paths.split()


ROWS = {
    function: {name: of_row(**row) for name, row in rows.items()}
    for function, rows in TABLE["rows"].items()
}


def params():
    """Kernels of Triton run in its interpreter, where they run alone, or on a GPU."""
    for function, found in ROWS.items():
        for name, (case, paths) in found.items():
            for path in paths:
                on_gpu, of_triton = function.startswith("gpu "), path.startswith("triton")
                if INTERPRETED and (on_gpu or not of_triton):
                    continue
                marks = [pytest.mark.gpu] if on_gpu or (of_triton and not INTERPRETED) else []
                device = "cuda" if on_gpu else DEVICE if of_triton else "cpu"
                row = function.removeprefix("gpu "), case, path, device
                yield pytest.param(*row, marks=marks, id=f"{function}-{name}-{path}")


@pytest.mark.parametrize(("function", "case", "path", "device"), [*params()])
def test_row(function, case, path, device, monkeypatch, request):
    framework, _, implementation = path.partition("_")
    if framework == "triton":  # of lists with one program, or one for each so many blocks
        set_limits(monkeypatch, index_list_part=int(implementation or 2048))
    elif implementation == "chunks":
        set_limits(monkeypatch, **LIMITS["chunks"])
        implementation = ""
    if framework in ("mosaic", "triton"):
        framework, implementation = "torch", framework
    if INTERPRETED:  # it takes tensors on the CPU
        set_limits(monkeypatch, **LIMITS["interpreter"])
        long = function == "block_attention" and case.n > 64
        names = ["indexer"] if long else ["kernels", "indexer"]
        pretend.machine(monkeypatch, **{f"{x}_why_not": None for x in names})
    elif implementation == "mosaic" and device == "cpu":
        request.getfixturevalue("interpreted")
    if not case.dtype:
        low = implementation == "mosaic" or (device == "cuda" and case.T > 100)
        loss = (framework, function) == ("torch", "indexer_kl") and implementation != "triton"
        case = replace(case, dtype="bfloat16" if low else "float64" if loss else "float32")
    if framework == "jax":
        judge(function, case, on_jax(function, case, implementation or None))
        return
    run = functools.partial(on_torch, function, case, implementation or None, device)
    found = run()
    if function == "block_attention" and case.n > 64:
        with pytest.raises(NotImplementedError, match="triton"):
            run(gradients=True)
    judge(function, case, [x.detach().cpu() for x in found])
    atomic = implementation == "sdpa" and device == "cuda"  # its gradients' sums
    # The interpreter knows one order.
    once_is_enough = function == "index_blocks" or implementation == "mosaic" or INTERPRETED
    if not atomic and (device == "cuda" or not once_is_enough):
        for once, again in zip(found, run(), strict=True):
            assert torch.equal(once, again)


def judge(function: str, case: Case, found) -> None:
    wanted = [*getattr(oracle, function)(case)]
    if case.page is not None:
        wanted = [valid_of(case, x) for x in wanted[: len(found)]]
    kinds = {
        "index_blocks": "int32",
        "indexer_kl": "float64" if case.dtype == "float64" else "float32",
    }
    assert str(found[0].dtype).endswith(kinds.get(function, case.dtype))
    for place, (got, want) in enumerate(zip(found, wanted[: len(found)], strict=True)):
        if function == "index_blocks" and (case.equal or case.T < 300):
            np.testing.assert_array_equal(got, want)
        elif function == "index_blocks":  # some scores are nearly the same
            assert (got == want).all(-1).double().mean() > 0.999
        elif "16" not in case.dtype:
            name = "long_lists" if case.n > 64 else name_of(function, case)
            bound = TOLERANCE[case.dtype][name]
            np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=str(place))
        elif function == "indexer_kl":
            assert (got.double() - want).norm() / want.norm() < 0.02, place
        else:
            rough = oracle.block_attention(case, getattr(torch, case.dtype))[place]
            arrays = [x.double().numpy() for x in (got, want, rough)]
            assert_parity(str(place), *arrays, dtype=jnp.dtype(case.dtype))


def drawn(*shapes):
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make) for shape in shapes]


def layer(nsa, query, key, index_query, index_key):
    """Attention to blocks that an indexer selects, and the indexer's loss."""
    lists = nsa.index_blocks(index_query, index_key, pool=16, num_selected=3)
    out, lse = nsa.block_attention(query, key, key, lists, block_size=16, return_residual=True)
    loss = nsa.indexer_kl(query, key, lse, index_query, index_key, lists, block_size=16)
    return out.sum() + lse.sum() + loss.sum()


def test_an_attention_that_selects_by_an_indexer():
    """The same in both frameworks, and under torch.compile, in one graph."""
    leaves = [x.requires_grad_() for x in drawn(*TABLE["selecting"])]
    whole = functools.partial(layer, nsa_torch)
    check_compiled(whole, leaves, rtol=1e-5, atol=1e-5)
    want = whole(*leaves)
    wanted = torch.autograd.grad(want, leaves)
    arrays = [jnp.asarray(x.detach().numpy()) for x in leaves]
    of_jax = jax.jit(jax.value_and_grad(functools.partial(layer, nsa_jax), range(4)))
    found, grads = of_jax(*arrays)
    assert float(found) == pytest.approx(want.item(), rel=1e-5)
    for mine, plain in zip(grads, wanted, strict=True):
        assert plain.any()
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("function", "name", "count"), TABLE["lowered"])
def test_jax_kernels_are_lowered(function, name, count, monkeypatch):
    """For a GPU that need not be there."""
    on = {"jax_runs_blocks_on": "triton", "jax_runs_lists_on": "triton"}
    pretend.machine(monkeypatch, jax_capability=(9, 0), **on)
    set_limits(monkeypatch, index_loss_tiles=lambda *_: (16, 4, 1))  # compile fast
    given = program_of(function, replace(ROWS[function][name][0], dtype="bfloat16"))
    assert pretend.triton_launches(*given) == count


OF_JAX = World("jax")


def test_a_trace_does_not_read_blocks():
    """One that is named twice is refused by calls that are not traced."""
    twice = {"block_indices": OF_JAX.given("ints 3 -1 1 3 -1 in 2x20x1x5")}
    given = OF_JAX.arguments("block_attention") | twice
    jax.jit(nsa_jax.block_attention, static_argnames="block_size")(**given)


@pytest.mark.parametrize("wanted", ["query", "key_pages", "value_pages"])
def test_pages_have_no_gradient(wanted):
    """It is an error in JAX too, no zeros; what stops it may be in a function that has one."""
    given = OF_JAX.arguments("paged_block_attention")

    def loss(x, stop=lambda x: x):
        return x.sum() + nsa_jax.paged_block_attention(**given | {wanted: stop(x)}).sum()

    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(NotImplementedError, match="paged_block_attention has no gradient"):
            transform(loss)(given[wanted])
    stopped = functools.partial(loss, stop=jax.lax.stop_gradient)
    assert jax.jit(jax.grad(stopped))(given[wanted]).all()


def of_loss():
    """Arguments and options of `indexer_kl`, index queries of which a gradient is wanted."""
    case = replace(ROWS["indexer_kl"]["other_lse"][0], other_lse=False, dtype="float32")
    given = {
        k: x.float() if x.is_floating_point() else x.clone()
        for k, x in given_of("indexer_kl", case).items()
    }
    given["index_query"].requires_grad_()
    return given, options_of("indexer_kl", case, True)


def test_the_main_weights_get_no_gradient():
    given, options = of_loss()
    main = [given[name].requires_grad_() for name in ("query", "key", "lse")]
    found = nsa_torch.indexer_kl(**given, **options)
    found.sum().backward()
    assert given["index_query"].grad is not None and all(x.grad is None for x in main)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        found = nsa_torch.indexer_kl(**given, **options).square().sum()
        torch.autograd.grad(found, given["index_query"], create_graph=True)


@pytest.mark.parametrize("changed", ["query", "key", "lse", "block_indices"])
def test_what_was_written_to_since_has_no_gradient(changed):
    """As of any operator of torch: the backward pass would read other numbers."""
    given, options = of_loss()
    found = nsa_torch.indexer_kl(**given, **options).sum()
    given[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


@pytest.mark.parametrize("sparse", [True, False])
def test_no_array_of_all_pairs(sparse, monkeypatch):
    length = 700
    set_limits(monkeypatch, torch_chunk_bytes=400_000)
    query, key, index_query, index_key = drawn(
        (1, length, 2, 8), (1, length, 1, 8), (1, length, 1, 8), (1, length, 8)
    )
    own = (torch.arange(length) // 8).int()[None, :, None, None]
    lists = dict(block_indices=own, block_size=8) if sparse else {}
    given = torch.zeros(1, length, 2), index_query.requires_grad_(), index_key
    with Sizes() as sizes:
        nsa_torch.indexer_kl(query, key, *given, **lists).sum().backward()
    assert sizes.most < length * length


@pytest.mark.gpu
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

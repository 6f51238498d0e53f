"""Steps that vLLM's CPU build handed to the backend (`vllm_steps.json`), played back here.

The oracle knows blocks by what was written to them: a token's keys, values, queries and gates
follow from its number and position.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from nsa_core.layer import LayerSpec
from nsa_torch import NSAAttention, vllm
from nsa_torch.vllm import step as vllm_step
from tests import vllm_steps
from tests.model_sizes import MODELS
from tests.oracles import nsa
from tests.refusals import refused

STEPS = vllm_steps.read()
BLOCK = vllm_steps.BLOCK
BLOCKS, PADDING = 16, 3  # of a layer's memory; of a graph's size: tokens of no row


def spec_of(heads=4, kv_heads=2, width=8, kv="separate", **sizes):
    sizes = {"n_sel": 3, "w": 40, "d_k": width, "d_v": width, "kv": kv} | sizes
    return LayerSpec(dim=heads * width, n_heads=heads, n_kv_groups=kv_heads, **sizes)


def metadata(step, device="cpu"):
    """As of the engine, whose table is always as wide as its longest context."""
    tensor = lambda x: torch.tensor(x, dtype=torch.int32)
    table, used = (
        torch.zeros(step["num_reqs"], step["columns"]).int(),
        tensor(step["block_table"]),
    )
    table[:, : used.shape[1]] = used
    return SimpleNamespace(
        block_table_tensor=table.to(device),
        seq_lens=tensor(step["seq_lens"]).to(device),
        query_start_loc=tensor(step["query_start_loc"]).to(device),
        query_start_loc_cpu=tensor(step["query_start_loc"]),
        seq_lens_cpu_upper_bound=tensor(step["seq_lens_cpu_upper_bound"]),
        **{name: step[name] for name in vllm_steps.NUMBERS},
    )


def plan(step, device="cpu"):
    return vllm_step.Step.of(metadata(step, device), BLOCK)


def steps_of(case):
    """Steps; of each row the numbers of all its tokens and the positions of the new ones; numbers
    and positions of the new tokens.
    """
    written = torch.zeros(BLOCKS, BLOCK, dtype=torch.int64)
    for step in STEPS[case]:
        token, starts, found = torch.tensor(step["tokens"]), step["query_start_loc"], []
        rows = step["block_table"], step["seq_lens"], itertools.pairwise(starts)
        for table, length, (begin, end) in zip(*rows, strict=False):
            table, new = torch.tensor(table), torch.arange(length - (end - begin), length)
            written[table[new // BLOCK], new % BLOCK] = token[begin:end]
            found.append((table, length, new))
        rows = [(written[table].flatten()[:length], new) for table, length, new in found]
        yield step, rows, token, torch.cat([new for _, new in rows])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", vllm_steps.CASES)
@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_the_engines_steps_give_whole_rows(case, kv, device):
    """In float32; on a GPU in bfloat16, of sizes that kernels have. Memory begins as NaN."""
    gpu = device == "cuda"
    spec = spec_of(32, 2, 64, kv, n_sel=16, w=512) if gpu else spec_of(kv=kv)
    dtype, atol = (torch.bfloat16, 0.05) if gpu else (torch.float32, 1e-5)
    rtol = torch.finfo(dtype).eps  # sums are rounded once
    generator, groups = torch.Generator().manual_seed(3), spec.n_kv_groups
    count = 3 if kv == "separate" else 1
    widths = (spec.n_heads, spec.d_k), (count, groups, spec.d_k), (count, groups, spec.d_v)
    tables = [
        torch.randn(2, 512, *x, generator=generator) for x in (*widths, (spec.n_heads, 3))
    ]

    def drawn(token, position):
        """Query, key, value and gates."""
        return [(one[token] + other[position]).to(dtype) for one, other in tables]

    shape = BLOCKS, groups, BLOCK, vllm_step.elements_of_token(spec)
    memory = torch.full(shape, torch.nan, dtype=dtype, device=device)
    pages, _ = vllm_step.pages_in(memory, spec)
    for step, rows, token, position in steps_of(case):
        extended = (torch.cat([x, x[:1].expand(PADDING)]) for x in (token, position))
        query, key, value, gates = (x.to(device) for x in drawn(*extended))
        out = torch.full_like(query, torch.nan)
        given = query, key.transpose(0, 1), value.transpose(0, 1), gates, out
        plan(step, device).attend(pages, spec, None, *given)
        wanted = []
        for numbers, new in rows:
            of_row = drawn(numbers, torch.arange(len(numbers)))
            query, key, value, gates = (x[None].double() for x in of_row)
            branches = [x.expand(-1, -1, 3, -1, -1).unbind(2) for x in (key, value)]
            last = [x[:, -len(new) :] for x in (query, gates)]
            config = spec.config
            wanted.append(nsa.attention(last[0], *branches, last[1], config=config).out[0])
        found = out[:-PADDING].double().cpu()
        torch.testing.assert_close(found, torch.cat(wanted), rtol=rtol, atol=atol)
        assert (out[-PADDING:] == 0).all()


@pytest.mark.parametrize("case", [x for x in vllm_steps.CASES if x != "guesses"])
@torch.no_grad()
def test_convolved_keys_of_the_engines_steps(case):
    """Those of whole rows. Memory begins as NaN."""
    spec = spec_of(key_taps=4)
    columns = spec.kept_keys[1]
    convolution = NSAAttention(32, 4, 2, 8, 8, key_taps=4).key_conv
    tables = torch.randn(2, 512, columns, generator=torch.Generator().manual_seed(3))
    shape = BLOCKS, spec.n_kv_groups, BLOCK, vllm_step.elements_of_token(spec)
    pages, newest = vllm_step.pages_in(torch.full(shape, torch.nan), spec)
    assert newest.shape == (BLOCKS, 3, columns) and pages.num_pages >= BLOCKS
    for step, rows, token, position in steps_of(case):
        key = torch.cat([tables[0, token] + tables[1, position], tables[0, :PADDING]])
        out = torch.full_like(key, torch.nan)
        plan(step).convolve(convolution, key, newest, BLOCK, out)
        wanted = []
        for numbers, new in rows:
            at = torch.arange(len(numbers))
            whole = tables[0, numbers] + tables[1, at]
            wanted.append(convolution(whole[None], at[None])[0, new])
        torch.testing.assert_close(out[:-PADDING], torch.cat(wanted))
        assert not out[-PADDING:].any()


@pytest.mark.parametrize("count, lengths, alone", MODELS["prefixes"], ids=str)
def test_a_prefix_that_comes_with_the_same_step(count, lengths, alone):
    """Rows of the same few tokens are no launch that appends and attends where one may begin with a
    block that another one fills in it. An engine's arrays have room for more rows, which are not
    looked at.
    """
    rows = lengths.index(None) if None in lengths else len(lengths)
    bounds = [x for x in lengths if x is not None]
    step = {"seq_lens": lengths[:rows], "seq_lens_cpu_upper_bound": bounds, "columns": 8}
    step |= {"query_start_loc": [count * i for i in range(rows + 1)], "num_reqs": rows}
    step |= {"num_actual_tokens": count * rows, "max_query_len": count}
    planned = plan(step | {"block_table": [[1, 2, 3]] * rows})
    assert (planned.runs is not None) == (planned.starts is not None) == alone


@pytest.mark.parametrize("shape", MODELS["no memory of the engine"], ids=str)
def test_memory_that_does_not_fit(shape):
    """Blocks smaller or larger than `select_block`; no room for compressed tokens, where the last
    blocks would be lost; or heads split over devices.
    """
    with refused("2 key/value heads, 64 tokens * at least 49 elements per token, got"):
        vllm_step.pages_in(torch.zeros(4, *shape), spec_of())


def test_all_blocks_of_the_engine_are_there():
    spec = spec_of(width=6)
    memory = torch.zeros(5, 2, BLOCK, vllm_step.elements_of_token(spec))
    pages, _ = vllm_step.pages_in(memory, spec)
    assert 5 <= pages.num_pages <= 6
    assert sum(x.nbytes for x in pages.tensors().values()) <= memory.nbytes


@pytest.mark.parametrize("kv, count", [("shared", 1), ("separate", 2)])
@pytest.mark.parametrize("longest, keys", MODELS["gathered rows"])
def test_what_is_set_aside_for_gathered_rows(kv, count, longest, keys):
    """As much as a step copies: one long row, or several of 2^17 keys together."""
    found = vllm_step.gathered_elements(spec_of(kv=kv), longest)
    assert found == (count * keys + keys // 16) * 2 * 16


def test_an_engine_that_was_not_tried_is_named(monkeypatch):
    registry = SimpleNamespace(register_model=lambda *names: None)
    fake = SimpleNamespace(ModelRegistry=registry, __spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for fake.__version__ in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        vllm.register()
    fake.__version__ = "0.34.0"
    with pytest.warns(
        UserWarning, match=r"tested only with versions 0\.32 and 0\.33, got 0\.34\.0"
    ):
        vllm.register()

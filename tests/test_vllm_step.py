"""Steps that vLLM's CPU build handed to the backend (`vllm_steps.json`), played back here.

The oracle knows blocks by what was written to them: a token's keys, values, queries and gates
follow from its number and position, and attention over whole rows is the dense reference.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

import nsa_torch
from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core.layer import LayerSpec
from nsa_core.types import Branches
from nsa_torch import vllm
from nsa_torch.vllm import step as vllm_step
from tests import vllm_steps

STEPS = vllm_steps.read()
BLOCK = vllm_steps.BLOCK
cases = pytest.mark.parametrize("case", vllm_steps.CASES)


def spec_of(heads=4, kv_heads=2, width=8, kv="separate", **sizes):
    sizes = {"n_sel": 3, "w": 40} | sizes
    dim = heads * width
    return LayerSpec(
        dim=dim, n_heads=heads, n_kv_groups=kv_heads, d_k=width, d_v=width, kv=kv, **sizes
    )


class Layer:
    """A layer's arrays by token and position, and its blocks in memory of NaN."""

    def __init__(self, spec, dtype, device):
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            tables = torch.randn(2, 512, *shape, generator=generator).to(device)
            return lambda token, position: (
                tables[0, token.to(device)] + tables[1, position.to(device)]
            ).to(dtype)

        self.spec, self.blocks = spec, 16
        heads = spec.n_kv_groups
        count = 3 if spec.kv == "separate" else 1
        self.query = draw(spec.n_heads, spec.d_k)
        self.gates = draw(spec.n_heads, 3)
        self.key, self.value = draw(count, heads, spec.d_k), draw(count, heads, spec.d_v)
        shape = self.blocks, heads, BLOCK, vllm_step.elements_of_token(spec)
        memory = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.pages = vllm_step.pages_in(memory, spec)
        self.tokens = torch.zeros(self.blocks, BLOCK, dtype=torch.int64)  # what was written

    def expected(self, table, length, queries):
        """Of the last tokens of a row: float32 `[queries, H, Dv]`."""
        position = torch.arange(length)
        token = self.tokens[torch.tensor(table)].flatten()[:length]
        query, gates, key, value = (
            draw(token, position).float()
            for draw in (self.query, self.gates, self.key, self.value)
        )
        key, value = (
            Branches(*x.unbind(1)) if x.shape[1] == 3 else x[:, 0] for x in (key, value)
        )
        row = lambda x: Branches(*(y[None] for y in x)) if isinstance(x, Branches) else x[None]
        out = nsa_torch.attention(
            query[None, -queries:],
            *(row(x) for x in (key, value)),
            gates[None, -queries:],
            config=self.spec.config,
            implementation="reference",
        )
        return out[0]


def metadata(step, device):
    """As of the engine, whose table is always as wide as its longest context."""
    tensor = lambda x: torch.tensor(x, dtype=torch.int32)
    table = torch.zeros(step["num_reqs"], step["columns"], dtype=torch.int32)
    used = tensor(step["block_table"])
    table[:, : used.shape[1]] = used
    return SimpleNamespace(
        block_table_tensor=table.to(device),
        seq_lens=tensor(step["seq_lens"]).to(device),
        query_start_loc=tensor(step["query_start_loc"]).to(device),
        query_start_loc_cpu=tensor(step["query_start_loc"]),
        seq_lens_cpu_upper_bound=tensor(step["seq_lens_cpu_upper_bound"]),
        **{name: step[name] for name in vllm_steps.NUMBERS},
    )


def play(case, layer, device, atol):
    """Each step of a case through the backend; yields the step as planned."""
    for step in STEPS[case]:
        rows, tokens = [], torch.tensor(step["tokens"])
        bounds = itertools.pairwise(step["query_start_loc"])
        for table, length, (first, last) in zip(
            step["block_table"], step["seq_lens"], bounds, strict=True
        ):
            position = torch.arange(length - (last - first), length)
            block = torch.tensor(table)[position // BLOCK]
            layer.tokens[block, position % BLOCK] = tokens[first:last]
            rows.append((table, length, last - first, position))
        position = torch.cat([x[-1] for x in rows])
        padding = 3  # of a graph's size: tokens of no row
        token = torch.cat([tokens, tokens[:1].expand(padding)])
        position = torch.cat([position, position[:1].expand(padding)])
        query, gates, key, value = (
            draw(token, position) for draw in (layer.query, layer.gates, layer.key, layer.value)
        )
        out = torch.full_like(query, torch.nan)
        planned = vllm_step.Step.of(metadata(step, device), BLOCK)
        given = query, key.transpose(0, 1), value.transpose(0, 1), gates, out
        planned.attend(layer.pages, layer.spec, None, *given)
        want = torch.cat([layer.expected(*x[:3]) for x in rows])
        # Sums are rounded once.
        rtol = float(torch.finfo(out.dtype).eps)
        torch.testing.assert_close(out[:-padding].float(), want, rtol=rtol, atol=atol)
        assert (out[-padding:] == 0).all()
        yield planned


@cases
@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_the_engines_steps_give_whole_rows(case, kv):
    for _ in play(case, Layer(spec_of(kv=kv), torch.float32, "cpu"), "cpu", 1e-5):
        pass


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_the_engines_steps_on_a_gpu(case, kv):
    spec = spec_of(32, 2, 64, kv=kv, n_sel=16, w=512)
    found = list(play(case, Layer(spec, torch.bfloat16, "cuda"), "cuda", 0.05))
    assert len(found) == len(STEPS[case])


def test_what_was_recorded():
    """Chunks, decode beside prompts, cached blocks, blocks that were another's, guesses taken back,
    rows of different few tokens: each is there.
    """
    plans = {
        case: [vllm_step.Step.of(metadata(x, "cpu"), BLOCK) for x in STEPS[case]]
        for case in STEPS
    }
    first = plans["chunks"][1]
    facts = [(run.few, run.whole) for run in first.runs or ()]
    assert facts == [(True, False), (False, False), (False, True)]
    assert plans["chunks"][3].runs is None  # decode alone: nothing but shapes decides
    cached = STEPS["chunks"][4]
    assert cached["block_table"][3][:4] == cached["block_table"][1][:4]
    together = STEPS["together"][0]
    assert together["query_start_loc"] == [0, 2, 42, 172]  # the last fills blocks of the others
    tables = together["block_table"]
    assert tables[0][:2] == tables[2][:2] and tables[1][0] == tables[2][0]
    guesses = [x.runs for x in plans["guesses"] if x.runs is not None]
    uneven = [runs for runs in guesses if len(runs) == 1 and runs[0].few and not runs[0].even]
    assert len(uneven) >= 4 and all(runs[0].queries <= QUERIES for runs in uneven)
    lengths = [
        dict(zip(map(tuple, x["block_table"]), x["seq_lens"], strict=True))
        for x in STEPS["guesses"]
    ]
    falls = [b[k] < a[k] for a, b in itertools.pairwise(lengths) for k in a.keys() & b.keys()]
    assert any(falls)
    counts = [x["num_reqs"] for x in STEPS["preempted"]]
    assert counts[:3] == [1, 2, 2] and counts[-1] == 1
    assert STEPS["preempted"][-1]["block_table"][0][2] in STEPS["preempted"][0]["block_table"][
        0
    ] + [5]


def even_step(count, lengths, rows):
    """The plan of the first `rows` rows, which have `count` tokens each."""
    starts = [count * i for i in range(rows + 1)]
    step = {"seq_lens": lengths[:rows], "seq_lens_cpu_upper_bound": lengths, "columns": 8}
    step |= {"query_start_loc": starts, "block_table": [[1, 2, 3]] * rows, "num_reqs": rows}
    step |= {"num_actual_tokens": count * rows, "max_query_len": count}
    return vllm_step.Step.of(metadata(step, "cpu"), BLOCK)


def test_lengths_behind_the_rows_of_a_step_are_not_looked_at():
    """An engine's arrays have room for more rows; 65 would follow the block that 64 fills."""
    assert even_step(1, [64, 66, 65], 3).runs is not None
    assert even_step(1, [64, 66, 65], 2).runs is None


@pytest.mark.parametrize(
    ("count", "lengths", "alone"),
    [
        (1, [64, 65], True),  # the second's first 64 tokens may be the first's
        (1, [65, 64], True),
        (1, [64, 66], False),
        (1, [63, 64], False),
        (4, [130, 132], True),
        (4, [132, 136], False),
        (4, [0, 4], False),
    ],
    ids=str,
)
def test_a_prefix_that_comes_with_the_same_step(count, lengths, alone):
    """Rows of the same few tokens are no launch that appends and attends where one may begin with a
    block that another one fills in it.
    """
    planned = even_step(count, lengths, len(lengths))
    assert (planned.runs is not None) == (planned.starts is not None) == alone


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 2, 32, 52), "block_size must be select_block=64, got 32: pass --block-size 64"),
        ((4, 2, 128, 52), "block_size must be select_block=64, got 128"),
        ((4, 1, 64, 52), "blocks must have all 2 key/value heads of the layer, got 1"),
        (
            (4, 2, 64, 48),
            "must have 49 elements a token and head, those of three branches and of",
        ),
    ],
)
def test_memory_that_does_not_fit(shape, message):
    """Blocks smaller or larger than `select_block`; heads split over devices; no room for
    compressed tokens, where the last blocks would be lost.
    """
    with pytest.raises(ValueError, match=message):
        vllm_step.pages_in(torch.zeros(shape), spec_of())
    memory = torch.zeros(4, 2, 64, 52).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="of float16, bfloat16, float32: they have no scales"):
        vllm_step.pages_in(memory, spec_of())


def test_all_blocks_of_the_engine_are_there():
    spec = spec_of(width=6)
    memory = torch.zeros(5, 2, BLOCK, vllm_step.elements_of_token(spec))
    pages = vllm_step.pages_in(memory, spec)
    assert 5 <= pages.num_pages <= 6
    assert sum(x.nbytes for x in pages.tensors().values()) <= memory.nbytes


def test_what_is_set_aside_for_gathered_rows():
    """As much as a step copies: one long row, or several of 2^17 keys together."""
    for kv, count in (("shared", 1), ("separate", 2)):
        spec = spec_of(kv=kv)
        for longest, keys in ((1000, 1 << 17), ((1 << 17) + 1, (1 << 17) + 64)):
            found = vllm_step.gathered_elements(spec, longest)
            assert found == (count * keys + keys // 16) * 2 * 16


def test_an_engine_that_was_not_tried_is_named(monkeypatch):
    registry = SimpleNamespace(register_model=lambda *names: None)
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        fake = SimpleNamespace(ModelRegistry=registry, __version__=version, __spec__=object())
        monkeypatch.setitem(sys.modules, "vllm", fake)
        vllm.register()
    fake.__version__ = "0.34.0"
    with pytest.warns(UserWarning, match=r"tried with vLLM 0\.32 and 0\.33, got 0\.34\.0"):
        vllm.register()

"""Which calls give the same bits, and how far other results are from each other.

python -m tests.test_invariance OUT COMMIT    # appends a record per call and implementation
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.harness import records
from tests.devices import needs_gpu
from tests.problems import SMALL

# What docs/kernels/README.md and docs/serving.md promise of kernels.
PROMISED = {"called again", "other rows", "other pages"}
STEP = 8
SCHEDULES = {"cuda": 1000, "cpu": 10}


class Tokens:
    """Tokens of rows by number: a row has the same tokens in every batch.

    On a CPU 72 tokens of small blocks in float32; on a GPU 2048 of the default sizes in bfloat16.
    """

    def __init__(self, device):
        gpu = device == "cuda"
        self.device, self.dtype = device, torch.bfloat16 if gpu else torch.float32
        self.config = nsa_torch.NSAConfig() if gpu else SMALL
        self.length = 2048 if gpu else 72
        H, Hkv, D = (32, 2, 128) if gpu else (4, 2, 16)
        self.shapes = {"query": (H, D), "key": (Hkv, D), "value": (Hkv, D), "gates": (H, 3)}
        self.shapes["do"] = H, D

    @functools.cache  # noqa: B019
    def row(self, number):
        draw = torch.Generator().manual_seed(number)
        drawn = {
            x: torch.randn(self.length, *s, generator=draw) for x, s in self.shapes.items()
        }
        drawn["gates"] = drawn["gates"].sigmoid()
        return {x: y.to(self.device, self.dtype) for x, y in drawn.items()}

    def batch(self, *numbers):
        """`[B, T, ..]` of each name."""
        rows = [self.row(x) for x in numbers]
        return {x: torch.stack([row[x] for row in rows]) for x in self.shapes}

    def packed(self, *numbers):
        """The rows one after the other, each of another length, and where they begin."""
        lengths = [self.length - 5 * x for x in numbers]
        parts = [self.row(x) for x in numbers]
        joined = {
            x: torch.cat([p[x][:n] for p, n in zip(parts, lengths, strict=True)])[None]
            for x in self.shapes
        }
        return joined, np.cumsum([0, *lengths])


def torch_attention(given, implementation, gradients, starts=None):
    leaves = [given[x].clone().requires_grad_(gradients) for x in [*given][:4]]
    if starts is not None:
        starts = torch.tensor(starts, dtype=torch.int32, device=leaves[0].device)
    out = nsa_torch.attention(
        *leaves, config=tokens().config, cu_seqlens=starts, implementation=implementation
    )
    return torch.autograd.grad(out, leaves, given["do"]) if gradients else (out,)


@functools.cache
def jax_program(implementation, gradients, packed):
    def run(segment_ids, do, *leaves):
        attend = functools.partial(
            nsa_jax.attention,
            config=tokens().config,
            segment_ids=segment_ids if packed else None,
            implementation=implementation,
        )
        if not gradients:
            return (attend(*leaves),)
        return jax.vjp(attend, *leaves)[1](do)

    return jax.jit(run)


def jax_attention(given, implementation, gradients, starts=None):
    arrays = {x: jax.dlpack.from_dlpack(y.contiguous()) for x, y in given.items()}
    lengths = [given["query"].shape[1]] if starts is None else np.diff(starts)
    ids = jnp.repeat(jnp.arange(len(lengths)), jnp.asarray(lengths))[None]
    program = jax_program(implementation, gradients, starts is not None)
    found = program(ids, arrays["do"], *[arrays[x] for x in [*arrays][:4]])
    return [torch.from_dlpack(x) for x in found]


def of_rows(run):
    """Pairs of results for row 0 of a batch."""
    yield "called again", run(0, 1, 2), run(0, 1, 2)
    yield "other rows", run(0, 1, 2), run(0, 3, 4)
    yield "alone in the batch", run(0, 1, 2), run(0)


def of_attention(attend, implementation, gradients):
    """Pairs of results by column; row 0 in each."""
    run = lambda *rows: [x[0] for x in attend(tokens().batch(*rows), implementation, gradients)]

    def document(place, *rows):
        given, starts = tokens().packed(*rows)
        at = slice(starts[place], starts[place + 1])
        return [x[0, at] for x in attend(given, implementation, gradients, starts)]

    yield from of_rows(run)
    yield "place in a packed row", document(0, 0, 1, 2), document(1, 1, 0, 2)
    yield "packed or alone", document(1, 1, 0, 2), run(0)
    if attend is torch_attention and not gradients and tokens().device == "cuda":
        given = tokens().batch(0, 1)
        attend(given, implementation, gradients)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend(given, implementation, gradients)
        graph.replay()
        yield "CUDA graph", found, attend(given, implementation, gradients)


class Pages:
    """Rows in pages: a prompt in chunks, and steps of a few queries."""

    def __init__(self, implementation, numbers, pages=None):
        t, self.implementation = tokens(), implementation
        self.rows, per_row = len(numbers), -(-t.length // t.config.select_block)
        shape, dtype = (t.shapes["key"][0], *[t.shapes["key"][1]] * 2), t.dtype
        self.cache = nsa_torch.PagedCache(
            self.rows * per_row, *shape, config=t.config, dtype=dtype, device=t.device
        )
        order = torch.arange(self.rows * per_row)
        if pages is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(pages))
        self.table = order.view(self.rows, per_row).int().to(t.device)
        self.given, self.used = t.batch(*numbers), 0

    def attend(self, count, implementation=None):
        """Of row 0, the output of the next `count` tokens."""
        new = {x: y[:, self.used : self.used + count] for x, y in self.given.items()}
        self.used += count
        flat = {x: y.flatten(0, 1) for x, y in new.items()}
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device=self.table.device)
        lengths = ints([self.used] * self.rows)
        starts = None if count == 1 else ints(range(0, count * self.rows + 1, count))
        nsa_torch.append(
            *(self.cache, flat["key"], flat["value"], self.table, lengths), cu_seqlens_q=starts
        )
        out = nsa_torch.paged_attention(
            *(
                flat["query"].contiguous(),
                flat["gates"].contiguous(),
                self.cache,
                self.table,
                lengths,
                starts,
            ),
            max_seqlen_q=count,
            implementation=implementation or self.implementation,
        )
        return out[:count]

    def step(self, rows, used):
        """Of row 0, the output of one more token of each of `rows`, after `used` tokens."""
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device=self.table.device)
        new = {x: y[rows, used].contiguous() for x, y in self.given.items()}
        table, lengths = self.table[rows], ints(used) + 1
        nsa_torch.append(self.cache, new["key"], new["value"], table, lengths)
        at = new["query"], new["gates"], self.cache, table, lengths
        return nsa_torch.paged_attention(*at, implementation=self.implementation)[rows.index(0)]

    def steps(self, *counts):
        """Of the last tokens, after a prompt."""
        self.attend(tokens().length - STEP, "gathered")
        return [torch.cat([self.attend(x) for x in counts])]


def of_pages(implementation):
    steps = lambda *rows, pages=None: Pages(implementation, rows, pages).steps(*[1] * STEP)
    yield from of_rows(steps)
    yield "1 or 8 queries", steps(0), Pages(implementation, [0]).steps(STEP)
    yield "other pages", steps(0), steps(0, pages=5)


def of_schedules(implementation):
    """Row 0 alone, and in steps that other rows join and leave, in any order and of any lengths,
    as in a server.
    """
    pages, random = Pages(implementation, range(8)), np.random.default_rng(0)
    begin = tokens().length - STEP
    pages.attend(begin, "gathered")
    alone = lambda: torch.stack([pages.step([0], [begin + i]) for i in range(STEP)])

    def schedule():
        used, found = [begin, *random.integers(begin // 2, begin, pages.rows - 1)], []
        for _ in range(STEP):
            others = random.permutation(np.arange(1, pages.rows))[: random.integers(pages.rows)]
            rows = random.permutation([0, *others]).tolist()
            found.append(pages.step(rows, [int(used[row]) for row in rows]))
            for row in rows:
                used[row] += 1
        return torch.stack(found)

    yield "called again", [alone()], [alone()]
    count = SCHEDULES[tokens().device]
    yield "schedules", [schedule() for _ in range(count)], [alone()] * count


def of_prompt(implementation):
    """Row 0 by chunks, which only gathered pages serve, beside `attention` of the whole. Both
    choose their kernels.
    """
    if implementation != "gathered":
        raise NotImplementedError(f"chunks of a prompt are gathered, got {implementation}")
    chunk = tokens().length // 4

    def chunks(*rows):
        pages = Pages("gathered", rows)
        return [torch.cat([pages.attend(chunk) for _ in range(4)])]

    yield from of_rows(chunks)
    whole = torch_attention(tokens().batch(0), None, False)
    yield "chunks or whole", chunks(0), [x[0] for x in whole]


def of_training(implementation):
    """Row 0 from chunks of a prompt and single tokens, beside the forward pass of training.
    Only `invariant` runs chunks itself.
    """
    given, count = tokens().batch(0), tokens().length
    leaves = [given[x].clone().requires_grad_() for x in [*given][:4]]
    how = {"config": tokens().config, "implementation": implementation}
    with torch.enable_grad():
        whole = nsa_torch.attention(*leaves, **how).detach()[0]
    named = implementation if implementation == "invariant" else "gathered"

    def served():
        pages, first = Pages(implementation, [0, 1]), count - count // 3 - STEP
        chunks = [pages.attend(x, named) for x in (first, count // 3)]
        return [torch.cat([*chunks, *(pages.attend(1) for _ in range(STEP))])]

    yield "called again", served(), served()
    yield "training", served(), [whole]


def of_blocks(implementation, gradients):
    t = tokens()

    def run(*rows):
        given = t.batch(*rows)
        leaves = [given[x].clone().requires_grad_(gradients) for x in ("query", "key", "value")]
        own = torch.arange(t.length, device=t.device) // t.config.select_block
        blocks = torch.stack([own, torch.where(own > 0, 0, -1)], -1).int()
        blocks = (
            blocks[None, :, None].expand(len(rows), -1, t.shapes["key"][0], -1).contiguous()
        )
        out = nsa_torch.block_attention(
            *leaves, blocks, block_size=t.config.select_block, implementation=implementation
        )
        if gradients:
            return [x[0] for x in torch.autograd.grad(out, leaves, given["do"])]
        return [out[0]]

    yield from of_rows(run)


CALLS = {
    "torch `attention`": lambda name: of_attention(torch_attention, name, False),
    "torch `attention`, gradients": lambda name: of_attention(torch_attention, name, True),
    "JAX `attention`": lambda name: of_attention(jax_attention, name, False),
    "JAX `attention`, gradients": lambda name: of_attention(jax_attention, name, True),
    "torch `paged_attention`, steps": of_pages,
    "torch `paged_attention`, schedules": of_schedules,
    "torch `paged_attention`, a prompt": of_prompt,
    "torch `paged_attention`, training": of_training,
    "torch `block_attention`": lambda name: of_blocks(name, False),
    "torch `block_attention`, gradients": lambda name: of_blocks(name, True),
}


@functools.cache
def tokens():
    return Tokens("cuda" if torch.cuda.is_available() else "cpu")


def differences(call, implementation):
    """By column the largest difference as a share of the largest value."""
    found = {}
    with torch.set_grad_enabled("gradients" in call):
        for column, ones, others in CALLS[call](implementation):
            pairs = [(a.float(), b.float()) for a, b in zip(ones, others, strict=True)]
            found[column] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (call, name)
        for call in CALLS
        for name in (["gathered"] if "prompt" in call else ["mosaic", "triton", "invariant"])
        if name != "invariant" or "training" in call or call == "torch `attention`"
    ],
)
def test_kernels_give_the_bits_that_are_promised(call, name):
    found = differences(call, name)
    promised = PROMISED | ({"training"} if name == "invariant" else set())
    assert {x: y for x, y in found.items() if x in promised and y} == {}


@pytest.mark.parametrize("call", CALLS)
def test_repeated_calls_without_kernels(call):
    name = "reference" if "JAX" in call else "gathered" if "prompt" in call else "sdpa"
    found = differences(call, name)
    assert found["called again"] == 0 and max(found.values()) < 1e-6


if __name__ == "__main__":
    out, commit = sys.argv[1:]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for call in CALLS:
        for name in ("mosaic", "triton", "sdpa", "xla", "reference", "gathered", "invariant"):
            try:
                found = {"extra": {"call": call} | differences(call, name)}
            except (NotImplementedError, ValueError) as error:  # it has no such implementation
                found = {"status": "unsupported", "reason": str(error), "extra": {"call": call}}
            found |= {"implementation": name, "device": device}
            records.append(out, [records.record("invariance", commit, **found)])

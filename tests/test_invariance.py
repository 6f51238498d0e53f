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
from tests.caches import Rows, Sizes, TorchPages, Turn, call_of, tables
from tests.devices import on_hopper
from tests.problems import SMALL

# What docs/kernels/README.md and docs/serving.md promise of kernels.
PROMISED = {"called again", "other rows", "other pages"}
STEP, ROWS = 8, 8
SCHEDULES = {"cuda": 1000, "cpu": 10}


class Tokens:
    """Tokens of rows, which have the same tokens in every batch.

    On a CPU 72 tokens of small blocks in float32; on a GPU 2048 of the default sizes in bfloat16.
    """

    def __init__(self, device):
        gpu = device == "cuda"
        self.device, self.length = device, 2048 if gpu else 72
        sizes = {"D": 16, "Dv": 16, "config": SMALL}
        if gpu:
            sizes = {"H": 32, "D": 128, "Dv": 128, "config": nsa_torch.NSAConfig()}
            sizes |= {"dtype": "bfloat16", "gate_dtype": "bfloat16"}
        self.sizes = Sizes(**sizes)
        self.config = self.sizes.config
        self.rows = Rows(self.sizes, [self.length] * ROWS)
        shape = self.length, self.sizes.H, self.sizes.Dv
        self.rows.tokens["do"] = [self.rows.draw("do", shape) for _ in range(ROWS)]

    def joined(self, join, numbers, lengths):
        """Rows up to a length each, by the names of arguments."""
        found = {}
        for name in ("query", "selected_key", "selected_value", "gates", "do"):
            rows = self.rows.tokens[name]
            x = join([rows[i][:n] for i, n in zip(numbers, lengths, strict=True)])
            dtype = getattr(torch, self.sizes.dtype)
            found[name.removeprefix("selected_")] = torch.tensor(x).to(self.device, dtype)
        return found

    def batch(self, *numbers):
        """`[B, T, ..]` of each name."""
        return self.joined(np.stack, numbers, [self.length] * len(numbers))

    def packed(self, *numbers):
        """The rows one after the other, each of another length, and where they begin."""
        lengths = [self.length - 5 * x for x in numbers]
        joined = lambda parts: np.concatenate(parts)[None]
        return self.joined(joined, numbers, lengths), np.cumsum([0, *lengths])


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
    if implementation != "invariant":  # which refuses packed rows
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
    """All rows in pages: prompts in chunks, and steps of a few queries."""

    def __init__(self, implementation, seed=0):
        t, self.used = tokens(), 0
        width = -(-t.length // t.config.select_block)
        sizes = {"pool": ROWS * width, "width": width}
        self.path = TorchPages(t.sizes, t.device, implementation, **sizes)
        self.table = tables([t.length] * ROWS, t.config, *sizes.values(), seed)

    def step(self, order, used, count=1, **options):
        """Of row 0, the output of `count` tokens, after `used` tokens of each row."""
        turn = Turn(used, [n + count for n in used], even=count == 1)
        call = call_of(tokens().rows, self.table, turn, [*order])
        self.path.append(call)
        return self.path.attend(call, **options)[count * order.index(0) :][:count]

    def attend(self, order, *counts, **options):
        """Of row 0, the output of the next tokens, so many in each call."""
        found = []
        for count in counts:
            found.append(self.step(order, [self.used] * ROWS, count, **options))
            self.used += count
        return [np.concatenate(found)]


def of_pages(implementation):
    def steps(*order, counts=(1,) * STEP, seed=0):
        """The last tokens, after a prompt."""
        pages = Pages(implementation, seed)
        pages.attend(order, tokens().length - STEP, implementation="gathered")
        return pages.attend(order, *counts)

    yield from of_rows(steps)
    yield "1 or 8 queries", steps(0), steps(0, counts=[STEP])
    yield "other pages", steps(0), steps(0, seed=5)


def of_schedules(implementation):
    """Row 0 alone, and in steps that other rows join and leave, in any order and of any lengths,
    as in a server.
    """
    pages, random = Pages(implementation), np.random.default_rng(0)
    begin = tokens().length - STEP
    pages.attend(range(ROWS), begin, implementation="gathered")
    alone = lambda: np.stack([pages.step([0], [begin + i] * ROWS) for i in range(STEP)])

    def schedule():
        used, found = [begin, *random.integers(begin // 2, begin, ROWS - 1).tolist()], []
        for _ in range(STEP):
            others = random.permutation(np.arange(1, ROWS))[: random.integers(ROWS)]
            order = random.permutation([0, *others]).tolist()
            found.append(pages.step(order, used))
            for row in order:
                used[row] += 1
        return np.stack(found)

    yield "called again", [alone()], [alone()]
    count = SCHEDULES[tokens().device]
    yield "schedules", [schedule() for _ in range(count)], [alone()] * count


def of_prompt(implementation):
    """Row 0 by chunks, which only gathered pages serve, beside `attention` of the whole. Both
    choose their kernels.
    """
    if implementation != "gathered":
        raise NotImplementedError(f"chunks of a prompt are gathered, got {implementation}")
    counts = [tokens().length // 4] * 4
    chunks = lambda *order: Pages("gathered").attend(order, *counts, implementation="gathered")
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
        pages, first = Pages(implementation), count - count // 3 - STEP
        chunks = pages.attend([0, 1], first, count // 3, implementation=named)
        return [np.concatenate(chunks + pages.attend([0, 1], *[1] * STEP))]

    yield "called again", served(), served()
    yield "training", served(), [whole]


def of_blocks(implementation, gradients):
    t = tokens()

    def run(*rows):
        given = t.batch(*rows)
        leaves = [given[x].clone().requires_grad_(gradients) for x in ("query", "key", "value")]
        own = torch.arange(t.length, device=t.device) // t.config.select_block
        blocks = torch.stack([own, torch.where(own > 0, 0, -1)], -1).int()
        blocks = blocks[None, :, None].expand(len(rows), -1, t.sizes.Hkv, -1).contiguous()
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
            wide = lambda x: torch.as_tensor(x).float().cpu()
            pairs = [(wide(a), wide(b)) for a, b in zip(ones, others, strict=True)]
            found[column] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


@on_hopper
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

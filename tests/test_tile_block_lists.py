"""The block lists of tiles, emulated and on a GPU, against plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels_pallas.specs import tile_block_lists
from kernels_pallas.specs.selected import BlockCounts, SelectedAttention
from tests.limits import set_limits
from tests.oracles import warps
from tests.oracles.list_kernels import BITMAP_MUTANTS, Warps, emulated, interpreted

SPEC = SelectedAttention(
    B=2, T=70, S=512, H=2, Hkv=2, D=64, Dv=64, n=4, block=16, dtype="bfloat16", scale=1.0
)
# Positions and first keys of the two rows of a batch.
PLACES = {
    "prompt": lambda spec: [(t, 0) for t in range(spec.T)],
    "chunk of a long prompt": lambda spec: [(t + 3000, 0) for t in range(spec.T)],
    "short cache": lambda spec: [(t - 9, 0) for t in range(spec.T)],  # fewer keys than queries
    "packed": lambda spec: packed(spec, [1, 7, 1, 1, 30, 9]),
    # Nobody wants what is cut for the first of the second sequence.
    "packed, second not cut": lambda spec: packed(spec, [1, 50]),
    "packed, all padding": lambda spec: packed(spec, []),
}


def packed(spec, lengths):
    found = [(t, sum(lengths[:i])) for i, n in enumerate(lengths) for t in range(n)]
    return found + [(-1, 500)] * (spec.T - len(found))


def draw(tokens: int, place: str, seed: int = 0, **change):
    """Spec, indices `[B, T, Hkv, n]`, positions and first keys `[B, T]`; neighbours overlap,
    some want blocks that they cannot see, and some nothing.
    """
    rng = np.random.default_rng(seed)
    spec = dataclasses.replace(SPEC, **{"H": 128 // tokens} | change)
    assert spec.tile.tokens == tokens
    row = np.array(PLACES[place](spec), np.int32)
    position, start = (np.stack([x] * spec.B) for x in row.T)
    indices = np.full((spec.B, spec.T, spec.Hkv, spec.n), -1, np.int32)
    for b, t, g in np.ndindex(indices.shape[:3]):
        own = max(int(position[b, t]), 0) // spec.block
        some = np.unique(
            np.concatenate([own - rng.integers(0, 4, 2), rng.integers(0, own + 2, 9)])
        )
        some = rng.permutation(some)[: rng.integers(spec.n + 1)]
        if place == "packed, second not cut":
            some = np.array([0] if position[b, t] in (0, 20) and t != 1 else [])
        indices[b, t, g, : len(some)] = some
    return spec, indices, position, start


def expected(spec, indices, position, start, b, g, tile):
    """First keys of the blocks, bits of their tokens, and `BlockCounts`."""
    members: dict[int, int] = {}
    cuts, far_slots = [], []
    first_position = max(int(position[b, tile * spec.tile.tokens]), 0)
    parts = spec.parts
    near = max(first_position // (spec.block * parts) - 1, 0) * parts
    for token in range(spec.tile.tokens):
        t = tile * spec.tile.tokens + token
        if t >= spec.T:
            break
        for slot, block in enumerate(indices[b, t, g].tolist()):
            if not 0 <= block * spec.block <= position[b, t]:
                continue
            first = int(start[b, t]) + block * spec.block
            members[first] = members.get(first, 0) | 1 << token
            if (block + 1) * spec.block > position[b, t] + 1:
                cuts.append(first)
            if parts <= block < near:
                far_slots.append(slot // parts)
    starts = sorted(members)
    full_blocks = starts.index(min(cuts)) if cuts else len(starts)
    far_end = sum(x < near * spec.block for x in starts)
    slots = (min(far_slots), max(far_slots) + 1) if far_slots else (spec.n, 0)
    far_begin = sum(x < min(near, parts) * spec.block for x in starts)
    counts = BlockCounts(full_blocks, len(starts), far_begin, far_end, *slots)
    return starts, [members[x] for x in starts], counts


def check(spec, arrays, starts, members, counts):
    starts, members, counts = (np.asarray(x) for x in (starts, members, counts))
    some = 0
    for place in np.ndindex(spec.B, spec.Hkv, spec.tiles):
        want, bits, counted = expected(spec, *arrays, *place)
        got = members[place].astype(np.uint32).astype(object)
        words = sum(word << (32 * w) for w, word in enumerate(got))
        packed = arrays[2].any()  # some sequence begins elsewhere
        compared = slice(0, 2 if packed else None)
        assert counts[place].tolist()[compared] == list(counted)[compared]
        assert starts[place][: len(want)].tolist() == want
        assert list(words[: len(want)]) == bits
        # An operator gives the lists out: the same for the same input.
        assert not starts[place][len(want) :].any() and not words[len(want) :].any()
        some += len(want)
    return some


TOKENS = [1, 8, 32, 64]


def by_emulation(spec, arrays):
    return emulated(tile_block_lists.tile_block_lists, interpreted(spec), *arrays)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_emulated(tokens, place):
    spec, *arrays = draw(tokens, place)
    found = check(spec, arrays, *by_emulation(spec, arrays))
    assert bool(found) == (place != "packed, all padding")


def test_blocks_in_parts():
    spec, *arrays = draw(8, "chunk of a long prompt", n=6, parts=2)
    check(spec, arrays, *by_emulation(spec, arrays))


def test_more_blocks_than_bits(monkeypatch):
    set_limits(monkeypatch, list_window=64)
    for tokens in (8, 64):
        spec, *arrays = draw(tokens, "chunk of a long prompt", n=5)
        check(spec, arrays, *by_emulation(spec, arrays))


def test_more_ctas_than_run_at_once(monkeypatch):
    spec, *arrays = draw(8, "packed")
    monkeypatch.setattr(warps, "CTAS", 5)
    check(spec, arrays, *by_emulation(spec, arrays))


def test_in_a_jitted_call():
    spec, *arrays = draw(32, "packed")
    kernel = tile_block_lists.tile_block_lists(interpreted(spec))
    assert check(spec, arrays, *jax.jit(kernel.__call__)(*map(jnp.asarray, arrays)))


MUTANTS = BITMAP_MUTANTS | {
    "places are counted from each row": (Warps, "ones", lambda self, x: self.word(1)),
    "a cut in a sequence before is forgotten": (
        Warps,
        "number",
        lambda self, x: self.word(0),
    ),
    "a warp runs on after its last turn": (Warps, "_where_active", lambda self, new, old: new),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        for place in ("packed", "packed, second not cut"):
            spec, *arrays = draw(64, place)
            check(spec, arrays, *by_emulation(spec, arrays))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_kernel(tokens):
    from nsa_interop.launch import launch

    for place in PLACES:
        spec, *arrays = draw(tokens, place)
        on_gpu = [torch.from_numpy(x).cuda() for x in arrays]
        for _ in range(3):
            found = launch(tile_block_lists.tile_block_lists(spec), *on_gpu)
            check(spec, arrays, *(x.cpu() for x in found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU")
@pytest.mark.parametrize(("heads", "length"), [(16, 150_000), (4, 32768), (1, 16384)])
def test_the_kernel_does_what_is_emulated(heads, length):
    """Random blocks in long rows; the longest needs several windows of bits."""
    from nsa_interop.launch import launch

    sizes = {"B": 1, "T": length, "S": length, "H": heads, "Hkv": 1, "n": 16, "block": 64}
    spec = dataclasses.replace(SPEC, **sizes)
    position = torch.arange(length, device="cuda", dtype=torch.int32)[None]
    generator = torch.Generator("cuda").manual_seed(0)
    draws = torch.rand(length, spec.n, device="cuda", generator=generator)
    indices = (draws * (position[0, :, None] // 64 + 1)).int().sort().values
    again = torch.diff(indices, prepend=torch.full_like(indices[:, :1], -1)) == 0
    arrays = torch.where(again, -1, indices)[None, :, None], position, 0 * position
    found = launch(tile_block_lists.tile_block_lists(spec), *arrays)
    expected = by_emulation(spec, [x.cpu().numpy() for x in arrays])
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), want)

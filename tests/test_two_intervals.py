"""dq of two intervals in one kernel has the bits of a kernel each: in Pallas' GPU interpreter,
which reports races, and on a GPU.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from nsa_interop.launch import launch

from kernels_pallas.mosaic import capability
from kernels_pallas.specs import interval
from kernels_pallas.specs.interval import SECOND, IntervalAttention
from kernels_pallas.specs.tile import ROW_STATS, ROWS, cdiv
from tests.devices import needs_gpu


def of_sizes(T, S, second_keys, H, Hkv, D, Dv, B=1, **more):
    blocks = interval.dq_blocks(D, Dv)
    return IntervalAttention(
        B=B, T=T, S=S, H=H, Hkv=Hkv, D=D, Dv=Dv, second_keys=second_keys, **blocks, **more
    )


def spec_of(*sizes, **more):
    return of_sizes(*sizes, scale=0.3, longest_first=True, **more)


SMALL = {
    "G4": spec_of(70, 9, 90, 8, 2, 16, 32, B=2, dtype="float16"),
    "G16": spec_of(17, 3, 150, 16, 1, 32, 32, dtype="bfloat16"),
}
LARGE = {
    "paper": spec_of(3000, 187, 3000, 64, 4, 128, 128, dtype="bfloat16"),
    "wide": spec_of(900, 300, 700, 16, 2, 192, 128, dtype="bfloat16"),
    "seed": spec_of(1000, 61, 1000, 12, 2, 64, 64, B=3, dtype="float16"),
}


def array(shape, dtype, seed):
    found = np.random.default_rng(seed).normal(size=shape)
    return found.astype(np.float32 if dtype == "bfloat16" else dtype)


def bounds_of(spec, keys, seed):
    """Of each row of the tiles: windows that grow and move on, of which some are empty."""
    random = np.random.default_rng(seed)
    ends = np.sort(random.integers(0, keys + 1, (spec.B, spec.T)), axis=1)
    begins = np.sort(random.integers(0, keys + 1, (spec.B, spec.T)), axis=1)
    begins = np.minimum(begins, ends)
    token = np.arange(spec.tiles)[:, None] * spec.tile.tokens + np.arange(ROWS) // spec.group
    token = np.minimum(token, spec.T - 1)
    return [x[:, token].reshape(-1, ROWS).astype(np.int32) for x in (begins, ends)]


def stats_of(spec, seed):
    """Of gates of both signs."""
    random = np.random.default_rng(seed)
    tiles = cdiv(spec.T, spec.tile.tokens)
    stats = random.normal(size=(spec.B, spec.Hkv, tiles, ROWS, ROW_STATS))
    stats[..., 0] += 2
    stats = stats.astype(np.float32)
    shift = stats[..., 0].copy().view(np.uint32)
    signs = random.integers(0, 2, shift.shape, np.uint32)
    stats[..., 0] = (shift & ~np.uint32(1) | signs).view(np.float32)
    return stats


def arrays_of(spec):
    """By name, of the kernel of both."""
    pair = interval.dq(spec)
    shapes = dict(zip(pair.names, (*pair.inputs, *pair.outputs), strict=True))
    found = {}
    for seed, prefix in enumerate(spec.intervals):
        keys = spec.second_keys if prefix else spec.S
        for i, name in enumerate(("key", "value")):
            found[prefix + name] = array(*shapes[prefix + name], 10 * seed + i)
        names = prefix + "first_key", prefix + "key_end"
        found |= zip(names, bounds_of(spec, keys, seed), strict=True)
        found[prefix + "row_stats"] = stats_of(spec, seed)
    found |= {name: array(*shapes[name], 20 + len(name)) for name in ("query", "do")}
    return pair, found


class Named(NamedTuple):
    name: str
    dtype: str


def named(kernel):
    return [Named(name, x.dtype) for name, x in zip(kernel.names, kernel.inputs, strict=False)]


def check(spec, convert, run):
    """The same bits; `convert(array, dtype)`: as `run(kernel, arrays)` takes them."""
    assert spec.has_room_for_dq
    pair, found = arrays_of(spec)
    dtypes = dict(zip(pair.names, (x.dtype for x in pair.inputs), strict=False))
    found = {name: convert(x, dtypes[name]) for name, x in found.items()}
    first = interval.dq(dataclasses.replace(spec, second_keys=None))
    second = dataclasses.replace(spec, S=spec.second_keys, second_keys=None, added=True)
    second = interval.dq(second)
    own = {name.removeprefix(SECOND): x for name, x in found.items() if SECOND in name}
    before = run(first, [found[name] for name in first.names[: len(first.inputs)]])
    own = found | own | {"added": before}
    want = run(second, [own[name] for name in second.names[: len(second.inputs)]])
    got = run(pair, [found[name] for name in pair.names[: len(pair.inputs)]])
    assert bool((got == want).all()) and bool((want != 0).any())
    assert not bool((want == before).all())  # or the second interval would not count


def interpretable(name):
    return dataclasses.replace(SMALL[name], interpret=capability.interpret.get())


@pytest.mark.parametrize("name", SMALL)
def test_interpreted(name, interpreted):
    def convert(x, dtype):
        return jnp.asarray(x, dtype)

    check(interpretable(name), convert, lambda kernel, arrays: kernel(*arrays)[0])


def test_some_rows(interpreted):
    """Of `[B, Hkv]`, on few SMs; the interpreter keeps nothing of `before`."""
    spec = interpretable("G4")
    pair, found = arrays_of(spec)
    arrays = [jnp.asarray(found[x.name], x.dtype) for x in named(pair)]
    (want,) = pair(*arrays)
    for first, end in ((0, 1), (1, 4)):
        some = {"first_row": first, "end_row": end, "sms": 2, "before": True}
        kernel = interval.dq(dataclasses.replace(spec, **some))
        assert kernel.grid == (2,) and kernel.for_any_length() is not pair.for_any_length()
        (got,) = kernel(*arrays, jnp.zeros_like(want))
        rows = [x.reshape(spec.B, spec.T, spec.Hkv, -1).swapaxes(1, 2) for x in (got, want)]
        got, want_rows = (x.reshape(spec.B * spec.Hkv, -1)[first:end] for x in rows)
        assert bool((got == want_rows).all())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", LARGE)
def test_on_a_gpu(name):
    def convert(x, dtype):
        return torch.tensor(x, device="cuda").to(getattr(torch, dtype))

    def run(kernel, arrays):
        out = [arrays[-1].clone()] if kernel.in_place else ()
        arrays = [*arrays[: len(arrays) - len(out)], *out]
        return launch(kernel, *arrays, out=out)[0]

    check(LARGE[name], convert, run)

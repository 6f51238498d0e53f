"""New tokens to the pages of a cache by the Mosaic kernel: a plain oracle, a token at a time."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest
import torch

import nsa_torch
from kernels_pallas.mosaic import append as body
from kernels_pallas.mosaic import compress
from kernels_pallas.mosaic.operands import REGISTERS
from kernels_pallas.specs.append import Append, append, why_not
from nsa_core.compress_params import PoolParams
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from tests.cross_compile import compile_report
from tests.devices import needs_gpu
from tests.emulated_warps import GARBAGE
from tests.warp_emulation import emulated, interpreted

POOL, TABLE = 24, 6
SIZES = {"N": 0, "B": 0, "pages": POOL, "table_pages": TABLE}
SMALL = {"Hkv": 2, "D": 16, "Dv": 48, "compress_block": 8, "stride": 4, "block": 16}
ODD = {"Hkv": 3, "D": 32, "Dv": 16, "compress_block": 12, "stride": 4, "block": 12}
FLAGS = {"ragged": True, "separate": False, "means": True}
SPECS = {
    "rows of different numbers": Append(**SIZES, **SMALL, **FLAGS, dtype="bfloat16"),
    "own keys": Append(**SIZES, **SMALL, **(FLAGS | {"separate": True}), dtype="float16"),
    "as many tokens a row": Append(
        **SIZES, **ODD, **(FLAGS | {"ragged": False}), dtype="bfloat16"
    ),
    "no means": Append(**SIZES, **ODD, **(FLAGS | {"means": False}), dtype="bfloat16"),
    "several warps a token": Append(**SIZES, **(ODD | {"Hkv": 5}), **FLAGS, dtype="float16"),
}
by_spec = pytest.mark.parametrize("name", SPECS)
# New tokens by call and row: prompts, chunks, single tokens, rows without any, 40 of padding.
RAGGED = [44, 3, 0, 16, *[0] * 40], [1, 20, 0, 1, *[0] * 40], [16, 1, 0, 0, *[2] * 40]
EVEN = [13] * 4, [1] * 4, [30] * 4


@dataclasses.dataclass
class Calls:
    """Appends to one cache, and what must stand in it after each: arrays by the kernel's names."""

    spec: Append

    def __post_init__(self):
        self.rng = np.random.default_rng(4)
        self.counts = RAGGED if self.spec.ragged else EVEN
        rows = len(self.counts[0])
        pages = self.rng.permutation(POOL)[: 4 * TABLE].reshape(4, TABLE)
        self.table = np.full((rows, TABLE), -1, np.int32)
        self.table[:4] = pages
        self.table[3, 1], self.table[0, 4] = POOL, -1  # no pages: their tokens are lost
        self.dtype = np.dtype(getattr(ml_dtypes, self.spec.dtype, self.spec.dtype))
        kernel = append.__wrapped__(self.spec)
        shapes = zip(kernel.names[len(kernel.inputs) :], kernel.outputs, strict=True)
        self.pages = {name: np.full(x.shape, GARBAGE, self.dtype) for name, x in shapes}
        self.tokens = [{} for _ in range(rows)]  # by row, of each name: what was appended

    def __iter__(self):
        """Of each call the spec and the inputs, by name."""
        at = np.zeros(len(self.table), int)
        for counts in self.counts:
            at = at + counts
            spec = dataclasses.replace(self.spec, N=sum(counts), B=len(counts))
            new = {
                name: self.rng.normal(size=x.shape).astype(self.dtype)
                for name, x in spec.pairs("{branch}_{kind}", spec.N).items()
            }
            lengths = np.where(counts, at, 0).astype(np.int32)
            arrays = new | {"page_table": self.table, "lengths": lengths}
            starts = np.cumsum([0, *counts]).astype(np.int32)
            if spec.ragged:
                arrays["starts"] = starts
            if spec.means:
                arrays |= {
                    f"old_{x}": self.pages[f"{spec.branches[-1]}_{x}_pages"]
                    for x in ("key", "value")
                }
            yield spec, arrays
            self._keep(new, lengths, starts)

    def _keep(self, new, lengths, starts):
        spec = self.spec
        for row, length in enumerate(lengths):
            count = starts[row + 1] - starts[row]
            for position in range(length - count, length):
                index = starts[row] + position - (length - count)
                for name, x in new.items():
                    self.tokens[row].setdefault(name, {})[position] = x[index]
                page = (
                    self.table[row, position // spec.block]
                    if position < TABLE * spec.block
                    else -1
                )
                if not 0 <= page < POOL:
                    continue
                at = page, position % spec.block
                for name, x in new.items():
                    self.pages[f"{name}_pages"][at] = x[index]
                first = position - spec.compress_block + 1
                if spec.means and first >= 0 and first % spec.stride == 0:
                    self._mean(row, range(first, position + 1), page, at[1] // spec.stride)

    def _mean(self, row, window, page, slot):
        """Of tokens that were appended in an earlier call, as their pages have them."""
        for kind in ("key", "value"):
            name = f"{self.spec.branches[-1]}_{kind}"
            kept = self.tokens[row][name]
            mean = sum(kept[p].astype(np.float64) for p in window) / len(window)
            self.pages[f"compressed_{kind}"][page, slot] = mean


def written(found, before):
    """`before` with what a kernel wrote; memory that it did not write is garbage."""
    return np.where(found == np.array(GARBAGE, found.dtype), before, found)


def check(spec, run):
    """`run(spec, arrays, pages)` gives the pages after a call."""
    calls = Calls(spec)
    found = {name: x.copy() for name, x in calls.pages.items()}
    for each, arrays in calls:
        found = run(each, arrays, found)
    half = float(ml_dtypes.finfo(calls.dtype).eps) / 2
    for name, want in calls.pages.items():
        bound = dict(rtol=2 * half, atol=1e-6) if "compressed" in name else dict(rtol=0, atol=0)
        both = (x.astype(np.float32) for x in (found[name], want))
        np.testing.assert_allclose(*both, **bound, err_msg=name)
        assert (want != np.array(GARBAGE, want.dtype)).any()


def on_emulator(spec, arrays, pages):
    made = emulated(append, interpreted(spec), *arrays.values())
    return {
        name: written(x, before) for (name, before), x in zip(pages.items(), made, strict=True)
    }


@by_spec
def test_pages_after_each_call(name):
    check(SPECS[name], on_emulator)


def shifted(name, place, by):
    method = getattr(body.Appending, name)

    def mutant(self, *arguments):
        arguments = [*arguments]
        arguments[place] = arguments[place] + by
        return method(self, *arguments)

    return body.Appending, name, mutant


MUTANTS = {
    "the row before": (body.Appending, "_row", lambda self, warp, sizes, *x: warp.word(0)),
    "a window ends a token late": shifted("_finish", 3, 1),
    "no token of earlier calls": (
        compress.Side,
        "load",
        lambda self, *x: [self.warp.word(0.0)] * 2,
    ),
    "a word too few": (Append, "words", property(lambda self: (self.Hkv * self.D // 2 - 1, 1))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises((AssertionError, IndexError)):
        check(SPECS["rows of different numbers"], on_emulator)


def build(**sizes):
    return append(dataclasses.replace(Append(**SIZES, **sizes), N=64, B=8)).for_any_length()


def test_the_kernel_fits_the_chip():
    """Without spills."""
    paper = {"Hkv": 4, "D": 128, "Dv": 128, "compress_block": 32, "stride": 16, "block": 64}
    flags = FLAGS, {"ragged": False, "separate": True, "means": True}
    builders = [(f"{__name__}:build", paper | x | {"dtype": "bfloat16"}) for x in flags]
    for report in compile_report(builders):
        assert not report["remarks"] and not report["stack_bytes"]
        assert not report["spill_store_bytes"] + report["spill_load_bytes"]
        assert report["registers"] <= REGISTERS // (8 * 128)


def test_what_it_is_not_for():
    spec = SPECS["own keys"]
    assert why_not(spec) is None
    assert why_not(dataclasses.replace(spec, dtype="float32")).endswith("got float32")
    assert why_not(dataclasses.replace(spec, Hkv=1, D=3)).endswith("a token, got 3")


def test_a_name_that_cannot_run_and_one_that_there_is_not():
    cache = nsa_torch.PagedCache(POOL, 2, 16, 48, config=config_of(SMALL))
    new = torch.zeros(1, 2, 16), torch.zeros(1, 2, 48)
    new = [x.to(torch.bfloat16) for x in new]
    at = torch.zeros(1, TABLE, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match="append: mosaic: needs a Hopper GPU, got cpu"
    ):
        nsa_torch.append(cache, *new, *at, implementation="mosaic")
    with pytest.raises(
        ValueError, match="must be one of mosaic, triton, torch or None, got 'xla'"
    ):
        nsa_torch.append(cache, *new, *at, implementation="xla")
    nsa_torch.append(cache, *new, *at)


def config_of(sizes):
    lengths = sizes["compress_block"], sizes["stride"], sizes["block"]
    return NSAConfig(*lengths, num_selected=3, num_initial=1, num_local=1, window=9)


NAMES = {"raw": "compressed"}  # of the branch in `Branches`


@pytest.mark.gpu
@needs_gpu
@by_spec
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_append(name, graph):
    """By the public function, and in a CUDA graph."""
    spec, cache = SPECS[name], None
    dtype = getattr(torch, spec.dtype)

    def tensor(x):
        if x.dtype == np.int32:
            return torch.from_numpy(x).cuda()
        return torch.from_numpy(x.view(np.int16)).cuda().view(dtype)

    def run(each, arrays, pages):
        nonlocal cache
        if cache is None:
            sizes = POOL, spec.Hkv, spec.D, spec.Dv
            options = {"config": config_of(dataclasses.asdict(spec)), "separate": spec.separate}
            cache = nsa_torch.PagedCache(*sizes, **options, dtype=dtype, device="cuda")
            for x in cache.tensors().values():
                x.fill_(GARBAGE)
        branches = [NAMES.get(x, x) for x in spec.branches]
        new = [
            Branches(
                **{
                    to: tensor(arrays[f"{branch}_{kind}"])
                    for branch, to in zip(spec.branches, branches, strict=True)
                }
            )
            if spec.separate
            else tensor(arrays[f"selected_{kind}"])
            for kind in ("key", "value")
        ]
        starts = tensor(arrays["starts"]) if spec.ragged else None
        at = tensor(arrays["page_table"]), tensor(arrays["lengths"])
        params = None
        if not spec.means:
            weights = [
                torch.zeros(spec.compress_block, x, device="cuda") for x in (spec.D, spec.Dv)
            ]
            params = tuple(map(PoolParams, weights))
        call = functools.partial(
            nsa_torch.append, cache, *new, *at, cu_seqlens_q=starts, params=params
        )
        call(implementation="mosaic")
        if graph and spec.means:
            for x in cache.tensors().values():  # once more, from what stood there before
                x.fill_(GARBAGE)
            for x, to in zip(pages.values(), tensors(cache), strict=True):
                to.copy_(tensor(x))
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
                call(implementation="mosaic")
            recorded.replay()
        torch.cuda.synchronize()
        return {
            name: x.view(torch.int16).cpu().numpy().view(pages[name].dtype)
            for name, x in zip(pages, tensors(cache), strict=True)
        }

    def tensors(cache):
        found = [cache.selected_key, cache.selected_value]
        if spec.separate:
            found += [*cache.sliding, *cache.raw]
        return found + [cache.compressed_key, cache.compressed_value] * spec.means

    check(spec, run)

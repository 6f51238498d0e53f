"""Triton kernels on pages: rows of the table of caches, on a GPU, or in Triton's interpreter.

`test_pack.py` runs this file once more, in the interpreter.
"""

import dataclasses
import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
import torch

import nsa_jax
from nsa_torch import NSAConfig, paged_attend
from tests import interpreted_triton, pretend, refusals, triton_compile
from tests.caches import (
    APPENDED_BY_TRITON,
    HISTORIES,
    TABLE,
    Rows,
    Sizes,
    TorchPages,
    Turn,
    by_fp8,
    check,
    decoding,
    sized,
    tables,
)
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.limits import set_limits
from tests.posed import pose
from tests.tables import table

pytestmark = pytest.mark.skipif(not TRITON, reason="triton is not installed")
once = pytest.mark.skipif(INTERPRETED, reason="the same in both processes")

JAX_TRITON = importlib.util.find_spec("jax_triton") is not None
ODD = NSAConfig(8, 4, 12, num_selected=5, num_initial=1, num_local=2, window=7)
ONE = NSAConfig(16, 16, 16, num_selected=2, num_initial=0, num_local=1, window=0)
WIDE = NSAConfig(16, 4, 16, num_selected=6)
FP8 = {"fp8": True}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """In the interpreter no kernel refuses, and short rows are several splits, chunks and tiles."""
    if INTERPRETED:
        interpreted_triton.small(monkeypatch)
        interpreted_triton.right_fp8(monkeypatch)
        limits = {"decode_split": 16, "decode_candidates": 16, "decode_gathered": 512}
        set_limits(monkeypatch, **limits)
        pretend.machine(monkeypatch, append_why_not=None)


def pages(sizes, appender="torch", **options):
    return TorchPages(sizes, DEVICE, "triton", appender, pool=40, **options)


STEPS = TABLE["triton steps"]


@kernel
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    sizes, row = sized(STEPS[name])
    turns = decoding(row["lengths"], row.get("queries", 1))
    check(pages(sizes, width=20), turns, bound=row.get("bound"))


@kernel
@by_fp8
@pytest.mark.parametrize("history", APPENDED_BY_TRITON)
def test_appended_tokens(history, fp8):
    """With their means; in fp8 rings, too."""
    own = history == "rows in another order"
    sizes = Sizes(2, 1 + own, separate=own, fp8=fp8)
    if fp8 and "prefix" in history:  # the first of two launches reads what was never written
        sizes = dataclasses.replace(sizes, fp8=False, dtype="bfloat16")
    check(
        pages(sizes, "triton"),
        [dataclasses.replace(x, attends=False) for x in APPENDED_BY_TRITON[history]],
    )


@kernel
def test_prompts_attend_to_copied_rows():
    check(pages(Sizes(2, 1)), HISTORIES["fork and crop"])


@kernel
def test_rows_are_copied_side_by_side(monkeypatch):
    """One launch an array gives what torch's indexing gives, bit for bit; of the NaN that stand
    behind rows and before the windows of the last 20 queries there is none.
    """
    path = pages(Sizes(2, 1, 24, 40, ODD, separate=True, **FP8))
    lengths = [0, 1, 12, 24]
    check(path, [Turn([0] * 4, lengths, attends=False)])
    table = path.array(tables(lengths, ODD, path.pool, path.width))
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    # Tokens that were not written; of the selected branch the last page alone.
    for more, last_page in itertools.product((0, 3), (False, True)):
        call = path.cache, table[:, :3], lengths + more, 20, None, None, last_page
        found = paged_attend.side_by_side(*call)
        with monkeypatch.context() as patch:
            pretend.machine(patch, append_why_not="torch")
            want = paged_attend.side_by_side(*call)
        for x, y in zip(itertools.chain(*found), itertools.chain(*want), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
            assert more or x.isfinite().all()


@kernel
def test_a_row_depends_on_nothing_else():
    """Bit for bit: where its pages lie, how long the table is, what other rows are."""
    sizes, turns = Sizes(2, 1), decoding([90, 61], 1)
    other = Rows(sizes, [90, 61])
    other.redraw(1, 0)
    first, second = (
        check(pages(sizes, width=width), turns, rows, seed=width)[-1]
        for width, rows in ((6, None), (20, other))
    )
    assert (first[0] == second[0]).all() and (first[1] != second[1]).any()


def problem(**changes):
    sizes = {"B": 8, "T": 1, "H": 64, "Hkv": 4, "D": 128, "Dv": 128, "device": None}
    return pose("decode", 8192, **sizes | {"capability": (8, 0)} | changes)


HOPPER = {"capability": (9, 0)}
CHOICES = table("choice")["decode"]


@once
@pytest.mark.parametrize("row", CHOICES, ids=str)
def test_choice_on_posed_devices(row, monkeypatch):
    """What is no kernel gathers all pages, so that no threshold is asked for."""
    pretend.machine(monkeypatch, can_build=True)
    about = {x: row.get(x) for x in ("name", "chosen", "says")}
    changes = refusals.given({x: y for x, y in row.items() if x not in about})
    choose = functools.partial(paged_attend.REGISTRY.choose, problem(**changes), about["name"])
    if about["chosen"]:
        assert choose().implementation == about["chosen"]
        return
    with pytest.raises(NotImplementedError, match=re.escape(about["says"])):
        choose()


@once
@pytest.mark.parametrize(("on_disk", "found"), [(False, "triton"), (True, "mosaic")])
def test_without_jax_a_kernel_must_be_on_disk(on_disk, found, monkeypatch):
    pretend.machine(monkeypatch, can_build=False, on_disk=on_disk)
    assert paged_attend.REGISTRY.choose(problem(**HOPPER)).implementation == found


@once
def test_no_length_compiles_anything():
    """Rows, pages of the pool: the constants are the same; of the table's width the power of 2."""

    def constants(rows, pages):
        found = triton_compile.decode(rows, 1, 16, 1, 64, 64, pages, False, (9, 0))
        return [x.kernel.constants for x in found[:2]]

    assert constants(2, 65) == constants(3, 65) == constants(2, 110)
    assert constants(2, 1024) == constants(2, 2**14)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.skipif(not JAX_TRITON, reason="jax-triton is not installed")
def test_jax_lowers_a_decode_step(monkeypatch):
    """Of a cache in fp8, whose kernels have more arrays."""
    pretend.jax_gpu(monkeypatch)
    cache = nsa_jax.PagedCache(8, 1, 32, 32, dtype=jnp.float8_e4m3fn)
    query, gates = (jnp.zeros((2, 16, width), jnp.bfloat16) for width in (32, 3))
    given = query, gates, cache, jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    step = jax.jit(functools.partial(nsa_jax.paged_attention, implementation="triton"))
    assert pretend.triton_launches(step, *given) == 2

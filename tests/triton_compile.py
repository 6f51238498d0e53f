"""Compiles Triton kernels for GPUs that need not be there, and says what they take of one.

The steps run on torch's meta tensors, and what they launch is noted. A process of its own compiles
it.
"""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels_pallas.triton import decode_descriptions, descriptions
from kernels_pallas.triton.kernel import TritonKernel
from nsa_core import paged_layout
from nsa_core.index import Index, Teacher
from nsa_core.paged_layout import PagedArrays
from nsa_core.plan import buffers
from nsa_core.steps import triton_decode, triton_index
from nsa_core.steps import triton_paged_blocks as paged_blocks
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_core.validate import dtype_name
from nsa_torch import Branches, paged, plans
from nsa_torch.torch_ops import TorchOps
from tests import planned
from tests.problems import PAPER, Case

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "triton"  # read back by the next run, as that of JAX
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32"} | {
    "float8_e4m3fn": "fp8e4nv"
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel and the dtypes of the arrays that it was given, or of tuples of these."""

    kernel: TritonKernel
    dtypes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel: a thread's registers and spilled bytes, shared bytes."""

    name: str
    capability: int
    registers: int
    spills: int
    shared: int
    tensor_cores: bool


class Recording(TorchOps):
    """Notes what is launched, on any device."""

    def __init__(self, capability: tuple[int, int]):
        self.posed = capability
        self.launches: list[Launch] = []

    def run(self, kernel, *tensors):
        dtypes = torch.utils._pytree.tree_map(dtype_name, tensors)
        self.launches.append(Launch(kernel, dtypes))
        return [
            torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="meta")
            for x in kernel.outputs
        ]

    run_in_place = run

    def capability(self, x):
        return self.posed


def meta(*shape, dtype="bfloat16"):
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


ints = functools.partial(meta, dtype="int32")
floats = functools.partial(meta, dtype="float32")


def launches(case: Case, packed: bool, capability: tuple[int, int]) -> list[Launch]:
    """All kernels of a call without gradients, of one with them, and of their split heads."""
    layer = {"heads": case.H, "kv_heads": case.Hkv, "key_width": case.D, "value_width": case.Dv}
    sizes = {"config": case.config, "packed": packed, "dtype": case.dtype}
    mode = planned.MODES["given"]
    given = planned.described(mode, case.B, case.T, **layer, **sizes)
    found = []
    with mock.patch.object(plans, "capability_of", lambda _: capability):
        for keep in "forward", "saving":
            planned_of = planned.PATHS["triton"].planned(mode, keep)
            for plan in planned_of.plans(given, torch.device("cuda", 0)):
                for step in plan.steps:
                    if isinstance(step, buffers.Launch):
                        dtypes = tuple(x.dtype for x in step.reads)
                        found.append(Launch(step.kernel, dtypes))
    ops, array = Recording(capability), functools.partial(meta, dtype=case.dtype)
    tokens, branches = case.B * case.T, {"branches": 3, "means": 1, "gates": 3, "raw_keys": 1}
    heads = descriptions.Heads(case.H, case.Hkv, case.D, case.Dv, **branches)
    angles, row = [floats(tokens, case.D // 2)] * 2, array(tokens, heads.row)
    apart = tuple(array(*x) for x in heads.split_shapes(tokens))
    for back, eps in itertools.product((False, True), (None, 1e-6)):
        kernel = descriptions.split_heads(heads, tokens, back, eps)
        ops.run(kernel, row, apart, angles[0], row, *[array(case.D)] * 2, *angles)
    return list({repr(x): x for x in found + ops.launches}.values())


def decode(
    B: int, T: int, H: int, Hkv: int, D: int, Dv: int, pages: int, fp8: bool, capability
) -> list[Launch]:
    """All kernels of a decode step of `B` rows of `T` queries, with tables of `pages`."""
    ops = Recording(capability)
    shapes = paged_layout.shapes(64, Hkv, D, Dv, PAPER, separate=False, fp8_rows=8 * fp8)
    kinds = {"dtype": "float8_e4m3fn" if fp8 else "bfloat16", "compressed": "bfloat16"}
    arrays = {
        name: meta(*x, dtype=paged_layout.dtype_of(name, scale="float32", **kinds))
        for name, x in shapes.items()
        if x is not None
    }
    cache = PagedArrays(PAPER, **arrays)
    table, lengths = ints(B, pages), ints(B)
    query, gates = meta(B * T, H, D), meta(B * T, H, 3)
    triton_decode.attention(ops, query, gates, cache, table, lengths, None)
    new = [Branches.each(meta(B * T, Hkv, x)) for x in (D, Dv)]
    slots = lengths if fp8 else None
    paged.append_by_triton(cache, *new, table, lengths, lengths, True, slots, 2, ops)
    entries = paged_layout.compressed_entries(PAPER)
    scale = cache.compressed_value_scale if fp8 else lengths
    pair = cache.compressed_key, cache.compressed_value
    which = table, "bfloat16", entries, 1 << 20, None, (False, fp8)
    kernel = decode_descriptions.gather(*pair, *which)
    ops.run(kernel, *pair, lengths, scale, table, lengths)
    return ops.launches


def index(T: int, S: int, index: Index, dtype: str, capability) -> list[Launch]:
    """The kernel that scores blocks of a row."""
    ops, array = Recording(capability), functools.partial(meta, dtype=dtype)
    arrays = array(1, T, 4, 128), array(1, S, 128), ints(1, T)
    triton_index.blocks(ops, *arrays, index, None)
    return ops.launches[:1]


def paged_index(index: Index, posed, capability) -> list[Launch]:
    """The kernels that score and choose blocks in pages of few lists and of many, with the tiles of
    a `posed` GPU.
    """
    ops, keys, found = Recording(posed), meta(9000, 128 // index.entry, 128), {}
    for rows in (8, 8192):
        paged = Paged(ints(rows, 1024), ints(rows), None)
        paged_blocks.blocks(ops, meta(rows, 4, 128), keys, paged, index)
    for launch in ops.launches:  # of `digits` one step
        if getattr(launch.kernel.constants, "SHIFT", 16) == 16:
            found.setdefault(launch.kernel.name, launch)
    return [*found.values()]


def paged_lists(capability) -> list[Launch]:
    """The kernels of attention to blocks in pages, with the tiles of Hopper."""
    ops, pages = Recording((9, 0)), [meta(9000, 128, 4, 128)] * 2
    paged = Paged(ints(8, 1024), ints(8), None)
    paged_blocks.attention(
        ops, meta(8, 64, 128), *pages, ints(8, 4, 16), paged, 128, "selected", 0.1
    )
    return ops.launches


def index_loss(capability) -> list[Launch]:
    """The kernels of an indexer's loss and of its gradient."""
    ops, tokens = Recording(capability), (1, 32768)
    indexer, lse = (meta(*tokens, 4, 128), meta(*tokens, 128)), floats(*tokens, 64)
    lists, position = ints(*tokens, 4, 16), ints(*tokens)
    teacher = Teacher(4, 4, 4, 16, 128, 0.1, 0.1)
    arrays = meta(*tokens, 64, 128), meta(*tokens, 4, 128), lse, *indexer
    found, kept = triton_index.loss(ops, arrays, lists, position, teacher)
    triton_index.gradients(ops, teacher, *indexer, lists, position, kept, found)
    return ops.launches


def _source(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles, and its options."""
    from triton.compiler import ASTSource

    kernel = launch.kernel
    function = kernel.jitted
    pointer = functools.partial(torch.utils._pytree.tree_map, lambda x: f"*{SHORT[x]}")
    scalars = ["i32" if isinstance(x, int) else "fp32" for x in kernel.scalars]
    types = [*pointer(launch.dtypes), *scalars, *pointer([x.dtype for x in kernel.outputs])]
    signature = dict(zip(function.arg_names, [*types, "constexpr"], strict=True))
    paths = [
        (i, *more)
        for i, x in enumerate(types)
        for more in ([(j,) for j in range(len(x))] if isinstance(x, tuple) else [()])
        if more or "*" in x
    ]
    aligned = {path: [["tt.divisibility", 16]] for path in paths}
    source = ASTSource(function, signature, {"c": kernel.constants}, aligned)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    return source, options


def stage(launch: Launch, capability: int, last: str) -> tuple[str, dict[str, Any]]:
    """The text of a kernel after a stage of Triton's compiler, e.g. `ptx`, and its facts."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    source, options = _source(launch)
    target, context, stages, facts = GPUTarget("cuda", capability, 32), ir.context(), {}, {}
    backend = make_backend(target)
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    made = source.make_ir(target, options, *functions, context)
    backend.add_stages(stages, options, source.language)
    names = [*stages]
    for name in names[: names.index(last) + 1]:
        made = stages[name](made, facts)
    return str(made), facts


def running_sums(launch: Launch, capability: int) -> int:
    """How many products of a kernel, as Triton optimizes it, add to a sum that was there before."""
    text, _ = stage(launch, capability, "ttir")
    zeros = re.findall(r"(%\S+) = arith.constant dense<0.0+e\+00> : tensor<.*xf32>", text)
    return sum(x not in zeros for x in re.findall(r"tt.dot %\S+, %\S+, (%[^ ,]+)", text))


def compiled(launch: Launch, capability: int) -> Report:
    """The report of a kernel for a GPU, e.g. 89."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import compile

    kernel, (source, options) = launch.kernel, _source(launch)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(get_ptxas(capability).path).with_name("cuobjdump")
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    registers, stack = (int(re.search(rf"{x}:(\d+)", usage)[1]) for x in ("REG", "STACK"))
    return Report(
        kernel.function,
        capability,
        registers,
        stack,
        made.metadata.shared,
        "mma" in made.asm["ptx"],
    )


def reports(questions: list[tuple[Callable[..., list[Launch]], int, str]]) -> list[Report]:
    """Of each (function of a capability that gives launches, capability, kernel), e.g.
    `interval:dq`, and switches that are set; in a process of their own, since a second one takes as
    long to begin as to compile three kernels.
    """
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, _begin) as pool:
        return list(pool.map(_report, questions))


def _begin() -> None:
    warnings.simplefilter("error")
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)


def _report(question) -> Report:
    case, capability, text = question
    function, *switches = text.split()
    for launch in case(divmod(capability, 10)):
        kernel = launch.kernel
        if kernel.function == function and all(getattr(kernel.constants, x) for x in switches):
            return compiled(launch, capability)
    raise ValueError(f"{case} must launch {text}")

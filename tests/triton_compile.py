"""Compiles Triton kernels for GPUs that need not be there, and says what they take of one.

The steps run on torch's meta tensors, and what they launch is noted; `python -m
tests.triton_compile`, a process of its own, compiles what it reads and prints a report a line.
"""

import dataclasses
import functools
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kernels_pallas.triton import decode_descriptions, descriptions
from kernels_pallas.triton.kernel import TritonKernel
from nsa_core import paged_layout
from nsa_core.config import NSAConfig
from nsa_core.index import Index
from nsa_core.index_loss import Teacher
from nsa_core.paged_layout import PagedArrays
from nsa_core.steps import triton_backward, triton_decode, triton_forward, triton_index
from nsa_core.steps import triton_paged_blocks as paged_blocks
from nsa_core.steps.gradients import RowResiduals
from nsa_core.steps.params import Qkv
from nsa_core.steps.triton_paged_blocks import Paged
from nsa_core.types import Branches
from nsa_torch import operators
from nsa_torch.kernel_layout import KernelLayout
from nsa_torch.triton_ops import TritonOps
from tests.inputs import PAPER

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "triton"  # read back by the next run, as that of JAX
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32"} | {
    "float8_e4m3fn": "fp8e4nv"
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel and the dtypes of the arrays that it was given."""

    kernel: TritonKernel
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel: a thread's registers and spilled bytes, shared bytes."""

    name: str
    capability: int
    registers: int
    spills: int
    shared: int
    tensor_cores: bool


class Recording(TritonOps):
    """Notes what is launched, on any device."""

    def __init__(self, capability: tuple[int, int]):
        self.posed = capability
        self.launches: list[Launch] = []

    def run(self, kernel, *tensors):
        dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in tensors)
        self.launches.append(Launch(kernel, dtypes))
        return [
            torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="meta")
            for x in kernel.outputs
        ]

    def capability(self, x):
        return self.posed


def launches(case, capability: tuple[int, int], packed: bool = False) -> list[Launch]:
    """All kernels of a forward and a backward pass of a `tests.inputs.Case`."""
    ops = Recording(capability)
    dtype = getattr(torch, case.dtype)

    def array(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    config, count = case.config, case.config.num_compressed(case.S)
    query = array(case.B, case.T, case.H, case.D)
    cu_seqlens = array(3, dtype=torch.int32) if packed else None
    layout = KernelLayout(ops, query, *operators.arguments(config, case.S, cu_seqlens, None))
    pairs = [
        (array(case.B, n, case.Hkv, case.D), array(case.B, n, case.Hkv, case.Dv))
        for n in (count, case.S)
    ]
    indices = array(case.B, case.T, case.Hkv, config.num_selected, dtype=torch.int32)
    gate = array(case.B, case.T, case.H)
    compressed, tokens = (Qkv(query, *pair) for pair in pairs)
    steps = Branches((compressed,), (tokens, indices), (tokens,))
    added = array(case.B, case.T, case.H, case.Dv)
    for branch, arrays in steps._asdict().items():
        options: dict[str, Any] = {"gate": gate}
        if branch != "compressed":
            options["added"] = added
        out, lse = getattr(triton_forward, branch)(ops, *arrays, layout.params, **options)
        lse = gate.to(torch.float32) if lse is None else lse
        rows = RowResiduals(lse, lse, gate)
        step = getattr(triton_backward, branch)
        step(ops, *arrays, out, rows, layout.params, query)
    triton_forward.select_blocks(ops, query, pairs[0][0], lse, layout.params, 0)
    triton_backward.delta_of(ops, added, added, added, added)
    triton_forward.gated_sum(ops, [added] * 3, [gate] * 3)
    heads, tokens = (
        descriptions.Heads(case.H, case.Hkv, case.D, case.Dv, 3, means=1, gates=3, raw_keys=1),
        case.B * case.T,
    )
    angles = [array(tokens, case.D // 2).to(torch.float32)] * 2
    apart = ops.run(
        descriptions.split_heads(heads, tokens, case.dtype), array(tokens, heads.row), *angles
    )
    ops.run(descriptions.join_heads(heads, tokens, case.dtype), *apart, *angles)
    normed = heads, tokens, case.dtype, 1e-6
    given, norms = array(tokens, heads.row), [array(case.D)] * 2
    ops.run(descriptions.split_heads(*normed), given, *norms, *angles)
    ops.run(descriptions.join_heads(*normed), *apart, given, *norms, *angles)
    return list({repr(x): x for x in ops.launches}.values())


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A decode step: `B` rows of `T` queries, with tables of `pages`."""

    B: int
    T: int
    H: int
    Hkv: int
    D: int
    Dv: int
    pages: int
    dtype: str = "bfloat16"
    config: NSAConfig = PAPER
    fp8: bool = False


def decode_launches(case: DecodeCase, capability: tuple[int, int]) -> list[Launch]:
    """All kernels of a step."""
    ops, dtype = Recording(capability), getattr(torch, case.dtype)

    def array(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    sizes = 64, case.Hkv, case.D, case.Dv, case.config
    shapes = paged_layout.shapes(*sizes, separate=False, fp8_rows=8 * case.fp8)
    pages_of = torch.float8_e4m3fn if case.fp8 else dtype
    dtype_of = functools.partial(paged_layout.dtype_of, dtype=pages_of, compressed=dtype)
    cache = PagedArrays(
        case.config,
        **{
            name: array(*x, dtype=dtype_of(name, scale=torch.float32))
            for name, x in shapes.items()
            if x is not None
        },
    )
    tokens, at = case.B * case.T, (case.B, case.pages)
    table, lengths = (array(*x, dtype=torch.int32) for x in (at, at[:1]))
    gates = array(tokens, case.H, 3)
    query = array(tokens, case.H, case.D)
    triton_decode.attention(ops, query, gates, cache, table, lengths, None)
    flags = {"ragged": True, "separate": False, "means": True, "fp8_rows": 8 * case.fp8}
    widths = case.D, case.Dv
    kernels = decode_descriptions.append(
        *(tokens, *at, 64, case.Hkv, widths, case.config), **flags, slots=case.fp8
    )
    pairs = [array(tokens, case.Hkv, x) for x in widths] * 3
    pages = [cache.selected_key, cache.selected_value] * 3
    pages += [cache.compressed_key, cache.compressed_value]
    scales = [array(1, dtype=torch.float32)] * 7
    rings = [array(1)] * 2
    for kernel in kernels:
        ops.run(kernel, *pairs, *pages, table, lengths, lengths, *scales, *rings, lengths)
    entries = paged_layout.compressed_entries(case.config)
    sizes = *at, 64, case.Hkv, widths, case.dtype
    kernel = decode_descriptions.gather(*sizes, entries, 1 << 20, fp8=(False, case.fp8))
    scale = cache.compressed_value_scale if case.fp8 else lengths
    pair = cache.compressed_key, cache.compressed_value
    ops.run(kernel, *pair, lengths, scale, table, lengths)
    return ops.launches


@dataclasses.dataclass(frozen=True)
class IndexCase:
    """An indexer: `T` queries of a row whose keys are `S` tokens, or of rows with `pages`."""

    T: int
    S: int
    index: Index
    dtype: str = "bfloat16"
    B: int = 1
    pages: int = 0
    page: int = 128
    capability: tuple[int, int] | None = None  # of which it has the tiles, on all GPUs


@dataclasses.dataclass(frozen=True)
class ListsCase:
    """Attention to blocks in pages (`T` queries, `S` pages of a row), or an indexer's loss."""

    T: int
    S: int
    n: int = 16
    block: int = 128
    B: int = 1
    loss: bool = False
    capability: tuple[int, int] | None = None


def index_launches(case: IndexCase, capability: tuple[int, int]) -> list[Launch]:
    """The kernels that score and choose blocks, of keys in pages of few lists and of many."""
    ops, dtype = Recording(case.capability or capability), getattr(torch, case.dtype)
    empty = functools.partial(torch.empty, device="meta")
    if not case.pages:
        query, key = empty(case.B, case.T, 4, 128, dtype=dtype), empty(case.B, case.S, 128)
        at = empty(case.B, case.T, dtype=torch.int32)
        triton_index.blocks(ops, query, key.to(dtype), at, case.index, None)
        return ops.launches[:1]
    keys = empty(9000, case.page // case.index.entry, 128, dtype=dtype)
    for rows in (case.B, 1024 * case.B):
        table, lengths = (empty(*x, dtype=torch.int32) for x in ((rows, case.pages), (rows,)))
        query = empty(rows * case.T, 4, 128, dtype=dtype)
        paged_blocks.blocks(ops, query, keys, Paged(table, lengths, None), case.index)
    found = {}
    for launch in ops.launches:  # of `digits` one step
        if getattr(launch.kernel.constants, "SHIFT", 16) == 16:
            found.setdefault(launch.kernel.name, launch)
    return [*found.values()]


def lists_launches(case: ListsCase, capability: tuple[int, int]) -> list[Launch]:
    """The kernels of attention to blocks in pages, or of an indexer's loss."""
    ops, dtype = Recording(case.capability or capability), torch.bfloat16
    empty = functools.partial(torch.empty, dtype=dtype, device="meta")
    ints = functools.partial(empty, dtype=torch.int32)
    if not case.loss:
        query, lists = empty(case.B * case.T, 64, 128), ints(case.B * case.T, 4, case.n)
        paged = Paged(ints(case.B, case.S), ints(case.B), None)
        pages = [empty(9000, case.block, 4, 128)] * 2
        paged_blocks.attention(ops, query, *pages, lists, paged, case.block, "selected", 0.1)
        return ops.launches
    query, key = empty(case.B, case.T, 64, 128), empty(case.B, case.S, 4, 128)
    lse = empty(case.B, case.T, 64, dtype=torch.float32)
    indexer = empty(case.B, case.T, 4, 128), empty(case.B, case.S, 128)
    lists, position = ints(case.B, case.T, 4, case.n), ints(case.B, case.T)
    teacher = Teacher(4, 4, 4, 16, case.block, 0.1, 0.1)
    arrays = query, key, lse, *indexer
    found, kept = triton_index.loss(ops, arrays, lists, position, teacher)
    triton_index.gradients(ops, teacher, *indexer, lists, position, kept, found)
    return ops.launches


NOTES = {DecodeCase: decode_launches, IndexCase: index_launches, ListsCase: lists_launches}


def _source(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles, and its options."""
    from triton.compiler import ASTSource

    kernel = launch.kernel
    function = kernel.jitted
    scalars = ["i32" if isinstance(x, int) else "fp32" for x in kernel.scalars]
    pointers = [f"*{SHORT[x]}" for x in launch.dtypes]
    types = pointers + scalars + [f"*{SHORT[x.dtype]}" for x in kernel.outputs]
    signature = dict(zip(function.arg_names, [*types, "constexpr"], strict=True))
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(function.arg_names)
        if signature[x].startswith("*")
    }
    source = ASTSource(function, signature, {"c": kernel.constants}, aligned)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    return source, options


@functools.cache
def _noted(case, capability: int) -> list[Launch]:
    return NOTES.get(type(case), launches)(case, divmod(capability, 10))


def running_sums(launch: Launch, capability: int) -> int:
    """How many products of a kernel, as Triton optimizes it, add to a sum that was there before."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    source, options = _source(launch)
    target, context, stages = GPUTarget("cuda", capability, 32), ir.context(), {}
    backend = make_backend(target)
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *functions, context)
    backend.add_stages(stages, options, source.language)
    text = str(stages["ttir"](module, {}))
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


def reports(questions: list[tuple[Any, int, str]], processes: int = 2) -> list[Report]:
    """Of each (case, capability, function), e.g. `interval:dq`; in processes of their own."""
    lines = [pickle.dumps(question).hex() for question in questions]
    running = [_start(lines[i::processes]) for i in range(processes)]
    found = [None] * len(lines)
    for i, started in enumerate(running):
        found[i::processes] = _answers(*started)
    return found


def _start(lines):
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.triton_compile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(CACHE), "TRITON_INTERPRET": "0"},
    )
    text = "".join(f"{line}\n" for line in lines)
    reader = ThreadPoolExecutor(1).submit(process.communicate, text, 280)
    return process, reader


def _answers(process, reader):
    try:
        out, errors = reader.result()
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"a Triton kernel does not compile:\n{errors[-4000:]}")
    return [Report(**json.loads(line)) for line in out.splitlines()]


def main() -> None:
    for line in sys.stdin:
        case, capability, function = pickle.loads(bytes.fromhex(line))
        launch = next(x for x in _noted(case, capability) if x.kernel.function == function)
        print(json.dumps(dataclasses.asdict(compiled(launch, capability))), flush=True)


if __name__ == "__main__":
    from tests import triton_compile  # whose classes the cases are of

    triton_compile.main()

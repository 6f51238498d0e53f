"""The decode kernel compiled for Hopper on any machine, how it is launched, and on a GPU."""

import dataclasses
import itertools
import json
import textwrap

import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.runtime import description
from kernels_pallas.specs import decode as specs
from kernels_pallas.specs.decode import Variant, decode
from kernels_pallas.specs.tile import SMEM_BYTES
from tests import cross_compile
from tests import decode_oracle as oracle
from tests.decode_oracle import PAPER
from tests.devices import needs_gpu
from tests.test_decode_kernel import CASES, compare

ALIGNING = 1024  # bytes of shared memory that Mosaic takes beside what a kernel asks for
COMPILED = [
    {"variant": [4, 4, 2, 128]},
    {"variant": [4, 8, 4, 1024]},
    {"variant": [8, 8, 2, 2560]},
    {"variant": [4, 8, 2, 512], "D": 192},
    {"variant": [3, 8, 4, 512], "append": True},
    {"variant": [4, 8, 2, 512], "D": 192, "append": True},
    {"variant": [4, 4, 2, 128], "fp8": True},
    {"variant": [3, 8, 3, 1024], "fp8": True},
    {"variant": [4, 8, 2, 512], "D": 192, "fp8": True},
    {"variant": [3, 8, 3, 1024], "fp8": True, "append": True},
    {"variant": [4, 4, 2, 128], "fp8": True, "append": True},
    {
        "variant": [2, 4, 2, 128],
        "H": 16,
        "q_len": 4,
        "gate_dtype": "float16",
        "dtype": "float16",
    },
]
# Capacity and stages are numbers to a warp, whose code they do not change: of the variants that
# have the same cluster and warps the largest is compiled, and of all shared memory is counted. A
# step that also appends takes as many registers as one that does not, give or take two.
BY_SIZE = sorted(specs.VARIANTS, key=lambda x: (x.capacity, x.stages))
LARGEST = {(x.cluster, x.warps): x for x in BY_SIZE}.values()
FORMS = [{"fp8": fp8, "append": append} for fp8 in (False, True) for append in (False, True)]
APPENDING = [form for form in FORMS if form["append"]]
OTHERS = [
    *({"variant": list(dataclasses.astuple(x))} | form for x in LARGEST for form in APPENDING),
    {"variant": [4, 8, 4, 512], "block": 128, "compress_block": 64},
    {"variant": [16, 8, 4, 1024]},
]


def posed(**sizes):
    sizes["variant"] = Variant(*sizes["variant"])
    sizes = {"H": 64, "Hkv": 4, "interpret": False, "any_length": True} | sizes
    return dataclasses.replace(PAPER, **sizes)


OTHERS = [x for x in OTHERS if x not in COMPILED and specs.why_not(posed(**x)) is None]


def compiled(**sizes):
    return decode(posed(**sizes)).for_any_length()


@pytest.mark.parametrize("each", [COMPILED, OTHERS], ids=["some", "others"])
def test_every_variant_fits_the_chip(each):
    reports = cross_compile.compile_report([(f"{__name__}:compiled", x) for x in each])
    for sizes, report in zip(each, reports, strict=True):
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0, (sizes, report)
        assert report["registers"] <= 255
        counted = compiled(**sizes).spec.offsets["end"]
        assert report["shared_bytes"] <= counted + ALIGNING, sizes
        assert not report["remarks"] and not report["stack_bytes"], (sizes, report)


def test_shared_memory_of_every_variant():
    for variant, form in itertools.product(specs.VARIANTS, FORMS):
        if specs.why_not(posed(variant=dataclasses.astuple(variant), **form)) is not None:
            continue
        counted = compiled(variant=dataclasses.astuple(variant), **form).spec.offsets["end"]
        most = specs.HALF_SM if variant.warps == 4 else SMEM_BYTES
        assert counted + ALIGNING <= most, (variant, form)


def test_one_kernel_serves_all_batches_pools_and_tables():
    def generic(**sizes):
        spec = dataclasses.replace(PAPER, interpret=False, **sizes)
        return decode(spec).for_any_length()

    assert generic() is generic(B=7, pages=1000, table_pages=100)
    assert generic() is not generic(q_len=2)


def test_another_process_can_describe_it():
    kernel = decode(dataclasses.replace(PAPER, interpret=False)).for_any_length()
    there = json.loads(json.dumps(description.describe(kernel)))
    assert description.described(there) is kernel


def test_a_plan_launches_clusters_as_the_plugin_does(tmp_path):
    script = """
        import dataclasses
        from kernels_pallas.runtime import build_child
        from kernels_pallas.specs.decode import decode
        from tests import runtime_oracle as oracle
        from tests.decode_oracle import PAPER

        kernel = decode(dataclasses.replace(PAPER, B=3, Hkv=1, q_len=2, interpret=False))
        wanted = oracle.plugin(kernel)
        assert wanted.attributes == ((4, 2, 1, 1),) and wanted.grid == (12, 1, 1)
        built = build_child.build(kernel.for_any_length())
        found = oracle.ours(built, kernel)
        oracle.assert_launched_alike(found, wanted)
        numbers = sorted(int.from_bytes(x, "little") for x in found.parameters)
        assert numbers[:2] == [kernel.spec.table_pages << 8, kernel.spec.pages << 8]
        addresses = oracle.addresses(len(kernel.inputs) + len(kernel.outputs))
        assert numbers[2:] == sorted(addresses)
    """
    cross_compile.run(["-c", textwrap.dedent(script)], tmp_path)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_gpu(name):
    """Against the oracle, a hundred times the same bits, and from a CUDA graph."""
    import torch
    from nsa_interop.launch import launch

    lengths, sizes = CASES[name]
    sizes = {"B": len(lengths), "interpret": False} | sizes
    made = oracle.problem(dataclasses.replace(PAPER, **sizes), lengths)
    kernel = decode(made.spec)

    def tensor(x):
        plain = x.view(f"int{8 * x.itemsize}") if x.itemsize < 4 else x
        found = torch.from_numpy(np.ascontiguousarray(plain)).cuda()
        return found.view(getattr(torch, x.dtype.name)) if x.itemsize < 4 else found

    def numpy(out, indices):
        half = np.dtype(getattr(ml_dtypes, made.spec.dtype, made.spec.dtype))
        return out.view(torch.int16).cpu().numpy().view(half), indices.cpu().numpy()

    tensors = [tensor(x) for x in made.arrays.values()]
    first = launch(kernel, *tensors)
    assert compare(made, *numpy(*first)) > 0.9
    for _ in range(100):
        for x, y in zip(first, launch(kernel, *tensors), strict=True):
            assert torch.equal(x.view(torch.int16), y.view(torch.int16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = launch(kernel, *tensors)
    shorter = [length // 2 for length in lengths]
    tensors[list(made.arrays).index("lengths")].copy_(torch.tensor(shorter, dtype=torch.int32))
    graph.replay()
    half = launch(kernel, *tensors)
    for x, y in zip(captured, half, strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))

"""Building kernels, what is known of their machine code, and launching it without the plugin."""

import json
import shutil
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest

from bench.harness.checked_layer import symbol
from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.runtime import build as building
from kernels_pallas.runtime import driver
from kernels_pallas.runtime.bound_kernel import BoundKernel
from kernels_pallas.runtime.cubin import Cubin
from kernels_pallas.runtime.description import canonical, describe, kernel_of
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.work_items import dkv_work_items
from tests import cross_compile, kept_builders, pretend
from tests.limits import set_limits
from tests.runtime_kernels import Broken, Copy, Pair, Paired, broken, copy, ending, paired
from tests.tables import table

TABLE = table("test_runtime")
ANY_LENGTH = copy(Copy(2, 128, any_length=True))


@pytest.fixture(scope="module")
def results():
    """Of one process at a time: a kernel ends it, one raises, one comes all the same."""
    kernels = [ending(Broken("last words")), broken(Broken("too wide")), ANY_LENGTH]
    shown = []
    with mock.patch.object(building, "started", wraps=building.started) as started:
        found = dict(building.build(kernels, 1, lambda *progress: shown.append(progress)))
    assert shown == [(1, 3), (2, 3), (3, 3)]
    assert started.call_count == 1  # the kernel that ends the process is the last
    return [found[i] for i in range(3)]


@pytest.fixture(scope="module")
def cubin(results):
    return results[2].cubin


# Descriptions


def test_a_description_makes_the_same_kernel_elsewhere():
    lists = BlockQueryLists(2, 512, 512, 2, 4, 64, 4, packed=False)
    spec, place = dkv_work_items(lists), "kernels_pallas.specs.work_items:work_items"
    work_items = Kernel("work_items", spec, "", (Array((1,), "int32"),), (), source=place)
    for kernel in work_items, ANY_LENGTH, paired(Paired(Pair(3, (4, 5)))):
        again = kernel_of(json.loads(canonical(describe(kernel))))
        assert again.spec == kernel.spec and again.name == kernel.name
    assert type(again.spec.pair) is Pair  # a tuple with names


@pytest.mark.parametrize(
    "spec, source, message",
    [
        (Copy(1, 2), "", "copy must have a source, since another process builds it"),
        (
            Copy(1, object()),
            "a:b",
            "the spec of copy, field T, must consist of numbers, .* <object",
        ),
        (Copy(1, [2]), "a:b", r"field T, must consist of numbers.* got \[2\]"),
    ],
)
def test_a_kernel_that_no_other_process_can_describe(spec, source, message):
    with pytest.raises(ValueError, match=message):
        describe(Kernel("copy", spec, "", (), (), source=source))


SPEC = {"class": "kernels_pallas.specs.combine:Combine", "fields": {}}


@pytest.mark.parametrize("place", TABLE["places"])
def test_a_description_names_what_modules_of_specs_define(place, monkeypatch):
    monkeypatch.setattr("os.system", None)
    words = r"must name an object of kernels_pallas\.specs.*, got"
    for description in (
        {"source": place, "spec": 1},
        {"source": "kernels_pallas.specs.combine:gated_sum", "spec": SPEC | {"class": place}},
    ):
        with pytest.raises(ValueError, match=words):
            kernel_of(description)


# Building


def test_a_build_gives_what_a_launch_must_know(results, cubin):
    assert results[2].image.startswith(b"\x7fELF")
    assert cubin.name == "copy" and cubin.block == (128, 1, 1)
    assert cubin.entry == symbol("copy")  # what profilers and checkers show
    (maps,) = (x for x in cubin.parameters if isinstance(x, tuple))
    assert {*cubin.parameters} == {2, "T", maps}
    assert {(x.argument, x.item_bytes, x.axes, x.box) for x in maps} == {
        (i, 2, (3, 1, 2, 0), (64, 64, 1, 1)) for i in (0, 1)
    }
    assert cubin.shared_bytes >= 64 * 64 * 2 and 0 < cubin.registers < 64
    assert cubin.versions.keys() == {"jax", "ptxas"}
    assert Cubin.from_json(json.loads(json.dumps(cubin._asdict()))) == cubin


def test_a_kernel_that_fails_says_why_and_the_others_arrive(results):
    assert [str(x) for x in results[:2]] == [
        "ending could not be built: its process ended with status 3:\nlast words\n",
        "broken could not be built:\ntoo wide",
    ]
    assert list(building.build([])) == []


def test_the_working_directory_lends_no_modules(tmp_path, monkeypatch):
    other = tmp_path / "kernels_pallas" / "__init__.py"
    other.parent.mkdir()
    other.write_text("raise ImportError('of another checkout')")
    monkeypatch.chdir(tmp_path)
    ((_, built),) = building.build([ANY_LENGTH])
    assert isinstance(built, building.Built), built


def test_a_kept_process_whose_first_kernel_is_refused_builds_the_next(monkeypatch):
    """Kept processes are of tests on a GPU; this is one of them without it."""
    pretend.machine(monkeypatch, builder=kept_builders.kept)
    ((_, refused),) = building.build([broken(Broken("too wide"))], 1)
    ((_, built),) = building.build([ANY_LENGTH], 1)
    assert str(refused) == "broken could not be built:\ntoo wide"
    assert isinstance(built, building.Built), built


@pytest.mark.parametrize("what, words", TABLE["missing"].items())
def test_what_is_missing_to_build(monkeypatch, what, words):
    if what == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif what == "plugin":
        pretend.machine(monkeypatch, plugin=False)
    else:
        set_limits(monkeypatch, ptxas=(), toolkit="nowhere")
        monkeypatch.setenv("PATH", str(Path(shutil.which("cc")).parent))
    with pytest.raises(RuntimeError, match=words):
        next(building.build([ANY_LENGTH]))


# Launching. The driver is the recorder; `tests/runtime_oracle.py` says what is compared.


@pytest.fixture(scope="module")
def saved(results, tmp_path_factory):
    """The cubin and its image as files, for processes with the recorder."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "cubin.json").write_text(json.dumps(results[2].cubin._asdict()))
    (folder / "image").write_bytes(results[2].image)
    return folder


def run(script, folder, *, jax=True):
    head = f"""
        import ctypes, json, sys, threading
        if not {jax}: sys.modules["jax"] = sys.modules["jaxlib"] = sys.modules["torch"] = None
        from pathlib import Path
        from kernels_pallas.runtime import driver
        from kernels_pallas.runtime.cubin import Cubin
        from kernels_pallas.runtime.bound_kernel import BoundKernel

        folder = Path({str(folder)!r})
        cubin = Cubin.from_json(json.loads((folder / "cubin.json").read_text()))
        built = cubin, (folder / "image").read_bytes()
        recorder = ctypes.CDLL("libcuda.so.1")
        recorder.recorder_log.restype = ctypes.c_char_p
        sizes = [len(x) * 128 if isinstance(x, tuple) else 8 for x in cubin.parameters]
        recorder.recorder_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))

        def bound(T=70, cubin=cubin):
            shapes = [(2, T, 2, 64)] * 2 + [(2, 2)]
            return BoundKernel(cubin, function, shapes, {{"T": T}}, (4, 2))

        def said(call):
            lines = [json.loads(x) for x in recorder.recorder_log().splitlines()]
            return [line for line in lines if line["call"] == call]

        def refused(kind, words, function, *arguments):
            try:
                function(*arguments)
            except kind as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"not refused: {{words}}")
    """
    script = textwrap.dedent(head) + textwrap.dedent(script)
    return cross_compile.run(["-c", script], folder)


def test_a_bound_kernel_tells_the_driver_what_the_launcher_of_the_plugin_tells_it(saved):
    script = """
        from kernels_pallas.runtime import build_child
        from tests import runtime_oracle as oracle
        from tests.runtime_kernels import Copy, copy

        fixed = copy(Copy(3, 100))
        wanted, found = oracle.plugin(fixed), oracle.ours(build_child.build(fixed), fixed)
        assert found["parameters"] == wanted["parameters"]
        oracle.assert_launched_alike(found, wanted)
        for kernel in fixed, copy(Copy(1, 1)), copy(Copy(5, 70_001, 2)):
            wanted = oracle.plugin(kernel)
            found = oracle.ours(built, kernel)
            oracle.assert_launched_alike(found, wanted)
            assert oracle.maps(found) == oracle.maps(wanted)
            assert oracle.numbers(found) == sorted([kernel.spec.T << 8, oracle.addresses(3)[2]])
    """
    run(script, saved)


def test_launches_without_jax(saved):
    script = """
        function = driver.load(*built, 0)
        assert said("cuModuleLoadData")[0]["capture_mode"] == driver.RELAXED
        found = [(x["attribute"], x["value"]) for x in said("cuFuncSetAttribute")]
        assert found == [*cubin.attributes] and recorder.recorder_depth() == 0
        mode = ctypes.c_int(0)
        recorder.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        assert mode.value == 0
        kernel = bound()
        recorder.recorder_clear()

        # More addresses than are remembered, in threads: each launch has its own.
        def work(thread):
            for i in range(200):
                place = ((thread * 100 + i % 100) << 16) + 0x1000000
                kernel.launch(thread, [place, place + 256, place + 512])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        launches = said("cuLaunchKernelEx")
        assert len(launches) == 800 and len(kernel._bound) <= 256
        for x in launches:
            assert x["function"] == function.handle and x["context"] == function.context
            assert x["grid"] == [2, 4, 1] and x["shared_bytes"] == cubin.shared_bytes
            first, maps, T = (bytes.fromhex(text) for text in x["parameters"])
            heads = maps, maps[128:], first
            base, other, third = (int.from_bytes(x[:8], "little") for x in heads)
            assert third == base + 512 and other == base + 256
            assert (base - 0x1000000 >> 16) // 100 == x["stream"]
            assert int.from_bytes(T, "little") == 70 << 8
        assert sum(x["stream"] == 3 for x in launches) == 200

        words = "argument 1 of copy must start at a multiple of 256 bytes, got 0x110"
        refused(ValueError, words, kernel.launch, 0, [0, 0x110, 0])
        recorder.recorder_fail(b"cuLaunchKernelEx", 1)
        words = "copy of {'T': 70}: cuLaunchKernelEx failed with CUDA error 1, CUDA_ERROR_INVAL"
        refused(RuntimeError, words, kernel.launch, 0, [0, 256, 512])
        recorder.recorder_fail(b"cuTensorMapEncodeTiled", 1)
        words = "cuTensorMapEncodeTiled of argument 0 failed with CUDA error 1"
        refused(RuntimeError, words, kernel.launch, 0, [0x8000, 256, 512])

        newer, older = (cubin._replace(versions={"ptxas": x}) for x in ("13.5", "12.9"))
        recorder.recorder_fail(b"cuModuleLoadData", 200)
        words = "copy on device 0: cuModuleLoadData failed with CUDA error 200, CUDA_ERROR_INV"
        refused(RuntimeError, words, driver.load, newer, built[1], 0)
        words = "(the driver supports CUDA 13.0, but the kernel was compiled with CUDA 13.5; update"
        refused(RuntimeError, words, driver.load, newer, built[1], 0)
        refused(RuntimeError, "words of the stand-in", driver.load, older, built[1], 0)
        recorder.recorder_fail(b"", 0)
        assert recorder.recorder_depth() == 0
    """
    run(script, saved, jax=False)


def test_launches_that_come_again_are_a_graph(saved):
    script = """
        import logging
        from kernels_pallas.runtime import sequence

        function = driver.load(*built, 0)
        both_bound = [bound(T) for T in (70, 90)]
        both = sequence.LaunchSequence(both_bound, [(0, 1, 2), (1, 3, 2)])
        place = lambda start: tuple(start + 256 * i for i in range(4))
        def launched(stream, start):
            recorder.recorder_clear()
            both.launch(stream, place(start))
            found = said("cuLaunchKernelEx")
            return [(x["stream"], x["parameters"]) for x in found], said("cuGraphLaunch")

        first, graphs = launched(5, 1 << 20)
        assert [stream for stream, _ in first] == [5, 5] and not graphs
        where = [bytes.fromhex(x[1]) for _, x in first]
        base = lambda map: int.from_bytes(map[:8], "little")
        assert [base(x) for x in where] == [1 << 20, (1 << 20) + 256]
        assert [base(x[128:]) for x in where] == [(1 << 20) + 256, (1 << 20) + 768]
        assert launched(5, 1 << 20) == (first, []) and not said("cuGraphAddKernelNode")
        # The third run is followed by a graph of the very same launches, and remembers no more.
        kept = [len(x._bound) for x in both_bound]
        assert launched(5, 1 << 20) == (first, [])
        nodes = said("cuGraphAddKernelNode")
        assert [x["parameters"] for x in nodes] == [x for _, x in first]
        for x in nodes:
            assert x["function"] == function.handle and x["grid"] == [2, 4, 1]
            assert x["block"] == list(cubin.block) and x["shared_bytes"] == cubin.shared_bytes
        assert len(said("cuGraphDestroy")) == 1 and kept == [len(x._bound) for x in both_bound]
        assert said("cuGraphInstantiateWithFlags")[0]["capture_mode"] == driver.RELAXED
        for stream in 5, 6, 0:
            found, graphs = launched(stream, 1 << 20)
            assert not found and [(x["stream"], x["launches"]) for x in graphs] == [(stream, 2)]
        # Other addresses are counted by themselves.
        assert len(launched(5, 1 << 21)[0]) == 2

        # A stream that is captured gets launches.
        recorder.recorder_capture(ctypes.c_void_p(7))
        assert len(launched(7, 1 << 20)[0]) == 2 and launched(5, 1 << 20)[1]
        recorder.recorder_capture(None)

        # The oldest graph goes first, and with the sequence all do.
        sequence.GRAPHS = 2
        for start in (1 << 21, 1 << 22, 1 << 23):
            for _ in range(sequence.GRAPH_AFTER):
                launched(5, start)
        assert len(both.graphs) == 2
        assert [x["capture_mode"] for x in said("cuGraphExecDestroy")] == [driver.RELAXED]
        assert launched(5, 1 << 23)[1] and not launched(5, 1 << 20)[1]

        recorder.recorder_fail(b"cuGraphLaunch", 1)
        words = "copy, copy: cuGraphLaunch failed with CUDA error 1, CUDA_ERROR_INVALID_VALUE"
        refused(RuntimeError, words, both.launch, 5, place(1 << 23))
        recorder.recorder_clear()
        both = None
        assert len(said("cuGraphExecDestroy")) == 2
        # Where no graph can be made, launches go on, and it is said once.
        told = []
        handler = logging.Handler()
        handler.emit = told.append
        sequence.LOG.addHandler(handler)
        failing = b"cuGraphCreate", b"cuGraphAddKernelNode_v2", b"cuGraphInstantiateWithFlags"
        for name in failing:
            recorder.recorder_fail(name, 1)
            both = sequence.LaunchSequence(both_bound, [(0, 1, 2), (1, 3, 2)])
            for _ in range(2 * sequence.GRAPH_AFTER):
                assert len(launched(5, 1 << 20)[0]) == 2
            assert not both.graphs
        assert len(told) == 3 and "cannot build a CUDA graph of copy, copy" in told[0].getMessage()
        recorder.recorder_fail(b"", 0)

        # Addresses that come four times and never again: few graphs.
        sequence.GRAPHS = 128
        both = sequence.LaunchSequence(both_bound, [(0, 1, 2), (1, 3, 2)])
        for start in range(200):
            for _ in range(4):
                launched(5, start << 20)
        assert sequence.FREE_GRAPHS <= len(both.graphs) < sequence.FREE_GRAPHS + 5
        # Those that do come again get theirs.
        for _ in range(40):
            for start in range(200, 260):
                launched(5, start << 20)
        assert all(place(start << 20) in both.graphs for start in range(200, 260))

        # Clusters are those of a launch.
        wide = [bound(cubin=cubin._replace(cluster=2))] * 2
        both = sequence.LaunchSequence(wide, [(0, 1, 2), (1, 3, 2)])
        for _ in range(sequence.GRAPH_AFTER):
            recorder.recorder_clear()
            both.launch(5, place(1 << 20))
        nodes = [[x["attribute"], *x["value"]] for x in said("cuGraphKernelNodeSetAttribute")]
        (given,) = {str(x["attributes"]) for x in said("cuLaunchKernelEx")}
        assert nodes == 2 * [[4, 2, 1, 1]] and given == str(nodes[:1])
        assert recorder.recorder_depth() == 0
    """
    run(script, saved, jax=False)


# On a GPU


@pytest.mark.gpu
def test_one_cubin_is_right_for_every_length(results):
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    cubin, image = results[2]
    function = driver.load(cubin, image, torch.cuda.current_device())
    for B, T in (2, 128), (1, 1), (3, 100), (5, 7001):
        kernel = copy(Copy(B, T))
        shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
        bound = BoundKernel(cubin, function, shapes, kernel.sizes, kernel.grid)
        x = torch.randn(shapes[0], device="cuda").bfloat16()
        out, lengths = torch.zeros_like(x), torch.zeros(shapes[2], dtype=torch.int32).cuda()
        addresses = [tensor.data_ptr() for tensor in (x, out, lengths)]
        bound.launch(torch.cuda.current_stream().cuda_stream, addresses)
        assert torch.equal(out, x) and bool((lengths == T).all())

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            bound.launch(torch.cuda.current_stream().cuda_stream, addresses)
        x.neg_()
        graph.replay()
        assert torch.equal(out, x)


@pytest.mark.parametrize("terminal", [True, False])
def test_building_says_how_long_it_still_takes(terminal, monkeypatch, capsys):
    """On a terminal; elsewhere to one who waits for it."""
    times = iter([0.0, 5.0, 10.0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert (building.progress() is None) == (not terminal)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    tell = building.progress(waited_for=True)
    tell(1, 2), tell(2, 2)
    told = [x.rstrip() for x in capsys.readouterr().err.replace("\r", "\n").split("\n")]
    assert [x for x in told if x] == ["kernel 1 of 2, 5 s left", "kernel 2 of 2, 0 s left"]

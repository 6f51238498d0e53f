"""A strict world: no implicit promotion, warnings are errors, shapes checked at run time."""

import gc
import os
import signal
import sys
from pathlib import Path

import torch

# Read when the backends start, so set before the first import of jax. Eight CPU devices for
# the sharding tests, room on the GPU for both frameworks, and on the CPU a compiler that does
# not optimise: nearly all of the suite's time is compilation.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
FLAGS = "--xla_force_host_platform_device_count=8"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
if torch.cuda.is_available():
    # Nearly all of the time of tests on a GPU is compilation, in children with as many threads as
    # a process has cores: each worker has cores of its own.
    cores = sorted(os.sched_getaffinity(0))
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        cores = cores[int(WORKER.removeprefix("gw")) % len(cores) :: workers]
        os.sched_setaffinity(0, cores)
        # torch counted the cores of the machine when it was imported.
        torch.set_num_threads(len(cores))
        os.environ.setdefault("OMP_NUM_THREADS", str(len(cores)))
    FLAGS += " --xla_gpu_autotune_level=0"  # a product's fastest kernel is not what is tested
else:
    FLAGS += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    # Fusions by LLVM directly: through MLIR they take half of all compilation.
    FLAGS += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    # JAX's CUDA plugin asks cuSPARSE for its version, which crashes without a GPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Threads of torch that wait for each other take longer than the small sums of the tests,
    # here and in the processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", FLAGS)

# What was compiled once is read back, in this run and the next. Each worker has its own folder,
# since an entry that another worker has half written cannot be read, and is compiled again.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax" / WORKER
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from jaxtyping import install_import_hook

CHECKED = ["branches", "chunks", "compression", "geometry", "numerics", "reference"]
install_import_hook([f"nsa_jax.{name}" for name in CHECKED], "beartype.beartype")

import jax
import numpy as np
import pytest
import torch.distributed as dist
from jax._src import callback as callbacks
from jax._src.dispatch import runtime_tokens
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from kernels_pallas.mosaic import capability, interpreter
from nsa_core import policy
from tests import kept_builders
from tests.oracles import warps

jax.config.update("jax_numpy_dtype_promotion", "strict")
interpreter.use(warps)
if torch.cuda.is_available():
    kept_builders.use()


def _call_back(*arrays, result_avals, callback, sharding, ordered):
    """`callbacks.io_callback_impl` without arrays of JAX, of which the interpreter makes thousands:
    each would cost as much as what is done with it."""
    given = map(np.asarray, arrays)
    found = callback(*(x if x.ndim else x.item() for x in given))
    return [np.asarray(x, aval.dtype) for x, aval in zip(found, result_avals, strict=True)]


callbacks.io_callback_impl = _call_back

pytest_plugins = ["tests.durations"]


def pytest_addoption(parser):
    parser.addoption("--part", help="K/N: the Kth of N parts of the tests, of equal seconds.")


def may_have(marker, path):
    """Whether tests of a file may carry the marker: it is named there, or a decorator is."""
    text = path.read_text()
    return any(x in text for x in (f"mark.{marker}", "interpreted_triton", "on_hopper"))


def pytest_ignore_collect(collection_path, config):
    """What `-m gpu ..` asks for is in the files that name it: others are not imported."""
    marker = config.option.markexpr.partition(" ")[0]
    asked = marker in ("gpu", "two_gpus") and collection_path.name.startswith("test_")
    return True if asked and not may_have(marker, collection_path) else None


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU are left out, and counted as such, where there is none; those that
    -k asks for say why they do not run. Those that need two are skipped where there is one.
    """
    if config.option.part:
        from tests import durations  # a plugin: pytest loads it after this file

        items[:], others = durations.part_of(items, config.option.part, durations.read())
        config.hook.pytest_deselected(items=others)
    if torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
                item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    for path in {item.path for item in gpu}:
        assert may_have("gpu", path), f"{path.name} must name the marker of its tests"
    if gpu and config.option.keyword:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    elif gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_collection_finish():
    """What is imported stays: no collection of garbage walks through it, and tracing, which makes
    many small objects, calls for one less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_unconfigure():
    gc.unfreeze()  # or what ends with the process is reported as leaked


@pytest.fixture(autouse=True)
def no_thresholds(request):
    """A test on a GPU is small, and means to run kernels that do not pay at its sizes. What the
    test before compiled may have been made with other constants.
    """
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    from tests import limits  # imports what the hook above checks

    limits.forget()
    with policy.overridden(policy.Thresholds(0, 0, 0), "tests/conftest.py"):
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(1337)


@pytest.fixture
def mesh():
    """Of this process alone, which is a group of `torch.distributed`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, which a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def detectors(monkeypatch):
    """Mosaic kernels are interpreted; the race detector of each, in the order of their runs."""
    found, original = [], gpu_callbacks.GPURaceDetectionState

    def detector(**options):
        found.append(original(**options))
        return found[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", detector)
    with capability.interpreted(InterpretGPUParams(detect_races=True)):
        yield found
    # A failure would outlive its test.
    gpu_callbacks.reset_gpu_interpret_mode_state()
    runtime_tokens.clear()


@pytest.fixture
def interpreted(detectors):
    """Mosaic kernels are interpreted, and none may have a race."""
    yield
    assert detectors, "no kernel was interpreted"
    assert not any(detector.races_found for detector in detectors)


@pytest.fixture
def mutant(detectors):
    """Mosaic kernels are interpreted, and built anew before and after."""

    def forget():
        for name, module in list(sys.modules.items()):
            if name.startswith(("kernels_pallas.mosaic.", "kernels_pallas.specs.")):
                for builder in (x for x in vars(module).values() if hasattr(x, "cache_clear")):
                    builder.cache_clear()

    forget()
    yield detectors
    forget()

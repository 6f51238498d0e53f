"""JAX's custom call: what XLA hands over, what it asks for, what is built when."""

import collections
import ctypes
import functools
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import nsa_jax
import nsa_torch
from kernels_pallas.runtime import description, loaded
from nsa_core.plan import kernels
from nsa_jax import ffi, xla_call
from nsa_torch import NSAConfig
from tests import pretend
from tests.jaxprs import layer_types
from tests.limits import set_limits
from tests.problems import TABLE
from tests.tables import table
from tests.test_refusals import WORLDS

CONFIG = NSAConfig(window=64, num_selected=4)
LAYER = {"heads": 4, "kv_heads": 2, "key_width": 32, "config": CONFIG}
SIZE = 3
CALLS: list[xla_call.Call] = []


def run(call):
    """A "kernel" on the CPU, where XLA hands over the same frame without a stream:
    `out = a + 2 b`, or what its name says."""
    CALLS.append(call._replace(text=call.text()))
    if call.text() == "fails":
        raise ValueError("no such luck")
    memory = [(ctypes.c_char * (4 * SIZE)).from_address(x) for x in call.addresses]
    a, b, out = (np.frombuffer(x, np.float32) for x in memory)
    out[:] = a + 2 * b


HANDLER = xla_call.handler(run)  # XLA knows it until the process ends


@pytest.fixture(scope="module")
def target():
    jax.ffi.register_ffi_target("test_handler", jax.ffi.pycapsule(HANDLER), platform="cpu")

    def custom(a, b, name="kernel", **options):
        result = [jax.ShapeDtypeStruct((SIZE,), jnp.float32)]
        return jax.ffi.ffi_call("test_handler", result, **options)(
            a, b, kernel=name, key=np.int64(-7)
        )[0]

    return custom


A, B = jnp.arange(SIZE, dtype=jnp.float32), jnp.ones(SIZE)


def test_a_call_frame_is_read(target):
    CALLS.clear()
    assert (target(A, B) == A + 2).all()
    assert (jax.jit(lambda a, b: target(a, target(a, b)))(A, B) == 3 * A + 4).all()
    assert [(call.key, call.text) for call in CALLS] == [(-7, "kernel")] * 3
    assert all(len(set(call.addresses)) == 3 and call.stream is None for call in CALLS)


def test_an_output_takes_the_memory_of_an_input(target):
    CALLS.clear()
    add = jax.jit(lambda a, b: target(a, b * 1.5, input_output_aliases={1: 0}))
    assert (add(A, B) == A + 3).all()
    assert CALLS[0].addresses[1] == CALLS[0].addresses[2]


def test_an_error_is_the_callers(target):
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no such luck"):
        jax.block_until_ready(target(A, B, name="fails"))
    assert (target(A, B) == A + 2).all()


def test_threads_call_at_once(target):

    def many(i):
        call = jax.jit(lambda a, b: target(a, b, name=f"kernel{i}"))
        return [i for _ in range(50) if not (call(A + i, B) == A + i + 2).all()]

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(many, range(4)))


@pytest.fixture
def hopper(monkeypatch):
    """JAX lowers for a Hopper GPU whose kernels lie on disk."""
    asked = {"is_hopper": True, "ffi_registered": True, "on_disk": True}
    pretend.jax_gpu(monkeypatch, **asked)
    set_limits(monkeypatch, launches={}, traced_kernels=collections.OrderedDict())


def layer(length, heads=4, kv_heads=2, width=32):
    """Types of query, key, value, gates and compressed tokens."""
    of = functools.partial(layer_types, 1, heads=heads, kv_heads=kv_heads, width=width)
    return [*of(length), *of(CONFIG.num_compressed(length))[1:3]]


def program(*arrays):
    """The gradients; `arrays`: of `layer`, and segment ids of a packed row."""

    def loss(*given):
        ids = arrays[6] if len(arrays) > 6 else None
        options = {"compressed": arrays[4:6], "config": CONFIG, "segment_ids": ids}
        out = nsa_jax.attention(*given, **options, implementation="mosaic")
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2, 3))(*arrays[:4])


def lowered(function, types):
    return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))


def calls_of(function, types):
    """The key and the description of each kernel of a program."""
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            name = operation.attributes["call_target_name"].value
            assert "mosaic_gpu" not in name
            if name == ffi.TARGET:
                config = operation.attributes["mhlo.backend_config"]
                found.append((config["key"].value, config["kernel"].value))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    visit(lowered(function, types).compiler_ir().operation)
    return found


def kernel_of(text):
    return description.kernel_of(json.loads(text))


def test_a_program_names_its_kernels(hopper):
    """Forward and backward lower to custom calls, each with a description from which any process
    makes the same kernel; nothing is compiled for a length."""
    want = kernels.kernels_of(
        **LAYER, length=96, value_width=32, dtype="bfloat16", gradients=True
    )
    assert {kernel_of(text) for _, text in calls_of(program, layer(96))} == set(want)


@pytest.mark.parametrize(("length", "heads", "kv_heads", "packed", "has"), TABLE["programs"])
def test_a_program_has_no_loops(length, heads, kv_heads, packed, has, hopper):
    """XLA would launch the kernels of each of their steps, one after the other. A scatter where a
    slice is written is a kernel too, and its empty constants have crashed Shardy in `shard_map`.
    """
    types = layer(length, heads, kv_heads, width=64)
    if packed:
        types.append(jax.ShapeDtypeStruct((1, length), jnp.int32))
    text = lowered(program, types).as_text()
    assert has in text
    assert "stablehlo.while" not in text
    assert "stablehlo.scatter" not in text
    # To compile the work items of intervals takes as long as all the rest.
    assert ("searchsorted" in text) == packed


def sliding(*arrays):
    return nsa_jax.sliding_attention(*arrays, config=CONFIG, implementation="mosaic")


@pytest.mark.parametrize(("kv_heads", "copied"), [(1, True), (2, False)])
def test_slices_that_start_anywhere_are_copied(kv_heads, copied, hopper):
    """XLA hands over a slice of an array where it lies; rows of 128 bytes do not all start at a
    multiple of 256 bytes, which kernels read from.
    """

    def sliced(query, key, value):
        return sliding(query, key[:, 1:], value[:, 1:])

    types = [jax.ShapeDtypeStruct((1, 96, 4, 64), jnp.bfloat16)]
    types += [jax.ShapeDtypeStruct((1, 97, kv_heads, 64), jnp.bfloat16)] * 2
    text = lowered(sliced, types).as_text()
    names = re.search(
        r"custom_call @nsa_launch_mosaic_kernel\(%\w+, (%\w+), (%\w+)", text
    ).groups()
    assert all((f"{x} = stablehlo.optimization_barrier" in text) == copied for x in names)


def test_chunks_of_context_parallelism_copy_no_tokens(hopper):
    """Tokens behind a chunk are those of other devices: they need not become zeros."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("context",))

    def loss(*arrays):
        where = {"context_axis": "context", "implementation": "mosaic", "config": CONFIG}
        out = nsa_jax.attention(*arrays, **where)
        return jax.lax.psum(out.astype(jnp.float32).sum(), "context")

    spec = (PartitionSpec(None, "context"),) * 4
    function = jax.grad(
        jax.shard_map(loss, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    )
    text = lowered(function, layer(256)[:4]).as_text()
    assert ffi.TARGET in text
    chosen = re.findall(r"stablehlo.select [^\n]*tensor<(\w+)>$", text, re.MULTILINE)
    assert not [x for x in chosen if x.count("x") == 4]  # [1, T, heads, D]


def run_kernel(key, text, device=0):
    """As XLA does."""
    ffi._run(xla_call.Call(key, [1, 2, 3], 77, device, lambda: text))


def test_what_was_traced_is_built_together(hopper, monkeypatch):
    """By the first kernel that runs; a second run asks for nothing, another device does."""
    asked, launched = [], []

    class Bound:
        def launch(self, stream, addresses):
            launched.append((stream, addresses))

    def bound(kernel, device, prefetch):
        asked.append((kernel, device, list(prefetch())))
        return Bound()

    pretend.machine(monkeypatch, bound=bound)
    (one,), (two,) = (calls_of(sliding, layer(length)[:3]) for length in (40, 41))
    for call in (one, one, two):
        run_kernel(*call)
    run_kernel(*one, device=1)
    first, second = (kernel_of(text) for _, text in (one, two))
    assert first != second
    assert asked == [(first, 0, [first, second]), (second, 0, []), (first, 1, [])]
    assert launched == [(77, [1, 2, 3])] * 4


def test_what_cannot_be_built_is_no_custom_call(hopper, monkeypatch, caplog):
    call = None
    for length, there, missing, found in TABLE["built"]:
        pretend.machine(monkeypatch, on_disk=there, build_why_not=missing)
        loaded.can_build.cache_clear()
        text = lowered(sliding, layer(length)[:3]).as_text()
        assert (ffi.TARGET in text) == found == ("mosaic_gpu" not in text)
        call = calls_of(sliding, layer(length)[:3])[0] if found else call
    loaded.can_build.cache_clear()
    assert "each kernel for each length, in each process, because no compiler" in caplog.text
    set_limits(monkeypatch, loaded_kernels={})
    with pytest.raises(RuntimeError, match="interval_forward is not stored on disk"):
        run_kernel(*call)


def test_prepare_counts_kernels_of_all_lengths_once(monkeypatch):
    wanted = []
    load = lambda kernels, *_: wanted.extend(kernels)
    pretend.machine(monkeypatch, jax_capability=(9, 0), load=load)
    count = nsa_jax.prepare(**LAYER, lengths=(512, 640))
    assert count == len(wanted) == len(set(wanted)) > 10
    assert all(kernel.any_length for kernel in wanted)
    pretend.machine(monkeypatch, jax_capability=(8, 0))
    with pytest.raises(NotImplementedError, match=r"got \(8, 0\)"):
        nsa_jax.prepare(**LAYER)
    pretend.gpu(monkeypatch, None)
    with pytest.raises(NotImplementedError, match="need a Hopper GPU, but torch finds none"):
        nsa_torch.prepare(**LAYER)


@pytest.mark.parametrize("framework", WORLDS)
def test_prepare_passes_on_each_option(framework, monkeypatch):
    pretend.gpu(monkeypatch)
    asked = lambda kernels, *rest: ({*kernels}, *map(str, rest))
    on = {"prepare_jax": asked, "prepare_torch": asked, "jax_capability": (9, 0)}
    pretend.machine(monkeypatch, **on)
    prepare = WORLDS[framework].library.prepare
    plain = prepare(**LAYER)
    for name, value in WORLDS[framework].given(TABLE["prepared"]).items():
        assert prepare(**LAYER | {name: value}) != plain, name


HEADER = table("test_ffi")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_structures_are_those_of_the_header(tmp_path):
    ours = lambda text: eval(text, vars(xla_call))
    want = {name: ours(x) for name, x in HEADER["numbers"].items()}
    # A later minor version has more at the end of structures, and takes what this one says.
    want[f"XLA_FFI_API_MINOR >= {ours('VERSION[1]')}"] = 1
    for kind, fields in HEADER["words"].items():
        for name, word in fields.items():
            want[f"offsetof(XLA_FFI_{kind}, {name})"] = int(ours(word) * ours("WORD"))
    prints = "".join(f'printf("%zu\\n", (size_t)({x}));' for x in want)
    source, program = tmp_path / "offsets.c", tmp_path / "offsets"
    source.write_text(
        '#include <stdio.h>\n#include "xla/ffi/api/c_api.h"\nint main(void) {' + prints + "}"
    )
    include = f"-I{jax.ffi.include_dir()}"
    subprocess.run(["cc", "-w", include, str(source), "-o", str(program)], check=True)
    found = subprocess.run([program], stdout=subprocess.PIPE, check=True).stdout.split()
    assert [*map(int, found)] == [*want.values()]

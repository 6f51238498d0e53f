"""XLA's program of a training step on H100, made without one: how many kernels it launches.

A program that compiles may still compute something else, or take long.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src import compilation_cache
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nsa_jax
from bench.lm import jax_learner, jax_parallel, spec
from bench.lm.jax_lm import LM
from bench.lm.jax_parallel import Layout
from nsa_jax import Branches, ffi, xla_call
from tests import pretend
from tests.limits import set_limits

# What XLA asks of a GPU, as it prints it of an H100.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
LAYERS = 1  # each further one takes XLA two seconds more
KERNELS = 28  # of a layer, forward and backward
HIDDEN = 3712  # as of the 125M model: XLA would sum the gradients in parts
MAX_LAUNCHES = 225  # launches of the gradients, 204 at JAX 0.11.2
MAX_UPDATE = 30  # 14 at JAX 0.11.2
MAX_INSTRUCTIONS = 2475  # of all fused computations of the gradients, 2249 at JAX 0.11.2
LAUNCHED = "fusion", "copy", "custom-call", "sort", "all-reduce", "all-reduce-start"
COMPUTATION = re.compile(r"(ENTRY )?%?[\w.-]+ \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%[\w.-]+ = .*? ([a-z][\w-]*)\(")
HANDLER = xla_call.handler(lambda call: None)  # never run; XLA knows it until the process ends


@pytest.fixture
def h100(monkeypatch):
    """JAX takes the first device for one, whose kernels lie on disk."""
    monkeypatch.setattr(ffi, "TARGET", "test_jax_program")
    jax.ffi.register_ffi_target(ffi.TARGET, jax.ffi.pycapsule(HANDLER), platform="CUDA")
    pretend.jax_gpu(monkeypatch, ffi_serves=True)
    pretend.machine(monkeypatch, jax_device_name="NVIDIA H100 80GB HBM3")
    # Nobody builds what is named here.
    set_limits(monkeypatch, traced_kernels=collections.OrderedDict())
    # What is compiled for no device cannot be read again.
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda backend: False)


def step_of(devices: int, batch: int, length: int) -> jax_learner.Step:
    """Of a model of one layer of the seed system's shape, by data parallelism."""
    model = spec.ModelSpec(spec.MODELS["125m"]["layer"], "nsa", LAYERS, HIDDEN)
    options = {"dtype": jnp.dtype("bfloat16"), "implementation": Branches.each("mosaic")}
    _, shapes = nnx.split(nnx.eval_shape(lambda: LM(model, **options)))
    topology = topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=H100, topology=f"1x{devices}x1"
    )
    mesh = Mesh(np.array(topology.devices).reshape(devices, 1, 1), jax_parallel.AXES)
    whole, rows = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, jax_parallel.ROWS))
    )
    layout, axis = Layout(mesh), jax_parallel.TENSOR
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: LM(model, axis=axis, **options)))
    training = spec.Training(steps=100, batch=batch, seq_len=length)
    program = jax_learner.Program(graphdef, training, options["dtype"], layout)
    state = jax.eval_shape(program.optimizer().init, shapes)
    leaves, tree = jax.tree.flatten((shapes, state))

    def placed(x, where=whole):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    tokens = jax.ShapeDtypeStruct((1, batch, length + 1), jnp.uint8, sharding=rows)
    given, step = [*map(placed, leaves)], jax_learner._step(program, tree)
    rows = jax_learner.Rows(tokens, scalar, None)
    lowered = step.gradients.lower(given[: tree.children()[0].num_leaves], rows)
    first = lowered.compile()
    numbers, _, grads = jax.tree.map(placed, lowered.out_info, first.output_shardings)
    return jax_learner.Step(first, step.update.lower(given, grads, numbers, scalar).compile())


def launches(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    """Instructions of the program that launch something, by kind; a loop would be one."""
    found: collections.Counter[str] = collections.Counter()
    entry = False
    for line in compiled.as_text().splitlines():
        if computation := COMPUTATION.match(line):
            entry = computation[1] is not None
        elif entry and (instruction := INSTRUCTION.match(line)):
            found[instruction[1]] += 1
    assert found["parameter"]
    assert not found["while"]
    return collections.Counter({name: found[name] for name in LAUNCHED})


def instructions(compiled: jax.stages.Compiled) -> int:
    """Of the program with all that is fused: what XLA has to compile."""
    return sum(INSTRUCTION.match(line) is not None for line in compiled.as_text().splitlines())


def test_a_step_on_two_devices(h100):
    """Rows for which Shardy has crashed, at the empty constants of a scatter."""
    compiled = step_of(2, 8, 8192)
    assert instructions(compiled[0]) <= MAX_INSTRUCTIONS
    gradients, update = map(launches, compiled)
    assert gradients["custom-call"] == KERNELS * LAYERS
    assert gradients.total() <= MAX_LAUNCHES
    assert update.total() <= MAX_UPDATE
    # All gradients are summed at once.
    assert gradients["all-reduce"] + gradients["all-reduce-start"] == 1


def test_gradients_of_a_packed_batch_add_in_one_order():
    """No scatter adds floats, which a GPU does in any order."""
    ids = jnp.repeat(jnp.arange(3), jnp.array([37, 1, 52]), total_repeat_length=90)[None]
    options = {"config": nsa_jax.NSAConfig(8, 4, 16), "segment_ids": ids}

    def total(key):
        return nsa_jax.compress(key, **options).astype(jnp.float32).sum()

    key = jnp.zeros((1, 90, 2, 16), jnp.bfloat16)
    assert "scatter-add" not in str(jax.make_jaxpr(jax.grad(total))(key))

"""A strict world: no implicit promotion, warnings are errors, shapes checked at run time."""

import os

import torch

# Read when the backends start, so set before the first import of jax. Eight CPU devices for
# the sharding tests, room on the GPU for both frameworks, and on the CPU a compiler that does
# not optimise: nearly all of the suite's time is compilation.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
FLAGS = "--xla_force_host_platform_device_count=8"
if not torch.cuda.is_available():
    FLAGS += " --xla_backend_optimization_level=0"
    # JAX's CUDA plugin asks cuSPARSE for its version, which crashes without a GPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", FLAGS)

from jaxtyping import install_import_hook

CHECKED = ["branches", "chunks", "compress", "geometry", "numerics", "reference", "select"]
install_import_hook([f"nsa_jax.{name}" for name in CHECKED], "beartype.beartype")

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU are left out, and counted as such, where there is none."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture
def rng():
    return np.random.default_rng(1337)

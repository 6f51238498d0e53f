"""What an import brings with it: JAX only where JAX computes, and every public name at once."""

import importlib
import pickle
import pkgutil

import pytest

import nsa_core
import nsa_jax
import nsa_torch
from nsa_core.layer import LayerSpec
from nsa_jax import Branches, MLPParams, NSAConfig, PoolParams
from tests import spawned

# What torch shares with JAX, and a process without either must be able to import.
NEUTRAL = (
    "kernels_pallas",
    "kernels_pallas.kernel",
    "kernels_pallas.mosaic.capability",
    "kernels_pallas.runtime.build",
    "kernels_pallas.runtime.bound_kernel",
    "kernels_pallas.runtime.store",
    "kernels_pallas.specs.tile",
    "kernels_pallas.triton.capability",
    "kernels_pallas.triton.descriptions",
    "nsa_jax",
    "nsa_jax.dispatch",
    *(module.name for module in pkgutil.walk_packages(nsa_core.__path__, "nsa_core.")),
)
PLANS = f"""
import sys
for name in ("jax", "jaxlib", "flax", "torch"): sys.modules[name] = None
import {", ".join(NEUTRAL)}
assert nsa_jax.NSAConfig().window == 512
assert nsa_jax.Branches.each(1) == (1, 1, 1)
assert nsa_jax.dispatch.REGISTRY.names() == ("mosaic", "triton", "xla", "reference")
try:
    nsa_jax.attention
except ImportError as error:
    assert "import of jax halted" in str(error.__cause__), error
else:
    raise AssertionError("attention is there without JAX")
"""
NAMES = """
import nsa_jax
assert "jax" not in __import__("sys").modules
names = {"context", "debug", "indexers", "nn", "pages", "__version__"}
assert {*dir(nsa_jax)} == names | {*nsa_jax.__all__}
nsa_jax.nn.NSAAttention
for name in nsa_jax.__all__: assert getattr(nsa_jax, name).__name__ == name
from nsa_jax import *
assert callable(compress)
"""
TORCH = """
import importlib.abc, importlib.util, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jax" else find(name, *rest)

import torch, nsa_torch, nsa_torch.mosaic, nsa_torch.triton, nsa_interop.build
assert "transformers" not in sys.modules
shapes = (4, 16), (2, 16), (2, 16), (4, 3)
inputs = [torch.randn(1, 70, *shape, requires_grad=True) for shape in shapes]
nsa_torch.attention(*inputs).sum().backward()
assert "torch._dynamo" not in sys.modules  # torch's compiler takes seconds to import
assert all(torch.isfinite(x.grad).all() for x in inputs)

plan = nsa_torch.explain(*inputs[:3])
assert plan.selected.implementation == "sdpa"
try:
    nsa_torch.attention(*inputs, implementation="jax")
except NotImplementedError as error:
    assert "JAX is not installed" in str(error), error
else:
    raise AssertionError("implementation jax ran")
"""

BACKENDS = """
import nsa_torch, nsa_jax, jax
assert nsa_torch.NSAConfig is nsa_jax.NSAConfig
assert nsa_torch.Branches is nsa_jax.Branches
import torch; x = torch.zeros(1, 40, 2, 8)
nsa_torch.attention(x, x, x, torch.zeros(1, 40, 2, 3))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""

COMPILED = """
import torch, nsa_torch
inputs = [torch.randn(1, 70, *shape) for shape in ((4, 16), (2, 16), (2, 16), (4, 3))]
compiled = torch.compile(nsa_torch.attention, fullgraph=True, backend="eager")
out, want = (f(*inputs, implementation="jax") for f in (compiled, nsa_torch.attention))
torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(PLANS, id="what plans imports no framework"),
        pytest.param(NAMES, id="public names are there after the import"),
        pytest.param(TORCH, id="portable paths of torch need no JAX"),
        pytest.param(BACKENDS, id="calls of torch start no backend of JAX"),
        pytest.param(COMPILED, id="an implementation is imported by a call that is compiled"),
    ],
)
def test_imports(code):
    done = spawned.python("-c", code)
    assert done.returncode == 0, done.stderr


def test_public_names_of_torch_alone():
    assert {*dir(nsa_torch)} == {*nsa_torch.__all__, "__version__"}
    assert nsa_torch.__version__ == nsa_jax.__version__
    assert not hasattr(nsa_jax, "attend_to_everything")


def test_pickles_of_before_are_read():
    """What a program kept from before there was `nsa_core`."""
    written = (
        b"\x80\x04\x95\xfa\x01\x00\x00\x00\x00\x00\x00(\x8c\x0ensa_jax.config\x8c\tNSAConfi"
        b"g\x93)\x81}(\x8c\x0ecompress_blockK \x8c\x0fcompress_strideK\x10\x8c\x0cselect_bl"
        b"ockK@\x8c\x0cnum_selectedK\x10\x8c\x0bnum_initial\x94K\x01\x8c\tnum_local\x94K"
        b"\x02\x8c\x06windowM\x00\x01ub\x8c\rnsa_jax.types\x8c\x08Branches\x93K\x01K\x02K"
        b"\x03\x87\x81\x8c\x17nsa_jax.compress_params\x94\x8c\nPoolParams\x93K\x04\x85\x81h"
        b"\x02\x8c\tMLPParams\x93(K\x05K\x06K\x07K\x08K\tt\x81\x8c\rnsa_jax.layer\x94\x8c\t"
        b"LayerSpec\x93)\x81}(\x8c\x03dimK\x10\x8c\x07n_headsK\x02\x8c\x0bn_kv_groupsK\x01"
        b"\x8c\x03d_kK\x08\x8c\x03d_vK\x08\x8c\x01lK \x8c\x01dK\x10\x8c\x05l_selK@\x8c\x05n"
        b"_selK\x10\x8c\x01wM\x00\x02\x8c\x03phih\x03\x8c\x07Unnamed\x93\x94\x8c\x03avg\x85"
        b"\x81\x8c\nphi_hiddenN\x8c\x04gateh\x04\x8c\x07sigmoid\x85\x81\x8c\x0bgate_hiddenN"
        b"\x8c\tgate_tempG?\xf0\x00\x00\x00\x00\x00\x00\x8c\trope_baseG@\xc3\x88\x00\x00"
        b"\x00\x00\x00\x8c\nrope_scaleG?\xf0\x00\x00\x00\x00\x00\x00h\x00K\x01h\x01K\x02ubt"
        b"."
    )
    parts = PoolParams(4), MLPParams(5, 6, 7, 8, 9), LayerSpec(16, 2, 1, 8, 8)
    assert pickle.loads(written) == (NSAConfig(window=256), Branches(1, 2, 3), *parts)


@pytest.mark.parametrize("name", ["compress_params", "config", "debug", "layer", "types"])
def test_the_same_things_are_under_the_old_names(name):
    """So what one module makes, another takes."""
    old, new = (
        importlib.import_module(f"{package}.{name}") for package in ("nsa_jax", "nsa_core")
    )
    assert old is new

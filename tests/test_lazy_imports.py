"""What an import brings with it: JAX only where JAX computes, and every public name at once."""

import pkgutil
import subprocess
import sys

import nsa_core
import nsa_jax
import nsa_torch

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


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_what_plans_imports_no_framework():
    blocked = ("jax", "jaxlib", "flax", "torch")
    blocked = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    lines = [f"import {name}" for name in NEUTRAL]
    checks = [
        "assert nsa_jax.NSAConfig().window == 512",
        "assert nsa_jax.Branches.each(1) == (1, 1, 1)",
        "assert nsa_jax.dispatch.REGISTRY.names() == ('mosaic', 'triton', 'xla', 'reference')",
    ]
    done = python(blocked + "\n".join(lines + checks))
    assert done.returncode == 0, done.stderr
    done = python(blocked + "import nsa_jax\nnsa_jax.attention")
    assert done.returncode and "import of jax halted" in done.stderr


def test_public_names_are_there_after_the_import():
    code = (
        "import nsa_jax\n"
        "assert 'jax' not in __import__('sys').modules\n"
        "assert {*dir(nsa_jax)} == {*nsa_jax.__all__, 'nn', 'debug', '__version__'}\n"
        "nsa_jax.nn.NSAAttention\n"
        "for name in nsa_jax.__all__: assert getattr(nsa_jax, name).__name__ == name\n"
        "from nsa_jax import *\n"
        "assert callable(compress)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_public_names_of_torch_alone():
    assert {*dir(nsa_torch)} == {*nsa_torch.__all__, "__version__"}
    assert nsa_torch.__version__ == nsa_jax.__version__


def test_a_name_that_is_not_there():
    assert not hasattr(nsa_jax, "attend_to_everything")


def test_torch_needs_no_jax():
    """The portable paths run, and what needs JAX says so."""
    blocked = """
import importlib.abc, importlib.util, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jax" else find(name, *rest)
"""
    code = """
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
    done = python(blocked + code)
    assert done.returncode == 0, done.stderr

"""The package as users install it: a wheel, a new virtual environment for each set of extras.

    python tests/clean_environments.py             # all of ENVIRONMENTS
    python tests/clean_environments.py base jax    # these
    python tests/clean_environments.py --wheel dist/x.whl torch

The environments lie under build/clean. Each runs a program, away from the checkout, and must not
have the frameworks that its extras do not bring. In `jax` and `torch` it has the examples of
README.md. Programs run in a project that has packages called `bench`, `configs`, `interop` and
`tests` of its own, before the library on the path and behind it. `tests/test_extras.py` runs the
same programs in the test suite, where absence is simulated.

`--wheel` takes one that was built before, or an sdist. A wheel that is built from an sdist has no
kernels, which `torch` and `both` need; the others run with it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "clean"
README = (ROOT / "README.md").read_text()

# Fails unless the statement is refused by an error that names the extra.
REFUSED = """
def refused(statement, extra):
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        assert f"native-sparse-attention[{extra}]" in str(error), error
        print(f"{statement}: {error}")
    else:
        raise AssertionError(f"{statement} ran")
"""
BASE = """
import nsa_core.config, nsa_core.types, nsa_core.layer
from nsa_core import config_files
import kernels_pallas.runtime.bound_kernel, kernels_pallas.runtime.store
assert nsa_core.config.NSAConfig().num_compressed(64) == 3
assert config_files.load("base")
refused("import nsa_torch", "torch")
refused("import nsa_interop.weights", "torch")
refused("import nsa_bench.compare", "bench")
"""
JAX = """
import jax, jax.numpy as jnp, nsa_jax
query, key = jnp.ones((1, 70, 4, 16)), jnp.ones((1, 70, 2, 16))
gates = jnp.ones((1, 70, 4, 3)) / 3
loss = lambda query: nsa_jax.attention(query, key, key, gates).sum()
value, grad = jax.jit(jax.value_and_grad(loss))(query)
assert jnp.isfinite(value) and grad.shape == query.shape
"""
NO_FLAX = """
refused("import nsa_jax.nn", "nnx")
"""
NNX = """
from flax import nnx
import nsa_jax.nn
from nsa_core.layer import LayerSpec
spec = LayerSpec(dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8)
layer = nsa_jax.nn.NSAAttention(spec, rngs=nnx.Rngs(0))
assert layer(jnp.ones((1, 40, 16)))[0].shape == (1, 40, 16)
"""
TORCH = """
import torch, nsa_torch, nsa_interop.weights
layer = nsa_torch.NSAAttention(16, 2, 1, 8, 8)
layer(torch.ones(1, 40, 16))[0].sum().backward()
assert layer.W_Q.weight.grad.isfinite().all()
nsa_interop.weights.save("layer.safetensors", layer)
nsa_interop.weights.load("layer.safetensors", layer)
"""
# The kernels of a preset come with the wheel, and are found without JAX and without a GPU.
BUILT = """
from itertools import product
from nsa_core import config_files
from kernels_pallas.runtime.store import Store
from nsa_core.plan.kernels import kernels_of
from nsa_core.steps import mosaic_append, mosaic_decode, mosaic_forward
from nsa_torch import NSAConfig, dispatch
for preset in ("paper", "seed", "smallgroup"):
    settings = config_files.over_base(preset)
    model, config = settings["model"], NSAConfig(**settings["nsa"])
    sizes = [model[name] for name in ("n_heads", "n_kv_groups", "d_k", "d_v")]
    names = "heads", "kv_heads", "key_width", "value_width"
    layer = dict(zip(names, sizes), dtype="bfloat16", config=config)
    wanted = {*mosaic_append.kernels_of(**layer), *mosaic_decode.kernels_of(**layer)}
    wanted |= {mosaic_forward.selected_on_pages(**layer)} - {None}  # of groups above 8 heads
    forms = ((False, True, False), (False, True, True), (False, False, False), (True, False, False))
    for (packed, compresses, shared), gradients in product(forms, (False, True)):
        layer |= {"packed": packed, "compresses": compresses, "shared": shared}
        for n in (64, 700, 5000, 70000, 500000):
            found = kernels_of(length=n, gradients=gradients, **layer)
            wanted |= {x.for_any_length() for x in found}
    missing = [x.name for x in wanted if Store("none").get(x) is None]
    assert wanted and not missing, f"{preset}: the wheel has no {missing}"
    assert dispatch.on_disk(*sizes, "bfloat16", config), f"{preset} is not noted in the wheel"
    assert not dispatch.on_disk(2, *sizes[1:], "bfloat16", config)
"""
HF = """
import tempfile
from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = NSAForCausalLM(NSAModelConfig(vocab_size=97, **sizes, **heads)).eval()
tokens = torch.ones(1, 40, dtype=torch.int64)
text = model.generate(tokens, max_new_tokens=3, do_sample=False)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = NSAForCausalLM.from_pretrained(folder).eval()
assert (again.generate(tokens, max_new_tokens=3, do_sample=False) == text).all()
"""
NO_JAX = """
refused("import nsa_jax; nsa_jax.attention", "jax")
"""
# What a user's project may have too. Ours are never imported by these names, nor hidden by theirs.
NAMES = ("bench", "configs", "interop", "tests")
OWN = f"""
import {", ".join(NAMES)}
assert all(module.OWN for module in ({", ".join(NAMES)}))
"""


def examples(framework: str) -> str:
    """Those of README.md that need one framework, to run away from the checkout."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    others = {"jax", "nsa_jax", "torch", "nsa_torch"} - {framework, f"nsa_{framework}"}
    words = [set(re.findall(r"\w+", block)) for block in blocks]
    found = [block for block, used in zip(blocks, words, strict=True) if not used & others]
    assert found, f"README.md has no example of {framework} alone"
    return "\n".join(found)


class Environment(NamedTuple):
    """What is installed, what must not be, and what must run."""

    extras: str
    absent: tuple[str, ...]
    program: str


ENVIRONMENTS = {
    "base": Environment("", ("jax", "torch", "flax", "matplotlib"), BASE),
    "jax": Environment(
        "[jax]", ("torch", "flax", "matplotlib"), JAX + NO_FLAX + examples("jax")
    ),
    "nnx": Environment("[nnx]", ("torch", "matplotlib"), JAX + NNX),
    "torch": Environment(
        "[torch]",
        ("jax", "flax", "matplotlib"),
        TORCH + BUILT + NO_JAX + examples("torch"),
    ),
    "both": Environment("[torch,jax]", ("flax", "matplotlib"), JAX + TORCH + BUILT),
    "hf": Environment("[hf]", ("jax", "flax", "matplotlib"), TORCH + HF + NO_JAX),
}


def program(environment: Environment) -> str:
    """Python that fails unless the environment is as it must be."""
    absent = f"""
import importlib.util
for name in {environment.absent}:
    assert importlib.util.find_spec(name) is None, f"{{name}} is installed"
"""
    return absent + REFUSED + environment.program


def project(folder: Path) -> Path:
    """A user's project: a module of each of `NAMES`, as a package or as a file."""
    for name in NAMES:
        path = folder / (f"{name}.py" if name == "interop" else f"{name}/__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("OWN = True\n")
    return folder


def beside(folder: Path, first: bool, code: str) -> str:
    """`code` in the project `folder`, which is imported before and after it: `first` or last on
    the path."""
    place = 0 if first else "len(sys.path)"
    return f"import sys\nsys.path.insert({place}, {str(folder)!r})\n{OWN}{code}{OWN}"


def wheel() -> Path:
    """The wheel of this checkout, with kernels."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True)
    (built,) = (ROOT / "dist").glob("*.whl")
    return built


def check(name: str, built: Path) -> None:
    """Installs the wheel and the extras of `name` in a new environment, runs its program."""
    environment, folder = ENVIRONMENTS[name], FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    wanted = f"native-sparse-attention{environment.extras} @ {built.as_uri()}"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", wanted]
    subprocess.run(pip, check=True)
    print(f"{name}: installed {environment.extras or 'without extras'}", flush=True)
    own = project(folder / "project")
    for first in (True, False):
        code = beside(own, first, program(environment))
        subprocess.run([python, "-I", "-c", code], cwd=own, check=True)
    if "torch" in environment.extras:
        subprocess.run([python, "-m", "nsa_interop.build", "--list"], cwd=own, check=True)
    print(f"{name}: ok", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS))
    parser.add_argument("--wheel", type=Path, help="default: that of this checkout, built here")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(ENVIRONMENTS)):
        sys.exit(f"environments must be among {list(ENVIRONMENTS)}, got {unknown}")
    built = options.wheel.resolve(strict=True) if options.wheel else wheel()
    for name in options.names:
        check(name, built)


if __name__ == "__main__":
    main()

"""Runs a layer whose kernels `compute-sanitizer` checks, as a process of `bench.memory_check`.

    python -m bench.harness.checked_layer "gathered, G=4"
    python -m bench.harness.checked_layer --planted=memcheck

The layer is called three times without gradients and three times with gradients. The three results
without gradients must be bit-equal, and so must the three results with gradients. The first call
runs step by step. All later calls run from a plan (`nsa_core.plan`), in which temporary tensors
share one allocation. One JSON line lists the kernels that ran in the first call without gradients
and in the first call with gradients.
"""

import collections
import dataclasses
import json
from collections.abc import Sequence

import torch
from absl import app

import nsa_torch
from kernels_pallas.kernel import Kernel
from kernels_pallas.specs.selected import BlockCounts
from nsa_core.config import NSAConfig
from nsa_torch import plans
from nsa_torch.torch_ops import TorchOps

from . import cli, exit_status
from .records import Values
from .timed_problem import Problem, digest, named, torch_inputs

CALLS = 3
PAPER = NSAConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Problem):
    """A problem with a config.

    Attributes:
      cu_seqlens: boundaries of packed rows; tokens after the last sequence are padding.
      kernels: kernels that must run. If `gathered_merge` is among `kernels`, some tiles must be
        gathered.
    """

    config: NSAConfig = PAPER
    cu_seqlens: Sequence[int] | None = None
    kernels: Sequence[str] = ("interval_forward", "selected_forward", "dkv_partials")


LAYERS = {
    name: Layer(name=name, **sizes | {"config": NSAConfig(**sizes.get("config", {}))})
    for name, sizes in named("layers").items()
}

# For each tool, the statements of a kernel in CUDA C++ with a fault that the tool must find. The
# faults are a write past the end of an array, a barrier that not all threads of a warp reach, and
# a read with no barrier after the write.
FAULTS = {
    "memcheck": "x[128 + threadIdx.x] = 1;",
    "synccheck": "if (threadIdx.x < 60) __syncthreads(); x[threadIdx.x] = 1;",
    "racecheck": "__shared__ int y[64]; y[threadIdx.x] = 1; x[threadIdx.x] = y[63 - threadIdx.x];",
}
TOOLS = tuple(FAULTS)
FLAGS = cli.define(
    planted=(
        str,
        "Instead of a layer, run a kernel with the fault that this tool detects.",
        TOOLS,
    ),
    name=("planted", "Name of the kernel with the fault."),
)


def symbol(name: str) -> str:
    """Return the symbol in machine code of the Mosaic kernel that has this name."""
    return f"{name}_mosaic_gpu_kernel"


def plant(tool: str, name: str) -> None:
    """Run a kernel with the fault for `tool`. The symbol of this kernel looks like the symbol of a
    Mosaic kernel.
    """
    name = symbol(name)
    source = f'extern "C" __global__ void {name}(int *x) {{ {FAULTS[tool]} }}'
    kernel = torch.cuda._compile_kernel(source, name)
    x = torch.zeros(128, dtype=torch.int32, device="cuda")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x])
    torch.cuda.synchronize()


class Watch(TorchOps):
    """An `ArrayOps` that runs kernels and records their names.

    Attributes:
      launches: number of launches by kernel name.
      gathered_tiles: number of tiles whose far blocks were gathered in forward passes.
    """

    def __init__(self):
        self.launches: dict[str, int] = collections.Counter()
        self.gathered_tiles = 0

    def run(self, kernel: Kernel, *tensors: torch.Tensor):
        self.launches[kernel.name] += 1
        if kernel.name == "gathered_merge":
            counts = tensors[kernel.names.index("block_counts")]
            fields, spec = BlockCounts._fields, kernel.spec
            blocks = counts.reshape(-1, spec.all_tiles, len(fields))[
                ..., fields.index("blocks")
            ]
            # A tile is gathered if the block list of the tile before it is too long.
            self.gathered_tiles += int((blocks[:, :-1] > spec.gather_limit).sum())
        return super().run(kernel, *tensors)


def results(layer: Layer, tensors: Sequence[torch.Tensor], do: torch.Tensor):
    """Return the output of a call without gradients, the output of a call with gradients, and the
    gradients. Padding is removed.
    """
    ends, end = None, layer.T
    if layer.cu_seqlens is not None:
        ends = torch.tensor(layer.cu_seqlens, dtype=torch.int32, device="cuda")
        end = layer.cu_seqlens[-1]
    options: Values = {"config": layer.config, "cu_seqlens": ends}
    options["implementation"] = "mosaic"
    with torch.no_grad():
        alone = nsa_torch.attention(*tensors, **options)
    out = nsa_torch.attention(*tensors, **options)
    grads = torch.autograd.grad(out, tensors, do)
    return [x.detach()[:, :end] for x in (alone, out, *grads)]


def check(layer: Layer) -> Values:
    """Return the fields of the JSON line: `kernels` with the number of their launches,
    `gathered_tiles`, the `digest` of the results, and the first `fault` or None.
    """
    *tensors, do = torch_inputs(layer)
    tensors = [x.requires_grad_() for x in tensors]
    watch = Watch()
    with plans.unplanned(watch):
        found = [results(layer, tensors, do)]
    found += [results(layer, tensors, do) for _ in range(CALLS - 1)]
    digests = {digest(x) for x in found}
    fault = None
    if missing := [name for name in layer.kernels if name not in watch.launches]:
        fault = f"{', '.join(missing)} did not run"
    elif "gathered_merge" in layer.kernels and not watch.gathered_tiles:
        fault = "no tile was gathered, although the layer must run gathered_merge"
    elif not all(x.isfinite().all() for x in found[0]):
        fault = "the results must be finite"
    elif len(digests) > 1:
        fault = f"the calls must give one result, got {len(digests)} results in {CALLS} calls"
    ran = {"kernels": dict(watch.launches), "gathered_tiles": watch.gathered_tiles}
    return ran | {"digest": min(digests), "fault": fault}


def main(argv: Sequence[str]) -> int:
    if FLAGS.planted:
        plant(FLAGS.planted, FLAGS.name)
        return exit_status.OK
    if len(argv) != 2 or argv[1] not in LAYERS:
        raise app.UsageError(f"one layer must be given; known: {'; '.join(LAYERS)}")
    found = check(LAYERS[argv[1]])
    print(json.dumps(found), flush=True)
    return exit_status.WRONG if found["fault"] else exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS, arguments=True)

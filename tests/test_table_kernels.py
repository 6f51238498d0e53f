"""Tables of packed rows by Triton kernels are those of the derived steps, in every number.

On a GPU, and without one in Triton's interpreter: where that is not asked for, this file runs once
more in a process that asks for it.
"""

import itertools

import numpy as np
import pytest
import torch

from kernels_pallas.mosaic import capability
from nsa_core.config import NSAConfig
from nsa_torch import batch_tables, mosaic, table_kernels
from nsa_torch.input_modes import SHARED_KV
from nsa_torch.kernel_path import SAVING
from nsa_torch.recipes import SHARED_ARGUMENT, Recipe, followed, recipes_of
from nsa_torch.torch_ops import TORCH_OPS
from tests.inputs import SMALL
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel, run_again
from tests.planned import described

if TRITON and not INTERPRETED:

    def test_without_a_gpu():
        run_again(__file__)


CONFIGS = {
    "paper": NSAConfig(),
    "small": SMALL,
    "far blocks": NSAConfig(16, 16, 128, num_selected=3, num_local=1, window=20),
    "odd window": NSAConfig(8, 4, 16, num_selected=4, num_local=1, window=37),
}
# Query heads, key/value heads, columns: tiles of 10, 8, 4 and 64 tokens.
LAYERS = [(12, 2, 64), (8, 1, 16), (32, 2, 128), (2, 2, 64)]
ROWS = {
    "documents": (300, [0, 12, 41, 170, 300]),
    "empty ones, padding": (257, [0, 0, 33, 33, 33, 190]),
    "one token each": (65, [*range(40)]),
    "one": (700, [0, 700]),
    "nothing": (70, [0, 0, 0]),
}


def recipes(length, numbers, config, layer):
    """Of a call with residuals and its gradient, each once; and the borders."""
    heads, kv_heads, width = layer
    ends = torch.tensor(numbers, dtype=torch.int32)
    tables = batch_tables.Tables(None, True)
    sizes = {"heads": heads, "kv_heads": kv_heads, "key_width": width, "value_width": width}
    arguments = list(described(SHARED_KV, 1, length, **sizes, config=config, packed=True))
    batch_tables.attach(tables, ends)
    arguments = [ends if getattr(x, "dtype", None) == "int32" else x for x in arguments]
    with capability.interpreted(True):
        function = mosaic.PATH.planned[SHARED_KV, SAVING]
        plans = function.plans(arguments, torch.device("cpu"))
    found: dict[Recipe, None] = {}
    for plan in plans:
        of = recipes_of(plan)
        found |= dict.fromkeys(of[step.writes[0].buffer][0] for step in plan.batch)
    return list(found), ends.to(DEVICE)


def check(length, numbers, config, layer):
    """How many steps were made by kernels."""
    wanted, ends = recipes(length, numbers, config, layer)
    known, count = {SHARED_ARGUMENT: [ends]}, 0
    for recipe in wanted:
        read = [followed(each, ends.device, known)[i] for each, i, _ in recipe.reads]
        shapes = [shape for _, _, shape in recipe.reads]
        arrays = [x.reshape(shape) for x, shape in zip(read, shapes, strict=True)]
        static = dict(recipe.static)
        with torch.device(ends.device):
            right = recipe.function(TORCH_OPS, *arrays, **static)
        make = table_kernels.KERNELS.get(recipe.function)
        found = None if make is None else make(*arrays, **static)
        known[recipe] = [x.contiguous() for x in right]
        if found is None:
            continue
        count += 1
        for i, (x, y) in enumerate(zip(found, right, strict=True)):
            assert x.shape == y.shape and x.is_contiguous(), (recipe.function, i)
            assert torch.equal(x.to(torch.int64), y.to(torch.int64)), (recipe.function, i)
    return count


# Every row, every configuration and every layer, in turn.
CASES = {
    f"{name}, {config}": (*ROWS[name], CONFIGS[config], LAYERS[i % 4])
    for i, (name, config) in enumerate(zip(ROWS, [*CONFIGS] * 2, strict=False))
}


@kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tables(case):
    assert check(*case) >= 8


@kernel
@pytest.mark.parametrize("seed", range(4))
def test_random_rows(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 60, draw.integers(1, 20)) * (draw.random() > 0.1)
    ends = [0, *itertools.accumulate(lengths.tolist())]
    total = ends[-1] + int(draw.integers(1, 40))
    check(total, ends, [*CONFIGS.values()][seed], LAYERS[seed - 1])

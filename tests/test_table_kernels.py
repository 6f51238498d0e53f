"""Tables of packed rows by Triton kernels are those of the derived steps, in every number.

On a GPU, and without one in Triton's interpreter, as `test_pack.py` runs this file.
"""

import pytest
import torch

from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from nsa_core.config import NSAConfig
from nsa_torch import batch_tables
from nsa_torch.batch_tables import PlanTables
from tests.interpreted_triton import DEVICE, kernel
from tests.planned import MODES, PATHS, described
from tests.problems import TABLE

CASES = TABLE["tables of packed rows"]
# Steps that no kernel makes.
BY_TORCH = {"tokens_of_slots", "slots_of_tokens", "chunk_words"}
BY_TORCH_OF_PLACES = {"end", "causal_end", "window", "by_row"}


def plans(length, ends, config, layer, queries=None, gap=0):
    """Of a call with residuals and its gradient; in e4m3, which has none, of a call."""
    pass_ = "saving" if config.compute_dtype is None else "forward"
    mode = MODES["shared" if queries is None else "given"]
    heads, kv_heads, width = layer
    sizes = {"heads": heads, "kv_heads": kv_heads, "key_width": width, "value_width": width}
    arguments = list(described(mode, 1, length, **sizes, config=config, packed=True))
    if queries is not None:
        for i in (0, 7, 8, 9):  # query, gates
            array = arguments[i]
            arguments[i] = Array((1, queries, *array.shape[2:]), array.dtype)
    arguments[-3] = gap
    arguments = [ends if getattr(x, "dtype", None) == "int32" else x for x in arguments]
    with capability.interpreted(True):
        return PATHS["mosaic"].planned(mode, pass_).plans(arguments, torch.device("cpu"))


@kernel
@pytest.mark.parametrize("name", CASES)
def test_tables(name):
    length, numbers, config, *rest = CASES[name]
    ends = torch.tensor(numbers, dtype=torch.int32)
    for plan in plans(length, ends, NSAConfig(**config), *rest):
        steps = batch_tables.of_plan(plan, torch.device("cpu"))[0].steps
        wanted = [x.buffer for step in steps for x in step.writes]
        device = torch.device(DEVICE)
        made = [PlanTables(steps, wanted, device, kernels) for kernels in (True, False)]
        by_torch = {step.name for i, step in enumerate(steps) if i not in made[0].by_kernels}
        others = BY_TORCH_OF_PLACES if name == "e4m3" else set()
        assert by_torch <= BY_TORCH | others and not made[1].by_kernels
        # What hooks of saved tensors return may have any strides.
        column = torch.stack([ends, 3 * ends + 1], dim=1).to(DEVICE)[:, 0]
        found, right = (tables(column) for tables in made)
        for number in wanted:
            x, y = found[made[0].tensor(number)], right[made[1].tensor(number)]
            assert x.shape == y.shape and x.is_contiguous(), (number, x.shape, y.shape)
            assert torch.equal(x.to(torch.int64), y.to(torch.int64)), number
            i, start = made[0].place(number)
            assert x.data_ptr() == found[i].data_ptr() + start

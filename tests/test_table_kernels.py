"""Tables of packed rows by Triton kernels are those of the derived steps, in every number.

On a GPU, and without one in Triton's interpreter, as `test_pack.py` runs this file.
"""

import pytest
import torch

from kernels_pallas.kernel import Array
from kernels_pallas.mosaic import capability
from nsa_core.config import FLOAT8, NSAConfig
from nsa_torch import batch_tables, mosaic
from nsa_torch.batch_tables import PlanTables
from nsa_torch.kernel_path import FORWARD, SAVING
from nsa_torch.operators import PRECOMPRESSED, SHARED_KV
from tests.interpreted_triton import DEVICE, kernel
from tests.planned import described
from tests.problems import SMALL

ODD = NSAConfig(8, 4, 16, num_selected=4, num_local=1, window=37)
FAR = NSAConfig(16, 16, 128, num_selected=3, num_local=1, window=20)
# Tokens, borders, configuration, (query heads, key/value heads, columns), of which follow tiles of
# 10, 8, 4 and 64 tokens; queries, as of a chunk of a longer row, and the gap between their halves.
CASES = {
    "documents": (300, [0, 12, 41, 170, 300], NSAConfig(), (12, 2, 64)),
    "empty ones, padding": (257, [0, 0, 33, 33, 33, 190], SMALL, (8, 1, 16)),
    "one token each": (65, [*range(40)], FAR, (32, 2, 128)),
    "nothing": (70, [0, 0, 0], NSAConfig(), (2, 2, 64)),
    "a chunk": (131, [0, 59, 59, 101, 128], SMALL, (12, 2, 64), 74),
    "two chunks": (140, [0, 2, 58, 91, 91, 92, 126], ODD, (2, 2, 64), 52, 31),
    # Bounds that are made of other tables than those of tokens: keys in e4m3 have places.
    "e4m3": (300, [0, 12, 41, 170, 300], NSAConfig(compute_dtype=FLOAT8), (32, 2, 128)),
}
# Steps that no kernel makes.
BY_TORCH = {"tokens_of_slots", "slots_of_tokens", "chunk_words"}
BY_TORCH_OF_PLACES = {"end", "causal_end", "window", "by_row"}


def plans(length, ends, config, layer, queries=None, gap=0):
    """Of a call with residuals and its gradient; in e4m3, which has none, of a call."""
    pass_ = SAVING if config.compute_dtype is None else FORWARD
    mode = SHARED_KV if queries is None else PRECOMPRESSED
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
        return mosaic.PATH.planned(mode, pass_).plans(arguments, torch.device("cpu"))


@kernel
@pytest.mark.parametrize("name", CASES)
def test_tables(name):
    length, numbers, *rest = CASES[name]
    ends = torch.tensor(numbers, dtype=torch.int32)
    for plan in plans(length, ends, *rest):
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

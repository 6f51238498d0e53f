"""In which form the tokens of a call come (`kernel_path.py`).

PRECOMPRESSED    query, compressed keys and values, and those of the other branches
SEPARATE_KV      query, tokens of each branch: the kernels take the means of the compressed one's
SHARED_KV        query, tokens that all branches look at
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from nsa_core.steps.fused import Inputs
from nsa_core.types import Branches
from nsa_core.varlen import Capacity
from nsa_torch import operators


class InputMode(NamedTuple):
    """The tensors of a call of all steps: query, keys, values, three gates, `block_indices`.

    Attributes:
      name: in the kinds of operators.
      compresses: the compressed branch's keys and values are tokens, of whose windows the means
        are taken.
      shared: the tokens of all branches are the same, given once.
    """

    name: str
    compresses: bool = False
    shared: bool = False

    @property
    def count(self) -> int:
        """Tensors that have a gradient."""
        return 6 if self.shared else 10

    def tokens(self, key, value, compressed) -> Sequence[Tensor]:
        """Keys and values of a call, in order."""
        if self.shared:
            return key[0], value[0]
        if compressed is None:
            return *key, *value
        return compressed[0], *key[1:], compressed[1], *value[1:]

    def inputs(self, arguments) -> Inputs:
        """Tensors by branch."""
        query, *rest = arguments[: self.count]
        if self.shared:
            key, value, *gates = rest
            return Inputs(query, Branches.each(key), Branches.each(value), Branches(*gates))
        return Inputs(query, *(Branches(*rest[i : i + 3]) for i in (0, 3, 6)))

    def gradients(self, found: Inputs) -> list[Tensor]:
        """Those of the tensors, in order."""
        listed = found.query, *found.key, *found.value, *found.gates
        return [x for x in listed if x is not None]


PRECOMPRESSED = InputMode("precompressed")
SEPARATE_KV = InputMode("separate_kv", compresses=True)
SHARED_KV = InputMode("shared_kv", compresses=True, shared=True)


def mode_of(key, value, compressed) -> InputMode:
    """The mode of a call."""
    if compressed is not None:
        return PRECOMPRESSED
    shared = key[0] is key[1] is key[2] and value[0] is value[1] is value[2]
    return SHARED_KV if shared else SEPARATE_KV


def mean_shapes(key, value, place):
    """The means of a call, unwritten; `place`: `operators.LAYOUT_ARGS`."""
    config = operators.config_of(*operators.numbers_in(place))
    borders, length = place[2], key.compressed.shape[1]
    multiple = config.select_block // config.compress_stride
    count = -(-config.num_compressed(length) // multiple) * multiple
    if borders is not None and count:
        count = Capacity(1, length, length, borders.shape[0] - 1, length, config).slots
    for x in (key.compressed, value.compressed):
        yield x.new_empty(x.shape[0], count, *x.shape[2:])

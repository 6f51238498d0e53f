"""In which form the tokens of a call come (`kernel_path.py`).

PRECOMPRESSED    query, compressed keys and values, and those of the other branches
SEPARATE_KV      query, tokens of each branch: the kernels take the means of the compressed one's
SHARED_KV        query, tokens that all branches look at
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nsa_core.steps.fused import Inputs
from nsa_core.types import Branches
from nsa_core.varlen import Capacity
from nsa_torch import operators


class InputMode(NamedTuple):
    """The tensors of a call of all steps: query, keys, values, gates, `block_indices`.

    Attributes:
      name: in the kinds of operators.
      compresses: the compressed branch's keys and values are tokens, of whose windows the means
        are taken.
      shared: the tokens of all branches are the same, given once.
      joined: the gates are one tensor `[B, T, H, 3]`, not three.
    """

    name: str
    compresses: bool = False
    shared: bool = False
    joined: bool = False

    def with_joined_gates(self) -> "InputMode":
        """The same of gates in one tensor."""
        return self._replace(name=f"{self.name}_joined", joined=True)

    @property
    def count(self) -> int:
        """Tensors that have a gradient."""
        return (3 if self.shared else 7) + (1 if self.joined else 3)

    def tokens(self, key, value, compressed) -> Sequence[Tensor]:
        """Keys and values of a call, in order."""
        if self.shared:
            return key[0], value[0]
        if compressed is None:
            return *key, *value
        return compressed[0], *key[1:], compressed[1], *value[1:]

    def inputs(self, arguments) -> Inputs:
        """Tensors by branch, but for gates that are one."""
        query, *tokens = arguments[: 3 if self.shared else 7]
        gates = arguments[len(tokens) + 1 : self.count]
        half = len(tokens) // 2
        key, value = (
            Branches.each(x[0]) if self.shared else Branches(*x)
            for x in (tokens[:half], tokens[half:])
        )
        return Inputs(query, key, value, gates[0] if self.joined else Branches(*gates))

    def gradients(self, found: Inputs) -> list[Tensor]:
        """Those of the tensors, in order."""
        gates: Any = [found.gates] if self.joined else found.gates
        listed = found.query, *found.key, *found.value, *gates
        return [x for x in listed if x is not None]


PRECOMPRESSED = InputMode("precompressed")
SEPARATE_KV = InputMode("separate_kv", compresses=True)
SHARED_KV = InputMode("shared_kv", compresses=True, shared=True)


def mode_of(shared: bool, compressed: bool, joined: bool = False) -> InputMode:
    """The mode of a call.

    Args:
      shared: the tokens of all branches are the same.
      compressed: compressed keys and values are given.
      joined: the gates are one tensor.
    """
    mode = PRECOMPRESSED if compressed else SHARED_KV if shared else SEPARATE_KV
    return mode.with_joined_gates() if joined else mode


def are_shared(key: Branches[Tensor], value: Branches[Tensor]) -> bool:
    """Whether all branches have the same tensors."""
    return key[0] is key[1] is key[2] and value[0] is value[1] is value[2]


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

"""What the operators of all steps on kernels take (`kernel_path.py`): the tensors of three forms of
a call.

    GIVEN    query, compressed keys and values, and those of the other branches
    APART    query, tokens of each branch: the kernels take the means of the compressed one's
    SHARED   query, tokens that all branches look at
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from nsa_core.steps.fused import Inputs
from nsa_core.types import Branches
from nsa_core.varlen import Capacity
from nsa_torch import operators

BRANCHES_OF = "Tensor compressed_{0}, Tensor selected_{0}, Tensor sliding_{0}"


class Form(NamedTuple):
    """What the operators of all steps take, and their name.

    Attributes:
      name: without the prefix of the implementation.
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

    @property
    def schema(self) -> str:
        names = ("key", "value", "gate")
        key, value, gates = map(BRANCHES_OF.format, names)
        if self.shared:
            key, value = "Tensor key", "Tensor value"
        return f"Tensor query, {key}, {value}, {gates}, Tensor? block_indices, bool clean"

    @property
    def means(self) -> tuple[str, ...]:
        """What is kept of the compression."""
        return ("compressed_key_means", "compressed_value_means") if self.compresses else ()

    def tokens(self, key, value, compressed) -> Sequence[Tensor]:
        """Keys and values of a call as `schema` lists them."""
        if self.shared:
            return key[0], value[0]
        if compressed is None:
            return *key, *value
        return compressed[0], *key[1:], compressed[1], *value[1:]

    def inputs(self, arguments) -> Inputs:
        """Those that `schema` lists, by branch."""
        query, *rest = arguments[: self.count]
        if self.shared:
            key, value, *gates = rest
            return Inputs(query, Branches.each(key), Branches.each(value), Branches(*gates))
        return Inputs(query, *(Branches(*rest[i : i + 3]) for i in (0, 3, 6)))

    def gradients(self, found: Inputs) -> list[Tensor]:
        """Those of the tensors that `schema` lists."""
        listed = found.query, *found.key, *found.value, *found.gates
        return [x for x in listed if x is not None]


GIVEN = Form("attention")
APART = Form("attention_compressing", compresses=True)
SHARED = Form("attention_compressing_shared", compresses=True, shared=True)


def form_of(key, value, compressed) -> Form:
    """The form of a call."""
    if compressed is not None:
        return GIVEN
    shared = key[0] is key[1] is key[2] and value[0] is value[1] is value[2]
    return SHARED if shared else APART


def mean_shapes(key, value, place):
    """The means of a call, unwritten; `place`: `operators.PLACE`."""
    config = operators.config_of(*operators.numbers_in(place))
    borders, length = place[2], key.compressed.shape[1]
    multiple = config.select_block // config.compress_stride
    count = -(-config.num_compressed(length) // multiple) * multiple
    if borders is not None and count:
        count = Capacity(1, length, length, borders.shape[0] - 1, length, config).slots
    for x in (key.compressed, value.compressed):
        yield x.new_empty(x.shape[0], count, *x.shape[2:])

"""The forms of a call's tokens (`kernel_path.py`).

PRECOMPRESSED    query, compressed keys and values, and those of the other branches
SEPARATE_KV      query, tokens of each branch; the compressed branch averages its windows
SHARED_KV        query, tokens that all branches read
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nsa_core.config import NSAConfig
from nsa_core.steps.fused import Inputs, Pages
from nsa_core.types import Branches
from nsa_torch import operators


class InputMode(NamedTuple):
    """The tensors of a call of all steps: query, keys, values, gates, `block_indices`.

    Attributes:
      name: in the kinds of operators.
      compresses: Whether the compressed branch's keys and values are tokens whose windows are
        averaged.
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

    def inputs(self, arguments: Sequence[Any]) -> Inputs:
        """Tensors by branch, but for gates that are one."""
        half = 1 if self.shared else 3
        pairs = arguments[1 : half + 1], arguments[half + 1 : 2 * half + 1]
        key, value = (Branches.each(x[0]) if self.shared else Branches(*x) for x in pairs)
        gates = arguments[2 * half + 1 : self.count]
        each = gates[0] if self.joined else Branches(*gates)
        return Inputs(arguments[0], key, value, each)

    def gradients(self, found: Inputs) -> list[Any]:
        """The gradients of the tensors, in order."""
        gates: Any = [found.gates] if self.joined else found.gates
        listed = found.query, *found.key, *found.value, *gates
        return [x for x in listed if x is not None]


PRECOMPRESSED = InputMode("precompressed")
SEPARATE_KV = InputMode("separate_kv", compresses=True)
SHARED_KV = InputMode("shared_kv", compresses=True, shared=True)
MODES = PRECOMPRESSED, SEPARATE_KV, SHARED_KV
# The residuals of a call: none, all that its gradient needs, or those of a gradient that computes
# the branches again.
FORWARD, SAVING, RECOMPUTING = "forward", "saving", "recomputing"
PAGES = "pages"  # as FORWARD


def arranged(query, key, value, gates, compressed) -> tuple[InputMode, list[Any]]:
    """The mode of a call, and its tensors in order.

    Args:
      key, value: by branch.
      gates: By branch, or one tensor with all.
      compressed: keys and values in place of the compressed field; None means its tokens.
    """
    if compressed is not None:
        mode = PRECOMPRESSED
        tokens = compressed[0], *key[1:], compressed[1], *value[1:]
    elif key[0] is key[1] is key[2] and value[0] is value[1] is value[2]:
        mode, tokens = SHARED_KV, (key[0], value[0])
    else:
        mode, tokens = SEPARATE_KV, (*key, *value)
    if len(gates) == 1:
        mode = mode.with_joined_gates()
    return mode, [query, *tokens, *gates]


def kept_of(gradient: bool, recompute: bool) -> str:
    """The kind of residuals of a call."""
    if not gradient:
        return FORWARD
    return RECOMPUTING if recompute else SAVING


def all_steps(
    kind: Callable[[InputMode, str], str],
    query: Tensor,
    key: Branches,
    value: Branches,
    gates: Branches[Tensor],
    compressed: tuple[Tensor, Tensor] | None,
    block_indices: Tensor | None,
    *,
    config: NSAConfig,
    kv_len: int | Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    assume_finite: bool = False,
    recompute: bool = False,
    pages: Pages | None = None,
) -> Tensor:
    """Attention as one operator.

    Args:
      kind: The mode, and the kind of residuals.
      key, value: The compressed field is not read if `compressed` is given.
      compressed: `(k_cmp, v_cmp)`; None means the means.
      assume_finite: keys and values that no query may look at are finite, as in a cache, so that
        they need not be copied to be kept out.
      recompute: Whether the backward pass computes the branches again instead of storing their
        outputs.
      pages: the selected keys and values are these, of which there is no gradient.
    """
    mode, tensors = arranged(query, key, value, gates, compressed)
    keep = kept_of(operators.requires_grad(*tensors), recompute)
    if pages is not None:
        keep, tensors = PAGES, [*tensors, *pages]
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    return operators.call(kind(mode, keep), *tensors, block_indices, assume_finite, *place)[0]

"""What follows from the borders of a packed row: made once a batch where they say so, else anew in
each call.

Borders that a batch's calls share carry `Tables`, as an attribute of their tensor: whatever takes
the tensor, an operator, a saved tensor of autograd or a compiled graph, finds them. Where only the
numbers come along, what follows from them is made again.
"""

import sys
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from nsa_torch.recipes import SHARED_ARGUMENT, Known, Recipe, followed
from nsa_torch.shared import Shared

ATTRIBUTE = "nsa_tables"


class Tables:
    """Arrays by recipe. What a CUDA graph has read stays where it is as long as this object.

    Args:
      max_seqlen: tokens of the longest sequence at most.
      padded: whether tokens may be in no sequence.
    """

    def __init__(self, max_seqlen: int | None, padded: bool):
        self.sizes = max_seqlen, padded
        self._shared = Shared(limit=sys.maxsize)

    def get(
        self,
        borders: Tensor,
        plan: Hashable,
        wanted: Iterable[tuple[Recipe, int]],
        device: torch.device,
    ) -> list[Tensor]:
        """The wanted results of recipes; `plan`: what always wants the same."""

        def make():
            known: Known = {SHARED_ARGUMENT: [borders]}
            each = lambda recipe: lambda: followed(recipe, device, known)
            return [self._shared.get(x, device, each(x))[i] for x, i in wanted]

        return self._shared.get(plan, device, make)

    def refill(self, borders: Tensor, device: torch.device) -> None:
        """Makes everything anew, in the same memory, on the current stream."""
        known: Known = {SHARED_ARGUMENT: [borders]}
        make = lambda key: followed(key, device, known) if isinstance(key, Recipe) else None
        self._shared.refill(device, make)


def attach(tables: Tables, borders: Tensor) -> None:
    """Keeps from now on what follows from `borders`."""
    setattr(borders, ATTRIBUTE, tables)


def tables_of(borders: Tensor | None) -> Tables | None:
    """What is kept of `borders`, if they say so."""
    return getattr(borders, ATTRIBUTE, None)


def sizes_of(borders: Tensor | None) -> tuple[int | None, bool]:
    """`max_seqlen` and `padded`, as far as is known."""
    tables = tables_of(borders)
    return (None, True) if tables is None else tables.sizes


def of(
    borders: Tensor,
    plan: Hashable,
    wanted: Sequence[tuple[Recipe, int]],
    device: torch.device,
) -> list[Tensor]:
    """The wanted results of recipes (`Tables.get`)."""
    tables = tables_of(borders)
    if tables is not None:
        return tables.get(borders, plan, wanted, device)
    known: Known = {SHARED_ARGUMENT: [borders]}
    return [followed(recipe, device, known)[i] for recipe, i in wanted]

"""What follows from the borders of a packed row: made once a batch where they say so, else anew in
each call.

Borders that a batch's calls share carry `Tables`, as an attribute of their tensor: whatever takes
the tensor, an operator, a saved tensor of autograd or a compiled graph, finds them. Where only the
numbers come along, what follows from them is made again.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from nsa_core.plan.buffers import Plan
from nsa_torch.recipes import SHARED_ARGUMENT, Known, Recipe, followed, recipe_of, recipes_of
from nsa_torch.shared import Shared
from nsa_torch.torch_ops import TORCH_OPS

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
            known = _known(borders)
            return [self._one(recipe, device, known)[i] for recipe, i in wanted]

        return self._shared.get(plan, device, make)

    def of_plan(self, borders: Tensor, plan: Plan, device: torch.device) -> list[Tensor]:
        """All that the steps of a plan read of them."""
        kept, read = recipes_of(plan), {x.buffer for step in plan.steps for x in step.reads}
        batch = {x.buffer for step in plan.batch for x in step.writes}
        known = _known(borders)
        return [self._one(kept[n][0], device, known)[kept[n][1]] for n in sorted(read & batch)]

    def of_borders(self, recipe: Recipe, borders: Tensor) -> list[Tensor]:
        """All results of a recipe."""
        return self._one(recipe, borders.device, _known(borders))

    def _one(self, recipe: Recipe, device: torch.device, known: Known) -> list[Tensor]:
        """What it reads is kept too: other recipes may read the same."""
        if recipe not in known:
            make = lambda: followed(recipe, device, known, self._one)
            known[recipe] = self._shared.get(recipe, device, make)
        return known[recipe]

    def refill(self, borders: Tensor, device: torch.device) -> None:
        """Makes everything anew, in the same memory, on the current stream."""
        known = _known(borders)
        make = lambda key: followed(key, device, known) if isinstance(key, Recipe) else None
        self._shared.refill(device, make)


def _known(borders: Tensor) -> Known:
    """Without their tables: what follows from them follows from their numbers."""
    return {SHARED_ARGUMENT: [borders.detach()]}


def made(function: Callable[..., Sequence[Tensor]], borders: Tensor, **static: Hashable):
    """What the derived step `function` gives of `borders` and numbers."""
    tables = None if torch.compiler.is_compiling() else tables_of(borders)
    if tables is None:
        return function(TORCH_OPS, borders, **static)
    named = tuple(sorted(static.items()))
    recipe = recipe_of(function, named, ((SHARED_ARGUMENT, 0, tuple(borders.shape)),))
    return tables.of_borders(recipe, borders)


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
    known = _known(borders)
    return [followed(recipe, device, known)[i] for recipe, i in wanted]

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
from nsa_torch import table_kernels
from nsa_torch.recipes import SHARED_ARGUMENT, Known, Recipe, followed, recipe_of, recipes_of
from nsa_torch.shared import SHARED, Kept, Shared
from nsa_torch.torch_ops import TORCH_OPS

ATTRIBUTE = "nsa_tables"
UNKNOWN = None, True, 0  # `Tables.sizes` of borders that have none


class Tables:
    """Arrays by recipe. What a CUDA graph has read stays where it is as long as this object.

    Args:
      max_seqlen: tokens of the longest sequence at most.
      padded: whether tokens may be in no sequence.
      gap: tokens between the first half of the queries and the second.
    """

    def __init__(self, max_seqlen: int | None, padded: bool, gap: int = 0):
        self.sizes = max_seqlen, padded, gap
        self._shared = Shared(limit=sys.maxsize)
        self._gaps: dict[int, Tensor] = {}

    def __reduce__(self):
        """A copy of the borders' tensor has none of the arrays yet."""
        return Tables, self.sizes

    def with_gap(self, borders: Tensor, gap: int) -> Tensor:
        """`borders` for calls whose queries have a gap; the same tensor each time."""
        if gap not in self._gaps:
            max_seqlen, padded, _ = self.sizes
            self._gaps[gap] = _carrying(borders, Tables(max_seqlen, padded, gap))
        return self._gaps[gap]

    def get(
        self,
        borders: Tensor,
        plan: Hashable,
        wanted: Iterable[tuple[Recipe, int]],
        device: torch.device,
    ) -> Kept:
        """The wanted results of recipes; `plan`: what always wants the same."""

        def make():
            pairs = [*wanted]
            known = self._all(borders, [recipe for recipe, _ in pairs], device)
            return [known[recipe][i] for recipe, i in pairs]

        return self._shared.get(plan, device, make)

    def of_plan(self, borders: Tensor, plan: Plan, device: torch.device) -> list[Tensor]:
        """All that the steps of a plan read of them."""
        kept, read = recipes_of(plan), {x.buffer for step in plan.steps for x in step.reads}
        batch = {x.buffer for step in plan.batch for x in step.writes}
        wanted = [kept[n] for n in sorted(read & batch)]
        known = self._all(borders, [recipe for recipe, _ in wanted], device)
        return [known[recipe][i] for recipe, i in wanted]

    def of_borders(self, recipe: Recipe, borders: Tensor) -> list[Tensor]:
        """All results of a recipe."""
        return self._all(borders, [recipe], borders.device)[recipe]

    def _all(self, borders: Tensor, recipes: Sequence[Recipe], device: torch.device) -> Known:
        """What recipes give; it is kept, and what torch read to make it: others may read it."""
        known, kept = _known(borders), self._shared.keys()
        with torch.inference_mode(False), torch.no_grad():
            missing = dict.fromkeys(x for x in recipes if x not in kept)
            fresh = table_kernels.made(missing, borders, device)

        def one(recipe, device, known):
            if recipe not in known:
                make = lambda: fresh.get(recipe) or followed(recipe, device, known, one)
                known[recipe] = self._shared.get(recipe, device, make)
            return known[recipe]

        for recipe in recipes:
            one(recipe, device, known)
        return known

    def refill(self, borders: Tensor, device: torch.device) -> None:
        """Makes everything anew, in the same memory, on the current stream."""
        kept = [key for key in self._shared.keys() if isinstance(key, Recipe)]
        known = _known(borders) | table_kernels.made(kept, borders, device)
        make = lambda key: followed(key, device, known) if isinstance(key, Recipe) else None
        self._shared.refill(device, make)
        for x in self._gaps.values():
            getattr(x, ATTRIBUTE).refill(x, device)


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


def with_gap(borders: Tensor, gap: int) -> Tensor:
    """The same borders for calls whose queries have `gap` tokens between their halves."""
    tables = tables_of(borders)
    if tables is None:
        return _carrying(borders, Tables(None, True, gap))
    return tables.with_gap(borders, gap)


def of_one(length: int, gap: int, device: torch.device) -> Tensor:
    """The borders of one sequence, for calls whose queries have a gap."""
    make = lambda: [torch.arange(0, length + 1, length, dtype=torch.int32, device=device)]
    (found,) = SHARED.get((of_one, length, gap, device), device, make)
    if tables_of(found) is None:
        attach(Tables(length, False, gap), found)
    return found


def _carrying(borders: Tensor, tables: Tables) -> Tensor:
    """Another tensor of the same numbers."""
    found = borders.detach()
    attach(tables, found)
    return found


def sizes_of(borders: Tensor | None) -> tuple[int | None, bool, int]:
    """`max_seqlen`, `padded` and `gap`, as far as is known."""
    tables = tables_of(borders)
    return UNKNOWN if tables is None else tables.sizes


def of(
    borders: Tensor,
    plan: Hashable,
    wanted: Sequence[tuple[Recipe, int]],
    device: torch.device,
) -> Kept:
    """The wanted results of recipes (`Tables.get`)."""
    tables = tables_of(borders)
    if tables is not None:
        return tables.get(borders, plan, wanted, device)
    recipes = dict.fromkeys(recipe for recipe, _ in wanted)
    known = _known(borders) | table_kernels.made(recipes, borders, device)
    return Kept(followed(recipe, device, known)[i] for recipe, i in wanted)

"""How the arrays that a plan keeps are made: constants, and what is made once a batch.

A recipe names derived steps and their numbers, not a plan: whichever plan reads an array of a
recipe reads the same one.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_core.plan.buffers import Plan
from nsa_torch.torch_ops import TORCH_OPS

KEPT = 8192  # recipes: those of some hundred plans


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A derived step, and how what it reads is made; the number of each result, and its shape.

    Compared by identity, which is quick: `recipe_of` gives the same one for the same.
    """

    function: Callable[..., Any]
    static: tuple[tuple[str, Any], ...]
    reads: tuple[tuple["Recipe", int, tuple[int, ...]], ...]


recipe_of = functools.lru_cache(KEPT)(Recipe)


def _shared(ops, *arrays):
    raise TypeError("the shared argument is given, not made")


SHARED_ARGUMENT = recipe_of(_shared, (), ())  # `Plan.shared`
type Known = dict[Recipe, Any]  # what has been made


def recipes_of(plan: Plan) -> dict[int, tuple[Recipe, int]]:
    """Of each constant and each batch buffer: a recipe, and which of its results it is."""
    found: dict[int, tuple[Recipe, int]] = {}
    if plan.shared is not None:
        found[plan.shared] = SHARED_ARGUMENT, 0
    for step in (*plan.constants, *plan.batch):
        reads = tuple((*found[x.buffer], x.shape) for x in step.reads)
        recipe = recipe_of(step.function, step.static, reads)
        found |= {x.buffer: (recipe, i) for i, x in enumerate(step.writes)}
    return found


type Follow = Callable[[Recipe, torch.device, Known], list[Tensor]]


def followed(
    recipe: Recipe, device: torch.device, known: Known, nested: "Follow | None" = None
) -> list[Tensor]:
    """What a recipe gives, as kernels read it.

    Args:
      known: what has been made, which grows.
      nested: follows the recipes of what it reads; None: as this one.
    """
    if recipe not in known:
        follow = nested or followed
        arrays = [
            follow(each, device, known)[i].reshape(shape) for each, i, shape in recipe.reads
        ]
        # A step that reads arrays makes its results on their device. torch's device mode, which the
        # others need, takes the host as long as an operator.
        with contextlib.nullcontext() if arrays else torch.device(device):
            made = recipe.function(TORCH_OPS, *arrays, **dict(recipe.static))
        known[recipe] = [x.contiguous() for x in made]
    return known[recipe]

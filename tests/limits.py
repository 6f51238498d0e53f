"""Limits beyond which work is cut, or done by other kernels: where they stand, for tests in which
small problems shall have all of it.
"""

import functools
import pkgutil

from nsa_jax import eager
from nsa_torch import plans
from tests.tables import table

LIMITS = table("limits")


def set_limits(monkeypatch, **values):
    """Of a test, by the names of `LIMITS`. Programs of JAX are compiled again: what was compiled
    before has other limits.
    """
    changes = {place: value for name, value in values.items() for place in LIMITS[name]}
    for place in LIMITS["remembered"]:
        changes[place] = functools.lru_cache(pkgutil.resolve_name(place).__wrapped__)
    for place, value in changes.items():
        monkeypatch.setattr(place, value)


def forget():
    """What calls left for later ones: programs of JAX, and plans."""
    eager.forget()
    plans.forget()

"""Limits beyond which work is cut, or done by other kernels: where they stand, for tests in which
small problems shall have all of it.
"""

import functools
import importlib

from nsa_jax import eager
from nsa_torch import plans
from tests.tables import table

LIMITS = table("limits")


def set_limits(monkeypatch, **values):
    """Of a test, by the names of `LIMITS`. Programs of JAX are compiled again: what was compiled
    before has other limits.
    """
    for place in [*LIMITS["remembered"], *(x for name in values for x in LIMITS[name])]:
        module, _, attribute = place.rpartition(".")
        module = importlib.import_module(module)
        if place in LIMITS["remembered"]:
            value = functools.lru_cache(getattr(module, attribute).__wrapped__)
        else:
            value = next(x for name, x in values.items() if place in LIMITS[name])
        monkeypatch.setattr(module, attribute, value)


def forget():
    """What calls left for later ones: programs of JAX, and plans."""
    eager.forget()
    plans.forget()

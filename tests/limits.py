"""Limits beyond which work is cut, or done by other kernels: where they stand, for tests in which
small problems shall have all of it.
"""

import functools
import importlib

from nsa_jax import eager
from tests.tables import table

LIMITS = table("limits")


def set_limits(monkeypatch, **values):
    """Of a test, by the names of `LIMITS`. Programs of JAX are compiled again: what was compiled
    before has other limits.
    """
    program = functools.lru_cache(eager._program.__wrapped__)
    monkeypatch.setattr(eager, "_program", program)
    for name, value in values.items():
        for place in LIMITS[name]:
            module, _, attribute = place.rpartition(".")
            monkeypatch.setattr(importlib.import_module(module), attribute, value)

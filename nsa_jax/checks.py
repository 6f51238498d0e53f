"""Checks the values of arguments of public functions, if the host can read them.
`nsa_torch.checks` is the counterpart for torch. `nsa_core.validate` checks shapes and dtypes.
"""

from typing import Any

import jax
import numpy as np

from nsa_core import block_lists, debug, validate


def is_read(x: Any) -> bool:
    """Return whether the host reads the values of an argument. The host reads values if it need
    not wait for a device, or if `nsa_core.debug` is on.
    """
    if isinstance(x, jax.core.Tracer):
        return False
    here = not isinstance(x, jax.Array) or {each.platform for each in x.devices()} == {"cpu"}
    return here or debug.on


def read(x: Any) -> np.ndarray | None:
    """Return the values of an argument, or None if the host does not read them."""
    return np.asarray(x) if is_read(x) else None


def within(name: str, x: Any, least: int, most: int) -> None:
    """Check that the values of an array are in the allowed range. Objects other than arrays are
    ignored."""
    if hasattr(x, "dtype") and (found := read(x)) is not None:
        validate.numbers(name, found, least, most)


def distinct(block_indices: Any) -> None:
    """Raise ValueError if a list contains a block twice."""
    if (found := read(block_indices)) is not None:
        block_lists.refuse_repeated(found)

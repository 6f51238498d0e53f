"""Describes a kernel in JSON.

The description determines the key of the kernel in the store, and other processes build the kernel
from its description.

`Kernel.source` names the function that describes the kernel, and the spec is stored as its class
and fields. A description may use only names that the modules in `PLACES` define.
"""

import dataclasses
import importlib
import json
import re
from typing import Any

from kernels_pallas.kernel import Kernel

# Packages and modules. Tests add their own, whose sources are not part of keys.
PLACES = ["kernels_pallas.specs"]


def describe(kernel: Kernel) -> dict[str, Any]:
    """Return the description of a kernel, with values that JSON supports.

    Raises:
      ValueError: The kernel has no `source`, or its spec has a value that is not a static size.
    """
    if not kernel.source:
        raise ValueError(
            f"{kernel.name} must have a source, since another process builds it, got none"
        )
    return {"source": kernel.source, "spec": _plain(kernel.spec, f"the spec of {kernel.name}")}


def kernel_of(description: dict[str, Any]) -> Kernel:
    """Return the kernel that the source of a description returns for the spec of the description.

    Raises:
      ValueError: No module of `PLACES` defines a name in the description.
    """
    return _named(description["source"])(_value(description["spec"]))


def canonical(value: Any) -> str:
    """Return the values as JSON. Equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [_plain(x, where) for x in value]}
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    if named or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        names = value._fields if named else [x.name for x in dataclasses.fields(value)]
        return {
            "class": f"{type(value).__module__}:{type(value).__qualname__}",
            "fields": {x: _plain(getattr(value, x), f"{where}, field {x},") for x in names},
        }
    raise ValueError(
        f"{where} must consist of numbers, strings, tuples and dataclasses, got {value!r:.200}"
    )


def _value(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    if "tuple" in data:
        return tuple(_value(x) for x in data["tuple"])
    return _named(data["class"])(**{name: _value(x) for name, x in data["fields"].items()})


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    places = "|".join(map(re.escape, PLACES))
    if name.isidentifier() and re.fullmatch(rf"({places})(\.\w+)*", module):
        found = getattr(importlib.import_module(module), name, None)
        if getattr(found, "__module__", None) == module:
            return found
    raise ValueError(f"a description must name an object of {', '.join(PLACES)}, got {place!r}")

"""Refusals as data (`refusals.yaml`): of each call, what changes in it, and the sentence."""

import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nsa_torch import Branches, NSAConfig, PoolParams, RopeMLPParams
from tests.tables import table

TABLE = table("refusals")
# Dtype, kind, sizes or numbers by rows, a shape, and where the array is or how.
ARRAY = re.compile(
    r"(?:(\w+) )?(zeros|ints) ([\dx]+|[-\d /]+?)(?: in ([\dx]+))?(?: |$)"
    r"(|sparse|on meta|every other|with a gradient|of \w+)$"
)
MAKERS = {
    "tuple": lambda *x: x,
    "Branches": Branches,
    "NSAConfig": NSAConfig,
    "PoolParams": PoolParams,
    "RopeMLPParams": RopeMLPParams,
}


def sizes(text):
    return [int(x) for x in text.split("x")]


def array(text, framework):
    """What such words mean, of this framework; None if they mean no array."""
    if not (found := ARRAY.match(text)):
        return None
    dtype, kind, numbers, shape, where = found.groups()
    if kind == "zeros":
        x = np.zeros(sizes(numbers), np.float32)
    else:
        x = np.array([[*map(int, row.split())] for row in numbers.split("/")], np.int32)
        x = x if "/" in numbers else x[0]
    if shape:
        x = np.broadcast_to(x, sizes(shape)).copy()
    framework = where.removeprefix("of ") if where.startswith("of ") else framework
    if framework == "numpy":
        return x.astype(dtype or x.dtype)
    if framework == "jax":
        return jnp.asarray(x, dtype)
    x = torch.from_numpy(x)
    x = x.to(getattr(torch, dtype)) if dtype else x
    changes = {
        "sparse": torch.Tensor.to_sparse,
        "on meta": lambda x: x.to("meta"),
        "every other": lambda x: x[::2],
        "with a gradient": torch.Tensor.requires_grad_,
    }
    return changes.get(where, lambda x: x)(x)


def given(x, framework="torch", makers=MAKERS):
    """The value that a part of a row means; `makers`: by the names of mappings of one entry."""
    if isinstance(x, str):
        if x.startswith("dtype "):
            return getattr(torch if framework == "torch" else jnp, x.split()[1])
        found = array(x, framework)
        return x if found is None else found
    if isinstance(x, list):
        return [given(each, framework, makers) for each in x]
    if isinstance(x, dict):
        found = {name: given(each, framework, makers) for name, each in x.items()}
        if len(found) != 1 or (name := next(iter(found))) not in makers:
            return found
        make, of = makers[name], found[name]
        return make(**of) if isinstance(of, dict) else make(*of)
    return x


class Row(NamedTuple):
    """What changes in a call, the sentence that refuses the call, and the error."""

    changes: dict[str, Any]
    sentence: str
    error: type[Exception]

    def given(self, framework="torch", makers=MAKERS):
        return given(self.changes, framework, makers)

    def refused(self):
        return refused(self.sentence, self.error)


def refused(sentence, error=ValueError):
    """What runs within is refused with the sentence."""
    return pytest.raises(error, match=words(sentence))


def by_row(*path):
    """The test runs once for each row of a table."""
    return pytest.mark.parametrize("row", rows(*path), ids=lambda row: row.sentence[:60])


def rows(*path):
    """The rows of a table."""
    kinds = {"says": ValueError, "refuses": NotImplementedError, "rejects": TypeError}
    table = TABLE
    for name in path:
        table = table[name]
    found = []
    for row in table:
        (how,) = kinds.keys() & row
        changes = {k: x for k, x in row.items() if k != how}
        found.append(Row(changes, row[how], kinds[how]))
    return found


def words(sentence):
    """As a pattern: "*" stands for anything."""
    return re.escape(sentence).replace(r"\*", ".*")

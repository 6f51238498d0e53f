"""The properties of cached tokens that shapes and sizes do not determine."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any, Self

from nsa_core.compress_params import CompressParams, MLPParams, PoolParams, RopeMLPParams

# The values of `LayerSpec.phi` for each type of `compress_params`.
PHI = {type(None): "avg", PoolParams: "mlp", MLPParams: "mlp_pe", RopeMLPParams: "mlp_rope"}

type Facts = Sequence[tuple[str, Any]]  # names and values


@dataclasses.dataclass(frozen=True)
class Contents:
    """Records how the tokens of a cache were computed. The record consists of facts, which are
    pairs of a name and a value. The first write sets a fact, and later writes must agree with it.
    """

    said: Facts = ()

    def with_facts(self, facts: Facts, kind: str = "") -> Self:
        """Add the `facts` of another write to the contents.

        Args:
          kind: The purpose of the cache in the error message, such as `"for a model "`.

        Raises:
          ValueError: A fact contradicts an earlier fact.
        """
        known = dict(self.said)
        for name, value in facts:
            if known.setdefault(name, value) != value:
                raise ValueError(
                    f"cache must be made {kind}with {name}={value!r}, got a cache made with "
                    f"{known[name]!r}"
                )
        return dataclasses.replace(self, said=tuple(sorted(known.items())))

    def __bool__(self) -> bool:
        return bool(self.said)


def facts_of(params: tuple[CompressParams, CompressParams], made_with: Facts = ()) -> Facts:
    """Return the facts of a write: `made_with`, and the kinds of `params` for keys and values.

    Raises:
      ValueError: `made_with` does not consist of pairs of a name and a hashable value.
    """
    if not isinstance(made_with, tuple | list) or not _are_facts(made_with):
        raise ValueError(
            "made_with must be pairs of a name and a hashable value, such as "
            f'(("rope_base", 1e4),), got {made_with!r}'
        )
    phi = ((f"phi_{x}", PHI[type(one)]) for x, one in zip("kv", params, strict=True))
    return *made_with, *phi


def _are_facts(pairs: Sequence[Any]) -> bool:
    try:
        said = dict(pairs)
        "".join(said), hash(tuple(said.values()))
    except (TypeError, ValueError):
        return False
    return not any([getattr(x, "shape", ()) for x in said.values()])


def summary(cache: Any, key: str, value: str, length: Any = None, **facts: Any) -> str:
    """Return a text of one line that describes a cache. The function accepts any objects as arrays,
    since transforms may replace arrays by other objects.
    """
    arrays = {name: getattr(cache, name) for name in (key, value)}
    words = {name: getattr(x, "shape", x) for name, x in arrays.items()}
    words = {name: tuple(x) if isinstance(x, tuple) else x for name, x in words.items()} | facts
    words["dtype"] = getattr(arrays[key], "dtype", None)
    if length is not None:
        try:
            words["lengths"] = reprlib.repr(length.tolist())
        except Exception:  # the array is traced, or has no memory
            words["lengths"] = "unknown"
    said = ", ".join(f"{name}={value}" for name, value in words.items())
    return f"{type(cache).__name__}({said})"


UNSAID = Contents()
MEANS = Contents(facts_of((None, None)))

"""What the tokens of a cache were made with, as far as shapes and sizes do not tell."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from nsa_core.compress_params import CompressParams, MLPParams, PoolParams, RopeMLPParams

# By the type of `compress_params`, the words of `LayerSpec.phi`.
PHI = {type(None): "avg", PoolParams: "mlp", MLPParams: "mlp_pe", RopeMLPParams: "mlp_rope"}

type Facts = Sequence[tuple[str, Any]]  # names and values


@dataclasses.dataclass(frozen=True)
class Contents:
    """Set by the first writer; a later one must not say otherwise. What nobody said is open."""

    said: Facts = ()

    def with_facts(self, facts: Facts, kind: str = "") -> Self:
        """What is known once a writer has said `facts`.

        Args:
          kind: of what the cache is made for, in the message.

        Raises:
          ValueError: one of them contradicts what was said before.
        """
        known = dict(self.said)
        for name, value in facts:
            if known.setdefault(name, value) != value:
                raise ValueError(
                    f"cache must be made {kind}with {name}={value!r}, "
                    f"got one with {known[name]!r}"
                )
        return dataclasses.replace(self, said=tuple(sorted(known.items())))

    def __bool__(self) -> bool:
        return bool(self.said)


def facts_of(params: tuple[CompressParams, CompressParams]) -> Facts:
    """What parameters of the compression say, those of keys and those of values."""
    return tuple((f"phi_{x}", PHI[type(one)]) for x, one in zip("kv", params, strict=True))


UNSAID = Contents()
MEANS = Contents(facts_of((None, None)))

"""Defines the letters of shapes, the container of the three branches, and the rules of numerics.

| letter                       | size                      |
|------------------------------|---------------------------|
| `B`                          | batch rows                |
| `T`                          | queries per row           |
| `S`                          | keys per row              |
| `H`                          | query heads               |
| `Hkv`                        | key/value heads           |
| `G = H // Hkv`               | query heads per group     |
| `D`                          | width of queries and keys |
| `Dv`                         | width of values           |
| `C`                          | compressed tokens         |
| `N = ceil(S / select_block)` | selection blocks          |
| `n`                          | selected blocks per query |

Query heads of one group are adjacent: head `h` reads key/value head `h // G`. Queries are
aligned to the end of the keys: query `t` has position `p = t + kv_len - T` in its sequence. In a
packed batch positions restart in every sequence, and no query reads another sequence.

Numerics, for every implementation:
  Softmax, log-sum-exp and sums are computed in float32, or in float64 for float64 input. `lse`
  `[B, T, H]` is a natural logarithm. A query without keys has the output 0, the lse `-inf` and
  the gradient 0, never NaN. Block indices are int32, ascending and without duplicates, with
  `-1` in the empty slots at the end. No output, score or block index depends on later tokens.
"""

from typing import Any, NamedTuple

# Policies of `jax.checkpoint` identify residuals that are not inputs by this name.
RESIDUAL = "nsa_residual"


class Branches[X](NamedTuple):
    """One value for each branch, always in the order of the fields.

    In JAX a `Branches` is a pytree.
    """

    compressed: X
    selected: X
    sliding: X

    @classmethod
    def each(cls, value: Any) -> "Branches[Any]":
        """Return `value` if it is a `Branches`.

        If `value` is not a `Branches`, return a `Branches` with `value` for every branch.
        """
        return value if isinstance(value, cls) else cls(value, value, value)

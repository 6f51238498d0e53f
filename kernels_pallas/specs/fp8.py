"""Describes the rounding of keys and values to e4m3, for the products of the forward pass.

| kernel      | results                                                               |
|-------------|-----------------------------------------------------------------------|
| `fp8_sums`  | sum and largest absolute value of each column in each chunk of tokens |
| `fp8_round` | K8 = (K - mean) / key_scale, V8 = V / value_scale                     |

For each head and column, the mean of the keys of a row cancels in the softmax. Scales are powers of
two, one per head and column. The kernels multiply the query by the scales of K, and the output by
the scales of V.

Numbers are stored as pairs in int16. K8 is stored by token, and V8 is stored by column. Q K^T sums
over the columns of keys, and P V sums over the keys in a column of V. The axes over which the
two products sum are permuted in groups of 16. The permutation in groups of 16 makes the result of a
product a left operand without a shuffle (`mosaic/fp8.py`). Number 8 j + 2 t + e of a group is
stored at 4 t + 2 j + e, for t < 4 and j, e < 2.

Keys are indexed by slot. In packed rows each sequence begins at a multiple of 64
(`nsa_core.varlen`). In unpacked rows the slot of a key is its index.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, Spec, described, float32, int32
from kernels_pallas.specs import tile
from kernels_pallas.specs.compress import TokenWords

GROUP = 16  # size of the groups that are permuted
LARGEST = 448.0  # largest finite number in e4m3
SMALLEST = 2.0**-100  # smallest scale
# P is multiplied by 2^OFFSET. The largest product is then 2^8, since the largest probability of
# a row is 1.
OFFSET = 8.0
CHUNKS = 64  # number of chunks of a row's tokens, which are summed separately
LOADS = 32  # number of loads that a lane starts before it waits for one of them
TILES = 4  # number of tiles of 64 slots that a warp rounds


@dataclasses.dataclass(frozen=True)
class Rounding(TokenWords, Spec):
    """Static sizes: keys `[B, S, Hkv, D]`, values `[B, S, Hkv, Dv]`, in 16 bits; D is a
    multiple of 32, and Dv is a multiple of 2.

    Attributes:
      places: Number of slots per row, a multiple of 64.
      packed: Whether the slots are those of `nsa_core.varlen`.
    """

    B: int
    S: int
    Hkv: int
    D: int
    Dv: int
    places: int
    dtype: str
    packed: bool = False

    @property
    def nominal(self) -> dict[str, Any]:
        return {"B": 2, "S": NOMINAL_LENGTH, "places": NOMINAL_LENGTH}

    @cached_property
    def chunk(self) -> int:
        """The number of tokens per chunk, a multiple of `LOADS`."""
        return tile.cdiv(tile.cdiv(self.S, CHUNKS), LOADS) * LOADS

    @cached_property
    def tiles(self) -> int:
        """Number of tiles of 64 slots per row."""
        return self.places // tile.ROWS

    @property
    def tokens(self) -> dict[str, Array]:
        shape = self.B, self.S, self.Hkv
        return {
            "key": Array((*shape, self.D), self.dtype),
            "value": Array((*shape, self.Dv), self.dtype),
            "end": int32(self.B),
        }

    @property
    def sums(self) -> dict[str, Array]:
        """The arrays for keys and for values, `[B, CHUNKS, words, 4]`.

        Each entry has four numbers for a chunk: the sums of the two columns of a word, and then the
        largest absolute values of the two columns.
        """
        key, value = (float32(self.B, CHUNKS, words, 4) for words in self.words)
        return {"key_sums": key, "value_sums": value}


def rounded(B: int, places: int, Hkv: int, D: int, Dv: int) -> dict[str, Array]:
    """Return the arrays of `round_tokens` that kernels of attention read."""
    return {
        "key": Array((B, places, Hkv, D // 2), "int16"),
        "value": Array((B, Hkv, Dv, places // 2), "int16"),
        "key_scale": float32(B, Hkv, D),
        "value_scale": float32(B, Hkv, Dv),
    }


@described
def sum_tokens(spec: Rounding) -> Kernel:
    """Inputs: `key` `[B, S, Hkv, D]`, `value` `[B, S, Hkv, Dv]`; `end` int32 `[B]`; tokens from
    `end` on are ignored.

    Outputs: float32 `[B, CHUNKS, Hkv * D / 2, 4]`, `[B, CHUNKS, Hkv * Dv / 2, 4]`, `Rounding.sums`;
    numbers that are not finite count as 0.
    """
    sizes = {"S": spec.S, "chunk": spec.chunk}
    return _kernel("fp8_sums", "sum_tokens", spec, spec.tokens, spec.sums, sizes, CHUNKS)


@described
def round_tokens(spec: Rounding) -> Kernel:
    """Inputs: the inputs and outputs of `sum_tokens`.

    For packed rows, `tile_first` and `tile_end` of `varlen.KeyTiles` follow, int32 `[B, places /
    64]`.

    Outputs, `rounded`:
      key: int16 `[B, places, Hkv, D / 2]`.
      value: int16 `[B, Hkv, Dv, places / 2]`. `key` and `value` are 0 for slots without a key, and
        for keys from `end` on.
      key_scale: float32 `[B, Hkv, D]`.
      value_scale: float32 `[B, Hkv, Dv]`.
      key_mean: float32 `[B, Hkv, D]`, the mean over the tokens before `end`. Keys that are not
        finite count as 0.
    """
    inputs = spec.tokens | spec.sums
    if spec.packed:
        inputs |= dict.fromkeys(("tile_first", "tile_end"), int32(spec.B, spec.tiles))
    found = rounded(spec.B, spec.places, spec.Hkv, spec.D, spec.Dv)
    outputs = {f"{name}8" if name in inputs else name: x for name, x in found.items()}
    outputs["key_mean"] = outputs["key_scale"]
    sizes = {"S": spec.S, "places": spec.places}
    parts = tile.cdiv(spec.tiles, TILES)
    return _kernel("fp8_round", "round_tokens", spec, inputs, outputs, sizes, parts)


def _kernel(
    name: str, function: str, spec: Rounding, inputs, outputs, sizes, parts: int
) -> Kernel:
    """Return a kernel that divides each row into `parts` parts.

    Each lane of a warp has one word of a part.
    """
    return Kernel.named(
        spec,
        inputs,
        outputs,
        name=name,
        body=f"kernels_pallas.mosaic.fp8_round:{function}",
        sizes=sizes,
        grid=tile.warp_grid(spec.B, parts * sum(spec.columns)),
    )

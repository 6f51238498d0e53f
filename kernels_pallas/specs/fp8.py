"""Keys and values in e4m3, as the products of the forward pass read them.

    fp8_sums    of each chunk of tokens and each column the sum and the largest size
    fp8_round   K8 = (K - mean) / key_scale,  V8 = V / value_scale

The mean of the keys of a row, by head and column, drops out of the softmax. Scales are powers of
two, by head and column: that of keys goes into the query, that of values into the output.

Numbers lie in pairs, int16, keys by token, values by column. Columns of a key and the keys of a
value's column are what products sum over: in groups of 16 they lie in another order, in which a
product's result becomes a left operand without a shuffle (`mosaic/fp8.py`):

    number 8 j + 2 t + e of a group   lies at place 4 t + 2 j + e      t < 4,  j, e < 2

Keys go by places: in packed rows each sequence begins at a multiple of 64 (`nsa_core.varlen`), in
others a key's place is its number.
"""

import dataclasses
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs import tile
from kernels_pallas.specs.compress import TokenWords

GROUP = 16  # numbers that lie in another order than they are counted
LARGEST = 448.0  # number in e4m3
SMALLEST = 2.0**-100  # scale
OFFSET = 8.0  # of P, which is up to 2^8 where its largest number is 1
CHUNKS = 64  # of the tokens of a row, which are summed apart
LOADS = 32  # of a lane that sums, before it waits for one of them
TILES = 4  # of 64 places that a warp rounds


@dataclasses.dataclass(frozen=True)
class Rounding(TokenWords):
    """Static sizes: keys `[B, S, Hkv, D]`, values `[B, S, Hkv, Dv]`, in 16 bits; D is a multiple
    of 32, Dv of 2.

    Attributes:
      places: of a row, a multiple of 64.
      packed: whether they are those of `nsa_core.varlen`.
    """

    B: int
    S: int
    Hkv: int
    D: int
    Dv: int
    places: int
    dtype: str
    packed: bool = False
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with nominal lengths."""
        lengths = {"B": 2, "S": NOMINAL_LENGTH, "places": NOMINAL_LENGTH}
        return dataclasses.replace(self, any_length=True, **lengths)

    @property
    def chunk(self) -> int:
        """Tokens, a multiple of `LOADS`."""
        return tile.cdiv(tile.cdiv(self.S, CHUNKS), LOADS) * LOADS

    @property
    def tiles(self) -> int:
        """Of 64 places."""
        return self.places // tile.ROWS

    @property
    def tokens(self) -> dict[str, Array]:
        shape = self.B, self.S, self.Hkv
        return {
            "key": Array((*shape, self.D), self.dtype),
            "value": Array((*shape, self.Dv), self.dtype),
            "end": Array((self.B,), "int32"),
        }

    @property
    def sums(self) -> dict[str, Array]:
        """Of two neighbouring columns the sums, then the largest sizes."""
        key, value = (Array((self.B, CHUNKS, words, 4), "float32") for words in self.words)
        return {"key_sums": key, "value_sums": value}


def rounded(B: int, places: int, Hkv: int, D: int, Dv: int) -> dict[str, Array]:
    """What kernels of attention read of keys and values that `round_tokens` has rounded."""
    return {
        "key": Array((B, places, Hkv, D // 2), "int16"),
        "value": Array((B, Hkv, Dv, places // 2), "int16"),
        "key_scale": Array((B, Hkv, D), "float32"),
        "value_scale": Array((B, Hkv, Dv), "float32"),
    }


@described
def sum_tokens(spec: Rounding) -> Kernel:
    """Inputs: `key` `[B, S, Hkv, D]`, `value` `[B, S, Hkv, Dv]`; `end` int32 `[B]`: tokens from
    there on are not looked at.

    Outputs: float32 `[B, CHUNKS, Hkv * D / 2, 4]`, `[B, CHUNKS, Hkv * Dv / 2, 4]`, `Rounding.sums`;
    what is not finite counts as 0.
    """
    sizes = {"S": spec.S, "chunk": spec.chunk}
    return _kernel("fp8_sums", "sum_tokens", spec, spec.tokens, spec.sums, sizes, CHUNKS)


@described
def round_tokens(spec: Rounding) -> Kernel:
    """Inputs: those of `sum_tokens`, what it gave, then of packed rows `tile_first`, `tile_end`,
    int32 `[B, places / 64]`: `varlen.KeyTiles`.

    Outputs, `rounded`:
      key: int16 `[B, places, Hkv, D / 2]`.
      value: int16 `[B, Hkv, Dv, places / 2]`; 0 where there is no key or one from `end` on.
      key_scale, value_scale: float32 `[B, Hkv, D]`, `[B, Hkv, Dv]`.
      key_mean: float32 `[B, Hkv, D]`, of the tokens before `end`.
    """
    inputs = spec.tokens | spec.sums
    if spec.packed:
        array = Array((spec.B, spec.tiles), "int32")
        inputs |= {"tile_first": array, "tile_end": array}
    found = rounded(spec.B, spec.places, spec.Hkv, spec.D, spec.Dv)
    outputs = {f"{name}8" if name in inputs else name: x for name, x in found.items()}
    outputs["key_mean"] = outputs["key_scale"]
    sizes = {"S": spec.S, "places": spec.places}
    parts = tile.cdiv(spec.tiles, TILES)
    return _kernel("fp8_round", "round_tokens", spec, inputs, outputs, sizes, parts)


def _kernel(name, function, spec: Rounding, inputs, outputs, sizes, parts: int) -> Kernel:
    """A warp has a word a lane of one of `parts` parts of a row."""
    return Kernel.named(
        name,
        spec,
        f"kernels_pallas.mosaic.fp8_round:{function}",
        inputs,
        outputs,
        sizes=sizes,
        grid=tile.warp_grid(spec.B, parts * sum(spec.columns)),
        source=f"kernels_pallas.specs.fp8:{function}",
    )

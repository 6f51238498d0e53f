"""Describes compression by means. The kernels compute compressed tokens, and the gradients of
the raw tokens. A window of `l` tokens begins every `d` tokens, and becomes one compressed token
(Eq. 7 with phi = mean):

    compress_means        Kc_i = (sum of K_p over the window i) / l,   d i <= p < d i + l
    merge_key_gradients   dK_p = sum of the dK_p of other branches
                               + (sum of dKc_i over the windows i that contain p) / l

Each launch computes keys and values. Sums are in float32, and are rounded once to the dtype of
the tokens. In packed rows, compressed tokens are in the slots of their sequences
(`nsa_core.varlen`), so no window crosses a sequence boundary.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, Spec, described, int32
from kernels_pallas.specs import tile

WINDOWS = 4  # maximum number of windows per warp


class TokenWords:
    """The distribution of a token's keys and values over the lanes of warps. A word has two
    16-bit columns.
    """

    Hkv: int
    D: int
    Dv: int

    @cached_property
    def words(self) -> tuple[int, int]:
        """The numbers of 32-bit words per token, for keys and for values."""
        return self.Hkv * self.D // 2, self.Hkv * self.Dv // 2

    @cached_property
    def columns(self) -> tuple[int, int]:
        """The numbers of adjacent warps that have the words of one token, for keys and for values.

        Each lane has one word.
        """
        key, value = (tile.cdiv(words, tile.LANES) for words in self.words)
        return key, value


@dataclasses.dataclass(frozen=True)
class Means(TokenWords, Spec):
    """Static sizes: keys `[B, S, Hkv, D]`, values `[B, S, Hkv, Dv]`, in 16 bits; widths are
    multiples of 2.

    Attributes:
      block: `l`, the number of tokens per window, a multiple of `stride`.
      stride: `d`, the number of tokens between the starts of two windows.
      others: Number of branches whose gradients of the same tokens `merge_key_gradients` adds.
      placed: Number `n` such that the gradients of the first `n` branches are stored by slot.
      multiple: Divisor of the number of compressed tokens. Zeros follow the last window.
      places: Number of slots of packed rows. `places=0` means that a row has one sequence.
      unit: Divisor of each sequence's number of slots. `unit=0` means that a row has one sequence.
    """

    B: int
    S: int
    Hkv: int
    D: int
    Dv: int
    block: int
    stride: int
    dtype: str
    others: int = 0
    multiple: int = 1
    places: int = 0
    unit: int = 0
    placed: int = 0

    @property
    def nominal(self) -> dict[str, Any]:
        places = NOMINAL_LENGTH // self.unit * self.unit if self.packed else self.places
        return {"B": 2, "S": NOMINAL_LENGTH, "places": places}

    @cached_property
    def packed(self) -> bool:
        """Whether a row has several sequences."""
        return self.unit > 0

    @cached_property
    def C(self) -> int:
        """The number of windows, at least one."""
        return (self.S - self.block) // self.stride + 1

    @cached_property
    def rows(self) -> int:
        """Number of compressed tokens, including zeros."""
        if self.packed:
            return self.places // self.stride
        return tile.cdiv(self.C, self.multiple) * self.multiple

    @cached_property
    def key_tiles(self) -> int:
        """Number of tiles of 64 slots."""
        return self.places // tile.ROWS

    @cached_property
    def strides(self) -> int:
        """The number of stride blocks of a window. A window begins and ends at boundaries of
        stride blocks.
        """
        return self.block // self.stride

    @cached_property
    def windows(self) -> int:
        """The number of neighbouring windows of a warp.

        Tokens in several windows of a warp are read once.
        """
        most = min(self.strides, WINDOWS)
        if not self.packed:
            return most
        # The compressed slots of a unit belong to one sequence. A warp therefore has only slots
        # of one unit.
        slots = self.unit // self.stride
        return next(i for i in range(most, 0, -1) if slots % i == 0)

    @cached_property
    def tokens(self) -> tuple[Array, Array]:
        """The arrays of keys and values, or of their gradients."""
        return self._arrays(self.S)

    @cached_property
    def means(self) -> tuple[Array, Array]:
        """The arrays of compressed keys and values, or of their gradients."""
        return self._arrays(self.rows)

    def _arrays(self, length: int) -> tuple[Array, Array]:
        key, value = (
            Array((self.B, length, self.Hkv, width), self.dtype) for width in (self.D, self.Dv)
        )
        return key, value


@described
def compress_means(spec: Means) -> Kernel:
    """Inputs: `key` `[B, S, Hkv, D]`, `value` `[B, S, Hkv, Dv]`.

    For packed rows, `tile_first` and `tile_end` of `varlen.KeyTiles` follow, int32 `[B,
    key_tiles]`.

    Outputs: `[B, rows, Hkv, D]`, `[B, rows, Hkv, Dv]`, the means of the windows of keys and of
    values. Zeros follow the means.
    """
    inputs = dict(zip(("key", "value"), spec.tokens, strict=True)) | _key_tiles(spec)
    outputs = dict(zip(("compressed_key", "compressed_value"), spec.means, strict=True))
    return _kernel(spec, inputs, outputs, tile.cdiv(spec.rows, spec.windows))


@described
def merge_key_gradients(spec: Means) -> Kernel:
    """Inputs: `compressed_dk` `[B, rows, Hkv, D]` and `compressed_dv` `[B, rows, Hkv, Dv]`, in
    which slots without a window have zeros. The next inputs are the `dk` of each of the `others`,
    `[B, S, Hkv, D]`, or `[B, places, Hkv, D]` for the first `placed` branches. The `dv` of the same
    branches follow, with Dv in place of D. For packed rows, `tile_first` and `tile_end` are further
    inputs.

    Outputs: `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`, the gradients dk and dv of the tokens.
    """
    inputs = dict(zip(("compressed_dk", "compressed_dv"), spec.means, strict=True))
    by_place = spec._arrays(spec.places)
    for name, array, placed in zip(("dk", "dv"), spec.tokens, by_place, strict=True):
        for i in range(spec.others):
            inputs[f"{name}_{i}"] = placed if i < spec.placed else array
    outputs = dict(zip(("dk", "dv"), spec.tokens, strict=True))
    parts = spec.rows if spec.packed else tile.cdiv(spec.S, spec.stride)
    return _kernel(spec, inputs | _key_tiles(spec), outputs, parts)


def _key_tiles(spec: Means) -> dict[str, Array]:
    if not spec.packed:
        return {}
    return dict.fromkeys(("tile_first", "tile_end"), int32(spec.B, spec.key_tiles))


def _kernel(spec: Means, inputs, outputs, parts: int) -> Kernel:
    """Return a kernel that divides each sequence into `parts` parts.

    Each lane of a warp has one word of a part.
    """
    count = {"key_tiles": spec.key_tiles} if spec.packed else {"C": spec.C}
    return Kernel.named(
        spec,
        inputs,
        outputs,
        sizes={"S": spec.S, "rows": spec.rows, **count},
        grid=tile.warp_grid(spec.B, parts * sum(spec.columns)),
    )

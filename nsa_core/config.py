"""Defines `NSAConfig`, the sizes of Native Sparse Attention, which are checked once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

# Short names of sizes, which layers and config files use.
SEED_NAMES = {
    "l": "compress_block",
    "d": "compress_stride",
    "l_sel": "select_block",
    "n_sel": "num_selected",
    "w": "window",
}
FLOAT8 = "float8_e4m3"
COMPUTE_DTYPES = None, FLOAT8
MAX_SIZE = 2**30  # the sum of a position and a size must fit in 32 bits


@dataclasses.dataclass(frozen=True)
class NSAConfig:
    """Sizes of the three branches.

    The defaults are those of the paper (arXiv 2502.11089, section 4).

    `compute_dtype="float8_e4m3"` is for inference on Hopper. With `float8_e4m3`, the selected and
    the sliding branch multiply 8-bit numbers (docs/kernels/fp8.md). `float8_e4m3` does not change
    the selection of blocks. `float8_e4m3` is faster than 16 bits for groups of more than 8 query
    heads.

    Raises:
      ValueError: A value is invalid. The error message names the field, the rule and the value.
    """

    compress_block: int = 32  # l: tokens that one compressed token summarises
    compress_stride: int = 16  # d: tokens between the starts of two compressed tokens
    select_block: int = 64  # l': tokens of one selection block
    num_selected: int = 16  # n: blocks per query, including the forced ones
    num_initial: int = 1  # forced blocks at the start of the sequence
    num_local: int = 2  # forced blocks that end with the query's own
    window: int = 512  # w: keys of the sliding branch, including the query's own
    compute_dtype: str | None = None  # None means the dtype of the query

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an int, got {value!r}")
            if value > MAX_SIZE:
                raise ValueError(f"{name} must be at most 2**30, got {value}")
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"compute_dtype must be one of {COMPUTE_DTYPES}, got {self.compute_dtype!r}"
            )
        block, stride = self.compress_block, self.compress_stride
        forced = self.num_initial + self.num_local
        rules = (
            ("compress_stride", stride >= 1, ">= 1"),
            ("compress_block", block >= 1, ">= 1"),
            (
                "compress_block",
                stride >= 1 and block % stride == 0,
                f"a multiple of compress_stride={stride}",
            ),
            (
                "select_block",
                stride >= 1 and self.select_block % stride == 0,
                f"a multiple of compress_stride={stride}",
            ),
            ("select_block", self.select_block >= block, f">= compress_block={block}"),
            ("num_initial", self.num_initial >= 0, ">= 0"),
            ("num_local", self.num_local >= 0, ">= 0"),
            ("num_selected", self.num_selected >= 1, ">= 1"),
            (
                "num_selected",
                self.num_selected >= forced,
                f">= num_initial + num_local = {forced}",
            ),
            ("window", self.window >= 0, ">= 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")

    @functools.cached_property
    def numbers(self) -> tuple[int | str | None, ...]:
        """All fields as a tuple. Unlike the dataclass, a tuple is compared and hashed without
        running Python code."""
        return *(getattr(self, name) for name in SIZES), self.compute_dtype

    @property
    def of_sizes(self) -> Self:
        """The same config without `compute_dtype`. The positions of tokens depend only on the
        sizes."""
        return dataclasses.replace(self, compute_dtype=None)

    def check_differentiable(self) -> None:
        """Raise NotImplementedError if `compute_dtype` has no gradient."""
        if self.compute_dtype is not None:
            raise NotImplementedError(
                f"mosaic: compute_dtype={self.compute_dtype!r} has no gradient; leave "
                "compute_dtype out to train"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes by name, and also `compute_dtype` if it is set."""
        found = {name: getattr(self, name) for name in SIZES}
        return found | (
            {} if self.compute_dtype is None else {"compute_dtype": self.compute_dtype}
        )

    @classmethod
    def from_seed(cls, **values: Any) -> Self:
        """Make a config from the short names `l, d, l_sel, n_sel, w`. Omitted sizes have their
        defaults.

        Raises:
          ValueError: A name is unknown, or a value is invalid.
        """
        unknown = sorted(set(values) - set(SEED_NAMES))
        if unknown:
            raise ValueError(f"names must be in {sorted(SEED_NAMES)}, got {unknown[0]!r}")
        return cls(**{SEED_NAMES[name]: value for name, value in values.items()})

    def num_compressed(self, length: int) -> int:
        """Return `C`, the number of compressed tokens of a sequence of `length` tokens (Eq. 7)."""
        if length < self.compress_block:
            return 0
        return (length - self.compress_block) // self.compress_stride + 1

    def num_blocks(self, length: int) -> int:
        """Return `N`, the number of selection blocks of a sequence of `length` tokens. The last
        block may be partial.
        """
        return -(-length // self.select_block)

    def reads(self, length: int) -> int:
        """Return the number of keys, including padding, that one decode step reads from a cache
        of `length` tokens, over all branches.
        """
        return (
            self.num_compressed(length)
            + self.num_selected * self.select_block
            + min(self.window, length)
        )


def _proposing(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `init`, so that the error for an unknown name proposes a similar field."""

    @functools.wraps(init)
    def checked(self, *sizes: Any, **named: Any) -> None:
        try:
            init(self, *sizes, **named)
        except TypeError:
            fields = [x.name for x in dataclasses.fields(NSAConfig)]
            for name in named.keys() - {*fields}:
                import difflib

                meant = SEED_NAMES.get(name) or difflib.get_close_matches(name, fields, 1, 0)[0]
                raise TypeError(f"NSAConfig has no field {name!r}; pass {meant}") from None
            raise

    return checked


NSAConfig.__init__ = _proposing(NSAConfig.__init__)

# The fields that are integers.
SIZES = tuple(x.name for x in dataclasses.fields(NSAConfig) if x.name != "compute_dtype")

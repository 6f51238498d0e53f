"""Metadata about the sequences of a packed row, which is computed once per batch for all layers.

    meta = nsa_torch.varlen_metadata(cu_seqlens, max_seqlen=8192, config=config)
    for layer in layers:
        y = nsa_torch.attention(query, key, value, gates, config=config, varlen=meta)

The tables that kernels read are computed when a call first needs them. The metadata object stores
the tables. Other layers, the backward pass and recomputation reuse the stored tables.
"""

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.kernel import Array
from nsa_core import validate
from nsa_core.config import NSAConfig
from nsa_torch import batch_tables, checks, operators
from nsa_torch.batch_tables import Tables
from nsa_torch.operators import FORWARD, SAVING, SEPARATE_KV, SHARED_KV

NO_LIMIT = 2**31 - 1


def varlen_metadata(
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None = None,
    total: int | None = None,
    padded: bool | None = None,
    max_sequences: int | None = None,
    config: NSAConfig = NSAConfig(),
    device: torch.device | str | None = None,
) -> "VarlenMetadata":
    """Make the argument `varlen` for calls on packed rows, which replaces `cu_seqlens`.

    If `cu_seqlens` is on a CPU, the host reads `cu_seqlens` and derives missing arguments from
    these values. If `cu_seqlens` is on a GPU, the host reads `cu_seqlens` only while
    `nsa_core.debug` reports events. If the host does not read `cu_seqlens`, invalid boundaries are
    corrected (see `nsa_torch.functional`).

    Args:
      cu_seqlens: int32 or int64 `[sequences + 1]`, ascending from 0. Do not write to this
        tensor while the metadata object is in use. Call the method `update` to change the
        sequences.
      max_seqlen: Upper bound of tokens per sequence. If `max_seqlen` is None and the host reads the
        boundaries, the bound is the length of the longest sequence or `select_block`, whichever is
        larger. This length is rounded up to a power of two, but not above `total`. If the host does
        not read the boundaries, `max_seqlen=None` means `total`. If the host does not read the
        boundaries, a sequence of more than `max_seqlen` tokens makes all tokens of the row padding,
        with outputs and gradients of 0.
      total: `T`, the number of tokens of the row. `total=None` means `cu_seqlens[-1]` if the host
        reads `cu_seqlens`. If the host does not read `cu_seqlens`, the first call determines
        `total`.
      padded: whether `cu_seqlens[-1]` may be less than `T`. If `padded` is None and the host reads
        the boundaries, the host compares `cu_seqlens[-1]` and `T`. If the host does not read the
        boundaries, `padded=None` means True. If `padded` is False, tokens after the last sequence
        must be finite.
      max_sequences: The maximum number of sequences that the method `update` accepts.
        `max_sequences=None` means the number of sequences rounded up to a power of two, at least 8.
        Two calls share their plan and kernels if `max_sequences`, the row length, `padded`, and
        `max_seqlen` rounded up to a power of two are equal.
      config: the `config` of the calls.
      device: the device of the calls; None means the device of `cu_seqlens`.

    Returns:
      A `VarlenMetadata` for calls on packed rows.

    Raises:
      ValueError: An argument is invalid, or contradicts another argument or the values that the
        host reads.
    """
    checks.borders_array(cu_seqlens)
    place = cu_seqlens.device if device is None else checks.device(device)
    if cu_seqlens.is_meta and place.type != "meta":
        raise ValueError(f"device must be meta, like the device of cu_seqlens, got {place}")
    sizes = max_seqlen, total, padded, max_sequences
    return VarlenMetadata(cu_seqlens, *sizes, config, place)


class VarlenMetadata:
    """The metadata of a packed row. The attributes of this object are the arguments of
    `varlen_metadata`. If an argument was None, its attribute has the derived value as soon as
    that value is known.

    Attributes:
      cu_seqlens: A copy of the argument, int32 `[max_sequences + 1]`. Unused entries repeat the
        last boundary.
    """

    cu_seqlens: Tensor

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int | None,
        total: int | None,
        padded: bool | None,
        max_sequences: int | None,
        config: NSAConfig,
        device: torch.device,
    ):
        sizes = {"max_seqlen": max_seqlen, "total": total, "max_sequences": max_sequences}
        validate.sizes(**{name: x for name, x in sizes.items() if x is not None})
        if padded is not None:
            validate.flag("padded", padded)
        validate.configuration(config)
        count = cu_seqlens.shape[0] - 1
        self.config = config
        self.max_sequences = max_sequences or checks.room(count)
        self.total, self.max_seqlen, self.padded = total, max_seqlen, padded
        numbers = self._numbers(cu_seqlens)
        if numbers is not None:
            end, longest = numbers
            self.total = end if total is None else total
            self.max_seqlen = self._bucket(longest) if max_seqlen is None else max_seqlen
            self.padded = end < self.total if padded is None else padded
        bucket = None if self.max_seqlen is None else self._bucket(self.max_seqlen)
        self.padded = self.padded is not False
        self._tables = Tables(bucket, self.padded)
        with torch.inference_mode(False), torch.no_grad():
            shape = self.max_sequences + 1
            self.cu_seqlens = torch.zeros(shape, dtype=torch.int32, device=device)
        self.device = self.cu_seqlens.device
        batch_tables.attach(self._tables, self.cu_seqlens)
        self._write(cu_seqlens, numbers)

    def __repr__(self) -> str:
        names = "max_seqlen", "total", "padded", "max_sequences", "device"
        return f"VarlenMetadata({', '.join(f'{x}={getattr(self, x)!r}' for x in names)})"

    def __reduce__(self):
        """Pickle the object without its tables. The unpickled object computes the tables again
        from the boundaries.
        """
        self.check()
        sizes = self.max_seqlen, self.total, self.padded, self.max_sequences
        return VarlenMetadata, (self.cu_seqlens.detach(), *sizes, self.config, self.device)

    def update(self, cu_seqlens: Tensor) -> None:
        """Replace the sequences, and write the new boundaries to the same memory. One metadata
        object can therefore serve CUDA graphs or a whole training run.

        The method writes on the current stream, like any in-place operation of torch. After a call
        of the method `update`, tensors that an earlier call saved for its backward pass are
        invalid.

        Raises:
          ValueError: The sequences do not fit `max_sequences`, `max_seqlen`, `total` or
            `padded`.
        """
        checks.borders_array(cu_seqlens)
        self._write(cu_seqlens, self._numbers(cu_seqlens))
        self._tables.refill(self.cu_seqlens)

    def tensors(
        self,
        heads: int,
        kv_heads: int,
        key_width: int,
        value_width: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        gradients: bool = True,
        implementation: str = "mosaic",
    ) -> list[Tensor]:
        """Compute all tables that calls of a layer read, and return their tensors. If a CUDA
        graph is captured before this call, each replay of the graph computes the tables again.

        Args:
          heads, kv_heads: numbers of query heads and of key/value heads.
          key_width, value_width: columns per head. `value_width=None` means `key_width`.
          dtype: dtype of the calls' queries.
          gradients: whether to include the tables of the backward pass.
          implementation: `mosaic` or `triton`.

        Raises:
          ValueError: The number of tokens T is not known yet, or the caller's `cu_seqlens` have
            been modified. `ValueError` is also raised if `implementation` is not `mosaic` or
            `triton`, or has no kernels for this layer.
        """
        if self.total is None:
            raise ValueError(
                "varlen must have a known total; pass total to varlen_metadata, or run a call first"
            )
        if implementation not in ("mosaic", "triton"):
            raise ValueError(
                f"implementation must be 'mosaic' or 'triton', got {implementation!r}"
            )
        self.check()
        name = str(dtype).removeprefix("torch.")
        array = lambda *shape: Array((1, self.total, *shape), name)
        layout_args = operators.pack_layout(self.config, self.total, self.cu_seqlens, None)
        widths = key_width, key_width if value_width is None else value_width
        tokens = [array(kv_heads, width) for width in widths]
        query, gates = array(heads, key_width), [array(heads)] * 3
        path, makes = (
            importlib.import_module(f"nsa_torch.{implementation}").PATH,
            dict[Any, None](),
        )
        for mode in (SHARED_KV, SEPARATE_KV):
            each = [x for x in tokens for _ in range(1 if mode.shared else 3)]
            function = path.planned(mode, SAVING if gradients else FORWARD)
            rest = operators.MAY_BE_NAN, *layout_args
            plans = function.plans([query, *each, *gates, None, *rest], self.device)
            makes |= dict.fromkeys(batch_tables.of_plan(x, self.device)[0] for x in plans)
        found = (x for make in makes for x in self._tables.get(self.cu_seqlens, make))
        return [x for x in found if x.numel()]

    def check(self) -> None:
        """Raise ValueError if the caller's `cu_seqlens` have been modified since the metadata
        was made.
        """
        if not self._given.is_inference() and self._given._version != self._version:
            raise ValueError(
                "cu_seqlens must not be modified after varlen was made; call "
                "varlen.update(cu_seqlens)"
            )

    def borders(self, x: Any, name: str, config: NSAConfig, length: int | None) -> Tensor:
        """Check that the metadata fits `x` [1, T, ..] and return its boundaries.

        Args:
          length: The number T of tokens of the whole row.

        Raises:
          ValueError: The metadata is for another config, device or length, or `cu_seqlens` has been
            modified since the metadata was made.
        """
        if (
            config.numbers[:-1] != self.config.numbers[:-1]
        ):  # the metadata depends on all settings except the compute dtype
            raise ValueError(
                f"varlen must be made with {config}, got varlen made with {self.config}"
            )
        if x.shape[0] != 1:
            raise ValueError(
                f"{name} must be one row, B=1, if varlen is given, got B={x.shape[0]}"
            )
        if isinstance(x, Tensor) and x.device != self.device:
            raise ValueError(
                f"varlen must be on the device of {name}, {x.device}, got varlen on {self.device}"
            )
        if not torch.compiler.is_compiling():
            self.check()
        if self.total is None:
            self._fix(length)
        if length is not None and length != self.total:
            raise ValueError(
                f"varlen must cover the {length} tokens of {name}, got total={self.total}"
            )
        return self.cu_seqlens

    def _fix(self, length: int | None) -> None:
        """Set `total` to the length of the first call."""
        if length is None:
            raise ValueError(
                "varlen must be made with total, the number of tokens on all ranks"
            )
        self.total = length
        with torch.inference_mode(False), torch.no_grad():
            self.cu_seqlens.clamp_(max=length)

    @property
    def _limit(self) -> int:
        return NO_LIMIT if self.total is None else self.total

    def _bucket(self, longest: int) -> int:
        least = max(longest, self.config.select_block)
        bucket = 1 << (least - 1).bit_length()
        return bucket if self.total is None else max(min(bucket, self.total), 1)

    def _numbers(self, cu_seqlens: Tensor) -> tuple[int, int] | None:
        """Check the boundaries `cu_seqlens`. Return the end of the last sequence and the length
        of the longest sequence. If the host does not read the boundaries, check only their number
        and return None.
        """
        if cu_seqlens.shape[0] - 1 > self.max_sequences:
            raise ValueError(
                f"cu_seqlens must have max_sequences + 1 = {self.max_sequences + 1} entries or "
                f"fewer, got {cu_seqlens.shape[0]}"
            )
        if not checks.is_read(cu_seqlens):
            return None
        checks.borders(cu_seqlens, self._limit)
        numbers = cu_seqlens.tolist()
        longest = max(b - a for a, b in itertools.pairwise(numbers))
        if self.max_seqlen is not None and longest > self.max_seqlen:
            raise ValueError(
                f"max_seqlen must be at least {longest}, the longest sequence, "
                f"got {self.max_seqlen}"
            )
        if self.padded is False and self.total is not None and numbers[-1] < self.total:
            raise ValueError(
                f"cu_seqlens must end with {self.total}, the number of tokens, if padded is "
                f"False, got {numbers[-1]}"
            )
        return numbers[-1], longest

    def _write(self, given: Tensor, numbers: tuple[int, int] | None) -> None:
        """Write the boundaries into `cu_seqlens`."""
        self._given = given
        self._version = None if given.is_inference() else given._version
        own, count = self.cu_seqlens, given.shape[0]
        with torch.inference_mode(False), torch.no_grad():
            ends = checks.held(given.detach(), self._limit).to(torch.int32)
            if ends.device != own.device:
                ends = (ends.pin_memory() if own.is_cuda else ends).to(own, non_blocking=True)
            own[:count] = ends
            own[count:] = ends[-1]
            if numbers is None and self.max_seqlen is not None:
                own *= own.diff().amax() <= self.max_seqlen


def borders_of(
    cu_seqlens: Tensor | None,
    varlen: VarlenMetadata | None,
    x: Any,
    name: str,
    config: NSAConfig,
    length: int | None = None,
) -> Tensor | None:
    """Return the boundaries for a call on `x` [B, T, ..], from `cu_seqlens` or from `varlen`.

    Args:
      length: The number of tokens of the whole row, if `x` is only a part of the row.

    Raises:
      ValueError: `cu_seqlens` and `varlen` are both given, or `varlen` does not fit `x` or
        `config`.
    """
    if varlen is None is cu_seqlens:
        return None
    if not isinstance(x, Tensor):
        checks.tensors(**{name: x})
    if varlen is None:
        return cu_seqlens
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None if varlen is given, got both")
    if not isinstance(varlen, VarlenMetadata):
        raise ValueError(
            f"varlen must be a result of nsa_torch.varlen_metadata, got {type(varlen).__name__}"
        )
    return varlen.borders(x, name, config, x.shape[1] if length is None else length)

"""Where the sequences of a packed row stand, made once per batch for all layers.

    meta = nsa_torch.varlen_metadata(cu_seqlens, max_seqlen=8192, config=config)
    for layer in layers:
        y = nsa_torch.attention(query, key, value, gates, config=config, varlen=meta)

What kernels read of the sequences is made when a call first asks for it and kept in the object:
other layers, the backward pass and a recomputation find it there.
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
    """What calls on packed rows take as `varlen`, in place of `cu_seqlens`.

    The host reads `cu_seqlens` where they are on a CPU; what is left out then follows from them.
    Numbers on a GPU are not read, but while `nsa_torch.debug` tells events; numbers that contradict
    each other then count as they do of `cu_seqlens`.

    Args:
      cu_seqlens: int32 or int64 `[sequences + 1]`, ascending from 0. Not to be written to as long
        as the object is used; `update` takes others.
      max_seqlen: tokens of the longest sequence at most; None: `total`. Where a sequence on a GPU
        has more, all tokens are padding: their outputs and gradients are 0.
      total: T, tokens of the row; None: `cu_seqlens[-1]` where that is read, else those of the
        first call.
      padded: whether `cu_seqlens[-1]` may be less than T; None: where that is not read, it may.
        Under False what follows the last sequence must be finite.
      max_sequences: room for sequences, up to which `update` takes any number; None: the next power
        of two, at least 8. Calls of any number of sequences with the same room, row and bucket of
        `max_seqlen` (a power of two) have one signature: nothing is planned or compiled again.
      config: of the calls.
      device: of the calls, one that torch has; None means that of `cu_seqlens`.

    Returns:
      A `VarlenMetadata` for calls on such rows.

    Raises:
      ValueError: an argument contradicts another, or what the host reads.
    """
    checks.borders_array(cu_seqlens)
    place = cu_seqlens.device if device is None else checks.device(device)
    if cu_seqlens.is_meta and place.type != "meta":
        raise ValueError(f"device must be that of cu_seqlens, meta, got {place}")
    sizes = max_seqlen, total, padded, max_sequences
    return VarlenMetadata(cu_seqlens, *sizes, config, place)


class VarlenMetadata:
    """Of a packed row; made by `varlen_metadata`, whose arguments its attributes are.

    Attributes:
      cu_seqlens: its own boundaries, int32 `[max_sequences + 1]`, where the last is repeated.
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
            longest = max(b - a for a, b in itertools.pairwise(numbers))
            self.total = numbers[-1] if total is None else total
            self.max_seqlen = self._bucket(longest) if max_seqlen is None else max_seqlen
            self.padded = numbers[-1] < self.total if padded is None else padded
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
        """A copy, or one in another process, makes what follows from the boundaries again."""
        self.check()
        sizes = self.max_seqlen, self.total, self.padded, self.max_sequences
        return VarlenMetadata, (self.cu_seqlens.detach(), *sizes, self.config, self.device)

    def update(self, cu_seqlens: Tensor) -> None:
        """Other sequences, in the same memory: of CUDA graphs, or one object for all batches.

        It writes on the current stream, as any operation of torch in place; what a call before it
        saved for a backward pass cannot be used any more.

        Raises:
          ValueError: they do not fit `max_sequences`, `max_seqlen`, `total`, `padded`.
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
        """All tables that calls of a layer read, made now. A CUDA graph that is captured before
        they are there makes them itself, at each replay.

        Args:
          heads, kv_heads: query heads, and those of keys and values.
          key_width, value_width: columns of a head; None means those of a key.
          gradients: of the backward pass too.
          implementation: `mosaic` or `triton`.

        Raises:
          ValueError: T is not known yet, or no such kernels.
        """
        if self.total is None:
            raise ValueError("varlen must be made with total, or used before, got neither")
        if implementation not in ("mosaic", "triton"):
            raise ValueError(
                f"implementation must be 'mosaic' or 'triton', got {implementation!r}"
            )
        self.check()
        name = str(dtype).removeprefix("torch.")
        array = lambda *shape: Array((1, self.total, *shape), name)
        place = operators.arguments(self.config, self.total, self.cu_seqlens, None)
        widths = key_width, key_width if value_width is None else value_width
        tokens = [array(kv_heads, width) for width in widths]
        query, gates = array(heads, key_width), [array(heads)] * 3
        module = importlib.import_module(f"nsa_torch.{implementation}")
        given = query, *tokens, gates, place, gradients, self.device
        plans = [x for shared in (True, False) for x in module.PATH.plans(*given, shared)]
        makes = dict.fromkeys(batch_tables.of_plan(x, self.device)[0] for x in plans)
        found = (x for make in makes for x in self._tables.get(self.cu_seqlens, make))
        return [x for x in found if x.numel()]

    def check(self) -> None:
        """Raises ValueError where `cu_seqlens` that were given have been written to since."""
        if not self._given.is_inference() and self._given._version != self._version:
            raise ValueError(
                "cu_seqlens must not be written to after varlen was made of them: update varlen"
            )

    def borders(self, x: Any, name: str, config: NSAConfig, length: int | None) -> Tensor:
        """The boundaries of `x` [1, T, ..].

        Args:
          length: T of the whole row.

        Raises:
          ValueError: made for another config, device or length, or out of date.
        """
        if config.numbers[:-1] != self.config.numbers[:-1]:  # all but the compute dtype
            raise ValueError(f"varlen must be made with {config}, got one of {self.config}")
        if x.shape[0] != 1:
            raise ValueError(
                f"{name} must be one row, B=1, where varlen is given, got B={x.shape[0]}"
            )
        if isinstance(x, Tensor) and x.device != self.device:
            raise ValueError(
                f"varlen must be on the device of {name}, {x.device}, got one on {self.device}"
            )
        if not torch.compiler.is_compiling():
            self.check()
        if self.total is None:
            self._fix(length)
        if length is not None and length != self.total:
            raise ValueError(
                f"varlen must be of the {length} tokens of {name}, got total={self.total}"
            )
        return self.cu_seqlens

    def _fix(self, length: int | None) -> None:
        """The length of the row, which the first call has."""
        if length is None:
            raise ValueError("varlen must be made with total, the tokens of all ranks")
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

    def _numbers(self, cu_seqlens: Tensor) -> list[int] | None:
        """Boundaries that were checked, where the host reads them."""
        if cu_seqlens.shape[0] - 1 > self.max_sequences:
            raise ValueError(
                f"cu_seqlens must have max_sequences + 1 = {self.max_sequences + 1} entries at "
                f"most, got {cu_seqlens.shape[0]}"
            )
        if not checks.is_read(cu_seqlens):
            return None
        checks.borders(cu_seqlens, self._limit)
        numbers = cu_seqlens.tolist()
        longest = max(b - a for a, b in itertools.pairwise(numbers))
        if self.max_seqlen is not None and longest > self.max_seqlen:
            raise ValueError(
                f"max_seqlen must be {longest} at least, as the longest sequence has, "
                f"got {self.max_seqlen}"
            )
        if self.padded is False and self.total is not None and numbers[-1] < self.total:
            raise ValueError(
                f"cu_seqlens must end with {self.total}, the number of tokens, where padded is "
                f"False, got {numbers[-1]}"
            )
        return numbers

    def _write(self, given: Tensor, numbers: list[int] | None) -> None:
        """Into `cu_seqlens`."""
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
    """The boundaries of a call on `x` [B, T, ..]: `cu_seqlens`, or those of `varlen`.

    Args:
      length: tokens of the whole row, where `x` has others.

    Raises:
      ValueError: both are given, or `varlen` is none of this call.
    """
    if varlen is None is cu_seqlens:
        return None
    if not isinstance(x, Tensor):
        checks.tensors(**{name: x})
    if varlen is None:
        return cu_seqlens
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None where varlen is given, got both")
    if not isinstance(varlen, VarlenMetadata):
        raise ValueError(
            "varlen must be what nsa_torch.varlen_metadata returns, "
            f"got {type(varlen).__name__}"
        )
    return varlen.borders(x, name, config, x.shape[1] if length is None else length)

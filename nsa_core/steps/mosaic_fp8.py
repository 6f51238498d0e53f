"""Rounds keys and values to e4m3 for the forward steps on Mosaic kernels, for either
framework.
"""

from typing import Any, NamedTuple

from kernels_pallas.kernel import int32
from kernels_pallas.mosaic.capability import interpret
from kernels_pallas.specs import fp8
from kernels_pallas.specs.tile import ROWS, cdiv
from nsa_core.array_ops import ArrayOps, Places, QueryLayout, derived
from nsa_core.steps import key_bounds
from nsa_core.validate import dtype_name


class Rounded(NamedTuple):
    """The keys and values that `specs.fp8.round_tokens` returns."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    key_mean: Any  # the mean that was subtracted from keys, float32 [B, Hkv, D]

    @property
    def operands(self) -> tuple[Any, ...]:
        """The rounded tokens as inputs of the attention kernels."""
        return self.key, self.value, self.key_scale, self.value_scale


def round_tokens(ops: ArrayOps, key, value, layout: QueryLayout) -> Rounded:
    """Round `key` `[B, S, Hkv, D]` and `value` `[B, S, Hkv, Dv]`, and move them to slots.

    Raises:
      NotImplementedError: The rows are packed, and their sequences have no slots.
    """
    batch, count, kv_heads, width = key.shape
    places, tiles = cdiv(count, ROWS) * ROWS, ()
    if layout.packed:
        if layout.varlen is None:
            raise NotImplementedError(
                "mosaic: compute_dtype='float8_e4m3' needs a bound for the number of sequences "
                "in packed rows, got only segment_ids; pass varlen_metadata(.., max_segments=)"
            )
        places, tiles = layout.varlen.capacity.places, layout.varlen.key_tiles
    spec = fp8.Rounding(
        B=batch,
        S=count,
        Hkv=kv_heads,
        D=width,
        Dv=value.shape[-1],
        places=places,
        dtype=dtype_name(key),
        packed=layout.packed,
        interpret=interpret.get(),
    )
    end = ops.derive(_end, key_bounds.causal_end(ops, layout))
    tokens = key, value, *end
    sums = ops.run(fp8.sum_tokens(spec), *tokens)
    return Rounded(*ops.run(fp8.round_tokens(spec), *tokens, *sums, *tiles))


@derived(lambda causal_end: [int32(causal_end.shape[0])])
def _end(ops, causal_end):
    """Return the end of the keys to which at least one query attends."""
    return [ops.to_int32(ops.xp.amax(causal_end, axis=-1).clip(0, None))]


def of_slots(layout: QueryLayout) -> Any:
    """Return the layout of queries whose indices refer to slots, for keys that `round_tokens` has
    moved to slots.
    """
    if layout.varlen is None:
        return layout
    tokens = layout.varlen.tokens
    return Places(tokens.position, tokens.place_start, packed=True)

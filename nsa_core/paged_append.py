"""Appends tokens to the pages of a cache with array operations, and reads pages.
The kernels that append in one launch are in `kernels_pallas`: `specs/append.py` and
`triton/paged_append.py`.
"""

from collections.abc import Callable
from typing import Any

from nsa_core import paged_layout, rounding
from nsa_core.array_ops import ArrayOps
from nsa_core.compress_params import CompressParams
from nsa_core.paged_layout import PagedArrays, Places
from nsa_core.types import Branches

KINDS = "key", "value"


def read(ops: ArrayOps, cache: PagedArrays, name: str, at: tuple) -> Any:
    """Return the entries of the array `name` at `(page, offset)` or `(page,)`, in the dtype of
    the cache.
    """
    found, scale = ops.take(getattr(cache, name), at), getattr(cache, f"{name}_scale", None)
    if scale is None:
        return found
    return rounding.restored(ops, found, scale.swapaxes(1, 2)[at], cache.dtype)


def append(
    ops: ArrayOps,
    phi: Callable[..., Any],
    cache: PagedArrays,
    key: Branches,
    value: Branches,
    page_table,
    lengths,
    cu_seqlens_q=None,
    params: tuple[CompressParams, CompressParams] = (None, None),
    slots=None,
    wrong=None,
    raw_is_there: bool = False,
) -> dict[str, Any]:
    """Write new tokens, and the compressed tokens that the new tokens complete, to the arrays of a
    cache.

    Return the arrays by name. In torch the arrays are modified in place. The shapes of the arrays
    determine the number of tokens per page.

    Args:
      phi: the framework's `apply_phi`.
      key .. slots: the checked arguments of `nsa_torch.append`.
      wrong: bool `[B]`, the rows whose compressed tokens become NaN. `wrong=None` means that no
        compressed token becomes NaN.
      raw_is_there: whether the new tokens are already in their pages.
    """
    config, arrays, count = cache.config, cache.tensors(), key.selected.shape[0]
    batch, raw = lengths.shape[0], "raw" if cache.separate else "selected"
    tokens = paged_layout.tokens_of(ops, lengths, cu_seqlens_q, count)

    def place(name: str, row, index) -> Places:
        pool, per_page = arrays[name].shape[:2]
        return paged_layout.places(page_table, row, index, per_page, pool)

    def write(name: str, at: Places, new) -> None:
        scale = arrays.get(f"{name}_scale")
        if scale is not None:
            new, factor = rounding.rounded(ops, new)
            scale = ops.put(scale.swapaxes(1, 2), at, factor)
            arrays[f"{name}_scale"] = scale.swapaxes(1, 2)
        arrays[name] = ops.put(arrays[name], at, new)

    at = place("selected_key", *tokens)
    if not raw_is_there:
        branches = {"selected": (key.selected, value.selected)}
        if cache.separate:
            branches["sliding"] = key.sliding, value.sliding
            branches["raw"] = key.compressed, value.compressed
        for branch, pair in branches.items():
            for kind, new in zip(KINDS, pair, strict=True):
                write(f"{branch}_{kind}", at, new)

    last = paged_layout.finished(ops, tokens, batch, config)
    row, position = (x[last.token] for x in tokens)
    back = ops.arange(row, config.compress_block) - (config.compress_block - 1)
    window = position[:, None] + back  # [K, l]
    taken = place(f"{raw}_key", row[:, None], window)
    into = place("compressed_key", row, position // config.compress_stride)
    into = into._replace(there=into.there & last.there)
    for kind, x, one in zip(KINDS, (key.compressed, value.compressed), params, strict=True):
        name, ring = f"{raw}_{kind}", arrays.get(f"recent_{kind}")
        windows = ops.take(arrays[name], (taken.page, taken.offset))  # [K, l, Hkv, .]
        if ring is not None:
            # Read a token of the call if it is one. Otherwise read the token in the ring if it
            # rounds to the token in the page. Otherwise read the token in the page.
            rows, length = ring.shape[:2]
            slot = (lambda row: row) if slots is None else slots.__getitem__
            scale = arrays[f"{name}_scale"].swapaxes(1, 2)[taken.page, taken.offset]
            stored = rounding.restored(ops, windows, scale, cache.dtype)
            kept = ring[slot(row).clip(0, rows - 1)[:, None], window % length]
            known = rounding.is_of(ops, kept, stored, scale)[..., None]
            token = last.token[:, None] + back
            begin = row * (count // batch) if cu_seqlens_q is None else cu_seqlens_q[row]
            of_call = (token >= begin[:, None])[..., None, None]
            windows = ops.xp.where(known, kept, stored)
            windows = ops.xp.where(of_call, x[token.clip(0)], windows)
            own = slot(tokens.row)
            newest = tokens.position >= lengths[tokens.row] - length
            there = at.there & newest & (own >= 0) & (own < rows)
            to = Places(own.clip(0, rows - 1), tokens.position.clip(0) % length, there)
            arrays[f"recent_{kind}"] = ops.put(ring, to, x)
        made = phi(windows[None], one, window[None, :, 0])[0]
        if wrong is not None:
            made = ops.xp.where(wrong[row][:, None, None], float("nan"), made)
        write(f"compressed_{kind}", into, made)
    return arrays

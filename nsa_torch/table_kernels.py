"""Derived steps of packed rows by kernels of Triton (`kernels_pallas.triton.tables`), a launch or
three in place of tens: on CUDA, where Triton can build them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.specs import work_items
from kernels_pallas.specs.tile import INTERVAL_ITEM_INTS, ROWS, WORK_ITEM_INTS
from kernels_pallas.triton import capability
from nsa_core import varlen
from nsa_core.steps import key_bounds, mosaic_backward, mosaic_forward
from nsa_torch import triton_ops
from nsa_torch.torch_ops import capability_of

MAX_NUMBERS = 2**14  # numbers that one program adds up
PITCH = 64  # of rows that kernels read: 256 bytes

type Made = Sequence[Tensor] | None  # None: by torch


def made(function: Callable[..., Any], device: torch.device, arrays, static) -> Made:
    """What a derived step gives, where a kernel can make it."""
    kernel = KERNELS.get(function)
    if kernel is None or device.type != "cuda" or not usable(device.index):
        return None
    return kernel(*arrays, **static)


@functools.cache
def usable(index: int | None) -> bool:
    """Whether kernels of Triton that multiply no matrices run on the GPU with this index."""
    return capability.copies_why_not(capability_of(index), torch.float32) is None


def _rows(like: Tensor, count: int, length: int) -> tuple[Tensor, list[Tensor]]:
    """`[count, pitch]`, and its rows `[1, length]`."""
    pitch = -(-length // PITCH) * PITCH
    out = torch.empty(count, pitch, dtype=torch.int32, device=like.device)
    return out, list(out[:, None, :length].unbind())


def _run(name: str, programs: int | tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    from kernels_pallas.triton import tables  # Triton is part of torch's CUDA builds only

    grid = programs if isinstance(programs, tuple) else (programs,)
    # Newer versions of Triton warn where it is not said.
    warps = min(max(sizes.get("ROOM", 0) // 256, 4), 16)
    options = {"enable_fp_fusion": False, "num_warps": warps}
    triton_ops.run(getattr(tables, name), grid, *arguments, **options, **sizes)


def _search(count: int, numbers: int, size: int = 256) -> tuple[int, dict[str, int]]:
    """Programs for `numbers` searches in `count` entries, and their sizes."""
    return -(-numbers // size), {"SIZE": size, "STEPS": count.bit_length()}


def _sequences(borders, *, capacity):
    if capacity.B != 1 or capacity.sequences > MAX_NUMBERS:
        return None
    config, room = capacity.config, 1 << (capacity.sequences - 1).bit_length()
    out, rows = _rows(borders, 5, capacity.sequences)
    sizes = {"UNIT": capacity.unit, "WINDOW": config.compress_block}
    sizes |= {"STRIDE": config.compress_stride, "ROOM": max(room, 2)}
    numbers = borders.shape[1], capacity.sequences, capacity.S, out.shape[1]
    _run("sequences", 1, borders, out, *numbers, **sizes)
    return rows


def _tokens(start, length, place, *, capacity):
    if capacity.B != 1:
        return None
    config, count = capacity.config, capacity.sequences
    out, rows = _rows(start, len(varlen.Tokens._fields), capacity.T)
    programs, sizes = _search(count, capacity.T)
    sizes |= {"BLOCK": config.compress_block, "STRIDE": config.compress_stride}
    numbers = capacity.T, capacity.S - capacity.T, count, out.shape[1]
    arrays = start, length, place, out
    _run("tokens", programs, *arrays, *numbers, **sizes, WINDOW=config.window)
    return rows


def _key_tiles(start, end, place, *, capacity):
    if capacity.B != 1:
        return None
    out, rows = _rows(start, 2, capacity.key_tiles)
    programs, sizes = _search(capacity.sequences, capacity.key_tiles)
    numbers = capacity.key_tiles, capacity.S, capacity.sequences, out.shape[1]
    _run("key_tiles", programs, start, end, place, out, *numbers, KEYS=ROWS, **sizes)
    return rows


def _places_of_keys(start, place, *, capacity):
    if capacity.B != 1:
        return None
    out, rows = _rows(start, 1, capacity.S)
    programs, sizes = _search(capacity.sequences, capacity.S)
    numbers = capacity.S, capacity.sequences
    _run("places_of_keys", programs, start, place, out, *numbers, **sizes)
    return rows


def _query_tiles(start, end, *, capacity, tokens):
    count, tiles = capacity.sequences, capacity.query_tiles(tokens)
    if capacity.B != 1 or count > MAX_NUMBERS:
        return None
    runs, _ = _rows(start, 3, count)
    room = {"ROOM": max(1 << (count - 1).bit_length(), 2)}
    numbers = count, capacity.T, capacity.S - capacity.T, runs.shape[1]
    _run("query_runs", 1, start, end, runs, *numbers, TOKENS=tokens, **room)
    out, rows = _rows(start, 2, tiles)
    programs, sizes = _search(count, tiles)
    numbers = tiles, capacity.T, count, runs.shape[1], out.shape[1]
    _run("query_tiles", programs, runs, out, *numbers, TOKENS=tokens, **sizes)
    return rows


def _candidates_of_tiles(first, last, position, first_token, end_token, *, spec, block):
    given = first, last, position, first_token, end_token
    if any(x.dtype != torch.int32 for x in given):
        return None
    tile, rows, tiles = spec.tile, spec.tiling.score_rows, spec.B * spec.tiles
    shapes = [tile.rows] * 2 + [rows] * 2
    found = [first.new_empty(spec.B, spec.tiles, x) for x in shapes]
    found.append(first.new_empty(spec.B, spec.tiles))
    sizes = {"TOKENS": tile.tokens, "GROUP": tile.group, "ROWS": tile.rows}
    sizes |= {"SCORE_ROWS": rows, "RATIO": spec.ratio, "BLOCK": block}
    sizes |= {"SIZE": 1 << (max(tile.rows, rows) - 1).bit_length()}
    _run("candidates_of_tiles", tiles, *given, *found, spec.T, spec.tiles, **sizes)
    return found


def _by_row(*arrays, tile, tiles):
    if len(arrays) > 2 or any(x.dtype != torch.int32 for x in arrays):
        return None
    batch, length = arrays[0].shape
    total, size = batch * tiles * tile.rows, 1024
    if not total:
        return None
    out, rows = _rows(arrays[0], len(arrays), total)
    sizes = {"TOKENS": tile.tokens, "GROUP": tile.group, "ROWS": tile.rows, "SIZE": size}
    programs = -(-total // size), len(arrays)
    numbers = length, tiles, total, out.shape[1]
    _run("by_row", programs, arrays[0], arrays[-1], out, *numbers, **sizes)
    return [x.view(batch, tiles, tile.rows) for x in rows]


def _interval_items(first, last, *, spec, split):
    parts, heads = spec.key_tiles * spec.consumers, spec.B * spec.Hkv
    columns = spec.consumers * len(work_items.PART_COLUMNS)
    if spec.key_tiles > MAX_NUMBERS or first.dtype != torch.int32 or last.dtype != torch.int32:
        return None
    tokens, tiles = spec.query_tile.tokens, spec.key_tiles
    span = -(-spec.query_tiles // split.segments)
    items = split.segments * split.tiles * heads
    of_parts = first.new_empty(spec.B, tiles, columns)
    before = first.new_empty(spec.B, tiles)
    firsts, counts = (first.new_empty(spec.B, spec.Hkv, tiles) for _ in range(2))
    table = first.new_empty(items, INTERVAL_ITEM_INTS)
    programs, sizes = _search(spec.T, parts, 128)
    numbers = spec.T, spec.query_tiles, parts
    grid = programs, spec.B
    sizes |= {"KEYS": ROWS, "TOKENS": tokens}
    _run("interval_parts", grid, first, last, of_parts, *numbers, **sizes)
    room = max(1 << (tiles - 1).bit_length(), 2)
    sizes = {"HEADS": spec.Hkv, "COLUMNS": columns, "ROOM": room}
    arrays = of_parts, before, firsts, counts
    _run("interval_partials", spec.B, *arrays, tiles, span, split.partials, **sizes)
    sizes = {"BATCH": spec.B, "HEADS": spec.Hkv, "TOKENS": tokens, "KEYS": spec.tile_keys}
    sizes |= {"COLUMNS": columns, "FIXED": WORK_ITEM_INTS, "INTS": INTERVAL_ITEM_INTS}
    sizes |= {"STREAMS": split.streams, "SIZE": 128}
    numbers = spec.T, tiles, span, split.partials, split.tiles, split.segments, items
    programs = -(-items // 128)
    _run("interval_items", programs, first, of_parts, before, table, *numbers, **sizes)
    return table, firsts, counts


KERNELS: dict[Callable[..., Any], Callable[..., Made]] = {
    varlen._sequences: _sequences,
    varlen._tokens: _tokens,
    varlen._key_tiles: _key_tiles,
    varlen._places_of_keys: _places_of_keys,
    varlen._query_tiles: _query_tiles,
    key_bounds.by_row: _by_row,
    mosaic_forward._candidates_of_tiles: _candidates_of_tiles,
    mosaic_backward._interval_items: _interval_items,
}
